//! What lies on the area: superblocks, the headers of intent log records, and batches.
//!
//! The bytes are drawn in docs/design/0004-key-value-store.md. Everything here is a codec: it does
//! no I/O, trusts no byte, and fails with the name of the first field that is wrong.

use crate::store::{Bytes, KvError};
use levada_base::checksum::{crc32c, crc32c_parts};
use levada_base::ids::Uuid;
use levada_base::units::{BLOCK_BYTES, KIB, MIB, round_down, round_up};

const SUPER_MAGIC: u64 = u64::from_le_bytes(*b"LVKVSUPR");
const RECORD_MAGIC: u64 = u64::from_le_bytes(*b"LVKVGRUP");
const VERSION: u16 = 1;

/// Bytes of a record before its payload.
pub(crate) const RECORD_HEADER_BYTES: usize = 96;
/// The least checkpoint space: the engine's own minimum, and a little to work with.
const SPACE_BYTES_MIN: u64 = 1536 * KIB;
/// The least intent log.
const LOG_BYTES_MIN: u64 = 64 * KIB;
/// The smallest area that holds a store.
pub(crate) const AREA_BYTES_MIN: u64 = 2 * MIB;
/// A value of this many bytes stands for a removed key in a batch.
const REMOVED: u32 = u32::MAX;
/// Bytes of a change besides its key and value.
const CHANGE_BYTES: usize = 2 + 4;

/// Where the parts of an area lie, in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub log_at: u64,
    pub log_bytes: u64,
    pub space_at: u64,
    pub space_bytes: u64,
}

impl Layout {
    /// Cuts an area: two superblocks, the log (at most a quarter), the rest for checkpoints.
    /// `None` when it is too small.
    pub(crate) fn cut(area_bytes: u64, log_bytes: u64) -> Option<Self> {
        let area_bytes = round_down(area_bytes, BLOCK_BYTES);
        if area_bytes < AREA_BYTES_MIN {
            return None;
        }
        let log_at = 2 * BLOCK_BYTES;
        let log_bytes = round_down(log_bytes.min(area_bytes / 4).max(LOG_BYTES_MIN), BLOCK_BYTES);
        let space_at = log_at + log_bytes;
        let space_bytes = area_bytes.checked_sub(space_at).filter(|b| *b >= SPACE_BYTES_MIN)?;
        Some(Self { log_at, log_bytes, space_at, space_bytes })
    }

    fn is_sound(&self, area_bytes: u64) -> bool {
        let blocks = [self.log_at, self.log_bytes, self.space_at, self.space_bytes];
        blocks.iter().all(|bytes| bytes.is_multiple_of(BLOCK_BYTES) && *bytes <= area_bytes)
            && self.log_at == 2 * BLOCK_BYTES
            && self.log_bytes >= LOG_BYTES_MIN
            && self.space_at == self.log_at + self.log_bytes
            && self.space_bytes >= SPACE_BYTES_MIN
            && self.space_at + self.space_bytes <= area_bytes
    }
}

/// A place between two records of the intent log, and the record before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogPoint {
    /// Bytes written to the log since the store was made; never wraps.
    pub position: u64,
    /// The number of the record that comes here.
    pub number: u64,
    /// The header's CRC32C of the record before, 0 at the start: what chains records together.
    pub previous_crc: u32,
    /// The last batch before this point.
    pub seq: u64,
}

/// What both superblocks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub uuid: Uuid,
    pub epoch: u64,
    /// How often the store was opened; tells the records of two openings by one owner apart.
    pub opened: u64,
    /// Grows with every superblock written; the larger one counts.
    pub generation: u64,
    pub layout: Layout,
    /// Where replay starts: every batch before is in the checkpoint.
    pub tail: LogPoint,
}

impl Superblock {
    pub(crate) fn encode(&self, block: &mut [u8]) {
        block.fill(0);
        let mut out = Writer { bytes: block, at: 0 };
        out.u64(SUPER_MAGIC);
        out.u16(VERSION);
        out.u16(0);
        out.u32(0);
        out.raw(self.uuid.as_bytes());
        for field in [self.epoch, self.opened, self.generation] {
            out.u64(field);
        }
        let Layout { log_at, log_bytes, space_at, space_bytes } = self.layout;
        for field in [log_at, log_bytes, space_at, space_bytes] {
            out.u64(field);
        }
        for field in [self.tail.position, self.tail.number, self.tail.seq] {
            out.u64(field);
        }
        out.u32(self.tail.previous_crc);
        let crc = crc32c(block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
    }

    /// The superblock in `block`; the name of the field that is wrong otherwise.
    pub(crate) fn decode(block: &[u8], area_bytes: u64) -> Result<Self, &'static str> {
        let mut from = Reader { bytes: block, at: 0 };
        if from.u64()? != SUPER_MAGIC {
            return Err("superblock magic");
        }
        let version = from.u16()?;
        from.u16()?;
        let crc = from.u32()?;
        if crc != crc_without(block, 12) {
            return Err("superblock checksum");
        }
        if version != VERSION {
            return Err("superblock version");
        }
        let uuid = from.uuid()?;
        let (epoch, opened, generation) = (from.u64()?, from.u64()?, from.u64()?);
        let layout = Layout {
            log_at: from.u64()?,
            log_bytes: from.u64()?,
            space_at: from.u64()?,
            space_bytes: from.u64()?,
        };
        if !layout.is_sound(area_bytes) {
            return Err("superblock layout");
        }
        let (position, number, seq) = (from.u64()?, from.u64()?, from.u64()?);
        let tail = LogPoint { position, number, seq, previous_crc: from.u32()? };
        Ok(Self { uuid, epoch, opened, generation, layout, tail })
    }
}

/// The header of one record of the intent log: one group of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub uuid: Uuid,
    pub epoch: u64,
    pub opened: u64,
    pub position: u64,
    pub number: u64,
    pub first_seq: u64,
    pub batches: u32,
    pub payload_bytes: u32,
    pub payload_crc: u32,
    pub previous_crc: u32,
}

impl RecordHeader {
    /// Writes the header and returns its CRC32C, which the next record names.
    pub(crate) fn encode(&self, header: &mut [u8]) -> u32 {
        let header = &mut header[..RECORD_HEADER_BYTES];
        header.fill(0);
        let mut out = Writer { bytes: header, at: 0 };
        out.u64(RECORD_MAGIC);
        out.u16(VERSION);
        out.u16(0);
        out.u32(0);
        out.raw(self.uuid.as_bytes());
        for field in [self.epoch, self.opened, self.position, self.number, self.first_seq] {
            out.u64(field);
        }
        for field in [self.batches, self.payload_bytes, self.payload_crc, self.previous_crc] {
            out.u32(field);
        }
        let crc = crc32c(header);
        header[12..16].copy_from_slice(&crc.to_le_bytes());
        crc
    }

    /// The header at the start of `bytes` and its CRC32C; `None` when there is none intact.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, u32)> {
        Self::parse(bytes).ok()
    }

    fn parse(bytes: &[u8]) -> Result<(Self, u32), &'static str> {
        let header = bytes.get(..RECORD_HEADER_BYTES).ok_or("record header")?;
        let mut from = Reader { bytes: header, at: 0 };
        if from.u64()? != RECORD_MAGIC || from.u16()? != VERSION {
            return Err("record magic");
        }
        from.u16()?;
        let crc = from.u32()?;
        if crc != crc_without(header, 12) {
            return Err("record checksum");
        }
        let uuid = from.uuid()?;
        let header = Self {
            uuid,
            epoch: from.u64()?,
            opened: from.u64()?,
            position: from.u64()?,
            number: from.u64()?,
            first_seq: from.u64()?,
            batches: from.u32()?,
            payload_bytes: from.u32()?,
            payload_crc: from.u32()?,
            previous_crc: from.u32()?,
        };
        Ok((header, crc))
    }

    /// Bytes in the log that a record with this payload takes.
    pub(crate) fn footprint(payload_bytes: usize) -> u64 {
        round_up((RECORD_HEADER_BYTES + payload_bytes) as u64, BLOCK_BYTES)
    }
}

/// One change of a batch: a key, and its new value unless it is removed.
pub(crate) type Change = (Bytes, Option<Bytes>);

/// Bytes that a batch takes in a record's payload.
pub(crate) fn batch_bytes(changes: &[Change]) -> usize {
    let change = |(key, value): &Change| {
        CHANGE_BYTES + key.len() + value.as_ref().map_or(0, |value| value.len())
    };
    4 + changes.iter().map(change).sum::<usize>()
}

/// Appends a batch at `at`, and returns where it ends.
pub(crate) fn encode_batch(changes: &[Change], payload: &mut [u8], at: usize) -> usize {
    let mut out = Writer { bytes: payload, at };
    out.u32(changes.len() as u32);
    for (key, value) in changes {
        out.u16(key.len() as u16);
        out.u32(value.as_ref().map_or(REMOVED, |value| value.len() as u32));
        out.raw(key);
        if let Some(value) = value {
            out.raw(value);
        }
    }
    out.at
}

/// Takes the batches out of a record's payload.
pub(crate) fn decode_batches(payload: &[u8], batches: u32) -> Result<Vec<Vec<Change>>, KvError> {
    let damaged = |what| KvError::Damaged { what, at: 0 };
    let mut from = Reader { bytes: payload, at: 0 };
    let mut decoded = Vec::new();
    for _ in 0..batches {
        let changes = from.u32().map_err(damaged)?;
        let mut batch = Vec::new();
        for _ in 0..changes {
            let key_bytes = from.u16().map_err(damaged)?;
            let value_bytes = from.u32().map_err(damaged)?;
            let key: Bytes = from.raw(key_bytes.into()).map_err(damaged)?.into();
            let value = if value_bytes == REMOVED {
                None
            } else {
                Some(from.raw(value_bytes as usize).map_err(damaged)?.into())
            };
            batch.push((key, value));
        }
        decoded.push(batch);
    }
    if from.at != payload.len() {
        return Err(damaged("batches shorter than their record"));
    }
    Ok(decoded)
}

/// Makes magic, version and checksum of a superblock or record header right, so that a fuzzer
/// gets past them.
pub(crate) fn seal(bytes: &mut [u8], is_record: bool) {
    let magic = if is_record { RECORD_MAGIC } else { SUPER_MAGIC };
    bytes[..8].copy_from_slice(&magic.to_le_bytes());
    bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
    let crc = crc_without(bytes, 12);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
}

/// The CRC32C of `bytes` with the four bytes of the checksum at `at` taken as zero.
fn crc_without(bytes: &[u8], at: usize) -> u32 {
    crc32c_parts([&bytes[..at], &[0; 4], &bytes[at + 4..]])
}

struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn raw(&mut self, from: &[u8]) {
        self.bytes[self.at..self.at + from.len()].copy_from_slice(from);
        self.at += from.len();
    }

    fn u16(&mut self, n: u16) {
        self.raw(&n.to_le_bytes());
    }

    fn u32(&mut self, n: u32) {
        self.raw(&n.to_le_bytes());
    }

    fn u64(&mut self, n: u64) {
        self.raw(&n.to_le_bytes());
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn raw(&mut self, len: usize) -> Result<&'a [u8], &'static str> {
        let end = self.at.checked_add(len).ok_or("a length")?;
        let bytes = self.bytes.get(self.at..end).ok_or("a length")?;
        self.at = end;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        self.raw(N)?.try_into().map_err(|_| "a length")
    }

    fn u16(&mut self) -> Result<u16, &'static str> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, &'static str> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, &'static str> {
        self.array().map(u64::from_le_bytes)
    }

    fn uuid(&mut self) -> Result<Uuid, &'static str> {
        self.array().map(Uuid::from_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        Superblock {
            uuid: Uuid::from_bytes([7; 16]),
            epoch: 3,
            opened: 4,
            generation: 5,
            layout: Layout::cut(8 * MIB, MIB).expect("large enough"),
            tail: LogPoint { position: 4096, number: 1, previous_crc: 9, seq: 10 },
        }
    }

    #[test]
    fn a_superblock_survives_the_disk_and_no_bit_of_it_may_change() {
        let mut block = vec![0; BLOCK_BYTES as usize];
        superblock().encode(&mut block);
        assert_eq!(Superblock::decode(&block, 8 * MIB), Ok(superblock()));
        assert!(Superblock::decode(&block, 4 * MIB).is_err(), "the area shrank");
        for at in 0..block.len() {
            block[at] ^= 1;
            assert!(Superblock::decode(&block, 8 * MIB).is_err(), "byte {at}");
            block[at] ^= 1;
        }
    }

    #[test]
    fn a_record_survives_the_disk_and_no_bit_of_its_header_may_change() {
        let header = RecordHeader {
            uuid: Uuid::from_bytes([7; 16]),
            epoch: 1,
            opened: 2,
            position: 8192,
            number: 3,
            first_seq: 4,
            batches: 5,
            payload_bytes: 6,
            payload_crc: 7,
            previous_crc: 8,
        };
        let mut bytes = [0; RECORD_HEADER_BYTES];
        let crc = header.encode(&mut bytes);
        assert_eq!(RecordHeader::decode(&bytes), Some((header, crc)));
        for at in 0..bytes.len() {
            bytes[at] ^= 0x80;
            assert_eq!(RecordHeader::decode(&bytes), None, "byte {at}");
            bytes[at] ^= 0x80;
        }
    }

    #[test]
    fn batches_come_back_and_cut_ones_are_refused() {
        let batch: Vec<Change> =
            vec![(b"key"[..].into(), Some(b"value"[..].into())), (b"gone"[..].into(), None)];
        let len = batch_bytes(&batch);
        let mut payload = vec![0; 2 * len];
        let at = encode_batch(&batch, &mut payload, 0);
        assert_eq!(encode_batch(&batch, &mut payload, at), 2 * len);
        assert_eq!(decode_batches(&payload, 2), Ok(vec![batch.clone(), batch]));
        assert!(decode_batches(&payload[..2 * len - 1], 2).is_err());
        assert!(decode_batches(&payload, 1).is_err());
        assert!(decode_batches(&payload, u32::MAX).is_err());
    }
}
