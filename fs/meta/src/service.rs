//! The metadata service of one target.
//!
//! A change runs in four steps: wait for room in the store; fetch the rows it needs; check and
//! apply, in one step without a wait (`tx`), together with the reply row of its slot; wait until
//! that is durable, then answer. The next change of the same directory need not wait for the
//! last step, so that many share one flush of the store.
//!
//! What always holds:
//! - Nothing is told that a crash could take back: an answer, also of a read and of a refusal,
//!   waits until everything that it rests on is durable; or it goes to the one client that
//!   holds all the rest (`tail`) and hands it back after a crash (`recovery`).
//! - A change and its reply row are one batch; a repeat gets the stored reply.
//!
//! After a crash the store holds a prefix of the batches that contains every answered one. Opens
//! and leases are gone; see `table`.

use crate::accounts::Row;
use crate::cache::{Cache, Listing};
use crate::config::{CallHeader, FsConfig, MetaError, ServeConfig};
use crate::key;
use crate::leases::{Item, Leases};
use crate::observe::Observer;
use crate::ops::{self, Answer, chores};
use crate::rounds::Former;
use crate::row::{Body, Charge, Counters, Inode, ReplyRow, Superblock, TailRow, first_ino};
use crate::slots::{Entered, Ticket};
use crate::table::{Client, Table};
use crate::tail::Tail;
use crate::tx::{Env, Outcome, Stop, Told, Tx};
use levada_base::ids::{BootVerifier, Ino, Seq, TargetId};
use levada_base::meter::HitMeter;
use levada_base::planted;
use levada_base::reactor::{self, Instant};
use levada_base::sync::{Notify, Semaphore};
use levada_kv::{Batch, Bytes, KvError, Store};
use levada_wire::attr::{Attr, Time};
use levada_wire::frame::flags;
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Bound;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The most slots of a client.
pub(crate) const SLOTS_MAX: u32 = 1 << 16;

/// A client as [`MetaService::clients`] tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientNote {
    pub id: u64,
    pub uuid: [u8; 16],
    /// Files that it holds open.
    pub open_files: u64,
}

/// See the module.
pub struct MetaService {
    pub(crate) store: Store,
    pub(crate) env: Env,
    pub(crate) config: ServeConfig,
    pub(crate) verifier: BootVerifier,
    pub(crate) table: RefCell<Table>,
    pub(crate) tail: RefCell<Tail>,
    pub(crate) leases: RefCell<Leases>,
    pub(crate) former: RefCell<Former>,
    /// A notice was acknowledged, or somebody who may hold leases came or went.
    pub(crate) leases_changed: Notify,
    /// The holder of the tail is awaited.
    pub(crate) recovering: Cell<bool>,
    pub(crate) recovery_changed: Notify,
    pub(crate) recovery_turn: Rc<Semaphore>,
    cache: RefCell<Cache>,
    /// A slot's running change has ended.
    pub(crate) slot_free: Notify,
    /// Told of changed rows, while there is one.
    pub(crate) observer: RefCell<Option<Rc<dyn Observer>>>,
    /// When the first request, or the first tick, came.
    pub(crate) serving_since: Cell<Option<Instant>>,
    last_time: Cell<Time>,
    /// The order in which requests took effect, which is what tests compare a model with.
    #[cfg(test)]
    pub(crate) trace: RefCell<Vec<Traced>>,
}

/// A request that took effect, or was refused.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traced {
    pub call: CallHeader,
    /// The batch that it applied.
    pub wrote: Option<Seq>,
    /// It was done before a restart; only its opens and closes took effect, once more.
    pub counts_again: bool,
}

/// How a request is treated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Changes nothing.
    Read,
    /// Needs a slot.
    Change,
    /// A change that may be done twice.
    Repeatable,
}

fn class_of(request: &MetaRequest) -> Class {
    use MetaRequest as R;
    match request {
        R::Lookup { .. }
        | R::GetAttr { .. }
        | R::ReadLink { .. }
        | R::ReadDir { .. }
        | R::GetXattr { .. }
        | R::ListXattrs { .. }
        | R::TestLock { .. }
        | R::Sync
        | R::Space
        | R::SpaceNow
        | R::Allowance { .. }
        | R::Chores { .. } => Class::Read,
        R::SetAttr { .. }
        | R::SetXattr { .. }
        | R::RemoveXattr { .. }
        | R::Create { .. }
        | R::CreateUnnamed { .. }
        | R::Link { .. }
        | R::Unlink { .. }
        | R::RemoveDir { .. }
        | R::Rename { .. }
        | R::Open { .. }
        | R::Close { .. }
        | R::BeginWrite { .. }
        | R::CommitWrite { .. }
        | R::Several { .. }
        | R::Truncated { .. }
        | R::Lock { .. }
        | R::Unlock { .. }
        | R::CancelWait { .. } => Class::Change,
        R::Register { .. }
        | R::Replay { .. }
        | R::Reclaim { .. }
        | R::Destroyed { .. }
        | R::Settled { .. }
        | R::Grant { .. }
        | R::Leave
        | R::Bury { .. } => Class::Repeatable,
    }
}

/// Whether it may need room in the store. A full one must not keep locks from being released.
fn writes_rows(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    let is_lock = matches!(request, R::Lock { .. } | R::Unlock { .. } | R::CancelWait { .. });
    class_of(request) != Class::Read && !is_lock
}

impl MetaService {
    /// Makes a file system in an empty store.
    ///
    /// # Errors
    ///
    /// When the configuration makes no sense or the store fails.
    pub async fn create(
        store: Store,
        fs: FsConfig,
        config: ServeConfig,
    ) -> Result<Self, MetaError> {
        if fs.stripe_count == 0 || fs.stripe_count > 64 {
            return Err(MetaError::Config { what: "this stripe count" });
        }
        if fs.stripe_unit == 0 || !fs.stripe_unit.is_multiple_of(levada_base::units::BLOCK_BYTES) {
            return Err(MetaError::Config { what: "this stripe unit" });
        }
        let superblock = Superblock {
            uuid: fs.uuid,
            target: fs.target,
            generation: 1,
            stripe_count: fs.stripe_count,
            stripe_unit: fs.stripe_unit,
            inodes_max: fs.inodes_max,
            name: fs.name,
        };
        let counters = Counters {
            next_ino: first_ino(fs.target),
            next_client: 1,
            inodes: 1,
            doomed_inodes: 0,
            doomed_bytes: 0,
        };
        let mode = ops::S_IFDIR | (fs.root_mode & !ops::S_IFMT);
        let body = Body::Directory { next_cookie: ops::names::FIRST_COOKIE, entries: 0 };
        let root = Inode {
            uid: fs.root_uid,
            gid: fs.root_gid,
            ..Inode::new(superblock.generation, mode, 2, wall_clock(), Ino::ROOT, body)
        };
        store.room().await?;
        let mut batch = Batch::default();
        let charge = Charge::of(&root).expect("new");
        for subject in charge.subjects() {
            Row::Used(charge.usage()).put(subject, &mut batch);
        }
        batch.put(key::SUPERBLOCK, &superblock.encode());
        batch.put(key::COUNTERS, &counters.encode());
        batch.put(&key::inode(Ino::ROOT), &root.encode());
        let seq = store.apply(batch)?;
        store.durable(seq).await?;
        Self::open(store, config).await
    }

    /// Starts a metadata target on what its store holds.
    ///
    /// # Errors
    ///
    /// When the store fails or holds no file system.
    pub async fn open(store: Store, config: ServeConfig) -> Result<Self, MetaError> {
        if config.objects.is_empty() {
            return Err(MetaError::Config { what: "no object target" });
        }
        if config.slots == 0 || config.slots > SLOTS_MAX {
            return Err(MetaError::Config { what: "this number of slots" });
        }
        let superblock = store.get(key::SUPERBLOCK).await?.ok_or(MetaError::Empty)?;
        let superblock = Superblock::decode(&superblock)?;
        let table = Table::load(&store, config.slots).await?;
        let tail = store.get(key::TAIL).await?.map(|row| TailRow::decode(&row)).transpose()?;
        if let Some(row) = tail {
            let (client, seconds) = (row.client, config.recovery.as_secs());
            tracing::info!(
                client,
                "waiting up to {seconds} s for the client that holds what is not durable"
            );
        }
        let former = Former::of(&table);
        let targets = config.objects.iter().map(|(target, _)| *target).collect();
        Ok(Self {
            store,
            env: Env::new(superblock, targets),
            verifier: BootVerifier(reactor::random_u64()),
            table: RefCell::new(table),
            recovering: Cell::new(tail.is_some()),
            recovery_changed: Notify::default(),
            recovery_turn: Semaphore::new(1),
            tail: RefCell::new(Tail::new(tail)),
            leases: RefCell::default(),
            former: RefCell::new(former),
            leases_changed: Notify::default(),
            cache: RefCell::new(Cache::new(config.cache_bytes)),
            slot_free: Notify::default(),
            observer: RefCell::default(),
            serving_since: Cell::new(None),
            last_time: Cell::new(Time(i64::MIN)),
            config,
            #[cfg(test)]
            trace: RefCell::default(),
        })
    }

    /// From now on new files go to other object targets than these, unless there is no other. Forgotten when the
    /// service ends.
    pub fn avoid(&self, targets: &BTreeSet<TargetId>) {
        if self.env.avoid(targets) {
            tracing::info!(?targets, "new files avoid object targets");
        }
    }

    /// Changes when there may be a new chore: a deleted file that nobody has open any more.
    #[must_use]
    pub fn chores_changed(&self) -> Rc<Notify> {
        Rc::clone(&self.table.borrow().chores)
    }

    /// How long clients have been able to come back. From the opening of the store to the first request
    /// the other targets are opened, which can take longer than clients are waited for.
    pub(crate) fn serving_for(&self) -> Duration {
        let since = self.serving_since.get().unwrap_or_else(reactor::now);
        self.serving_since.set(Some(since));
        since.elapsed()
    }

    /// How often a row that was looked at was in memory, and how often not.
    #[must_use]
    pub fn looks(&self) -> HitMeter {
        self.cache.borrow().looks.clone()
    }

    /// The clients that are known, for people.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientNote> {
        let table = self.table.borrow();
        let notes = table.clients.iter().map(|(id, client)| ClientNote {
            id: *id,
            uuid: client.uuid,
            open_files: client.opens.len() as u64,
        });
        notes.collect()
    }

    /// Drawn at this start: clients compare it and say what they hold open when it changed.
    #[must_use]
    pub fn verifier(&self) -> BootVerifier {
        self.verifier
    }

    /// The store below.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Answers one request. Requests may run as concurrent tasks; one that is dropped half-way
    /// has either changed nothing or can be repeated with its slot and sequence.
    pub async fn handle(&self, call: CallHeader, request: MetaRequest) -> MetaReply {
        self.handle_leasing(call, request, &Grants::none()).await
    }

    /// As [`MetaService::handle`], with the leases that the caller wants.
    pub(crate) async fn handle_leasing(
        &self,
        call: CallHeader,
        request: MetaRequest,
        grants: &Grants,
    ) -> MetaReply {
        match self.answer(call, request, grants).await {
            Ok(reply) => reply,
            Err(fault) => MetaReply::Failed(fault),
        }
    }

    async fn answer(
        &self,
        call: CallHeader,
        request: MetaRequest,
        grants: &Grants,
    ) -> Result<MetaReply, MetaFault> {
        self.serving_for();
        if self.is_recovering() {
            self.recovered(call.client, &request).await?;
        }
        if let MetaRequest::Register { uuid } = request {
            return self.register(call.connection, uuid, grants.wanted).await;
        }
        if call.client != 0 {
            let mut table = self.table.borrow_mut();
            let client = table.clients.get_mut(&call.client).ok_or(MetaFault::NotRegistered)?;
            client.seen = reactor::now();
        }
        let class = class_of(&request);
        match request {
            MetaRequest::Replay { life, batches } => {
                return self.replay(call.client, life, batches).await;
            }
            MetaRequest::Reclaim { opens, locks, last } => {
                return self.reclaim(call, opens, locks, last).await;
            }
            MetaRequest::Lock { .. } => self.let_lock(call.client).await?,
            MetaRequest::Leave => return self.leave(call.client).await,
            MetaRequest::Bury { uuid } => return self.bury(call.client, uuid).await,
            MetaRequest::Sync => {
                self.durable(self.store.last_seq()).await?;
                return Ok(MetaReply::Done);
            }
            MetaRequest::ReadDir { ino, cookie, entries_max, attrs } => {
                let (page, attrs) = ((cookie, entries_max), attrs);
                return self.read_dir(call, ino, page, attrs, grants).await;
            }
            MetaRequest::SpaceNow => return Ok(self.space_now().await),
            MetaRequest::Chores { limit, after } => return self.chores(limit, after).await,
            _ => {}
        }
        let ticket = match (class, call.slot) {
            (Class::Change, CallHeader::NO_SLOT) => return Err(MetaFault::Invalid),
            (Class::Change, _) => match self.enter(call).await? {
                Entered::Run(ticket) => Some(ticket),
                Entered::Answered(slot) => {
                    self.counts_again(call, &slot, &request);
                    return self.repeat(call, slot).await;
                }
            },
            (Class::Read | Class::Repeatable, _) => None,
        };
        let frees = chores::frees(&request);
        let room = writes_rows(&request).then_some(Room { frees });
        self.transact_leasing(call, ticket, room, grants, |tx| ops::run(tx, &request)).await
    }

    /// Runs an operation to its durable end.
    pub(crate) async fn transact(
        &self,
        call: CallHeader,
        ticket: Option<Ticket<'_>>,
        room: Option<Room>,
        op: impl Fn(&mut Tx<'_>) -> Answer,
    ) -> Result<MetaReply, MetaFault> {
        self.transact_leasing(call, ticket, room, &Grants::none(), op).await
    }

    /// As [`MetaService::transact`], with leases on what the answer tells.
    pub(crate) async fn transact_leasing(
        &self,
        call: CallHeader,
        ticket: Option<Ticket<'_>>,
        room: Option<Room>,
        grants: &Grants,
        op: impl Fn(&mut Tx<'_>) -> Answer,
    ) -> Result<MetaReply, MetaFault> {
        let mut round = None;
        loop {
            if let Some(room) = room {
                self.wait_for_room(room).await?;
            }
            let now = self.time();
            let (result, mut outcome) = {
                let table = self.table.borrow();
                let mut cache = self.cache.borrow_mut();
                let mut tx = Tx::new(&self.env, &table, &mut cache, call.client, now);
                let result = op(&mut tx);
                (result, tx.finish())
            };
            #[cfg(test)]
            let before = self.store.last_seq();
            let outcome_saw = outcome.saw;
            let told = std::mem::take(&mut outcome.told);
            // From here to the end of `commit` nothing else runs.
            let (reply, seq) = match result {
                Err(Stop::Missing) => {
                    self.fetch(outcome.missing).await?;
                    continue;
                }
                Err(Stop::Fault(fault)) => {
                    let reply = MetaReply::Failed(fault);
                    // The client repeats what was not available, with the same sequence.
                    if let Some(ticket) =
                        ticket.as_ref().filter(|_| fault != MetaFault::Unavailable)
                    {
                        ticket.done(encode(&reply).into(), outcome.saw);
                    }
                    (reply, outcome.saw)
                }
                Ok(reply) => {
                    let unread = self.unread(&mut self.cache.borrow_mut(), &outcome.writes);
                    if !unread.is_empty() {
                        self.fetch(unread).await?;
                        continue;
                    }
                    let changes = (&outcome.writes, outcome.begins);
                    if self.told_others(call.client, changes, &mut round).await {
                        // Much may have happened meanwhile.
                        continue;
                    }
                    let seq = self.commit(call, ticket.as_ref(), &reply, outcome)?;
                    (reply, seq)
                }
            };
            drop(ticket);
            drop(round);
            self.grant(call.client, &told, grants);
            self.push_notices();
            // Also what was only read: between transactions, so that none loses what it waits for.
            self.cache.borrow_mut().trim(self.store.durable_seq());
            #[cfg(test)]
            self.trace.borrow_mut().push(Traced {
                call,
                wrote: (self.store.last_seq() > before).then_some(self.store.last_seq()),
                counts_again: false,
            });
            let wrote = seq > outcome_saw;
            if planted!("meta-answered-before-durable") && wrote
                || planted!("meta-read-of-undurable-answered") && !wrote
            {
                return Ok(reply);
            }
            self.tellable(call, seq).await?;
            return Ok(reply);
        }
    }

    /// Waits until `call` may be told what rests on the batches up to `seq`.
    pub(crate) async fn tellable(&self, call: CallHeader, seq: Seq) -> Result<(), MetaFault> {
        let durable = self.store.durable_seq();
        if self.tail.borrow_mut().is_early(call, durable, &self.table.borrow().counters) {
            return Ok(());
        }
        self.durable(seq).await
    }

    /// In the step that read what is told: who changes it after that finds the lease. The caller is told of it when the
    /// answer may go, and a notice that comes before voids it.
    fn grant(&self, client: u64, told: &Told, grants: &Grants) {
        if !grants.wanted {
            return;
        }
        if !told.names.is_empty() && self.lease(client, told.names()) {
            grants.give(flags::NAMES);
        }
        if !told.nodes.is_empty() && self.lease(client, told.nodes()) && !told.is_vague {
            grants.give(flags::NODE);
        }
    }

    /// The attributes of a directory as they are now, if the caller, who holds the tail, may be told at
    /// once.
    pub(crate) fn directory_now(
        &self,
        call: CallHeader,
        ino: Ino,
        grants: &Grants,
    ) -> Option<Box<Attr>> {
        let table = self.table.borrow();
        let durable = self.store.durable_seq();
        if !self.tail.borrow_mut().is_early(call, durable, &table.counters) {
            return None;
        }
        let mut cache = self.cache.borrow_mut();
        let mut tx = Tx::new(&self.env, &table, &mut cache, call.client, self.time());
        match ops::attrs::get(&mut tx, ino) {
            Ok(MetaReply::Attr(attr)) => {
                if grants.wanted && self.lease(call.client, [Item::Node(ino)].into_iter()) {
                    grants.give(flags::DIRECTORY);
                }
                Some(attr)
            }
            _ => None,
        }
    }

    /// Applies what a transaction leaves behind, and its reply row, as one batch.
    fn commit(
        &self,
        call: CallHeader,
        ticket: Option<&Ticket<'_>>,
        reply: &MetaReply,
        outcome: Outcome,
    ) -> Result<Seq, MetaFault> {
        let Outcome { writes, effects, used, made_directory, counters, saw, .. } = outcome;
        let mut table = self.table.borrow_mut();
        if call.client != 0 && !table.clients.contains_key(&call.client) {
            return Err(MetaFault::NotRegistered);
        }
        let encoded: Option<Bytes> = ticket.map(|_| encode(reply).into());
        let mut seq = saw;
        if !writes.is_empty() {
            let mut batch = Batch { changes: Vec::with_capacity(writes.len() + 2) };
            batch.changes.extend(writes.iter().cloned());
            if counters != table.counters {
                batch.put(key::COUNTERS, &counters.encode());
            }
            let accounts = table.accounts.changes(&used, self.time());
            accounts.iter().for_each(|(subject, row)| row.put(*subject, &mut batch));
            if let Some(encoded) = &encoded
                && !planted!("meta-reply-not-stored")
            {
                let row = ReplyRow::encode(call.sequence, encoded);
                batch.put(&key::reply(call.client, call.slot), &row);
            }
            let mut tail = self.tail.borrow_mut();
            let row = tail.row_for(call, self.verifier, &counters);
            if let Some(row) = row {
                batch.put(key::TAIL, &row.encode());
                let client = table.clients.get(&call.client);
                if let Some(client_row) = client.and_then(Client::unsettled_row) {
                    batch.put(&key::client(call.client), &client_row.encode());
                }
            }
            seq = match tail.is_lazy(call) {
                true => self.store.apply_lazily(batch.clone()),
                false => self.store.apply(batch.clone()),
            }
            .map_err(fault_of)?;
            tail.applied(call.client, seq, &batch, row);
            if row.is_some()
                && let Some(client) = table.clients.get_mut(&call.client)
            {
                client.settled = BootVerifier(0);
            }
            let mut cache = self.cache.borrow_mut();
            self.tell(&mut cache, &writes);
            for (key, value) in writes {
                cache.changed(key, value, seq);
            }
            if let Some(directory) = made_directory {
                cache.completed(directory);
            }
            table.counters = counters;
            table.accounts.take(&accounts);
        }
        for effect in &effects {
            table.take_effect(call.client, *effect);
        }
        drop(table);
        self.opens_changed(call.client, &effects);
        if let (Some(ticket), Some(encoded)) = (ticket, encoded) {
            ticket.done(encoded, seq);
        }
        Ok(seq)
    }

    pub(crate) async fn wait_for_room(&self, room: Room) -> Result<(), MetaFault> {
        let room =
            if room.frees { self.store.room_to_free().await } else { self.store.room().await };
        room.map_err(fault_of)
    }

    /// Waits until `seq` is durable.
    pub(crate) async fn durable(&self, seq: Seq) -> Result<(), MetaFault> {
        if seq <= self.store.durable_seq() {
            return Ok(());
        }
        self.store.durable(seq).await.map_err(fault_of)
    }

    /// Brings rows into memory.
    async fn fetch(&self, keys: Vec<Bytes>) -> Result<(), MetaFault> {
        if let Some(listing) = keys.iter().find_map(|key| self.listing_for(key)) {
            self.list(listing).await?;
            // What it brought in need not be fetched; the caller looks again.
            return Ok(());
        }
        let reads = keys.into_iter().map(|key| async move {
            let mut guard = Fetching { service: self, fetch: None, value: None };
            guard.fetch = Some(self.cache.borrow_mut().fetch(Bytes::clone(&key)));
            guard.value = Some(self.store.get(&key).await.map_err(fault_of)?);
            Ok(())
        });
        let results: Vec<Result<(), MetaFault>> = futures_util::future::join_all(reads).await;
        results.into_iter().collect()
    }

    /// Whether to bring in all names of a directory instead of this one row.
    fn listing_for(&self, key: &[u8]) -> Option<Listing> {
        if key.first() != Some(&key::NAME) {
            return None;
        }
        let directory = Ino(key::first_number(key)?);
        let mut cache = self.cache.borrow_mut();
        let inode = cache.get(&key::inode(directory))?.value.as_deref()?;
        match Inode::decode(inode).ok()?.body {
            Body::Directory { entries, .. } => cache.missed(directory, entries),
            Body::File(_) | Body::Symlink(_) | Body::Special => None,
        }
    }

    async fn list(&self, listing: Listing) -> Result<(), MetaFault> {
        let (directory, rows_max) = (listing.directory, listing.rows_max);
        let mut guard = ListingGuard { service: self, listing: Some(listing), rows: None };
        let (from, to) = (key::name(directory, b""), key::name(Ino(directory.0 + 1), b""));
        let (from, to) = (Bound::Included(&from[..]), Bound::Excluded(&to[..]));
        let rows = self.store.scan(from, to, rows_max + 1).await.map_err(fault_of)?;
        guard.rows = (rows.len() <= rows_max).then_some(rows);
        Ok(())
    }

    /// The wall clock, which does not go back while the target serves.
    pub(crate) fn time(&self) -> Time {
        let now = wall_clock().max(self.last_time.get());
        self.last_time.set(now);
        now
    }
}

/// The leases that come with an answer.
pub(crate) struct Grants {
    pub wanted: bool,
    given: Cell<u32>,
}

impl Grants {
    pub fn new(wanted: bool) -> Self {
        Self { wanted, given: Cell::new(0) }
    }

    pub fn none() -> Self {
        Self::new(false)
    }

    pub fn give(&self, flags: u32) {
        self.given.set(self.given.get() | flags);
    }

    /// Flags of the reply.
    pub fn flags(&self) -> u32 {
        self.given.get()
    }
}

/// What the request needs of the store.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    /// It may use what the store keeps for making itself smaller.
    pub frees: bool,
}

/// A read of a row, also when it is given up.
struct Fetching<'a> {
    service: &'a MetaService,
    fetch: Option<crate::cache::Fetch>,
    value: Option<Option<Bytes>>,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        if let Some(fetch) = self.fetch.take() {
            self.service.cache.borrow_mut().fetched(fetch, self.value.take());
        }
    }
}

/// A listing of a directory, also when it is given up.
struct ListingGuard<'a> {
    service: &'a MetaService,
    listing: Option<Listing>,
    rows: Option<Vec<(Bytes, Bytes)>>,
}

impl Drop for ListingGuard<'_> {
    fn drop(&mut self) {
        if let Some(listing) = self.listing.take() {
            self.service.cache.borrow_mut().listed(listing, self.rows.take());
        }
    }
}

fn encode(reply: &MetaReply) -> Vec<u8> {
    postcard::to_stdvec(reply).expect("memory takes every message")
}

/// The one place where the store's errors become the wire's.
pub(crate) fn fault_of(error: KvError) -> MetaFault {
    match error {
        KvError::Full => MetaFault::Full,
        KvError::Stopped => MetaFault::Unavailable,
        KvError::Block(_) => {
            tracing::error!(%error, "the metadata store failed");
            MetaFault::Unavailable
        }
        KvError::TooLarge { .. } => MetaFault::Invalid,
        KvError::Damaged { .. } | KvError::TooSmall { .. } => {
            tracing::error!(%error, "the metadata store is damaged");
            MetaFault::Damaged
        }
    }
}

/// Virtual in the simulator, so that it belongs to the run.
pub(crate) fn wall_clock() -> Time {
    /// 2030-01-01, in seconds.
    const SIMULATED_START: u64 = 1_893_456_000;
    let since_1970 = if reactor::is_simulated() {
        Duration::from_secs(SIMULATED_START) + Duration::from_nanos(reactor::now().0)
    } else {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    };
    Time(i64::try_from(since_1970.as_nanos()).unwrap_or(i64::MAX))
}
