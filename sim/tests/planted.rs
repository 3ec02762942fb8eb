//! The simulation proves something: bugs planted in every floor are found by it. A few here,
//! all of them in `scripts/soak`.

use levada_sim::planted::{BUGS, hunt};

#[test]
fn planted_bugs_are_found() {
    let quick = [
        "raid-copy-left-out",
        "raid-resync-skipped",
        "raid-flush-dropped",
        "raid-standing-not-recorded",
        "kv-log-not-durable",
        "kv-replay-skipped",
        "kv-checkpoint-not-flushed",
        "kv-acknowledged-out-of-order",
        "kv-epoch-ignored",
        "log-commit-not-durable",
        "log-tombstone-dropped",
        "log-flush-dropped",
        "log-staged-not-replayed",
        "log-staged-row-left-out",
        "client-written-not-kept",
        "client-objects-not-cut",
        "client-size-before-commit",
        "meta-reply-not-stored",
        "meta-answered-before-durable",
        "meta-cookie-given-twice",
    ];
    for name in quick {
        let bug = BUGS.iter().find(|bug| bug.name == name).expect("listed");
        let (seed, message) =
            hunt(bug).unwrap_or_else(|| panic!("{name} was not found in {} seeds", bug.seeds));
        println!("{name}: seed {seed}: {}", message.lines().next().unwrap_or_default());
    }
}
