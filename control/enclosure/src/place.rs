//! Where the process of an enclosure listens.

use std::path::PathBuf;

fn dir() -> PathBuf {
    levada_desk::directory("LEVADA_ENCLOSURES_DIR", "enclosures")
}

pub(crate) fn socket_of(name: &str) -> PathBuf {
    dir().join(format!("{name}.sock"))
}

pub(crate) fn make_dir() -> std::io::Result<()> {
    levada_desk::make_directory(&dir())
}
