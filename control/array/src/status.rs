//! What an array tells: the JSON of docs/array.md.

use crate::level;
use levada_base::ids::Uuid;
use levada_base::meter::Latency;
use levada_export_nvmet::AnaState;
use levada_health::{DriveHealth, PathStatus};
use levada_raid::{self as raid, MemberState, Recorded};
use levada_volume::VolumeStatus;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// An array as it is now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub name: String,
    pub uuid: Uuid,
    /// As on the command line: `6`, `10`, `8+3`.
    pub level: String,
    pub description: String,
    /// `healthy`, `degraded`, `rebuilding`, `stopped`, `incomplete`.
    pub state: String,
    pub open_by: Option<OpenBy>,
    /// Why it has stopped, or cannot be opened.
    pub problem: Option<String>,
    /// Places for members; spares have none.
    pub width: usize,
    /// Places that may be without good data, wherever they are.
    pub tolerates: usize,
    /// Places that are without good data everywhere.
    pub lost: usize,
    pub chunk_bytes: u64,
    /// 512 or 4096.
    pub block_bytes: u64,
    pub capacity_bytes: u64,
    pub stripe_bytes: u64,
    pub stripes: u64,
    pub stripes_written: Option<u64>,
    /// Blocks that cannot be read until they are written: a power cut met whole stripes on their way, and a member was absent
    /// afterwards.
    pub lost_blocks: Option<u64>,
    pub generation: u64,
    pub members: Vec<MemberStatus>,
    pub rebuild: Option<Progress>,
    /// The stripe at which it cannot go on: more is beyond repair than the array can list.
    #[serde(default)]
    pub rebuild_blocked: Option<u64>,
    pub scrub: Option<Progress>,
    /// Stripes below this were checked by a scrub that is under way, or was interrupted; 0: none.
    #[serde(default)]
    pub scrubbed_below: u64,
    pub last_scrub: Option<ScrubResult>,
    /// Its volumes, where it is a pool of them; known only while open.
    #[serde(default)]
    pub pool: Option<PoolStatus>,
}

/// A pool of volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Why its volumes are out of reach.
    pub problem: Option<String>,
    /// For new volumes, together.
    pub free_bytes: u64,
    pub volumes: Vec<VolumeStatus>,
}

/// The process that has an array open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenBy {
    pub pid: u32,
    /// The file that shows it.
    pub at: Option<PathBuf>,
    /// Where NBD clients find it, as URIs.
    #[serde(default)]
    pub nbd: Vec<String>,
    /// Where NVMe hosts find it, as URLs.
    #[serde(default)]
    pub nvme: Vec<String>,
    /// How good each of those says it is.
    #[serde(default)]
    pub nvme_states: Vec<AnaState>,
    /// Sockets at which virtual machines find it.
    #[serde(default)]
    pub vhost: Vec<PathBuf>,
    /// Why a volume of a pool has no socket there.
    #[serde(default)]
    pub vhost_problem: Option<String>,
}

impl OpenBy {
    /// True when the array is shown to somebody, and not open for an order alone.
    #[must_use]
    pub fn serves(&self) -> bool {
        let is_local = self.at.is_some() || !self.vhost.is_empty();
        is_local || !self.nbd.is_empty() || !self.nvme.is_empty()
    }
}

/// A member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    pub index: usize,
    pub name: String,
    pub uuid: Uuid,
    pub path: Option<PathBuf>,
    pub role: Option<usize>,
    /// `in-sync`, `rebuilding`, `spare`, `faulty`, `missing`.
    pub state: String,
    /// Faulty or rebuilding: it was away, and what it holds is good but for what changed meanwhile.
    #[serde(default)]
    pub catches_up: bool,
    /// Of one that is being rebuilt.
    pub rebuilt_percent: Option<f64>,
    /// Much slower than the others; known only while open.
    #[serde(default)]
    pub slow: bool,
    pub io: Option<Io>,
    /// Those to a drive on the network; known only while open.
    #[serde(default)]
    pub paths: Vec<PathStatus>,
    /// As its drive says itself; `None` where it does not, or the array is not open.
    #[serde(default)]
    pub health: Option<DriveHealth>,
    /// What is the matter with it by that, and what helps.
    #[serde(default)]
    pub problem: Option<String>,
}

/// What a member has done since the array was opened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Io {
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub medium_errors: u64,
    pub io_errors: u64,
    /// Chunks in which something could not be read, and at how many it is taken out.
    #[serde(default)]
    pub unreadable_chunks: u64,
    #[serde(default)]
    pub unreadable_chunks_max: u64,
    /// Chunks rewritten from redundancy.
    pub repairs: u64,
    /// Blocks that a rebuild could not make.
    pub lacks_blocks: u64,
    pub latency_us: LatencyUs,
}

/// Of reads and writes together, in microseconds; each the upper end of a bucket that is 19 % wide.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyUs {
    pub count: u64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl LatencyUs {
    fn of(latency: &Latency) -> Self {
        let at = |fraction| latency.quantile(fraction).as_nanos() as f64 / 1000.0;
        Self { count: latency.count(), p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }
}

/// Work under way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    pub stripes_done: u64,
    pub stripes_total: u64,
    /// Moved on all members together.
    pub bytes_per_s: u64,
    /// `None`: not known yet.
    pub seconds_left: Option<f64>,
}

impl Progress {
    /// Of work that began `since` ago.
    pub(crate) fn of(progress: &raid::Progress, since: Duration) -> Self {
        let left = progress.stripes_total.saturating_sub(progress.stripes_done) as f64;
        let done = progress.stripes_done.saturating_sub(progress.stripes_before);
        let rate = done as f64 / since.as_secs_f64();
        Self {
            stripes_done: progress.stripes_done,
            stripes_total: progress.stripes_total,
            bytes_per_s: progress.bytes_per_second as u64,
            seconds_left: (rate.is_finite() && rate > 0.0).then(|| left / rate),
        }
    }
}

/// What a scrub found, in stripes but for chunks that were repaired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubResult {
    pub name: String,
    pub uuid: Uuid,
    pub stripes: u64,
    /// Being written, or with too few members to tell.
    pub skipped: u64,
    pub unreadable_repaired: u64,
    pub wrong_repaired: u64,
    pub mismatched: u64,
    pub lost: u64,
}

/// The word for a member's standing.
pub(crate) fn word_of(state: MemberState) -> &'static str {
    match state {
        MemberState::InSync => "in-sync",
        MemberState::Rebuilding { .. } => "rebuilding",
        MemberState::Spare => "spare",
        MemberState::Faulty => "faulty",
    }
}

/// How much of a member is rebuilt, of one that is.
pub(crate) fn percent_of(state: MemberState, slots: u64) -> Option<f64> {
    match state {
        MemberState::Rebuilding { next_slot } => {
            Some((1000.0 * next_slot as f64 / slots.max(1) as f64).round() / 10.0)
        }
        MemberState::InSync | MemberState::Spare | MemberState::Faulty => None,
    }
}

impl From<&raid::MemberStatus> for Io {
    fn from(member: &raid::MemberStatus) -> Self {
        Self {
            bytes_read: member.bytes_read,
            bytes_written: member.bytes_written,
            medium_errors: member.medium_errors,
            io_errors: member.io_errors,
            unreadable_chunks: member.unreadable_chunks,
            unreadable_chunks_max: raid::UNREADABLE_CHUNKS_MAX as u64,
            repairs: member.repairs,
            lacks_blocks: member.lacks_blocks,
            latency_us: LatencyUs::of(&member.latency),
        }
    }
}

impl Status {
    /// What a superblock alone tells: an array that nobody has open, whose drives nobody has looked for.
    pub(crate) fn recorded(array: &Recorded) -> Self {
        let slots = array.data_bytes / array.chunk_bytes;
        let members: Vec<MemberStatus> = array
            .members
            .iter()
            .enumerate()
            .map(|(index, member)| MemberStatus {
                index,
                name: member.name.clone(),
                uuid: member.uuid,
                path: None,
                role: member.role,
                state: word_of(member.state).into(),
                catches_up: member.catches_up,
                rebuilt_percent: percent_of(member.state, slots),
                slow: false,
                io: None,
                paths: Vec::new(),
                health: None,
                problem: None,
            })
            .collect();
        let whole = members.iter().filter(|m| m.role.is_some() && m.state == "in-sync").count();
        let mut status = Self {
            name: array.name.clone(),
            uuid: array.uuid,
            level: level::word_of(array.level, array.width),
            description: level::describe(array.level, array.width, array.chunk_bytes),
            state: String::new(),
            open_by: None,
            problem: None,
            width: array.width,
            tolerates: array.level.tolerates(),
            lost: array.width - whole.min(array.width),
            chunk_bytes: array.chunk_bytes,
            block_bytes: array.block_bytes,
            capacity_bytes: array.capacity_bytes,
            stripe_bytes: array.capacity_bytes / array.stripes.max(1),
            stripes: array.stripes,
            stripes_written: None,
            lost_blocks: None,
            generation: array.order.1,
            members,
            rebuild: None,
            rebuild_blocked: None,
            scrub: None,
            scrubbed_below: array.scrubbed_below,
            last_scrub: None,
            pool: None,
        };
        status.judge();
        status
    }

    /// Says in a word how it stands, by its members and its problem.
    pub(crate) fn judge(&mut self) {
        let rebuilding = self.members.iter().any(|member| member.state == "rebuilding");
        self.state = match (&self.problem, &self.open_by) {
            (Some(_), Some(_)) => "stopped",
            (Some(_), None) => "incomplete",
            (None, _) if rebuilding => "rebuilding",
            (None, _) if self.lost > 0 => "degraded",
            (None, _) => "healthy",
        }
        .into();
    }
}
