//! Parity arithmetic for arrays and stripes: encode, update, recover, verify.
//!
//! Everything here is a linear code over GF(2^8) with the polynomial 0x11d:
//! *k* data chunks and *m* parity chunks of equal length, where any *m* lost
//! chunks can be computed from the others. [`Code`] is the way in; [`Kernel`]
//! is the instruction set that it runs on, chosen once.
//!
//! What always holds:
//! - Arithmetic only: no I/O, no clock, no allocation in any call.
//! - Every kernel gives the bytes that the portable one gives.
//! - The coefficients are part of the format on disk and never change. P and Q
//!   are those of Linux RAID 6 (H. P. Anvin, "The mathematics of RAID-6").
//!
//! Nothing survives a crash because nothing is stored.

mod code;
mod gf;
mod kernel;
mod recover;
mod verify;

pub use code::{CHUNKS_MAX, Code, PARITY_MAX, ParityError, encode_p, encode_pq};
pub use kernel::Kernel;
pub use recover::Slot;
pub use verify::Verdict;
