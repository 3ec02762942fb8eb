//! A log whose rows are damaged, and what a check says of that.

use super::World;
use super::model::object;
use levada_kv::{Batch, Store};
use levada_log::{IndexFinding, ObjectLog, Stability};

/// A new log of eight objects, all of them indexed, each with a mark.
pub async fn log_of_eight(world: &mut World) -> ObjectLog {
    let log = world.next_life().open(true).await;
    for n in 1..9 {
        let bytes = super::bytes(n as u8, 30_000);
        log.write(object(n), 0, bytes, Stability::Unstable).await.expect("room");
        log.truncate(object(n), 29_000, Stability::Unstable).await.expect("room");
    }
    log.settle().await.expect("settled");
    log
}

/// Puts a row there, or takes it away.
pub fn set(store: &Store, key: &[u8], value: Option<&[u8]>) {
    let mut batch = Batch::default();
    match value {
        Some(value) => batch.put(key, value),
        None => batch.delete(key),
    }
    store.apply(batch).expect("room");
}

/// A row that is there.
pub async fn get(store: &Store, key: &[u8]) -> Vec<u8> {
    store.get(key).await.expect("reads").expect("there").to_vec()
}

pub fn sorts(findings: &[IndexFinding]) -> Vec<&'static str> {
    findings.iter().map(IndexFinding::sort).collect()
}
