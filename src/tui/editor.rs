//! The message box: text of one or more lines, a cursor that moves by what a reader calls a character, and the prompts sent
//! before. Pure.

use unicode_segmentation::UnicodeSegmentation;

/// Prompts that Up brings back, at most.
const HISTORY_KEPT: usize = 100;

/// Text, cursor, history.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Editor {
    text: String,
    cursor: usize,
    history: Vec<String>,
    recalled: Option<usize>,
    draft: String,
}

impl Editor {
    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The cursor, a byte offset on a character boundary.
    pub fn cursor(&self) -> usize {
        self.cursor
    }

    /// Puts text at the cursor. Carriage returns become line feeds, tabs four blanks, other control characters go.
    pub fn insert(&mut self, text: &str) {
        let clean = printable(text);
        self.text.insert_str(self.cursor, &clean);
        self.cursor += clean.len();
        self.recalled = None;
    }

    /// Replaces everything; the cursor goes to the end.
    pub fn set(&mut self, text: &str) {
        self.text.clear();
        self.cursor = 0;
        self.insert(text);
    }

    /// Deletes the character before the cursor.
    pub fn backspace(&mut self) {
        let end = self.cursor;
        self.left();
        self.text.replace_range(self.cursor..end, "");
    }

    /// Deletes the character under the cursor.
    pub fn delete(&mut self) {
        let length = self.text[self.cursor..].graphemes(true).next().map_or(0, str::len);
        self.text.replace_range(self.cursor..self.cursor + length, "");
    }

    /// Deletes the word before the cursor and the blanks after it.
    pub fn delete_word(&mut self) {
        let before = &self.text[..self.cursor];
        let start = before
            .trim_end()
            .rfind(char::is_whitespace)
            .map_or(0, |at| at + before[at..].chars().next().map_or(0, char::len_utf8));
        self.text.replace_range(start..self.cursor, "");
        self.cursor = start;
    }

    /// Deletes up to the start of the text.
    pub fn delete_to_start(&mut self) {
        self.text.replace_range(..self.cursor, "");
        self.cursor = 0;
    }

    /// One character left.
    pub fn left(&mut self) {
        self.cursor -= self.text[..self.cursor].graphemes(true).next_back().map_or(0, str::len);
    }

    /// One character right.
    pub fn right(&mut self) {
        self.cursor += self.text[self.cursor..].graphemes(true).next().map_or(0, str::len);
    }

    /// Before the first character.
    pub fn home(&mut self) {
        self.cursor = 0;
    }

    /// Behind the last character.
    pub fn end(&mut self) {
        self.cursor = self.text.len();
    }

    /// Hands the text out as a prompt and remembers it; none when it is blank.
    pub fn take(&mut self) -> Option<String> {
        if self.text.trim().is_empty() {
            return None;
        }
        let text = std::mem::take(&mut self.text);
        self.cursor = 0;
        self.recalled = None;
        if self.history.last() != Some(&text) {
            self.history.push(text.clone());
        }
        if self.history.len() > HISTORY_KEPT {
            self.history.remove(0);
        }
        Some(text)
    }

    /// The prompt before the one shown; what was being typed is kept for the way back.
    pub fn older(&mut self) {
        let at = self.recalled.unwrap_or(self.history.len());
        let Some(to) = at.checked_sub(1) else { return };
        if self.recalled.is_none() {
            self.draft = self.text.clone();
        }
        let text = self.history[to].clone();
        self.set(&text);
        self.recalled = Some(to);
    }

    /// The prompt after the one shown; behind the last one comes the draft.
    pub fn newer(&mut self) {
        let Some(at) = self.recalled else { return };
        let next = self.history.get(at + 1).cloned();
        self.recalled = next.as_ref().map(|_| at + 1);
        let recalled = self.recalled;
        let text = next.unwrap_or_else(|| std::mem::take(&mut self.draft));
        self.set(&text);
        self.recalled = recalled;
    }
}

/// Text without what would move the terminal's cursor: CR and CRLF become LF, a tab four blanks, other control characters go.
pub fn printable(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n").replace('\t', "    ");
    text.chars().filter(|&c| c == '\n' || !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn editor(text: &str) -> Editor {
        let mut editor = Editor::default();
        editor.insert(text);
        editor
    }

    #[test]
    fn a_family_is_one_character() {
        let mut editor = editor("a👨‍👩‍👧é");
        editor.left();
        editor.backspace();
        assert_eq!(editor.text(), "aé");
        editor.delete();
        assert_eq!(editor.text(), "a");
        editor.delete();
        editor.right();
        assert_eq!((editor.text(), editor.cursor()), ("a", 1));
    }

    #[test]
    fn words_are_deleted_with_the_blanks_behind_them() {
        let mut editor = editor("one two\u{3000}three  ");
        editor.delete_word();
        assert_eq!(editor.text(), "one two\u{3000}");
        editor.delete_word();
        assert_eq!(editor.text(), "one ");
        editor.delete_word();
        editor.delete_word();
        assert_eq!((editor.text(), editor.cursor()), ("", 0));
    }

    #[test]
    fn nothing_that_moves_the_terminal_gets_in() {
        assert_eq!(editor("a\x1b[2Jb\r\nc\td\re\x07").text(), "a[2Jb\nc    d\ne");
    }

    #[test]
    fn a_blank_message_is_not_sent() {
        let mut editor = editor(" \n ");
        assert_eq!(editor.take(), None);
        assert_eq!(editor.text(), " \n ");
    }

    #[test]
    fn history_leads_back_to_the_draft() {
        let mut editor = Editor::default();
        for prompt in ["first", "second", "second"] {
            editor.insert(prompt);
            assert_eq!(editor.take().as_deref(), Some(prompt));
        }
        editor.insert("draft");
        editor.older();
        assert_eq!(editor.text(), "second");
        editor.older();
        editor.older();
        assert_eq!(editor.text(), "first");
        editor.newer();
        editor.newer();
        editor.newer();
        assert_eq!((editor.text(), editor.cursor()), ("draft", 5));
    }
}
