//! A front end by hand, which says what a test wants and breaks what it wants: messages, and a driver of one split ring.

#![allow(dead_code)] // Each test uses a part.
#![allow(unsafe_code)] // Memory shared with a server.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Messages by number, as in QEMU's docs/interop/vhost-user.rst.
pub mod message {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}
use message::*;

pub const VERSION_1: u64 = 1 << 32;
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
pub const FLUSH: u64 = 1 << 9;
const NO_FD: u64 = 1 << 8;
const NEED_REPLY: u32 = 1 << 3;

pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const SECTOR: usize = 512;

/// Descriptors of the ring: three for each request.
const SIZE: u16 = 64;
pub const SLOTS: u16 = SIZE / 3;
const AVAILABLE_AT: usize = 0x1000;
const USED_AT: usize = 0x2000;
const HEADERS_AT: usize = 0x3000;
pub const DATA_AT: usize = 0x10000;
pub const SLOT_BYTES: usize = 0x1000;
pub const GUEST_BYTES: usize = DATA_AT + SLOTS as usize * SLOT_BYTES;
/// What the status is before the device writes it.
const UNWRITTEN: u8 = 0xee;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
const AGAIN_AFTER: Duration = Duration::from_millis(1);

/// An eventfd that does not block.
pub fn eventfd() -> OwnedFd {
    // SAFETY: no memory is involved; the kernel just made this descriptor.
    unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}

fn is_early(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

/// A connection to a back end.
pub struct FrontEnd(pub UnixStream);

impl FrontEnd {
    /// Connects as QEMU does with `reconnect`: the file of a socket is there a moment before its server listens.
    pub fn connect(socket: &Path) -> Self {
        let until = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(socket) {
                Err(error) if is_early(&error) && Instant::now() < until => sleep(AGAIN_AFTER),
                connected => break connected.expect("somebody listens"),
            }
        };
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        Self(stream)
    }

    /// Sends bytes as they are.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let mut room = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        Ok(sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
    }

    pub fn header(request: u32, flags: u32, bytes: usize) -> Vec<u8> {
        words(&[request, 1 | flags, bytes as u32])
    }

    pub fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let message = [Self::header(request, 0, payload.len()), payload.into()].concat();
        self.send_raw(&message, fds).expect("it is connected");
    }

    fn receive(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut header = [0; 12];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let mut into = [IoSliceMut::new(&mut header)];
        let received = recvmsg(&self.0, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes != 12 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                fds.extend(sent);
            }
        }
        let bytes = u32::from_ne_bytes(header[8..].try_into().expect("four bytes"));
        let mut payload = vec![0; bytes as usize];
        (&self.0).read_exact(&mut payload)?;
        Ok((payload, fds))
    }

    /// Sends what has an answer, and waits for that.
    pub fn ask(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Vec<u8> {
        self.send(request, payload, fds);
        self.receive().expect("an answer").0
    }

    pub fn ask_number(&self, request: u32) -> u64 {
        u64::from_ne_bytes(self.ask(request, &[], &[]).try_into().expect("a number"))
    }

    /// Sends a message, and says whether it was accepted.
    pub fn try_set(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let header = Self::header(request, NEED_REPLY, payload.len());
        self.send_raw(&[header, payload.into()].concat(), fds).expect("it is connected");
        let answer = self.receive().expect("an answer").0;
        u64::from_ne_bytes(answer.try_into().expect("a number")) == 0
    }

    pub fn set(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert!(self.try_set(request, payload, fds), "message {request} is refused");
    }

    /// Agrees on features, as QEMU does of a disk.
    pub fn greet(&self) {
        self.greet_with(FLUSH);
    }

    /// Agrees on these, beside those of every device.
    pub fn greet_with(&self, features: u64) {
        self.send(SET_OWNER, &[], &[]);
        let features = VERSION_1 | PROTOCOL_FEATURES | features;
        assert_eq!(self.ask_number(GET_FEATURES) & features, features);
        let protocol = self.ask_number(GET_PROTOCOL_FEATURES);
        self.send(SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
        self.set(SET_FEATURES, &features.to_ne_bytes(), &[]);
    }

    /// The capacity in bytes, from the configuration.
    pub fn capacity(&self) -> u64 {
        let payload = [words(&[0, 60, 0]), vec![0; 60]].concat();
        let answer = self.ask(GET_CONFIG, &payload, &[]);
        u64::from_le_bytes(answer[12..20].try_into().expect("eight bytes")) * SECTOR as u64
    }

    /// Asks for memory for requests in flight of one queue: what to give with it, and the memory.
    pub fn inflight(&self) -> (Vec<u8>, OwnedFd) {
        let wanted = [longs(&[0, 0]), vec![1, 0], SIZE.to_ne_bytes().into(), vec![0; 4]].concat();
        self.send(GET_INFLIGHT_FD, &wanted, &[]);
        let (payload, mut fds) = self.receive().expect("an answer");
        (payload, fds.pop().expect("a descriptor"))
    }

    /// True when the back end has gone.
    pub fn is_left(&self) -> bool {
        match self.receive() {
            Ok(_) => false,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

/// What a front end and its guest keep, whoever serves them.
pub struct Guest {
    pub memory: Shared,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    available: u16,
    used: u16,
    /// By slot.
    is_out: [bool; SLOTS as usize],
}

impl Guest {
    pub fn new() -> Self {
        let (memory, kick, call) = (Shared::new(GUEST_BYTES), eventfd(), eventfd());
        Self { memory, kick, call, available: 0, used: 0, is_out: [false; SLOTS as usize] }
    }

    fn user(&self) -> u64 {
        self.memory.address() as u64
    }

    /// One region: guest address, bytes, user address, offset.
    pub fn region(&self, at: usize, bytes: usize) -> Vec<u8> {
        longs(&[at as u64, bytes as u64, self.user() + at as u64, at as u64])
    }

    /// The memory as two regions in one table, as QEMU and user-mode Linux show it.
    pub fn show_table(&self, front_end: &FrontEnd) {
        let table =
            [words(&[2, 0]), self.region(0, DATA_AT), self.region(DATA_AT, GUEST_BYTES - DATA_AT)];
        let fds = [self.memory.file.as_fd(); 2];
        front_end.set(SET_MEM_TABLE, &table.concat(), &fds);
    }

    pub fn addresses(&self, descriptors: u64) -> Vec<u8> {
        let of = |at: usize| self.user() + at as u64;
        [words(&[0, 0]), longs(&[descriptors, of(USED_AT), of(AVAILABLE_AT), 0])].concat()
    }

    /// Says where the ring is, and starts it; `base` as an earlier back end said.
    pub fn start(&self, front_end: &FrontEnd, base: u32) {
        front_end.set(SET_VRING_NUM, &words(&[0, SIZE.into()]), &[]);
        front_end.set(SET_VRING_ADDR, &self.addresses(self.user()), &[]);
        front_end.set(SET_VRING_BASE, &words(&[0, base]), &[]);
        front_end.set(SET_VRING_CALL, &longs(&[0]), &[self.call.as_fd()]);
        front_end.set(SET_VRING_KICK, &longs(&[0]), &[self.kick.as_fd()]);
        front_end.set(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
    }

    /// Starts the ring without an event to be kicked at.
    pub fn start_unkicked(&self, front_end: &FrontEnd) {
        front_end.set(SET_VRING_NUM, &words(&[0, SIZE.into()]), &[]);
        front_end.set(SET_VRING_ADDR, &self.addresses(self.user()), &[]);
        front_end.set(SET_VRING_CALL, &longs(&[0]), &[self.call.as_fd()]);
        front_end.set(SET_VRING_KICK, &longs(&[NO_FD]), &[]);
        front_end.set(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
    }

    /// Connects and sets everything up.
    pub fn connect(&self, socket: &Path) -> FrontEnd {
        let front_end = FrontEnd::connect(socket);
        front_end.greet();
        self.show_table(&front_end);
        self.start(&front_end, 0);
        front_end
    }

    /// Where the data of a slot lies, to the device.
    pub fn data_at(&self, slot: u16) -> u64 {
        (DATA_AT + slot as usize * SLOT_BYTES) as u64
    }

    pub fn data(&self, slot: u16) -> &mut [u8] {
        self.memory.slice(DATA_AT + slot as usize * SLOT_BYTES, SLOT_BYTES)
    }

    fn head(&self, slot: u16) -> &mut [u8] {
        self.memory.slice(HEADERS_AT + slot as usize * 32, 32)
    }

    fn index(&self, at: usize) -> &AtomicU16 {
        let field = self.memory.slice(at + 2, 2).as_mut_ptr().cast();
        // SAFETY: aligned, inside the memory, and shared with the device, which treats it as an atomic as well.
        unsafe { AtomicU16::from_ptr(field) }
    }

    pub fn set_descriptor(&self, number: u16, at: u64, bytes: u32, flags: u16, next: u16) {
        let into = self.memory.slice(16 * number as usize, 16);
        into[..8].copy_from_slice(&at.to_le_bytes());
        into[8..12].copy_from_slice(&bytes.to_le_bytes());
        into[12..14].copy_from_slice(&flags.to_le_bytes());
        into[14..].copy_from_slice(&next.to_le_bytes());
    }

    /// Makes a request for all bytes of its slot available, and kicks.
    pub fn offer(&mut self, slot: u16, kind: u32, sector: u64) {
        let data_at = DATA_AT + slot as usize * SLOT_BYTES;
        self.offer_at(slot, kind, sector, data_at as u64);
    }

    /// The same for data that lies elsewhere.
    pub fn offer_at(&mut self, slot: u16, kind: u32, sector: u64, data_at: u64) {
        let status_at = (HEADERS_AT + slot as usize * 32 + 16) as u64;
        self.offer_parts(slot, kind, sector, [data_at, status_at]);
    }

    /// The same with a status that lies elsewhere, too.
    pub fn offer_parts(
        &mut self,
        slot: u16,
        kind: u32,
        sector: u64,
        [data_at, status_at]: [u64; 2],
    ) {
        assert!(!std::mem::replace(&mut self.is_out[slot as usize], true), "slot {slot} is out");
        let head = self.head(slot);
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head[8..16].copy_from_slice(&sector.to_le_bytes());
        head[16] = UNWRITTEN;
        let (first, head_at) = (3 * slot, (HEADERS_AT + slot as usize * 32) as u64);
        let (next, write) = (1, 2);
        self.set_descriptor(first, head_at, 16, next, first + 1);
        let data_flags = next | if kind == READ { write } else { 0 };
        self.set_descriptor(first + 1, data_at, SLOT_BYTES as u32, data_flags, first + 2);
        self.set_descriptor(first + 2, status_at, 1, write, 0);
        self.make_available(first);
    }

    pub fn make_available(&mut self, first: u16) {
        let entry = AVAILABLE_AT + 4 + 2 * usize::from(self.available % SIZE);
        self.memory.slice(entry, 2).copy_from_slice(&first.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.set_available(self.available);
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("room");
    }

    /// The index of the available ring.
    pub fn set_available(&self, index: u16) {
        self.index(AVAILABLE_AT).store(index, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Chains that were used since the last look: slot and status. A slot that was not out is answered twice.
    pub fn answers(&mut self) -> Vec<(u16, u8)> {
        let mut all = Vec::new();
        while self.index(USED_AT).load(Ordering::Acquire) != self.used {
            let entry = USED_AT + 4 + 8 * usize::from(self.used % SIZE);
            let first = self.memory.slice(entry, 4);
            let first = u32::from_le_bytes(first.try_into().expect("four bytes"));
            let slot = first as u16 / 3;
            self.used = self.used.wrapping_add(1);
            assert!(std::mem::take(&mut self.is_out[slot as usize]), "slot {slot} answered twice");
            all.push((slot, self.head(slot)[16]));
        }
        all
    }

    /// Slots whose requests have no answer yet.
    pub fn out(&self) -> Vec<u16> {
        (0..SLOTS).filter(|slot| self.is_out[*slot as usize]).collect()
    }

    /// Waits for the call and so many answers.
    pub fn wait(&mut self, count: usize) -> Vec<(u16, u8)> {
        let begun = Instant::now();
        let mut all = Vec::new();
        loop {
            all.extend(self.answers());
            if all.len() >= count {
                return all;
            }
            assert!(begun.elapsed() < PATIENCE, "{} of {count} answers", all.len());
            self.wait_for_call(Duration::from_secs(1));
        }
    }

    pub fn wait_for_call(&self, limit: Duration) -> bool {
        let fd = self.call.as_raw_fd();
        let mut ready = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one such structure, which lives through the call.
        let is_ready = unsafe { libc::poll(&raw mut ready, 1, limit.as_millis() as i32) } == 1;
        if is_ready {
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        is_ready
    }

    /// Writes and reads back through every slot; panics when that is not what it finds.
    pub fn exercise(&mut self, seed: u8) {
        let sectors = (SLOT_BYTES / SECTOR) as u64;
        let mark = |slot: u16| seed.wrapping_add(slot as u8);
        for slot in 0..SLOTS {
            self.data(slot).fill(mark(slot));
            self.offer(slot, WRITE, sectors * u64::from(slot));
        }
        let mut answers = self.wait(SLOTS.into());
        answers.sort_unstable();
        assert_eq!(answers, (0..SLOTS).map(|slot| (slot, 0)).collect::<Vec<_>>());
        for slot in 0..SLOTS {
            self.data(slot).fill(0);
            self.offer(slot, READ, sectors * u64::from(slot));
        }
        self.wait(SLOTS.into());
        for slot in 0..SLOTS {
            assert!(self.data(slot).iter().all(|byte| *byte == mark(slot)), "slot {slot}");
        }
    }
}

/// That a server serves a client that behaves.
pub fn check_served(socket: &Path) {
    let mut guest = Guest::new();
    let _front_end = guest.connect(socket);
    guest.exercise(3);
}

/// Memory behind a file, as a guest's.
pub struct Shared {
    pub file: OwnedFd,
    start: *mut u8,
    bytes: usize,
}

impl Shared {
    pub fn new(bytes: usize) -> Self {
        let file = memfd_create(c"guest", MemfdFlags::CLOEXEC).expect("memory");
        ftruncate(&file, bytes as u64).expect("room");
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping, away from every other.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { file, start: start.cast(), bytes }
    }

    pub fn address(&self) -> usize {
        self.start as usize
    }

    /// Some of it. The server may be writing there: whoever looks knows that it does not.
    #[allow(clippy::mut_from_ref)]
    pub fn slice(&self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(at + bytes <= self.bytes);
        // SAFETY: inside the mapping; tests keep slices apart and look when the server is done.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), bytes) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}
