//! What a host brings along, and what it is content with.

use levada_base::ids::Uuid;
use levada_base::reactor::net::Stream;
use levada_base::stream::ByteStream;
use levada_nvme::pdu::Digests;
use levada_nvme::{Nqn, NqnError};
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
}

/// The network of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Network for Tcp {
    type Stream = Stream;

    async fn connect(&self, address: SocketAddr) -> io::Result<Stream> {
        let stream = Stream::connect(address).await?;
        // A path that swallows everything is noticed by the kernel as well, and sooner than by a command that takes long.
        sockopt::set_tcp_user_timeout(&stream, DEAD_AFTER.as_millis() as u32)?;
        sockopt::set_tcp_keepidle(&stream, Duration::from_secs(1))?;
        sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(1))?;
        sockopt::set_tcp_keepcnt(&stream, DEAD_AFTER.as_secs() as u32)?;
        Ok(stream)
    }
}

/// A peer whose kernel acknowledges nothing for so long is gone.
const DEAD_AFTER: Duration = Duration::from_secs(3);

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// What targets know it by when they decide who may connect.
    pub nqn: Nqn,
    /// Whose reservations are. Each process has its own, so that what a dead one has left under way can be shut out.
    pub id: [u8; 16],
}

impl Host {
    /// This process of the host `nqn`.
    #[must_use]
    pub fn new(nqn: Nqn) -> Self {
        Self { nqn, id: *Uuid::new_v4().as_bytes() }
    }

    /// A host that nobody knows by name.
    ///
    /// # Errors
    ///
    /// None that happens: the name is one.
    pub fn anonymous() -> Result<Self, NqnError> {
        let uuid = Uuid::new_v4();
        let nqn = Nqn::new(format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"))?;
        Ok(Self { nqn, id: *uuid.as_bytes() })
    }
}

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// To connect a controller with all its queues.
    pub connect: Duration,
    /// A command on blocks. One that takes longer ends its controller.
    pub command: Duration,
    /// Between two signs of life, and how long the answer to one may take.
    pub keep_alive_every: Duration,
    pub keep_alive_limit: Duration,
    /// After so long without a sign of life the target gives the host up (KATO).
    pub keep_alive: Duration,
    /// Without a usable path for so long, the device is gone.
    pub gone_after: Duration,
    /// From the end of a controller until nothing that was sent to it is carried out any more; see `unsettled`. More than twice
    /// `keep_alive`, and what a target may take to end what it was at.
    pub settle: Duration,
    /// Between two tries to connect, at first and at most.
    pub again_first: Duration,
    pub again_max: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            command: Duration::from_secs(10),
            keep_alive_every: Duration::from_secs(1),
            keep_alive_limit: Duration::from_secs(3),
            keep_alive: Duration::from_secs(5),
            gone_after: Duration::from_secs(30),
            settle: Duration::from_secs(20),
            again_first: Duration::from_millis(100),
            again_max: Duration::from_secs(2),
        }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Options {
    pub host: Host,
    pub digests: Digests,
    /// I/O queues of a controller, each a connection; a target may grant fewer.
    pub queues: u16,
    /// Entries of such a queue: one more than the commands that may be open.
    pub queue_entries: u16,
    pub timing: Timing,
}

impl Options {
    #[must_use]
    pub fn new(host: Host) -> Self {
        let (digests, timing) = (Digests::default(), Timing::default());
        Self { host, digests, queues: 1, queue_entries: 128, timing }
    }
}
