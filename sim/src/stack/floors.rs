//! What the floors say of each other at the end of a seed: the metadata of the object logs, and these
//! of it.
//!
//! Nobody writes any more, and the leases of whoever is gone are over. So no write session is left and
//! no cut pending, no file without a name; every object belongs to a file that knows of it, and is no
//! longer than it.

use levada_base::ids::{Ino, ObjectId, TargetId};
use levada_log::{LogError, ObjectLog};
use levada_meta::{Census, FileNote};
use levada_wire::attr::Layout;
use std::collections::BTreeMap;

/// What must be left of sessions and orphans: nothing.
pub(super) fn leftovers(census: &Census) -> Option<String> {
    if !census.sessions.is_empty() {
        return Some(format!("write sessions are left: {:?}", census.sessions));
    }
    if !census.orphans.is_empty() {
        return Some(format!("orphans are left: {:?}", census.orphans));
    }
    (!census.destroy.is_empty())
        .then(|| format!("files are left to be destroyed: {:?}", census.destroy))
}

/// Compares the objects of one target with what the metadata says of them. `None`: they agree.
pub(super) async fn disagreement(
    census: &Census,
    fs: u64,
    target: TargetId,
    log: &ObjectLog,
) -> Result<Option<String>, LogError> {
    for (ino, file) in &census.files {
        for component in components_on(target, &file.layout) {
            let object = file.layout.object(fs, *ino, component);
            let size = size_of(log, object).await?;
            let held = log.stat(object).await.map_or(0, |stat| stat.stored_bytes);
            let wrong = wrong(file, component, size).or_else(|| misjudged(file, component, held));
            if let Some(what) = wrong {
                return Ok(Some(format!("{ino:?}, component {component}: {what}; {file:?}")));
            }
        }
    }
    let ownerless = ownerless(census, fs, target, log).await?;
    Ok((!ownerless.is_empty()).then(|| format!("objects of no file: {ownerless:?}")))
}

fn components_on(target: TargetId, layout: &Layout) -> impl Iterator<Item = u32> + '_ {
    (0..).zip(&layout.targets).filter(move |(_, on)| **on == target).map(|(component, _)| component)
}

fn wrong(file: &FileNote, component: u32, size: Option<u64>) -> Option<String> {
    let must_exist = file.components >> component & 1 == 1;
    match size {
        None => must_exist.then(|| "the object is missing".into()),
        Some(_) if !must_exist => Some("there is an object of which the file does not know".into()),
        Some(size) if size > file.size => {
            Some(format!("the object of {size} bytes is longer than its file"))
        }
        Some(_) => None,
    }
}

/// With no session left, what a file is said to hold is what it holds.
fn misjudged(file: &FileNote, component: u32, held: u64) -> Option<String> {
    let said = file.stored.as_ref()?.get(component as usize).copied().unwrap_or(0);
    (said != held).then(|| format!("the object is said to hold {said} bytes, and holds {held}"))
}

async fn size_of(log: &ObjectLog, object: ObjectId) -> Result<Option<u64>, LogError> {
    match log.stat(object).await {
        Ok(stat) => Ok(Some(stat.size)),
        Err(LogError::NoSuchObject) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Objects, and their sizes, under numbers that were given once and are no file's: such as the files that
/// there are have. (The log's own count is of no use: it has rows of objects whose end it has not indexed.)
async fn ownerless(
    census: &Census,
    fs: u64,
    target: TargetId,
    log: &ObjectLog,
) -> Result<Vec<(ObjectId, u64)>, LogError> {
    let mut shapes = BTreeMap::new();
    for file in census.files.values() {
        let places = components_on(target, &file.layout);
        shapes.extend(places.map(|place| ((file.layout.version, place), &file.layout)));
    }
    let mut found = Vec::new();
    let numbers = (Ino::ROOT.0 + 1..census.next_ino).map(Ino);
    for ino in numbers.filter(|ino| !census.files.contains_key(ino)) {
        for ((_, place), layout) in &shapes {
            let object = layout.object(fs, ino, *place);
            found.extend(size_of(log, object).await?.map(|size| (object, size)));
        }
    }
    Ok(found)
}
