//! Base: what every floor stands on.
//!
//! One thread runs one [`reactor`], which owns tasks, timers and an io_uring (or, in the
//! simulator, a virtual clock). Nothing here knows about drives, arrays or files.

pub mod buf;
pub mod checksum;
pub mod choices;
mod errno;
mod handed;
pub mod ids;
pub mod lent;
pub mod meter;
pub mod planted;
pub mod probe;
mod range_locks;
pub mod reactor;
mod rooted;
pub mod shared;
pub mod stream;
pub mod sync;
pub mod units;

pub use buf::{Buf, BufMut, IoVec, IoVecMut};
pub use errno::HasErrno;
pub use handed::Handed;
pub use ids::Epoch;
pub use lent::{Lent, LentVec};
pub use range_locks::{RangeGuard, RangeLocks};
pub use rooted::Rooted;
