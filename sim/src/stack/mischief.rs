//! What befalls a cluster: drives, blocks, network. Never more than the arrays must bear.

use super::cluster::{CLIENT, META_BYTES, NODE, SimDrives, Stack};
use crate::{LOSSES_MAX, Rng};
use levada_base::reactor::{self, Instant};
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_meta::FsckConfig;
use levada_node::assembly::{Cluster, Service};
use levada_node::drives::{self, Intake};
use levada_node::fsck::{CheckConfig, Checks, FsckState, Sum};
use levada_raid::MemberState;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// After silent rot is gone, whoever has read it may still be putting back what it read.
const AFTER_ROT: Duration = Duration::from_millis(200);
/// A scrub of the few objects here that takes longer hangs.
const SCRUB_TIME_MAX: Duration = Duration::from_secs(60);
/// As long for a check of the few rows, and a lease more if there is an object without an inode.
const CHECK_TIME_MAX: Duration = Duration::from_secs(150);

/// Drives that are not whole.
#[derive(Default)]
pub(super) struct State {
    lost: RefCell<BTreeSet<usize>>,
    /// Of those, the ones that still answer a few requests.
    doomed: RefCell<BTreeSet<usize>>,
    unreadable: RefCell<BTreeSet<usize>>,
    replacing: RefCell<BTreeSet<usize>>,
    /// The drive with silently wrong bytes, and which.
    rotten: RefCell<Option<Rot>>,
    rot_ended: Cell<Option<Instant>>,
    scrubbing: Rc<Cell<bool>>,
}

impl State {
    pub fn lost(&self) -> BTreeSet<usize> {
        self.lost.borrow().clone()
    }
}

/// A byte of a drive's data slice where objects are likely to lie: behind superblocks, journal and
/// map, at the beginning of one of the two targets' shares.
fn in_use(rng: &mut Rng, drive_bytes: u64) -> u64 {
    let data_at = META_BYTES + 3 * MIB / 2;
    let share = (drive_bytes - data_at - MIB) / 2;
    data_at + rng.below(2) * share + rng.below(MIB)
}

/// Runs of bytes of one drive that read wrong: where, how many, which bits.
type Rot = (usize, Vec<(u64, u64, u8)>);

/// The check of a cluster that is up, to its end or the first thing that it finds.
pub(super) async fn checked(cluster: &Rc<Cluster>, config: CheckConfig) -> FsckState {
    let checks = Checks::default();
    checks.start(cluster, config).expect("none runs");
    loop {
        let state = checks.state(0).expect("one was started");
        if state.ended || !state.items.is_empty() {
            return state;
        }
        reactor::sleep(Duration::from_millis(1)).await;
    }
}

impl Stack {
    /// One fault or one repair, as the stated distribution deals them.
    pub fn fault(self: &Rc<Self>) {
        let mut rng = self.world.rng(Rng::fork);
        match rng.weighted(&[5, 1, 4, 2, 3, 3, 2, 3, 2, 10]) {
            0 if self.bears() > 0 => self.lose_one(&mut rng),
            1 if self.bears() == LOSSES_MAX => {
                let enclosure = rng.below(self.world.shape.enclosures as u64) as usize;
                let per = self.world.shape.drives / self.world.shape.enclosures;
                for at in enclosure * per..(enclosure + 1) * per {
                    self.lose(at, 0);
                }
            }
            2 if self.bears() > 0 => self.spoil(&mut rng),
            3 => {
                self.world.note("drive slow");
                let at = rng.below(self.world.shape.drives as u64) as usize;
                let slow = Duration::from_micros(rng.below(2) * rng.below(8000));
                self.world.drive(at).faults.slow(slow);
            }
            // Not while the node starts: there may be stripes to resync (see the design note).
            4 if self.bears() == LOSSES_MAX && self.cluster().is_some() => self.rot(&mut rng),
            5 => {
                self.world.note("connection broken");
                self.network.disconnect(CLIENT, NODE);
            }
            6 => {
                self.world.note("partition");
                let stack = Rc::clone(self);
                let length = Duration::from_millis(rng.between(1, 1500));
                self.network.partition(CLIENT, NODE);
                reactor::spawn(async move {
                    reactor::sleep(length).await;
                    stack.network.heal(CLIENT, NODE);
                });
            }
            7 => self.scrub_objects(&mut rng),
            8 => self.check_all(&mut rng),
            _ => self.mend(&mut rng),
        }
    }

    /// The scrub of one target's objects, beside everything else, as the operator starts it. What
    /// befalls the drives meanwhile is no more than must be borne, so nothing may be lost.
    fn scrub_objects(self: &Rc<Self>, rng: &mut Rng) {
        /// Also when the node is killed meanwhile.
        struct Scrubbing(Rc<Cell<bool>>);
        impl Drop for Scrubbing {
            fn drop(&mut self) {
                self.0.set(false);
            }
        }
        let Some(cluster) = self.cluster() else { return };
        let logs: Vec<_> = cluster
            .targets
            .iter()
            .filter_map(|target| match &target.service {
                Service::Objects { log, .. } => Some((target.entry.name(), log.clone())),
                Service::Metadata { .. } | Service::Stopped { .. } => None,
            })
            .collect();
        if self.faults.scrubbing.replace(true) {
            return;
        }
        let scrubbing = Scrubbing(Rc::clone(&self.faults.scrubbing));
        let (name, log) = rng.pick(&logs).clone();
        let world = Rc::clone(&self.world);
        world.tell(|| format!("scrub of {name}"));
        world.note("scrub begins");
        let seed = world.seed;
        reactor::spawn_in(&self.world.node(), async move {
            let _scrubbing = scrubbing;
            let scrubbed = reactor::timeout(SCRUB_TIME_MAX, log.scrub()).await;
            let scrubbed = scrubbed
                .unwrap_or_else(|_| panic!("seed {seed}: {name}: the scrub of its objects hangs"));
            let report = scrubbed.unwrap_or_else(|error| panic!("seed {seed}: {name}: {error}"));
            assert!(report.damaged.is_empty(), "seed {seed}: {name}: {report:?}");
            let mut coverage = world.coverage.borrow_mut();
            coverage.count("scrubs beside faults", 1);
            coverage.count("blocks repaired by them", report.repaired_blocks);
        });
    }

    /// The check of all targets, beside everything else, as the operator starts it. Whatever befalls drives and clients
    /// meanwhile, all fits together.
    fn check_all(self: &Rc<Self>, rng: &mut Rng) {
        let Some(cluster) = self.cluster() else { return };
        let metadata = FsckConfig { yields: rng.one_in(2), ..FsckConfig::default() };
        // The node does not live for as long as a file in use is usually looked at.
        let patience = Duration::from_millis(rng.below(300));
        let config = CheckConfig { metadata, patience: Some(patience) };
        let world = Rc::clone(&self.world);
        world.tell(|| "check of all targets".to_owned());
        let seed = world.seed;
        reactor::spawn_in(&self.world.node(), async move {
            let checked = reactor::timeout(CHECK_TIME_MAX, checked(&cluster, config)).await;
            let state = checked.unwrap_or_else(|_| panic!("seed {seed}: the check hangs"));
            let sum = Sum::of(&state.reports);
            assert!(state.items.is_empty() && sum.found == 0, "seed {seed}: {state:?}");
            let excuses = ["another check is running", "waits for a client", "in use"];
            let is_excused = |what: &String| excuses.iter().any(|excuse| what.contains(excuse));
            assert!(sum.not_checked.iter().all(is_excused), "seed {seed}: {state:?}");
            let mut coverage = world.coverage.borrow_mut();
            // Another one is running, or a client is awaited.
            if state.reports[0].rows > 0 {
                coverage.count("metadata checked beside faults", 1);
                coverage.count("rows checked so", sum.rows);
            }
            coverage.count("objects compared so", sum.objects);
            let in_use = sum.not_checked.iter().any(|what| what.contains("in use"));
            coverage.count("checks that left files in use", u64::from(in_use));
        });
    }

    /// Waits for the scrub that runs.
    pub async fn scrub_ends(&self) {
        while self.faults.scrubbing.get() {
            reactor::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Drives that may be lost besides those that are not whole.
    fn bears(&self) -> usize {
        let rot_ended = self.faults.rot_ended.get();
        let was_rotten = rot_ended.is_some_and(|ended| reactor::now() < ended + AFTER_ROT);
        if self.faults.rotten.borrow().is_some() || was_rotten {
            return 0;
        }
        // While the node starts, what was not whole counts as it did before.
        self.settle_now();
        let not_whole = self.faults.lost.borrow().union(&self.faults.unreadable.borrow()).count();
        LOSSES_MAX.saturating_sub(not_whole)
    }

    /// Brings the drives that are not whole up to date, while the node serves.
    pub fn settle_now(&self) {
        if let Some(cluster) = self.cluster() {
            self.settle(&cluster);
        }
    }

    /// Notes drives that an array has put out by itself (its superblocks were unreadable when it
    /// was opened), and forgets losses that rebuilds have made good.
    fn settle(&self, cluster: &Cluster) {
        let faults = &self.faults;
        for status in cluster.arrays.iter().map(|array| array.array.status()) {
            let out = status.members.iter().filter(|m| m.state == MemberState::Faulty);
            let out = out.filter(|_| status.degraded > 0).map(|member| &*member.name);
            let numbers = out.filter_map(|name| {
                self.world.drives.borrow().iter().position(|drive| drive.name == name)
            });
            faults.lost.borrow_mut().extend(numbers);
        }
        faults.doomed.borrow_mut().retain(|at| !self.world.drive(*at).faults.is_gone());
        let whole = cluster.arrays.iter().all(|array| {
            let status = array.array.status();
            status.degraded == 0 && status.stopped.is_none()
        });
        faults.lost.borrow_mut().retain(|at| {
            if !whole || faults.doomed.borrow().contains(at) {
                return true;
            }
            let drive = self.world.drive(*at);
            let in_step = cluster.arrays.iter().all(|array| {
                array.member_on(&drive.name).is_some_and(|member| {
                    let member = &array.array.status().members[member];
                    match member.state {
                        MemberState::InSync | MemberState::Spare => !drive.faults.is_gone(),
                        MemberState::Faulty => member.role.is_none(),
                        MemberState::Rebuilding { .. } => false,
                    }
                })
            });
            !in_step
        });
    }

    fn lose_one(&self, rng: &mut Rng) {
        let at = rng.below(self.world.shape.drives as u64) as usize;
        if !self.faults.lost.borrow().contains(&at) {
            self.lose(at, if rng.one_in(2) { 0 } else { rng.below(80) });
        }
    }

    /// A drive is gone, now or within its next requests.
    pub fn lose(&self, at: usize, within: u64) {
        self.world.tell(|| format!("lose drive {at} within {within}"));
        self.world.note("drive lost");
        self.faults.lost.borrow_mut().insert(at);
        if within == 0 {
            self.world.drive(at).faults.fail();
        } else {
            self.faults.doomed.borrow_mut().insert(at);
            self.world.drive(at).faults.fail_after(within);
        }
    }

    fn spoil(&self, rng: &mut Rng) {
        let at = rng.below(self.world.shape.drives as u64) as usize;
        if self.faults.lost.borrow().contains(&at) {
            return;
        }
        self.world.tell(|| format!("unreadable blocks on drive {at}"));
        self.world.note("unreadable block");
        self.faults.unreadable.borrow_mut().insert(at);
        for _ in 0..rng.between(2, 12) {
            // Where something is written: the beginning of the mirror's slice, and the data.
            let first = match rng.one_in(2) {
                true => rng.below(8 * MIB),
                false => in_use(rng, self.world.shape.drive_bytes),
            } / BLOCK_BYTES;
            let bytes = rng.between(1, 8) * BLOCK_BYTES;
            self.world.drive(at).faults.medium_error(first * BLOCK_BYTES, bytes);
        }
    }

    /// Some bytes of one drive read wrong, of its copies of metadata and of its data.
    fn rot(&self, rng: &mut Rng) {
        let at = rng.below(self.world.shape.drives as u64) as usize;
        self.world.tell(|| format!("rot on drive {at}"));
        self.world.note("silent rot");
        let mut places = Vec::new();
        for _ in 0..rng.between(20, 200) {
            let place = (in_use(rng, self.world.shape.drive_bytes), rng.between(1, 64), 0x40);
            self.world.drive(at).faults.rot(place.0, place.1, place.2);
            places.push(place);
        }
        // Behind label, superblocks and map, which have checksums of their own.
        for block in 3 * MIB / BLOCK_BYTES..(META_BYTES - MIB) / BLOCK_BYTES {
            if rng.one_in(16) {
                let place = (block * BLOCK_BYTES + rng.below(4000), rng.between(1, 64), 0x40);
                self.world.drive(at).faults.rot(place.0, place.1, place.2);
                places.push(place);
            }
        }
        *self.faults.rotten.borrow_mut() = Some((at, places));
    }

    /// Rot that nobody has rewritten yet is gone. (A crash with rot under a stripe that is still
    /// marked dirty is beyond what resync can tell apart; see the design note.)
    pub fn end_rot(&self) {
        if let Some((at, _)) = self.faults.rotten.take() {
            self.heal(at);
            self.faults.rot_ended.set(Some(reactor::now()));
        }
    }

    /// What a drive holds can be read again; one that is gone or about to go stays gone.
    fn heal(&self, at: usize) {
        let drive = self.world.drive(at);
        let gone = drive.faults.is_gone() || self.faults.doomed.borrow_mut().remove(&at);
        drive.faults.heal();
        if gone {
            drive.faults.fail();
        }
    }

    fn mend(self: &Rc<Self>, rng: &mut Rng) {
        match rng.below(3) {
            0 => self.end_rot(),
            // A start may have put the drive out, which is known when the node serves.
            1 if self.cluster().is_some() => {
                let unreadable = self.faults.unreadable.borrow_mut().pop_first();
                if let Some(at) = unreadable {
                    self.heal(at);
                }
            }
            _ => {
                let lost: Vec<usize> = self.faults.lost.borrow().iter().copied().collect();
                if lost.is_empty() || self.cluster().is_none() {
                    return;
                }
                let (at, old) = (*rng.pick(&lost), rng.one_in(3));
                let stack = Rc::clone(self);
                reactor::spawn_in(&self.world.node(), async move { stack.replace(at, old).await });
            }
        }
    }

    /// Puts a drive in the place of a lost one, in every array that misses it: the old one come
    /// back, or an empty one.
    pub async fn replace(&self, at: usize, old: bool) {
        /// Also when the node is killed meanwhile.
        struct Replacing<'a>(&'a State, usize);
        impl Drop for Replacing<'_> {
            fn drop(&mut self) {
                self.0.replacing.borrow_mut().remove(&self.1);
            }
        }
        if !self.faults.replacing.borrow_mut().insert(at) {
            return;
        }
        let _replacing = Replacing(&self.faults, at);
        let Some(cluster) = self.cluster() else { return };
        let spec = &self.file.drives[at];
        let missed = |array: &Rc<levada_node::arrays::ClusterArray>| {
            array.member_on(&spec.name).is_none_or(|member| {
                array.array.status().members[member].state == MemberState::Faulty
            })
        };
        let gone = self.world.drive(at).faults.is_gone();
        if gone {
            if !cluster.arrays.iter().all(missed) {
                // Somebody has not noticed yet.
                return;
            }
            self.world.tell(|| format!("replace drive {at}, old: {old}"));
            self.world.note(if old { "drive came back" } else { "drive replaced" });
            match old {
                true => self.world.drive(at).faults.heal(),
                false => drop(self.world.replace_drive(at)),
            }
            self.faults.unreadable.borrow_mut().remove(&at);
            self.faults.doomed.borrow_mut().remove(&at);
        }
        let open = &cluster.drives.drives[at].found;
        let drive = match open {
            Ok(drive) if !gone && !drive.is_failed() => Rc::clone(drive),
            Ok(_) | Err(_) => {
                let device = self.world.drive(at).device();
                match drives::format_one(
                    &SimDrives(Rc::clone(&self.world)),
                    &self.file,
                    spec,
                    device,
                    &cluster.drives,
                    Intake::Replace,
                    true,
                )
                .await
                {
                    Ok(drive) => drive,
                    Err(_) if self.world.drive(at).faults.is_gone() => return,
                    Err(error) => {
                        panic!("seed {}: formatting drive {at}: {error}", self.world.seed)
                    }
                }
            }
        };
        for array in cluster.arrays.iter().filter(|array| missed(array)) {
            self.world.tell(|| format!("drive {at} joins {}", array.spec.name));
            if let Err(error) = array.admit(&self.file, &spec.name, &drive).await
                && !self.world.drive(at).faults.is_gone()
            {
                panic!("seed {}: replacing drive {at}: {error}", self.world.seed);
            }
        }
        self.changed();
    }

    /// Puts everything right and waits until every array is whole again.
    pub async fn recover_drives(self: &Rc<Self>) {
        let cluster = self.cluster().expect("the node serves");
        self.end_rot();
        self.faults.doomed.borrow_mut().clear();
        for at in 0..self.world.shape.drives {
            self.heal(at);
        }
        self.faults.unreadable.borrow_mut().clear();
        // So that every array looks at every drive; again where one was found out.
        for _ in 0..3 {
            let mut any = false;
            for array in &cluster.arrays {
                let scrubbed = array.array.scrub_anew(levada_raid::Limits::NONE).await;
                scrubbed.unwrap_or_else(|error| panic!("seed {}: scrub: {error}", self.world.seed));
            }
            for at in 0..self.world.shape.drives {
                let drive = self.world.drive(at);
                let name = drive.name.clone();
                let out = cluster.arrays.iter().any(|array| {
                    array.member_on(&name).is_none_or(|member| {
                        array.array.status().members[member].state == MemberState::Faulty
                    })
                });
                any |= out || drive.faults.is_gone();
                if out {
                    if drive.faults.is_gone() {
                        // An operator says so where nobody has noticed.
                        for array in &cluster.arrays {
                            if let Some(member) = array.member_on(&name) {
                                let _ = array.array.fail(member).await;
                            }
                        }
                    }
                    self.replace(at, false).await;
                } else if drive.faults.is_gone() {
                    // A spare that nobody asked anything.
                    drive.faults.restore();
                }
            }
            if !any {
                break;
            }
        }
        let whole = || {
            cluster
                .arrays
                .iter()
                .all(|array| array.array.status().degraded == 0 && !array.array.needs_rebuild())
        };
        for _ in 0..2000 {
            if whole() {
                return;
            }
            self.changed();
            reactor::sleep(Duration::from_millis(50)).await;
        }
        let of = |array: &Rc<levada_node::arrays::ClusterArray>| {
            let members = array.array.status().members;
            let members: Vec<_> =
                members.iter().map(|m| (m.index, m.name.clone(), m.role, m.state)).collect();
            format!("{}: {members:?}", array.spec.name)
        };
        let arrays: Vec<String> = cluster.arrays.iter().map(of).collect();
        panic!("seed {}: the arrays are not rebuilt after 100 s: {arrays:?}", self.world.seed);
    }
}
