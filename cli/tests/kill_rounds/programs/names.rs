//! Names: what must happen exactly once. A name that is made twice gives EEXIST, one that is
//! removed twice ENOENT, and both are errors that no program may see.

use super::{Program, create_new, listing, same_file, same_names};
use crate::random::Random;
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

const FILES_MAX: usize = 60;

/// Creates, renames (also over another), links and unlinks files of one directory.
pub struct Names {
    dir: PathBuf,
    last: u64,
    /// Name to the number in the file; links are names with the same number.
    names: BTreeMap<String, u64>,
}

impl Names {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, last: 0, names: BTreeMap::new() }
    }

    fn any(&self, random: &mut Random) -> Option<(String, u64)> {
        let nth = random.below(self.names.len().max(1) as u64) as usize;
        self.names.iter().nth(nth).map(|(name, number)| (name.clone(), *number))
    }

    fn create_and_rename(&mut self, to: String) -> Result<()> {
        let number = self.last;
        let fresh = self.dir.join(format!("new.{number}"));
        create_new(&fresh)?.write_all(text(number).as_bytes()).context("write a small file")?;
        fs::rename(&fresh, self.dir.join(&to)).with_context(|| format!("rename to {to}"))?;
        self.names.insert(to, number);
        Ok(())
    }
}

fn text(number: u64) -> String {
    format!("this is file {number}\n")
}

impl Program for Names {
    fn name(&self) -> &'static str {
        "names"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        self.last += 1;
        let any = self.any(random);
        match (random.below(10), any) {
            (0, Some((old, _))) => self.create_and_rename(old),
            (1, Some((old, number))) => {
                let link = format!("link.{}", self.last);
                fs::hard_link(self.dir.join(&old), self.dir.join(&link))
                    .with_context(|| format!("link {old} as {link}"))?;
                self.names.insert(link, number);
                Ok(())
            }
            (2 | 3, Some((name, _))) => {
                fs::remove_file(self.dir.join(&name)).with_context(|| format!("unlink {name}"))?;
                self.names.remove(&name);
                Ok(())
            }
            _ if self.names.len() >= FILES_MAX => {
                let name = self.names.keys().next().cloned().unwrap_or_default();
                fs::remove_file(self.dir.join(&name)).with_context(|| format!("unlink {name}"))?;
                self.names.remove(&name);
                Ok(())
            }
            _ => self.create_and_rename(format!("done.{}", self.last)),
        }
    }

    fn check(&mut self) -> Result<()> {
        same_names(&self.dir, &self.names.keys().cloned().collect())?;
        for (name, number) in &self.names {
            let path = self.dir.join(name);
            same_file(&path, text(*number).as_bytes())?;
            let links = self.names.values().filter(|other| *other == number).count() as u64;
            let found = fs::metadata(&path)?.nlink();
            ensure!(found == links, "{name} has {found} links, {links} expected");
        }
        Ok(())
    }
}

/// Makes, moves and removes directories, with files and symbolic links in them.
pub struct Tree {
    dir: PathBuf,
    last: u64,
    /// Directory to what is in it.
    dirs: BTreeMap<String, BTreeSet<String>>,
}

impl Tree {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, last: 0, dirs: BTreeMap::new() }
    }

    fn fill(&mut self, dir: &str) -> Result<()> {
        let name = format!("in.{}", self.last);
        let path = self.dir.join(dir).join(&name);
        if self.last.is_multiple_of(2) {
            std::os::unix::fs::symlink(&name, &path).with_context(|| format!("symlink {name}"))?;
        } else {
            fs::create_dir(&path).with_context(|| format!("mkdir {dir}/{name}"))?;
        }
        self.dirs.entry(dir.to_owned()).or_default().insert(name);
        Ok(())
    }

    fn empty(&mut self, dir: &str) -> Result<()> {
        for name in self.dirs.remove(dir).unwrap_or_default() {
            let path = self.dir.join(dir).join(&name);
            if fs::symlink_metadata(&path).with_context(|| format!("stat {name}"))?.is_dir() {
                fs::remove_dir(&path).with_context(|| format!("rmdir {dir}/{name}"))?;
            } else {
                fs::remove_file(&path).with_context(|| format!("unlink {dir}/{name}"))?;
            }
        }
        fs::remove_dir(self.dir.join(dir)).with_context(|| format!("rmdir {dir}"))
    }
}

impl Program for Tree {
    fn name(&self) -> &'static str {
        "tree"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        self.last += 1;
        let nth = random.below(self.dirs.len().max(1) as u64) as usize;
        let any = self.dirs.keys().nth(nth).cloned();
        match (random.below(8), any) {
            (0, Some(dir)) => self.empty(&dir),
            (1, Some(from)) => {
                let to = format!("moved.{}", self.last);
                fs::rename(self.dir.join(&from), self.dir.join(&to))
                    .with_context(|| format!("move {from} to {to}"))?;
                let within = self.dirs.remove(&from).unwrap_or_default();
                self.dirs.insert(to, within);
                Ok(())
            }
            (2..6, Some(dir)) => self.fill(&dir),
            (_, Some(dir)) if self.dirs.len() > 12 => self.empty(&dir),
            _ => {
                let name = format!("dir.{}", self.last);
                fs::create_dir(self.dir.join(&name)).with_context(|| format!("mkdir {name}"))?;
                self.dirs.insert(name, BTreeSet::new());
                Ok(())
            }
        }
    }

    fn check(&mut self) -> Result<()> {
        same_names(&self.dir, &self.dirs.keys().cloned().collect())?;
        for (dir, within) in &self.dirs {
            let path = self.dir.join(dir);
            same_names(&path, within)?;
            let mut subdirs = 0;
            for name in within {
                let inner = path.join(name);
                if fs::symlink_metadata(&inner)?.is_dir() {
                    subdirs += 1;
                    ensure!(listing(&inner)?.is_empty(), "{dir}/{name} is not empty");
                } else {
                    let target = fs::read_link(&inner)?;
                    ensure!(target.as_os_str() == name.as_str(), "{name} points to {target:?}");
                }
            }
            let links = fs::metadata(&path)?.nlink();
            ensure!(links == 2 + subdirs, "{dir} has {links} links and {subdirs} directories");
        }
        Ok(())
    }
}
