//! Making a path whole: before it is used, nothing that was confirmed may be missing on it, nor changed by somebody else.
//!
//! A target that was out of reach may have lost what it had not written through, may have had another owner, and may show another drive.

use super::controller::{ConnectError, Controller};
use super::options::Network;
use super::paths::{AGAIN_FIRST, AGAIN_MAX, Paths, lost};
use super::queue::Request;
use super::unflushed::Kept;
use super::unsettled::Change;
use super::verdict::{Asked, Verdict};
use futures_util::future::ready;
use futures_util::stream::{self, StreamExt};
use levada_base::buf::bytes_in;
use levada_base::{IoVec, planted, reactor};
use levada_nvme::{Command, IoOpcode};
use std::cell::Cell;

/// Changes that are written again at once, as far as the queue has room.
const WRITTEN_AGAIN_AT_ONCE: usize = 64;

impl<N: Network> Paths<N> {
    /// Sees to it that nothing that was confirmed is missing on a path, nor changed by somebody else.
    pub(super) async fn make_whole(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<(), ConnectError> {
        let path = self.paths.iter().find(|path| path.has_connection(&controller.host_id));
        let path = path.ok_or_else(lost)?;
        path.awaits_turn.set(true);
        let _turn = self.making_whole.acquire(1).await;
        path.awaits_turn.set(false);
        self.compare_drives(controller).await?;
        self.check_owner(controller).await?;
        let forgotten = self.owner.forgotten.get();
        if self.has_lost.get() || self.was_there_all_along().await {
            return Ok(());
        }
        self.recognise(controller).await?;
        if self.has_lost.get() || self.owner.lost().is_some() {
            return Ok(());
        }
        // What is under way elsewhere is confirmed by a target that may have lost it, and asked for again.
        self.era.set(self.era.get() + 1);
        let all = self.unflushed.borrow().all();
        if all.is_empty() || planted!("nvme-unflushed-not-written-again") {
            return Ok(());
        }
        // One that was connected all along and did not reach the namespace may do so any moment: what is written over it would be written
        // over by what follows here.
        if !planted!("nvme-writes-beside-what-is-written-again") {
            self.none_is_whole();
        }
        // Where lost changes hold it back; if they cannot be ended that lasts until they are over by themselves. Others need not be waited
        // for: the target may take long.
        let is_held_back = all.iter().any(|(change, _)| change.blocked_by_older().is_some());
        if is_held_back && self.owner.is_reserved() && self.owner.lost().is_none() {
            let _ = self.clear_over(controller).await;
        }
        tracing::info!(subsystem = %self.subsystem, changes = all.len(), "writing again what was not flushed");
        // No two of them meet. One after the other they would take as many round trips as there are, for which everybody waits.
        let has_failed = Cell::new(false);
        let written = stream::iter(all)
            .take_while(|_| ready(!has_failed.get()))
            .map(|(change, kept)| self.write_again(controller, change, kept))
            .buffer_unordered(WRITTEN_AGAIN_AT_ONCE)
            .inspect(|written| has_failed.set(has_failed.get() || written.is_err()));
        // All of them have ended, so that none is under way when somebody tries again.
        let written: Vec<_> = written.collect().await;
        written.into_iter().collect::<Result<(), _>>()?;
        match self.owner.forgotten.get() == forgotten {
            true => Ok(()),
            // Somebody has seen that over another path, meanwhile.
            false => {
                Err(ConnectError::Different { what: "its target has forgotten its owner".into() })
            }
        }
    }

    /// Over another path the namespace could be reached until now, so that its target has lost nothing.
    async fn was_there_all_along(&self) -> bool {
        let known = self.known();
        for other in &self.paths {
            let Some(there) = other.controller.borrow().clone() else { continue };
            if other.is_usable()
                && self.sight(&there).await.is_ok_and(|seen| known.compare(&seen).is_ok())
                && there.notices.tell_of_no_change()
                && other.is_usable()
            {
                return true;
            }
        }
        false
    }

    async fn write_again(
        &self,
        controller: &Controller<N::Stream>,
        change: Change,
        kept: Kept,
    ) -> Result<(), ConnectError> {
        let known = self.known();
        let (at, bytes, from, opcode) = match kept {
            Kept::Write { at, data } => (at, bytes_in(&data), data, IoOpcode::Write),
            Kept::Zeroes { at, bytes } => (at, bytes, IoVec::new(), IoOpcode::WriteZeroes),
        };
        let block_bytes = known.identity.block_bytes;
        let command = Command::new(opcode as u8, 0, known.namespace)
            .with_blocks(at / block_bytes, bytes / block_bytes);
        let mut pause = AGAIN_FIRST;
        let mut refused_since = None;
        loop {
            if self.has_lost.get() || self.owner.lost().is_some() {
                return Ok(());
            }
            if let Some(blocked) = change.blocked_by_older() {
                change.wait(blocked).await;
                continue;
            }
            let queue = controller.queue().ok_or_else(lost)?;
            let limit = self.options.timing.limit_of(command.opcode());
            let mut request = Request::new(command, limit);
            request.from = from.clone();
            request.change = Some(change.clone());
            let Ok(completion) = queue.run(request).await.outcome else { return Err(lost()) };
            let asked = Asked {
                operation: "write",
                at,
                bytes,
                capacity_bytes: known.capacity_bytes(),
                is_read: false,
            };
            let refused = ConnectError::Refused { command: "Write", status: completion.status };
            match Verdict::of(completion.status, asked) {
                Verdict::Done => return Ok(()),
                Verdict::Again
                    if refused_since.get_or_insert_with(reactor::now).elapsed()
                        < self.options.timing.gone_after =>
                {
                    reactor::sleep(pause).await;
                    pause = (pause * 2).min(AGAIN_MAX);
                }
                // The report tells whether there is another owner, when the path is looked at again.
                Verdict::Conflict if self.owner.is_reserved() => return Err(refused),
                Verdict::Again | Verdict::NotHere => return Err(refused),
                Verdict::Conflict | Verdict::Failed(_) => {
                    let status = completion.status;
                    tracing::error!(subsystem = %self.subsystem, %status, "a change is refused");
                    self.give_up("what was not flushed cannot be written again");
                    return Ok(());
                }
            }
        }
    }
}
