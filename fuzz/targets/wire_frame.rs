//! A frame of the wire: header, body, payload.
#![no_main]

use levada_base::checksum::crc32c;
use levada_wire::frame::{Frame, HEADER_BYTES};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = Frame::parse(bytes);
    let Some(rest) = bytes.get(HEADER_BYTES..) else { return };
    // The same with every checksum right.
    let mut sealed = bytes.to_vec();
    let body =
        (u32::from_le_bytes([bytes[92], bytes[93], bytes[94], bytes[95]]) as usize).min(rest.len());
    let payload = (u32::from_le_bytes([bytes[96], bytes[97], bytes[98], bytes[99]]) as usize)
        .min(rest.len() - body);
    sealed[100..104].copy_from_slice(&crc32c(&rest[..body]).to_le_bytes());
    sealed[104..108].copy_from_slice(&crc32c(&rest[body..body + payload]).to_le_bytes());
    let crc = crc32c(&sealed[..HEADER_BYTES - 4]);
    sealed[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    if let Ok(Some((frame, taken))) = Frame::parse(&sealed) {
        let mut again = frame.encode_head().to_vec();
        again.extend_from_slice(&frame.payload_joined());
        assert_eq!(again, sealed[..taken]);
    }
});
