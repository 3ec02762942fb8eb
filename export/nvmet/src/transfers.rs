//! Data that were asked for and have not come yet (TCP, 3.3.2.1).
//!
//! No I/O. Data of a command are asked for at once, and come in their order. What always holds: nothing that was not asked for is taken.

use levada_base::sync::oneshot;
use levada_base::{Buf, BufMut};
use levada_nvme::pdu::{Fatal, Transfer};
use slab::Slab;

/// Data of a command, or that some of it arrived otherwise than they were sent.
pub(crate) type Arrived = Result<Buf, Mangled>;

/// A digest was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mangled;

struct Expected {
    command: u16,
    /// What has come, and the memory for the rest: all of it in one piece, however it is cut.
    arrived: BufMut,
    rest: BufMut,
    is_mangled: bool,
    whole: oneshot::Sender<Arrived>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Transfers(Slab<Expected>);

impl Transfers {
    /// What to ask the host for, and where all of it comes. As many at once as there are tags.
    pub fn begin(&mut self, command: u16, bytes: u32) -> (Transfer, oneshot::Receiver<Arrived>) {
        let (whole, receiver) = oneshot::channel();
        let mut rest = BufMut::for_overwrite(bytes as usize);
        let arrived = rest.split_to(0);
        let expected = Expected { command, arrived, rest, is_mangled: false, whole };
        let tag = u16::try_from(self.0.insert(expected)).expect("fewer commands than tags");
        (Transfer { command, tag, at: 0, bytes }, receiver)
    }

    /// The memory for data that a host announces, of which there are `data_bytes` in the unit; it is to be given [back](Self::take).
    ///
    /// # Errors
    ///
    /// [`Fatal`], when they were not asked for.
    pub fn lend(&mut self, transfer: &Transfer, data_bytes: usize) -> Result<BufMut, Fatal> {
        let expected = self.0.get_mut(usize::from(transfer.tag)).ok_or(Fatal::Field { at: 10 })?;
        if expected.command != transfer.command {
            return Err(Fatal::Field { at: 8 });
        }
        if transfer.at as usize != expected.arrived.len() {
            return Err(Fatal::OutOfRange);
        }
        if transfer.bytes as usize != data_bytes || data_bytes == 0 {
            return Err(Fatal::Field { at: 16 });
        }
        if data_bytes > expected.rest.len() {
            return Err(Fatal::OutOfRange);
        }
        Ok(expected.rest.split_to(data_bytes))
    }

    /// Takes memory back that was lent and is filled. Hands all of the data over once they are whole.
    pub fn take(&mut self, transfer: &Transfer, filled: BufMut, is_sound: bool) {
        let tag = usize::from(transfer.tag);
        let Some(expected) = self.0.get_mut(tag) else { return };
        expected.arrived.unsplit(filled);
        expected.is_mangled |= !is_sound;
        if expected.rest.is_empty() {
            let Expected { arrived, is_mangled, whole, .. } = self.0.remove(tag);
            whole.send(if is_mangled { Err(Mangled) } else { Ok(arrived.freeze()) });
        }
    }

    /// Nothing more comes: who waits learns of it.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;

    /// Announces data, and sends them.
    fn send(transfers: &mut Transfers, transfer: &Transfer, value: u8, is_sound: bool) {
        let mut memory = transfers.lend(transfer, transfer.bytes as usize).expect("asked for");
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
}
