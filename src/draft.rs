//! Drafts: tokens that are guessed, run together with the next one, and kept as far as the model
//! would have chosen them itself.
//!
//! This file owns where guesses come from that need no model (the session's own text), and how many
//! are worth their cost. It never decides a token.
//!
//! A forward pass over one token and k drafts takes longer than one over the token alone: on a cold
//! store the drafts want experts of their own. With a_i the share of accepted drafts at place i, c
//! the time of one guess and t(n) the time of a pass over n rows, k drafts give
//! 1 + a_1 + a_1·a_2 + … tokens in t(k + 1) + k·c. All of these are measured while running, and the
//! best k is taken, 0 included. A source that does not pay is asked again now and then, so seldom
//! that it costs little: text changes, and so does what is in memory.

#![forbid(unsafe_code)]

use std::time::Duration;

/// Most drafts of one pass.
pub const DRAFTS_MAX: usize = 15;
/// Most that are taken unasked: acceptance falls with each.
const DRAFTS_AUTO_MAX: usize = 5;
/// Weight of a new draft in the running share of right ones.
const NEW: f64 = 0.1;
/// Passes without drafts between two trials of a source that does not pay; doubled after each in
/// vain, up to the second. At twice the time of a pass, a trial in 128 costs less than 1 %.
const PAUSE_PASSES: [u32; 2] = [16, 128];
/// Drafts must promise this much more tokens a second: measurements are noisy.
const GAIN_MIN: f64 = 1.03;
/// Lengths of the text's end that are looked for in what came before, longest first.
const MATCH_TOKENS: [usize; 3] = [4, 3, 2];

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The model's own draft head.
    Head,
    /// What followed the same tokens earlier in the text.
    Lookup,
    /// The only way on that a grammar leaves.
    Grammar,
}

/// What drafting did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Drafts that were run.
    pub proposed: u64,
    /// Those that the model would have chosen.
    pub accepted: u64,
    /// Forward passes of a generation.
    pub forwards: u64,
}

/// Measurements that count for a median: a few that waited for something else do not.
const RECENT: usize = 7;

/// The last measurements of one thing.
#[derive(Clone, Copy, Default)]
struct Recent {
    values: [f64; RECENT],
    count: usize,
}

impl Recent {
    fn add(&mut self, value: f64) {
        self.values[self.count % RECENT] = value;
        self.count += 1;
    }

    /// Their median; none before the first.
    fn median(&self) -> Option<f64> {
        let mut values = self.values;
        let values = &mut values[..self.count.min(RECENT)];
        values.sort_unstable_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }
}

/// What is known of one source.
#[derive(Clone, Copy)]
struct Record {
    /// Share of accepted drafts at each place, of those whose forerunners were accepted.
    accepted: [f64; DRAFTS_MAX],
    /// Seconds of one guess.
    guess_s: Recent,
    /// Passes until it is tried again, and the pause after a trial in vain.
    wait: u32,
    pause: u32,
}

impl Default for Record {
    fn default() -> Record {
        let [pause, _] = PAUSE_PASSES;
        // Hopeful, so that it is tried at all.
        Record { accepted: [0.7; DRAFTS_MAX], guess_s: Recent::default(), wait: 0, pause }
    }
}

/// Decides how many drafts of which source are run, from what they cost and brought.
pub struct Drafter {
    /// As the user fixed it.
    fixed: Option<usize>,
    records: [Record; 3],
    /// Seconds of a pass, by rows.
    pass_s: [Recent; DRAFTS_MAX + 1],
    /// Totals.
    pub counters: Counters,
}

impl Drafter {
    /// With `fixed`, always that many drafts where a source has them.
    pub fn new(fixed: Option<usize>) -> Drafter {
        let fixed = fixed.map(|count| count.min(DRAFTS_MAX));
        Drafter {
            fixed,
            records: Default::default(),
            pass_s: Default::default(),
            counters: Counters::default(),
        }
    }

    /// How many drafts of `source` to run, of at most `most`.
    pub fn count(&mut self, source: Source, most: usize) -> usize {
        if let Some(fixed) = self.fixed {
            return fixed.min(most);
        }
        // One more than was tried before: the first passes tell what one without drafts takes, and
        // then what each row adds.
        let tried = self.pass_s.iter().take_while(|recent| recent.count > 0).count();
        let most = most.min(DRAFTS_AUTO_MAX).min(tried);
        if most == 0 {
            return 0;
        }
        let rate = |count: usize| self.rate(source, count);
        let best = (1..=most).max_by(|a, b| rate(*a).total_cmp(&rate(*b))).unwrap_or(0);
        let pays = rate(best) > GAIN_MIN * rate(0);
        let record = &mut self.records[source as usize];
        if pays {
            (record.wait, record.pause) = (PAUSE_PASSES[0], PAUSE_PASSES[0]);
            return best;
        }
        record.wait = record.wait.saturating_sub(1);
        (record.wait == 0) as usize
    }

    /// Tokens a second that `count` drafts promise.
    fn rate(&self, source: Source, count: usize) -> f64 {
        let record = &self.records[source as usize];
        let mut kept = 1.0;
        let tokens = 1.0
            + record.accepted[..count]
                .iter()
                .map(|share| {
                    kept *= share;
                    kept
                })
                .sum::<f64>();
        tokens / (self.pass_s(count + 1) + count as f64 * record.guess_s.median().unwrap_or(0.0))
    }

    /// Seconds of a pass over `rows`: measured, or on the line through what was.
    fn pass_s(&self, rows: usize) -> f64 {
        let measured = |rows: usize| self.pass_s[rows - 1].median();
        let one = measured(1).unwrap_or(0.0);
        // Nothing is known of more rows: as if they were free, so that they are tried.
        let known = (2..=rows).rev().find_map(|rows| Some((rows, measured(rows)?)));
        known.map_or(one, |(known, s)| {
            one + (s - one).max(0.0) * (rows - 1) as f64 / (known - 1) as f64
        })
    }

    /// Takes note of a pass: `proposed` drafts of `source`, which took `guessing` to find, of which
    /// the first `accepted` were right, run in `pass`.
    pub fn record(
        &mut self,
        source: Option<Source>,
        [proposed, accepted]: [usize; 2],
        [guessing, pass]: [Duration; 2],
    ) {
        self.counters.proposed += proposed as u64;
        self.counters.accepted += accepted as u64;
        self.counters.forwards += 1;
        self.pass_s[proposed].add(pass.as_secs_f64());
        let Some(source) = source.filter(|_| proposed > 0) else { return };
        let record = &mut self.records[source as usize];
        record.guess_s.add(guessing.as_secs_f64() / proposed as f64);
        for (place, share) in record.accepted[..proposed.min(accepted + 1)].iter_mut().enumerate() {
            let right = if place < accepted { 1.0 } else { 0.0 };
            *share += NEW * (right - *share);
        }
        if record.wait == 0 {
            record.wait = record.pause;
            record.pause = (2 * record.pause).min(PAUSE_PASSES[1]);
        }
    }
}

/// What followed the last tokens where they last stood in the text before: at most `most` tokens,
/// none where they did not.
pub fn look_up(text: &[u32], most: usize) -> &[u32] {
    for length in MATCH_TOKENS {
        let Some(start) = text.len().checked_sub(length) else { continue };
        let (before, end) = (&text[..text.len() - 1], &text[start..]);
        if let Some(at) = before.windows(length).rposition(|window| window == end) {
            let rest = &text[at + length..];
            return &rest[..rest.len().min(most)];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_match_wins_and_then_the_last_one() {
        assert_eq!(look_up(&[7, 1, 2, 3, 9, 1, 2, 4, 1, 2, 3], 9), [9, 1, 2, 4, 1, 2, 3]);
        assert_eq!(look_up(&[1, 2, 5, 6, 1, 2, 8, 6, 1, 2], 2), [8, 6]);
        assert_eq!(look_up(&[1, 2, 3, 4], 3), [0u32; 0]);
        assert_eq!(look_up(&[4, 4, 4], 3), [4]);
        assert_eq!(look_up(&[], 3), [0u32; 0]);
    }

    /// Runs a source for some passes with a clock that is made up: passes over n rows take
    /// `pass_ms(n)`, a guess takes 1 ms, and the first `right` drafts are right.
    fn counts(passes: usize, right: usize, pass_ms: impl Fn(usize) -> u64) -> Vec<usize> {
        let mut drafter = Drafter::new(None);
        let ms = Duration::from_millis;
        (0..passes)
            .map(|_| {
                let count = drafter.count(Source::Head, 5);
                let times = [ms(count as u64), ms(pass_ms(count + 1))];
                drafter.record(Some(Source::Head), [count, count.min(right)], times);
                count
            })
            .collect()
    }

    #[test]
    fn drafts_that_are_right_and_cheap_are_all_taken() {
        let counts = counts(100, 5, |rows| 100 + rows as u64);
        assert!(counts[60..].iter().all(|count| *count == 5), "{counts:?}");
    }

    /// Each row costs as much as a pass: no draft can pay, however right it is.
    #[test]
    fn drafts_that_cost_more_than_they_bring_are_only_tried_now_and_then() {
        let counts = counts(2000, 1, |rows| 100 * rows as u64);
        let tried = counts[200..].iter().sum::<usize>();
        assert!((1..=18).contains(&tried), "{tried}");
        assert!(counts[200..].iter().all(|count| *count <= 1));
    }

    /// Two of them are right, and the third costs 30 ms for nothing.
    #[test]
    fn as_many_are_taken_as_are_right() {
        let counts = counts(300, 2, |rows| 70 + 30 * rows as u64);
        let twos = counts[100..].iter().filter(|count| **count == 2).count();
        assert!(twos > 190, "{counts:?}");
    }

    #[test]
    fn a_fixed_number_is_kept_as_far_as_there_is_room() {
        let mut drafter = Drafter::new(Some(3));
        assert_eq!((drafter.count(Source::Head, 9), drafter.count(Source::Head, 2)), (3, 2));
    }
}
