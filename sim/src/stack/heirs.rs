//! The client alone dies, and another one takes over its files at once, before its lease has run out.
//!
//! The node lives, so names are as after every acknowledged change, with or without the one under way. Of bytes that
//! no fsync covered any may be there; what the heir once read stays so until it changes it itself, before and after
//! the sessions of the dead one are settled.

use super::cluster::CLIENT;
use super::model::Body;
use super::scenario::{LEASE, Run, Shared, uuid};
use super::worker::{self, Worker};
use crate::Rng;
use levada_base::reactor::{self, Group};
use levada_client::Client;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// What the dead client sent has arrived by then, or never will.
const IN_FLIGHT: Duration = Duration::from_secs(2);
/// Operations of the heir before it looks at everything.
const OPERATIONS: u64 = 60;

impl Run {
    /// Ends the client, and gives back workers of another one, in `heir`, that have all its files.
    pub(super) async fn client_alone_dies(&self, machine: &Group, heir: &Group) -> Vec<Worker> {
        self.world.tell(|| "the client alone dies".into());
        self.world.coverage.borrow_mut().count("clients died alone", 1);
        machine.kill();
        reactor::sleep(IN_FLIGHT).await;
        // Under another name, as every mount: the sessions of the dead one end with its lease.
        let config = self.stack.client_config(CLIENT, uuid(self.world.seed, 4));
        let connected = reactor::spawn_in(heir, async move { Client::connect(config).await });
        let connected = connected.await.expect("the heir lives");
        let client = connected.expect("nothing refuses the client");
        let states: Vec<Shared> = self.workers.borrow().clone();
        let mut workers = Vec::new();
        for (number, state) in (0..).zip(&states) {
            self.inherit(&client, number, state).await;
            let rng = self.world.rng(Rng::fork);
            let all = Rc::clone(&self.workers);
            let seed = self.world.seed;
            workers.push(Worker::heir(seed, number, client.clone(), rng, Rc::clone(state), all));
        }
        let enough = Rc::new(Cell::new(false));
        let until = self.operations() + OPERATIONS;
        let running = self.start_workers(heir, workers, &enough);
        while self.operations() < until {
            reactor::sleep(Duration::from_micros(300)).await;
        }
        let mut workers = self.stop_and_verify(running, &enough).await;
        reactor::sleep(LEASE).await;
        // A session that is settled takes the time for that of its last write.
        for state in &states {
            state.borrow_mut().tree.forget_times();
        }
        for worker in &mut workers {
            worker.verify(&self.world.coverage).await;
        }
        workers
    }

    /// Compares a tree with what is left of it, and takes that over.
    async fn inherit(&self, client: &Client, number: u64, state: &Shared) {
        let (tree, pending) = (state.borrow().tree.clone(), state.borrow().pending.clone());
        let found = self.look(client, number, state).await;
        let shape = found.shape(&tree);
        let done = pending.filter(|pending| tree.names(Some(pending)) == shape);
        if done.is_none() && tree.names(None) != shape {
            let expected = tree.names(None);
            self.fail(number, state, &format!("names are {shape:?}, expected {expected:?}"));
        }
        if let Some(pending) = &done {
            let fresh = found.inos().find(|ino| !tree.nodes.values().any(|node| node.ino == *ino));
            let mut state = state.borrow_mut();
            state.tree.apply(pending, fresh.unwrap_or(tree.ino(0)));
            let names = state.tree.names(None);
            state.past.push(names);
        }
        state.borrow_mut().pending = None;
        state.borrow_mut().tree.forget_times();
        let files = state.borrow().tree.files();
        for id in files {
            let ino = state.borrow().tree.ino(id);
            let read = worker::read_whole(client, ino).await;
            let read = read.unwrap_or_else(|error| {
                self.fail(number, state, &format!("file {id} does not read: {error}"))
            });
            let survives = state.borrow_mut().tree.file(id).may_survive(&read);
            if let Err(what) = survives {
                self.fail(number, state, &format!("file {id} after its client died: {what}"));
            }
            state.borrow_mut().tree.file(id).data = read;
        }
        let nodes = &mut state.borrow_mut().tree.nodes;
        // Nobody has them open any more.
        nodes.retain(|_, node| node.links > 0 || matches!(node.body, Body::Directory(_)));
    }
}
