//! Extended headers, which no client in Debian 12 speaks (doc/proto.md, "Extended request message").

use crate::client::{ACK, Client, READ, WRITE};
use crate::served;

const EXTENDED_HEADERS: u32 = 11;
const SET_META_CONTEXT: u32 = 10;
const META_CONTEXT: u32 = 4;
const PAYLOAD_LEN: u16 = 1 << 5;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;
/// Kinds of chunks.
const NONE: u16 = 0;
const OFFSET_DATA: u16 = 1;
const BLOCK_STATUS_EXT: u16 = 6;
const ERROR: u16 = (1 << 15) + 1;
const KIB_64: u64 = 64 << 10;

fn ask(client: &mut Client, (command, flags): (u16, u16), at: u64, bytes: u64) {
    client.put(&0x21e4_1c71u32.to_be_bytes());
    client.put(&[flags.to_be_bytes(), command.to_be_bytes()].concat());
    client.put(&[7, at, bytes].map(u64::to_be_bytes).concat());
}

/// The only chunk of a reply to what was asked at a place: its kind, and what it says.
fn answer(client: &mut Client, at: u64) -> (u16, Vec<u8>) {
    let head = client.take(32);
    let long = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().expect("8 bytes"));
    assert_eq!(head[..6], [0x6e, 0x8a, 0x27, 0x8c, 0, 1], "the magic, and the last chunk");
    assert_eq!((long(8), long(16)), (7, at), "whose answer it is");
    (u16::from_be_bytes([head[6], head[7]]), client.take(long(24) as usize))
}

#[test]
fn requests_and_replies_may_be_extended() {
    let array = served(32 << 20);
    let mut client = Client::greeted(&array);
    client.option(EXTENDED_HEADERS, &[]);
    assert_eq!(client.option_reply(), (ACK, Vec::new()));
    let context = b"base:allocation";
    let query = [&[0; 4][..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), context].concat();
    client.option(SET_META_CONTEXT, &query);
    let (kind, told) = client.option_reply();
    assert_eq!((kind, &told[4..]), (META_CONTEXT, &context[..]));
    let number = told[..4].to_vec();
    assert_eq!(client.option_reply().0, ACK);
    client.go();

    let at = 1 << 20;
    ask(&mut client, (WRITE, PAYLOAD_LEN), at, KIB_64);
    client.put(&[9; KIB_64 as usize]);
    assert_eq!(answer(&mut client, at), (NONE, Vec::new()));
    ask(&mut client, (READ, 0), at, KIB_64);
    let (kind, told) = answer(&mut client, at);
    assert_eq!((kind, &told[..8]), (OFFSET_DATA, &at.to_be_bytes()[..]));
    assert!(told[8..] == [9; KIB_64 as usize]);

    // What is stored, and what is not, in lengths of 64 bits.
    ask(&mut client, (BLOCK_STATUS, 0), 0, 16 << 20);
    let (kind, told) = answer(&mut client, 0);
    assert_eq!((kind, &told[..4]), (BLOCK_STATUS_EXT, &number[..]));
    let extents: Vec<[u64; 2]> = told[8..]
        .chunks_exact(16)
        .map(|pair| [0, 8].map(|at| u64::from_be_bytes(pair[at..at + 8].try_into().expect("8"))))
        .collect();
    assert_eq!(told[4..8], (extents.len() as u32).to_be_bytes());
    let mut places = extents.iter().scan(0, |end, [bytes, state]| {
        *end += bytes;
        Some((*end, *state))
    });
    let (_, state) = places.find(|(end, _)| *end > at).expect("the place that was written");
    assert_eq!(state, 0, "{extents:?}");

    // Longer than 4 GiB, and than the export.
    for command in [WRITE_ZEROES, READ, BLOCK_STATUS] {
        ask(&mut client, (command, 0), 0, 5 << 32);
        let (kind, told) = answer(&mut client, 0);
        let errno = u32::from_be_bytes(told[..4].try_into().expect("4 bytes"));
        assert!(kind == ERROR && [22, 28, 75].contains(&errno), "{command}: {errno}");
    }
    ask(&mut client, (READ, 0), at, KIB_64);
    assert!(answer(&mut client, at).1[8..] == [9; KIB_64 as usize], "nothing was changed");
}
