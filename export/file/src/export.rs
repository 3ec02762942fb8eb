//! The mount around the file: made, served, taken away.
//!
//! What always holds:
//! - [`Export::end`] returns when no request is being answered any more, so that what the volume lies on can be closed.
//! - A mount point that was made here goes with the export.
//!
//! After a crash the dead mount stays, and is taken away by the next [`Export::begin`] there.

use crate::handler::VolumeFile;
use levada_base::reactor::{self, JoinHandle};
use levada_fuse::session::Session;
use levada_fuse::transport;
use levada_fuse::transport::dev_fuse::{
    FuseMount, MountError, MountOptions, Root, Unmounted, clear_dead,
};
use levada_volume::Volume;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

/// Between two looks at what cannot be awaited.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Why a volume cannot be shown as a file.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The file to be mounted on is not there, and cannot be made.
    #[error("{} cannot be made", at.display())]
    Place { at: PathBuf, source: io::Error },
    /// What may become a mount point has content that would be hidden.
    #[error("{} holds {bytes} bytes, which would be hidden: name an empty file, or one that does not exist", at.display())]
    NotEmpty { at: PathBuf, bytes: u64 },
    /// The mount was refused, or cannot be taken away.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The kernel ended the connection, or does not serve it.
    #[error("the connection to the kernel broke")]
    Broken(#[source] io::Error),
}

/// A volume that is shown as a file.
pub struct Export<V> {
    at: PathBuf,
    /// `None` once it is out of the tree.
    mount: Option<FuseMount>,
    serving: JoinHandle<io::Result<()>>,
    session: Rc<Session<VolumeFile<V>>>,
    /// The mount point was made here.
    made: bool,
}

/// Makes the mount point if need be; true when it did.
fn make_place(at: &Path) -> Result<bool, ExportError> {
    clear_dead(at)?;
    let failed = |source| ExportError::Place { at: at.into(), source };
    match OpenOptions::new().write(true).create_new(true).open(at) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let there = std::fs::metadata(at).map_err(failed)?;
            if there.is_file() && there.len() > 0 {
                return Err(ExportError::NotEmpty { at: at.into(), bytes: there.len() });
            }
            Ok(false)
        }
        Err(error) => Err(failed(error)),
    }
}

impl<V: Volume + 'static> Export<V> {
    /// Shows `volume` as the file `at`; programs can use it when this returns. Whatever is there already must be an
    /// empty file.
    ///
    /// # Errors
    ///
    /// [`ExportError`]; then nothing is mounted.
    pub async fn begin(volume: V, at: &Path) -> Result<Self, ExportError> {
        let made = make_place(at)?;
        let begun = Self::mounted(volume, at, made).await;
        if begun.is_err() && made {
            // It is of no use to anybody.
            let _ = std::fs::remove_file(at);
        }
        begun
    }

    async fn mounted(volume: V, at: &Path, made: bool) -> Result<Self, ExportError> {
        let options = MountOptions {
            root: Root::File,
            source: "levada-array".into(),
            no_set_id: true,
            no_devices: true,
            ..MountOptions::default()
        };
        let (mount, channel) = FuseMount::new(at, &options)?;
        let at = mount.target().to_owned();
        let session = Rc::new(Session::new(VolumeFile::new(volume), VolumeFile::<V>::limits()));
        let serving = reactor::spawn(transport::reactor::serve(channel, Rc::clone(&session)));
        // The kernel opens the file once INIT is done, which the task above sees to.
        while session.terms().is_none() {
            if serving.is_finished() {
                return Err(ExportError::Broken(io::ErrorKind::ConnectionAborted.into()));
            }
            reactor::sleep(LOOK_EVERY).await;
        }
        Ok(Self { at, mount: Some(mount), serving, session, made })
    }

    /// Where it is shown.
    #[must_use]
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// Returns when the file is unmounted and its last user has closed it.
    ///
    /// # Errors
    ///
    /// [`ExportError::Broken`].
    pub async fn ended(&mut self) -> Result<(), ExportError> {
        // A task that was killed has nothing more to say.
        (&mut self.serving).await.unwrap_or(Ok(())).map_err(ExportError::Broken)
    }

    /// Takes the file out of the tree. In use it is served on until its last user closes it.
    ///
    /// # Errors
    ///
    /// [`ExportError::Mount`]; it stays where it is.
    pub async fn unmount(&mut self) -> Result<Unmounted, ExportError> {
        let Some(mount) = self.mount.take() else { return Ok(Unmounted::Already) };
        Ok(transport::reactor::unmount(mount).await?)
    }

    /// Ends it: calls of those who still use the file fail from here on. Returns when nothing is being answered any
    /// more.
    pub async fn end(mut self) {
        if let Err(error) = self.unmount().await {
            tracing::error!(%error, "the mount stays behind");
        }
        self.serving.abort();
        while self.session.meters().in_flight() > 0 {
            reactor::sleep(LOOK_EVERY).await;
        }
        if self.made {
            // Somebody else may have removed it.
            let _ = std::fs::remove_file(&self.at);
        }
    }
}
