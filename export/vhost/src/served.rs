//! What differs between the devices that are shown at sockets, a disk and a file system: what is offered, and what a request is.

use crate::cores::Core;
use crate::memory::Memory;
use crate::request::FarClient;
use crate::ring::{Broken, Chain, Used};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// `VHOST_USER_F_PROTOCOL_FEATURES`
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Bits of `VHOST_USER_GET_PROTOCOL_FEATURES`.
pub(crate) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// What is offered to a client, or what it has agreed to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features(pub u64);

impl Features {
    /// What the rings of every device can do.
    pub(crate) const RINGS: Self = Self(PROTOCOL_FEATURES)
        .with(VIRTIO_F_VERSION_1)
        .with(VIRTIO_F_RING_PACKED)
        .with(VIRTIO_RING_F_INDIRECT_DESC)
        .with(VIRTIO_RING_F_EVENT_IDX);

    pub(crate) const fn with(self, bit: u32) -> Self {
        Self(self.0 | 1 << bit)
    }

    pub(crate) fn has(self, bit: u32) -> bool {
        self.0 & 1 << bit != 0
    }

    pub(crate) fn is_packed(self) -> bool {
        self.has(VIRTIO_F_RING_PACKED)
    }

    pub(crate) fn has_event_index(self) -> bool {
        self.has(VIRTIO_RING_F_EVENT_IDX)
    }
}

/// The ring that a request comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub queue: usize,
    /// As many requests it may hold.
    pub size: u16,
}

/// A device as one client has it.
pub(crate) trait Served: 'static {
    /// Messages of the protocol that it takes beyond the plain ones.
    const PROTOCOL: u64;

    fn offered(&self) -> Features;

    /// The client has agreed to these.
    fn agreed(&self, _features: Features) {}

    /// Its configuration space, where a client may have so many queues.
    fn configuration(&self, queues: u16) -> Vec<u8>;

    /// Carries a request out, and writes its answer.
    ///
    /// # Errors
    ///
    /// [`Broken`] when the client cannot be told.
    fn serve(
        self: Rc<Self>,
        source: Source,
        memory: Arc<Memory>,
        chain: Chain,
    ) -> impl Future<Output = Result<Used, Broken>> + 'static;

    /// Where a queue of it is to be served, and what it needs there; `None`: here.
    fn elsewhere(&self) -> Option<(Rc<Core>, FarClient)> {
        None
    }

    /// Its configuration has changed, of which the client is about to be told.
    fn changed(&self) {}

    /// This queue is to end: what came from it and waits for what another client does, is to be answered now. Called again and again
    /// until all of it is.
    fn stop_waiting(&self, _queue: usize) {}

    /// The client has gone, and its queues are about to end.
    fn gone(&self) {}

    /// The client has gone, and its queues have ended.
    fn left(&self) -> impl Future<Output = ()> {
        std::future::ready(())
    }
}
