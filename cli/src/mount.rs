//! `mount` and `umount`: a mount is a background process of its own, so that it lives on while
//! the node is away.

use crate::{place, process};
use anyhow::{Context, Result, bail};
use clap::Args;
use levada_node::state::StateDir;
use levada_spec::Loaded;
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};

/// The type that /proc/mounts shows.
const FS_TYPE: &str = "fuse.levada";

#[derive(Args)]
pub struct MountArgs {
    /// Where to mount; made if missing
    dir: PathBuf,
    /// Stay in the foreground
    #[arg(long)]
    foreground: bool,
}

/// Mounts the file system on a directory.
pub fn mount(file: Option<&Path>, args: &MountArgs) -> Result<()> {
    let path = place::find(file).context("no cluster here; -f names its cluster file")?;
    let loaded = place::load_at(&path)?;
    if args.foreground {
        let target = std::path::absolute(&args.dir)?;
        let state = place::state(&loaded);
        let plan = levada_node::mounting::MountPlan {
            address: place::address(&loaded)?,
            cluster: loaded.cluster.name.clone(),
            record: record(&state, &target)?,
            target,
        };
        return levada_node::mounting::run(&plan, || println!("{}", process::READY));
    }
    mount_at(&loaded, &path, &args.dir)
}

/// Mounts on `dir` in the background, unless it is mounted there already.
pub fn mount_at(loaded: &Loaded, file: &Path, dir: &Path) -> Result<()> {
    let dir = std::path::absolute(dir)?;
    if mounted(&dir)? {
        println!("{} is mounted already", dir.display());
        return Ok(());
    }
    match std::fs::create_dir_all(&dir) {
        Ok(()) => {}
        // A dead mount of an earlier process; mounting replaces it.
        Err(error) if error.raw_os_error() == Some(libc_enotconn()) => {}
        Err(error) => {
            return Err(error).with_context(|| format!("cannot make {}", dir.display()));
        }
    }
    let state = place::state(loaded);
    if state.running().is_none() {
        bail!("{} is not up: start it with `levada up`", loaded.cluster.name);
    }
    let log = state.0.join("mount.log");
    let arguments = [
        OsStr::new("-f"),
        file.as_os_str(),
        "mount".as_ref(),
        "--foreground".as_ref(),
        dir.as_os_str(),
    ];
    process::start(&log, &arguments, |line| println!("{line}"))
        .with_context(|| format!("cannot mount {}", dir.display()))?;
    println!("mounted {} on {}", loaded.cluster.name, dir.display());
    Ok(())
}

/// ENOTCONN: what a mount answers whose process is gone.
const fn libc_enotconn() -> i32 {
    107
}

/// Unmounts a directory and waits until its process has made everything durable.
pub fn umount(file: Option<&Path>, dir: &Path) -> Result<()> {
    let dir = std::path::absolute(dir)?;
    if !mounted(&dir)? {
        bail!("{} is not a mount of levada", dir.display());
    }
    levada_node::mounting::unmount(&dir)?;
    // Without the cluster file its state directory is unknown, and so is the mount's process.
    if let Some(path) = place::find(file) {
        wait_for(&record(&place::state(&place::load_at(&path)?), &dir)?)?;
    }
    println!("unmounted {}", dir.display());
    Ok(())
}

/// Unmounts what was mounted from this cluster.
pub fn umount_all(file: Option<&Path>, state: &StateDir) -> Result<()> {
    let Ok(records) = std::fs::read_dir(state.0.join(MOUNTS)) else { return Ok(()) };
    for record in records {
        let name = record?.file_name();
        let dir = dir_of(&name.to_string_lossy());
        if mounted(&dir)? {
            umount(file, &dir)?;
        }
    }
    Ok(())
}

/// Where a mount's process notes that it serves, and what it holds locked meanwhile.
const MOUNTS: &str = "mounts";

/// The note of the mount on `dir`; its name is the path with `%` and `/` written in hex.
fn record(state: &StateDir, dir: &Path) -> Result<PathBuf> {
    let notes = state.0.join(MOUNTS);
    std::fs::create_dir_all(&notes).with_context(|| format!("cannot make {}", notes.display()))?;
    let name = dir.display().to_string().replace('%', "%25").replace('/', "%2F");
    Ok(notes.join(name))
}

fn dir_of(name: &str) -> PathBuf {
    PathBuf::from(name.replace("%2F", "/").replace("%25", "%"))
}

/// Waits until the process of a mount has ended.
fn wait_for(record: &Path) -> Result<()> {
    let Ok(note) = File::open(record) else { return Ok(()) };
    note.lock_shared().context("cannot wait for the mount's process")?;
    if record.exists() {
        bail!("the mount's process ended before everything was durable; see mount.log");
    }
    Ok(())
}

/// True when a mount of ours lies on `dir`.
fn mounted(dir: &Path) -> Result<bool> {
    let table = std::fs::read_to_string("/proc/mounts").context("cannot read the mount table")?;
    let wanted = escaped(dir);
    Ok(table.lines().any(|line| {
        let mut fields = line.split(' ').skip(1);
        fields.next() == Some(&wanted) && fields.next() == Some(FS_TYPE)
    }))
}

/// A path as /proc/mounts writes it.
fn escaped(dir: &Path) -> String {
    dir.display()
        .to_string()
        .replace('\\', "\\134")
        .replace(' ', "\\040")
        .replace('\t', "\\011")
        .replace('\n', "\\012")
}
