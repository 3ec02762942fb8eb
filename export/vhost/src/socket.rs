//! A socket at which one client at a time finds a device.
//!
//! What always holds:
//! - One client at a time: the next one waits at the socket until the first has gone and its requests are over.
//! - [`Socket::end`] returns when no request is being carried out any more.
//!
//! After a crash the socket stays, and whoever listens there next replaces it.

use crate::served::Served;
use crate::session::Session;
use levada_base::reactor::net::{Listener, Stream, accept_error_passes};
use levada_base::reactor::{self, Elapsed, Group};
use levada_base::sync::Notify;
use std::cell::RefCell;
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
/// What Linux takes as the path of a Unix socket, beside the zero that ends it: unix(7).
const PATH_BYTES_MAX: usize = 107;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen at {}", at.display())]
    Bind { at: PathBuf, source: io::Error },
    #[error(
        "{} is too long a path for a socket: {} bytes, and at most {PATH_BYTES_MAX} are possible",
        at.display(), at.as_os_str().len()
    )]
    TooLong { at: PathBuf },
    #[error("{} is no socket, and is not removed for one", at.display())]
    NotASocket { at: PathBuf },
    #[error("another server listens at {}", at.display())]
    InUse { at: PathBuf },
}

/// Finds the device when a client has come; `None` turns the client away.
pub(crate) type Opened<S> = Pin<Box<dyn Future<Output = Option<Rc<S>>>>>;

struct Shared<S> {
    open: Box<dyn Fn() -> Opened<S>>,
    queues: u16,
    session: RefCell<Option<Rc<Session<S>>>>,
    left: Notify,
}

/// A device at a socket. Dropped, it leaves its client where it stands, as a crash would.
pub(crate) struct Socket<S> {
    at: PathBuf,
    shared: Rc<Shared<S>>,
    /// Sessions, and who accepts.
    group: Group,
    accepting: Group,
}

impl<S: Served> Socket<S> {
    /// Listens at the Unix socket `at`: each client finds what `open` does, with so many queues.
    pub(crate) async fn listen(
        at: &Path,
        queues: u16,
        open: impl Fn() -> Opened<S> + 'static,
    ) -> Result<Self, ListenError> {
        if at.as_os_str().len() > PATH_BYTES_MAX {
            return Err(ListenError::TooLong { at: at.into() });
        }
        make_way(at).await?;
        let listener = Listener::bind_unix(at)
            .map_err(|source| ListenError::Bind { at: at.into(), source })?;
        // Whoever may connect has all that is served there.
        std::fs::set_permissions(at, Permissions::from_mode(0o600))
            .map_err(|source| ListenError::Bind { at: at.into(), source })?;
        let (session, left) = (RefCell::default(), Notify::default());
        let (open, queues) = (Box::new(open), queues.clamp(1, QUEUES_MAX));
        let shared = Rc::new(Shared { open, queues, session, left });
        let group = reactor::current_group().child();
        let accepting = group.child();
        reactor::spawn_in(&accepting, accept_all(listener, Rc::clone(&shared), group.clone()));
        Ok(Self { at: at.into(), shared, group, accepting })
    }

    pub(crate) fn at(&self) -> &Path {
        &self.at
    }

    /// Whether a client is connected.
    pub(crate) fn is_connected(&self) -> bool {
        self.shared.session.borrow().is_some()
    }

    /// Tells the client that its configuration has changed, if it listens.
    pub(crate) fn config_changed(&self) {
        if let Some(session) = &*self.shared.session.borrow() {
            session.tell_config_change();
        }
    }

    /// Ends it: requests that were taken are carried out and answered, and the client is left.
    pub(crate) async fn end(self) {
        self.accepting.kill();
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(&self.at);
        if let Some(session) = &*self.shared.session.borrow() {
            session.hang_up();
        }
        self.shared.left.until(|| (!self.is_connected()).then_some(())).await;
    }
}

impl<S> Drop for Socket<S> {
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

async fn accept_all<S: Served>(listener: Listener, shared: Rc<Shared<S>>, group: Group) {
    loop {
        shared.left.until(|| shared.session.borrow().is_none().then_some(())).await;
        match listener.accept().await {
            Ok(stream) => {
                let Some(served) = (shared.open)().await else {
                    tracing::info!("a vhost client is turned away: its device cannot be opened");
                    continue;
                };
                let session = Session::new(stream, served, shared.queues);
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
