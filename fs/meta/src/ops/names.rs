//! Names: lookup, create, link, unlink, rmdir.

use super::{
    Answer, LINKS_MAX, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG, S_ISGID, S_ISVTX, TARGET_BYTES_MAX,
    admit, check_name, count_entry, is_empty, refuse_foreign, target_of, touch_directory,
    touch_inode, uncount_entry, write, xattrs,
};
use crate::clients::DELETIONS_STUCK;
use crate::key;
use crate::row::{Body, Inode, NameRow, OrphanRow, Session};
use crate::table::Effect;
use crate::tx::{Env, Stop, Tx};
use levada_base::ids::{Ino, TargetId};
use levada_wire::attr::{Kind, Layout};
use levada_wire::meta::{Caller, MetaFault, MetaReply, NewInode, NewMode};

/// Cookies below this stand for "before the first", "." and "..".
pub const FIRST_COOKIE: u64 = 3;

/// What to make, and for whom.
pub struct Made<'a> {
    pub caller: Caller,
    pub mode: NewMode,
    pub new: &'a NewInode,
}

pub fn lookup(tx: &mut Tx<'_>, parent: Ino, name: &[u8]) -> Answer {
    if name == b"." {
        let inode = tx.live(parent)?;
        return Ok(MetaReply::Attr(tx.attr(parent, &inode)));
    }
    tx.load(&[key::inode(parent), key::name(parent, name)])?;
    let directory = tx.directory(parent)?;
    let ino = if name == b".." {
        directory.parent
    } else {
        check_name(name)?;
        // Also that it is not there.
        tx.tell_names(parent);
        tx.name(parent, name)?.ok_or(MetaFault::NotFound)?.ino
    };
    let inode = target_of(tx, ino)?;
    tx.tell_node(ino, &inode);
    Ok(MetaReply::Attr(tx.attr(ino, &inode)))
}

pub fn create(
    tx: &mut Tx<'_>,
    parent: Ino,
    name: &[u8],
    made: &Made<'_>,
    exclusive: bool,
) -> Answer {
    check_name(name)?;
    tx.load(&[key::inode(parent), key::name(parent, name)])?;
    let mut directory = tx.directory(parent)?;
    tx.tell_names(parent);
    if let Some(found) = tx.name(parent, name)? {
        return open_found(tx, found, made.new, exclusive);
    }
    let ino = new_number(tx)?;
    let inode = new_inode(tx, ino, parent, &directory, made)?;
    admit(tx, None, &inode)?;
    let kind = inode.kind();
    if kind == Kind::Directory {
        if directory.nlink >= LINKS_MAX {
            return Err(MetaFault::TooManyLinks.into());
        }
        directory.nlink += 1;
        tx.made_directory(ino);
        // It has none, as yet.
        tx.tell_names(ino);
    }
    let cookie = count_entry(&mut directory);
    touch_directory(tx, &mut directory);
    tx.put_inode(parent, &directory);
    tx.put_entry(parent, name, NameRow { cookie, ino, kind });
    Ok(put_new(tx, ino, &inode, made))
}

/// Makes and opens a file without a name. Its directory does not change.
pub fn create_unnamed(tx: &mut Tx<'_>, parent: Ino, made: &Made<'_>, may_link: bool) -> Answer {
    let directory = tx.directory(parent)?;
    let ino = new_number(tx)?;
    let inode = Inode { nlink: 0, ..new_inode(tx, ino, parent, &directory, made)? };
    admit(tx, None, &inode)?;
    tx.put_orphan(ino, Some(OrphanRow { may_get_name: may_link }));
    Ok(put_new(tx, ino, &inode, made))
}

/// Counts an inode more.
fn new_number(tx: &mut Tx<'_>) -> Result<Ino, MetaFault> {
    if tx.counters.inodes >= tx.env.superblock.inodes_max {
        // Those of deleted files are counted as free already, and come soon; unless a target is silent.
        let comes = tx.counters.doomed_inodes > 0
            && tx.table.deletions.progress.elapsed() < DELETIONS_STUCK;
        return Err(if comes { MetaFault::Unavailable } else { MetaFault::Full });
    }
    let ino = Ino(tx.counters.next_ino);
    tx.counters.next_ino += 1;
    tx.counters.inodes += 1;
    Ok(ino)
}

/// Writes an inode that is made now, opened for its maker if that is asked for.
fn put_new(tx: &mut Tx<'_>, ino: Ino, inode: &Inode, made: &Made<'_>) -> MetaReply {
    tx.put_inode(ino, inode);
    // As yet nobody has written; the maker knows of the session.
    let attr = tx.attr(ino, inode);
    if let NewInode::File { open: Some(mode) } = made.new {
        tx.effect(Effect::Opened(ino));
        if mode.write {
            tx.put_session(ino, tx.client, Some(Session { writing: true, ..Session::default() }));
        }
    }
    tx.tell_node(ino, inode);
    MetaReply::Entry(attr, true)
}

/// The name is taken.
fn open_found(tx: &mut Tx<'_>, found: NameRow, new: &NewInode, exclusive: bool) -> Answer {
    let NewInode::File { open } = new else { return Err(MetaFault::Exists.into()) };
    if exclusive {
        return Err(MetaFault::Exists.into());
    }
    let ino = found.ino;
    match (found.kind, open) {
        (Kind::Directory, _) => Err(MetaFault::IsDirectory.into()),
        (Kind::File, Some(mode)) => match write::open(tx, ino, *mode)? {
            MetaReply::Attr(attr) => Ok(MetaReply::Entry(attr, false)),
            other => Ok(other),
        },
        // The caller follows a link itself, and opens a special file without the service.
        (Kind::File | Kind::Symlink | Kind::Special, _) => {
            let inode = target_of(tx, ino)?;
            tx.tell_node(ino, &inode);
            Ok(MetaReply::Entry(tx.attr(ino, &inode), false))
        }
    }
}

fn new_inode(
    tx: &Tx<'_>,
    ino: Ino,
    parent: Ino,
    directory: &Inode,
    made: &Made<'_>,
) -> Result<Inode, Stop> {
    let (kind_bits, body, size, nlink, rdev) = match made.new {
        NewInode::File { .. } => (S_IFREG, Body::File(layout_for(tx.env, ino)), 0, 1, 0),
        NewInode::Directory => {
            let body = Body::Directory { next_cookie: FIRST_COOKIE, entries: 0 };
            (S_IFDIR, body, 0, 2, 0)
        }
        NewInode::Symlink { target } => {
            if target.len() > TARGET_BYTES_MAX {
                return Err(MetaFault::NameTooLong.into());
            }
            if target.is_empty() || target.contains(&0) {
                return Err(MetaFault::Invalid.into());
            }
            (S_IFLNK, Body::Symlink(target.clone()), target.len() as u64, 1, 0)
        }
        NewInode::Special { rdev } => {
            let kind_bits = made.mode.bits & S_IFMT;
            if matches!(kind_bits, 0 | S_IFREG | S_IFDIR | S_IFLNK) {
                return Err(MetaFault::Invalid.into());
            }
            (kind_bits, Body::Special, 0, 1, *rdev)
        }
    };
    let mut mode = kind_bits | (made.mode.bits & !S_IFMT);
    let mut gid = made.caller.gid;
    // inode_init_owner of Linux, and mkdir(2): a set-group-id directory hands its group on.
    if directory.mode & S_ISGID != 0 {
        gid = directory.gid;
        if kind_bits == S_IFDIR {
            mode |= S_ISGID;
        }
    }
    let generation = tx.env.superblock.generation;
    let mut inode = Inode {
        uid: made.caller.uid,
        gid,
        rdev,
        size,
        project: directory.project,
        tenant: directory.tenant,
        ..Inode::new(generation, mode, nlink, tx.now, parent, body)
    };
    xattrs::inherit(&mut inode, directory, made.mode.umask);
    Ok(inode)
}

/// A new file's. The first target takes turns, so that small files spread evenly.
fn layout_for(env: &Env, ino: Ino) -> Layout {
    layout_on(&env.usable.borrow(), env, ino)
}

/// Of a file of which nobody knows what was usable when it was made: as wide as any.
pub fn unknown_layout(env: &Env, ino: Ino) -> Layout {
    Layout { version: Layout::UNKNOWN, ..layout_on(&env.targets, env, ino) }
}

fn layout_on(targets: &[TargetId], env: &Env, ino: Ino) -> Layout {
    let first = (ino.0 % targets.len() as u64) as usize;
    let count = (env.superblock.stripe_count as usize).clamp(1, targets.len().min(64));
    Layout {
        version: Layout::FIRST,
        stripe_unit: env.superblock.stripe_unit,
        targets: (0..count).map(|i| targets[(first + i) % targets.len()]).collect(),
    }
}

pub fn link(tx: &mut Tx<'_>, ino: Ino, parent: Ino, name: &[u8]) -> Answer {
    check_name(name)?;
    tx.load(&[key::inode(ino), key::inode(parent), key::name(parent, name)])?;
    let mut inode = tx.live(ino)?;
    let mut directory = tx.directory(parent)?;
    if inode.kind() == Kind::Directory {
        return Err(MetaFault::NotPermitted.into());
    }
    if tx.name(parent, name)?.is_some() {
        return Err(MetaFault::Exists.into());
    }
    if inode.nlink == 0 {
        // Only what never had a name may get one: what has lost its last one is on its way out for everybody else.
        if !tx.orphan(ino).is_some_and(|orphan| orphan.may_get_name) {
            return Err(MetaFault::NotFound.into());
        }
        tx.put_orphan(ino, None);
        inode.parent = parent;
    }
    if inode.nlink >= LINKS_MAX {
        return Err(MetaFault::TooManyLinks.into());
    }
    refuse_foreign(&directory, &inode)?;
    inode.nlink += 1;
    touch_inode(tx, &mut inode);
    let cookie = count_entry(&mut directory);
    touch_directory(tx, &mut directory);
    tx.put_inode(ino, &inode);
    tx.put_inode(parent, &directory);
    tx.put_entry(parent, name, NameRow { cookie, ino, kind: inode.kind() });
    tx.tell_names(parent);
    tx.tell_node(ino, &inode);
    Ok(MetaReply::Attr(tx.attr(ino, &inode)))
}

/// In a sticky directory only the owner of the file, of the directory, or root takes names away.
pub(super) fn check_sticky(
    caller: Caller,
    directory: &Inode,
    inode: &Inode,
) -> Result<(), MetaFault> {
    let owner = [0, inode.uid, directory.uid].contains(&caller.uid);
    if directory.mode & S_ISVTX != 0 && !owner {
        return Err(MetaFault::NotPermitted);
    }
    Ok(())
}

pub fn unlink(tx: &mut Tx<'_>, caller: Caller, parent: Ino, name: &[u8]) -> Answer {
    check_name(name)?;
    tx.load(&[key::inode(parent), key::name(parent, name)])?;
    let mut directory = tx.directory(parent)?;
    let row = tx.name(parent, name)?.ok_or(MetaFault::NotFound)?;
    if row.kind == Kind::Directory {
        return Err(MetaFault::IsDirectory.into());
    }
    let inode = target_of(tx, row.ino)?;
    check_sticky(caller, &directory, &inode)?;
    uncount_entry(&mut directory)?;
    touch_directory(tx, &mut directory);
    tx.put_inode(parent, &directory);
    tx.delete_entry(parent, name, row.cookie);
    let nlink = lose_name(tx, row.ino, inode);
    Ok(MetaReply::Removed { ino: Some(row.ino), nlink })
}

pub fn remove_dir(tx: &mut Tx<'_>, caller: Caller, parent: Ino, name: &[u8]) -> Answer {
    check_name(name)?;
    tx.load(&[key::inode(parent), key::name(parent, name)])?;
    let mut directory = tx.directory(parent)?;
    let row = tx.name(parent, name)?.ok_or(MetaFault::NotFound)?;
    if row.kind != Kind::Directory {
        return Err(MetaFault::NotDirectory.into());
    }
    let inode = target_of(tx, row.ino)?;
    check_sticky(caller, &directory, &inode)?;
    if !is_empty(&inode) {
        return Err(MetaFault::NotEmpty.into());
    }
    uncount_entry(&mut directory)?;
    directory.nlink -= 1;
    touch_directory(tx, &mut directory);
    tx.put_inode(parent, &directory);
    tx.delete_entry(parent, name, row.cookie);
    let nlink = lose_name(tx, row.ino, inode);
    Ok(MetaReply::Removed { ino: Some(row.ino), nlink })
}

/// An inode whose entry is gone: one name less, or released. Says how many names are left.
pub(super) fn lose_name(tx: &mut Tx<'_>, ino: Ino, mut inode: Inode) -> u32 {
    // A directory has one name; its own "." goes with it.
    inode.nlink = if inode.kind() == Kind::Directory { 0 } else { inode.nlink - 1 };
    touch_inode(tx, &mut inode);
    if inode.nlink == 0 {
        tx.release(ino, &mut inode);
    } else {
        tx.put_inode(ino, &inode);
    }
    inode.nlink
}
