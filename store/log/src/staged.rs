//! Staged changes on their own: what a store holds of changes that have reached no stripe, kept while the index
//! beside them is made anew ([`crate::rebuild`]).
//!
//! As a file they are
//!
//! ```text
//! magic "LVSTAGED" | count u32 | count times: key length u32, value length u32, key, value | CRC32C u32
//! ```
//!
//! whole or nothing: a torn file is none.

use crate::LogError;
use crate::bytes::{Fields, PutFields};
use crate::format::{RecordHeader, RecordKind};
use crate::open::scan_all;
use crate::rows::{self, LOG_KEY, STAGED};
use levada_base::checksum::crc32c;
use levada_kv::Store;

const MAGIC: u64 = u64::from_le_bytes(*b"LVSTAGED");

/// The rows of staged changes, as a store holds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StagedRows(Vec<(Vec<u8>, Vec<u8>)>);

/// One that makes sense.
pub(crate) struct StagedChange {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub header: RecordHeader,
}

impl StagedRows {
    /// Those of a store.
    ///
    /// # Errors
    ///
    /// When it cannot be read.
    pub async fn of(store: &Store) -> Result<Self, LogError> {
        let rows = scan_all(store, STAGED).await?.into_iter();
        Ok(Self(rows.map(|(key, value)| (key.to_vec(), value.to_vec())).collect()))
    }

    /// True when a store says that it holds a log, be that readable or not. One that was being made anew does not.
    ///
    /// # Errors
    ///
    /// When it cannot be read.
    pub async fn has_log(store: &Store) -> Result<bool, LogError> {
        Ok(store.get(LOG_KEY).await?.is_some())
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// As a file.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.put_u64(MAGIC);
        out.put_u32(self.0.len() as u32);
        for (key, value) in &self.0 {
            out.put_u32(key.len() as u32);
            out.put_u32(value.len() as u32);
            out.extend_from_slice(key);
            out.extend_from_slice(value);
        }
        let crc = crc32c(&out);
        out.put_u32(crc);
        out
    }

    /// From a file; `None` when it is not whole.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (body, crc) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
        if crc32c(body) != u32::from_le_bytes(crc.try_into().ok()?) {
            return None;
        }
        let mut fields = Fields(body);
        if fields.u64()? != MAGIC {
            return None;
        }
        let mut rows = Vec::new();
        for _ in 0..fields.u32()? {
            let (key, value) = (fields.u32()? as usize, fields.u32()? as usize);
            rows.push((fields.take(key)?.to_vec(), fields.take(value)?.to_vec()));
        }
        fields.0.is_empty().then_some(Self(rows))
    }

    /// The changes in the order of their versions, and how many rows make no sense.
    pub(crate) fn changes(&self) -> (Vec<StagedChange>, u64) {
        let mut damaged = 0;
        let mut changes = Vec::new();
        for (key, value) in &self.0 {
            match header(key, value) {
                Some(header) => {
                    changes.push(StagedChange { key: key.clone(), value: value.clone(), header })
                }
                None => damaged += 1,
            }
        }
        (changes, damaged)
    }
}

/// The header of a staged change, if it is whole and its key is its own.
fn header(key: &[u8], value: &[u8]) -> Option<RecordHeader> {
    let header = staged_header(value)?;
    (rows::staged_key(header.version, header.offset) == key).then_some(header)
}

/// The header of a staged change, if it is whole.
pub(crate) fn staged_header(value: &[u8]) -> Option<RecordHeader> {
    let (header, taken) = RecordHeader::decode(value)?;
    let data_bytes = value.len().checked_sub(taken)? as u64;
    (header.kind != RecordKind::Data || data_bytes == header.len).then_some(header)
}

impl StagedChange {
    /// True when all of it is in these records of its object. Opening a log may have split it, and not all
    /// pieces need have arrived.
    pub fn is_in(&self, records: &[&RecordHeader]) -> bool {
        let of_version = records.iter().filter(|record| {
            record.version == self.header.version && record.kind == self.header.kind
        });
        if self.header.kind != RecordKind::Data {
            return of_version.count() > 0;
        }
        let mut pieces: Vec<(u64, u64)> =
            of_version.map(|record| (record.offset, record.offset + record.len)).collect();
        pieces.sort_unstable();
        let mut at = self.header.offset;
        for (from, to) in pieces {
            if from <= at {
                at = at.max(to);
            }
        }
        at >= self.header.offset + self.header.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_or_none() {
        let rows = StagedRows(vec![(vec![b'S', 1], vec![2; 5]), (vec![b'S'], vec![])]);
        let bytes = rows.encode();
        assert_eq!(StagedRows::decode(&bytes), Some(rows));
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1;
            assert_eq!(StagedRows::decode(&wrong), None);
            assert_eq!(StagedRows::decode(&bytes[..at]), None);
        }
    }
}
