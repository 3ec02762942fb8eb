//! [`RaidArray`]: the engine as its users see it.

use crate::array::{Array, ArrayGeometry, IoClass, MemberSet};
use crate::assemble::{self, ArraySpec, MemberSpec};
use crate::engine::Engine;
use crate::error::{AssemblyReport, RaidError};
use crate::map::Bit;
use crate::member::Member;
use crate::pace::{Foreground, Kind, Limits};
use crate::scrub::ScrubReport;
use crate::standing::Admitted;
use crate::status::{ArrayEvent, ArrayStatus, MemberStatus};
use levada_base::ids::Uuid;
use levada_base::sync::queue;
use levada_base::{Epoch, IoVec, IoVecMut, LentVec};
use levada_device::{BlockError, Device, DeviceInfo, Durability, Health, IoFuture, LentFuture};
use std::rc::Rc;
use std::time::Duration;

/// An open array of any level. Cheap to clone; all clones are one array.
///
/// Dropping it is a stop without warning, which costs the next open a resync of what is dirty;
/// [`RaidArray::close`] is the orderly end.
#[derive(Clone)]
pub struct RaidArray {
    engine: Rc<Engine>,
}

impl RaidArray {
    /// Lays a new array out over the members and opens it. What they held is lost.
    ///
    /// # Errors
    ///
    /// [`RaidError::Geometry`], [`RaidError::Misfit`] and [`RaidError::TooSmall`] before anything was written;
    /// [`RaidError::Block`] when a member fails.
    pub async fn create(spec: ArraySpec, epoch: Epoch) -> Result<Self, RaidError> {
        Ok(Self { engine: assemble::create(spec, epoch).await? })
    }

    /// Whether [`RaidArray::open`] would find what it needs: for those who open several arrays, or
    /// none. Reads only.
    ///
    /// # Errors
    ///
    /// What is missing or wrong, with a report.
    pub async fn examine(
        uuid: Uuid,
        found: &[Rc<dyn Device>],
        force: bool,
    ) -> Result<AssemblyReport, RaidError> {
        assemble::examine(uuid, found, force).await
    }

    /// Opens array `uuid` from devices that may be its members, in any order, for the owner of
    /// `epoch`. Resyncs what an unclean stop left dirty before it returns. Live members that are
    /// not among them are out from here on. `force` does without a majority of the members: for
    /// when those missing are gone for good.
    ///
    /// # Errors
    ///
    /// What is missing or wrong, with a report; nothing was written then, except for
    /// [`RaidError::Block`].
    pub async fn open(
        uuid: Uuid,
        found: Vec<Rc<dyn Device>>,
        epoch: Epoch,
        force: bool,
    ) -> Result<(Self, AssemblyReport), RaidError> {
        let (engine, report) = assemble::open(uuid, found, epoch, force).await?;
        Ok((Self { engine }, report))
    }

    /// Flushes, and leaves nothing to resync. No I/O may be in flight.
    ///
    /// # Errors
    ///
    /// When the array has stopped; then open resyncs.
    pub async fn close(&self) -> Result<(), BlockError> {
        self.engine.close().await
    }

    /// Its owner's.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.engine.epoch
    }

    /// Other machines reach some of its members.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.engine.members.borrow().iter().any(|member| member.is_shared())
    }

    /// Stops: `seen` has one of the members, a later owner. Without this an array stops when a member says so, which may be never while nothing
    /// is asked of it.
    pub fn lose_to(&self, seen: Epoch) {
        self.engine.stop(BlockError::Fenced { ours: self.epoch(), seen });
    }

    /// Takes a member out, as if its drive had failed. A hot spare takes its role at once.
    ///
    /// # Errors
    ///
    /// [`RaidError::Member`] when its data is nowhere else.
    pub async fn fail(&self, member: usize) -> Result<(), RaidError> {
        self.engine.fail(member).await
    }

    /// Puts a new device, or the old one come back, in the place of a faulty member. It takes
    /// the member's role and needs [`RaidArray::rebuild`], or is a spare when another has it. With the UUID of the old one it
    /// may be that one: then it needs only what changed meanwhile.
    ///
    /// # Errors
    ///
    /// [`RaidError::Member`] when the member is not faulty, [`RaidError::TooSmall`], [`RaidError::Misfit`].
    pub async fn replace(&self, member: usize, with: MemberSpec) -> Result<Admitted, RaidError> {
        self.engine.replace(member, with).await
    }

    /// Adds a hot spare and returns its index; a vacant role is its at once, the [neediest](Self::neediest) of them.
    ///
    /// # Errors
    ///
    /// As [`RaidArray::replace`].
    pub async fn add_spare(&self, with: MemberSpec) -> Result<usize, RaidError> {
        self.engine.add_spare(with).await
    }

    /// Rebuilds every member that needs it, beside other I/O, and returns when none does. One
    /// at a time: a second call waits, then finds little to do. Progress is in
    /// [`RaidArray::status`]. Dropping it pauses the rebuild.
    ///
    /// # Errors
    ///
    /// When the array stops, or a stripe has too few readable chunks left. Tried again, such a stripe is left out in the end,
    /// unless [`ArrayStatus::rebuild_blocked`].
    pub async fn rebuild(&self, limits: Limits) -> Result<(), BlockError> {
        self.engine.rebuild(limits).await
    }

    /// Members that wait for a rebuild.
    #[must_use]
    pub fn needs_rebuild(&self) -> bool {
        self.engine.needs_rebuild()
    }

    /// Reads every written stripe on every member, repairs what can be located, and counts. One at a time: a second call
    /// waits. Dropping it, or the end of the process, interrupts it: the next call goes on where it was, and so does its
    /// report.
    ///
    /// # Errors
    ///
    /// When the array stops.
    pub async fn scrub(&self, limits: Limits) -> Result<ScrubReport, BlockError> {
        self.engine.scrub(limits, false).await
    }

    /// As [`RaidArray::scrub`], from the first stripe on, whatever was interrupted.
    ///
    /// # Errors
    ///
    /// When the array stops.
    pub async fn scrub_anew(&self, limits: Limits) -> Result<ScrubReport, BlockError> {
        self.engine.scrub(limits, true).await
    }

    /// Whether reads do without members that are much slower than the others, where redundancy allows; they do unless told
    /// otherwise. Who is slow is told either way.
    pub fn avoid_slow_members(&self, avoid: bool) {
        self.engine.slowness.avoids.set(avoid);
    }

    /// How long a member that vanishes from now on is waited for before a spare takes its role; not at all unless told. Who
    /// fails otherwise, or is taken out, is not waited for, and nobody is where the next loss would be one too many.
    pub fn wait_for_vanished(&self, patience: Duration) {
        self.engine.patience.set(patience);
    }

    /// Takes a member for slow, or not, whatever it is. For tests.
    #[doc(hidden)]
    pub fn take_for_slow(&self, member: usize, is_slow: bool) {
        self.engine.slowness.set(member, is_slow);
    }

    /// From now on overwrites are not recorded before they are in place, so that a power cut may lose what nobody wrote:
    /// shows what the journal costs. For measurements on data that nobody needs; nothing else may call it.
    #[doc(hidden)]
    pub fn record_nothing_for_measurement(&self) {
        self.engine.records_nothing.set(true);
    }

    /// A queue of everything noteworthy from now on.
    #[must_use]
    pub fn events(&self) -> queue::Receiver<ArrayEvent> {
        let (sender, receiver) = queue::channel();
        self.engine.subscribers.borrow_mut().push(sender);
        receiver
    }

    /// The array and its members, for people.
    #[must_use]
    pub fn status(&self) -> ArrayStatus {
        let engine = &self.engine;
        let member = |member: &Rc<Member>| MemberStatus {
            index: member.index,
            uuid: member.uuid,
            name: member.name.clone(),
            enclosure: member.enclosure,
            role: member.role.get(),
            state: member.state.get(),
            catches_up: member.held.get().is_some_and(|held| held.is_told)
                && member.role.get().is_some(),
            vanished: !member.is_live() && member.held.get().is_some_and(|held| held.by_itself),
            awaited: engine.awaited(member),
            bytes_read: member.stats.bytes_read.get(),
            bytes_written: member.stats.bytes_written.get(),
            medium_errors: member.stats.medium_errors.get(),
            io_errors: member.stats.io_errors.get(),
            unreadable_chunks: member.unreadable_chunks(),
            repairs: member.stats.repairs.get(),
            lacks_blocks: member.lacks_blocks(),
            slow: engine.slowness.is_slow(member.index),
            latency: member.stats.latency.clone(),
        };
        ArrayStatus {
            uuid: engine.uuid,
            name: engine.name.clone(),
            level: engine.layout.level,
            chunk_bytes: engine.layout.chunk_bytes,
            capacity_bytes: engine.info.capacity_bytes,
            stripes: engine.layout.stripes,
            stripes_written: engine.map.written_stripes(),
            lost_blocks: engine.lost.blocks(),
            generation: engine.generation.get(),
            degraded: engine.roles_out().count_ones() as usize,
            tolerates: engine.layout.level.tolerates(),
            stopped: engine.stopped.borrow().clone(),
            members: engine.members.borrow().iter().map(member).collect(),
            rebuild: engine.rebuild.get(),
            rebuild_blocked: engine.rebuild_blocked.get(),
            scrub: engine.scrub.get(),
            scrubbed_below: engine.scrubbed.get().below,
        }
    }

    /// The member that is out whose role a spare takes next: the one with which the array will bear most, or else one whose stripes lack most.
    /// `None`: none is out, or all are waited for.
    #[must_use]
    pub fn neediest(&self) -> Option<usize> {
        self.engine.neediest().map(|member| member.index)
    }

    /// Whether some stripe has chunks on both roles: there a loss of both counts twice.
    #[must_use]
    pub fn share_stripes(&self, one: usize, other: usize) -> bool {
        self.engine.layout.share_stripes(one, other)
    }

    /// How many more drives may go, whichever, without those that are out and the members `without`.
    #[must_use]
    pub fn bears_without(&self, without: &[usize]) -> usize {
        let members = self.engine.members.borrow();
        let roles = without.iter().filter_map(|index| members.get(*index)?.role.get());
        let out = roles.fold(self.engine.roles_out(), |out, role| out | 1 << role);
        self.engine.layout.bears(out)
    }

    /// Whether anything that was acknowledged may not be durable yet. If not, all of it is there for whoever opens the array next, though
    /// nobody asked for a flush. For who checks that; a flush looks by itself.
    #[must_use]
    pub fn has_unflushed(&self) -> bool {
        // Those that are out count as in step until that is recorded.
        self.engine.has_unrecorded_standing() || self.engine.has_unflushed()
    }

    /// False when the array would stop without this member.
    #[must_use]
    pub fn can_do_without(&self, member: usize) -> bool {
        let members = self.engine.members.borrow();
        members.get(member).is_none_or(|member| self.engine.can_do_without(member))
    }

    /// Looks whether the members are still there, of which an array would not notice of which nobody asks for anything: who has vanished is out. Not where that
    /// would be more than the array bears: nothing is lost by waiting for them, as long as nothing is asked.
    pub async fn look_at_members(&self) {
        self.engine.look_at_members().await;
    }

    /// Rebuild and scrub give way to foreground I/O, which all passes here.
    fn of_class<'a, T: 'a>(
        &'a self,
        class: IoClass,
        kind: Kind,
        io: IoFuture<'a, T>,
    ) -> IoFuture<'a, T> {
        match class {
            IoClass::Foreground => self.engine.foreground.watch(kind, io),
            IoClass::Rebuild | IoClass::Scrub | IoClass::Clean => io,
        }
    }
}

impl Device for RaidArray {
    fn info(&self) -> &DeviceInfo {
        &self.engine.info
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        let io = Box::pin(self.engine.read(at, into, MemberSet::NONE));
        self.of_class(IoClass::Foreground, Kind::Read, io)
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        let Self { engine, .. } = self;
        if !engine.can_lend(at, &into) {
            return None;
        }
        Some(engine.foreground.watch(Kind::Read, Box::pin(engine.read_lent(at, into))))
    }

    fn read_agreed(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        let io = Box::pin(self.engine.read_agreed(at, into));
        self.of_class(IoClass::Foreground, Kind::Read, io)
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        let io = Box::pin(self.engine.overwrite(at, from, durability));
        self.of_class(IoClass::Foreground, Kind::Write, io)
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.engine.flush())
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            levada_device::check_range(&self.engine.info, at, bytes)?;
            let stripe_bytes = self.engine.layout.stripe_bytes();
            let (first, end) = (at.div_ceil(stripe_bytes), (at + bytes) / stripe_bytes);
            self.engine.discard_stripes(first, end.saturating_sub(first)).await
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        let stripe_bytes = self.engine.layout.stripe_bytes();
        let whole = at.is_multiple_of(stripe_bytes) && bytes.is_multiple_of(stripe_bytes);
        if self.engine.layout.level.has_parity() && whole {
            // Unwritten stripes read as zeroes.
            let (first, count) = (at / stripe_bytes, bytes / stripe_bytes);
            return Box::pin(self.engine.discard_stripes(first, count));
        }
        Box::pin(self.engine.overwrite_zeroes(at, bytes))
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        let ours = self.epoch();
        Box::pin(async move {
            // Members are fenced at open; a later owner opens the array anew.
            match epoch <= ours {
                true if epoch < ours => Err(BlockError::Fenced { ours: epoch, seen: ours }),
                true => Ok(()),
                false => Err(BlockError::Unsupported { operation: "a newer epoch without open" }),
            }
        })
    }

    fn health(&self) -> Health {
        let mut health = Health::default();
        for member in self.engine.members.borrow().iter() {
            let Some(device) = &member.device else { continue };
            let of_member = device.health();
            health.read_errors += of_member.read_errors;
            health.write_errors += of_member.write_errors;
            health.bytes_read += of_member.bytes_read;
            health.bytes_written += of_member.bytes_written;
            health.failing |= of_member.failing;
        }
        health
    }
}

impl Array for RaidArray {
    fn geometry(&self) -> ArrayGeometry {
        let layout = &self.engine.layout;
        ArrayGeometry {
            stripe_bytes: layout.stripe_bytes(),
            chunk_bytes: layout.chunk_bytes,
            stripes: layout.stripes,
            tolerates: layout.level.tolerates(),
        }
    }

    fn declare_fresh(&self, first: u64, count: u64) -> IoFuture<'_, ()> {
        Box::pin(self.engine.declare_fresh(first, count))
    }

    fn write_fresh(&self, stripe: u64, data: IoVec, class: IoClass) -> IoFuture<'_, ()> {
        self.of_class(class, Kind::Write, Box::pin(self.engine.write_fresh(stripe, data)))
    }

    fn read_avoiding(
        &self,
        at: u64,
        into: IoVecMut,
        avoid: MemberSet,
        class: IoClass,
    ) -> IoFuture<'_, IoVecMut> {
        self.of_class(class, Kind::Read, Box::pin(self.engine.read_from_holders(at, into, avoid)))
    }

    fn members_of(&self, at: u64, bytes: u64) -> MemberSet {
        self.engine.members_of(at, bytes)
    }

    fn repair(&self, at: u64, data: IoVec) -> IoFuture<'_, ()> {
        Box::pin(self.engine.repair(at, data))
    }

    fn discard_stripes(&self, first: u64, count: u64) -> IoFuture<'_, ()> {
        Box::pin(self.engine.discard_stripes(first, count))
    }

    fn is_written(&self, stripe: u64) -> bool {
        stripe < self.engine.layout.stripes && self.engine.map.has(Bit::Written, stripe)
    }

    fn foreground(&self) -> &Foreground {
        &self.engine.foreground
    }
}
