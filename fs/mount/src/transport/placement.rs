//! Serves where the requests are made: the thread of a mount follows the one program that waits for it to its core.
//!
//! A request that is answered on another core than it was made on wakes a thread there and is woken by it, and an idle core
//! in a virtual machine takes some 25 us to wake. On one core both are a switch between two threads. So when, for a
//! while, all looked-at requests were small and came from one core, the thread binds itself to that core; when they
//! come from several, or carry data, it lets go. Why, and what it brings: docs/design/0014-mount-placement.md.
//!
//! What always holds:
//! - A thread that was bound by its user, or has but one core, stays as it is.
//! - Only the thread that serves is bound, never longer than it serves.
//! - Looking where a program runs costs some 10 us, and is done at most once per [`LOOK_EVERY`].
#![allow(unsafe_code)] // sched_getaffinity and sched_setaffinity have no safe interface in std

use std::io;
use std::time::{Duration, Instant};

use crate::codec::Peek;

/// Looking costs at most some hundredth of the time.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Looks that are remembered.
const LOOKS: usize = 8;
/// So many of them must agree to bind the thread; fewer than [`KEEP`] let it go.
const BIND: usize = 8;
const KEEP: usize = 6;
/// After so long without a look nothing is known any more.
const FORGET_AFTER: Duration = Duration::from_secs(1);
/// Who moves this much at a time is better served beside him: both sides copy.
const LARGE_BYTES: usize = 16 << 10;

/// What was seen of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// It was made on that core.
    Core(usize),
    /// Of data, or of nobody who waits on a core.
    Elsewhere,
}

/// What to do with the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    Bind(usize),
    Free,
}

/// The looks, and what follows from them; no I/O.
#[derive(Debug, Default)]
struct Choice {
    looks: [Option<Look>; LOOKS],
    next: usize,
    bound: Option<usize>,
}

impl Choice {
    /// Notes a look. `Some`: the thread is to be moved.
    fn after(&mut self, look: Look) -> Option<Move> {
        self.looks[self.next] = Some(look);
        self.next = (self.next + 1) % LOOKS;
        let on = |core| self.looks.iter().filter(|look| **look == Some(Look::Core(core))).count();
        if let Some(core) = self.bound
            && on(core) < KEEP
        {
            // Following at once saves a way over all cores.
            let other = match look {
                Look::Core(other)
                    if on(other) >= LOOKS - KEEP + 1 && on(core) + on(other) == LOOKS =>
                {
                    Some(other)
                }
                _ => None,
            };
            self.bound = other;
            return Some(other.map_or(Move::Free, Move::Bind));
        }
        match (self.bound, look) {
            (None, Look::Core(core)) if on(core) >= BIND => {
                self.bound = Some(core);
                Some(Move::Bind(core))
            }
            _ => None,
        }
    }

    /// Nothing was asked for long.
    fn forget(&mut self) -> Option<Move> {
        self.looks = [None; LOOKS];
        self.bound.take().map(|_| Move::Free)
    }
}

/// Where the thread that made it is to run.
pub(super) struct Placement {
    /// Where it may run; `None`: it stays as it is.
    anywhere: Option<libc::cpu_set_t>,
    choice: Choice,
    looked: Instant,
}

impl Placement {
    /// Of the calling thread, to be used by it alone.
    pub(super) fn of_this_thread() -> Self {
        let anywhere = affinity().ok().filter(|cores| {
            let cores = count(cores);
            cores > 1 && cores == online()
        });
        Self { anywhere, choice: Choice::default(), looked: Instant::now() }
    }

    /// A request has come.
    pub(super) fn asked(&mut self, message: &[u8]) {
        let Some(anywhere) = self.anywhere else { return };
        let since = self.looked.elapsed();
        if since < LOOK_EVERY {
            return;
        }
        self.looked += since;
        let pauses = since > FORGET_AFTER;
        let forgotten = if pauses { self.choice.forget() } else { None };
        let look = match Peek::at(message) {
            Some(Peek { pid, .. }) if pid == 0 => None,
            Some(Peek { data_bytes, .. }) if data_bytes > LARGE_BYTES => Some(Look::Elsewhere),
            // One that is gone already waits nowhere.
            Some(Peek { pid, .. }) => Some(core_of(pid).map_or(Look::Elsewhere, Look::Core)),
            None => None,
        };
        let to = look.and_then(|look| self.choice.after(look)).or(forgotten);
        let bound = match to {
            None => return,
            Some(Move::Bind(core)) => {
                tracing::trace!(core, "follows the program that asks");
                only(core).and_then(|core| bind(&core))
            }
            Some(Move::Free) => bind(&anywhere),
        };
        if let Err(error) = bound {
            tracing::debug!(%error, "the thread cannot be bound");
            self.anywhere = None;
        }
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        if let (Some(anywhere), Some(Move::Free)) = (self.anywhere, self.choice.forget()) {
            let _ = bind(&anywhere);
        }
    }
}

/// The core that a thread of this machine last ran on.
fn core_of(tid: u32) -> Option<usize> {
    core_in(&std::fs::read(format!("/proc/{tid}/stat")).ok()?)
}

/// `processor` of proc_pid_stat(5): the 39th field, the 37th behind the name, which may contain anything.
fn core_in(stat: &[u8]) -> Option<usize> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    fields.split_ascii_whitespace().nth(36)?.parse().ok()
}

fn affinity() -> io::Result<libc::cpu_set_t> {
    // SAFETY: all zeroes are an empty set.
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: 0 is this thread, and there is room for a set.
    let got = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut cores) };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(cores) }
}

fn bind(cores: &libc::cpu_set_t) -> io::Result<()> {
    // SAFETY: 0 is this thread, and the set is read only.
    let set = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), cores) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn only(core: usize) -> io::Result<libc::cpu_set_t> {
    // SAFETY: all zeroes are an empty set.
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // SAFETY: the core is one of those that the set has bits for.
    unsafe { libc::CPU_SET(core, &mut cores) };
    Ok(cores)
}

fn count(cores: &libc::cpu_set_t) -> usize {
    // SAFETY: reads a set.
    usize::try_from(unsafe { libc::CPU_COUNT(cores) }).unwrap_or(0)
}

/// Cores that are in use.
fn online() -> usize {
    // SAFETY: asks for a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(choice: &mut Choice, looks: &[(usize, Look)]) -> Vec<Move> {
        let looks = looks.iter().flat_map(|(times, look)| std::iter::repeat_n(*look, *times));
        looks.filter_map(|look| choice.after(look)).collect()
    }

    #[test]
    fn one_program_is_followed() {
        let mut choice = Choice::default();
        assert_eq!(after(&mut choice, &[(7, Look::Core(1))]), []);
        assert_eq!(after(&mut choice, &[(50, Look::Core(1))]), [Move::Bind(1)]);
        // A wrong look now and then changes nothing.
        assert_eq!(after(&mut choice, &[(2, Look::Core(0)), (20, Look::Core(1))]), []);
        // It has moved.
        assert_eq!(after(&mut choice, &[(20, Look::Core(0))]), [Move::Bind(0)]);
        assert_eq!(choice.forget(), Some(Move::Free));
        assert_eq!(choice.forget(), None);
    }

    #[test]
    fn several_and_those_who_move_data_are_not() {
        let mut choice = Choice::default();
        for _ in 0..100 {
            assert_eq!(after(&mut choice, &[(5, Look::Core(0)), (5, Look::Core(1))]), []);
        }
        assert_eq!(after(&mut choice, &[(8, Look::Core(1))]), [Move::Bind(1)]);
        assert_eq!(after(&mut choice, &[(30, Look::Elsewhere)]), [Move::Free]);
        assert_eq!(after(&mut choice, &[(7, Look::Core(1)), (9, Look::Elsewhere)]), []);
        // Both cores again, from the bound state.
        assert_eq!(after(&mut choice, &[(8, Look::Core(1))]), [Move::Bind(1)]);
        let mut moves = Vec::new();
        for _ in 0..8 {
            moves.extend(after(&mut choice, &[(1, Look::Core(0)), (1, Look::Core(2))]));
        }
        assert_eq!(moves, [Move::Free]);
    }

    #[test]
    fn a_name_may_contain_anything() {
        let fields: Vec<String> = (3..=52).map(|number| number.to_string()).collect();
        let stat = format!("1 (a) b) {}\n", fields.join(" "));
        assert_eq!(core_in(stat.as_bytes()), Some(39));
        assert_eq!(core_in(b"1 (a) S 1"), None);
        assert!(core_of(std::process::id()).is_some());
    }

    #[test]
    fn a_thread_is_bound_and_freed() {
        let before = affinity().unwrap();
        let core = (0..1024)
            // SAFETY: 1024 is the size of a set.
            .find(|core| unsafe { libc::CPU_ISSET(*core, &before) })
            .unwrap();
        bind(&only(core).unwrap()).unwrap();
        assert_eq!(count(&affinity().unwrap()), 1);
        let mut placement = Placement::of_this_thread();
        // Bound by somebody else, unless there is but this core.
        assert!(placement.anywhere.is_none());
        placement.anywhere = Some(before);
        placement.choice.bound = Some(core);
        drop(placement);
        assert_eq!(count(&affinity().unwrap()), count(&before));
    }
}
