//! Clients that trust names and attributes without asking, while others change them: whoever reads after a change was
//! answered sees it, whatever breaks.

use super::{ROOT, ROOT_DIR, World, below, create};
use levada_base::ids::Ino;
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, Error};
use levada_wire::attr::Time;
use levada_wire::local::LinkConfig;
use levada_wire::meta::{AttrChange, MetaFault, SetTime};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const WORKERS: [&str; 3] = ["a", "b", "c"];
/// Names of each client that others look up, in turn.
const NAMES: usize = 4;

/// All of it; panics when anything that was read was old.
pub fn all(seed: u64) {
    a_term_counts_from_the_question();
    nothing_is_granted_while_it_closes();
    what_is_read_is_not_old(seed, 12);
}

/// What a client has done, as far as it was answered.
struct Done {
    /// Of its file.
    ino: Ino,
    mtime: Cell<i64>,
    /// Whether each of its names is there; `None`: it is being changed.
    there: RefCell<[Option<bool>; NAMES]>,
}

pub async fn set_mtime(client: &Client, ino: Ino, mtime: i64) {
    let mtime = Some(SetTime::To(Time(mtime)));
    let change = AttrChange { mtime, ..AttrChange::default() };
    client.set_attr(ROOT, ino, change).await.expect("there");
}

pub async fn mtime(client: &Client, ino: Ino) -> i64 {
    client.attr(ino).await.expect("there").mtime.0
}

fn name(of: usize, number: usize) -> String {
    format!("{}-{number}", WORKERS[of])
}

pub async fn is_there(client: &Client, name: &str) -> bool {
    match client.lookup(ROOT_DIR, name.as_bytes()).await {
        Ok(_) => true,
        Err(Error::Meta(MetaFault::NotFound)) => false,
        Err(error) => panic!("{error}"),
    }
}

async fn change(client: &Client, me: usize, done: &Done) {
    if below(2) == 0 {
        let next = done.mtime.get() + 1;
        set_mtime(client, done.ino, next).await;
        done.mtime.set(next);
        return;
    }
    let number = below(NAMES as u64) as usize;
    let was_there = done.there.borrow_mut()[number].take().expect("one change at a time");
    let name = name(me, number);
    if was_there {
        client.unlink(ROOT, ROOT_DIR, name.as_bytes()).await.expect("there");
    } else {
        create(client, &name).await.close().await;
    }
    done.there.borrow_mut()[number] = Some(!was_there);
}

async fn look(client: &Client, all: &[Rc<Done>]) {
    let of = below(all.len() as u64) as usize;
    let done = &all[of];
    if below(2) == 0 {
        let before = done.mtime.get();
        let found = mtime(client, done.ino).await;
        assert!(found >= before, "a time of {found} after {before} had been answered");
        return;
    }
    let number = below(NAMES as u64) as usize;
    let before = done.there.borrow()[number];
    let found = is_there(client, &name(of, number)).await;
    // Else it was changed meanwhile.
    if before.is_some() && done.there.borrow()[number] == before {
        assert_eq!(Some(found), before, "{}", name(of, number));
    }
}

/// Acknowledges after a while, as a mount whose kernel must let go first.
pub fn slow(client: &Client) {
    client.on_notice(Rc::new(|_| {
        Some(Box::pin(reactor::sleep(Duration::from_micros(below(200_000)))))
    }));
}

pub fn what_is_read_is_not_old(seed: u64, rounds: usize) {
    Reactor::simulated(seed).block_on(async {
        let world = World::new(1).await;
        let mut clients = Vec::new();
        let mut all = Vec::new();
        for name in WORKERS {
            let client = world.leasing(name).await;
            let file = create(&client, &format!("file-{name}")).await;
            let (mtime, there) = (Cell::new(0), RefCell::new([Some(false); NAMES]));
            set_mtime(&client, file.ino(), 0).await;
            all.push(Rc::new(Done { ino: file.ino(), mtime, there }));
            file.close().await;
            clients.push(client);
        }
        slow(&clients[1]);
        world.network.break_one_in(150);
        let all: Rc<[Rc<Done>]> = all.into();
        let tasks: Vec<_> = (0..WORKERS.len())
            .flat_map(|me| {
                let work = |changes: bool| {
                    let (client, all) = (clients[me].clone(), Rc::clone(&all));
                    reactor::spawn(async move {
                        for _ in 0..if changes { rounds } else { rounds * 20 } {
                            if changes {
                                change(&client, me, &all[me]).await;
                                reactor::sleep(Duration::from_millis(below(300))).await;
                            } else {
                                look(&client, &all).await;
                                reactor::sleep(Duration::from_micros(below(30_000))).await;
                            }
                        }
                    })
                };
                [work(true), work(false), work(false)]
            })
            .collect();
        let mischief = {
            let world = Rc::clone(&world);
            reactor::spawn(async move {
                loop {
                    reactor::sleep(Duration::from_millis(below(4000))).await;
                    match below(4) {
                        0 => world.restart_meta().await,
                        1 => {
                            // It stays away, and reads what it trusts.
                            let name = WORKERS[below(3) as usize];
                            world.network.partition(name, "meta");
                            reactor::sleep(Duration::from_millis(below(14_000))).await;
                            world.network.heal(name, "meta");
                        }
                        2 => world.network.disconnect(WORKERS[below(3) as usize], "meta"),
                        _ => {}
                    }
                }
            })
        };
        for task in tasks {
            let ended = reactor::timeout(Duration::from_secs(900), task).await;
            ended.expect("nobody waits for ever").expect("not killed");
        }
        mischief.abort();
    });
}

/// `client` reads the time again and again. With another one than `old` it is done; and `old` may not be read after
/// `answered` was set.
fn reading(
    client: &Client,
    ino: Ino,
    old: i64,
    answered: &Rc<Cell<bool>>,
) -> reactor::JoinHandle<()> {
    let (client, answered) = (client.clone(), Rc::clone(answered));
    reactor::spawn(async move {
        loop {
            let was_answered = answered.get();
            if mtime(&client, ino).await != old {
                return;
            }
            assert!(!was_answered, "an old time, from its table");
            reactor::sleep(Duration::from_millis(50)).await;
        }
    })
}

/// An answer takes long, and then its client is cut off. Its term is over no later than the service believes.
pub fn a_term_counts_from_the_question() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (a, b) = (world.leasing("a").await, world.leasing("b").await);
        let file = create(&b, "file").await;
        let ino = file.ino();
        set_mtime(&b, ino, 1).await;
        file.close().await;
        b.sync().await.expect("durable");
        reactor::sleep(Duration::from_secs(20)).await;
        let slow = |delay: Duration| {
            let config = LinkConfig { codec: false, delay_min: delay, delay_max: delay };
            world.network.set_config(config);
        };
        slow(Duration::from_millis(2));
        let asking = reactor::spawn({
            let a = a.clone();
            async move { mtime(&a, ino).await }
        });
        reactor::sleep(Duration::from_millis(1)).await;
        slow(Duration::from_secs(4));
        reactor::sleep(Duration::from_millis(2)).await;
        slow(Duration::from_micros(50));
        let asked = reactor::now();
        assert_eq!(asking.await.expect("not killed"), 1);
        assert!(asked.elapsed() > Duration::from_secs(3));
        world.network.partition("a", "meta");
        let answered = Rc::default();
        let looking = reading(&a, ino, 1, &answered);
        set_mtime(&b, ino, 2).await;
        answered.set(true);
        reactor::sleep(Duration::from_secs(1)).await;
        world.network.heal("a", "meta");
        looking.await.expect("every read is from after the change");
    });
}

/// A change waits for one client, and another one asks meanwhile.
pub fn nothing_is_granted_while_it_closes() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let [a, b, c] =
            [world.leasing("a").await, world.leasing("b").await, world.leasing("c").await];
        let file = create(&b, "file").await;
        let ino = file.ino();
        set_mtime(&b, ino, 1).await;
        file.close().await;
        b.sync().await.expect("durable");
        reactor::sleep(Duration::from_secs(20)).await;
        assert_eq!((mtime(&a, ino).await, mtime(&c, ino).await), (1, 1));
        assert!(a.knows(ino) && c.knows(ino));
        world.network.partition("c", "meta");
        let answered = Rc::default();
        let looking = reading(&a, ino, 1, &answered);
        let began = reactor::now();
        set_mtime(&b, ino, 2).await;
        answered.set(true);
        let waited = began.elapsed();
        assert!(waited > Duration::from_secs(8) && waited < Duration::from_secs(12), "{waited:?}");
        looking.await.expect("every read is from after the change");
        world.network.heal("c", "meta");
        assert_eq!(mtime(&c, ino).await, 2);
    });
}
