//! Pipes of bytes in memory that two processes of one machine share.
//!
//! A byte goes from one process to the other without a system call while both are awake: the reactor looks
//! at its pipes wherever it looks at its ring. A reactor that is about to sleep says so in the pipe, and the
//! other side then rings its [`Bell`], an eventfd of each reactor.
//!
//! ```text
//! one file in memory per pipe, made by the side that writes
//! 0        64       128            192            4096            4096 + DATA_BYTES
//! | written | taken  | reader sleeps | writer sleeps | ... | bytes, in a circle |
//! ```
//!
//! What always holds:
//! - `written` and `taken` count bytes from the pipe's beginning, each raised by one side only, after the bytes
//!   themselves were put there or taken.
//! - What the other side may have done to this memory ends the pipe at worst: counts are checked, and bytes are
//!   copied out before anybody looks at them.
//! - No wake-up is lost: who sleeps says so and looks once more, who puts or takes bytes does so and then looks
//!   whether the other sleeps.
//!
//! A process that dies is noticed by what the pipe belongs to (a socket), which then closes its end.
#![allow(unsafe_code)] // Memory shared with another process.

use super::Core;
use super::ring::Watched;
use crate::shared::{map, sealed_memory, sealed_memory_bytes};
use crate::{BufMut, IoVec};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::task::{Poll, Waker};

/// What a pipe holds at most; a power of two.
const DATA_BYTES: usize = 256 << 10;
/// The counts, in front of the data.
const CONTROL_BYTES: usize = 4096;
const MEMORY_BYTES: usize = CONTROL_BYTES + DATA_BYTES;

/// Wakes a reactor that sleeps.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// That of this thread's reactor, to be given to others.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn of_this_reactor() -> io::Result<OwnedFd> {
        Core::current_ring().bell()
    }

    /// A bell that another reactor gave away.
    #[must_use]
    pub fn new(eventfd: OwnedFd) -> Self {
        Self(eventfd)
    }

    fn ring(&self) {
        let one = 1u64;
        // SAFETY: writes 8 bytes from a live value. What is no eventfd takes them or not; a full counter belongs
        // to who is awake.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

/// A count or a flag, on a cache line of its own.
#[repr(C, align(64))]
struct Line(AtomicU64);

#[repr(C)]
struct Control {
    written: Line,
    taken: Line,
    reader_sleeps: Line,
    writer_sleeps: Line,
}

/// The mapping of a pipe.
struct Memory {
    start: NonNull<u8>,
}

impl Memory {
    fn new(file: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self { start: map(file, MEMORY_BYTES, libc::PROT_READ | libc::PROT_WRITE)? })
    }

    fn control(&self) -> &Control {
        // SAFETY: the beginning of the mapping, which is page-aligned and larger; atomics may change at any time.
        unsafe { self.start.cast::<Control>().as_ref() }
    }

    /// Where the byte number `count` lies, and how many follow it before the circle closes.
    fn at(&self, count: u64) -> (NonNull<u8>, usize) {
        let offset = count as usize & (DATA_BYTES - 1);
        // SAFETY: inside the mapping.
        (unsafe { self.start.add(CONTROL_BYTES + offset) }, DATA_BYTES - offset)
    }

    /// Bytes written and not taken.
    fn filled(&self, written: u64, taken: u64) -> io::Result<usize> {
        match written.wrapping_sub(taken) {
            filled if filled <= DATA_BYTES as u64 => Ok(filled as usize),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made, into which nothing points any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), MEMORY_BYTES) };
    }
}

/// What both ends have.
struct End {
    memory: Memory,
    /// The own count: of bytes written, or taken.
    count: Cell<u64>,
    waiting: RefCell<Option<Waker>>,
    /// The other side's; unknown to a writer until it has heard of the reader.
    bell: RefCell<Option<Bell>>,
    closed: Cell<bool>,
}

impl End {
    fn new(memory: Memory, bell: Option<Bell>) -> Self {
        let (waiting, closed) = (RefCell::default(), Cell::new(false));
        Self { memory, count: Cell::new(0), waiting, bell: RefCell::new(bell), closed }
    }

    /// Rings the other side's bell if it sleeps, as `flag` says. What it shall see was stored before.
    fn wake_other(&self, flag: &Line) {
        fence(Ordering::SeqCst);
        if flag.0.load(Ordering::Relaxed) != 0
            && let Some(bell) = &*self.bell.borrow()
            && flag.0.swap(0, Ordering::SeqCst) != 0
        {
            bell.ring();
        }
    }

    fn wake(&self) -> bool {
        let waiting = self.waiting.borrow_mut().take();
        waiting.map(Waker::wake).is_some()
    }

    fn close(&self) {
        self.closed.set(true);
        self.wake();
    }
}

/// The end that bytes go into; clones share it. One task at a time writes.
#[derive(Clone)]
pub struct Writer(Rc<WriterEnd>);

struct WriterEnd(End);

impl WriterEnd {
    fn room(&self) -> io::Result<usize> {
        let taken = self.0.memory.control().taken.0.load(Ordering::Acquire);
        Ok(DATA_BYTES - self.0.memory.filled(self.0.count.get(), taken)?)
    }

    /// Lets the reader see what was put there.
    fn publish(&self) {
        let control = self.0.memory.control();
        control.written.0.store(self.0.count.get(), Ordering::Release);
        self.0.wake_other(&control.reader_sleeps);
    }
}

impl Watched for WriterEnd {
    fn look(&self) -> bool {
        // An error is for the task to find.
        self.0.waiting.borrow().is_some() && self.room().ok() != Some(0) && self.0.wake()
    }

    fn sleeps(&self, sleeps: bool) {
        let sleeps = sleeps && self.0.waiting.borrow().is_some();
        self.0.memory.control().writer_sleeps.0.store(u64::from(sleeps), Ordering::Relaxed);
    }
}

impl Writer {
    /// Makes a pipe: this end, and the memory, for [`Reader::new`] on the other side.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        let file = sealed_memory(MEMORY_BYTES)?;
        let end = Rc::new(WriterEnd(End::new(Memory::new(file.as_fd())?, None)));
        Core::current_ring().watch(Rc::downgrade(&end) as _);
        Ok((Self(end), file))
    }

    /// From now on the reader's reactor can be woken.
    pub fn set_bell(&self, bell: Bell) {
        let end = &self.0.0;
        *end.bell.borrow_mut() = Some(bell);
        // It may have gone to sleep over what was written before.
        end.wake_other(&end.memory.control().reader_sleeps);
    }

    /// Writes all bytes of all parts, in order. Dropping the future leaves unknown how much was written.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::BrokenPipe`] when the pipe is closed before, [`io::ErrorKind::InvalidData`] when the
    /// other side has taken more than there was.
    pub async fn write_all(&self, parts: &IoVec) -> io::Result<()> {
        let end = &self.0.0;
        for part in parts {
            let mut rest = &part[..];
            while !rest.is_empty() {
                if end.closed.get() {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                let (at, until_end) = end.memory.at(end.count.get());
                let bytes = rest.len().min(self.0.room()?).min(until_end);
                if bytes == 0 {
                    self.0.publish();
                    self.room_or_end().await;
                    continue;
                }
                // SAFETY: `bytes` fit behind `at`; the reader does not look at them before they are published.
                unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), at.as_ptr(), bytes) };
                end.count.set(end.count.get() + bytes as u64);
                rest = &rest[bytes..];
            }
        }
        self.0.publish();
        Ok(())
    }

    async fn room_or_end(&self) {
        let end = &self.0.0;
        poll_fn(|cx| {
            if end.closed.get() || self.0.room().ok() != Some(0) {
                return Poll::Ready(());
            }
            *end.waiting.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Nothing is written any more; who waits for room is told.
    pub fn close(&self) {
        self.0.0.close();
    }
}

/// The end that bytes come out of; clones share it. One task at a time reads.
#[derive(Clone)]
pub struct Reader(Rc<ReaderEnd>);

struct ReaderEnd(End);

impl ReaderEnd {
    fn filled(&self) -> io::Result<usize> {
        let written = self.0.memory.control().written.0.load(Ordering::Acquire);
        self.0.memory.filled(written, self.0.count.get())
    }
}

impl Watched for ReaderEnd {
    fn look(&self) -> bool {
        // An error is for the task to find.
        self.0.waiting.borrow().is_some() && self.filled().ok() != Some(0) && self.0.wake()
    }

    fn sleeps(&self, sleeps: bool) {
        let sleeps = sleeps && self.0.waiting.borrow().is_some();
        self.0.memory.control().reader_sleeps.0.store(u64::from(sleeps), Ordering::Relaxed);
    }
}

impl Reader {
    /// The other end of what [`Writer::new`] made; `bell` is the writer's.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] when it is no such memory, or what the system says.
    pub fn new(file: &OwnedFd, bell: Bell) -> io::Result<Self> {
        if sealed_memory_bytes(file)? != MEMORY_BYTES as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let end = Rc::new(ReaderEnd(End::new(Memory::new(file.as_fd())?, Some(bell))));
        Core::current_ring().watch(Rc::downgrade(&end) as _);
        Ok(Self(end))
    }

    /// Reads what there is, at least one byte: the buffer and how much of it was filled, 0 once the pipe is closed
    /// and empty (or for an empty buffer).
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] when the other side says that it has written more than fits.
    pub async fn read(&self, mut into: BufMut) -> io::Result<(BufMut, usize)> {
        let bytes = self.fill(&mut into).await?;
        Ok((into, bytes))
    }

    /// Fills the whole buffer.
    ///
    /// # Errors
    ///
    /// As [`Reader::read`], and [`io::ErrorKind::UnexpectedEof`] when the pipe ends first.
    pub async fn read_exact(&self, mut into: BufMut) -> io::Result<BufMut> {
        let mut done = 0;
        while done < into.len() {
            match self.fill(&mut into[done..]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                bytes => done += bytes,
            }
        }
        Ok(into)
    }

    async fn fill(&self, into: &mut [u8]) -> io::Result<usize> {
        let end = &self.0.0;
        let filled = poll_fn(|cx| {
            // First the end, then the bytes: what was written before it is still read.
            let closed = end.closed.get();
            match self.0.filled() {
                Ok(0) if !closed && !into.is_empty() => {
                    *end.waiting.borrow_mut() = Some(cx.waker().clone());
                    Poll::Pending
                }
                filled => Poll::Ready(filled),
            }
        })
        .await?;
        let mut rest = filled.min(into.len());
        let mut done = 0;
        while rest > 0 {
            let (at, until_end) = end.memory.at(end.count.get());
            let bytes = rest.min(until_end);
            // SAFETY: `bytes` lie behind `at`, and as many fit into the rest of `into`. The writer does not touch
            // them before they are taken; one that does so gives wrong bytes to itself.
            unsafe {
                let to = into[done..done + bytes].as_mut_ptr();
                std::ptr::copy_nonoverlapping(at.as_ptr(), to, bytes);
            }
            end.count.set(end.count.get() + bytes as u64);
            (done, rest) = (done + bytes, rest - bytes);
        }
        if done > 0 {
            let control = end.memory.control();
            control.taken.0.store(end.count.get(), Ordering::Release);
            end.wake_other(&control.writer_sleeps);
        }
        Ok(done)
    }

    /// Nothing comes any more but what is there.
    pub fn close(&self) {
        self.0.0.close();
    }
}
