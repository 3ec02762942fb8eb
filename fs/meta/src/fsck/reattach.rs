//! Names for inodes whose own were lost: `/lost+found/ino-N`.

use super::repair::{is_plausible, put_inode};
use crate::key;
use crate::ops::S_IFDIR;
use crate::ops::names::FIRST_COOKIE;
use crate::row::{Body, Counters, EntryRow, Inode, NameRow, Superblock};
use crate::service::wall_clock;
use levada_base::ids::Ino;
use levada_kv::{Batch, KvError, Store};
use levada_wire::attr::Kind;

const DIRECTORY: &[u8] = b"lost+found";

/// What gives an inode a name, in one batch; the directory is made when it is not there. None where that cannot be.
pub async fn attach(store: &Store, ino: Ino, mut inode: Inode) -> Result<Option<Batch>, KvError> {
    let mut batch = Batch::default();
    let Some((found, mut directory)) = lost_and_found(store, &mut batch).await? else {
        return Ok(None);
    };
    let name = format!("ino-{}", ino.0);
    let is_taken = store.get(&key::name(found, name.as_bytes())).await?.is_some();
    if is_taken
        || ino == found
        || !enter(&mut batch, found, &mut directory, name.as_bytes(), ino, inode.kind())
    {
        return Ok(None);
    }
    if inode.kind() != Kind::Directory {
        inode.nlink = 1;
    }
    inode.parent = found;
    batch.changes.extend(put_inode(ino, inode).changes);
    batch.changes.extend(put_inode(found, directory).changes);
    Ok(Some(batch))
}

/// The directory, and what makes it.
async fn lost_and_found(store: &Store, batch: &mut Batch) -> Result<Option<(Ino, Inode)>, KvError> {
    let inode = async |ino| {
        let row = store.get(&key::inode(ino)).await?;
        Ok::<_, KvError>(row.and_then(|row| Inode::decode(&row).ok()))
    };
    if let Some(row) = store.get(&key::name(Ino::ROOT, DIRECTORY)).await? {
        let row = NameRow::decode(&row).ok().filter(|row| row.kind == Kind::Directory);
        let Some(row) = row else { return Ok(None) };
        return Ok(inode(row.ino).await?.map(|inode| (row.ino, inode)));
    }
    let superblock = store.get(key::SUPERBLOCK).await?;
    let superblock = superblock.and_then(|row| Superblock::decode(&row).ok());
    let counters = store.get(key::COUNTERS).await?.and_then(|row| Counters::decode(&row).ok());
    let rows = superblock.zip(counters).zip(inode(Ino::ROOT).await?);
    let Some(((superblock, mut counters), mut root)) = rows else { return Ok(None) };
    let ino = Ino(counters.next_ino);
    // Counters that were not put right yet.
    if !is_plausible(superblock.target, ino.0) || inode(ino).await?.is_some() {
        return Ok(None);
    }
    counters.next_ino += 1;
    counters.inodes = counters.inodes.wrapping_add(1);
    if !enter(batch, Ino::ROOT, &mut root, DIRECTORY, ino, Kind::Directory) {
        return Ok(None);
    }
    batch.put(key::COUNTERS, &counters.encode());
    batch.changes.extend(put_inode(Ino::ROOT, root).changes);
    let body = Body::Directory { next_cookie: FIRST_COOKIE, entries: 0 };
    let mode = S_IFDIR | 0o700;
    Ok(Some((ino, Inode::new(superblock.generation, mode, 2, wall_clock(), Ino::ROOT, body))))
}

/// Both rows of an entry; the directory is still to be written.
fn enter(
    batch: &mut Batch,
    parent: Ino,
    directory: &mut Inode,
    name: &[u8],
    ino: Ino,
    kind: Kind,
) -> bool {
    let Body::Directory { next_cookie, entries } = &mut directory.body else { return false };
    let cookie = *next_cookie;
    let Some(next) = cookie.checked_add(1) else { return false };
    (*next_cookie, *entries) = (next, entries.wrapping_add(1));
    directory.size = *entries;
    directory.nlink = directory.nlink.wrapping_add(u32::from(kind == Kind::Directory));
    batch.put(&key::name(parent, name), &NameRow { cookie, ino, kind }.encode());
    batch.put(&key::entry(parent, cookie), &EntryRow::encode(ino, kind, name));
    true
}
