//! Tells the metadata service that a client is dead, before this process is a client itself: while the service awaits
//! the dead one, nobody else could become one.

use crate::client::ClientConfig;
use crate::error::Error;
use levada_base::reactor;
use levada_wire::frame::{decode_body, encode_body};
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest};
use levada_wire::rpc::{Call, Peer, PeerConfig};
use std::rc::Rc;
use std::time::Duration;

const UNAVAILABLE_WAIT: Duration = Duration::from_millis(100);

/// Ends the client that connected with the uuid `dead` ([`ClientConfig::uuid`]) now instead of with its lease: for whoever
/// knows that its process is dead. What it had locked and open is released, as it would be by the lease; done also
/// when there is no such client. One that lives all the same is in for what follows the end of a lease. `config` says
/// where the service is; no client comes of it.
///
/// # Errors
///
/// `NotPermitted`: the service has a connection of it, or has heard of it, or it died within a truncation; then its
/// lease decides.
pub async fn bury(config: &ClientConfig, dead: [u8; 16]) -> Result<(), Error> {
    let peer = PeerConfig {
        cluster: config.cluster,
        node: config.node,
        connections: 1,
        ..PeerConfig::default()
    };
    let peer = Peer::new(Rc::clone(&config.transport), &config.meta_address, peer);
    let request = MetaRequest::Bury { uuid: dead };
    let call =
        Call { kind: request.kind(), ..Call::new(config.meta_target, encode_body(&request)) };
    loop {
        let frame = peer.call(&call, None).await?;
        match decode_body(&frame.body).map_err(|_| Error::Dialect)? {
            MetaReply::Done => return Ok(()),
            MetaReply::Failed(MetaFault::Unavailable) => reactor::sleep(UNAVAILABLE_WAIT).await,
            MetaReply::Failed(fault) => return Err(fault.into()),
            _ => return Err(Error::Dialect),
        }
    }
}
