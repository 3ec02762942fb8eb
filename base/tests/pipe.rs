//! Pipes in memory, between threads with a reactor each: bytes arrive whole and in order, and nobody sleeps over them.

use levada_base::reactor::pipe::{Bell, Reader, Writer};
use levada_base::reactor::{self, Reactor};
use levada_base::{Buf, BufMut, IoVec};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// More than any pipe holds.
const MUCH: usize = 3 << 20;

/// Who waits longer would wait for ever.
const LIMIT: Duration = Duration::from_secs(60);

/// Bytes that tell their place.
fn pattern(from: usize, bytes: usize) -> Vec<u8> {
    (from..from + bytes).map(|at| (at * 31 + (at >> 9)) as u8).collect()
}

fn parts(bytes: Vec<u8>) -> IoVec {
    let mut parts = IoVec::new();
    parts.push(Buf::copy_of(&bytes));
    parts
}

/// Runs both ends on threads of their own; each gives its bell away first.
fn between<W, R>(write: W, read: R)
where
    W: AsyncFnOnce(Writer) + Send + 'static,
    R: AsyncFnOnce(Reader) + Send + 'static,
{
    let (to_reader, offered) = mpsc::channel::<(OwnedFd, OwnedFd)>();
    let (to_writer, bell) = mpsc::channel::<OwnedFd>();
    let writer = std::thread::spawn(move || {
        Reactor::new().expect("an io_uring").block_on(async {
            let (writer, memory) = Writer::new().expect("a pipe");
            let own = Bell::of_this_reactor().expect("a bell");
            to_reader.send((memory, own)).expect("taken");
            writer.set_bell(Bell::new(bell.recv().expect("given")));
            reactor::timeout(LIMIT, write(writer)).await.expect("in time");
        });
    });
    let reader = std::thread::spawn(move || {
        Reactor::new().expect("an io_uring").block_on(async {
            let (memory, bell) = offered.recv().expect("given");
            let reader = Reader::new(&memory, Bell::new(bell)).expect("the memory of a pipe");
            to_writer.send(Bell::of_this_reactor().expect("a bell")).expect("taken");
            reactor::timeout(LIMIT, read(reader)).await.expect("in time");
        });
    });
    writer.join().expect("wrote");
    reader.join().expect("read");
}

#[test]
fn more_than_fits_arrives_whole_and_in_order() {
    between(
        async |writer| {
            let (mut at, mut step) = (0, 1);
            while at < MUCH {
                let bytes = step.min(MUCH - at);
                writer.write_all(&parts(pattern(at, bytes))).await.expect("written");
                (at, step) = (at + bytes, step * 7 % 400_009);
            }
        },
        async |reader| {
            let (mut at, mut step) = (0, 13);
            while at < MUCH {
                let room = BufMut::for_overwrite(step.min(MUCH - at));
                let (got, bytes) = reader.read(room).await.expect("read");
                assert!(bytes > 0 && got[..bytes] == pattern(at, bytes), "at {at}");
                (at, step) = (at + bytes, step * 5 % 100_003);
            }
        },
    );
}

/// Who sleeps is woken: each side waits long enough for the other to be asleep.
#[test]
fn a_reader_and_a_writer_that_sleep_are_woken() {
    let asleep = Duration::from_millis(30);
    between(
        async move |writer| {
            for number in 0..5 {
                reactor::sleep(asleep).await;
                writer.write_all(&parts(vec![number])).await.expect("written");
            }
            // Sleeps until there is room.
            writer.write_all(&parts(pattern(0, 1 << 20))).await.expect("written");
        },
        async move |reader| {
            for number in 0..5 {
                let began = Instant::now();
                let got = reader.read_exact(BufMut::for_overwrite(1)).await.expect("read");
                assert_eq!(got[..], [number]);
                assert!(began.elapsed() < Duration::from_secs(5), "by a timer, if at all");
            }
            reactor::sleep(asleep).await;
            let all = reader.read_exact(BufMut::for_overwrite(1 << 20)).await.expect("read");
            assert!(all[..] == pattern(0, 1 << 20));
        },
    );
}

/// Two that answer each other, as fast as they can and with pauses in which both go to sleep.
#[test]
fn no_wake_up_is_lost_in_many_rounds() {
    let (there, back) = (mpsc::channel(), mpsc::channel());
    let player = |first: bool, out: mpsc::Sender<_>, into: mpsc::Receiver<_>| {
        std::thread::spawn(move || {
            Reactor::new().expect("an io_uring").block_on(async {
                let (writer, memory) = Writer::new().expect("a pipe");
                let own = Bell::of_this_reactor().expect("a bell");
                out.send((memory, own)).expect("taken");
                let (memory, bell): (OwnedFd, OwnedFd) = into.recv().expect("given");
                let reader =
                    Reader::new(&memory, Bell::new(bell.try_clone().expect("a descriptor")))
                        .expect("the memory of a pipe");
                writer.set_bell(Bell::new(bell));
                let rounds = async {
                    for round in 0..20_000u32 {
                        if first {
                            writer
                                .write_all(&parts(round.to_le_bytes().into()))
                                .await
                                .expect("sent");
                        }
                        let got =
                            reader.read_exact(BufMut::for_overwrite(4)).await.expect("received");
                        assert_eq!(got[..], round.to_le_bytes());
                        if !first {
                            // Now and then longer than the other polls.
                            if round % 512 == 0 {
                                reactor::sleep(Duration::from_millis(2)).await;
                            }
                            writer
                                .write_all(&parts(round.to_le_bytes().into()))
                                .await
                                .expect("sent");
                        }
                    }
                };
                reactor::timeout(LIMIT, rounds).await.expect("in time");
            });
        })
    };
    let one = player(true, there.0, back.1);
    let other = player(false, back.0, there.1);
    one.join().expect("played");
    other.join().expect("played");
}

#[test]
fn what_was_written_before_the_end_is_read() {
    Reactor::new().expect("an io_uring").block_on(async {
        let (writer, memory) = Writer::new().expect("a pipe");
        let bell = || Bell::new(Bell::of_this_reactor().expect("a bell"));
        let reader = Reader::new(&memory, bell()).expect("the memory of a pipe");
        writer.set_bell(bell());
        writer.write_all(&parts(pattern(0, 100))).await.expect("written");
        reader.close();
        let (got, bytes) = reader.read(BufMut::for_overwrite(200)).await.expect("read");
        assert!(bytes == 100 && got[..100] == pattern(0, 100));
        let (_, bytes) = reader.read(BufMut::for_overwrite(200)).await.expect("read");
        assert_eq!(bytes, 0, "the end");
        let writing = reactor::spawn({
            let writer = writer.clone();
            async move { writer.write_all(&parts(pattern(0, 1 << 20))).await }
        });
        reactor::sleep(Duration::from_millis(1)).await;
        assert!(!writing.is_finished(), "there is no room");
        writer.close();
        let refused = writing.await.expect("not killed").map_err(|error| error.kind());
        assert_eq!(refused, Err(ErrorKind::BrokenPipe));
    });
}

/// Counts that cannot be are an error, not a reading of what was never written.
#[test]
fn a_neighbour_that_counts_wrong_ends_the_pipe() {
    Reactor::new().expect("an io_uring").block_on(async {
        let (writer, memory) = Writer::new().expect("a pipe");
        let bell = || Bell::new(Bell::of_this_reactor().expect("a bell"));
        let reader = Reader::new(&memory, bell()).expect("the memory of a pipe");
        let memory = std::fs::File::from(memory);
        let kind = |result: io::Result<()>| result.map_err(|error| error.kind());
        for wrong in [u64::MAX, (256 << 10) + 1] {
            memory.write_all_at(&wrong.to_le_bytes(), 0).expect("written");
            let read = reader.read(BufMut::for_overwrite(8)).await.map(drop);
            assert_eq!(kind(read), Err(ErrorKind::InvalidData), "{wrong} bytes written");
        }
        for wrong in [1u64, u64::MAX - (256 << 10)] {
            memory.write_all_at(&wrong.to_le_bytes(), 64).expect("written");
            let written = writer.write_all(&parts(vec![1])).await;
            assert_eq!(kind(written), Err(ErrorKind::InvalidData), "{wrong} bytes taken");
        }
        let short = std::fs::File::open("/dev/null").expect("opens").into();
        assert!(Reader::new(&short, bell()).is_err(), "no memory of a pipe");
    });
}
