//! Services on a thread and a reactor of their own, reached by either [`Way`]: the node on one core, the
//! client that is measured on another.

use anyhow::{Context, Result};
use levada_base::reactor::{self, Reactor, mailbox};
use levada_wire::channel::Transport;
use levada_wire::rpc::{Handler, ServiceConfig, accept_all};
use levada_wire::same_host::{HostListener, HostTransport};
use levada_wire::tcp::TcpTransport;
use std::future::Future;
use std::rc::Rc;
use std::sync::mpsc;
use std::thread::JoinHandle;

/// How a client reaches the services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// TCP on the loopback: what a client on another machine does.
    Tcp,
    /// What a client on the node's own machine does.
    SameHost,
}

impl Way {
    pub(crate) fn transport(self) -> Rc<dyn Transport> {
        match self {
            Self::Tcp => Rc::new(TcpTransport),
            Self::SameHost => Rc::new(HostTransport::new()),
        }
    }
}

/// A running service; dropping it stops the thread.
pub struct Service {
    address: String,
    stop: Option<mailbox::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Service {
    /// Starts a thread on which `assemble` makes what shall be served, given the address.
    ///
    /// # Errors
    ///
    /// Those of `assemble`, and of the system.
    pub fn start<F, Made>(assemble: F) -> Result<Self>
    where
        F: FnOnce(String) -> Made + Send + 'static,
        Made: Future<Output = Result<Rc<dyn Handler>>>,
    {
        let (started, starting) = mpsc::channel();
        let thread = std::thread::Builder::new().name("service".into()).spawn(move || {
            Reactor::new()?.block_on(async {
                let listener = HostListener::bind("127.0.0.1:0")?;
                let address = listener.local_addr().to_string();
                let handler = assemble(address.clone()).await?;
                let (stop, mut stopped) = mailbox::channel()?;
                reactor::spawn(accept_all(Rc::new(listener), handler, ServiceConfig::default()));
                // Nobody waits only when the starter has panicked.
                let _ = started.send((address, stop));
                stopped.recv().await;
                Ok(())
            })
        })?;
        if let Ok((address, stop)) = starting.recv() {
            return Ok(Self { address, stop: Some(stop), thread: Some(thread) });
        }
        let ended = thread.join().map_err(|_| anyhow::anyhow!("the service panicked"))?;
        ended.and(Err(anyhow::anyhow!("the service ended"))).context("starting a service")
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A failure shows in the client's requests; here nobody could act on it.
            let _ = thread.join();
        }
    }
}
