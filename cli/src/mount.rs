//! `mount` and `umount`: a mount is a background process of its own, so that it lives on while
//! the node is away.

mod guest;
mod told;

pub use guest::serve_exports;
pub use told::{exports, meters, status};

use crate::{out::say, place, process, status};
use anyhow::{Context, Result, bail};
use clap::Args;
use levada_node::mounting::{self, Served};
use levada_node::state::StateDir;
use levada_spec::Loaded;
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// An unmount that takes longer tells why.
const PATIENCE: Duration = Duration::from_secs(3);
/// What mounts say, in the state directory.
const LOG: &str = "mount.log";
/// Time for an unmounted process to end before something else is mounted in its place.
const END_LIMIT: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Who uses a mount is asked of every process there is.
const LOOK_AT_USERS_EVERY: Duration = Duration::from_secs(1);

/// The command that looks after a mount's process.
pub const GUARD: &str = "guard-mount";

#[derive(Args)]
pub struct MountArgs {
    /// The directory to mount on
    #[arg(required_unless_present = "vhost")]
    dir: Option<PathBuf>,
    /// Instead of a directory, a socket at which one virtual machine at a time mounts it (virtio-fs)
    #[arg(long, value_name = "SOCKET", conflicts_with = "dir")]
    vhost: Option<PathBuf>,
    #[command(flatten)]
    guest: guest::GuestArgs,
    /// Stay in the foreground
    #[arg(long)]
    foreground: bool,
}

/// Mounts the file system on a directory, or lets virtual machines mount it.
pub fn mount(file: Option<&Path>, args: &MountArgs) -> Result<()> {
    let path = place::find_or_say(file)?;
    let loaded = place::load_at(&path)?;
    let dir = match (&args.vhost, &args.dir) {
        (Some(socket), _) => {
            return guest::mount(&loaded, &path, socket, &args.guest, args.foreground);
        }
        (None, Some(dir)) => dir,
        (None, None) => bail!("neither a directory nor a socket is named"),
    };
    if args.foreground {
        let state = place::state(&loaded);
        let target = mounting::place(dir)?;
        if look(&target, &state)? == Found::Ours {
            bail!("{} is mounted already", target.display());
        }
        let plan = mounting::MountPlan {
            address: place::address(&loaded)?,
            cluster: loaded.cluster.name.clone(),
            cluster_uuid: place::cluster(&loaded)?,
            record: record(&state, &target)?,
            socket: state.mount_socket(std::process::id()),
            guard: GUARD,
            target,
        };
        return mounting::run(&plan, || say!("{}", process::READY));
    }
    mount_at(&loaded, &path, dir)
}

/// Makes the directory of a mount that the cluster file lists, unless it is there.
pub fn make_place(dir: &Path) -> Result<()> {
    // One that is mounted on is there, and asking it might wait for its node.
    if mounting::place(dir).is_ok_and(|dir| mounting::mounted_at(&dir).is_ok_and(|at| at.is_some()))
    {
        return Ok(());
    }
    match std::fs::create_dir_all(dir) {
        // What else it may be is told by whoever mounts on it.
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Mounts on `dir` in the background, unless it is mounted there already.
pub fn mount_at(loaded: &Loaded, file: &Path, dir: &Path) -> Result<()> {
    let dir = mounting::place(dir)?;
    let state = place::state(loaded);
    let file = &std::path::absolute(file)?;
    refuse_to_hide(&dir, loaded, file)?;
    let found = look(&dir, &state)?;
    if found == Found::Ours {
        if let Some(stranger) = stranger(&dir, &state) {
            bail!("{stranger}");
        }
        say!("{} is mounted already", dir.display());
        return Ok(());
    }
    refuse_unless_up(loaded)?;
    let log = state.0.join(LOG);
    let arguments = [
        OsStr::new("-f"),
        file.as_os_str(),
        "mount".as_ref(),
        "--foreground".as_ref(),
        dir.as_os_str(),
    ];
    if let Err(error) = process::start(&log, &arguments, |line| say!("{line}")) {
        // Another program may have been faster.
        if !matches!(look(&dir, &state), Ok(Found::Ours)) {
            return Err(error).with_context(|| format!("cannot mount {}", dir.display()));
        }
        say!("{} is mounted already", dir.display());
        return Ok(());
    }
    say!("mounted {} on {}", loaded.cluster.name, dir.display());
    if found == Found::Full {
        say!("{} was not empty: what is in it is hidden until the unmount", dir.display());
    }
    Ok(())
}

/// A mount would wait for a node that is away, however long.
fn refuse_unless_up(loaded: &Loaded) -> Result<()> {
    let state = place::state(loaded);
    if state.node()?.is_none() {
        bail!("{} is not up: start it with `levada up`", loaded.cluster.name);
    }
    if let Some(problem) = status::ask(&state)?.stopped_metadata() {
        bail!("cannot mount {}: {problem}", loaded.cluster.name);
    }
    Ok(())
}

/// The node looks for its own files by their names: below its own mount it would wait for itself.
fn refuse_to_hide(dir: &Path, loaded: &Loaded, file: &Path) -> Result<()> {
    let local = loaded.cluster.drives.iter().filter(|drive| !drive.is_remote());
    let drives = local.map(|drive| loaded.path(&drive.path));
    let own = drives.chain([place::state(loaded).0, file.to_owned()]);
    for path in own {
        let path = std::fs::canonicalize(&path).unwrap_or(path);
        if path.starts_with(dir) {
            bail!(
                "cannot mount on {}: the cluster needs {}, which is in it",
                dir.display(),
                path.display()
            );
        }
    }
    Ok(())
}

/// What is where something is to be mounted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// An empty directory, or a dead mount of an earlier process, which mounting replaces.
    Empty,
    /// A directory with something in it.
    Full,
    /// A mount of this cluster, which serves.
    Ours,
}

/// Looks whether one can mount on `dir`.
fn look(dir: &Path, state: &StateDir) -> Result<Found> {
    let fs_type = mounting::mounted_at(dir)?;
    match fs_type.as_deref() {
        Some(mounting::FS_TYPE) if is_served_on(&record(state, dir)?)? => return Ok(Found::Ours),
        // Alive, and not of this cluster; or dead.
        Some(mounting::FS_TYPE) => {}
        None => {
            let record = record(state, dir)?;
            wait_for_earlier(dir, &record)?;
            // It was one that mounts, not one that ends.
            if mounted(dir)? && is_served(&record) {
                return Ok(Found::Ours);
            }
        }
        Some(other) => {
            bail!(
                "cannot mount on {}: another file system ({other}) is mounted there",
                dir.display()
            )
        }
    }
    match std::fs::metadata(dir) {
        Ok(there) if !there.is_dir() => {
            bail!("cannot mount on {}: it is not a directory", dir.display())
        }
        Ok(_) if fs_type.is_some() => {
            bail!("cannot mount on {}: the mount of another cluster is there", dir.display())
        }
        Ok(_) => {
            let entries = std::fs::read_dir(dir);
            let is_full = entries.is_ok_and(|mut entries| entries.next().is_some());
            Ok(if is_full { Found::Full } else { Found::Empty })
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("cannot mount on {}: there is no such directory", dir.display())
        }
        Err(error) if [ENOTCONN, ECONNABORTED].contains(&error.raw_os_error().unwrap_or(0)) => {
            Ok(Found::Empty)
        }
        Err(error) => Err(error).with_context(|| format!("cannot mount on {}", dir.display())),
    }
}

/// A process serves a directory until its mount has gone: one that was taken out of the tree while
/// programs used it goes with them. Or it has just begun: then until the mount is there.
fn wait_for_earlier(dir: &Path, record: &Path) -> Result<()> {
    let begun = Instant::now();
    let mut looked_at_users: Option<Instant> = None;
    while is_served(record) && !mounted(dir)? {
        let served = served(record);
        let mut users_now = Vec::new();
        if looked_at_users.is_none_or(|at| at.elapsed() > LOOK_AT_USERS_EVERY) {
            looked_at_users = Some(Instant::now());
            users_now = users(dir, served);
        }
        if !users_now.is_empty() {
            bail!(
                "cannot mount on {}: the mount that was taken out of it is still used by {}; it ends with them",
                dir.display(),
                users_now.join(", ")
            );
        }
        if begun.elapsed() > END_LIMIT {
            let whose = match served {
                Some(Served { pid, .. }) => format!("the process ({pid}) of an earlier mount"),
                None => "another process that mounts there".into(),
            };
            bail!("cannot mount on {}: {whose} has not ended", dir.display());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// What a mount answers whose process is gone.
const ENOTCONN: i32 = 107;
const ECONNABORTED: i32 = 103;

/// True while the process of a mount lives: it holds its note locked.
fn is_served(record: &Path) -> bool {
    File::open(record)
        .is_ok_and(|note| matches!(note.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// The same, of a mount that is there. One whose process is being ended, which may leave the mount dead before it
/// lets go of its note, is waited for, and is not served.
fn is_served_on(record: &Path) -> Result<bool> {
    let begun = Instant::now();
    while is_served(record) {
        let Some(Served { pid, .. }) = served(record).filter(|served| is_ending(served.pid)) else {
            return Ok(true);
        };
        if begun.elapsed() > END_LIMIT {
            bail!("the process ({pid}) of the mount is being ended, and has not ended");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(false)
}

/// True when a process is on its way out: its table of files goes first. Those of others, into which we may not look,
/// count as alive.
fn is_ending(pid: u32) -> bool {
    match std::fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(mut files) => files.next().is_none(),
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}

/// Unmounts a directory and waits until its process has made everything durable. One that is in
/// use stays, unless `lazy`.
pub fn umount(file: Option<&Path>, dir: &Path, lazy: bool) -> Result<()> {
    umount_one(file, dir, lazy, false)
}

/// The same; by `force` its process is killed where it waits for an array that has stopped.
fn umount_one(file: Option<&Path>, dir: &Path, lazy: bool, force: bool) -> Result<()> {
    if let Some(ended) = guest::umount(file, dir, lazy) {
        return ended;
    }
    let dir = mounting::place(dir)?;
    let known = match place::find(file) {
        Some(path) => Some(record(&place::state(&place::load_at(&path)?), &dir)?),
        None => None,
    };
    // It may be the mount of another cluster than the one whose file is here, if any is.
    let is_known = known.as_deref().is_some_and(is_served);
    let record = if is_known { known } else { open_record(&dir).or(known) };
    if !mounted(&dir)? {
        match record.filter(|record| is_served(record)) {
            Some(record) => bail!("{}", leaving_text(&dir, &record)),
            None => bail!("{} is not a mount of levada", dir.display()),
        }
    }
    let users = users(&dir, record.as_deref().and_then(served));
    if !users.is_empty() && !lazy {
        bail!(
            "{} is in use by {}; stop them first, or `umount --lazy` takes it out of the tree and leaves them to end",
            dir.display(),
            users.join(", ")
        );
    }
    mounting::unmount(&dir, lazy)?;
    if lazy && !users.is_empty() {
        say!("{} ends with {}", dir.display(), users.join(", "));
        return Ok(());
    }
    if let Some(record) = record {
        wait_for(&record, &state_of(&record), force)?;
    }
    say!("unmounted {}", dir.display());
    Ok(())
}

/// The programs that have a file open or mapped, or their directory, under a mount on `dir` or on
/// one that was there: name and process id. Reads only what the kernel has in memory, so it does
/// not wait for the mount.
fn users(dir: &Path, served: Option<Served>) -> Vec<String> {
    // Out of the tree, the device number alone tells: what is under `dir` uses the directory that
    // was mounted on.
    let device = served.map(|served| served.device);
    let in_tree = mounted(dir).unwrap_or(true);
    let on = |link: &Path| {
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        let there = rustix::fs::statx(CWD, link, flags, StatxFlags::TYPE).ok();
        device.is_some() && there.map(|at| (at.stx_dev_major, at.stx_dev_minor)) == device
    };
    let under = |link: PathBuf| {
        in_tree && std::fs::read_link(&link).is_ok_and(|at| at.starts_with(dir)) || on(&link)
    };
    let mapped = device.map(|(major, minor)| format!(" {major:02x}:{minor:02x} "));
    let maps = |process: &Path| {
        mapped.as_ref().is_some_and(|device| {
            std::fs::read(process.join("maps"))
                .is_ok_and(|maps| String::from_utf8_lossy(&maps).contains(device.as_str()))
        })
    };
    let uses = |process: &Path| {
        let open = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        ["cwd", "root", "exe"].iter().any(|link| under(process.join(link)))
            || open.into_iter().any(|file| under(file.path()))
            || maps(process)
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| {
            let pid: u32 = process.file_name().to_str()?.parse().ok()?;
            let name = std::fs::read_to_string(process.path().join("comm")).ok()?;
            uses(&process.path()).then(|| format!("{} ({pid})", name.trim()))
        })
        .collect()
}

/// The mounts of this cluster that are there now.
pub fn mounts(state: &StateDir) -> Vec<PathBuf> {
    let records = std::fs::read_dir(state.0.join(MOUNTS)).into_iter().flatten().flatten();
    records
        .map(|record| dir_of(&record.file_name().to_string_lossy()))
        .filter(|dir| mounted(dir).unwrap_or(false))
        .collect()
}

/// The mounts of this cluster that have a process: what programs do with them waits for the node.
pub fn served_mounts(state: &StateDir) -> Vec<PathBuf> {
    let mounts = mounts(state).into_iter();
    let mut served: Vec<_> =
        mounts.filter(|dir| record(state, dir).is_ok_and(|record| is_served(&record))).collect();
    served.extend(guest::sockets(state));
    served
}

/// One line per mount of a cluster that was here before this one, or that had another address.
pub fn strangers(state: &StateDir) -> Vec<String> {
    served_mounts(state).iter().filter_map(|dir| stranger(dir, state)).collect()
}

/// One line per mount whose process is gone.
pub fn dead(state: &StateDir) -> Vec<String> {
    let of_guests = guest::dead(state);
    let is_dead = |dir: &PathBuf| record(state, dir).is_ok_and(|record| !is_served(&record));
    let line = |dir: PathBuf| {
        let dir = dir.display();
        format!(
            "the process of the mount on {dir} is gone: `levada umount {dir}`, then mount again"
        )
    };
    mounts(state).into_iter().filter(is_dead).map(line).chain(of_guests).collect()
}

fn stranger(dir: &Path, state: &StateDir) -> Option<String> {
    let own = record(state, dir).ok().and_then(|record| served(&record));
    let own = own.or_else(|| served(&guest::record(state, dir).ok()?));
    let of = own?.cluster?;
    let ours = state.cluster().filter(|ours| *ours != of)?;
    Some(format!(
        "the mount at {} is of another cluster ({of}; {ours} is up): calls of its programs fail with ESTALE until \
         `levada umount`",
        dir.display()
    ))
}

/// The mounts of this cluster that have left the tree and still have a process: a directory and
/// its record.
fn out_of_tree(state: &StateDir) -> Vec<(PathBuf, PathBuf)> {
    let records = std::fs::read_dir(state.0.join(MOUNTS)).into_iter().flatten().flatten();
    records
        .map(|record| (dir_of(&record.file_name().to_string_lossy()), record.path()))
        .filter(|(dir, record)| is_served(record) && !mounted(dir).unwrap_or(true))
        .collect()
}

/// One line per mount that has left the tree and still has a process.
pub fn leaving(state: &StateDir) -> Vec<String> {
    out_of_tree(state).iter().map(|(dir, record)| leaving_text(dir, record)).collect()
}

fn leaving_text(dir: &Path, record: &Path) -> String {
    let users = users(dir, served(record));
    if users.is_empty() {
        format!("{} is unmounted, and its process makes everything durable", dir.display())
    } else {
        format!("{} has left the tree, and is still used by {}", dir.display(), users.join(", "))
    }
}

/// What is left behind when the node ends, or has.
pub fn say_what_stays(state: &StateDir) {
    for dir in mounts(state) {
        say!("{} stays: programs on it wait until the next `levada up`", dir.display());
    }
    for line in leaving(state) {
        say!("{line}: that waits until the next `levada up`");
    }
    for socket in guest::sockets(state) {
        say!("{} stays: its guest waits until the next `levada up`", socket.display());
    }
}

/// Unmounts what was mounted from this cluster, also what has left the tree already. What is in
/// use is refused, and with `force` ended.
pub fn umount_all(file: Option<&Path>, state: &StateDir, force: bool) -> Result<()> {
    for dir in mounts(state) {
        let record = record(state, &dir)?;
        let is_served = is_served(&record);
        if force && is_served && !users(&dir, served(&record)).is_empty() {
            // Its process and its users are dealt with below.
            mounting::unmount(&dir, true)?;
            continue;
        }
        match umount_one(file, &dir, false, force) {
            // A process that was killed keeps the others from nothing.
            Err(error) if !is_served => {
                eprintln!("levada: {}: {}", dir.display(), crate::out::chain(&error));
            }
            unmounted => unmounted?,
        }
    }
    for (dir, record) in out_of_tree(state) {
        let users = users(&dir, served(&record));
        if !users.is_empty() {
            if !force {
                bail!(
                    "{}; stop them first, or `down --force` lets their calls fail",
                    leaving_text(&dir, &record)
                );
            }
            end(&record).with_context(|| format!("cannot end the mount on {}", dir.display()))?;
            eprintln!("{} is gone for {}", dir.display(), users.join(", "));
        }
        wait_for(&record, state, force)?;
    }
    guest::umount_all(state, force)
}

/// Ends the mounts of this cluster, an array of which has stopped: their programs wait for what the node cannot do any more. What they had not
/// synced is lost, as their processes would wait as well, to make it durable. One that does not end keeps the others from nothing.
pub fn end_all(state: &StateDir) -> Result<()> {
    let of_mounts = mounts(state).into_iter().map(|dir| {
        let note = record(state, &dir)?;
        mounting::unmount(&dir, true)?;
        kill(&note, &dir)?;
        say!("{} is gone, with what was not synced", dir.display());
        Ok(())
    });
    let left_tree = out_of_tree(state);
    let of_others = left_tree.iter().map(|(dir, record)| kill(record, dir));
    let all = of_mounts.chain(of_others).chain(guest::end_all(state));
    let mut errors: Vec<anyhow::Error> = all.filter_map(Result::err).collect();
    let last = errors.pop();
    for error in errors {
        eprintln!("levada: {}", crate::out::chain(&error));
    }
    last.map_or(Ok(()), Err)
}

/// Where a mount's process notes that it serves, and what it holds locked meanwhile.
const MOUNTS: &str = "mounts";
/// What the name of a file may have on Linux. The names of notes are not cut: they tell what is mounted.
const NAME_BYTES_MAX: usize = 255;

/// The note of the mount on `dir`; its name is the path with `%` and `/` written in hex.
fn record(state: &StateDir, dir: &Path) -> Result<PathBuf> {
    note_in(state.0.join(MOUNTS), dir)
}

fn note_in(notes: PathBuf, dir: &Path) -> Result<PathBuf> {
    let name = name_of(dir);
    if name.len() > NAME_BYTES_MAX {
        bail!(
            "{} is too long a path for a mount: its name among the notes in {} would have {} bytes, each `/` counted \
             as three, and at most {NAME_BYTES_MAX} fit",
            dir.display(),
            notes.display(),
            name.len()
        );
    }
    std::fs::create_dir_all(&notes).with_context(|| format!("cannot make {}", notes.display()))?;
    Ok(notes.join(name))
}

fn name_of(dir: &Path) -> String {
    dir.display().to_string().replace('%', "%25").replace('/', "%2F")
}

/// The record of the mount on `dir`, whichever cluster's it is: its process has it open. `None` also
/// where we may not look.
fn open_record(dir: &Path) -> Option<PathBuf> {
    let end = Path::new(MOUNTS).join(name_of(dir));
    let mut processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.find_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let open = std::fs::read_dir(process.path().join("fd")).ok()?.flatten();
        let mut files = open.filter_map(|file| std::fs::read_link(file.path()).ok());
        files.find(|file| {
            file.ends_with(&end) && served(file).is_some_and(|served| served.pid == pid)
        })
    })
}

/// The state directory in which a record lies.
fn state_of(record: &Path) -> StateDir {
    StateDir(record.ancestors().nth(2).unwrap_or(record).to_owned())
}

/// What the process of a mount has noted of itself.
fn served(record: &Path) -> Option<Served> {
    Served::parse(&std::fs::read_to_string(record).ok()?)
}

/// Tells the process of a mount to end, once all is durable.
fn end(record: &Path) -> Result<(), Errno> {
    signal(record, Signal::TERM)
}

/// Ends the process of a mount at `at` whatever it is at, and waits until it has. Its note stays, and says whose client is dead.
fn kill(record: &Path, at: &Path) -> Result<()> {
    let begun = Instant::now();
    signal(record, Signal::KILL)
        .with_context(|| format!("cannot end the mount on {}", at.display()))?;
    while is_served(record) {
        if begun.elapsed() > END_LIMIT {
            let pid = served(record).map_or("?".into(), |served| served.pid.to_string());
            bail!(
                "the process ({pid}) of the mount on {} was killed, and has not ended: /proc/{pid}/stack tells what the kernel waits for",
                at.display()
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Signals the process of a mount. One that has ended gets nothing, whoever has its number now.
fn signal(record: &Path, signal: Signal) -> Result<(), Errno> {
    let pid = || Pid::from_raw(served(record)?.pid.cast_signed());
    let Some(noted) = pid() else { return Ok(()) };
    let told = pidfd_open(noted, PidfdFlags::empty()).and_then(|process| {
        // From here on it is this very process: it has the number that is noted by whoever holds
        // the record.
        match is_served(record) && pid() == Some(noted) {
            true => pidfd_send_signal(process, signal),
            false => Ok(()),
        }
    });
    told.or_else(|error| if error == Errno::SRCH { Ok(()) } else { Err(error) })
}

fn dir_of(name: &str) -> PathBuf {
    PathBuf::from(name.replace("%2F", "/").replace("%25", "%"))
}

/// Waits until the process of a mount has ended, and says so when that takes long. By `force` it is killed where it waits for an array that has
/// stopped.
fn wait_for(record: &Path, state: &StateDir, force: bool) -> Result<()> {
    let Ok(note) = File::open(record) else { return Ok(()) };
    let begun = Instant::now();
    let mut told = false;
    let mut looked_at_arrays = begun;
    while let Err(error) = note.try_lock_shared() {
        let TryLockError::WouldBlock = error else {
            return Err(error).context("cannot wait for the mount's process");
        };
        if force && looked_at_arrays.elapsed() > PATIENCE {
            looked_at_arrays = Instant::now();
            if state.is_held() && !status::ask(state)?.stopped().is_empty() {
                let name = record.file_name().unwrap_or_default().to_string_lossy();
                let at = dir_of(&name);
                kill(record, &at)?;
                say!("{} is gone, with what was not synced: an array has stopped", at.display());
                return Ok(());
            }
        }
        if !told && begun.elapsed() > PATIENCE {
            told = true;
            let why = match state.is_held() {
                true => "; `levada status` shows what keeps it",
                false => ", and the node is not up: start it with `levada up`",
            };
            eprintln!(
                "waiting for the mount's process to make everything durable{why} (it goes on by itself after Ctrl-C)"
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
    // One that was made since belongs to another process.
    if mounting::is_at(&note, record) {
        bury(&note, state);
        // Said once; there is nobody left to wait for.
        std::fs::remove_file(record)
            .with_context(|| format!("cannot remove {}", record.display()))?;
        bail!(
            "its process had ended before everything was durable: what programs had not synced by then is lost; see {}",
            state.0.join("mount.log").display()
        );
    }
    Ok(())
}

/// Lets others have what a mount whose process is gone had locked, where the node is up; else, and where that fails, its
/// lease ends it.
fn bury(note: &File, state: &StateDir) {
    let address = state.address().filter(|_| state.is_held());
    let Some((address, cluster)) = address.zip(state.cluster()) else { return };
    let buried = mounting::dead_in(note).map_err(anyhow::Error::from).and_then(|dead| {
        if dead.is_empty() { Ok(()) } else { mounting::bury(&address, cluster, &dead) }
    });
    if let Err(error) = buried {
        eprintln!("levada: what it had locked is free in a minute: {}", crate::out::chain(&error));
    }
}

/// True when a mount of levada lies on `dir`.
fn mounted(dir: &Path) -> Result<bool> {
    Ok(mounting::mounted_at(dir)?.as_deref() == Some(mounting::FS_TYPE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn the_record_of_a_mount_is_found_through_its_process() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let state = StateDir(dir.path().canonicalize().expect("there"));
        let place = Path::new("/somewhere/100%");
        let ours = record(&state, place).expect("made");
        std::fs::write(&ours, format!("{} 0:52\n", std::process::id())).expect("written");
        assert_eq!(open_record(place), None, "nobody has it open");
        let note = File::open(&ours).expect("there");
        assert_eq!(open_record(place), Some(ours.clone()));
        assert_eq!(open_record(Path::new("/somewhere")), None);
        assert_eq!(state_of(&ours).0, state.0);
        // Who else looks at it is not its process.
        std::fs::write(&ours, "1 0:52\n").expect("written");
        assert_eq!(open_record(place), None);
        drop(note);
    }

    #[test]
    fn a_path_too_long_for_a_note_is_refused_before_anything_is_mounted() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let state = StateDir(dir.path().to_owned());
        let fits = format!("/{}", "a".repeat(NAME_BYTES_MAX - 3));
        let note = record(&state, Path::new(&fits)).expect("fits");
        File::create(note).expect("the file system agrees");
        let text = record(&state, Path::new(&(fits + "b"))).expect_err("too long").to_string();
        assert!(text.contains("256 bytes") && text.contains("at most 255"), "{text}");
    }

    #[test]
    fn a_number_left_in_a_record_belongs_to_nobody() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let record = dir.path().join("record");
        let mut stranger = Command::new("sleep").arg("60").spawn().expect("started");
        std::fs::write(&record, format!("{} 0:52\n", stranger.id())).expect("written");
        end(&record).expect("nobody holds it");
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(stranger.try_wait().expect("a child"), None, "it was not told");
        // As if it served.
        let note = File::open(&record).expect("there");
        note.try_lock().expect("nobody holds it");
        end(&record).expect("told");
        let ended = stranger.wait().expect("a child");
        assert_eq!(ended.signal(), Some(Signal::TERM.as_raw()));
        end(&record).expect("there is nobody to tell");
    }
}
