//! Stop strings in a text that arrives in pieces.
//!
//! The matcher is one Knuth–Morris–Pratt automaton per stop string, fed byte by byte, so the outcome cannot depend on how the text
//! was cut. The hit is the occurrence that ends first; of several that end together, the longest. What could still become an
//! occurrence is withheld, everything else is released at once.

use std::sync::Arc;

/// What a piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scan {
    /// No occurrence is complete: text that certainly is in the answer.
    Open(String),
    /// A stop string is complete. Feed nothing more.
    Hit {
        /// The last text of the answer.
        text: String,
        /// The stop string.
        stop: Arc<str>,
    },
}

/// Finds the first stop string in a text.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// Not yet released; always as long as the longest open match.
    held: String,
}

#[derive(Clone, Debug)]
struct Pattern {
    text: Arc<str>,
    /// `failure[n]`: longest proper border of the first n bytes.
    failure: Vec<usize>,
    /// Bytes of the pattern that the text so far ends with.
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes();
        let mut failure = vec![0; bytes.len() + 1];
        let mut border = 0;
        for at in 1..bytes.len() {
            while border > 0 && bytes[at] != bytes[border] {
                border = failure[border];
            }
            border += usize::from(bytes[at] == bytes[border]);
            failure[at + 1] = border;
        }
        Self { text: text.into(), failure, matched: 0 }
    }

    /// Advances by one byte; true when the text now ends with the whole pattern.
    fn feed(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.failure[self.matched];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

impl StopMatcher {
    /// A matcher for these strings; empty ones are left out.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        let patterns = stops.iter().map(AsRef::as_ref).filter(|s| !s.is_empty()).map(Pattern::new).collect();
        Self { patterns, held: String::new() }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Scan {
        for (at, byte) in piece.bytes().enumerate() {
            let mut longest: Option<Arc<str>> = None;
            for pattern in &mut self.patterns {
                if pattern.feed(byte) && longest.as_ref().is_none_or(|l| l.len() < pattern.text.len()) {
                    longest = Some(Arc::clone(&pattern.text));
                }
            }
            if let Some(stop) = longest {
                let mut text = std::mem::take(&mut self.held);
                text.push_str(&piece[..=at]);
                text.truncate(text.len() - stop.len());
                return Scan::Hit { text, stop };
            }
        }
        self.held.push_str(piece);
        let open = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - open);
        Scan::Open(std::mem::replace(&mut self.held, held))
    }

    /// The text has ended: what was withheld is part of it after all.
    pub fn finish(&mut self) -> String {
        self.patterns.iter_mut().for_each(|p| p.matched = 0);
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, on the whole text: the answer and whether a stop string ended it.
    fn naive(text: &str, stops: &[String]) -> (String, bool) {
        for end in text.char_indices().map(|(at, c)| at + c.len_utf8()) {
            let hit = stops.iter().filter(|s| text[..end].ends_with(s.as_str())).map(String::len).max();
            if let Some(length) = hit {
                return (text[..end - length].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    /// What of `text`, an answer so far, no stop string can take back.
    fn certain<'a>(text: &'a str, stops: &[String]) -> &'a str {
        let open = |cut: &usize| stops.iter().any(|s| s.starts_with(&text[*cut..]));
        let cut = text.char_indices().map(|(at, _)| at).find(open).unwrap_or(text.len());
        &text[..cut]
    }

    /// Small alphabet, so that near misses and overlaps are common; two characters are longer than a byte.
    fn text(max: usize) -> impl Strategy<Value = String> {
        proptest::collection::vec(proptest::sample::select(vec!['a', 'b', 'é', '界']), 0..max)
            .prop_map(|chars| chars.into_iter().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn any_split_of_the_text_gives_the_whole_text_search(
            whole in text(40),
            stops in proptest::collection::vec(text(5).prop_filter("not empty", |s| !s.is_empty()), 0..4),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..8),
        ) {
            let boundaries: Vec<usize> = whole.char_indices().map(|(at, _)| at).chain([whole.len()]).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|i| boundaries[i.index(boundaries.len())]).collect();
            cuts.extend([0, whole.len()]);
            cuts.sort_unstable();
            let mut matcher = StopMatcher::new(&stops);
            let (mut released, mut hit) = (String::new(), false);
            for pair in cuts.windows(2) {
                match matcher.push(&whole[pair[0]..pair[1]]) {
                    Scan::Open(text) => released.push_str(&text),
                    Scan::Hit { text, .. } => {
                        released.push_str(&text);
                        hit = true;
                        break;
                    }
                }
                prop_assert_eq!(&released, certain(&whole[..pair[1]], &stops), "held back too much or too little");
            }
            if !hit {
                released.push_str(&matcher.finish());
            }
            prop_assert_eq!((released, hit), naive(&whole, &stops));
        }
    }

    #[test]
    fn a_true_non_match_is_released_at_once() {
        let mut matcher = StopMatcher::new(&["STOP"]);
        assert_eq!(matcher.push("xST"), Scan::Open("x".into()));
        assert_eq!(matcher.push("Oo"), Scan::Open("STOo".into()));
    }

    #[test]
    fn without_stop_strings_nothing_is_withheld() {
        let mut matcher = StopMatcher::new(&[""; 0]);
        assert_eq!(matcher.push("anything"), Scan::Open("anything".into()));
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn of_two_stop_strings_that_end_together_the_longer_cuts() {
        let mut matcher = StopMatcher::new(&["b", "ab"]);
        assert_eq!(matcher.push("xab"), Scan::Hit { text: "x".into(), stop: "ab".into() });
    }
}
