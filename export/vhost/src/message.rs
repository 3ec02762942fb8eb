//! Messages of the vhost-user protocol: bytes -> requests of the front end, answers -> bytes. No I/O.
//!
//! Numbers are in the machine's byte order, as the protocol says. Names are those of QEMU's docs/interop/vhost-user.rst.

use crate::memory::Place;
use crate::ring::Addresses;

pub(crate) const HEADER_BYTES: usize = 12;
/// No message that is known here is longer.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 1024;
const CONFIG_BYTES_MAX: usize = 256;
/// Regions that fit a memory table.
const TABLE_REGIONS_MAX: usize = 8;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const IS_REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// In messages that carry the eventfd of a ring: there is none.
const NO_FD: u64 = 1 << 8;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`
const CONFIG_CHANGE: u32 = 2;

/// Why a client is left: it sends what is no message, or none that was agreed upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    #[error("a header with flags {0:#x}")]
    Flags(u32),
    #[error("message {request} with {bytes} bytes")]
    Length { request: u32, bytes: u32 },
    #[error("message {0}, which is unknown or was not agreed upon")]
    Unknown(u32),
    #[error("message {request} with {descriptors} descriptors")]
    Descriptors { request: u32, descriptors: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub request: u32,
    pub needs_reply: bool,
    pub payload_bytes: usize,
}

impl Header {
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, BadMessage> {
        let word =
            |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let (request, flags, bytes) = (word(0), word(4), word(8));
        if flags & VERSION_MASK != VERSION || flags & IS_REPLY != 0 {
            return Err(BadMessage::Flags(flags));
        }
        if bytes as usize > PAYLOAD_BYTES_MAX {
            return Err(BadMessage::Length { request, bytes });
        }
        let needs_reply = flags & NEED_REPLY != 0;
        Ok(Self { request, needs_reply, payload_bytes: bytes as usize })
    }
}

/// Memory in which requests in flight are noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InflightPlace {
    pub bytes: u64,
    pub offset: u64,
    pub queues: u16,
    pub queue_size: u16,
    /// Whether the structure came with its padding; it goes back as it came.
    pub is_padded: bool,
}

/// What a front end asks for. Rings by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    /// A descriptor comes with each.
    SetMemTable(Vec<Place>),
    SetVringNum {
        ring: u32,
        size: u32,
    },
    SetVringAddr {
        ring: u32,
        addresses: Addresses,
    },
    SetVringBase {
        ring: u32,
        base: u32,
    },
    GetVringBase {
        ring: u32,
    },
    /// A descriptor comes with these three, unless `has_fd` is false.
    SetVringKick {
        ring: u32,
        has_fd: bool,
    },
    SetVringCall {
        ring: u32,
        has_fd: bool,
    },
    SetVringErr {
        ring: u32,
        has_fd: bool,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        ring: u32,
        is_enabled: bool,
    },
    /// A descriptor comes with it.
    SetBackendReqFd,
    GetConfig {
        offset: u32,
        bytes: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        data: Vec<u8>,
    },
    GetInflightFd(InflightPlace),
    /// A descriptor comes with it.
    SetInflightFd(InflightPlace),
    GetMaxMemSlots,
    /// A descriptor comes with it.
    AddMemReg(Place),
    /// A descriptor may come with it, which is of no use.
    RemMemReg(Place),
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_ne_bytes)
    }

    fn place(&mut self) -> Option<Place> {
        let (guest, bytes, user) = (self.u64()?, self.u64()?, self.u64()?);
        Some(Place { guest, bytes, user, offset: self.u64()? })
    }

    fn ring_and(&mut self) -> Option<(u32, u32)> {
        Some((self.u32()?, self.u32()?))
    }

    fn ring_with_fd(&mut self) -> Option<(u32, bool)> {
        let value = self.u64()?;
        Some(((value & 0xff) as u32, value & NO_FD == 0))
    }

    fn inflight(&mut self) -> Option<InflightPlace> {
        let (bytes, offset) = (self.u64()?, self.u64()?);
        let (queues, queue_size) = (self.u16()?, self.u16()?);
        // A C structure ends with padding, which some front ends send.
        let is_padded = self.bytes::<4>().is_some();
        Some(InflightPlace { bytes, offset, queues, queue_size, is_padded })
    }
}

impl Request {
    /// The request that a message of this number is.
    pub(crate) fn parse(request: u32, payload: &[u8]) -> Result<Self, BadMessage> {
        let wrong = BadMessage::Length { request, bytes: payload.len() as u32 };
        let mut reader = Reader(payload);
        let parsed = Self::read(request, &mut reader).ok_or(BadMessage::Unknown(request))?;
        let parsed = parsed.ok_or(wrong)?;
        // Front ends pad what has no payload; what has one has exactly that.
        let has_payload = !matches!(
            parsed,
            Self::GetFeatures
                | Self::SetOwner
                | Self::ResetOwner
                | Self::GetProtocolFeatures
                | Self::GetQueueNum
                | Self::SetBackendReqFd
                | Self::GetMaxMemSlots
        );
        if has_payload && !reader.0.is_empty() { Err(wrong) } else { Ok(parsed) }
    }

    /// `None`: no such message. `Some(None)`: its payload is too short or wrong.
    fn read(request: u32, reader: &mut Reader<'_>) -> Option<Option<Self>> {
        Some(match request {
            1 => Some(Self::GetFeatures),
            2 => reader.u64().map(Self::SetFeatures),
            3 => Some(Self::SetOwner),
            4 => Some(Self::ResetOwner),
            5 => read_table(reader).map(Self::SetMemTable),
            8 => reader.ring_and().map(|(ring, size)| Self::SetVringNum { ring, size }),
            9 => read_addresses(reader),
            10 => reader.ring_and().map(|(ring, base)| Self::SetVringBase { ring, base }),
            11 => reader.ring_and().map(|(ring, _)| Self::GetVringBase { ring }),
            12 => reader.ring_with_fd().map(|(ring, has_fd)| Self::SetVringKick { ring, has_fd }),
            13 => reader.ring_with_fd().map(|(ring, has_fd)| Self::SetVringCall { ring, has_fd }),
            14 => reader.ring_with_fd().map(|(ring, has_fd)| Self::SetVringErr { ring, has_fd }),
            15 => Some(Self::GetProtocolFeatures),
            16 => reader.u64().map(Self::SetProtocolFeatures),
            17 => Some(Self::GetQueueNum),
            18 => reader
                .ring_and()
                .map(|(ring, enabled)| Self::SetVringEnable { ring, is_enabled: enabled != 0 }),
            21 => Some(Self::SetBackendReqFd),
            24 => read_config(reader).map(|(offset, flags, data)| Self::GetConfig {
                offset,
                bytes: data.len() as u32,
                flags,
            }),
            25 => read_config(reader).map(|(offset, _, data)| Self::SetConfig { offset, data }),
            31 => reader.inflight().map(Self::GetInflightFd),
            32 => reader.inflight().map(Self::SetInflightFd),
            36 => Some(Self::GetMaxMemSlots),
            37 => read_region(reader).map(Self::AddMemReg),
            38 => read_region(reader).map(Self::RemMemReg),
            _ => return None,
        })
    }

    /// The fewest and the most descriptors that come with it.
    pub(crate) fn descriptors(&self) -> (usize, usize) {
        match self {
            Self::SetMemTable(places) => (places.len(), places.len()),
            Self::SetVringKick { has_fd, .. }
            | Self::SetVringCall { has_fd, .. }
            | Self::SetVringErr { has_fd, .. } => ((*has_fd).into(), (*has_fd).into()),
            Self::SetBackendReqFd | Self::SetInflightFd(_) | Self::AddMemReg(_) => (1, 1),
            Self::RemMemReg(_) => (0, 1),
            Self::GetFeatures
            | Self::SetFeatures(_)
            | Self::SetOwner
            | Self::ResetOwner
            | Self::SetVringNum { .. }
            | Self::SetVringAddr { .. }
            | Self::SetVringBase { .. }
            | Self::GetVringBase { .. }
            | Self::GetProtocolFeatures
            | Self::SetProtocolFeatures(_)
            | Self::GetQueueNum
            | Self::SetVringEnable { .. }
            | Self::GetConfig { .. }
            | Self::SetConfig { .. }
            | Self::GetInflightFd(_)
            | Self::GetMaxMemSlots => (0, 0),
        }
    }
}

fn read_table(reader: &mut Reader<'_>) -> Option<Vec<Place>> {
    let (count, _padding) = (reader.u32()? as usize, reader.u32()?);
    if count > TABLE_REGIONS_MAX {
        return None;
    }
    let places = (0..count).map(|_| reader.place()).collect();
    // Some front ends send room for all regions, however few there are.
    reader.0 = &[];
    places
}

fn read_region(reader: &mut Reader<'_>) -> Option<Place> {
    let _padding = reader.u64()?;
    reader.place()
}

fn read_addresses(reader: &mut Reader<'_>) -> Option<Request> {
    let (ring, _flags) = reader.ring_and()?;
    let (descriptors, device, driver) = (reader.u64()?, reader.u64()?, reader.u64()?);
    let _log = reader.u64()?;
    Some(Request::SetVringAddr { ring, addresses: Addresses { descriptors, driver, device } })
}

fn read_config(reader: &mut Reader<'_>) -> Option<(u32, u32, Vec<u8>)> {
    let (offset, bytes, flags) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let data = std::mem::take(&mut reader.0);
    let is_whole = data.len() == bytes as usize && data.len() <= CONFIG_BYTES_MAX;
    is_whole.then(|| (offset, flags, data.to_vec()))
}

/// What the back end answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Number(u64),
    VringBase {
        ring: u32,
        base: u32,
    },
    /// Empty: refused.
    Config {
        offset: u32,
        flags: u32,
        data: Vec<u8>,
    },
    /// A descriptor goes with it, unless no bytes are given.
    Inflight(InflightPlace),
}

impl Answer {
    /// The message that answers request number `request`.
    pub(crate) fn message(&self, request: u32) -> Vec<u8> {
        let mut message = begin(request, VERSION | IS_REPLY);
        match self {
            Self::Number(number) => message.extend(number.to_ne_bytes()),
            Self::VringBase { ring, base } => {
                message.extend(ring.to_ne_bytes());
                message.extend(base.to_ne_bytes());
            }
            Self::Config { offset, flags, data } => {
                // A refusal has no payload at all.
                if !data.is_empty() {
                    for word in [*offset, data.len() as u32, *flags] {
                        message.extend(word.to_ne_bytes());
                    }
                    message.extend(data);
                }
            }
            Self::Inflight(place) => {
                message.extend(place.bytes.to_ne_bytes());
                message.extend(place.offset.to_ne_bytes());
                message.extend(place.queues.to_ne_bytes());
                message.extend(place.queue_size.to_ne_bytes());
                message.extend(&[0; 4][..if place.is_padded { 4 } else { 0 }]);
            }
        }
        end(message)
    }
}

/// The message, on the back end's own channel, that the configuration has changed.
pub(crate) fn config_change() -> Vec<u8> {
    end(begin(CONFIG_CHANGE, VERSION))
}

fn begin(request: u32, flags: u32) -> Vec<u8> {
    let mut message = Vec::with_capacity(64);
    message.extend(request.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message
}

fn end(mut message: Vec<u8>) -> Vec<u8> {
    let payload_bytes = (message.len() - HEADER_BYTES) as u32;
    message[8..HEADER_BYTES].copy_from_slice(&payload_bytes.to_ne_bytes());
    message
}
