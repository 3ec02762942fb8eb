//! A socket at which one guest at a time finds a disk.
//!
//! What always holds:
//! - One client at a time: a disk that two guests write to without knowing of each other is lost. The next one waits at the
//!   socket until the first has gone and its requests are over.
//! - [`Server::end`] returns when no request is being carried out any more.
//!
//! After a crash the socket stays, and whoever listens there next replaces it. Requests that were in flight are carried out
//! again if the front end keeps notes of them ([`crate::inflight`]).

use crate::request::{Client, SERIAL_BYTES};
use crate::session::Session;
use levada_base::reactor::net::{Listener, Stream, accept_error_passes};
use levada_base::reactor::{self, Elapsed, Group};
use levada_base::sync::{Notify, Semaphore};
use levada_volume::Volume;
use std::cell::{Cell, RefCell};
use std::fs::Permissions;
use std::future::Future;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

/// After an error of the system that passes, as when there are no descriptors left.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// How long it may take until a process that is gone no longer listens.
const CLOSING_LIMIT: Duration = Duration::from_secs(2);
/// Rings that a message can name.
const QUEUES_MAX: u16 = 256;

/// How a volume is shown.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the guest sees as the disk's serial number; its first 20 bytes.
    pub serial: String,
    /// Queues that a guest may use, at most 256.
    pub queues: u16,
    /// Data of the client that is on its way at once, at least 4 MiB.
    pub bytes_in_flight_max: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { serial: "levada".into(), queues: 16, bytes_in_flight_max: 64 << 20 }
    }
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen at {}", at.display())]
    Bind { at: PathBuf, source: io::Error },
    #[error("{} is no socket, and is not removed for one", at.display())]
    NotASocket { at: PathBuf },
    #[error("another server listens at {}", at.display())]
    InUse { at: PathBuf },
}

/// Finds the volume when a client has come; `None` turns the client away.
pub type Opening<V> = Pin<Box<dyn Future<Output = Option<Rc<V>>>>>;

struct Shared<V: ?Sized> {
    open: Box<dyn Fn() -> Opening<V>>,
    options: Options,
    session: RefCell<Option<Rc<Session<V>>>>,
    left: Notify,
}

/// A volume at a socket. Dropped, it leaves its client where it stands, as a crash would.
pub struct Server<V: ?Sized> {
    at: PathBuf,
    shared: Rc<Shared<V>>,
    /// Sessions, and who accepts.
    group: Group,
    accepting: Group,
}

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
        make_way(at).await?;
        let listener = Listener::bind_unix(at)
            .map_err(|source| ListenError::Bind { at: at.into(), source })?;
        // Whoever may write to it may write to the disk.
        std::fs::set_permissions(at, Permissions::from_mode(0o600))
            .map_err(|source| ListenError::Bind { at: at.into(), source })?;
        let options = Options {
            queues: options.queues.clamp(1, QUEUES_MAX),
            bytes_in_flight_max: options.bytes_in_flight_max.max(4 << 20),
            ..options
        };
        let (session, left) = (RefCell::default(), Notify::default());
        let open = Box::new(open);
        let shared = Rc::new(Shared { open, options, session, left });
        let group = reactor::current_group().child();
        let accepting = group.child();
        reactor::spawn_in(&accepting, accept_all(listener, Rc::clone(&shared), group.clone()));
        Ok(Self { at: at.into(), shared, group, accepting })
    }

    /// Where it listens.
    #[must_use]
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// Whether a client is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.session.borrow().is_some()
    }

    /// To be called when the volume's size has changed: the guest is told, if it listens.
    pub fn resized(&self) {
        if let Some(session) = &*self.shared.session.borrow() {
            session.tell_config_change();
        }
    }

    /// Ends it: requests that were taken are carried out and answered, and the client is left.
    pub async fn end(self) {
        self.accepting.kill();
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(&self.at);
        if let Some(session) = &*self.shared.session.borrow() {
            session.hang_up();
        }
        self.shared.left.until(|| (!self.is_connected()).then_some(())).await;
    }
}

impl<V: ?Sized> Drop for Server<V> {
    fn drop(&mut self) {
        self.group.kill();
    }
}

/// Sees to it that nobody listens at the socket, if one is there; it is removed by who binds.
async fn make_way(at: &Path) -> Result<(), ListenError> {
    let Ok(there) = std::fs::symlink_metadata(at) else { return Ok(()) };
    if !there.file_type().is_socket() {
        return Err(ListenError::NotASocket { at: at.into() });
    }
    let in_use = || ListenError::InUse { at: at.into() };
    let stream = match reactor::timeout(CLOSING_LIMIT, Stream::connect_unix(at)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if is_nobody_there(&error) => return Ok(()),
        // It is somebody else's, or busy: both are somebody.
        Ok(Err(_)) | Err(Elapsed) => return Err(in_use()),
    };
    // The kernel may take a while to close what a process that was killed had open. Then it hangs up; who serves does not.
    let (mut byte, mut fds) = ([0], Vec::new());
    let hung_up = reactor::timeout(CLOSING_LIMIT, stream.receive_some(&mut byte, &mut fds));
    match hung_up.await {
        Ok(Ok(0) | Err(_)) => Ok(()),
        Ok(Ok(_)) | Err(Elapsed) => Err(in_use()),
    }
}

fn is_nobody_there(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

async fn accept_all<V: Volume + ?Sized + 'static>(
    listener: Listener,
    shared: Rc<Shared<V>>,
    group: Group,
) {
    loop {
        shared.left.until(|| shared.session.borrow().is_none().then_some(())).await;
        match listener.accept().await {
            Ok(stream) => {
                let Some(volume) = (shared.open)().await else {
                    tracing::info!("a vhost client is turned away: its volume cannot be opened");
                    continue;
                };
                let client = Rc::new(client_of(volume, &shared.options));
                let session = Session::new(stream, client, shared.options.queues);
                *shared.session.borrow_mut() = Some(Rc::clone(&session));
                let shared = Rc::clone(&shared);
                reactor::spawn_in(&group, async move {
                    session.serve().await;
                    shared.session.borrow_mut().take();
                    shared.left.notify_all();
                });
            }
            Err(error) if accept_error_passes(&error) => {
                tracing::warn!(%error, "cannot accept vhost clients");
                reactor::sleep(ACCEPT_AGAIN_AFTER).await;
            }
            Err(error) => {
                tracing::error!(%error, "no vhost client is accepted any more");
                return;
            }
        }
    }
}

fn client_of<V: ?Sized>(volume: Rc<V>, options: &Options) -> Client<V> {
    let mut serial = [0; SERIAL_BYTES];
    for (to, from) in serial.iter_mut().zip(options.serial.bytes()) {
        *to = from;
    }
    Client {
        volume,
        serial,
        features: Cell::default(),
        room: Semaphore::new(options.bytes_in_flight_max),
    }
}
