//! FUSE requests answered by the client library.
//!
//! - this module: the handler, and the requests that are one call of the client;
//! - `open`: open files and what they carry: data, sync, close;
//! - `space`: holes and copies;
//! - `sharing`: files that another mount writes, too;
//! - `dir`: listings;
//! - `attrs`: attributes in the client's words and in the kernel's;
//! - `xattrs`: extended attributes, and which inodes have none;
//! - `locks`: locks, which meet those of other mounts;
//! - `leases`: what the kernel may trust, and how that ends;
//! - `places`: directories that other mounts have moved;
//! - `names`: which names are absent, for as long as that is certain enough;
//! - `interrupt`: a killed process need not wait for a service that is away.
//!
//! What always holds:
//! - A node id is an inode number and a handle an index that is checked against the inode, so
//!   nothing grows with the number of files, and no request can reach another one's file.
//! - A request waits while a service is away; the error numbers are the client's.
//! - A request that changes something is carried to its end once begun, also when its caller is
//!   killed: a name that was made is not lost, an open is not left uncounted.
//!
//! What the kernel caches, and for how long, is decided here: see [`VALID`] and `open`.
//!
//! After a crash of this process the files it had open are closed by the service when the
//! client's lease runs out.

mod attrs;
mod dir;
mod interrupt;
mod leases;
mod locks;
mod names;
mod open;
mod places;
mod sharing;
mod space;
mod xattrs;

use crate::codec::{
    Caller, Entry, Errno, InitFlags, Limits, Negotiated, Operation, Reply, Request, SetAttr,
    StatFs, Statx,
};
use crate::handler::{Handler, write_data};
use crate::transport::Notifier;
use attrs::{attr_of, change_of, has_set_id, time_of};
use interrupt::Interrupts;
use leases::Trust;
use levada_base::Buf;
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_client::Client;
use levada_wire::attr::{Attr, Kind};
use levada_wire::meta::{self, AttrChange, NewInode, NewMode};
use locks::Kernel;
use names::Names;
use open::{Handles, Pages};
use places::Places;
use std::cell::Cell;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::time::Duration;
use xattrs::Bare;

/// How long the kernel trusts names and attributes at most, while this mount has a lease on them. Within the lease it is
/// told them again without asking the service.
pub const VALID: Duration = Duration::from_secs(1);

/// The longest name, in bytes (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;
/// The unit of the space counts.
const FRAGMENT_BYTES: u32 = 4096;

/// What the kernel of a guest keeps, which nobody can tell to drop anything (virtio-fs has no way for that). Of names and
/// attributes it keeps nothing: the client here answers from what it has leased.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuestCache {
    /// No pages either: what others write shows at once.
    #[default]
    None,
    /// Pages of a file while it is open, and until it has been written elsewhere and is opened anew: meanwhile, what others write
    /// does not show.
    Open,
}

/// The file system behind a mount. Lives on one core.
pub struct Files {
    client: Client,
    handles: Handles,
    pages: Pages,
    names: Names,
    bare: Rc<Bare>,
    trust: Rc<Trust>,
    places: Rc<Places>,
    interrupts: Interrupts,
    kernel: Kernel,
    /// Before 6.6 the kernel keeps old pages beside writes of files that are open so, and does not map them.
    direct_io: Cell<bool>,
    /// It is a guest that mounts it.
    guest: Option<GuestCache>,
}

/// See [`Files::ask`].
#[derive(Clone, Copy)]
struct Asking {
    names: names::Asking,
    bare: xattrs::Asking,
}

/// Who changes names and attributes.
fn caller_of(caller: Caller) -> meta::Caller {
    meta::Caller { uid: caller.uid, gid: caller.gid }
}

/// The mount itself, for what the kernel has allowed already.
const MOUNT: meta::Caller = meta::Caller { uid: 0, gid: 0 };

fn name_of(name: &[u8]) -> Result<&[u8], Errno> {
    if name.len() > NAME_BYTES_MAX { Err(Errno::NAMETOOLONG) } else { Ok(name) }
}

/// Why a name could not be removed. A directory that is gone holds none, as file systems of the kernel say it: told that it is
/// stale, the kernel would look it up once more, and fail if another mount is removing the same tree.
fn of_removal(error: levada_client::Error) -> Errno {
    match error {
        levada_client::Error::Meta(meta::MetaFault::Stale) => Errno::NOENT,
        error => error.into(),
    }
}

impl Files {
    /// Answers from what `client` reaches.
    #[must_use]
    pub fn new(client: Client) -> Self {
        let (kernel, trust, bare) = (Kernel::of(&client), Rc::default(), Rc::default());
        sharing::listen(&client, &kernel);
        leases::listen(&client, &trust, &bare, &kernel);
        Files {
            kernel,
            client,
            handles: Handles::default(),
            pages: Pages::default(),
            names: Names::default(),
            bare,
            trust,
            places: Rc::default(),
            interrupts: Interrupts::default(),
            direct_io: Cell::new(false),
            guest: None,
        }
    }

    /// Says that the kernel is that of a guest, which keeps so much.
    #[must_use]
    pub fn for_guest(self, cache: GuestCache) -> Self {
        self.trust.trust_nothing();
        Self { guest: Some(cache), ..self }
    }

    /// Says where programs find what is served here.
    #[must_use]
    pub fn mounted_at(self, root: PathBuf) -> Self {
        self.places.set_root(root);
        self
    }

    /// What to offer the kernel ([`crate::Session::new`]).
    #[must_use]
    pub fn limits() -> Limits {
        let limits = Limits::default();
        // A symbolic link never changes its target. Directories are opened, as one without an
        // open would be listed from the kernel's cache for ever.
        let wanted = limits.wanted | InitFlags::CACHE_SYMLINKS;
        // Access control lists decide, so the umask waits until it is known whether a directory has a default one.
        let wanted = wanted | InitFlags::POSIX_ACL | InitFlags::DONT_MASK;
        // Programs on all mounts see each other's locks.
        let wanted = wanted | InitFlags::FLOCK_LOCKS | InitFlags::POSIX_LOCKS;
        // With ATOMIC_O_TRUNC the open itself cuts a file off. The kernel asks for that before it looks whether the file may be changed at
        // all: a program that runs from it would be gone when the open fails with ETXTBSY.
        let unwanted = InitFlags::NO_OPENDIR_SUPPORT | InitFlags::ATOMIC_O_TRUNC;
        Limits { wanted: wanted - unwanted, ..limits }
    }

    /// Each kind of request has a box of its own: one future with room for all of them would be 40 KiB, and
    /// moving it costs more than most requests.
    async fn answer(&self, request: Request<'_>, message: &Buf) -> Result<Reply, Errno> {
        let Request { unique, inode, caller, operation } = request;
        let ino = Ino(inode);
        match operation {
            // Changes nothing, so it can be given up.
            Operation::Lookup { .. }
            | Operation::GetAttr { .. }
            | Operation::Statx { .. }
            | Operation::ReadLink
            | Operation::Read(_)
            | Operation::ReadDir(_)
            | Operation::ReadDirPlus(_)
            | Operation::LSeek { .. }
            | Operation::StatFs
            | Operation::GetXattr { .. }
            | Operation::ListXattr { .. }
            | Operation::GetLk(_)
            | Operation::Fsync { .. }
            | Operation::FsyncDir { .. }
            | Operation::SyncFs => {
                let answered = Box::pin(self.look(caller, ino, operation));
                self.interrupts.unless_killed(unique, caller.pid, answered).await
            }
            Operation::Write(write) => {
                let data = write_data(message, &write);
                Box::pin(self.write(ino, &write, data)).await
            }
            Operation::Fallocate { fh, offset, length, mode } => {
                Box::pin(self.fallocate(caller, ino, fh, (offset, length), mode)).await
            }
            Operation::CopyFileRange(args) => {
                let copied = Box::pin(self.copy(caller, ino, args)).await?;
                // Far below 4 GiB.
                Ok(Reply::Written(copied as u32))
            }
            Operation::CopyFileRange64(args) => {
                Ok(Reply::Copied(Box::pin(self.copy(caller, ino, args)).await?))
            }
            Operation::SetAttr(set) => Box::pin(self.set_attr(caller, ino, set)).await,
            Operation::Open(args) => Box::pin(self.open(ino, args)).await,
            Operation::SetXattr { name, value, flags, extra_flags } => {
                let flags = (flags, extra_flags);
                Box::pin(self.set_xattr(caller, ino, name, value, flags)).await
            }
            Operation::RemoveXattr { name } => Box::pin(self.remove_xattr(caller, ino, name)).await,
            Operation::Create { name, mode, open, umask } => {
                let mode = NewMode { bits: mode & !libc::S_IFMT, umask };
                Box::pin(self.create(caller, ino, name_of(name)?, mode, open)).await
            }
            Operation::TmpFile { mode, open, umask } => {
                let mode = NewMode { bits: mode & !libc::S_IFMT, umask };
                Box::pin(self.create_unnamed(caller, ino, mode, open)).await
            }
            Operation::Release(args) => Box::pin(self.release(ino, args.fh)).await,
            Operation::Interrupt { unique } => {
                self.interrupts.interrupt(unique);
                Ok(Reply::Silent)
            }
            // There is no table of node ids to shrink.
            Operation::Forget { .. } | Operation::BatchForget(_) => Ok(Reply::Silent),
            // The kernel keeps no state of an open directory here.
            Operation::OpenDir(_) => Ok(Reply::Open(crate::codec::OpenReply::default())),
            Operation::Flush { fh, lock_owner } => Box::pin(self.flush(ino, fh, lock_owner)).await,
            Operation::ReleaseDir(_) | Operation::Destroy => Ok(Reply::Done),
            Operation::Symlink { .. }
            | Operation::MkNod { .. }
            | Operation::MkDir { .. }
            | Operation::Unlink { .. }
            | Operation::RmDir { .. }
            | Operation::Rename { .. }
            | Operation::Link { .. } => Box::pin(self.change_names(caller, ino, operation)).await,
            Operation::SetLk(args) => {
                Box::pin(self.set_lock((unique, caller.pid), ino, args, false)).await
            }
            Operation::SetLkW(args) => {
                Box::pin(self.set_lock((unique, caller.pid), ino, args, true)).await
            }
            // The kernel checks access by itself (`default_permissions`), and remembers this answer.
            Operation::Access { .. } => Err(Errno::NOSYS),
            // The session answers these.
            Operation::Init(_) | Operation::Unknown { .. } => Err(Errno::IO),
        }
    }

    /// Something is about to be asked whose answer may bring attributes.
    fn ask(&self) -> Asking {
        Asking { names: self.names.ask(), bare: self.bare.ask() }
    }

    /// Attributes that came with an answer.
    fn told(&self, attr: &Attr, asking: Asking) {
        self.names.told(attr.ino, attr.change, asking.names);
        self.bare.told(attr, asking.bare, self.client.attr_valid(attr).min(VALID));
    }

    /// What a name means, for the kernel. Nothing may come between this and the answer.
    fn entry_of(&self, dir: Ino, name: &[u8], attr: &Attr) -> Entry {
        self.trust.entry(&self.client, dir, name, attr)
    }

    /// Attributes, for the kernel, likewise.
    fn attr_reply(&self, attr: &Attr) -> Reply {
        Reply::Attr { attr: attr_of(attr), valid: self.trust.attr(&self.client, attr) }
    }

    /// Requests that change nothing.
    async fn look(
        &self,
        caller: Caller,
        ino: Ino,
        operation: Operation<'_>,
    ) -> Result<Reply, Errno> {
        match operation {
            Operation::Lookup { name } => Box::pin(self.lookup(caller, ino, name)).await,
            Operation::GetAttr { fh: _ } => {
                let asking = self.ask();
                let attr = Box::pin(self.client.attr(ino)).await?;
                self.told(&attr, asking);
                Ok(self.attr_reply(&attr))
            }
            Operation::Statx { .. } => {
                let asking = self.ask();
                let attr = Box::pin(self.client.attr(ino)).await?;
                self.told(&attr, asking);
                let statx = Statx {
                    attr: attr_of(&attr),
                    mask: libc::STATX_BASIC_STATS | libc::STATX_BTIME,
                    btime: time_of(attr.btime),
                    ..Statx::default()
                };
                Ok(Reply::Statx { statx, valid: self.trust.attr(&self.client, &attr) })
            }
            Operation::ReadLink => Ok(Reply::Bytes(self.client.read_link(ino).await?)),
            Operation::Read(args) => Box::pin(self.read(ino, args)).await,
            Operation::ReadDir(args) => Box::pin(self.read_dir(ino, args, false)).await,
            Operation::ReadDirPlus(args) => Box::pin(self.read_dir(ino, args, true)).await,
            Operation::LSeek { fh, offset, whence } => {
                Box::pin(self.seek(ino, fh, offset, whence)).await
            }
            Operation::StatFs => Box::pin(self.space(ino)).await,
            Operation::GetLk(args) => Box::pin(self.get_lock(ino, args)).await,
            Operation::GetXattr { name, size } => Box::pin(self.get_xattr(ino, name, size)).await,
            Operation::ListXattr { size } => Box::pin(self.list_xattrs(caller, ino, size)).await,
            Operation::Fsync { fh, data_only: _ } => {
                Box::pin(self.handles.file(ino, fh)?.fsync()).await?;
                Ok(Reply::Done)
            }
            Operation::FsyncDir { .. } => {
                self.client.sync_meta().await?;
                Ok(Reply::Done)
            }
            Operation::SyncFs => {
                Box::pin(self.client.sync()).await?;
                Ok(Reply::Done)
            }
            _ => Err(Errno::IO),
        }
    }

    async fn lookup(&self, caller: Caller, parent: Ino, name: &[u8]) -> Result<Reply, Errno> {
        self.places.settled(caller.pid).await;
        let asking = self.ask();
        let attr = match name_of(name)? {
            // From a file handle: any inode. One that never was is as stale as one that is gone.
            b"." => match self.client.attr(parent).await.map_err(Errno::from) {
                Err(Errno::NOENT) => return Err(Errno::STALE),
                attr => attr?,
            },
            b".." => {
                let directory = self.client.attr(parent).await?;
                self.client.attr(directory.parent).await?
            }
            name if self.names.is_absent(parent, name, self.client.unchanged_since(parent)) => {
                return Err(Errno::NOENT);
            }
            name => {
                let attr = self.client.lookup(parent, name).await?;
                if attr.kind == Kind::Directory {
                    self.places.found(attr.ino, parent, name);
                }
                attr
            }
        };
        // A directory on the way is looked up again each second; the kernel asks for nothing else of it then.
        self.told(&attr, asking);
        Ok(Reply::Entry(self.entry_of(parent, name, &attr)))
    }

    async fn set_attr(&self, caller: Caller, ino: Ino, set: SetAttr) -> Result<Reply, Errno> {
        let change = change_of(&set)?;
        // Where nothing is to be changed the counter stays.
        let changing = (change != AttrChange::default()).then(|| self.names.change_attributes(ino));
        let asking = self.bare.ask();
        let attr = self.client.set_attr(caller_of(caller), ino, change).await?;
        if let Some(changing) = changing {
            changing.done();
        }
        // With a mode that an access list of another mount has set, the kernel must come to know of that list.
        self.bare.told(&attr, asking, self.client.attr_valid(&attr).min(VALID));
        let attr = self.without_set_id(attr, set.kill_set_id).await?;
        if has_set_id(&attr) {
            self.handles.set_id_given(ino);
        }
        Ok(self.attr_reply(&attr))
    }

    /// Takes the set-id bits away where the kernel says so and the service has not.
    async fn without_set_id(&self, attr: Attr, kill: bool) -> Result<Attr, Errno> {
        if !kill || !has_set_id(&attr) {
            return Ok(attr);
        }
        let mode = attrs::mode_without_set_id(attr.mode);
        let change = AttrChange { mode: Some(mode), ..AttrChange::default() };
        Ok(self.client.set_attr(MOUNT, attr.ino, change).await?)
    }

    /// Requests that change names.
    async fn change_names(
        &self,
        caller: Caller,
        directory: Ino,
        operation: Operation<'_>,
    ) -> Result<Reply, Errno> {
        let client = &self.client;
        let caller = caller_of(caller);
        match operation {
            Operation::Symlink { name, target } => {
                let new = NewInode::Symlink { target: target.to_vec() };
                let changing = self.names.change(directory, name_of(name)?);
                let attr = client.create(caller, directory, name, 0o777, new).await?;
                changing.done();
                Ok(Reply::Entry(self.entry_of(directory, name, &attr)))
            }
            Operation::MkNod { name, mode, rdev, umask } => {
                let new = match mode & libc::S_IFMT {
                    libc::S_IFREG | 0 => NewInode::File { open: None },
                    libc::S_IFIFO | libc::S_IFSOCK | libc::S_IFCHR | libc::S_IFBLK => {
                        NewInode::Special { rdev }
                    }
                    _ => return Err(Errno::INVAL),
                };
                let mode = NewMode { bits: mode, umask };
                let changing = self.names.change(directory, name_of(name)?);
                let attr = client.create(caller, directory, name, mode, new).await?;
                changing.done();
                Ok(Reply::Entry(self.entry_of(directory, name, &attr)))
            }
            Operation::MkDir { name, mode, umask } => {
                let mode = NewMode { bits: mode, umask };
                let changing = self.names.change(directory, name_of(name)?);
                let attr =
                    client.create(caller, directory, name, mode, NewInode::Directory).await?;
                changing.done();
                self.names.made(attr.ino, attr.change, reactor::now());
                self.places.agrees(attr.ino, directory, name);
                Ok(Reply::Entry(self.entry_of(directory, name, &attr)))
            }
            Operation::Unlink { name } => {
                let changing = self.names.change(directory, name_of(name)?);
                client.unlink(caller, directory, name).await.map_err(of_removal)?;
                changing.done();
                self.trust.removed(directory, name);
                Ok(Reply::Done)
            }
            Operation::RmDir { name } => {
                let changing = self.names.change(directory, name_of(name)?);
                client.remove_dir(caller, directory, name).await.map_err(of_removal)?;
                changing.done();
                self.trust.removed(directory, name);
                self.places.removed(directory, name);
                Ok(Reply::Done)
            }
            Operation::Rename { name, new_parent, new_name, flags } => {
                if flags & !(libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE) != 0 {
                    return Err(Errno::INVAL);
                }
                let from = (directory, name_of(name)?);
                let to = (Ino(new_parent), name_of(new_name)?);
                // It moves one counter or two, or none.
                self.names.forget(from.0);
                self.names.forget(to.0);
                let _moving = self.trust.rename(from, to);
                client.rename(caller, from, to, flags).await?;
                self.places.renamed(from, to, flags & libc::RENAME_EXCHANGE != 0);
                Ok(Reply::Done)
            }
            Operation::Link { inode, new_name } => {
                let changing = self.names.change(directory, name_of(new_name)?);
                let asking = self.bare.ask();
                let attr = client.link(caller, Ino(inode), directory, new_name).await?;
                changing.done();
                self.bare.told(&attr, asking, self.client.attr_valid(&attr).min(VALID));
                // The kernel keeps the access list that it knows here, so it must ask for both soon.
                let entry = self.entry_of(directory, new_name, &attr);
                Ok(Reply::Entry(Entry { attr_valid: Duration::ZERO, ..entry }))
            }
            _ => Err(Errno::IO),
        }
    }

    /// Of a directory with limits what these leave, as XFS shows it for projects (xfs_qm_statvfs).
    async fn space(&self, ino: Ino) -> Result<Reply, Errno> {
        let space = self.client.space_of(ino).await?;
        let blocks = |bytes: u64| bytes / u64::from(FRAGMENT_BYTES);
        Ok(Reply::StatFs(StatFs {
            blocks: blocks(space.total_bytes),
            blocks_free: blocks(space.free_bytes),
            blocks_available: blocks(space.free_bytes),
            files: space.inodes,
            files_free: space.inodes_free,
            // statfs(2) counts in f_bsize, statvfs(3) in f_frsize: one number for both.
            io_bytes: FRAGMENT_BYTES,
            name_bytes_max: NAME_BYTES_MAX as u32,
            fragment_bytes: FRAGMENT_BYTES,
        }))
    }
}

impl Handler for Files {
    async fn handle(&self, request: Request<'_>, message: &Buf) -> Reply {
        self.answer(request, message).await.unwrap_or_else(Reply::from)
    }

    fn reaches(&self, notifier: Weak<Notifier>) {
        self.kernel.set(notifier);
    }

    fn mounted(&self, terms: &Negotiated) {
        self.direct_io.set(terms.flags.contains(InitFlags::DIRECT_IO_ALLOW_MMAP));
    }
}
