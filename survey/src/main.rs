//! The `levada-survey` program.

use anyhow::Result;
use clap::{Parser, Subcommand};
use levada_base::units::{KIB, MIB};
use levada_survey::bench::Bench;
use levada_survey::disk::{self, NamesWork};
use levada_survey::harness::Effort;
use levada_survey::load::Load;
use levada_survey::mount::{self, Access};
use levada_survey::table::Form;
use levada_survey::{ladder, qos, suite};
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
        /// Goes on where a run was interrupted: keeps what FILE holds of this commit, this machine and as many runs.
        #[arg(long, requires = "out")]
        resume: bool,
        /// Only figures whose name contains this; may be repeated.
        #[arg(long, value_name = "PATTERN")]
        only: Vec<String>,
        /// Names the figures instead of taking them.
        #[arg(long)]
        list: bool,
        /// Runs, or pairs of runs, per figure.
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
        runs: u16,
        /// Prints nothing but the table, as docs/figures.md shows it; with --list, without values.
        #[arg(long)]
        markdown: bool,
        /// An eighth of the work: shows that everything runs; the figures do not count.
        #[arg(long)]
        quick: bool,
    },
    /// Carries one load out on a file that is there, past the page cache and durably, and prints its
    /// bytes and operations per second: to compare another tool with.
    File {
        #[arg(value_enum)]
        load: FileLoad,
        file: PathBuf,
        /// MiB of the file, from its start, that are touched.
        #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
        span_mib: u64,
        /// Operations in flight.
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
        depth: u16,
        /// 4 KiB operations of a random load.
        #[arg(long, default_value_t = 8192)]
        ops: u64,
        /// Of a random load.
        #[arg(long, default_value_t = 7)]
        seed: u64,
    },
    /// Makes, looks at or removes so many files of a directory: one process of the figures on names.
    #[command(hide = true)]
    Names {
        #[arg(value_enum)]
        work: NamesWork,
        dir: PathBuf,
        count: u64,
    },
    /// Draws what a guarantee is worth: p99 of a volume over time, alone and beside an aggressor, with and without one.
    Guarantee {
        /// Where to write the chart, as an SVG.
        file: PathBuf,
        /// How long each of the three lines takes.
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(2..))]
        seconds: u16,
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

/// The loads of `levada-survey file`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum FileLoad {
    /// 1 MiB writes in order, then fsync, inside the span.
    Write,
    /// 1 MiB reads in order.
    Read,
    /// 4 KiB reads anywhere.
    Randread,
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Bench { out, resume, only, list, runs, markdown, quick } => {
            let effort = Effort { runs: runs.into(), is_quick: quick };
            let chosen = |name: &str| only.is_empty() || only.iter().any(|o| name.contains(o));
            let specs: Vec<_> = suite::specs().into_iter().filter(|s| chosen(s.name)).collect();
            anyhow::ensure!(!specs.is_empty(), "no figure's name contains {only:?}; try --list");
            let form = if markdown { Form::Markdown } else { Form::Terminal };
            if list {
                if form == Form::Markdown {
                    println!("{}", form.heading());
                }
                specs.iter().for_each(|spec| println!("{}", form.row_before(spec)));
                return Ok(ExitCode::SUCCESS);
            }
            let bench = Bench { specs, effort, form, out, is_resumed: resume };
            Ok(if bench.run()? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::File { load, file, span_mib, depth, ops, seed } => {
            let (span, depth) = (0..span_mib * MIB, usize::from(depth));
            let (access, load) = match load {
                FileLoad::Write => (Access::Write, Load::sequential(span, MIB, depth)),
                FileLoad::Read => (Access::Read, Load::sequential(span, MIB, depth)),
                FileLoad::Randread => (Access::Read, Load::random(span, 4 * KIB, depth, ops, seed)),
            };
            let run = mount::drive(&file, access, &load)?;
            println!("{:.0} {:.0}", run.gb_per_s() * 1e9, run.kiops() * 1e3);
            Ok(ExitCode::SUCCESS)
        }
        Command::Names { work, dir, count } => {
            disk::do_names(work, &dir, count)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Guarantee { file, seconds } => {
            fs::write(file, qos::chart(Duration::from_secs(seconds.into()))?)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Ladder { dir, rounds } => {
            ladder::print(dir.as_deref(), rounds.into())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
