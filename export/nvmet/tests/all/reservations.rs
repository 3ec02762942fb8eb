//! Reservations that outlive the target, and what hosts are told of theirs.

use crate::host::{Host, log_page};
use crate::{Served, run};
use futures_util::future::{LocalBoxFuture, join, ready};
use levada_base::reactor;
use levada_export_nvmet::{Claims, Keep, KeepError};
use levada_nvme::identify::{Identify, NamespaceIdentity};
use levada_nvme::log::{Event, LogPage};
use levada_nvme::reservation::{
    PERSIST, PERSISTS_AT, ReservationReport, ReservationRequest, ReservationType,
};
use levada_nvme::{
    AdminOpcode, Command, DataPointer, Feature, IoOpcode, NoticeMask, ReservationNotice,
    ReservationNotification, Status,
};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const KIND: ReservationType = ReservationType::WriteExclusive;
const NAMESPACE: u32 = 1;

/// What outlives the target, as a file would.
#[derive(Default)]
struct Shelf {
    bytes: RefCell<Option<Vec<u8>>>,
    fails: Cell<bool>,
}

impl Keep for Shelf {
    fn load(&self) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KeepError>> {
        Box::pin(ready(Ok(self.bytes.borrow().clone())))
    }

    fn save(&self, bytes: Option<Vec<u8>>) -> LocalBoxFuture<'_, Result<(), KeepError>> {
        Box::pin(ready(match self.fails.get() {
            true => Err(KeepError::store(std::io::Error::other("full"))),
            false => {
                *self.bytes.borrow_mut() = bytes;
                Ok(())
            }
        }))
    }
}

impl Shelf {
    /// A target that knows nothing but what was kept.
    fn served(self: &Rc<Self>) -> Served {
        Served::with_claims(64, Claims::kept(Rc::clone(self) as Rc<dyn Keep>))
    }
}

async fn host(served: &Served, number: u8) -> Host {
    let connected = Host::connect(served.path.address(), served.subsystem.nqn(), number);
    connected.await.expect("admitted")
}

/// Registers with the number of the host as its key.
async fn register(host: &mut Host, number: u8, persist: u32) -> Status {
    let request = ReservationRequest::Register { key: number.into() };
    host.reserve_with(request, persist).await
}

async fn acquire(host: &mut Host, number: u8, kind: ReservationType) -> Status {
    host.reserve(ReservationRequest::Acquire { current: number.into(), kind }).await
}

async fn report(host: &mut Host) -> (ReservationReport, bool) {
    let report = Command::new(IoOpcode::ReservationReport as u8, host.io.new_id(), NAMESPACE)
        .with_dword(10, 1024 / 4 - 1)
        .with_dword(11, 1)
        .with_data(DataPointer::Transport { bytes: 1024 });
    let (_, told) = host.io.ask(report, None).await.expect("answered");
    (ReservationReport::parse_extended(&told).expect("whole"), told[PERSISTS_AT] == 1)
}

#[test]
fn a_reservation_is_in_force_from_the_first_command_after_a_restart() {
    run(async {
        let shelf = Rc::new(Shelf::default());
        let served = shelf.served();
        let mut owner = host(&served, 1).await;
        let page = owner.identify(Identify::Namespace, NAMESPACE).await.expect("told");
        let told = NamespaceIdentity::parse(page[..].try_into().expect("whole"));
        assert!(told.expect("plain blocks").keeps_reservations);
        assert_eq!(register(&mut owner, 1, PERSIST).await, Status::SUCCESS);
        assert_eq!(acquire(&mut owner, 1, KIND).await, Status::SUCCESS);
        let before = report(&mut owner).await;
        assert!(before.1);
        drop((owner, served));

        let served = shelf.served();
        let mut other = host(&served, 2).await;
        assert!(other.write(0, &[2; 4096]).await.is(Status::RESERVATION_CONFLICT));
        let range = levada_nvme::Range { first_block: 0, blocks: 1 };
        for attributes in [0, 4] {
            let managed = other.manage(&[range], attributes).await;
            assert!(managed.is(Status::RESERVATION_CONFLICT), "{attributes}");
        }
        let (after, is_kept) = report(&mut other).await;
        assert!(is_kept && after.generation == before.0.generation && after.kind == Some(KIND));
        let mut owner = host(&served, 1).await;
        assert_eq!(owner.write(0, &[1; 4096]).await, Status::SUCCESS);
        // Taken over, it is the other's after the next restart.
        assert_eq!(register(&mut other, 2, 0).await, Status::SUCCESS);
        let preempt =
            ReservationRequest::Preempt { current: 2, preempted: 1, kind: KIND, aborts: true };
        assert_eq!(other.reserve(preempt).await, Status::SUCCESS);
        drop((owner, other, served));

        let served = shelf.served();
        let (mut owner, mut other) = (host(&served, 1).await, host(&served, 2).await);
        assert!(owner.write(0, &[1; 4096]).await.is(Status::RESERVATION_CONFLICT));
        assert_eq!(other.write(0, &[2; 4096]).await, Status::SUCCESS);
        // Given up, it is nobody's.
        assert_eq!(other.reserve(ReservationRequest::Clear { current: 2 }).await, Status::SUCCESS);
        drop((owner, other, served));
        let served = shelf.served();
        assert_eq!(host(&served, 1).await.write(0, &[1; 4096]).await, Status::SUCCESS);
    });
}

#[test]
fn only_who_asks_for_it_finds_it_again() {
    run(async {
        let shelf = Rc::new(Shelf::default());
        let served = shelf.served();
        let mut owner = host(&served, 1).await;
        assert_eq!(register(&mut owner, 1, 0).await, Status::SUCCESS);
        assert_eq!(acquire(&mut owner, 1, KIND).await, Status::SUCCESS);
        assert_eq!(*shelf.bytes.borrow(), None);
        // Later, by the feature: all that is there now.
        let set = |value| (AdminOpcode::SetFeatures, value);
        for (persists, value) in [(true, 1), (false, 0), (true, 1)] {
            let (opcode, value) = set(value);
            let done = owner.feature_of(opcode, NAMESPACE, Feature::ReservationPersistence, value);
            assert_eq!(done.await.status, Status::SUCCESS);
            let feature = Feature::ReservationPersistence;
            let told = owner.feature_of(AdminOpcode::GetFeatures, NAMESPACE, feature, 0).await;
            assert_eq!((told.result == 1, shelf.bytes.borrow().is_some()), (persists, persists));
        }
        drop((owner, served));
        let served = shelf.served();
        let mut other = host(&served, 2).await;
        assert!(other.write(0, &[2; 4096]).await.is(Status::RESERVATION_CONFLICT));
        // Where it is not offered whoever asks for it goes without, and is told so.
        let served = Served::new(64);
        let mut owner = host(&served, 1).await;
        assert_eq!(register(&mut owner, 1, PERSIST).await, Status::SUCCESS);
        assert!(!report(&mut owner).await.1);
        let feature = Feature::ReservationPersistence;
        let refused = owner.feature_of(AdminOpcode::SetFeatures, NAMESPACE, feature, 1).await;
        assert!(refused.status.is(Status::FEATURE_NOT_CHANGEABLE));
        assert!(register(&mut owner, 1, 1 << 30).await.is(Status::INVALID_FIELD), "reserved");
    });
}

#[test]
fn what_is_not_kept_is_not_in_force() {
    run(async {
        let shelf = Rc::new(Shelf::default());
        let served = shelf.served();
        let (mut owner, mut other) = (host(&served, 1).await, host(&served, 2).await);
        assert_eq!(register(&mut owner, 1, PERSIST).await, Status::SUCCESS);
        shelf.fails.set(true);
        assert!(acquire(&mut owner, 1, KIND).await.is(Status::INTERNAL_ERROR));
        assert_eq!(other.write(0, &[2; 4096]).await, Status::SUCCESS);
        shelf.fails.set(false);
        assert_eq!(acquire(&mut owner, 1, KIND).await, Status::SUCCESS);
        assert!(other.write(0, &[2; 4096]).await.is(Status::RESERVATION_CONFLICT));
    });
}

/// It may say that the namespace is another's.
#[test]
fn damaged_reservations_refuse_everybody() {
    run(async {
        let shelf = Rc::new(Shelf::default());
        let served = shelf.served();
        let mut owner = host(&served, 1).await;
        assert_eq!(register(&mut owner, 1, PERSIST).await, Status::SUCCESS);
        drop((owner, served));
        shelf.bytes.borrow_mut().as_mut().expect("kept")[40] ^= 1;
        let served = shelf.served();
        for number in [1, 2] {
            let mut host = host(&served, number).await;
            assert!(host.read(0, 1).await.is_err_and(|status| status.is(Status::NOT_READY)));
            assert!(host.write(0, &[1; 4096]).await.is(Status::NOT_READY));
            assert!(register(&mut host, number, 0).await.is(Status::NOT_READY));
        }
        assert_eq!(served.memory.writes.get(), 0);
    });
}

/// With its power the drive forgets who has it. Whoever reserves it then is answered when nothing is under way any more of those who had it.
#[test]
fn who_reserves_what_was_forgotten_waits_for_changes_of_others() {
    for is_gone in [false, true] {
        run(async {
            let claims = Claims::default();
            let served = Served::with_claims(64, claims.clone());
            let (mut former, mut next) = (host(&served, 1).await, host(&served, 2).await);
            let registrants = ReservationType::WriteExclusiveRegistrants;
            assert_eq!(register(&mut former, 1, 0).await, Status::SUCCESS);
            assert_eq!(acquire(&mut former, 1, registrants).await, Status::SUCCESS);
            served.memory.holds_writes.set(true);
            let old = former.write_command(0, &[1; 4096]);
            former.io.begin(old, Some(&[1; 4096])).await;
            while !served.memory.is_held.get() {
                reactor::sleep(Duration::from_millis(2)).await;
            }
            served.memory.holds_only_first();
            let former = (!is_gone).then_some(former);
            claims.lose_power();
            assert_eq!(register(&mut next, 2, 0).await, Status::SUCCESS);
            let (before, _) = report(&mut next).await;
            let acquiring = async {
                assert_eq!(acquire(&mut next, 2, registrants).await, Status::SUCCESS);
                assert_eq!(served.memory.writes.get(), 1, "the old one has ended");
            };
            let landing = async {
                reactor::sleep(Duration::from_millis(100)).await;
                served.memory.release();
            };
            join(acquiring, landing).await;
            // Nobody was registered meanwhile, as this tells.
            assert_eq!(report(&mut next).await.0.generation, before.generation);
            assert_eq!(next.write(0, &[2; 4096]).await, Status::SUCCESS);
            assert!(next.read(0, 1).await.expect("read").iter().all(|byte| *byte == 2));
            drop(former);
        })
    }
}

fn event_request(host: &mut Host) -> Command {
    let id = host.admin.new_id();
    Command::new(AdminOpcode::AsynchronousEventRequest as u8, id, 0)
}

/// The event that a request was answered with, and the page of it.
async fn told(host: &mut Host, request: Command) -> ReservationNotification {
    let (event, _) = host.admin.answer(request.id(), None).await.expect("told");
    assert_eq!(Event::of(event.result), Some(Event::ReservationNotice));
    page(host).await.expect("a page")
}

async fn page(host: &mut Host) -> Option<ReservationNotification> {
    let page = log_page(&mut host.admin, LogPage::Reservations as u8, 64).await.expect("read");
    ReservationNotification::parse(page[..].try_into().expect("whole"))
}

#[test]
fn hosts_are_told_what_becomes_of_their_reservations() {
    run(async {
        let served = Served::new(64);
        let (mut first, mut second) = (host(&served, 1).await, host(&served, 2).await);
        let kind = ReservationType::WriteExclusiveRegistrants;
        assert_eq!(register(&mut first, 1, 0).await, Status::SUCCESS);
        assert_eq!(register(&mut second, 2, 0).await, Status::SUCCESS);
        assert_eq!(acquire(&mut first, 1, kind).await, Status::SUCCESS);
        assert_eq!(page(&mut second).await, None, "nothing has been told yet");
        let request = event_request(&mut second);
        second.admin.begin(request, None).await;
        let release = ReservationRequest::Release { current: 1, kind };
        assert_eq!(first.reserve(release).await, Status::SUCCESS);
        let released = ReservationNotification {
            count: 1,
            notice: ReservationNotice::ReservationReleased,
            more: 0,
            namespace: NAMESPACE,
        };
        assert_eq!(told(&mut second, request).await, released);
        assert_eq!(page(&mut first).await, None, "who asked for it knows");
        // Two at once: the second is told of once the first is read.
        assert_eq!(acquire(&mut first, 1, kind).await, Status::SUCCESS);
        assert_eq!(first.reserve(release).await, Status::SUCCESS);
        assert_eq!(first.reserve(ReservationRequest::Clear { current: 1 }).await, Status::SUCCESS);
        let request = event_request(&mut second);
        second.admin.begin(request, None).await;
        assert_eq!(
            told(&mut second, request).await,
            ReservationNotification { count: 2, more: 1, ..released }
        );
        let request = event_request(&mut second);
        second.admin.begin(request, None).await;
        let notice = ReservationNotice::ReservationPreempted;
        assert_eq!(
            told(&mut second, request).await,
            ReservationNotification { count: 3, notice, ..released }
        );
        assert_eq!(page(&mut second).await, None);
        // Of what nobody wants to know, nobody is told; of the rest he is.
        let feature = Feature::ReservationNotificationMask;
        let mask = NoticeMask::RESERVATION_PREEMPTED | NoticeMask::RESERVATION_RELEASED;
        let masked = first.feature_of(AdminOpcode::SetFeatures, u32::MAX, feature, mask.bits());
        assert_eq!(masked.await.status, Status::SUCCESS);
        let set = second.feature_of(AdminOpcode::GetFeatures, NAMESPACE, feature, 0).await;
        assert_eq!(set.result, u64::from(mask.bits()));
        assert_eq!(register(&mut first, 1, 0).await, Status::SUCCESS);
        assert_eq!(register(&mut second, 2, 0).await, Status::SUCCESS);
        assert_eq!(acquire(&mut second, 2, kind).await, Status::SUCCESS);
        let preempt = ReservationRequest::Preempt { current: 1, preempted: 2, kind, aborts: false };
        assert_eq!(first.reserve(preempt).await, Status::SUCCESS);
        let notice = ReservationNotice::RegistrationPreempted;
        assert_eq!(
            page(&mut second).await,
            Some(ReservationNotification { count: 4, notice, ..released })
        );
        assert_eq!(register(&mut second, 2, 0).await, Status::SUCCESS);
        assert_eq!(first.reserve(ReservationRequest::Clear { current: 1 }).await, Status::SUCCESS);
        assert_eq!(page(&mut second).await, None);
    });
}
