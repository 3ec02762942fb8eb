//! Housekeeping: what the objects' side has finished, and counts.

use super::{Answer, touch_inode, write};
use crate::key;
use crate::row::{Counters, DoomedRow, Session, StoredBytes, Subject, SubjectKind};
use crate::table::Effect;
use crate::tx::{Env, Tx};
use levada_base::ids::Ino;
use levada_wire::meta::{Allowance, MetaFault, MetaReply, MetaRequest};
use smallvec::SmallVec;

pub fn space(tx: &Tx<'_>) -> MetaReply {
    let (inodes, inodes_free) = inodes_free(tx.env, &tx.counters);
    MetaReply::Space { inodes, inodes_free }
}

/// All inodes, and those that are free; deleted ones count as free at once.
pub fn inodes_free(env: &Env, counters: &Counters) -> (u64, u64) {
    let inodes = env.superblock.inodes_max;
    let used = counters.inodes.saturating_sub(counters.doomed_inodes);
    (inodes, inodes.saturating_sub(used))
}

/// What the project and the tenant of an inode leave to it.
pub fn allowance(tx: &mut Tx<'_>, ino: Ino) -> Answer {
    let inode = tx.live(ino)?;
    let (mut bytes, mut inodes) = (None, None);
    let owners = [(SubjectKind::Project, inode.project), (SubjectKind::Tenant, inode.tenant)];
    for (kind, id) in owners.into_iter().filter(|(_, id)| *id != 0) {
        let subject = Subject { kind, id };
        let tighter = |known: Option<Allowance>, other: Option<Allowance>| match (known, other) {
            (Some(known), Some(other)) => Some(known.tighter(other)),
            (known, other) => known.or(other),
        };
        bytes = tighter(bytes, tx.table.accounts.allowed_bytes(subject, tx.now));
        inodes = tighter(inodes, tx.table.accounts.allowed_inodes(subject, tx.now));
    }
    Ok(MetaReply::Allowance { bytes, inodes })
}

/// The objects of an inode on the destroy list are gone, so the inode goes too.
pub fn destroyed(tx: &mut Tx<'_>, ino: Ino) -> Answer {
    if let Some(row) = tx.row(&key::destroy(ino))? {
        let DoomedRow { bytes } = DoomedRow::decode(&row)?;
        tx.delete(&key::destroy(ino));
        tx.delete(&key::inode(ino));
        let counters = &mut tx.counters;
        counters.inodes -= 1;
        // Where the counters are from before these were counted they are too low.
        counters.doomed_inodes = counters.doomed_inodes.saturating_sub(1);
        counters.doomed_bytes = counters.doomed_bytes.saturating_sub(bytes);
        tx.effect(Effect::Destroyed(ino));
    }
    Ok(MetaReply::Done)
}

/// The sessions of clients that are gone end: the objects were asked, or cut, while the inode stood at `change`.
pub fn settled(
    tx: &mut Tx<'_>,
    ino: Ino,
    (size, components): (u64, u64),
    change: u64,
    stored: &[(u32, u64)],
) -> Answer {
    let sessions = tx.sessions(ino);
    let gone: SmallVec<[(u64, Session); 2]> =
        sessions.iter().copied().filter(|(client, _)| is_gone(tx, *client)).collect();
    let Some(mut inode) = tx.inode(ino)?.filter(|_| !gone.is_empty()) else {
        return Ok(MetaReply::Done);
    };
    if inode.change != change {
        return Err(MetaFault::Unavailable.into());
    }
    write::check_stored(&inode, stored)?;
    let is_alone = gone.len() == sessions.len();
    if is_alone {
        // Nobody has written since, and all components were asked.
        let mut found = StoredBytes::default();
        found.take(stored, false);
        inode.stored = Some(found);
    }
    let recorded = (inode.size, inode.components);
    if !sessions.iter().any(|(_, session)| session.cut.is_some()) {
        inode.size = inode.size.max(size);
    }
    inode.components |= components;
    // A time that was synced with all that there is stays. So does one beside a client that still writes: what was found may
    // be its own, and then it has told the time of that, or will.
    if is_alone && (inode.size, inode.components) != recorded {
        inode.mtime = tx.now;
    }
    touch_inode(tx, &mut inode);
    for (client, _) in gone {
        tx.end_settled(ino, client);
    }
    write::settle_row(tx, ino, &mut inode);
    Ok(MetaReply::Done)
}

/// True when a session's client will not end it.
fn is_gone(tx: &Tx<'_>, client: u64) -> bool {
    !tx.table.clients.contains_key(&client)
}

/// What a request may do when the store is full: whatever makes it smaller, or ends something.
pub fn frees(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    matches!(
        request,
        R::Unlink { .. }
            | R::RemoveDir { .. }
            // Writes nothing, and what cannot be opened cannot be copied elsewhere.
            | R::Open { .. }
            | R::Close { .. }
            | R::CommitWrite { .. }
            | R::Several { .. }
            | R::Truncated { .. }
            | R::Destroyed { .. }
            | R::Settled { .. }
            // What is written to a file that is there must not fail for want of metadata.
            | R::Grant { .. }
            | R::SetAttr { .. }
            | R::Rename { .. }
            | R::RemoveXattr { .. }
    )
}
