//! A node's state directory: lock, process id, phase, log, control socket, address.
//!
//! ```text
//! node.lock     flock held by the running node; its text is the process id
//! phase         whether the node starts, serves or ends, after its process id
//! node.log      what the node says
//! control.sock  where `levada` talks to the node
//! address       host:port where clients connect; kept over restarts, so that mounts find it
//! ost0.staged   staged changes of a target while `levada fsck --rebuild-index` makes its index anew
//! cluster       UUID of the cluster that was made or opened here last
//! volumes       UUID of the client through which the node has thin volumes open
//! ending        what the node has left open, a line for each; empty once it has closed everything
//! ```
//!
//! After a crash the kernel has released the lock; the other files are replaced.

use levada_base::ids::Uuid;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What Linux takes as the path of a Unix socket, beside the zero that ends it: unix(7).
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Whoever asks for a node holds its lock for a moment, shared with others who ask.
const LOCK_TRIES: u32 = 5;
const LOCK_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// Why a state directory could not be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another node holds it.
    #[error("a node (process {pid}) already runs on {}; stop it with `levada down`", .dir.display())]
    AlreadyRunning { dir: PathBuf, pid: String },
    /// No socket can have this path.
    #[error(
        "the path of the control socket, {}, has {} bytes, and at most {SOCKET_PATH_BYTES_MAX} are possible; nothing \
         was made: write a shorter `state_dir` into the cluster file; it may lie anywhere",
        .socket.display(), .socket.as_os_str().len()
    )]
    TooLong { socket: PathBuf },
    /// The directory is another user's, and so is what runs in it.
    #[error(
        "permission denied: the state directory {} belongs to another user; ask as that user, or as root",
        .dir.display()
    )]
    Denied { dir: PathBuf },
    /// It is there, and takes no signal from this user.
    #[error("cannot tell the node (process {pid}) to stop")]
    NotTold {
        pid: u32,
        #[source]
        source: Errno,
    },
    /// The directory cannot be made or written.
    #[error("cannot use the state directory {}", .dir.display())]
    Unusable {
        dir: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// What a node is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It answers nobody yet.
    Starting,
    /// Also whatever else holds the lock, as a check of a cluster that is down.
    Serving,
    /// It answers nobody any more.
    Ending,
}

impl Phase {
    fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Ending => "ending",
        }
    }
}

/// The node that holds a state directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningNode {
    pub pid: u32,
    pub phase: Phase,
}

/// Makes a directory that nobody else may enter; one that is there stays as it is.
///
/// # Errors
///
/// What `mkdir(2)` says.
pub fn make_private(dir: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Paths in a state directory.
#[derive(Clone, Debug)]
pub struct StateDir(pub PathBuf);

impl StateDir {
    /// Where the program talks to the node.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.0.join("control.sock")
    }

    /// Where the process of a mount, of that number, tells what it does.
    #[must_use]
    pub fn mount_socket(&self, pid: u32) -> PathBuf {
        self.0.join("top").join(pid.to_string())
    }

    /// Where the node writes what it says.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.0.join("node.log")
    }

    /// Where the address is kept.
    #[must_use]
    pub fn address_file(&self) -> PathBuf {
        self.0.join("address")
    }

    /// The address that clients use, as the last node here left it.
    #[must_use]
    pub fn address(&self) -> Option<String> {
        let text = std::fs::read_to_string(self.address_file()).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// Keeps the address for clients and for the next start.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn set_address(&self, address: &str) -> Result<(), StateError> {
        replace(&self.address_file(), address).map_err(|source| self.unusable(source))
    }

    /// The cluster that was made or opened here last.
    #[must_use]
    pub fn cluster(&self) -> Option<Uuid> {
        std::fs::read_to_string(self.0.join("cluster")).ok()?.trim().parse().ok()
    }

    /// Notes the cluster, for mounts and so that the next start knows that there is one.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn set_cluster(&self, cluster: Uuid) -> Result<(), StateError> {
        let path = self.0.join("cluster");
        replace(&path, &format!("{cluster}\n")).map_err(|source| self.unusable(source))
    }

    /// The client through which a node has, or had when it died, thin volumes open.
    #[must_use]
    pub fn volumes_client(&self) -> Option<Uuid> {
        std::fs::read_to_string(self.0.join("volumes")).ok()?.trim().parse().ok()
    }

    /// Notes the client through which thin volumes are open; `None`: there is none.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn set_volumes_client(&self, client: Option<Uuid>) -> Result<(), StateError> {
        let path = self.0.join("volumes");
        let noted = match client {
            Some(client) => replace(&path, &format!("{client}\n")),
            None => match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
        };
        noted.map_err(|source| self.unusable(source))
    }

    /// What the last node left open, a line for each: all of it, where it was killed.
    #[must_use]
    pub fn left_open(&self) -> Vec<String> {
        let noted = std::fs::read_to_string(self.0.join("ending")).unwrap_or_default();
        noted.lines().map(str::to_owned).collect()
    }

    /// Notes what this node leaves open if it ends now.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn set_left_open(&self, left_open: &[String]) -> Result<(), StateError> {
        let lines: String = left_open.iter().map(|line| format!("{line}\n")).collect();
        replace(&self.0.join("ending"), &lines).map_err(|source| self.unusable(source))
    }

    /// Removes the note of the cluster, which is given up. Once this returns that is durable.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn forget_cluster(&self) -> std::io::Result<()> {
        let path = self.0.join("cluster");
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.and_then(|()| sync_dir_of(&path)),
        }
    }

    fn staged_file(&self, target: &str) -> PathBuf {
        self.0.join(format!("{target}.staged"))
    }

    /// Keeps the staged changes of a target whose index is about to be made anew. Once this returns that is durable.
    ///
    /// # Errors
    ///
    /// When they cannot be written.
    pub fn keep_staged(&self, target: &str, bytes: &[u8]) -> Result<(), StateError> {
        replace_bytes(&self.staged_file(target), bytes).map_err(|source| self.unusable(source))
    }

    /// The staged changes that a rebuild which was cut off had kept; `None` when there are none.
    ///
    /// # Errors
    ///
    /// When they cannot be read.
    pub fn staged(&self, target: &str) -> Result<Option<Vec<u8>>, StateError> {
        match std::fs::read(self.staged_file(target)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(self.unusable(source)),
        }
    }

    /// Removes what was kept of a target's staged changes: its store holds a log again, which goes on from them. Once
    /// this returns that is durable.
    ///
    /// # Errors
    ///
    /// When the file cannot be removed.
    pub fn forget_staged(&self, target: &str) -> Result<(), StateError> {
        let path = self.staged_file(target);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => {
                removed.and_then(|()| sync_dir_of(&path)).map_err(|source| self.unusable(source))
            }
        }
    }

    fn unusable(&self, source: std::io::Error) -> StateError {
        StateError::Unusable { dir: self.0.clone(), source }
    }

    /// Looks whether a node could be reached here, before anything is made: it names its directory from
    /// the root, wherever the one who starts it stands.
    ///
    /// # Errors
    ///
    /// [`StateError::TooLong`].
    pub fn check(&self) -> Result<(), StateError> {
        let socket =
            std::path::absolute(self.control_socket()).map_err(|source| self.unusable(source))?;
        match socket.as_os_str().len() {
            ..=SOCKET_PATH_BYTES_MAX => Ok(()),
            _ => Err(StateError::TooLong { socket }),
        }
    }

    /// Makes the directory and takes its lock, for as long as the result lives.
    ///
    /// # Errors
    ///
    /// [`StateError::AlreadyRunning`] when another process holds the lock.
    pub fn lock(&self) -> Result<StateLock, StateError> {
        self.check()?;
        make_private(&self.0).map_err(|source| self.unusable(source))?;
        let path = self.0.join("node.lock");
        let mut file = File::options()
            .create(true)
            .read(true)
            .write(true)
            .truncate(false)
            .open(path)
            .map_err(|source| self.unusable(source))?;
        let mut tries = 1;
        let locked = loop {
            match file.try_lock() {
                Err(TryLockError::WouldBlock) if tries < LOCK_TRIES => tries += 1,
                locked => break locked,
            }
            std::thread::sleep(LOCK_AGAIN_AFTER);
        };
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                let pid = pid.trim().to_owned();
                return Err(StateError::AlreadyRunning { dir: self.0.clone(), pid });
            }
            Err(TryLockError::Error(source)) => return Err(self.unusable(source)),
        }
        // What a process of that number was at is not what this one is at.
        let _ = std::fs::remove_file(self.0.join("phase"));
        file.set_len(0)
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(|source| self.unusable(source))?;
        Ok(StateLock { _file: file })
    }

    /// Notes what the node of this process, which holds the lock, is at. It is lost with the power, and so is the node.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn set_phase(&self, phase: Phase) -> Result<(), StateError> {
        let (path, fresh) = (self.0.join("phase"), self.0.join("phase.new"));
        std::fs::write(&fresh, format!("{} {}\n", std::process::id(), phase.word()))
            .and_then(|()| std::fs::rename(&fresh, &path))
            .map_err(|source| self.unusable(source))
    }

    /// The node that holds the lock, if one does.
    ///
    /// # Errors
    ///
    /// [`StateError::Denied`] when only another user can tell.
    pub fn node(&self) -> Result<Option<RunningNode>, StateError> {
        let mut file = match File::open(self.0.join("node.lock")) {
            Ok(file) => file,
            Err(error) => {
                return match error.kind() {
                    ErrorKind::NotFound => Ok(None),
                    ErrorKind::PermissionDenied => Err(StateError::Denied { dir: self.0.clone() }),
                    _ => Err(self.unusable(error)),
                };
            }
        };
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => {}
            Ok(()) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(self.unusable(error)),
        }
        let mut pid = String::new();
        file.read_to_string(&mut pid).map_err(|source| self.unusable(source))?;
        let pid = pid.trim().parse().ok();
        Ok(pid.map(|pid| RunningNode { pid, phase: self.phase_of(pid) }))
    }

    /// What that process has noted of itself, which stays when it has ended.
    #[must_use]
    pub fn phase_of(&self, pid: u32) -> Phase {
        let noted = std::fs::read_to_string(self.0.join("phase")).unwrap_or_default();
        let is_at = |phase: &Phase| noted.trim() == format!("{pid} {}", phase.word());
        [Phase::Starting, Phase::Ending].into_iter().find(is_at).unwrap_or(Phase::Serving)
    }

    /// Whether a node holds the lock, as far as this user can tell.
    #[must_use]
    pub fn is_held(&self) -> bool {
        matches!(self.node(), Ok(Some(_)))
    }

    /// Tells the node of process `pid` to stop, also one that is starting. One that has ended gets nothing, whoever has
    /// its number now.
    ///
    /// # Errors
    ///
    /// [`StateError::NotTold`], and those of [`Self::node`].
    pub fn tell_to_stop(&self, pid: u32) -> Result<(), StateError> {
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(()) };
        let told = match pidfd_open(number, PidfdFlags::empty()) {
            // From here on it is this very process: it has the number of the one that holds the lock.
            Ok(process) => match self.node()? {
                Some(node) if node.pid == pid => pidfd_send_signal(process, Signal::TERM),
                _ => Ok(()),
            },
            Err(error) => Err(error),
        };
        match told {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(source) => Err(StateError::NotTold { pid, source }),
        }
    }
}

/// The lock of a running node; released when dropped, or by the kernel after a crash.
pub struct StateLock {
    _file: File,
}

/// Writes a small file so that whoever looks finds all of it or what was there before, also after a
/// power loss. Once this returns it is durable.
///
/// # Errors
///
/// What the file system says.
pub fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    replace_bytes(path, text.as_bytes())
}

fn replace_bytes(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let mut file = File::create(&fresh)?;
    file.write_all(bytes)?;
    // Before its name: a file system may keep the rename and lose what was written.
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    sync_dir_of(path)
}

/// Makes durable which names there are beside `path`.
fn sync_dir_of(path: &Path) -> std::io::Result<()> {
    // A name alone has the empty path as its parent.
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn one_node_at_a_time() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let state = StateDir(dir.path().join("state"));
        let node = || state.node().expect("readable");
        assert_eq!(node(), None);
        let lock = state.lock().expect("free");
        let pid = std::process::id();
        assert_eq!(node(), Some(RunningNode { pid, phase: Phase::Serving }));
        assert!(matches!(state.lock(), Err(StateError::AlreadyRunning { .. })));
        for phase in [Phase::Starting, Phase::Ending] {
            state.set_phase(phase).expect("noted");
            assert_eq!(node(), Some(RunningNode { pid, phase }));
        }
        // Of a process before this one.
        std::fs::write(state.0.join("phase"), format!("{} starting\n", pid + 1)).expect("written");
        assert_eq!(node(), Some(RunningNode { pid, phase: Phase::Serving }));
        drop(lock);
        assert_eq!(node(), None);
        state.lock().expect("free again");
    }

    #[test]
    fn a_number_left_in_a_lock_belongs_to_nobody() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let state = StateDir(dir.path().to_owned());
        let mut stranger = Command::new("sleep").arg("60").spawn().expect("started");
        let path = dir.path().join("node.lock");
        std::fs::write(&path, format!("{}\n", stranger.id())).expect("written");
        state.tell_to_stop(stranger.id()).expect("nobody holds it");
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(stranger.try_wait().expect("a child"), None, "it was not told");
        // As if it ran here.
        let held = File::open(&path).expect("there");
        held.lock().expect("nobody holds it");
        state.tell_to_stop(stranger.id()).expect("told");
        let ended = stranger.wait().expect("a child");
        assert_eq!(ended.signal(), Some(Signal::TERM.as_raw()));
        state.tell_to_stop(stranger.id()).expect("there is nobody to tell");
    }

    #[test]
    fn a_directory_too_deep_for_a_socket_is_refused_before_it_is_made() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let room = SOCKET_PATH_BYTES_MAX - "/control.sock".len() - dir.path().as_os_str().len();
        let named = |bytes| StateDir(dir.path().join("s".repeat(bytes)));
        let fits = named(room - 1);
        let _lock = fits.lock().expect("just fits");
        std::os::unix::net::UnixListener::bind(fits.control_socket()).expect("the kernel agrees");
        let deep = named(room);
        let text = deep.lock().err().expect("too long").to_string();
        for part in ["108 bytes", "at most 107", "state_dir"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!deep.0.exists(), "nothing was made");
    }

    #[test]
    fn a_cluster_that_is_forgotten_is_not_noted() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let state = StateDir(dir.path().to_owned());
        state.forget_cluster().expect("there is none");
        state.set_cluster(Uuid::from_u64_pair(1, 2)).expect("noted");
        assert_eq!(state.cluster(), Some(Uuid::from_u64_pair(1, 2)));
        state.forget_cluster().expect("removed");
        assert_eq!(state.cluster(), None);
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        std::fs::write(
            dir.path().join("levada.toml.new"),
            "of a start that was killed, and longer",
        )
        .expect("written");
        replace(&path, "first").expect("made");
        // Whoever has it open reads on in what it was: it is never seen half written.
        let mut reader = File::open(&path).expect("there");
        replace(&path, "second").expect("replaced");
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("read");
        assert_eq!(text, "first");
        assert_eq!(std::fs::read_to_string(&path).expect("there"), "second");
        assert_eq!(std::fs::read_dir(dir.path()).expect("there").count(), 1, "nothing is left");
    }
}
