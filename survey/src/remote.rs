//! RAID 6 8+2 over five enclosures that are reached over NVMe/TCP, each with two drives and two paths.
//!
//! The enclosures are on a thread of their own; the array with its initiator is on the thread that measures. What is compared with are the
//! same remote drives without protection.

use crate::array::{
    CHUNK_BYTES, STRIPE_BYTES, raid6_of, run, seqread_of_raw, seqwrite_of_ceiling, source,
    write_round,
};
use crate::figure::{Bar, Operand, Taken};
use crate::harness::{Effort, median, ratio_of, spread};
use crate::members::Speed;
use crate::suite::Spec;
use anyhow::{Context, Result, anyhow, ensure};
use futures_util::future::try_join_all;
use levada_base::reactor::{self, JoinHandle, Reactor, mailbox};
use levada_base::units::GIB;
use levada_base::{BufMut, Epoch, IoVec};
use levada_device::nvme::{Host, NvmeNamespace, NvmeUrl, Options, Standing};
use levada_device::{BlockError, Device, DriveModel, Durability};
use levada_enclosure::{Enclosure, Media, Order, PathOrder, Plan};
use levada_raid::{Array, ArrayStatus, IoClass, MemberStatus, RaidArray};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

const ENCLOSURES: usize = 5;
const BAYS: u32 = 2;
const PATHS: usize = 2;
/// Nothing of it is memory. Far more than fresh stripes fill.
const DRIVE_BYTES: u64 = 64 * GIB;
/// How long the enclosures poll before they sleep, as `levada enclosure serve` does.
const SPIN: Duration = Duration::from_micros(100);
/// Stripes that a mixed load reads again and again; behind them it writes.
const READ_STRIPES: u64 = 512;
/// As many as it may write, one after the other: none is written twice.
const FRESH_STRIPES: u64 = 256 << 10;
const WRITERS: usize = 4;
const FIRST_OVERWRITER: usize = READERS + WRITERS;
const READERS: usize = 8;
/// Those that overwrite 4 KiB at a time in few places, of which some are always under way when a path is lost.
const OVERWRITERS: usize = 4;
const PLACES: u64 = 64;
const OVERWRITE_BYTES: usize = 4096;
/// Whose power goes.
const LOST: usize = 2;
/// How long after the loss of an enclosure the array is looked at again.
const LOSS_TO_LOOK: Duration = Duration::from_secs(30);
/// How long a lost path is watched: longer than any failover may take.
const FAILOVER_WATCH: Duration = Duration::from_secs(8);
/// What began while it was watched has ended by then, or never does.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Paths that came back are connected again by then.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "array.remote.seqwrite_of_ceiling",
            what: "fresh stripes over NVMe/TCP on slow drives, against the same drives without parity times 8/10",
            bar: Bar::AtLeast(0.9),
            take: |effort| {
                remote(effort, async |effort, remote| {
                    seqwrite_of_ceiling(effort, &remote.devices(), Speed::Slow, None).await
                })
            },
        },
        Spec {
            name: "array.remote.seqread_of_raw",
            what: "1 MiB reads in order over NVMe/TCP on slow drives, against the same drives without parity",
            bar: Bar::AtLeast(0.95),
            take: |effort| {
                remote(effort, async |effort, remote| {
                    seqread_of_raw(effort, &remote.devices(), Speed::Slow).await
                })
            },
        },
        Spec {
            name: "array.remote.after_enclosure_loss_of_before",
            what: "reads and fresh writes side by side, from 30 s after one of five enclosures has lost its power, against before: the worse of both",
            bar: Bar::AtLeast(0.7),
            take: |effort| run(after_enclosure_loss(effort)),
        },
        Spec {
            name: "path.failover_s",
            what: "the longest read, fresh write or overwrite in any run, of an array whose enclosures all lose one of two paths, hung or closed; no error is allowed",
            bar: Bar::Below(5.0),
            take: |effort| remote(effort, failover),
        },
    ]
}

fn remote(
    effort: Effort,
    figure: impl AsyncFnOnce(Effort, &Remote) -> Result<Taken>,
) -> Result<Taken> {
    run(async { figure(effort, &Remote::start().await?).await })
}

/// Five enclosures, and their drives as devices.
struct Remote {
    drives: Vec<Rc<NvmeNamespace>>,
    enclosures: Enclosures,
}

impl Remote {
    async fn start() -> Result<Self> {
        let enclosures = Enclosures::start()?;
        let options = Options::new(Host::anonymous()?);
        let open = async |url: String| -> Result<Rc<NvmeNamespace>> {
            let url: NvmeUrl = url.parse()?;
            Ok(Rc::new(NvmeNamespace::open(&url, options.clone()).await?))
        };
        let drives = try_join_all(enclosures.urls.iter().cloned().map(open)).await?;
        let remote = Self { drives, enclosures };
        remote.connected().await?;
        // As the members of an array that is served.
        try_join_all(remote.drives.iter().map(|drive| drive.fence(Epoch(1)))).await?;
        Ok(remote)
    }

    fn devices(&self) -> Vec<Rc<dyn Device>> {
        self.drives.iter().map(|drive| Rc::clone(drive) as Rc<dyn Device>).collect()
    }

    /// Returns when every drive is reached over every path.
    async fn connected(&self) -> Result<()> {
        let is_up = |drive: &Rc<NvmeNamespace>| {
            drive.paths().iter().all(|path| path.standing == Standing::Optimized)
        };
        let all = async {
            while !self.drives.iter().all(is_up) {
                reactor::sleep(Duration::from_millis(10)).await;
            }
        };
        reactor::timeout(CONNECT_LIMIT, all).await.map_err(|_| anyhow!("a path does not connect"))
    }
}

/// Enclosures on a thread of their own, until dropped.
struct Enclosures {
    /// Where each drive is, over all paths, enclosure by enclosure.
    urls: Vec<String>,
    orders: Option<mailbox::Sender<(usize, Order)>>,
    thread: Option<std::thread::JoinHandle<Result<()>>>,
}

impl Enclosures {
    fn start() -> Result<Self> {
        let (started, starting) = mpsc::channel();
        let thread = std::thread::Builder::new().name("enclosures".into()).spawn(move || {
            let reactor = Reactor::new()?;
            reactor.set_spin(SPIN);
            reactor.block_on(async {
                let enclosures = try_join_all((0..ENCLOSURES).map(enclosure)).await?;
                let urls = enclosures.iter().flat_map(urls).collect();
                let (orders, mut ordered) = mailbox::channel()?;
                // Nobody waits only when the starter has panicked.
                let _ = started.send((urls, orders));
                while let Some((number, order)) = ordered.recv().await {
                    let enclosure: &Enclosure = &enclosures[number];
                    enclosure.carry_out(order).await?;
                }
                for enclosure in enclosures {
                    enclosure.end().await;
                }
                Ok(())
            })
        })?;
        if let Ok((urls, orders)) = starting.recv() {
            return Ok(Self { urls, orders: Some(orders), thread: Some(thread) });
        }
        let ended = thread.join().map_err(|_| anyhow!("the enclosures panicked"))?;
        ended.and(Err(anyhow!("the enclosures ended"))).context("serving enclosures")
    }

    fn order(&self, enclosure: usize, order: Order) -> Result<()> {
        let orders = self.orders.as_ref().context("they are served")?;
        orders.send((enclosure, order)).map_err(|_| anyhow!("the enclosures have ended"))
    }

    fn order_all(&self, order: Order) -> Result<()> {
        (0..ENCLOSURES).try_for_each(|enclosure| self.order(enclosure, order))
    }
}

impl Drop for Enclosures {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(Ok(Err(error))) = self.thread.take().map(std::thread::JoinHandle::join) {
            eprintln!("serving enclosures failed: {error:#}");
        }
    }
}

async fn enclosure(number: usize) -> Result<Enclosure> {
    let plan = Plan {
        name: format!("bench{number}"),
        paths: vec![([127, 0, 0, 1], 0).into(); PATHS],
        bays: BAYS,
        media: Media::Null,
        size_bytes: DRIVE_BYTES,
        model: Some(DriveModel::slow()),
        endurance_bytes: None,
        hosts: Vec::new(),
        keys: None,
        tls_only: false,
        status: None,
        lacks_reservations: false,
        network_cores: 0,
    };
    Ok(plan.open().await?)
}

fn urls(enclosure: &Enclosure) -> Vec<String> {
    let status = enclosure.status();
    let paths: Vec<String> = status.paths.iter().map(|path| path.address.to_string()).collect();
    let url = |bay| format!("nvme+tcp://{}/{}?ns={bay}", paths.join(","), status.subsystem);
    (1..=BAYS).map(url).collect()
}

/// Reads of 1 MiB, writes of fresh stripes, and overwrites, side by side, until dropped.
struct Mixed {
    moved: Rc<Moved>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Moved {
    read_bytes: Cell<u64>,
    written_bytes: Cell<u64>,
    longest: Cell<Duration>,
    /// Requests begun, and those of them that have not ended, by their number.
    begun: Cell<u64>,
    under_way: RefCell<BTreeSet<u64>>,
    /// The first that went wrong.
    failed: RefCell<Option<anyhow::Error>>,
}

impl Moved {
    /// Counts a request that moves so many `bytes` of those that are counted in `moved`.
    async fn count<T>(
        &self,
        moved: &Cell<u64>,
        bytes: u64,
        request: impl Future<Output = Result<T, BlockError>>,
    ) -> Result<()> {
        let (number, begun) = (self.begun.replace(self.begun.get() + 1), reactor::now());
        self.under_way.borrow_mut().insert(number);
        request.await?;
        self.under_way.borrow_mut().remove(&number);
        moved.set(moved.get() + bytes);
        self.longest.set(self.longest.get().max(begun.elapsed()));
        Ok(())
    }
}

/// 10^9 bytes per second.
struct Rates {
    reads: f64,
    writes: f64,
}

impl Mixed {
    async fn start(array: &RaidArray, overwriters: usize) -> Result<Self> {
        let (whole, source): (Rc<dyn Array>, _) = (Rc::new(array.clone()), source());
        write_round(&whole, &source, READ_STRIPES, READ_STRIPES).await?;
        whole.declare_fresh(READ_STRIPES, FRESH_STRIPES).await?;
        let moved = Rc::new(Moved::default());
        let next_read = Rc::new(Cell::new(0));
        let next_stripe = Rc::new(Cell::new(READ_STRIPES));
        let mut tasks = Vec::new();
        let next_place = Rc::new(Cell::new(0));
        for worker in 0..READERS + WRITERS + overwriters {
            let (array, source, moved) = (Rc::clone(&whole), Rc::clone(&source), Rc::clone(&moved));
            let (next_read, next_stripe) = (Rc::clone(&next_read), Rc::clone(&next_stripe));
            let next_place = Rc::clone(&next_place);
            tasks.push(reactor::spawn(async move {
                let result = match worker {
                    ..READERS => read_on(&array, &next_read, &moved).await,
                    READERS..FIRST_OVERWRITER => {
                        write_on(&array, &source, &next_stripe, &moved).await
                    }
                    FIRST_OVERWRITER.. => overwrite_on(&array, &next_place, &moved).await,
                };
                if let Err(error) = result {
                    moved.failed.borrow_mut().get_or_insert(error);
                }
            }));
        }
        Ok(Self { moved, tasks })
    }

    /// What is moved while `span` passes.
    async fn rates(&self, span: Duration) -> Result<Rates> {
        let now = || (self.moved.read_bytes.get(), self.moved.written_bytes.get());
        let (before, begun) = (now(), reactor::now());
        reactor::sleep(span).await;
        self.check()?;
        let (after, seconds) = (now(), begun.elapsed().as_secs_f64());
        let rate = |before: u64, after: u64| (after - before) as f64 / seconds / 1e9;
        Ok(Rates { reads: rate(before.0, after.0), writes: rate(before.1, after.1) })
    }

    /// The longest request of those that were under way while `span` passed: each is waited for.
    async fn longest(&self, span: Duration) -> Result<Duration> {
        self.moved.longest.set(Duration::ZERO);
        reactor::sleep(span).await;
        let (last, end) = (self.moved.begun.get(), reactor::now());
        let is_left = || self.moved.under_way.borrow().first().is_some_and(|number| *number < last);
        while is_left() {
            self.check()?;
            ensure!(end.elapsed() < END_LIMIT, "a request did not end in {END_LIMIT:?}");
            reactor::sleep(Duration::from_millis(5)).await;
        }
        self.check()?;
        Ok(self.moved.longest.get())
    }

    fn check(&self) -> Result<()> {
        match self.moved.failed.take() {
            Some(error) => Err(error.context("a request of the array failed")),
            None => Ok(()),
        }
    }
}

impl Drop for Mixed {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn read_on(array: &Rc<dyn Array>, next: &Cell<u64>, moved: &Moved) -> Result<()> {
    loop {
        let number = next.replace(next.get() + 1);
        let at = number % READ_STRIPES * STRIPE_BYTES;
        let into = BufMut::for_overwrite(STRIPE_BYTES as usize).into_vec();
        moved.count(&moved.read_bytes, STRIPE_BYTES, array.read(at, into)).await?;
    }
}

async fn write_on(
    array: &Rc<dyn Array>,
    source: &Rc<[IoVec]>,
    next: &Cell<u64>,
    moved: &Moved,
) -> Result<()> {
    loop {
        let stripe = next.replace(next.get() + 1);
        let data = source[stripe as usize % source.len()].clone();
        let written = array.write_fresh(stripe, data, IoClass::Foreground);
        moved.count(&moved.written_bytes, STRIPE_BYTES, written).await?;
    }
}

async fn overwrite_on(array: &Rc<dyn Array>, next: &Cell<u64>, moved: &Moved) -> Result<()> {
    let data = BufMut::zeroed(OVERWRITE_BYTES).freeze();
    loop {
        let number = next.replace(next.get() + 1);
        let at = number % PLACES * STRIPE_BYTES;
        let written = array.write(at, data.clone().into_vec(), Durability::Volatile);
        moved.count(&moved.written_bytes, OVERWRITE_BYTES as u64, written).await?;
    }
}

async fn after_enclosure_loss(effort: Effort) -> Result<Taken> {
    let seconds = |full: u64| Duration::from_secs(if effort.is_quick { 3 } else { full });
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for _ in 0..effort.runs {
        let remote = Remote::start().await?;
        let array = raid6_of(&remote.devices(), CHUNK_BYTES).await?;
        let load = Mixed::start(&array, 0).await?;
        let before = load.rates(seconds(10)).await?;
        remote.enclosures.order(LOST, Order::Power { is_on: false })?;
        reactor::sleep(LOSS_TO_LOOK).await;
        let after = load.rates(seconds(10)).await?;
        reads.push((after.reads, before.reads));
        writes.push((after.writes, before.writes));
        ensure!(array.status().degraded == BAYS as usize, "the enclosure was lost");
    }
    let reads = ratio_of(&reads, "GB/s", ("reads after", "before"));
    let writes = ratio_of(&writes, "GB/s", ("writes after", "before"));
    // One of them may not be fast at the other's cost.
    let (mut worse, better) =
        if writes.value < reads.value { (writes, reads) } else { (reads, writes) };
    worse.operands.extend(better.operands);
    Ok(worse)
}

async fn failover(effort: Effort, remote: &Remote) -> Result<Taken> {
    let array = raid6_of(&remote.devices(), CHUNK_BYTES).await?;
    let load = Mixed::start(&array, OVERWRITERS).await?;
    let (mut hung, mut closed, mut healthy) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..effort.runs {
        let path = number % PATHS + 1;
        for (order, longest) in [(PathOrder::Hung, &mut hung), (PathOrder::Down, &mut closed)] {
            healthy.push(load.longest(Duration::from_secs(1)).await?.as_secs_f64());
            remote.enclosures.order_all(Order::Path { path, order })?;
            longest.push(load.longest(FAILOVER_WATCH).await?.as_secs_f64());
            remote.enclosures.order_all(Order::Path { path, order: PathOrder::Up })?;
            remote.connected().await?;
        }
    }
    let ArrayStatus { degraded, members, .. } = array.status();
    ensure!(degraded == 0, "no drive was lost: each had a path at any time");
    // Parity would hide them.
    let had_errors = |member: &&MemberStatus| member.io_errors + member.medium_errors > 0;
    let failing: Vec<_> = members.iter().filter(had_errors).map(|member| &member.name).collect();
    ensure!(
        failing.is_empty(),
        "the array has seen errors of {failing:?}, which had a path at any time"
    );
    let worst: Vec<f64> =
        hung.iter().zip(&closed).map(|(hung, closed)| hung.max(*closed)).collect();
    let side = |name, values: &[f64]| Operand::new(name, median(values.iter().copied()), "s");
    Ok(Taken {
        // Not the median: an application that waits too long once has waited too long.
        value: worst.iter().copied().fold(0.0, f64::max),
        unit: "s".into(),
        operands: vec![side("hung", &hung), side("closed", &closed), side("both paths", &healthy)],
        cpu: None,
        runs: worst.len(),
        retaken: 0,
        spread: spread(&worst),
    })
}
