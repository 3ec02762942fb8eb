//! What was changed since the last checkpoint: segments of rows in memory, newest on top.
//!
//! What always holds:
//! - A segment holds whole batches, and segments hold consecutive ones.
//! - Only the newest segment takes changes; a closed one is written to the checkpoint as a whole
//!   and goes away afterwards.
//! - The log bytes of a segment are bounded, so the log always has room for the oldest whole
//!   segment, and a checkpoint never waits for room that only it can make.
//!
//! After a crash the segments are filled again from the intent log.

use crate::format::{Change, LogPoint};
use crate::store::Bytes;
use std::cell::{Cell, Ref, RefCell};
use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::iter::Peekable;
use std::ops::Bound;
use std::rc::Rc;

/// A row's place in a segment: its new value, or that it is removed.
pub(crate) type Rows = BTreeMap<Bytes, Option<Bytes>>;

/// Consecutive batches, merged.
pub(crate) struct Segment {
    /// Segments are numbered in order.
    pub id: u64,
    pub rows: RefCell<Rows>,
    /// The last batch in here.
    pub last_seq: Cell<u64>,
    /// Bytes in the log: of the records written, and at most of those to come.
    pub log_bytes: Cell<u64>,
    /// Bytes of keys and values in memory.
    pub bytes: Cell<usize>,
    /// What the rows can take in the checkpoint, at most ([`row_cost`]).
    pub cost: Cell<u64>,
    /// Where the log goes on after the last record of this segment.
    pub end: Cell<LogPoint>,
}

/// Values longer than this are cut into chunks that fill a page of the checkpoint each; what is
/// left over, up to this, stays in the row.
pub(crate) const INLINE_BYTES_MAX: usize = 2048;
/// Bytes of such a chunk: a page less what the engine and the chunk's key take.
pub(crate) const CHUNK_BYTES: usize = 4000;
/// What a row takes besides its key and value.
const ROW_OVERHEAD_BYTES: usize = 32;

/// The bytes that a row can take in the checkpoint at most: pages of the tree are at least a
/// third full, a chunk has a page to itself.
#[must_use]
pub const fn row_cost(key_bytes: usize, value_bytes: usize) -> u64 {
    let (chunks, inline) = cut_value(value_bytes);
    (3 * (key_bytes + inline + ROW_OVERHEAD_BYTES) + chunks * 4352) as u64
}

/// How a value is cut: its chunks, of which the last may be short, and the bytes left over.
pub(crate) const fn cut_value(value_bytes: usize) -> (usize, usize) {
    let (chunks, left) = (value_bytes / CHUNK_BYTES, value_bytes % CHUNK_BYTES);
    if left <= INLINE_BYTES_MAX { (chunks, left) } else { (chunks + 1, 0) }
}

impl Segment {
    fn new(id: u64) -> Rc<Self> {
        Rc::new(Self {
            id,
            rows: RefCell::default(),
            last_seq: Cell::new(0),
            log_bytes: Cell::new(0),
            bytes: Cell::new(0),
            cost: Cell::new(0),
            end: Cell::default(),
        })
    }

    fn insert(&self, (key, value): &Change) {
        let size = |value: &Option<Bytes>| {
            let value_bytes = value.as_ref().map(|value| value.len());
            let cost = value_bytes.map_or(0, |bytes| row_cost(key.len(), bytes));
            (key.len() + value_bytes.unwrap_or(0) + 64, cost)
        };
        let (bytes, cost) = size(value);
        self.bytes.set(self.bytes.get() + bytes);
        self.cost.set(self.cost.get() + cost);
        let old = self.rows.borrow_mut().insert(Rc::clone(key), value.clone());
        if let Some(old) = old {
            let (bytes, cost) = size(&old);
            self.bytes.set(self.bytes.get() - bytes);
            self.cost.set(self.cost.get() - cost);
        }
    }
}

/// The segments, oldest first; there is always one that takes changes.
pub(crate) struct Overlay {
    segments: RefCell<VecDeque<Rc<Segment>>>,
}

impl Overlay {
    pub(crate) fn new() -> Self {
        Self { segments: RefCell::new(VecDeque::from([Segment::new(1)])) }
    }

    /// The segment that takes changes.
    pub(crate) fn active(&self) -> Rc<Segment> {
        Rc::clone(self.segments.borrow().back().expect("one segment is always there"))
    }

    /// Puts a batch into the active segment.
    pub(crate) fn insert(&self, seq: u64, changes: &[Change]) -> Rc<Segment> {
        let active = self.active();
        for change in changes {
            active.insert(change);
        }
        active.last_seq.set(seq);
        active
    }

    /// Closes the active segment, unless it is empty.
    pub(crate) fn rotate(&self) {
        let active = self.active();
        if active.last_seq.get() > 0 {
            self.segments.borrow_mut().push_back(Segment::new(active.id + 1));
        }
    }

    /// The oldest closed segment.
    pub(crate) fn oldest_closed(&self) -> Option<Rc<Segment>> {
        let segments = self.segments.borrow();
        (segments.len() > 1).then(|| Rc::clone(&segments[0]))
    }

    /// Removes the oldest closed segment, which the checkpoint holds now.
    pub(crate) fn drop_oldest(&self) {
        let mut segments = self.segments.borrow_mut();
        assert!(segments.len() > 1, "the active segment stays");
        segments.pop_front();
    }

    /// Closed segments that wait for their checkpoint.
    pub(crate) fn closed(&self) -> usize {
        self.segments.borrow().len() - 1
    }

    /// True when no batch is in any segment.
    pub(crate) fn is_empty(&self) -> bool {
        self.closed() == 0 && self.active().last_seq.get() == 0
    }

    /// What all rows can take in the checkpoint.
    pub(crate) fn cost(&self) -> u64 {
        self.segments.borrow().iter().map(|segment| segment.cost.get()).sum()
    }

    /// Bytes of keys and values in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.segments.borrow().iter().map(|segment| segment.bytes.get()).sum()
    }

    /// The segments as they are now, oldest first.
    pub(crate) fn stack(&self) -> Vec<Rc<Segment>> {
        self.segments.borrow().iter().cloned().collect()
    }

    /// `Some(None)` when the newest change of `key` here removed it.
    pub(crate) fn get(&self, key: &[u8]) -> Option<Option<Bytes>> {
        let segments = self.segments.borrow();
        segments.iter().rev().find_map(|segment| segment.rows.borrow().get(key).cloned())
    }
}

/// Lays `stack` (oldest first) over `below`, which is in key order and complete between the
/// bounds, and returns the first `limit` rows.
pub(crate) fn merge(
    stack: &[Rc<Segment>],
    from: Bound<&[u8]>,
    to: Bound<&[u8]>,
    below: &[(Bytes, Bytes)],
    limit: usize,
) -> Vec<(Bytes, Bytes)> {
    if is_empty_range(from, to) {
        return Vec::new();
    }
    let borrowed: Vec<Ref<'_, Rows>> = stack.iter().rev().map(|s| s.rows.borrow()).collect();
    let changed = borrowed.iter().map(|rows| rows.range::<[u8], _>((from, to)).peekable());
    merge_in_order(changed.collect(), below, limit, |one, other| one.cmp(other))
}

/// As [`merge`], but from the end: `below` and what is returned have the last key first.
pub(crate) fn merge_back(
    stack: &[Rc<Segment>],
    from: Bound<&[u8]>,
    to: Bound<&[u8]>,
    below: &[(Bytes, Bytes)],
    limit: usize,
) -> Vec<(Bytes, Bytes)> {
    if is_empty_range(from, to) {
        return Vec::new();
    }
    let borrowed: Vec<Ref<'_, Rows>> = stack.iter().rev().map(|s| s.rows.borrow()).collect();
    let changed = borrowed.iter().map(|rows| rows.range::<[u8], _>((from, to)).rev().peekable());
    merge_in_order(changed.collect(), below, limit, |one, other| other.cmp(one))
}

/// Merges rows that are in this order; of `changed` the first one that has a key counts.
fn merge_in_order<'a>(
    mut changed: Vec<Peekable<impl Iterator<Item = (&'a Bytes, &'a Option<Bytes>)>>>,
    below: &[(Bytes, Bytes)],
    limit: usize,
    order: fn(&&Bytes, &&Bytes) -> Ordering,
) -> Vec<(Bytes, Bytes)> {
    let mut below = below.iter().peekable();
    let mut merged = Vec::new();
    while merged.len() < limit {
        let newest = changed.iter_mut().filter_map(|rows| rows.peek().map(|(key, _)| *key));
        let newest = newest.min_by(order);
        let next = newest.into_iter().chain(below.peek().map(|(key, _)| key)).min_by(order);
        let Some(key) = next.map(Rc::clone) else { break };
        let old = below.next_if(|(below, _)| *below == key).map(|(_, value)| value);
        let mut value = None;
        for rows in &mut changed {
            if let Some((_, change)) = rows.next_if(|(at, _)| **at == key) {
                value = value.or(Some(change.as_ref()));
            }
        }
        if let Some(value) = value.unwrap_or(old) {
            merged.push((key, Rc::clone(value)));
        }
    }
    merged
}

/// True when nothing can lie between the bounds; a map's `range` panics on some of these.
pub(crate) fn is_empty_range(from: Bound<&[u8]>, to: Bound<&[u8]>) -> bool {
    use Bound::{Excluded, Included, Unbounded};
    match (from, to) {
        (Unbounded, _) | (_, Unbounded) => false,
        (Included(from), Included(to)) => from > to,
        (Included(from) | Excluded(from), Excluded(to)) | (Excluded(from), Included(to)) => {
            from >= to
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(key: u8, value: Option<u8>) -> Change {
        ([key][..].into(), value.map(|value| [value][..].into()))
    }

    #[test]
    fn the_newest_change_of_each_key_wins() {
        let overlay = Overlay::new();
        overlay.insert(1, &[change(1, Some(10)), change(2, Some(20)), change(3, None)]);
        overlay.rotate();
        overlay.insert(2, &[change(2, None), change(4, Some(40))]);
        let below: Vec<(Bytes, Bytes)> =
            [2u8, 3, 5].iter().map(|key| ([*key][..].into(), [0][..].into())).collect();
        let rows = merge(&overlay.stack(), Bound::Unbounded, Bound::Unbounded, &below, 9);
        let rows: Vec<_> = rows.iter().map(|(key, value)| (key[0], value[0])).collect();
        assert_eq!(rows, [(1, 10), (4, 40), (5, 0)]);
        let below: Vec<_> = below.into_iter().rev().collect();
        let rows = merge_back(&overlay.stack(), Bound::Unbounded, Bound::Unbounded, &below, 2);
        let rows: Vec<_> = rows.iter().map(|(key, value)| (key[0], value[0])).collect();
        assert_eq!(rows, [(5, 0), (4, 40)]);
        assert_eq!(overlay.get(&[2]), Some(None));
        assert_eq!(overlay.get(&[5]), None);
        assert_eq!(overlay.cost(), 3 * row_cost(1, 1), "two puts below, one above");
    }
}
