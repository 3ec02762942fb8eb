//! What a client and the service tell each other first on a connection: the client's number, the tail after a restart,
//! what is open and locked.

use super::{Meta, Registration, Told};
use crate::moment::Moment;
use crate::slots::Slots;
use futures_util::future::LocalBoxFuture;
use levada_base::{planted, probe};
use levada_wire::frame::{Class, decode_body};
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest, RECLAIM_LOCKS_MAX, RECLAIM_MAX};
use levada_wire::rpc::{Call, Caller, OnConnect, Refusal, RpcError};
use std::rc::Weak;

/// Registers on every fresh connection.
pub(super) struct Registrar(pub(super) Weak<Meta>);

impl OnConnect for Registrar {
    fn connected<'a>(&'a self, caller: &'a Caller) -> LocalBoxFuture<'a, Result<(), RpcError>> {
        Box::pin(async move {
            match self.0.upgrade() {
                Some(meta) => meta.register(caller).await,
                None => Err(RpcError::Disconnected),
            }
        })
    }
}

impl Meta {
    pub(super) async fn register(&self, caller: &Caller) -> Result<(), RpcError> {
        let sent = Moment::now();
        let register = MetaRequest::Register { uuid: self.uuid };
        let call = Call { flags: self.leases.flags(), ..self.plain_call(&register) };
        let (client, slots, verifier, used, fs) = match self.ask_once(caller, &call).await? {
            MetaReply::Registered { client, slots, verifier, used, fs } => {
                (client, slots, verifier, used, fs)
            }
            _ => return Err(RpcError::Disconnected),
        };
        let cluster = caller.welcome().cluster;
        if self.registration().is_some_and(|known| (known.cluster, known.fs.id) != (cluster, fs.id))
        {
            return Err(RpcError::Refused(Refusal::Cluster));
        }
        let known = self.slots.borrow().clone();
        let pool = known.unwrap_or_else(|| Slots::new(0, slots.max(1)));
        pool.skip(&used);
        *self.slots.borrow_mut() = Some(pool);
        *self.registration.borrow_mut() = Some(Registration { client, verifier, fs, cluster });
        self.renewed.set(sent);
        let known = self.greeted.get();
        if known != Some((verifier, client)) {
            self.leases.forget_all();
            if known.is_some() {
                tracing::info!("the metadata service restarted; reclaiming open files");
                if known.is_some_and(|(_, number)| number != client) {
                    self.locks.lose_all();
                }
                self.acks.borrow_mut().clear();
            }
            if known.is_none_or(|(known, _)| known != verifier) {
                self.hand_back(caller, client).await?;
            }
            // At the start as well: the service may know this client from a former life, and
            // releases nothing until it has heard what of that is still open.
            self.reclaim(caller, client).await?;
            self.greeted.set(Some((verifier, client)));
            self.locks.forgotten();
        }
        self.acknowledge(Some(caller));
        Ok(())
    }

    /// Gives the tail back to a service that restarted. It waits for that, also when there is nothing to
    /// give.
    async fn hand_back(&self, caller: &Caller, client: u64) -> Result<(), RpcError> {
        if self.class != Class::Foreground {
            return Ok(());
        }
        let (life, batches): (_, Vec<_>) = {
            let tail = self.tail.borrow();
            (tail.life, tail.batches.clone().into_iter().collect())
        };
        let _busy = (!batches.is_empty()).then(|| probe::busy("client sends again"));
        let replay = MetaRequest::Replay { life, batches };
        let call = Call { client, ..self.call(&replay, Told::Durable) };
        if planted!("client-tail-not-handed-back") {
            return Ok(());
        }
        match self.ask_once(caller, &call).await? {
            MetaReply::Done => {}
            // It waited in vain for this client, and went on without.
            MetaReply::Failed(MetaFault::Stale) => {
                tracing::error!("changes of names that were not synced are lost");
                self.lost.set(true);
                self.tail_losses.set(self.tail_losses.get() + 1);
            }
            reply => {
                tracing::warn!(?reply, "the service does not take back what is not durable");
                return Err(RpcError::Disconnected);
            }
        }
        self.tail.borrow_mut().batches.clear();
        Ok(())
    }

    /// Tells what this client holds open and has locked, in as many parts as it takes.
    async fn reclaim(&self, caller: &Caller, client: u64) -> Result<(), RpcError> {
        let opens: Vec<_> = self.opens.borrow().iter().map(|(ino, count)| (*ino, *count)).collect();
        let locks = self.locks.all_held();
        let opens = opens.chunks(RECLAIM_MAX).map(|opens| (opens.to_vec(), Vec::new()));
        let locks = locks.chunks(RECLAIM_LOCKS_MAX).map(|locks| (Vec::new(), locks.to_vec()));
        let mut parts = opens.chain(locks).peekable();
        loop {
            let (opens, locks) = parts.next().unwrap_or_default();
            let part = MetaRequest::Reclaim { opens, locks, last: parts.peek().is_none() };
            let call = Call { client, ..self.plain_call(&part) };
            match self.ask_once(caller, &call).await? {
                MetaReply::Done if parts.peek().is_none() => return Ok(()),
                MetaReply::Done => {}
                MetaReply::Failed(MetaFault::Stale) => {
                    self.locks.lose_all();
                    return Ok(());
                }
                reply => {
                    tracing::warn!(?reply, "open files were not reclaimed");
                    return Ok(());
                }
            }
        }
    }

    /// Any fault gives the connection up; the next one tries again.
    async fn ask_once(&self, caller: &Caller, call: &Call) -> Result<MetaReply, RpcError> {
        let frame = caller.call(call).await?;
        if frame.header.flags != 0 {
            return Err(RpcError::Disconnected);
        }
        match decode_body(&frame.body).map_err(|_| RpcError::Malformed)? {
            MetaReply::Failed(MetaFault::Unavailable) => Err(RpcError::Disconnected),
            reply => Ok(reply),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::ids::{BootVerifier, Ino, TargetId};
    use levada_base::reactor::{self, Reactor};
    use levada_wire::channel::Listener;
    use levada_wire::frame::{Frame, encode_body};
    use levada_wire::local::{LinkConfig, Network};
    use levada_wire::meta::FsInfo;
    use levada_wire::rpc::{
        ConnectionId, Handler, Peer, PeerConfig, Pusher, Reply, Router, ServiceConfig, accept_all,
    };
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;
    use std::rc::Rc;
    use std::time::Duration;

    /// A service that knows nobody, and loses its first connections after a part each.
    struct Forgetful {
        network: Network,
        losses: Cell<u32>,
        parts: RefCell<BTreeMap<ConnectionId, Vec<(Ino, u32)>>>,
        all: Cell<Option<ConnectionId>>,
    }

    impl Handler for Forgetful {
        fn handle(&self, request: Frame, from: Pusher) -> LocalBoxFuture<'_, Reply> {
            let reply = match decode_body(&request.body).expect("a request") {
                MetaRequest::Register { .. } => MetaReply::Registered {
                    client: 1,
                    slots: 8,
                    verifier: BootVerifier(1),
                    used: Vec::new(),
                    fs: FsInfo { id: 1, name: String::new(), objects: Vec::new(), lease_ms: 1000 },
                },
                MetaRequest::Reclaim { opens, last, .. } => {
                    self.parts.borrow_mut().entry(from.connection()).or_default().extend(opens);
                    if self.losses.get() > 0 {
                        self.losses.set(self.losses.get() - 1);
                        self.network.disconnect("client", "meta");
                    }
                    if last {
                        self.all.set(Some(from.connection()));
                    }
                    MetaReply::Done
                }
                _ => MetaReply::Done,
            };
            Box::pin(async move { Reply::new(encode_body(&reply)) })
        }
    }

    #[test]
    fn any_number_of_open_files_is_reclaimed() {
        Reactor::simulated(1).block_on(async {
            let network = Network::new(LinkConfig::default());
            let (losses, parts, all) = (Cell::new(2), RefCell::default(), Cell::default());
            let service = Rc::new(Forgetful { network: network.clone(), losses, parts, all });
            let router = Rc::new(Router::default());
            router.insert(TargetId(0), Rc::clone(&service) as _);
            let listener: Rc<dyn Listener> = Rc::new(network.listen("meta"));
            reactor::spawn(accept_all(listener, router, ServiceConfig::default()));
            let peer = Peer::new(network.transport("client"), "meta", PeerConfig::default());
            let meta = Meta::new(TargetId(0), peer, Class::Foreground, [1; 16], false);
            let opens: Vec<_> = (0..300_000).map(|n| (Ino(n << 40), 1 + n as u32 % 3)).collect();
            *meta.opens.borrow_mut() = opens.iter().copied().collect();
            let connected = reactor::timeout(Duration::from_secs(60), meta.connect()).await;
            connected.expect("in time").expect("reclaimed");
            let parts = service.parts.borrow();
            assert_eq!(parts.len(), 3);
            assert!(parts[&service.all.get().expect("came to its end")] == opens);
        });
    }
}
