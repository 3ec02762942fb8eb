//! Holes: zeroes that are not stored, and where there is data between them.
//!
//! As byte x of a file is byte x of its object, a range of the file is the same range of every object that has
//! a part of it, and the file's data is where any of its objects has some.

use super::{Inode, OFFSET_MAX};
use crate::error::Error;
use futures_util::future::join_all;
use levada_wire::object::{DataRanges, Hole};
use std::rc::Rc;

/// Ranges asked of each object at once where the next hole is looked for.
const RANGES: u32 = 64;

/// What is looked for in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    Data,
    Hole,
}

impl Inode {
    /// Makes a hole; in its turn among writes, and told to the metadata service like one.
    pub(crate) async fn punch(self: &Rc<Self>, hole: Hole) -> Result<(), Error> {
        let end = hole.offset.checked_add(hole.bytes).filter(|end| *end <= OFFSET_MAX);
        let end = end.ok_or(Error::Invalid)?;
        if hole.bytes == 0 {
            return Ok(());
        }
        self.punch_objects(hole, end).await
    }

    /// Makes the file at least `size` bytes long.
    pub(crate) async fn grow(self: &Rc<Self>, size: u64) -> Result<(), Error> {
        if size > OFFSET_MAX {
            return Err(Error::Invalid);
        }
        if self.size_upto(size).await? >= size {
            return Ok(());
        }
        // Empty, so that whatever others write there meanwhile stays.
        self.punch_objects(Hole { offset: size, bytes: 0, grows: true }, size).await
    }

    async fn punch_objects(self: &Rc<Self>, hole: Hole, end: u64) -> Result<(), Error> {
        let _turn = self.turn_to_write(hole.offset, end).await?;
        // The object that has the last byte reaches the end, which is enough for the file to.
        let last = self.layout.locate(end - 1).0;
        let parts = self.components_in(self.components_of(hole.offset, end)).map(|component| {
            let grows = hole.grows && component == last;
            async move {
                let must_exist = self.must_exist(component);
                let target = self.target(component);
                let object = self.object(component);
                let punch = || target.punch(object, Hole { grows, ..hole });
                let done = self.core.with_room(&target, (object, 0), punch).await;
                match done {
                    Err(Error::Missing { .. }) if must_exist => return Err(self.missing(component)),
                    // All of it is a hole.
                    Err(Error::Missing { .. }) => return Ok(()),
                    Ok(()) | Err(_) => {}
                }
                // What another client made and has not synced may go in a restart, until that one sends it again.
                self.reached(component, done.is_ok() && (grows || must_exist));
                done
            }
        });
        let parts = join_all(parts).await;
        self.wrote(parts, if hole.grows { end } else { 0 })
    }

    /// The components that have a part of `start..end`; of an empty range the one before it.
    fn components_of(&self, start: u64, end: u64) -> u64 {
        let unit = self.layout.stripe_unit;
        let (first, last) = (start.min(end - 1) / unit, (end - 1) / unit);
        let units = first..=last.min(first + self.layout.targets.len() as u64 - 1);
        units.fold(0, |bits, at| bits | 1 << self.layout.locate(at * unit).0)
    }

    /// Finds data or a hole; what comes behind the end is neither. Where data goes on past `enough`, it is not asked
    /// to where, and some place behind that is told as the hole.
    pub(crate) async fn seek(
        self: &Rc<Self>,
        offset: u64,
        what: Seek,
        enough: u64,
    ) -> Result<Option<u64>, Error> {
        if offset > OFFSET_MAX {
            return Ok(None);
        }
        self.ranges.passed(offset, u64::MAX).await;
        let found = match what {
            Seek::Data => {
                let found = self.data_ranges(offset, 1).await?;
                found.ranges.first().map_or(u64::MAX, |first| first.start)
            }
            Seek::Hole => self.next_hole(offset, enough).await?,
        };
        let size = self.size_upto(found.saturating_add(1)).await?;
        Ok(match what {
            Seek::Data => (found < size).then_some(found),
            Seek::Hole => (offset < size).then_some(found.min(size)),
        })
    }

    async fn next_hole(self: &Rc<Self>, mut at: u64, enough: u64) -> Result<u64, Error> {
        loop {
            let DataRanges { ranges, upto } = self.data_ranges(at, RANGES).await?;
            for range in ranges {
                if range.start > at {
                    break;
                }
                at = range.end.max(at);
            }
            if at < upto || at >= self.size.get().min(enough) {
                return Ok(at);
            }
        }
    }

    /// The data of all objects from `offset` on, in order: all that there is up to `upto`.
    pub(super) async fn data_ranges(
        self: &Rc<Self>,
        offset: u64,
        ranges_max: u32,
    ) -> Result<DataRanges, Error> {
        let asked = self.components_in(self.every_component()).map(|component| async move {
            let must_exist = self.must_exist(component);
            let object = self.object(component);
            match self.target(component).data_ranges(object, offset, ranges_max).await? {
                None if must_exist => Err(self.missing(component)),
                found => Ok(found),
            }
        });
        let mut all = DataRanges { ranges: Vec::new(), upto: u64::MAX };
        for found in join_all(asked).await {
            if let Some(found) = found? {
                all.ranges.extend(found.ranges);
                all.upto = all.upto.min(found.upto);
            }
        }
        all.ranges.sort_by_key(|range| range.start);
        Ok(all)
    }
}
