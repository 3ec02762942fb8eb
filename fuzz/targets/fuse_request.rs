//! A request from the kernel's FUSE, which a guest's kernel will be one day.
#![no_main]

use levada_mount::Request;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // As it comes, and with its length right.
    let _ = Request::parse(bytes).map_err(|error| error.unique());
    if bytes.len() >= 4 {
        let mut whole = bytes.to_vec();
        whole[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        if let Ok(request) = Request::parse(&whole) {
            let _ = format!("{request:?}");
        }
    }
});
