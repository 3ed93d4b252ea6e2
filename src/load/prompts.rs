//! Seeded prompts. Token ids where the surface takes them, so that lengths are exact and no tokeniser is in the way; common English
//! words elsewhere, one of which is about one token.

use super::dialect::Prompt;
use super::limits;
use super::rng::SplitMix64;

/// Common words that most vocabularies hold as one token with a leading space.
const WORDS: [&str; 64] = [
    "time",
    "people",
    "year",
    "day",
    "man",
    "world",
    "life",
    "hand",
    "part",
    "child",
    "eye",
    "woman",
    "place",
    "work",
    "week",
    "case",
    "point",
    "number",
    "group",
    "problem",
    "fact",
    "good",
    "new",
    "first",
    "last",
    "long",
    "great",
    "little",
    "own",
    "other",
    "old",
    "right",
    "big",
    "high",
    "small",
    "large",
    "next",
    "early",
    "young",
    "important",
    "few",
    "public",
    "bad",
    "same",
    "able",
    "house",
    "water",
    "night",
    "story",
    "money",
    "book",
    "word",
    "family",
    "game",
    "line",
    "city",
    "name",
    "team",
    "idea",
    "body",
    "door",
    "car",
    "law",
    "war",
];

/// The token ids that prompts draw from, `first..end`. They must lie inside the target's vocabulary and be no special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct TokenRange {
    /// The least id.
    pub first: u32,
    /// One past the greatest id; above `first`.
    pub end: u32,
}

impl Default for TokenRange {
    /// Inside every common vocabulary of 32,000 or more and past its special tokens.
    fn default() -> Self {
        Self { first: 300, end: 30_000 }
    }
}

impl std::str::FromStr for TokenRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        match parsed {
            Some((first, end)) if first < end && limits::TOKEN_IDS.check(u64::from(end)).is_ok() => {
                Ok(Self { first, end })
            }
            _ => Err(format!(
                "{text} is no range of token ids up to {}; write it like 300..30000",
                limits::TOKEN_IDS.max
            )),
        }
    }
}

/// Token ids drawn uniformly from the range.
pub fn tokens(rng: &mut SplitMix64, count: u32, range: TokenRange) -> Prompt {
    let span = u64::from(range.end - range.first);
    Prompt::Tokens((0..count).map(|_| range.first + rng.below(span) as u32).collect())
}

/// `count` words.
pub fn words(rng: &mut SplitMix64, count: u32) -> Prompt {
    let words: Vec<&str> = (0..count).map(|_| WORDS[rng.below(WORDS.len() as u64) as usize]).collect();
    Prompt::Text(words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_their_length_lie_in_the_range_and_repeat_with_the_seed() {
        let range = TokenRange { first: 10, end: 13 };
        let draw = |seed| tokens(&mut SplitMix64::new(seed), 200, range);
        let Prompt::Tokens(ids) = draw(4) else { panic!("token ids were asked for") };
        assert!(ids.len() == 200 && [10, 11, 12].iter().all(|id| ids.contains(id)));
        assert!(ids.iter().all(|id| (10..13).contains(id)));
        assert_eq!(draw(4), Prompt::Tokens(ids));
        assert_ne!(draw(4), draw(5));
        let Prompt::Text(text) = words(&mut SplitMix64::new(1), 7) else { panic!("text was asked for") };
        assert_eq!(text.split(' ').count(), 7);
    }

    #[test]
    fn a_range_is_written_with_two_dots() {
        assert_eq!("5..9".parse(), Ok(TokenRange { first: 5, end: 9 }));
        assert!("9..5".parse::<TokenRange>().is_err() && "9".parse::<TokenRange>().is_err());
    }
}
