//! The gate of a volume whose size changes: what every request passes.
//!
//! What always holds: while [`Gate::closed`] is held no request is under way, and those that waited for it are checked
//! against the size that the volume has afterwards.

use crate::VolumeError;
use levada_base::sync::{Permit, Semaphore};
use std::cell::Cell;
use std::rc::Rc;

/// Requests of a volume at once.
const REQUESTS_MAX: u64 = 1 << 20;

/// What every request of a volume passes.
pub(crate) struct Gate {
    size_bytes: Cell<u64>,
    is_gone: Cell<bool>,
    /// One for each request under way; all of them while it is closed.
    requests: Rc<Semaphore>,
}

impl Gate {
    pub(crate) fn new(size_bytes: u64) -> Self {
        let requests = Semaphore::new(REQUESTS_MAX);
        Self { size_bytes: Cell::new(size_bytes), is_gone: Cell::new(false), requests }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes.get()
    }

    /// Requests are checked against this size from now on.
    pub(crate) fn set_size_bytes(&self, size_bytes: u64) {
        self.size_bytes.set(size_bytes);
    }

    /// The volume is deleted: every request fails from now on.
    pub(crate) fn set_gone(&self) {
        self.is_gone.set(true);
    }

    /// That a request is inside the volume, by itself.
    pub(crate) fn check(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        let size_bytes = self.size_bytes.get();
        if self.is_gone.get() {
            return Err(VolumeError::Deleted);
        }
        match at.checked_add(bytes).is_some_and(|end| end <= size_bytes) {
            true => Ok(()),
            false => Err(VolumeError::OutOfRange { at, bytes, size_bytes }),
        }
    }

    /// Lets a request in, which is under way until the permit is dropped.
    pub(crate) async fn pass(&self, at: u64, bytes: u64) -> Result<Permit, VolumeError> {
        let permit = self.requests.acquire(1).await;
        self.check(at, bytes)?;
        Ok(permit)
    }

    /// Waits for the requests under way; others wait until the permit is dropped.
    pub(crate) async fn closed(&self) -> Permit {
        self.requests.acquire(REQUESTS_MAX).await
    }
}
