//! What stripes say about themselves, read from the array.

use crate::LogError;
use crate::format::{FOOTER_BYTES, Footer, RecordHeader};
use crate::log::Inner;
use crate::read::Pin;
use levada_base::units::{BLOCK_BYTES, KIB, round_up};
use levada_base::{Buf, BufMut};
use levada_device::BlockError;
use levada_raid::IoClass;
use std::rc::Rc;

/// Read from the end of a stripe at first; most summaries are smaller.
const SUMMARY_BYTES: u64 = 16 * KIB;

impl Inner {
    /// What a stripe says about itself: of this generation, or of any. `None` when it cannot be
    /// read.
    pub(crate) async fn summary_of(
        self: &Rc<Self>,
        segment: u32,
        stripe: u32,
        generation: Option<u64>,
    ) -> Result<Option<(Footer, Vec<RecordHeader>)>, LogError> {
        let _pin = Pin::new(self, &self.state.borrow(), segment);
        let identity = (self.config.fs, self.config.target.0, segment, stripe);
        let fits = |tail: &[u8]| {
            Footer::decode(tail, self.stripe_bytes).is_some_and(|footer| {
                (footer.fs, footer.target, footer.segment, footer.stripe) == identity
                    && generation.is_none_or(|generation| generation == footer.generation)
            })
        };
        let end = self.array_offset(segment, stripe) + self.stripe_bytes;
        let first = SUMMARY_BYTES.min(self.stripe_bytes);
        let Some(tail) = self.read_fitting(end - first, end, &fits).await? else {
            return Ok(None);
        };
        let footer = Footer::decode(&tail, self.stripe_bytes).expect("it fitted");
        if let Some(records) = footer.records(&tail) {
            return Ok(Some((footer, records)));
        }
        let bytes = round_up(footer.summary_bytes(), BLOCK_BYTES);
        let fits = |tail: &[u8]| footer.records(tail).is_some();
        let tail = self.read_fitting(end - bytes, end, &fits).await?;
        Ok(tail.and_then(|tail| Some((footer, footer.records(&tail)?))))
    }

    /// Reads bytes that can be recognised, with repair.
    async fn read_fitting(
        self: &Rc<Self>,
        from: u64,
        to: u64,
        fits: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<Buf>, LogError> {
        let into = BufMut::for_overwrite((to - from) as usize).into_vec();
        match self.array.read(from, into).await {
            Ok(mut parts) => {
                let data = parts.swap_remove(0).freeze();
                if fits(&data) {
                    return Ok(Some(data));
                }
            }
            Err(BlockError::Medium { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.recover(from, to, IoClass::Clean, fits).await
    }
}

const _: () = assert!(SUMMARY_BYTES as usize >= FOOTER_BYTES);
