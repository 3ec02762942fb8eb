//! Members that were away for a while: what they hold is good but for the stripes that changed meanwhile.
//!
//! While a role has nobody with all of its data, the map notes which stripes are written: they are *missed*. A member that
//! comes back as what it was is brought into step by a rebuild of these, instead of everything. It comes back by itself when it
//! had vanished (its drive was gone, or absent at a start), and when somebody says so if it had failed.
//!
//! What always holds:
//! - Superblocks say what an absent member holds only when the map tells, durably, what it missed until then: what was
//!   dirty, being written or in the journal when it went.
//! - From then on a stripe is missed, durably, before a write to it is acknowledged.
//! - Stripes stay missed until every role has somebody with all of its data, so the oldest absence counts for all.
//! - A member is believed only if it is not older than every member was known to be when it went, and if it has not gone on
//!   without those that went on without it.
//! - Of one that vanished superblocks say just that until the map tells what it missed: it comes back by itself all the same, and gets
//!   everything anew, its records cleared before it takes part. That is how it is when the array stops at once, as where two
//!   enclosures lose their power one after the other; for one that was being rebuilt; and for a spare, which is one again, as is one
//!   whose role a spare has taken.
//!
//! One that vanished while the array is open is waited for, if that is wanted, before a spare takes its role: to catch up costs
//! seconds, a rebuild hours. Not where the next loss would be one too many.
//!
//! After a crash half-way: a member of whose absence nothing is told yet is rebuilt whole.

use crate::MemberSpec;
use crate::assemble::{GENERATIONS_SKIPPED, Probed, probe};
use crate::engine::{Engine, InFlight};
use crate::map::MapFormat;
use crate::member::{Held, Member, MemberState, add};
use crate::status::ArrayEvent;
use crate::superblock::{MemberEntry, SUPERBLOCK_BYTES, Superblock};
use futures_util::future::join_all;
use levada_base::{BufMut, planted, reactor};
use levada_device::BlockError;
use std::rc::Rc;
use std::time::Duration;

/// What a member holds of an array, if it may take part again; by what its own newest superblock says, and the newest of all.
pub(crate) fn held_by(own: &Superblock, newest: &Superblock, index: usize) -> Option<Held> {
    let (of_own, of_newest) = (own.members.get(index)?, newest.members.get(index)?);
    let does_not_know = own.generation < newest.held_by_all;
    let mut held = match (of_newest.held, of_newest.state) {
        (Some(held), _) => held,
        // It was being taken back, to get everything anew, when the power failed.
        (None, MemberState::Rebuilding { .. } | MemberState::Spare) if does_not_know => {
            Held { generation: own.generation, by_itself: true, is_told: false }
        }
        (None, _) => return None,
    };
    let was_whole = match of_own.state {
        MemberState::InSync => true,
        // It went again while it caught up.
        MemberState::Rebuilding { .. } => of_own.held.is_some_and(|held| held.is_told),
        MemberState::Faulty | MemberState::Spare => false,
    };
    let has_role = of_own.role.is_some() && of_newest.role == of_own.role;
    let catches_up = held.is_told && was_whole && has_role;
    let is_free = !held.is_told || of_newest.role.is_none();
    let begins_anew = is_free && of_own.state != MemberState::Faulty;
    held.is_told = catches_up;
    let is_same = own.uuid == newest.uuid && of_own.uuid == of_newest.uuid;
    let is_out = match of_newest.state {
        MemberState::Faulty => true,
        // It was being taken back when the power failed, and does not know yet.
        MemberState::Rebuilding { .. } | MemberState::Spare if does_not_know => {
            held.by_itself = true;
            true
        }
        MemberState::InSync | MemberState::Rebuilding { .. } | MemberState::Spare => false,
    };
    let is_old = own.generation < held.generation;
    // Two owners that do not know of each other: each goes on with members that the other calls faulty, or has replaced. A start
    // that this member has seen and the others have not is such a life, too.
    let is_known = |(index, newest): (usize, &MemberEntry)| {
        newest.state != MemberState::InSync
            || own
                .members
                .get(index)
                .is_some_and(|own| own.uuid == newest.uuid && own.state != MemberState::Faulty)
    };
    let went_apart = own.generation >= held.generation + GENERATIONS_SKIPPED
        || !newest.members.iter().enumerate().all(is_known);
    (is_same && is_out && (catches_up || begins_anew) && !is_old && !went_apart).then_some(held)
}

/// What a member holds that is not found at a start.
pub(crate) fn held_when_absent(entry: &MemberEntry, newest: &Superblock) -> Option<Held> {
    let generation = newest.held_by_all;
    let held = |is_told| (generation > 0).then_some(Held { generation, by_itself: true, is_told });
    match (entry.state, entry.held) {
        // What is dirty and what the journal holds is found at this start.
        (MemberState::InSync, _) => held(true),
        (MemberState::Rebuilding { .. }, Some(held)) => Some(Held { by_itself: true, ..held }),
        (MemberState::Rebuilding { .. }, None) | (MemberState::Spare, _) => held(false),
        (MemberState::Faulty, held) => held,
    }
}

impl Engine {
    /// What a member that goes now holds for later; before its standing changes.
    pub fn held_when_gone(&self, member: &Member, error: Option<&BlockError>) -> Option<Held> {
        let forgets = member.lacks_blocks() > 0 && self.areas.lost_bytes == 0;
        if self.map.format == MapFormat::Single || forgets {
            return None;
        }
        let by_itself = matches!(error, Some(BlockError::Gone));
        let is_in_sync = member.is_in_sync();
        if let Some(held) = member.held.get() {
            // It has not caught up yet, so all of this is told; or nothing ever was.
            member.held.set(Some(Held { by_itself, ..held }));
            return None;
        }
        let generation = self.held_by_all.get();
        let held = Held { generation, by_itself, is_told: is_in_sync };
        if generation == 0 {
            return None;
        }
        if !is_in_sync {
            // A spare, or of what it has been given so far nothing is believed: there is nothing to tell.
            member.held.set(by_itself.then_some(held));
            return None;
        }
        Some(held)
    }

    /// What superblocks say of a member that is out or rebuilt. As long as the map does not tell what it missed: that it
    /// vanished.
    pub fn held_on_record(&self, member: &Rc<Member>) -> Option<Held> {
        let untold = || {
            let absences = self.absences.borrow();
            let (_, held) = absences.iter().find(|(absent, _)| Rc::ptr_eq(absent, member))?;
            let is_wanted = held.by_itself
                && member.role.get().is_some()
                && !planted!("raid-vanished-not-recorded");
            is_wanted.then_some(Held { is_told: false, ..*held })
        };
        member.held.get().or_else(untold)
    }

    /// See [`crate::RaidArray::look_at_members`].
    pub async fn look_at_members(self: &Rc<Self>) {
        let live = self.live_members();
        let looks = live.iter().map(async |member| {
            let device = member.device.as_ref()?;
            let at = member.superblock_at.get().unwrap_or_default();
            let into = BufMut::for_overwrite(SUPERBLOCK_BYTES as usize).into_vec();
            let _in_flight = InFlight::begin(&member.in_flight);
            matches!(device.read(at, into).await, Err(BlockError::Gone)).then_some(member)
        });
        let mut gone: Vec<_> = join_all(looks).await.into_iter().flatten().collect();
        let roles = gone.iter().filter_map(|member| member.role.get());
        let out = roles.fold(self.roles_out(), |out, role| out | 1 << role);
        let indices: Vec<usize> = gone.iter().map(|member| member.index).collect();
        let (were, went) = self.gone_at_once(&indices);
        // The array would stop.
        if gone.is_empty() || !self.layout.survives(out) || went * 2 > were {
            return;
        }
        // Spares first: none of them is to take the role of another one that is gone.
        gone.sort_by_key(|member| member.role.get().is_some());
        gone.iter().for_each(|member| self.put_out(member, Some(BlockError::Gone)));
        // An array that has stopped tells nothing.
        let _ = self.settle().await;
    }

    /// A member that goes may come back by itself: no spare takes its role for a while.
    pub fn wait_for(&self, member: &Rc<Member>, held: Option<Held>) {
        let patience = self.patience.get();
        let catches_up = |held: Held| held.by_itself && held.is_told;
        let may_return = held.or(member.held.get()).is_some_and(catches_up);
        if patience.is_zero() || !may_return || member.role.get().is_none() {
            return;
        }
        member.awaited_until.set(Some(reactor::now() + patience));
        self.vanished.borrow_mut().push(Rc::clone(member));
    }

    /// Sees to it that nobody is waited for too long.
    pub fn wait_for_vanished(self: &Rc<Self>) {
        for member in self.vanished.take() {
            let Some(until) = member.awaited_until.get() else { continue };
            // Neither the array nor its end waits for this.
            let engine = Rc::downgrade(self);
            reactor::spawn_in(&self.group, async move {
                reactor::sleep_until(until).await;
                if let Some(engine) = engine.upgrade() {
                    engine.give_up_waiting(&member).await;
                }
            });
        }
    }

    /// How much longer a member that is out is waited for. Nobody is where all redundancy is used up.
    pub fn awaited(&self, member: &Member) -> Option<Duration> {
        let left = member.awaited_until.get()?.since(reactor::now());
        let out = self.roles_out();
        let mut others = (0..self.layout.width).filter(|role| out >> role & 1 == 0);
        let bears_more = others.all(|role| self.layout.survives(out | 1 << role));
        (!left.is_zero() && bears_more).then_some(left)
    }

    /// It has not come back.
    async fn give_up_waiting(self: &Rc<Self>, member: &Rc<Member>) {
        let members = self.members.borrow().clone();
        let is_member = members.get(member.index).is_some_and(|m| Rc::ptr_eq(m, member));
        if !is_member || member.awaited_until.take().is_none() || self.stopped.borrow().is_some() {
            return;
        }
        let (member, name) = (member.index, member.name.clone());
        self.emit(&ArrayEvent::MemberGivenUp { member, name });
        self.fill_roles();
        add(&self.standing_wanted, 1);
        // An array that stops tells nothing.
        let _ = self.settle().await;
    }

    /// A member is out: from now on what changes is missed, and so is what was changing. `held` is told once that is durable.
    pub fn begin_absence(&self, member: &Rc<Member>, held: Option<Held>) {
        self.map.set_short(true);
        let recorded = self.journal.as_ref().map_or(Vec::new(), |journal| journal.stripes());
        for stripe in self.updates.stripes().into_iter().chain(recorded) {
            if !planted!("raid-under-way-not-missed") {
                self.map.miss(stripe);
            }
        }
        match held {
            Some(held) if member.role.get().is_some() => {
                self.absences.borrow_mut().push((Rc::clone(member), held));
            }
            // A spare has its role: it comes back as another one.
            Some(held) if held.by_itself => {
                member.held.set(Some(Held { is_told: false, ..held }));
            }
            _ => {}
        }
    }

    /// Tells, when the map is durable, of absences that began.
    pub fn tell_absences(self: &Rc<Self>) {
        let begun: Vec<Rc<Member>> =
            self.absences.borrow().iter().map(|(member, _)| Rc::clone(member)).collect();
        if begun.is_empty() {
            return;
        }
        let engine = Rc::clone(self);
        self.spawn(async move {
            if engine.persist_wanted_pages().await.is_err() {
                return;
            }
            // Until here somebody may say that one of them stays out; those that began since are not durable yet.
            engine.absences.borrow_mut().retain(|(member, held)| {
                let is_told = begun.iter().any(|of_begun| Rc::ptr_eq(of_begun, member));
                if is_told {
                    member.held.set(Some(*held));
                }
                !is_told
            });
            add(&engine.standing_wanted, 1);
            // An array that stops tells nothing, and whoever is away is rebuilt whole.
            let _ = engine.settle().await;
        });
    }

    /// A stripe is about to change: where somebody is away, that is durable when this ends.
    pub async fn note_missed(self: &Rc<Self>, stripe: u64) -> Result<(), BlockError> {
        if !self.map.is_short() || planted!("raid-missed-not-noted") {
            return Ok(());
        }
        let (page, version) = self.map.miss(stripe);
        self.persist_page(page, version).await
    }

    /// A member that is out does not come back by itself.
    pub fn stays_out(&self, member: &Rc<Member>) {
        let stays = |held: Held| Held { by_itself: false, ..held };
        member.held.set(member.held.get().map(stays));
        let mut absences = self.absences.borrow_mut();
        let of_member = absences.iter_mut().filter(|(absent, _)| Rc::ptr_eq(absent, member));
        of_member.for_each(|(_, held)| *held = stays(*held));
        add(&self.standing_wanted, 1);
    }

    /// All roles have somebody with all of their data, or not.
    pub fn note_roles(&self) {
        self.map.set_short(self.roles_out() != 0 && !planted!("raid-missed-forgotten"));
        if !self.map.is_short() {
            self.neighbours.forget_all();
        }
    }

    /// What a device holds that somebody says is this member again; also where its newest superblock lies.
    pub async fn held_by(&self, member: &Member, with: &MemberSpec) -> Option<(Held, u64)> {
        if with.uuid != member.uuid {
            return None;
        }
        let Probed { superblock, member: index, at, other } = probe(&with.device).await.ok()??;
        let is_ours = other.is_none() && index == member.index && superblock.epoch <= self.epoch;
        let held = held_by(&superblock, &self.superblock(), index)?;
        is_ours.then_some((held, at))
    }
}
