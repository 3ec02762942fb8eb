//! A directory with a socket for each of several volumes, at which virtual machines find it: `NAME.sock`, and where a name has parts with a
//! slash between them, in directories of their own.
//!
//! Sockets come and go with the volumes: the directory is compared with what there is every [`LOOK_EVERY`]. A volume is open
//! only while a client is connected, as with every other export.
//!
//! What always holds:
//! - A file that is no socket, and a socket that somebody else serves, is left alone and told as a problem.
//! - A guest is told of a new size within [`LOOK_EVERY`].

use crate::cores::RingCores;
use crate::server::{Opening, Options, Server};
use crate::socket::ListenError;
use futures_util::future::{LocalBoxFuture, join_all};
use levada_base::reactor;
use levada_volume::Volume;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long requests may take when all of it ends.
const END_WITHIN: Duration = Duration::from_secs(5);

/// The volumes that are shown.
pub trait Disks {
    /// Their names, and their sizes in bytes; `None`: that cannot be told now.
    fn list(&self) -> LocalBoxFuture<'_, Option<BTreeMap<String, u64>>>;

    /// The volume of a name, if there is one.
    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>>;
}

/// The socket of a volume.
struct Socket {
    server: Server<dyn Volume>,
    /// As its guest was told.
    size_bytes: Cell<u64>,
}

/// Ends a socket, and takes its directory away with the last one, if it is one within `top`.
async fn end(server: Server<dyn Volume>, top: PathBuf) {
    let own = server.at().parent().filter(|own| *own != top).map(Path::to_owned);
    server.end().await;
    if let Some(own) = own {
        // There may be others in it.
        let _ = std::fs::remove_dir(own);
    }
}

/// Sockets in a directory. Dropped, clients are left where they stand.
pub struct Directory {
    at: PathBuf,
    disks: Rc<dyn Disks>,
    cores: Option<Rc<RingCores>>,
    /// By the name of the volume.
    sockets: RefCell<BTreeMap<String, Socket>>,
    /// Why volumes have no socket, by name.
    problems: RefCell<BTreeMap<String, String>>,
}

impl Directory {
    /// Makes the directory if there is none. `cores` serve the queues, if there are any.
    ///
    /// # Errors
    ///
    /// When that cannot be done.
    pub fn new(
        at: PathBuf,
        disks: Rc<dyn Disks>,
        cores: Option<Rc<RingCores>>,
    ) -> io::Result<Self> {
        std::fs::create_dir_all(&at)?;
        let (sockets, problems) = (RefCell::default(), RefCell::default());
        Ok(Self { at, disks, cores, sockets, problems })
    }

    /// Where it is.
    #[must_use]
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// Keeps the sockets in step with the volumes, until dropped.
    pub async fn run(&self) {
        loop {
            if let Some(there) = self.disks.list().await {
                self.follow(there).await;
            }
            reactor::sleep(LOOK_EVERY).await;
        }
    }

    async fn follow(&self, there: BTreeMap<String, u64>) {
        // A guest of a volume that was renamed goes on, and one of a deleted volume gets errors.
        let is_gone = |(name, socket): &(&String, &Socket)| {
            !there.contains_key(*name) && !socket.server.is_connected()
        };
        let gone: Vec<String> =
            self.sockets.borrow().iter().filter(is_gone).map(|(name, _)| name.clone()).collect();
        for name in gone {
            tracing::info!(name, "the socket of a volume goes with it");
            let Some(socket) = self.sockets.borrow_mut().remove(&name) else { continue };
            // Its client may take a while to have its answers; others need not wait for that.
            reactor::spawn(end(socket.server, self.at.clone()));
        }
        self.problems.borrow_mut().retain(|name, _| there.contains_key(name));
        for (name, size_bytes) in there {
            let is_served = match self.sockets.borrow().get(&name) {
                Some(socket) => {
                    if socket.size_bytes.replace(size_bytes) != size_bytes {
                        socket.server.resized();
                    }
                    true
                }
                None => false,
            };
            if !is_served {
                self.begin(name, size_bytes).await;
            }
        }
    }

    async fn begin(&self, name: String, size_bytes: u64) {
        let at = self.at.join(format!("{name}.sock"));
        let (disks, opened) = (Rc::clone(&self.disks), name.clone());
        let open = move || -> Opening<dyn Volume> {
            let (disks, name) = (Rc::clone(&disks), opened.clone());
            Box::pin(async move { disks.open(&name).await })
        };
        // Of a serial little is told, so it begins with what differs.
        let serial = name.rsplit('/').next().unwrap_or_default().to_owned();
        let options = Options { serial, cores: self.cores.clone(), ..Options::default() };
        let made = at
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .map_err(|source| ListenError::Bind { at: at.clone(), source });
        let listening = async {
            made?;
            Server::listen_opening(&at, open, options).await
        };
        match listening.await {
            Ok(server) => {
                self.problems.borrow_mut().remove(&name);
                let socket = Socket { server, size_bytes: Cell::new(size_bytes) };
                self.sockets.borrow_mut().insert(name, socket);
            }
            Err(error) => {
                let why = match std::error::Error::source(&error) {
                    Some(source) => format!("{error}: {source}"),
                    None => error.to_string(),
                };
                let known = self.problems.borrow_mut().insert(name, why.clone());
                if known.as_ref() != Some(&why) {
                    tracing::warn!(why, "a volume has no socket");
                }
            }
        }
    }

    /// Clients that are connected.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.sockets.borrow().values().filter(|socket| socket.server.is_connected()).count()
    }

    /// Why the first of the volumes without a socket has none.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.problems.borrow().values().next().cloned()
    }

    /// Ends all of them: what clients have asked for is carried out and answered.
    pub async fn end(&self) {
        let sockets = self.sockets.take();
        let at = self.at.clone();
        let ended = join_all(sockets.into_values().map(|socket| end(socket.server, at.clone())));
        if reactor::timeout(END_WITHIN, ended).await.is_err() {
            // They keep them, and show them to who serves next.
            tracing::warn!("requests of virtual machines are left unanswered");
        }
    }
}
