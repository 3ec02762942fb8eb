//! Replies as bytes (doc/proto.md, "Simple reply message", "Structured reply chunk message", "Extended reply chunk message").

use levada_base::HasErrno;
use levada_base::stream::Head;
use levada_volume::{Extent, VolumeError};
use smallvec::SmallVec;

const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_MAGIC: u32 = 0x6e8a_278c;
/// The only chunk of its reply, or the last.
const DONE: u16 = 1 << 0;

const TYPE_NONE: u16 = 0;
const TYPE_OFFSET_DATA: u16 = 1;
const TYPE_BLOCK_STATUS: u16 = 5;
const TYPE_BLOCK_STATUS_EXT: u16 = 6;
const TYPE_ERROR: u16 = (1 << 15) + 1;

/// `base:allocation`: nothing is stored, and it reads as zeroes.
const STATE_HOLE_ZERO: u32 = 3;

/// How replies look, as negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Form {
    #[default]
    Simple,
    Structured,
    Extended,
}

/// What a client is told that something went wrong ("Error values").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Error {
    NotPermitted = 1,
    Io = 5,
    NoMemory = 12,
    Invalid = 22,
    NoSpace = 28,
    Overflow = 75,
    NotSupported = 95,
    ShuttingDown = 108,
}

impl Error {
    /// What an error of a volume is to a client that wanted to change it, or not.
    pub(crate) fn of(error: &VolumeError, is_change: bool) -> Self {
        match (error, error.errno()) {
            // As of a device that ends there.
            (VolumeError::OutOfRange { .. }, _) if is_change => Self::NoSpace,
            (VolumeError::OutOfRange { .. }, _) => Self::Invalid,
            (VolumeError::ReadOnly, _) => Self::NotPermitted,
            (VolumeError::Deleted, _) => Self::ShuttingDown,
            (_, libc::ENOSPC | libc::EDQUOT) => Self::NoSpace,
            (_, libc::ENOMEM) => Self::NoMemory,
            (_, libc::EOPNOTSUPP) => Self::NotSupported,
            _ => Self::Io,
        }
    }
}

/// The head of a chunk whose content follows: `inline` bytes at once, and `data_bytes` behind.
fn chunk(form: Form, kind: u16, cookie: u64, at: u64, inline: &[u8], data_bytes: u64) -> Head {
    let mut head = Head::new();
    let content_bytes = inline.len() as u64 + data_bytes;
    let magic = if form == Form::Extended { EXTENDED_MAGIC } else { STRUCTURED_MAGIC };
    head.extend_from_slice(&magic.to_be_bytes());
    head.extend_from_slice(&DONE.to_be_bytes());
    head.extend_from_slice(&kind.to_be_bytes());
    head.extend_from_slice(&cookie.to_be_bytes());
    if form == Form::Extended {
        head.extend_from_slice(&at.to_be_bytes());
        head.extend_from_slice(&content_bytes.to_be_bytes());
    } else {
        // Data are at most as long as a request may be, far below 4 GiB.
        head.extend_from_slice(&(content_bytes as u32).to_be_bytes());
    }
    head.extend_from_slice(inline);
    head
}

fn simple(error: u32, cookie: u64) -> Head {
    let mut head = Head::new();
    head.extend_from_slice(&SIMPLE_MAGIC.to_be_bytes());
    head.extend_from_slice(&error.to_be_bytes());
    head.extend_from_slice(&cookie.to_be_bytes());
    head
}

/// It is done, and there is nothing to tell.
pub(crate) fn done(form: Form, cookie: u64, at: u64) -> Head {
    match form {
        Form::Simple => simple(0, cookie),
        Form::Structured | Form::Extended => chunk(form, TYPE_NONE, cookie, at, &[], 0),
    }
}

/// Data follow: `bytes` from `at` on.
pub(crate) fn data(form: Form, cookie: u64, at: u64, bytes: u64) -> Head {
    match form {
        Form::Simple => simple(0, cookie),
        Form::Structured | Form::Extended => {
            chunk(form, TYPE_OFFSET_DATA, cookie, at, &at.to_be_bytes(), bytes)
        }
    }
}

/// It failed.
pub(crate) fn failed(form: Form, cookie: u64, at: u64, error: Error) -> Head {
    match form {
        Form::Simple => simple(error as u32, cookie),
        Form::Structured | Form::Extended => {
            let mut content: SmallVec<[u8; 8]> = SmallVec::new();
            content.extend_from_slice(&(error as u32).to_be_bytes());
            content.extend_from_slice(&0u16.to_be_bytes());
            chunk(form, TYPE_ERROR, cookie, at, &content, 0)
        }
    }
}

/// The extents from `at` on, in the context of this number. Never with simple replies, which have no contexts.
pub(crate) fn extents(form: Form, cookie: u64, at: u64, context: u32, extents: &[Extent]) -> Head {
    let mut content = Vec::with_capacity(8 + extents.len() * 16);
    content.extend_from_slice(&context.to_be_bytes());
    let state = |extent: &Extent| if extent.is_allocated { 0 } else { STATE_HOLE_ZERO };
    if form == Form::Extended {
        content.extend_from_slice(&(extents.len() as u32).to_be_bytes());
        for extent in extents {
            content.extend_from_slice(&extent.bytes.to_be_bytes());
            content.extend_from_slice(&u64::from(state(extent)).to_be_bytes());
        }
        return chunk(form, TYPE_BLOCK_STATUS_EXT, cookie, at, &content, 0);
    }
    for extent in extents {
        // No longer than the request, whose length has 32 bits.
        content.extend_from_slice(&(extent.bytes as u32).to_be_bytes());
        content.extend_from_slice(&state(extent).to_be_bytes());
    }
    chunk(form, TYPE_BLOCK_STATUS, cookie, at, &content, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOKIE: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 7];

    #[test]
    fn replies_are_written_as_specified() {
        let simple = [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28][..], &COOKIE].concat();
        assert_eq!(failed(Form::Simple, 7, 0, Error::NoSpace)[..], simple);

        let structured = [
            &[0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1][..],
            &COOKIE,
            &[0, 0, 0x10, 8],
            &[0, 0, 0, 0, 0, 0, 0x20, 0],
        ];
        assert_eq!(data(Form::Structured, 7, 0x2000, 4096)[..], structured.concat());

        let extended = [
            &[0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 0][..],
            &COOKIE,
            &[0, 0, 0, 0, 0, 0, 0, 9],
            &[0; 8],
        ];
        assert_eq!(done(Form::Extended, 7, 9)[..], extended.concat());

        let runs = [
            Extent { bytes: 512, is_allocated: true },
            Extent { bytes: 1 << 20, is_allocated: false },
        ];
        let status = extents(Form::Structured, 7, 0, 1, &runs);
        assert_eq!(status[6..8], [0, 5]);
        assert_eq!(
            status[16..],
            [0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 3]
        );
        let status = extents(Form::Extended, 7, 0, 1, &runs[1..]);
        assert_eq!(status[6..8], [0, 6]);
        let content = [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
        assert_eq!(status[32..], content);
    }
}
