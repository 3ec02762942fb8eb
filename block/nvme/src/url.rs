//! A namespace or a subsystem as a URL: `nvme+tcp://HOST:PORT[,HOST:PORT...]/NQN[?ns=N&hdgst=1&ddgst=1&host=NQN&keys=FILE&tls=1]`.
//!
//! The addresses lead to the same subsystem. A host is a name or an address, of IPv6 in brackets; a port that is not there is 4420.
//! Without `ns` it is the only namespace of the subsystem. `host` is who asks, for targets that let in those they know by name, and
//! `keys` a file with its secret, by which it proves that it is, and its key of TLS. Who has a key there speaks TLS: `tls=0` says not to,
//! `tls=1` that there has to be one.

use crate::pdu::Digests;
use crate::{Nqn, NqnError};
use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;

const SCHEME: &str = "nvme+tcp://";
/// Assigned to NVMe over Fabrics.
const PORT: u16 = 4420;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeUrl {
    /// Hosts and ports, one at least.
    pub addresses: Vec<(String, u16)>,
    pub subsystem: Nqn,
    /// 0: the only one.
    pub namespace: u32,
    pub digests: Digests,
    /// `None`: a host that nobody knows.
    pub host: Option<Nqn>,
    /// Where the secrets of `host` are.
    pub keys: Option<PathBuf>,
    /// Within TLS, or not; `None`: if `keys` has a key for it.
    pub tls: Option<bool>,
}

/// Why something is no such URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("it does not begin with {SCHEME}")]
    Scheme,
    #[error("it names no subsystem, as in {SCHEME}192.0.2.1:4420/nqn.2014-08.org.example:name")]
    NoSubsystem,
    #[error(transparent)]
    Subsystem(#[from] NqnError),
    #[error("{address:?} is neither HOST nor HOST:PORT")]
    Address { address: String },
    #[error("{option:?} is none of ns=NUMBER, hdgst=1, ddgst=1, host=NQN, keys=FILE, tls=0, tls=1")]
    Option { option: String },
    #[error("keys=FILE has the secrets of a host, which host=NQN names")]
    WhoseKeys,
    #[error("tls=1 takes a key of TLS, which is in keys=FILE")]
    NoKeys,
}

impl NvmeUrl {
    /// True for text that is meant to be such a URL.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        text.starts_with(SCHEME)
    }

    /// Who tells what there is at an address, `HOST[:PORT]`, asked by a host that nobody knows.
    ///
    /// # Errors
    ///
    /// [`UrlError::Address`].
    pub fn discovery(address: &str) -> Result<Self, UrlError> {
        Ok(Self::new(vec![parse_address(address)?], Nqn::discovery()))
    }

    fn new(addresses: Vec<(String, u16)>, subsystem: Nqn) -> Self {
        let digests = Digests::default();
        let (host, keys, tls) = (None, None, None);
        Self { addresses, subsystem, namespace: 0, digests, host, keys, tls }
    }

    /// An address as a URL has it.
    #[must_use]
    pub fn show_address((host, port): &(String, u16)) -> String {
        match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        }
    }
}

fn parse_address(text: &str) -> Result<(String, u16), UrlError> {
    let wrong = || UrlError::Address { address: text.to_owned() };
    let (host, port) = match text.strip_prefix('[') {
        Some(bracketed) => {
            let (host, port) = bracketed.split_once(']').ok_or_else(wrong)?;
            host.parse::<Ipv6Addr>().map_err(|_| wrong())?;
            let port = match port {
                "" => None,
                port => Some(port.strip_prefix(':').ok_or_else(wrong)?),
            };
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
    if port == 0 { Err(wrong()) } else { Ok((host.to_owned(), port)) }
}

impl FromStr for NvmeUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let rest = text.strip_prefix(SCHEME).ok_or(UrlError::Scheme)?;
        let (hosts, rest) = rest.split_once('/').ok_or(UrlError::NoSubsystem)?;
        let (subsystem, query) = match rest.split_once('?') {
            Some((subsystem, query)) => (subsystem, Some(query)),
            None => (rest, None),
        };
        if subsystem.is_empty() {
            return Err(UrlError::NoSubsystem);
        }
        let addresses = hosts.split(',').map(parse_address).collect::<Result<Vec<_>, _>>()?;
        let mut url = Self::new(addresses, Nqn::new(subsystem)?);
        for option in query.into_iter().flat_map(|query| query.split('&')) {
            let wrong = || UrlError::Option { option: option.to_owned() };
            let is_on = |value: &str| match value {
                "1" => Ok(true),
                "0" => Ok(false),
                _ => Err(wrong()),
            };
            match option.split_once('=').ok_or_else(wrong)? {
                ("ns", number) => {
                    let number: u32 = number.parse().map_err(|_| wrong())?;
                    // 0 is none, and the last one means all of them.
                    let is_one = (1..u32::MAX).contains(&number);
                    url.namespace = if is_one { number } else { return Err(wrong()) };
                }
                ("hdgst", value) => url.digests.header = is_on(value)?,
                ("ddgst", value) => url.digests.data = is_on(value)?,
                ("host", name) => url.host = Some(Nqn::new(name)?),
                ("keys", path) if !path.is_empty() => url.keys = Some(path.into()),
                ("tls", value) => url.tls = Some(is_on(value)?),
                _ => return Err(wrong()),
            }
        }
        if url.keys.is_some() && url.host.is_none() {
            return Err(UrlError::WhoseKeys);
        }
        if url.tls == Some(true) && url.keys.is_none() {
            return Err(UrlError::NoKeys);
        }
        Ok(url)
    }
}

impl fmt::Display for NvmeUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<String> = self.addresses.iter().map(Self::show_address).collect();
        write!(out, "{SCHEME}{}/{}", addresses.join(","), self.subsystem)?;
        let mut options = Vec::new();
        if self.namespace != 0 {
            options.push(format!("ns={}", self.namespace));
        }
        for (name, is_on) in [("hdgst", self.digests.header), ("ddgst", self.digests.data)] {
            if is_on {
                options.push(format!("{name}=1"));
            }
        }
        options.extend(self.host.as_ref().map(|host| format!("host={host}")));
        options.extend(self.keys.as_ref().map(|keys| format!("keys={}", keys.display())));
        options.extend(self.tls.map(|tls| format!("tls={}", u8::from(tls))));
        if options.is_empty() { Ok(()) } else { write!(out, "?{}", options.join("&")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn urls_are_read_and_shown() {
        for (text, shown) in [
            ("nvme+tcp://192.0.2.1:4420/nqn.2014-08.org.example:x", None),
            ("nvme+tcp://a_b.example:1,[2001:db8::1]:4421/nqn.x?ns=2&hdgst=1&ddgst=1", None),
            ("nvme+tcp://192.0.2.1:4420/nqn.x?ns=2&host=nqn.2014-08.org.nvmexpress:uuid:1", None),
            ("nvme+tcp://a:1/nqn.x?host=nqn.x:h&keys=/etc/levada/keys", None),
            ("nvme+tcp://a:1/nqn.x?host=nqn.x:h&keys=/etc/levada/keys&tls=1", None),
            ("nvme+tcp://a:1/nqn.x?host=nqn.x:h&keys=/etc/levada/keys&tls=0", None),
            ("nvme+tcp://host/nqn.x?ddgst=0", Some("nvme+tcp://host:4420/nqn.x")),
            ("nvme+tcp://[::1]/nqn.x?ddgst=1", Some("nvme+tcp://[::1]:4420/nqn.x?ddgst=1")),
        ] {
            let url: NvmeUrl = text.parse().expect(text);
            assert_eq!(url.to_string(), shown.unwrap_or(text));
        }
        for wrong in [
            "http://a/nqn.x",
            "nvme+tcp://a",
            "nvme+tcp://a/",
            "nvme+tcp:///nqn.x",
            "nvme+tcp://a,/nqn.x",
            "nvme+tcp://a:0/nqn.x",
            "nvme+tcp://a:65536/nqn.x",
            "nvme+tcp://[::1/nqn.x",
            "nvme+tcp://[a]:1/nqn.x",
            "nvme+tcp://[::1]4420/nqn.x",
            "nvme+tcp://a b/nqn.x",
            "nvme+tcp://a/nqx.x",
            "nvme+tcp://a/nqn.x?ns=0",
            "nvme+tcp://a/nqn.x?ns=4294967295",
            "nvme+tcp://a/nqn.x?hdgst=yes",
            "nvme+tcp://a/nqn.x?host=me",
            "nvme+tcp://a/nqn.x?keys=/etc/levada/keys",
            "nvme+tcp://a/nqn.x?host=nqn.x:h&keys=",
            "nvme+tcp://a/nqn.x?tls=1",
            "nvme+tcp://a/nqn.x?host=nqn.x:h&keys=k&tls=yes",
            "nvme+tcp://a/nqn.x?other=1",
            "nvme+tcp://a/nqn.x?",
        ] {
            assert!(wrong.parse::<NvmeUrl>().is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_as_the_same(text in "nvme\\+tcp://[a-z:\\[\\]0-9,.]{1,20}/nqn[.a-z]{1,9}(\\?[a-z=&0-9]{0,20})?") {
            if let Ok(url) = text.parse::<NvmeUrl>() {
                prop_assert_eq!(url.to_string().parse::<NvmeUrl>(), Ok(url));
            }
        }
    }
}
