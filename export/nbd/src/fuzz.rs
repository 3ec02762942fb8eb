//! Entry points for the fuzzer: everything that reads bytes of a client.

use crate::option::{ClientOption, OPTION_HEAD_BYTES, option_head};
use crate::request::{EXTENDED_REQUEST_BYTES, REQUEST_BYTES, Request};

/// Reads options until the bytes are used up, as a connection does.
pub fn options(bytes: &[u8]) {
    let mut rest = bytes;
    while let Some((head, behind)) = rest.split_first_chunk::<OPTION_HEAD_BYTES>() {
        let Some((kind, bytes)) = option_head(head) else { return };
        let Some((data, behind)) = behind.split_at_checked(bytes as usize) else { return };
        assert_eq!(ClientOption::parse(kind, data).kind(), kind);
        rest = behind;
    }
}

/// Reads a request in both forms.
pub fn requests(bytes: &[u8]) {
    for (is_extended, head_bytes) in [(false, REQUEST_BYTES), (true, EXTENDED_REQUEST_BYTES)] {
        let Some(head) = bytes.get(..head_bytes) else { continue };
        if let Ok(request) = Request::parse(head, is_extended) {
            assert!(request.payload_bytes(is_extended) <= request.bytes);
            let _ = request.has_sound_flags();
        }
    }
}
