//! How long until an expert is needed again: the one estimate that decides what is evicted, in the
//! store and in the replay of a trace. Refuses to know bytes, slots or what is in memory.
//!
//! A round visits every sparse layer once. An expert whose layer comes in d layers, and which each
//! visit of that layer needs with probability P, is expected in
//!
//! wait = d + L · (1 − P) / P
//!
//! layers, of L in a round. Among T rows at once, P = 1 − (1 − p)ᵀ for the probability p that one
//! row chooses it: a long prompt needs nearly all of them in every round, and then what was just
//! passed is furthest away.
//!
//! p is not modelled but counted. Experts are alike that were chosen as long ago, as often lately
//! and as often for longer, each to a factor of √2; the share of such experts that the next row
//! chose is the p of those that are like it now. So the recency of a text that repeats itself, the
//! popularity of a skewed one and the break between two topics are all learned within some tokens,
//! with no weight to be set. `oracle/bench/README.md` has what it is worth.

#![forbid(unsafe_code)]

use super::ExpertId;

/// Rows after which a choice counts half: lately, and for longer.
const HALF_LIVES: [f32; 2] = [64.0, 400.0];
/// Steps of √2 in which ages and averages are told apart: up to 1,000 rows, down to 1/180.
const AGES: usize = 20;
const AVERAGES: usize = 16;
/// Rows of experts that are alike which count as much as the belief before them, that an expert is
/// chosen as often as lately.
const BELIEF_ROWS: f32 = 30.0;
/// Rows of experts that are alike behind which the older ones fade.
const ALIKE_ROWS_MAX: f32 = 20_000.0;
/// Most rows of a visit to learn from: among more, an expert's age changes too much.
const LEARN_ROWS_MAX: usize = 8;
/// Least p: keeps the wait finite.
const P_MIN: f32 = 1e-4;
/// Rows by which what earlier runs chose must outnumber this to count for more than the belief
/// that all experts of a layer are equal.
const PRIOR_ROWS: f32 = 500.0;

/// What the estimate goes by; the store has the default, all others are for comparison.
#[derive(Clone, Copy)]
pub struct Rule {
    /// p as a mean of the two averages, with this weight of the one that counts what was lately;
    /// `None`: p as it is counted.
    pub lately: Option<f32>,
    /// Whether d counts, or all layers are as far.
    pub has_distance: bool,
}

impl Default for Rule {
    fn default() -> Rule {
        Rule { lately: None, has_distance: true }
    }
}

/// What is remembered of one expert.
#[derive(Clone, Copy)]
struct Expert {
    /// Exponential averages of the share of rows that chose it.
    averages: [f32; 2],
    /// Rows since one chose it.
    age: u32,
}

#[derive(Default)]
struct Layer {
    experts: Vec<Expert>,
    /// Sparse layers before it.
    place: usize,
    /// Rows of rounds that it knows of.
    rows: usize,
}

/// The estimate's memory. It grows with the layers that are made known, and not with time.
pub struct Policy {
    rule: Rule,
    layers: Vec<Layer>,
    /// L
    round: usize,
    /// Of the rows of experts that are alike, how many chose them, and how many there were.
    alike: Vec<[f32; 2]>,
    /// The layer that was visited last and its rows.
    now: (usize, usize),
    /// Rows of all rounds.
    rows: usize,
}

impl Policy {
    /// Knows no layer yet.
    pub fn new(rule: Rule) -> Policy {
        let alike = vec![[0.0; 2]; AGES * AVERAGES * AVERAGES];
        Policy { rule, layers: Vec::new(), round: 0, alike, now: (0, 1), rows: 0 }
    }

    /// Makes a sparse layer and its number of experts known, once; the later ones cost nothing.
    pub fn make_known(&mut self, layer: usize, experts: usize) {
        if self.layers.get(layer).is_some_and(|known| known.experts.len() >= experts) {
            return;
        }
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, Layer::default);
        }
        self.layers[layer].experts.resize(experts, Expert { averages: [0.0; 2], age: u32::MAX });
        self.layers[layer].rows = self.rows;
        self.round = 0;
        for layer in &mut self.layers {
            layer.place = self.round;
            self.round += !layer.experts.is_empty() as usize;
        }
    }

    /// Starts a layer from the `choices` of each of its experts in earlier runs, where every row
    /// made `top_k`. Where there are few, all experts are nearly equal.
    pub fn learn(&mut self, layer: usize, choices: &[u64], top_k: usize) {
        self.make_known(layer, choices.len());
        let rows = choices.iter().sum::<u64>() as f32 / top_k as f32;
        let equal = PRIOR_ROWS * top_k as f32 / choices.len() as f32;
        for (expert, choices) in self.layers[layer].experts.iter_mut().zip(choices) {
            expert.averages = [(*choices as f32 + equal) / (rows + PRIOR_ROWS); 2];
        }
    }

    /// `rows` rows of `layer` chose experts: each of them in ascending order, with the number of
    /// rows that chose it.
    pub fn visit(
        &mut self,
        layer: usize,
        rows: usize,
        mut chosen: impl Iterator<Item = (u32, usize)>,
    ) {
        self.now = (layer, rows);
        if self.layers[layer].place == 0 {
            self.layers.iter_mut().for_each(|layer| layer.pass_by(self.rows));
            self.rows += rows;
        }
        self.layers[layer].rows += rows;
        let kept = kept(rows);
        let mut next = chosen.next();
        for (e, expert) in self.layers[layer].experts.iter_mut().enumerate() {
            let mut count = 0;
            if let Some((_, rows)) = next.filter(|(next, _)| *next as usize == e) {
                count = rows;
                next = chosen.next();
            }
            if rows <= LEARN_ROWS_MAX {
                let alike = &mut self.alike[expert.kind()];
                alike[0] += count as f32;
                alike[1] += rows as f32;
                if alike[1] > ALIKE_ROWS_MAX {
                    *alike = alike.map(|rows| rows / 2.0);
                }
            }
            let share = count as f32 / rows as f32;
            for (average, kept) in expert.averages.iter_mut().zip(kept) {
                *average = *average * kept + share * (1.0 - kept);
            }
            // Of several rows, the last that chose it is about so long ago.
            expert.age = match count {
                0 => expert.age.saturating_add(rows as u32),
                _ => (rows / (count + 1)) as u32,
            };
        }
    }

    /// Layers until `id` is expected to be needed, now that the layer visited last has chosen.
    pub fn wait(&self, (layer, e): ExpertId) -> f32 {
        let (now, rows) = self.now;
        let Layer { experts, place, .. } = &self.layers[layer];
        let p = self.probability(&experts[e]).clamp(P_MIN, 1.0);
        let missed = (1.0 - p).powi(rows as i32);
        let rounds = missed / (1.0 - missed);
        let now = self.layers.get(now).map_or(0, |layer| layer.place);
        let distance = if *place > now { place - now } else { place + self.round - now };
        let distance = if self.rule.has_distance { distance as f32 } else { 0.0 };
        distance + self.round as f32 * rounds
    }

    /// p
    fn probability(&self, expert: &Expert) -> f32 {
        let [lately, longer] = expert.averages;
        if let Some(weight) = self.rule.lately {
            return weight * lately + (1.0 - weight) * longer;
        }
        let [chosen, rows] = self.alike[expert.kind()];
        (chosen + BELIEF_ROWS * lately) / (rows + BELIEF_ROWS)
    }
}

/// What `rows` rows leave of the averages.
fn kept(rows: usize) -> [f32; 2] {
    HALF_LIVES.map(|half_life| (-(rows as f32) / half_life).exp2())
}

impl Layer {
    /// Ages by the rows, of all that there were, that were run without this layer: a draft head
    /// that rests is not about to be visited. What is alike learns nothing from them.
    fn pass_by(&mut self, all: usize) {
        let missed = all.saturating_sub(self.rows);
        if missed == 0 {
            return;
        }
        self.rows = all;
        let kept = kept(missed);
        for Expert { averages, age } in &mut self.experts {
            averages.iter_mut().zip(kept).for_each(|(average, kept)| *average *= kept);
            *age = age.saturating_add(u32::try_from(missed).unwrap_or(u32::MAX));
        }
    }
}

impl Expert {
    /// Which experts it is like. The leading bits of a float count steps of about √2.
    fn kind(&self) -> usize {
        let step = |x: f32| (x.to_bits() >> 22) as usize;
        let age = step(self.age as f32 + 1.0) - step(1.0);
        let [lately, longer] =
            self.averages.map(|x| step(1.0).saturating_sub(step(x)).min(AVERAGES - 1));
        (age.min(AGES - 1) * AVERAGES + lately) * AVERAGES + longer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two experts in layers 1, 3 and 4; layer 3 was just visited. By hand: with the slow average
    /// alone, one choice in one row leaves p = 1 − 2^(−1/400) = 0.00173136, so the wait of that
    /// expert is 3 · (1/p − 1) = 1729.74 rounds' layers and d; the other one's p is the least.
    #[test]
    fn a_wait_is_the_way_to_the_layer_and_the_rounds_that_pass_it_by() {
        let rule = Rule { lately: Some(0.0), has_distance: true };
        let mut policy = Policy::new(rule);
        [4, 1, 3].into_iter().for_each(|layer| policy.make_known(layer, 2));
        for layer in [1, 4, 3] {
            policy.visit(layer, 1, [(1, 1)].into_iter());
        }
        for (layer, distance) in [(4, 1.0), (1, 2.0), (3, 3.0)] {
            let wait = policy.wait((layer, 1));
            assert!((wait - distance - 1729.74).abs() < 1.0, "layer {layer}: {wait}");
            assert!((policy.wait((layer, 0)) - distance - 29_997.0).abs() < 30.0);
        }
        // Ten rows, of which five chose it: p = 0.5 · (1 − 2^(−1/40)) + 0.00173136 · 2^(−1/40)
        // = 0.0102909, and one of the next ten does with P = 0.098272.
        policy.visit(3, 10, [(1, 5)].into_iter());
        assert!((policy.wait((3, 1)) - 3.0 - 27.5275).abs() < 0.01, "{}", policy.wait((3, 1)));
    }

    /// Expert 1 of both layers came in one row, then 64 rows ran without layer 1. By hand, with the
    /// fast average alone: p = (1 − 2^(−1/64)) / 2 and a wait of 2 · (1/p − 1) layers; before those
    /// rows p was twice that.
    #[test]
    fn experts_of_a_layer_that_rests_are_needed_ever_less() {
        let mut policy = Policy::new(Rule { lately: Some(1.0), has_distance: false });
        [0, 1].into_iter().for_each(|layer| policy.make_known(layer, 2));
        [0, 1].into_iter().for_each(|layer| policy.visit(layer, 1, [(1, 1)].into_iter()));
        assert!((policy.wait((1, 1)) - 183.67).abs() < 0.1, "{}", policy.wait((1, 1)));
        for _ in 0..65 {
            policy.visit(0, 1, [(1, 1)].into_iter());
        }
        assert!((policy.wait((1, 1)) - 369.33).abs() < 0.2, "{}", policy.wait((1, 1)));
    }

    /// Every expert comes in two rows behind each other, at random times: one that has come once
    /// comes again, whatever the averages of the others.
    #[test]
    fn recency_is_learned_where_it_says_more_than_frequency() {
        let mut policy = Policy::new(Rule::default());
        policy.make_known(0, 64);
        let mut visit = |e: u32| policy.visit(0, 1, [(e, 1)].into_iter());
        let mut random = 1u32;
        for _ in 0..2000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            visit(random >> 26);
            visit(random >> 26);
        }
        let next = (random >> 26) ^ 1;
        visit(next);
        let wait = policy.wait((0, next as usize));
        assert!(wait < 2.0, "{wait}");
        for other in (0..64).filter(|e| *e != next as usize) {
            assert!(policy.wait((0, other)) > 5.0 * wait, "{other}: {}", policy.wait((0, other)));
        }
    }

    /// 1000 choices of one expert among 500 rows of two each: p = (1000 + 500 · 2/4) / (500 + 500),
    /// limited to 1, against 250 / 1000.
    #[test]
    fn earlier_runs_set_the_start_and_a_short_history_changes_little() {
        let mut policy = Policy::new(Rule { lately: Some(0.5), has_distance: false });
        policy.learn(0, &[1000, 0, 0, 0], 2);
        assert!(policy.wait((0, 0)) < 1e-3);
        assert!((policy.wait((0, 1)) - 3.0).abs() < 1e-3, "{}", policy.wait((0, 1)));
        policy.learn(0, &[10, 0, 0, 0], 2);
        // (10 + 250) / 505 and 250 / 505
        assert!((policy.wait((0, 0)) - (505.0 / 260.0 - 1.0)).abs() < 1e-3);
        assert!((policy.wait((0, 1)) - (505.0 / 250.0 - 1.0)).abs() < 1e-3);
    }
}
