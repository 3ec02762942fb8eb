//! What an array tells people about itself.

use crate::layout::Level;
use crate::member::MemberState;
use levada_base::ids::Uuid;
use levada_base::meter::Latency;
use levada_device::BlockError;
use std::time::Duration;

/// Something that an operator or the node should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArrayEvent {
    /// A member is out. `error` is `None` when an operator said so.
    MemberOut { member: usize, name: String, error: Option<BlockError> },
    /// A member that vanished has not come back in time: a spare may have its role.
    MemberGivenUp { member: usize, name: String },
    /// A member has begun to play a role and waits for [`crate::RaidArray::rebuild`].
    RebuildNeeded { member: usize, name: String },
    /// A member is in sync again.
    RebuildDone { member: usize, name: String },
    /// A chunk could not be read and was rewritten from the others.
    Repaired { member: usize, name: String, stripe: u64 },
    /// A member is much slower than the others: its reads took so long lately, theirs so long. Reads do without it where
    /// redundancy allows.
    MemberSlow { member: usize, name: String, took: Duration, others: Duration },
    /// It is as fast as the others again.
    MemberSlowNoMore { member: usize, name: String },
    /// Too many members are lost, or somebody else owns the array: no more I/O until reopened.
    Stopped { error: BlockError },
}

impl ArrayEvent {
    /// Writes it to the log, as something that happened to array `array`.
    pub fn log(&self, array: &str) {
        match self {
            Self::MemberOut { name, error: Some(error), .. } => {
                tracing::error!(array, member = name, %error, "a member is out");
            }
            Self::MemberOut { name, error: None, .. } => {
                tracing::warn!(array, member = name, "a member was taken out");
            }
            Self::MemberGivenUp { name, .. } => {
                tracing::warn!(array, member = name, "a member that vanished has not come back");
            }
            Self::RebuildNeeded { name, .. } => {
                tracing::info!(array, member = name, "a member waits for its rebuild");
            }
            Self::RebuildDone { name, .. } => {
                tracing::info!(array, member = name, "a member is in sync again");
            }
            Self::Repaired { name, stripe, .. } => {
                tracing::warn!(array, member = name, stripe, "an unreadable chunk was rewritten");
            }
            Self::MemberSlow { name, took, others, .. } => {
                tracing::warn!(
                    array,
                    member = name,
                    ?took,
                    ?others,
                    "a member is much slower than the others"
                );
            }
            Self::MemberSlowNoMore { name, .. } => {
                tracing::info!(array, member = name, "a member is as fast as the others again");
            }
            Self::Stopped { error } => tracing::error!(array, %error, "the array has stopped"),
        }
    }
}

/// One member, for people.
#[derive(Clone, Debug)]
pub struct MemberStatus {
    pub index: usize,
    pub uuid: Uuid,
    pub name: String,
    pub enclosure: u16,
    pub role: Option<usize>,
    pub state: MemberState,
    /// Out, or being rebuilt: it was away, and what it holds is good but for what changed meanwhile.
    pub catches_up: bool,
    /// It vanished, and nobody has its role, or it was a spare: it is to be given back as soon as it is there again.
    pub vanished: bool,
    /// It vanished, and is waited for so much longer before a spare takes its role.
    pub awaited: Option<Duration>,
    /// Since open.
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub medium_errors: u64,
    pub io_errors: u64,
    /// Chunks in which something could not be read; at [`crate::UNREADABLE_CHUNKS_MAX`] it is taken out.
    pub unreadable_chunks: u64,
    pub repairs: u64,
    /// Blocks that a rebuild could not make, as far as is known since open. They cannot be read until they are written.
    pub lacks_blocks: u64,
    /// Much slower than the others.
    pub slow: bool,
    /// Of its reads and writes.
    pub latency: Latency,
}

/// How far a rebuild or a scrub has come.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    pub stripes_done: u64,
    /// Of these, before it was interrupted the last time.
    pub stripes_before: u64,
    /// Written stripes when it began.
    pub stripes_total: u64,
    /// Bytes read and written on members per second, over the run so far.
    pub bytes_per_second: f64,
}

/// An array, for people.
#[derive(Clone, Debug)]
pub struct ArrayStatus {
    pub uuid: Uuid,
    pub name: String,
    pub level: Level,
    pub chunk_bytes: u64,
    pub capacity_bytes: u64,
    pub stripes: u64,
    pub stripes_written: u64,
    /// Blocks that a power cut cost, with a member absent: they read as medium errors until they are written.
    pub lost_blocks: u64,
    pub generation: u64,
    /// Roles without good data everywhere.
    pub degraded: usize,
    pub tolerates: usize,
    /// Why there is no more I/O.
    pub stopped: Option<BlockError>,
    pub members: Vec<MemberStatus>,
    pub rebuild: Option<Progress>,
    /// The stripe at which the last rebuild could not go on, as more is beyond repair than can be listed: until some of that is
    /// written, or can be read again, the next one will not either.
    pub rebuild_blocked: Option<u64>,
    pub scrub: Option<Progress>,
    /// Stripes below this were checked by a scrub that is under way, or was interrupted and goes on at the next one; 0: none.
    pub scrubbed_below: u64,
}
