//! The model: a tree in memory, one request at a time.

use super::acl;
use levada_base::ids::Ino;
use levada_wire::attr::{Attr, Kind};
use levada_wire::meta::{Caller, MetaFault, MetaReply, MetaRequest, NewInode, NewMode, OpenMode};
use levada_wire::xattr::{ACCESS_ACL, CAPABILITY, DEFAULT_ACL};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
pub struct Node {
    pub kind: Kind,
    pub mode: u32,
    pub nlink: u32,
    /// It has had no name yet, and `Link` gives it one.
    pub may_get_name: bool,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub parent: u64,
    pub components: u64,
    /// Bytes by component, as far as the service can know.
    pub stored: BTreeMap<u32, u64>,
    pub names: BTreeMap<Vec<u8>, u64>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub access: Option<List>,
    pub default: Option<List>,
}

/// Permissions as [`acl`] takes them.
pub type List = Vec<u8>;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Session {
    pub writing: bool,
    pub cut: Option<u64>,
    pub overtaken: bool,
    pub crowd: bool,
}

/// What of a reply can be told beforehand.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Attr(View),
    Entry(View, bool),
    Removed(Option<u64>, u32),
    Done,
    Link(Vec<u8>),
    Xattr(Vec<u8>),
    Fault(MetaFault),
    Several(Vec<Outcome>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct View {
    ino: u64,
    kind: Kind,
    mode: u32,
    nlink: u32,
    size: u64,
    components: u64,
    writers: bool,
    cut: bool,
    extended: bool,
    /// Directories only.
    parent: u64,
}

#[derive(Clone)]
pub struct Model {
    pub nodes: BTreeMap<u64, Node>,
    pub next_ino: u64,
    pub opens: BTreeMap<(u64, u64), u32>,
    pub sessions: BTreeMap<(u64, u64), Session>,
    pub destroy: BTreeSet<u64>,
    pub implied: BTreeSet<Ino>,
}

type Result<T> = std::result::Result<T, MetaFault>;

impl Outcome {
    pub fn of(reply: &MetaReply) -> Self {
        let view = |attr: &Attr| View {
            ino: attr.ino.0,
            kind: attr.kind,
            mode: attr.mode & 0o7777,
            nlink: attr.nlink,
            size: attr.size,
            components: attr.components,
            writers: attr.writers,
            cut: attr.cut,
            extended: attr.extended,
            parent: if attr.kind == Kind::Directory { attr.parent.0 } else { 0 },
        };
        match reply {
            MetaReply::Attr(attr) => Self::Attr(view(attr)),
            MetaReply::Entry(attr, made) => Self::Entry(view(attr), *made),
            MetaReply::Removed { ino, nlink } => Self::Removed(ino.map(|ino| ino.0), *nlink),
            MetaReply::Done => Self::Done,
            MetaReply::Link(target) => Self::Link(target.clone()),
            MetaReply::Xattr(bytes) => Self::Xattr(bytes.clone()),
            MetaReply::Failed(fault) => Self::Fault(*fault),
            MetaReply::Several(replies) => Self::Several(replies.iter().map(Self::of).collect()),
            other => panic!("{other:?}"),
        }
    }
}

/// Where the permissions of owner, group and others are in a list.
fn classes(list: &[u8]) -> [usize; 3] {
    if list.len() == 3 { [0, 1, 2] } else { [0, 3, 4] }
}

fn mode_of(list: &[u8]) -> u32 {
    let [owner, group, others] = classes(list).map(|at| u32::from(list[at]));
    owner * 0o100 + group * 0o10 + others
}

fn set_mode(list: &mut List, mode: u32) {
    let digits = [mode / 0o100 % 8, mode / 0o10 % 8, mode % 8];
    for (at, digit) in classes(list).into_iter().zip(digits) {
        list[at] = digit as u8;
    }
}

fn file(open: OpenMode) -> NewInode {
    NewInode::File { open: Some(open) }
}

impl Node {
    fn take_access(&mut self, list: List) {
        self.mode = mode_of(&list);
        self.access = Some(list).filter(|list| list.len() > 3);
    }
}

impl Model {
    pub fn new() -> Self {
        let root = Node {
            kind: Kind::Directory,
            mode: 0o755,
            nlink: 2,
            may_get_name: false,
            uid: 0,
            gid: 0,
            size: 0,
            parent: 1,
            components: 0,
            stored: BTreeMap::new(),
            names: BTreeMap::new(),
            xattrs: BTreeMap::new(),
            access: None,
            default: None,
        };
        Self {
            nodes: BTreeMap::from([(1, root)]),
            next_ino: 2,
            opens: BTreeMap::new(),
            sessions: BTreeMap::new(),
            destroy: BTreeSet::new(),
            implied: BTreeSet::new(),
        }
    }

    pub fn apply(&mut self, client: u64, request: &MetaRequest) -> Outcome {
        self.run(client, request).unwrap_or_else(Outcome::Fault)
    }

    pub fn view(&self, ino: u64) -> View {
        let node = &self.nodes[&ino];
        let sessions = self.sessions_of(ino);
        let cut = sessions.iter().any(|(_, session)| session.cut.is_some());
        View {
            ino,
            kind: node.kind,
            mode: node.mode,
            nlink: node.nlink,
            size: if node.kind == Kind::Directory { node.names.len() as u64 } else { node.size },
            components: node.components,
            writers: !cut && !sessions.is_empty(),
            cut,
            extended: !self.xattrs(ino).is_empty(),
            parent: if node.kind == Kind::Directory { node.parent } else { 0 },
        }
    }

    /// All attributes in order, access control lists last.
    pub fn xattrs(&self, ino: u64) -> Vec<(Vec<u8>, Vec<u8>)> {
        let node = &self.nodes[&ino];
        let lists = [(ACCESS_ACL, &node.access), (DEFAULT_ACL, &node.default)];
        let lists = lists.into_iter().filter_map(|(name, list)| Some((name, list.as_deref()?)));
        let lists = lists.map(|(name, list)| (name.to_vec(), acl(list)));
        node.xattrs.clone().into_iter().chain(lists).collect()
    }

    pub fn xattr_names(&self, ino: u64) -> Outcome {
        let names = self.xattrs(ino).into_iter();
        Outcome::Xattr(names.flat_map(|(name, _)| name.into_iter().chain([0])).collect())
    }

    fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>> {
        let found = self.xattrs(ino).into_iter().find(|(held, _)| held == name);
        found.map(|(_, value)| value).ok_or(MetaFault::NoAttribute)
    }

    fn sessions_of(&self, ino: u64) -> Vec<(u64, Session)> {
        let range = self.sessions.range((ino, 0)..=(ino, u64::MAX));
        range.map(|((_, client), session)| (*client, *session)).collect()
    }

    fn live(&self, ino: Ino) -> Result<&Node> {
        let node = self.nodes.get(&ino.0).filter(|_| !self.destroy.contains(&ino.0));
        node.ok_or(MetaFault::Stale)
    }

    fn directory(&self, ino: Ino) -> Result<&Node> {
        let node = self.live(ino)?;
        match (node.kind, node.nlink) {
            (Kind::Directory, 0) => Err(MetaFault::NotFound),
            (Kind::Directory, _) => Ok(node),
            _ => Err(MetaFault::NotDirectory),
        }
    }

    fn file(&self, ino: Ino) -> Result<()> {
        match self.live(ino)?.kind {
            Kind::File => Ok(()),
            Kind::Directory => Err(MetaFault::IsDirectory),
            _ => Err(MetaFault::Invalid),
        }
    }

    fn named(&self, parent: Ino, name: &[u8]) -> Result<Option<u64>> {
        Ok(self.directory(parent)?.names.get(name).copied())
    }

    fn node(&mut self, ino: u64) -> &mut Node {
        self.nodes.get_mut(&ino).expect("there")
    }

    fn held(&self, ino: u64) -> bool {
        self.opens.keys().any(|(_, of)| *of == ino)
            || self.sessions_of(ino).iter().any(|(client, _)| *client != 0)
            || self.implied.contains(&Ino(ino))
    }

    /// Takes away what has no name and no holder.
    pub fn reap(&mut self, ino: u64) {
        let Some(node) = self.nodes.get(&ino) else { return };
        if node.nlink > 0 || self.held(ino) || self.destroy.contains(&ino) {
            return;
        }
        let untouched = node.components == 0 && self.sessions_of(ino).is_empty();
        self.sessions.remove(&(ino, 0));
        if untouched {
            self.nodes.remove(&ino);
        } else {
            self.node(ino).components = u64::MAX;
            self.destroy.insert(ino);
        }
    }

    /// What users and groups use: inodes and bytes.
    pub fn usage(&self) -> BTreeMap<(char, u32), (u64, u64)> {
        let mut used: BTreeMap<(char, u32), (u64, u64)> = BTreeMap::new();
        for node in self.nodes.iter().filter(|(ino, _)| !self.destroy.contains(ino)).map(|(_, n)| n)
        {
            for subject in [('u', node.uid), ('g', node.gid)] {
                let sum = used.entry(subject).or_default();
                *sum = (sum.0 + 1, sum.1 + node.stored.values().sum::<u64>());
            }
        }
        used
    }

    /// What the objects of files to be destroyed hold.
    pub fn doomed_bytes(&self) -> u64 {
        self.destroy.iter().map(|ino| self.nodes[ino].stored.values().sum::<u64>()).sum()
    }

    /// One open less, if there is one.
    pub fn close(&mut self, client: u64, ino: Ino) {
        if let Some(count) = self.opens.get_mut(&(client, ino.0)) {
            *count -= 1;
            if *count == 0 {
                self.opens.remove(&(client, ino.0));
            }
        }
    }

    /// What was done before a restart opens and closes files for a client that had not heard of it.
    pub fn count_again(&mut self, client: u64, request: &MetaRequest, outcome: &Outcome) {
        match (request, outcome) {
            (MetaRequest::Several { requests }, _) => {
                requests.iter().for_each(|request| self.count_again(client, request, outcome));
            }
            (MetaRequest::Close { ino }, _) => self.close(client, *ino),
            (MetaRequest::Open { .. }, Outcome::Attr(view))
            | (
                MetaRequest::Create { new: NewInode::File { open: Some(_) }, .. }
                | MetaRequest::CreateUnnamed { .. },
                Outcome::Entry(view, _),
            ) => *self.opens.entry((client, view.ino)).or_default() += 1,
            _ => {}
        }
    }

    fn lose(&mut self, ino: u64) -> u32 {
        let node = self.node(ino);
        node.nlink = if node.kind == Kind::Directory { 0 } else { node.nlink - 1 };
        let left = node.nlink;
        self.reap(ino);
        left
    }

    fn own_subtree(&self, moved: u64, to: u64) -> bool {
        let mut at = to;
        loop {
            if at == moved {
                return true;
            }
            if at == 1 {
                return false;
            }
            at = self.nodes[&at].parent;
        }
    }

    fn set_size(&mut self, client: u64, ino: u64, size: u64) -> Result<()> {
        self.refuse_foreign_cut(client, ino)?;
        let sessions = self.sessions_of(ino);
        let mine = self.sessions.get(&(ino, client)).copied().unwrap_or_default();
        if mine.cut.is_some_and(|cut| size > cut) {
            return Err(MetaFault::Unavailable);
        }
        let node = self.node(ino);
        let untouched = node.components == 0 && sessions.is_empty();
        let grows = sessions.is_empty() && size >= node.size;
        node.size = size;
        node.xattrs.remove(CAPABILITY);
        if !untouched && !grows {
            for ((of, other), session) in &mut self.sessions {
                session.overtaken |= *of == ino && *other != client;
            }
            self.end_session(ino, client, Session { cut: Some(size), ..mine });
        }
        Ok(())
    }

    fn refuse_foreign_cut(&self, client: u64, ino: u64) -> Result<()> {
        let sessions = self.sessions_of(ino);
        if sessions.iter().any(|(of, session)| *of != client && session.cut.is_some()) {
            return Err(MetaFault::Unavailable);
        }
        Ok(())
    }

    fn view_to_cut(&self, client: u64, ino: u64) -> View {
        let writers = self.sessions_of(ino).iter().any(|(of, _)| *of != client);
        let cut = self.sessions.get(&(ino, client)).is_some_and(|mine| mine.cut.is_some());
        View { writers, cut, ..self.view(ino) }
    }

    fn open(&mut self, client: u64, ino: Ino, mode: OpenMode) -> Result<View> {
        let kind = self.live(ino)?.kind;
        if kind == Kind::Directory && (mode.write || mode.truncate) {
            return Err(MetaFault::IsDirectory);
        }
        let cut = mode.truncate && kind == Kind::File;
        if cut {
            self.set_size(client, ino.0, 0)?;
        }
        *self.opens.entry((client, ino.0)).or_default() += 1;
        Ok(if cut { self.view_to_cut(client, ino.0) } else { self.view(ino.0) })
    }

    /// Sets or ends a session; several at once are a crowd.
    fn end_session(&mut self, ino: u64, client: u64, session: Session) {
        let before = self.sessions.remove(&(ino, client));
        let is_alone = self.sessions_of(ino).is_empty();
        if (Session { crowd: false, ..session }) == Session::default() {
            let was_crowd = session.crowd || before.is_some_and(|before| before.crowd);
            if is_alone && was_crowd {
                self.ask_objects(ino);
            }
            return;
        }
        self.sessions.insert((ino, client), session);
        if !is_alone {
            let all = self.sessions.range_mut((ino, 0)..=(ino, u64::MAX));
            all.for_each(|(_, session)| session.crowd = true);
        }
    }

    fn ask_objects(&mut self, ino: u64) {
        self.sessions.insert((ino, 0), Session { crowd: true, ..Session::default() });
    }

    fn take_stored(&mut self, ino: u64, held: Option<Session>, told: &[(u32, u64)]) {
        let is_alone = held.is_some_and(|held| !held.crowd);
        for (component, bytes) in told {
            let stored = self.node(ino).stored.entry(*component).or_default();
            *stored = if is_alone { *bytes } else { (*stored).max(*bytes) };
        }
        if held.is_none() && !told.is_empty() {
            self.ask_objects(ino);
        }
    }

    fn run(&mut self, client: u64, request: &MetaRequest) -> Result<Outcome> {
        use MetaRequest as R;
        match request {
            R::GetAttr { ino } => {
                self.live(*ino)?;
                Ok(Outcome::Attr(self.view(ino.0)))
            }
            R::Lookup { parent, name } => {
                let ino = self.named(*parent, name)?.ok_or(MetaFault::NotFound)?;
                Ok(Outcome::Attr(self.view(ino)))
            }
            R::SetAttr { ino, change, .. } => {
                self.live(*ino)?;
                if let Some(size) = change.size {
                    self.file(*ino)?;
                    self.set_size(client, ino.0, size)?;
                    return Ok(Outcome::Attr(self.view_to_cut(client, ino.0)));
                }
                if change.uid.is_some() || change.gid.is_some() {
                    let node = self.node(ino.0);
                    node.uid = change.uid.unwrap_or(node.uid);
                    node.gid = change.gid.unwrap_or(node.gid);
                    node.xattrs.remove(CAPABILITY);
                }
                if let Some(mode) = change.mode {
                    let node = self.node(ino.0);
                    node.mode = mode;
                    node.access.iter_mut().for_each(|list| set_mode(list, mode));
                }
                Ok(Outcome::Attr(self.view(ino.0)))
            }
            R::Create { caller, parent, name, mode, new, exclusive } => {
                if let Some(found) = self.named(*parent, name)? {
                    let NewInode::File { open } = new else {
                        return Err(MetaFault::Exists);
                    };
                    return match (self.nodes[&found].kind, open) {
                        _ if *exclusive => Err(MetaFault::Exists),
                        (Kind::Directory, _) => Err(MetaFault::IsDirectory),
                        (Kind::File, Some(open)) => {
                            Ok(Outcome::Entry(self.open(client, Ino(found), *open)?, false))
                        }
                        _ => Ok(Outcome::Entry(self.view(found), false)),
                    };
                }
                Ok(self.make(client, parent.0, Some(name), *mode, new, *caller))
            }
            R::CreateUnnamed { caller, parent, mode, open, may_link, .. } => {
                self.directory(*parent)?;
                let ino = self.next_ino;
                let made = self.make(client, parent.0, None, *mode, &file(*open), *caller);
                self.node(ino).may_get_name = *may_link;
                Ok(made)
            }
            R::Link { ino, parent, name, .. } => {
                let (kind, nlink) = (self.live(*ino)?.kind, self.live(*ino)?.nlink);
                let found = self.named(*parent, name)?;
                if kind == Kind::Directory {
                    return Err(MetaFault::NotPermitted);
                }
                if found.is_some() {
                    return Err(MetaFault::Exists);
                }
                let may_get_name = std::mem::take(&mut self.node(ino.0).may_get_name);
                if nlink == 0 && !may_get_name {
                    return Err(MetaFault::NotFound);
                }
                self.node(ino.0).nlink += 1;
                self.node(parent.0).names.insert(name.clone(), ino.0);
                Ok(Outcome::Attr(self.view(ino.0)))
            }
            R::Unlink { parent, name, .. } => {
                let ino = self.named(*parent, name)?.ok_or(MetaFault::NotFound)?;
                if self.nodes[&ino].kind == Kind::Directory {
                    return Err(MetaFault::IsDirectory);
                }
                self.node(parent.0).names.remove(name);
                Ok(Outcome::Removed(Some(ino), self.lose(ino)))
            }
            R::RemoveDir { parent, name, .. } => {
                let ino = self.named(*parent, name)?.ok_or(MetaFault::NotFound)?;
                if self.nodes[&ino].kind != Kind::Directory {
                    return Err(MetaFault::NotDirectory);
                }
                if !self.nodes[&ino].names.is_empty() {
                    return Err(MetaFault::NotEmpty);
                }
                self.node(parent.0).names.remove(name);
                self.node(parent.0).nlink -= 1;
                Ok(Outcome::Removed(Some(ino), self.lose(ino)))
            }
            R::Rename { from, from_name, to, to_name, flags, .. } => {
                self.rename((*from, from_name), (*to, to_name), *flags)
            }
            R::Open { ino, mode } => Ok(Outcome::Attr(self.open(client, *ino, *mode)?)),
            R::Close { ino } => {
                self.close(client, *ino);
                self.reap(ino.0);
                Ok(Outcome::Done)
            }
            R::Several { requests } => {
                let outcomes = requests.iter().map(|request| self.apply(client, request));
                Ok(Outcome::Several(outcomes.collect()))
            }
            R::BeginWrite { ino } => {
                self.file(*ino)?;
                self.refuse_foreign_cut(client, ino.0)?;
                let session = self.sessions.get(&(ino.0, client)).copied().unwrap_or_default();
                if !session.writing {
                    self.node(ino.0).xattrs.remove(CAPABILITY);
                    self.end_session(ino.0, client, Session { writing: true, ..session });
                }
                Ok(Outcome::Attr(self.view(ino.0)))
            }
            R::CommitWrite { ino, size, components, end, stored, .. } => {
                self.file(*ino)?;
                self.refuse_foreign_cut(client, ino.0)?;
                let held = self.sessions.get(&(ino.0, client)).copied();
                self.take_stored(ino.0, held, stored);
                let node = self.node(ino.0);
                node.components |= components;
                let overtaken = *size > node.size && held.is_none_or(|held| held.overtaken);
                let session = held.unwrap_or_default();
                let is_taken = session.cut.is_none() && !overtaken;
                if is_taken {
                    node.size = node.size.max(*size);
                }
                if overtaken {
                    self.end_session(
                        ino.0,
                        client,
                        Session { writing: true, overtaken: false, ..session },
                    );
                } else if *end && is_taken {
                    self.end_session(ino.0, client, Session::default());
                }
                let view = View { cut: !is_taken, ..self.view(ino.0) };
                self.reap(ino.0);
                Ok(Outcome::Attr(view))
            }
            R::Truncated { ino, size, stored } => {
                let session = self.sessions.get(&(ino.0, client)).copied();
                if let Some(session) = session.filter(|session| session.cut == Some(*size)) {
                    self.take_stored(ino.0, Some(session), stored);
                    self.end_session(ino.0, client, Session { cut: None, ..session });
                    self.reap(ino.0);
                }
                Ok(Outcome::Done)
            }
            R::ListXattrs { ino } => {
                self.live(*ino)?;
                Ok(self.xattr_names(ino.0))
            }
            R::GetXattr { ino, name } => {
                self.live(*ino)?;
                self.xattr(ino.0, name).map(Outcome::Xattr)
            }
            R::SetXattr { ino, name, value, how, .. } => {
                let kind = self.live(*ino)?.kind;
                match (self.xattr(ino.0, name).is_ok(), how.flags) {
                    (true, 1) => return Err(MetaFault::Exists),
                    (false, 2) => return Err(MetaFault::NoAttribute),
                    _ => {}
                }
                let list = || value[4..].chunks(8).map(|entry| entry[2]).collect::<List>();
                let node = self.node(ino.0);
                match &name[..] {
                    ACCESS_ACL | DEFAULT_ACL if kind == Kind::Symlink => {
                        return Err(MetaFault::NotSupported);
                    }
                    ACCESS_ACL => node.take_access(list()),
                    DEFAULT_ACL if kind == Kind::Directory => node.default = Some(list()),
                    DEFAULT_ACL => return Err(MetaFault::Invalid),
                    _ => {
                        node.xattrs.insert(name.clone(), value.clone());
                    }
                }
                Ok(Outcome::Done)
            }
            R::RemoveXattr { ino, name, .. } => {
                self.live(*ino)?;
                self.xattr(ino.0, name)?;
                let node = self.node(ino.0);
                match &name[..] {
                    ACCESS_ACL => node.access = None,
                    DEFAULT_ACL => node.default = None,
                    _ => {
                        node.xattrs.remove(name);
                    }
                }
                Ok(Outcome::Done)
            }
            other => panic!("{other:?}"),
        }
    }

    fn make(
        &mut self,
        client: u64,
        parent: u64,
        name: Option<&[u8]>,
        mode: NewMode,
        new: &NewInode,
        caller: Caller,
    ) -> Outcome {
        let ino = self.next_ino;
        self.next_ino += 1;
        let (kind, nlink, size) = match new {
            NewInode::File { .. } => (Kind::File, u32::from(name.is_some()), 0),
            NewInode::Directory => (Kind::Directory, 2, 0),
            NewInode::Symlink { target } => (Kind::Symlink, 1, target.len() as u64),
            NewInode::Special { .. } => (Kind::Special, 1, 0),
        };
        let (components, names) = (0, BTreeMap::new());
        let default = self.nodes[&parent].default.clone().filter(|_| kind != Kind::Symlink);
        let umask = if default.is_none() && kind != Kind::Symlink { mode.umask } else { 0 };
        let mode = mode.bits & 0o7777 & !umask;
        let (xattrs, access) = (BTreeMap::new(), None);
        let mut node = Node {
            kind,
            mode,
            nlink,
            may_get_name: false,
            uid: caller.uid,
            gid: caller.gid,
            size,
            parent,
            components,
            stored: BTreeMap::new(),
            names,
            xattrs,
            access,
            default: default.clone().filter(|_| kind == Kind::Directory),
        };
        if let Some(mut list) = default {
            let mode = mode_of(&list) & mode;
            set_mode(&mut list, mode);
            node.take_access(list);
        }
        self.nodes.insert(ino, node);
        let directory = self.node(parent);
        directory.names.extend(name.map(|name| (name.to_vec(), ino)));
        directory.nlink += u32::from(kind == Kind::Directory);
        if matches!(new, NewInode::File { open: Some(_) }) {
            *self.opens.entry((client, ino)).or_default() += 1;
        }
        let made = Outcome::Entry(self.view(ino), true);
        if matches!(new, NewInode::File { open: Some(mode) } if mode.write) {
            self.sessions.insert((ino, client), Session { writing: true, ..Session::default() });
        }
        made
    }

    fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), flags: u32) -> Result<Outcome> {
        self.directory(from.0)?;
        self.directory(to.0)?;
        let moved = self.named(from.0, from.1)?.ok_or(MetaFault::NotFound)?;
        let other = self.named(to.0, to.1)?;
        let is_dir = |ino: u64| self.nodes[&ino].kind == Kind::Directory;
        let nothing = Outcome::Removed(None, 0);
        match (other, flags) {
            (Some(_), 1) => return Err(MetaFault::Exists),
            (None, 2) => return Err(MetaFault::NotFound),
            _ if is_dir(moved) && self.own_subtree(moved, to.0.0) => {
                return Err(MetaFault::Invalid);
            }
            (Some(other), _) if other == moved => return Ok(nothing),
            (Some(other), 2) => {
                if is_dir(other) && self.own_subtree(other, from.0.0) {
                    return Err(MetaFault::Invalid);
                }
                for (ino, left, entered) in [(moved, from.0.0, to.0.0), (other, to.0.0, from.0.0)] {
                    self.carry(ino, left, entered);
                }
                self.node(from.0.0).names.insert(from.1.to_vec(), other);
                self.node(to.0.0).names.insert(to.1.to_vec(), moved);
                return Ok(nothing);
            }
            (Some(other), _) => match (is_dir(moved), is_dir(other)) {
                (true, true) if !self.nodes[&other].names.is_empty() => {
                    return Err(MetaFault::NotEmpty);
                }
                (true, false) => return Err(MetaFault::NotDirectory),
                (false, true) => return Err(MetaFault::IsDirectory),
                (true, true) => self.node(to.0.0).nlink -= 1,
                (false, false) => {}
            },
            (None, _) => {}
        }
        self.carry(moved, from.0.0, to.0.0);
        self.node(from.0.0).names.remove(from.1);
        self.node(to.0.0).names.insert(to.1.to_vec(), moved);
        Ok(match other {
            Some(other) => Outcome::Removed(Some(other), self.lose(other)),
            None => nothing,
        })
    }

    /// A directory's links and its parent.
    fn carry(&mut self, ino: u64, from: u64, to: u64) {
        if self.nodes[&ino].kind == Kind::Directory {
            self.node(from).nlink -= 1;
            self.node(to).nlink += 1;
            self.node(ino).parent = to;
        }
    }
}
