//! Superblock: the bytes that say what an array is and how its members stand.
//!
//! Drawn in docs/design/0003-array-format.md. A codec without I/O; bytes from a member are never
//! trusted: what does not decode is `None`, as if nothing were there.

use crate::layout::{Layout, Level};
use crate::lost::Lost;
use crate::map::MapFormat;
use crate::member::{Held, MemberState};
use crate::scrub::Scrubbed;
use levada_base::Epoch;
use levada_base::checksum::crc32c;
use levada_base::ids::Uuid;
use levada_base::units::{BLOCK_BYTES, round_up};
use levada_device::{BlockError, Device};
use std::rc::Rc;

pub(crate) const SUPERBLOCK_BYTES: u64 = BLOCK_BYTES;
/// Most members of an array, spares included.
pub const MEMBERS_MAX: usize = 55;
/// Most bytes of a member's name that are stored.
pub const MEMBER_NAME_BYTES: usize = 28;
/// Most bytes of an array's name that are stored.
pub const ARRAY_NAME_BYTES: usize = 64;

const MAGIC: &[u8; 8] = b"LVDARRAY";
const VERSION: u16 = 1;
/// Of members with a list of lost blocks: who does not know of it must not open them.
const VERSION_LOST: u16 = 2;
/// Of members whose map tells what an absent member missed: who does not write that down must not change anything.
const VERSION_MISSED: u16 = 3;
/// Of members whose journal may hold fragments of records: who takes those for torn ones must not open them.
const VERSION_SPLIT: u16 = 4;
const FLAGS_AT: usize = 15;
/// Stripes were overwritten in place since a scrub found everything right.
const PATCHED: u8 = 1;
const JOURNAL_FROM_AT: usize = 184;
const LOST_BYTES_AT: usize = 192;
const SCRUBBED_AT: usize = 200;
const BLOCK_BYTES_AT: usize = 256;
const TABLE_AT: usize = 512;
const ENTRY_BYTES: usize = 64;
const CRC_AT: usize = 4092;
/// The other size of blocks.
pub(crate) const SECTOR_BYTES: u32 = 512;
const NO_ROLE: u8 = 255;
/// The number of the level that has none elsewhere.
const N_PLUS_M: u8 = 100;
/// The data area starts at a multiple of this.
const DATA_ALIGN_BYTES: u64 = 64 << 10;

/// Where the areas of a member lie; the same on all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Areas {
    pub journal_at: u64,
    pub journal_bytes: u64,
    /// Large records of the journal are cut into fragments.
    pub splits_records: bool,
    /// Behind the journal.
    pub lost_at: u64,
    pub lost_bytes: u64,
    pub map_at: u64,
    pub map_bytes: u64,
    pub map_format: MapFormat,
    pub data_at: u64,
    pub data_bytes: u64,
}

impl Areas {
    /// Lays out members of `member_bytes` for `level`; also gives the number of stripes, which
    /// is 0 when nothing fits.
    pub fn fit(
        member_bytes: u64,
        journal_bytes: u64,
        level: Level,
        width: usize,
        chunk_bytes: u64,
    ) -> (Self, u64) {
        let journal_at = 2 * SUPERBLOCK_BYTES;
        let lost_at = journal_at + journal_bytes;
        let lost_bytes = match level.has_parity() && journal_bytes > 0 {
            true => Lost::bytes_for(member_bytes, chunk_bytes),
            false => 0,
        };
        let map_at = lost_at + lost_bytes;
        let stripes_from = |data_at: u64| {
            let slots = member_bytes.saturating_sub(data_at) / chunk_bytes;
            Layout::stripes_in(level, width, slots)
        };
        let map_format = MapFormat::Paired;
        // Without a map there would be this many stripes; with it there are fewer.
        let map_bytes = map_format.bytes_for(stripes_from(map_at).max(1));
        let data_at = round_up(map_at + map_bytes, DATA_ALIGN_BYTES);
        let stripes = stripes_from(data_at);
        let layout = Layout { level, width, chunk_bytes, stripes };
        let data_bytes = layout.slots() * chunk_bytes;
        let areas = Self {
            journal_at,
            journal_bytes,
            splits_records: true,
            lost_at,
            lost_bytes,
            map_at,
            map_bytes,
            map_format,
            data_at,
            data_bytes,
        };
        (areas, stripes)
    }

    /// Bytes of a member that the array uses.
    pub fn bytes(&self) -> u64 {
        self.data_at + self.data_bytes
    }

    /// What a device held where its journal and its list of lost blocks will be has no meaning.
    pub async fn clear_journal(&self, device: &Rc<dyn Device>) -> Result<(), BlockError> {
        device.write_zeroes(self.journal_at, self.journal_bytes + self.lost_bytes).await?;
        device.flush().await
    }

    /// The same of the map, too: a page of a former life, which nobody else has, would be taken for the newest.
    pub async fn clear_records(&self, device: &Rc<dyn Device>) -> Result<(), BlockError> {
        device.write_zeroes(self.map_at, self.map_bytes).await?;
        self.clear_journal(device).await
    }
}

/// One line of the member table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberEntry {
    pub uuid: Uuid,
    pub name: String,
    pub enclosure: u16,
    pub role: Option<usize>,
    pub state: MemberState,
    /// Of one that is out or being rebuilt: what of its data is good nevertheless.
    pub held: Option<Held>,
}

/// A superblock without the index of the member that carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub uuid: Uuid,
    pub name: String,
    pub generation: u64,
    pub epoch: Epoch,
    /// Every member that is live in this superblock has held this generation or a later one. One
    /// that comes with less is not what it was: an old copy of itself.
    pub held_by_all: u64,
    /// Records of the journal below this sequence have no meaning.
    pub journal_from: u64,
    /// Stripes may be patched ([`crate::map::Bit::Patched`]).
    pub patched: bool,
    /// How far a scrub is that is under way.
    pub scrubbed: Scrubbed,
    pub layout: Layout,
    /// Of the array as its users see it: 512 or 4096.
    pub block_bytes: u64,
    pub areas: Areas,
    pub members: Vec<MemberEntry>,
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes")
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get(bytes, at))
}

/// The longest prefix of whole characters that fits.
fn fitting(name: &str, bytes_max: usize) -> &str {
    let mut end = name.len().min(bytes_max);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

fn get_name(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

impl Superblock {
    /// Where a member's next superblock goes, whose newest one is at `newest_at`: over the other one.
    pub fn next_offset(newest_at: Option<u64>) -> u64 {
        if newest_at == Some(0) { SUPERBLOCK_BYTES } else { 0 }
    }

    /// Writes the superblock of member `index` into 4 KiB.
    pub fn encode(&self, index: usize, bytes: &mut [u8]) {
        bytes.fill(0);
        let (level, number) = match self.layout.level {
            Level::Raid0 => (0, 1),
            Level::Raid1 { copies } => (1, copies),
            Level::Raid5 => (5, 1),
            Level::Raid6 => (6, 1),
            Level::Raid50 { groups } => (50, groups),
            Level::Raid60 { groups } => (60, groups),
            Level::NPlusM { parity } => (N_PLUS_M, parity),
        };
        put(bytes, 0, MAGIC);
        let version = match (self.areas.map_format, self.areas.lost_bytes) {
            (MapFormat::Paired, _) if self.areas.splits_records => VERSION_SPLIT,
            (MapFormat::Paired, _) => VERSION_MISSED,
            (MapFormat::Single, 0) => VERSION,
            (MapFormat::Single, _) => VERSION_LOST,
        };
        put(bytes, 8, &version.to_le_bytes());
        let width = self.layout.width as u8;
        put(bytes, 10, &[level, number as u8, width, self.members.len() as u8, index as u8]);
        put(bytes, 16, self.uuid.as_bytes());
        let numbers = [
            self.generation,
            self.epoch.0,
            self.layout.chunk_bytes,
            self.layout.stripes,
            self.areas.journal_at,
            self.areas.journal_bytes,
            self.areas.map_at,
            self.areas.map_bytes,
            self.areas.data_at,
            self.areas.data_bytes,
            self.held_by_all,
        ];
        for (i, number) in numbers.iter().enumerate() {
            put(bytes, 32 + 8 * i, &number.to_le_bytes());
        }
        bytes[FLAGS_AT] = if self.patched { PATCHED } else { 0 };
        put(bytes, JOURNAL_FROM_AT, &self.journal_from.to_le_bytes());
        put(bytes, LOST_BYTES_AT, &self.areas.lost_bytes.to_le_bytes());
        for (number, at) in self.scrubbed.numbers().iter().zip((SCRUBBED_AT..).step_by(8)) {
            put(bytes, at, &number.to_le_bytes());
        }
        let of_four_kib = self.block_bytes == BLOCK_BYTES;
        let block_bytes = if of_four_kib { 0 } else { self.block_bytes as u32 };
        put(bytes, BLOCK_BYTES_AT, &block_bytes.to_le_bytes());
        put(bytes, 120, fitting(&self.name, ARRAY_NAME_BYTES).as_bytes());
        for (i, member) in self.members.iter().enumerate() {
            let entry = &mut bytes[TABLE_AT + i * ENTRY_BYTES..][..ENTRY_BYTES];
            put(entry, 0, member.uuid.as_bytes());
            put(entry, 16, fitting(&member.name, MEMBER_NAME_BYTES).as_bytes());
            put(entry, 44, &member.enclosure.to_le_bytes());
            entry[46] = member.role.map_or(NO_ROLE, |role| role as u8);
            let (state, next_slot) = match member.state {
                MemberState::InSync => (0, 0),
                MemberState::Rebuilding { next_slot } => (1, next_slot),
                MemberState::Faulty => (2, 0),
                MemberState::Spare => (3, 0),
            };
            entry[47] = state;
            put(entry, 48, &next_slot.to_le_bytes());
            put(entry, 56, &member.held.map_or(0, Held::to_bits).to_le_bytes());
        }
        let crc = crc32c(&bytes[..CRC_AT]);
        put(bytes, CRC_AT, &crc.to_le_bytes());
    }

    /// Makes the magic, version and checksum of `bytes` right, so that a fuzzer gets past them.
    pub fn seal(bytes: &mut [u8]) {
        put(bytes, 0, MAGIC);
        let version = u16::from_le_bytes(get(bytes, 8)).clamp(VERSION, VERSION_SPLIT);
        put(bytes, 8, &version.to_le_bytes());
        let crc = crc32c(&bytes[..CRC_AT]);
        put(bytes, CRC_AT, &crc.to_le_bytes());
    }

    /// Reads a superblock and the index of the member that carries it. `None` when these bytes
    /// are no superblock, are damaged, or contradict themselves.
    pub fn decode(bytes: &[u8]) -> Option<(Self, usize)> {
        let whole = bytes.len() as u64 == SUPERBLOCK_BYTES && &bytes[..8] == MAGIC;
        if !whole || crc32c(&bytes[..CRC_AT]) != u32::from_le_bytes(get(bytes, CRC_AT)) {
            return None;
        }
        let version = u16::from_le_bytes(get(bytes, 8));
        let map_format = match version {
            VERSION | VERSION_LOST => MapFormat::Single,
            VERSION_MISSED | VERSION_SPLIT => MapFormat::Paired,
            _ => return None,
        };
        let [level, number, width, count, index] = get(bytes, 10);
        let (width, count, index) = (usize::from(width), usize::from(count), usize::from(index));
        let level = match (level, usize::from(number)) {
            (0, 1) => Level::Raid0,
            (1, copies) => Level::Raid1 { copies },
            (5, 1) => Level::Raid5,
            (6, 1) => Level::Raid6,
            (50, groups) => Level::Raid50 { groups },
            (60, groups) => Level::Raid60 { groups },
            (N_PLUS_M, parity) => Level::NPlusM { parity },
            _ => return None,
        };
        if level.check(width).is_err()
            || width == 0
            || width > count
            || count > MEMBERS_MAX
            || index >= count
        {
            return None;
        }
        let number = |i: usize| get_u64(bytes, 32 + 8 * i);
        let layout = Layout { level, width, chunk_bytes: number(2), stripes: number(3) };
        let areas = Areas {
            journal_at: number(4),
            journal_bytes: number(5),
            splits_records: version >= VERSION_SPLIT,
            lost_at: number(4).saturating_add(number(5)),
            lost_bytes: get_u64(bytes, LOST_BYTES_AT),
            map_at: number(6),
            map_bytes: number(7),
            map_format,
            data_at: number(8),
            data_bytes: number(9),
        };
        // Bounded first, so that the arithmetic of the layout cannot overflow.
        let bounded = (1..=1 << 48).contains(&layout.stripes)
            && (BLOCK_BYTES..=1 << 40).contains(&layout.chunk_bytes)
            && u128::from(layout.stripes) * u128::from(layout.chunk_bytes) < 1 << 56;
        let aligned = bounded
            && layout.chunk_bytes.is_multiple_of(BLOCK_BYTES)
            && layout.slots() * layout.chunk_bytes == areas.data_bytes
            && areas.data_at.checked_add(areas.data_bytes).is_some()
            && areas.journal_bytes < 1 << 40
            && areas.lost_bytes.is_multiple_of(2 * BLOCK_BYTES)
            && areas.lost_bytes <= Lost::bytes_for(u64::MAX, layout.chunk_bytes)
            && areas.lost_at.checked_add(areas.lost_bytes).is_some_and(|end| end <= areas.map_at)
            && areas.map_at.checked_add(areas.map_bytes).is_some_and(|end| end <= areas.data_at)
            && map_format.bytes_for(layout.stripes) <= areas.map_bytes;
        if !aligned {
            return None;
        }
        let block_bytes = match (u32::from_le_bytes(get(bytes, BLOCK_BYTES_AT)), map_format) {
            (0, _) => BLOCK_BYTES,
            (SECTOR_BYTES, MapFormat::Paired) => u64::from(SECTOR_BYTES),
            _ => return None,
        };
        let mut members = Vec::with_capacity(count);
        let mut roles = 0u64;
        for i in 0..count {
            let entry = &bytes[TABLE_AT + i * ENTRY_BYTES..][..ENTRY_BYTES];
            let role = match entry[46] {
                NO_ROLE => None,
                role if usize::from(role) < width && roles >> role & 1 == 0 => {
                    roles |= 1 << role;
                    Some(usize::from(role))
                }
                _ => return None,
            };
            let state = match (entry[47], role) {
                (0, Some(_)) => MemberState::InSync,
                (1, Some(_)) => MemberState::Rebuilding { next_slot: get_u64(entry, 48) },
                (2, _) => MemberState::Faulty,
                (3, None) => MemberState::Spare,
                _ => return None,
            };
            let held = Held::from_bits(get_u64(entry, 56)).filter(|held| match state {
                MemberState::Faulty => true,
                MemberState::Rebuilding { .. } => held.is_told,
                MemberState::InSync | MemberState::Spare => false,
            });
            let held = held.filter(|_| map_format == MapFormat::Paired);
            members.push(MemberEntry {
                uuid: Uuid::from_bytes(get(entry, 0)),
                name: get_name(&entry[16..16 + MEMBER_NAME_BYTES]),
                enclosure: u16::from_le_bytes(get(entry, 44)),
                role,
                state,
                held,
            });
        }
        let superblock = Self {
            uuid: Uuid::from_bytes(get(bytes, 16)),
            name: get_name(&bytes[120..120 + ARRAY_NAME_BYTES]),
            generation: number(0),
            epoch: Epoch(number(1)),
            held_by_all: number(10),
            journal_from: get_u64(bytes, JOURNAL_FROM_AT),
            patched: bytes[FLAGS_AT] & PATCHED != 0,
            scrubbed: Scrubbed::of(
                std::array::from_fn(|i| get_u64(bytes, SCRUBBED_AT + 8 * i)),
                layout.stripes,
            ),
            layout,
            block_bytes,
            areas,
            members,
        };
        Some((superblock, index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Superblock {
        let level = Level::Raid6;
        let (areas, stripes) = Areas::fit(64 << 20, 1 << 20, level, 4, 64 << 10);
        let state = |i| match i {
            0 => MemberState::Faulty,
            4 => MemberState::Rebuilding { next_slot: 7 },
            5 => MemberState::Spare,
            _ => MemberState::InSync,
        };
        let entry = |i: usize| MemberEntry {
            uuid: Uuid::from_u128(i as u128 + 1),
            name: format!("drive-{i}"),
            enclosure: i as u16 / 2,
            role: [None, Some(1), Some(2), Some(3), Some(0), None][i],
            state: state(i),
            held: (i == 4).then_some(Held { generation: 4, by_itself: true, is_told: true }),
        };
        Superblock {
            uuid: Uuid::from_u128(99),
            name: "data".to_owned(),
            generation: 5,
            epoch: Epoch(3),
            held_by_all: 4,
            journal_from: 12,
            patched: true,
            scrubbed: Scrubbed::of([7, 6, 1, 2, 3, 4, 5], stripes),
            layout: Layout { level, width: 4, chunk_bytes: 64 << 10, stripes },
            block_bytes: 512,
            areas,
            members: (0..6).map(entry).collect(),
        }
    }

    #[test]
    fn decodes_what_it_encodes() {
        let mut bytes = vec![0xa5; 4096];
        sample().encode(4, &mut bytes);
        assert_eq!(Superblock::decode(&bytes), Some((sample(), 4)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_changed_byte_is_noticed(at in 0..4096usize, flip in 1..=255u8) {
            let mut bytes = vec![0; 4096];
            sample().encode(0, &mut bytes);
            bytes[at] ^= flip;
            prop_assert_eq!(Superblock::decode(&bytes), None);
        }

        /// Whatever carries a right checksum, decoding does not panic.
        #[test]
        fn hostile_fields_are_refused_or_read(at in 8..4084usize, value in any::<u64>()) {
            let mut bytes = vec![0; 4096];
            sample().encode(0, &mut bytes);
            put(&mut bytes, at, &value.to_le_bytes());
            let crc = crc32c(&bytes[..CRC_AT]);
            put(&mut bytes, CRC_AT, &crc.to_le_bytes());
            let _ = Superblock::decode(&bytes);
        }
    }
}
