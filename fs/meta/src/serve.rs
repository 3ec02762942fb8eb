//! The service on the wire: frames in, replies and notices out.

use crate::config::CallHeader;
use crate::service::{Grants, MetaService};
use crate::tail::Superseded;
use futures_util::future::LocalBoxFuture;
use levada_base::ids::BootVerifier;
use levada_wire::frame::{Frame, NO_SLOT, decode_body, encode_body, flags};
use levada_wire::meta::{MetaReply, MetaRequest, ToService};
use levada_wire::rpc::{ConnectionId, Handler, Pusher, Reply};

const _: () = assert!(CallHeader::NO_SLOT == NO_SLOT);

impl Handler for MetaService {
    fn handle(&self, request: Frame, from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            let verifier = self.verifier();
            let header = request.header;
            if header.verifier != BootVerifier(0) && header.verifier != verifier {
                return Reply { verifier, ..Reply::flagged(flags::RESTARTED) };
            }
            let Ok(body) = decode_body::<MetaRequest>(&request.body) else {
                return Reply { verifier, ..Reply::flagged(flags::MALFORMED) };
            };
            let (client, slot, sequence) = (header.client, header.slot, header.sequence);
            let unstable = header.flags & flags::UNSTABLE != 0;
            let call =
                CallHeader { client, slot, sequence, unstable, connection: from.connection() };
            let directory =
                body.changes_names_of().filter(|_| header.flags & flags::WITH_DIRECTORY != 0);
            let grants = Grants::new(header.flags & flags::NAMES != 0);
            let mut reply = self.handle_leasing(call, body, &grants).await;
            if let MetaReply::Registered { client, .. } = reply {
                self.reached(client, from.clone());
            }
            // Of those alone that a session may begin with.
            let is_limited = matches!(&reply, MetaReply::Attr(_) | MetaReply::Entry(..))
                && self.table.borrow().accounts.limits_bytes();
            let flags = if is_limited { flags::LIMITED } else { 0 };
            if !unstable {
                return Reply {
                    verifier,
                    flags: grants.flags() | flags,
                    ..Reply::new(encode_body(&reply))
                };
            }
            // Nothing comes between this and the sending of the reply.
            if let Some(directory) = directory.filter(|_| reply.changed_names())
                && let Some(directory) = self.directory_now(call, directory, &grants)
            {
                reply = reply.with_directory(directory);
            }
            let durable = self.store().durable_seq();
            match self.tail.borrow_mut().frame_for(client, from.connection(), durable) {
                Ok(Some(tail)) => from.push(client, verifier, tail),
                Ok(None) => {}
                Err(Superseded) => {
                    return Reply { verifier, ..Reply::flagged(flags::NOT_HERE) };
                }
            }
            Reply { verifier, flags: grants.flags() | flags, ..Reply::new(encode_body(&reply)) }
        })
    }

    fn one_way(&self, frame: Frame, _from: ConnectionId) {
        let Ok(ToService::Acks(acks)) = decode_body(&frame.body) else {
            tracing::warn!("what a client says by itself makes no sense");
            return;
        };
        if frame.header.verifier == self.verifier() {
            self.acknowledged(frame.header.client, &acks);
        }
    }
}
