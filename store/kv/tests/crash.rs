//! Power cuts at any moment: `SIM_SEED=42` replays one seed, `SIM_SEEDS=20000` runs many.

mod common;

use common::world::world;

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
        batches +=
            std::panic::catch_unwind(|| world(seed, 4).0).unwrap_or_else(|_| panic!("seed {seed}"));
    }
    println!("{batches} batches");
}

#[test]
fn one_seed_fixes_the_run() {
    for seed in 0..5 {
        assert_eq!(world(seed, 3), world(seed, 3), "seed {seed}");
    }
}
