//! A file system of a few files in memory, in one directory, whose locks somebody else holds: what a guest is served in tests.

use super::Served;
use levada_base::Buf;
use levada_base::reactor::{self, Reactor, mailbox};
use levada_base::sync::oneshot;
use levada_export_vhost::{FileSystem, FsOptions, FsServer};
use levada_fuse::codec::{
    Attr, Entry, Errno, FileLock, Limits, OpenReply, Operation, Reply, Request, StatFs,
};
use levada_fuse::handler::{Handler, write_data};
use levada_fuse::session::Session;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

const FILE_BYTES_MAX: u64 = 8 << 20;
/// What ending a session takes.
const ENDING: Duration = Duration::from_millis(5);

/// What became of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    Begun,
    Ended,
}

/// The files, which outlive sessions.
#[derive(Default)]
struct Files {
    names: BTreeMap<Vec<u8>, u64>,
    data: BTreeMap<u64, Vec<u8>>,
}

pub struct Plain {
    files: Rc<RefCell<Files>>,
    said: mpsc::Sender<Said>,
}

pub struct Answering {
    files: Rc<RefCell<Files>>,
    waiting: RefCell<BTreeMap<u64, oneshot::Sender<()>>>,
}

impl FileSystem for Plain {
    type Handler = Answering;

    async fn begin(&self) -> Option<Rc<Session<Answering>>> {
        let _ = self.said.send(Said::Begun);
        let (files, waiting) = (Rc::clone(&self.files), RefCell::default());
        let handler = Answering { files, waiting };
        Some(Rc::new(Session::new(handler, Limits::default())))
    }

    async fn end(&self, session: Rc<Session<Answering>>) {
        assert!(session.handler().waiting.borrow().is_empty(), "somebody waits for a lock still");
        reactor::sleep(ENDING).await;
        let _ = self.said.send(Said::Ended);
    }
}

impl Answering {
    fn entry(&self, inode: u64) -> Entry {
        let files = self.files.borrow();
        let size_bytes = files.data.get(&inode).map_or(0, |data| data.len() as u64);
        let attr = Attr { inode, size_bytes, ..Attr::default() };
        Entry { inode, attr, ..Entry::default() }
    }

    fn answer(&self, request: &Request<'_>, message: &Buf) -> Result<Reply, Errno> {
        let inode = request.inode;
        let mut files = self.files.borrow_mut();
        match &request.operation {
            Operation::Lookup { name } => {
                let inode = *files.names.get(*name).ok_or(Errno::NOENT)?;
                drop(files);
                Ok(Reply::Entry(self.entry(inode)))
            }
            Operation::Create { name, .. } => {
                let inode = files.data.len() as u64 + 2;
                files.names.insert(name.to_vec(), inode);
                files.data.insert(inode, Vec::new());
                drop(files);
                let open = OpenReply { fh: inode, ..OpenReply::default() };
                Ok(Reply::Create { entry: self.entry(inode), open })
            }
            Operation::Write(args) => {
                let data = write_data(message, args);
                assert!(data.len() < 4096 || data.as_ptr().addr().is_multiple_of(4096));
                let end = args.offset.checked_add(data.len() as u64).ok_or(Errno::FBIG)?;
                if end > FILE_BYTES_MAX {
                    return Err(Errno::FBIG);
                }
                let file = files.data.get_mut(&inode).ok_or(Errno::STALE)?;
                file.resize(file.len().max(end as usize), 0);
                file[args.offset as usize..end as usize].copy_from_slice(&data);
                Ok(Reply::Written(data.len() as u32))
            }
            Operation::Read(args) => {
                let file = files.data.get(&inode).ok_or(Errno::STALE)?;
                let end = args.offset.saturating_add(args.size.into()).min(file.len() as u64);
                let data = file.get(args.offset as usize..end as usize).unwrap_or_default();
                // In two buffers, to have them gathered.
                let (head, tail) = data.split_at(data.len() / 3);
                Ok(Reply::Data([head, tail].into_iter().map(Buf::copy_of).collect()))
            }
            // More than was asked for, as no handler should answer.
            Operation::ReadLink => Ok(Reply::Bytes(vec![7; 100_000])),
            Operation::StatFs => Ok(Reply::StatFs(StatFs::default())),
            // Whose process asks, as it comes here.
            Operation::GetLk(args) => {
                let lock = FileLock { pid: request.caller.pid, ..args.lock };
                Ok(Reply::Lock(lock))
            }
            Operation::Forget { .. } | Operation::BatchForget(_) => Ok(Reply::Silent),
            Operation::Interrupt { unique } => {
                if let Some(waiting) = self.waiting.borrow_mut().remove(unique) {
                    waiting.send(());
                }
                Ok(Reply::Silent)
            }
            Operation::Release(_) | Operation::Destroy | Operation::Flush { .. } => Ok(Reply::Done),
            _ => Err(Errno::NOSYS),
        }
    }
}

impl Handler for Answering {
    async fn handle(&self, request: Request<'_>, message: &Buf) -> Reply {
        if let Operation::SetLkW(_) = request.operation {
            let (sender, interrupted) = oneshot::channel();
            let before = self.waiting.borrow_mut().insert(request.unique, sender);
            assert!(before.is_none(), "two requests have one number");
            let _ = interrupted.await;
            return Errno::INTR.into();
        }
        self.answer(&request, message).unwrap_or_else(Reply::from)
    }
}

/// A file system at a socket, and the same at its neighbour's, on a thread of its own.
pub struct ServedFs {
    pub served: Served,
    pub said: mpsc::Receiver<Said>,
}

impl ServedFs {
    pub fn begin() -> Self {
        let (said, hears) = mpsc::channel();
        let serve = |at: PathBuf, beside: PathBuf, ready: mpsc::Sender<mailbox::Sender<_>>| {
            Reactor::new().expect("an io_uring").block_on(async {
                let (tell, mut told) = mailbox::channel().expect("a mailbox");
                let files: Rc<RefCell<Files>> = Rc::default();
                let plain = |said| Rc::new(Plain { files: Rc::clone(&files), said });
                let options = FsOptions::new("files".parse().expect("a tag"));
                let listening = FsServer::listen(&at, plain(said), options.clone());
                let server = listening.await.expect("it listens");
                let aside = plain(mpsc::channel().0);
                let _neighbour =
                    FsServer::listen(&beside, aside, options).await.expect("it listens");
                ready.send(tell).expect("somebody waits");
                told.recv().await;
                server.end().await;
            });
        };
        Self { served: Served::begin_with(serve), said: hears }
    }

    /// What sessions have done since the last look.
    pub fn heard(&self) -> Vec<Said> {
        self.said.try_iter().collect()
    }

    /// Waits for the next thing that a session does.
    pub fn hear(&self) -> Said {
        self.said.recv_timeout(Duration::from_secs(20)).expect("it does something")
    }
}
