//! Entry points for the fuzzer: everything that reads bytes of a client, on the socket and in its memory.

use crate::cursor::{long, word};
use crate::device::Device;
use crate::disk::{PROTOCOL, SECTOR_BYTES};
use crate::fs::{FileSystem, Guest, TAG_BYTES};
use crate::inflight::Inflight;
use crate::memory::{Mapping, Memory, Place, sealed};
use crate::message::{HEADER_BYTES, Header, PAYLOAD_BYTES_MAX, Request};
use crate::request::{Agreed, Client, SERIAL_BYTES};
use crate::ring::{Addresses, Chain, Ring, Shape as RingShape, Span, Token, Used};
use crate::served::{Features, Served, Source};
use levada_base::reactor::{self, Reactor};
use levada_base::sync::{Semaphore, oneshot};
use levada_base::{Buf, IoVec};
use levada_device::Durability;
use levada_fuse::codec::Limits;
use levada_fuse::{Errno, Handler, Operation, Reply, Request as FuseRequest, Session};
use levada_volume::{Extent, Shape, Volume, VolumeError, VolumeFuture, Zeroing};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::ready;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_bindings::virtio_blk as blk;

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
    let shape = RingShape { size, addresses, is_packed, has_event_index };
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

/// Answers of every shape, and locks that nobody frees.
#[derive(Default)]
struct Answers(RefCell<BTreeMap<u64, oneshot::Sender<()>>>);

impl Handler for Answers {
    async fn handle(&self, request: FuseRequest<'_>, message: &Buf) -> Reply {
        assert_eq!(request.caller.pid, 0, "a process of the guest is none of ours");
        match request.operation {
            Operation::SetLkW(_) => {
                let (sender, interrupted) = oneshot::channel();
                let before = self.0.borrow_mut().insert(request.unique, sender);
                assert!(before.is_none(), "two requests have one number");
                let _ = interrupted.await;
                Errno::INTR.into()
            }
            Operation::Interrupt { unique } => {
                if let Some(waiting) = self.0.borrow_mut().remove(&unique) {
                    waiting.send(());
                }
                Reply::Silent
            }
            Operation::Forget { .. } | Operation::BatchForget(_) => Reply::Silent,
            Operation::Read(args) => {
                let half = Buf::copy_of(&vec![7; args.size.min(9000) as usize / 2]);
                Reply::Data([half.clone(), half].into_iter().collect())
            }
            Operation::ReadLink => Reply::Bytes(vec![7; 300]),
            Operation::Write(args) => {
                Reply::Written(levada_fuse::handler::write_data(message, &args).len() as u32)
            }
            Operation::Destroy | Operation::Release(_) => Reply::Done,
            _ => Errno::NOSYS.into(),
        }
    }
}

struct Answering;

impl FileSystem for Answering {
    type Handler = Answers;

    async fn begin(&self) -> Option<Rc<Session<Answers>>> {
        Some(Rc::new(Session::new(Answers::default(), Limits::default())))
    }

    async fn end(&self, session: Rc<Session<Answers>>) {
        assert!(session.handler().0.borrow().is_empty(), "somebody waits still");
    }
}

/// Lets a guest of a file system ask, in chains of any shape. Each request begins with how its message is cut, where its parts
/// lie, how much room its answer has, and how long the message is.
pub fn fs_requests(bytes: &[u8]) {
    Reactor::simulated(1).block_on(async {
        let file = sealed(BYTES).expect("memory");
        let place = Place { guest: 0, bytes: BYTES, user: USER, offset: 0 };
        let memory = Arc::new(Memory::default().with(place, file.into()).expect("mapped"));
        let guest = Rc::new(Guest::new(Rc::new(Answering), [0; TAG_BYTES], 0));
        let source = Source { queue: 1, size: 16 };
        let mut rest = bytes;
        while let Some((&[cut, at, room, length], behind)) = rest.split_first_chunk::<4>() {
            let (message, behind) = behind.split_at(behind.len().min(length.into()));
            rest = behind;
            // Wherever it lies, it may lie partly outside.
            let at = u64::from(at) * 65;
            let inside = message.len().min((BYTES - at.min(BYTES)) as usize);
            memory.write(at, &message[..inside]).expect("it fits");
            let mut readable: Vec<Span> = Vec::new();
            for (number, part) in message.chunks(usize::from(cut).max(8)).enumerate() {
                let before = number * usize::from(cut).max(8);
                readable.push(Span { at: at + before as u64, bytes: part.len() as u32 });
            }
            let room = u32::from(room) * 50;
            let parts = [
                Span { at: BYTES / 2, bytes: room / 3 },
                Span { at: BYTES / 2 + u64::from(room), bytes: room },
            ];
            let chain = Chain {
                token: Token::of_none(),
                readable: readable.into_iter().collect(),
                writable: parts.into_iter().collect(),
            };
            let request = Rc::clone(&guest).serve(source, Arc::clone(&memory), chain);
            reactor::spawn(async move {
                let used = request.await.expect("the memory is there");
                assert!(used.bytes <= room / 3 + room, "more than there is room for");
            });
            reactor::yield_now().await;
        }
        guest.stop_waiting(1);
        guest.left().await;
    });
}

/// Of the disk that is asked by [`disk_requests`].
const DISK_BYTES: u64 = 1 << 14;

/// A disk that believes nobody who asks beyond its end.
struct Disk(RefCell<Vec<u8>>);

impl Disk {
    fn range(&self, at: u64, bytes: u64) -> std::ops::Range<usize> {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= DISK_BYTES), "{bytes} at {at}");
        at as usize..(at + bytes) as usize
    }

    fn change(&self, at: u64, bytes: u64, by: impl FnOnce(&mut [u8])) -> VolumeFuture<'_, ()> {
        by(&mut self.0.borrow_mut()[self.range(at, bytes)]);
        Box::pin(ready(Ok(())))
    }
}

impl Volume for Disk {
    fn size_bytes(&self) -> u64 {
        DISK_BYTES
    }

    fn shape(&self) -> Shape {
        Shape { block_bytes: 4096, io_bytes_best: 4096, discard_bytes: 4096, is_read_only: false }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        let data = Buf::copy_of(&self.0.borrow()[self.range(at, bytes)]);
        Box::pin(ready(Ok(data.into_vec())))
    }

    fn write(&self, at: u64, from: IoVec, _durability: Durability) -> VolumeFuture<'_, ()> {
        let data: Vec<u8> = from.iter().flat_map(|part| part.to_vec()).collect();
        self.change(at, data.len() as u64, |place| place.copy_from_slice(&data))
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        self.change(at, bytes, |_| ())
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        self.change(at, bytes, |place| place.fill(0))
    }

    fn extents(&self, _at: u64, _bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(ready(Err(VolumeError::NoSpace)))
    }
}

/// Lets a guest of a disk ask, in chains of any shape. Each request begins with how it is cut, where its parts lie, how much room its answer has, and how
/// long header and data are, in words. It writes where it may, and nowhere else.
pub fn disk_requests(bytes: &[u8]) {
    Reactor::simulated(1).block_on(async {
        let file = sealed(BYTES).expect("memory");
        let place = Place { guest: 0, bytes: BYTES, user: USER, offset: 0 };
        let memory = Arc::new(Memory::default().with(place, file.into()).expect("mapped"));
        let features = Agreed::default();
        features.set(Features(u64::MAX));
        let client = Rc::new(Client {
            volume: Rc::new(Disk(RefCell::new(vec![7; DISK_BYTES as usize]))),
            serial: [9; SERIAL_BYTES],
            features,
            room: Semaphore::new(BYTES),
            elsewhere: None,
        });
        let source = Source { queue: 0, size: 16 };
        let all = || {
            let mut all = vec![0; BYTES as usize];
            memory.read(0, &mut all).expect("it is there");
            all
        };
        let mut rest = bytes;
        while let Some((&[cut, at, room, length], behind)) = rest.split_first_chunk::<4>() {
            let (message, behind) = behind.split_at(behind.len().min(4 * usize::from(length)));
            rest = behind;
            // Wherever it lies, it may lie partly outside.
            let at = u64::from(at) * 65;
            let inside = message.len().min((BYTES - at.min(BYTES)) as usize);
            memory.write(at, &message[..inside]).expect("it fits");
            let cut = usize::from(cut).max(8);
            let part = |(number, part): (usize, &[u8])| Span {
                at: at + (number * cut) as u64,
                bytes: part.len() as u32,
            };
            let readable = message.chunks(cut).enumerate().map(part).collect();
            // Often whole sectors, with a status behind, and sometimes partly outside.
            let data = u32::from(room >> 3) * 128;
            let second_at = if room & 2 == 0 { BYTES / 2 + 4096 } else { BYTES - 100 };
            let writable = [
                Span { at: BYTES / 2, bytes: data / 3 },
                Span { at: second_at, bytes: data - data / 3 },
                Span { at: BYTES / 2 - 1, bytes: u32::from(room & 1) },
            ];
            let token = Token::of_none();
            let chain = Chain { token, readable, writable: writable.into_iter().collect() };
            // What no status is.
            let last = writable.iter().rev().find(|span| span.bytes > 0);
            let status_at = last.map_or(0, |span| span.at + u64::from(span.bytes) - 1);
            let _outside = memory.write(status_at, &[0xee]);
            let before = all();
            let used = Rc::clone(&client).serve(source, Arc::clone(&memory), chain).await;
            let may_change = |at: u64| {
                writable.iter().any(|span| (span.at..span.at + u64::from(span.bytes)).contains(&at))
            };
            let after = all();
            for (at, (before, after)) in (0..).zip(before.iter().zip(&after)) {
                assert!(before == after || may_change(at), "a byte at {at} was written");
            }
            let room: u32 = writable.iter().map(|span| span.bytes).sum();
            let Ok(used) = used else { continue };
            assert!(used.bytes <= room, "{} of {room}", used.bytes);
            let status = after[status_at as usize];
            assert!(status <= 2, "no status");
            if status == 0 && word(message, 0) == blk::VIRTIO_BLK_T_IN {
                let span = |span: &Span| after[span.at as usize..][..span.bytes as usize].to_vec();
                let told: Vec<u8> =
                    writable.iter().flat_map(span).take(room as usize - 1).collect();
                let at = (long(message, 8) * SECTOR_BYTES) as usize;
                assert!(told == client.volume.0.borrow()[at..at + told.len()], "other data");
            }
        }
    });
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

    /// Messages with a header that is mostly right, behind one INIT.
    fn asked() -> impl Strategy<Value = Vec<u8>> {
        let message = (0u8..56, 0u8..3, any::<[u8; 3]>(), prop::collection::vec(0u8..9, 0..100));
        let one = |(opcode, unique, head, arguments): (u8, u8, [u8; 3], Vec<u8>)| {
            let length = 40 + arguments.len() as u8;
            let mut message = vec![head[0], head[1], head[2], length, length, 0, 0, 0, opcode];
            message.resize(44, 0);
            message[12] = unique;
            message.extend(arguments);
            message
        };
        prop::collection::vec(message, 0..12).prop_map(move |messages| {
            let mut init = [&7u32.to_ne_bytes()[..], &40u32.to_ne_bytes(), &[0xff; 12]].concat();
            init.resize(64, 0);
            let init = one((26, 0, [64, 0, 40], init));
            init.into_iter().chain(messages.into_iter().flat_map(one)).collect()
        })
    }

    /// Requests of kinds that are known, of places that are often there.
    fn of_disk() -> impl Strategy<Value = Vec<u8>> {
        let kind = prop::sample::select(vec![0u8, 1, 4, 8, 11, 13, 99]);
        let lengths = prop::sample::select(vec![0usize, 4, 16, 32, 508, 512, 900]);
        // How it is cut, where it lies, and room: of whole sectors and a status, mostly.
        let rooms = prop::sample::select(vec![1u8, 33, 65, 97, 225, 35, 0, 41]);
        let head = (any::<u8>(), 0u8..100, rooms).prop_map(|(cut, at, room)| [cut, at, room]);
        let request = (kind, 0u8..40, head, lengths);
        let one = |(kind, sector, head, length): (u8, u8, [u8; 3], usize)| {
            // Of what follows the ranges of a discard are made: sector, sectors, flags.
            let range = [sector, 0, 0, 0, 0, 0, 0, 0, head[0] % 8, 0, 0, 0, 0, 0, 0, 0];
            let data: Vec<u8> = range.iter().copied().cycle().take(length).collect();
            let header = [&[kind, 0, 0, 0, 0, 0, 0, 0, sector][..], &[0; 7]].concat();
            let length = ((header.len() + data.len()) / 4) as u8;
            [&[head[0], head[1], head[2], length][..], &header, &data].concat()
        };
        prop::collection::vec(request.prop_map(one), 0..12).prop_map(|all| all.concat())
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
        fn a_disk_is_asked_anything(bytes in of_disk()) {
            disk_requests(&bytes);
        }

        #[test]
        fn any_requests_are_answered_or_left(bytes in asked()) {
            fs_requests(&bytes);
        }

        #[test]
        fn any_rings_are_served_or_broken_off(bytes in filled()) {
            chains(&bytes);
        }
    }
}
