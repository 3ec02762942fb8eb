//! What a metadata target knows beside the rows: clients, what they hold open, and copies of the
//! few rows that every request asks for (sessions, orphans, reply slots).
//!
//! Opens, locks and leases are volatile: after a restart, clients say again what they hold, and
//! until all that were known have done so or have fallen silent, nothing counts as closed.

use crate::accounts::Accounts;
use crate::config::MetaError;
use crate::key;
use crate::locks::{Locks, Owner};
use crate::row::{Charge, ClientRow, Counters, Damaged, Inode, OrphanRow, ReplyRow, Session};
use crate::service::SLOTS_MAX;
use crate::tx::NOBODY;
use levada_base::ids::{BootVerifier, Ino, Seq};
use levada_base::planted;
use levada_base::reactor::{self, Instant};
use levada_base::sync::Notify;
use levada_kv::{Bytes, KvError, Store};
use levada_wire::lock::{Lock, LockOwner, LockRange};
use levada_wire::meta::MetaReply;
use levada_wire::rpc::{ConnectionId, Pusher};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::rc::Rc;

/// Rows read at once while starting.
const SCAN_ROWS: usize = 1024;

/// The last change of a slot.
#[derive(Clone, Default)]
pub struct Slot {
    /// 0 before the first.
    pub sequence: u64,
    /// The encoded answer.
    pub reply: Option<Bytes>,
    /// The answer may be given once this is durable; 0: it was done before a restart.
    pub seq: Seq,
    /// A later one that is being worked on.
    pub running: Option<u64>,
}

/// A registered client.
pub struct Client {
    pub uuid: [u8; 16],
    /// When it was last heard of.
    pub seen: Instant,
    pub opens: BTreeMap<Ino, u32>,
    pub slots: Vec<Slot>,
    /// The last life of the target in which it held the tail and of which nothing is missing.
    pub settled: BootVerifier,
    /// From its registration to the last part.
    pub reclaim: Option<Reclaim>,
    /// Its row says that it may hold locks, from this batch on.
    pub may_lock: Option<Seq>,
    /// Its row says that it may hold leases, from this batch on.
    pub may_lease: Option<Seq>,
    /// It has had no lock since, as far as has been looked.
    pub lockless_since: Instant,
    /// The way back, over the connection that it registered on last.
    pub pusher: Option<Pusher>,
}

/// What a client that registered says that it holds open.
pub struct Reclaim {
    /// That it registered on. What comes late over an earlier one is of the past: it must take nothing away.
    pub connection: ConnectionId,
    /// The parts so far.
    pub opens: BTreeMap<Ino, u32>,
    pub locks: Vec<(Ino, Lock)>,
}

impl Client {
    /// A client that holds nothing open, heard of now.
    pub fn new(uuid: [u8; 16], settled: BootVerifier, slots: u32) -> Self {
        let slots = vec![Slot::default(); slots as usize];
        Self {
            uuid,
            seen: reactor::now(),
            opens: BTreeMap::new(),
            slots,
            settled,
            reclaim: None,
            may_lock: None,
            may_lease: None,
            lockless_since: reactor::now(),
            pusher: None,
        }
    }

    pub fn row(&self) -> ClientRow {
        let (may_lock, may_lease) = (self.may_lock.is_some(), self.may_lease.is_some());
        ClientRow { uuid: self.uuid, settled: self.settled, may_lock, may_lease }
    }

    /// The row that says: what it is told from now on is not settled, also when an earlier part of
    /// this life was. None when it says so already.
    pub fn unsettled_row(&self) -> Option<ClientRow> {
        let settled = BootVerifier(0);
        (self.settled != settled).then_some(ClientRow { settled, ..self.row() })
    }
}

/// See the module.
pub struct Table {
    pub clients: BTreeMap<u64, Client>,
    pub by_uuid: HashMap<[u8; 16], u64>,
    /// Opens of all clients.
    opens: HashMap<Ino, u64>,
    pub sessions: BTreeMap<(Ino, u64), Session>,
    pub orphans: BTreeMap<Ino, OrphanRow>,
    pub locks: Locks,
    pub counters: Counters,
    pub accounts: Accounts,
    /// Clients of the time before the restart that have not said yet what they hold open.
    pub awaited: BTreeSet<u64>,
    /// Inodes that stored replies of the time before the restart speak of. A client whose answer
    /// to an open got lost cannot know yet that it holds the file open; so these are held for
    /// one lease.
    pub implied: BTreeSet<Ino>,
    /// Changes when there may be a new chore for the housekeeper.
    pub chores: Rc<Notify>,
    pub deletions: Deletions,
}

/// Deletions that the housekeeper is at.
pub struct Deletions {
    /// What their objects held. Those of its last look at the list.
    under_way: BTreeMap<Ino, u64>,
    /// Counts their beginnings and ends.
    pub count: u64,
    /// When the last one ended, or there was a first one to be done.
    pub progress: Instant,
    pub changed: Rc<Notify>,
}

impl Deletions {
    fn new() -> Self {
        let (under_way, changed) = (BTreeMap::new(), Rc::default());
        Self { under_way, count: 0, progress: reactor::now(), changed }
    }

    /// The list is looked at from its beginning: of what was given out before nothing is under way any more.
    pub fn begin_look(&mut self) {
        self.count += self.under_way.len() as u64;
        self.under_way.clear();
    }

    pub fn begin(&mut self, ino: Ino, bytes: u64) {
        self.count += 1;
        self.under_way.insert(ino, bytes);
    }

    fn end(&mut self, ino: Ino) {
        self.count += 1;
        self.under_way.remove(&ino);
        self.progress = reactor::now();
        self.changed.notify_all();
    }

    pub fn bytes(&self) -> u64 {
        self.under_way.values().sum()
    }

    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }
}

/// A change of the table, made when its transaction has been applied.
#[derive(Clone, Copy, Debug)]
pub enum Effect {
    Opened(Ino),
    Closed(Ino),
    /// `None`: it has ended.
    Session(Ino, u64, Option<Session>),
    /// `None`: it has got a name, or goes.
    Orphan(Ino, Option<OrphanRow>),
    /// The objects of a file are to be destroyed.
    Destroy,
    /// They are gone, and the inode too.
    Destroyed(Ino),
    /// The client may add so much to a file, for which these pay; in the place of what it was granted before.
    Granted(Ino, Charge, u64),
    Lock(Ino, Lock, Option<u64>),
    Unlock(Ino, LockOwner, LockRange),
    /// By its ticket.
    CancelWait(u64),
}

impl Table {
    fn new(counters: Counters) -> Self {
        Self {
            clients: BTreeMap::new(),
            by_uuid: HashMap::new(),
            opens: HashMap::new(),
            sessions: BTreeMap::new(),
            orphans: BTreeMap::new(),
            locks: Locks::default(),
            counters,
            accounts: Accounts::default(),
            awaited: BTreeSet::new(),
            implied: BTreeSet::new(),
            chores: Rc::default(),
            deletions: Deletions::new(),
        }
    }

    /// The table that the rows of a store amount to, with up to `slots` slots for each client.
    pub async fn load(store: &Store, slots: u32) -> Result<Self, MetaError> {
        let counters = store.get(key::COUNTERS).await?.ok_or(MetaError::Empty)?;
        let mut table = Table::new(Counters::decode(&counters)?);
        if !Counters::has_doomed(&counters) {
            // The rows of then say nothing of bytes.
            table.counters.doomed_inodes = scan_tag(store, key::DESTROY).await?.len() as u64;
        }
        for (key, value) in scan_tag(store, key::CLIENT).await? {
            let ClientRow { uuid, settled, may_lock, may_lease } = ClientRow::decode(&value)?;
            let client = key::first_number(&key).unwrap_or(0);
            let noted = |may: bool| may.then_some(Seq(0));
            let (may_lock, may_lease) = (noted(may_lock), noted(may_lease));
            let known = Client { may_lock, may_lease, ..Client::new(uuid, settled, slots) };
            table.clients.insert(client, known);
            table.by_uuid.insert(uuid, client);
            table.awaited.insert(client);
        }
        for (key, value) in scan_tag(store, key::REPLY).await? {
            let row = ReplyRow::decode(&value)?;
            let slot = key::second_u32(&key).filter(|slot| *slot < SLOTS_MAX);
            let slot = slot.ok_or(Damaged { what: "reply" })? as usize;
            let client = key::first_number(&key).unwrap_or(0);
            let Some(client) = table.clients.get_mut(&client) else { continue };
            if client.slots.len() <= slot {
                // It was served with more slots before.
                client.slots.resize(slot + 1, Slot::default());
            }
            if let Ok(MetaReply::Entry(attr, _) | MetaReply::Attr(attr)) =
                postcard::from_bytes(&row.reply)
            {
                table.implied.insert(attr.ino);
            }
            let reply = Some(row.reply.into());
            client.slots[slot] = Slot { sequence: row.sequence, reply, seq: Seq(0), running: None };
        }
        for (key, value) in scan_tag(store, key::SESSION).await? {
            let ino = Ino(key::first_number(&key).unwrap_or(0));
            let client = key::second_number(&key).unwrap_or(0);
            let session = Session::decode(&value)?;
            table.sessions.insert((ino, client), session);
            if session.grant > 0 {
                // One whose row makes no sense has no owner whom it could be kept for.
                let inode = store.get(&key::inode(ino)).await?;
                let inode = inode.and_then(|row| Inode::decode(&row).ok());
                if let Some(charge) = inode.as_ref().and_then(Charge::of) {
                    table.accounts.grants.set((ino, client), charge.subjects(), session.grant);
                }
            }
        }
        for (key, value) in scan_tag(store, key::USAGE).await? {
            table.accounts.load(&key, &value)?;
        }
        for (key, value) in scan_tag(store, key::ORPHAN).await? {
            let ino = Ino(key::first_number(&key).unwrap_or(0));
            let row = OrphanRow::decode(&value).unwrap_or_else(|damaged| {
                // It is listed, and stays for as long as it is held; only a name it is not given.
                tracing::error!(ino = ino.0, %damaged, "metadata cannot be decoded");
                OrphanRow::default()
            });
            table.orphans.insert(ino, row);
        }
        Ok(table)
    }

    /// Makes the change; opens are the client's.
    pub fn take_effect(&mut self, client: u64, effect: Effect) {
        match effect {
            Effect::Opened(ino) => {
                if let Some(client) = self.clients.get_mut(&client) {
                    *client.opens.entry(ino).or_default() += 1;
                    *self.opens.entry(ino).or_default() += 1;
                }
            }
            Effect::Closed(ino) => self.closed(client, ino),
            Effect::Session(ino, client, Some(session)) => {
                self.sessions.insert((ino, client), session);
                self.accounts.grants.keep((ino, client), session.grant);
                if client == NOBODY {
                    self.chores.notify_all();
                }
            }
            Effect::Granted(ino, charge, bytes) => {
                self.accounts.grants.set((ino, client), charge.subjects(), bytes);
            }
            Effect::Session(ino, client, None) => {
                self.accounts.grants.set((ino, client), SmallVec::new(), 0);
                self.sessions.remove(&(ino, client));
            }
            Effect::Orphan(ino, Some(row)) => {
                self.orphans.insert(ino, row);
            }
            Effect::Destroy => {
                if self.counters.doomed_inodes <= 1 {
                    self.deletions.progress = reactor::now();
                }
                self.chores.notify_all();
            }
            Effect::Destroyed(ino) => self.deletions.end(ino),
            Effect::Orphan(ino, None) => {
                self.orphans.remove(&ino);
            }
            Effect::Lock(ino, lock, ticket) => self.locks.lock(client, ino, &lock, ticket),
            Effect::Unlock(ino, owner, range) => {
                self.locks.unlock(Owner { client, owner }, ino, range);
            }
            Effect::CancelWait(ticket) => self.locks.cancel(client, ticket),
        }
    }

    fn closed(&mut self, client: u64, ino: Ino) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let Some(count) = entry.opens.get_mut(&ino) else { return };
        *count -= 1;
        if *count == 0 {
            entry.opens.remove(&ino);
            self.locks.close(client, ino);
        }
        self.less_open(ino, 1);
    }

    fn less_open(&mut self, ino: Ino, by: u64) {
        let count = self.opens.get_mut(&ino).expect("the sum of what clients hold open");
        *count -= by;
        if *count == 0 {
            self.opens.remove(&ino);
        }
    }

    /// What a client says that it holds open takes the place of what was known. It says so before it changes
    /// anything in this life, so nothing that it opened here is overlooked; and each change whose answer it
    /// had not heard comes again, and is counted then. So the counts agree when all are answered.
    pub fn set_opens(&mut self, client: u64, opens: BTreeMap<Ino, u32>) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        for (ino, count) in &opens {
            *self.opens.entry(*ino).or_default() += u64::from(*count);
        }
        for (ino, count) in std::mem::replace(&mut entry.opens, opens) {
            self.less_open(ino, u64::from(count));
        }
    }

    /// What a client says that it has locked takes the place of what was known. False: it has none.
    pub fn set_locks(&mut self, client: u64, locks: &[(Ino, Lock)]) -> bool {
        let is_sound = self.clients.get(&client).is_some_and(|client| {
            let is_open = |(ino, _): &(Ino, Lock)| client.opens.contains_key(ino);
            locks.is_empty() || client.may_lock.is_some() && locks.iter().all(is_open)
        });
        let taken = self.locks.reclaim(client, if is_sound { locks } else { &[] });
        if !is_sound || !taken {
            tracing::error!(
                client,
                locks = locks.len(),
                "what a client says of its locks cannot be"
            );
        }
        is_sound && taken
    }

    /// After a restart: somebody may hold a lock and has not said so yet.
    pub fn in_grace(&self) -> bool {
        let may_lock =
            |client| self.clients.get(client).is_some_and(|c: &Client| c.may_lock.is_some());
        self.awaited.iter().any(may_lock) && !planted!("meta-lock-granted-in-grace")
    }

    /// Forgets a client; its sessions stay until they are settled.
    pub fn forget(&mut self, client: u64) {
        self.awaited.remove(&client);
        self.locks.forget(client);
        let Some(gone) = self.clients.remove(&client) else { return };
        self.by_uuid.remove(&gone.uuid);
        for (ino, count) in gone.opens {
            self.less_open(ino, u64::from(count));
        }
    }

    pub fn opens(&self, ino: Ino) -> u64 {
        self.opens.get(&ino).copied().unwrap_or(0)
    }

    /// Opens of one client.
    pub fn opens_of(&self, client: u64, ino: Ino) -> u32 {
        let client = self.clients.get(&client);
        client.and_then(|client| client.opens.get(&ino)).copied().unwrap_or(0)
    }

    /// The write sessions of an inode, with their clients.
    pub fn sessions(&self, ino: Ino) -> impl Iterator<Item = (u64, Session)> + '_ {
        let range = self.sessions.range((ino, 0)..=(ino, u64::MAX));
        range.map(|((_, client), session)| (*client, *session))
    }
}

/// Every row with a tag.
async fn scan_tag(store: &Store, tag: u8) -> Result<Vec<(Bytes, Bytes)>, KvError> {
    let end = [tag + 1];
    let mut rows: Vec<(Bytes, Bytes)> = Vec::new();
    loop {
        let last = rows.last().map(|(key, _)| Bytes::clone(key));
        let start = [tag];
        let from =
            last.as_ref().map_or(Bound::Included(&start[..]), |key| Bound::Excluded(&key[..]));
        let more = store.scan(from, Bound::Excluded(&end), SCAN_ROWS).await?;
        let done = more.len() < SCAN_ROWS;
        rows.extend(more);
        if done {
            return Ok(rows);
        }
    }
}
