//! The host's side of a queue.

use super::group::Share;
use super::message::{Body, Message};
use super::{Asked, Explanation, Group, Hash, Names, Random, Secrets, augmented};

/// Why a host is not let in, or does not want to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAuthenticated {
    #[error("the controller does not let this host in: {0}")]
    Refused(Explanation),
    #[error("the controller does not prove that it knows its secret")]
    NotProven,
    #[error("the controller says what makes no sense here")]
    Malformed,
}

/// What was agreed with a reply, and what the answer must hold.
struct Replied {
    hash: Hash,
    /// What the controller has to respond with, where it is asked.
    expected: Option<(Vec<u8>, Vec<u8>)>,
}

/// Proves to a controller who the host is.
pub struct Prover {
    names: Names,
    secrets: Secrets,
    transaction: u16,
    hashes: Vec<Hash>,
    groups: Vec<Group>,
    replied: Option<Replied>,
    explanation: Explanation,
}

impl Prover {
    /// `transaction` tells this attempt from others of the queue.
    #[must_use]
    pub fn new(names: Names, secrets: Secrets, transaction: u16) -> Self {
        Self {
            names,
            secrets,
            transaction,
            hashes: Hash::ALL.to_vec(),
            groups: Group::ALL.to_vec(),
            replied: None,
            explanation: Explanation::Failed,
        }
    }

    /// Offers these alone.
    #[must_use]
    pub fn offering(self, hashes: &[Hash], groups: &[Group]) -> Self {
        Self { hashes: hashes.to_vec(), groups: groups.to_vec(), ..self }
    }

    fn said(&self, body: Body) -> Vec<u8> {
        Message { transaction: self.transaction, body }.to_bytes()
    }

    /// The first message.
    #[must_use]
    pub fn negotiate(&self) -> Vec<u8> {
        let (hashes, groups) = (self.hashes.clone(), self.groups.clone());
        self.said(Body::Negotiate { secure_channel: 0, hashes, groups })
    }

    /// What the controller says in this attempt.
    fn heard(&mut self, bytes: &[u8]) -> Result<Body, NotAuthenticated> {
        let message = Message::parse(bytes).map_err(|_| {
            self.explanation = Explanation::IncorrectPayload;
            NotAuthenticated::Malformed
        })?;
        match message.body {
            Body::Failure { explanation, .. } => Err(NotAuthenticated::Refused(explanation)),
            body if message.transaction == self.transaction => Ok(body),
            _ => Err(self.out_of_turn()),
        }
    }

    fn out_of_turn(&mut self) -> NotAuthenticated {
        self.explanation = Explanation::IncorrectMessage;
        NotAuthenticated::Malformed
    }

    /// Answers the controller's challenge.
    ///
    /// # Errors
    ///
    /// [`NotAuthenticated`]; the controller is to be told of [`Prover::failure`], unless it is the one that refuses.
    pub fn reply(
        &mut self,
        challenge: &[u8],
        random: Random<'_>,
    ) -> Result<Vec<u8>, NotAuthenticated> {
        let heard = self.heard(challenge)?;
        let Body::Challenge { hash, group, sequence, challenge, public } = heard else {
            return Err(self.out_of_turn());
        };
        // What was not offered would be weaker than what this host wants.
        if !self.hashes.contains(&hash) || !self.groups.contains(&group) {
            return Err(self.out_of_turn());
        }
        let share = Share::new(group, random);
        let shared = match &share {
            Some(share) => match share.agreed(&public) {
                Some(shared) => Some(shared),
                None => return Err(self.out_of_turn()),
            },
            None => None,
        };
        let theirs = augmented(hash, &challenge, shared.as_deref());
        let (transaction, secure_channel) = (self.transaction, 0);
        let of_us = Asked { challenge: &theirs, sequence, transaction, secure_channel };
        let response =
            hash.hmac(&self.secrets.host.of(&self.names.host), &of_us.of_host(&self.names));
        let (mut own_sequence, mut own_challenge, mut expected) = (0, None, None);
        if let Some(secret) = &self.secrets.controller {
            let (mut asked, mut number) = (vec![0; hash.bytes()], [0; 4]);
            random(&mut asked);
            random(&mut number);
            own_sequence = u32::from_le_bytes(number).max(1);
            let ours = augmented(hash, &asked, shared.as_deref());
            let of_controller =
                Asked { challenge: &ours, sequence: own_sequence, transaction, secure_channel };
            let text = of_controller.of_controller(&self.names);
            expected = Some((secret.of(&self.names.subsystem), text));
            own_challenge = Some(asked);
        }
        self.replied = Some(Replied { hash, expected });
        Ok(self.said(Body::Reply {
            sequence: own_sequence,
            response,
            challenge: own_challenge,
            public: share.as_ref().map(Share::public).unwrap_or_default(),
        }))
    }

    /// Hears whether the host is let in; returned is what the controller still has to be told.
    ///
    /// # Errors
    ///
    /// As [`Prover::reply`].
    pub fn confirm(&mut self, success: &[u8]) -> Result<Option<Vec<u8>>, NotAuthenticated> {
        let heard = self.heard(success)?;
        let (Some(replied), Body::Success1 { response, .. }) = (self.replied.take(), heard) else {
            return Err(self.out_of_turn());
        };
        let Some((key, text)) = replied.expected else { return Ok(None) };
        let is_proven = response.is_some_and(|told| replied.hash.is_hmac(&key, &text, &told));
        if is_proven {
            Ok(Some(self.said(Body::Success2)))
        } else {
            Err(NotAuthenticated::NotProven)
        }
    }

    /// What the controller is told when the host gives up.
    #[must_use]
    pub fn failure(&self) -> Vec<u8> {
        self.said(Body::Failure { is_of_host: true, explanation: self.explanation })
    }
}
