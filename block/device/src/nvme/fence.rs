//! Owners of a namespace, as reservations: the key of a host says which epoch it owns the namespace in.
//!
//! The owner is registered and holds a reservation of the type Write Exclusive: others may read. A later owner preempts it, by which the
//! target ends what the earlier one has under way.
//!
//! What always holds:
//! - Nobody preempts an owner with a later epoch: the keys of all hosts are read before, and again after.
//! - A namespace without reservations is fenced on this side only, as a file is.

use super::namespace::NvmeNamespace;
use super::options::Network;
use super::paths::{Order, OrderError};
use super::verdict::Asked;
use crate::{BlockError, Device};
use levada_base::{Buf, BufMut, Epoch, IoVec, IoVecMut};
use levada_nvme::reservation::{
    Registrant, ReservationReport, ReservationRequest, ReservationType,
};
use levada_nvme::{Command, IoOpcode};

/// The upper bits of our keys: "LV".
const KEY: u64 = 0x4c56 << 48;
const EPOCH_BITS: u64 = (1 << 48) - 1;
/// The report of so many hosts.
const REPORT_BYTES: usize = 4096;
/// Others may come in between so often.
const TRIES: usize = 4;

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
    let asked =
        Asked { operation: "reservations", at: 0, bytes: 0, capacity_bytes, is_read: false };
    Order { command, from, change: None, asked }
}

async fn report<N: Network>(device: &NvmeNamespace<N>) -> Result<ReservationReport, OrderError> {
    const EXTENDED: u32 = 1;
    let command = Command::new(IoOpcode::ReservationReport as u8, 0, device.known().namespace)
        .with_dword(10, (REPORT_BYTES / 4 - 1) as u32)
        .with_dword(11, EXTENDED);
    let into = BufMut::for_overwrite(REPORT_BYTES).into_vec();
    let order = order(device, command, IoVec::new());
    let (_, page) = device.shared().carry_out(&order, into).await?;
    // More hosts than it has room for are more than there should be.
    let too_many = OrderError::Block(BlockError::Io { errno: libc::EOVERFLOW });
    ReservationReport::parse_extended(&page[0]).ok_or(too_many)
}

/// Whom a conflict was with.
pub(super) async fn conflict<N: Network>(device: &NvmeNamespace<N>) -> BlockError {
    let ours = device.shared().ours.get();
    let host = device.shared().options.host.id;
    let seen = match report(device).await {
        Ok(report) => latest(&report, &host).filter(|seen| *seen > ours),
        Err(_) => None,
    };
    // One who does not say is a later one all the same.
    BlockError::Fenced { ours, seen: seen.unwrap_or(ours.next()) }
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
    let seen = device.shared().ours.get();
    if epoch < seen {
        return Err(BlockError::Fenced { ours: epoch, seen });
    }
    let known = device.known();
    if !device.has_reservations() {
        device.shared().ours.set(epoch);
        return Ok(());
    }
    let host = device.shared().options.host.id;
    let block = |error| match error {
        OrderError::Block(error) => error,
        OrderError::Conflict => BlockError::Fenced { ours: epoch, seen: epoch.next() },
    };
    let mut conflicts = 0;
    // To register, to take over and to look again, with some to spare.
    for _ in 0..2 * TRIES {
        let report = report(device).await.map_err(block)?;
        if let Some(seen) = latest(&report, &host).filter(|seen| *seen > epoch) {
            return Err(BlockError::Fenced { ours: epoch, seen });
        }
        let Some(request) = next(&report, &host, key(epoch)) else {
            device.shared().ours.set(epoch);
            return Ok(());
        };
        let (opcode, dword, data) = request.to_command();
        let command = Command::new(opcode as u8, 0, known.namespace).with_dword(10, dword);
        let order = order(device, command, Buf::copy_of(&data).into_vec());
        match device.shared().carry_out(&order, IoVecMut::new()).await {
            Ok(_) => {}
            // Another one was faster, or this very request was carried out and its answer lost: the report says which.
            Err(OrderError::Conflict) if conflicts < TRIES => conflicts += 1,
            Err(error) => return Err(block(error)),
        }
    }
    Err(BlockError::Fenced { ours: epoch, seen: epoch.next() })
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
