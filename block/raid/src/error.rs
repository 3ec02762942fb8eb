//! Why an array could not be created or assembled, in terms of what a person does next.

use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_device::{BlockError, DeviceInfo};
use std::fmt;

/// What assembly made of one device that it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A live member of the array.
    Used { member: usize },
    /// The array went on without it, or it is an old copy of itself: its data is old. Give it back with
    /// [`crate::RaidArray::replace`], which rebuilds it.
    Stale { member: usize, generation: u64 },
    /// The array went on without it for a while: it takes part again, and gets what changed meanwhile.
    CatchesUp { member: usize },
    /// It vanished, and the array could not record what it misses: it takes part again, and gets everything. Or it was a spare,
    /// and is one again.
    GetsAll { member: usize },
    /// A member that another device has replaced.
    Replaced { uuid: Uuid },
    /// A member of another array.
    Foreign { array: Uuid },
    /// No valid superblock.
    NoSuperblock,
    /// The device failed when it was asked.
    Unreadable { error: BlockError },
    /// The same member was given before.
    Duplicate { member: usize },
    /// It has a superblock of this array and one of another, so it is nobody's.
    Claimed { by: Uuid },
    /// A live member on less than its superblock says that it has: what is gone is not believed to be only the end.
    CutShort { member: usize, bytes: u64, needed_bytes: u64 },
}

/// What assembly found, device by device, and who is missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AssemblyReport {
    /// Generation of the newest superblock.
    pub generation: u64,
    /// Device name and what it turned out to be.
    pub devices: Vec<(String, Finding)>,
    /// Live members that were not found, by name: what would bring the array back.
    pub missing: Vec<String>,
    /// Members recorded as faulty, by name: bringing these back does not help without a rebuild.
    pub faulty: Vec<String>,
}

impl Finding {
    /// The member that takes part as this device.
    #[must_use]
    pub fn member_taken(&self) -> Option<usize> {
        match self {
            Self::Used { member } | Self::CatchesUp { member } | Self::GetsAll { member } => {
                Some(*member)
            }
            _ => None,
        }
    }
}

impl AssemblyReport {
    /// Whether this member was away and takes part again.
    pub(crate) fn returns(&self, index: usize) -> bool {
        self.any(|finding| match finding {
            Finding::CatchesUp { member } | Finding::GetsAll { member } => *member == index,
            _ => false,
        })
    }

    /// Whether it was away, and needs only what it missed.
    pub(crate) fn catches_up(&self, index: usize) -> bool {
        self.any(|finding| matches!(finding, Finding::CatchesUp { member } if *member == index))
    }

    /// Whether what this member holds may have been damaged while nobody had it.
    pub(crate) fn is_damaged(&self, index: usize) -> bool {
        self.any(|finding| match finding {
            Finding::CutShort { member, .. } => *member == index,
            // Nobody knows which member it was.
            Finding::Claimed { .. } => true,
            _ => false,
        })
    }

    fn any(&self, is: impl Fn(&Finding) -> bool) -> bool {
        self.devices.iter().any(|(_, finding)| is(finding))
    }
}

impl fmt::Display for AssemblyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.devices.iter().filter(|(_, is)| matches!(is, Finding::Used { .. })).count();
        write!(f, "generation {}, {used} live members found", self.generation)?;
        if !self.missing.is_empty() {
            write!(f, "; missing: {}", self.missing.join(", "))?;
        }
        if !self.faulty.is_empty() {
            write!(f, "; faulty: {}", self.faulty.join(", "))?;
        }
        for (name, finding) in &self.devices {
            match finding {
                Finding::Used { .. } => {}
                Finding::Stale { generation, .. } => {
                    write!(f, "; {name} is stale (generation {generation})")?;
                }
                Finding::CatchesUp { .. } => write!(f, "; {name} was away and catches up")?,
                Finding::GetsAll { .. } => write!(f, "; {name} was away and begins anew")?,
                Finding::Replaced { .. } => write!(f, "; {name} has been replaced")?,
                Finding::Foreign { array } => write!(f, "; {name} belongs to array {array}")?,
                Finding::NoSuperblock => write!(f, "; {name} has no superblock")?,
                Finding::Unreadable { error } => write!(f, "; {name} cannot be read: {error}")?,
                Finding::Duplicate { .. } => write!(f, "; {name} was given twice")?,
                Finding::Claimed { by } => write!(f, "; {name} is claimed by array {by} as well")?,
                Finding::CutShort { bytes, needed_bytes, .. } => write!(
                    f,
                    "; {name} has {bytes} bytes and was cut short: its superblock says that it had {needed_bytes}"
                )?,
            }
        }
        Ok(())
    }
}

/// What is the matter with a member's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// It does not write less than so many bytes.
    Larger { bytes: u64 },
    /// Of more than so many bytes a power cut may leave a part.
    Torn { atomic_bytes: u64 },
}

impl Misfit {
    /// What this device has against blocks of so many bytes.
    #[must_use]
    pub fn of(device: &DeviceInfo, block_bytes: u64) -> Option<Self> {
        let (bytes, atomic_bytes) = (device.block_bytes, device.atomic_write_bytes);
        if !block_bytes.is_multiple_of(bytes) {
            return Some(Self::Larger { bytes });
        }
        (atomic_bytes < block_bytes).then_some(Self::Torn { atomic_bytes })
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Larger { bytes } => write!(f, "has blocks of {bytes} bytes"),
            Self::Torn { atomic_bytes } => {
                write!(f, "writes no more than {atomic_bytes} bytes at once")
            }
        }
    }
}

/// Why an array could not be created, opened or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RaidError {
    /// The level cannot be built so. Nothing was written.
    #[error("impossible geometry: {reason}")]
    Geometry { reason: &'static str },
    /// A member is smaller than the array needs. Nothing was written.
    #[error("member {member} has {capacity_bytes} bytes, at least {needed_bytes} are needed")]
    TooSmall { member: String, capacity_bytes: u64, needed_bytes: u64 },
    /// A member's blocks do not go with the array's. Nothing was written.
    #[error("member {member} {why}, and a block of the array has {block_bytes} bytes")]
    Misfit { member: String, block_bytes: u64, why: Misfit },
    /// None of the devices belongs to the array.
    #[error("no member found: {report}")]
    NotFound { report: Box<AssemblyReport> },
    /// More members are lost than the level bears; the report names those that would help.
    #[error("{lost} roles without data, {tolerated} tolerated: {report}")]
    TooManyLost { lost: usize, tolerated: usize, report: Box<AssemblyReport> },
    /// Those found might all have missed a later change of standing: another member may know
    /// better. Bring back a missing member, or force if they are gone for good.
    #[error("{found} of {live} live members found, more than half are needed: {report}")]
    NoMajority { found: usize, live: usize, report: Box<AssemblyReport> },
    /// Somebody with a later epoch owns the array.
    #[error("fenced: this owner holds {ours}, the array has seen {seen}")]
    Fenced { ours: Epoch, seen: Epoch },
    /// No found member has a valid copy of this page of the stripe map.
    #[error("page {page} of the stripe map is unreadable on every member: {report}")]
    MapLost { page: u64, report: Box<AssemblyReport> },
    /// Stripes were being overwritten when the power failed, and more of them was lost than the array can say. Nothing of
    /// that is served: make readable what of the members is not.
    #[error(
        "stripe {stripe} was being overwritten when the power failed, and there is no room to say what is lost of it: it opens \
         when more of its members can be read"
    )]
    LostUnlisted { stripe: u64 },
    /// There is no such member, or it is in no state for this.
    #[error("member {member}: {reason}")]
    Member { member: usize, reason: &'static str },
    /// The members' devices failed meanwhile.
    #[error(transparent)]
    Block(#[from] BlockError),
}
