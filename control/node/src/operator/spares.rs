//! Spares of the cluster: drives of no array, which take the place of a lost drive in every array that is without it.
//!
//! Such a drive has a label without slices. It is formatted anew with a slice for each array that it is to help, and then given
//! to one after the other; each records it among its members, as any drive that was added.
//!
//! What always holds:
//! - A drive that is a live member anywhere is not formatted.
//! - An array's own spares go first: they have the role before anybody looks here.
//! - A drive that vanished is waited for, as the array says: it may come back (`returns`).
//!
//! After a crash between label and array the drive holds slices of arrays that do not know it: it is completed where the
//! array still wants it, and free otherwise.

use super::{Operator, is_promised};
use crate::arrays::ClusterArray;
use crate::drives;
use levada_device::{Device, Drive};
use levada_raid::{Level, MemberState, MemberStatus, Misfit};
use levada_spec::{Bytes, DRIVE_RESERVED_BYTES, SLICE_ALIGN_BYTES};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;

/// A spare, and whom it helps.
struct Help {
    spare: String,
    drive: Rc<Drive>,
    /// With the bytes of its part on the spare; without where the spare has that already.
    arrays: Vec<(Rc<ClusterArray>, Option<u64>)>,
}

/// Why an array has not taken a spare, by the names of both.
type Refused = BTreeMap<(String, String), String>;

impl Operator {
    /// Puts spares of the cluster in the place of whatever is lost and has none of its array.
    pub async fn use_spares(&self) {
        let _turn = self.admitting.acquire(1).await;
        // Tried again when something changes; others are helped meanwhile.
        let mut refused = Refused::new();
        while let Some(help) = self.next_help(&refused).await {
            let spare = help.spare.clone();
            for (array, given) in self.give(help).await {
                match given {
                    Ok(()) => {
                        tracing::warn!(spare, array, "a spare of the cluster comes in");
                        self.changed.notify_all();
                    }
                    Err(error) => {
                        tracing::error!(spare, array, error, "the spare was not taken");
                        refused.insert((spare.clone(), array), error);
                    }
                }
            }
        }
        let why = self.why_no_help(&refused).await;
        self.no_help.replace(why);
    }

    /// Why what is lost stays so, array by array; nothing where nobody counted on spares.
    async fn why_no_help(&self, refused: &Refused) -> Vec<String> {
        let spares = self.latest.borrow().spares.clone();
        let mut all = Vec::new();
        for (lost, arrays) in self.wanting() {
            for array in arrays {
                if spares.is_empty() && array.spec.spares == 0 {
                    continue;
                }
                let needed = self.needed_bytes(&array).await;
                let why_not = |spare: &String| match refused.get(&key_of(spare, &array)) {
                    Some(error) => format!("{spare} could not be taken: {error}"),
                    None => self.why_not(spare, &array, needed),
                };
                let mut why: Vec<String> = spares.iter().map(why_not).collect();
                if why.is_empty() {
                    why.push("its own are used up, and the cluster has none".into());
                }
                all.push(format!(
                    "no spare takes the place of drive {lost} in array {}: {}",
                    array.spec.name,
                    why.join(", ")
                ));
            }
        }
        all
    }

    /// What is the matter with a spare.
    fn why_not(&self, spare: &str, array: &ClusterArray, needed: Option<Bytes>) -> String {
        let Some((_, drive)) = self.spares().into_iter().find(|(name, _)| name == spare) else {
            return format!("{spare} is not there");
        };
        if !self.is_free(spare) {
            return format!("{spare} is in use");
        }
        if let Some(why) = misfit(array, &drive) {
            let block_bytes = array.array.info().block_bytes;
            return format!("{spare} {why}, and a block of the array has {block_bytes} bytes");
        }
        let room = Bytes(drive.label().capacity_bytes.saturating_sub(DRIVE_RESERVED_BYTES));
        match needed {
            Some(needed) if needed > room => {
                format!("{spare} is too small: {room}, and {needed} are needed")
            }
            Some(_) => format!("{spare} has no room for it beside other arrays"),
            None => format!("no drive of the array tells how much of {spare} it needs"),
        }
    }

    /// What each array says of it, by its name.
    async fn give(&self, help: Help) -> Vec<(String, Result<(), String>)> {
        let mut drive = help.drive;
        let parts: Vec<_> = help
            .arrays
            .iter()
            .filter_map(|(array, bytes)| Some((&array.spec, array.array.status().uuid, (*bytes)?)))
            .collect();
        if !parts.is_empty() {
            match drives::give_slices(&drive, self.cluster.drives.epoch, &parts).await {
                Ok(labelled) => drive = labelled,
                Err(error) => {
                    let of = |array: &Rc<ClusterArray>| array.spec.name.clone();
                    let refused = help.arrays.iter().map(|(array, _)| of(array));
                    return refused.map(|array| (array, Err(error.to_string()))).collect();
                }
            }
            if let Some((_, known)) = self.drives.borrow_mut().get_mut(&help.spare) {
                *known = Ok(Rc::clone(&drive));
            }
        }
        let file = self.latest.borrow().clone();
        let mut given = Vec::new();
        for (array, _) in &help.arrays {
            let admitted = array.admit(&file, &help.spare, &drive).await;
            given.push((array.spec.name.clone(), admitted.map_err(|error| error.to_string())));
        }
        given
    }

    /// The arrays that lack a drive which has no successor, and the spare that suits them best, of those that they have not refused.
    async fn next_help(&self, refused: &Refused) -> Option<Help> {
        let may_have =
            |spare: &String, array: &Rc<ClusterArray>| !refused.contains_key(&key_of(spare, array));
        let wanting = self.wanting();
        // A spare that has room for it already was about to help.
        for arrays in wanting.values() {
            for (spare, drive) in self.spares() {
                let promised: Vec<_> = arrays
                    .iter()
                    .filter(|array| is_promised(array, &drive) && !self.is_free(&spare))
                    .filter(|array| may_have(&spare, array))
                    .map(|array| (Rc::clone(array), None))
                    .collect();
                if !promised.is_empty() {
                    return Some(Help { spare, drive, arrays: promised });
                }
            }
        }
        // Of lost drives the one first of which an array bears least, and of those one that others lack as well: which place the spare has each
        // array says itself.
        let mut wanting: Vec<_> = wanting.into_iter().collect();
        wanting.sort_by_key(|(_, arrays)| {
            let bears = arrays.iter().map(|array| array.array.bears_without(&[])).min();
            (bears, Reverse(arrays.len()))
        });
        for (lost, arrays) in wanting {
            let mut best: Option<(_, Help)> = None;
            for (spare, drive) in self.spares() {
                if !self.is_free(&spare) {
                    continue;
                }
                let capacity_bytes = drive.label().capacity_bytes;
                let fitting: Vec<_> = arrays
                    .iter()
                    .filter(|array| misfit(array, &drive).is_none() && may_have(&spare, array))
                    .map(Rc::clone)
                    .collect();
                let parts = self.parts(&fitting, &lost, capacity_bytes).await;
                if parts.is_empty() {
                    continue;
                }
                let helped: Vec<_> =
                    parts.into_iter().map(|(array, bytes)| (array, Some(bytes))).collect();
                let crowded: usize =
                    helped.iter().map(|(array, _)| self.crowds(array, &spare)).sum();
                // Whoever helps most arrays, and crowds its enclosure least; of these the smallest.
                let rank = (arrays.len() - helped.len(), crowded, capacity_bytes);
                if best.as_ref().is_none_or(|(known, _)| rank < *known) {
                    best = Some((rank, Help { spare, drive, arrays: helped }));
                }
            }
            if let Some((_, help)) = best {
                return Some(help);
            }
        }
        None
    }

    /// Which of the arrays a drive of this capacity can help, and the bytes that it gives to each: as many as it would
    /// if it were the lost drive, else as many as they need, one after the other.
    async fn parts(
        &self,
        arrays: &[Rc<ClusterArray>],
        lost: &str,
        capacity_bytes: u64,
    ) -> Vec<(Rc<ClusterArray>, u64)> {
        let mut left = capacity_bytes.saturating_sub(DRIVE_RESERVED_BYTES);
        let (mut alike, mut least) = (Vec::new(), Vec::new());
        for array in arrays {
            let Some(needed) = self.needed_bytes(array).await else { continue };
            let slice = self.latest.borrow().slice_bytes(&array.spec, lost, Bytes(capacity_bytes));
            alike.extend(slice.filter(|slice| *slice >= needed).map(|it| (Rc::clone(array), it.0)));
            let bytes = needed.0.next_multiple_of(SLICE_ALIGN_BYTES);
            if bytes <= left {
                left -= bytes;
                least.push((Rc::clone(array), bytes));
            }
        }
        let fits = alike.iter().map(|(_, bytes)| bytes).sum::<u64>()
            <= capacity_bytes.saturating_sub(DRIVE_RESERVED_BYTES);
        if fits && alike.len() == arrays.len() { alike } else { least }
    }

    /// Drives whose role nobody plays and that are not waited for, with the arrays that lack them, metadata first.
    pub(super) fn wanting(&self) -> BTreeMap<String, Vec<Rc<ClusterArray>>> {
        self.lost(|member| member.role.is_some() && member.awaited.is_none())
    }

    /// Members that are out and of that kind, with the arrays that lack them.
    pub(super) fn lost(
        &self,
        which: impl Fn(&MemberStatus) -> bool,
    ) -> BTreeMap<String, Vec<Rc<ClusterArray>>> {
        let mut wanting: BTreeMap<String, Vec<Rc<ClusterArray>>> = BTreeMap::new();
        for array in self.cluster.metadata_first() {
            let status = array.array.status();
            if status.stopped.is_some() {
                continue;
            }
            let is_out =
                |member: &&MemberStatus| member.state == MemberState::Faulty && which(member);
            for member in status.members.iter().filter(is_out) {
                wanting.entry(member.name.clone()).or_default().push(Rc::clone(&array));
            }
        }
        wanting
    }

    /// The spares that are there: of one in an enclosure that is away nobody knows whether it could help.
    fn spares(&self) -> Vec<(String, Rc<Drive>)> {
        let names = self.latest.borrow().spares.clone();
        let drives = self.drives.borrow();
        let there = names.into_iter().filter_map(|name| {
            let (spec, drive) = drives.get(&name)?;
            let drive = drive.as_ref().ok()?;
            let is_there =
                self.source.in_place(spec) && self.source.is_reached(&drive.device().info().name);
            (!drive.is_failed() && is_there).then(|| (name, Rc::clone(drive)))
        });
        there.collect()
    }

    /// True when the drive is a live member of no array.
    fn is_free(&self, drive: &str) -> bool {
        self.cluster.arrays.iter().all(|array| {
            let members = array.array.status().members;
            members.iter().all(|m| m.name != drive || m.state == MemberState::Faulty)
        })
    }

    /// What a drive of the file is when it is a spare of the cluster.
    pub(super) fn spare_state(&self, drive: &str) -> Option<&'static str> {
        let is_spare = self.latest.borrow().spares.iter().any(|spare| spare == drive);
        is_spare.then(|| if self.is_free(drive) { "spare" } else { "in use" })
    }

    /// How far the enclosure of `spare` would hold more of the array than it bears, in the place that it would have.
    fn crowds(&self, array: &ClusterArray, spare: &str) -> usize {
        let file = self.latest.borrow();
        let Some(enclosure) = file.drive(spare).map(|drive| &drive.enclosure) else { return 0 };
        let in_enclosure =
            |drive: &str| file.drive(drive).is_some_and(|drive| drive.enclosure == *enclosure);
        let status = array.array.status();
        let neediest = array.array.neediest().and_then(|index| status.members.get(index));
        let Some(role) = neediest.and_then(|member| member.role) else { return 0 };
        let beside = status.members.iter().filter(|member| {
            let plays = member.state != MemberState::Faulty && in_enclosure(&member.name);
            plays && member.role.is_some_and(|other| array.array.share_stripes(role, other))
        });
        match status.level {
            Level::Raid0 => 0,
            // Another copy of some extent.
            Level::Raid1 { .. } => beside.count(),
            _ => (beside.count() + 1).saturating_sub(status.tolerates),
        }
    }
}

fn key_of(spare: &str, array: &ClusterArray) -> (String, String) {
    (spare.to_owned(), array.spec.name.clone())
}

/// What a drive's blocks have against those of an array.
fn misfit(array: &ClusterArray, drive: &Drive) -> Option<Misfit> {
    Misfit::of(drive.device().info(), array.array.info().block_bytes)
}
