//! Small plots as inline SVG: lines, steps, bars. Pure text; no script, no font, no request to anywhere.

use std::fmt::Write as _;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 34.0;
const TICKS: usize = 5;
/// Of the labels' font, on average.
const CHARACTER_WIDTH: f64 = 6.2;
const COLOURS: [&str; 6] = ["#1f6fb4", "#d1603d", "#2f8f5b", "#8a5fbf", "#b08900", "#555555"];

/// The colour of the n-th series.
pub fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

/// How an axis maps values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From 0 upwards.
    Linear,
    /// Decades; values of 0 and below are left out.
    Log,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A line.
    Line,
    /// One line of many.
    Thin,
    /// The area that its points go round.
    Band,
}

/// One line of a plot.
#[derive(Clone, Debug)]
pub struct Series {
    /// In the legend; one without a name is not.
    pub name: String,
    /// (x, y); of a line ascending in x.
    pub points: Vec<(f64, f64)>,
    /// How it is drawn.
    pub form: Form,
    /// Number of its colour; its place among the series otherwise.
    pub colour: Option<usize>,
}

impl Series {
    /// A line with a name.
    pub fn line(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), points, form: Form::Line, colour: None }
    }
}

/// Titles and axes of a plot.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'a> {
    /// Above it.
    pub title: &'a str,
    /// Below the horizontal axis.
    pub x: &'a str,
    /// The horizontal axis.
    pub x_scale: Scale,
}

/// Text made safe for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

struct Axis {
    low: f64,
    high: f64,
    scale: Scale,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64> + Clone, scale: Scale) -> Option<Self> {
        let usable = values.filter(|v| v.is_finite() && (scale == Scale::Linear || *v > 0.0));
        let low = usable.clone().min_by(f64::total_cmp)?;
        let high = usable.max_by(f64::total_cmp)?;
        Some(match scale {
            Scale::Linear => {
                Self { low: low.min(0.0), high: if high > low.min(0.0) { high } else { low + 1.0 }, scale }
            }
            Scale::Log => Self { low, high: high.max(low * 1.01), scale },
        })
    }

    /// 0 at the low end, 1 at the high end.
    fn share(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => {
                (libm::log(value.max(self.low)) - libm::log(self.low)) / (libm::log(self.high) - libm::log(self.low))
            }
        }
    }

    fn value(&self, share: f64) -> f64 {
        match self.scale {
            Scale::Linear => self.low + (self.high - self.low) * share,
            Scale::Log => self.low * libm::exp((libm::log(self.high) - libm::log(self.low)) * share),
        }
    }
}

fn x_at(share: f64) -> f64 {
    LEFT + share * (WIDTH - LEFT - RIGHT)
}

fn y_at(share: f64) -> f64 {
    HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
}

fn open(title: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\"><text class=\"title\" x=\"{LEFT}\" y=\"14\">{0}</text>",
        escape(title)
    )
}

fn number(value: f64) -> String {
    crate::load::report::table::figure(Some(value))
}

fn grid(out: &mut String, x: Option<&Axis>, y: &Axis, x_title: &str) {
    for tick in 0..TICKS {
        let share = tick as f64 / (TICKS - 1) as f64;
        let at = y_at(share);
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"y\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            number(y.value(share)),
        );
        if let Some(x) = x {
            let _ = write!(
                out,
                "<text class=\"x\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x_at(share),
                HEIGHT - BOTTOM + 14.0,
                number(x.value(share)),
            );
        }
    }
    let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
    let _ = write!(out, "<text class=\"x\" x=\"{middle:.1}\" y=\"{:.1}\">{}</text>", HEIGHT - 4.0, escape(x_title));
}

/// The names, each with the number of its colour.
fn legend(out: &mut String, names: impl Iterator<Item = (usize, String)>) {
    let mut x = WIDTH - RIGHT;
    for (index, name) in names.collect::<Vec<_>>().into_iter().rev() {
        let _ = write!(
            out,
            "<text class=\"legend\" x=\"{x:.1}\" y=\"14\" style=\"fill:{}\">{}</text>",
            colour(index),
            escape(&name)
        );
        x -= name.chars().count() as f64 * 6.5 + 12.0;
    }
}

/// Lines over a common axis; an empty string when there is nothing to draw.
pub fn lines(labels: Labels<'_>, series: &[Series]) -> String {
    let points = || series.iter().flat_map(|s| s.points.iter());
    let (Some(x), Some(y)) =
        (Axis::over(points().map(|p| p.0), labels.x_scale), Axis::over(points().map(|p| p.1), Scale::Linear))
    else {
        return String::new();
    };
    let mut out = open(labels.title);
    grid(&mut out, Some(&x), &y, labels.x);
    for (index, line) in series.iter().enumerate() {
        let colour = colour(line.colour.unwrap_or(index));
        let mut path = String::new();
        for &(px, py) in &line.points {
            let step = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{step}{:.1} {:.1}", x_at(x.share(px)), y_at(y.share(py)));
        }
        let _ = match line.form {
            Form::Line => write!(out, "<path d=\"{path}\" stroke=\"{colour}\"/>"),
            Form::Thin => write!(out, "<path class=\"thin\" d=\"{path}\" stroke=\"{colour}\"/>"),
            Form::Band => write!(out, "<path class=\"band\" d=\"{path}Z\" style=\"fill:{colour}\"/>"),
        };
    }
    if series.len() > 1 {
        let named = series.iter().enumerate().filter(|(_, s)| !s.name.is_empty());
        legend(&mut out, named.map(|(index, s)| (s.colour.unwrap_or(index), s.name.clone())));
    }
    out + "</svg>"
}

/// One group of bars.
#[derive(Clone, Debug)]
pub struct BarGroup {
    /// Below the group.
    pub name: String,
    /// One bar a series: the value, and the least and the greatest for its whisker.
    pub bars: Vec<Option<(f64, f64, f64)>>,
}

/// Grouped bars with whiskers; negative values hang below zero.
pub fn bars(title: &str, series: &[&str], groups: &[BarGroup]) -> String {
    let values = groups.iter().flat_map(|g| g.bars.iter().flatten()).flat_map(|&(v, low, high)| [v, low, high]);
    let Some(y) = Axis::over(values, Scale::Linear) else { return String::new() };
    let mut out = open(title);
    grid(&mut out, None, &y, "");
    let slot = 1.0 / groups.len() as f64;
    let zero = y_at(y.share(0.0));
    for (g, group) in groups.iter().enumerate() {
        let width = slot * 0.8 / group.bars.len().max(1) as f64;
        for (b, bar) in group.bars.iter().enumerate() {
            let Some((value, low, high)) = *bar else { continue };
            let left = x_at(slot * (g as f64 + 0.1) + width * b as f64);
            let right = x_at(slot * (g as f64 + 0.1) + width * (b as f64 + 0.9));
            let end = y_at(y.share(value));
            let middle = f64::midpoint(left, right);
            let _ = write!(
                out,
                "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}: {}</title></rect>\
                 <line class=\"whisker\" x1=\"{middle:.1}\" x2=\"{middle:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
                end.min(zero),
                right - left,
                (end - zero).abs().max(0.5),
                colour(b),
                escape(&group.name),
                number(value),
                y_at(y.share(low)),
                y_at(y.share(high)),
            );
        }
        let at = x_at(slot * (g as f64 + 0.5));
        let name = shortened(&group.name, slot * (WIDTH - LEFT - RIGHT));
        let y = HEIGHT - BOTTOM + 14.0;
        let _ = write!(out, "<text class=\"x\" x=\"{at:.1}\" y=\"{y:.1}\">{}</text>", escape(&name));
    }
    if series.len() > 1 {
        legend(&mut out, series.iter().map(|s| (*s).to_owned()).enumerate());
    }
    out + "</svg>"
}

/// The end of a name that fits into so many units; the end tells bars of one family apart.
fn shortened(name: &str, width: f64) -> String {
    let (room, length) = ((width / CHARACTER_WIDTH) as usize, name.chars().count());
    if length <= room {
        name.to_owned()
    } else {
        format!("…{}", name.chars().skip(length + 1 - room).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plots_stay_inside_their_frame_and_escape_their_names() {
        let labels = Labels { title: "a < b & c", x: "ms", x_scale: Scale::Log };
        let line = Series::line("<x>", vec![(0.0, 25.0), (1.0, 50.0), (3.0, 75.0), (100.0, 100.0)]);
        let svg = lines(labels, &[line.clone(), line]);
        assert!(svg.contains("a &lt; b &amp; c") && svg.contains("&lt;x&gt;") && !svg.contains("NaN"));
        let path = svg.split("<path d=\"").nth(1).and_then(|p| p.split('"').next()).expect("a path");
        for pair in path.split(['M', 'L']).skip(1) {
            let (x, y) = pair.split_once(' ').expect("a point");
            let (x, y): (f64, f64) = (x.parse().expect("x"), y.parse().expect("y"));
            assert!((LEFT..=WIDTH - RIGHT).contains(&x) && (TOP..=HEIGHT - BOTTOM).contains(&y), "{pair}");
        }
        assert_eq!(lines(labels, &[]), "");
    }

    #[test]
    fn bars_hang_below_zero_when_they_are_negative() {
        let groups = [
            BarGroup { name: "up".into(), bars: vec![Some((4.0, 3.0, 5.0))] },
            BarGroup { name: "down".into(), bars: vec![Some((-2.0, -3.0, -1.0)), None] },
        ];
        let svg = bars("change", &["B"], &groups);
        assert!(svg.matches("<rect").count() == 2 && !svg.contains("NaN") && !svg.contains("height=\"-"));
    }
}
