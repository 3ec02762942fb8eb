//! A drive over NVMe/TCP, with the real target and the real initiator.

use levada_sim::{remote, seeds};

#[test]
fn a_remote_drive_keeps_its_promises() {
    seeds::check("nvme", 60, remote::nvme);
}

#[test]
fn one_seed_fixes_the_run() {
    assert_eq!(remote::nvme(3).trace_hash, remote::nvme(3).trace_hash);
    assert_ne!(remote::nvme(3).trace_hash, remote::nvme(4).trace_hash);
}
