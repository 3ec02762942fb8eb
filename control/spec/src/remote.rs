//! Enclosures that are reached over the network: `nvme+tcp://HOST[:PORT][,HOST[:PORT]...]/NQN[?hdgst=1&ddgst=1&host=NQN&keys=FILE&tls=1]`.
//!
//! What is written here is read again, as a namespace's URL, by whoever connects: what passes here passes there.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

const SCHEME: &str = "nvme+tcp://";
/// Assigned to NVMe over Fabrics.
const PORT: u16 = 4420;
/// Bytes of the name of a subsystem.
const NQN_MOST: usize = 223;
/// The last number means all namespaces.
pub(crate) const NAMESPACE_MOST: u32 = u32::MAX - 1;

/// A subsystem whose namespaces are the drives of an enclosure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnclosureUrl {
    /// Hosts and ports, one at least, each a path; no two are the same.
    pub addresses: Vec<(String, u16)>,
    /// Its qualified name.
    pub subsystem: String,
    /// Digests of headers.
    pub header_digest: bool,
    /// Digests of data.
    pub data_digest: bool,
    /// The name by which the enclosure knows this cluster, where it wants to.
    pub host: Option<String>,
    /// A file with the secret of that name, or its key of TLS, from the root on.
    pub keys: Option<String>,
    /// Within TLS, or not; `None`: if `keys` has a key for it.
    pub tls: Option<bool>,
}

/// Why a text is no such URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It begins with something else.
    #[error("it does not begin with {SCHEME}")]
    Scheme,
    /// Nothing follows the addresses.
    #[error("it names no subsystem")]
    NoSubsystem,
    /// A name that no subsystem has.
    #[error("{name:?} is no name of a subsystem")]
    Subsystem {
        /// As written.
        name: String,
    },
    /// A name that no host has.
    #[error("{name:?} is no name of a host")]
    Host {
        /// As written.
        name: String,
    },
    /// Secrets that would be looked for elsewhere at another start, or are nobody's.
    #[error("keys=FILE is a path from the root on, with the secret of host=NQN")]
    Keys,
    /// TLS without a key.
    #[error("tls=1 takes a key of TLS, which is in keys=FILE")]
    NoKeys,
    /// An address that is none.
    #[error("{address:?} is no host with a port")]
    Address {
        /// As written.
        address: String,
    },
    /// An address is written twice, which is one path.
    #[error("the address {address} is there twice")]
    SamePath {
        /// With its port.
        address: String,
    },
    /// Namespaces are written elsewhere.
    #[error("it names a namespace")]
    Namespace,
    /// Something else behind the question mark.
    #[error("{option:?} is none of hdgst=1, ddgst=1, host=NQN, keys=FILE, tls=0, tls=1")]
    Option {
        /// As written.
        option: String,
    },
}

/// True for text that is meant to be such a URL, or that of a namespace.
pub(crate) fn is_url(text: &str) -> bool {
    text.starts_with(SCHEME)
}

/// The number of the namespace that a URL leads to.
pub(crate) fn namespace_of(url: &str) -> Option<u32> {
    let (_, options) = url.strip_prefix(SCHEME)?.split_once('?')?;
    options.split('&').find_map(|option| option.strip_prefix("ns="))?.parse().ok()
}

impl EnclosureUrl {
    /// The URL of one of its namespaces.
    #[must_use]
    pub fn namespace(&self, number: u32) -> String {
        self.with_options([format!("ns={number}")].into_iter().chain(self.options()))
    }

    fn options(&self) -> impl Iterator<Item = String> {
        let all = [("hdgst", self.header_digest), ("ddgst", self.data_digest)];
        let digests = all.into_iter().filter(|(_, is_on)| *is_on);
        let host = self.host.iter().map(|host| format!("host={host}"));
        let keys = self.keys.iter().map(|keys| format!("keys={keys}"));
        let tls = self.tls.map(|tls| format!("tls={}", u8::from(tls)));
        digests.map(|(name, _)| format!("{name}=1")).chain(host).chain(keys).chain(tls)
    }

    fn with_options(&self, options: impl Iterator<Item = String>) -> String {
        let addresses: Vec<String> = self.addresses.iter().map(shown).collect();
        let options: Vec<String> = options.collect();
        let mark = if options.is_empty() { "" } else { "?" };
        format!("{SCHEME}{}/{}{mark}{}", addresses.join(","), self.subsystem, options.join("&"))
    }
}

fn shown((host, port): &(String, u16)) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl fmt::Display for EnclosureUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with_options(self.options()))
    }
}

/// A qualified name, of a subsystem or a host.
fn is_nqn(name: &str) -> bool {
    let is_plain = name.bytes().all(|byte| byte.is_ascii_graphic());
    name.starts_with("nqn.") && is_plain && name.len() <= NQN_MOST
}

fn address(text: &str) -> Result<(String, u16), UrlError> {
    let wrong = || UrlError::Address { address: text.into() };
    let (host, port) = match text.strip_prefix('[') {
        Some(bracketed) => {
            let (host, rest) = bracketed.split_once(']').ok_or_else(wrong)?;
            host.parse::<std::net::Ipv6Addr>().map_err(|_| wrong())?;
            let port = if rest.is_empty() { None } else { rest.strip_prefix(':') };
            if port.is_none() && !rest.is_empty() {
                return Err(wrong());
            }
            (host, port)
        }
        None => {
            let (host, port) =
                text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            if host.is_empty() || !host.chars().all(is_plain) {
                return Err(wrong());
            }
            (host, port)
        }
    };
    let port = port.map_or(Ok(PORT), |port| port.parse().map_err(|_| wrong()))?;
    if port == 0 { Err(wrong()) } else { Ok((host.into(), port)) }
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
        let rest = text.strip_prefix(SCHEME).ok_or(UrlError::Scheme)?;
        let (hosts, rest) = rest.split_once('/').ok_or(UrlError::NoSubsystem)?;
        let (name, options) =
            rest.split_once('?').map_or((rest, None), |(name, options)| (name, Some(options)));
        if name.is_empty() {
            return Err(UrlError::NoSubsystem);
        }
        if !is_nqn(name) {
            return Err(UrlError::Subsystem { name: name.into() });
        }
        let addresses = hosts.split(',').map(address).collect::<Result<Vec<_>, _>>()?;
        for (at, one) in addresses.iter().enumerate() {
            if addresses[..at].iter().any(|other| is_same(other, one)) {
                return Err(UrlError::SamePath { address: shown(one) });
            }
        }
        let mut url = Self {
            addresses,
            subsystem: name.into(),
            header_digest: false,
            data_digest: false,
            host: None,
            keys: None,
            tls: None,
        };
        for option in options.into_iter().flat_map(|options| options.split('&')) {
            match option.split_once('=') {
                Some(("hdgst", value @ ("0" | "1"))) => url.header_digest = value == "1",
                Some(("ddgst", value @ ("0" | "1"))) => url.data_digest = value == "1",
                Some(("host", name)) if is_nqn(name) => url.host = Some(name.into()),
                Some(("host", name)) => return Err(UrlError::Host { name: name.into() }),
                Some(("keys", path)) if path.starts_with('/') => url.keys = Some(path.into()),
                Some(("keys", _)) => return Err(UrlError::Keys),
                Some(("tls", value @ ("0" | "1"))) => url.tls = Some(value == "1"),
                Some(("ns", _)) => return Err(UrlError::Namespace),
                _ => return Err(UrlError::Option { option: option.into() }),
            }
        }
        if url.keys.is_some() && url.host.is_none() {
            return Err(UrlError::Keys);
        }
        if url.tls == Some(true) && url.keys.is_none() {
            return Err(UrlError::NoKeys);
        }
        Ok(url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_shown() {
        for (text, shown) in [
            ("nvme+tcp://192.0.2.1:4420/nqn.2014-08.org.example:x", None),
            ("nvme+tcp://a.example:1,[2001:db8::1]:4421/nqn.x?hdgst=1&ddgst=1", None),
            ("nvme+tcp://a:1/nqn.x?hdgst=1&host=nqn.x:h&keys=/etc/levada/keys", None),
            ("nvme+tcp://a:1/nqn.x?host=nqn.x:h&keys=/etc/levada/keys&tls=1", None),
            ("nvme+tcp://host/nqn.x?ddgst=0", Some("nvme+tcp://host:4420/nqn.x")),
            ("nvme+tcp://[::1]/nqn.x?ddgst=1", Some("nvme+tcp://[::1]:4420/nqn.x?ddgst=1")),
        ] {
            let url: EnclosureUrl = text.parse().expect(text);
            assert_eq!(url.to_string(), shown.unwrap_or(text));
            assert_eq!(namespace_of(&url.namespace(7)), Some(7));
        }
        let twice = "nvme+tcp://a,a:4420/nqn.x".parse::<EnclosureUrl>();
        assert_eq!(twice, Err(UrlError::SamePath { address: "a:4420".into() }));
        for (same, address) in [
            ("a.example,A.Example", "A.Example:4420"),
            ("[::1]:1,[0:0:0:0:0:0:0:1]:1", "[0:0:0:0:0:0:0:1]:1"),
        ] {
            let twice = format!("nvme+tcp://{same}/nqn.x").parse::<EnclosureUrl>();
            assert_eq!(twice, Err(UrlError::SamePath { address: address.into() }));
        }
        let namespace = "nvme+tcp://a/nqn.x?ns=1".parse::<EnclosureUrl>();
        assert_eq!(namespace, Err(UrlError::Namespace));
        for wrong in [
            "http://a/nqn.x",
            "nvme+tcp://a",
            "nvme+tcp://a/",
            "nvme+tcp:///nqn.x",
            "nvme+tcp://a,/nqn.x",
            "nvme+tcp://a:0/nqn.x",
            "nvme+tcp://a:65536/nqn.x",
            "nvme+tcp://[::1/nqn.x",
            "nvme+tcp://[::1]4420/nqn.x",
            "nvme+tcp://a b/nqn.x",
            "nvme+tcp://a/nqx.x",
            "nvme+tcp://a/nqn.x?hdgst=yes",
            "nvme+tcp://a/nqn.x?host=me",
            "nvme+tcp://a/nqn.x?keys=/etc/levada/keys",
            "nvme+tcp://a/nqn.x?host=nqn.x:h&keys=keys",
            "nvme+tcp://a/nqn.x?tls=1",
            "nvme+tcp://a/nqn.x?other=1",
            "nvme+tcp://a/nqn.x?",
        ] {
            assert!(wrong.parse::<EnclosureUrl>().is_err(), "{wrong}");
        }
    }
}
