//! A neighbour that does not keep to what was agreed: it harms itself and nobody else.

use futures_util::future::LocalBoxFuture;
use levada_base::checksum::crc32c;
use levada_base::ids::TargetId;
use levada_base::reactor::pipe::{Bell, Reader, Writer};
use levada_base::reactor::{self, Reactor, net};
use levada_base::shared::share_buffers;
use levada_base::{Buf, BufMut};
use levada_wire::frame::{Announced, Frame, HEADER_BYTES, Header, Kind, VERSION, encode_body};
use levada_wire::rpc::{
    Call, Handler, Hello, Peer, PeerConfig, Pusher, Reply, ServiceConfig, accept_all,
};
use levada_wire::same_host::{HostListener, HostTransport};
use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

const BYTES: usize = 1 << 20;
const GREETING: [u8; 8] = *b"LVDSHM\x02\x00";
const MAPPED: u16 = 1;

/// Answers with its own buffer, and notes where in the service's memory that lies.
#[derive(Default)]
struct Answering {
    places: RefCell<Vec<u64>>,
}

impl Handler for Answering {
    fn handle(&self, request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        let payload = filled(7).slice(0, request.header.reply_bytes_max as usize);
        self.places.borrow_mut().push(payload.shared_offset().expect("shared"));
        Box::pin(async move { Reply { payload: payload.into_vec(), ..Reply::new(Vec::new()) } })
    }
}

fn filled(byte: u8) -> Buf {
    let mut buf = BufMut::for_overwrite(BYTES);
    buf.fill(byte);
    buf.freeze()
}

struct Service {
    answering: Rc<Answering>,
    address: String,
}

impl Service {
    fn new() -> Self {
        let answering = Rc::new(Answering::default());
        let listener = HostListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().to_string();
        let handler = Rc::clone(&answering) as Rc<dyn Handler>;
        reactor::spawn(accept_all(Rc::new(listener), handler, ServiceConfig::default()));
        Self { answering, address }
    }

    /// Others are served as ever.
    async fn serves(&self) {
        let peer = Peer::new(Rc::new(HostTransport::new()), &self.address, PeerConfig::default());
        let call =
            Call { reply_bytes_max: BYTES as u32, ..Call::new(TargetId(1), b"request".to_vec()) };
        let limit = reactor::now() + Duration::from_secs(5);
        let reply = peer.call(&call, Some(limit)).await.expect("answered");
        assert_eq!(reply.payload_bytes(), BYTES);
    }
}

/// A neighbour's socket and pipes, without what makes a client of them.
struct Neighbour {
    stream: net::Stream,
    /// The service's memory and lifeline, as it offered them.
    theirs: Vec<OwnedFd>,
    reader: Reader,
    writer: Writer,
    /// The memory of `writer`.
    pipe: OwnedFd,
    /// The service holds the other end.
    _lifeline: Option<OwnedFd>,
}

impl Neighbour {
    async fn connect(service: &Service) -> Self {
        let name = format!("levada/{}", service.address);
        let stream = net::Stream::connect_abstract(name.as_bytes()).await.expect("connects");
        let mut greeting = [0; GREETING.len()];
        let mut theirs = stream.receive_descriptors(&mut greeting).await.expect("a greeting");
        assert_eq!((greeting, theirs.len()), (GREETING, 4));
        let mut next = || theirs.pop().expect("four");
        let (bell, pipe) = (next(), next());
        let again = bell.try_clone().expect("a descriptor");
        let reader = Reader::new(&pipe, Bell::new(again)).expect("a pipe");
        let (writer, pipe) = Writer::new().expect("a pipe");
        writer.set_bell(Bell::new(bell));
        Self { stream, theirs, reader, writer, pipe, _lifeline: None }
    }

    /// Offers `file` as its memory.
    fn offer(&mut self, file: &impl AsFd) {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let bell = Bell::of_this_reactor().expect("a bell");
        let fds = [file.as_fd(), writer.as_fd(), self.pipe.as_fd(), bell.as_fd()];
        self.stream.send_descriptors(&GREETING, &fds).expect("room");
        self._lifeline = Some(reader.into());
    }

    /// Offers what cannot be mapped: payloads travel by copy.
    fn offer_nothing(&mut self) {
        let device = std::fs::File::open("/dev/zero").expect("a device");
        self.offer(&device);
    }

    async fn send(&self, bytes: &[u8]) {
        let _ = self.writer.write_all(&Buf::copy_of(bytes).into_vec()).await;
    }

    /// Past the pipe.
    async fn send_over_the_socket(&self, bytes: &[u8]) {
        let _ = self.stream.write_all(Buf::copy_of(bytes).into_vec()).await;
    }

    async fn hello(&self, flags: u16) {
        let hello = Hello { version_min: VERSION, version_max: VERSION, cluster: [0; 16], node: 0 };
        let frame = Frame::new(Header::new(Kind::Hello), encode_body(&hello));
        self.send(&prefix(flags, &[], 0)).await;
        self.send(&frame.encode_head()).await;
    }

    async fn read(&self, bytes: usize) -> Option<Buf> {
        let reading = self.reader.read_exact(BufMut::for_overwrite(bytes));
        let read = reactor::timeout(Duration::from_secs(5), reading).await.expect("in time");
        read.ok().map(BufMut::freeze)
    }

    /// The next frame's header, the places where its payload lies, and what was copied of it.
    async fn receive(&self) -> Option<(Announced, usize, Option<Buf>)> {
        let head = self.read(8).await?;
        let (returns, parts) = (usize::from(head[2]), usize::from(head[4]));
        if returns > 0 {
            self.read(returns * 8).await?;
        }
        let header = self.read(HEADER_BYTES).await?;
        let announced = Announced::decode(header.first_chunk().expect("whole")).expect("sound");
        if announced.body_bytes > 0 {
            self.read(announced.body_bytes).await?;
        }
        if parts > 0 {
            self.read(parts * 16).await?;
        }
        let copied = match announced.payload_bytes {
            bytes if parts == 0 && bytes > 0 => Some(self.read(bytes).await?),
            _ => None,
        };
        Some((announced, parts, copied))
    }

    /// The service ends the connection.
    async fn is_dismissed(&self) -> bool {
        let reading = self.stream.read(BufMut::for_overwrite(1));
        match reactor::timeout(Duration::from_secs(5), reading).await {
            Ok(read) => read.is_err() || matches!(read, Ok((_, 0))),
            Err(_) => false,
        }
    }
}

fn prefix(flags: u16, returns: &[u64], parts: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in [flags, returns.len() as u16, parts, 0] {
        bytes.extend(field.to_le_bytes());
    }
    returns.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes
}

/// A request whose payload of `bytes` bytes lies at `places`.
fn request(bytes: usize, places: &[(u64, u64)]) -> Vec<u8> {
    let mut header = Header::new(Kind::Request);
    (header.request, header.reply_bytes_max) = (1, BYTES as u32 / 2);
    let payload = BufMut::zeroed(bytes).freeze().into_vec();
    let mut head = Frame { header, body: Vec::new(), payload }.encode_head().to_vec();
    head[104..108].fill(0);
    let sum = crc32c(&head[..HEADER_BYTES - 4]);
    head[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
    let mut all = prefix(MAPPED, &[], places.len() as u16);
    all.extend(head);
    for (offset, len) in places {
        all.extend(offset.to_le_bytes());
        all.extend(len.to_le_bytes());
    }
    all
}

fn ask(flags: u16, reply_bytes_max: usize) -> Vec<u8> {
    let mut header = Header::new(Kind::Request);
    (header.request, header.reply_bytes_max) = (1, reply_bytes_max as u32);
    let mut all = prefix(flags, &[], 0);
    all.extend_from_slice(&Frame::new(header, Vec::new()).encode_head());
    all
}

#[test]
fn places_that_are_not_there_end_the_connection() {
    Reactor::new().expect("io_uring").block_on(async {
        let service = Service::new();
        let own = share_buffers().expect("memory");
        let end = own.file.try_clone().map(std::fs::File::from).expect("a file");
        let end = end.metadata().expect("its size").len();
        let many: Vec<(u64, u64)> = (0..257).map(|n| (n * 4096, 4096)).collect();
        let wrong: &[(&str, Vec<u8>)] = &[
            ("beyond the end", request(BYTES, &[(end - 4096, BYTES as u64)])),
            ("far beyond", request(BYTES, &[(u64::MAX - 10, BYTES as u64)])),
            ("a sum that overflows", request(BYTES, &[(0, u64::MAX), (0, BYTES as u64 + 1)])),
            ("less than announced", request(BYTES, &[(0, 4096)])),
            ("more than announced", request(4096, &[(0, BYTES as u64)])),
            ("a part of nothing", request(4096, &[(0, 0), (0, 4096)])),
            ("nothing at all", request(0, &[(0, 0)])),
            ("too many parts", request(257 * 4096, &many)),
            ("too many returns", prefix(MAPPED, &[1; 513], 0)),
            ("an unknown flag", prefix(2, &[], 0)),
            ("a field to come", vec![0, 0, 0, 0, 0, 0, 1, 0]),
        ];
        for (what, bytes) in wrong {
            let mut neighbour = Neighbour::connect(&service).await;
            neighbour.offer(&own.file);
            neighbour.hello(MAPPED).await;
            neighbour.receive().await.expect("a welcome");
            neighbour.send(bytes).await;
            assert!(neighbour.is_dismissed().await, "{what}");
        }
        let mut one = Neighbour::connect(&service).await;
        one.offer_nothing();
        one.hello(0).await;
        one.receive().await.expect("a welcome");
        one.send(&request(BYTES, &[(0, BYTES as u64)])).await;
        assert!(one.is_dismissed().await, "there is no memory of it");
        service.serves().await;
    });
}

#[test]
fn what_is_no_offer_is_no_reason_to_share() {
    Reactor::new().expect("io_uring").block_on(async {
        let service = Service::new();
        let can_be_cut = tempfile::tempfile().expect("a file");
        can_be_cut.set_len(1 << 20).expect("as long");
        let pipe = std::io::pipe().expect("a pipe").0;
        let device = std::fs::File::open("/dev/zero").expect("a device");
        for file in [can_be_cut.as_fd(), pipe.as_fd(), device.as_fd()] {
            let mut neighbour = Neighbour::connect(&service).await;
            neighbour.offer(&file);
            neighbour.hello(0).await;
            neighbour.receive().await.expect("served, by copy");
            neighbour.send(&request(4096, &[(0, 4096)])).await;
            assert!(neighbour.is_dismissed().await, "nothing of it is mapped");
        }
        let stranger = Neighbour::connect(&service).await;
        stranger.send_over_the_socket(b"GET / HTTP/1.1\r\n\r\n").await;
        assert!(stranger.is_dismissed().await);
        // Memory without pipes; and what is no pipe.
        let bare = Neighbour::connect(&service).await;
        bare.stream.send_descriptors(&GREETING, &[device.as_fd()]).expect("room");
        assert!(bare.is_dismissed().await);
        let mut other = Neighbour::connect(&service).await;
        other.pipe = std::fs::File::open("/dev/zero").expect("a device").into();
        other.offer_nothing();
        assert!(other.is_dismissed().await);
        // Says nothing, or half of it.
        let silent = Neighbour::connect(&service).await;
        let short = Neighbour::connect(&service).await;
        short.send_over_the_socket(&GREETING[..3]).await;
        assert!(short.is_dismissed().await);
        service.serves().await;
        drop(silent);
    });
}

/// A neighbour that let go, or never held anything, cannot see what is handed over: so nothing is, and
/// the memory does not wait for it for ever.
#[test]
fn nothing_is_handed_to_one_that_let_go() {
    Reactor::new().expect("io_uring").block_on(async {
        let service = Service::new();
        let own = share_buffers().expect("memory");
        let mut neighbour = Neighbour::connect(&service).await;
        neighbour.offer(&own.file);
        neighbour.hello(MAPPED).await;
        neighbour.receive().await.expect("a welcome");
        neighbour.send(&ask(MAPPED, BYTES)).await;
        let (_, parts, _) = neighbour.receive().await.expect("a reply");
        assert_eq!(parts, 1, "handed over");
        neighbour.theirs.clear();
        reactor::sleep(Duration::from_millis(20)).await;
        neighbour.send(&ask(MAPPED, BYTES)).await;
        let (announced, parts, copied) = neighbour.receive().await.expect("a reply");
        assert_eq!((announced.payload_bytes, parts), (BYTES, 0), "by copy");
        assert!(copied.expect("copied").iter().all(|byte| *byte == 7));
        drop(neighbour);
        reactor::sleep(Duration::from_millis(20)).await;
        // What was handed over can be used again, every time.
        let used: Vec<u64> = service.answering.places.take();
        let again: Vec<Buf> = (0..8).map(|_| filled(1)).collect();
        let places: Vec<_> = again.iter().filter_map(Buf::shared_offset).collect();
        assert!(used.iter().all(|place| places.contains(place)), "{used:?} in {places:?}");
    });
}

/// One that asks for more than its pipe holds, and reads nothing for a while.
#[test]
fn a_neighbour_that_does_not_read_holds_up_nobody() {
    Reactor::new().expect("io_uring").block_on(async {
        let service = Service::new();
        let mut neighbour = Neighbour::connect(&service).await;
        neighbour.offer_nothing();
        neighbour.hello(0).await;
        for _ in 0..8 {
            neighbour.send(&ask(0, BYTES)).await;
        }
        service.serves().await;
        neighbour.receive().await.expect("a welcome");
        for _ in 0..8 {
            let (_, parts, copied) = neighbour.receive().await.expect("a reply");
            assert!(parts == 0 && copied.is_some());
        }
        service.serves().await;
    });
}

/// Answers to pings take no credits: one that only asks must not make the service store them up.
#[test]
fn pings_are_not_answered_as_fast_as_they_come() {
    Reactor::new().expect("io_uring").block_on(async {
        let service = Service::new();
        let mut neighbour = Neighbour::connect(&service).await;
        neighbour.offer_nothing();
        neighbour.hello(0).await;
        neighbour.receive().await.expect("a welcome");
        let mut many = Vec::new();
        for _ in 0..3000 {
            many.extend(prefix(0, &[], 0));
            many.extend_from_slice(&Frame::new(Header::new(Kind::Ping), Vec::new()).encode_head());
        }
        let begun = reactor::now();
        neighbour.send(&many).await;
        neighbour.send(&ask(0, 4096)).await;
        let mut pongs = 0;
        while neighbour.receive().await.expect("a frame").0.header.kind == Kind::Pong {
            pongs += 1;
        }
        let tenths = (begun.elapsed().as_millis() / 100) as usize;
        assert!((1..=2 + tenths).contains(&pongs), "{pongs} answers");
        service.serves().await;
    });
}

/// What waits to be sent counts as in flight: else one that asks and never reads would make the service
/// store up as many answers as it likes.
#[test]
fn one_that_asks_and_never_reads_is_dismissed() {
    Reactor::new().expect("io_uring").block_on(async {
        let service = Service::new();
        let mut neighbour = Neighbour::connect(&service).await;
        neighbour.offer_nothing();
        neighbour.hello(0).await;
        // 64 MiB are granted. In the end nobody takes what it sends either.
        reactor::spawn(async move {
            for _ in 0..400 {
                neighbour.send(&ask(0, BYTES)).await;
            }
        });
        let answers = || service.answering.places.borrow().len();
        let mut answered = 0;
        while answered < 64 || answers() > answered {
            answered = answers();
            reactor::sleep(Duration::from_millis(300)).await;
        }
        assert!((64..100).contains(&answered), "{answered} answers of 1 MiB");
        service.serves().await;
    });
}
