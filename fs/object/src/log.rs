//! The object log as a store of objects: every error of the log becomes a fault on the wire.

use crate::objects::{Ack, ObjectFuture, Objects, Space};
use crate::service::OFFSET_MAX;
use levada_base::IoVec;
use levada_base::ids::{BootVerifier, ObjectId, Seq};
use levada_device::BlockError;
use levada_kv::KvError;
use levada_log::{LogError, ObjectLog};
use levada_wire::object::{DataRanges, Hole, ObjectFault, ObjectStat, Stability};

/// What a client is told. The log itself says once, in full, why it stopped.
fn fault(error: LogError) -> ObjectFault {
    match error {
        LogError::NoSuchObject => ObjectFault::NoSuchObject,
        LogError::Full => ObjectFault::Full,
        LogError::Damaged { offset, bytes } => ObjectFault::Damaged { offset, bytes },
        LogError::OutOfRange { .. } | LogError::Kv(KvError::TooLarge { .. }) => {
            ObjectFault::Invalid
        }
        LogError::Block(
            BlockError::OutOfRange { .. }
            | BlockError::Misaligned { .. }
            | BlockError::Medium { .. }
            | BlockError::Gone
            | BlockError::Fenced { .. }
            | BlockError::TooManyLost { .. }
            | BlockError::NotFresh { .. }
            | BlockError::Unsupported { .. }
            | BlockError::Io { .. },
        )
        | LogError::Kv(
            // The log stopped for it; who is merely refused is told above.
            KvError::Full
            | KvError::Block(_)
            | KvError::Damaged { .. }
            | KvError::TooSmall { .. }
            | KvError::Stopped,
        )
        | LogError::Geometry { .. }
        | LogError::Foreign { .. }
        | LogError::Stale { .. } => ObjectFault::Unavailable,
        // A row of that object, and no repetition makes it better: all of the object is lost, and
        // nothing else. (Other rows are read when a log is opened, which fails then.)
        LogError::Index { .. } => ObjectFault::Damaged { offset: 0, bytes: OFFSET_MAX },
    }
}

fn ack(ack: levada_log::Ack) -> Ack {
    Ack { seq: ack.seq, durable: ack.durable }
}

fn stability(stability: Stability) -> levada_log::Stability {
    match stability {
        Stability::Unstable => levada_log::Stability::Unstable,
        Stability::Durable => levada_log::Stability::Durable,
        Stability::Again => levada_log::Stability::Again,
    }
}

impl Objects for ObjectLog {
    fn verifier(&self) -> BootVerifier {
        Self::verifier(self)
    }

    fn survived(&self, life: BootVerifier) -> Option<Seq> {
        Self::survived(self, life)
    }

    fn write(
        &self,
        object: ObjectId,
        offset: u64,
        data: IoVec,
        when: Stability,
    ) -> ObjectFuture<'_, Ack> {
        Box::pin(async move {
            Self::write(self, object, offset, data, stability(when)).await.map(ack).map_err(fault)
        })
    }

    fn read(&self, object: ObjectId, offset: u64, bytes: u64) -> ObjectFuture<'_, IoVec> {
        Box::pin(async move { Self::read(self, object, offset, bytes).await.map_err(fault) })
    }

    fn commit(&self, upto: Seq) -> ObjectFuture<'_, Seq> {
        Box::pin(async move { Self::commit(self, upto).await.map_err(fault) })
    }

    fn truncate(&self, object: ObjectId, size: u64) -> ObjectFuture<'_, Ack> {
        Box::pin(async move {
            let unstable = levada_log::Stability::Unstable;
            Self::truncate(self, object, size, unstable).await.map(ack).map_err(fault)
        })
    }

    fn punch(&self, object: ObjectId, hole: Hole, when: Stability) -> ObjectFuture<'_, Ack> {
        let Hole { offset, bytes, grows } = hole;
        Box::pin(async move {
            let punched = Self::punch(self, object, offset, bytes, grows, stability(when)).await;
            punched.map(ack).map_err(fault)
        })
    }

    fn data_ranges(
        &self,
        object: ObjectId,
        offset: u64,
        ranges_max: u32,
    ) -> ObjectFuture<'_, DataRanges> {
        Box::pin(async move {
            let found = Self::data_ranges(self, object, offset, ranges_max as usize).await;
            found.map(|found| DataRanges { ranges: found.ranges, upto: found.upto }).map_err(fault)
        })
    }

    fn delete(&self, object: ObjectId) -> ObjectFuture<'_, Ack> {
        Box::pin(async move { Self::delete(self, object).await.map(ack).map_err(fault) })
    }

    fn stat(&self, object: ObjectId) -> ObjectFuture<'_, Option<ObjectStat>> {
        Box::pin(async move {
            match Self::stat(self, object).await {
                Ok(stat) => {
                    Ok(Some(ObjectStat { size: stat.size, stored_bytes: stat.stored_bytes }))
                }
                Err(LogError::NoSuchObject) => Ok(None),
                Err(error) => Err(fault(error)),
            }
        })
    }

    fn space(&self) -> ObjectFuture<'_, Space> {
        let space = Self::space(self);
        let space = Space {
            total_bytes: space.total_bytes,
            free_bytes: space.free_bytes,
            coming_bytes: space.coming_bytes,
        };
        Box::pin(std::future::ready(Ok(space)))
    }
}
