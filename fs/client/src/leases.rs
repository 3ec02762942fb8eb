//! What this client may trust without asking: names and attributes that the service has given a lease on.
//!
//! What always holds:
//! - A lease counts from before its request was sent, so it is over here before it is at the service. The content of one
//!   that is over is never handed out.
//! - A notice takes what it is about out of the table before it is acknowledged, and voids what was granted before and
//!   arrives after it.
//! - A change of this client's own takes out what it touches when it is sent, and voids what was asked before it ended: of those
//!   that were under way together it is not known which came first.
//!
//! docs/design/0012-locks-and-leases.md.

use crate::moment::Moment;
use futures_util::future::LocalBoxFuture;
use levada_base::ids::Ino;
use levada_base::meter::HitMeter;
use levada_base::planted;
use levada_base::reactor::{self, Instant};
use levada_wire::attr::Attr;
use levada_wire::frame::flags;
use levada_wire::meta::{LEASE_TERM, MetaFault, MetaReply, MetaRequest, NewInode, Notice};
use lru::LruCache;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::time::Duration;

/// Inodes whose attributes are kept, and names.
const NODES_MAX: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not zero");
const NAMES_MAX: usize = 1 << 16;
/// What a directory takes besides its names.
const DIRECTORY_ROOM: usize = 2;
/// Answers under way are told apart by so many marks: two items may share one, and lose a lease for it.
const MARKS: usize = 1 << 10;
/// A directory in which nobody was interested for so long is given up when another client changes it. Longer than the
/// kernel of a mount trusts any name.
const IDLE: Duration = Duration::from_secs(2);

/// Ends what others here trust of what a notice is about; `None`: nobody does.
pub type OnNotice = Rc<dyn Fn(&Notice) -> Option<LocalBoxFuture<'static, ()>>>;

/// Another client is about to write a file: what ends when nothing is left of what was cached of it.
pub type OnShared = Rc<dyn Fn(Ino) -> Option<LocalBoxFuture<'static, ()>>>;

/// See the module.
pub(crate) struct Leases {
    is_wanted: bool,
    table: RefCell<Table>,
    hasher: RandomState,
    pub(crate) on_notice: RefCell<Option<OnNotice>>,
    pub(crate) on_shared: RefCell<Option<OnShared>>,
    /// Names and attributes that programs asked for: known here, or asked of the service.
    pub(crate) asked: HitMeter,
}

struct Table {
    nodes: LruCache<Ino, Node>,
    directories: LruCache<Ino, Directory>,
    /// What the directories take.
    taken: usize,
    /// Counts notices, and the ends of own changes.
    turn: u64,
    /// The last turn that voids what was asked before: of leases, and of what they are about.
    void_leases: Box<[u64]>,
    void_content: Box<[u64]>,
    /// Everything asked before is void.
    void: u64,
    /// Own changes under way, by what they touch.
    changing: HashMap<u64, u32>,
}

struct Node {
    attr: Attr,
    asked: Moment,
}

struct Directory {
    asked: Moment,
    /// From when on nobody else has changed its names. `None`: somebody is about to.
    since: Option<Instant>,
    /// When somebody was interested last.
    used: Instant,
    /// What is known: `None` is not there.
    names: HashMap<Box<[u8]>, Option<Ino>>,
}

/// A question whose answer may bring leases.
#[derive(Clone, Copy)]
pub(crate) struct Asking {
    turn: u64,
    at: Moment,
}

/// A change of this client under way. Dropped without [`Changing::done`] it may or may not have happened.
pub(crate) struct Changing {
    leases: Rc<Leases>,
    keys: SmallVec<[u64; 4]>,
    /// It moves an inode, and which is not known.
    moves_any: bool,
    asking: Asking,
}

fn left_of(asked: Moment) -> Option<Duration> {
    LEASE_TERM.checked_sub(asked.age()).filter(|left| !left.is_zero())
}

impl Directory {
    fn room(&self) -> usize {
        DIRECTORY_ROOM + self.names.len()
    }
}

impl Table {
    fn new() -> Self {
        let marks = || vec![0; MARKS].into_boxed_slice();
        Self {
            nodes: LruCache::new(NODES_MAX),
            directories: LruCache::unbounded(),
            taken: 0,
            turn: 0,
            void_leases: marks(),
            void_content: marks(),
            void: 0,
            changing: HashMap::new(),
        }
    }

    fn forget_directory(&mut self, dir: Ino) {
        if let Some(gone) = self.directories.pop(&dir) {
            self.taken -= gone.room();
        }
    }

    fn forget_name(&mut self, dir: Ino, name: &[u8]) {
        if let Some(known) = self.directories.peek_mut(&dir)
            && known.names.remove(name).is_some()
        {
            self.taken -= 1;
        }
    }

    fn shrink(&mut self) {
        while self.taken > NAMES_MAX
            && let Some((_, gone)) = self.directories.pop_lru()
        {
            self.taken -= gone.room();
        }
    }

    fn is_void(&self, key: u64, asking: Asking) -> bool {
        let voided = self.void_leases[key as usize % MARKS].max(self.void);
        voided > asking.turn && !planted!("client-lease-after-notice")
    }

    /// Whether an answer says what is so, as far as this client's own changes go: with `own` the one that it answers.
    fn is_current(&self, key: u64, asking: Asking, own: bool) -> bool {
        let under_way = self.changing.get(&key).copied().unwrap_or(0);
        under_way <= u32::from(own) && self.void_content[key as usize % MARKS] <= asking.turn
    }
}

impl Leases {
    pub(crate) fn new(is_wanted: bool) -> Rc<Self> {
        let table = RefCell::new(Table::new());
        Rc::new(Self {
            is_wanted,
            table,
            hasher: RandomState::new(),
            on_notice: RefCell::default(),
            on_shared: RefCell::default(),
            asked: HitMeter::default(),
        })
    }

    /// The flags with which a request says that leases are welcome.
    pub(crate) fn flags(&self) -> u32 {
        if self.is_wanted { flags::NAMES } else { 0 }
    }

    fn node_key(&self, ino: Ino) -> u64 {
        self.hasher.hash_one((0_u8, ino.0))
    }

    fn names_key(&self, dir: Ino) -> u64 {
        self.hasher.hash_one((1_u8, dir.0))
    }

    fn name_key(&self, dir: Ino, name: &[u8]) -> u64 {
        self.hasher.hash_one((2_u8, dir.0, name))
    }

    fn data_key(&self, ino: Ino) -> u64 {
        self.hasher.hash_one((3_u8, ino.0))
    }

    /// Whether it was said, since then, that another client is about to write this file.
    pub(crate) fn is_shared_since(&self, ino: Ino, asking: Asking) -> bool {
        self.table.borrow().is_void(self.data_key(ino), asking)
    }

    /// Something is about to be asked.
    pub(crate) fn ask(&self) -> Asking {
        Asking { turn: self.table.borrow().turn, at: Moment::now() }
    }

    /// The answer to a question that changes nothing, with these flags.
    pub(crate) fn told(
        &self,
        request: &MetaRequest,
        reply: &MetaReply,
        granted: u32,
        asking: Asking,
    ) {
        if granted & flags::LEASES == 0 {
            return;
        }
        match (request, reply) {
            (MetaRequest::Lookup { parent, name }, MetaReply::Attr(attr)) => {
                self.keep_node(attr, granted, asking, false);
                self.keep_name((*parent, name), Some(attr.ino), granted, asking, false);
            }
            (MetaRequest::Lookup { parent, name }, MetaReply::Failed(MetaFault::NotFound)) => {
                self.keep_name((*parent, name), None, granted, asking, false);
            }
            (MetaRequest::GetAttr { .. } | MetaRequest::Open { .. }, MetaReply::Attr(attr)) => {
                self.keep_node(attr, granted, asking, false);
            }
            (MetaRequest::ReadDir { ino, .. }, MetaReply::Entries { entries, .. }) => {
                for entry in entries {
                    // Only with attributes: else it is of no use to whoever looks a name up.
                    let Some(attr) = &entry.attr else { continue };
                    self.keep_name((*ino, &entry.name), Some(entry.ino), granted, asking, false);
                    if !attr.writers {
                        self.keep_node(attr, granted, asking, false);
                    }
                }
            }
            _ => {}
        }
    }

    fn keep_node(&self, attr: &Attr, granted: u32, asking: Asking, own: bool) {
        let key = self.node_key(attr.ino);
        let mut table = self.table.borrow_mut();
        let is_leased =
            granted & (flags::NODE | flags::DIRECTORY) != 0 && !table.is_void(key, asking);
        if is_leased && !attr.cut && table.is_current(key, asking, own) {
            let asked = at_of(asking);
            table.nodes.put(attr.ino, Node { attr: attr.clone(), asked });
        }
    }

    /// With the lease on all names of the directory.
    fn keep_name(
        &self,
        (dir, name): (Ino, &[u8]),
        meaning: Option<Ino>,
        granted: u32,
        asking: Asking,
        own: bool,
    ) {
        // Later than whatever was concluded without a lease.
        let since = reactor::now() + Duration::from_nanos(1);
        if granted & flags::NAMES == 0 || !self.keep_directory(dir, asking, since) {
            return;
        }
        let key = self.name_key(dir, name);
        let mut table = self.table.borrow_mut();
        if !table.is_current(key, asking, own) {
            return;
        }
        if let Some(known) = table.directories.peek_mut(&dir)
            && known.names.insert(name.into(), meaning).is_none()
        {
            table.taken += 1;
            table.shrink();
        }
    }

    /// False: a notice has voided the lease.
    fn keep_directory(&self, dir: Ino, asking: Asking, since: Instant) -> bool {
        let key = self.names_key(dir);
        let mut table = self.table.borrow_mut();
        if table.is_void(key, asking) {
            return false;
        }
        let (asked, used) = (at_of(asking), reactor::now());
        if let Some(known) = table.directories.get_mut(&dir)
            && left_of(known.asked).is_some()
        {
            if asked.age() < known.asked.age() {
                known.asked = asked;
            }
            // What was announced is done: nothing is granted before.
            known.since.get_or_insert(since);
            known.used = used;
            return true;
        }
        table.forget_directory(dir);
        let names = HashMap::new();
        table.directories.put(dir, Directory { asked, since: Some(since), used, names });
        table.taken += DIRECTORY_ROOM;
        table.shrink();
        true
    }

    /// The attributes of an inode, as the service would tell them now.
    pub(crate) fn node(&self, ino: Ino) -> Option<Attr> {
        let mut table = self.table.borrow_mut();
        let known = table.nodes.get(&ino)?;
        left_of(known.asked).map(|_| known.attr.clone())
    }

    /// What a name means; `Some(None)`: it is not there.
    pub(crate) fn name(&self, dir: Ino, name: &[u8]) -> Option<Option<Ino>> {
        let mut table = self.table.borrow_mut();
        let known = table.directories.get_mut(&dir)?;
        left_of(known.asked)?;
        known.used = reactor::now();
        known.names.get(name).copied()
    }

    /// How long these attributes may be trusted.
    pub(crate) fn node_valid(&self, attr: &Attr) -> Duration {
        let table = self.table.borrow();
        let known = table.nodes.peek(&attr.ino).filter(|known| known.attr.change == attr.change);
        known.and_then(|known| left_of(known.asked)).unwrap_or_default()
    }

    /// How long it may be trusted that `name` means this.
    pub(crate) fn name_valid(&self, dir: Ino, name: &[u8], ino: Ino) -> Duration {
        let mut table = self.table.borrow_mut();
        let Some(known) = table.directories.peek_mut(&dir) else { return Duration::ZERO };
        known.used = reactor::now();
        let is_known = known.names.get(name) == Some(&Some(ino));
        left_of(known.asked).filter(|_| is_known).unwrap_or_default()
    }

    /// Since when nobody else has changed the names of a directory, and cannot yet.
    pub(crate) fn unchanged_since(&self, dir: Ino) -> Option<Instant> {
        let table = self.table.borrow();
        let known = table.directories.peek(&dir)?;
        left_of(known.asked).and(known.since)
    }

    /// A notice came; whether the lease goes on, but for what it says.
    pub(crate) fn heard(&self, notice: &Notice) -> bool {
        let mut table = self.table.borrow_mut();
        table.turn += 1;
        let turn = table.turn;
        match notice {
            Notice::Names { dir, name } => {
                table.void_leases[self.names_key(*dir) as usize % MARKS] = turn;
                table.forget_name(*dir, name);
                let known = table.directories.peek_mut(dir);
                let keeps = known.is_some_and(|known| {
                    known.since = None;
                    known.used.elapsed() < IDLE && left_of(known.asked).is_some()
                });
                if !keeps {
                    table.forget_directory(*dir);
                }
                keeps
            }
            Notice::Node { ino } => {
                table.void_leases[self.node_key(*ino) as usize % MARKS] = turn;
                table.nodes.pop(ino);
                false
            }
            Notice::Shared { ino } => {
                table.void_leases[self.data_key(*ino) as usize % MARKS] = turn;
                false
            }
            Notice::Granted { .. } | Notice::Refused { .. } => false,
        }
    }

    /// Whether any lease may last.
    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// Nothing is trusted any more, nor what is under way: another life of the service, or another number of this client.
    pub(crate) fn forget_all(&self) {
        let mut table = self.table.borrow_mut();
        table.turn += 1;
        table.void = table.turn;
        table.nodes.clear();
        table.directories.clear();
        table.taken = 0;
    }

    /// A change of this client's own begins.
    pub(crate) fn begin(self: &Rc<Self>, request: &MetaRequest) -> Option<Changing> {
        if !self.is_wanted {
            return None;
        }
        let mut keys = SmallVec::new();
        let moves_any = self.touch(request, &mut keys);
        let mut table = self.table.borrow_mut();
        for key in &keys {
            *table.changing.entry(*key).or_default() += 1;
        }
        drop(table);
        Some(Changing { leases: Rc::clone(self), keys, moves_any, asking: self.ask() })
    }

    /// Takes out what a request changes; true: it changes an inode, and which is not known.
    fn touch(&self, request: &MetaRequest, keys: &mut SmallVec<[u64; 4]>) -> bool {
        use MetaRequest as R;
        let mut moves_any = false;
        match request {
            R::Create { parent, name, .. }
            | R::Unlink { parent, name, .. }
            | R::RemoveDir { parent, name, .. } => self.touch_name(*parent, name, keys),
            R::Link { ino, parent, name, .. } => {
                self.touch_node(*ino, keys);
                self.touch_name(*parent, name, keys);
            }
            R::Rename { from, from_name, to, to_name, .. } => {
                for (dir, name) in [(*from, from_name), (*to, to_name)] {
                    match self.name(dir, name) {
                        Some(Some(ino)) => self.touch_node(ino, keys),
                        Some(None) => {}
                        None => moves_any = true,
                    }
                    self.touch_name(dir, name, keys);
                }
            }
            R::SetAttr { ino, .. }
            | R::SetXattr { ino, .. }
            | R::RemoveXattr { ino, .. }
            | R::BeginWrite { ino }
            | R::CommitWrite { ino, .. }
            | R::Truncated { ino, .. }
            | R::Destroyed { ino }
            | R::Settled { ino, .. } => self.touch_node(*ino, keys),
            R::Open { ino, mode } if mode.truncate => self.touch_node(*ino, keys),
            R::Several { requests } => {
                requests.iter().for_each(|one| moves_any |= self.touch(one, keys));
            }
            // The last close of an inode without a name; that of none is kept.
            R::Open { .. } | R::Close { .. } => {}
            R::CreateUnnamed { .. }
            | R::Lock { .. }
            | R::Unlock { .. }
            | R::CancelWait { .. }
            | R::Register { .. }
            | R::Replay { .. }
            | R::Reclaim { .. }
            | R::Lookup { .. }
            | R::GetAttr { .. }
            | R::ReadLink { .. }
            | R::ReadDir { .. }
            | R::Sync
            | R::Space
            | R::SpaceNow
            | R::Allowance { .. }
            | R::Grant { .. }
            | R::Chores { .. }
            | R::Leave
            | R::Bury { .. }
            | R::GetXattr { .. }
            | R::ListXattrs { .. }
            | R::TestLock { .. } => {}
        }
        if moves_any {
            self.table.borrow_mut().nodes.clear();
        }
        moves_any
    }

    fn touch_node(&self, ino: Ino, keys: &mut SmallVec<[u64; 4]>) {
        self.table.borrow_mut().nodes.pop(&ino);
        keys.push(self.node_key(ino));
    }

    /// Names change with the attributes of their directory.
    fn touch_name(&self, dir: Ino, name: &[u8], keys: &mut SmallVec<[u64; 4]>) {
        self.table.borrow_mut().forget_name(dir, name);
        keys.push(self.name_key(dir, name));
        self.touch_node(dir, keys);
    }
}

fn at_of(asking: Asking) -> Moment {
    if planted!("client-term-from-answer") { Moment::now() } else { asking.at }
}

impl Changing {
    /// It was answered, with these flags.
    pub(crate) fn done(self, request: &MetaRequest, reply: &MetaReply, granted: u32) {
        match (request, reply) {
            (MetaRequest::Several { requests }, MetaReply::Several(replies)) => {
                for (request, reply) in requests.iter().zip(replies) {
                    self.take_in(request, reply, granted);
                }
            }
            _ => self.take_in(request, reply, granted),
        }
    }

    fn take_in(&self, request: &MetaRequest, reply: &MetaReply, granted: u32) {
        let (leases, asking) = (&self.leases, self.asking);
        // An open changes nothing, and which inode a name turns out to mean was not known: then another change of that
        // inode that is under way is none of its own.
        let own = |ino: Ino| self.keys.contains(&leases.node_key(ino));
        match (request, reply) {
            // It has one name less, or none.
            (
                _,
                MetaReply::Removed { ino: Some(ino), .. }
                | MetaReply::RemovedFrom { ino: Some(ino), .. },
            ) => {
                let mut table = leases.table.borrow_mut();
                table.nodes.pop(ino);
                table.turn += 1;
                let turn = table.turn;
                table.void_content[leases.node_key(*ino) as usize % MARKS] = turn;
            }
            (
                MetaRequest::Create { parent, name, new, .. },
                MetaReply::Entry(attr, _) | MetaReply::Made { attr, .. },
            ) => {
                // The session that it is made with is told of to whoever asks.
                let made = matches!(reply, MetaReply::Entry(_, true) | MetaReply::Made { .. });
                let writes = matches!(new, NewInode::File { open: Some(open) } if open.write);
                let attr = Attr { writers: attr.writers || made && writes, ..(**attr).clone() };
                leases.keep_node(&attr, granted & flags::NODE, asking, own(attr.ino));
                leases.keep_name((*parent, name), Some(attr.ino), granted, asking, true);
                if *new == NewInode::Directory && granted & flags::NAMES != 0 {
                    leases.keep_directory(attr.ino, asking, asking.at.monotonic());
                }
            }
            (
                MetaRequest::Link { parent, name, .. },
                MetaReply::Attr(attr) | MetaReply::Made { attr, .. },
            ) => {
                leases.keep_node(attr, granted & flags::NODE, asking, own(attr.ino));
                leases.keep_name((*parent, name), Some(attr.ino), granted, asking, true);
            }
            (
                MetaRequest::SetAttr { .. }
                | MetaRequest::Open { .. }
                | MetaRequest::CommitWrite { end: true, .. },
                MetaReply::Attr(attr),
            ) => {
                leases.keep_node(attr, granted, asking, own(attr.ino));
            }
            _ => {}
        }
        if let MetaReply::Made { directory, .. } | MetaReply::RemovedFrom { directory, .. } = reply
        {
            let is_own = own(directory.ino);
            leases.keep_node(directory, granted & flags::DIRECTORY, asking, is_own);
        }
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        let mut table = self.leases.table.borrow_mut();
        table.turn += 1;
        let turn = table.turn;
        if self.moves_any {
            table.nodes.clear();
            table.void = turn;
        }
        for key in &self.keys {
            table.void_content[*key as usize % MARKS] = turn;
            if let Some(count) = table.changing.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    table.changing.remove(key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use levada_wire::attr::Time;
    use levada_wire::meta::OpenMode;

    const DIR: Ino = Ino(5);
    const FILE: Ino = Ino(7);
    const ALL: u32 = flags::NAMES | flags::NODE;

    fn attr(change: u64) -> Attr {
        let time = Time(0);
        Attr {
            ino: FILE,
            generation: 1,
            kind: levada_wire::attr::Kind::File,
            mode: 0o100_644,
            uid: 0,
            gid: 0,
            nlink: 1,
            size: 0,
            writers: false,
            others: false,
            cut: false,
            rdev: 0,
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
            change,
            parent: DIR,
            project: 0,
            tenant: 0,
            extended: false,
            layout: None,
            components: 0,
        }
    }

    fn lookup(name: &str) -> MetaRequest {
        MetaRequest::Lookup { parent: DIR, name: name.into() }
    }

    fn found(leases: &Leases, name: &str, change: u64, asking: Asking) {
        leases.told(&lookup(name), &MetaReply::Attr(Box::new(attr(change))), ALL, asking);
    }

    fn missed(leases: &Leases, name: &str) {
        let absent = MetaReply::Failed(MetaFault::NotFound);
        leases.told(&lookup(name), &absent, ALL, leases.ask());
    }

    fn changes() -> [Notice; 2] {
        [Notice::Names { dir: DIR, name: b"a".to_vec() }, Notice::Node { ino: FILE }]
    }

    #[test]
    fn what_was_granted_is_trusted_for_its_term() {
        Reactor::simulated(1).block_on(async {
            let leases = Leases::new(true);
            let asking = leases.ask();
            reactor::sleep(Duration::from_secs(4)).await;
            found(&leases, "a", 1, asking);
            missed(&leases, "b");
            assert_eq!(
                (leases.name(DIR, b"a"), leases.name(DIR, b"b")),
                (Some(Some(FILE)), Some(None))
            );
            assert_eq!((leases.name(DIR, b"c"), leases.name(Ino(6), b"a")), (None, None));
            assert_eq!(leases.node(FILE), Some(attr(1)));
            assert_eq!(leases.node_valid(&attr(1)), Duration::from_secs(6));
            assert_eq!(leases.node_valid(&attr(2)), Duration::ZERO, "another one than is known");
            assert_eq!(leases.name_valid(DIR, b"a", FILE), Duration::from_secs(10), "renewed");
            assert_eq!(leases.name_valid(DIR, b"a", Ino(8)), Duration::ZERO);
            reactor::sleep(Duration::from_secs(6)).await;
            assert_eq!(leases.node(FILE), None);
            assert_eq!(leases.name(DIR, b"a"), Some(Some(FILE)));
            reactor::sleep(Duration::from_secs(4)).await;
            assert_eq!((leases.name(DIR, b"a"), leases.unchanged_since(DIR)), (None, None));
        });
    }

    /// Also hunts the bug of that name: in the network it takes an answer that waits just as long as a notice takes.
    #[test]
    fn what_a_notice_overtook_is_not_trusted() {
        Reactor::simulated(1).block_on(async {
            let trusted = || {
                let leases = Leases::new(true);
                let asking = leases.ask();
                for notice in changes() {
                    leases.heard(&notice);
                }
                found(&leases, "a", 1, asking);
                leases.name(DIR, b"a").is_some() || leases.node(FILE).is_some()
            };
            assert!(!trusted());
            planted::choose(Some("client-lease-after-notice"));
            let is_found = trusted();
            planted::choose(None);
            assert!(is_found);
        });
    }

    #[test]
    fn a_notice_takes_only_what_it_is_about() {
        Reactor::simulated(1).block_on(async {
            let leases = Leases::new(true);
            found(&leases, "a", 1, leases.ask());
            missed(&leases, "b");
            let since = leases.unchanged_since(DIR);
            assert!(since.is_some());
            let [names, node] = changes();
            assert!(leases.heard(&names), "somebody was interested just now");
            assert_eq!((leases.name(DIR, b"a"), leases.name(DIR, b"b")), (None, Some(None)));
            assert_eq!(leases.unchanged_since(DIR), None);
            assert!(
                leases.node(FILE).is_some() && !leases.heard(&node) && leases.node(FILE).is_none()
            );
            // The next grant comes after that change.
            found(&leases, "a", 2, leases.ask());
            assert!(leases.unchanged_since(DIR) >= since);
            reactor::sleep(IDLE).await;
            assert!(!leases.heard(&names), "nobody is");
            assert_eq!(leases.name(DIR, b"b"), None);
            leases.forget_all();
            assert_eq!(leases.node(FILE), None);
        });
    }

    #[test]
    fn own_changes_void_what_was_under_way_with_them() {
        Reactor::simulated(1).block_on(async {
            let leases = Leases::new(true);
            let caller = levada_wire::meta::Caller { uid: 0, gid: 0 };
            let change = levada_wire::meta::AttrChange::default();
            let set = MetaRequest::SetAttr { caller, ino: FILE, change };
            found(&leases, "a", 1, leases.ask());
            let before = leases.ask();
            let changing = leases.begin(&set).expect("wanted");
            assert_eq!(leases.node(FILE), None);
            found(&leases, "a", 1, leases.ask());
            assert_eq!(leases.node(FILE), None, "from before it, or after");
            changing.done(&set, &MetaReply::Attr(Box::new(attr(2))), ALL);
            assert_eq!(leases.node(FILE), Some(attr(2)));
            found(&leases, "a", 1, before);
            assert_eq!(leases.node(FILE), Some(attr(2)), "asked before it");
            // Two at once: which came first is not known.
            let (one, two) =
                (leases.begin(&set).expect("wanted"), leases.begin(&set).expect("wanted"));
            one.done(&set, &MetaReply::Attr(Box::new(attr(4))), ALL);
            two.done(&set, &MetaReply::Attr(Box::new(attr(3))), ALL);
            assert_eq!(leases.node(FILE), None);
            // What is moved is known by its name, or everything may be.
            for is_known in [true, false] {
                leases.forget_all();
                let asking = leases.ask();
                found(&leases, if is_known { "a" } else { "link" }, 5, asking);
                let (from_name, to_name) = (b"a".to_vec(), b"b".to_vec());
                let (from, to) = (DIR, DIR);
                let rename = MetaRequest::Rename { caller, from, from_name, to, to_name, flags: 0 };
                drop(leases.begin(&rename));
                assert_eq!(leases.node(FILE), None);
                found(&leases, "b", 5, asking);
                assert_eq!(leases.node(FILE), None);
            }
            assert!(leases.table.borrow().changing.is_empty());
        });
    }

    /// The size would be taken from before what is written from then on.
    #[test]
    fn what_an_open_said_is_not_kept_beside_the_beginning_of_a_write() {
        Reactor::simulated(1).block_on(async {
            let leases = Leases::new(true);
            let mode = OpenMode { write: true, truncate: false };
            let (open, begin) =
                (MetaRequest::Open { ino: FILE, mode }, MetaRequest::BeginWrite { ino: FILE });
            let reply = MetaReply::Attr(Box::new(attr(3)));
            let (opening, beginning) = (leases.begin(&open), leases.begin(&begin));
            opening.expect("leases are wanted").done(&open, &reply, ALL);
            assert_eq!(leases.node(FILE), None);
            beginning.expect("leases are wanted").done(&begin, &reply, ALL);
            assert_eq!(leases.node(FILE), None);
            leases.begin(&open).expect("leases are wanted").done(&open, &reply, ALL);
            assert!(leases.node(FILE).is_some());
        });
    }
}
