//! A rack: a world's drives as the members of one array, and what befalls them.
//!
//! Faults are dealt so that the array must bear them: at most as many drives as its level tolerates are lost,
//! rebuilding or hold unreadable blocks. Therefore every error of the array is a bug.

use crate::{LOSSES_MAX, Rng, World};
use levada_base::ids::Uuid;
use levada_base::reactor;
use levada_base::units::{BLOCK_BYTES, KIB};
use levada_base::{BufMut, Epoch};
use levada_raid::{
    Admitted, ArraySpec, Finding, Level, Limits, MemberSpec, MemberState, RaidArray, Recorded,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

/// What is built from the drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Three copies over all drives.
    Mirror,
    /// 8 + 2, and two hot spares.
    Parity,
    /// A level with parity over all drives but the last `spares`.
    Journaled { level: Level, spares: usize, chunk_kib: u64 },
}

impl Kind {
    /// One of the levels that have a journal; a seed always has the same.
    #[must_use]
    pub fn journaled(seed: u64) -> Self {
        let (level, spares) = match seed % 8 {
            0 => (Level::Raid5, 3),
            1 => (Level::Raid50 { groups: 3 }, 0),
            2 => (Level::Raid60 { groups: 2 }, 2),
            3 => (Level::NPlusM { parity: 3 }, 1),
            4 => (Level::NPlusM { parity: 4 }, 3),
            _ => (Level::Raid6, 2),
        };
        // Without a spare a member that is lost may come back and catch up.
        let spares = if (seed / 8).is_multiple_of(2) { spares } else { 0 };
        Self::Journaled { level, spares, chunk_kib: [4, 8, 16][(seed / 8 % 3) as usize] }
    }

    /// Level, bytes of a chunk, spares.
    fn shape(self) -> (Level, u64, usize) {
        match self {
            Self::Mirror => (Level::Raid1 { copies: 3 }, 64 * KIB, 0),
            Self::Parity => (Level::Raid6, 16 * KIB, 2),
            Self::Journaled { level, spares, chunk_kib } => (level, chunk_kib * KIB, spares),
        }
    }

    /// True where parts of stripes are overwritten through a journal.
    #[must_use]
    pub fn is_journaled(self) -> bool {
        matches!(self, Self::Journaled { .. })
    }

    /// Drives that may be lost.
    #[must_use]
    pub fn bears(self) -> usize {
        self.shape().0.tolerates()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shape().0.fmt(f)
    }
}

/// See the module.
pub struct Rack {
    pub world: Rc<World>,
    pub kind: Kind,
    pub uuid: Uuid,
    pub array: RefCell<Option<RaidArray>>,
    epoch: Cell<u64>,
    /// Drives that are gone or whose replacement is not in step yet.
    lost: RefCell<BTreeSet<usize>>,
    /// Drives of `lost` that still answer a few requests.
    doomed: RefCell<BTreeSet<usize>>,
    /// Drives with unreadable blocks.
    unreadable: RefCell<BTreeSet<usize>>,
    /// The drive with silently wrong bytes. Only those who read what two copies agree about bear it.
    rotten: Cell<Option<usize>>,
    pub may_rot: Cell<bool>,
    /// Drives of which writes of data were lost or went astray, until that is put right. Only those bear it who can tell
    /// what they read from what they wrote.
    miswriting: RefCell<BTreeSet<usize>>,
    pub may_miswrite: Cell<bool>,
    /// Where the data begins on each drive, in bytes.
    data_at: Cell<u64>,
    members_made: Cell<u64>,
    /// When it was last opened.
    lost_blocks: Cell<u64>,
}

impl Rack {
    /// Creates the array on the world's drives.
    pub async fn create(world: Rc<World>, kind: Kind) -> Rc<Self> {
        let seed = u128::from(world.seed) << 64;
        let rack = Rc::new(Self {
            world,
            kind,
            uuid: Uuid::from_u128(seed | 1),
            array: RefCell::default(),
            epoch: Cell::new(1),
            lost: RefCell::default(),
            doomed: RefCell::default(),
            unreadable: RefCell::default(),
            rotten: Cell::default(),
            may_rot: Cell::default(),
            miswriting: RefCell::default(),
            may_miswrite: Cell::default(),
            data_at: Cell::default(),
            members_made: Cell::new(0),
            lost_blocks: Cell::new(0),
        });
        let (level, chunk_bytes, spares) = kind.shape();
        let members = (0..rack.world.shape.drives).map(|at| rack.member(at)).collect();
        let spec = ArraySpec {
            uuid: rack.uuid,
            name: "sim".into(),
            level,
            chunk_bytes,
            // Nothing is overwritten on stripes that are declared fresh, and small drives need their room.
            block_bytes: None,
            journal_bytes: (kind == Kind::Parity).then_some(256 * KIB),
            members,
            spares,
        };
        // What an array must bring to its end ends with the node that made it.
        let made = reactor::spawn_in(&rack.world.node(), RaidArray::create(spec, Epoch(1))).await;
        let array = made.expect("nobody kills the node").expect("healthy drives");
        rack.slow_down(&array);
        *rack.array.borrow_mut() = Some(array);
        let into = BufMut::for_overwrite(Recorded::BYTES as usize).into_vec();
        let superblock = rack.world.drive(0).device().read(0, into).await.expect("healthy drives");
        let recorded = Recorded::decode(&superblock[0], rack.uuid);
        rack.data_at.set(recorded.expect("just written").data_at);
        rack
    }

    /// In most lives somebody is slow, and reads do without him where they can.
    fn slow_down(&self, array: &RaidArray) {
        let life = self.world.seed.wrapping_add(self.epoch.get());
        if !life.is_multiple_of(3) {
            array.take_for_slow(life as usize % array.status().members.len(), true);
        }
    }

    fn member(&self, at: usize) -> MemberSpec {
        let made = self.members_made.get() + 1;
        self.members_made.set(made);
        let drive = self.world.drive(at);
        MemberSpec {
            device: drive.device(),
            uuid: Uuid::from_u128(
                u128::from(self.world.seed) << 64 | 0x100 | u128::from(made) << 16,
            ),
            name: drive.name.clone(),
            enclosure: drive.enclosure,
        }
    }

    fn tell(&self, what: impl FnOnce() -> String) {
        self.world.tell(|| {
            let what = what();
            match &*self.array.borrow() {
                None => what,
                Some(array) => {
                    let status = array.status();
                    let states: Vec<_> =
                        status.members.iter().map(|m| (m.index, m.role, m.state)).collect();
                    format!("{what}; lost {:?}; members {states:?}", self.lost.borrow())
                }
            }
        });
    }

    /// The open array.
    #[must_use]
    pub fn array(&self) -> RaidArray {
        self.array.borrow().clone().expect("open")
    }

    /// The epoch of the owner that has the array open.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.get())
    }

    /// Opens the array as its next owner. To be run as a task of the node.
    pub async fn open(&self) -> RaidArray {
        let _busy = levada_base::probe::busy("recovering");
        let epoch = self.epoch.get() + 1;
        self.epoch.set(epoch);
        let found = self.world.drives.borrow().iter().map(|drive| drive.device()).collect();
        match RaidArray::open(self.uuid, found, Epoch(epoch), false).await {
            Ok((array, report)) => {
                let returns = |(_, finding): &(_, _)| matches!(finding, Finding::CatchesUp { .. });
                if report.devices.iter().any(returns) {
                    self.world.note("member there again catches up");
                }
                let is_whole = self.lost.borrow().is_empty() && self.unreadable.borrow().is_empty();
                let lost = array.status().lost_blocks;
                assert!(
                    !is_whole || lost <= self.lost_blocks.get(),
                    "seed {}: {lost} blocks are lost, and no drive is",
                    self.world.seed
                );
                self.lost_blocks.set(lost);
                self.slow_down(&array);
                *self.array.borrow_mut() = Some(array.clone());
                // Before what was unreadable may be mended: a member that was put out for it stays out.
                self.settle();
                array
            }
            Err(error) => panic!(
                "seed {}: open of the {:?} array with {:?} lost: {error}",
                self.world.seed,
                self.kind,
                self.lost.borrow()
            ),
        }
    }

    /// Drives that the array bears to lose besides those it has lost.
    #[must_use]
    pub fn bears(&self) -> usize {
        self.settle();
        self.bears_still()
    }

    /// The same as far as is known, between two starts.
    fn bears_still(&self) -> usize {
        if self.rotten.get().is_some() || !self.miswriting.borrow().is_empty() {
            return 0;
        }
        let not_whole: BTreeSet<_> =
            self.lost.borrow().union(&self.unreadable.borrow()).copied().collect();
        self.kind.bears().saturating_sub(not_whole.len())
    }

    /// Drives that are lost now, or were and are not in step yet.
    #[must_use]
    pub fn lost(&self) -> BTreeSet<usize> {
        self.lost.borrow().clone()
    }

    /// Notes members that the array has put out by itself (their superblocks were unreadable when
    /// it was opened), and forgets losses that rebuilds have made good.
    fn settle(&self) {
        let Some(array) = self.array.borrow().clone() else { return };
        let status = array.status();
        if status.degraded > 0 {
            let out = status.members.iter().filter(|m| m.state == MemberState::Faulty);
            self.lost.borrow_mut().extend(out.map(|member| member.index));
        }
        self.doomed.borrow_mut().retain(|at| !self.world.drive(*at).faults.is_gone());
        self.lost.borrow_mut().retain(|at| {
            if self.doomed.borrow().contains(at) {
                return true;
            }
            let drive = self.world.drive(*at);
            let member = &status.members[*at];
            let in_step = !drive.faults.is_gone()
                && matches!(member.state, MemberState::InSync | MemberState::Spare);
            // A spare may have taken its place; then it is missed no more.
            let replaced = member.state == MemberState::Faulty && member.role.is_none();
            let whole = status.degraded == 0 && status.stopped.is_none();
            !(whole && (in_step || replaced))
        });
    }

    /// A drive is gone, now or within its next requests.
    pub fn lose(&self, at: usize, within: u64) {
        self.lost.borrow_mut().insert(at);
        self.tell(|| format!("lose {at} within {within}"));
        self.world.note("drive lost");
        match within {
            0 => self.world.drive(at).faults.fail(),
            requests => {
                self.doomed.borrow_mut().insert(at);
                self.world.drive(at).faults.fail_after(requests);
            }
        }
    }

    /// One fault, as the stated distribution deals them. Weights are in
    /// `docs/design/0009-simulation.md`.
    pub fn fault(self: &Rc<Self>, rng: &mut Rng) {
        let rot = if self.may_rot.get() { 2 } else { 0 };
        let miswrite = if self.may_miswrite.get() { 4 } else { 0 };
        match rng.weighted(&[4, 1, 3, 2, 6, rot, miswrite]) {
            0 if self.bears() > 0 => {
                let at = rng.below(self.world.shape.drives as u64) as usize;
                if !self.lost.borrow().contains(&at) {
                    self.lose(at, if rng.one_in(2) { 0 } else { rng.below(60) });
                }
            }
            1 if self.bears() == self.kind.bears() && self.bears() >= LOSSES_MAX => {
                let enclosure = rng.below(self.world.shape.enclosures as u64) as u16;
                for at in self.drives_of(enclosure) {
                    self.lose(at, 0);
                }
            }
            2 if self.bears() > 0 => self.spoil(rng),
            3 => {
                self.world.note("drive slow");
                let at = rng.below(self.world.shape.drives as u64) as usize;
                let slow = Duration::from_micros(rng.below(2) * rng.below(8000));
                self.world.drive(at).faults.slow(slow);
            }
            4 => self.mend(rng),
            5 => self.rot(rng),
            // What two wrote wrong, resync after a crash could not tell from what was in flight.
            6 => self.miswrite(rng, 1),
            _ => {}
        }
    }

    /// The drives of an enclosure.
    #[must_use]
    pub fn drives_of(&self, enclosure: u16) -> Vec<usize> {
        let drives = self.world.drives.borrow();
        (0..drives.len()).filter(|at| drives[*at].enclosure == enclosure).collect()
    }

    /// Makes some blocks of a drive unreadable.
    fn spoil(&self, rng: &mut Rng) {
        let at = rng.below(self.world.shape.drives as u64) as usize;
        if self.lost.borrow().contains(&at) {
            return;
        }
        self.unreadable.borrow_mut().insert(at);
        self.tell(|| format!("spoil {at}"));
        self.world.note("unreadable block");
        let drive = self.world.drive(at);
        for _ in 0..rng.between(1, 6) {
            let blocks = self.world.shape.drive_bytes / BLOCK_BYTES;
            let first = rng.below(blocks);
            let count = rng.between(1, 8).min(blocks - first);
            drive.faults.medium_error(first * BLOCK_BYTES, count * BLOCK_BYTES);
        }
    }

    /// Some bytes of every fourth block of one drive read wrong. Not while anything else is the matter: of two
    /// copies that differ nobody could tell the right one.
    pub fn rot(&self, rng: &mut Rng) {
        if self.bears() < self.kind.bears() {
            return;
        }
        let at = rng.below(self.world.shape.drives as u64) as usize;
        self.tell(|| format!("rot on {at}"));
        self.world.note("silent rot");
        self.rotten.set(Some(at));
        // Superblocks and the map have checksums of their own.
        let blocks = self.world.shape.drive_bytes / BLOCK_BYTES;
        for block in self.data_at.get() / BLOCK_BYTES..blocks {
            if rng.one_in(4) {
                let (within, bytes) = (rng.below(BLOCK_BYTES - 64), rng.between(1, 64));
                self.world.drive(at).faults.rot(block * BLOCK_BYTES + within, bytes, 0x40);
            }
        }
    }

    /// Some of the next writes of data are lost, or land elsewhere among the data, on so many drives at most. Not while
    /// anything else is the matter.
    pub fn miswrite(&self, rng: &mut Rng, drives_max: usize) {
        if self.bears() < self.kind.bears() {
            return;
        }
        let (data_at, end) = (self.data_at.get(), self.world.shape.drive_bytes);
        for _ in 0..rng.between(1, drives_max as u64) {
            let at = rng.below(self.world.shape.drives as u64) as usize;
            self.tell(|| format!("{at} miswrites"));
            self.miswriting.borrow_mut().insert(at);
            let drive = self.world.drive(at);
            for _ in 0..rng.between(1, 4) {
                if rng.one_in(2) {
                    self.world.note("write lost");
                    drive.faults.lose_write_behind(data_at);
                } else {
                    self.world.note("write misdirected");
                    drive.faults.misdirect_write_behind(data_at, rng.between(data_at, end - 1));
                }
            }
        }
    }

    /// True while what drives wrote wrong is not put right.
    #[must_use]
    pub fn has_miswritten(&self) -> bool {
        !self.miswriting.borrow().is_empty()
    }

    /// Drives write what they are told again; whether any did not. What they wrote wrong stays.
    #[must_use]
    pub fn write_well(&self) -> bool {
        let mut written = 0;
        for at in &*self.miswriting.borrow() {
            let drive = self.world.drive(*at);
            written += drive.faults.miswritten();
            drive.faults.write_well();
        }
        if written == 0 {
            self.miswriting.borrow_mut().clear();
        }
        written > 0
    }

    /// What was written wrong is put right where the data is known, and now looks whether all chunks agree again. Where
    /// two of one stripe were wrong that nobody needs, nothing tells which: then these drives are not whole as before.
    pub async fn make_agree(&self) {
        let report = self.array().scrub_anew(Limits::NONE).await;
        let report = report.unwrap_or_else(|error| panic!("seed {}: {error}", self.world.seed));
        assert_eq!(report.lost, 0, "seed {}: {report:?}", self.world.seed);
        let mut coverage = self.world.coverage.borrow_mut();
        coverage.count("miswritten chunks found by the array", report.wrong_repaired);
        coverage.count("stripes with two that nobody needs", report.mismatched);
        if report.mismatched == 0 {
            self.miswriting.borrow_mut().clear();
        }
    }

    /// What nobody has rewritten yet reads right again. (A block that was being written when the power went may
    /// have three contents on three copies; if one of them is rotten as well, nothing tells which.)
    pub fn end_rot(&self) {
        if let Some(at) = self.rotten.take() {
            self.heal(at);
        }
    }

    /// Puts something right: rot is gone, unreadable blocks read again, or a lost drive comes back or is
    /// replaced, and a rebuild begins.
    fn mend(self: &Rc<Self>, rng: &mut Rng) {
        if rng.one_in(3) {
            self.end_rot();
            let unreadable = self.unreadable.borrow().first().copied();
            if let Some(at) = unreadable {
                self.unreadable.borrow_mut().remove(&at);
                self.heal(at);
            }
            return;
        }
        let lost: Vec<usize> = self.gone();
        if !lost.is_empty() && rng.one_in(2) {
            let at = *rng.pick(&lost);
            let old = rng.one_in(3);
            let rack = Rc::clone(self);
            reactor::spawn_in(&self.world.node(), async move { rack.replace(at, old).await });
        }
        self.spawn_rebuild();
    }

    /// What a drive holds can be read again; a drive that is gone stays so, now at once if it was
    /// about to go.
    fn heal(&self, at: usize) {
        let drive = self.world.drive(at);
        let gone = drive.faults.is_gone() || self.doomed.borrow_mut().remove(&at);
        drive.faults.heal();
        if gone {
            drive.faults.fail();
        }
    }

    /// Before a start, a drive that is gone may be put in again as it was.
    pub fn put_in_again(&self, rng: &mut Rng) {
        for at in self.gone() {
            if rng.one_in(3) {
                self.tell(|| format!("{at} is there again"));
                self.world.note("drive there again at a start");
                self.world.drive(at).faults.restore();
            }
        }
    }

    /// Before a start, drives may be gone.
    pub fn lose_at_a_start(&self, rng: &mut Rng) {
        for _ in 0..rng.between(1, LOSSES_MAX as u64) {
            let at = rng.below(self.world.shape.drives as u64) as usize;
            if self.bears_still() > 0 && !self.lost.borrow().contains(&at) {
                self.lost.borrow_mut().insert(at);
                self.tell(|| format!("{at} is gone at a start"));
                self.world.note("drive gone at a start");
                self.world.drive(at).faults.fail();
            }
        }
    }

    /// Drives that are gone now.
    fn gone(&self) -> Vec<usize> {
        let drives = self.world.drives.borrow();
        (0..drives.len()).filter(|at| drives[*at].faults.is_gone()).collect()
    }

    /// Puts a drive in the place of one that is gone: the old one come back, or an empty one.
    pub async fn replace(self: &Rc<Self>, at: usize, old: bool) {
        let array = self.array();
        if array.status().members[at].state != MemberState::Faulty {
            // Nobody has noticed yet.
            return;
        }
        self.lost.borrow_mut().insert(at);
        self.tell(|| format!("replace {at}, old: {old}"));
        self.world.note(if old { "drive came back" } else { "drive replaced" });
        match old {
            true => self.world.drive(at).faults.heal(),
            false => drop(self.world.replace_drive(at)),
        }
        self.unreadable.borrow_mut().remove(&at);
        self.doomed.borrow_mut().remove(&at);
        let mut spec = self.member(at);
        if old && self.world.rng(|rng| !rng.one_in(4)) {
            // Whoever gives it back knows what it was.
            spec.uuid = array.status().members[at].uuid;
        }
        match array.replace(at, spec).await {
            Ok(Admitted::Anew) => {}
            Ok(Admitted::CatchesUp) => self.world.note("member given back catches up"),
            Err(_) if self.world.drive(at).faults.is_gone() => {}
            Err(error) => panic!("seed {}: replacing member {at}: {error}", self.world.seed),
        }
    }

    /// Starts a rebuild beside everything else.
    pub fn spawn_rebuild(self: &Rc<Self>) {
        let Some(array) = self.array.borrow().clone() else { return };
        if !array.needs_rebuild() {
            return;
        }
        let seed = self.world.seed;
        reactor::spawn_in(&self.world.node(), async move {
            let _busy = levada_base::probe::busy("rebuilding");
            if let Err(error) = array.rebuild(Limits::NONE).await {
                panic!("seed {seed}: rebuild: {error}");
            }
        });
    }

    /// Everything is put right, rebuilt and scrubbed; nothing may be found wrong.
    pub async fn finish(self: &Rc<Self>) {
        self.end_rot();
        for at in 0..self.world.shape.drives {
            self.heal(at);
        }
        self.unreadable.borrow_mut().clear();
        let array = self.array();
        for at in 0..self.world.shape.drives {
            if array.status().members[at].state == MemberState::Faulty {
                self.replace(at, false).await;
            } else if self.world.drive(at).faults.is_gone() {
                // Nobody has asked it anything since it went.
                self.world.drive(at).faults.restore();
            }
        }
        let seed = self.world.seed;
        array.rebuild(Limits::NONE).await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let status = array.status();
        assert_eq!(status.degraded, 0, "seed {seed}: degraded after the last rebuild");
        let report = array.scrub_anew(Limits::NONE).await;
        let report = report.unwrap_or_else(|error| panic!("seed {seed}: scrub: {error}"));
        let disagree = report.mismatched > 0 && self.miswriting.borrow().is_empty();
        assert!(
            !disagree && report.lost == 0 && report.wrong_repaired == 0,
            "seed {seed}: scrub found damage that nobody did: {report:?}"
        );
        self.world.coverage.borrow_mut().count("stripes scrubbed", report.stripes);
    }
}
