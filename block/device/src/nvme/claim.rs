//! Whose a namespace is, as its report of reservations tells, and what is next on the way to it. No I/O.
//!
//! Every connection of an owner is a registrant: a host with a key of its own. The key says in which epoch the owner has the namespace.
//! One of its connections holds the reservation, of the type Write Exclusive, Registrants Only, so that all of them may write; one that
//! is lost can then be preempted by another.

use super::host::{HostId, Opening, are_of_one_process, number_of};
use levada_base::Epoch;
use levada_nvme::reservation::{
    Registrant, ReservationReport, ReservationRequest, ReservationType,
};

/// The kind of reservation that owners hold.
const KIND: ReservationType = ReservationType::WriteExclusiveRegistrants;
/// The upper bits of our keys: "LV".
const TAG: u64 = 0x4c56;
/// Later epochs have no key.
pub(crate) const EPOCH_MAX: Epoch = Epoch(u32::MAX as u64);

/// An owner, as one of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claimant {
    pub opening: Opening,
    pub host: HostId,
    pub epoch: Epoch,
}

/// What a report says of an owner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    Ours,
    /// Nobody has it that could be a later owner, and neither have we.
    Nobody,
    /// `None`: one that says nothing of epochs.
    Theirs(Option<Epoch>),
}

/// The epoch that a key stands for; `None`: it is not one of ours.
fn epoch_of(key: u64) -> Option<Epoch> {
    (key >> 48 == TAG).then_some(Epoch(key & EPOCH_MAX.0))
}

/// The latest owner among those who are registered, but for this opening.
pub(crate) fn latest(report: &ReservationReport, opening: Opening) -> Option<Epoch> {
    let others = report.registrants.iter().filter(|other| !opening.has(&other.host));
    others.filter_map(|registrant| epoch_of(registrant.key)).max()
}

impl Claimant {
    /// The key of this connection. Its number is there so that it can be preempted alone: no other connection of this opening that is
    /// registered has it, and those that others have left behind rarely do.
    pub fn key(&self) -> u64 {
        TAG << 48 | u64::from(number_of(&self.host)) << 32 | self.epoch.0 & EPOCH_MAX.0
    }

    fn is_of_us(&self, registrant: &Registrant) -> bool {
        self.opening.has(&registrant.host)
    }

    /// Another owner before whom this one has to give way: a later one, or one of the same epoch that was faster, as far as `is_rival`.
    fn preceded_by(
        &self,
        report: &ReservationReport,
        is_rival: impl Fn(&HostId) -> bool,
    ) -> Option<Epoch> {
        let others = report.registrants.iter().filter(|other| !self.is_of_us(other));
        let seen = others.filter_map(|other| Some((epoch_of(other.key)?, other)));
        let faster = |other: &Registrant| other.is_holder && is_rival(&other.host);
        seen.filter(|(seen, other)| *seen > self.epoch || *seen == self.epoch && faster(other))
            .map(|(seen, _)| seen)
            .max()
    }

    /// The same for one that is about to take it: what its own process had opened before gives way.
    pub fn taking_preceded_by(&self, report: &ReservationReport) -> Option<Epoch> {
        self.preceded_by(report, |other| !are_of_one_process(other, &self.host))
    }

    /// Whose the namespace is, for who believes to have it.
    pub fn claim(&self, report: &ReservationReport) -> Claim {
        if let Some(seen) = self.preceded_by(report, |_| true) {
            return Claim::Theirs(Some(seen));
        }
        let mut holders = report.registrants.iter().filter(|registrant| registrant.is_holder);
        match holders.find(|holder| !self.is_of_us(holder)) {
            Some(stranger) if epoch_of(stranger.key).is_none() => Claim::Theirs(None),
            Some(_) => Claim::Nobody,
            None if report.kind == Some(KIND) => Claim::Ours,
            None => Claim::Nobody,
        }
    }

    /// What is next until this connection is registered, the reservation is this owner's, and nobody else is registered: others could
    /// write. `None`: it is so.
    pub fn next(&self, report: &ReservationReport) -> Option<ReservationRequest> {
        let key = self.key();
        let ours = report.registrants.iter().find(|registrant| registrant.host == self.host);
        match ours {
            None => return Some(ReservationRequest::Register { key }),
            Some(Registrant { key: current, .. }) if *current != key => {
                return Some(ReservationRequest::Replace { current: Some(*current), key });
            }
            Some(_) => {}
        }
        let Some(kind) = report.kind else {
            return Some(ReservationRequest::Acquire { current: key, kind: KIND });
        };
        if kind.is_of_all_registrants() {
            // All are holders, and 0 names them.
            return Some(self.preempt(0));
        }
        let is_in_the_way = |it: &&Registrant| match it.is_holder {
            true => kind != KIND || !self.is_of_us(it),
            false => false,
        };
        let holder = report.registrants.iter().find(is_in_the_way);
        let other = || report.registrants.iter().find(|other| !self.is_of_us(other));
        holder.or_else(other).map(|other| self.preempt(other.key))
    }

    /// Takes a registration away; what its host has under way ends before this is answered (Base, 8.8.7: Preempt and Abort).
    pub fn preempt(&self, key: u64) -> ReservationRequest {
        ReservationRequest::Preempt {
            current: self.key(),
            preempted: key,
            kind: KIND,
            aborts: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_process(process: u8, connection: u32, epoch: u64) -> Claimant {
        let opening = Opening::at([process; 12]);
        Claimant { opening, host: opening.id(connection), epoch: Epoch(epoch) }
    }

    fn us(connection: u32, epoch: u64) -> Claimant {
        of_process(1, connection, epoch)
    }

    fn of(claimant: Claimant, is_holder: bool) -> Registrant {
        Registrant { host: claimant.host, controller: 1, key: claimant.key(), is_holder }
    }

    fn them(epoch: u64, is_holder: bool) -> Registrant {
        of(of_process(2, 0, epoch), is_holder)
    }

    fn report(kind: ReservationType, registrants: Vec<Registrant>) -> ReservationReport {
        ReservationReport { generation: 1, kind: Some(kind), registrants }
    }

    #[test]
    fn the_way_to_the_reservation() {
        let first = us(1, 5);
        let key = first.key();
        let nobody = ReservationReport::default();
        assert_eq!(first.next(&nobody), Some(ReservationRequest::Register { key }));
        let older = report(KIND, vec![of(us(1, 3), true)]);
        let replace = ReservationRequest::Replace { current: Some(us(1, 3).key()), key };
        assert_eq!(first.next(&older), Some(replace));
        let free = ReservationReport { kind: None, ..report(KIND, vec![of(first, false)]) };
        let acquire = ReservationRequest::Acquire { current: key, kind: KIND };
        assert_eq!(first.next(&free), Some(acquire));
        // Who holds it goes first, then all who are registered; then it is ours, over each connection that is registered as well.
        let stranger = Registrant { host: [3; 16], key: 7, ..them(0, false) };
        let mut all = vec![stranger, them(4, true), of(first, false)];
        assert_eq!(first.next(&report(KIND, all.clone())), Some(first.preempt(them(4, true).key)));
        all.remove(1);
        all[1].is_holder = true;
        assert_eq!(first.next(&report(KIND, all.clone())), Some(first.preempt(7)));
        all.remove(0);
        assert_eq!(first.next(&report(KIND, all.clone())), None);
        let second = us(2, 5);
        let register = ReservationRequest::Register { key: second.key() };
        assert_eq!(second.next(&report(KIND, all.clone())), Some(register));
        all.push(of(second, false));
        assert_eq!(second.next(&report(KIND, all.clone())), None);
        // Of another type than it should be.
        let exclusive = report(ReservationType::WriteExclusive, all.clone());
        assert_eq!(second.next(&exclusive), Some(second.preempt(key)));
        let of_all = report(ReservationType::WriteExclusiveAllRegistrants, all);
        assert_eq!(second.next(&of_all), Some(second.preempt(0)));
    }

    #[test]
    fn whose_it_is() {
        let (first, second) = (us(1, 5), us(2, 5));
        let claim = |registrants| second.claim(&report(KIND, registrants));
        assert_eq!(claim(vec![of(first, true)]), Claim::Ours);
        assert_eq!(claim(vec![of(first, true), them(6, false)]), Claim::Theirs(Some(Epoch(6))));
        assert_eq!(claim(vec![them(5, true)]), Claim::Theirs(Some(Epoch(5))));
        assert_eq!(claim(vec![them(4, true)]), Claim::Nobody);
        assert_eq!(claim(vec![Registrant { key: 7, ..them(0, true) }]), Claim::Theirs(None));
        assert_eq!(second.claim(&ReservationReport::default()), Claim::Nobody);
        let exclusive = report(ReservationType::WriteExclusive, vec![of(first, true)]);
        assert_eq!(second.claim(&exclusive), Claim::Nobody);
    }

    #[test]
    fn keys_of_others_say_nothing() {
        assert_eq!(epoch_of(us(70_000, 7).key()), Some(Epoch(7)));
        assert_eq!(epoch_of(7), None);
        let stranger = Registrant { key: 7, ..them(0, false) };
        let registrants = vec![of(us(1, 9), false), of(us(2, 9), true), stranger, them(3, true)];
        assert_eq!(latest(&report(KIND, registrants), us(1, 9).opening), Some(Epoch(3)));
    }
}
