//! Whether an I/O queue still carries anything.
//!
//! The admin queue is another connection: its keep alive says nothing about a queue whose connection hangs, or whose part of the target
//! does. And that a command is not answered says little as well: the drive may take long. So a queue on which nothing is heard while
//! commands are open is asked something that takes no drive to answer, the head of a report of reservations. Whatever comes back, if only
//! a refusal, the answer to something else, or some data, is a sign of life.
//!
//! A target may read no further commands while its drive takes none. That looks the same, and so a queue is given up for its silence only
//! where another path leads to the drive that is not silent as well; otherwise the limits of its commands end it.

use super::fence::part_of_report;
use super::options::Timing;
use super::queue::{Queue, QueueError, Request};
use levada_base::IoVec;
use levada_base::reactor;
use levada_base::stream::ByteStream;
use levada_nvme::reservation::EXTENDED_HEADER_BYTES;
use std::rc::Rc;

/// Looks in the time that a queue may be silent before it is asked.
const LOOKS: u32 = 2;

/// Ends a queue on which nothing is heard for as long as a sign of life on the admin queue may take, though it was asked; but only when
/// `may_end` says so, too.
pub(super) async fn watch<S: ByteStream + 'static>(
    queue: Rc<Queue<S>>,
    timing: Timing,
    may_end: impl Fn() -> bool,
) {
    let (silent, limit) = (timing.keep_alive_every / 2, timing.keep_alive_limit);
    let mut heard = queue.heard();
    let mut since = reactor::now();
    while queue.end().is_none() {
        let next = reactor::now() + silent / LOOKS;
        queue.sleep_until(next).await;
        // Time in which this process stood still is none of the target's.
        since = since + next.elapsed();
        let Some(namespace) = queue.waits_for().filter(|_| heard == queue.heard()) else {
            heard = queue.heard();
            since = reactor::now();
            continue;
        };
        if since.elapsed() >= silent + limit && may_end() {
            return queue.close(QueueError::Silent { limit }).await;
        }
        if since.elapsed() >= silent {
            let (command, into) = part_of_report(namespace, EXTENDED_HEADER_BYTES);
            queue.probe(Request { command, from: IoVec::new(), into, change: None, limit: None });
        }
    }
}
