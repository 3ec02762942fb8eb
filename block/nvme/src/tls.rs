//! Keys of TLS: what a host and a subsystem both know, and what TLS is given of it (TCP, 3.6.1.3 to 3.6.1.5, whose sections are cited).
//!
//! A *configured* key is what people hand on. The *retained* one is made of it and of the host's name, so that a key that two hosts were
//! given is not the same key twice. Of that and a [`PskIdentity`] the key is made that TLS uses: another one for each subsystem and each
//! hash.
//!
//! What always holds: keys have no `Debug`, and errors say nothing of them.

use crate::authentication::Hash;
use crate::{Nqn, interchange};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hkdf;
use std::fmt;
use std::str::FromStr;

pub(crate) const PREFIX: &str = "NVMeTLSkey-1";
/// What the digest of a key is made with, behind the names.
const PURPOSE: &str = "NVMe-over-Fabrics";

/// A suite of TLS 1.3, by the identifier of its hash in an identity (3.6.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Suite {
    Aes128GcmSha256 = 1,
    Aes256GcmSha384 = 2,
}

impl Suite {
    pub const ALL: [Self; 2] = [Self::Aes128GcmSha256, Self::Aes256GcmSha384];

    fn hash(self) -> Hash {
        match self {
            Self::Aes128GcmSha256 => Hash::Sha256,
            Self::Aes256GcmSha384 => Hash::Sha384,
        }
    }
}

/// A configured key, as it is handed on: `NVMeTLSkey-1:HASH:BASE64:` (3.6.1.5).
#[derive(Clone, PartialEq, Eq)]
pub struct TlsKey {
    key: Vec<u8>,
    /// It is bound to the host's name with the hash of this suite; `None`: it is used as it is.
    transform: Option<Suite>,
}

/// Why text is no such key. Says nothing of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsKeyError {
    #[error("a key of TLS is written as {PREFIX}:01:BASE64: (as `nvme gen-tls-key` prints it)")]
    Form,
    #[error("the key of TLS names an unknown hash: 00, 01 and 02 are known")]
    Hash,
    #[error("the key of TLS has {bytes} bytes, and not 32 or 48")]
    Length { bytes: usize },
    #[error("the checksum of the key of TLS is wrong: a letter may be missing, or be another")]
    Checksum,
}

impl FromStr for TlsKey {
    type Err = TlsKeyError;

    fn from_str(text: &str) -> Result<Self, TlsKeyError> {
        let (hash, key) = interchange::split(text, PREFIX).ok_or(TlsKeyError::Form)?;
        let transform = match hash {
            "00" => None,
            "01" => Some(Suite::Aes128GcmSha256),
            "02" => Some(Suite::Aes256GcmSha384),
            _ => return Err(TlsKeyError::Hash),
        };
        let (key, is_sound) = interchange::decode(key).ok_or(TlsKeyError::Form)?;
        if ![32, 48].contains(&key.len()) {
            return Err(TlsKeyError::Length { bytes: key.len() });
        }
        if !is_sound {
            return Err(TlsKeyError::Checksum);
        }
        Ok(Self { key, transform })
    }
}

impl TlsKey {
    /// A new one, as long as the values of the suite's hash, and bound to the host's name by it.
    #[must_use]
    pub fn random(suite: Suite, random: crate::authentication::Random<'_>) -> Self {
        let mut key = vec![0; suite.hash().bytes()];
        random(&mut key);
        Self { key, transform: Some(suite) }
    }

    /// As it is written into a file of keys.
    #[must_use]
    pub fn reveal(&self) -> String {
        interchange::encode(PREFIX, self.transform.map_or(0, |suite| suite as u8), &self.key)
    }

    /// What is kept of it for a host (3.6.1.3).
    #[must_use]
    pub fn retained(&self, host: &Nqn) -> RetainedKey {
        let key = match self.transform {
            None => self.key.clone(),
            Some(suite) => {
                expand(suite.hash(), &self.key, "HostNQN", host.as_str(), self.key.len())
                    .expect("names have 223 bytes at most")
            }
        };
        RetainedKey { key }
    }
}

/// What one host and all subsystems know.
#[derive(Clone, PartialEq, Eq)]
pub struct RetainedKey {
    key: Vec<u8>,
}

impl RetainedKey {
    /// The suite that is asked for with it: that whose keys are as long, as nvme-cli has it.
    #[must_use]
    pub fn suite(&self) -> Suite {
        if self.key.len() >= 48 { Suite::Aes256GcmSha384 } else { Suite::Aes128GcmSha256 }
    }

    /// What TLS is given for `identity`; `None`: that tells of another key, or the two names are too long for any (3.6.1.3: an identity
    /// without a digest has 255 bytes at most).
    #[must_use]
    pub fn shared(&self, identity: &PskIdentity) -> Option<SharedKey> {
        let hash = identity.suite.hash();
        let context = match &identity.digest {
            None => identity.to_string(),
            Some(told) => {
                let digest = self.digest(identity);
                if *told != digest {
                    return None;
                }
                format!("{:02} {digest}", identity.suite as u8)
            }
        };
        let key = expand(hash, &self.key, "nvme-tls-psk", &context, hash.bytes())?;
        Some(SharedKey { suite: identity.suite, key })
    }

    fn digest(&self, identity: &PskIdentity) -> String {
        let PskIdentity { suite, host, subsystem, digest: _ } = identity;
        let text = format!("{host} {subsystem} {PURPOSE}");
        STANDARD.encode(suite.hash().hmac(&self.key, text.as_bytes()))
    }
}

/// The key that TLS uses, of the suite whose hash it belongs to.
pub struct SharedKey {
    pub suite: Suite,
    pub key: Vec<u8>,
}

/// By what a host names a key (3.6.1.3): `NVMe0R01 HOST SUBSYSTEM`, or `NVMe1R01 HOST SUBSYSTEM DIGEST`, which tells the key as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PskIdentity {
    pub suite: Suite,
    pub host: Nqn,
    pub subsystem: Nqn,
    digest: Option<String>,
}

impl PskIdentity {
    /// One that does not tell the key, which every other side understands.
    #[must_use]
    pub fn new(suite: Suite, host: Nqn, subsystem: Nqn) -> Self {
        Self { suite, host, subsystem, digest: None }
    }

    /// `None`: it is none, or one of a key that an authentication has made (`G`), of which there are none here.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        // Some send the zero that ends it.
        let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
        let mut fields = std::str::from_utf8(bytes).ok()?.split(' ');
        let (has_digest, suite) = match fields.next()? {
            "NVMe0R01" => (false, Suite::Aes128GcmSha256),
            "NVMe0R02" => (false, Suite::Aes256GcmSha384),
            "NVMe1R01" => (true, Suite::Aes128GcmSha256),
            "NVMe1R02" => (true, Suite::Aes256GcmSha384),
            _ => return None,
        };
        let mut name = || Nqn::new(fields.next()?).ok();
        let (host, subsystem) = (name()?, name()?);
        let digest = if has_digest { Some(fields.next()?.to_owned()) } else { None };
        fields.next().is_none().then_some(Self { suite, host, subsystem, digest })
    }
}

impl fmt::Display for PskIdentity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { suite, host, subsystem, digest } = self;
        let version = u8::from(digest.is_some());
        write!(out, "NVMe{version}R{:02} {host} {subsystem}", *suite as u8)?;
        digest.iter().try_for_each(|digest| write!(out, " {digest}"))
    }
}

/// HKDF-Extract without salt, and HKDF-Expand-Label (RFC 8446, 7.1). `None`: the context has more bytes than a label may have.
fn expand(hash: Hash, secret: &[u8], label: &str, context: &str, bytes: usize) -> Option<Vec<u8>> {
    struct Length(usize);
    impl hkdf::KeyType for Length {
        fn len(&self) -> usize {
            self.0
        }
    }
    let algorithm = match hash {
        Hash::Sha256 => hkdf::HKDF_SHA256,
        Hash::Sha384 => hkdf::HKDF_SHA384,
        Hash::Sha512 => hkdf::HKDF_SHA512,
    };
    let label = format!("tls13 {label}");
    let context_bytes = u8::try_from(context.len()).ok()?;
    let info: [&[u8]; 5] = [
        &(bytes as u16).to_be_bytes(),
        &[label.len() as u8],
        label.as_bytes(),
        &[context_bytes],
        context.as_bytes(),
    ];
    let secret = hkdf::Salt::new(algorithm, &[]).extract(secret);
    let mut key = vec![0; bytes];
    let filled = secret.expand(&info, Length(bytes)).and_then(|made| made.fill(&mut key));
    filled.expect("keys are shorter than 255 values of a hash");
    Some(key)
}

/// Logs must not have them.
macro_rules! without_debug {
    ($($key:ident)*) => { $(
        impl fmt::Debug for $key {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(stringify!($key))
            }
        }
    )* };
}
without_debug!(TlsKey RetainedKey SharedKey);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The specification's example (3.6.1.5), and libnvme's for 48 bytes.
    const SHORT: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    const LONG: &str =
        "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

    fn nqn(name: &str) -> Nqn {
        Nqn::new(name).expect("a name")
    }

    fn key(text: &str) -> TlsKey {
        text.parse().expect("a key")
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn a_key_is_read_as_it_is_written_and_mistakes_are_found() {
        for text in [SHORT, LONG] {
            assert_eq!(key(text).reveal(), text);
        }
        for suite in Suite::ALL {
            let made = TlsKey::random(suite, &mut |bytes| bytes.fill(7));
            assert_eq!(made.reveal().parse(), Ok(made));
        }
        let refused = |text: &str| text.parse::<TlsKey>().expect_err("no key");
        assert_eq!(refused(""), TlsKeyError::Form);
        assert_eq!(refused(SHORT.trim_end_matches(':')), TlsKeyError::Form);
        assert_eq!(refused(&SHORT.replace(":01:", ":03:")), TlsKeyError::Hash);
        assert_eq!(refused(&SHORT.replacen('b', "c", 1)), TlsKeyError::Checksum);
        assert_eq!(refused("NVMeTLSkey-1:00:AAAA:"), TlsKeyError::Form);
        assert_eq!(refused("NVMeTLSkey-1:00:AAAAAAAA:"), TlsKeyError::Length { bytes: 2 });
        assert_eq!(refused("DHHC-1:00:AAAAAAAA:"), TlsKeyError::Form);
        assert!(!format!("{:?}", key(SHORT)).contains("VRLb"));
    }

    /// Digests are libnvme's (its `test/psk.c`). Keys were computed by a program of its own, of HMAC alone.
    #[test]
    fn what_tls_is_given_is_what_others_make_of_it() {
        let (host, subsystem) = (nqn("nqn.psk-test-host"), nqn("nqn.psk-test-subsys"));
        let plain = SHORT.replace(":01:", ":00:");
        for (text, suite, digest, first, second) in [
            (
                SHORT,
                Suite::Aes128GcmSha256,
                "iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
                "05c6503551ad136e6ee32e6eeb3f6d500b69701d84ec71e328f65c7f51566f68",
                "8fc3c0badfd4c0c66fa3ca33aadd0314f85536cc9bc47338b60f3e6e563786ca",
            ),
            (
                SHORT,
                Suite::Aes256GcmSha384,
                "6Kg3oceLHc+BJmPVDUdxBgSFCQu1UxTxI4s7basbb5sIUuv+7YkKpAAEOqUbN0KT",
                "25828ec5d23f8ce359a7242318d967f49a118797589b0941f5908353ad12057905ff22ea497b698ba0851fdf1b34e5d2",
                "a904a96e5b4c392a4fc3b2191542b4e0cd3996983732d3be74808ddad6baa4b5cec3f702610e95c457647f90f1c7fd44",
            ),
            (
                LONG,
                Suite::Aes256GcmSha384,
                "QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
                "f42ba63824cdfe421914c582921f85b5b5b7e2d4df084caeedc9be20b212e8bb0fe8a23e9d59a1c8fc6449da4970a78d",
                "a2b2f943f479fc682555cec89857c80ed004ce92f32a973d5764155bb7e36b17a85368a0666d250afac9282dda2e62ca",
            ),
            (
                &plain,
                Suite::Aes128GcmSha256,
                "quJVUJjp/BImWR0UQay/MjSfEgyAr6TyBOWybS/B404=",
                "ec85300ba827726bd3bc4fc07f3a34aec5fe7c8ccac05fefc2f021c74e0df9ef",
                "a45d08ee4639c7570729bb3e57e905e466a49a15ece5401af906830c4d3bdb0b",
            ),
        ] {
            let retained = key(text).retained(&host);
            let named = PskIdentity::new(suite, host.clone(), subsystem.clone());
            let told = PskIdentity { digest: Some(retained.digest(&named)), ..named.clone() };
            assert_eq!(told.digest.as_deref(), Some(digest), "{text}");
            let keys = [named, told.clone()].map(|identity| {
                assert_eq!(
                    PskIdentity::parse(identity.to_string().as_bytes()),
                    Some(identity.clone())
                );
                hex(&retained.shared(&identity).expect("a key").key)
            });
            assert_eq!(keys, [first, second], "{text}");
            let other = PskIdentity { digest: Some("AAAA".into()), ..told };
            assert!(retained.shared(&other).is_none(), "a digest of another key");
        }
        assert_eq!(key(SHORT).retained(&host).suite(), Suite::Aes128GcmSha256);
        assert_eq!(key(LONG).retained(&host).suite(), Suite::Aes256GcmSha384);
        // Another host, and another subsystem, have other keys.
        let of = |text: &str, host: &str, subsystem: &str| {
            let (host, subsystem) = (nqn(host), nqn(subsystem));
            let retained = key(text).retained(&host);
            let identity = PskIdentity::new(Suite::Aes128GcmSha256, host, subsystem);
            retained.shared(&identity).expect("a key").key
        };
        assert_ne!(of(&plain, "nqn.a", "nqn.x"), of(&plain, "nqn.b", "nqn.x"));
        assert_ne!(of(&plain, "nqn.a", "nqn.x"), of(&plain, "nqn.a", "nqn.y"));
        let long = format!("nqn.{}", "x".repeat(200));
        let identity = PskIdentity::new(Suite::Aes128GcmSha256, nqn(&long), nqn(&long));
        assert!(key(SHORT).retained(&nqn(&long)).shared(&identity).is_none(), "too long");
    }

    #[test]
    fn identities_of_others_are_none() {
        for text in [
            "",
            "NVMe0R01",
            "NVMe0R01 nqn.a",
            "NVMe0R01 nqn.a nqn.b digest",
            "NVMe1R01 nqn.a nqn.b",
            "NVMe0G01 nqn.a nqn.b",
            "NVMe0R03 nqn.a nqn.b",
            "NVMe0R01 a nqn.b",
            "NVMe0R01  nqn.a nqn.b",
            "Client_identity",
        ] {
            assert_eq!(PskIdentity::parse(text.as_bytes()), None, "{text}");
        }
        let with_zero = PskIdentity::parse(b"NVMe0R01 nqn.a nqn.b\0");
        assert_eq!(with_zero, PskIdentity::parse(b"NVMe0R01 nqn.a nqn.b"));
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_as_the_same(bytes in prop::collection::vec(any::<u8>(), 0..80), text in "NVMeTLSkey-1:0[0-3]:[A-Za-z0-9+/=:]{0,70}") {
            crate::fuzz::tls_keys(&bytes);
            crate::fuzz::tls_keys(text.as_bytes());
        }
    }
}
