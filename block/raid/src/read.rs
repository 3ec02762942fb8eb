//! Reads: array bytes to member reads, reconstruction where a member is missing.
//!
//! The direct way sends every member one vectored request per contiguous run, all at once, and
//! recomputes what missing members hold beside that. When a member fails meanwhile, the careful
//! way reads piece by piece, recomputes what cannot be read, and writes it back (read repair).
//!
//! What always holds: a byte handed out was read from a member that holds it, recomputed from
//! enough others, or is the zero of a stripe that was never written. Nothing here changes a
//! stripe except read repair, which holds the stripe's lock.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::layout::{Level, Place};
use crate::map::Bit;
use crate::member::{Member, add};
use crate::status::ArrayEvent;
use futures_util::future::{join, join_all};
use levada_base::buf::bytes_in;
use levada_base::{BufMut, IoVecMut};
use levada_device::{BlockError, Durability, check_range};
use levada_parity::Slot;
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

/// Chunks of one stripe, or one range of them; `None` where not at hand.
pub(crate) type Chunks = SmallVec<[Option<BufMut>; 16]>;

/// A contiguous read of one member.
struct Run {
    member: Rc<Member>,
    at: u64,
    end: u64,
    parts: IoVecMut,
    /// Which pieces the parts are.
    pieces: SmallVec<[u32; 8]>,
}

/// A piece that must be recomputed.
struct Missing {
    piece: u32,
    stripe: u64,
    chunk: usize,
    within: Range<u64>,
    into: BufMut,
}

/// What [`Engine::gather`] got.
pub(crate) struct Gathered {
    pub chunks: Chunks,
    /// Chunks that could not be read, as bits.
    pub bad: u64,
}

impl Gathered {
    pub fn count(&self) -> usize {
        self.chunks.iter().flatten().count()
    }
}

impl Engine {
    pub async fn read(
        self: &Rc<Self>,
        at: u64,
        into: IoVecMut,
        avoid: MemberSet,
    ) -> Result<IoVecMut, BlockError> {
        let bytes = bytes_in(&into);
        check_range(&self.info, at, bytes)?;
        self.check_running()?;
        let lengths: SmallVec<[usize; 4]> = into.iter().map(|part| part.len()).collect();
        match self.read_direct(at, into, avoid).await {
            Some(filled) => Ok(filled),
            // The buffers went down with the failed request.
            None => self.read_carefully(at, &lengths, avoid).await,
        }
    }

    /// Who can be asked for a data chunk: its holder, or the idlest of the copies.
    fn source(&self, stripe: u64, chunk: usize, avoid: MemberSet) -> Option<(Rc<Member>, Place)> {
        let at = |chunk: usize| {
            let place = self.layout.place(stripe, chunk);
            Some((self.holder(place, avoid)?, place))
        };
        match self.layout.level {
            Level::Raid0 | Level::Raid6 => at(chunk),
            // Among equally idle copies the stripe's number decides, to spread them.
            Level::Raid1 { copies } => (0..copies)
                .map(|i| (i + (stripe / self.layout.width as u64) as usize) % copies)
                .filter_map(at)
                .min_by_key(|(member, _)| member.in_flight.get()),
        }
    }

    /// `None` when a member failed, whatever the reason.
    async fn read_direct(
        self: &Rc<Self>,
        at: u64,
        mut into: IoVecMut,
        avoid: MemberSet,
    ) -> Option<IoVecMut> {
        let chunk_bytes = self.layout.chunk_bytes;
        let bytes = bytes_in(&into);
        if into.len() == 1 && at % chunk_bytes + bytes <= chunk_bytes {
            // Most small reads: nothing to split.
            let (stripe, chunk) = self.chunk_at(at);
            if !self.map.has(Bit::Written, stripe) {
                into[0].fill(0);
                return Some(into);
            }
            if let Some((member, place)) = self.source(stripe, chunk, avoid) {
                let at = self.member_offset(place.slot, at % chunk_bytes);
                return self.member_read(&member, at, into).await.ok();
            }
        }

        let lengths: SmallVec<[usize; 4]> = into.iter().map(|part| part.len()).collect();
        let mut done: Vec<Option<BufMut>> = Vec::new();
        let mut runs: Vec<Run> = Vec::new();
        let mut last_run = [u32::MAX; 64];
        let mut missing = Vec::new();
        let mut part_at = at;
        for mut part in into {
            let part_bytes = part.len() as u64;
            self.pieces(part_at, part_bytes, |stripe, chunk, within, run_bytes| {
                let mut buf = part.split_to(run_bytes as usize);
                let piece = done.len() as u32;
                done.push(None);
                if !self.map.has(Bit::Written, stripe) {
                    buf.fill(0);
                    done[piece as usize] = Some(buf);
                    return;
                }
                let Some((member, place)) = self.source(stripe, chunk, avoid) else {
                    let within = within..within + run_bytes;
                    missing.push(Missing { piece, stripe, chunk, within, into: buf });
                    return;
                };
                let at = self.member_offset(place.slot, within);
                let last = &mut last_run[member.index];
                match runs.get_mut(*last as usize) {
                    Some(run) if run.end == at => {
                        run.end += run_bytes;
                        run.parts.push(buf);
                        run.pieces.push(piece);
                    }
                    Some(_) | None => {
                        *last = runs.len() as u32;
                        let (parts, pieces) = (buf.into_vec(), smallvec::smallvec![piece]);
                        runs.push(Run { member, at, end: at + run_bytes, parts, pieces });
                    }
                }
            });
            part_at += part_bytes;
        }

        let reads = runs.into_iter().map(|run| async move {
            let parts = self.member_read(&run.member, run.at, run.parts).await.ok()?;
            Some((run.pieces, parts))
        });
        let recoveries = missing.into_iter().map(|mut lost| async move {
            let (within, into) = (lost.within.clone(), &mut lost.into);
            let bad =
                self.reconstruct(lost.stripe, lost.chunk, within, avoid, 0, into).await.ok()?;
            // A medium error on the way is repaired by the careful way.
            (bad == 0).then_some(lost)
        });
        let (reads, recoveries) = join(join_all(reads), join_all(recoveries)).await;
        for read in reads {
            let (pieces, parts) = read?;
            for (piece, part) in pieces.into_iter().zip(parts) {
                done[piece as usize] = Some(part);
            }
        }
        for recovery in recoveries {
            let lost = recovery?;
            done[lost.piece as usize] = Some(lost.into);
        }
        let mut done = done.into_iter().flatten();
        let whole = lengths.into_iter().map(|length| {
            let mut part = done.next().unwrap_or_else(|| BufMut::for_overwrite(0));
            while part.len() < length {
                part.unsplit(done.next().expect("the pieces make up the parts"));
            }
            part
        });
        Some(whole.collect())
    }

    fn chunk_at(&self, at: u64) -> (u64, usize) {
        let (chunk, data_chunks) = (at / self.layout.chunk_bytes, self.layout.data_chunks() as u64);
        (chunk / data_chunks, (chunk % data_chunks) as usize)
    }

    /// Into new memory, piece by piece.
    async fn read_carefully(
        self: &Rc<Self>,
        at: u64,
        lengths: &[usize],
        avoid: MemberSet,
    ) -> Result<IoVecMut, BlockError> {
        let mut filled = IoVecMut::new();
        let mut part_at = at;
        for &length in lengths {
            let mut part = BufMut::for_overwrite(length);
            let mut pieces = Vec::new();
            self.pieces(part_at, length as u64, |stripe, chunk, within, bytes| {
                pieces.push((stripe, chunk, within..within + bytes));
            });
            let mut filled_bytes = 0;
            for (stripe, chunk, within) in pieces {
                let bytes = (within.end - within.start) as usize;
                let into = &mut part[filled_bytes..filled_bytes + bytes];
                self.read_piece(stripe, chunk, within, avoid, into).await?;
                filled_bytes += bytes;
            }
            filled.push(part);
            part_at += length as u64;
        }
        // Members that failed on the way are out: on record before anything is answered, so
        // that a later owner does not believe what they hold.
        self.settle().await?;
        Ok(filled)
    }

    async fn read_piece(
        self: &Rc<Self>,
        stripe: u64,
        chunk: usize,
        within: Range<u64>,
        avoid: MemberSet,
        into: &mut [u8],
    ) -> Result<(), BlockError> {
        if !self.map.has(Bit::Written, stripe) {
            into.fill(0);
            return Ok(());
        }
        let mut bad = 0u64;
        loop {
            self.check_running()?;
            let place = self.layout.place(stripe, chunk);
            let holder = if bad >> chunk & 1 == 1 { None } else { self.holder(place, avoid) };
            let Some(member) = holder else {
                bad |= self.reconstruct(stripe, chunk, within.clone(), avoid, bad, into).await?;
                break;
            };
            let target = BufMut::for_overwrite(into.len()).into_vec();
            let at = self.member_offset(place.slot, within.start);
            match self.member_read(&member, at, target).await {
                Ok(parts) => {
                    into.copy_from_slice(&parts[0]);
                    break;
                }
                // Either the member is out by now, or these bytes of it are unreadable.
                Err(_) if self.holder(place, avoid).is_none() => {}
                Err(_) => bad |= 1 << chunk,
            }
        }
        for chunk in (0..self.layout.chunks()).filter(|chunk| bad >> chunk & 1 == 1) {
            self.rewrite(stripe, chunk, within.clone()).await;
        }
        Ok(())
    }

    /// Reads a range of a stripe's chunks from those that have it, until `enough` are at hand.
    /// `skip` are chunks not to read, as bits.
    pub async fn gather(
        &self,
        stripe: u64,
        within: Range<u64>,
        skip: u64,
        avoid: MemberSet,
        enough: usize,
    ) -> Gathered {
        let chunks = self.layout.chunks();
        let bytes = (within.end - within.start) as usize;
        let mut gathered = Gathered { chunks: (0..chunks).map(|_| None).collect(), bad: 0 };
        loop {
            let wanted = enough.saturating_sub(gathered.count());
            let can = |chunk: &usize| {
                gathered.chunks[*chunk].is_none() && (skip | gathered.bad) >> chunk & 1 == 0
            };
            let sources: SmallVec<[_; 16]> = (0..chunks)
                .filter(can)
                .filter_map(|chunk| {
                    let place = self.layout.place(stripe, chunk);
                    Some((chunk, place, self.holder(place, avoid)?))
                })
                .take(wanted)
                .collect();
            if sources.is_empty() {
                return gathered;
            }
            let reads = sources.iter().map(|(_, place, member)| {
                let at = self.member_offset(place.slot, within.start);
                self.member_read(member, at, BufMut::for_overwrite(bytes).into_vec())
            });
            let results = join_all(reads).await;
            for ((chunk, ..), result) in sources.iter().zip(results) {
                match result {
                    Ok(mut parts) => gathered.chunks[*chunk] = parts.pop(),
                    Err(_) => gathered.bad |= 1 << chunk,
                }
            }
        }
    }

    /// Recomputes a range of a chunk from the others. `bad` are chunks known to be unreadable;
    /// gives those that turned out so.
    pub async fn reconstruct(
        &self,
        stripe: u64,
        chunk: usize,
        within: Range<u64>,
        avoid: MemberSet,
        bad: u64,
        into: &mut [u8],
    ) -> Result<u64, BlockError> {
        let enough = self.layout.data_chunks();
        let gathered = self.gather(stripe, within.clone(), bad | 1 << chunk, avoid, enough).await;
        let mut slots: SmallVec<[Slot<'_>; 16]> = SmallVec::new();
        let mut into = Some(into);
        for (i, held) in gathered.chunks.iter().enumerate() {
            slots.push(match held {
                Some(bytes) => Slot::Present(bytes),
                None if i == chunk => Slot::Wanted(into.take().expect("one chunk is wanted")),
                None => Slot::Absent,
            });
        }
        if !self.redundancy.recover(&mut slots) {
            self.check_running()?;
            let chunks_before = stripe * self.layout.data_chunks() as u64 + chunk as u64;
            let at = chunks_before * self.layout.chunk_bytes + within.start;
            return Err(BlockError::Medium { at, bytes: within.end - within.start });
        }
        Ok(gathered.bad)
    }

    /// Read repair: writes what a chunk should hold where it could not be read. Best effort: a
    /// stripe whose redundancy is not settled is left alone, scrub and rebuild come by later.
    async fn rewrite(self: &Rc<Self>, stripe: u64, chunk: usize, within: Range<u64>) {
        let (start, end) = self.stripe_range(stripe, 1);
        let _guard = self.locks.lock(start, end).await;
        let unsettled = !self.layout.overwrites() && self.map.has(Bit::Dirty, stripe);
        let place = self.layout.place(stripe, chunk);
        let member = self.holder(place, MemberSet::NONE);
        let (false, true, Some(member)) = (unsettled, self.map.has(Bit::Written, stripe), member)
        else {
            return;
        };
        let mut bytes = BufMut::for_overwrite((within.end - within.start) as usize);
        let all = MemberSet::NONE;
        if self.reconstruct(stripe, chunk, within.clone(), all, 0, &mut bytes).await.is_err() {
            return;
        }
        let at = self.member_offset(place.slot, within.start);
        let written =
            self.member_write(&member, at, bytes.freeze().into_vec(), Durability::Volatile);
        if written.await.is_ok() {
            self.note_repair(&member, stripe);
        }
    }

    pub fn note_repair(&self, member: &Rc<Member>, stripe: u64) {
        add(&member.stats.repairs, 1);
        let (member, name) = (member.index, member.name.clone());
        self.emit(&ArrayEvent::Repaired { member, name, stripe });
    }
}
