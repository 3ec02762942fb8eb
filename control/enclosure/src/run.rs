//! The process of an enclosure.

use crate::bay::Bay;
use crate::enclosure::{Enclosure, EnclosureStatus};
use crate::http;
use crate::place;
use crate::request::{Order, Reply};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::net::Listener;
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{Group, Reactor};
use levada_desk::Clerk;
use levada_device::{Device, DriveModel, FileDevice, FileDeviceError, Prepare, RamDevice};
use levada_export_nvmet::{
    Hosts, ListenError, NAMESPACES_MAX, NQN_PREFIX, Nqn, NqnError, Subsystem, serial_of,
};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// How long to poll for the next request before sleeping.
const SPIN: Duration = Duration::from_micros(100);

/// What its drives are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Media {
    /// Files of this directory, `bay1.img` and on; made with their full size where they are missing.
    Files(PathBuf),
    /// Memory: empty at every start.
    Ram,
}

/// An enclosure to be served.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Letters, digits, `-` and `_`: part of its subsystem's name.
    pub name: String,
    /// Where its target listens: a path each.
    pub paths: Vec<SocketAddr>,
    pub bays: u32,
    pub media: Media,
    /// Of each drive. Files that are there keep theirs.
    pub size_bytes: u64,
    /// How fast each drive is; as its media without one.
    pub model: Option<DriveModel>,
    /// Where its status is told over HTTP.
    pub status: Option<SocketAddr>,
}

/// Why an enclosure is not served.
#[derive(Debug, thiserror::Error)]
pub enum EnclosureError {
    #[error("an enclosure has 1 to {NAMESPACES_MAX} bays, and not {bays}")]
    Bays { bays: u32 },
    #[error("{name:?} is no name of an enclosure: letters, digits, `-` and `_`")]
    Name { name: String },
    #[error("an enclosure {name} is served already")]
    Served { name: String },
    #[error(transparent)]
    Nqn(#[from] NqnError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot tell the status at {address}")]
    Status { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Media(#[from] FileDeviceError),
    #[error("cannot {what}")]
    System { what: &'static str, source: std::io::Error },
}

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> EnclosureError {
    move |source| EnclosureError::System { what, source }
}

struct AtDesk(Rc<Enclosure>);

impl Clerk for AtDesk {
    type Request = Order;
    type Reply = Reply;

    fn answer(&self, order: Order) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            match self.0.carry_out(order).await {
                Ok(()) => Reply::Done(self.0.status()),
                Err(refusal) => Reply::Refused { why: refusal.to_string() },
            }
        })
    }

    fn refuse(&self, why: String) -> Reply {
        Reply::Refused { why }
    }
}

impl Plan {
    fn check(&self) -> Result<(), EnclosureError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if self.name.is_empty() || self.name.len() > 63 || !self.name.bytes().all(is_plain) {
            return Err(EnclosureError::Name { name: self.name.clone() });
        }
        match self.bays {
            1..=NAMESPACES_MAX => Ok(()),
            bays => Err(EnclosureError::Bays { bays }),
        }
    }

    async fn drives(&self) -> Result<Vec<Bay>, EnclosureError> {
        if let Media::Files(dir) = &self.media {
            std::fs::create_dir_all(dir).map_err(system("make the directory of the drives"))?;
        }
        let mut bays = Vec::new();
        for number in 1..=self.bays {
            let media: Rc<dyn Device> = match &self.media {
                Media::Ram => Rc::new(RamDevice::new(&format!("bay{number}"), self.size_bytes)),
                Media::Files(dir) => {
                    let path = dir.join(format!("bay{number}.img"));
                    Rc::new(match path.exists() {
                        true => FileDevice::open(&path)?,
                        false => {
                            FileDevice::create(&path, self.size_bytes, Prepare::Reserve).await?
                        }
                    })
                }
            };
            bays.push(Bay::new(&self.name, number, media, self.model.as_ref()));
        }
        Ok(bays)
    }
}

/// Serves an enclosure until told to stop. `ready` is called once hosts can connect.
///
/// # Errors
///
/// [`EnclosureError`].
pub fn serve(plan: &Plan, ready: impl FnOnce(&EnclosureStatus)) -> Result<(), EnclosureError> {
    plan.check()?;
    place::make_dir().map_err(system("make the directory of the socket"))?;
    let socket = place::socket_of(&plan.name);
    if UnixStream::connect(&socket).is_ok() {
        return Err(EnclosureError::Served { name: plan.name.clone() });
    }
    let reactor = Reactor::new().map_err(system("use io_uring"))?;
    reactor.set_spin(SPIN);
    reactor.block_on(async {
        let nqn = Nqn::new(format!("{NQN_PREFIX}:enclosure:{}", plan.name))?;
        let subsystem = Subsystem::new(nqn.clone(), serial_of(&nqn), Hosts::Any);
        let bays = plan.drives().await?;
        let enclosure = Enclosure::new(plan.name.clone(), subsystem, &plan.paths, bays)?;
        let (enclosure, group) = (Rc::new(enclosure), Group::new());
        if let Some(address) = plan.status {
            let failed = |source| EnclosureError::Status { address, source };
            let listener = Listener::bind(address).map_err(failed)?;
            http::serve(listener, Rc::clone(&enclosure), &group);
        }
        let signals = Signals::new().map_err(system("receive signals"))?;
        levada_desk::open(&socket, Rc::new(AtDesk(Rc::clone(&enclosure))), &group)
            .map_err(system("listen for orders"))?;
        ready(&enclosure.status());
        while let Signal::Hangup = signals.recv().await.map_err(system("receive signals"))? {}
        group.kill();
        let _ = std::fs::remove_file(&socket);
        enclosure.end().await;
        Ok(())
    })
}
