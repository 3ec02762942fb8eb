//! Proofs of who a host is, sound ones and others.

use super::line::{Line, Role, nqn};
use super::world::World;
use levada_base::choices::Choices;
use levada_nvme::authentication::{
    Group, Hash, Names, Prover, SECURITY_PROTOCOL, SECURITY_SPECIFIC, Secret, Secrets,
};
use levada_nvme::fabrics::AuthenticationTransfer;
use levada_nvme::pdu::Pdu;
use levada_nvme::{Command, DataPointer};

const MESSAGE_BYTES: usize = 4096;

/// A proof that a host has begun.
pub(super) struct Attempt {
    prover: Prover,
    /// With the secret that the target knows.
    is_right: bool,
}

/// The command that sends a message, which is within it, or asks for one that is so long at most.
fn transfer(line: &Line, is_send: bool, bytes: usize) -> Command {
    let (protocol, specific) = (SECURITY_PROTOCOL, SECURITY_SPECIFIC);
    let transfer = AuthenticationTransfer { protocol, specific, bytes: bytes as u32 };
    let bytes = bytes as u32;
    let data = match is_send {
        true => DataPointer::InCapsule { offset: 0, bytes },
        false => DataPointer::Transport { bytes },
    };
    transfer.command(is_send, line.new_id()).with_data(data)
}

async fn tell(line: &Line, message: &[u8]) -> Option<()> {
    let answer = line.ask(transfer(line, true, message.len()), message).await?;
    answer.0.status.is_success().then_some(())
}

async fn hear(line: &Line) -> Option<Vec<u8>> {
    let (completion, message) = line.ask(transfer(line, false, MESSAGE_BYTES), &[]).await?;
    completion.status.is_success().then_some(message)
}

fn random(into: &mut [u8]) {
    into.fill(3);
}

impl World {
    fn prover(&self, secrets: Secrets, transaction: u16, group: Group) -> Prover {
        let names = Names { host: nqn("host-0"), subsystem: nqn("guarded") };
        Prover::new(names, secrets, transaction).offering(Hash::ALL, &[group])
    }

    /// From here on the target may take what comes over this connection.
    fn let_in(&self, line: &Line) {
        line.is_let_in.set(true);
        let writers = self.guarded.writers.as_ref().expect("it is guarded");
        writers.borrow_mut().insert(line.tag);
    }

    /// Proves who the host is, as it should be. `None`: something held it up.
    pub async fn prove_soundly(&self, line: &Line) -> Option<()> {
        let mut prover = self.prover(self.secrets.clone(), 0, Group::None);
        tell(line, &prover.negotiate()).await?;
        let challenge = hear(line).await?;
        let reply = prover.reply(&challenge, &mut random).expect("a challenge");
        self.let_in(line);
        tell(line, &reply).await?;
        let success = hear(line).await?;
        let last = prover.confirm(&success).expect("the secrets are right");
        tell(line, &last.expect("the target was to prove itself as well")).await
    }

    /// A message of DH-HMAC-CHAP, or what should be one; of a host that knows the secret, or does not.
    pub async fn prove(&self, input: &mut Choices<'_>) {
        let Some(line) = self.line(input, Role::Guarded) else { return };
        // Mostly what comes next, with what the target says in between.
        const IN_ORDER: [usize; 5] = [0, 1, 2, 1, 3];
        let kind = match input.rarely(4) {
            true => input.below(6),
            false => IN_ORDER[line.stage.replace(line.stage.get() + 1) % IN_ORDER.len()],
        };
        if kind == 1 {
            let room = input.one_of(&[MESSAGE_BYTES, MESSAGE_BYTES, 1024, 16, 0]);
            let command = transfer(&line, false, room);
            line.proving.set(command.id());
            self.command(input, &line, command).await;
            return;
        }
        let heard = line.answers.borrow().get(&line.proving.get()).map(|(_, data)| data.clone());
        let mut message = self.message(input, &line, kind, &heard.unwrap_or_default());
        if input.rarely(8) && !message.is_empty() {
            let at = input.below(message.len());
            message[at] ^= input.byte();
        }
        line.send(input, &Pdu::Command(transfer(&line, true, message.len())), &message).await;
        line.settle().await;
    }

    fn message(&self, input: &mut Choices<'_>, line: &Line, kind: usize, heard: &[u8]) -> Vec<u8> {
        let mut attempt = line.attempt.borrow_mut();
        let message = match kind {
            0 => {
                let mut secrets = self.secrets.clone();
                let is_right = input.rarely(2);
                if !is_right {
                    secrets.host = Secret::random(None, &mut |key: &mut [u8]| key.fill(9));
                }
                let transaction = input.byte().into();
                let group = input.one_of(&[Group::None, Group::None, Group::Ffdhe2048]);
                let prover = self.prover(secrets, transaction, group);
                let message = prover.negotiate();
                *attempt = Some(Attempt { prover, is_right });
                Some(message)
            }
            2 => attempt.as_mut().and_then(|own| {
                let reply = own.prover.reply(heard, &mut random).ok()?;
                if own.is_right {
                    self.let_in(line);
                }
                Some(reply)
            }),
            3 => attempt.as_mut().and_then(|own| own.prover.confirm(heard).ok()).flatten(),
            4 => attempt.as_ref().map(|own| own.prover.failure()),
            _ => {
                let count = input.below(40);
                Some(input.bytes(count))
            }
        };
        message.unwrap_or_default()
    }
}
