//! What a queue lets through before its host has proved who it is: the proof alone.

use crate::admin::Answer;
use crate::io::{DATA_BYTES_MAX, whole};
use levada_base::IoVec;
use levada_base::reactor;
use levada_base::sync::Once;
use levada_nvme::authentication::{Names, SECURITY_PROTOCOL, SECURITY_SPECIFIC, Verifier};
use levada_nvme::fabrics::{AuthenticationTransfer, FabricsType};
use levada_nvme::{AdminOpcode, Command, Status};
use std::cell::RefCell;
use std::future::pending;
use std::time::Duration;

/// See the module. One without a verifier is open.
pub(crate) struct Gate {
    verifier: Option<RefCell<Verifier>>,
    /// A proof failed, which the host has been told.
    has_failed: Once,
}

impl Gate {
    pub fn new(verifier: Option<Verifier>) -> Self {
        Self { verifier: verifier.map(RefCell::new), has_failed: Once::default() }
    }

    /// Every command may be carried out.
    pub fn is_open(&self) -> bool {
        self.verifier.as_ref().is_none_or(|verifier| verifier.borrow().is_authenticated())
    }

    /// Carries out what belongs to the proof, and refuses what has to wait for it; `None`: the command may be carried out.
    pub fn pass(&self, command: &Command, data: &IoVec) -> Option<Result<Answer, Status>> {
        let verifier = self.verifier.as_ref()?;
        let is_fabrics = command.opcode() == AdminOpcode::Fabrics as u8;
        let kind = is_fabrics.then(|| FabricsType::of(command.fabrics_type())).flatten();
        let transfer = AuthenticationTransfer::of(command);
        let is_ours =
            (transfer.protocol, transfer.specific) == (SECURITY_PROTOCOL, SECURITY_SPECIFIC);
        match kind {
            Some(FabricsType::AuthenticationSend | FabricsType::AuthenticationReceive)
                if !is_ours || u64::from(transfer.bytes) > DATA_BYTES_MAX =>
            {
                Some(Err(Status::INVALID_FIELD.and_do_not_retry()))
            }
            Some(FabricsType::AuthenticationSend) => {
                let data = whole(data);
                if data.len() != transfer.bytes as usize {
                    return Some(Err(Status::DATA_LENGTH_INVALID.and_do_not_retry()));
                }
                let mut verifier = verifier.borrow_mut();
                verifier.receive(&data);
                if verifier.has_failed() {
                    self.turn_away(verifier.names());
                }
                Some(Ok(Answer::result(0)))
            }
            // As much memory as the host has room for was taken.
            Some(FabricsType::AuthenticationReceive)
                if transfer.bytes != command.data().bytes() =>
            {
                Some(Err(Status::DATA_LENGTH_INVALID.and_do_not_retry()))
            }
            Some(FabricsType::AuthenticationReceive) => {
                let mut verifier = verifier.borrow_mut();
                let mut message = verifier.send(&mut reactor::fill_random);
                if message.len() > transfer.bytes as usize {
                    return Some(Err(Status::INVALID_FIELD.and_do_not_retry()));
                }
                // As much as there is room for, as Linux's target has it.
                message.resize(transfer.bytes as usize, 0);
                if verifier.has_failed() {
                    self.turn_away(verifier.names());
                }
                Some(Ok(Answer::data(&message)))
            }
            _ if verifier.borrow().is_authenticated() => None,
            _ => Some(Err(Status::AUTHENTICATION_REQUIRED.and_do_not_retry())),
        }
    }

    fn turn_away(&self, names: &Names) {
        let Names { host, subsystem } = names;
        tracing::warn!(%host, %subsystem, "an NVMe host does not prove who it is");
        self.has_failed.happen();
    }

    /// Returns when the proof failed, or did not come within `limit`.
    pub async fn turns_away(&self, limit: Duration) {
        let Some(verifier) = &self.verifier else { return pending().await };
        if reactor::timeout(limit, self.has_failed.happened()).await.is_err()
            && verifier.borrow().is_authenticated()
        {
            self.has_failed.happened().await;
        }
    }
}
