//! What a superblock says of an array, for those who look before they open it.

use crate::layout::Level;
use crate::member::MemberState;
use crate::superblock::Superblock;
use levada_base::Epoch;
use levada_base::ids::Uuid;

/// A member, as a superblock has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedMember {
    pub uuid: Uuid,
    pub name: String,
    pub role: Option<usize>,
    pub state: MemberState,
    /// Out, or being rebuilt: it was away, and what it holds is good but for what changed meanwhile.
    pub catches_up: bool,
}

/// An array, as a superblock has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    pub uuid: Uuid,
    pub name: String,
    /// Owner's epoch and generation: of several superblocks the one with the highest counts.
    pub order: (Epoch, u64),
    pub level: Level,
    /// Roles.
    pub width: usize,
    pub chunk_bytes: u64,
    /// Of a block as users see it: 512 or 4096.
    pub block_bytes: u64,
    pub stripes: u64,
    pub capacity_bytes: u64,
    /// Where the data begins on each member, in bytes.
    pub data_at: u64,
    /// Bytes of data on each member.
    pub data_bytes: u64,
    /// As [`crate::ArrayStatus::scrubbed_below`].
    pub scrubbed_below: u64,
    pub members: Vec<RecordedMember>,
}

impl Recorded {
    /// Bytes of a superblock; a member begins with two, of which either may be damaged.
    pub const BYTES: u64 = crate::superblock::SUPERBLOCK_BYTES;

    /// Reads a superblock of array `uuid`. `None` when these bytes are damaged or of another array.
    #[must_use]
    pub fn decode(bytes: &[u8], uuid: Uuid) -> Option<Self> {
        Some(Self::identify(bytes)?.0).filter(|found| found.uuid == uuid)
    }

    /// Reads a superblock of whatever array, and the index of the member that it lies on. `None` when these bytes are
    /// none, or damaged.
    #[must_use]
    pub fn identify(bytes: &[u8]) -> Option<(Self, usize)> {
        let (superblock, index) = Superblock::decode(bytes)?;
        let member = |entry: crate::superblock::MemberEntry| RecordedMember {
            uuid: entry.uuid,
            name: entry.name,
            role: entry.role,
            state: entry.state,
            catches_up: entry.held.is_some_and(|held| held.is_told) && entry.role.is_some(),
        };
        let recorded = Self {
            uuid: superblock.uuid,
            name: superblock.name,
            order: (superblock.epoch, superblock.generation),
            level: superblock.layout.level,
            width: superblock.layout.width,
            chunk_bytes: superblock.layout.chunk_bytes,
            block_bytes: superblock.block_bytes,
            stripes: superblock.layout.stripes,
            capacity_bytes: superblock.layout.capacity_bytes(),
            data_at: superblock.areas.data_at,
            data_bytes: superblock.areas.data_bytes,
            scrubbed_below: superblock.scrubbed.below,
            members: superblock.members.into_iter().map(member).collect(),
        };
        Some((recorded, index))
    }
}
