//! The real daemon, killed under load again and again.
//!
//! A cluster in a box on `volatile` drives: what was not flushed lives in the node's memory, so
//! `kill -9` of the node is a power cut of all its drives. Several programs work on one mount;
//! the mount's process lives on over every kill. Each program keeps, in this process and so
//! outside of the mount, what was acknowledged to it. No program may see an error, and after
//! every restart all that was acknowledged is there, exactly once. At the end node and mount die
//! together, and what was synced is there.
//!
//! `LEVADA_KILL_ROUNDS=n` rounds (5), `LEVADA_KILL_SEED=n` for the same choices (not the same
//! interleaving), `LEVADA_KILL_DIR=dir` for the drives (a temporary directory of the build).

mod box_under_test;
#[path = "../support/launcher.rs"]
mod launcher;
mod programs;
#[path = "../support/random.rs"]
mod random;
mod running;

use anyhow::{Context, Result, ensure};
use box_under_test::BoxUnderTest;
use random::Random;
use running::Running;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Drives that fail at the end: both hold copies of the same metadata.
const LOST_DRIVES: [&str; 2] = ["d00", "d02"];
/// Everything besides the rounds takes less than this, and so does each round.
const PART_LIMIT: Duration = Duration::from_secs(150);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a whole number"))
}

#[test]
fn what_was_acknowledged_survives_every_kill() {
    if !rustix_is_root() {
        println!("skipped: a FUSE mount needs root");
        return;
    }
    let rounds = number("LEVADA_KILL_ROUNDS").unwrap_or(5);
    let seed = number("LEVADA_KILL_SEED").unwrap_or_else(random::any);
    let parent = std::env::var_os("LEVADA_KILL_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    println!("LEVADA_KILL_SEED={seed}, {rounds} rounds");
    let mut rig = BoxUnderTest::new(&parent, seed).expect("a box");
    if let Err(error) = run(&mut rig, rounds, &mut Random::new(seed)) {
        rig.tell_logs();
        panic!("seed {seed}: {error:#}");
    }
}

fn rustix_is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

fn run(rig: &mut BoxUnderTest, rounds: u64, random: &mut Random) -> Result<()> {
    rig.patience(PART_LIMIT);
    rig.up()?;
    rig.mount()?;
    let mut running = Running::start(programs::all(rig.mnt())?, random);
    for round in 1..=rounds {
        rig.patience(PART_LIMIT);
        kill_once(rig, &mut running, random).with_context(|| format!("round {round}"))?;
    }
    rig.patience(PART_LIMIT);
    lose_drives(rig, &mut running)?;
    let mut programs = running.end()?;

    rig.patience(PART_LIMIT);
    // Now nothing may be left in any memory but the node's own.
    rig.umount()?;
    rig.kill_node()?;
    rig.up()?;
    rig.mount()?;
    for program in &mut programs {
        program.check().with_context(|| format!("{} after an unmount", program.name()))?;
    }
    programs.retain(|program| program.knows_what_is_synced());
    lose_the_machine(rig, programs, random)?;
    rig.patience(PART_LIMIT);
    rig.levada(&["scrub", "--watch"])?;
    rig.umount()?;
    rig.levada(&["down"])?;
    Ok(())
}

/// Load, a kill, perhaps another one while the node starts or clients send again, a check.
fn kill_once(rig: &mut BoxUnderTest, running: &mut Running, random: &mut Random) -> Result<()> {
    let loaded_for = Duration::from_millis(random.between(200, 800));
    sleep(loaded_for);
    let before = running.steps();
    rig.kill_node()?;
    match random.below(4) {
        0 => {
            // Killed while it starts.
            rig.up_killed_after(Duration::from_millis(random.below(400)))?;
        }
        1 => {
            // Killed while clients send again what the power cut took.
            rig.up()?;
            sleep(Duration::from_millis(random.below(60)));
            rig.kill_node()?;
        }
        _ => {}
    }
    let start = Instant::now();
    rig.up()?;
    let up_after = start.elapsed();
    rig.still_mounted()?;
    running.check()?;
    let steps = running.steps();
    println!(
        "{loaded_for:?} of load, up again in {up_after:?}, checked in {:?}; {} steps so far; {} MiB free",
        start.elapsed() - up_after,
        steps.iter().sum::<u64>(),
        rig.free_mib()?
    );
    let stuck = steps.iter().zip(&before).any(|(now, before)| now < before);
    ensure!(!stuck, "a program went backwards");
    Ok(())
}

/// Node and mount die together, under load. Nobody sends again what was not synced: all that was
/// synced is there, and of the rest only what was written.
fn lose_the_machine(
    rig: &mut BoxUnderTest,
    programs: Vec<Box<dyn programs::Program>>,
    random: &mut Random,
) -> Result<()> {
    rig.patience(PART_LIMIT);
    let mut running = Running::start(programs, random);
    sleep(Duration::from_millis(random.between(200, 800)));
    running.check().context("before the machine is lost")?;
    sleep(Duration::from_millis(random.between(50, 400)));
    rig.kill_node_and_mount(random.once_in(2))?;
    let mut programs = running.abandon().context("as the machine was lost")?;
    for program in &mut programs {
        program.close();
    }
    let start = Instant::now();
    rig.up()?;
    // The node waits 30 s for what the dead mount held.
    rig.mount()?;
    for program in &mut programs {
        program
            .check_after_loss()
            .with_context(|| format!("{} after the machine was lost", program.name()))?;
    }
    println!("the machine lost, up again and checked in {:?}", start.elapsed());
    Ok(())
}

/// Two drives fail under load, spares take their place, a scrub finds nothing wrong.
fn lose_drives(rig: &mut BoxUnderTest, running: &mut Running) -> Result<()> {
    for drive in LOST_DRIVES {
        rig.levada(&["drive", "fail", drive])?;
        sleep(Duration::from_millis(200));
    }
    running.check().context("with two drives lost")?;
    rig.kill_node()?;
    rig.up()?;
    running.check().context("killed with two drives lost")?;
    rig.levada(&["rebuild", "--watch"])?;
    running.check().context("after the rebuild")?;
    rig.patience(PART_LIMIT);
    println!("{}", rig.levada(&["scrub", "--watch"])?.trim());
    Ok(())
}
