//! Commands that are recalled before they are carried out (Abort: Base, 5.1).
//!
//! A command's own task decides whether it ends, by its [`Stage`] at that moment; so nothing happens between the question and the answer.
//! What always holds:
//! - A command that was told to be aborted changes nothing, neither before nor after: one that has begun to change something is not
//!   recalled any more.
//! - A host hears of the command's end before it hears that it was aborted.

use futures_util::future::{Either, poll_immediate, select};
use levada_base::sync::oneshot;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// How far a command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nothing has begun: it waits for memory, for older writes of its host over a connection that is gone, or for an event. It is dropped.
    Waiting,
    /// It waits for the data that were asked for under this tag. It is dropped, unless a unit of them is just being received: their memory
    /// is in use until that is whole.
    AwaitingData { tag: u16 },
    /// A read, or a flush, is in the volume. What that is at cannot be called back, but changes nothing that a host could see: it goes on
    /// with its memory, and what it brings is dropped.
    Reading,
    /// It may have changed something, or is about to, or will end at once. It is not recalled: half a write must not be told as none.
    Begun,
}

/// An order to a command to end. Dropped, the command goes on.
pub(crate) struct Recalled(oneshot::Sender<()>);

impl Recalled {
    /// The host has been told how the command ended.
    pub fn obeyed(self) {
        self.0.send(());
    }
}

/// The commands of a queue that wait for something, by their identifiers.
#[derive(Default)]
pub(crate) struct Recalls(RefCell<BTreeMap<u16, oneshot::Sender<Recalled>>>);

/// A command's place among them, which is a future of the order to it.
struct Waiting<'a> {
    recalls: &'a Recalls,
    id: u16,
    order: Option<oneshot::Receiver<Recalled>>,
}

impl Recalls {
    /// Carries `work` out, as the command `id`. An order to end it is asked of `may`, and obeyed if that says so.
    ///
    /// # Errors
    ///
    /// The order, when the work is not done.
    pub async fn unless_recalled<T>(
        &self,
        id: u16,
        mut work: Pin<&mut impl Future<Output = T>>,
        mut may: impl FnMut() -> bool,
    ) -> Result<T, Recalled> {
        // Most commands wait for nothing but the volume, and those of a volume in memory not even for that.
        if let Some(done) = poll_immediate(work.as_mut()).await {
            return Ok(done);
        }
        loop {
            match select(work.as_mut(), self.wait(id)).await {
                Either::Left((done, _)) => return Ok(done),
                Either::Right((Ok(recalled), _)) if may() => return Err(recalled),
                Either::Right((Ok(_refused), _)) => {}
                // The host has given its identifier to another command, which nobody could tell from this one.
                Either::Right((Err(oneshot::Dropped), _)) => return Ok(work.await),
            }
        }
    }

    fn wait(&self, id: u16) -> Waiting<'_> {
        let (sender, order) = oneshot::channel();
        self.0.borrow_mut().insert(id, sender);
        Waiting { recalls: self, id, order: Some(order) }
    }

    /// Recalls a command. True: it ended by that, and its host has been told.
    pub async fn recall(&self, id: u16) -> bool {
        let Some(command) = self.0.borrow_mut().remove(&id) else { return false };
        let (obeyed, outcome) = oneshot::channel();
        command.send(Recalled(obeyed));
        outcome.await.is_ok()
    }
}

impl Future for Waiting<'_> {
    type Output = Result<Recalled, oneshot::Dropped>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let order = self.order.as_mut().expect("taken when this is dropped");
        Pin::new(order).poll(cx)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        drop(self.order.take());
        let mut waiting = self.recalls.0.borrow_mut();
        // Unless another has the place, whose order somebody awaits.
        if waiting.get(&self.id).is_some_and(|place| !place.is_awaited()) {
            waiting.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::{self, Reactor};
    use std::future::pending;
    use std::pin::pin;
    use std::rc::Rc;

    /// A command that never ends by itself, and what became of it.
    fn command(recalls: &Rc<Recalls>, id: u16, may: bool) -> reactor::JoinHandle<bool> {
        let recalls = Rc::clone(recalls);
        reactor::spawn(async move {
            match recalls.unless_recalled(id, pin!(pending::<()>()), || may).await {
                Ok(()) => false,
                Err(recalled) => {
                    recalled.obeyed();
                    true
                }
            }
        })
    }

    #[test]
    fn a_command_decides_itself() {
        Reactor::simulated(0).block_on(async {
            let recalls = Rc::new(Recalls::default());
            let (obeys, refuses) = (command(&recalls, 1, true), command(&recalls, 2, false));
            reactor::yield_now().await;
            assert!(!recalls.recall(3).await, "nobody");
            assert!(
                !recalls.recall(2).await && !recalls.recall(2).await,
                "and it can be asked again"
            );
            assert!(recalls.recall(1).await && obeys.await == Some(true));
            refuses.abort();
            assert!(!recalls.recall(1).await);
        });
    }

    #[test]
    fn a_place_is_given_back_to_whoever_has_it_now() {
        Reactor::simulated(0).block_on(async {
            let recalls = Rc::new(Recalls::default());
            let done = recalls.unless_recalled(1, pin!(async { 7 }), || true).await;
            assert!(matches!(done, Ok(7)) && recalls.0.borrow().is_empty());
            // Two with one identifier: the later one has the place, also when the earlier one ends.
            let first = recalls.wait(1);
            let second = recalls.wait(1);
            assert!(first.await.is_err());
            assert_eq!(recalls.0.borrow().len(), 1);
            drop(second);
            assert!(recalls.0.borrow().is_empty());
        });
    }
}
