//! A file system in memory, small enough to be obviously right, to prove codec
//! and transport on a real mount. It outlives a mount, so handles do too.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use levada_base::Buf;
use levada_fuse::codec::{
    Attr, Caller, DirBuilder, Entry, Errno, Negotiated, OpenReply, OpenReplyFlags, Operation,
    ROOT_INODE, Reply, Request, SetAttr, SetTime, StatFs, Time,
};
use levada_fuse::handler::{Handler, write_data};

pub mod harness;

const FOREVER: Duration = Duration::from_secs(3600);

enum Content {
    File(Vec<u8>),
    /// Name -> (inode, cookie); cookies are dealt once and never again.
    Dir {
        names: BTreeMap<Vec<u8>, (u64, u64)>,
        next_cookie: u64,
        parent: u64,
    },
    Link(Vec<u8>),
}

struct Inode {
    attr: Attr,
    content: Content,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// The files, and what was seen of the kernel's behaviour.
pub struct Toy {
    inodes: BTreeMap<u64, Inode>,
    next_inode: u64,
    pub largest_read: usize,
    pub largest_write: usize,
    pub unaligned_writes: usize,
    pub xattr_reads: usize,
    pub requests: usize,
}

impl Toy {
    pub fn new() -> Arc<Mutex<Toy>> {
        let mut toy = Toy {
            inodes: BTreeMap::new(),
            next_inode: ROOT_INODE,
            largest_read: 0,
            largest_write: 0,
            unaligned_writes: 0,
            xattr_reads: 0,
            requests: 0,
        };
        let root = Content::Dir { names: BTreeMap::new(), next_cookie: 1, parent: ROOT_INODE };
        toy.add(libc::S_IFDIR | 0o755, Caller::default(), root);
        Arc::new(Mutex::new(toy))
    }

    fn add(&mut self, mode: u32, caller: Caller, content: Content) -> u64 {
        let inode = self.next_inode;
        self.next_inode += 1;
        let time = now();
        let attr = Attr {
            inode,
            mode,
            links: if matches!(content, Content::Dir { .. }) { 2 } else { 1 },
            uid: caller.uid,
            gid: caller.gid,
            atime: time,
            mtime: time,
            ctime: time,
            io_bytes: 1 << 20,
            ..Attr::default()
        };
        self.inodes.insert(inode, Inode { attr, content, xattrs: BTreeMap::new() });
        inode
    }

    fn inode(&mut self, inode: u64) -> Result<&mut Inode, Errno> {
        self.inodes.get_mut(&inode).ok_or(Errno::STALE)
    }

    fn attr(&mut self, inode: u64) -> Result<Attr, Errno> {
        let inode = self.inode(inode)?;
        let size_bytes = match &inode.content {
            Content::File(bytes) | Content::Link(bytes) => bytes.len() as u64,
            Content::Dir { names, .. } => names.len() as u64,
        };
        Ok(Attr { size_bytes, blocks_512: size_bytes.div_ceil(512), ..inode.attr })
    }

    fn entry(&mut self, inode: u64) -> Result<Entry, Errno> {
        let attr = self.attr(inode)?;
        Ok(Entry { inode, generation: 1, entry_valid: FOREVER, attr_valid: FOREVER, attr })
    }

    fn names(&mut self, dir: u64) -> Result<&mut BTreeMap<Vec<u8>, (u64, u64)>, Errno> {
        match &mut self.inode(dir)?.content {
            Content::Dir { names, .. } => Ok(names),
            Content::File(_) | Content::Link(_) => Err(Errno::NOTDIR),
        }
    }

    fn lookup(&mut self, dir: u64, name: &[u8]) -> Result<u64, Errno> {
        match (name, &self.inode(dir)?.content) {
            (b".", _) => Ok(dir),
            (b"..", Content::Dir { parent, .. }) => Ok(*parent),
            _ => Ok(self.names(dir)?.get(name).ok_or(Errno::NOENT)?.0),
        }
    }

    fn put_name(&mut self, dir: u64, name: &[u8], inode: u64) -> Result<(), Errno> {
        match &mut self.inode(dir)?.content {
            Content::Dir { names, next_cookie, .. } => {
                names.insert(name.into(), (inode, *next_cookie));
                *next_cookie += 1;
            }
            Content::File(_) | Content::Link(_) => return Err(Errno::NOTDIR),
        }
        if let Content::Dir { parent, .. } = &mut self.inode(inode)?.content {
            *parent = dir;
        }
        Ok(())
    }

    fn make(
        &mut self,
        dir: u64,
        name: &[u8],
        mode: u32,
        caller: Caller,
        content: Content,
    ) -> Result<Entry, Errno> {
        if self.names(dir)?.contains_key(name) {
            return Err(Errno::EXIST);
        }
        if name.len() > 255 {
            return Err(Errno::NAMETOOLONG);
        }
        let inode = self.add(mode, caller, content);
        self.put_name(dir, name, inode)?;
        self.entry(inode)
    }

    fn remove(&mut self, dir: u64, name: &[u8], is_dir: bool) -> Result<(), Errno> {
        let inode = self.lookup(dir, name)?;
        match (&self.inode(inode)?.content, is_dir) {
            (Content::Dir { names, .. }, true) if !names.is_empty() => return Err(Errno::NOTEMPTY),
            (Content::Dir { .. }, false) => return Err(Errno::ISDIR),
            (Content::File(_) | Content::Link(_), true) => return Err(Errno::NOTDIR),
            (_, _) => {}
        }
        self.names(dir)?.remove(name);
        // The inode stays for those who have it open; a toy frees nothing.
        self.inode(inode)?.attr.links -= 1;
        Ok(())
    }

    fn file(&mut self, inode: u64) -> Result<&mut Vec<u8>, Errno> {
        match &mut self.inode(inode)?.content {
            Content::File(bytes) => Ok(bytes),
            Content::Dir { .. } => Err(Errno::ISDIR),
            Content::Link(_) => Err(Errno::INVAL),
        }
    }

    fn set_attr(&mut self, inode: u64, set: &SetAttr) -> Result<Attr, Errno> {
        if let Some(size) = set.size {
            self.file(inode)?.resize(size as usize, 0);
        }
        let attr = &mut self.inode(inode)?.attr;
        let at = |time| match time {
            SetTime::Now => now(),
            SetTime::At(time) => time,
        };
        attr.mode = set.mode.map_or(attr.mode, |mode| attr.mode & libc::S_IFMT | mode & 0o7777);
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime = set.atime.map_or(attr.atime, at);
        attr.mtime = set.mtime.map_or(attr.mtime, at);
        self.attr(inode)
    }

    fn read_dir(&mut self, dir: u64, after: u64, size: u32, plus: bool) -> Result<Reply, Errno> {
        let mut entries: Vec<_> = self
            .names(dir)?
            .iter()
            .filter(|(_, (_, cookie))| *cookie > after)
            .map(|(name, (inode, cookie))| (*cookie, *inode, name.clone()))
            .collect();
        entries.sort();
        let mut builder = DirBuilder::new(size);
        for (cookie, inode, name) in entries {
            let entry = self.entry(inode)?;
            let mode = entry.attr.mode;
            let fits = if plus {
                builder.entry_plus(inode, &entry, cookie, mode, &name)
            } else {
                builder.entry(inode, cookie, mode, &name)
            };
            if !fits {
                break;
            }
        }
        Ok(Reply::Bytes(builder.finish()))
    }

    fn answer(&mut self, request: &Request<'_>, message: &Buf) -> Result<Reply, Errno> {
        let (inode, caller) = (request.inode, request.caller);
        self.requests += 1;
        Ok(match &request.operation {
            Operation::Lookup { name } => {
                let found = self.lookup(inode, name)?;
                Reply::Entry(self.entry(found)?)
            }
            Operation::Forget { .. } | Operation::BatchForget(_) | Operation::Interrupt { .. } => {
                Reply::Silent
            }
            Operation::GetAttr { .. } => Reply::Attr { attr: self.attr(inode)?, valid: FOREVER },
            Operation::SetAttr(set) => {
                Reply::Attr { attr: self.set_attr(inode, set)?, valid: FOREVER }
            }
            Operation::ReadLink => match &self.inode(inode)?.content {
                Content::Link(target) => Reply::Bytes(target.clone()),
                Content::File(_) | Content::Dir { .. } => Reply::Error(Errno::INVAL),
            },
            Operation::Symlink { name, target } => {
                let content = Content::Link(target.to_vec());
                Reply::Entry(self.make(inode, name, libc::S_IFLNK | 0o777, caller, content)?)
            }
            Operation::MkNod { name, mode, .. } => {
                Reply::Entry(self.make(inode, name, *mode, caller, Content::File(vec![]))?)
            }
            Operation::MkDir { name, mode, .. } => {
                let content =
                    Content::Dir { names: BTreeMap::new(), next_cookie: 1, parent: inode };
                Reply::Entry(self.make(inode, name, libc::S_IFDIR | mode, caller, content)?)
            }
            Operation::Unlink { name } => {
                self.remove(inode, name, false)?;
                Reply::Done
            }
            Operation::RmDir { name } => {
                self.remove(inode, name, true)?;
                Reply::Done
            }
            Operation::Rename { name, new_parent, new_name, flags: 0 } => {
                let moved = self.lookup(inode, name)?;
                self.names(inode)?.remove(*name);
                self.put_name(*new_parent, new_name, moved)?;
                Reply::Done
            }
            Operation::Link { inode: target, new_name } => {
                self.put_name(inode, new_name, *target)?;
                self.inode(*target)?.attr.links += 1;
                Reply::Entry(self.entry(*target)?)
            }
            Operation::Open(args) => {
                if args.flags & libc::O_TRUNC.cast_unsigned() != 0 {
                    self.file(inode)?.clear();
                }
                Reply::Open(opened(inode))
            }
            Operation::Create { name, mode, .. } => {
                let entry = self.make(inode, name, *mode, caller, Content::File(vec![]))?;
                Reply::Create { entry, open: opened(entry.inode) }
            }
            Operation::Read(args) => {
                let file = self.file(inode)?;
                let start = (args.offset as usize).min(file.len());
                let end = (start + args.size as usize).min(file.len());
                // In two buffers, to have them gathered.
                let middle = start + (end - start) / 3;
                let parts = [&file[start..middle], &file[middle..end]];
                let reply = Reply::Data(parts.into_iter().map(Buf::copy_of).collect());
                self.largest_read = self.largest_read.max(args.size as usize);
                reply
            }
            Operation::Write(args) => {
                let data = write_data(message, args);
                let end = args.offset as usize + data.len();
                let file = self.file(inode)?;
                file.resize(file.len().max(end), 0);
                file[args.offset as usize..end].copy_from_slice(&data);
                self.largest_write = self.largest_write.max(data.len());
                self.unaligned_writes +=
                    usize::from(!(data.as_ptr() as usize).is_multiple_of(4096));
                self.inode(inode)?.attr.mtime = now();
                Reply::Written(data.len() as u32)
            }
            Operation::StatFs => Reply::StatFs(StatFs {
                blocks: 1 << 30,
                blocks_free: 1 << 29,
                blocks_available: 1 << 28,
                files: 1000,
                files_free: 900,
                io_bytes: 1 << 20,
                name_bytes_max: 255,
                fragment_bytes: 4096,
            }),
            Operation::OpenDir(_) => Reply::Error(Errno::NOSYS),
            Operation::ReadDir(args) => self.read_dir(inode, args.offset, args.size, false)?,
            Operation::ReadDirPlus(args) => self.read_dir(inode, args.offset, args.size, true)?,
            Operation::Release(_)
            | Operation::ReleaseDir(_)
            | Operation::Flush { .. }
            | Operation::Fsync { .. }
            | Operation::FsyncDir { .. }
            | Operation::Destroy => Reply::Done,
            Operation::SetXattr { name, value, .. } => {
                self.inode(inode)?.xattrs.insert(name.to_vec(), value.to_vec());
                Reply::Done
            }
            Operation::GetXattr { name, size } => {
                self.xattr_reads += 1;
                let value = self.inode(inode)?.xattrs.get(*name).ok_or(Errno::NODATA)?;
                sized(value, *size)
            }
            Operation::ListXattr { size } => {
                let xattrs = &self.inode(inode)?.xattrs;
                let names = xattrs.keys().flat_map(|name| name.iter().copied().chain([0]));
                sized(&names.collect::<Vec<_>>(), *size)
            }
            Operation::RemoveXattr { name } => {
                self.inode(inode)?.xattrs.remove(*name).ok_or(Errno::NODATA)?;
                Reply::Done
            }
            _ => Reply::Error(Errno::NOSYS),
        })
    }
}

fn opened(fh: u64) -> OpenReply {
    OpenReply { fh, flags: OpenReplyFlags::KEEP_CACHE }
}

fn sized(value: &[u8], size: u32) -> Reply {
    match size as usize {
        0 => Reply::XattrSize(value.len() as u32),
        room if room < value.len() => Reply::Error(Errno::RANGE),
        _ => Reply::Bytes(value.into()),
    }
}

fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Time { secs: since.as_secs() as i64, nanos: since.subsec_nanos() }
}

/// One core's handler over the shared toy.
pub struct ToyHandler {
    pub toy: Arc<Mutex<Toy>>,
    /// Told when INIT is done.
    pub mounted: Sender<Negotiated>,
}

impl Handler for ToyHandler {
    fn handle(
        &self,
        request: Request<'_>,
        message: &Buf,
    ) -> impl std::future::Future<Output = Reply> {
        let answer = self.toy.lock().unwrap().answer(&request, message);
        ready(answer.unwrap_or_else(Reply::Error))
    }

    fn mounted(&self, terms: &Negotiated) {
        let _ = self.mounted.send(*terms);
    }
}
