//! What does a create cost, in CPU time of the service's thread and of all threads? On a device
//! in memory, without a wire: each round looks the name up and makes it, as a mount does.
//!
//! `cargo run --release -p levada-meta --example creates -- [FILES] [SLOTS] [FILES_PER_DIRECTORY]`

use levada_base::Epoch;
use levada_base::ids::{Ino, TargetId};
use levada_base::reactor::{self, Reactor};
use levada_base::units::{GIB, MIB};
use levada_device::{Device, RamDevice};
use levada_kv::{Config, Store};
use levada_meta::{CallHeader, FsConfig, MetaService, ServeConfig};
use levada_wire::meta::{Caller, MetaFault, MetaReply, MetaRequest, NewInode, OpenMode};
use std::rc::Rc;

const ROOT: Caller = Caller { uid: 0, gid: 0 };

/// Nanoseconds on a CPU: this thread, and all threads.
fn cpu_ns() -> (u64, u64) {
    let of = |path: &std::path::Path| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0)
    };
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let all = tasks.flatten().map(|task| of(&task.path().join("schedstat"))).sum();
    (of("/proc/thread-self/schedstat".as_ref()), all)
}

async fn create(
    service: &MetaService,
    call: CallHeader,
    parent: Ino,
    name: String,
    new: NewInode,
) -> Ino {
    let name = name.into_bytes();
    let lookup = MetaRequest::Lookup { parent, name: name.clone() };
    let found = service.handle(CallHeader::reading(call.client), lookup).await;
    assert_eq!(found, MetaReply::Failed(MetaFault::NotFound));
    let request =
        MetaRequest::Create { caller: ROOT, parent, name, mode: 0o644, new, exclusive: false };
    match service.handle(call, request).await {
        MetaReply::Entry(attr, true) => attr.ino,
        reply => panic!("{reply:?}"),
    }
}

fn main() {
    let number = |n: usize, default: u64| {
        std::env::args().nth(n).and_then(|n| n.parse().ok()).unwrap_or(default)
    };
    let (files, slots, per_directory) = (number(1, 100_000), number(2, 16), number(3, 1000));
    Reactor::new().expect("a reactor").block_on(async {
        let area: Rc<dyn Device> = Rc::new(RamDevice::new("ram", 4 * GIB));
        let store = Store::create(area, Epoch(1), Config::default()).await.expect("made");
        let fs = FsConfig {
            uuid: [1; 16],
            name: "bench".to_owned(),
            target: 0,
            stripe_count: 4,
            stripe_unit: MIB,
            inodes_max: u64::MAX,
            root_mode: 0o755,
            root_uid: 0,
            root_gid: 0,
        };
        let objects = (0..4).map(|n| (TargetId(n), String::new())).collect();
        let config = ServeConfig { objects, ..ServeConfig::default() };
        let service = Rc::new(MetaService::create(store, fs, config).await.expect("made"));
        let register = MetaRequest::Register { uuid: [2; 16] };
        let reply = service.handle(CallHeader::reading(0), register).await;
        let MetaReply::Registered { client, .. } = reply else { panic!("{reply:?}") };
        let (start, before) = (reactor::now(), cpu_ns());
        let tasks: Vec<_> = (0..slots)
            .map(|slot| {
                let service = Rc::clone(&service);
                reactor::spawn(async move {
                    let mut call = CallHeader::changing(client, slot as u32, 0);
                    let mut directory = Ino::ROOT;
                    for n in 0..files / slots {
                        if n % per_directory == 0 {
                            call.sequence += 1;
                            let name = format!("dir{slot}.{n}");
                            let new = NewInode::Directory;
                            directory = create(&service, call, Ino::ROOT, name, new).await;
                        }
                        call.sequence += 1;
                        let open = Some(OpenMode { write: true, truncate: false });
                        let new = NewInode::File { open };
                        let ino =
                            create(&service, call, directory, format!("file{n}"), new).await;
                        call.sequence += 1;
                        service.handle(call, MetaRequest::Close { ino }).await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("ends");
        }
        let (passed, after) = (start.elapsed(), cpu_ns());
        let us = |ns: u64| ns as f64 / 1000.0 / files as f64;
        println!(
            "{files} files by {slots} slots: {:.1} us each; CPU {:.1} us in the service's thread, {:.1} us in all",
            passed.as_secs_f64() * 1e6 / files as f64,
            us(after.0 - before.0),
            us(after.1 - before.1),
        );
    });
}
