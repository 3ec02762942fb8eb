//! The arrays of a cluster: created or opened over the drives' slices, and looked after.
//!
//! What always holds:
//! - A lost member is rebuilt without being asked, metadata first.
//! - An operator cannot fail a drive whose data is nowhere else, unless by force.

use crate::drives::{ClusterDrive, Drives};
use crate::placed::enclosure_of;
use futures_util::future::{join_all, select};
use levada_base::ids::Uuid;
use levada_base::reactor;
use levada_base::sync::Notify;
use levada_device::{BlockError, Device, Drive};
use levada_raid::{
    ArraySpec as RaidSpec, AssemblyReport, Finding, Level as RaidLevel, Limits, MemberSpec,
    MemberState, RaidArray, RaidError,
};
use levada_spec::{ArraySpec, Bytes, ClusterFile, Level, ParityKind, RebuildSpec, ScrubSpec};
use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// The unit in which a mirror is dealt over its drives.
const MIRROR_EXTENT_BYTES: u64 = 1 << 20;
/// Between two looks whether drives are still there, of which nobody may ask anything.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Between two tries of a rebuild that failed although the array goes on.
const REBUILD_AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Between two tries of one that is blocked.
const BLOCKED_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// Why an array cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("array {array}: {source}{}", hint(.source))]
pub struct ArrayError {
    pub array: String,
    #[source]
    pub source: RaidError,
}

/// What to do besides what the error itself says.
fn hint(error: &RaidError) -> &'static str {
    match error {
        RaidError::NotFound { report } if report.missing.is_empty() => {
            "; bring its drives back and start again. Only if the very first `levada up` was interrupted, nothing is stored yet, and `levada up --destroy CLUSTER` starts over"
        }
        RaidError::NoMajority { .. } => {
            "; bring them back and start again: nothing was given up. Where they are gone for good, and no other server has them: `levada up --without-majority`"
        }
        RaidError::NotFound { .. } | RaidError::TooManyLost { .. } => {
            "; bring them back and start again: nothing was given up"
        }
        _ => "",
    }
}

/// What an array is without, as an error says it.
fn without(out: &[String]) -> String {
    if out.is_empty() { String::new() } else { format!(", and is without {}", out.join(", ")) }
}

/// Why a drive is not out of every array.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailError {
    /// An array would stop. Nothing was changed.
    #[error(
        "array {array} bears the loss of {tolerates} drives that hold parts of the same data{}; failing {drive} too would stop it: {}--force",
        without(out),
        if out.is_empty() { "" } else { "replace what is out first, or " }
    )]
    WouldStop {
        array: String,
        drive: String,
        tolerates: usize,
        /// The drives that it is without.
        out: Vec<String>,
    },
    /// By force: the drive takes no more I/O, and arrays that need it cannot record its loss.
    #[error(
        "drive {drive} takes no more I/O, but is not out of {}: whatever needs it stops the array there. \
         Nothing was given up: `levada down` and `levada up` bring {drive} back",
        arrays.iter().map(|(array, why)| format!("array {array} ({why})")).collect::<Vec<_>>().join(", ")
    )]
    NotOut {
        drive: String,
        /// Each array with what it said.
        arrays: Vec<(String, String)>,
    },
}

/// An array of the cluster.
pub struct ClusterArray {
    pub spec: ArraySpec,
    pub array: RaidArray,
    /// What assembly had to say; empty when every member was there.
    pub remarks: Vec<String>,
    /// The result of the last scrub.
    pub last_scrub: RefCell<Option<crate::control::ScrubResult>>,
}

fn member(cluster: &ClusterFile, drive: &Rc<Drive>, name: &str, array: Uuid) -> Option<MemberSpec> {
    let enclosure = enclosure_of(cluster, name)?;
    let slice = drive.slice_of(array)?;
    Some(MemberSpec {
        uuid: drive.label().drive_uuid,
        device: Rc::new(slice),
        name: name.to_owned(),
        enclosure,
    })
}

/// The UUID of an array, as the drives' labels have it.
fn uuid_of(drives: &[ClusterDrive], array: &str) -> Option<Uuid> {
    drives.iter().filter_map(|drive| drive.found.as_ref().ok()).find_map(|drive| {
        let label = drive.label();
        label.slices.iter().find(|slice| slice.array_name == array).map(|slice| slice.array_uuid)
    })
}

/// Creates every array of a cluster that was formatted just now.
///
/// # Errors
///
/// [`ArrayError`] for the first that cannot be made.
pub async fn create(
    cluster: &ClusterFile,
    drives: &Drives,
) -> Result<Vec<Rc<ClusterArray>>, ArrayError> {
    let mut arrays = Vec::new();
    for spec in &cluster.arrays {
        let failed = |source| ArrayError { array: spec.name.clone(), source };
        let uuid = uuid_of(&drives.drives, &spec.name).unwrap_or_default();
        let placement = spec.placement(cluster);
        let names = placement.members.iter().chain(&placement.spares);
        let members = names
            .filter_map(|name| {
                let drive = drives.drives.iter().find(|drive| drive.spec.name == *name)?;
                member(cluster, drive.found.as_ref().ok()?, name, uuid)
            })
            .collect();
        let array =
            RaidArray::create(raid_spec(spec, uuid, members, placement.spares.len()), drives.epoch)
                .await
                .map_err(failed)?;
        arrays.push(ClusterArray::new(cluster, spec, array, Vec::new()));
    }
    Ok(arrays)
}

/// What the array of a cluster file is to the crate that makes it.
pub(crate) fn raid_spec(
    spec: &ArraySpec,
    uuid: Uuid,
    members: Vec<MemberSpec>,
    spares: usize,
) -> RaidSpec {
    let (level, chunk_bytes) = match spec.level {
        Level::Raid0 { chunk } => (RaidLevel::Raid0, chunk.0),
        Level::Raid1 { copies, .. } => {
            (RaidLevel::Raid1 { copies: copies as usize }, MIRROR_EXTENT_BYTES)
        }
        Level::Parity { kind, chunk, .. } => (parity_level(kind), chunk.0),
    };
    let name = spec.name.clone();
    RaidSpec {
        uuid,
        name,
        level,
        chunk_bytes,
        block_bytes: None,
        journal_bytes: None,
        members,
        spares,
    }
}

fn parity_level(kind: ParityKind) -> RaidLevel {
    match kind {
        ParityKind::Raid5 => RaidLevel::Raid5,
        ParityKind::Raid6 => RaidLevel::Raid6,
        ParityKind::Raid50 { groups } => RaidLevel::Raid50 { groups: groups as usize },
        ParityKind::Raid60 { groups } => RaidLevel::Raid60 { groups: groups as usize },
        ParityKind::NPlusM { parity } => RaidLevel::NPlusM { parity: parity as usize },
    }
}

/// Opens every array of a cluster from the drives that are there; `without_majority`: also by half of its members or fewer.
///
/// # Errors
///
/// [`ArrayError`] for the first that cannot be opened; its text names what would help. Nothing was
/// written when drives are missing.
pub async fn open(
    cluster: &ClusterFile,
    drives: &Drives,
    without_majority: bool,
) -> Result<Vec<Rc<ClusterArray>>, ArrayError> {
    let members_of = |spec: &ArraySpec| -> (Uuid, Vec<Rc<dyn Device>>) {
        let uuid = uuid_of(&drives.drives, &spec.name).unwrap_or_default();
        let slices =
            drives.drives.iter().filter_map(|drive| drive.found.as_ref().ok()?.slice_of(uuid));
        (uuid, slices.map(|slice| Rc::new(slice) as Rc<dyn Device>).collect())
    };
    // An array that is opened goes on without its missing members for good. When another one cannot
    // be opened, the missing drives will come back, and should find their places.
    examine(cluster, without_majority, members_of).await?;
    let mut arrays = Vec::new();
    for spec in &cluster.arrays {
        let (uuid, found) = members_of(spec);
        let opened = RaidArray::open(uuid, found, drives.epoch, without_majority).await;
        let (array, report) =
            opened.map_err(|source| ArrayError { array: spec.name.clone(), source })?;
        let mut remarks = Vec::new();
        if !report.missing.is_empty() {
            remarks.push(format!(
                "array {}: went on without {}",
                spec.name,
                report.missing.join(", ")
            ));
        }
        for (drive, finding) in &report.devices {
            if let Finding::CutShort { bytes, needed_bytes, .. } = finding {
                remarks.push(format!(
                    "array {}: its part of {drive} was cut short, and counts as lost: {} of {}",
                    spec.name,
                    Bytes(*bytes),
                    Bytes(*needed_bytes)
                ));
            }
        }
        arrays.push(ClusterArray::new(cluster, spec, array, remarks));
    }
    Ok(arrays)
}

/// Whether all arrays of a cluster can be opened, `members_of` being what is there of each: its UUID, and the parts of drives. Reads only.
///
/// # Errors
///
/// [`ArrayError`] for the first that cannot; its text names what would help.
pub(crate) async fn examine(
    cluster: &ClusterFile,
    without_majority: bool,
    members_of: impl Fn(&ArraySpec) -> (Uuid, Vec<Rc<dyn Device>>),
) -> Result<(), ArrayError> {
    let mut examined = Vec::new();
    for spec in &cluster.arrays {
        let (uuid, found) = members_of(spec);
        examined.push((spec, RaidArray::examine(uuid, &found, without_majority).await));
    }
    let is_there = |(_, standing): &(_, Result<AssemblyReport, _>)| {
        !matches!(standing, Err(RaidError::NotFound { .. }))
    };
    let cluster_was_made = examined.iter().any(is_there);
    for (spec, standing) in examined {
        standing
            .map_err(|error| match error {
                // Labels come before arrays: without a single slice all its drives are away.
                RaidError::NotFound { mut report }
                    if cluster_was_made && report.devices.is_empty() =>
                {
                    report.missing.clone_from(&spec.drives);
                    RaidError::NotFound { report }
                }
                other => other,
            })
            .map_err(|source| ArrayError { array: spec.name.clone(), source })?;
    }
    Ok(())
}

impl ClusterArray {
    fn new(
        cluster: &ClusterFile,
        spec: &ArraySpec,
        array: RaidArray,
        remarks: Vec<String>,
    ) -> Rc<Self> {
        array.wait_for_vanished(Duration::from_secs(cluster.rebuild.grace_s.into()));
        Rc::new(Self { spec: spec.clone(), array, remarks, last_scrub: RefCell::default() })
    }

    /// The index of the member on a drive: the live one, else the one to be replaced.
    #[must_use]
    pub fn member_on(&self, drive: &str) -> Option<usize> {
        let members = self.array.status().members;
        let on_drive = |live: bool| {
            members
                .iter()
                .find(|member| {
                    member.name == drive && (member.state != MemberState::Faulty) == live
                })
                .map(|member| member.index)
        };
        on_drive(true).or_else(|| on_drive(false))
    }

    /// True when the array goes on without its part of a drive.
    #[must_use]
    pub fn is_without(&self, drive: &str) -> bool {
        let members = self.array.status().members;
        self.member_on(drive).is_some_and(|index| members[index].state == MemberState::Faulty)
    }

    /// The drives whose part of the array holds no good data, by name.
    #[must_use]
    pub fn out(&self) -> Vec<String> {
        let members = self.array.status().members;
        let lost = members
            .into_iter()
            .filter(|member| member.role.is_some() && member.state != MemberState::InSync);
        lost.map(|member| member.name).collect()
    }

    /// Gives the array a new or returned drive: in the place of its own lost member, else as a
    /// spare.
    ///
    /// # Errors
    ///
    /// What the array says.
    pub async fn admit(
        &self,
        cluster: &ClusterFile,
        name: &str,
        drive: &Rc<Drive>,
    ) -> Result<(), RaidError> {
        let uuid = self.array.status().uuid;
        let Some(with) = member(cluster, drive, name, uuid) else {
            return Ok(());
        };
        match self.member_on(name) {
            Some(index) => self.array.replace(index, with).await.map(|_| ()),
            None => self.array.add_spare(with).await.map(|_| ()),
        }
    }
}

/// The pace of rebuilds that a cluster file asks for.
#[must_use]
pub fn pace_of(spec: &RebuildSpec) -> Limits {
    limits(spec.floor, spec.ceiling)
}

/// And that of scrubs.
#[must_use]
pub fn scrub_pace_of(spec: &ScrubSpec) -> Limits {
    limits(spec.floor, spec.ceiling)
}

fn limits(floor: Bytes, ceiling: Option<Bytes>) -> Limits {
    Limits {
        floor_bytes_per_second: floor.0,
        ceiling_bytes_per_second: ceiling.map_or(u64::MAX, |ceiling| ceiling.0),
    }
}

/// Rebuilds what needs it, for as long as the caller's group lives: the arrays in the order
/// given, so metadata comes first; at this pace beside other I/O.
pub fn look_after(arrays: Vec<Rc<ClusterArray>>, changed: Rc<Notify>, pace: Limits) {
    for array in &arrays {
        let mut events = array.array.events();
        let changed = Rc::clone(&changed);
        let name = array.spec.name.clone();
        reactor::spawn(async move {
            while let Some(event) = events.recv().await {
                event.log(&name);
                changed.notify_all();
            }
        });
    }
    for array in &arrays {
        let array = Rc::clone(array);
        reactor::spawn(async move {
            loop {
                reactor::sleep(LOOK_EVERY).await;
                array.array.look_at_members().await;
            }
        });
    }
    reactor::spawn(async move {
        // Whose rebuild cannot go on: seldom tried again, and it keeps nobody else waiting.
        let mut blocked: Vec<Rc<ClusterArray>> = Vec::new();
        loop {
            let change = changed.changed();
            let waiting = arrays.iter().find(|array| {
                array.array.needs_rebuild()
                    && array.array.status().stopped.is_none()
                    && !blocked.iter().any(|blocked| Rc::ptr_eq(blocked, array))
            });
            let Some(array) = waiting else {
                match blocked.is_empty() {
                    true => change.await,
                    // What makes room, a file that is removed, say, is no event.
                    false => change_or(change, BLOCKED_AGAIN_AFTER).await,
                }
                blocked.clear();
                continue;
            };
            if let Err(error) = array.array.rebuild(pace).await {
                tracing::error!(array = array.spec.name, %error, "the rebuild stopped");
                if array.array.status().rebuild_blocked.is_some() {
                    blocked.push(Rc::clone(array));
                    continue;
                }
                change_or(changed.changed(), REBUILD_AGAIN_AFTER).await;
            }
        }
    });
}

/// Waits for a change, but not for longer than this.
async fn change_or(change: impl Future<Output = ()>, again: Duration) {
    select(pin!(change), pin!(reactor::sleep(again))).await;
}

/// Fails a drive in every array that uses it. With `force`, also when data would be lost.
///
/// # Errors
///
/// [`FailError`].
pub async fn fail_drive(
    arrays: &[Rc<ClusterArray>],
    name: &str,
    drive: Option<&Rc<Drive>>,
    force: bool,
) -> Result<(), FailError> {
    if !force {
        for array in arrays {
            if array.member_on(name).is_some_and(|index| !array.array.can_do_without(index)) {
                let (tolerates, out) = (array.array.status().tolerates, array.out());
                return Err(FailError::WouldStop {
                    array: array.spec.name.clone(),
                    drive: name.to_owned(),
                    tolerates,
                    out,
                });
            }
        }
    }
    if let Some(drive) = drive {
        drive.fail();
    }
    // Out of all arrays in the step that looked whether they bear it, and only then recorded: of two
    // orders at once, the second counts what the first takes.
    let members = arrays.iter().filter_map(|array| Some((array, array.member_on(name)?)));
    let failing = members.map(async |(array, index)| (array, array.array.fail(index).await));
    let mut refused = Vec::new();
    for (array, failed) in join_all(failing).await {
        if let Err(error) = failed {
            tracing::error!(array = array.spec.name, drive = name, %error, "taking the member out failed");
            let why = match error {
                RaidError::Member { reason, .. } => reason.to_owned(),
                other => other.to_string(),
            };
            refused.push((array.spec.name.clone(), why));
        }
    }
    match refused.is_empty() {
        true => Ok(()),
        false => Err(FailError::NotOut { drive: name.to_owned(), arrays: refused }),
    }
}

/// Ends every array in order, so that the next open has nothing to resync. Returns those of which it failed, by name.
pub async fn close(arrays: &[Rc<ClusterArray>]) -> Vec<(&str, BlockError)> {
    let mut failed = Vec::new();
    for array in arrays {
        if let Err(error) = array.array.close().await {
            failed.push((array.spec.name.as_str(), error));
        }
    }
    failed
}
