//! How the redundant chunks of a stripe follow from its data: not at all, copies, or parity.

use crate::layout::{Layout, Level};
use crate::{nplusm, raid5, raid6};
use levada_parity::{Code, ParityError, Slot};

/// The equations of one level. Chunks are numbered data first.
pub(crate) enum Redundancy {
    /// No redundant chunks.
    None,
    /// Every chunk holds the same bytes.
    Copies,
    /// Sums of products.
    Parity(Code),
}

impl Redundancy {
    pub fn of(layout: &Layout) -> Result<Self, ParityError> {
        Ok(match layout.level {
            Level::Raid0 => Self::None,
            Level::Raid1 { .. } => Self::Copies,
            Level::Raid5 | Level::Raid50 { .. } => Self::Parity(raid5::code(layout.data_chunks())?),
            Level::Raid6 | Level::Raid60 { .. } => Self::Parity(raid6::code(layout.data_chunks())?),
            Level::NPlusM { parity } => Self::Parity(nplusm::code(layout.data_chunks(), parity)?),
        })
    }

    /// Computes every wanted chunk. False when too few are present; then nothing was written.
    pub fn recover(&self, slots: &mut [Slot<'_>]) -> bool {
        match self {
            Self::None => !slots.iter().any(|slot| matches!(slot, Slot::Wanted(_))),
            Self::Copies => {
                let source = slots.iter().find_map(|slot| match slot {
                    Slot::Present(bytes) => Some(*bytes),
                    Slot::Wanted(_) | Slot::Absent => None,
                });
                let Some(source) = source else { return false };
                for slot in slots {
                    if let Slot::Wanted(bytes) = slot {
                        bytes.copy_from_slice(source);
                    }
                }
                true
            }
            Self::Parity(code) => code.recover_slots(slots).is_ok(),
        }
    }
}
