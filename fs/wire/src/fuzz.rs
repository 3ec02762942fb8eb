//! The decoders of this crate that are not public, for `fuzz/`.

use crate::frame::{decode_body, encode_body};
use crate::rpc::{Answer, Hello};
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// The messages of a handshake. What is taken for one is written again as it was read.
pub fn handshake(input: &[u8]) {
    fn read<T: Serialize + DeserializeOwned + PartialEq + Debug>(body: &[u8]) {
        if let Ok(message) = decode_body::<T>(body) {
            assert_eq!(decode_body::<T>(&encode_body(&message)).ok(), Some(message));
        }
    }
    read::<Answer>(input);
    read::<Hello>(input);
    if let Ok(hello) = decode_body::<Hello>(input) {
        let _ = hello.judge([1; 16], 1);
    }
}

/// See `sharing::fuzz`: what a neighbour says of shared memory.
pub fn sharing(input: &[u8]) {
    crate::sharing::fuzz(input);
}
