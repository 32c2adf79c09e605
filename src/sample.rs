//! From logits to the next token: greedy, or drawn from a restricted distribution.
//!
//! A draw is keyed by (seed, position) and nothing else, so the same history with the same seed
//! gives the same token however the logits were computed. Order of the restrictions:
//! temperature, top-k, top-p of what top-k left, min-p; then one draw from what is left,
//! renormalized. Greedy and every ranking break ties by the lowest token id. A logit that is not
//! finite is an error with its token id, never a silent token 0.
//!
//! Each restriction keeps a prefix of the ranking, best token first, and a draw walks the ranking
//! too. So only as much of it is sorted as a draw looks at: sorting all 154,880 tokens of GLM-5.2
//! takes 4 ms. Weights are `exp` of the kernels, the same on every system, summed in f64: in f32
//! the sum over such a vocabulary of normally distributed logits lacked 5e-4 of itself, enough to
//! move a top-p cut. The order of every sum is defined: ascending token id over all tokens,
//! ranking order over a prefix.
//!
//! Tokens that only the prompt template may write can be banned: they are never chosen.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::kernels::exp;
use std::cmp::Ordering;

/// How to choose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Params {
    /// 0 is greedy; otherwise logits are divided by it. At most 100.
    pub temperature: f64,
    /// Keeps the shortest run of best tokens whose probabilities reach this; 1 keeps all.
    pub top_p: f64,
    /// Keeps this many best tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps tokens with at least this share of the best token's probability; 0 keeps all.
    pub min_p: f64,
    /// Key of all draws.
    pub seed: u64,
}

impl Params {
    /// Always the best token.
    pub const GREEDY: Params =
        Params { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 };

    /// Checks the ranges; the error names the parameter.
    pub fn validate(&self) -> Result<()> {
        let Params { temperature, top_p, min_p, .. } = *self;
        if !(0.0..=100.0).contains(&temperature) {
            bail!("temperature: expected a number from 0 to 100, found {temperature}");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            bail!("top_p: expected a number above 0 and at most 1, found {top_p}");
        }
        if !(0.0..=1.0).contains(&min_p) {
            bail!("min_p: expected a number from 0 to 1, found {min_p}");
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

/// Tokens that are sorted when a draw first looks at the ranking; four times as many each time it
/// looks further. The size changes speed only, never the draw.
const RANKED_FIRST: usize = 256;

/// Chooses tokens; keeps its buffers between calls.
pub struct Sampler {
    params: Params,
    /// Token ids that are never chosen.
    banned: Vec<u32>,
    /// Logits with the banned ones at −∞.
    logits: Vec<f32>,
    ranking: Ranking,
}

impl Sampler {
    /// A sampler that never chooses a token of `banned`.
    pub fn new(params: Params, banned: Vec<u32>) -> Result<Sampler> {
        params.validate()?;
        Ok(Sampler { params, banned, logits: Vec::new(), ranking: Ranking::default() })
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
        let sum =
            self.ranking.fill(&self.logits, self.logits[top as usize], self.params.temperature);
        let (count, sum) = self.restrict(sum);
        let target = uniform(self.params.seed, position as u64) * sum;
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
