//! The extent map of an object: which record holds which bytes.
//!
//! What always holds: extents do not overlap, none is empty, and each lies inside the bytes of
//! its record. Newer writes cut older ones; the cut parts go on pointing into the old record.

use crate::format::{FOOTER_BYTES, header_bytes};
use crate::rows::{LogRow, Mark};
use levada_base::units::BLOCK_BYTES;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Where a record's data starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Place {
    pub segment: u32,
    /// Place of the stripe in the segment.
    pub stripe: u32,
    /// Bytes from the start of the stripe.
    pub at: u32,
}

impl Place {
    /// True when the log has such a stripe, and a record with `stored` bytes of data fits into it
    /// from here on with its header.
    pub fn is_in(self, log: &LogRow, stored: u32) -> bool {
        let stored = u64::from(stored);
        let end = u64::from(self.at) + stored + header_bytes(stored) + FOOTER_BYTES as u64;
        log.has_segment(self.segment)
            && self.stripe < log.segment_stripes
            && end <= log.stripe_bytes
    }
}

/// A record's data, as far as it was needed when it was read from the index.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub place: Place,
    pub version: u64,
    /// Of the record's first byte in the object.
    pub offset: u64,
    /// Bytes of the record's data.
    pub stored: u32,
    /// The block of the data that `crcs[0]` covers.
    pub first_block: u32,
    pub crcs: Box<[u32]>,
}

/// Some contiguous bytes of an object, all in one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub len: u64,
    pub record: Rc<Record>,
}

impl Extent {
    /// Bytes of log that an extent stands for when it is written by itself: what cleaning it
    /// would need, so that accounting by extents never promises too much.
    pub fn footprint(&self) -> u64 {
        footprint(self.len)
    }

    /// The blocks of the record that cover this extent at `offset`: first and one past the last.
    pub fn blocks(&self, offset: u64) -> (u64, u64) {
        let skip = offset - self.record.offset;
        (skip / BLOCK_BYTES, (skip + self.len).div_ceil(BLOCK_BYTES))
    }
}

/// Bytes of log that a record of `len` bytes takes.
pub(crate) fn footprint(len: u64) -> u64 {
    len.next_multiple_of(8) + header_bytes(len)
}

/// What a change did to a map: extents that left it and extents that came, cut parts included.
pub(crate) trait Watch {
    fn removed(&mut self, offset: u64, extent: &Extent);
    fn added(&mut self, offset: u64, extent: &Extent);
    /// Another record without data, or none, carries its object's size now.
    fn mark_moved(&mut self, from: Mark, to: Mark);
}

/// The map itself, or some of it: the rest is in the index alone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExtentMap {
    extents: BTreeMap<u64, Extent>,
    /// Bytes of all extents, those that are not in memory included.
    stored_bytes: u64,
}

impl ExtentMap {
    /// A map of which nothing is in memory yet.
    pub fn unread(stored_bytes: u64) -> Self {
        Self { extents: BTreeMap::new(), stored_bytes }
    }

    /// Bytes that extents hold, whether they are in memory or not.
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    pub fn len(&self) -> usize {
        self.extents.len()
    }

    pub fn get(&self, offset: u64) -> Option<&Extent> {
        self.extents.get(&offset)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &Extent)> {
        self.extents.iter().map(|(offset, extent)| (*offset, extent))
    }

    /// The extents that touch `from..to`, whole; none when that is empty.
    pub fn overlapping(
        &self,
        from: u64,
        to: u64,
    ) -> impl DoubleEndedIterator<Item = (u64, &Extent)> {
        let before = self.extents.range(..=from).next_back();
        let first = match before {
            Some((offset, extent)) if offset + extent.len > from && from < to => *offset,
            _ => from,
        };
        self.extents.range(first..to.max(first)).map(|(offset, extent)| (*offset, extent))
    }

    /// The offsets at which extents start from `from` on.
    pub fn starts(&self, from: u64) -> impl DoubleEndedIterator<Item = u64> {
        self.extents.range(from..).map(|(offset, _)| *offset)
    }

    /// Takes in an extent that the index has. False when it overlaps.
    pub fn load(&mut self, offset: u64, extent: Extent) -> bool {
        if extent.len == 0 || self.overlapping(offset, offset + extent.len).next().is_some() {
            return false;
        }
        self.extents.insert(offset, extent);
        true
    }

    /// Leaves an extent to the index.
    pub fn forget(&mut self, offset: u64) -> Option<Extent> {
        self.extents.remove(&offset)
    }

    /// Removes everything in `from..to`, cutting what reaches over its edges.
    pub fn remove(&mut self, from: u64, to: u64, watch: &mut impl Watch) {
        let touched: Vec<u64> = self.overlapping(from, to).map(|(offset, _)| offset).collect();
        for offset in touched {
            let extent = self.extents.remove(&offset).expect("found above");
            // What a row says may be wrong.
            self.stored_bytes = self.stored_bytes.saturating_sub(extent.len);
            watch.removed(offset, &extent);
            let end = offset + extent.len;
            if offset < from {
                self.add(offset, from - offset, &extent.record, watch);
            }
            if end > to {
                self.add(to, end - to, &extent.record, watch);
            }
        }
    }

    /// Lays a newer record's bytes over whatever was there.
    pub fn write(&mut self, record: &Rc<Record>, len: u64, watch: &mut impl Watch) {
        self.remove(record.offset, record.offset + len, watch);
        self.add(record.offset, len, record, watch);
    }

    /// Lets what still points at the records at `from` point at `to`, which is a copy of some of
    /// their bytes. Extents that follow each other become one.
    pub fn relocate(&mut self, from: &[Place], to: &Rc<Record>, watch: &mut impl Watch) {
        let end = to.offset + u64::from(to.stored);
        let mut copied: Vec<(u64, u64)> = Vec::new();
        let pieces = self.overlapping(to.offset, end);
        for (offset, extent) in pieces.filter(|(_, extent)| from.contains(&extent.record.place)) {
            let (first, last) = (offset.max(to.offset), (offset + extent.len).min(end));
            match copied.last_mut() {
                Some(before) if before.1 == first => before.1 = last,
                _ => copied.push((first, last)),
            }
        }
        for (first, last) in copied {
            self.remove(first, last, watch);
            self.add(first, last - first, to, watch);
        }
    }

    /// Bytes that the footprints grow by when `from..to` is written as one record; 0 also when they
    /// shrink.
    pub fn growth(&self, from: u64, to: u64) -> u64 {
        let (mut comes, mut goes) = (footprint(to - from), 0);
        for (offset, extent) in self.overlapping(from, to) {
            goes += extent.footprint();
            let end = offset + extent.len;
            if offset < from {
                comes += footprint(from - offset);
            }
            if end > to {
                comes += footprint(end - to);
            }
        }
        comes.saturating_sub(goes)
    }

    fn add(&mut self, offset: u64, len: u64, record: &Rc<Record>, watch: &mut impl Watch) {
        let extent = Extent { len, record: Rc::clone(record) };
        self.stored_bytes = self.stored_bytes.saturating_add(len);
        watch.added(offset, &extent);
        self.extents.insert(offset, extent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Counts bytes that are in the map according to the changes told.
    #[derive(Default)]
    struct Held(i64);

    impl Watch for Held {
        fn removed(&mut self, _: u64, extent: &Extent) {
            self.0 -= extent.len as i64;
        }
        fn added(&mut self, _: u64, extent: &Extent) {
            self.0 += extent.len as i64;
        }
        fn mark_moved(&mut self, _: Mark, _: Mark) {}
    }

    fn record(version: u64, offset: u64, len: u64) -> Rc<Record> {
        let place = Place { segment: version as u32, stripe: 0, at: 0 };
        let crcs = Box::default();
        Rc::new(Record { place, version, offset, stored: len as u32, first_block: 0, crcs })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// The model holds, for every byte, the version and offset in the record.
        #[test]
        fn agrees_with_an_array_of_bytes(ops in prop::collection::vec((0..3u8, 0..200u64, 1..60u64), 1..40)) {
            let mut map = ExtentMap::default();
            let mut model = vec![None; 300];
            let mut held = Held::default();
            for (version, (kind, offset, len)) in ops.into_iter().enumerate() {
                let version = version as u64;
                let range = offset as usize..(offset + len) as usize;
                match kind {
                    0 => {
                        map.remove(offset, offset + len, &mut held);
                        model[range].fill(None);
                    }
                    _ => {
                        map.write(&record(version, offset, len), len, &mut held);
                        for at in range {
                            model[at] = Some((version, at as u64 - offset));
                        }
                    }
                }
                let mut seen = vec![None; 300];
                for (offset, extent) in map.iter() {
                    prop_assert!(extent.len > 0);
                    for at in offset..offset + extent.len {
                        prop_assert_eq!(seen[at as usize], None);
                        seen[at as usize] = Some((extent.record.version, at - extent.record.offset));
                    }
                }
                prop_assert_eq!(&seen, &model);
                prop_assert_eq!(held.0, model.iter().flatten().count() as i64);
                prop_assert_eq!(map.stored_bytes() as i64, held.0);
                let touched = map.overlapping(offset, offset + len).all(|(at, extent)| {
                    at < offset + len && at + extent.len > offset
                });
                prop_assert!(touched);
            }
        }
    }

    #[test]
    fn a_copy_takes_over_only_what_still_points_at_the_old_place() {
        let mut map = ExtentMap::default();
        let mut held = Held::default();
        let old = record(1, 0, 100);
        map.write(&old, 100, &mut held);
        map.write(&record(2, 40, 10), 10, &mut held);
        let mut copy = record(1, 50, 50);
        Rc::get_mut(&mut copy).expect("unshared").place.segment = 9;
        map.relocate(&[old.place], &copy, &mut held);
        let places: Vec<_> =
            map.iter().map(|(offset, extent)| (offset, extent.record.place.segment)).collect();
        assert_eq!(places, [(0, 1), (40, 2), (50, 9)]);
        assert_eq!(held.0, 100);
        // The copy of a part takes over that part only.
        let mut part = record(1, 10, 20);
        Rc::get_mut(&mut part).expect("unshared").place.segment = 8;
        map.relocate(&[old.place], &part, &mut held);
        let places: Vec<_> =
            map.iter().map(|(offset, extent)| (offset, extent.record.place.segment)).collect();
        assert_eq!(places, [(0, 1), (10, 8), (30, 1), (40, 2), (50, 9)]);
        assert_eq!(held.0, 100);
        // One of several pieces that follow each other is one extent again.
        let mut whole = record(1, 0, 40);
        Rc::get_mut(&mut whole).expect("unshared").place.segment = 7;
        map.relocate(&[old.place, part.place], &whole, &mut held);
        let places: Vec<_> =
            map.iter().map(|(offset, extent)| (offset, extent.record.place.segment)).collect();
        assert_eq!(places, [(0, 7), (40, 2), (50, 9)]);
        assert_eq!(held.0, 100);
    }
}
