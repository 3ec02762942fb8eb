//! The controller's side of a queue.

use super::group::Share;
use super::message::{Body, Message};
use super::{Asked, Explanation, Group, Hash, Names, Random, Secrets, augmented};

/// What the host has to do next, or is to be told.
enum Turn {
    /// To begin.
    Negotiate,
    /// To be told what it is asked.
    Choose { transaction: u16, secure_channel: u8, hash: Hash, group: Group },
    /// To answer.
    Reply(Challenged),
    /// To be told that it is let in, with what it asked in turn.
    Tell { transaction: u16, hash: Hash, response: Option<Vec<u8>> },
    /// To say whether it is satisfied.
    Confirm { transaction: u16 },
    /// To be told why it is not let in.
    Fail { transaction: u16, explanation: Explanation },
}

struct Challenged {
    transaction: u16,
    secure_channel: u8,
    hash: Hash,
    sequence: u32,
    challenge: Vec<u8>,
    share: Option<Share>,
}

/// Finds out whether a host is who it says. Once let in it may have to prove it again.
pub struct Verifier {
    names: Names,
    secrets: Secrets,
    turn: Turn,
    is_authenticated: bool,
    has_failed: bool,
    /// Begun since the last one that went well.
    attempts: u32,
}

/// A share of the largest group takes a core for 26 ms, and so does what is made of the other side's.
const ATTEMPTS_MAX: u32 = 3;

impl Verifier {
    #[must_use]
    pub fn new(names: Names, secrets: Secrets) -> Self {
        let turn = Turn::Negotiate;
        Self { names, secrets, turn, is_authenticated: false, has_failed: false, attempts: 0 }
    }

    /// Who is asked, by whom.
    #[must_use]
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// It has proved who it is, and the last attempt to do so did not fail.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.is_authenticated
    }

    /// The last attempt has failed, and the host was told why, or has said so itself.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Takes what the host sends (Authentication Send). What is wrong with it the host learns when it asks for an answer.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.has_failed = false;
        let (transaction, next) = match Message::parse(bytes) {
            Ok(message) => (message.transaction, self.next(message)),
            Err(_) => (0, Err(Explanation::IncorrectPayload)),
        };
        self.turn = next.unwrap_or_else(|explanation| {
            self.is_authenticated = false;
            Turn::Fail { transaction, explanation }
        });
    }

    fn next(&mut self, message: Message) -> Result<Turn, Explanation> {
        let transaction = message.transaction;
        match (std::mem::replace(&mut self.turn, Turn::Negotiate), message.body) {
            // It may begin anew at any time; who never comes to an end is not let to make work for ever.
            (_, Body::Negotiate { .. }) if self.attempts == ATTEMPTS_MAX => {
                Err(Explanation::Failed)
            }
            (_, Body::Negotiate { secure_channel, hashes, groups }) => {
                self.attempts += 1;
                // A secure channel made of this is not to be had.
                if secure_channel != 0 {
                    return Err(Explanation::ConcatenationMismatch);
                }
                let hash = Hash::ALL.iter().find(|hash| hashes.contains(hash));
                let group = Group::ALL.iter().find(|group| groups.contains(group));
                let hash = *hash.ok_or(Explanation::HashUnusable)?;
                let group = *group.ok_or(Explanation::GroupUnusable)?;
                Ok(Turn::Choose { transaction, secure_channel, hash, group })
            }
            (Turn::Reply(asked), Body::Reply { sequence, response, challenge, public })
                if asked.transaction == transaction =>
            {
                self.judge(asked, sequence, &response, challenge.as_deref(), &public)
            }
            (Turn::Confirm { transaction: ours }, Body::Success2) if ours == transaction => {
                (self.is_authenticated, self.attempts) = (true, 0);
                Ok(Turn::Negotiate)
            }
            (_, Body::Failure { is_of_host: true, .. }) => {
                self.is_authenticated = false;
                self.has_failed = true;
                Ok(Turn::Negotiate)
            }
            _ => Err(Explanation::IncorrectMessage),
        }
    }

    fn judge(
        &mut self,
        asked: Challenged,
        sequence: u32,
        response: &[u8],
        challenge: Option<&[u8]>,
        public: &[u8],
    ) -> Result<Turn, Explanation> {
        let Challenged { transaction, secure_channel, hash, .. } = asked;
        let shared = match &asked.share {
            Some(share) => Some(share.agreed(public).ok_or(Explanation::IncorrectPayload)?),
            None => None,
        };
        let ours = augmented(hash, &asked.challenge, shared.as_deref());
        let of_host =
            Asked { challenge: &ours, sequence: asked.sequence, transaction, secure_channel };
        let key = self.secrets.host.of(&self.names.host);
        if !hash.is_hmac(&key, &of_host.of_host(&self.names), response) {
            return Err(Explanation::Failed);
        }
        let Some(challenge) = challenge else {
            (self.is_authenticated, self.attempts) = (true, 0);
            return Ok(Turn::Tell { transaction, hash, response: None });
        };
        // It asks who we are, and we have nothing to show.
        let own = self.secrets.controller.as_ref().ok_or(Explanation::Failed)?;
        if challenge == asked.challenge {
            // Its own question would be answered by ours.
            return Err(Explanation::Failed);
        }
        let theirs = augmented(hash, challenge, shared.as_deref());
        let of_us = Asked { challenge: &theirs, sequence, transaction, secure_channel };
        let key = own.of(&self.names.subsystem);
        let response = hash.hmac(&key, &of_us.of_controller(&self.names));
        // The first time not before it is satisfied; one that proves it again, while it uses the queue, goes on with that.
        Ok(Turn::Tell { transaction, hash, response: Some(response) })
    }

    /// What the host is told next (Authentication Receive).
    pub fn send(&mut self, random: Random<'_>) -> Vec<u8> {
        let (transaction, body, next) = match std::mem::replace(&mut self.turn, Turn::Negotiate) {
            Turn::Choose { transaction, secure_channel, hash, group } => {
                let mut challenge = vec![0; hash.bytes()];
                random(&mut challenge);
                let mut sequence = [0; 4];
                random(&mut sequence);
                // 0 says that there is none.
                let sequence = u32::from_le_bytes(sequence).max(1);
                let share = Share::new(group, random);
                let public = share.as_ref().map(Share::public).unwrap_or_default();
                let body =
                    Body::Challenge { hash, group, sequence, challenge: challenge.clone(), public };
                let asked =
                    Challenged { transaction, secure_channel, hash, sequence, challenge, share };
                (transaction, body, Turn::Reply(asked))
            }
            Turn::Tell { transaction, hash, response } => {
                let next = match response {
                    Some(_) => Turn::Confirm { transaction },
                    None => Turn::Negotiate,
                };
                (transaction, Body::Success1 { hash, response }, next)
            }
            Turn::Fail { transaction, explanation } => {
                self.has_failed = true;
                (transaction, Body::Failure { is_of_host: false, explanation }, Turn::Negotiate)
            }
            // There is nothing to be told.
            Turn::Negotiate | Turn::Reply(_) | Turn::Confirm { .. } => {
                (self.is_authenticated, self.has_failed) = (false, true);
                let explanation = Explanation::IncorrectMessage;
                (0, Body::Failure { is_of_host: false, explanation }, Turn::Negotiate)
            }
        };
        self.turn = next;
        Message { transaction, body }.to_bytes()
    }
}
