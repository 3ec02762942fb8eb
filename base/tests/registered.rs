//! Registered files and buffers: the right bytes in the right file, whatever comes and goes.
#![allow(unsafe_code)] // setrlimit(2), setuid(2).

use levada_base::reactor::fs::{File, OpenOptions};
use levada_base::reactor::{self, Reactor};
use levada_base::shared::share_buffers;
use levada_base::{Buf, BufMut, IoVecMut};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const BLOCK: usize = 4096;
const MIB: usize = 1 << 20;

/// Beside the build's output: a tmpfs in /tmp might not take direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn open(path: &Path) -> File {
    let options = OpenOptions { write: true, direct: true, create: true, exclusive: false };
    File::open(path, options).unwrap()
}

/// Every 8 bytes tell their place in the file and the file they belong to.
fn byte_at(at: usize, file: u64) -> u8 {
    let word = (at as u64 / 8 + 1 + (file << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word.to_le_bytes()[at % 8]
}

fn filled(at: usize, len: usize, file: u64) -> Buf {
    let mut buf = BufMut::for_overwrite(len);
    for (n, byte) in buf.iter_mut().enumerate() {
        *byte = byte_at(at + n, file);
    }
    buf.freeze()
}

fn is_right(bytes: &[u8], at: usize, file: u64) -> bool {
    bytes.iter().enumerate().all(|(n, byte)| *byte == byte_at(at + n, file))
}

async fn made(path: PathBuf, bytes: usize, number: u64) -> File {
    let file = open(&path);
    for at in (0..bytes).step_by(MIB) {
        file.write_at(at as u64, filled(at, MIB, number).into_vec(), false).await.unwrap();
    }
    file
}

async fn read(file: &File, at: usize, len: usize) -> BufMut {
    let mut into = BufMut::for_overwrite(len);
    into.fill(0xee);
    file.read_at(at as u64, into.into_vec()).await.unwrap().pop().unwrap()
}

/// Reads until memory of that size is registered.
async fn warmed(file: &File, len: usize) {
    for _ in 0..8 {
        drop(read(file, 0, len).await);
    }
}

async fn every_alignment() {
    let dir = directory();
    let file = made(dir.path().join("file"), 2 * MIB, 1).await;
    for len in [BLOCK, 3 * BLOCK, 16 * BLOCK, MIB] {
        warmed(&file, len).await;
        let before = reactor::registered();
        assert!(before.buffers > 0 && before.files == 1, "{before:?}");
        // Where a view begins in its region, in the units that direct I/O takes.
        for skip in (0..len).step_by((len / 8).next_multiple_of(512)) {
            let part = (len - skip).min(5 * BLOCK) / 512 * 512;
            let at = skip + BLOCK;
            let mut whole = BufMut::for_overwrite(len);
            whole.fill(0xee);
            let mut view = whole.split_to(skip);
            let mut rest = whole.split_to(part);
            rest = file.read_at(at as u64, rest.into_vec()).await.unwrap().pop().unwrap();
            assert!(is_right(&rest, at, 1), "{len} {skip} {part}");
            view.unsplit(rest);
            view.unsplit(whole);
            assert!(view[..skip].iter().all(|byte| *byte == 0xee), "before it");
            assert!(view[skip + part..].iter().all(|byte| *byte == 0xee), "behind it");
            // The same way back, to another place, changed.
            let _ = view.split_to(skip);
            let mut back = view.split_to(part);
            for (n, byte) in back.iter_mut().enumerate() {
                *byte = byte_at(MIB / 2 + n, 9);
            }
            file.write_at((MIB / 2) as u64, back.freeze().into_vec(), true).await.unwrap();
            assert!(is_right(&read(&file, MIB / 2, part).await, MIB / 2, 9));
            let again = filled(MIB / 2, part, 1);
            file.write_at((MIB / 2) as u64, again.into_vec(), false).await.unwrap();
        }
        let after = reactor::registered();
        assert!(after.buffer_requests > before.buffer_requests + 8, "{before:?} {after:?}");
    }
    // Neighbours of one allocation go as one request, parts that lie apart as a list.
    let before = reactor::registered().buffer_requests;
    let mut whole = BufMut::for_overwrite(MIB);
    let parts: IoVecMut = (0..4).map(|_| whole.split_to(MIB / 4)).collect();
    let parts = file.read_at(0, parts).await.unwrap();
    assert!((0..4).all(|n| is_right(&parts[n], n * MIB / 4, 1)));
    assert_eq!(reactor::registered().buffer_requests, before + 1);
    let parts: IoVecMut = (1..4).map(|n| BufMut::for_overwrite(n * BLOCK)).collect();
    let parts = file.read_at(0, parts).await.unwrap();
    assert!(is_right(&parts[2], 3 * BLOCK, 1) && is_right(&parts[1], BLOCK, 1));
}

#[test]
fn the_right_bytes_at_every_alignment() {
    Reactor::new().unwrap().block_on(every_alignment());
}

#[test]
fn the_right_bytes_in_memory_that_is_shared() {
    Reactor::new().unwrap().block_on(async {
        let _own = share_buffers().unwrap();
        assert!(BufMut::for_overwrite(1).freeze().shared_offset().is_some());
        every_alignment().await;
    });
}

/// More is in use than the pool keeps, so that memory is given back, and then used again: pages
/// that the kernel still had from before would get or give the wrong bytes.
async fn given_back_and_used_again() {
    let dir = directory();
    let file = made(dir.path().join("file"), 8 * MIB, 2).await;
    for _ in 0..3 {
        // 80 regions of 4 MiB; the pool keeps 256 MiB of them.
        let mut all = Vec::new();
        for n in 0..80 {
            let mut buf = BufMut::for_overwrite(4 * MIB);
            for turn in 0..3 {
                let at = (n + turn) % 4 * MIB;
                buf = file.read_at(at as u64, buf.into_vec()).await.unwrap().pop().unwrap();
                assert!(
                    is_right(&buf[..BLOCK], at, 2)
                        && is_right(&buf[4 * MIB - BLOCK..], at + 4 * MIB - BLOCK, 2)
                );
            }
            all.push(buf);
        }
        let most = reactor::registered();
        assert!(most.buffer_bytes > 32 * MIB && most.buffer_bytes <= 64 * MIB, "{most:?}");
        // What is dropped last is given back, registered or not.
        all.reverse();
        drop(all);
        let least = reactor::registered();
        assert!(least.buffers < most.buffers, "{most:?} {least:?}");
    }
    // Registered anew, at the places that were given back.
    let mut all: Vec<_> = (0..80).map(|_| BufMut::for_overwrite(4 * MIB)).collect();
    for _ in 0..4 {
        for (n, buf) in all.iter_mut().enumerate() {
            let at = n % 4 * MIB;
            let taken = std::mem::replace(buf, BufMut::for_overwrite(1));
            *buf = file.read_at(at as u64, taken.into_vec()).await.unwrap().pop().unwrap();
            assert!(buf.iter().zip(0..).step_by(97).all(|(byte, m)| *byte == byte_at(at + m, 2)));
        }
    }
}

#[test]
fn memory_that_was_given_back_is_not_used_by_the_kernel() {
    Reactor::new().unwrap().block_on(given_back_and_used_again());
}

#[test]
fn shared_memory_that_was_emptied_is_not_used_by_the_kernel() {
    Reactor::new().unwrap().block_on(async {
        let _own = share_buffers().unwrap();
        given_back_and_used_again().await;
    });
}

#[test]
fn buffers_become_shared_while_some_are_registered() {
    let dir = directory();
    Reactor::new().unwrap().block_on(async {
        let file = made(dir.path().join("file"), 2 * MIB, 3).await;
        warmed(&file, 64 * 1024).await;
        let held = read(&file, 0, 64 * 1024).await;
        warmed(&file, 64 * 1024).await;
        let before = reactor::registered();
        assert!(before.buffers >= 2, "{before:?}");
        // What is free in the pool is freed; what is in use stays until it is dropped.
        let _own = share_buffers().unwrap();
        let now = reactor::registered().buffers;
        assert!(now >= 1 && now < before.buffers, "{now} of {before:?}");
        let held = file.read_at(BLOCK as u64, held.into_vec()).await.unwrap().pop().unwrap();
        assert!(is_right(&held, BLOCK, 3));
        drop(held);
        assert!(reactor::registered().buffers < now);
        warmed(&file, 64 * 1024).await;
        assert!(is_right(&read(&file, 4096, 64 * 1024).await, 4096, 3));
    });
}

#[test]
fn files_come_and_go_while_requests_are_in_flight() {
    let dir = directory();
    Reactor::new().unwrap().block_on(async {
        for number in 0..4 {
            drop(made(dir.path().join(number.to_string()), MIB, number).await);
        }
        assert_eq!(reactor::registered().files, 0);
        let mut reads = Vec::new();
        for round in 0..400u64 {
            let number = round % 4;
            let file = open(&dir.path().join(number.to_string()));
            for n in 0..3 {
                let file = file.clone();
                reads.push(reactor::spawn(async move {
                    let at = (round as usize * 3 + n) * BLOCK % MIB;
                    assert!(is_right(&read(&file, at, BLOCK).await, at, number), "file {number}");
                }));
            }
            if round % 7 == 0 {
                reactor::yield_now().await;
            }
            if round % 5 == 0 {
                // A read whose future is dropped at once; file and buffer go with the request.
                let late = read(&file, 0, MIB);
                assert!(reactor::timeout(Duration::ZERO, late).await.is_err());
            }
            // The last owner here: the requests in flight keep it.
            drop(file);
            if reads.len() > 60 {
                for read in reads.drain(..) {
                    read.await.unwrap();
                }
            }
        }
        for read in reads {
            read.await.unwrap();
        }
        reactor::sleep(Duration::from_millis(50)).await;
        let now = reactor::registered();
        assert!(now.files == 0 && now.file_requests >= 1200, "{now:?}");
        // A closed file has let go of its lock.
        let path = dir.path().join("0");
        let file = open(&path);
        assert!(file.try_lock().unwrap());
        assert!(is_right(&read(&file, 0, BLOCK).await, 0, 0));
        assert_eq!(reactor::registered().files, 1);
        drop(file);
        assert!(open(&path).try_lock().unwrap());
    });
}

#[test]
fn more_files_than_the_table_holds() {
    let dir = directory();
    Reactor::new().unwrap().block_on(async {
        let mut files = Vec::new();
        for number in 0..300 {
            let file = open(&dir.path().join(number.to_string()));
            file.write_at(0, filled(0, BLOCK, number).into_vec(), false).await.unwrap();
            files.push(file);
        }
        assert_eq!(reactor::registered().files, 256);
        for (number, file) in files.iter().enumerate() {
            assert!(is_right(&read(file, 0, BLOCK).await, 0, number as u64));
        }
    });
}

#[test]
fn reading_into_buffers_whose_futures_are_dropped_harms_nobody() {
    let dir = directory();
    let reactor = Reactor::new().unwrap();
    let path = dir.path().join("file");
    reactor.block_on(async {
        let file = made(path.clone(), 2 * MIB, 5).await;
        warmed(&file, MIB).await;
        for _ in 0..200 {
            let late = file.read_at(0, BufMut::for_overwrite(MIB).into_vec());
            assert!(reactor::timeout(Duration::ZERO, late).await.is_err());
            // Were the memory free already, the read would write into this.
            let mut mine = BufMut::for_overwrite(MIB);
            mine.fill(0x77);
            reactor::yield_now().await;
            assert!(mine.iter().all(|byte| *byte == 0x77));
        }
        for n in 0..20 {
            let file = file.clone();
            reactor::spawn(async move { read(&file, n * BLOCK, MIB).await });
        }
        reactor::yield_now().await;
    });
    drop(reactor);
    // The next reactor of the thread registers the same memory anew; the file is not locked.
    Reactor::new().unwrap().block_on(async {
        let file = open(&path);
        assert!(file.try_lock().unwrap());
        warmed(&file, MIB).await;
        assert!(is_right(&read(&file, BLOCK, MIB).await, BLOCK, 5));
        assert!(reactor::registered().buffer_requests > 0);
    });
}

#[test]
fn a_file_outlives_its_reactor() {
    let dir = directory();
    let path = dir.path().join("file");
    let first = Reactor::new().unwrap();
    let file = first.block_on(made(path.clone(), MIB, 6));
    assert!(file.try_lock().unwrap());
    // Two rings at a time: it is registered with one of them.
    let second = Reactor::new().unwrap();
    second.block_on(async {
        warmed(&file, BLOCK).await;
        assert!(is_right(&read(&file, BLOCK, BLOCK).await, BLOCK, 6));
        assert_eq!(reactor::registered().files, 0);
    });
    drop(first);
    second.block_on(async {
        warmed(&file, BLOCK).await;
        assert!(is_right(&read(&file, BLOCK, BLOCK).await, BLOCK, 6));
        assert_eq!(reactor::registered().files, 1);
    });
    drop(second);
    drop(file);
    assert!(open(&path).try_lock().unwrap());
}

#[test]
fn nothing_is_registered_where_nobody_wants_it() {
    let dir = directory();
    let reactor = Reactor::new().unwrap();
    reactor.register_nothing();
    reactor.block_on(async {
        let file = made(dir.path().join("file"), MIB, 7).await;
        warmed(&file, BLOCK).await;
        assert!(is_right(&read(&file, BLOCK, BLOCK).await, BLOCK, 7));
        assert_eq!(reactor::registered(), reactor::Registered::default());
    });
}

/// Runs the test of that name in a process of its own, which finds the variable set.
fn alone(test: &str) -> bool {
    const VARIABLE: &str = "LEVADA_TEST_ALONE";
    if std::env::var_os(VARIABLE).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let status = command.args(["--exact", test]).env(VARIABLE, "1").status().unwrap();
    assert!(status.success(), "{test} alone: {status}");
    false
}

fn limit(resource: libc::__rlimit_resource_t, to: u64) {
    let limit = libc::rlimit { rlim_cur: to, rlim_max: to };
    // SAFETY: reads one structure.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const limit) }, 0);
}

/// What may be locked is counted for all processes of a user, so the user is an unlikely one.
fn become_nobody_in_particular() {
    // SAFETY: touches no memory. Fails when this is no privileged user: then all is as wanted.
    unsafe { libc::setuid(3_741_982) };
}

/// Reads into `count` regions of `len` until those are registered that may be.
async fn read_often(file: &File, count: usize, len: usize) -> Vec<BufMut> {
    let mut all: Vec<_> = (0..count).map(|_| BufMut::for_overwrite(len)).collect();
    for _ in 0..4 {
        for (n, buf) in all.iter_mut().enumerate() {
            let taken = std::mem::replace(buf, BufMut::zeroed_to_stay(1));
            let at = (n * BLOCK) as u64;
            *buf = file.read_at(at, taken.into_vec()).await.unwrap().pop().unwrap();
            assert!(is_right(buf, n * BLOCK, 8));
        }
    }
    all
}

#[test]
fn works_where_no_memory_may_be_registered() {
    if !alone("works_where_no_memory_may_be_registered") {
        return;
    }
    let dir = directory();
    let file = open(&dir.path().join("file"));
    become_nobody_in_particular();
    let reactor = Reactor::new().unwrap();
    // The ring itself counts too.
    limit(libc::RLIMIT_MEMLOCK, 0);
    reactor.block_on(async {
        file.write_at(0, filled(0, MIB, 8).into_vec(), true).await.unwrap();
        for len in [BLOCK, 2 * BLOCK, MIB / 2] {
            drop(read_often(&file, 4, len).await);
        }
        let now = reactor::registered();
        assert!(now.files == 1 && now.buffers == 0 && now.buffer_requests == 0, "{now:?}");
    });
}

#[test]
fn registers_no_more_memory_than_it_may() {
    if !alone("registers_no_more_memory_than_it_may") {
        return;
    }
    let dir = directory();
    let file = open(&dir.path().join("file"));
    become_nobody_in_particular();
    limit(libc::RLIMIT_MEMLOCK, 8 * MIB as u64);
    Reactor::new().unwrap().block_on(async {
        file.write_at(0, filled(0, MIB, 8).into_vec(), true).await.unwrap();
        let all = read_often(&file, 8, MIB / 8).await;
        let full = reactor::registered();
        assert!(full.buffer_bytes == MIB / 2 && full.buffers == 4, "{full:?}");
        // The limit falls; what is given up cannot be had again, and the kernel refuses.
        limit(libc::RLIMIT_MEMLOCK, 0);
        let _own = share_buffers().unwrap();
        drop(all);
        assert_eq!(reactor::registered().buffers, 0);
        drop(read_often(&file, 8, BLOCK).await);
        let none = reactor::registered();
        assert!(none.buffers == 0 && none.buffer_requests == full.buffer_requests, "{none:?}");
    });
}

#[test]
fn works_where_no_file_may_be_registered() {
    if !alone("works_where_no_file_may_be_registered") {
        return;
    }
    // The table of files counts as open files.
    limit(libc::RLIMIT_NOFILE, 100);
    let dir = directory();
    Reactor::new().unwrap().block_on(async {
        let file = made(dir.path().join("file"), 2 * MIB, 10).await;
        warmed(&file, BLOCK).await;
        assert!(is_right(&read(&file, BLOCK, BLOCK).await, BLOCK, 10));
        let now = reactor::registered();
        assert!(now.files == 0 && now.file_requests == 0 && now.buffers > 0, "{now:?}");
    });
}
