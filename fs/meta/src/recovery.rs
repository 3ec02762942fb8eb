//! After a crash with an open tail: its holder hands back what it was told.
//!
//! What always holds: while it is awaited nothing but its `Register` and `Replay` is answered, and the
//! store is as the crash left it. Recovery that is cut off by another crash begins anew from the
//! prefix that the store holds by then.
//!
//! Who is said to be dead ([`MetaRequest::Bury`]) is awaited for [`BURIED_RECOVERY`] only, unless it comes.
//!
//! docs/design/0010-metadata-tail.md.

use crate::key;
use crate::ops::{S_IFREG, names};
use crate::row::{Body, Inode, MARK, TailRow};
use crate::service::{MetaService, Room, wall_clock};
use crate::table::{Effect, Table};
use levada_base::ids::{BootVerifier, Ino, Seq};
use levada_base::{planted, probe, reactor};
use levada_kv::Batch;
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest};
use std::time::Duration;

/// Lost inode numbers that become chores in one batch.
const NUMBERS_AT_ONCE: u64 = 16;

/// A client that lives tries to reach a service that is away once a second, so by then one that is said to be dead
/// would have come.
const BURIED_RECOVERY: Duration = Duration::from_secs(3);

impl MetaService {
    /// True while the holder of the tail is awaited.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        self.recovering.get()
    }

    /// The client whose return is awaited, and for how long yet; `None` when nobody is.
    #[must_use]
    pub fn awaited(&self) -> Option<(u64, Duration)> {
        let holder = self.tail.borrow().row().filter(|_| self.is_recovering())?;
        // Asking is no request, which would start the clock.
        let since = self.serving_since.get().map_or(Duration::ZERO, |since| since.elapsed());
        Some((holder.client, self.config.recovery.saturating_sub(since)))
    }

    /// Waits until this request may be answered.
    pub(crate) async fn recovered(
        &self,
        client: u64,
        request: &MetaRequest,
    ) -> Result<(), MetaFault> {
        let holder = self.tail.borrow().row().map(|row| row.client);
        let is_holder = |uuid| {
            let known = self.table.borrow().by_uuid.get(uuid).copied();
            known.is_some() && known == holder
        };
        let early = match request {
            MetaRequest::Register { uuid } => is_holder(uuid),
            MetaRequest::Replay { .. } => Some(client) == holder,
            _ => planted!("meta-served-before-recovery"),
        };
        let buries = matches!(request, MetaRequest::Bury { uuid } if is_holder(uuid));
        while self.is_recovering() && !early {
            let changed = self.recovery_changed.changed();
            let left = self.holder_awaited_for(buries).saturating_sub(self.serving_for());
            if left.is_zero() {
                self.end_recovery(buries).await?;
            } else {
                let _ = reactor::timeout(left, changed).await;
            }
        }
        Ok(())
    }

    /// How long the holder is awaited; by somebody who buries it for less, unless it has come.
    fn holder_awaited_for(&self, buries: bool) -> Duration {
        let has_come = || {
            let (table, holder) = (self.table.borrow(), self.tail.borrow().row());
            let known = holder.and_then(|row| table.clients.get(&row.client));
            known.is_some_and(|known| known.pusher.is_some())
        };
        let limit = self.config.recovery;
        if buries && !has_come() { limit.min(BURIED_RECOVERY) } else { limit }
    }

    /// Goes on without the holder when it has been awaited for long enough, by somebody who buries it or not.
    pub(crate) async fn end_recovery(&self, buries: bool) -> Result<(), MetaFault> {
        let _turn = self.recovery_turn.acquire(1).await;
        if !self.is_recovering() || self.serving_for() < self.holder_awaited_for(buries) {
            return Ok(());
        }
        tracing::warn!("a client did not come back: what it had not synced is lost");
        self.lose_tail().await
    }

    /// The holder hands back its tail.
    pub(crate) async fn replay(
        &self,
        client: u64,
        life: BootVerifier,
        batches: Vec<(Seq, Vec<u8>)>,
    ) -> Result<MetaReply, MetaFault> {
        let _turn = self.recovery_turn.acquire(1).await;
        let awaited =
            self.tail.borrow().row().filter(|row| self.is_recovering() && row.client == client);
        if batches.is_empty() {
            if awaited.is_some() {
                tracing::info!(client, "the holder of the tail came back without it");
                self.lose_tail().await?;
            }
            return Ok(MetaReply::Done);
        }
        let Some(_) = awaited.filter(|row| row.life == life) else {
            if awaited.is_some() {
                self.lose_tail().await?;
            }
            let settled = self.table.borrow().clients.get(&client).map(|client| client.settled);
            // Handed back before, or made durable when the target stopped.
            let known = settled == Some(life);
            return if known { Ok(MetaReply::Done) } else { Err(MetaFault::Stale) };
        };
        let _busy = probe::busy("meta replay");
        let mut taken = 0;
        for (seq, bytes) in batches {
            if seq <= self.store.last_seq() {
                continue;
            }
            let batch = Batch::decode(&bytes).filter(|_| seq.0 == self.store.last_seq().0 + 1);
            let Some(batch) = batch else {
                tracing::error!(client, seq = seq.0, "a tail does not fit what the store holds");
                self.lose_tail().await?;
                return Err(MetaFault::Stale);
            };
            // It had room when it was applied first, so a full store is no reason to refuse it.
            let _ = self.wait_for_room(Room { frees: true }).await;
            self.store.apply(batch).map_err(|error| {
                tracing::error!(%error, "the tail cannot be applied; its holder will ask again");
                MetaFault::Unavailable
            })?;
            taken += 1;
        }
        self.durable(self.store.last_seq()).await?;
        self.reload().await?;
        self.settle_tail()?;
        self.durable(self.store.last_seq()).await?;
        tracing::info!(client, taken, "the tail was handed back");
        self.serve();
        Ok(MetaReply::Done)
    }

    /// What the rows say now, after batches that went past the table.
    async fn reload(&self) -> Result<(), MetaFault> {
        let mut fresh = Table::load(&self.store, self.config.slots).await.map_err(|error| {
            tracing::error!(%error, "the rows cannot be read again");
            MetaFault::Damaged
        })?;
        let mut table = self.table.borrow_mut();
        fresh.chores = std::rc::Rc::clone(&table.chores);
        // Who hands back its tail has registered.
        for (number, client) in &mut fresh.clients {
            let Some(known) = table.clients.get_mut(number) else { continue };
            (client.reclaim, client.pusher) = (known.reclaim.take(), known.pusher.take());
        }
        *table = fresh;
        Ok(())
    }

    /// Goes on without what the holder was told. Files that it made then may have objects, so
    /// their numbers are not given out again and become chores.
    async fn lose_tail(&self) -> Result<(), MetaFault> {
        let _busy = probe::busy("meta tail given up");
        // A replay that was cut off has gone past the table.
        self.reload().await?;
        let lost = self.tail.borrow().row();
        let numbers = lost.map_or(0, |row| row.numbers);
        loop {
            let room = self.wait_for_room(Room { frees: true }).await;
            let mut table = self.table.borrow_mut();
            let mut counters = table.counters;
            if room == Err(MetaFault::Full) {
                tracing::error!("no room to note which objects of lost files are to be destroyed");
                counters.next_ino = counters.next_ino.max(numbers);
            }
            let end = numbers.min(counters.next_ino + NUMBERS_AT_ONCE);
            let mut batch = Batch::default();
            while counters.next_ino < end && !planted!("meta-lost-numbers-given-again") {
                let ino = Ino(counters.next_ino);
                batch.put(&key::inode(ino), &self.lost_inode(ino).encode());
                batch.put(&key::destroy(ino), MARK);
                counters.next_ino += 1;
                counters.inodes += 1;
                counters.doomed_inodes += 1;
            }
            let done = counters.next_ino >= numbers || planted!("meta-lost-numbers-given-again");
            match lost.filter(|_| !done) {
                // From the first of these batches on nothing can be handed back.
                Some(row) => {
                    batch.put(key::TAIL, &TailRow { life: BootVerifier(0), ..row }.encode());
                }
                None => batch.delete(key::TAIL),
            }
            batch.put(key::COUNTERS, &counters.encode());
            self.apply_own(batch)?;
            table.counters = counters;
            if done {
                table.take_effect(0, Effect::Destroy);
                break;
            }
        }
        self.durable(self.store.last_seq()).await?;
        self.serve();
        Ok(())
    }

    fn serve(&self) {
        self.tail.borrow_mut().end();
        self.recovering.set(false);
        self.recovery_changed.notify_all();
    }

    /// An inode whose create was lost, as if it had been unlinked.
    fn lost_inode(&self, ino: Ino) -> Inode {
        let body = Body::File(names::unknown_layout(&self.env, ino));
        let generation = self.env.superblock.generation;
        Inode {
            components: u64::MAX,
            stored: None,
            ..Inode::new(generation, S_IFREG, 0, wall_clock(), Ino::ROOT, body)
        }
    }
}
