//! Commands that their host aborts: which end, and that those which do have changed nothing.

use crate::host::{Host, Queue};
use crate::{Served, run};
use levada_base::reactor;
use levada_export_nvmet::Passage;
use levada_nvme::identify::{ABORTS_MAX, Events};
use levada_nvme::log::{Event, LogPage};
use levada_nvme::pdu::{Pdu, Transfer};
use levada_nvme::{AdminOpcode, Command, Feature, Status};
use std::rc::Rc;
use std::time::Duration;

/// The queue of commands on blocks.
const IO: u16 = 1;

async fn asked(queue: &Queue) -> Transfer {
    match queue.hear().await.expect("asked").pdu {
        Pdu::ReadyToTransfer(asked) => asked,
        other => panic!("not asked: {other:?}"),
    }
}

async fn ends_as_aborted(queue: &mut Queue, id: u16) {
    let (completion, data) = queue.answer(id, None).await.expect("answered");
    assert_eq!((completion.status, data.len()), (Status::ABORTED, 0));
}

#[test]
fn a_write_that_waits_for_its_data_is_aborted() {
    run(async {
        let served = Served::new(64);
        let (mut host, data) = (served.host().await, vec![5; 65536]);
        let command = host.write_command(0, &data);
        host.io.begin(command, Some(&data)).await;
        let transfer = asked(&host.io).await;
        // Some of them are there already.
        let part = Transfer { bytes: 4096, ..transfer };
        host.io.send(&Pdu::HostData { transfer: part, is_last: false }, Some(&data[..4096])).await;
        assert_eq!(host.write(40, &data[..4096]).await, Status::SUCCESS, "and were received");
        assert!(host.abort(IO, command.id()).await);
        ends_as_aborted(&mut host.io, command.id()).await;
        assert!(!host.abort(IO, command.id()).await, "it has ended");
        // The rest was on its way; and the tag is not mistaken for the next one's.
        let rest = Transfer { at: 4096, bytes: 61440, ..transfer };
        host.io.send(&Pdu::HostData { transfer: rest, is_last: true }, Some(&data[4096..])).await;
        assert_eq!(host.write(20, &data).await, Status::SUCCESS);
        assert!(served.memory.all()[..65536].iter().all(|byte| *byte == 0));
        assert_eq!(served.memory.writes.get(), 2);
    });
}

#[test]
fn a_write_that_waits_for_memory_is_aborted() {
    run(async {
        let served = Served::new(1024);
        let (mut host, data) = (served.host().await, vec![1; 1 << 20]);
        let mut commands = Vec::new();
        for _ in 0..33 {
            let command = host.write_command(0, &data);
            host.io.begin(command, Some(&data)).await;
            commands.push(command);
        }
        for _ in 0..32 {
            asked(&host.io).await;
        }
        let last = commands[32];
        assert!(host.abort(IO, last.id()).await);
        ends_as_aborted(&mut host.io, last.id()).await;
        // What another gives back by its end is free for the next.
        assert!(host.abort(IO, commands[0].id()).await);
        ends_as_aborted(&mut host.io, commands[0].id()).await;
        let next = host.write_command(512, &data);
        host.io.begin(next, Some(&data)).await;
        let transfer = asked(&host.io).await;
        assert_eq!(transfer.command, next.id());
        host.io.send_data(transfer, &data, 1 << 20).await;
        let (completion, _) = host.io.answer(next.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::SUCCESS);
        assert_eq!(served.memory.writes.get(), 1);
    });
}

/// It waits for an older one of its host, over a connection that is gone.
#[test]
fn a_write_that_waits_for_its_turn_is_aborted() {
    run(async {
        let served = Served::new(64);
        let (mut gone, address) = (served.host().await, served.path.address());
        let mut host = Host::connect(address, served.subsystem.nqn(), 1).await.expect("admitted");
        assert!(host.read(0, 1).await.is_ok(), "a second path, which is there already");
        served.memory.holds_writes.set(true);
        let old = gone.write_command(0, &[1; 4096]);
        gone.io.begin(old, Some(&[1; 4096])).await;
        while !served.memory.is_held.get() {
            reactor::sleep(Duration::from_millis(2)).await;
        }
        drop(gone);
        reactor::sleep(Duration::from_millis(50)).await;
        let new = host.write_command(0, &[2; 4096]);
        host.io.begin(new, Some(&[2; 4096])).await;
        assert!(host.abort(IO, new.id()).await);
        ends_as_aborted(&mut host.io, new.id()).await;
        served.memory.release();
        assert!(host.read(0, 1).await.expect("read").iter().all(|byte| *byte == 1));
        assert_eq!(served.memory.writes.get(), 1);
    });
}

#[test]
fn a_write_that_has_begun_is_not_aborted() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        served.memory.holds_writes.set(true);
        let command = host.write_command(0, &[1; 4096]);
        host.io.begin(command, Some(&[1; 4096])).await;
        while !served.memory.is_held.get() {
            reactor::sleep(Duration::from_millis(2)).await;
        }
        assert!(!host.abort(IO, command.id()).await);
        served.memory.release();
        let (completion, _) = host.io.answer(command.id(), None).await.expect("answered");
        assert_eq!((completion.status, served.memory.writes.get()), (Status::SUCCESS, 1));
    });
}

#[test]
fn a_read_that_hangs_is_aborted_and_its_data_go_nowhere() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        assert_eq!(host.write(3, &[3; 4096]).await, Status::SUCCESS);
        served.memory.holds_reads.set(true);
        let command = host.read_command(3, 1);
        host.io.begin(command, None).await;
        while !served.memory.is_held.get() {
            reactor::sleep(Duration::from_millis(2)).await;
        }
        assert!(host.abort(IO, command.id()).await);
        ends_as_aborted(&mut host.io, command.id()).await;
        served.memory.release();
        let read = host.read(3, 1).await.expect("as good as before");
        assert!(read.iter().all(|byte| *byte == 3));
    });
}

#[test]
fn an_event_goes_to_who_still_asks_for_one() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        let wanted = [Feature::AsynchronousEvents as u32, Events::NAMESPACES.bits()];
        host.features(AdminOpcode::SetFeatures, wanted).await;
        let request = |id| Command::new(AdminOpcode::AsynchronousEventRequest as u8, id, 0);
        let (first, second) = (request(host.admin.new_id()), request(host.admin.new_id()));
        host.admin.begin(first, None).await;
        host.admin.begin(second, None).await;
        let abort = host.abort_command(0, first.id());
        host.admin.begin(abort, None).await;
        // The one that ends is told first.
        ends_as_aborted(&mut host.admin, first.id()).await;
        let (completion, _) = host.admin.answer(abort.id(), None).await.expect("answered");
        assert_eq!((completion.status, completion.result), (Status::SUCCESS, 0));
        served.subsystem.resized(1);
        let (event, _) = host.admin.answer(second.id(), None).await.expect("told");
        assert_eq!(Event::of(event.result), Some(Event::NamespacesChanged));
        assert_eq!(Event::NamespacesChanged.page(), LogPage::ChangedNamespaces);
    });
}

#[test]
fn what_is_not_there_is_not_aborted_and_aborts_are_bounded() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        assert!(!host.abort(IO, 999).await && !host.abort(9, 1).await);
        // All of them are there before the first is answered.
        served.path.set_passage(Passage::Slow(Duration::from_millis(200)));
        let aborts: Vec<Command> = (0..=ABORTS_MAX).map(|_| host.abort_command(IO, 999)).collect();
        for abort in &aborts {
            host.admin.begin(*abort, None).await;
        }
        for (number, abort) in aborts.iter().enumerate() {
            let (completion, _) = host.admin.answer(abort.id(), None).await.expect("answered");
            let is_too_many = number as u64 == ABORTS_MAX;
            let expected = if is_too_many { Status::ABORT_LIMIT } else { Status::SUCCESS };
            assert_eq!(completion.status, expected);
        }
        served.path.set_passage(Passage::Open);
        assert!(!host.abort(IO, 999).await, "there is room again");
    });
}

/// Answers of what the volume still is at wake who would send them; of a command that was aborted there is none.
#[test]
fn nothing_is_left_of_a_connection_whose_last_command_was_aborted() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        served.memory.holds_reads.set(true);
        let command = host.read_command(0, 1);
        host.io.begin(command, None).await;
        while !served.memory.is_held.get() {
            reactor::sleep(Duration::from_millis(5)).await;
        }
        assert!(host.abort(IO, command.id()).await);
        ends_as_aborted(&mut host.io, command.id()).await;
        drop(host);
        // Longer than answers may take to leave.
        reactor::sleep(Duration::from_millis(5500)).await;
        served.memory.release();
        while served.target.controllers() > 0 || Rc::strong_count(&served.memory) > 2 {
            reactor::sleep(Duration::from_millis(5)).await;
        }
    });
}
