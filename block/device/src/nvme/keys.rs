//! Files of secrets, by which hosts and subsystems prove who they are, and of keys of TLS.

use levada_nvme::keyring::{Keyring, KeyringError, parse_keyring};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Anybody but its owner.
const OTHERS: u32 = 0o077;

/// Why there are no secrets.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("cannot read secrets from {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} has secrets, and others may read it: chmod 600 {}", path.display(), path.display())]
    TooOpen { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Wrong { path: PathBuf, source: KeyringError },
    #[error("nobody is let in: no host is in {}", path.display())]
    Empty { path: PathBuf },
    #[error("nobody is let in: it takes TLS, and no host has a key of TLS in {}", path.display())]
    WithoutTls { path: PathBuf },
}

/// Reads a file of secrets: for each host a line `HOST_NQN [SECRET [SECRET_OF_SUBSYSTEM]] [KEY_OF_TLS]`.
///
/// # Errors
///
/// A [`KeysError`], which tells none of them.
pub fn read_keys(path: &Path) -> Result<Keyring, KeysError> {
    let failed = |source| KeysError::Read { path: path.to_owned(), source };
    let mode = std::fs::metadata(path).map_err(failed)?.permissions().mode();
    if mode & OTHERS != 0 {
        return Err(KeysError::TooOpen { path: path.to_owned() });
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    parse_keyring(&text).map_err(|source| KeysError::Wrong { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_that_others_may_read_are_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("keys");
        let missing = read_keys(&path).expect_err("there is none").to_string();
        assert!(missing.contains("No such file"), "{missing}");
        std::fs::write(&path, "# nobody yet\n").expect("written");
        let allow = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode));
        allow(0o640).expect("ours");
        assert!(matches!(read_keys(&path), Err(KeysError::TooOpen { .. })));
        allow(0o600).expect("ours");
        assert_eq!(read_keys(&path).expect("none"), Keyring::new());
        std::fs::write(&path, "nqn.2014-08.org.example:a").expect("written");
        let wrong = read_keys(&path).expect_err("no secret").to_string();
        assert!(wrong.contains("line 1: "), "{wrong}");
    }
}
