//! A cluster in a box as people run it: the `levada` program, on files of this machine's disk, mounted.
//!
//! Its directory is made beside the program, or where [`PLACE_VARIABLE`] says, and removed again.
#![allow(unsafe_code)] // statfs(2).

use anyhow::{Context, Result};
use levada_base::units::GIB;
use levada_node::state::StateDir;
use levada_spec::{BOX_DRIVES, ClusterFile, ExportSpec};
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// The environment variable that names a directory for boxes, on the disk to be measured.
const PLACE_VARIABLE: &str = "LEVADA_BENCH_DIR";
/// What statfs(2) calls ext4; ext2 and ext3, which nobody runs any more, have the same number.
const EXT4_MAGIC: u64 = 0xef53;
const DRIVE_BYTES: u64 = GIB;

/// Where boxes are made: beside the program, which is on a disk, while /tmp may be memory.
pub(crate) fn place() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(PLACE_VARIABLE) {
        return Ok(named.into());
    }
    let own = std::env::current_exe()?;
    Ok(own.parent().context("a program lies in a directory")?.to_owned())
}

/// The number by which statfs(2) tells what kind of file system `path` is on.
fn magic_of(path: &Path) -> Result<u64> {
    let name = CString::new(path.as_os_str().as_encoded_bytes())?;
    let mut statfs = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `name` ends with a zero byte, `statfs` is writable.
    let result = unsafe { libc::statfs(name.as_ptr(), statfs.as_mut_ptr()) };
    anyhow::ensure!(result == 0, std::io::Error::last_os_error());
    // SAFETY: zeroed above, and all zeroes is a valid `statfs`.
    let statfs = unsafe { statfs.assume_init() };
    Ok(statfs.f_type as u64)
}

/// What is called ext4 must be ext4.
pub(crate) fn ensure_ext4(path: &Path) -> Result<()> {
    let magic = magic_of(path).with_context(|| format!("asking what {} is", path.display()))?;
    anyhow::ensure!(
        magic == EXT4_MAGIC,
        "{} is not on ext4 (statfs says {magic:#x}): name a directory on ext4 with {PLACE_VARIABLE}=DIR",
        path.display()
    );
    Ok(())
}

/// A mounted cluster in a box, run by the `levada` program; dropping it takes it down.
pub(crate) struct RunningBox {
    levada: PathBuf,
    pub dir: TempDir,
}

impl RunningBox {
    pub(crate) fn up() -> Result<Self> {
        Self::up_with(Vec::new())
    }

    /// One that shows volumes; relative paths of `exports` are in its directory.
    pub(crate) fn up_with(exports: Vec<ExportSpec>) -> Result<Self> {
        let own = std::env::current_exe()?;
        let levada = own.with_file_name("levada");
        anyhow::ensure!(levada.exists(), "{} is missing: `make build`", levada.display());
        let dir = tempfile::Builder::new().prefix("bench-box-").tempdir_in(place()?)?;
        let size = 3 * DRIVE_BYTES * BOX_DRIVES as u64;
        let file = ClusterFile { exports, ..ClusterFile::box_default(dir.path(), size)? };
        std::fs::write(dir.path().join("levada.toml"), file.to_toml())?;
        let running = Self { levada, dir };
        running.levada(&["up"])?;
        Ok(running)
    }

    pub(crate) fn levada(&self, command: &[&str]) -> Result<()> {
        let output = Command::new(&self.levada)
            .arg("-f")
            .arg(self.dir.path().join("levada.toml"))
            .args(command)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let command = command.join(" ");
        anyhow::ensure!(output.status.success(), "levada {command}: {}", said.trim());
        Ok(())
    }

    pub(crate) fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    pub(crate) fn node_pid(&self) -> Result<u32> {
        let node = StateDir(self.dir.path().join("state")).node()?;
        Ok(node.context("the node is not running")?.pid)
    }

    /// The processes of the node, which is the first, and of the mount.
    pub(crate) fn pids(&self) -> Result<Vec<u32>> {
        let mut pids = vec![self.node_pid()?];
        let ours = self.dir.path().as_os_str().as_encoded_bytes();
        for entry in std::fs::read_dir("/proc")? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            let exe = std::fs::read_link(entry.path().join("exe")).unwrap_or_default();
            let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let is_of_box = arguments.windows(ours.len()).any(|part| part == ours);
            if exe == self.levada && is_of_box && !pids.contains(&pid) {
                pids.push(pid);
            }
        }
        Ok(pids)
    }
}

impl Drop for RunningBox {
    fn drop(&mut self) {
        if let Err(error) = self.levada(&["down"]) {
            eprintln!("the box is still up in {}: {error:#}", self.dir.path().display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_not_ext4_is_refused_with_the_way_out() {
        // Every Linux has this one, and it is never ext4.
        let error = ensure_ext4(Path::new("/proc")).expect_err("not ext4").to_string();
        assert!(
            error.contains("/proc is not on ext4") && error.contains(PLACE_VARIABLE),
            "{error}"
        );
        assert!(ensure_ext4(Path::new("/no/such/place")).is_err());
    }
}
