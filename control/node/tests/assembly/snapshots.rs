//! Snapshots of thin volumes on the whole stack: what they hold, what orders are refused, and power cuts in the middle of orders.

use super::shelf::{Shelf, served, served_until_cut};
use super::volumes::{CAREFUL, MEANT, catalogue_of, name, with_catalogue, write};
use futures_util::future::join;
use levada_base::Buf;
use levada_base::ids::Ino;
use levada_base::reactor::{self, Reactor, random_u64};
use levada_base::units::MIB;
use levada_client::{Client, Error};
use levada_device::Durability;
use levada_volume::qos::LimitsChange;
use levada_volume::{
    Catalogue, OrderError, SnapshotName, Tenant, Volume, VolumeError, VolumeName, Zeroing, model,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

fn snapshot(text: &str) -> SnapshotName {
    text.parse().expect("a name")
}

/// What there must be: bytes by name, of volumes and of snapshots.
#[derive(Clone, Default, PartialEq)]
struct State {
    volumes: BTreeMap<VolumeName, Vec<u8>>,
    snapshots: BTreeMap<SnapshotName, Vec<u8>>,
}

/// Something that changes it.
#[derive(Clone, Debug)]
enum Order {
    Create(VolumeName, u64),
    /// Written and flushed: bytes of one value, or of 0 a hole.
    Write(VolumeName, u64, u64, u8),
    Snapshot(SnapshotName),
    Clone(SnapshotName, VolumeName),
    RollBack(SnapshotName),
    Resize(VolumeName, u64),
    Rename(VolumeName, VolumeName),
    DeleteSnapshot(SnapshotName),
    Delete(VolumeName),
    Settle,
}

impl State {
    fn change(&mut self, order: &Order) {
        match order {
            Order::Create(name, bytes) => {
                self.volumes.insert(name.clone(), vec![0; *bytes as usize]);
            }
            Order::Write(name, at, bytes, value) => {
                let part = *at as usize..(at + bytes) as usize;
                self.volumes.get_mut(name).expect("one")[part].fill(*value);
            }
            Order::Snapshot(name) => {
                let bytes = self.volumes[&name.volume].clone();
                self.snapshots.insert(name.clone(), bytes);
            }
            Order::Clone(from, to) => {
                self.volumes.insert(to.clone(), self.snapshots[from].clone());
            }
            Order::RollBack(to) => {
                self.volumes.insert(to.volume.clone(), self.snapshots[to].clone());
            }
            Order::Resize(name, bytes) => {
                self.volumes.get_mut(name).expect("one").resize(*bytes as usize, 0);
            }
            Order::Rename(from, to) => {
                let bytes = self.volumes.remove(from).expect("one");
                self.volumes.insert(to.clone(), bytes);
                for (name, bytes) in std::mem::take(&mut self.snapshots) {
                    let name = match name.volume == *from {
                        true => SnapshotName::new(to.clone(), name.name()).expect("a name"),
                        false => name,
                    };
                    self.snapshots.insert(name, bytes);
                }
            }
            Order::DeleteSnapshot(name) => drop(self.snapshots.remove(name)),
            Order::Delete(name) => drop(self.volumes.remove(name)),
            Order::Settle => {}
        }
    }

    /// True when all is there; block by block as one of the two, where a write was under way.
    async fn is(&self, before: &Self, catalogue: &Catalogue) -> bool {
        let rows = catalogue.list(None).await.expect("listed");
        if !rows.iter().map(|row| &row.name).eq(self.volumes.keys()) {
            return false;
        }
        let mut snapshots = Vec::new();
        for row in &rows {
            let of = catalogue.snapshots(&row.name).await.expect("listed");
            snapshots.extend(of.into_iter().map(|row| row.name));
        }
        snapshots.sort();
        if !snapshots.iter().eq(self.snapshots.keys()) {
            return false;
        }
        for (name, bytes) in &self.volumes {
            let volume = catalogue.volume(name).await.expect("opened");
            if volume.size_bytes() != bytes.len() as u64 {
                return false;
            }
            let now = model::read(&volume, 0, bytes.len() as u64).await;
            let old = before.volumes.get(name).unwrap_or(bytes);
            let is_one = |at: usize| {
                let block = at..at + 4096;
                now[block.clone()] == bytes[block.clone()]
                    || old.get(block.clone()) == Some(&now[block])
            };
            if !(0..bytes.len()).step_by(4096).all(is_one) {
                return false;
            }
        }
        for (name, bytes) in &self.snapshots {
            let volume = catalogue.snapshot_volume(name).await.expect("opened");
            if model::read(&volume, 0, bytes.len() as u64).await != *bytes {
                return false;
            }
        }
        true
    }
}

async fn carry_out(catalogue: &Catalogue, order: &Order) -> Result<(), OrderError> {
    match order {
        Order::Create(name, bytes) => catalogue.create(name, *bytes, CAREFUL).await,
        Order::Write(name, at, bytes, value) => {
            let volume = catalogue.volume(name).await?;
            let done = match value {
                0 => volume.write_zeroes(*at, *bytes, Zeroing::Free).await,
                _ => {
                    let data = Buf::copy_of(&vec![*value; *bytes as usize]).into_vec();
                    volume.write(*at, data, Durability::Volatile).await
                }
            };
            done.expect("changed");
            volume.flush().await.expect("durable");
            Ok(())
        }
        Order::Snapshot(name) => catalogue.snapshot(name).await,
        Order::Clone(from, to) => catalogue.clone_of(from, to).await,
        Order::RollBack(to) => catalogue.roll_back(to, CAREFUL).await,
        Order::Resize(name, bytes) => catalogue.resize(name, *bytes, MEANT).await,
        Order::Rename(from, to) => catalogue.rename(from, to).await,
        Order::DeleteSnapshot(name) => catalogue.delete_snapshot(name).await,
        Order::Delete(name) => catalogue.delete(name, CAREFUL).await,
        Order::Settle => catalogue.settle().await.error.map_or(Ok(()), Err),
    }
}

/// Every kind of order, with writes in between.
fn orders() -> Vec<Order> {
    let (vm, twin, web) = (name("vm"), name("twin"), name("web"));
    let (one, two, three) = (snapshot("vm@one"), snapshot("vm@two"), snapshot("vm@three"));
    let write =
        |volume: &VolumeName, at, bytes, value| Order::Write(volume.clone(), at, bytes, value);
    vec![
        Order::Create(vm.clone(), 2 * MIB),
        write(&vm, 4096, 300_000, 1),
        Order::Snapshot(one.clone()),
        write(&vm, 100_000, 50_000, 2),
        write(&vm, 65_536, 8192, 0),
        Order::Snapshot(two.clone()),
        write(&vm, 10_000, 5000, 3),
        Order::Clone(two.clone(), twin.clone()),
        write(&twin, MIB - 5000, 10_000, 4),
        Order::RollBack(one.clone()),
        write(&vm, 120_000, 1000, 5),
        Order::Resize(vm.clone(), MIB / 8),
        Order::Resize(vm.clone(), MIB),
        Order::Snapshot(three),
        write(&vm, 0, 4096, 6),
        Order::DeleteSnapshot(two),
        Order::Settle,
        Order::Rename(vm, web),
        write(&twin, 65_536, 300, 7),
        Order::DeleteSnapshot(snapshot("web@one")),
        Order::Settle,
        Order::Delete(twin),
        Order::Settle,
        Order::DeleteSnapshot(snapshot("web@three")),
        Order::Settle,
    ]
}

/// The states after each of the orders, the first before all.
fn states(orders: &[Order]) -> Vec<State> {
    let mut states = vec![State::default()];
    for order in orders {
        let mut state = states.last().expect("one").clone();
        state.change(order);
        states.push(state);
    }
    states
}

#[test]
fn volumes_and_snapshots_are_what_orders_make_them() {
    Reactor::simulated(1).block_on(async {
        let shelf = Shelf::default();
        let (orders, states) = (orders(), states(&orders()));
        // Over restarts.
        for (first, part) in [(0, &orders[..9]), (9, &orders[9..16]), (16, &orders[16..])] {
            with_catalogue(&shelf, |catalogue| async move {
                for (at, order) in (first..).zip(part) {
                    carry_out(&catalogue, order).await.expect("carried out");
                    let state = &states_after(at);
                    assert!(state.is(state, &catalogue).await, "after {order:?}");
                }
            })
            .await;
        }
        assert_eq!(states.len(), orders.len() + 1);
        served(&shelf, |client| async move {
            let names = layers_of(&client).await;
            assert_eq!(names, Vec::<String>::new(), "the last one lies on nothing any more");
        })
        .await;
    });
}

fn states_after(order: usize) -> State {
    states(&orders()[..=order]).pop().expect("one")
}

/// What is in the directory of layers.
async fn layers_of(client: &Client) -> Vec<String> {
    let mut ino = Ino::ROOT;
    for part in [".levada", "volumes", "default", ".layers"] {
        ino = client.lookup(ino, part.as_bytes()).await.expect("there").ino;
    }
    let (entries, _) = client.read_dir(ino, 0, 100, false).await.expect("listed");
    entries.iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()).collect()
}

/// The power goes at any time: what was acknowledged is there, and of the order that was under way all or nothing.
#[test]
fn an_order_is_carried_out_or_not_whenever_the_power_goes() {
    let orders = Rc::new(orders());
    let states = states(&orders);
    let live = |shelf: &Rc<Shelf>, seed: u64, after: Duration| -> usize {
        let done = Rc::new(Cell::new(0));
        let (orders, acknowledged) = (Rc::clone(&orders), Rc::clone(&done));
        Reactor::simulated(seed).block_on(async {
            served_until_cut(shelf, after, seed, |client| async move {
                let catalogue = catalogue_of(client);
                for order in &*orders {
                    carry_out(&catalogue, order).await.expect("carried out");
                    acknowledged.set(acknowledged.get() + 1);
                }
            })
            .await;
        });
        done.get()
    };
    let whole = {
        let took = Cell::new(Duration::ZERO);
        Reactor::simulated(1).block_on(async {
            with_catalogue(&Shelf::default(), |catalogue| async {
                let start = reactor::now();
                let catalogue = catalogue;
                for order in orders.iter() {
                    carry_out(&catalogue, order).await.expect("carried out");
                }
                took.set(reactor::now().since(start));
            })
            .await;
        });
        took.get()
    };
    let cuts = std::env::var("LEVADA_SNAPSHOT_CUTS").map_or(20, |n| n.parse().expect("a number"));
    let mut cut_within = 0;
    for seed in 0..cuts {
        let shelf = Rc::new(Shelf::volatile());
        let done = live(&shelf, seed, whole * (2 * seed as u32 + 1) / (2 * cuts as u32));
        eprintln!("seed {seed}: cut after {done} orders");
        cut_within += usize::from(done < orders.len());
        let (before, after) = (&states[done], &states[(done + 1).min(orders.len())]);
        let under_way = orders.get(done);
        Reactor::simulated(seed).block_on(async {
            with_catalogue(&shelf, |catalogue| async move {
                for round in ["as it was", "settled"] {
                    let is_there =
                        before.is(before, &catalogue).await || after.is(before, &catalogue).await;
                    assert!(
                        is_there,
                        "seed {seed}, after {done} orders and {under_way:?}: {round}"
                    );
                    let settled = catalogue.settle().await;
                    let (left, error) = (settled.left, settled.error);
                    assert_eq!((left, error), (0, None), "seed {seed}, after {done}: {round}");
                }
            })
            .await;
        });
    }
    assert!(cut_within > cuts as usize / 2, "{cut_within}: most of them before the end");
}

#[test]
fn orders_that_cannot_be_are_refused() {
    Reactor::simulated(2).block_on(async {
        with_catalogue(&Shelf::default(), |catalogue| async move {
            let (vm, one) = (name("vm"), snapshot("vm@one"));
            let missing = OrderError::Missing { name: vm.clone() };
            assert_eq!(catalogue.snapshot(&one).await, Err(missing.clone()));
            assert_eq!(catalogue.roll_back(&one, MEANT).await, Err(missing.clone()));
            assert_eq!(catalogue.clone_of(&one, &name("b")).await, Err(missing.clone()));
            assert_eq!(catalogue.delete_snapshot(&one).await, Err(missing));
            catalogue.create(&vm, MIB, CAREFUL).await.expect("made");
            let none = OrderError::NoSnapshot { name: one.clone() };
            assert_eq!(catalogue.roll_back(&one, MEANT).await, Err(none.clone()));
            assert_eq!(catalogue.clone_of(&one, &name("b")).await, Err(none.clone()));
            assert_eq!(catalogue.delete_snapshot(&one).await, Err(none.clone()));
            assert_eq!(catalogue.snapshot_volume(&one).await.err(), Some(none));

            catalogue.snapshot(&one).await.expect("taken");
            let again = catalogue.snapshot(&one).await;
            assert_eq!(again, Err(OrderError::SnapshotExists { name: one.clone() }));
            let onto = catalogue.clone_of(&one, &vm).await;
            assert_eq!(onto, Err(OrderError::Exists { name: vm.clone() }));
            let to_blue = catalogue.clone_of(&one, &name("blue/b")).await;
            assert!(matches!(to_blue, Err(OrderError::OtherTenant { .. })), "{to_blue:?}");
            let deleted = catalogue.delete(&vm, MEANT).await;
            let has = OrderError::HasSnapshots { name: vm.clone(), snapshots: 1 };
            assert_eq!(deleted, Err(has));

            let frozen = catalogue.snapshot_volume(&one).await.expect("opened");
            assert!(frozen.shape().is_read_only);
            assert_eq!(write(&frozen, 0, b"late").await, Err(VolumeError::ReadOnly));
            assert_eq!(frozen.discard(0, 4096).await, Err(VolumeError::ReadOnly));
            let volume = catalogue.volume(&vm).await.expect("there");
            write(&volume, 0, b"new").await.expect("written");
            let in_use = Err(OrderError::InUse { name: vm.clone(), users: 1 });
            assert_eq!(catalogue.roll_back(&one, CAREFUL).await, in_use);
            catalogue.roll_back(&one, MEANT).await.expect("it is meant");
            assert_eq!(model::read(&volume, 0, 3).await, [0; 3], "whoever has it open sees it");
            write(&volume, 0, b"newer").await.expect("written");
            assert_eq!(model::read(&frozen, 0, 5).await, [0; 5]);
            let shown = Err(OrderError::SnapshotInUse { name: one.clone(), users: 1 });
            assert_eq!(catalogue.delete_snapshot(&one).await, shown);
            drop(frozen);
            catalogue.delete_snapshot(&one).await.expect("nobody uses it");
        })
        .await;
    });
}

/// What is cut off does not come back from what lies below, and counts as data.
#[test]
fn a_volume_on_a_snapshot_is_cut_as_another() {
    Reactor::simulated(3).block_on(async {
        with_catalogue(&Shelf::default(), |catalogue| async move {
            let vm = name("vm");
            catalogue.create(&vm, 4 * MIB, CAREFUL).await.expect("made");
            let volume = catalogue.volume(&vm).await.expect("there");
            write(&volume, 3 * MIB, b"here").await.expect("written");
            catalogue.snapshot(&snapshot("vm@one")).await.expect("taken");
            let cut = catalogue.resize(&vm, 2 * MIB, CAREFUL).await;
            let why = OrderError::WouldCut { name: vm.clone(), bytes: 2 * MIB, data_at: 3 * MIB };
            assert_eq!(cut, Err(why));
            volume.discard(2 * MIB, 2 * MIB).await.expect("discarded");
            catalogue.resize(&vm, 2 * MIB, CAREFUL).await.expect("cut");
            catalogue.resize(&vm, 4 * MIB, CAREFUL).await.expect("grown");
            assert_eq!(model::read(&volume, 3 * MIB, 4).await, [0; 4]);
            let frozen = catalogue.snapshot_volume(&snapshot("vm@one")).await.expect("there");
            assert_eq!(model::read(&frozen, 3 * MIB, 4).await, b"here");
        })
        .await;
    });
}

/// A volume may be larger than anything that is stored: orders and merges cost what is.
#[test]
fn a_volume_of_an_exbibyte_is_cut_and_settles() {
    Reactor::simulated(6).block_on(async {
        with_catalogue(&Shelf::default(), |catalogue| async move {
            let (vm, size) = (name("vm"), 1 << 60);
            catalogue.create(&vm, size, MEANT).await.expect("thin, so it may be");
            let volume = catalogue.volume(&vm).await.expect("there");
            // Once the lower one is the smaller part, once the upper one is.
            for (one, first, second) in [("vm@one", 8192, 500_000), ("vm@two", 500_000, 8192)] {
                write(&volume, size / 2, &vec![1; first]).await.expect("written");
                catalogue.snapshot(&snapshot(one)).await.expect("taken");
                write(&volume, size / 2, &vec![2; second]).await.expect("written");
                catalogue.delete_snapshot(&snapshot(one)).await.expect("deleted");
                let settled = catalogue.settle().await;
                assert_eq!((settled.merged, settled.error), (1, None));
                assert_eq!(model::read(&volume, size / 2 + 8191, 1).await, [2]);
            }
            catalogue.snapshot(&snapshot("vm@three")).await.expect("taken");
            let cut = catalogue.resize(&vm, 2 * MIB, CAREFUL).await;
            let why = OrderError::WouldCut { name: vm.clone(), bytes: 2 * MIB, data_at: size / 2 };
            assert_eq!(cut, Err(why));
            catalogue.resize(&vm, 2 * MIB, MEANT).await.expect("cut");
        })
        .await;
    });
}

/// Limits stay with the volume, deleted snapshots give their room back, and so does all in the end.
#[test]
fn limits_stay_and_room_comes_back() {
    Reactor::simulated(4).block_on(async {
        served(&Shelf::default(), |client| async move {
            let catalogue = catalogue_of(client.clone());
            let (vm, one) = (name("vm"), snapshot("vm@one"));
            catalogue.create(&vm, 16 * MIB, CAREFUL).await.expect("made");
            let capped = LimitsChange { cap_iops: Some(5000), ..LimitsChange::default() };
            catalogue.set_limits(&vm, capped).await.expect("set");
            let used = || async {
                client.sync().await.expect("durable");
                reactor::sleep(Duration::from_secs(2)).await;
                let space = client.space().await.expect("told");
                (space.total_bytes - space.free_bytes) / MIB
            };
            let empty = used().await;
            let volume = catalogue.volume(&vm).await.expect("there");
            write(&volume, 0, &vec![1; 8 << 20]).await.expect("written");
            volume.flush().await.expect("durable");
            let eight = used().await;
            assert!((8..12).contains(&(eight - empty)), "{empty} {eight}");
            catalogue.snapshot(&one).await.expect("taken");
            assert!(used().await <= eight + 1, "nothing is copied");
            write(&volume, 0, &vec![2; 4 << 20]).await.expect("written");
            volume.flush().await.expect("durable");
            let twelve = used().await;
            assert!((4..8).contains(&(twelve - eight)), "{eight} {twelve}");
            let limits = async || {
                // Not as this one remembers them.
                let limits = catalogue_of(client.clone()).limits(&vm).await.expect("kept");
                limits.cap.iops
            };
            assert_eq!(limits().await, Some(5000));
            drop(volume);
            catalogue.delete_snapshot(&one).await.expect("deleted");
            assert_eq!(catalogue.settle().await.merged, 1);
            let settled = used().await;
            assert!(settled <= eight + 1, "{eight} {settled}: what was written over is free");
            let volume = catalogue.volume(&vm).await.expect("there");
            assert_eq!(model::read(&volume, 4 * MIB - 1, 2).await, [2, 1]);
            drop(volume);
            assert_eq!(limits().await, Some(5000));
            // A clone has none of them, whatever file it comes to lie in.
            let twin = name("twin");
            catalogue.snapshot(&one).await.expect("taken");
            catalogue.clone_of(&one, &twin).await.expect("cloned");
            catalogue.delete_snapshot(&one).await.expect("deleted");
            catalogue.delete(&vm, CAREFUL).await.expect("deleted");
            assert_eq!(catalogue.settle().await.merged, 1);
            let of_twin = catalogue_of(client.clone()).limits(&twin).await.expect("kept");
            assert_eq!(of_twin.cap.iops, None);
            catalogue.rename(&twin, &vm).await.expect("renamed");
            assert_eq!(layers_of(&client).await, Vec::<String>::new());
            catalogue.delete(&vm, CAREFUL).await.expect("deleted");
            catalogue.delete_tenant(&"default".parse().expect("a name")).await.expect("deleted");
            assert!(used().await <= empty + 1);
            catalogue.close().await.expect("all durable");
        })
        .await;
    });
}

/// A volume is the same one for ever, whatever file it comes to lie in, and so no other is. A clone may come to lie in the first file of the
/// volume that it was made of.
#[test]
fn a_clone_that_settles_stays_the_volume_that_it_was() {
    Reactor::simulated(6).block_on(async {
        let shelf = Shelf::default();
        let ids = async |catalogue: &Catalogue| {
            let rows = catalogue.list(None).await.expect("listed");
            rows.into_iter().map(|row| (row.name, row.id)).collect::<BTreeMap<_, _>>()
        };
        let (vm, twin, one) = (name("vm"), name("twin"), snapshot("vm@one"));
        let before = Rc::new(RefCell::default());
        let seen = Rc::clone(&before);
        with_catalogue(&shelf, |catalogue| async move {
            catalogue.create(&vm, MIB, CAREFUL).await.expect("made");
            let of_vm = ids(&catalogue).await[&vm];
            let volume = catalogue.volume(&vm).await.expect("there");
            write(&volume, 0, &[1; 1 << 19]).await.expect("written");
            drop(volume);
            catalogue.snapshot(&one).await.expect("taken");
            catalogue.clone_of(&one, &twin).await.expect("cloned");
            let of_twin = ids(&catalogue).await[&twin];
            assert_ne!(of_vm, of_twin);
            catalogue.delete_snapshot(&one).await.expect("deleted");
            catalogue.delete(&vm, CAREFUL).await.expect("deleted");
            assert_eq!(catalogue.settle().await.merged, 1);
            assert_eq!(ids(&catalogue).await[&twin], of_twin);
            // With snapshots of its own it is the same.
            catalogue.snapshot(&snapshot("twin@two")).await.expect("taken");
            assert_eq!(ids(&catalogue).await[&twin], of_twin);
            *seen.borrow_mut() = ids(&catalogue).await;
        })
        .await;
        with_catalogue(&shelf, |catalogue| async move {
            assert_eq!(ids(&catalogue).await, *before.borrow(), "also after a restart");
        })
        .await;
    });
}

/// What is kept of reservations is found by what a volume is, not by what it is called, and goes with it; a clone has none of it.
#[test]
fn reservations_stay_with_their_volume() {
    Reactor::simulated(7).block_on(async {
        let shelf = Shelf::default();
        let tenant: Tenant = "default".parse().expect("a name");
        let (one, other, spare) = (name("one"), name("other"), name("spare"));
        let of = Rc::new(RefCell::new(Vec::new()));
        let (seen, of_tenant) = (Rc::clone(&of), tenant.clone());
        with_catalogue(&shelf, |catalogue| async move {
            for volume in [&one, &other] {
                catalogue.create(volume, MIB, CAREFUL).await.expect("made");
            }
            let ids: Vec<_> = catalogue.list(None).await.expect("listed");
            let ids: Vec<_> = ids.into_iter().map(|row| row.id).collect();
            // Names change while it is kept.
            let swapped = async {
                for (from, to) in [(&one, &spare), (&other, &one), (&spare, &other)] {
                    catalogue.rename(from, to).await.expect("renamed");
                }
            };
            let kept = async {
                for id in &ids {
                    let text = id.to_string();
                    let kept = catalogue.keep_reservations(&of_tenant, *id, text.as_bytes());
                    kept.await.expect("kept");
                }
            };
            join(swapped, kept).await;
            // Whatever becomes of its files.
            let (first, second) = (snapshot("one@first"), snapshot("one@second"));
            for taken in [&first, &second] {
                catalogue.snapshot(taken).await.expect("taken");
            }
            catalogue.clone_of(&first, &name("twin")).await.expect("cloned");
            catalogue.roll_back(&first, MEANT).await.expect("rolled back");
            let rows = catalogue.list(None).await.expect("listed");
            let twin = rows.iter().find(|row| row.name.name() == "twin").expect("there").id;
            let of_twin = catalogue.reservations(&of_tenant, twin).await.expect("told");
            assert!(of_twin.is_empty());
            *seen.borrow_mut() = ids;
        })
        .await;
        with_catalogue(&shelf, |catalogue| async move {
            for id in of.take() {
                let kept = catalogue.reservations(&tenant, id).await.expect("told");
                assert_eq!(kept, id.to_string().as_bytes());
                catalogue.keep_reservations(&tenant, id, b"").await.expect("forgotten");
                assert!(catalogue.reservations(&tenant, id).await.expect("told").is_empty());
            }
        })
        .await;
    });
}

/// Deleted snapshots are freed while the volume is written: by bytes in memory.
#[test]
fn a_volume_settles_while_it_is_used() {
    for seed in 0..2 {
        Reactor::simulated(seed).block_on(async {
            with_catalogue(&Shelf::default(), |catalogue| async move {
                let vm = name("vm");
                let size = 3 * MIB;
                catalogue.create(&vm, size, CAREFUL).await.expect("made");
                let volume = Rc::new(catalogue.volume(&vm).await.expect("there"));
                let mut bytes = vec![0; size as usize];
                for round in 0..12u8 {
                    let text = format!("vm@s{round}");
                    let settling = reactor::spawn({
                        let catalogue = Rc::clone(&catalogue);
                        async move { catalogue.settle().await }
                    });
                    for _ in 0..8 {
                        let length = 1 + random_u64() % 200_000;
                        let at = random_u64() % (size - length);
                        let part = at as usize..(at + length) as usize;
                        if random_u64().is_multiple_of(4) {
                            let zeroed = volume.write_zeroes(at, length, Zeroing::Free);
                            zeroed.await.expect("zeroed");
                            bytes[part].fill(0);
                        } else {
                            write(&*volume, at, &vec![round + 1; length as usize])
                                .await
                                .expect("ok");
                            bytes[part].fill(round + 1);
                        }
                        assert!(model::read(&*volume, 0, size).await == bytes, "round {round}");
                    }
                    assert_eq!(settling.await.expect("not killed").error, None);
                    catalogue.snapshot(&snapshot(&text)).await.expect("taken");
                    if round >= 2 && round % 3 != 0 {
                        let old = snapshot(&format!("vm@s{}", round - 2));
                        match catalogue.delete_snapshot(&old).await {
                            Ok(()) | Err(OrderError::NoSnapshot { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
                assert_eq!(catalogue.settle().await.left, 0);
                let snapshots = catalogue.snapshots(&vm).await.expect("listed").len();
                let layers = catalogue.layers(&vm).await.expect("told");
                assert_eq!((layers, snapshots), (5, 5), "one for each snapshot that is left");
                assert!(model::read(&*volume, 0, size).await == bytes);
            })
            .await;
        });
    }
}

/// An attribute that nobody understands keeps all layers, rather than any of them be taken for unused.
#[test]
fn what_is_not_understood_is_not_taken_away() {
    Reactor::simulated(5).block_on(async {
        served(&Shelf::default(), |client| async move {
            let catalogue = catalogue_of(client.clone());
            let (vm, one) = (name("vm"), snapshot("vm@one"));
            catalogue.create(&vm, MIB, CAREFUL).await.expect("made");
            catalogue.create(&name("other"), MIB, CAREFUL).await.expect("made");
            catalogue.snapshot(&one).await.expect("taken");
            let mut ino = Ino::ROOT;
            for part in [".levada", "volumes", "default", "other"] {
                ino = client.lookup(ino, part.as_bytes()).await.expect("there").ino;
            }
            let root = levada_wire::meta::Caller { uid: 0, gid: 0 };
            let note = b"trusted.levada.layer";
            let how = levada_wire::meta::SetXattr::default();
            client.set_xattr(root, ino, note, b"{", how).await.expect("set");
            let why = OrderError::LayerUnknown { whose: "volume other".into() };
            catalogue.delete_snapshot(&one).await.expect("its name is gone");
            assert_eq!(catalogue.settle().await.error, Some(why.clone()));
            assert_eq!(layers_of(&client).await.len(), 2, "one, and what hides it");
            let opened = catalogue.volume(&name("other")).await;
            assert_eq!(opened.err(), Some(why));
            assert_eq!(client.remove_xattr(root, ino, note).await, Ok::<(), Error>(()));
            assert_eq!(catalogue.settle().await.merged, 1);
            assert_eq!(layers_of(&client).await, Vec::<String>::new());
            catalogue.close().await.expect("all durable");
        })
        .await;
    });
}
