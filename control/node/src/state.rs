//! A node's state directory: lock, process id, log, control socket, address.
//!
//! ```text
//! node.lock     flock held by the running node; its text is the process id
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
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// What Linux takes as the path of a Unix socket, beside the zero that ends it: unix(7).
const SOCKET_PATH_BYTES_MAX: usize = 107;

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
    /// The directory cannot be made or written.
    #[error("cannot use the state directory {}", .dir.display())]
    Unusable {
        dir: PathBuf,
        #[source]
        source: std::io::Error,
    },
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
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                let pid = pid.trim().to_owned();
                return Err(StateError::AlreadyRunning { dir: self.0.clone(), pid });
            }
            Err(TryLockError::Error(source)) => return Err(self.unusable(source)),
        }
        file.set_len(0)
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(|source| self.unusable(source))?;
        Ok(StateLock { _file: file })
    }

    /// The process id of the node that holds the lock, if one does.
    #[must_use]
    pub fn running(&self) -> Option<u32> {
        let mut file = File::open(self.0.join("node.lock")).ok()?;
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                file.read_to_string(&mut pid).ok()?;
                pid.trim().parse().ok()
            }
            Ok(()) | Err(TryLockError::Error(_)) => None,
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

    #[test]
    fn one_node_at_a_time() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let state = StateDir(dir.path().join("state"));
        assert_eq!(state.running(), None);
        let lock = state.lock().expect("free");
        assert_eq!(state.running(), Some(std::process::id()));
        assert!(matches!(state.lock(), Err(StateError::AlreadyRunning { .. })));
        drop(lock);
        assert_eq!(state.running(), None);
        state.lock().expect("free again");
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
