//! What a target makes of hosts that say anything: it answers or ends the connection, others go on, and nothing is lost.

use crate::host::{Connecting, Ended, Host, Queue};
use crate::{Served, nqn, run};
use futures_util::future::{join, join_all};
use levada_base::buf::bytes_in;
use levada_base::checksum::crc32c;
use levada_base::reactor::net::Stream;
use levada_base::reactor::{self, random_u64};
use levada_base::stream::ByteStream;
use levada_base::sync::Once;
use levada_base::{Buf, BufMut, IoVec};
use levada_export_nvmet::Passage;
use levada_nvme::fabrics::{
    ANY_CONTROLLER, Configuration, Connect, ConnectData, Property, PropertyAccess,
};
use levada_nvme::log::{GetLogPage, LogPage};
use levada_nvme::pdu::{Common, Digests, Framing, Initialize, Pdu, Transfer};
use levada_nvme::{Command, DISCOVERY_NQN, DataPointer, IoOpcode, Status};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::rc::Rc;
use std::time::Duration;

const INVALID_FIELD: u16 = 1;
const OUT_OF_SEQUENCE: u16 = 2;
const HEADER_DIGEST: u16 = 3;
const OUT_OF_RANGE: u16 = 4;
const LIMIT_EXCEEDED: u16 = 5;
const UNSUPPORTED: u16 = 6;

/// Connects an admin queue.
const CONNECT_ADMIN: Connect = Connect {
    format: 0,
    queue: 0,
    queue_entries_less_one: 31,
    is_without_flow_control: false,
    keep_alive_ms: 0,
};

/// Why the target ended a connection.
async fn ended(queue: &Queue) -> u16 {
    ended_by(queue).await.0
}

/// The same, and by which header.
async fn ended_by(queue: &Queue) -> (u16, Vec<u8>) {
    loop {
        match queue.hear().await {
            Ok(_) => {}
            Err(Ended::Told(told, header)) => return (told.status, header),
            Err(Ended::Gone) => panic!("ended without a word"),
        }
    }
}

fn unit(kind: u8, header_bytes: u8, bytes: u32, rest: &[u8]) -> Vec<u8> {
    let mut unit = vec![kind, 0, header_bytes, 0];
    unit.extend(bytes.to_le_bytes());
    unit.extend(rest);
    unit
}

#[test]
fn units_that_are_none_end_the_connection_with_the_reason() {
    run(async {
        let served = Served::new(64);
        let mut others = served.host().await;
        let asked = Transfer { command: 9, tag: 77, at: 0, bytes: 4 };
        let unasked = Pdu::HostData { transfer: asked, is_last: true };
        for (bytes, why) in [
            (unit(0x55, 24, 24, &[0; 16]), INVALID_FIELD),
            (unit(0x04, 71, 72, &[0; 64]), INVALID_FIELD),
            (unit(0x04, 72, 71, &[0; 64]), INVALID_FIELD),
            (unit(0x04, 72, u32::MAX, &[0; 64]), INVALID_FIELD),
            (unit(0x09, 24, 24, &[0; 16]), INVALID_FIELD),
            (unit(0x05, 24, 24, &[0; 16]), INVALID_FIELD),
            (unit(0x00, 128, 128, &[0; 120]), OUT_OF_SEQUENCE),
            (others.io.unit(&unasked, Some(&[0; 4])), INVALID_FIELD),
        ] {
            let mut host = served.host().await;
            host.io.send_bytes(&bytes).await.expect("sent");
            assert_eq!(ended(&host.io).await, why, "{bytes:02x?}");
            let alive = host.admin.ask(Command::new(0x18, 500, 0), None).await;
            assert!(alive.expect("the admin queue lives").0.status.is_success());
        }
        assert_eq!(others.write(0, &[1; 4096]).await, Status::SUCCESS);
    });
}

#[test]
fn connections_begin_as_they_should_or_end() {
    run(async {
        let served = Served::new(64);
        for (bytes, why) in [
            (unit(0x04, 72, 72, &[0; 64]), OUT_OF_SEQUENCE),
            (unit(0x00, 128, 128, &[1; 120]), UNSUPPORTED),
            (b"GET / HTTP/1.1\r\nHost: levada\r\n\r\n".to_vec(), INVALID_FIELD),
        ] {
            let stream = Stream::connect(served.path.address()).await.expect("it listens");
            stream.write_all(Buf::copy_of(&bytes).into_vec()).await.expect("sent");
            let head = stream.read_exact(BufMut::for_overwrite(24)).await.expect("told");
            assert_eq!((head[0], u16::from_le_bytes([head[8], head[9]])), (0x03, why));
        }
    });
}

#[test]
fn a_first_command_that_is_wrong_ends_the_connection_with_the_reason() {
    run(async {
        let served = Served::new(64);
        let digests = Digests { header: true, data: true };
        let initialize =
            Pdu::InitializeRequest(Initialize { alignment_bytes: 4, digests, limit: 0 });
        let initialize = Framing::FIRST.head(&initialize, 0).to_vec();
        let data = ConnectData {
            host_id: [1; 16],
            controller: ANY_CONTROLLER,
            subsystem: served.subsystem.nqn().clone(),
            host: nqn("nqn.2014-08.org.example:host1"),
        }
        .to_bytes();
        let pointer = DataPointer::InCapsule { offset: 0, bytes: data.len() as u32 };
        let command = Pdu::Command(CONNECT_ADMIN.command(0).with_data(pointer));
        let framing = Framing { digests, alignment_bytes: 4 };
        let mut sound = framing.head(&command, data.len()).to_vec();
        sound.extend(&data[..]);
        sound.extend(crc32c(&data[..]).to_le_bytes());
        let with_bit_changed = |at: usize| {
            let mut changed = sound.clone();
            changed[at] ^= 1;
            changed
        };
        let begin = async |bytes: &[u8]| {
            let stream = Stream::connect(served.path.address()).await.expect("it listens");
            for bytes in [&initialize, bytes] {
                stream.write_all(Buf::copy_of(bytes).into_vec()).await.expect("sent");
            }
            stream.read_exact(BufMut::for_overwrite(128)).await.expect("an answer to the first");
            stream
        };
        let with_wrong_header = with_bit_changed(20);
        for (bytes, header_bytes, why) in
            [(&with_wrong_header, 72, HEADER_DIGEST), (&initialize, 128, OUT_OF_SEQUENCE)]
        {
            let stream = begin(bytes).await;
            let told = stream.read_exact(BufMut::for_overwrite(24 + header_bytes)).await;
            let told = told.expect("told");
            assert_eq!((told[0], u16::from_le_bytes([told[8], told[9]])), (0x03, why));
            assert_eq!(told[24..], bytes[..header_bytes], "the header, without its digest");
            let (_, more) = stream.read(BufMut::for_overwrite(1)).await.expect("ended");
            assert_eq!(more, 0);
        }
        // A bit of its data: it may be tried again.
        let stream = begin(&with_bit_changed(500)).await;
        let answer = stream.read_exact(BufMut::for_overwrite(28)).await.expect("answered");
        let common = Common::parse(answer.first_chunk().expect("a header")).expect("a unit");
        let Ok(Pdu::Response(completion)) = common.pdu(&answer[8..], digests) else {
            panic!("no answer")
        };
        assert_eq!(completion.status, Status::TRANSIENT_TRANSPORT);
        // And so it is.
        begin(&sound).await.read_exact(BufMut::for_overwrite(28)).await.expect("connected");
    });
}

/// A host with both digests that sends one thing wrong.
async fn with_digests(served: &Served) -> crate::Host {
    let digests = Digests { header: true, data: true };
    let connecting = Connecting { digests, ..Connecting::new(1) };
    let host = connecting.to(served.path.address(), served.subsystem.nqn()).await;
    host.expect("admitted")
}

#[test]
fn wrong_digests_are_noticed() {
    run(async {
        let served = Served::new(64);
        let mut host = with_digests(&served).await;
        let data = vec![1; 4096];
        let command = host
            .write_command(0, &data)
            .with_data(DataPointer::InCapsule { offset: 0, bytes: data.len() as u32 });
        let sound = host.io.unit(&Pdu::Command(command), Some(&data));
        // A bit of the data: the command fails and may be tried again, and the connection is as good as before.
        let mut mangled = sound.clone();
        mangled[500] ^= 4;
        host.io.send_bytes(&mangled).await.expect("sent");
        let (completion, _) = host.io.answer(command.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::TRANSIENT_TRANSPORT);
        assert_eq!(served.memory.writes.get(), 0);
        // The same of data that were asked for.
        let large = vec![2; 65536];
        let command = host.write_command(0, &large);
        host.io.begin(command, Some(&large)).await;
        let Pdu::ReadyToTransfer(asked) = host.io.hear().await.expect("asked").pdu else {
            panic!("not asked")
        };
        let mut mangled =
            host.io.unit(&Pdu::HostData { transfer: asked, is_last: true }, Some(&large));
        mangled[30_000] ^= 1;
        host.io.send_bytes(&mangled).await.expect("sent");
        let (completion, _) = host.io.answer(command.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::TRANSIENT_TRANSPORT);
        assert_eq!(served.memory.writes.get(), 0);
        assert_eq!(host.write(0, &large).await, Status::SUCCESS);
        // A bit of the header: nobody knows what it was.
        let mut mangled = sound;
        mangled[20] ^= 1;
        host.io.send_bytes(&mangled).await.expect("sent");
        assert_eq!(ended(&host.io).await, HEADER_DIGEST);
    });
}

#[test]
fn data_are_taken_only_as_asked_for() {
    run(async {
        let served = Served::new(64);
        for (change, why) in [
            ((0, 65537, 0, 0), OUT_OF_RANGE),
            ((4, 100, 0, 0), OUT_OF_RANGE),
            ((0, 100, 1, 0), INVALID_FIELD),
            ((0, 100, 0, 1), INVALID_FIELD),
        ] {
            let (mut host, data) = (served.host().await, vec![1; 65536]);
            let command = host.write_command(0, &data);
            host.io.begin(command, Some(&data)).await;
            let Pdu::ReadyToTransfer(asked) = host.io.hear().await.expect("asked").pdu else {
                panic!("not asked")
            };
            let (at, bytes, command, tag) = change;
            let transfer =
                Transfer { at, bytes, command: asked.command + command, tag: asked.tag + tag };
            let data = vec![1; bytes as usize];
            host.io.send(&Pdu::HostData { transfer, is_last: true }, Some(&data)).await;
            assert_eq!(ended(&host.io).await, why, "{change:?}");
        }
        // More within a command than agreed.
        let (mut host, data) = (served.host().await, vec![1; 20 << 10]);
        host.io.in_capsule_bytes = usize::MAX;
        let command = host.write_command(0, &data);
        host.io.begin(command, Some(&data)).await;
        assert_eq!(ended(&host.io).await, LIMIT_EXCEEDED);
        drop(host);
        // Gone in the middle of what was asked for.
        let (mut host, data) = (served.host().await, vec![1; 65536]);
        let command = host.write_command(0, &data);
        host.io.begin(command, Some(&data)).await;
        drop(host);
        while served.target.controllers() > 0 {
            reactor::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(served.memory.writes.get(), 0, "nothing was written");
    });
}

fn read_1m(id: u16) -> Command {
    Command::new(IoOpcode::Read as u8, id, 1)
        .with_blocks(0, 256)
        .with_data(DataPointer::Transport { bytes: 1 << 20 })
}

#[test]
fn a_host_that_does_not_read_holds_up_nobody() {
    run(async {
        let served = Served::new(1024);
        let greedy = served.host().await;
        // As many as the queue has entries, and nothing of it is read.
        for id in 0..31 {
            greedy.io.send(&Pdu::Command(read_1m(id)), None).await;
        }
        let mut others = served.host().await;
        for round in 0..200 {
            assert_eq!(others.write(round, &[round as u8; 4096]).await, Status::SUCCESS);
            assert!(others.read(round, 1).await.expect("read").iter().all(|b| *b == round as u8));
        }
        // Once it goes, nothing of it is left.
        drop((greedy, others));
        while served.target.controllers() > 0 || Rc::strong_count(&served.memory) > 2 {
            reactor::sleep(Duration::from_millis(5)).await;
        }
    });
}

fn write_1m(id: u16) -> Command {
    Command::new(IoOpcode::Write as u8, id, 1)
        .with_blocks(0, 256)
        .with_data(DataPointer::Transport { bytes: 1 << 20 })
}

/// More of them than there is memory for, which have asked to write and never do.
async fn silent_hosts(served: &Served) -> Vec<Host> {
    let mut silent = Vec::new();
    for _ in 0..40 {
        let host = served.host().await;
        for id in 0..31 {
            host.io.send(&Pdu::Command(write_1m(id)), None).await;
        }
        silent.push(host);
    }
    silent
}

#[test]
fn silent_hosts_leave_others_room_to_go_on() {
    run(async {
        let served = Served::new(1024);
        let silent = silent_hosts(&served).await;
        // The last ones were not asked for all that they would send.
        let last = &silent[39];
        let asked = async {
            for _ in 0..31 {
                let said = last.io.hear().await.expect("asked");
                assert!(matches!(said.pdu, Pdu::ReadyToTransfer(_)));
            }
        };
        assert!(reactor::timeout(Duration::from_millis(500), asked).await.is_err());
        let mut others = served.host().await;
        for round in 0..20 {
            let data = vec![round; 1 << 20];
            assert_eq!(others.write(0, &data).await, Status::SUCCESS);
            assert!(others.read(0, 256).await.expect("read") == data);
        }
        drop((silent, others));
        while served.target.controllers() > 0 || Rc::strong_count(&served.memory) > 2 {
            reactor::sleep(Duration::from_millis(5)).await;
        }
    });
}

/// What is compared with takes memory as well; and who has no more than its own compares as much as may be compared at once.
#[test]
fn compares_take_memory_for_both_sides() {
    run(async {
        let served = Served::new(1024);
        let compare_1m = |id| {
            Command::new(IoOpcode::Compare as u8, id, 1)
                .with_blocks(0, 256)
                .with_data(DataPointer::Transport { bytes: 1 << 20 })
        };
        let host = served.host().await;
        for id in 0..31 {
            host.io.send(&Pdu::Command(compare_1m(id)), None).await;
        }
        let mut asked = Vec::new();
        let asking = async {
            loop {
                match host.io.hear().await.expect("asked").pdu {
                    Pdu::ReadyToTransfer(transfer) => asked.push(transfer),
                    other => panic!("{other:?}"),
                }
            }
        };
        assert!(reactor::timeout(Duration::from_millis(500), asking).await.is_err());
        assert_eq!(asked.len(), 16, "of 2 MiB each");
        drop(host);
        let silent = silent_hosts(&served).await;
        let mut others = served.host().await;
        let comparing = others.compare(0, &[0; 1 << 20]);
        let compared = reactor::timeout(Duration::from_secs(5), comparing).await;
        assert_eq!(compared.expect("it has room"), Status::SUCCESS);
        drop(silent);
    });
}

/// Nothing that comes within commands waits for memory which only what comes behind it would free.
#[test]
fn data_within_commands_wait_for_none_that_were_asked_for() {
    run(async {
        let served = Served::new(1024);
        let silent = silent_hosts(&served).await;
        let host = served.host().await;
        host.io.send(&Pdu::Command(write_1m(100)), None).await;
        let Pdu::ReadyToTransfer(asked) = host.io.hear().await.expect("asked").pdu else {
            panic!("not asked")
        };
        // More than there is room for at once, and behind them what the write waits for.
        let zeroes = [0; 16 << 10];
        let compares: Vec<Command> = (0..25)
            .map(|id| {
                Command::new(IoOpcode::Compare as u8, id, 1)
                    .with_blocks(512, 4)
                    .with_data(DataPointer::InCapsule { offset: 0, bytes: 16 << 10 })
            })
            .collect();
        let all = async {
            for command in &compares {
                host.io.send(&Pdu::Command(*command), Some(&zeroes)).await;
            }
            host.io.send_data(asked, &vec![5; 1 << 20], 1 << 17).await;
            for _ in 0..=compares.len() {
                let said = host.io.hear().await.expect("answered");
                let Pdu::Response(completion) = said.pdu else { panic!("{:?}", said.pdu) };
                assert_eq!(completion.status, Status::SUCCESS, "{}", completion.id);
            }
        };
        reactor::timeout(Duration::from_secs(10), all).await.expect("none waits for ever");
        assert!(served.memory.all()[..1 << 20].iter().all(|byte| *byte == 5));
        drop(silent);
    });
}

/// Hosts that try a path that hangs over and over use up nothing of what those on another one need.
#[test]
fn a_path_that_hangs_keeps_nothing_of_hosts_that_give_up() {
    run(async {
        let (served, nqn) = (Served::new(64), nqn("nqn.2026-11.io.levada:test"));
        let other = served.target.listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let given_up = async |number| {
            let connecting = Connecting::new(number);
            let connecting = connecting.to(served.path.address(), &nqn);
            reactor::timeout(Duration::from_millis(20), connecting).await.is_err()
        };
        // Some have something under way: an answer, that to an abort, and a Connect.
        let (mut early, mut aborting) = (served.host().await, served.host().await);
        served.memory.holds_reads.set(true);
        let held = aborting.read_command(0, 1);
        aborting.io.begin(held, None).await;
        while !served.memory.is_held.get() {
            reactor::sleep(Duration::from_millis(1)).await;
        }
        served.memory.holds_reads.set(false);
        let mut late = Queue::open(served.path.address(), Digests::default()).await;
        served.path.set_passage(Passage::Hung);
        let opening = Queue::open(served.path.address(), Digests::default());
        let opened = reactor::timeout(Duration::from_millis(50), opening).await;
        assert!(opened.is_err(), "nothing is answered");
        let read = early.read_command(0, 1);
        early.io.begin(read, None).await;
        let abort = aborting.abort_command(1, held.id());
        aborting.admin.begin(abort, None).await;
        let connecting = Connecting::new(3);
        let connecting = connecting.queue(&mut late, &nqn, (ANY_CONTROLLER, 0));
        assert!(reactor::timeout(Duration::from_millis(50), connecting).await.is_err());
        assert_eq!(served.target.controllers(), 2, "of those that were there before");
        drop((early, aborting, late));
        served.memory.release();
        for _ in 0..20 {
            assert!(given_up(2).await);
        }
        while served.target.controllers() > 0 {
            reactor::sleep(Duration::from_millis(5)).await;
        }
        let host = Host::connect(other.address(), &nqn, 1).await.expect("admitted");
        assert_eq!(host.controller, 3, "none was made meanwhile");
        // Nor once the path answers again, of hosts that are gone.
        served.path.set_passage(Passage::Open);
        let host = Host::connect(served.path.address(), &nqn, 1).await.expect("admitted");
        assert_eq!(host.controller, 4);
    });
}

/// A host that has waited for a path to answer goes on as if nothing had been.
#[test]
fn who_waits_for_a_path_is_let_in() {
    run(async {
        let served = Served::new(64);
        served.path.set_passage(Passage::Hung);
        let opens = async {
            reactor::sleep(Duration::from_millis(50)).await;
            served.path.set_passage(Passage::Slow(Duration::from_millis(20)));
        };
        let (mut host, ()) = join(served.host(), opens).await;
        assert_eq!(host.write(0, &[7; 4096]).await, Status::SUCCESS);
        served.path.set_passage(Passage::Open);
        assert_eq!(host.read(0, 1).await.expect("read"), [7; 4096]);
    });
}

#[test]
fn a_host_that_sends_more_than_its_queue_takes_is_ended() {
    run(async {
        let served = Served::new(1024);
        let greedy = served.host().await;
        for id in 0..200 {
            greedy.io.send(&Pdu::Command(read_1m(id)), None).await;
        }
        let (why, header) = ended_by(&greedy.io).await;
        assert_eq!(why, LIMIT_EXCEEDED);
        let one_too_many = u16::from_le_bytes([header[10], header[11]]);
        let sent = greedy.io.unit(&Pdu::Command(read_1m(one_too_many)), None);
        assert_eq!(header, sent, "the header of the command that was one too many");
        // The same with writes whose data never come, of a host that is then gone.
        let mut silent = served.host().await;
        for _ in 0..80 {
            let command = silent.write_command(0, &[0; 65536]);
            silent.io.begin(command, Some(&[0; 65536])).await;
        }
        drop((greedy, silent));
        while served.target.controllers() > 0 || Rc::strong_count(&served.memory) > 2 {
            reactor::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(served.memory.writes.get(), 0);
    });
}

/// However it cuts what it sends.
#[test]
fn a_host_that_is_not_admitted_any_more_changes_nothing() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        assert_eq!(host.write(0, &[1; 4096]).await, Status::SUCCESS);
        let command = host
            .write_command(0, &[2; 4096])
            .with_data(DataPointer::InCapsule { offset: 0, bytes: 4096 });
        let unit = host.io.unit(&Pdu::Command(command), Some(&[2; 4096]));
        // One and a half, so that there is always something to be read on.
        let (half, rest) = unit.split_at(40);
        host.io.send_bytes(&[&unit, half].concat()).await.expect("sent");
        reactor::sleep(Duration::from_millis(50)).await;
        let before = served.memory.writes.get();
        served.subsystem.set_hosts(levada_export_nvmet::Hosts::Only(Default::default()));
        for _ in 0..10 {
            if host.io.send_bytes(&[rest, half].concat()).await.is_err() {
                break;
            }
            reactor::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(served.memory.writes.get(), before);
    });
}

#[test]
fn small_pieces_of_data_take_no_more_memory_than_large_ones() {
    run(async {
        let (served, data) = (Served::new(64), vec![3; 32768]);
        let mut host = served.host().await;
        let command = host.write_command(8, &data);
        host.io.begin(command, Some(&[3; 32768])).await;
        let Pdu::ReadyToTransfer(asked) = host.io.hear().await.expect("asked").pdu else {
            panic!("not asked")
        };
        host.io.send_data(asked, &data, 7).await;
        let (completion, _) = host.io.answer(command.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::SUCCESS);
        assert!(served.memory.all()[32768..65536] == data);
    });
}

/// A connection over which nothing ever comes.
#[derive(Clone)]
struct Silence;

impl ByteStream for Silence {
    async fn read(&self, _: BufMut) -> io::Result<(BufMut, usize)> {
        pending().await
    }
    async fn read_exact(&self, _: BufMut) -> io::Result<BufMut> {
        pending().await
    }
    async fn write_all(&self, _: IoVec) -> io::Result<()> {
        Ok(())
    }
    async fn close(&self) {}
}

/// There is room for 4,096 connections, which 30 s of silence would keep. Who has said who he is keeps his.
#[test]
fn those_who_say_nothing_make_room_for_others() {
    run(async {
        let served = Served::new(64);
        let mut before = served.host().await;
        for _ in 0..5000 {
            served.path.serve(Silence);
        }
        let mut after = served.host().await;
        for _ in 0..5000 {
            served.path.serve(Silence);
        }
        assert_eq!(before.write(0, &[1; 4096]).await, Status::SUCCESS);
        assert_eq!(after.write(1, &[2; 4096]).await, Status::SUCCESS);
        let ending = served.target.end();
        assert!(reactor::timeout(Duration::from_secs(5), ending).await.is_ok(), "all have left");
    });
}

/// A host that has said all that it will, and takes nothing but short answers.
#[derive(Clone)]
struct Unread {
    said: Rc<RefCell<VecDeque<u8>>>,
    closed: Rc<Once>,
}

impl Unread {
    /// It asks what there is, twice as much as a connection keeps.
    fn new() -> Self {
        let mut said = Vec::new();
        let mut say = |pdu: &Pdu, data: &[u8]| {
            said.extend(Framing::FIRST.head(pdu, data.len()));
            said.extend(data);
        };
        let digests = Digests::default();
        say(&Pdu::InitializeRequest(Initialize { alignment_bytes: 4, digests, limit: 0 }), &[]);
        let data = ConnectData {
            host_id: [1; 16],
            controller: ANY_CONTROLLER,
            subsystem: nqn(DISCOVERY_NQN),
            host: nqn("nqn.2014-08.org.example:unread"),
        };
        say(&Pdu::Command(CONNECT_ADMIN.command(0)), &data.to_bytes());
        let enable = u64::from(Configuration::ENABLED.0);
        say(&Pdu::Command(PropertyAccess::set(Property::Configuration, enable, 1)), &[]);
        let (page, bytes) = (LogPage::Discovery as u8, 1 << 20);
        let asked = GetLogPage { page, specific: 0, keeps_event: false, at: 0, bytes };
        for id in [2, 3] {
            let command = asked.command(id, 0);
            let pointer = DataPointer::Transport { bytes: bytes as u32 };
            say(&Pdu::Command(command.with_data(pointer)), &[]);
        }
        Self { said: Rc::new(RefCell::new(said.into())), closed: Rc::default() }
    }
}

impl ByteStream for Unread {
    async fn read(&self, mut into: BufMut) -> io::Result<(BufMut, usize)> {
        let mut said = self.said.borrow_mut();
        let bytes = said.len().min(into.len());
        into.iter_mut().zip(said.drain(..bytes)).for_each(|(into, byte)| *into = byte);
        Ok((into, bytes))
    }
    async fn read_exact(&self, into: BufMut) -> io::Result<BufMut> {
        let wanted = into.len();
        let (into, bytes) = self.read(into).await?;
        if bytes == wanted { Ok(into) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
    async fn write_all(&self, from: IoVec) -> io::Result<()> {
        if bytes_in(&from) > 4096 {
            self.closed.happened().await;
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }
    async fn close(&self) {
        self.closed.happen();
    }
}

/// Who has hung up and takes his answers slowly has 5 s for them, unless somebody else needs his place.
#[test]
fn who_has_hung_up_makes_room_for_others() {
    run(async {
        let served = Served::new(64);
        let (most, may_look) = (4096, 1024);
        let comes = async || {
            let unread = Unread::new();
            served.path.serve(unread.clone());
            while !unread.said.borrow().is_empty() {
                reactor::yield_now().await;
            }
            unread
        };
        let first = comes().await;
        let others: Vec<_> = join_all((1..may_look).map(|_| comes())).await;
        let second = &others[0];
        reactor::sleep(Duration::from_millis(100)).await;
        assert!(!first.closed.has_happened(), "it is waited for");
        let one_more = comes().await;
        reactor::timeout(Duration::from_secs(1), first.closed.happened()).await.expect("it goes");
        assert!(!second.closed.has_happened() && !one_more.closed.has_happened());
        for _ in may_look..=most {
            served.path.serve(Silence);
        }
        reactor::timeout(Duration::from_secs(1), second.closed.happened()).await.expect("it goes");
    });
}

#[test]
fn random_bytes_do_no_harm() {
    run(async {
        let served = Served::new(64);
        for _ in 0..100 {
            let mut host = served.host().await;
            let sound = {
                let command = host.write_command(0, &[0; 4096]);
                host.io.unit(&Pdu::Command(command), None)
            };
            // Sound units with some bytes changed, and then none at all.
            let mut bytes = Vec::new();
            for _ in 0..random_u64() % 8 {
                let mut unit = sound.clone();
                for _ in 0..random_u64() % 4 {
                    let at = random_u64() as usize % unit.len();
                    unit[at] = random_u64() as u8;
                }
                bytes.extend(unit);
            }
            bytes.extend((0..random_u64() % 300).map(|_| random_u64() as u8));
            let _ = host.io.send_bytes(&bytes).await;
        }
        let mut host = served.host().await;
        assert_eq!(host.write(0, &[9; 4096]).await, Status::SUCCESS);
        assert!(host.read(0, 1).await.expect("read").iter().all(|byte| *byte == 9));
    });
}
