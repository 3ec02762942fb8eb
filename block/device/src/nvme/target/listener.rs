//! A host that is told of events.

use levada_base::stream::{Outbox, Outgoing};
use levada_nvme::log::Event;
use levada_nvme::pdu::{Framing, Pdu};
use levada_nvme::{Completion, Status};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

/// Who is told of events: one at a time, those of a page not again before it was read.
pub(super) struct Listener {
    pub outbox: Rc<Outbox>,
    framing: Framing,
    request: Cell<Option<u16>>,
    untold: RefCell<VecDeque<Event>>,
    unread: RefCell<BTreeSet<u8>>,
}

impl Listener {
    pub fn new(outbox: &Rc<Outbox>, framing: Framing) -> Rc<Self> {
        let (request, untold, unread) = Default::default();
        Rc::new(Self { outbox: Rc::clone(outbox), framing, request, untold, unread })
    }

    fn page_of(event: Event) -> u8 {
        (event.result() >> 16) as u8
    }

    pub fn tell(&self, event: Event) {
        if self.unread.borrow_mut().insert(Self::page_of(event)) {
            self.untold.borrow_mut().push_back(event);
            self.send();
        }
    }

    pub fn asks(&self, id: u16) {
        assert!(self.request.replace(Some(id)).is_none(), "one at a time");
        self.send();
    }

    pub fn has_read(&self, page: u8) {
        // Only of what was told of.
        if !self.untold.borrow().iter().any(|event| Self::page_of(*event) == page) {
            self.unread.borrow_mut().remove(&page);
        }
    }

    fn send(&self) {
        if self.untold.borrow().is_empty() {
            return;
        }
        if let Some(id) = self.request.take()
            && let Some(event) = self.untold.borrow_mut().pop_front()
        {
            let (result, status) = (event.result(), Status::SUCCESS);
            let completion = Completion { result, queue_head: 0, id, status, has_more: false };
            let head = self.framing.head(&Pdu::Response(completion), 0);
            self.outbox.push(Outgoing { head: &head, ..Outgoing::default() });
        }
    }
}
