//! The sampling settings: their values, their bounds, and the panel that edits them. Pure.
//!
//! The bounds are those of the native dialect. A filter without a temperature would be refused there, so it is kept here and sent
//! only while the temperature is above zero.

use std::fmt::Write as _;

use super::wire::SamplingBody;

/// How the message becomes a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The whole conversation through the chat template.
    Chat,
    /// The text as it is, without the turns before it.
    Raw,
}

/// One line of the panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Chat or raw.
    Mode,
    /// Softmax temperature.
    Temperature,
    /// Keep the k likeliest.
    TopK,
    /// Keep the smallest set of this mass.
    TopP,
    /// Keep what is at least this share of the likeliest.
    MinP,
    /// Seed of the draws.
    Seed,
    /// Most tokens to generate.
    MaxTokens,
}

impl Field {
    /// Every line, from the top.
    pub const ALL: [Field; 7] =
        [Field::Mode, Field::Temperature, Field::TopK, Field::TopP, Field::MinP, Field::Seed, Field::MaxTokens];

    /// The name of the request field.
    pub const fn label(self) -> &'static str {
        match self {
            Field::Mode => "mode",
            Field::Temperature => "temperature",
            Field::TopK => "top_k",
            Field::TopP => "top_p",
            Field::MinP => "min_p",
            Field::Seed => "seed",
            Field::MaxTokens => "max_tokens",
        }
    }

    /// What may be typed.
    const fn allowed(self) -> &'static str {
        match self {
            Field::Mode => "chat or raw",
            Field::Temperature => "0 to 5",
            Field::TopK => "a whole number from 1, or off",
            Field::TopP => "above 0 to 1, or off",
            Field::MinP => "0 to 1, or off",
            Field::Seed => "a whole number below 2^64, or off",
            Field::MaxTokens => "a whole number from 1",
        }
    }
}

/// A value that the field cannot take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: give {}", .0.label(), .0.allowed())]
pub struct SettingError(pub Field);

/// Up or down by one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Towards less.
    Down,
    /// Towards more.
    Up,
}

/// The values.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Chat or raw.
    pub mode: Mode,
    temperature: f64,
    top_k: Option<u32>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    seed: Option<u64>,
    max_tokens: usize,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { mode: Mode::Chat, temperature: 0.0, top_k: None, top_p: None, min_p: None, seed: None, max_tokens: 256 }
    }
}

impl Sampling {
    /// Takes what a person typed; `off` or nothing clears an optional value.
    ///
    /// # Errors
    /// A value out of bounds; the old one stays.
    pub fn set(&mut self, field: Field, typed: &str) -> Result<(), SettingError> {
        let typed = typed.trim();
        let error = SettingError(field);
        match field {
            Field::Mode => {
                self.mode = match typed {
                    "chat" => Mode::Chat,
                    "raw" => Mode::Raw,
                    _ => return Err(error),
                }
            }
            Field::Temperature => self.temperature = number(typed, |t| (0.0..=5.0).contains(&t)).ok_or(error)?,
            Field::TopK => {
                self.top_k = optional(typed, |t| t.parse().ok().filter(|&k| k >= 1)).ok_or(error)?;
            }
            Field::TopP => {
                self.top_p = optional(typed, |t| number(t, |p| p > 0.0 && p <= 1.0)).ok_or(error)?;
            }
            Field::MinP => {
                self.min_p = optional(typed, |t| number(t, |p| (0.0..=1.0).contains(&p))).ok_or(error)?;
            }
            Field::Seed => self.seed = optional(typed, |t| t.parse().ok()).ok_or(error)?,
            Field::MaxTokens => {
                self.max_tokens = typed.parse().ok().filter(|&n| n >= 1).ok_or(error)?;
            }
        }
        Ok(())
    }

    /// The value as the panel shows it and [`Sampling::set`] takes it.
    pub fn shown(&self, field: Field) -> String {
        fn or_off<T: ToString>(value: Option<T>) -> String {
            value.map_or_else(|| "off".to_owned(), |v| v.to_string())
        }
        match field {
            Field::Mode if self.mode == Mode::Chat => "chat".to_owned(),
            Field::Mode => "raw".to_owned(),
            Field::Temperature => self.temperature.to_string(),
            Field::TopK => or_off(self.top_k),
            Field::TopP => or_off(self.top_p),
            Field::MinP => or_off(self.min_p),
            Field::Seed => or_off(self.seed),
            Field::MaxTokens => self.max_tokens.to_string(),
        }
    }

    /// Whether tokens are drawn; without a temperature the likeliest is taken.
    pub fn draws(&self) -> bool {
        self.temperature > 0.0
    }

    /// Whether the field reaches the server; filters and the seed need a temperature.
    pub fn is_sent(&self, field: Field) -> bool {
        match field {
            Field::TopK | Field::TopP | Field::MinP | Field::Seed => self.draws(),
            Field::Mode | Field::Temperature | Field::MaxTokens => true,
        }
    }

    /// One step up or down from where it is; `off` is below the least value.
    pub fn step(&mut self, field: Field, step: Step) {
        let by = if step == Step::Up { 1.0 } else { -1.0 };
        match field {
            Field::Mode => self.mode = if self.mode == Mode::Chat { Mode::Raw } else { Mode::Chat },
            Field::Temperature => self.temperature = rounded(self.temperature + 0.1 * by).clamp(0.0, 5.0),
            Field::TopK => {
                self.top_k = match (self.top_k, step) {
                    (None, Step::Up) => Some(1),
                    (None | Some(1), Step::Down) => None,
                    (Some(k), Step::Up) => Some(k.saturating_add(1)),
                    (Some(k), Step::Down) => Some(k - 1),
                }
            }
            Field::TopP => self.top_p = stepped(self.top_p, by, 0.05),
            Field::MinP => self.min_p = stepped(self.min_p, by, 0.01),
            Field::Seed => {
                self.seed = match (self.seed, step) {
                    (None, Step::Up) => Some(0),
                    (None | Some(0), Step::Down) => None,
                    (Some(seed), Step::Up) => Some(seed.saturating_add(1)),
                    (Some(seed), Step::Down) => Some(seed - 1),
                }
            }
            Field::MaxTokens if step == Step::Up => self.max_tokens = self.max_tokens.saturating_add(16),
            Field::MaxTokens => self.max_tokens = self.max_tokens.saturating_sub(16).max(1),
        }
    }

    /// The sampling fields of a request.
    pub fn body(&self) -> SamplingBody {
        let greedy = SamplingBody { max_tokens: self.max_tokens, ..SamplingBody::default() };
        if !self.draws() {
            return greedy;
        }
        let (top_k, top_p, min_p, seed) = (self.top_k, self.top_p, self.min_p, self.seed);
        SamplingBody { temperature: Some(self.temperature), top_k, top_p, min_p, seed, ..greedy }
    }
}

/// A finite number that passes.
fn number(typed: &str, passes: impl Fn(f64) -> bool) -> Option<f64> {
    typed.parse().ok().filter(|value: &f64| value.is_finite() && passes(*value))
}

/// `Some(None)` for off, `None` for what does not parse.
fn optional<T>(typed: &str, parse: impl Fn(&str) -> Option<T>) -> Option<Option<T>> {
    if typed.is_empty() || typed == "off" { Some(None) } else { parse(typed).map(Some) }
}

/// A share in (0, 1] moved by one step; below it is off.
fn stepped(value: Option<f64>, by: f64, size: f64) -> Option<f64> {
    let moved = rounded(value.unwrap_or(0.0) + by * size);
    (moved > 0.0).then_some(moved.min(1.0))
}

/// Without the tail that decimal steps leave in binary.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// The panel: the values, the chosen line, and the text of an edit in progress.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// The values.
    pub sampling: Sampling,
    /// The chosen line.
    pub selected: Field,
    /// What has been typed for it, while it is edited.
    pub edit: Option<String>,
    /// Why the last edit was refused.
    pub error: Option<SettingError>,
}

impl Default for Panel {
    fn default() -> Self {
        Self { sampling: Sampling::default(), selected: Field::Temperature, edit: None, error: None }
    }
}

impl Panel {
    /// Chooses the line above or below, taking the edit in progress first; a refused edit keeps the line.
    pub fn choose(&mut self, step: Step) {
        if !self.commit() {
            return;
        }
        let at = Field::ALL.iter().position(|&f| f == self.selected).unwrap_or(0);
        let to = if step == Step::Up { at.saturating_sub(1) } else { (at + 1).min(Field::ALL.len() - 1) };
        self.selected = Field::ALL[to];
    }

    /// Moves the chosen value by one step.
    pub fn step(&mut self, step: Step) {
        if self.commit() {
            self.sampling.step(self.selected, step);
        }
    }

    /// A character typed on the chosen line: it begins an edit or goes on with it.
    pub fn typed(&mut self, character: char) {
        if self.selected == Field::Mode {
            self.sampling.step(Field::Mode, Step::Up);
            return;
        }
        self.error = None;
        let _ = self.edit.get_or_insert_default().write_char(character);
    }

    /// Takes back the last character of the edit.
    pub fn backspace(&mut self) {
        let shown = self.sampling.shown(self.selected);
        if self.selected != Field::Mode {
            self.error = None;
            self.edit.get_or_insert(shown).pop();
        }
    }

    /// Switches an optional value off.
    pub fn clear(&mut self) {
        self.cancel();
        let _ = self.sampling.set(self.selected, "off");
    }

    /// Forgets the edit.
    pub fn cancel(&mut self) {
        self.edit = None;
        self.error = None;
    }

    /// Takes the edit; true when there is none left. A refused one stays, with its error.
    pub fn commit(&mut self) -> bool {
        if let Some(edit) = &self.edit {
            match self.sampling.set(self.selected, edit) {
                Ok(()) => self.cancel(),
                Err(error) => self.error = Some(error),
            }
        }
        self.edit.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shown_value_can_be_typed_back() {
        let mut sampling = Sampling::default();
        for (field, typed) in [
            (Field::Mode, "raw"),
            (Field::Temperature, "0.7"),
            (Field::TopK, "40"),
            (Field::TopP, "0.95"),
            (Field::MinP, "0.05"),
            (Field::Seed, "18446744073709551615"),
            (Field::MaxTokens, "64"),
        ] {
            sampling.set(field, typed).unwrap();
            assert_eq!(sampling.shown(field), typed);
        }
        let body = sampling.body();
        assert_eq!(body.seed, Some(u64::MAX));
        assert_eq!(
            (body.temperature, body.top_k, body.top_p, body.min_p),
            (Some(0.7), Some(40), Some(0.95), Some(0.05))
        );
        assert_eq!(body.max_tokens, 64);
    }

    #[test]
    fn values_out_of_bounds_are_refused_and_the_old_one_stays() {
        for (field, typed) in [
            (Field::Temperature, "5.01"),
            (Field::Temperature, "-0.1"),
            (Field::Temperature, "NaN"),
            (Field::Temperature, ""),
            (Field::TopK, "0"),
            (Field::TopK, "1.5"),
            (Field::TopP, "0"),
            (Field::TopP, "1.1"),
            (Field::MinP, "-1"),
            (Field::Seed, "18446744073709551616"),
            (Field::MaxTokens, "0"),
            (Field::MaxTokens, "off"),
            (Field::Mode, "poem"),
        ] {
            let mut sampling = Sampling::default();
            assert_eq!(sampling.set(field, typed), Err(SettingError(field)), "{typed}");
            assert_eq!(sampling, Sampling::default());
        }
    }

    #[test]
    fn filters_wait_for_a_temperature() {
        let mut sampling = Sampling::default();
        sampling.set(Field::TopK, "40").unwrap();
        sampling.set(Field::Seed, "7").unwrap();
        assert_eq!(sampling.body(), SamplingBody { max_tokens: 256, ..SamplingBody::default() });
        assert!(!sampling.is_sent(Field::TopK));
        sampling.step(Field::Temperature, Step::Up);
        assert!(sampling.is_sent(Field::TopK));
        assert_eq!((sampling.body().top_k, sampling.body().seed), (Some(40), Some(7)));
    }

    #[test]
    fn steps_go_up_from_off_and_back_to_it() {
        for field in [Field::TopK, Field::TopP, Field::MinP, Field::Seed] {
            let mut sampling = Sampling::default();
            sampling.step(field, Step::Down);
            assert_eq!(sampling.shown(field), "off");
            sampling.step(field, Step::Up);
            assert_ne!(sampling.shown(field), "off");
            sampling.step(field, Step::Down);
            assert_eq!(sampling.shown(field), "off");
        }
    }

    #[test]
    fn three_steps_of_a_tenth_are_three_tenths() {
        let mut sampling = Sampling::default();
        for _ in 0..3 {
            sampling.step(Field::Temperature, Step::Up);
        }
        assert_eq!(sampling.shown(Field::Temperature), "0.3");
        for _ in 0..99 {
            sampling.step(Field::Temperature, Step::Up);
        }
        assert_eq!(sampling.shown(Field::Temperature), "5");
    }

    #[test]
    fn a_refused_edit_keeps_its_line_until_it_is_mended() {
        let mut panel = Panel::default();
        for character in "9".chars() {
            panel.typed(character);
        }
        panel.choose(Step::Down);
        assert_eq!((panel.selected, panel.error.clone()), (Field::Temperature, Some(SettingError(Field::Temperature))));
        panel.backspace();
        panel.typed('1');
        panel.choose(Step::Down);
        assert_eq!((panel.selected, panel.error.clone()), (Field::TopK, None));
        assert_eq!(panel.sampling.shown(Field::Temperature), "1");
    }
}
