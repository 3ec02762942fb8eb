//! Thin volumes on the whole stack: what they hold, and what becomes of orders, also over a restart.

use super::shelf::{Shelf, served};
use levada_base::Buf;
use levada_base::ids::Ino;
use levada_base::reactor::{self, Reactor};
use levada_base::units::MIB;
use levada_client::Client;
use levada_device::Durability;
use levada_volume::qos::{Governor, Limits, LimitsChange, Rates, Terms};
use levada_volume::{
    Anyway, Catalogue, OrderError, Tenant, Volume, VolumeError, VolumeName, model,
};
use levada_wire::meta::{Caller, SetXattr};
use std::rc::Rc;
use std::time::Duration;

pub const MEANT: Anyway = Anyway { is_meant: true };
pub const CAREFUL: Anyway = Anyway { is_meant: false };

pub fn name(text: &str) -> VolumeName {
    text.parse().expect("a name")
}

pub fn catalogue_of(client: Client) -> Catalogue {
    let terms = Terms { request_bytes_max: MIB, capacity: Rates::NONE };
    Catalogue::new(client, Governor::new(terms))
}

async fn sizes(catalogue: &Catalogue) -> Vec<(String, u64)> {
    let rows = catalogue.list(None).await.expect("listed");
    rows.into_iter().map(|row| (row.name.to_string(), row.size_bytes)).collect()
}

pub async fn write(volume: &dyn Volume, at: u64, text: &[u8]) -> Result<(), VolumeError> {
    volume.write(at, Buf::copy_of(text).into_vec(), Durability::Volatile).await
}

/// Runs `work` with the catalogue of a served cluster, and closes it.
pub async fn with_catalogue<F: Future<Output = ()>>(
    shelf: &Shelf,
    work: impl FnOnce(Rc<Catalogue>) -> F,
) {
    served(shelf, |client| async move {
        let catalogue = Rc::new(catalogue_of(client));
        work(Rc::clone(&catalogue)).await;
        catalogue.close().await.expect("all durable");
    })
    .await;
}

#[test]
fn a_thin_volume_does_what_bytes_in_memory_would() {
    for seed in 0..2 {
        Reactor::simulated(seed).block_on(async {
            with_catalogue(&Shelf::default(), |catalogue| async move {
                catalogue.create(&name("vm"), 6 * MIB, CAREFUL).await.expect("made");
                let volume = catalogue.volume(&name("vm")).await.expect("there");
                model::compare(&volume, 300).await;
            })
            .await;
        });
    }
}

#[test]
fn orders_and_what_was_flushed_outlast_a_restart() {
    Reactor::simulated(1).block_on(async {
        let shelf = Shelf::default();
        with_catalogue(&shelf, |catalogue| async move {
            for (text, mib) in [("one", 4), ("two", 5), ("blue/one", 6), ("gone", 7)] {
                catalogue.create(&name(text), mib * MIB, CAREFUL).await.expect("made");
            }
            let one = catalogue.volume(&name("one")).await.expect("there");
            write(&one, 4 * MIB - 3, b"end").await.expect("written");
            one.flush().await.expect("durable");
            catalogue.resize(&name("one"), 8 * MIB, CAREFUL).await.expect("grown");
            assert_eq!(one.size_bytes(), 8 * MIB, "whoever has it open learns of it");
            write(&one, 8 * MIB - 3, b"END").await.expect("written");
            drop(one);
            catalogue.rename(&name("two"), &name("too")).await.expect("renamed");
            catalogue.delete(&name("gone"), CAREFUL).await.expect("deleted");
        })
        .await;
        with_catalogue(&shelf, |catalogue| async move {
            let expected = [("blue/one", 6), ("one", 8), ("too", 5)];
            let expected = expected.map(|(name, mib)| (name.to_owned(), mib * MIB));
            let mut found = sizes(&catalogue).await;
            found.sort();
            assert_eq!(found, expected);
            let one = catalogue.volume(&name("one")).await.expect("there");
            assert_eq!(model::read(&one, 4 * MIB - 3, 3).await, b"end");
            assert_eq!(model::read(&one, 8 * MIB - 3, 3).await, b"END");
            let of_blue = catalogue.list(Some(&"blue".parse().expect("a name"))).await;
            assert_eq!(of_blue.expect("listed").len(), 1, "and not those of others");
            let of_red = catalogue.list(Some(&"red".parse().expect("a name"))).await;
            assert_eq!(of_red.expect("listed"), [], "a tenant that has none");
        })
        .await;
    });
}

#[test]
fn orders_that_cannot_be_are_refused_and_change_nothing() {
    Reactor::simulated(2).block_on(async {
        served(&Shelf::default(), |client| async move {
            let catalogue = catalogue_of(client.clone());
            let vm = name("vm");
            for bytes in [0, 1, MIB + 512, !4095] {
                let refused = catalogue.create(&vm, bytes, MEANT).await;
                assert_eq!(refused, Err(OrderError::Size { bytes }));
            }
            let huge = catalogue.create(&vm, 1 << 60, CAREFUL).await;
            assert!(matches!(huge, Err(OrderError::LargerThanStore { .. })), "{huge:?}");
            for (from, to) in [("vm", "other"), ("none/vm", "none/other")] {
                let missing = OrderError::Missing { name: name(from) };
                assert_eq!(catalogue.delete(&name(from), MEANT).await, Err(missing.clone()));
                let renamed = catalogue.rename(&name(from), &name(to)).await;
                assert_eq!(renamed, Err(missing.clone()));
                assert_eq!(catalogue.resize(&name(from), MIB, MEANT).await, Err(missing.clone()));
                assert_eq!(catalogue.volume(&name(from)).await.err(), Some(missing));
            }
            assert_eq!(sizes(&catalogue).await, []);

            let home = client.lookup(levada_base::ids::Ino::ROOT, b".levada").await;
            assert!(home.is_err(), "nothing is made for volumes that are not");

            catalogue.create(&vm, 1 << 60, MEANT).await.expect("thin, so it may be");
            let exists = Err(OrderError::Exists { name: vm.clone() });
            assert_eq!(catalogue.create(&vm, MIB, CAREFUL).await, exists);
            catalogue.create(&name("other"), MIB, CAREFUL).await.expect("made");
            let onto = catalogue.rename(&vm, &name("other")).await;
            assert_eq!(onto, Err(OrderError::Exists { name: name("other") }));
            let to_blue = catalogue.rename(&vm, &name("blue/vm")).await;
            assert!(matches!(to_blue, Err(OrderError::OtherTenant { .. })), "{to_blue:?}");
            catalogue.resize(&vm, 2 * MIB, CAREFUL).await.expect("there was nothing");
            assert_eq!(sizes(&catalogue).await, [("other".into(), MIB), ("vm".into(), 2 * MIB)]);
        })
        .await;
    });
}

#[test]
fn a_cut_that_would_lose_data_is_refused_unless_it_is_meant() {
    Reactor::simulated(3).block_on(async {
        with_catalogue(&Shelf::default(), |catalogue| async move {
            let vm = name("vm");
            catalogue.create(&vm, 4 * MIB, CAREFUL).await.expect("made");
            let volume = catalogue.volume(&vm).await.expect("there");
            write(&volume, 3 * MIB, b"here").await.expect("written");
            let cut = catalogue.resize(&vm, 2 * MIB, CAREFUL).await;
            let why = OrderError::WouldCut { name: vm.clone(), bytes: 2 * MIB, data_at: 3 * MIB };
            assert_eq!(cut, Err(why));
            assert_eq!(model::read(&volume, 3 * MIB, 4).await, b"here");
            assert_eq!(volume.size_bytes(), 4 * MIB);
            catalogue.resize(&vm, 2 * MIB, MEANT).await.expect("it may go");
            let beyond = write(&volume, 2 * MIB, b"here").await;
            assert!(matches!(beyond, Err(VolumeError::OutOfRange { .. })), "{beyond:?}");
            catalogue.resize(&vm, 4 * MIB, CAREFUL).await.expect("grown");
            assert_eq!(model::read(&volume, 3 * MIB, 4).await, [0; 4], "nothing comes back");
        })
        .await;
    });
}

/// Writers go on while the volume is cut to and fro: each write lands whole or is refused, and none moves the end.
#[test]
fn a_volume_is_cut_while_it_is_written() {
    Reactor::simulated(4).block_on(async {
        with_catalogue(&Shelf::default(), |catalogue| async move {
            let vm = name("vm");
            catalogue.create(&vm, 4 * MIB, CAREFUL).await.expect("made");
            let volume = Rc::new(catalogue.volume(&vm).await.expect("there"));
            let writers: Vec<_> = (0..4u64)
                .map(|writer| {
                    let volume = Rc::clone(&volume);
                    reactor::spawn(async move {
                        let mut refused = 0;
                        for round in 0..60 {
                            let at = (writer * 60 + round) % 64 * (MIB / 16);
                            match write(&*volume, at, &[1; 5000]).await {
                                Ok(()) => {}
                                Err(VolumeError::OutOfRange { .. }) => refused += 1,
                                Err(error) => panic!("{error}"),
                            }
                        }
                        refused
                    })
                })
                .collect();
            for round in 0..20 {
                let bytes = if round % 2 == 0 { MIB } else { 4 * MIB };
                catalogue.resize(&vm, bytes, MEANT).await.expect("resized");
            }
            let mut refused = 0;
            for writer in writers {
                refused += writer.await.expect("not killed");
            }
            assert!(refused > 0, "some came while it was small");
            catalogue.resize(&vm, MIB, MEANT).await.expect("cut");
            catalogue.resize(&vm, 4 * MIB, MEANT).await.expect("grown");
            assert_eq!(sizes(&catalogue).await, [("vm".into(), 4 * MIB)]);
            assert!(model::read(&*volume, MIB, 3 * MIB).await.iter().all(|byte| *byte == 0));
        })
        .await;
    });
}

#[test]
fn a_volume_in_use_is_deleted_only_when_that_is_meant() {
    Reactor::simulated(5).block_on(async {
        with_catalogue(&Shelf::default(), |catalogue| async move {
            let vm = name("vm");
            catalogue.create(&vm, MIB, CAREFUL).await.expect("made");
            let volume = catalogue.volume(&vm).await.expect("there");
            let refused = catalogue.delete(&vm, CAREFUL).await;
            assert_eq!(refused, Err(OrderError::InUse { name: vm.clone(), users: 1 }));
            write(&volume, 0, b"goes on").await.expect("written");
            assert_eq!(catalogue.list(None).await.expect("listed")[0].users, 1);
            catalogue.delete(&vm, MEANT).await.expect("deleted");
            assert_eq!(write(&volume, 0, b"late").await, Err(VolumeError::Deleted));
            assert_eq!(volume.read(0, 1).await.err(), Some(VolumeError::Deleted));
            catalogue.create(&vm, MIB, CAREFUL).await.expect("the name is free");
            let new = catalogue.volume(&vm).await.expect("there");
            assert_eq!(model::read(&new, 0, 7).await, [0; 7], "another volume");
            drop(new);
            catalogue.delete(&vm, CAREFUL).await.expect("nobody uses it");
        })
        .await;
    });
}

/// Writes of 4 KiB, one at a time, that the two volumes of `red` take beside each other in two seconds.
async fn writes_in_two_seconds(catalogue: &Catalogue) -> [u64; 2] {
    let one = catalogue.volume(&name("red/one")).await.expect("there");
    let two = catalogue.volume(&name("red/two")).await.expect("there");
    let end = reactor::now() + Duration::from_secs(2);
    let tasks = [one, two].map(|volume| {
        reactor::spawn(async move {
            let mut done = 0;
            while reactor::now() < end {
                write(&volume, done % 16 * 4096, &[7; 4096]).await.expect("written");
                done += 1;
            }
            done
        })
    });
    let mut counts = [0; 2];
    for (count, task) in counts.iter_mut().zip(tasks) {
        *count = task.await.expect("not killed");
    }
    counts
}

#[test]
fn a_tenants_limits_hold_for_its_volumes_together_also_after_a_restart() {
    Reactor::simulated(6).block_on(async {
        let shelf = Shelf::default();
        let red: Tenant = "red".parse().expect("a name");
        let capped = LimitsChange { cap_iops: Some(200), ..LimitsChange::default() };
        with_catalogue(&shelf, |catalogue| async move {
            catalogue.set_tenant_limits(&red, capped).await.expect("a tenant without volumes");
            for text in ["red/one", "red/two"] {
                catalogue.create(&name(text), MIB, CAREFUL).await.expect("made");
            }
            let halves = writes_in_two_seconds(&catalogue).await;
            assert!(halves.iter().all(|half| (180..=220).contains(half)), "{halves:?}");
            let mine = LimitsChange { cap_iops: Some(50), ..LimitsChange::default() };
            catalogue.set_limits(&name("red/one"), mine).await.expect("set");
            let refused = catalogue.delete_tenant(&red).await;
            assert_eq!(refused, Err(OrderError::TenantInUse { tenant: red.clone() }));
        })
        .await;
        let red: Tenant = "red".parse().expect("a name");
        with_catalogue(&shelf, |catalogue| async move {
            let [one, two] = writes_in_two_seconds(&catalogue).await;
            assert!((90..=110).contains(&one), "{one}: its own cap");
            assert!((270..=330).contains(&two), "{two}: what is left of the tenant's");
            let rows = catalogue.tenants().await.expect("listed");
            assert_eq!((&rows[0].tenant, rows[0].volumes), (&red, 2));
            assert_eq!(rows[0].limits.cap.iops, Some(200));

            let free = LimitsChange { cap_iops: Some(0), ..LimitsChange::default() };
            catalogue.set_tenant_limits(&red, free).await.expect("set");
            let [one, two] = writes_in_two_seconds(&catalogue).await;
            assert!((90..=110).contains(&one) && two > 1000, "{one} {two}");
            for text in ["red/one", "red/two"] {
                catalogue.delete(&name(text), CAREFUL).await.expect("deleted");
            }
            catalogue.delete_tenant(&red).await.expect("deleted");
            let gone = catalogue.delete_tenant(&red).await;
            assert_eq!(gone, Err(OrderError::NoTenant { tenant: red.clone() }));
            assert_eq!(catalogue.tenants().await.expect("listed"), []);
        })
        .await;
    });
}

/// A volume whose limits nobody understands is shown to nobody, rather than without them.
#[test]
fn limits_that_are_not_understood_are_written_anew_by_who_sets_them() {
    Reactor::simulated(7).block_on(async {
        served(&Shelf::default(), |client| async move {
            let catalogue = catalogue_of(client.clone());
            let vm = name("vm");
            catalogue.create(&vm, MIB, CAREFUL).await.expect("made");
            let mut ino = Ino::ROOT;
            for part in [".levada", "volumes", "default", "vm"] {
                ino = client.lookup(ino, part.as_bytes()).await.expect("there").ino;
            }
            let root = Caller { uid: 0, gid: 0 };
            let limits = b"trusted.levada.limits";
            let set = client.set_xattr(root, ino, limits, b"{", SetXattr::default());
            set.await.expect("set");
            let unknown = Some(OrderError::LimitsUnknown { whose: "volume vm".into() });
            assert_eq!(catalogue.volume(&vm).await.err(), unknown);
            let capped = LimitsChange { cap_iops: Some(9), ..LimitsChange::default() };
            catalogue.set_limits(&vm, capped).await.expect("written anew");
            catalogue.volume(&vm).await.expect("it is shown again");
            let kept = client.xattr(ino, limits).await.expect("kept");
            let kept: Limits = serde_json::from_slice(&kept).expect("understood");
            assert_eq!(kept.cap.iops, Some(9));
            catalogue.close().await.expect("all durable");
        })
        .await;
    });
}
