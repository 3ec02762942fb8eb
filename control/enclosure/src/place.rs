//! Where the process of an enclosure listens.

use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

/// Names another directory: for who is not root, and for tests.
const VARIABLE: &str = "LEVADA_ENCLOSURES_DIR";

fn dir() -> PathBuf {
    if let Some(dir) = std::env::var_os(VARIABLE) {
        return dir.into();
    }
    let user = rustix::process::geteuid();
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !user.is_root() => PathBuf::from(dir).join("levada/enclosures"),
        None if !user.is_root() => {
            PathBuf::from(format!("/tmp/levada-{}/enclosures", user.as_raw()))
        }
        _ => "/run/levada/enclosures".into(),
    }
}

pub(crate) fn socket_of(name: &str) -> PathBuf {
    dir().join(format!("{name}.sock"))
}

/// Makes the directory of the sockets; for its owner alone, as whoever may ask may cut the power.
pub(crate) fn make_dir() -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir())
}
