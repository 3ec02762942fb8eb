//! A listing of a log that goes on is what its objects are at the moment of each page.

use crate::support::model::{Contents, Model, TASKS, below, check_all, work};
use crate::support::{World, seeds};
use levada_base::ids::{Ino, ObjectId};
use levada_base::planted;
use levada_base::reactor::{self, Group, Reactor};
use levada_log::{IndexedObject, ObjectLog, Stability};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

async fn listed(log: &ObjectLog) -> BTreeMap<ObjectId, Option<u64>> {
    let mut found = BTreeMap::new();
    let mut objects = log.list();
    let mut last = None;
    while let Some(IndexedObject { id, size }) = objects.next().await.expect("reads") {
        assert!(last < Some(id.to_key()), "in order");
        last = Some(id.to_key());
        found.insert(id, size);
    }
    found
}

fn size(contents: &Contents) -> Option<u64> {
    contents.as_ref().map(|bytes| bytes.len() as u64)
}

/// Lists among changes, over some lives; how many objects were compared.
fn lists(seed: u64) -> u64 {
    Reactor::simulated(seed).block_on(async {
        // So small that the cleaner works.
        let mut world = World::new(48).await;
        let model = Rc::new(RefCell::new(Model::default()));
        let mut compared = 0;
        for life in 0..3 {
            let node = Group::new();
            let parts = world.next_life();
            let task_model = Rc::clone(&model);
            let ran = reactor::spawn_in(&node, async move {
                let log = parts.open(life == 0).await;
                check_all(&log, &task_model, seed).await;
                for task in 0..TASKS {
                    reactor::spawn(work(log.clone(), Rc::clone(&task_model), task, 10_000));
                }
                let mut compared = 0;
                for _ in 0..100 {
                    reactor::sleep(Duration::from_micros(below(3000))).await;
                    let found = listed(&log).await;
                    let model = task_model.borrow();
                    for (id, object) in &model.objects {
                        let found = found.get(id).map(|size| size.expect("a sound row"));
                        let known = [Some(&object.now), object.next.as_ref()];
                        let mut known = known.into_iter().flatten().map(size);
                        assert!(known.any(|size| size == found), "seed {seed}: {id:?}: {found:?}");
                        compared += 1;
                    }
                    let is_known = |id| model.objects.contains_key(id);
                    assert!(found.keys().all(is_known), "seed {seed}: {found:?}");
                }
                compared
            });
            compared += ran.await.expect("it lives");
            node.kill();
            world.cut_power().await;
        }
        compared
    })
}

#[test]
fn a_page_is_what_is_there_at_that_moment() {
    let compared: u64 = seeds(6).map(lists).sum();
    assert!(compared > 1000, "{compared}");
}

#[test]
fn a_listing_of_the_index_alone_is_found() {
    planted::choose(Some("log-list-of-index-alone"));
    let found = (0..10).any(|seed| std::panic::catch_unwind(|| lists(seed)).is_err());
    planted::choose(None);
    assert!(found);
}

#[test]
fn many_pages_hold_each_object_once() {
    const OBJECTS: u64 = 3000;
    Reactor::simulated(3).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        let id = |n| ObjectId { fs: 1, ino: Ino(n), component: n as u32 % 3, version: 1 };
        for n in 0..OBJECTS {
            log.write(id(n), 0, crate::support::bytes(1, 1 + n % 50), Stability::Unstable)
                .await
                .expect("room");
            if n % 700 == 0 {
                log.settle().await.expect("settled");
            }
        }
        for n in (0..OBJECTS).step_by(5) {
            log.delete(id(n)).await.expect("deleted");
        }
        let found = listed(&log).await;
        let left = (0..OBJECTS).filter(|n| n % 5 > 0);
        assert_eq!(found, left.map(|n| (id(n), Some(1 + n % 50))).collect());
    });
}
