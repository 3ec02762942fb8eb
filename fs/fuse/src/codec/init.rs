//! INIT: which protocol and which features.
//!
//! The kernel offers, the server takes. What the codec relies on for its
//! layouts is required: a kernel that does not offer it is refused, so that
//! parsing needs no memory of the session.

use super::abi::{InitFlags, MAJOR, MINOR, MINOR_MIN};
use super::fields::{BadField, Fields};
use super::reply::Head;

/// `fuse_init_in`: what the kernel offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitRequest {
    /// Protocol major version.
    pub major: u32,
    /// Protocol minor version.
    pub minor: u32,
    /// Bytes the kernel would read ahead.
    pub max_readahead_bytes: u32,
    /// What the kernel can do.
    pub flags: InitFlags,
}

impl InitRequest {
    pub(super) fn take(f: &mut Fields<'_>) -> Result<Self, BadField> {
        let (major, minor) = (f.u32()?, f.u32()?);
        // Another major version may have another layout; only the version
        // counts then.
        if major != MAJOR {
            let flags = InitFlags::empty();
            return Ok(InitRequest { major, minor, max_readahead_bytes: 0, flags });
        }
        let (max_readahead_bytes, low) = (f.u32()?, f.u32()?);
        let mut flags = InitFlags::from_bits_retain(u64::from(low));
        if flags.contains(InitFlags::INIT_EXT) {
            flags |= InitFlags::from_bits_retain(u64::from(f.u32()?) << 32);
        }
        Ok(InitRequest { major, minor, max_readahead_bytes, flags })
    }
}

/// What this server wants of every mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest WRITE, and with `max_pages` the largest READ.
    pub max_write_bytes: u32,
    /// Bytes to read ahead; the backing device's setting caps it (see
    /// `FuseMount::set_read_ahead`).
    pub max_readahead_bytes: u32,
    /// Background requests (read-ahead, asynchronous direct I/O) in flight.
    pub max_background: u16,
    /// Background requests at which the kernel calls the mount congested.
    pub congestion_threshold: u16,
    /// Features to take where offered.
    pub wanted: InitFlags,
}

/// Features the layouts rely on.
pub const REQUIRED: InitFlags = InitFlags::BIG_WRITES
    .union(InitFlags::MAX_PAGES)
    .union(InitFlags::INIT_EXT)
    .union(InitFlags::SETXATTR_EXT);

impl Default for Limits {
    /// 1 MiB requests, 128 in the background.
    ///
    /// Deliberately absent: WRITEBACK_CACHE (the server knows sizes and times,
    /// and another mount must see a write when it returns); AUTO_INVAL_DATA
    /// (a mount's own writes would drop its cache: the server's mtime differs
    /// from the kernel's guess).
    fn default() -> Self {
        Limits {
            max_write_bytes: 1 << 20,
            max_readahead_bytes: 4 << 20,
            max_background: 128,
            congestion_threshold: 96,
            wanted: REQUIRED
                | InitFlags::ASYNC_READ
                | InitFlags::ATOMIC_O_TRUNC
                | InitFlags::EXPORT_SUPPORT
                | InitFlags::DO_READDIRPLUS
                | InitFlags::READDIRPLUS_AUTO
                | InitFlags::ASYNC_DIO
                | InitFlags::PARALLEL_DIROPS
                | InitFlags::HANDLE_KILLPRIV
                | InitFlags::HANDLE_KILLPRIV_V2
                | InitFlags::ABORT_ERROR
                | InitFlags::NO_OPENDIR_SUPPORT
                | InitFlags::DIRECT_IO_ALLOW_MMAP,
        }
    }
}

/// `fuse_init_out`: what the mount will use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Protocol minor version: the smaller of both sides'.
    pub minor: u32,
    /// The features both sides have.
    pub flags: InitFlags,
    /// The largest WRITE.
    pub max_write_bytes: u32,
    /// Bytes to read ahead.
    pub max_readahead_bytes: u32,
    /// See [`Limits`].
    pub max_background: u16,
    /// See [`Limits`].
    pub congestion_threshold: u16,
}

/// Why there is no common protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NegotiateError {
    /// The kernel is too old.
    #[error("the kernel speaks FUSE {major}.{minor}; {MAJOR}.{MINOR_MIN} or newer is needed")]
    TooOld {
        /// Its major version.
        major: u32,
        /// Its minor version.
        minor: u32,
    },
    /// The kernel lacks features the protocol's layouts rely on.
    #[error("the kernel does not offer {missing:?}")]
    Missing {
        /// What it lacks.
        missing: InitFlags,
    },
}

/// The unit of `max_pages`.
const PAGE_BYTES: u32 = 4096;

impl Limits {
    /// Takes what both sides can do.
    ///
    /// A kernel with a newer major version is answered with ours and sends
    /// INIT again (`fuse.h`, version negotiation); the result then has no
    /// flags, and the caller must not take the mount for initialised.
    ///
    /// # Errors
    ///
    /// [`NegotiateError`]; answer `EPROTO`, the mount then fails.
    pub fn negotiate(&self, offer: &InitRequest) -> Result<Negotiated, NegotiateError> {
        let mut agreed = Negotiated {
            minor: offer.minor.min(MINOR),
            flags: InitFlags::empty(),
            max_write_bytes: self.max_write_bytes,
            max_readahead_bytes: self.max_readahead_bytes,
            max_background: self.max_background,
            congestion_threshold: self.congestion_threshold,
        };
        if offer.major > MAJOR {
            agreed.minor = MINOR;
            return Ok(agreed);
        }
        if offer.major < MAJOR || offer.minor < MINOR_MIN {
            return Err(NegotiateError::TooOld { major: offer.major, minor: offer.minor });
        }
        let missing = REQUIRED.difference(offer.flags);
        if !missing.is_empty() {
            return Err(NegotiateError::Missing { missing });
        }
        agreed.flags = offer.flags.intersection(self.wanted);
        Ok(agreed)
    }
}

impl Negotiated {
    /// False when INIT will come again, with our major version.
    #[must_use]
    pub fn is_final(&self) -> bool {
        self.flags.contains(REQUIRED)
    }

    pub(super) fn put(&self, to: &mut Head) {
        let bits = self.flags.bits();
        to.u32(MAJOR);
        to.u32(self.minor);
        to.u32(self.max_readahead_bytes);
        to.u32((bits & u64::from(u32::MAX)) as u32);
        to.u16(self.max_background);
        to.u16(self.congestion_threshold);
        to.u32(self.max_write_bytes);
        to.u32(1); // time granularity: 1 ns
        let pages = self.max_write_bytes.div_ceil(PAGE_BYTES);
        to.u16(u16::try_from(pages).unwrap_or(u16::MAX));
        to.u16(0); // map alignment: no DAX
        to.u32((bits >> 32) as u32);
        to.zeroes(7 * 4); // stack depth, request timeout, unused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(major: u32, minor: u32, flags: InitFlags) -> InitRequest {
        InitRequest { major, minor, max_readahead_bytes: 131_072, flags }
    }

    #[test]
    fn takes_what_both_have() {
        let limits = Limits::default();
        let agreed = limits.negotiate(&offer(7, 99, InitFlags::all())).unwrap();
        assert_eq!((agreed.minor, agreed.flags), (MINOR, limits.wanted));
        assert!(agreed.is_final());
        let agreed = limits.negotiate(&offer(7, 36, REQUIRED)).unwrap();
        assert_eq!((agreed.minor, agreed.flags), (36, REQUIRED));
    }

    #[test]
    fn refuses_what_it_cannot_speak() {
        let limits = Limits::default();
        for (major, minor) in [(6, 99), (7, 35)] {
            let error = limits.negotiate(&offer(major, minor, InitFlags::all()));
            assert_eq!(error, Err(NegotiateError::TooOld { major, minor }));
        }
        let error = limits.negotiate(&offer(7, 40, REQUIRED - InitFlags::MAX_PAGES));
        assert_eq!(error, Err(NegotiateError::Missing { missing: InitFlags::MAX_PAGES }));
    }

    #[test]
    fn a_newer_major_is_answered_with_ours() {
        let agreed = Limits::default().negotiate(&offer(8, 0, InitFlags::empty())).unwrap();
        assert!(!agreed.is_final());
        let mut body = Head::bare();
        agreed.put(&mut body);
        assert_eq!(body.as_ref().len(), 64);
        assert_eq!(&body.as_ref()[..8], [7u32.to_ne_bytes(), MINOR.to_ne_bytes()].as_flattened());
    }
}
