//! Keys of the metadata rows: one tag byte, then big-endian numbers, so that they sort.
//!
//! `docs/design/0007-metadata.md` draws them.

use crate::row::{Subject, SubjectKind};
use levada_base::ids::Ino;
use smallvec::SmallVec;

/// A key on its way to a lookup; only long names leave the stack.
pub type Key = SmallVec<[u8; 64]>;

pub const INODE: u8 = b'I';
pub const ENTRY: u8 = b'D';
pub const NAME: u8 = b'N';
pub const ORPHAN: u8 = b'O';
pub const DESTROY: u8 = b'X';
pub const SESSION: u8 = b'S';
pub const CLIENT: u8 = b'C';
pub const REPLY: u8 = b'R';
pub const XATTR: u8 = b'A';
pub const USAGE: u8 = b'U';

/// The part of an account that says what is used; the other one, what may be.
pub const USED: u8 = 0;
const QUOTA: u8 = 1;

/// Where the name begins in the key of an entry by name.
pub const NAME_AT: usize = 9;

/// The row that says what file system this is.
pub const SUPERBLOCK: &[u8] = b"M\0";
/// The row of the counters.
pub const COUNTERS: &[u8] = b"M\x01";

/// The row of the tail's holder.
pub const TAIL: &[u8] = b"M\x02";

fn build(tag: u8, parts: &[&[u8]]) -> Key {
    let mut key = Key::new();
    key.push(tag);
    for part in parts {
        key.extend_from_slice(part);
    }
    key
}

/// `I|ino`: an inode.
pub fn inode(ino: Ino) -> Key {
    build(INODE, &[&ino.0.to_be_bytes()])
}

/// `D|parent|cookie`: a directory entry, in the order of listing.
pub fn entry(parent: Ino, cookie: u64) -> Key {
    build(ENTRY, &[&parent.0.to_be_bytes(), &cookie.to_be_bytes()])
}

/// `N|parent|name`: a directory entry, by name.
pub fn name(parent: Ino, name: &[u8]) -> Key {
    build(NAME, &[&parent.0.to_be_bytes(), name])
}

/// `O|ino`: without a name, but maybe still open.
pub fn orphan(ino: Ino) -> Key {
    build(ORPHAN, &[&ino.0.to_be_bytes()])
}

/// `X|ino`: its objects are to be destroyed.
pub fn destroy(ino: Ino) -> Key {
    build(DESTROY, &[&ino.0.to_be_bytes()])
}

/// `S|ino|client`: a write session.
pub fn session(ino: Ino, client: u64) -> Key {
    build(SESSION, &[&ino.0.to_be_bytes(), &client.to_be_bytes()])
}

/// `C|client`: a registered client.
pub fn client(client: u64) -> Key {
    build(CLIENT, &[&client.to_be_bytes()])
}

/// `R|client|slot`: the last reply of a slot.
pub fn reply(client: u64, slot: u32) -> Key {
    build(REPLY, &[&client.to_be_bytes(), &slot.to_be_bytes()])
}

/// `A|ino|name`: an extended attribute.
pub fn xattr(ino: Ino, name: &[u8]) -> Key {
    build(XATTR, &[&ino.0.to_be_bytes(), name])
}

fn account(subject: Subject, part: u8) -> Key {
    build(USAGE, &[&[subject.kind.tag()], &subject.id.to_be_bytes(), &[part]])
}

/// `U|kind|id|0`: what a subject uses.
pub fn usage(subject: Subject) -> Key {
    account(subject, USED)
}

/// `U|kind|id|1`: what it may use.
pub fn quota(subject: Subject) -> Key {
    account(subject, QUOTA)
}

/// The subject of a row of an account, and which part it is.
pub fn subject_of(key: &[u8]) -> Option<(Subject, u8)> {
    let [USAGE, kind, a, b, c, d, part @ (USED | QUOTA)] = *key else { return None };
    let (kind, id) = (SubjectKind::of_tag(kind)?, u32::from_be_bytes([a, b, c, d]));
    Some((Subject { kind, id }, part))
}

/// The number behind a key's tag.
pub fn first_number(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?))
}

/// The 64-bit number behind the first one.
pub fn second_number(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(9..17)?.try_into().ok()?))
}

/// The 32-bit number behind the first one.
pub fn second_u32(key: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(key.get(9..13)?.try_into().ok()?))
}

/// The inode that a row belongs to, if it belongs to one.
pub fn ino_of(key: &[u8]) -> Option<Ino> {
    match key.first()? {
        &(INODE | ENTRY | NAME | ORPHAN | DESTROY | SESSION | XATTR) => first_number(key).map(Ino),
        _ => None,
    }
}

/// Behind all rows with this tag of an inode, and before those of the next one.
pub fn behind(tag: u8, ino: Ino) -> Key {
    match ino.0.checked_add(1) {
        Some(next) => build(tag, &[&next.to_be_bytes()]),
        None => build(tag + 1, &[]),
    }
}
