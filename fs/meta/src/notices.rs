//! Notices: what clients wait to hear of their locks, sent as soon as it is so; and what others wait for them to hear.
//!
//! What always holds:
//! - A notice stays (in `locks` and `leases`) until its client has acknowledged it, or what it is about has ended. Over a newer connection
//!   all of them are sent again, before the answer to `Register`.
//! - Notices and acknowledgements need no credit and no slot: they never wait behind what waits for them.

use crate::leases;
use crate::service::MetaService;
use levada_base::planted;
use levada_wire::frame::encode_body;
use levada_wire::meta::{Ack, NOTICES_MAX, Notice, ToClient};
use levada_wire::rpc::Pusher;

impl MetaService {
    /// Sends what has become due since it was called last.
    pub(crate) fn push_notices(&self) {
        let mut table = self.table.borrow_mut();
        for (client, notices) in table.locks.take_fresh() {
            let known = table.clients.get(&client);
            if let Some(pusher) = known.and_then(|known| known.pusher.as_ref()) {
                self.push(client, pusher, &notices);
            }
        }
    }

    /// A client has registered: from now on it is reached this way.
    pub(crate) fn reached(&self, client: u64, pusher: Pusher) {
        let mut table = self.table.borrow_mut();
        let mut notices = table.locks.notices(client);
        notices.extend(self.leases.borrow().notices(client));
        let Some(known) = table.clients.get_mut(&client) else { return };
        let is_late = |known: &Pusher| known.connection() > pusher.connection();
        if known.pusher.as_ref().is_some_and(is_late) {
            return;
        }
        if !planted!("meta-notice-not-resent") {
            self.push(client, &pusher, &notices);
        }
        known.pusher = Some(pusher);
    }

    /// Sends these at once, if there is a way.
    pub(crate) fn push_to(&self, client: u64, notices: &[(u64, Notice)]) {
        let table = self.table.borrow();
        let known = table.clients.get(&client);
        if let Some(pusher) = known.and_then(|known| known.pusher.as_ref()) {
            self.push(client, pusher, notices);
        }
    }

    fn push(&self, client: u64, pusher: &Pusher, notices: &[(u64, Notice)]) {
        for part in notices.chunks(NOTICES_MAX) {
            pusher.push(client, self.verifier, encode_body(&ToClient::Notices(part.to_vec())));
        }
    }

    pub(crate) fn acknowledged(&self, client: u64, acks: &[Ack]) {
        let mut table = self.table.borrow_mut();
        for ack in acks {
            if ack.number < leases::NUMBERS {
                table.locks.acknowledged(client, ack.number);
            } else {
                let mut leases = self.leases.borrow_mut();
                let shared = leases.acknowledged(client, *ack);
                // It may have closed that since.
                if let Some(ino) = shared.filter(|ino| table.opens_of(client, *ino) == 0) {
                    leases.unshare(ino, client);
                }
            }
        }
        self.leases_changed.notify_all();
    }
}
