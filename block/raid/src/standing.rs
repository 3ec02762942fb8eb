//! Standing: how the members' states and the stripe map get onto the members.
//!
//! What always holds: one generation is written at a time, to every live member, with FUA; what
//! relies on it waits. A member that fails to take it is out in the next one. Map pages likewise.
//!
//! After a crash half-way through a generation, nothing had relied on it: either it or the one
//! before may win at assembly.

use crate::MemberSpec;
use crate::engine::Engine;
use crate::error::{Misfit, RaidError};
use crate::map::MapFormat;
use crate::member::{Held, Member, MemberState, add};
use crate::status::ArrayEvent;
use crate::superblock::{MemberEntry, SUPERBLOCK_BYTES, Superblock};
use futures_util::future::join_all;
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, BufMut, planted, probe, reactor};
use levada_device::{BlockError, Durability};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// How long a member that comes back is waited for: for the end of what it was asked before it went.
const STILL_IN_FLIGHT_MAX: Duration = Duration::from_secs(10);

/// How a device took a member's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// It gets everything.
    Anew,
    /// It is that member come back, and gets what changed meanwhile.
    CatchesUp,
}

impl Engine {
    /// A change of standing is not recorded yet.
    pub fn has_unrecorded_standing(&self) -> bool {
        self.standing_recorded.get() < self.standing_wanted.get()
    }

    /// Waits until every change of standing so far is recorded. Whoever acknowledges a write
    /// calls this first.
    pub async fn settle(self: &Rc<Self>) -> Result<(), BlockError> {
        self.check_running()?;
        if self.has_unrecorded_standing() && !planted!("raid-standing-not-recorded") {
            let engine = Rc::clone(self);
            self.detached(async move { engine.record_standing().await }).await?;
            self.tell_absences();
            self.wait_for_vanished();
        }
        self.check_running()
    }

    async fn record_standing(&self) -> Result<(), BlockError> {
        let _turn = self.standing_turn.acquire(1).await;
        while self.has_unrecorded_standing() {
            self.check_running()?;
            let _busy = probe::busy("array standing");
            let recording = self.standing_wanted.get();
            let generation = self.generation.get() + 1;
            self.generation.set(generation);
            let superblock = self.superblock();
            let live = self.live_members();
            self.refuse_minority()?;
            let writes = live.iter().map(async |member| {
                let mut bytes = BufMut::for_overwrite(SUPERBLOCK_BYTES as usize);
                superblock.encode(member.index, &mut bytes);
                let at = Superblock::next_offset(member.superblock_at.get());
                self.member_write(member, at, bytes.freeze().into_vec(), Durability::Fua).await?;
                member.superblock_at.set(Some(at));
                Ok::<(), BlockError>(())
            });
            // A member that fails is out by now, and another round says so.
            let results = join_all(writes).await;
            self.check_running()?;
            if live.iter().zip(&results).all(|(member, result)| result.is_ok() || !member.is_live())
            {
                self.held_by_all.set(generation);
            }
            if results.iter().all(Result::is_ok) {
                *self.recorded_by.borrow_mut() = live.iter().map(|it| it.index).collect();
            }
            self.standing_recorded.set(recording);
        }
        Ok(())
    }

    /// Of how many members that were there when the standing was recorded last how many are out that others reach, with these.
    pub fn gone_at_once(&self, gone: &[usize]) -> (usize, usize) {
        let (recorded_by, members) = (self.recorded_by.borrow(), self.members.borrow());
        let went = |index: &&usize| {
            let member = &members[**index];
            member.is_shared() && (!member.is_live() || gone.contains(index))
        };
        (recorded_by.len(), recorded_by.iter().filter(went).count())
    }

    /// Stops the array where another machine may have opened it meanwhile, by the members that went at once: they know of nothing that
    /// happens from now on, and are more than half of those that were there. With half of them nobody opens it (`assemble`).
    fn refuse_minority(&self) -> Result<(), BlockError> {
        let (were, went) = self.gone_at_once(&[]);
        if went * 2 <= were || planted!("raid-minority-goes-on") {
            return Ok(());
        }
        let error = BlockError::TooManyLost { lost: went, tolerated: were / 2 };
        tracing::error!(array = %self.name, went, were, "so many members went at once that another server may open the array by them");
        self.stop(error.clone());
        Err(error)
    }

    /// Records the standing, and then that every live member holds it: whoever comes back as it
    /// was before this is known to be old.
    pub async fn confirm_standing(self: &Rc<Self>) -> Result<(), BlockError> {
        for _ in 0..2 {
            add(&self.standing_wanted, 1);
            self.settle().await?;
        }
        Ok(())
    }

    pub fn live_members(&self) -> Vec<Rc<Member>> {
        self.members.borrow().iter().filter(|member| member.is_live()).cloned().collect()
    }

    pub fn superblock(&self) -> Superblock {
        let members = self.members.borrow();
        let entry = |member: &Rc<Member>| MemberEntry {
            uuid: member.uuid,
            name: member.name.clone(),
            enclosure: member.enclosure,
            role: member.role.get(),
            state: member.recorded_state(),
            held: self.held_on_record(member),
        };
        Superblock {
            uuid: self.uuid,
            name: self.name.clone(),
            generation: self.generation.get(),
            epoch: self.epoch,
            held_by_all: self.held_by_all.get(),
            patched: self.patched.get(),
            scrubbed: self.scrub_told.get(),
            journal_from: self.journal.as_ref().map_or(0, |journal| journal.from.get()),
            layout: self.layout,
            block_bytes: self.info.block_bytes,
            areas: self.areas,
            members: members.iter().map(entry).collect(),
        }
    }

    /// Makes the present bits of these stripes durable on every live member.
    pub async fn persist(self: &Rc<Self>, stripes: Range<u64>) -> Result<(), BlockError> {
        self.persist_pages(self.map.pages_of(&stripes)).await
    }

    pub async fn persist_pages(self: &Rc<Self>, pages: Range<u64>) -> Result<(), BlockError> {
        let waits: Vec<_> =
            pages.map(|page| self.persist_page(page, self.map.want(page))).collect();
        for result in join_all(waits).await {
            result?;
        }
        Ok(())
    }

    /// Waits until every change of the map that somebody waits for is durable.
    pub async fn persist_wanted_pages(self: &Rc<Self>) -> Result<(), BlockError> {
        let wanted = self.map.wanted_pages();
        let waits = wanted.into_iter().map(|(page, version)| self.persist_page(page, version));
        for result in join_all(waits).await {
            result?;
        }
        Ok(())
    }

    pub async fn persist_page(self: &Rc<Self>, page: u64, version: u64) -> Result<(), BlockError> {
        loop {
            let changed = self.map.written.changed();
            if self.map.is_durable(page, version) {
                return Ok(());
            }
            self.check_running()?;
            let mut image = BufMut::for_overwrite(BLOCK_BYTES as usize);
            match self.map.begin_write(page, self.epoch, &mut image) {
                Some((version, at)) => {
                    let engine = Rc::clone(self);
                    let image = image.freeze();
                    self.detached(async move { engine.write_page(page, version, at, image).await })
                        .await?;
                }
                None => changed.await,
            }
        }
    }

    async fn write_page(
        self: Rc<Self>,
        page: u64,
        version: u64,
        at: u64,
        image: Buf,
    ) -> Result<(), BlockError> {
        let at = self.areas.map_at + at;
        let live = self.live_members();
        let writes = live
            .iter()
            .map(|member| self.member_write(member, at, image.clone().into_vec(), Durability::Fua));
        join_all(writes).await;
        // Those that missed it are out; that must be on record before anybody relies on the page.
        let result = self.settle().await;
        self.map.end_write(page, version, result.is_ok());
        result
    }

    /// An operator takes a member out.
    pub async fn fail(self: &Rc<Self>, index: usize) -> Result<(), RaidError> {
        let member = self.member(index)?;
        if !self.can_do_without(&member) {
            return Err(RaidError::Member { member: index, reason: "its data is not elsewhere" });
        }
        self.put_out(&member, None);
        self.stays_out(&member);
        if member.awaited_until.take().is_some() {
            self.fill_roles();
        }
        Ok(self.settle().await?)
    }

    fn member(&self, index: usize) -> Result<Rc<Member>, RaidError> {
        let members = self.members.borrow();
        members
            .get(index)
            .cloned()
            .ok_or(RaidError::Member { member: index, reason: "no such member" })
    }

    /// Puts `with` in the place of a faulty member. It plays that member's role if nobody else
    /// does by now, and is a spare otherwise. With the UUID of that member it is that member: what it has not missed it
    /// need not get again.
    pub async fn replace(
        self: &Rc<Self>,
        index: usize,
        with: MemberSpec,
    ) -> Result<Admitted, RaidError> {
        let member = self.member(index)?;
        if member.is_live() {
            return Err(RaidError::Member { member: index, reason: "it has not failed" });
        }
        if with.uuid == member.uuid {
            // What was on its way to it must not land on what it gets now.
            let begun = reactor::now();
            while member.in_flight.get() > 0 {
                if begun.elapsed() > STILL_IN_FLIGHT_MAX {
                    let reason = "requests of before it went out have not ended; try again";
                    return Err(RaidError::Member { member: index, reason });
                }
                reactor::sleep(STILL_IN_FLIGHT_MAX / 1000).await;
            }
        }
        let held = self.held_by(&member, &with).await;
        self.admit(index, with, held).await?;
        Ok(if held.is_some_and(|(held, _)| held.is_told) {
            Admitted::CatchesUp
        } else {
            Admitted::Anew
        })
    }

    /// Adds a member to the table, as a spare.
    pub async fn add_spare(self: &Rc<Self>, with: MemberSpec) -> Result<usize, RaidError> {
        let index = self.members.borrow().len();
        if index >= crate::MEMBERS_MAX {
            return Err(RaidError::Member { member: index, reason: "the member table is full" });
        }
        self.admit(index, with, None).await?;
        Ok(index)
    }

    /// `held` is what the device holds of the member whose place it takes, and where its newest superblock lies.
    async fn admit(
        self: &Rc<Self>,
        index: usize,
        with: MemberSpec,
        held: Option<(Held, u64)>,
    ) -> Result<(), RaidError> {
        self.check_running()?;
        let needed_bytes = self.areas.data_at + self.areas.data_bytes;
        let capacity_bytes = with.device.info().capacity_bytes;
        if capacity_bytes < needed_bytes {
            let member = with.name;
            return Err(RaidError::TooSmall { member, capacity_bytes, needed_bytes });
        }
        let block_bytes = self.info.block_bytes;
        let misfit = Misfit::of(with.device.info(), block_bytes);
        // Of the members of older arrays nobody had asked what they write at once.
        let is_old = self.map.format != MapFormat::Paired;
        if let Some(why) = misfit.filter(|why| !(is_old && matches!(why, Misfit::Torn { .. }))) {
            return Err(RaidError::Misfit { member: with.name, block_bytes, why });
        }
        with.device.fence(self.epoch).await?;
        if held.is_none() {
            // Its old superblock must not win or confuse if we stop before the new one is there.
            let blank = BufMut::zeroed(2 * SUPERBLOCK_BYTES as usize).freeze();
            with.device.write(0, blank.into_vec(), Durability::Fua).await?;
        }
        // What somebody who gets everything anew holds is as if it were not there.
        let told = held.map(|(held, _)| held).filter(|held| held.is_told);
        match told {
            Some(_) => self.areas.clear_journal(&with.device).await?,
            None => self.areas.clear_records(&with.device).await?,
        }
        let identity = (with.uuid, with.name, with.enclosure);
        let member = Member::new(index, identity, Some(with.device), None, MemberState::Spare);
        member.superblock_at.set(held.map(|(_, at)| at));
        {
            let mut members = self.members.borrow_mut();
            if index == members.len() {
                members.push(Rc::clone(&member));
            } else if members.get(index).is_none_or(|old| old.is_live()) {
                return Err(RaidError::Member { member: index, reason: "replaced meanwhile" });
            } else if told.is_some() && members[index].role.get().is_none() {
                let reason = "a spare has taken its role meanwhile; try again";
                return Err(RaidError::Member { member: index, reason });
            } else {
                let old = std::mem::replace(&mut members[index], Rc::clone(&member));
                if let Some(role) = old.role.get() {
                    member.role.set(Some(role));
                    member.held.set(told);
                    member.state.set(MemberState::Rebuilding { next_slot: 0 });
                    self.roles.borrow_mut()[role] = Some(Rc::clone(&member));
                }
            }
        }
        // It has neither the map nor the list of lost blocks, and must not count as whole without.
        self.lost.is_to_be_persisted();
        if let Some(role) = member.role.get() {
            self.tell_left_out(role);
            let (member, name) = (index, member.name.clone());
            self.emit(&ArrayEvent::RebuildNeeded { member, name });
        }
        self.fill_roles();
        add(&self.standing_wanted, 1);
        // It is live from here on and gets every page and the list of lost blocks; now those that do not change.
        self.persist_pages(0..self.map.pages()).await?;
        self.persist_lost().await?;
        Ok(self.settle().await?)
    }

    /// Orderly end: everything flushed, nothing dirty, so that the next open has nothing to do.
    pub async fn close(self: &Rc<Self>) -> Result<(), BlockError> {
        // What callers have given up goes on.
        self.detached.until_none().await;
        self.flush().await?;
        self.flush_members().await?;
        self.scrub_told.set(self.scrubbed.get());
        self.retire(0);
        // Stripes declared and never written stay dirty: their redundancy says nothing yet.
        self.persist(0..self.layout.stripes).await?;
        if let Some(journal) = &self.journal {
            journal.forget_all();
        }
        self.confirm_standing().await
    }
}
