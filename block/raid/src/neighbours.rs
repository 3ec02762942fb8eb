//! Neighbours: reads of a degraded stripe that follow each other share what they get from its members.
//!
//! A chunk that is missing takes the same rows of all others, and who reads in order asks for these as well, just before or
//! after. So a stripe that lacks data is *shared* from its second read on, or from the first if one just before it is: what
//! members answer is kept for a moment, and who needs it takes it from there, or waits for it where it is on its way. Without
//! that, 64 KiB reads in order of 8 + 2 with one member missing read 1.7 bytes for each (`tests/neighbours.rs`).
//!
//! What always holds:
//! - Nothing that a write replaced is served once that write was answered: what is kept of a stripe is void as soon as
//!   somebody begins to change it ([`crate::update::Updates::stillness`]), and data and parity of what is kept belong together.
//! - Nothing is kept for longer than a request may be on its way, so a later owner's writes are missed no longer than by one.
//! - Who waits waits for a task of the array, never for another reader, who may not be polled.
//! - Nothing is read that nobody asked for: there is no reading ahead.
//! - Where no member is missing, a read looks at one flag.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::rows::ROW_BYTES;
use levada_base::reactor::{self, Instant};
use levada_base::sync::Notify;
use levada_base::{Buf, BufMut, planted};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// What is kept of all stripes, but for what readers hold on to.
const KEPT_BYTES_MAX: u64 = 8 << 20;
const KEPT_FOR: Duration = Duration::from_millis(100);
/// Shared stripes, and degraded ones that were read lately: more than streams that are worth it.
const SHARED_MAX: usize = 32;
const TOUCHED: usize = 32;

/// Consecutive rows of a chunk.
enum Piece {
    /// Being read, up to here.
    Coming(u64),
    Here(Buf),
}

/// Pieces by where in the chunk they begin.
type Pieces = BTreeMap<u64, Piece>;

/// What reads of a stripe share.
pub(crate) struct Shared {
    stripe: u64,
    still: u64,
    begun: Instant,
    /// By chunk.
    chunks: RefCell<Vec<Pieces>>,
    bytes: Cell<u64>,
    /// Some of it could not be read.
    failed: Cell<bool>,
    changed: Notify,
}

impl Shared {
    pub fn has_failed(&self) -> bool {
        self.failed.get()
    }

    /// Ranges of `within` that nobody reads or has read.
    fn gaps(&self, chunk: usize, within: &Range<u64>) -> SmallVec<[Range<u64>; 2]> {
        let chunks = self.chunks.borrow();
        let mut gaps = SmallVec::new();
        let mut at = within.start;
        // The one before may reach into it.
        let before = chunks[chunk].range(..at).next_back();
        for (start, piece) in before.into_iter().chain(chunks[chunk].range(within.clone())) {
            let end = match piece {
                Piece::Coming(end) => *end,
                Piece::Here(bytes) => start + bytes.len() as u64,
            };
            if *start > at {
                gaps.push(at..*start);
            }
            at = at.max(end);
        }
        if at < within.end {
            gaps.push(at..within.end);
        }
        gaps
    }

    /// Whether this range is here; there are no gaps in it.
    fn has(&self, chunk: usize, within: &Range<u64>) -> bool {
        let chunks = self.chunks.borrow();
        let before = chunks[chunk].range(..=within.start).next_back();
        before
            .into_iter()
            .chain(chunks[chunk].range(within.clone()))
            .all(|(_, piece)| matches!(piece, Piece::Here(_)))
    }
}

/// What a chunk holds from here on, as far as one piece goes.
fn held_from(pieces: &Pieces, at: u64) -> Option<&[u8]> {
    match pieces.range(..=at).next_back()? {
        (_, Piece::Coming(_)) => None,
        (start, Piece::Here(bytes)) => {
            bytes.get((at - start) as usize..).filter(|bytes| !bytes.is_empty())
        }
    }
}

/// A piece that is being read until this is dropped.
struct Coming {
    shared: Rc<Shared>,
    chunk: usize,
    at: u64,
}

impl Coming {
    fn came(self, bytes: Buf) {
        let piece = Piece::Here(bytes);
        self.shared.chunks.borrow_mut()[self.chunk].insert(self.at, piece);
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        let is_here =
            matches!(self.shared.chunks.borrow()[self.chunk].get(&self.at), Some(Piece::Here(_)));
        if !is_here {
            self.shared.failed.set(true);
        }
        self.shared.changed.notify_all();
    }
}

/// Which stripes are shared.
pub(crate) struct Neighbours {
    /// The oldest first.
    shared: RefCell<VecDeque<Rc<Shared>>>,
    /// Degraded stripes that were read lately, in turns.
    touched: RefCell<([u64; TOUCHED], usize)>,
}

impl Default for Neighbours {
    fn default() -> Self {
        Self { shared: RefCell::default(), touched: RefCell::new(([u64::MAX; TOUCHED], 0)) }
    }
}

impl Neighbours {
    pub fn forget_all(&self) {
        self.shared.borrow_mut().clear();
    }

    /// Whether it was read before.
    fn touch(&self, stripe: u64) -> bool {
        let (touched, next) = &mut *self.touched.borrow_mut();
        if touched.contains(&stripe) {
            return true;
        }
        touched[*next] = stripe;
        *next = (*next + 1) % TOUCHED;
        false
    }

    /// Lets go of the oldest until the rest fits.
    fn trim(&self) {
        let mut shared = self.shared.borrow_mut();
        let mut bytes: u64 = shared.iter().map(|shared| shared.bytes.get()).sum();
        while bytes > KEPT_BYTES_MAX || shared.len() > SHARED_MAX {
            let Some(oldest) = shared.pop_front() else { return };
            bytes -= oldest.bytes.get();
        }
    }
}

impl Engine {
    /// Whether a read of this stripe shares something. Out of line: what reads of whole arrays never come to costs them room
    /// in registers.
    #[cold]
    #[inline(never)]
    pub fn is_shared(&self, stripe: u64) -> bool {
        self.shared(stripe).is_some()
    }

    /// What a read of this stripe shares with others, if that is worth it.
    pub fn shared(&self, stripe: u64) -> Option<Rc<Shared>> {
        if !self.map.is_short() || !self.layout.level.has_parity() {
            return None;
        }
        let mut all = self.neighbours.shared.borrow_mut();
        if let Some(at) = all.iter().position(|shared| shared.stripe == stripe) {
            if self.is_valid(&all[at]) && all[at].begun.elapsed() < KEPT_FOR {
                return Some(Rc::clone(&all[at]));
            }
            all.remove(at);
        }
        if !self.is_settled(stripe) || !self.lacks_data(stripe) {
            return None;
        }
        let still = self.updates.stillness(stripe)?;
        // Those in between may lack parity only.
        let just_before = stripe.saturating_sub(self.layout.level.tolerates() as u64 + 1)..stripe;
        let goes_on = all.iter().any(|shared| just_before.contains(&shared.stripe));
        if !self.neighbours.touch(stripe) && !goes_on {
            return None;
        }
        let shared = Rc::new(Shared {
            stripe,
            still,
            begun: reactor::now(),
            chunks: RefCell::new((0..self.layout.chunks()).map(|_| Pieces::new()).collect()),
            bytes: Cell::new(0),
            failed: Cell::new(false),
            changed: Notify::default(),
        });
        all.push_back(Rc::clone(&shared));
        Some(shared)
    }

    fn lacks_data(&self, stripe: u64) -> bool {
        (0..self.layout.data_chunks()).any(|chunk| !self.has_chunk(stripe, chunk))
    }

    /// Whether all of it could be read, and the stripe has not been changed since.
    fn is_valid(&self, shared: &Shared) -> bool {
        let is_still = self.is_settled(shared.stripe)
            && self.updates.stillness(shared.stripe) == Some(shared.still);
        !shared.failed.get() && (is_still || planted!("raid-neighbour-served-stale"))
    }

    /// Reads a range of a chunk, whole rows, from what is shared, and shares what it reads. False where that cannot be: then
    /// `into` holds anything.
    pub async fn read_shared(
        self: &Rc<Self>,
        shared: &Rc<Shared>,
        chunk: usize,
        within: Range<u64>,
        into: &mut [u8],
    ) -> bool {
        let stripe = shared.stripe;
        let from: SmallVec<[usize; 16]> = match self.has_chunk(stripe, chunk) {
            true => smallvec::smallvec![chunk],
            false => {
                // Data first: that is what neighbours ask for.
                let others =
                    (0..self.layout.chunks()).filter(|other| self.has_chunk(stripe, *other));
                let others: SmallVec<_> = others.take(self.layout.data_chunks()).collect();
                if others.len() < self.layout.data_chunks() {
                    return false;
                }
                others
            }
        };
        from.iter().for_each(|chunk| self.ask_for(shared, *chunk, &within));
        let all_are_here = || from.iter().all(|chunk| shared.has(*chunk, &within));
        let is_here = shared.changed.until(|| match self.is_valid(shared) {
            true => all_are_here().then_some(true),
            false => Some(false),
        });
        is_here.await && self.take_shared(shared, chunk, &from, within, into)
    }

    /// Begins to read what of a range nobody has read.
    fn ask_for(self: &Rc<Self>, shared: &Rc<Shared>, chunk: usize, within: &Range<u64>) {
        for gap in shared.gaps(chunk, within) {
            let bytes = gap.end - gap.start;
            debug_assert!((gap.start | bytes).is_multiple_of(ROW_BYTES));
            shared.bytes.set(shared.bytes.get() + bytes);
            shared.chunks.borrow_mut()[chunk].insert(gap.start, Piece::Coming(gap.end));
            let coming = Coming { shared: Rc::clone(shared), chunk, at: gap.start };
            let engine = Rc::clone(self);
            self.spawn(async move {
                let place = engine.layout.place(coming.shared.stripe, chunk);
                let Some(member) = engine.holder(place, MemberSet::NONE) else { return };
                let at = engine.member_offset(place.slot, coming.at);
                let into = BufMut::for_overwrite(bytes as usize).into_vec();
                if let Ok(mut parts) = engine.member_read(&member, at, into).await
                    && let Some(part) = parts.pop()
                {
                    coming.came(part.freeze());
                }
            });
        }
        self.neighbours.trim();
    }

    /// Copies a range of a chunk, or recomputes it `from` others, all of which is here.
    fn take_shared(
        &self,
        shared: &Shared,
        chunk: usize,
        from: &[usize],
        within: Range<u64>,
        into: &mut [u8],
    ) -> bool {
        let chunks = shared.chunks.borrow();
        let mut at = within.start;
        // Cut wherever one of the pieces ends.
        while at < within.end {
            let held: SmallVec<[Option<&[u8]>; 16]> = (0..chunks.len())
                .map(|chunk| from.contains(&chunk).then(|| held_from(&chunks[chunk], at)).flatten())
                .collect();
            if held.iter().flatten().count() < from.len() {
                return false;
            }
            let run = held.iter().flatten().map(|bytes| bytes.len()).min().unwrap_or(0);
            let run = run.min((within.end - at) as usize);
            let target = &mut into[(at - within.start) as usize..][..run];
            let is_made = match held[chunk] {
                Some(bytes) => {
                    target.copy_from_slice(&bytes[..run]);
                    true
                }
                None => self.redundancy.recompute(
                    held.iter().map(|bytes| bytes.map(|bytes| &bytes[..run])),
                    std::iter::once((chunk, target)),
                ),
            };
            if !is_made {
                return false;
            }
            at += run as u64;
        }
        true
    }
}
