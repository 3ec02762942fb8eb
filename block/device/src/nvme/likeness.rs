//! Whether two paths lead to one drive. Names and sizes do not tell: they are given by people, twice where a configuration was copied. What
//! an owner has left at its drive does: its connections, registered, or without reservations its mark, of which the witness knows.
//!
//! What always holds:
//! - Of an owner's drive no path is used beside another unless what the owner has left is seen over it as well. A drive without reservations
//!   is nobody's before its mark is there, and used over one path.
//! - A path that was found to lead elsewhere is not used as long as its connection is the same, unless it turns out otherwise.
//! - A path to the drive waits for no other one: what is seen over it is enough.

use super::controller::{ConnectError, Controller};
use super::host::HostId;
use super::options::Network;
use super::paths::{Paths, lost};
use futures_util::future::join_all;
use levada_base::reactor;
use std::rc::Rc;
use std::time::Duration;

/// A path that is used has to answer within this, or nothing is told by it.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// What becomes of it when a path is compared with those that are used.
enum Likeness {
    Same,
    Other,
    /// There is nothing to compare.
    Untold,
    /// There is nothing to compare yet: without reservations it takes the place of the one in use, if need be.
    Unowned,
    /// Not to be used before it is proven.
    Unproven,
}

impl<N: Network> Paths<N> {
    /// Sees to it that a path does not lead to another drive than those that are used.
    pub(super) async fn compare_drives(
        &self,
        new: &Controller<N::Stream>,
    ) -> Result<(), ConnectError> {
        let path = self.paths.iter().find(|path| path.has_connection(&new.host_id));
        let path = path.ok_or_else(lost)?;
        let used = self.used_beside(&new.host_id);
        let verdict = self.likeness(new, &used).await?;
        match verdict {
            Likeness::Same => path.is_stray.set(false),
            Likeness::Other => path.is_stray.set(true),
            Likeness::Untold | Likeness::Unowned | Likeness::Unproven => {}
        }
        let why = "it leads to another drive, of the same name as the one in use";
        let unproven = |what| Err(ConnectError::Unproven { what });
        match verdict {
            _ if path.is_stray.get() => Err(ConnectError::Different { what: why.into() }),
            Likeness::Unowned => unproven("it is used beside another once the drive has an owner"),
            Likeness::Unproven => {
                unproven("what the owner has left at the drive is not seen over it yet")
            }
            Likeness::Same | Likeness::Untold | Likeness::Other => Ok(()),
        }
    }

    async fn likeness(
        &self,
        new: &Controller<N::Stream>,
        used: &[Rc<Controller<N::Stream>>],
    ) -> Result<Likeness, ConnectError> {
        let is_reserved = self.owner.is_reserved();
        if used.is_empty() {
            return Ok(Likeness::Untold);
        }
        if !is_reserved && !self.owner.has_mark() {
            // Reservations are taken over all paths that are used, which compares them.
            let is_compared_later = self.is_compared_by_reservations();
            return Ok(if is_compared_later { Likeness::Untold } else { Likeness::Unowned });
        }
        if self.is_seen_over(new, used).await? {
            return Ok(Likeness::Same);
        }
        let asked =
            used.iter().map(|it| reactor::timeout(ANSWER_LIMIT, self.is_seen_over(it, used)));
        let answers: Vec<bool> =
            join_all(asked).await.into_iter().filter_map(|it| it.ok()?.ok()).collect();
        if answers.contains(&true) {
            // It may have come in between.
            let is_seen = self.is_seen_over(new, used).await?;
            return Ok(if is_seen { Likeness::Same } else { Likeness::Other });
        }
        Ok(match is_reserved && !answers.is_empty() {
            // One drive has forgotten all of them, perhaps.
            true => Likeness::Untold,
            false => Likeness::Unproven,
        })
    }

    /// What the owner has left at its drive is seen over a path: the connections that are `used`, one of them at least, or its mark.
    async fn is_seen_over(
        &self,
        path: &Controller<N::Stream>,
        used: &[Rc<Controller<N::Stream>>],
    ) -> Result<bool, ConnectError> {
        if !self.owner.is_reserved() {
            let is_seen = self.witnessed(path).await? == Some(self.owner.epoch());
            self.owner.is_mark_seen.set(self.owner.is_mark_seen.get() || is_seen);
            return Ok(is_seen);
        }
        let report = self.report_over(path).await?;
        let has_registered = |host: &HostId| report.registrants.iter().any(|it| it.host == *host);
        Ok(used.iter().any(|it| has_registered(&it.host_id)))
    }

    pub(super) fn is_compared_by_reservations(&self) -> bool {
        self.known.borrow().as_ref().is_some_and(|known| known.has_reservations())
    }

    fn used_beside(&self, new: &HostId) -> Vec<Rc<Controller<N::Stream>>> {
        let used = self.paths.iter().filter(|path| path.is_reached());
        let used = used.filter_map(|path| path.controller.borrow().clone());
        used.filter(|used| used.host_id != *new).collect()
    }
}
