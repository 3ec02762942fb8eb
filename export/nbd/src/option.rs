//! Negotiation as bytes: options of a client, and replies to them (doc/proto.md, "Option types").

use smallvec::SmallVec;

/// "NBDMAGIC": the server's first word.
pub(crate) const GREETING: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": its second, and the first of every option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The first of every reply to an option.
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Bytes of an option before its data.
pub(crate) const OPTION_HEAD_BYTES: usize = 16;
/// Bytes of data that an option may have: a name and many queries.
pub(crate) const OPTION_BYTES_MAX: u32 = 64 << 10;
/// The longest name of an export or a context ("Values": 4096 bytes).
const NAME_BYTES_MAX: usize = 4096;

/// Zeroes behind the answer to `ExportName`, which clients of today do without.
pub(crate) const EXPORT_NAME_PADDING: usize = 124;

bitflags::bitflags! {
    /// "Handshake flags" of the server; those of the client have the same values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct HandshakeFlags: u16 {
        const FIXED_NEWSTYLE = 1 << 0;
        const NO_ZEROES = 1 << 1;
    }

    /// "Transmission flags": what an export offers.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct TransmissionFlags: u16 {
        const HAS_FLAGS = 1 << 0;
        const READ_ONLY = 1 << 1;
        const SEND_FLUSH = 1 << 2;
        const SEND_FUA = 1 << 3;
        const SEND_TRIM = 1 << 5;
        const SEND_WRITE_ZEROES = 1 << 6;
        const SEND_DF = 1 << 7;
        const CAN_MULTI_CONN = 1 << 8;
        const SEND_CACHE = 1 << 10;
        const SEND_FAST_ZERO = 1 << 11;
    }
}

/// The number of the context `base:allocation` in replies.
pub(crate) const ALLOCATION_ID: u32 = 1;
/// The one context there is.
pub(crate) const ALLOCATION: &[u8] = b"base:allocation";
/// A query for all contexts of its namespace.
const ALL_OF_BASE: &[u8] = b"base:";

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ClientOption {
    /// Use an export at once; there is no way to say no but to hang up.
    ExportName(Vec<u8>),
    Abort,
    List,
    StartTls,
    Info(InfoRequest),
    /// As `Info`, then use the export.
    Go(InfoRequest),
    StructuredReply,
    ListMetaContext(MetaRequest),
    SetMetaContext(MetaRequest),
    ExtendedHeaders,
    Unknown(u32),
    /// Data that are not what the option has.
    Malformed(u32),
}

/// What a client wants to know of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InfoRequest {
    pub(crate) export: Vec<u8>,
    pub(crate) wants_name: bool,
    pub(crate) wants_block_size: bool,
}

/// What contexts a client wants of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MetaRequest {
    pub(crate) export: Vec<u8>,
    /// Empty: of a list, all there are; of a set, none.
    pub(crate) queries: Vec<Vec<u8>>,
}

impl MetaRequest {
    /// That a query names `base:allocation`; with `in_list` also by its namespace.
    pub(crate) fn asks_allocation(&self, in_list: bool) -> bool {
        let is_asked = |query: &Vec<u8>| query == ALLOCATION || (in_list && query == ALL_OF_BASE);
        (in_list && self.queries.is_empty()) || self.queries.iter().any(is_asked)
    }
}

const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const START_TLS: u32 = 5;
const INFO: u32 = 6;
const GO: u32 = 7;
const STRUCTURED_REPLY: u32 = 8;
const LIST_META_CONTEXT: u32 = 9;
const SET_META_CONTEXT: u32 = 10;
const EXTENDED_HEADERS: u32 = 11;

/// Reads data of an option from the front.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }

    /// A text behind its length.
    fn text(&mut self) -> Option<Vec<u8>> {
        let bytes = self.u32()? as usize;
        if bytes > NAME_BYTES_MAX {
            return None;
        }
        Some(self.take(bytes)?.to_vec())
    }

    fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// The head of an option: its kind, and the bytes of data behind it; `None` without the magic.
pub(crate) fn option_head(head: &[u8; OPTION_HEAD_BYTES]) -> Option<(u32, u32)> {
    let mut fields = Fields(&head[..]);
    let magic = u64::from_be_bytes(fields.take(8)?.try_into().ok()?);
    (magic == OPTION_MAGIC).then_some((fields.u32()?, fields.u32()?))
}

impl ClientOption {
    /// Reads the data of an option of this kind.
    pub(crate) fn parse(kind: u32, data: &[u8]) -> Self {
        Self::parsed(kind, Fields(data)).unwrap_or(Self::Malformed(kind))
    }

    fn parsed(kind: u32, mut fields: Fields<'_>) -> Option<Self> {
        let option = match kind {
            EXPORT_NAME if fields.0.len() > NAME_BYTES_MAX => return None,
            EXPORT_NAME => Self::ExportName(std::mem::take(&mut fields.0).to_vec()),
            // Data behind it mean nothing.
            ABORT => return Some(Self::Abort),
            LIST => Self::List,
            START_TLS => Self::StartTls,
            INFO => Self::Info(info_request(&mut fields)?),
            GO => Self::Go(info_request(&mut fields)?),
            STRUCTURED_REPLY => Self::StructuredReply,
            LIST_META_CONTEXT => Self::ListMetaContext(meta_request(&mut fields)?),
            SET_META_CONTEXT => Self::SetMetaContext(meta_request(&mut fields)?),
            EXTENDED_HEADERS => Self::ExtendedHeaders,
            kind => return Some(Self::Unknown(kind)),
        };
        fields.end()?;
        Some(option)
    }

    /// The kind that replies to it name.
    pub(crate) fn kind(&self) -> u32 {
        match self {
            Self::ExportName(_) => EXPORT_NAME,
            Self::Abort => ABORT,
            Self::List => LIST,
            Self::StartTls => START_TLS,
            Self::Info(_) => INFO,
            Self::Go(_) => GO,
            Self::StructuredReply => STRUCTURED_REPLY,
            Self::ListMetaContext(_) => LIST_META_CONTEXT,
            Self::SetMetaContext(_) => SET_META_CONTEXT,
            Self::ExtendedHeaders => EXTENDED_HEADERS,
            Self::Unknown(kind) | Self::Malformed(kind) => *kind,
        }
    }
}

fn info_request(fields: &mut Fields<'_>) -> Option<InfoRequest> {
    const NAME: u16 = 1;
    const BLOCK_SIZE: u16 = 3;
    let export = fields.text()?;
    let mut request = InfoRequest { export, wants_name: false, wants_block_size: false };
    for _ in 0..fields.u16()? {
        match fields.u16()? {
            NAME => request.wants_name = true,
            BLOCK_SIZE => request.wants_block_size = true,
            // A client may ask for what servers do not know.
            _ => {}
        }
    }
    Some(request)
}

fn meta_request(fields: &mut Fields<'_>) -> Option<MetaRequest> {
    let export = fields.text()?;
    let count = fields.u32()?;
    // No more than there can be: whoever says four thousand million is not believed.
    let mut queries = Vec::with_capacity((count as usize).min(fields.0.len() / 4));
    for _ in 0..count {
        queries.push(fields.text()?);
    }
    Some(MetaRequest { export, queries })
}

/// A reply to an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OptionReply<'a> {
    Ack,
    /// An export that can be had.
    Server(&'a [u8]),
    InfoExport {
        size_bytes: u64,
        flags: TransmissionFlags,
    },
    InfoName(&'a [u8]),
    InfoBlockSize {
        least: u32,
        preferred: u32,
        most: u32,
    },
    MetaContext {
        id: u32,
        name: &'a [u8],
    },
    Refused(Refusal, &'a str),
}

/// Why an option is refused ("Option reply types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Unsupported,
    Policy,
    Invalid,
    TlsRequired,
    UnknownExport,
    TooBig,
}

impl OptionReply<'_> {
    /// As sent, to an option of this kind.
    pub(crate) fn encode(&self, kind: u32) -> Vec<u8> {
        let mut data: SmallVec<[u8; 32]> = SmallVec::new();
        let reply: u32 = match self {
            Self::Ack => 1,
            Self::Server(name) => {
                data.extend_from_slice(&(name.len() as u32).to_be_bytes());
                data.extend_from_slice(name);
                2
            }
            Self::InfoExport { size_bytes, flags } => {
                data.extend_from_slice(&0u16.to_be_bytes());
                data.extend_from_slice(&size_bytes.to_be_bytes());
                data.extend_from_slice(&flags.bits().to_be_bytes());
                3
            }
            Self::InfoName(name) => {
                data.extend_from_slice(&1u16.to_be_bytes());
                data.extend_from_slice(name);
                3
            }
            Self::InfoBlockSize { least, preferred, most } => {
                data.extend_from_slice(&3u16.to_be_bytes());
                for size in [least, preferred, most] {
                    data.extend_from_slice(&size.to_be_bytes());
                }
                3
            }
            Self::MetaContext { id, name } => {
                data.extend_from_slice(&id.to_be_bytes());
                data.extend_from_slice(name);
                4
            }
            Self::Refused(refusal, why) => {
                data.extend_from_slice(why.as_bytes());
                const IS_ERROR: u32 = 1 << 31;
                IS_ERROR
                    + match refusal {
                        Refusal::Unsupported => 1,
                        Refusal::Policy => 2,
                        Refusal::Invalid => 3,
                        Refusal::TlsRequired => 5,
                        Refusal::UnknownExport => 6,
                        Refusal::TooBig => 9,
                    }
            }
        };
        let mut bytes = Vec::with_capacity(20 + data.len());
        bytes.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
        for word in [kind, reply, data.len() as u32] {
            bytes.extend_from_slice(&word.to_be_bytes());
        }
        bytes.extend_from_slice(&data);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `GO` of `vm` with a request for block sizes, byte by byte as the specification has it.
    #[test]
    fn options_are_read_as_specified() {
        let data = [&[0, 0, 0, 2][..], b"vm", &[0, 2, 0, 3, 0, 9]].concat();
        let wanted =
            InfoRequest { export: b"vm".to_vec(), wants_name: false, wants_block_size: true };
        assert_eq!(ClientOption::parse(7, &data), ClientOption::Go(wanted.clone()));
        assert_eq!(ClientOption::parse(6, &data), ClientOption::Info(wanted));
        for len in 0..data.len() {
            assert_eq!(ClientOption::parse(7, &data[..len]), ClientOption::Malformed(7), "{len}");
        }
        let too_long = [&data[..], &[0]].concat();
        assert_eq!(ClientOption::parse(7, &too_long), ClientOption::Malformed(7));

        let data = [&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 5][..], b"base:"].concat();
        let ClientOption::ListMetaContext(list) = ClientOption::parse(9, &data) else { panic!() };
        assert!(list.asks_allocation(true) && !list.asks_allocation(false));
        let many = [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(ClientOption::parse(10, &many), ClientOption::Malformed(10));
        assert_eq!(ClientOption::parse(4, b""), ClientOption::Unknown(4), "PEEK_EXPORT");
        assert_eq!(ClientOption::parse(3, b"x"), ClientOption::Malformed(3), "LIST has no data");
        assert_eq!(ClientOption::parse(2, b"x"), ClientOption::Abort);
        let long = vec![b'a'; NAME_BYTES_MAX + 1];
        assert_eq!(ClientOption::parse(1, &long), ClientOption::Malformed(1));
    }

    #[test]
    fn replies_are_written_as_specified() {
        let flags = TransmissionFlags::HAS_FLAGS | TransmissionFlags::SEND_FLUSH;
        let reply = OptionReply::InfoExport { size_bytes: 0x1000, flags }.encode(7);
        let expected = [
            &[0x00, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9][..],
            &[0, 0, 0, 7, 0, 0, 0, 3, 0, 0, 0, 12],
            &[0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x00, 0, 5],
        ];
        assert_eq!(reply, expected.concat());
        let refused = OptionReply::Refused(Refusal::UnknownExport, "no").encode(6);
        assert_eq!(&refused[8..], [&[0, 0, 0, 6, 0x80, 0, 0, 6, 0, 0, 0, 2][..], b"no"].concat());
    }
}
