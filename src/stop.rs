//! Stop strings over a stream of text: nothing that may still become one is let through.
//!
//! The match that is complete first ends the text before its first byte. A possible beginning of
//! a match at the end of what has arrived is held back until more text decides, or the stream
//! ends.

#![forbid(unsafe_code)]

/// Looks for stop strings in text that arrives in pieces of any size.
pub struct StopScanner {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopScanner {
    /// A scanner for these strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> StopScanner {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        StopScanner { stops, held: String::new(), stopped: false }
    }

    /// Whether a stop string was seen.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Takes the next piece and returns the text that is safe to show.
    pub fn push(&mut self, piece: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(piece);
        // The match that is complete first, so that the cut into pieces decides nothing; of two
        // that end together, the longer.
        let matches = self.stops.iter().filter_map(|stop| {
            self.held.find(stop.as_str()).map(|start| (start + stop.len(), start))
        });
        if let Some((_, start)) = matches.min() {
            self.stopped = true;
            self.held.truncate(start);
            return std::mem::take(&mut self.held);
        }
        let held_bytes = self.possible_beginning_bytes();
        self.held.drain(..self.held.len() - held_bytes).collect()
    }

    /// The stream has ended: what was held back is text after all.
    pub fn finish(&mut self) -> String {
        if self.stopped { String::new() } else { std::mem::take(&mut self.held) }
    }

    /// Length of the longest end of the held text that begins a stop string.
    fn possible_beginning_bytes(&self) -> usize {
        let ends = |stop: &String| {
            let longest = (stop.len() - 1).min(self.held.len());
            let begins = |n: &usize| self.held.as_bytes().ends_with(&stop.as_bytes()[..*n]);
            (1..=longest).rev().filter(|n| stop.is_char_boundary(*n)).find(begins).unwrap_or(0)
        };
        self.stops.iter().map(ends).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut scanner = StopScanner::new(&stops);
        let mut text: String = pieces.iter().map(|piece| scanner.push(piece)).collect();
        text += &scanner.finish();
        (text, scanner.stopped())
    }

    #[test]
    fn a_match_across_pieces_leaks_nothing() {
        assert_eq!(scan(&["END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(scan(&["END"], &["a E", "N"]), ("a EN".into(), false));
        assert_eq!(scan(&["END"], &["EEND"]), ("E".into(), true));
        assert_eq!(scan(&["END", ""], &["no match"]), ("no match".into(), false));
    }

    #[test]
    fn the_match_that_is_complete_first_wins() {
        assert_eq!(scan(&["cd", "bcx"], &["abc", "d"]), ("ab".into(), true));
        assert_eq!(scan(&["cd", "bcd"], &["abc", "d"]), ("a".into(), true));
        assert_eq!(scan(&["cd", "bcde"], &["abcde"]), ("ab".into(), true));
    }

    #[test]
    fn characters_are_never_cut() {
        assert_eq!(scan(&["é!"], &["aé", "?"]), ("aé?".into(), false));
        assert_eq!(scan(&["ü"], &["aé"]), ("aé".into(), false));
        assert_eq!(scan(&["é!"], &["aé", "!"]), ("a".into(), true));
    }

    /// The shown text never depends on how the stream was cut.
    #[test]
    fn every_cut_of_the_text_gives_the_same_result() {
        let text = "one ab two abc three";
        for stop in ["abc", "b t", "ee", "x"] {
            let whole = scan(&[stop], &[text]);
            for cut in 0..text.len() {
                assert_eq!(scan(&[stop], &[&text[..cut], &text[cut..]]), whole, "{stop} {cut}");
            }
        }
    }

    /// A naive twin looks at every prefix of the whole text; the scanner sees it in random pieces.
    /// `COLI_FUZZ_SEED=<number>` repeats a run.
    #[test]
    fn random_stops_and_pieces_agree_with_a_naive_search() {
        let given = std::env::var("COLI_FUZZ_SEED").ok().and_then(|text| text.parse().ok());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let seed: u64 = given.unwrap_or(now.as_nanos() as u64) | 1;
        let mut state = seed;
        let mut below = |end: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize % end
        };
        let mut hits = 0;
        for case in 0..20_000 {
            let mut word =
                |length: usize| (0..length).map(|_| ['a', 'b', 'é'][below(3)]).collect::<String>();
            let (text, stops) = (word(12), [word(2), word(3), word(4)]);
            // The shortest prefix that ends with a stop, and the longest stop that ends it.
            let ends = (0..=text.len()).filter(|end| text.is_char_boundary(*end));
            let want = ends.map(|end| &text[..end]).find_map(|prefix| {
                let found = stops.iter().filter_map(|stop| prefix.strip_suffix(stop.as_str()));
                found.min_by_key(|rest| rest.len())
            });
            hits += usize::from(want.is_some());
            let mut scanner = StopScanner::new(&stops);
            let (mut shown, mut piece) = (String::new(), String::new());
            for c in text.chars() {
                piece.push(c);
                if below(3) == 0 {
                    shown += &scanner.push(&std::mem::take(&mut piece));
                    let safe = want.unwrap_or(&text);
                    assert!(safe.starts_with(&shown), "COLI_FUZZ_SEED={seed} case {case}: leak");
                }
            }
            shown += &scanner.push(&piece);
            shown += &scanner.finish();
            let got = (shown.as_str(), scanner.stopped());
            let want = (want.unwrap_or(&text), want.is_some());
            assert_eq!(got, want, "COLI_FUZZ_SEED={seed} case {case}: {stops:?} in {text}");
        }
        assert!((10_000..20_000).contains(&hits), "COLI_FUZZ_SEED={seed}: {hits} hits");
    }
}
