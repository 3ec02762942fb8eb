//! File systems that run full.
//!
//! A worker whose write finds no room is told so, and goes on: any of its bytes may be there, and what is there after
//! an fsync stays. At the end of some seeds the file system is filled on purpose, between what the workers have left: all that
//! was acknowledged is there, also when the node dies over it; deleting works, and what was deleted fits again.

use super::cluster::CLIENT;
use super::model::Change;
use super::scenario::{LEASE, Run, uuid};
use super::worker::{self, CALLER, Worker};
use crate::Rng;
use levada_base::Buf;
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_base::units::KIB;
use levada_client::{Client, Error, File};
use levada_wire::meta::AttrChange;
use std::ops::Range;

/// In every eighth seed, whatever else the seed's number chooses.
const SEEDS: u64 = 8;
/// In every second seed with small drives.
const CROWDED_SEEDS: u64 = 6;
const CROWDED_SEED: u64 = 4;
const WRITERS: u64 = 4;
const WRITE_BYTES_MAX: u64 = 200 * KIB;
/// Of the bytes that are shown as free, as many are written: the rest is for headers.
const WRITTEN_PERCENT: u64 = 98;
/// When that is deleted all of them are shown again, but for records without data.
const RECORDS_BYTES: u64 = 32 * KIB;
/// Each writer ends with its first refusal, where a shorter write might have fitted.
const STOPPED_SHORT_BYTES: u64 = WRITERS * WRITE_BYTES_MAX;

/// A file, and the bytes of it that were acknowledged.
struct Filler {
    name: Vec<u8>,
    file: File,
    bytes: Vec<u8>,
    /// Where a write was refused: any of its bytes may be there, until the node dies.
    refused: Range<usize>,
}

impl Filler {
    async fn new(client: &Client, name: &str, number: u64) -> Self {
        let name = format!("{name}{number}").into_bytes();
        let (file, _) = worker::create(client, Ino::ROOT, &name).await;
        Self { name, file, bytes: Vec::new(), refused: 0..0 }
    }

    /// Writes, and now and then over what is there, until there is no room.
    async fn fill(&mut self, seed: u64, rng: &mut Rng) {
        loop {
            let len = rng.between(1, WRITE_BYTES_MAX) as usize;
            let end = self.bytes.len();
            let offset = if rng.one_in(8) { rng.below(end as u64 + 1) as usize } else { end };
            let data = rng.bytes(len);
            let written = self.file.write(offset as u64, Buf::copy_of(&data).into_vec()).await;
            match written {
                Ok(()) => {
                    self.bytes.resize(end.max(offset + len), 0);
                    self.bytes[offset..offset + len].copy_from_slice(&data);
                }
                Err(Error::Full) => {
                    self.refused = offset..offset + len;
                    return;
                }
                Err(error) => panic!("seed {seed}: a full file system said {error}"),
            }
        }
    }

    async fn verify(&self, seed: u64, when: &str) {
        let read = self.file.read(0, self.bytes.len() as u64).await;
        let read = read.unwrap_or_else(|error| panic!("seed {seed}: {when}: {error}"));
        let read = worker::joined(&read);
        let mut expected = self.bytes.clone();
        self.allow_refused(&mut expected, &read);
        if let Some(what) = worker::difference(&expected, &read) {
            panic!("seed {seed}: {when}: {}: {what}", worker::text(&self.name));
        }
    }

    /// What was refused may read as it does.
    fn allow_refused(&self, expected: &mut [u8], read: &[u8]) {
        let both = expected.iter_mut().zip(read);
        let refused = both.skip(self.refused.start).take(self.refused.len());
        refused.for_each(|(expected, read)| *expected = *read);
    }
}

/// True when the file system of this seed is filled on purpose at its end. As much fits each time only where new
/// files lie on all targets each time.
pub(super) fn is_filled(seed: u64) -> bool {
    seed % SEEDS == seed / SEEDS % SEEDS
}

/// What fills most of a small file system from its beginning, and must stay there.
pub(super) struct Crowd(Vec<(Ino, Vec<u8>)>);

impl Worker {
    /// Writes; what it wrote is the model's then, or what it finds when it was refused.
    pub(super) async fn put(&self, id: u64, file: &File, offset: usize, data: Vec<u8>) {
        let written = file.write(offset as u64, Buf::copy_of(&data).into_vec());
        self.put_by(id, file, offset, data, written).await;
    }

    /// A write that is durable when it is answered.
    pub(super) async fn put_durably(&self, id: u64, file: &File, offset: usize, data: Vec<u8>) {
        let (told, bytes) = (self.told(), data.len());
        let is_within = offset + bytes <= self.state.borrow_mut().tree.file(id).data.len();
        let written = file.write_durably(offset as u64, Buf::copy_of(&data).into_vec());
        if !self.put_by(id, file, offset, data, written).await || bytes == 0 {
            return;
        }
        self.durable(told);
        let mut state = self.state.borrow_mut();
        match is_within {
            true => state.tree.file(id).durable_now(offset, bytes),
            false => state.tree.file(id).synced_now(),
        }
    }

    /// The same, where something else writes those bytes; false when there was no room.
    pub(super) async fn put_by(
        &self,
        id: u64,
        file: &File,
        offset: usize,
        data: Vec<u8>,
        written: impl Future<Output = Result<(), Error>>,
    ) -> bool {
        let change = Change::Write { offset, data: data.clone() };
        self.state.borrow_mut().tree.file(id).will(change);
        let written = self.done(written).await;
        if written != Err(Error::Full) {
            self.expect(written, None);
            self.state.borrow_mut().tree.file(id).write(offset, &data);
            return true;
        }
        // Until it is synced, what it left may go with the node.
        self.note(format!("no room for it; fsync and read node {id}"));
        let synced = self.done(file.fsync()).await;
        self.expect(synced, None);
        let read = self.done(file.read(offset as u64, data.len() as u64)).await;
        let read = worker::joined(&self.expect(read, None).expect("success was expected"));
        let mut state = self.state.borrow_mut();
        state.refused += 1;
        let file = state.tree.file(id);
        let before = file.data.get(offset..).unwrap_or_default();
        let is_right = |(at, byte): (usize, &u8)| {
            *byte == data[at] || *byte == before.get(at).copied().unwrap_or(0)
        };
        let is_whole = read.len() >= before.len().min(data.len());
        if !is_whole || !read.iter().enumerate().all(is_right) {
            drop(state);
            self.fail(&format!("node {id}: a write was refused, and other bytes are there"));
        }
        file.write(offset, &read);
        false
    }
}

impl Run {
    /// In some seeds with small drives, leaves the workers so little room that they are refused now and then.
    pub(super) async fn crowd(&self) -> Option<Crowd> {
        let seed = self.world.seed;
        if seed % CROWDED_SEEDS != CROWDED_SEED {
            return None;
        }
        let config = self.stack.client_config(CLIENT, uuid(seed, 6));
        let client = Client::connect(config).await.expect("nothing refuses the client");
        let mut rng = self.world.rng(Rng::fork);
        let mut files = Vec::new();
        for mut filler in fill(&client, seed, "crowd", &mut rng).await {
            let size = filler.bytes.len() / 100 * rng.between(80, 97) as usize;
            let change = AttrChange { size: Some(size as u64), ..AttrChange::default() };
            let cut = client.set_attr(CALLER, filler.file.ino(), change).await;
            cut.unwrap_or_else(|error| panic!("seed {seed}: truncation when full: {error}"));
            filler.bytes.truncate(size);
            let synced = filler.file.fsync().await;
            synced.unwrap_or_else(|error| panic!("seed {seed}: fsync of what fitted: {error}"));
            let read = filler.file.read(0, size as u64).await.expect("it was just written");
            filler.verify(seed, "the crowd").await;
            files.push((filler.file.ino(), worker::joined(&read)));
            filler.file.close().await;
        }
        client.shutdown().await.expect("what was acknowledged fits");
        Some(Crowd(files))
    }

    /// What was there from the beginning is there.
    pub(super) async fn check_crowd(&self, crowd: Option<Crowd>) {
        let Some(Crowd(files)) = crowd else { return };
        let seed = self.world.seed;
        let config = self.stack.client_config(CLIENT, uuid(seed, 7));
        let client = Client::connect(config).await.expect("nothing refuses the client");
        for (ino, bytes) in files {
            let read = worker::read_whole(&client, ino).await;
            let read = read.unwrap_or_else(|error| panic!("seed {seed}: {ino:?}: {error}"));
            if let Some(what) = worker::difference(&bytes, &read) {
                panic!("seed {seed}: {ino:?} of the crowd: {what}");
            }
        }
        client.shutdown().await.expect("it has nothing to lose");
    }

    pub(super) async fn runs_full(&self) {
        let seed = self.world.seed;
        if !is_filled(seed) {
            return;
        }
        let config = self.stack.client_config(CLIENT, uuid(seed, 5));
        let client = Client::connect(config).await.expect("nothing refuses the client");
        let mut rng = self.world.rng(Rng::fork);
        let (fillers, shown) = fill_as_shown(&client, seed, "filler", &mut rng).await;
        if rng.one_in(2) {
            self.die_and_come_back(rng.one_in(2)).await;
        }
        for filler in &fillers {
            let synced = filler.file.fsync().await;
            synced.unwrap_or_else(|error| panic!("seed {seed}: fsync of what fitted: {error}"));
        }
        if rng.one_in(2) {
            self.die_and_come_back(rng.one_in(2)).await;
        }
        for filler in fillers {
            filler.verify(seed, "full").await;
            let removed = client.unlink(CALLER, Ino::ROOT, &filler.name).await;
            removed.unwrap_or_else(|error| panic!("seed {seed}: unlink when full: {error}"));
            filler.file.close().await;
        }
        // A node that was restarted keeps what others might have open.
        reactor::sleep(LEASE).await;
        let (fillers, again) = fill_as_shown(&client, seed, "filler", &mut rng).await;
        self.world.tell(|| format!("{shown} bytes were free, then {again}"));
        assert!(
            again + RECORDS_BYTES >= shown,
            "seed {seed}: {shown} bytes were free; when what was written into them was deleted, {again}"
        );
        for filler in fillers {
            filler.verify(seed, "full again").await;
            filler.file.close().await;
        }
        client.shutdown().await.expect("what was acknowledged fits");
        self.world.coverage.borrow_mut().count("file systems run full", 1);
    }

    async fn die_and_come_back(&self, power: bool) {
        match power {
            true => self.world.power_cut().await,
            false => self.world.kill(),
        }
        self.stack.start().await;
    }
}

/// Fills what is shown as free; how much that was.
async fn fill_as_shown(
    client: &Client,
    seed: u64,
    name: &'static str,
    rng: &mut Rng,
) -> (Vec<Filler>, u64) {
    let shown = client.space().await.expect("told").free_bytes;
    let fillers = fill(client, seed, name, rng).await;
    let written: usize = fillers.iter().map(|filler| filler.bytes.len()).sum();
    // More where files go meanwhile that dead clients had open.
    assert!(
        (written as u64 + STOPPED_SHORT_BYTES) * 100 >= shown * WRITTEN_PERCENT,
        "seed {seed}: {written} bytes fitted of {shown}"
    );
    (fillers, shown)
}

/// Several writers at once, until all were told that there is no room.
async fn fill(client: &Client, seed: u64, name: &'static str, rng: &mut Rng) -> Vec<Filler> {
    let tasks: Vec<_> = (0..WRITERS)
        .map(|number| {
            let (client, mut rng) = (client.clone(), rng.fork());
            reactor::spawn(async move {
                let mut filler = Filler::new(&client, name, number).await;
                filler.fill(seed, &mut rng).await;
                filler
            })
        })
        .collect();
    let mut fillers = Vec::new();
    for task in tasks {
        fillers.push(task.await.expect("nobody kills it"));
    }
    fillers
}
