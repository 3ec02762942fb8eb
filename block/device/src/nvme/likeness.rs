//! Whether two paths lead to one drive. Names and sizes do not tell: they are given by people, twice where a configuration was copied. What
//! an owner has left at its drive does: its connections, registered, or without reservations its mark, of which the witness knows.
//!
//! What always holds:
//! - Once an owner has left something at the drive, no path is used beside another unless it is there as well.
//! - A path that was found to lead elsewhere is not used as long as its connection is the same, unless it turns out otherwise.
//! - With reservations a path to the drive waits for no other one: its own target says enough.

use super::controller::{ConnectError, Controller};
use super::host::HostId;
use super::options::Network;
use super::paths::{Paths, lost};
use levada_base::reactor;
use std::rc::Rc;
use std::time::Duration;

/// A path that is used has to answer within this, or nothing is told by it.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// What becomes of it when a path is compared with one that is used.
enum Likeness {
    Same,
    /// The new one leads elsewhere.
    NewStrays,
    /// The one that is used does.
    UsedStrays,
    /// Nothing is left at the drive by which that could be told.
    Untold,
    /// It cannot be told now.
    Unanswered,
}

impl<N: Network> Paths<N> {
    /// Sees to it that a path does not lead to another drive than those that are used.
    pub(super) async fn compare_drives(
        &self,
        new: &Controller<N::Stream>,
    ) -> Result<(), ConnectError> {
        let path = self.paths.iter().find(|path| path.has_connection(&new.host_id));
        let path = path.ok_or_else(lost)?;
        let mut is_unanswered = false;
        for used in self.used_beside(&new.host_id) {
            match self.likeness(new, &used).await? {
                Likeness::Same => path.is_stray.set(false),
                Likeness::NewStrays => path.is_stray.set(true),
                Likeness::UsedStrays => {
                    path.is_stray.set(false);
                    self.strays(&used.host_id);
                }
                Likeness::Untold => {}
                Likeness::Unanswered => {
                    is_unanswered = true;
                    continue;
                }
            }
            is_unanswered = false;
            break;
        }
        let what = match (path.is_stray.get(), is_unanswered) {
            (true, _) => "it leads to another drive, of the same name as the one in use",
            (false, true) => "whether it leads to the drive in use cannot be told now",
            (false, false) => return Ok(()),
        };
        Err(ConnectError::Different { what: what.into() })
    }

    /// An owner has its mark at a drive without reservations, or will have: paths that are used already are compared by that.
    pub(super) fn compare_again(&self) {
        let is_reserved = self.owner.is_reserved();
        if !is_reserved && self.owner.has_mark() {
            for other in self.whole().into_iter().skip(1) {
                self.is_not_whole(&other.host_id);
            }
        }
    }

    fn used_beside(&self, new: &HostId) -> Vec<Rc<Controller<N::Stream>>> {
        let used = self.paths.iter().filter(|path| path.is_usable());
        let used = used.filter_map(|path| path.controller.borrow().clone());
        used.filter(|used| used.host_id != *new).collect()
    }

    fn strays(&self, host_id: &HostId) {
        for path in self.paths.iter().filter(|path| path.has_connection(host_id)) {
            path.is_stray.set(true);
        }
        self.is_not_whole(host_id);
    }

    async fn likeness(
        &self,
        new: &Controller<N::Stream>,
        used: &Controller<N::Stream>,
    ) -> Result<Likeness, ConnectError> {
        if self.owner.is_reserved() {
            let registered = &used.host_id;
            if self.shows(new, registered).await? {
                return Ok(Likeness::Same);
            }
            return Ok(match reactor::timeout(ANSWER_LIMIT, self.shows(used, registered)).await {
                // It may have come in between.
                Ok(Ok(true)) if self.shows(new, registered).await? => Likeness::Same,
                Ok(Ok(true)) => Likeness::NewStrays,
                // One drive has forgotten both, perhaps.
                Ok(Ok(false)) => Likeness::Untold,
                Ok(Err(_)) | Err(_) => Likeness::Unanswered,
            });
        }
        if !self.owner.has_mark() {
            return Ok(Likeness::Untold);
        }
        let mut likeness = Likeness::Unanswered;
        // A mark may be written just now: what differs is read twice.
        for _ in 0..2 {
            let of_new = self.witnessed(new).await?;
            let of_used = reactor::timeout(ANSWER_LIMIT, self.witnessed(used)).await;
            let Ok(Ok(of_used)) = of_used else { return Ok(Likeness::Unanswered) };
            likeness = match of_new.cmp(&of_used) {
                // Neither is anybody's: the mark is still to come.
                std::cmp::Ordering::Equal if of_new.is_none() => return Ok(Likeness::Unanswered),
                std::cmp::Ordering::Equal => return Ok(Likeness::Same),
                std::cmp::Ordering::Less => Likeness::NewStrays,
                std::cmp::Ordering::Greater => Likeness::UsedStrays,
            };
        }
        Ok(likeness)
    }

    /// Whether the target behind a connection has another one registered.
    pub(super) async fn shows(
        &self,
        controller: &Controller<N::Stream>,
        registered: &HostId,
    ) -> Result<bool, ConnectError> {
        let report = self.report_over(controller).await?;
        Ok(report.registrants.iter().any(|it| it.host == *registered))
    }
}
