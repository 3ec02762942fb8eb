//! Protocol data units, by which TCP carries commands, data and completions (TCP, 3.6).
//!
//! One is received in three steps: its [`Common`] header says how long the rest of the header is, [`Common::pdu`] says what that means,
//! and [`Common::data_bytes`] how much data follows.

use crate::completion::COMPLETION_BYTES;
use crate::field::{array, put, u16_at, u32_at};
use crate::{COMMAND_BYTES, Command, Completion};
use levada_base::checksum::{crc32c, crc32c_parts};
use levada_base::stream::Head;

/// Bytes of a header that all have.
pub const COMMON_BYTES: usize = 8;
/// Bytes of a digest, of a header or of data.
pub const DIGEST_BYTES: usize = 4;
/// Bytes of any header with its digest, at most.
pub const HEADER_BYTES_MAX: usize = INITIALIZE_BYTES + DIGEST_BYTES;
/// Where data may begin, at most: alignment to 128 bytes.
const DATA_OFFSET_UNIT: usize = 4;

const INITIALIZE_BYTES: usize = 128;
const TERMINATE_BYTES: usize = 24;
/// No data begin later in a unit: a header with its digest has 76 bytes at most, and is followed by less than as many, or by none up to
/// the 128 bytes that data may be aligned to.
pub const HEAD_BYTES_MAX: usize = 152;
/// An answer with the digest of its header.
pub const RESPONSE_BYTES_MAX: usize = COMMON_BYTES + COMPLETION_BYTES + DIGEST_BYTES;
/// Data behind a terminating header: the header that was wrong.
const TERMINATE_DATA_BYTES_MAX: usize = 128;
const TRANSFER_BYTES: usize = 24;

/// What a unit is; the number is its type on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    InitializeRequest = 0x00,
    InitializeResponse = 0x01,
    HostTerminates = 0x02,
    ControllerTerminates = 0x03,
    Command = 0x04,
    Response = 0x05,
    HostData = 0x06,
    ControllerData = 0x07,
    ReadyToTransfer = 0x09,
}

impl Kind {
    fn of(code: u8) -> Option<Self> {
        Some(match code {
            0x00 => Self::InitializeRequest,
            0x01 => Self::InitializeResponse,
            0x02 => Self::HostTerminates,
            0x03 => Self::ControllerTerminates,
            0x04 => Self::Command,
            0x05 => Self::Response,
            0x06 => Self::HostData,
            0x07 => Self::ControllerData,
            0x09 => Self::ReadyToTransfer,
            _ => return None,
        })
    }

    fn header_bytes(self) -> usize {
        match self {
            Self::InitializeRequest | Self::InitializeResponse => INITIALIZE_BYTES,
            Self::HostTerminates | Self::ControllerTerminates => TERMINATE_BYTES,
            Self::Command => COMMON_BYTES + COMMAND_BYTES,
            Self::Response => COMMON_BYTES + COMPLETION_BYTES,
            Self::HostData | Self::ControllerData | Self::ReadyToTransfer => TRANSFER_BYTES,
        }
    }

    /// The connection begins or ends with it: there are no digests.
    fn is_bare(self) -> bool {
        match self {
            Self::InitializeRequest
            | Self::InitializeResponse
            | Self::HostTerminates
            | Self::ControllerTerminates => true,
            Self::Command
            | Self::Response
            | Self::HostData
            | Self::ControllerData
            | Self::ReadyToTransfer => false,
        }
    }

    fn may_have_data(self) -> bool {
        match self {
            Self::HostTerminates
            | Self::ControllerTerminates
            | Self::Command
            | Self::HostData
            | Self::ControllerData => true,
            Self::InitializeRequest
            | Self::InitializeResponse
            | Self::Response
            | Self::ReadyToTransfer => false,
        }
    }

    /// A host sends it.
    #[must_use]
    pub fn is_of_host(self) -> bool {
        match self {
            Self::InitializeRequest | Self::HostTerminates | Self::Command | Self::HostData => true,
            Self::InitializeResponse
            | Self::ControllerTerminates
            | Self::Response
            | Self::ControllerData
            | Self::ReadyToTransfer => false,
        }
    }
}

bitflags::bitflags! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Flags: u8 {
        const HEADER_DIGEST = 1 << 0;
        const DATA_DIGEST = 1 << 1;
        /// The last of the data that were asked for, or of the command's.
        const LAST = 1 << 2;
        /// The command went well, and has no completion of its own.
        const SUCCESS = 1 << 3;
        const _ = !0;
    }
}

/// Which parts of units have digests on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    pub header: bool,
    pub data: bool,
}

impl Digests {
    fn parse(byte: u8) -> Self {
        Self { header: byte & 1 != 0, data: byte & 2 != 0 }
    }

    fn byte(self) -> u8 {
        u8::from(self.header) | u8::from(self.data) << 1
    }

    /// What both sides have.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { header: self.header && other.header, data: self.data && other.data }
    }
}

/// Why a connection must end (TCP, 3.6.2.2 and 3.6.2.3: fatal error status).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fatal {
    /// At the header's byte `at`.
    #[error("a field of a header is wrong, at byte {at}")]
    Field { at: u32 },
    /// A unit where none of its kind is expected.
    #[error("a unit is out of sequence")]
    Sequence,
    #[error("the digest of a header is {was:#010x}, and {is:#010x} of what arrived")]
    HeaderDigest { was: u32, is: u32 },
    #[error("data are outside of what was asked for")]
    OutOfRange,
    #[error("more data, or more requests for them, than agreed")]
    LimitExceeded,
    #[error("a parameter is not supported, at byte {at}")]
    Unsupported { at: u32 },
}

impl Fatal {
    fn code(self) -> u16 {
        match self {
            Self::Field { .. } => 0x01,
            Self::Sequence => 0x02,
            Self::HeaderDigest { .. } => 0x03,
            Self::OutOfRange => 0x04,
            Self::LimitExceeded => 0x05,
            Self::Unsupported { .. } => 0x06,
        }
    }

    fn information(self) -> u32 {
        match self {
            Self::Field { at } | Self::Unsupported { at } => at,
            Self::HeaderDigest { was, .. } => was,
            Self::Sequence | Self::OutOfRange | Self::LimitExceeded => 0,
        }
    }
}

/// What the other side said when it ended the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other side ended the connection: {}, {information:#x}", told(*status))]
pub struct Terminated {
    pub status: u16,
    pub information: u32,
}

fn told(status: u16) -> &'static str {
    match status {
        0x01 => "invalid header field",
        0x02 => "unit out of sequence",
        0x03 => "header digest error",
        0x04 => "data transfer out of range",
        0x05 => "limit exceeded",
        0x06 => "unsupported parameter",
        _ => "for a reason of its own",
    }
}

/// What every header begins with (TCP, 3.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Common {
    pub kind: Kind,
    flags: Flags,
    data_offset: usize,
    bytes: usize,
    bare: [u8; COMMON_BYTES],
}

impl Common {
    /// # Errors
    ///
    /// [`Fatal::Field`]: nothing that follows can be told apart.
    #[inline]
    pub fn parse(bytes: &[u8; COMMON_BYTES]) -> Result<Self, Fatal> {
        let kind = Kind::of(bytes[0]).ok_or(Fatal::Field { at: 0 })?;
        if usize::from(bytes[2]) != kind.header_bytes() {
            return Err(Fatal::Field { at: 2 });
        }
        Ok(Self {
            kind,
            flags: Flags::from_bits_retain(bytes[1]),
            data_offset: usize::from(bytes[3]),
            bytes: u32_at(bytes, 4) as usize,
            bare: *bytes,
        })
    }

    fn has_header_digest(&self, digests: Digests) -> bool {
        digests.header && !self.kind.is_bare()
    }

    /// Bytes of the header that follow, with their digest.
    #[must_use]
    pub fn rest_bytes(&self, digests: Digests) -> usize {
        let digest = if self.has_header_digest(digests) { DIGEST_BYTES } else { 0 };
        self.kind.header_bytes() - COMMON_BYTES + digest
    }

    /// Bytes between the header and the data, which say nothing, and bytes of data; a digest follows those where
    /// [`Common::has_data_digest`] says so.
    ///
    /// # Errors
    ///
    /// [`Fatal::Field`].
    #[inline]
    pub fn data_bytes(&self, digests: Digests) -> Result<(usize, usize), Fatal> {
        const LENGTH: Fatal = Fatal::Field { at: 4 };
        let header = COMMON_BYTES + self.rest_bytes(digests);
        if self.bytes == header {
            return Ok((0, 0));
        }
        if !self.kind.may_have_data() {
            return Err(LENGTH);
        }
        if self.kind.is_bare() {
            let data = self.bytes.checked_sub(header).ok_or(LENGTH)?;
            return if data <= TERMINATE_DATA_BYTES_MAX { Ok((0, data)) } else { Err(LENGTH) };
        }
        let padding = self.data_offset.checked_sub(header).ok_or(Fatal::Field { at: 3 })?;
        let digest = if digests.data { DIGEST_BYTES } else { 0 };
        let data = self.bytes.checked_sub(self.data_offset + digest).ok_or(LENGTH)?;
        if data == 0 { Err(LENGTH) } else { Ok((padding, data)) }
    }

    /// The data, if there are any, are followed by their digest.
    #[must_use]
    pub fn has_data_digest(&self, digests: Digests) -> bool {
        digests.data && !self.kind.is_bare()
    }

    /// What the unit is; `rest` is its header's [`Common::rest_bytes`].
    ///
    /// # Errors
    ///
    /// [`Fatal`]; a wrong digest too, as then nobody knows whom it was about.
    #[inline]
    pub fn pdu(&self, rest: &[u8], digests: Digests) -> Result<Pdu, Fatal> {
        let (rest, digest) = rest.split_at(self.kind.header_bytes() - COMMON_BYTES);
        if self.has_header_digest(digests) {
            let (was, is) = (u32_at(digest, 0), crc32c_parts([&self.bare[..], rest]));
            if was != is {
                return Err(Fatal::HeaderDigest { was, is });
            }
        }
        // Places are those of the whole header.
        let u16_of = |at: usize| u16_at(rest, at - COMMON_BYTES);
        let u32_of = |at: usize| u32_at(rest, at - COMMON_BYTES);
        let transfer =
            || Transfer { command: u16_of(8), tag: u16_of(10), at: u32_of(12), bytes: u32_of(16) };
        let initialize = || -> Result<Initialize, Fatal> {
            if u16_of(8) != 0 {
                return Err(Fatal::Unsupported { at: 8 });
            }
            let alignment = rest[10 - COMMON_BYTES];
            // 0's based, in units of four bytes.
            let alignment_bytes = (usize::from(alignment) + 1) * DATA_OFFSET_UNIT;
            if alignment > 31 {
                return Err(Fatal::Field { at: 10 });
            }
            let digests = Digests::parse(rest[11 - COMMON_BYTES]);
            Ok(Initialize { alignment_bytes, digests, limit: u32_of(12) })
        };
        let is_last = self.flags.contains(Flags::LAST);
        Ok(match self.kind {
            Kind::InitializeRequest => Pdu::InitializeRequest(initialize()?),
            Kind::InitializeResponse => Pdu::InitializeResponse(initialize()?),
            Kind::HostTerminates | Kind::ControllerTerminates => {
                // Not aligned to four bytes.
                Pdu::Terminates(Terminated { status: u16_of(8), information: u32_of(10) })
            }
            Kind::Command => Pdu::Command(Command::parse(&array(rest, 0))),
            Kind::Response => Pdu::Response(Completion::parse(&array(rest, 0))),
            Kind::HostData => Pdu::HostData { transfer: transfer(), is_last },
            Kind::ControllerData => {
                let is_success = self.flags.contains(Flags::SUCCESS);
                Pdu::ControllerData { transfer: transfer(), is_last, is_success }
            }
            Kind::ReadyToTransfer => Pdu::ReadyToTransfer(transfer()),
        })
    }
}

/// What one side needs of the other, told before anything else (TCP, 3.6.2.1 and 3.6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initialize {
    /// Data that are sent to it begin at multiples of this in their unit; 4 to 128.
    pub alignment_bytes: usize,
    /// Those it can do, or those that are agreed.
    pub digests: Digests,
    /// Of a host: requests for data of a command that may be open, less one. Of a controller: data of one unit, in bytes.
    pub limit: u32,
}

/// Data, or a request for them (TCP, 3.6.2.5 and on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The identifier of the command they belong to.
    pub command: u16,
    /// Given by the controller with a request, and sent back with the data.
    pub tag: u16,
    /// Within the data of the command.
    pub at: u32,
    pub bytes: u32,
}

/// A unit, without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "commands are most of them")]
pub enum Pdu {
    InitializeRequest(Initialize),
    InitializeResponse(Initialize),
    Terminates(Terminated),
    Command(Command),
    Response(Completion),
    HostData { transfer: Transfer, is_last: bool },
    ControllerData { transfer: Transfer, is_last: bool, is_success: bool },
    ReadyToTransfer(Transfer),
}

/// How units are built on a connection, as agreed at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framing {
    pub digests: Digests,
    /// Of the side they are sent to.
    pub alignment_bytes: usize,
}

impl Framing {
    /// As the first unit is built.
    pub const FIRST: Self =
        Self { digests: Digests { header: false, data: false }, alignment_bytes: DATA_OFFSET_UNIT };

    /// A unit up to its data, of which there are `data_bytes`, and which the caller lets follow; then their digest, where there is one.
    /// Bare units have no data here: see [`Framing::terminate`].
    #[must_use]
    #[inline]
    pub fn head(self, pdu: &Pdu, data_bytes: usize) -> Head {
        Head::from_slice(self.head_in(&mut [0; HEAD_BYTES_MAX], pdu, data_bytes))
    }

    /// The same at the beginning of `place`, which is all zeroes: moving a [`Head`] is a tenth of what a small answer costs.
    ///
    /// # Panics
    ///
    /// When it has no room there; it has in [`HEAD_BYTES_MAX`], and an answer in [`RESPONSE_BYTES_MAX`].
    #[must_use]
    #[inline]
    pub fn head_in<'a>(self, place: &'a mut [u8], pdu: &Pdu, data_bytes: usize) -> &'a [u8] {
        let (kind, flags) = kind_of(pdu);
        debug_assert!(data_bytes == 0 || kind.may_have_data() && !kind.is_bare());
        let has_digest = self.digests.header && !kind.is_bare();
        let header = kind.header_bytes() + if has_digest { DIGEST_BYTES } else { 0 };
        let (data_offset, bytes) = match data_bytes {
            0 => (0, header),
            _ => {
                let data_offset = header.next_multiple_of(self.alignment_bytes);
                let digest = if self.digests.data { DIGEST_BYTES } else { 0 };
                (data_offset, data_offset + data_bytes + digest)
            }
        };
        debug_assert!(place.iter().all(|byte| *byte == 0));
        place[0] = kind as u8;
        place[1] = self.flags(kind, data_bytes).union(flags).bits();
        place[2] = kind.header_bytes() as u8;
        place[3] = data_offset as u8;
        let bytes = u32::try_from(bytes).expect("a unit of less than 4 GiB");
        put(place, 4, &bytes.to_le_bytes());
        put_rest(place, pdu);
        if has_digest {
            let digest = crc32c(&place[..kind.header_bytes()]);
            put(place, kind.header_bytes(), &digest.to_le_bytes());
        }
        &place[..data_offset.max(header)]
    }

    fn flags(self, kind: Kind, data_bytes: usize) -> Flags {
        let mut flags = Flags::empty();
        if !kind.is_bare() {
            flags.set(Flags::HEADER_DIGEST, self.digests.header);
            flags.set(Flags::DATA_DIGEST, self.digests.data && data_bytes > 0);
        }
        flags
    }

    /// The end of a connection, as the controller or the host tells it, because of the header of which `wrong` is what there is.
    #[must_use]
    pub fn terminate(is_host: bool, fatal: Fatal, wrong: &[u8]) -> Head {
        let kind = if is_host { Kind::HostTerminates } else { Kind::ControllerTerminates };
        let wrong = &wrong[..wrong.len().min(TERMINATE_DATA_BYTES_MAX)];
        let mut head = Head::from_slice(&[0; TERMINATE_BYTES]);
        head[0] = kind as u8;
        head[2] = TERMINATE_BYTES as u8;
        let bytes = (TERMINATE_BYTES + wrong.len()) as u32;
        put(&mut head, 4, &bytes.to_le_bytes());
        put(&mut head, 8, &fatal.code().to_le_bytes());
        put(&mut head, 10, &fatal.information().to_le_bytes());
        head.extend_from_slice(wrong);
        head
    }
}

#[inline]
fn kind_of(pdu: &Pdu) -> (Kind, Flags) {
    let mut flags = Flags::empty();
    let kind = match pdu {
        Pdu::InitializeRequest(_) => Kind::InitializeRequest,
        Pdu::InitializeResponse(_) => Kind::InitializeResponse,
        Pdu::Terminates(_) => Kind::HostTerminates,
        Pdu::Command(_) => Kind::Command,
        Pdu::Response(_) => Kind::Response,
        Pdu::HostData { is_last, .. } => {
            flags.set(Flags::LAST, *is_last);
            Kind::HostData
        }
        Pdu::ControllerData { is_last, is_success, .. } => {
            flags.set(Flags::LAST, *is_last);
            flags.set(Flags::SUCCESS, *is_success);
            Kind::ControllerData
        }
        Pdu::ReadyToTransfer(_) => Kind::ReadyToTransfer,
    };
    (kind, flags)
}

/// Puts what follows the common header.
#[inline]
fn put_rest(head: &mut [u8], pdu: &Pdu) {
    match pdu {
        Pdu::InitializeRequest(initialize) | Pdu::InitializeResponse(initialize) => {
            head[10] = (initialize.alignment_bytes / DATA_OFFSET_UNIT - 1) as u8;
            head[11] = initialize.digests.byte();
            put(head, 12, &initialize.limit.to_le_bytes());
        }
        Pdu::Terminates(terminated) => {
            put(head, 8, &terminated.status.to_le_bytes());
            put(head, 10, &terminated.information.to_le_bytes());
        }
        Pdu::Command(command) => put(head, COMMON_BYTES, command.as_bytes()),
        Pdu::Response(completion) => put(head, COMMON_BYTES, &completion.to_bytes()),
        Pdu::HostData { transfer, .. }
        | Pdu::ControllerData { transfer, .. }
        | Pdu::ReadyToTransfer(transfer) => {
            put(head, 8, &transfer.command.to_le_bytes());
            put(head, 10, &transfer.tag.to_le_bytes());
            put(head, 12, &transfer.at.to_le_bytes());
            put(head, 16, &transfer.bytes.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_reads_as_what_was_built_wherever_data_are_to_begin() {
        let transfer = Transfer { command: 7, tag: 3, at: 4096, bytes: 512 };
        let pdus = [
            Pdu::Command(Command::new(1, 9, 1)),
            Pdu::HostData { transfer, is_last: true },
            Pdu::ControllerData { transfer, is_last: true, is_success: false },
        ];
        for alignment_bytes in (4..=128).step_by(DATA_OFFSET_UNIT) {
            for (header, data) in [(false, false), (true, false), (false, true), (true, true)] {
                let digests = Digests { header, data };
                let framing = Framing { digests, alignment_bytes };
                for pdu in pdus {
                    let head = framing.head(&pdu, 512);
                    let (first, rest) = head.split_first_chunk().expect("a header");
                    let common = Common::parse(first).expect("ours");
                    let rest_bytes = common.rest_bytes(digests);
                    assert_eq!(common.pdu(&rest[..rest_bytes], digests), Ok(pdu));
                    let padding = rest.len() - rest_bytes;
                    assert_eq!(common.data_bytes(digests), Ok((padding, 512)));
                    assert!(head.len().is_multiple_of(alignment_bytes) && !head.spilled());
                }
            }
        }
    }

    #[test]
    fn an_answer_has_room_in_what_is_said_to_be_enough() {
        let completion = Completion {
            result: u64::MAX,
            queue_head: 5,
            id: 9,
            status: crate::Status::ABORTED,
            has_more: true,
        };
        for header in [false, true] {
            let digests = Digests { header, data: true };
            let framing = Framing { digests, alignment_bytes: 128 };
            let (pdu, mut place) = (Pdu::Response(completion), [0; RESPONSE_BYTES_MAX]);
            assert_eq!(framing.head_in(&mut place, &pdu, 0), &framing.head(&pdu, 0)[..]);
        }
    }
}
