//! What a queue lets through before its host has proved who it is: the proof alone.
//!
//! What is computed for it takes long, and is done beside the reactor: others who use the target do not wait for those who have shown
//! nothing yet.

use crate::admin::Answer;
use crate::io::{DATA_BYTES_MAX, whole};
use levada_base::IoVec;
use levada_base::reactor;
use levada_base::sync::{Once, Semaphore};
use levada_nvme::authentication::{Names, SECURITY_PROTOCOL, SECURITY_SPECIFIC, Verifier};
use levada_nvme::fabrics::{AuthenticationTransfer, FabricsType};
use levada_nvme::{AdminOpcode, Command, Status};
use std::cell::{Cell, RefCell};
use std::future::pending;
use std::rc::Rc;
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
    /// One step after the other,
    turn: Rc<Semaphore>,
    /// and so many of all queues at once.
    at_once: Rc<Semaphore>,
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
    pub fn new(verifier: Option<Verifier>, at_once: Rc<Semaphore>) -> Self {
        let proof = verifier.map(|verifier| Proof {
            names: verifier.names().clone(),
            is_authenticated: Cell::new(verifier.is_authenticated()),
            verifier: RefCell::new(Some(verifier)),
            turn: Semaphore::new(1),
            at_once,
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
                if !is_ours || u64::from(transfer.bytes) > DATA_BYTES_MAX =>
            {
                shut(Status::INVALID_FIELD)
            }
            Some(FabricsType::AuthenticationSend) => Passage::Proof(Step::Send { bytes }),
            // As much memory as the host has room for was taken.
            Some(FabricsType::AuthenticationReceive)
                if transfer.bytes != command.data().bytes() =>
            {
                shut(Status::DATA_LENGTH_INVALID)
            }
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
        let _turn = proof.turn.acquire(1).await;
        let _place = proof.at_once.acquire(1).await;
        let verifier = proof.verifier.take();
        let Some(mut verifier) = verifier else { return Err(Status::INTERNAL_ERROR) };
        let computing = move || {
            let done = step(&mut verifier);
            (done, verifier)
        };
        // In the simulator nothing is beside.
        let computed = match reactor::is_simulated() {
            true => Ok(computing()),
            false => reactor::aside("nvmet-proof", computing).await,
        };
        let (done, verifier) = computed.map_err(|error| {
            tracing::error!(%error, "a proof of an NVMe host cannot be computed");
            self.has_failed.happen();
            Status::INTERNAL_ERROR
        })?;
        proof.is_authenticated.set(verifier.is_authenticated());
        if verifier.has_failed() {
            let Names { host, subsystem } = &proof.names;
            tracing::warn!(%host, %subsystem, "an NVMe host does not prove who it is");
            self.has_failed.happen();
        }
        *proof.verifier.borrow_mut() = Some(verifier);
        Ok(done)
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
    use futures_util::future::select;
    use levada_base::Buf;
    use levada_base::reactor::Reactor;
    use levada_nvme::Nqn;
    use levada_nvme::authentication::{Group, Hash, MESSAGE_BYTES_MAX, Prover, Secret, Secrets};
    use std::pin::pin;

    /// The largest group takes some ten milliseconds, in which others have their turns.
    #[test]
    fn others_go_on_while_a_proof_is_computed() {
        Reactor::new().expect("an io_uring").block_on(async {
            let [host, subsystem] =
                ["nqn.x:host", "nqn.x:box"].map(|nqn| Nqn::new(nqn).expect("a name"));
            let names = Names { host, subsystem };
            let host = Secret::random(None, &mut reactor::fill_random);
            let secrets = Secrets { host, controller: None };
            let prover = Prover::new(names.clone(), secrets.clone(), 1)
                .offering(&[Hash::Sha256], &[Group::Ffdhe8192]);
            let gate = Gate::new(Some(Verifier::new(names, secrets)), Semaphore::new(1));
            let offer = Buf::copy_of(&prover.negotiate());
            let bytes = offer.len();
            let sent = gate.prove(Step::Send { bytes }, &offer.into_vec()).await;
            assert!(sent.is_ok());
            let turns = Cell::new(0);
            let others = async {
                loop {
                    reactor::sleep(Duration::from_millis(1)).await;
                    turns.set(turns.get() + 1);
                }
            };
            let (nothing, bytes) = (IoVec::new(), MESSAGE_BYTES_MAX);
            let challenged = gate.prove(Step::Receive { bytes }, &nothing);
            select(pin!(challenged), pin!(others)).await;
            assert!(turns.get() > 0, "everybody has waited");
            assert!(!gate.is_open());
        });
    }
}
