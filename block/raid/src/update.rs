//! Updates: overwrites in place on levels with parity, stripe by stripe.
//!
//! Writes of one stripe take turns; what waits for its turn goes together, so that neighbours become one update, and
//! often a whole stripe. An update needs the parity of what it changes: from the old data and the old parity of just that
//! (*read-modify*), or from all data beside it (*reconstruct*), whichever asks for fewer chunks; with members missing
//! from whatever is left. New data and new parity are recorded in the [`crate::journal`] first, whole, then written in
//! place.
//!
//! What always holds:
//! - Whoever changes a stripe in place holds its lock.
//! - Data and parity of a stripe belong together whenever nobody holds its lock. So whoever recomputes a chunk from others
//!   sees to it that no update came between ([`Engine::reconstruct_still`]).
//! - A stripe is written, and neither declared fresh nor dirty, before its first update.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::journal::{Journal, Piece};
use crate::map::Bit;
use crate::member::add;
use crate::read::held;
use crate::redundancy::Redundancy;
use crate::write::Cutter;
use futures_util::future::join_all;
use levada_base::sync::oneshot;
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, BufMut, IoVec, planted};
use levada_device::{BlockError, Durability};
use levada_parity::{Code, PARITY_MAX};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;

/// New bytes of a stripe: where they begin in its data, in whole blocks.
#[derive(Clone)]
pub(crate) struct Patch {
    pub at: u64,
    pub bytes: Buf,
}

/// How well an update is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// It is in the journal.
    Durable,
    /// In the members' caches, until a flush.
    Volatile,
}

struct Waiting {
    patches: Vec<Patch>,
    /// Takes how it ended.
    done: oneshot::Sender<Result<Kept, BlockError>>,
}

/// Who updates what.
pub(crate) struct Updates {
    /// By stripe: somebody works on it, and these wait for their turn.
    turns: RefCell<HashMap<u64, Vec<Waiting>>>,
    /// Stripes that are being written in place, and by how many at once.
    in_place: RefCell<HashMap<u64, u32>>,
    /// Changes that began to be written in place, of stripes with the same number modulo [`BEGUN`].
    begun: RefCell<[u64; BEGUN]>,
}

/// So many counters tell readers that no update came between: few enough to be cheap, so many that an update of another stripe
/// seldom makes anybody read again.
const BEGUN: usize = 512;

impl Default for Updates {
    fn default() -> Self {
        let (turns, in_place) = Default::default();
        Self { turns, in_place, begun: RefCell::new([0; BEGUN]) }
    }
}

/// A stripe is being written in place until this is dropped.
pub(crate) struct InPlace<'a>(&'a Updates, u64);

impl Updates {
    pub fn begin(&self, stripe: u64) -> InPlace<'_> {
        *self.in_place.borrow_mut().entry(stripe).or_default() += 1;
        self.begun.borrow_mut()[stripe as usize % BEGUN] += 1;
        InPlace(self, stripe)
    }

    /// `None` while the stripe is being written in place; else the same again means that it was not meanwhile.
    pub fn stillness(&self, stripe: u64) -> Option<u64> {
        let is_still = !self.in_place.borrow().contains_key(&stripe);
        is_still.then(|| self.begun.borrow()[stripe as usize % BEGUN])
    }

    /// These stripes are given other contents by other means: what was read of them before does not belong to it.
    pub fn renew(&self, stripes: &Range<u64>) {
        let mut begun = self.begun.borrow_mut();
        stripes.clone().take(BEGUN).for_each(|stripe| begun[stripe as usize % BEGUN] += 1);
    }

    /// Stripes that are being updated, or will be.
    pub fn stripes(&self) -> Vec<u64> {
        let (turns, in_place) = (self.turns.borrow(), self.in_place.borrow());
        turns.keys().chain(in_place.keys()).copied().collect()
    }
}

impl Drop for InPlace<'_> {
    fn drop(&mut self) {
        let mut in_place = self.0.in_place.borrow_mut();
        if let Some(count) = in_place.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                in_place.remove(&self.1);
            }
        }
    }
}

/// Consecutive new blocks of one data chunk, in whole blocks.
pub(crate) struct Segment {
    pub chunk: usize,
    pub within: Range<u64>,
    pub bytes: Buf,
}

/// What one update makes of a range of a stripe's chunks: new contents, data first.
struct Contents {
    segments: Vec<Segment>,
    /// The parity chunks that somebody holds, over the whole range.
    parity: SmallVec<[(usize, Buf); PARITY_MAX]>,
}

impl Engine {
    /// An overwrite on a level with parity. Parts of stripes are durable when it returns, whatever `durability` says: they are
    /// in the journal.
    pub async fn update(
        self: &Rc<Self>,
        at: u64,
        from: IoVec,
        durability: Durability,
    ) -> Result<(), BlockError> {
        let Some(journal) = self.journal.clone() else {
            return Err(BlockError::NotFresh { stripe: at / self.layout.stripe_bytes() });
        };
        let from = in_blocks(from);
        let end = at + levada_base::buf::bytes_in(&from);
        self.prepare(self.stripes_of(at, end - at)).await?;
        let stripe_bytes = self.layout.stripe_bytes();
        let mut cutter = Cutter::new(from);
        let mut of_stripes = Vec::new();
        let mut start = at;
        while start < end {
            let stripe = start / stripe_bytes;
            let run = ((stripe + 1) * stripe_bytes).min(end) - start;
            let mut within = start % stripe_bytes;
            let patches = cutter.take(run).into_iter().map(|bytes| {
                let patch = Patch { at: within, bytes };
                within += patch.bytes.len() as u64;
                patch
            });
            let (done, outcome) = oneshot::channel();
            let waiting = Waiting { patches: patches.collect(), done };
            self.take_turn(&journal, stripe, waiting);
            of_stripes.push(outcome);
            start += run;
        }
        let outcomes = join_all(of_stripes).await.into_iter();
        let kept = outcomes.map(|outcome| outcome.unwrap_or(Err(BlockError::Gone)));
        let kept: Vec<Kept> = kept.collect::<Result<_, _>>()?;
        match durability {
            Durability::Fua if kept.contains(&Kept::Volatile) => self.flush().await,
            Durability::Fua | Durability::Volatile => Ok(()),
        }
    }

    /// Zeroes a range: whole stripes are given back, and read as zeroes.
    pub async fn update_zeroes(self: &Rc<Self>, at: u64, bytes: u64) -> Result<(), BlockError> {
        levada_device::check_range(&self.info, at, bytes)?;
        self.check_running()?;
        let stripe_bytes = self.layout.stripe_bytes();
        let (end, first) = (at + bytes, at.div_ceil(stripe_bytes));
        let whole = (end / stripe_bytes).saturating_sub(first);
        let zeroes = async |from: u64, to: u64| match from < to {
            true => {
                let zeroes = BufMut::zeroed((to - from) as usize).freeze().into_vec();
                self.overwrite(from, zeroes, Durability::Volatile).await
            }
            false => Ok(()),
        };
        if whole == 0 {
            // Not more than two stripes.
            return zeroes(at, end).await;
        }
        zeroes(at, first * stripe_bytes).await?;
        self.discard_stripes(first, whole).await?;
        zeroes((first + whole) * stripe_bytes, end).await
    }

    /// Lets patches of a stripe wait for their turn.
    fn take_turn(self: &Rc<Self>, journal: &Rc<Journal>, stripe: u64, waiting: Waiting) {
        let is_first = {
            let mut turns = self.updates.turns.borrow_mut();
            let is_first = !turns.contains_key(&stripe);
            turns.entry(stripe).or_default().push(waiting);
            is_first
        };
        if is_first {
            let (engine, journal) = (Rc::clone(self), Rc::clone(journal));
            levada_base::reactor::spawn_in(&self.group, async move {
                engine.take_turns(&journal, stripe).await;
            });
        }
    }

    async fn take_turns(self: &Rc<Self>, journal: &Rc<Journal>, stripe: u64) {
        loop {
            let (start, end) = self.stripe_range(stripe, 1);
            let guard = self.locks.lock(start, end).await;
            if !self.is_settled(stripe) {
                // Discarded, or declared fresh, since it was prepared.
                drop(guard);
                if let Err(error) = self.prepare(stripe..stripe + 1).await {
                    let all = self.updates.turns.borrow_mut().remove(&stripe);
                    for waiting in all.into_iter().flatten() {
                        waiting.done.send(Err(error.clone()));
                    }
                    return;
                }
                continue;
            }
            let batch = {
                let mut turns = self.updates.turns.borrow_mut();
                let waiting = turns.get_mut(&stripe).map(std::mem::take).unwrap_or_default();
                if waiting.is_empty() {
                    turns.remove(&stripe);
                    return;
                }
                waiting
            };
            let all = batch.iter().flat_map(|write| write.patches.iter().cloned());
            let mut results = vec![self.update_stripe(journal, stripe, all).await; batch.len()];
            if batch.len() > 1 && matches!(results[0], Err(BlockError::Medium { .. })) {
                // Not all of them meet what cannot be read.
                for (write, result) in batch.iter().zip(&mut results) {
                    let patches = write.patches.iter().cloned();
                    *result = self.update_stripe(journal, stripe, patches).await;
                }
            }
            drop(guard);
            for (write, result) in batch.into_iter().zip(results) {
                write.done.send(result);
            }
        }
    }

    /// Whether a stripe's data and parity are there and belong together.
    pub fn is_settled(&self, stripe: u64) -> bool {
        self.map.has(Bit::Written, stripe)
            && !self.map.has(Bit::Dirty, stripe)
            && !self.map.has(Bit::Fresh, stripe)
    }

    /// Makes stripes ready to be updated: those that hold nothing are zeroed, those that were written whole are flushed.
    async fn prepare(self: &Rc<Self>, stripes: Range<u64>) -> Result<(), BlockError> {
        if stripes.clone().all(|stripe| self.is_settled(stripe)) {
            return Ok(());
        }
        let end = (stripes.end + self.marked_ahead()).min(self.layout.stripes);
        let _preparing = self.preparing.lock(stripes.start, end).await;
        let (start_at, end_at) = self.stripe_range(stripes.start, end - stripes.start);
        let _guard = self.locks.lock(start_at, end_at).await;
        let holds = |stripe: &u64| {
            self.map.has(Bit::Written, *stripe) && !self.map.has(Bit::Fresh, *stripe)
        };
        let mut empty: Vec<u64> = stripes.clone().filter(|stripe| !holds(stripe)).collect();
        if !empty.is_empty() {
            let untouched = |stripe: &u64| !self.map.has(Bit::Written, *stripe);
            empty.extend((stripes.end..end).take_while(untouched));
            self.void_records(&(empty[0]..empty[empty.len() - 1] + 1)).await?;
            self.zero(&empty).await?;
            for stripe in &empty {
                let range = *stripe..stripe + 1;
                self.map.set(Bit::Written, range.clone(), true);
                self.map.set(Bit::Fresh, range.clone(), false);
                self.map.set(Bit::Dirty, range.clone(), false);
                self.map.begin_anew(range);
            }
            self.persist(empty[0]..empty[empty.len() - 1] + 1).await?;
        }
        if stripes.clone().any(|stripe| self.map.has(Bit::Dirty, stripe)) {
            self.flush_members().await?;
        }
        self.check_running()
    }

    /// Changes a stripe; the caller holds its lock.
    async fn update_stripe(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        stripe: u64,
        patches: impl Iterator<Item = Patch>,
    ) -> Result<Kept, BlockError> {
        self.note_missed(stripe).await?;
        let mut segments = match self.has_parts_of_rows() {
            true => self.segments(self.in_rows(stripe, patches.collect()).await?),
            false => self.segments(patches),
        };
        if self.may_be_listed(journal, stripe, &segments) {
            match self.overwrite_whole(journal, stripe, segments).await? {
                None => return Ok(Kept::Volatile),
                Some(not_listed) => segments = not_listed,
            }
        }
        if journal.is_listed(stripe) && !planted!("raid-update-of-listed-stripe") {
            // Parity that is recorded must find the data that it was computed from.
            self.void_records(&(stripe..stripe + 1)).await?;
        }
        // So many blocks of each chunk that a record takes them.
        let chunks: BTreeSet<usize> = segments.iter().map(|segment| segment.chunk).collect();
        let rows = journal.limit() / (chunks.len() + self.layout.level.tolerates()) as u64;
        let step = rows.max(1) * BLOCK_BYTES;
        let steps = runs_of_rows(&segments).into_iter().flat_map(|run| {
            let end = run.end;
            run.step_by(step as usize).map(move |at| at..(at + step).min(end))
        });
        let updates = steps.map(|rows| self.update_run(journal, stripe, &segments, rows));
        join_all(updates).await.into_iter().collect::<Result<(), _>>()?;
        Ok(Kept::Durable)
    }

    /// Changes some rows of a stripe: at once if that can be, else row by row, for bad places in several chunks are seldom
    /// at the same one.
    async fn update_run(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        stripe: u64,
        segments: &[Segment],
        rows: Range<u64>,
    ) -> Result<(), BlockError> {
        let of = |rows: &Range<u64>| segments.iter().filter_map(|s| cut(s, rows)).collect();
        let result = self.update_rows(journal, stripe, of(&rows)).await;
        if rows.end - rows.start == BLOCK_BYTES || !matches!(result, Err(BlockError::Medium { .. }))
        {
            return result;
        }
        self.check_running()?;
        for at in rows.step_by(BLOCK_BYTES as usize) {
            self.update_rows(journal, stripe, of(&(at..at + BLOCK_BYTES))).await?;
        }
        Ok(())
    }

    /// What the patches make of each chunk, the later ones over the earlier.
    fn segments(&self, patches: impl IntoIterator<Item = Patch>) -> Vec<Segment> {
        let chunk_bytes = self.layout.chunk_bytes;
        let mut segments: Vec<Segment> = Vec::new();
        for patch in patches {
            let mut start = patch.at;
            let end = patch.at + patch.bytes.len() as u64;
            while start < end {
                let (chunk, within) = ((start / chunk_bytes) as usize, start % chunk_bytes);
                let run = (chunk_bytes - within).min(end - start);
                let bytes = patch.bytes.slice((start - patch.at) as usize, run as usize);
                lay_over(&mut segments, Segment { chunk, within: within..within + run, bytes });
                start += run;
            }
        }
        segments.sort_by_key(|segment| (segment.chunk, segment.within.start));
        segments
    }

    /// One update that a record takes. All rows between the first and the last are changed in some chunk.
    async fn update_rows(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        stripe: u64,
        segments: Vec<Segment>,
    ) -> Result<(), BlockError> {
        let Redundancy::Parity(code) = &self.redundancy else {
            unreachable!("only levels with parity have a journal")
        };
        let start = segments.iter().map(|segment| segment.within.start).min().unwrap_or(0);
        let end = segments.iter().map(|segment| segment.within.end).max().unwrap_or(0);
        let rows = start..end;
        let contents = self.new_contents(code, stripe, rows.clone(), segments).await?;
        self.note_patched(stripe);
        // Parity of which nobody is known to be the holder is left out: he must be on record as out, or he would be believed
        // after a power cut.
        self.settle().await?;

        let mut pieces = Vec::new();
        let mut payload = IoVec::new();
        let mut writes = Vec::new();
        let new = contents.segments.iter().map(|s| (s.chunk, s.within.clone()));
        let new: SmallVec<[(usize, Range<u64>); 8]> = new.collect();
        let segments = contents.segments.iter().map(|s| (s.chunk, s.within.start, &s.bytes));
        let parity = contents.parity.iter().map(|(chunk, bytes)| (*chunk, rows.start, bytes));
        for (chunk, within, bytes) in segments.chain(parity) {
            let (first, blocks) = (within / BLOCK_BYTES, bytes.len() as u64 / BLOCK_BYTES);
            pieces.push(Piece { stripe, chunk, first, blocks });
            payload.push(bytes.clone());
            let place = self.layout.place(stripe, chunk);
            writes.push((place, within, bytes.clone()));
        }
        let logged = match planted!("raid-update-not-recorded") || self.records_nothing.get() {
            true => None,
            false => Some(self.log(journal, stripe, pieces, payload).await?),
        };
        let in_place = self.updates.begin(stripe);
        let writes = writes.into_iter().filter_map(|(place, within, bytes)| {
            let member = self.player(place.role)?;
            let at = self.member_offset(place.slot, within);
            let from = bytes.into_vec();
            Some(async move { self.member_write(&member, at, from, Durability::Volatile).await })
        });
        join_all(writes).await;
        drop(in_place);
        // Those that missed it are out, and on record as such.
        self.settle().await?;
        if !self.lost.is_empty() {
            // Its record keeps its meaning until the list is shorter.
            new.into_iter().for_each(|(chunk, within)| self.lost.remove(stripe, chunk, within));
            for chunk in self.layout.data_chunks()..self.layout.chunks() {
                self.lost.remove(stripe, chunk, rows.clone());
            }
            self.persist_lost().await?;
        }
        match logged {
            Some(logged) => journal.done(logged),
            None => self.writes.set(self.writes.get() + 1),
        }
        Ok(())
    }

    /// New data and the parity that belongs to it, in the way that reads fewer chunks.
    async fn new_contents(
        self: &Rc<Self>,
        code: &Code,
        stripe: u64,
        rows: Range<u64>,
        segments: Vec<Segment>,
    ) -> Result<Contents, BlockError> {
        let data_chunks = self.layout.data_chunks();
        let rest = (0..data_chunks).filter(|chunk| !covers(&segments, *chunk, &rows)).count();
        let parity: SmallVec<[usize; PARITY_MAX]> = (data_chunks..self.layout.chunks())
            .filter(|chunk| self.has_chunk(stripe, *chunk))
            .collect();
        // Made anew, the parity would agree with what is wrong.
        let is_suspect = self.map.has(Bit::Suspect, stripe);
        let has_old = segments.iter().all(|segment| self.has_chunk(stripe, segment.chunk));
        // Who is being rebuilt gets his parity whole: the rebuild may be passing over this stripe just now, because it held
        // nothing when it looked.
        let all_have = (data_chunks..self.layout.chunks()).all(|chunk| {
            parity.contains(&chunk) || self.player(self.layout.place(stripe, chunk).role).is_none()
        });
        if has_old
            && (all_have || planted!("raid-update-leaves-out-who-is-rebuilt"))
            && (segments.len() + parity.len() < rest || is_suspect)
            && let Some(parity) =
                self.modified_parity(code, stripe, &rows, &segments, &parity).await
        {
            return Ok(Contents { segments, parity });
        }
        self.reconstructed(code, stripe, rows, segments).await
    }

    /// What was wrong in this stripe is so in its parity as well from now on, as a scrub has to know. The caller settles.
    pub fn note_patched(&self, stripe: u64) {
        self.map.set(Bit::Patched, stripe..stripe + 1, true);
        if !self.patched.replace(true) {
            add(&self.standing_wanted, 1);
        }
    }

    pub fn has_chunk(&self, stripe: u64, chunk: usize) -> bool {
        self.holder(self.layout.place(stripe, chunk), MemberSet::NONE).is_some()
    }

    /// The parity after what the segments change, from the old of both. `None` when some of it cannot be read.
    async fn modified_parity(
        self: &Rc<Self>,
        code: &Code,
        stripe: u64,
        rows: &Range<u64>,
        segments: &[Segment],
        parity: &[usize],
    ) -> Option<SmallVec<[(usize, Buf); PARITY_MAX]>> {
        let data_chunks = self.layout.data_chunks();
        let wanted = segments.iter().map(|segment| (segment.chunk, segment.within.clone()));
        let wanted = wanted.chain(parity.iter().map(|chunk| (*chunk, rows.clone())));
        let reads = wanted.map(async |(chunk, within)| {
            let place = self.layout.place(stripe, chunk);
            let member = self.holder(place, MemberSet::NONE)?;
            let at = self.member_offset(place.slot, within.start);
            let into = BufMut::for_overwrite((within.end - within.start) as usize).into_vec();
            self.member_read(&member, at, into).await.ok()?.pop()
        });
        let mut old: Vec<BufMut> = join_all(reads).await.into_iter().collect::<Option<_>>()?;
        let mut held = old.split_off(segments.len());
        // Those that nobody holds are computed beside the others, and thrown away.
        let mut lost: Vec<(usize, BufMut)> = (data_chunks..self.layout.chunks())
            .filter(|chunk| !parity.contains(chunk))
            .map(|chunk| (chunk, BufMut::for_overwrite((rows.end - rows.start) as usize)))
            .collect();
        for (segment, old) in segments.iter().zip(&old) {
            let from = (segment.within.start - rows.start) as usize;
            let range = from..from + segment.bytes.len();
            let mut into: SmallVec<[(usize, &mut [u8]); PARITY_MAX]> = SmallVec::new();
            into.extend(
                parity.iter().zip(&mut held).map(|(c, bytes)| (*c, &mut bytes[range.clone()])),
            );
            into.extend(lost.iter_mut().map(|(c, bytes)| (*c, &mut bytes[range.clone()])));
            into.sort_by_key(|(chunk, _)| *chunk);
            let mut into: SmallVec<[&mut [u8]; PARITY_MAX]> =
                into.into_iter().map(|(_, bytes)| bytes).collect();
            code.update_delta(segment.chunk, old, &segment.bytes, &mut into);
        }
        Some(parity.iter().copied().zip(held.into_iter().map(BufMut::freeze)).collect())
    }

    /// The same from all data, of which what is not new is read, or recomputed.
    async fn reconstructed(
        self: &Rc<Self>,
        code: &Code,
        stripe: u64,
        rows: Range<u64>,
        segments: Vec<Segment>,
    ) -> Result<Contents, BlockError> {
        let data_chunks = self.layout.data_chunks();
        let bytes = (rows.end - rows.start) as usize;
        let whole: SmallVec<[Option<Buf>; 16]> =
            (0..data_chunks).map(|chunk| whole_chunk(&segments, chunk, &rows)).collect();
        let missing = (0..data_chunks).filter(|chunk| whole[*chunk].is_none());
        let mut old = match missing.clone().all(|chunk| self.has_chunk(stripe, chunk)) {
            true => {
                let skip = (0..self.layout.chunks())
                    .filter(|chunk| *chunk >= data_chunks || whole[*chunk].is_some())
                    .fold(0u64, |bits, chunk| bits | 1 << chunk);
                let enough = missing.clone().count();
                self.gather(stripe, rows.clone(), skip, MemberSet::NONE, enough).await.chunks
            }
            false => (0..self.layout.chunks()).map(|_| None).collect(),
        };
        if missing.clone().any(|chunk| old[chunk].is_none()) {
            // The old data of the others, whatever it takes.
            let all = data_chunks;
            old = self.gather(stripe, rows.clone(), 0, MemberSet::NONE, all).await.chunks;
            let mut lost: SmallVec<[(usize, BufMut); PARITY_MAX]> = missing
                .clone()
                .filter(|chunk| old[*chunk].is_none())
                .map(|chunk| (chunk, BufMut::for_overwrite(bytes)))
                .collect();
            let wanted = lost.iter_mut().map(|(chunk, into)| (*chunk, &mut into[..]));
            let recovered = self.redundancy.recompute(held(&old), wanted);
            if !recovered {
                self.check_running()?;
                let (at, _) = self.stripe_range(stripe, 1);
                return Err(BlockError::Medium { at, bytes: bytes as u64 });
            }
            for (chunk, bytes) in lost {
                old[chunk] = Some(bytes);
            }
        }
        // What is new over what was there.
        for segment in &segments {
            if let Some(held) =
                old[segment.chunk].as_mut().filter(|_| whole[segment.chunk].is_none())
            {
                let from = (segment.within.start - rows.start) as usize;
                held[from..from + segment.bytes.len()].copy_from_slice(&segment.bytes);
            }
        }
        let mut data: SmallVec<[&[u8]; 16]> = SmallVec::new();
        for chunk in 0..data_chunks {
            data.push(match (&whole[chunk], &old[chunk]) {
                (Some(new), _) => new,
                (None, Some(held)) => held,
                (None, None) => unreachable!("read, or recomputed"),
            });
        }
        let mut parity: SmallVec<[BufMut; PARITY_MAX]> =
            (0..code.parity_chunks()).map(|_| BufMut::for_overwrite(bytes)).collect();
        let mut into: SmallVec<[&mut [u8]; PARITY_MAX]> =
            parity.iter_mut().map(|chunk| &mut chunk[..]).collect();
        code.encode(&data, &mut into);
        drop((data, into));
        let parity = parity.into_iter().zip(data_chunks..);
        let parity = parity.map(|(bytes, chunk)| (chunk, bytes.freeze())).collect();
        Ok(Contents { segments, parity })
    }
}

/// The same bytes in buffers of whole rows, but for what is less at the end.
fn in_blocks(parts: IoVec) -> IoVec {
    let block = BLOCK_BYTES as usize;
    if parts.iter().all(|part| part.len().is_multiple_of(block)) {
        return parts.into_iter().filter(|part| !part.is_empty()).collect();
    }
    let mut whole = BufMut::for_overwrite(parts.iter().map(|part| part.len()).sum());
    let mut at = 0;
    for part in &parts {
        whole[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    whole.freeze().into_vec()
}

/// The rows that segments change, each run of them.
fn runs_of_rows(segments: &[Segment]) -> Vec<Range<u64>> {
    let mut rows: Vec<Range<u64>> = segments.iter().map(|s| s.within.clone()).collect();
    rows.sort_unstable_by_key(|rows| rows.start);
    let mut runs: Vec<Range<u64>> = Vec::new();
    for rows in rows {
        match runs.last_mut() {
            Some(run) if rows.start <= run.end => run.end = run.end.max(rows.end),
            Some(_) | None => runs.push(rows),
        }
    }
    runs
}

/// The part of a segment that lies in `within`.
fn cut(segment: &Segment, within: &Range<u64>) -> Option<Segment> {
    let start = segment.within.start.max(within.start);
    let end = segment.within.end.min(within.end);
    (start < end).then(|| Segment {
        chunk: segment.chunk,
        within: start..end,
        bytes: segment.bytes.slice((start - segment.within.start) as usize, (end - start) as usize),
    })
}

/// Whether segments, which do not overlap, make up all rows of a chunk.
pub(crate) fn covers(segments: &[Segment], chunk: usize, rows: &Range<u64>) -> bool {
    let of_chunk = segments.iter().filter(|segment| segment.chunk == chunk);
    of_chunk.map(|segment| segment.within.end - segment.within.start).sum::<u64>()
        == rows.end - rows.start
}

/// All rows of a chunk, where segments make them up.
fn whole_chunk(segments: &[Segment], chunk: usize, rows: &Range<u64>) -> Option<Buf> {
    if !covers(segments, chunk, rows) {
        return None;
    }
    let mut of_chunk = segments.iter().filter(|segment| segment.chunk == chunk);
    if let Some(only) = of_chunk.clone().find(|segment| segment.within == *rows) {
        return Some(only.bytes.clone());
    }
    let mut whole = BufMut::for_overwrite((rows.end - rows.start) as usize);
    of_chunk.by_ref().for_each(|segment| {
        let from = (segment.within.start - rows.start) as usize;
        whole[from..from + segment.bytes.len()].copy_from_slice(&segment.bytes);
    });
    Some(whole.freeze())
}

/// Adds a segment, which takes the place of what it covers.
fn lay_over(segments: &mut Vec<Segment>, new: Segment) {
    let overlaps = |old: &Segment| {
        old.chunk == new.chunk
            && old.within.start < new.within.end
            && new.within.start < old.within.end
    };
    for old in segments.extract_if(.., |old| overlaps(old)).collect::<Vec<_>>() {
        segments.extend(cut(&old, &(0..new.within.start)));
        segments.extend(cut(&old, &(new.within.end..u64::MAX)));
    }
    segments.push(new);
}
