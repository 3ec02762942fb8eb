//! A queue wherever it is served: by the reactor that has its device, or by a core for rings.

use crate::cores::FarQueue;
use crate::memory::Memory;
use crate::queue::{Running, Signals};
use crate::ring::Shape;
use crate::served::Served;
use crate::signal::Kick;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

pub(crate) enum Placed<S> {
    Here(Running<S>),
    There(FarQueue),
}

impl<S> Placed<S> {
    /// Begins to leave the client where it stands, which dropping this completes.
    pub(crate) fn leave(&mut self) {
        if let Self::There(queue) = self {
            queue.leave();
        }
    }
}

impl<S: Served> Placed<S> {
    pub(crate) fn set_memory(&self, memory: &Arc<Memory>, shape: &Shape) {
        match self {
            Self::Here(running) => running.queue.set_memory(memory, shape),
            Self::There(queue) => queue.set_memory(memory, shape),
        }
    }

    pub(crate) fn set_signals(&self, signals: Signals) {
        match self {
            Self::Here(running) => running.queue.set_signals(signals),
            Self::There(queue) => queue.set_signals(signals),
        }
    }

    pub(crate) fn set_kick(&self, kick: Option<Rc<Kick>>) {
        match self {
            Self::Here(running) => running.queue.set_kick(kick),
            Self::There(queue) => queue.set_kick(kick),
        }
    }

    pub(crate) fn set_enabled(&self, is_enabled: bool) {
        match self {
            Self::Here(running) => running.queue.set_enabled(is_enabled),
            Self::There(queue) => queue.set_enabled(is_enabled),
        }
    }

    /// What was set may not hold before this completes; `None`: it does.
    pub(crate) fn settled(&self) -> Option<impl Future<Output = ()> + 'static> {
        match self {
            Self::Here(_) => None,
            Self::There(queue) => Some(queue.settled()),
        }
    }

    /// Stops taking requests, and returns when those that were taken are answered: where the ring stands.
    pub(crate) async fn end(self) -> u32 {
        match self {
            Self::Here(running) => running.end().await,
            Self::There(queue) => queue.end().await,
        }
    }
}
