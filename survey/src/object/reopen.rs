//! How long a killed log with a large index takes to open.

use super::target::{Sizes, Target};
use crate::figure::{Operand, Taken};
use crate::harness::{Effort, median, spread};
use crate::load::Load;
use crate::log::object;
use crate::members::Speed;
use anyhow::Result;
use levada_base::BufMut;
use levada_base::ids::Seq;
use levada_base::units::{GIB, MIB};
use levada_log::Stability;
use std::time::Instant;

const EXTENTS: u64 = 10_000_000;
const EXTENTS_PER_OBJECT: u64 = 10_000;
/// Small, so that little more than rows comes about; an extent's row has one checksum up to 4 KiB.
const RECORD_BYTES: u64 = 512;
const SIZES: Sizes = Sizes { data_bytes: 16 * GIB, meta_bytes: 1408 * MIB, keeps_data: false };
const DEPTH: usize = 64;
// Zeroes are written: members that drop what they are given read as those.
/// Written before each kill: more than rounds are behind with.
const UNSETTLED: u64 = 200_000;

pub(super) async fn after_kill(effort: Effort) -> Result<Taken> {
    let target = Target::new(Speed::Nvme, SIZES).await?;
    let extents = effort.amount(EXTENTS);
    write(&target, 0..extents).await?;
    target.log().commit(Seq(u64::MAX)).await?;
    let mut seconds = Vec::new();
    for number in 0..effort.runs as u64 {
        let first = extents + number * UNSETTLED;
        write(&target, first..first + UNSETTLED).await?;
        target.kill();
        let start = Instant::now();
        target.open().await?;
        // It is open when it answers.
        target.log().read(object(number % (extents / EXTENTS_PER_OBJECT)), 0, 1).await?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let rows = target.store().usage().rows;
    anyhow::ensure!(rows >= extents / 10 * 9, "the index has {rows} rows");
    let operand = Operand::new("rows", rows as f64 / 1e6, "million");
    Ok(Taken {
        value: median(seconds.iter().copied()),
        unit: "s".into(),
        operands: vec![operand],
        cpu: None,
        runs: seconds.len(),
        retaken: 0,
        spread: spread(&seconds),
    })
}

async fn write(target: &Target, extents: std::ops::Range<u64>) -> Result<()> {
    let (log, data) = (target.log(), BufMut::zeroed(RECORD_BYTES as usize).freeze());
    let load = Load::sequential(extents, 1, DEPTH);
    load.drive(move |number| {
        let (log, data) = (log.clone(), data.clone());
        let file = object(number / EXTENTS_PER_OBJECT);
        // Gaps in between: neighbours stay extents of their own, whatever the log does with them.
        let at = number % EXTENTS_PER_OBJECT * 2 * RECORD_BYTES;
        async move {
            log.write(file, at, data.into_vec(), Stability::Unstable).await?;
            Ok(())
        }
    })
    .await
}
