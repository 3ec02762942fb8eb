//! The tail: what one client is told before it is durable, and holds until it is.
//!
//! What always holds:
//! - Every batch that is not durable was in a frame to the holder before the holder was told
//!   anything that rests on it.
//! - When the holder is answered early, all batches that are not durable are its own.
//! - Only inode numbers below what the tail's row durably says are told early.
//! - The holder is given no batch before the row is durable: a life that finds no row takes nothing back.
//!
//! After a crash the holder hands the batches back (`recovery`). The whole story:
//! docs/design/0010-metadata-tail.md.

use crate::config::CallHeader;
use crate::key;
use crate::row::{ClientRow, Counters, TailRow};
use crate::service::{MetaService, Room, fault_of};
use levada_base::ids::{BootVerifier, Seq};
use levada_base::planted;
use levada_base::reactor::{self, Instant};
use levada_kv::Batch;
use levada_wire::frame::{BODY_BYTES_MAX, encode_body};
use levada_wire::meta::{self, MetaFault, ToClient};
use levada_wire::rpc::ConnectionId;
use std::collections::VecDeque;
use std::time::Duration;

/// A longer tail makes its holder wait, so that it fits one message when it comes back.
///
/// The holder has no more of it than was carried: each frame brings what is not durable, and lets it forget the
/// rest. Beside its bytes a batch in that message has its number and its length.
const BYTES_MAX: usize = 256 << 10;
const BATCH_BYTES_MIN: usize = 8;
const BATCH_HEAD_MAX: usize = 10 + 5;
const _: () = {
    let batches = BYTES_MAX / BATCH_BYTES_MIN;
    assert!(BYTES_MAX + batches * BATCH_HEAD_MAX + 64 <= BODY_BYTES_MAX);
};
/// Inode numbers are made ready so many at a time, and again when so many are left.
const NUMBERS: u64 = 256;
const NUMBERS_LEFT: u64 = 128;
/// A holder that changed nothing for this long gives the tail back.
const IDLE: Duration = Duration::from_secs(2);

/// See the module.
pub(crate) struct Tail {
    /// As it was last written; none: nobody was told anything early.
    row: Option<TailRow>,
    holder: Option<Holder>,
    /// The last batch that is not the holder's.
    foreign: Seq,
    /// The target stops: nobody becomes the holder any more.
    closed: bool,
}

struct Holder {
    client: u64,
    /// Inode numbers below may be told early; 0, below which there are none, until the row is durable.
    numbers: u64,
    /// What `numbers` will be once this batch is durable.
    raised: Option<(u64, Seq)>,
    /// Batches that were not durable when last looked at.
    batches: VecDeque<(Seq, Vec<u8>)>,
    bytes: usize,
    changed: Instant,
    /// The connection that carries frames to it, and the last batch that it carried.
    connection: ConnectionId,
    carried: Seq,
}

/// The answer must not go over this connection: a later one has taken its place.
pub(crate) struct Superseded;

impl Tail {
    pub(crate) fn new(row: Option<TailRow>) -> Self {
        Self { row, holder: None, foreign: Seq(0), closed: false }
    }

    /// The row as it was last written.
    pub(crate) fn row(&self) -> Option<TailRow> {
        self.row
    }

    fn held_by(&self, client: u64) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.client == client)
    }

    /// True when the change of this call may wait for company on its way into the log.
    pub(crate) fn is_lazy(&self, call: CallHeader) -> bool {
        call.unstable && self.held_by(call.client)
    }

    /// What must be written with a batch of this call, after which `counters` hold.
    pub(crate) fn row_for(
        &self,
        call: CallHeader,
        life: BootVerifier,
        counters: &Counters,
    ) -> Option<TailRow> {
        let wanted = match &self.holder {
            None => call.unstable && !self.closed,
            Some(holder) => {
                let promised = holder.raised.map_or(holder.numbers, |(numbers, _)| numbers);
                holder.client == call.client && counters.next_ino + NUMBERS_LEFT > promised
            }
        };
        let numbers = counters.next_ino + NUMBERS;
        wanted.then_some(TailRow { client: call.client, life, numbers })
    }

    /// A batch of `client` was applied, and this row with it.
    pub(crate) fn applied(&mut self, client: u64, seq: Seq, batch: &Batch, row: Option<TailRow>) {
        if let Some(row) = row {
            self.row = Some(row);
            let holder = self.holder.get_or_insert_with(|| Holder {
                client,
                numbers: 0,
                raised: None,
                batches: VecDeque::new(),
                bytes: 0,
                changed: reactor::now(),
                connection: ConnectionId::default(),
                carried: Seq(0),
            });
            holder.raised = Some((row.numbers, seq));
        }
        match &mut self.holder {
            Some(holder) if holder.client == client => {
                let bytes = batch.encode();
                assert!(bytes.len() >= BATCH_BYTES_MIN, "it has a row at least");
                holder.bytes += bytes.len();
                holder.batches.push_back((seq, bytes));
                holder.changed = reactor::now();
            }
            _ => self.foreign = seq,
        }
    }

    /// Everything up to `durable` is durable.
    fn settle(&mut self, durable: Seq) {
        let Some(holder) = &mut self.holder else { return };
        while holder.batches.front().is_some_and(|(seq, _)| *seq <= durable) {
            let (_, bytes) = holder.batches.pop_front().expect("looked at");
            holder.bytes -= bytes.len();
        }
        if let Some((numbers, seq)) = holder.raised
            && seq <= durable
        {
            (holder.numbers, holder.raised) = (numbers, None);
        }
    }

    /// True when all batches after `durable` are the holder's.
    fn is_unmixed(&self, durable: Seq) -> bool {
        self.foreign <= durable || planted!("meta-tail-with-foreign-batches")
    }

    /// Whether the call may be answered although not everything is durable.
    pub(crate) fn is_early(&mut self, call: CallHeader, durable: Seq, counters: &Counters) -> bool {
        self.settle(durable);
        let unmixed = self.is_unmixed(durable);
        let Some(holder) = &self.holder else { return false };
        call.unstable
            && holder.client == call.client
            && unmixed
            && holder.bytes <= BYTES_MAX
            && counters.next_ino <= holder.numbers
    }

    /// What must go over `connection` before an answer to `client`.
    pub(crate) fn frame_for(
        &mut self,
        client: u64,
        connection: ConnectionId,
        durable: Seq,
    ) -> Result<Option<Vec<u8>>, Superseded> {
        self.settle(durable);
        let unmixed = self.is_unmixed(durable);
        let Some(holder) = self.holder.as_mut().filter(|holder| holder.client == client) else {
            return Ok(None);
        };
        if connection < holder.connection {
            return Err(Superseded);
        }
        if connection > holder.connection {
            (holder.connection, holder.carried) = (connection, Seq(0));
        }
        // Else nothing is told early: what is carried has no gaps, fits a frame, and will be taken back.
        // An answer that rests on older batches may well come before the row is durable; batches that came
        // with it would be refused after a crash, and a sync would report a loss that there was not.
        let noted = holder.numbers > 0;
        if !noted || !unmixed || holder.bytes > BYTES_MAX {
            return Ok(None);
        }
        let carried = holder.carried;
        let fresh = holder.batches.iter().filter(|(seq, _)| *seq > carried);
        let batches: Vec<_> = fresh.cloned().collect();
        let Some((last, _)) = batches.last() else { return Ok(None) };
        holder.carried = *last;
        if planted!("meta-tail-not-carried") {
            return Ok(None);
        }
        Ok(Some(encode_body(&ToClient::Tail(meta::Tail { durable, batches }))))
    }

    fn is_idle(&self) -> bool {
        self.holder.as_ref().is_some_and(|holder| holder.changed.elapsed() >= IDLE)
    }

    /// Nobody holds it any more, and the row that said who did is gone: as long as it is there, it is
    /// known here, so that another attempt removes it.
    pub(crate) fn end(&mut self) {
        (self.holder, self.row) = (None, None);
    }
}

impl MetaService {
    /// Applies a batch that is no client's.
    pub(crate) fn apply_own(&self, batch: Batch) -> Result<Seq, MetaFault> {
        let seq = self.store.apply(batch).map_err(fault_of)?;
        self.tail.borrow_mut().foreign = seq;
        Ok(seq)
    }

    /// Takes the tail back from a holder that rests.
    pub(crate) async fn end_idle_tail(&self) -> Result<(), MetaFault> {
        if self.tail.borrow().is_idle() { self.end_tail().await } else { Ok(()) }
    }

    /// Makes everything durable and notes that nobody holds a tail, now and until the target has
    /// stopped, so that the next start waits for nobody. Requests that have begun may go on.
    ///
    /// # Errors
    ///
    /// When the store does not take it; then the next start waits.
    pub async fn close_tail(&self) -> Result<(), MetaFault> {
        self.tail.borrow_mut().closed = true;
        self.end_tail().await
    }

    async fn end_tail(&self) -> Result<(), MetaFault> {
        if self.is_recovering() {
            return Ok(());
        }
        self.wait_for_room(Room { frees: true }).await?;
        self.settle_tail()?;
        self.durable(self.store.last_seq()).await
    }

    /// Notes that nothing is missing of what the holder was told, and that there is none any more.
    pub(crate) fn settle_tail(&self) -> Result<(), MetaFault> {
        let Some(row) = self.tail.borrow().row() else { return Ok(()) };
        let mut batch = Batch::default();
        batch.delete(key::TAIL);
        let mut table = self.table.borrow_mut();
        let client = table.clients.get_mut(&row.client);
        if let Some(client) = &client {
            let client_row = ClientRow { settled: row.life, ..client.row() };
            batch.put(&key::client(row.client), &client_row.encode());
        }
        self.apply_own(batch)?;
        if let Some(client) = client {
            client.settled = row.life;
        }
        self.tail.borrow_mut().end();
        Ok(())
    }
}
