//! The log of errors: what a host finds there of its commands that failed.

use crate::host::{Host, Queue, log_page};
use crate::memory::medium_error;
use crate::{Served, run};
use levada_export_nvmet::Health;
use levada_nvme::fabrics::{Configuration, Property, PropertyAccess};
use levada_nvme::identify::{ERROR_ENTRIES_MAX, Identify};
use levada_nvme::log::{GetLogPage, LogPage};
use levada_nvme::pdu::{Digests, Pdu};
use levada_nvme::{
    AdminOpcode, Command, DataPointer, ERROR_ENTRY_BYTES, ErrorEntry, Feature, IoOpcode, Status,
};

const BYTES: u64 = (ERROR_ENTRIES_MAX * ERROR_ENTRY_BYTES) as u64;

async fn entries(admin: &mut Queue) -> Vec<ErrorEntry> {
    let page = log_page(admin, LogPage::Errors as u8, BYTES).await.expect("told");
    let (entries, _) = page.as_chunks();
    entries.iter().map_while(ErrorEntry::parse).collect()
}

async fn counted(admin: &mut Queue) -> u128 {
    let page = log_page(admin, LogPage::Health as u8, 512).await.expect("told");
    Health::parse(page[..].try_into().expect("whole")).error_entries
}

/// Sends a command that fails, and looks whether its answer says that there is an entry.
async fn fails(queue: &mut Queue, command: Command, data: Option<&[u8]>) -> Status {
    let (completion, _) = queue.ask(command, data).await.expect("an answer");
    assert!(!completion.status.is_success() && completion.has_more, "{:?}", completion);
    completion.status
}

#[test]
fn a_host_finds_the_commands_that_failed() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        let page = host.identify(Identify::Controller, 0).await.expect("told");
        assert_eq!(usize::from(page[262]) + 1, ERROR_ENTRIES_MAX, "ELPE");
        assert!(entries(&mut host.admin).await.is_empty());
        assert_eq!(host.write(0, &[1; 4096]).await, Status::SUCCESS);
        assert_eq!(counted(&mut host.admin).await, 0, "what goes well is no error");

        let mut expected = Vec::new();
        let mut expects = |queue: u16, command: &Command, status, wrong_at, first_block| {
            let count = expected.len() as u64 + 1;
            let is_of_transport = false;
            let plain = ErrorEntry::of(count, queue, command, status);
            expected.insert(0, ErrorEntry { wrong_at, first_block, is_of_transport, ..plain });
        };
        // Past the end, read at once and not.
        let beyond = host.read_command(64, 1);
        let status = fails(&mut host.io, beyond, None).await;
        assert_eq!(status, Status::OUT_OF_RANGE.and_do_not_retry());
        expects(1, &beyond, status, Some(40), 64);
        let beyond = host.write_command(63, &[1; 8192]);
        let status = fails(&mut host.io, beyond, Some(&[1; 8192])).await;
        expects(1, &beyond, status, Some(40), 63);
        // The drive cannot, of which the command knows nothing.
        served.memory.fails.replace(Some(medium_error()));
        let damaged = host.read_command(5, 2);
        let status = fails(&mut host.io, damaged, None).await;
        assert_eq!(status, Status::UNRECOVERED_READ_ERROR.and_do_not_retry());
        expects(1, &damaged, status, None, 5);
        served.memory.fails.take();
        // No such command, and no such namespace.
        let unknown = Command::new(0x7d, host.io.new_id(), 1);
        let status = fails(&mut host.io, unknown, None).await;
        expects(1, &unknown, status, Some(0), 0);
        let nowhere = Command::new(IoOpcode::Flush as u8, host.io.new_id(), 77);
        let status = fails(&mut host.io, nowhere, None).await;
        expects(1, &nowhere, status, Some(4), 0);
        // Of the admin queue; what was block 64 above is no block here.
        let asked = GetLogPage { page: 0xc0, specific: 0, keeps_event: false, at: 0, bytes: 512 };
        let pointer = DataPointer::Transport { bytes: 512 };
        let page = asked.command(host.admin.new_id(), 0).with_data(pointer);
        let status = fails(&mut host.admin, page, None).await;
        expects(0, &page, status, Some(40), 0);
        let save = Command::new(AdminOpcode::SetFeatures as u8, host.admin.new_id(), 0)
            .with_dword(10, Feature::ErrorRecovery as u32 | 1 << 31);
        let status = fails(&mut host.admin, save, None).await;
        expects(0, &save, status, Some(43 | 7 << 8), 0);
        // A command of Fabrics has its type where others have the namespace.
        let property = PropertyAccess::get(Property::SubsystemReset, host.admin.new_id());
        let status = fails(&mut host.admin, property, None).await;
        expects(0, &property, status, None, 0);
        assert_eq!(expected[0].namespace, 0);

        let found = entries(&mut host.admin).await;
        assert_eq!(found, expected);
        assert_eq!(counted(&mut host.admin).await, expected.len() as u128);
        // A part of it, from the second on.
        let at = ERROR_ENTRY_BYTES as u64;
        let asked = GetLogPage {
            page: LogPage::Errors as u8,
            specific: 0,
            keeps_event: true,
            at,
            bytes: at,
        };
        let pointer = DataPointer::Transport { bytes: at as u32 };
        let part = asked.command(host.admin.new_id(), 0).with_data(pointer);
        let (_, part) = host.admin.ask(part, None).await.expect("told");
        assert_eq!(part, expected[1].to_bytes());
    });
}

#[test]
fn what_was_wanted_or_is_the_paths_is_no_error() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        assert_eq!(host.write(0, &[1; 4096]).await, Status::SUCCESS);
        assert!(host.compare(0, &[2; 4096]).await.is(Status::COMPARE_FAILURE));
        // One that waits for its data is aborted; one that is in the volume as well.
        let data = vec![1; 65536];
        let waiting = host.write_command(0, &data);
        host.io.begin(waiting, Some(&data)).await;
        assert!(matches!(host.io.hear().await.expect("asked").pdu, Pdu::ReadyToTransfer(_)));
        served.memory.holds_reads.set(true);
        let reading = host.read_command(0, 1);
        host.io.begin(reading, None).await;
        for id in [waiting.id(), reading.id()] {
            assert!(host.abort(1, id).await);
            let (completion, _) = host.io.answer(id, None).await.expect("answered");
            assert_eq!((completion.status, completion.has_more), (Status::ABORTED, false));
        }
        served.memory.release();
        served.path.set_state(levada_export_nvmet::AnaState::Inaccessible);
        assert_eq!(host.read(0, 1).await, Err(Status::ANA_INACCESSIBLE));
        assert!(entries(&mut host.admin).await.is_empty());
        assert_eq!(counted(&mut host.admin).await, 0);
    });
}

#[test]
fn damaged_data_are_an_error_of_the_transport() {
    run(async {
        let served = Served::new(64);
        let digests = Digests { header: false, data: true };
        let connecting = crate::host::Connecting { digests, ..crate::host::Connecting::new(1) };
        let host = connecting.to(served.path.address(), served.subsystem.nqn()).await;
        let mut host = host.expect("admitted");
        let command = host
            .write_command(9, &[1; 4096])
            .with_data(DataPointer::InCapsule { offset: 0, bytes: 4096 });
        let mut mangled = host.io.unit(&Pdu::Command(command), Some(&[1; 4096]));
        mangled[500] ^= 4;
        host.io.send_bytes(&mangled).await.expect("sent");
        let (completion, _) = host.io.answer(command.id(), None).await.expect("answered");
        assert!(completion.status == Status::TRANSIENT_TRANSPORT && completion.has_more);
        let [entry] = entries(&mut host.admin).await[..] else { panic!("one") };
        assert!(entry.is_of_transport && entry.first_block == 9 && entry.wrong_at.is_none());
    });
}

#[test]
fn each_controller_has_its_own_and_keeps_no_more_than_it_says() {
    run(async {
        let served = Served::new(64);
        let (mut host, mut other): (Host, Host) = (served.host().await, served.host().await);
        for _ in 0..200 {
            let beyond = host.read_command(64, 1);
            fails(&mut host.io, beyond, None).await;
        }
        let found = entries(&mut host.admin).await;
        assert_eq!(found.len(), ERROR_ENTRIES_MAX);
        let counts = found.iter().map(|entry| entry.count);
        assert!(counts.eq((200 - ERROR_ENTRIES_MAX as u64 + 1..=200).rev()));
        assert!(entries(&mut other.admin).await.is_empty());
        assert_eq!(counted(&mut other.admin).await, 0);
        // A reset empties the log, and goes on counting.
        for value in [0, u64::from(Configuration::ENABLED.0)] {
            let id = host.admin.new_id();
            let set = PropertyAccess::set(Property::Configuration, value, id);
            assert!(host.admin.ask(set, None).await.expect("answered").0.status.is_success());
        }
        assert!(entries(&mut host.admin).await.is_empty());
        assert_eq!(counted(&mut host.admin).await, 200);
        let unknown = Command::new(0x7d, host.admin.new_id(), 0);
        fails(&mut host.admin, unknown, None).await;
        assert_eq!(entries(&mut host.admin).await[0].count, 201);
    });
}
