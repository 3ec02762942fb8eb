//! Data that were asked for and have not come yet (TCP, 3.3.2.1).
//!
//! No I/O. Data of a command are asked for at once, and come in their order. What always holds: nothing that was not asked for is taken.
//!
//! Of a command that was aborted meanwhile the host may have sent some already, or all, and is to send no more once it hears of the abort.
//! They are received and forgotten, without memory for them. How many will come nobody says, so the tag stays taken until the host gives
//! the command's identifier to another one that asks for data: by then it is done with the first.

use levada_base::sync::oneshot;
use levada_base::{Buf, BufMut};
use levada_nvme::pdu::{Fatal, Transfer};
use slab::Slab;

/// Data of a command, or that some of it arrived otherwise than they were sent.
pub(crate) type Arrived = Result<Buf, Mangled>;

/// A digest was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mangled;

/// Aborted commands of which data may still come; more are not aborted, as each keeps a tag.
const GIVEN_UP_MAX: usize = 1024;

enum Expected {
    Wanted(Wanted),
    /// So many bytes have come in order, of so many.
    GivenUp {
        command: u16,
        arrived: u32,
        bytes: u32,
    },
}

struct Wanted {
    command: u16,
    /// What has come, and the memory for the rest: all of it in one piece, however it is cut.
    arrived: BufMut,
    rest: BufMut,
    /// A unit of it is being received into memory that was lent.
    is_lent: bool,
    is_mangled: bool,
    whole: oneshot::Sender<Arrived>,
}

/// What becomes of a unit's data.
pub(crate) enum Landing {
    /// They go into this memory, which is to be given [back](Transfers::take).
    Memory(BufMut),
    /// Nobody wants them any more.
    Nowhere,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Transfers {
    expected: Slab<Expected>,
    given_up: usize,
}

impl Transfers {
    /// What to ask the host for, and where all of it comes. As many at once as there are tags.
    pub fn begin(&mut self, command: u16, bytes: u32) -> (Transfer, oneshot::Receiver<Arrived>) {
        if self.given_up > 0 {
            self.forget_given_up(command);
        }
        let (whole, receiver) = oneshot::channel();
        let mut rest = BufMut::for_overwrite(bytes as usize);
        let arrived = rest.split_to(0);
        let (is_lent, is_mangled) = (false, false);
        let expected =
            Expected::Wanted(Wanted { command, arrived, rest, is_lent, is_mangled, whole });
        let tag = u16::try_from(self.expected.insert(expected)).expect("fewer commands than tags");
        (Transfer { command, tag, at: 0, bytes }, receiver)
    }

    /// The host has given the identifier of a command to another one.
    fn forget_given_up(&mut self, id: u16) {
        self.expected.retain(|_, expected| match expected {
            Expected::Wanted(_) => true,
            Expected::GivenUp { command, .. } => *command != id,
        });
        let is_given_up =
            |(_, expected): &(usize, &Expected)| matches!(expected, Expected::GivenUp { .. });
        self.given_up = self.expected.iter().filter(is_given_up).count();
    }

    /// A command is aborted that waits for its data. False: it cannot be just now.
    pub fn give_up(&mut self, tag: u16) -> bool {
        let Some(expected) = self.expected.get_mut(usize::from(tag)) else { return false };
        match expected {
            Expected::Wanted(wanted) if !wanted.is_lent && self.given_up < GIVEN_UP_MAX => {
                let (arrived, rest) = (wanted.arrived.len() as u32, wanted.rest.len() as u32);
                let (command, bytes) = (wanted.command, arrived + rest);
                *expected = Expected::GivenUp { command, arrived, bytes };
                self.given_up += 1;
                true
            }
            Expected::Wanted(_) | Expected::GivenUp { .. } => false,
        }
    }

    /// Where data go that a host announces, of which there are `data_bytes` in the unit.
    ///
    /// # Errors
    ///
    /// [`Fatal`], when they were not asked for.
    pub fn lend(&mut self, transfer: &Transfer, data_bytes: usize) -> Result<Landing, Fatal> {
        let tag = usize::from(transfer.tag);
        let expected = self.expected.get_mut(tag).ok_or(Fatal::Field { at: 10 })?;
        let (command, arrived, rest) = match expected {
            Expected::Wanted(Wanted { command, arrived, rest, .. }) => {
                (*command, arrived.len(), rest.len())
            }
            Expected::GivenUp { command, arrived, bytes } => {
                (*command, *arrived as usize, (*bytes - *arrived) as usize)
            }
        };
        if command != transfer.command {
            return Err(Fatal::Field { at: 8 });
        }
        if transfer.at as usize != arrived {
            return Err(Fatal::OutOfRange);
        }
        if transfer.bytes as usize != data_bytes || data_bytes == 0 {
            return Err(Fatal::Field { at: 16 });
        }
        if data_bytes > rest {
            return Err(Fatal::OutOfRange);
        }
        match expected {
            Expected::Wanted(wanted) => {
                wanted.is_lent = true;
                Ok(Landing::Memory(wanted.rest.split_to(data_bytes)))
            }
            Expected::GivenUp { arrived, .. } => {
                *arrived += transfer.bytes;
                if data_bytes == rest {
                    self.expected.remove(tag);
                    self.given_up -= 1;
                }
                Ok(Landing::Nowhere)
            }
        }
    }

    /// Takes memory back that was lent and is filled. Hands all of the data over once they are whole.
    pub fn take(&mut self, transfer: &Transfer, filled: BufMut, is_sound: bool) {
        let tag = usize::from(transfer.tag);
        let Some(Expected::Wanted(wanted)) = self.expected.get_mut(tag) else { return };
        wanted.arrived.unsplit(filled);
        wanted.is_lent = false;
        wanted.is_mangled |= !is_sound;
        if wanted.rest.is_empty()
            && let Expected::Wanted(wanted) = self.expected.remove(tag)
        {
            let Wanted { arrived, is_mangled, whole, .. } = wanted;
            whole.send(if is_mangled { Err(Mangled) } else { Ok(arrived.freeze()) });
        }
    }

    /// Nothing more comes: who waits learns of it.
    pub fn clear(&mut self) {
        self.expected.clear();
        self.given_up = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;

    /// Announces data, and sends them.
    fn send(transfers: &mut Transfers, transfer: &Transfer, value: u8, is_sound: bool) {
        let landing = transfers.lend(transfer, transfer.bytes as usize).expect("asked for");
        let Landing::Memory(mut memory) = landing else { panic!("nobody wants them") };
        memory.fill(value);
        transfers.take(transfer, memory, is_sound);
    }

    #[test]
    fn data_come_in_order_and_no_more_than_were_asked_for() {
        Reactor::simulated(0).block_on(async {
            let mut transfers = Transfers::default();
            let (asked, whole) = transfers.begin(7, 100);
            let part = |at, bytes| Transfer { at, bytes, ..asked };
            let mut refused = |transfer: Transfer, bytes| {
                transfers.lend(&transfer, bytes).map(|_| ()).expect_err("not asked for")
            };
            assert_eq!(refused(part(10, 10), 10), Fatal::OutOfRange);
            assert_eq!(refused(part(0, 101), 101), Fatal::OutOfRange);
            assert_eq!(refused(part(0, u32::MAX), 10), Fatal::Field { at: 16 });
            assert_eq!(refused(part(0, 0), 0), Fatal::Field { at: 16 });
            assert_eq!(refused(Transfer { tag: 9, ..part(0, 10) }, 10), Fatal::Field { at: 10 });
            assert_eq!(refused(Transfer { command: 8, ..part(0, 10) }, 10), Fatal::Field { at: 8 });
            send(&mut transfers, &part(0, 60), 1, true);
            send(&mut transfers, &part(60, 40), 2, true);
            let data = whole.await.expect("all came").expect("as they were sent");
            assert!(data[..60] == [1; 60] && data[60..] == [2; 40]);
            assert!(transfers.lend(&part(0, 1), 1).is_err(), "the tag is nobody's any more");
        });
    }

    #[test]
    fn mangled_data_are_told_once_all_have_come() {
        Reactor::simulated(0).block_on(async {
            let mut transfers = Transfers::default();
            let (asked, whole) = transfers.begin(7, 8);
            send(&mut transfers, &Transfer { bytes: 4, ..asked }, 0, false);
            send(&mut transfers, &Transfer { at: 4, bytes: 4, ..asked }, 0, true);
            assert!(matches!(whole.await.expect("told"), Err(Mangled)));
        });
    }

    #[test]
    fn data_of_an_aborted_command_are_forgotten() {
        Reactor::simulated(0).block_on(async {
            let mut transfers = Transfers::default();
            let (asked, whole) = transfers.begin(7, 100);
            send(&mut transfers, &Transfer { bytes: 60, ..asked }, 1, true);
            let part = Transfer { at: 60, bytes: 30, ..asked };
            let Ok(Landing::Memory(memory)) = transfers.lend(&part, 30) else { panic!("wanted") };
            assert!(!transfers.give_up(asked.tag), "its memory is in use");
            transfers.take(&part, memory, true);
            assert!(transfers.give_up(asked.tag) && !transfers.give_up(asked.tag));
            assert!(whole.await.is_err());
            let late = Transfer { at: 90, bytes: 10, ..asked };
            assert!(transfers.lend(&Transfer { at: 60, ..late }, 10).is_err(), "out of order");
            assert!(matches!(transfers.lend(&late, 10), Ok(Landing::Nowhere)));
            assert!(transfers.lend(&late, 10).is_err(), "more than was asked for");
            // Those that do not come are forgotten once the identifier is used again, and are not taken for the new one's.
            let (first, _) = transfers.begin(8, 100);
            assert!(transfers.give_up(first.tag));
            let (second, whole) = transfers.begin(8, 4);
            send(&mut transfers, &second, 2, true);
            assert!(whole.await.expect("all came").expect("as they were sent")[..] == [2; 4]);
            assert_eq!((transfers.given_up, transfers.expected.len()), (0, 0));
        });
    }

    #[test]
    fn what_is_given_up_is_bounded() {
        let mut transfers = Transfers::default();
        for command in 0..2000 {
            let (asked, _) = transfers.begin(command, 4);
            assert_eq!(transfers.give_up(asked.tag), usize::from(command) < GIVEN_UP_MAX);
        }
    }
}
