//! Where the process of an open array listens.

use levada_base::ids::Uuid;
use std::path::PathBuf;

fn dir() -> PathBuf {
    levada_desk::directory("LEVADA_ARRAYS_DIR", "arrays")
}

/// The socket of an array.
pub(crate) fn socket_of(array: Uuid) -> PathBuf {
    dir().join(format!("{array}.sock"))
}

pub(crate) fn make_dir() -> std::io::Result<()> {
    levada_desk::make_directory(&dir())
}
