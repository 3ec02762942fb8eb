//! The NVMe/TCP initiator against any target: discovery, a load that checks what it reads, and a measurement. For scripts and people.
//!
//! ```text
//! nvme_check discover ADDRESS          what subsystems there are
//! nvme_check show URL                  what a namespace is, and how its paths are
//! nvme_check verify URL SECONDS        overwrites the namespace with what it then reads, whatever happens to the target meanwhile
//! nvme_check bench URL SECONDS         overwrites the namespace; reads of 4 KiB, reads and writes of 128 KiB
//! ```

use levada_base::buf::bytes_in;
use levada_base::reactor::{self, Reactor};
use levada_base::units::MIB;
use levada_base::{Buf, BufMut};
use levada_device::nvme::{Host, NvmeNamespace, NvmeUrl, Options, Tcp, discover};
use levada_device::{BlockError, Device, Durability};
use std::cell::{Cell, RefCell};
use std::error::Error;
use std::rc::Rc;
use std::time::Duration;

/// Workers of a load, each with a part of the namespace of its own.
const WORKERS: u64 = 12;
/// Of such a part.
const PART_BYTES: u64 = 2 * MIB;

#[derive(Default)]
struct Tally {
    operations: Cell<u64>,
    bytes: Cell<u64>,
    /// Of what never waits for anything but a path.
    slowest_read: Cell<Duration>,
    /// Of changes, which also wait for earlier ones of the same blocks that were lost with a path.
    slowest_change: Cell<Duration>,
}

struct Worker {
    device: Rc<NvmeNamespace>,
    at: u64,
    block_bytes: u64,
    /// What the part holds.
    model: RefCell<Vec<u8>>,
    tally: Rc<Tally>,
}

fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

fn filled(bytes: u64) -> Buf {
    let mut buf = BufMut::for_overwrite(bytes as usize);
    let (mut state, step) = (reactor::random_u64(), reactor::random_u64() | 1);
    for word in buf.chunks_mut(8) {
        state = state.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(step);
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    buf.freeze()
}

impl Worker {
    /// A random run of blocks in the part: where, within the part, and how long.
    fn run(&self) -> (u64, u64) {
        let blocks = PART_BYTES / self.block_bytes;
        let first = random(blocks);
        let most = if random(4) == 0 { 512 } else { 16 };
        let count = 1 + random((blocks - first).min(most));
        (first * self.block_bytes, count * self.block_bytes)
    }

    async fn step(&self) -> Result<&Cell<Duration>, BlockError> {
        let (within, bytes) = self.run();
        let at = self.at + within;
        let place = within as usize..(within + bytes) as usize;
        let kind = random(20);
        match kind {
            0 => self.device.flush().await?,
            1 => {
                self.device.write_zeroes(at, bytes).await?;
                self.model.borrow_mut()[place].fill(0);
            }
            2 => {
                // It reads as anything until it is written.
                self.device.discard(at, bytes).await?;
                let data = filled(bytes);
                self.device.write(at, data.clone().into_vec(), Durability::Volatile).await?;
                self.model.borrow_mut()[place].copy_from_slice(&data);
            }
            3..12 => {
                let data = filled(bytes);
                let durability = if kind == 3 { Durability::Fua } else { Durability::Volatile };
                self.device.write(at, data.clone().into_vec(), durability).await?;
                self.model.borrow_mut()[place].copy_from_slice(&data);
            }
            _ => self.check(within, bytes).await?,
        }
        self.tally.bytes.set(self.tally.bytes.get() + bytes);
        let Tally { slowest_read, slowest_change, .. } = &*self.tally;
        Ok(if kind < 12 { slowest_change } else { slowest_read })
    }

    async fn check(&self, within: u64, bytes: u64) -> Result<(), BlockError> {
        let into = BufMut::for_overwrite(bytes as usize).into_vec();
        let read = self.device.read(self.at + within, into).await?;
        let model = self.model.borrow();
        let mut at = within as usize;
        for part in &read {
            let expected = &model[at..at + part.len()];
            if part[..] != *expected {
                let wrong = part.iter().zip(expected).position(|(is, should)| is != should);
                panic!("wrong data at {}", self.at + at as u64 + wrong.unwrap_or(0) as u64);
            }
            at += part.len();
        }
        Ok(())
    }

    async fn work(self, seconds: u64) -> Result<(), BlockError> {
        let zeroes = BufMut::zeroed(PART_BYTES as usize).freeze().into_vec();
        self.device.write(self.at, zeroes, Durability::Volatile).await?;
        let begun = reactor::now();
        while begun.elapsed() < Duration::from_secs(seconds) {
            let step = reactor::now();
            let slowest = self.step().await?;
            slowest.set(slowest.get().max(step.elapsed()));
            self.tally.operations.set(self.tally.operations.get() + 1);
        }
        self.device.flush().await?;
        self.check(0, PART_BYTES).await
    }
}

async fn open(url: &str, queues: u16) -> Result<Rc<NvmeNamespace>, Box<dyn Error>> {
    let url: NvmeUrl = url.parse()?;
    let options = Options { queues, ..Options::new(Host::anonymous()?) };
    Ok(Rc::new(NvmeNamespace::open(&url, options).await?))
}

fn show(device: &NvmeNamespace) {
    let info = device.info();
    println!(
        "{}: {} MiB in blocks of {} bytes, requests of {} KiB",
        info.name,
        info.capacity_bytes / MIB,
        info.block_bytes,
        info.io_bytes_best >> 10
    );
    for path in device.paths() {
        let why = path.why.as_deref().unwrap_or("");
        println!("  {} {:?} {why}", path.address, path.standing);
    }
}

async fn verify(url: &str, seconds: u64) -> Result<(), Box<dyn Error>> {
    let device = open(url, 2).await?;
    show(&device);
    let tally = Rc::<Tally>::default();
    let info = device.info().clone();
    let workers = (info.capacity_bytes / PART_BYTES).min(WORKERS);
    let all: Vec<_> = (0..workers)
        .map(|number| Worker {
            device: Rc::clone(&device),
            at: number * PART_BYTES,
            block_bytes: info.block_bytes,
            model: RefCell::new(vec![0; PART_BYTES as usize]),
            tally: Rc::clone(&tally),
        })
        .map(|worker| reactor::spawn(worker.work(seconds)))
        .collect();
    println!("WORKING");
    for worker in all {
        worker.await.ok_or("a worker is gone")??;
    }
    println!(
        "VERIFIED {} operations, {} MiB, slowest read {} ms, slowest change {} ms, {} sent again, {} held back",
        tally.operations.get(),
        tally.bytes.get() / MIB,
        tally.slowest_read.get().as_millis(),
        tally.slowest_change.get().as_millis(),
        device.resent(),
        device.held_back()
    );
    for path in device.paths() {
        println!("  {} {:?}", path.address, path.standing);
    }
    let device = Rc::into_inner(device).ok_or("nobody else has it")?;
    device.close().await;
    Ok(())
}

/// Requests of one kind, `depth` at once.
async fn rate(
    device: &Rc<NvmeNamespace>,
    what: &str,
    bytes: u64,
    depth: u64,
    seconds: u64,
) -> Result<(), Box<dyn Error>> {
    let begun = reactor::now();
    let done = Rc::new(Cell::new(0_u64));
    let blocks = device.info().capacity_bytes.min(256 * MIB) / bytes;
    let is_write = what == "write";
    let all: Vec<_> = (0..depth)
        .map(|number| {
            let (device, done) = (Rc::clone(device), Rc::clone(&done));
            reactor::spawn(async move {
                let mut at = number;
                let data = filled(bytes);
                let mut into = BufMut::for_overwrite(bytes as usize).into_vec();
                while begun.elapsed() < Duration::from_secs(seconds) {
                    let place = match bytes {
                        4096 => random(blocks) * bytes,
                        _ => at % blocks * bytes,
                    };
                    at += depth;
                    if is_write {
                        let from = data.clone().into_vec();
                        device.write(place, from, Durability::Volatile).await?;
                    } else {
                        into = device.read(place, into).await?;
                        assert_eq!(bytes_in(&into), bytes);
                    }
                    done.set(done.get() + 1);
                }
                Ok::<_, BlockError>(())
            })
        })
        .collect();
    for one in all {
        one.await.ok_or("killed")??;
    }
    let took = begun.elapsed().as_secs_f64();
    let per_second = done.get() as f64 / took;
    println!(
        "{what} {} KiB, {depth} at once: {:.0} /s, {:.0} MB/s",
        bytes >> 10,
        per_second,
        per_second * bytes as f64 / 1e6
    );
    Ok(())
}

async fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["discover", address] => {
            let options = Options::new(Host::anonymous()?);
            for entry in discover(&Tcp::default(), address.parse()?, &options).await? {
                println!("{} {} port {}", entry.subsystem, entry.address, entry.port);
            }
            Ok(())
        }
        ["show", url] => {
            show(&*open(url, 1).await?);
            Ok(())
        }
        ["verify", url, seconds] => verify(url, seconds.parse()?).await,
        ["bench", url, seconds] => {
            let device = open(url, 1).await?;
            show(&device);
            let seconds = seconds.parse()?;
            rate(&device, "write", 128 << 10, 32, seconds).await?;
            rate(&device, "read", 128 << 10, 32, seconds).await?;
            rate(&device, "read", 4096, 1, seconds).await?;
            rate(&device, "read", 4096, 128, seconds).await
        }
        _ => Err("nvme_check discover ADDRESS | show URL | verify URL SECONDS | bench URL SECONDS"
            .into()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    Reactor::new()?.block_on(run(&arguments))
}
