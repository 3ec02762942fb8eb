//! `levada-sim`: seeds by the thousand, for `scripts/soak`.
//!
//! `levada-sim soak SEEDS STATE` runs every scenario up to that many seeds, goes on where the
//! file STATE says it stopped, and prints CPU hours. It ends with status 3 when there is more to
//! do: nodes that were killed where they stood leave memory behind, which the end of the process
//! gives back. `levada-sim planted [PART]` hunts every planted bug,
//! or those with PART in their names.

use levada_sim::{Coverage, Scenario, arrays, planted, seeds, stack};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

/// Seeds between two saves of the state.
const BATCH: u64 = 50;
/// Seeds run by one process.
const SEEDS_PER_PROCESS: u64 = 500;
/// The status that says so.
const MORE_TO_DO: u8 = 3;
/// Scenarios, and in how many hundredths of the seeds they take part: the stack contains them all.
const SCENARIOS: &[(&str, Scenario, u64)] =
    &[("stack", stack::stack, 100), ("mirror", arrays::mirror, 25), ("raid6", arrays::parity, 25)];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["soak", count, state] => match count.parse() {
            Ok(count) => soak(count, Path::new(state)),
            Err(_) => usage(),
        },
        ["planted"] => hunt_all(""),
        ["planted", part] => hunt_all(part),
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: levada-sim soak SEEDS STATE | levada-sim planted [PART]");
    ExitCode::from(2)
}

/// Seeds done so far, by scenario.
fn load(state: &Path) -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(state).unwrap_or_default();
    let line = |line: &str| {
        let (name, done) = line.split_once(' ')?;
        Some((name.to_owned(), done.trim().parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

fn save(state: &Path, done: &BTreeMap<String, u64>) -> std::io::Result<()> {
    let lines: Vec<String> = done.iter().map(|(name, done)| format!("{name} {done}\n")).collect();
    let fresh = state.with_extension("new");
    std::fs::write(&fresh, lines.concat())?;
    std::fs::rename(fresh, state)
}

fn soak(count: u64, state: &Path) -> ExitCode {
    let mut done = load(state);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get()) as f64;
    let mut left = SEEDS_PER_PROCESS;
    for (name, scenario, share) in SCENARIOS {
        let wanted = count * share / 100;
        let mut coverage = Coverage::default();
        let mut hours = 0.0;
        let mut at = done.get(*name).copied().unwrap_or(0);
        while at < wanted {
            if left == 0 {
                println!("{name}: the last {SEEDS_PER_PROCESS} seeds met\n{coverage}");
                return ExitCode::from(MORE_TO_DO);
            }
            let end = (at + BATCH.min(left)).min(wanted);
            left -= end - at;
            let summary = seeds::run(at..end, None, *scenario);
            coverage.add(&summary.coverage);
            hours += summary.wall.as_secs_f64() * cores / 3600.0;
            if let Some((seed, message)) = summary.failure {
                eprintln!("{name} failed: {message}\nreplay with SIM_SEED={seed}");
                return ExitCode::FAILURE;
            }
            at = end;
            done.insert((*name).to_owned(), at);
            if let Err(error) = save(state, &done) {
                eprintln!("{}: {error}", state.display());
                return ExitCode::FAILURE;
            }
            println!("{name}: {at} of {wanted} seeds, {hours:.2} CPU hours");
        }
        println!("{name}: {wanted} seeds clean\n{coverage}");
    }
    ExitCode::SUCCESS
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
