//! Reservations as a target keeps them over a loss of power (Base, 8.8: "persist through power loss").
//!
//! ```text
//! header (32 bytes)                              each host that is registered, ascending, behind it
//!  0  8  magic "LVDRESV\0"                        0 16  its identifier
//!  8  2  version: 1                              16  8  its key
//! 10  2  number of hosts
//! 12  4  CRC32C of all, with 0 here
//! 16  4  generation
//! 20  1  type of what is held; 0: nothing is
//! 21  1  0
//! 22  2  who holds it: the number of the host, from 0 on; 0 where nothing is held
//! 24  8  0
//! ```
//!
//! Numbers are little-endian. There is one form of everything that is kept. What is damaged is no reservation *less*: whoever reads it
//! has to refuse the namespace, as it may have been another's.

use crate::field::{array, put, u16_at, u32_at, u64_at};
use crate::reservation::ReservationType;
use levada_base::checksum::crc32c_parts;
use std::collections::BTreeMap;

const MAGIC: &[u8; 8] = b"LVDRESV\0";
const VERSION: u16 = 1;
const CRC_AT: usize = 12;
const HEADER_BYTES: usize = 32;
const HOST_BYTES: usize = 24;
/// Hosts that are registered with a namespace at once; more would be an attempt to fill memory.
pub const REGISTRANTS_MAX: usize = 1024;

/// Who is registered with a namespace, and who holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptReservations {
    pub generation: u32,
    /// By identifiers of hosts.
    pub keys: BTreeMap<[u8; 16], u64>,
    /// One of those that are registered.
    pub held: Option<([u8; 16], ReservationType)>,
}

/// Why bytes say nothing of reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeptFault {
    #[error("they do not begin as reservations do")]
    Magic,
    #[error("their version is {version}, and this program knows {VERSION}")]
    Version { version: u16 },
    #[error("they have {bytes} bytes, and say that they are of {hosts} hosts")]
    Length { bytes: usize, hosts: u16 },
    #[error("their checksum is wrong")]
    Checksum,
    #[error("fields that have no meaning yet have a value")]
    Reserved,
    #[error("hosts are not in their order")]
    Order,
    #[error("what is held is of no type that there is, or held by nobody")]
    Holder,
}

impl KeptReservations {
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        put(&mut bytes, 16, &self.generation.to_le_bytes());
        if let Some((by, kind)) = self.held {
            let number = self.keys.keys().position(|host| *host == by);
            let number = number.expect("who holds it is registered") as u16;
            bytes[20] = kind as u8;
            put(&mut bytes, 22, &number.to_le_bytes());
        }
        for (host, key) in &self.keys {
            bytes.extend(host);
            bytes.extend(key.to_le_bytes());
        }
        Self::seal(&mut bytes);
        bytes
    }

    /// Makes magic, version, number of hosts and checksum right, so that a fuzzer gets past them. `bytes` are a header at least.
    pub fn seal(bytes: &mut [u8]) {
        let hosts = ((bytes.len() - HEADER_BYTES) / HOST_BYTES) as u16;
        put(bytes, 0, MAGIC);
        put(bytes, 8, &VERSION.to_le_bytes());
        put(bytes, 10, &hosts.to_le_bytes());
        let crc = Self::checksum(bytes);
        put(bytes, CRC_AT, &crc.to_le_bytes());
    }

    fn checksum(bytes: &[u8]) -> u32 {
        crc32c_parts([&bytes[..CRC_AT], &[0; 4], &bytes[CRC_AT + 4..]])
    }

    /// # Errors
    ///
    /// [`KeptFault`].
    pub fn parse(bytes: &[u8]) -> Result<Self, KeptFault> {
        let length = KeptFault::Length { bytes: bytes.len(), hosts: 0 };
        let header = bytes.get(..HEADER_BYTES).ok_or(length)?;
        if header[..8] != *MAGIC {
            return Err(KeptFault::Magic);
        }
        let (version, hosts) = (u16_at(header, 8), u16_at(header, 10));
        if version != VERSION {
            return Err(KeptFault::Version { version });
        }
        let count = usize::from(hosts);
        if count > REGISTRANTS_MAX || bytes.len() != HEADER_BYTES + count * HOST_BYTES {
            return Err(KeptFault::Length { bytes: bytes.len(), hosts });
        }
        if Self::checksum(bytes) != u32_at(header, CRC_AT) {
            return Err(KeptFault::Checksum);
        }
        if header[21] != 0 || header[24..].iter().any(|byte| *byte != 0) {
            return Err(KeptFault::Reserved);
        }
        let mut kept = Self { generation: u32_at(header, 16), ..Self::default() };
        let (entries, _) = bytes[HEADER_BYTES..].as_chunks::<HOST_BYTES>();
        for entry in entries {
            let host = array(entry, 0);
            if kept.keys.last_key_value().is_some_and(|(last, _)| *last >= host) {
                return Err(KeptFault::Order);
            }
            kept.keys.insert(host, u64_at(entry, 16));
        }
        let (kind, holder) = (header[20], u16_at(header, 22));
        kept.held = match (kind, holder) {
            (0, 0) => None,
            (kind, holder) => {
                let by = entries.get(usize::from(holder)).map(|entry| array(entry, 0));
                Some(by.zip(ReservationType::of(kind)).ok_or(KeptFault::Holder)?)
            }
        };
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_kept() -> impl Strategy<Value = KeptReservations> {
        let keys = prop::collection::btree_map(any::<[u8; 16]>(), any::<u64>(), 0..6);
        let holder = prop::option::of((any::<prop::sample::Index>(), 0_usize..6));
        (any::<u32>(), keys, holder).prop_map(|(generation, keys, holder)| {
            let held = holder.filter(|_| !keys.is_empty()).map(|(at, kind)| {
                (
                    *keys.keys().nth(at.index(keys.len())).expect("so many"),
                    ReservationType::ALL[kind],
                )
            });
            KeptReservations { generation, keys, held }
        })
    }

    proptest! {
        #[test]
        fn what_is_kept_is_read_as_it_was(kept in any_kept()) {
            prop_assert_eq!(KeptReservations::parse(&kept.to_bytes()), Ok(kept));
        }

        /// Whatever bit of it turns: a reservation is never forgotten, nor given to another.
        #[test]
        fn damage_is_noticed(kept in any_kept(), at in any::<prop::sample::Index>(), bit in 0..8_u32) {
            let mut bytes = kept.to_bytes();
            let at = at.index(bytes.len());
            bytes[at] ^= 1_u8 << bit;
            prop_assert!(KeptReservations::parse(&bytes).is_err());
        }

        #[test]
        fn what_is_cut_off_is_noticed(kept in any_kept(), at in any::<prop::sample::Index>()) {
            let bytes = kept.to_bytes();
            prop_assert!(KeptReservations::parse(&bytes[..at.index(bytes.len())]).is_err());
        }
    }

    #[test]
    fn nothing_but_what_is_drawn_is_read() {
        let keys = BTreeMap::from([([1; 16], 7)]);
        let kept = KeptReservations { generation: 3, keys, held: None };
        for (at, value, fault) in [
            (20, 1, None),
            (20, 7, Some(KeptFault::Holder)),
            (22, 1, Some(KeptFault::Holder)),
            (21, 1, Some(KeptFault::Reserved)),
            (31, 1, Some(KeptFault::Reserved)),
        ] {
            let mut bytes = kept.to_bytes();
            bytes[at] = value;
            KeptReservations::seal(&mut bytes);
            assert_eq!(KeptReservations::parse(&bytes).err(), fault, "{at}");
        }
    }
}
