//! Commands of Fabrics: how a host connects queues, and the properties of a controller (Fabrics, 3.3 to 3.6).

use crate::field::{array, put, u16_at, u64_at};
use crate::nqn::NQN_FIELD_BYTES;
use crate::{AdminOpcode, Command, Nqn, NqnError};

/// Any controller will do: the subsystem makes one.
pub const ANY_CONTROLLER: u16 = 0xffff;
/// Bytes of the data of Connect.
pub const CONNECT_BYTES: usize = 1024;

/// What a command of Fabrics is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FabricsType {
    PropertySet = 0x00,
    Connect = 0x01,
    PropertyGet = 0x04,
    AuthenticationSend = 0x05,
    AuthenticationReceive = 0x06,
    Disconnect = 0x08,
}

impl FabricsType {
    #[must_use]
    pub fn of(code: u8) -> Option<Self> {
        Some(match code {
            0x00 => Self::PropertySet,
            0x01 => Self::Connect,
            0x04 => Self::PropertyGet,
            0x05 => Self::AuthenticationSend,
            0x06 => Self::AuthenticationReceive,
            0x08 => Self::Disconnect,
            _ => return None,
        })
    }
}

fn command(kind: FabricsType, id: u16) -> Command {
    Command::new(AdminOpcode::Fabrics as u8, id, u32::from(kind as u8))
}

/// What Connect says of the queue (Fabrics, 3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    pub format: u16,
    /// 0: the admin queue.
    pub queue: u16,
    /// Entries, less one.
    pub queue_entries_less_one: u16,
    /// Completions need not say how far the controller has come with the queue.
    pub is_without_flow_control: bool,
    /// After so long without a command the controller gives the host up; 0: never. Of the admin queue.
    pub keep_alive_ms: u32,
}

const WITHOUT_FLOW_CONTROL: u8 = 1 << 2;

impl Connect {
    #[must_use]
    pub fn of(command: &Command) -> Self {
        let [attributes] = command.part::<1>(46);
        Self {
            format: u16::from_le_bytes(command.part(40)),
            queue: u16::from_le_bytes(command.part(42)),
            queue_entries_less_one: u16::from_le_bytes(command.part(44)),
            is_without_flow_control: attributes & WITHOUT_FLOW_CONTROL != 0,
            keep_alive_ms: command.dword(12),
        }
    }

    #[must_use]
    pub fn command(self, id: u16) -> Command {
        let attributes = if self.is_without_flow_control { WITHOUT_FLOW_CONTROL } else { 0 };
        command(FabricsType::Connect, id)
            .with_part(40, &self.format.to_le_bytes())
            .with_part(42, &self.queue.to_le_bytes())
            .with_part(44, &self.queue_entries_less_one.to_le_bytes())
            .with_part(46, &[attributes])
            .with_dword(12, self.keep_alive_ms)
    }

    /// What a completion says of a parameter that is wrong: its place in the command, or in the data.
    #[must_use]
    pub fn wrong_at(place: u16, is_in_data: bool) -> u64 {
        u64::from(place) | u64::from(is_in_data) << 16
    }
}

/// Who connects to what: the data of Connect (Fabrics, 3.3.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    pub host_id: [u8; 16],
    /// [`ANY_CONTROLLER`] with the admin queue, then the one that was made.
    pub controller: u16,
    pub subsystem: Nqn,
    pub host: Nqn,
}

/// Where the names are in the data.
pub const SUBSYSTEM_AT: u16 = 256;
pub const HOST_AT: u16 = 512;
pub const CONTROLLER_AT: u16 = 16;

impl ConnectData {
    /// # Errors
    ///
    /// The place of the name that is none, and why.
    pub fn parse(data: &[u8; CONNECT_BYTES]) -> Result<Self, (u16, NqnError)> {
        let name = |at: u16| {
            let field: [u8; NQN_FIELD_BYTES] = array(data, usize::from(at));
            Nqn::parse(&field).map_err(|error| (at, error))
        };
        Ok(Self {
            host_id: array(data, 0),
            controller: u16_at(data, usize::from(CONTROLLER_AT)),
            subsystem: name(SUBSYSTEM_AT)?,
            host: name(HOST_AT)?,
        })
    }

    #[must_use]
    pub fn to_bytes(&self) -> [u8; CONNECT_BYTES] {
        let mut data = [0; CONNECT_BYTES];
        put(&mut data, 0, &self.host_id);
        put(&mut data, usize::from(CONTROLLER_AT), &self.controller.to_le_bytes());
        put(&mut data, usize::from(SUBSYSTEM_AT), &self.subsystem.field());
        put(&mut data, usize::from(HOST_AT), &self.host.field());
        data
    }
}

/// In the result of Connect, beside the controller's number: the queue takes nothing but authentication until the host has proved who it is
/// (Base 2.0, figure 383: AUTHREQ.ATR).
pub const MUST_AUTHENTICATE: u64 = 1 << 17;
/// The same, by means of a secure channel (AUTHREQ.ASCR).
pub const MUST_SECURE: u64 = 1 << 18;

/// Authentication Send and Authentication Receive (Fabrics, 3.1 and 3.2): a message of a security protocol, as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthenticationTransfer {
    pub protocol: u8,
    /// What the protocol makes of it.
    pub specific: u16,
    /// Of the message, or of the room for it.
    pub bytes: u32,
}

impl AuthenticationTransfer {
    #[must_use]
    pub fn of(command: &Command) -> Self {
        let [low, high, protocol] = command.part(41);
        let specific = u16::from_le_bytes([low, high]);
        Self { protocol, specific, bytes: command.dword(11) }
    }

    /// Sends a message, or asks for one.
    #[must_use]
    pub fn command(self, is_send: bool, id: u16) -> Command {
        let kind = match is_send {
            true => FabricsType::AuthenticationSend,
            false => FabricsType::AuthenticationReceive,
        };
        let [low, high] = self.specific.to_le_bytes();
        command(kind, id).with_part(41, &[low, high, self.protocol]).with_dword(11, self.bytes)
    }
}

/// A property of a controller (Fabrics, 3.5.1; Base, 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Property {
    Capabilities = 0x00,
    Version = 0x08,
    Configuration = 0x14,
    Status = 0x1c,
    SubsystemReset = 0x20,
}

impl Property {
    #[must_use]
    pub fn of(offset: u32) -> Option<Self> {
        Some(match offset {
            0x00 => Self::Capabilities,
            0x08 => Self::Version,
            0x14 => Self::Configuration,
            0x1c => Self::Status,
            0x20 => Self::SubsystemReset,
            _ => return None,
        })
    }

    #[must_use]
    pub fn has_eight_bytes(self) -> bool {
        match self {
            Self::Capabilities => true,
            Self::Version | Self::Configuration | Self::Status | Self::SubsystemReset => false,
        }
    }
}

/// Property Get and Property Set (Fabrics, 3.5 and 3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertyAccess {
    /// Of a [`Property`].
    pub offset: u32,
    pub has_eight_bytes: bool,
    /// What it is set to.
    pub value: u64,
}

impl PropertyAccess {
    #[must_use]
    pub fn of(command: &Command) -> Self {
        let [size] = command.part::<1>(40);
        Self {
            offset: command.dword(11),
            has_eight_bytes: size & 0b111 == 1,
            value: u64_at(&command.part::<8>(48), 0),
        }
    }

    #[must_use]
    pub fn get(property: Property, id: u16) -> Command {
        command(FabricsType::PropertyGet, id)
            .with_part(40, &[u8::from(property.has_eight_bytes())])
            .with_dword(11, property as u32)
    }

    #[must_use]
    pub fn set(property: Property, value: u64, id: u16) -> Command {
        command(FabricsType::PropertySet, id)
            .with_part(40, &[u8::from(property.has_eight_bytes())])
            .with_dword(11, property as u32)
            .with_part(48, &value.to_le_bytes())
    }
}

/// Capabilities of a controller (Base, 3.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    pub queue_entries_max_less_one: u16,
    /// How long it may take to become ready, in units of 500 ms.
    pub timeout: u8,
}

impl Capabilities {
    #[must_use]
    pub fn parse(value: u64) -> Self {
        Self { queue_entries_max_less_one: value as u16, timeout: (value >> 24) as u8 }
    }

    #[must_use]
    pub fn value(self) -> u64 {
        /// Queues lie in one piece, as those of Fabrics do.
        const CONTIGUOUS: u64 = 1 << 16;
        /// Of the NVM command set. The smallest and largest page are 4 KiB.
        const NVM: u64 = 1 << 37;
        u64::from(self.queue_entries_max_less_one)
            | CONTIGUOUS
            | u64::from(self.timeout) << 24
            | NVM
    }
}

/// How a host wants the controller (Base, 3.1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Configuration(pub u32);

impl Configuration {
    /// Enabled, with entries of 64 and 16 bytes.
    pub const ENABLED: Self = Self(1 | 6 << 16 | 4 << 20);

    #[must_use]
    pub fn is_enabled(self) -> bool {
        self.0 & 1 != 0
    }

    /// A shutdown is asked for, in order or at once.
    #[must_use]
    pub fn is_shutting_down(self) -> bool {
        self.0 >> 14 & 0b11 != 0
    }

    /// The same, with a shutdown in order.
    #[must_use]
    pub fn shut_down(self) -> Self {
        Self(self.0 & !(0b11 << 14) | 1 << 14)
    }

    /// Of the NVM command set, with pages of 4 KiB, or not yet enabled.
    #[must_use]
    pub fn is_possible(self) -> bool {
        !self.is_enabled() || self.0 >> 4 & 0b111 == 0 && self.0 >> 7 & 0b1111 == 0
    }
}

/// How a controller is doing (Base, 3.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerState {
    pub is_ready: bool,
    pub has_failed: bool,
    pub shutdown: Shutdown,
}

/// How far a controller is with letting its host go (CSTS.SHST).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shutdown {
    /// Nobody has asked for it.
    #[default]
    None = 0,
    UnderWay = 1,
    /// What was answered is durable.
    Complete = 2,
}

impl ControllerState {
    #[must_use]
    pub fn parse(value: u32) -> Self {
        Self {
            is_ready: value & 1 != 0,
            has_failed: value & 2 != 0,
            shutdown: match value >> 2 & 0b11 {
                1 => Shutdown::UnderWay,
                2 => Shutdown::Complete,
                _ => Shutdown::None,
            },
        }
    }

    #[must_use]
    pub fn value(self) -> u32 {
        u32::from(self.is_ready) | u32::from(self.has_failed) << 1 | (self.shutdown as u32) << 2
    }
}
