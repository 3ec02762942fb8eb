//! A directory of the file system in place of the whole: for a guest that may see no more.
//!
//! A kernel on this machine asks only for inodes that it was told of. That of a virtual machine asks for whatever it likes, and an
//! inode's number is easily guessed, so this stands before the handler and lets only those pass that this kernel was told of: what it has
//! looked up, made or listed, from the directory downwards, until it says that it has forgotten it (FORGET). What
//! another one moves out of the directory stays known until then, as a file that is open does.
//!
//! What always holds:
//! - The kernel's node 1 is the directory.
//! - No request reaches the handler that names an inode the kernel was not told of, in whatever field.
//! - What is told is counted as the kernel counts it (fuse.h, `nlookup`), so what it has forgotten is not known any more. Where
//!   an answer is lost on its way something may stay known for longer.
//! - What is known is bounded: beyond it names that are new are refused with ENFILE, before anything is made.

use crate::handler::Handler;
use crate::transport::Notifier;
use levada_base::Buf;
use levada_base::ids::Ino;
use levada_fuse::codec::operation::CopyArgs;
use levada_fuse::codec::{
    Entry, Errno, InitFlags, Limits, Negotiated, Operation, ROOT_INODE, Records, Reply, Request,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Weak;

/// Inodes that a kernel may know at once, at some 40 bytes each. A kernel forgets what it has no memory for, and needs a kilobyte
/// for each itself.
const KNOWN_MAX: usize = 4 << 20;

/// What a handler serves, from one directory on. Lives on one core.
pub struct Subtree<H> {
    handler: H,
    root: Ino,
    known: RefCell<Known>,
}

/// How often the kernel was told of each inode, less what it has forgotten; without the root.
struct Known {
    lookups: HashMap<u64, u64>,
    most: usize,
}

impl Known {
    fn has(&self, inode: u64) -> bool {
        self.lookups.contains_key(&inode)
    }

    fn has_room(&self) -> bool {
        self.lookups.len() < self.most
    }

    fn told(&mut self, inode: u64) {
        *self.lookups.entry(inode).or_default() += 1;
    }

    fn forget(&mut self, inode: u64, lookups: u64) {
        if let Some(known) = self.lookups.get_mut(&inode) {
            *known = known.saturating_sub(lookups);
            if *known == 0 {
                self.lookups.remove(&inode);
            }
        }
    }
}

/// What the answer to a request may tell of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tells {
    /// No inode, or one that is known.
    Nothing,
    /// One by its name, new or not.
    Found,
    /// One that was made, or got another name.
    Made,
    /// Those of a directory's names, with attributes if `plus`.
    Names { plus: bool, of_root: bool },
}

impl<H> Subtree<H> {
    /// What to offer the kernel in the place of what `limits` of the handler say: no handles of files that outlive what the kernel
    /// knows (EXPORT_SUPPORT), which a file server in the guest would ask for by their numbers.
    #[must_use]
    pub fn limits(limits: Limits) -> Limits {
        Limits { wanted: limits.wanted - InitFlags::EXPORT_SUPPORT, ..limits }
    }

    /// What `handler` serves, with the directory `root` in place of its own.
    pub fn new(handler: H, root: Ino) -> Self {
        Self::knowing_at_most(handler, root, KNOWN_MAX)
    }

    /// The same, for a kernel that may know so many inodes at once.
    pub fn knowing_at_most(handler: H, root: Ino, most: usize) -> Self {
        Self { handler, root, known: RefCell::new(Known { lookups: HashMap::new(), most }) }
    }

    /// The inode that the kernel means.
    fn named(&self, inode: u64) -> Result<u64, Errno> {
        match inode {
            ROOT_INODE => Ok(self.root.0),
            _ if self.known.borrow().has(inode) => Ok(inode),
            _ => Err(Errno::STALE),
        }
    }

    /// The kernel may learn of an inode that it does not know yet.
    fn room(&self) -> Result<(), Errno> {
        if self.known.borrow().has_room() { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// The same request, in the handler's numbers, and what its answer may tell.
    fn admit<'a>(&self, request: Request<'a>) -> Result<(Request<'a>, Tells), Errno> {
        let Request { inode, operation, .. } = request;
        let (operation, tells) = match operation {
            // These are about no inode.
            Operation::Interrupt { .. } | Operation::Destroy => {
                return Ok((Request { inode: 0, operation, ..request }, Tells::Nothing));
            }
            // Only file servers ask for it, and above the root it is nobody's business.
            Operation::Lookup { name: b".." } => return Err(Errno::STALE),
            Operation::Lookup { .. } => (operation, Tells::Found),
            Operation::Create { .. }
            | Operation::MkNod { .. }
            | Operation::MkDir { .. }
            | Operation::Symlink { .. }
            | Operation::TmpFile { .. } => {
                self.room()?;
                (operation, Tells::Made)
            }
            Operation::Link { inode, new_name } => {
                (Operation::Link { inode: self.named(inode)?, new_name }, Tells::Made)
            }
            Operation::Rename { name, new_parent, new_name, flags } => {
                let new_parent = self.named(new_parent)?;
                (Operation::Rename { name, new_parent, new_name, flags }, Tells::Nothing)
            }
            Operation::CopyFileRange(args) => {
                (Operation::CopyFileRange(self.copy_args(args)?), Tells::Nothing)
            }
            Operation::CopyFileRange64(args) => {
                (Operation::CopyFileRange64(self.copy_args(args)?), Tells::Nothing)
            }
            Operation::ReadDir(_) | Operation::ReadDirPlus(_) => {
                let plus = matches!(operation, Operation::ReadDirPlus(_));
                (operation, Tells::Names { plus, of_root: inode == ROOT_INODE })
            }
            // Each of these is about the request's own inode alone: spelt out, so that a new one has to be looked at.
            Operation::GetAttr { .. }
            | Operation::Statx { .. }
            | Operation::SetAttr(_)
            | Operation::ReadLink
            | Operation::Unlink { .. }
            | Operation::RmDir { .. }
            | Operation::Open(_)
            | Operation::Read(_)
            | Operation::Write(_)
            | Operation::StatFs
            | Operation::Release(_)
            | Operation::Fsync { .. }
            | Operation::SetXattr { .. }
            | Operation::GetXattr { .. }
            | Operation::ListXattr { .. }
            | Operation::RemoveXattr { .. }
            | Operation::Flush { .. }
            | Operation::OpenDir(_)
            | Operation::ReleaseDir(_)
            | Operation::FsyncDir { .. }
            | Operation::GetLk(_)
            | Operation::SetLk(_)
            | Operation::SetLkW(_)
            | Operation::Access { .. }
            | Operation::Fallocate { .. }
            | Operation::LSeek { .. }
            | Operation::SyncFs
            | Operation::Forget { .. }
            | Operation::BatchForget(_)
            | Operation::Init(_)
            | Operation::Unknown { .. } => (operation, Tells::Nothing),
        };
        Ok((Request { inode: self.named(inode)?, operation, ..request }, tells))
    }

    fn copy_args(&self, args: CopyArgs) -> Result<CopyArgs, Errno> {
        Ok(CopyArgs { inode_out: self.named(args.inode_out)?, ..args })
    }

    /// Notes what an answer tells the kernel of.
    fn tell(&self, reply: Reply, tells: Tells) -> Reply {
        match (tells, reply) {
            (Tells::Found, Reply::Entry(entry)) => {
                self.found(entry).map_or_else(Reply::from, Reply::Entry)
            }
            // There was room before; what others were told meanwhile is no more than they had under way.
            (Tells::Made, reply @ (Reply::Entry(entry) | Reply::Create { entry, .. })) => {
                self.known.borrow_mut().told(entry.inode);
                reply
            }
            (Tells::Names { plus, of_root }, Reply::Bytes(mut body)) => {
                self.names(&mut body, plus, of_root);
                Reply::Bytes(body)
            }
            (_, reply) => reply,
        }
    }

    fn found(&self, entry: Entry) -> Result<Entry, Errno> {
        let inode = entry.inode;
        // `.` of the root.
        if inode == self.root.0 {
            return Ok(Entry { inode: ROOT_INODE, ..entry });
        }
        let mut known = self.known.borrow_mut();
        // Zero says that there is no such name.
        if inode != 0 {
            if !known.has(inode) && !known.has_room() {
                return Err(Errno::NFILE);
            }
            known.told(inode);
        }
        Ok(entry)
    }

    fn names(&self, body: &mut [u8], plus: bool, of_root: bool) {
        let mut known = self.known.borrow_mut();
        for mut record in Records::of(body, plus) {
            match record.looked_up() {
                // The kernel looks it up when it is used, and is told then.
                Some(inode) if !known.has(inode) && !known.has_room() => {
                    record.without_attributes();
                }
                Some(inode) => known.told(inode),
                None => {}
            }
            if of_root && record.name() == b".." {
                record.set_listed(self.root.0);
            }
        }
    }
}

impl<H: Handler> Handler for Subtree<H> {
    async fn handle(&self, request: Request<'_>, message: &Buf) -> Reply {
        // What is behind keeps no count.
        match &request.operation {
            Operation::Forget { lookups } => {
                self.known.borrow_mut().forget(request.inode, *lookups);
                return Reply::Silent;
            }
            Operation::BatchForget(list) => {
                let mut known = self.known.borrow_mut();
                list.iter().for_each(|(inode, lookups)| known.forget(inode, lookups));
                return Reply::Silent;
            }
            _ => {}
        }
        match self.admit(request) {
            Ok((request, tells)) => self.tell(self.handler.handle(request, message).await, tells),
            Err(errno) => errno.into(),
        }
    }

    fn reaches(&self, notifier: Weak<Notifier>) {
        self.handler.reaches(notifier);
    }

    fn mounted(&self, terms: &Negotiated) {
        self.handler.mounted(terms);
    }
}
