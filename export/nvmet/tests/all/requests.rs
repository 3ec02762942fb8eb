//! What hosts ask of a namespace.

use crate::host::{Connecting, Host, Queue};
use crate::memory::medium_error;
use crate::{BLOCK_BYTES, Served, run};
use levada_base::reactor::{self, random_u64};
use levada_device::BlockError;
use levada_nvme::fabrics::{Property, PropertyAccess};
use levada_nvme::pdu::Digests;
use levada_nvme::reservation::{ReservationReport, ReservationRequest, ReservationType};
use levada_nvme::{Command, DataPointer, IoOpcode, Range, Status};
use levada_volume::{VolumeError, Zeroing};

const BLOCKS: u64 = 1024;

fn data(blocks: u64, seed: u8) -> Vec<u8> {
    (0..blocks * BLOCK_BYTES).map(|at| (at / 7) as u8 ^ seed).collect()
}

/// Random writes and reads, within commands and asked for, are what a vector of bytes holds.
async fn compare(mut host: Host, served: &Served) {
    let mut model = vec![0; (BLOCKS * BLOCK_BYTES) as usize];
    for round in 0..60_u64 {
        let blocks = 1 + random_u64() % [2, 8, 256][round as usize % 3];
        let first = random_u64() % (BLOCKS - blocks + 1);
        let range = (first * BLOCK_BYTES) as usize..((first + blocks) * BLOCK_BYTES) as usize;
        if random_u64().is_multiple_of(2) {
            let data = data(blocks, round as u8);
            assert_eq!(host.write(first, &data).await, Status::SUCCESS);
            model[range].copy_from_slice(&data);
        } else {
            let read = host.read(first, blocks).await.expect("read");
            assert!(read == model[range], "round {round}: {blocks} blocks at {first}");
        }
    }
    assert!(served.memory.all() == model, "what the volume holds");
}

#[test]
fn a_host_reads_what_it_wrote_with_every_digest() {
    run(every_digest());
}

#[test]
fn the_same_over_connections_that_other_threads_carry() {
    run(async {
        reactor::carry_sockets(2).expect("threads");
        every_digest().await;
    });
}

async fn every_digest() {
    for (header, of_data) in [(false, false), (true, false), (false, true), (true, true)] {
        for is_without_flow_control in [false, true] {
            let served = Served::new(BLOCKS);
            let digests = Digests { header, data: of_data };
            let connecting = Connecting { digests, is_without_flow_control, ..Connecting::new(1) };
            let host = connecting.to(served.path.address(), served.subsystem.nqn()).await;
            compare(host.expect("admitted"), &served).await;
            served.target.end().await;
        }
    }
}

#[test]
fn commands_do_what_they_are_called() {
    run(async {
        let served = Served::new(BLOCKS);
        let (mut host, memory) = (served.host().await, &served.memory);
        assert_eq!(host.write(0, &data(4, 1)).await, Status::SUCCESS);
        let fua = host.write_command(4, &data(4, 2)).with_fua();
        assert_eq!(host.status(fua, Some(&data(4, 2))).await, Status::SUCCESS);
        assert_eq!((memory.writes.get(), memory.durable_writes.get()), (2, 1));
        assert_eq!(host.flush().await, Status::SUCCESS);
        assert_eq!(memory.flushes.get(), 1);
        // What is read so is durable when it is answered.
        for at in 2..4 {
            let fua = match at {
                2 => host.read_command(0, 4).with_fua(),
                _ => host.compare_command(0, &data(4, 1)).with_fua(),
            };
            let compared = (at == 3).then(|| data(4, 1));
            assert_eq!(host.status(fua, compared.as_deref()).await, Status::SUCCESS);
            assert_eq!(memory.flushes.get(), at);
        }
        assert_eq!(host.compare(0, &data(4, 1)).await, Status::SUCCESS);
        assert!(host.compare(0, &data(4, 3)).await.is(Status::COMPARE_FAILURE));
        assert_eq!(host.write_zeroes(1, 2, true).await, Status::SUCCESS);
        assert_eq!(host.write_zeroes(3, 1, false).await, Status::SUCCESS);
        assert_eq!(*memory.zeroed.borrow(), [Zeroing::Free, Zeroing::Keep]);
        assert!(host.read(1, 3).await.expect("read").iter().all(|byte| *byte == 0));
        let ranges = [Range { first_block: 8, blocks: 2 }, Range { first_block: 100, blocks: 24 }];
        assert_eq!(host.discard(&ranges).await, Status::SUCCESS);
        let discarded = [(8 * BLOCK_BYTES, 2 * BLOCK_BYTES), (100 * BLOCK_BYTES, 24 * BLOCK_BYTES)];
        assert_eq!(*memory.discarded.borrow(), discarded);
        // Advice alone takes nothing.
        assert_eq!(host.manage(&ranges, 0).await, Status::SUCCESS);
        assert_eq!(memory.discarded.borrow().len(), 2);
    });
}

#[test]
fn wrong_requests_change_nothing_and_are_told_so() {
    run(async {
        let served = Served::new(BLOCKS);
        let mut host = served.host().await;
        assert!(host.read(BLOCKS, 1).await.is_err_and(|status| status.is(Status::OUT_OF_RANGE)));
        assert!(host.write(BLOCKS - 1, &data(2, 1)).await.is(Status::OUT_OF_RANGE));
        assert!(host.read(u64::MAX, 1).await.is_err_and(|status| status.is(Status::OUT_OF_RANGE)));
        let ranges =
            [Range { first_block: 0, blocks: 1 }, Range { first_block: BLOCKS, blocks: 1 }];
        assert!(host.discard(&ranges).await.is(Status::OUT_OF_RANGE));
        assert!(host.manage(&ranges, 0).await.is(Status::OUT_OF_RANGE));
        assert!(served.memory.discarded.borrow().is_empty(), "none, unless all are right");
        let id = host.io.new_id();
        // Data for other blocks than it says.
        let short = Command::new(IoOpcode::Write as u8, id, 1).with_blocks(0, 2);
        assert!(host.status(short, Some(&data(1, 1))).await.is(Status::DATA_LENGTH_INVALID));
        let id = host.io.new_id();
        let nowhere = Command::new(IoOpcode::Read as u8, id, 2)
            .with_blocks(0, 1)
            .with_data(DataPointer::Transport { bytes: 4096 });
        assert!(host.status(nowhere, None).await.is(Status::INVALID_NAMESPACE));
        let id = host.io.new_id();
        let unknown = Command::new(0x7c, id, 1);
        assert!(host.status(unknown, None).await.is(Status::INVALID_OPCODE));
        let id = host.io.new_id();
        let large = Command::new(IoOpcode::Write as u8, id, 1)
            .with_blocks(0, 512)
            .with_data(DataPointer::Transport { bytes: 2 << 20 });
        assert!(host.status(large, None).await.is(Status::DATA_LENGTH_INVALID));
        let id = host.io.new_id();
        let elsewhere = Command::new(IoOpcode::Write as u8, id, 1)
            .with_blocks(0, 1)
            .with_data(DataPointer::Other { kind: 0x40 });
        assert!(host.status(elsewhere, None).await.is(Status::DESCRIPTOR_TYPE_INVALID));
        assert_eq!(served.memory.writes.get(), 0);
        // The queue is as good as before.
        assert_eq!(host.write(0, &data(1, 1)).await, Status::SUCCESS);
    });
}

#[test]
fn what_a_volume_fails_with_is_told_as_what_it_is() {
    run(async {
        let served = Served::new(BLOCKS);
        let mut host = served.host().await;
        for (error, on_read, on_write) in [
            (medium_error(), Status::UNRECOVERED_READ_ERROR, Status::WRITE_FAULT),
            (VolumeError::NoSpace, Status::CAPACITY_EXCEEDED, Status::CAPACITY_EXCEEDED),
            (VolumeError::ReadOnly, Status::WRITE_PROTECTED, Status::WRITE_PROTECTED),
            (VolumeError::Deleted, Status::INVALID_NAMESPACE, Status::INVALID_NAMESPACE),
        ] {
            *served.memory.fails.borrow_mut() = Some(error);
            assert_eq!(host.read(0, 1).await, Err(on_read.and_do_not_retry()));
            assert_eq!(host.write(0, &data(1, 1)).await, on_write.and_do_not_retry());
        }
        // Of what has gone, or has stopped, no block is bad, and it may come back.
        for gone in [BlockError::Gone, BlockError::TooManyLost { lost: 3, tolerated: 2 }] {
            *served.memory.fails.borrow_mut() = Some(VolumeError::Block(gone));
            assert_eq!(host.read(0, 1).await, Err(Status::NOT_READY));
            assert_eq!(host.write(0, &data(1, 1)).await, Status::NOT_READY);
        }
    });
}

#[test]
fn several_commands_are_under_way_and_answered_as_they_end() {
    run(async {
        let served = Served::new(BLOCKS);
        let mut host = served.host().await;
        served.memory.holds_writes.set(true);
        let (held, small) = (data(64, 1), data(1, 2));
        let first = host.write_command(0, &held);
        host.io.begin(first, Some(&held)).await;
        // Its data are asked for and sent; it is held up, and a read passes it.
        let said = host.io.hear().await.expect("asked");
        let levada_nvme::pdu::Pdu::ReadyToTransfer(asked) = said.pdu else { panic!("not asked") };
        host.io.send_data(asked, &held, 4096 * 10).await;
        assert!(host.read(0, 1).await.expect("read").iter().all(|byte| *byte == 0));
        served.memory.release();
        let (completion, _) = host.io.answer(first.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::SUCCESS);
        assert_eq!(host.write(0, &small).await, Status::SUCCESS);
        assert!(
            served.memory.all()[..4096] == small
                && served.memory.all()[4096..8192] == held[4096..8192]
        );
    });
}

#[test]
fn a_preempted_host_s_writes_have_ended_before_the_new_one_begins() {
    run(async {
        let served = Served::new(BLOCKS);
        let (mut old, address) = (served.host().await, served.path.address());
        let new = Host::connect(address, served.subsystem.nqn(), 2).await;
        let mut new = new.expect("admitted");
        let kind = ReservationType::WriteExclusiveRegistrants;
        let register = |key| ReservationRequest::Register { key };
        assert_eq!(old.reserve(register(1)).await, Status::SUCCESS);
        let acquire = ReservationRequest::Acquire { current: 1, kind };
        assert_eq!(old.reserve(acquire).await, Status::SUCCESS);
        assert!(new.write(0, &data(1, 9)).await.is(Status::RESERVATION_CONFLICT));
        assert!(new.read(0, 1).await.is_ok(), "only writes are excluded");
        assert_eq!(new.reserve(register(2)).await, Status::SUCCESS);
        // A write of the old one is under way and does not end.
        served.memory.holds_writes.set(true);
        let (stale, fresh) = (data(1, 1), data(1, 2));
        let command = old.write_command(0, &stale);
        old.io.begin(command, Some(&stale)).await;
        levada_base::reactor::sleep(std::time::Duration::from_millis(50)).await;
        let preempt = ReservationRequest::Preempt { current: 2, preempted: 1, kind, aborts: false };
        let (opcode, dword, keys) = preempt.to_command();
        let preempt = Command::new(opcode as u8, new.io.new_id(), 1).with_dword(10, dword);
        new.io.begin(preempt, Some(&keys)).await;
        let early = new.io.hear();
        let waited = levada_base::reactor::timeout(std::time::Duration::from_millis(100), early);
        assert!(waited.await.is_err(), "the old one's write could still overtake");
        served.memory.release();
        let (completion, _) = new.io.answer(preempt.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::SUCCESS);
        assert!(served.memory.all()[..4096] == stale[..]);
        assert_eq!(new.write(0, &fresh).await, Status::SUCCESS);
        let (answered, _) = old.io.answer(command.id(), None).await.expect("answered");
        assert_eq!(answered.status, Status::SUCCESS, "it was written before");
        assert!(old.write(0, &stale).await.is(Status::RESERVATION_CONFLICT));
        assert!(served.memory.all()[..4096] == fresh[..]);
        let report = Command::new(IoOpcode::ReservationReport as u8, new.io.new_id(), 1)
            .with_dword(10, 1024 / 4 - 1)
            .with_dword(11, 1)
            .with_data(DataPointer::Transport { bytes: 1024 });
        let (_, told) = new.io.ask(report, None).await.expect("answered");
        let told = ReservationReport::parse_extended(&told).expect("whole");
        assert_eq!((told.kind, told.registrants.len()), (Some(kind), 1));
        assert_eq!(told.registrants[0].controller, new.controller);
    });
}

/// A connection ends, as `leave` has it, while a write of it is under way; the host sends it again, and then another: the old one must not
/// come last.
fn no_old_write_overtakes(leave: impl AsyncFnOnce(Host) -> Option<Queue>) {
    run(async {
        let served = Served::new(BLOCKS);
        let (old, address) = (served.host().await, served.path.address());
        let mut other = Host::connect(address, served.subsystem.nqn(), 1).await.expect("admitted");
        assert!(other.read(0, 1).await.is_ok(), "a second path, which is there already");
        served.memory.holds_writes.set(true);
        let (stale, fresh) = (data(1, 1), data(1, 2));
        let mut old = old;
        let command = old.write_command(0, &stale);
        old.io.begin(command, Some(&stale)).await;
        while !served.memory.is_held.get() {
            levada_base::reactor::sleep(std::time::Duration::from_millis(2)).await;
        }
        let _left = leave(old).await;
        levada_base::reactor::sleep(std::time::Duration::from_millis(50)).await;
        // Another host's writes do not wait for it; those of this one do.
        served.memory.holds_only_first();
        let mut stranger =
            Host::connect(address, served.subsystem.nqn(), 2).await.expect("admitted");
        assert_eq!(stranger.write(9, &fresh).await, Status::SUCCESS);
        let command = other.write_command(0, &fresh);
        other.io.begin(command, Some(&fresh)).await;
        let early =
            levada_base::reactor::timeout(std::time::Duration::from_millis(100), other.io.hear());
        assert!(early.await.is_err(), "the old write could still come last");
        served.memory.release();
        let (completion, _) = other.io.answer(command.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::SUCCESS);
        assert!(served.memory.all()[..4096] == fresh[..]);
    });
}

#[test]
fn an_old_write_does_not_overtake_what_its_host_wrote_after_a_failover() {
    no_old_write_overtakes(async |host| {
        drop(host);
        None
    });
}

#[test]
fn an_old_write_does_not_overtake_what_its_host_wrote_after_a_reset() {
    no_old_write_overtakes(async |mut host| {
        let reset = PropertyAccess::set(Property::Configuration, 0, host.admin.new_id());
        assert!(host.admin.ask(reset, None).await.expect("answered").0.status.is_success());
        Some(host.admin)
    });
}

/// Who preempts waits for what was under way, not for what its victim may still begin.
#[test]
fn a_preemption_of_a_host_that_may_go_on_writing_ends() {
    run(async {
        let served = Served::new(BLOCKS);
        let (mut busy, address) = (served.host().await, served.path.address());
        let mut other = Host::connect(address, served.subsystem.nqn(), 2).await.expect("admitted");
        let kind = ReservationType::WriteExclusive;
        assert_eq!(busy.reserve(ReservationRequest::Register { key: 1 }).await, Status::SUCCESS);
        assert_eq!(other.reserve(ReservationRequest::Register { key: 2 }).await, Status::SUCCESS);
        let writing = levada_base::reactor::spawn(async move {
            // Two at a time, so that there is always one.
            for _ in 0..2000_u64 {
                let (one, two) =
                    (busy.write_command(0, &[0; 4096]), busy.write_command(1, &[0; 4096]));
                busy.io.begin(one, Some(&[0; 4096])).await;
                busy.io.begin(two, Some(&[0; 4096])).await;
                for command in [one, two] {
                    let (completion, _) =
                        busy.io.answer(command.id(), None).await.expect("answered");
                    assert_eq!(completion.status, Status::SUCCESS, "nobody holds a reservation");
                }
            }
        });
        let preempt = ReservationRequest::Preempt { current: 2, preempted: 1, kind, aborts: false };
        assert_eq!(other.reserve(preempt).await, Status::SUCCESS);
        writing.abort();
    });
}

/// A write waits for an older one of its host, and then its own connection ends as well. Its host sends it again, and then others, none of which
/// would wait for it: it is not carried out any more.
#[test]
fn a_write_that_waited_is_not_carried_out_once_its_connection_is_gone() {
    run(async {
        let served = Served::new(BLOCKS);
        let mut hosts = Vec::new();
        for _ in 0..3 {
            let host = Host::connect(served.path.address(), served.subsystem.nqn(), 1).await;
            let mut host = host.expect("admitted");
            assert!(host.read(0, 1).await.is_ok(), "a path, which is there already");
            hosts.push(host);
        }
        let pause = || levada_base::reactor::sleep(std::time::Duration::from_millis(50));
        let (stale, fresh) = (data(1, 1), data(1, 2));
        served.memory.holds_writes.set(true);
        for mut gone in hosts.drain(..2) {
            let command = gone.write_command(0, &stale);
            gone.io.begin(command, Some(&stale)).await;
            pause().await;
            assert!(served.memory.is_held.get(), "the first is in the volume");
            drop(gone);
            pause().await;
        }
        let mut last = hosts.remove(0);
        let command = last.write_command(0, &stale);
        last.io.begin(command, Some(&stale)).await;
        pause().await;
        served.memory.release();
        let (completion, _) = last.io.answer(command.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::SUCCESS);
        assert_eq!(last.write(0, &fresh).await, Status::SUCCESS);
        assert_eq!(served.memory.writes.get(), 3, "of the second nothing is left");
    });
}

/// A host that comes back over another connection as another host is registered at once, while what it had under way before still ends.
#[test]
fn a_registration_does_not_wait_for_what_others_have_preempted() {
    run(async {
        let served = Served::new(BLOCKS);
        let (mut old, address) = (served.host().await, served.path.address());
        let mut owner = Host::connect(address, served.subsystem.nqn(), 2).await.expect("admitted");
        let mut again = Host::connect(address, served.subsystem.nqn(), 3).await.expect("admitted");
        let kind = ReservationType::WriteExclusiveRegistrants;
        let register = |key| ReservationRequest::Register { key };
        assert_eq!(old.reserve(register(1)).await, Status::SUCCESS);
        assert_eq!(owner.reserve(register(2)).await, Status::SUCCESS);
        let acquire = ReservationRequest::Acquire { current: 2, kind };
        assert_eq!(owner.reserve(acquire).await, Status::SUCCESS);
        served.memory.holds_writes.set(true);
        let command = old.write_command(0, &data(1, 1));
        old.io.begin(command, Some(&data(1, 1))).await;
        let pause = || levada_base::reactor::sleep(std::time::Duration::from_millis(50));
        pause().await;
        let preempt = ReservationRequest::Preempt { current: 2, preempted: 1, kind, aborts: true };
        let (opcode, dword, keys) = preempt.to_command();
        let preempt = Command::new(opcode as u8, owner.io.new_id(), 1).with_dword(10, dword);
        owner.io.begin(preempt, Some(&keys)).await;
        pause().await;
        served.memory.holds_only_first();
        assert_eq!(again.reserve(register(3)).await, Status::SUCCESS);
        assert_eq!(again.write(9, &data(1, 3)).await, Status::SUCCESS);
        served.memory.release();
        let (completion, _) = owner.io.answer(preempt.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::SUCCESS);
    });
}
