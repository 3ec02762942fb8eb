//! Both sides over sockets, with what a network may do in between.

use levada_base::reactor::net::Stream;
use levada_base::reactor::{self, Reactor};
use levada_base::stream::ByteStream;
use levada_base::{Buf, BufMut};
use levada_nvme::Nqn;
use levada_nvme::tls::{PskIdentity, RetainedKey, Suite, TlsKey};
use levada_tls::{Acceptor, Channel, Connector, Session};
use openssl::ssl::{SslConnector, SslMethod, SslVerifyMode};
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

fn run<F: Future>(test: F) -> F::Output {
    let limited = async { reactor::timeout(Duration::from_secs(60), test).await };
    Reactor::new().expect("an io_uring").block_on(limited).expect("the test ends in time")
}

fn pair() -> (Stream, Stream) {
    let (one, other) = UnixStream::pair().expect("a pair");
    (Stream::adopt(one.into()), Stream::adopt(other.into()))
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).expect("a name")
}

fn retained(suite: Suite, seed: u8) -> RetainedKey {
    TlsKey::random(suite, &mut |key| key.fill(seed)).retained(&nqn("nqn.host"))
}

fn identity(suite: Suite) -> PskIdentity {
    PskIdentity::new(suite, nqn("nqn.host"), nqn("nqn.subsystem"))
}

fn connector(suite: Suite, seed: u8) -> Connector {
    let key = retained(suite, seed).shared(&identity(suite)).expect("short names");
    Connector::new(&identity(suite), key).expect("OpenSSL")
}

/// A target that knows the key of `seed` for the one host.
async fn accept(stream: Stream, seed: u8, suite: Suite) -> io::Result<Channel> {
    let acceptor = Acceptor::new().expect("OpenSSL");
    let find = move |named: &PskIdentity| {
        (named.host == nqn("nqn.host")).then(|| retained(suite, seed).shared(named)).flatten()
    };
    Channel::from(stream).secured(acceptor.session(&[], Rc::new(find))?).await
}

async fn connect(stream: Stream, connector: &Connector) -> io::Result<Channel> {
    Channel::from(stream).secured(connector.session()?).await
}

/// Hands on what comes from `from`, `piece` bytes at a time, until `left` are through or `from` has ended; then both are closed.
async fn relay(from: Stream, to: Stream, piece: usize, left: Rc<Cell<usize>>) {
    while let Ok((mut bytes, count)) = from.read(BufMut::for_overwrite(4096)).await {
        let mut bytes = bytes.split_to(count);
        while !bytes.is_empty() && left.get() > 0 {
            let some = bytes.split_to(piece.min(bytes.len()).min(left.get()));
            left.set(left.get() - some.len());
            if to.write_all(some.freeze().into_vec()).await.is_err() {
                break;
            }
        }
        if count == 0 || left.get() == 0 {
            break;
        }
    }
    from.close().await;
    to.close().await;
}

/// Two ends between which bytes are cut into pieces; after `left` of them there is nothing more.
fn through(piece: usize, left: usize) -> (Stream, Stream, Rc<Cell<usize>>) {
    let ((host, at_host), (target, at_target)) = (pair(), pair());
    let left = Rc::new(Cell::new(left));
    reactor::spawn(relay(at_host.clone(), at_target.clone(), piece, Rc::clone(&left)));
    reactor::spawn(relay(at_target, at_host, piece, Rc::clone(&left)));
    (host, target, left)
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect()
}

/// Says `bytes` one way and hears them the other, in pieces that fit records, and that do not.
async fn exchange(from: &Channel, to: &Channel, bytes: usize) {
    let said = pattern(bytes);
    let parts = said.chunks(bytes / 3 + 1).map(Buf::copy_of).collect();
    let saying = from.write_all(parts);
    let hearing = to.read_exact(BufMut::for_overwrite(bytes));
    let (sent, heard) = futures_util::future::join(saying, hearing).await;
    sent.expect("sent");
    assert!(heard.expect("heard")[..] == said, "{bytes} bytes");
}

#[test]
fn both_sides_agree_with_both_suites_and_in_pieces_of_any_size() {
    run(async {
        for suite in Suite::ALL {
            for piece in [1, 2, 3, 5, 21, 22, 1000, 4096] {
                let (host, target, _) = through(piece, usize::MAX);
                let connector = connector(suite, 1);
                let (accepted, connected) =
                    futures_util::future::join(accept(target, 1, suite), connect(host, &connector))
                        .await;
                let (accepted, connected) = (accepted.expect("agreed"), connected.expect("agreed"));
                assert_eq!(accepted.of_session(Session::host), Some(Some(identity(suite))));
                for bytes in [1, 24, 16 << 10, (16 << 10) + 1, 100_000] {
                    let bytes = bytes.min(piece * 5000);
                    exchange(&accepted, &connected, bytes).await;
                    exchange(&connected, &accepted, bytes).await;
                }
                connected.close().await;
                let (_, end) = accepted.read(BufMut::for_overwrite(9)).await.expect("a farewell");
                assert_eq!(end, 0);
            }
        }
    });
}

/// At no byte does a cut look like an end, or hang.
#[test]
fn a_connection_that_is_cut_anywhere_is_an_error_on_both_sides() {
    run(async {
        let suite = Suite::Aes128GcmSha256;
        let connector = connector(suite, 1);
        let mut whole = None;
        for left in 0..5000 {
            let (host, target, rest) = through(usize::MAX, left);
            let talk = async {
                let channel = connect(host, &connector).await?;
                channel.write_all(Buf::copy_of(b"said").into_vec()).await?;
                channel.read_exact(BufMut::for_overwrite(5)).await
            };
            let answer = async {
                let channel = accept(target, 1, suite).await?;
                let said = channel.read_exact(BufMut::for_overwrite(4)).await?;
                assert_eq!(&said[..], b"said");
                channel.write_all(Buf::copy_of(b"heard").into_vec()).await?;
                channel.read(BufMut::for_overwrite(1)).await
            };
            let (talked, answered) = futures_util::future::join(talk, answer).await;
            assert!(answered.is_err(), "cut after {left} bytes");
            if talked.is_ok() {
                whole = Some((left, rest.get()));
                break;
            }
        }
        assert!(whole.is_some_and(|(left, rest)| left > 500 && rest == 0), "{whole:?}");
    });
}

/// What each side says of a handshake that fails.
async fn refused(suite: Suite, host: Connector, seed: u8) -> (String, String) {
    let (at_host, at_target) = pair();
    let (accepted, connected) =
        futures_util::future::join(accept(at_target, seed, suite), connect(at_host, &host)).await;
    let said = |side: io::Result<Channel>| side.err().expect("refused").to_string();
    (said(accepted), said(connected))
}

#[test]
fn other_keys_are_refused_and_both_sides_say_why() {
    run(async {
        for suite in Suite::ALL {
            let (target, host) = refused(suite, connector(suite, 1), 2).await;
            assert!(target.contains("has another key for \"NVMe0R"), "{target}");
            assert!(host.contains("has another key"), "{host}");
        }
        let suite = Suite::Aes256GcmSha384;
        let stranger = PskIdentity::new(suite, nqn("nqn.stranger"), nqn("nqn.subsystem"));
        let key = retained(suite, 1).shared(&stranger).expect("short names");
        let stranger = Connector::new(&stranger, key).expect("OpenSSL");
        let (target, host) = refused(suite, stranger, 1).await;
        assert!(target.contains("no key here for \"NVMe0R02 nqn.stranger"), "{target}");
        assert!(host.contains("no key for this host"), "{host}");
    });
}

/// Not even one that would take any certificate.
#[test]
fn a_client_without_a_key_is_refused() {
    run(async {
        let (client, at_target) = UnixStream::pair().expect("a pair");
        let talking = std::thread::spawn(move || {
            let mut connector = SslConnector::builder(SslMethod::tls()).expect("OpenSSL");
            connector.set_verify(SslVerifyMode::NONE);
            connector.build().connect("target.example", client).is_err()
        });
        let at_target = Stream::adopt(at_target.into());
        let refused = accept(at_target, 1, Suite::Aes128GcmSha256).await;
        let told = refused.err().expect("refused").to_string();
        assert!(told.contains("names no key"), "{told}");
        assert!(talking.join().expect("no panic"), "it was let in");
    });
}

#[test]
fn what_is_no_tls_is_an_error_on_either_side() {
    run(async {
        let noise =
            [&b"GET / HTTP/1.0\r\n\r\n"[..], &[0; 128], &[22; 300], &[22, 3, 1, 0xff, 0xff]];
        for said in noise {
            let (other, at_target) = pair();
            other.write_all(Buf::copy_of(said).into_vec()).await.expect("sent");
            other.shutdown(std::net::Shutdown::Write).expect("ours");
            let suite = Suite::Aes128GcmSha256;
            assert!(accept(at_target, 1, suite).await.is_err(), "{said:?}");
            let (other, at_host) = pair();
            other.write_all(Buf::copy_of(said).into_vec()).await.expect("sent");
            other.shutdown(std::net::Shutdown::Write).expect("ours");
            assert!(connect(at_host, &connector(suite, 1)).await.is_err(), "{said:?}");
        }
    });
}

/// A byte that was changed on its way is never taken for what was sent.
#[test]
fn damaged_records_end_the_connection() {
    run(async {
        let suite = Suite::Aes256GcmSha384;
        let (host, target, _) = through(usize::MAX, usize::MAX);
        let connector = connector(suite, 1);
        let (accepted, connected) =
            futures_util::future::join(accept(target, 1, suite), connect(host, &connector)).await;
        let (accepted, connected) = (accepted.expect("agreed"), connected.expect("agreed"));
        // A record of the right shape, with nothing right in it.
        let mut record = vec![23, 3, 3, 0, 40];
        record.extend([7; 40]);
        connected.stream().write_all(Buf::copy_of(&record).into_vec()).await.expect("sent");
        assert!(accepted.read(BufMut::for_overwrite(9)).await.is_err());
        let told = connected.read(BufMut::for_overwrite(9)).await.expect_err("an alert");
        assert!(told.to_string().contains("alert 20"), "bad_record_mac: {told}");
    });
}
