//! Stripes on their way: the open one, which is filled in memory, and closed ones, which are
//! being written or wait to be indexed.

use crate::extents::{Place, Record};
use crate::format::{
    FOOTER_BYTES, Footer, HEADER_BYTES, PACK_BYTES, RecordHeader, RecordKind, header_bytes,
};
use crate::heat::Heat;
use crate::object::{Change, Object};
use crate::pages::Held;
use levada_base::checksum::{copy_crc32c, crc32c};
use levada_base::units::{BLOCK_BYTES, round_down};
use levada_base::{Buf, BufMut};
use std::rc::Rc;

/// Gaps in front of records may take this part of them, and of a stripe.
const GAP_SHARE: u64 = 32;

/// A change whose record is in a stripe that is not indexed yet.
pub(crate) struct Pending {
    pub object: Rc<Object>,
    pub version: u64,
    pub change: Change,
    pub staged: Option<StagedRow>,
    /// The pages that it changes.
    pub held: Held,
}

/// A row of a change that is staged.
pub(crate) struct StagedRow {
    pub key: Vec<u8>,
    /// What it costs the store.
    pub cost: u64,
}

/// Bytes to be copied into stripes, front to back.
pub(crate) struct Payload<'a> {
    parts: &'a [Buf],
    /// Bytes taken of `parts[0]`.
    taken: usize,
}

impl<'a> Payload<'a> {
    pub fn new(parts: &'a [Buf]) -> Self {
        Self { parts, taken: 0 }
    }

    /// The next bytes that lie side by side, so many at most.
    fn run(&mut self, bytes_max: usize) -> &'a [u8] {
        let (part, rest) = self.parts.split_first().expect("the payload is as long as said");
        let left = &part[self.taken..];
        if left.len() > bytes_max {
            self.taken += bytes_max;
            return &left[..bytes_max];
        }
        (self.parts, self.taken) = (rest, 0);
        left
    }

    fn copy_to(&mut self, mut target: &mut [u8]) {
        while !target.is_empty() {
            let run = self.run(target.len());
            let (head, tail) = target.split_at_mut(run.len());
            head.copy_from_slice(run);
            target = tail;
        }
    }

    /// Fills a block; its checksum.
    fn copy_checked_to(&mut self, block: &mut [u8]) -> u32 {
        let run = self.run(block.len());
        if run.len() == block.len() {
            return copy_crc32c(run, block);
        }
        let (head, tail) = block.split_at_mut(run.len());
        head.copy_from_slice(run);
        self.copy_to(tail);
        crc32c(block)
    }
}

/// The stripe that takes new records.
pub(crate) struct OpenStripe {
    pub segment: u32,
    /// Place in the segment.
    pub index: u32,
    /// Something died by its changes, other than by being copied.
    pub kills: bool,
    /// Its first record is the rest of a change that began in the stripe before.
    pub continues: bool,
    pub pending: Vec<Pending>,
    /// How many of `pending`, from the first, need no staging any more.
    pub staged: usize,
    /// Bytes that a COMMIT would have to stage.
    pub unstaged_bytes: u64,
    /// Bytes that the batch which indexes it will take.
    pub batch_bytes: u64,
    stripe_bytes: u64,
    /// Bytes left empty so that records start on whole blocks.
    gap_bytes: u64,
    /// What is filled; may be read.
    data: Buf,
    rest: BufMut,
    headers: Vec<u8>,
    records: u32,
    /// False: checksums are left out, for a measurement.
    pub is_checked: bool,
}

impl OpenStripe {
    pub fn new(segment: u32, index: u32, stripe_bytes: u64) -> Self {
        let mut rest = BufMut::for_overwrite(stripe_bytes as usize);
        let data = rest.split_to(0).freeze();
        Self {
            segment,
            index,
            kills: false,
            continues: false,
            pending: Vec::new(),
            staged: 0,
            unstaged_bytes: 0,
            batch_bytes: 0,
            stripe_bytes,
            gap_bytes: 0,
            data,
            rest,
            headers: Vec::new(),
            records: 0,
            is_checked: true,
        }
    }

    /// The filled bytes.
    pub fn data(&self) -> &Buf {
        &self.data
    }

    /// Where the next record of so many bytes starts. One that could lie on whole blocks does so unless
    /// the gaps become a loss: with small records in between, blocks would leave half of the log empty.
    fn start(&self, bytes: u64, aligned: bool) -> u64 {
        let end = self.data.len() as u64;
        let start = end.next_multiple_of(BLOCK_BYTES);
        let gap = start - end;
        let is_small =
            gap <= bytes / GAP_SHARE || self.gap_bytes + gap <= self.stripe_bytes / GAP_SHARE;
        if aligned && is_small { start } else { end.next_multiple_of(PACK_BYTES) }
    }

    /// How many of `bytes` bytes of data fit as one record; 0 when starting a new stripe is
    /// better.
    pub fn fit(&self, bytes: u64, aligned: bool) -> u64 {
        let taken = self.start(bytes, aligned) + (self.headers.len() + FOOTER_BYTES) as u64;
        let room = self.stripe_bytes.saturating_sub(taken);
        if bytes + header_bytes(bytes) <= room {
            return bytes;
        }
        // Each block costs a checksum beside itself; the slack covers rounding.
        let room = room.saturating_sub(HEADER_BYTES as u64 + 2 * PACK_BYTES);
        let whole = round_down(room / (BLOCK_BYTES + 4) * BLOCK_BYTES, BLOCK_BYTES);
        whole.min(bytes)
    }

    /// True when a record without data fits.
    pub fn fits_mark(&self) -> bool {
        self.data.len() + self.headers.len() + FOOTER_BYTES + HEADER_BYTES
            <= self.stripe_bytes as usize
    }

    /// Copies the next `header.stored` bytes of the payload in, and describes them: fills in
    /// the header's place and checksums.
    pub fn push_data(
        &mut self,
        mut header: RecordHeader,
        aligned: bool,
        payload: &mut Payload,
    ) -> Rc<Record> {
        let start = self.start(u64::from(header.stored), aligned);
        if start.is_multiple_of(BLOCK_BYTES) {
            self.gap_bytes += start - self.data.len() as u64;
        }
        let start = start as usize;
        let mut gap = self.rest.split_to(start - self.data.len());
        gap.fill(0);
        self.data.unsplit(gap.freeze());
        let mut target = self.rest.split_to(header.stored as usize);
        for block in target.chunks_mut(BLOCK_BYTES as usize) {
            let crc = if self.is_checked {
                payload.copy_checked_to(block)
            } else {
                payload.copy_to(block);
                0
            };
            header.crcs.push(crc);
        }
        self.data.unsplit(target.freeze());
        header.data_at = start as u32;
        header.encode(&mut self.headers);
        self.records += 1;
        Rc::new(Record {
            place: Place { segment: self.segment, stripe: self.index, at: header.data_at },
            version: header.version,
            offset: header.offset,
            stored: header.stored,
            first_block: 0,
            crcs: header.crcs.into_boxed_slice(),
        })
    }

    /// Adds a record without data.
    pub fn push_mark(&mut self, header: &RecordHeader) {
        header.encode(&mut self.headers);
        self.records += 1;
    }

    /// The stripe as it goes to the array, and the changes in it.
    pub fn close(mut self, mut footer: Footer) -> (Buf, Vec<Pending>) {
        footer.records = self.records;
        footer.header_bytes = self.headers.len() as u32;
        footer.data_bytes = self.data.len() as u32;
        footer.headers_crc = crc32c(&self.headers);
        let gap = self.rest.len() - self.headers.len() - FOOTER_BYTES;
        self.rest[..gap].fill(0);
        self.rest[gap..gap + self.headers.len()].copy_from_slice(&self.headers);
        self.rest[gap + self.headers.len()..].copy_from_slice(&footer.encode());
        self.data.unsplit(self.rest.freeze());
        (self.data, self.pending)
    }
}

/// A stripe that takes no more records and is not indexed yet.
pub(crate) struct ClosedStripe {
    pub segment: u32,
    pub index: u32,
    /// See [`Footer::order`].
    pub order: u64,
    pub heat: Heat,
    /// See [`OpenStripe::kills`].
    pub kills: bool,
    pub pending: Vec<Pending>,
    /// The array has taken it; it is durable after a flush.
    pub written: bool,
    pub batch_bytes: u64,
    /// The segment that its footer told of as the next to be used, when so many had been begun.
    pub told: (Option<u32>, u64),
}

/// The header that a staged row of `pending` starts with, or the record of a change that has
/// no data.
pub(crate) fn header_of(object: &Object, version: u64, change: &Change) -> Option<RecordHeader> {
    let (kind, offset, len, size, crcs) = match change {
        Change::Write(record) => {
            let len = u64::from(record.stored);
            (RecordKind::Data, record.offset, len, 0, record.crcs.to_vec())
        }
        Change::Truncate { size } => (RecordKind::Truncate, *size, 0, *size, Vec::new()),
        Change::Punch { from, to, size } => {
            (RecordKind::Punch, *from, to - from, *size, Vec::new())
        }
        Change::Delete => (RecordKind::Delete, 0, 0, 0, Vec::new()),
        // Copies need no staging: what they copy is durable where it was.
        Change::Relocate { .. } | Change::Keep { .. } => return None,
    };
    let stored = if kind == RecordKind::Data { len as u32 } else { 0 };
    Some(RecordHeader {
        kind,
        object: object.id,
        version,
        offset,
        len,
        size,
        data_at: 0,
        stored,
        crcs,
    })
}

/// The change that a record without data stands for.
pub(crate) fn change_of(header: &RecordHeader) -> Option<Change> {
    match header.kind {
        RecordKind::Data => None,
        RecordKind::Truncate => Some(Change::Truncate { size: header.size }),
        RecordKind::Punch => Some(Change::Punch {
            from: header.offset,
            to: header.offset + header.len,
            size: header.size,
        }),
        RecordKind::Delete => Some(Change::Delete),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Unused;
    use levada_base::Epoch;
    use levada_base::ids::{Ino, ObjectId};
    use proptest::prelude::*;

    fn header(version: u64, stored: u64) -> RecordHeader {
        RecordHeader {
            kind: RecordKind::Data,
            object: ObjectId { fs: 1, ino: Ino(2), component: 0, version: 0 },
            version,
            offset: 0,
            len: stored,
            size: 0,
            data_at: 0,
            stored: stored as u32,
            crcs: Vec::new(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever mix of sizes is pushed, the closed stripe describes itself.
        #[test]
        fn a_stripe_describes_itself(sizes in prop::collection::vec((1..30_000u64, any::<bool>()), 1..60)) {
            const STRIPE_BYTES: u64 = 128 * 1024;
            let mut open = OpenStripe::new(0, 0, STRIPE_BYTES);
            let mut pushed = Vec::new();
            let (mut gaps, mut data_bytes, mut end) = (0, 0, 0);
            for (n, (bytes, aligned)) in sizes.into_iter().enumerate() {
                let bytes = if aligned { bytes.next_multiple_of(4096) } else { bytes };
                let data = Buf::copy_of(&vec![n as u8 + 1; bytes as usize]);
                let fit = open.fit(bytes, aligned);
                prop_assert!(fit <= bytes);
                if fit == 0 {
                    break;
                }
                let parts = [data];
                let record = open.push_data(header(n as u64, fit), aligned, &mut Payload::new(&parts));
                let place = u64::from(record.place.at);
                gaps += place - end;
                end = place + fit;
                data_bytes += fit;
                pushed.push((record, n as u8 + 1));
            }
            // Gaps are few, and what is packed beside them loses next to nothing.
            let packing = pushed.len() as u64 * PACK_BYTES;
            prop_assert!(gaps <= STRIPE_BYTES / GAP_SHARE + data_bytes / GAP_SHARE + packing);
            while open.fits_mark() {
                open.push_mark(&RecordHeader { kind: RecordKind::Delete, stored: 0, len: 0, ..header(0, 0) });
            }
            let footer = Footer {
                fs: 0, target: 0, epoch: Epoch(0), generation: 0, segment: 0, stripe: 0,
                records: 0, header_bytes: 0, data_bytes: 0, headers_crc: 0, seq: 0,
                order: 0, unflushed: 0, inherited: 0, unused: Unused::default(), before: None,
            };
            let (stripe, _) = open.close(footer);
            prop_assert_eq!(stripe.len() as u64, STRIPE_BYTES);
            let footer = Footer::decode(&stripe, STRIPE_BYTES).expect("a footer");
            let records = footer.records(&stripe).expect("records");
            for ((record, byte), read) in pushed.iter().zip(&records) {
                prop_assert_eq!(record.place.at, read.data_at);
                prop_assert_eq!(&record.crcs[..], &read.crcs[..]);
                let data = stripe.slice(read.data_at as usize, read.stored as usize);
                prop_assert!(data.iter().all(|b| b == byte));
                prop_assert!(data.chunks(4096).map(crc32c).eq(read.crcs.iter().copied()));
            }
        }
    }

    /// Data may lie in memory that its owner changes while it is written, against the agreement: what
    /// is stored may then be either, but it fits its checksums.
    #[test]
    fn data_that_changes_meanwhile_fits_its_checksums() {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::FileExt;
        const BYTES: usize = 256 << 10;
        let own = levada_base::shared::share_buffers().expect("memory");
        let data = [BufMut::zeroed(BYTES).freeze()];
        let at = data[0].shared_offset().expect("shared");
        let path = format!("/proc/self/fd/{}", own.file.as_raw_fd());
        let file = std::fs::OpenOptions::new().write(true).open(path).expect("the own memory");
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let owner = std::thread::spawn(move || {
            for byte in (0..=255).cycle() {
                file.write_all_at(&[byte; BYTES], at).expect("writes");
                if stopped.try_recv() != Err(std::sync::mpsc::TryRecvError::Empty) {
                    break;
                }
            }
        });
        let mut torn = 0;
        for version in 0..20_000 {
            if torn >= 20 {
                break;
            }
            let mut open = OpenStripe::new(0, 0, 2 * BYTES as u64);
            let header = header(version, BYTES as u64);
            let record = open.push_data(header, true, &mut Payload::new(&data));
            let stored = open.data().slice(record.place.at as usize, BYTES);
            assert!(stored.chunks(4096).map(crc32c).eq(record.crcs.iter().copied()));
            torn += usize::from(stored.iter().any(|byte| *byte != stored[0]));
        }
        drop(stop);
        owner.join().expect("writes to its end");
        assert!(torn > 0, "nothing changed while it was written");
    }
}
