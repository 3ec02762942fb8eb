//! Programs that work while services die and come back, against a model of bytes in a vector.

use super::{ROOT, ROOT_DIR, UNIT, WRITE, World, below, data, flat, random_bytes};
use levada_base::reactor::{self, Group, Reactor};
use levada_client::{Client, File};
use levada_wire::meta::{AttrChange, OpenMode};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

pub const TARGETS: u32 = 3;
const FILES: usize = 4;
const SIZE_MAX: u64 = 10 * UNIT;

/// One change of a file, as asked for.
#[derive(Clone)]
pub enum Change {
    Write(u64, Vec<u8>),
    Cut(u64),
}

/// A file as a vector, and what it may be after a crash.
#[derive(Clone, Default)]
pub struct Model {
    now: Vec<u8>,
    synced: Vec<u8>,
    /// Since the last sync, the last one perhaps only begun.
    changes: Vec<Change>,
    /// Writes that were durable when they were answered: how many of the changes had come by then, where, and what.
    durable: Vec<(usize, u64, Vec<u8>)>,
}

impl Model {
    pub fn begin(&mut self, change: Change) {
        self.changes.push(change);
    }

    pub fn acknowledged(&mut self) {
        match self.changes.last().expect("begun") {
            Change::Write(offset, bytes) => {
                let (start, end) = (*offset as usize, *offset as usize + bytes.len());
                self.now.resize(self.now.len().max(end), 0);
                self.now[start..end].copy_from_slice(bytes);
            }
            Change::Cut(size) => self.now.resize(*size as usize, 0),
        }
    }

    pub fn synced(&mut self) {
        self.synced = self.now.clone();
        self.changes.clear();
        self.durable.clear();
    }

    /// The last change, a write within the file, is durable.
    pub fn acknowledged_as_durable(&mut self) {
        self.acknowledged();
        if let Some(Change::Write(offset, bytes)) = self.changes.last() {
            self.durable.push((self.changes.len(), *offset, bytes.clone()));
        }
    }

    /// What is durable at a place, and the changes that came later.
    fn known(&self, at: usize) -> (u8, &[Change]) {
        let last = self.durable.iter().rev().find_map(|(changes, offset, bytes)| {
            let byte = at.checked_sub(*offset as usize).and_then(|at| bytes.get(at));
            byte.map(|byte| (*byte, &self.changes[*changes..]))
        });
        last.unwrap_or((self.synced.get(at).copied().unwrap_or(0), &self.changes))
    }

    /// After a crash every byte is as synced, or as some later change made it.
    pub fn check(&self, found: &[u8], seed: u64) {
        let mut sizes = (self.synced.len(), self.synced.len());
        let mut size = self.synced.len();
        for (number, change) in self.changes.iter().enumerate() {
            size = match change {
                Change::Write(offset, bytes) => size.max(*offset as usize + bytes.len()),
                Change::Cut(size) => *size as usize,
            };
            sizes = (sizes.0.min(size), sizes.1.max(size));
            for (_, offset, bytes) in self.durable.iter().filter(|(by, ..)| *by == number + 1) {
                sizes.0 = sizes.0.max(*offset as usize + bytes.len());
            }
        }
        let len = found.len();
        assert!((sizes.0..=sizes.1).contains(&len), "seed {seed}: size {len} of {sizes:?}");
        for (at, byte) in found.iter().enumerate() {
            let (synced, changes) = self.known(at);
            let possible = changes.iter().any(|change| match change {
                Change::Write(offset, bytes) => {
                    at.checked_sub(*offset as usize).and_then(|at| bytes.get(at)) == Some(byte)
                }
                Change::Cut(size) => at >= *size as usize && *byte == 0,
            });
            assert!(*byte == synced || possible, "seed {seed}: byte {at} is {byte}, not {synced}");
        }
    }
}

pub async fn work(client: Client, file: File, model: Rc<RefCell<Model>>, steps: usize) {
    for _ in 0..steps {
        match below(13) {
            0..5 => {
                let offset = below(SIZE_MAX);
                let bytes = random_bytes(1 + below(3 * UNIT) as usize);
                model.borrow_mut().begin(Change::Write(offset, bytes.clone()));
                file.write(offset, data(&bytes)).await.expect("no error reaches a program");
                model.borrow_mut().acknowledged();
            }
            12 => {
                let size = model.borrow().now.len() as u64;
                let offset = below(size.max(1));
                let bytes = random_bytes(1 + below(3 * UNIT) as usize);
                let is_within = offset + bytes.len() as u64 <= size;
                model.borrow_mut().begin(Change::Write(offset, bytes.clone()));
                file.write_durably(offset, data(&bytes)).await.expect("no error reaches a program");
                if is_within {
                    model.borrow_mut().acknowledged_as_durable();
                } else {
                    model.borrow_mut().acknowledged();
                    model.borrow_mut().synced();
                }
            }
            5..8 => {
                let (offset, bytes) = (below(SIZE_MAX), 1 + below(4 * UNIT));
                let found = flat(&file.read(offset, bytes).await.expect("no error"));
                let model = model.borrow();
                let start = (offset as usize).min(model.now.len());
                let end = ((offset + bytes) as usize).min(model.now.len());
                assert!(found == model.now[start..end], "reads see every acknowledged write");
            }
            8 => {
                file.fsync().await.expect("no error");
                model.borrow_mut().synced();
            }
            9 => {
                // Zeroes to the model; those of a hole end with the file.
                let size = model.borrow().now.len() as u64;
                let (offset, bytes, grows) = (below(SIZE_MAX), 1 + below(3 * UNIT), below(2) == 0);
                let end = if grows { offset + bytes } else { size.min(offset + bytes) };
                let zeroes = vec![0; end.saturating_sub(offset) as usize];
                model.borrow_mut().begin(Change::Write(offset.min(end), zeroes));
                match grows {
                    true => file.zero(offset, bytes).await.expect("no error reaches a program"),
                    false => file.punch(offset, bytes).await.expect("no error reaches a program"),
                }
                model.borrow_mut().acknowledged();
            }
            10 => {
                let (size, end) = (model.borrow().now.len() as u64, below(SIZE_MAX));
                let zeroes = vec![0; end.saturating_sub(size) as usize];
                model.borrow_mut().begin(Change::Write(size, zeroes));
                file.grow(end).await.expect("no error reaches a program");
                model.borrow_mut().acknowledged();
            }
            _ => {
                let size = below(SIZE_MAX);
                model.borrow_mut().begin(Change::Cut(size));
                let change = AttrChange { size: Some(size), ..AttrChange::default() };
                client.set_attr(ROOT, file.ino(), change).await.expect("no error");
                model.borrow_mut().acknowledged();
                let attr = file.attr().await.expect("no error");
                assert_eq!(attr.size, size);
            }
        }
        if below(4) == 0 {
            reactor::sleep(Duration::from_millis(below(20))).await;
        }
    }
}

pub async fn chaos(world: Rc<World>, calm: Rc<Cell<bool>>) {
    while !calm.get() {
        reactor::sleep(Duration::from_millis(5 + below(60))).await;
        let number = below(u64::from(TARGETS)) as u32;
        let address = format!("object-{number}");
        match below(8) {
            0..3 => world.restart_server(number),
            3 => {
                world.kill_server(number);
                reactor::sleep(Duration::from_millis(below(300))).await;
                world.restart_server(number);
            }
            4 => world.restart_meta().await,
            5 => world.network.disconnect("client", &address),
            6 => {
                // Everything restarts at once.
                world.kill_meta();
                (0..TARGETS).for_each(|number| world.restart_server(number));
                world.start_meta().await;
            }
            _ => {
                world.network.partition("client", &address);
                reactor::sleep(Duration::from_millis(below(100))).await;
                world.network.heal("client", &address);
            }
        }
    }
}

pub async fn open_files(client: &Client) -> Vec<(File, Rc<RefCell<Model>>)> {
    let mut files = Vec::new();
    for n in 0..FILES {
        let name = format!("file-{n}");
        let made = client.create_file(ROOT, ROOT_DIR, name.as_bytes(), 0o644, WRITE, true).await;
        files.push((made.expect("a fresh name").0, Rc::default()));
    }
    files
}

pub async fn read_all(client: &Client, n: usize) -> Vec<u8> {
    let attr = client.lookup(ROOT_DIR, format!("file-{n}").as_bytes()).await.expect("there");
    let open = OpenMode { write: false, truncate: false };
    let (file, opened) = client.open(attr.ino, open).await.expect("there");
    assert_eq!(opened.size, attr.size);
    let found = flat(&file.read(0, 4 * SIZE_MAX).await.expect("readable"));
    assert_eq!(found.len() as u64, attr.size);
    file.close().await;
    found
}

/// Programs work while services die; then everything restarts, and every byte is compared.
pub fn nothing_is_lost(seed: u64, steps: usize) {
    Reactor::simulated(seed).block_on(async {
        let world = World::new(TARGETS).await;
        world.network.break_one_in(300);
        let client = world.client("client").await;
        let files = open_files(&client).await;
        let calm = Rc::new(Cell::new(false));
        let chaos = reactor::spawn(chaos(Rc::clone(&world), Rc::clone(&calm)));
        let tasks: Vec<_> = files
            .iter()
            .map(|(file, model)| {
                reactor::spawn(work(client.clone(), file.clone(), Rc::clone(model), steps))
            })
            .collect();
        for task in tasks {
            task.await.expect("not killed");
        }
        calm.set(true);
        chaos.await;
        let mut models = Vec::new();
        for (file, model) in files {
            file.close().await;
            models.push(model);
        }
        client.shutdown().await.expect("no error");
        assert_eq!(client.unstable_bytes(), 0);
        drop(client);
        (0..TARGETS).for_each(|number| world.restart_server(number));
        world.restart_meta().await;
        let other = world.client("other").await;
        for (n, model) in models.iter().enumerate() {
            assert!(read_all(&other, n).await == model.borrow().now, "seed {seed} file {n}");
        }
    });
}

/// The client's machine dies too: what was synced is there, the rest old or new.
pub fn synced_survives(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let world = World::new(TARGETS).await;
        world.network.break_one_in(300);
        let machine = Group::new();
        let models: Rc<RefCell<Vec<Rc<RefCell<Model>>>>> = Rc::default();
        let calm = Rc::new(Cell::new(false));
        {
            let (world, models) = (Rc::clone(&world), Rc::clone(&models));
            reactor::spawn_in(&machine, async move {
                let client = world.client("client").await;
                for (file, model) in open_files(&client).await {
                    models.borrow_mut().push(Rc::clone(&model));
                    reactor::spawn(work(client.clone(), file, model, 1000));
                }
                std::future::pending::<()>().await;
            });
        }
        let chaos = reactor::spawn(chaos(Rc::clone(&world), Rc::clone(&calm)));
        // Also after the service was told of durable writes by themselves.
        reactor::sleep(Duration::from_millis(50 + below(1000 << below(3)))).await;
        machine.kill();
        calm.set(true);
        chaos.await;
        (0..TARGETS).for_each(|number| world.restart_server(number));
        world.restart_meta().await;
        let background = world.client("housekeeper").await;
        for _ in 0..60 {
            reactor::sleep(Duration::from_secs(1)).await;
            levada_client::housekeeper::do_chores(&background).await.expect("chores");
        }
        for (n, model) in models.take().iter().enumerate() {
            let attr = background.lookup(ROOT_DIR, format!("file-{n}").as_bytes()).await;
            assert!(!attr.expect("there").writers, "settled");
            let found = read_all(&background, n).await;
            model.borrow().check(&found, seed);
        }
    });
}

/// One client writes and does not sync; another writes over it, or cuts it off, and syncs. Then the targets
/// restart, perhaps more than once, and the first client, which has kept its bytes, finds out.
pub fn others_stay(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let world = World::new(TARGETS).await;
        let (first, second) = (world.client("first").await, world.client("second").await);
        let ours = super::create(&first, "shared").await;
        ours.fsync().await.expect("no error");
        let bytes = random_bytes(SIZE_MAX as usize);
        ours.write(0, data(&bytes)).await.expect("no error");

        let (theirs, _) = second.open(ours.ino(), WRITE).await.expect("there");
        let cuts = below(2) == 0;
        let mut expected = vec![0; SIZE_MAX as usize];
        if cuts {
            for size in [0, SIZE_MAX] {
                let change = AttrChange { size: Some(size), ..AttrChange::default() };
                second.set_attr(ROOT, ours.ino(), change).await.expect("no error");
            }
        } else {
            expected = random_bytes(SIZE_MAX as usize);
            theirs.write(0, data(&expected)).await.expect("no error");
        }
        theirs.fsync().await.expect("no error");

        for _ in 0..1 + below(3) {
            (0..TARGETS).for_each(|number| world.restart_server(number));
            reactor::sleep(Duration::from_millis(below(40))).await;
        }
        ours.fsync().await.expect("no error");
        let found = flat(&theirs.read(0, SIZE_MAX).await.expect("no error"));
        assert!(found == expected, "seed {seed}: old bytes came back, cuts {cuts}");
    });
}
