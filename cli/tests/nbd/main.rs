//! NBD as its clients have it: programs and a kernel that nobody here wrote, on arrays and on volumes of a cluster.
//!
//! Needs io_uring and the programs that `scripts/suites` installs; what mounts needs root.

mod client;
mod clients;
mod extended;
#[path = "../array/fixture.rs"]
#[allow(dead_code, reason = "nothing is mounted here")]
mod fixture;
mod hostile;
mod kernel;
mod limits;
mod linear;
#[path = "../support/mod.rs"]
mod support;
mod tls;
#[path = "../support/user_mode.rs"]
mod user_mode;
mod volumes;

use fixture::Box;
use std::path::Path;

const DRIVES: [&str; 6] = ["d0", "d1", "d2", "d3", "d4", "d5"];
const SOCKET: &str = "nbd.sock";

/// An array of level 6 that is served over a Unix socket.
fn served(drive_bytes: u64) -> Box {
    served_with(drive_bytes, &[])
}

fn served_with(drive_bytes: u64, options: &[&str]) -> Box {
    let mut array = Box::new();
    for drive in DRIVES {
        array.drive(drive, drive_bytes);
    }
    array.ok(&[&["create", "vol", "--level", "6"][..], &DRIVES].concat());
    let address = format!("unix:{}", array.path(SOCKET).display());
    array.serve_as(&[&["--nbd", &address], options].concat(), SOCKET, &DRIVES);
    array
}

fn uri(socket: &Path, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.display())
}
