//! Leave to read and write: a guest whose tenant has caps waits for it before its requests take anything.
//!
//! The node has the caps ([`crate::turns`]). What waits is asked for together, in the order in which it came, one question at a time.

use crate::turns::{Ask, Granted, TURNS, WANTED_MAX, Wanted};
use levada_base::reactor::{self, Instant};
use levada_base::sync::oneshot;
use levada_mount::codec::Operation;
use levada_wire::frame::{decode_body, encode_body};
use levada_wire::rpc::{Call, Peer};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// A node that does not answer for so long does not know the question: it is of an earlier release.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Then, nobody asks again for so long.
const NOT_ASKED: Duration = Duration::from_secs(1);
/// No request reads more at once.
const READ_BYTES_MAX: u32 = 1 << 20;
/// Nor copies more.
const COPY_BYTES_MAX: u64 = 16 << 20;
/// Bytes that are asked for at once, unless one request is more.
const BYTES_ASKED: u64 = 1 << 20;

/// See the module. Of one guest.
pub(super) struct Leave {
    node: Rc<Peer>,
    tenant: u32,
    /// Until then nobody need ask.
    free_until: Cell<Option<Instant>>,
    waiting: RefCell<VecDeque<(Wanted, oneshot::Sender<()>)>>,
    /// A task asks for those who wait.
    is_asking: Cell<bool>,
}

/// What a request reads or writes; `None`: it may go on at once.
pub(super) fn wanted(operation: &Operation<'_>) -> Option<Wanted> {
    match operation {
        Operation::Read(args) => Some(Wanted::Read { bytes: args.size.min(READ_BYTES_MAX).into() }),
        Operation::Write(args) => Some(Wanted::Write { bytes: args.data.len() as u64 }),
        Operation::Fallocate { .. } => Some(Wanted::Write { bytes: 0 }),
        Operation::SetAttr(set) => set.size.map(|_| Wanted::Write { bytes: 0 }),
        Operation::CopyFileRange(args) | Operation::CopyFileRange64(args) => {
            Some(Wanted::Write { bytes: args.length })
        }
        _ => None,
    }
}

/// The same request, which does no more at once than anybody should have leave for.
pub(super) fn shortened(mut operation: Operation<'_>) -> Operation<'_> {
    if let Operation::CopyFileRange(args) | Operation::CopyFileRange64(args) = &mut operation {
        // Who copies asks again for the rest.
        args.length = args.length.min(COPY_BYTES_MAX);
    }
    operation
}

impl Leave {
    /// Of a guest of the tenant of that number.
    pub(super) fn new(node: Rc<Peer>, tenant: u32) -> Rc<Self> {
        let (free_until, waiting, is_asking) = Default::default();
        Rc::new(Self { node, tenant, free_until, waiting, is_asking })
    }

    fn is_free(&self) -> bool {
        self.free_until.get().is_some_and(|until| reactor::now() < until)
    }

    /// Waits until it may be done.
    pub(super) async fn take(self: &Rc<Self>, wanted: Wanted) {
        if self.is_free() {
            return;
        }
        let (sender, told) = oneshot::channel();
        self.waiting.borrow_mut().push_back((wanted, sender));
        if !self.is_asking.replace(true) {
            reactor::spawn(Rc::clone(self).ask_for_all());
        }
        // Without an answer it goes on as well.
        let _ = told.await;
    }

    async fn ask_for_all(self: Rc<Self>) {
        loop {
            let (wanted, waiting): (Vec<_>, Vec<_>) = self.next().into_iter().unzip();
            if waiting.is_empty() {
                self.is_asking.set(false);
                return;
            }
            if !self.is_free() {
                let ask = Ask { tenant: self.tenant, wanted };
                let free = self.granted(&ask).await;
                self.free_until.set(Some(reactor::now() + free));
            }
            waiting.into_iter().for_each(|waiting| waiting.send(()));
        }
    }

    /// The first of those who wait, as many as are asked for at once.
    fn next(&self) -> Vec<(Wanted, oneshot::Sender<()>)> {
        let mut all = self.waiting.borrow_mut();
        let mut bytes = 0;
        let fits = |wanted: &Wanted| {
            let (Wanted::Read { bytes: more } | Wanted::Write { bytes: more }) = *wanted;
            let is_first = bytes == 0;
            bytes += more.max(1);
            is_first || bytes <= BYTES_ASKED
        };
        let count = all.iter().map(|(wanted, _)| wanted).take(WANTED_MAX).take_while({
            let mut fits = fits;
            move |wanted| fits(wanted)
        });
        let count = count.count();
        all.drain(..count).collect()
    }

    /// For how long nobody need ask.
    async fn granted(&self, ask: &Ask) -> Duration {
        let call = Call { kind: "Turns", ..Call::new(TURNS, encode_body(ask)) };
        let answer = self.node.call(&call, Some(reactor::now() + ANSWER_WITHIN)).await;
        match answer.ok().and_then(|answer| decode_body::<Granted>(&answer.body).ok()) {
            Some(Granted { free_ms }) => Duration::from_millis(free_ms.into()),
            None => NOT_ASKED,
        }
    }
}
