//! Mounts a toy, runs a test against it with a limit of time, and unmounts
//! whatever happens.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use levada_base::reactor::Reactor;
use levada_fuse::codec::Limits;
use levada_fuse::session::Session;
use levada_fuse::transport::dev_fuse::{Channel, FuseMount, MountOptions, Unmounted};
use levada_fuse::transport::{blocking, reactor};
use tempfile::TempDir;

use super::{Toy, ToyHandler};

/// No test needs a tenth of it.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Runs `work` on a thread of its own; `None` when it takes longer than
/// [`LIMIT`] (the thread is left behind).
pub fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, result) = mpsc::channel::<Result<T, Box<dyn Any + Send>>>();
    thread::spawn(move || done.send(catch_unwind(AssertUnwindSafe(work))));
    match result.recv_timeout(LIMIT).ok()? {
        Ok(value) => Some(value),
        Err(panic) => resume_unwind(panic),
    }
}

/// Cuts the mount off when a test ends without having unmounted it, so that
/// nothing hangs and nothing stays.
struct CutOff(PathBuf);

impl Drop for CutOff {
    fn drop(&mut self) {
        let path = std::ffi::CString::new(self.0.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: a NUL-terminated path. An error says that nothing is mounted.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_FORCE | libc::MNT_DETACH) };
    }
}

/// How requests are served.
#[derive(Clone, Copy, Debug)]
pub enum Transport {
    /// A thread that answers one at a time.
    Blocking,
    /// A thread with a reactor.
    Reactor,
}

impl Transport {
    fn serve(self, channel: Channel, session: Session<ToyHandler>) {
        match self {
            Transport::Blocking => blocking::serve(&channel, &session),
            Transport::Reactor => {
                let served = reactor::serve(channel, Rc::new(session));
                Reactor::new().unwrap().block_on(served)
            }
        }
        .unwrap();
    }
}

/// Serves `channel` by `cores` threads until the mount is gone.
pub fn serve(
    toy: &Arc<Mutex<Toy>>,
    channel: Channel,
    transport: Transport,
    cores: usize,
) -> Vec<JoinHandle<()>> {
    let (mounted, terms) = mpsc::channel();
    let further: Vec<_> = (1..cores).map(|_| channel.for_another_core().unwrap()).collect();
    let handler = ToyHandler { toy: toy.clone(), mounted: mounted.clone() };
    let first = thread::spawn(move || {
        transport.serve(channel, Session::new(handler, Limits::default()));
    });
    let terms = terms.recv_timeout(LIMIT).expect("INIT");
    let others = further.into_iter().map(|channel| {
        let handler = ToyHandler { toy: toy.clone(), mounted: mounted.clone() };
        thread::spawn(move || {
            transport.serve(channel, Session::resumed(handler, Limits::default(), terms));
        })
    });
    others.chain([first]).collect()
}

/// Mounts `toy` in a new directory, runs `test` there, unmounts.
pub fn with_mount(
    toy: &Arc<Mutex<Toy>>,
    transport: Transport,
    cores: usize,
    test: impl FnOnce(&Path) + Send + 'static,
) -> Unmounted {
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_owned();
    let _cut_off = CutOff(path.clone());
    let (mount, channel) = FuseMount::new(&path, &MountOptions::default()).unwrap();
    mount.set_read_ahead(4 << 20).unwrap();
    let servers = serve(toy, channel, transport, cores);
    in_time(move || test(&path)).expect("the test hangs");
    let unmounted = in_time(move || mount.unmount()).expect("unmounting hangs").unwrap();
    for server in servers {
        in_time(move || server.join()).expect("the server hangs").unwrap();
    }
    unmounted
}
