//! Breaks text into lines that fit a width in terminal cells. Pure.

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::UnicodeWidthStr;

/// Breaks text at line feeds, then between words where a line is too wide, and inside a word that is wider than a line. Blanks at
/// a break stay at the end of their line even beyond the width, so that the concatenation of the lines is the text (without its
/// line feeds). `width` is at least 1; a character wider than that has a line of its own.
pub fn wrap(text: &str, width: usize) -> Vec<&str> {
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        wrap_paragraph(paragraph, width.max(1), &mut lines);
    }
    lines
}

fn wrap_paragraph<'a>(text: &'a str, width: usize, lines: &mut Vec<&'a str>) {
    let (mut start, mut used) = (0, 0);
    for (at, word) in text.split_word_bound_indices() {
        let cells = word.width();
        let blank = word.chars().all(char::is_whitespace);
        if used + cells > width && !blank {
            if at > start {
                lines.push(&text[start..at]);
            }
            (start, used) = (at, 0);
        }
        if cells <= width || blank {
            used += cells;
            continue;
        }
        for (offset, character) in word.grapheme_indices(true) {
            let cells = character.width();
            if used + cells > width && used > 0 {
                lines.push(&text[start..at + offset]);
                (start, used) = (at + offset, 0);
            }
            used += cells;
        }
    }
    lines.push(&text[start..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("the quick brown fox", 10), ["the quick ", "brown fox"]);
        assert_eq!(wrap("", 10), [""]);
        assert_eq!(wrap("a\n\nb", 10), ["a", "", "b"]);
    }

    #[test]
    fn a_word_wider_than_the_line_is_cut() {
        assert_eq!(wrap("see abcdefghij!", 4), ["see ", "abcd", "efgh", "ij!"]);
    }

    #[test]
    fn wide_characters_count_two_cells() {
        assert_eq!(wrap("中文字符", 5), ["中文", "字符"]);
        assert_eq!(wrap("中", 1), ["中"]);
    }

    #[test]
    fn no_line_is_wider_than_asked_and_no_text_is_lost() {
        let text = "Füße, 中文 and 👩‍🚀 — a-very-long-word-without-a-break   plus\nlines\n";
        for width in 2..40 {
            let lines = wrap(text, width);
            assert_eq!(lines.concat(), text.replace('\n', ""), "width {width}");
            assert!(lines.iter().all(|line| line.trim_end().width() <= width), "width {width}: {lines:?}");
        }
    }
}
