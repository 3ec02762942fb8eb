//! Files that are open and written: open, close, write sessions, truncation.
//!
//! What always holds:
//! - While no session is open, no object holds a byte of the file at or past its size.
//! - At most one session has a cut pending, and then the inode's size is that cut.

use super::attrs::clear_set_id;
use super::{Answer, touch_inode, xattrs};
use crate::row::{Body, Charge, Inode, Session};
use crate::table::Effect;
use crate::tx::{Stop, Tx};
use levada_base::ids::Ino;
use levada_wire::attr::{Kind, Time};
use levada_wire::meta::{MetaFault, MetaReply, OpenMode};

/// Clocks of two machines that somebody looks after are not so far apart, nor is the commit from its writes.
const CLOCKS_APART_MAX_NS: u64 = 60_000_000_000;
/// Of what is left one client gets so much at most.
const GRANT_SHARE: u64 = 8;
/// The largest file (off_t).
const SIZE_MAX: u64 = i64::MAX as u64;

pub fn open(tx: &mut Tx<'_>, ino: Ino, mode: OpenMode) -> Answer {
    let mut inode = tx.live(ino)?;
    if inode.kind() == Kind::Directory && (mode.write || mode.truncate) {
        return Err(MetaFault::IsDirectory.into());
    }
    if mode.truncate && inode.kind() == Kind::File {
        set_size(tx, ino, &mut inode, 0)?;
        inode.mtime = tx.now;
        touch_inode(tx, &mut inode);
        tx.put_inode(ino, &inode);
        tx.effect(Effect::Opened(ino));
        return Ok(MetaReply::Attr(tx.attr_to_cut(ino, &inode)));
    }
    tx.effect(Effect::Opened(ino));
    tx.tell_node(ino, &inode);
    Ok(MetaReply::Attr(tx.attr(ino, &inode)))
}

pub fn close(tx: &mut Tx<'_>, ino: Ino) -> Answer {
    // One close too many must not take away what another client holds.
    if tx.own_opens(ino) > 0 {
        tx.effect(Effect::Closed(ino));
    }
    if tx.is_orphan(ino) && !tx.held(ino) {
        reap(tx, ino)?;
    }
    Ok(MetaReply::Done)
}

/// Releases an orphan that nobody holds any more.
pub fn reap(tx: &mut Tx<'_>, ino: Ino) -> Result<(), Stop> {
    if let Some(mut inode) = tx.inode(ino)? {
        tx.release(ino, &mut inode);
    }
    Ok(())
}

/// A file with what it takes to write it.
fn file(tx: &mut Tx<'_>, ino: Ino) -> Result<Inode, Stop> {
    let inode = tx.live(ino)?;
    match inode.kind() {
        Kind::File => Ok(inode),
        Kind::Directory => Err(MetaFault::IsDirectory.into()),
        Kind::Symlink | Kind::Special => Err(MetaFault::Invalid.into()),
    }
}

/// Another client's cut must be over first: until then its size alone counts.
fn refuse_foreign_cut(tx: &Tx<'_>, ino: Ino) -> Result<(), MetaFault> {
    let sessions = tx.sessions(ino);
    let foreign =
        sessions.iter().any(|(client, session)| *client != tx.client && session.cut.is_some());
    if foreign { Err(MetaFault::Unavailable) } else { Ok(()) }
}

pub fn begin(tx: &mut Tx<'_>, ino: Ino) -> Answer {
    let mut inode = file(tx, ino)?;
    refuse_foreign_cut(tx, ino)?;
    let mut session = tx.session(ino).unwrap_or_default();
    if !session.writing {
        session.writing = true;
        tx.begin_write(ino);
        clear_set_id(&mut inode);
        xattrs::drop_capability(tx, ino, &mut inode);
        // Data changes from now on without a word to this service.
        inode.change += 1;
        tx.put_inode(ino, &inode);
        tx.put_session(ino, tx.client, Some(session));
    }
    Ok(MetaReply::Attr(tx.attr(ino, &inode)))
}

/// Sets a file's size; cuts the objects when they may hold more. The caller writes the inode.
pub fn set_size(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode, size: u64) -> Result<(), Stop> {
    match inode.kind() {
        Kind::File => {}
        Kind::Directory => return Err(MetaFault::IsDirectory.into()),
        Kind::Symlink | Kind::Special => return Err(MetaFault::Invalid.into()),
    }
    if size > SIZE_MAX {
        return Err(MetaFault::Invalid.into());
    }
    refuse_foreign_cut(tx, ino)?;
    let sessions = tx.sessions(ino);
    let mut session = tx.session(ino).unwrap_or_default();
    // Growing while a cut is pending would bring cut bytes back.
    if session.cut.is_some_and(|cut| size > cut) {
        return Err(MetaFault::Unavailable.into());
    }
    let written = inode.components != 0 || !sessions.is_empty();
    let grows = sessions.is_empty() && size >= inode.size;
    if written && !grows {
        let asking = tx.client;
        for (client, other) in sessions.iter().filter(|(client, _)| *client != asking) {
            let seen = Session { shared: true, overtaken: true, ..*other };
            tx.put_session(ino, *client, Some(seen));
        }
        session.cut = Some(size);
        tx.put_session(ino, tx.client, Some(session));
    }
    inode.size = size;
    tx.begin_write(ino);
    xattrs::drop_capability(tx, ino, inode);
    Ok(())
}

/// Refuses what no client of a sound mind says of the objects of a file.
pub(super) fn check_stored(inode: &Inode, stored: &[(u32, u64)]) -> Result<(), MetaFault> {
    let Body::File(layout) = &inode.body else { return Err(MetaFault::Invalid) };
    let count = layout.targets.len();
    let is_sound =
        |(component, bytes): &(u32, u64)| (*component as usize) < count && *bytes <= SIZE_MAX;
    if stored.len() <= count && stored.iter().all(is_sound) {
        Ok(())
    } else {
        Err(MetaFault::Invalid)
    }
}

/// Takes over what the asking client says that the objects hold. Beside others it may have asked before they wrote more.
/// So many bytes count as used from now on that were granted before.
fn take_stored(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &mut Inode,
    held: Option<Session>,
    told: &[(u32, u64)],
) -> u64 {
    let Some(stored) = inode.stored.as_mut().filter(|_| !told.is_empty()) else { return 0 };
    let is_alone = held.is_some_and(|session| !session.crowd);
    let before = stored.total();
    stored.take(told, !is_alone);
    let spent = stored.total().saturating_sub(before);
    if held.is_none() {
        // Nobody asks again what was written under a number that is lost.
        tx.ask_objects(ino);
    }
    spent
}

pub fn truncated(tx: &mut Tx<'_>, ino: Ino, size: u64, stored: &[(u32, u64)]) -> Answer {
    let Some(mut session) = tx.session(ino).filter(|session| session.cut == Some(size)) else {
        return Ok(MetaReply::Done);
    };
    let mut inode = tx.live(ino)?;
    check_stored(&inode, stored)?;
    let spent = take_stored(tx, ino, &mut inode, Some(session), stored);
    session.grant = session.grant.saturating_sub(spent);
    session.cut = None;
    tx.put_session(ino, tx.client, Some(session));
    settle_row(tx, ino, &mut inode);
    Ok(MetaReply::Done)
}

/// When the inode changed, for a client that says when it wrote and is believed: it has shown that time since, and a time
/// that moves by itself looks like a change (`tar`, git's index). Not if that is so far off that its clock must be wrong: a
/// backup finds by this time what it has to copy.
fn dated(written: Time, now: Time) -> Time {
    if written.0.abs_diff(now.0) > CLOCKS_APART_MAX_NS { now } else { written }
}

/// Lets the asking client's session add some bytes to what its file's owners use.
pub fn grant(tx: &mut Tx<'_>, ino: Ino, need: u64, want: u64) -> Answer {
    let inode = file(tx, ino)?;
    let session = tx.session(ino).filter(|session| session.writing);
    let session = session.ok_or(MetaFault::Invalid)?;
    let Some(charge) = Charge::of(&inode) else {
        return Ok(MetaReply::Granted { bytes: u64::MAX });
    };
    let accounts = &tx.table.accounts;
    let (mut left, mut unreserved): (Option<u64>, Option<u64>) = (None, None);
    let subjects = charge.subjects();
    for subject in &subjects {
        let Some(room) = accounts.bytes_left(*subject, tx.now) else { continue };
        let reserved = accounts.grants.reserved_by_others(*subject, (ino, tx.client));
        left = Some(left.unwrap_or(u64::MAX).min(room.saturating_sub(reserved)));
        unreserved = Some(unreserved.unwrap_or(u64::MAX).min(room));
    }
    let (Some(left), Some(unreserved)) = (left, unreserved) else {
        return Ok(MetaReply::Granted { bytes: u64::MAX });
    };
    if unreserved < need {
        return Err(MetaFault::Quota.into());
    }
    // Others want some, too.
    let bytes = if left < need { 0 } else { want.min(left / GRANT_SHARE).max(need) };
    tx.effect(Effect::Granted(ino, charge, bytes));
    if session.grant != bytes {
        tx.put_inode(ino, &inode);
        tx.put_session(ino, tx.client, Some(Session { grant: bytes, ..session }));
    }
    Ok(MetaReply::Granted { bytes })
}

/// What a client has written.
pub struct Written {
    pub size: u64,
    pub mtime: Option<Time>,
    pub components: u64,
}

pub fn commit(
    tx: &mut Tx<'_>,
    ino: Ino,
    written: &Written,
    end: bool,
    stored: &[(u32, u64)],
) -> Answer {
    let Written { size, mtime, components } = *written;
    let mut inode = file(tx, ino)?;
    if size > SIZE_MAX {
        return Err(MetaFault::Invalid.into());
    }
    check_stored(&inode, stored)?;
    // Who is told that his bytes are durable must not lose them to a truncation that began before.
    refuse_foreign_cut(tx, ino)?;
    let held = tx.session(ino);
    // Nor is a size believed at once from before a lease was lost.
    let overtaken = size > inode.size && held.is_none_or(|session| session.overtaken);
    let mut session = held.unwrap_or_default();
    let is_taken = session.cut.is_none() && !overtaken;
    let recorded = (inode.size, inode.components);
    if is_taken {
        inode.size = inode.size.max(size);
    }
    inode.components |= components;
    if mtime.is_some() || (inode.size, inode.components) != recorded {
        inode.change += 1;
    }
    // Without a time of the writes they are from before the last change of the attributes, which has dated them.
    if let Some(mtime) = mtime {
        inode.mtime = mtime;
        inode.ctime = inode.ctime.max(dated(mtime, tx.now));
    }
    let spent = take_stored(tx, ino, &mut inode, held, stored);
    let before = session;
    session.grant = session.grant.saturating_sub(spent);
    if overtaken {
        session = Session { writing: true, overtaken: false, ..session };
    } else if end && is_taken {
        session = Session::default();
    }
    if session != before {
        tx.put_session(ino, tx.client, Some(session));
    }
    let mut attr = tx.attr(ino, &inode);
    attr.cut = !is_taken;
    if end && is_taken {
        // Who closes what he has written often looks at it next.
        tx.tell_node(ino, &inode);
    }
    settle_row(tx, ino, &mut inode);
    Ok(MetaReply::Attr(attr))
}

/// Writes an inode of which a session has changed, or releases it if that was its last holder.
pub(super) fn settle_row(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode) {
    if inode.nlink == 0 && !tx.held(ino) {
        tx.release(ino, inode);
    } else {
        tx.put_inode(ino, inode);
    }
}
