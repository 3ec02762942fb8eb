//! Entry points for the fuzzer: everything that reads bytes from an array.

use crate::linear::{Bounds, Table};

/// The table of a pool: what is taken for one is written again as it was read.
pub fn pool_table(input: &[u8]) {
    let bounds = Bounds { stripe_bytes: 64 << 10, stripes: 1 << 12 };
    let _ = Table::decode(input, &bounds);
    let mut bytes = input.to_vec();
    // So that a header is whole, and most of the noise is of volumes.
    bytes.resize(bytes.len().max(64), 0);
    let len = bytes.len() as u32;
    bytes[10..12].fill(0);
    bytes[32..40].copy_from_slice(&bounds.stripe_bytes.to_le_bytes());
    bytes[40..64].fill(0);
    Table::seal(&mut bytes, len);
    if let Ok(table) = Table::decode(&bytes, &bounds) {
        assert_eq!(table.encode(&bounds), bytes, "there is one form of every table");
        let _ = table.free(&bounds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Volumes as they could be, and noise of any other kind.
    fn volumes() -> impl Strategy<Value = Vec<u8>> {
        let run = (0..100u64, 0..4u64)
            .prop_map(|(first, stripes)| [first.to_le_bytes(), stripes.to_le_bytes()].concat());
        let volume = (any::<[u8; 1]>(), 0..5u64, 0..3u32, prop::collection::vec(run, 0..3));
        let volume = volume.prop_map(|(name, blocks, runs, bytes)| {
            let size = (blocks * (64 << 10)).to_le_bytes();
            let fixed = [&[name[0]; 16], &size[..], &runs.to_le_bytes(), &[0, 0, 1, 1]].concat();
            [&fixed[..], &[b'a', name[0] % 4 + b'a'], &bytes.concat()].concat()
        });
        let volumes = prop::collection::vec(volume, 0..4);
        volumes.prop_map(|volumes| {
            let mut header = vec![0; 64];
            header[16] = 7;
            header[28] = volumes.len() as u8;
            [header, volumes.concat()].concat()
        })
    }

    proptest! {
        #[test]
        fn odd_bytes_do_no_harm(noise in prop::collection::vec(any::<u8>(), 0..300), volumes in volumes()) {
            pool_table(&noise);
            pool_table(&volumes);
        }
    }
}
