//! The client: names and attributes, and the way to files.
//!
//! Calls wait while a service is down, unless the configuration sets a deadline. Everything runs
//! on the reactor of the thread that connected.

use crate::ends::Ends;
use crate::error::Error;
use crate::file::File;
use crate::inode::Inode;
use crate::leases::{Asking, OnNotice, OnShared};
use crate::meta::Meta;
use crate::room::Closes;
use crate::target::ObjectTarget;
use futures_util::future::{LocalBoxFuture, join_all};
use levada_base::ids::{Ino, ObjectId, TargetId};
use levada_base::meter::HitMeter;
use levada_base::reactor::{self, Instant};
use levada_base::sync::Semaphore;
use levada_base::units::MIB;
use levada_wire::attr::{Attr, Kind};
use levada_wire::channel::Transport;
use levada_wire::frame::Class;
use levada_wire::meta::{
    AttrChange, Caller, DirEntry, MetaFault, MetaReply, MetaRequest, NewInode, NewMode, OpenMode,
};
use levada_wire::rpc::{Peer, PeerConfig};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

/// Closed files whose data is still on its way.
const CLOSING_MAX: u64 = 1024;
/// What else is under way for files that nobody has open is waited for in steps of this.
const CLOSING_WAIT: Duration = Duration::from_millis(5);
/// Who truncates a file that is opened so: the right to is checked by whoever opens it.
const OPENER: Caller = Caller { uid: 0, gid: 0 };
/// Attempts to get attributes that are not older than a write made here meanwhile.
const ATTR_ATTEMPTS: usize = 4;

/// Where the services are, and how much may be kept.
pub struct ClientConfig {
    pub transport: Rc<dyn Transport>,
    pub meta_address: String,
    pub meta_target: TargetId,
    /// The cluster expected at every address; all zero: any.
    pub cluster: [u8; 16],
    pub node: u32,
    /// Names this client. A process draws a new one: under that of a client that died it would take the dead one's
    /// write sessions for its own, and end them without what that one wrote.
    pub uuid: [u8; 16],
    pub class: Class,
    /// Written bytes kept per object target until they are durable; at least 16 MiB.
    pub unstable_bytes_max: u64,
    /// Connections per object server.
    pub connections: usize,
    /// A call that takes longer fails; `None`: calls wait for ever.
    pub deadline: Option<Duration>,
    /// Names and attributes may be trusted for a while, and others wait for this client before they change them.
    pub leases: bool,
}

impl ClientConfig {
    /// A client of the metadata target `meta_target` at `meta_address`.
    #[must_use]
    pub fn new(
        transport: Rc<dyn Transport>,
        meta_address: &str,
        meta_target: TargetId,
        uuid: [u8; 16],
    ) -> Self {
        Self {
            transport,
            meta_address: meta_address.to_owned(),
            meta_target,
            cluster: [0; 16],
            node: 0,
            uuid,
            class: Class::Foreground,
            unstable_bytes_max: 64 * MIB,
            connections: 1,
            deadline: None,
            leases: false,
        }
    }
}

/// What lost a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed {
    /// `None`: nothing did (a rename onto a fresh name).
    pub ino: Option<Ino>,
    /// Names left.
    pub nlink: u32,
}

/// A client; cheap to clone, all clones are the same.
#[derive(Clone)]
pub struct Client(pub(crate) Rc<Core>);

/// What the files and the client share.
pub(crate) struct Core {
    pub(crate) meta: Rc<Meta>,
    fs_id: u64,
    fs_name: String,
    targets: BTreeMap<TargetId, Rc<ObjectTarget>>,
    inodes: RefCell<BTreeMap<Ino, Rc<Inode>>>,
    closing: Rc<Semaphore>,
    pub(crate) closes: Closes,
    pub(crate) ends: Rc<Ends>,
    /// Files that the housekeeper is cutting, also those for which it does not wait any more.
    pub(crate) being_cut: RefCell<BTreeSet<Ino>>,
    /// Who hears of files that become shared.
    on_shared: RefCell<Option<OnShared>>,
    /// Turns at shared files that were taken.
    turns: Cell<u64>,
    deadline: Option<Duration>,
}

impl Core {
    pub(crate) fn fs_id(&self) -> u64 {
        self.fs_id
    }

    pub(crate) fn object_target(&self, id: TargetId) -> Option<Rc<ObjectTarget>> {
        self.targets.get(&id).cloned()
    }

    pub(crate) fn targets(&self) -> impl Iterator<Item = &Rc<ObjectTarget>> {
        self.targets.values()
    }

    /// A change that is answered with `Done`.
    pub(crate) async fn change_done(&self, request: MetaRequest) -> Result<(), Error> {
        match self.meta.change(request).await? {
            MetaReply::Done => Ok(()),
            MetaReply::Attr(_) => Ok(()),
            MetaReply::Failed(fault) => Err(fault.into()),
            _ => Err(Error::Dialect),
        }
    }

    pub(crate) fn attr_of(&self, reply: MetaReply) -> Result<Attr, Error> {
        match reply {
            MetaReply::Attr(attr) | MetaReply::Entry(attr, _) => Ok(*attr),
            MetaReply::Failed(fault) => Err(fault.into()),
            _ => Err(Error::Dialect),
        }
    }

    fn known(&self, ino: Ino) -> Option<Rc<Inode>> {
        self.inodes.borrow().get(&ino).cloned()
    }

    /// Another client is about to write this file.
    fn shared(&self, ino: Ino) -> Option<LocalBoxFuture<'static, ()>> {
        let inode = self.known(ino).filter(|inode| inode.handles.get() > 0)?;
        let appended = inode.becomes_shared();
        let on_shared = self.on_shared.borrow().clone();
        let dropped = on_shared.and_then(|on_shared| on_shared(ino));
        Some(Box::pin(async move {
            appended.await;
            if let Some(dropped) = dropped {
                dropped.await;
            }
        }))
    }

    pub(crate) fn next_turn(&self) -> u64 {
        self.turns.set(self.turns.get() + 1);
        self.turns.get()
    }

    fn changes(&self, ino: Ino) -> u64 {
        self.known(ino).map_or(0, |inode| inode.changes())
    }

    /// The shared state of a file, made from `attr` when it is not in use here.
    fn inode(self: &Rc<Self>, attr: &Attr) -> Result<Rc<Inode>, Error> {
        if let Some(inode) = self.known(attr.ino) {
            return Ok(inode);
        }
        let inode = Inode::new(Rc::clone(self), attr)?;
        self.inodes.borrow_mut().insert(attr.ino, Rc::clone(&inode));
        Ok(inode)
    }

    /// Forgets a file that nobody uses.
    fn release(&self, inode: &Inode) {
        let unused = inode.handles.get() == 0 && inode.closing.get() == 0;
        if unused && !inode.is_unsettled() {
            self.inodes.borrow_mut().remove(&inode.ino);
        }
    }

    /// One user of a file less, who may have kept its last close from ending its session.
    pub(crate) fn let_go(self: &Rc<Self>, inode: Rc<Inode>) {
        inode.closing.set(inode.closing.get() - 1);
        if !inode.is_left_open() {
            return self.release(&inode);
        }
        inode.closing.set(inode.closing.get() + 1);
        let core = Rc::clone(self);
        reactor::spawn(async move {
            inode.settle_unused().await;
            core.let_go(inode);
        });
    }

    /// Goes on with a truncation that failed half-way.
    fn finish_cut(self: &Rc<Self>, inode: &Rc<Inode>) {
        inode.closing.set(inode.closing.get() + 1);
        let (core, inode) = (Rc::clone(self), Rc::clone(inode));
        reactor::spawn(async move {
            inode.finish_cut_patiently().await;
            core.let_go(inode);
        });
    }

    /// Sets a file's size. A task, carried to its end also when the caller gives up.
    async fn truncate(
        self: &Rc<Self>,
        inode: Rc<Inode>,
        caller: Caller,
        change: AttrChange,
    ) -> Result<Attr, Error> {
        inode.closing.set(inode.closing.get() + 1);
        let core = Rc::clone(self);
        let cutting = reactor::spawn(async move {
            let result = inode.truncate(caller, change).await;
            if inode.takes_over_cut() {
                core.finish_cut(&inode);
            }
            core.let_go(inode);
            result
        });
        cutting.await.unwrap_or(Err(Error::Closed))
    }

    /// Exact attributes.
    pub(crate) async fn attr(self: &Rc<Self>, ino: Ino) -> Result<Attr, Error> {
        let known = self.meta.leases.node(ino);
        self.meta.leases.asked.count(known.is_some());
        if let Some(attr) = known {
            // What was written here and is not told yet goes by what the service said of this client's session.
            return self.complete(attr, self.changes(ino)).await;
        }
        let mut attempt = 0;
        loop {
            attempt += 1;
            let asked_at = self.changes(ino);
            let attr = self.attr_of(self.meta.read(&MetaRequest::GetAttr { ino }).await?)?;
            let attr = self.complete(attr, asked_at).await?;
            if self.changes(ino) == asked_at || attempt == ATTR_ATTEMPTS {
                return Ok(attr);
            }
        }
    }

    /// Completes attributes with what only the objects, or this client, know.
    async fn complete(self: &Rc<Self>, attr: Attr, asked_at: u64) -> Result<Attr, Error> {
        if attr.kind != Kind::File {
            return Ok(attr);
        }
        match self.known(attr.ino) {
            Some(inode) => inode.complete(attr, asked_at).await,
            None if attr.writers => {
                Inode::new(Rc::clone(self), &attr)?.complete(attr, asked_at).await
            }
            None => Ok(attr),
        }
    }

    /// Runs a call under the configured deadline.
    pub(crate) async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        match self.deadline {
            None => call.await,
            Some(limit) => reactor::timeout(limit, call).await.unwrap_or(Err(Error::Deadline)),
        }
    }

    /// One handle less; what is left to do is done in the background. Waits only while too
    /// many closed files are on their way.
    pub(crate) async fn close(self: &Rc<Self>, inode: Rc<Inode>) {
        inode.closing.set(inode.closing.get() + 1);
        inode.handles.set(inode.handles.get() - 1);
        let is_last = inode.handles.get() == 0;
        let unlocking = is_last.then(|| inode.unlock_all()).flatten();
        let number = self.closes.begin(inode.ino);
        let permit = self.closing.acquire(1).await;
        let core = Rc::clone(self);
        reactor::spawn(async move {
            if let Some(unlocking) = unlocking {
                let _ = unlocking.await;
            }
            if !inode.settle_after_close().await {
                // Afterwards, so that the objects of an unlinked file are not destroyed under us.
                let close = MetaRequest::Close { ino: inode.ino };
                if let Err(error) = core.ends.send(&core.meta, vec![close]).await {
                    tracing::debug!(ino = inode.ino.0, %error, "a close was refused");
                }
            }
            core.closes.end(number);
            core.let_go(inode);
            drop(permit);
        });
    }
}

impl Client {
    /// Connects and registers.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`], or [`Error::Deadline`] when one is configured and the service is
    /// not there.
    ///
    /// # Panics
    ///
    /// When `config.unstable_bytes_max` is less than 16 MiB.
    pub async fn connect(config: ClientConfig) -> Result<Self, Error> {
        assert!(config.unstable_bytes_max >= 16 * MIB, "two of the largest writes must fit");
        let peer = |address: &str, connections, cluster| {
            let peer =
                PeerConfig { cluster, node: config.node, connections, ..PeerConfig::default() };
            Peer::new(Rc::clone(&config.transport), address, peer)
        };
        // One connection: see `meta`.
        let meta_peer = peer(&config.meta_address, 1, config.cluster);
        let meta =
            Meta::new(config.meta_target, meta_peer, config.class, config.uuid, config.leases);
        let fs = match config.deadline {
            None => meta.connect().await?,
            Some(limit) => {
                reactor::timeout(limit, meta.connect()).await.unwrap_or(Err(Error::Deadline))?
            }
        };
        // Whoever asked for any cluster stays with the one that answered.
        let cluster = meta.registration().map_or(config.cluster, |known| known.cluster);
        let run = reactor::random_u64();
        let mut peers: BTreeMap<&str, Rc<Peer>> = BTreeMap::new();
        let mut targets = BTreeMap::new();
        for (id, address) in &fs.objects {
            let connections = config.connections.max(1);
            let peer = peers.entry(address).or_insert_with(|| peer(address, connections, cluster));
            let target = ObjectTarget::new(
                *id,
                Rc::clone(peer),
                config.class,
                run,
                config.unstable_bytes_max,
            );
            targets.insert(*id, target);
        }
        reactor::spawn(Meta::keep_lease(Rc::downgrade(&meta)));
        if config.leases {
            meta.stay_connected();
        }
        let core = Rc::new(Core {
            meta,
            fs_id: fs.id,
            fs_name: fs.name,
            targets,
            inodes: RefCell::default(),
            closing: Semaphore::new(CLOSING_MAX),
            closes: Closes::default(),
            ends: Rc::default(),
            being_cut: RefCell::default(),
            on_shared: RefCell::default(),
            turns: Cell::default(),
            deadline: config.deadline,
        });
        let holder = Rc::downgrade(&core);
        *core.meta.leases.on_shared.borrow_mut() =
            Some(Rc::new(move |ino| holder.upgrade().and_then(|core| core.shared(ino))));
        Ok(Self(core))
    }

    /// The file system's name.
    #[must_use]
    pub fn fs_name(&self) -> &str {
        &self.0.fs_name
    }

    /// The file system's number in object names.
    #[must_use]
    pub fn fs_id(&self) -> u64 {
        self.0.fs_id
    }

    /// Sets who hears of each file whose lock ended with the lease.
    pub fn on_lock_lost(&self, lost: Rc<dyn Fn(Ino)>) {
        self.0.meta.locks.set_on_lost(lost);
    }

    /// Written bytes that are kept until they are durable.
    #[must_use]
    pub fn unstable_bytes(&self) -> u64 {
        self.0.targets().map(|target| target.unstable_bytes()).sum()
    }

    pub(crate) async fn read(&self, request: MetaRequest) -> Result<MetaReply, Error> {
        let reply = self.0.in_time(self.0.meta.read(&request)).await?;
        match reply {
            MetaReply::Failed(fault) => Err(fault.into()),
            reply => Ok(reply),
        }
    }

    pub(crate) async fn change(&self, request: MetaRequest) -> Result<MetaReply, Error> {
        let reply = self.0.in_time(self.0.meta.change(request)).await?;
        match reply {
            MetaReply::Failed(fault) => Err(fault.into()),
            reply => Ok(reply),
        }
    }

    /// Exact attributes: while somebody writes, the objects are asked.
    ///
    /// # Errors
    ///
    /// What the metadata service says; `Stale` for an inode that is gone.
    pub async fn attr(&self, ino: Ino) -> Result<Attr, Error> {
        self.0.in_time(self.0.attr(ino)).await
    }

    /// Sets who hears, before it is acknowledged, of what others are about to change and this client has a lease on: the
    /// future that it gives ends when nobody trusts that any more, if anybody did.
    pub fn on_notice(&self, on_notice: OnNotice) {
        *self.0.meta.leases.on_notice.borrow_mut() = Some(on_notice);
    }

    /// Sets who hears, before it is acknowledged, that another client is about to write a file that is open here.
    pub fn on_shared(&self, on_shared: OnShared) {
        *self.0.on_shared.borrow_mut() = Some(on_shared);
    }

    /// How long these attributes may be trusted without asking.
    #[must_use]
    pub fn attr_valid(&self, attr: &Attr) -> Duration {
        self.0.meta.leases.node_valid(attr)
    }

    /// How long it may be trusted without asking that `name` means this inode.
    #[must_use]
    pub fn name_valid(&self, directory: Ino, name: &[u8], ino: Ino) -> Duration {
        self.0.meta.leases.name_valid(directory, name, ino)
    }

    /// From when on it is certain that nobody else has changed the names of a directory, up to now.
    #[must_use]
    pub fn unchanged_since(&self, directory: Ino) -> Option<Instant> {
        self.0.meta.leases.unchanged_since(directory)
    }

    /// Attributes as far as they are known without asking the metadata service.
    #[must_use]
    pub fn knows(&self, ino: Ino) -> bool {
        self.0.meta.leases.node(ino).is_some()
    }

    /// How often names and attributes were known here when they were asked for, and how often not.
    #[must_use]
    pub fn asked(&self) -> &HitMeter {
        &self.0.meta.leases.asked
    }

    /// Finds a name.
    ///
    /// # Errors
    ///
    /// `NotFound`, `NotDirectory`, ...
    pub async fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, Error> {
        let leases = &self.0.meta.leases;
        match leases.name(parent, name) {
            Some(None) => {
                leases.asked.count(true);
                return Err(MetaFault::NotFound.into());
            }
            Some(Some(ino)) if self.knows(ino) => return self.attr(ino).await,
            _ => leases.asked.count(false),
        }
        let request = MetaRequest::Lookup { parent, name: name.to_vec() };
        let attr = self.0.attr_of(self.read(request).await?)?;
        if attr.kind != Kind::File || (!attr.writers && self.0.known(attr.ino).is_none()) {
            return Ok(attr);
        }
        // Written to: asked again, in step with what happens here.
        self.attr(attr.ino).await
    }

    /// Changes attributes; a new size also cuts the objects.
    ///
    /// # Errors
    ///
    /// What the metadata service says, and I/O errors of a truncation.
    pub async fn set_attr(
        &self,
        caller: Caller,
        ino: Ino,
        change: AttrChange,
    ) -> Result<Attr, Error> {
        if change.size.is_some() {
            return self.0.in_time(self.truncate(caller, ino, change)).await;
        }
        if change.mtime.is_some()
            && let Some(inode) = self.0.known(ino)
        {
            inode.closing.set(inode.closing.get() + 1);
            let core = Rc::clone(&self.0);
            let setting = reactor::spawn(async move {
                let result = inode.set_times(caller, change).await;
                core.let_go(inode);
                result
            });
            return self.0.in_time(async { setting.await.unwrap_or(Err(Error::Closed)) }).await;
        }
        let asked_at = self.0.changes(ino);
        let reply = self.change(MetaRequest::SetAttr { caller, ino, change }).await?;
        self.0.in_time(self.0.complete(self.0.attr_of(reply)?, asked_at)).await
    }

    async fn truncate(&self, caller: Caller, ino: Ino, change: AttrChange) -> Result<Attr, Error> {
        let inode = match self.0.known(ino) {
            Some(inode) => inode,
            None => {
                let request = MetaRequest::GetAttr { ino };
                let attr = self.0.attr_of(self.0.meta.read(&request).await?)?;
                self.0.inode(&attr)?
            }
        };
        self.0.truncate(inode, caller, change).await
    }

    /// Makes a directory, symbolic link or special file; or a file without opening it.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn create(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: impl Into<NewMode>,
        new: NewInode,
    ) -> Result<Attr, Error> {
        let new = match new {
            NewInode::File { .. } => NewInode::File { open: None },
            new => new,
        };
        let (name, mode) = (name.to_vec(), mode.into());
        let request = MetaRequest::Create { caller, parent, name, mode, new, exclusive: true };
        self.0.attr_of(self.change(request).await?)
    }

    /// Makes and opens a file, or opens it when it is there and `exclusive` is not set: the
    /// file, its attributes, and whether it was made now.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn create_file(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: impl Into<NewMode>,
        open: OpenMode,
        exclusive: bool,
    ) -> Result<(File, Attr, bool), Error> {
        let new = NewInode::File { open: Some(uncut(open)) };
        let (name, mode) = (name.to_vec(), mode.into());
        let asking = self.0.meta.leases.ask();
        let request = MetaRequest::Create { caller, parent, name, mode, new, exclusive };
        let MetaReply::Entry(attr, made) = self.change(request).await? else {
            return Err(Error::Dialect);
        };
        // What is known here of a file that was there already may be younger than this answer.
        let asked_at = made.then_some(0);
        let (file, attr) = self.opened(*attr, asking, asked_at, open.truncate && !made).await?;
        if made && open.write {
            file.session_began();
        }
        Ok((file, attr, made))
    }

    /// Makes and opens a file without a name in a directory, which stays as it is. With `may_link` [`Client::link`] gives
    /// it its first name; without a name it goes with its last close.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn create_unnamed(
        &self,
        caller: Caller,
        parent: Ino,
        mode: impl Into<NewMode>,
        open: OpenMode,
        may_link: bool,
    ) -> Result<(File, Attr), Error> {
        let (mode, open) = (mode.into(), uncut(open));
        let asking = self.0.meta.leases.ask();
        let request = MetaRequest::CreateUnnamed { caller, parent, mode, open, may_link };
        let attr = self.0.attr_of(self.change(request).await?)?;
        let (file, attr) = self.opened(attr, asking, Some(0), false).await?;
        if open.write {
            file.session_began();
        }
        Ok((file, attr))
    }

    /// Opens a file by its number; every open needs a [`File::close`].
    ///
    /// # Errors
    ///
    /// What the metadata service says; `Stale` for an inode that is gone.
    pub async fn open(&self, ino: Ino, mode: OpenMode) -> Result<(File, Attr), Error> {
        let (asking, asked_at) = (self.0.meta.leases.ask(), self.0.changes(ino));
        let reply = self.change(MetaRequest::Open { ino, mode: uncut(mode) }).await?;
        self.opened(self.0.attr_of(reply)?, asking, Some(asked_at), mode.truncate).await
    }

    /// The metadata service counts an open more: a handle for it. The attributes were asked for when
    /// [`Core::changes`] said `asked_at`. With `cut` the file is emptied.
    async fn opened(
        &self,
        attr: Attr,
        asking: Asking,
        asked_at: Option<u64>,
        cut: bool,
    ) -> Result<(File, Attr), Error> {
        let core = &self.0;
        let inode = match core.inode(&attr) {
            Ok(inode) => inode,
            Err(error) => {
                core.change_done(MetaRequest::Close { ino: attr.ino }).await?;
                return Err(error);
            }
        };
        let ino = attr.ino;
        // Whoever has it cut meanwhile tells of nobody else.
        inode.opened(attr.others || attr.cut || core.meta.leases.is_shared_since(ino, asking));
        let attr = core.in_time(async {
            if cut {
                let empty = AttrChange { size: Some(0), ..AttrChange::default() };
                return core.truncate(Rc::clone(&inode), OPENER, empty).await;
            }
            // Fresh for every open, as programs on two machines expect of each other's closes.
            match asked_at {
                Some(asked_at) if !attr.writers => inode.complete(attr, asked_at).await,
                _ => core.attr(ino).await,
            }
        });
        match attr.await {
            Ok(attr) => Ok((File::new(Rc::clone(core), inode), attr)),
            Err(error) => {
                core.close(inode).await;
                Err(error)
            }
        }
    }

    /// Gives an inode another name.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn link(
        &self,
        caller: Caller,
        ino: Ino,
        parent: Ino,
        name: &[u8],
    ) -> Result<Attr, Error> {
        let asked_at = self.0.changes(ino);
        let request = MetaRequest::Link { caller, ino, parent, name: name.to_vec() };
        let attr = self.0.attr_of(self.change(request).await?)?;
        self.0.in_time(self.0.complete(attr, asked_at)).await
    }

    /// Removes a name of something that is no directory.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn unlink(&self, caller: Caller, parent: Ino, name: &[u8]) -> Result<Removed, Error> {
        let request = MetaRequest::Unlink { caller, parent, name: name.to_vec() };
        removed(self.change(request).await?)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn remove_dir(&self, caller: Caller, parent: Ino, name: &[u8]) -> Result<(), Error> {
        let request = MetaRequest::RemoveDir { caller, parent, name: name.to_vec() };
        removed(self.change(request).await?).map(drop)
    }

    /// Renames; `flags` as in [`MetaRequest::Rename`]. Says what lost its name to this.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn rename(
        &self,
        caller: Caller,
        (from, from_name): (Ino, &[u8]),
        (to, to_name): (Ino, &[u8]),
        flags: u32,
    ) -> Result<Removed, Error> {
        let (from_name, to_name) = (from_name.to_vec(), to_name.to_vec());
        let request = MetaRequest::Rename { caller, from, from_name, to, to_name, flags };
        removed(self.change(request).await?)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn read_link(&self, ino: Ino) -> Result<Vec<u8>, Error> {
        match self.read(MetaRequest::ReadLink { ino }).await? {
            MetaReply::Link(target) => Ok(target),
            _ => Err(Error::Dialect),
        }
    }

    /// Entries after `cookie` (0: from the start), and whether these are the last. Sizes in
    /// `attrs` are exact unless [`Attr::writers`] says otherwise.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn read_dir(
        &self,
        ino: Ino,
        cookie: u64,
        entries_max: u32,
        attrs: bool,
    ) -> Result<(Vec<DirEntry>, bool), Error> {
        match self.read(MetaRequest::ReadDir { ino, cookie, entries_max, attrs }).await? {
            MetaReply::Entries { entries, end } => Ok((entries, end)),
            _ => Err(Error::Dialect),
        }
    }

    /// Makes durable every change of names and attributes that was acknowledged here.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn sync_meta(&self) -> Result<(), Error> {
        self.0.in_time(self.0.meta.sync()).await
    }

    /// Makes everything written here durable, also what closed files left behind.
    ///
    /// # Errors
    ///
    /// The first error met; the others are tried all the same.
    pub async fn sync(&self) -> Result<(), Error> {
        let everything = async {
            let inodes: Vec<_> = self.0.inodes.borrow().values().cloned().collect();
            let synced = join_all(inodes.into_iter().map(|inode| {
                inode.closing.set(inode.closing.get() + 1);
                let core = Rc::clone(&self.0);
                reactor::spawn(async move {
                    let synced = inode.sync().await;
                    core.let_go(inode);
                    synced
                })
            }));
            let synced =
                synced.await.into_iter().map(|synced| synced.unwrap_or(Err(Error::Closed)));
            let synced = synced.collect::<Result<(), Error>>();
            let told = self.0.meta.sync().await;
            synced.and(told)
        };
        self.0.in_time(everything).await
    }

    /// Waits until closed files are settled, after making everything durable, and takes leave of the
    /// metadata service, so that a later start of it waits for nothing of this client: for an unmount.
    /// Files that are still open are stale afterwards.
    ///
    /// # Errors
    ///
    /// As [`Client::sync`].
    pub async fn shutdown(&self) -> Result<(), Error> {
        let synced = self.sync().await;
        let settled = async {
            let _all = self.0.closing.acquire(CLOSING_MAX).await;
            while self.0.inodes.borrow().values().any(|inode| inode.is_busy()) {
                reactor::sleep(CLOSING_WAIT).await;
            }
            Ok(())
        };
        let settled = self.0.in_time(settled).await;
        // What closing the files told the service.
        let told = self.sync_meta().await;
        self.0.meta.leave().await;
        settled.and(told).and(synced)
    }

    pub(crate) fn object(
        &self,
        attr: &Attr,
        component: u32,
    ) -> Option<(Rc<ObjectTarget>, ObjectId)> {
        let layout = attr.layout.as_ref()?;
        let target = self.0.object_target(*layout.targets.get(component as usize)?)?;
        Some((target, layout.object(self.0.fs_id, attr.ino, component)))
    }
}

/// What the service is asked for when `mode` is wanted. A truncation takes its turn with what this client
/// writes and tells of the file, so it is a request of its own: one that comes with the open meets a session
/// that is just ending, and then a cut stays pending of which this client does not know.
fn uncut(mode: OpenMode) -> OpenMode {
    OpenMode { truncate: false, ..mode }
}

fn removed(reply: MetaReply) -> Result<Removed, Error> {
    match reply {
        MetaReply::Removed { ino, nlink } => Ok(Removed { ino, nlink }),
        MetaReply::Done => Ok(Removed { ino: None, nlink: 0 }),
        _ => Err(Error::Dialect),
    }
}
