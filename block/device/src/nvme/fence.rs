//! Owners of a namespace, as reservations: the key of a host says which epoch it owns the namespace in.
//!
//! The owner is registered and holds a reservation of the type Write Exclusive: others may read. A later owner preempts it, by which the
//! target ends what the earlier one has under way.
//!
//! What always holds:
//! - Nobody preempts an owner with a later epoch, nor one with the same, unless that was this process: the keys of all hosts are read
//!   before, and again after.
//! - An owner that has met another one, in whatever way, changes nothing any more, and writes nothing again.
//! - Over a new connection an owner does nothing before it has seen that the reservation is still its own. A target may have lost all of
//!   them with its power. Then the owner takes it again only if the drive itself says who the last owner was, and it is this one.
//! - A namespace without reservations is fenced on this side only, as a file is.

use super::controller::{ConnectError, Controller};
use super::namespace::NvmeNamespace;
use super::options::{Network, are_of_one_process};
use super::paths::{Known, Order, OrderError, Paths};
use super::verdict::{Asked, Verdict};
use crate::{BlockError, Device};
use levada_base::{Buf, BufMut, Epoch, IoVec, IoVecMut};
use levada_nvme::reservation::{
    PERSIST, Registrant, ReservationReport, ReservationRequest, ReservationType,
};
use levada_nvme::{Command, IoOpcode};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The upper bits of our keys: "LV".
const KEY: u64 = 0x4c56 << 48;
const EPOCH_BITS: u64 = (1 << 48) - 1;
/// The report of so many hosts as there should never be, where a command may have as much.
const REPORT_BYTES: u64 = 16 << 10;
/// Others may come in between so often.
const TRIES: usize = 4;
/// What is read at once of what a witness looks at: every controller gives as much.
const WITNESS_PIECE_BYTES: u64 = 4096;

/// Who can tell from a drive's first bytes which owner was the last to write there.
#[derive(Clone)]
pub struct Witness {
    /// How many it looks at; whole blocks of 4 KiB.
    pub bytes: u64,
    /// The epoch of the last owner. `None`: these are not the bytes of whatever this owner has there.
    pub owner: Rc<OwnerOf>,
}

/// What first bytes tell of the last owner.
type OwnerOf = dyn Fn(&[u8]) -> Option<Epoch>;

/// This device as an owner.
#[derive(Default)]
pub(crate) struct Ownership {
    ours: Cell<Epoch>,
    /// The target knows.
    is_reserved: Cell<bool>,
    /// What [`fence`] is at.
    taking: Cell<Option<Epoch>>,
    /// It is being taken again, and was not looked at since.
    is_in_doubt: Cell<bool>,
    /// Whom it was lost to, for good.
    lost_to: Cell<Option<Epoch>>,
    witness: RefCell<Option<Witness>>,
}

impl Ownership {
    pub fn is_reserved(&self) -> bool {
        self.is_reserved.get()
    }

    pub fn recognise_by(&self, witness: Witness) {
        *self.witness.borrow_mut() = Some(witness);
    }

    /// Why nothing may be changed any more; `None`: nobody else is known to be the owner.
    pub fn lost(&self) -> Option<BlockError> {
        self.lost_to.get().map(|seen| BlockError::Fenced { ours: self.ours.get(), seen })
    }
}

/// What the target says of an owner.
#[derive(Debug, PartialEq, Eq)]
enum Claim {
    Ours,
    /// Nobody has it that could be a later owner, and neither have we.
    Nobody,
    /// `None`: one that says nothing of epochs.
    Theirs(Option<Epoch>),
}

fn key(epoch: Epoch) -> u64 {
    KEY | epoch.0 & EPOCH_BITS
}

/// The epoch that a key stands for; `None`: it is not one of ours.
fn epoch_of(key: u64) -> Option<Epoch> {
    (key & !EPOCH_BITS == KEY).then_some(Epoch(key & EPOCH_BITS))
}

/// The latest owner among those who are registered, but for `host`.
fn latest(report: &ReservationReport, host: &[u8; 16]) -> Option<Epoch> {
    let others = report.registrants.iter().filter(|registrant| registrant.host != *host);
    others.filter_map(|registrant| epoch_of(registrant.key)).max()
}

/// Another owner before whom the one of `epoch` has to give way: a later one, or one of the same epoch that was faster, as far as
/// `is_rival`.
fn precedes(
    report: &ReservationReport,
    host: &[u8; 16],
    epoch: Epoch,
    is_rival: impl Fn(&[u8; 16]) -> bool,
) -> Option<Epoch> {
    let others = report.registrants.iter().filter(|registrant| registrant.host != *host);
    let seen = others.filter_map(|registrant| Some((epoch_of(registrant.key)?, registrant)));
    let faster = |it: &Registrant| it.is_holder && is_rival(&it.host);
    seen.filter(|(seen, other)| *seen > epoch || *seen == epoch && faster(other))
        .map(|(seen, _)| seen)
        .max()
}

fn claim(report: &ReservationReport, host: &[u8; 16], epoch: Epoch) -> Claim {
    if let Some(seen) = precedes(report, host, epoch, |_| true) {
        return Claim::Theirs(Some(seen));
    }
    let is_stranger = |registrant: &Registrant| {
        registrant.host != *host && registrant.is_holder && epoch_of(registrant.key).is_none()
    };
    if report.registrants.iter().any(is_stranger) {
        return Claim::Theirs(None);
    }
    match next(report, host, key(epoch)) {
        None => Claim::Ours,
        Some(_) => Claim::Nobody,
    }
}

/// What is next on the way to the reservation, given who is registered. `None`: it is ours.
fn next(report: &ReservationReport, host: &[u8; 16], key: u64) -> Option<ReservationRequest> {
    let kind = ReservationType::WriteExclusive;
    let ours = report.registrants.iter().find(|registrant| registrant.host == *host);
    match ours {
        None => return Some(ReservationRequest::Register { key }),
        Some(Registrant { key: current, .. }) if *current != key => {
            return Some(ReservationRequest::Replace { current: Some(*current), key });
        }
        Some(Registrant { is_holder: true, .. }) if report.kind == Some(kind) => return None,
        // Of another type: it is given up first.
        Some(Registrant { is_holder: true, .. }) if report.kind.is_some() => {
            let kind = report.kind.unwrap_or(kind);
            return Some(ReservationRequest::Release { current: key, kind });
        }
        Some(_) => {}
    }
    let holder = report.registrants.iter().find(|registrant| registrant.is_holder);
    Some(match holder {
        Some(holder) => {
            // Where all are holders, they are named by 0.
            let is_of_all = report.kind.is_some_and(ReservationType::is_of_all_registrants);
            let preempted = if is_of_all { 0 } else { holder.key };
            ReservationRequest::Preempt { current: key, preempted, kind, aborts: true }
        }
        None => ReservationRequest::Acquire { current: key, kind },
    })
}

fn order<N: Network>(device: &NvmeNamespace<N>, command: Command, from: IoVec) -> Order {
    let capacity_bytes = device.info().capacity_bytes;
    Order { command, from, change: None, asked: asked(capacity_bytes) }
}

fn asked(capacity_bytes: u64) -> Asked {
    Asked { operation: "reservations", at: 0, bytes: 0, capacity_bytes, is_read: false }
}

/// A report is asked for, and where it goes.
fn report_command(known: &Known) -> (Command, IoVecMut) {
    const EXTENDED: u32 = 1;
    let bytes = match known.data_bytes_max {
        0 => REPORT_BYTES,
        limit => limit.min(REPORT_BYTES),
    };
    let command = Command::new(IoOpcode::ReservationReport as u8, 0, known.namespace)
        .with_dword(10, (bytes / 4 - 1) as u32)
        .with_dword(11, EXTENDED);
    (command, BufMut::for_overwrite(bytes as usize).into_vec())
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
    let order = order(device, command, IoVec::new());
    let (_, page) = device.shared().carry_out(&order, into).await?;
    // More hosts than it has room for are more than there should be.
    let too_many = OrderError::Block(BlockError::Io { errno: libc::EOVERFLOW });
    ReservationReport::parse_extended(&page[0]).ok_or(too_many)
}

/// Whom a conflict was with.
pub(super) async fn conflict<N: Network>(device: &NvmeNamespace<N>) -> BlockError {
    let owner = &device.shared().owner;
    let ours = owner.ours.get();
    let host = device.shared().options.host.id;
    let seen = match report(device).await {
        Ok(report) => latest(&report, &host).filter(|seen| *seen > ours),
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
    let host = device.shared().options.host.id;
    match report(device).await {
        Ok(report) => Ok(latest(&report, &host).unwrap_or_default()),
        Err(OrderError::Block(error)) => Err(error),
        Err(OrderError::Conflict) => Err(BlockError::Io { errno: libc::EBUSY }),
    }
}

/// Takes the namespace for the owner of `epoch`.
pub(super) async fn fence<N: Network>(
    device: &NvmeNamespace<N>,
    epoch: Epoch,
) -> Result<(), BlockError> {
    let owner = &device.shared().owner;
    if let Some(lost) = owner.lost() {
        return Err(lost);
    }
    let seen = owner.ours.get();
    if epoch < seen {
        return Err(BlockError::Fenced { ours: epoch, seen });
    }
    if !device.has_reservations() {
        owner.ours.set(epoch);
        return Ok(());
    }
    owner.taking.set(Some(epoch));
    let taken = take(device, epoch).await;
    owner.taking.set(None);
    match &taken {
        Ok(()) => {
            owner.ours.set(epoch);
            owner.is_reserved.set(true);
        }
        Err(BlockError::Fenced { seen, .. }) if owner.is_reserved.get() => {
            device.shared().lose_to(*seen);
        }
        Err(_) if owner.is_reserved.get() && epoch > seen => {
            device.shared().give_up("nobody knows who owns it");
        }
        Err(_) => {}
    }
    taken
}

async fn take<N: Network>(device: &NvmeNamespace<N>, epoch: Epoch) -> Result<(), BlockError> {
    let known = device.known();
    let host = device.shared().options.host.id;
    let block = |error| match error {
        OrderError::Block(error) => error,
        OrderError::Conflict => BlockError::Fenced { ours: epoch, seen: epoch.next() },
    };
    let send = async |request| {
        let persists = known.identity.keeps_reservations;
        let (command, data) = request_command(known.namespace, request, persists);
        device.shared().carry_out(&order(device, command, data), IoVecMut::new()).await
    };
    let mut conflicts = 0;
    let mut is_registered = false;
    // To register, to take over and to look again, with some to spare.
    for _ in 0..2 * TRIES {
        let connected = device.shared().connected.get();
        let report = report(device).await.map_err(block)?;
        // What this process had opened before gives way to what it has opened now.
        let is_rival = |other: &[u8; 16]| !are_of_one_process(other, &host);
        if let Some(seen) = precedes(&report, &host, epoch, is_rival) {
            if is_registered {
                // What the other one sees need not be more than there is.
                let _ = send(ReservationRequest::Unregister { current: Some(key(epoch)) }).await;
            }
            return Err(BlockError::Fenced { ours: epoch, seen });
        }
        let Some(request) = next(&report, &host, key(epoch)) else {
            // A target that was connected meanwhile may have forgotten it.
            if device.shared().connected.get() != connected {
                continue;
            }
            return Ok(());
        };
        is_registered |= matches!(request, ReservationRequest::Register { .. });
        match send(request).await {
            Ok(_) => {}
            // Another one was faster, or this very request was carried out and its answer lost: the report says which.
            Err(OrderError::Conflict) if conflicts < TRIES => conflicts += 1,
            Err(error) => return Err(block(error)),
        }
    }
    Err(BlockError::Fenced { ours: epoch, seen: epoch.next() })
}

impl<N: Network> Paths<N> {
    /// Another owner has the namespace: nothing is changed any more.
    pub(super) fn lose_to(&self, seen: Epoch) {
        let ours = self.owner.ours.get();
        if self.owner.lost_to.get().is_none() {
            tracing::error!(subsystem = %self.subsystem, %ours, %seen, "another owner has the namespace");
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

    /// Sees to it, over a new connection, that the namespace is this owner's, or says that it is not: [`Ownership::lost`], or given up.
    pub(super) async fn check_owner(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<(), ConnectError> {
        let owner = &self.owner;
        let host = self.options.host.id;
        for _ in 0..2 * TRIES {
            if !owner.is_reserved.get() || owner.lost_to.get().is_some() {
                return Ok(());
            }
            let ours = owner.ours.get();
            let report = self.report_over(controller).await?;
            let claim = match owner.taking.get() {
                Some(taking) if claim(&report, &host, taking) == Claim::Ours => Claim::Ours,
                Some(_) | None => claim(&report, &host, ours),
            };
            match claim {
                Claim::Ours if !owner.is_in_doubt.get() => return Ok(()),
                Claim::Theirs(seen) => {
                    self.lose_to(seen.unwrap_or(ours.next()));
                    return Ok(());
                }
                Claim::Nobody if owner.taking.get().is_some() => {
                    return Err(ConnectError::Different { what: "its owner is changing".into() });
                }
                Claim::Ours | Claim::Nobody => {}
            }
            // The target has forgotten everybody, another owner before us perhaps. What is on the drive outlives that.
            owner.is_in_doubt.set(true);
            match self.witnessed(controller).await? {
                Some(seen) if seen == ours => {}
                Some(seen) if seen > ours => {
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
                tracing::warn!(subsystem = %self.subsystem, epoch = %ours, "reserved again: the target had lost it");
                owner.is_in_doubt.set(false);
                return Ok(());
            }
            if let Some(request) = next(&report, &host, key(ours)) {
                let known = self.known();
                let persists = known.identity.keeps_reservations;
                let (command, data) = request_command(known.namespace, request, persists);
                // The next report says what came of it.
                let _ = self.ask(controller, command, data, IoVecMut::new()).await?;
            }
        }
        Err(ConnectError::Different { what: "its owners do not agree".into() })
    }

    async fn report_over(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<ReservationReport, ConnectError> {
        let (command, into) = report_command(&self.known());
        let page = self.fetch(controller, "Reservation Report", command, into).await?;
        let what = "its report of reservations is cut off";
        ReservationReport::parse_extended(&page[0]).ok_or(ConnectError::Contradiction { what })
    }

    /// The last owner, as the drive tells; `None`: nobody can say.
    async fn witnessed(
        &self,
        controller: &Controller<N::Stream>,
    ) -> Result<Option<Epoch>, ConnectError> {
        let Some(witness) = self.owner.witness.borrow().clone() else { return Ok(None) };
        let known = self.known();
        let block_bytes = known.identity.block_bytes;
        let mut bytes = Vec::new();
        for at in (0..witness.bytes).step_by(WITNESS_PIECE_BYTES as usize) {
            let command = Command::new(IoOpcode::Read as u8, 0, known.namespace)
                .with_blocks(at / block_bytes, WITNESS_PIECE_BYTES / block_bytes);
            let into = BufMut::for_overwrite(WITNESS_PIECE_BYTES as usize).into_vec();
            let read = self.fetch(controller, "Read", command, into).await?;
            bytes.extend_from_slice(&read[0]);
        }
        Ok((witness.owner)(&bytes))
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

#[cfg(test)]
mod tests {
    use super::*;

    const US: [u8; 16] = [1; 16];
    const THEM: [u8; 16] = [2; 16];

    fn of(host: [u8; 16], epoch: u64, is_holder: bool) -> Registrant {
        Registrant { host, controller: 1, key: key(Epoch(epoch)), is_holder }
    }

    #[test]
    fn the_way_to_the_reservation() {
        let kind = ReservationType::WriteExclusive;
        let ours = key(Epoch(5));
        let nobody = ReservationReport::default();
        assert_eq!(next(&nobody, &US, ours), Some(ReservationRequest::Register { key: ours }));
        let theirs = |registrants: Vec<Registrant>| ReservationReport {
            generation: 1,
            kind: Some(kind),
            registrants,
        };
        let registered = theirs(vec![of(THEM, 4, true), of(US, 5, false)]);
        let preempt = ReservationRequest::Preempt {
            current: ours,
            preempted: key(Epoch(4)),
            kind,
            aborts: true,
        };
        assert_eq!(next(&registered, &US, ours), Some(preempt));
        let older = theirs(vec![of(US, 3, true)]);
        let current = Some(key(Epoch(3)));
        let replace = ReservationRequest::Replace { current, key: ours };
        assert_eq!(next(&older, &US, ours), Some(replace));
        assert_eq!(next(&theirs(vec![of(US, 5, true)]), &US, ours), None);
        let free = ReservationReport { kind: None, ..theirs(vec![of(US, 5, false)]) };
        let acquire = ReservationRequest::Acquire { current: ours, kind };
        assert_eq!(next(&free, &US, ours), Some(acquire));
    }

    #[test]
    fn keys_of_others_say_nothing() {
        assert_eq!(epoch_of(key(Epoch(7))), Some(Epoch(7)));
        assert_eq!(epoch_of(7), None);
        let stranger = Registrant { key: 7, ..of(THEM, 0, false) };
        let registrants = vec![of(US, 9, false), stranger, of(THEM, 3, true)];
        let report = ReservationReport { generation: 0, kind: None, registrants };
        assert_eq!(latest(&report, &US), Some(Epoch(3)));
    }
}
