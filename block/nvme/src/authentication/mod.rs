//! DH-HMAC-CHAP: host and controller prove to each other that they know a secret, without sending it (Base 2.0, 8.13.5, whose sections are
//! cited here; TP 8006 before).
//!
//! - `secret`: what both know, as people write it. `hash`, `group`: the arithmetic. `message`: what is sent.
//! - [`Verifier`]: the controller's side, [`Prover`]: the host's side, both without I/O: messages in, messages out.
//!
//! What always holds: who does not know the secret is told nothing that would help to guess it but the response to a challenge that was
//! never used before, and which with a group of Diffie and Hellman only an active attacker could check guesses against.

mod group;
mod hash;
mod message;
mod prover;
mod secret;
mod verifier;

pub use group::Group;
pub use hash::Hash;
pub use message::Explanation;
pub use prover::{NotAuthenticated, Prover};
pub use secret::{Secret, SecretError, Secrets};
pub use verifier::Verifier;

#[cfg(any(test, feature = "fuzz"))]
pub(crate) use message::Message;

use crate::Nqn;

/// Security protocol of Authentication Send and Receive, and its two specific bytes (8.13.5).
pub const SECURITY_PROTOCOL: u8 = 0xe9;
pub const SECURITY_SPECIFIC: u16 = 0x0101;
/// No message is longer: two values of 64 bytes, one of 1,024, and a header.
pub const MESSAGE_BYTES_MAX: usize = 2048;

/// Fills bytes that nobody can foresee.
pub type Random<'a> = &'a mut dyn FnMut(&mut [u8]);

/// Who proves itself to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    pub host: Nqn,
    pub subsystem: Nqn,
}

/// What a response is made of, but for the secret (8.13.5.5.3, 8.13.5.5.4).
struct Asked<'a> {
    /// The challenge, with what was agreed in secret where a group was.
    challenge: &'a [u8],
    sequence: u32,
    transaction: u16,
    secure_channel: u8,
}

impl Asked<'_> {
    fn of_host(&self, names: &Names) -> Vec<u8> {
        self.text("HostHost", &names.host, &names.subsystem)
    }

    fn of_controller(&self, names: &Names) -> Vec<u8> {
        self.text("Controller", &names.subsystem, &names.host)
    }

    fn text(&self, role: &str, from: &Nqn, to: &Nqn) -> Vec<u8> {
        let mut text = self.challenge.to_vec();
        text.extend(self.sequence.to_le_bytes());
        text.extend(self.transaction.to_le_bytes());
        text.push(self.secure_channel);
        text.extend(role.as_bytes());
        text.extend(from.as_str().as_bytes());
        text.push(0);
        text.extend(to.as_str().as_bytes());
        text
    }
}

/// A challenge with the session's key in it (8.13.5.5.2): without a group it stays as it is.
fn augmented(hash: Hash, challenge: &[u8], shared: Option<&[u8]>) -> Vec<u8> {
    match shared {
        Some(shared) => hash.hmac(&hash.of(shared), challenge),
        None => challenge.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names() -> Names {
        let nqn = |name: &str| Nqn::new(format!("nqn.2014-08.org.example:{name}")).expect("a name");
        Names { host: nqn("host"), subsystem: nqn("subsystem") }
    }

    fn counting(from: u8) -> impl FnMut(&mut [u8]) {
        let mut next = from;
        move |bytes| {
            for byte in bytes {
                next = next.wrapping_mul(5).wrapping_add(17);
                *byte = next;
            }
        }
    }

    fn secret(seed: u8, transform: Option<Hash>) -> Secret {
        Secret::random(transform, &mut counting(seed))
    }

    /// Lets both talk; true: the controller lets the host in. An error is the host's.
    fn talk(
        host: &Secrets,
        controller: &Secrets,
        groups: &[Group],
    ) -> Result<bool, NotAuthenticated> {
        let mut prover = Prover::new(names(), host.clone(), 7).offering(Hash::ALL, groups);
        let mut verifier = Verifier::new(names(), controller.clone());
        verifier.receive(&prover.negotiate());
        let challenge = verifier.send(&mut counting(1));
        let reply = match prover.reply(&challenge, &mut counting(2)) {
            Ok(reply) => reply,
            Err(error) => {
                verifier.receive(&prover.failure());
                assert!(!verifier.is_authenticated());
                return Err(error);
            }
        };
        verifier.receive(&reply);
        match prover.confirm(&verifier.send(&mut counting(3))) {
            Ok(Some(last)) => {
                assert!(!verifier.is_authenticated(), "the host may still not be satisfied");
                verifier.receive(&last);
            }
            Ok(None) => {}
            Err(error) => {
                verifier.receive(&prover.failure());
                assert!(!verifier.is_authenticated());
                return Err(error);
            }
        }
        Ok(verifier.is_authenticated())
    }

    #[test]
    fn who_knows_the_secrets_is_let_in_with_every_hash_and_group() {
        for transform in [None, Some(Hash::Sha256), Some(Hash::Sha384), Some(Hash::Sha512)] {
            for is_mutual in [false, true] {
                let controller = is_mutual.then(|| secret(9, transform));
                let secrets = Secrets { host: secret(3, transform), controller };
                for group in [Group::None, Group::Ffdhe2048, Group::Ffdhe3072] {
                    assert_eq!(talk(&secrets, &secrets, &[group]), Ok(true));
                }
            }
        }
    }

    #[test]
    fn a_wrong_secret_lets_nobody_in_on_either_side() {
        let of = |host, controller: Option<u8>| Secrets {
            host: secret(host, None),
            controller: controller.map(|seed| secret(seed, None)),
        };
        let refused = Err(NotAuthenticated::Refused(Explanation::Failed));
        for group in [Group::None, Group::Ffdhe2048] {
            assert_eq!(talk(&of(1, None), &of(2, None), &[group]), refused);
            assert_eq!(talk(&of(1, Some(3)), &of(2, Some(3)), &[group]), refused);
            // The controller is somebody else.
            assert_eq!(
                talk(&of(1, Some(3)), &of(1, Some(4)), &[group]),
                Err(NotAuthenticated::NotProven)
            );
            assert_eq!(talk(&of(1, Some(3)), &of(1, None), &[group]), refused);
            // The controller proves itself only to who wants to know.
            assert_eq!(talk(&of(1, None), &of(1, Some(4)), &[group]), Ok(true));
        }
        let nothing = talk(&of(1, None), &of(1, None), &[]);
        assert_eq!(nothing, Err(NotAuthenticated::Refused(Explanation::GroupUnusable)));
    }

    #[test]
    fn a_message_out_of_turn_ends_the_attempt_and_a_new_one_may_follow() {
        let secrets = Secrets { host: secret(1, None), controller: None };
        let mut prover = Prover::new(names(), secrets.clone(), 7);
        let mut verifier = Verifier::new(names(), secrets.clone());
        let negotiate = prover.negotiate();
        verifier.receive(&negotiate);
        let reply =
            prover.reply(&verifier.send(&mut counting(1)), &mut counting(2)).expect("a reply");
        // Replayed against another challenge.
        verifier.receive(&negotiate);
        let _ = verifier.send(&mut counting(8));
        verifier.receive(&reply);
        let told = prover.confirm(&verifier.send(&mut counting(9)));
        assert_eq!(told, Err(NotAuthenticated::Refused(Explanation::Failed)));
        assert!(verifier.has_failed() && !verifier.is_authenticated());
        verifier.receive(&reply);
        assert!(!verifier.is_authenticated(), "nothing was asked");
        // Who was let in stays so only as long as another attempt does not fail.
        let mut prover = Prover::new(names(), secrets, 8);
        verifier.receive(&prover.negotiate());
        let reply =
            prover.reply(&verifier.send(&mut counting(4)), &mut counting(5)).expect("a reply");
        verifier.receive(&reply);
        assert!(verifier.is_authenticated());
        verifier.receive(b"nonsense");
        assert!(!verifier.is_authenticated());
    }

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_built(bytes in prop::collection::vec(any::<u8>(), 0..1500)) {
            if let Ok(message) = Message::parse(&bytes) {
                prop_assert_eq!(Message::parse(&message.to_bytes()), Ok(message));
            }
        }
    }
}
