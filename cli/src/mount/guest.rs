//! A mount at a socket, where a virtual machine finds the file system (virtio-fs): a process as of any other mount, of which the
//! notes lie in a directory of their own.

use super::{LOG, dir_of, end, is_served, note_in, refuse_unless_up, told, wait_for};
use crate::{out::say, place, process};
use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use levada_node::control::{self, ControlReply, ControlRequest};
use levada_node::mounting::{self, GuestPlan, Part, View};
use levada_node::state::StateDir;
use levada_spec::{ExportWay, GuestCacheSpec, Loaded, SubtreePath};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Notes of mounts at sockets, in the state directory.
const SOCKETS: &str = "sockets";

#[derive(Args)]
pub struct GuestArgs {
    /// What a guest mounts it by, of at most 36 bytes; QEMU has its own [default: the cluster's name]
    #[arg(long, requires = "vhost")]
    tag: Option<String>,
    /// What a guest may keep of the contents of files: none: what others write shows at once; open: while a file is open, what others
    /// write meanwhile does not show
    #[arg(long, requires = "vhost", default_value_t, value_parser = words())]
    cache: GuestCacheSpec,
    /// A directory within the file system, which is all that a guest sees of it [default: all of it]
    #[arg(long, requires = "vhost", value_name = "PATH")]
    subtree: Option<SubtreePath>,
    /// The tenant, by its number, whose that directory has to be
    #[arg(long, requires = "subtree", hide = true)]
    tenant: Option<u32>,
}

fn words() -> impl TypedValueParser<Value = GuestCacheSpec> {
    PossibleValuesParser::new(GuestCacheSpec::WORDS).try_map(|word| word.parse())
}

impl GuestArgs {
    fn view(&self, loaded: &Loaded) -> Result<View> {
        let tag = self.tag.as_deref().unwrap_or(&loaded.cluster.name);
        let tag = tag.parse().with_context(|| format!("{tag:?} is no tag for a guest"))?;
        let part = self.subtree.clone().map(|path| Part { path, tenant: self.tenant });
        Ok(View { tag, cache: self.cache, part })
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
    let view = args.view(loaded)?;
    refuse_to_show_more(loaded, &at, args)?;
    let record = record(&state, &at)?;
    if foreground {
        let plan = GuestPlan {
            address: place::address(loaded)?,
            cluster_uuid: place::cluster(loaded)?,
            view,
            record,
            desk: state.mount_socket(std::process::id()),
            at,
        };
        return mounting::serve_guest(&plan, || say!("{}", process::READY));
    }
    if is_served(&record) {
        let (at, shown) = (at.display(), view_of(&record));
        // A process of an earlier release does not say, and shows all there is.
        match shown {
            Some(shown) if shown != view => {
                bail!("{at} shows {shown} already: `levada umount {at}` first")
            }
            None if view.part.is_some() => {
                bail!("{at} shows all of the file system already: `levada umount {at}` first")
            }
            Some(_) | None => {}
        }
        say!("{at} is served already");
        return Ok(());
    }
    refuse_unless_up(loaded)?;
    let file = std::path::absolute(file)?;
    // In one word each, as they may begin with a hyphen.
    let tag_word = format!("--tag={}", view.tag);
    let cache_word = format!("--cache={}", view.cache);
    let mut arguments = vec![
        OsStr::new("-f"),
        file.as_os_str(),
        "mount".as_ref(),
        "--foreground".as_ref(),
        tag_word.as_ref(),
        cache_word.as_ref(),
        "--vhost".as_ref(),
        at.as_os_str(),
    ];
    let part = args.subtree.iter().map(|path| ["--subtree".into(), path.to_string()]);
    let owner = args.tenant.iter().map(|number| ["--tenant".into(), number.to_string()]);
    let part: Vec<String> = part.chain(owner).flatten().collect();
    arguments.extend(part.iter().map(OsStr::new));
    process::start(&state.0.join(LOG), &arguments, |line| say!("{line}"))
        .with_context(|| format!("cannot serve {}", at.display()))?;
    let (name, tag, at) = (&loaded.cluster.name, view.tag, at.display());
    let what = view.part.map_or(name.clone(), |part| format!("{} of {name}", part.path));
    say!("{what} is served at {at}; a guest mounts it by the tag {tag}");
    Ok(())
}

/// Serves the directories that the cluster file shows to guests, each of which is made if it is not there, and given to its
/// tenant. One that cannot be served keeps the others from nothing.
pub fn serve_exports(loaded: &Loaded, file: &Path) -> Result<()> {
    let mut failed = 0;
    for export in &loaded.cluster.exports {
        let ExportWay::Virtiofs { socket, subtree, tag, cache } = &export.way else { continue };
        let socket = loaded.path(socket);
        let served = give(loaded, &export.tenant, subtree).and_then(|number| {
            make_parent(&socket)?;
            let (tag, subtree, tenant) = (tag.clone(), Some(subtree.clone()), Some(number));
            mount(loaded, file, &socket, &GuestArgs { tag, cache: *cache, subtree, tenant }, false)
        });
        if let Err(error) = served {
            eprintln!("levada: {} is not served: {}", socket.display(), crate::out::chain(&error));
            failed += 1;
        }
    }
    match failed {
        0 => Ok(()),
        _ => bail!("{failed} of the directories for guests are not served"),
    }
}

/// A guest of whom the cluster file says what it may see is not shown anything else.
fn refuse_to_show_more(loaded: &Loaded, at: &Path, args: &GuestArgs) -> Result<()> {
    for export in &loaded.cluster.exports {
        let ExportWay::Virtiofs { socket, subtree, .. } = &export.way else { continue };
        let is_there = place_of(&loaded.path(socket)).is_ok_and(|place| place == at);
        if is_there && args.subtree.as_ref() != Some(subtree) {
            bail!(
                "an [[export]] of the cluster file shows {subtree} at {}: `levada up` serves it",
                at.display()
            );
        }
    }
    Ok(())
}

/// Gives a directory to its tenant: the tenant's number.
fn give(loaded: &Loaded, tenant: &str, subtree: &SubtreePath) -> Result<u32> {
    let path = subtree.to_string();
    let request = ControlRequest::SubtreeGive { path, tenant: tenant.parse()? };
    match control::ask(&place::state(loaded).control_socket(), &request)? {
        ControlReply::SubtreeOf { number } => Ok(number),
        _ => bail!("the node answered something else; program and node differ in version"),
    }
}

fn make_parent(socket: &Path) -> Result<()> {
    let parent = socket.parent().context("a socket has a name")?;
    std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))
}

/// What the process shows of which this is the note.
pub(super) fn view_of(record: &Path) -> Option<View> {
    View::noted(&std::fs::read_to_string(record).ok()?)
}

/// The socket as notes name it, whether it is there or not.
pub(super) fn place_of(socket: &Path) -> Result<PathBuf> {
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
    let line = |(at, record): (PathBuf, PathBuf)| {
        let at = at.display();
        let how = match view_of(&record) {
            Some(View { part: Some(Part { tenant: Some(_), .. }), .. }) => "levada up".into(),
            Some(View { part: Some(Part { path, .. }), tag, cache }) => {
                format!(
                    "levada mount --vhost {at} --subtree '{path}' --tag='{tag}' --cache={cache}"
                )
            }
            Some(View { part: None, .. }) | None => format!("levada mount --vhost {at}"),
        };
        format!(
            "the process that served {at} is gone: start its guest anew after `{how}`, or `levada umount {at}`"
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
    wait_for(record, state, force)?;
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

/// Ends all that this cluster serves at sockets, at once: with what guests had handed over and was not durable.
pub(super) fn end_all(state: &StateDir) -> impl Iterator<Item = Result<()>> {
    let served = noted(state).into_iter().filter(|(_, record)| is_served(record));
    served.map(|(at, record)| {
        super::kill(&record, &at)?;
        say!("{} is no longer served, and what its guest had not synced is lost", at.display());
        Ok(())
    })
}
