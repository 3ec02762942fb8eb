//! The stripe engine: what every level shares, and the only place that talks to members.
//!
//! What always holds:
//! - Every member error passes [`Engine::judge`], which decides about the member once.
//! - A caller's success passes [`Engine::settle`], which waits until the standing that its
//!   writes relied on is recorded on the members.
//! - Once stopped, the array does no more I/O: a loss that it cannot bear is not recorded, so
//!   that it comes back when the members do.
//!
//! Operations that leave members different if given up half-way (superblocks, map pages,
//! overwrites) run as tasks of their own ([`Engine::detached`]): a caller that goes away does not stop
//! them, only the end of the process does, and then open resyncs what is dirty.

use crate::array::MemberSet;
use crate::journal::Journal;
use crate::layout::{Layout, Place};
use crate::lost::Lost;
use crate::map::StripeMap;
use crate::mark;
use crate::member::{Held, Member, MemberEvent, MemberState, add};
use crate::neighbours::Neighbours;
use crate::pace::Foreground;
use crate::redundancy::Redundancy;
use crate::scrub::Scrubbed;
use crate::slow::{Slowness, Way};
use crate::status::{ArrayEvent, Progress};
use crate::superblock::Areas;
use crate::update::Updates;
use futures_util::poll;
use levada_base::buf::bytes_in;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Group};
use levada_base::sync::{Notify, Semaphore, queue};
use levada_base::{Epoch, IoVec, IoVecMut, RangeLocks, planted};
use levada_device::{BlockError, DeviceInfo, Durability, IoFuture};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Places of one member, a chunk each, that could not be read since open, at which it is taken out, if the array bears that.
/// Places, not errors: what is lost for good is asked for again and again. So many that bad places here and there, each put
/// right when it is met, take years to come to it, and so few that a drive which fails in earnest is out within seconds of
/// a scrub or a rebuild.
pub const UNREADABLE_CHUNKS_MAX: usize = 256;

/// A stripe whose dirty bit waits to be cleared.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unclean {
    /// Overwrites on their way.
    pub in_flight: u32,
    /// Number of the last volatile write that completed.
    pub sequence: u64,
    /// The dirty bit is on disk.
    pub marked: bool,
}

/// An open array.
pub(crate) struct Engine {
    pub uuid: Uuid,
    pub name: String,
    pub epoch: Epoch,
    pub layout: Layout,
    pub areas: Areas,
    pub redundancy: Redundancy,
    pub info: DeviceInfo,
    pub members: RefCell<Vec<Rc<Member>>>,
    /// Who plays each role now; nobody where a member is out.
    pub roles: RefCell<Vec<Option<Rc<Member>>>>,
    pub map: StripeMap,
    /// `None` where overwrites need none, or cannot be.
    pub journal: Option<Rc<Journal>>,
    pub updates: Updates,
    pub neighbours: Neighbours,
    pub lost: Lost,
    /// Stripes may be patched, says the superblock or will say.
    pub patched: Cell<bool>,
    pub detached: Rc<Running>,
    /// Overwrites are not recorded: for measurements only.
    pub records_nothing: Cell<bool>,
    /// Bytes of the array that somebody changes.
    pub locks: RangeLocks,
    /// Stripes that somebody prepares for overwriting or discards.
    pub preparing: RangeLocks,
    pub unclean: RefCell<BTreeMap<u64, Unclean>>,
    /// Volatile writes completed, and those that a flush covers.
    pub writes: Cell<u64>,
    pub flushed: Cell<u64>,
    pub generation: Cell<u64>,
    /// The newest generation that every live member holds.
    pub held_by_all: Cell<u64>,
    /// The members that have the last standing which was recorded without a failure, by their index.
    pub recorded_by: RefCell<Vec<usize>>,
    /// Changes of standing made, and those recorded on the members.
    pub standing_wanted: Cell<u64>,
    pub standing_recorded: Cell<u64>,
    pub standing_turn: Rc<Semaphore>,
    /// Members that went, and what they hold, of which superblocks do not tell yet ([`crate::away`]).
    pub absences: RefCell<Vec<(Rc<Member>, Held)>>,
    pub stopped: RefCell<Option<BlockError>>,
    pub subscribers: RefCell<Vec<queue::Sender<ArrayEvent>>>,
    /// Rebuild and scrub look whether there is any, and how it fares.
    pub foreground: Foreground,
    pub rebuild: Cell<Option<Progress>>,
    /// The stripe at which a rebuild cannot go on: there is no room to list what is beyond repair.
    pub rebuild_blocked: Cell<Option<u64>>,
    /// Stripes that stopped a rebuild, and how often each did.
    pub rebuild_stuck: RefCell<BTreeMap<u64, u32>>,
    /// Of whoever opened the array: what must run to its end lives in it.
    pub group: Group,
    pub scrub: Cell<Option<Progress>>,
    /// How far a scrub is that is under way, or was interrupted.
    pub scrubbed: Cell<Scrubbed>,
    /// As a superblock may tell it: behind a flush of what the scrub repaired.
    pub scrub_told: Cell<Scrubbed>,
    pub scrub_turn: Rc<Semaphore>,
    pub rebuild_turn: Rc<Semaphore>,
    /// How long a member that vanished is waited for.
    pub patience: Cell<Duration>,
    /// Those whose time has not begun to run out.
    pub vanished: RefCell<Vec<Rc<Member>>>,
    pub slowness: Slowness,
}

/// What a failed operation says about its member.
enum Judgement {
    /// These bytes only.
    Medium,
    /// The member as a whole.
    Member,
    /// The owner.
    Owner,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Read {
        /// Where on the member.
        at: u64,
    },
    Change,
}

/// Counts an operation as in flight until dropped.
pub(crate) struct InFlight<'a>(&'a Cell<u32>);

impl<'a> InFlight<'a> {
    pub fn begin(count: &'a Cell<u32>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Tasks that run to their end whoever gave up waiting.
#[derive(Default)]
pub(crate) struct Running {
    count: Cell<u32>,
    ended: Notify,
}

impl Running {
    /// Waits until there are none.
    pub async fn until_none(&self) {
        self.ended.until(|| (self.count.get() == 0).then_some(())).await;
    }
}

/// One of them, until this is dropped.
struct Runs(Rc<Running>);

impl Runs {
    fn begin(running: &Rc<Running>) -> Self {
        running.count.set(running.count.get() + 1);
        Self(Rc::clone(running))
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.0.count.set(self.0.count.get() - 1);
        self.0.ended.notify_all();
    }
}

/// A flush on its way; its end, or its caller's, wakes those who wait for it.
struct Flushing<'a>(&'a Member);

impl<'a> Flushing<'a> {
    fn begin(member: &'a Member) -> Self {
        member.flushing.set(true);
        Self(member)
    }
}

impl Drop for Flushing<'_> {
    fn drop(&mut self) {
        self.0.flushing.set(false);
        self.0.flush_ended.notify_all();
    }
}

impl Engine {
    /// Runs `work` to its end even if the caller, or its whole group, goes away: half-way it would leave what others
    /// wait for.
    pub async fn detached<T, F>(&self, work: F) -> Result<T, BlockError>
    where
        T: 'static,
        F: Future<Output = Result<T, BlockError>> + 'static,
    {
        let runs = Runs::begin(&self.detached);
        let work = async move {
            let _runs = runs;
            work.await
        };
        // A task that was killed means that this process' node is gone.
        reactor::spawn_in(&self.group, work).await.unwrap_or(Err(BlockError::Gone))
    }

    /// As [`Engine::detached`], with nobody who waits.
    pub fn spawn(&self, work: impl Future<Output = ()> + 'static) {
        let runs = Runs::begin(&self.detached);
        reactor::spawn_in(&self.group, async move {
            let _runs = runs;
            work.await;
        });
    }

    /// As [`Engine::detached`], without a task for what ends at once.
    pub async fn detached_unless_ready<T, F>(&self, work: F) -> Result<T, BlockError>
    where
        T: 'static,
        F: Future<Output = Result<T, BlockError>> + 'static,
    {
        let mut work = Box::pin(work);
        match poll!(&mut work) {
            Poll::Ready(result) => result,
            Poll::Pending => self.detached(work).await,
        }
    }

    /// Fails when the array has stopped.
    pub fn check_running(&self) -> Result<(), BlockError> {
        match &*self.stopped.borrow() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    pub fn emit(&self, event: &ArrayEvent) {
        self.subscribers.borrow_mut().retain(|queue| queue.send(event.clone()).is_ok());
    }

    /// The member that plays `role`, if it takes writes.
    pub fn player(&self, role: usize) -> Option<Rc<Member>> {
        self.roles.borrow()[role].clone()
    }

    /// The member that has the good bytes of a place.
    pub fn holder(&self, place: Place, avoid: MemberSet) -> Option<Rc<Member>> {
        let roles = self.roles.borrow();
        let member = roles[place.role].as_ref()?;
        (member.has(place.slot) && !avoid.contains(member.index)).then(|| Rc::clone(member))
    }

    /// Offset on a member of byte `within` of a slot.
    pub fn member_offset(&self, slot: u64, within: u64) -> u64 {
        self.areas.data_at + slot * self.layout.chunk_bytes + within
    }

    pub fn stripe_range(&self, first: u64, count: u64) -> (u64, u64) {
        let bytes = self.layout.stripe_bytes();
        (first * bytes, (first + count) * bytes)
    }

    pub async fn member_read(
        &self,
        member: &Rc<Member>,
        at: u64,
        into: IoVecMut,
    ) -> Result<IoVecMut, BlockError> {
        let Some(device) = &member.device else { return Err(BlockError::Gone) };
        let bytes = bytes_in(&into);
        if member.lacks(&(at..at + bytes)) {
            return Err(BlockError::Medium { at, bytes });
        }
        let result = self.time_read(member, Way::Own, device.read(at, into), Result::is_ok).await;
        match &result {
            Ok(parts) => {
                add(&member.stats.bytes_read, bytes);
                let is_data = at >= self.areas.data_at;
                if is_data && matches!(self.redundancy, Redundancy::Copies) {
                    mark::find(member, at, parts, self.info.block_bytes)
                        .into_iter()
                        .for_each(|at| member.leave_out(at));
                    if member.lacks(&(at..at + bytes)) {
                        return Err(BlockError::Medium { at, bytes });
                    }
                }
            }
            Err(error) => self.judge(member, error, Operation::Read { at }),
        }
        result
    }

    /// Waits for what a member reads, and notes how long that took.
    pub async fn time_read<T>(
        &self,
        member: &Member,
        way: Way,
        mut reading: Pin<Box<dyn Future<Output = T> + '_>>,
        is_read: impl Fn(&T) -> bool,
    ) -> T {
        // What is answered within the call took no time to speak of; asking the clock would take longer than all else here (null members, 4 KiB:
        // 25 % of a read).
        if let Poll::Ready(result) = poll!(&mut reading) {
            member.stats.latency.add(Duration::ZERO);
            return result;
        }
        let begun = reactor::now();
        let in_flight = InFlight::begin(&member.in_flight);
        let result = reading.await;
        drop(in_flight);
        let now = reactor::now();
        let took = now.since(begun);
        member.stats.latency.add(took);
        if is_read(&result) {
            self.note_read(member, way, took, now);
        }
        result
    }

    pub async fn member_write(
        &self,
        member: &Rc<Member>,
        at: u64,
        from: IoVec,
        durability: Durability,
    ) -> Result<(), BlockError> {
        let Some(device) = &member.device else { return Err(BlockError::Gone) };
        let bytes = bytes_in(&from);
        let begun = reactor::now();
        let in_flight = InFlight::begin(&member.in_flight);
        let result = device.write(at, from, durability).await;
        drop(in_flight);
        self.note_written(member, (at, bytes), durability, begun.elapsed(), &result);
        result
    }

    /// Writes to several members at once, and waits for all of them; who fails is out.
    pub async fn write_all<'a>(
        &self,
        writes: impl Iterator<Item = (&'a Rc<Member>, u64, IoVec)>,
        durability: Durability,
    ) {
        struct Sent<'a> {
            member: &'a Rc<Member>,
            place: (u64, u64),
            _in_flight: InFlight<'a>,
            written: IoFuture<'a, ()>,
        }
        let begun = reactor::now();
        let mut all: SmallVec<[Option<Sent<'a>>; 16]> = writes
            .filter_map(|(member, at, from)| {
                let place = (at, bytes_in(&from));
                let written = member.device.as_ref()?.write(at, from, durability);
                let _in_flight = InFlight::begin(&member.in_flight);
                Some(Some(Sent { member, place, _in_flight, written }))
            })
            .collect();
        poll_fn(|cx| {
            // One look at the clock for all that are done by now.
            let mut took = None;
            let mut is_done = true;
            for slot in &mut all {
                let Some(sent) = slot else { continue };
                match sent.written.as_mut().poll(cx) {
                    Poll::Ready(result) => {
                        let took = *took.get_or_insert_with(|| begun.elapsed());
                        self.note_written(sent.member, sent.place, durability, took, &result);
                        *slot = None;
                    }
                    Poll::Pending => is_done = false,
                }
            }
            if is_done { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn note_written(
        &self,
        member: &Rc<Member>,
        (at, bytes): (u64, u64),
        durability: Durability,
        took: Duration,
        result: &Result<(), BlockError>,
    ) {
        member.stats.latency.add(took);
        match result {
            Ok(()) => {
                add(&member.stats.bytes_written, bytes);
                member.lacks_no_more(&(at..at + bytes));
                if durability == Durability::Volatile {
                    add(&member.writes, 1);
                }
            }
            Err(error) => self.judge(member, error, Operation::Change),
        }
    }

    pub async fn member_zero(
        &self,
        member: &Rc<Member>,
        at: u64,
        bytes: u64,
    ) -> Result<(), BlockError> {
        let Some(device) = &member.device else { return Err(BlockError::Gone) };
        let in_flight = InFlight::begin(&member.in_flight);
        let result = device.write_zeroes(at, bytes).await;
        drop(in_flight);
        match &result {
            Ok(()) => {
                member.lacks_no_more(&(at..at + bytes));
                add(&member.writes, 1);
            }
            Err(error) => self.judge(member, error, Operation::Change),
        }
        result
    }

    /// Stripes get other content, or none: what a rebuild left out of them does not matter any more.
    pub fn forget_left_out(&self, stripes: &std::ops::Range<u64>) {
        if !self.members.borrow().iter().any(|member| member.lacks(&(0..u64::MAX))) {
            return;
        }
        for stripe in stripes.clone() {
            for chunk in 0..self.layout.chunks() {
                let place = self.layout.place(stripe, chunk);
                let Some(member) = self.player(place.role) else { continue };
                let at = self.member_offset(place.slot, 0);
                member.lacks_no_more(&(at..at + self.layout.chunk_bytes));
            }
        }
    }

    /// Makes the volatile writes of a member durable that completed before this call. Callers
    /// that come while a flush runs share the next one.
    pub async fn member_flush(&self, member: &Rc<Member>) -> Result<(), BlockError> {
        let Some(device) = &member.device else { return Err(BlockError::Gone) };
        let wanted = member.writes.get();
        loop {
            let ended = member.flush_ended.changed();
            if member.flushed.get() >= wanted {
                return Ok(());
            }
            if !member.is_live() {
                return Err(BlockError::Gone);
            }
            if member.flushing.get() {
                ended.await;
                continue;
            }
            let flushing = Flushing::begin(member);
            let upto = member.writes.get();
            let dropped = planted!("raid-flush-dropped") && member.index % 4 == 1;
            let result = if dropped { Ok(()) } else { device.flush().await };
            match &result {
                Ok(()) => member.flushed.set(member.flushed.get().max(upto)),
                // What reached the device is unknown, so it is out like after a failed write.
                Err(error) => self.judge(member, error, Operation::Change),
            }
            drop(flushing);
            result?;
        }
    }

    /// Decides what an error means for the member and the array.
    pub fn judge(&self, member: &Rc<Member>, error: &BlockError, operation: Operation) {
        let judgement = match (error, operation) {
            (BlockError::Medium { .. }, Operation::Read { .. }) => Judgement::Medium,
            // A kernel reports an unreadable sector so.
            (BlockError::Io { errno: libc::EIO }, Operation::Read { .. }) => Judgement::Medium,
            (BlockError::Fenced { .. }, _) => Judgement::Owner,
            (
                BlockError::Medium { .. }
                | BlockError::Io { .. }
                | BlockError::Gone
                | BlockError::OutOfRange { .. }
                | BlockError::Misaligned { .. }
                | BlockError::TooManyLost { .. }
                | BlockError::NotFresh { .. }
                | BlockError::Unsupported { .. },
                _,
            ) => Judgement::Member,
        };
        match judgement {
            Judgement::Medium => {
                add(&member.stats.medium_errors, 1);
                if let Operation::Read { at } = operation
                    && member.is_unreadable_in_many(at / self.layout.chunk_bytes)
                    && self.can_do_without(member)
                {
                    self.put_out(member, Some(error.clone()));
                }
            }
            Judgement::Member => {
                add(&member.stats.io_errors, 1);
                self.put_out(member, Some(error.clone()));
            }
            Judgement::Owner => self.stop(error.clone()),
        }
    }

    pub fn stop(&self, error: BlockError) {
        // Who has lost its members may hear later that somebody else has them.
        let is_news = match &*self.stopped.borrow() {
            None => true,
            Some(BlockError::Fenced { .. }) => false,
            Some(_) => matches!(error, BlockError::Fenced { .. }),
        };
        if is_news {
            tracing::error!(array = %self.name, %error, "array stopped");
            *self.stopped.borrow_mut() = Some(error.clone());
            if let Some(journal) = &self.journal {
                journal.stopped();
            }
            self.emit(&ArrayEvent::Stopped { error });
        }
    }

    /// Roles that nobody plays or whose player lacks some of its data, as bits.
    pub fn roles_out(&self) -> u64 {
        let roles = self.roles.borrow();
        let whole =
            |member: &Option<Rc<Member>>| member.as_ref().is_some_and(|member| member.is_in_sync());
        let bits = roles.iter().enumerate().filter(|(_, member)| !whole(member));
        bits.fold(0, |out, (role, _)| out | 1 << role)
    }

    /// False when the array would stop without this member: what can be read of it is better than that.
    pub fn can_do_without(&self, member: &Member) -> bool {
        let survives = |role: usize| self.layout.survives(self.roles_out() | 1_u64 << role);
        !member.is_in_sync() || member.role.get().is_none_or(survives)
    }

    /// Takes a member out, or stops the array when it cannot do without.
    pub fn put_out(&self, member: &Rc<Member>, error: Option<BlockError>) {
        let current =
            self.members.borrow().get(member.index).is_some_and(|m| Rc::ptr_eq(m, member));
        if !current || !member.is_live() || self.stopped.borrow().is_some() {
            return;
        }
        if !self.can_do_without(member) {
            let lost = self.roles_out().count_ones() as usize + 1;
            let tolerated = self.layout.level.tolerates();
            self.stop(BlockError::TooManyLost { lost, tolerated });
            return;
        }
        let plays_role = member.role.get().is_some();
        let held = self.held_when_gone(member, error.as_ref());
        member.apply(MemberEvent::Failed);
        self.forget_speed(member.index);
        if let Some(role) = member.role.get() {
            self.roles.borrow_mut()[role] = None;
        }
        tracing::warn!(array = %self.name, member = %member.name, ?error, "member out");
        let (index, name) = (member.index, member.name.clone());
        self.emit(&ArrayEvent::MemberOut { member: index, name, error });
        self.wait_for(member, held);
        self.fill_roles();
        if plays_role {
            self.begin_absence(member, held);
        }
        add(&self.standing_wanted, 1);
    }

    /// The member that is out, and not waited for, whose role a spare takes next: of those that nobody plays the one with which the array
    /// will bear most. Where one is not enough for that, one whose stripes lack most; those of members that are rebuilt are lacking.
    pub fn neediest(&self) -> Option<Rc<Member>> {
        let out = self.roles_out();
        let members = self.members.borrow();
        let vacant = members
            .iter()
            .filter(|member| !member.is_live() && self.awaited(member).is_none())
            .filter_map(|member| Some((member.role.get()?, member)));
        let layout = &self.layout;
        let helps = |role| {
            let lacks = |other: &usize| out >> other & 1 == 1 && layout.share_stripes(role, *other);
            (layout.bears(out & !(1 << role)), (0..layout.width).filter(lacks).count())
        };
        let neediest = vacant.min_by_key(|(role, _)| Reverse(helps(*role)));
        neediest.map(|(_, member)| Rc::clone(member))
    }

    /// Lets spares take the roles that nobody plays, the [neediest](Self::neediest) first: of the spares, one with which the loss of an
    /// enclosure costs least, and of several the one whose enclosure plays fewest roles.
    pub fn fill_roles(&self) {
        loop {
            let Some(vacant) = self.neediest() else { return };
            let members = self.members.borrow().clone();
            let played = |enclosure: u16| {
                let plays = |m: &&Rc<Member>| {
                    m.is_live() && m.role.get().is_some() && m.enclosure == enclosure
                };
                members.iter().filter(plays).count()
            };
            let role = vacant.role.get().expect("found by its role");
            let needed_with = |spare: &Member| {
                let roles = self.roles.borrow();
                let plays = |member: &Option<Rc<Member>>| member.as_ref().map(|m| m.enclosure);
                let mut played: Vec<Option<u16>> = roles.iter().map(plays).collect();
                played[role] = Some(spare.enclosure);
                self.layout.level.enclosures_needed(&played).len()
            };
            let spare = members
                .iter()
                .filter(|member| member.state.get() == MemberState::Spare)
                .min_by_key(|member| (needed_with(member), played(member.enclosure)));
            let Some(spare) = spare else { return };
            vacant.role.take();
            spare.apply(MemberEvent::TookRole);
            spare.role.set(Some(role));
            self.roles.borrow_mut()[role] = Some(Rc::clone(spare));
            let (member, name) = (spare.index, spare.name.clone());
            self.emit(&ArrayEvent::RebuildNeeded { member, name });
        }
    }

    /// Where every piece of `at..at + bytes` lies: `visit(stripe, data chunk, offset in the
    /// chunk, bytes)`, in order.
    pub fn pieces(&self, at: u64, bytes: u64, mut visit: impl FnMut(u64, usize, u64, u64)) {
        let chunk_bytes = self.layout.chunk_bytes;
        let data_chunks = self.layout.data_chunks() as u64;
        let (mut at, end) = (at, at + bytes);
        while at < end {
            let (chunk, within) = (at / chunk_bytes, at % chunk_bytes);
            let run = (chunk_bytes - within).min(end - at);
            visit(chunk / data_chunks, (chunk % data_chunks) as usize, within, run);
            at += run;
        }
    }

    /// The stripes that `at..at + bytes` touches.
    pub fn stripes_of(&self, at: u64, bytes: u64) -> std::ops::Range<u64> {
        let stripe_bytes = self.layout.stripe_bytes();
        at / stripe_bytes..(at + bytes).div_ceil(stripe_bytes)
    }

    pub fn check_stripes(&self, first: u64, count: u64) -> Result<(), BlockError> {
        if first.checked_add(count).is_none_or(|end| end > self.layout.stripes) {
            let stripe_bytes = self.layout.stripe_bytes();
            return Err(BlockError::OutOfRange {
                at: first.saturating_mul(stripe_bytes),
                bytes: count.saturating_mul(stripe_bytes),
                capacity_bytes: self.info.capacity_bytes,
            });
        }
        Ok(())
    }
}
