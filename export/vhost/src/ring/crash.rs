//! A back end that ends before any of its stores, and another one that goes on: every chain is used exactly once.

use super::driver::Driver;
use super::{Chain, Ring, Used};
use crate::memory::crash;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Action {
    /// The driver makes a chain of so many descriptors available.
    Offer(u16),
    /// The back end takes a chain.
    Pop,
    /// It gives back those whose bit is set.
    Push(u8),
    /// It ends after so many stores of the next two.
    Crash(u32),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (1u16..4).prop_map(Action::Offer),
        4 => Just(Action::Pop),
        3 => any::<u8>().prop_map(Action::Push),
        2 => (0u32..24).prop_map(Action::Crash),
    ]
}

struct World {
    driver: Driver,
    ring: Ring,
    popped: Vec<Chain>,
    /// The back end ends after so many stores.
    crash: Option<u32>,
}

fn open(driver: &Driver) -> Ring {
    Ring::new(&driver.memory, &driver.shape, driver.base(), Some(driver.inflight.clone()))
        .expect("a good ring")
}

impl World {
    fn new(is_packed: bool, has_event_index: bool) -> Self {
        let driver = Driver::new(8, is_packed, has_event_index);
        let ring = open(&driver);
        Self { driver, ring, popped: Vec::new(), crash: None }
    }

    /// Does something with the ring, which may end the back end.
    fn work<T>(&mut self, what: impl FnOnce(&mut Ring, &Driver) -> T) -> Option<T> {
        let (ring, driver) = (&mut self.ring, &self.driver);
        let Some(stores) = self.crash.take() else { return Some(what(ring, driver)) };
        let done = crash::after(stores, || what(ring, driver));
        if done.is_none() {
            self.restart(stores);
        }
        done
    }

    /// Another back end takes over; it may end while it does.
    fn restart(&mut self, stores: u32) {
        self.popped.clear();
        let driver = &self.driver;
        self.ring = crash::after(stores, || open(driver)).unwrap_or_else(|| open(driver));
    }

    fn pop(&mut self) -> bool {
        let popped = self.work(|ring, driver| ring.pop(&driver.memory).expect("a good chain"));
        let is_some = matches!(popped, Some(Some(_)));
        self.popped.extend(popped.flatten());
        is_some
    }

    fn push(&mut self, chosen: u8) {
        let is_chosen = |number: usize| chosen >> (number % 8) & 1 != 0;
        let mut used = Vec::new();
        let mut kept = Vec::new();
        for (number, chain) in self.popped.drain(..).enumerate() {
            match is_chosen(number) {
                true => used.push(Used { token: chain.token, bytes: 1 }),
                false => kept.push(chain),
            }
        }
        self.popped = kept;
        self.work(|ring, _| ring.push(&used));
    }

    fn run(&mut self, action: &Action) {
        match action {
            Action::Offer(length) => {
                self.driver.offer(*length);
            }
            Action::Pop => {
                self.pop();
            }
            Action::Push(chosen) => self.push(*chosen),
            Action::Crash(stores) => self.crash = Some(*stores),
        }
        // It panics about what was not out.
        self.driver.take();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_chain_is_used_once_whenever_the_back_end_ends(
        is_packed: bool,
        has_event_index: bool,
        actions in prop::collection::vec(action(), 1..80),
    ) {
        let mut world = World::new(is_packed, has_event_index);
        for action in &actions {
            world.run(action);
        }
        world.crash = None;
        while world.pop() {}
        world.push(0xff);
        world.driver.take();
        prop_assert_eq!(world.driver.out(), Vec::<u16>::new());
        prop_assert!(!world.ring.has_available());
    }
}

/// Found by the above: descriptors behind the first of a batch stayed used, and an index was stored apart from its wrap counter.
#[test]
fn a_batch_ends_anywhere_wherever_it_lies() {
    let cases = (0..8).flat_map(|begin| (0..40).map(move |stores| (begin, stores)));
    let cases = cases.flat_map(|(begin, stores)| [(false, begin, stores), (true, begin, stores)]);
    for (is_packed, begin, stores) in cases {
        let mut world = World::new(is_packed, false);
        for _ in 0..begin {
            [Action::Offer(1), Action::Pop, Action::Push(1)].iter().for_each(|a| world.run(a));
        }
        for length in [1, 2, 1] {
            world.driver.offer(length).expect("room");
            assert!(world.pop());
        }
        world.crash = Some(stores);
        world.push(0xff);
        world.driver.take();
        world.crash = None;
        // One at a time and in another order: what was left of the batch would show.
        world.driver.offer(1);
        while world.pop() {}
        while let Some(last) = world.popped.len().checked_sub(1) {
            world.push(1 << last);
            world.driver.take();
        }
        assert!(
            world.driver.out().is_empty(),
            "packed {is_packed}, begin {begin}, {stores} stores"
        );
    }
}
