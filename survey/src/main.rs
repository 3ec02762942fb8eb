//! The `levada-survey` program.

use anyhow::Result;
use clap::{Parser, Subcommand};
use levada_survey::figure::{self, Bar, Figure};
use levada_survey::harness::Effort;
use levada_survey::{ladder, suite};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "levada-survey", about = "Measures every layer of Levada.", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Takes the figures and prints them as a table. Fails when one could not be taken; a missed
    /// bar is only said.
    Bench {
        /// Where to write the figures as JSON.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Only figures whose name contains this; may be repeated.
        #[arg(long, value_name = "PATTERN")]
        only: Vec<String>,
        /// Names the figures instead of taking them.
        #[arg(long)]
        list: bool,
        /// Runs, or pairs of runs, per figure.
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
        runs: u16,
        /// An eighth of the work: shows that everything runs; the figures do not count.
        #[arg(long)]
        quick: bool,
    },
    /// Prints how many percent of the raw drives reach each layer.
    Ladder {
        /// Where drives are made as files, and removed again; without it they are modelled in
        /// memory.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// Rounds over all layers.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
        rounds: u16,
    },
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Bench { out, only, list, runs, quick } => {
            let effort = Effort { runs: runs.into(), is_quick: quick };
            let chosen = |name: &str| only.is_empty() || only.iter().any(|o| name.contains(o));
            let specs: Vec<_> = suite::specs().into_iter().filter(|s| chosen(s.name)).collect();
            anyhow::ensure!(!specs.is_empty(), "no figure's name contains {only:?}; try --list");
            if list {
                for spec in specs {
                    println!("{:46} {:>8}  {}", spec.name, spec.bar.to_string(), spec.what);
                }
                return Ok(ExitCode::SUCCESS);
            }
            bench(&specs, effort, out)
        }
        Command::Ladder { dir, rounds } => {
            ladder::print(dir.as_deref(), rounds.into())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn bench(specs: &[suite::Spec], effort: Effort, out: Option<PathBuf>) -> Result<ExitCode> {
    println!("{}", figure::heading());
    let mut figures: Vec<Figure> = Vec::new();
    let mut failed = 0;
    for spec in specs {
        match spec.measure(effort) {
            Ok(figure) => {
                println!("{}", figure::row(&figure));
                figures.push(figure);
            }
            Err(error) => {
                failed += 1;
                println!("{:46} could not be taken: {error:#}", spec.name);
            }
        }
        // After each one: an interrupted run keeps what it has.
        if let Some(out) = &out {
            figure::write_json(out, &figures)?;
        }
    }
    let barred = figures.iter().filter(|figure| figure.bar != Bar::None);
    let (met, missed): (Vec<&Figure>, Vec<&Figure>) = barred.partition(|figure| figure.bar_met);
    println!("bars: {} met, {} missed; {failed} figures not taken", met.len(), missed.len());
    if effort.is_quick {
        println!("quick: these figures do not count");
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
