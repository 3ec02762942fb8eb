//! A layer of a thin volume: a file, and what is seen through its holes.
//!
//! A volume that was never snapshotted is one layer with nothing below it. A snapshot freezes the layer and puts an empty one on
//! it; a clone is an empty layer on a snapshot.
//!
//! What always holds:
//! - A layer with another below holds whole granules, or nothing of them: a smaller write brings the rest up with it.
//! - What was discarded stays hidden: before data goes under which something older lies, it is durable that this is not seen.
//! - A frozen layer shows the same bytes for ever, to whatever stands on it.
//!
//! After a crash a granule holds what it held when it was flushed last, or something newer; never what lies below.

use super::cover::{Cover, GRANULE_BYTES, HIDDEN_BYTES, Holds, REGION_BYTES};
use super::sparse::Sparse;
use crate::VolumeError;
use crate::volume::Extent;
use futures_util::future::{LocalBoxFuture, join, try_join, try_join_all};
use levada_base::buf::bytes_in;
use levada_base::sync::Semaphore;
use levada_base::units::{MIB, round_down, round_up};
use levada_base::{Buf, BufMut, IoVec, RangeLocks, planted};
use levada_device::Durability;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

/// Runs that one question for extents is answered with at most: each may cost a call to a target.
const RUNS_PER_QUESTION: usize = 64;
/// Bytes that one such question looks at, where layers lie on each other.
const BYTES_PER_QUESTION: u64 = 16 * REGION_BYTES;
/// Regions that are looked up at once.
const REGIONS_PER_LOOK: u64 = MIB / HIDDEN_BYTES;
/// Granules that are hidden at once: their bits are one small write, which the log takes as a whole.
const PUNCHED_BYTES: u64 = 64 * REGION_BYTES;
/// Changes are told in units of this.
pub(super) const TOLD_BYTES: u64 = MIB;
/// Zeroes that are really written go down in pieces of this size.
const ZEROES_BYTES: u64 = MIB;
/// What lies below a layer.
pub(crate) struct Below<F> {
    pub layer: Rc<Layer<F>>,
    /// So many bytes of it are seen: the volume was never smaller since.
    pub bytes: u64,
    /// Where it is kept which granules are hidden: a bit each.
    pub hidden: Rc<F>,
}

impl<F> Clone for Below<F> {
    fn clone(&self) -> Self {
        let (layer, hidden) = (Rc::clone(&self.layer), Rc::clone(&self.hidden));
        Self { layer, bytes: self.bytes, hidden }
    }
}

/// What was changed of a layer.
#[derive(Default)]
pub(super) struct Told {
    /// Where: by number, [`TOLD_BYTES`] each.
    pub parts: BTreeSet<u64>,
    /// The volume was cut.
    pub is_cut: bool,
}

/// A layer. Whoever changes it sees to it that it is not frozen, and not cut meanwhile.
pub(crate) struct Layer<F> {
    pub(super) file: F,
    pub(super) below: RefCell<Option<Below<F>>>,
    pub(super) cover: RefCell<Cover>,
    /// Granules that somebody changes.
    pub(super) changing: RangeLocks,
    /// Held by who writes down what is hidden, or makes it durable.
    hiding: Rc<Semaphore>,
    /// What is hidden is written down, but not durable.
    is_hidden_volatile: Cell<bool>,
    /// What was changed since somebody began to ask.
    pub(super) changed: RefCell<Option<Told>>,
}

/// Bytes of the file in which the hidden granules are kept of so many bytes that lie below.
pub(crate) fn hidden_bytes(below: u64) -> u64 {
    below.div_ceil(REGION_BYTES) * HIDDEN_BYTES
}

fn granules_around(at: u64, bytes: u64) -> Range<u64> {
    round_down(at, GRANULE_BYTES)..round_up(at + bytes, GRANULE_BYTES)
}

fn zeroes(bytes: u64) -> IoVec {
    BufMut::zeroed(bytes as usize).freeze().into_vec()
}

/// Takes the first `bytes` away, of which there are more.
fn take(from: &mut IoVec, bytes: u64) -> IoVec {
    let (mut first, mut left) = (IoVec::new(), bytes as usize);
    let parts = std::mem::take(from);
    for part in parts {
        let here = left.min(part.len());
        left -= here;
        if here > 0 {
            first.push(part.slice(0, here));
        }
        if here < part.len() {
            from.push(part.slice(here, part.len() - here));
        }
    }
    first
}

/// Adds a run to others, as one with the last if that is of its kind.
fn push_run(runs: &mut Vec<Extent>, run: Extent) {
    match runs.last_mut() {
        _ if run.bytes == 0 => {}
        Some(last) if last.is_allocated == run.is_allocated => last.bytes += run.bytes,
        _ => runs.push(run),
    }
}

impl<F: Sparse> Layer<F> {
    /// A file with nothing below it.
    pub fn flat(file: F) -> Self {
        Self::new(file, None)
    }

    /// A file on another layer.
    pub fn on(file: F, below: Below<F>) -> Self {
        Self::new(file, Some(below))
    }

    fn new(file: F, below: Option<Below<F>>) -> Self {
        Self {
            file,
            below: RefCell::new(below),
            cover: RefCell::default(),
            changing: RangeLocks::default(),
            hiding: Semaphore::new(1),
            is_hidden_volatile: Cell::new(false),
            changed: RefCell::new(None),
        }
    }

    pub fn file(&self) -> &F {
        &self.file
    }

    pub fn below(&self) -> Option<Below<F>> {
        self.below.borrow().clone()
    }

    /// Layers below it.
    pub fn depth(&self) -> usize {
        let mut depth = 0;
        let mut below = self.below();
        while let Some(Below { layer, .. }) = below {
            depth += 1;
            below = layer.below();
        }
        depth
    }

    /// From now on something else is seen through the holes. Nobody changes the layer meanwhile.
    pub fn set_below(&self, below: Option<Below<F>>) {
        *self.below.borrow_mut() = below;
    }

    /// The volume becomes so small; what lies below is not seen behind that any more, should it grow again. Nobody uses the
    /// layer meanwhile.
    pub fn cut(&self, bytes: u64, old_bytes: u64) {
        if let Some(below) = &mut *self.below.borrow_mut()
            && !planted!("layer-cut-shows-below")
        {
            below.bytes = below.bytes.min(bytes);
        }
        if bytes < old_bytes {
            self.cover.borrow_mut().disown(&(bytes..old_bytes));
            if let Some(told) = &mut *self.changed.borrow_mut() {
                told.is_cut |= !planted!("layer-cut-untold");
            }
        }
    }

    /// Learns where `bytes` are. Until a change of them begins that stays true but for what [`Self::cover`] is told.
    pub(super) async fn know(
        &self,
        below: &Below<F>,
        bytes: &Range<u64>,
    ) -> Result<(), VolumeError> {
        loop {
            let unknown = self.cover.borrow().unknown(bytes);
            let Some(first) = unknown.first().copied() else { break };
            // Neighbours with it.
            let follows = |(place, region): &(usize, &u64)| **region == first + *place as u64;
            let count = unknown.iter().enumerate().take_while(follows).count() as u64;
            self.look_up(below, first..first + count.min(REGIONS_PER_LOOK)).await?;
        }
        loop {
            let Some(unsure) = self.cover.borrow().unsure(bytes) else { return Ok(()) };
            let before = self.cover.borrow().surprises();
            let own = self.data_runs(unsure.clone()).await?;
            self.cover.borrow_mut().relearn(&unsure, &own, before);
        }
    }

    async fn look_up(&self, below: &Below<F>, regions: Range<u64>) -> Result<(), VolumeError> {
        let before = self.cover.borrow().surprises();
        let bytes = regions.start * REGION_BYTES..regions.end * REGION_BYTES;
        let at = regions.start * HIDDEN_BYTES;
        let end = (regions.end * HIDDEN_BYTES).min(hidden_bytes(below.bytes));
        let kept = async {
            // Most often nothing was hidden, or not here.
            if at >= end || below.hidden.data(at, end).await? == end {
                return Ok(None);
            }
            below.hidden.read(at, end - at).await.map(Some)
        };
        let (own, kept) = try_join(self.data_runs(bytes), kept).await?;
        let kept: Vec<u8> = kept.iter().flatten().flat_map(|part| part.to_vec()).collect();
        let mut cover = self.cover.borrow_mut();
        for region in regions.clone() {
            let bytes = region * REGION_BYTES..(region + 1) * REGION_BYTES;
            let within = |run: &Range<u64>| {
                let part = run.start.max(bytes.start)..run.end.min(bytes.end);
                (part.start < part.end).then_some(part)
            };
            let own: Vec<_> = own.iter().filter_map(within).collect();
            let hidden = kept.get(((region - regions.start) * HIDDEN_BYTES) as usize..);
            cover.learn(region, &own, hidden.unwrap_or(&[]), before);
        }
        Ok(())
    }

    /// Where the file has data of `bytes`.
    pub(super) async fn data_runs(
        &self,
        bytes: Range<u64>,
    ) -> Result<Vec<Range<u64>>, VolumeError> {
        let (mut runs, mut at) = (Vec::new(), bytes.start);
        while at < bytes.end {
            let data = self.file.data(at, bytes.end).await?;
            if data == bytes.end {
                break;
            }
            at = self.file.hole(data, bytes.end).await?;
            // Somebody may have punched it meanwhile.
            if at > data {
                runs.push(data..at);
            }
        }
        Ok(runs)
    }

    /// Reads exactly `bytes`, all at once.
    pub fn read(&self, at: u64, bytes: u64) -> LocalBoxFuture<'_, Result<IoVec, VolumeError>> {
        Box::pin(async move {
            let Some(below) = self.below() else { return self.file.read(at, bytes).await };
            let range = at..at + bytes;
            self.know(&below, &range).await?;
            let runs = self.cover.borrow().runs(&range);
            let mut from = at;
            let parts = runs.into_iter().map(|(bytes, holds)| {
                let at = from;
                from += bytes;
                self.read_part(&below, at, bytes, holds)
            });
            let mut parts = try_join_all(parts).await?.into_iter();
            let mut read = parts.next().unwrap_or_default();
            read.extend(parts.flatten());
            Ok(read)
        })
    }

    async fn read_part(
        &self,
        below: &Below<F>,
        at: u64,
        bytes: u64,
        holds: Holds,
    ) -> Result<IoVec, VolumeError> {
        match holds {
            Holds::Own => self.file.read(at, bytes).await,
            Holds::Zeroes => Ok(zeroes(bytes)),
            Holds::Below => {
                let seen = below.bytes.saturating_sub(at).min(bytes);
                let mut read = match seen {
                    0 => IoVec::new(),
                    seen => below.layer.read(at, seen).await?,
                };
                if seen < bytes {
                    read.extend(zeroes(bytes - seen));
                }
                Ok(read)
            }
        }
    }

    /// Writes `from`, which is not empty. Given up in the middle, what is known of the layer may be wrong: carry it to its end.
    pub async fn write(
        &self,
        at: u64,
        from: IoVec,
        durability: Durability,
    ) -> Result<(), VolumeError> {
        let Some(below) = self.below() else { return self.file.write(at, from, durability).await };
        let granules = granules_around(at, bytes_in(&from));
        let _turn = self.changing.lock(granules.start, granules.end).await;
        self.know(&below, &granules).await?;
        let (at, from) = self.filled(&granules, at, from).await?;
        // What is hidden need not be durable for that: nothing is seen through a granule that is the file's own.
        let written = self.write_apart(at, from, durability).await;
        self.settle(granules, written, |cover, granules| cover.own(granules))
    }

    /// Writes what ends within the first granule by itself: the log takes a large write as several changes, whole granules from
    /// its beginning, and a granule that is not the file's own must come at once.
    async fn write_apart(
        &self,
        at: u64,
        mut from: IoVec,
        durability: Durability,
    ) -> Result<(), VolumeError> {
        let head = round_up(at, GRANULE_BYTES) - at;
        if head == 0 || bytes_in(&from) <= head || planted!("layer-granule-in-two") {
            return self.file.write(at, from, durability).await;
        }
        let first = take(&mut from, head);
        // Both to their end: what is given up may come to pass later.
        let first = self.file.write(at, first, durability);
        let durability =
            if planted!("layer-durable-by-half") { Durability::Volatile } else { durability };
        let (first, rest) = join(first, self.file.write(at + head, from, durability)).await;
        first.and(rest)
    }

    /// What to write so that every granule that is not the file's own becomes so.
    async fn filled(
        &self,
        granules: &Range<u64>,
        at: u64,
        from: IoVec,
    ) -> Result<(u64, IoVec), VolumeError> {
        let end = at + bytes_in(&from);
        let lacks = |granule: u64| {
            let granule = granule..granule + GRANULE_BYTES;
            !self.cover.borrow().owns_any(&granule) && !planted!("layer-write-not-filled")
        };
        let head = at - granules.start;
        let tail = granules.end - end;
        let head = if head > 0 && lacks(granules.start) { head } else { 0 };
        let tail = if tail > 0 && lacks(granules.end - GRANULE_BYTES) { tail } else { 0 };
        if head + tail == 0 {
            return Ok((at, from));
        }
        let part = |at, bytes| async move {
            match bytes {
                0 => Ok(IoVec::new()),
                bytes => self.read(at, bytes).await,
            }
        };
        let (mut filled, last) = try_join(part(at - head, head), part(end, tail)).await?;
        filled.extend(from);
        filled.extend(last);
        Ok((at - head, filled))
    }

    /// Notes what a change of the file has made of `granules`.
    pub(super) fn settle(
        &self,
        granules: Range<u64>,
        changed: Result<(), VolumeError>,
        note: impl FnOnce(&mut Cover, &Range<u64>),
    ) -> Result<(), VolumeError> {
        self.tell(&granules);
        let mut cover = self.cover.borrow_mut();
        match &changed {
            Ok(()) => note(&mut cover, &granules),
            // A part of it may have been made.
            Err(_) => cover.doubt(granules),
        }
        changed
    }

    /// Writes zeroes, which take room.
    pub async fn write_zeroes(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        let zeroes = BufMut::zeroed(bytes.min(ZEROES_BYTES) as usize).freeze();
        let (mut at, end) = (at, at + bytes);
        while at < end {
            let bytes = ZEROES_BYTES.min(end - at);
            let zeroes = zeroes.slice(0, bytes as usize).into_vec();
            self.write(at, zeroes, Durability::Volatile).await?;
            at += bytes;
        }
        Ok(())
    }

    fn tell(&self, bytes: &Range<u64>) {
        if let Some(told) = &mut *self.changed.borrow_mut()
            && !planted!("layer-change-untold")
        {
            told.parts.extend(bytes.start / TOLD_BYTES..bytes.end.div_ceil(TOLD_BYTES));
        }
    }

    /// Makes `bytes` read as zeroes and gives their room back. As for [`Self::write`].
    pub async fn punch(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        let Some(below) = self.below() else { return self.file.punch(at, bytes).await };
        let end = at + bytes;
        let whole = round_up(at, GRANULE_BYTES)..round_down(end, GRANULE_BYTES);
        if whole.is_empty() {
            return self.write_zeroes(at, bytes).await;
        }
        for (from, to) in [(at, whole.start), (whole.end, end)] {
            if from < to {
                self.write_zeroes(from, to - from).await?;
            }
        }
        self.punch_granules(&below, whole).await
    }

    /// As [`Self::punch`], but what is not a whole granule may keep its bytes.
    pub async fn discard(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        let Some(below) = self.below() else { return self.file.punch(at, bytes).await };
        let whole = round_up(at, GRANULE_BYTES)..round_down(at + bytes, GRANULE_BYTES);
        match whole.is_empty() {
            true => Ok(()),
            false => self.punch_granules(&below, whole).await,
        }
    }

    /// Piece by piece, as one request may name a whole volume.
    async fn punch_granules(
        &self,
        below: &Below<F>,
        granules: Range<u64>,
    ) -> Result<(), VolumeError> {
        let mut at = granules.start;
        while at < granules.end {
            let end = granules.end.min(round_down(at, PUNCHED_BYTES) + PUNCHED_BYTES);
            self.punch_piece(below, at..end).await?;
            at = end;
        }
        Ok(())
    }

    async fn punch_piece(&self, below: &Below<F>, granules: Range<u64>) -> Result<(), VolumeError> {
        let _turn = self.changing.lock(granules.start, granules.end).await;
        self.know(below, &granules).await?;
        let covering = granules.start..granules.end.min(below.bytes);
        if !covering.is_empty() && self.cover.borrow().shows_any(&covering) {
            self.hide(below, &covering).await?;
        }
        if !self.cover.borrow().owns_any(&granules) {
            return self.settle(granules, Ok(()), |_, _| ());
        }
        if !covering.is_empty() && !planted!("layer-hidden-not-durable") {
            self.sync_hidden(below).await?;
        }
        let punched = self.file.punch(granules.start, granules.end - granules.start).await;
        self.settle(granules, punched, |cover, granules| cover.disown(granules))
    }

    /// Hides what lies below `granules`. Granules never become visible again: bits are only set, so that an old one in a file
    /// hides nothing but what must be hidden.
    pub(super) async fn hide(
        &self,
        below: &Below<F>,
        granules: &Range<u64>,
    ) -> Result<(), VolumeError> {
        let _turn = self.hiding.acquire(1).await;
        let (old, new) = {
            let mut cover = self.cover.borrow_mut();
            let old = cover.hidden(granules);
            cover.hide(granules);
            (old, cover.hidden(granules))
        };
        let Some((first, _)) = new.first() else { return Ok(()) };
        let at = first * HIDDEN_BYTES;
        let bytes: Vec<u8> = new.into_iter().flat_map(|(_, bytes)| bytes).collect();
        self.is_hidden_volatile.set(true);
        let kept =
            below.hidden.write(at, Buf::copy_of(&bytes).into_vec(), Durability::Volatile).await;
        if kept.is_err() {
            // The next one must not take it for written.
            self.cover.borrow_mut().set_hidden(old);
        }
        kept
    }

    async fn sync_hidden(&self, below: &Below<F>) -> Result<(), VolumeError> {
        let _turn = self.hiding.acquire(1).await;
        if self.is_hidden_volatile.get() {
            below.hidden.sync().await?;
            self.is_hidden_volatile.set(false);
        }
        Ok(())
    }

    /// Makes durable what was changed before.
    pub async fn sync(&self) -> Result<(), VolumeError> {
        match self.below() {
            Some(below) if self.is_hidden_volatile.get() => {
                try_join(self.file.sync(), self.sync_hidden(&below)).await.map(drop)
            }
            _ => self.file.sync().await,
        }
    }

    /// What is stored from `at` on, down to the last layer; `at` is before `end`.
    pub fn extents(
        &self,
        at: u64,
        end: u64,
    ) -> LocalBoxFuture<'_, Result<Vec<Extent>, VolumeError>> {
        Box::pin(async move {
            let Some(below) = self.below() else { return self.extents_of_file(at, end).await };
            let end = end.min(at + BYTES_PER_QUESTION);
            self.know(&below, &(at..end)).await?;
            let runs = self.cover.borrow().runs(&(at..end));
            let (mut extents, mut at) = (Vec::new(), at);
            for (bytes, holds) in runs {
                if extents.len() >= RUNS_PER_QUESTION {
                    break;
                }
                let next = at + bytes;
                match holds {
                    Holds::Own => push_run(&mut extents, Extent { bytes, is_allocated: true }),
                    Holds::Zeroes => push_run(&mut extents, Extent { bytes, is_allocated: false }),
                    Holds::Below => {
                        let seen = next.min(below.bytes).max(at);
                        while at < seen {
                            if extents.len() >= RUNS_PER_QUESTION {
                                return Ok(extents);
                            }
                            for run in below.layer.extents(at, seen).await? {
                                at += run.bytes;
                                push_run(&mut extents, run);
                            }
                        }
                        push_run(&mut extents, Extent { bytes: next - at, is_allocated: false });
                    }
                }
                at = next;
            }
            Ok(extents)
        })
    }

    /// The first place from `at` on, before `end`, where something is stored, down to the last layer.
    pub async fn data(&self, at: u64, end: u64) -> Result<Option<u64>, VolumeError> {
        let mut at = at;
        while at < end {
            at = self.next_data(at, end).await?;
            if at >= end {
                break;
            }
            for run in self.extents(at, end).await? {
                if run.is_allocated {
                    return Ok(Some(at));
                }
                at += run.bytes;
            }
        }
        Ok(None)
    }

    /// Before this place no layer has data; what has some there may be hidden.
    async fn next_data(&self, at: u64, end: u64) -> Result<u64, VolumeError> {
        let (mut next, mut seen) = (self.file.data(at, end).await?, end);
        let mut below = self.below();
        while let Some(Below { layer, bytes, .. }) = below {
            seen = seen.min(bytes);
            if at < seen {
                let found = layer.file.data(at, seen).await?;
                next = if found < seen { next.min(found) } else { next };
            }
            below = layer.below();
        }
        Ok(next)
    }

    async fn extents_of_file(&self, at: u64, end: u64) -> Result<Vec<Extent>, VolumeError> {
        let (mut extents, mut at) = (Vec::new(), at);
        while at < end && extents.len() < RUNS_PER_QUESTION {
            let data = self.file.data(at, end).await?;
            push_run(&mut extents, Extent { bytes: data - at, is_allocated: false });
            at = data;
            if at < end {
                let hole = self.file.hole(at, end).await?;
                push_run(&mut extents, Extent { bytes: hole - at, is_allocated: true });
                at = hole;
            }
        }
        Ok(extents)
    }
}
