//! A chart as an SVG: lines over time, on a logarithmic scale.

use std::fmt::Write;
use std::ops::RangeInclusive;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 48.0;
/// Told apart by whoever does not see all colours, too (Okabe, Ito: Color Universal Design, 2008).
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// One line.
pub(crate) struct Line {
    pub(crate) name: String,
    /// Seconds, and a value above 0.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Draws `lines` with values in `unit`. Without points it is an empty frame.
pub(crate) fn draw(title: &str, unit: &str, lines: &[Line]) -> String {
    let all = || lines.iter().flat_map(|line| &line.points);
    let seconds = all().map(|(at, _)| *at).fold(1.0, f64::max);
    let decades = decades(all().map(|(_, value)| *value));
    let (low, high) = (f64::from(*decades.start()), f64::from(*decades.end()));
    let x = |at: f64| LEFT + at / seconds * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| {
        let share = (value.log10() - low) / (high - low);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    };
    let mut svg = String::new();
    let mut put = |text: String| {
        // A String takes everything.
        let _ = writeln!(svg, "{text}");
    };
    put(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\">"
    ));
    put(format!("<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>"));
    put(format!("<text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{title}</text>"));
    for decade in decades {
        let (value, level) = (10_f64.powi(decade), y(10_f64.powi(decade)));
        let (from, to) = (x(0.0), x(seconds));
        put(format!("<path d=\"M{from:.1} {level:.1}H{to:.1}\" stroke=\"#dddddd\"/>"));
        let (at, level) = (LEFT - 8.0, level + 4.0);
        put(format!(
            "<text x=\"{at:.1}\" y=\"{level:.1}\" text-anchor=\"end\">{value} {unit}</text>"
        ));
    }
    let step = (seconds / 10.0).ceil().max(1.0);
    let mut at = 0.0;
    while at <= seconds {
        let (across, down) = (x(at), HEIGHT - BOTTOM + 20.0);
        put(format!(
            "<text x=\"{across:.1}\" y=\"{down:.1}\" text-anchor=\"middle\">{at} s</text>"
        ));
        at += step;
    }
    let mut across = LEFT;
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let points: Vec<String> = line
            .points
            .iter()
            .map(|(at, value)| format!("{:.1},{:.1}", x(*at), y(*value)))
            .collect();
        let points = points.join(" ");
        put(format!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        ));
        put(format!("<path d=\"M{across:.1} 42h18\" stroke=\"{colour}\" stroke-width=\"3\"/>"));
        put(format!("<text x=\"{:.1}\" y=\"46\">{}</text>", across + 24.0, line.name));
        across += 24.0 + 7.2 * line.name.len() as f64 + 24.0;
    }
    put("</svg>".to_owned());
    svg
}

/// The powers of ten that hold all values; at least two.
fn decades(values: impl Iterator<Item = f64> + Clone) -> RangeInclusive<i32> {
    let low = values.clone().fold(f64::MAX, f64::min).clamp(1e-9, 1e12).log10().floor() as i32;
    let high = values.fold(0.0, f64::max).clamp(1e-9, 1e12).log10().ceil() as i32;
    if high < low { 0..=1 } else { low..=high.max(low + 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_within_the_frame() {
        let points = vec![(0.0, 3.0), (1.0, 40.0), (9.5, 999.0)];
        let svg = draw("title", "us", &[Line { name: "one".into(), points }]);
        let drawn = svg.split("points=\"").nth(1).and_then(|rest| rest.split('"').next());
        let drawn: Vec<(f64, f64)> = drawn
            .expect("a line")
            .split(' ')
            .filter_map(|point| point.split_once(','))
            .map(|(x, y)| (x.parse().expect("a number"), y.parse().expect("a number")))
            .collect();
        assert_eq!(drawn.len(), 3);
        for (x, y) in &drawn {
            assert!((LEFT..=WIDTH - RIGHT).contains(x), "{x}");
            assert!((TOP..=HEIGHT - BOTTOM).contains(y), "{y}");
        }
        assert!(drawn[0].1 > drawn[2].1, "more is higher");
        assert!(svg.contains(">1000 us<") && svg.contains(">1 us<"), "{svg}");
        assert!(draw("none", "us", &[]).ends_with("</svg>\n"));
    }
}
