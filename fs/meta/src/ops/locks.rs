//! Locks of files. They write no rows: what they change is in memory (`crate::locks`).

use super::{Answer, attrs};
use crate::locks::{Owner, Verdict};
use crate::table::Effect;
use crate::tx::Tx;
use levada_base::ids::Ino;
use levada_wire::lock::{Lock, LockOwner, LockRange};
use levada_wire::meta::{MetaFault, MetaReply};

pub fn lock(tx: &mut Tx<'_>, ino: Ino, lock: &Lock, ticket: Option<u64>) -> Answer {
    let may_lock = tx.table.clients.get(&tx.client).is_some_and(|known| known.may_lock.is_some());
    if tx.table.in_grace() || !may_lock {
        return Err(MetaFault::Unavailable.into());
    }
    if tx.table.opens_of(tx.client, ino) == 0 {
        return Err(MetaFault::NotOpen.into());
    }
    let verdict = tx.table.locks.judge(tx.client, ino, lock, ticket)?;
    let reply = match verdict {
        Verdict::Locked => locked(tx, ino)?,
        Verdict::Waiting => MetaReply::Waiting,
    };
    tx.effect(Effect::Lock(ino, *lock, ticket));
    Ok(reply)
}

pub fn unlock(tx: &mut Tx<'_>, ino: Ino, owner: LockOwner, range: LockRange) -> Answer {
    if !range.is_sound() {
        return Err(MetaFault::Invalid.into());
    }
    let of = Owner { client: tx.client, owner };
    if tx.table.locks.splits_too_much(of, ino, range) {
        return Err(MetaFault::TooManyLocks.into());
    }
    tx.effect(Effect::Unlock(ino, owner, range));
    Ok(MetaReply::Done)
}

pub fn cancel(tx: &mut Tx<'_>, ino: Ino, ticket: u64) -> Answer {
    if tx.table.locks.was_granted(tx.client, ticket) {
        return locked(tx, ino);
    }
    tx.effect(Effect::CancelWait(ticket));
    Ok(MetaReply::Done)
}

pub fn test(tx: &mut Tx<'_>, ino: Ino, lock: &Lock) -> Answer {
    if !lock.range.is_sound() {
        return Err(MetaFault::Invalid.into());
    }
    if tx.table.in_grace() {
        return Err(MetaFault::Unavailable.into());
    }
    Ok(MetaReply::Tested(tx.table.locks.in_the_way(tx.client, ino, lock)))
}

/// With the attributes of the file, so that who has the lock need not ask whether what it knows is old.
fn locked(tx: &mut Tx<'_>, ino: Ino) -> Answer {
    match attrs::get(tx, ino)? {
        MetaReply::Attr(attr) => Ok(MetaReply::Locked(attr)),
        other => Ok(other),
    }
}
