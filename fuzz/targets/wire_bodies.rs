//! The messages in frames. What is taken for one is written again as it was read.
#![no_main]

use levada_wire::frame::{decode_body, encode_body};
use levada_wire::meta::{MetaReply, MetaRequest, ToClient, ToService};
use levada_wire::object::{ObjectReply, ObjectRequest, Restarted};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

fn read<T: Serialize + DeserializeOwned + PartialEq + Debug>(body: &[u8]) {
    if let Ok(message) = decode_body::<T>(body) {
        assert_eq!(decode_body::<T>(&encode_body(&message)).ok(), Some(message));
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((which, body)) = bytes.split_first() else { return };
    match which % 8 {
        0 => read::<MetaRequest>(body),
        1 => read::<MetaReply>(body),
        2 => read::<ObjectRequest>(body),
        3 => read::<ObjectReply>(body),
        4 => read::<ToClient>(body),
        5 => read::<Restarted>(body),
        6 => read::<ToService>(body),
        _ => levada_wire::fuzz::handshake(body),
    }
});
