//! What one program may do next, on either mount. A step says all of itself: which others ran before does not change what
//! it means, so that steps can be left out to find the few that matter.

use crate::random::Random;

/// From the top of the tree: one to three names.
pub type Path = Vec<&'static str>;

/// Few, so that steps meet.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
/// Open files that a mount has at once, at most.
pub const SLOTS: usize = 3;
const LONGEST: u64 = 200_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    Allocate,
    Punch,
    Zero,
}

#[derive(Debug, Clone)]
pub enum Op {
    Create(Path),
    MakeDir(Path),
    Symlink(Path, String),
    Link(Path, Path),
    Rename(Path, Path, Renaming),
    Unlink(Path),
    RemoveDir(Path),
    /// Mode bits.
    Chmod(Path, u32),
    SetXattr(Path, &'static str, String),
    RemoveXattr(Path, &'static str),
    /// Offset, length, the key of the contents.
    Write(Path, u64, usize, u64),
    Append(Path, usize, u64),
    Truncate(Path, u64),
    /// Offset, length.
    MakeRoom(Path, Room, u64, u64),
    /// From, offset, to, offset, length.
    Copy(Path, u64, Path, u64, usize),
    /// Opens it and keeps it open, in place of what the slot had.
    Open(usize, Path),
    Close(usize),
    WriteOpen(usize, u64, usize, u64),
    TruncateOpen(usize, u64),
    SyncOpen(usize),
    ReadOpen(usize),
    StatOpen(usize),
    Read(Path),
    Stat(Path),
    List(Path),
    ReadLink(Path),
    GetXattr(Path, &'static str),
    ListXattrs(Path),
}

impl Op {
    pub fn is_of_an_open_file(&self) -> bool {
        matches!(
            self,
            Self::WriteOpen(..)
                | Self::TruncateOpen(..)
                | Self::SyncOpen(..)
                | Self::ReadOpen(..)
                | Self::StatOpen(..)
        )
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renaming {
    Replacing,
    NotReplacing,
    Exchanging,
}

#[derive(Debug, Clone)]
pub struct Step {
    /// 0 or 1.
    pub mount: usize,
    pub op: Op,
}

/// Steps of both mounts, which take turns: what an open file has of the other's may show after a moment, so a turn may
/// cost one.
pub fn steps(random: &mut Random, count: usize, turn: u64) -> Vec<Step> {
    let mut steps = Vec::with_capacity(count);
    let mut mount = 0;
    while steps.len() < count {
        for _ in 0..=random.below(2 * turn) {
            steps.push(Step { mount, op: op(random) });
        }
        mount = 1 - mount;
    }
    steps.truncate(count);
    steps
}

/// The same name as one that paths are made of.
pub fn static_name(name: &str) -> &'static str {
    NAMES.iter().find(|known| **known == name).expect("one of the names")
}

fn path(random: &mut Random) -> Path {
    let names = 1 + random.below(3);
    (0..names).map(|_| NAMES[random.below(NAMES.len() as u64) as usize]).collect()
}

fn offset(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => 0,
        // At the edges of pages and blocks.
        1 => 4096 * random.below(LONGEST / 4096),
        _ => random.below(LONGEST),
    }
}

fn length(random: &mut Random) -> usize {
    let most = [10, 5000, 70_000][random.below(3) as usize];
    1 + random.below(most) as usize
}

fn op(random: &mut Random) -> Op {
    let p = path(random);
    let slot = random.below(SLOTS as u64) as usize;
    let xattr = ["user.x", "user.y"][random.below(2) as usize];
    match random.below(42) {
        0..5 => Op::Create(p),
        5..8 => Op::MakeDir(p),
        8 => Op::Symlink(p, format!("nowhere {}", random.below(100))),
        9..11 => Op::Link(p, path(random)),
        11..15 => {
            let how = match random.below(4) {
                0 => Renaming::NotReplacing,
                1 => Renaming::Exchanging,
                _ => Renaming::Replacing,
            };
            Op::Rename(p, path(random), how)
        }
        15..17 => Op::Unlink(p),
        17 => Op::RemoveDir(p),
        18 => Op::Chmod(p, 0o400 + random.below(0o400) as u32),
        19 => {
            let length = 1 + random.below(60) as usize;
            Op::SetXattr(p, xattr, "v".repeat(length))
        }
        20 => Op::RemoveXattr(p, xattr),
        21..24 => Op::Write(p, offset(random), length(random), random.next()),
        24 => Op::Append(p, length(random), random.next()),
        25 => Op::Truncate(p, offset(random)),
        26 => {
            let room = [Room::Allocate, Room::Punch, Room::Zero][random.below(3) as usize];
            Op::MakeRoom(p, room, offset(random), length(random) as u64)
        }
        27 => Op::Copy(p, offset(random), path(random), offset(random), length(random)),
        28..30 => Op::Open(slot, p),
        30 => Op::Close(slot),
        31..33 => Op::WriteOpen(slot, offset(random), length(random), random.next()),
        33 if random.once_in(2) => Op::TruncateOpen(slot, offset(random)),
        33 => Op::SyncOpen(slot),
        34 => Op::ReadOpen(slot),
        35 => Op::StatOpen(slot),
        36..38 => Op::Read(p),
        38 => Op::Stat(p),
        39 => Op::List(p),
        40 => Op::ReadLink(p),
        _ if random.once_in(2) => Op::GetXattr(p, xattr),
        _ => Op::ListXattrs(p),
    }
}
