//! Two mounts of one file system against a file system in memory: random steps, taken on one mount or the other, each
//! told what the model says; the node is killed meanwhile. At the end of each tree both mounts show all of it.
//!
//! The mounts take turns. What one changed shows on the other at once, but for what that one has read of a file that stays open
//! just before (docs/SEMANTICS.md): before such a file is used on one mount, a moment goes by since the other one's turn.
//!
//! `LEVADA_TWO_STEPS=n` steps (2,000), `LEVADA_TWO_SEED=n` for the steps of one tree again. What fails is made as small
//! as it gets, and told. Needs root, io_uring and /dev/fuse.

mod carry_out;
#[path = "../support/launcher.rs"]
mod launcher;
mod model;
#[path = "../support/random.rs"]
mod random;
mod step;
#[path = "../support/mod.rs"]
mod support;
mod told;

use carry_out::Program;
use launcher::Launcher;
use model::Model;
use random::Random;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};
use step::{Step, steps};
use support::{Cluster, LEVADA, TINY, can_run, kill};

/// Of one tree: enough for it to become odd, few enough to make smaller.
const STEPS_EACH: usize = 1000;
/// Longer than what was read of an open file is there, on a busy machine as well.
const OLD_FOR: Duration = Duration::from_millis(200);
/// Trees that are made to find the steps that matter.
const TRIES: usize = 40;
/// A call that takes longer hangs.
const HANGS: Duration = Duration::from_secs(60);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a whole number"))
}

const MOUNTS: [&str; 2] = ["one", "other"];

struct Rig {
    cluster: Cluster,
    /// Trees made so far: each is a directory of its own.
    trees: u64,
}

impl Rig {
    fn new() -> Self {
        let roomy = TINY.replace("72MiB", "384MiB").replace("25MiB", "100MiB");
        let cluster = Cluster::new("two", &roomy);
        cluster.ok(&["up"]);
        for mount in MOUNTS {
            fs::create_dir(cluster.path(mount)).expect("made");
            cluster.ok(&["mount", mount]);
        }
        Self { cluster, trees: 0 }
    }

    /// Takes all steps in a new tree; what is wrong, and at which step.
    fn try_out(&mut self, steps: &[Step]) -> Result<(), (usize, String)> {
        self.trees += 1;
        let name = format!("tree {}", self.trees);
        fs::create_dir(self.cluster.path(MOUNTS[0]).join(&name)).expect("made");
        let mut programs = MOUNTS.map(|mount| Program::new(self.cluster.path(mount).join(&name)));
        let mut model = Model::new();
        // When the other one's last turn ended, for each mount.
        let mut others_turn = [Instant::now(); 2];
        let mut take = |model: &mut Model, at: usize, step: &Step| {
            if step.op.is_of_an_open_file() {
                sleep(OLD_FOR.saturating_sub(others_turn[step.mount].elapsed()));
            }
            let begun = Instant::now();
            let told = programs[step.mount].carry_out(step);
            others_turn[1 - step.mount] = Instant::now();
            if begun.elapsed() > HANGS {
                return Err((at, format!("it took {:?}", begun.elapsed())));
            }
            let expected = model.apply(step);
            let wrong = || told::difference(&told, &expected);
            if told == expected { Ok(()) } else { Err((at, wrong())) }
        };
        for (at, step) in steps.iter().enumerate() {
            take(&mut model, at, step)?;
        }
        let last = steps.last().map_or(0, |step| step.mount);
        for mount in [last, 1 - last] {
            for look in model.looks(mount) {
                take(&mut model, steps.len(), &look)
                    .map_err(|(at, wrong)| (at, format!("{look:?}: {wrong}")))?;
            }
        }
        drop(programs);
        fs::remove_dir_all(self.cluster.path(MOUNTS[0]).join(&name)).expect("removed");
        Ok(())
    }

    /// Fewer steps that fail as well: halves, quarters and so on are left out while it still fails.
    fn shrink(&mut self, mut steps: Vec<Step>) -> Vec<Step> {
        let mut tries = TRIES;
        let mut part = steps.len().div_ceil(2);
        while part > 0 && tries > 0 {
            let mut from = 0;
            while from < steps.len() && tries > 0 {
                let end = steps.len().min(from + part);
                let fewer = [&steps[..from], &steps[end..]].concat();
                tries -= 1;
                match self.try_out(&fewer) {
                    Err((at, _)) => {
                        steps = fewer;
                        steps.truncate(at + 1);
                    }
                    Ok(()) => from = end,
                }
            }
            part /= 2;
        }
        steps
    }
}

/// Ends the trouble also when a test ends by a panic.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn two_mounts_show_what_one_tree_in_memory_says() {
    if !can_run() {
        return;
    }
    let wanted = number("LEVADA_TWO_STEPS").unwrap_or(2000);
    let one = number("LEVADA_TWO_SEED");
    let first = one.unwrap_or_else(random::any);
    let mut rig = Rig::new();
    let launcher = Launcher::new(rig.cluster.dir.path()).expect("a shell");
    let over = AtomicBool::new(false);
    let (mut done, mut seed) = (0, first);
    std::thread::scope(|scope| {
        let dir = rig.cluster.dir.path().to_owned();
        let over = &over;
        let trouble = scope.spawn(move || kill_again_and_again(&dir, launcher, over, first));
        let ended = Ended(over);
        let failed = loop {
            let steps = steps(&mut Random::new(seed), STEPS_EACH, 30);
            if let Err((at, wrong)) = rig.try_out(&steps) {
                break Some((steps[..steps.len().min(at + 1)].to_vec(), wrong));
            }
            done += steps.len() as u64;
            println!("LEVADA_TWO_SEED={seed}: as it should be; {done} steps so far");
            if one.is_some() || done >= wanted {
                break None;
            }
            seed += 1;
        };
        drop(ended);
        let kills = trouble.join().expect("the node starts again");
        println!("the node was killed {kills} times");
        if let Some((steps, wrong)) = failed {
            let count = steps.len();
            let fewer = rig.shrink(steps);
            for step in &fewer {
                println!("{step:?}");
            }
            panic!(
                "LEVADA_TWO_SEED={seed}, step {count}: {wrong}; the {} steps above fail too",
                fewer.len()
            );
        }
        assert!(one.is_some() || kills > 0, "nothing was disturbed");
    });
}

/// Kills the node every few seconds and starts it again. How often.
fn kill_again_and_again(
    dir: &std::path::Path,
    mut launcher: Launcher,
    over: &AtomicBool,
    seed: u64,
) -> u64 {
    let mut random = Random::new(seed);
    let cluster = dir.join("levada.toml");
    let mut kills = 0;
    loop {
        let next = Instant::now() + Duration::from_millis(random.between(2000, 8000));
        while Instant::now() < next {
            if over.load(Ordering::Relaxed) {
                return kills;
            }
            sleep(Duration::from_millis(50));
        }
        let lock = fs::read_to_string(dir.join("state/node.lock")).expect("it runs");
        kill(lock.trim().parse().expect("a process id"));
        kills += 1;
        let words = [LEVADA, "-f", cluster.to_str().expect("text"), "up", "--no-mounts"];
        let started = launcher.start(&words).expect("it starts");
        let told = launcher.finish(&started, HANGS).expect("it ends");
        assert!(told.success, "{}{}", told.output, told.errors);
    }
}
