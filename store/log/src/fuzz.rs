//! The parsers of this crate for `fuzz/`: bytes from an array or the store, with checksums that
//! are right.

use crate::format::{FOOTER_BYTES, Footer, RecordHeader, seal_footer, seal_record};
use crate::rows::{Lives, LogRow, ObjectRow, SegmentRow, decode_extent, encode_extent};
use levada_base::units::MIB;

/// The end of a stripe: footer, and the record headers that it describes.
pub fn footer(input: &[u8]) {
    let _ = Footer::decode(input, MIB);
    let mut tail = input.to_vec();
    // Every header on the way, as far as they are headers.
    let mut at = 0;
    while tail.len() > at + FOOTER_BYTES && seal_record(&mut tail[at..]).is_some() {
        match RecordHeader::decode(&tail[at..]) {
            Some((_, taken)) => at += taken,
            None => break,
        }
    }
    if seal_footer(&mut tail).is_none() {
        return;
    }
    let Some(footer) = Footer::decode(&tail, MIB) else { return };
    let bytes = footer.encode();
    assert_eq!(Footer::decode(&bytes, MIB), Some(footer));
    if let Some(records) = footer.records(&tail) {
        assert_eq!(records.len(), footer.records as usize);
    }
}

/// A record header: what is taken for one is written again as it was read.
pub fn record(input: &[u8]) {
    let _ = RecordHeader::decode(input);
    let mut bytes = input.to_vec();
    if seal_record(&mut bytes).is_none() {
        return;
    }
    let Some((header, taken)) = RecordHeader::decode(&bytes) else { return };
    let mut again = Vec::new();
    header.encode(&mut again);
    assert_eq!(again.len(), taken);
    assert_eq!(RecordHeader::decode(&again), Some((header, taken)));
}

/// The rows of the index; the first 40 bytes are the key.
pub fn rows(input: &[u8]) {
    let (key, value) = input.split_at(input.len().min(40));
    for key in [key, &key[..key.len().min(5)], &key[..key.len().min(29)]] {
        let _ = (SegmentRow::decode(key, value), ObjectRow::id(key));
        if let Ok((offset, extent)) = decode_extent(key, value) {
            let again = encode_extent(offset, &extent);
            assert!(decode_extent(key, &again).is_ok());
        }
    }
    if let Ok(row) = LogRow::decode(value) {
        assert_eq!(LogRow::decode(&row.encode()).ok(), Some(row));
    }
    if let Ok(lives) = Lives::decode(value) {
        assert_eq!(Lives::decode(&lives.encode()).ok(), Some(lives));
    }
    if let Ok(row) = ObjectRow::decode(value) {
        assert_eq!(ObjectRow::decode(&row.encode()).ok(), Some(row));
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn odd_bytes_do_no_harm() {
        for input in [&[][..], &[0; 5000], &[255; 4096]] {
            super::footer(input);
            super::record(input);
            super::rows(input);
        }
    }
}
