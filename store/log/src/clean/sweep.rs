//! Many extents read in the order of the array: large reads, several at once.

use crate::LogError;
use crate::extents::Extent;
use crate::log::Inner;
use crate::read::{Plan, Span};
use futures_util::stream::{self, StreamExt};
use levada_base::units::{KIB, MIB};
use levada_base::{Buf, BufMut};
use levada_device::BlockError;
use levada_raid::IoClass;
use std::rc::Rc;

/// Reads in flight.
const RUNS_AT_ONCE: usize = 8;
/// Bytes of a read, unless a single extent is larger.
const RUN_BYTES_MAX: u64 = MIB;
/// What lies between two extents is read along up to this size: a read by itself costs more.
const GAP_BYTES_MAX: u64 = 32 * KIB;

/// Neighbours on the array, read together.
struct Run {
    /// The array's offsets.
    from: u64,
    to: u64,
    /// Which extents these are, and how many bytes.
    extents: Vec<usize>,
    wanted: u64,
}

impl Inner {
    /// The bytes of extents (each with its offset in its object), whose segments somebody holds; `None` for one that is
    /// beyond repair.
    pub(super) async fn sweep(
        self: &Rc<Self>,
        extents: &[(u64, Extent)],
        class: IoClass,
    ) -> Result<Vec<Option<Buf>>, LogError> {
        let spans: Vec<Span> = extents
            .iter()
            .map(|(offset, extent)| Span::new(self, &extent.record, extent.blocks(*offset)))
            .collect();
        let reads = runs(extents, &spans).into_iter().map(|run| async {
            let into = BufMut::for_overwrite((run.to - run.from) as usize).into_vec();
            match self.array.read(run.from, into).await {
                Ok(mut parts) => Ok((run, Some(parts.swap_remove(0).freeze()))),
                // Perhaps only some of its blocks.
                Err(BlockError::Medium { .. }) => Ok((run, None)),
                Err(error) => Err(error),
            }
        });
        let mut bytes: Vec<Option<Buf>> = vec![None; extents.len()];
        let mut reads = stream::iter(reads).buffer_unordered(RUNS_AT_ONCE);
        while let Some(read) = reads.next().await {
            let (run, Some(data)) = read? else { continue };
            for at in run.extents {
                let ((offset, extent), span) = (&extents[at], &spans[at]);
                let (lo, hi) = span.on_array();
                let blocks = data.slice((lo - run.from) as usize, (hi - lo) as usize);
                if !span.fits_whole(&blocks) {
                    continue;
                }
                let start = (span.record_at + (offset - extent.record.offset) - lo) as usize;
                let piece = blocks.slice(start, extent.len as usize);
                // Else what lies in between would be kept along.
                let is_mostly_wanted = run.wanted * 2 > run.to - run.from;
                let copy = || BufMut::copy_of(&piece).freeze();
                bytes[at] = Some(if is_mostly_wanted { piece } else { copy() });
            }
        }
        drop(reads);
        // One after the other: neighbours share blocks, which are repaired.
        for ((offset, extent), bytes) in extents.iter().zip(&mut bytes) {
            if bytes.is_some() {
                continue;
            }
            match self.fetch(Plan::of_extent(self, *offset, extent), class).await {
                Ok(mut parts) => *bytes = Some(parts.swap_remove(0)),
                Err(LogError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }
}

/// The extents as reads, in the order of the array.
fn runs(extents: &[(u64, Extent)], spans: &[Span]) -> Vec<Run> {
    let mut in_order: Vec<usize> = (0..spans.len()).collect();
    in_order.sort_by_key(|at| spans[*at].on_array());
    let mut runs: Vec<Run> = Vec::new();
    for at in in_order {
        let ((from, to), len) = (spans[at].on_array(), extents[at].1.len);
        match runs.last_mut() {
            Some(run)
                if from <= run.to + GAP_BYTES_MAX && to.max(run.to) - run.from <= RUN_BYTES_MAX =>
            {
                run.to = run.to.max(to);
                run.extents.push(at);
                run.wanted += len;
            }
            _ => runs.push(Run { from, to, extents: vec![at], wanted: len }),
        }
    }
    runs
}
