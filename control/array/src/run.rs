//! The process that has an array open: a desk, signals, and where it serves it what shows the array.
//!
//! What always holds:
//! - One process per array: its drives are locked before its desk is opened, and the desk is closed before they are free.
//! - However it ends but by a crash, the array is closed: flushed, and nothing left to resync.
//!
//! After a crash the socket stays; whoever has the drives next replaces it.

use crate::drives::{array_of, sight_all};
use crate::error::ArrayError;
use crate::keeper::{Clerk, Keeper, Opening};
use crate::place;
use crate::request::{Pace, Reply, Request, absolute, ask};
use crate::shown::{Owned, Shown, Shows, What};
use crate::status::Status;
use futures_util::future::{Either, select};
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{self, Group, Reactor, mailbox};
use levada_device::FileDeviceError;
use levada_export_file::Unmounted;
use levada_export_nbd::Tls;
use levada_volume::ArrayVolume;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long a drive may be in use by somebody who does not answer: one that is just opening or closing the array, or whose
/// process was killed (the kernel takes a moment to drop its locks).
const BUSY_FOR: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long to poll for the next request before sleeping.
const SPIN: Duration = Duration::from_micros(100);

/// An array to be opened.
#[derive(Clone, Debug)]
pub struct Keeping {
    pub drives: Vec<PathBuf>,
    pub opening: Opening,
    pub pace: Pace,
    /// Members that are much slower than the others are read like these.
    pub read_slow: bool,
    /// What shuts other servers out before the array is taken, if drives cannot.
    pub power_fence: Option<String>,
}

/// Carries `work` out with whoever has the array open, and opens it for that where nobody has. `work` is given the
/// socket of the array, and may ask there as often as it likes. Opened for it, nothing is rebuilt unasked.
///
/// # Errors
///
/// [`ArrayError`]; of the work itself in its own result.
pub fn ask_or_open<T: Send + 'static>(
    keeping: &Keeping,
    work: impl FnOnce(&Path) -> T + Send + 'static,
) -> Result<T, ArrayError> {
    let begun = Instant::now();
    let mut work = Some(work);
    loop {
        let (socket, status) = who_has(&keeping.drives)?;
        let mine = work.take().ok_or(ArrayError::Interrupted)?;
        if status.is_some() {
            return Ok(mine(&socket));
        }
        let reactor = Reactor::new().map_err(ArrayError::system("use io_uring"))?;
        let opened = reactor.block_on(async {
            let opened = match Open::begin(keeping, &socket, false).await {
                Err(ArrayError::Drive(FileDeviceError::InUse { .. }))
                    if begun.elapsed() < BUSY_FOR =>
                {
                    return Ok(Err(mine));
                }
                opened => opened?,
            };
            let result = opened.at_work(&socket, mine).await;
            opened.end().await.and(result).map(Ok)
        });
        match opened? {
            Ok(result) => return Ok(result),
            Err(again) => work = Some(again),
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Opens an array and shows it as `shows` says until told to stop, or until its file is unmounted. `ready` is called once
/// clients can use it.
///
/// # Errors
///
/// [`ArrayError`].
pub fn serve(
    keeping: &Keeping,
    shows: &Shows,
    ready: impl FnOnce(&Status, &Shown),
) -> Result<(), ArrayError> {
    // Certificates that cannot be used are told before the array is opened.
    let tls = shows.tls()?;
    // Memory that this process needs must not be waited for by writing to the file that it serves.
    if shows.at.is_some()
        && let Err(error) = rustix::process::configure_io_flusher_behavior(true)
    {
        tracing::warn!(%error, "when memory is short, a loop device over the file may hang");
    }
    let begun = Instant::now();
    let reactor = Reactor::new().map_err(ArrayError::system("use io_uring"))?;
    reactor.set_spin(SPIN);
    reactor.block_on(async {
        let carried = reactor::carry_sockets(shows.network_cores);
        carried.map_err(ArrayError::system("start threads for the network"))?;
        let opened = loop {
            let (socket, status) = who_has(&keeping.drives)?;
            if let Some(by) = status.as_ref().and_then(|status| status.open_by.as_ref()) {
                let array = status.as_ref().map_or_else(String::new, |status| status.name.clone());
                return Err(ArrayError::OpenAlready { array, pid: by.pid });
            }
            match Open::begin(keeping, &socket, true).await {
                Err(ArrayError::Drive(FileDeviceError::InUse { .. }))
                    if begun.elapsed() < BUSY_FOR =>
                {
                    reactor::sleep(LOOK_EVERY).await;
                }
                opened => break opened?,
            }
        };
        let served = opened.show(shows, tls, ready).await;
        opened.end().await.and(served)
    })
}

/// The socket of the array on these drives, and what its process says where there is one.
fn who_has(drives: &[PathBuf]) -> Result<(PathBuf, Option<Status>), ArrayError> {
    let socket = place::socket_of(array_of(&sight_all(drives)?)?.uuid);
    let begun = Instant::now();
    let reply = loop {
        match ask(&socket, &Request::Show) {
            // Killed: the kernel takes a moment to close its socket, too.
            Err(ArrayError::Gone(error))
                if error.kind() != ErrorKind::TimedOut && begun.elapsed() < BUSY_FOR =>
            {
                std::thread::sleep(LOOK_EVERY);
            }
            reply => break reply?,
        }
    };
    let status = match reply {
        Some(Reply::Status(status)) => Some(*status),
        Some(Reply::Scrubbed(_) | Reply::Failed { .. }) | None => None,
    };
    Ok((socket, status))
}

/// An open array with its desk.
struct Open {
    keeper: Rc<Keeper>,
    signals: Signals,
    socket: PathBuf,
    /// What answers at the desk, the rebuilds and the scrubs.
    group: Group,
}

impl Open {
    async fn begin(keeping: &Keeping, socket: &Path, rebuilds: bool) -> Result<Self, ArrayError> {
        let drives: Vec<PathBuf> =
            keeping.drives.iter().map(|drive| absolute(drive)).collect::<Result<_, _>>()?;
        let keeper = Keeper::open(&drives, keeping, rebuilds).await?;
        // Not before: as long as others have the array, a signal ends this process at once.
        let signals = Signals::new().map_err(ArrayError::system("receive signals"))?;
        let failed = |source| ArrayError::Desk { socket: socket.into(), source };
        place::make_dir().map_err(failed)?;
        let group = Group::new();
        levada_desk::open(socket, Rc::new(Clerk(Rc::clone(&keeper))), &group).map_err(failed)?;
        reactor::spawn_in(&group, Rc::clone(&keeper).look_after());
        reactor::spawn_in(&group, Rc::clone(&keeper).heed_owners());
        reactor::spawn_in(&group, Rc::clone(&keeper).look_after_scrubs());
        reactor::spawn_in(&group, Rc::clone(&keeper).look_after_health());
        reactor::spawn_in(&group, Rc::clone(&keeper).look_at_drives());
        Ok(Self { keeper, signals, socket: socket.into(), group })
    }

    /// Runs `work` on a thread of its own, as it asks at the desk like anybody else.
    async fn at_work<T: Send + 'static>(
        &self,
        socket: &Path,
        work: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> Result<T, ArrayError> {
        let (done, mut outcome) =
            mailbox::channel().map_err(ArrayError::system("hear of the work"))?;
        let socket = socket.to_owned();
        std::thread::Builder::new()
            .name("array-work".into())
            .spawn(move || drop(done.send(work(&socket))))
            .map_err(ArrayError::system("start a thread"))?;
        match select(pin!(outcome.recv()), pin!(self.told_to_stop())).await {
            Either::Left((result, _)) => result.ok_or(ArrayError::Interrupted),
            Either::Right((told, _)) => told.and(Err(ArrayError::Interrupted)),
        }
    }

    async fn told_to_stop(&self) -> Result<(), ArrayError> {
        loop {
            match self.signals.recv().await {
                Ok(Signal::Hangup) => {}
                Ok(Signal::Interrupt | Signal::Terminate) => return Ok(()),
                Err(error) => return Err(ArrayError::system("receive signals")(error)),
            }
        }
    }

    /// Shows the array until told to stop, or until its file is unmounted.
    async fn show(
        &self,
        shows: &Shows,
        tls: Option<Tls>,
        ready: impl FnOnce(&Status, &Shown),
    ) -> Result<(), ArrayError> {
        let what = match self.keeper.to_be_shown().await? {
            Some(volumes) => What::Pool(volumes),
            // One volume for all of them, so that pieces of one block take turns whichever way they come.
            None => What::Whole(Rc::new(ArrayVolume::new(self.keeper.array.clone()))),
        };
        let (name, uuid) = (self.keeper.status().name, self.keeper.uuid());
        let array = Owned { name: &name, uuid, epoch: self.keeper.array.epoch() };
        let mut shown = Shown::begin(shows, tls, what, array).await?;
        *self.keeper.at.borrow_mut() = shown.file().map(Path::to_owned);
        *self.keeper.nbd.borrow_mut() = shown.uris();
        *self.keeper.nvme.borrow_mut() = shown.paths();
        *self.keeper.paths.borrow_mut() = shown.nvme_paths();
        *self.keeper.vhost.borrow_mut() = shown.sockets();
        *self.keeper.directories.borrow_mut() = shown.directories();
        ready(&self.keeper.status(), &shown);
        let ended = loop {
            let told = match select(pin!(shown.ended()), pin!(self.told_to_stop())).await {
                Either::Left((ended, _)) => break ended,
                Either::Right((told, _)) => told,
            };
            if told.is_err() {
                break told;
            }
            match shown.unmount().await {
                Ok(Unmounted::Detached) => tracing::warn!(
                    "out of the tree, and served until its last user closes it; told once more, it ends at once"
                ),
                Ok(Unmounted::Clean | Unmounted::Already) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        shown.end().await;
        *self.keeper.at.borrow_mut() = None;
        self.keeper.nbd.borrow_mut().clear();
        self.keeper.nvme.borrow_mut().clear();
        self.keeper.paths.borrow_mut().clear();
        self.keeper.vhost.borrow_mut().clear();
        self.keeper.directories.borrow_mut().clear();
        ended
    }

    /// Closes the desk, then the array.
    async fn end(self) -> Result<(), ArrayError> {
        self.group.kill();
        // Nobody finds this process any more; who is too late opens the array itself, once its drives are free.
        let _ = std::fs::remove_file(&self.socket);
        match self.keeper.array.status().stopped {
            // It is opened anew when its drives are back; what was asked of it has failed already.
            Some(_) => Ok(()),
            None => Ok(self.keeper.array.close().await?),
        }
    }
}
