//! Locks: those of programs on all mounts meet at the metadata service.
//!
//! What always holds:
//! - A lock of flock(2) belongs to the open file, by a number that is drawn here and never used again: the kernel's may name
//!   the next open file before the end of the last one has come here.
//! - A POSIX lock goes with the FLUSH of its process; that of an open file (OFD) with its RELEASE, since the
//!   kernel tells of its end in no other way.
//! - What the kernel has cached of the file is from after the lock was taken, or nobody else wrote.
//! - A signal ends a wait only when the service said that there is no lock, or kills the process: then the client
//!   sees to it that none stays.

use super::Files;
use super::interrupt::being_killed;
use super::sharing::Due;
use crate::codec::operation::LockArgs;
use crate::codec::{Errno, FileLock, Reply};
use crate::transport::Notifier;
use futures_util::future::{Either, select};
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_client::{Cancel, Client, File};
use levada_wire::attr::Attr;
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use std::cell::RefCell;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// A close waits so long for its unlock: a process that dies here cannot be killed, and the node may be away.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The way to the kernel, once the transport has one.
#[derive(Clone, Default)]
pub(super) struct Kernel {
    notifier: Rc<RefCell<Weak<Notifier>>>,
    /// What of files that others write is dropped soon.
    pub(super) due: Rc<Due>,
}

impl Kernel {
    /// Of a client whose lost locks take the cached pages of their files with them.
    pub(super) fn of(client: &Client) -> Self {
        let kernel = Self::default();
        let dropping = kernel.clone();
        client.on_lock_lost(Rc::new(move |ino| {
            let kernel = dropping.clone();
            reactor::spawn(async move { kernel.drop_pages(ino).await });
        }));
        kernel
    }

    pub(super) fn set(&self, notifier: Weak<Notifier>) {
        *self.notifier.borrow_mut() = notifier;
    }

    async fn grown(&self, ino: Ino, size: u64, last: u8) {
        let notifier = self.notifier.borrow().upgrade();
        if let Some(notifier) = notifier {
            notifier.grown(ino.0, size, last).await;
        }
    }

    /// False: there is no way to the kernel.
    pub(super) async fn drop_attributes(&self, ino: Ino) -> bool {
        let notifier = self.notifier.borrow().upgrade();
        let Some(notifier) = notifier else { return false };
        notifier.invalidate_attributes(ino.0).await;
        true
    }

    pub(super) async fn drop_name(&self, dir: Ino, name: &[u8]) -> bool {
        let notifier = self.notifier.borrow().upgrade();
        let Some(notifier) = notifier else { return false };
        notifier.invalidate_entry(dir.0, name).await;
        true
    }

    pub(super) async fn drop_range(&self, ino: Ino, offset: u64, bytes: u64) {
        let notifier = self.notifier.borrow().upgrade();
        if let Some(notifier) = notifier {
            notifier.invalidate_range(ino.0, offset, bytes).await;
        }
    }

    pub(super) async fn drop_pages(&self, ino: Ino) {
        self.due.all_dropped(ino);
        let notifier = self.notifier.borrow().upgrade();
        if let Some(notifier) = notifier {
            notifier.invalidate(ino.0).await;
        }
    }
}

/// What the kernel asks for.
fn wanted(lock: &FileLock) -> Result<Option<bool>, Errno> {
    match i32::try_from(lock.kind) {
        Ok(libc::F_UNLCK) => Ok(None),
        Ok(libc::F_RDLCK) => Ok(Some(false)),
        Ok(libc::F_WRLCK) => Ok(Some(true)),
        _ => Err(Errno::INVAL),
    }
}

impl Files {
    /// SETLK and, when it `waits`, SETLKW.
    pub(super) async fn set_lock(
        &self,
        (unique, pid): (u64, u32),
        ino: Ino,
        args: LockArgs,
        waits: bool,
    ) -> Result<Reply, Errno> {
        let (file, owner) = self.lock_owner(ino, &args)?;
        let range = LockRange { start: args.lock.start, end: args.lock.end };
        let Some(exclusive) = wanted(&args.lock)? else {
            file.unlock(owner, range).await?;
            self.handles.set_flock(args.fh, args.flock, None);
            return Ok(Reply::Done);
        };
        // As in Linux: two who hold it shared and both want it alone must not wait for each other.
        if self.handles.flock(args.fh).is_some_and(|held| args.flock && held != exclusive) {
            file.unlock(owner, LockRange::WHOLE).await?;
            self.handles.set_flock(args.fh, true, None);
        }
        let lock = Lock { owner, range, exclusive, pid: args.lock.pid };
        let attr = if waits {
            self.wait_for_lock((unique, pid), &file, lock).await?
        } else {
            let locking = async { Ok(file.lock(lock, None).await?) };
            self.interrupts.unless_killed(unique, pid, locking).await?
        };
        self.handles.set_flock(args.fh, args.flock, Some(exclusive));
        if !self.pages.good_under_lock(&attr) {
            self.renew_cache(&file, &attr).await;
        }
        Ok(Reply::Done)
    }

    /// Others wrote before this lock was taken: neither pages nor the size are from before it when this returns.
    async fn renew_cache(&self, file: &File, attr: &Attr) {
        let ino = file.ino();
        // What a mapping has changed is written by this, so it comes first.
        self.kernel.drop_pages(ino).await;
        // The kernel asks for the size before it reads, but pays no heed to the answer when pages of the file are dropped
        // meanwhile, as those of a shared file are soon after whatever any program here reads of it. It then takes the size
        // that it knows. Not of others: a mapping may just change that byte.
        if attr.size > 0 && (attr.others || file.is_shared()) {
            let at = attr.size - 1;
            let last = file.read(at, 1).await.ok();
            if let Some(last) = last.and_then(|parts| parts.first()?.first().copied()) {
                self.kernel.grown(ino, attr.size, last).await;
                // Others may write that byte: it must not stay.
                self.kernel.drop_range(ino, at, 1).await;
            }
        }
    }

    /// Any signal ends the wait: the kernel starts the call anew where the program wants that.
    async fn wait_for_lock(
        &self,
        (unique, pid): (u64, u32),
        file: &File,
        lock: Lock,
    ) -> Result<Attr, Errno> {
        let cancel = Cancel::default();
        let mut locking = pin!(file.lock(lock, Some(cancel.clone())));
        match select(locking.as_mut(), pin!(self.interrupts.interrupted(unique))).await {
            Either::Left((locked, _)) => Ok(locked?),
            Either::Right(_) => {
                cancel.cancel();
                match select(locking, pin!(being_killed(pid))).await {
                    Either::Left((locked, _)) => Ok(locked?),
                    // The service is away; what comes of it is undone.
                    Either::Right(_) => Err(Errno::INTR),
                }
            }
        }
    }

    pub(super) async fn get_lock(&self, ino: Ino, args: LockArgs) -> Result<Reply, Errno> {
        let (file, owner) = self.lock_owner(ino, &args)?;
        let range = LockRange { start: args.lock.start, end: args.lock.end };
        let exclusive = wanted(&args.lock)?.ok_or(Errno::INVAL)?;
        let asked = Lock { owner, range, exclusive, pid: args.lock.pid };
        let free = FileLock { kind: libc::F_UNLCK as u32, ..args.lock };
        Ok(Reply::Lock(match file.test_lock(asked).await? {
            None => free,
            Some(Lock { range: LockRange { start, end }, exclusive, pid, .. }) => {
                let kind = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
                FileLock { start, end, kind: kind as u32, pid }
            }
        }))
    }

    fn lock_owner(&self, ino: Ino, args: &LockArgs) -> Result<(File, LockOwner), Errno> {
        let file = self.handles.file(ino, args.fh)?;
        let owner = if args.flock {
            LockOwner { sort: LockSort::Flock, id: self.handles.serial(args.fh) }
        } else {
            if !self.handles.locks_for(args.fh, args.owner) {
                return Err(Errno::NOLCK);
            }
            posix(args.owner)
        };
        Ok((file, owner))
    }

    /// A process closes a descriptor: all its locks of the file go, as POSIX has it.
    pub(super) async fn flush(&self, ino: Ino, fh: u64, process: u64) -> Result<Reply, Errno> {
        let file = self.handles.file(ino, fh)?;
        if file.has_locks(posix(process)) {
            self.handles.process_flushed(ino, process);
            let unlocking =
                reactor::spawn(async move { file.unlock(posix(process), LockRange::WHOLE).await });
            match reactor::timeout(FLUSH_LIMIT, unlocking).await {
                Ok(Some(Err(error))) => tracing::warn!(ino = ino.0, %error, "locks stay"),
                Ok(_) => {}
                Err(_) => tracing::debug!(ino = ino.0, "a close does not wait for its unlock"),
            }
        }
        Ok(Reply::Done)
    }

    /// The open file goes, and its own locks with it.
    pub(super) fn release_locks(&self, ino: Ino, fh: u64) -> Result<(), Errno> {
        let file = self.handles.file(ino, fh)?;
        let flock = LockOwner { sort: LockSort::Flock, id: self.handles.serial(fh) };
        let owners = self.handles.left_to(ino, fh).into_iter().map(posix);
        for owner in owners.chain([flock]).filter(|owner| file.has_locks(*owner)) {
            let file = file.clone();
            reactor::spawn(async move {
                if let Err(error) = file.unlock(owner, LockRange::WHOLE).await {
                    tracing::warn!(ino = file.ino().0, %error, "locks stay until the last close");
                }
            });
        }
        Ok(())
    }
}

/// By the kernel's number of a process's files, or of an open file.
fn posix(id: u64) -> LockOwner {
    LockOwner { sort: LockSort::Posix, id }
}
