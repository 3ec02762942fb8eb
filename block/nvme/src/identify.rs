//! What controllers and namespaces say they are (Base, 5.15).

use crate::command::COMMAND_BYTES;
use crate::completion::COMPLETION_BYTES;
use crate::field::{array, put, put_text, text_at, u16_at, u32_at, u64_at};
use crate::nqn::{NQN_FIELD_BYTES, Nqn, NqnError};

/// Bytes of every answer.
pub const IDENTIFY_BYTES: usize = 4096;
/// The version of [`ControllerIdentity`] and everything else: 1.4.
pub const VERSION: u32 = 0x0001_0400;
/// The model of our own target, which promises more than the specification: once it has answered who acquires or preempts, nothing is under way
/// any more of whoever may not write then, whoever took the right from it, and when.
pub const OWN_MODEL: &str = "Levada";
/// All namespaces.
pub const EVERY_NAMESPACE: u32 = 0xffff_ffff;

/// What Identify asks for (Base, figure 244).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Identify {
    Namespace = 0x00,
    Controller = 0x01,
    ActiveNamespaces = 0x02,
    NamespaceDescriptors = 0x03,
    /// Of the NVM command set, these three (NVM Express 2.0, which hosts ask for).
    CommandSetNamespace = 0x05,
    CommandSetController = 0x06,
    CommandSetActiveNamespaces = 0x07,
    /// From here on of those who make namespaces; hosts ask others as well.
    AllocatedNamespaces = 0x10,
    AllocatedNamespace = 0x11,
    NamespaceControllers = 0x12,
    Controllers = 0x13,
}

impl Identify {
    #[must_use]
    pub fn of(code: u8) -> Option<Self> {
        Some(match code {
            0x00 => Self::Namespace,
            0x01 => Self::Controller,
            0x02 => Self::ActiveNamespaces,
            0x03 => Self::NamespaceDescriptors,
            0x05 => Self::CommandSetNamespace,
            0x06 => Self::CommandSetController,
            0x07 => Self::CommandSetActiveNamespaces,
            0x10 => Self::AllocatedNamespaces,
            0x11 => Self::AllocatedNamespace,
            0x12 => Self::NamespaceControllers,
            0x13 => Self::Controllers,
            _ => return None,
        })
    }
}

bitflags::bitflags! {
    /// Commands of an I/O queue that need not be there (Base, figure 247: ONCS).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct OptionalCommands: u16 {
        const COMPARE = 1 << 0;
        const DATASET_MANAGEMENT = 1 << 2;
        const WRITE_ZEROES = 1 << 3;
        const RESERVATIONS = 1 << 5;
        const _ = !0;
    }
}

bitflags::bitflags! {
    /// Events that a host may ask to be told of (Base, figure 247: OAES; figure 281). Warnings are every controller's, and not said to be offered.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Events: u32 {
        /// Those of [`crate::log::Warnings`], bit by bit.
        const SPARE = 1 << 0;
        const TEMPERATURE = 1 << 1;
        const RELIABILITY = 1 << 2;
        const READ_ONLY = 1 << 3;
        const BACKUP = 1 << 4;
        const WARNINGS = 0x1f;
        const NAMESPACES = 1 << 8;
        const ANA = 1 << 11;
        const DISCOVERY = 1 << 31;
        const _ = !0;
    }
}

/// A controller (Base, 5.15.2.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerIdentity {
    /// At most 20 bytes; the same for all controllers of a subsystem.
    pub serial: String,
    /// At most 40 bytes.
    pub model: String,
    /// At most 8 bytes.
    pub firmware: String,
    pub id: u16,
    pub is_discovery: bool,
    /// Data of a command, at most: 4 KiB times a power of two; 0: without limit.
    pub data_bytes_max: u64,
    /// Data within a command, at most.
    pub in_capsule_bytes: usize,
    pub events: Events,
    pub optional: OptionalCommands,
    /// Each namespace has a page of health of its own.
    pub has_namespace_health: bool,
    /// Writes need flushes.
    pub has_volatile_cache: bool,
    /// The largest identifier of a namespace.
    pub namespaces_max: u32,
    /// Namespaces that there may be at once.
    pub namespaces_at_once_max: u32,
    /// The unit of a host's keep alive timer, to which it is rounded up; 0: there is none.
    pub keep_alive_unit_ms: u32,
    /// Namespaces' paths differ, and say how (Base, 8.20).
    pub has_ana: bool,
    /// Groups of namespaces whose paths are alike.
    pub ana_groups: u32,
    /// Entries of an I/O queue, at most.
    pub queue_entries_max: u16,
    pub subsystem: Nqn,
}

/// The unit of `keep_alive_unit_ms` as it is told (KAS).
const KEEP_ALIVE_MS: u32 = 100;
const ABORTS_LESS_ONE: u8 = ABORTS_MAX as u8 - 1;
/// Abort commands at once.
pub const ABORTS_MAX: u64 = 4;
/// Asynchronous event requests at once, less one.
const EVENT_REQUESTS_LESS_ONE: u8 = EVENT_REQUESTS_MAX as u8 - 1;
pub const EVENT_REQUESTS_MAX: usize = 4;
/// Entries of the log of errors, less one.
const ERROR_ENTRIES_LESS_ONE: u8 = ERROR_ENTRIES_MAX as u8 - 1;
pub const ERROR_ENTRIES_MAX: usize = 64;
/// The unit of `data_bytes_max`.
const PAGE_BYTES: u64 = 4096;
/// 343 and 358 K: what a drive warns at, which nobody can ask a subsystem without one to be (Base, figure 247).
pub const WARNING_KELVIN: u16 = 343;
const CRITICAL_KELVIN: u16 = 358;

impl ControllerIdentity {
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; IDENTIFY_BYTES];
        put_text(&mut bytes, 4, 20, &self.serial, b' ');
        put_text(&mut bytes, 24, 40, &self.model, b' ');
        put_text(&mut bytes, 64, 8, &self.firmware, b' ');
        /// Several controllers, and several ports.
        const SHARED: u8 = 0b11;
        const ANA: u8 = 1 << 3;
        bytes[76] = if self.has_ana { SHARED | ANA } else { SHARED };
        bytes[77] = match self.data_bytes_max {
            0 => 0,
            limit => (limit / PAGE_BYTES).ilog2() as u8,
        };
        put(&mut bytes, 78, &self.id.to_le_bytes());
        put(&mut bytes, 80, &VERSION.to_le_bytes());
        put(&mut bytes, 92, &self.events.bits().to_le_bytes());
        /// 128-bit host identifiers; any command keeps a host alive.
        const ATTRIBUTES: u32 = 1 | 1 << 6;
        put(&mut bytes, 96, &ATTRIBUTES.to_le_bytes());
        bytes[111] = if self.is_discovery { 2 } else { 1 };
        bytes[258] = ABORTS_LESS_ONE;
        bytes[259] = EVENT_REQUESTS_LESS_ONE;
        // One slot of firmware, which is read-only.
        bytes[260] = 1 | 1 << 1;
        // Commands' effects, and reads of parts of log pages.
        bytes[261] = 1 << 1 | 1 << 2 | u8::from(self.has_namespace_health);
        bytes[262] = ERROR_ENTRIES_LESS_ONE;
        put(&mut bytes, 266, &WARNING_KELVIN.to_le_bytes());
        put(&mut bytes, 268, &CRITICAL_KELVIN.to_le_bytes());
        put(&mut bytes, 320, &((self.keep_alive_unit_ms / KEEP_ALIVE_MS) as u16).to_le_bytes());
        if self.has_ana {
            // Seconds of a transition, at most.
            bytes[342] = 10;
            // Optimised, not optimised, inaccessible, lost and in transition; groups do not change while attached.
            bytes[343] = 0b1_1111 | 1 << 6;
            put(&mut bytes, 344, &self.ana_groups.to_le_bytes());
            put(&mut bytes, 348, &self.ana_groups.to_le_bytes());
        }
        // Entries are of one size, least and most.
        bytes[512] = COMMAND_BYTES.ilog2() as u8 * 0x11;
        bytes[513] = COMPLETION_BYTES.ilog2() as u8 * 0x11;
        put(&mut bytes, 514, &self.queue_entries_max.to_le_bytes());
        put(&mut bytes, 516, &self.namespaces_max.to_le_bytes());
        put(&mut bytes, 520, &self.optional.bits().to_le_bytes());
        /// A flush of all namespaces at once is not there.
        const NO_BROADCAST_FLUSH: u8 = 0b10 << 1;
        bytes[525] = NO_BROADCAST_FLUSH | u8::from(self.has_volatile_cache);
        /// Any alignment; offsets are within capsules.
        const SGLS: u32 = 1 | 1 << 20;
        put(&mut bytes, 536, &SGLS.to_le_bytes());
        put(&mut bytes, 540, &self.namespaces_at_once_max.to_le_bytes());
        put(&mut bytes, 768, &self.subsystem.field());
        let capsule = (COMMAND_BYTES + self.in_capsule_bytes) / 16;
        put(&mut bytes, 1792, &(capsule as u32).to_le_bytes());
        put(&mut bytes, 1796, &(COMPLETION_BYTES as u32 / 16).to_le_bytes());
        // One descriptor of data, by which TCP has all.
        bytes[1803] = 1;
        bytes
    }

    /// # Errors
    ///
    /// When the subsystem has no name.
    pub fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> Result<Self, NqnError> {
        let subsystem: [u8; NQN_FIELD_BYTES] = array(bytes, 768);
        // Data that are not right behind the command (ICDOFF) are no use: none go with it.
        let capsule = match u16_at(bytes, 1800) {
            0 => u32_at(bytes, 1792) as usize * 16,
            _ => 0,
        };
        Ok(Self {
            serial: text_at(bytes, 4, 20),
            model: text_at(bytes, 24, 40),
            firmware: text_at(bytes, 64, 8),
            id: u16_at(bytes, 78),
            is_discovery: bytes[111] == 2,
            data_bytes_max: match bytes[77] {
                0 => 0,
                power => PAGE_BYTES.checked_shl(u32::from(power)).unwrap_or(0),
            },
            in_capsule_bytes: capsule.saturating_sub(COMMAND_BYTES),
            events: Events::from_bits_retain(u32_at(bytes, 92)),
            optional: OptionalCommands::from_bits_retain(u16_at(bytes, 520)),
            has_namespace_health: bytes[261] & 1 != 0,
            has_volatile_cache: bytes[525] & 1 != 0,
            namespaces_max: u32_at(bytes, 516),
            namespaces_at_once_max: match u32_at(bytes, 540) {
                // Not told (MNAN): as many as there are identifiers.
                0 => u32_at(bytes, 516),
                limit => limit,
            },
            keep_alive_unit_ms: u32::from(u16_at(bytes, 320)) * KEEP_ALIVE_MS,
            has_ana: bytes[76] & 1 << 3 != 0,
            ana_groups: u32_at(bytes, 348),
            queue_entries_max: u16_at(bytes, 514),
            subsystem: Nqn::parse(&subsystem)?,
        })
    }
}

/// What a command may ask for that has no data, of the NVM command set (NVM Command Set 1.0, 4.1.5.4); 0: not told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandLimits {
    /// Bytes that are zeroed.
    pub zeroes_bytes_max: u64,
    /// Blocks that are discarded.
    pub discard_blocks_max: u64,
}

impl CommandLimits {
    #[must_use]
    pub fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> Self {
        let (of_range, of_command) = (u64::from(u32_at(bytes, 4)), u64_at(bytes, 8));
        Self {
            zeroes_bytes_max: match bytes[1] {
                0 => 0,
                power => PAGE_BYTES.checked_shl(u32::from(power)).unwrap_or(0),
            },
            discard_blocks_max: match (of_range, of_command) {
                (0, limit) | (limit, 0) => limit,
                (range, command) => range.min(command),
            },
        }
    }

    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; IDENTIFY_BYTES];
        bytes[1] = match self.zeroes_bytes_max {
            0 => 0,
            limit => (limit / PAGE_BYTES).ilog2() as u8,
        };
        put(&mut bytes, 8, &self.discard_blocks_max.to_le_bytes());
        bytes
    }
}

/// A namespace (Base, 5.15.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceIdentity {
    pub blocks: u64,
    /// A power of two, 512 at least.
    pub block_bytes: u64,
    /// Writes of whole multiples of so many blocks, at multiples of it, are the cheapest; 0: not told.
    pub write_blocks_best: u64,
    /// Discards free room in units of so many blocks; 0: not told.
    pub discard_blocks: u64,
    /// Hosts can be kept from writing: by the type Write Exclusive, Registrants Only, at least.
    pub has_reservations: bool,
    /// Also over a loss of power, if a host asks for it.
    pub keeps_reservations: bool,
    pub is_read_only: bool,
    /// Of paths that are alike.
    pub ana_group: u32,
    /// Of this namespace alone, for ever.
    pub guid: [u8; 16],
}

impl NamespaceIdentity {
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; IDENTIFY_BYTES];
        for at in [0, 8, 16] {
            put(&mut bytes, at, &self.blocks.to_le_bytes());
        }
        /// Discarding is worth it, and what is best for it and for writing is told.
        const THIN: u8 = 1 << 0;
        const BEST: u8 = 1 << 4;
        bytes[24] = THIN | BEST;
        // Shared by controllers.
        bytes[30] = 1;
        bytes[31] = if self.has_reservations { crate::reservation::CAPABILITIES } else { 0 }
            | u8::from(self.keeps_reservations);
        // What discarded blocks read as is not told; Write Zeroes may discard.
        bytes[33] = 1 << 3;
        let best =
            |blocks: u64| u16::try_from(blocks.saturating_sub(1)).unwrap_or(u16::MAX).to_le_bytes();
        for (at, blocks) in [
            // Granularity and alignment, of writes and of discards.
            (64, self.write_blocks_best),
            (66, self.write_blocks_best),
            (68, self.discard_blocks),
            (70, self.discard_blocks),
            (72, self.write_blocks_best),
        ] {
            put(&mut bytes, at, &best(blocks));
        }
        put(
            &mut bytes,
            48,
            &(u128::from(self.blocks) * u128::from(self.block_bytes)).to_le_bytes(),
        );
        put(&mut bytes, 92, &self.ana_group.to_le_bytes());
        bytes[99] = u8::from(self.is_read_only);
        put(&mut bytes, 104, &self.guid);
        bytes[130] = self.block_bytes.ilog2() as u8;
        bytes
    }

    /// `None`: its blocks carry metadata, or are of no size that there is.
    #[must_use]
    pub fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> Option<Self> {
        // Of more than 16 formats the number goes on in bits 6:5 (FLBAS).
        let number = bytes[26] & 0xf | (bytes[26] >> 5 & 0b11) << 4;
        let format = 128 + usize::from(number) * 4;
        let (metadata, power) = (u16_at(bytes, format), bytes[format + 2]);
        if metadata != 0 || !(9..=20).contains(&power) {
            return None;
        }
        let told = |at: usize| match bytes[24] & 1 << 4 {
            0 => 0,
            _ => u64::from(u16_at(bytes, at)) + 1,
        };
        Some(Self {
            blocks: u64_at(bytes, 0),
            block_bytes: 1 << power,
            write_blocks_best: told(64),
            discard_blocks: told(68),
            has_reservations: bytes[31] & crate::reservation::WRITE_EXCLUSIVE_REGISTRANTS != 0,
            keeps_reservations: bytes[31] & crate::reservation::PERSISTENT != 0,
            is_read_only: bytes[99] & 1 != 0,
            ana_group: u32_at(bytes, 92),
            guid: array(bytes, 104),
        })
    }
}

/// The type of a namespace's GUID among its names, and of its UUID.
pub const NGUID: u8 = 2;
pub const UUID: u8 = 3;

/// The names of a namespace: its GUID, once as such and once as UUID, which hosts prefer (Base, 5.15.2.4), and that it has the NVM
/// command set.
#[must_use]
pub fn namespace_descriptors(guid: [u8; 16]) -> Vec<u8> {
    const COMMAND_SET: u8 = 4;
    let mut bytes = Vec::with_capacity(IDENTIFY_BYTES);
    for kind in [NGUID, UUID] {
        bytes.extend([kind, 16, 0, 0]);
        bytes.extend(guid);
    }
    bytes.extend([COMMAND_SET, 1, 0, 0, 0]);
    bytes.resize(IDENTIFY_BYTES, 0);
    bytes
}

/// Reads such names: what tells the namespace from every other, as type and value. What does not
/// fit, or has no length, ends the list.
pub fn parse_namespace_descriptors(
    bytes: &[u8; IDENTIFY_BYTES],
) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = &bytes[..];
    std::iter::from_fn(move || {
        let (head, behind) = rest.split_first_chunk::<4>()?;
        let (value, behind) = behind.split_at_checked(usize::from(head[1]))?;
        rest = behind;
        (!value.is_empty()).then_some((head[0], value))
    })
}

/// A list of namespaces' identifiers, ascending, those above `after` and as many as an answer has room for.
#[must_use]
pub fn namespace_list(all: impl Iterator<Item = u32>, after: u32) -> Vec<u8> {
    let listed = all.filter(|&id| id > after).take(IDENTIFY_BYTES / 4);
    let mut bytes: Vec<u8> = listed.flat_map(u32::to_le_bytes).collect();
    bytes.resize(IDENTIFY_BYTES, 0);
    bytes
}

/// Reads such a list.
pub fn listed_namespaces(bytes: &[u8; IDENTIFY_BYTES]) -> impl Iterator<Item = u32> {
    let (ids, _) = bytes.as_chunks::<4>();
    ids.iter().map(|id| u32::from_le_bytes(*id)).take_while(|&id| id != 0)
}

/// A list of controllers' identifiers, ascending, from `first` on.
#[must_use]
pub fn controller_list(all: impl Iterator<Item = u16>, first: u16) -> Vec<u8> {
    let listed: Vec<u16> = all.filter(|&id| id >= first).take(IDENTIFY_BYTES / 2 - 1).collect();
    let mut bytes: Vec<u8> = (listed.len() as u16).to_le_bytes().into();
    bytes.extend(listed.into_iter().flat_map(u16::to_le_bytes));
    bytes.resize(IDENTIFY_BYTES, 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace() -> NamespaceIdentity {
        NamespaceIdentity {
            blocks: 100,
            block_bytes: 4096,
            write_blocks_best: 0,
            discard_blocks: 0,
            has_reservations: true,
            keeps_reservations: false,
            is_read_only: false,
            ana_group: 1,
            guid: [3; 16],
        }
    }

    fn page(bytes: Vec<u8>) -> [u8; IDENTIFY_BYTES] {
        bytes.try_into().expect("a page")
    }

    #[test]
    fn reservations_are_of_use_with_the_type_that_keeps_writers_out() {
        for (capabilities, has, keeps) in [
            (0, false, false),
            (0b1000_0110, false, false),
            (0b1000, true, false),
            (0b1001, true, true),
        ] {
            let mut bytes = page(namespace().to_bytes());
            bytes[31] = capabilities;
            let found = NamespaceIdentity::parse(&bytes).expect("a namespace");
            assert_eq!((found.has_reservations, found.keeps_reservations), (has, keeps));
        }
    }

    #[test]
    fn limits_of_commands_without_data() {
        let limits = CommandLimits { zeroes_bytes_max: 64 << 10, discard_blocks_max: 500 };
        let mut bytes = page(limits.to_bytes());
        assert_eq!(CommandLimits::parse(&bytes), limits);
        bytes[4] = 100;
        assert_eq!(CommandLimits::parse(&bytes).discard_blocks_max, 100);
        assert_eq!(CommandLimits::parse(&[0; IDENTIFY_BYTES]), CommandLimits::default());
    }

    #[test]
    fn a_format_may_have_a_high_number() {
        let mut bytes = page(namespace().to_bytes());
        (bytes[26], bytes[128 + 4 * 0x21 + 2]) = (1 << 6 | 1, 9);
        assert_eq!(NamespaceIdentity::parse(&bytes).expect("a namespace").block_bytes, 512);
    }
}
