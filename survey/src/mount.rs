//! The mount: programs' requests through the kernel, against the client library on the same box.
//!
//! The mount's daemon runs on a thread of its own, as do the services; it reaches them as a mount on
//! the node's machine does, and so does the client that it is compared with. The programs are
//! threads that read and write past the page cache (O_DIRECT), 1 MiB at a time.

use crate::client::{self, Bench, SequentialRate, read, sequential, write};
use crate::cluster;
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, absolute, pairs, runs};
use crate::load::Load;
use crate::members::{Drives, Speed};
use crate::service::Way;
use crate::suite::Spec;
use anyhow::{Context, Result};
use levada_base::BufMut;
use levada_base::reactor::{self, Reactor, mailbox};
use levada_mount::files::Files;
use levada_mount::handler::Handler;
use levada_mount::session::Session;
use levada_mount::transport::dev_fuse::{FuseMount, MountOptions};
use levada_mount::transport::reactor::serve;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "mount.slow.seqread_of_client",
            what: "O_DIRECT reads of 1 MiB by 16 threads, against the client library",
            bar: Bar::AtLeast(0.9),
            take: |effort| run(seqread_of_client(effort)),
        },
        Spec {
            name: "mount.slow.seqwrite_of_client",
            what: "O_DIRECT writes of 1 MiB by 16 threads and fsync, against the client library",
            bar: Bar::AtLeast(0.9),
            take: |effort| run(seqwrite_of_client(effort)),
        },
        Spec {
            name: "mount.ram.seqread_gbs",
            what: "O_DIRECT reads of 1 MiB by 16 threads",
            bar: Bar::None,
            take: |effort| run(ram_seqread(effort)),
        },
        Spec {
            name: "mount.ram.seqwrite_gbs",
            what: "O_DIRECT writes of 1 MiB by 16 threads and fsync",
            bar: Bar::None,
            take: |effort| run(ram_seqwrite(effort)),
        },
    ]
}

fn run(figure: impl Future<Output = Result<Taken>>) -> Result<Taken> {
    Reactor::new()?.block_on(figure)
}

/// A mounted file system; dropping it unmounts.
pub(crate) struct Mounted {
    dir: TempDir,
    stop: Option<mailbox::Sender<()>>,
    daemon: Option<JoinHandle<Result<()>>>,
}

impl Mounted {
    pub(crate) fn new(address: &str) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("levada-bench-").tempdir()?;
        let (target, address) = (dir.path().to_owned(), address.to_owned());
        let (started, starting) = mpsc::channel();
        let daemon = std::thread::Builder::new()
            .name("mount".into())
            .spawn(move || Reactor::new()?.block_on(daemon(&target, &address, started)))?;
        let Ok(stop) = starting.recv() else {
            let ended = daemon.join().map_err(|_| anyhow::anyhow!("the mount panicked"))?;
            return Err(ended.err().unwrap_or_else(|| anyhow::anyhow!("the mount ended")));
        };
        Ok(Self { dir, stop: Some(stop), daemon: Some(daemon) })
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(daemon) = self.daemon.take()
            && let Ok(Err(error)) = daemon.join()
        {
            eprintln!("the mount ended badly: {error:#}");
        }
    }
}

async fn daemon(
    target: &Path,
    address: &str,
    started: mpsc::Sender<mailbox::Sender<()>>,
) -> Result<()> {
    let client = cluster::connect(address, Way::SameHost).await?;
    let files = Files::new(client.clone()).mounted_at(target.to_owned());
    serve_until_stopped(target, files, started).await?;
    Ok(client.shutdown().await?)
}

/// Mounts on `target` what `handler` answers, says that it serves, and unmounts when it is told to stop.
pub(crate) async fn serve_until_stopped<H: Handler + 'static>(
    target: &Path,
    handler: H,
    started: mpsc::Sender<mailbox::Sender<()>>,
) -> Result<()> {
    let (mount, channel) =
        FuseMount::new(target, &MountOptions::default()).context("mounting (needs root)")?;
    let session = Rc::new(Session::new(handler, Files::limits()));
    let serving = reactor::spawn(serve(channel, Rc::clone(&session)));
    while session.terms().is_none() && !serving.is_finished() {
        reactor::sleep(Duration::from_millis(1)).await;
    }
    let (stop, mut stopped) = mailbox::channel()?;
    // Nobody waits only when the starter has panicked.
    let _ = started.send(stop);
    stopped.recv().await;
    mount.unmount()?;
    if let Some(served) = serving.await {
        served?;
    }
    Ok(())
}

/// What a program does with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Of one that is there.
    Read,
    /// In a file that is there.
    Write,
    /// In a new file.
    Create,
}

/// Carries a load out on a file, past the page cache, by as many threads as it has operations in
/// flight; after writes everything is made durable, inside the span.
///
/// # Errors
///
/// Those of the file system; also of one that knows no `O_DIRECT`.
pub fn drive(path: &Path, access: Access, load: &Load) -> Result<Run> {
    let offsets = load.offsets();
    let meter = Meter::start()?;
    let mut options = OpenOptions::new();
    match access {
        Access::Read => options.read(true),
        Access::Write => options.write(true),
        Access::Create => options.write(true).create_new(true),
    };
    let file = options.custom_flags(libc::O_DIRECT).open(path);
    let file = file.with_context(|| format!("opening {}", path.display()))?;
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        let mut buffer = BufMut::zeroed(load.piece_bytes as usize);
        while let Some(at) = offsets.get(next.fetch_add(1, Ordering::Relaxed)) {
            match access {
                Access::Read => file.read_exact_at(&mut buffer, *at)?,
                Access::Write | Access::Create => file.write_all_at(&buffer, *at)?,
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..load.depth).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        }
        anyhow::Ok(())
    })?;
    match access {
        Access::Read => {}
        Access::Write | Access::Create => file.sync_all()?,
    }
    meter.stop(load.ops * load.piece_bytes, load.ops)
}

/// [`drive`] on a thread of its own, while this one goes on answering: a client on it may hold a lease that the mount needs,
/// and the node waits ten seconds for one that does not answer.
pub(crate) async fn drive_beside(path: &Path, access: Access, load: &Load) -> Result<Run> {
    let (sender, mut result) = mailbox::channel()?;
    let (path, load) = (path.to_owned(), load.clone());
    // Nobody waits only when this task was given up.
    std::thread::spawn(move || drop(sender.send(drive(&path, access, &load))));
    result.recv().await.context("the load panicked")?
}

/// Writes a new file and makes it durable; gives its space back after that, unmeasured.
pub(crate) async fn write_new(bench: &Bench, path: &Path, load: &Load) -> Result<Run> {
    let before = cluster::inodes(&bench.client).await?;
    let run = drive_beside(path, Access::Create, load).await?;
    std::fs::remove_file(path)?;
    cluster::clean_up(&bench.client, before).await?;
    Ok(run)
}

async fn bench(speed: Speed) -> Result<Bench> {
    Bench::on(Drives::Model(speed), Way::SameHost).await
}

async fn seqread_of_client(effort: Effort) -> Result<Taken> {
    let bench = bench(Speed::Slow).await?;
    let file = bench.create("read").await?;
    write(&file, &sequential()).await?;
    let mounted = Mounted::new(bench.address())?;
    let path = mounted.path("read");
    let ours = async |_| drive_beside(&path, Access::Read, &sequential()).await;
    let theirs = async |_| read(&file, &sequential()).await;
    let said = client::says(SequentialRate::Read);
    Ok(pairs(effort, said, ours, theirs).await?.ratio(Rate::GbPerS, ("mount", "client"), 1.0))
}

async fn seqwrite_of_client(effort: Effort) -> Result<Taken> {
    let bench = bench(Speed::Slow).await?;
    let mounted = Mounted::new(bench.address())?;
    let path = mounted.path("mounted");
    let ours = async |_| write_new(&bench, &path, &sequential()).await;
    let theirs = async |_| bench.write_new(&sequential()).await;
    let said = client::says(SequentialRate::Write);
    Ok(pairs(effort, said, ours, theirs).await?.ratio(Rate::GbPerS, ("mount", "client"), 1.0))
}

async fn ram_seqread(effort: Effort) -> Result<Taken> {
    let bench = bench(Speed::Unlimited).await?;
    write(&bench.create("read").await?, &sequential()).await?;
    let mounted = Mounted::new(bench.address())?;
    let path = mounted.path("read");
    let all =
        runs(effort, async |_| drive_beside(&path, Access::Read, &sequential()).await).await?;
    Ok(absolute(Rate::GbPerS, "mount", &all))
}

async fn ram_seqwrite(effort: Effort) -> Result<Taken> {
    let bench = bench(Speed::Unlimited).await?;
    let mounted = Mounted::new(bench.address())?;
    let path = mounted.path("mounted");
    let all = runs(effort, async |_| write_new(&bench, &path, &sequential()).await).await?;
    Ok(absolute(Rate::GbPerS, "mount", &all))
}
