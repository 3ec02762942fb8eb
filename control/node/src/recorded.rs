//! What a cluster file says beside what is recorded on the drives of a cluster that exists.
//!
//! Sizes, slices, levels, widths, spares, enclosures and targets are fixed when a cluster is made.
//! What the file says of them later is compared here with labels, superblocks and the target
//! table, so that no change of it is ignored without a word. Nothing is written.
//!
//! What always holds: a part that cannot be read is no difference; whoever opens it says why.

use crate::placed::{Roles, enclosure_of};
use crate::targets::{TargetKind, TargetTable};
use crate::told::some_of;
use futures_util::future::join_all;
use levada_base::BufMut;
use levada_base::ids::Uuid;
use levada_base::units::BLOCK_BYTES;
use levada_device::{Device, Label, Slice, SliceEntry};
use levada_raid::{
    ArrayStatus, ByteRange, Level as RaidLevel, MemberState, MemberStatus, Recorded, RecordedMember,
};
use levada_spec::{ArraySpec, Bytes, ClusterFile, Level};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

/// One key of the file that differs from what is on the drives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// As in `[[array]] data: chunk`.
    pub key: String,
    pub in_file: String,
    pub on_drives: String,
}

impl Difference {
    /// Of the name of the cluster.
    pub(crate) fn of_name(in_file: &str, on_drives: &str) -> Self {
        let (in_file, on_drives) = (in_file.to_owned(), on_drives.to_owned());
        Self { key: "[cluster] name".into(), in_file, on_drives }
    }
}

/// Everything that differs; never empty where it is an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences(pub Vec<Difference>);

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Difference { key, in_file, on_drives } in &self.0 {
            write!(f, "\n  {key}: {in_file} in the file, {on_drives} on the drives")?;
        }
        Ok(())
    }
}

/// A labelled drive of the cluster.
pub(crate) struct Labelled {
    pub device: Rc<dyn Device>,
    pub label: Label,
}

impl Labelled {
    /// The newest superblock of each array on the drive.
    async fn superblocks(&self) -> BTreeMap<&str, Recorded> {
        let places = self.label.slices.iter().flat_map(|slice| {
            let both = [0, Recorded::BYTES];
            both.map(|at| (slice, slice.start + at))
        });
        let probes = places.map(|(slice, at)| async move {
            let block = read_block(&self.device, at).await?;
            let found = Recorded::decode(&block, slice.array_uuid)?;
            Some((slice.array_name.as_str(), found))
        });
        newest(join_all(probes).await.into_iter().flatten())
    }

    /// Which of two drives with one name came later, as arrays have it: they write superblocks to
    /// their members, so one that was replaced stays behind. Epochs tell nothing: whoever is opened
    /// gets the next. `Equal` where each is ahead in as many arrays as the other.
    pub async fn compare(&self, other: &Self) -> Ordering {
        let (ours, theirs) = (self.superblocks().await, other.superblocks().await);
        let ahead = |these: &BTreeMap<&str, Recorded>, those: &BTreeMap<&str, Recorded>| {
            let is_ahead = |(array, found): &(&&str, &Recorded)| {
                those.get(**array).is_none_or(|known| known.order < found.order)
            };
            these.iter().filter(is_ahead).count()
        };
        ahead(&ours, &theirs).cmp(&ahead(&theirs, &ours))
    }
}

/// Of each array the superblock that counts.
fn newest<'a>(
    superblocks: impl IntoIterator<Item = (&'a str, Recorded)>,
) -> BTreeMap<&'a str, Recorded> {
    let mut newest: BTreeMap<&str, Recorded> = BTreeMap::new();
    for (array, found) in superblocks {
        if newest.get(array).is_none_or(|known| known.order < found.order) {
            newest.insert(array, found);
        }
    }
    newest
}

/// An array as it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Standing {
    level: RaidLevel,
    width: usize,
    chunk_bytes: u64,
    members: Vec<RecordedMember>,
}

impl Standing {
    /// Drives in the table beside those that play a role: spares, used or not.
    fn spares(&self) -> usize {
        self.members.len().saturating_sub(self.width)
    }

    fn has(&self, drive: &str) -> bool {
        self.members.iter().any(|member| member.name == drive)
    }

    /// Of a mirror, else 1.
    fn copies(&self) -> usize {
        match self.level {
            RaidLevel::Raid1 { copies } => copies,
            _ => 1,
        }
    }

    fn roles(&self, file: &ClusterFile) -> Roles {
        let played = |role: usize| {
            let mut live = self.members.iter().filter(|m| m.state != MemberState::Faulty);
            let name = &live.find(|member| member.role == Some(role))?.name;
            Some((name.clone(), enclosure_of(file, name)?))
        };
        (0..self.width).map(played).collect()
    }

    /// Of an array that is open.
    fn of(status: &ArrayStatus) -> Self {
        let roles = status.members.iter().filter_map(|member| member.role);
        let member = |member: &MemberStatus| RecordedMember {
            uuid: member.uuid,
            name: member.name.clone(),
            role: member.role,
            state: member.state,
            catches_up: member.catches_up,
        };
        Self {
            level: status.level,
            width: roles.max().map_or(0, |role| role + 1),
            chunk_bytes: status.chunk_bytes,
            members: status.members.iter().map(member).collect(),
        }
    }
}

impl From<Recorded> for Standing {
    fn from(recorded: Recorded) -> Self {
        let Recorded { level, width, chunk_bytes, members, .. } = recorded;
        Self { level, width, chunk_bytes, members }
    }
}

async fn read_block(device: &Rc<dyn Device>, at: u64) -> Option<Vec<u8>> {
    let into = BufMut::zeroed(BLOCK_BYTES as usize).into_vec();
    Some(device.read(at, into).await.ok()?[0].to_vec())
}

/// What is recorded of a cluster.
#[derive(Default)]
pub(crate) struct OnDrives {
    labels: Vec<Label>,
    arrays: BTreeMap<String, Standing>,
    /// With the name of the array that holds it.
    table: Option<(String, TargetTable)>,
}

impl OnDrives {
    /// Reads it from drives that nobody serves.
    pub async fn read(drives: &[&Labelled]) -> Self {
        let found = join_all(drives.iter().map(|drive| drive.superblocks())).await;
        let superblocks = newest(found.into_iter().flatten());
        let table = find_table(drives, &superblocks).await;
        let arrays =
            superblocks.into_iter().map(|(name, found)| (name.to_owned(), found.into())).collect();
        Self { labels: drives.iter().map(|drive| drive.label.clone()).collect(), arrays, table }
    }

    /// Of a cluster that is up.
    pub fn of(labels: Vec<Label>, arrays: &[ArrayStatus], table: (String, TargetTable)) -> Self {
        let arrays = arrays.iter().map(|status| (status.name.clone(), Standing::of(status)));
        Self { labels, arrays: arrays.collect(), table: Some(table) }
    }

    /// What `file` says otherwise. Drive `joining` is about to become a member where it is none.
    pub fn differences(&self, file: &ClusterFile, joining: Option<&str>) -> Differences {
        let mut found = Findings::default();
        for label in self.labels.iter().filter(|label| !self.is_out(label)) {
            found.of_label(file, label);
        }
        for array in file.arrays.iter().filter(|array| self.is_unknown(array)) {
            found.say(format!("[[array]] {}", array.name), "is".into(), "is not".into());
        }
        for (name, standing) in &self.arrays {
            if let Some(array) = file.array(name) {
                found.of_array(file, array, standing, joining);
            }
        }
        if let (Some((holder, table)), [fs]) = (&self.table, &file.filesystems[..]) {
            found.of_table(fs, holder, table);
        }
        found.into_differences()
    }

    /// The level of an array, and who plays its roles.
    pub fn roles(&self, array: &str, file: &ClusterFile) -> Option<(RaidLevel, Roles)> {
        let standing = self.arrays.get(array)?;
        Some((standing.level, standing.roles(file)))
    }

    /// How many more drives an array bears the loss of, where not all of those that play its roles are there with all their data.
    pub fn bears_without_some(
        &self,
        array: &str,
        is_there: impl Fn(&str) -> bool,
    ) -> Option<usize> {
        let standing = self.arrays.get(array)?;
        let is_whole = |role: usize| {
            standing.members.iter().any(|member| {
                let whole = member.state == MemberState::InSync && is_there(&member.name);
                whole && member.role == Some(role)
            })
        };
        let out = (0..standing.width).filter(|role| !is_whole(*role));
        let out = out.fold(0, |out, role| out | 1_u64 << role);
        (out != 0).then(|| standing.level.drives_borne(standing.width, out))
    }

    /// True when no array uses the drive any more: it failed, or another took its place. What the
    /// file says of it is then meant for the next one.
    fn is_out(&self, label: &Label) -> bool {
        label.slices.iter().all(|slice| {
            self.arrays.get(&slice.array_name).is_some_and(|array| {
                let on_drive = |member: &&RecordedMember| member.name == label.drive_name;
                let mut members = array.members.iter().filter(on_drive);
                members.all(|member| member.state == MemberState::Faulty)
            })
        })
    }

    /// True when drives that the file gives to the array are there, and none has a slice of it.
    /// Of one whose drives are all away nothing is known.
    fn is_unknown(&self, array: &ArraySpec) -> bool {
        let given = |label: &&Label| array.drives.contains(&label.drive_name);
        let has_slice =
            |label: &&Label| label.slices.iter().any(|slice| slice.array_name == array.name);
        let there: Vec<&Label> = self.labels.iter().filter(given).collect();
        !there.is_empty() && !there.iter().any(has_slice)
    }
}

/// Bytes that an array uses of each member, by the superblock of the member on `slice`. `None` when
/// that cannot be read.
pub(crate) async fn member_bytes(slice: Slice, status: &ArrayStatus) -> Option<u64> {
    let slice: Rc<dyn Device> = Rc::new(slice);
    for at in [0, Recorded::BYTES] {
        let Some(block) = read_block(&slice, at).await else { continue };
        let Some(recorded) = Recorded::decode(&block, status.uuid) else { continue };
        return Some(recorded.data_at + recorded.data_bytes);
    }
    None
}

/// What new files get, by the row `M|0` of the metadata store (docs/design/0007-metadata.md), where
/// the file says otherwise. It is read when the cluster serves, so it stops nothing.
pub(crate) fn stripe_remark(row: &[u8], fs: &levada_spec::FileSystemSpec) -> Option<String> {
    let count = u32::from_le_bytes(row.get(4..8)?.try_into().ok()?);
    let unit = Bytes(u64::from_le_bytes(row.get(32..40)?.try_into().ok()?));
    let mut said = Vec::new();
    if count != fs.stripe_count {
        said.push(format!(
            "stripe_count is {} in the cluster file, and stays {count}",
            fs.stripe_count
        ));
    }
    if unit != fs.stripe_unit {
        said.push(format!(
            "stripe_unit is {} in the cluster file, and stays {unit}",
            fs.stripe_unit
        ));
    }
    let of_new = "new files get what the file system was made with";
    (!said.is_empty()).then(|| format!("filesystem {}: {}: {of_new}", fs.name, said.join("; ")))
}

/// Reads the target table from a member that holds a copy of the first extent of a mirror.
async fn find_table(
    drives: &[&Labelled],
    superblocks: &BTreeMap<&str, Recorded>,
) -> Option<(String, TargetTable)> {
    for (array, recorded) in superblocks {
        let RaidLevel::Raid1 { copies } = recorded.level else { continue };
        let holds = |drive: &&&Labelled| {
            recorded.members.iter().any(|member| {
                let first = member.role.is_some_and(|role| role < copies);
                let whole = member.state == MemberState::InSync;
                first && whole && member.name == drive.label.drive_name
            })
        };
        for drive in drives.iter().filter(holds) {
            let of_array = drive.label.slices.iter().find(|slice| slice.array_name == *array);
            let Some(slice) = of_array else { continue };
            if let Some(block) = read_block(&drive.device, slice.start + recorded.data_at).await
                && let Ok(table) = TargetTable::decode(&block)
            {
                return Some(((*array).to_owned(), table));
            }
        }
    }
    None
}

/// Differences on their way: what is alike on many drives is said once.
#[derive(Default)]
struct Findings {
    found: Vec<(Difference, Vec<String>)>,
}

impl Findings {
    fn say(&mut self, key: String, in_file: String, on_drives: String) {
        self.found.push((Difference { key, in_file, on_drives }, Vec::new()));
    }

    /// What is alike whichever drive tells it.
    fn say_once(&mut self, difference: Difference) {
        if self.found.iter().all(|(known, _)| *known != difference) {
            self.found.push((difference, Vec::new()));
        }
    }

    fn number(&mut self, key: String, in_file: u64, on_drives: u64) {
        if in_file != on_drives {
            self.say(key, in_file.to_string(), on_drives.to_string());
        }
    }

    fn say_of(&mut self, drive: &str, key: String, in_file: String, on_drives: String) {
        let difference = Difference { key, in_file, on_drives };
        match self.found.iter_mut().find(|(known, _)| *known == difference) {
            Some((_, drives)) => drives.push(drive.into()),
            None => self.found.push((difference, vec![drive.into()])),
        }
    }

    fn into_differences(self) -> Differences {
        let named = |(mut difference, drives): (Difference, Vec<String>)| {
            if !drives.is_empty() {
                difference.key += &format!(" ({})", some_of(&drives));
            }
            difference
        };
        Differences(self.found.into_iter().map(named).collect())
    }

    /// Cluster, size, enclosure and slices of a drive.
    fn of_label(&mut self, file: &ClusterFile, label: &Label) {
        if label.cluster_name != file.name {
            self.say_once(Difference::of_name(&file.name, &label.cluster_name));
        }
        // One that the file does not name any more is seen in the arrays that still use it.
        let Some(spec) = file.drive(&label.drive_name) else { return };
        let name = &spec.name;
        if spec.enclosure != label.enclosure_name {
            let (key, on_drives) = ("[[enclosure]] of drives", label.enclosure_name.clone());
            self.say_of(name, key.into(), spec.enclosure.clone(), on_drives);
        }
        let capacity = Bytes(label.capacity_bytes);
        if let Some(size) = spec.size
            && size.floor_to(BLOCK_BYTES) != capacity
        {
            // Slices follow the size; one word is enough.
            let (size, capacity) = (size.to_string(), capacity.to_string());
            return self.say_of(name, "size of drives".into(), size, capacity);
        }
        for slice in &label.slices {
            let key = format!("[[array]] {}", slice.array_name);
            let Some(array) = file.array(&slice.array_name) else {
                self.say_of(name, key, "is not".into(), "is".into());
                continue;
            };
            if !array.drives.contains(name) {
                // Seen in the members, unless it is none.
                continue;
            }
            // The label keeps whole blocks of the capacity that shares were taken of.
            let wanted = |capacity| file.slice_bytes(array, name, Bytes(capacity));
            let of_whole = wanted(label.capacity_bytes + BLOCK_BYTES - 1);
            let have = Some(Bytes(slice.bytes));
            if wanted(label.capacity_bytes) != have && of_whole != have {
                let in_file = wanted(label.capacity_bytes);
                let in_file = in_file.map_or("no room".into(), |bytes| bytes.to_string());
                self.say_of(name, key + ": slice", in_file, Bytes(slice.bytes).to_string());
            }
        }
    }

    fn of_array(
        &mut self,
        file: &ClusterFile,
        array: &ArraySpec,
        standing: &Standing,
        joining: Option<&str>,
    ) {
        let key = |key: &str| format!("[[array]] {}: {key}", array.name);
        if array.level.name() != standing.level.key() {
            let (in_file, on_drives) = (array.level.name().into(), standing.level.key().into());
            // Nothing else can be compared.
            return self.say(key("level"), in_file, on_drives);
        }
        let width = standing.width as u64;
        match array.level {
            Level::Raid0 { .. } => {}
            Level::Raid1 { copies, .. } => {
                self.number(key("copies"), u64::from(copies), standing.copies() as u64)
            }
            Level::Parity { kind, data, .. } => {
                let (groups, parity) = match standing.level {
                    RaidLevel::Raid50 { groups } | RaidLevel::Raid60 { groups } => {
                        (groups as u64, u64::from(kind.parity()))
                    }
                    level => (1, level.tolerates() as u64),
                };
                self.number(key("groups"), u64::from(kind.groups()), groups);
                self.number(key("parity"), u64::from(kind.parity()), parity);
                let of_group = width / groups.max(1);
                self.number(key("data"), u64::from(data), of_group.saturating_sub(parity));
            }
        }
        self.of_members(file, array, standing, joining);
        if let Some(chunk) = array.level.chunk()
            && chunk.0 != standing.chunk_bytes
        {
            self.say(key("chunk"), chunk.to_string(), Bytes(standing.chunk_bytes).to_string());
        }
    }

    /// The drives of an array, and how many of them are spares. Spares of the cluster come in by themselves: the file
    /// lists them apart.
    fn of_members(
        &mut self,
        file: &ClusterFile,
        array: &ArraySpec,
        standing: &Standing,
        joining: Option<&str>,
    ) {
        let key = |key: &str| format!("[[array]] {}: {key}", array.name);
        let is_new = |drive: &&String| !standing.has(drive);
        let of_cluster = |member: &&RecordedMember| file.spares.contains(&member.name);
        let is_left_out =
            |member: &&RecordedMember| !array.drives.contains(&member.name) && !of_cluster(member);
        let came_in = standing.members.iter().filter(of_cluster).count();
        let count = Headcount {
            listed: array.drives.len() as u64,
            roles: standing.width as u64,
            spare_members: standing.spares().saturating_sub(came_in) as u64,
            new: array.drives.iter().filter(is_new).count() as u64,
            joins_now: array.drives.iter().filter(is_new).any(|new| Some(&**new) == joining),
            left_out: standing.members.iter().filter(is_left_out).count() as u64,
        };
        // The file says by `data` how many drives of a level with parity play a role, else by `spares`.
        let spares_say_roles = array.level.roles().is_none();
        let judged = count.judge(u64::from(array.spares), spares_say_roles);
        if let Judged::Spares { fit } = judged {
            self.number(key("spares"), u64::from(array.spares), fit);
        }
        for member in standing.members.iter().filter(is_left_out) {
            if judged == Judged::TooFewListed || member.state != MemberState::Faulty {
                self.say_of(&member.name, key("drives"), "not members".into(), "members".into());
            }
        }
    }

    fn of_table(&mut self, fs: &levada_spec::FileSystemSpec, holder: &str, table: &TargetTable) {
        let key = |key: &str| format!("[[filesystem]] {}: {key}", fs.name);
        if fs.name != table.fs_name {
            self.say("[[filesystem]] name".into(), fs.name.clone(), table.fs_name.clone());
        }
        if fs.metadata != holder {
            self.say(key("metadata"), fs.metadata.clone(), holder.into());
        }
        let count = |kind| table.targets.iter().filter(|entry| entry.kind == kind).count();
        for (what, in_file, kind) in [
            ("object_targets", fs.object_targets, TargetKind::Objects),
            ("metadata_targets", fs.metadata_targets, TargetKind::Metadata),
        ] {
            self.number(key(what), u64::from(in_file), count(kind) as u64);
        }
    }
}

/// The drives of an array in the file beside its members.
#[derive(Clone, Copy, Debug, Default)]
struct Headcount {
    /// Drives that the file lists.
    listed: u64,
    /// Members that it takes to be whole.
    roles: u64,
    /// Members beside those: spares, used or not.
    spare_members: u64,
    /// Drives that are listed and no members: spares to come.
    new: u64,
    /// True when one of them becomes a member now.
    joins_now: bool,
    /// Members that are not listed.
    left_out: u64,
}

/// What is to be said of `spares` and `drives`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judged {
    Fine,
    /// `spares` is wrong.
    Spares {
        fit: u64,
    },
    /// Fewer drives are listed than there are roles.
    TooFewListed,
}

impl Headcount {
    /// Judges `spares` as the file has it. Where that says how many of the drives listed play a
    /// role, one number fits.
    fn judge(&self, spares: u64, spares_say_roles: bool) -> Judged {
        if spares_say_roles {
            return match self.listed.checked_sub(self.roles) {
                Some(fit) if fit == spares => Judged::Fine,
                Some(fit) => Judged::Spares { fit },
                None => Judged::TooFewListed,
            };
        }
        // A member that is left out may have been a spare; a new drive may become one.
        let least = (self.spare_members + u64::from(self.joins_now)).saturating_sub(self.left_out);
        let most = self.spare_members + self.new;
        match (least..=most).contains(&spares) {
            true => Judged::Fine,
            false => Judged::Spares { fit: least },
        }
    }
}

/// The UUID of an array and its part of each drive.
pub(crate) fn parts_of(spec: &ArraySpec, drives: &[&Labelled]) -> (Uuid, Vec<Rc<dyn Device>>) {
    let parts: Vec<(&Labelled, &SliceEntry)> = drives
        .iter()
        .copied()
        .flat_map(|drive| drive.label.slices.iter().map(move |slice| (drive, slice)))
        .filter(|(_, slice)| slice.array_name == spec.name)
        .collect();
    let uuid = parts.first().map(|(_, slice)| slice.array_uuid).unwrap_or_default();
    let part = |(drive, slice): (&Labelled, &SliceEntry)| {
        // Of a drive that has shrunk, what is left.
        let there = drive.device.info().capacity_bytes.checked_sub(slice.start)?;
        let (device, bytes) = (Rc::clone(&drive.device), slice.bytes.min(there));
        let part = ByteRange::new(&drive.label.drive_name, device, slice.start, bytes).ok()?;
        Some(Rc::new(part) as Rc<dyn Device>)
    };
    (uuid, parts.into_iter().filter_map(part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spares_are_judged_by_members_and_by_what_is_listed() {
        let made = Headcount { listed: 12, roles: 10, spare_members: 2, ..Headcount::default() };
        let full = Headcount { listed: 12, roles: 12, ..Headcount::default() };
        let fit = |fit| Judged::Spares { fit };
        let (fine, few) = (Judged::Fine, Judged::TooFewListed);
        // For 0 to 3 spares: where they say how many drives play a role, and in a RAID 6.
        let cases = [
            (
                "as it was made",
                made,
                [fit(2), fit(2), fine, fit(2)],
                [fit(2), fit(2), fine, fit(2)],
            ),
            (
                "made without spares",
                full,
                [fine, fit(0), fit(0), fit(0)],
                [fine, fit(0), fit(0), fit(0)],
            ),
            (
                "a drive is to be added, now or later",
                Headcount { listed: 13, new: 1, ..made },
                [fit(3), fit(3), fit(3), fine],
                [fit(2), fit(2), fine, fine],
            ),
            (
                "a drive is added",
                Headcount { listed: 13, new: 1, joins_now: true, ..made },
                [fit(3), fit(3), fit(3), fine],
                [fit(3), fit(3), fit(3), fine],
            ),
            (
                "a dead drive is gone, and a spare has its role",
                Headcount { listed: 11, left_out: 1, ..made },
                [fit(1), fine, fit(1), fit(1)],
                [fit(1), fine, fine, fit(1)],
            ),
            (
                "a dead drive is gone, and nobody has its role",
                Headcount { listed: 11, left_out: 1, ..full },
                [few, few, few, few],
                [fine, fit(0), fit(0), fit(0)],
            ),
            (
                "a dead drive is gone, and another is to be added",
                Headcount { listed: 12, new: 1, left_out: 1, ..made },
                [fit(2), fit(2), fine, fit(2)],
                [fit(1), fine, fine, fine],
            ),
        ];
        for (what, count, of_mirror, of_raid6) in cases {
            for spares in 0..4 {
                assert_eq!(count.judge(spares as u64, true), of_mirror[spares], "{what}: {spares}");
                assert_eq!(count.judge(spares as u64, false), of_raid6[spares], "{what}: {spares}");
            }
        }
    }
}
