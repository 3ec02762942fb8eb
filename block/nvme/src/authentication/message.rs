//! What is sent (8.13.5.3 to 8.13.5.7). Places are those of the whole message.

use super::{Group, Hash};
use crate::field::{put, u16_at, u32_at};

/// Common messages, of which failures are some, and those of DH-HMAC-CHAP.
const COMMON: u8 = 0;
const DH_HMAC_CHAP: u8 = 1;
/// Their identifiers.
const NEGOTIATE: u8 = 0x00;
const CHALLENGE: u8 = 0x01;
const REPLY: u8 = 0x02;
const SUCCESS1: u8 = 0x03;
const SUCCESS2: u8 = 0x04;
const FAILURE2: u8 = 0xf0;
const FAILURE1: u8 = 0xf1;
/// Of a protocol in Negotiate.
const PROTOCOL_BYTES: usize = 64;
/// Room for identifiers of hashes there, and of groups behind them.
const IDS_MAX: usize = 30;
/// The only reason of a failure that there is: authentication failed.
const AUTHENTICATION_FAILURE: u8 = 1;

/// Bytes that are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Why an attempt fails, for the other side (8.13.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Explanation {
    #[error("it does not know the secret")]
    Failed = 1,
    #[error("the protocol cannot be used")]
    ProtocolUnusable = 2,
    #[error("secure channels do not match")]
    ConcatenationMismatch = 3,
    #[error("no hash is known to both")]
    HashUnusable = 4,
    #[error("no group is known to both")]
    GroupUnusable = 5,
    #[error("a message is malformed")]
    IncorrectPayload = 6,
    #[error("a message is out of turn")]
    IncorrectMessage = 7,
}

impl Explanation {
    fn of(code: u8) -> Self {
        match code {
            2 => Self::ProtocolUnusable,
            3 => Self::ConcatenationMismatch,
            4 => Self::HashUnusable,
            5 => Self::GroupUnusable,
            6 => Self::IncorrectPayload,
            7 => Self::IncorrectMessage,
            _ => Self::Failed,
        }
    }
}

/// A message, with the transaction that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub transaction: u16,
    pub body: Body,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// What the host can do. Identifiers that are not known are left out.
    Negotiate {
        secure_channel: u8,
        hashes: Vec<Hash>,
        groups: Vec<Group>,
    },
    /// What the controller wants to see.
    Challenge {
        hash: Hash,
        group: Group,
        sequence: u32,
        challenge: Vec<u8>,
        public: Vec<u8>,
    },
    /// What the host shows, and wants to see.
    Reply {
        sequence: u32,
        response: Vec<u8>,
        challenge: Option<Vec<u8>>,
        public: Vec<u8>,
    },
    /// The host is let in; what it wanted to see.
    Success1 {
        hash: Hash,
        response: Option<Vec<u8>>,
    },
    /// The host is satisfied as well.
    Success2,
    Failure {
        is_of_host: bool,
        explanation: Explanation,
    },
}

/// Takes the rest of a message apart.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take(&mut self, bytes: usize) -> Result<Vec<u8>, Malformed> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken.to_vec())
    }
}

/// The header that is there of a message: as long as `bytes` says.
fn header(message: &[u8], bytes: usize) -> Result<(&[u8], Rest<'_>), Malformed> {
    let (header, rest) = message.split_at_checked(bytes).ok_or(Malformed)?;
    Ok((header, Rest(rest)))
}

impl Message {
    /// Reads a message; what is behind its end is padding.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let (common, _) = header(bytes, 6)?;
        let transaction = u16_at(common, 4);
        let body = match (common[0], common[1]) {
            (COMMON, NEGOTIATE) => negotiate(bytes)?,
            (DH_HMAC_CHAP, CHALLENGE) => {
                let (header, mut rest) = header(bytes, 16)?;
                let hash = Hash::of_id(header[8]).ok_or(Malformed)?;
                let group = Group::of_id(header[9]).ok_or(Malformed)?;
                if usize::from(header[6]) != hash.bytes() {
                    return Err(Malformed);
                }
                let public_bytes = usize::from(u16_at(header, 10));
                let sequence = u32_at(header, 12);
                let challenge = rest.take(hash.bytes())?;
                Body::Challenge {
                    hash,
                    group,
                    sequence,
                    challenge,
                    public: rest.take(public_bytes)?,
                }
            }
            (DH_HMAC_CHAP, REPLY) => {
                let (header, mut rest) = header(bytes, 16)?;
                let (value_bytes, is_mutual) = (usize::from(header[6]), header[8] & 1 != 0);
                let public_bytes = usize::from(u16_at(header, 10));
                let sequence = u32_at(header, 12);
                let response = rest.take(value_bytes)?;
                // There is room for it in any case.
                let challenge = Some(rest.take(value_bytes)?).filter(|_| is_mutual);
                Body::Reply { sequence, response, challenge, public: rest.take(public_bytes)? }
            }
            (DH_HMAC_CHAP, SUCCESS1) => {
                let (header, mut rest) = header(bytes, 16)?;
                let hash = Hash::ALL.iter().find(|hash| hash.bytes() == usize::from(header[6]));
                let hash = *hash.ok_or(Malformed)?;
                let response = match header[8] & 1 {
                    0 => None,
                    _ => Some(rest.take(hash.bytes())?),
                };
                Body::Success1 { hash, response }
            }
            (DH_HMAC_CHAP, SUCCESS2) => Body::Success2,
            (COMMON, code @ (FAILURE1 | FAILURE2)) => {
                let (header, _) = header(bytes, 8)?;
                let explanation = Explanation::of(header[7]);
                Body::Failure { is_of_host: code == FAILURE2, explanation }
            }
            _ => return Err(Malformed),
        };
        Ok(Self { transaction, body })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let build = |kind: u8, code: u8, bytes: usize| {
            let mut message = vec![0; bytes];
            (message[0], message[1]) = (kind, code);
            put(&mut message, 4, &self.transaction.to_le_bytes());
            message
        };
        match &self.body {
            Body::Negotiate { secure_channel, hashes, groups } => {
                let mut message = build(COMMON, NEGOTIATE, 8 + PROTOCOL_BYTES);
                message[6] = *secure_channel;
                // One protocol, which is this one.
                message[7] = 1;
                message[8] = DH_HMAC_CHAP;
                message[10] = hashes.len() as u8;
                message[11] = groups.len() as u8;
                let hashes: Vec<u8> = hashes.iter().map(|hash| *hash as u8).collect();
                let groups: Vec<u8> = groups.iter().map(|group| *group as u8).collect();
                put(&mut message, 12, &hashes);
                put(&mut message, 12 + IDS_MAX, &groups);
                message
            }
            Body::Challenge { hash, group, sequence, challenge, public } => {
                let mut message = build(DH_HMAC_CHAP, CHALLENGE, 16);
                message[6] = hash.bytes() as u8;
                (message[8], message[9]) = (*hash as u8, *group as u8);
                put(&mut message, 10, &(public.len() as u16).to_le_bytes());
                put(&mut message, 12, &sequence.to_le_bytes());
                [message, challenge.clone(), public.clone()].concat()
            }
            Body::Reply { sequence, response, challenge, public } => {
                let mut message = build(DH_HMAC_CHAP, REPLY, 16);
                message[6] = response.len() as u8;
                message[8] = u8::from(challenge.is_some());
                put(&mut message, 10, &(public.len() as u16).to_le_bytes());
                put(&mut message, 12, &sequence.to_le_bytes());
                let challenge = challenge.clone().unwrap_or_else(|| vec![0; response.len()]);
                [message, response.clone(), challenge, public.clone()].concat()
            }
            Body::Success1 { hash, response } => {
                let mut message = build(DH_HMAC_CHAP, SUCCESS1, 16);
                message[6] = hash.bytes() as u8;
                message[8] = u8::from(response.is_some());
                // There is room for it in any case, without which Linux takes no success.
                let response = response.clone().unwrap_or_else(|| vec![0; hash.bytes()]);
                [message, response].concat()
            }
            Body::Success2 => build(DH_HMAC_CHAP, SUCCESS2, 16),
            Body::Failure { is_of_host, explanation } => {
                let code = if *is_of_host { FAILURE2 } else { FAILURE1 };
                let mut message = build(COMMON, code, 8);
                (message[6], message[7]) = (AUTHENTICATION_FAILURE, *explanation as u8);
                message
            }
        }
    }
}

/// Of the protocols that are offered the first that is this one.
fn negotiate(bytes: &[u8]) -> Result<Body, Malformed> {
    let (header, rest) = header(bytes, 8)?;
    let protocols = rest.0.chunks_exact(PROTOCOL_BYTES).take(usize::from(header[7]));
    let (mut hashes, mut groups) = (Vec::new(), Vec::new());
    if let Some(ours) = protocols.into_iter().find(|protocol| protocol[0] == DH_HMAC_CHAP) {
        let ids = |from: usize, count: u8| {
            ours.get(from..from + usize::from(count).min(IDS_MAX)).unwrap_or_default().iter()
        };
        hashes.extend(ids(4, ours[2]).filter_map(|id| Hash::of_id(*id)));
        groups.extend(ids(4 + IDS_MAX, ours[3]).filter_map(|id| Group::of_id(*id)));
    }
    Ok(Body::Negotiate { secure_channel: header[6], hashes, groups })
}
