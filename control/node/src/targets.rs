//! The target table: which part of the arrays each target has.
//!
//! One block at offset 0 of the metadata array, written once, as the last step of formatting: a
//! cluster whose table is missing was never complete and holds nothing. Ranges never overlap,
//! and stripe ranges are whole stripes, so no two targets share one.
//!
//! ```text
//!    0  magic "LVTARGET"     8  version u32 = 1    12  crc32c u32 (of the block, this field 0)
//!   16  cluster uuid        32  file system uuid   48  owner epoch u64   56  targets u32
//!   64  file system name, 64 bytes, zero padded
//!  128  entries of 40 bytes: id u32, kind u32 (1 metadata, 2 objects),
//!       metadata range start u64, bytes u64, first stripe u64, stripes u64
//! ```

use levada_base::Epoch;
use levada_base::checksum::crc32c;
use levada_base::ids::{TargetId, Uuid};
use levada_base::units::{BLOCK_BYTES, MIB, round_down};

const MAGIC: &[u8; 8] = b"LVTARGET";
const VERSION: u32 = 1;
const ENTRIES_AT: usize = 128;
const ENTRY_BYTES: usize = 40;
/// Targets that the one block has room for.
pub const TARGETS_MAX: usize = (BLOCK_BYTES as usize - ENTRIES_AT) / ENTRY_BYTES;
/// The table's share of the metadata array.
const TABLE_BYTES: u64 = MIB;
/// A key-value store smaller than this is not worth having.
const STORE_BYTES_MIN: u64 = 24 * MIB;

/// What a target serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    Metadata,
    Objects,
}

/// A target's part of the arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetEntry {
    pub id: TargetId,
    pub kind: TargetKind,
    /// Byte range of the metadata array for its key-value store.
    pub store_at: u64,
    pub store_bytes: u64,
    /// Stripes of the data array; none for metadata.
    pub first_stripe: u64,
    pub stripes: u64,
}

impl TargetEntry {
    /// What people call it: `mdt0`, `ost3`.
    #[must_use]
    pub fn name(&self) -> String {
        match self.kind {
            TargetKind::Metadata => format!("mdt{}", self.id.0),
            TargetKind::Objects => format!("ost{}", self.id.0),
        }
    }
}

/// The table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetTable {
    pub cluster: Uuid,
    pub fs: Uuid,
    pub fs_name: String,
    pub epoch: Epoch,
    pub targets: Vec<TargetEntry>,
}

/// Why a table could not be made or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    #[error("{targets} targets, {TARGETS_MAX} at most")]
    TooMany { targets: usize },
    #[error(
        "the metadata array is too small: {bytes} bytes for {targets} targets, {STORE_BYTES_MIN} needed for each"
    )]
    StoresTooSmall { bytes: u64, targets: usize },
    #[error("the data array is too small: {stripes} stripes for {targets} object targets")]
    TooFewStripes { stripes: u64, targets: usize },
    #[error(
        "there is no target table: the very first `levada up` was interrupted, and nothing is stored; `levada up --destroy CLUSTER` starts over"
    )]
    Missing,
    #[error("the target table is damaged ({what})")]
    Damaged { what: &'static str },
}

/// Deals the arrays to targets: half of the metadata array to names (metadata targets), half
/// to the indexes of object targets; the data array evenly to object targets.
///
/// # Errors
///
/// When a part would be too small to use.
pub fn deal(
    metadata_bytes: u64,
    stripes: u64,
    segment_stripes: u64,
    metadata_targets: u32,
    object_targets: u32,
) -> Result<Vec<TargetEntry>, TableError> {
    let count = metadata_targets as usize + object_targets as usize;
    if count > TARGETS_MAX {
        return Err(TableError::TooMany { targets: count });
    }
    let half = metadata_bytes.saturating_sub(TABLE_BYTES) / 2;
    let names_bytes = round_down(half / u64::from(metadata_targets.max(1)), MIB);
    let index_bytes = round_down(half / u64::from(object_targets.max(1)), MIB);
    if names_bytes.min(index_bytes) < STORE_BYTES_MIN {
        return Err(TableError::StoresTooSmall { bytes: metadata_bytes, targets: count });
    }
    let per_target = round_down(stripes / u64::from(object_targets.max(1)), segment_stripes);
    if per_target < 8 * segment_stripes {
        return Err(TableError::TooFewStripes { stripes, targets: object_targets as usize });
    }
    let mut store_at = TABLE_BYTES;
    let mut targets = Vec::new();
    for n in 0..metadata_targets {
        targets.push(TargetEntry {
            id: TargetId(n),
            kind: TargetKind::Metadata,
            store_at,
            store_bytes: names_bytes,
            first_stripe: 0,
            stripes: 0,
        });
        store_at += names_bytes;
    }
    for n in 0..object_targets {
        targets.push(TargetEntry {
            id: TargetId(metadata_targets + n),
            kind: TargetKind::Objects,
            store_at,
            store_bytes: index_bytes,
            first_stripe: u64::from(n) * per_target,
            stripes: per_target,
        });
        store_at += index_bytes;
    }
    Ok(targets)
}

impl TargetTable {
    /// The table's block.
    ///
    /// # Panics
    ///
    /// When there are more than [`TARGETS_MAX`] targets, which [`deal`] never makes.
    #[must_use]
    pub fn encode(&self) -> [u8; BLOCK_BYTES as usize] {
        assert!(self.targets.len() <= TARGETS_MAX, "{} targets", self.targets.len());
        let mut block = [0; BLOCK_BYTES as usize];
        block[..8].copy_from_slice(MAGIC);
        block[8..12].copy_from_slice(&VERSION.to_le_bytes());
        block[16..32].copy_from_slice(self.cluster.as_bytes());
        block[32..48].copy_from_slice(self.fs.as_bytes());
        block[48..56].copy_from_slice(&self.epoch.0.to_le_bytes());
        block[56..60].copy_from_slice(&(self.targets.len() as u32).to_le_bytes());
        let name = &self.fs_name.as_bytes()[..self.fs_name.len().min(64)];
        block[64..64 + name.len()].copy_from_slice(name);
        for (entry, at) in self.targets.iter().zip((ENTRIES_AT..).step_by(ENTRY_BYTES)) {
            let kind: u32 = match entry.kind {
                TargetKind::Metadata => 1,
                TargetKind::Objects => 2,
            };
            let mut out = &mut block[at..at + ENTRY_BYTES];
            let mut put = |bytes: &[u8]| {
                let (head, tail) = std::mem::take(&mut out).split_at_mut(bytes.len());
                head.copy_from_slice(bytes);
                out = tail;
            };
            put(&entry.id.0.to_le_bytes());
            put(&kind.to_le_bytes());
            for n in [entry.store_at, entry.store_bytes, entry.first_stripe, entry.stripes] {
                put(&n.to_le_bytes());
            }
        }
        let crc = crc32c(&block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
        block
    }

    /// Reads a block.
    ///
    /// # Errors
    ///
    /// [`TableError::Missing`] when it is all zeroes, [`TableError::Damaged`] when it is wrong.
    pub fn decode(block: &[u8]) -> Result<Self, TableError> {
        let damaged = |what| TableError::Damaged { what };
        let block: [u8; BLOCK_BYTES as usize] =
            block.try_into().map_err(|_| damaged("not one block"))?;
        if block.iter().all(|byte| *byte == 0) {
            return Err(TableError::Missing);
        }
        let u32_at = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().expect("8 bytes"));
        if &block[..8] != MAGIC {
            return Err(damaged("wrong magic"));
        }
        let mut unsummed = block;
        unsummed[12..16].fill(0);
        if crc32c(&unsummed) != u32_at(12) {
            return Err(damaged("wrong checksum"));
        }
        if u32_at(8) != VERSION {
            return Err(damaged("unknown version"));
        }
        let count = u32_at(56) as usize;
        if count > TARGETS_MAX {
            return Err(damaged("too many targets"));
        }
        let uuid_at =
            |at: usize| Uuid::from_bytes(block[at..at + 16].try_into().expect("16 bytes"));
        let name = &block[64..128];
        let name = &name[..name.iter().position(|byte| *byte == 0).unwrap_or(name.len())];
        let mut targets = Vec::with_capacity(count);
        for at in (ENTRIES_AT..).step_by(ENTRY_BYTES).take(count) {
            targets.push(TargetEntry {
                id: TargetId(u32_at(at)),
                kind: match u32_at(at + 4) {
                    1 => TargetKind::Metadata,
                    2 => TargetKind::Objects,
                    _ => return Err(damaged("unknown kind of target")),
                },
                store_at: u64_at(at + 8),
                store_bytes: u64_at(at + 16),
                first_stripe: u64_at(at + 24),
                stripes: u64_at(at + 32),
            });
        }
        Ok(Self {
            cluster: uuid_at(16),
            fs: uuid_at(32),
            fs_name: String::from_utf8_lossy(name).into_owned(),
            epoch: Epoch(u64_at(48)),
            targets,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::units::GIB;

    fn table() -> TargetTable {
        TargetTable {
            cluster: Uuid::from_u128(1),
            fs: Uuid::from_u128(2),
            fs_name: "fs".into(),
            epoch: Epoch(3),
            targets: deal(GIB, 10_000, 32, 1, 4).expect("fits"),
        }
    }

    #[test]
    fn targets_never_overlap() {
        let table = table();
        let mut at = TABLE_BYTES;
        let mut stripe = 0;
        for target in &table.targets {
            assert_eq!(target.store_at, at);
            at += target.store_bytes;
            assert_eq!(target.first_stripe, stripe);
            stripe += target.stripes;
        }
        assert!(at <= GIB && stripe <= 10_000);
        assert_eq!(table.targets[4].name(), "ost4");
    }

    #[test]
    fn a_table_reads_back_and_damage_is_seen() {
        let table = table();
        let block = table.encode();
        assert_eq!(TargetTable::decode(&block), Ok(table));
        assert_eq!(TargetTable::decode(&[0; 4096]), Err(TableError::Missing));
        for at in [0, 9, 13, 60, 140, 4095] {
            let mut bad = block;
            bad[at] ^= 0x10;
            assert!(matches!(TargetTable::decode(&bad), Err(TableError::Damaged { .. })), "{at}");
        }
    }

    #[test]
    fn parts_too_small_are_refused() {
        assert!(matches!(deal(40 * MIB, 10_000, 32, 1, 4), Err(TableError::StoresTooSmall { .. })));
        assert!(matches!(deal(GIB, 100, 32, 1, 4), Err(TableError::TooFewStripes { .. })));
        assert!(matches!(deal(GIB, 10_000, 32, 1, 400), Err(TableError::TooMany { .. })));
    }
}
