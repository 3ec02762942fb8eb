//! A server under a client that says anything, from the first word to the last.
//!
//! Bytes are choices, so that random ones get past the negotiation: each option and request is sound, or wrong in a field or two, or cut off. Checked is:
//!
//! - Every option and every request is answered once, and as it must be; what is read is what was written before.
//! - Half a request changes nothing, and nobody changes what may only be read.
//! - Nobody is hung up on who has said nothing wrong, and who has is, with nothing behind the last answer.
//! - Once the client is gone nothing is left of it.

use super::client::Client;
use super::disk::Shelf;
use crate::server::{Shared, serve};
use levada_base::choices::Choices;
use levada_base::reactor::net::Stream;
use levada_base::reactor::{self, Reactor};
use levada_base::stream::Clients;
use levada_base::sync::Once;
use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

/// For a whole connection.
const LONG: Duration = Duration::from_secs(8);

/// See the module.
///
/// # Panics
///
/// When the server does what it must not, or there is no io_uring.
pub fn connections(bytes: &[u8]) {
    thread_local! {
        // Never dropped: other thread locals, which it needs to end, may be gone by then.
        static REACTOR: ManuallyDrop<Reactor> = ManuallyDrop::new(Reactor::new().expect("io_uring"));
    }
    REACTOR.with(|reactor| {
        reactor.block_on(async {
            reactor::timeout(LONG, run(Choices(bytes))).await.expect("it comes to an end");
        });
    });
}

async fn run(mut choices: Choices<'_>) {
    let shelf = Shelf::new();
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let clients = Clients::new(1);
    let shared = Rc::new(Shared {
        exports: Rc::clone(&shelf) as _,
        tls: None,
        stopping: Once::default(),
        clients: clients.clone(),
    });
    let present = clients.enter().expect("nobody else is there");
    let serving = reactor::spawn(serve(present, Stream::adopt(theirs.into()), shared));
    let mut client = Client::new(Stream::adopt(ours.into()), Rc::clone(&shelf));
    let went_on = client.run(&mut choices).await.is_some();
    assert!(went_on || client.may_be_hung_up_on, "hung up on for nothing");
    let model = std::mem::take(&mut client.model);
    drop(client);
    assert!(serving.await.is_some(), "the server's task ended before its time");
    assert_eq!(clients.count(), 0);
    assert_eq!((Rc::strong_count(&shelf.disk), Rc::strong_count(&shelf.kept)), (1, 1));
    assert!(*shelf.disk.bytes.borrow() == model, "half a request has changed something");
    assert!(shelf.kept.bytes.borrow().iter().all(|byte| *byte == 0));
}
