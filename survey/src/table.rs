//! Figures as a table: for a terminal, or in Markdown, as docs/figures.md shows them.
//!
//! Rows are printed one by one, so that a run that is interrupted has shown what it took.

use crate::figure::{Bar, Cpu, Figure, NotTaken, Outcome};
use crate::suite::Spec;
use std::fmt::Write as _;

/// How tables are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Terminal,
    Markdown,
}

/// A number with three significant digits, and never fewer than its whole part.
#[must_use]
pub fn short(value: f64) -> String {
    let magnitude = value.abs();
    let decimals = match magnitude {
        m if m >= 100.0 || m == 0.0 => 0,
        m if m >= 10.0 => 1,
        m if m >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

impl Form {
    /// What stands above the rows.
    #[must_use]
    pub fn heading(self) -> String {
        match self {
            Self::Terminal => format!(
                "{:56} {:>8} {:<7} {:>8} {:>15}  {:<7} {}",
                "figure", "value", "unit", "bar", "spread", "", "operands (median), CPU of all cores"
            ),
            Self::Markdown => {
                "| figure | bar | median | spread | operands (median; CPU of all cores) | runs | commit |\n\
                 |---|---|---|---|---|---|---|"
                    .to_owned()
            }
        }
    }

    /// One figure.
    #[must_use]
    pub fn row(self, outcome: &Outcome) -> String {
        match (self, outcome) {
            (Self::Terminal, Outcome::Taken(figure)) => terminal_row(figure),
            (Self::Terminal, Outcome::NotTaken(figure)) => {
                format!("{:56} not taken: {}", figure.name, figure.not_taken)
            }
            (Self::Markdown, Outcome::Taken(figure)) => markdown_row(figure),
            (Self::Markdown, Outcome::NotTaken(figure)) => {
                let NotTaken { name, bar, not_taken, commit, machine: _ } = figure;
                let why =
                    format!("not taken: {}", not_taken.replace('|', "\\|").replace('\n', " "));
                cells([&format!("`{name}`"), &bar.to_string(), &why, "-", "-", "0", commit])
            }
        }
    }

    /// One figure of the suite before it is taken.
    #[must_use]
    pub fn row_before(self, spec: &Spec) -> String {
        let bar = spec.bar.to_string();
        match self {
            Self::Terminal => format!("{:56} {bar:>8}  {}", spec.name, spec.what),
            Self::Markdown => cells([&format!("`{}`", spec.name), &bar, "-", "-", "-", "-", "-"]),
        }
    }
}

fn verdict(figure: &Figure) -> &'static str {
    match (figure.bar, figure.bar_met) {
        (Bar::None, _) => "",
        (_, true) => "met",
        (_, false) => "MISSED",
    }
}

fn operands(figure: &Figure) -> String {
    let mut text = String::new();
    for operand in &figure.taken.operands {
        // Writing into a String cannot fail.
        let _ = write!(text, "{} {} {}", operand.name, short(operand.value), operand.unit);
        if let Some(Cpu { per, all_cores_ns, .. }) = operand.cpu {
            let _ = write!(text, " ({} ns/{per})", short(all_cores_ns));
        }
        text += "; ";
    }
    text.trim_end_matches("; ").to_owned()
}

fn terminal_row(figure: &Figure) -> String {
    let taken = &figure.taken;
    let spread = format!("{}..{}", short(taken.spread.lowest), short(taken.spread.highest));
    let retaken = match taken.retaken {
        0 => String::new(),
        pairs => format!("; {pairs} pairs taken again"),
    };
    format!(
        "{:56} {:>8} {:<7} {:>8} {spread:>15}  {:<7} {}{retaken}",
        figure.name,
        short(taken.value),
        taken.unit,
        figure.bar.to_string(),
        verdict(figure),
        operands(figure)
    )
}

fn markdown_row(figure: &Figure) -> String {
    let taken = &figure.taken;
    // A ratio needs no unit.
    let unit = if taken.unit == "ratio" { "" } else { &taken.unit };
    let value = format!("{} {unit}", short(taken.value));
    let value = match verdict(figure) {
        "" => value.trim().to_owned(),
        verdict => format!("{}, {verdict}", value.trim()),
    };
    let spread = format!("{} to {}", short(taken.spread.lowest), short(taken.spread.highest));
    let runs = match taken.retaken {
        0 => taken.runs.to_string(),
        pairs => format!("{}, {pairs} taken again", taken.runs),
    };
    let (name, bar) = (format!("`{}`", figure.name), figure.bar.to_string());
    cells([&name, &bar, &value, &spread, &operands(figure), &runs, &figure.commit])
}

fn cells(cells: [&str; 7]) -> String {
    format!("| {} |", cells.map(|cell| if cell.is_empty() { "-" } else { cell }).join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::{Operand, Per, Spread, Taken};

    fn figure() -> Figure {
        let cpu = Some(Cpu { per: Per::Byte, all_cores_ns: 0.25, process_ns: 0.2 });
        let taken = Taken {
            value: 0.9512,
            unit: "ratio".into(),
            operands: vec![
                Operand { cpu, ..Operand::new("array", 3.81, "GB/s") },
                Operand::new("model", 4.0, "GB/s"),
            ],
            cpu,
            runs: 5,
            retaken: 2,
            spread: Spread { lowest: 0.94, highest: 0.96 },
        };
        Figure {
            name: "array.nvme.x".into(),
            taken,
            bar: Bar::AtLeast(0.95),
            bar_met: true,
            seconds: 12.5,
            commit: "0123abc".into(),
            machine: "m".into(),
        }
    }

    #[test]
    fn a_row_has_everything_that_docs_show() {
        assert_eq!(
            Form::Markdown.row(&Outcome::Taken(figure())),
            "| `array.nvme.x` | >= 0.95 | 0.951, met | 0.940 to 0.960 | \
             array 3.81 GB/s (0.250 ns/byte); model 4.00 GB/s | 5, 2 taken again | 0123abc |"
        );
        assert!(Form::Terminal.row(&Outcome::Taken(figure())).contains(" met "));
    }

    #[test]
    fn a_figure_not_taken_is_never_met() {
        let Figure { name, bar, commit, machine, .. } = figure();
        let not_taken = "raw reached 2.13 of 4.00 GB/s".to_owned();
        let outcome = Outcome::NotTaken(NotTaken { name, bar, not_taken, commit, machine });
        for form in [Form::Terminal, Form::Markdown] {
            let row = form.row(&outcome);
            assert!(row.contains("not taken: raw reached 2.13 of 4.00 GB/s"), "{row}");
            assert!(!row.contains("met"), "{row}");
        }
    }

    #[test]
    fn all_rows_of_a_markdown_table_are_as_wide() {
        let columns = |row: &str| row.matches('|').count();
        let heading = Form::Markdown.heading();
        let spec = crate::suite::specs()[0];
        let rows =
            [Form::Markdown.row(&Outcome::Taken(figure())), Form::Markdown.row_before(&spec)];
        for row in heading.lines().chain(rows.iter().map(String::as_str)) {
            assert_eq!(columns(row), 8, "{row}");
        }
    }
}
