//! Hosts that come within TLS, and those that should.

use crate::host::{Connecting, Host, Queue, log_page, nqn};
use crate::{Served, run};
use levada_base::reactor::net::Stream;
use levada_base::stream::ByteStream;
use levada_base::{Buf, BufMut, reactor};
use levada_device::nvme::{Host as Initiator, NvmeNamespace, NvmeUrl, Options};
use levada_device::{Device, Durability};
use levada_export_nvmet::Hosts;
use levada_nvme::fabrics::{ANY_CONTROLLER, Configuration, Property, PropertyAccess};
use levada_nvme::keyring::{HostKeys, Keyring};
use levada_nvme::log::{DISCOVERY_HEADER_BYTES, LogPage, parse_discovery_entries};
use levada_nvme::pdu::Digests;
use levada_nvme::tls::{PskIdentity, RetainedKey, Suite, TlsKey};
use levada_nvme::{Completion, DISCOVERY_NQN, Nqn, Status};
use levada_tls::{Channel, Connector};
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

fn key(suite: Suite, seed: u8) -> TlsKey {
    TlsKey::random(suite, &mut |key| key.fill(seed))
}

fn retained(suite: Suite, seed: u8) -> RetainedKey {
    key(suite, seed).retained(&Connecting::new(1).host)
}

/// A target that knows a key of host 1, and lets host 2 in without one.
fn served(suite: Suite) -> Served {
    let keys = HostKeys { secrets: None, tls: Some(retained(suite, 1)) };
    let keyring = Keyring::from([(Connecting::new(1).host, keys)]);
    Served::for_hosts(64, Hosts::only([Connecting::new(2).host], keyring))
}

/// Shakes hands as `host`, for `subsystem`.
async fn within(served: &Served, key: &RetainedKey, host: &Nqn, subsystem: &Nqn) -> Channel {
    let identity = PskIdentity::new(key.suite(), host.clone(), subsystem.clone());
    let connector = Connector::new(&identity, key.shared(&identity).expect("short names"));
    let stream = Stream::connect(served.path.address()).await.expect("the target listens");
    let session = connector.expect("OpenSSL").session().expect("memory");
    Channel::from(stream).secured(session).await.expect("the key is right")
}

async fn enable(admin: &mut Queue) {
    let enable = u64::from(Configuration::ENABLED.0);
    let enable = PropertyAccess::set(Property::Configuration, enable, admin.new_id());
    assert!(admin.ask(enable, None).await.expect("an answer").0.status.is_success());
}

/// Connects both queues of a host within TLS.
async fn secure_host(served: &Served, key: &RetainedKey, connecting: &Connecting) -> Host {
    let subsystem = served.subsystem.nqn();
    let open = async || {
        let channel = within(served, key, &connecting.host, subsystem).await;
        Queue::open_on(channel, connecting.digests).await
    };
    let mut admin = open().await;
    let controller = connecting.queue(&mut admin, subsystem, (ANY_CONTROLLER, 0)).await;
    let controller = controller.expect("admitted");
    enable(&mut admin).await;
    let mut io = open().await;
    connecting.queue(&mut io, subsystem, (controller, 1)).await.expect("admitted");
    Host { admin, io, controller }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect()
}

/// The answer to Connect in the clear.
async fn in_the_clear(served: &Served, number: u8, subsystem: &Nqn) -> Result<u16, Completion> {
    let mut queue = Queue::open(served.path.address(), Digests::default()).await;
    Connecting::new(number).queue(&mut queue, subsystem, (ANY_CONTROLLER, 0)).await
}

#[test]
fn a_host_with_a_key_is_served_within_tls_with_either_suite() {
    run(async {
        for suite in Suite::ALL {
            for digests in [Digests::default(), Digests { header: true, data: true }] {
                let served = served(suite);
                let connecting = Connecting { digests, ..Connecting::new(1) };
                let mut host = secure_host(&served, &retained(suite, 1), &connecting).await;
                let data = pattern(48 * 4096);
                assert!(host.write(3, &data).await.is_success());
                assert!(host.flush().await.is_success());
                assert!(host.read(3, 48).await == Ok(data));
            }
        }
    });
}

#[test]
fn a_host_with_a_key_is_refused_in_the_clear_and_others_need_none() {
    run(async {
        let refused = Status::CONNECT_INVALID_HOST.and_do_not_retry();
        let served = served(Suite::Aes128GcmSha256);
        let subsystem = served.subsystem.nqn().clone();
        let clear = in_the_clear(&served, 1, &subsystem).await;
        assert_eq!(clear.map_err(|answer| answer.status), Err(refused));
        in_the_clear(&served, 2, &subsystem).await.expect("it has no key");
        // What is found in the clear says what it takes.
        let discovery = nqn(DISCOVERY_NQN);
        let mut queue = Queue::open(served.path.address(), Digests::default()).await;
        let connecting = Connecting::new(1);
        connecting.queue(&mut queue, &discovery, (ANY_CONTROLLER, 0)).await.expect("anybody");
        enable(&mut queue).await;
        let page = log_page(&mut queue, LogPage::Discovery as u8, 2048).await.expect("a page");
        let found: Vec<_> = parse_discovery_entries(&page[DISCOVERY_HEADER_BYTES..]).collect();
        assert!(found.len() == 1 && found[0].needs_tls, "{found:?}");
        // Nobody, and not even to look, where nothing goes in the clear.
        served.target.require_tls();
        for (number, subsystem) in [(1, &subsystem), (2, &subsystem), (2, &discovery)] {
            let clear = in_the_clear(&served, number, subsystem).await;
            assert_eq!(clear.map_err(|answer| answer.status), Err(refused), "{subsystem}");
        }
        let key = retained(Suite::Aes128GcmSha256, 1);
        let channel = within(&served, &key, &connecting.host, &discovery).await;
        let mut queue = Queue::open_on(channel, Digests::default()).await;
        let found = connecting.queue(&mut queue, &discovery, (ANY_CONTROLLER, 0)).await;
        found.expect("discovery within TLS");
    });
}

#[test]
fn a_host_is_who_its_key_says_and_goes_where_that_is_for() {
    run(async {
        let refused = Status::CONNECT_INVALID_HOST.and_do_not_retry();
        let served = served(Suite::Aes256GcmSha384);
        let (subsystem, discovery) = (served.subsystem.nqn(), nqn(DISCOVERY_NQN));
        let (key, host) = (retained(Suite::Aes256GcmSha384, 1), Connecting::new(1).host);
        for (named, number, asked) in [(subsystem, 2, subsystem), (&discovery, 1, subsystem)] {
            let channel = within(&served, &key, &host, named).await;
            let mut queue = Queue::open_on(channel, Digests::default()).await;
            let other = Connecting::new(number);
            let answer = other.queue(&mut queue, asked, (ANY_CONTROLLER, 0)).await;
            assert_eq!(answer.map_err(|answer| answer.status), Err(refused));
        }
        // Who has another key from now on is not connected any more.
        let host = secure_host(&served, &key, &Connecting::new(1)).await;
        let keys = HostKeys { secrets: None, tls: Some(retained(Suite::Aes256GcmSha384, 9)) };
        let keyring = Keyring::from([(Connecting::new(1).host, keys)]);
        served.subsystem.set_hosts(Hosts::only([], keyring));
        assert!(host.io.hear().await.is_err());
    });
}

/// One that shakes no hands is let go, and keeps nobody else waiting.
#[test]
fn half_a_handshake_ends_when_its_time_is_over() {
    run(async {
        let suite = Suite::Aes128GcmSha256;
        let served = served(suite);
        let address = served.path.address();
        let hello = [22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
        let (cut, late) = (Stream::connect(address).await, Stream::connect(address).await);
        let (cut, late) = (cut.expect("listens"), late.expect("listens"));
        for stream in [&cut, &late] {
            stream.write_all(Buf::copy_of(&hello).into_vec()).await.expect("sent");
        }
        cut.close().await;
        let mut host = secure_host(&served, &retained(suite, 1), &Connecting::new(1)).await;
        assert!(host.write(0, &pattern(4096)).await.is_success());
        let begun = reactor::now();
        let (_, heard) = late.read(BufMut::for_overwrite(64)).await.expect("closed");
        assert_eq!(heard, 0);
        let waited = begun.elapsed();
        assert!(waited > Duration::from_secs(8) && waited < Duration::from_secs(15), "{waited:?}");
        assert!(host.read(0, 1).await.is_ok());
    });
}

/// A file of keys, and the URL of the served namespace for host 1 with it.
struct Files {
    path: std::path::PathBuf,
}

impl Files {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("levada-nvmet-{}-{name}", std::process::id()));
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("ours");
        Self { path }
    }

    fn url(&self, served: &Served, more: &str) -> NvmeUrl {
        let (address, subsystem) = (served.path.address(), served.subsystem.nqn());
        let (host, keys) = (Connecting::new(1).host, self.path.display());
        let url = format!("nvme+tcp://{address}/{subsystem}?host={host}&keys={keys}{more}");
        url.parse().expect("a URL")
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn open(url: &NvmeUrl) -> Result<NvmeNamespace, String> {
    let host = Initiator::anonymous().expect("a name");
    let opened = NvmeNamespace::open(url, Options::new(host)).await;
    opened.map_err(|error| error.to_string())
}

#[test]
fn our_own_host_comes_with_tls_and_says_why_it_cannot() {
    run(async {
        let host = Connecting::new(1).host;
        for suite in Suite::ALL {
            let served = served(suite);
            let right = Files::new("right", &format!("{host} {}\n", key(suite, 1).reveal()));
            for more in ["", "&tls=1", "&tls=1&hdgst=1&ddgst=1"] {
                let device = open(&right.url(&served, more)).await.expect("connected");
                let data = Buf::copy_of(&pattern(32 * 4096));
                device
                    .write(4096, data.clone().into_vec(), Durability::Fua)
                    .await
                    .expect("written");
                let read = device.read(4096, BufMut::for_overwrite(32 * 4096).into_vec()).await;
                assert!(read.expect("read")[0][..] == data[..]);
            }
            let said = open(&right.url(&served, "&tls=0")).await.err().expect("in the clear");
            assert!(said.contains("does not let host") && said.contains("or want TLS"), "{said}");
            let wrong = Files::new("wrong", &format!("{host} {}\n", key(suite, 2).reveal()));
            let said = open(&wrong.url(&served, "")).await.err().expect("another key");
            assert!(said.contains("it has another key"), "{said}");
            // A target without keys does not know it.
            let plain = Served::new(64);
            let said = open(&right.url(&plain, "")).await.err().expect("no key there");
            assert!(said.contains("it has no key for this host"), "{said}");
        }
        let secret = levada_nvme::authentication::Secret::random(None, &mut |key| key.fill(1));
        let none = Files::new("none", &format!("{host} {}\n", secret.reveal()));
        let said = open(&none.url(&Served::new(64), "&tls=1")).await.err().expect("no key");
        assert!(said.contains("has no key of TLS"), "{said}");
    });
}

/// OpenSSL's own client shakes hands, and agrees on how units are built.
#[test]
fn a_client_of_another_make_shakes_hands() {
    let openssl = Command::new("openssl").arg("version").stdout(Stdio::null()).status();
    if !openssl.is_ok_and(|status| status.success()) {
        eprintln!("there is no openssl on this machine: not tried");
        return;
    }
    run(async {
        // Its option for keys is for SHA-256 alone.
        let suite = Suite::Aes128GcmSha256;
        let served = served(suite);
        let (host, subsystem) = (Connecting::new(1).host, served.subsystem.nqn().clone());
        let identity = PskIdentity::new(suite, host, subsystem);
        let shared = retained(suite, 1).shared(&identity).expect("short names");
        let mut hex = String::new();
        shared.key.iter().for_each(|byte| write!(hex, "{byte:02x}").expect("memory"));
        let mut client = Command::new("openssl")
            .args(["s_client", "-quiet", "-tls1_3", "-psk", &hex])
            .args(["-psk_identity", &identity.to_string()])
            .args(["-connect", &served.path.address().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("openssl runs");
        let mut request = [0; 128];
        // An initialization of 128 bytes, without digests (TCP, 3.6.2.2).
        (request[2], request[4]) = (128, 128);
        client.stdin.as_mut().expect("piped").write_all(&request).expect("said");
        let mut said = client.stdout.take().expect("piped");
        let hearing = std::thread::spawn(move || {
            let mut answer = [0; 128];
            said.read_exact(&mut answer).map(|()| answer)
        });
        while !hearing.is_finished() {
            reactor::sleep(Duration::from_millis(10)).await;
        }
        let answer = hearing.join().expect("no panic");
        let _ = (client.kill(), client.wait());
        assert_eq!(answer.expect("an answer")[..3], [1, 0, 128], "an answer to it");
    });
}
