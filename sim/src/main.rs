//! `levada-sim`: seeds by the thousand, for `scripts/soak`.
//!
//! - `levada-sim soak SEEDS STATE` runs every scenario up to that many seeds on every core (or on
//!   `SIM_THREADS` of them), goes on where the file STATE says the same build stopped, and prints
//!   the tables of coverage. Seeds that failed come first. It stops at the first failure, unless `SIM_KEEP_GOING` is set.
//! - `levada-sim run SCENARIO FROM TO [BUG]` runs those seeds, with a planted bug if given.
//!   With `SIM_TRACE` set it tells what befalls the world, and `RUST_LOG` chooses what the
//!   engines tell.
//! - `levada-sim planted [PART]` hunts every planted bug, or those with PART in their names.

use levada_sim::soak::{self, Part, Soak};
use levada_sim::{Scenario, arrays, enclosures, planted, remote, seeds, stack, stores};
use std::path::Path;
use std::process::ExitCode;

/// The stack contains all the others, which come to places that it seldom reaches.
const PARTS: &[Part] = &[
    Part { percent: 100, empty_cells: stack::empty_cells, ..part("stack", stack::stack) },
    Part { percent: 2, seeds_min: stack::LOSSES as u64, ..part("losses", stack::losses) },
    part("mirror", arrays::mirror),
    part("raid6", arrays::parity),
    part("journaled", arrays::journaled),
    part("kv", stores::kv),
    part("log", stores::log),
    part("nvme", remote::nvme),
    part("enclosures", enclosures::enclosures),
];

const fn part(name: &'static str, scenario: Scenario) -> Part {
    Part { name, scenario, percent: 25, seeds_min: 0, empty_cells: |_| Vec::new() }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let range = |from: &str, to: &str| Some(from.parse::<u64>().ok()?..to.parse::<u64>().ok()?);
    match words[..] {
        ["soak", count, state] => match count.parse() {
            Ok(count) => soak_all(count, Path::new(state)),
            Err(_) => usage(),
        },
        ["run", part, from, to] => match (scenario(part), range(from, to)) {
            (Some(scenario), Some(seeds)) => run(scenario, seeds, None),
            _ => usage(),
        },
        ["run", part, from, to, bug] => {
            let known = planted::BUGS.iter().find(|known| known.name == bug);
            match (scenario(part), range(from, to), known) {
                (Some(scenario), Some(seeds), Some(bug)) => run(scenario, seeds, Some(bug.name)),
                _ => usage(),
            }
        }
        ["chunk", part, from, to] => match (scenario(part), range(from, to)) {
            (Some(scenario), Some(seeds)) => {
                soak::chunk(scenario, seeds);
                ExitCode::SUCCESS
            }
            _ => usage(),
        },
        ["planted"] => hunt_all(""),
        ["planted", part] => hunt_all(part),
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    let parts: Vec<&str> = PARTS.iter().map(|part| part.name).collect();
    eprintln!("usage: levada-sim soak SEEDS STATE");
    eprintln!("       levada-sim run SCENARIO FROM TO [BUG]");
    eprintln!("       levada-sim planted [PART]");
    eprintln!("scenarios: {}", parts.join(", "));
    ExitCode::from(2)
}

fn scenario(name: &str) -> Option<Scenario> {
    PARTS.iter().find(|part| part.name == name).map(|part| part.scenario)
}

fn soak_all(count: u64, state: &Path) -> ExitCode {
    let keep_going = std::env::var_os("SIM_KEEP_GOING").is_some();
    let soaked = Soak::resume(PARTS, count, state).and_then(|soak| soak.run(keep_going));
    match soaked {
        Ok(soak::End::Clean) => ExitCode::SUCCESS,
        Ok(soak::End::Failed) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{}: {error}", state.display());
            ExitCode::FAILURE
        }
    }
}

fn run(scenario: Scenario, seeds: std::ops::Range<u64>, bug: Option<&'static str>) -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing_subscriber::filter::LevelFilter::OFF.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .init();
    let summary = seeds::run(seeds, bug, scenario);
    let took = summary.wall.as_secs_f64();
    let rate = summary.seeds as f64 / took;
    println!("{} seeds in {took:.1} s, {rate:.1} seeds/s\n{}", summary.seeds, summary.coverage);
    match summary.failure {
        None => ExitCode::SUCCESS,
        Some((seed, message)) => {
            eprintln!("seed {seed} failed: {message}");
            ExitCode::FAILURE
        }
    }
}

fn hunt_all(part: &str) -> ExitCode {
    // Every find is a panic; their messages are printed below, once.
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = 0;
    for bug in planted::BUGS.iter().filter(|bug| bug.name.contains(part)) {
        match planted::hunt(bug) {
            Some((seed, message)) => {
                let first = message.lines().next().unwrap_or_default();
                println!("{}: found by seed {seed}: {}", bug.name, first);
            }
            None => {
                missed += 1;
                println!("{}: NOT FOUND in {} seeds", bug.name, bug.seeds);
            }
        }
    }
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
