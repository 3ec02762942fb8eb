//! The record of a scrub in the index: how far it is, so that it goes on there after an
//! interruption, and what the last one found.
//!
//! What always holds: what the record says is checked was checked, and what was put right there is
//! durable. It may lag behind: what it does not tell of is checked again, which is harmless.
//!
//! A record that nobody can read, or that a later version wrote, is none: the scrub begins anew.
//! One that is rebuilt from the segments with the rest of the index is gone, likewise.

use super::ScrubReport;
use crate::LogError;
use crate::bytes::{Fields, PutFields};
use crate::log::ObjectLog;
use crate::rows::SCRUB_KEY;
use levada_base::ids::{Ino, ObjectId};
use levada_kv::{Batch, KvError, Store};

const FORMAT: u8 = 1;
const OVER: u8 = 1;
/// Damaged places that are on record one by one.
const DAMAGED_MAX: usize = 64;

/// Up to where objects are checked, in the order of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub object: ObjectId,
    /// Extents of the object that start below are checked; `u64::MAX`: all of it.
    pub offset: u64,
}

impl Position {
    pub(super) const START: Self =
        Self { object: ObjectId { fs: 0, ino: Ino(0), component: 0, version: 0 }, offset: 0 };
}

/// A scrub that is under way, was interrupted, or is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubRecord {
    /// Which one it is, as its [`ScrubOrder`](super::ScrubOrder) said.
    pub run: u64,
    /// When it ended, in seconds of the clock that its order had; `None` when it is not over.
    pub ended_s: Option<u64>,
    /// What it has found so far.
    pub found: ScrubReport,
    pub(crate) position: Position,
    /// Footprints of what is checked.
    pub(crate) checked_bytes: u64,
}

impl ScrubRecord {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let found = &self.found;
        let listed = &found.damaged[..found.damaged.len().min(DAMAGED_MAX)];
        let unlisted = found.unlisted + (found.damaged.len() - listed.len()) as u64;
        let over = if self.ended_s.is_some() { OVER } else { 0 };
        let mut out = vec![FORMAT, over, 0, 0];
        out.put_u32(listed.len() as u32);
        out.put_u64(self.run);
        out.put_u64(self.ended_s.unwrap_or(0));
        out.extend_from_slice(&self.position.object.to_key());
        for number in [
            self.position.offset,
            self.checked_bytes,
            found.objects,
            found.extents,
            found.bytes,
            found.repaired_blocks,
            unlisted,
        ] {
            out.put_u64(number);
        }
        for (object, offset, bytes) in listed {
            out.extend_from_slice(&object.to_key());
            out.put_u64(*offset);
            out.put_u64(*bytes);
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let [FORMAT, over @ (0 | OVER), 0, 0] = *fields.take(4)? else { return None };
        let listed = fields.u32()?;
        let (run, ended_s) = (fields.u64()?, fields.u64()?);
        let position = Position { object: object(&mut fields)?, offset: fields.u64()? };
        let checked_bytes = fields.u64()?;
        let mut found = ScrubReport {
            objects: fields.u64()?,
            extents: fields.u64()?,
            bytes: fields.u64()?,
            repaired_blocks: fields.u64()?,
            unlisted: fields.u64()?,
            damaged: Vec::new(),
        };
        for _ in 0..listed {
            found.damaged.push((object(&mut fields)?, fields.u64()?, fields.u64()?));
        }
        // What no scrub ever reaches, and nothing could be added to.
        let counts = [checked_bytes, found.objects, found.extents, found.bytes];
        if [&counts[..], &[found.repaired_blocks, found.unlisted]]
            .concat()
            .iter()
            .any(|n| n >> 56 > 0)
        {
            return None;
        }
        let ended_s = (over == OVER).then_some(ended_s);
        Some(Self { run, ended_s, found, position, checked_bytes })
    }

    pub(super) async fn load(store: &Store) -> Result<Option<Self>, LogError> {
        Ok(store.get(SCRUB_KEY).await?.as_deref().and_then(Self::decode))
    }

    /// Stores it, if there is room: it is a convenience.
    pub(super) async fn store(&self, store: &Store) -> Result<(), LogError> {
        match store.room().await {
            Ok(()) => {}
            Err(KvError::Full) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let mut batch = Batch::default();
        batch.put(SCRUB_KEY, &self.encode());
        store.durable(store.apply(batch)?).await?;
        Ok(())
    }
}

fn object(fields: &mut Fields) -> Option<ObjectId> {
    Some(ObjectId::from_key(fields.take(24)?.try_into().ok()?))
}

impl ObjectLog {
    /// The scrub that was ordered last, as far as it is on record.
    ///
    /// # Errors
    ///
    /// When the store fails.
    pub async fn scrub_record(&self) -> Result<Option<ScrubRecord>, LogError> {
        ScrubRecord::load(&self.0.store).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(n: u64) -> ObjectId {
        ObjectId { fs: 1, ino: Ino(n), component: 2, version: 3 }
    }

    proptest! {
        #[test]
        fn records_are_read_as_written(counts in any::<[u64; 5]>(), run in any::<u64>(), offset in any::<u64>(), ino in any::<u64>(), ended_s in any::<Option<u64>>(), damaged in 0..100u64) {
            let [checked_bytes, objects, extents, bytes, repaired_blocks] = counts.map(|n| n >> 8);
            let unlisted = 5;
            let damaged = (0..damaged).map(|n| (id(n), n * 2, n * 3)).collect();
            let found = ScrubReport { objects, extents, bytes, repaired_blocks, damaged, unlisted };
            let position = Position { object: id(ino), offset };
            let record = ScrubRecord { run, ended_s, found, position, checked_bytes };
            let mut read = ScrubRecord::decode(&record.encode()).expect("valid");
            prop_assert_eq!(read.found.places(), record.found.places());
            prop_assert!(record.found.damaged.starts_with(&read.found.damaged));
            (read.found.damaged, read.found.unlisted) = (record.found.damaged.clone(), unlisted);
            prop_assert_eq!(read, record);
        }

        #[test]
        fn what_is_no_record_is_none(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = ScrubRecord::decode(&bytes);
            let mut later = bytes;
            later.insert(0, FORMAT + 1);
            prop_assert_eq!(ScrubRecord::decode(&later), None);
        }
    }
}
