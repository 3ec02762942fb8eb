//! Extended attributes and access control lists (xattr(7), acl(5)).
//!
//! The kernel asks for attributes that hardly any file has: for `security.capability` before the first write of each
//! file, for the access list when somebody else than its owner uses it, and `ls` asks for both. Attributes of an inode
//! tell whether it has any, so where it has none the mount answers that itself, for as long as the kernel may trust
//! the rest of what it was told.

use super::{Files, MOUNT, caller_of};
use crate::codec::abi::SETXATTR_ACL_KILL_SGID;
use crate::codec::{Caller, Errno, Reply};
use levada_base::ids::Ino;
use levada_base::reactor::{self, Instant};
use levada_client::Error;
use levada_wire::attr::Attr;
use levada_wire::meta::SetXattr;
use levada_wire::xattr::Sort;
use lru::LruCache;
use std::cell::{Cell, RefCell};
use std::num::NonZeroUsize;
use std::time::Duration;

/// Inodes that are known to have none.
const BARE_MAX: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not zero");

/// The inodes that have no extended attributes, and until when that may be said.
pub(super) struct Bare {
    until: RefCell<LruCache<Ino, Instant>>,
    /// Counts the beginnings and ends of this mount's changes of attributes.
    turns: Cell<u64>,
}

/// A question whose answer may tell that an inode has none.
#[derive(Clone, Copy)]
pub(super) struct Asking {
    turn: u64,
}

impl Default for Bare {
    fn default() -> Self {
        Self { until: RefCell::new(LruCache::new(BARE_MAX)), turns: Cell::new(0) }
    }
}

impl Bare {
    pub(super) fn ask(&self) -> Asking {
        Asking { turn: self.turns.get() }
    }

    /// The answer, which may be trusted for so long.
    pub(super) fn told(&self, attr: &Attr, asking: Asking, valid: Duration) {
        let mut until = self.until.borrow_mut();
        // With a change of this mount in between, the answer may be from before it.
        if attr.extended || asking.turn != self.turns.get() {
            until.pop(&attr.ino);
        } else {
            until.put(attr.ino, reactor::now() + valid);
        }
    }

    fn has(&self, ino: Ino) -> bool {
        self.until.borrow_mut().get(&ino).is_some_and(|until| reactor::now() < *until)
    }

    /// Another mount is about to change its attributes.
    pub(super) fn forget(&self, ino: Ino) {
        self.until.borrow_mut().pop(&ino);
    }

    /// A change of this mount begins, or ends.
    fn turn(&self, ino: Ino) {
        self.turns.set(self.turns.get() + 1);
        self.until.borrow_mut().pop(&ino);
    }
}

fn sort_of(name: &[u8]) -> Result<Sort, Errno> {
    Sort::of(name).map_err(|fault| Error::from(fault).into())
}

/// As much as the caller has room for; without room, how much there is.
fn answer(bytes: Vec<u8>, room: u32) -> Result<Reply, Errno> {
    match u32::try_from(bytes.len()) {
        Ok(size) if room == 0 => Ok(Reply::XattrSize(size)),
        Ok(size) if size <= room => Ok(Reply::Bytes(bytes)),
        _ => Err(Errno::RANGE),
    }
}

impl Files {
    pub(super) async fn get_xattr(&self, ino: Ino, name: &[u8], room: u32) -> Result<Reply, Errno> {
        sort_of(name)?;
        if self.bare.has(ino) {
            return Err(Errno::NODATA);
        }
        answer(self.client.xattr(ino, name).await?, room)
    }

    pub(super) async fn list_xattrs(
        &self,
        caller: Caller,
        ino: Ino,
        room: u32,
    ) -> Result<Reply, Errno> {
        if self.bare.has(ino) {
            return answer(Vec::new(), room);
        }
        let mut names = self.client.xattrs(ino).await?;
        // Those of the namespace trusted are nobody else's business; the kernel leaves that to the file system.
        if caller.uid != MOUNT.uid {
            let listed = names.split_inclusive(|byte| *byte == 0);
            names =
                listed.filter(|name| !name.starts_with(b"trusted.")).flatten().copied().collect();
        }
        answer(names, room)
    }

    pub(super) async fn set_xattr(
        &self,
        caller: Caller,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        (flags, extra_flags): (u32, u32),
    ) -> Result<Reply, Errno> {
        let sort = sort_of(name)?;
        let clear_set_gid = extra_flags & SETXATTR_ACL_KILL_SGID != 0;
        let how = SetXattr { flags, clear_set_gid };
        let caller = caller_of(caller);
        self.change_xattr(ino, self.client.set_xattr(caller, ino, name, value, how)).await?;
        if sort == Sort::AccessAcl {
            // With the group's bits set-group-id may have come to mean something.
            self.handles.set_id_given(ino);
        }
        Ok(Reply::Done)
    }

    pub(super) async fn remove_xattr(
        &self,
        caller: Caller,
        ino: Ino,
        name: &[u8],
    ) -> Result<Reply, Errno> {
        let sort = sort_of(name)?;
        let removal = self.client.remove_xattr(caller_of(caller), ino, name);
        match self.change_xattr(ino, removal).await {
            // As the file systems of Linux: a list that says no more than the mode is not there to be removed.
            Err(Errno::NODATA) if sort != Sort::Plain => Ok(Reply::Done),
            removed => removed.map(|()| Reply::Done),
        }
    }

    async fn change_xattr(
        &self,
        ino: Ino,
        change: impl Future<Output = Result<(), Error>>,
    ) -> Result<(), Errno> {
        let changing = self.names.change_attributes(ino);
        self.bare.turn(ino);
        let changed = change.await;
        self.bare.turn(ino);
        changed?;
        changing.done();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::attrs::tests::attr;
    use levada_base::reactor::Reactor;

    const FILE: Ino = Ino(7);

    #[test]
    fn an_inode_is_bare_until_something_else_is_known() {
        Reactor::simulated(1).block_on(async {
            let bare = Bare::default();
            let (without, with) = (attr(FILE), Attr { extended: true, ..attr(FILE) });
            let valid = Duration::from_secs(1);
            assert!(!bare.has(FILE), "never told");
            bare.told(&without, bare.ask(), valid);
            assert!(bare.has(FILE));
            reactor::sleep(valid).await;
            assert!(!bare.has(FILE), "another mount may have set one");
            bare.told(&without, bare.ask(), valid);
            bare.told(&with, bare.ask(), valid);
            assert!(!bare.has(FILE));
            // What was asked before a change of this mount ended may be from before it.
            let early = bare.ask();
            bare.turn(FILE);
            bare.told(&without, early, valid);
            assert!(!bare.has(FILE));
            let between = bare.ask();
            bare.told(&without, between, valid);
            bare.turn(FILE);
            assert!(!bare.has(FILE));
            bare.told(&without, between, valid);
            assert!(!bare.has(FILE));
        });
    }
}
