//! The check of a cluster that is up: what is wrong is found, and work that is under way is no finding.

use crate::fsck::{change_rows, target_of_the_object};
use crate::shelf::{
    ADDRESS, CALLER, Shelf, cluster_file, operator, pattern, served, start, write_file,
};
use levada_base::ids::Ino;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::MIB;
use levada_client::{Client, ClientConfig, Error, File, housekeeper};
use levada_kv::Batch;
use levada_meta::FsckConfig;
use levada_node::assembly::{Cluster, Service};
use levada_node::control::{ControlReply, ControlRequest};
use levada_node::fsck::{CheckConfig, Checks, FsckState, Sum};
use levada_wire::local::{LinkConfig, Network};
use levada_wire::meta::{AttrChange, MetaFault, OpenMode};
use levada_wire::rpc::{ServiceConfig, accept_all};
use std::cell::{Cell, RefCell};
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

async fn checked(cluster: &Rc<Cluster>, config: CheckConfig) -> FsckState {
    let checks = Checks::default();
    checks.start(cluster, config).expect("none runs");
    loop {
        let state = checks.state(0).expect("one was started");
        if state.ended {
            return state;
        }
        reactor::sleep(Duration::from_millis(1)).await;
    }
}

/// The sorts of what is found in a cluster as it lies on the shelf, and what was said.
async fn found(shelf: &Shelf) -> (Vec<String>, FsckState) {
    let cluster = Rc::new(start(cluster_file(), shelf).await.expect("starts"));
    let state = checked(&cluster, CheckConfig::default()).await;
    cluster.stop().await;
    let mut sorts: Vec<String> = state.items.iter().map(|item| item.find.clone()).collect();
    sorts.sort_unstable();
    sorts.dedup();
    let sum = Sum::of(&state.reports);
    assert_eq!((sum.found, sum.left), (state.items.len() as u64, sum.found), "{state:?}");
    assert!(state.items.iter().all(|item| item.done == "left"));
    assert!(state.reports.iter().all(|report| report.items.is_empty()), "told on their own");
    (sorts, state)
}

/// Of a client, as a service has it that is told nothing else.
const LEASE: Duration = Duration::from_secs(60);

fn is_inode(key: &[u8]) -> bool {
    key[0] == b'I' && key[8] == 2
}

#[test]
fn what_does_not_fit_a_file_is_found_with_its_path() {
    Reactor::simulated(40).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let (sorts, state) = found(&shelf).await;
        assert!(sorts.is_empty() && Sum::of(&state.reports).exit_code() == 0, "{state:?}");
        assert!(Sum::of(&state.reports).objects > 0 && state.reports.len() > 1, "{state:?}");

        // The file does not know of its objects: `components`, at 96 of its row.
        let components = Cell::new([0; 8]);
        change_rows(&shelf, "mdt0", |key, mut row| {
            if is_inode(key) {
                components.set(*row[96..].first_chunk().expect("long enough"));
                row[96..104].fill(0);
            }
            Some(row)
        })
        .await;
        let (sorts, state) = found(&shelf).await;
        assert_eq!(sorts, ["unlisted-object"], "{state:?}");
        assert!(state.items.iter().all(|item| item.path.as_deref() == Some("/data")), "{state:?}");
        assert!(state.items.iter().all(|item| item.target.starts_with("ost")), "{state:?}");
        assert_eq!(Sum::of(&state.reports).exit_code(), 4);

        // And it says to be shorter than they are: `size`, at 32.
        let size = Cell::new([0; 8]);
        change_rows(&shelf, "mdt0", |key, mut row| {
            if is_inode(key) {
                row[96..104].copy_from_slice(&components.get());
                size.set(*row[32..].first_chunk().expect("long enough"));
                row[32..40].copy_from_slice(&1000_u64.to_le_bytes());
            }
            Some(row)
        })
        .await;
        let (sorts, state) = found(&shelf).await;
        assert_eq!(sorts, ["long-object"], "{state:?}");
        assert!(state.items.iter().all(|item| item.says == Some(1000)), "{state:?}");

        // What a row that makes no sense says of objects is not known.
        let row = RefCell::new(Vec::new());
        change_rows(&shelf, "mdt0", |key, mut found| {
            if is_inode(key) {
                found[32..40].copy_from_slice(&size.get());
                row.replace(std::mem::replace(&mut found, b"nonsense".to_vec()));
            }
            Some(found)
        })
        .await;
        let (sorts, state) = found(&shelf).await;
        assert!(sorts.iter().all(|sort| !sort.ends_with("-object")), "{state:?}");
        change_rows(&shelf, "mdt0", |key, found| {
            Some(if is_inode(key) { row.borrow().clone() } else { found })
        })
        .await;
        assert_eq!(found(&shelf).await.0, [""; 0]);

        // One object is under another name than its layout gives it.
        let ost = target_of_the_object(&shelf).await;
        let cluster = start(cluster_file(), &shelf).await.expect("starts");
        let target = cluster.targets.iter().find(|target| target.entry.name() == ost);
        let store = target.and_then(|target| target.store.clone()).expect("it serves");
        let (from, to) = (Bound::Included(&b"O"[..]), Bound::Excluded(&b"P"[..]));
        let rows = store.scan(from, to, 9).await.expect("reads");
        let mut batch = Batch::default();
        let mut key = rows[0].0.to_vec();
        // Its component, and the file system.
        key[20] ^= 8;
        batch.put(&key, &rows[0].1);
        key[1] ^= 1;
        batch.put(&key, &rows[0].1);
        batch.delete(&rows[0].0);
        store.durable(store.apply(batch).expect("room")).await.expect("durable");
        cluster.stop().await;
        let (sorts, state) = found(&shelf).await;
        for sort in ["foreign-object", "misplaced-object", "missing-object"] {
            assert!(sorts.iter().any(|found| found == sort), "{sort}: {state:?}");
        }
        let missing = state.items.iter().find(|item| item.find == "missing-object");
        assert_eq!(missing.and_then(|item| item.path.as_deref()), Some("/data"));
    });
}

#[test]
fn what_is_wrong_with_an_index_is_found() {
    Reactor::simulated(44).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let ost = target_of_the_object(&shelf).await;
        // `index bytes`, at 72 of the log's row.
        let change = async |by: i8| {
            let changed = change_rows(&shelf, &ost, |key, mut row| {
                if key == b"M" {
                    row[74] = row[74].wrapping_add_signed(by);
                }
                Some(row)
            });
            changed.await;
        };
        change(1).await;
        let (sorts, state) = found(&shelf).await;
        assert_eq!(
            (&sorts[..], state.items.len()),
            (&["index-sum".to_owned()][..], 1),
            "{state:?}"
        );
        let item = &state.items[0];
        assert_eq!((&item.target, item.says), (&ost, item.has.map(|has| has + (1 << 16))));
        assert_eq!(Sum::of(&state.reports).exit_code(), 4);
        change(-1).await;
        let (sorts, state) = found(&shelf).await;
        assert_eq!(sorts, [""; 0], "{state:?}");
        let report = state.reports.iter().find(|report| report.target == ost).expect("one");
        assert!(report.rows > 0 && report.objects > 0 && report.memory_bytes > 0, "{report:?}");

        // The object is lost, and its bytes are not.
        change_rows(&shelf, &ost, |key, row| (key[0] != b'O').then_some(row)).await;
        let (sorts, state) = found(&shelf).await;
        for sort in ["extent-object", "missing-object"] {
            let item = state.items.iter().find(|item| item.find == sort);
            let item = item.unwrap_or_else(|| panic!("{sort}: {sorts:?}"));
            assert_eq!((&item.target, item.path.as_deref()), (&ost, Some("/data")));
        }
    });
}

/// Takes the file's inode and names away, as if it had never been; with `next_ino` also what numbers were given out.
async fn forget_the_file(shelf: &Shelf, next_ino: Option<u64>) {
    change_rows(shelf, "mdt0", |key, mut row| {
        let is_name = key.ends_with(b"data") && key[0] == b'N' || key[0] == b'D';
        if key == b"M\x01"
            && let Some(next_ino) = next_ino
        {
            row[1..9].copy_from_slice(&next_ino.to_le_bytes());
        }
        (!(is_name || is_inode(key))).then_some(row)
    })
    .await;
}

#[test]
fn an_object_of_no_file_is_told_when_nobody_can_take_it_away_any_more() {
    Reactor::simulated(41).block_on(async {
        for (next_ino, sort) in [(None, "stray-object"), (Some(2), "newer-object")] {
            let shelf = Shelf::default();
            served(&shelf, write_file).await;
            forget_the_file(&shelf, next_ino).await;
            let (sorts, state) = found(&shelf).await;
            assert!(sorts.iter().any(|found| found == sort), "{sort}: {state:?}");
            assert!(state.reports[0].seconds >= LEASE.as_secs_f64(), "{state:?}");
        }
    });
}

#[test]
fn a_check_that_is_stopped_says_so_of_each_target() {
    Reactor::simulated(42).block_on(async {
        let shelf = Rc::new(Shelf::default());
        served(&shelf, write_file).await;
        forget_the_file(&shelf, None).await;
        let (cluster, operator) = operator(&shelf).await;
        let order = ControlRequest::Fsck { memory_bytes: MIB, fast: true };
        assert_eq!(operator.answer(order).await, ControlReply::FsckStarted { number: 1 });
        let state = async || match operator.answer(ControlRequest::FsckState { from: 0 }).await {
            ControlReply::Fsck(state) => *state,
            other => panic!("{other:?}"),
        };
        // It waits for a lease now.
        reactor::sleep(Duration::from_secs(20)).await;
        let now = state().await;
        assert!(now.phase.contains("waiting") && now.target == "mdt0" && !now.ended, "{now:?}");
        assert_eq!(operator.answer(ControlRequest::FsckStop).await, ControlReply::Done);
        let stopped = state().await;
        assert!(stopped.ended, "{stopped:?}");
        assert_eq!(stopped.reports.len(), cluster.targets.len());
        let is_told = |what: &String| what.contains("the check was stopped");
        assert!(stopped.reports.iter().all(|report| report.not_checked.iter().any(is_told)));
        assert_eq!(Sum::of(&stopped.reports).exit_code() & 8, 8);
        cluster.stop().await;
    });
}

#[test]
fn a_target_that_is_stopped_is_told_and_nothing_is_missing_for_it() {
    Reactor::simulated(43).block_on(async {
        let shelf = Shelf::default();
        served(&shelf, write_file).await;
        let ost = target_of_the_object(&shelf).await;
        change_rows(&shelf, &ost, |key, row| (key != b"M").then_some(row)).await;
        let (sorts, state) = found(&shelf).await;
        assert_eq!(sorts, [""; 0], "{state:?}");
        let stopped = state.reports.iter().find(|report| report.target == ost).expect("one of all");
        assert!(stopped.not_checked[0].contains("--rebuild-index"), "{stopped:?}");
        let sum = Sum::of(&state.reports);
        assert_eq!((sum.exit_code(), sum.not_checked.len()), (8, 1), "{state:?}");
    });
}

fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

/// One of some clients that make, write, cut and remove files of a few names.
struct Worker {
    client: Client,
    /// Some of them have no name any more.
    open: Vec<File>,
    is_over: Rc<Cell<bool>>,
}

/// What others do to a file may come between.
fn may_fail<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(done) => Some(done),
        Err(Error::Meta(MetaFault::NotFound | MetaFault::Exists | MetaFault::Stale)) => None,
        // Removed files go later.
        Err(Error::Full) => None,
        Err(error) => panic!("{error}"),
    }
}

impl Worker {
    async fn work(mut self) {
        while !self.is_over.get() {
            self.step().await;
            if random(4) == 0 {
                reactor::sleep(Duration::from_micros(random(5000))).await;
            }
        }
        for file in self.open {
            file.close().await;
        }
    }

    async fn step(&mut self) {
        let name = format!("n{}", random(12)).into_bytes();
        let client = &self.client;
        let at = random(self.open.len().max(1) as u64) as usize;
        match (random(12), self.open.get(at)) {
            (0..3, _) | (_, None) => {
                let mode = OpenMode { write: true, truncate: random(3) == 0 };
                let made = client.create_file(CALLER, Ino::ROOT, &name, 0o644, mode, false).await;
                self.open.extend(may_fail(made).map(|(file, ..)| file));
            }
            (3..7, Some(file)) => {
                let bytes = 1 + random(if random(4) == 0 { 200_000 } else { 5000 }) as usize;
                may_fail(file.write(random(6_000_000), pattern(bytes)).await);
            }
            (7, Some(file)) => drop(may_fail(file.fsync().await)),
            (8, Some(file)) => {
                let change = AttrChange { size: Some(random(4_000_000)), ..AttrChange::default() };
                may_fail(client.set_attr(CALLER, file.ino(), change).await);
            }
            (9, _) => drop(may_fail(client.unlink(CALLER, Ino::ROOT, &name).await)),
            (_, Some(_)) => self.open.swap_remove(at).close().await,
        }
    }
}

/// Checks of a cluster in use; how many there were, and objects that were compared.
fn checks_under_load(seed: u64) -> (u64, u64) {
    const CHECKS: u64 = 12;
    Reactor::simulated(seed).block_on(async {
        let shelf = Shelf::default();
        let cluster = Rc::new(start(cluster_file(), &shelf).await.expect("starts"));
        let services = Group::new();
        let net = Network::new(LinkConfig::default());
        let listener = net.listen(ADDRESS);
        let router = Rc::clone(&cluster.router) as Rc<_>;
        let accepting = accept_all(Rc::new(listener), router, ServiceConfig::default());
        reactor::spawn_in(&services, accepting);
        for target in &cluster.targets {
            if let Service::Metadata { service, .. } = &target.service {
                let service = Rc::clone(service);
                reactor::spawn_in(&services, async move { service.run().await });
            }
        }
        let target = cluster.metadata_target().expect("a metadata target");
        let connect = async |from: &str, uuid| {
            Client::connect(ClientConfig::new(net.transport(from), ADDRESS, target, uuid)).await
        };
        let house = connect("house", *cluster.table.fs.as_bytes()).await.expect("connects");
        reactor::spawn_in(&services, housekeeper::keep_house(house));
        let is_over = Rc::new(Cell::new(false));
        let mut clients = Vec::new();
        let mut workers = Vec::new();
        for number in 0..3 {
            let client = connect(&format!("c{number}"), [number; 16]).await.expect("connects");
            for _ in 0..2 {
                let (client, is_over) = (client.clone(), Rc::clone(&is_over));
                workers.push(reactor::spawn(Worker { client, open: Vec::new(), is_over }.work()));
            }
            clients.push(client);
        }
        let mut compared = 0;
        for _ in 0..CHECKS {
            reactor::sleep(Duration::from_millis(random(100))).await;
            let metadata = FsckConfig { yields: random(2) == 0, ..FsckConfig::default() };
            let patience = Some(Duration::from_millis(random(300)));
            let state = checked(&cluster, CheckConfig { metadata, patience }).await;
            let sum = Sum::of(&state.reports);
            assert!(state.items.is_empty() && sum.found == 0, "seed {seed}: {state:?}");
            assert!(sum.not_checked.iter().all(|what| what.contains("in use")), "{state:?}");
            compared += sum.objects;
        }
        is_over.set(true);
        for worker in workers {
            worker.await.expect("it lives");
        }
        for client in &clients {
            client.shutdown().await.expect("all durable");
        }
        // What was left of deleted files goes.
        reactor::sleep(Duration::from_secs(90)).await;
        let state = checked(&cluster, CheckConfig::default()).await;
        assert_eq!(Sum::of(&state.reports).exit_code(), 0, "seed {seed}: {state:?}");
        services.kill();
        cluster.stop().await;
        (CHECKS, compared)
    })
}

#[test]
fn work_that_is_under_way_is_no_finding() {
    let (checks, compared) = (0..4)
        .map(checks_under_load)
        .fold((0, 0), |sum, (checks, objects)| (sum.0 + checks, sum.1 + objects));
    assert!(checks > 30 && compared > 200, "{checks} checks, {compared} objects");
}
