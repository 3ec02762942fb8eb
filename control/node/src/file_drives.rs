//! Drives on a machine: files and block devices, with the test wrappers that the cluster file
//! asks for.

use crate::drives::{DriveSource, NoDevice};
use futures_util::future::LocalBoxFuture;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Instant};
use levada_device::{
    Device, DriveModel, FileDevice, FileDeviceError, ModelDevice, Prepare, VolatileDevice,
};
use levada_spec::{DriveSpec, Loaded, TestingSpec, Wrapper};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// How often a volatile drive writes a random part of its cache back.
const WRITE_BACK_EVERY: Duration = Duration::from_millis(5);
/// A node that was killed lets go of its drives only when the kernel has ended its I/O.
const LET_GO_LIMIT: Duration = Duration::from_secs(5);
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// The drives of a cluster file on this machine.
pub struct FileDrives {
    loaded: Loaded,
    /// The cluster that was up with them last.
    cluster: Option<Uuid>,
    /// Until then, a drive in use may be one that a dead process still holds.
    patient_until: Instant,
}

impl FileDrives {
    /// Drives as `loaded` names them, with which `cluster` was up last.
    #[must_use]
    pub fn new(loaded: Loaded, cluster: Option<Uuid>) -> Self {
        Self { loaded, cluster, patient_until: reactor::now() + LET_GO_LIMIT }
    }

    fn path(&self, drive: &DriveSpec) -> PathBuf {
        self.loaded.path(&drive.path)
    }

    fn wrap(&self, device: FileDevice) -> Rc<dyn Device> {
        let mut device: Rc<dyn Device> = Rc::new(device);
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

fn unusable(error: &FileDeviceError) -> NoDevice {
    NoDevice::Unusable { why: error.to_string() }
}

impl DriveSource for FileDrives {
    fn cluster(&self) -> Option<Uuid> {
        self.cluster
    }

    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        Box::pin(async move {
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
                    opened => {
                        return opened
                            .map(|device| self.wrap(device))
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
            let made = FileDevice::create(&path, size.0, Prepare::Reserve).await;
            made.map(|device| self.wrap(device)).map_err(|error| unusable(&error))
        })
    }

    fn in_place(&self, drive: &DriveSpec) -> bool {
        self.path(drive).exists()
    }
}
