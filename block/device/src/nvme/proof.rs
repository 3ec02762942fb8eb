//! How a host proves to a controller who it is, on each queue, and has it prove itself (DH-HMAC-CHAP).

use super::controller::{Admin, ConnectError};
use levada_base::stream::ByteStream;
use levada_base::{Buf, BufMut, IoVec, IoVecMut, reactor};
use levada_nvme::Status;
use levada_nvme::authentication::{
    MESSAGE_BYTES_MAX, Names, NotAuthenticated, Prover, SECURITY_PROTOCOL, SECURITY_SPECIFIC,
    Secrets,
};
use levada_nvme::fabrics::{AuthenticationTransfer, MUST_AUTHENTICATE, MUST_SECURE};

fn transfer(bytes: usize) -> AuthenticationTransfer {
    let (protocol, specific) = (SECURITY_PROTOCOL, SECURITY_SPECIFIC);
    AuthenticationTransfer { protocol, specific, bytes: bytes as u32 }
}

/// A target without authentication says so of its first message.
fn does_not_know_how(status: Status) -> bool {
    status.is(Status::INVALID_OPCODE) || status.is(Status::INVALID_FIELD)
}

impl<S: ByteStream + 'static> Admin<'_, S> {
    /// Does what the answer to Connect, `connected`, asks for. A host that knows a secret of the subsystem's does not go on with who does
    /// not prove that it knows it as well, asked for or not: that may be anybody. (Linux's target, 7.3 and not yet 6.12, asks on the
    /// admin queue only, and proves itself on the others when a host wants to know.)
    ///
    /// # Errors
    ///
    /// A [`ConnectError`]: it is not let in, or does not want to be.
    pub async fn prove(
        &self,
        names: &Names,
        secrets: Option<&Secrets>,
        connected: u64,
    ) -> Result<(), ConnectError> {
        if connected & MUST_SECURE != 0 {
            return Err(ConnectError::SecureChannelRequired);
        }
        let is_asked = connected & MUST_AUTHENTICATE != 0;
        match secrets {
            None if is_asked => Err(ConnectError::AuthenticationRequired),
            Some(secrets) if is_asked => self.answer(names, secrets).await,
            Some(secrets) if secrets.controller.is_some() => {
                match self.answer(names, secrets).await {
                    Err(ConnectError::Refused { status, .. }) if does_not_know_how(status) => {
                        Err(NotAuthenticated::NotProven.into())
                    }
                    proven => proven,
                }
            }
            None | Some(_) => Ok(()),
        }
    }

    async fn answer(&self, names: &Names, secrets: &Secrets) -> Result<(), ConnectError> {
        let mut transaction = [0; 2];
        reactor::fill_random(&mut transaction);
        let transaction = u16::from_le_bytes(transaction);
        let mut prover = Prover::new(names.clone(), secrets.clone(), transaction);
        self.say(prover.negotiate()).await?;
        let challenge = self.hear().await?;
        let reply = prover.reply(&challenge, &mut reactor::fill_random);
        let reply = self.or_failure(&prover, reply).await?;
        let success = async {
            self.say(reply).await?;
            self.hear().await
        };
        let success = success.await.map_err(|error| match error {
            ConnectError::Ended { why } => ConnectError::HungUpOnProof { why },
            error => error,
        })?;
        let last = prover.confirm(&success);
        match self.or_failure(&prover, last).await? {
            Some(last) => self.say(last).await,
            None => Ok(()),
        }
    }

    /// Tells the controller, unless it is the one that refuses.
    async fn or_failure<T>(
        &self,
        prover: &Prover,
        outcome: Result<T, NotAuthenticated>,
    ) -> Result<T, ConnectError> {
        if let Err(NotAuthenticated::NotProven | NotAuthenticated::Malformed) = outcome {
            // It is given up whatever comes of this.
            let _ = self.say(prover.failure()).await;
        }
        Ok(outcome?)
    }

    async fn say(&self, message: Vec<u8>) -> Result<(), ConnectError> {
        let command = transfer(message.len()).command(true, 0);
        let from = Buf::copy_of(&message).into_vec();
        self.ask("Authentication Send", command, from, IoVecMut::new()).await.map(drop)
    }

    async fn hear(&self) -> Result<Buf, ConnectError> {
        let command = transfer(MESSAGE_BYTES_MAX).command(false, 0);
        // What a shorter message leaves is nothing that was there before.
        let into = BufMut::zeroed(MESSAGE_BYTES_MAX).into_vec();
        let asked = self.ask("Authentication Receive", command, IoVec::new(), into).await;
        let (_, mut into) = asked?;
        Ok(into.remove(0).freeze())
    }
}
