//! The intent log: a ring of records, each one group of batches, written once and replayed after
//! a crash.
//!
//! A position counts the bytes ever written; the byte at `position` lies at `position` modulo the
//! ring. A record starts on a block, may wrap, and names its position, its number, the owner's
//! epoch, the opening, and the checksum of the record before it.
//!
//! What always holds:
//! - At most [`GROUPS_IN_FLIGHT_MAX`] records are being written, and a record is acknowledged only
//!   after all before it. So what survives is a prefix, and an intact record more than that far
//!   behind a bad one proves that an acknowledged record was damaged.
//! - A record never overwrites bytes at or after the tail of both superblocks.
//!
//! After a crash, replay goes from the tail to the first record that does not follow from the one
//! before. Bytes behind it belong to nobody: a record there has an older opening than what will
//! be written before it, so it can never be taken for its successor.

use crate::format::{
    Change, Layout, LogPoint, RECORD_HEADER_BYTES, RecordHeader, Superblock, batch_bytes,
    decode_batches, encode_batch,
};
use crate::overlay::Segment;
use crate::store::KvError;
use levada_base::checksum::crc32c;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{Buf, BufMut, Epoch, IoVec, planted, probe};
use levada_device::{BlockError, Device, Durability};
use std::cell::Cell;
use std::rc::Rc;

/// Records being written at the same time.
pub(crate) const GROUPS_IN_FLIGHT_MAX: usize = 2;
/// Bytes read at once by replay.
const REPLAY_BYTES: u64 = MIB;

/// A batch that waits for the log.
pub(crate) struct Queued {
    pub seq: u64,
    pub changes: Vec<Change>,
    /// [`batch_bytes`] of `changes`.
    pub bytes: usize,
    /// The segment that holds it; records do not straddle segments.
    pub segment: Rc<Segment>,
}

/// The ring as its owner writes it.
pub(crate) struct Log {
    area: Rc<dyn Device>,
    layout: Layout,
    identity: Superblock,
    head: Cell<LogPoint>,
    tail: Cell<u64>,
}

impl Log {
    /// A log whose next record comes at `head`. `identity` is this opening's superblock.
    pub(crate) fn new(area: Rc<dyn Device>, identity: Superblock, head: LogPoint) -> Self {
        let tail = Cell::new(identity.tail.position);
        Self { area, layout: identity.layout, identity, head: Cell::new(head), tail }
    }

    /// Where the next record comes.
    pub(crate) fn head(&self) -> LogPoint {
        self.head.get()
    }

    /// Bytes from the tail to the head.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.head.get().position - self.tail.get()
    }

    /// Bytes that can be written before the tail must move.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.layout.log_bytes - self.used_bytes()
    }

    /// Frees everything before `position`, which both superblocks name as the tail now.
    pub(crate) fn move_tail(&self, position: u64) {
        assert!(position >= self.tail.get() && position <= self.head.get().position);
        self.tail.set(position);
    }

    /// Encodes a group at the head, which moves behind it. The caller has checked the room.
    pub(crate) fn place(&self, group: &[Queued]) -> (u64, Buf) {
        let head = self.head.get();
        let payload_bytes = group.iter().map(|batch| batch.bytes).sum();
        let footprint = RecordHeader::footprint(payload_bytes);
        assert!(footprint <= self.free_bytes(), "a record must not run into the tail");
        let mut record = BufMut::for_overwrite(footprint as usize);
        let end = group
            .iter()
            .fold(RECORD_HEADER_BYTES, |at, batch| encode_batch(&batch.changes, &mut record, at));
        record[end..].fill(0);
        let header = RecordHeader {
            uuid: self.identity.uuid,
            epoch: self.identity.epoch,
            opened: self.identity.opened,
            position: head.position,
            number: head.number,
            first_seq: head.seq + 1,
            batches: group.len() as u32,
            payload_bytes: payload_bytes as u32,
            payload_crc: crc32c(&record[RECORD_HEADER_BYTES..end]),
            previous_crc: head.previous_crc,
        };
        let crc = header.encode(&mut record);
        self.head.set(LogPoint {
            position: head.position + footprint,
            number: head.number + 1,
            previous_crc: crc,
            seq: head.seq + group.len() as u64,
        });
        (head.position, record.freeze())
    }

    /// Writes a record placed before; durable when this completes.
    pub(crate) async fn write(&self, position: u64, record: Buf) -> Result<(), BlockError> {
        let _busy = probe::busy("kv log write");
        let durability =
            if planted!("kv-log-not-durable") { Durability::Volatile } else { Durability::Fua };
        let start = position % self.layout.log_bytes;
        let first = (record.len() as u64).min(self.layout.log_bytes - start) as usize;
        let at = self.layout.log_at;
        let head = self.area.write(at + start, record.slice(0, first).into_vec(), durability);
        if first == record.len() {
            return head.await;
        }
        let rest: IoVec = record.slice(first, record.len() - first).into_vec();
        let rest = self.area.write(at, rest, durability);
        let (head, rest) = futures_util::future::join(head, rest).await;
        head.and(rest)
    }
}

/// Reads the ring from front to back through a window.
struct RingReader<'a> {
    area: &'a Rc<dyn Device>,
    layout: Layout,
    window: Option<(u64, BufMut)>,
    /// The window is one block, which cannot be read or whose copies disagree.
    unreadable: bool,
    /// Where the last whole window ended. A block before it that is not at hand means that something in that
    /// window is unreadable: then blocks are read one by one.
    singly_until: u64,
}

impl RingReader<'_> {
    /// The block at `position`; `None` for one that cannot be read, or about which no copies agree.
    async fn block(&mut self, position: u64) -> Result<Option<&[u8]>, KvError> {
        let inside = |(start, window): &(u64, BufMut)| {
            position >= *start && position < *start + window.len() as u64
        };
        if !self.window.as_ref().is_some_and(inside) {
            let start = position % self.layout.log_bytes;
            let bytes = REPLAY_BYTES.min(self.layout.log_bytes - start);
            let mut window = None;
            if position >= self.singly_until {
                window = self.read(start, bytes).await?;
                self.singly_until = position + bytes;
            }
            // One bad block must not take its neighbours with it.
            if window.is_none() {
                window = self.read(start, BLOCK_BYTES).await?;
            }
            self.unreadable = window.is_none();
            let window = window.unwrap_or_else(|| BufMut::zeroed(BLOCK_BYTES as usize));
            self.window = Some((position, window));
        }
        let (start, window) = self.window.as_ref().expect("just read");
        let at = (position - start) as usize;
        Ok((!self.unreadable).then(|| &window[at..at + BLOCK_BYTES as usize]))
    }

    async fn read(&self, start: u64, bytes: u64) -> Result<Option<BufMut>, KvError> {
        let into = BufMut::for_overwrite(bytes as usize).into_vec();
        match self.area.read_agreed(self.layout.log_at + start, into).await {
            Ok(read) => Ok(read.into_iter().next()),
            Err(BlockError::Medium { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// What is in the log, batch by batch, from the tail on.
pub(crate) struct Replay<'a> {
    ring: RingReader<'a>,
    identity: Superblock,
    /// Where the next record must be.
    pub point: LogPoint,
    epoch: u64,
    opened: u64,
}

impl<'a> Replay<'a> {
    /// Starts at the tail that `identity` (this opening's superblock) names.
    pub(crate) fn new(area: &'a Rc<dyn Device>, identity: Superblock) -> Self {
        let ring = RingReader {
            area,
            layout: identity.layout,
            window: None,
            unreadable: false,
            singly_until: 0,
        };
        Self { ring, identity, point: identity.tail, epoch: 0, opened: 0 }
    }

    /// The batches of the next record; `None` at the end of the log.
    ///
    /// # Errors
    ///
    /// When the log cannot be read, is damaged, or was written by a later owner.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<Vec<Change>>>, KvError> {
        let at = self.point.position;
        let end = self.identity.tail.position + self.identity.layout.log_bytes;
        if at >= end {
            return Ok(None);
        }
        const UNREADABLE: &str = "intent log record (unreadable, or its copies disagree)";
        let damaged = |at| KvError::Damaged { what: UNREADABLE, at };
        let header = RecordHeader::decode(self.ring.block(at).await?.ok_or(damaged(at))?);
        let Some((header, crc)) = header.filter(|(header, _)| self.follows(header)) else {
            return self.check_the_rest(end).await.map(|()| None);
        };
        if header.epoch > self.identity.epoch {
            let seen = Epoch(header.epoch);
            return Err(BlockError::Fenced { ours: Epoch(self.identity.epoch), seen }.into());
        }
        let footprint = RecordHeader::footprint(header.payload_bytes as usize);
        if at + footprint > end {
            return Err(KvError::Damaged { what: "intent log record length", at });
        }
        let mut payload = Vec::with_capacity(footprint as usize);
        for block in (at..at + footprint).step_by(BLOCK_BYTES as usize) {
            payload.extend_from_slice(self.ring.block(block).await?.ok_or(damaged(block))?);
        }
        payload.truncate(RECORD_HEADER_BYTES + header.payload_bytes as usize);
        let payload = &payload[RECORD_HEADER_BYTES..];
        if crc32c(payload) != header.payload_crc {
            return self.check_the_rest(end).await.map(|()| None);
        }
        if header.first_seq != self.point.seq + 1 {
            return Err(KvError::Damaged { what: "intent log sequence", at });
        }
        let batches = decode_batches(payload, header.batches)
            .map_err(|_| KvError::Damaged { what: "intent log batches", at })?;
        self.epoch = header.epoch;
        self.opened = header.opened;
        self.point = LogPoint {
            position: at + footprint,
            number: header.number + 1,
            previous_crc: crc,
            seq: self.point.seq + u64::from(header.batches),
        };
        Ok(Some(batches))
    }

    fn follows(&self, header: &RecordHeader) -> bool {
        header.uuid == self.identity.uuid
            && header.position == self.point.position
            && header.number == self.point.number
            && header.previous_crc == self.point.previous_crc
            && header.epoch >= self.epoch
            && header.opened >= self.opened
    }

    /// The log ends here if no later record can have been acknowledged.
    async fn check_the_rest(&mut self, end: u64) -> Result<(), KvError> {
        let proof = self.point.number + GROUPS_IN_FLIGHT_MAX as u64;
        let mut unreadable = 0;
        for at in (self.point.position..end).step_by(BLOCK_BYTES as usize) {
            let block = self.ring.block(at).await?;
            unreadable += u64::from(block.is_none());
            let Some((header, _)) = block.and_then(RecordHeader::decode) else { continue };
            if header.uuid == self.identity.uuid && header.number >= proof {
                return Err(KvError::Damaged {
                    what: "intent log record",
                    at: self.point.position,
                });
            }
        }
        if unreadable > 0 {
            let at = self.point.position;
            tracing::warn!(
                at,
                unreadable,
                "blocks behind the end of the intent log cannot be read"
            );
        }
        Ok(())
    }
}

/// The payload of the largest record that one group may be; a larger batch goes alone.
pub(crate) fn group_bytes_max(log_bytes: u64) -> usize {
    (log_bytes / 8) as usize - RECORD_HEADER_BYTES
}

/// The largest batch that the log takes.
pub(crate) fn batch_bytes_max(log_bytes: u64) -> usize {
    (log_bytes / 4) as usize - RECORD_HEADER_BYTES
}

/// Log bytes after which a segment is closed.
pub(crate) fn segment_bytes(log_bytes: u64) -> u64 {
    log_bytes / 4
}

/// At most what `changes` take in the log: as if they were a group of their own.
pub(crate) fn log_bytes_of(changes: &[Change]) -> u64 {
    RecordHeader::footprint(batch_bytes(changes))
}
