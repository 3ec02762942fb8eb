//! Whether an I/O queue still carries anything.
//!
//! The admin queue is another connection: its keep alive says nothing about a queue whose connection hangs, or whose part of the target
//! does. And that a command is not answered says little as well: the drive may take long. So a queue on which nothing is heard while
//! commands are open is asked something that takes no drive to answer, the head of a report of reservations. Whatever comes back, if only
//! a refusal, the answer to something else, or some data, is a sign of life.

use super::fence::part_of_report;
use super::queue::{Queue, QueueError, Request};
use levada_base::IoVec;
use levada_base::reactor;
use levada_base::stream::ByteStream;
use levada_nvme::reservation::EXTENDED_HEADER_BYTES;
use std::rc::Rc;
use std::time::Duration;

/// Looks in the time that a queue may be silent before it is asked.
const LOOKS: u32 = 2;

/// Ends a queue on which nothing is heard for `silent`, and then for `limit` though it was asked.
pub(super) async fn watch<S: ByteStream + 'static>(
    queue: Rc<Queue<S>>,
    silent: Duration,
    limit: Duration,
) {
    let mut heard = queue.heard();
    let mut since = reactor::now();
    while queue.end().is_none() {
        let next = reactor::now() + silent / LOOKS;
        reactor::sleep_until(next).await;
        // Time in which this process stood still is none of the target's.
        since = since + next.elapsed();
        let Some(namespace) = queue.waits_for().filter(|_| heard == queue.heard()) else {
            heard = queue.heard();
            since = reactor::now();
            continue;
        };
        if since.elapsed() >= silent + limit {
            return queue.close(QueueError::Silent { limit }).await;
        }
        if since.elapsed() >= silent
            && let Some(place) = queue.place_of_probe()
        {
            let (command, into) = part_of_report(namespace, EXTENDED_HEADER_BYTES);
            let probe = Request { command, from: IoVec::new(), into, change: None, limit: None };
            // Nobody waits for what it says.
            drop(queue.submit(place, probe));
        }
    }
}
