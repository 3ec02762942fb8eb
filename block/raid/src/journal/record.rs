//! A record of the journal as it lies on one member: a header block, then new contents, block by block: all of them, or a
//! fragment ([`mod@super::split`]). A codec without I/O.
//!
//! Drawn in docs/design/0015-parity-journal.md. Bytes from a member are never trusted: what does not decode is `None`, as
//! if nothing were there.

use levada_base::checksum::{crc32c, crc32c_parts};
use levada_base::ids::Uuid;
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, BufMut, Epoch, IoVec};

const MAGIC: &[u8; 8] = b"LVDJRNAL";
const BLOCK: usize = BLOCK_BYTES as usize;
const BLOCKS_AT: usize = 48;
const SPLIT_AT: usize = 50;
const NUMBER_AT: usize = 51;
const COUNT_AT: usize = 52;
const PAYLOAD_CRC_AT: usize = 56;
const CRC_AT: usize = 60;
const ESCAPED_AT: usize = 64;
const PIECES_AT: usize = 96;
const PIECE_BYTES: usize = 16;
/// Most pieces in a record.
pub(crate) const PIECES_MAX: usize = (BLOCK - PIECES_AT) / PIECE_BYTES;
/// Most blocks of contents in a record: one bit each says whether it is escaped.
pub(crate) const PAYLOAD_BLOCKS_MAX: u64 = ((PIECES_AT - ESCAPED_AT) * 8) as u64;

/// The chunk of a piece that only lists its stripe.
const LISTED: usize = u16::MAX as usize;

/// New contents of some blocks of a chunk; or, without any, a stripe that is being overwritten whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub stripe: u64,
    /// Data first, then parity.
    pub chunk: usize,
    /// First block within the chunk, and how many, of [`BLOCK_BYTES`].
    pub first: u64,
    pub blocks: u64,
}

impl Piece {
    /// Says that this stripe is being overwritten whole, and nothing of its contents.
    pub fn listed(stripe: u64) -> Self {
        Self { stripe, chunk: LISTED, first: 0, blocks: 0 }
    }

    pub fn is_listed(&self) -> bool {
        self.chunk == LISTED && self.blocks == 0
    }
}

/// What a record says beside its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub epoch: Epoch,
    pub sequence: u64,
    /// Records below this have no meaning any more.
    pub tail: u64,
    pub pieces: Vec<Piece>,
    /// Fragments that the contents are cut into, parity not among them. 1: every holder has all of them.
    pub fragments: usize,
}

impl Header {
    /// Blocks of the contents of all pieces.
    pub fn payload_blocks(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.blocks).sum()
    }

    /// Blocks of contents on each holder.
    pub fn fragment_blocks(&self) -> u64 {
        self.payload_blocks().div_ceil(self.fragments as u64)
    }

    /// The record as it is written to one holder: fragment `number`, in whole blocks.
    ///
    /// # Panics
    ///
    /// When there are too many pieces or blocks, or other blocks than the pieces say: a bug of the caller.
    pub fn encode(&self, uuid: Uuid, number: usize, fragment: &[Buf]) -> IoVec {
        let blocks = self.payload_blocks();
        assert!(self.pieces.len() <= PIECES_MAX && blocks <= PAYLOAD_BLOCKS_MAX);
        let mut header = BufMut::zeroed(BLOCK);
        let mut put = |at: usize, value: &[u8]| header[at..at + value.len()].copy_from_slice(value);
        put(0, MAGIC);
        put(8, uuid.as_bytes());
        put(24, &self.epoch.0.to_le_bytes());
        put(32, &self.sequence.to_le_bytes());
        put(40, &self.tail.to_le_bytes());
        put(BLOCKS_AT, &(blocks as u16).to_le_bytes());
        if self.fragments > 1 {
            put(SPLIT_AT, &[self.fragments as u8, number as u8]);
        }
        put(COUNT_AT, &(self.pieces.len() as u32).to_le_bytes());
        for (i, piece) in self.pieces.iter().enumerate() {
            let at = PIECES_AT + i * PIECE_BYTES;
            put(at, &piece.stripe.to_le_bytes());
            put(at + 8, &(piece.first as u32).to_le_bytes());
            put(at + 12, &(piece.blocks as u16).to_le_bytes());
            put(at + 14, &(piece.chunk as u16).to_le_bytes());
        }
        let mut parts = IoVec::with_capacity(fragment.len() + 1);
        parts.push(Buf::copy_of(&[]));
        let mut block = 0;
        for part in fragment {
            assert!(part.len().is_multiple_of(BLOCK), "contents are whole blocks");
            let escaped = escape(part, &mut header[ESCAPED_AT..PIECES_AT], block);
            let part = escaped.unwrap_or_else(|| part.clone());
            block += part.len() / BLOCK;
            parts.push(part);
        }
        assert_eq!(block as u64, self.fragment_blocks(), "contents are those of the pieces");
        let crc = crc32c_parts(parts[1..].iter().map(|part| &part[..]));
        header[PAYLOAD_CRC_AT..CRC_AT].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32c(&header).to_le_bytes();
        header[CRC_AT..ESCAPED_AT].copy_from_slice(&crc);
        parts[0] = header.freeze();
        parts
    }
}

/// Where a block of contents begins like a header it is written with its first bytes inverted, so that whoever looks
/// for headers finds none but ours.
fn escape(part: &Buf, bits: &mut [u8], first: usize) -> Option<Buf> {
    let looks = |block: &[u8]| &block[..8] == MAGIC;
    if !part.chunks(BLOCK).any(looks) {
        return None;
    }
    let mut copy = BufMut::copy_of(part);
    for (block, number) in copy.chunks_mut(BLOCK).zip(first..) {
        if looks(block) {
            bits[number / 8] |= 1 << (number % 8);
            block[..8].iter_mut().for_each(|byte| *byte ^= 0xff);
        }
    }
    Some(copy.freeze())
}

/// Whether a block may be a header: what [`decode`] looks at.
pub(crate) fn looks_like_header(block: &[u8]) -> bool {
    block.len() >= 8 && &block[..8] == MAGIC
}

/// What one member holds of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    pub header: Header,
    pub number: usize,
    pub contents: Vec<u8>,
}

/// Reads the record of array `uuid` that `bytes`, whole blocks, begin with. `None` when there is none, or not all of what this
/// member is to hold of it.
pub(crate) fn decode(bytes: &[u8], uuid: Uuid) -> Option<Fragment> {
    if bytes.len() < BLOCK || !looks_like_header(bytes) || bytes[8..24] != uuid.as_bytes()[..] {
        return None;
    }
    let header = &bytes[..BLOCK];
    let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
    let half = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
    let quarter = |at: usize| u16::from_le_bytes(header[at..at + 2].try_into().expect("2 bytes"));
    let mut blank = header.to_vec();
    blank[CRC_AT..ESCAPED_AT].fill(0);
    if crc32c(&blank) != half(CRC_AT) {
        return None;
    }
    let (blocks, count) = (u64::from(quarter(BLOCKS_AT)), half(COUNT_AT) as usize);
    let (split, number) = (usize::from(header[SPLIT_AT]), usize::from(header[NUMBER_AT]));
    if blocks > PAYLOAD_BLOCKS_MAX || count > PIECES_MAX || split == 1 || number > 0 && split == 0 {
        return None;
    }
    let piece = |i: usize| {
        let at = PIECES_AT + i * PIECE_BYTES;
        Piece {
            stripe: word(at),
            chunk: usize::from(quarter(at + 14)),
            first: u64::from(half(at + 8)),
            blocks: u64::from(quarter(at + 12)),
        }
    };
    let found = Header {
        epoch: Epoch(word(24)),
        sequence: word(32),
        tail: word(40),
        pieces: (0..count).map(piece).collect(),
        fragments: split.max(1),
    };
    if found.payload_blocks() != blocks || found.fragments as u64 > blocks.max(1) {
        return None;
    }
    let mut contents = bytes.get(BLOCK..BLOCK * (found.fragment_blocks() as usize + 1))?.to_vec();
    if crc32c(&contents) != half(PAYLOAD_CRC_AT) {
        return None;
    }
    for (number, block) in contents.chunks_mut(BLOCK).enumerate() {
        if header[ESCAPED_AT + number / 8] >> (number % 8) & 1 == 1 {
            block[..8].iter_mut().for_each(|byte| *byte ^= 0xff);
        }
    }
    Some(Fragment { header: found, number, contents })
}

/// Makes magic, checksums and identity of a record right, so that a fuzzer gets past them.
pub(crate) fn seal(bytes: &mut [u8], uuid: Uuid) {
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..24].copy_from_slice(uuid.as_bytes());
    let blocks = usize::from(u16::from_le_bytes([bytes[BLOCKS_AT], bytes[BLOCKS_AT + 1]]));
    let blocks = blocks.div_ceil(usize::from(bytes[SPLIT_AT].max(1)));
    let payload = bytes.get(BLOCK..BLOCK * (blocks + 1));
    let crc = payload.map_or(0, crc32c);
    bytes[PAYLOAD_CRC_AT..CRC_AT].copy_from_slice(&crc.to_le_bytes());
    bytes[CRC_AT..ESCAPED_AT].fill(0);
    let crc = crc32c(&bytes[..BLOCK]);
    bytes[CRC_AT..ESCAPED_AT].copy_from_slice(&crc.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(fragments: usize) -> (Header, Vec<Buf>) {
        let pieces = vec![
            Piece { stripe: 7, chunk: 3, first: 2, blocks: 2 },
            Piece { stripe: 7, chunk: 8, first: 2, blocks: 2 },
            Piece::listed(12),
            Piece { stripe: 1 << 40, chunk: 0, first: 0, blocks: 1 },
        ];
        let mut second = vec![0x22; 2 * BLOCK];
        // As a copy of a journal would have it.
        second[BLOCK..BLOCK + 8].copy_from_slice(MAGIC);
        let contents = vec![
            Buf::copy_of(&vec![0x11; 2 * BLOCK]),
            Buf::copy_of(&second),
            Buf::copy_of(&vec![0x33; BLOCK]),
        ];
        let header = Header { epoch: Epoch(3), sequence: 9, tail: 5, pieces, fragments };
        (header, contents)
    }

    fn joined(parts: &[Buf]) -> Vec<u8> {
        levada_base::buf::joined(parts)
    }

    #[test]
    fn a_record_reads_back_and_hides_what_looks_like_one() {
        let uuid = Uuid::from_u128(7);
        let (header, contents) = sample(1);
        let mut bytes = joined(&header.encode(uuid, 0, &contents));
        assert_eq!(bytes.chunks(BLOCK).filter(|block| looks_like_header(block)).count(), 1);
        let contents = joined(&contents);
        assert_eq!(decode(&bytes, uuid), Some(Fragment { header, number: 0, contents }));
        assert_eq!(decode(&bytes, Uuid::from_u128(8)), None);
        assert_eq!(decode(&bytes[..bytes.len() - BLOCK], uuid), None, "cut short");
        for at in [40, 100, BLOCK + 5, 5 * BLOCK + 4095] {
            bytes[at] ^= 1;
            assert_eq!(decode(&bytes, uuid), None, "byte {at} is wrong");
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn a_fragment_reads_back() {
        let uuid = Uuid::from_u128(7);
        // Five blocks: two on each of three.
        let (header, contents) = sample(3);
        let bytes = joined(&header.encode(uuid, 4, &contents[1..2]));
        assert_eq!(bytes.len(), 3 * BLOCK);
        let contents = contents[1].to_vec();
        assert_eq!(decode(&bytes, uuid), Some(Fragment { header, number: 4, contents }));
    }
}
