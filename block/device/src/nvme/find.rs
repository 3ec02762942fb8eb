//! What there is at an address: subsystems, how else they are reached, and the namespaces in them.

use super::controller::{ConnectError, Controller};
use super::discovery::{Open, discover};
use super::host::Opening;
use super::namespace::{NamespaceError, approach};
use super::options::{Network, Options, Tcp};
use super::paths::Paths;
use super::url::NvmeUrl;
use levada_base::stream::ByteStream;
use levada_nvme::identify::{Identify, NamespaceIdentity, OptionalCommands, listed_namespaces};
use levada_nvme::log::DiscoveryEntry;
use levada_nvme::{DISCOVERY_NQN, Nqn};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// Namespaces of a subsystem that are listed.
const NAMESPACES_MAX: usize = 4096;

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
}

/// Asks the discovery controller at the address of `at`, whose subsystem and namespace mean nothing, as its host and with its keys.
///
/// # Errors
///
/// A [`NamespaceError`]: there is nobody who could be asked.
pub async fn find(at: &NvmeUrl, options: Options) -> Result<Vec<FoundSubsystem>, NamespaceError> {
    let [address, ..] = at.resolve()?[..] else { return Ok(Vec::new()) };
    let entries = subsystems(at, address, &options).await?;
    let mut addresses: BTreeMap<Nqn, Vec<SocketAddr>> = BTreeMap::new();
    for DiscoveryEntry { subsystem, is_discovery, address, .. } in entries {
        let of = addresses.entry(subsystem).or_default();
        if !is_discovery && !of.contains(&address) {
            of.push(address);
        }
    }
    let mut found = Vec::new();
    for (subsystem, addresses) in addresses.into_iter().filter(|(_, all)| !all.is_empty()) {
        let shown = addresses.iter().map(|address| (address.ip().to_string(), address.port()));
        let url = NvmeUrl { addresses: shown.collect(), subsystem, namespace: 0, ..at.clone() };
        let namespaces = look_into(&url, &addresses, &options).await;
        found.push(FoundSubsystem { url, namespaces });
    }
    Ok(found)
}

/// The subsystems at an address. Who has a key of TLS asks within it first: a target may want that for discovery, too.
async fn subsystems(
    at: &NvmeUrl,
    address: SocketAddr,
    options: &Options,
) -> Result<Vec<DiscoveryEntry>, NamespaceError> {
    let subsystem = Nqn::new(DISCOVERY_NQN).expect("a name");
    let url = NvmeUrl { subsystem, namespace: 0, ..at.clone() };
    let (network, options) = approach(&url, options.clone())?;
    let mut asked = discover(&network, address, &options).await;
    if asked.is_err() && url.keys.is_some() && url.tls.is_none() {
        asked = discover(&Tcp::default(), address, &options).await;
    }
    asked.map_err(|source| NamespaceError::Connect { url: at.to_string(), source })
}

/// The namespaces of a subsystem, over the first of its addresses that answers.
async fn look_into(
    url: &NvmeUrl,
    addresses: &[SocketAddr],
    options: &Options,
) -> Result<Vec<FoundNamespace>, NamespaceError> {
    let (network, options) = approach(url, options.clone())?;
    let mut failed = None;
    for address in addresses {
        match namespaces(&network, *address, &url.subsystem, &options).await {
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
            let bytes = identity.and_then(|of| of.blocks.checked_mul(of.block_bytes));
            found.push(FoundNamespace {
                number,
                bytes: bytes.unwrap_or_default(),
                block_bytes: identity.map_or(0, |of| of.block_bytes),
                has_reservations: has_reservations
                    && identity.is_some_and(|of| of.has_reservations),
            });
        }
    }
}
