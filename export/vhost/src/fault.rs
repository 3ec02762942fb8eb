//! What happens when a client shortens a file that is mapped here: not the end of the process.
//!
//! Touching a page behind the end of a file raises SIGBUS, and so does a file system in memory that has no room left. The
//! handler puts zeroes in the place of the whole mapping, notes that it did, and the interrupted copy goes on. Who uses
//! the mapping asks for the note before it believes what it read.
//!
//! What always holds:
//! - A SIGBUS of anything else ends as it would have without this module.
//! - The handler takes no lock and no memory: it walks a list that only grows.
#![allow(unsafe_code)] // A signal handler, and the list that it shares with every thread.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, Once, PoisonError};

const ENTRIES: usize = 256;

/// One mapping; unused while `start` is 0.
#[derive(Default)]
struct Entry {
    /// Another one with every mapping that it is for.
    version: AtomicUsize,
    start: AtomicUsize,
    bytes: AtomicUsize,
    is_lost: AtomicBool,
}

/// Some entries, and the next such. Never freed.
struct Chunk {
    entries: [Entry; ENTRIES],
    next: AtomicPtr<Chunk>,
}

static FIRST: AtomicPtr<Chunk> = AtomicPtr::new(ptr::null_mut());
/// Held by who enters a mapping; not by the handler.
static ENTERING: Mutex<()> = Mutex::new(());
static INSTALL: Once = Once::new();
/// What handled SIGBUS before, leaked.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// A mapping that may lose its pages. Dropped before it is unmapped.
pub(crate) struct Guard(&'static Entry);

impl Guard {
    /// Guards a mapping of whole pages, which is replaced as a whole.
    pub(crate) fn new(start: *mut u8, bytes: usize) -> Self {
        INSTALL.call_once(install);
        let _entering = ENTERING.lock().unwrap_or_else(PoisonError::into_inner);
        let free = chunks().flat_map(|chunk| &chunk.entries);
        let free = free.into_iter().find(|entry| entry.start.load(Ordering::Relaxed) == 0);
        let entry = free.unwrap_or_else(|| &grow().entries[0]);
        entry.version.fetch_add(1, Ordering::AcqRel);
        entry.is_lost.store(false, Ordering::Relaxed);
        entry.bytes.store(bytes, Ordering::Relaxed);
        entry.start.store(start as usize, Ordering::Release);
        Self(entry)
    }

    /// True once zeroes are in its place.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.is_lost.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.version.fetch_add(1, Ordering::AcqRel);
        self.0.start.store(0, Ordering::Release);
    }
}

fn chunks() -> impl Iterator<Item = &'static Chunk> {
    // SAFETY: a chunk in the list is whole and never freed.
    let at = |link: &AtomicPtr<Chunk>| unsafe { link.load(Ordering::Acquire).as_ref() };
    std::iter::successors(at(&FIRST), move |chunk| at(&chunk.next))
}

/// Adds a chunk; `ENTERING` is held.
fn grow() -> &'static Chunk {
    let entries = std::array::from_fn(|_| Entry::default());
    let chunk: &'static mut Chunk =
        Box::leak(Box::new(Chunk { entries, next: AtomicPtr::default() }));
    chunk.next.store(FIRST.load(Ordering::Relaxed), Ordering::Relaxed);
    FIRST.store(chunk, Ordering::Release);
    chunk
}

fn install() {
    // SAFETY: all zeroes is a value of this plain structure; both live through the calls. The handler keeps to what may be
    // called in one, and BEFORE is set before it can be called.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before);
        BEFORE.store(Box::leak(Box::new(before)), Ordering::Release);
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut());
    }
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler that asks for it the whole information.
    let at = unsafe { (*info).si_addr() } as usize;
    if !replace(at) {
        // The instruction is repeated, and the signal goes where it would have gone.
        // SAFETY: what was there before, kept for ever.
        unsafe { libc::sigaction(libc::SIGBUS, BEFORE.load(Ordering::Acquire), ptr::null_mut()) };
    }
}

/// Puts zeroes in the place of the mapping that `at` is in; false when there is none.
fn replace(at: usize) -> bool {
    for entry in chunks().flat_map(|chunk| &chunk.entries) {
        // Another thread may be about to use it for another mapping: what does not belong together is not this one, which is held.
        let version = entry.version.load(Ordering::Acquire);
        let (start, bytes) =
            (entry.start.load(Ordering::Acquire), entry.bytes.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if entry.version.load(Ordering::Relaxed) != version {
            continue;
        }
        if start == 0 || !(start..start + bytes).contains(&at) {
            continue;
        }
        entry.is_lost.store(true, Ordering::Relaxed);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: exactly the place of a mapping of ours, which only raw copies and atomics look at: to them the bytes may
        // change at any time.
        let zeroes = unsafe { libc::mmap(start as *mut _, bytes, protection, flags, -1, 0) };
        return zeroes != libc::MAP_FAILED;
    }
    false
}
