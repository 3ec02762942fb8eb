//! `up`, `down`, `check`, and the node itself.

use crate::discover::{Discovered, discover};
use crate::out::{chain, say};
use crate::{mount, place, plan, process, status};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use levada_base::reactor::Reactor;
use levada_export_nbd::Tls;
use levada_export_nvmet::Hosts;
use levada_node::Ended;
use levada_node::assembly::Tuning;
use levada_node::control::{self, ControlRequest};
use levada_node::drives::MayOverwrite;
use levada_node::fit;
use levada_node::state::{Phase, RunningNode, StateDir, replace};
use levada_spec::{ClusterFile, ExportWay, Loaded};
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Time for a node to make everything durable and end.
const DOWN_LIMIT: Duration = Duration::from_secs(60);
/// Time after which a wait is told of.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time for a killed node to be gone.
const LET_GO_LIMIT: Duration = Duration::from_secs(10);

#[derive(Args)]
pub struct UpArgs {
    /// Do not make the mounts that the cluster file lists, nor serve directories to guests
    #[arg(long)]
    no_mounts: bool,
    #[command(flatten)]
    overwrite: OverwriteArgs,
    #[command(flatten)]
    missing: MissingArgs,
}

#[derive(Args)]
pub struct NodeArgs {
    #[command(flatten)]
    overwrite: OverwriteArgs,
    #[command(flatten)]
    missing: MissingArgs,
    /// A target with damage that the node before could not repair
    #[arg(long, value_name = "TARGET", hide = true)]
    beyond_repair: Vec<String>,
}

#[derive(Args)]
struct OverwriteArgs {
    /// Make a new cluster also on drives that carry something else; refused when one carries this cluster, unless with --destroy
    #[arg(long)]
    force_format: bool,
    /// Give up this cluster, named as in the cluster file, with all that is stored in it, and make it anew
    #[arg(long, value_name = "CLUSTER")]
    destroy: Option<String>,
}

#[derive(Args)]
struct MissingArgs {
    /// Open arrays of whose members half or more are away, if what is there holds all data: only when they are gone for good, and no other
    /// server has them
    #[arg(long, conflicts_with_all = ["force_format", "destroy"])]
    without_majority: bool,
}

impl OverwriteArgs {
    fn of(&self, cluster: &str) -> Result<MayOverwrite> {
        match &self.destroy {
            Some(name) if name != cluster => {
                bail!("--destroy {name}: the cluster here is {cluster}; nothing was changed")
            }
            Some(_) if self.force_format => Ok(MayOverwrite::Everything),
            Some(_) => Ok(MayOverwrite::Cluster),
            None if self.force_format => Ok(MayOverwrite::Others),
            None => Ok(MayOverwrite::Nothing),
        }
    }

    fn pass_on<'a>(&'a self, arguments: &mut Vec<&'a OsStr>) {
        if self.force_format {
            arguments.push(OsStr::new("--force-format"));
        }
        if let Some(name) = &self.destroy {
            arguments.extend([OsStr::new("--destroy"), OsStr::new(name)]);
        }
    }
}

/// Takes drives that were found: they come to stand in the cluster file, unless they cannot be those of the cluster. `says_nothing`: a look at
/// them does not tell, as a node has them, or they are to be overwritten.
fn take(path: &Path, found: &Discovered, says_nothing: bool) -> Result<()> {
    check_fit(path, &found.loaded)?;
    if !says_nothing {
        plan::foresee(&found.loaded).with_context(|| {
            found.tell(&format!("{} stays as it is", path.display()));
            "cannot take the drives that were found; where not all of them are meant, name those that are in `drives` of their enclosure"
        })?;
    }
    found.save(path)?;
    found.tell(&format!("they stand in {} now", path.display()));
    place::warn(&found.loaded);
    Ok(())
}

/// Brings the cluster up.
pub fn up(file: Option<&Path>, args: &UpArgs) -> Result<()> {
    let path = match place::find(file) {
        Some(path) => path,
        None => make_box()?,
    };
    let found = discover(&path)?;
    let loaded = match &found {
        Some(found) => found.loaded.clone(),
        None => place::load_at(&path)?,
    };
    let state = place::state(&loaded);
    state.check()?;
    let may_overwrite = args.overwrite.of(&loaded.cluster.name)?;
    let running = answering(&state)?;
    match running {
        Some(pid) if may_overwrite != MayOverwrite::Nothing => bail!(
            "{} is up (node process {pid}); `levada down` it before its drives are overwritten",
            loaded.cluster.name
        ),
        Some(_) => {}
        None => refuse_mounted(&state, may_overwrite)?,
    }
    if let Some(found) = found {
        let says_nothing = running.is_some()
            || may_overwrite != MayOverwrite::Nothing
            || args.missing.without_majority;
        take(&path, &found, says_nothing)?;
    }
    if let Some(pid) = running {
        say!("{} is up already (node process {pid})", loaded.cluster.name);
    } else {
        // It does not stand where this one does.
        let path = std::path::absolute(&path)?;
        let mut arguments = vec![OsStr::new("-f"), path.as_os_str(), OsStr::new("node")];
        args.overwrite.pass_on(&mut arguments);
        if args.missing.without_majority {
            arguments.push(OsStr::new("--without-majority"));
        }
        if let Err(error) = process::start(&state.log(), &arguments, |line| say!("{line}")) {
            // Another `up` may have been faster; what was to be overwritten was not.
            let other = answering(&state)?.filter(|_| may_overwrite == MayOverwrite::Nothing);
            let Some(pid) = other else {
                return Err(error)
                    .with_context(|| format!("cannot bring {} up", loaded.cluster.name));
            };
            say!("{} is up already (node process {pid})", loaded.cluster.name);
        }
        let now = status::ask(&state)?;
        if now.problems.is_empty() {
            say!("{} is up: it survives {}", loaded.cluster.name, loaded.cluster.survives());
        } else {
            say!("{} is up, and needs attention:", loaded.cluster.name);
            for line in now.problems.iter().chain(&now.survives) {
                say!("  {line}");
            }
        }
    }
    if !args.no_mounts {
        let mut mounts = loaded.cluster.mounts.iter().map(|spec| loaded.path(&spec.path));
        let mounted = mounts.try_for_each(|dir| {
            mount::make_place(&dir)?;
            mount::mount_at(&loaded, &path, &dir)
        });
        // Guests have nothing to do with programs here.
        let served = mount::serve_exports(&loaded, &path);
        mounted.and(served)?;
    }
    Ok(())
}

/// Programs on a mount hold files of the cluster that would be given up.
fn refuse_mounted(state: &StateDir, may_overwrite: MayOverwrite) -> Result<()> {
    let mounts = mount::served_mounts(state);
    if may_overwrite == MayOverwrite::Nothing || mounts.is_empty() {
        return Ok(());
    }
    let dirs: Vec<_> = mounts.iter().map(|dir| dir.display().to_string()).collect();
    bail!(
        "{} is still mounted from this cluster; nothing was changed. `levada umount DIR` first, or \
         `levada umount --lazy DIR` where programs use it or the node is gone",
        dirs.join(", ")
    )
}

/// The process of the node that is up. One that was killed holds its lock until the kernel has
/// ended its I/O, and must not pass for one that serves; one that is starting or ending is waited for.
fn answering(state: &StateDir) -> Result<Option<u32>> {
    let start = Instant::now();
    let mut told = false;
    while let Some(node) = state.node()? {
        let answer = control::ask(&state.control_socket(), &ControlRequest::Status);
        let at = match node.phase {
            Phase::Starting => "is starting",
            Phase::Ending => "is ending",
            Phase::Serving if start.elapsed() > LET_GO_LIMIT => return Ok(Some(node.pid)),
            Phase::Serving => "does not answer",
        };
        let is_ending = |now: RunningNode| now.pid != node.pid || now.phase == Phase::Ending;
        if answer.is_ok() && !state.node()?.is_none_or(is_ending) {
            return Ok(Some(node.pid));
        }
        if !told && start.elapsed() > PATIENCE {
            told = true;
            eprintln!("waiting for the node process {}, which {at}", node.pid);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(None)
}

/// Writes the cluster file of a cluster in a box.
fn make_box() -> Result<PathBuf> {
    let dir = Path::new(place::BOX_DIR);
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let free_bytes = free_bytes(dir)
        .with_context(|| format!("cannot tell the free space of {}", dir.display()))?;
    let cluster = ClusterFile::box_default(dir, free_bytes)?;
    let path = dir.join(place::CLUSTER_FILE);
    // The drives that follow are durable, and nothing else tells what they are.
    replace(&path, &cluster.to_toml())
        .with_context(|| format!("cannot write {}", path.display()))?;
    say!("no cluster file here: wrote {} for a cluster in a box", path.display());
    Ok(path)
}

/// Bytes that an ordinary user may still use where `dir` is.
fn free_bytes(dir: &Path) -> std::io::Result<u64> {
    let space = rustix::fs::statvfs(dir)?;
    Ok(space.f_bavail * space.f_frsize)
}

/// Unmounts, makes everything durable, stops the node. Where an array has stopped, nothing can be
/// made durable: then mounts stay, and their programs wait; by `force` both end.
pub fn down(file: Option<&Path>, force: bool) -> Result<()> {
    let loaded = place::load(file)?;
    let state = place::state(&loaded);
    let name = &loaded.cluster.name;
    let Some(node) = state.node()? else {
        say!("{name} is not up");
        mount::say_what_stays(&state);
        return Ok(());
    };
    match node.phase {
        Phase::Starting => {
            state.tell_to_stop(node.pid)?;
            wait_for_end(&state, node.pid)?;
            // It may have come to serve in the meantime.
            if state.phase_of(node.pid) == Phase::Ending {
                return judge_end(&state, name);
            }
            say!("{name} is not up: its node was starting (process {}), and has ended", node.pid);
            mount::say_what_stays(&state);
            return Ok(());
        }
        Phase::Ending => {
            wait_for_end(&state, node.pid)?;
            return judge_end(&state, name);
        }
        Phase::Serving => {}
    }
    let status = status::ask(&state)?;
    let gone = status.gone_next_time();
    if !gone.is_empty() && !force {
        bail!(
            "{}\nput back what was there, or fail and replace it; `levada down --force` lets it go",
            gone.join("\n")
        );
    }
    let stopped = status.stopped();
    for what in &stopped {
        say!("{what}");
    }
    let mut ended = Ok(());
    match (stopped.is_empty(), force) {
        (true, _) => mount::umount_all(file, &state, force)?,
        // Programs wait for what only the next `up` can bring, and that may be another server's. The node ends also where one does not.
        (false, true) => ended = mount::end_all(&state),
        (false, false) => mount::say_what_stays(&state),
    }
    control::ask(&state.control_socket(), &ControlRequest::Down)?;
    wait_for_end(&state, node.pid)?;
    ended?;
    judge_end(&state, name)
}

/// Waits until a node that was told to stop has ended.
fn wait_for_end(state: &StateDir, pid: u32) -> Result<()> {
    let start = Instant::now();
    let mut told = false;
    // Another `up` may wait for its place.
    while state.node()?.is_some_and(|node| node.pid == pid) {
        if start.elapsed() > DOWN_LIMIT {
            bail!(
                "the node (process {pid}) has not ended after {} s; see {}",
                DOWN_LIMIT.as_secs(),
                state.log().display()
            );
        }
        if !told && start.elapsed() > PATIENCE {
            told = true;
            eprintln!(
                "waiting for the node (process {pid}) to end: it makes everything durable, and waits a while for drives that are \
                 away; see {} (it goes on by itself after Ctrl-C)",
                state.log().display()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Whether the last node has closed everything.
fn judge_end(state: &StateDir, name: &str) -> Result<()> {
    let left_open = state.left_open();
    if !left_open.is_empty() {
        let (left_open, log) = (left_open.join("\n"), state.log());
        bail!("{left_open}\n{name} is down, and not in order; see {}", log.display());
    }
    say!("{name} is down");
    Ok(())
}

/// Says which exports cannot begin by what they have of keys here: that they do not is no reason not to bring the rest up.
fn warn_of_keys(path: &Path, loaded: &Loaded) {
    for export in &loaded.cluster.exports {
        let wrong = match &export.way {
            ExportWay::Nbd { tls: Some(tls), verify_clients, .. } => {
                Tls::open(&loaded.path(tls), *verify_clients).err().map(anyhow::Error::from)
            }
            ExportWay::Nvme { hosts, keys: Some(keys), tls_only, .. } => {
                let hosts = hosts.iter().filter_map(|host| host.parse().ok());
                let chosen = Hosts::chosen(hosts, Some(&loaded.path(keys)), *tls_only);
                chosen.err().map(anyhow::Error::from)
            }
            _ => None,
        };
        if let Some(why) = wrong {
            let (file, (way, place)) = (path.display(), export.way.place());
            eprintln!(
                "warning: {file}: the export with {way} at {place} cannot begin here: {}",
                chain(&why)
            );
        }
    }
}

/// Sees to it that the arrays of the cluster file at `path` have room on drives of the sizes in it.
pub fn check_fit(path: &Path, loaded: &Loaded) -> Result<()> {
    warn_of_keys(path, loaded);
    // Nothing of the machine is asked: block devices say their size to `up`.
    Reactor::simulated(0)
        .block_on(fit::check(
            &loaded.cluster,
            |drive| drive.size.map(|size| size.0),
            Tuning::default().segment_stripes,
        ))
        .map_err(|error| anyhow!("{}: {error}", path.display()))
}

/// Reads the cluster file and says what it survives.
pub fn check(file: Option<&Path>) -> Result<()> {
    let path = place::find_or_say(file)?;
    let loaded = place::load_at(&path)?;
    check_fit(&path, &loaded)?;
    let cluster = &loaded.cluster;
    say!(
        "{}: {} drives in {} enclosures; survives {}",
        cluster.name,
        cluster.drives.len(),
        cluster.enclosures.len(),
        cluster.survives()
    );
    for array in &cluster.arrays {
        say!("  array {}: survives {}", array.name, array.survives(cluster));
    }
    Ok(())
}

/// Runs the node in the foreground until it is told to stop.
pub fn node(file: Option<&Path>, args: &NodeArgs) -> Result<()> {
    let path = place::find_or_say(file)?;
    let path = std::path::absolute(path)?;
    let loaded = place::load_at(&path)?;
    let state = place::state(&loaded);
    let may_overwrite = args.overwrite.of(&loaded.cluster.name)?;
    refuse_mounted(&state, may_overwrite)?;
    let beyond_repair = args.beyond_repair.clone();
    let without_majority = args.missing.without_majority;
    let options = levada_node::NodeOptions {
        loaded,
        file: path,
        state,
        may_overwrite,
        without_majority,
        beyond_repair,
    };
    let again = options.file.clone();
    match levada_node::run(options, &|line| say!("{line}"), || say!("{}", process::READY))? {
        Ended::Stopped => Ok(()),
        Ended::Damaged { beyond_repair } => {
            // In its own place, so that it keeps its process number, and never overwrites anything.
            let mut node = Command::new("/proc/self/exe");
            node.arg0("levada").arg("-f").arg(again).arg("node");
            for target in beyond_repair {
                node.arg("--beyond-repair").arg(target);
            }
            Err(node.exec()).context("cannot start anew")
        }
    }
}
