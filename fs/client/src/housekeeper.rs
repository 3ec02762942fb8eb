//! The housekeeper: does what the metadata service cannot, because it needs the objects.
//!
//! Objects of destroyed files are deleted; sessions of clients that are gone are settled: what
//! they wrote is made durable, and the file's size is what its objects say. Every chore is
//! reported when it is done and can be repeated, so a crash loses none.
//!
//! What always holds:
//! - A chore that cannot be done now, because a target is silent, say, holds up no other: it is left, and tried
//!   again with the next look at the list.
//! - A chore is done when every target that it concerns has said so, and not before.
//! - No cut is given up half-way, and its file is left alone until the cut has ended: one that came late would
//!   take what others have written since.

use crate::client::Client;
use crate::error::Error;
use crate::target::ObjectTarget;
use futures_util::future::{join, join_all};
use levada_base::ids::{Ino, ObjectId, TargetId};
use levada_base::reactor;
use levada_wire::attr::{Attr, Layout};
use levada_wire::meta::{MetaReply, MetaRequest, Stored};
use levada_wire::object::ObjectStat;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// Chores asked for at a time; all are done at once.
const CHORES_MAX: u32 = 64;
/// A cut that takes longer goes on without the other chores waiting for it.
const CUT_WITHIN: Duration = Duration::from_secs(15);
const IDLE_MIN: Duration = Duration::from_millis(200);
const IDLE_MAX: Duration = Duration::from_secs(5);

/// What came of a look at the list of chores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    pub done: usize,
    /// Could not be done now.
    pub left: usize,
}

/// Does chores for ever, over a client of its own (class `Background`, no deadline).
pub async fn keep_house(client: Client) {
    let mut idle = IDLE_MIN;
    loop {
        match do_chores(&client).await {
            Ok(Swept { done: 0, .. }) => idle = (idle * 2).min(IDLE_MAX),
            Ok(_) => idle = IDLE_MIN,
            Err(error) => {
                tracing::warn!(%error, "chores failed");
                idle = (idle * 2).min(IDLE_MAX);
            }
        }
        reactor::sleep(idle).await;
    }
}

/// Does the chores that there are now, each at most once.
///
/// # Errors
///
/// What the services say to the list of chores; a chore that fails stays on it.
pub async fn do_chores(client: &Client) -> Result<Swept, Error> {
    let mut swept = Swept::default();
    let mut after = Ino(0);
    loop {
        let request = MetaRequest::Chores { limit: CHORES_MAX, after };
        let (destroy, settle, upto) = match client.0.meta.read(&request).await? {
            MetaReply::Chores { destroy, settle, upto } => (destroy, settle, upto),
            MetaReply::Failed(fault) => return Err(fault.into()),
            _ => return Err(Error::Dialect),
        };
        let destroyed = join_all(destroy.iter().map(|attr| destroy_one(client, attr)));
        let (destroyed, settled) = join(destroyed, settle_all(client, &settle)).await;
        for outcome in destroyed.into_iter().chain(settled) {
            match outcome {
                Ok(()) => swept.done += 1,
                Err(error) => {
                    swept.left += 1;
                    // Of a silent target the log tells once.
                    if error != Error::Deadline {
                        tracing::warn!(%error, "a chore failed");
                    }
                }
            }
        }
        match upto {
            Some(upto) if upto > after => after = upto,
            Some(_) => return Err(Error::Dialect),
            None => return Ok(swept),
        }
    }
}

fn components(attr: &Attr) -> u32 {
    attr.layout.as_ref().map_or(0, |layout| layout.targets.len() as u32)
}

/// The objects that a file may have.
fn doomed_objects(
    client: &Client,
    attr: &Attr,
) -> Result<Vec<(Rc<ObjectTarget>, ObjectId)>, Error> {
    let Some(layout) = attr.layout.as_ref().filter(|layout| layout.version == Layout::UNKNOWN)
    else {
        let objects = (0..components(attr)).map(|component| client.object(attr, component));
        return objects.collect::<Option<_>>().ok_or(Error::Dialect);
    };
    let layout = Layout { version: Layout::FIRST, ..layout.clone() };
    let object = |component| layout.object(client.0.fs_id(), attr.ino, component);
    let on = |target| (0..components(attr)).map(move |component| (Rc::clone(target), component));
    let everywhere = client.0.targets().flat_map(on);
    Ok(everywhere.map(|(target, component)| (target, object(component))).collect())
}

async fn destroy_one(client: &Client, attr: &Attr) -> Result<(), Error> {
    let deletes = doomed_objects(client, attr)?
        .into_iter()
        .map(|(target, object)| async move { target.unless_silent(target.delete(object)).await });
    join_all(deletes).await.into_iter().collect::<Result<(), Error>>()?;
    client.0.change_done(MetaRequest::Destroyed { ino: attr.ino }).await
}

/// Settles these sessions side by side; how each ended.
async fn settle_all(client: &Client, settle: &[Attr]) -> Vec<Result<(), Error>> {
    let found = join_all(settle.iter().map(|attr| objects_of(client, attr))).await;
    // One COMMIT covers whatever was found of every session there is to settle: others may be making objects.
    let found_all = settle.iter().zip(&found).filter(|(_, found)| found.is_ok());
    let targets: BTreeSet<TargetId> = found_all.flat_map(|(attr, _)| targets_of(attr)).collect();
    let targets = targets.into_iter().filter_map(|id| client.0.object_target(id).zip(Some(id)));
    let commits = targets.map(|(target, id)| async move {
        (id, target.unless_silent(target.commit_everything()).await)
    });
    let commits: BTreeMap<_, _> = join_all(commits).await.into_iter().collect();
    let settled = settle.iter().zip(found).map(|(attr, found)| {
        let durable = || targets_of(attr).try_for_each(|id| commits[&id]);
        let found = found.and_then(|found| durable().map(|()| found));
        async move { settle_one(client, attr, found?).await }
    });
    join_all(settled).await
}

fn targets_of(attr: &Attr) -> impl Iterator<Item = TargetId> + '_ {
    attr.layout.iter().flat_map(|layout| layout.targets.iter().copied())
}

/// The objects of a file, unless it is still being cut.
async fn objects_of(client: &Client, attr: &Attr) -> Result<Vec<Option<ObjectStat>>, Error> {
    if client.0.being_cut.borrow().contains(&attr.ino) {
        return Err(Error::Deadline);
    }
    let stats = (0..components(attr)).map(|component| async move {
        let (target, object) = client.object(attr, component).ok_or(Error::Dialect)?;
        target.unless_silent(target.stat(object)).await
    });
    join_all(stats).await.into_iter().collect()
}

/// Ends the sessions of clients that are gone; `found` are the objects, all that was found being durable.
async fn settle_one(
    client: &Client,
    attr: &Attr,
    found: Vec<Option<ObjectStat>>,
) -> Result<(), Error> {
    let (mut size, mut bits) = (attr.size, attr.components);
    let (mut cuts, mut stored) = (Vec::new(), Vec::new());
    for (component, stat) in (0..).zip(found) {
        let Some(stat) = stat else { continue };
        stored.push((component, stat.stored_bytes));
        bits |= 1 << component;
        if !attr.cut {
            size = size.max(stat.size);
        } else if stat.size > attr.size {
            cuts.push(component);
        }
    }
    if !cuts.is_empty() {
        // The client went while it truncated: the objects must not keep what was cut off.
        cut(client, attr, cuts).await?;
        stored = stored_now(client, attr).await?;
    }
    let (ino, components, change) = (attr.ino, bits, attr.change);
    let request = MetaRequest::Settled { ino, size, components, change, stored };
    match client.0.meta.try_change(request).await? {
        MetaReply::Done => Ok(()),
        // The file has changed since: another time.
        reply => client.0.attr_of(reply).map(drop),
    }
}

/// What the objects of a file hold.
async fn stored_now(client: &Client, attr: &Attr) -> Result<Stored, Error> {
    let found = objects_of(client, attr).await?;
    let stored =
        (0..).zip(found).filter_map(|(component, stat)| Some((component, stat?.stored_bytes)));
    Ok(stored.collect())
}

/// Cuts these components of a file to its size. A task, which goes on when nobody waits for it any more.
async fn cut(client: &Client, attr: &Attr, components: Vec<u32>) -> Result<(), Error> {
    client.0.being_cut.borrow_mut().insert(attr.ino);
    let (client, attr) = (client.clone(), attr.clone());
    let cutting = reactor::spawn(async move {
        let cuts = components.into_iter().map(|component| {
            let (client, attr) = (&client, &attr);
            async move {
                let (target, object) = client.object(attr, component).ok_or(Error::Dialect)?;
                target.truncate(object, attr.size).await?;
                target.settle(object).await
            }
        });
        let cut = join_all(cuts).await.into_iter().collect();
        client.0.being_cut.borrow_mut().remove(&attr.ino);
        cut
    });
    let cut = reactor::timeout(CUT_WITHIN, cutting).await;
    cut.map_or(Err(Error::Deadline), |cut| cut.unwrap_or(Err(Error::Closed)))
}

/// Starts [`keep_house`] as a task of the calling task's group.
pub fn start(client: Client) -> reactor::JoinHandle<()> {
    reactor::spawn(keep_house(client))
}
