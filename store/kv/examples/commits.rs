//! How many durable batches a second, and after how long each? On a device in memory, so what is
//! seen is the cost of the store itself.
//!
//! `cargo run --release -p levada-kv --example commits -- [WAITERS] [VALUE_BYTES] [SECONDS]`

use levada_base::Epoch;
use levada_base::reactor::{self, Reactor};
use levada_base::units::{GIB, KIB};
use levada_device::{Device, RamDevice};
use levada_kv::{Batch, Config, Store};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

fn main() {
    let number = |n: usize, default: u64| {
        std::env::args().nth(n).and_then(|n| n.parse().ok()).unwrap_or(default)
    };
    let (waiters, value_bytes) = (number(1, 16), number(2, 100) as usize);
    let span = Duration::from_secs(number(3, 3));
    Reactor::new().expect("a reactor").block_on(async {
        let area: Rc<dyn Device> = Rc::new(RamDevice::new("ram", GIB));
        let store =
            Store::create(Rc::clone(&area), Epoch(1), Config::default()).await.expect("made");
        let latencies_ns = Rc::new(RefCell::new(Vec::new()));
        let start = reactor::now();
        let callers: Vec<_> = (0..waiters)
            .map(|_| {
                let (store, latencies_ns) = (store.clone(), Rc::clone(&latencies_ns));
                reactor::spawn(async move {
                    while start.elapsed() < span {
                        let asked = reactor::now();
                        store.room().await.expect("room");
                        let key = reactor::random_u64() % 200_000;
                        let mut batch = Batch::default();
                        batch.put(&key.to_be_bytes(), &vec![7; value_bytes]);
                        let seq = store.apply(batch).expect("runs");
                        store.durable(seq).await.expect("durable");
                        latencies_ns.borrow_mut().push(asked.elapsed().as_nanos() as u64);
                        reactor::yield_now().await;
                    }
                })
            })
            .collect();
        for caller in callers {
            caller.await.expect("ends");
        }
        let passed = start.elapsed();
        report(&format!("{waiters} waiters, {value_bytes} bytes"), &latencies_ns, passed);

        store.close().await.expect("closes");
        let config = Config { cache_bytes: 64 * KIB as usize, ..Config::default() };
        let opening = reactor::now();
        let store = Store::open(area, Epoch(2), config).await.expect("opens");
        println!("open {} us, {:?}", opening.elapsed().as_micros(), store.usage());
        let misses_ns = Rc::new(RefCell::new(Vec::new()));
        let start = reactor::now();
        for _ in 0..20_000 {
            let asked = reactor::now();
            let key = reactor::random_u64() % 200_000;
            store.get(&key.to_be_bytes()).await.expect("reads");
            misses_ns.borrow_mut().push(asked.elapsed().as_nanos() as u64);
        }
        report("get, mostly not in memory", &misses_ns, start.elapsed());
    });
}

fn report(what: &str, latencies_ns: &RefCell<Vec<u64>>, passed: Duration) {
    let mut latencies_ns = latencies_ns.borrow_mut();
    latencies_ns.sort_unstable();
    let count = latencies_ns.len();
    let at = |share: f64| latencies_ns[((count - 1) as f64 * share) as usize] as f64 / 1000.0;
    println!(
        "{what}: {:.0}/s, mean {:.1} us, p50 {:.1}, p99 {:.1}, max {:.1}",
        count as f64 / passed.as_secs_f64(),
        latencies_ns.iter().sum::<u64>() as f64 / count as f64 / 1000.0,
        at(0.5),
        at(0.99),
        at(1.0),
    );
}
