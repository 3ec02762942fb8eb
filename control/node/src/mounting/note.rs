//! The note of a mount, which its process holds locked for as long as it lives.
//!
//! ```text
//! 4711 0:52 CLUSTER CLIENT STARTED BOOT    the process serves: its number, the device, its client at the metadata service
//! dead CLIENT                              of a process before, until it is buried there
//! tag TAG, cache WORD, ...                 one line each: what a guest is shown ([`super::shown::View`])
//! ```
//!
//! What always holds: a client is only said to be dead when nobody holds the lock of the note that names it, and no process
//! of its number, begun at that time, runs on this machine since it was started.
//!
//! After a crash the kernel has released the lock, and the text says whose client is dead.

use anyhow::{Context, Result, bail};
use levada_base::ids::Uuid;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// A killed process holds its lock until the kernel has ended its I/O, and is gone a moment later.
const LET_GO_LIMIT: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// The word before a client that is dead.
const DEAD: &str = "dead";

/// What a note tells of the process that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// The process.
    pub pid: u32,
    /// The device number of the mount's files: major and minor.
    pub device: (u32, u32),
    /// The cluster that they are of; `None` in a note of an earlier release.
    pub cluster: Option<Uuid>,
    /// `None` in a note of an earlier release, and where the system does not tell.
    pub life: Option<Life>,
}

/// The client of a process, and what tells the process from others that had its number or will get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// What it registered with at the metadata service.
    pub client: Uuid,
    /// When the process began, in ticks since the machine did: `starttime` of proc_pid_stat(5).
    pub started: u64,
    /// This start of the machine: `/proc/sys/kernel/random/boot_id`.
    pub boot: Uuid,
}

impl Served {
    pub(super) fn to_text(self) -> String {
        let (major, minor) = self.device;
        let mut text = format!("{} {major}:{minor}", self.pid);
        if let Some(cluster) = self.cluster {
            text += &format!(" {cluster}");
            if let Some(Life { client, started, boot }) = self.life {
                text += &format!(" {client} {started} {boot}");
            }
        }
        text + "\n"
    }

    /// Reads the text of a note; `None` for one of a mount that is not made yet.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let (pid, device) = (words.next()?, words.next()?);
        let (major, minor) = device.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        let cluster = words.next().and_then(|word| word.parse().ok());
        let mut life = || {
            let (client, started, boot) = (words.next()?, words.next()?, words.next()?);
            let (client, boot) = (client.parse().ok()?, boot.parse().ok()?);
            Some(Life { client, started: started.parse().ok()?, boot })
        };
        Some(Self { pid: pid.parse().ok()?, device, cluster, life: life() })
    }
}

impl Life {
    /// This process, as the client `client`.
    pub(super) fn own(client: Uuid) -> Option<Self> {
        let (started, _) = process(std::process::id()).ok()??;
        Some(Self { client, started, boot: boot()? })
    }

    /// Whether the process, whose number was `pid`, runs no more; where that cannot be told it may.
    fn is_over(&self, pid: u32) -> bool {
        match boot() {
            None => false,
            Some(boot) if boot != self.boot => true,
            Some(_) => match process(pid) {
                Err(_) => false,
                Ok(None) => true,
                // Z: nobody has asked yet how it ended. X is seen while that is done.
                Ok(Some((started, state))) => started != self.started || matches!(state, 'Z' | 'X'),
            },
        }
    }

    /// Waits for the end of a process that has let go of its lock. False: it does not end.
    fn ends(&self, pid: u32) -> bool {
        let begun = Instant::now();
        while !self.is_over(pid) {
            if begun.elapsed() > LET_GO_LIMIT {
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        true
    }
}

/// No process of this number runs, or its first thread has ended. What cannot be read says nothing.
pub(super) fn is_ended(pid: u32) -> bool {
    matches!(process(pid).map(|found| found.map(|(_, state)| state)), Ok(None | Some('Z' | 'X')))
}

fn boot() -> Option<Uuid> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().parse().ok()
}

/// When the process `pid` began, and its state; `None`: there is none.
fn process(pid: u32) -> std::io::Result<Option<(u64, char)>> {
    const ESRCH: i32 = 3;
    let stat = match std::fs::read(format!("/proc/{pid}/stat")) {
        Err(error)
            if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH) =>
        {
            return Ok(None);
        }
        stat => stat?,
    };
    // Its name, in brackets, may have any bytes; what follows are fields 3 (state) to 22 (starttime) and more.
    let stat = String::from_utf8_lossy(&stat);
    let fields = || {
        let (_, behind) = stat.rsplit_once(')')?;
        let mut fields = behind.split_whitespace();
        let state = fields.next()?.chars().next()?;
        Some((fields.nth(18)?.parse().ok()?, state))
    };
    fields().map(Some).ok_or_else(|| ErrorKind::InvalidData.into())
}

/// The clients of processes that are gone, as the text of a note names them that nobody holds locked. Waits for the end
/// of one that has just let go.
fn dead_of(text: &str) -> Vec<Uuid> {
    let waiting = text.lines().filter_map(|line| {
        let (word, client) = line.split_once(' ')?;
        (word == DEAD).then(|| client.trim().parse().ok())?
    });
    let mut dead: Vec<Uuid> = waiting.collect();
    if let Some(Served { pid, life: Some(life), .. }) = Served::parse(text) {
        if life.ends(pid) {
            dead.push(life.client);
        } else {
            tracing::warn!(pid, "has let go of its mount and runs; its locks end with its lease");
        }
    }
    dead
}

/// The clients to be buried of a note that the caller has locked: none while its process lives.
///
/// # Errors
///
/// When it cannot be read.
pub fn dead_in(mut note: &File) -> std::io::Result<Vec<Uuid>> {
    let mut text = String::new();
    note.read_to_string(&mut text)?;
    Ok(dead_of(&text))
}

/// Makes the note of a mount and locks it. It tells of no process until the mount is made: what an earlier one noted of
/// itself is true no longer. Its clients are to be buried. `shown` are lines that stand in it from now on.
pub(super) fn take(record: &Path, target: &Path, shown: &str) -> Result<(File, Vec<Uuid>)> {
    let begun = Instant::now();
    loop {
        let note = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(record)
            .with_context(|| format!("cannot note the mount in {}", record.display()))?;
        match note.try_lock() {
            // The process that held it may have removed it meanwhile: then another may have made
            // and locked its own.
            Ok(()) if is_at(&note, record) => {
                let dead = dead_in(&note).context("cannot read the note of an earlier mount")?;
                let text: String = dead.iter().map(|client| format!("{DEAD} {client}\n")).collect();
                // Should this process end before they are buried, the next one sees to it.
                write(&note, &(text + shown))
                    .context("cannot clear the note of an earlier mount")?;
                return Ok((note, dead));
            }
            Ok(()) => {}
            Err(TryLockError::WouldBlock) if begun.elapsed() > LET_GO_LIMIT => {
                bail!("another process serves {} still", target.display())
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK_EVERY),
            Err(TryLockError::Error(error)) => {
                return Err(error).context("cannot lock the note of the mount");
            }
        }
    }
}

/// Replaces the text of a note.
pub(super) fn write(note: &File, text: &str) -> std::io::Result<()> {
    note.set_len(0)?;
    note.write_all_at(text.as_bytes(), 0)
}

/// True when `file` is what `path` leads to.
#[must_use]
pub fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(open), Ok(there)) => (open.dev(), open.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn served(pid: u32, life: Option<Life>) -> Served {
        Served { pid, device: (0, 52), cluster: Some(Uuid::from_u128(7)), life }
    }

    #[test]
    fn a_note_reads_as_written() {
        let life = Life { client: Uuid::from_u128(8), started: u64::MAX, boot: Uuid::from_u128(9) };
        let old = Served { cluster: None, ..served(4711, None) };
        for served in [old, served(4711, None), served(4711, Some(life))] {
            assert_eq!(Served::parse(&served.to_text()), Some(served));
        }
        for text in ["", "4711", "4711 0", "x 0:52", "4711 0:", "dead 4711 0:52"] {
            assert_eq!(Served::parse(text), None, "{text:?}");
        }
        // What else stands in a note is nobody's life.
        for served in [served(4711, None), served(4711, Some(life))] {
            assert_eq!(Served::parse(&(served.to_text() + "tag 1:2\ncache none\n")), Some(served));
        }
        assert_eq!(Served::parse("tag 1:2\ncache none\n"), None);
        let half = served(4711, Some(life)).to_text().replace(&u64::MAX.to_string(), "x");
        assert_eq!(Served::parse(&half), Some(served(4711, None)));
    }

    #[test]
    fn a_note_says_nothing_of_an_earlier_process_but_that_it_is_dead() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (record, target) = (dir.path().join("record"), dir.path().join("mnt"));
        let mut child = Command::new("true").spawn().expect("started");
        let (started, _) = process(child.id()).expect("told").expect("not waited for yet");
        let (client, boot) = (Uuid::from_u128(8), boot().expect("told"));
        let life = Life { client, started, boot };
        let text = served(child.id(), Some(life)).to_text();
        std::fs::write(&record, &text).expect("written");
        // Also before its father has asked how it ended.
        let (note, dead) = take(&record, &target, "").expect("nobody holds it");
        child.wait().expect("a child");
        assert_eq!(dead, [client]);
        let now = || std::fs::read_to_string(&record).expect("read");
        assert_eq!((now(), Served::parse(&now())), (format!("dead {client}\n"), None));
        // The next one ends before it has buried anybody.
        drop(note);
        let (note, dead) = take(&record, &target, "").expect("nobody holds it");
        assert_eq!(dead, [client]);
        write(&note, "4712").expect("written");
        assert_eq!(now(), "4712");
    }

    #[test]
    fn only_a_process_that_is_gone_is_dead() {
        let life = Life::own(Uuid::from_u128(8)).expect("told");
        let own = std::process::id();
        assert!(!life.is_over(own));
        assert!(Life { started: life.started + 1, ..life }.is_over(own), "another of that number");
        assert!(Life { boot: Uuid::from_u128(1), ..life }.is_over(own), "before a restart");
        assert!(life.is_over(u32::MAX >> 1), "there is no such process");
        let text = served(own, None).to_text();
        assert!(dead_of(&text).is_empty(), "whose it was is not known");
    }
}
