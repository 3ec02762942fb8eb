//! Owners of a namespace, by reservation: who has it, how it is taken, and how it is kept.
//!
//! Every connection of the owner is registered, and one of them holds the reservation (`claim`): others may read. A later owner preempts
//! all of them, by which the target ends what the earlier one has under way. In the same way an owner preempts its own connections
//! that are lost: what they have left under way can no longer happen then, and holds nothing back (`unsettled`).
//!
//! What always holds:
//! - Nobody preempts an owner with a later epoch, nor one with the same, unless that was this process: the keys of all hosts are read
//!   before, and again after.
//! - An owner that has met another one, in whatever way, changes nothing any more, and writes nothing again.
//! - Over a new connection an owner changes nothing before that is registered and it has seen, afterwards, that the reservation is still
//!   its own. A target may have lost all of them with its power. Then the owner takes it again only if the drive itself says who the last
//!   owner was, and it is this one.
//! - What a connection has left under way is over only when its preemption was answered: not when it is no longer registered. Who takes over
//!   cannot see what was preempted just before, and by whom: unless the target answers for that as well (our own does), nothing is read
//!   or written until the target must be done with it.
//! - A target that has forgotten its reservations has nobody to be preempted. Ours has whoever acquires the reservation wait for the changes
//!   of all who may not write any more, so that is as good (`settle_by`); with others time has to pass.
//! - A namespace without reservations is fenced on this side only, as a file is.

use super::claim::{Claim, Claimant, EPOCH_MAX, latest};
use super::controller::{ConnectError, Controller};
use super::host::HostId;
use super::namespace::NvmeNamespace;
use super::options::Network;
use super::order::{Order, OrderError};
use super::paths::Paths;
use super::sight::Known;
use super::verdict::{Asked, Verdict};
use crate::{BlockError, Device, Witness};
use levada_base::planted;
use levada_base::reactor::{self, Instant};
use levada_base::{Buf, BufMut, Epoch, IoVec, IoVecMut};
use levada_nvme::REGISTRANTS_MAX;
use levada_nvme::identify::OWN_MODEL;
use levada_nvme::reservation::{
    EXTENDED_HEADER_BYTES, EXTENDED_REGISTRANT_BYTES, PERSIST, Registrant, ReservationReport,
    ReservationRequest,
};
use levada_nvme::{Command, IoOpcode};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// The report of so many hosts as there should never be, where a command may have as much.
const REPORT_BYTES: u64 =
    (EXTENDED_HEADER_BYTES + REGISTRANTS_MAX * EXTENDED_REGISTRANT_BYTES) as u64;
/// Others may come in between so often.
const TRIES: usize = 8;
/// Before a target is asked again that could not say.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
const CLEARED_AGAIN_MAX: Duration = Duration::from_secs(5);
/// Of a block that a witness looks at: every controller gives as much at once.
const WITNESS_BLOCK_BYTES: u64 = 4096;

/// This device as an owner.
#[derive(Default)]
pub(crate) struct Ownership {
    ours: Cell<Epoch>,
    /// The target knows.
    is_reserved: Cell<bool>,
    /// It is being taken again, and was not looked at since.
    is_in_doubt: Cell<bool>,
    /// Counts how often the target had forgotten it, and with it perhaps what was in its cache.
    pub forgotten: Cell<u64>,
    /// Whom it was lost to, for good.
    lost_to: Cell<Option<Epoch>>,
    witness: RefCell<Option<Witness>>,
    /// Keys of those before who were preempted and may still have something under way.
    unheard: RefCell<BTreeSet<u64>>,
    /// Its mark was seen at the drive.
    pub is_mark_seen: Cell<bool>,
    /// Until then they may: nothing is read or written.
    quiet_until: Cell<Option<Instant>>,
    /// Connections are gone that may be registered; somebody sees to it.
    is_to_clear: Cell<bool>,
    is_clearing: Cell<bool>,
    /// Connections that have asked to be registered, and were not answered: the target may come to that after they are gone.
    registering: RefCell<BTreeSet<HostId>>,
}

impl Ownership {
    pub fn is_reserved(&self) -> bool {
        self.is_reserved.get()
    }

    /// Waits until nothing is under way any more of those who had it before: what is read stays as it is, and what is written too.
    pub async fn quiet(&self) {
        while let Some(until) = self.quiet_until.get() {
            if reactor::now() >= until {
                self.quiet_until.set(None);
                return;
            }
            reactor::sleep_until(until).await;
        }
    }

    pub fn epoch(&self) -> Epoch {
        self.ours.get()
    }

    /// It is somebody's, and by what it is recognised is known.
    pub fn has_mark(&self) -> bool {
        self.ours.get() != Epoch::default() && self.witness.borrow().is_some()
    }

    /// It is that of `epoch`.
    fn becomes(&self, epoch: Epoch) {
        // What is there is the mark of the one before.
        if self.ours.replace(epoch) != epoch {
            self.is_mark_seen.set(false);
        }
    }

    pub fn recognise_by(&self, witness: Option<Witness>) {
        // That was another mark.
        self.is_mark_seen.set(witness.as_ref().is_some_and(|witness| witness.is_there));
        *self.witness.borrow_mut() = witness;
    }

    /// Why nothing may be changed any more; `None`: nobody else is known to be the owner.
    pub fn lost(&self) -> Option<BlockError> {
        self.lost_to.get().map(|seen| BlockError::Fenced { ours: self.ours.get(), seen })
    }

    /// The same, where that is another owner, and not this one that has opened the namespace anew.
    pub fn lost_to_later(&self) -> Option<BlockError> {
        self.lost().filter(|_| self.lost_to.get() > Some(self.ours.get()))
    }
}

fn asked(capacity_bytes: u64) -> Asked {
    Asked { operation: "reservations", at: 0, bytes: 0, capacity_bytes, is_read: false }
}

/// A report is asked for, and where it goes.
fn report_command(known: &Known) -> (Command, IoVecMut) {
    let bytes = match known.data_bytes_max {
        0 => REPORT_BYTES,
        limit => limit.min(REPORT_BYTES),
    };
    part_of_report(known.namespace, bytes as usize)
}

/// The first `bytes` of a report, and where they go.
pub(super) fn part_of_report(namespace: u32, bytes: usize) -> (Command, IoVecMut) {
    const EXTENDED: u32 = 1;
    let command = Command::new(IoOpcode::ReservationReport as u8, 0, namespace)
        .with_dword(10, (bytes / 4 - 1) as u32)
        .with_dword(11, EXTENDED);
    (command, BufMut::for_overwrite(bytes).into_vec())
}

/// A request and its data; `persists`: what comes of it is kept over a loss of power.
fn request_command(
    namespace: u32,
    request: ReservationRequest,
    persists: bool,
) -> (Command, IoVec) {
    let (opcode, dword, data) = request.to_command();
    let persist = match opcode {
        IoOpcode::ReservationRegister if persists => PERSIST,
        _ => 0,
    };
    let command = Command::new(opcode as u8, 0, namespace).with_dword(10, dword | persist);
    (command, Buf::copy_of(&data).into_vec())
}

async fn report<N: Network>(device: &NvmeNamespace<N>) -> Result<ReservationReport, OrderError> {
    let (command, into) = report_command(device.known());
    let asked = asked(device.info().capacity_bytes);
    let order = Order { command, from: IoVec::new(), change: None, asked };
    let (_, page) = device.shared().carry_out(&order, into).await?;
    // More hosts than it has room for are more than there should be.
    let too_many = OrderError::Block(BlockError::Io { errno: libc::EOVERFLOW });
    ReservationReport::parse_extended(&page[0]).ok_or(too_many)
}

/// Whom a conflict was with.
pub(super) async fn conflict<N: Network>(device: &NvmeNamespace<N>) -> BlockError {
    let owner = &device.shared().owner;
    let ours = owner.ours.get();
    let opening = device.shared().opening;
    let seen = match report(device).await {
        Ok(report) => latest(&report, opening).filter(|seen| *seen > ours),
        Err(_) => None,
    };
    // One who does not say is a later one all the same.
    let seen = seen.unwrap_or(ours.next());
    if owner.lost_to.get().is_some_and(|known| known < seen) {
        owner.lost_to.set(Some(seen));
    }
    BlockError::Fenced { ours, seen }
}

/// The latest owner of which the target knows.
pub(super) async fn owner<N: Network>(device: &NvmeNamespace<N>) -> Result<Epoch, BlockError> {
    let opening = device.shared().opening;
    match report(device).await {
        Ok(report) => Ok(latest(&report, opening).unwrap_or_default()),
        Err(OrderError::Block(error)) => Err(error),
        Err(OrderError::Conflict) => Err(BlockError::Io { errno: libc::EBUSY }),
    }
}

/// Takes the namespace for the owner of `epoch`.
pub(super) async fn fence<N: Network>(
    device: &NvmeNamespace<N>,
    epoch: Epoch,
) -> Result<(), BlockError> {
    let paths = device.shared();
    let owner = &paths.owner;
    if let Some(lost) = owner.lost() {
        return Err(lost);
    }
    let seen = owner.ours.get();
    if epoch < seen {
        return Err(BlockError::Fenced { ours: epoch, seen });
    }
    if !device.has_reservations() {
        owner.becomes(epoch);
        return Ok(());
    }
    if epoch > EPOCH_MAX {
        return Err(BlockError::Io { errno: libc::EOVERFLOW });
    }
    let taken = paths.take(epoch).await;
    match &taken {
        // Connections that were lost on the way.
        Ok(()) => paths.clear_away(),
        Err(BlockError::Fenced { seen, .. }) if owner.is_reserved.get() => paths.lose_to(*seen),
        Err(_) if owner.is_reserved.get() && epoch > seen => {
            paths.give_up("nobody knows who owns it");
        }
        Err(_) => {}
    }
    taken
}

/// Lets go of the namespace as its owner. Whoever takes it next need not be a later one; nothing else is kept of this one.
pub(super) async fn relinquish<N: Network>(device: &NvmeNamespace<N>) -> Result<(), BlockError> {
    let paths = device.shared();
    let owner = &paths.owner;
    if let Some(lost) = owner.lost() {
        return Err(lost);
    }
    // Nor does another path become whole meanwhile, as the owner.
    let _turn = paths.making_whole.acquire(1).await;
    if owner.is_reserved.replace(false) {
        let epoch = owner.ours.get();
        // Which of them holds the reservation does not matter: it goes with the last.
        for controller in paths.whole() {
            let current = Some(paths.claimant(&controller, epoch).key());
            let gone = ReservationRequest::Unregister { current };
            if paths.reserve(&controller, gone).await.is_err() {
                // Something of it may be left, which whoever is told tries again.
                owner.is_reserved.set(true);
                return Err(BlockError::Io { errno: libc::EIO });
            }
        }
    }
    owner.ours.set(Epoch::default());
    Ok(())
}

/// Steps on the way to a reservation, of which there are no more than registrants to be preempted, and some to spare.
#[derive(Default)]
struct Steps {
    done: usize,
    limit: usize,
}

impl Steps {
    fn may_go_on(&mut self, report: &ReservationReport) -> bool {
        self.limit = self.limit.max(TRIES + report.registrants.len());
        self.done += 1;
        self.done <= self.limit
    }
}

/// Why a connection does not have the namespace.
enum NotTaken {
    Theirs(Epoch),
    Connect(ConnectError),
}

impl From<ConnectError> for NotTaken {
    fn from(error: ConnectError) -> Self {
        Self::Connect(error)
    }
}

impl<N: Network> Paths<N> {
    fn claimant(&self, controller: &Controller<N::Stream>, epoch: Epoch) -> Claimant {
        Claimant { opening: self.opening, host: controller.host_id, epoch }
    }

    /// Takes the namespace over whatever path there is, and then over all others.
    async fn take(&self, epoch: Epoch) -> Result<(), BlockError> {
        let begun = reactor::now();
        loop {
            let controller = self.any_path().await?;
            // Meanwhile no other path becomes whole, as the epoch that it would be registered for.
            let _turn = self.making_whole.acquire(1).await;
            match self.take_over(&controller, epoch).await {
                Ok(()) => {
                    self.owner.becomes(epoch);
                    self.owner.is_reserved.set(true);
                    for other in self.whole() {
                        if other.host_id != controller.host_id
                            && !self.take_with(&controller, &other, epoch).await
                        {
                            // Before it is used again it is looked at.
                            self.is_not_whole(&other.host_id);
                        }
                    }
                    return self.owner.lost().map_or(Ok(()), Err);
                }
                Err(NotTaken::Theirs(seen)) => {
                    return Err(BlockError::Fenced { ours: epoch, seen });
                }
                Err(NotTaken::Connect(ConnectError::Refused { status, .. }))
                    if status.do_not_retry =>
                {
                    return Err(BlockError::Io { errno: libc::EIO });
                }
                Err(NotTaken::Connect(_)) => {}
            }
            if begun.elapsed() > self.options.timing.gone_after {
                return Err(BlockError::Gone);
            }
            reactor::sleep(AGAIN_AFTER).await;
        }
    }

    /// Takes over `other`, too, what has been taken over `first`, unless it leads elsewhere: another's drive may be there.
    async fn take_with(
        &self,
        first: &Controller<N::Stream>,
        other: &Controller<N::Stream>,
        epoch: Epoch,
    ) -> bool {
        let report = self.report_over(other).await;
        let is_known =
            |it: ReservationReport| it.registrants.iter().any(|it| it.host == first.host_id);
        report.is_ok_and(is_known) && self.take_over(other, epoch).await.is_ok()
    }

    async fn take_over(
        &self,
        controller: &Controller<N::Stream>,
        epoch: Epoch,
    ) -> Result<(), NotTaken> {
        let us = self.claimant(controller, epoch);
        let mut steps = Steps::default();
        let mut is_registered = false;
        loop {
            let report = self.report_over(controller).await?;
            if !steps.may_go_on(&report) {
                return Err(NotTaken::Theirs(epoch.next()));
            }
            if let Some(seen) = us.taking_preceded_by(&report) {
                if is_registered {
                    // What the other one sees need not be more than there is.
                    let current = Some(us.key());
                    let gone = ReservationRequest::Unregister { current };
                    let _ = self.reserve(controller, gone).await;
                }
                return Err(NotTaken::Theirs(seen));
            }
            let Some(request) = us.next(&report) else {
                if !self.owner.unheard.take().is_empty() {
                    let until = reactor::now() + self.options.timing.finish;
                    self.owner.quiet_until.set(Some(until));
                }
                return Ok(());
            };
            is_registered |= matches!(request, ReservationRequest::Register { .. });
            // The next report says what came of it.
            match request {
                ReservationRequest::Preempt { preempted, .. } => {
                    self.preempt(controller, request, preempted).await?;
                }
                _ => drop(self.reserve(controller, request).await?),
            }
        }
    }

    /// Has others preempted, and remembers their key unless nothing of any former owner can be under way any more.
    async fn preempt(
        &self,
        controller: &Controller<N::Stream>,
        request: ReservationRequest,
        key: u64,
    ) -> Result<(), ConnectError> {
        let unheard = &self.owner.unheard;
        let is_first_try = unheard.borrow_mut().insert(key);
        let answered = self.reserve(controller, request).await;
        let is_over = match &answered {
            // Others answer for whom this names, and not for what was preempted just before: by the former owner, whose connection was
            // lost, or by one that wanted to take over as well.
            Ok(true) => controller.identity.model == OWN_MODEL,
            // This one has done nothing, but one before may have.
            Ok(false) | Err(ConnectError::Refused { .. }) => is_first_try,
            Err(_) => false,
        };
        if is_over {
            unheard.borrow_mut().remove(&key);
        }
        answered.map(drop)
    }

    /// Has a request carried out; false: the target says that it conflicts with what others have asked for.
    async fn reserve(
        &self,
        controller: &Controller<N::Stream>,
        request: ReservationRequest,
    ) -> Result<bool, ConnectError> {
        let known = self.known();
        let persists = known.identity.keeps_reservations;
        let (command, data) = request_command(known.namespace, request, persists);
        let registers = matches!(request, ReservationRequest::Register { .. });
        if registers {
            let mut registering = self.owner.registering.borrow_mut();
            // Of others that are gone nothing can come that would count.
            registering
                .retain(|it| self.has_connection(it) || self.unsettled.borrow().has_lost(*it));
            registering.insert(controller.host_id);
        }
        let (completion, _) = self.ask(controller, command, data, IoVecMut::new()).await?;
        if registers {
            self.owner.registering.borrow_mut().remove(&controller.host_id);
        }
        match Verdict::of(completion.status, asked(known.capacity_bytes())) {
            Verdict::Done => Ok(true),
            Verdict::Conflict => Ok(false),
            Verdict::NotHere | Verdict::Again | Verdict::Failed(_) => {
                let (command, status) = ("the reservation", completion.status);
                Err(ConnectError::Refused { command, status })
            }
        }
    }

    /// Another owner has the namespace: nothing is changed any more.
    pub(super) fn lose_to(&self, seen: Epoch) {
        let ours = self.owner.ours.get();
        if self.owner.lost_to.get().is_none() {
            let subsystem = &self.subsystem;
            match seen > ours {
                true => {
                    tracing::error!(%subsystem, %ours, %seen, "another owner has the namespace")
                }
                // Mostly this process, which had lost it as it was, and opened it anew.
                false => {
                    tracing::warn!(%subsystem, %ours, "the namespace was taken anew for this owner");
                }
            }
            self.owner.lost_to.set(Some(seen));
        }
        self.unflushed.borrow_mut().clear();
        self.has_changed();
    }

    /// A change was refused as only the owner may make it.
    pub(super) fn was_refused(&self) {
        if self.owner.is_reserved.get() && self.owner.lost_to.get().is_none() {
            self.lose_to(self.owner.ours.get().next());
        }
    }

    /// Sees to it that a new connection is registered and the namespace is this owner's, or says that it is not: [`Ownership::lost`], or
    /// given up.
    pub(super) async fn check_owner(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<(), ConnectError> {
        let owner = &self.owner;
        let mut steps = Steps::default();
        let mut acquired_in = None;
        loop {
            if !owner.is_reserved.get() || owner.lost_to.get().is_some() {
                return Ok(());
            }
            let us = self.claimant(controller, owner.ours.get());
            let report = self.report_over(controller).await?;
            if acquired_in.take() == Some(report.generation) {
                self.settle_by(&report, &us.host);
            }
            if !steps.may_go_on(&report) {
                return Err(ConnectError::Different { what: "its owners do not agree".into() });
            }
            match us.claim(&report) {
                _ if planted!("nvme-owner-not-looked-for") => {}
                Claim::Ours if !owner.is_in_doubt.get() => {}
                Claim::Theirs(seen) => {
                    self.lose_to(seen.unwrap_or(us.epoch.next()));
                    return Ok(());
                }
                // The target has forgotten everybody, another owner before us perhaps. What is on the drive outlives that.
                claim @ (Claim::Ours | Claim::Nobody) => {
                    owner.is_in_doubt.set(true);
                    if claim == Claim::Nobody {
                        self.was_forgotten();
                    }
                    match self.witnessed(controller).await? {
                        Some(seen) if seen == us.epoch => owner.is_mark_seen.set(true),
                        Some(seen) if seen > us.epoch => {
                            self.lose_to(seen);
                            return Ok(());
                        }
                        Some(_) | None => {
                            self.give_up("the target has lost its reservations, and another owner may have been there");
                            return Ok(());
                        }
                    }
                    if claim == Claim::Ours {
                        // Nobody else could have written since, and nobody has before.
                        tracing::warn!(subsystem = %self.subsystem, epoch = %us.epoch, "reserved again: the target had lost it");
                        owner.is_in_doubt.set(false);
                    }
                }
            }
            let Some(request) = us.next(&report) else { return Ok(()) };
            let is_done = self.reserve(controller, request).await?;
            let acquires = matches!(request, ReservationRequest::Acquire { .. });
            if is_done && acquires && controller.identity.model == OWN_MODEL {
                acquired_in = Some(report.generation);
            }
        }
    }

    /// The target has forgotten its owner. From now on nothing over any path is relied upon: what was answered before may be lost, and who is not
    /// registered any more would be refused as if there were another owner, as soon as it is reserved again.
    fn was_forgotten(&self) {
        self.owner.forgotten.set(self.owner.forgotten.get() + 1);
        self.era.set(self.era.get() + 1);
        self.none_is_whole();
    }

    /// What was lost cannot happen any more, if `acquirer` holds the reservation, as a target of ours has answered, and nobody was registered
    /// or preempted between that and the report before it, which is of the same generation. But not of those who may be registered, or come
    /// to be.
    fn settle_by(&self, report: &ReservationReport, acquirer: &HostId) {
        // Or it was forgotten again.
        if !report.registrants.iter().any(|it| it.host == *acquirer && it.is_holder) {
            return;
        }
        let registering = self.owner.registering.borrow();
        let is_registered = |host| report.registrants.iter().any(|it| it.host == host);
        self.unsettled.borrow().settle(|lost| !registering.contains(&lost) && !is_registered(lost));
    }

    /// Sees to it that the drive is still what this owner has there, after nobody could see it for a while: a target may answer with another
    /// one under the same name, and where there are no reservations only the drive itself tells of a later owner.
    pub(super) async fn recognise(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<(), ConnectError> {
        // Before it is fenced it is nobody's.
        if !self.owner.has_mark() {
            return Ok(());
        }
        let ours = self.owner.ours.get();
        match self.witnessed(controller).await? {
            Some(seen) if seen > ours => self.lose_to(seen),
            Some(seen) if seen == ours => self.owner.is_mark_seen.set(true),
            // It has not been written yet.
            Some(_) if !self.owner.is_mark_seen.get() => {}
            Some(_) | None => {
                self.give_up("the target answers with another drive under the same name")
            }
        }
        Ok(())
    }

    /// Has connections that are gone preempted, as soon as there is one to do it: what they have left under way is over then.
    pub(super) fn clear_away(self: &Rc<Self>) {
        if !self.owner.is_reserved.get() {
            return;
        }
        self.owner.is_to_clear.set(true);
        if self.owner.is_clearing.replace(true) {
            return;
        }
        let paths = Rc::clone(self);
        reactor::spawn_in(&self.group, async move {
            let mut pause = AGAIN_AFTER;
            while paths.owner.is_to_clear.take() {
                let Ok(controller) = paths.any_path().await else { break };
                if paths.owner.lost().is_some() {
                    break;
                }
                match paths.clear_over(&controller).await {
                    Ok(()) => {}
                    // Then time does it (`unsettled`).
                    Err(ConnectError::Refused { status, .. }) if status.do_not_retry => {
                        tracing::warn!(subsystem = %paths.subsystem, %status, "a connection that is gone cannot be preempted");
                    }
                    Err(_) => {
                        paths.owner.is_to_clear.set(true);
                        reactor::sleep(pause).await;
                        pause = (pause * 2).min(CLEARED_AGAIN_MAX);
                    }
                }
            }
            paths.owner.is_clearing.set(false);
        });
    }

    /// The same over one path: what a connection that is gone has under way ends before the target answers.
    pub(super) async fn clear_over(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<(), ConnectError> {
        let us = self.claimant(controller, self.owner.ours.get());
        let report = self.report_over(controller).await?;
        let is_gone =
            |it: &&Registrant| self.opening.has(&it.host) && !self.has_connection(&it.host);
        let mut cleared = Ok(());
        for gone in report.registrants.iter().filter(is_gone) {
            match self.reserve(controller, us.preempt(gone.key)).await {
                Ok(true) => self.unsettled.borrow().settled(gone.host),
                Ok(false) => {}
                // Others may go all the same: what is left grows with every connection that comes and goes.
                Err(error @ ConnectError::Refused { .. }) => {
                    // One that may go another time is tried again.
                    let is_final = |error: &ConnectError| matches!(error, ConnectError::Refused { status, .. } if status.do_not_retry);
                    if cleared.as_ref().map_or_else(is_final, |()| true) {
                        cleared = Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        cleared
    }

    pub(super) async fn report_over(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<ReservationReport, ConnectError> {
        let (command, into) = report_command(&self.known());
        let page = self.fetch(controller, "Reservation Report", command, into).await?;
        let what = "its report of reservations is cut off";
        ReservationReport::parse_extended(&page[0]).ok_or(ConnectError::Contradiction { what })
    }

    /// The last owner, as the drive tells; `None`: nobody can say.
    pub(super) async fn witnessed(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<Option<Epoch>, ConnectError> {
        let Some(witness) = self.owner.witness.borrow().clone() else { return Ok(None) };
        if planted!("nvme-witness-not-heard") {
            return Ok(Some(self.owner.ours.get()));
        }
        let known = self.known();
        let block_bytes = known.identity.block_bytes;
        let mut seen = None;
        for at in witness.blocks {
            let command = Command::new(IoOpcode::Read as u8, 0, known.namespace)
                .with_blocks(at / block_bytes, WITNESS_BLOCK_BYTES / block_bytes);
            let into = BufMut::for_overwrite(WITNESS_BLOCK_BYTES as usize).into_vec();
            let (completion, read) = self.ask(controller, command, IoVec::new(), into).await?;
            let asked = Asked { operation: "read", is_read: true, ..asked(known.capacity_bytes()) };
            match Verdict::of(completion.status, asked) {
                Verdict::Done => seen = seen.max((witness.owner)(&read[0])),
                Verdict::Failed(BlockError::Medium { .. }) => {}
                Verdict::NotHere | Verdict::Again | Verdict::Conflict | Verdict::Failed(_) => {
                    let status = completion.status;
                    return Err(ConnectError::Refused { command: "Read", status });
                }
            }
        }
        Ok(seen)
    }

    /// What a command fetches from the blocks' side of one controller.
    async fn fetch(
        &self,
        controller: &Controller<N::Stream>,
        command_name: &'static str,
        command: Command,
        into: IoVecMut,
    ) -> Result<IoVecMut, ConnectError> {
        let (completion, into) = self.ask(controller, command, IoVec::new(), into).await?;
        match Verdict::of(completion.status, asked(self.known().capacity_bytes())) {
            Verdict::Done => Ok(into),
            Verdict::NotHere | Verdict::Again | Verdict::Conflict | Verdict::Failed(_) => {
                Err(ConnectError::Refused { command: command_name, status: completion.status })
            }
        }
    }
}
