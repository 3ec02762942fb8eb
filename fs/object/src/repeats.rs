//! What was done for whom, so that a repeated request is not done twice.
//!
//! Per (client, slot) the last sequence and its reply. Volatile: after a restart the verifier
//! differs, and requests that name the old one are not done at all.
//!
//! What always holds: a client is forgotten only while none of its changes runs, and only
//! when [`CLIENTS_MAX`] others came after it.

use levada_base::sync::Notify;
use levada_wire::object::ObjectReply;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Clients remembered; each is one run of one mount or program.
const CLIENTS_MAX: usize = 4096;
/// Changes that one client may have in flight at one target.
const SLOTS_MAX: usize = 4096;

#[derive(Default)]
pub(crate) struct Repeats {
    clients: BTreeMap<u64, Slots>,
    uses: u64,
}

#[derive(Default)]
struct Slots {
    used: u64,
    running: usize,
    slots: BTreeMap<u32, Slot>,
}

struct Slot {
    sequence: u64,
    state: State,
}

enum State {
    /// Repetitions wait here for the first to end.
    Running(Rc<Notify>),
    Done(ObjectReply),
}

/// What to do with a change that a client asks for.
pub(crate) enum Claim {
    /// Do it, then call [`Repeats::finish`].
    Fresh,
    /// It runs already: wait, then ask again.
    Wait(Rc<Notify>),
    /// It was done; this was the reply.
    Done(ObjectReply),
    /// Older than the slot's last change: nobody waits for it any more.
    Straggler,
    /// The client uses more slots than it may.
    TooMany,
}

impl Repeats {
    pub(crate) fn claim(&mut self, client: u64, slot: u32, sequence: u64) -> Claim {
        if !self.clients.contains_key(&client) && self.clients.len() >= CLIENTS_MAX {
            self.forget_one();
        }
        self.uses += 1;
        let slots = self.clients.entry(client).or_default();
        slots.used = self.uses;
        if let Some(slot) = slots.slots.get_mut(&slot) {
            match &slot.state {
                _ if sequence < slot.sequence => return Claim::Straggler,
                State::Running(ended) if sequence == slot.sequence => {
                    return Claim::Wait(Rc::clone(ended));
                }
                State::Done(reply) if sequence == slot.sequence => {
                    return Claim::Done(reply.clone());
                }
                // The client gave the earlier one up; its effect may still come.
                State::Running(ended) => return Claim::Wait(Rc::clone(ended)),
                State::Done(_) => {
                    *slot = Slot { sequence, state: State::Running(Rc::default()) };
                }
            }
        } else if slots.slots.len() >= SLOTS_MAX {
            return Claim::TooMany;
        } else {
            slots.slots.insert(slot, Slot { sequence, state: State::Running(Rc::default()) });
        }
        slots.running += 1;
        Claim::Fresh
    }

    /// A claimed change ended; `None`: it was not done and may be tried again.
    pub(crate) fn finish(&mut self, client: u64, slot: u32, reply: Option<&ObjectReply>) {
        let slots = self.clients.get_mut(&client).expect("a client with a running change");
        slots.running -= 1;
        let entry = slots.slots.remove(&slot).expect("claimed");
        let State::Running(ended) = entry.state else { unreachable!("finished twice") };
        if let Some(reply) = reply {
            let state = State::Done(reply.clone());
            slots.slots.insert(slot, Slot { sequence: entry.sequence, state });
        }
        ended.notify_all();
    }

    fn forget_one(&mut self) {
        let idle = self.clients.iter().filter(|(_, slots)| slots.running == 0);
        let oldest = idle.min_by_key(|(_, slots)| slots.used).map(|(client, _)| *client);
        if let Some(oldest) = oldest {
            self.clients.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_wire::object::ObjectReply;

    #[test]
    fn each_sequence_is_done_once() {
        let mut repeats = Repeats::default();
        assert!(matches!(repeats.claim(1, 0, 5), Claim::Fresh));
        assert!(matches!(repeats.claim(1, 0, 5), Claim::Wait(_)));
        assert!(matches!(repeats.claim(1, 1, 5), Claim::Fresh), "another slot");
        repeats.finish(1, 0, Some(&ObjectReply::Data));
        assert!(matches!(repeats.claim(1, 0, 5), Claim::Done(ObjectReply::Data)));
        assert!(matches!(repeats.claim(1, 0, 4), Claim::Straggler));
        assert!(matches!(repeats.claim(1, 0, 6), Claim::Fresh));
        repeats.finish(1, 0, None);
        assert!(matches!(repeats.claim(1, 0, 6), Claim::Fresh), "was not done");
    }

    #[test]
    fn idle_clients_are_forgotten_first() {
        let mut repeats = Repeats::default();
        assert!(matches!(repeats.claim(0, 0, 1), Claim::Fresh));
        for client in 1..2 * CLIENTS_MAX as u64 {
            assert!(matches!(repeats.claim(client, 0, 1), Claim::Fresh));
            repeats.finish(client, 0, Some(&ObjectReply::Data));
        }
        assert!(repeats.clients.len() <= CLIENTS_MAX);
        assert!(matches!(repeats.claim(0, 0, 1), Claim::Wait(_)), "still running");
    }
}
