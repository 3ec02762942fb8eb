//! Damage: what is done when the store of a target meets bytes that are wrong.
//!
//! The stores lie on a mirror, so its copies are compared, and one wrong copy is outvoted by the
//! others. A store that has met damage serves no more: once something was put right, the node is
//! started anew. Where nothing was, the same bytes would only be met again: the target stays
//! stopped, status says so, and the others serve.
//!
//! What always holds: for one and the same damage there is at most one start that nothing was
//! repaired for.
//!
//! What could not be repaired is told to the node that is started in this one's place. After a
//! crash it is met again.

use crate::assembly::{self, Cluster, Target};
use levada_base::reactor;
use levada_kv::KvError;
use levada_raid::ScrubReport;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::Duration;

/// A target whose store has met damage is opened anew with its node, but not more often than this.
const ANEW_AFTER: Duration = Duration::from_secs(10);
/// How often the targets are looked at.
const LOOK_AT_TARGETS_EVERY: Duration = Duration::from_secs(1);

/// Targets with damage that a comparison of all copies did not repair.
#[derive(Default)]
pub struct BeyondRepair(RefCell<BTreeSet<String>>);

impl BeyondRepair {
    /// Those that an earlier life of the node told of.
    pub fn told(&self, targets: impl IntoIterator<Item = String>) {
        self.0.borrow_mut().extend(targets);
    }

    /// True for a target whose damage could not be repaired.
    #[must_use]
    pub fn has(&self, target: &str) -> bool {
        self.0.borrow().contains(target)
    }

    /// All of them.
    #[must_use]
    pub fn targets(&self) -> Vec<String> {
        self.0.borrow().iter().cloned().collect()
    }
}

fn is_damaged(target: &Target) -> bool {
    matches!(target.failure(), Some(KvError::Damaged { .. }))
}

/// Watches the targets, and compares the copies when one has met damage. Returns when a new start
/// of the node is worthwhile. May be dropped at any time.
pub async fn worth_a_start(cluster: &Cluster) {
    let begun = reactor::now();
    let mut given_up = BTreeSet::new();
    loop {
        reactor::sleep(LOOK_AT_TARGETS_EVERY).await;
        let damaged = cluster.targets.iter().filter(|target| is_damaged(target));
        let met: Vec<String> = damaged
            .map(|target| target.entry.name())
            .filter(|name| !given_up.contains(name))
            .collect();
        if met.is_empty() || begun.elapsed() < ANEW_AFTER {
            continue;
        }
        let Some(mirror) = cluster.metadata_first().into_iter().next() else { return };
        tracing::error!(targets = ?met, "damage; comparing all copies to repair it");
        let report = assembly::compare(&mirror.array).await;
        let known = &cluster.beyond_repair;
        let is_new = met.iter().any(|target| !known.has(target));
        match verdict(report, is_new) {
            Verdict::Repaired => {
                known.0.borrow_mut().retain(|target| !met.contains(target));
                return;
            }
            Verdict::OneMoreStart => {
                known.told(met);
                return;
            }
            Verdict::GivenUp => known.told(met.iter().cloned()),
        }
        tracing::error!(targets = ?met, "no copy could be told to be right; they stay stopped");
        given_up.extend(met);
    }
}

/// What a comparison of all copies comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Something wrong was outvoted: a new start finds it right.
    Repaired,
    /// All copies agree. A scrub may have been faster: one start finds out.
    OneMoreStart,
    /// A new start would meet the same bytes.
    GivenUp,
}

/// `report` is none when the mirror stopped; the damage is new unless a start was tried for it.
fn verdict(report: Option<ScrubReport>, is_new: bool) -> Verdict {
    match report {
        Some(report) if report.unreadable_repaired + report.wrong_repaired > 0 => Verdict::Repaired,
        Some(report) if report.mismatched + report.lost == 0 && is_new => Verdict::OneMoreStart,
        _ => Verdict::GivenUp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_start_may_help_is_started_anew() {
        let agree = ScrubReport { stripes: 9, ..ScrubReport::default() };
        let outvoted = ScrubReport { wrong_repaired: 1, mismatched: 1, ..agree };
        let two_left = ScrubReport { mismatched: 1, ..agree };
        let lost = ScrubReport { lost: 1, ..agree };
        for is_new in [true, false] {
            assert_eq!(verdict(Some(outvoted), is_new), Verdict::Repaired);
            for hopeless in [Some(two_left), Some(lost), None] {
                assert_eq!(verdict(hopeless, is_new), Verdict::GivenUp);
            }
        }
        assert_eq!(verdict(Some(agree), true), Verdict::OneMoreStart);
        assert_eq!(verdict(Some(agree), false), Verdict::GivenUp, "once is enough");
    }
}
