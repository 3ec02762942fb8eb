//! What guests of a tenant may read and write of its files, per second.

use crate::front_end::message::GET_VRING_BASE;
use crate::front_end::words;
use crate::fs_guest::{FsGuest, REQUESTS, init, op, read_args};
use crate::support::{Cluster, TINY, can_run, kill};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// At least so long these take with a cap of 40 a second.
const READS: usize = 60;
const HELD_BACK: Duration = Duration::from_millis(1400);
/// Within this a change holds.
const SOON: Duration = Duration::from_millis(200);

fn reads(guest: &mut FsGuest, file: (u64, u64)) -> Duration {
    let begun = Instant::now();
    (0..READS).for_each(|_| drop(guest.read(file, 0, 10)));
    begun.elapsed()
}

/// Whether nothing holds them back; other work of the machine may, now and then.
fn are_free(guest: &mut FsGuest, file: (u64, u64)) -> bool {
    (0..5).any(|_| reads(guest, file) < HELD_BACK)
}

/// So many reads, for whose answers nobody waits.
fn offer_reads(guest: &mut FsGuest, (node, fh): (u64, u64), count: usize) {
    for _ in 0..count {
        guest.offer(op::READ, node, &[&read_args(fh, 0, 10)], 10);
    }
}

#[test]
fn guests_of_a_tenant_stay_within_its_caps() {
    if !can_run() {
        return;
    }
    let export = |tenant: &str| {
        format!(
            "[[export]]\ntenant = \"{tenant}\"\nvirtiofs = \"run/{tenant}.sock\"\nsubtree = \"/guests/{tenant}\"\n"
        )
    };
    let cluster = Cluster::new("fs-caps", &format!("{TINY}{}{}", export("red"), export("blue")));
    cluster.ok(&["up"]);
    let (mut red, mut blue) = (FsGuest::new(), FsGuest::new());
    let at = |tenant: &str| cluster.path(&format!("run/{tenant}.sock"));
    let red_front = red.mount(&at("red"));
    let _blue_front = blue.mount(&at("blue"));
    let [ours, theirs] = [&mut red, &mut blue].map(|guest| {
        let file = guest.create(b"file");
        guest.write(file, 0, b"0123456789");
        file
    });
    assert!(are_free(&mut red, ours), "without a cap");

    // It holds for the tenant soon, and for nobody else; and not any more as soon.
    cluster.ok(&["tenant", "set", "red", "--iops", "40"]);
    thread::sleep(SOON);
    let held_back = reads(&mut red, ours);
    assert!(held_back >= HELD_BACK, "{held_back:?} at 40 a second");
    assert!(are_free(&mut blue, theirs), "another tenant");
    cluster.ok(&["tenant", "set", "red", "--iops", "0"]);
    assert!(are_free(&mut red, ours), "without a cap again");

    // From the first request on after a restart of the node, which asks nobody for the caps before. That is over sooner than these are done.
    cluster.ok(&["tenant", "set", "red", "--iops", "16"]);
    thread::sleep(SOON);
    kill(cluster.node().expect("a node"));
    let begun = Instant::now();
    offer_reads(&mut red, ours, 80);
    cluster.ok(&["up"]);
    (0..80).for_each(|_| assert_eq!(red.wait(REQUESTS).expect("an answer").1, 0));
    assert!(begun.elapsed() >= Duration::from_millis(4800), "{:?}", begun.elapsed());

    // A queue that is to end does not wait for a minute of requests; they are paid for afterwards.
    cluster.ok(&["tenant", "set", "red", "--iops", "2"]);
    thread::sleep(SOON);
    offer_reads(&mut red, ours, 40);
    let begun = Instant::now();
    let queue = REQUESTS as u32;
    red_front.ask(GET_VRING_BASE, &words(&[queue, 0]), &[]);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    (0..40).for_each(|_| drop(red.wait(REQUESTS)));
    red.start(&red_front, REQUESTS, red.offered(REQUESTS).into());
    offer_reads(&mut red, ours, 1);
    thread::sleep(Duration::from_secs(2));
    assert!(red.is_quiet(REQUESTS), "others are paid for before");

    // Nor does a guest that starts anew: of its life before nothing that waits is carried out.
    offer_reads(&mut red, ours, 10);
    let anew = red.offer(op::INIT, 0, &[&init()], 64);
    let begun = Instant::now();
    let answers: Vec<_> = (0..12).map(|_| red.wait(REQUESTS).expect("an answer")).collect();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    for (unique, error, _) in answers {
        assert_eq!(error, if unique == anew { 0 } else { -libc::EIO }, "{unique}");
    }
    let ours = red.create(b"another");
    offer_reads(&mut red, ours, 3);

    // Nor does the end of its process, nor that of the cluster.
    let begun = Instant::now();
    cluster.ok(&["umount", "--lazy", at("red").to_str().expect("plain text")]);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(fs::metadata(at("red")).is_err());
    cluster.ok(&["down", "--force"]);
}
