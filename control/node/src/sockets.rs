//! A directory with a socket for each volume of a tenant, at which virtual machines find it: `NAME.sock`.
//!
//! Sockets come and go with the volumes: the directory is compared with what there is every [`LOOK_EVERY`]. A volume is open
//! only while a client is connected, as with every other export.
//!
//! What always holds:
//! - A file that is no socket, and a socket that somebody else serves, is left alone and told as a problem.
//! - A guest is told of a new size within [`LOOK_EVERY`].

use crate::exports::TenantExports;
use futures_util::future::join_all;
use levada_base::reactor;
use levada_export_nbd::Exports;
use levada_export_vhost::{Opening, Options, Server};
use levada_volume::{Volume, VolumeRow};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long requests may take when all of it ends.
const END_WITHIN: Duration = Duration::from_secs(5);

/// The socket of a volume.
struct Socket {
    server: Server<dyn Volume>,
    /// As its guest was told.
    size_bytes: Cell<u64>,
}

/// Sockets in a directory. Dropped, clients are left where they stand.
pub(crate) struct Sockets {
    directory: PathBuf,
    volumes: TenantExports,
    /// By the name of the volume.
    sockets: RefCell<BTreeMap<String, Socket>>,
    /// Why volumes have no socket, by name.
    problems: RefCell<BTreeMap<String, String>>,
}

impl Sockets {
    /// Makes the directory if there is none.
    pub(crate) fn new(directory: PathBuf, volumes: TenantExports) -> io::Result<Self> {
        std::fs::create_dir_all(&directory)?;
        let (sockets, problems) = (RefCell::default(), RefCell::default());
        Ok(Self { directory, volumes, sockets, problems })
    }

    /// Keeps the sockets in step with the volumes, until dropped.
    pub(crate) async fn run(&self) {
        loop {
            match self.volumes.rows().await {
                Ok(volumes) => self.follow(volumes).await,
                Err(error) => tracing::warn!(%error, "volumes cannot be listed"),
            }
            reactor::sleep(LOOK_EVERY).await;
        }
    }

    async fn follow(&self, volumes: Vec<VolumeRow>) {
        let there: BTreeMap<String, u64> = volumes
            .into_iter()
            .map(|volume| (volume.name.name().to_owned(), volume.size_bytes))
            .collect();
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
            reactor::spawn(socket.server.end());
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
        let at = self.directory.join(format!("{name}.sock"));
        let (volumes, opened) = (self.volumes.clone(), name.clone());
        let open = move || -> Opening<dyn Volume> {
            let (volumes, name) = (volumes.clone(), opened.clone());
            Box::pin(async move { volumes.open(&name).await })
        };
        let options = Options { serial: name.clone(), ..Options::default() };
        match Server::listen_opening(&at, open, options).await {
            Ok(server) => {
                self.problems.borrow_mut().remove(&name);
                let socket = Socket { server, size_bytes: Cell::new(size_bytes) };
                self.sockets.borrow_mut().insert(name, socket);
            }
            Err(error) => {
                let why = format!("{:#}", anyhow::Error::from(error));
                let known = self.problems.borrow_mut().insert(name, why.clone());
                if known.as_ref() != Some(&why) {
                    tracing::warn!(why, "a volume has no socket");
                }
            }
        }
    }

    /// Clients that are connected.
    pub(crate) fn clients(&self) -> usize {
        self.sockets.borrow().values().filter(|socket| socket.server.is_connected()).count()
    }

    /// Why the first of the volumes without a socket has none.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problems.borrow().values().next().cloned()
    }

    /// Ends all of them: what clients have asked for is carried out and answered.
    pub(crate) async fn end(&self) {
        let sockets = self.sockets.take();
        let ended = join_all(sockets.into_values().map(|socket| socket.server.end()));
        if reactor::timeout(END_WITHIN, ended).await.is_err() {
            // They keep them, and show them to who serves next.
            tracing::warn!("requests of virtual machines are left unanswered");
        }
    }
}
