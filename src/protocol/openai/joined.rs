//! Prompt and answer of a completion as one text: where each token stands in it, and the character that both may share.
//!
//! An answer's own text comes from its own bytes. Behind an echo, the first of them may end a character that the prompt began; the
//! seam puts that character in the place of the U+FFFD that they are alone, and changes nothing after it.

use crate::model::detokenizer::TextStream;

/// Where tokens stand in the text that they spell: the offset of a token is the number of characters that begin before its first
/// byte. That is where its own first character stands; a token without one has the offset of the first character after it.
#[derive(Clone, Debug, Default)]
pub struct Offsets {
    text: TextStream,
    /// Characters that no later byte can change.
    settled: usize,
}

impl Offsets {
    /// Takes the bytes of the next token; returns its offset, in characters.
    pub fn push(&mut self, bytes: &[u8]) -> usize {
        // What waits for the rest of its character is one character, whatever comes.
        let offset = self.settled + usize::from(!self.text.pending().is_empty());
        self.settled += self.text.push(bytes).chars().count();
        offset
    }
}

/// Joins an answer's own text to a prompt. It takes the bytes of every token before the text that the token releases; at the end
/// everything shown is `String::from_utf8_lossy` of the prompt's bytes with those of the answer that a stop string left.
#[derive(Clone, Debug, Default)]
pub struct Seam {
    /// The character that the prompt began, with what the answer adds to it.
    shared: TextStream,
    /// That character once it is decided, whole or U+FFFD, until it is shown.
    decided: Option<String>,
    /// Bytes of the answer that belong to it; each is a character U+FFFD of the answer's own text.
    taken: usize,
    /// Of these, how many the answer's own text has released.
    released: usize,
}

impl Seam {
    /// After a prompt whose text ended with `unfinished`.
    pub fn after(unfinished: TextStream) -> Self {
        Self { shared: unfinished, ..Self::default() }
    }

    /// Whether prompt and answer share nothing, or nothing any more.
    fn is_closed(&self) -> bool {
        self.shared.pending().is_empty() && self.decided.is_none()
    }

    /// Takes the bytes of the answer's next token.
    pub fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if self.shared.pending().is_empty() {
                return;
            }
            let text = self.shared.push(&[byte]);
            let is_whole = self.shared.pending().is_empty() && text.chars().count() == 1;
            self.taken += usize::from(text.is_empty() || is_whole);
            if !text.is_empty() {
                // A byte that does not go on with the character begins the answer's own text.
                self.shared = TextStream::default();
                self.decided = text.chars().next().map(String::from);
            }
        }
    }

    /// What to show for the next of the answer's own text.
    pub fn text(&mut self, own: &str) -> String {
        if self.is_closed() {
            return own.to_owned();
        }
        let mut rest = own.chars();
        self.released += rest.by_ref().take(self.taken - self.released).count();
        let mut shown = if self.released == self.taken { self.decided.take() } else { None }.unwrap_or_default();
        shown.push_str(rest.as_str());
        shown
    }

    /// What to show for the last of the answer's own text: a character that is still not whole is U+FFFD.
    pub fn finish(&mut self, own: &str) -> String {
        let mut shown = self.text(own);
        if !std::mem::take(self).is_closed() {
            shown.push(char::REPLACEMENT_CHARACTER);
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tokens of one to four bytes, most of which are parts of é, 中, 😰 and U+FFFD.
    fn tokens(most: usize) -> impl Strategy<Value = Vec<Vec<u8>>> {
        let parts = [
            b"a", b"\xc3", b"\xa9", b"\xe4", b"\xb8", b"\xad", b"\xf0", b"\x9f", b"\x98", b"\xb0", b"\xef", b"\xbf",
            b"\xbd",
        ];
        let byte = proptest::sample::select(parts.map(|part| part[0]).to_vec());
        let part = proptest::collection::vec(byte, 1..5);
        let whole =
            proptest::sample::select(vec!["é", "中", "😰", "ab", "\u{fffd}"]).prop_map(|text| text.as_bytes().to_vec());
        proptest::collection::vec(prop_oneof![part, whole], 0..most)
    }

    /// What a stream shows for `prompt` and `answer`, and the same for an answer as one text. `held` is how many tokens late the
    /// answer's own text comes, as a stop string may make it.
    fn shown(prompt: &[Vec<u8>], answer: &[Vec<u8>], held: usize) -> (String, String) {
        let (mut before, mut own) = (TextStream::default(), TextStream::default());
        let mut streamed: String = prompt.iter().map(|token| before.push(token)).collect();
        let mut whole = streamed.clone();
        let (mut seam, mut at_once) = (Seam::after(before.clone()), Seam::after(before));
        let mut texts = std::collections::VecDeque::new();
        for token in answer {
            seam.push(token);
            at_once.push(token);
            texts.push_back(own.push(token));
            let released = if texts.len() > held { texts.pop_front() } else { None };
            streamed += &seam.text(&released.unwrap_or_default());
        }
        let tail: String = texts.into_iter().chain([own.finish()]).collect();
        streamed += &seam.finish(&tail);
        let all = answer.concat();
        whole += &at_once.finish(&String::from_utf8_lossy(&all));
        (streamed, whole)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]
        #[test]
        fn prompt_and_answer_are_one_text_however_late_the_answer_comes(
            prompt in tokens(4),
            answer in tokens(8),
            held in 0_usize..4,
        ) {
            let bytes = [prompt.concat(), answer.concat()].concat();
            let expected = String::from_utf8_lossy(&bytes).into_owned();
            let (streamed, whole) = shown(&prompt, &answer, held);
            prop_assert_eq!(&streamed, &expected);
            prop_assert_eq!(&whole, &expected);
        }

        #[test]
        fn offsets_ascend_and_a_token_of_whole_characters_stands_at_its_offset(tokens in tokens(12)) {
            let bytes = tokens.concat();
            let text: Vec<char> = String::from_utf8_lossy(&bytes).chars().collect();
            let mut offsets = Offsets::default();
            let mut last = 0;
            for token in &tokens {
                let offset = offsets.push(token);
                prop_assert!(last <= offset && offset <= text.len(), "{} after {}", offset, last);
                last = offset;
                if let Ok(own) = std::str::from_utf8(token) {
                    let own: Vec<char> = own.chars().collect();
                    prop_assert!(text[offset..].starts_with(&own), "{:?} is not at {} of {:?}", own, offset, text);
                }
            }
        }
    }

    #[test]
    fn a_byte_inside_a_character_stands_after_it_and_a_stray_byte_where_it_shows() {
        let offsets = |tokens: &[&[u8]]| {
            let mut offsets = Offsets::default();
            tokens.iter().map(|token| offsets.push(token)).collect::<Vec<_>>()
        };
        assert_eq!(offsets(&[b"a", b"\xc3", b"\xa9", b"b"]), [0, 1, 2, 2]);
        assert_eq!(offsets(&[b"\xa9", b"\xa9", "中".as_bytes(), b"a"]), [0, 1, 2, 3]);
        assert_eq!(offsets(&[b"\xe4", "中".as_bytes()]), [0, 1]);
    }

    #[test]
    fn a_stop_string_that_takes_a_part_of_the_shared_character_leaves_it_broken() {
        let mut before = TextStream::default();
        assert_eq!(before.push(b"x\xc3"), "x");
        let mut seam = Seam::after(before);
        seam.push(b"\xa9");
        assert_eq!((seam.text(""), seam.finish("")), (String::new(), "\u{fffd}".to_owned()));
    }
}
