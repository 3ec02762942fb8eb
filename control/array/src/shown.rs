//! How a served array is shown: as a file, over NBD or NVMe/TCP, to virtual machines, or in several of these ways; of a pool its volumes,
//! in each of these ways but the first.

use crate::error::ArrayError;
use crate::request::absolute;
use crate::volumes::Volumes;
use futures_util::future::{LocalBoxFuture, pending, ready};
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, JoinHandle};
use levada_export_file::{Export, Unmounted};
use levada_export_nbd::{Address, Exports, Server, Tls};
use levada_export_nvmet::{self as nvmet, Follower, Hosts, Nqn, Opened, Subsystem, Target};
use levada_export_vhost as vhost;
use levada_volume::Volume;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// What is wanted.
#[derive(Clone, Debug, Default)]
pub struct Shows {
    /// The file that shows the array.
    pub at: Option<PathBuf>,
    /// Where NBD servers listen.
    pub nbd: Vec<Address>,
    /// Sockets at which virtual machines find it; of a pool directories, with a socket for each volume.
    pub vhost: Vec<PathBuf>,
    /// Where NVMe hosts find it.
    pub nvme: Vec<SocketAddr>,
    /// Those that may; empty: all, unless there are secrets.
    pub nvme_hosts: Vec<Nqn>,
    /// Secrets of hosts, which may as well, and have to prove who they are, and their keys of TLS.
    pub nvme_keys: Option<PathBuf>,
    /// No NVMe host in the clear.
    pub nvme_tls_only: bool,
    /// The directory of the NBD servers certificates; without one they speak in the clear.
    pub tls: Option<PathBuf>,
    /// Their clients must show certificates, too.
    pub verify_clients: bool,
    /// Cores beside the array's own that carry connections, also those to remote drives.
    pub network_cores: usize,
    /// Cores beside the array's own that serve the rings of guests.
    pub ring_cores: usize,
}

impl Shows {
    pub(crate) fn tls(&self) -> Result<Option<Tls>, ArrayError> {
        let directory = self.tls.as_deref();
        Ok(directory.map(|directory| Tls::open(directory, self.verify_clients)).transpose()?)
    }
}

/// What is shown of an array.
#[derive(Clone)]
pub(crate) enum What {
    Whole(Rc<dyn Volume>),
    Pool(Rc<Volumes>),
}

/// An array that this process has.
#[derive(Clone, Copy)]
pub(crate) struct Owned<'a> {
    pub name: &'a str,
    pub uuid: Uuid,
    pub epoch: Epoch,
}

/// An array that is shown.
pub struct Shown {
    file: Option<Export<Rc<dyn Volume>>>,
    servers: Vec<Server>,
    vhost: Vec<vhost::Server<dyn Volume>>,
    /// Of a pool, with the tasks that keep sockets in step with volumes.
    directories: Vec<(Rc<vhost::Directory>, JoinHandle<()>)>,
    nvme: Option<Nvme>,
    /// The export that addresses are told with: none of a pool, which has several.
    export: String,
    with_tls: bool,
}

/// The one export of an array, under its name and as the default.
struct OnlyExport {
    name: String,
    volume: Rc<dyn Volume>,
}

impl Exports for OnlyExport {
    fn list(&self) -> LocalBoxFuture<'_, Vec<String>> {
        Box::pin(async { vec![self.name.clone()] })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        let is_it = name.is_empty() || name == self.name;
        Box::pin(async move { is_it.then(|| Rc::clone(&self.volume)) })
    }
}

/// An array as an NVMe target, or its volumes.
struct Nvme {
    target: Rc<Target>,
    paths: Vec<nvmet::Path>,
    /// Of the subsystem, or what those of volumes begin with.
    name: String,
    /// Keeps subsystems in step with volumes.
    following: Option<JoinHandle<()>>,
}

impl Nvme {
    fn begin(shows: &Shows, what: What, array: Owned<'_>) -> Result<Self, ArrayError> {
        let Owned { name: array, uuid, epoch } = array;
        let epoch = epoch.0;
        let (target, name) = (Rc::new(Target::new()), format!("{}:{array}", nvmet::NQN_PREFIX));
        let (names, keys) = (shows.nvme_hosts.iter().cloned(), shows.nvme_keys.as_deref());
        let hosts = Hosts::chosen(names, keys, shows.nvme_tls_only)?;
        if shows.nvme_tls_only {
            target.require_tls();
        }
        let paths: Result<Vec<_>, _> =
            shows.nvme.iter().map(|address| target.listen(*address)).collect();
        let (following, paths) = match (what, paths?) {
            (What::Pool(volumes), paths) => {
                let follower = Follower::new(Rc::clone(&target), volumes, &name, hosts, epoch)?;
                (Some(reactor::spawn(async move { follower.run().await })), paths)
            }
            (What::Whole(volume), paths) => {
                let nqn = Nqn::new(name.clone())?;
                let subsystem = Subsystem::new(nqn.clone(), nvmet::serial_of(&nqn), hosts);
                let subsystem = subsystem.of_owner(epoch);
                let opened = Opened { volume, guid: uuid.into_bytes() };
                let open = move || -> LocalBoxFuture<'static, Option<Opened>> {
                    Box::pin(ready(Some(opened.clone())))
                };
                subsystem.add(1, Rc::new(open));
                target.add(subsystem);
                target.begin();
                (None, paths)
            }
        };
        Ok(Self { target, paths, name, following })
    }

    async fn end(self) {
        if let Some(following) = self.following {
            following.abort();
        }
        self.target.end().await;
    }
}

impl Shown {
    pub(crate) async fn begin(
        shows: &Shows,
        tls: Option<Tls>,
        what: What,
        array: Owned<'_>,
    ) -> Result<Self, ArrayError> {
        let export = match what {
            What::Pool(_) if shows.at.is_some() => {
                return Err(ArrayError::PoolAsWhole { array: array.name.into() });
            }
            What::Pool(_) => String::new(),
            What::Whole(_) => array.name.to_owned(),
        };
        let mut shown = Self {
            file: None,
            servers: Vec::new(),
            vhost: Vec::new(),
            directories: Vec::new(),
            nvme: None,
            export,
            with_tls: tls.is_some(),
        };
        let begun = async {
            if !shows.nvme.is_empty() {
                shown.nvme = Some(Nvme::begin(shows, what.clone(), array)?);
            }
            shown.begin_all(shows, tls, what).await
        };
        let begun = begun.await;
        match begun {
            Ok(()) => Ok(shown),
            Err(error) => {
                shown.end().await;
                Err(error)
            }
        }
    }

    async fn begin_all(
        &mut self,
        shows: &Shows,
        tls: Option<Tls>,
        what: What,
    ) -> Result<(), ArrayError> {
        for address in &shows.nbd {
            let exports: Rc<dyn Exports> = match what.clone() {
                What::Whole(volume) => Rc::new(OnlyExport { name: self.export.clone(), volume }),
                What::Pool(volumes) => volumes,
            };
            self.servers.push(Server::listen(address, exports, tls.clone())?);
        }
        let cores = match shows.vhost.is_empty() {
            true => None,
            false => vhost::RingCores::start(shows.ring_cores)
                .map_err(ArrayError::system("start threads for rings"))?,
        };
        let volume = match what {
            What::Whole(volume) => volume,
            What::Pool(volumes) => {
                for at in &shows.vhost {
                    self.begin_directory(absolute(at)?, Rc::clone(&volumes), cores.clone())?;
                }
                return Ok(());
            }
        };
        for at in &shows.vhost {
            let at = absolute(at)?;
            let (serial, cores) = (self.export.clone(), cores.clone());
            let options = vhost::Options { serial, cores, ..vhost::Options::default() };
            let listening = vhost::Server::listen(&at, Rc::clone(&volume), options);
            self.vhost.push(listening.await?);
        }
        if let Some(at) = &shows.at {
            self.file = Some(Export::begin(volume, at).await?);
        }
        Ok(())
    }

    fn begin_directory(
        &mut self,
        at: PathBuf,
        volumes: Rc<Volumes>,
        cores: Option<Rc<vhost::RingCores>>,
    ) -> Result<(), ArrayError> {
        let directory = vhost::Directory::new(at.clone(), volumes, cores)
            .map_err(|source| ArrayError::SocketDirectory { at, source })?;
        let directory = Rc::new(directory);
        let running = Rc::clone(&directory);
        let running = reactor::spawn(async move { running.run().await });
        self.directories.push((directory, running));
        Ok(())
    }

    /// The file that shows it.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_ref().map(Export::at)
    }

    /// Where NBD clients find it.
    #[must_use]
    pub fn uris(&self) -> Vec<String> {
        let uri = |server: &Server| server.address().uri(&self.export, self.with_tls);
        self.servers.iter().map(uri).collect()
    }

    /// Sockets at which virtual machines find it; of a pool their directories.
    #[must_use]
    pub fn sockets(&self) -> Vec<PathBuf> {
        let directories = self.directories.iter().map(|(directory, _)| directory.at());
        self.vhost.iter().map(vhost::Server::at).chain(directories).map(Path::to_owned).collect()
    }

    /// Those directories, for who tells what is the matter with them.
    pub(crate) fn directories(&self) -> Vec<Rc<vhost::Directory>> {
        self.directories.iter().map(|(directory, _)| Rc::clone(directory)).collect()
    }

    /// Where NVMe hosts find it: `nvme+tcp://ADDRESS/SUBSYSTEM`; of a pool what the names of its subsystems begin with.
    #[must_use]
    pub fn paths(&self) -> Vec<String> {
        let nvme = self.nvme.iter();
        let urls = nvme.flat_map(|nvme| {
            nvme.paths.iter().map(|path| format!("nvme+tcp://{}/{}", path.address(), nvme.name))
        });
        urls.collect()
    }

    /// The same, for who takes them out of service.
    pub(crate) fn nvme_paths(&self) -> Vec<nvmet::Path> {
        self.nvme.iter().flat_map(|nvme| nvme.paths.iter().cloned()).collect()
    }

    /// Every place where it is shown, in words.
    #[must_use]
    pub fn places(&self) -> Vec<String> {
        let file = self.file().map(|at| at.display().to_string());
        let sockets = self.sockets().into_iter().map(|at| format!("vhost:{}", at.display()));
        file.into_iter().chain(self.uris()).chain(self.paths()).chain(sockets).collect()
    }

    /// Returns when its file is unmounted; never without one.
    pub(crate) async fn ended(&mut self) -> Result<(), ArrayError> {
        match &mut self.file {
            Some(file) => Ok(file.ended().await?),
            None => pending().await,
        }
    }

    pub(crate) async fn unmount(&mut self) -> Result<Unmounted, ArrayError> {
        match &mut self.file {
            Some(file) => Ok(file.unmount().await?),
            None => Ok(Unmounted::Already),
        }
    }

    /// Ends all of it. Returns when nothing is being answered any more.
    pub(crate) async fn end(self) {
        for server in self.servers {
            server.end().await;
        }
        for server in self.vhost {
            server.end().await;
        }
        for (directory, running) in self.directories {
            running.abort();
            directory.end().await;
        }
        if let Some(nvme) = self.nvme {
            nvme.end().await;
        }
        if let Some(file) = self.file {
            file.end().await;
        }
    }
}
