//! What hostile clients ask of a metadata service: requests of every sort, over several connections at once, under any
//! number and in any order, with breaks and restarts between. The service goes on serving, and what is in its store
//! fits together.
//!
//! Of requests one is left out: a tail that is handed back after a restart (`Replay`) holds rows as they are to be
//! stored. Who was given one is trusted with it.
#![no_main]

use levada_base::Epoch;
use levada_base::ids::{BootVerifier, TargetId};
use levada_base::reactor::{self, Group, JoinHandle, Reactor};
use levada_device::RamDevice;
use levada_kv::{Config, Store};
use levada_meta::{FsConfig, MetaService, ServeConfig};
use levada_wire::channel::Listener;
use levada_wire::frame::{Frame, decode_body, encode_body, flags};
use levada_wire::local::{LinkConfig, Network};
use levada_wire::meta::{MetaReply, MetaRequest};
use levada_wire::rpc::{Call, Peer, PeerConfig, ServiceConfig, accept_all};
use libfuzzer_sys::fuzz_target;
use std::rc::Rc;
use std::time::Duration;

const META: TargetId = TargetId(0);
const PEERS: usize = 3;
const STEPS_MAX: usize = 64;
const STORE: Config = Config { log_bytes: 4 << 20, cache_bytes: 1 << 20 };
/// Longer than a lease, a recovery and every wait together.
const LONG: Duration = Duration::from_secs(300);

fn config() -> ServeConfig {
    let objects = (1..=3).map(|number| (TargetId(number), "objects".to_owned())).collect();
    ServeConfig { objects, slots: 4, cache_bytes: 4 << 10, ..ServeConfig::default() }
}

struct World {
    network: Network,
    area: Rc<RamDevice>,
    peers: Vec<Rc<Peer>>,
    service: Group,
    epoch: u64,
}

impl World {
    async fn new() -> Self {
        let network = Network::new(LinkConfig { codec: false, ..LinkConfig::default() });
        let area = Rc::new(RamDevice::new("meta", 16 << 20));
        let fs = FsConfig {
            uuid: [7; 16],
            name: "fuzz".to_owned(),
            target: 0,
            stripe_count: 2,
            stripe_unit: 64 << 10,
            inodes_max: 40,
            root_mode: 0o755,
            root_uid: 0,
            root_gid: 0,
        };
        let store = Store::create(Rc::clone(&area) as _, Epoch(1), STORE).await.expect("fits");
        MetaService::create(store, fs, config()).await.expect("made");
        let peers = (0..PEERS)
            .map(|number| {
                let transport = network.transport(&format!("peer-{number}"));
                Peer::new(transport, "meta", PeerConfig::default())
            })
            .collect();
        let mut world = Self { network, area, peers, service: Group::new(), epoch: 1 };
        world.start().await;
        world
    }

    /// After a crash, if it ran.
    async fn start(&mut self) {
        self.service.kill();
        self.service = Group::new();
        self.epoch += 1;
        let (area, epoch) = (Rc::clone(&self.area), Epoch(self.epoch));
        let opening = reactor::spawn_in(&self.service, async move {
            let store = Store::open(area, epoch, STORE).await.expect("a store");
            Rc::new(MetaService::open(store, config()).await.expect("a file system"))
        });
        let service = opening.await.expect("no panic");
        let listener: Rc<dyn Listener> = Rc::new(self.network.listen("meta"));
        let handler = Rc::clone(&service) as _;
        reactor::spawn_in(&self.service, accept_all(listener, handler, ServiceConfig::default()));
        reactor::spawn_in(&self.service, async move { service.run().await });
    }

    async fn register(&self, number: usize) -> Option<(u64, BootVerifier)> {
        let body = encode_body(&MetaRequest::Register { uuid: [number as u8; 16] });
        let call = Call { flags: flags::NAMES, ..Call::new(META, body) };
        let frame = self.ask(number, &call).await?;
        match decode_body(&frame.body) {
            Ok(MetaReply::Registered { client, .. }) => Some((client, frame.header.verifier)),
            _ => None,
        }
    }

    async fn ask(&self, number: usize, call: &Call) -> Option<Frame> {
        let limit = reactor::now() + LONG;
        self.peers[number].call(call, Some(limit)).await.ok()
    }
}

/// One step of the input: how, by whom, and what.
struct Step<'a> {
    how: u8,
    peer: usize,
    client: u64,
    slot: u32,
    sequence: u64,
    body: &'a [u8],
}

impl<'a> Step<'a> {
    fn take(input: &mut &'a [u8]) -> Option<Self> {
        let ([how, who, slot, sequence, len], rest) = input.split_first_chunk()?;
        let (body, rest) = rest.split_at(rest.len().min(usize::from(*len)));
        *input = rest;
        Some(Self {
            how: *how,
            peer: usize::from(*who) % PEERS,
            client: u64::from(*who) / PEERS as u64 % 5,
            slot: if *slot & 8 != 0 { u32::MAX } else { u32::from(*slot & 7) },
            sequence: u64::from(*sequence),
            body,
        })
    }
}

async fn run(mut input: &[u8]) {
    let mut world = World::new().await;
    let mut verifier = BootVerifier(0);
    for number in 0..PEERS {
        if let Some((_, now)) = world.register(number).await {
            verifier = now;
        }
    }
    let mut callers = Vec::new();
    for _ in 0..STEPS_MAX {
        let Some(step) = Step::take(&mut input) else { break };
        let Step { how, peer, client, slot, sequence, body } = step;
        match how >> 5 {
            0 => {
                // What a client says by itself: acknowledged notices.
                let _ = world.peers[peer].push(META, client, verifier, body.to_vec());
            }
            1 if how & 1 == 0 => world.peers[peer].disconnect(),
            1 => world.start().await,
            2 => {
                let waits = Duration::from_millis(1 << (how & 15));
                reactor::sleep(waits).await;
            }
            3 => {
                if let Some((_, now)) = world.register(peer).await {
                    verifier = now;
                }
            }
            _ => {
                if let Ok(MetaRequest::Replay { .. }) = decode_body(body) {
                    continue;
                }
                let mut call = Call::new(META, body.to_vec());
                let of = |bit: u8, flag: u32| if how & bit != 0 { flag } else { 0 };
                call.flags =
                    of(1, flags::UNSTABLE) | of(2, flags::NAMES) | of(4, flags::WITH_DIRECTORY);
                call.verifier = if how & 8 != 0 { verifier } else { BootVerifier(0) };
                (call.client, call.slot, call.sequence) = (client, slot, sequence);
                let peer = Rc::clone(&world.peers[peer]);
                let mut asking = reactor::spawn(async move {
                    let limit = reactor::now() + LONG;
                    let _ = peer.call(&call, Some(limit)).await;
                });
                // Some are waited for, some are overtaken.
                if how & 16 != 0 {
                    let _ = reactor::timeout(Duration::from_millis(20), &mut asking).await;
                }
                callers.push(asking);
            }
        }
    }
    reactor::sleep(Duration::from_millis(200)).await;
    // Given up. Not killed: the connections, which a call may have made, are everybody's.
    callers.iter().for_each(JoinHandle::abort);
    // Whatever was asked: somebody who comes now is served.
    reactor::sleep(LONG).await;
    assert!(world.register(0).await.is_some(), "it does not serve any more");
    let space = Call::new(META, encode_body(&MetaRequest::Space));
    assert!(world.ask(0, &space).await.is_some(), "it does not serve any more");
    world.service.kill();
    let epoch = Epoch(world.epoch + 1);
    let store = Store::open(Rc::clone(&world.area) as _, epoch, STORE).await.expect("a store");
    let problems = levada_meta::check(&store).await.expect("reads");
    assert!(problems.is_empty(), "{problems:?}");
}

fuzz_target!(|bytes: &[u8]| Reactor::simulated(1).block_on(run(bytes)));
