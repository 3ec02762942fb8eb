//! Which subsystems there are at an address.

use super::controller::{ConnectError, Controller, Stage};
use super::host::Opening;
use super::options::{Network, Options};
use levada_base::reactor;
use levada_base::stream::ByteStream;
use levada_nvme::Nqn;
use levada_nvme::log::{
    DISCOVERY_ENTRY_BYTES, DISCOVERY_HEADER_BYTES, DiscoveryEntry, LogPage,
    parse_discovery_entries, parse_discovery_header,
};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// Entries that are read, at most.
const ENTRIES_MAX: u64 = 4096;
/// Entries that are read at once.
const ENTRIES_AT_ONCE: u64 = 16;
/// The page may change while it is read so often.
const TRIES: usize = 8;
/// All of it may take so many times as long as a step of connecting.
const STEPS_MAX: u32 = 10;

/// Lists what a discovery controller knows; entries of other transports are left out, and those that name nothing which there can be.
///
/// # Errors
///
/// A [`ConnectError`]: there is no such controller, or its page changes faster than it can be read, or it takes too long.
pub async fn discover<N: Network>(
    network: &N,
    address: SocketAddr,
    options: &Options,
) -> Result<Vec<DiscoveryEntry>, ConnectError> {
    let limit = options.timing.connect * STEPS_MAX;
    let listed = reactor::timeout(limit, list(network, address, options)).await;
    listed.unwrap_or(Err(ConnectError::Endless { stage: Stage::ListingSubsystems, limit }))
}

async fn list<N: Network>(
    network: &N,
    address: SocketAddr,
    options: &Options,
) -> Result<Vec<DiscoveryEntry>, ConnectError> {
    let mut options = options.clone();
    // Nobody waits for anything else on this connection.
    options.timing.keep_alive = Duration::ZERO;
    let subsystem = Nqn::discovery();
    let controller = Controller::connect(
        network,
        address,
        &subsystem,
        &options,
        Opening::new(&options.host).id(0),
    )
    .await?;
    let mut open = Open(Some(Rc::clone(&controller)));
    let mut found = Ok(None);
    for _ in 0..TRIES {
        found = read(&controller).await;
        if !matches!(found, Ok(None)) {
            break;
        }
    }
    controller.shut_down().await;
    open.0 = None;
    found?.ok_or(ConnectError::Contradiction { what: "its list of subsystems does not hold still" })
}

/// A controller that is closed also when who asked gives up half-way.
pub(super) struct Open<S: ByteStream + 'static>(pub Option<Rc<Controller<S>>>);

impl<S: ByteStream + 'static> Drop for Open<S> {
    fn drop(&mut self) {
        if let Some(controller) = self.0.take() {
            reactor::spawn(async move { controller.close().await });
        }
    }
}

/// Reads the page; `None`: it has changed meanwhile.
async fn read<S: ByteStream + 'static>(
    controller: &Controller<S>,
) -> Result<Option<Vec<DiscoveryEntry>>, ConnectError> {
    const PAGE: u8 = LogPage::Discovery as u8;
    let head = async || {
        let head = controller.log_page(PAGE, 0, 0, DISCOVERY_HEADER_BYTES).await?;
        let head = head.first_chunk().expect("as many were fetched");
        Ok::<_, ConnectError>(parse_discovery_header(head))
    };
    let (generation, count) = head().await?;
    if count > ENTRIES_MAX {
        return Err(ConnectError::Contradiction {
            what: "it lists more subsystems than there are",
        });
    }
    let mut entries = Vec::new();
    for first in (0..count).step_by(ENTRIES_AT_ONCE as usize) {
        let at = DISCOVERY_HEADER_BYTES as u64 + first * DISCOVERY_ENTRY_BYTES as u64;
        let bytes = ENTRIES_AT_ONCE.min(count - first) as usize * DISCOVERY_ENTRY_BYTES;
        let page = match controller.log_page(PAGE, 0, at, bytes).await {
            // It may have become shorter.
            Err(ConnectError::Refused { .. }) if head().await?.0 != generation => return Ok(None),
            page => page?,
        };
        entries.extend(parse_discovery_entries(&page));
    }
    if head().await?.0 != generation {
        return Ok(None);
    }
    let left_out = count - entries.len() as u64;
    if left_out > 0 {
        tracing::info!(
            left_out,
            listed = count,
            "of what is discovered not all can be reached by TCP"
        );
    }
    Ok(Some(entries))
}
