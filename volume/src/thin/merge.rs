//! Two layers become one, where nobody needs the lower one as it is: what is seen of it *rises*, or the upper one *sinks* into it,
//! whichever is less to copy.
//!
//! What always holds: until it is noted elsewhere that it is done, the upper layer shows what it showed, so that nothing is lost
//! where it is interrupted.

use super::cover::{GRANULE_BYTES, HIDDEN_BYTES, Holds, REGION_BYTES};
use super::layer::{Below, Layer, TOLD_BYTES, Told, hidden_bytes};
use super::sparse::Sparse;
use crate::VolumeError;
use crate::gate::Gate;
use levada_base::units::{MIB, round_down, round_up};
use levada_device::Durability;
use std::ops::Range;

/// Bytes that are copied at once.
const COPIED_BYTES: u64 = MIB;

impl<F: Sparse> Layer<F> {
    /// Brings up what is seen of the layer below, which then is needed no more: [`Self::without`]. Goes on beside requests, and
    /// where it was interrupted.
    ///
    /// `gate`: that of the volume whose topmost layer it is, if it is one.
    pub async fn rise(&self, gate: &Gate) -> Result<(), VolumeError> {
        let mut at = 0;
        loop {
            // It may be cut meanwhile.
            let Some(below) = self.below() else { break };
            at = below.layer.next_used(at, below.bytes).await?;
            if at >= below.bytes {
                break;
            }
            let end = (at + REGION_BYTES).min(below.bytes);
            for (bytes, holds) in below.layer.holds(at..end).await? {
                let (from, to) = (at, at + bytes);
                at = to;
                match holds {
                    Holds::Own => self.bring_up(&below, from..to, gate).await?,
                    Holds::Zeroes => self.bring_up_zeroes(&below, from..to).await?,
                    Holds::Below => {}
                }
            }
            at = end;
        }
        self.sync().await
    }

    /// Puts what the layer holds and hides of `size` bytes into the one below, which nobody else sees, and which then can take its
    /// place. That one was cut to what is seen of it, and is `size` bytes long. While the layer is changed, [`Self::sink`] must follow.
    pub async fn sink_all(&self, size: u64) -> Result<(), VolumeError> {
        let Some(below) = self.below() else { return Ok(()) };
        let mut at = self.next_used(0, size).await?;
        while at < size {
            let end = (at + REGION_BYTES).min(size);
            self.sink_part(&below, at..end).await?;
            at = self.next_used(end, size).await?;
        }
        Ok(())
    }

    /// The first region from `at` on that may hold or hide something, before `end`; else `end`. A volume may be larger than anything
    /// that is stored.
    async fn next_used(&self, at: u64, end: u64) -> Result<u64, VolumeError> {
        if at >= end {
            return Ok(end);
        }
        let mut next = self.file.data(at, end).await?;
        if let Some(below) = self.below() {
            let (first, past) = (at / REGION_BYTES * HIDDEN_BYTES, hidden_bytes(below.bytes));
            let hidden = match first < past {
                true => below.hidden.data(first, past).await?,
                false => past,
            };
            if hidden < past {
                next = next.min(hidden / HIDDEN_BYTES * REGION_BYTES);
            }
        }
        Ok(if next < end { round_down(next, REGION_BYTES).max(at) } else { end })
    }

    /// As [`Self::sink_all`], of what [`Self::take_changed`] tells.
    pub async fn sink(&self, parts: &[Range<u64>]) -> Result<(), VolumeError> {
        let Some(below) = self.below() else { return Ok(()) };
        for part in parts {
            let mut at = part.start;
            while at < part.end {
                let end = part.end.min(round_down(at, REGION_BYTES) + REGION_BYTES);
                self.sink_part(&below, at..end).await?;
                at = end;
            }
        }
        Ok(())
    }

    async fn sink_part(&self, below: &Below<F>, bytes: Range<u64>) -> Result<(), VolumeError> {
        let mut at = bytes.start;
        for (bytes, holds) in self.holds(bytes).await? {
            let (mut from, to) = (at, at + bytes);
            at = to;
            match holds {
                Holds::Own => {
                    while from < to {
                        let bytes = COPIED_BYTES.min(to - from);
                        let read = self.file.read(from, bytes).await?;
                        below.layer.write(from, read, Durability::Volatile).await?;
                        from += bytes;
                    }
                }
                Holds::Zeroes => below.layer.punch(from, to - from).await?,
                // Behind what is seen there is nothing; something may have been there before.
                Holds::Below if to > below.bytes => {
                    let from = from.max(below.bytes);
                    below.layer.punch(from, to - from).await?;
                }
                Holds::Below => {}
            }
        }
        Ok(())
    }

    /// Begins to tell what is changed.
    pub fn tell_changed(&self) {
        *self.changed.borrow_mut() = Some(Told::default());
    }

    /// True when the volume was cut since [`Self::tell_changed`]: what sank behind that would come back, should it have grown again.
    pub fn is_cut(&self) -> bool {
        self.changed.borrow().as_ref().is_some_and(|told| told.is_cut)
    }

    /// Where something of `size` bytes was changed since this, or [`Self::tell_changed`], was called last.
    pub fn take_changed(&self, size: u64) -> Vec<Range<u64>> {
        let told = self.changed.borrow_mut().as_mut().map(|told| std::mem::take(&mut told.parts));
        let mut changed: Vec<Range<u64>> = Vec::new();
        for number in told.unwrap_or_default() {
            let part = number * TOLD_BYTES..size.min((number + 1) * TOLD_BYTES);
            match changed.last_mut() {
                _ if part.is_empty() => {}
                Some(last) if last.end == part.start => last.end = part.end,
                _ => changed.push(part),
            }
        }
        changed
    }

    pub fn tell_no_more(&self) {
        *self.changed.borrow_mut() = None;
    }

    /// Bytes that [`Self::rise`] would copy, and those that [`Self::sink`] would.
    pub async fn weigh(&self, size: u64) -> Result<(u64, u64), VolumeError> {
        let Some(below) = self.below() else { return Ok((0, 0)) };
        let (mut up, mut down, mut at) = (0, 0, 0);
        loop {
            let seen = below.bytes.min(size);
            let used = below.layer.next_used(at, seen).await?;
            let used = if used < seen { used } else { size };
            at = self.next_used(at, size).await?.min(used);
            if at >= size {
                break;
            }
            let end = (at + REGION_BYTES).min(size);
            for (bytes, holds) in self.holds(at..end).await? {
                match holds {
                    Holds::Own => down += bytes,
                    Holds::Below if at < below.bytes => {
                        let seen = below.layer.holds(at..below.bytes.min(at + bytes)).await?;
                        let own = seen.iter().filter(|(_, holds)| *holds == Holds::Own);
                        up += own.map(|(bytes, _)| bytes).sum::<u64>();
                    }
                    Holds::Below | Holds::Zeroes => {}
                }
                at += bytes;
            }
            // What has no end told is a hole.
            at = end;
        }
        Ok((up, down))
    }

    /// What lies below once [`Self::rise`] is done.
    pub fn without(&self) -> Option<Below<F>> {
        let below = self.below()?;
        let last = below.layer.below()?;
        Some(Below { layer: last.layer, bytes: last.bytes.min(below.bytes), hidden: below.hidden })
    }

    /// Where bytes are; what a layer with nothing below it does not have is told as below.
    async fn holds(&self, bytes: Range<u64>) -> Result<Vec<(u64, Holds)>, VolumeError> {
        if let Some(below) = self.below() {
            self.know(&below, &bytes).await?;
            return Ok(self.cover.borrow().runs(&bytes));
        }
        let (mut holds, mut at) = (Vec::new(), bytes.start);
        for run in self.data_runs(bytes).await? {
            // The last one may end where no granule does.
            let run =
                round_down(run.start, GRANULE_BYTES).max(at)..round_up(run.end, GRANULE_BYTES);
            holds.push((run.start - at, Holds::Below));
            holds.push((run.end - run.start, Holds::Own));
            at = run.end;
        }
        Ok(holds)
    }

    /// The parts of granules that still show what lies below; they are held meanwhile.
    fn shown(&self, bytes: &Range<u64>) -> Vec<Range<u64>> {
        let (mut shown, mut at) = (Vec::new(), bytes.start);
        for (bytes, holds) in self.cover.borrow().runs(bytes) {
            if holds == Holds::Below {
                shown.push(at..at + bytes);
            }
            at += bytes;
        }
        shown
    }

    async fn bring_up(
        &self,
        below: &Below<F>,
        bytes: Range<u64>,
        gate: &Gate,
    ) -> Result<(), VolumeError> {
        let mut at = bytes.start;
        while at < bytes.end {
            let piece = at..bytes.end.min(at + COPIED_BYTES);
            at = piece.end;
            let _in = gate.pass(piece.start, piece.end - piece.start).await?;
            let _turn = self.changing.lock(piece.start, piece.end).await;
            // Cut, and grown again meanwhile: less of it is seen now.
            let seen = self.below().map_or(0, |below| below.bytes);
            let piece = piece.start..piece.end.min(seen.max(piece.start));
            if piece.is_empty() {
                return Ok(());
            }
            self.know(below, &piece).await?;
            for part in self.shown(&piece) {
                let read = below.layer.read(part.start, part.end - part.start).await?;
                let written = self.file.write(part.start, read, Durability::Volatile).await;
                self.settle(part, written, |cover, granules| cover.own(granules))?;
            }
        }
        Ok(())
    }

    async fn bring_up_zeroes(
        &self,
        below: &Below<F>,
        bytes: Range<u64>,
    ) -> Result<(), VolumeError> {
        let _turn = self.changing.lock(bytes.start, bytes.end).await;
        self.know(below, &bytes).await?;
        for part in self.shown(&bytes) {
            self.hide(below, &part).await?;
        }
        Ok(())
    }
}
