//! Power cuts at any moment: `SIM_SEED=42` replays one seed, `SIM_SEEDS=20000` runs many.

use crate::common::world::{Ground, world};

fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|n: String| n.parse::<u64>().ok());
    match number("SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SIM_SEEDS").unwrap_or(60),
    }
}

#[test]
fn a_prefix_with_everything_durable_survives_power_cuts() {
    let mut batches = 0;
    for seed in seeds() {
        batches += std::panic::catch_unwind(|| world(seed, 4, Ground::drive).0)
            .unwrap_or_else(|_| panic!("seed {seed}"));
    }
    println!("{batches} batches");
}

/// The same over the three-copy mirror, two of whose drives fail in the course of it.
#[test]
fn a_prefix_survives_on_a_mirror_with_failing_members() {
    let mut batches = 0;
    for seed in seeds() {
        batches += std::panic::catch_unwind(|| world(seed, 3, Ground::mirror).0)
            .unwrap_or_else(|_| panic!("seed {seed}"));
    }
    println!("{batches} batches on a mirror");
}

#[test]
fn one_seed_fixes_the_run() {
    for seed in 0..5 {
        assert_eq!(world(seed, 3, Ground::drive), world(seed, 3, Ground::drive), "seed {seed}");
    }
}
