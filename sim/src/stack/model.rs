//! What the file system must look like: names, links and contents of one worker's directory.

use levada_base::ids::Ino;
use levada_wire::attr::Time;
use levada_wire::meta::MetaFault;
use std::borrow::Cow;
use std::collections::BTreeMap;

pub(super) const DIRECTORY_MODE: u32 = 0o755;
pub(super) const FILE_MODE: u32 = 0o644;
pub(super) const SYMLINK_MODE: u32 = 0o777;

/// A change of a file's contents that no fsync has covered.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Write { offset: usize, data: Vec<u8> },
    Truncate { size: usize },
}

/// A file: what it reads now, and what must survive the end of its client.
#[derive(Clone, Debug, Default)]
pub(super) struct FileState {
    pub data: Vec<u8>,
    pub synced: Vec<u8>,
    pub changes: Vec<Change>,
    /// Of modification, where a program has set it since the last change.
    pub mtime: Option<Time>,
    /// A client that has not synced may yet record when it wrote, over times that another sets.
    pub is_untimed: bool,
}

impl FileState {
    /// A change is about to be asked for.
    pub fn will(&mut self, change: Change) {
        if !matches!(&change, Change::Write { data, .. } if data.is_empty()) {
            self.mtime = None;
        }
        self.changes.push(change);
    }

    /// A write of no bytes changes nothing, wherever it is.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = offset + bytes.len();
        if self.data.len() < end {
            self.data.resize(end, 0);
        }
        self.data[offset..end].copy_from_slice(bytes);
    }

    pub fn synced_now(&mut self) {
        self.synced.clone_from(&self.data);
        self.changes.clear();
    }

    /// What was written last, within the file, is durable: of what came before nothing shows there any more.
    pub fn durable_now(&mut self, offset: usize, bytes: usize) {
        let end = offset + bytes;
        if bytes == 0 {
            return;
        }
        self.synced.resize(self.synced.len().max(end), 0);
        self.synced[offset..end].copy_from_slice(&self.data[offset..end]);
        let mut left = Vec::new();
        let mut keep = |offset: usize, data: &[u8]| {
            // Else they would double with every durable write.
            if !data.is_empty() {
                left.push(Change::Write { offset, data: data.to_vec() });
            }
        };
        let mut cuts = Vec::new();
        for change in self.changes.drain(..) {
            match change {
                Change::Write { offset: at, data } => {
                    let before = offset.saturating_sub(at).min(data.len());
                    let behind = end.saturating_sub(at).min(data.len());
                    keep(at, &data[..before]);
                    keep(at + behind, &data[behind..]);
                }
                // The file is not as short as that, but what it cut off beside these bytes may be gone.
                Change::Truncate { size } => {
                    keep(size, &vec![0; offset.saturating_sub(size)]);
                    cuts.push(Change::Truncate { size: size.max(end) });
                }
            }
        }
        // Their order says nothing.
        left.extend(cuts);
        self.changes = left;
    }

    /// Whether this may be what is left when client and node have died.
    pub fn may_survive(&self, seen: &[u8]) -> Result<(), String> {
        let mut smallest = self.synced.len();
        let mut largest = self.synced.len();
        for change in &self.changes {
            match change {
                Change::Write { data, .. } if data.is_empty() => {}
                Change::Write { offset, data } => largest = largest.max(offset + data.len()),
                Change::Truncate { size } => {
                    smallest = smallest.min(*size);
                    largest = largest.max(*size);
                }
            }
        }
        if seen.len() < smallest || seen.len() > largest {
            return Err(format!("{} bytes are left, expected {smallest} to {largest}", seen.len()));
        }
        for (at, byte) in seen.iter().enumerate() {
            if self.synced.get(at) == Some(byte) {
                continue;
            }
            let written = self.changes.iter().any(|change| match change {
                Change::Write { offset, data } => {
                    at >= *offset && data.get(at - offset) == Some(byte)
                }
                Change::Truncate { size } => *byte == 0 && at >= *size,
            });
            let hole = *byte == 0 && at >= self.synced.len();
            if !written && !hole {
                return Err(format!(
                    "byte {at} of {} is {byte:#04x}, fsync promised {:?} and nothing else was \
                     written there",
                    seen.len(),
                    self.synced.get(at)
                ));
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub(super) enum Body {
    Directory(BTreeMap<Vec<u8>, u64>),
    File(FileState),
    Symlink,
}

/// A change of names or modes under way: done or not when the client dies.
#[derive(Clone, Debug)]
pub(super) enum Pending {
    Make { parent: u64, name: Vec<u8>, mode: u32, body: Body },
    Link { id: u64, parent: u64, name: Vec<u8> },
    Remove { parent: u64, name: Vec<u8> },
    Rename { from: (u64, Vec<u8>), to: (u64, Vec<u8>), how: How },
    Mode { id: u64, mode: u32 },
}

/// What becomes of the name that a rename finds in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    Replace,
    NoReplace,
    Exchange,
}

impl How {
    /// As renameat2(2) has them.
    pub fn flags(self) -> u32 {
        match self {
            How::Replace => 0,
            How::NoReplace => 1,
            How::Exchange => 2,
        }
    }
}

/// What a path names: a node of the model by its number, an unknown one as `None`; and its mode.
pub(super) type Named = (Option<u64>, u32);

/// Paths and what they name.
pub(super) type Names = BTreeMap<Vec<u8>, Named>;

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub ino: Ino,
    pub links: u32,
    /// Permissions.
    pub mode: u32,
    pub body: Body,
}

/// A tree of names; node 0 is its root. A node without links lives as long as it is open.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub nodes: BTreeMap<u64, Node>,
    next: u64,
}

impl Tree {
    pub fn new(root: Ino) -> Self {
        let root = Node {
            ino: root,
            links: 1,
            mode: DIRECTORY_MODE,
            body: Body::Directory(BTreeMap::new()),
        };
        Self { nodes: BTreeMap::from([(0, root)]), next: 1 }
    }

    pub fn directories(&self) -> Vec<u64> {
        let is_directory =
            |(_, node): &(&u64, &Node)| node.links > 0 && matches!(node.body, Body::Directory(_));
        self.nodes.iter().filter(is_directory).map(|(id, _)| *id).collect()
    }

    pub fn files(&self) -> Vec<u64> {
        let is_file =
            |(_, node): &(&u64, &Node)| node.links > 0 && matches!(node.body, Body::File(_));
        self.nodes.iter().filter(is_file).map(|(id, _)| *id).collect()
    }

    pub fn entries(&self, directory: u64) -> &BTreeMap<Vec<u8>, u64> {
        match &self.nodes[&directory].body {
            Body::Directory(entries) => entries,
            Body::File(_) | Body::Symlink => panic!("node {directory} is no directory"),
        }
    }

    fn entries_mut(&mut self, directory: u64) -> &mut BTreeMap<Vec<u8>, u64> {
        match &mut self.nodes.get_mut(&directory).expect("known").body {
            Body::Directory(entries) => entries,
            Body::File(_) | Body::Symlink => panic!("node {directory} is no directory"),
        }
    }

    pub fn file(&mut self, id: u64) -> &mut FileState {
        match &mut self.nodes.get_mut(&id).expect("known").body {
            Body::File(file) => file,
            Body::Directory(_) | Body::Symlink => panic!("node {id} is no file"),
        }
    }

    /// All files as they are now are durable.
    pub fn all_synced(&mut self) {
        for node in self.nodes.values_mut() {
            if let Body::File(file) = &mut node.body {
                file.synced_now();
            }
        }
    }

    pub fn ino(&self, id: u64) -> Ino {
        self.nodes[&id].ino
    }

    /// The inodes of everything that was ever made here.
    pub fn inos(&self) -> Vec<Ino> {
        self.nodes.values().map(|node| node.ino).collect()
    }

    pub fn make(&mut self, parent: u64, name: &[u8], ino: Ino, mode: u32, body: Body) -> u64 {
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, Node { ino, links: 1, mode, body });
        self.entries_mut(parent).insert(name.to_vec(), id);
        id
    }

    pub fn link(&mut self, id: u64, parent: u64, name: &[u8]) {
        self.nodes.get_mut(&id).expect("known").links += 1;
        self.entries_mut(parent).insert(name.to_vec(), id);
    }

    pub fn unlink(&mut self, parent: u64, name: &[u8]) {
        if let Some(id) = self.entries_mut(parent).remove(name) {
            self.nodes.get_mut(&id).expect("known").links -= 1;
        }
    }

    /// What a rename is to answer, `None` inside for success; nothing where it would put a directory into
    /// itself, in one way or the other.
    pub fn renaming(
        &self,
        (from, source): (u64, Option<u64>),
        (to, target): (u64, Option<u64>),
        how: How,
    ) -> Option<Option<MetaFault>> {
        let is_directory = |id: u64| matches!(self.nodes[&id].body, Body::Directory(_));
        let Some(source) = source else { return Some(Some(MetaFault::NotFound)) };
        match (target, how) {
            (Some(_), How::NoReplace) => return Some(Some(MetaFault::Exists)),
            (None, How::Exchange) => return Some(Some(MetaFault::NotFound)),
            _ => {}
        }
        if is_directory(source) && self.is_below(to, source) {
            return None;
        }
        let Some(target) = target.filter(|target| *target != source) else { return Some(None) };
        if how == How::Exchange {
            let into_itself = is_directory(target) && self.is_below(from, target);
            return (!into_itself).then_some(None);
        }
        Some(match (is_directory(source), is_directory(target)) {
            (true, false) => Some(MetaFault::NotDirectory),
            (false, true) => Some(MetaFault::IsDirectory),
            // Also when the target holds the source.
            (true, true) if !self.entries(target).is_empty() => Some(MetaFault::NotEmpty),
            _ => None,
        })
    }

    pub fn rename(
        &mut self,
        (from, from_name): (u64, &[u8]),
        (to, to_name): (u64, &[u8]),
        how: How,
    ) {
        let id = self.entries(from)[from_name];
        let other = self.entries(to).get(to_name).copied();
        if other == Some(id) {
            return;
        }
        if let (How::Exchange, Some(other)) = (how, other) {
            self.entries_mut(from).insert(from_name.to_vec(), other);
        } else {
            self.unlink(to, to_name);
            self.entries_mut(from).remove(from_name);
        }
        self.entries_mut(to).insert(to_name.to_vec(), id);
    }

    /// What stat(2) says: a directory counts itself, and every directory in it counts it once more.
    pub fn links_of(&self, id: u64) -> u32 {
        let Node { links, body, .. } = &self.nodes[&id];
        match body {
            Body::Directory(_) if *links == 0 => 0,
            Body::Directory(entries) => {
                let is_directory = |id: &&u64| matches!(self.nodes[id].body, Body::Directory(_));
                2 + entries.values().filter(is_directory).count() as u32
            }
            Body::File(_) | Body::Symlink => *links,
        }
    }

    /// A change that was under way was done; a node that it made has this number.
    pub fn apply(&mut self, pending: &Pending, ino: Ino) -> Option<u64> {
        match pending {
            Pending::Make { parent, name, mode, body } => {
                return Some(self.make(*parent, name, ino, *mode, body.clone()));
            }
            Pending::Link { id, parent, name } => self.link(*id, *parent, name),
            Pending::Remove { parent, name } => self.unlink(*parent, name),
            Pending::Rename { from, to, how } => {
                self.rename((from.0, &from.1), (to.0, &to.1), *how);
            }
            Pending::Mode { id, mode } => self.nodes.get_mut(id).expect("known").mode = *mode,
        }
        None
    }

    /// Times that were set count no more.
    pub fn forget_times(&mut self) {
        for node in self.nodes.values_mut() {
            if let Body::File(file) = &mut node.body {
                file.mtime = None;
            }
        }
    }

    /// The names that there are, with the change under way done if given.
    pub fn names(&self, pending: Option<&Pending>) -> Names {
        let mut tree = Cow::Borrowed(self);
        let made = pending.and_then(|pending| tree.to_mut().apply(pending, Ino(u64::MAX)));
        let mut names = Names::new();
        let mut looked = vec![(0, Vec::new())];
        while let Some((id, path)) = looked.pop() {
            for (name, child) in tree.entries(id) {
                let path = [&path[..], b"/", name].concat();
                if matches!(tree.nodes[child].body, Body::Directory(_)) {
                    looked.push((*child, path.clone()));
                }
                let known = (Some(*child) != made).then_some(*child);
                names.insert(path, (known, tree.nodes[child].mode));
            }
        }
        names
    }

    /// True when `inner` is `outer` or lies below it.
    pub fn is_below(&self, inner: u64, outer: u64) -> bool {
        if inner == outer {
            return true;
        }
        match &self.nodes[&outer].body {
            Body::Directory(entries) => entries.values().any(|child| self.is_below(inner, *child)),
            Body::File(_) | Body::Symlink => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_synced_must_survive_and_later_bytes_may() {
        let mut file = FileState::default();
        file.write(0, b"abcd");
        file.synced_now();
        file.write(2, b"XY");
        file.changes.push(Change::Write { offset: 2, data: b"XY".to_vec() });
        assert!(file.may_survive(b"abcd").is_ok());
        assert!(file.may_survive(b"abXd").is_ok());
        assert!(file.may_survive(b"abc").is_err());
        assert!(file.may_survive(b"Xbcd").is_err());
        assert!(file.may_survive(b"\0bcd").is_err());
    }

    #[test]
    fn a_durable_write_must_survive_and_what_was_beside_it_may() {
        let mut file = FileState::default();
        file.write(0, b"abcdef");
        file.synced_now();
        for (offset, data) in [(0, b"ABCDEF"), (2, b"2345zz")] {
            file.changes.push(Change::Write { offset, data: data.to_vec() });
            file.write(offset, data);
        }
        file.changes.push(Change::Truncate { size: 1 });
        file.write(2, b"xy");
        file.changes.push(Change::Write { offset: 2, data: b"xy".to_vec() });
        file.durable_now(2, 2);
        for left in [&b"abxyef"[..], b"a\0xy", b"ABxyEF", b"abxy45zz", b"abxy\0f"] {
            assert_eq!(file.may_survive(left), Ok(()), "{left:?}");
        }
        for lost in [&b"abcdef"[..], b"abxd", b"abx", b"a", b"ab\0y", b"\0bxy", b"ab2y"] {
            assert!(file.may_survive(lost).is_err(), "{lost:?}");
        }
        file.changes.push(Change::Truncate { size: 3 });
        assert_eq!(file.may_survive(b"abx"), Ok(()), "cut afterwards");
    }
}
