//! Reservations as bytes: what hosts ask for, and what they are told (Base, 6.10 to 6.13, 8.8).

use crate::Command;
use crate::field::{array, put, u64_at};

/// All types; bit 0 is [`PERSISTENT`]. Keys that are ignored are those of 1.3 and later (Base, figure 245: RESCAP).
pub(crate) const CAPABILITIES: u8 = 0b1111_1110;
/// Of these: reservations may be kept over a loss of power, and there is the type Write Exclusive, Registrants Only.
pub(crate) const PERSISTENT: u8 = 1 << 0;
pub(crate) const WRITE_EXCLUSIVE_REGISTRANTS: u8 = 1 << 3;
/// Of Reservation Register's doubleword 10: whoever is registered, and what is held, is kept over a loss of power (CPTPL).
pub const PERSIST: u32 = 0b11 << 30;
/// Whether who is registered and what is held is kept over a loss of power from now on: Reservation Register's doubleword 10 (CPTPL).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persist {
    Unchanged,
    No,
    Yes,
}

impl Persist {
    /// `None`: reserved.
    #[must_use]
    pub fn of(command: &Command) -> Option<Self> {
        match command.dword(10) & PERSIST {
            0 => Some(Self::Unchanged),
            0x8000_0000 => Some(Self::No),
            PERSIST => Some(Self::Yes),
            _ => None,
        }
    }
}

/// The byte of a report that says whether they are kept (PTPLS).
pub const PERSISTS_AT: usize = 9;
/// Bytes of what Register and Acquire send: two keys.
pub const KEYS_BYTES: usize = 16;
/// Of what Release sends.
pub const KEY_BYTES: usize = 8;

/// Who may do what while a reservation is held (Base, figure 385).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReservationType {
    WriteExclusive = 1,
    ExclusiveAccess = 2,
    WriteExclusiveRegistrants = 3,
    ExclusiveAccessRegistrants = 4,
    WriteExclusiveAllRegistrants = 5,
    ExclusiveAccessAllRegistrants = 6,
}

impl ReservationType {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrants,
        Self::ExclusiveAccessRegistrants,
        Self::WriteExclusiveAllRegistrants,
        Self::ExclusiveAccessAllRegistrants,
    ];

    #[must_use]
    pub fn of(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Others may not even read.
    #[must_use]
    pub fn excludes_reads(self) -> bool {
        match self {
            Self::ExclusiveAccess
            | Self::ExclusiveAccessRegistrants
            | Self::ExclusiveAccessAllRegistrants => true,
            Self::WriteExclusive
            | Self::WriteExclusiveRegistrants
            | Self::WriteExclusiveAllRegistrants => false,
        }
    }

    /// Every host that is registered may do what the holder may.
    #[must_use]
    pub fn admits_registrants(self) -> bool {
        match self {
            Self::WriteExclusive | Self::ExclusiveAccess => false,
            Self::WriteExclusiveRegistrants
            | Self::ExclusiveAccessRegistrants
            | Self::WriteExclusiveAllRegistrants
            | Self::ExclusiveAccessAllRegistrants => true,
        }
    }

    /// Every host that is registered is a holder.
    #[must_use]
    pub fn is_of_all_registrants(self) -> bool {
        match self {
            Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants => true,
            Self::WriteExclusive
            | Self::ExclusiveAccess
            | Self::WriteExclusiveRegistrants
            | Self::ExclusiveAccessRegistrants => false,
        }
    }
}

/// What a host asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationRequest {
    Register {
        key: u64,
    },
    /// `current` is `None` where it is to be ignored.
    Unregister {
        current: Option<u64>,
    },
    Replace {
        current: Option<u64>,
        key: u64,
    },
    Acquire {
        current: u64,
        kind: ReservationType,
    },
    Preempt {
        current: u64,
        preempted: u64,
        kind: ReservationType,
        aborts: bool,
    },
    Release {
        current: u64,
        kind: ReservationType,
    },
    Clear {
        current: u64,
    },
}

/// Current keys are not looked at, of doubleword 10.
const IGNORES_KEY: u32 = 1 << 3;

impl ReservationRequest {
    /// Reservation Register; `None`: it asks for nothing that there is. Whether it is to be kept over a loss of power is [`Persist`]'s.
    #[must_use]
    pub fn register(command: &Command, data: &[u8; KEYS_BYTES]) -> Option<Self> {
        let (current, key) = (u64_at(data, 0), u64_at(data, 8));
        let dword = command.dword(10);
        let current = if dword & IGNORES_KEY != 0 { None } else { Some(current) };
        match dword & 0b111 {
            0 => Some(Self::Register { key }),
            1 => Some(Self::Unregister { current }),
            2 => Some(Self::Replace { current, key }),
            _ => None,
        }
    }

    /// Reservation Acquire. Ignoring the key is not possible here.
    #[must_use]
    pub fn acquire(command: &Command, data: &[u8; KEYS_BYTES]) -> Option<Self> {
        let (current, preempted) = (u64_at(data, 0), u64_at(data, 8));
        let dword = command.dword(10);
        let kind = ReservationType::of((dword >> 8) as u8)?;
        if dword & IGNORES_KEY != 0 {
            return None;
        }
        match dword & 0b111 {
            0 => Some(Self::Acquire { current, kind }),
            1 => Some(Self::Preempt { current, preempted, kind, aborts: false }),
            2 => Some(Self::Preempt { current, preempted, kind, aborts: true }),
            _ => None,
        }
    }

    /// Reservation Release.
    #[must_use]
    pub fn release(command: &Command, data: &[u8; KEY_BYTES]) -> Option<Self> {
        let current = u64_at(data, 0);
        let dword = command.dword(10);
        if dword & IGNORES_KEY != 0 {
            return None;
        }
        match dword & 0b111 {
            0 => {
                let kind = ReservationType::of((dword >> 8) as u8)?;
                Some(Self::Release { current, kind })
            }
            1 => Some(Self::Clear { current }),
            _ => None,
        }
    }

    /// The command's opcode, doubleword 10 and data.
    #[must_use]
    pub fn to_command(self) -> (crate::IoOpcode, u32, Vec<u8>) {
        use crate::IoOpcode::{ReservationAcquire, ReservationRegister, ReservationRelease};
        let keys = |current: u64, other: u64| [current.to_le_bytes(), other.to_le_bytes()].concat();
        let ignoring = |current: Option<u64>| if current.is_none() { IGNORES_KEY } else { 0 };
        let of_type = |kind: ReservationType| u32::from(kind as u8) << 8;
        match self {
            Self::Register { key } => (ReservationRegister, 0, keys(0, key)),
            Self::Unregister { current } => {
                (ReservationRegister, 1 | ignoring(current), keys(current.unwrap_or(0), 0))
            }
            Self::Replace { current, key } => {
                (ReservationRegister, 2 | ignoring(current), keys(current.unwrap_or(0), key))
            }
            Self::Acquire { current, kind } => {
                (ReservationAcquire, of_type(kind), keys(current, 0))
            }
            Self::Preempt { current, preempted, kind, aborts } => {
                let action = if aborts { 2 } else { 1 };
                (ReservationAcquire, action | of_type(kind), keys(current, preempted))
            }
            Self::Release { current, kind } => {
                (ReservationRelease, of_type(kind), current.to_le_bytes().into())
            }
            Self::Clear { current } => (ReservationRelease, 1, current.to_le_bytes().into()),
        }
    }
}

/// A host that is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    pub host: [u8; 16],
    /// Through which it is, or [`crate::fabrics::ANY_CONTROLLER`] when it is through none just now.
    pub controller: u16,
    pub key: u64,
    pub is_holder: bool,
}

/// What Reservation Report says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationReport {
    /// Counts changes of who is registered.
    pub generation: u32,
    pub kind: Option<ReservationType>,
    pub registrants: Vec<Registrant>,
}

/// Of a report in its extended form, in front of the registrants (Base, figure "Reservation Status Extended Data Structure").
pub const EXTENDED_HEADER_BYTES: usize = 64;
pub const EXTENDED_REGISTRANT_BYTES: usize = 64;

impl ReservationReport {
    /// As bytes: the extended form, which has all of a host's identifier.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; EXTENDED_HEADER_BYTES];
        put(&mut bytes, 0, &self.generation.to_le_bytes());
        bytes[4] = self.kind.map_or(0, |kind| kind as u8);
        put(&mut bytes, 5, &(self.registrants.len() as u16).to_le_bytes());
        for registrant in &self.registrants {
            let mut entry = [0; EXTENDED_REGISTRANT_BYTES];
            put(&mut entry, 0, &registrant.controller.to_le_bytes());
            entry[2] = u8::from(registrant.is_holder);
            put(&mut entry, 8, &registrant.key.to_le_bytes());
            put(&mut entry, 16, &registrant.host);
            bytes.extend(entry);
        }
        bytes
    }

    /// Reads an extended report. `None`: it is cut off.
    #[must_use]
    pub fn parse_extended(bytes: &[u8]) -> Option<Self> {
        let header = bytes.get(..EXTENDED_HEADER_BYTES)?;
        let count = usize::from(u16::from_le_bytes(array(header, 5)));
        let entries = bytes.get(EXTENDED_HEADER_BYTES..)?;
        let (entries, _) = entries.as_chunks::<EXTENDED_REGISTRANT_BYTES>();
        let registrants = entries.get(..count)?.iter().map(|entry| Registrant {
            host: array(entry, 16),
            controller: u16::from_le_bytes(array(entry, 0)),
            key: u64_at(entry, 8),
            is_holder: entry[2] & 1 != 0,
        });
        Some(Self {
            generation: u32::from_le_bytes(array(header, 0)),
            kind: ReservationType::of(header[4]),
            registrants: registrants.collect(),
        })
    }
}
