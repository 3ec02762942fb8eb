//! The least that names and small files cost on any file system behind `/dev/fuse`: a mount that keeps nothing but a table of names
//! in its own process, on the transport of `levada mount`. What its programs are slower than those on ext4 is the price of the way
//! through the kernel and back, on this machine.

use crate::mount::serve_until_stopped;
use crate::running_box::place;
use anyhow::{Context, Result};
use levada_base::Buf;
use levada_base::reactor::{Reactor, mailbox};
use levada_mount::codec::{
    Attr, DirBuilder, Entry, Errno, OpenReply, Operation, ROOT_INODE, Reply, Request, StatFs,
};
use levada_mount::handler::Handler;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;

/// As long as `levada mount` lets the kernel trust names and attributes.
const VALID: Duration = Duration::from_secs(1);
/// As long as `levada mount` polls before it sleeps.
const SPIN: Duration = levada_node::mounting::SPIN;

/// Names, kinds and sizes; no contents.
struct Null(RefCell<Table>);

struct Table {
    /// Directory and name -> inode.
    names: HashMap<(u64, Vec<u8>), u64>,
    /// What they mean.
    inodes: HashMap<u64, Attr>,
    next: u64,
}

impl Table {
    fn entry(&self, inode: u64) -> Entry {
        let attr = self.attr(inode);
        Entry { inode, generation: 1, entry_valid: VALID, attr_valid: VALID, attr }
    }

    /// That of a file that has no name any more is made up.
    fn attr(&self, inode: u64) -> Attr {
        self.inodes.get(&inode).copied().unwrap_or(Self::new_attr(inode, libc::S_IFREG))
    }

    fn new_attr(inode: u64, mode: u32) -> Attr {
        Attr { inode, mode, links: 1, io_bytes: 4096, ..Attr::default() }
    }

    fn make(&mut self, dir: u64, name: &[u8], mode: u32) -> Entry {
        let inode = self.next;
        self.next += 1;
        self.names.insert((dir, name.to_vec()), inode);
        self.inodes.insert(inode, Self::new_attr(inode, mode));
        self.entry(inode)
    }

    fn answer(&mut self, request: &Request<'_>) -> Reply {
        let dir = request.inode;
        match &request.operation {
            Operation::Forget { .. } | Operation::BatchForget(_) | Operation::Interrupt { .. } => {
                Reply::Silent
            }
            Operation::Lookup { name } => match self.names.get(&(dir, name.to_vec())) {
                Some(inode) => Reply::Entry(self.entry(*inode)),
                None => Errno::NOENT.into(),
            },
            Operation::GetAttr { .. } => Reply::Attr { attr: self.attr(dir), valid: VALID },
            Operation::MkDir { name, mode, .. } => {
                Reply::Entry(self.make(dir, name, libc::S_IFDIR | mode))
            }
            Operation::Create { name, mode, .. } => {
                let entry = self.make(dir, name, libc::S_IFREG | mode);
                Reply::Create { entry, open: OpenReply::default() }
            }
            Operation::Unlink { name } | Operation::RmDir { name } => {
                match self.names.remove(&(dir, name.to_vec())) {
                    Some(inode) => {
                        self.inodes.remove(&inode);
                        Reply::Done
                    }
                    None => Errno::NOENT.into(),
                }
            }
            Operation::OpenDir(_) => Reply::Open(OpenReply::default()),
            // Sorted anew each time: directories are not listed while anything is measured.
            Operation::ReadDir(args) | Operation::ReadDirPlus(args) => {
                let mut list = DirBuilder::new(args.size);
                let mut below: Vec<_> =
                    self.names.iter().filter(|((parent, _), _)| *parent == dir).collect();
                below.sort_by_key(|(_, inode)| **inode);
                let plus = matches!(request.operation, Operation::ReadDirPlus(_));
                for ((_, name), inode) in below.into_iter().filter(|(_, i)| **i > args.offset) {
                    let entry = self.entry(*inode);
                    let fits = match plus {
                        true => list.entry_plus(*inode, &entry, *inode, entry.attr.mode, name),
                        false => list.entry(*inode, *inode, entry.attr.mode, name),
                    };
                    if !fits {
                        break;
                    }
                }
                Reply::Bytes(list.finish())
            }
            // Owners and times are taken for set: nobody looks.
            Operation::SetAttr(args) => {
                if let Some(attr) = self.inodes.get_mut(&dir) {
                    attr.mode = args.mode.map_or(attr.mode, |mode| attr.mode & libc::S_IFMT | mode);
                    attr.size_bytes = args.size.unwrap_or(attr.size_bytes);
                }
                Reply::Attr { attr: self.attr(dir), valid: VALID }
            }
            Operation::Write(args) => {
                let end = args.offset + args.data.len() as u64;
                if let Some(attr) = self.inodes.get_mut(&dir) {
                    attr.size_bytes = attr.size_bytes.max(end);
                }
                Reply::Written(args.data.len() as u32)
            }
            Operation::Flush { .. } | Operation::Release(_) | Operation::ReleaseDir(_) => {
                Reply::Done
            }
            Operation::StatFs => Reply::StatFs(StatFs::default()),
            _ => Errno::NOSYS.into(),
        }
    }
}

impl Handler for Null {
    async fn handle(&self, request: Request<'_>, _message: &Buf) -> Reply {
        self.0.borrow_mut().answer(&request)
    }
}

/// A mount of it, served by a thread; dropping it unmounts.
pub(crate) struct NullMount {
    dir: TempDir,
    stop: Option<mailbox::Sender<()>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl NullMount {
    pub(crate) fn new() -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("bench-null-").tempdir_in(place()?)?;
        let target = dir.path().to_owned();
        let (started, starting) = mpsc::channel();
        let thread = std::thread::Builder::new().name("null-mount".into()).spawn(move || {
            let reactor = Reactor::new()?;
            reactor.set_spin(SPIN);
            let root = Table::new_attr(ROOT_INODE, libc::S_IFDIR | 0o755);
            let inodes = HashMap::from([(ROOT_INODE, root)]);
            let table = Table { names: HashMap::new(), inodes, next: ROOT_INODE + 1 };
            reactor.block_on(serve_until_stopped(&target, Null(RefCell::new(table)), started))
        })?;
        let stop = starting.recv().context("the mount of nothing ended")?;
        Ok(Self { dir, stop: Some(stop), thread: Some(thread) })
    }

    pub(crate) fn mount_point(&self) -> PathBuf {
        self.dir.path().to_owned()
    }
}

impl Drop for NullMount {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("the mount of nothing ended badly: {error:#}");
        }
    }
}
