//! The same store on a real reactor: the engine's thread runs beside it.

use levada_base::Epoch;
use levada_base::reactor::{self, Reactor};
use levada_base::units::MIB;
use levada_device::{Device, RamDevice};
use levada_kv::{Batch, Config, Store};
use std::ops::Bound;
use std::rc::Rc;

const CONFIG: Config = Config { log_bytes: 1 << 20, cache_bytes: 1 << 20 };

#[test]
fn a_store_works_on_a_machine() {
    let reactor = Reactor::new().expect("a reactor");
    reactor.block_on(async {
        let area: Rc<dyn Device> = Rc::new(RamDevice::new("ram", 32 * MIB));
        let store = Store::create(Rc::clone(&area), Epoch(1), CONFIG).await.expect("made");
        let callers: Vec<_> = (0..8u64)
            .map(|caller| {
                let store = store.clone();
                reactor::spawn(async move {
                    for n in 0..400u64 {
                        store.room().await.expect("room");
                        let mut batch = Batch::default();
                        batch.put(&(caller * 1000 + n).to_be_bytes(), &[caller as u8; 500]);
                        if n >= 200 {
                            batch.delete(&(caller * 1000 + n - 200).to_be_bytes());
                        }
                        let seq = store.apply(batch).expect("runs");
                        store.durable(seq).await.expect("durable");
                    }
                })
            })
            .collect();
        for caller in callers {
            caller.await.expect("ends");
        }
        assert!(store.usage().rows > 0, "checkpoints were made");
        drop(store);
        reactor::yield_now().await;
        let store = Store::open(Rc::clone(&area), Epoch(2), CONFIG).await.expect("opens");
        let rows = store.scan(Bound::Unbounded, Bound::Unbounded, usize::MAX).await.expect("reads");
        assert_eq!(rows.len(), 8 * 200);
        store.close().await.expect("closes");
        let store = Store::open(area, Epoch(3), CONFIG).await.expect("opens");
        let value = store.get(&3399u64.to_be_bytes()).await.expect("reads");
        assert_eq!(value.as_deref(), Some(&[3; 500][..]));
    });
}
