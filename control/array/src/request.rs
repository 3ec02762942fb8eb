//! What may be asked of the process that has an array open.

use crate::error::ArrayError;
use crate::status::{ScrubResult, Status};
use crate::store::url_of;
use levada_base::units::MIB;
use levada_export_nvmet::AnaState;
use levada_raid::Limits;
use levada_volume::VolumeOrder;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// How fast a scrub or a rebuild may go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pace {
    /// Beside other I/O at least, in bytes per second moved on all members; `None`: as the ceiling.
    pub floor_bytes_per_s: Option<u64>,
    /// At most, and without other I/O.
    pub ceiling_bytes_per_s: Option<u64>,
}

impl Pace {
    /// From MB per second (10^6 bytes), as on the command line.
    #[must_use]
    pub fn of_mb_per_s(floor: Option<u64>, ceiling: Option<u64>) -> Self {
        let bytes = |mb: u64| mb.saturating_mul(1_000_000);
        Self { floor_bytes_per_s: floor.map(bytes), ceiling_bytes_per_s: ceiling.map(bytes) }
    }

    pub(crate) fn limits(self) -> Limits {
        // A ceiling alone holds beside other I/O, too.
        let ceiling = self.ceiling_bytes_per_s.unwrap_or(u64::MAX);
        let floor = self.floor_bytes_per_s.unwrap_or(ceiling);
        Limits { floor_bytes_per_second: floor.min(ceiling), ceiling_bytes_per_second: ceiling }
    }
}

/// A question or an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Request {
    Show,
    /// Answered at its end by [`Reply::Scrubbed`]. One that runs goes on at this pace, one that was interrupted where it
    /// was, both unless `restart` begins anew.
    Scrub {
        pace: Pace,
        #[serde(default)]
        restart: bool,
    },
    /// Answered when no member waits for a rebuild any more; one that runs goes on at this pace.
    Rebuild {
        pace: Pace,
    },
    Fail {
        member: String,
    },
    Replace {
        member: String,
        new: PathBuf,
        force: bool,
    },
    AddSpare {
        new: PathBuf,
        force: bool,
    },
    /// How good a path is over which hosts reach it by NVMe/TCP; from 1 on, as they are listed.
    Path {
        path: usize,
        state: AnaState,
    },
    /// Makes the array a pool of volumes; with `force` also if it holds something, which is lost.
    MakePool {
        force: bool,
    },
    /// Of an array that is a pool.
    Volume {
        order: VolumeOrder,
    },
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum Reply {
    /// The array, after what was asked.
    Status(Box<Status>),
    Scrubbed(ScrubResult),
    Failed {
        why: String,
    },
}

/// Most bytes of a request, so that it fits a line at the desk.
const PATH_BYTES_MAX: usize = MIB as usize / 64;

/// Asks the process that listens at `socket`. Blocks. `None`: nobody is there.
///
/// # Errors
///
/// What that process answers; [`ArrayError::Gone`] when it ended meanwhile.
pub fn ask(socket: &Path, request: &Request) -> Result<Option<Reply>, ArrayError> {
    match levada_desk::ask(socket, request, None) {
        Ok(Reply::Failed { why }) => Err(ArrayError::Refused { why }),
        Ok(reply) => Ok(Some(reply)),
        Err(error) => match ArrayError::of_desk(error) {
            Some(error) => Err(error),
            None => Ok(None),
        },
    }
}

/// A drive as another process finds it: a path from the root on, or a URL as it is.
///
/// # Errors
///
/// A path that cannot be made one from the root on, or that is longer than the kernel takes.
pub fn absolute(path: &Path) -> Result<PathBuf, ArrayError> {
    let failed = |source| ArrayError::Read { path: path.into(), source };
    if url_of(path).is_some() {
        return Ok(path.into());
    }
    let path = std::path::absolute(path).map_err(failed)?;
    match path.as_os_str().len() <= PATH_BYTES_MAX {
        true => Ok(path),
        false => Err(failed(std::io::ErrorKind::InvalidFilename.into())),
    }
}
