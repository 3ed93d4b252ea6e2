//! The control tokens of a vocabulary, found where a text spells one. The search is binary, so that no text of many beginnings of control
//! tokens makes it long, however many control tokens there are.

/// Spellings of control tokens.
pub(super) struct Controls {
    /// With their ids, ascending by spelling.
    sorted: Vec<(String, u32)>,
    /// For each, the longest other one that it begins with.
    prefix: Vec<Option<usize>>,
    /// Whether one begins with this byte.
    begins: Box<[bool; 256]>,
}

impl Controls {
    /// Spellings with their ids; none is empty and none stands twice.
    pub fn new(mut spellings: Vec<(String, u32)>) -> Self {
        spellings.sort_unstable();
        let mut begins = Box::new([false; 256]);
        spellings.iter().for_each(|(spelling, _)| begins[usize::from(spelling.as_bytes()[0])] = true);
        let mut controls = Self { sorted: spellings, prefix: Vec::new(), begins };
        for at in 0..controls.sorted.len() {
            let longest = controls.longest_prefix(at.checked_sub(1), &controls.sorted[at].0);
            controls.prefix.push(longest);
        }
        controls
    }

    /// The longest control token that `text` begins with: its length in bytes and its id.
    pub fn at(&self, text: &str) -> Option<(usize, u32)> {
        text.as_bytes().first().filter(|&&first| self.begins[usize::from(first)])?;
        let after = self.sorted.partition_point(|(spelling, _)| spelling.as_str() <= text);
        let (spelling, id) = &self.sorted[self.longest_prefix(after.checked_sub(1), text)?];
        Some((spelling.len(), *id))
    }

    /// The longest spelling that `text` begins with, of those up to `last`, the last one that is not above it: what sorts between a
    /// text and its prefix begins with that prefix, so it is `last` or one that `last` begins with.
    fn longest_prefix(&self, last: Option<usize>, text: &str) -> Option<usize> {
        let mut at = last;
        while let Some(candidate) = at.filter(|&at| !text.starts_with(self.sorted[at].0.as_str())) {
            at = self.prefix[candidate];
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::seeded::Seeded;

    #[test]
    fn the_longest_spelling_is_found_as_by_trying_each() {
        let mut random = Seeded::new(3);
        let word = |random: &mut Seeded, most: usize| -> String {
            (0..1 + random.below(most)).map(|_| ['<', '|', 'a', 'é'][random.below(4)]).collect()
        };
        let mut found = 0;
        for _ in 0..2_000 {
            let mut spellings: Vec<String> = (0..random.below(20)).map(|_| word(&mut random, 5)).collect();
            spellings.sort_unstable();
            spellings.dedup();
            let spellings: Vec<(String, u32)> = spellings.into_iter().zip(0..).collect();
            let controls = Controls::new(spellings.iter().rev().cloned().collect());
            for _ in 0..20 {
                let text = word(&mut random, 8);
                let fits = spellings.iter().filter(|(spelling, _)| text.starts_with(spelling.as_str()));
                let longest = fits.max_by_key(|(spelling, _)| spelling.len()).map(|(s, id)| (s.len(), *id));
                assert_eq!(controls.at(&text), longest, "{text} in {spellings:?}");
                found += usize::from(longest.is_some());
            }
            assert_eq!(controls.at(""), None);
        }
        assert!(found > 10_000, "{found}");
    }
}
