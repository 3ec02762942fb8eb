//! Clients that break the rules: each is answered or hung up on, and harms nobody else.

use crate::client::{Client, READ, WRITE};
use crate::fixture::{Box, sh};
use crate::support::said;
use crate::{SOCKET, served, uri};
use std::io::{Read, Write};
use std::process::Command;
use std::time::Duration;

/// Somebody who keeps to the rules still gets what he asks for.
fn serves_others(array: &Box) {
    let words = ["write -P 0x77 1M 64k", "read -P 0x77 1M 64k"];
    let vol = uri(&array.path(SOCKET), "");
    sh(&["qemu-io", "-f", "raw", &vol, "-c", words[0], "-c", words[1]]);
    assert!(!array.log().contains("panicked"), "{}", array.log());
}

#[test]
fn talk_that_is_none_ends_hung_up_on() {
    let array = served(32 << 20);
    let mut mute = Client::greeted(&array);
    mute.put(b"GET / HTTP/1.1\r\n\r\n");
    assert!(mute.ends_hung_up_on());
    let mut huge = Client::greeted(&array);
    huge.put(b"IHAVEOPT");
    huge.put(&[0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff]);
    assert!(huge.ends_hung_up_on());
    let mut unknown = Client::greeted(&array);
    // EXPORT_NAME takes no answer but the export.
    unknown.option(1, b"nobody");
    assert!(unknown.ends_hung_up_on());
    let mut endless = Client::greeted(&array);
    for _ in 0..1001 {
        if endless.0.write_all(&[&b"IHAVEOPT"[..], &[0, 0, 0, 99, 0, 0, 0, 0]].concat()).is_err() {
            break;
        }
    }
    let mut answers = Vec::new();
    let _ = endless.0.read_to_end(&mut answers);
    assert!(answers.len() <= 20 * 1001, "and then hung up on");
    serves_others(&array);
}

#[test]
fn half_a_request_changes_nothing_and_wrong_ones_are_refused() {
    let array = served(32 << 20);
    let mut half = Client::using(&array);
    half.request(WRITE, 0, 65536);
    half.put(&[9; 1000]);
    drop(half);
    let mut wrong = Client::using(&array);
    for (command, at, bytes) in
        [(READ, 1 << 40, 4096), (READ, u64::MAX, 4096), (READ, 0, 0), (99, 0, 0), (7, 0, 4096)]
    {
        wrong.request(command, at, bytes);
        assert_eq!(wrong.error(), 22, "EINVAL for {command} of {bytes} at {at}");
    }
    wrong.request(WRITE, 1 << 40, 4096);
    wrong.put(&[1; 4096]);
    assert_eq!(wrong.error(), 28, "ENOSPC past the end");
    wrong.request(READ, 0, 4096);
    assert_eq!(wrong.error(), 0);
    assert_eq!(wrong.take(4096), [0; 4096], "of half a request nothing was written");
    wrong.request(WRITE, 0, 1 << 30);
    assert!(wrong.ends_hung_up_on(), "nobody takes a GiB");
    let mut garbage = Client::using(&array);
    garbage.put(&[0x5a; 64]);
    assert!(garbage.ends_hung_up_on());
    serves_others(&array);
}

/// It asks for far more than fits anywhere and takes none of it: its own business, as long as it is there.
#[test]
fn a_client_that_does_not_read_holds_up_nobody_and_takes_bounded_memory() {
    let mut array = served(32 << 20);
    let mut greedy = Client::using(&array);
    greedy.0.set_write_timeout(Some(Duration::from_millis(500))).expect("set");
    for _ in 0..4000 {
        let head = [
            &0x2560_9513u32.to_be_bytes()[..],
            &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7],
            &[0; 8],
            &(8u32 << 20).to_be_bytes(),
        ];
        if greedy.0.write_all(&head.concat()).is_err() {
            break;
        }
    }
    serves_others(&array);
    let status = std::fs::read_to_string(format!("/proc/{}/status", array.server())).expect("read");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("resident");
    let kib: u64 = resident.trim().trim_end_matches(" kB").trim().parse().expect("a number");
    assert!(kib < 600 << 10, "{kib} KiB, of 32 GiB that it asked for");
    array.stop();
}

#[test]
fn addresses_that_cannot_be_are_explained() {
    let array = served(32 << 20);
    let other = Box::new();
    for drive in ["a", "b"] {
        other.drive(drive, 32 << 20);
    }
    other.ok(&["create", "other", "--level", "1", "a", "b"]);
    let taken = format!("unix:{}", array.path(SOCKET).display());
    other.refused(&["serve", "--nbd", &taken, "a", "b"], &["another server listens at"]);
    let file = format!("unix:{}", other.path("a").display());
    other.refused(&["serve", "--nbd", &file, "a", "b"], &["is no socket"]);
    other.refused(&["serve", "--nbd", "unix:/none/at/all", "a", "b"], &["cannot listen at"]);
    other.refused(&["serve", "--nbd", "unix:x", "--tls", "none", "a", "b"], &["server-cert.pem"]);
    let usage = |words: &[&str]| {
        let output = Command::new(crate::support::LEVADA).args(words).output().expect("it starts");
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        said(&output)
    };
    assert!(usage(&["array", "serve", "a", "b"]).contains("--nbd"), "one of the two is needed");
    assert!(usage(&["array", "serve", "--nbd", "10809", "a"]).contains("HOST:PORT"));
    assert!(usage(&["array", "serve", "--at", "x", "--tls", "c", "a"]).contains("--nbd"));
}
