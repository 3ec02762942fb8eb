//! Descriptors that a reactor looks at while it polls, and leaves to the ring when it sleeps.
#![allow(unsafe_code)] // getrusage(2)

use levada_base::reactor::{self, Fd, Reactor};
use levada_base::{Buf, BufMut};
use std::cell::Cell;
use std::io::Write;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

const SPINS: [Duration; 3] =
    [Duration::ZERO, Duration::from_micros(100), Duration::from_millis(50)];
/// No wait in here takes a tenth of it.
const LIMIT: Duration = Duration::from_secs(10);

fn polling(spin: Duration) -> Reactor {
    let reactor = Reactor::new().expect("an io_uring");
    reactor.set_spin(spin);
    reactor
}

#[test]
fn what_can_be_read_is_noticed_while_polling_and_asleep() {
    for spin in SPINS {
        polling(spin).block_on(async {
            let (reader, mut writer) = std::io::pipe().unwrap();
            let reader = Fd::new(reader.into()).unwrap();
            // At once, within the polling, and long after it.
            for wait in [0, 20, 5_000, 120_000, 0, 0, 20] {
                let writing = thread::spawn(move || {
                    thread::sleep(Duration::from_micros(wait));
                    writer.write_all(b"x").unwrap();
                    writer
                });
                let ready = reactor::timeout(LIMIT, reader.readable_soon()).await;
                ready.expect("noticed").unwrap();
                assert_eq!(reader.read(BufMut::zeroed(2)).await.unwrap().1, 1);
                writer = writing.join().unwrap();
            }
            // The end is something to be read too.
            drop(writer);
            let ready = reactor::timeout(LIMIT, reader.readable_soon()).await;
            ready.expect("noticed").unwrap();
        });
    }
}

#[test]
fn two_watch_and_each_is_woken_for_its_own() {
    for spin in SPINS {
        polling(spin).block_on(async {
            let pipes = [std::io::pipe().unwrap(), std::io::pipe().unwrap()];
            let [(first, mut to_first), (second, mut to_second)] = pipes;
            let woken = Rc::new(Cell::new(0));
            let watch = |reader: std::io::PipeReader, number: u32| {
                let woken = Rc::clone(&woken);
                let reader = Fd::new(reader.into()).unwrap();
                reactor::spawn(async move {
                    reader.readable_soon().await.unwrap();
                    woken.set(woken.get() + number);
                })
            };
            let (first, second) = (watch(first, 1), watch(second, 10));
            reactor::sleep(Duration::from_millis(2)).await;
            assert_eq!(woken.get(), 0);
            to_second.write_all(b"x").unwrap();
            reactor::timeout(LIMIT, second).await.expect("woken").unwrap();
            assert_eq!(woken.get(), 10);
            to_first.write_all(b"x").unwrap();
            reactor::timeout(LIMIT, first).await.expect("woken").unwrap();
            assert_eq!(woken.get(), 11);
        });
    }
}

#[test]
fn it_is_noticed_beside_tasks_that_never_rest() {
    for spin in SPINS {
        polling(spin).block_on(async {
            let (reader, mut writer) = std::io::pipe().unwrap();
            let reader = Fd::new(reader.into()).unwrap();
            let busy = reactor::spawn(async {
                loop {
                    reactor::yield_now().await;
                }
            });
            let writing = thread::spawn(move || {
                thread::sleep(Duration::from_millis(5));
                writer.write_all(b"x").unwrap();
                writer
            });
            let ready = reactor::timeout(LIMIT, reader.readable_soon()).await;
            ready.expect("noticed").unwrap();
            busy.abort();
            drop(writing.join().unwrap());
        });
    }
}

#[test]
fn who_stops_watching_is_forgotten() {
    for spin in SPINS {
        polling(spin).block_on(async {
            let (reader, mut writer) = std::io::pipe().unwrap();
            let reader = Fd::new(reader.into()).unwrap();
            for wait in [1, 50, 3_000] {
                let limit = Duration::from_micros(wait);
                assert!(reactor::timeout(limit, reader.readable_soon()).await.is_err());
            }
            writer.write_all(b"x").unwrap();
            reader.readable_soon().await.unwrap();
            // The ring works as before.
            let (other, to_other) = std::io::pipe().unwrap();
            let (other, to_other) =
                (Fd::new(other.into()).unwrap(), Fd::new(to_other.into()).unwrap());
            to_other.writev(Buf::copy_of(b"y").into_vec()).await.unwrap();
            assert_eq!(other.read(BufMut::zeroed(2)).await.unwrap().1, 1);
        });
    }
}

#[test]
fn who_waits_long_costs_no_processor() {
    let cpu_time = || {
        // SAFETY: all zeroes is a value of this plain structure, which the call fills.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
            usage
        };
        let of = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
        of(usage.ru_utime) + of(usage.ru_stime)
    };
    polling(Duration::from_micros(100)).block_on(async {
        let (reader, _writer) = std::io::pipe().unwrap();
        let reader = Fd::new(reader.into()).unwrap();
        let (before, began) = (cpu_time(), Instant::now());
        assert!(
            reactor::timeout(Duration::from_millis(500), reader.readable_soon()).await.is_err()
        );
        assert!(began.elapsed() >= Duration::from_millis(500));
        let used = cpu_time() - before;
        assert!(used < Duration::from_millis(20), "{used:?}");
    });
}
