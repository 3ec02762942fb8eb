//! A guest of a file system by hand: a driver of the two split rings that virtio-fs has at least, and FUSE messages.

#![allow(dead_code)] // Each test uses a part.
#![allow(unsafe_code)] // Memory shared with a server.

use super::front_end::message::*;
use super::front_end::{FrontEnd, Shared, eventfd, longs, words};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// For FORGET and INTERRUPT; and for all others.
pub const HIPRIO: usize = 0;
pub const REQUESTS: usize = 1;
pub const QUEUES: usize = 2;
/// Descriptors of each ring.
pub const SIZE: u16 = 256;
pub const GUEST_BYTES: usize = 8 << 20;
/// Rings, each within so many bytes.
const RING_BYTES: usize = 0x10000;
const AVAILABLE_AT: usize = 0x4000;
const USED_AT: usize = 0x8000;
/// Where messages and answers may lie.
const DATA_AT: usize = QUEUES * RING_BYTES;
const PATIENCE: Duration = Duration::from_secs(20);

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Opcodes (`enum fuse_opcode`).
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const MKDIR: u32 = 9;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const INIT: u32 = 26;
    pub const READDIR: u32 = 28;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const FLUSH: u32 = 25;
}

struct Queue {
    kick: OwnedFd,
    call: OwnedFd,
    available: u16,
    used: u16,
    next_descriptor: u16,
}

pub struct FsGuest {
    pub memory: Shared,
    queues: Vec<Queue>,
    /// The next message goes there.
    next_data: usize,
    pub unique: u64,
    out: Vec<Out>,
}

/// A chain that is out.
struct Out {
    queue: usize,
    /// Its first descriptor.
    first: u16,
    /// Where its answer goes: places and bytes.
    places: Vec<(usize, usize)>,
}

/// An answer: the number, the error and what follows; `None` when nothing was written.
pub type Answer = Option<(u64, i32, Vec<u8>)>;

impl FsGuest {
    pub fn new() -> Self {
        let queue = |_| Queue {
            kick: eventfd(),
            call: eventfd(),
            available: 0,
            used: 0,
            next_descriptor: 0,
        };
        let queues = (0..QUEUES).map(queue).collect();
        let memory = Shared::new(GUEST_BYTES);
        Self { memory, queues, next_data: DATA_AT, unique: 0, out: Vec::new() }
    }

    /// Connects, and starts both rings.
    pub fn connect(&self, socket: &Path) -> FrontEnd {
        let front_end = FrontEnd::connect(socket);
        front_end.greet_with(0);
        let user = self.memory.address() as u64;
        let table = [words(&[1, 0]), longs(&[0, GUEST_BYTES as u64, user, 0])].concat();
        front_end.set(SET_MEM_TABLE, &table, &[self.memory.file.as_fd()]);
        for number in 0..QUEUES {
            self.start(&front_end, number, 0);
        }
        front_end
    }

    /// Connects and mounts.
    pub fn mount(&mut self, socket: &Path) -> FrontEnd {
        let front_end = self.connect(socket);
        let (_, error, body) = self.ask(op::INIT, 0, &[&init()], 64).expect("an answer");
        assert_eq!((error, &body[..4]), (0, &words(&[7])[..]));
        front_end
    }

    pub fn start(&self, front_end: &FrontEnd, number: usize, base: u32) {
        let Queue { kick, call, .. } = &self.queues[number];
        let queue = number as u32;
        front_end.set(SET_VRING_NUM, &words(&[queue, SIZE.into()]), &[]);
        let at = (self.memory.address() + number * RING_BYTES) as u64;
        let places = longs(&[at, at + USED_AT as u64, at + AVAILABLE_AT as u64, 0]);
        front_end.set(SET_VRING_ADDR, &[words(&[queue, 0]), places].concat(), &[]);
        front_end.set(SET_VRING_BASE, &words(&[queue, base]), &[]);
        front_end.set(SET_VRING_CALL, &longs(&[queue.into()]), &[call.as_fd()]);
        front_end.set(SET_VRING_KICK, &longs(&[queue.into()]), &[kick.as_fd()]);
        front_end.set(SET_VRING_ENABLE, &words(&[queue, 1]), &[]);
    }

    fn index(&self, at: usize) -> &AtomicU16 {
        let field = self.memory.slice(at + 2, 2).as_mut_ptr().cast();
        // SAFETY: aligned, inside the memory, and shared with the device, which treats it as an atomic as well.
        unsafe { AtomicU16::from_ptr(field) }
    }

    /// Room for so many bytes, somewhere in memory.
    fn take(&mut self, bytes: usize) -> usize {
        if self.next_data + bytes > GUEST_BYTES {
            self.next_data = DATA_AT;
        }
        let at = self.next_data;
        self.next_data += bytes.next_multiple_of(8);
        at
    }

    /// A request of these arguments, whose answer may have a body of so many bytes; its number.
    pub fn offer(&mut self, opcode: u32, node: u64, arguments: &[&[u8]], room: usize) -> u64 {
        self.unique += 1;
        let message = message(opcode, self.unique, node, &arguments.concat());
        let answer: &[usize] = if is_silent(opcode) { &[] } else { &[16, room] };
        let queue = if is_silent(opcode) { HIPRIO } else { REQUESTS };
        self.offer_cut(queue, &[&message], answer);
        self.unique
    }

    /// A message in these parts, and the room for its answer in those.
    pub fn offer_cut(&mut self, queue: usize, message: &[&[u8]], answer: &[usize]) {
        let mut parts = Vec::new();
        for part in message {
            let at = self.take(part.len());
            self.memory.slice(at, part.len()).copy_from_slice(part);
            parts.push((at as u64, part.len() as u32, 0));
        }
        let mut places = Vec::new();
        for bytes in answer.iter().copied() {
            let at = self.take(bytes);
            places.push((at, bytes));
            parts.push((at as u64, bytes as u32, WRITE));
        }
        let first = self.offer_parts(queue, &parts);
        self.out.push(Out { queue, first, places });
    }

    /// Any descriptors: address, bytes and flags.
    pub fn offer_parts(&mut self, number: usize, parts: &[(u64, u32, u16)]) -> u16 {
        let ring = number * RING_BYTES;
        let first = self.queues[number].next_descriptor;
        for (place, (at, bytes, flags)) in parts.iter().enumerate() {
            let index = self.queues[number].next_descriptor;
            let next = (index + 1) % SIZE;
            let flags = flags | if place + 1 < parts.len() { NEXT } else { 0 };
            let into = self.memory.slice(ring + 16 * usize::from(index), 16);
            into[..8].copy_from_slice(&at.to_le_bytes());
            into[8..12].copy_from_slice(&bytes.to_le_bytes());
            into[12..14].copy_from_slice(&flags.to_le_bytes());
            into[14..].copy_from_slice(&next.to_le_bytes());
            self.queues[number].next_descriptor = next;
        }
        let queue = &mut self.queues[number];
        let entry = ring + AVAILABLE_AT + 4 + 2 * usize::from(queue.available % SIZE);
        queue.available = queue.available.wrapping_add(1);
        let available = queue.available;
        self.memory.slice(entry, 2).copy_from_slice(&first.to_le_bytes());
        self.index(ring + AVAILABLE_AT).store(available, Ordering::Release);
        rustix::io::write(&self.queues[number].kick, &1u64.to_ne_bytes()).expect("room");
        first
    }

    /// How many chains a queue was given.
    pub fn offered(&self, number: usize) -> u16 {
        self.queues[number].available
    }

    /// The next answer of a queue, if there is one.
    pub fn answer(&mut self, number: usize) -> Option<Answer> {
        let ring = number * RING_BYTES;
        let used = self.queues[number].used;
        if self.index(ring + USED_AT).load(Ordering::Acquire) == used {
            return None;
        }
        let entry = self.memory.slice(ring + USED_AT + 4 + 8 * usize::from(used % SIZE), 8);
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("four"));
        let (first, bytes) = (word(0) as u16, word(4) as usize);
        self.queues[number].used = used.wrapping_add(1);
        let place = self.out.iter().position(|out| (out.queue, out.first) == (number, first));
        let Out { places, .. } = self.out.remove(place.expect("it was out"));
        let mut all = Vec::new();
        for (at, bytes) in places {
            all.extend_from_slice(self.memory.slice(at, bytes));
        }
        assert!(bytes <= all.len(), "{bytes} of {}", all.len());
        if bytes == 0 {
            return Some(None);
        }
        all.truncate(bytes);
        let length = u32::from_ne_bytes(all[..4].try_into().expect("four"));
        assert_eq!(length as usize, bytes, "what the header says and what was written");
        let error = i32::from_ne_bytes(all[4..8].try_into().expect("four"));
        let unique = u64::from_ne_bytes(all[8..16].try_into().expect("eight"));
        Some(Some((unique, error, all.split_off(16))))
    }

    /// Waits for the next answer of a queue.
    pub fn wait(&mut self, queue: usize) -> Answer {
        let begun = Instant::now();
        loop {
            if let Some(answer) = self.answer(queue) {
                return answer;
            }
            assert!(begun.elapsed() < PATIENCE, "no answer");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Waits for so many answers to chains that were made by hand.
    pub fn skip(&mut self, number: usize, count: u16) {
        let begun = Instant::now();
        let wanted = self.queues[number].used.wrapping_add(count);
        while self.index(number * RING_BYTES + USED_AT).load(Ordering::Acquire) != wanted {
            assert!(begun.elapsed() < PATIENCE, "no answer");
            std::thread::sleep(Duration::from_micros(100));
        }
        self.queues[number].used = wanted;
    }

    pub fn kick(&self, number: usize) -> &OwnedFd {
        &self.queues[number].kick
    }

    /// Whether nothing is answered for a while.
    pub fn is_quiet(&mut self, queue: usize) -> bool {
        std::thread::sleep(Duration::from_millis(50));
        self.answer(queue).is_none()
    }

    pub fn ask(&mut self, opcode: u32, node: u64, arguments: &[&[u8]], room: usize) -> Answer {
        let unique = self.offer(opcode, node, arguments, room);
        let answer = self.wait(if is_silent(opcode) { HIPRIO } else { REQUESTS });
        if let Some((answered, _, _)) = &answer {
            assert_eq!(*answered, unique);
        }
        answer
    }

    /// What is asked must be done.
    pub fn ok(&mut self, opcode: u32, node: u64, arguments: &[&[u8]], room: usize) -> Vec<u8> {
        let (_, error, body) = self.ask(opcode, node, arguments, room).expect("an answer");
        assert_eq!(error, 0, "request {opcode}");
        body
    }

    /// Makes a file: its node and handle.
    pub fn create(&mut self, name: &[u8]) -> (u64, u64) {
        let flags = libc::O_RDWR as u32;
        let arguments = words(&[flags, libc::S_IFREG | 0o644, 0o22, 0]);
        let body = self.ok(op::CREATE, 1, &[&arguments, name, &[0]], 144);
        (long(&body, 0), long(&body, 128))
    }

    pub fn write(&mut self, (node, fh): (u64, u64), offset: u64, data: &[u8]) {
        let body = self.ok(op::WRITE, node, &[&write_args(fh, offset, data.len()), data], 8);
        assert_eq!(body[..4], (data.len() as u32).to_ne_bytes());
    }

    pub fn read(&mut self, (node, fh): (u64, u64), offset: u64, bytes: usize) -> Vec<u8> {
        self.ok(op::READ, node, &[&read_args(fh, offset, bytes)], bytes)
    }
}

/// Requests that nobody answers.
pub fn is_silent(opcode: u32) -> bool {
    matches!(opcode, op::FORGET | op::INTERRUPT)
}

/// `fuse_in_header` and what follows.
pub fn message(opcode: u32, unique: u64, node: u64, arguments: &[u8]) -> Vec<u8> {
    let length = 40 + arguments.len() as u32;
    // Who asks is a user, and a process of the guest whose number is somebody else's here.
    let who = words(&[1000, 1000, 1, 0]);
    let header = [words(&[length, opcode]), longs(&[unique, node]), who];
    [header.concat(), arguments.into()].concat()
}

/// `fuse_init_in` of a kernel that knows everything.
pub fn init() -> Vec<u8> {
    let mut init = words(&[7, 40, 1 << 20, u32::MAX, u32::MAX]);
    init.resize(64, 0);
    init
}

pub fn write_args(fh: u64, offset: u64, bytes: usize) -> Vec<u8> {
    [longs(&[fh, offset]), words(&[bytes as u32, 0]), longs(&[0]), words(&[0, 0])].concat()
}

pub fn read_args(fh: u64, offset: u64, bytes: usize) -> Vec<u8> {
    [longs(&[fh, offset]), words(&[bytes as u32, 0]), longs(&[0]), words(&[0, 0])].concat()
}

/// `fuse_lk_in`: all of a file, exclusively.
pub fn lock_args(fh: u64, owner: u64) -> Vec<u8> {
    let lock = [longs(&[0, i64::MAX as u64]), words(&[libc::F_WRLCK as u32, 1])];
    [longs(&[fh, owner]), lock.concat(), words(&[0, 0])].concat()
}

pub fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
