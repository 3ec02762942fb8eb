//! The planted bugs, and the scenario that has to find each.

use crate::seeds::{self, Scenario};
use crate::{arrays, enclosures, remote, stack, stores};

/// A planted bug.
#[derive(Clone, Copy)]
pub struct Bug {
    /// As in `levada_base::planted!`.
    pub name: &'static str,
    pub scenario: Scenario,
    /// Seeds within which it has to be found.
    pub seeds: u64,
}

const fn bug(name: &'static str, scenario: Scenario, seeds: u64) -> Bug {
    Bug { name, scenario, seeds }
}

/// The planted bugs, each hunted where it is met most often. Those that only clients who share
/// directories would notice are hunted by the random tests of `fs/meta`.
pub const BUGS: &[Bug] = &[
    bug("raid-copy-left-out", arrays::mirror, 40),
    bug("raid-copies-not-compared", stores::kv, 40),
    bug("raid-resync-skipped", arrays::mirror, 40),
    bug("raid-flush-dropped", arrays::parity, 40),
    bug("raid-map-not-persisted", arrays::parity, 60),
    bug("raid-standing-not-recorded", arrays::parity, 60),
    bug("raid-cursor-ahead-of-flush", arrays::parity, 200),
    bug("raid-cursor-told-early", arrays::parity, 1600),
    bug("raid-update-not-recorded", arrays::journaled, 2000),
    bug("raid-journal-not-replayed", arrays::journaled, 2000),
    bug("raid-journal-copy-left-out", arrays::journaled, 2000),
    bug("raid-journal-not-durable", arrays::journaled, 2000),
    bug("raid-journal-not-voided", arrays::journaled, 2000),
    bug("raid-reconstructs-beside-updates", arrays::journaled, 2000),
    bug("raid-shuns-beside-updates", arrays::journaled, 2000),
    bug("raid-neighbour-served-stale", arrays::journaled, 40),
    bug("raid-update-leaves-out-who-is-rebuilt", arrays::journaled, 2000),
    bug("raid-list-not-recorded", arrays::journaled, 2000),
    bug("raid-list-not-settled", arrays::journaled, 2000),
    bug("raid-list-outlives-flush", arrays::journaled, 2000),
    bug("raid-list-over-records", arrays::journaled, 2000),
    bug("raid-update-of-listed-stripe", arrays::journaled, 2000),
    bug("raid-lost-not-persisted", arrays::journaled, 2000),
    bug("raid-missed-not-noted", arrays::journaled, 2000),
    bug("raid-under-way-not-missed", arrays::journaled, 2000),
    bug("raid-missed-forgotten", arrays::journaled, 2000),
    bug("kv-log-not-durable", stores::kv, 20),
    bug("kv-replay-skipped", stores::kv, 20),
    bug("kv-checkpoint-not-flushed", stores::kv, 200),
    bug("kv-checkpoint-too-early", stores::kv, 600),
    bug("kv-tail-too-early", stores::kv, 2000),
    bug("kv-acknowledged-out-of-order", stores::kv, 100),
    bug("kv-epoch-ignored", stores::kv, 20),
    bug("log-commit-not-durable", stores::log, 60),
    bug("log-flush-dropped", stores::log, 40),
    bug("log-staged-not-replayed", stores::log, 20),
    bug("log-staged-row-left-out", stores::log, 40),
    bug("log-inheritance-not-told", stores::log, 2000),
    bug("log-tombstone-dropped", stores::log, 200),
    bug("log-lost-stripe-passed-over", stores::log, 2000),
    bug("log-page-begins-empty", stores::log, 40),
    bug("log-checksum-ignored", stack::stack, 600),
    bug("object-verifier-ignored", stack::stack, 40),
    bug("client-written-not-kept", stack::stack, 20),
    bug("client-sent-again-in-reverse", stack::stack, 40),
    bug("client-objects-not-cut", stack::stack, 20),
    bug("client-size-before-commit", stack::stack, 40),
    bug("client-durable-unstable", stack::stack, 40),
    bug("client-records-over-a-cut", stack::stack, 20),
    bug("meta-reply-not-stored", stack::stack, 200),
    bug("meta-answered-before-durable", stack::stack, 40),
    bug("meta-cookie-given-twice", stack::stack, 20),
    bug("meta-tail-not-carried", stack::stack, 20),
    bug("meta-lost-numbers-given-again", stack::stack, 40),
    bug("client-tail-not-held", stack::stack, 20),
    bug("client-tail-not-handed-back", stack::stack, 20),
    bug("fsck-use-not-asked", stack::stack, 20),
    bug("fsck-two-looks", stack::stack, 300),
    bug("nvme-overwrites-an-open-change", remote::nvme, 60),
    bug("nvme-overwrites-a-lost-change", remote::nvme, 6000),
    bug("nvme-unflushed-not-written-again", remote::nvme, 60),
    bug("nvme-writes-beside-what-is-written-again", remote::nvme, 12000),
    bug("nvme-all-versions-written-again", remote::nvme, 1500),
    bug("nvme-flush-covers-what-came-later", remote::nvme, 1000),
    bug("nvme-owner-not-looked-for", remote::nvme, 40),
    bug("nvme-witness-not-heard", remote::nvme, 1000),
    bug("nvmet-reservation-not-checked", remote::nvme, 40),
    bug("nvmet-preemption-does-not-wait", remote::nvme, 400),
    bug("nvmet-flush-dropped", remote::nvme, 40),
    bug("nvmet-fua-ignored", remote::nvme, 40),
    bug("raid-minority-goes-on", enclosures::enclosures, 600),
    bug("raid-vanished-not-recorded", enclosures::enclosures, 600),
    bug("drive-label-not-heard", enclosures::enclosures, 40),
    bug("node-drives-not-claimed", enclosures::enclosures, 40),
];

/// The seed that finds a bug, and what it says.
#[must_use]
pub fn hunt(bug: &Bug) -> Option<(u64, String)> {
    seeds::run(0..bug.seeds, Some(bug.name), bug.scenario).failure
}
