//! What a host has been told of reservations and has not read yet: a page of the log each (Base, 5.14.1.9.1).
//!
//! What always holds: pages are read in their order. One for which there is no room is lost, and the count of the next one says so.

use levada_nvme::{ReservationNotice, ReservationNotification};
use std::collections::VecDeque;

/// Pages that wait to be read.
const PAGES_MAX: usize = 64;

/// See the module.
#[derive(Default)]
pub(crate) struct ReservationLog {
    /// Of the last page.
    count: u64,
    pages: VecDeque<(u64, ReservationNotice, u32)>,
}

impl ReservationLog {
    pub fn add(&mut self, namespace: u32, notice: ReservationNotice) {
        // Page 0 is none.
        self.count = self.count.checked_add(1).unwrap_or(1);
        if self.pages.len() < PAGES_MAX {
            self.pages.push_back((self.count, notice, namespace));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The oldest page; forgotten then, unless `keeps`. `None`: there is none.
    pub fn read(&mut self, keeps: bool) -> Option<ReservationNotification> {
        let &(count, notice, namespace) = self.pages.front()?;
        let more = (self.pages.len() - 1) as u8;
        if !keeps {
            self.pages.pop_front();
        }
        Some(ReservationNotification { count, notice, more, namespace })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_bounded_and_counted() {
        let mut log = ReservationLog { count: u64::MAX - 1, ..ReservationLog::default() };
        let notice = ReservationNotice::ReservationReleased;
        for namespace in 1..100 {
            log.add(namespace, notice);
        }
        let first = log.read(true).expect("a page");
        assert_eq!((first.count, first.more, first.namespace), (u64::MAX, 63, 1));
        assert_eq!(log.read(false), Some(first));
        for (count, more) in (1..=63).zip((0..63).rev()) {
            let page = log.read(false).expect("a page");
            assert_eq!((page.count, page.more), (count, more), "0 is no page");
        }
        assert!(log.is_empty() && log.read(false).is_none());
        log.add(7, notice);
        assert_eq!(log.read(false).expect("a page").count, 99, "what was lost counts");
    }
}
