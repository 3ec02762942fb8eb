//! The reference model of a volume, for tests: a vector of bytes.

use crate::volume::{Volume, Zeroing};
use levada_base::lent::Lender;
use levada_base::reactor::random_u64;
use levada_base::units::{BLOCK_BYTES, round_down, round_up};
use levada_base::{Buf, IoVec, LentVec};
use levada_device::Durability;

/// The bytes from `at` on, in one of the ways to read them.
///
/// # Panics
///
/// When they cannot be read.
pub async fn read(volume: &dyn Volume, at: u64, bytes: u64) -> Vec<u8> {
    if random_u64().is_multiple_of(2) {
        return read_into(volume, at, bytes).await;
    }
    let read = volume.read(at, bytes).await.expect("read");
    let read = levada_base::buf::joined(&read);
    assert_eq!(read.len() as u64, bytes, "exactly what was asked for");
    read
}

/// The same, into up to three pieces of memory that is lent, cut anywhere or between blocks.
async fn read_into(volume: &dyn Volume, at: u64, bytes: u64) -> Vec<u8> {
    let lender = Lender::new(bytes as usize);
    let unit = if random_u64().is_multiple_of(2) { BLOCK_BYTES } else { 1 };
    let (mut pieces, mut from) = (LentVec::new(), 0);
    for _ in 0..random_u64() % 3 {
        let to = from + round_down(random_u64() % (bytes - from + 1), unit);
        pieces.push(lender.lend(from as usize, (to - from) as usize));
        from = to;
    }
    pieces.push(lender.lend(from as usize, (bytes - from) as usize));
    volume.read_into(at, pieces).await.expect("read");
    lender.bytes()
}

/// `data` in up to three buffers that lie anywhere.
fn in_pieces(data: &[u8]) -> IoVec {
    let mut pieces = IoVec::new();
    let mut rest = data;
    for _ in 0..random_u64() % 3 {
        let (head, tail) = rest.split_at(random_u64() as usize % (rest.len() + 1));
        pieces.push(Buf::copy_of(head));
        rest = tail;
    }
    pieces.push(Buf::copy_of(rest));
    pieces
}

/// Does `rounds` random requests of any offset and length, one after another, to a volume that reads as zeroes, and
/// compares it with a vector of bytes to which the same was done.
///
/// # Panics
///
/// When they differ, or a request fails.
pub async fn compare(volume: &dyn Volume, rounds: u64) {
    let size = volume.size_bytes();
    let mut model = vec![0; size as usize];
    for round in 0..rounds {
        let mut bytes = 1 + match random_u64() % 3 {
            0 => random_u64() % 600,
            1 => random_u64() % 20_000,
            _ => random_u64() % 300_000,
        };
        let mut at = random_u64() % size;
        if random_u64().is_multiple_of(3) {
            at = round_down(at, BLOCK_BYTES);
            if random_u64().is_multiple_of(2) {
                bytes = round_up(bytes, BLOCK_BYTES);
            }
        }
        let bytes = bytes.min(size - at);
        let part = at as usize..(at + bytes) as usize;
        match random_u64() % 7 {
            0 | 1 => {
                let data = vec![round as u8 | 1; bytes as usize];
                let durability =
                    if round % 8 == 0 { Durability::Fua } else { Durability::Volatile };
                volume.write(at, in_pieces(&data), durability).await.expect("written");
                model[part].copy_from_slice(&data);
            }
            2 => {
                let zeroing = if round % 2 == 0 { Zeroing::Free } else { Zeroing::Keep };
                volume.write_zeroes(at, bytes, zeroing).await.expect("zeroed");
                model[part].fill(0);
            }
            3 => {
                volume.discard(at, bytes).await.expect("discarded");
                let now = read(volume, at, bytes).await;
                for (old, new) in model[part].iter_mut().zip(now) {
                    assert!(new == *old || new == 0, "old bytes or zeroes");
                    *old = new;
                }
            }
            4 => check_extents(volume, &model, at, bytes).await,
            5 => volume.flush().await.expect("flushed"),
            _ => {
                let now = read(volume, at, bytes).await;
                assert!(now == model[part], "round {round}: {bytes} bytes at {at}");
            }
        }
    }
    assert!(read(volume, 0, size).await == model, "the whole volume");
}

async fn check_extents(volume: &dyn Volume, model: &[u8], at: u64, bytes: u64) {
    let told = volume.extents(at, bytes).await.expect("told");
    let mut at = at as usize;
    let end = at + bytes as usize;
    assert!(!told.is_empty(), "never nothing");
    for (index, extent) in told.iter().enumerate() {
        let part = &model[at..at + extent.bytes as usize];
        assert!(extent.is_allocated || part.iter().all(|byte| *byte == 0), "a hole has no data");
        let is_like_the_last = index > 0 && told[index - 1].is_allocated == extent.is_allocated;
        assert!(extent.bytes > 0 && !is_like_the_last, "{told:?}");
        at += extent.bytes as usize;
    }
    assert!(at <= end, "no more than was asked for");
}
