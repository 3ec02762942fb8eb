//! An object log: its configuration, its state in memory, and the small requests.
//!
//! What always holds:
//! - A change is visible at once and durable after the COMMIT that covers it.
//! - The index never points into a stripe that a flush has not covered.
//! - A segment is discarded only when no durable index row and no read points into it.
//! - A failed write, flush or batch stops the log: what it left is in doubt, and only opening
//!   it again finds out.
//!
//! After a crash the index and the staged rows are the state. Stripes the index does not know
//! are given back ([`crate::open`]).

use crate::LogError;
use crate::clean::Paid;
use crate::extents::footprint;
use crate::format::Before;
use crate::heat::{ByHeat, Heat};
use crate::load::Objects;
use crate::observe::IndexObserver;
use crate::rows::Lives;
use crate::segment::Segments;
use crate::stripe::{ClosedStripe, OpenStripe};
use levada_base::ids::{BootVerifier, ObjectId, Seq, TargetId};
use levada_base::meter::HitMeter;
use levada_base::reactor::Group;
use levada_base::sync::Notify;
use levada_base::units::{KIB, MIB};
use levada_base::{Buf, BufMut, Epoch, RangeLocks};
use levada_kv::Store;
use levada_raid::Array;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// What a log is told when it is made or opened.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The first 8 bytes of the file system's UUID.
    pub fs: u64,
    pub target: TargetId,
    /// Stripes per segment; fixed when the log is made.
    pub segment_stripes: u32,
    /// Stripes in memory that are being written; with the open one, this bounds memory.
    pub stripes_in_flight: usize,
    /// What may be written and not durable, in whole stripes: at least 4 of them, at most 64. A writer waits when it
    /// is reached, and a round starts by itself at half of it.
    pub unstable_bytes_max: u64,
    /// A write of at most this many bytes is one change: a crash leaves all of it or nothing. At most the data of a
    /// stripe.
    pub whole_bytes_max: u64,
    /// A COMMIT of at most this many bytes of the open stripe goes through the key-value store.
    pub stage_bytes_max: u64,
    /// Memory for what objects' extents are known to be, roughly; that of changes on their way and of requests under way may
    /// come on top.
    pub cached_bytes_max: u64,
    /// Bytes of an object whose extents are read from the index together; a power of two.
    pub page_bytes: u64,
    /// Free segments that new data never takes: what is sent again may take half of them, truncations
    /// and deletions all but one, the cleaner all.
    pub reserve_segments: u32,
}

impl Config {
    /// The usual sizes.
    #[must_use]
    pub fn new(fs: u64, target: TargetId) -> Self {
        Self {
            fs,
            target,
            segment_stripes: 32,
            stripes_in_flight: 8,
            unstable_bytes_max: 64 * MIB,
            whole_bytes_max: 128 * KIB,
            stage_bytes_max: 128 * KIB,
            cached_bytes_max: 64 * MIB,
            page_bytes: 128 * KIB,
            reserve_segments: 4,
        }
    }
}

/// However small stripes are: what a power cut takes and clients send again must fit into the reserve.
const UNSTABLE_STRIPES_MAX: u64 = 64;

/// When a write may be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// Visible; durable after a [`ObjectLog::commit`] that covers its sequence.
    Unstable,
    /// Survives any crash.
    Durable,
    /// As [`Stability::Unstable`]; an earlier life acknowledged it, so it may use room that is kept
    /// for this.
    Again,
}

/// The answer to a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Of this change.
    pub seq: Seq,
    /// Everything up to here is durable.
    pub durable: Seq,
}

/// What is known of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub size: u64,
    /// Bytes that extents hold.
    pub stored_bytes: u64,
}

/// What a log has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// COMMIT rounds.
    pub commits: u64,
    /// Bytes that went through the key-value store.
    pub staged_bytes: u64,
    /// Stripes written.
    pub stripes: u64,
    /// Bytes that COMMITs left empty at the ends of stripes.
    pub padded_bytes: u64,
    /// Blocks whose checksum did not fit and that were rebuilt from parity.
    pub repaired_blocks: u64,
    /// Blocks that could not be rebuilt.
    pub damaged_blocks: u64,
    /// Segments emptied by the cleaner.
    pub cleaned_segments: u64,
    /// Bytes that the cleaner copied.
    pub cleaned_bytes: u64,
    /// Bytes of data that were written, with what describes them.
    pub written_bytes: u64,
    /// Segments given back.
    pub freed_segments: u64,
}

/// A log; cheap to clone, all clones are the same log.
#[derive(Clone)]
pub struct ObjectLog(pub(crate) Rc<Inner>);

pub(crate) struct Inner {
    pub array: Rc<dyn Array>,
    pub store: Store,
    pub config: Config,
    pub epoch: Epoch,
    /// The order at which the stripes end that the index knew when the log was opened.
    pub inherited: u64,
    pub verifier: BootVerifier,
    /// Those before.
    pub lives: Lives,
    pub stripe_bytes: u64,
    pub objects: Objects,
    pub state: RefCell<State>,
    /// Something in `state` changed that somebody may wait for.
    pub changed: Notify,
    /// Bytes that the batches of what is not indexed yet may take together.
    pub unindexed_bytes_max: u64,
    /// Holes read as slices of this.
    pub zeroes: Buf,
    /// What the scrub that runs has checked; footprints.
    pub scrubbed_bytes: Cell<u64>,
    /// Places of the array that somebody repairs.
    pub repairs: RangeLocks,
    /// Background work lives and dies with whoever opened the log, not with whoever asked last.
    pub group: Group,
    /// False only in a measurement of what checksums cost.
    pub is_checked: Cell<bool>,
    /// Told of changes of the index, while there is one.
    pub observer: RefCell<Option<Rc<dyn IndexObserver>>>,
}

pub(crate) struct State {
    /// Of the last change.
    pub seq: u64,
    /// Every change up to here is in the batches applied so far, and none after it.
    pub indexed_seq: u64,
    /// And these batches are durable up to here.
    pub durable_seq: u64,
    /// A COMMIT waits for this sequence.
    pub wanted_seq: u64,
    /// Of the stripes of each heat: how often somebody asked that all be indexed.
    pub settles_wanted: ByHeat<u64>,
    /// And up to which of these they were.
    pub settled: ByHeat<u64>,
    /// Stripes below this order are indexed.
    pub indexed_order: u64,
    /// And these durably.
    pub durable_order: u64,
    /// The order of the next stripe to be closed.
    pub next_order: u64,
    /// What the next footer tells of the stripe closed last.
    pub before: Option<Before>,
    /// Every change up to here is in a closed stripe.
    pub closed_seq: u64,
    pub round_running: bool,
    pub cleaner_running: bool,
    /// The cleaner found nothing to gain, and nothing has died since.
    pub nothing_to_clean: bool,
    /// Something died, other than by being copied, since the cleaner's pass began.
    pub died: bool,
    /// Stripes that are not indexed, and by whose changes something died.
    pub unindexed_kills: u64,
    /// The last pass of the cleaner was for the oldest outdated data.
    pub cleaned_oldest: bool,
    /// See [`Paid`].
    pub paid: Paid,
    /// Copies went into hot stripes that may not be indexed.
    pub copies_among_hot: bool,
    pub segments: Segments,
    pub open: ByHeat<Option<OpenStripe>>,
    /// In order; the front is indexed first.
    pub closed: VecDeque<ClosedStripe>,
    /// Closed stripes that the array does not have yet, by segment and place.
    pub in_memory: HashMap<(u32, u32), Buf>,
    /// Some completed write may not be flushed.
    pub unflushed: bool,
    /// See [`crate::rows::LogRow::is_untold`]: whether a stripe of that heat must tell, which lies where those that were given
    /// back did.
    pub is_untold: ByHeat<bool>,
    /// Footprints of all extents that objects have now.
    pub used_bytes: u64,
    /// Footprints of all records without data.
    pub mark_bytes: u64,
    /// Bytes of the rows that the index has.
    pub index_bytes: u64,
    /// What all rows in the store cost it, at most, and what that will change by when everything is indexed.
    pub index_cost: u64,
    pub unindexed_cost: i64,
    /// Bytes that batches will take for what is not indexed yet.
    pub unindexed_bytes: u64,
    pub failed: Option<LogError>,
    pub counters: Counters,
}

impl ObjectLog {
    /// Differs whenever unstable changes may have been lost.
    #[must_use]
    pub fn verifier(&self) -> BootVerifier {
        self.0.verifier
    }

    /// Up to where the changes that an earlier life acknowledged, the one with this verifier, are still there:
    /// those up to here are, and no later one. `None` when none are, or that life is not known any more.
    #[must_use]
    pub fn survived(&self, life: BootVerifier) -> Option<Seq> {
        self.0.lives.survived(life)
    }

    /// Of the last change.
    #[must_use]
    pub fn seq(&self) -> Seq {
        Seq(self.0.state.borrow().seq)
    }

    /// Everything up to here is durable.
    #[must_use]
    pub fn durable(&self) -> Seq {
        Seq(self.0.state.borrow().durable_seq)
    }

    /// Bytes of stripes that are given out and not durable.
    #[must_use]
    pub fn unstable_bytes(&self) -> u64 {
        self.0.state.borrow().unstable_stripes() * self.0.stripe_bytes
    }

    /// What it did since it was opened.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.0.state.borrow().counters
    }

    /// How often an object that was asked for was in memory, and how often not.
    #[must_use]
    pub fn asked(&self) -> &HitMeter {
        &self.0.objects.asked
    }

    /// Memory that is taken by what is known of objects and their extents, about.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.0.objects.bytes()
    }

    /// Computes and compares no checksum from here on. For a figure of what they cost, and nothing else: what is
    /// written meanwhile cannot be read by anybody who does.
    #[doc(hidden)]
    pub fn check_nothing_for_measurement(&self) {
        self.0.is_checked.set(false);
    }

    /// The segments that are free, and all.
    #[must_use]
    pub fn segments(&self) -> (u32, u32) {
        let state = self.0.state.borrow();
        (state.segments.free_count(), state.segments.count())
    }

    /// Size of an object.
    ///
    /// # Errors
    ///
    /// [`LogError::NoSuchObject`], or when the index fails.
    pub async fn stat(&self, object: ObjectId) -> Result<Stat, LogError> {
        self.0.check()?;
        let object = self.0.objects.get(object).await?;
        let now = object.now.borrow();
        if !now.exists {
            return Err(LogError::NoSuchObject);
        }
        Ok(Stat { size: now.size, stored_bytes: now.extents.stored_bytes() })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.objects.stop();
    }
}

impl State {
    /// Stripes that are given out and not durable; but for the open one of copies, whose data is durable where it was.
    pub fn unstable_stripes(&self) -> u64 {
        self.next_order - self.durable_order + u64::from(self.open[Heat::Hot].is_some())
    }

    /// The segments of all stripes up to this order that are not indexed yet are declared.
    pub fn are_ready_to(&self, order: u64) -> bool {
        let mut stripes = self.closed.iter().take_while(|stripe| stripe.order <= order);
        stripes.all(|stripe| self.segments.get(stripe.segment).ready)
    }

    /// Nothing needs the records without data of a segment any more.
    pub fn forget_marks(&mut self, segment: u32) {
        let marks = &mut self.segments.get_mut(segment).row.marks;
        self.mark_bytes -= std::mem::take(marks) * footprint(0);
    }
}

impl Inner {
    /// Fails when the log has stopped.
    pub fn check(&self) -> Result<(), LogError> {
        match &self.state.borrow().failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Stops the log.
    pub fn fail(&self, error: LogError) {
        let mut state = self.state.borrow_mut();
        if state.failed.is_none() {
            tracing::error!(target_id = self.config.target.0, %error, "the object log stops");
            state.failed = Some(error);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Stripes that may be given out and not durable.
    pub fn unstable_stripes_max(&self) -> u64 {
        (self.config.unstable_bytes_max / self.stripe_bytes).clamp(4, UNSTABLE_STRIPES_MAX)
    }

    /// The array's offset of a place.
    pub fn array_offset(&self, segment: u32, stripe: u32) -> u64 {
        let stripes = u64::from(self.config.segment_stripes);
        (u64::from(segment) * stripes + u64::from(stripe)) * self.stripe_bytes
    }
}

/// Zeroes that holes are read from.
pub(crate) fn zeroes() -> Buf {
    BufMut::zeroed(256 * KIB as usize).freeze()
}
