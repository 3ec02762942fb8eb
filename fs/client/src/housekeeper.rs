//! The housekeeper: does what the metadata service cannot, because it needs the objects.
//!
//! Objects of destroyed files are deleted; sessions of clients that are gone are settled: what
//! they wrote is made durable, and the file's size is what its objects say. Every chore is
//! reported when it is done and can be repeated, so a crash loses none.

use crate::client::Client;
use crate::error::Error;
use futures_util::future::join_all;
use levada_base::reactor;
use levada_wire::attr::Attr;
use levada_wire::meta::{MetaReply, MetaRequest};
use levada_wire::object::ObjectStat;
use std::time::Duration;

/// Chores asked for at a time; all are done at once.
const CHORES_MAX: u32 = 64;
const IDLE_MIN: Duration = Duration::from_millis(200);
const IDLE_MAX: Duration = Duration::from_secs(5);

/// Does chores for ever, over a client of its own (class `Background`, no deadline).
pub async fn keep_house(client: Client) {
    let mut idle = IDLE_MIN;
    loop {
        match do_chores(&client).await {
            Ok(0) => idle = (idle * 2).min(IDLE_MAX),
            Ok(_) => idle = IDLE_MIN,
            Err(error) => {
                tracing::warn!(%error, "chores failed");
                idle = (idle * 2).min(IDLE_MAX);
            }
        }
        reactor::sleep(idle).await;
    }
}

/// Does the chores that there are now; how many were done.
///
/// # Errors
///
/// What the services say to the list of chores; a chore that fails stays on it.
pub async fn do_chores(client: &Client) -> Result<usize, Error> {
    let mut done = 0;
    loop {
        let reply = client.0.meta.read(&MetaRequest::Chores { limit: CHORES_MAX }).await?;
        let (destroy, settle) = match reply {
            MetaReply::Chores { destroy, settle } => (destroy, settle),
            MetaReply::Failed(fault) => return Err(fault.into()),
            _ => return Err(Error::Dialect),
        };
        let asked = destroy.len() + settle.len();
        let found = join_all(settle.iter().map(|attr| objects_of(client, attr))).await;
        if !settle.is_empty() {
            // One COMMIT covers whatever was found of every session there is to settle: others may be making objects.
            let commits = client.0.targets().map(|target| target.commit_everything());
            join_all(commits).await.into_iter().collect::<Result<(), Error>>()?;
        }
        let destroyed = join_all(destroy.iter().map(|attr| destroy_one(client, attr)));
        let settled = settle.iter().zip(found);
        let settled = join_all(settled.map(|(attr, found)| settle_one(client, attr, found)));
        let (destroyed, settled) = futures_util::future::join(destroyed, settled).await;
        let mut failed = 0;
        for outcome in destroyed.into_iter().chain(settled) {
            if let Err(error) = outcome {
                tracing::warn!(%error, "a chore failed");
                failed += 1;
            }
        }
        done += asked - failed;
        if failed > 0 || asked < CHORES_MAX as usize {
            return Ok(done);
        }
    }
}

fn components(attr: &Attr) -> u32 {
    attr.layout.as_ref().map_or(0, |layout| layout.targets.len() as u32)
}

async fn destroy_one(client: &Client, attr: &Attr) -> Result<(), Error> {
    let deletes = (0..components(attr)).map(|component| async move {
        let (target, object) = client.object(attr, component).ok_or(Error::Dialect)?;
        target.delete(object).await
    });
    join_all(deletes).await.into_iter().collect::<Result<(), Error>>()?;
    client.0.change_done(MetaRequest::Destroyed { ino: attr.ino }).await
}

/// The objects of a file.
async fn objects_of(client: &Client, attr: &Attr) -> Result<Vec<Option<ObjectStat>>, Error> {
    let stats = (0..components(attr)).map(|component| async move {
        let (target, object) = client.object(attr, component).ok_or(Error::Dialect)?;
        target.stat(object).await
    });
    join_all(stats).await.into_iter().collect()
}

/// Ends the sessions of clients that are gone; `found` are the objects, all that was found being durable.
async fn settle_one(
    client: &Client,
    attr: &Attr,
    found: Result<Vec<Option<ObjectStat>>, Error>,
) -> Result<(), Error> {
    let (mut size, mut bits) = (attr.size, attr.components);
    let mut cuts = Vec::new();
    for (component, stat) in (0..).zip(found?) {
        let Some(stat) = stat else { continue };
        bits |= 1 << component;
        if !attr.cut {
            size = size.max(stat.size);
        } else if stat.size > attr.size {
            cuts.push(component);
        }
    }
    // The client went while it truncated: the objects must not keep what was cut off.
    let cuts = cuts.into_iter().map(|component| async move {
        let (target, object) = client.object(attr, component).ok_or(Error::Dialect)?;
        target.truncate(object, attr.size).await?;
        target.settle(object).await
    });
    join_all(cuts).await.into_iter().collect::<Result<(), Error>>()?;
    let (ino, components, change) = (attr.ino, bits, attr.change);
    let request = MetaRequest::Settled { ino, size, components, change };
    match client.0.meta.try_change(request).await? {
        MetaReply::Done => Ok(()),
        // The file has changed since: another time.
        reply => client.0.attr_of(reply).map(drop),
    }
}

/// Starts [`keep_house`] as a task of the calling task's group.
pub fn start(client: Client) -> reactor::JoinHandle<()> {
    reactor::spawn(keep_house(client))
}
