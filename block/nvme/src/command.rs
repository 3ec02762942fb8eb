//! An entry of a submission queue (Base, 4.2).

use crate::field::{array, put, u16_at, u32_at, u64_at};

pub const COMMAND_BYTES: usize = 64;

/// Where a command's data are, as TCP knows it (Fabrics, 2.3.1; TCP, 3.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPointer {
    /// Behind the command, from `offset` on.
    InCapsule { offset: u64, bytes: u32 },
    /// With the host, which is asked for them, or is sent them.
    Transport { bytes: u32 },
    /// Neither, which TCP does not have: its descriptor's type.
    Other { kind: u8 },
}

/// Data block, offset.
const IN_CAPSULE: u8 = 0x01;
/// Transport data block, transport specific.
const TRANSPORT: u8 = 0x5a;
/// An SGL is used, and that is all that there is to say of metadata.
const SGL: u8 = 1 << 6;

impl DataPointer {
    /// Of data, wherever they are.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            Self::InCapsule { bytes, .. } | Self::Transport { bytes } => bytes,
            Self::Other { .. } => 0,
        }
    }
}

/// A command. Its fields are where the specification has them; what they mean depends on the opcode.
///
/// Aligned, so that it is copied in whole words: what was just written in others would have to be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(8))]
pub struct Command {
    bytes: [u8; COMMAND_BYTES],
}

macro_rules! opcodes {
    ($(#[$meta:meta])* $type:ident { $($(#[$variant_meta:meta])* $name:ident = $code:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $type {
            $($(#[$variant_meta])* $name = $code,)*
        }

        impl $type {
            /// What there is.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            #[must_use]
            pub const fn of(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    /// Commands of an admin queue (Base, figure 139) that are known here.
    AdminOpcode {
        GetLogPage = 0x02,
        Identify = 0x06,
        Abort = 0x08,
        SetFeatures = 0x09,
        GetFeatures = 0x0a,
        AsynchronousEventRequest = 0x0c,
        KeepAlive = 0x18,
        /// Any of `fabrics`; of an I/O queue as well.
        Fabrics = 0x7f,
    }
}

opcodes! {
    /// Commands of an I/O queue (Base, figure 346) that are known here.
    IoOpcode {
        Flush = 0x00,
        Write = 0x01,
        Read = 0x02,
        Compare = 0x05,
        WriteZeroes = 0x08,
        DatasetManagement = 0x09,
        ReservationRegister = 0x0d,
        ReservationReport = 0x0e,
        ReservationAcquire = 0x11,
        ReservationRelease = 0x15,
        Fabrics = 0x7f,
    }
}

opcodes! {
    /// What Set Features and Get Features are about (Base, figure 271).
    Feature {
        Arbitration = 0x01,
        PowerManagement = 0x02,
        TemperatureThreshold = 0x04,
        ErrorRecovery = 0x05,
        VolatileWriteCache = 0x06,
        NumberOfQueues = 0x07,
        WriteAtomicity = 0x0a,
        AsynchronousEvents = 0x0b,
        KeepAliveTimer = 0x0f,
        HostIdentifier = 0x81,
        ReservationNotificationMask = 0x82,
        ReservationPersistence = 0x83,
    }
}

/// Force unit access, of doubleword 12.
const FUA: u32 = 1 << 30;
/// The room of the blocks may be given back, of Write Zeroes' doubleword 12.
const DEALLOCATE: u32 = 1 << 25;

impl Command {
    /// One without data; the rest of it is set by who builds it.
    #[must_use]
    pub fn new(opcode: u8, id: u16, namespace: u32) -> Self {
        let mut bytes = [0; COMMAND_BYTES];
        bytes[0] = opcode;
        put(&mut bytes, 2, &id.to_le_bytes());
        put(&mut bytes, 4, &namespace.to_le_bytes());
        Self { bytes }.with_data(DataPointer::Transport { bytes: 0 })
    }

    #[must_use]
    #[inline]
    pub fn parse(bytes: &[u8; COMMAND_BYTES]) -> Self {
        Self { bytes: *bytes }
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8; COMMAND_BYTES] {
        &self.bytes
    }

    #[must_use]
    #[inline]
    pub fn opcode(&self) -> u8 {
        self.bytes[0]
    }

    /// Is one half of a fused pair.
    #[must_use]
    #[inline]
    pub fn is_fused(&self) -> bool {
        self.bytes[1] & 0b11 != 0
    }

    /// Says by an SGL where its data are, which over Fabrics is the only way (PSDT: 01b or 10b).
    #[must_use]
    #[inline]
    pub fn has_sgl(&self) -> bool {
        matches!(self.bytes[1] >> 6, 0b01 | 0b10)
    }

    #[must_use]
    #[inline]
    pub fn id(&self) -> u16 {
        u16_at(&self.bytes, 2)
    }

    #[must_use]
    #[inline]
    pub fn namespace(&self) -> u32 {
        u32_at(&self.bytes, 4)
    }

    /// The type of a command of Fabrics.
    #[must_use]
    pub fn fabrics_type(&self) -> u8 {
        self.bytes[4]
    }

    #[must_use]
    #[inline]
    pub fn data(&self) -> DataPointer {
        let bytes = u32_at(&self.bytes, 32);
        match self.bytes[39] {
            IN_CAPSULE => DataPointer::InCapsule { offset: u64_at(&self.bytes, 24), bytes },
            TRANSPORT => DataPointer::Transport { bytes },
            kind => DataPointer::Other { kind },
        }
    }

    /// Doubleword `number`, of 10 to 15.
    #[must_use]
    pub fn dword(&self, number: usize) -> u32 {
        u32_at(&self.bytes, number * 4)
    }

    /// Doublewords 10 and 11: of most commands of an I/O queue the first block.
    #[must_use]
    #[inline]
    pub fn first_block(&self) -> u64 {
        u64_at(&self.bytes, 40)
    }

    /// Of Read, Write, Compare and Write Zeroes.
    #[must_use]
    #[inline]
    pub fn blocks(&self) -> u64 {
        u64::from(u16_at(&self.bytes, 48)) + 1
    }

    #[must_use]
    pub fn is_fua(&self) -> bool {
        self.dword(12) & FUA != 0
    }

    /// Of Write Zeroes.
    #[must_use]
    pub fn is_deallocating(&self) -> bool {
        self.dword(12) & DEALLOCATE != 0
    }

    /// What a command of Fabrics has at `at`, of 40 to 63.
    pub(crate) fn part<const N: usize>(&self, at: usize) -> [u8; N] {
        array(&self.bytes, at)
    }

    pub(crate) fn with_part(mut self, at: usize, bytes: &[u8]) -> Self {
        put(&mut self.bytes, at, bytes);
        self
    }

    /// The same, as another one of its queue.
    #[must_use]
    pub fn with_id(self, id: u16) -> Self {
        self.with_part(2, &id.to_le_bytes())
    }

    #[must_use]
    pub fn with_data(mut self, data: DataPointer) -> Self {
        self.bytes[1] = SGL;
        let (kind, offset, bytes) = match data {
            DataPointer::InCapsule { offset, bytes } => (IN_CAPSULE, offset, bytes),
            DataPointer::Transport { bytes } => (TRANSPORT, 0, bytes),
            DataPointer::Other { kind } => (kind, 0, 0),
        };
        put(&mut self.bytes, 24, &offset.to_le_bytes());
        put(&mut self.bytes, 32, &bytes.to_le_bytes());
        self.bytes[39] = kind;
        self
    }

    #[must_use]
    pub fn with_dword(self, number: usize, value: u32) -> Self {
        self.with_part(number * 4, &value.to_le_bytes())
    }

    /// Of Read, Write, Compare and Write Zeroes: `blocks` is 1 to 65,536.
    #[must_use]
    pub fn with_blocks(self, first: u64, blocks: u64) -> Self {
        let blocks = u16::try_from(blocks - 1).expect("as many blocks as a command takes");
        self.with_part(40, &first.to_le_bytes()).with_part(48, &blocks.to_le_bytes())
    }

    #[must_use]
    pub fn with_fua(self) -> Self {
        let flags = self.dword(12) | FUA;
        self.with_dword(12, flags)
    }

    #[must_use]
    pub fn with_deallocate(self) -> Self {
        let flags = self.dword(12) | DEALLOCATE;
        self.with_dword(12, flags)
    }
}

/// Blocks that Dataset Management is about (Base, 6.7.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub first_block: u64,
    pub blocks: u32,
}

impl Range {
    pub const BYTES: usize = 16;

    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put(&mut bytes, 4, &self.blocks.to_le_bytes());
        put(&mut bytes, 8, &self.first_block.to_le_bytes());
        bytes
    }
}

/// The data of Dataset Management; what is behind the last whole range is no range.
pub fn ranges(data: &[u8]) -> impl Iterator<Item = Range> {
    let (whole, _) = data.as_chunks::<{ Range::BYTES }>();
    whole.iter().map(|range| Range { first_block: u64_at(range, 8), blocks: u32_at(range, 4) })
}
