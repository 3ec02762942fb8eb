//! Objects against files of a cluster that is up, beside everything else.
//!
//! Metadata and an object target share no moment, so what does not fit is a suspect, and three looks settle it: at the
//! inode, at the objects, and at the inode again. If that has not changed, and nobody had a write session on it, what was
//! seen of the objects held while it said so: `change` counts up with every session and truncation, and a session ends
//! only when what was written is durable. A file that is in use is looked at again for a while.
//!
//! An object without an inode may be what somebody has just written to a deleted file. He finds out when he commits it,
//! and deletes it: so it is looked at again at the end, and a lease later.
//!
//! What always holds: nothing is told that was not so, and what could not be settled is told as not checked. Memory is a
//! page of each side, and a bounded number of suspects.

use super::join::{Join, Met, Side};
use super::objects::{Compared, FINDINGS_KEPT, Misfit, ObjectFinding, Targets, misfits};
use levada_base::ids::{Ino, ObjectId, TargetId};
use levada_base::planted;
use levada_base::reactor::{self, Instant};
use levada_log::{IndexedObject, LogError, ObjectLog};
use levada_meta::{FileRow, FsckProgress, MetaService};
use std::cell::Cell;
use std::time::Duration;

/// Suspects that are kept to be looked at again; more are counted.
const SUSPECTS_MAX: usize = FINDINGS_KEPT;
/// After so many inodes others get their time.
const INODES_AT_ONCE: u64 = 1024;
/// The first pause before a file in use is looked at again; the next is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// The longest one, as a part of a lease.
const PAUSES_OF_A_LEASE: u32 = 16;

/// See the module.
pub struct Beside<'a> {
    pub metadata: &'a MetaService,
    pub logs: &'a [(TargetId, ObjectLog)],
    /// Those of the logs.
    pub read: &'a [TargetId],
    /// Object targets that cannot be asked.
    pub unread: &'a [TargetId],
    /// The number of the file system in the names of objects.
    pub fs: u64,
    /// After each page of inodes others get as much time as it took.
    pub yields: bool,
    /// A file in use is looked at again for so long.
    pub patience: Duration,
    pub progress: &'a dyn Fn(FsckProgress),
}

/// What a comparison came to.
pub struct Settled {
    pub compared: Compared,
    /// Files that were in use all the time.
    pub in_use: u64,
    /// What did not fit at first sight, and was not looked at again as it was too much.
    pub unsettled: u64,
    /// The objects of each target.
    pub counts: Vec<(TargetId, u64)>,
}

/// An inode that does not fit the objects at first sight, and those of them that were met.
type Suspect = (Ino, Vec<(TargetId, ObjectId)>);

/// What was seen of an inode.
#[derive(Default)]
struct Look {
    found: Vec<Misfit>,
    /// There is more that does not fit, and may be of somebody's use of the file.
    is_in_use: bool,
}

/// What is to be looked at again.
#[derive(Default)]
struct Again {
    in_use: Vec<Suspect>,
    ownerless: Vec<(TargetId, ObjectId)>,
    unsettled: u64,
}

impl Again {
    /// False: there are too many of them already.
    fn in_use(&mut self, suspect: Suspect) -> bool {
        let has_room = self.in_use.len() < SUSPECTS_MAX;
        match has_room {
            true => self.in_use.push(suspect),
            false => self.unsettled += 1,
        }
        has_room
    }

    fn ownerless(&mut self, target: TargetId, object: ObjectId) {
        match self.ownerless.len() < SUSPECTS_MAX {
            true => self.ownerless.push((target, object)),
            false => self.unsettled += 1,
        }
    }
}

/// Gives others their time.
struct Pace {
    yields: bool,
    steps: Cell<u64>,
    since: Cell<Instant>,
}

impl Pace {
    fn new(yields: bool) -> Self {
        Self { yields, steps: Cell::new(0), since: Cell::new(reactor::now()) }
    }

    async fn step(&self) {
        self.steps.set(self.steps.get() + 1);
        if self.steps.get().is_multiple_of(INODES_AT_ONCE) {
            match self.yields {
                true => reactor::sleep(self.since.get().elapsed()).await,
                false => reactor::yield_now().await,
            }
            self.since.set(reactor::now());
        }
    }
}

impl Beside<'_> {
    /// Holds all objects against all files, of which there are about so many.
    ///
    /// # Errors
    ///
    /// When the metadata or a target stopped.
    pub async fn compare(&self, inodes: u64) -> Result<Settled, LogError> {
        let mut compared = Compared::default();
        let mut again = Again::default();
        let mut sides = Vec::with_capacity(self.logs.len());
        for (id, log) in self.logs {
            sides.push(Side::serving(*id, log).await?);
        }
        self.tell("comparing objects with files", 0, inodes);
        let pace = Pace::new(self.yields);
        let mut join = Join::new(self.metadata.store(), self.fs, &mut sides);
        let mut met_inodes = 0;
        while let Some(met) = join.next().await? {
            match met {
                Met::Foreign(target, object) => {
                    compared.add(Some(target), ObjectFinding::Foreign { object });
                }
                Met::Ownerless(target, object) => self.meet(target, object, &mut again).await?,
                Met::Inode(ino, row, objects) => {
                    met_inodes += 1;
                    if !misfits(ino, &row, &objects, self.targets()).is_empty() {
                        let met = objects.iter().map(|(on, object)| (*on, object.id)).collect();
                        self.settle((ino, met), &mut compared, &mut again).await?;
                    }
                    if met_inodes % INODES_AT_ONCE == 0 {
                        self.tell("comparing objects with files", met_inodes, inodes);
                    }
                }
            }
            pace.step().await;
        }
        let in_use = self.wait_for_use(&mut compared, &mut again).await?;
        self.wait_for_owners(&mut compared, &mut again).await?;
        let counts = sides.iter().map(|side| (side.id, side.count)).collect();
        Ok(Settled { compared, in_use, unsettled: again.unsettled, counts })
    }

    fn targets(&self) -> Targets<'_> {
        Targets { read: self.read, unread: self.unread }
    }

    fn tell(&self, phase: &'static str, done_rows: u64, total_rows: u64) {
        let total_rows = total_rows.max(done_rows);
        (self.progress)(FsckProgress { phase, done_rows, total_rows });
    }

    /// An object of no inode that was met. One that was made since then is a suspect itself.
    async fn meet(
        &self,
        target: TargetId,
        object: ObjectId,
        again: &mut Again,
    ) -> Result<(), LogError> {
        let now = self.metadata.file_now(object.ino).await?;
        if now.row.is_some() {
            again.in_use((object.ino, vec![(target, object)]));
        } else if self.object(target, object).await?.is_some() {
            again.ownerless(target, object);
        }
        Ok(())
    }

    async fn settle(
        &self,
        (ino, met): Suspect,
        compared: &mut Compared,
        again: &mut Again,
    ) -> Result<(), LogError> {
        let Look { found, is_in_use } = self.look(ino, &met).await?;
        // Of one that is not looked at again counts what nobody's use of it explains.
        if !is_in_use || !again.in_use((ino, met)) {
            found.into_iter().for_each(|(target, finding)| compared.add(target, finding));
        }
        Ok(())
    }

    /// Three looks.
    async fn look(&self, ino: Ino, met: &[(TargetId, ObjectId)]) -> Result<Look, LogError> {
        let before = self.metadata.file_now(ino).await?;
        let Some(row) = before.row.filter(|_| !before.held.is_doomed) else {
            return Ok(Look::default());
        };
        if planted!("fsck-two-looks") {
            reactor::sleep(PAUSE_MIN).await;
        }
        let objects = self.objects_of(ino, &row, met).await?;
        let mut found = misfits(ino, &row, &objects, self.targets());
        if found.is_empty() {
            return Ok(Look::default());
        }
        let after = self.metadata.file_now(ino).await?;
        if after.row.is_none() || after.held.is_doomed {
            return Ok(Look::default());
        }
        let is_written = before.held.is_written || after.held.is_written;
        let holds = before.change == after.change && !is_written
            || planted!("fsck-use-not-asked")
            || planted!("fsck-two-looks") && !before.held.is_written;
        let all = found.len();
        found.retain(|(_, finding)| holds || !finding.may_be_of_use());
        Ok(Look { is_in_use: found.len() < all, found })
    }

    /// The objects of an inode as they are now: those that its layout has, and those that were met.
    async fn objects_of(
        &self,
        ino: Ino,
        row: &FileRow,
        met: &[(TargetId, ObjectId)],
    ) -> Result<Vec<(TargetId, IndexedObject)>, LogError> {
        let mut names: Vec<(TargetId, ObjectId)> = Vec::new();
        if let FileRow::File(note) = row {
            let placed = (0..).zip(&note.layout.targets);
            names.extend(
                placed.map(|(component, on)| (*on, note.layout.object(self.fs, ino, component))),
            );
        }
        let others = met.iter().filter(|name| !names.contains(name)).copied();
        let others: Vec<_> = others.collect();
        let mut objects = Vec::new();
        for (target, id) in names.into_iter().chain(others) {
            objects.extend(self.object(target, id).await?.map(|object| (target, object)));
        }
        Ok(objects)
    }

    /// An object as it is now.
    async fn object(
        &self,
        target: TargetId,
        id: ObjectId,
    ) -> Result<Option<IndexedObject>, LogError> {
        let Some((_, log)) = self.logs.iter().find(|(on, _)| *on == target) else {
            return Ok(None);
        };
        match log.stat(id).await {
            Ok(stat) => Ok(Some(IndexedObject { id, size: Some(stat.size) })),
            Err(LogError::NoSuchObject) => Ok(None),
            // It is there, and a row of it makes no sense, which is told elsewhere.
            Err(LogError::Index { row: "object" | "extent" }) => {
                Ok(Some(IndexedObject { id, size: None }))
            }
            Err(error) => Err(error),
        }
    }

    /// Looks at files in use again, until none is or it has taken long enough. How many there are then.
    async fn wait_for_use(
        &self,
        compared: &mut Compared,
        again: &mut Again,
    ) -> Result<u64, LogError> {
        let until = reactor::now() + self.patience;
        let mut pause = PAUSE_MIN;
        let total = again.in_use.len() as u64;
        loop {
            let left = again.in_use.len() as u64;
            if left == 0 || reactor::now() >= until {
                break;
            }
            self.tell("looking at files in use again", total - left, total);
            reactor::sleep(pause.min(until.since(reactor::now()))).await;
            pause = (pause * 2).min(self.metadata.client_lease() / PAUSES_OF_A_LEASE);
            let pace = Pace::new(self.yields);
            for suspect in std::mem::take(&mut again.in_use) {
                self.settle(suspect, compared, again).await?;
                pace.step().await;
            }
        }
        let mut in_use = 0;
        for (ino, met) in std::mem::take(&mut again.in_use) {
            let Look { found, is_in_use } = self.look(ino, &met).await?;
            found.into_iter().for_each(|(target, finding)| compared.add(target, finding));
            in_use += u64::from(is_in_use);
        }
        Ok(in_use)
    }

    /// Looks at objects without an inode again, now and a lease later.
    async fn wait_for_owners(
        &self,
        compared: &mut Compared,
        again: &mut Again,
    ) -> Result<(), LogError> {
        let mut left = self.still_ownerless(std::mem::take(&mut again.ownerless)).await?;
        if !left.is_empty() {
            self.tell("waiting for who may have written to deleted files", 0, left.len() as u64);
            reactor::sleep(self.metadata.client_lease()).await;
            left = self.still_ownerless(left).await?;
        }
        let next_ino = self.metadata.next_ino();
        for (target, object) in left {
            let finding = match object.ino.0 >= next_ino {
                true => ObjectFinding::Newer { object },
                false => ObjectFinding::Stray { object },
            };
            compared.add(Some(target), finding);
        }
        Ok(())
    }

    async fn still_ownerless(
        &self,
        objects: Vec<(TargetId, ObjectId)>,
    ) -> Result<Vec<(TargetId, ObjectId)>, LogError> {
        let mut left = Vec::new();
        let pace = Pace::new(self.yields);
        for (target, object) in objects {
            // In this order: of an inode that is there no more its objects went before.
            let is_of_none = self.metadata.file_now(object.ino).await?.row.is_none();
            if is_of_none && self.object(target, object).await?.is_some() {
                left.push((target, object));
            }
            pace.step().await;
        }
        Ok(left)
    }
}
