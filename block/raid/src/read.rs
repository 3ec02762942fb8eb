//! Reads: array bytes to member reads, reconstruction where a member is missing.
//!
//! The direct way sends every member one vectored request per contiguous run, all at once, and
//! recomputes what missing members hold beside that. When a member fails meanwhile, the careful
//! way reads piece by piece, recomputes what cannot be read, and writes it back (read repair).
//!
//! What always holds:
//! - A byte handed out was read from a member that holds it, recomputed from enough others, or is
//!   the zero of a stripe that was never written.
//! - Bytes are called unreadable only after everything that could not be read was asked once
//!   more: a read takes time, and what failed at its beginning may be repaired by its end, when a
//!   member is lost.
//! - Nothing here changes a stripe except read repair, which holds the stripe's lock.
//! - A slow member ([`crate::slow`]) is done without only if what the others say of it is at hand at once: nothing of that
//!   waits for a lock, is repaired or reported. Else it is asked.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::layout::{Level, Place};
use crate::map::Bit;
use crate::member::{Member, add};
use crate::neighbours::Shared;
use crate::redundancy::Redundancy;
use crate::rows::ROW_BYTES;
use crate::status::ArrayEvent;
use futures_util::future::{join_all, join3};
use levada_base::buf::bytes_in;
use levada_base::{BufMut, IoVecMut, planted, probe};
use levada_device::{BlockError, Durability, check_range};
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

/// One piece of a request, in order of address.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Piece {
    stripe: u64,
    chunk: usize,
    within: u64,
    bytes: u64,
}

/// A stripe that the request covers whole, with chunks missing: what the request reads of it
/// anyway and as many redundant chunks are enough to recompute them.
struct Whole {
    stripe: u64,
    /// Number of its first data chunk among the pieces.
    first: usize,
    /// Redundant chunks read in addition: chunk, and number among the pieces.
    extra: SmallVec<[(usize, usize); 2]>,
    /// The missing chunks and where they go.
    lost: SmallVec<[(usize, BufMut); 2]>,
}

/// A piece that is not read directly.
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

/// What is at hand of each chunk.
pub(crate) fn held(chunks: &Chunks) -> impl Iterator<Item = Option<&[u8]>> {
    chunks.iter().map(|held| held.as_ref().map(|bytes| &bytes[..]))
}

impl Gathered {
    pub fn held(&self) -> impl Iterator<Item = Option<&[u8]>> {
        held(&self.chunks)
    }

    pub fn count(&self) -> usize {
        self.chunks.iter().flatten().count()
    }
}

/// Whom a request does without: those that are avoided, and slow ones where that can be.
#[derive(Clone, Copy)]
struct Whom {
    avoid: MemberSet,
    shunned: MemberSet,
    /// Anybody's answer will do, also one that a neighbour got.
    may_share: bool,
}

impl Whom {
    /// All are asked alike.
    fn is_anybody(self) -> bool {
        self.may_share && self.avoid.is_empty() && self.shunned.is_empty()
    }

    fn avoided_in(self, engine: &Engine, stripe: u64) -> MemberSet {
        engine.avoided_in(stripe, self.avoid, self.shunned)
    }
}

/// What one request comes to on the members.
struct Plan {
    pieces: Vec<Piece>,
    /// By number of piece, then of the redundant chunks read in addition.
    done: Vec<Option<BufMut>>,
    runs: Vec<Run>,
    /// By member: its last run.
    last_run: [u32; 64],
    /// What must be recomputed.
    missing: Vec<Missing>,
    /// What is read with neighbours.
    shared: Vec<(Rc<Shared>, Missing)>,
    whole: Vec<Whole>,
}

impl Plan {
    fn new(engine: &Engine, at: u64, into: IoVecMut, whom: Whom) -> Self {
        let mut plan = Self {
            pieces: Vec::new(),
            done: Vec::new(),
            runs: Vec::new(),
            last_run: [u32::MAX; 64],
            missing: Vec::new(),
            shared: Vec::new(),
            whole: Vec::new(),
        };
        let end = at + bytes_in(&into);
        // Looked up once a stripe.
        let mut shared: (u64, Option<Rc<Shared>>) = (u64::MAX, None);
        let mut part_at = at;
        for mut part in into {
            let part_bytes = part.len() as u64;
            engine.pieces(part_at, part_bytes, |stripe, chunk, within, bytes| {
                let mut buf = part.split_to(bytes as usize);
                let piece = plan.done.len() as u32;
                plan.pieces.push(Piece { stripe, chunk, within, bytes });
                plan.done.push(None);
                if !engine.map.has(Bit::Written, stripe) {
                    buf.fill(0);
                    plan.done[piece as usize] = Some(buf);
                    return;
                }
                if shared.0 != stripe {
                    let of_stripe = engine.stripe_range(stripe, 1);
                    let is_whole = at <= of_stripe.0 && of_stripe.1 <= end;
                    let may_share = whom.is_anybody() && !is_whole;
                    shared = (stripe, may_share.then(|| engine.shared(stripe)).flatten());
                }
                let within = within..within + bytes;
                let source = engine.source(stripe, chunk, whom.avoided_in(engine, stripe));
                match (source, &shared.1) {
                    (_, Some(shared)) if (within.start | bytes).is_multiple_of(ROW_BYTES) => {
                        let missing = Missing { piece, stripe, chunk, within, into: buf };
                        plan.shared.push((Rc::clone(shared), missing));
                    }
                    (Some((member, place)), _) => {
                        let at = engine.member_offset(place.slot, within.start);
                        plan.read(member, at, buf, piece);
                    }
                    (None, _) => {
                        plan.missing.push(Missing { piece, stripe, chunk, within, into: buf });
                    }
                }
            });
            part_at += part_bytes;
        }
        plan
    }

    /// Adds a read; a neighbour of the member's last one joins it.
    fn read(&mut self, member: Rc<Member>, at: u64, buf: BufMut, piece: u32) {
        let bytes = buf.len() as u64;
        let last = &mut self.last_run[member.index];
        match self.runs.get_mut(*last as usize) {
            Some(run) if run.end == at => {
                run.end += bytes;
                run.parts.push(buf);
                run.pieces.push(piece);
            }
            Some(_) | None => {
                *last = self.runs.len() as u32;
                let (parts, pieces) = (buf.into_vec(), smallvec::smallvec![piece]);
                self.runs.push(Run { member, at, end: at + bytes, parts, pieces });
            }
        }
    }

    /// Turns missing chunks of stripes that are read whole into [`Whole`]: else every missing
    /// chunk would read the whole stripe a second time.
    fn join_whole_stripes(&mut self, engine: &Engine, whom: Whom) {
        let (data_chunks, bytes) = (engine.layout.data_chunks(), engine.layout.chunk_bytes);
        let mut apart = Vec::new();
        for lost in std::mem::take(&mut self.missing) {
            if let Some(whole) = self.whole.last_mut()
                && whole.stripe == lost.stripe
            {
                whole.lost.push((lost.chunk, lost.into));
                continue;
            }
            let (stripe, piece) = (lost.stripe, lost.piece as usize);
            let is_whole = piece >= lost.chunk && {
                let of_stripe = self.pieces.iter().skip(piece - lost.chunk).take(data_chunks);
                let chunks =
                    (0..data_chunks).map(|chunk| Piece { stripe, chunk, within: 0, bytes });
                of_stripe.copied().eq(chunks)
            };
            if !is_whole {
                apart.push(lost);
                continue;
            }
            self.whole.push(Whole {
                stripe,
                first: piece - lost.chunk,
                extra: SmallVec::new(),
                lost: smallvec::smallvec![(lost.chunk, lost.into)],
            });
        }
        self.missing = apart;
        let mut whole = std::mem::take(&mut self.whole);
        for stripe in &mut whole {
            let avoid = whom.avoided_in(engine, stripe.stripe);
            let redundant = (data_chunks..engine.layout.chunks()).filter_map(|chunk| {
                let place = engine.layout.place(stripe.stripe, chunk);
                Some((chunk, place, engine.holder(place, avoid)?))
            });
            for (chunk, place, member) in redundant.take(stripe.lost.len()) {
                let piece = self.done.len();
                self.done.push(None);
                stripe.extra.push((chunk, piece));
                let buf = BufMut::for_overwrite(bytes as usize);
                self.read(member, engine.member_offset(place.slot, 0), buf, piece as u32);
            }
        }
        self.whole = whole;
    }
}

impl Engine {
    pub async fn read(
        self: &Rc<Self>,
        at: u64,
        into: IoVecMut,
        avoid: MemberSet,
    ) -> Result<IoVecMut, BlockError> {
        if self.reads_parts_of_rows(at, &into) {
            return Box::pin(self.read_of_rows(at, into, avoid, false)).await;
        }
        let shunned = self.shunned(avoid);
        if let Some((member, place_at)) = self.only_place(at, &into, avoid)
            && !shunned.contains(member.index)
        {
            let bytes = into[0].len();
            if let Ok(filled) = self.member_read(&member, place_at, into).await {
                return Ok(filled);
            }
            // Boxed, as what is seldom needed would be part of every read.
            return Box::pin(self.read_carefully(at, &[bytes], avoid)).await;
        }
        Box::pin(self.read_parts(at, into, Whom { avoid, shunned, may_share: true })).await
    }

    /// As [`Engine::read`], and whoever is not avoided gives what he holds himself, slow or not: who looks for the one that is
    /// wrong would else take what is computed from that one for what a slow one holds.
    pub async fn read_from_holders(
        self: &Rc<Self>,
        at: u64,
        into: IoVecMut,
        avoid: MemberSet,
    ) -> Result<IoVecMut, BlockError> {
        if self.reads_parts_of_rows(at, &into) {
            return self.read_of_rows(at, into, avoid, true).await;
        }
        self.read_parts(at, into, Whom { avoid, shunned: MemberSet::NONE, may_share: false }).await
    }

    /// The place of a read that lies in one chunk which somebody has: most small reads, and nothing to split or to look up
    /// twice. `None` for any other, also for those that fail.
    fn only_place(&self, at: u64, into: &IoVecMut, avoid: MemberSet) -> Option<(Rc<Member>, u64)> {
        let [only] = &into[..] else { return None };
        let (bytes, chunk_bytes) = (only.len() as u64, self.layout.chunk_bytes);
        let within = at % chunk_bytes;
        let is_plain = self.stopped.borrow().is_none() && self.lost.is_empty();
        if within + bytes > chunk_bytes || !is_plain {
            return None;
        }
        check_range(&self.info, at, bytes).ok()?;
        let (stripe, chunk) = self.chunk_at(at);
        if !self.map.has(Bit::Written, stripe) {
            return None;
        }
        let (member, place) = self.source(stripe, chunk, avoid)?;
        if self.map.is_short() && avoid.is_empty() && self.is_shared(stripe) {
            return None;
        }
        Some((member, self.member_offset(place.slot, within)))
    }

    async fn read_parts(
        self: &Rc<Self>,
        at: u64,
        mut into: IoVecMut,
        whom: Whom,
    ) -> Result<IoVecMut, BlockError> {
        let bytes = bytes_in(&into);
        check_range(&self.info, at, bytes)?;
        self.check_running()?;
        self.check_not_lost(at, bytes)?;
        let lengths: SmallVec<[usize; 4]> = into.iter().map(|part| part.len()).collect();
        if !whom.shunned.is_empty() {
            if let Some(filled) = self.read_direct(at, into, whom).await {
                return Ok(filled);
            }
            // Those that failed on the way are out: on record before anything is answered.
            self.settle().await?;
            // The buffers went down with the failed request. One allocation, as in `read_carefully`.
            let mut whole = BufMut::for_overwrite(bytes as usize);
            into = lengths.iter().map(|length| whole.split_to(*length)).collect();
        }
        let whom = Whom { shunned: MemberSet::NONE, ..whom };
        match self.read_direct(at, into, whom).await {
            Some(filled) => Ok(filled),
            None => self.read_carefully(at, &lengths, whom.avoid).await,
        }
    }

    /// Who can be asked for a data chunk: its holder, or the idlest of the copies, slow ones last.
    pub fn source(
        &self,
        stripe: u64,
        chunk: usize,
        avoid: MemberSet,
    ) -> Option<(Rc<Member>, Place)> {
        let at = |chunk: usize| {
            let place = self.layout.place(stripe, chunk);
            Some((self.holder(place, avoid)?, place))
        };
        match self.layout.level {
            // Among equally idle copies the stripe's number decides, to spread them.
            Level::Raid1 { copies } => {
                let slow = self.slowness.passed_over();
                (0..copies)
                    .map(|i| (i + (stripe / self.layout.width as u64) as usize) % copies)
                    .filter_map(at)
                    .min_by_key(|(member, _)| (slow.contains(member.index), member.in_flight.get()))
            }
            _ => at(chunk),
        }
    }

    /// `None` when a member failed, whatever the reason.
    async fn read_direct(self: &Rc<Self>, at: u64, into: IoVecMut, whom: Whom) -> Option<IoVecMut> {
        let lengths: SmallVec<[usize; 4]> = into.iter().map(|part| part.len()).collect();
        let mut plan = Plan::new(self, at, into, whom);
        plan.join_whole_stripes(self, whom);
        let Plan { mut done, runs, missing, shared, whole, .. } = plan;
        let still: SmallVec<[Option<u64>; 8]> =
            whole.iter().map(|whole| self.updates.stillness(whole.stripe)).collect();

        let reads = runs.into_iter().map(|run| async move {
            let parts = self.member_read(&run.member, run.at, run.parts).await.ok()?;
            Some((run.pieces, parts))
        });
        let recoveries = missing.into_iter().map(|mut lost| async move {
            let (stripe, chunk, within) = (lost.stripe, lost.chunk, lost.within.clone());
            let (avoid, into) = (whom.avoided_in(self, stripe), &mut lost.into);
            let bad = match whom.shunned.is_empty() {
                true => self.reconstruct_still(stripe, chunk, within, avoid, 0, into).await.ok()?,
                false => self.reconstruct_at_once(stripe, chunk, within, avoid, into).await?,
            };
            // A medium error on the way is repaired by the careful way.
            (bad == 0).then_some(lost)
        });
        let shared = shared.into_iter().map(|(shared, piece)| self.read_beside(shared, piece));
        let (reads, recoveries, shared) =
            join3(join_all(reads), join_all(recoveries), join_all(shared)).await;
        for read in reads {
            let (pieces, parts) = read?;
            for (piece, part) in pieces.into_iter().zip(parts) {
                done[piece as usize] = Some(part);
            }
        }
        for recovery in recoveries.into_iter().chain(shared) {
            let lost = recovery?;
            done[lost.piece as usize] = Some(lost.into);
        }
        for (stripe, before) in whole.into_iter().zip(still) {
            // The careful way sees to it that no update comes between.
            if before.is_none() || self.updates.stillness(stripe.stripe) != before {
                return None;
            }
            self.recompute_whole(stripe, &mut done)?;
        }
        let mut done = done.into_iter().flatten();
        let joined = lengths.into_iter().map(|length| {
            let mut part = done.next().unwrap_or_else(|| BufMut::for_overwrite(0));
            while part.len() < length {
                part.unsplit(done.next().expect("the pieces make up the parts"));
            }
            part
        });
        Some(joined.collect())
    }

    /// Reads a piece of a stripe that is shared, or by itself if that cannot be. `None` when a member failed.
    async fn read_beside(
        self: &Rc<Self>,
        shared: Rc<Shared>,
        mut piece: Missing,
    ) -> Option<Missing> {
        let (stripe, chunk, within) = (piece.stripe, piece.chunk, piece.within.clone());
        if self.read_shared(&shared, chunk, within.clone(), &mut piece.into).await {
            return Some(piece);
        }
        if shared.has_failed() {
            // What failed is repaired, or on record, before anything is answered: by the careful way.
            return None;
        }
        let all = MemberSet::NONE;
        if let Some((member, place)) = self.source(stripe, chunk, all) {
            let at = self.member_offset(place.slot, within.start);
            piece.into = self.member_read(&member, at, piece.into.into_vec()).await.ok()?.pop()?;
            return Some(piece);
        }
        let into = &mut piece.into;
        let bad = self.reconstruct_still(stripe, chunk, within, all, 0, into).await.ok()?;
        (bad == 0).then_some(piece)
    }

    /// Fills in the missing chunks of a stripe that was read whole.
    fn recompute_whole(&self, mut whole: Whole, done: &mut [Option<BufMut>]) -> Option<()> {
        let held = (0..self.layout.chunks()).map(|chunk| {
            let piece = match chunk < self.layout.data_chunks() {
                true => Some(whole.first + chunk),
                false => whole.extra.iter().find(|(c, _)| *c == chunk).map(|(_, piece)| *piece),
            };
            Some(&done[piece?].as_ref()?[..])
        });
        let wanted = whole.lost.iter_mut().map(|(chunk, into)| (*chunk, &mut into[..]));
        let recovered = self.redundancy.recompute(held, wanted);
        if !recovered {
            tracing::debug!(array = %self.name, stripe = whole.stripe, "too few chunks at hand");
            return None;
        }
        for (chunk, bytes) in whole.lost {
            done[whole.first + chunk] = Some(bytes);
        }
        for (_, piece) in whole.extra {
            done[piece] = None;
        }
        Some(())
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
        // One allocation, so that a caller who split one can join the parts again.
        let mut whole = BufMut::for_overwrite(lengths.iter().sum());
        for &length in lengths {
            let mut part = whole.split_to(length);
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

    /// Reads a piece of a chunk: at once if that can be, else block by block, for bad places in several chunks are
    /// seldom at the same one.
    async fn read_piece(
        self: &Rc<Self>,
        stripe: u64,
        chunk: usize,
        within: Range<u64>,
        avoid: MemberSet,
        into: &mut [u8],
    ) -> Result<(), BlockError> {
        let whole = self.read_at_once(stripe, chunk, within.clone(), avoid, into).await;
        let block_bytes = self.least_bytes();
        if whole.is_ok() || within.end - within.start <= block_bytes {
            return whole;
        }
        self.check_running()?;
        let blocks = within.clone().step_by(block_bytes as usize);
        for (at, into) in blocks.zip(into.chunks_mut(block_bytes as usize)) {
            let block = at..at + into.len() as u64;
            self.read_at_once(stripe, chunk, block, avoid, into).await?;
        }
        Ok(())
    }

    async fn read_at_once(
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
        let mut asked_again = false;
        loop {
            self.check_running()?;
            let place = self.layout.place(stripe, chunk);
            let holder = if bad >> chunk & 1 == 1 { None } else { self.holder(place, avoid) };
            let Some(member) = holder else {
                match self.reconstruct_still(stripe, chunk, within.clone(), avoid, bad, into).await
                {
                    Ok(more) => {
                        bad |= more;
                        break;
                    }
                    // The others were asked again by now, this one was not.
                    Err(_) if bad != 0 && !asked_again => {
                        (bad, asked_again) = (0, true);
                        continue;
                    }
                    Err(error) => return Err(error),
                }
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
        if !avoid.is_empty() {
            // Who avoids a chunk has reason to think it wrong: nothing is made from it.
            return Ok(());
        }
        self.rewrite_all(stripe, bad, &within).await
    }

    /// Read repair of the chunks in `bad`, as bits.
    pub async fn rewrite_all(
        self: &Rc<Self>,
        stripe: u64,
        bad: u64,
        within: &Range<u64>,
    ) -> Result<(), BlockError> {
        if bad != 0 && matches!(self.redundancy, Redundancy::Copies) {
            // One of the others may be wrong, so what is written is voted on. Undecided, it stays unreadable.
            let _ = self.vote_on(stripe, within.clone()).await;
            return Ok(());
        }
        for chunk in (0..self.layout.chunks()).filter(|chunk| bad >> chunk & 1 == 1) {
            // Detached: a reader that is not polled for a while must not hold the stripe.
            let (engine, within) = (Rc::clone(self), within.clone());
            self.detached(async move {
                engine.rewrite(stripe, chunk, within).await;
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Reads a range of a stripe's chunks from those that have it, until `enough` are at hand.
    /// `skip` are chunks not to read, as bits.
    ///
    /// Chunks that cannot be read are passed over. Are too few left to recompute the others, they
    /// are asked again, as long as that helps: the failures were met one after another, and the
    /// array bears them unless they are there together. (An unreadable chunk is rewritten by
    /// somebody's read repair, then the member is lost that was asked in its place.)
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
        let mut asked_again = 0;
        loop {
            let wanted = enough.saturating_sub(gathered.count());
            let can = |chunk: &usize| {
                gathered.chunks[*chunk].is_none() && (skip | gathered.bad) >> chunk & 1 == 0
            };
            let mut sources: SmallVec<[_; 16]> = (0..chunks)
                .filter(can)
                .filter_map(|chunk| {
                    let place = self.layout.place(stripe, chunk);
                    Some((chunk, place, self.holder(place, avoid)?))
                })
                .collect();
            if let Redundancy::Copies = self.redundancy {
                // Idle ones first, equals in turns, as a plain read does.
                let turn = (stripe / self.layout.width as u64) as usize % sources.len().max(1);
                sources.rotate_left(turn);
                let slow = self.slowness.passed_over();
                sources.sort_by_key(|(_, _, member)| {
                    (slow.contains(member.index), member.in_flight.get())
                });
            } else if sources.len() > wanted {
                let last = self.avoided_in(stripe, avoid, self.slowness.passed_over());
                sources.sort_by_key(|(_, _, member)| last.contains(member.index));
            }
            sources.truncate(wanted);
            if sources.is_empty() {
                let too_few = gathered.count() < self.layout.data_chunks();
                if too_few && gathered.bad != asked_again {
                    // Those that are at hand stay so, so this set shrinks every time.
                    asked_again = std::mem::take(&mut gathered.bad);
                    continue;
                }
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

    /// As [`Engine::reconstruct_still`], for who can do without the answer. `None` where an update comes between.
    async fn reconstruct_at_once(
        &self,
        stripe: u64,
        chunk: usize,
        within: Range<u64>,
        avoid: MemberSet,
        into: &mut [u8],
    ) -> Option<u64> {
        let still = || self.updates.stillness(stripe);
        let before = still();
        if before.is_none() && !planted!("raid-shuns-beside-updates") {
            return None;
        }
        let bad = self.reconstruct(stripe, chunk, within, avoid, 0, into).await.ok()?;
        (still() == before || planted!("raid-shuns-beside-updates")).then_some(bad)
    }

    /// As [`Engine::reconstruct`], for those who do not hold the stripe: of chunks that belong together.
    async fn reconstruct_still(
        self: &Rc<Self>,
        stripe: u64,
        chunk: usize,
        within: Range<u64>,
        avoid: MemberSet,
        bad: u64,
        into: &mut [u8],
    ) -> Result<u64, BlockError> {
        let before = self.updates.stillness(stripe);
        if before.is_some() || planted!("raid-reconstructs-beside-updates") {
            let result = self.reconstruct(stripe, chunk, within.clone(), avoid, bad, into).await;
            let is_still = self.updates.stillness(stripe) == before;
            if is_still || planted!("raid-reconstructs-beside-updates") {
                return result;
            }
        }
        // Detached: a reader that is not polled for a while must not hold the stripe.
        let (engine, bytes) = (Rc::clone(self), into.len());
        let (more, made) = self
            .detached(async move {
                let (start, end) = engine.stripe_range(stripe, 1);
                let _guard = engine.locks.lock(start, end).await;
                let mut made = BufMut::for_overwrite(bytes);
                let more = engine.reconstruct(stripe, chunk, within, avoid, bad, &mut made).await?;
                Ok((more, made))
            })
            .await?;
        into.copy_from_slice(&made);
        Ok(more)
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
        let _busy = probe::busy("array degraded read");
        let enough = self.layout.data_chunks();
        let gathered = self.gather(stripe, within.clone(), bad | 1 << chunk, avoid, enough).await;
        if !self.redundancy.recompute(gathered.held(), std::iter::once((chunk, into))) {
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
        let unsettled = self.layout.level.has_parity() && self.map.has(Bit::Dirty, stripe);
        let place = self.layout.place(stripe, chunk);
        let member = self.holder(place, MemberSet::NONE);
        let (false, true, Some(member)) = (unsettled, self.map.has(Bit::Written, stripe), member)
        else {
            return;
        };
        let all = MemberSet::NONE;
        let mut bytes = BufMut::for_overwrite((within.end - within.start) as usize);
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
