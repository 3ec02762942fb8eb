//! The drive label: its bytes. Drawn in `docs/design/0002-drive-label.md`.
//!
//! Encoding and decoding without I/O; [`crate::Drive`] reads and writes labels.
//!
//! What always holds:
//! - Decoding never panics and trusts no byte; what it returns could have been encoded.
//! - Slices of a label do not overlap, and lie between the reserved MiBs.

use levada_base::checksum::crc32c;
use levada_base::ids::Uuid;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{Buf, BufMut, Epoch};

/// Bytes of one label: a block, which drives never tear.
pub const LABEL_BYTES: usize = BLOCK_BYTES as usize;
/// Kept free at each end of a drive.
pub const RESERVED_BYTES: u64 = MIB;
/// Slices start and end on multiples of this.
pub const SLICE_ALIGN_BYTES: u64 = MIB;
/// Entries of the slice table.
pub const SLICES_MAX: usize = 16;
/// UTF-8 bytes of a name.
pub const NAME_BYTES_MAX: usize = 63;

/// The first bytes of every version.
pub(crate) const MAGIC: [u8; 8] = *b"LEVDRIVE";
const VERSION: u32 = 1;
const CRC_AT: usize = 12;
const SLICES_AT: usize = 512;
const SLICE_ENTRY_BYTES: usize = 128;

/// What a slice holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SliceKind {
    /// Part of a mirror for metadata and intent logs; rebuilt first.
    Metadata,
    Data,
}

/// One entry of the slice table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEntry {
    pub array_uuid: Uuid,
    pub array_name: String,
    pub kind: SliceKind,
    /// Byte offset on the drive.
    pub start: u64,
    pub bytes: u64,
    /// The latest owner of this slice; see the design note.
    pub owner_epoch: Epoch,
}

impl SliceEntry {
    /// The first byte behind the slice.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

/// A label's contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    pub generation: u64,
    pub owner_epoch: Epoch,
    pub cluster_uuid: Uuid,
    pub cluster_name: String,
    pub drive_uuid: Uuid,
    pub drive_name: String,
    /// The drive's place in the cluster file.
    pub drive_index: u32,
    pub enclosure_name: String,
    /// Capacity when formatted; the tail label ends here.
    pub capacity_bytes: u64,
    pub slices: Vec<SliceEntry>,
}

/// Why bytes are not a label, or a label cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    #[error("no label")]
    NoMagic,
    #[error("the label has version {found}, this program knows {VERSION}")]
    Version { found: u32 },
    #[error("the label's checksum is wrong")]
    Checksum,
    #[error("a name in the label is longer than {NAME_BYTES_MAX} bytes")]
    NameTooLong,
    #[error("a name in the label is not UTF-8")]
    NameNotUtf8,
    #[error("slice {slice} has the unknown kind {kind}")]
    UnknownKind { slice: usize, kind: u32 },
    #[error("{count} slices, at most {SLICES_MAX} fit")]
    TooManySlices { count: usize },
    #[error("slice {slice} is not made of whole MiBs, or not between the reserved ones")]
    SliceOutside { slice: usize },
    #[error("slices {first} and {second} overlap")]
    SlicesOverlap { first: usize, second: usize },
    #[error(
        "{bytes} bytes are too few, or not whole blocks: a drive has {} bytes at least",
        2 * RESERVED_BYTES
    )]
    Capacity { bytes: u64 },
}

impl Label {
    /// Bytes between which slices may lie, for a drive of `capacity_bytes`.
    #[must_use]
    pub fn slice_space(capacity_bytes: u64) -> std::ops::Range<u64> {
        let end = capacity_bytes.saturating_sub(RESERVED_BYTES);
        RESERVED_BYTES..levada_base::units::round_down(end, SLICE_ALIGN_BYTES).max(RESERVED_BYTES)
    }

    /// The latest owner of the drive, or of any of its slices.
    #[must_use]
    pub fn last_epoch(&self) -> Epoch {
        let slices = self.slices.iter().map(|slice| slice.owner_epoch);
        slices.fold(self.owner_epoch, Epoch::max)
    }

    /// Where the tail label starts.
    #[must_use]
    pub fn tail_at(&self) -> u64 {
        self.capacity_bytes - BLOCK_BYTES
    }

    /// Checks what encoding and decoding promise.
    ///
    /// # Errors
    ///
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), LabelError> {
        let bytes = self.capacity_bytes;
        if bytes < 2 * RESERVED_BYTES || !bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(LabelError::Capacity { bytes });
        }
        let names = [&self.cluster_name, &self.drive_name, &self.enclosure_name];
        let mut names = names.into_iter().chain(self.slices.iter().map(|slice| &slice.array_name));
        if names.any(|name| name.len() > NAME_BYTES_MAX) {
            return Err(LabelError::NameTooLong);
        }
        if self.slices.len() > SLICES_MAX {
            return Err(LabelError::TooManySlices { count: self.slices.len() });
        }
        let space = Self::slice_space(bytes);
        for (second, slice) in self.slices.iter().enumerate() {
            let end = slice.start.checked_add(slice.bytes);
            if !slice.start.is_multiple_of(SLICE_ALIGN_BYTES)
                || !slice.bytes.is_multiple_of(SLICE_ALIGN_BYTES)
                || slice.bytes == 0
                || slice.start < space.start
                || end.is_none_or(|end| end > space.end)
            {
                return Err(LabelError::SliceOutside { slice: second });
            }
            let overlaps =
                |other: &SliceEntry| slice.start < other.end() && other.start < slice.end();
            if let Some(first) = self.slices[..second].iter().position(overlaps) {
                return Err(LabelError::SlicesOverlap { first, second });
            }
        }
        Ok(())
    }

    /// The label's bytes.
    ///
    /// # Errors
    ///
    /// A [`LabelError`] when it breaks a rule of [`Label::check`].
    pub fn encode(&self) -> Result<Buf, LabelError> {
        self.check()?;
        let mut bytes = BufMut::zeroed(LABEL_BYTES);
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(16, &self.generation.to_le_bytes());
        put(24, &self.owner_epoch.0.to_le_bytes());
        put(32, self.cluster_uuid.as_bytes());
        put(48, self.drive_uuid.as_bytes());
        put(64, &self.capacity_bytes.to_le_bytes());
        put(72, &self.drive_index.to_le_bytes());
        put(76, &(self.slices.len() as u32).to_le_bytes());
        put(80, &name_field(&self.cluster_name));
        put(144, &name_field(&self.drive_name));
        put(208, &name_field(&self.enclosure_name));
        for (index, slice) in self.slices.iter().enumerate() {
            let at = SLICES_AT + index * SLICE_ENTRY_BYTES;
            let kind: u32 = match slice.kind {
                SliceKind::Metadata => 1,
                SliceKind::Data => 2,
            };
            put(at, slice.array_uuid.as_bytes());
            put(at + 16, &slice.start.to_le_bytes());
            put(at + 24, &slice.bytes.to_le_bytes());
            put(at + 32, &slice.owner_epoch.0.to_le_bytes());
            put(at + 40, &kind.to_le_bytes());
            put(at + 64, &name_field(&slice.array_name));
        }
        let crc = crc32c(&bytes);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        Ok(bytes.freeze())
    }

    /// Reads a label.
    ///
    /// # Errors
    ///
    /// A [`LabelError`] when these are not the bytes of one.
    pub fn decode(bytes: &[u8]) -> Result<Self, LabelError> {
        if bytes.len() != LABEL_BYTES || bytes[..8] != MAGIC {
            return Err(LabelError::NoMagic);
        }
        let found = u32_at(bytes, 8);
        if found != VERSION {
            return Err(LabelError::Version { found });
        }
        let crc = levada_base::checksum::crc32c_parts([
            &bytes[..CRC_AT],
            &[0; 4][..],
            &bytes[CRC_AT + 4..],
        ]);
        if crc != u32_at(bytes, CRC_AT) {
            return Err(LabelError::Checksum);
        }
        let count = u32_at(bytes, 76) as usize;
        if count > SLICES_MAX {
            return Err(LabelError::TooManySlices { count });
        }
        let mut slices = Vec::with_capacity(count);
        for slice in 0..count {
            let at = SLICES_AT + slice * SLICE_ENTRY_BYTES;
            slices.push(SliceEntry {
                array_uuid: uuid_at(bytes, at),
                array_name: name_at(bytes, at + 64)?,
                kind: match u32_at(bytes, at + 40) {
                    1 => SliceKind::Metadata,
                    2 => SliceKind::Data,
                    kind => return Err(LabelError::UnknownKind { slice, kind }),
                },
                start: u64_at(bytes, at + 16),
                bytes: u64_at(bytes, at + 24),
                owner_epoch: Epoch(u64_at(bytes, at + 32)),
            });
        }
        let label = Self {
            generation: u64_at(bytes, 16),
            owner_epoch: Epoch(u64_at(bytes, 24)),
            cluster_uuid: uuid_at(bytes, 32),
            cluster_name: name_at(bytes, 80)?,
            drive_uuid: uuid_at(bytes, 48),
            drive_name: name_at(bytes, 144)?,
            drive_index: u32_at(bytes, 72),
            enclosure_name: name_at(bytes, 208)?,
            capacity_bytes: u64_at(bytes, 64),
            slices,
        };
        label.check()?;
        Ok(label)
    }
}

/// A name as the label holds it: length, UTF-8, zeroes. The caller has checked the length.
fn name_field(name: &str) -> [u8; NAME_BYTES_MAX + 1] {
    let mut field = [0; NAME_BYTES_MAX + 1];
    field[0] = name.len() as u8;
    field[1..=name.len()].copy_from_slice(name.as_bytes());
    field
}

fn name_at(bytes: &[u8], at: usize) -> Result<String, LabelError> {
    let len = bytes[at] as usize;
    if len > NAME_BYTES_MAX {
        return Err(LabelError::NameTooLong);
    }
    let name = &bytes[at + 1..at + 1 + len];
    Ok(std::str::from_utf8(name).map_err(|_| LabelError::NameNotUtf8)?.to_owned())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn uuid_at(bytes: &[u8], at: usize) -> Uuid {
    Uuid::from_bytes(bytes[at..at + 16].try_into().expect("16 bytes"))
}
