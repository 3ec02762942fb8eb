//! The service on an object log with a bad row: the client of that object is told so, not sent to ask
//! again for ever, and all others are served.

use levada_base::ids::{Ino, ObjectId, Seq, TargetId, Uuid};
use levada_base::reactor::Reactor;
use levada_base::units::{KIB, MIB};
use levada_base::{Buf, Epoch};
use levada_device::{Device, RamDevice};
use levada_kv::{Batch, Store};
use levada_log::{Config, ObjectLog};
use levada_object::Objects;
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use levada_wire::object::{ObjectFault, Stability};
use std::rc::Rc;

fn object(ino: u64) -> ObjectId {
    ObjectId { fs: 1, ino: Ino(ino), component: 0, version: 1 }
}

async fn array() -> RaidArray {
    let member = |n: u16| MemberSpec {
        device: Rc::new(RamDevice::new(&format!("drive-{n}"), 8 * MIB)),
        uuid: Uuid::from_u128(100 + u128::from(n)),
        name: format!("drive-{n}"),
        enclosure: n,
    };
    let spec = ArraySpec {
        uuid: Uuid::from_u128(7),
        name: "data".to_owned(),
        level: Level::Raid6,
        chunk_bytes: 16 * KIB,
        block_bytes: None,
        journal_bytes: Some(0),
        members: (0..6).map(member).collect(),
        spares: 0,
    };
    RaidArray::create(spec, Epoch(1)).await.expect("an array")
}

#[test]
fn a_bad_row_is_damage_of_its_object_alone() {
    Reactor::simulated(1).block_on(async {
        let array = Rc::new(array().await);
        let area: Rc<dyn Device> = Rc::new(RamDevice::new("kv", 16 * MIB));
        let kv = levada_kv::Config { log_bytes: MIB, cache_bytes: MIB as usize };
        let config = Config { segment_stripes: 4, ..Config::new(1, TargetId(1)) };
        let store = Store::create(Rc::clone(&area), Epoch(1), kv).await.expect("a store");
        let log = ObjectLog::create(Rc::clone(&array) as _, store.clone(), config, Epoch(1));
        let log = log.await.expect("a log");
        let objects: &dyn Objects = &log;
        let data = || Buf::copy_of(&[7; 100]).into_vec();
        for ino in [1, 2] {
            objects.write(object(ino), 0, data(), Stability::Unstable).await.expect("room");
        }
        objects.commit(Seq(u64::MAX)).await.expect("durable");
        log.settle().await.expect("settled");
        drop(log);

        let mut bad = Batch::default();
        let mut key = vec![b'O'];
        key.extend_from_slice(&object(1).to_key());
        assert!(store.get(&key).await.expect("reads").is_some(), "that is the key of a row");
        bad.put(&key, b"nonsense");
        store.apply(bad).expect("room");
        store.close().await.expect("closes");

        let store = Store::open(area, Epoch(1), kv).await.expect("a store");
        let log = ObjectLog::open(array, store, config, Epoch(1)).await.expect("a log");
        let objects: &dyn Objects = &log;
        let damaged = Some(ObjectFault::Damaged { offset: 0, bytes: i64::MAX as u64 });
        assert_eq!(objects.read(object(1), 0, 10).await.err(), damaged);
        let written = objects.write(object(1), 0, data(), Stability::Unstable).await;
        assert_eq!(written.err(), damaged);
        assert_eq!(objects.stat(object(1)).await.err(), damaged);
        assert_eq!(objects.truncate(object(1), 1).await.err(), damaged);
        assert_eq!(objects.delete(object(1)).await.err(), damaged);

        assert_eq!(&objects.read(object(2), 0, 100).await.expect("another")[0][..], [7; 100]);
        objects.write(object(2), 100, data(), Stability::Durable).await.expect("another");
        objects.delete(object(2)).await.expect("another");
        assert_eq!(objects.stat(object(2)).await, Ok(None));
    });
}
