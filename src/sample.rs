//! From logits to the next token: greedy, or drawn from a restricted distribution. Order of the
//! steps: repetition penalty, presence and frequency penalties, logit bias; banned tokens and those
//! a grammar does not allow go out; temperature, top-k, top-p of what top-k left, min-p; then one
//! draw from what is left, renormalized.
//!
//! A draw is keyed by (seed, position) and nothing else, so the same history with the same seed
//! gives the same token however the logits were computed. Greedy and every ranking break ties by
//! the lowest token id. A logit that is not finite is an error with its token id, never a silent
//! token 0.
//!
//! Penalties depend on the tokens of the timeline alone and are found anew for each draw, so a
//! sampler may be asked about any timeline in any order, drafted ones too. Counting 8,192 tokens
//! adds 35 µs to a draw, which takes 200 µs over the 154,880 logits of GLM-5.2 when it is greedy.
//!
//! Each restriction keeps a prefix of the ranking, best token first, and a draw walks the ranking
//! too. So only as much of it is sorted as a draw looks at: sorting all 154,880 tokens of GLM-5.2
//! takes 4 ms. Weights are `exp` of the kernels, the same on every system, summed in f64: in f32
//! the sum over such a vocabulary of normally distributed logits lacked 5e-4 of itself, enough to
//! move a top-p cut. The order of every sum is defined: ascending token id over all tokens,
//! ranking order over a prefix.
//!
//! Tokens that only the prompt template may write can be banned: they are never chosen, whatever
//! their bias. [`log_probabilities`] knows none of this: it tells the model's own distribution.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::kernels::exp;
use std::cmp::Ordering;

/// How to choose.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// 0 is greedy; otherwise logits are divided by it. At most 100.
    pub temperature: f64,
    /// Keeps the shortest run of best tokens whose probabilities reach this; 1 keeps all.
    pub top_p: f64,
    /// Keeps this many best tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens with at least this share of the best token's probability; 0 keeps all.
    pub min_p: f64,
    /// For each token of the timeline, however often it is there: a positive logit is divided by
    /// this, a negative one multiplied (as in Keskar et al., arXiv:1909.05858, and in
    /// transformers). From 0.01 to 100; 1 is off.
    pub repetition_penalty: f64,
    /// Taken from the logit of each token of the reply; from −2 to 2.
    pub presence_penalty: f64,
    /// Taken from the logit of each token of the reply, times the number of times it is there;
    /// from −2 to 2.
    pub frequency_penalty: f64,
    /// Token and what is added to its logit, from −100 to 100; entries of one token add up.
    pub logit_bias: Vec<(u32, f64)>,
    /// Key of all draws.
    pub seed: u64,
}

impl Params {
    /// Always the best token.
    pub const GREEDY: Params = Params {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        seed: 0,
    };

    /// Checks the ranges, and the tokens against a vocabulary of this size; the error names the
    /// parameter.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        let top_p = self.top_p;
        if !(top_p > 0.0 && top_p <= 1.0) {
            bail!("top_p: expected a number above 0 and at most 1, found {top_p}");
        }
        for (name, value, range) in [
            ("temperature", self.temperature, 0.0..=100.0),
            ("min_p", self.min_p, 0.0..=1.0),
            ("repetition_penalty", self.repetition_penalty, 0.01..=100.0),
            ("presence_penalty", self.presence_penalty, -2.0..=2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0..=2.0),
        ] {
            if !range.contains(&value) {
                let (low, high) = range.into_inner();
                bail!("{name}: expected a number from {low} to {high}, found {value}");
            }
        }
        for (token, bias) in &self.logit_bias {
            if *token as usize >= vocab_size {
                bail!("logit_bias: expected token ids below {vocab_size}, found {token}");
            }
            if !(-100.0..=100.0).contains(bias) {
                bail!("logit_bias: expected a number from -100 to 100, found {bias}");
            }
        }
        Ok(())
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

/// What chooses the tokens of a reply, one after the other.
pub trait Choose {
    /// The reply starts at this position of the timeline.
    fn start_reply(&mut self, position: usize);
    /// The token that follows the timeline `tokens`, by the `logits [V]` after its last one.
    fn choose(&mut self, logits: &[f32], tokens: &[u32]) -> Result<u32>;
    /// What it would choose if the model had these logits; a guess, of which it keeps nothing.
    fn guess(&mut self, logits: &[f32], _tokens: &[u32]) -> Result<u32> {
        argmax(logits)
    }
    /// Tokens that it is likely to be forced to choose next, at most `most`; none if there is a
    /// choice.
    fn forced(&mut self, _most: usize) -> Result<Vec<u32>> {
        Ok(Vec::new())
    }
}

impl Choose for Sampler {
    fn start_reply(&mut self, position: usize) {
        self.reply_start = position;
    }

    fn choose(&mut self, logits: &[f32], tokens: &[u32]) -> Result<u32> {
        self.sample(logits, tokens, None)
    }

    /// A draw is made with the number that belongs to its position. So a draft is drawn with the
    /// number that the token itself will be drawn with, and where head and model agree in their
    /// distributions, they agree in the token, not only where it is the likeliest one.
    fn guess(&mut self, logits: &[f32], tokens: &[u32]) -> Result<u32> {
        self.sample(logits, tokens, None)
    }
}

/// Tokens that are sorted when a draw first looks at the ranking; four times as many each time it
/// looks further. The size changes speed only, never the draw.
const RANKED_FIRST: usize = 256;

/// Chooses tokens; keeps its buffers between calls.
pub struct Sampler {
    params: Params,
    /// Token ids that are never chosen.
    banned: Vec<u32>,
    /// Position where the reply starts; what is before it is the prompt. Presence and frequency
    /// penalties count the tokens from here on.
    reply_start: usize,
    /// Logits `[V]` after the penalties and biases, with those that are out at −∞.
    logits: Vec<f32>,
    /// `[V]`, all 0 between calls: how often each token is in the reply.
    counts: Vec<u32>,
    ranking: Ranking,
}

impl Sampler {
    /// A sampler over a vocabulary of this size that never chooses a token of `banned`.
    pub fn new(params: Params, vocab_size: usize, banned: Vec<u32>) -> Result<Sampler> {
        params.validate(vocab_size)?;
        let (logits, counts) = (Vec::with_capacity(vocab_size), vec![0; vocab_size]);
        Ok(Sampler { params, banned, reply_start: 0, logits, counts, ranking: Ranking::default() })
    }

    /// The token that follows the timeline `tokens`, by the `logits [V]` after its last one. Only
    /// tokens whose bit is set in `allowed` are chosen: token t is bit t % 64 of word t / 64, and
    /// words that are missing allow none.
    ///
    /// # Errors
    /// Another vocabulary, a logit that is not finite, no token left.
    pub fn sample(
        &mut self,
        logits: &[f32],
        tokens: &[u32],
        allowed: Option<&[u64]>,
    ) -> Result<u32> {
        let (found, vocab) = (logits.len(), self.counts.len());
        if found != vocab {
            bail!("expected logits of {vocab} tokens, found {found}");
        }
        check_finite(logits)?;
        self.adjust(logits, tokens);
        self.exclude(allowed);
        let top = best(self.logits.iter().copied())?;
        if self.params.temperature == 0.0 {
            return Ok(top);
        }
        let sum =
            self.ranking.fill(&self.logits, self.logits[top as usize], self.params.temperature);
        let (count, sum) = self.restrict(sum);
        let target = uniform(self.params.seed, tokens.len() as u64) * sum;
        let mut reached = 0.0;
        for rank in 0..count {
            let (token, weight) = self.ranking.at(rank);
            reached += weight;
            if reached > target {
                return Ok(token);
            }
        }
        // Rounding may leave a sliver behind the last candidate.
        Ok(self.ranking.at(count - 1).0)
    }

    /// Penalties and biases, each rounded to f32.
    fn adjust(&mut self, logits: &[f32], tokens: &[u32]) {
        let Params { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.params;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        let in_range = |token: &&u32| (**token as usize) < logits.len();
        if repetition_penalty != 1.0 {
            for token in tokens.iter().filter(in_range) {
                // From the model's logit each time: a token that is there twice counts once.
                let logit = logits[*token as usize] as f64;
                let penalized = match logit > 0.0 {
                    true => logit / repetition_penalty,
                    false => logit * repetition_penalty,
                };
                self.logits[*token as usize] = finite(penalized);
            }
        }
        if presence_penalty != 0.0 || frequency_penalty != 0.0 {
            let reply = tokens.get(self.reply_start..).unwrap_or_default();
            reply.iter().filter(in_range).for_each(|token| self.counts[*token as usize] += 1);
            for token in reply.iter().filter(in_range) {
                let count = std::mem::take(&mut self.counts[*token as usize]);
                if count > 0 {
                    let logit = &mut self.logits[*token as usize];
                    let penalty = presence_penalty + frequency_penalty * count as f64;
                    *logit = finite(*logit as f64 - penalty);
                }
            }
        }
        for (token, bias) in &self.params.logit_bias {
            let logit = &mut self.logits[*token as usize];
            *logit = finite(*logit as f64 + bias);
        }
    }

    /// Puts the logits of banned tokens, and of those that are not allowed, at −∞.
    fn exclude(&mut self, allowed: Option<&[u64]>) {
        for token in &self.banned {
            if let Some(logit) = self.logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let Some(allowed) = allowed else { return };
        let words = allowed.iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in self.logits.chunks_mut(64).zip(words) {
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// How many of the best candidates the parameters keep, at least one, and the sum of their
    /// weights; `sum` is that of all.
    fn restrict(&mut self, sum: f64) -> (usize, f64) {
        let Params { top_p, top_k, min_p, .. } = self.params;
        let mut kept = (self.ranking.candidates.len(), sum);
        if top_k > 0 && top_k < kept.0 {
            kept = self.ranking.prefix(top_k, |_, _| true);
        }
        if top_p < 1.0 {
            let target = top_p * kept.1;
            kept = self.ranking.prefix(kept.0, |reached, _| reached < target);
        }
        if min_p > 0.0 {
            // The best token has weight 1, so a weight is a share of the best.
            kept = self.ranking.prefix(kept.0, |_, weight| weight >= min_p);
        }
        kept
    }
}

/// As f32, the largest one for what is beyond it: only tokens that are out are at −∞.
fn finite(logit: f64) -> f32 {
    logit.clamp(f32::MIN as f64, f32::MAX as f64) as f32
}

/// The natural logarithm of the probability of `chosen` after these `logits [V]`; the `top_n` most
/// likely tokens with theirs go to `top`, the best first, of equals the lowest id.
///
/// The distribution is the model's own, softmax of the logits as they are: no temperature, penalty,
/// bias, ban or grammar. Errors: a logit that is not finite, `chosen` outside the vocabulary.
pub fn log_probabilities(
    logits: &[f32],
    chosen: u32,
    top_n: usize,
    top: &mut Vec<(u32, f64)>,
) -> Result<f64> {
    check_finite(logits)?;
    let Some(chosen) = logits.get(chosen as usize) else {
        bail!("expected a token id below {}, found {chosen}", logits.len());
    };
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|logit| exp((*logit as f64 - max) as f32) as f64).sum();
    let log_sum = max + sum.ln();
    top.clear();
    for (token, logit) in logits.iter().enumerate() {
        let value = *logit as f64 - log_sum;
        // Nearly every token fails at the last place, so this is one comparison each.
        let rank = top.iter().rposition(|(_, better)| *better >= value).map_or(0, |last| last + 1);
        if rank < top_n {
            top.truncate(top_n - 1);
            top.insert(rank, (token as u32, value));
        }
    }
    Ok(*chosen as f64 - log_sum)
}

/// The tokens of one distribution, best first as far as they have been looked at. The logit ranks
/// them, not the weight: two logits may round to one weight.
#[derive(Default)]
struct Ranking {
    /// Every token with a weight above 0.
    candidates: Vec<Candidate>,
    /// This many of them are the best ones in order; the others follow in any order.
    sorted: usize,
}

#[derive(Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
    /// e^((logit − max) / temperature): 1 for the best token.
    weight: f32,
}

impl Candidate {
    /// Better first; of equals the lowest id.
    fn order(&self, other: &Candidate) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.token.cmp(&other.token))
    }
}

impl Ranking {
    /// Takes the distribution of these `logits [V]` and returns the sum of the weights.
    fn fill(&mut self, logits: &[f32], max: f32, temperature: f64) -> f64 {
        self.candidates.clear();
        self.sorted = 0;
        let mut sum = 0.0;
        for (token, logit) in logits.iter().enumerate() {
            let weight = exp(((*logit as f64 - max as f64) / temperature) as f32);
            if weight > 0.0 {
                // Adding 0 makes −0 the 0 that it ties with.
                let logit = *logit + 0.0;
                self.candidates.push(Candidate { token: token as u32, logit, weight });
                sum += weight as f64;
            }
        }
        sum
    }

    /// Token and weight of the candidate at `rank`, 0 the best.
    fn at(&mut self, rank: usize) -> (u32, f64) {
        while self.sorted <= rank {
            let rest = &mut self.candidates[self.sorted..];
            let batch = (self.sorted * 3).max(RANKED_FIRST).min(rest.len());
            if batch < rest.len() {
                rest.select_nth_unstable_by(batch, Candidate::order);
            }
            rest[..batch].sort_unstable_by(Candidate::order);
            self.sorted += batch;
        }
        let Candidate { token, weight, .. } = self.candidates[rank];
        (token, weight as f64)
    }

    /// The longest prefix of at most `count` candidates whose members `keeps` lets in, told the
    /// sum before a member and its weight. Returns its length and sum; the best is always in.
    fn prefix(&mut self, count: usize, keeps: impl Fn(f64, f64) -> bool) -> (usize, f64) {
        let mut sum = self.at(0).1;
        for rank in 1..count {
            let weight = self.at(rank).1;
            if !keeps(sum, weight) {
                return (rank, sum);
            }
            sum += weight;
        }
        (count, sum)
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
mod tests;
