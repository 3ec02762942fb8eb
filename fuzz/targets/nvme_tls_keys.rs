//! Keys of TLS as people write them, and how hosts name them in their first message.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    levada_nvme::fuzz::tls_keys(bytes);
    levada_tls::fuzz::identities(bytes);
});
