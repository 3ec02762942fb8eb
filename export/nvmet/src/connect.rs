//! Connecting a queue (Fabrics, 3.3): to a controller that is made for it, or to one that is there.

use crate::connection::is_possible_size;
use crate::controller::Queue;
use crate::port::Port;
use crate::target::Shared;
use levada_nvme::authentication::{Names, Verifier};
use levada_nvme::fabrics::{
    ANY_CONTROLLER, CONTROLLER_AT, Connect, ConnectData, FabricsType, SUBSYSTEM_AT,
};
use levada_nvme::keyring::HostKeys;
use levada_nvme::tls::PskIdentity;
use levada_nvme::{AdminOpcode, Command, DISCOVERY_NQN, Status};
use std::rc::Rc;

/// Bytes of the identifier and the size of the queue in the command.
const QUEUE_AT: u16 = 42;
const ENTRIES_AT: u16 = 44;

/// A queue that was connected, and how.
pub(crate) struct Connected {
    pub queue: Queue,
    pub connect: Connect,
    /// What the host still has to prove.
    pub verifier: Option<Verifier>,
}

/// Who has come by a connection, before it says who it is.
#[derive(Clone, Copy)]
pub(crate) struct Comer<'a> {
    /// Its address.
    pub peer: &'a str,
    /// What TLS knows of it, if the connection is within that.
    pub shown: Option<&'a PskIdentity>,
}

/// Connects the queue that the first command of a connection asks for.
///
/// # Errors
///
/// The status and the result of its completion.
pub(crate) fn connect(
    shared: &Rc<Shared>,
    port: &Rc<Port>,
    command: &Command,
    data: &[u8],
    Comer { peer, shown }: Comer<'_>,
) -> Result<Connected, (Status, u64)> {
    let plain = |status: Status| (status.and_do_not_retry(), 0);
    let wrong = |at: u16, is_in_data: bool| {
        let result = Connect::wrong_at(at, is_in_data);
        (Status::CONNECT_INVALID_PARAMETERS.and_do_not_retry(), result)
    };
    if command.opcode() != AdminOpcode::Fabrics as u8
        || FabricsType::of(command.fabrics_type()) != Some(FabricsType::Connect)
    {
        return Err(plain(Status::SEQUENCE_ERROR));
    }
    let data = data.first_chunk().ok_or_else(|| plain(Status::DATA_LENGTH_INVALID))?;
    let connect = Connect::of(command);
    if connect.format != 0 {
        return Err(plain(Status::INCOMPATIBLE_FORMAT));
    }
    if !is_possible_size(connect.queue_entries_less_one) {
        return Err(wrong(ENTRIES_AT, false));
    }
    let data = ConnectData::parse(data).map_err(|(at, error)| {
        tracing::info!(peer, %error, "an NVMe host is turned away");
        wrong(at, true)
    })?;
    let ConnectData { host_id, controller, subsystem, host } = data;
    // Who has a key has it for one name and one subsystem.
    if shown.is_some_and(|shown| shown.host != host || shown.subsystem != subsystem) {
        tracing::warn!(peer, %host, %subsystem, "an NVMe host is not who its key of TLS says, or goes elsewhere");
        return Err(plain(Status::CONNECT_INVALID_HOST));
    }
    let is_clear = shown.is_none();
    let refuse_clear = || {
        tracing::warn!(peer, %host, %subsystem, "an NVMe host comes without TLS, which it has to use");
        plain(Status::CONNECT_INVALID_HOST)
    };
    if is_clear && shared.is_tls_only() {
        return Err(refuse_clear());
    }
    if subsystem.as_str() == DISCOVERY_NQN {
        if connect.queue != 0 {
            return Err(wrong(QUEUE_AT, false));
        }
        let controller = shared.connect_discovery((host, host_id), port, connect.keep_alive_ms);
        return Ok(Connected { queue: controller.admin_queue(), connect, verifier: None });
    }
    let Some(found) = shared.subsystem(&subsystem) else {
        // It may be one that had not been shown yet: the host is to try again, here or elsewhere.
        if shared.is_lost() {
            return Err((Status::CONTROLLER_BUSY, 0));
        }
        tracing::info!(peer, %host, %subsystem, "an NVMe host asks for a subsystem that is not there");
        return Err(wrong(SUBSYSTEM_AT, true));
    };
    let Some(HostKeys { secrets, tls }) = found.admission(&host) else {
        tracing::warn!(peer, %host, %subsystem, "an NVMe host is not admitted");
        return Err(plain(Status::CONNECT_INVALID_HOST));
    };
    if is_clear && tls.is_some() {
        return Err(refuse_clear());
    }
    let verifier = secrets.map(|secrets| {
        Verifier::new(Names { host: host.clone(), subsystem: subsystem.clone() }, secrets)
    });
    if connect.queue == 0 {
        if controller != ANY_CONTROLLER {
            return Err(wrong(CONTROLLER_AT, true));
        }
        let is_known = verifier.is_none();
        let made = found.connect((host, host_id), is_known, port, connect.keep_alive_ms);
        let controller = made.map_err(|status| (status, 0))?;
        let (host, id) = (controller.host(), controller.id());
        tracing::info!(peer, %host, %subsystem, id, "an NVMe host connects");
        return Ok(Connected { queue: controller.admin_queue(), connect, verifier });
    }
    let controller = found
        .controller(controller)
        .filter(|there| *there.host() == host && *there.host_id() == host_id)
        // What may be done at a port holds for all of its queues.
        .filter(|there| Rc::ptr_eq(there.port(), port))
        .ok_or_else(|| wrong(CONTROLLER_AT, true))?;
    match controller.io_queue(connect.queue, verifier.is_none()) {
        Ok(queue) => Ok(Connected { queue, connect, verifier }),
        Err(status) if status.is(Status::CONNECT_INVALID_PARAMETERS) => Err(wrong(QUEUE_AT, false)),
        // It may be possible in a moment.
        Err(status) => Err((status, 0)),
    }
}
