//! Entry points for the fuzzer: everything that reads bytes of a client.

mod client;
mod connections;
mod disk;

pub use connections::connections;

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

#[cfg(test)]
mod tests {
    use super::{connections, options, requests};
    use proptest::prelude::*;

    /// Noise, but with what makes it an option or a request.
    fn noise(magic: &'static [u8]) -> impl Strategy<Value = Vec<u8>> {
        let kinds = (0u8..14, 0u8..40, prop::collection::vec(any::<u8>(), 0..200));
        kinds.prop_map(move |(kind, bytes, rest)| {
            [magic, &[0, 0, 0, kind, 0, 0, 0, bytes], &rest].concat()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_options_are_answered(bytes in noise(b"IHAVEOPT")) {
            options(&bytes);
        }

        #[test]
        fn any_requests_are_answered(
            compact in noise(&[0x25, 0x60, 0x95, 0x13]),
            extended in noise(&[0x21, 0xe4, 0x1c, 0x71]),
        ) {
            requests(&compact);
            requests(&extended);
        }

        #[test]
        fn clients_that_say_anything_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            connections(&bytes);
        }
    }
}
