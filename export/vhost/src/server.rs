//! A volume at a socket, where one guest at a time finds a disk: one that two guests write to without knowing of each other is
//! lost.
//!
//! Requests that were in flight at a crash are carried out again by who serves next, if the front end keeps notes of
//! them ([`crate::inflight`]).

use crate::cores::RingCores;
use crate::request::{Agreed, Client, Elsewhere, SERIAL_BYTES};
use crate::socket::{ListenError, Opened, Socket};
use levada_base::sync::Semaphore;
use levada_volume::Volume;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;

/// How a volume is shown.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the guest sees as the disk's serial number; its first 20 bytes.
    pub serial: String,
    /// Queues that a guest may use, at most 256.
    pub queues: u16,
    /// Data of the client that is on its way at once, at least 4 MiB; divided evenly among `cores`.
    pub bytes_in_flight_max: u64,
    /// Who serves the queues, each on one of these cores; `None`: who listens does.
    pub cores: Option<Rc<RingCores>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { serial: "levada".into(), queues: 16, bytes_in_flight_max: 64 << 20, cores: None }
    }
}

/// Finds the volume when a client has come; `None` turns the client away.
pub type Opening<V> = Pin<Box<dyn Future<Output = Option<Rc<V>>>>>;

/// A volume at a socket. Dropped, it leaves its client where it stands, as a crash would.
pub struct Server<V: ?Sized>(Socket<Client<V>>);

impl<V: Volume + ?Sized + 'static> Server<V> {
    /// Shows `volume` at the Unix socket `at`.
    ///
    /// # Errors
    ///
    /// [`ListenError`].
    pub async fn listen(at: &Path, volume: Rc<V>, options: Options) -> Result<Self, ListenError> {
        let open = move || -> Opening<V> { Box::pin(std::future::ready(Some(Rc::clone(&volume)))) };
        Self::listen_opening(at, open, options).await
    }

    /// The same for a volume that is open only while a client is connected: each one is shown what `open` finds.
    ///
    /// # Errors
    ///
    /// [`ListenError`].
    pub async fn listen_opening(
        at: &Path,
        open: impl Fn() -> Opening<V> + 'static,
        options: Options,
    ) -> Result<Self, ListenError> {
        let queues = options.queues;
        let open = move || -> Opened<Client<V>> {
            let (opening, options) = (open(), options.clone());
            Box::pin(async move { Some(Rc::new(client_of(opening.await?, &options))) })
        };
        Ok(Self(Socket::listen(at, queues, open).await?))
    }

    /// Where it listens.
    #[must_use]
    pub fn at(&self) -> &Path {
        self.0.at()
    }

    /// Whether a client is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// To be called when the volume's size has changed: the guest is told, if it listens.
    pub fn resized(&self) {
        self.0.config_changed();
    }

    /// Ends it: requests that were taken are carried out and answered, and the client is left.
    pub async fn end(self) {
        self.0.end().await;
    }
}

fn client_of<V: Volume + ?Sized>(volume: Rc<V>, options: &Options) -> Client<V> {
    let mut serial = [0; SERIAL_BYTES];
    for (to, from) in serial.iter_mut().zip(options.serial.bytes()) {
        *to = from;
    }
    let (queues, bytes) = (options.queues, options.bytes_in_flight_max);
    let cores = options.cores.clone();
    let elsewhere = cores.map(|cores| Elsewhere::new(cores, &*volume, queues, bytes));
    let room = Semaphore::new(bytes.max(4 << 20));
    Client { volume, serial, features: Agreed::default(), room, elsewhere }
}
