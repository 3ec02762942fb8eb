//! Meters of a mount's requests: what programs ask of it, and how long they wait.

use crate::codec::{Opcode, WRITE_DATA_OFFSET};
use crate::session::Answer;
use levada_base::meter::{InFlight, Meter};
use levada_base::reactor::{self, Instant};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Of one mount, since it began. Counters only rise, but for what is in flight.
#[derive(Default)]
pub struct Meters {
    kinds: RefCell<BTreeMap<u32, (Opcode, Rc<Meter>)>>,
    in_flight: Cell<u64>,
    unreadable: Cell<u64>,
}

/// A request that is being answered.
pub struct Metered<'a> {
    meter: Rc<Meter>,
    begun: Instant,
    /// Of a WRITE.
    written_bytes: u64,
    _in_flight: InFlight<'a>,
}

impl Meters {
    /// Requests that have begun and not ended. Who waits for a lock is one of them.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight.get()
    }

    /// Counts a message that could not be read. True for one worth a line in a log: a guest can send any number.
    pub(crate) fn could_not_read(&self) -> bool {
        self.unreadable.set(self.unreadable.get() + 1);
        self.unreadable.get().is_power_of_two()
    }

    /// Every meter with its kind. A request failed when its target did: a name that is not there is an answer.
    #[must_use]
    pub fn kinds(&self) -> Vec<(Opcode, Rc<Meter>)> {
        self.kinds.borrow().values().cloned().collect()
    }

    /// Counts `message` from now on; nothing where nobody waits for an answer, or it is no request.
    #[must_use]
    pub fn begin(&self, message: &[u8]) -> Option<Metered<'_>> {
        let number = u32::from_ne_bytes(*message.get(4..)?.first_chunk()?);
        let opcode = Opcode::from_raw(number)?;
        let written_bytes = match opcode {
            Opcode::Forget
            | Opcode::BatchForget
            | Opcode::Interrupt
            | Opcode::Init
            | Opcode::Destroy => return None,
            Opcode::Write => message.len().saturating_sub(WRITE_DATA_OFFSET) as u64,
            _ => 0,
        };
        let new = || (opcode, Rc::default());
        let meter = Rc::clone(&self.kinds.borrow_mut().entry(number).or_insert_with(new).1);
        let _in_flight = InFlight::begin(&self.in_flight);
        Some(Metered { meter, begun: reactor::now(), written_bytes, _in_flight })
    }
}

impl Metered<'_> {
    /// It is answered.
    pub fn end(self, answer: Option<&Answer>) {
        let failed = answer.is_some_and(Answer::is_failure);
        let moved = if failed { 0 } else { self.written_bytes };
        let bytes = moved + answer.map_or(0, Answer::data_bytes);
        self.meter.add(bytes, self.begun.elapsed(), failed);
    }
}
