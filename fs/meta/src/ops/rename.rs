//! Rename: replace, exchange, and what must not move where.

use super::names::{check_sticky, lose_name};
use super::{
    Answer, LINKS_MAX, check_name, count_entry, is_empty, refuse_foreign, target_of,
    touch_directory, touch_inode, uncount_entry,
};
use crate::key;
use crate::row::{Inode, NameRow};
use crate::tx::{Stop, Tx};
use levada_base::ids::Ino;
use levada_wire::attr::Kind;
use levada_wire::meta::{Caller, MetaFault, MetaReply};

/// RENAME_NOREPLACE of renameat2(2).
pub const NO_REPLACE: u32 = 1;
/// RENAME_EXCHANGE of renameat2(2).
pub const EXCHANGE: u32 = 2;

pub fn rename(
    tx: &mut Tx<'_>,
    caller: Caller,
    from: (Ino, &[u8]),
    to: (Ino, &[u8]),
    flags: u32,
) -> Answer {
    check_name(from.1)?;
    check_name(to.1)?;
    if !matches!(flags, 0 | NO_REPLACE | EXCHANGE) {
        return Err(MetaFault::Invalid.into());
    }
    tx.load(&[
        key::inode(from.0),
        key::inode(to.0),
        key::name(from.0, from.1),
        key::name(to.0, to.1),
    ])?;
    let from_directory = tx.directory(from.0)?;
    let to_directory = tx.directory(to.0)?;
    let source = tx.name(from.0, from.1)?.ok_or(MetaFault::NotFound)?;
    let target = tx.name(to.0, to.1)?;
    let moved = target_of(tx, source.ino)?;
    check_sticky(caller, &from_directory, &moved)?;
    // In the order in which Linux checks.
    match (target, flags) {
        (Some(_), NO_REPLACE) => return Err(MetaFault::Exists.into()),
        (None, EXCHANGE) => return Err(MetaFault::NotFound.into()),
        _ => {}
    }
    if source.kind == Kind::Directory {
        refuse_own_subtree(tx, source.ino, to.0)?;
    }
    match (target, flags) {
        // Two names of one inode: nothing happens (rename(2)).
        (Some(target), _) if target.ino == source.ino => {
            Ok(MetaReply::Removed { ino: None, nlink: 0 })
        }
        (Some(target), EXCHANGE) => {
            let other = target_of(tx, target.ino)?;
            check_sticky(caller, &to_directory, &other)?;
            if target.kind == Kind::Directory {
                refuse_own_subtree(tx, target.ino, from.0)?;
            }
            if from.0 != to.0 {
                refuse_foreign(&to_directory, &moved)?;
                refuse_foreign(&from_directory, &other)?;
            }
            exchange(tx, (from, source, moved), (to, target, other))
        }
        (Some(target), _) => {
            let other = target_of(tx, target.ino)?;
            check_sticky(caller, &to_directory, &other)?;
            if from.0 != to.0 {
                refuse_foreign(&to_directory, &moved)?;
            }
            replace(tx, (from, source, moved), (to, target, other))
        }
        (None, _) => {
            if from.0 != to.0 {
                refuse_foreign(&to_directory, &moved)?;
            }
            move_name(tx, (from, source, moved), to)
        }
    }
}

/// A name, its row and its inode.
type Named<'a> = ((Ino, &'a [u8]), NameRow, Inode);

/// A directory must not become its own descendant. Walks up from where it would go.
fn refuse_own_subtree(tx: &mut Tx<'_>, moved: Ino, to: Ino) -> Result<(), Stop> {
    let mut at = to;
    while at != Ino::ROOT {
        if at == moved {
            return Err(MetaFault::Invalid.into());
        }
        at = tx.inode(at)?.ok_or(MetaFault::Damaged)?.parent;
    }
    if moved == Ino::ROOT { Err(MetaFault::Invalid.into()) } else { Ok(()) }
}

/// Changes a directory's row: entries or subdirectories come and go.
fn change_directory<T>(
    tx: &mut Tx<'_>,
    ino: Ino,
    change: impl FnOnce(&mut Inode) -> Result<T, MetaFault>,
) -> Result<T, Stop> {
    let mut directory = tx.directory(ino)?;
    let result = change(&mut directory)?;
    touch_directory(tx, &mut directory);
    tx.put_inode(ino, &directory);
    Ok(result)
}

fn links(directory: &mut Inode, kind: Kind, by: i32) -> Result<(), MetaFault> {
    if kind != Kind::Directory {
        return Ok(());
    }
    if by > 0 && directory.nlink >= LINKS_MAX {
        return Err(MetaFault::TooManyLinks);
    }
    directory.nlink = directory.nlink.checked_add_signed(by).ok_or(MetaFault::Damaged)?;
    Ok(())
}

/// The moved inode remembers where it is.
fn arrive(tx: &mut Tx<'_>, ino: Ino, mut inode: Inode, from: Ino, to: Ino) {
    if inode.parent == from {
        inode.parent = to;
    }
    touch_inode(tx, &mut inode);
    tx.put_inode(ino, &inode);
}

fn move_name(tx: &mut Tx<'_>, (from, source, moved): Named<'_>, to: (Ino, &[u8])) -> Answer {
    let kind = source.kind;
    tx.delete_entry(from.0, from.1, source.cookie);
    // Within a directory an entry keeps its place, so that a program which renames while it
    // lists does not meet its own work again.
    let cookie = if from.0 == to.0 {
        change_directory(tx, to.0, |_| Ok(()))?;
        source.cookie
    } else {
        change_directory(tx, from.0, |directory| {
            links(directory, kind, -1)?;
            uncount_entry(directory)
        })?;
        change_directory(tx, to.0, |directory| {
            links(directory, kind, 1)?;
            Ok(count_entry(directory))
        })?
    };
    tx.put_entry(to.0, to.1, NameRow { cookie, ..source });
    arrive(tx, source.ino, moved, from.0, to.0);
    Ok(MetaReply::Removed { ino: None, nlink: 0 })
}

fn replace(
    tx: &mut Tx<'_>,
    (from, source, moved): Named<'_>,
    (to, target, other): Named<'_>,
) -> Answer {
    match (source.kind, target.kind) {
        (Kind::Directory, Kind::Directory) if !is_empty(&other) => {
            return Err(MetaFault::NotEmpty.into());
        }
        (Kind::Directory, Kind::Directory) => {}
        (Kind::Directory, _) => return Err(MetaFault::NotDirectory.into()),
        (_, Kind::Directory) => return Err(MetaFault::IsDirectory.into()),
        (_, _) => {}
    }
    tx.delete_entry(from.0, from.1, source.cookie);
    // Both are directories or neither is: the target's parent keeps its count.
    change_directory(tx, from.0, |directory| {
        links(directory, source.kind, -1)?;
        uncount_entry(directory)
    })?;
    if from.0 != to.0 {
        change_directory(tx, to.0, |_| Ok(()))?;
    }
    // The name was there all the time, so its place in the listing stays too.
    tx.put_entry(to.0, to.1, NameRow { cookie: target.cookie, ..source });
    arrive(tx, source.ino, moved, from.0, to.0);
    let nlink = lose_name(tx, target.ino, other);
    Ok(MetaReply::Removed { ino: Some(target.ino), nlink })
}

fn exchange(
    tx: &mut Tx<'_>,
    (from, source, moved): Named<'_>,
    (to, target, other): Named<'_>,
) -> Answer {
    change_directory(tx, from.0, |directory| {
        links(directory, source.kind, -1)?;
        links(directory, target.kind, 1)
    })?;
    change_directory(tx, to.0, |directory| {
        links(directory, target.kind, -1)?;
        links(directory, source.kind, 1)
    })?;
    tx.put_entry(from.0, from.1, NameRow { cookie: source.cookie, ..target });
    tx.put_entry(to.0, to.1, NameRow { cookie: target.cookie, ..source });
    // Neither is one of the two directories: that would put it into its own subtree. So what was
    // read of them above still holds.
    arrive(tx, source.ino, moved, from.0, to.0);
    arrive(tx, target.ino, other, to.0, from.0);
    Ok(MetaReply::Removed { ino: None, nlink: 0 })
}
