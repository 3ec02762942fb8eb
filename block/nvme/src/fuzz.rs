//! Entry points for the fuzzer, and for tests with random bytes.

use crate::authentication::{MESSAGE_BYTES_MAX, Message, Names, Prover, Secret, Secrets, Verifier};
use crate::fabrics::{CONNECT_BYTES, Connect, ConnectData, PropertyAccess};
use crate::identify::{
    ControllerIdentity, IDENTIFY_BYTES, NamespaceIdentity, listed_namespaces,
    parse_namespace_descriptors,
};
use crate::keyring::parse_keyring;
use crate::pdu::{COMMON_BYTES, Common, Digests, Framing, HEAD_BYTES_MAX, Pdu};
use crate::reservation::{KEY_BYTES, KEYS_BYTES, ReservationReport, ReservationRequest};
use crate::tls::{PskIdentity, TlsKey};
use crate::{Command, ErrorEntry, KeptReservations, Nqn, ReservationNotification, log};

/// Units, one after the other, as either side receives them; what is understood is built again, and read as the same.
pub fn pdus(mut bytes: &[u8]) {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let digests = Digests { header: first & 1 != 0, data: first & 2 != 0 };
    bytes = rest;
    while let Some((common, rest)) = bytes.split_first_chunk::<COMMON_BYTES>() {
        let Ok(common) = Common::parse(common) else { return };
        let Some((header, rest)) = rest.split_at_checked(common.rest_bytes(digests)) else {
            return;
        };
        let Ok((padding, data)) = common.data_bytes(digests) else { return };
        if let Ok(pdu) = common.pdu(header, Digests { header: false, ..digests }) {
            again(&pdu, data);
        }
        let Some(rest) = padding.checked_add(data).and_then(|behind| rest.get(behind..)) else {
            return;
        };
        bytes = rest;
    }
}

fn again(pdu: &Pdu, data_bytes: usize) {
    let digests = Digests { header: true, data: true };
    let framing = Framing { digests, ..Framing::FIRST };
    // With digests it is longer, and as a whole less than 4 GiB all the same.
    let most = u32::MAX as usize - 2 * HEAD_BYTES_MAX;
    let data_bytes = if matches!(pdu, Pdu::Terminates(_)) { 0 } else { data_bytes.min(most) };
    let head = framing.head(pdu, data_bytes);
    let common = Common::parse(head[..COMMON_BYTES].try_into().expect("so many"));
    let common = common.expect("what was built is understood");
    let rest = &head[COMMON_BYTES..][..common.rest_bytes(digests)];
    assert_eq!(common.pdu(rest, digests).as_ref(), Ok(pdu), "read as it was built");
    let (padding, data) = common.data_bytes(digests).expect("what was built is understood");
    assert_eq!((COMMON_BYTES + rest.len() + padding, data), (head.len(), data_bytes));
}

/// A command and its data, as everything that they may be.
pub fn commands(bytes: &[u8]) {
    let Some((command, data)) = bytes.split_first_chunk() else { return };
    let command = Command::parse(command);
    let _ = (command.data(), command.blocks(), command.is_fua(), Connect::of(&command));
    let _ = (PropertyAccess::of(&command), log::GetLogPage::of(&command));
    assert!(crate::ranges(data).count() <= data.len() / 16);
    if let Some(keys) = data.first_chunk::<KEYS_BYTES>() {
        let _ = ReservationRequest::register(&command, keys);
        let _ = ReservationRequest::acquire(&command, keys);
    }
    if let Some(key) = data.first_chunk::<KEY_BYTES>() {
        let _ = ReservationRequest::release(&command, key);
    }
    if let Some(connect) = data.first_chunk::<CONNECT_BYTES>()
        && let Ok(connect) = ConnectData::parse(connect)
    {
        assert_eq!(ConnectData::parse(&connect.to_bytes()).as_ref(), Ok(&connect));
    }
}

/// What a controller answers, as everything that it may be.
pub fn answers(bytes: &[u8]) {
    if let Some(page) = bytes.first_chunk::<IDENTIFY_BYTES>() {
        let _ = ControllerIdentity::parse(page);
        let _ = NamespaceIdentity::parse(page);
        let names = parse_namespace_descriptors(page).map(|(_, name)| 4 + name.len());
        assert!(names.sum::<usize>() <= IDENTIFY_BYTES);
        assert!(listed_namespaces(page).count() <= IDENTIFY_BYTES / 4);
    }
    if let Some(page) = bytes.first_chunk() {
        let _ = log::Health::parse(page);
    }
    if let Some(entry) = bytes.first_chunk()
        && let Some(told) = ErrorEntry::parse(entry)
    {
        assert_eq!(ErrorEntry::parse(&told.to_bytes()), Some(told));
    }
    if let Some(page) = bytes.first_chunk()
        && let Some(told) = ReservationNotification::parse(page)
    {
        let again = told.to_bytes();
        assert_eq!(
            ReservationNotification::parse(again[..].try_into().expect("whole")),
            Some(told)
        );
    }
    if let Some(groups) = log::parse_ana(bytes) {
        assert_eq!(log::parse_ana(&log::ana(0, &groups, false)), Some(groups));
    }
    let entries: Vec<_> = log::parse_discovery_entries(bytes).collect();
    if let Some(report) = ReservationReport::parse_extended(bytes) {
        assert_eq!(ReservationReport::parse_extended(&report.to_bytes()), Some(report));
    }
    let page = log::discovery(0, &entries);
    let again: Vec<_> =
        log::parse_discovery_entries(&page[log::DISCOVERY_HEADER_BYTES..]).collect();
    assert_eq!(entries, again);
}

/// What a target has kept of reservations, as it is and with a right beginning: what is understood has this form alone.
pub fn kept_reservations(bytes: &[u8]) {
    let mut sealed = vec![0; bytes.len().max(32)];
    sealed[..bytes.len()].copy_from_slice(bytes);
    KeptReservations::seal(&mut sealed);
    for bytes in [bytes, &sealed] {
        if let Ok(kept) = KeptReservations::parse(bytes) {
            assert_eq!(kept.to_bytes(), bytes);
        }
    }
}

/// Messages to either side of an authentication, each behind its length, with the honest ones between where the first byte says so: nobody
/// is let in who does not know the secret.
pub fn authentication(bytes: &[u8]) {
    let _ = std::str::from_utf8(bytes).map(parse_keyring);
    let Some((&first, mut bytes)) = bytes.split_first() else { return };
    let mut next = first;
    let mut random = |into: &mut [u8]| {
        for byte in into {
            next = next.wrapping_mul(5).wrapping_add(17);
            *byte = next;
        }
    };
    let nqn = |name: &str| Nqn::new(format!("nqn.2014-08.org.example:{name}")).expect("a name");
    let names = Names { host: nqn("host"), subsystem: nqn("subsystem") };
    let secrets = Secrets {
        host: Secret::random(None, &mut |key| key.fill(1)),
        controller: Some(Secret::random(None, &mut |key| key.fill(2))),
    };
    let mut verifier = Verifier::new(names.clone(), secrets.clone());
    let mut prover = Prover::new(names, secrets, u16::from(first));
    if first & 1 != 0 {
        verifier.receive(&prover.negotiate());
    }
    while let Some((&length, rest)) = bytes.split_first() {
        let (message, rest) = rest.split_at(usize::from(length).min(rest.len()));
        bytes = rest;
        if let Ok(understood) = Message::parse(message) {
            assert_eq!(Message::parse(&understood.to_bytes()).as_ref(), Ok(&understood));
        }
        let _ = prover.reply(message, &mut random);
        let _ = prover.confirm(message);
        verifier.receive(message);
        assert!(!verifier.is_authenticated(), "it was guessed");
        assert!(verifier.send(&mut random).len() <= MESSAGE_BYTES_MAX);
    }
}

/// A key of TLS as people write it, and what a host names one by; what is understood is written as it was read.
pub fn tls_keys(bytes: &[u8]) {
    if let Some(identity) = PskIdentity::parse(bytes) {
        assert_eq!(PskIdentity::parse(identity.to_string().as_bytes()), Some(identity));
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = parse_keyring(text);
    if let Ok(key) = text.parse::<TlsKey>() {
        assert_eq!(key.reveal(), text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn random_bytes_are_no_danger(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
            pdus(&bytes);
            commands(&bytes);
            answers(&bytes);
            kept_reservations(&bytes);
        }

        #[test]
        fn random_messages_let_nobody_in(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            authentication(&bytes);
        }

        #[test]
        fn units_with_a_sound_start_are_understood(
            kind in 0_u8..10,
            flags in any::<u8>(),
            data_offset in any::<u8>(),
            bytes in 0_u32..300,
            digests in 0_u8..4,
            rest in prop::collection::vec(any::<u8>(), 140..400),
        ) {
            const HEADER_BYTES: [u8; 10] = [128, 128, 24, 24, 72, 24, 24, 24, 0, 24];
            let mut unit = vec![digests, kind, flags, HEADER_BYTES[usize::from(kind)], data_offset];
            unit.extend(bytes.to_le_bytes());
            unit.extend(rest);
            pdus(&unit);
        }
    }
}
