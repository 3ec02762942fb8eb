//! The requests, each as one synchronous function over a transaction.

pub mod attrs;
pub mod chores;
pub mod locks;
pub mod names;
pub mod rename;
pub mod write;
pub mod xattrs;

use crate::row::{Body, Charge, Inode};
use crate::tx::{Stop, Tx};
use levada_base::ids::Ino;
use levada_base::planted;
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest, NewInode};

/// What an operation answers.
pub type Answer = Result<MetaReply, Stop>;

/// The longest name, in bytes (NAME_MAX).
pub const NAME_BYTES_MAX: usize = 255;
/// The longest symbolic link, in bytes (PATH_MAX less its NUL).
pub const TARGET_BYTES_MAX: usize = 4095;
/// The most names of one inode (and directories in a directory).
pub const LINKS_MAX: u32 = 1_000_000;

pub const S_IFDIR: u32 = 0o040_000;
pub const S_IFREG: u32 = 0o100_000;
pub const S_IFLNK: u32 = 0o120_000;
pub const S_IFMT: u32 = 0o170_000;
pub const S_ISUID: u32 = 0o4000;
pub const S_ISGID: u32 = 0o2000;
pub const S_ISVTX: u32 = 0o1000;
pub const S_IXGRP: u32 = 0o010;

/// Runs a request that needs nothing but rows.
pub fn run(tx: &mut Tx<'_>, request: &MetaRequest) -> Answer {
    use MetaRequest as R;
    match request {
        R::Lookup { parent, name } => names::lookup(tx, *parent, name),
        R::GetAttr { ino } => attrs::get(tx, *ino),
        R::SetAttr { caller, ino, change } => attrs::set(tx, *caller, *ino, change),
        R::Create { caller, parent, name, mode, new, exclusive } => {
            let made = names::Made { caller: *caller, mode: *mode, new };
            names::create(tx, *parent, name, &made, *exclusive)
        }
        R::CreateUnnamed { caller, parent, mode, open, may_link } => {
            let new = &NewInode::File { open: Some(*open) };
            let made = names::Made { caller: *caller, mode: *mode, new };
            names::create_unnamed(tx, *parent, &made, *may_link)
        }
        R::Link { caller: _, ino, parent, name } => names::link(tx, *ino, *parent, name),
        R::Unlink { caller, parent, name } => names::unlink(tx, *caller, *parent, name),
        R::RemoveDir { caller, parent, name } => names::remove_dir(tx, *caller, *parent, name),
        R::Rename { caller, from, from_name, to, to_name, flags } => {
            let (from, to) = ((*from, &from_name[..]), (*to, &to_name[..]));
            rename::rename(tx, *caller, from, to, *flags)
        }
        R::ReadLink { ino } => attrs::read_link(tx, *ino),
        R::Open { ino, mode } => write::open(tx, *ino, *mode),
        R::Close { ino } => write::close(tx, *ino),
        R::BeginWrite { ino } => write::begin(tx, *ino),
        R::CommitWrite { ino, size, mtime, components, end, stored } => {
            let written = write::Written { size: *size, mtime: *mtime, components: *components };
            write::commit(tx, *ino, &written, *end, stored)
        }
        R::Several { requests } => several(tx, requests),
        R::Truncated { ino, size, stored } => write::truncated(tx, *ino, *size, stored),
        R::Space => Ok(chores::space(tx)),
        R::Allowance { ino } => chores::allowance(tx, *ino),
        R::Grant { ino, need, want } => write::grant(tx, *ino, *need, *want),
        R::Destroyed { ino } => chores::destroyed(tx, *ino),
        R::Settled { ino, size, components, change, stored } => {
            chores::settled(tx, *ino, (*size, *components), *change, stored)
        }
        R::GetXattr { ino, name } => xattrs::get(tx, *ino, name),
        R::ListXattrs { ino } => xattrs::list(tx, *ino),
        R::SetXattr { caller, ino, name, value, how } => {
            xattrs::set(tx, *caller, *ino, (name, value), *how)
        }
        R::RemoveXattr { caller, ino, name } => xattrs::remove(tx, *caller, *ino, name),
        R::Lock { ino, lock, ticket } => locks::lock(tx, *ino, lock, *ticket),
        R::Unlock { ino, owner, range } => locks::unlock(tx, *ino, *owner, *range),
        R::CancelWait { ino, ticket } => locks::cancel(tx, *ino, *ticket),
        R::TestLock { ino, lock } => locks::test(tx, *ino, lock),
        R::Register { .. }
        | R::Replay { .. }
        | R::Reclaim { .. }
        | R::ReadDir { .. }
        | R::Sync
        | R::SpaceNow
        | R::Chores { .. }
        | R::Leave
        | R::Bury { .. } => {
            unreachable!("the service answers {request:?} itself")
        }
    }
}

/// Ends of files, as one change.
fn several(tx: &mut Tx<'_>, requests: &[MetaRequest]) -> Answer {
    let mut replies = Vec::with_capacity(requests.len());
    let mut missing = false;
    for request in requests {
        let is_end = matches!(request, MetaRequest::CommitWrite { .. } | MetaRequest::Close { .. });
        match if is_end { run(tx, request) } else { Err(MetaFault::Invalid.into()) } {
            Ok(reply) => replies.push(reply),
            // A refusal comes before the first change.
            Err(Stop::Fault(fault)) => replies.push(MetaReply::Failed(fault)),
            // What else is missing is fetched with it.
            Err(Stop::Missing) => missing = true,
        }
    }
    if missing { Err(Stop::Missing) } else { Ok(MetaReply::Several(replies)) }
}

/// A name that can be made, removed or renamed.
fn check_name(name: &[u8]) -> Result<(), MetaFault> {
    if name.len() > NAME_BYTES_MAX {
        return Err(MetaFault::NameTooLong);
    }
    let special = name.is_empty() || name == b"." || name == b"..";
    if special || name.iter().any(|byte| matches!(byte, 0 | b'/')) {
        return Err(MetaFault::Invalid);
    }
    Ok(())
}

/// Refuses an inode to whom it would belong from now on, where he may have no more. `before` is how it was.
fn admit(tx: &Tx<'_>, before: Option<&Inode>, inode: &Inode) -> Result<(), MetaFault> {
    let Some(charge) = Charge::of(inode) else { return Ok(()) };
    let had = before.and_then(Charge::of).map(|charge| charge.subjects()).unwrap_or_default();
    let accounts = &tx.table.accounts;
    for subject in charge.subjects().into_iter().filter(|subject| !had.contains(subject)) {
        let has_room = accounts.has_inode_for(subject, tx.used(subject), tx.now);
        let bytes = charge.usage().bytes;
        let bytes_fit =
            bytes == 0 || accounts.bytes_left(subject, tx.now).is_none_or(|left| bytes <= left);
        if !has_room || !bytes_fit {
            return Err(MetaFault::Quota);
        }
    }
    Ok(())
}

/// A directory of a project, or tenant, takes nothing that belongs to another one.
fn refuse_foreign(directory: &Inode, inode: &Inode) -> Result<(), MetaFault> {
    let is_foreign = |of: u32, other: u32| of != 0 && of != other;
    let project = is_foreign(directory.project, inode.project);
    if project || is_foreign(directory.tenant, inode.tenant) {
        return Err(MetaFault::OtherProject);
    }
    Ok(())
}

/// The contents of a directory changed.
fn touch_directory(tx: &Tx<'_>, directory: &mut Inode) {
    directory.mtime = tx.now;
    directory.ctime = tx.now;
    directory.change += 1;
}

/// The inode itself changed.
fn touch_inode(tx: &Tx<'_>, inode: &mut Inode) {
    inode.ctime = tx.now;
    inode.change += 1;
}

/// Takes a cookie of a directory for a new entry and counts the entry.
fn count_entry(directory: &mut Inode) -> u64 {
    let Body::Directory { next_cookie, entries } = &mut directory.body else {
        unreachable!("checked to be a directory")
    };
    *entries += 1;
    let cookie = *next_cookie;
    *next_cookie += u64::from(!planted!("meta-cookie-given-twice"));
    directory.size = *entries;
    cookie
}

/// One entry less.
fn uncount_entry(directory: &mut Inode) -> Result<(), MetaFault> {
    let Body::Directory { entries, .. } = &mut directory.body else {
        unreachable!("checked to be a directory")
    };
    *entries = entries.checked_sub(1).ok_or(MetaFault::Damaged)?;
    directory.size = *entries;
    Ok(())
}

/// True when the directory holds no name.
fn is_empty(directory: &Inode) -> bool {
    matches!(directory.body, Body::Directory { entries: 0, .. })
}

/// The inode behind an entry, which must be there.
fn target_of(tx: &mut Tx<'_>, ino: Ino) -> Result<Inode, Stop> {
    let inode = tx.inode(ino)?.filter(|inode| inode.nlink > 0);
    inode.ok_or_else(|| {
        tracing::error!(ino = ino.0, "an entry names an inode that is not there");
        MetaFault::Damaged.into()
    })
}
