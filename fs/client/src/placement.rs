//! Placement: which object targets new files should avoid, because they do not answer or are much fuller than the others.
//!
//! Found out beside the services, over a client of their own: a target is asked as any program would ask it.
//!
//! What always holds:
//! - One request at a time is under way to each target, however long it takes.
//! - A target that answers again is used again within about a second.

use crate::client::Client;
use crate::target::{ObjectTarget, TargetSpace};
use futures_util::future::{join, join_all};
use levada_base::ids::TargetId;
use levada_base::reactor::{self, Instant};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Each target is asked again so long after its answer.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// A target of which nothing was heard for so long is avoided.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// A target is avoided when its free bytes are less than this part of the mean.
const FULL_PART: u64 = 8;

/// What was heard of a target last.
struct Heard {
    target: Rc<ObjectTarget>,
    at: Cell<Instant>,
    space: Cell<Option<TargetSpace>>,
}

/// Asks all object targets for ever. `tell` is told which of them new files should avoid, about once a second; when all
/// of them should be, none is told.
pub async fn watch(client: &Client, tell: impl Fn(&BTreeSet<TargetId>)) {
    let heard: Vec<Heard> = client
        .0
        .targets()
        .map(|target| Heard {
            target: Rc::clone(target),
            at: Cell::new(reactor::now()),
            space: Cell::default(),
        })
        .collect();
    let asking = join_all(heard.iter().map(|heard| async move {
        loop {
            // Who is refused hears nothing either.
            if let Ok(space) = heard.target.space().await {
                heard.space.set(Some(space));
                heard.at.set(reactor::now());
            }
            reactor::sleep(ASK_EVERY).await;
        }
    }));
    let begun = reactor::now();
    let telling = async {
        loop {
            reactor::sleep(ASK_EVERY).await;
            // What was known of them before counts until all had the time to answer.
            let all_heard = heard.iter().all(|heard| heard.space.get().is_some());
            if !all_heard && begun.elapsed() < SILENT_AFTER {
                continue;
            }
            let standings: Vec<_> = heard
                .iter()
                .map(|heard| {
                    let answers = heard.at.get().elapsed() < SILENT_AFTER;
                    // Before its first answer nothing is said against it.
                    let space = heard.space.get().map(|space| space.free_bytes);
                    (
                        heard.target.id(),
                        if answers { Standing::Answers(space) } else { Standing::Silent },
                    )
                })
                .collect();
            tell(&avoided(&standings));
        }
    };
    let ((), ()) = join(async { drop(asking.await) }, telling).await;
}

/// How a target stands with whoever asked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Silent,
    /// With so many free bytes, if it has said so.
    Answers(Option<u64>),
}

/// Those that new files should avoid.
fn avoided(standings: &[(TargetId, Standing)]) -> BTreeSet<TargetId> {
    let free: Vec<u64> = standings
        .iter()
        .filter_map(|(_, standing)| match standing {
            Standing::Answers(free) => *free,
            Standing::Silent => None,
        })
        .collect();
    let sum = free.iter().map(|free| u128::from(*free)).sum::<u128>();
    let is_full =
        |bytes: u64| u128::from(bytes) * u128::from(FULL_PART) * (free.len() as u128) < sum;
    let avoided: BTreeSet<_> = standings
        .iter()
        .filter(|(_, standing)| match standing {
            Standing::Silent => true,
            Standing::Answers(free) => free.is_some_and(is_full),
        })
        .map(|(target, _)| *target)
        .collect();
    if avoided.len() == standings.len() { BTreeSet::new() } else { avoided }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Standing::{Answers, Silent};

    fn avoided_of(standings: &[Standing]) -> Vec<u32> {
        let numbered: Vec<_> = (1..).map(TargetId).zip(standings.iter().copied()).collect();
        avoided(&numbered).into_iter().map(|target| target.0).collect()
    }

    #[test]
    fn the_silent_and_the_full_are_avoided_and_never_all() {
        let some = Answers(Some(1000));
        assert_eq!(avoided_of(&[some, some, some]), []);
        assert_eq!(avoided_of(&[some, Silent, some]), [2]);
        assert_eq!(avoided_of(&[Silent, Silent]), []);
        assert_eq!(avoided_of(&[Answers(None), Silent]), [2]);
        // An eighth of the mean of those that said.
        let (full, nearly) = (Answers(Some(80)), Answers(Some(100)));
        assert_eq!(avoided_of(&[some, full, some]), [2]);
        assert_eq!(avoided_of(&[some, nearly, some]), []);
        assert_eq!(avoided_of(&[Answers(None), full, some, Silent]), [4]);
        assert_eq!(avoided_of(&[Answers(Some(0)), Answers(Some(0))]), [], "all are as full");
        assert_eq!(avoided_of(&[Answers(Some(u64::MAX)), Answers(Some(u64::MAX))]), []);
    }
}
