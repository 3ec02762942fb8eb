//! Assembly: from devices to an array, or to a precise account of why not.
//!
//! What always holds:
//! - Nothing is written before a majority of the live members agrees on the newest standing and
//!   the data is known to be whole.
//! - The array is handed out only after dirty stripes were resynced and the new standing, with
//!   the owner's epoch, is on the members.
//!
//! After a crash during open, the next one does the same again: every step may be repeated.

use crate::away;
use crate::engine::Engine;
use crate::error::{AssemblyReport, Finding, Misfit, RaidError};
use crate::journal::Journal;
use crate::layout::{Layout, Level};
use crate::lost::Lost;
use crate::map::{Bit, MapFormat, PageImage, StripeMap};
use crate::member::{Member, MemberState};
use crate::neighbours::Neighbours;
use crate::pace::Foreground;
use crate::raid1;
use crate::redundancy::Redundancy;
use crate::scrub::Scrubbed;
use crate::slow::Slowness;
use crate::superblock::{
    ARRAY_NAME_BYTES, Areas, MEMBER_NAME_BYTES, MEMBERS_MAX, MemberEntry, SECTOR_BYTES,
    SUPERBLOCK_BYTES, Superblock,
};
use crate::update::Updates;
use futures_util::future::join_all;
use levada_base::ids::Uuid;
use levada_base::reactor;
use levada_base::sync::Semaphore;
use levada_base::units::{BLOCK_BYTES, KIB, MIB, round_down};
use levada_base::{BufMut, Epoch, RangeLocks, planted, probe};
use levada_device::{BlockError, Device, DeviceInfo, Durability};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Bytes of the map moved in one request.
const MAP_IO_BYTES: u64 = MIB;
/// An owner that died may have tried a few generations that only absent members saw. Open skips
/// more than it can have tried (one per member), so that no generation has two meanings.
pub(crate) const GENERATIONS_SKIPPED: u64 = 1000;

/// A device that is to be a member.
#[derive(Clone)]
pub struct MemberSpec {
    pub device: Rc<dyn Device>,
    pub uuid: Uuid,
    /// For messages to people; the first [`MEMBER_NAME_BYTES`] bytes are stored.
    pub name: String,
    /// Members of one enclosure may fail together.
    pub enclosure: u16,
}

/// What to create.
#[derive(Clone)]
pub struct ArraySpec {
    pub uuid: Uuid,
    /// The first [`ARRAY_NAME_BYTES`] bytes are stored.
    pub name: String,
    pub level: Level,
    /// Contiguous bytes on one member; for [`Level::Raid1`] the extent that is dealt.
    pub chunk_bytes: u64,
    /// Of a block as users see it, of which a power cut leaves each old or new: 4096 or 512; `None` for the larger that all members
    /// write atomically.
    pub block_bytes: Option<u64>,
    /// Bytes per member for the journal of overwrites; `None` for the default. With too few of them a level with parity
    /// takes fresh stripes only.
    pub journal_bytes: Option<u64>,
    pub members: Vec<MemberSpec>,
    /// So many of the members, from the end, start as hot spares.
    pub spares: usize,
}

fn geometry<T>(reason: &'static str) -> Result<T, RaidError> {
    Err(RaidError::Geometry { reason })
}

fn check_spec(spec: &ArraySpec) -> Result<(), RaidError> {
    if spec.members.len() > MEMBERS_MAX {
        return geometry("at most 55 members");
    }
    if spec.chunk_bytes == 0 || !spec.chunk_bytes.is_multiple_of(BLOCK_BYTES) {
        return geometry("a chunk is a multiple of 4 KiB");
    }
    if ![u64::from(SECTOR_BYTES), BLOCK_BYTES].contains(&spec.block_bytes()) {
        return geometry("a block has 512 or 4096 bytes");
    }
    if spec.journal_bytes.is_some_and(|bytes| !bytes.is_multiple_of(BLOCK_BYTES)) {
        return geometry("the journal is a multiple of 4 KiB");
    }
    let Some(width) = spec.members.len().checked_sub(spec.spares) else {
        return geometry("more spares than members");
    };
    if let Err(reason) = spec.level.check(width) {
        return geometry(reason);
    }
    for (i, member) in spec.members.iter().enumerate() {
        let block_bytes = spec.block_bytes();
        if let Some(why) = Misfit::of(member.device.info(), block_bytes) {
            return Err(RaidError::Misfit { member: member.name.clone(), block_bytes, why });
        }
        if spec.members[..i].iter().any(|other| other.uuid == member.uuid) {
            return geometry("a member is listed twice");
        }
    }
    Ok(())
}

fn info_of(name: &str, layout: &Layout, block_bytes: u64) -> DeviceInfo {
    DeviceInfo {
        name: name.to_owned(),
        capacity_bytes: layout.capacity_bytes(),
        block_bytes,
        atomic_write_bytes: block_bytes,
        io_bytes_best: layout.stripe_bytes(),
    }
}

/// The default journal: 16 chunks, within bounds, but enough to be one. Levels that need none keep some room.
fn default_journal_bytes(spec: &ArraySpec, layout: &Layout) -> u64 {
    let least = Journal::bytes_min(layout.chunks());
    match spec.level.has_parity() {
        true => (16 * spec.chunk_bytes).clamp(64 * KIB, 16 * MIB).max(least),
        false => 64 * KIB,
    }
}

fn truncated(name: &str, bytes_max: usize) -> String {
    let fits = name.char_indices().take_while(|(at, c)| at + c.len_utf8() <= bytes_max);
    fits.map(|(_, c)| c).collect()
}

/// Where everything of a new array will lie. Writes nothing.
fn plan(spec: &ArraySpec) -> Result<(Layout, Areas), RaidError> {
    check_spec(spec)?;
    let layout = spec.layout();
    let smallest = spec.members.iter().min_by_key(|member| member.device.info().capacity_bytes);
    let Some(smallest) = smallest else { return geometry("no members") };
    let capacity_bytes = smallest.device.info().capacity_bytes;
    let journal_bytes = spec.journal_bytes.unwrap_or_else(|| default_journal_bytes(spec, &layout));
    let member_bytes = round_down(capacity_bytes, BLOCK_BYTES);
    let (areas, stripes) =
        Areas::fit(member_bytes, journal_bytes, spec.level, layout.width, spec.chunk_bytes);
    if stripes == 0 {
        let rows = match spec.level {
            Level::Raid1 { copies } => copies as u64,
            _ => 1,
        };
        let needed_bytes = areas.data_at + rows * spec.chunk_bytes;
        let member = smallest.name.clone();
        return Err(RaidError::TooSmall { member, capacity_bytes, needed_bytes });
    }
    Ok((Layout { stripes, ..layout }, areas))
}

impl ArraySpec {
    /// With no stripes yet. Of a spec that was checked.
    fn layout(&self) -> Layout {
        let width = self.members.len() - self.spares;
        Layout { level: self.level, width, chunk_bytes: self.chunk_bytes, stripes: 0 }
    }

    /// Of a block, where that is not said: of a spec that may be wrong.
    fn block_bytes(&self) -> u64 {
        let atomic = self.members.iter().map(|member| member.device.info().atomic_write_bytes);
        let is_small = atomic.min().is_some_and(|bytes| bytes < BLOCK_BYTES);
        let larger = if is_small { u64::from(SECTOR_BYTES) } else { BLOCK_BYTES };
        self.block_bytes.unwrap_or(larger)
    }

    /// Whether such an array can be; its capacity in bytes. Writes nothing.
    ///
    /// # Errors
    ///
    /// [`RaidError::Geometry`], [`RaidError::Misfit`], [`RaidError::TooSmall`].
    pub fn check(&self) -> Result<u64, RaidError> {
        Ok(plan(self)?.0.capacity_bytes())
    }

    /// The smallest journal with which such an array takes overwrites; 0 where the level needs none.
    ///
    /// # Errors
    ///
    /// As [`ArraySpec::check`].
    pub fn journal_bytes_min(&self) -> Result<u64, RaidError> {
        check_spec(self)?;
        let chunks = self.layout().chunks();
        Ok(if self.level.has_parity() { Journal::bytes_min(chunks) } else { 0 })
    }
}

/// Lays an array out over `spec.members` and opens it. What the devices held is lost.
pub(crate) async fn create(spec: ArraySpec, epoch: Epoch) -> Result<Rc<Engine>, RaidError> {
    let (layout, areas) = plan(&spec)?;
    let width = layout.width;

    let mut roles = vec![None; spec.members.len()];
    let order = match spec.level {
        Level::Raid1 { .. } => {
            let enclosures: Vec<u16> = spec.members[..width].iter().map(|m| m.enclosure).collect();
            raid1::deal(&enclosures)
        }
        _ => (0..width).collect(),
    };
    for (role, member) in order.into_iter().enumerate() {
        roles[member] = Some(role);
    }
    let entry = |(member, role): (&MemberSpec, Option<usize>)| MemberEntry {
        uuid: member.uuid,
        name: truncated(&member.name, MEMBER_NAME_BYTES),
        enclosure: member.enclosure,
        role,
        state: if role.is_some() { MemberState::InSync } else { MemberState::Spare },
        held: None,
    };
    let superblock = Superblock {
        uuid: spec.uuid,
        name: truncated(&spec.name, ARRAY_NAME_BYTES),
        generation: 0,
        epoch,
        held_by_all: 0,
        journal_from: 1,
        patched: false,
        scrubbed: Scrubbed::default(),
        layout,
        block_bytes: spec.block_bytes(),
        areas,
        members: spec.members.iter().zip(roles).map(entry).collect(),
    };

    let devices = spec.members.iter().map(|member| Some(Rc::clone(&member.device))).collect();
    let engine = build(&superblock, devices, epoch)?;
    for result in join_all(spec.members.iter().map(|member| format(member, &areas, epoch))).await {
        result?;
    }
    engine.persist_pages(0..engine.map.pages()).await?;
    // Both places hold a superblock from the start. No flush: superblocks and pages are written
    // through.
    engine.confirm_standing().await?;
    let all_live = engine.members.borrow().iter().all(|member| member.is_live());
    // Nothing is lost when a new array is refused.
    if all_live { Ok(engine) } else { Err(RaidError::Block(BlockError::Gone)) }
}

/// Takes the device and removes what would pass for superblocks.
async fn format(member: &MemberSpec, areas: &Areas, epoch: Epoch) -> Result<(), BlockError> {
    member.device.fence(epoch).await?;
    let blank = BufMut::zeroed(2 * SUPERBLOCK_BYTES as usize).freeze();
    member.device.write(0, blank.into_vec(), Durability::Fua).await?;
    areas.clear_journal(&member.device).await
}

/// The engine of a superblock; `devices` by index of member.
fn build(
    superblock: &Superblock,
    devices: Vec<Option<Rc<dyn Device>>>,
    epoch: Epoch,
) -> Result<Rc<Engine>, RaidError> {
    let layout = superblock.layout;
    let Ok(redundancy) = Redundancy::of(&layout) else { return geometry("no such parity code") };
    let mut roles = vec![None; layout.width];
    let mut members = Vec::new();
    for (index, (entry, device)) in superblock.members.iter().zip(devices).enumerate() {
        let identity = (entry.uuid, entry.name.clone(), entry.enclosure);
        let member = Member::new(index, identity, device, entry.role, entry.state);
        member.held.set(entry.held);
        if let Some(role) = entry.role
            && member.is_live()
        {
            roles[role] = Some(Rc::clone(&member));
        }
        members.push(member);
    }
    Ok(Rc::new(Engine {
        uuid: superblock.uuid,
        name: superblock.name.clone(),
        epoch,
        layout,
        areas: superblock.areas,
        redundancy,
        info: info_of(&superblock.name, &layout, superblock.block_bytes),
        members: RefCell::new(members),
        roles: RefCell::new(roles),
        map: StripeMap::empty(superblock.uuid, layout.stripes, superblock.areas.map_format),
        journal: Journal::new(&layout, &superblock.areas, superblock.journal_from).map(Rc::new),
        updates: Updates::default(),
        neighbours: Neighbours::default(),
        lost: Lost::new(superblock.areas.lost_bytes),
        patched: Cell::new(superblock.patched),
        detached: Rc::default(),
        records_nothing: Cell::new(false),
        locks: RangeLocks::default(),
        preparing: RangeLocks::default(),
        unclean: RefCell::default(),
        writes: Cell::new(0),
        flushed: Cell::new(0),
        generation: Cell::new(superblock.generation),
        held_by_all: Cell::new(superblock.held_by_all),
        recorded_by: RefCell::default(),
        standing_wanted: Cell::new(0),
        standing_recorded: Cell::new(0),
        standing_turn: Semaphore::new(1),
        absences: RefCell::default(),
        stopped: RefCell::new(None),
        subscribers: RefCell::default(),
        foreground: Foreground::default(),
        rebuild: Cell::new(None),
        rebuild_blocked: Cell::new(None),
        patience: Cell::default(),
        vanished: RefCell::default(),
        rebuild_stuck: RefCell::default(),
        group: reactor::current_group(),
        scrub: Cell::new(None),
        scrubbed: Cell::new(superblock.scrubbed),
        scrub_told: Cell::new(superblock.scrubbed),
        scrub_turn: Semaphore::new(1),
        rebuild_turn: Semaphore::new(1),
        slowness: Slowness::default(),
    }))
}

/// The newest superblock of a device.
pub(crate) struct Probed {
    pub superblock: Superblock,
    /// Index of the member that the device is.
    pub member: usize,
    /// Where it lies.
    pub at: u64,
    /// Another array that the device has a superblock of as well.
    pub other: Option<Uuid>,
}

/// What the superblocks of a device say: the valid one of the higher (epoch, generation).
pub(crate) async fn probe(device: &Rc<dyn Device>) -> Result<Option<Probed>, BlockError> {
    let mut newest: Option<Probed> = None;
    let mut arrays = [None; 2];
    let mut failure = None;
    for at in [0, SUPERBLOCK_BYTES] {
        // Read apart: an unreadable one does not hide the other.
        let into = BufMut::zeroed(SUPERBLOCK_BYTES as usize).into_vec();
        let bytes = match device.read(at, into).await {
            Ok(bytes) => bytes,
            Err(error) => {
                failure = Some(error);
                continue;
            }
        };
        let Some((superblock, member)) = Superblock::decode(&bytes[0]) else { continue };
        arrays[(at / SUPERBLOCK_BYTES) as usize] = Some(superblock.uuid);
        if newest.as_ref().is_none_or(|other| order(&other.superblock) < order(&superblock)) {
            newest = Some(Probed { superblock, member, at, other: None });
        }
    }
    if let Some(newest) = &mut newest {
        let is_other = |array: &Uuid| *array != newest.superblock.uuid;
        newest.other = arrays.into_iter().flatten().find(is_other);
    }
    match (newest, failure) {
        (Some(newest), _) => Ok(Some(newest)),
        (None, Some(error)) => Err(error),
        (None, None) => Ok(None),
    }
}

fn order(superblock: &Superblock) -> (Epoch, u64) {
    (superblock.epoch, superblock.generation)
}

/// What the devices that may be members of an array hold of it.
struct Sighting {
    newest: Superblock,
    /// By member.
    devices: Vec<Option<Rc<dyn Device>>>,
    /// By member: where its newest superblock lies.
    superblocks_at: Vec<Option<u64>>,
    report: AssemblyReport,
}

/// Whether array `uuid` could be opened from these devices. Writes nothing.
pub(crate) async fn examine(
    uuid: Uuid,
    found: &[Rc<dyn Device>],
    force: bool,
) -> Result<AssemblyReport, RaidError> {
    let Sighting { newest, devices, mut report, .. } = look(uuid, found).await?;
    name_absent(&newest, &devices, &mut report);
    check_standing(&newest, &devices, force, &report)?;
    Ok(report)
}

async fn look(uuid: Uuid, found: &[Rc<dyn Device>]) -> Result<Sighting, RaidError> {
    let probed = join_all(found.iter().map(probe)).await;
    let ours = |probe: &Result<Option<Probed>, BlockError>| match probe {
        Ok(Some(Probed { superblock, other: None, .. })) if superblock.uuid == uuid => {
            Some(superblock.clone())
        }
        Ok(_) | Err(_) => None,
    };
    let newest = probed.iter().filter_map(ours).max_by_key(order);
    let mut report = AssemblyReport::default();
    let Some(newest) = newest else {
        report.devices = classify(found, &probed, None, uuid, &mut []);
        return Err(RaidError::NotFound { report: Box::new(report) });
    };
    let mut devices = vec![None; newest.members.len()];
    report.generation = newest.generation;
    report.devices = classify(found, &probed, Some(&newest), uuid, &mut devices);
    let mut superblocks_at = vec![None; newest.members.len()];
    for (probe, (_, finding)) in probed.iter().zip(&report.devices) {
        if let (Ok(Some(probe)), Some(member)) = (probe, finding.member_taken()) {
            superblocks_at[member] = Some(probe.at);
        }
    }
    Ok(Sighting { newest, devices, superblocks_at, report })
}

/// Opens array `uuid` from the devices that may be its members, for the owner of `epoch`.
pub(crate) async fn open(
    uuid: Uuid,
    found: Vec<Rc<dyn Device>>,
    epoch: Epoch,
    force: bool,
) -> Result<(Rc<Engine>, AssemblyReport), RaidError> {
    let Sighting { newest, mut devices, superblocks_at, mut report } = look(uuid, &found).await?;
    if newest.epoch > epoch {
        return Err(RaidError::Fenced { ours: epoch, seen: newest.epoch });
    }
    take(&mut devices, epoch, &mut report).await?;
    name_absent(&newest, &devices, &mut report);
    check_standing(&newest, &devices, force, &report)?;
    // Whoever is taken back counts for nothing until then.
    take_back(&newest, &mut devices, &mut report).await;

    // Those that are missing are out, before anything is written that they would miss.
    let mut superblock = newest.clone();
    for (index, (entry, device)) in superblock.members.iter_mut().zip(&devices).enumerate() {
        match device {
            None => {
                if newest.areas.map_format != MapFormat::Single && !report.is_damaged(index) {
                    entry.held = away::held_when_absent(entry, &newest);
                }
                entry.state = MemberState::Faulty;
            }
            Some(_) if report.returns(index) => {
                entry.held = entry.held.filter(|_| report.catches_up(index));
                entry.state = match entry.role {
                    Some(_) => MemberState::Rebuilding { next_slot: 0 },
                    None => MemberState::Spare,
                };
            }
            Some(_) => {}
        }
    }
    superblock.generation = newest.generation + GENERATIONS_SKIPPED;
    let engine = build(&superblock, devices, epoch)?;
    for (member, at) in engine.members.borrow().iter().zip(superblocks_at) {
        member.superblock_at.set(at);
    }
    let stale_pages = load_map(&engine, epoch, &report).await?;
    if superblock.patched {
        engine.map.patch_all();
    }
    engine.fill_roles();
    engine.note_roles();
    engine.confirm_standing().await?;
    // What was read must not change when other members are missing next time.
    let rewrites = stale_pages.into_iter().map(|page| engine.persist_pages(page..page + 1));
    for result in join_all(rewrites).await {
        result?;
    }
    engine.load_lost().await?;
    engine.replay().await.map_err(|error| match engine.lost.unlisted.get() {
        Some(stripe) => RaidError::LostUnlisted { stripe },
        None => error.into(),
    })?;
    engine.resync().await?;
    engine.note_roles();
    Ok((engine, report))
}

/// Says what each device is and puts the live members into `devices`.
fn classify(
    found: &[Rc<dyn Device>],
    probed: &[Result<Option<Probed>, BlockError>],
    newest: Option<&Superblock>,
    uuid: Uuid,
    devices: &mut [Option<Rc<dyn Device>>],
) -> Vec<(String, Finding)> {
    let mut findings = Vec::new();
    for (device, probe) in found.iter().zip(probed) {
        let finding = match (probe, newest) {
            (Err(error), _) => Finding::Unreadable { error: error.clone() },
            (Ok(None), _) => Finding::NoSuperblock,
            (Ok(Some(Probed { superblock, other: Some(other), .. })), _)
                if superblock.uuid == uuid || *other == uuid =>
            {
                let by = if superblock.uuid == uuid { *other } else { superblock.uuid };
                Finding::Claimed { by }
            }
            (Ok(Some(Probed { superblock, .. })), None) => {
                Finding::Foreign { array: superblock.uuid }
            }
            (Ok(Some(Probed { superblock, .. })), Some(_)) if superblock.uuid != uuid => {
                Finding::Foreign { array: superblock.uuid }
            }
            (Ok(Some(Probed { superblock, member, .. })), Some(newest)) => {
                let (member, identity) = (*member, superblock.members[*member].uuid);
                let is_large = device.info().capacity_bytes >= newest.areas.bytes();
                let back = away::held_by(superblock, newest, member);
                let back = back.filter(|held| held.by_itself && is_large);
                match (newest.members.get(member), back) {
                    (Some(entry), _) if entry.uuid != identity => {
                        Finding::Replaced { uuid: identity }
                    }
                    (None, _) => Finding::Replaced { uuid: identity },
                    (Some(_), _) if devices[member].is_some() => Finding::Duplicate { member },
                    (Some(_), Some(held)) => {
                        devices[member] = Some(Rc::clone(device));
                        match held.is_told {
                            true => Finding::CatchesUp { member },
                            false => Finding::GetsAll { member },
                        }
                    }
                    (Some(entry), None)
                        if !entry.state.is_live() || superblock.generation < newest.held_by_all =>
                    {
                        Finding::Stale { member, generation: superblock.generation }
                    }
                    (Some(_), None) if !is_large => {
                        let (bytes, needed_bytes) =
                            (device.info().capacity_bytes, newest.areas.bytes());
                        Finding::CutShort { member, bytes, needed_bytes }
                    }
                    (Some(_), None) => {
                        devices[member] = Some(Rc::clone(device));
                        Finding::Used { member }
                    }
                }
            }
        };
        findings.push((device.info().name.clone(), finding));
    }
    findings
}

/// Fences the live members for `epoch`; one that cannot be fenced counts as missing.
async fn take(
    devices: &mut [Option<Rc<dyn Device>>],
    epoch: Epoch,
    report: &mut AssemblyReport,
) -> Result<(), RaidError> {
    for slot in devices.iter_mut() {
        let Some(device) = slot else { continue };
        match device.fence(epoch).await {
            Ok(()) => {}
            Err(BlockError::Fenced { ours, seen }) => return Err(RaidError::Fenced { ours, seen }),
            Err(error) => {
                let name = device.info().name.clone();
                report.devices.push((name, Finding::Unreadable { error }));
                *slot = None;
            }
        }
    }
    Ok(())
}

/// Members that were away take part again; one that does not take a write stays away.
async fn take_back(
    newest: &Superblock,
    devices: &mut [Option<Rc<dyn Device>>],
    report: &mut AssemblyReport,
) {
    for (index, slot) in devices.iter_mut().enumerate() {
        let Some(device) = slot.as_ref().filter(|_| report.returns(index)) else { continue };
        // What it recorded has a meaning no more.
        let cleared = match report.catches_up(index) {
            true => newest.areas.clear_journal(device).await,
            false => newest.areas.clear_records(device).await,
        };
        if let Err(error) = cleared {
            let name = device.info().name.clone();
            report.devices.push((name, Finding::Unreadable { error }));
            *slot = None;
        }
    }
}

fn name_absent(
    newest: &Superblock,
    devices: &[Option<Rc<dyn Device>>],
    report: &mut AssemblyReport,
) {
    let old = |report: &AssemblyReport, index| {
        let mut findings = report.devices.iter().map(|(_, finding)| finding);
        findings.any(|finding| matches!(finding, Finding::Stale { member, .. } if *member == index))
    };
    for (index, (entry, device)) in newest.members.iter().zip(devices).enumerate() {
        if device.is_some() {
            continue;
        }
        if !entry.state.is_live() || old(report, index) {
            report.faulty.push(entry.name.clone());
        } else {
            report.missing.push(entry.name.clone());
        }
    }
}

/// Is the data whole, and can these members know the newest standing?
fn check_standing(
    newest: &Superblock,
    devices: &[Option<Rc<dyn Device>>],
    force: bool,
    report: &AssemblyReport,
) -> Result<(), RaidError> {
    let entries = || newest.members.iter().zip(devices);
    let whole =
        entries().filter(|(entry, device)| entry.state == MemberState::InSync && device.is_some());
    let held = whole.fold(0u64, |bits, (entry, _)| bits | entry.role.map_or(0, |role| 1 << role));
    let out = !held & ((1 << newest.layout.width) - 1);
    if !newest.layout.survives(out) {
        return Err(RaidError::TooManyLost {
            lost: out.count_ones() as usize,
            tolerated: newest.layout.level.tolerates(),
            report: Box::new(report.clone()),
        });
    }
    // One that was being taken back, and does not know of that, can have gone on with nobody, and nor does it say that nobody has.
    let live = || {
        let known = entries().enumerate().filter(|(index, _)| !report.returns(*index));
        known.map(|(_, entry)| entry).filter(|(entry, _)| entry.state.is_live())
    };
    let found = live().filter(|(_, device)| device.is_some()).count();
    let live = live().count();
    if found * 2 <= live && !force {
        return Err(RaidError::NoMajority { found, live, report: Box::new(report.clone()) });
    }
    Ok(())
}

/// Loads the newest image of every page; the pages on which members differ.
async fn load_map(
    engine: &Rc<Engine>,
    epoch: Epoch,
    report: &AssemblyReport,
) -> Result<Vec<u64>, RaidError> {
    let pages = engine.map.pages();
    let step = MAP_IO_BYTES / engine.map.format.bytes_for(1);
    let mut stale = Vec::new();
    for first in (0..pages).step_by(step as usize) {
        let count = step.min(pages - first);
        // One that was away may have a page that nobody else has, and of which another was made.
        let live = engine.live_members();
        let live = live.iter().filter(|member| member.held.get().is_none());
        let reads = live.map(|member| read_pages(engine, member, first, count));
        let images = join_all(reads).await;
        for page in first..first + count {
            let of_page = || images.iter().map(|of_member| &of_member[(page - first) as usize]);
            let key = |image: &PageImage| (image.epoch, image.sequence);
            let Some(newest) = of_page().flatten().max_by_key(|image| key(image)) else {
                return Err(RaidError::MapLost { page, report: Box::new(report.clone()) });
            };
            if newest.epoch > epoch {
                return Err(RaidError::Fenced { ours: epoch, seen: newest.epoch });
            }
            let same = |image: &Option<PageImage>| image.as_ref().map(key) == Some(key(newest));
            if !of_page().all(same) {
                stale.push(page);
            }
            engine.map.load(page, newest);
        }
    }
    if engine.live_members().iter().any(|member| member.held.get().is_some()) {
        stale = (0..pages).collect();
    }
    Ok(stale)
}

/// Reads pages of one member, the newest image of each; those that are unreadable or invalid are `None`.
async fn read_pages(
    engine: &Rc<Engine>,
    member: &Rc<Member>,
    first: u64,
    count: u64,
) -> Vec<Option<PageImage>> {
    let format = engine.map.format;
    let decode = |bytes: &[u8], page| PageImage::decode(bytes, format, engine.uuid, page);
    let newest = |images: &mut dyn Iterator<Item = Option<PageImage>>| {
        images.flatten().max_by_key(|image| (image.epoch, image.sequence))
    };
    let (at, bytes_each) = (engine.areas.map_at, format.bytes_for(1));
    let into = BufMut::zeroed((count * bytes_each) as usize).into_vec();
    if let Ok(bytes) = engine.member_read(member, at + first * bytes_each, into).await {
        let pages = bytes[0].chunks(bytes_each as usize).zip(first..);
        let images = pages.map(|(images, page)| {
            newest(&mut images.chunks(BLOCK_BYTES as usize).map(|bytes| decode(bytes, page)))
        });
        return images.collect();
    }
    // One bad sector must not cost the others.
    let mut pages = Vec::new();
    for page in first..first + count {
        let mut images = Vec::new();
        for image in 0..format.images() {
            let into = BufMut::zeroed(BLOCK_BYTES as usize).into_vec();
            let read = engine.member_read(member, at + format.offset(page, image), into).await;
            images.push(read.ok().and_then(|bytes| decode(&bytes[0], page)));
        }
        pages.push(newest(&mut images.into_iter()));
    }
    pages
}

impl Engine {
    /// Makes the members agree about every dirty stripe, then clears the dirty bits.
    async fn resync(self: &Rc<Self>) -> Result<(), BlockError> {
        /// Stripes at once.
        const AT_ONCE: usize = 8;
        let _busy = probe::busy("array resync");
        let mut from = 0;
        let mut any = false;
        loop {
            let mut batch = Vec::with_capacity(AT_ONCE);
            while batch.len() < AT_ONCE
                && let Some(stripe) = self.map.next_set(Bit::Dirty, from)
            {
                from = stripe + 1;
                if self.map.has(Bit::Written, stripe) {
                    batch.push(stripe);
                }
            }
            if batch.is_empty() {
                break;
            }
            any = true;
            if !planted!("raid-resync-skipped") {
                join_all(batch.iter().map(|stripe| self.resync_stripe(*stripe))).await;
            }
            self.settle().await?;
        }
        if any {
            self.flush_members().await?;
            let mut at = 0;
            while let Some(stripe) = self.map.next_set(Bit::Dirty, at) {
                self.map.set(Bit::Dirty, stripe..stripe + 1, false);
                at = stripe + 1;
            }
            self.persist(0..self.layout.stripes).await?;
        }
        Ok(())
    }
}
