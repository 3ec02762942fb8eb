//! What a drive that is a file keeps beside it: `bay3.reservations` and `bay3.guid` beside `bay3.img`.
//!
//! What always holds: the file is the old one or the new one, whole and on the disk, whenever the process or the machine ends. It is written
//! under another name, flushed, renamed, and then its directory is flushed.
//!
//! Calls wait for the disk on the reactor's thread: changes are rare, and this is no data path but that of a simulator.

use futures_util::future::{LocalBoxFuture, ready};
use levada_export_nvmet::{Keep, KeepError};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// See the module.
pub(crate) struct KeptFile(PathBuf);

impl KeptFile {
    /// The reservations of the drive that `image` is.
    pub fn reservations(image: &Path) -> Self {
        Self(image.with_extension("reservations"))
    }

    /// Its GUID.
    pub fn guid(image: &Path) -> Self {
        Self(image.with_extension("guid"))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn read(&self) -> io::Result<Option<Vec<u8>>> {
        match fs::read(&self.0) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn replace(&self, bytes: Option<&[u8]>) -> io::Result<()> {
        match bytes {
            Some(bytes) => {
                let mut new = self.0.clone().into_os_string();
                new.push(".new");
                let mut file = File::create(&new)?;
                file.write_all(bytes)?;
                file.sync_all()?;
                fs::rename(&new, &self.0)?;
            }
            None => match fs::remove_file(&self.0) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed?,
            },
        }
        let directory = self.0.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Keep for KeptFile {
    fn load(&self) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KeepError>> {
        Box::pin(ready(self.read().map_err(KeepError::store)))
    }

    fn save(&self, bytes: Option<Vec<u8>>) -> LocalBoxFuture<'_, Result<(), KeepError>> {
        Box::pin(ready(self.replace(bytes.as_deref()).map_err(KeepError::store)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_last_is_there() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = KeptFile::reservations(&directory.path().join("bay3.img"));
        assert_eq!(file.path(), directory.path().join("bay3.reservations"));
        assert_eq!(file.read().expect("nothing"), None);
        for bytes in [Some(&b"one"[..]), Some(&b"two"[..]), None, None] {
            file.replace(bytes).expect("saved");
            assert_eq!(file.read().expect("read").as_deref(), bytes);
        }
        let left = fs::read_dir(directory.path()).expect("a directory").count();
        assert_eq!(left, 0, "nothing is left beside it");
    }
}
