//! Drives on a machine: files and block devices, with the test wrappers that the cluster file
//! asks for.

use crate::drives::{DriveSource, NoDevice};
use futures_util::future::LocalBoxFuture;
use levada_device::{
    Device, DriveModel, FileDevice, FileDeviceError, ModelDevice, Prepare, VolatileDevice,
};
use levada_spec::{DriveSpec, Loaded, TestingSpec, Wrapper};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// How often a volatile drive writes a random part of its cache back.
const WRITE_BACK_EVERY: Duration = Duration::from_millis(5);

/// The drives of a cluster file on this machine.
pub struct FileDrives {
    loaded: Loaded,
}

impl FileDrives {
    /// Drives as `loaded` names them.
    #[must_use]
    pub fn new(loaded: Loaded) -> Self {
        Self { loaded }
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
    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        Box::pin(async move {
            let path = self.path(drive);
            if !path.exists() {
                return Err(NoDevice::Absent { path: path.display().to_string() });
            }
            FileDevice::open(&path)
                .map(|device| self.wrap(device))
                .map_err(|error| unusable(&error))
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
}
