//! What a queue lets through before its host has proved who it is: the proof alone.
//!
//! What is computed for it takes long, and is done beside the reactor: others who use the target do not wait for those who have shown
//! nothing yet.

use crate::admin::Answer;
use crate::io::whole;
use levada_base::IoVec;
use levada_base::reactor;
use levada_base::sync::{Once, Semaphore};
use levada_nvme::authentication::{Names, SECURITY_PROTOCOL, SECURITY_SPECIFIC, Verifier};
use levada_nvme::fabrics::{AuthenticationTransfer, FabricsType};
use levada_nvme::{AdminOpcode, Command, Status};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::pending;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// See the module. One without a proof is open.
pub(crate) struct Gate {
    proof: Option<Proof>,
    /// A proof failed, which the host has been told.
    has_failed: Once,
}

struct Proof {
    names: Names,
    /// `None` while a step of it is computed; for good, if that was not possible.
    verifier: RefCell<Option<Verifier>>,
    is_authenticated: Cell<bool>,
    /// The address of the host.
    peer: String,
    /// One step after the other,
    turn: Rc<Semaphore>,
    /// one of all that come from an address,
    of_peer: Rc<Semaphore>,
    /// and so many of all at once.
    at_once: Rc<Semaphore>,
}

/// A proof of the largest group takes a core for 50 ms: hosts that have shown nothing yet take no more of them than that.
const PROOFS_AT_ONCE: u64 = 1;

/// A message of a proof and what comes with it; the longest has some 1,100 bytes, and hosts ask for 4,096.
const MESSAGE_ROOM_MAX: u32 = 16 << 10;

/// Whose turn it is to have a step of a proof computed: one address waits for one step of every other, however many connections those have.
pub(crate) struct Proofs {
    at_once: Rc<Semaphore>,
    /// By place; as long as a queue from there has something to prove.
    peers: RefCell<BTreeMap<String, Weak<Semaphore>>>,
}

impl Default for Proofs {
    fn default() -> Self {
        Self { at_once: Semaphore::new(PROOFS_AT_ONCE), peers: RefCell::default() }
    }
}

impl Proofs {
    /// The turn of all that come from where `peer` is.
    fn of(&self, peer: &str) -> Rc<Semaphore> {
        let place = place_of(peer);
        let mut peers = self.peers.borrow_mut();
        peers.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = peers.get(&place).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Semaphore::new(1);
        peers.insert(place, Rc::downgrade(&turn));
        turn
    }
}

/// Where a peer is, whatever its port. Of IPv6 one host has a network of 64 bits to itself, or may have.
fn place_of(peer: &str) -> String {
    match peer.parse::<SocketAddr>().map(|address| address.ip().to_canonical()) {
        Ok(IpAddr::V4(address)) => address.to_string(),
        Ok(IpAddr::V6(address)) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::from([a, b, c, d, 0, 0, 0, 0]).to_string()
        }
        // It has come some other way.
        Err(_) => peer.to_owned(),
    }
}

/// What becomes of a command.
pub(crate) enum Passage {
    /// It may be carried out.
    Open,
    Shut(Status),
    /// It belongs to the proof.
    Proof(Step),
}

pub(crate) enum Step {
    /// The host says something.
    Send { bytes: usize },
    /// It asks what it is told, for which it has so much room.
    Receive { bytes: usize },
}

impl Gate {
    pub fn new(verifier: Option<Verifier>, proofs: &Proofs, peer: &str) -> Self {
        let proof = verifier.map(|verifier| Proof {
            names: verifier.names().clone(),
            is_authenticated: Cell::new(verifier.is_authenticated()),
            verifier: RefCell::new(Some(verifier)),
            peer: peer.to_owned(),
            turn: Semaphore::new(1),
            of_peer: proofs.of(peer),
            at_once: Rc::clone(&proofs.at_once),
        });
        Self { proof, has_failed: Once::default() }
    }

    /// Every command may be carried out.
    pub fn is_open(&self) -> bool {
        self.proof.as_ref().is_none_or(|proof| proof.is_authenticated.get())
    }

    /// What becomes of a command.
    pub fn look_at(&self, command: &Command) -> Passage {
        let shut = |status: Status| Passage::Shut(status.and_do_not_retry());
        if self.proof.is_none() {
            return Passage::Open;
        }
        let is_fabrics = command.opcode() == AdminOpcode::Fabrics as u8;
        let kind = is_fabrics.then(|| FabricsType::of(command.fabrics_type())).flatten();
        let transfer = AuthenticationTransfer::of(command);
        let is_ours =
            (transfer.protocol, transfer.specific) == (SECURITY_PROTOCOL, SECURITY_SPECIFIC);
        let bytes = transfer.bytes as usize;
        match kind {
            Some(FabricsType::AuthenticationSend | FabricsType::AuthenticationReceive)
                if !is_ours || transfer.bytes > MESSAGE_ROOM_MAX =>
            {
                shut(Status::INVALID_FIELD)
            }
            // As much memory is taken as there are data, or room for them.
            Some(FabricsType::AuthenticationSend | FabricsType::AuthenticationReceive)
                if transfer.bytes != command.data().bytes() =>
            {
                shut(Status::DATA_LENGTH_INVALID)
            }
            Some(FabricsType::AuthenticationSend) => Passage::Proof(Step::Send { bytes }),
            Some(FabricsType::AuthenticationReceive) => Passage::Proof(Step::Receive { bytes }),
            _ if self.is_open() => Passage::Open,
            _ => shut(Status::AUTHENTICATION_REQUIRED),
        }
    }

    /// Carries out what belongs to the proof.
    pub async fn prove(&self, step: Step, data: &IoVec) -> Result<Answer, Status> {
        let Some(proof) = &self.proof else {
            return Err(Status::INVALID_OPCODE.and_do_not_retry());
        };
        match step {
            Step::Send { bytes } => {
                let data = whole(data).into_owned();
                if data.len() != bytes {
                    return Err(Status::DATA_LENGTH_INVALID.and_do_not_retry());
                }
                self.compute(proof, move |verifier| verifier.receive(&data)).await?;
                Ok(Answer::result(0))
            }
            Step::Receive { bytes } => {
                let random = match reactor::is_simulated() {
                    true => reactor::fill_random,
                    false => reactor::fill_random_of_system,
                };
                let said = move |verifier: &mut Verifier| verifier.send(&mut { random });
                let mut message = self.compute(proof, said).await?;
                if message.len() > bytes {
                    return Err(Status::INVALID_FIELD.and_do_not_retry());
                }
                // As much as there is room for, as Linux's target has it.
                message.resize(bytes, 0);
                Ok(Answer::data(&message))
            }
        }
    }

    /// Has a step computed.
    async fn compute<T: Send + 'static>(
        &self,
        proof: &Proof,
        step: impl FnOnce(&mut Verifier) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let turn = proof.turn.acquire(1).await;
        let of_peer = proof.of_peer.acquire(1).await;
        let place = proof.at_once.acquire(1).await;
        let verifier = proof.verifier.take();
        let Some(mut verifier) = verifier else { return Err(Status::INTERNAL_ERROR) };
        let computing = move || {
            let done = step(&mut verifier);
            (done, verifier)
        };
        // In the simulator nothing is beside.
        let computed = match reactor::is_simulated() {
            true => Ok(computing()),
            // It is computed to its end, whoever waits for it: until then nobody else's turn comes.
            false => {
                let turns = (turn, of_peer, place);
                let computed = reactor::spawn(async move {
                    let computed = reactor::aside("nvmet-proof", computing).await;
                    drop(turns);
                    computed
                });
                computed.await.unwrap_or_else(|| Err(std::io::Error::other("the target ends")))
            }
        };
        let (done, verifier) = computed.map_err(|error| {
            tracing::error!(%error, "a proof of an NVMe host cannot be computed");
            self.has_failed.happen();
            Status::INTERNAL_ERROR
        })?;
        proof.is_authenticated.set(verifier.is_authenticated());
        if verifier.has_failed() {
            let Names { host, subsystem } = &proof.names;
            tracing::warn!(peer = proof.peer, %host, %subsystem, "an NVMe host does not prove who it is");
            self.has_failed.happen();
        }
        *proof.verifier.borrow_mut() = Some(verifier);
        Ok(done)
    }

    /// The host is turned away, whatever it has proved.
    pub fn shut(&self) {
        self.has_failed.happen();
    }

    /// Returns when the proof failed, or did not come within `limit`.
    pub async fn turns_away(&self, limit: Duration) {
        if self.proof.is_none() {
            return pending().await;
        }
        if reactor::timeout(limit, self.has_failed.happened()).await.is_err() && self.is_open() {
            self.has_failed.happened().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::{join, select};
    use levada_base::Buf;
    use levada_base::reactor::Reactor;
    use levada_nvme::Nqn;
    use levada_nvme::authentication::{Group, Hash, MESSAGE_BYTES_MAX, Prover, Secret, Secrets};
    use std::pin::pin;
    use std::sync::mpsc::{self, RecvTimeoutError};

    /// Whoever waits for longer waits for ever.
    const LONG: Duration = Duration::from_secs(5);

    /// One to which a host has offered the largest group, whose challenge takes some ten milliseconds.
    async fn about_to_challenge(proofs: &Proofs, peer: &str) -> Gate {
        let [host, subsystem] =
            ["nqn.x:host", "nqn.x:box"].map(|nqn| Nqn::new(nqn).expect("a name"));
        let names = Names { host, subsystem };
        let host = Secret::random(None, &mut reactor::fill_random);
        let secrets = Secrets { host, controller: None };
        let prover = Prover::new(names.clone(), secrets.clone(), 1)
            .offering(&[Hash::Sha256], &[Group::Ffdhe8192]);
        let gate = Gate::new(Some(Verifier::new(names, secrets)), proofs, peer);
        let offer = Buf::copy_of(&prover.negotiate());
        let bytes = offer.len();
        let sent = gate.prove(Step::Send { bytes }, &offer.into_vec()).await;
        assert!(sent.is_ok());
        gate
    }

    #[test]
    fn a_host_is_in_one_place() {
        for (peer, place) in [
            ("192.0.2.1:1", "192.0.2.1"),
            ("[::ffff:192.0.2.1]:2", "192.0.2.1"),
            ("[2001:db8:1:2:3:4:5:6]:1", "2001:db8:1:2::"),
            ("[2001:db8:1:2:9::]:2", "2001:db8:1:2::"),
            ("a host of the simulator", "a host of the simulator"),
        ] {
            assert_eq!(place_of(peer), place);
        }
    }

    /// However many connections an address has, another one waits for a step or two of theirs.
    #[test]
    fn who_comes_often_holds_up_nobody_else() {
        const MANY: u64 = 20;
        Reactor::new().expect("an io_uring").block_on(async {
            let proofs = Proofs::default();
            let (done, bytes) = (Rc::new(Cell::new(0)), MESSAGE_BYTES_MAX);
            let other = about_to_challenge(&proofs, "192.0.2.2:1").await;
            let mut gates = Vec::new();
            for port in 0..MANY {
                gates.push(about_to_challenge(&proofs, &format!("192.0.2.1:{port}")).await);
            }
            for gate in gates {
                let done = Rc::clone(&done);
                reactor::spawn(async move {
                    let challenged = gate.prove(Step::Receive { bytes }, &IoVec::new()).await;
                    assert!(challenged.is_ok());
                    done.set(done.get() + 1);
                });
            }
            // All of them have asked before.
            reactor::sleep(Duration::from_millis(1)).await;
            let before = done.get();
            let challenged = other.prove(Step::Receive { bytes }, &IoVec::new()).await;
            assert!(challenged.is_ok());
            assert!(done.get() <= before + 2 && before + 2 < MANY, "{before}, {}", done.get());
            while done.get() < MANY {
                reactor::sleep(Duration::from_millis(1)).await;
            }
            drop(other);
            drop(proofs.of("192.0.2.3:1"));
            assert_eq!(proofs.peers.borrow().len(), 1, "nobody else has anything to prove");
        });
    }

    /// Has a step computed that takes as long as the sender is there. False: it is there for ever.
    async fn compute_until_told(gate: &Gate, told: mpsc::Receiver<()>) -> Result<bool, Status> {
        let proof = gate.proof.as_ref().expect("there is something to prove");
        gate.compute(proof, move |_| told.recv_timeout(LONG) == Err(RecvTimeoutError::Disconnected))
            .await
    }

    /// Who goes away while its proof is computed leaves nobody the turn before that is done: otherwise connecting and going would be work for
    /// as many threads as there are rounds.
    #[test]
    fn who_goes_away_keeps_its_turn_until_its_proof_is_done() {
        Reactor::new().expect("an io_uring").block_on(async {
            let proofs = Proofs::default();
            let gate = about_to_challenge(&proofs, "192.0.2.1:1").await;
            let (tell, told) = mpsc::channel();
            {
                let computed = compute_until_told(&gate, told);
                let a_moment = reactor::sleep(Duration::from_millis(1));
                select(pin!(computed), pin!(a_moment)).await;
            }
            reactor::sleep(Duration::from_millis(20)).await;
            assert_eq!(proofs.at_once.available(), 0, "its thread goes on");
            drop(tell);
            drop(proofs.at_once.acquire(1).await);
        });
    }

    /// Others have their turns meanwhile.
    #[test]
    fn others_go_on_while_a_proof_is_computed() {
        Reactor::new().expect("an io_uring").block_on(async {
            let gate = about_to_challenge(&Proofs::default(), "192.0.2.1:1").await;
            let (tell, told) = mpsc::channel();
            let others = async {
                reactor::sleep(Duration::from_millis(20)).await;
                drop(tell);
            };
            let (is_told, ()) = join(compute_until_told(&gate, told), others).await;
            assert!(is_told.expect("computed"), "everybody has waited");
            assert!(!gate.is_open());
        });
    }
}
