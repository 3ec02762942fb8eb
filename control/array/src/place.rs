//! Where the process of an open array listens.

use levada_base::ids::Uuid;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

/// Names another directory: for who is not root, and for tests.
const VARIABLE: &str = "LEVADA_ARRAYS_DIR";

fn dir() -> PathBuf {
    if let Some(dir) = std::env::var_os(VARIABLE) {
        return dir.into();
    }
    let user = rustix::process::geteuid();
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !user.is_root() => PathBuf::from(dir).join("levada/arrays"),
        None if !user.is_root() => PathBuf::from(format!("/tmp/levada-{}/arrays", user.as_raw())),
        _ => "/run/levada/arrays".into(),
    }
}

/// The socket of an array.
pub(crate) fn socket_of(array: Uuid) -> PathBuf {
    dir().join(format!("{array}.sock"))
}

/// Makes the directory of the sockets; for its owner alone, as whoever may ask may fail members.
pub(crate) fn make_dir() -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir())
}
