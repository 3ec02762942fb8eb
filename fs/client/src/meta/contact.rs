//! Staying in touch: the lease, connections that end while somebody waits to be told something, notices and their
//! acknowledgements.

use super::{Meta, UNAVAILABLE_WAIT};
use crate::error::Error;
use futures_util::future::{LocalBoxFuture, select};
use levada_base::reactor;
use levada_wire::frame::encode_body;
use levada_wire::meta::{Ack, LEASE_TERM, MetaRequest, NOTICES_MAX, Notice, ToService};
use levada_wire::rpc::Caller;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// By how much the service may be late to note that a client has no locks.
const UNUSED_MARGIN: Duration = Duration::from_secs(5);
/// How often a client that had locks lately looks after its connection.
const UNUSED_LOOK: Duration = Duration::from_secs(1);

impl Meta {
    /// Reaches the service again whenever the connection ends, for as long as somebody waits to be told
    /// something, and for as long as others wait for this client after a restart: else only the next request would.
    pub(crate) fn stay_connected(self: &Rc<Self>) {
        if self.watching.replace(true) {
            return;
        }
        let meta = Rc::downgrade(self);
        reactor::spawn(async move {
            let mut unused_since = None;
            while let Some(meta) = meta.upgrade().filter(|meta| !meta.left.get()) {
                if meta.leases.is_wanted() {
                    // After a restart others wait for it before they change anything.
                    if let Err(error) = meta.heard(meta.peer.reach().await) {
                        tracing::debug!(%error, "the metadata service does not take this client");
                        reactor::sleep(UNAVAILABLE_WAIT).await;
                    }
                    // Not for longer, so that a client that is dropped goes.
                    let _ = reactor::timeout(UNUSED_LOOK, meta.peer.ended()).await;
                    continue;
                }
                if meta.locks.is_used() {
                    unused_since = None;
                    select(pin!(meta.reconnect()), pin!(meta.locks.unused())).await;
                    continue;
                }
                // The service goes by a lease, and looks every few seconds.
                let since = *unused_since.get_or_insert_with(reactor::now);
                let lease_ms = meta.registration().map_or(0, |known| known.fs.lease_ms);
                if since.elapsed() > Duration::from_millis(lease_ms) + UNUSED_MARGIN {
                    break;
                }
                let _ = meta.peer.reach().await;
                drop(meta);
                reactor::sleep(UNUSED_LOOK).await;
            }
            if let Some(meta) = meta.upgrade() {
                meta.watching.set(false);
            }
        });
    }

    async fn reconnect(&self) {
        while !self.left.get() {
            if let Err(error) = self.heard(self.peer.reach().await) {
                tracing::debug!(%error, "the metadata service does not take this client");
                reactor::sleep(UNAVAILABLE_WAIT).await;
            }
            self.peer.ended().await;
        }
    }

    /// Says something before the lease runs out, for as long as the client lives.
    pub(crate) async fn keep_lease(meta: Weak<Self>) {
        let mut sent = 0;
        let lease_ms = |meta: Rc<Self>| meta.registration().map_or(1000, |known| known.fs.lease_ms);
        while let Some(lease_ms) = meta.upgrade().map(lease_ms) {
            reactor::sleep(Duration::from_millis((lease_ms / 3).max(1))).await;
            let Some(meta) = meta.upgrade() else { break };
            if sent == meta.sent.get()
                && !meta.left.get()
                && let Err(error) = meta.read(&MetaRequest::Space).await
            {
                tracing::warn!(%error, "cannot renew the lease");
            }
            sent = meta.sent.get();
        }
    }

    /// The service has answered lately: what it could not tell this client since, it still waits to tell.
    pub(crate) fn is_in_touch(&self) -> bool {
        self.renewed.get().age() < LEASE_TERM
    }

    /// How long from now on the service knows this client under the number `client` for certain; it is asked
    /// if that is not long any more. `None`: it has forgotten it, and others may have done meanwhile what was
    /// this client's to do.
    pub(crate) async fn certain_as(&self, client: u64) -> Result<Option<Duration>, Error> {
        loop {
            let known = self.registration().filter(|known| known.client == client);
            let Some(known) = known else { return Ok(None) };
            let lease = Duration::from_millis(known.fs.lease_ms);
            let age = self.renewed.get().age();
            if age <= lease / 2 {
                // The last quarter is for what is under way when the time is up.
                return Ok(Some(lease * 3 / 4 - age));
            }
            self.read(&MetaRequest::Space).await?;
        }
    }

    pub(super) fn heard_notice(self: &Rc<Self>, number: u64, notice: Notice) {
        let keeps = match notice {
            Notice::Granted { .. } | Notice::Refused { .. } => {
                self.locks.heard(notice);
                false
            }
            Notice::Shared { ino } => {
                self.leases.heard(&notice);
                let on_shared = self.leases.on_shared.borrow().clone();
                if let Some(ended) = on_shared.and_then(|on_shared| on_shared(ino)) {
                    self.acknowledge_after(ended, Ack { number, keeps: false });
                    return;
                }
                false
            }
            Notice::Names { .. } | Notice::Node { .. } => {
                let keeps = self.leases.heard(&notice);
                let on_notice = self.leases.on_notice.borrow().clone();
                if let Some(ended) = on_notice.and_then(|on_notice| on_notice(&notice)) {
                    self.acknowledge_after(ended, Ack { number, keeps });
                    return;
                }
                keeps
            }
        };
        self.acks.borrow_mut().push(Ack { number, keeps });
    }

    /// Acknowledges when nobody here trusts any more what the notice was about.
    fn acknowledge_after(self: &Rc<Self>, ended: LocalBoxFuture<'static, ()>, ack: Ack) {
        let (meta, life) = (Rc::downgrade(self), self.life());
        reactor::spawn(async move {
            ended.await;
            // Numbers of another life mean something else.
            if let Some(meta) = meta.upgrade().filter(|meta| meta.life() == life) {
                meta.acks.borrow_mut().push(ack);
                meta.acknowledge(None);
            }
        });
    }

    /// Acknowledges over `caller`, or over the connection that stands.
    pub(super) fn acknowledge(&self, caller: Option<&Caller>) {
        let Some(known) = self.registration() else { return };
        let mut acks = self.acks.borrow_mut();
        while !acks.is_empty() {
            let part = acks.len().min(NOTICES_MAX);
            let body = encode_body(&ToService::Acks(acks[..part].to_vec()));
            match caller {
                Some(caller) => caller.push(self.target, known.client, known.verifier, body),
                None if self.peer.push(self.target, known.client, known.verifier, body) => {}
                // While a new connection registers, which acknowledges them then.
                None => return,
            }
            acks.drain(..part);
        }
    }
}
