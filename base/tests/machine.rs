//! The reactor on this machine: real files, sockets, threads, signals and time.
#![allow(unsafe_code)] // getrusage(2), raise(3), pipe(2).

use levada_base::buf::bytes_in;
use levada_base::reactor::fs::{File, OpenOptions};
use levada_base::reactor::net::{Listener, Stream};
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::worker::Worker;
use levada_base::reactor::{self, Fd, Group, Reactor, mailbox};
use levada_base::{Buf, BufMut, IoVec, IoVecMut};
use std::cell::Cell;
use std::io::{ErrorKind, Write};
use std::mem::zeroed;
use std::net::Shutdown;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

fn machine() -> Reactor {
    Reactor::new().expect("an io_uring")
}

/// CPU time of this thread, in user and kernel mode.
fn cpu_time() -> Duration {
    // SAFETY: all zeroes is a value of this plain structure, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage
    };
    let of = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    of(usage.ru_utime) + of(usage.ru_stime)
}

fn loopback() -> std::net::SocketAddr {
    "127.0.0.1:0".parse().expect("an address")
}

fn pattern(len: usize, seed: u64) -> Buf {
    let mut buf = BufMut::for_overwrite(len);
    let mut x = seed | 1;
    for bytes in buf.chunks_mut(8) {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.copy_from_slice(&x.to_le_bytes()[..bytes.len()]);
    }
    buf.freeze()
}

#[test]
fn timers_are_accurate_and_in_order() {
    machine().block_on(async {
        let mut late = Vec::new();
        for us in [100, 300, 1000, 5000, 50] {
            let limit = Duration::from_micros(us);
            let start = Instant::now();
            reactor::sleep(limit).await;
            assert!(start.elapsed() >= limit);
            late.push(start.elapsed() - limit);
        }
        late.sort();
        assert!(late[2] < Duration::from_millis(2), "late by {late:?}");
        let order = Rc::new(std::cell::RefCell::new(Vec::new()));
        let tasks: Vec<_> = [3u64, 1, 2]
            .map(|n| {
                let order = Rc::clone(&order);
                reactor::spawn(async move {
                    reactor::sleep(Duration::from_millis(n * 3)).await;
                    order.borrow_mut().push(n);
                })
            })
            .into();
        for task in tasks {
            task.await;
        }
        assert_eq!(*order.borrow(), [1, 2, 3]);
    });
}

#[test]
fn tasks_run_in_order_of_waking() {
    machine().block_on(async {
        let order = Rc::new(std::cell::RefCell::new(Vec::new()));
        for n in 0..10 {
            let order = Rc::clone(&order);
            reactor::spawn(async move { order.borrow_mut().push(n) });
        }
        reactor::yield_now().await;
        assert_eq!(*order.borrow(), (0..10).collect::<Vec<_>>());
    });
}

#[test]
fn busy_tasks_do_not_starve_timers_and_completions() {
    machine().block_on(async {
        let stop = Rc::new(Cell::new(false));
        let busy = Rc::clone(&stop);
        reactor::spawn(async move {
            while !busy.get() {
                reactor::yield_now().await;
            }
        });
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let (reader, writer) = (Fd::new(reader.into()).unwrap(), Fd::new(writer.into()).unwrap());
        let read = reactor::spawn(async move { reader.read(BufMut::zeroed(8)).await });
        reactor::sleep(Duration::from_millis(1)).await;
        writer.writev(Buf::copy_of(b"hello").into_vec()).await.unwrap();
        let (buf, len) = read.await.unwrap().unwrap();
        assert_eq!(&buf[..len], b"hello");
        stop.set(true);
    });
}

#[test]
fn idle_costs_no_cpu_time() {
    machine().block_on(async {
        let listener = Listener::bind(loopback()).unwrap();
        reactor::spawn(async move { listener.accept().await.map(drop) });
        reactor::yield_now().await;
        let before = cpu_time();
        reactor::sleep(Duration::from_secs(1)).await;
        let used = cpu_time() - before;
        assert!(used < Duration::from_millis(10), "{used:?} in an idle second");
    });
}

#[test]
fn spinning_gives_up_when_nothing_completes() {
    let reactor = machine();
    reactor.set_spin(Duration::from_micros(50));
    reactor.block_on(async {
        let listener = Listener::bind(loopback()).unwrap();
        reactor::spawn(async move { listener.accept().await.map(drop) });
        let before = cpu_time();
        for _ in 0..100 {
            reactor::sleep(Duration::from_millis(3)).await;
        }
        let used = cpu_time() - before;
        assert!(used < Duration::from_millis(15), "{used:?} in 0.3 s without completions");
    });
}

fn file_roundtrip(dir: &std::path::Path, direct: bool) {
    machine().block_on(async {
        let path = dir.join("file");
        let options = OpenOptions { write: true, direct, create: true, exclusive: true };
        let file = File::open(&path, options).unwrap();
        let again = File::open(&path, options).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AlreadyExists);

        file.allocate(0, 1 << 20).await.unwrap();
        assert_eq!(file.len().unwrap(), 1 << 20);
        let data: Vec<Buf> = (0..20).map(|n| pattern(4096 * (1 + n % 3), n as u64)).collect();
        let total = bytes_in(&data);
        file.write_at(8192, data.iter().cloned().collect(), true).await.unwrap();
        file.sync_data().await.unwrap();

        let into: IoVecMut = data.iter().map(|part| BufMut::for_overwrite(part.len())).collect();
        let back = file.read_at(8192, into).await.unwrap();
        assert!(back.iter().zip(&data).all(|(back, data)| back[..] == data[..]));

        file.punch_hole(8192, 4096).await.unwrap();
        file.zero_range(8192 + total - 4096, 4096).await.unwrap();
        let whole = file.read_at(8192, BufMut::zeroed(total as usize).into_vec()).await.unwrap();
        assert!(whole[0][..4096].iter().all(|byte| *byte == 0));
        assert!(whole[0][total as usize - 4096..].iter().all(|byte| *byte == 0));
        assert_eq!(whole[0][4096..8192], data[1][..4096]);

        let past = file.read_at((1 << 20) - 4096, BufMut::zeroed(8192).into_vec()).await;
        assert_eq!(past.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    });
}

#[test]
fn files_are_read_and_written_buffered_and_direct() {
    for direct in [false, true] {
        // Beside the build's output: a tmpfs in /tmp might not take O_DIRECT.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file_roundtrip(dir.path(), direct);
    }
}

#[test]
fn many_operations_are_in_flight_together() {
    let dir = tempfile::tempdir().unwrap();
    machine().block_on(async {
        let options = OpenOptions { write: true, create: true, ..OpenOptions::default() };
        let file = File::open(&dir.path().join("file"), options).unwrap();
        // More than the submission ring holds.
        let writes: Vec<_> = (0..3000u64)
            .map(|n| {
                let file = file.clone();
                reactor::spawn(async move {
                    let data = pattern(512, n);
                    file.write_at(n * 512, data.into_vec(), false).await.unwrap();
                })
            })
            .collect();
        for write in writes {
            write.await.unwrap();
        }
        // More parts than one system call takes.
        let parts: IoVecMut = (0..3000).map(|_| BufMut::zeroed(512)).collect();
        let parts = file.read_at(0, parts).await.unwrap();
        for (n, part) in parts.iter().enumerate() {
            assert_eq!(part[..], pattern(512, n as u64)[..]);
        }
    });
}

#[test]
fn only_one_opener_gets_the_lock() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let options = OpenOptions { write: true, create: true, ..OpenOptions::default() };
    let first = File::open(&path, options).unwrap();
    assert!(first.try_lock().unwrap());
    let second = File::open(&path, options).unwrap();
    assert!(!second.try_lock().unwrap());
    drop(first);
    assert!(second.try_lock().unwrap());
}

#[test]
fn tcp_carries_both_directions_at_once() {
    const BYTES: usize = 8 << 20;
    machine().block_on(async {
        let listener = Listener::bind(loopback()).unwrap();
        let addr = listener.local_addr().unwrap();
        // Each end writes everything from one task while another reads: with one direction at
        // a time this would stop as soon as the sockets' buffers are full.
        async fn both_ways(stream: Stream, seed: u64, other_seed: u64) {
            let writer = stream.clone();
            let write = reactor::spawn(async move {
                let data = pattern(BYTES, seed);
                let parts: IoVec = (0..8).map(|n| data.slice(n * BYTES / 8, BYTES / 8)).collect();
                writer.write_all(parts).await.unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
            });
            let data = stream.read_exact(BufMut::for_overwrite(BYTES)).await.unwrap();
            assert!(data[..] == pattern(BYTES, other_seed)[..]);
            let (_, end) = stream.read(BufMut::zeroed(10)).await.unwrap();
            assert_eq!(end, 0);
            write.await.unwrap();
        }
        let server = reactor::spawn(async move {
            both_ways(listener.accept().await.unwrap(), 1, 2).await;
        });
        let stream = Stream::connect(addr).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), addr);
        both_ways(stream, 2, 1).await;
        server.await.unwrap();
    });
}

#[test]
fn unix_sockets_work_and_a_cut_stream_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    machine().block_on(async {
        assert_eq!(Stream::connect_unix(&path).await.unwrap_err().kind(), ErrorKind::NotFound);
        let listener = Listener::bind_unix(&path).unwrap();
        let client = Stream::connect_unix(&path).await.unwrap();
        let server = listener.accept().await.unwrap();
        client.write_all(Buf::copy_of(b"half").into_vec()).await.unwrap();
        drop(client);
        let read = server.read_exact(BufMut::zeroed(8)).await;
        assert_eq!(read.unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let write = server.write_all(Buf::copy_of(b"?").into_vec()).await;
        assert_eq!(write.unwrap_err().kind(), ErrorKind::BrokenPipe);
    });
}

/// A TCP socket whose peer takes nothing: closing it lingers.
fn lingering() -> (OwnedFd, std::net::TcpListener) {
    let listener = std::net::TcpListener::bind(loopback()).unwrap();
    let mut stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: 2 };
    let (at, bytes) = ((&raw const linger).cast(), size_of_val(&linger) as libc::socklen_t);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&stream);
    // SAFETY: a live structure of this size.
    assert_eq!(unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, at, bytes) }, 0);
    // Closing a socket that does not block lingers for nobody.
    stream.set_nonblocking(false).unwrap();
    (stream.into(), listener)
}

#[test]
fn a_descriptor_that_lingers_is_closed_beside_the_reactor() {
    let closing = |close: fn(OwnedFd)| {
        let (fd, _peer) = lingering();
        let begun = Instant::now();
        close(fd);
        begun.elapsed()
    };
    assert!(closing(drop) > Duration::from_secs(1), "the socket does not linger");
    machine().block_on(async {
        let (fd, peer) = lingering();
        let begun = Instant::now();
        reactor::close_aside(fd);
        reactor::sleep(Duration::from_millis(10)).await;
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        drop(peer);
    });
}

#[test]
fn descriptors_arrive_with_the_bytes_that_they_were_sent_with() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    machine().block_on(async {
        let listener = Listener::bind_unix(&path).unwrap();
        let client = Stream::connect_unix(&path).await.unwrap();
        let server = listener.accept().await.unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        client.send_descriptors(b"one", &[file.as_fd()]).unwrap();
        client.send_descriptors(b"eight", &[file.as_fd(); 8]).unwrap();
        let mut fds = Vec::new();
        let mut bytes = [0; 16];
        // Bytes with other descriptors are not read together.
        assert_eq!(server.receive_some(&mut bytes, &mut fds).await.unwrap(), 3);
        assert_eq!((&bytes[..3], fds.len()), (&b"one"[..], 1));
        assert_eq!(server.receive_some(&mut bytes, &mut fds).await.unwrap(), 5);
        assert_eq!((&bytes[..5], fds.len()), (&b"eight"[..], 9));
        drop(client);
        assert_eq!(server.receive_some(&mut bytes, &mut fds).await.unwrap(), 0);
    });
}

/// Memory that others change, as the reactor sees it.
#[derive(Default)]
struct Flag {
    is_raised: Cell<bool>,
    waker: Cell<Option<std::task::Waker>>,
    sleeps: Cell<u32>,
}

impl reactor::Watched for Flag {
    fn look(&self) -> bool {
        self.is_raised.get() && self.waker.take().map(std::task::Waker::wake).is_some()
    }

    fn sleeps(&self, sleeps: bool) {
        self.sleeps.set(self.sleeps.get() + u32::from(sleeps));
    }
}

#[test]
fn what_is_watched_wakes_tasks_and_hears_of_sleep_until_it_is_dropped() {
    machine().block_on(async {
        let flag = Rc::new(Flag::default());
        reactor::watch(&flag);
        reactor::sleep(Duration::from_millis(5)).await;
        assert!(flag.sleeps.get() > 0, "never told");
        let raised = Rc::clone(&flag);
        let raising = reactor::spawn(async move {
            reactor::yield_now().await;
            raised.is_raised.set(true);
        });
        // No timer and no I/O: without a look this waits for ever.
        std::future::poll_fn(|cx| {
            flag.waker.set(Some(cx.waker().clone()));
            if flag.is_raised.get() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        raising.await;
        let weak = Rc::downgrade(&flag);
        drop(flag);
        assert!(weak.upgrade().is_none(), "the reactor holds what it watches");
        reactor::sleep(Duration::from_millis(1)).await;
    });
}

#[test]
fn connecting_where_nobody_listens_is_refused() {
    machine().block_on(async {
        let listener = Listener::bind(loopback()).unwrap();
        let addr = listener.local_addr().unwrap();
        drop(listener);
        let refused = Stream::connect(addr).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn dropped_operations_are_cancelled_and_free_their_buffers() {
    machine().block_on(async {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let reader = Fd::new(reader.into()).unwrap();
        for _ in 0..1000 {
            let read = reader.read(BufMut::zeroed(4096));
            let late = reactor::timeout(Duration::from_micros(1), read).await;
            assert!(late.is_err());
        }
        // A dropped accept leaves no half-open connection behind: the next one gets it.
        let listener = Listener::bind(loopback()).unwrap();
        let addr = listener.local_addr().unwrap();
        let late = reactor::timeout(Duration::from_millis(1), listener.accept()).await;
        assert!(late.is_err());
        let (client, server) =
            futures_util::future::join(Stream::connect(addr), listener.accept()).await;
        let (client, server) = (client.unwrap(), server.unwrap());
        client.write_all(Buf::copy_of(b"x").into_vec()).await.unwrap();
        assert_eq!(server.read(BufMut::zeroed(1)).await.unwrap().1, 1);
        writer.write_all(b"after").unwrap();
        let (buf, len) = reader.read(BufMut::zeroed(10)).await.unwrap();
        assert_eq!(&buf[..len], b"after");
    });
}

#[test]
fn a_killed_group_gives_up_its_operations() {
    machine().block_on(async {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let reader = Fd::new(reader.into()).unwrap();
        let group = Group::new();
        for _ in 0..10 {
            let reader = reader.clone();
            reactor::spawn_in(&group, async move {
                let _ = reader.read(BufMut::zeroed(4096)).await;
                unreachable!("nothing was written");
            });
        }
        reactor::sleep(Duration::from_millis(1)).await;
        group.kill();
        reactor::sleep(Duration::from_millis(1)).await;
        writer.write_all(b"ours").unwrap();
        let (buf, len) = reader.read(BufMut::zeroed(10)).await.unwrap();
        assert_eq!(&buf[..len], b"ours");
    });
}

#[test]
fn a_reactor_dropped_with_operations_in_flight_waits_for_the_kernel() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let (other_reader, other_writer) = std::io::pipe().expect("a pipe");
    let file = tempfile::NamedTempFile::new().unwrap();
    let reactor = machine();
    let outside = reactor.block_on(async {
        let other = Fd::new(other_reader.into()).unwrap();
        let reader = Fd::new(reader.into()).unwrap();
        let in_task = reader.clone();
        reactor::spawn(async move { in_task.read(BufMut::zeroed(1 << 20)).await });
        let options = OpenOptions { write: true, ..OpenOptions::default() };
        let file = File::open(file.path(), options).unwrap();
        for n in 0..50u64 {
            let file = file.clone();
            reactor::spawn(async move {
                file.write_at(n << 20, pattern(1 << 20, n).into_vec(), false).await
            });
        }
        reactor::yield_now().await;
        // Polled once, then carried out of the reactor: one with an operation in flight, one that
        // waits for its turn to submit one.
        let mut outside = [other, reader]
            .map(|reader| Box::pin(async move { reader.read(BufMut::zeroed(4096)).await }));
        for read in &mut outside {
            assert!(futures_util::poll!(read.as_mut()).is_pending());
        }
        outside
    });
    drop(reactor);
    let woken = std::task::Waker::noop();
    for mut read in outside {
        // Cancelled, but never hanging or touching freed memory.
        let polled = read.as_mut().poll(&mut std::task::Context::from_waker(woken));
        assert!(matches!(polled, std::task::Poll::Ready(Err(_))));
    }
    drop(other_writer);
    drop(writer);
}

#[test]
fn an_eventfd_and_a_pipe_wake_several_readers() {
    machine().block_on(async {
        // SAFETY: no memory is involved; the kernel just made this descriptor for us.
        let eventfd = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_SEMAPHORE)) };
        let fd = Fd::new(eventfd).unwrap();
        let readers: Vec<_> = (0..4)
            .map(|_| {
                let fd = fd.clone();
                reactor::spawn(async move { fd.read(BufMut::zeroed(8)).await.unwrap().1 })
            })
            .collect();
        reactor::sleep(Duration::from_millis(1)).await;
        fd.writev(Buf::copy_of(&4u64.to_ne_bytes()).into_vec()).await.unwrap();
        for reader in readers {
            assert_eq!(reader.await.unwrap(), 8);
        }
    });
}

#[test]
fn a_worker_and_the_reactor_take_turns() {
    machine().block_on(async {
        let mut worker = Worker::<u64, u64>::start("test", |port| {
            let mut sum = 0;
            for n in 0..1000 {
                sum = port.call(sum + n).expect("answered");
            }
        });
        let (mut calls, mut expected) = (0u64, 0);
        while let Some(message) = worker.next().await {
            expected += calls;
            assert_eq!(message, expected);
            calls += 1;
            worker.answer(message);
        }
        assert_eq!(calls, 1000);

        // The reactor sleeps when the worker ends without a word.
        let mut worker = Worker::<(), ()>::start("test", |port| {
            std::thread::sleep(Duration::from_millis(5));
            drop(port);
            std::thread::sleep(Duration::from_millis(5));
        });
        assert!(worker.next().await.is_none());
        // A worker that waits for an answer sees that nobody will give it.
        let mut worker = Worker::<(), ()>::start("test", |port| assert!(port.call(()).is_err()));
        worker.next().await.unwrap();
        drop(worker);
    });
}

#[test]
fn a_mailbox_takes_messages_from_many_threads() {
    machine().block_on(async {
        let (sender, mut mailbox) = mailbox::channel::<u64>().unwrap();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    for n in 0..5000 {
                        sender.send(thread * 5000 + n).unwrap();
                        if n % 100 == 0 {
                            std::thread::sleep(Duration::from_micros(50));
                        }
                    }
                })
            })
            .collect();
        drop(sender);
        let mut seen = Vec::new();
        while let Some(message) = mailbox.recv().await {
            seen.push(message);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..20_000).collect::<Vec<_>>());
        for thread in threads {
            thread.join().unwrap();
        }
        let (sender, mailbox) = mailbox::channel::<u64>().unwrap();
        drop(mailbox);
        assert_eq!(sender.send(1), Err(1));
    });
}

#[test]
fn two_reactors_talk_through_mailboxes() {
    enum Message {
        Hello(mailbox::Sender<u64>),
        Number(u64),
    }
    machine().block_on(async {
        let (to_main, mut from_other) = mailbox::channel().unwrap();
        let other = reactor::beside("other", Duration::ZERO, move || async move {
            let (to_other, mut from_main) = mailbox::channel::<u64>().unwrap();
            to_main.send(Message::Hello(to_other)).ok().unwrap();
            while let Some(n) = from_main.recv().await {
                to_main.send(Message::Number(n + 1)).ok().unwrap();
            }
        });
        let Some(Message::Hello(to_other)) = from_other.recv().await else { panic!("a hello") };
        for n in 0..200 {
            to_other.send(n).unwrap();
            let Some(Message::Number(answer)) = from_other.recv().await else { panic!("a number") };
            assert_eq!(answer, n + 1);
            if n % 20 == 0 {
                // Both sleep.
                reactor::sleep(Duration::from_millis(2)).await;
            }
        }
        drop(to_other);
        assert!(from_other.recv().await.is_none(), "it ends when nobody sends any more");
        other.unwrap().join().unwrap();
    });
}

/// Other processes have a bell of it, too, and could fill it so that it does not ring any more.
#[test]
fn a_message_wakes_a_reactor_whose_bell_for_others_is_full() {
    machine().block_on(async {
        let mut bell = std::fs::File::from(reactor::pipe::Bell::of_this_reactor().unwrap());
        bell.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        let full = bell.write(&1u64.to_ne_bytes()).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        let (sender, mut mailbox) = mailbox::channel::<Instant>().unwrap();
        let thread = std::thread::spawn(move || {
            for _ in 0..5 {
                // It sleeps by then.
                std::thread::sleep(Duration::from_millis(20));
                sender.send(Instant::now()).unwrap();
            }
        });
        for _ in 0..5 {
            let received = reactor::timeout(Duration::from_secs(20), mailbox.recv()).await;
            let sent = received.expect("long before").expect("sent");
            assert!(sent.elapsed() < Duration::from_secs(5), "woken by it, and not by a clock");
        }
        thread.join().unwrap();
    });
}

/// Whoever still has a sender of one that is gone disturbs nobody, also where another one has its place.
#[test]
fn mailboxes_come_and_go() {
    machine().block_on(async {
        let mut old = Vec::new();
        for round in 0..50u64 {
            let (sender, mut mailbox) = mailbox::channel::<u64>().unwrap();
            let ringing = old.clone();
            let thread = std::thread::spawn(move || {
                for gone in &ringing {
                    let gone: &mailbox::Sender<u64> = gone;
                    assert_eq!(gone.send(1), Err(1));
                }
                drop(ringing);
                sender.send(round).unwrap();
                sender
            });
            let received = reactor::timeout(Duration::from_secs(20), mailbox.recv()).await;
            assert_eq!(received.expect("long before"), Some(round));
            old.push(thread.join().unwrap());
        }
    });
}

/// Several of one reactor share its bell, and each hears what is its own, whether the reactor sleeps, polls or is busy.
#[test]
fn mailboxes_of_one_reactor_are_each_heard() {
    const EACH: u64 = 3000;
    machine().block_on(async {
        let heard = Rc::new(Cell::new(0));
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                let (sender, mut mailbox) = mailbox::channel::<u64>().unwrap();
                let heard = Rc::clone(&heard);
                let task = reactor::spawn(async move {
                    let mut next = 0;
                    while let Some(number) = mailbox.recv().await {
                        assert_eq!(number, next, "in order");
                        next += 1;
                        heard.set(heard.get() + 1);
                    }
                    assert_eq!(next, EACH);
                });
                let sending = std::thread::spawn(move || {
                    for number in 0..EACH {
                        sender.send(number).unwrap();
                        match number % 100 {
                            0 => std::thread::sleep(Duration::from_micros(50 * thread)),
                            1 => std::thread::yield_now(),
                            _ => {}
                        }
                    }
                });
                (task, sending)
            })
            .collect();
        for (task, sending) in threads {
            task.await.unwrap();
            sending.join().unwrap();
        }
        assert_eq!(heard.get(), 4 * EACH);
    });
}

#[test]
fn signals_are_events() {
    machine().block_on(async {
        let signals = Signals::new().unwrap();
        for (number, signal) in [
            (libc::SIGTERM, Signal::Terminate),
            (libc::SIGINT, Signal::Interrupt),
            (libc::SIGHUP, Signal::Hangup),
        ] {
            // SAFETY: sends a signal to this thread, which blocks it.
            unsafe { libc::raise(number) };
            assert_eq!(signals.recv().await.unwrap(), signal);
        }
        // A wait that was given up has not taken what came meanwhile.
        let mut given_up = Box::pin(signals.recv());
        assert!(futures_util::poll!(given_up.as_mut()).is_pending());
        // SAFETY: as above.
        unsafe { libc::raise(libc::SIGTERM) };
        reactor::sleep(Duration::from_millis(1)).await;
        drop(given_up);
        let again = reactor::timeout(Duration::from_secs(5), signals.recv()).await;
        assert_eq!(again.expect("it is still there").unwrap(), Signal::Terminate);
        let blocked = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap() >> (libc::SIGTERM - 1) & 1 == 1
        };
        assert!(blocked());
        signals.release();
        assert!(!blocked());
    });
}

#[test]
fn an_end_of_stream_wakes_a_reader_of_a_pipe() {
    machine().block_on(async {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let reader = Fd::new(reader.into()).unwrap();
        let read = reactor::spawn(async move { reader.read(BufMut::zeroed(8)).await.unwrap().1 });
        reactor::sleep(Duration::from_millis(1)).await;
        drop(writer);
        assert_eq!(read.await.unwrap(), 0);
    });
}
