//! Objects against files: each object has a file that knows of it and is no longer than it, and each component that a
//! file notes has its object. Of a cluster that is down, where neither side changes.
//!
//! The inodes of the metadata and the objects of all targets are walked side by side, in the order of inode numbers; so
//! memory is a page of each.

use super::report::FoundItem;
use levada_base::ids::{Ino, ObjectId, TargetId};
use levada_kv::{KvError, Store};
use levada_log::{IndexedObject, IndexedObjects};
use levada_meta::{FileNote, FileRow, FileUse, Files, Numbers, Paths};

/// Findings that are told; more are counted.
const FINDINGS_KEPT: usize = 100_000;

/// An object target.
pub struct Side<'a> {
    pub id: TargetId,
    objects: IndexedObjects<'a>,
    head: Option<IndexedObject>,
    pub count: u64,
}

impl<'a> Side<'a> {
    /// That of the index in a store.
    pub async fn new(id: TargetId, store: &'a Store) -> Result<Self, KvError> {
        let mut objects = IndexedObjects::new(store).await?;
        let head = objects.next().await?;
        Ok(Self { id, objects, head, count: 0 })
    }

    async fn take(&mut self) -> Result<Option<IndexedObject>, KvError> {
        let object = self.head.take();
        if object.is_some() {
            self.count += 1;
            self.head = self.objects.next().await?;
        }
        Ok(object)
    }
}

/// An object and a file that do not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectFinding {
    #[error("component {component} has no object: its bytes are lost")]
    Missing { ino: Ino, component: u32 },
    #[error("component {} has an object, and is not noted", .object.component)]
    Unlisted { object: ObjectId },
    #[error("component {} ends at {has}, behind the end of the file, {says}", .object.component)]
    Longer { object: ObjectId, says: u64, has: u64 },
    #[error("there is an object {} that its layout does not have here", .object.component)]
    Misplaced { object: ObjectId },
    #[error("there is an object of component {}, and no such inode", .object.component)]
    Stray { object: ObjectId },
    #[error(
        "there is an object of component {}, and the number was not given out yet: the metadata is older than it",
        .object.component
    )]
    Newer { object: ObjectId },
    #[error("there is an object of another file system, {:016x}", .object.fs)]
    Foreign { object: ObjectId },
}

impl ObjectFinding {
    /// The sort, for programs: `docs/fsck.md` lists them.
    pub fn sort(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "missing-object",
            Self::Unlisted { .. } => "unlisted-object",
            Self::Longer { .. } => "long-object",
            Self::Misplaced { .. } => "misplaced-object",
            Self::Stray { .. } => "stray-object",
            Self::Newer { .. } => "newer-object",
            Self::Foreign { .. } => "foreign-object",
        }
    }

    pub fn ino(&self) -> Ino {
        match self {
            Self::Missing { ino, .. } => *ino,
            Self::Unlisted { object }
            | Self::Longer { object, .. }
            | Self::Misplaced { object }
            | Self::Stray { object }
            | Self::Newer { object }
            | Self::Foreign { object } => object.ino,
        }
    }

    pub async fn item(&self, target: &str, paths: &mut Paths<'_>) -> Result<FoundItem, KvError> {
        let (says, has) = match *self {
            Self::Longer { says, has, .. } => (Some(says), Some(has)),
            _ => (None, None),
        };
        let item = FoundItem {
            target: target.to_owned(),
            find: self.sort().to_owned(),
            ino: Some(self.ino().0),
            says,
            has,
            text: self.to_string(),
            ..FoundItem::default()
        };
        Ok(item.at(paths.of_inode(self.ino()).await?))
    }
}

/// What a comparison found.
#[derive(Default)]
pub struct Compared {
    /// Each with its target; none where the layout names no target that is there.
    pub findings: Vec<(Option<TargetId>, ObjectFinding)>,
    pub found: u64,
    /// Objects whose files a client may bring back.
    pub awaited: u64,
}

impl Compared {
    fn add(&mut self, target: Option<TargetId>, finding: ObjectFinding) {
        self.found += 1;
        if self.findings.len() < FINDINGS_KEPT {
            self.findings.push((target, finding));
        }
    }
}

/// Holds the objects of the targets that can be read against the metadata.
pub async fn compare(
    metadata: &Store,
    fs: u64,
    numbers: Numbers,
    sides: &mut [Side<'_>],
    unread: &[TargetId],
) -> Result<Compared, KvError> {
    let mut compared = Compared::default();
    let mut files = Files::new(metadata);
    let mut objects = Vec::new();
    loop {
        let file = files.next().await?;
        let end = file.as_ref().map(|(ino, _)| *ino);
        objects.clear();
        for side in &mut *sides {
            // Those of other file systems come before and behind.
            while let Some(IndexedObject { id, .. }) = side.head
                && (id.fs != fs || end.is_none_or(|end| id.ino <= end))
            {
                let Some(object) = side.take().await? else { break };
                if id.fs != fs {
                    compared.add(Some(side.id), ObjectFinding::Foreign { object: id });
                } else if end == Some(id.ino) {
                    objects.push((side.id, object));
                } else {
                    compared.of_no_inode(numbers, side.id, id);
                }
            }
        }
        let Some((ino, row)) = file else { return Ok(compared) };
        let found = match row {
            // What it says is unknown.
            FileRow::Damaged => continue,
            FileRow::NoFile => objects
                .iter()
                .map(|(on, object)| (Some(*on), ObjectFinding::Misplaced { object: object.id }))
                .collect(),
            FileRow::File(note) => of_file(ino, &note, &objects, sides, unread),
        };
        if found.is_empty() {
            continue;
        }
        let held = FileUse::of(metadata, ino).await?;
        for (target, finding) in found {
            let is_sound = match finding {
                ObjectFinding::Unlisted { .. } | ObjectFinding::Longer { .. } => held.is_written,
                _ => false,
            };
            if !is_sound && !held.is_doomed {
                compared.add(target, finding);
            }
        }
    }
}

impl Compared {
    fn of_no_inode(&mut self, numbers: Numbers, target: TargetId, object: ObjectId) {
        let ino = object.ino.0;
        // Where the next number is not known nothing tells how old the metadata is.
        let is_newer = numbers.next_ino > 0 && ino >= numbers.next_ino;
        if numbers.awaited_ino.is_some_and(|awaited| ino < awaited && is_newer) {
            self.awaited += 1;
        } else if is_newer {
            self.add(Some(target), ObjectFinding::Newer { object });
        } else {
            self.add(Some(target), ObjectFinding::Stray { object });
        }
    }
}

/// What does not fit of one file.
fn of_file(
    ino: Ino,
    note: &FileNote,
    objects: &[(TargetId, IndexedObject)],
    sides: &[Side<'_>],
    unread: &[TargetId],
) -> Vec<(Option<TargetId>, ObjectFinding)> {
    let mut found = Vec::new();
    let mut there = 0_u64;
    for (on, IndexedObject { id: object, size }) in objects.iter().copied() {
        let place = note.layout.targets.get(object.component as usize);
        let bit = 1_u64.checked_shl(object.component).unwrap_or(0);
        if place != Some(&on) || object.version != note.layout.version || bit == 0 {
            found.push((Some(on), ObjectFinding::Misplaced { object }));
            continue;
        }
        there |= bit;
        if note.components & bit == 0 {
            found.push((Some(on), ObjectFinding::Unlisted { object }));
        }
        // One whose row makes no sense is told as such.
        if let Some(has) = size.filter(|size| *size > note.size) {
            found.push((Some(on), ObjectFinding::Longer { object, says: note.size, has }));
        }
    }
    let missing = note.components & !there;
    for component in (0..u64::BITS).filter(|component| missing >> component & 1 == 1) {
        let place = note.layout.targets.get(component as usize).copied();
        if place.is_none_or(|place| !unread.contains(&place)) {
            let place = place.filter(|place| sides.iter().any(|side| side.id == *place));
            found.push((place, ObjectFinding::Missing { ino, component }));
        }
    }
    found
}
