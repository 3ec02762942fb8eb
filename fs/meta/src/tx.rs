//! A transaction: a synchronous look at cached rows, and the changes that follow from it.
//!
//! An operation runs from its first check to its last change without a wait, so nothing comes
//! between. When it needs a row that is not in memory it stops with [`Stop::Missing`], has
//! changed nothing, and runs again from the start once the row was fetched.

use crate::cache::Cache;
use crate::key::{self, Key};
use crate::leases::Item;
use crate::row::{
    Charge, Counters, Damaged, DoomedRow, EntryRow, Inode, NameRow, OrphanRow, Session,
    StoredBytes, Subject, Superblock, Usage,
};
use crate::table::{Effect, Table};
use levada_base::ids::{Ino, Seq, TargetId};
use levada_kv::Bytes;
use levada_wire::attr::{Attr, Kind, Time};
use levada_wire::meta::MetaFault;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Who has the session that lets the housekeeper ask the objects: no client has this number.
pub const NOBODY: u64 = 0;

/// Why an operation ended early.
#[derive(Debug)]
pub enum Stop {
    /// The rows noted in the transaction must be fetched first.
    Missing,
    /// It is refused; nothing changes.
    Fault(MetaFault),
}

impl From<MetaFault> for Stop {
    fn from(fault: MetaFault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Damaged> for Stop {
    fn from(damaged: Damaged) -> Self {
        tracing::error!(%damaged, "metadata cannot be decoded");
        Self::Fault(MetaFault::Damaged)
    }
}

/// What does not change while a target serves.
pub struct Env {
    pub superblock: Superblock,
    /// All that objects of files may lie on.
    pub targets: Vec<TargetId>,
    /// Where new files' objects go, in turn: those of [`Self::targets`] that are not avoided; never none.
    pub usable: RefCell<Vec<TargetId>>,
}

impl Env {
    pub fn new(superblock: Superblock, targets: Vec<TargetId>) -> Self {
        let usable = RefCell::new(targets.clone());
        Self { superblock, targets, usable }
    }

    /// From now on new files go elsewhere, unless there is nothing else. Whether that changes anything.
    pub fn avoid(&self, avoided: &BTreeSet<TargetId>) -> bool {
        let all = &self.targets;
        let others: Vec<_> = all.iter().copied().filter(|id| !avoided.contains(id)).collect();
        let usable = if others.is_empty() { all.clone() } else { others };
        let before = self.usable.replace(usable);
        before != *self.usable.borrow()
    }
}

/// Rows that a transaction writes; `None`: deletes.
pub type Writes = SmallVec<[(Bytes, Option<Bytes>); 8]>;

/// What the answer tells of, so that there may be a lease on it.
#[derive(Default)]
pub struct Told {
    pub names: SmallVec<[Ino; 2]>,
    pub nodes: SmallVec<[Ino; 2]>,
    /// Of an inode that was told of nothing is certain.
    pub is_vague: bool,
}

impl Told {
    pub fn names(&self) -> impl Iterator<Item = Item> + '_ {
        self.names.iter().copied().map(Item::Names)
    }

    pub fn nodes(&self) -> impl Iterator<Item = Item> + '_ {
        self.nodes.iter().copied().map(Item::Node)
    }
}

/// See the module.
pub struct Tx<'a> {
    pub env: &'a Env,
    pub table: &'a Table,
    /// Who asks.
    pub client: u64,
    pub now: Time,
    pub counters: Counters,
    cache: &'a mut Cache,
    writes: Writes,
    effects: SmallVec<[Effect; 4]>,
    /// What these use with the changes of this transaction.
    used: SmallVec<[(Subject, Usage); 4]>,
    missing: Vec<Bytes>,
    made_directory: Option<Ino>,
    told: Told,
    begins: Option<Ino>,
    saw: Seq,
}

/// What a transaction leaves behind.
pub struct Outcome {
    pub writes: Writes,
    pub effects: SmallVec<[Effect; 4]>,
    pub used: SmallVec<[(Subject, Usage); 4]>,
    pub missing: Vec<Bytes>,
    /// It has no names yet.
    pub made_directory: Option<Ino>,
    pub counters: Counters,
    pub told: Told,
    /// A file that the caller is about to write, or has given another size.
    pub begins: Option<Ino>,
    /// The last change among the rows that were read: what follows from them may only be told
    /// once this is durable.
    pub saw: Seq,
}

impl<'a> Tx<'a> {
    pub fn new(
        env: &'a Env,
        table: &'a Table,
        cache: &'a mut Cache,
        client: u64,
        now: Time,
    ) -> Self {
        Self {
            env,
            table,
            client,
            now,
            counters: table.counters,
            cache,
            writes: SmallVec::new(),
            effects: SmallVec::new(),
            used: SmallVec::new(),
            missing: Vec::new(),
            made_directory: None,
            told: Told::default(),
            begins: None,
            saw: Seq(0),
        }
    }

    pub fn finish(self) -> Outcome {
        let Self {
            writes,
            effects,
            used,
            missing,
            made_directory,
            counters,
            told,
            begins,
            saw,
            ..
        } = self;
        Outcome { writes, effects, used, missing, made_directory, counters, told, begins, saw }
    }

    /// Notes which of these rows must be fetched, so that they are fetched together.
    pub fn load(&mut self, keys: &[Key]) -> Result<(), Stop> {
        for key in keys {
            if self.cache.get(key).is_none() {
                self.missing.push(key.as_slice().into());
            }
        }
        if self.missing.is_empty() { Ok(()) } else { Err(Stop::Missing) }
    }

    /// A row, with the changes of this transaction.
    pub fn row(&mut self, key: &[u8]) -> Result<Option<Bytes>, Stop> {
        if let Some((_, value)) = self.writes.iter().find(|(held, _)| **held == *key) {
            return Ok(value.clone());
        }
        let Some(cached) = self.cache.get(key) else {
            self.missing.push(key.into());
            return Err(Stop::Missing);
        };
        self.saw = self.saw.max(cached.seq);
        Ok(cached.value.clone())
    }

    /// What a subject uses, with the changes of this transaction.
    pub fn used(&self, subject: Subject) -> Usage {
        let changed = self.used.iter().find(|(held, _)| *held == subject);
        changed.map_or_else(|| self.table.accounts.usage_of(subject), |(_, usage)| *usage)
    }

    /// An inode's row changes, and what its owners use with it. A row that was not read is none that counts: one that
    /// is made now, or to be destroyed.
    fn recharge(&mut self, key: &[u8], value: Option<&[u8]>) {
        let charge = |row: Option<&[u8]>| Charge::of_row(row?);
        let written = self.writes.iter().find(|(held, _)| **held == *key);
        let before = match written {
            Some((_, row)) => charge(row.as_deref()),
            None => charge(self.cache.get(key).and_then(|cached| cached.value.as_deref())),
        };
        let now = charge(value);
        if before == now {
            return;
        }
        for (charge, comes) in [(before, false), (now, true)] {
            let Some(charge) = charge else { continue };
            for subject in charge.subjects() {
                let (used, usage) = (self.used(subject), charge.usage());
                let used = if comes { used.plus(usage) } else { used.minus(usage) };
                self.used.retain(|(held, _)| *held != subject);
                self.used.push((subject, used));
            }
        }
    }

    fn set(&mut self, key: &[u8], value: Option<&[u8]>) {
        if key.first() == Some(&key::INODE) {
            self.recharge(key, value);
        }
        let value = value.map(Bytes::from);
        match self.writes.iter_mut().find(|(held, _)| **held == *key) {
            Some((_, held)) => *held = value,
            None => self.writes.push((key.into(), value)),
        }
    }

    pub fn put(&mut self, key: &[u8], value: &[u8]) {
        self.set(key, Some(value));
    }

    pub fn delete(&mut self, key: &[u8]) {
        self.set(key, None);
    }

    /// A directory has come into being, so all its names are known.
    pub fn made_directory(&mut self, ino: Ino) {
        self.made_directory = Some(ino);
    }

    /// Data of a file changes from now on: whoever else has it open is told before.
    pub fn begin_write(&mut self, ino: Ino) {
        self.begins = Some(ino);
    }

    /// The answer tells what a name in `directory` means, or that it is not there.
    pub fn tell_names(&mut self, directory: Ino) {
        self.told.names.push(directory);
    }

    /// The answer tells the attributes of an inode as they are after this transaction. Where another client writes they do
    /// not tell the size, and nobody trusts what has no name: it goes without a word.
    pub fn tell_node(&mut self, ino: Ino, inode: &Inode) {
        let sessions = self.sessions(ino);
        if inode.nlink == 0 || sessions.iter().any(|(client, _)| *client != self.client) {
            self.told.is_vague = true;
        } else {
            self.told.nodes.push(ino);
        }
    }

    pub fn effect(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// An inode's row, whatever state it is in.
    pub fn inode(&mut self, ino: Ino) -> Result<Option<Inode>, Stop> {
        let row = self.row(&key::inode(ino))?;
        Ok(row.map(|row| Inode::decode(&row)).transpose()?)
    }

    pub fn put_inode(&mut self, ino: Ino, inode: &Inode) {
        self.put(&key::inode(ino), &inode.encode());
    }

    /// An inode that has a name, or that is still open.
    pub fn live(&mut self, ino: Ino) -> Result<Inode, Stop> {
        let inode = self.inode(ino)?.ok_or(MetaFault::Stale)?;
        if inode.nlink == 0 && !self.is_orphan(ino) {
            return Err(MetaFault::Stale.into());
        }
        Ok(inode)
    }

    /// What is noted of an inode without a name that stays because it is held, with the changes of this
    /// transaction.
    pub fn orphan(&self, ino: Ino) -> Option<OrphanRow> {
        let changed = self.effects.iter().rev().find_map(|effect| match effect {
            Effect::Orphan(of, row) if *of == ino => Some(*row),
            _ => None,
        });
        changed.unwrap_or_else(|| self.table.orphans.get(&ino).copied())
    }

    pub fn is_orphan(&self, ino: Ino) -> bool {
        self.orphan(ino).is_some()
    }

    /// An inode has no name and stays, or that is over. Its row must be written too, as for a session.
    pub fn put_orphan(&mut self, ino: Ino, row: Option<OrphanRow>) {
        match row {
            Some(row) => self.put(&key::orphan(ino), row.encode()),
            None => self.delete(&key::orphan(ino)),
        }
        self.effect(Effect::Orphan(ino, row));
    }

    /// A directory that can hold names.
    pub fn directory(&mut self, ino: Ino) -> Result<Inode, Stop> {
        let inode = self.live(ino)?;
        if inode.kind() != Kind::Directory {
            return Err(MetaFault::NotDirectory.into());
        }
        if inode.nlink == 0 {
            return Err(MetaFault::NotFound.into());
        }
        Ok(inode)
    }

    pub fn name(&mut self, parent: Ino, name: &[u8]) -> Result<Option<NameRow>, Stop> {
        let row = self.row(&key::name(parent, name))?;
        Ok(row.map(|row| NameRow::decode(&row)).transpose()?)
    }

    /// Writes both rows of an entry.
    pub fn put_entry(&mut self, parent: Ino, name: &[u8], row: NameRow) {
        self.put(&key::name(parent, name), &row.encode());
        let entry = EntryRow::encode(row.ino, row.kind, name);
        self.put(&key::entry(parent, row.cookie), &entry);
    }

    /// Deletes both rows of an entry.
    pub fn delete_entry(&mut self, parent: Ino, name: &[u8], cookie: u64) {
        self.delete(&key::name(parent, name));
        self.delete(&key::entry(parent, cookie));
    }

    /// The sessions of an inode, with the changes of this transaction.
    pub fn sessions(&self, ino: Ino) -> SmallVec<[(u64, Session); 2]> {
        let mut sessions: SmallVec<[_; 2]> = self.table.sessions(ino).collect();
        for effect in &self.effects {
            if let Effect::Session(of, client, session) = *effect
                && of == ino
            {
                sessions.retain(|(held, _)| *held != client);
                sessions.extend(session.map(|session| (client, session)));
            }
        }
        sessions
    }

    /// The asking client's session.
    pub fn session(&self, ino: Ino) -> Option<Session> {
        let sessions = self.sessions(ino);
        sessions.iter().find(|(client, _)| *client == self.client).map(|(_, session)| *session)
    }

    /// Sets or ends a session. The inode's row must be written too: whoever reads a session has
    /// read that row, and waits for it.
    ///
    /// One that begins beside others makes a crowd of them all; where the last of a crowd ends, the objects are to be
    /// asked what they hold.
    pub fn put_session(&mut self, ino: Ino, client: u64, session: Option<Session>) {
        let crowd = session.is_some_and(|session| session.crowd);
        let session =
            session.filter(|held| Session { crowd: false, ..*held } != Session::default());
        let sessions = self.sessions(ino);
        let others = sessions.iter().filter(|(other, _)| *other != client);
        let others: SmallVec<[(u64, Session); 2]> = others.copied().collect();
        match session {
            Some(mut session) => {
                if !others.is_empty() && !session.crowd {
                    session.crowd = true;
                    for (other, held) in others.into_iter().filter(|(_, held)| !held.crowd) {
                        self.write_session(ino, other, Some(Session { crowd: true, ..held }));
                    }
                }
                self.write_session(ino, client, Some(session));
            }
            None => {
                let was = sessions.iter().find(|(held, _)| *held == client);
                let crowd = crowd || was.is_some_and(|(_, session)| session.crowd);
                self.write_session(ino, client, None);
                if crowd && others.is_empty() {
                    self.ask_objects(ino);
                }
            }
        }
    }

    /// Lets the housekeeper ask the objects what they hold.
    pub fn ask_objects(&mut self, ino: Ino) {
        let asked = Session { crowd: true, ..Session::default() };
        self.write_session(ino, NOBODY, Some(asked));
    }

    /// The session of a client that is gone ends: the objects were asked.
    pub fn end_settled(&mut self, ino: Ino, client: u64) {
        self.write_session(ino, client, None);
    }

    fn write_session(&mut self, ino: Ino, client: u64, session: Option<Session>) {
        let key = key::session(ino, client);
        match session {
            Some(session) => self.put(&key, &session.encode()),
            None => self.delete(&key),
        }
        self.effect(Effect::Session(ino, client, session));
    }

    /// What a client gets to see.
    pub fn attr(&self, ino: Ino, inode: &Inode) -> Box<Attr> {
        let sessions = self.sessions(ino);
        let cut = sessions.iter().any(|(_, session)| session.cut.is_some());
        let others =
            sessions.iter().any(|(client, session)| *client != self.client || session.shared);
        let mut attr = inode.attr(ino);
        attr.writers = !sessions.is_empty() && !cut;
        let mine = self.session(ino).is_some_and(|session| session.cut.is_some());
        attr.others = if cut { !mine } else { others };
        attr.cut = cut;
        Box::new(attr)
    }

    /// What the client that has just set the size gets to see: `writers` tells it that other
    /// clients have written, so that every object must be cut; `cut` that `Truncated` is waited for.
    pub fn attr_to_cut(&self, ino: Ino, inode: &Inode) -> Box<Attr> {
        let others = self.sessions(ino).iter().any(|(client, _)| *client != self.client);
        let cut = self.session(ino).is_some_and(|session| session.cut.is_some());
        Box::new(Attr { writers: others, others, cut, ..inode.attr(ino) })
    }

    /// `opens` of an inode, with the changes of this transaction.
    fn with_effects(&self, ino: Ino, opens: u64) -> u64 {
        self.effects.iter().fold(opens, |opens, effect| match effect {
            Effect::Opened(of) if *of == ino => opens + 1,
            Effect::Closed(of) if *of == ino => opens.saturating_sub(1),
            _ => opens,
        })
    }

    /// How often the asking client has it open.
    pub fn own_opens(&self, ino: Ino) -> u64 {
        self.with_effects(ino, self.table.opens_of(self.client, ino).into())
    }

    /// True when an inode without a name must stay.
    pub fn held(&self, ino: Ino) -> bool {
        let opens = self.with_effects(ino, self.table.opens(ino));
        let alive = |client: &u64| self.table.clients.contains_key(client);
        opens > 0
            || !self.table.awaited.is_empty()
            || self.table.implied.contains(&ino)
            || self.sessions(ino).iter().any(|(client, _)| alive(client))
    }

    /// The inode has just lost its last name, or its last holder: it becomes an orphan, or its
    /// objects are to be destroyed, or it goes at once.
    pub fn release(&mut self, ino: Ino, inode: &mut Inode) {
        debug_assert_eq!(inode.nlink, 0);
        let orphan = self.is_orphan(ino);
        if self.held(ino) {
            if !orphan {
                self.put_orphan(ino, Some(OrphanRow::default()));
            }
            self.put_inode(ino, inode);
            return;
        }
        if orphan {
            self.put_orphan(ino, None);
        }
        let sessions = self.sessions(ino);
        for (client, _) in &sessions {
            self.write_session(ino, *client, None);
        }
        // In one go: nothing else in this transaction is about these rows.
        let xattrs = std::mem::take(&mut inode.xattrs).into_iter();
        self.writes.extend(xattrs.map(|name| (key::xattr(ino, &name).as_slice().into(), None)));
        if inode.components == 0 && sessions.is_empty() {
            self.delete(&key::inode(ino));
            self.counters.inodes -= 1;
            return;
        }
        // A session may have left objects that nobody committed.
        inode.components = u64::MAX;
        // From now on its row on the list has them.
        let bytes = inode.stored.take().as_ref().map_or(0, StoredBytes::total);
        self.put(&key::destroy(ino), &DoomedRow { bytes }.encode());
        self.counters.doomed_inodes += 1;
        self.counters.doomed_bytes = self.counters.doomed_bytes.saturating_add(bytes);
        self.effect(Effect::Destroy);
        self.put_inode(ino, inode);
    }
}
