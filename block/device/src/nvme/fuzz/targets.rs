//! A namespace over two paths, whose target is sound and between whom and the host somebody meddles with what the target says.
//!
//! Bytes are what the host asks for, and then what happens to each unit on its way: so random ones get past what every connection
//! begins with. Checked is, on virtual time:
//!
//! - Nothing panics, and every request ends, well or not.
//! - As long as units were lost, doubled or late, and no bytes of them other than they were: what is read is what was written.
//! - Once the namespace is closed nothing is left of it at the target.
//! - Who comes afterwards, when nobody meddles any more, finds a namespace that can be used.

use crate::nvme::target::{BLOCK_BYTES, BLOCKS, NQN, Target};
use crate::nvme::{Host, NvmeNamespace, Options};
use crate::{BlockError, Device, Durability};
use levada_base::reactor::{self, Reactor};
use levada_base::stream::{ByteStream, Inbox, MemoryNetwork, MemoryStream};
use levada_base::{Buf, BufMut, Epoch};
use levada_nvme::identify::OptionalCommands;
use levada_nvme::log::Event;
use levada_nvme::pdu::{COMMON_BYTES, Digests};
use levada_nvme::{IoOpcode, Nqn};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// Longer than any request takes: what a rule holds back waits for two minutes, where the target looks after its hosts once in that time.
const LONG: Duration = Duration::from_secs(1200);
const REQUESTS_MAX: u8 = 6;
/// Where requests are: few blocks, so that they meet.
const AREA_BLOCKS: usize = 64;
/// Larger units are none of ours: the connection ends there.
const UNIT_BYTES_MAX: usize = 1 << 20;

/// What is left of the fuzzer's bytes; zeroes behind their end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn below(&mut self, count: usize) -> usize {
        let wide = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        wide % count
    }
}

/// Changes what a target says.
struct Meddler {
    input: RefCell<Vec<u8>>,
    used: Cell<usize>,
    /// Bytes were not passed on as they were.
    has_forged: Rc<Cell<bool>>,
}

/// What becomes of a unit.
enum Fate {
    Passed,
    Lost,
    Doubled,
    Late,
    /// The connection ends in the middle of it.
    CutOff,
    Forged(Vec<u8>),
}

impl Meddler {
    fn with_input<T>(&self, choose: impl FnOnce(&mut Input<'_>) -> T) -> T {
        let all = self.input.borrow();
        let mut input = Input(&all[self.used.get()..]);
        let chosen = choose(&mut input);
        self.used.set(all.len() - input.0.len());
        chosen
    }

    /// Half of what a unit's first byte may be leaves it alone.
    fn fate(&self, unit: &[u8]) -> Fate {
        let fate = self.with_input(|input| match input.byte() {
            0..128 => Fate::Passed,
            128..136 => Fate::Lost,
            136..144 => Fate::Doubled,
            144..152 => Fate::Late,
            152..156 => Fate::CutOff,
            // A field of what every unit has, or of the answer or the data's place behind it.
            156..200 => {
                let mut forged = unit.to_vec();
                let at = input.below(forged.len().min(24));
                forged[at] = input.byte();
                Fate::Forged(forged)
            }
            // A field of a page.
            200..248 => {
                let mut forged = unit.to_vec();
                let at = input.below(forged.len()) & !3;
                let value = [0, 1, u32::MAX, 1 << 31, u32::from(input.byte())][input.below(5)];
                for (byte, value) in forged[at..].iter_mut().zip(value.to_le_bytes()) {
                    *byte = value;
                }
                Fate::Forged(forged)
            }
            // Something else altogether.
            _ => {
                let bytes = input.below(40);
                Fate::Forged((0..bytes).map(|_| input.byte()).collect())
            }
        });
        if let Fate::Forged(forged) = &fate
            && *forged != unit
        {
            self.has_forged.set(true);
        }
        fate
    }

    /// Passes on what comes from the target, as far as it does.
    async fn pass_on(&self, from: MemoryStream, to: &MemoryStream) -> Option<()> {
        let mut inbox = Inbox::new(from);
        loop {
            let head = inbox.head(COMMON_BYTES).await.ok()??;
            let mut unit = head.to_vec();
            let bytes = u32::from_le_bytes(*head[4..].first_chunk()?) as usize;
            assert!((COMMON_BYTES..UNIT_BYTES_MAX).contains(&bytes), "the target is sound");
            unit.extend(inbox.payload(bytes - COMMON_BYTES).await.ok()?.iter());
            let send = |bytes: &[u8]| to.write_all(Buf::copy_of(bytes).into_vec());
            match self.fate(&unit) {
                Fate::Passed => send(&unit).await.ok()?,
                Fate::Lost => {}
                Fate::Doubled => {
                    send(&unit).await.ok()?;
                    send(&unit).await.ok()?;
                }
                Fate::Late => {
                    reactor::sleep(Duration::from_secs(2)).await;
                    send(&unit).await.ok()?;
                }
                Fate::CutOff => {
                    send(&unit[..unit.len() / 2]).await.ok()?;
                    return None;
                }
                Fate::Forged(forged) if forged.is_empty() => {}
                Fate::Forged(forged) => send(&forged).await.ok()?,
            }
        }
    }

    /// Stands between whoever connects to `address` and the target.
    fn listen(self: &Rc<Self>, net: &MemoryNetwork, target: &Rc<Target>, address: SocketAddr) {
        let (meddler, target) = (Rc::clone(self), Rc::clone(target));
        net.listen(address, move |host| {
            let (meddler, target) = (Rc::clone(&meddler), Rc::clone(&target));
            let (near, far) = MemoryStream::pair();
            reactor::spawn(async move { target.serve(far, address).await });
            let (from, to) = (host.clone(), near.clone());
            reactor::spawn(async move {
                forward(from, &to).await;
                to.close().await;
            });
            reactor::spawn(async move {
                let _ = meddler.pass_on(near.clone(), &host).await;
                near.close().await;
                host.close().await;
            });
        });
    }
}

/// Passes on what the host says, as it is.
async fn forward(from: MemoryStream, to: &MemoryStream) {
    let mut into = BufMut::zeroed(4096);
    while let Ok((read, bytes @ 1..)) = from.read(into).await {
        if to.write_all(Buf::copy_of(&read[..bytes]).into_vec()).await.is_err() {
            return;
        }
        into = read;
    }
}

/// What blocks hold, as far as that is known: not where a request failed.
type Model = Vec<Option<u8>>;

async fn ends<T>(request: impl Future<Output = T>) -> T {
    reactor::timeout(LONG, request).await.expect("every request ends")
}

/// Asks for something, and looks whether it went as it should.
async fn ask(
    device: &NvmeNamespace<MemoryNetwork>,
    target: &Target,
    input: &mut Input<'_>,
    model: &mut Model,
    meddler: &Meddler,
) {
    let (kind, value) = (input.byte() % 9, input.byte());
    let first = input.below(AREA_BLOCKS);
    let count = 1 + input.below(AREA_BLOCKS - first);
    let (at, bytes) = (first as u64 * BLOCK_BYTES, count * BLOCK_BYTES as usize);
    let known = &mut model[first..first + count];
    let settle = |known: &mut [Option<u8>], outcome: Result<(), BlockError>, now: Option<u8>| {
        known.fill(outcome.ok().and(now));
    };
    match kind {
        0..3 => {
            let mut into = BufMut::for_overwrite(bytes);
            into.fill(0xee);
            let read = ends(device.read(at, into.into_vec())).await;
            let Ok(parts) = read else { return };
            let found: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
            assert_eq!(found.len(), bytes);
            if meddler.has_forged.get() {
                return;
            }
            for (block, known) in found.chunks(BLOCK_BYTES as usize).zip(known) {
                let Some(known) = *known else { continue };
                assert!(block.iter().all(|byte| *byte == known), "what was written is read");
            }
        }
        3..5 => {
            let data = Buf::copy_of(&vec![value; bytes]).into_vec();
            let durability = if value & 1 == 0 { Durability::Volatile } else { Durability::Fua };
            known.fill(None);
            settle(known, ends(device.write(at, data, durability)).await, Some(value));
        }
        5 => {
            let _ = ends(device.flush()).await;
        }
        6 => {
            known.fill(None);
            settle(known, ends(device.write_zeroes(at, bytes as u64)).await, Some(0));
        }
        7 => {
            known.fill(None);
            settle(known, ends(device.discard(at, bytes as u64)).await, None);
        }
        _ => match value % 4 {
            0 => {
                let _ = ends(device.fence(Epoch(u64::from(value) + 1))).await;
            }
            1 => {
                let _ = ends(device.look_at_health()).await;
            }
            2 => target.tell(Event::NamespacesChanged),
            _ => reactor::sleep(Duration::from_secs(value.into())).await,
        },
    }
}

fn options(digests: Digests) -> Options {
    let host = Host::new(Nqn::new("nqn.2014-08.org.example:host").expect("a name"));
    Options { digests, ..Options::new(host) }
}

/// See the module.
///
/// # Panics
///
/// When the initiator does what it must not.
pub fn targets(bytes: &[u8]) {
    Reactor::simulated(1).block_on(run(bytes));
}

async fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    let choices = input.byte();
    let requests = input.byte() % (REQUESTS_MAX + 1);
    let asked = usize::from(requests) * 6;
    let (asked, meddled) = input.0.split_at(asked.min(input.0.len()));
    let meddler = Rc::new(Meddler {
        input: RefCell::new(meddled.to_vec()),
        used: Cell::new(0),
        has_forged: Rc::default(),
    });
    let mut target = Target::new();
    target.is_misquoted = Rc::clone(&meddler.has_forged);
    target.optional.set(OptionalCommands::RESERVATIONS, choices & 4 == 0);
    target.has_success_flag = choices & 8 == 0;
    let target = Rc::new(target);
    let net = MemoryNetwork::default();
    let paths = [1, 2].map(|last| SocketAddr::from(([192, 0, 2, last], 4420)));
    for path in paths {
        meddler.listen(&net, &target, path);
    }
    let digests = Digests { header: choices & 1 != 0, data: choices & 2 != 0 };
    let open = |options| {
        let nqn = Nqn::new(NQN).expect("a name");
        NvmeNamespace::open_on(net.clone(), &paths, nqn, 0, options, "box".into())
    };
    let mut model: Model = vec![Some(0); AREA_BLOCKS];
    if let Ok(device) = ends(open(options(digests))).await {
        let capacity = device.info().capacity_bytes;
        assert!(meddler.has_forged.get() || capacity == BLOCKS * BLOCK_BYTES);
        if capacity >= AREA_BLOCKS as u64 * BLOCK_BYTES && device.info().block_bytes == BLOCK_BYTES
        {
            let mut asked = Input(asked);
            for _ in 0..requests {
                ask(&device, &target, &mut asked, &mut model, &meddler).await;
            }
        }
        ends(device.close()).await;
    }
    // From now on everything is passed on as it is.
    meddler.used.set(meddler.input.borrow().len());
    let is_left = || paths.iter().any(|path| !net.connections(*path).is_empty());
    let begun = reactor::now();
    while is_left() && begun.elapsed() < LONG {
        reactor::sleep(Duration::from_secs(1)).await;
    }
    assert!(!is_left(), "connections are left");
    let device = ends(open(options(Digests::default()))).await.expect("nobody meddles");
    let into = BufMut::zeroed(BLOCK_BYTES as usize).into_vec();
    ends(device.read(0, into)).await.expect("read");
    assert!(!target.came(IoOpcode::Read).is_empty());
    ends(device.close()).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Whatever happens to what the target says.
        #[test]
        fn a_target_that_says_anything_does_no_harm(
            requests in prop::collection::vec(any::<u8>(), 38),
            // Mostly sound, or nothing would ever be opened.
            fates in prop::collection::vec(prop_oneof![12 => Just(0_u8), 1 => any::<u8>()], 0..400),
        ) {
            let bytes = [requests, fates].concat();
            targets(&bytes);
        }
    }

    #[test]
    fn who_is_told_a_higher_limit_sends_more_than_is_taken() {
        let write_all = [3, 7, 0, 0, AREA_BLOCKS as u8 - 1, 0];
        let requests = [&[0, REQUESTS_MAX][..], &write_all.repeat(REQUESTS_MAX.into())].concat();
        // The third byte of MAXH2CDATA is 1, whichever unit has it.
        let forge = [156, 14, 0, 1];
        for passed in 0..40 {
            targets(&[&requests[..], &vec![0; passed], &forge].concat());
        }
    }
}
