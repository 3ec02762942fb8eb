//! Notices: what clients wait to hear of their locks, sent as soon as it is so.
//!
//! What always holds:
//! - A notice stays (in `locks`) until its client has acknowledged it, or what it is about has ended. Over a newer connection
//!   all of them are sent again, before the answer to `Register`.
//! - Notices and acknowledgements need no credit and no slot: they never wait behind what waits for them.

use crate::service::MetaService;
use levada_base::planted;
use levada_wire::frame::encode_body;
use levada_wire::meta::{NOTICES_MAX, Notice, ToClient};
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
        let notices = table.locks.notices(client);
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

    fn push(&self, client: u64, pusher: &Pusher, notices: &[(u64, Notice)]) {
        for part in notices.chunks(NOTICES_MAX) {
            pusher.push(client, self.verifier, encode_body(&ToClient::Notices(part.to_vec())));
        }
    }

    pub(crate) fn acknowledged(&self, client: u64, numbers: &[u64]) {
        let mut table = self.table.borrow_mut();
        numbers.iter().for_each(|number| table.locks.acknowledged(client, *number));
    }
}
