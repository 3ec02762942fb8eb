//! The segment table: which stripes are free, being filled, or hold what is live.

use crate::format::{Before, Unused};
use crate::heat::{ByHeat, Heat};
use crate::rows::SegmentRow;
use levada_base::ids::Seq;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

/// What a segment is for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SegmentState {
    Free,
    /// Takes new stripes.
    Open,
    /// Takes none any more.
    Closed,
    /// Is being discarded.
    Freeing,
}

/// One segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub state: SegmentState,
    /// Its row and its declaration are durable: stripes may be written.
    pub ready: bool,
    pub row: SegmentRow,
    /// Stripes from the first on that were given out in this generation.
    pub used_stripes: u32,
    /// Reads in flight: it is not discarded under them.
    pub readers: Rc<Cell<u32>>,
    /// The batch of the store that changed its row last.
    pub changed_by: Seq,
}

impl Segment {
    fn free() -> Self {
        Self {
            state: SegmentState::Free,
            ready: false,
            row: SegmentRow {
                closed: false,
                heat: Heat::Hot,
                generation: 0,
                outdated_min: u64::MAX,
                version_max: 0,
                live_bytes: 0,
                marks: 0,
                sizes: 0,
                indexed_stripes: 0,
            },
            used_stripes: 0,
            readers: Rc::default(),
            changed_by: Seq(0),
        }
    }

    /// True when nothing is on its way into the index any more.
    pub fn is_settled(&self) -> bool {
        self.state == SegmentState::Closed && self.row.indexed_stripes == self.used_stripes
    }

    /// The age of the oldest record in it that must not come back; see [`SegmentRow::outdated_min`].
    pub fn outdated_min(&self) -> u64 {
        if self.state == SegmentState::Free { u64::MAX } else { self.row.outdated_min }
    }

    /// True when it will be free soon, whatever the cleaner does.
    pub fn is_on_its_way(&self) -> bool {
        self.state == SegmentState::Freeing || self.is_dead()
    }

    /// True when it can be given back as it is.
    pub fn is_dead(&self) -> bool {
        self.is_settled() && self.row.live_bytes == 0 && self.row.marks == 0
    }
}

/// All segments of a log.
#[derive(Debug)]
pub(crate) struct Segments {
    all: Vec<Segment>,
    free: BTreeSet<u32>,
    /// Where the search for a free one goes on, so that use moves around the array.
    next: u32,
    /// Stripes per segment.
    pub stripes: u32,
    /// Those that take new stripes.
    open: ByHeat<Option<u32>>,
    /// A free one that is declared already, with its generation: the next to be used.
    prepared: Option<(u32, u64)>,
    /// The open segment was begun by an earlier owner: it must be made ready again.
    resumed: ByHeat<bool>,
    /// How many were begun since the log was opened.
    begun: u64,
    pub next_generation: u64,
    /// Something in these could be neither read nor repaired: the cleaner leaves them alone.
    pub damaged: BTreeSet<u32>,
}

impl Segments {
    pub fn new(count: u32, stripes: u32, next_generation: u64) -> Self {
        Self {
            all: (0..count).map(|_| Segment::free()).collect(),
            free: (0..count).collect(),
            next: 0,
            stripes,
            open: ByHeat::default(),
            prepared: None,
            resumed: ByHeat::default(),
            begun: 0,
            next_generation,
            damaged: BTreeSet::new(),
        }
    }

    pub fn count(&self) -> u32 {
        self.all.len() as u32
    }

    pub fn get(&self, segment: u32) -> &Segment {
        &self.all[segment as usize]
    }

    pub fn get_mut(&mut self, segment: u32) -> &mut Segment {
        &mut self.all[segment as usize]
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Segment)> {
        self.all.iter().enumerate().map(|(at, segment)| (at as u32, segment))
    }

    pub fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes over a segment as its row says. False when the row cannot be true.
    pub fn load(&mut self, segment: u32, row: SegmentRow) -> bool {
        if row.indexed_stripes > self.stripes || !self.free.remove(&segment) {
            return false;
        }
        let slot = &mut self.all[segment as usize];
        slot.state = SegmentState::Closed;
        slot.ready = true;
        slot.used_stripes = row.indexed_stripes;
        slot.row = SegmentRow { closed: true, ..row };
        if row.indexed_stripes == 0 {
            // What its row says is of stripes that are given back.
            let SegmentRow { generation, heat, .. } = row;
            slot.row = SegmentRow { closed: true, generation, heat, ..Segment::free().row };
        }
        true
    }

    /// Goes on filling a loaded segment that an earlier owner left unfinished. Without this every
    /// crash would cost a segment, until the cleaner gets to it.
    pub fn resume(&mut self, segment: u32) {
        let slot = self.get_mut(segment);
        slot.state = SegmentState::Open;
        slot.ready = false;
        slot.row.closed = false;
        let heat = slot.row.heat;
        self.open[heat] = Some(segment);
        self.resumed[heat] = true;
    }

    /// True when a segment of that heat is being filled.
    pub fn is_open(&self, heat: Heat) -> bool {
        self.open[heat].is_some()
    }

    /// Rises whenever a segment is begun.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Of the free segments those that are used next. They hold nothing, durably: a segment gets
    /// free when its discard is.
    pub fn unused(&self) -> Unused {
        let prepared = self.prepared.map(|(segment, _)| segment);
        let others = self.free.range(self.next..).chain(self.free.range(..self.next)).copied();
        let mut next = prepared.into_iter().chain(others.filter(|at| Some(*at) != prepared));
        let before = self.prepared.map_or(self.next_generation, |(_, generation)| generation);
        Unused { before, segments: std::array::from_fn(|_| next.next()) }
    }

    /// What the footer of the next stripe tells of the one before it, which lies in this segment.
    pub fn told_of(&self, segment: u32) -> Before {
        Before { segment, is_flushed: self.get(segment).row.indexed_stripes > 0 }
    }

    /// Gives a free segment its generation ahead of its use, so that its declaration keeps no stripe waiting. False
    /// when another one is prepared. None was taken since a flushed footer told of it as the next to be used:
    /// so a rebuild of the index knows what it shows until then, and it is free still.
    pub fn prepare(&mut self, segment: u32) -> bool {
        if self.prepared.is_some() {
            return false;
        }
        assert!(self.free.contains(&segment), "segment {segment} is used already");
        self.all[segment as usize].row.generation = self.next_generation;
        self.prepared = Some((segment, self.next_generation));
        self.next_generation += 1;
        true
    }

    /// Stripes of the open segment that are not given out yet.
    pub fn stripes_left(&self, heat: Heat) -> u64 {
        let left = |open: u32| self.stripes - self.get(open).used_stripes;
        u64::from(self.open[heat].map_or(0, left))
    }

    /// Stripes that can be given out while `reserve` free segments stay untouched.
    pub fn stripes_available(&self, heat: Heat, reserve: u32) -> u64 {
        let free = self.free_count();
        if free < reserve {
            return 0;
        }
        self.stripes_left(heat) + u64::from(free - reserve) * u64::from(self.stripes)
    }

    /// Stripes that can be given out at all.
    pub fn stripes_not_given_out(&self) -> u64 {
        self.stripes_available(Heat::Hot, 0) + self.stripes_left(Heat::Cold)
    }

    /// Gives out the next stripe: its segment, its place, and whether the segment must be made
    /// ready from that place on. `None` when no segment is free.
    pub fn take_stripe(&mut self, heat: Heat) -> Option<(u32, u32, bool)> {
        let mut fresh = std::mem::take(&mut self.resumed[heat]);
        if self.open[heat].is_none_or(|open| self.get(open).used_stripes == self.stripes) {
            self.close(heat);
            fresh = self.prepared.is_none();
            if fresh {
                let next = self.free.range(self.next..).next().or_else(|| self.free.first());
                self.prepare(*next?);
            }
            let (at, _) = self.prepared.take()?;
            self.free.remove(&at);
            self.next = at + 1;
            let slot = self.get_mut(at);
            slot.state = SegmentState::Open;
            slot.row.heat = heat;
            self.open[heat] = Some(at);
            self.begun += 1;
        }
        let open = self.open[heat]?;
        let slot = self.get_mut(open);
        slot.used_stripes += 1;
        Some((open, slot.used_stripes - 1, fresh))
    }

    /// Closes the open segment where it stands.
    fn close(&mut self, heat: Heat) {
        if let Some(open) = self.open[heat].take() {
            let slot = self.get_mut(open);
            slot.state = SegmentState::Closed;
            slot.row.closed = true;
        }
    }

    /// A segment is empty again.
    pub fn freed(&mut self, segment: u32) {
        self.all[segment as usize] = Segment::free();
        self.damaged.remove(&segment);
        self.free.insert(segment);
    }
}
