//! The table of a pool: which volume has which stripes, and its form on the array.
//!
//! ```text
//! header (64 bytes)                      each volume, by name, behind it without gaps
//!  0  8  magic "LVDPOOL\0"                0 16  UUID
//!  8  2  version: 1, or 2                16  8  size in bytes
//! 10  2  0                               24  4  number of runs
//! 12  4  CRC32C of all, with 0 here      28  2  bytes of the limits
//! 16  8  sequence                        30  1  bytes of the tenant's name
//! 24  4  bytes, header included          31  1  bytes of the volume's name
//! 28  4  number of volumes               32     tenant, name, limits (JSON; none: 0 bytes)
//! 32  8  bytes of a stripe                      runs: 8 first stripe, 8 number of stripes, ...
//! 40 24  0                               version 2: 4 bytes of reservations, reservations
//! ```
//!
//! Numbers are little-endian. A table is of version 2 only if a volume has reservations: whoever does not know of them must not let anybody write
//! there. What always holds of a table that was read: names, UUIDs and runs are each of one volume
//! only, every run lies in the array and behind the table, and every volume has exactly the stripes that its size takes.

use super::space::{self, Run};
use crate::name::{Tenant, VolumeName};
use levada_base::checksum::{crc32c, crc32c_parts};
use levada_base::ids::Uuid;
use levada_base::units::{BLOCK_BYTES, KIB};
use levada_raid::ArrayGeometry;
use std::collections::{BTreeMap, BTreeSet};

/// Most bytes of a table.
pub(crate) const TABLE_BYTES_MAX: u64 = 256 * KIB;
/// Copies of the table on the array.
pub(super) const COPIES: u64 = 2;
pub(super) const MAGIC: &[u8; 8] = b"LVDPOOL\0";
const VERSION: u16 = 1;
const VERSION_RESERVED: u16 = 2;
const CRC_AT: usize = 12;
const HEADER_BYTES: usize = 64;
const VOLUME_BYTES: usize = 32;
const RUN_BYTES: usize = 16;

/// What of an array a table can speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub stripe_bytes: u64,
    /// Of the whole array.
    pub stripes: u64,
}

impl Bounds {
    pub fn of(geometry: ArrayGeometry) -> Self {
        Self { stripe_bytes: geometry.stripe_bytes, stripes: geometry.stripes }
    }

    /// Stripes that one copy of the table has to itself, so that writing it tears nothing else.
    fn stripes_of_copy(&self) -> u64 {
        TABLE_BYTES_MAX.div_ceil(self.stripe_bytes)
    }

    /// Byte of the array at which a copy begins.
    pub fn copy_at(&self, copy: u64) -> u64 {
        copy * self.stripes_of_copy() * self.stripe_bytes
    }

    /// The stripes of a copy.
    pub fn copy(&self, copy: u64) -> Run {
        copy * self.stripes_of_copy()..(copy + 1) * self.stripes_of_copy()
    }

    /// The stripes that volumes can have; empty when the array is too small for any.
    pub fn room(&self) -> Run {
        let first = COPIES * self.stripes_of_copy();
        first..self.stripes.max(first)
    }

    /// Stripes that `bytes` take.
    pub fn stripes_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.stripe_bytes)
    }
}

/// Why bytes are no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableFault {
    #[error("there is no table of volumes")]
    None,
    #[error("it cannot be read")]
    Unreadable,
    #[error("its version is {version}, and this program knows {VERSION} and {VERSION_RESERVED}")]
    Version { version: u16 },
    #[error("it says that it has {bytes} bytes")]
    Length { bytes: u64 },
    #[error("its checksum is wrong")]
    Checksum,
    #[error("it speaks of stripes of {stripe_bytes} bytes, which the array has not")]
    Stripes { stripe_bytes: u64 },
    #[error("its version is for reservations, and it has none")]
    NoReservations,
    #[error("its bytes end before its volumes do, or after")]
    Volumes,
    #[error("fields that have no meaning yet have a value")]
    Reserved,
    #[error("its sequence is the last one")]
    Sequence,
    #[error("a volume has no right name, or one that another has")]
    Name,
    #[error("two volumes are {uuid}")]
    Uuid { uuid: Uuid },
    #[error("volume {name} has {stripes} stripes for {size_bytes} bytes")]
    Size { name: VolumeName, size_bytes: u64, stripes: u64 },
    #[error("volume {name} has {stripes} stripes from {first} on, which are not all for volumes")]
    Outside { name: VolumeName, first: u64, stripes: u64 },
    #[error("stripe {stripe} is of two volumes")]
    Shared { stripe: u64 },
}

/// A volume in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub uuid: Uuid,
    pub size_bytes: u64,
    /// In the order of the volume's bytes.
    pub runs: Vec<Run>,
    /// What it may use, as JSON; empty where nothing was ever set. What a later program wrote there is kept as it is.
    pub limits: Vec<u8>,
    /// Who has reserved it over NVMe, as whoever shows it there keeps that; empty: nobody.
    pub reservations: Vec<u8>,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    /// The newer of two tables has the higher one.
    pub sequence: u64,
    pub volumes: BTreeMap<VolumeName, Entry>,
}

/// Takes numbers off the front of bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn text(&mut self, len: usize) -> Option<&'a str> {
        self.bytes(len).and_then(|bytes| std::str::from_utf8(bytes).ok())
    }
}

impl Table {
    /// Its bytes, as many as it needs.
    pub fn encode(&self, bounds: &Bounds) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let version = self.version();
        for (name, entry) in &self.volumes {
            let tenant = name.tenant.as_str();
            bytes.extend(entry.uuid.as_bytes());
            bytes.extend(entry.size_bytes.to_le_bytes());
            bytes.extend((entry.runs.len() as u32).to_le_bytes());
            bytes.extend((entry.limits.len() as u16).to_le_bytes());
            // Names have 63 bytes at most.
            bytes.extend([tenant.len() as u8, name.name().len() as u8]);
            for text in [tenant.as_bytes(), name.name().as_bytes(), &entry.limits] {
                bytes.extend(text);
            }
            for run in &entry.runs {
                bytes.extend(run.start.to_le_bytes());
                bytes.extend((run.end - run.start).to_le_bytes());
            }
            if version == VERSION_RESERVED {
                bytes.extend((entry.reservations.len() as u32).to_le_bytes());
                bytes.extend(&entry.reservations);
            }
        }
        bytes[8..10].copy_from_slice(&version.to_le_bytes());
        let len = bytes.len() as u32;
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[28..32].copy_from_slice(&(self.volumes.len() as u32).to_le_bytes());
        bytes[32..40].copy_from_slice(&bounds.stripe_bytes.to_le_bytes());
        Self::seal(&mut bytes, len);
        bytes
    }

    fn version(&self) -> u16 {
        match self.volumes.values().any(|entry| !entry.reservations.is_empty()) {
            true => VERSION_RESERVED,
            false => VERSION,
        }
    }

    /// Makes magic, version, length and checksum right, so that a fuzzer gets past them.
    pub fn seal(bytes: &mut [u8], len: u32) {
        bytes[..8].copy_from_slice(MAGIC);
        let version = u16::from_le_bytes([bytes[8], bytes[9]]).clamp(VERSION, VERSION_RESERVED);
        bytes[8..10].copy_from_slice(&version.to_le_bytes());
        bytes[CRC_AT..16].fill(0);
        bytes[24..28].copy_from_slice(&len.to_le_bytes());
        let crc = crc32c(bytes);
        bytes[CRC_AT..16].copy_from_slice(&crc.to_le_bytes());
    }

    /// How many bytes the table has that begins with `head`, at least a block of the array.
    ///
    /// # Errors
    ///
    /// [`TableFault::None`], [`TableFault::Version`], [`TableFault::Length`].
    pub fn length(head: &[u8]) -> Result<usize, TableFault> {
        let mut reader = Reader(head);
        if reader.array() != Some(*MAGIC) {
            return Err(TableFault::None);
        }
        let version = reader.array().map(u16::from_le_bytes).ok_or(TableFault::None)?;
        if !(VERSION..=VERSION_RESERVED).contains(&version) {
            return Err(TableFault::Version { version });
        }
        let bytes = head.get(24..28).and_then(|bytes| Reader(bytes).u32());
        let bytes = u64::from(bytes.ok_or(TableFault::None)?);
        match (HEADER_BYTES as u64..=TABLE_BYTES_MAX).contains(&bytes) {
            true => Ok(bytes as usize),
            false => Err(TableFault::Length { bytes }),
        }
    }

    /// Reads a table; what is behind it is not looked at.
    ///
    /// # Errors
    ///
    /// [`TableFault`].
    pub fn decode(bytes: &[u8], bounds: &Bounds) -> Result<Self, TableFault> {
        let len = Self::length(bytes)?;
        let bytes = bytes.get(..len).ok_or(TableFault::Length { bytes: len as u64 })?;
        let crc = crc32c_parts([&bytes[..CRC_AT], &[0; 4], &bytes[16..]]);
        if bytes[CRC_AT..16] != crc.to_le_bytes() {
            return Err(TableFault::Checksum);
        }
        if bytes[10..12].iter().chain(&bytes[40..HEADER_BYTES]).any(|byte| *byte != 0) {
            return Err(TableFault::Reserved);
        }
        let mut reader = Reader(&bytes[16..]);
        let sequence = reader.u64().ok_or(TableFault::Volumes)?;
        if sequence == u64::MAX {
            return Err(TableFault::Sequence);
        }
        let _len = reader.u32();
        let count = reader.u32().ok_or(TableFault::Volumes)?;
        let stripe_bytes = reader.u64().ok_or(TableFault::Volumes)?;
        if stripe_bytes != bounds.stripe_bytes {
            return Err(TableFault::Stripes { stripe_bytes });
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        let mut table = Self { sequence, volumes: BTreeMap::new() };
        let mut reader = Reader(&bytes[HEADER_BYTES..]);
        for _ in 0..count {
            let (name, entry) = Entry::read(&mut reader, version)?;
            // In order, so that there is one form of every table.
            if table.volumes.last_key_value().is_some_and(|(last, _)| *last >= name) {
                return Err(TableFault::Name);
            }
            table.volumes.insert(name, entry);
        }
        if !reader.0.is_empty() {
            return Err(TableFault::Volumes);
        }
        if version != table.version() {
            return Err(TableFault::NoReservations);
        }
        table.check(bounds)?;
        Ok(table)
    }

    /// What the module promises of stripes and UUIDs.
    pub fn check(&self, bounds: &Bounds) -> Result<(), TableFault> {
        let room = bounds.room();
        let (mut uuids, mut all) = (BTreeSet::new(), Vec::new());
        for (name, entry) in &self.volumes {
            if !uuids.insert(entry.uuid) {
                return Err(TableFault::Uuid { uuid: entry.uuid });
            }
            for run in &entry.runs {
                if run.start >= run.end || run.start < room.start || run.end > room.end {
                    let (first, stripes) = (run.start, run.end.saturating_sub(run.start));
                    return Err(TableFault::Outside { name: name.clone(), first, stripes });
                }
                all.push(run.clone());
            }
            // Runs within the array: the sum of a full table of them is far below 2^64.
            let (size_bytes, stripes) = (entry.size_bytes, space::stripes_in(&entry.runs));
            let is_size = size_bytes > 0 && size_bytes.is_multiple_of(BLOCK_BYTES);
            if !is_size || stripes != bounds.stripes_for(size_bytes) {
                return Err(TableFault::Size { name: name.clone(), size_bytes, stripes });
            }
        }
        all.sort_unstable_by_key(|run| run.start);
        match all.windows(2).find(|two| two[0].end > two[1].start) {
            Some(two) => Err(TableFault::Shared { stripe: two[1].start }),
            None => Ok(()),
        }
    }

    /// The stripes that no volume has.
    pub fn free(&self, bounds: &Bounds) -> Vec<Run> {
        let used = self.volumes.values().flat_map(|entry| entry.runs.iter().cloned());
        space::free(bounds.room(), used)
    }
}

impl Entry {
    fn read(reader: &mut Reader, version: u16) -> Result<(VolumeName, Self), TableFault> {
        const SHORT: TableFault = TableFault::Volumes;
        let mut fixed = Reader(reader.bytes(VOLUME_BYTES).ok_or(SHORT)?);
        let uuid = Uuid::from_bytes(fixed.array().ok_or(SHORT)?);
        let size_bytes = fixed.u64().ok_or(SHORT)?;
        let runs = fixed.u32().ok_or(SHORT)?;
        let limits = fixed.array().map(u16::from_le_bytes).ok_or(SHORT)?;
        let [tenant, name] = fixed.array().ok_or(SHORT)?;
        let tenant: Option<Tenant> = reader.text(tenant.into()).and_then(|text| text.parse().ok());
        let name = reader.text(name.into());
        let (tenant, name) = tenant.zip(name).ok_or(TableFault::Name)?;
        let name = VolumeName::new(tenant, name).map_err(|_| TableFault::Name)?;
        let limits = reader.bytes(limits.into()).ok_or(SHORT)?.to_vec();
        // Not reserved before they are known to be there: their number is a stranger's.
        let len = (runs as usize).checked_mul(RUN_BYTES).ok_or(SHORT)?;
        let mut runs_of = Reader(reader.bytes(len).ok_or(SHORT)?);
        let mut runs = Vec::new();
        while let (Some(first), Some(stripes)) = (runs_of.u64(), runs_of.u64()) {
            let outside = || TableFault::Outside { name: name.clone(), first, stripes };
            runs.push(first..first.checked_add(stripes).ok_or_else(outside)?);
        }
        let reservations = match version {
            VERSION_RESERVED => {
                let len = reader.u32().ok_or(SHORT)?;
                reader.bytes(len as usize).ok_or(SHORT)?.to_vec()
            }
            _ => Vec::new(),
        };
        Ok((name, Self { uuid, size_bytes, runs, limits, reservations }))
    }
}

#[cfg(test)]
mod tests;
