//! The rows of a log in its target's key-value store.
//!
//! ```text
//! M                             the log itself: identity, geometry, sequence, next generation, life
//! L                             the lives before: up to where the changes of each survived
//! G | segment                   a segment in use; a free one has no row
//! O | object                    an object that exists
//! E | object | offset           an extent of it, with its checksums
//! C                             the scrub that was ordered last: how far it is, or what it found
//! S | version | offset          a staged change: durable here until its stripe is indexed
//! ```
//!
//! Keys are big-endian, values little-endian. The store checks its own bytes; a value that
//! still makes no sense, or tells of a place that the log does not have, is [`LogError::Index`].

use crate::LogError;
use crate::bytes::{Fields, PutFields};
use crate::cuts::{Cut, Cuts};
use crate::extents::{Extent, Place, Record};
use crate::heat::Heat;
use levada_base::Epoch;
use levada_base::ids::{BootVerifier, ObjectId, Seq};
use levada_base::units::BLOCK_BYTES;
use std::rc::Rc;

const LOG_MAGIC: u64 = u64::from_le_bytes(*b"LVOBJLOG");
const FORMAT: u8 = 1;
/// Of the log's own row. Before the second version it did not tell the order of stripes, which was that of (generation,
/// place).
const LOG_FORMAT: u32 = 2;
/// Of rows of objects that tell their stored bytes. Those before it do not.
const OBJECT_FORMAT: u8 = 2;

pub(crate) const LOG_KEY: &[u8] = b"M";
pub(crate) const LIVES_KEY: &[u8] = b"L";
pub(crate) const SCRUB_KEY: &[u8] = b"C";
pub(crate) const SEGMENTS: u8 = b'G';
pub(crate) const OBJECTS: u8 = b'O';
pub(crate) const EXTENTS: u8 = b'E';
pub(crate) const STAGED: u8 = b'S';

/// What a log says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogRow {
    pub fs: u64,
    pub target: u32,
    pub segment_stripes: u32,
    pub epoch: Epoch,
    pub stripe_bytes: u64,
    pub stripes: u64,
    pub next_generation: u64,
    /// No change has a later sequence, apart from those lost in a crash.
    pub seq: u64,
    /// Bytes of all extent and object rows.
    pub index_bytes: u64,
    /// Every change up to here is in the index or staged, and none after it.
    pub indexed_seq: u64,
    /// Of the one who wrote this row; 0 in rows from before it was told.
    pub verifier: BootVerifier,
    /// Stripes were given back that no stripe written since tells of: declared anew they show what they held.
    pub is_untold: bool,
    /// The order at which the stripes end that the index knows; `None` in rows of the first version.
    pub indexed_order: Option<u64>,
}

impl LogRow {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(104);
        out.put_u64(LOG_MAGIC);
        out.put_u32(if self.indexed_order.is_some() { LOG_FORMAT } else { 1 });
        out.put_u32(self.target);
        out.put_u64(self.fs);
        out.put_u64(self.epoch.0);
        out.put_u64(self.stripe_bytes);
        out.put_u64(self.stripes);
        out.put_u32(self.segment_stripes);
        out.put_u32(u32::from(self.is_untold));
        out.put_u64(self.next_generation);
        out.put_u64(self.seq);
        out.put_u64(self.index_bytes);
        out.put_u64(self.indexed_seq);
        out.put_u64(self.verifier.0);
        if let Some(order) = self.indexed_order {
            out.put_u64(order);
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, LogError> {
        let mut fields = Fields(bytes);
        let row = (|| {
            let (magic, format) = (fields.u64()?, fields.u32()?);
            if magic != LOG_MAGIC || !(1..=LOG_FORMAT).contains(&format) {
                return None;
            }
            let target = fields.u32()?;
            let fs = fields.u64()?;
            let epoch = Epoch(fields.u64()?);
            let stripe_bytes = fields.u64()?;
            let stripes = fields.u64()?;
            let segment_stripes = fields.u32()?;
            let is_untold = fields.u32()? & 1 == 1;
            Some(Self {
                fs,
                target,
                segment_stripes,
                epoch,
                stripe_bytes,
                stripes,
                next_generation: fields.u64()?,
                seq: fields.u64()?,
                index_bytes: fields.u64()?,
                indexed_seq: fields.u64().unwrap_or(0),
                verifier: BootVerifier(fields.u64().unwrap_or(0)),
                is_untold,
                indexed_order: if format == 1 { None } else { Some(fields.u64()?) },
            })
        })();
        row.ok_or(LogError::Index { row: "log" })
    }

    pub fn has_segment(&self, segment: u32) -> bool {
        let stripes = u64::from(self.segment_stripes);
        (u64::from(segment) + 1) * stripes <= self.stripes
    }
}

/// Lives of a log that ended, the last one at the end: up to where the changes that each acknowledged survived
/// it. Sequences above that were given out again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lives(Vec<(BootVerifier, Seq)>);

/// A client that missed more lives than this sends everything again.
const LIVES_MAX: usize = 64;

impl Lives {
    /// The life `verifier` ended, and everything up to `survived` is there. One of which nothing is there need
    /// not be known, as all of it is sent again: so a log that cannot be opened for a while forgets none.
    pub fn ended(&mut self, verifier: BootVerifier, survived: Seq) {
        let before = self.0.last().map_or(Seq(0), |(_, survived)| *survived);
        if survived <= before {
            return;
        }
        self.0.push((verifier, survived));
        let oldest = self.0.len().saturating_sub(LIVES_MAX);
        self.0.drain(..oldest);
    }

    /// Up to where the changes of a life survived; `None` when none did, or that one is not known any more.
    pub fn survived(&self, verifier: BootVerifier) -> Option<Seq> {
        let known = self.0.iter().rfind(|(life, _)| *life == verifier);
        known.map(|(_, survived)| *survived)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![FORMAT, 0, 0, 0];
        out.put_u32(self.0.len() as u32);
        for (verifier, survived) in &self.0 {
            out.put_u64(verifier.0);
            out.put_u64(survived.0);
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, LogError> {
        let mut fields = Fields(bytes);
        let lives = (|| {
            let [FORMAT, 0, 0, 0] = fields.take(4)? else { return None };
            let count = fields.u32()? as usize;
            let life = |_| Some((BootVerifier(fields.u64()?), Seq(fields.u64()?)));
            (count <= LIVES_MAX).then(|| (0..count).map(life).collect::<Option<_>>())?
        })();
        lives.map(Self).ok_or(LogError::Index { row: "lives" })
    }
}

/// A segment in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentRow {
    /// False while it is being filled.
    pub closed: bool,
    /// What it is filled with.
    pub heat: Heat,
    pub generation: u64,
    /// No record in it that a replay of the log would take for true, and that is not, is older:
    /// data that died, truncations and holes. `u64::MAX` when there is none.
    pub outdated_min: u64,
    /// The sequence when its last record was indexed: its age.
    pub version_max: u64,
    /// Footprints of the extents that the index has in it.
    pub live_bytes: u64,
    /// Records without data in it.
    pub marks: u64,
    /// Of those, the ones that carry the size of an object; 0 in rows from before they were counted.
    pub sizes: u64,
    /// Stripes from the first on that the index knows.
    pub indexed_stripes: u32,
}

impl SegmentRow {
    pub fn key(segment: u32) -> Vec<u8> {
        let mut key = vec![SEGMENTS];
        key.extend_from_slice(&segment.to_be_bytes());
        key
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![FORMAT, u8::from(self.closed), self.heat as u8, 0];
        out.put_u32(self.indexed_stripes);
        out.put_u64(self.generation);
        out.put_u64(self.outdated_min);
        out.put_u64(self.version_max);
        out.put_u64(self.live_bytes);
        out.put_u64(self.marks);
        out.put_u64(self.sizes);
        out
    }

    pub fn decode(key: &[u8], bytes: &[u8]) -> Result<(u32, Self), LogError> {
        let mut fields = Fields(bytes);
        let row = (|| {
            let segment = u32::from_be_bytes(key.get(1..)?.try_into().ok()?);
            let [FORMAT, closed @ (0 | 1), heat @ (0 | 1), 0] = fields.take(4)? else {
                return None;
            };
            let (closed, heat) = (*closed == 1, Heat::ALL[usize::from(*heat)]);
            let indexed_stripes = fields.u32()?;
            let row = Self {
                closed,
                heat,
                generation: fields.u64()?,
                outdated_min: fields.u64()?,
                version_max: fields.u64()?,
                live_bytes: fields.u64()?,
                marks: fields.u64()?,
                sizes: if fields.0.is_empty() { 0 } else { fields.u64()? },
                indexed_stripes,
            };
            Some((segment, row))
        })();
        row.ok_or(LogError::Index { row: "segment" })
    }
}

/// A record that carries the size of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// 0: none.
    pub version: u64,
    /// Where it lies. `None` in rows from before they told: then the segment's row has counted it as
    /// outdated from the start.
    pub segment: Option<u32>,
}

/// An object that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObjectRow {
    pub size: u64,
    /// The newest truncation or hole: that record carries the size. Without one, the end of the
    /// extents is the size.
    pub mark: Mark,
    pub cuts: Cuts,
    /// Bytes that its extents hold. `None` in rows from before they told.
    pub stored_bytes: Option<u64>,
}

impl ObjectRow {
    pub fn key(object: ObjectId) -> Vec<u8> {
        let mut key = vec![OBJECTS];
        key.extend_from_slice(&object.to_key());
        key
    }

    pub fn id(key: &[u8]) -> Result<ObjectId, LogError> {
        let id = key.get(1..).and_then(|id| id.try_into().ok());
        Ok(ObjectId::from_key(id.ok_or(LogError::Index { row: "object" })?))
    }

    pub fn encode(&self) -> Vec<u8> {
        let format = if self.stored_bytes.is_some() { OBJECT_FORMAT } else { FORMAT };
        let mut out = vec![format, self.cuts.iter().len() as u8, 0, 0];
        out.put_u32(self.mark.segment.map_or(0, |segment| segment + 1));
        out.put_u64(self.size);
        out.put_u64(self.mark.version);
        if let Some(stored_bytes) = self.stored_bytes {
            out.put_u64(stored_bytes);
        }
        for cut in self.cuts.iter() {
            out.put_u64(cut.version);
            out.put_u64(cut.size);
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, LogError> {
        let mut fields = Fields(bytes);
        let row = (|| {
            let [format @ (FORMAT | OBJECT_FORMAT), count, 0, 0] = *fields.take(4)? else {
                return None;
            };
            let segment = fields.u32()?.checked_sub(1);
            let (size, version) = (fields.u64()?, fields.u64()?);
            let mark = Mark { version, segment };
            let stored_bytes = if format == OBJECT_FORMAT { Some(fields.u64()?) } else { None };
            let cuts = (0..count)
                .map(|_| Some(Cut { version: fields.u64()?, size: fields.u64()? }))
                .collect::<Option<_>>()?;
            Some(Self { size, mark, cuts: Cuts::load(cuts)?, stored_bytes })
        })();
        row.ok_or(LogError::Index { row: "object" })
    }
}

pub(crate) fn extent_key(object: ObjectId, offset: u64) -> Vec<u8> {
    let mut key = Vec::with_capacity(33);
    key.push(EXTENTS);
    key.extend_from_slice(&object.to_key());
    key.extend_from_slice(&offset.to_be_bytes());
    key
}

/// The row of `extent` at `offset`: of its record's checksums only those that cover it.
pub(crate) fn encode_extent(offset: u64, extent: &Extent) -> Vec<u8> {
    let record = &extent.record;
    let (first, last) = extent.blocks(offset);
    let crcs =
        &record.crcs[(first as u32 - record.first_block) as usize..][..(last - first) as usize];
    let mut out = Vec::with_capacity(56 + 4 * crcs.len());
    // Format, compression, flags.
    out.extend_from_slice(&[FORMAT, 0, 0, 0]);
    out.put_u32(record.place.segment);
    out.put_u32(record.place.stripe);
    out.put_u32(record.place.at);
    out.put_u64(record.version);
    out.put_u64(record.offset);
    out.put_u64(extent.len);
    out.put_u32(record.stored);
    out.put_u32(first as u32);
    // Key id: 0 is plain.
    out.put_u32(0);
    out.put_u32(crcs.len() as u32);
    for crc in crcs {
        out.put_u32(*crc);
    }
    out
}

pub(crate) fn decode_extent(key: &[u8], bytes: &[u8]) -> Result<(u64, Extent), LogError> {
    let mut fields = Fields(bytes);
    let row = (|| {
        let offset = u64::from_be_bytes(*key.last_chunk()?);
        if fields.take(4)? != [FORMAT, 0, 0, 0] {
            return None;
        }
        let place = Place { segment: fields.u32()?, stripe: fields.u32()?, at: fields.u32()? };
        let version = fields.u64()?;
        let start = fields.u64()?;
        let len = fields.u64()?;
        let stored = fields.u32()?;
        let first_block = fields.u32()?;
        let key_id = fields.u32()?;
        let count = fields.u32()?;
        let crcs = fields.u32s(count as usize)?.into_boxed_slice();
        let skip = offset.checked_sub(start)?;
        let inside = skip.checked_add(len)? <= u64::from(stored) && len > 0;
        let first = skip / BLOCK_BYTES;
        let last = (skip + len).div_ceil(BLOCK_BYTES);
        if key_id != 0
            || !inside
            || first != u64::from(first_block)
            || last - first != u64::from(count)
        {
            return None;
        }
        let record = Record { place, version, offset: start, stored, first_block, crcs };
        Some((offset, Extent { len, record: Rc::new(record) }))
    })();
    row.ok_or(LogError::Index { row: "extent" })
}

pub(crate) fn staged_key(version: u64, offset: u64) -> Vec<u8> {
    let mut key = vec![STAGED];
    key.extend_from_slice(&version.to_be_bytes());
    key.extend_from_slice(&offset.to_be_bytes());
    key
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::ids::Ino;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn extents_are_read_as_written(skip in 0..30_000u64, len in 1..30_000u64, more in 0..9000u64, start in 0..1u64 << 60) {
            let stored = skip + len + more;
            let record = Rc::new(Record {
                place: Place { segment: 1, stripe: 2, at: 3 },
                version: 4,
                offset: start,
                stored: stored as u32,
                first_block: 0,
                crcs: (0..stored.div_ceil(BLOCK_BYTES) as u32).collect(),
            });
            let extent = Extent { len, record };
            let object = ObjectId { fs: 1, ino: Ino(2), component: 3, version: 4 };
            let offset = start + skip;
            let (read_at, read) =
                decode_extent(&extent_key(object, offset), &encode_extent(offset, &extent)).expect("valid");
            prop_assert_eq!(read_at, offset);
            prop_assert_eq!(read.blocks(offset), extent.blocks(offset));
            let (first, last) = extent.blocks(offset);
            prop_assert_eq!(&read.record.crcs[..], &extent.record.crcs[first as usize..last as usize]);
            // A row read back is written the same.
            prop_assert_eq!(encode_extent(offset, &read), encode_extent(offset, &extent));
        }

        #[test]
        fn object_rows_are_read_as_written(size in any::<u64>(), version in 1..u64::MAX, segment in prop::option::of(0..u32::MAX), cuts in 0..4u64, stored_bytes in prop::option::of(any::<u64>())) {
            let cuts = (0..cuts).map(|n| Cut { version: n, size: n * 7 }).collect();
            let cuts = Cuts::load(cuts).expect("they ascend");
            let row = ObjectRow { size, mark: Mark { version, segment }, cuts, stored_bytes };
            prop_assert_eq!(ObjectRow::decode(&row.encode()).expect("valid"), row);
        }

        #[test]
        fn arbitrary_rows_do_no_harm(key in prop::collection::vec(any::<u8>(), 0..40), mut value in prop::collection::vec(any::<u8>(), 0..100)) {
            for format in [true, false] {
                if format && value.len() > 4 {
                    value[..4].copy_from_slice(&[FORMAT, 0, 0, 0]);
                }
                let _ = (decode_extent(&key, &value), SegmentRow::decode(&key, &value));
                let _ = (ObjectRow::id(&key), ObjectRow::decode(&value), LogRow::decode(&value));
            }
        }
    }

    /// Rows from before they told where the mark lies, and how much is stored.
    #[test]
    fn an_older_object_row_is_read() {
        let mut old = vec![FORMAT, 0, 0, 0, 0, 0, 0, 0];
        old.put_u64(5);
        old.put_u64(9);
        let mark = Mark { version: 9, segment: None };
        let row = ObjectRow { size: 5, mark, ..ObjectRow::default() };
        assert_eq!(ObjectRow::decode(&old).expect("valid"), row);
    }
}
