//! Takes figures one after the other and shows each as soon as it is there; an interrupted run can be gone on with.

use crate::figure::{self, Bar, Figure, Outcome};
use crate::harness::Effort;
use crate::suite::Spec;
use crate::table::Form;
use anyhow::{Context, Result};
use std::io::{IsTerminal, stderr};
use std::path::PathBuf;

/// What to take, and where to put it.
pub struct Bench {
    pub specs: Vec<Spec>,
    pub effort: Effort,
    pub form: Form,
    /// The JSON file of all outcomes.
    pub out: Option<PathBuf>,
    /// Figures that `out` holds already stay there, and are not taken again, if they are what would be taken now.
    pub is_resumed: bool,
}

/// What an earlier run took is as good as what would be taken now: of this commit, on this machine, of so many runs.
fn is_good(outcome: &Outcome, effort: Effort, commit: &str, machine: &str) -> bool {
    let Outcome::Taken(figure) = outcome else { return false };
    figure.commit == commit && figure.machine == machine && figure.taken.runs >= effort.runs
}

impl Bench {
    /// Prints the table, says below it how many bars are met, and tells whether all figures could be taken.
    ///
    /// # Errors
    ///
    /// When the file of figures cannot be read or written, or there is nothing to go on with.
    pub fn run(&self) -> Result<bool> {
        let kept = self.kept()?;
        if self.form == Form::Markdown {
            println!("Machine: {}.\n", figure::machine());
        }
        println!("{}", self.form.heading());
        let mut outcomes: Vec<Outcome> = Vec::new();
        for (number, spec) in self.specs.iter().enumerate() {
            let outcome = match kept.iter().find(|outcome| outcome.name() == spec.name) {
                Some(outcome) => outcome.clone(),
                None => self.take(number, spec),
            };
            println!("{}", self.form.row(&outcome));
            outcomes.push(outcome);
            // After each one: an interrupted run keeps what it has, here and of the run before.
            if let Some(out) = &self.out {
                let is_shown = |o: &&Outcome| outcomes.iter().any(|shown| shown.name() == o.name());
                let behind = kept.iter().filter(|o| !is_shown(o)).cloned();
                let all: Vec<Outcome> = outcomes.iter().cloned().chain(behind).collect();
                figure::write_json(out, &all)?;
            }
        }
        Ok(self.summed_up(&outcomes))
    }

    /// What an interrupted run leaves to this one.
    fn kept(&self) -> Result<Vec<Outcome>> {
        if !self.is_resumed {
            return Ok(Vec::new());
        }
        let out = self.out.as_ref().context("--resume goes on with the file of --out")?;
        let (commit, machine) = (figure::commit(), figure::machine());
        anyhow::ensure!(
            figure::names_a_state(&commit),
            "the sources are not those of a commit ({commit}): what was taken before may be of others; commit first, or \
             begin anew without --resume"
        );
        let mut kept = figure::read_json(out)?;
        kept.retain(|outcome| is_good(outcome, self.effort, &commit, &machine));
        let is_kept = |spec: &&Spec| kept.iter().any(|outcome| outcome.name() == spec.name);
        let there = self.specs.iter().filter(is_kept).count();
        eprintln!("goes on: {there} of {} figures are there", self.specs.len());
        Ok(kept)
    }

    fn take(&self, number: usize, spec: &Spec) -> Outcome {
        // Some take minutes. Only for somebody who looks on.
        let is_watched = stderr().is_terminal();
        if is_watched {
            eprint!("[{}/{}] {} ...", number + 1, self.specs.len(), spec.name);
        }
        let outcome = spec.measure(self.effort);
        if is_watched {
            eprint!("\r\x1b[K");
        }
        outcome
    }

    fn summed_up(&self, outcomes: &[Outcome]) -> bool {
        let taken = |outcome: &Outcome| match outcome {
            Outcome::Taken(figure) => Some(figure.clone()),
            Outcome::NotTaken(_) => None,
        };
        let figures: Vec<Figure> = outcomes.iter().filter_map(taken).collect();
        let not_taken = outcomes.len() - figures.len();
        let barred = figures.iter().filter(|figure| figure.bar != Bar::None);
        let (met, missed): (Vec<&Figure>, Vec<&Figure>) = barred.partition(|figure| figure.bar_met);
        let minutes = figures.iter().map(|figure| figure.seconds).sum::<f64>() / 60.0;
        // On the other stream: the first one holds the table and nothing else.
        eprintln!(
            "bars: {} met, {} missed; {not_taken} figures not taken; {minutes:.0} minutes",
            met.len(),
            missed.len()
        );
        if self.effort.is_quick {
            eprintln!("quick: these figures do not count");
        }
        not_taken == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::{Spread, Taken};

    fn taken(runs: usize) -> Taken {
        let spread = Spread { lowest: 1.0, highest: 2.0 };
        let (unit, operands, cpu) = ("ratio".into(), Vec::new(), None);
        Taken { value: 1.5, unit, operands, cpu, runs, retaken: 0, spread }
    }

    fn figure(name: &str, commit: &str, machine: &str, runs: usize) -> Outcome {
        let (bar, bar_met, seconds) = (Bar::AtLeast(1.0), true, 3.0);
        let (name, commit, machine) = (name.into(), commit.into(), machine.into());
        Outcome::Taken(Figure { name, taken: taken(runs), bar, bar_met, seconds, commit, machine })
    }

    #[test]
    fn only_what_would_be_taken_now_is_kept() {
        let effort = Effort { runs: 5, is_quick: false };
        let is_kept = |outcome: &Outcome| is_good(outcome, effort, "c", "m");
        assert!(is_kept(&figure("a", "c", "m", 5)) && is_kept(&figure("a", "c", "m", 7)));
        assert!(!is_kept(&figure("a", "c (quick)", "m", 5)), "a quick one");
        assert!(!is_kept(&figure("a", "d", "m", 5)), "of another commit");
        assert!(!is_kept(&figure("a", "c", "n", 5)), "of another machine");
        assert!(!is_kept(&figure("a", "c", "m", 4)), "of fewer runs");
    }

    #[test]
    fn figures_are_read_as_they_were_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("made/figures.json");
        assert_eq!(figure::read_json(&path).expect("nothing there yet"), []);
        let not_taken = Outcome::NotTaken(figure::NotTaken {
            name: "b".into(),
            bar: Bar::None,
            not_taken: "no fio here".into(),
            commit: "c".into(),
            machine: "m".into(),
        });
        let outcomes = [figure("a", "c", "m", 5), not_taken];
        figure::write_json(&path, &outcomes).expect("written");
        assert_eq!(figure::read_json(&path).expect("read"), outcomes);
        std::fs::write(&path, "[").expect("written");
        assert!(figure::read_json(&path).is_err(), "a file that is no figures is not written over");
    }
}
