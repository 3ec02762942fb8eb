//! How the redundant chunks of a stripe follow from its data: not at all, copies, or parity.

use crate::layout::{Layout, Level};
use crate::{nplusm, raid5, raid6};
use levada_parity::{Code, ParityError, Slot};
use smallvec::SmallVec;

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
        Ok(match Self::code_of(layout.level, layout.data_chunks()) {
            Some(code) => Self::Parity(code?),
            None if layout.level == Level::Raid0 => Self::None,
            None => Self::Copies,
        })
    }

    /// The parity of a level, over so many chunks of data; `None` where it has none.
    pub fn code_of(level: Level, data_chunks: usize) -> Option<Result<Code, ParityError>> {
        Some(match level {
            Level::Raid0 | Level::Raid1 { .. } => return None,
            Level::Raid5 | Level::Raid50 { .. } => raid5::code(data_chunks),
            Level::Raid6 | Level::Raid60 { .. } => raid6::code(data_chunks),
            Level::NPlusM { parity } => nplusm::code(data_chunks, parity),
        })
    }

    /// Computes chunks, or one range of them, from what is held of the others: `wanted` in order of their numbers, with the
    /// memory that they go to. False when too few are held; then nothing was written.
    pub fn recompute<'a>(
        &self,
        held: impl Iterator<Item = Option<&'a [u8]>>,
        wanted: impl Iterator<Item = (usize, &'a mut [u8])>,
    ) -> bool {
        let mut wanted = wanted.peekable();
        let slots = held.enumerate().map(|(chunk, held)| match (held, wanted.peek()) {
            (_, Some((number, _))) if *number == chunk => {
                wanted.next().map_or(Slot::Absent, |(_, into)| Slot::Wanted(into))
            }
            (Some(bytes), _) => Slot::Present(bytes),
            (None, _) => Slot::Absent,
        });
        let mut slots: SmallVec<[Slot<'_>; 16]> = slots.collect();
        self.recover(&mut slots)
    }

    /// Computes every wanted chunk. False when too few are present; then nothing was written.
    fn recover(&self, slots: &mut [Slot<'_>]) -> bool {
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
