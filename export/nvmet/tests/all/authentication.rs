//! Hosts that have to prove who they are.

use crate::host::{Connecting, Ended, Queue, log_page};
use crate::{Served, run};
use levada_base::reactor;
use levada_export_nvmet::Hosts;
use levada_nvme::authentication::{
    Explanation, MESSAGE_BYTES_MAX, Names, NotAuthenticated, Prover, SECURITY_PROTOCOL,
    SECURITY_SPECIFIC, Secret, Secrets,
};
use levada_nvme::fabrics::{
    ANY_CONTROLLER, AuthenticationTransfer, Configuration, Property, PropertyAccess,
};
use levada_nvme::keyring::Keyring;
use levada_nvme::log::LogPage;
use levada_nvme::pdu::Digests;
use levada_nvme::{AdminOpcode, Command, DataPointer, IoOpcode, Status};
use std::rc::Rc;
use std::time::Duration;

fn transfer(bytes: usize) -> AuthenticationTransfer {
    let (protocol, specific) = (SECURITY_PROTOCOL, SECURITY_SPECIFIC);
    AuthenticationTransfer { protocol, specific, bytes: bytes as u32 }
}

async fn tell(queue: &mut Queue, message: &[u8]) -> Result<Status, Ended> {
    let command = transfer(message.len()).command(true, queue.new_id());
    Ok(queue.ask(command, Some(message)).await?.0.status)
}

async fn hear(queue: &mut Queue, room: usize) -> Result<(Status, Vec<u8>), Ended> {
    let pointer = DataPointer::Transport { bytes: room as u32 };
    let command = transfer(room).command(false, queue.new_id()).with_data(pointer);
    let (completion, data) = queue.ask(command, None).await?;
    Ok((completion.status, data))
}

/// Proves who the host is, as far as it gets.
async fn prove(queue: &mut Queue, prover: &mut Prover) -> Result<(), NotAuthenticated> {
    let gone = "the target listens";
    assert!(tell(queue, &prover.negotiate()).await.expect(gone).is_success());
    let (_, challenge) = hear(queue, MESSAGE_BYTES_MAX).await.expect(gone);
    let reply = prover.reply(&challenge, &mut reactor::fill_random)?;
    assert!(tell(queue, &reply).await.expect(gone).is_success());
    let (_, success) = hear(queue, MESSAGE_BYTES_MAX).await.expect(gone);
    if let Some(last) = prover.confirm(&success)? {
        assert!(tell(queue, &last).await.expect(gone).is_success());
    }
    Ok(())
}

struct Party {
    served: Rc<Served>,
    connecting: Connecting,
    names: Names,
    secrets: Secrets,
}

fn party() -> Party {
    let [party] = parties([Connecting::new(1)]);
    party
}

/// Hosts of one target.
fn parties<const N: usize>(hosts: [Connecting; N]) -> [Party; N] {
    let secret = || Secret::random(None, &mut reactor::fill_random);
    let hosts = hosts.map(|host| (host, Secrets { host: secret(), controller: Some(secret()) }));
    let keys = |(connecting, secrets): &(Connecting, Secrets)| {
        (connecting.host.clone(), secrets.clone().into())
    };
    let keyring: Keyring = hosts.iter().map(keys).collect();
    let served = Rc::new(Served::for_hosts(64, Hosts::only([], keyring)));
    let subsystem = served.subsystem.nqn();
    hosts.map(|(connecting, secrets)| {
        let names = Names { host: connecting.host.clone(), subsystem: subsystem.clone() };
        Party { served: Rc::clone(&served), connecting, names, secrets }
    })
}

impl Party {
    fn prover(&self) -> Prover {
        Prover::new(self.names.clone(), self.secrets.clone(), 1)
    }

    /// A queue that was connected and has proved nothing; also its controller.
    async fn queue(&self, id: (u16, u16)) -> (Queue, u16) {
        let mut queue = Queue::open(self.served.path.address(), self.connecting.digests).await;
        let subsystem = self.served.subsystem.nqn();
        let connected = self.connecting.queue(&mut queue, subsystem, id).await;
        (queue, connected.expect("who it is shows later"))
    }
}

fn enable(queue: &mut Queue) -> Command {
    let enable = u64::from(Configuration::ENABLED.0);
    PropertyAccess::set(Property::Configuration, enable, queue.new_id())
}

fn read(queue: &mut Queue) -> Command {
    Command::new(IoOpcode::Read as u8, queue.new_id(), 1)
        .with_blocks(0, 1)
        .with_data(DataPointer::Transport { bytes: 4096 })
}

#[test]
fn every_queue_takes_nothing_before_its_host_has_proved_who_it_is() {
    run(async {
        let party = party();
        let (mut admin, controller) = party.queue((ANY_CONTROLLER, 0)).await;
        let refused = Status::AUTHENTICATION_REQUIRED.and_do_not_retry();
        let keep_alive = Command::new(AdminOpcode::KeepAlive as u8, 40, 0);
        for command in [enable(&mut admin), keep_alive] {
            assert_eq!(admin.ask(command, None).await.expect("answered").0.status, refused);
        }
        prove(&mut admin, &mut party.prover()).await.expect("the secrets are right");
        let enabled = enable(&mut admin);
        assert!(admin.ask(enabled, None).await.expect("answered").0.status.is_success());

        let (mut io, _) = party.queue((controller, 1)).await;
        let early = read(&mut io);
        let answered = io.ask(early, None).await.expect("answered").0;
        assert_eq!(answered.status, refused);
        // Whoever it is would else bury what the host that has proved itself finds there.
        assert!(!answered.has_more);
        let page = log_page(&mut admin, LogPage::Errors as u8, 64).await.expect("told");
        assert_eq!(page, [0; 64], "no entry of the admin queue's early commands either");
        prove(&mut io, &mut party.prover()).await.expect("the secrets are right");
        let late = read(&mut io);
        assert!(io.ask(late, None).await.expect("answered").0.status.is_success());
        // Again, while it is in use.
        prove(&mut io, &mut party.prover()).await.expect("the secrets are right");
        let again = read(&mut io);
        assert!(io.ask(again, None).await.expect("answered").0.status.is_success());
        // Other secrets: who has proved the old ones has proved nothing.
        let secrets = Secrets { host: Secret::random(None, &mut |_| ()), controller: None };
        let keyring = Keyring::from([(party.connecting.host.clone(), secrets.into())]);
        party.served.subsystem.set_hosts(Hosts::only([], keyring));
        assert!(matches!(io.hear().await, Err(Ended::Gone)));
    });
}

#[test]
fn who_does_not_know_a_secret_is_told_so_and_the_connection_ends() {
    run(async {
        let party = party();
        let other = || Secret::random(None, &mut reactor::fill_random);
        let (mut queue, _) = party.queue((ANY_CONTROLLER, 0)).await;
        let wrong = Secrets { host: other(), controller: None };
        let proved = prove(&mut queue, &mut Prover::new(party.names.clone(), wrong, 1)).await;
        assert_eq!(proved, Err(NotAuthenticated::Refused(Explanation::Failed)));
        assert!(matches!(queue.hear().await, Err(Ended::Gone)));

        // A host that does not believe the target says so, and is let go.
        let (mut queue, _) = party.queue((ANY_CONTROLLER, 0)).await;
        let wary = Secrets { controller: Some(other()), ..party.secrets.clone() };
        let mut prover = Prover::new(party.names.clone(), wary, 1);
        assert_eq!(prove(&mut queue, &mut prover).await, Err(NotAuthenticated::NotProven));
        assert!(tell(&mut queue, &prover.failure()).await.expect("heard").is_success());
        assert!(matches!(queue.hear().await, Err(Ended::Gone)));
    });
}

#[test]
fn messages_that_are_none_or_out_of_turn_end_the_attempt() {
    run(async {
        let party = party();
        let invalid = Status::INVALID_FIELD.and_do_not_retry();
        let (mut queue, _) = party.queue((ANY_CONTROLLER, 0)).await;
        let other = AuthenticationTransfer { protocol: 1, ..transfer(8) };
        let command = other.command(true, queue.new_id());
        assert_eq!(queue.ask(command, Some(&[0; 8])).await.expect("told").0.status, invalid);
        let endless = transfer(2 << 20).command(false, queue.new_id());
        let endless = endless.with_data(DataPointer::Transport { bytes: 2 << 20 });
        assert_eq!(queue.ask(endless, None).await.expect("told").0.status, invalid);
        // No memory is held for what is not sent.
        let large = transfer(1 << 20).command(true, queue.new_id());
        let large = large.with_data(DataPointer::Transport { bytes: 1 << 20 });
        assert_eq!(queue.ask(large, None).await.expect("not asked for it").0.status, invalid);
        let short = transfer(9).command(true, queue.new_id());
        let short = queue.ask(short, Some(&[0; 8])).await.expect("told").0.status;
        assert_eq!(short, Status::DATA_LENGTH_INVALID.and_do_not_retry());
        assert!(tell(&mut queue, b"\x01\x02nothing of the kind").await.expect("told").is_success());
        let (status, failure) = hear(&mut queue, MESSAGE_BYTES_MAX).await.expect("told");
        assert!(status.is_success());
        assert_eq!((failure[0], failure[1], failure[7]), (0, 0xf1, 6), "incorrect payload");
        assert!(matches!(queue.hear().await, Err(Ended::Gone)));

        // Nothing was sent yet.
        let (mut queue, _) = party.queue((ANY_CONTROLLER, 0)).await;
        let (_, failure) = hear(&mut queue, 64).await.expect("told");
        assert_eq!((failure[0], failure[1], failure[7]), (0, 0xf1, 7), "incorrect message");
        assert!(matches!(queue.hear().await, Err(Ended::Gone)));
    });
}

/// Who knows the names of a host and the number of its controller keeps none of its queues.
#[test]
fn who_has_proved_nothing_has_no_queue_of_another() {
    run(async {
        let party = party();
        let secrets = "the secrets are right";
        let (mut admin, controller) = party.queue((ANY_CONTROLLER, 0)).await;
        prove(&mut admin, &mut party.prover()).await.expect(secrets);
        let enabled = enable(&mut admin);
        assert!(admin.ask(enabled, None).await.expect("answered").0.status.is_success());
        let (mut stray, _) = party.queue((controller, 1)).await;
        let queues = Command::new(AdminOpcode::SetFeatures as u8, admin.new_id(), 0);
        let queues = queues.with_dword(10, 7).with_dword(11, 0);
        assert!(admin.ask(queues, None).await.expect("answered").0.status.is_success());
        let (mut own, _) = party.queue((controller, 1)).await;
        prove(&mut own, &mut party.prover()).await.expect(secrets);
        let asked = read(&mut own);
        assert!(own.ask(asked, None).await.expect("answered").0.status.is_success());
        // There is one queue of a number, however well the other one proves itself now.
        prove(&mut stray, &mut party.prover()).await.expect(secrets);
        assert!(matches!(stray.hear().await, Err(Ended::Gone)));
        let asked = read(&mut own);
        assert!(own.ask(asked, None).await.expect("answered").0.status.is_success());
    });
}

/// What is asked for has to fit where it goes: more memory than that is not taken, and no connection falls over it.
#[test]
fn answers_fit_the_room_that_is_said() {
    run(async {
        let party = party();
        let too_long = Status::DATA_LENGTH_INVALID.and_do_not_retry();
        let (mut queue, _) = party.queue((ANY_CONTROLLER, 0)).await;
        for room in [0, 4096] {
            let more = transfer(16 << 10).command(false, queue.new_id());
            let more = more.with_data(DataPointer::Transport { bytes: room });
            assert_eq!(queue.ask(more, None).await.expect("told").0.status, too_long);
        }
        prove(&mut queue, &mut party.prover()).await.expect("the secrets are right");
        let enabled = enable(&mut queue);
        assert!(queue.ask(enabled, None).await.expect("answered").0.status.is_success());
        const HOST_IDENTIFIER: u32 = 0x81;
        let id = Command::new(AdminOpcode::GetFeatures as u8, queue.new_id(), 0);
        let id = id.with_dword(10, HOST_IDENTIFIER).with_dword(11, 1);
        assert_eq!(queue.ask(id, None).await.expect("told").0.status, too_long);
    });
}

/// Each attempt is work for the target, before anything is proved.
#[test]
fn who_begins_again_and_again_is_let_go() {
    run(async {
        let party = party();
        let (mut queue, _) = party.queue((ANY_CONTROLLER, 0)).await;
        for attempt in 0..4 {
            let begun = tell(&mut queue, &party.prover().negotiate()).await.expect("told");
            assert!(begun.is_success());
            let (_, heard) = hear(&mut queue, MESSAGE_BYTES_MAX).await.expect("told");
            assert_eq!((heard[0], heard[1]) == (0, 0xf1), attempt == 3, "attempt {attempt}");
        }
        assert!(matches!(queue.hear().await, Err(Ended::Gone)));
        // One that comes to an end each time may do so for ever.
        let (mut queue, _) = party.queue((ANY_CONTROLLER, 0)).await;
        for _ in 0..8 {
            prove(&mut queue, &mut party.prover()).await.expect("the secrets are right");
        }
    });
}

/// Who has proved nothing keeps nobody out by naming an identifier: of two that have it, it is of who proves first who it is.
#[test]
fn an_identifier_is_of_who_proves_first() {
    run(async {
        let one = Connecting::new(1);
        let other = Connecting { host_id: one.host_id, ..Connecting::new(2) };
        let [one, other] = parties([one, other]);
        let (mut early, _) = other.queue((ANY_CONTROLLER, 0)).await;
        let (mut queue, _) = one.queue((ANY_CONTROLLER, 0)).await;
        prove(&mut queue, &mut one.prover()).await.expect("the secrets are right");
        // The other one proves who it is as well, and comes too late.
        prove(&mut early, &mut other.prover()).await.expect("the secrets are right");
        assert!(matches!(early.hear().await, Err(Ended::Gone)));
        let refused = {
            let mut late = Queue::open(one.served.path.address(), Digests::default()).await;
            let subsystem = &other.names.subsystem;
            other.connecting.queue(&mut late, subsystem, (ANY_CONTROLLER, 0)).await
        };
        let refused = refused.map_err(|completion| completion.status);
        assert_eq!(refused, Err(Status::CONNECT_INVALID_HOST), "it may try again");
        let enabled = enable(&mut queue);
        assert!(queue.ask(enabled, None).await.expect("answered").0.status.is_success());
        // Once that is gone it may come.
        drop(queue);
        while one.served.target.controllers() > 0 {
            reactor::sleep(Duration::from_millis(5)).await;
        }
        let (mut queue, _) = other.queue((ANY_CONTROLLER, 0)).await;
        prove(&mut queue, &mut other.prover()).await.expect("the secrets are right");
        let enabled = enable(&mut queue);
        assert!(queue.ask(enabled, None).await.expect("answered").0.status.is_success());
    });
}
