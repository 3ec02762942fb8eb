//! What a target did and how long it took, for status, `top` and survey.

use levada_base::meter::Meter;
use levada_base::units::KIB;
use levada_wire::object::ObjectRequest;
use std::cell::Cell;

/// Payloads up to these bytes are told apart, and larger ones.
pub const SIZES: [(&str, u64); 4] = [
    ("<= 4 KiB", 4 * KIB),
    ("<= 64 KiB", 64 * KIB),
    ("<= 512 KiB", 512 * KIB),
    ("<= 2 MiB", 2048 * KIB),
];
const LARGER: &str = "> 2 MiB";

/// All meters of a target since its start.
#[derive(Debug, Default)]
pub struct Meters {
    writes: [Meter; SIZES.len() + 1],
    reads: [Meter; SIZES.len() + 1],
    commit: Meter,
    stat: Meter,
    truncate: Meter,
    delete: Meter,
    other: Meter,
    /// Requests that have begun and not ended.
    pub in_flight: Cell<u64>,
    /// Changes that were repeated and not done again.
    pub repeated: Cell<u64>,
    /// Requests refused because they named an earlier life of the target.
    pub restarted: Cell<u64>,
}

/// What a request is counted as.
#[derive(Clone, Copy)]
pub(crate) enum Op {
    Write,
    Read,
    Commit,
    Stat,
    Truncate,
    Delete,
    Other,
}

impl Op {
    pub(crate) fn of(request: &ObjectRequest) -> Self {
        match request {
            ObjectRequest::Write { .. } => Self::Write,
            ObjectRequest::Read { .. } => Self::Read,
            ObjectRequest::Commit { .. } => Self::Commit,
            ObjectRequest::Stat { .. } => Self::Stat,
            ObjectRequest::Truncate { .. } => Self::Truncate,
            ObjectRequest::Delete { .. } => Self::Delete,
            ObjectRequest::Space
            | ObjectRequest::Punch { .. }
            | ObjectRequest::DataRanges { .. } => Self::Other,
        }
    }
}

fn size_class(bytes: u64) -> usize {
    SIZES.iter().position(|(_, most)| bytes <= *most).unwrap_or(SIZES.len())
}

impl Meters {
    /// The meter of an operation with so many bytes of payload.
    pub(crate) fn of(&self, op: Op, bytes: u64) -> &Meter {
        match op {
            Op::Write => &self.writes[size_class(bytes)],
            Op::Read => &self.reads[size_class(bytes)],
            Op::Commit => &self.commit,
            Op::Stat => &self.stat,
            Op::Truncate => &self.truncate,
            Op::Delete => &self.delete,
            Op::Other => &self.other,
        }
    }

    /// Every meter with its kind and, of reads and writes, the size of their payload.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, &Meter)> {
        let sizes = || SIZES.iter().map(|(size, _)| *size).chain([LARGER]);
        let sized =
            |kind, meters| sizes().zip(meters).map(move |(size, meter)| (kind, size, meter));
        let others = [
            ("Commit", &self.commit),
            ("Stat", &self.stat),
            ("Truncate", &self.truncate),
            ("Delete", &self.delete),
            ("Other", &self.other),
        ];
        let others = others.into_iter().map(|(kind, meter)| (kind, "", meter));
        sized("Write", &self.writes).chain(sized("Read", &self.reads)).chain(others)
    }

    /// Bytes read.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.reads.iter().map(|meter| meter.bytes.get()).sum()
    }

    /// Bytes written.
    #[must_use]
    pub fn bytes_written(&self) -> u64 {
        self.writes.iter().map(|meter| meter.bytes.get()).sum()
    }

    /// Requests that ended.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.all().map(|(_, _, meter)| meter.count.get()).sum()
    }

    /// Of these, those that ended with a fault.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.all().map(|(_, _, meter)| meter.failed.get()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn payloads_are_told_apart_by_size() {
        let meters = Meters::default();
        let took = Duration::from_micros(3);
        for bytes in [1, 4096, 4097, 1 << 20, 3 << 20] {
            meters.of(Op::Write, bytes).add(bytes, took, false);
        }
        meters.of(Op::Read, 0).add(0, took, true);
        let counts: Vec<_> =
            meters.all().map(|(_, size, meter)| (size, meter.count.get())).take(5).collect();
        let expected =
            [("<= 4 KiB", 2), ("<= 64 KiB", 1), ("<= 512 KiB", 0), ("<= 2 MiB", 1), ("> 2 MiB", 1)];
        assert_eq!(counts, expected);
        assert_eq!((meters.requests(), meters.failed(), meters.bytes_read()), (6, 1, 0));
        assert_eq!(meters.bytes_written(), 1 + 4096 + 4097 + (4 << 20));
    }
}
