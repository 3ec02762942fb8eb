//! The stores over arrays whose drives fail and lose power.

use levada_sim::{seeds, stores};

#[test]
fn the_key_value_store_keeps_its_promises() {
    seeds::check("kv", 60, stores::kv);
}

#[test]
fn the_object_log_keeps_its_promises() {
    let coverage = seeds::check("log", 60, stores::log);
    // One seed alone, as SIM_SEED replays it, need not meet everything.
    if std::env::var_os("SIM_SEED").is_none() {
        assert!(coverage.counted("segments cleaned") > 0, "the cleaner was never reached");
        assert!(coverage.counted("changes refused: full") > 0, "the log was never full");
    }
}

#[test]
fn one_seed_fixes_the_run() {
    for scenario in [stores::kv, stores::log] {
        assert_eq!(scenario(3).trace_hash, scenario(3).trace_hash);
    }
}
