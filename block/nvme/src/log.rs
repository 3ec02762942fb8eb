//! Log pages (Base, 5.14), and the events that say that one has changed (Base, 5.2).

use crate::field::{put, put_text, text_at, u16_at, u32_at, u64_at};
use crate::nqn::NQN_FIELD_BYTES;
use crate::{AdminOpcode, Command, IoOpcode, Nqn};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// Pages that are known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LogPage {
    Errors = 0x01,
    Health = 0x02,
    Firmware = 0x03,
    ChangedNamespaces = 0x04,
    Effects = 0x05,
    Ana = 0x0c,
    Discovery = 0x70,
    Reservations = 0x80,
}

impl LogPage {
    #[must_use]
    pub fn of(code: u8) -> Option<Self> {
        Some(match code {
            0x01 => Self::Errors,
            0x02 => Self::Health,
            0x03 => Self::Firmware,
            0x04 => Self::ChangedNamespaces,
            0x05 => Self::Effects,
            0x0c => Self::Ana,
            0x70 => Self::Discovery,
            0x80 => Self::Reservations,
            _ => return None,
        })
    }
}

/// Get Log Page: which, and what of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetLogPage {
    /// Of a [`LogPage`].
    pub page: u8,
    /// Whatever the page makes of it.
    pub specific: u8,
    /// The event that told of it stays: the host may not be told of another.
    pub keeps_event: bool,
    pub at: u64,
    pub bytes: u64,
}

impl GetLogPage {
    #[must_use]
    pub fn of(command: &Command) -> Self {
        let (dword10, dword11) = (command.dword(10), command.dword(11));
        let dwords = u64::from(dword10 >> 16) | u64::from(dword11 & 0xffff) << 16;
        Self {
            page: dword10 as u8,
            specific: (dword10 >> 8 & 0xf) as u8,
            keeps_event: dword10 >> 15 & 1 != 0,
            at: u64::from(command.dword(12)) | u64::from(command.dword(13)) << 32,
            bytes: (dwords + 1) * 4,
        }
    }

    /// `bytes` are whole doublewords, one at least.
    #[must_use]
    pub fn command(self, id: u16, namespace: u32) -> Command {
        let dwords = (self.bytes / 4 - 1) as u32;
        let keeps = u32::from(self.keeps_event) << 15;
        let dword10 = u32::from(self.page) | u32::from(self.specific) << 8 | keeps | dwords << 16;
        Command::new(AdminOpcode::GetLogPage as u8, id, namespace)
            .with_dword(10, dword10)
            .with_dword(11, dwords >> 16)
            .with_dword(12, self.at as u32)
            .with_dword(13, (self.at >> 32) as u32)
    }
}

/// What the answer to an asynchronous event request says (Base, figure 146 and 151).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    NamespacesChanged,
    AnaChanged,
    DiscoveryChanged,
    ReservationNotice,
    /// A drive warns: of its media or cache, of its temperature, of the spare room that is left.
    Unreliable,
    Temperature,
    LowSpare,
}

impl Event {
    const HEALTH: u32 = 1;
    const NOTICE: u32 = 2;
    const IO_COMMAND_SET: u32 = 6;

    pub const ALL: [Self; 7] = [
        Self::NamespacesChanged,
        Self::AnaChanged,
        Self::DiscoveryChanged,
        Self::ReservationNotice,
        Self::Unreliable,
        Self::Temperature,
        Self::LowSpare,
    ];

    /// Those of a drive that begins to warn of this.
    pub fn of_warnings(new: Warnings) -> impl Iterator<Item = Self> {
        let warns = move |event: &Self| event.warnings().intersects(new);
        Self::ALL.into_iter().filter(warns)
    }

    /// What is warned of.
    #[must_use]
    pub fn warnings(self) -> Warnings {
        match self {
            Self::Unreliable => Warnings::RELIABILITY | Warnings::READ_ONLY | Warnings::BACKUP,
            Self::Temperature => Warnings::TEMPERATURE,
            Self::LowSpare => Warnings::SPARE,
            Self::NamespacesChanged
            | Self::AnaChanged
            | Self::DiscoveryChanged
            | Self::ReservationNotice => Warnings::empty(),
        }
    }

    /// The result of the completion.
    #[must_use]
    pub fn result(self) -> u64 {
        let (kind, information, page) = match self {
            Self::NamespacesChanged => (Self::NOTICE, 0x00, LogPage::ChangedNamespaces),
            Self::AnaChanged => (Self::NOTICE, 0x03, LogPage::Ana),
            Self::DiscoveryChanged => (Self::NOTICE, 0xf0, LogPage::Discovery),
            Self::ReservationNotice => (Self::IO_COMMAND_SET, 0x00, LogPage::Reservations),
            Self::Unreliable => (Self::HEALTH, 0x00, LogPage::Health),
            Self::Temperature => (Self::HEALTH, 0x01, LogPage::Health),
            Self::LowSpare => (Self::HEALTH, 0x02, LogPage::Health),
        };
        u64::from(kind | information << 8 | u32::from(page as u8) << 16)
    }

    /// The page to look at. `None`: none of these.
    #[must_use]
    pub fn of(result: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|event| event.result() == result & 0xff_ffff)
    }

    /// The page that this event tells of: reading it lets the controller tell of the next.
    #[must_use]
    pub fn page(self) -> LogPage {
        match self {
            Self::NamespacesChanged => LogPage::ChangedNamespaces,
            Self::AnaChanged => LogPage::Ana,
            Self::DiscoveryChanged => LogPage::Discovery,
            Self::ReservationNotice => LogPage::Reservations,
            Self::Unreliable | Self::Temperature | Self::LowSpare => LogPage::Health,
        }
    }
}

bitflags::bitflags! {
    /// What is wrong (Base, figure 196).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Warnings: u8 {
        /// Spare room has fallen below its threshold.
        const SPARE = 1 << 0;
        /// Hotter, or colder, than the controller should be.
        const TEMPERATURE = 1 << 1;
        /// Media or internal errors have made it unreliable.
        const RELIABILITY = 1 << 2;
        const READ_ONLY = 1 << 3;
        /// What keeps a volatile cache without power has failed.
        const BACKUP = 1 << 4;
        const PERSISTENT_MEMORY = 1 << 5;
        const _ = !0;
    }
}

impl Warnings {
    /// The drive asks to be replaced: anything but that it is hot.
    #[must_use]
    pub fn ask_for_replacement(self) -> bool {
        self.intersects(Self::SPARE | Self::RELIABILITY | Self::READ_ONLY | Self::BACKUP)
    }
}

/// Health of a controller and what is behind it, or of a namespace (Base, 5.14.1.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    pub warnings: Warnings,
    /// 0: not told.
    pub kelvin: u16,
    pub spare_percent: u8,
    pub spare_threshold_percent: u8,
    /// May be above 100; 255: at least.
    pub used_percent: u8,
    /// In units of 512,000 bytes.
    pub read_units: u128,
    pub written_units: u128,
    pub reads: u128,
    pub writes: u128,
    /// Minutes in which it had something to do.
    pub busy_minutes: u128,
    pub power_cycles: u128,
    pub power_on_hours: u128,
    pub unsafe_shutdowns: u128,
    pub media_errors: u128,
    /// Entries of the log of errors over its life.
    pub error_entries: u128,
    /// Minutes above the temperature at which it warns,
    pub warm_minutes: u32,
    /// and above that at which it may fail.
    pub hot_minutes: u32,
}

pub const HEALTH_BYTES: usize = 512;

impl Health {
    /// The unit of what was read and written.
    pub const UNIT_BYTES: u128 = 512_000;

    /// `None`: not told.
    #[must_use]
    pub fn celsius(&self) -> Option<i32> {
        (self.kelvin > 0).then(|| i32::from(self.kelvin) - 273)
    }

    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEALTH_BYTES];
        bytes[0] = self.warnings.bits();
        put(&mut bytes, 1, &self.kelvin.to_le_bytes());
        (bytes[3], bytes[4], bytes[5]) =
            (self.spare_percent, self.spare_threshold_percent, self.used_percent);
        for (at, count) in [
            (32, self.read_units),
            (48, self.written_units),
            (64, self.reads),
            (80, self.writes),
            (96, self.busy_minutes),
            (112, self.power_cycles),
            (128, self.power_on_hours),
            (144, self.unsafe_shutdowns),
            (160, self.media_errors),
            (176, self.error_entries),
        ] {
            put(&mut bytes, at, &count.to_le_bytes());
        }
        put(&mut bytes, 192, &self.warm_minutes.to_le_bytes());
        put(&mut bytes, 196, &self.hot_minutes.to_le_bytes());
        bytes
    }

    #[must_use]
    pub fn parse(bytes: &[u8; HEALTH_BYTES]) -> Self {
        let count =
            |at: usize| u128::from(u64_at(bytes, at)) | u128::from(u64_at(bytes, at + 8)) << 64;
        Self {
            warnings: Warnings::from_bits_retain(bytes[0]),
            kelvin: u16_at(bytes, 1),
            spare_percent: bytes[3],
            spare_threshold_percent: bytes[4],
            used_percent: bytes[5],
            read_units: count(32),
            written_units: count(48),
            reads: count(64),
            writes: count(80),
            busy_minutes: count(96),
            power_cycles: count(112),
            power_on_hours: count(128),
            unsafe_shutdowns: count(144),
            media_errors: count(160),
            error_entries: count(176),
            warm_minutes: u32_at(bytes, 192),
            hot_minutes: u32_at(bytes, 196),
        }
    }
}

/// The only slot of firmware, which is active (Base, 5.14.1.3).
#[must_use]
pub fn firmware_slots(firmware: &str) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    bytes[0] = 1;
    put_text(&mut bytes, 8, 8, firmware, b' ');
    bytes
}

/// Which commands there are, and which of them change something (Base, 5.14.1.5): those of an admin queue, and `io` of I/O queues.
#[must_use]
pub fn effects(io: &[IoOpcode]) -> Vec<u8> {
    const SUPPORTED: u32 = 1 << 0;
    const CHANGES_BLOCKS: u32 = 1 << 1;
    const IO_AT: usize = 1024;
    let mut bytes = vec![0; 4096];
    for &opcode in AdminOpcode::ALL {
        put(&mut bytes, opcode as usize * 4, &SUPPORTED.to_le_bytes());
    }
    for &opcode in io {
        let changes = match opcode {
            IoOpcode::Write | IoOpcode::WriteZeroes | IoOpcode::DatasetManagement => CHANGES_BLOCKS,
            IoOpcode::Flush
            | IoOpcode::Read
            | IoOpcode::Compare
            | IoOpcode::ReservationRegister
            | IoOpcode::ReservationReport
            | IoOpcode::ReservationAcquire
            | IoOpcode::ReservationRelease
            | IoOpcode::Fabrics => 0,
        };
        put(&mut bytes, IO_AT + opcode as usize * 4, &(SUPPORTED | changes).to_le_bytes());
    }
    bytes
}

/// Namespaces that were added, changed or removed (Base, 5.14.1.4); more than it has room for are told as all.
#[must_use]
pub fn changed_namespaces(changed: &[u32]) -> Vec<u8> {
    const ROOM: usize = 1024;
    let ids: &[u32] = if changed.len() > ROOM { &[u32::MAX] } else { changed };
    let mut bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    bytes.resize(ROOM * 4, 0);
    bytes
}

/// How good a path is for a group of namespaces (Base, 8.20.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum AnaState {
    #[default]
    Optimized = 0x1,
    NonOptimized = 0x2,
    Inaccessible = 0x3,
    PersistentLoss = 0x4,
    Change = 0xf,
}

/// A word is none of a state's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{word:?} is no state of a path: optimized, non-optimized, inaccessible, persistent-loss and change are"
)]
pub struct AnaStateError {
    word: String,
}

/// As people write it.
impl FromStr for AnaState {
    type Err = AnaStateError;

    fn from_str(word: &str) -> Result<Self, AnaStateError> {
        let found = Self::ALL.into_iter().find(|state| state.word() == word);
        found.ok_or_else(|| AnaStateError { word: word.into() })
    }
}

impl fmt::Display for AnaState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.word())
    }
}

impl AnaState {
    const ALL: [Self; 5] = [
        Self::Optimized,
        Self::NonOptimized,
        Self::Inaccessible,
        Self::PersistentLoss,
        Self::Change,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
            Self::PersistentLoss => "persistent-loss",
            Self::Change => "change",
        }
    }

    fn of(code: u8) -> Option<Self> {
        Some(match code {
            0x1 => Self::Optimized,
            0x2 => Self::NonOptimized,
            0x3 => Self::Inaccessible,
            0x4 => Self::PersistentLoss,
            0xf => Self::Change,
            _ => return None,
        })
    }

    /// Commands are carried out.
    #[must_use]
    pub fn is_usable(self) -> bool {
        match self {
            Self::Optimized | Self::NonOptimized => true,
            Self::Inaccessible | Self::PersistentLoss | Self::Change => false,
        }
    }
}

/// A group of namespaces whose paths are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaGroup {
    /// From 1 on.
    pub id: u32,
    pub state: AnaState,
    pub changes: u64,
    pub namespaces: Vec<u32>,
}

const ANA_HEADER_BYTES: usize = 16;
const ANA_GROUP_BYTES: usize = 32;

/// How good this path is (Base, 5.14.1.12); `changes` counts changes of the page. Groups without their namespaces if
/// `groups_only`.
#[must_use]
pub fn ana(changes: u64, groups: &[AnaGroup], groups_only: bool) -> Vec<u8> {
    let mut bytes = vec![0; ANA_HEADER_BYTES];
    put(&mut bytes, 0, &changes.to_le_bytes());
    put(&mut bytes, 8, &(groups.len() as u16).to_le_bytes());
    for group in groups {
        let namespaces: &[u32] = if groups_only { &[] } else { &group.namespaces };
        let mut head = [0; ANA_GROUP_BYTES];
        put(&mut head, 0, &group.id.to_le_bytes());
        put(&mut head, 4, &(namespaces.len() as u32).to_le_bytes());
        put(&mut head, 8, &group.changes.to_le_bytes());
        head[16] = group.state as u8;
        bytes.extend(head);
        bytes.extend(namespaces.iter().flat_map(|id| id.to_le_bytes()));
    }
    bytes
}

/// Reads such a page. `None`: it is cut off, or a state is none.
#[must_use]
pub fn parse_ana(bytes: &[u8]) -> Option<Vec<AnaGroup>> {
    let header = bytes.get(..ANA_HEADER_BYTES)?;
    let mut rest = &bytes[ANA_HEADER_BYTES..];
    let mut groups = Vec::new();
    for _ in 0..u16_at(header, 8) {
        let head = rest.get(..ANA_GROUP_BYTES)?;
        let count = u32_at(head, 4) as usize;
        let ids = rest.get(ANA_GROUP_BYTES..ANA_GROUP_BYTES.checked_add(count.checked_mul(4)?)?)?;
        rest = &rest[ANA_GROUP_BYTES + ids.len()..];
        groups.push(AnaGroup {
            id: u32_at(head, 0),
            state: AnaState::of(head[16] & 0xf)?,
            changes: u64_at(head, 8),
            namespaces: ids.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).collect(),
        });
    }
    Some(groups)
}

/// A subsystem and an address at which it is (Fabrics, 5.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    pub subsystem: Nqn,
    /// It is a discovery subsystem: this one, or another to ask.
    pub is_discovery: bool,
    pub address: SocketAddr,
    /// Of the address, within the subsystem.
    pub port: u16,
    /// Only within TLS.
    pub needs_tls: bool,
}

pub const DISCOVERY_ENTRY_BYTES: usize = 1024;
pub const DISCOVERY_HEADER_BYTES: usize = 1024;
/// Entries of an admin queue, at least.
pub const ADMIN_QUEUE_ENTRIES: u16 = 32;

const TCP: u8 = 3;
const IPV4: u8 = 1;
const IPV6: u8 = 2;
const REFERRAL: u8 = 1;
const NVM: u8 = 2;

impl DiscoveryEntry {
    fn to_bytes(&self) -> [u8; DISCOVERY_ENTRY_BYTES] {
        let mut bytes = [0; DISCOVERY_ENTRY_BYTES];
        bytes[0] = TCP;
        bytes[1] = if self.address.is_ipv4() { IPV4 } else { IPV6 };
        bytes[2] = if self.is_discovery { REFERRAL } else { NVM };
        /// Whether the channel must be secure, and that flow control of queues can be off.
        const SECURE: u8 = 1;
        const NOT_SECURE: u8 = 2;
        const FLOW_CONTROL_OFF: u8 = 1 << 2;
        bytes[3] = FLOW_CONTROL_OFF | if self.needs_tls { SECURE } else { NOT_SECURE };
        put(&mut bytes, 4, &self.port.to_le_bytes());
        put(&mut bytes, 6, &crate::fabrics::ANY_CONTROLLER.to_le_bytes());
        put(&mut bytes, 8, &ADMIN_QUEUE_ENTRIES.to_le_bytes());
        put_text(&mut bytes, 32, 32, &self.address.port().to_string(), b' ');
        put(&mut bytes, 256, &self.subsystem.field());
        put_text(&mut bytes, 512, 256, &self.address.ip().to_string(), b' ');
        /// TLS 1.3.
        const TLS: u8 = 2;
        bytes[768] = if self.needs_tls { TLS } else { 0 };
        bytes
    }

    /// `None`: it is not reached by TCP, or its name is none, or its address none that can be connected to.
    fn parse(bytes: &[u8; DISCOVERY_ENTRY_BYTES]) -> Option<Self> {
        if bytes[0] != TCP {
            return None;
        }
        let ip: IpAddr = text_at(bytes, 512, 256).parse().ok()?;
        let port: u16 = text_at(bytes, 32, 32).parse().ok()?;
        let family = if ip.is_ipv4() { IPV4 } else { IPV6 };
        // Whoever connects to an unspecified address comes to himself.
        if bytes[1] != family || ip.is_unspecified() || ip.is_multicast() || port == 0 {
            return None;
        }
        let subsystem: [u8; NQN_FIELD_BYTES] = crate::field::array(bytes, 256);
        Some(Self {
            subsystem: Nqn::parse(&subsystem).ok()?,
            is_discovery: bytes[2] != NVM,
            address: SocketAddr::new(ip, port),
            port: u16_at(bytes, 4),
            needs_tls: bytes[768] != 0,
        })
    }
}

/// The page of a discovery controller; `generation` counts its changes.
#[must_use]
pub fn discovery(generation: u64, entries: &[DiscoveryEntry]) -> Vec<u8> {
    let mut bytes = vec![0; DISCOVERY_HEADER_BYTES];
    put(&mut bytes, 0, &generation.to_le_bytes());
    put(&mut bytes, 8, &(entries.len() as u64).to_le_bytes());
    bytes.extend(entries.iter().flat_map(DiscoveryEntry::to_bytes));
    bytes
}

/// What the header of such a page says: its generation, and how many entries there are.
#[must_use]
pub fn parse_discovery_header(bytes: &[u8; DISCOVERY_HEADER_BYTES]) -> (u64, u64) {
    (u64_at(bytes, 0), u64_at(bytes, 8))
}

/// Reads entries of such a page; those of other transports are left out.
pub fn parse_discovery_entries(bytes: &[u8]) -> impl Iterator<Item = DiscoveryEntry> {
    let (entries, _) = bytes.as_chunks::<DISCOVERY_ENTRY_BYTES>();
    entries.iter().filter_map(DiscoveryEntry::parse)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page of a worn drive, written down by hand from figure 196.
    #[test]
    fn a_page_of_health_is_read_where_the_standard_has_it() {
        let mut page = [0; HEALTH_BYTES];
        page[..6].copy_from_slice(&[0b10_0011, 0x62, 0x01, 8, 10, 95]);
        for (count, at) in (1_u8..).zip((32..192).step_by(16)) {
            page[at] = count;
            // The highest byte of the 16.
            page[at + 15] = 1;
        }
        (page[192], page[196]) = (11, 12);
        let count = |low: u128| 1 << 120 | low;
        let health = Health {
            warnings: Warnings::SPARE | Warnings::TEMPERATURE | Warnings::PERSISTENT_MEMORY,
            kelvin: 354,
            spare_percent: 8,
            spare_threshold_percent: 10,
            used_percent: 95,
            read_units: count(1),
            written_units: count(2),
            reads: count(3),
            writes: count(4),
            busy_minutes: count(5),
            power_cycles: count(6),
            power_on_hours: count(7),
            unsafe_shutdowns: count(8),
            media_errors: count(9),
            error_entries: count(10),
            warm_minutes: 11,
            hot_minutes: 12,
        };
        assert_eq!(Health::parse(&page), health);
        assert_eq!(health.to_bytes(), page);
        assert_eq!((health.celsius(), Health::default().celsius()), (Some(81), None));
    }
}
