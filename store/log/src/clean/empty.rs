//! Emptying segments: what is live in them is read in the order of the array and written in the order of its objects,
//! so that a file whose pieces came interleaved with those of others lies in one place afterwards.

use crate::LogError;
use crate::extents::{Extent, Place};
use crate::format::{RecordHeader, RecordKind};
use crate::log::Inner;
use crate::object::{Object, View};
use crate::pages::Held;
use crate::stripe::Payload;
use crate::write::Need;
use futures_util::stream::{self, StreamExt};
use levada_base::ids::ObjectId;
use levada_base::reactor::yield_now;
use levada_base::{Buf, IoVec};
use levada_raid::IoClass;
use std::rc::Rc;

/// Summaries of stripes read at once.
const SUMMARIES_AT_ONCE: usize = 8;

/// An extent that must be copied.
struct Live {
    object: ObjectId,
    version: u64,
    offset: u64,
    extent: Extent,
}

impl Live {
    fn place(&self) -> Place {
        self.extent.record.place
    }

    fn end(&self) -> u64 {
        self.offset + self.extent.len
    }

    /// True when `next` is a piece of the same change and follows this one, so that both become one again.
    fn goes_on_in(&self, next: &Self) -> bool {
        (self.object, self.version, self.end()) == (next.object, next.version, next.offset)
    }
}

/// Pieces of one change that follow each other, with their bytes.
struct Copies(Vec<(Live, Buf)>);

/// Bytes of a change that follow each other, and where they were.
struct Left {
    offset: u64,
    bytes: u64,
    parts: IoVec,
    from: Vec<Place>,
}

impl Copies {
    /// The first that is left of the pieces from an offset on: others may have written over them or cut them since.
    fn left(&self, now: &View, from: u64) -> Option<Left> {
        let mut left: Option<Left> = None;
        for (live, bytes) in self.0.iter().filter(|(live, _)| live.end() > from) {
            let pieces = now.extents.overlapping(live.offset.max(from), live.end());
            for (at, extent) in pieces.filter(|(_, extent)| extent.record.place == live.place()) {
                let left = left.get_or_insert_with(|| Left::at(at));
                if left.end() != at {
                    break;
                }
                left.parts.push(bytes.slice((at - live.offset) as usize, extent.len as usize));
                left.bytes += extent.len;
                left.from.push(live.place());
            }
            if left.as_ref().is_some_and(|left| left.end() != live.end()) {
                break;
            }
        }
        left
    }
}

impl Left {
    fn at(offset: u64) -> Self {
        Self { offset, bytes: 0, parts: IoVec::new(), from: Vec::new() }
    }

    fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// What a segment holds that matters.
#[derive(Default)]
struct Contents {
    live: Vec<Live>,
    /// Its records without data.
    marks: Vec<RecordHeader>,
}

impl Inner {
    /// Copies everything that matters out of segments. Those of which some cannot be read stay as they are, and are
    /// marked so; the others are returned.
    pub(super) async fn empty(self: &Rc<Self>, victims: &[u32]) -> Result<Vec<u32>, LogError> {
        let mut emptied = Vec::new();
        let (mut live, mut marks) = (Vec::new(), Vec::new());
        for victim in victims {
            match self.contents(*victim).await? {
                Some(contents) => {
                    live.extend(contents.live);
                    marks.push((*victim, contents.marks));
                }
                None => self.cannot_be_read(*victim),
            }
        }
        let extents: Vec<_> = live.iter().map(|live| (live.offset, live.extent.clone())).collect();
        let mut copies: Vec<(Live, Buf)> = Vec::with_capacity(live.len());
        for (live, bytes) in live.into_iter().zip(self.sweep(&extents, IoClass::Clean).await?) {
            match bytes {
                Some(bytes) => copies.push((live, bytes)),
                None => self.cannot_be_read(live.place().segment),
            }
        }
        let can_be_read = |segment| !self.state.borrow().segments.damaged.contains(&segment);
        copies.retain(|(live, _)| can_be_read(live.place().segment));
        copies.sort_by_key(|(live, _)| (live.object.to_key(), live.offset));
        let mut copies = copies.into_iter().peekable();
        while let Some(first) = copies.next() {
            let mut pieces = vec![first];
            while let Some(next) = copies
                .next_if(|(next, _)| pieces.last().is_some_and(|(piece, _)| piece.goes_on_in(next)))
            {
                pieces.push(next);
            }
            self.copy(&Copies(pieces)).await?;
        }
        for (victim, marks) in marks {
            if can_be_read(victim) && self.keep_marks(victim, marks).await? {
                emptied.push(victim);
            } else {
                self.cannot_be_read(victim);
            }
        }
        Ok(emptied)
    }

    fn cannot_be_read(&self, segment: u32) {
        self.state.borrow_mut().segments.damaged.insert(segment);
    }

    /// What a segment holds that matters. `None` when some of it cannot be read.
    async fn contents(self: &Rc<Self>, victim: u32) -> Result<Option<Contents>, LogError> {
        let (stripes, generation) = {
            let state = self.state.borrow();
            let segment = state.segments.get(victim);
            // It may have died by itself since it was chosen.
            if !segment.is_settled() || segment.is_dead() {
                return Ok(Some(Contents::default()));
            }
            (segment.used_stripes, segment.row.generation)
        };
        let summaries =
            (0..stripes).map(|stripe| self.summary_of(victim, stripe, Some(generation)));
        let summaries: Vec<_> = stream::iter(summaries).buffered(SUMMARIES_AT_ONCE).collect().await;
        let mut contents = Contents::default();
        for (stripe, summary) in (0..stripes).zip(summaries) {
            let Some((_, records)) = summary? else { return Ok(None) };
            for header in records {
                match header.kind {
                    RecordKind::Data => {
                        let Some(live) = self.live(victim, stripe, &header).await? else {
                            return Ok(None);
                        };
                        contents.live.extend(live);
                    }
                    RecordKind::Truncate | RecordKind::Punch | RecordKind::Delete => {
                        contents.marks.push(header);
                    }
                }
            }
            yield_now().await;
        }
        Ok(Some(contents))
    }

    /// What is live of a record. `None` when a row of its object is damaged.
    async fn live(
        &self,
        segment: u32,
        stripe: u32,
        header: &RecordHeader,
    ) -> Result<Option<Vec<Live>>, LogError> {
        let place = Place { segment, stripe, at: header.data_at };
        let (from, to) = (header.offset, header.offset + header.len);
        let Some((object, _held)) = self.loaded(header.object, from, to).await? else {
            return Ok(None);
        };
        let now = object.now.borrow();
        let pieces = now.extents.overlapping(from, to);
        let live =
            pieces.filter(|(_, extent)| extent.record.place == place).map(|(offset, extent)| {
                Live {
                    object: header.object,
                    version: header.version,
                    offset,
                    extent: extent.clone(),
                }
            });
        Ok(Some(live.collect()))
    }

    /// Copies what is left of the pieces of a change.
    async fn copy(self: &Rc<Self>, copies: &Copies) -> Result<(), LogError> {
        self.pace().await?;
        let (first, last) = (&copies.0[0].0, &copies.0[copies.0.len() - 1].0);
        let (version, mut next) = (first.version, first.offset);
        // Asked for again: a round would hold the maps of many objects.
        let loaded = self.loaded(first.object, first.offset, last.end()).await?;
        let Some((object, _held)) = loaded else {
            copies.0.iter().for_each(|(live, _)| self.cannot_be_read(live.place().segment));
            return Ok(());
        };
        loop {
            // For one of those that are left.
            self.room(Need::Copy).await?;
            let Some(left) = copies.left(&object.now.borrow(), next) else { return Ok(()) };
            next = left.end();
            let Left { offset, bytes, parts, from } = left;
            let from: Rc<[Place]> = from.into();
            let mut payload = Payload::new(&parts);
            self.put_records(&object, version, offset, bytes, &mut payload, Some(&from));
            self.objects.shrink();
        }
    }

    /// The same object, and what touches a range of it, which stays in memory.
    async fn loaded(
        &self,
        id: ObjectId,
        from: u64,
        to: u64,
    ) -> Result<Option<(Rc<Object>, Held)>, LogError> {
        let Some(object) = self.readable(id).await? else { return Ok(None) };
        match self.objects.load_to_change(&object, from, to).await {
            Ok(held) => Ok(Some((object, held))),
            Err(LogError::Index { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The object by that name; `None` when a row of it makes no sense. Nobody knows what matters of it
    /// then, so the segments that may hold some of it stay as they are, and the log goes on.
    pub(super) async fn readable(&self, id: ObjectId) -> Result<Option<Rc<Object>>, LogError> {
        match self.objects.get(id).await {
            Ok(object) => Ok(Some(object)),
            Err(LogError::Index { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
