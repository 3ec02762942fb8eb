//! Requests as bytes (doc/proto.md, "Transmission phase").

const MAGIC: u32 = 0x2560_9513;
const EXTENDED_MAGIC: u32 = 0x21e4_1c71;
/// Bytes of a request before its payload; of extended headers four more.
pub(crate) const REQUEST_BYTES: usize = 28;
pub(crate) const EXTENDED_REQUEST_BYTES: usize = 32;

bitflags::bitflags! {
    /// "Command flags".
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct CommandFlags: u16 {
        const FUA = 1 << 0;
        const NO_HOLE = 1 << 1;
        const DF = 1 << 2;
        const REQ_ONE = 1 << 3;
        const FAST_ZERO = 1 << 4;
        const PAYLOAD_LEN = 1 << 5;
        // What is not known is refused, not forgotten.
        const _ = !0;
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    Unknown(u16),
}

impl Command {
    fn of(kind: u16) -> Self {
        match kind {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Disconnect,
            3 => Self::Flush,
            4 => Self::Trim,
            5 => Self::Cache,
            6 => Self::WriteZeroes,
            7 => Self::BlockStatus,
            kind => Self::Unknown(kind),
        }
    }

    /// The flags that mean something with it.
    fn flags(self) -> CommandFlags {
        match self {
            Self::Read => CommandFlags::DF,
            Self::Write => CommandFlags::FUA | CommandFlags::PAYLOAD_LEN,
            Self::Trim => CommandFlags::FUA,
            Self::WriteZeroes => {
                CommandFlags::FUA | CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO
            }
            Self::BlockStatus => CommandFlags::REQ_ONE,
            Self::Flush | Self::Disconnect | Self::Cache | Self::Unknown(_) => {
                CommandFlags::empty()
            }
        }
        // Clients set it on everything when they are told to write through (proto.md, "NBD_FLAG_SEND_FUA").
        .union(CommandFlags::FUA)
    }
}

/// A request; its payload, of a write, follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) command: Command,
    pub(crate) flags: CommandFlags,
    /// Chosen by the client, and given back.
    pub(crate) cookie: u64,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

/// Bytes that are no request; nothing behind them can be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request begins with {magic:#010x}")]
pub(crate) struct NotARequest {
    magic: u32,
}

impl Request {
    /// Reads a head of [`REQUEST_BYTES`] or [`EXTENDED_REQUEST_BYTES`].
    pub(crate) fn parse(head: &[u8], is_extended: bool) -> Result<Self, NotARequest> {
        let u16_at = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let u32_at = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        let magic = u32_at(0);
        if magic != if is_extended { EXTENDED_MAGIC } else { MAGIC } {
            return Err(NotARequest { magic });
        }
        Ok(Self {
            flags: CommandFlags::from_bits_retain(u16_at(4)),
            command: Command::of(u16_at(6)),
            cookie: u64_at(8),
            at: u64_at(16),
            bytes: if is_extended { u64_at(24) } else { u64::from(u32_at(24)) },
        })
    }

    /// Bytes that follow it.
    pub(crate) fn payload_bytes(&self, is_extended: bool) -> u64 {
        let announced = is_extended && self.flags.contains(CommandFlags::PAYLOAD_LEN);
        match self.command {
            Command::Write => self.bytes,
            // Nobody may announce one that has none; whatever it is, it is there.
            _ if announced => self.bytes,
            _ => 0,
        }
    }

    /// That it has no flag which means nothing with it.
    pub(crate) fn has_sound_flags(&self) -> bool {
        self.command.flags().contains(self.flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A write of 4 KiB at 1 MiB with FUA, byte by byte as the specification has it.
    #[test]
    fn requests_are_read_as_specified() {
        let head = [
            &[0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1][..],
            &[1, 2, 3, 4, 5, 6, 7, 8],
            &[0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0x10, 0],
        ]
        .concat();
        let request = Request::parse(&head, false).expect("a request");
        let expected = Request {
            command: Command::Write,
            flags: CommandFlags::FUA,
            cookie: 0x0102_0304_0506_0708,
            at: 1 << 20,
            bytes: 4096,
        };
        assert_eq!(request, expected);
        assert_eq!(request.payload_bytes(false), 4096);
        let extended =
            [&[0x21, 0xe4, 0x1c, 0x71][..], &head[4..24], &[0, 0, 0, 1, 0, 0, 0, 0]].concat();
        let request = Request::parse(&extended, true).expect("a request");
        assert_eq!(request.bytes, 1 << 32);
        assert_eq!(
            Request::parse(&extended, false),
            Err(NotARequest { magic: EXTENDED_MAGIC }),
            "only after it was negotiated"
        );
    }

    #[test]
    fn flags_that_mean_nothing_are_unsound() {
        let request = |command, flags| Request { command, flags, cookie: 0, at: 0, bytes: 0 };
        assert!(request(Command::Read, CommandFlags::DF).has_sound_flags());
        assert!(!request(Command::Read, CommandFlags::NO_HOLE).has_sound_flags());
        assert!(request(Command::Flush, CommandFlags::FUA).has_sound_flags());
        let unknown = CommandFlags::from_bits_retain(1 << 14);
        assert!(!request(Command::Write, unknown).has_sound_flags());
    }
}
