//! A mount at a socket, where a virtual machine finds the file system (virtio-fs): a process as of any other mount, of which the
//! notes lie in a directory of their own.

use super::{LOG, dir_of, end, is_served, note_in, refuse_unless_up, told, wait_for};
use crate::{out::say, place, process};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use levada_node::mounting::{self, GuestPlan, Tag};
use levada_node::state::StateDir;
use levada_spec::Loaded;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Notes of mounts at sockets, in the state directory.
const SOCKETS: &str = "sockets";

#[derive(Args)]
pub struct GuestArgs {
    /// What a guest mounts it by, of at most 36 bytes; QEMU has its own [default: the cluster's name]
    #[arg(long, requires = "vhost")]
    tag: Option<String>,
    /// What a guest may keep of the contents of files
    #[arg(long, requires = "vhost", value_enum, default_value_t)]
    cache: Cache,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Cache {
    /// Nothing: what others write shows at once
    #[default]
    None,
    /// While a file is open: what others write meanwhile does not show
    Open,
}

impl From<Cache> for mounting::GuestCache {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::None => Self::None,
            Cache::Open => Self::Open,
        }
    }
}

/// Serves the file system at a socket, in the background unless told otherwise.
pub(super) fn mount(
    loaded: &Loaded,
    file: &Path,
    socket: &Path,
    args: &GuestArgs,
    foreground: bool,
) -> Result<()> {
    let at = place_of(socket)?;
    let state = place::state(loaded);
    let tag = args.tag.as_deref().unwrap_or(&loaded.cluster.name);
    let parsed: Tag = tag.parse().with_context(|| format!("{tag:?} is no tag for a guest"))?;
    let record = record(&state, &at)?;
    if foreground {
        let plan = GuestPlan {
            address: place::address(loaded)?,
            cluster_uuid: place::cluster(loaded)?,
            tag: parsed,
            cache: args.cache.into(),
            record,
            desk: state.mount_socket(std::process::id()),
            at,
        };
        return mounting::serve_guest(&plan, || say!("{}", process::READY));
    }
    if is_served(&record) {
        say!("{} is served already", at.display());
        return Ok(());
    }
    refuse_unless_up(loaded)?;
    let cache = args.cache.to_possible_value().context("a kind of cache without a name")?;
    let file = std::path::absolute(file)?;
    let arguments = [
        OsStr::new("-f"),
        file.as_os_str(),
        "mount".as_ref(),
        "--foreground".as_ref(),
        "--tag".as_ref(),
        tag.as_ref(),
        "--cache".as_ref(),
        cache.get_name().as_ref(),
        "--vhost".as_ref(),
        at.as_os_str(),
    ];
    process::start(&state.0.join(LOG), &arguments, |line| say!("{line}"))
        .with_context(|| format!("cannot serve {}", at.display()))?;
    say!(
        "{} is served at {}; a guest mounts it by the tag {tag}",
        loaded.cluster.name,
        at.display()
    );
    Ok(())
}

/// The socket as notes name it, whether it is there or not.
fn place_of(socket: &Path) -> Result<PathBuf> {
    let socket = std::path::absolute(socket)?;
    let (Some(dir), Some(name)) = (socket.parent(), socket.file_name()) else {
        bail!("{} is no place for a socket", socket.display());
    };
    let dir = dir.canonicalize().with_context(|| format!("cannot use {}", dir.display()))?;
    Ok(dir.join(name))
}

/// The note of the mount at a socket.
pub(super) fn record(state: &StateDir, at: &Path) -> Result<PathBuf> {
    note_in(state.0.join(SOCKETS), at)
}

/// The sockets of this cluster of which there is a note.
fn noted(state: &StateDir) -> Vec<(PathBuf, PathBuf)> {
    let records = std::fs::read_dir(state.0.join(SOCKETS)).into_iter().flatten().flatten();
    records.map(|record| (dir_of(&record.file_name().to_string_lossy()), record.path())).collect()
}

/// The sockets of this cluster that are served.
pub(super) fn sockets(state: &StateDir) -> Vec<PathBuf> {
    let noted = noted(state).into_iter();
    noted.filter(|(_, record)| is_served(record)).map(|(at, _)| at).collect()
}

/// One line per socket whose process is gone.
pub(super) fn dead(state: &StateDir) -> Vec<String> {
    let dead = noted(state).into_iter().filter(|(_, record)| !is_served(record));
    let line = |(at, _): (PathBuf, PathBuf)| {
        let at = at.display();
        format!(
            "the process that served {at} is gone: start its guest anew after `levada mount --vhost {at}`, or `levada \
             umount {at}`"
        )
    };
    dead.map(line).collect()
}

/// Ends what is served at a socket; `None`: nothing is known of that.
pub(super) fn umount(file: Option<&Path>, socket: &Path, lazy: bool) -> Option<Result<()>> {
    let at = place_of(socket).ok()?;
    let state = place::state(&place::load_at(&place::find(file)?).ok()?);
    let noted = noted(&state).into_iter().find(|(noted, _)| *noted == at);
    noted.map(|(at, record)| umount_noted(&state, &at, &record, lazy))
}

fn umount_noted(state: &StateDir, at: &Path, record: &Path, force: bool) -> Result<()> {
    let meters = told::meters_in(state, at, Ok(record.to_owned()));
    if !force && meters.is_some_and(|meters| meters.has_guest) {
        bail!(
            "{} is in use by a guest, which would wait for ever: unmount it there first, or `umount --lazy` ends it all the same",
            at.display()
        );
    }
    end(record).with_context(|| format!("cannot end what serves {}", at.display()))?;
    wait_for(record, state)?;
    say!("{} is no longer served", at.display());
    Ok(())
}

/// Ends all that this cluster serves at sockets; with `force` also where guests use it.
pub(super) fn umount_all(state: &StateDir, force: bool) -> Result<()> {
    for (at, record) in noted(state) {
        match umount_noted(state, &at, &record, force) {
            // A process that was killed keeps the others from nothing.
            Err(error) if !is_served(&record) => {
                eprintln!("levada: {}: {}", at.display(), crate::out::chain(&error));
            }
            ended => ended?,
        }
    }
    Ok(())
}
