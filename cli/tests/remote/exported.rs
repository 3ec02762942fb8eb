//! An array whose drives are volumes that a cluster exports over NVMe/TCP.

use crate::fixture::{Box, run};
use crate::support::{Cluster, LEVADA, LIMIT, TINY, can_run, kill, wait_until};
use crate::{check, round};
use levada_base::reactor::Reactor;
use levada_base::{Buf, BufMut};
use levada_device::nvme::{Host, NvmeNamespace, NvmeUrl, Options};
use levada_device::{Device, Durability};
use serde_json::Value;
use std::fs::File;
use std::net::TcpListener;
use std::process::Command;
use std::time::Instant;

const HOST: &str = "nqn.2014-08.org.example:box";

/// What there is at an address, as `host` sees it.
fn found(address: &str, host: Option<&str>) -> Option<Value> {
    let host: Vec<&str> = host.iter().flat_map(|host| ["--host", host]).collect();
    let mut find = Command::new(LEVADA);
    find.args(["enclosure", "find", address, "--json"]).args(host);
    let found = run(&mut find, LIMIT);
    // Where there is nothing it fails as well, and says so.
    (!found.stdout.is_empty()).then(|| serde_json::from_slice(&found.stdout).expect("JSON"))
}

/// A host goes on when the node is there again, and would believe a flush of what was lost: what it was answered is durable.
fn is_kept_when_the_node_is_killed(cluster: &Cluster, drive: &str) {
    let url: NvmeUrl = drive.parse().expect("a URL");
    Reactor::new().expect("an io_uring").block_on(async {
        let open = async || {
            let begun = Instant::now();
            loop {
                let options = Options::new(Host::anonymous().expect("a name"));
                match NvmeNamespace::open(&url, options).await {
                    Ok(drive) => break drive,
                    Err(error) => assert!(begun.elapsed() < LIMIT, "it is shown: {error}"),
                }
            }
        };
        for round in 1..=3 {
            let before = open().await;
            let data = Buf::copy_of(&[round; 4096]).into_vec();
            before.write(0, data, Durability::Volatile).await.expect("written");
            kill(cluster.node().expect("a node"));
            before.abandon();
            cluster.ok(&["up"]);
            let after = open().await;
            let into = BufMut::for_overwrite(4096).into_vec();
            let read = after.read(0, into).await.expect("read");
            assert!(read.iter().all(|part| part.iter().all(|byte| *byte == round)), "{round}");
            after.close().await;
        }
    });
}

/// It goes on where it can listen, and begins at the other addresses when it can.
#[test]
fn volumes_are_drives_of_hosts_that_may_have_them() {
    if !can_run() {
        return;
    }
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (second, free) = (
        taken.local_addr().expect("bound").to_string(),
        TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").to_string(),
    );
    // 192.0.2.1 is an address of documentation, and nobody's.
    let export = format!(
        "[[export]]\ntenant = \"blue\"\nhosts = [\"{HOST}\"]\nnvme = [\"{free}\", \"{second}\", \"192.0.2.1:4420\"]\n"
    );
    let cluster = Cluster::new("shown", &format!("{TINY}{export}").replace("72MiB", "200MiB"));
    cluster.ok(&["up"]);
    for volume in ["blue/a", "blue/b"] {
        cluster.ok(&["volume", "create", volume, "--size", "40MiB"]);
    }
    let is_not_served = |at: &str| cluster.ok(&["status"]).contains(&format!("{at} (not served)"));
    assert!(is_not_served("192.0.2.1:4420") && is_not_served(&second) && !is_not_served(&free));
    assert_eq!(found(&free, None).expect("it listens"), Value::Array(Vec::new()));
    // Each is a subsystem of its own, whose drive it is.
    let shows_both = |at: &str| {
        let found = found(at, Some(HOST));
        found.is_some_and(|found| found.as_array().is_some_and(|all| all.len() == 2))
    };
    wait_until("both are shown", || shows_both(&free));
    drop(taken);
    wait_until("they are shown there", || shows_both(&second));
    assert!(is_not_served("192.0.2.1:4420") && !is_not_served(&second));

    let found = found(&free, Some(HOST)).expect("it listens");
    let drives = [0, 1].map(|at| found[at]["url"].as_str().expect("a text"));
    for (url, volume) in drives.into_iter().zip(["blue:a", "blue:b"]) {
        for part in [&*free, &second, volume, "host="] {
            assert!(url.contains(part), "{part}: {url}");
        }
    }
    is_kept_when_the_node_is_killed(&cluster, drives[0]);
    let mut array = Box::new();
    array.ok(&[&["create", "far", "--level", "1", "--force"][..], &drives].concat());
    array.serve(&drives);
    let file = File::options().read(true).write(true).open(array.file()).expect("open");
    round(&file, 1, 16);
    // What its drives are is restarted, and nothing of it fails.
    cluster.ok(&["down"]);
    cluster.ok(&["up"]);
    round(&file, 2, 16);
    check(&file, 2, 16);
    drop(file);
    array.stop();
    cluster.ok(&["down"]);
}
