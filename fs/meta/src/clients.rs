//! Clients come, come back, and fall silent; and the housekeeper's list.

use crate::config::CallHeader;
use crate::key;
use crate::locks::RECLAIMED_MAX;
use crate::ops::{chores, write};
use crate::row::{ClientRow, Counters, DoomedRow, Inode};
use crate::service::{MetaService, Room, fault_of};
use crate::table::{Client, Reclaim, Table};
use crate::tx::Tx;
use levada_base::ids::{BootVerifier, Ino, Seq};
use levada_base::reactor;
use levada_kv::Batch;
use levada_wire::attr::Attr;
use levada_wire::lock::Lock;
use levada_wire::meta::{FsInfo, MetaFault, MetaReply};
use levada_wire::rpc::{ConnectionId, Pusher};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

/// How often, at least, somebody looks after clients that are silent or rest.
const TICK_MAX: Duration = Duration::from_secs(2);
/// The connection of a process that died ends within this, or it is not dead.
const END_OF_CONNECTION_MAX: Duration = Duration::from_secs(2);
const LOOK_AT_CONNECTION_EVERY: Duration = Duration::from_millis(10);
/// What a dead client sent to the object targets is carried out within this, before others hold what it held.
const STRAGGLERS: Duration = Duration::from_secs(1);
/// Who asks for space waits so long for deletions under way.
const DELETIONS_WAIT: Duration = Duration::from_millis(200);
/// Deletions of which none ended for so long are not waited for.
pub(crate) const DELETIONS_STUCK: Duration = Duration::from_secs(5);

impl MetaService {
    /// Finds or makes the client's row.
    pub(crate) async fn register(
        &self,
        connection: ConnectionId,
        uuid: [u8; 16],
        wants_leases: bool,
    ) -> Result<MetaReply, MetaFault> {
        // In a full store it may be the one that makes some room.
        self.wait_for_room(Room { frees: true }).await?;
        let (client, seq) = {
            let mut table = self.table.borrow_mut();
            let (opens, locks) = (BTreeMap::new(), Vec::new());
            let reclaim = Some(Reclaim { connection, opens, locks });
            if let Some(client) = table.by_uuid.get(&uuid).copied() {
                let known = table.clients.get_mut(&client).expect("both maps agree");
                known.seen = reactor::now();
                known.reclaim = reclaim;
                if wants_leases && known.may_lease.is_none() {
                    let mut batch = Batch::default();
                    let row = ClientRow { may_lease: true, ..known.row() };
                    batch.put(&key::client(client), &row.encode());
                    known.may_lease = Some(self.apply_own(batch)?);
                }
                // The row may have been put a moment ago, for the same uuid on another connection.
                (client, self.store.last_seq())
            } else {
                let client = table.counters.next_client;
                let counters = Counters { next_client: client + 1, ..table.counters };
                let known = Client::new(uuid, BootVerifier(0), self.config.slots);
                let mut batch = Batch::default();
                let row = ClientRow { may_lease: wants_leases, ..known.row() };
                batch.put(&key::client(client), &row.encode());
                batch.put(key::COUNTERS, &counters.encode());
                let seq = self.apply_own(batch)?;
                table.counters = counters;
                table.by_uuid.insert(uuid, client);
                let may_lease = wants_leases.then_some(seq);
                table.clients.insert(client, Client { reclaim, may_lease, ..known });
                (client, seq)
            }
        };
        self.durable(seq).await?;
        let table = self.table.borrow();
        let slots = &table.clients.get(&client).ok_or(MetaFault::NotRegistered)?.slots;
        // A change that still runs is used too: its client may have forgotten it.
        let used = slots.iter().zip(0..).filter_map(|(slot, number)| {
            let sequence = slot.sequence.max(slot.running.unwrap_or(0));
            (sequence > 0).then_some((number, sequence))
        });
        Ok(MetaReply::Registered {
            client,
            slots: self.config.slots,
            verifier: self.verifier,
            used: used.collect(),
            fs: FsInfo {
                id: self.env.superblock.fs(),
                name: self.env.superblock.name.clone(),
                objects: self.config.objects.clone(),
                lease_ms: u64::try_from(self.config.lease.as_millis()).unwrap_or(u64::MAX),
            },
        })
    }

    /// After a restart: a part of what a client holds open, and has locked.
    pub(crate) async fn reclaim(
        &self,
        call: CallHeader,
        part: Vec<(Ino, u32)>,
        locks: Vec<(Ino, Lock)>,
        last: bool,
    ) -> Result<MetaReply, MetaFault> {
        let has_locks = {
            let mut table = self.table.borrow_mut();
            let client = table.clients.get_mut(&call.client).ok_or(MetaFault::Invalid)?;
            let held = client.reclaim.take_if(|held| held.connection == call.connection);
            // Of another connection, or after the last: whoever means it begins with `Register`.
            let mut held = held.ok_or(MetaFault::Unavailable)?;
            for (ino, count) in part.into_iter().filter(|(_, count)| *count > 0) {
                let sum = held.opens.entry(ino).or_default();
                // What it opens from now on comes on top.
                *sum = sum.saturating_add(count).min(u32::MAX / 2);
            }
            // No more than it could have opened one by one.
            held.locks.extend(locks);
            let too_many = held.locks.len() > RECLAIMED_MAX;
            if too_many || held.opens.len() as u64 > self.env.superblock.inodes_max {
                return Err(MetaFault::Invalid);
            }
            if !last {
                client.reclaim = Some(held);
                return Ok(MetaReply::Done);
            }
            table.set_opens(call.client, held.opens);
            let has_locks = table.set_locks(call.client, &held.locks);
            table.awaited.remove(&call.client);
            self.former.borrow_mut().came_back(call.client);
            self.leases_changed.notify_all();
            has_locks
        };
        self.push_notices();
        self.reap_orphans().await?;
        if has_locks { Ok(MetaReply::Done) } else { Err(MetaFault::Stale) }
    }

    /// The client goes, and says so: what a silent one loses after its lease is taken back at once.
    pub(crate) async fn leave(&self, client: u64) -> Result<MetaReply, MetaFault> {
        if client == 0 {
            return Err(MetaFault::Invalid);
        }
        self.wait_for_room(Room { frees: true }).await?;
        self.forget(client)?;
        // Who falls silent may still trust them, as long as they last.
        self.leases.borrow_mut().leave(client);
        self.former.borrow_mut().left(client);
        self.leases_changed.notify_all();
        self.reap_orphans().await?;
        // The tail's row is gone with the client's: the next start waits for neither.
        self.durable(self.store.last_seq()).await?;
        Ok(MetaReply::Done)
    }

    /// Somebody knows that a client is dead: what it would lose after its lease is taken back now.
    pub(crate) async fn bury(&self, by: u64, uuid: [u8; 16]) -> Result<MetaReply, MetaFault> {
        let Some(dead) = self.table.borrow().by_uuid.get(&uuid).copied() else {
            // Perhaps its end is not durable yet.
            self.durable(self.store.last_seq()).await?;
            return Ok(MetaReply::Done);
        };
        if dead == by {
            return Err(MetaFault::Invalid);
        }
        let begun = reactor::now();
        while self.is_connected(dead) && begun.elapsed() < END_OF_CONNECTION_MAX {
            reactor::sleep(LOOK_AT_CONNECTION_EVERY).await;
        }
        let heard_of = || self.table.borrow().clients.get(&dead).map(|client| client.seen);
        let last = heard_of();
        reactor::sleep(STRAGGLERS).await;
        self.wait_for_room(Room { frees: true }).await?;
        if self.is_connected(dead) || heard_of() != last || self.is_cutting(dead) {
            tracing::warn!(client = dead, "a client that is said to be dead is left to its lease");
            return Err(MetaFault::NotPermitted);
        }
        self.forget(dead)?;
        tracing::info!(client = dead, "a dead client lost its opens, locks and write sessions");
        self.reap_orphans().await?;
        self.durable(self.store.last_seq()).await?;
        // Its sessions are to be settled.
        self.chores_changed().notify_all();
        Ok(MetaReply::Done)
    }

    pub(crate) fn is_connected(&self, client: u64) -> bool {
        let table = self.table.borrow();
        let pusher = table.clients.get(&client).and_then(|known| known.pusher.as_ref());
        pusher.is_some_and(Pusher::is_open)
    }

    /// Cuts objects may be on their way for long; and a client that lives after all trusts in half of its lease to go on
    /// with one.
    fn is_cutting(&self, client: u64) -> bool {
        let table = self.table.borrow();
        table.sessions.iter().any(|((_, of), session)| *of == client && session.cut.is_some())
    }

    /// Ends the leases that ran out, and releases what nobody holds any more. To be called every
    /// now and then; [`MetaService::run`] does.
    ///
    /// # Errors
    ///
    /// When the store does not take changes.
    pub async fn tick(&self) -> Result<(), MetaFault> {
        if self.is_recovering() {
            self.end_recovery(false).await?;
            if self.is_recovering() {
                return Ok(());
            }
        }
        self.end_idle_tail().await?;
        let silent: Vec<u64> = {
            let table = self.table.borrow();
            let silent = |client: &Client| self.silence(client) > self.config.lease;
            table.clients.iter().filter(|(_, c)| silent(c)).map(|(number, _)| *number).collect()
        };
        for client in silent {
            self.wait_for_room(Room { frees: true }).await?;
            self.expire(client)?;
        }
        if self.serving_for() > self.config.lease {
            let mut table = self.table.borrow_mut();
            let Table { awaited, clients, implied, .. } = &mut *table;
            // Who came in time and has not said all yet has another lease for it.
            let late = self.serving_for() > 2 * self.config.lease;
            awaited.retain(|client| !late && clients[client].reclaim.is_some());
            if awaited.is_empty() {
                implied.clear();
            }
        }
        self.reap_orphans().await?;
        // Last: a full store must not keep the rest from being done.
        self.end_lockless().await
    }

    /// Notes, durably, that a client may hold locks, before it is given the first.
    pub(crate) async fn let_lock(&self, client: u64) -> Result<(), MetaFault> {
        let known = |table: &Table| table.clients.get(&client).and_then(|known| known.may_lock);
        let mut noted = known(&self.table.borrow());
        if noted.is_none() {
            self.wait_for_room(Room { frees: true }).await?;
            noted = known(&self.table.borrow());
        }
        let seq = match noted {
            Some(seq) => seq,
            None => self.note_locks(client, true)?,
        };
        if let Some(known) = self.table.borrow_mut().clients.get_mut(&client) {
            known.lockless_since = reactor::now();
        }
        self.durable(seq).await
    }

    fn note_locks(&self, client: u64, may_lock: bool) -> Result<Seq, MetaFault> {
        let mut table = self.table.borrow_mut();
        let known = table.clients.get_mut(&client).ok_or(MetaFault::NotRegistered)?;
        let mut batch = Batch::default();
        batch.put(&key::client(client), &ClientRow { may_lock, ..known.row() }.encode());
        let seq = self.apply_own(batch)?;
        known.may_lock = may_lock.then_some(seq);
        Ok(seq)
    }

    /// Who has had no lock for a lease is not waited for after a restart.
    async fn end_lockless(&self) -> Result<(), MetaFault> {
        let lockless: Vec<u64> = {
            let mut table = self.table.borrow_mut();
            let Table { clients, locks, awaited, .. } = &mut *table;
            for (number, client) in clients.iter_mut() {
                // What it holds is not known before it has said so.
                if locks.has_any(*number) || awaited.contains(number) {
                    client.lockless_since = reactor::now();
                }
            }
            let lockless = clients.iter().filter(|(_, client)| self.is_lockless(client));
            lockless.map(|(number, _)| *number).collect()
        };
        for number in lockless {
            self.wait_for_room(Room { frees: true }).await?;
            // It may have asked for one while we waited for room.
            let client = self.table.borrow().clients.get(&number).map(|c| self.is_lockless(c));
            if client == Some(true) {
                self.note_locks(number, false)?;
            }
        }
        Ok(())
    }

    fn is_lockless(&self, client: &Client) -> bool {
        client.may_lock.is_some() && client.lockless_since.elapsed() > self.config.lease
    }

    /// Calls [`MetaService::tick`] for as long as the target serves.
    pub async fn run(&self) {
        loop {
            reactor::sleep((self.config.lease / 4).min(TICK_MAX)).await;
            if let Err(fault) = self.tick().await {
                tracing::warn!(%fault, "housekeeping of the metadata failed; it will be tried again");
            }
        }
    }

    /// How long a client has said nothing although it could have.
    fn silence(&self, client: &Client) -> Duration {
        client.seen.elapsed().min(self.serving_for())
    }

    /// Forgets a client that is still silent.
    fn expire(&self, client: u64) -> Result<(), MetaFault> {
        // It may have spoken while we waited for room.
        let silence = self.table.borrow().clients.get(&client).map(|gone| self.silence(gone));
        if silence.is_some_and(|silence| silence > self.config.lease) {
            self.forget(client)?;
            tracing::info!(client, "a silent client lost its opens and write sessions");
        }
        Ok(())
    }

    /// Forgets a client and the tail that it holds. Its sessions stay for the housekeeper.
    fn forget(&self, client: u64) -> Result<(), MetaFault> {
        let mut table = self.table.borrow_mut();
        let Some(gone) = table.clients.get(&client) else { return Ok(()) };
        let mut batch = Batch::default();
        batch.delete(&key::client(client));
        for (slot, number) in gone.slots.iter().zip(0..) {
            if slot.sequence > 0 {
                batch.delete(&key::reply(client, number));
            }
        }
        let held_tail = self.tail.borrow().row().is_some_and(|row| row.client == client);
        if held_tail {
            // Nobody will ask for what it was told.
            batch.delete(key::TAIL);
        }
        self.apply_own(batch)?;
        if held_tail {
            self.tail.borrow_mut().end();
        }
        table.forget(client);
        drop(table);
        self.push_notices();
        Ok(())
    }

    async fn reap_orphans(&self) -> Result<(), MetaFault> {
        let orphans: Vec<Ino> = {
            let table = self.table.borrow();
            if !table.awaited.is_empty() {
                return Ok(());
            }
            table.orphans.keys().copied().filter(|ino| table.opens(*ino) == 0).collect()
        };
        for ino in orphans {
            self.transact(Self::housekeeper(), None, Some(Room { frees: true }), |tx| {
                if tx.is_orphan(ino) && !tx.held(ino) {
                    write::reap(tx, ino)?;
                }
                Ok(MetaReply::Done)
            })
            .await?;
        }
        Ok(())
    }

    /// What the housekeeper has to do, of the inodes after `after`.
    pub(crate) async fn chores(&self, limit: u32, after: Ino) -> Result<MetaReply, MetaFault> {
        let limit = limit.clamp(1, 1024) as usize;
        let (from, to) = (key::destroy(after), [key::DESTROY + 1]);
        let rows = self
            .store
            .scan(Bound::Excluded(&from), Bound::Excluded(&to), limit)
            .await
            .map_err(fault_of)?;
        let doomed: BTreeMap<Ino, u64> = rows
            .iter()
            .filter_map(|(key, row)| {
                // One that cannot be decoded is deleted like any other.
                let bytes = DoomedRow::decode(row).map_or(0, |row| row.bytes);
                Some((Ino(key::first_number(key)?), bytes))
            })
            .collect();
        let mut destroy: Vec<Ino> = doomed.keys().copied().collect();
        let mut settle: BTreeSet<Ino> = {
            let table = self.table.borrow();
            let gone = |client: &u64| !table.clients.contains_key(client);
            let behind = (Bound::Excluded((after, u64::MAX)), Bound::Unbounded);
            let behind = table.sessions.range(behind).map(|(session, _)| session);
            let inos = behind.filter(|(_, client)| gone(client));
            // An orphan's size matters to nobody; but who holds it waits for the end of a cut.
            let cut = |ino: &Ino| {
                table.sessions(*ino).any(|(client, held)| held.cut.is_some() && gone(&client))
            };
            let mut settle = BTreeSet::new();
            for ino in inos.map(|(ino, _)| ino) {
                if settle.len() == limit {
                    break;
                }
                if !table.orphans.contains_key(ino) || cut(ino) {
                    settle.insert(*ino);
                }
            }
            settle
        };
        // Behind the last one of a list that was cut short there may be more of it.
        let ends = [
            destroy.last().filter(|_| destroy.len() == limit),
            settle.last().filter(|_| settle.len() == limit),
        ];
        let upto = ends.into_iter().flatten().min().copied();
        if let Some(upto) = upto {
            destroy.retain(|ino| *ino <= upto);
            settle.retain(|ino| *ino <= upto);
        }
        let destroy = self.attrs_of(&destroy, |_, _, inode| inode.nlink == 0).await?;
        let settle: Vec<Ino> = settle.into_iter().collect();
        // A live client that truncates cuts the objects itself. Looked at together with the attributes: the one
        // who is told of a cut goes by it.
        let is_settled_here = |tx: &Tx<'_>, ino, inode: &Inode| {
            let alive = |client: u64| tx.table.clients.contains_key(&client);
            let mut sessions = tx.sessions(ino).into_iter();
            let cutting = sessions.any(|(client, held)| held.cut.is_some() && alive(client));
            (inode.nlink > 0 || tx.is_orphan(ino)) && !cutting
        };
        let settle = self.attrs_of(&settle, is_settled_here).await?;
        // What the rows say must outlast a crash before objects go for good.
        self.durable(self.store.last_seq()).await?;
        let deletions = &mut self.table.borrow_mut().deletions;
        if after == Ino(0) {
            deletions.begin_look();
        }
        destroy.iter().for_each(|attr| deletions.begin(attr.ino, doomed[&attr.ino]));
        Ok(MetaReply::Chores { destroy, settle, upto })
    }

    /// What there is, with what deleted files still take. What is being deleted this moment is waited for a little: the
    /// objects may or may not count it as free by now.
    pub(crate) async fn space_now(&self) -> MetaReply {
        let begun = reactor::now();
        loop {
            let changed = {
                let table = self.table.borrow();
                let deletions = &table.deletions;
                let left = DELETIONS_WAIT.saturating_sub(begun.elapsed());
                // A target that is silent holds some up for long.
                let is_stuck = deletions.progress.elapsed() > DELETIONS_STUCK;
                if deletions.is_idle() || is_stuck || left.is_zero() {
                    let (inodes, inodes_free) = chores::inodes_free(&self.env, &table.counters);
                    let deleting_bytes = deletions.bytes();
                    let doomed_bytes = table.counters.doomed_bytes.saturating_sub(deleting_bytes);
                    let deletions = deletions.count;
                    return MetaReply::SpaceNow {
                        inodes,
                        inodes_free,
                        doomed_bytes,
                        deleting_bytes,
                        deletions,
                    };
                }
                let changed = std::rc::Rc::clone(&deletions.changed);
                async move { reactor::timeout(left, changed.changed()).await }
            };
            let _ = changed.await;
        }
    }

    /// The attributes of those inodes that are there and wanted.
    async fn attrs_of(
        &self,
        inos: &[Ino],
        wanted: impl Fn(&Tx<'_>, Ino, &Inode) -> bool,
    ) -> Result<Vec<Attr>, MetaFault> {
        let mut attrs = Vec::with_capacity(inos.len());
        for ino in inos {
            let reply =
                self.transact(Self::housekeeper(), None, None, |tx| match tx.inode(*ino)? {
                    Some(inode) if wanted(tx, *ino, &inode) => {
                        Ok(MetaReply::Attr(tx.attr(*ino, &inode)))
                    }
                    _ => Ok(MetaReply::Done),
                });
            if let MetaReply::Attr(attr) = reply.await? {
                attrs.push(*attr);
            }
        }
        Ok(attrs)
    }

    /// The header of the housekeeper's requests.
    #[must_use]
    pub fn housekeeper() -> CallHeader {
        CallHeader::reading(0)
    }
}
