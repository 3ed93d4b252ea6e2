//! Draws the state. Reads it and changes nothing; every text it shows is already free of control characters.
//! Made for 80 by 24 and any larger window; in a narrower one the side panels stand in for the conversation while they have the
//! focus, and below 24 by 8 there is only a line that says so.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Position, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::border;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Sparkline};

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::UnicodeWidthStr;

use super::settings::{Field, Mode};
use super::state::{App, Focus, Turn, TurnState};
use super::wrap::wrap;

/// Width of the side panels.
const SIDE_COLUMNS: u16 = 26;
/// A narrower window has no side panels beside the conversation.
const BOTH_COLUMNS_MIN: u16 = 64;
/// Text lines of the message box at most.
const MESSAGE_LINES_MAX: usize = 6;
/// Columns in front of the text of a turn.
const INDENT: &str = " ";
/// In front of the message; two columns.
const MARK: &str = "› ";
const MARK_COLUMNS: usize = 2;

const ACCENT: Color = Color::Cyan;

/// Draws everything; returns how many lines the conversation can be scrolled up.
pub fn draw(frame: &mut Frame<'_>, app: &App) -> usize {
    let area = frame.area();
    if area.width < 24 || area.height < 8 {
        frame.render_widget(Paragraph::new("window too small"), area);
        return 0;
    }
    let text_columns = usize::from(area.width - 3);
    let lines = wrap(app.editor.text(), text_columns - MARK_COLUMNS);
    let box_lines = lines.len().min(MESSAGE_LINES_MAX).min(usize::from(area.height - 7)) as u16;
    let [title, middle, message, footer] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(box_lines + 2),
        Constraint::Length(1),
    ])
    .areas(area);

    draw_title(frame, title, app);
    let (conversation, side) = columns(middle, app.focus);
    let scroll_max = conversation.map_or(0, |area| draw_conversation(frame, area, app));
    if let Some(side) = side {
        let [settings, live] =
            Layout::vertical([Constraint::Length(Field::ALL.len() as u16 + 2), Constraint::Min(0)]).areas(side);
        draw_settings(frame, settings, app);
        draw_live(frame, live, app);
    }
    draw_message(frame, message, app, &lines);
    draw_footer(frame, footer, app);
    scroll_max
}

/// Conversation and side panels, or the one of them that fits.
fn columns(area: Rect, focus: Focus) -> (Option<Rect>, Option<Rect>) {
    if area.width >= BOTH_COLUMNS_MIN {
        let [left, right] = Layout::horizontal([Constraint::Min(0), Constraint::Length(SIDE_COLUMNS)]).areas(area);
        return (Some(left), Some(right));
    }
    match focus {
        Focus::Message => (Some(area), None),
        Focus::Settings => (None, Some(area)),
    }
}

fn panel<'a>(title: &'a str, has_focus: bool) -> Block<'a> {
    let style = if has_focus { Style::new().fg(ACCENT) } else { Style::new().dark_gray() };
    let title = Span::styled(format!(" {title} "), if has_focus { style.bold() } else { Style::new() });
    Block::bordered().border_set(border::ROUNDED).border_style(style).title(title)
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let mut left = Line::from(" crucible".bold().fg(ACCENT));
    if let Some(health) = &app.server.health {
        for part in [&health.model, &health.device, &health.profile] {
            if !part.is_empty() {
                left.extend([" · ".dark_gray(), Span::raw(part.as_str())]);
            }
        }
    }
    let lamp = match (&app.server.trouble, &app.server.health) {
        (Some(_), _) => "○ no answer ".red(),
        (None, Some(_)) => "● ready ".green(),
        (None, None) => "○ connecting ".yellow(),
    };
    let right = Line::from(vec![lamp, Span::raw(app.target.trim_start_matches("http://")).dark_gray(), " ".into()]);
    let [left_area, right_area] =
        Layout::horizontal([Constraint::Min(0), Constraint::Length(right.width() as u16)]).areas(area);
    // A blank stays between what is cut and the lamp.
    frame.render_widget(shortened(left, usize::from(left_area.width.saturating_sub(1))), left_area);
    frame.render_widget(right, right_area);
}

/// A line of at most `columns`; what is cut from its end leaves an ellipsis.
fn shortened(line: Line<'_>, columns: usize) -> Line<'_> {
    if line.width() <= columns {
        return line;
    }
    let mut room = columns.saturating_sub(1);
    let mut cut = Line::default();
    for span in line.spans {
        let graphemes = span.content.graphemes(true);
        let fitting = graphemes.take_while(|g| {
            let fits = g.width() <= room;
            room = if fits { room - g.width() } else { 0 };
            fits
        });
        let text: String = fitting.collect();
        cut.push_span(Span::styled(text, span.style));
    }
    if columns > 0 {
        cut.push_span("…");
    }
    cut
}

fn draw_conversation(frame: &mut Frame<'_>, area: Rect, app: &App) -> usize {
    let block = panel("Conversation", false);
    let inner = block.inner(area);
    let width = usize::from(inner.width).saturating_sub(INDENT.len() + 1).max(1);
    let mut lines = Vec::new();
    for turn in &app.turns {
        push_turn(&mut lines, turn, width);
    }
    if lines.is_empty() {
        push_welcome(&mut lines, app, width);
    }
    let scroll_max = lines.len().saturating_sub(usize::from(inner.height));
    let top = scroll_max - app.scroll.min(scroll_max);
    let block = if top < scroll_max {
        block.title_bottom(Line::from(format!(" {} more ↓ ", scroll_max - top)).right_aligned())
    } else {
        block
    };
    let shown: Vec<Line<'_>> = lines.into_iter().skip(top).take(usize::from(inner.height)).collect();
    frame.render_widget(block, area);
    frame.render_widget(Paragraph::new(shown), inner);
    scroll_max
}

fn push_wrapped<'a>(lines: &mut Vec<Line<'a>>, text: &'a str, width: usize, style: Style) {
    lines.extend(wrap(text, width).into_iter().map(|line| Line::from(vec![INDENT.into(), Span::styled(line, style)])));
}

fn push_turn<'a>(lines: &mut Vec<Line<'a>>, turn: &'a Turn, width: usize) {
    if !lines.is_empty() {
        lines.push(Line::default());
    }
    let who = if turn.mode == Mode::Chat { "You" } else { "Text to continue" };
    lines.push(Line::from(vec![" ".into(), who.bold().fg(ACCENT)]));
    push_wrapped(lines, &turn.prompt, width, Style::new());
    lines.push(Line::from(vec![" ".into(), "Model".bold().green()]));
    if !turn.answer.is_empty() {
        push_wrapped(lines, &turn.answer, width, Style::new());
    }
    if let TurnState::Failed(error) = &turn.state {
        push_wrapped(lines, error, width, Style::new().red());
    } else {
        let remark = remark(turn);
        let style = Style::new().dark_gray();
        lines.extend(
            wrap(&remark, width)
                .into_iter()
                .map(|line| Line::from(vec![INDENT.into(), Span::styled(line.to_owned(), style)])),
        );
    }
}

/// What is known of the turn, in one line.
fn remark(turn: &Turn) -> String {
    let tokens = match &turn.state {
        TurnState::Finished { tokens, .. } => *tokens,
        _ => turn.meter.tokens(),
    };
    let mut parts = Vec::new();
    match &turn.state {
        TurnState::Running if tokens == 0 => parts.push("waiting for the first token".to_owned()),
        _ => parts.push(format!("{tokens} token{}", if tokens == 1 { "" } else { "s" })),
    }
    if let Some(rate) = turn.meter.rate() {
        parts.push(format!("{rate:.1} tok/s"));
    }
    if let Some(ttft) = turn.meter.ttft() {
        parts.push(format!("first after {}", milliseconds(ttft)));
    }
    match &turn.state {
        TurnState::Finished { reason, .. } => parts.push(reason.clone()),
        TurnState::Stopped => parts.push("stopped by you".to_owned()),
        _ => {}
    }
    match turn.turns_left_out {
        0 => {}
        1 => parts.push("the oldest turn did not fit".to_owned()),
        n => parts.push(format!("the {n} oldest turns did not fit")),
    }
    parts.join(" · ")
}

fn push_welcome<'a>(lines: &mut Vec<Line<'a>>, app: &'a App, width: usize) {
    if let Some(trouble) = &app.server.trouble {
        push_wrapped(lines, trouble, width, Style::new().red());
        push_wrapped(
            lines,
            "Start a server with `crucible serve`; this client connects by itself.",
            width,
            Style::new(),
        );
        return;
    }
    let hint = "Write a message below and press Enter. Tab opens the sampling settings.";
    push_wrapped(lines, hint, width, Style::new().dark_gray());
}

fn draw_settings(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let has_focus = app.focus == Focus::Settings;
    let block = panel("Sampling", has_focus);
    let inner = block.inner(area);
    let rows = Field::ALL.map(|field| setting_line(app, field, has_focus, usize::from(inner.width)));
    frame.render_widget(block, area);
    frame.render_widget(Paragraph::new(rows.to_vec()), inner);
}

fn setting_line<'a>(app: &'a App, field: Field, has_focus: bool, width: usize) -> Line<'a> {
    let selected = has_focus && app.panel.selected == field;
    let edit = app.panel.edit.as_deref().filter(|_| selected);
    let value = match edit {
        Some(edit) => format!("{edit}▏"),
        None if field == Field::Temperature && !app.panel.sampling.draws() => "0 · greedy".to_owned(),
        None => app.panel.sampling.shown(field),
    };
    let room = width.saturating_sub(field.label().len() + 3);
    // A seed may have 20 digits: its end is shown.
    let skip = value.chars().count().saturating_sub(room);
    let value: String = value.chars().skip(skip).collect();
    let mark = if selected { "›" } else { " " };
    let text = format!("{mark}{} {value:>room$}", field.label());
    let style = match (selected, app.panel.error.is_some(), app.panel.sampling.is_sent(field)) {
        (true, true, _) => Style::new().red().bold(),
        (true, false, _) => Style::new().fg(ACCENT).bold(),
        (false, _, false) => Style::new().dark_gray(),
        (false, _, true) => Style::new(),
    };
    Line::styled(text, style)
}

fn draw_live(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let block = panel("Live", false);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let unknown = || "–".to_owned();
    let stats = app.server.stats.as_ref();
    let max_batch = app.server.health.as_ref().map_or(0, |health| health.max_batch);
    let meter = app.turns.last().map(|turn| &turn.meter);
    let rows = [
        ("resident", stats.map_or_else(unknown, |s| format!("{} / {max_batch}", s.active_requests))),
        ("queue", stats.map_or_else(unknown, |s| s.queued_requests.to_string())),
        ("pages", stats.map_or_else(unknown, |s| format!("{} / {}", s.kv_pages_used, s.kv_pages()))),
        ("server", app.server.rate.rate().map_or_else(unknown, |rate| format!("{rate:.1} tok/s"))),
        ("stream", meter.and_then(|m| m.rate()).map_or_else(unknown, |rate| format!("{rate:.1} tok/s"))),
        ("gap", meter.and_then(|m| m.gaps()).map_or_else(unknown, |(median, _)| milliseconds(median))),
        ("worst gap", meter.and_then(|m| m.gaps()).map_or_else(unknown, |(_, worst)| milliseconds(worst))),
    ];
    let width = usize::from(inner.width);
    let lines: Vec<Line<'_>> = rows
        .iter()
        .map(|(label, value)| {
            let room = width.saturating_sub(label.len() + 3);
            Line::from(vec![format!(" {label} ").dark_gray(), format!("{value:>room$}").into()])
        })
        .collect();
    let [text, spark] = Layout::vertical([Constraint::Length(rows.len() as u16), Constraint::Min(0)]).areas(inner);
    frame.render_widget(Paragraph::new(lines), text);
    draw_spark(frame, spark, app);
}

/// The server's rate over the last half minute or so.
fn draw_spark(frame: &mut Frame<'_>, area: Rect, app: &App) {
    if area.height == 0 || area.width < 4 {
        return;
    }
    let area = Rect { x: area.x + 1, width: area.width - 2, height: area.height.min(4), ..area };
    let mut rates: Vec<u64> =
        app.server.rate.rates().rev().take(usize::from(area.width)).map(|rate| rate.round() as u64).collect();
    rates.reverse();
    frame.render_widget(Sparkline::default().data(rates).style(Style::new().fg(ACCENT)), area);
}

fn draw_message(frame: &mut Frame<'_>, area: Rect, app: &App, lines: &[&str]) {
    let has_focus = app.focus == Focus::Message;
    let title = if app.panel.sampling.mode == Mode::Chat { "Message" } else { "Text to continue" };
    let block = panel(title, has_focus);
    let inner = block.inner(area);
    let (line, cells) = cursor_cell(app.editor.text(), lines, app.editor.cursor());
    let rows = usize::from(inner.height).max(1);
    let top = (line + 1).saturating_sub(rows);
    let shown: Vec<Line<'_>> = lines
        .iter()
        .enumerate()
        .skip(top)
        .take(rows)
        .map(|(at, text)| Line::from(vec![if at == 0 { MARK.fg(ACCENT) } else { "  ".into() }, Span::raw(*text)]))
        .collect();
    frame.render_widget(block, area);
    frame.render_widget(Paragraph::new(shown), inner);
    if has_focus {
        let column = (MARK_COLUMNS + cells).min(usize::from(inner.width.saturating_sub(1))) as u16;
        frame.set_cursor_position(Position::new(inner.x + column, inner.y + (line - top) as u16));
    }
}

/// Line and cell of the cursor within the wrapped text.
fn cursor_cell(text: &str, lines: &[&str], cursor: usize) -> (usize, usize) {
    let mut start = 0;
    for (at, line) in lines.iter().enumerate() {
        let end = start + line.len();
        let breaks = text[end..].starts_with('\n');
        let is_last = at + 1 == lines.len();
        if cursor < end || cursor == end && (breaks || is_last) {
            return (at, Line::from(&line[..cursor - start]).width());
        }
        start = end + usize::from(breaks);
    }
    (0, 0)
}

fn draw_footer(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let alert = Style::new().yellow().add_modifier(Modifier::BOLD);
    if let Some(error) = &app.panel.error {
        frame.render_widget(Line::styled(format!(" {error}"), alert), area);
        return;
    }
    if let Some(notice) = app.notice.as_ref().or(app.server.trouble.as_ref()) {
        frame.render_widget(Line::styled(format!(" {notice}"), alert), area);
        return;
    }
    let keys: &[(&str, &str)] = match (app.focus, app.is_streaming()) {
        (_, true) => &[("Esc", "stop"), ("PgUp/PgDn", "scroll"), ("Tab", "settings"), ("Ctrl-C", "quit")],
        (Focus::Message, false) => &[
            ("Enter", "send"),
            ("Alt-Enter", "new line"),
            ("Tab", "settings"),
            ("Ctrl-N", "new chat"),
            ("Ctrl-C", "quit"),
        ],
        (Focus::Settings, false) => {
            &[("↑↓", "choose"), ("←→", "change"), ("0-9", "type"), ("Del", "off"), ("Tab", "back"), ("Ctrl-C", "quit")]
        }
    };
    let spans = keys.iter().flat_map(|(key, does)| [format!(" {key} ").bold(), format!("{does} ").dark_gray()]);
    frame.render_widget(Line::from_iter(spans), area);
}

/// A duration for people.
fn milliseconds(duration: Duration) -> String {
    let ms = duration.as_secs_f64() * 1000.0;
    if ms < 100.0 { format!("{ms:.1} ms") } else { format!("{ms:.0} ms") }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
