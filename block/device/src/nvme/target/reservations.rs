//! Who is registered with the test's target, who holds its reservation, and whom a change waits for.

use super::Target;
use levada_nvme::reservation::{
    KEYS_BYTES, PERSIST, Registrant, ReservationReport, ReservationRequest, ReservationType,
};
use levada_nvme::{Command, IoOpcode, Status};

/// A change of a host, while it is under way.
pub(super) struct Changing<'a>(&'a Target, [u8; 16]);

impl<'a> Changing<'a> {
    pub(super) fn of(target: &'a Target, host: [u8; 16]) -> Self {
        target.changing.borrow_mut().push(host);
        Self(target, host)
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let mut all = self.0.changing.borrow_mut();
        let at = all.iter().position(|host| *host == self.1);
        all.swap_remove(at.expect("it is under way"));
        drop(all);
        self.0.changed.notify_all();
    }
}

impl Target {
    pub(super) fn report(&self) -> ReservationReport {
        let keys = self.keys.borrow();
        let holder = self.holder.get();
        let registrants = keys.iter().map(|(host, key)| Registrant {
            host: *host,
            controller: 1,
            key: *key,
            is_holder: holder == Some(*host),
        });
        ReservationReport {
            generation: self.generation.get(),
            kind: holder.map(|_| ReservationType::WriteExclusiveRegistrants),
            registrants: registrants.collect(),
        }
    }

    pub(super) async fn reserve(
        &self,
        host: [u8; 16],
        opcode: IoOpcode,
        command: &Command,
        data: &[u8; KEYS_BYTES],
    ) -> Status {
        let request = match opcode {
            IoOpcode::ReservationRegister => ReservationRequest::register(command, data),
            _ => ReservationRequest::acquire(command, data),
        };
        if opcode == IoOpcode::ReservationRegister && self.keeps_reservations {
            self.persists.set(command.dword(10) & PERSIST == PERSIST);
        }
        let mut gone = Vec::new();
        let status = self.reserve_at_once(host, request, &mut gone);
        if self.is_own && opcode == IoOpcode::ReservationAcquire && self.holder.get().is_some() {
            let keys = self.keys.borrow();
            let changing = self.changing.borrow();
            gone.extend(changing.iter().filter(|host| !keys.contains_key(*host)));
        }
        // As a target does that was asked to abort what they have under way.
        self.changed
            .until(|| (!gone.iter().any(|it| self.changing.borrow().contains(it))).then_some(()))
            .await;
        status
    }

    /// `gone`: who is preempted.
    fn reserve_at_once(
        &self,
        host: [u8; 16],
        request: Option<ReservationRequest>,
        gone: &mut Vec<[u8; 16]>,
    ) -> Status {
        let mut keys = self.keys.borrow_mut();
        let conflict = Status::RESERVATION_CONFLICT.and_do_not_retry();
        let registered = || self.generation.set(self.generation.get() + 1);
        match request {
            Some(
                ReservationRequest::Register { key } | ReservationRequest::Replace { key, .. },
            ) => {
                keys.insert(host, key);
                registered();
            }
            Some(ReservationRequest::Acquire { current, .. }) => {
                if keys.get(&host) != Some(&current) || self.holder.get().is_some() {
                    return conflict;
                }
                self.holder.set(Some(host));
                if self.is_busy.get() {
                    registered();
                }
            }
            Some(ReservationRequest::Preempt { current, preempted, .. }) => {
                let holder = self.holder.get().and_then(|holder| keys.get(&holder).copied());
                let is_known = keys.iter().any(|(at, key)| *at != host && *key == preempted);
                if keys.get(&host) != Some(&current) || !is_known {
                    return conflict;
                }
                let is_gone = |at: &[u8; 16], key: u64| *at != host && key == preempted;
                gone.extend(keys.iter().filter(|(at, key)| is_gone(at, **key)).map(|(at, _)| *at));
                keys.retain(|at, key| !is_gone(at, *key));
                if holder == Some(preempted) {
                    self.holder.set(Some(host));
                }
                registered();
            }
            Some(ReservationRequest::Unregister { .. }) => {
                keys.remove(&host);
                registered();
                if self.holder.get() == Some(host) {
                    self.holder.set(None);
                }
            }
            _ => return Status::INVALID_FIELD,
        }
        Status::SUCCESS
    }
}
