//! The members that figures are taken on, and the same members without protection: `raw`.
//!
//! | model | a member |
//! |---|---|
//! | `null` | answers at once, keeps nothing |
//! | `ram` | memory of this process |
//! | `nvme` | 400 MB/s, 20,000 IOPS, 80 us, flush free |
//! | `nvme_flush_100us` | the same, but a flush takes 100 us |
//! | `slow` | 150 MB/s, 10,000 IOPS, 80 us, flush free |
//!
//! The models stand on `null` where nothing above looks at what it reads (a real drive moves the
//! bytes without the processor, so copying them would charge the layer for what it does not do),
//! and on `ram` where it does.

use crate::harness::{Rate, Said};
use anyhow::Result;
use futures_util::FutureExt;
use futures_util::future::try_join_all;
use levada_base::buf::bytes_in;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{BufMut, Epoch, IoVec, IoVecMut};
use levada_device::{
    Device, DeviceInfo, DriveModel, Durability, FileDevice, Health, IoFuture, ModelDevice,
    NullDevice, Prepare, RamDevice,
};
use smallvec::SmallVec;
use std::path::PathBuf;
use std::rc::Rc;

/// How fast members are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speed {
    /// As fast as their storage.
    Unlimited,
    Nvme,
    NvmeFlush100us,
    Slow,
}

impl Speed {
    fn model(self) -> Option<DriveModel> {
        match self {
            Self::Unlimited => None,
            Self::Nvme => Some(DriveModel::nvme()),
            Self::NvmeFlush100us => Some(DriveModel::nvme_flush_100us()),
            Self::Slow => Some(DriveModel::slow()),
        }
    }

    /// What `count` such members do together when none of them ever waits, asked for
    /// `request_bytes` at a time; nothing is said where there is no model.
    #[must_use]
    pub fn says(self, count: usize, request_bytes: u64, rate: Rate) -> Option<Said> {
        let model = self.model()?;
        let by_bytes = model.bytes_per_s as f64 / request_bytes as f64;
        let requests_per_s = count as f64 * by_bytes.min(model.iops as f64);
        let value = match rate {
            Rate::GbPerS => requests_per_s * request_bytes as f64 / 1e9,
            Rate::Kiops => requests_per_s / 1e3,
        };
        Some(Said { side: "raw", by: "model", rate, value })
    }
}

/// What members do with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    Null,
    Ram,
    /// Memory for the first bytes, so many; the rest is dropped, and reads as zeroes.
    KeepsFirst(u64),
}

/// `count` new members of `capacity_bytes` each.
#[must_use]
pub fn members(
    speed: Speed,
    storage: Storage,
    count: usize,
    capacity_bytes: u64,
) -> Vec<Rc<dyn Device>> {
    let member = |number| -> Rc<dyn Device> {
        let name = format!("m{number:02}");
        let stored: Rc<dyn Device> = match storage {
            Storage::Null => Rc::new(NullDevice::new(&name, capacity_bytes)),
            Storage::Ram => Rc::new(touched(RamDevice::new(&name, capacity_bytes))),
            Storage::KeepsFirst(kept_bytes) => {
                let kept = RamDevice::new(&name, kept_bytes);
                Rc::new(KeepsFirst { kept, whole: NullDevice::new(&name, capacity_bytes) })
            }
        };
        match speed.model() {
            None => stored,
            Some(model) => Rc::new(ModelDevice::new(stored, model)),
        }
    };
    (0..count).map(member).collect()
}

/// Where the drives of a whole stack come from.
#[derive(Clone, Debug)]
pub enum Drives {
    /// Memory at the speed of a model.
    Model(Speed),
    /// Files in a directory: the `disk` members.
    Files(PathBuf),
}

impl Drives {
    /// `count` new drives of `capacity_bytes` each; `group` tells apart those of one directory.
    ///
    /// # Errors
    ///
    /// When a file cannot be made.
    pub async fn make(
        &self,
        group: &str,
        count: usize,
        capacity_bytes: u64,
    ) -> Result<Vec<Rc<dyn Device>>> {
        let dir = match self {
            Self::Model(speed) => {
                return Ok(members(*speed, Storage::Ram, count, capacity_bytes));
            }
            Self::Files(dir) => dir,
        };
        let mut drives: Vec<Rc<dyn Device>> = Vec::new();
        for number in 0..count {
            let path = dir.join(format!("{group}{number:02}.img"));
            drives
                .push(Rc::new(FileDevice::create(&path, capacity_bytes, Prepare::Reserve).await?));
        }
        Ok(drives)
    }
}

/// A RAM device whose memory is there already: a real drive does not grow when first written.
fn touched(device: RamDevice) -> RamDevice {
    let capacity_bytes = device.info().capacity_bytes;
    for at in (0..capacity_bytes).step_by(MIB as usize) {
        let block = BufMut::zeroed(BLOCK_BYTES as usize).freeze().into_vec();
        // Memory answers at once, and a write inside the device cannot fail.
        let _ = device.write(at, block, Durability::Volatile).now_or_never();
    }
    device
}

/// See [`Storage::KeepsFirst`]: what spans of many seconds write need not fit memory.
struct KeepsFirst {
    kept: RamDevice,
    whole: NullDevice,
}

impl KeepsFirst {
    /// What a request is for; slices of a drive are asked by themselves, so none goes over the edge.
    fn half(&self, at: u64) -> &dyn Device {
        if at < self.kept.info().capacity_bytes { &self.kept } else { &self.whole }
    }
}

impl Device for KeepsFirst {
    fn info(&self) -> &DeviceInfo {
        self.whole.info()
    }

    fn read(&self, at: u64, mut into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        if at >= self.kept.info().capacity_bytes {
            into.iter_mut().for_each(|part| part.fill(0));
        }
        self.half(at).read(at, into)
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        self.half(at).write(at, from, durability)
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.kept.flush()
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.half(at).discard(at, bytes)
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.half(at).write_zeroes(at, bytes)
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        self.whole.fence(epoch)
    }

    fn health(&self) -> Health {
        self.whole.health()
    }
}

/// Members side by side: chunks are dealt to them in turn, nothing is protected.
#[derive(Clone)]
pub struct Raw {
    members: Rc<[Rc<dyn Device>]>,
    chunk_bytes: u64,
}

impl Raw {
    #[must_use]
    pub fn new(members: &[Rc<dyn Device>], chunk_bytes: u64) -> Self {
        Self { members: members.into(), chunk_bytes }
    }

    /// The member, the offset on it, and the bytes to the end of the chunk.
    fn locate(&self, at: u64) -> (&Rc<dyn Device>, u64, u64) {
        let width = self.members.len() as u64;
        let (chunk, within) = (at / self.chunk_bytes, at % self.chunk_bytes);
        let offset = chunk / width * self.chunk_bytes + within;
        (&self.members[(chunk % width) as usize], offset, self.chunk_bytes - within)
    }

    /// Reads `bytes` from `at` on; all members at once.
    ///
    /// # Errors
    ///
    /// Those of the members.
    pub async fn read(&self, at: u64, bytes: u64) -> Result<()> {
        let mut rest = BufMut::for_overwrite(bytes as usize);
        let (member, offset, run) = self.locate(at);
        if bytes <= run {
            member.read(offset, rest.into_vec()).await?;
            return Ok(());
        }
        let mut reads: SmallVec<[_; 16]> = SmallVec::new();
        let mut at = at;
        while !rest.is_empty() {
            let (member, offset, run) = self.locate(at);
            let run = run.min(rest.len() as u64);
            let part: IoVecMut = rest.split_to(run as usize).into_vec();
            reads.push(member.read(offset, part));
            at += run;
        }
        try_join_all(reads).await?;
        Ok(())
    }

    /// Writes `data` at `at`, within one chunk.
    ///
    /// # Errors
    ///
    /// Those of the member.
    pub async fn write_piece(&self, at: u64, data: IoVec) -> Result<()> {
        let (member, offset, run) = self.locate(at);
        assert!(bytes_in(&data) <= run, "within one chunk");
        Ok(member.write(offset, data, Durability::Volatile).await?)
    }

    /// Writes `data` at `at`, which must be the start of a chunk, each buffer being a chunk; all
    /// members at once.
    ///
    /// # Errors
    ///
    /// Those of the members.
    pub async fn write_chunks(&self, at: u64, data: IoVec) -> Result<()> {
        let mut at = at;
        let writes = data.into_iter().map(|chunk| {
            let chunk = chunk.into_vec();
            let (member, offset, run) = self.locate(at);
            assert!(bytes_in(&chunk) == run, "whole chunks only");
            at += run;
            member.write(offset, chunk, Durability::Volatile)
        });
        let writes: SmallVec<[_; 16]> = writes.collect();
        try_join_all(writes).await?;
        Ok(())
    }

    /// Flushes all members at once.
    ///
    /// # Errors
    ///
    /// Those of the members.
    pub async fn flush(&self) -> Result<()> {
        try_join_all(self.members.iter().map(|member| member.flush())).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::units::KIB;

    #[test]
    fn ten_members_do_what_the_models_say() {
        let said = |speed: Speed, bytes, rate| {
            speed.says(10, bytes, rate).map(|said| (said.value * 1e3).round())
        };
        assert_eq!(said(Speed::Nvme, 128 * KIB, Rate::GbPerS), Some(4000.0));
        assert_eq!(said(Speed::NvmeFlush100us, 128 * KIB, Rate::GbPerS), Some(4000.0));
        assert_eq!(said(Speed::Nvme, 4 * KIB, Rate::Kiops), Some(200_000.0));
        assert_eq!(said(Speed::Slow, 128 * KIB, Rate::GbPerS), Some(1500.0));
        assert_eq!(said(Speed::Slow, 4 * KIB, Rate::Kiops), Some(100_000.0));
        assert_eq!(said(Speed::Unlimited, 4 * KIB, Rate::Kiops), None);
    }
}
