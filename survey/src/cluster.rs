//! A cluster in a box on members of any speed: what `levada up` makes, but for its drives, on a
//! thread of its own.

use crate::members::Drives;
use crate::service::{Service, Way};
use anyhow::{Context, Result, anyhow};
use futures_util::future::LocalBoxFuture;
use levada_base::ids::TargetId;
use levada_base::reactor;
use levada_base::units::MIB;
use levada_client::{Client, ClientConfig, housekeeper};
use levada_device::Device;
use levada_node::assembly::{self, StartOptions, Tuning};
use levada_node::drives::MayOverwrite;
use levada_node::drives::{DriveSource, NoDevice};
use levada_spec::{BOX_DRIVES, ClusterFile, DriveSpec};
use levada_wire::frame::Class;
use levada_wire::rpc::Handler;
use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// Bytes of a drive: the least that a box takes, and twelve of them fit into memory.
const DRIVE_BYTES: u64 = 512 * MIB;

/// Starts a box on new drives, with the services on a thread of their own.
///
/// # Errors
///
/// What keeps the cluster from coming up.
pub(crate) fn start(drives: Drives) -> Result<Service> {
    Service::start(async move |address| {
        // A box takes a third of the free space.
        let free_bytes = 3 * DRIVE_BYTES * BOX_DRIVES as u64;
        let file = ClusterFile::box_default(Path::new("/"), free_bytes)?;
        let drives = drives.make("box", BOX_DRIVES, DRIVE_BYTES).await?;
        let source = MadeDrives(RefCell::new(drives));
        let options = StartOptions {
            may_overwrite: MayOverwrite::Nothing,
            without_majority: false,
            tuning: Tuning::default(),
            address,
            progress: &|_| {},
        };
        let cluster = assembly::start(file, &source, options).await?;
        Ok(Rc::clone(&cluster.router) as Rc<dyn Handler>)
    })
}

/// A client of the box at `address`.
pub(crate) async fn connect(address: &str, way: Way) -> Result<Client> {
    connect_as(address, way, Class::Foreground).await
}

/// A client that is told of no change before it is durable.
pub(crate) async fn connect_strict(address: &str, way: Way) -> Result<Client> {
    connect_as(address, way, Class::Background).await
}

async fn connect_as(address: &str, way: Way, class: Class) -> Result<Client> {
    let uuid = u128::from(reactor::random_u64()).to_le_bytes();
    // As a mount has them.
    let leases = true;
    let config = ClientConfig::new(way.transport(), address, TargetId(0), uuid);
    let config = ClientConfig { class, leases, ..config };
    Client::connect(config).await.context("connecting to the box")
}

/// Waits this long at most for a file to be closed.
const RELEASED_WITHIN: Duration = Duration::from_secs(30);

/// Files, directories and links that there are, with those that have no name any more.
pub(crate) async fn inodes(client: &Client) -> Result<u64> {
    let space = client.space().await?;
    Ok(space.inodes - space.inodes_free)
}

/// Gives the space of a deleted file back, and waits until it is there: until `left` inodes are. The kernel
/// releases a closed file when it likes, and until then it takes its space.
pub(crate) async fn clean_up(client: &Client, left: u64) -> Result<()> {
    let given_back = async {
        loop {
            housekeeper::do_chores(client).await?;
            if inodes(client).await? <= left {
                return anyhow::Ok(());
            }
            reactor::sleep(Duration::from_millis(1)).await;
        }
    };
    let in_time = reactor::timeout(RELEASED_WITHIN, given_back).await;
    in_time.map_err(|_| anyhow!("the space of a deleted file is not given back"))?
}

/// Drives that were made before; handed out as they are asked for.
struct MadeDrives(RefCell<Vec<Rc<dyn Device>>>);

impl DriveSource for MadeDrives {
    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        let path = drive.path.display().to_string();
        Box::pin(async move { Err(NoDevice::Absent { path }) })
    }

    fn create<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        let path = drive.path.display().to_string();
        let device = self.0.borrow_mut().pop();
        Box::pin(async move { device.ok_or(NoDevice::Absent { path }) })
    }
}
