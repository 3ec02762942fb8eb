//! Controllers: who gets one, what they are told, and when they end.

use crate::host::{Connecting, Ended, Host, Queue, log_page, log_page_of, nqn};
use crate::memory::Memory;
use crate::{BLOCK_BYTES, LIMIT, Served, opens, run};
use levada_base::{Epoch, reactor};
use levada_device::BlockError;
use levada_export_nvmet::{AnaState, Claims, Health, Hosts, Loss, Subsystem, Target, Warnings};
use levada_nvme::fabrics::{
    ANY_CONTROLLER, Configuration, ControllerState, Property, PropertyAccess, Shutdown,
};
use levada_nvme::identify::{
    ControllerIdentity, Events, Identify, NamespaceIdentity, listed_namespaces,
};
use levada_nvme::keyring::Keyring;
use levada_nvme::log::{
    DISCOVERY_HEADER_BYTES, Event, LogPage, parse_ana, parse_discovery_entries,
    parse_discovery_header,
};
use levada_nvme::pdu::Digests;
use levada_nvme::{AdminOpcode, Command, DISCOVERY_NQN, DataPointer, Feature, IoOpcode, Status};
use levada_volume::VolumeError;
use std::rc::Rc;
use std::time::Duration;

#[test]
fn a_host_learns_what_there_is() {
    run(async {
        let served = Served::new(64);
        served.subsystem.add(5, opens(&Rc::new(Memory::new(512 * 7)), 9));
        let mut host = served.host().await;
        let page = host.identify(Identify::Controller, 0).await.expect("told");
        let told = ControllerIdentity::parse(page[..].try_into().expect("whole")).expect("named");
        assert_eq!((told.id, &told.subsystem), (host.controller, served.subsystem.nqn()));
        assert!(told.has_volatile_cache && told.has_ana && told.data_bytes_max == 1 << 20);
        let page = host.identify(Identify::ActiveNamespaces, 0).await.expect("told");
        let all: Vec<u32> = listed_namespaces(page[..].try_into().expect("whole")).collect();
        assert_eq!(all, [1, 5]);
        for (id, blocks, block_bytes, guid) in [(1, 64, 4096, 7), (5, 7, 512, 9)] {
            let page = host.identify(Identify::Namespace, id).await.expect("told");
            let told = NamespaceIdentity::parse(page[..].try_into().expect("whole"));
            let told = told.expect("plain blocks");
            assert_eq!(
                (told.blocks, told.block_bytes, told.guid),
                (blocks, block_bytes, [guid; 16])
            );
        }
        let none = host.identify(Identify::Namespace, 2).await.expect("told");
        assert!(none.iter().all(|byte| *byte == 0), "one that is not there is all zeroes");
        let beyond = host.identify(Identify::Namespace, 5000).await;
        assert!(beyond.is_err_and(|status| status.is(Status::INVALID_NAMESPACE)));
        for page in [LogPage::Errors, LogPage::Health, LogPage::Firmware, LogPage::Effects] {
            assert!(log_page(&mut host.admin, page as u8, 512).await.is_ok(), "{page:?}");
        }
        let unknown = log_page(&mut host.admin, 0xc0, 512).await;
        assert!(unknown.is_err_and(|status| status.is(Status::INVALID_LOG_PAGE)));
    });
}

/// Everything that Identify may be asked, of each kind of namespace and of none.
#[test]
fn identify_answers_what_1_4_has_and_refuses_the_rest() {
    const ABSENT: u32 = 2;
    const BEYOND: u32 = 1025;
    const EVERY: u32 = u32::MAX;
    run(async {
        let served = Served::new(64);
        served.subsystem.add(5, opens(&Rc::new(Memory::new(512 * 7)), 9));
        let (mut host, other) = (served.host().await, served.host().await);
        let controllers = [host.controller, other.controller];
        let mut ask = async |what: u32, namespace: u32, dword11: u32| {
            let command = Command::new(AdminOpcode::Identify as u8, host.admin.new_id(), namespace)
                .with_dword(10, what)
                .with_dword(11, dword11)
                .with_data(DataPointer::Transport { bytes: 4096 });
            let (completion, data) = host.admin.ask(command, None).await.expect("an answer");
            let is_whole = data.len() == 4096 || !completion.status.is_success();
            assert!(is_whole, "{what:#x} of {namespace:#x}");
            if completion.status.is_success() { Ok(data) } else { Err(completion.status) }
        };
        let zeroes = |page: Result<Vec<u8>, Status>| page.expect("told").iter().all(|b| *b == 0);
        let refused = |page: Result<Vec<u8>, Status>| {
            let status = page.expect_err("refused");
            assert!(status.do_not_retry);
            status.and_do_not_retry()
        };
        const NO_NAMESPACE: Status = Status::INVALID_NAMESPACE.and_do_not_retry();
        const WRONG: Status = Status::INVALID_FIELD.and_do_not_retry();
        // A namespace, active or allocated, which is the same here; its command set has nothing more to say.
        for what in [0x00, 0x11, 0x05] {
            assert_eq!(zeroes(ask(what, 5, 0).await), what == 0x05, "{what:#x}");
            assert!(zeroes(ask(what, ABSENT, 0).await), "{what:#x}");
            for namespace in [0, BEYOND, EVERY - 1, EVERY] {
                assert_eq!(refused(ask(what, namespace, 0).await), NO_NAMESPACE, "{what:#x}");
            }
        }
        // Lists of namespaces.
        for what in [0x02, 0x07, 0x10] {
            for (after, expected) in
                [(0, &[1, 5][..]), (1, &[5]), (4, &[5]), (5, &[]), (EVERY - 2, &[])]
            {
                let page = ask(what, after, 0).await.expect("told");
                let all: Vec<u32> =
                    listed_namespaces(page[..].try_into().expect("whole")).collect();
                assert_eq!(all, expected, "{what:#x} after {after}");
            }
            for after in [EVERY - 1, EVERY] {
                assert_eq!(refused(ask(what, after, 0).await), NO_NAMESPACE, "{what:#x}");
            }
        }
        // Names: of an active one alone.
        let names = ask(0x03, 1, 0).await.expect("told");
        assert_eq!((names[..4].to_vec(), names[4..20].to_vec()), (vec![2, 16, 0, 0], vec![7; 16]));
        for namespace in [0, ABSENT, BEYOND, EVERY] {
            assert_eq!(refused(ask(0x03, namespace, 0).await), NO_NAMESPACE);
        }
        // The controller, whatever else is said; and what its command set limits, which is nothing.
        assert!(!zeroes(ask(0x01, EVERY, 0).await) && zeroes(ask(0x06, 0, 0).await));
        // Other command sets there are none.
        for what in [0x05, 0x06, 0x07] {
            assert_eq!(refused(ask(what, 1, 2 << 24).await), WRONG, "{what:#x}");
        }
        // Lists of controllers, from one on: those of a namespace, and all.
        for (what, namespace) in [(0x12, 1), (0x13, 0)] {
            for skipped in 0..3 {
                let first = controllers.get(skipped).map_or(0xffff, |id| u32::from(*id));
                let page = ask(what | first << 16, namespace, 0).await.expect("told");
                let ids: Vec<u16> =
                    page.chunks(2).map(|id| u16::from_le_bytes([id[0], id[1]])).collect();
                let count = 2 - skipped;
                assert_eq!(
                    (usize::from(ids[0]), &ids[1..=count]),
                    (count, &controllers[skipped..])
                );
                assert!(ids[count + 1..].iter().all(|id| *id == 0));
            }
        }
        assert!(zeroes(ask(0x12, ABSENT, 0).await));
        assert_eq!(refused(ask(0x12, BEYOND, 0).await), NO_NAMESPACE);
        assert_eq!(refused(ask(0x12, EVERY, 0).await), WRONG);
        // All the rest: sets of NVM, virtual functions, granularity, UUIDs, domains, groups, and lists of command sets (1Ch), which CAP does not
        // say to be there.
        let known = [0, 1, 2, 3, 5, 6, 7, 0x10, 0x11, 0x12, 0x13];
        for what in (0..=0xff).filter(|what| !known.contains(what)) {
            assert_eq!(refused(ask(what, 1, 0).await), WRONG, "{what:#x}");
        }
        // Too little room.
        let short = Command::new(AdminOpcode::Identify as u8, host.admin.new_id(), 0)
            .with_dword(10, 1)
            .with_data(DataPointer::Transport { bytes: 4092 });
        let (completion, _) = host.admin.ask(short, None).await.expect("an answer");
        assert!(completion.status.is(Status::DATA_LENGTH_INVALID));
        // Who discovers learns of the controller alone.
        let mut admin = discovering(&Connecting::new(3), &served).await;
        for what in 0..=0xff {
            let command = Command::new(AdminOpcode::Identify as u8, admin.new_id(), 1)
                .with_dword(10, what)
                .with_data(DataPointer::Transport { bytes: 4096 });
            let (completion, _) = admin.ask(command, None).await.expect("an answer");
            assert_eq!(completion.status.is_success(), what == 1, "{what:#x}");
        }
        // And the properties say no other command set, nor more than 1.4.
        let id = admin.new_id();
        let asked = admin.ask(PropertyAccess::get(Property::Capabilities, id), None).await;
        assert_eq!(asked.expect("told").0.result >> 37 & 0xff, 1);
        let id = admin.new_id();
        let asked = admin.ask(PropertyAccess::get(Property::Version, id), None).await;
        assert_eq!(asked.expect("told").0.result, 0x0001_0400);
    });
}

#[test]
fn features_are_set_to_what_can_be_and_asked_for() {
    const SAVED: u32 = 1 << 31;
    const UNDER: u32 = 1 << 20;
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        let mut set = async |feature: Feature, value: u32| {
            let completion = host.features(AdminOpcode::SetFeatures, [feature as u32, value]).await;
            (completion.status.is_success(), completion.status)
        };
        for (feature, value) in [
            (Feature::Arbitration, 0x0103_0207),
            (Feature::ErrorRecovery, 5),
            (Feature::WriteAtomicity, 1),
            (Feature::PowerManagement, 0),
            (Feature::KeepAliveTimer, 30_000),
            (Feature::VolatileWriteCache, 1),
            (Feature::TemperatureThreshold, 350),
            (Feature::TemperatureThreshold, UNDER | 0xf_0000 | 280),
        ] {
            assert!(set(feature, value).await.0, "{feature:?}");
        }
        let wrong = Status::INVALID_FIELD;
        for (feature, value, why) in [
            (Feature::PowerManagement, 1, wrong),
            (Feature::TemperatureThreshold, 0x1_0000 | 350, wrong),
            (Feature::TemperatureThreshold, (2 * UNDER) | 350, wrong),
            (Feature::VolatileWriteCache, 0, Status::FEATURE_NOT_CHANGEABLE),
            // There are I/O queues.
            (Feature::NumberOfQueues, 0x3_0003, Status::SEQUENCE_ERROR),
            (Feature::HostIdentifier, 0, Status::SEQUENCE_ERROR),
        ] {
            assert!(set(feature, value).await.1.is(why), "{feature:?} {value:#x}");
        }
        let saved = [Feature::ErrorRecovery as u32 | SAVED, 5];
        let saved = host.features(AdminOpcode::SetFeatures, saved).await.status;
        assert!(saved.is(Status::FEATURE_NOT_SAVEABLE));
        let mut get = async |feature: Feature, value: u32| {
            host.features(AdminOpcode::GetFeatures, [feature as u32, value]).await
        };
        for (feature, value, is) in [
            (Feature::Arbitration, 0, 0x0103_0207),
            (Feature::ErrorRecovery, 0, 5),
            (Feature::WriteAtomicity, 0, 1),
            (Feature::PowerManagement, 0, 0),
            (Feature::KeepAliveTimer, 0, 30_000),
            (Feature::VolatileWriteCache, 0, 1),
            (Feature::TemperatureThreshold, 0, 350),
            (Feature::TemperatureThreshold, UNDER, 280),
        ] {
            assert_eq!(get(feature, value).await.result, is, "{feature:?}");
        }
        assert!(get(Feature::TemperatureThreshold, 0xf_0000).await.status.is(wrong));
    });
}

/// Neither halves of a pair nor data that PRPs describe are known.
#[test]
fn commands_come_alone_and_with_sgls() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        for (flags, is_known) in
            [(0x40, true), (0x80, true), (0x41, false), (0x42, false), (0x00, false), (0xc0, false)]
        {
            let mut bytes = *host.read_command(0, 1).as_bytes();
            bytes[1] = flags;
            let (answer, _) = host.io.ask(Command::parse(&bytes), None).await.expect("answered");
            assert_eq!(answer.status.is_success(), is_known, "{flags:#x}: {}", answer.status);
            assert!(is_known || answer.status.is(Status::INVALID_FIELD), "{}", answer.status);
        }
    });
}

/// Hosts of what is durable when it is answered need not flush, and are told so.
#[test]
fn who_has_no_volatile_cache_says_so() {
    run(async {
        let served = Served::new(64);
        let _clone = served.subsystem.clone().written_through();
        let mut host = served.host().await;
        let page = host.identify(Identify::Controller, 0).await.expect("told");
        let told = ControllerIdentity::parse(page[..].try_into().expect("whole")).expect("named");
        assert!(!told.has_volatile_cache);
        for opcode in [AdminOpcode::SetFeatures, AdminOpcode::GetFeatures] {
            let asked = [Feature::VolatileWriteCache as u32, 1];
            let answer = host.features(opcode, asked).await.status;
            assert!(answer.is(Status::INVALID_FIELD), "{opcode:?}: {answer}");
        }
    });
}

#[test]
fn queues_are_agreed_on_before_there_are_any() {
    run(async {
        let served = Served::new(64);
        let connecting = Connecting::new(1);
        let mut admin = Queue::open(served.path.address(), Digests::default()).await;
        let at = (ANY_CONTROLLER, 0);
        connecting.queue(&mut admin, served.subsystem.nqn(), at).await.expect("admitted");
        let enabled = u64::from(Configuration::ENABLED.0);
        let enable = PropertyAccess::set(Property::Configuration, enabled, admin.new_id());
        assert!(admin.ask(enable, None).await.expect("an answer").0.status.is_success());
        for (asked, given) in
            [(0x3_0003, Ok(0x3_0003)), (0x3_0001, Ok(0x1_0001)), (0xffff, Err(()))]
        {
            let command = Command::new(AdminOpcode::SetFeatures as u8, admin.new_id(), 0)
                .with_dword(10, Feature::NumberOfQueues as u32)
                .with_dword(11, asked);
            let (completion, _) = admin.ask(command, None).await.expect("an answer");
            let is = completion.status.is_success().then_some(completion.result).ok_or(());
            assert_eq!(is, given, "{asked:#x}");
        }
        let command = Command::new(AdminOpcode::GetFeatures as u8, admin.new_id(), 0)
            .with_dword(10, Feature::NumberOfQueues as u32);
        let (completion, _) = admin.ask(command, None).await.expect("an answer");
        assert_eq!(completion.result, 0x1_0001, "what was granted last");
    });
}

/// Reservations go by a host's identifier: nobody else comes with it while the host is there.
#[test]
fn an_identifier_is_of_one_host() {
    run(async {
        let served = Served::new(64);
        let connecting = Connecting::new(1);
        let at = (ANY_CONTROLLER, 0);
        let mut first = Queue::open(served.path.address(), Digests::default()).await;
        connecting.queue(&mut first, served.subsystem.nqn(), at).await.expect("admitted");
        let mut again = Queue::open(served.path.address(), Digests::default()).await;
        connecting.queue(&mut again, served.subsystem.nqn(), at).await.expect("the same host");
        let other = Connecting { host_id: connecting.host_id, ..Connecting::new(2) };
        let mut second = Queue::open(served.path.address(), Digests::default()).await;
        let refused = other.queue(&mut second, served.subsystem.nqn(), at).await;
        let refused = refused.map_err(|completion| completion.status);
        assert_eq!(refused, Err(Status::CONNECT_INVALID_HOST), "the first one may go");
    });
}

#[test]
fn a_drive_tells_its_own_health_and_the_subsystem_the_worst_of_all() {
    run(async {
        let served = Served::new(64);
        let worn = Health {
            warnings: Warnings::SPARE,
            kelvin: 300,
            spare_percent: 8,
            spare_threshold_percent: 10,
            used_percent: 95,
            written_units: 1000,
            media_errors: 2,
            ..Health::default()
        };
        let hot = Health {
            warnings: Warnings::TEMPERATURE,
            kelvin: 360,
            spare_percent: 100,
            ..Health::default()
        };
        let memory = Rc::new(Memory::new(64 * BLOCK_BYTES));
        served.subsystem.add_drive(2, opens(&memory, 2), Rc::new(move || worn), Claims::default());
        served.subsystem.add_drive(3, opens(&memory, 3), Rc::new(move || hot), Claims::default());
        let mut host = served.host().await;
        let page = host.identify(Identify::Controller, 0).await.expect("told");
        let told = ControllerIdentity::parse(page[..].try_into().expect("whole")).expect("named");
        assert!(told.has_namespace_health);
        let mut pages = Vec::new();
        for namespace in [1, 2, 3, u32::MAX, 0] {
            let page = log_page_of(&mut host.admin, namespace, LogPage::Health as u8, 512).await;
            pages.push(Health::parse(page.expect("told")[..].try_into().expect("whole")));
        }
        // A volume has nothing to say of drives.
        assert_eq!(pages[0], Health { spare_percent: 100, ..Health::default() });
        assert_eq!(pages[1..3], [worn, hot]);
        let both =
            Health { warnings: Warnings::SPARE | Warnings::TEMPERATURE, kelvin: 360, ..worn };
        assert_eq!(pages[3..], [both, both]);
        let none = log_page_of(&mut host.admin, 9, LogPage::Health as u8, 512).await;
        assert!(none.is_err_and(|status| status.is(Status::INVALID_NAMESPACE)));
    });
}

#[test]
fn hosts_that_are_not_admitted_find_nothing() {
    run(async {
        let friend = Connecting::new(1);
        let hosts = Hosts::only([friend.host.clone()], Keyring::new());
        let served = Served::for_hosts(64, hosts);
        let (address, subsystem) = (served.path.address(), served.subsystem.nqn());
        let refused = Host::connect(address, subsystem, 2).await.err().expect("refused");
        assert_eq!(refused.status, Status::CONNECT_INVALID_HOST.and_do_not_retry());
        let missing = Host::connect(address, &nqn("nqn.2026-11.io.levada:none"), 1).await;
        let missing = missing.err().expect("not there");
        assert_eq!(missing.status, Status::CONNECT_INVALID_PARAMETERS.and_do_not_retry());
        for (number, found) in [(1, 1), (2, 0)] {
            let mut admin = discovering(&Connecting::new(number), &served).await;
            let page = discovered(&mut admin).await;
            assert_eq!(page, found, "host {number}");
        }
        // One that is connected ends when it is not admitted any more.
        let mut host = friend.to(address, subsystem).await.expect("admitted");
        served.subsystem.set_hosts(Hosts::only([], Keyring::new()));
        assert!(matches!(host.io.hear().await, Err(Ended::Gone)));
        assert!(host.admin.ask(Command::new(0x18, 9, 0), None).await.is_err());
    });
}

#[test]
fn the_page_of_effects_lists_the_commands_that_there_are() {
    run(async {
        let served = Served::new(64);
        let listed = async |admin: &mut Queue| {
            let page = log_page(admin, LogPage::Effects as u8, 4096).await.expect("told");
            let words =
                page.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four")));
            let listed = words.enumerate().filter(|(_, word)| word & 1 == 1);
            let (admin, io): (Vec<_>, Vec<_>) = listed.partition(|(opcode, _)| *opcode < 256);
            let of = |listed: Vec<(usize, u32)>, first| {
                listed.into_iter().map(|(at, word)| (at - first, word >> 1)).collect::<Vec<_>>()
            };
            (of(admin, 0), of(io, 256))
        };
        let unchanging = |opcode: &usize| (*opcode, 0);
        let of_admin: Vec<_> =
            [0x02, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x18, 0x7f].iter().map(unchanging).collect();
        // Flush, Write, Read, Compare, Write Zeroes, Dataset Management, reservations, Fabrics; Bit 1: the contents of blocks change.
        let of_io = [
            (0x00, 0),
            (0x01, 1),
            (0x02, 0),
            (0x05, 0),
            (0x08, 1),
            (0x09, 1),
            (0x0d, 0),
            (0x0e, 0),
            (0x11, 0),
            (0x15, 0),
            (0x7f, 0),
        ];
        let mut host = served.host().await;
        assert_eq!(listed(&mut host.admin).await, (of_admin.clone(), of_io.to_vec()));
        let mut discovery = discovering(&Connecting::new(3), &served).await;
        assert_eq!(listed(&mut discovery).await, (of_admin, vec![]));
    });
}

/// What an operator says of a port has to hold for all that comes through it.
#[test]
fn queues_come_through_the_port_of_their_controller() {
    run(async {
        let served = Served::new(64);
        let other = served.target.listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let host = served.host().await;
        let connecting = Connecting::new(1);
        for (port, is_let_in) in [(&other, false), (&served.path, true)] {
            let mut queue = Queue::open(port.address(), Digests::default()).await;
            let of = (host.controller, 2);
            let connected = connecting.queue(&mut queue, served.subsystem.nqn(), of).await;
            assert_eq!(connected.is_ok(), is_let_in, "{}", port.address());
        }
    });
}

const BLOCK: [u8; BLOCK_BYTES as usize] = [1; BLOCK_BYTES as usize];

/// Another server has the volumes: what is under way there may never end, and its host must not wait for it.
#[test]
fn hosts_of_a_target_that_has_lost_its_volumes_are_sent_away_and_told_when_they_come_back() {
    let stopped = (Loss::Stopped, AnaState::Inaccessible, Status::ANA_INACCESSIBLE);
    let elsewhere = (Loss::Elsewhere, AnaState::PersistentLoss, Status::ANA_PERSISTENT_LOSS);
    for (loss, state, status) in [stopped, elsewhere] {
        sent_away_and_told(loss, state, status);
    }
}

fn sent_away_and_told(loss: Loss, state: AnaState, status: Status) {
    run(async move {
        let served = Served::new(64);
        let mut host = served.host().await;
        served.memory.holds_writes.set(true);
        let write = host.write_command(0, &BLOCK);
        host.io.begin(write, Some(&BLOCK)).await;
        while !served.memory.is_held.get() {
            reactor::sleep(Duration::from_millis(1)).await;
        }
        let begun = reactor::now();
        served.target.lose(loss);
        assert!(host.io.answer(write.id(), None).await.is_err(), "the connection ends");
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());

        let mut host = served.host().await;
        let page = log_page(&mut host.admin, LogPage::Ana as u8, 64).await.expect("told");
        assert_eq!(parse_ana(&page).expect("whole")[0].state, state);
        assert_eq!(host.read(0, 1).await, Err(status));
        assert_eq!(host.write(0, &BLOCK).await, status);
        let identity = host.identify(Identify::Namespace, 1).await;
        assert_eq!(identity, Err(status), "not even that is waited for");
        // Nobody knows which others there would be: whoever asks for one is to try again.
        let other = nqn("nqn.2014-08.org.example:other");
        let mut queue = Queue::open(served.path.address(), Digests::default()).await;
        let connecting = Connecting::new(2);
        let refused = connecting.queue(&mut queue, &other, (ANY_CONTROLLER, 0)).await;
        assert_eq!(refused.expect_err("it is not there").status, Status::CONTROLLER_BUSY);
        // It may turn out later that another server has them, and that stays so.
        for later in [Loss::Elsewhere, Loss::Stopped] {
            served.target.lose(later);
            let mut host = served.host().await;
            assert_eq!(host.read(0, 1).await, Err(Status::ANA_PERSISTENT_LOSS));
        }
    });
}

/// A server may lose its volumes before it could say which ones there are: its hosts have waited to be let in.
#[test]
fn who_waits_for_a_target_that_never_begins_is_told_as_well() {
    run(async {
        let target = Target::new();
        let path = target.listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let waiting = reactor::spawn(async move {
            let mut queue = Queue::open(path.address(), Digests::default()).await;
            let connecting = Connecting::new(1);
            let asked = nqn("nqn.2014-08.org.example:any");
            connecting.queue(&mut queue, &asked, (ANY_CONTROLLER, 0)).await.map(drop)
        });
        reactor::sleep(Duration::from_millis(50)).await;
        target.lose(Loss::Elsewhere);
        let refused = waiting.await.expect("nobody killed it").expect_err("it is not there");
        assert_eq!(refused.status, Status::CONTROLLER_BUSY);
    });
}

/// An array says with the first request that another server has it.
#[test]
fn a_volume_that_was_taken_over_is_lost_on_every_path() {
    run(async {
        let served = Served::new(64);
        let (mut one, mut other) = (served.host().await, served.host().await);
        let fenced = BlockError::Fenced { ours: Epoch(1), seen: Epoch(2) };
        served.memory.fails.replace(Some(fenced.into()));
        assert_eq!(one.write(0, &BLOCK).await, Status::ANA_PERSISTENT_LOSS);
        served.memory.fails.replace(None);
        for host in [&mut one, &mut other] {
            assert_eq!(host.read(0, 1).await, Err(Status::ANA_PERSISTENT_LOSS));
            let page = log_page(&mut host.admin, LogPage::Ana as u8, 64).await.expect("told");
            assert_eq!(parse_ana(&page).expect("whole")[0].state, AnaState::PersistentLoss);
        }
    });
}

async fn discovering(connecting: &Connecting, served: &Served) -> Queue {
    let mut admin = Queue::open(served.path.address(), Digests::default()).await;
    let connected = connecting.queue(&mut admin, &nqn(DISCOVERY_NQN), (ANY_CONTROLLER, 0)).await;
    connected.expect("everybody may look");
    let id = admin.new_id();
    let enable = u64::from(Configuration::ENABLED.0);
    let enabled = admin.ask(PropertyAccess::set(Property::Configuration, enable, id), None).await;
    assert!(enabled.expect("answered").0.status.is_success());
    admin
}

/// How many subsystems there are.
async fn discovered(admin: &mut Queue) -> usize {
    let bytes = DISCOVERY_HEADER_BYTES as u64 * 3;
    let page = log_page(admin, LogPage::Discovery as u8, bytes).await.expect("told");
    let (header, entries) = page.split_first_chunk().expect("a header");
    let (_, count) = parse_discovery_header(header);
    let entries = parse_discovery_entries(entries).take(count as usize);
    entries.filter(|entry| !entry.is_discovery && entry.address.ip().is_loopback()).count()
}

#[test]
fn changes_are_told() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        let mut admin = discovering(&Connecting::new(3), &served).await;
        let want = |id, events: Events| {
            Command::new(AdminOpcode::SetFeatures as u8, id, 0)
                .with_dword(10, Feature::AsynchronousEvents as u32)
                .with_dword(11, events.bits())
        };
        let id = admin.new_id();
        assert!(admin.ask(want(id, Events::DISCOVERY), None).await.is_ok());
        let id = host.admin.new_id();
        assert!(host.admin.ask(want(id, Events::NAMESPACES | Events::ANA), None).await.is_ok());
        let request = |id| Command::new(AdminOpcode::AsynchronousEventRequest as u8, id, 0);
        let (told, other) = (request(host.admin.new_id()), request(admin.new_id()));
        host.admin.begin(told, None).await;
        admin.begin(other, None).await;
        reactor::sleep(Duration::from_millis(20)).await;

        let name = nqn("nqn.2026-11.io.levada:second");
        served.target.add(Subsystem::new(name.clone(), "2", Hosts::Any));
        let (event, _) = admin.answer(other.id(), None).await.expect("told");
        assert_eq!(Event::of(event.result), Some(Event::DiscoveryChanged));
        assert_eq!(discovered(&mut admin).await, 2);
        served.target.remove(&name);
        assert_eq!(discovered(&mut admin).await, 1);

        served.memory.size_bytes.set(32 * BLOCK_BYTES);
        served.subsystem.resized(1);
        let (event, _) = host.admin.answer(told.id(), None).await.expect("told");
        assert_eq!(Event::of(event.result), Some(Event::NamespacesChanged));
        let page = log_page(&mut host.admin, LogPage::ChangedNamespaces as u8, 4096).await;
        assert_eq!(page.expect("told")[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert!(host.read(32, 1).await.is_err_and(|status| status.is(Status::OUT_OF_RANGE)));

        served.path.set_state(AnaState::Inaccessible);
        let told = request(host.admin.new_id());
        let (event, _) = host.admin.ask(told, None).await.expect("told");
        assert_eq!(Event::of(event.result), Some(Event::AnaChanged));
        let page = log_page(&mut host.admin, LogPage::Ana as u8, 64).await.expect("told");
        assert_eq!(parse_ana(&page).expect("whole")[0].state, AnaState::Inaccessible);
        assert_eq!(host.read(0, 1).await, Err(Status::ANA_INACCESSIBLE));
        // Each change is told once the one before was looked at, counted, and what is refused says why.
        for (changes, state, refused) in [
            (2, AnaState::PersistentLoss, Some(Status::ANA_PERSISTENT_LOSS)),
            (3, AnaState::Change, Some(Status::ANA_TRANSITION)),
            (4, AnaState::NonOptimized, None),
            (5, AnaState::Optimized, None),
        ] {
            let told = request(host.admin.new_id());
            host.admin.begin(told, None).await;
            served.path.set_state(state);
            served.path.set_state(state);
            let (event, _) = host.admin.answer(told.id(), None).await.expect("told");
            assert_eq!(Event::of(event.result), Some(Event::AnaChanged));
            let page = log_page(&mut host.admin, LogPage::Ana as u8, 64).await.expect("told");
            let group = &parse_ana(&page).expect("whole")[0];
            assert_eq!((group.state, group.changes), (state, changes));
            assert_eq!(u64::from_le_bytes(*page.first_chunk().expect("whole")), changes);
            assert_eq!(host.read(0, 1).await.err(), refused, "{state}");
        }
        // Of warnings nobody hears who has not asked; once until the page was read.
        let told = request(host.admin.new_id());
        host.admin.begin(told, None).await;
        served.subsystem.health_changed(Warnings::SPARE);
        let id = host.admin.new_id();
        assert!(host.admin.ask(want(id, Events::SPARE), None).await.is_ok());
        served.subsystem.health_changed(Warnings::TEMPERATURE | Warnings::SPARE);
        let (event, _) = host.admin.answer(told.id(), None).await.expect("told");
        assert_eq!(Event::of(event.result), Some(Event::LowSpare));
        let told = request(host.admin.new_id());
        host.admin.begin(told, None).await;
        served.subsystem.health_changed(Warnings::SPARE);
        let page = log_page(&mut host.admin, LogPage::Health as u8, 512).await;
        assert!(page.is_ok(), "and no event before it");
        served.subsystem.health_changed(Warnings::SPARE);
        let (event, _) = host.admin.answer(told.id(), None).await.expect("told");
        assert_eq!(Event::of(event.result), Some(Event::LowSpare));
    });
}

#[test]
fn a_namespace_that_is_removed_is_not_there_any_more() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        assert!(host.read(0, 1).await.is_ok());
        assert_eq!(Rc::strong_count(&served.memory), 3, "open while a host has it");
        served.subsystem.remove(1);
        assert!(host.read(0, 1).await.is_err_and(|status| status.is(Status::INVALID_NAMESPACE)));
        assert_eq!(Rc::strong_count(&served.memory), 1);
    });
}

#[test]
fn a_silent_host_is_given_up() {
    run(async {
        let served = Served::new(64);
        let connecting = Connecting { keep_alive_ms: 1000, ..Connecting::new(1) };
        let (address, subsystem) = (served.path.address(), served.subsystem.nqn());
        let mut host = connecting.to(address, subsystem).await.expect("admitted");
        for _ in 0..4 {
            // Anything it says keeps it.
            reactor::sleep(Duration::from_millis(400)).await;
            assert!(host.read(0, 1).await.is_ok());
        }
        let gone = reactor::timeout(LIMIT, host.io.hear()).await.expect("in time");
        assert!(matches!(gone, Err(Ended::Gone)));
        assert!(host.admin.hear().await.is_err());
        reactor::sleep(Duration::from_millis(20)).await;
        assert_eq!((served.target.controllers(), Rc::strong_count(&served.memory)), (0, 2));
    });
}

#[test]
fn queues_belong_to_their_controller() {
    run(async {
        let served = Served::new(64);
        let (mut host, subsystem) = (served.host().await, served.subsystem.nqn());
        let connecting = Connecting::new(1);
        let address = served.path.address();
        // Twice the same, one of another host, one of no controller, and the admin queue of one that is there.
        for (who, controller, id, place) in [
            (&connecting, host.controller, 1, None),
            (&Connecting::new(2), host.controller, 2, Some(1 << 16 | 16)),
            (&connecting, 999, 2, Some(1 << 16 | 16)),
            (&connecting, host.controller, 0, Some(1 << 16 | 16)),
            (&connecting, host.controller, 65, Some(42)),
        ] {
            let mut queue = Queue::open(address, Digests::default()).await;
            let refused = who.queue(&mut queue, subsystem, (controller, id)).await;
            let refused = refused.expect_err("not that queue");
            match place {
                Some(place) => {
                    assert!(refused.status.is(Status::CONNECT_INVALID_PARAMETERS));
                    assert_eq!(refused.result, place, "queue {id} of {controller}");
                }
                None => assert!(refused.status.is(Status::SEQUENCE_ERROR)),
            }
        }
        let mut second = Queue::open(address, Digests::default()).await;
        connecting.queue(&mut second, subsystem, (host.controller, 2)).await.expect("a second");
        // Reset: the I/O queues end, the admin queue stays.
        let id = host.admin.new_id();
        let reset = PropertyAccess::set(Property::Configuration, 0, id);
        assert!(host.admin.ask(reset, None).await.expect("answered").0.status.is_success());
        assert!(second.hear().await.is_err() && host.io.hear().await.is_err());
        let id = host.admin.new_id();
        let (state, _) =
            host.admin.ask(PropertyAccess::get(Property::Status, id), None).await.expect("told");
        assert_eq!(ControllerState::parse(state.result as u32), ControllerState::default());
        // The admin queue's end is the controller's.
        drop(host);
        while served.target.controllers() > 0 {
            reactor::sleep(Duration::from_millis(5)).await;
        }
    });
}

/// Has a controller shut down.
async fn shut_down(host: &mut Host) {
    let shut_down = u64::from(Configuration::ENABLED.shut_down().0);
    let id = host.admin.new_id();
    let shut_down = PropertyAccess::set(Property::Configuration, shut_down, id);
    assert!(host.admin.ask(shut_down, None).await.expect("told").0.status.is_success());
}

/// How far it is, a little later.
async fn shutdown_of(host: &mut Host) -> Shutdown {
    reactor::sleep(Duration::from_millis(50)).await;
    let id = host.admin.new_id();
    let state = PropertyAccess::get(Property::Status, id);
    let (state, _) = host.admin.ask(state, None).await.expect("told");
    ControllerState::parse(state.result as u32).shutdown
}

/// A host that goes may take the power away once it is told that its controller is shut down.
#[test]
fn what_was_written_is_durable_once_a_controller_is_shut_down() {
    run(async {
        let served = Served::new(64);
        let memory = &served.memory;
        let mut host = served.host().await;
        assert_eq!(host.write(0, &[1; 4096]).await, Status::SUCCESS);
        shut_down(&mut host).await;
        assert!(host.io.hear().await.is_err(), "its queues end");
        assert_eq!((shutdown_of(&mut host).await, memory.flushes.get()), (Shutdown::Complete, 1));

        // What is under way comes first.
        let mut host = served.host().await;
        memory.holds_writes.set(true);
        let data = vec![7; 4096];
        let command = host.write_command(3, &data);
        host.io.begin(command, Some(&data)).await;
        reactor::sleep(Duration::from_millis(50)).await;
        shut_down(&mut host).await;
        assert_eq!((shutdown_of(&mut host).await, memory.flushes.get()), (Shutdown::UnderWay, 1));
        memory.release();
        assert_eq!((shutdown_of(&mut host).await, memory.flushes.get()), (Shutdown::Complete, 2));

        let mut host = served.host().await;
        assert_eq!(host.write(0, &[1; 4096]).await, Status::SUCCESS);
        memory.fails.replace(Some(VolumeError::Block(BlockError::Gone)));
        shut_down(&mut host).await;
        assert_eq!((shutdown_of(&mut host).await, memory.flushes.get()), (Shutdown::UnderWay, 3));
    });
}

#[test]
fn what_was_asked_for_is_answered_when_the_target_ends() {
    run(async {
        let served = Served::new(64);
        let mut host = served.host().await;
        served.memory.holds_writes.set(true);
        let data = vec![7; 4096];
        let command = host.write_command(3, &data);
        host.io.begin(command, Some(&data)).await;
        reactor::sleep(Duration::from_millis(50)).await;
        let Served { target, memory, .. } = served;
        let ending = reactor::spawn(async move { target.end().await });
        reactor::sleep(Duration::from_millis(50)).await;
        assert!(!ending.is_finished());
        memory.release();
        let (completion, _) = host.io.answer(command.id(), None).await.expect("answered");
        assert_eq!(completion.status, Status::SUCCESS);
        assert!(matches!(host.io.hear().await, Err(Ended::Gone)));
        ending.await;
    });
}

#[test]
fn commands_before_the_controller_is_enabled_are_out_of_sequence() {
    run(async {
        let served = Served::new(64);
        let mut admin = Queue::open(served.path.address(), Digests::default()).await;
        let connecting = Connecting::new(1);
        let subsystem = served.subsystem.nqn();
        let controller = connecting.queue(&mut admin, subsystem, (ANY_CONTROLLER, 0)).await;
        let controller = controller.expect("admitted");
        let early = Command::new(AdminOpcode::Identify as u8, admin.new_id(), 0);
        let (completion, _) = admin.ask(early, None).await.expect("answered");
        assert!(completion.status.is(Status::SEQUENCE_ERROR));
        let mut io = Queue::open(served.path.address(), Digests::default()).await;
        let refused = connecting.queue(&mut io, subsystem, (controller, 1)).await;
        assert!(refused.expect_err("not ready").status.is(Status::SEQUENCE_ERROR));
        let mut io = Queue::open(served.path.address(), Digests::default()).await;
        let (completion, _) =
            io.ask(Command::new(IoOpcode::Flush as u8, 1, 1), None).await.expect("answered");
        assert!(completion.status.is(Status::SEQUENCE_ERROR), "a queue begins with Connect");
    });
}
