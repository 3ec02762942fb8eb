//! The service on the wire: frames in, replies out.

use crate::config::CallHeader;
use crate::service::MetaService;
use futures_util::future::LocalBoxFuture;
use levada_base::ids::BootVerifier;
use levada_wire::frame::{Frame, NO_SLOT, decode_body, encode_body, flags};
use levada_wire::meta::MetaRequest;
use levada_wire::rpc::{Handler, Reply};

const _: () = assert!(CallHeader::NO_SLOT == NO_SLOT);

impl Handler for MetaService {
    fn handle(&self, request: Frame) -> LocalBoxFuture<'_, Reply> {
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
            let reply = self.handle(CallHeader { client, slot, sequence }, body).await;
            Reply { verifier, ..Reply::new(encode_body(&reply)) }
        })
    }
}
