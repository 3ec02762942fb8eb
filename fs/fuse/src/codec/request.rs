//! One request: `fuse_in_header`, then the arguments of its opcode.
//!
//! ```text
//!  0      4        8         16        24    28    32    36        38        40
//!  | len  | opcode | unique  | node id | uid | gid | pid | ext/8   | padding | arguments, extensions
//! ```

use super::IN_HEADER_BYTES;
use super::abi::Opcode;
use super::fields::{BadField, Fields};
use super::operation::Operation;

/// Who asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// File-system user id.
    pub uid: u32,
    /// File-system group id.
    pub gid: u32,
    /// Thread id in the caller's name space; 0 for the kernel itself.
    pub pid: u32,
}

/// One message from the kernel; borrows names and data from its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Names this request in its reply and in INTERRUPT.
    pub unique: u64,
    /// The inode it is about (for names: their directory); 0 where an
    /// operation is about none.
    pub inode: u64,
    /// Who asks.
    pub caller: Caller,
    /// What is asked.
    pub operation: Operation<'a>,
}

/// Why bytes are not a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Shorter than `fuse_in_header`; there is nobody to answer.
    #[error("a message of {have_bytes} bytes is shorter than a header")]
    NoHeader {
        /// Bytes received.
        have_bytes: usize,
    },
    /// The header's length is below its own or above what was received.
    #[error("request {unique}: declares {declared_bytes} bytes, {have_bytes} received")]
    Length {
        /// The request.
        unique: u64,
        /// What the header says.
        declared_bytes: u32,
        /// Bytes received.
        have_bytes: usize,
    },
    /// The extensions at the end are longer than what follows the header.
    #[error("request {unique}: {extension_bytes} bytes of extensions do not fit")]
    Extensions {
        /// The request.
        unique: u64,
        /// What the header says.
        extension_bytes: usize,
    },
    /// The arguments end too early.
    #[error("request {unique}: arguments of {opcode:?} are cut short")]
    Truncated {
        /// The request.
        unique: u64,
        /// Its opcode.
        opcode: Opcode,
    },
    /// A name is empty, not terminated, or contains `/`.
    #[error("request {unique}: {opcode:?} carries a bad name")]
    Name {
        /// The request.
        unique: u64,
        /// Its opcode.
        opcode: Opcode,
    },
}

impl ParseError {
    /// The request to answer with an error, if it is known.
    #[must_use]
    pub fn unique(&self) -> Option<u64> {
        match *self {
            ParseError::NoHeader { .. } => None,
            ParseError::Length { unique, .. }
            | ParseError::Extensions { unique, .. }
            | ParseError::Truncated { unique, .. }
            | ParseError::Name { unique, .. } => Some(unique),
        }
    }
}

impl<'a> Request<'a> {
    /// Reads one message.
    ///
    /// # Errors
    ///
    /// [`ParseError`] says what is wrong and, where it can, whom to answer.
    /// An opcode that is not known is no error but [`Operation::Unknown`].
    pub fn parse(message: &'a [u8]) -> Result<Self, ParseError> {
        let no_header = |_| ParseError::NoHeader { have_bytes: message.len() };
        let mut header = Fields::new(message);
        let header = RawHeader::take(&mut header).map_err(no_header)?;
        let unique = header.unique;

        let declared = usize::try_from(header.len).unwrap_or(usize::MAX);
        if declared < IN_HEADER_BYTES || declared > message.len() {
            return Err(ParseError::Length {
                unique,
                declared_bytes: header.len,
                have_bytes: message.len(),
            });
        }
        let arguments = &message[IN_HEADER_BYTES..declared];
        // Extensions (security contexts, groups) are never asked for in INIT;
        // were they sent, they must not be taken for arguments.
        let extension_bytes = usize::from(header.extension_units) * 8;
        let Some(arguments_len) = arguments.len().checked_sub(extension_bytes) else {
            return Err(ParseError::Extensions { unique, extension_bytes });
        };
        let arguments = &arguments[..arguments_len];

        let operation = match Opcode::from_raw(header.opcode) {
            None => Operation::Unknown { opcode: header.opcode },
            Some(opcode) => Operation::take(opcode, arguments).map_err(|bad| match bad {
                BadField::Truncated => ParseError::Truncated { unique, opcode },
                BadField::Name => ParseError::Name { unique, opcode },
            })?,
        };
        Ok(Request {
            unique,
            inode: header.node_id,
            caller: Caller { uid: header.uid, gid: header.gid, pid: header.pid },
            operation,
        })
    }
}

struct RawHeader {
    len: u32,
    opcode: u32,
    unique: u64,
    node_id: u64,
    uid: u32,
    gid: u32,
    pid: u32,
    extension_units: u16,
}

impl RawHeader {
    fn take(fields: &mut Fields<'_>) -> Result<Self, BadField> {
        let header = RawHeader {
            len: fields.u32()?,
            opcode: fields.u32()?,
            unique: fields.u64()?,
            node_id: fields.u64()?,
            uid: fields.u32()?,
            gid: fields.u32()?,
            pid: fields.u32()?,
            extension_units: fields.u16()?,
        };
        fields.u16()?;
        Ok(header)
    }
}
