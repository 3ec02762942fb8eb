//! Attributes: modes, times that a program sets, links.

use super::model::{Body, Pending};
use super::worker::{CALLER, Worker, text};
use levada_wire::attr::{Attr, Kind, Time};
use levada_wire::meta::{AttrChange, SetTime};

/// Of a mode, what chmod(2) says here: no set-id bits, which a write takes away.
pub(super) const PERMISSIONS: u32 = 0o777;
/// Times are drawn below this: some 36 years.
const TIME_MAX: u64 = 1 << 60;

impl Worker {
    /// As chmod(2), utimens(2), or both at once.
    pub(super) async fn set_attributes(&mut self) {
        let (parent, name) = self.existing();
        let Some(id) = self.entry(parent, &name) else { return };
        let is_file = match &self.state.borrow().tree.nodes[&id].body {
            Body::File(_) => true,
            Body::Directory(_) => false,
            Body::Symlink => return,
        };
        let draw = self.rng.below(3);
        let mode = (!is_file || draw < 2).then(|| self.rng.below(0o1000) as u32);
        // Names that come and go in a directory set its time.
        let mtime = (is_file && draw > 0).then(|| Time(self.rng.below(TIME_MAX) as i64));
        self.note(format!("set mode {mode:?}, mtime {mtime:?} of node {id}, {:?}", text(&name)));
        if let Some(mode) = mode {
            self.pending(Pending::Mode { id, mode });
        }
        if mtime.is_some() {
            self.state.borrow_mut().tree.file(id).mtime = None;
        }
        let change = AttrChange { mode, mtime: mtime.map(SetTime::To), ..AttrChange::default() };
        let attr = self.done(self.client.set_attr(CALLER, self.ino(id), change)).await;
        let attr = self.expect(attr, None).expect("success was expected");
        {
            let mut state = self.state.borrow_mut();
            if mtime.is_some() && !state.tree.file(id).is_untimed {
                state.tree.file(id).mtime = mtime;
            }
            if let Some(mode) = mode {
                state.tree.nodes.get_mut(&id).expect("known").mode = mode;
            }
        }
        if mode.is_some() {
            self.renamed();
        }
        self.same_attr(id, &attr);
    }

    /// Attributes that were just told must be the model's.
    pub(super) fn same_attr(&self, id: u64, attr: &Attr) {
        let (ino, links, mode) = {
            let state = self.state.borrow();
            let node = &state.tree.nodes[&id];
            (node.ino, state.tree.links_of(id), node.mode)
        };
        if attr.ino != ino {
            self.fail(&format!("node {id} is {:?}, expected {ino:?}", attr.ino));
        }
        if attr.nlink != links {
            self.fail(&format!("node {id} has {} links, expected {links}", attr.nlink));
        }
        if attr.mode & PERMISSIONS != mode {
            self.fail(&format!("node {id} has mode {:o}, expected {mode:o}", attr.mode));
        }
        if attr.kind != Kind::File {
            return;
        }
        let mtime = self.state.borrow_mut().tree.file(id).mtime;
        if mtime.is_some_and(|mtime| attr.mtime != mtime) {
            self.fail(&format!("node {id} has mtime {:?}, expected {mtime:?}", attr.mtime));
        }
        self.same_size(id, attr.size);
    }
}
