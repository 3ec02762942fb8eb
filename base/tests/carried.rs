//! Sockets that other threads carry: as any others, but for who waits for the kernel.

use levada_base::buf::joined;
use levada_base::reactor::net::{Listener, Stream};
use levada_base::reactor::{self, Reactor};
use levada_base::{Buf, BufMut};
use std::net::Shutdown;
use std::time::{Duration, Instant};

/// A reactor with so many carriers.
fn run<F: Future>(carriers: usize, future: F) -> F::Output {
    Reactor::new().expect("an io_uring").block_on(async {
        reactor::carry_sockets(carriers).expect("threads");
        future.await
    })
}

/// Both ends of a connection.
async fn connection(listener: &Listener) -> (Stream, Stream) {
    let at = listener.local_addr().expect("TCP");
    let made = Stream::connect(at).await.expect("made").carried();
    (made, listener.accept().await.expect("taken").carried())
}

fn listener() -> Listener {
    Listener::bind(([127, 0, 0, 1], 0).into()).expect("bound")
}

fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + seed * 7 + (at >> 8)) as u8).collect()
}

#[test]
fn bytes_arrive_whole_and_in_order_over_any_carrier() {
    for carriers in [0, 1, 3] {
        run(carriers, async {
            let listener = listener();
            let mut echoes = Vec::new();
            for seed in 0..7 {
                let (made, taken) = connection(&listener).await;
                let sizes = [1, 100, 4096, 65_537, 1 << 20, 3];
                let back = reactor::spawn(async move {
                    for bytes in sizes {
                        let read = taken.read_exact(BufMut::for_overwrite(bytes)).await;
                        let parts = read.expect("all of it").freeze();
                        // In several pieces.
                        let cut = bytes / 3;
                        let parts = [parts.slice(0, cut), parts.slice(cut, bytes - cut)];
                        taken.write_all(parts.into_iter().collect()).await.expect("sent");
                    }
                });
                echoes.push(reactor::spawn(async move {
                    for bytes in sizes {
                        let sent = pattern(seed, bytes);
                        made.write_all(Buf::copy_of(&sent).into_vec()).await.expect("sent");
                        let come = made.read_exact(BufMut::for_overwrite(bytes)).await;
                        assert!(joined(&[come.expect("all of it")]) == sent, "{bytes} bytes");
                    }
                    back.await.expect("not killed");
                    made.shutdown(Shutdown::Both).expect("ended");
                    let (_, bytes) = made.read(BufMut::zeroed(8)).await.expect("the end");
                    assert_eq!(bytes, 0);
                }));
            }
            for echo in echoes {
                echo.await.expect("not killed");
            }
        });
    }
}

#[test]
fn both_ways_at_once() {
    run(2, async {
        let listener = listener();
        let (one, other) = connection(&listener).await;
        let (there, back) = (pattern(1, 3 << 20), pattern(2, 3 << 20));
        let send = |stream: &Stream, bytes: &[u8]| {
            let (stream, bytes) = (stream.clone(), Buf::copy_of(bytes));
            reactor::spawn(async move { stream.write_all(bytes.into_vec()).await })
        };
        let sending = [send(&one, &there), send(&other, &back)];
        let (come, gone) = futures_util::join!(
            one.read_exact(BufMut::for_overwrite(back.len())),
            other.read_exact(BufMut::for_overwrite(there.len())),
        );
        assert!(come.expect("all")[..] == back[..] && gone.expect("all")[..] == there[..]);
        for sent in sending {
            sent.await.expect("not killed").expect("sent");
        }
    });
}

#[test]
fn what_nobody_waits_for_any_more_ends() {
    let begun = Instant::now();
    run(2, async {
        let listener = listener();
        let (one, other) = connection(&listener).await;
        // A read whose future is dropped, and a write that finds no room.
        let short = Duration::from_millis(20);
        assert!(reactor::timeout(short, one.read(BufMut::zeroed(4096))).await.is_err());
        let much = BufMut::zeroed(64 << 20).freeze().into_vec();
        assert!(reactor::timeout(short, other.write_all(much.clone())).await.is_err());
        one.shutdown(Shutdown::Both).expect("ended");
        // Others go on.
        let (made, taken) = connection(&listener).await;
        made.write_all(Buf::copy_of(b"on").into_vec()).await.expect("sent");
        assert_eq!(taken.read_exact(BufMut::zeroed(2)).await.expect("come")[..], *b"on");
        // Under way when their reactor ends.
        reactor::spawn(async move { taken.read(BufMut::zeroed(4096)).await });
        reactor::spawn(async move { made.write_all(much).await });
        reactor::sleep(short).await;
    });
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn errors_are_told() {
    run(1, async {
        let listener = listener();
        let (one, other) = connection(&listener).await;
        other.shutdown(Shutdown::Both).expect("ended");
        drop(other);
        let read = one.read_exact(BufMut::zeroed(1)).await;
        assert_eq!(read.expect_err("the end").kind(), std::io::ErrorKind::UnexpectedEof);
        let sent = async {
            loop {
                one.write_all(BufMut::zeroed(4096).freeze().into_vec()).await?;
            }
        };
        let sent: std::io::Result<()> = sent.await;
        assert_eq!(sent.expect_err("nobody is there").raw_os_error(), Some(libc::EPIPE));
    });
}

/// Nanoseconds that the thread of this name has run.
fn ran_ns(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    for task in tasks.flatten() {
        let comm = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if comm.trim() == name {
            let stat = std::fs::read_to_string(task.path().join("schedstat")).expect("counted");
            return stat.split(' ').next().expect("a number").parse().expect("a number");
        }
    }
    panic!("no thread {name}");
}

#[test]
fn who_has_nothing_to_carry_sleeps() {
    // More than any other test has, so that the last one is known by its name.
    run(5, async {
        let listener = listener();
        let mut connections = Vec::new();
        for _ in 0..5 {
            let (one, other) = connection(&listener).await;
            one.write_all(Buf::copy_of(b"x").into_vec()).await.expect("sent");
            other.read_exact(BufMut::zeroed(1)).await.expect("come");
            let waits = one.clone();
            reactor::spawn(async move { waits.read(BufMut::zeroed(1)).await });
            connections.push((one, other));
        }
        reactor::sleep(Duration::from_millis(50)).await;
        let before = ran_ns("carrier-4");
        reactor::sleep(Duration::from_millis(500)).await;
        let ran = Duration::from_nanos(ran_ns("carrier-4") - before);
        assert!(ran < Duration::from_millis(5), "{ran:?} of 500 ms");
    });
}
