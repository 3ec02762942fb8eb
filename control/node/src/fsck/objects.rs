//! Objects against files: each object has a file that knows of it and is no longer than it, and each component that a
//! file notes has its object. Here of a cluster that is down, where neither side changes; `suspects` is that of one that
//! is up.

use super::join::{Join, Met, Side};
use super::report::FoundItem;
use levada_base::ids::{Ino, ObjectId, TargetId};
use levada_kv::{KvError, Store};
use levada_log::{IndexedObject, LogError};
use levada_meta::{FileNote, FileRow, FileUse, Numbers, Paths};

/// Findings that are told; more are counted.
pub const FINDINGS_KEPT: usize = 100_000;

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

    /// True of what is no fault while the file is being written or cut. An object that is noted is durable, and none is
    /// ever where the layout does not have it.
    pub fn may_be_of_use(&self) -> bool {
        matches!(self, Self::Unlisted { .. } | Self::Longer { .. })
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

/// With its target; none where the layout names no target that is there.
pub type Misfit = (Option<TargetId>, ObjectFinding);

/// What a comparison found.
#[derive(Default)]
pub struct Compared {
    pub findings: Vec<Misfit>,
    pub found: u64,
    /// Objects whose files a client may bring back.
    pub awaited: u64,
}

impl Compared {
    pub fn add(&mut self, target: Option<TargetId>, finding: ObjectFinding) {
        self.found += 1;
        if self.findings.len() < FINDINGS_KEPT {
            self.findings.push((target, finding));
        }
    }
}

/// Holds the objects of the targets that can be read against the metadata, where neither changes.
pub async fn compare<'a>(
    metadata: &'a Store,
    fs: u64,
    numbers: Numbers,
    sides: &mut [Side<'a>],
    unread: &[TargetId],
) -> Result<Compared, LogError> {
    let mut compared = Compared::default();
    let read: Vec<TargetId> = sides.iter().map(|side| side.id).collect();
    let targets = Targets { read: &read, unread };
    let mut join = Join::new(metadata, fs, sides);
    while let Some(met) = join.next().await? {
        let (ino, row, objects) = match met {
            Met::Inode(ino, row, objects) => (ino, row, objects),
            Met::Foreign(target, object) => {
                compared.add(Some(target), ObjectFinding::Foreign { object });
                continue;
            }
            Met::Ownerless(target, object) => {
                compared.of_no_inode(numbers, target, object);
                continue;
            }
        };
        let found = misfits(ino, &row, &objects, targets);
        if found.is_empty() {
            continue;
        }
        let held = FileUse::of(metadata, ino).await?;
        for (target, finding) in found {
            if !(held.is_doomed || held.is_written && finding.may_be_of_use()) {
                compared.add(target, finding);
            }
        }
    }
    Ok(compared)
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

/// Where objects may lie.
#[derive(Clone, Copy)]
pub struct Targets<'a> {
    pub read: &'a [TargetId],
    /// What is there is not known.
    pub unread: &'a [TargetId],
}

/// What does not fit of one inode.
pub fn misfits(
    ino: Ino,
    row: &FileRow,
    objects: &[(TargetId, IndexedObject)],
    targets: Targets<'_>,
) -> Vec<Misfit> {
    let misplaced = |on: TargetId, object| (Some(on), ObjectFinding::Misplaced { object });
    match row {
        // What it says is unknown.
        FileRow::Damaged => Vec::new(),
        FileRow::NoFile => objects.iter().map(|(on, object)| misplaced(*on, object.id)).collect(),
        FileRow::File(note) => of_file(ino, note, objects, targets),
    }
}

fn of_file(
    ino: Ino,
    note: &FileNote,
    objects: &[(TargetId, IndexedObject)],
    targets: Targets<'_>,
) -> Vec<Misfit> {
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
        if place.is_none_or(|place| !targets.unread.contains(&place)) {
            let place = place.filter(|place| targets.read.contains(place));
            found.push((place, ObjectFinding::Missing { ino, component }));
        }
    }
    found
}
