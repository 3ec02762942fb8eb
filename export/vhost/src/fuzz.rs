//! Entry points for the fuzzer: everything that reads bytes of a client, on the socket and in its memory.

use crate::device::Device;
use crate::disk::PROTOCOL;
use crate::inflight::Inflight;
use crate::memory::{Mapping, Memory, Place, sealed};
use crate::message::{HEADER_BYTES, Header, PAYLOAD_BYTES_MAX, Request};
use crate::ring::{Addresses, Ring, Shape, Used};
use crate::served::Features;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

const BYTES: u64 = 1 << 14;
const USER: u64 = 0x7000_0000;
const INFLIGHT_BYTES: u64 = 1 << 12;
const POPS_MAX: usize = 4096;

/// Reads messages until the bytes are used up, as a session does, and lets a device follow those that come without
/// descriptors.
pub fn messages(bytes: &[u8]) {
    let mut device = Device::new(Features(u64::MAX), PROTOCOL, 4);
    let mut rest = bytes;
    while let Some((header, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::parse(header) else { return };
        assert!(header.payload_bytes <= PAYLOAD_BYTES_MAX);
        let Some((payload, behind)) = behind.split_at_checked(header.payload_bytes) else { return };
        rest = behind;
        let Ok(request) = Request::parse(header.request, payload) else { return };
        let (fewest, most) = request.descriptors();
        assert!(fewest <= most);
        if fewest == 0 && device.handle(request, Vec::new()).is_ok() {
            for number in 0..device.rings.len() {
                if let Ok(Some(shape)) = device.shape(number) {
                    let base = device.rings[number].base;
                    assert!(Ring::new(&device.memory, &shape, base, None).is_err(), "no memory");
                }
            }
        }
    }
}

/// Takes chains from a ring in memory that the bytes fill, and gives back what was taken. The first bytes say what kind of
/// ring it is and whether there is memory in flight, which the bytes fill as well.
pub fn chains(bytes: &[u8]) {
    let Some((&[kind, size, base, inflight], fill)) = bytes.split_first_chunk::<4>() else {
        return;
    };
    let file = sealed(BYTES).expect("memory");
    let place = Place { guest: 0, bytes: BYTES, user: USER, offset: 0 };
    let memory = Memory::default().with(place, file.into()).expect("mapped");
    let (in_ring, in_flight) = fill.split_at(fill.len().min(BYTES as usize));
    memory.write(0, in_ring).expect("it fits");
    let addresses = Addresses { descriptors: USER, driver: USER + 0x1000, device: USER + 0x2000 };
    let (is_packed, has_event_index) = (kind & 1 != 0, kind & 2 != 0);
    let size = if is_packed { u16::from(size) } else { 1 << (size % 8) };
    let shape = Shape { size, addresses, is_packed, has_event_index };
    let inflight = (inflight & 1 != 0).then(|| {
        let file = sealed(INFLIGHT_BYTES).expect("memory");
        let mapping = Mapping::of(file.as_fd(), 0, INFLIGHT_BYTES).expect("mapped");
        for (at, byte) in in_flight.iter().take(INFLIGHT_BYTES as usize / 2).enumerate() {
            mapping.window().store_u16(2 * at, (*byte).into(), Ordering::Relaxed);
        }
        Inflight(mapping.window())
    });
    let base = u32::from(base) | u32::from(kind & 4) << 13;
    let Ok(mut ring) = Ring::new(&memory, &shape, base, inflight) else { return };
    let mut out = Vec::new();
    for number in 0..POPS_MAX {
        ring.want_kicks(number % 2 == 0);
        match ring.pop(&memory) {
            Ok(Some(chain)) => out.push(Used { token: chain.token, bytes: 1 }),
            Ok(None) | Err(_) => break,
        }
        if number % 3 == 2 {
            ring.push(&out);
            out.clear();
        }
        assert!(out.len() <= size.into(), "more is out than the ring holds");
    }
    ring.push(&out);
    ring.base();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Noise, but with what makes it messages.
    fn noise() -> impl Strategy<Value = Vec<u8>> {
        let message = (0u8..40, prop::collection::vec(0u8..9, 0..64));
        prop::collection::vec(message, 0..8).prop_map(|messages| {
            let one = |(request, payload): (u8, Vec<u8>)| {
                [&[request, 0, 0, 0, 1, 0, 0, 0, payload.len() as u8, 0, 0, 0], &payload[..]]
                    .concat()
            };
            messages.into_iter().flat_map(one).collect()
        })
    }

    /// A ring of small descriptors, with flags and indices that often mean something.
    fn filled() -> impl Strategy<Value = Vec<u8>> {
        let descriptor = (0u8..64, any::<u8>(), 0u8..16, 0u8..16, any::<u8>()).prop_map(
            |(at, bytes, third, fourth, high)| {
                let fourth_high = high & 0x80;
                [
                    at,
                    at,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    bytes,
                    0,
                    0,
                    0,
                    third,
                    0,
                    fourth | high & 0x80,
                    fourth_high,
                ]
            },
        );
        let parts = (
            (any::<u8>(), 0u8..20, 0u8..20, 0u8..2),
            prop::collection::vec(descriptor, 256),
            prop::collection::vec(0u8..20, 64),
            prop::collection::vec(0u8..20, 600),
        );
        parts.prop_map(|(head, descriptors, available, notes)| {
            let (kind, size, base, inflight) = head;
            let mut bytes = vec![kind, size, base, inflight];
            bytes.extend(descriptors.into_iter().flatten());
            for number in available {
                bytes.extend([number, 0]);
            }
            bytes.resize(4 + BYTES as usize, 0);
            bytes.extend(notes);
            bytes
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_messages_are_followed_or_refused(bytes in noise()) {
            messages(&bytes);
        }

        #[test]
        fn any_rings_are_served_or_broken_off(bytes in filled()) {
            chains(&bytes);
        }
    }
}
