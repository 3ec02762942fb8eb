//! What there is at an address: subsystems, how else they are reached, and the namespaces in them.

use super::controller::{ConnectError, Controller, Stage};
use super::discovery::{Open, discover};
use super::host::Opening;
use super::namespace::{NamespaceError, approach};
use super::options::{Network, Options, Tcp};
use super::paths::Paths;
use super::resolve::Place;
use levada_base::reactor;
use levada_base::stream::ByteStream;
use levada_base::units::BLOCK_BYTES;
use levada_nvme::identify::{Identify, NamespaceIdentity, OptionalCommands, listed_namespaces};
use levada_nvme::log::DiscoveryEntry;
use levada_nvme::{DISCOVERY_NQN, Nqn, NvmeUrl};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// Namespaces of a subsystem that are listed.
const NAMESPACES_MAX: usize = 4096;
/// Addresses of a subsystem that are told of, at most.
const ADDRESSES_MAX: usize = 16;
/// To look into a subsystem may take so many times as long as a step of connecting, and into all of them twice that.
const STEPS_MAX: u32 = 10;

/// A subsystem that was found.
#[derive(Debug)]
pub struct FoundSubsystem {
    /// It, over all the addresses that were told of, as the host that asked.
    pub url: NvmeUrl,
    /// What is in it; why not, where it cannot be looked at.
    pub namespaces: Result<Vec<FoundNamespace>, NamespaceError>,
}

/// A namespace in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundNamespace {
    pub number: u32,
    /// 0: of blocks that cannot be used.
    pub bytes: u64,
    pub block_bytes: u64,
    /// Owners can be told apart by the target.
    pub has_reservations: bool,
    pub is_read_only: bool,
}

/// Asks the discovery controllers at the addresses of `at`, until one tells of something, as its host and with its keys; subsystem and
/// namespace mean nothing.
///
/// # Errors
///
/// A [`NamespaceError`]: there is nobody who could be asked.
pub async fn find(at: &NvmeUrl, options: Options) -> Result<Vec<FoundSubsystem>, NamespaceError> {
    let mut failed = None;
    for place in &at.addresses {
        let found = match Place::new(place).find(&options.resolver).await {
            Ok(address) => find_by(at, address, &options, approach, &Tcp::default()).await,
            Err(error) => {
                let source = ConnectError::NoAddress(error);
                Err(NamespaceError::Connect { url: at.to_string(), source })
            }
        };
        match found {
            Ok(found) if !found.is_empty() => return Ok(found),
            Ok(_) => {}
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(Vec::new()), Err)
}

/// Looks into the subsystem of `url`, whatever namespace that names, over the first of its addresses that answers.
pub async fn look_into(url: &NvmeUrl, options: Options) -> FoundSubsystem {
    let url = NvmeUrl { namespace: 0, ..url.clone() };
    let looked = async {
        let (network, own) = approach(&url, options.clone())?;
        let (mut addresses, mut failed) = (Vec::new(), None);
        for place in &url.addresses {
            match Place::new(place).find(&options.resolver).await {
                Ok(address) => addresses.push(address),
                Err(error) => failed = Some(ConnectError::NoAddress(error)),
            }
        }
        match failed {
            Some(source) if addresses.is_empty() => {
                Err(NamespaceError::Connect { url: url.to_string(), source })
            }
            Some(_) | None => look_over(&network, &addresses, &url, &own).await,
        }
    };
    let limit = options.timing.connect * STEPS_MAX;
    let looked = reactor::timeout(limit, looked).await;
    let namespaces = looked.unwrap_or_else(|_| {
        let source = ConnectError::Endless { stage: Stage::LookingInside, limit };
        Err(NamespaceError::Connect { url: url.to_string(), source })
    });
    FoundSubsystem { url, namespaces }
}

/// The same, of whatever network; `clear` is one without TLS.
pub(super) async fn find_by<N: Network>(
    at: &NvmeUrl,
    address: SocketAddr,
    options: &Options,
    approach: impl Fn(&NvmeUrl, Options) -> Result<(N, Options), NamespaceError>,
    clear: &N,
) -> Result<Vec<FoundSubsystem>, NamespaceError> {
    let discovery = NvmeUrl { subsystem: Nqn::discovery(), namespace: 0, ..at.clone() };
    let (network, own) = approach(&discovery, options.clone())?;
    let mut asked = discover(&network, address, &own).await;
    // Who has a key of TLS asks within it first: a target may want that for discovery, too.
    let is_unheard = |error: &ConnectError| {
        use ConnectError::{Ended, Io, Silent};
        matches!(error, Io(_) | Silent { .. } | Ended { .. })
    };
    if asked.as_ref().is_err_and(is_unheard) && at.keys.is_some() && at.tls.is_none() {
        let in_the_clear = discover(clear, address, &own).await;
        // Where it knows TLS and nothing else helps, the key is what is wrong.
        let is_of_keys = asked.as_ref().is_err_and(ConnectError::is_of_keys);
        if in_the_clear.is_ok() || !is_of_keys {
            asked = in_the_clear;
        }
    }
    let entries =
        asked.map_err(|source| NamespaceError::Connect { url: at.to_string(), source })?;
    let mut found = Vec::new();
    let of_one = options.timing.connect * STEPS_MAX;
    let (begun, of_all) = (reactor::now(), of_one * 2);
    for (subsystem, addresses) in by_subsystem(entries) {
        if !is_plain(&subsystem) {
            tracing::warn!(%subsystem, "what is discovered has a name that could do something where it is copied to");
            continue;
        }
        let shown = addresses.iter().map(|address| (address.ip().to_string(), address.port()));
        let url = NvmeUrl { addresses: shown.collect(), subsystem, namespace: 0, ..at.clone() };
        let left = of_all.saturating_sub(begun.elapsed());
        let (stage, limit) = match left < of_one {
            true => (Stage::LookingIntoAll, of_all),
            false => (Stage::LookingInside, of_one),
        };
        let endless = |url: &NvmeUrl| {
            let source = ConnectError::Endless { stage, limit };
            Err(NamespaceError::Connect { url: url.to_string(), source })
        };
        // Nobody is asked any more.
        if left.is_zero() {
            let namespaces = endless(&url);
            found.push(FoundSubsystem { url, namespaces });
            continue;
        }
        let looked = async {
            let (network, own) = approach(&url, options.clone())?;
            look_over(&network, &addresses, &url, &own).await
        };
        let looked = reactor::timeout(left.min(of_one), looked).await;
        let namespaces = looked.unwrap_or_else(|_| endless(&url));
        found.push(FoundSubsystem { url, namespaces });
    }
    Ok(found)
}

/// Where each subsystem is. Others who could be asked are not: they may name each other without end.
fn by_subsystem(entries: Vec<DiscoveryEntry>) -> BTreeMap<Nqn, Vec<SocketAddr>> {
    let mut addresses: BTreeMap<Nqn, Vec<SocketAddr>> = BTreeMap::new();
    for DiscoveryEntry { subsystem, is_discovery, address, .. } in entries {
        if is_discovery || subsystem.as_str() == DISCOVERY_NQN {
            continue;
        }
        let of = addresses.entry(subsystem).or_default();
        if of.len() < ADDRESSES_MAX && !of.contains(&address) {
            of.push(address);
        }
    }
    addresses
}

/// Whoever copies the URL, into a cluster file or a shell, gets what was found, and nothing that the name of a subsystem has brought along.
fn is_plain(subsystem: &Nqn) -> bool {
    subsystem
        .as_str()
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"-._:/@+~=".contains(&byte))
}

/// The namespaces of a subsystem, over the first of its addresses that answers.
async fn look_over<N: Network>(
    network: &N,
    addresses: &[SocketAddr],
    url: &NvmeUrl,
    options: &Options,
) -> Result<Vec<FoundNamespace>, NamespaceError> {
    let mut failed = None;
    for address in addresses {
        match namespaces(network, *address, &url.subsystem, options).await {
            Ok(found) => return Ok(found),
            Err(source) => failed = Some(source),
        }
    }
    let source = failed.expect("there is an address");
    Err(NamespaceError::Connect { url: url.to_string(), source })
}

async fn namespaces<N: Network>(
    network: &N,
    address: SocketAddr,
    subsystem: &Nqn,
    options: &Options,
) -> Result<Vec<FoundNamespace>, ConnectError> {
    let mut options = options.clone();
    // Nobody waits for anything else on this connection.
    options.timing.keep_alive = Duration::ZERO;
    let id = Opening::new(&options.host).id(0);
    let controller = Controller::connect(network, address, subsystem, &options, id).await?;
    let mut open = Open(Some(Rc::clone(&controller)));
    let listed = list::<N>(&controller).await;
    controller.shut_down().await;
    open.0 = None;
    listed
}

async fn list<N: Network>(
    controller: &Controller<N::Stream>,
) -> Result<Vec<FoundNamespace>, ConnectError>
where
    N::Stream: ByteStream,
{
    let has_reservations = controller.identity.optional.contains(OptionalCommands::RESERVATIONS);
    let (mut found, mut after, mut listed) = (Vec::new(), 0, 0);
    loop {
        // Those after it, as many as a page has room for.
        let page = controller.identify(Identify::ActiveNamespaces, after).await?;
        let numbers: Vec<u32> = listed_namespaces(&page).collect();
        if numbers.is_empty() {
            return Ok(found);
        }
        for number in numbers {
            listed += 1;
            if number <= after || listed > NAMESPACES_MAX {
                let what = "its list of namespaces has no order, or no end";
                return Err(ConnectError::Contradiction { what });
            }
            after = number;
            let page = match Paths::<N>::namespace_page(controller, number).await {
                // It has gone meanwhile.
                Err(ConnectError::Absent { .. }) => continue,
                page => page?,
            };
            let identity = NamespaceIdentity::parse(&page);
            let usable = identity.filter(|of| of.block_bytes <= BLOCK_BYTES);
            let bytes = usable.and_then(|of| of.blocks.checked_mul(of.block_bytes));
            found.push(FoundNamespace {
                number,
                bytes: bytes.unwrap_or_default(),
                block_bytes: identity.map_or(0, |of| of.block_bytes),
                has_reservations: has_reservations
                    && identity.is_some_and(|of| of.has_reservations),
                is_read_only: identity.is_some_and(|of| of.is_read_only),
            });
        }
    }
}
