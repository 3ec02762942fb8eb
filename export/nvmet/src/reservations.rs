//! Which host may do what to a namespace (Base, 8.8).
//!
//! No I/O and no clock. What always holds:
//! - At most one reservation is held, by a host that is registered, or by all that are.
//! - A host is one by its identifier, through however many controllers it comes.
//!
//! What of it outlives the target is for `claims` to keep.

use levada_nvme::fabrics::ANY_CONTROLLER;
use levada_nvme::reservation::{
    Registrant, ReservationReport, ReservationRequest, ReservationType,
};
use levada_nvme::{KeptReservations, REGISTRANTS_MAX, ReservationNotice, Status};
use std::collections::BTreeMap;

/// A host's identifier.
pub(crate) type HostId = [u8; 16];

/// What a command does to a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// What a change means for others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changed {
    /// They are registered no more: nothing they have asked for may take effect from now on.
    pub preempted: Vec<HostId>,
    /// Who is to be told of what; never the host that asked for the change, and of others each once.
    pub told: Vec<(HostId, ReservationNotice)>,
}

/// The reservations of a namespace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reservations {
    /// They outlive the target (PTPL).
    pub is_kept: bool,
    generation: u32,
    keys: BTreeMap<HostId, u64>,
    held: Option<Held>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    /// Of the types that all registrants hold: who acquired it.
    by: HostId,
    kind: ReservationType,
}

impl From<KeptReservations> for Reservations {
    fn from(kept: KeptReservations) -> Self {
        let KeptReservations { generation, keys, held } = kept;
        let held = held.map(|(by, kind)| Held { by, kind });
        Self { is_kept: true, generation, keys, held }
    }
}

impl Reservations {
    /// What outlives the target; `None`: nothing.
    pub fn kept(&self) -> Option<KeptReservations> {
        self.is_kept.then(|| KeptReservations {
            generation: self.generation,
            keys: self.keys.clone(),
            held: self.held.map(|held| (held.by, held.kind)),
        })
    }

    /// Whether a host may do this now (Base, figure 385).
    ///
    /// # Errors
    ///
    /// [`Status::RESERVATION_CONFLICT`].
    pub fn check(&self, host: &HostId, access: Access) -> Result<(), Status> {
        let Some(held) = self.held else { return Ok(()) };
        let may = held.by == *host
            || access == Access::Read && !held.kind.excludes_reads()
            || held.kind.admits_registrants() && self.keys.contains_key(host);
        if may { Ok(()) } else { Err(Status::RESERVATION_CONFLICT) }
    }

    fn is_holder(&self, host: &HostId) -> bool {
        self.held.is_some_and(|held| {
            held.by == *host || held.kind.is_of_all_registrants() && self.keys.contains_key(host)
        })
    }

    /// Carries out what a host asks for.
    ///
    /// # Errors
    ///
    /// The status of the command, which has changed nothing.
    pub fn carry_out(
        &mut self,
        host: &HostId,
        request: ReservationRequest,
    ) -> Result<Changed, Status> {
        use ReservationRequest::{Acquire, Clear, Preempt, Register, Release, Replace, Unregister};
        match request {
            // Nobody could preempt it: as a key that is to be preempted, 0 names all.
            Register { key: 0 } | Replace { key: 0, .. } => {
                Err(Status::INVALID_FIELD.and_do_not_retry())
            }
            Register { key } => self.register(host, key),
            // Whatever key it has, and also if it has none (Base, 8.8.3: IEKEY).
            Replace { current: None, key } if !self.keys.contains_key(host) => {
                self.register(host, key)
            }
            Replace { current, key } => {
                let known = *self.keys.get(host).ok_or(Status::RESERVATION_CONFLICT)?;
                self.check_key(host, current.unwrap_or(known))?;
                self.keys.insert(*host, key);
                self.registered();
                Ok(Changed::default())
            }
            Unregister { current } => {
                let known = self.keys.get(host).ok_or(Status::RESERVATION_CONFLICT)?;
                if current.is_some_and(|current| current != *known) {
                    return Err(Status::RESERVATION_CONFLICT);
                }
                let held = self.held;
                self.remove(host);
                self.registered();
                // What all held is only gone with the last of them, who has nobody to tell.
                let told = match (held, self.held) {
                    (Some(was), None) => self.told_of_release(host, was.kind),
                    (Some(_) | None, _) => Vec::new(),
                };
                Ok(Changed { told, ..Changed::default() })
            }
            Acquire { current, kind } => {
                self.check_key(host, current)?;
                self.acquire(host, kind)
            }
            Preempt { current, preempted, kind, aborts: _ } => {
                self.check_key(host, current)?;
                self.preempt(host, preempted, kind)
            }
            Release { current, kind } => {
                self.check_key(host, current)?;
                self.release(host, kind)
            }
            Clear { current } => {
                self.check_key(host, current)?;
                let told = self.others(host, ReservationNotice::ReservationPreempted);
                self.keys.clear();
                self.held = None;
                self.registered();
                Ok(Changed { told, ..Changed::default() })
            }
        }
    }

    fn check_key(&self, host: &HostId, key: u64) -> Result<(), Status> {
        match self.keys.get(host) {
            Some(known) if *known == key => Ok(()),
            _ => Err(Status::RESERVATION_CONFLICT),
        }
    }

    /// All others that are registered, to be told of this.
    fn others(&self, host: &HostId, notice: ReservationNotice) -> Vec<(HostId, ReservationNotice)> {
        self.keys.keys().filter(|other| *other != host).map(|other| (*other, notice)).collect()
    }

    /// Who is told that a reservation of this type is released by `host`: those to whom it meant something (Base, 8.8.4 and 8.8.6).
    fn told_of_release(
        &self,
        host: &HostId,
        kind: ReservationType,
    ) -> Vec<(HostId, ReservationNotice)> {
        match kind.admits_registrants() {
            true => self.others(host, ReservationNotice::ReservationReleased),
            false => Vec::new(),
        }
    }

    fn registered(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    fn register(&mut self, host: &HostId, key: u64) -> Result<Changed, Status> {
        match self.keys.get(host) {
            // The same again changes nothing; with another key it has to be replaced.
            Some(known) if *known == key => return Ok(Changed::default()),
            Some(_) => return Err(Status::RESERVATION_CONFLICT),
            None if self.keys.len() >= REGISTRANTS_MAX => return Err(Status::INTERNAL_ERROR),
            None => {}
        }
        self.keys.insert(*host, key);
        self.registered();
        Ok(Changed::default())
    }

    /// Takes a host's registration, and its reservation with it, unless others hold that too.
    fn remove(&mut self, host: &HostId) {
        self.keys.remove(host);
        if let Some(held) = &mut self.held
            && held.by == *host
        {
            match self.keys.keys().next() {
                Some(other) if held.kind.is_of_all_registrants() => held.by = *other,
                _ => self.held = None,
            }
        }
    }

    fn acquire(&mut self, host: &HostId, kind: ReservationType) -> Result<Changed, Status> {
        match self.held {
            None => {
                self.held = Some(Held { by: *host, kind });
                Ok(Changed::default())
            }
            Some(held) if self.is_holder(host) && held.kind == kind => Ok(Changed::default()),
            Some(_) => Err(Status::RESERVATION_CONFLICT),
        }
    }

    /// Base, 8.8.7.
    fn preempt(
        &mut self,
        host: &HostId,
        key: u64,
        kind: ReservationType,
    ) -> Result<Changed, Status> {
        let is_of_all = self.held.is_some_and(|held| held.kind.is_of_all_registrants());
        let with_key = |keys: &BTreeMap<HostId, u64>| -> Vec<HostId> {
            keys.iter().filter(|(_, known)| **known == key).map(|(host, _)| *host).collect()
        };
        let mut preempted: Vec<HostId> = match self.held {
            // Key 0 stands for everybody else.
            Some(_) if is_of_all && key == 0 => self.keys.keys().copied().collect(),
            _ if key == 0 => return Err(Status::INVALID_FIELD),
            _ => with_key(&self.keys),
        };
        let takes_over = match self.held {
            Some(held) => {
                is_of_all && key == 0 || !is_of_all && self.keys.get(&held.by) == Some(&key)
            }
            None => false,
        };
        if preempted.is_empty() {
            return Err(Status::RESERVATION_CONFLICT);
        }
        let kind_before = self.held.map(|held| held.kind);
        preempted.retain(|other| other != host || !takes_over);
        for other in &preempted {
            self.remove(other);
        }
        let gone = ReservationNotice::RegistrationPreempted;
        let mut told: Vec<_> = preempted.iter().map(|other| (*other, gone)).collect();
        told.retain(|(other, _)| other != host);
        if takes_over {
            self.held = Some(Held { by: *host, kind });
            // Those who stay may do other things from now on (Base, 8.8.7).
            if kind_before != Some(kind) {
                told.extend(self.others(host, ReservationNotice::ReservationReleased));
            }
        }
        self.registered();
        Ok(Changed { preempted, told })
    }

    fn release(&mut self, host: &HostId, kind: ReservationType) -> Result<Changed, Status> {
        match self.held {
            Some(held) if self.is_holder(host) => {
                if held.kind != kind {
                    return Err(Status::INVALID_FIELD);
                }
                self.held = None;
                Ok(Changed { told: self.told_of_release(host, kind), ..Changed::default() })
            }
            // Of somebody else, or of nobody: that host's is none any more.
            _ => Ok(Changed::default()),
        }
    }

    /// What a host is told; `controller_of` says through which controller another is here now.
    pub fn report(&self, controller_of: impl Fn(&HostId) -> Option<u16>) -> ReservationReport {
        let registrants = self.keys.iter().map(|(host, key)| Registrant {
            host: *host,
            controller: controller_of(host).unwrap_or(ANY_CONTROLLER),
            key: *key,
            is_holder: self.is_holder(host),
        });
        ReservationReport {
            generation: self.generation,
            kind: self.held.map(|held| held.kind),
            registrants: registrants.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: HostId = [1; 16];
    const B: HostId = [2; 16];
    const C: HostId = [3; 16];

    fn register(reservations: &mut Reservations, host: &HostId, key: u64) {
        let done = reservations.carry_out(host, ReservationRequest::Register { key });
        assert_eq!(done, Ok(Changed::default()));
    }

    /// What each kind lets others do (Base, figure 385).
    #[test]
    fn others_may_do_what_the_type_says() {
        for kind in ReservationType::ALL {
            let mut all = Reservations::default();
            register(&mut all, &A, 1);
            register(&mut all, &B, 2);
            let acquire = ReservationRequest::Acquire { current: 1, kind };
            assert_eq!(all.carry_out(&A, acquire), Ok(Changed::default()));
            let may = |host, access| all.check(host, access).is_ok();
            assert!(may(&A, Access::Read) && may(&A, Access::Write));
            let admits = kind.admits_registrants();
            assert_eq!(may(&B, Access::Write), admits, "{kind:?}");
            assert_eq!(may(&B, Access::Read), admits || !kind.excludes_reads(), "{kind:?}");
            assert!(!may(&C, Access::Write), "{kind:?}");
            assert_eq!(may(&C, Access::Read), !kind.excludes_reads(), "{kind:?}");
        }
    }

    /// What fencing is made of: a new owner takes over from one that does not answer.
    #[test]
    fn a_holder_is_preempted_by_its_key() {
        let kind = ReservationType::WriteExclusiveRegistrants;
        let mut all = Reservations::default();
        register(&mut all, &A, 1);
        all.carry_out(&A, ReservationRequest::Acquire { current: 1, kind }).expect("free");
        register(&mut all, &B, 2);
        let preempt = ReservationRequest::Preempt { current: 2, preempted: 1, kind, aborts: false };
        assert_eq!(
            all.carry_out(&B, preempt),
            Ok(Changed {
                preempted: vec![A],
                told: vec![(A, ReservationNotice::RegistrationPreempted)]
            })
        );
        assert!(all.check(&A, Access::Write).is_err());
        assert!(all.check(&B, Access::Write).is_ok());
        // It cannot come back by what it knows.
        let again = ReservationRequest::Acquire { current: 1, kind };
        assert_eq!(all.carry_out(&A, again), Err(Status::RESERVATION_CONFLICT));
        let report = all.report(|host| (*host == B).then_some(7));
        assert_eq!(report.registrants.len(), 1);
        assert!(report.registrants[0].is_holder && report.registrants[0].controller == 7);
    }

    #[test]
    fn nobody_has_the_key_that_names_all() {
        let mut all = Reservations::default();
        let refused = Err(Status::INVALID_FIELD.and_do_not_retry());
        assert_eq!(all.carry_out(&A, ReservationRequest::Register { key: 0 }), refused);
        register(&mut all, &A, 1);
        let replace = ReservationRequest::Replace { current: Some(1), key: 0 };
        assert_eq!(all.carry_out(&A, replace), refused);
        assert_eq!(all.report(|_| None).registrants[0].key, 1);
    }

    #[test]
    fn a_key_is_replaced_whatever_it_is_and_whether_it_is() {
        let mut all = Reservations::default();
        let replace = |current, key| ReservationRequest::Replace { current, key };
        let conflict = Err(Status::RESERVATION_CONFLICT);
        assert_eq!(all.carry_out(&A, replace(Some(1), 2)), conflict);
        all.carry_out(&A, replace(None, 2)).expect("registered");
        assert_eq!(all.carry_out(&A, replace(Some(1), 3)), conflict);
        all.carry_out(&A, replace(None, 4)).expect("replaced");
        assert_eq!(all.report(|_| None).registrants[0].key, 4);
    }

    /// Who is told of what (Base, 8.8).
    #[test]
    fn those_whom_a_change_concerns_are_told() {
        use ReservationNotice::{RegistrationPreempted, ReservationPreempted, ReservationReleased};
        use ReservationRequest::{Clear, Preempt, Release, Unregister};
        use ReservationType::{WriteExclusive, WriteExclusiveRegistrants};
        let held = |kind| {
            let mut all = Reservations::default();
            for (host, key) in [(A, 1), (B, 2), (C, 3)] {
                register(&mut all, &host, key);
            }
            all.carry_out(&A, ReservationRequest::Acquire { current: 1, kind }).expect("free");
            all
        };
        let preempt = |kind| Preempt { current: 2, preempted: 1, kind, aborts: false };
        let release = |kind| Release { current: 1, kind };
        let (alone, of_some) = (WriteExclusive, WriteExclusiveRegistrants);
        for (kind, host, request, told) in [
            (
                of_some,
                A,
                release(of_some),
                vec![(B, ReservationReleased), (C, ReservationReleased)],
            ),
            (alone, A, release(alone), vec![]),
            (of_some, B, Release { current: 2, kind: of_some }, vec![]),
            (
                of_some,
                A,
                Unregister { current: Some(1) },
                vec![(B, ReservationReleased), (C, ReservationReleased)],
            ),
            (alone, A, Unregister { current: Some(1) }, vec![]),
            (of_some, B, Unregister { current: Some(2) }, vec![]),
            (of_some, B, preempt(of_some), vec![(A, RegistrationPreempted)]),
            (
                of_some,
                B,
                preempt(alone),
                vec![(A, RegistrationPreempted), (C, ReservationReleased)],
            ),
            (
                alone,
                C,
                Clear { current: 3 },
                vec![(A, ReservationPreempted), (B, ReservationPreempted)],
            ),
        ] {
            let done = held(kind).carry_out(&host, request).expect("right");
            assert_eq!(done.told, told, "{request:?} of {kind:?}");
        }
    }

    #[test]
    fn of_all_registrants_the_last_one_holds_it() {
        let kind = ReservationType::WriteExclusiveAllRegistrants;
        let mut all = Reservations::default();
        register(&mut all, &A, 1);
        register(&mut all, &B, 2);
        all.carry_out(&A, ReservationRequest::Acquire { current: 1, kind }).expect("free");
        all.carry_out(&A, ReservationRequest::Unregister { current: Some(1) }).expect("known");
        assert!(all.check(&A, Access::Write).is_err() && all.check(&B, Access::Write).is_ok());
        all.carry_out(&B, ReservationRequest::Unregister { current: None }).expect("known");
        assert!(all.check(&A, Access::Write).is_ok(), "nobody holds it");
    }

    fn any_request() -> impl Strategy<Value = ReservationRequest> {
        use ReservationRequest::{Acquire, Clear, Preempt, Register, Release, Replace, Unregister};
        let key = || 0_u64..4;
        let kind = || (0_usize..6).prop_map(|at| ReservationType::ALL[at]);
        prop_oneof![
            key().prop_map(|key| Register { key }),
            prop::option::of(key()).prop_map(|current| Unregister { current }),
            (prop::option::of(key()), key()).prop_map(|(current, key)| Replace { current, key }),
            (key(), kind()).prop_map(|(current, kind)| Acquire { current, kind }),
            (key(), key(), kind(), any::<bool>()).prop_map(|(current, preempted, kind, aborts)| {
                Preempt { current, preempted, kind, aborts }
            }),
            (key(), kind()).prop_map(|(current, kind)| Release { current, kind }),
            key().prop_map(|current| Clear { current }),
        ]
    }

    proptest! {
        #[test]
        fn whoever_holds_it_is_registered(
            requests in prop::collection::vec((0_usize..3, any_request()), 0..40),
        ) {
            let mut all = Reservations::default();
            for (host, request) in requests {
                let before = all.report(|_| None);
                let host = [A, B, C][host];
                let outcome = all.carry_out(&host, request);
                let after = all.report(|_| None);
                if outcome.is_err() {
                    prop_assert_eq!(&before, &after);
                }
                prop_assert_eq!(after.kind.is_some(), after.registrants.iter().any(|one| one.is_holder));
                for (told, _) in outcome.iter().flat_map(|changed| &changed.told) {
                    prop_assert!(*told != host, "who asked for it knows");
                    prop_assert!(before.registrants.iter().any(|one| one.host == *told));
                }
                for gone in outcome.iter().flat_map(|changed| &changed.preempted) {
                    prop_assert!(after.registrants.iter().all(|one| one.host != *gone));
                    prop_assert!(after.kind.is_none() || all.check(gone, Access::Write).is_err());
                }
            }
        }
    }
}
