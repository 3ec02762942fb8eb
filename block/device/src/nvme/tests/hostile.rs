//! Targets that say what they should not: nothing is lost, nothing hangs, and nothing but data is taken for data.

use crate::nvme::queue::{Answered, Queue, QueueError, Request, Terms, Unanswered};
use levada_base::reactor::{self, Reactor};
use levada_base::stream::{ByteStream, Inbox, MemoryStream};
use levada_base::{Buf, BufMut, IoVecMut};
use levada_nvme::pdu::{Digests, Fatal, Framing, Initialize, Kind, Pdu, Terminated, Transfer};
use levada_nvme::{Command, Completion, IoOpcode, Status};
use proptest::prelude::*;
use std::rc::Rc;
use std::time::Duration;

fn terms(digests: Digests) -> Terms {
    let settle = Duration::from_secs(20);
    Terms { digests, commands: 4, in_capsule_bytes: 0, settle, host_id: [1; 16] }
}

/// A queue, and the other end of its connection, after both have greeted each other.
async fn greeted(
    digests: Digests,
    answer: &[u8],
) -> (Option<Rc<Queue<MemoryStream>>>, MemoryStream, Inbox<MemoryStream>) {
    let (host, target) = MemoryStream::pair();
    let mut inbox = Inbox::new(target.clone());
    let opening = reactor::spawn(async move { Queue::open(host, terms(digests)).await.ok() });
    inbox.skip(128).await.expect("a request");
    target.write_all(Buf::copy_of(answer).into_vec()).await.expect("sent");
    (opening.await.expect("not killed"), target, inbox)
}

fn greeting(digests: Digests, limit: u32) -> Vec<u8> {
    let initialize = Initialize { alignment_bytes: 4, digests, limit };
    Framing::FIRST.head(&Pdu::InitializeResponse(initialize), 0).to_vec()
}

fn read_of(bytes: usize) -> Request {
    let command = Command::new(IoOpcode::Read as u8, 0, 1);
    let mut into = BufMut::for_overwrite(bytes);
    into.fill(0xee);
    let into = into.into_vec();
    Request { into, ..Request::new(command, Duration::from_secs(2)) }
}

fn write_of(bytes: usize) -> Request {
    let command = Command::new(IoOpcode::Write as u8, 0, 1);
    let from = Buf::copy_of(&vec![3; bytes]).into_vec();
    Request { from, ..Request::new(command, Duration::from_secs(2)) }
}

/// What becomes of a read and a write when the other side sends these bytes.
async fn told(digests: Digests, sent: Vec<u8>) -> [Answered; 2] {
    let (queue, target, inbox) = greeted(digests, &greeting(digests, 4096)).await;
    let queue = queue.expect("greeted");
    let (one, other) = (Rc::clone(&queue), Rc::clone(&queue));
    let read = reactor::spawn(async move { one.run(read_of(8192)).await });
    reactor::sleep(Duration::from_millis(1)).await;
    let write = reactor::spawn(async move { other.run(write_of(8192)).await });
    reactor::sleep(Duration::from_millis(1)).await;
    let _ = target.write_all(Buf::copy_of(&sent).into_vec()).await;
    let answers = [read.await.expect("answered"), write.await.expect("answered")];
    // It may have behaved.
    queue.close(QueueError::Closed).await;
    queue.over().await;
    assert_eq!(queue.busy(), 0);
    drop(inbox);
    answers
}

/// Identifiers of the read and the write: the first generation of the first two places.
const READ: u16 = 1 << 10;
const WRITE: u16 = 1 << 10 | 1;

fn unit(digests: Digests, pdu: &Pdu, data: &[u8]) -> Vec<u8> {
    let framing = Framing { digests, ..Framing::FIRST };
    let mut unit = framing.head(pdu, data.len()).to_vec();
    unit.extend(data);
    if digests.data && !data.is_empty() {
        unit.extend(levada_base::checksum::crc32c(data).to_le_bytes());
    }
    unit
}

fn data(command: u16, at: u32, bytes: usize, is_success: bool) -> Vec<u8> {
    let transfer = Transfer { command, tag: 0, at, bytes: bytes as u32 };
    let pdu = Pdu::ControllerData { transfer, is_last: is_success, is_success };
    unit(Digests::default(), &pdu, &vec![5; bytes])
}

fn answer(id: u16, status: Status) -> Vec<u8> {
    let completion = Completion { result: 0, queue_head: 0, id, status, has_more: false };
    unit(Digests::default(), &Pdu::Response(completion), &[])
}

fn asks(command: u16, at: u32, bytes: u32) -> Vec<u8> {
    let pdu = Pdu::ReadyToTransfer(Transfer { command, tag: 1, at, bytes });
    unit(Digests::default(), &pdu, &[])
}

#[test]
fn what_should_not_be_said_ends_the_connection() {
    let none = Digests::default();
    for sent in [
        vec![0xff; 200],
        answer(READ, Status::SUCCESS),
        answer(WRITE, Status::SUCCESS),
        answer(77, Status::SUCCESS),
        [data(READ, 0, 4096, false), answer(READ, Status::SUCCESS)].concat(),
        data(READ, 4096, 4096, false),
        data(READ, 0, 8196, false),
        [data(READ, 0, 4096, false), data(READ, 0, 4096, true)].concat(),
        data(READ, 0, 4096, true),
        data(WRITE, 0, 4096, false),
        asks(READ, 0, 512),
        asks(WRITE, 0, 0),
        asks(WRITE, 4, 512),
        asks(WRITE, 0, 8193),
        asks(WRITE, u32::MAX, 2),
        [asks(WRITE, 0, 512), asks(WRITE, 0, 512)].concat(),
        // Very many requests at once.
        (0..1024).flat_map(|at| asks(WRITE, at * 4, 4)).collect(),
        unit(none, &Pdu::Command(Command::new(2, 0, 1)), &[]),
        greeting(none, 4096),
        unit(none, &Pdu::Terminates(Terminated { status: 1, information: 2 }), &[]),
        Framing::terminate(false, Fatal::Sequence, &[7; 128]).to_vec(),
        // Nothing more: time runs out.
        Vec::new(),
        data(READ, 0, 4096, false)[..100].to_vec(),
    ] {
        Reactor::simulated(1).block_on(async {
            let [read, write] = told(none, sent.clone()).await;
            assert_eq!(write.outcome, Err(Unanswered::Lost), "{sent:02x?}");
            assert_eq!(read.outcome, Err(Unanswered::Lost), "{sent:02x?}");
            assert_eq!(read.into.iter().map(|part| part.len()).sum::<usize>(), 8192);
        });
    }
}

#[test]
fn the_other_side_is_told_what_was_wrong() {
    Reactor::simulated(2).block_on(async {
        let none = Digests::default();
        let (queue, target, mut inbox) = greeted(none, &greeting(none, 4096)).await;
        let queue = queue.expect("greeted");
        let wrong = answer(77, Status::SUCCESS);
        target.write_all(Buf::copy_of(&wrong).into_vec()).await.expect("sent");
        let said = inbox.payload(24 + 24).await.expect("last words");
        assert_eq!(said[..24], Framing::terminate(true, Fatal::Field { at: 8 }, &wrong)[..24]);
        assert_eq!((said[0], &said[24..]), (Kind::HostTerminates as u8, &wrong[..]));
        queue.over().await;
        let answered = queue.run(read_of(512)).await;
        assert_eq!(answered.outcome, Err(Unanswered::Lost));
    });
}

#[test]
fn a_greeting_that_is_none() {
    let none = Digests::default();
    let mut other_version = greeting(none, 4096);
    other_version[8] = 1;
    for answer in [
        vec![0; 128],
        other_version,
        greeting(none, 4095),
        greeting(Digests { header: true, data: false }, 4096),
        Framing::terminate(false, Fatal::Sequence, &[]).to_vec(),
    ] {
        Reactor::simulated(3).block_on(async {
            assert!(greeted(none, &answer).await.0.is_none(), "{answer:02x?}");
        });
    }
}

#[test]
fn wrong_digests_are_noticed() {
    let both = Digests { header: true, data: true };
    let transfer = Transfer { command: READ, tag: 0, at: 0, bytes: 8192 };
    let pdu = Pdu::ControllerData { transfer, is_last: true, is_success: true };
    let good = unit(both, &pdu, &[5; 8192]);
    for (at, expected) in [
        (None, None),
        (Some(12), Some(Unanswered::Lost)),
        (Some(100), Some(Unanswered::Damaged)),
        (Some(good.len() - 1), Some(Unanswered::Damaged)),
    ] {
        Reactor::simulated(4).block_on(async {
            let mut sent = good.clone();
            if let Some(at) = at {
                sent[at] ^= 0x10;
            }
            let [read, _] = told(both, sent).await;
            assert_eq!(read.outcome.err(), expected, "{at:?}");
            if at.is_none() {
                assert_eq!(read.into[0][..], [5; 8192]);
            }
        });
    }
}

/// The units that a target would send, cut and twisted.
fn units() -> impl Strategy<Value = Vec<u8>> {
    let ids = prop_oneof![Just(READ), Just(WRITE), any::<u16>()];
    let lengths = prop_oneof![Just(0_u32), Just(512), Just(4096), Just(8192), 0_u32..9000];
    let one = (0_u8..6, ids, lengths.clone(), lengths, any::<(bool, u8, u8)>());
    let sound = one.prop_map(|(kind, id, at, bytes, (flag, byte, value))| {
        let mut unit = match kind {
            0 | 1 => data(id, at, bytes as usize, flag),
            2 => asks(id, at, bytes),
            3 => answer(id, if flag { Status::SUCCESS } else { Status::WRITE_FAULT }),
            4 => data(id, 0, 8192, true),
            _ => asks(id, 0, 8192),
        };
        if value < 40 {
            let at = usize::from(byte) % unit.len();
            unit[at] ^= value;
        }
        unit
    });
    prop_oneof![8 => sound, 1 => prop::collection::vec(any::<u8>(), 0..60)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Whatever is sent: both commands are over in their time, and a read that went well holds nothing but data.
    #[test]
    fn random_units(sent in prop::collection::vec(units(), 0..12)) {
        Reactor::simulated(5).block_on(async {
            crate::nvme::fuzz::units(&sent.concat());
            let begun = reactor::now();
            let [read, _] = told(Digests::default(), sent.concat()).await;
            assert!(begun.elapsed() < Duration::from_secs(5));
            assert_eq!(read.into.iter().map(|part| part.len()).sum::<usize>(), 8192);
            if read.outcome.is_ok_and(|completion| completion.status.is_success()) {
                assert!(!whole(&read.into).contains(&0xee), "memory was taken for data");
            }
        });
    }
}

fn whole(into: &IoVecMut) -> Vec<u8> {
    into.iter().flat_map(|part| part.to_vec()).collect()
}

/// This process stands still for longer than a command may take, while the answer lies in the socket.
#[test]
fn time_in_which_this_process_stood_still_is_not_the_targets() {
    use std::io::{Read, Write};
    // More than is received at once.
    const BYTES: usize = 512 << 10;
    let none = Digests::default();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let target = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a host");
        stream.read_exact(&mut [0; 128]).expect("a request");
        stream.write_all(&greeting(none, 4096)).expect("greeted");
        stream.read_exact(&mut [0; 72]).expect("a command");
        std::thread::sleep(Duration::from_millis(300));
        stream.write_all(&data(READ, 0, BYTES, true)).expect("answered");
        // Until the other side has closed.
        let _ = stream.read(&mut [0]);
    });
    Reactor::new().expect("io_uring").block_on(async {
        let stream = reactor::net::Stream::connect(address).await.expect("connected");
        let queue = Queue::open(stream, terms(none)).await.expect("greeted");
        let place = queue.place().await;
        let request = Request { limit: Some(Duration::from_millis(500)), ..read_of(BYTES) };
        let answer = queue.submit(place, request);
        // It is sent.
        reactor::sleep(Duration::from_millis(50)).await;
        std::thread::sleep(Duration::from_secs(1));
        let answered = answer.await.expect("every command is answered");
        assert!(answered.outcome.is_ok(), "{:?}", answered.outcome);
        queue.close(QueueError::Closed).await;
    });
    target.join().expect("the target went well");
}
