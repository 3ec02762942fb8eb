//! Drives as a machine has them: files, block devices and namespaces on the network ([`RemoteDrives`]), with the test
//! wrappers that the cluster file asks for.

use crate::drives::{DriveSource, NoDevice};
use crate::remote_drives::RemoteDrives;
use crate::state::StateDir;
use futures_util::future::LocalBoxFuture;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Instant};
use levada_desk::{PowerFenceError, Taking, power_fence};
use levada_device::{
    Device, DriveModel, FileDevice, FileDeviceError, HealthPage, ModelDevice, Prepare,
    VolatileDevice,
};
use levada_health::PathStatus;
use levada_spec::{DriveSpec, Loaded, TestingSpec, Wrapper};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// How often a volatile drive writes a random part of its cache back.
const WRITE_BACK_EVERY: Duration = Duration::from_millis(5);
/// A node that was killed lets go of its drives only when the kernel has ended its I/O.
const LET_GO_LIMIT: Duration = Duration::from_secs(5);
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// The drives of a cluster file on this machine.
pub struct FileDrives {
    loaded: Loaded,
    /// Notes the cluster that was up with them last.
    state: StateDir,
    /// Until then, a drive in use may be one that a dead process still holds.
    patient_until: Instant,
    /// What was opened, and where, as long as somebody uses it; the latest comes last.
    opened: RefCell<Vec<(PathBuf, Weak<FileDevice>)>>,
    remote: RemoteDrives,
}

impl FileDrives {
    /// Drives as `loaded` names them; `state` notes which cluster was up with them last.
    #[must_use]
    pub fn new(loaded: Loaded, state: StateDir) -> Self {
        let patient_until = reactor::now() + LET_GO_LIMIT;
        let has_power_fence = loaded.cluster.power_fence.is_some();
        let (opened, remote) = (RefCell::default(), RemoteDrives::new(has_power_fence));
        Self { loaded, state, patient_until, opened, remote }
    }

    fn path(&self, drive: &DriveSpec) -> PathBuf {
        self.loaded.path(&drive.path)
    }

    fn wrap(&self, path: &Path, device: FileDevice) -> Rc<dyn Device> {
        let device = Rc::new(device);
        let mut opened = self.opened.borrow_mut();
        opened.retain(|(_, device)| device.strong_count() > 0);
        opened.push((path.to_owned(), Rc::downgrade(&device)));
        self.as_tested(device)
    }

    /// What is open at `path`, the latest of it.
    fn opened_at(&self, path: &Path) -> Option<Rc<FileDevice>> {
        let opened = self.opened.borrow();
        let mut there = opened.iter().rev().filter(|(at, _)| *at == path);
        there.find_map(|(_, device)| device.upgrade())
    }

    /// Within the wrappers that the cluster file asks for.
    fn as_tested(&self, mut device: Rc<dyn Device>) -> Rc<dyn Device> {
        if let Some(TestingSpec { wrapper, model, .. }) = &self.loaded.cluster.testing {
            if let Some(model) = model {
                let model = DriveModel {
                    bytes_per_s: model.rate.0,
                    iops: model.iops,
                    latency: Duration::from_micros(model.latency_us),
                    flush: Duration::from_micros(model.flush_us),
                };
                device = Rc::new(ModelDevice::new(device, model));
            }
            match wrapper {
                Wrapper::None => {}
                Wrapper::Volatile => {
                    let volatile = Rc::new(VolatileDevice::new(device));
                    // Lives as long as the node's tasks do.
                    drop(volatile.spawn_write_back(WRITE_BACK_EVERY));
                    device = volatile;
                }
            }
        }
        device
    }
}

/// True for a file without a byte. What a link leads to is somebody else's.
fn is_empty(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|there| there.is_file() && there.len() == 0)
}

fn unusable(error: &FileDeviceError) -> NoDevice {
    NoDevice::Unusable { why: error.to_string() }
}

impl DriveSource for FileDrives {
    fn shut_out<'a>(
        &'a self,
        cluster: Option<Uuid>,
        last: Epoch,
    ) -> LocalBoxFuture<'a, Result<bool, PowerFenceError>> {
        Box::pin(async move {
            let file = &self.loaded.cluster;
            let Some(command) = &file.power_fence else { return Ok(false) };
            let taking = Taking {
                name: file.name.clone(),
                uuid: cluster.map_or_else(String::new, |uuid| uuid.to_string()),
                last,
                drives: file.drives.iter().map(|drive| drive.path.display().to_string()).collect(),
                settle: self.remote.settle(),
            };
            power_fence(command, &taking).await?;
            self.remote.were_shut_out();
            Ok(true)
        })
    }

    fn cluster(&self) -> Option<Uuid> {
        self.state.cluster()
    }

    fn forget_cluster(&self) -> std::io::Result<()> {
        self.state.forget_cluster()
    }

    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        Box::pin(async move {
            if drive.is_remote() {
                return self.remote.open(drive).await.map(|device| self.as_tested(device));
            }
            let path = self.path(drive);
            if !path.exists() {
                return Err(NoDevice::Absent { path: path.display().to_string() });
            }
            loop {
                match FileDevice::open(&path) {
                    // Going on without it would cost the array a member and a rebuild.
                    Err(FileDeviceError::InUse { .. }) if reactor::now() < self.patient_until => {
                        reactor::sleep(LOOK_AGAIN_AFTER).await;
                    }
                    // Nobody uses it.
                    Err(FileDeviceError::TooSmall { .. }) if is_empty(&path) => {
                        return Err(NoDevice::Empty { path: path.display().to_string() });
                    }
                    opened => {
                        return opened
                            .map(|device| self.wrap(&path, device))
                            .map_err(|error| unusable(&error));
                    }
                }
            }
        })
    }

    fn create<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        Box::pin(async move {
            let path = self.path(drive);
            let Some(size) = drive.size else {
                return Err(NoDevice::Absent { path: path.display().to_string() });
            };
            if let Some(dir) = path.parent() {
                std::fs::create_dir_all(dir).map_err(|error| NoDevice::Unusable {
                    why: format!("{}: {error}", dir.display()),
                })?;
            }
            if let Err(NoDevice::Empty { .. }) = self.open(drive).await {
                std::fs::remove_file(&path).map_err(|error| NoDevice::Unusable {
                    why: format!("the empty file {}: {error}", path.display()),
                })?;
                tracing::info!(drive = drive.name, "removed an empty file, to make it anew");
            }
            let made = FileDevice::create(&path, size.0, Prepare::Reserve).await;
            made.map(|device| self.wrap(&path, device)).map_err(|error| unusable(&error))
        })
    }

    fn owner<'a>(&'a self, drive: &'a DriveSpec) -> LocalBoxFuture<'a, Epoch> {
        Box::pin(self.remote.owner(drive))
    }

    fn needs_power_fence(&self, drive: &DriveSpec) -> bool {
        self.remote.needs_power_fence(drive)
    }

    fn paths(&self, drive: &DriveSpec) -> Vec<PathStatus> {
        self.remote.paths(drive)
    }

    fn look_at_health<'a>(&'a self, device: &'a str) -> LocalBoxFuture<'a, Option<HealthPage>> {
        Box::pin(async move {
            match self.opened_at(Path::new(device)) {
                Some(device) => device.look_at_health().await,
                None => self.remote.look_at_health(device).await,
            }
        })
    }

    fn warned(&self, device: &str) -> LocalBoxFuture<'_, ()> {
        // What drives of this machine say is kept by the kernel.
        self.remote.warned(device)
    }

    fn lost(&self, device: &str) -> LocalBoxFuture<'_, Epoch> {
        self.remote.lost(device)
    }

    fn is_reached(&self, device: &str) -> bool {
        self.remote.is_reached(device)
    }

    fn in_place(&self, drive: &DriveSpec) -> bool {
        if drive.is_remote() {
            // Its paths tell when they lead to another one.
            return true;
        }
        let path = self.path(drive);
        match self.opened_at(&path) {
            Some(device) => device.is_at(&path),
            // It was found at another drive's path: drives may change places.
            None => path.exists(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use levada_base::units::MIB;
    use levada_spec::{Bytes, ClusterFile};

    /// A file that is there is not enough: it may be another one than the node uses.
    #[test]
    fn a_drive_is_in_place_as_long_as_its_path_leads_to_what_is_in_use() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("levada.toml");
        let cluster = ClusterFile::box_default(dir.path(), 40 << 30).expect("room");
        std::fs::write(&file, cluster.to_toml()).expect("written");
        let loaded = ClusterFile::load(&file).expect("reads");
        let mut drive = loaded.cluster.drives[0].clone();
        drive.size = Some(Bytes::mib(2));
        let path = loaded.path(&drive.path);
        Reactor::new().expect("io_uring").block_on(async {
            let drives = FileDrives::new(loaded, StateDir(dir.path().join("state")));
            assert!(!drives.in_place(&drive));
            let old = drives.create(&drive).await.expect("made");
            assert!(drives.in_place(&drive));
            std::fs::remove_file(&path).expect("removed");
            assert!(!drives.in_place(&drive));
            // One that was looked at and not taken changes nothing.
            std::fs::write(&path, vec![0; 2 * MIB as usize]).expect("written");
            drop(drives.open(&drive).await.expect("another file"));
            assert!(!drives.in_place(&drive), "another file is there");
            // The old one is still open when the new one has come in.
            let new = drives.open(&drive).await.expect("opens");
            assert!(drives.in_place(&drive));
            drop((old, new));
        });
    }

    #[test]
    fn a_drive_file_without_a_byte_is_not_yet_made() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("levada.toml");
        let cluster = ClusterFile::box_default(dir.path(), 40 << 30).expect("room enough");
        std::fs::write(&file, cluster.to_toml()).expect("written");
        let loaded = ClusterFile::load(&file).expect("as written");
        let mut specs = loaded.cluster.drives.clone();
        specs.iter_mut().for_each(|spec| spec.size = Some(Bytes::mib(2)));
        let path = |at: usize| loaded.path(&specs[at].path);
        std::fs::create_dir_all(path(0).parent().expect("a directory")).expect("made");
        std::fs::write(path(0), "").expect("written");
        std::fs::write(path(1), "data").expect("written");
        let elsewhere = dir.path().join("elsewhere");
        std::fs::write(&elsewhere, "").expect("written");
        std::os::unix::fs::symlink(&elsewhere, path(2)).expect("linked");
        Reactor::new().expect("io_uring").block_on(async {
            let drives = FileDrives::new(loaded.clone(), StateDir(dir.path().join("state")));
            let none = drives.open(&specs[0]).await.err().expect("it has no room");
            assert!(matches!(none, NoDevice::Empty { .. }) && none.can_be_made(&specs[0]));
            let made = drives.create(&specs[0]).await.expect("made anew");
            assert_eq!(made.info().capacity_bytes, 2 * MIB);
            for spec in &specs[1..3] {
                let none = drives.open(spec).await.err().expect("too small");
                assert!(matches!(none, NoDevice::Unusable { .. }), "{none}");
                assert!(drives.create(spec).await.is_err(), "somebody else's");
            }
        });
        assert_eq!(std::fs::read_to_string(path(1)).expect("there"), "data");
        assert!(path(2).is_symlink() && elsewhere.exists());
    }
}
