//! From logits to the next token: greedy, or drawn from a restricted distribution.
//!
//! A draw is keyed by (seed, position) and nothing else, so the same history with the same seed
//! gives the same token however the logits were computed. Order of the restrictions:
//! temperature, top-k, top-p, min-p; then one draw from what is left, renormalized. Greedy and
//! every ranking break ties by the lowest token id. A logit that is not finite is an error with
//! its token id, never a silent token 0.
//!
//! Tokens that only the prompt template may write can be banned: they are never chosen.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::kernels::exp;

/// How to choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Params {
    /// 0 is greedy; otherwise logits are divided by it. At most 100.
    pub temperature: f32,
    /// Keeps the shortest run of best tokens whose probabilities reach this; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many best tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens with at least this share of the best token's probability; 0 keeps all.
    pub min_p: f32,
    /// Key of all draws.
    pub seed: u64,
}

impl Params {
    /// Always the best token.
    pub const GREEDY: Params =
        Params { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };

    /// Checks the ranges; the error names the parameter.
    pub fn validate(&self) -> Result<()> {
        let check = |name: &str, value: f32, low: f32, high: f32| match value {
            value if value >= low && value <= high => Ok(()),
            value => bail!("{name}: expected a number from {low} to {high}, found {value}"),
        };
        check("temperature", self.temperature, 0.0, 100.0)?;
        check("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)?;
        check("min_p", self.min_p, 0.0, 1.0)
    }
}

/// The largest logit's index, the lowest among equals.
pub fn argmax(logits: &[f32]) -> Result<u32> {
    check_finite(logits)?;
    best(logits.iter().copied())
}

fn check_finite(logits: &[f32]) -> Result<()> {
    match logits.iter().position(|logit| !logit.is_finite()) {
        Some(token) => bail!("the logit of token {token} is {}", logits[token]),
        None => Ok(()),
    }
}

/// Index of the largest value; −∞ marks values that are out.
fn best(values: impl Iterator<Item = f32>) -> Result<u32> {
    let mut best = (f32::NEG_INFINITY, None);
    for (index, value) in values.enumerate() {
        if value > best.0 {
            best = (value, Some(index as u32));
        }
    }
    match best.1 {
        Some(index) => Ok(index),
        None => bail!("no token is left to choose from"),
    }
}

/// Chooses tokens; keeps its buffers between calls.
pub struct Sampler {
    params: Params,
    /// Token ids that are never chosen.
    banned: Vec<u32>,
    /// Logits with the banned ones at −∞.
    logits: Vec<f32>,
    /// Candidates `(token, probability)`, best first.
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// A sampler that never chooses a token of `banned`.
    pub fn new(params: Params, banned: Vec<u32>) -> Result<Sampler> {
        params.validate()?;
        Ok(Sampler { params, banned, logits: Vec::new(), candidates: Vec::new() })
    }

    /// The token that follows `position` tokens with these `logits [V]`.
    pub fn sample(&mut self, logits: &[f32], position: usize) -> Result<u32> {
        check_finite(logits)?;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        for token in &self.banned {
            if let Some(logit) = self.logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let top = best(self.logits.iter().copied())?;
        if self.params.temperature == 0.0 {
            return Ok(top);
        }
        self.rank(self.logits[top as usize]);
        let sum: f32 = self.candidates.iter().map(|(_, p)| p).sum();
        let mut rest = uniform(self.params.seed, position as u64) * sum as f64;
        for (token, probability) in &self.candidates {
            rest -= *probability as f64;
            if rest < 0.0 {
                return Ok(*token);
            }
        }
        // Rounding may leave a sliver behind the last candidate.
        Ok(self.candidates.last().expect("the best token is always a candidate").0)
    }

    /// Fills the candidates: e^((logit − max) / temperature), ranked and cut.
    fn rank(&mut self, max: f32) {
        let Params { temperature, top_p, top_k, min_p, .. } = self.params;
        let candidates = &mut self.candidates;
        candidates.clear();
        for (token, logit) in self.logits.iter().enumerate() {
            let probability = exp((logit - max) / temperature);
            // The best token has exactly 1, so min-p is a bound on the unnormalized value.
            if probability > 0.0 && probability >= min_p {
                candidates.push((token as u32, probability));
            }
        }
        candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if top_k > 0 {
            candidates.truncate(top_k);
        }
        if top_p < 1.0 {
            let target = candidates.iter().map(|(_, p)| p).sum::<f32>() * top_p;
            let mut reached = 0.0;
            let count = candidates.iter().take_while(|(_, probability)| {
                let short = reached < target;
                reached += probability;
                short
            });
            let count = count.count().max(1);
            candidates.truncate(count);
        }
    }
}

/// A number in [0, 1) with 53 random bits, a function of seed and position alone: two rounds of
/// the SplitMix64 finalizer.
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (mix(seed ^ mix(position)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(params: Params) -> Sampler {
        Sampler::new(params, Vec::new()).unwrap()
    }

    const PLAIN: Params = Params { temperature: 1.0, ..Params::GREEDY };

    #[test]
    fn non_finite_logits_are_an_error_and_never_token_0() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (logits, token) in [
            ([nan, 1.0, 2.0], 0),
            ([1.0, nan, 2.0], 1),
            ([nan, nan, nan], 0),
            ([0.0, 1.0, inf], 2),
            ([-inf, -inf, -inf], 0),
        ] {
            for params in [Params::GREEDY, PLAIN] {
                let error = sampler(params).sample(&logits, 0).unwrap_err().to_string();
                assert!(error.contains(&format!("logit of token {token} is")), "{error}");
            }
            assert!(argmax(&logits).is_err());
        }
    }

    #[test]
    fn ties_choose_the_lowest_id() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]).unwrap(), 1);
        let params = Params { top_k: 1, ..PLAIN };
        assert_eq!(sampler(params).sample(&[1.0, 3.0, 3.0], 5).unwrap(), 1);
    }

    #[test]
    fn banned_tokens_are_never_chosen() {
        let mut greedy = Sampler::new(Params::GREEDY, vec![1, 99]).unwrap();
        assert_eq!(greedy.sample(&[1.0, 9.0, 2.0], 0).unwrap(), 2);
        let mut all = Sampler::new(PLAIN, vec![0, 1]).unwrap();
        assert!(all.sample(&[1.0, 2.0], 0).is_err());
        assert!((0..500).all(|i| greedy.sample(&[1.0, 9.0, 1.0], i).unwrap() != 1));
    }

    /// Chi-square of 40,000 draws against probabilities computed by hand from the logits.
    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0, 2f32.ln(), 5f32.ln(), 2f32.ln()]; // 0.1, 0.2, 0.5, 0.2
        let mut sampler = sampler(Params { seed: 7, ..PLAIN });
        let mut counts = [0.0f64; 4];
        let n = 40_000;
        for position in 0..n {
            counts[sampler.sample(&logits, position).unwrap() as usize] += 1.0;
        }
        let expected = [0.1, 0.2, 0.5, 0.2].map(|p| p * n as f64);
        let chi: f64 = counts.iter().zip(expected).map(|(c, e)| (c - e).powi(2) / e).sum();
        assert!(chi < 16.27, "chi-square {chi} with 3 degrees of freedom exceeds p = 0.001");
    }

    /// Temperature ½ squares the ratios: 1 : 4 instead of 1 : 2.
    #[test]
    fn temperature_divides_the_logits() {
        let mut sampler = sampler(Params { temperature: 0.5, seed: 3, ..PLAIN });
        let ones = (0..20_000).filter(|i| sampler.sample(&[0.0, 2f32.ln()], *i).unwrap() == 1);
        let share = ones.count() as f64 / 20_000.0;
        assert!((share - 0.8).abs() < 0.012, "{share}");
    }

    /// 0.5, 0.2, 0.2, 0.1: a cut that is reached exactly takes no more; one above it does.
    #[test]
    fn top_p_keeps_the_shortest_prefix_that_reaches_it() {
        let logits = [0.0, 2f32.ln(), 5f32.ln(), 2f32.ln()];
        let kept = |params: Params| {
            let mut sampler = sampler(params);
            let mut seen: Vec<u32> =
                (0..2000).map(|i| sampler.sample(&logits, i).unwrap()).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(kept(Params { top_p: 0.49, ..PLAIN }), [2]);
        assert_eq!(kept(Params { top_p: 0.6, ..PLAIN }), [1, 2]);
        assert_eq!(kept(Params { top_p: 0.8, ..PLAIN }), [1, 2, 3]);
        assert_eq!(kept(Params { top_p: 0.95, ..PLAIN }), [0, 1, 2, 3]);
        assert_eq!(kept(Params { top_k: 2, ..PLAIN }), [1, 2]);
        assert_eq!(kept(Params { min_p: 0.3, ..PLAIN }), [1, 2, 3]);
        assert_eq!(kept(Params { min_p: 0.5, ..PLAIN }), [2]);
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_only() {
        let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.3).collect();
        let draws = |seed| {
            let mut sampler = sampler(Params { seed, ..PLAIN });
            let backwards: Vec<u32> =
                (0..64).rev().map(|i| sampler.sample(&logits, i).unwrap()).collect();
            let mut forwards: Vec<u32> =
                (0..64).map(|i| sampler.sample(&logits, i).unwrap()).collect();
            forwards.reverse();
            assert_eq!(backwards, forwards);
            forwards
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        for (params, name) in [
            (Params { temperature: -1.0, ..PLAIN }, "temperature"),
            (Params { temperature: f32::NAN, ..PLAIN }, "temperature"),
            (Params { top_p: 0.0, ..PLAIN }, "top_p"),
            (Params { top_p: 1.1, ..PLAIN }, "top_p"),
            (Params { min_p: 2.0, ..PLAIN }, "min_p"),
        ] {
            let error = Sampler::new(params, Vec::new()).err().unwrap().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }
}
