//! Attributes: stat, chmod, chown, truncate, utimens, readlink.

use super::{Answer, S_IFMT, S_ISGID, S_ISUID, S_IXGRP, admit, touch_inode, write, xattrs};
use crate::row::{Body, Inode};
use crate::tx::Tx;
use levada_base::ids::Ino;
use levada_wire::attr::Kind;
use levada_wire::meta::{AttrChange, Caller, MetaFault, MetaReply, SetTime};

pub fn get(tx: &mut Tx<'_>, ino: Ino) -> Answer {
    let inode = tx.live(ino)?;
    tx.tell_node(ino, &inode);
    Ok(MetaReply::Attr(tx.attr(ino, &inode)))
}

pub fn read_link(tx: &mut Tx<'_>, ino: Ino) -> Answer {
    match tx.live(ino)?.body {
        Body::Symlink(target) => Ok(MetaReply::Link(target)),
        _ => Err(MetaFault::Invalid.into()),
    }
}

pub fn set(tx: &mut Tx<'_>, caller: Caller, ino: Ino, change: &AttrChange) -> Answer {
    let mut inode = tx.live(ino)?;
    check_owner(caller, &inode, change)?;
    if *change == AttrChange::default() {
        tx.tell_node(ino, &inode);
        return Ok(MetaReply::Attr(tx.attr(ino, &inode)));
    }
    let is_directory = inode.kind() == Kind::Directory;
    if change.uid.is_some() || change.gid.is_some() {
        let before = inode.clone();
        inode.uid = change.uid.unwrap_or(inode.uid);
        inode.gid = change.gid.unwrap_or(inode.gid);
        if caller.uid != 0 {
            admit(tx, Some(&before), &inode)?;
        }
        // chown(2): whoever gets the file did not ask for it to run as them.
        if !is_directory && change.mode.is_none() {
            clear_set_id(&mut inode);
        }
        xattrs::drop_capability(tx, ino, &mut inode);
    }
    if let Some(mode) = change.mode {
        inode.mode = (inode.mode & S_IFMT) | (mode & !S_IFMT);
        if let Some(acl) = &mut inode.access_acl {
            acl.set_mode(mode);
        }
    }
    if let Some(size) = change.size {
        write::set_size(tx, ino, &mut inode, size)?;
        inode.mtime = tx.now;
        if caller.uid != 0 {
            clear_set_id(&mut inode);
        }
    }
    let time = |set: SetTime| match set {
        SetTime::Now => tx.now,
        SetTime::To(time) => time,
    };
    inode.atime = change.atime.map_or(inode.atime, time);
    inode.mtime = change.mtime.map_or(inode.mtime, time);
    touch_inode(tx, &mut inode);
    inode.ctime = change.ctime.unwrap_or(tx.now);
    tx.put_inode(ino, &inode);
    if change.size.is_some() {
        return Ok(MetaReply::Attr(tx.attr_to_cut(ino, &inode)));
    }
    tx.tell_node(ino, &inode);
    Ok(MetaReply::Attr(tx.attr(ino, &inode)))
}

/// Ownership rules of chmod(2), chown(2) and utimensat(2); access modes are the kernel's.
fn check_owner(caller: Caller, inode: &Inode, change: &AttrChange) -> Result<(), MetaFault> {
    if caller.uid == 0 {
        return Ok(());
    }
    let owner = caller.uid == inode.uid;
    let explicit_time = [change.atime, change.mtime].iter().flatten().any(|time| {
        let SetTime::To(_) = time else { return false };
        true
    });
    let only_owner = change.mode.is_some() || change.gid.is_some() || explicit_time;
    let gives_away = change.uid.is_some_and(|uid| !owner || uid != inode.uid);
    if gives_away || (only_owner && !owner) {
        return Err(MetaFault::NotPermitted);
    }
    Ok(())
}

/// Takes away set-user-id, and set-group-id where it means that (not mandatory locking).
pub(super) fn clear_set_id(inode: &mut Inode) {
    inode.mode &= !S_ISUID;
    if inode.mode & S_IXGRP != 0 {
        inode.mode &= !S_ISGID;
    }
}
