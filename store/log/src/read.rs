//! Reads: an extent map's pieces, in memory or on the array, all asked for at once.
//!
//! Every block that comes from the array is checked against its CRC32C. One that does not fit
//! is read again around each member in turn, then around each two, until it fits; then the
//! array is repaired. What nothing rebuilds is [`LogError::Damaged`], for exactly those bytes.

use crate::LogError;
use crate::extents::{Extent, Record};
use crate::log::{Inner, ObjectLog, State};
use crate::object::View;
use crate::pages::Held;
use crate::write::in_memory;
use futures_util::future::join_all;
use levada_base::checksum::crc32c;
use levada_base::ids::ObjectId;
use levada_base::units::{BLOCK_BYTES, MIB, round_down, round_up};
use levada_base::{Buf, BufMut, IoVec, planted, probe};
use levada_device::BlockError;
use levada_raid::{IoClass, MemberSet};
use std::cell::Cell;
use std::rc::Rc;

/// Neighbours on the array are read together up to this size.
const MERGED_BYTES_MAX: u64 = 4 * MIB;

impl ObjectLog {
    /// Reads `bytes` bytes from `offset` on: zeroes in holes and past the end. Nothing is
    /// copied; the parts are slices of what was read.
    ///
    /// # Errors
    ///
    /// [`LogError::NoSuchObject`], [`LogError::Damaged`], or when the array fails.
    pub async fn read(&self, object: ObjectId, offset: u64, bytes: u64) -> Result<IoVec, LogError> {
        let log = &self.0;
        log.check()?;
        let end = offset.checked_add(bytes).ok_or(LogError::OutOfRange { offset, bytes })?;
        let object = log.objects.get(object).await?;
        let mut _held = Held::default();
        let plan = loop {
            let upto = {
                let now = object.now.borrow();
                if !now.exists {
                    return Err(LogError::NoSuchObject);
                }
                // Nothing lies behind the end.
                let upto = end.min(now.size);
                if object.knows(offset, upto) {
                    break Plan::new(log, &now, offset, end);
                }
                upto
            };
            _held = log.objects.load(&object, offset, upto).await?;
        };
        log.fetch(plan, IoClass::Foreground).await
    }
}

/// A range of an object and where it comes from.
struct Piece {
    offset: u64,
    len: u64,
    source: Source,
}

enum Source {
    Hole,
    Memory(Buf),
    Array {
        span: Span,
        /// Keeps the segment from being discarded.
        _pin: Pin,
    },
}

/// Whole blocks of a record on the array, and the piece of them that is wanted.
pub(crate) struct Span {
    pub record: Rc<Record>,
    /// Blocks of the record: first and one past the last.
    pub blocks: (u64, u64),
    /// The array's offset of the record's first byte.
    pub record_at: u64,
    is_checked: bool,
}

impl Span {
    pub fn new(log: &Inner, record: &Rc<Record>, blocks: (u64, u64)) -> Self {
        let place = record.place;
        let record_at = log.array_offset(place.segment, place.stripe) + u64::from(place.at);
        let (record, is_checked) = (Rc::clone(record), log.is_checked.get());
        Self { record, blocks, record_at, is_checked }
    }

    /// The array's offsets of the bytes of blocks of the record.
    fn bytes_of(&self, blocks: (u64, u64)) -> (u64, u64) {
        let end = (blocks.1 * BLOCK_BYTES).min(u64::from(self.record.stored));
        (self.record_at + blocks.0 * BLOCK_BYTES, self.record_at + end)
    }

    /// The whole blocks of the array that hold the span.
    pub fn on_array(&self) -> (u64, u64) {
        let (from, to) = self.bytes_of(self.blocks);
        (round_down(from, BLOCK_BYTES), round_up(to, BLOCK_BYTES))
    }

    /// True when all blocks fit their checksums; `data` is what [`Span::on_array`] holds.
    pub fn fits_whole(&self, data: &[u8]) -> bool {
        let (lo, _) = self.on_array();
        if !self.is_checked {
            return true;
        }
        (self.blocks.0..self.blocks.1).all(|block| {
            let (from, to) = self.bytes_of((block, block + 1));
            self.fits(block, &data[(from - lo) as usize..(to - lo) as usize])
        })
    }

    /// True when `bytes` are that block of the record.
    fn fits(&self, block: u64, bytes: &[u8]) -> bool {
        let expected = self.record.crcs.get((block - u64::from(self.record.first_block)) as usize);
        expected
            .is_some_and(|expected| *expected == crc32c(bytes) || planted!("log-checksum-ignored"))
    }
}

/// Reads that are in flight on a segment.
pub(crate) struct Pin {
    log: Rc<Inner>,
    readers: Rc<Cell<u32>>,
}

impl Pin {
    pub fn new(log: &Rc<Inner>, state: &State, segment: u32) -> Self {
        let readers = Rc::clone(&state.segments.get(segment).readers);
        readers.set(readers.get() + 1);
        Self { log: Rc::clone(log), readers }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.readers.set(self.readers.get() - 1);
        if self.readers.get() == 0 {
            self.log.changed.notify_all();
        }
    }
}

/// What a read takes from where, decided in one step.
pub(crate) struct Plan(Vec<Piece>);

impl Plan {
    fn new(log: &Rc<Inner>, view: &View, from: u64, to: u64) -> Self {
        let state = log.state.borrow();
        let mut pieces = Vec::new();
        let mut at = from;
        for (offset, extent) in view.extents.overlapping(from, to) {
            if offset > at {
                pieces.push(Piece { offset: at, len: offset - at, source: Source::Hole });
                at = offset;
            }
            let end = (offset + extent.len).min(to);
            pieces.push(Piece::of(log, &state, extent, at, end - at));
            at = end;
        }
        if at < to {
            pieces.push(Piece { offset: at, len: to - at, source: Source::Hole });
        }
        Self(pieces)
    }

    /// Exactly one extent, as it is.
    pub fn of_extent(log: &Rc<Inner>, offset: u64, extent: &Extent) -> Self {
        let state = log.state.borrow();
        Self(vec![Piece::of(log, &state, extent, offset, extent.len)])
    }
}

impl Piece {
    fn of(log: &Rc<Inner>, state: &State, extent: &Extent, offset: u64, len: u64) -> Self {
        let record = &extent.record;
        let skip = offset - record.offset;
        let source = match in_memory(state, record) {
            Some(data) => Source::Memory(data.slice(skip as usize, len as usize)),
            None => {
                let blocks = (skip / BLOCK_BYTES, (skip + len).div_ceil(BLOCK_BYTES));
                let _pin = Pin::new(log, state, record.place.segment);
                Source::Array { span: Span::new(log, record, blocks), _pin }
            }
        };
        Self { offset, len, source }
    }
}

/// Neighbouring blocks of the array, read at once.
struct Run {
    from: u64,
    to: u64,
}

impl Inner {
    pub(crate) async fn fetch(
        self: &Rc<Self>,
        plan: Plan,
        class: IoClass,
    ) -> Result<IoVec, LogError> {
        let mut runs: Vec<Run> = Vec::new();
        // The run of each piece that comes from the array.
        let mut run_of = Vec::with_capacity(plan.0.len());
        for piece in &plan.0 {
            let Source::Array { span, .. } = &piece.source else {
                run_of.push(0);
                continue;
            };
            let (from, to) = span.on_array();
            match runs.last_mut() {
                Some(run)
                    if from >= run.from
                        && from <= run.to
                        && to.max(run.to) - run.from <= MERGED_BYTES_MAX =>
                {
                    run.to = run.to.max(to);
                }
                _ => runs.push(Run { from, to }),
            }
            run_of.push(runs.len() - 1);
        }
        let reads = runs.iter().map(|run| async {
            let into = BufMut::for_overwrite((run.to - run.from) as usize).into_vec();
            match self.array.read(run.from, into).await {
                Ok(mut parts) => Ok(Some(parts.swap_remove(0).freeze())),
                // Perhaps only some of its blocks; each span is tried by itself.
                Err(BlockError::Medium { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        });
        let results = join_all(reads).await;
        let mut read = Vec::with_capacity(results.len());
        for result in results {
            read.push(result?);
        }
        let mut out = IoVec::new();
        for (piece, run) in plan.0.iter().zip(run_of) {
            match &piece.source {
                Source::Hole => self.push_zeroes(piece.len, &mut out),
                Source::Memory(data) => out.push(data.clone()),
                Source::Array { span, .. } => {
                    let data = match &read[run] {
                        Some(data) => {
                            let (from, to) = span.on_array();
                            Some(data.slice((from - runs[run].from) as usize, (to - from) as usize))
                        }
                        None => None,
                    };
                    out.push(self.checked(piece, span, data, class).await?);
                }
            }
        }
        Ok(out)
    }

    fn push_zeroes(&self, mut bytes: u64, out: &mut IoVec) {
        while bytes > 0 {
            let run = bytes.min(self.zeroes.len() as u64);
            out.push(self.zeroes.slice(0, run as usize));
            bytes -= run;
        }
    }

    /// The bytes of a piece out of what was read for its span, after repair if need be.
    async fn checked(
        self: &Rc<Self>,
        piece: &Piece,
        span: &Span,
        data: Option<Buf>,
        class: IoClass,
    ) -> Result<Buf, LogError> {
        let (lo, hi) = span.on_array();
        let skip = piece.offset - span.record.offset;
        let start = (span.record_at + skip - lo) as usize;
        let slice_of = |block: u64| {
            let (from, to) = span.bytes_of((block, block + 1));
            (from - lo) as usize..(to - lo) as usize
        };
        if let Some(data) = &data
            && span.fits_whole(data)
        {
            return Ok(data.slice(start, piece.len as usize));
        }
        let mut fixed = BufMut::zeroed((hi - lo) as usize);
        let mut damaged: Option<(u64, u64)> = None;
        for block in span.blocks.0..span.blocks.1 {
            let range = slice_of(block);
            if let Some(data) = &data
                && span.fits(block, &data[range.clone()])
            {
                fixed[range.clone()].copy_from_slice(&data[range]);
                continue;
            }
            let (from, to) = span.bytes_of((block, block + 1));
            let fits = |bytes: &[u8]| span.fits(block, bytes);
            match self.recover(from, to, class, &fits).await? {
                Some(bytes) => fixed[range].copy_from_slice(&bytes),
                None => {
                    let first = block * BLOCK_BYTES;
                    let last = (first + BLOCK_BYTES).min(u64::from(span.record.stored));
                    damaged = Some((damaged.map_or(first, |(first, _)| first), last));
                }
            }
        }
        if let Some((first, last)) = damaged {
            let from = (span.record.offset + first).max(piece.offset);
            let to = (span.record.offset + last).min(piece.offset + piece.len);
            return Err(LogError::Damaged { offset: from, bytes: to - from });
        }
        Ok(fixed.freeze().slice(start, piece.len as usize))
    }

    /// All members that hold data: a stripe's parity may be wrong too, and who holds that is not
    /// told, but parity rotates, so other stripes have their data there.
    fn all_members(&self) -> MemberSet {
        let stripes = self.array.geometry().stripes.min(64);
        let of_stripe =
            |stripe| self.array.members_of(stripe * self.stripe_bytes, self.stripe_bytes);
        MemberSet((0..stripes).fold(0, |all, stripe| all | of_stripe(stripe).0))
    }

    /// Reads bytes of the array whose contents are known when seen, around members that may be
    /// wrong, and repairs what was wrong. `None` when nothing fits.
    pub(crate) async fn recover(
        self: &Rc<Self>,
        from: u64,
        to: u64,
        class: IoClass,
        fits: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<Buf>, LogError> {
        let _busy = probe::busy("log read repair");
        let lo = round_down(from, BLOCK_BYTES);
        let hi = round_up(to, BLOCK_BYTES);
        // A repair puts back what it cannot prove as it read it: what another one has put right
        // meanwhile would be wrong again.
        let _turn = self.repairs.lock(lo, hi).await;
        let members = |set: MemberSet| (0..64).filter(move |member| set.contains(*member));
        let holders = self.array.members_of(lo, hi - lo);
        let mut avoid = vec![MemberSet::NONE];
        avoid.extend(members(holders).map(MemberSet::only));
        if self.array.geometry().tolerates > 1 {
            let others = self.all_members();
            for first in members(holders) {
                let pairs = members(others).filter(|second| *second != first);
                avoid.extend(pairs.map(|second| MemberSet::only(first).with(second)));
            }
        }
        let mut as_it_is: Option<Buf> = None;
        for avoid in avoid {
            let into = BufMut::for_overwrite((hi - lo) as usize).into_vec();
            let data = match self.array.read_avoiding(lo, into, avoid, class).await {
                Ok(mut parts) => parts.swap_remove(0).freeze(),
                Err(
                    BlockError::Medium { .. }
                    | BlockError::TooManyLost { .. }
                    | BlockError::Unsupported { .. },
                ) => continue,
                Err(error) => return Err(error.into()),
            };
            let bytes = data.slice((from - lo) as usize, (to - from) as usize);
            if !fits(&bytes) {
                if avoid.is_empty() {
                    as_it_is = Some(data);
                }
                continue;
            }
            if !avoid.is_empty() {
                tracing::warn!(array = %self.array.info().name, at = lo, ?avoid,
                    "a checksum did not fit; rebuilt from parity");
                self.state.borrow_mut().counters.repaired_blocks += (hi - lo) / BLOCK_BYTES;
                probe::count("blocks repaired", (hi - lo) / BLOCK_BYTES);
                // The checksum proves these bytes only. Neighbours in the same blocks, which another
                // record owns, become what the rest of the stripe says if it is of one mind, and
                // stay as they are otherwise.
                let whole = (lo, hi) == (from, to) || self.agrees(lo, &data, avoid, class).await;
                let before = as_it_is.as_ref().filter(|_| !whole).unwrap_or(&data);
                let mut good = BufMut::copy_of(before);
                good[(from - lo) as usize..(to - lo) as usize].copy_from_slice(&bytes);
                // The bytes are good whether or not the array takes them back.
                if let Err(error) = self.array.repair(lo, good.freeze().into_vec()).await {
                    tracing::warn!(at = lo, %error, "repair failed");
                }
            }
            return Ok(Some(bytes));
        }
        self.state.borrow_mut().counters.damaged_blocks += (hi - lo) / BLOCK_BYTES;
        tracing::error!(array = %self.array.info().name, at = lo, bytes = hi - lo,
            "nothing rebuilds these bytes");
        Ok(None)
    }

    /// Whether those that `data`, read around `avoid`, was made of agree with each other: made
    /// without one holder of data more, it is the same. One wrong member among them would show,
    /// whoever is left out: the two parities weigh every member differently, and of copies at least
    /// two are alike.
    async fn agrees(&self, at: u64, data: &[u8], avoid: MemberSet, class: IoClass) -> bool {
        let stripe = round_down(at, self.stripe_bytes);
        let holders = self.array.members_of(stripe, self.stripe_bytes);
        let Some(other) = (0..64).find(|at| holders.contains(*at) && !avoid.contains(*at)) else {
            return false;
        };
        let into = BufMut::for_overwrite(data.len()).into_vec();
        let again = self.array.read_avoiding(at, into, avoid.with(other), class).await;
        again.is_ok_and(|parts| parts[0][..] == *data)
    }
}
