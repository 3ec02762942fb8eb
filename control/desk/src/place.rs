//! Where desks are: a directory of sockets for each kind of process.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The directory of the desks of `what`, such as `arrays`: what the environment's `variable` names, for tests and for who wants another;
/// else the system's, or the user's where that is not root.
#[must_use]
pub fn directory(variable: &str, what: &str) -> PathBuf {
    if let Some(directory) = std::env::var_os(variable) {
        return directory.into();
    }
    let user = rustix::process::geteuid();
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(own) if !user.is_root() => PathBuf::from(own).join("levada").join(what),
        None if !user.is_root() => PathBuf::from(format!("/tmp/levada-{}/{what}", user.as_raw())),
        _ => Path::new("/run/levada").join(what),
    }
}

/// Makes such a directory, for its owner alone: whoever may ask may give orders.
///
/// # Errors
///
/// What the system says.
pub fn make_directory(directory: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}
