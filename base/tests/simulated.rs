//! The reactor on virtual time: order, groups, timers and workers are fixed by the seed.

use levada_base::reactor::{self, Group, Reactor, worker::Worker};
use levada_base::sync::{Semaphore, oneshot, queue};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

fn busy_world(seed: u64) -> (Vec<u64>, u64) {
    let reactor = Reactor::simulated(seed);
    let order = Rc::new(RefCell::new(Vec::new()));
    reactor.block_on(async {
        let tasks: Vec<_> = (0..20u64)
            .map(|n| {
                let order = Rc::clone(&order);
                reactor::spawn(async move {
                    reactor::sleep(Duration::from_micros(reactor::random_u64() % 50)).await;
                    order.borrow_mut().push(n);
                    reactor::yield_now().await;
                    order.borrow_mut().push(n + 100);
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    });
    let hash = reactor.trace_hash();
    (order.take(), hash)
}

#[test]
fn one_seed_fixes_the_run() {
    assert_eq!(busy_world(7), busy_world(7));
    assert_ne!(busy_world(7), busy_world(8));
}

#[test]
fn sleeping_takes_virtual_time_only() {
    Reactor::simulated(1).block_on(async {
        let start = reactor::now();
        reactor::sleep(Duration::from_secs(3600)).await;
        assert_eq!(start.elapsed(), Duration::from_secs(3600));
        let late = reactor::timeout(Duration::from_secs(1), std::future::pending::<()>()).await;
        assert!(late.is_err());
    });
}

#[test]
fn a_killed_group_is_dropped_where_it_stands() {
    struct OnDrop(Rc<Cell<u32>>);
    impl Drop for OnDrop {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    Reactor::simulated(1).block_on(async {
        let dropped = Rc::new(Cell::new(0));
        let node = Group::new();
        let counter = Rc::clone(&dropped);
        let task = reactor::spawn_in(&node, async move {
            let inner = OnDrop(Rc::clone(&counter));
            let child = reactor::spawn(async move {
                let _inner = inner;
                std::future::pending::<()>().await;
            });
            let _outer = OnDrop(counter);
            child.await;
        });
        reactor::sleep(Duration::from_secs(1)).await;
        assert_eq!(dropped.get(), 0);
        node.kill();
        assert_eq!(dropped.get(), 2);
        assert_eq!(task.await, None);
        assert_eq!(reactor::spawn_in(&node, async { 1 }).await, None);
    });
}

#[test]
fn a_semaphore_serves_in_order_of_arrival() {
    Reactor::simulated(3).block_on(async {
        let credits = Semaphore::new(10);
        let first = credits.acquire(8).await;
        let served = Rc::new(RefCell::new(Vec::new()));
        let mut tasks = Vec::new();
        for (name, count) in [("large", 9), ("small", 1)] {
            let (credits, served) = (Rc::clone(&credits), Rc::clone(&served));
            tasks.push(reactor::spawn(async move {
                let _permit = credits.acquire(count).await;
                served.borrow_mut().push(name);
            }));
            reactor::sleep(Duration::from_micros(1)).await;
        }
        assert!(credits.try_acquire(1).is_none(), "nobody overtakes those who wait");
        drop(first);
        for task in tasks {
            task.await;
        }
        assert_eq!(*served.borrow(), ["large", "small"]);
        assert_eq!(credits.available(), 10);
    });
}

#[test]
fn queues_and_oneshots_end_with_their_senders() {
    Reactor::simulated(1).block_on(async {
        let (sender, mut receiver) = queue::channel();
        let task = reactor::spawn(async move {
            let mut sum = 0;
            while let Some(n) = receiver.recv().await {
                sum += n;
            }
            sum
        });
        for n in 0..10 {
            sender.send(n).expect("open");
        }
        drop(sender);
        assert_eq!(task.await, Some(45));
        let (sender, receiver) = oneshot::channel::<()>();
        drop(sender);
        assert!(receiver.await.is_err());
    });
}

#[test]
fn a_worker_takes_turns_with_its_reactor() {
    Reactor::simulated(1).block_on(async {
        let mut worker = Worker::start("test", |port| {
            let mut n = 0;
            while let Ok(add) = port.call(n) {
                n += add;
            }
        });
        for expected in [0, 5, 10] {
            assert_eq!(worker.next().await, Some(expected));
            worker.answer(5);
        }
    });
}

#[test]
fn what_need_not_wait_runs_at_once_and_the_rest_in_a_task_of_its_group() {
    Reactor::simulated(1).block_on(async {
        let done = Rc::new(RefCell::new(Vec::new()));
        let begin = |name: &'static str, wait: Option<Duration>| {
            let done = Rc::clone(&done);
            reactor::run_or_spawn(async move {
                if let Some(wait) = wait {
                    reactor::sleep(wait).await;
                }
                done.borrow_mut().push(name);
            });
        };
        begin("waits", Some(Duration::from_millis(2)));
        begin("does not", None);
        assert_eq!(*done.borrow(), ["does not"]);
        reactor::sleep(Duration::from_millis(3)).await;
        assert_eq!(*done.borrow(), ["does not", "waits"]);

        // With its group it ends, and a dead one begins nothing.
        let (node, inside) = (Group::new(), Rc::clone(&done));
        let (ours, sooner) = (node.clone(), Duration::from_millis(1));
        let runner = reactor::spawn_in(&node, async move {
            let late = Rc::clone(&inside);
            reactor::run_or_spawn(async move {
                reactor::sleep(sooner).await;
                late.borrow_mut().push("killed");
            });
            ours.kill();
            reactor::run_or_spawn(async move { inside.borrow_mut().push("dead") });
        });
        runner.await;
        reactor::sleep(Duration::from_millis(2)).await;
        assert_eq!(*done.borrow(), ["does not", "waits"]);
    });
}
