//! The commands of a controller that failed last: its log of errors (Base 2.0, 5.16.1.2).
//!
//! What always holds:
//! - An answer says that there is more to know (M) if, and only if, there is an entry.
//! - At most [`ERROR_ENTRIES_MAX`] are kept, whatever a host does; the oldest goes. The count goes on, also over a reset, which empties the log.
//! - A command that went well costs nothing here.
//!
//! The specification leaves to the controller which failures it has more to say of. No entry is made where nothing has gone wrong with the command, so
//! that monitors which go by the count are not alarmed: those that were aborted because a host wanted it, comparisons that found something
//! else, what another host has reserved, and what is to be sent over another path.

use levada_nvme::identify::ERROR_ENTRIES_MAX;
use levada_nvme::{AdminOpcode, Command, ERROR_ENTRY_BYTES, ErrorEntry, IoOpcode, Status};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// See the module.
#[derive(Default)]
pub(crate) struct Errors {
    /// Of all that there were.
    count: Cell<u64>,
    /// The newest first.
    entries: RefCell<VecDeque<ErrorEntry>>,
}

impl Errors {
    /// Enters a command of a queue that has failed. False: it is none that has an entry.
    #[cold]
    pub fn add(&self, queue: u16, command: &Command, status: Status) -> bool {
        if !has_entry(status) {
            return false;
        }
        self.count.set(self.count.get() + 1);
        let entry = ErrorEntry {
            wrong_at: wrong_at(queue, command, status),
            first_block: if is_of_blocks(queue, command) { command.first_block() } else { 0 },
            is_of_transport: status.is(Status::TRANSIENT_TRANSPORT),
            ..ErrorEntry::of(self.count.get(), queue, command, status)
        };
        let mut entries = self.entries.borrow_mut();
        entries.truncate(ERROR_ENTRIES_MAX - 1);
        entries.push_front(entry);
        true
    }

    pub fn count(&self) -> u64 {
        self.count.get()
    }

    /// The page, whole: entries that there are not are all zeroes.
    pub fn page(&self) -> Vec<u8> {
        let entries = self.entries.borrow();
        let mut page: Vec<u8> = entries.iter().flat_map(ErrorEntry::to_bytes).collect();
        page.resize(ERROR_ENTRIES_MAX * ERROR_ENTRY_BYTES, 0);
        page
    }

    pub fn clear(&self) {
        self.entries.take();
    }
}

fn has_entry(status: Status) -> bool {
    let as_asked = [
        Status::ABORTED,
        Status::ABORTED_BY_PREEMPTION,
        Status::COMPARE_FAILURE,
        Status::RESERVATION_CONFLICT,
    ];
    !status.is_of_path() && !as_asked.iter().any(|one| status.is(*one))
}

/// Doublewords 10 and 11 are a block.
fn is_of_blocks(queue: u16, command: &Command) -> bool {
    let opcode = IoOpcode::of(command.opcode()).filter(|_| queue > 0);
    matches!(
        opcode,
        Some(IoOpcode::Read | IoOpcode::Write | IoOpcode::Compare | IoOpcode::WriteZeroes)
    )
}

/// The place in the command that a status is about, where it is about one alone.
fn wrong_at(queue: u16, command: &Command, status: Status) -> Option<u16> {
    const FLAGS: u16 = 1;
    const NAMESPACE_OR_TYPE: u16 = 4;
    const DATA_OFFSET: u16 = 24;
    const DATA_BYTES: u16 = 32;
    const DATA_KIND: u16 = 39;
    const DWORD_10: u16 = 40;
    const DWORD_11: u16 = 44;
    /// Of Set Features: bit 31 of doubleword 10.
    const SAVE: u16 = 43 | 7 << 8;
    let is_fabrics = command.opcode() == AdminOpcode::Fabrics as u8;
    if status.is(Status::INVALID_FIELD) {
        return (command.is_fused() || !command.has_sgl()).then_some(FLAGS);
    }
    if status.is(Status::OUT_OF_RANGE) {
        // The ranges of Dataset Management are among its data.
        return is_of_blocks(queue, command).then_some(DWORD_10);
    }
    let places = [
        (Status::INVALID_OPCODE, if is_fabrics { NAMESPACE_OR_TYPE } else { 0 }),
        (Status::INVALID_NAMESPACE, NAMESPACE_OR_TYPE),
        (Status::OFFSET_INVALID, DATA_OFFSET),
        (Status::DATA_LENGTH_INVALID, DATA_BYTES),
        (Status::DESCRIPTOR_TYPE_INVALID, DATA_KIND),
        (Status::INVALID_LOG_PAGE, DWORD_10),
        (Status::FEATURE_NOT_CHANGEABLE, DWORD_10),
        (Status::FEATURE_NOT_SAVEABLE, SAVE),
        (Status::HOST_ID_INCONSISTENT, DWORD_11),
    ];
    places.into_iter().find(|(one, _)| status.is(*one)).map(|(_, place)| place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept_and_all_are_counted() {
        let errors = Errors::default();
        let failed = Status::WRITE_FAULT.and_do_not_retry();
        let write = |id| Command::new(IoOpcode::Write as u8, id, 1).with_blocks(7, 1);
        for id in 0..100 {
            assert!(errors.add(2, &write(id), failed));
        }
        let entries = |page: Vec<u8>| -> Vec<ErrorEntry> {
            let (entries, rest) = page.as_chunks();
            assert!(entries.len() == ERROR_ENTRIES_MAX && rest.is_empty());
            entries.iter().map_while(ErrorEntry::parse).collect()
        };
        let kept = entries(errors.page());
        let numbers: Vec<_> = kept.iter().map(|entry| (entry.count, entry.id)).collect();
        let newest: Vec<_> = (36..100).rev().map(|id| (u64::from(id) + 1, id)).collect();
        assert_eq!(numbers, newest);
        assert!(kept.iter().all(|entry| (entry.first_block, entry.queue) == (7, 2)));
        errors.clear();
        assert!(entries(errors.page()).is_empty() && errors.count() == 100);
        errors.add(0, &write(1), failed);
        let [entry] = entries(errors.page())[..] else { panic!("one") };
        assert_eq!((entry.count, entry.first_block), (101, 0), "no block of an admin queue");
    }

    #[test]
    fn what_a_host_has_wanted_or_is_the_paths_is_no_error() {
        let errors = Errors::default();
        for status in [
            Status::ABORTED,
            Status::ABORTED_BY_PREEMPTION,
            Status::COMPARE_FAILURE.and_do_not_retry(),
            Status::RESERVATION_CONFLICT.and_do_not_retry(),
            Status::ANA_INACCESSIBLE,
            Status::PATH_ERROR,
        ] {
            assert!(!errors.add(1, &Command::new(2, 1, 1), status), "{status}");
        }
        assert_eq!(errors.count(), 0);
    }
}
