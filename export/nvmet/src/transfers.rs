//! Data that were asked for and have not come yet (TCP, 3.3.2.1).
//!
//! No I/O. Data of a command are asked for at once, and come in their order. What always holds: nothing that was not asked for is taken.

use levada_base::sync::oneshot;
use levada_base::{Buf, IoVec};
use levada_nvme::pdu::{Fatal, Transfer};
use slab::Slab;

/// Data of a command, or that some of it arrived otherwise than they were sent.
pub(crate) type Arrived = Result<IoVec, Mangled>;

/// A digest was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mangled;

struct Expected {
    command: u16,
    bytes: u32,
    arrived_bytes: u32,
    arrived: Arrived,
    whole: oneshot::Sender<Arrived>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Transfers(Slab<Expected>);

impl Transfers {
    /// What to ask the host for, and where all of it comes. As many at once as there are tags.
    pub fn begin(&mut self, command: u16, bytes: u32) -> (Transfer, oneshot::Receiver<Arrived>) {
        let (whole, receiver) = oneshot::channel();
        let arrived = Ok(IoVec::new());
        let expected = Expected { command, bytes, arrived_bytes: 0, arrived, whole };
        let tag = u16::try_from(self.0.insert(expected)).expect("fewer commands than tags");
        (Transfer { command, tag, at: 0, bytes }, receiver)
    }

    /// Whether data may come that a host announces, of which there are `data_bytes` in the unit.
    pub fn check(&self, transfer: &Transfer, data_bytes: usize) -> Result<(), Fatal> {
        let expected = self.0.get(usize::from(transfer.tag)).ok_or(Fatal::Field { at: 10 })?;
        if expected.command != transfer.command {
            return Err(Fatal::Field { at: 8 });
        }
        if transfer.at != expected.arrived_bytes {
            return Err(Fatal::OutOfRange);
        }
        if transfer.bytes as usize != data_bytes {
            return Err(Fatal::Field { at: 16 });
        }
        let end = transfer.at.checked_add(transfer.bytes).ok_or(Fatal::OutOfRange)?;
        if end > expected.bytes { Err(Fatal::OutOfRange) } else { Ok(()) }
    }

    /// Takes data that were [checked](Self::check); `None`: they were mangled. Hands all of them over once they are whole.
    pub fn take(&mut self, transfer: &Transfer, data: Option<Buf>) {
        let tag = usize::from(transfer.tag);
        let Some(expected) = self.0.get_mut(tag) else { return };
        expected.arrived_bytes += transfer.bytes;
        match (&mut expected.arrived, data) {
            (Ok(arrived), Some(data)) => arrived.push(data),
            (arrived, _) => *arrived = Err(Mangled),
        }
        if expected.arrived_bytes == expected.bytes {
            let Expected { arrived, whole, .. } = self.0.remove(tag);
            whole.send(arrived);
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
    use levada_base::buf::bytes_in;
    use levada_base::reactor::Reactor;

    #[test]
    fn data_come_in_order_and_no_more_than_were_asked_for() {
        Reactor::simulated(0).block_on(async {
            let mut transfers = Transfers::default();
            let (asked, whole) = transfers.begin(7, 100);
            let part = |at, bytes| Transfer { at, bytes, ..asked };
            assert_eq!(transfers.check(&part(10, 10), 10), Err(Fatal::OutOfRange));
            assert_eq!(transfers.check(&part(0, 101), 101), Err(Fatal::OutOfRange));
            assert_eq!(transfers.check(&part(0, u32::MAX), 10), Err(Fatal::Field { at: 16 }));
            let other = Transfer { tag: 9, ..part(0, 10) };
            assert_eq!(transfers.check(&other, 10), Err(Fatal::Field { at: 10 }));
            let other = Transfer { command: 8, ..part(0, 10) };
            assert_eq!(transfers.check(&other, 10), Err(Fatal::Field { at: 8 }));
            for first in [part(0, 60), part(60, 40)] {
                assert_eq!(transfers.check(&first, first.bytes as usize), Ok(()));
                let data = Buf::copy_of(&vec![1; first.bytes as usize]);
                transfers.take(&first, Some(data));
            }
            let data = whole.await.expect("all came").expect("as they were sent");
            assert_eq!(bytes_in(&data), 100);
            assert!(transfers.check(&part(0, 1), 1).is_err(), "the tag is nobody's any more");
        });
    }

    #[test]
    fn mangled_data_are_told_once_all_have_come() {
        Reactor::simulated(0).block_on(async {
            let mut transfers = Transfers::default();
            let (asked, whole) = transfers.begin(7, 8);
            transfers.take(&Transfer { bytes: 4, ..asked }, None);
            transfers.take(&Transfer { at: 4, bytes: 4, ..asked }, Some(Buf::copy_of(&[0; 4])));
            assert!(matches!(whole.await.expect("told"), Err(Mangled)));
        });
    }
}
