//! Two clients on one file, in turns: closed on one, opened at once on the other.
//!
//! What one client wrote the other sees at its next open, so the model is exact. Not promised is what a node that
//! starts again knows of what another client has not synced (docs/SEMANTICS.md). So each client syncs the file
//! before it leaves it to the other; or nobody does, the node does not crash meanwhile ([`Calm`]), and in the end
//! both sync, or one writes over all of it and syncs: what the other has kept must not come back when the node
//! starts again. Names are changed by one client alone.
//!
//! [`Calm`]: super::calm::Calm

use super::cluster::ROW_BYTES;
use super::model::Change;
use super::worker::{CALLER, Shown, WRITE, Worker, read_whole};
use levada_base::reactor;
use levada_client::{Client, File};
use levada_wire::meta::{AttrChange, OpenMode};
use std::time::Duration;

/// Visits of both clients.
const VISITS_MAX: u64 = 4;

impl Worker {
    /// Leaves a file to the other client, and takes it back.
    pub(super) async fn take_turns(&mut self) {
        let (Some(guest), Some(id)) = (self.guest.clone(), self.file()) else { return };
        self.leave(id).await;
        if self.rng.one_in(2) {
            self.contend(&guest, id).await;
        }
        let unsynced = if self.rng.one_in(2) { self.calm.begin() } else { None };
        let mut clients = [("the other client", guest), ("the first client", self.client.clone())];
        for _ in 0..self.rng.between(1, VISITS_MAX) {
            let (name, client) = &clients[0];
            self.visit(name, client, id, unsynced.is_none()).await;
            clients.reverse();
        }
        let [_, (name, client)] = &clients;
        let is_covered =
            unsynced.is_some() && self.rng.one_in(2) && self.write_over(name, client, id).await;
        if unsynced.is_some() && !is_covered {
            for (at, (name, client)) in clients.iter().enumerate() {
                let file = self.open_on(name, client, id, false).await;
                let synced = self.done(file.fsync()).await;
                self.expect(synced, None);
                if at == 1 {
                    self.state.borrow_mut().tree.file(id).synced_now();
                }
                self.done(file.close()).await;
            }
        }
        drop(unsynced);
        // Whoever comes next finds it as the last one left it.
        let truncate = self.rng.one_in(4);
        let client = self.client.clone();
        let file = self.open_on("the first client", &client, id, truncate).await;
        self.handles.push((id, file));
        self.trim().await;
    }

    /// Nothing of the file is open here any more, and all of it is durable.
    async fn leave(&mut self, id: u64) {
        if !self.handles.iter().any(|(open, _)| *open == id) {
            let client = self.client.clone();
            let file = self.open_on("the first client", &client, id, false).await;
            self.handles.push((id, file));
        }
        let handles = std::mem::take(&mut self.handles);
        let (ours, others): (Vec<_>, Vec<_>) =
            handles.into_iter().partition(|(open, _)| *open == id);
        self.handles = others;
        // A size that is known where a file stays open may be old (docs/SEMANTICS.md).
        if let Some((open, file)) = self.reader.take() {
            self.note(format!("close node {open}, which was read"));
            self.done(file.close()).await;
        }
        let (_, file) = &ours[0];
        self.sync_file(id, file).await;
        for (_, file) in ours {
            self.note(format!("close node {id}"));
            self.done(file.close()).await;
        }
    }

    /// A program on one of the two clients: opens the file, looks, writes, syncs, closes.
    async fn visit(&mut self, name: &str, client: &Client, id: u64, syncs: bool) {
        let truncate = self.rng.one_in(2);
        let file = self.open_on(name, client, id, truncate).await;
        if self.rng.one_in(3) {
            self.compare_on(client, id).await;
        }
        for _ in 0..self.rng.below(3) {
            self.write_to(id, &file).await;
        }
        if self.rng.one_in(4) {
            self.cut_on(client, id).await;
        }
        let attr = self.done(file.attr()).await;
        let attr = self.expect(attr, None).expect("success was expected");
        self.same_attr(id, &attr);
        if syncs {
            self.sync_file(id, &file).await;
        }
        self.note(format!("close node {id} on {name}"));
        self.done(file.close()).await;
        // At once, or while the end of it is under way, or after.
        if self.rng.one_in(3) {
            reactor::sleep(Duration::from_micros(self.rng.below(12_000))).await;
        }
    }

    /// One client writes over the whole file, on all its targets, and syncs; false when it was refused for want of
    /// room.
    async fn write_over(&mut self, name: &str, client: &Client, id: u64) -> bool {
        let file = self.open_on(name, client, id, false).await;
        let refused = self.state.borrow().refused;
        let size = self.state.borrow_mut().tree.file(id).data.len();
        let bytes = self.rng.bytes(size.max(ROW_BYTES));
        self.note(format!("write node {id}: all {} bytes", bytes.len()));
        self.put(id, &file, 0, bytes).await;
        self.sync_file(id, &file).await;
        self.done(file.close()).await;
        self.state.borrow_mut().tree.file(id).is_untimed = true;
        self.state.borrow().refused == refused
    }

    async fn open_on(&self, name: &str, client: &Client, id: u64, truncate: bool) -> File {
        self.note(format!("open node {id} on {name}{}", if truncate { ", empty" } else { "" }));
        if truncate {
            self.state.borrow_mut().tree.file(id).will(Change::Truncate { size: 0 });
        }
        let opened = client.open(self.ino(id), OpenMode { truncate, ..WRITE });
        let opened = self.done(opened).await.map(|(file, attr)| (Shown(file), attr));
        let (file, attr) = self.expect(opened, None).expect("success was expected");
        if truncate {
            self.state.borrow_mut().tree.file(id).data.clear();
        }
        self.same_attr(id, &attr);
        file.0
    }

    async fn cut_on(&mut self, client: &Client, id: u64) {
        let size = self.state.borrow_mut().tree.file(id).data.len() as u64;
        let size = self.rng.below(size + 5000);
        self.note(format!("truncate node {id} to {size}"));
        self.state.borrow_mut().tree.file(id).will(Change::Truncate { size: size as usize });
        let change = AttrChange { size: Some(size), ..AttrChange::default() };
        let attr = self.done(client.set_attr(CALLER, self.ino(id), change)).await;
        let attr = self.expect(attr, None).expect("success was expected");
        self.state.borrow_mut().tree.file(id).data.resize(size as usize, 0);
        self.same_attr(id, &attr);
    }

    /// Reads all of it through a client.
    pub(super) async fn compare_on(&self, client: &Client, id: u64) {
        let read = self.done(read_whole(client, self.ino(id))).await;
        let read = self.expect(read, None).expect("success was expected");
        self.same_bytes(id, &read);
    }

    /// Syncs a file to which nobody writes meanwhile.
    pub(super) async fn sync_file(&self, id: u64, file: &File) {
        self.note(format!("fsync node {id}"));
        let synced = self.done(file.fsync()).await;
        self.expect(synced, None);
        self.state.borrow_mut().tree.file(id).synced_now();
    }
}
