//! A file system in memory: what POSIX, as Linux reads it, says to each step.

use crate::random::contents;
use crate::step::{Op, Renaming, Room, SLOTS, Step};
use crate::told::{Answer, Kind, Stat, Told};
use rustix::io::Errno;
use std::collections::BTreeMap;

type Id = usize;
const TOP: Id = 0;

enum Body {
    File(Vec<u8>),
    Directory(BTreeMap<String, Id>),
    Symlink(String),
}

struct Node {
    body: Body,
    mode: u32,
    xattrs: BTreeMap<String, String>,
}

pub struct Model {
    /// Never removed: an open file without a name is still here.
    nodes: Vec<Node>,
    /// Of each mount.
    open: [[Option<Id>; SLOTS]; 2],
}

impl Model {
    pub fn new() -> Self {
        let mut model = Self { nodes: Vec::new(), open: Default::default() };
        model.add(Body::Directory(BTreeMap::new()), 0o755);
        model
    }

    fn add(&mut self, body: Body, mode: u32) -> Id {
        self.nodes.push(Node { body, mode, xattrs: BTreeMap::new() });
        self.nodes.len() - 1
    }

    fn kind(&self, id: Id) -> Kind {
        match self.nodes[id].body {
            Body::File(_) => Kind::File,
            Body::Directory(_) => Kind::Directory,
            Body::Symlink(_) => Kind::Symlink,
        }
    }

    fn names(&self, id: Id) -> Result<&BTreeMap<String, Id>, Errno> {
        match &self.nodes[id].body {
            Body::Directory(names) => Ok(names),
            Body::File(_) => Err(Errno::NOTDIR),
            // It leads nowhere.
            Body::Symlink(_) => Err(Errno::NOENT),
        }
    }

    fn names_mut(&mut self, id: Id) -> &mut BTreeMap<String, Id> {
        match &mut self.nodes[id].body {
            Body::Directory(names) => names,
            _ => unreachable!("looked at before"),
        }
    }

    /// The directory that a path's last name is in.
    fn parent(&self, path: &[&str]) -> Result<Id, Errno> {
        let mut id = TOP;
        for name in &path[..path.len() - 1] {
            id = *self.names(id)?.get(*name).ok_or(Errno::NOENT)?;
        }
        self.names(id).map(|_| id)
    }

    fn find(&self, path: &[&str]) -> Result<Id, Errno> {
        let parent = self.parent(path)?;
        let name = path[path.len() - 1];
        self.names(parent)?.get(name).copied().ok_or(Errno::NOENT)
    }

    /// Where a new name may be made.
    fn place(&self, path: &[&str]) -> Result<Id, Errno> {
        let parent = self.parent(path)?;
        match self.names(parent)?.contains_key(path[path.len() - 1]) {
            true => Err(Errno::EXIST),
            false => Ok(parent),
        }
    }

    fn put(&mut self, parent: Id, path: &[&str], id: Id) {
        let name = path[path.len() - 1].to_owned();
        self.names_mut(parent).insert(name, id);
    }

    /// As `open` with O_NOFOLLOW, to write.
    fn file(&self, path: &[&str]) -> Result<Id, Errno> {
        let id = self.find(path)?;
        match self.kind(id) {
            Kind::File => Ok(id),
            Kind::Directory => Err(Errno::ISDIR),
            Kind::Symlink => Err(Errno::LOOP),
        }
    }

    fn data(&mut self, id: Id) -> &mut Vec<u8> {
        match &mut self.nodes[id].body {
            Body::File(data) => data,
            _ => unreachable!("looked at before"),
        }
    }

    fn write(&mut self, id: Id, at: u64, bytes: &[u8]) -> Told {
        let (data, at) = (self.data(id), at as usize);
        let end = at + bytes.len();
        if data.len() < end {
            data.resize(end, 0);
        }
        data[at..end].copy_from_slice(bytes);
        Ok(Answer::Count(bytes.len()))
    }

    fn slot(&self, mount: usize, slot: usize) -> Result<Id, Errno> {
        self.open[mount][slot].ok_or(Errno::BADF)
    }

    /// Names of it in the whole tree.
    fn names_of(&self, id: Id) -> u64 {
        let counts = self.nodes.iter().map(|node| match &node.body {
            Body::Directory(names) => names.values().filter(|other| **other == id).count() as u64,
            _ => 0,
        });
        counts.sum()
    }

    fn stat(&self, id: Id) -> Stat {
        let node = &self.nodes[id];
        let kind = self.kind(id);
        let size = match &node.body {
            Body::File(data) => data.len() as u64,
            _ => 0,
        };
        let nlink = match &node.body {
            Body::Directory(names) => {
                let below = names.values().filter(|id| self.kind(**id) == Kind::Directory);
                2 + below.count() as u64
            }
            _ => self.names_of(id),
        };
        let mode = if kind == Kind::Symlink { 0 } else { node.mode };
        Stat { kind, size, nlink, mode }
    }

    /// True when `below` is `above` or somewhere below it.
    fn is_within(&self, below: Id, above: Id) -> bool {
        below == above
            || match &self.nodes[above].body {
                Body::Directory(names) => names.values().any(|id| self.is_within(below, *id)),
                _ => false,
            }
    }

    /// In the order in which Linux finds what is wrong (`do_renameat2`, `vfs_rename`).
    fn rename(&mut self, from: &[&str], to: &[&str], how: Renaming) -> Told {
        let (from_parent, to_parent) = (self.parent(from)?, self.parent(to)?);
        let (from_name, to_name) = (from[from.len() - 1], to[to.len() - 1]);
        let old = *self.names(from_parent)?.get(from_name).ok_or(Errno::NOENT)?;
        let new = self.names(to_parent)?.get(to_name).copied();
        match how {
            Renaming::NotReplacing if new.is_some() => return Err(Errno::EXIST),
            Renaming::Exchanging if new.is_none() => return Err(Errno::NOENT),
            _ => {}
        }
        if from_parent != to_parent {
            if self.is_within(to_parent, old) {
                return Err(Errno::INVAL);
            }
            if new.is_some_and(|new| self.is_within(from_parent, new)) {
                let exchanges = how == Renaming::Exchanging;
                return Err(if exchanges { Errno::INVAL } else { Errno::NOTEMPTY });
            }
        }
        if new == Some(old) {
            return Ok(Answer::Done);
        }
        if let Some(new) = new {
            if how == Renaming::Exchanging {
                self.put(from_parent, from, new);
                self.put(to_parent, to, old);
                return Ok(Answer::Done);
            }
            match (self.kind(old) == Kind::Directory, self.kind(new) == Kind::Directory) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                (true, true) if !self.names(new)?.is_empty() => return Err(Errno::NOTEMPTY),
                _ => {}
            }
        }
        self.names_mut(from_parent).remove(from_name);
        self.put(to_parent, to, old);
        Ok(Answer::Done)
    }

    pub fn apply(&mut self, step: &Step) -> Told {
        let mount = step.mount;
        match &step.op {
            Op::Create(path) => {
                let parent = self.place(path)?;
                let id = self.add(Body::File(Vec::new()), 0o644);
                self.put(parent, path, id);
            }
            Op::MakeDir(path) => {
                let parent = self.place(path)?;
                let id = self.add(Body::Directory(BTreeMap::new()), 0o755);
                self.put(parent, path, id);
            }
            Op::Symlink(path, target) => {
                let parent = self.place(path)?;
                let id = self.add(Body::Symlink(target.clone()), 0);
                self.put(parent, path, id);
            }
            Op::Link(old, new) => {
                let id = self.find(old)?;
                let parent = self.place(new)?;
                if self.kind(id) == Kind::Directory {
                    return Err(Errno::PERM);
                }
                self.put(parent, new, id);
            }
            Op::Rename(from, to, how) => return self.rename(from, to, *how),
            Op::Unlink(path) => {
                let (parent, id) = (self.parent(path)?, self.find(path)?);
                if self.kind(id) == Kind::Directory {
                    return Err(Errno::ISDIR);
                }
                self.names_mut(parent).remove(path[path.len() - 1]);
            }
            Op::RemoveDir(path) => {
                let (parent, id) = (self.parent(path)?, self.find(path)?);
                if self.kind(id) != Kind::Directory {
                    return Err(Errno::NOTDIR);
                }
                if !self.names(id)?.is_empty() {
                    return Err(Errno::NOTEMPTY);
                }
                self.names_mut(parent).remove(path[path.len() - 1]);
            }
            Op::Chmod(path, mode) => {
                let id = self.find(path)?;
                if self.kind(id) == Kind::Symlink {
                    return Err(Errno::NOENT);
                }
                self.nodes[id].mode = *mode;
            }
            Op::SetXattr(path, name, value) => {
                let id = self.find(path)?;
                if self.kind(id) == Kind::Symlink {
                    return Err(Errno::PERM);
                }
                self.nodes[id].xattrs.insert((*name).to_owned(), value.clone());
            }
            Op::RemoveXattr(path, name) => {
                let id = self.find(path)?;
                if self.kind(id) == Kind::Symlink {
                    return Err(Errno::PERM);
                }
                self.nodes[id].xattrs.remove(*name).ok_or(Errno::NODATA)?;
            }
            Op::Write(path, at, length, key) => {
                let id = self.file(path)?;
                return self.write(id, *at, &contents(*key, *length));
            }
            Op::Append(path, length, key) => {
                let id = self.file(path)?;
                let end = self.data(id).len() as u64;
                return self.write(id, end, &contents(*key, *length));
            }
            Op::Truncate(path, size) => {
                let id = self.file(path)?;
                self.data(id).resize(*size as usize, 0);
            }
            Op::MakeRoom(path, room, at, length) => {
                let id = self.file(path)?;
                let data = self.data(id);
                let (at, end) = (*at as usize, (*at + *length) as usize);
                if *room != Room::Punch && data.len() < end {
                    data.resize(end, 0);
                }
                if *room != Room::Allocate {
                    let size = data.len();
                    data[at.min(size)..end.min(size)].fill(0);
                }
            }
            Op::Copy(from, from_at, to, to_at, length) => {
                let from = self.find(from)?;
                if self.kind(from) == Kind::Symlink {
                    return Err(Errno::LOOP);
                }
                let to = self.file(to)?;
                if self.kind(from) == Kind::Directory {
                    return Err(Errno::ISDIR);
                }
                if from == to {
                    return Err(Errno::INVAL);
                }
                let size = self.data(from).len() as u64;
                let end = size.min(from_at + *length as u64);
                let taken = end.saturating_sub(*from_at);
                if taken == 0 {
                    return Ok(Answer::Count(0));
                }
                let bytes = self.data(from)[*from_at as usize..end as usize].to_vec();
                return self.write(to, *to_at, &bytes);
            }
            Op::Open(slot, path) => {
                self.open[mount][*slot] = None;
                self.open[mount][*slot] = Some(self.file(path)?);
            }
            Op::Close(slot) => {
                self.slot(mount, *slot)?;
                self.open[mount][*slot] = None;
            }
            Op::WriteOpen(slot, at, length, key) => {
                let id = self.slot(mount, *slot)?;
                return self.write(id, *at, &contents(*key, *length));
            }
            Op::TruncateOpen(slot, size) => {
                let id = self.slot(mount, *slot)?;
                self.data(id).resize(*size as usize, 0);
            }
            Op::SyncOpen(slot) => {
                self.slot(mount, *slot)?;
            }
            Op::ReadOpen(slot) => {
                let id = self.slot(mount, *slot)?;
                return Ok(Answer::Bytes(self.data(id).clone()));
            }
            Op::StatOpen(slot) => {
                let id = self.slot(mount, *slot)?;
                return Ok(Answer::Stat(self.stat(id)));
            }
            Op::Read(path) => {
                let id = self.find(path)?;
                return match &self.nodes[id].body {
                    Body::File(data) => Ok(Answer::Bytes(data.clone())),
                    Body::Directory(_) => Err(Errno::ISDIR),
                    Body::Symlink(_) => Err(Errno::LOOP),
                };
            }
            Op::Stat(path) => return Ok(Answer::Stat(self.stat(self.find(path)?))),
            Op::List(path) => return self.list(self.find(path)?),
            Op::ReadLink(path) => {
                return match &self.nodes[self.find(path)?].body {
                    Body::Symlink(target) => Ok(Answer::Text(target.clone())),
                    _ => Err(Errno::INVAL),
                };
            }
            Op::GetXattr(path, name) => {
                let id = self.find(path)?;
                if self.kind(id) == Kind::Symlink {
                    return Err(Errno::NODATA);
                }
                let value = self.nodes[id].xattrs.get(*name).ok_or(Errno::NODATA)?;
                return Ok(Answer::Text(value.clone()));
            }
            Op::ListXattrs(path) => {
                let id = self.find(path)?;
                let names = self.nodes[id].xattrs.keys().cloned().collect();
                return Ok(Answer::Attributes(names));
            }
        }
        Ok(Answer::Done)
    }

    fn list(&self, id: Id) -> Told {
        let names = match &self.nodes[id].body {
            Body::Directory(names) => names,
            Body::File(_) | Body::Symlink(_) => return Err(Errno::NOTDIR),
        };
        let names = names.iter().map(|(name, id)| (name.clone(), self.kind(*id)));
        Ok(Answer::Names(names.collect()))
    }

    /// Every name of the tree, from the top: steps that look at all there is.
    pub fn looks(&self, mount: usize) -> Vec<Step> {
        let mut looks = Vec::new();
        let mut todo: Vec<(Vec<&'static str>, Id)> = vec![(Vec::new(), TOP)];
        while let Some((path, id)) = todo.pop() {
            let step = |op| Step { mount, op };
            if !path.is_empty() {
                looks.push(step(Op::Stat(path.clone())));
                looks.push(step(Op::ListXattrs(path.clone())));
                looks.push(step(match self.kind(id) {
                    Kind::File => Op::Read(path.clone()),
                    Kind::Directory => Op::List(path.clone()),
                    Kind::Symlink => Op::ReadLink(path.clone()),
                }));
            }
            if let Body::Directory(names) = &self.nodes[id].body {
                for (name, id) in names {
                    let name = crate::step::static_name(name);
                    todo.push(([&path[..], &[name]].concat(), *id));
                }
            }
        }
        looks
    }
}
