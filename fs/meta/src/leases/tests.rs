//! The table against a set with a clock.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const CLIENTS: u64 = 3;

#[derive(Clone, Debug)]
enum Step {
    Grant { item: usize, client: u64 },
    Pass { millis: u64 },
    Close { item: usize },
    Reopen,
    Notify { item: usize, client: u64 },
    Ack { at: usize, keeps: bool },
    Withdraw { at: usize },
    Leave { client: u64 },
}

fn items() -> [Item; 4] {
    [Item::Names(Ino(1)), Item::Node(Ino(1)), Item::Names(Ino(2)), Item::Node(Ino(3))]
}

fn step() -> impl Strategy<Value = Step> {
    let (item, client) = (0..items().len(), 1..=CLIENTS);
    prop_oneof![
        8 => (item.clone(), client.clone()).prop_map(|(item, client)| Step::Grant { item, client }),
        4 => (0..7_000u64).prop_map(|millis| Step::Pass { millis }),
        1 => item.clone().prop_map(|item| Step::Close { item }),
        1 => Just(Step::Reopen),
        2 => (item, client.clone()).prop_map(|(item, client)| Step::Notify { item, client }),
        2 => (0..8usize, any::<bool>()).prop_map(|(at, keeps)| Step::Ack { at, keeps }),
        1 => (0..8usize).prop_map(|at| Step::Withdraw { at }),
        1 => client.prop_map(|client| Step::Leave { client }),
    ]
}

fn notice(item: Item) -> Notice {
    match item {
        Item::Names(dir) => Notice::Names { dir, name: b"name".to_vec() },
        Item::Node(ino) => Notice::Node { ino },
        Item::Data(ino) => Notice::Shared { ino },
    }
}

proptest! {
    #[test]
    fn the_table_is_a_set_with_a_clock(steps in prop::collection::vec(step(), 1..200)) {
        let mut leases = Leases::default();
        let mut now = Instant(1);
        let mut held: BTreeMap<(Item, u64), Instant> = BTreeMap::new();
        let mut closed: Vec<Item> = Vec::new();
        let mut sent: BTreeMap<(u64, u64), Item> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Grant { item, client } => {
                    let item = items()[item];
                    let granted = leases.grant(item, client, now);
                    prop_assert_eq!(granted, !closed.contains(&item));
                    if granted {
                        held.insert((item, client), now + TERM);
                    }
                }
                Step::Pass { millis } => now = now + Duration::from_millis(millis),
                Step::Close { item } => {
                    closed.push(items()[item]);
                    leases.close(items()[item]);
                }
                Step::Reopen => {
                    if let Some(item) = closed.pop() {
                        leases.reopen(item);
                    }
                }
                Step::Notify { item, client } => {
                    let item = items()[item];
                    let number = leases.notify(client, item, notice(item));
                    prop_assert!(number > NUMBERS && sent.insert((client, number), item).is_none());
                }
                Step::Ack { at, keeps } => {
                    // One that is not known means nothing.
                    leases.acknowledged(1, Ack { number: NUMBERS, keeps });
                    let key = sent.keys().nth(at).copied();
                    if let Some((client, number)) = key {
                        leases.acknowledged(client, Ack { number, keeps });
                        let item = sent.remove(&(client, number)).expect("listed");
                        if !keeps || matches!(item, Item::Node(_)) {
                            held.remove(&(item, client));
                        }
                    }
                }
                Step::Withdraw { at } => {
                    let key = sent.keys().nth(at).copied();
                    if let Some((client, number)) = key {
                        leases.withdraw(client, number);
                        sent.remove(&(client, number));
                    }
                }
                Step::Leave { client } => {
                    leases.leave(client);
                    held.retain(|(_, of), _| *of != client);
                    sent.retain(|(of, _), _| *of != client);
                }
            }
            held.retain(|_, until| *until > now);
            for item in items() {
                for client in 1..=CLIENTS {
                    let others: BTreeSet<_> = leases.others(item, client, now).collect();
                    let expected: BTreeSet<_> = held
                        .iter()
                        .filter(|((of, holder), _)| *of == item && *holder != client)
                        .map(|((_, holder), until)| (*holder, *until))
                        .collect();
                    prop_assert_eq!(others, expected);
                }
            }
            let all: usize = leases.held.values().map(SmallVec::len).sum();
            prop_assert_eq!((leases.all, leases.counts.values().sum::<usize>()), (all, all));
            prop_assert!(leases.ends.len() >= all);
            for client in 1..=CLIENTS {
                let of: Vec<u64> = leases.notices(client).iter().map(|(number, _)| *number).collect();
                let expected: Vec<u64> = sent.range((client, 0)..=(client, u64::MAX)).map(|((_, n), _)| *n).collect();
                prop_assert_eq!(of, expected);
            }
        }
        // It runs empty by itself.
        closed.into_iter().for_each(|item| leases.reopen(item));
        now = now + 2 * TERM;
        for _ in 0..2 * leases.ends.len() + 1 {
            leases.sweep(now);
        }
        prop_assert!(leases.is_empty() && leases.ends.is_empty() && leases.counts.is_empty());
    }
}

#[test]
fn a_client_gets_so_many_and_no_more() {
    let mut leases = Leases::default();
    let now = Instant(1);
    for number in 0..CLIENT_MAX as u64 {
        assert!(leases.grant(Item::Node(Ino(number)), 1, now));
    }
    assert!(!leases.grant(Item::Names(Ino(1)), 1, now));
    assert!(leases.grant(Item::Node(Ino(1)), 1, now), "it has that already");
    assert!(leases.grant(Item::Names(Ino(1)), 2, now));
    let later = now + TERM;
    assert!(!leases.grant(Item::Names(Ino(2)), 1, now), "not over yet");
    assert!(!leases.grant(Item::Names(Ino(2)), 1, later) || leases.all < CLIENT_MAX);
    assert!(leases.grant(Item::Names(Ino(2)), 1, later), "room for it was found");
}

#[test]
fn rows_say_what_they_disturb() {
    assert_eq!(notice_of_row(&key::inode(Ino(9))), Some(Notice::Node { ino: Ino(9) }));
    let named = Notice::Names { dir: Ino(9), name: b"x".to_vec() };
    assert_eq!(notice_of_row(&key::name(Ino(9), b"x")), Some(named));
    for other in [key::entry(Ino(9), 3), key::orphan(Ino(9)), key::xattr(Ino(9), b"x")] {
        assert_eq!(Item::of_row(&other), None);
    }
    assert_eq!(Item::of_row(key::COUNTERS), None);
}
