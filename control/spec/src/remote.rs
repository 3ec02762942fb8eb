//! Enclosures that are reached over the network: `nvme+tcp://HOST[:PORT][,HOST[:PORT]...]/NQN[?hdgst=1&ddgst=1&host=NQN&keys=FILE&tls=1]`.
//!
//! What an [`NvmeUrl`] is, of a subsystem as a whole; what is written here is read again, with the number of a namespace, by whoever
//! connects. Any server of a cluster may have to, from wherever it was started: so keys are a path from the root on.

use levada_nvme::{DISCOVERY_NQN, NvmeUrl};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// The last number means all namespaces.
pub(crate) const NAMESPACE_MOST: u32 = u32::MAX - 1;

/// A subsystem whose namespaces are the drives of an enclosure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnclosureUrl(NvmeUrl);

/// Why a text is no such URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It is no URL of NVMe over TCP at all.
    #[error(transparent)]
    Url(#[from] levada_nvme::UrlError),
    /// Secrets that would be looked for elsewhere at another start.
    #[error("keys=FILE is a path from the root on")]
    RelativeKeys,
    /// An address is written twice, which is one path.
    #[error("the address {address} is there twice")]
    SamePath {
        /// With its port.
        address: String,
    },
    /// Namespaces are written elsewhere.
    #[error("it names a namespace")]
    Namespace,
    /// Who is asked which subsystems there are.
    #[error("it is what tells of subsystems at an address, and has no drives")]
    Discovery,
}

/// True for text that is meant to be such a URL, or that of a namespace.
pub(crate) fn is_url(text: &str) -> bool {
    NvmeUrl::is_meant(text)
}

/// The number of the namespace that a URL leads to.
pub(crate) fn namespace_of(url: &str) -> Option<u32> {
    let url: NvmeUrl = url.parse().ok()?;
    (url.namespace != 0).then_some(url.namespace)
}

impl EnclosureUrl {
    /// The URL of one of its namespaces.
    #[must_use]
    pub fn namespace(&self, number: u32) -> String {
        NvmeUrl { namespace: number, ..self.0.clone() }.to_string()
    }

    /// Hosts and ports, one at least, each a path; no two are the same.
    #[must_use]
    pub fn addresses(&self) -> &[(String, u16)] {
        &self.0.addresses
    }

    /// The same as `HOST:PORT`.
    pub fn paths(&self) -> impl Iterator<Item = String> {
        self.0.addresses.iter().map(NvmeUrl::show_address)
    }

    /// Its qualified name.
    #[must_use]
    pub fn subsystem(&self) -> &str {
        self.0.subsystem.as_str()
    }
}

impl fmt::Display for EnclosureUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Both are one and the same, however they are written. Two names of one address are told apart only by who resolves them.
fn is_same((one, port): &(String, u16), (other, other_port): &(String, u16)) -> bool {
    let is_same_host = match (one.parse::<IpAddr>(), other.parse::<IpAddr>()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one.eq_ignore_ascii_case(other),
    };
    is_same_host && port == other_port
}

impl FromStr for EnclosureUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let url: NvmeUrl = text.parse()?;
        for (at, one) in url.addresses.iter().enumerate() {
            if url.addresses[..at].iter().any(|other| is_same(other, one)) {
                return Err(UrlError::SamePath { address: NvmeUrl::show_address(one) });
            }
        }
        if url.namespace != 0 {
            return Err(UrlError::Namespace);
        }
        if url.subsystem.as_str() == DISCOVERY_NQN {
            return Err(UrlError::Discovery);
        }
        if url.keys.as_ref().is_some_and(|keys| !keys.is_absolute()) {
            return Err(UrlError::RelativeKeys);
        }
        Ok(Self(url))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_enclosure_is_a_subsystem_as_a_whole() {
        for (text, third) in [
            (
                "nvme+tcp://192.0.2.1:4420/nqn.2014-08.org.example:x",
                "nvme+tcp://192.0.2.1:4420/nqn.2014-08.org.example:x?ns=3",
            ),
            (
                "nvme+tcp://a_b.example:1,[2001:db8::1]:4421/nqn.x?hdgst=1&ddgst=1",
                "nvme+tcp://a_b.example:1,[2001:db8::1]:4421/nqn.x?ns=3&hdgst=1&ddgst=1",
            ),
            (
                "nvme+tcp://a:1/nqn.x?host=nqn.x:h&keys=/etc/levada/keys&tls=1",
                "nvme+tcp://a:1/nqn.x?ns=3&host=nqn.x:h&keys=/etc/levada/keys&tls=1",
            ),
        ] {
            let url: EnclosureUrl = text.parse().expect(text);
            assert_eq!(url.to_string(), text);
            assert_eq!(url.namespace(3), third);
            assert_eq!(namespace_of(third), Some(3));
            assert_eq!(namespace_of(text), None);
        }
    }

    #[test]
    fn what_is_none_says_why() {
        let same = |address: &str| UrlError::SamePath { address: address.into() };
        for (wrong, why) in [
            ("nvme+tcp://a,a:4420/nqn.x", same("a:4420")),
            ("nvme+tcp://a.example,A.Example/nqn.x", same("A.Example:4420")),
            ("nvme+tcp://[::1]:1,[0:0:0:0:0:0:0:1]:1/nqn.x", same("[0:0:0:0:0:0:0:1]:1")),
            ("nvme+tcp://a/nqn.x?ns=1", UrlError::Namespace),
            ("nvme+tcp://a/nqn.2014-08.org.nvmexpress.discovery", UrlError::Discovery),
            ("nvme+tcp://a/nqn.x?host=nqn.x:h&keys=keys", UrlError::RelativeKeys),
            ("http://a/nqn.x", levada_nvme::UrlError::Scheme.into()),
            ("nvme+tcp://a/nqn.x?tls=1", levada_nvme::UrlError::NoKeys.into()),
        ] {
            assert_eq!(wrong.parse::<EnclosureUrl>(), Err(why), "{wrong}");
        }
    }
}
