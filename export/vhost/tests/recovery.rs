//! What a front end keeps over the end of a back end, and what it is told while one runs.
#![allow(unsafe_code)] // Part of the tests' memory.

mod common;

use common::front_end::{FrontEnd, Guest, READ, SLOT_BYTES, SLOTS, WRITE, message::*, words};
use common::{Served, Told, volume};
use levada_base::IoVec;
use levada_base::reactor;
use levada_device::Durability;
use levada_raid::RaidArray;
use levada_volume::{ArrayVolume, Extent, Shape, Volume, VolumeFuture, Zeroing};
use std::cell::Cell;
use std::future::pending;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Carries out the first so many writes and every third later one, after a while; for the others it takes for ever. Its size is
/// what somebody else says.
struct Stubborn {
    below: Rc<ArrayVolume<RaidArray>>,
    prompt: u64,
    after: Duration,
    writes: Cell<u64>,
    size_bytes: Arc<AtomicU64>,
}

impl Volume for Stubborn {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed).min(self.below.size_bytes())
    }
    fn shape(&self) -> Shape {
        self.below.shape()
    }
    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        self.below.read(at, bytes)
    }
    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        let number = self.writes.replace(self.writes.get() + 1);
        if number >= self.prompt && !number.is_multiple_of(3) {
            return Box::pin(pending());
        }
        Box::pin(async move {
            reactor::sleep(self.after).await;
            self.below.write(at, from, durability).await
        })
    }
    fn flush(&self) -> VolumeFuture<'_, ()> {
        self.below.flush()
    }
    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        self.below.discard(at, bytes)
    }
    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        self.below.write_zeroes(at, bytes, zeroing)
    }
    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        self.below.extents(at, bytes)
    }
}

async fn stubborn(prompt: u64, size_bytes: Arc<AtomicU64>) -> Rc<Stubborn> {
    let (below, after) = (volume().await, Duration::ZERO);
    Rc::new(Stubborn { below, prompt, after, writes: Cell::new(0), size_bytes })
}

async fn slow(after: Duration) -> Rc<Stubborn> {
    let (below, prompt) = (volume().await, u64::MAX);
    let size_bytes = Arc::new(AtomicU64::new(below.size_bytes()));
    Rc::new(Stubborn { below, prompt, after, writes: Cell::new(0), size_bytes })
}

/// A back end ends with requests out, some of which are answered; the next one answers the others, once.
#[test]
fn requests_in_flight_are_carried_out_by_the_next_back_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("disk.sock");
    let unlimited = Arc::new(AtomicU64::new(u64::MAX));
    let first = Served::begin_at(&socket, move || stubborn(0, unlimited));
    let mut guest = Guest::new();
    let front_end = FrontEnd::connect(&socket);
    front_end.greet();
    let (place, inflight) = front_end.inflight();
    guest.show_table(&front_end);
    front_end.set(SET_INFLIGHT_FD, &place, &[inflight.as_fd()]);
    guest.start(&front_end, 0);
    let sector = |slot: u16| u64::from(slot) * (SLOT_BYTES as u64 / 512);
    for slot in 0..SLOTS {
        guest.data(slot).fill(slot as u8 + 1);
        guest.offer(slot, WRITE, sector(slot));
    }
    let mut answered = guest.wait(SLOTS.div_ceil(3).into());
    // Nothing more comes.
    std::thread::sleep(Duration::from_millis(50));
    answered.extend(guest.answers());
    assert_eq!(answered.len(), usize::from(SLOTS.div_ceil(3)));
    first.crash();

    let second = Served::begin_at(&socket, volume);
    let front_end = FrontEnd::connect(&socket);
    front_end.greet();
    guest.show_table(&front_end);
    front_end.set(SET_INFLIGHT_FD, &place, &[inflight.as_fd()]);
    // As QEMU does when a back end did not say where it stood: the index of the used ring.
    guest.start(&front_end, answered.len() as u32);
    let again = guest.wait(usize::from(SLOTS) - answered.len());
    assert!(again.iter().all(|(_, status)| *status == 0), "{again:?}");
    // It is a new volume: what is in it was written by this back end.
    for (slot, _) in &again {
        guest.data(*slot).fill(0);
        guest.offer(*slot, READ, sector(*slot));
    }
    guest.wait(again.len());
    for (slot, _) in again {
        assert!(guest.data(slot).iter().all(|byte| *byte == slot as u8 + 1), "slot {slot}");
    }
    guest.exercise(9);
    second.end();
}

/// In order: the ring stops, says where, and goes on elsewhere.
#[test]
fn a_ring_that_was_stopped_goes_on_where_it_stood() {
    let served = Served::begin(volume);
    let mut guest = Guest::new();
    let front_end = guest.connect(&served.socket);
    guest.exercise(1);
    let answer = front_end.ask(GET_VRING_BASE, &words(&[0, 0]), &[]);
    let base = u32::from_ne_bytes(answer[4..].try_into().expect("four bytes"));
    assert_eq!(base, 2 * u32::from(SLOTS));
    drop(front_end);
    let front_end = FrontEnd::connect(&served.socket);
    front_end.greet();
    guest.show_table(&front_end);
    guest.start(&front_end, base);
    guest.exercise(2);
    served.end();
}

#[test]
fn a_server_that_ends_answers_what_it_took() {
    let served = Served::begin(volume);
    let mut guest = Guest::new();
    let _front_end = guest.connect(&served.socket);
    guest.exercise(1);
    for slot in 0..SLOTS {
        guest.offer(slot, WRITE, 8 * u64::from(slot));
    }
    guest.wait(1);
    served.end();
    guest.answers();
}

/// What breaks its ring as it ends may be the last one out: nobody waits for more.
#[test]
fn a_request_that_cannot_be_answered_keeps_no_disk() {
    const OUTSIDE: u64 = 1 << 60;
    let served = Served::begin(|| slow(Duration::from_millis(300)));
    let mut guest = Guest::new();
    let front_end = guest.connect(&served.socket);
    guest.offer_parts(0, WRITE, 0, [OUTSIDE, OUTSIDE]);
    guest.offer_parts(1, WRITE, 0, [guest.data_at(1), OUTSIDE]);
    drop(front_end);
    let mut next = Guest::new();
    let _front_end = next.connect(&served.socket);
    next.offer(0, WRITE, 0);
    assert_eq!(next.wait(1), [(0, 0)], "the next guest has the disk");
    next.offer_parts(1, WRITE, 0, [next.data_at(1), OUTSIDE]);
    std::thread::sleep(Duration::from_millis(50));
    served.end();
}

#[test]
fn a_guest_hears_that_its_disk_has_grown() {
    let size = Arc::new(AtomicU64::new(1 << 20));
    let of_volume = Arc::clone(&size);
    let served = Served::begin(move || stubborn(u64::MAX, of_volume));
    let mut guest = Guest::new();
    let front_end = guest.connect(&served.socket);
    assert_eq!(front_end.capacity(), 1 << 20);
    let (channel, theirs) = std::os::unix::net::UnixStream::pair().expect("a channel");
    front_end.set(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    let past_end = (1 << 20) / 512;
    guest.offer(0, WRITE, past_end);
    assert_eq!(guest.wait(1), [(0, 1)], "outside as yet");
    size.store(2 << 20, Ordering::Relaxed);
    served.tell(Told::Resized);
    channel.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
    let mut header = [0; 12];
    std::io::Read::read_exact(&mut &channel, &mut header).expect("it is told");
    assert_eq!(header.to_vec(), words(&[2, 1, 0]), "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG");
    assert_eq!(front_end.capacity(), 2 << 20);
    guest.offer(0, WRITE, past_end);
    assert_eq!(guest.wait(1), [(0, 0)]);
    served.end();
}

/// A client that wants its ring to be polled is served, also when everything else sleeps.
#[test]
fn a_ring_without_kicks_is_polled() {
    let served = Served::begin(volume);
    let mut guest = Guest::new();
    let front_end = FrontEnd::connect(&served.socket);
    front_end.greet();
    guest.show_table(&front_end);
    guest.start_unkicked(&front_end);
    for round in 0..3 {
        std::thread::sleep(Duration::from_millis(100));
        guest.exercise(round);
    }
    served.end();
}

/// A queue that was busy and is idle is served again when it is kicked, and costs nothing meanwhile.
#[test]
fn idle_queues_wake() {
    let served = Served::begin(volume);
    let mut guest = Guest::new();
    let _front_end = guest.connect(&served.socket);
    for round in 0..5 {
        guest.exercise(round);
        std::thread::sleep(Duration::from_millis(150));
    }
    while guest.wait_for_call(Duration::ZERO) {}
    let begun = Instant::now();
    guest.offer(0, READ, 0);
    assert!(guest.wait_for_call(Duration::from_secs(5)), "no call");
    assert!(begun.elapsed() < Duration::from_secs(1));
    served.end();
}

elsewhere!(
    requests_in_flight_are_carried_out_by_the_next_back_end,
    a_ring_that_was_stopped_goes_on_where_it_stood,
    a_server_that_ends_answers_what_it_took,
    a_request_that_cannot_be_answered_keeps_no_disk,
    a_guest_hears_that_its_disk_has_grown,
    a_ring_without_kicks_is_polled,
    idle_queues_wake
);
