//! Layers on files in memory, against vectors of bytes: frozen ones, power cuts, files that fail.

use super::cover::{GRANULE_BYTES, HIDDEN_BYTES, REGION_BYTES};
use super::layer::{Below, Layer};
use super::sparse::Sparse;
use crate::VolumeError;
use crate::gate::Gate;
use futures_util::future::join_all;
use levada_base::buf::bytes_in;
use levada_base::reactor::{self, Reactor, random_u64};
use levada_base::units::{round_down, round_up};
use levada_base::{Buf, BufMut, IoVec};
use levada_device::Durability;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// The kind of change that is a durable write.
const DURABLE: u64 = 4;
/// What is written lies around the seam of two regions.
const BASE: u64 = REGION_BYTES - 5 * GRANULE_BYTES;
const WINDOW: u64 = 10 * GRANULE_BYTES;

/// A change that is not durable: bytes from a place on, or a hole.
#[derive(Clone)]
struct Change {
    at: u64,
    bytes: Vec<Option<u8>>,
}

/// Makes a change of `cells`, the first of which is at `base`.
fn make(base: u64, cells: &mut [Option<u8>], change: &Change) {
    for (place, byte) in (change.at..).zip(&change.bytes) {
        if let Some(cell) = place.checked_sub(base).and_then(|at| cells.get_mut(at as usize)) {
            *cell = *byte;
        }
    }
}

/// A file of which only some bytes from `base` on can hold data.
struct MemoryFile {
    base: u64,
    durable: RefCell<Vec<Option<u8>>>,
    now: RefCell<Vec<Option<u8>>>,
    pending: RefCell<Vec<Change>>,
    /// One of so many changes is made by half, and fails.
    fails: Cell<u64>,
}

impl MemoryFile {
    fn new(base: u64, bytes: u64) -> Rc<Self> {
        let none = vec![None; bytes as usize];
        let (durable, now) = (RefCell::new(none.clone()), RefCell::new(none));
        Rc::new(Self { base, durable, now, pending: RefCell::default(), fails: Cell::new(0) })
    }

    /// Makes a change. A large one is several, of whole granules from its beginning, as the log's are, of which not all may come to
    /// pass.
    async fn change(&self, change: Change) -> Result<(), VolumeError> {
        reactor::sleep(Duration::from_micros(random_u64() % 50)).await;
        let piece = (1 + random_u64() as usize % 4) * GRANULE_BYTES as usize;
        let mut at = change.at;
        for bytes in change.bytes.chunks(piece) {
            if self.fails.get() > 0 && random_u64().is_multiple_of(self.fails.get()) {
                return Err(VolumeError::NoSpace);
            }
            let piece = Change { at, bytes: bytes.to_vec() };
            make(self.base, &mut self.now.borrow_mut(), &piece);
            self.pending.borrow_mut().push(piece);
            at += bytes.len() as u64;
        }
        reactor::sleep(Duration::from_micros(random_u64() % 50)).await;
        Ok(())
    }

    /// What was changed so far of the granules that `bytes` touch is durable: each lies in one object.
    fn make_durable(&self, bytes: std::ops::Range<u64>) {
        let granules = round_down(bytes.start, GRANULE_BYTES)..round_up(bytes.end, GRANULE_BYTES);
        let (mut durable, mut left) = (self.durable.borrow_mut(), Vec::new());
        for change in self.pending.take() {
            let mut parts: [Vec<Option<u8>>; 3] = Default::default();
            for (place, byte) in (change.at..).zip(&change.bytes) {
                let part =
                    usize::from(place >= granules.start) + usize::from(place >= granules.end);
                parts[part].push(*byte);
            }
            let mut at = change.at;
            for (number, bytes) in parts.into_iter().enumerate() {
                let part = Change { at, bytes };
                at += part.bytes.len() as u64;
                match number {
                    1 => make(self.base, &mut durable, &part),
                    // Else they would double with every durable write.
                    _ if part.bytes.is_empty() => {}
                    _ => left.push(part),
                }
            }
        }
        *self.pending.borrow_mut() = left;
    }

    /// Of the changes of each granule that are not durable the first few are there: it lies in one object, whose log keeps their
    /// order. One granule knows nothing of another.
    fn cut_power(&self) {
        let mut now = self.durable.borrow().clone();
        let pending = self.pending.take();
        for (number, cells) in now.chunks_mut(GRANULE_BYTES as usize).enumerate() {
            let from = self.base + number as u64 * GRANULE_BYTES;
            for change in pending.iter().take(random_u64() as usize % (pending.len() + 1)) {
                make(from, cells, change);
            }
        }
        *self.durable.borrow_mut() = now.clone();
        *self.now.borrow_mut() = now;
    }

    /// What fails costs no bytes that a cut file would lose.
    fn truncate(&self, bytes: u64) {
        for cells in [&self.durable, &self.now] {
            for (at, cell) in cells.borrow_mut().iter_mut().enumerate() {
                if self.base + at as u64 >= bytes {
                    *cell = None;
                }
            }
        }
        let pending = self.pending.take();
        let cut = |mut change: Change| {
            change.bytes.truncate(bytes.saturating_sub(change.at) as usize);
            change
        };
        *self.pending.borrow_mut() = pending.into_iter().map(cut).collect();
    }

    fn next(&self, at: u64, end: u64, is_data: bool) -> u64 {
        let now = self.now.borrow();
        let has_data = |at: u64| {
            at.checked_sub(self.base)
                .and_then(|at| now.get(at as usize).copied())
                .flatten()
                .is_some()
        };
        let within = self.base..self.base + now.len() as u64;
        let mut places = at.max(within.start)..end.min(within.end);
        match is_data {
            true => places.find(|at| has_data(*at)).unwrap_or(end),
            false if !within.contains(&at) => at,
            false => places.find(|at| !has_data(*at)).unwrap_or(within.end.min(end)),
        }
    }
}

impl Sparse for Rc<MemoryFile> {
    async fn read(&self, at: u64, bytes: u64) -> Result<IoVec, VolumeError> {
        reactor::sleep(Duration::from_micros(random_u64() % 50)).await;
        let now = self.now.borrow();
        let mut read = BufMut::zeroed(bytes as usize);
        for (place, byte) in (at..).zip(read.iter_mut()) {
            let cell = place.checked_sub(self.base).and_then(|at| now.get(at as usize));
            *byte = cell.copied().flatten().unwrap_or(0);
        }
        Ok(read.freeze().into_vec())
    }

    async fn write(&self, at: u64, from: IoVec, durability: Durability) -> Result<(), VolumeError> {
        let end = at + bytes_in(&from);
        let window = self.base..self.base + self.now.borrow().len() as u64;
        assert!(window.contains(&at) && end <= window.end, "nothing is written elsewhere");
        let bytes = levada_base::buf::joined(&from).into_iter().map(Some).collect();
        self.change(Change { at, bytes }).await?;
        if durability == Durability::Fua {
            self.make_durable(at..end);
        }
        Ok(())
    }

    async fn punch(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        self.change(Change { at, bytes: vec![None; bytes as usize] }).await
    }

    async fn data(&self, at: u64, end: u64) -> Result<u64, VolumeError> {
        reactor::sleep(Duration::from_micros(random_u64() % 20)).await;
        Ok(self.next(at, end, true))
    }

    async fn hole(&self, at: u64, end: u64) -> Result<u64, VolumeError> {
        reactor::sleep(Duration::from_micros(random_u64() % 20)).await;
        Ok(self.next(at, end, false))
    }

    async fn sync(&self) -> Result<(), VolumeError> {
        reactor::sleep(Duration::from_micros(random_u64() % 50)).await;
        let count = self.pending.borrow().len();
        reactor::sleep(Duration::from_micros(random_u64() % 50)).await;
        // Those that came meanwhile are not promised.
        let mut pending = self.pending.borrow_mut();
        let count = count.min(pending.len());
        let synced: Vec<_> = pending.drain(..count).collect();
        for change in &synced {
            make(self.base, &mut self.durable.borrow_mut(), change);
        }
        Ok(())
    }
}

type MemoryLayer = Layer<Rc<MemoryFile>>;

/// A layer as it lies in files.
#[derive(Clone)]
struct Kept {
    file: Rc<MemoryFile>,
    hidden: Rc<MemoryFile>,
    /// Number of the frozen layer below it, and how much of that is seen.
    below: Option<(usize, u64)>,
}

impl Kept {
    fn new(below: Option<(usize, u64)>) -> Self {
        let hidden = MemoryFile::new(0, 2 * HIDDEN_BYTES);
        Self { file: MemoryFile::new(BASE, WINDOW), hidden, below }
    }
}

/// What a byte may be after a power cut.
type Possible = Vec<Vec<u8>>;

/// A frozen layer, and what it must show.
struct Frozen {
    kept: Kept,
    layer: Rc<MemoryLayer>,
    bytes: Vec<u8>,
    /// Its snapshot is deleted.
    is_deleted: bool,
    /// Another has taken over what it was for.
    is_gone: bool,
}

/// A volume and its snapshots, and what they must hold.
struct World {
    top: Kept,
    layer: Rc<MemoryLayer>,
    frozen: Vec<Frozen>,
    /// Bytes of the window that the volume has.
    size: u64,
    gate: Rc<Gate>,
    model: Vec<u8>,
    possible: Possible,
}

fn opened(kept: &Kept, frozen: &[Frozen]) -> Rc<MemoryLayer> {
    let file = Rc::clone(&kept.file);
    Rc::new(match kept.below {
        None => Layer::flat(file),
        Some((below, bytes)) => {
            let (layer, hidden) =
                (Rc::clone(&frozen[below].layer), Rc::new(Rc::clone(&kept.hidden)));
            Layer::on(file, Below { layer, bytes, hidden })
        }
    })
}

async fn window(layer: &MemoryLayer, size: u64) -> Vec<u8> {
    let read = layer.read(BASE, size).await.expect("read");
    levada_base::buf::joined(&read)
}

impl World {
    fn new() -> Self {
        let top = Kept::new(None);
        let layer = opened(&top, &[]);
        let model = vec![0; WINDOW as usize];
        let possible = model.iter().map(|byte| vec![*byte]).collect();
        let gate = Rc::new(Gate::new(BASE + WINDOW));
        Self { top, layer, frozen: Vec::new(), size: WINDOW, gate, model, possible }
    }

    fn settled(&mut self) {
        self.possible = self.model.iter().map(|byte| vec![*byte]).collect();
    }

    fn becomes(&mut self, at: usize, bytes: &[u8]) {
        for (place, byte) in (at..).zip(bytes) {
            self.model[place] = *byte;
            self.possible[place].push(*byte);
        }
    }

    /// Some requests at once, which name different bytes.
    async fn change(&mut self, round: u64) {
        let mut at = random_u64() % self.size;
        let mut asked = Vec::new();
        for part in 0..3u64 {
            let most = if random_u64().is_multiple_of(2) { 3000 } else { 5 * GRANULE_BYTES };
            let bytes = (1 + random_u64() % most).min(self.size - at);
            if bytes == 0 {
                break;
            }
            asked.push((at, bytes, random_u64() % 5, (round * 3 + part) as u8 | 1));
            at += bytes;
        }
        let requests = asked.iter().map(|(at, bytes, kind, fill)| {
            let (layer, at, bytes) = (&self.layer, BASE + *at, *bytes);
            async move {
                match kind {
                    0 => layer.punch(at, bytes).await,
                    1 => layer.discard(at, bytes).await,
                    kind => {
                        let data = Buf::copy_of(&vec![*fill; bytes as usize]).into_vec();
                        let is_durable = *kind == DURABLE;
                        let durability =
                            if is_durable { Durability::Fua } else { Durability::Volatile };
                        layer.write(at, data, durability).await
                    }
                }
            }
        });
        let answers = join_all(requests).await;
        let now = window(&self.layer, self.size).await;
        for ((at, bytes, kind, fill), answer) in asked.into_iter().zip(answers) {
            let (at, end) = (at as usize, (at + bytes) as usize);
            let value = if kind < 2 { 0 } else { fill };
            for (place, now) in (at..end).zip(&now[at..end]) {
                match (&answer, kind) {
                    // Old bytes or what was asked for.
                    (Err(_), _) | (Ok(()), 1) => {
                        assert!(*now == self.model[place] || *now == value, "{place}");
                        self.possible[place].push(value);
                        self.becomes(place, &[*now]);
                    }
                    (Ok(()), _) => self.becomes(place, &[value]),
                }
                if answer.is_ok() && kind == DURABLE {
                    self.possible[place] = vec![value];
                }
            }
        }
        assert!(now == self.model[..self.size as usize], "all bytes, round {round}");
    }

    async fn sync(&mut self) {
        self.layer.sync().await.expect("durable");
        self.settled();
    }

    async fn freeze(&mut self) {
        self.sync().await;
        let seen = BASE + self.size;
        let bytes = self.model[..self.size as usize].to_vec();
        let (kept, layer) = (self.top.clone(), Rc::clone(&self.layer));
        self.frozen.push(Frozen { kept, layer, bytes, is_deleted: false, is_gone: false });
        self.top = Kept::new(Some((self.frozen.len() - 1, seen)));
        self.layer = opened(&self.top, &self.frozen);
    }

    /// Goes on from a snapshot, as a clone and a volume that is rolled back do.
    fn go_back(&mut self) {
        let chosen = random_u64() as usize % self.frozen.len();
        if self.frozen[chosen].is_deleted {
            return;
        }
        let bytes = self.frozen[chosen].bytes.clone();
        self.size = bytes.len() as u64;
        self.gate.set_size_bytes(BASE + self.size);
        self.top = Kept::new(Some((chosen, BASE + self.size)));
        self.layer = opened(&self.top, &self.frozen);
        self.model = bytes;
        self.model.resize(WINDOW as usize, 0);
        self.settled();
    }

    async fn resize(&mut self) {
        let (old, new) = (self.size, (1 + random_u64() % 10) * GRANULE_BYTES);
        let gate = Rc::clone(&self.gate);
        let _quiet = gate.closed().await;
        self.sync().await;
        if new < old {
            self.layer.cut(BASE + new, BASE + old);
            self.top.below = self.layer.below().map(|below| {
                let (number, _) = self.top.below.expect("one in files, too");
                (number, below.bytes)
            });
            self.top.file.truncate(BASE + new);
            self.model[new as usize..].fill(0);
        }
        self.size = new;
        gate.set_size_bytes(BASE + new);
        self.settled();
    }

    /// What a client may ask, while two layers become one.
    async fn go_on(&mut self, round: u64) {
        for _ in 0..random_u64() % 5 {
            match random_u64().is_multiple_of(6) {
                true => self.resize().await,
                false => self.change(round).await,
            }
        }
    }

    async fn cut_power(&mut self) {
        for kept in self.frozen.iter().map(|frozen| &frozen.kept).chain([&self.top]) {
            kept.file.cut_power();
            kept.hidden.cut_power();
        }
        for at in 0..self.frozen.len() {
            let layer = opened(&self.frozen[at].kept, &self.frozen[..at]);
            self.frozen[at].layer = layer;
        }
        self.layer = opened(&self.top, &self.frozen);
        let now = window(&self.layer, self.size).await;
        for (place, byte) in now.iter().enumerate() {
            let may_be = &self.possible[place];
            assert!(may_be.contains(byte), "byte {place} is {byte}, not of {may_be:?}");
            self.model[place] = *byte;
        }
        self.settled();
    }

    /// Nothing that is said to be a hole has data, and snapshots are what they were.
    async fn check(&self) {
        let mut at = BASE;
        while at < BASE + self.size {
            for run in self.layer.extents(at, BASE + self.size).await.expect("told") {
                let part = (at - BASE) as usize..(at - BASE + run.bytes) as usize;
                assert!(run.is_allocated || self.model[part].iter().all(|byte| *byte == 0));
                at += run.bytes;
            }
        }
        for Frozen { layer, bytes, .. } in self.frozen.iter().filter(|frozen| !frozen.is_deleted) {
            assert!(window(layer, bytes.len() as u64).await == *bytes, "a snapshot changed");
        }
    }

    /// A frozen layer with just one on it, and the number of that; `None`: the topmost.
    fn spare(&self) -> Option<(usize, Option<usize>)> {
        let lies_on = |kept: &Kept, at| kept.below.is_some_and(|(below, _)| below == at);
        let first = random_u64() as usize;
        (0..self.frozen.len()).map(|at| (first + at) % self.frozen.len()).find_map(|at| {
            let kept = self.frozen.iter().enumerate().filter(|(_, frozen)| !frozen.is_gone);
            let mut on: Vec<_> = kept
                .filter(|(_, frozen)| lies_on(&frozen.kept, at))
                .map(|(on, _)| Some(on))
                .collect();
            if lies_on(&self.top, at) {
                on.push(None);
            }
            (!self.frozen[at].is_gone && on.len() == 1).then(|| (at, on[0]))
        })
    }

    /// A deleted snapshot and what lies on it become one, while the volume is written.
    async fn settle_one(&mut self, round: u64) {
        let Some((spare, on)) = self.spare() else { return };
        self.frozen[spare].is_deleted = true;
        match random_u64().is_multiple_of(2) {
            true => self.rise(spare, on, round).await,
            false => self.sink(spare, on, round).await,
        }
    }

    fn layer_of(&self, on: Option<usize>) -> Rc<MemoryLayer> {
        Rc::clone(on.map_or(&self.layer, |on| &self.frozen[on].layer))
    }

    async fn rise(&mut self, spare: usize, on: Option<usize>, round: u64) {
        let layer = self.layer_of(on);
        let rising = reactor::spawn({
            let layer = Rc::clone(&layer);
            let gate = on.map_or(Rc::clone(&self.gate), |_| Rc::new(Gate::new(u64::MAX)));
            async move { layer.rise(&gate).await }
        });
        self.go_on(round).await;
        let risen = rising.await.expect("not killed");
        // The power may go before it is noted, too.
        if risen.is_err() || random_u64().is_multiple_of(3) {
            return;
        }
        layer.sync().await.expect("durable");
        let without = layer.without();
        let lower = self.frozen[spare].kept.below;
        let kept = match on {
            Some(on) => &mut self.frozen[on].kept,
            None => &mut self.top,
        };
        kept.below = without.as_ref().map(|below| (lower.expect("as in memory").0, below.bytes));
        layer.set_below(without);
        self.frozen[spare].is_gone = true;
    }

    async fn sink(&mut self, spare: usize, on: Option<usize>, round: u64) {
        let layer = self.layer_of(on);
        let size = on.map_or(self.size, |on| self.frozen[on].bytes.len() as u64);
        let below = layer.below().expect("the spare one");
        // What is behind what is seen must not come up.
        let lower = &mut self.frozen[spare];
        below.layer.cut(below.bytes, below.bytes.max(BASE + lower.bytes.len() as u64));
        lower.kept.file.truncate(below.bytes);
        if let (Some((_, bytes)), Some(now)) = (&mut lower.kept.below, below.layer.below()) {
            *bytes = now.bytes;
        }
        layer.tell_changed();
        let sinking = reactor::spawn({
            let layer = Rc::clone(&layer);
            async move { layer.sink_all(BASE + size).await }
        });
        self.go_on(round).await;
        let sunk = sinking.await.expect("not killed");
        let changed = layer.take_changed(BASE + size);
        let is_cut = layer.is_cut();
        layer.tell_no_more();
        let is_cut = on.is_none()
            && (is_cut
                || self.size != size
                || layer.below().is_none_or(|now| now.bytes != below.bytes));
        let is_done = sunk.is_ok() && !is_cut && layer.sink(&changed).await.is_ok();
        if !is_done || random_u64().is_multiple_of(3) {
            return;
        }
        below.layer.sync().await.expect("durable");
        let Some(on) = on else {
            self.frozen[spare].is_gone = true;
            self.top = self.frozen[spare].kept.clone();
            self.layer = below.layer;
            // Of what failed the one or the other is durable now.
            self.settled();
            return;
        };
        for kept in self.frozen.iter_mut().map(|frozen| &mut frozen.kept).chain([&mut self.top]) {
            if let Some((lower, _)) = &mut kept.below
                && *lower == on
            {
                *lower = spare;
            }
        }
        let others = self.frozen.iter().map(|frozen| &frozen.layer).chain([&self.layer]);
        for other in others {
            if let Some(on_it) = other.below().filter(|below| Rc::ptr_eq(&below.layer, &layer)) {
                other.set_below(Some(Below { layer: Rc::clone(&below.layer), ..on_it }));
            }
        }
        let (is_deleted, bytes) = (self.frozen[on].is_deleted, self.frozen[on].bytes.clone());
        self.frozen[spare].is_deleted = is_deleted;
        self.frozen[spare].bytes = bytes;
        self.frozen[on].is_deleted = true;
        self.frozen[on].is_gone = true;
    }

    async fn step(&mut self, round: u64) {
        match random_u64() % 40 {
            0 if self.frozen.len() < 16 => self.freeze().await,
            1 if !self.frozen.is_empty() => self.go_back(),
            2 => self.resize().await,
            3..=5 => self.cut_power().await,
            6 => self.sync().await,
            7 | 8 => self.check().await,
            9 => self.settle_one(round).await,
            _ => self.change(round).await,
        }
    }
}

fn run(seed: u64, rounds: u64, fails: u64) {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new();
        for round in 0..rounds {
            let frozen = world.frozen.iter().map(|frozen| &frozen.kept);
            for kept in frozen.chain([&world.top]) {
                kept.file.fails.set(fails);
                kept.hidden.fails.set(fails);
            }
            world.step(round).await;
        }
        world.check().await;
    });
}

/// Seeds of each of the two tests.
fn seeds() -> u64 {
    std::env::var("LEVADA_LAYER_SEEDS").map_or(12, |n| n.parse().expect("a number"))
}

#[test]
fn layers_are_what_bytes_would_be_also_after_power_cuts() {
    for seed in 0..seeds() {
        run(seed, 300, 0);
    }
}

#[test]
fn a_file_that_fails_leaves_old_bytes_or_new_ones() {
    for seed in 0..seeds() {
        run(1_000_000 + seed, 300, 6);
    }
}

#[test]
fn what_is_cut_while_a_layer_sinks_does_not_come_back() {
    Reactor::simulated(1).block_on(async {
        let end = BASE + WINDOW;
        let at = end - 2 * GRANULE_BYTES;
        let kept = Kept::new(Some((0, BASE + GRANULE_BYTES)));
        let lower = Rc::new(Layer::flat(MemoryFile::new(BASE, WINDOW)));
        let hidden = Rc::new(Rc::clone(&kept.hidden));
        let below = Below { layer: Rc::clone(&lower), bytes: BASE + GRANULE_BYTES, hidden };
        let upper = Layer::on(Rc::clone(&kept.file), below);
        let data = Buf::copy_of(&[7; GRANULE_BYTES as usize]).into_vec();
        upper.write(at, data, Durability::Volatile).await.expect("written");
        upper.tell_changed();
        upper.sink_all(end).await.expect("sunk");
        // Cut, and grown again.
        upper.cut(at, end);
        kept.file.truncate(at);
        assert!(upper.is_cut(), "the lower one must not take its place");
        assert!(window(&lower, WINDOW).await.contains(&7));
    });
}

/// The tests above prove something: bugs planted on purpose are found by them.
#[test]
fn planted_bugs_are_found() {
    let bugs = [
        "layer-write-not-filled",
        "layer-hidden-not-durable",
        "layer-cut-shows-below",
        "layer-granule-in-two",
        "layer-change-untold",
        "layer-cut-untold",
        "layer-durable-by-half",
    ];
    for bug in bugs {
        let found = (0..60).find(|seed| {
            let hunt = || {
                levada_base::planted::choose(Some(bug));
                what_is_cut_while_a_layer_sinks_does_not_come_back();
                run(*seed, 300, 0);
            };
            let found = std::panic::catch_unwind(hunt).is_err();
            levada_base::planted::choose(None);
            found
        });
        assert!(found.is_some(), "{bug} was not found");
    }
}
