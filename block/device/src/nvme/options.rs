//! What a host brings along, and what it is content with.

use super::host::Host;
use super::resolve::Resolver;
use levada_base::reactor::{self, net::Stream};
use levada_base::stream::{ByteStream, MemoryNetwork, MemoryStream};
use levada_nvme::IoOpcode;
use levada_nvme::pdu::Digests;
use levada_tls::{Channel, Connector};
use rustix::net::sockopt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Where connections come from: the network, or what a test puts in its place.
pub trait Network: 'static {
    type Stream: ByteStream + 'static;

    /// A new connection to `address`; how long that may take is the caller's business.
    fn connect(&self, address: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>>;

    /// Cores that connections are spread over.
    fn cores(&self) -> usize {
        1
    }
}

/// The network of this machine, in the clear or within TLS.
#[derive(Clone, Default)]
pub struct Tcp {
    tls: Option<Connector>,
}

impl From<Connector> for Tcp {
    /// Within TLS.
    fn from(connector: Connector) -> Self {
        Self { tls: Some(connector) }
    }
}

impl Network for Tcp {
    type Stream = Channel;

    async fn connect(&self, address: SocketAddr) -> io::Result<Channel> {
        let stream = Stream::connect(address).await?.carried();
        // A path that swallows everything is noticed by the kernel as well, and sooner than by a command that takes long.
        sockopt::set_tcp_user_timeout(&stream, DEAD_AFTER.as_millis() as u32)?;
        sockopt::set_tcp_keepidle(&stream, Duration::from_secs(1))?;
        sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(1))?;
        sockopt::set_tcp_keepcnt(&stream, DEAD_AFTER.as_secs() as u32)?;
        // What a connection that is given up has not sent yet is not sent any more, however slowly it drains.
        sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
        let Some(connector) = &self.tls else { return Ok(stream.into()) };
        let secured = Channel::from(stream).secured(connector.session()?).await;
        secured.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                let why =
                    "the target hangs up on TLS: it may speak none there, or have another key";
                io::Error::new(error.kind(), why)
            }
            kind => io::Error::new(kind, format!("no TLS: {error}")),
        })
    }

    fn cores(&self) -> usize {
        reactor::carriers().max(1)
    }
}

/// For tests and the simulator.
impl Network for MemoryNetwork {
    type Stream = MemoryStream;

    async fn connect(&self, address: SocketAddr) -> io::Result<MemoryStream> {
        Self::connect(self, address).await
    }
}

/// A peer whose kernel acknowledges nothing for so long is gone.
const DEAD_AFTER: Duration = Duration::from_secs(3);

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Each step of connecting a controller. How long it may take to become ready it says itself.
    pub connect: Duration,
    /// A read or a write, or a report. One that takes longer ends its controller.
    pub command: Duration,
    /// Any other command on blocks, of which nobody knows how much work it is. That its queue lives is seen by other signs.
    pub long_command: Duration,
    /// Between two signs of life, and how long the answer to one may take. A queue that waits for answers is asked for a sign after half of that.
    pub keep_alive_every: Duration,
    pub keep_alive_limit: Duration,
    /// After so long without a sign of life the target gives the host up (KATO).
    pub keep_alive: Duration,
    /// Without a usable path for so long, the device is gone.
    pub gone_after: Duration,
    /// With all paths connected and the namespace on none of them for so long as well.
    pub absent_after: Duration,
    /// What a target may take to end what it was at, after it has given its host up.
    pub finish: Duration,
    /// Between two tries to connect, at first and at most.
    pub again_first: Duration,
    pub again_max: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            command: Duration::from_secs(10),
            long_command: Duration::from_secs(60),
            keep_alive_every: Duration::from_secs(1),
            keep_alive_limit: Duration::from_secs(3),
            keep_alive: Duration::from_secs(5),
            gone_after: Duration::from_secs(30),
            absent_after: Duration::from_secs(5),
            finish: Duration::from_secs(10),
            again_first: Duration::from_millis(100),
            again_max: Duration::from_secs(2),
        }
    }
}

impl Timing {
    /// From the end of a controller until nothing that was sent to it is carried out any more; see `unsettled`. What the kernel has handed to
    /// the network may still arrive for a while. Then the target, which rounds `keep_alive` up to its own unit, may take twice as long as that to notice
    /// (one that looks once in that time), and then ends what it was at.
    pub(crate) fn settle(&self, keep_alive_unit_ms: u32) -> Duration {
        let asked_ms = self.keep_alive.as_millis() as u64;
        let limit_ms = match keep_alive_unit_ms {
            0 => asked_ms,
            unit => asked_ms.next_multiple_of(u64::from(unit)),
        };
        DEAD_AFTER + 2 * Duration::from_millis(limit_ms) + self.finish
    }

    /// How long a command on blocks may take.
    pub(crate) fn limit_of(&self, opcode: u8) -> Duration {
        match IoOpcode::of(opcode) {
            Some(
                IoOpcode::Read | IoOpcode::Write | IoOpcode::Compare | IoOpcode::ReservationReport,
            ) => self.command,
            Some(
                IoOpcode::Flush
                | IoOpcode::WriteZeroes
                | IoOpcode::DatasetManagement
                | IoOpcode::ReservationRegister
                | IoOpcode::ReservationAcquire
                | IoOpcode::ReservationRelease
                | IoOpcode::Fabrics,
            )
            | None => self.long_command,
        }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Options {
    pub host: Host,
    pub digests: Digests,
    /// I/O queues of a controller at least, each a connection; there is one for every core that carries connections
    /// ([`levada_base::reactor::carry_sockets`]). A target may grant fewer.
    pub queues: u16,
    /// Entries of such a queue: one more than the commands that may be open.
    pub queue_entries: u16,
    pub timing: Timing,
    /// Of the names of hosts. Those who share one ask for a name once.
    pub resolver: Resolver,
}

impl Options {
    #[must_use]
    pub fn new(host: Host) -> Self {
        let (digests, timing, resolver) =
            (Digests::default(), Timing::default(), Resolver::default());
        Self { host, digests, queues: 1, queue_entries: 128, timing, resolver }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_over_when_the_target_has_noticed() {
        let timing = Timing::default();
        for (unit_ms, seconds) in [(0, 23), (1000, 23), (2000, 25), (10_000, 33)] {
            assert_eq!(timing.settle(unit_ms), Duration::from_secs(seconds), "{unit_ms}");
        }
    }
}
