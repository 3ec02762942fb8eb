//! Where the process of a mount tells what it does, for `levada top` and `levada status`.

use super::note;
use crate::control::{ControlReply, ControlRequest};
use crate::meters::{CacheMeters, MountMeters, OpMeters};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::Group;
use levada_desk as desk;
use levada_mount::meters::Meters;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// It is open as long as this lives.
pub(super) struct Desk {
    socket: PathBuf,
    group: Group,
}

impl Desk {
    /// Opens it at `socket`, the name of which is the number of this process.
    ///
    /// # Errors
    ///
    /// When the socket cannot be made.
    pub(super) fn open(socket: &Path, clerk: Clerk) -> io::Result<Self> {
        if let Some(dir) = socket.parent() {
            std::fs::create_dir_all(dir)?;
            clear(dir);
        }
        let group = Group::new();
        desk::open(socket, Rc::new(clerk), &group)?;
        Ok(Self { socket: socket.to_owned(), group })
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.group.kill();
        // What stays is cleared away by the next mount.
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Removes the sockets of processes that were killed, unless another mount does just now.
fn clear(dir: &Path) {
    for socket in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let pid = socket.file_name().to_str().and_then(|name| name.parse().ok());
        if pid.is_none_or(note::is_ended) {
            let _ = std::fs::remove_file(socket.path());
        }
    }
}

/// What is not counted by the session.
pub(super) struct Now {
    pub(super) cache: CacheMeters,
    /// See [`MountMeters::has_guest`].
    pub(super) has_guest: bool,
}

/// Who answers.
pub(super) struct Clerk {
    pub(super) meters: Rc<Meters>,
    pub(super) now: Box<dyn Fn() -> Now>,
    pub(super) dir: PathBuf,
}

impl Clerk {
    fn meters(&self) -> MountMeters {
        let meters = &self.meters;
        let kinds = meters.kinds();
        let Now { cache, has_guest } = (self.now)();
        MountMeters {
            dir: self.dir.display().to_string(),
            pid: std::process::id(),
            in_flight: meters.in_flight(),
            ops: kinds
                .iter()
                .map(|(op, meter)| OpMeters::of(&format!("{op:?}"), "", meter))
                .collect(),
            cache,
            has_guest,
        }
    }
}

impl desk::Clerk for Clerk {
    type Request = ControlRequest;
    type Reply = ControlReply;

    fn refuse(&self, why: String) -> ControlReply {
        ControlReply::Failed { why }
    }

    fn answer(&self, request: ControlRequest) -> LocalBoxFuture<'_, ControlReply> {
        Box::pin(async move {
            match request {
                ControlRequest::Meters => ControlReply::MountMeters(Box::new(self.meters())),
                _ => ControlReply::Failed {
                    why: "a mount tells its meters, and nothing else".into(),
                },
            }
        })
    }
}
