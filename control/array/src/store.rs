//! What a drive is opened as: a file or block device of this machine, or a namespace of a remote subsystem.
//!
//! What always holds: one process at a time has a drive. A file is locked; a namespace is reserved when its array fences it. One that
//! cannot be is opened for an array only where a power fence shuts other servers out. A target that forgets its reservations is believed what the superblocks say.

use crate::error::ArrayError;
use futures_util::future::pending;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::Reactor;
use levada_desk::{PowerFenceError, Taking, power_fence};
use levada_device::nvme::{Host, NvmeNamespace, NvmeUrl, Options};
use levada_device::{BlockError, Device, FileDevice, HealthPage, Witness};
use levada_health::PathStatus;
use levada_raid::Recorded;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

/// An open drive.
#[derive(Clone)]
pub(crate) enum Store {
    File(Rc<FileDevice>),
    Remote(Rc<NvmeNamespace>, NvmeUrl),
}

/// The URL that a path is; `None`: it is a path.
pub(crate) fn url_of(path: &Path) -> Option<Result<NvmeUrl, ArrayError>> {
    let text = path.to_str().filter(|text| NvmeUrl::is_meant(text))?;
    let wrong = |source| ArrayError::Url { url: text.into(), source };
    Some(text.parse().map_err(wrong))
}

async fn connect(url: &NvmeUrl) -> Result<NvmeNamespace, ArrayError> {
    let host = Host::anonymous()
        .map_err(|error| ArrayError::Url { url: url.to_string(), source: error.into() })?;
    Ok(NvmeNamespace::open(url, Options::new(host)).await?)
}

impl Store {
    /// Opens a drive for an array. `has_power_fence`: it may be one without reservations.
    pub async fn open(path: &Path, has_power_fence: bool) -> Result<Self, ArrayError> {
        let Some(url) = url_of(path) else {
            return Ok(Self::File(Rc::new(FileDevice::open(path)?)));
        };
        let url = url?;
        let device = connect(&url).await?;
        if !device.has_reservations() && !has_power_fence {
            device.close().await;
            return Err(ArrayError::Unguarded { url: url.to_string() });
        }
        Ok(Self::Remote(Rc::new(device), url))
    }

    pub fn device(&self) -> Rc<dyn Device> {
        match self {
            Self::File(file) => Rc::clone(file) as Rc<dyn Device>,
            Self::Remote(namespace, _) => Rc::clone(namespace) as Rc<dyn Device>,
        }
    }

    /// True while `path` leads to this very drive.
    pub fn is_at(&self, path: &Path) -> bool {
        match self {
            Self::File(file) => file.is_at(path),
            Self::Remote(namespace, url) => url_of(path).is_some_and(|other| {
                // 0 is the only one that there is.
                let is_it = |number: u32| number == 0 || number == namespace.number();
                other.is_ok_and(|other| other.subsystem == url.subsystem && is_it(other.namespace))
            }),
        }
    }

    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File(one), Self::File(other)) => Rc::ptr_eq(one, other),
            (Self::Remote(one, _), Self::Remote(other, _)) => Rc::ptr_eq(one, other),
            (Self::File(_), Self::Remote(..)) | (Self::Remote(..), Self::File(_)) => false,
        }
    }

    /// False where there is a cache of this machine between.
    pub fn is_direct(&self) -> bool {
        match self {
            Self::File(file) => file.is_direct(),
            Self::Remote(..) => true,
        }
    }

    /// The latest owner that is known to a drive by itself.
    pub async fn owner(&self) -> Epoch {
        match self {
            Self::File(_) => Epoch::default(),
            Self::Remote(namespace, _) => namespace.owner().await.unwrap_or_default(),
        }
    }

    /// How long after another server is gone something of it may still reach the drive.
    pub fn settle(&self) -> Duration {
        match self {
            Self::Remote(namespace, _) if !namespace.has_reservations() => namespace.settle(),
            // What is preempted is refused; what the kernel has of a process that is gone, it has written before it lets go of the lock.
            Self::Remote(..) | Self::File(_) => Duration::ZERO,
        }
    }

    /// True where nobody is kept out before the drive is fenced.
    pub fn is_remote(&self) -> bool {
        match self {
            Self::File(_) => false,
            Self::Remote(..) => true,
        }
    }

    /// Keeps everybody else out, for the owner of `epoch`. A file is locked already.
    pub async fn reserve(&self, epoch: Epoch) -> Result<(), BlockError> {
        match self {
            Self::File(_) => Ok(()),
            Self::Remote(namespace, _) => namespace.fence(epoch).await,
        }
    }

    /// The same whoever else has it, of however late an epoch: who asks knows that nobody uses it any more.
    pub async fn seize(&self, epoch: Epoch) -> Result<(), BlockError> {
        let Self::Remote(namespace, _) = self else { return Ok(()) };
        let fenced = namespace.fence(epoch).await;
        let Err(BlockError::Fenced { seen, .. }) = fenced else { return fenced };
        namespace.fence(seen.next()).await?;
        namespace.relinquish().await?;
        namespace.fence(epoch).await
    }

    /// This one was opened in place of `earlier`, which is given up, and of which something may still reach the drive. Said before anything
    /// is written.
    pub fn comes_after(&self, earlier: &Self) {
        if let (Self::Remote(namespace, _), Self::Remote(earlier, _)) = (self, earlier)
            && !namespace.has_reservations()
        {
            namespace.comes_after(earlier.changes());
        }
    }

    /// From now on its superblocks say whether it is still `member` of `array`, and who the last owner was: this one, if `is_written`.
    pub fn belongs_to(&self, array: Uuid, member: Uuid, is_written: bool) {
        let Self::Remote(namespace, _) = self else { return };
        let owner = move |block: &[u8]| {
            let (recorded, index) = Recorded::identify(block)?;
            let its = recorded.members.get(index).filter(|it| it.uuid == member);
            its.filter(|_| recorded.uuid == array).map(|_| recorded.order.0)
        };
        let blocks = vec![0, Recorded::BYTES];
        let witness = Witness { blocks, owner: Rc::new(owner), is_there: is_written };
        namespace.recognise_by(Some(witness));
    }

    /// It is about to become another member.
    pub fn belongs_nowhere(&self) {
        if let Self::Remote(namespace, _) = self {
            namespace.recognise_by(None);
        }
    }

    /// How its paths are, of one on the network.
    pub fn paths(&self) -> Vec<PathStatus> {
        match self {
            Self::File(_) => Vec::new(),
            Self::Remote(namespace, _) => {
                namespace.paths().into_iter().map(PathStatus::from).collect()
            }
        }
    }

    /// What the drive says of its health, now; `None`: it does not tell.
    pub async fn look_at_health(&self) -> Option<HealthPage> {
        match self {
            Self::File(file) => file.look_at_health().await,
            Self::Remote(namespace, _) => namespace.look_at_health().await,
        }
    }

    /// Completes when the drive says by itself, after this call, that it has something to warn of.
    pub async fn warned(&self) {
        match self {
            // The kernel keeps what such a drive says.
            Self::File(_) => pending().await,
            Self::Remote(namespace, _) => namespace.warned().await,
        }
    }

    /// Completes when a later owner turns out to have the drive: which.
    pub async fn lost(&self) -> Epoch {
        match self {
            // Locked.
            Self::File(_) => pending().await,
            Self::Remote(namespace, _) => namespace.lost().await,
        }
    }

    /// It has to be opened anew.
    pub fn is_given_up(&self) -> bool {
        match self {
            Self::File(_) => false,
            Self::Remote(namespace, _) => namespace.is_given_up(),
        }
    }

    /// Lets go of a target in order, when nobody else has the drive.
    pub async fn close(self) {
        if let Self::Remote(namespace, _) = self
            && let Some(namespace) = Rc::into_inner(namespace)
        {
            namespace.close().await;
        }
    }
}

/// Has the power fence shut everybody else out of an array, of which `last` was the latest owner.
pub(crate) async fn shut_out(
    command: &str,
    name: &str,
    array: Uuid,
    last: Epoch,
    paths: &[PathBuf],
    stores: &[Store],
) -> Result<(), PowerFenceError> {
    let taking = Taking {
        name: name.to_owned(),
        uuid: array.to_string(),
        last,
        drives: paths.iter().map(|path| path.display().to_string()).collect(),
        settle: stores.iter().map(Store::settle).max().unwrap_or_default(),
    };
    power_fence(command, &taking).await
}

/// What there is to see of a remote drive: its names, its length and its first blocks.
pub(crate) struct Glimpse {
    pub names: Vec<u8>,
    pub bytes: u64,
    pub head: Vec<u8>,
}

/// Looks at a remote drive, by a thread and a reactor of its own: who looks may be within another one, which stands still meanwhile, for as
/// long as it takes to connect.
pub(crate) fn glimpse(url: &NvmeUrl, head_bytes: u64) -> Result<Glimpse, ArrayError> {
    let url = url.clone();
    let looking = std::thread::spawn(move || {
        let reactor = Reactor::new().map_err(ArrayError::system("use io_uring"))?;
        reactor.block_on(async {
            let device = connect(&url).await?;
            let into = levada_base::BufMut::zeroed(head_bytes as usize).into_vec();
            let head = device.read(0, into).await;
            let bytes = device.info().capacity_bytes;
            let names = device.names();
            device.close().await;
            let head = head?.iter().flat_map(|part| part.to_vec()).collect();
            Ok(Glimpse { names, bytes, head })
        })
    });
    looking.join().unwrap_or(Err(ArrayError::Interrupted))
}
