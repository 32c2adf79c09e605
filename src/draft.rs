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
//! that it costs little: text changes, and so does what is in memory. While one pays, a pass goes
//! without now and then, for the same reason.
//!
//! Times are kept by source, those of passes that did without it included: text that repeats itself
//! is guessed well, but also has its experts in memory, so passes over other text tell nothing of
//! what one without drafts would have taken there.
//!
//! One cost is in none of these: experts that are read for wrong drafts take the places of others,
//! which later passes then read again. So what a pass with a right drafts reads beyond 1 + a passes
//! without drafts is paid once more.

#![forbid(unsafe_code)]

use std::ops::RangeInclusive;
use std::time::Duration;

/// Most drafts of one pass.
pub const DRAFTS_MAX: usize = 15;
/// Most that are taken unasked: acceptance falls with each.
const DRAFTS_AUTO_MAX: usize = 5;
/// Weight of a new draft in the running share of right ones.
const NEW: f64 = 0.1;
/// Passes without drafts between two trials of a source that does not pay, at least.
const PAUSE_PASSES: u32 = 16;
/// The share of time that such trials of one source may cost in the long run.
const TRIALS_SHARE: f64 = 0.005;
/// Passes with drafts between two that do without, to see what they take now.
const WITHOUT_PASSES: u32 = 8;
/// Drafts must promise this much more tokens a second: of two rates that are measured, the one that
/// luck made larger is the one that is chosen.
const GAIN_MIN: f64 = 1.1;
/// Least and most tokens of the text's end that are looked for in what came before.
const MATCH_TOKENS: RangeInclusive<usize> = 2..=4;

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

/// What a pass took.
#[derive(Clone, Copy, Default)]
pub struct Times {
    /// Bringing the draft head into memory and up to the text, after others drafted or it rested.
    pub catching_up: Duration,
    /// Finding the drafts.
    pub guessing: Duration,
    /// The pass over them.
    pub pass: Duration,
    /// Experts that these two read, and the time of one read.
    pub reads: u64,
    /// The same.
    pub read: Duration,
}

/// Measurements that count: few, because what a pass takes falls while a store fills.
const RECENT: usize = 4;

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

    /// Their mean but for the largest, which may have waited for something else; none before the
    /// first. No median: what is read from a drive now and then has to be paid, too.
    fn mean(&self) -> Option<f64> {
        let values = &self.values[..self.count.min(RECENT)];
        let largest = values.iter().copied().fold(0.0, f64::max);
        match values.len() {
            0 | 1 => values.first().copied(),
            count => Some((values.iter().sum::<f64>() - largest) / (count - 1) as f64),
        }
    }
}

/// What is known of one source.
#[derive(Clone, Copy)]
struct Record {
    /// Share of accepted drafts at each place, of those whose forerunners were accepted.
    accepted: [f64; DRAFTS_MAX],
    /// Seconds of one guess.
    guess_s: Recent,
    /// Seconds of a pass for which it had guesses, by those that were run.
    pass_s: [Recent; DRAFTS_MAX + 1],
    /// Experts that such passes without drafts read.
    reads: Recent,
    /// Whether it has guesses for the pass to come.
    has_guess: bool,
    /// Passes until the other way than usual is tried.
    wait: u32,
    /// Whether its drafts did not pay when they were last asked for.
    rests: bool,
    /// Whether the pass to come is a trial of such drafts.
    is_trial: bool,
}

impl Default for Record {
    fn default() -> Record {
        Record {
            // Hopeful, so that it is tried at all.
            accepted: [0.7; DRAFTS_MAX],
            guess_s: Recent::default(),
            pass_s: Default::default(),
            reads: Recent::default(),
            has_guess: false,
            wait: PAUSE_PASSES,
            rests: false,
            is_trial: false,
        }
    }
}

impl Record {
    /// How many drafts to run, of at most `most`.
    fn count(&mut self, most: usize) -> usize {
        self.has_guess = true;
        // One more than was tried before: the first passes tell what one without drafts takes, and
        // then what each row adds.
        let tried = self.pass_s.iter().take_while(|recent| recent.count > 0).count();
        let most = most.min(DRAFTS_AUTO_MAX).min(tried);
        if most == 0 {
            return 0;
        }
        let best = (1..=most).max_by(|a, b| self.rate(*a).total_cmp(&self.rate(*b))).unwrap_or(0);
        let pays = self.rate(best) > GAIN_MIN * self.rate(0);
        let (usual, other, pause) =
            if pays { (best, 0, WITHOUT_PASSES) } else { (0, 1, PAUSE_PASSES) };
        self.rests = !pays;
        self.is_trial = self.wait == 0 && !pays;
        if self.wait > 0 {
            self.wait -= 1;
            return usual;
        }
        self.wait = pause;
        other
    }

    /// Tokens a second that `count` drafts promise.
    fn rate(&self, count: usize) -> f64 {
        let (mut tokens, mut kept) = (1.0, 1.0);
        for share in &self.accepted[..count] {
            kept *= share;
            tokens += kept;
        }
        tokens / (self.pass_s(count) + count as f64 * self.guess_s.mean().unwrap_or(0.0))
    }

    /// Seconds of a pass with `count` drafts: measured, or on the line through what was.
    fn pass_s(&self, count: usize) -> f64 {
        let measured = |count: usize| self.pass_s[count].mean();
        let none = measured(0).unwrap_or(0.0);
        // Nothing is known of more: as if they were free, so that they are tried.
        let known = (1..=count).rev().find_map(|known| Some((known, measured(known)?)));
        known.map_or(none, |(known, s)| none + (s - none).max(0.0) * count as f64 / known as f64)
    }

    /// Takes note of a pass for which it had guesses, of which `proposed` were run and the first
    /// `accepted` were right.
    fn add(&mut self, proposed: usize, accepted: usize, times: Times) {
        let mut pass_s = times.pass.as_secs_f64();
        if proposed == 0 {
            self.pass_s[0].add(pass_s);
            return self.reads.add(times.reads as f64);
        }
        let usual_reads = (1 + accepted) as f64 * self.reads.mean().unwrap_or(0.0);
        pass_s += (times.reads as f64 - usual_reads).max(0.0) * times.read.as_secs_f64();
        self.pass_s[proposed].add(pass_s);
        self.guess_s.add(times.guessing.as_secs_f64() / proposed as f64);
        for (place, share) in self.accepted[..proposed.min(accepted + 1)].iter_mut().enumerate() {
            let right = if place < accepted { 1.0 } else { 0.0 };
            *share += NEW * (right - *share);
        }
        if self.is_trial {
            let usual_s = self.pass_s(0);
            let found_s = (times.catching_up + times.guessing).as_secs_f64();
            let lost_s = found_s + pass_s - (1 + accepted) as f64 * usual_s;
            self.wait = self.wait.max((lost_s / (TRIALS_SHARE * usual_s)) as u32);
        }
    }
}

/// Decides how many drafts of which source are run, from what they cost and brought.
pub struct Drafter {
    /// As the user fixed it.
    fixed: Option<usize>,
    records: [Record; 3],
    /// Totals.
    pub counters: Counters,
}

impl Drafter {
    /// With `fixed`, always that many drafts where a source has them.
    pub fn new(fixed: Option<usize>) -> Drafter {
        let fixed = fixed.map(|count| count.min(DRAFTS_MAX));
        let (records, counters) = Default::default();
        Drafter { fixed, records, counters }
    }

    /// How many drafts to run of `source`, which has `most` for the pass to come.
    pub fn count(&mut self, source: Source, most: usize) -> usize {
        match self.fixed {
            Some(fixed) => fixed.min(most),
            None if most == 0 => 0,
            None => self.records[source as usize].count(most),
        }
    }

    /// Whether drafts of `source` do not pay now, but for a trial now and then.
    pub fn rests(&self, source: Source) -> bool {
        self.records[source as usize].rests
    }

    /// Takes note of a pass: `proposed` drafts of `source`, of which the first `accepted` were
    /// right. `times` are known if they tell what drafts cost.
    pub fn record(
        &mut self,
        source: Option<Source>,
        [proposed, accepted]: [usize; 2],
        times: Option<Times>,
    ) {
        self.counters.proposed += proposed as u64;
        self.counters.accepted += accepted as u64;
        self.counters.forwards += 1;
        let Some(times) = times else { return };
        for (place, record) in self.records.iter_mut().enumerate() {
            let is_used = source.is_some_and(|source| source as usize == place);
            if std::mem::take(&mut record.has_guess) && (is_used || proposed == 0) {
                record.add(proposed, accepted, times);
            }
        }
    }
}

/// What followed the last tokens where most of them last stood in the text before: at most `most`
/// tokens, none where they did not. The text is passed once, in microseconds, because a pass is
/// also made where nothing is found.
pub fn look_up(text: &[u32], most: usize) -> &[u32] {
    let Some(last) = text.len().checked_sub(1) else { return &[] };
    let (mut length, mut behind) = (MATCH_TOKENS.start() - 1, text.len());
    for at in (0..last).rev().filter(|at| text[*at] == text[last]) {
        let pairs = (0..(at + 1).min(*MATCH_TOKENS.end())).map(|i| (text[at - i], text[last - i]));
        let same = pairs.take_while(|(before, end)| before == end).count();
        if same > length {
            (length, behind) = (same, at + 1);
        }
        if same == *MATCH_TOKENS.end() {
            break;
        }
    }
    let rest = &text[behind..];
    &rest[..rest.len().min(most)]
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
        assert_eq!(look_up(&[1, 2, 3, 4, 5, 9, 2, 3, 4, 5, 7, 1, 2, 3, 4, 5], 2), [7, 1]);
        assert_eq!(look_up(&[8, 5, 2, 5], 3), [0u32; 0]);
        assert_eq!(look_up(&[], 3), [0u32; 0]);
    }

    /// A pass of so many milliseconds, with guesses of so many.
    fn times(guess_ms: u64, pass_ms: u64) -> Option<Times> {
        let [guessing, pass] = [guess_ms, pass_ms].map(Duration::from_millis);
        Some(Times { guessing, pass, ..Times::default() })
    }

    /// Runs a source for some passes with a clock that is made up: passes over n rows take
    /// `pass_ms(n)`, a guess takes 1 ms, and the first `right` drafts are right.
    fn counts(passes: usize, right: usize, pass_ms: impl Fn(usize) -> u64) -> Vec<usize> {
        let mut drafter = Drafter::new(None);
        (0..passes)
            .map(|_| {
                let count = drafter.count(Source::Head, 5);
                let times = times(count as u64, pass_ms(count + 1));
                drafter.record(Some(Source::Head), [count, count.min(right)], times);
                count
            })
            .collect()
    }

    #[test]
    fn drafts_that_are_right_and_cheap_are_all_taken_but_for_a_look_at_what_none_cost() {
        let counts = counts(200, 5, |rows| 100 + rows as u64);
        let all = counts[100..].iter().filter(|count| **count == 5).count();
        assert!((88..=90).contains(&all), "{counts:?}");
        assert!(counts[100..].iter().all(|count| [0, 5].contains(count)), "{counts:?}");
    }

    /// Each row costs as much as a pass, so that no draft can pay, or two: then each trial in vain
    /// loses one or two passes, whatever it guessed.
    #[test]
    fn trials_of_drafts_that_do_not_pay_lose_half_a_percent() {
        for (right, row_ms) in [(1, 100), (0, 100), (0, 200)] {
            let counts = counts(5000, right, |rows| 100 + row_ms * (rows - 1) as u64);
            let tried = counts[500..].iter().sum::<usize>() as u64;
            assert!(counts[500..].iter().all(|count| *count <= 1));
            let lost_ms = tried * (1 + row_ms - 100 * right as u64);
            assert!(tried > 5 && lost_ms <= 2250 + 500, "{tried} {lost_ms}");
        }
    }

    /// Two of them are right, and the third costs 30 ms for nothing.
    #[test]
    fn as_many_are_taken_as_are_right() {
        let counts = counts(300, 2, |rows| 70 + 30 * rows as u64);
        let twos = counts[100..].iter().filter(|count| **count == 2).count();
        assert!(twos > 170, "{counts:?}");
    }

    /// Text that repeats itself is cheap without drafts, too, and all other text is dear: a draft
    /// that is always right takes 2.2 passes over its own kind of text, less than one of others.
    #[test]
    fn passes_over_other_text_do_not_count() {
        let mut drafter = Drafter::new(None);
        let drafted = |pass: usize| {
            let has_guess = pass.is_multiple_of(2);
            let count = if has_guess { drafter.count(Source::Lookup, 1) } else { 0 };
            let pass_ms = if has_guess { [10, 22][count] } else { 30 };
            drafter.record(Some(Source::Lookup), [count, count], times(0, pass_ms));
            count
        };
        let counts: Vec<usize> = (0..2000).map(drafted).collect();
        // Trials, which lose 2 ms each.
        assert!(counts[200..].iter().sum::<usize>() <= 60, "{counts:?}");
    }

    /// One draft, half of them right: 1.5 tokens in 1.25 passes. Where a pass with a wrong draft
    /// reads three experts of 50 ms and all others one, it is 1.5 tokens in 1.75 passes.
    #[test]
    fn what_wrong_drafts_evict_is_paid() {
        for (wrong_reads, range) in [(1, 800..=960), (3, 5..=60)] {
            let mut drafter = Drafter::new(None);
            let drafted = |pass: usize| {
                let count = drafter.count(Source::Lookup, 1);
                let accepted = count.min(pass % 2);
                let reads = if count > accepted { wrong_reads } else { 1 + accepted as u64 };
                let times = times(0, 100 + 25 * count as u64);
                let times = times.map(|t| Times { reads, read: Duration::from_millis(50), ..t });
                drafter.record(Some(Source::Lookup), [count, accepted], times);
                count
            };
            let drafts = (0..1000).map(drafted).sum::<usize>();
            assert!(range.contains(&drafts), "{drafts}");
        }
    }

    #[test]
    fn a_fixed_number_is_kept_as_far_as_there_is_room() {
        let mut drafter = Drafter::new(Some(3));
        assert_eq!((drafter.count(Source::Head, 9), drafter.count(Source::Head, 2)), (3, 2));
    }
}
