//! A step, carried out on a mount with the calls that programs use.

use crate::random::contents;
use crate::step::{Op, Renaming, Room, SLOTS, Step};
use crate::told::{Answer, Kind, Stat, Told};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// One mount as a program on it sees it.
pub struct Program {
    top: PathBuf,
    open: [Option<File>; SLOTS],
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).expect("an error of a system call")
}

fn open(path: &Path, flags: OFlags) -> Result<File, Errno> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))?))
}

fn write_all(file: &File, at: u64, bytes: &[u8]) -> Told {
    file.write_all_at(bytes, at).map_err(errno)?;
    Ok(Answer::Count(bytes.len()))
}

fn read_all(mut file: &File) -> Told {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).map_err(errno)?;
    file.read_to_end(&mut bytes).map_err(errno)?;
    Ok(Answer::Bytes(bytes))
}

fn told_of(stat: &rustix::fs::Stat) -> Answer {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        other => panic!("{other:?} was made by nobody"),
    };
    let size = if kind == Kind::File { stat.st_size as u64 } else { 0 };
    let mode = if kind == Kind::Symlink { 0 } else { stat.st_mode & 0o7777 };
    Answer::Stat(Stat { kind, size, nlink: stat.st_nlink, mode })
}

impl Program {
    pub fn new(top: PathBuf) -> Self {
        Self { top, open: Default::default() }
    }

    fn path(&self, path: &[&str]) -> PathBuf {
        path.iter().fold(self.top.clone(), |all, name| all.join(name))
    }

    fn slot(&self, slot: usize) -> Result<&File, Errno> {
        self.open[slot].as_ref().ok_or(Errno::BADF)
    }

    pub fn carry_out(&mut self, step: &Step) -> Told {
        match &step.op {
            Op::Create(path) => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
                open(&self.path(path), flags)?;
            }
            Op::MakeDir(path) => rustix::fs::mkdir(self.path(path), Mode::from_raw_mode(0o755))?,
            Op::Symlink(path, target) => rustix::fs::symlink(target.as_str(), self.path(path))?,
            Op::Link(old, new) => {
                let (old, new) = (self.path(old), self.path(new));
                rustix::fs::linkat(CWD, old, CWD, new, AtFlags::empty())?;
            }
            Op::Rename(from, to, how) => {
                let flags = match how {
                    Renaming::Replacing => RenameFlags::empty(),
                    Renaming::NotReplacing => RenameFlags::NOREPLACE,
                    Renaming::Exchanging => RenameFlags::EXCHANGE,
                };
                rustix::fs::renameat_with(CWD, self.path(from), CWD, self.path(to), flags)?;
            }
            Op::Unlink(path) => rustix::fs::unlink(self.path(path))?,
            Op::RemoveDir(path) => rustix::fs::rmdir(self.path(path))?,
            Op::Chmod(path, mode) => {
                rustix::fs::chmod(self.path(path), Mode::from_raw_mode(*mode))?;
            }
            Op::SetXattr(path, name, value) => {
                let value = value.as_bytes();
                rustix::fs::lsetxattr(self.path(path), *name, value, XattrFlags::empty())?;
            }
            Op::RemoveXattr(path, name) => rustix::fs::lremovexattr(self.path(path), *name)?,
            Op::Write(path, at, length, key) => {
                let file = open(&self.path(path), OFlags::WRONLY)?;
                return write_all(&file, *at, &contents(*key, *length));
            }
            Op::Append(path, length, key) => {
                let file = open(&self.path(path), OFlags::WRONLY | OFlags::APPEND)?;
                return write_all(&file, 0, &contents(*key, *length));
            }
            Op::Truncate(path, size) => {
                let file = open(&self.path(path), OFlags::WRONLY)?;
                rustix::fs::ftruncate(&file, *size)?;
            }
            Op::MakeRoom(path, room, at, length) => {
                let file = open(&self.path(path), OFlags::WRONLY)?;
                let mode = match room {
                    Room::Allocate => FallocateFlags::empty(),
                    Room::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                    Room::Zero => FallocateFlags::ZERO_RANGE,
                };
                rustix::fs::fallocate(&file, mode, *at, *length)?;
            }
            Op::Copy(from, from_at, to, to_at, length) => {
                let from = open(&self.path(from), OFlags::RDONLY)?;
                let to = open(&self.path(to), OFlags::WRONLY)?;
                return copy(&from, *from_at, &to, *to_at, *length);
            }
            Op::Open(slot, path) => {
                self.open[*slot] = None;
                self.open[*slot] = Some(open(&self.path(path), OFlags::RDWR)?);
            }
            Op::Close(slot) => {
                self.slot(*slot)?;
                self.open[*slot] = None;
            }
            Op::WriteOpen(slot, at, length, key) => {
                return write_all(self.slot(*slot)?, *at, &contents(*key, *length));
            }
            Op::TruncateOpen(slot, size) => rustix::fs::ftruncate(self.slot(*slot)?, *size)?,
            Op::SyncOpen(slot) => rustix::fs::fsync(self.slot(*slot)?)?,
            Op::ReadOpen(slot) => return read_all(self.slot(*slot)?),
            Op::StatOpen(slot) => return Ok(told_of(&rustix::fs::fstat(self.slot(*slot)?)?)),
            Op::Read(path) => return read_all(&open(&self.path(path), OFlags::RDONLY)?),
            Op::Stat(path) => return Ok(told_of(&rustix::fs::lstat(self.path(path))?)),
            Op::List(path) => return self.list(path),
            Op::ReadLink(path) => {
                let target = rustix::fs::readlink(self.path(path), Vec::new())?;
                return Ok(Answer::Text(target.into_string().expect("text")));
            }
            Op::GetXattr(path, name) => {
                let mut value = vec![0; 1000];
                let length = rustix::fs::lgetxattr(self.path(path), *name, &mut value)?;
                value.truncate(length);
                return Ok(Answer::Text(String::from_utf8(value).expect("text")));
            }
            Op::ListXattrs(path) => {
                let mut names = vec![0; 1000];
                let length = rustix::fs::llistxattr(self.path(path), &mut names)?;
                let names = std::str::from_utf8(&names[..length]).expect("text");
                let mut names: Vec<_> = names.split_terminator('\0').map(str::to_owned).collect();
                names.sort();
                return Ok(Answer::Attributes(names));
            }
        }
        Ok(Answer::Done)
    }

    fn list(&self, path: &[&str]) -> Told {
        let dir = open(&self.path(path), OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut names = std::collections::BTreeMap::new();
        for entry in rustix::fs::Dir::read_from(&dir)? {
            let entry = entry?;
            let name = entry.file_name().to_str().expect("text").to_owned();
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::RegularFile => Kind::File,
                FileType::Directory => Kind::Directory,
                FileType::Symlink => Kind::Symlink,
                other => panic!("{other:?} was made by nobody"),
            };
            let twice = names.insert(name, kind);
            assert_eq!(twice, None, "a name is listed twice");
        }
        Ok(Answer::Names(names))
    }
}

/// All of it: a call may copy less. Not within one file, which may grow meanwhile, and so what there is to be copied.
fn copy(from: &File, from_at: u64, to: &File, to_at: u64, length: usize) -> Told {
    if rustix::fs::fstat(from)?.st_ino == rustix::fs::fstat(to)?.st_ino {
        return Err(Errno::INVAL);
    }
    let (mut read, mut write) = (from_at, to_at);
    let mut left = length;
    while left > 0 {
        let copied =
            rustix::fs::copy_file_range(from, Some(&mut read), to, Some(&mut write), left)?;
        if copied == 0 {
            break;
        }
        left -= copied;
    }
    Ok(Answer::Count(length - left))
}
