//! One ring served: requests come from it, and their answers go back in batches.
//!
//! A queue is a task of its own. While its client is busy the reactor looks at the ring wherever it looks at its own, and the
//! client need not kick; a reactor that is about to sleep asks for kicks first. A queue that found nothing to do several such
//! times in a row is cold: it only waits for its kick, and costs nothing.
//!
//! A client that gives no eventfd to be kicked at wants its ring to be polled: it is, by the clock while the queue is cold.
//!
//! What always holds:
//! - No request is missed: who asks for kicks looks once more afterwards.
//! - A queue that broke its rules takes nothing more from its ring. What it has taken is finished and answered.

use crate::memory::Memory;
use crate::ring::{Broken, Ring, Shape, Used};
use crate::served::{Served, Source};
use crate::signal::{Kick, Signal};
use levada_base::reactor::{self, JoinHandle, Watched};
use levada_base::sync::Notify;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Chains taken before answers are given.
const BATCH: usize = 64;
/// A queue is cold after the reactor slept so many times while nothing came from it.
const IDLE_SLEEPS: u32 = 8;
/// And after it looked at it so often for nothing: other clients may keep the reactor from ever sleeping, and should not pay
/// for looking at hundreds of idle rings.
const IDLE_LOOKS: u32 = 10_000;
/// How often a queue that is to end has those told that still wait.
const WAITING_AGAIN: Duration = Duration::from_millis(50);
/// How often a ring is looked at whose client does not kick (`VHOST_USER_SET_VRING_KICK` without a descriptor).
const UNKICKED_LOOK_EVERY: Duration = Duration::from_millis(1);

/// Where a queue tells its client what happens.
#[derive(Clone, Default)]
pub(crate) struct Signals {
    pub call: Option<Arc<Signal>>,
    pub err: Option<Arc<Signal>>,
}

pub(crate) struct Queue<S> {
    served: Rc<S>,
    source: Source,
    ring: RefCell<Ring>,
    memory: RefCell<Arc<Memory>>,
    signals: RefCell<Signals>,
    kick: RefCell<Option<Rc<Kick>>>,
    /// Raised when the kick is another one.
    kicks: Cell<u64>,
    is_enabled: Cell<bool>,
    is_broken: Cell<bool>,
    /// Requests being carried out.
    out: Cell<usize>,
    /// Those that are, to be given back.
    done: RefCell<Vec<Used>>,
    /// The task, while it waits.
    waiting: RefCell<Option<Waker>>,
    /// Told when nothing is out any more.
    idle: Notify,
    /// The reactor looks at the ring while this is there: the queue is hot.
    watch: RefCell<Option<Rc<Watch<S>>>>,
    idle_sleeps: Cell<u32>,
    idle_looks: Cell<u32>,
}

/// A queue that is running, and its task.
pub(crate) struct Running<S> {
    pub queue: Rc<Queue<S>>,
    task: JoinHandle<()>,
}

impl<S: Served> Running<S> {
    /// Stops taking requests, and returns when those that were taken are answered: where the ring stands.
    pub(crate) async fn end(self) -> u32 {
        let queue = &self.queue;
        queue.set_enabled(false);
        loop {
            queue.served.stop_waiting(queue.source.queue);
            let idle = queue.idle.until(|| queue.is_idle().then_some(()));
            // One that has just begun may only be about to wait.
            if reactor::timeout(WAITING_AGAIN, idle).await.is_ok() {
                break;
            }
        }
        self.task.abort();
        queue.ring.borrow().base()
    }
}

impl<S: Served> Queue<S> {
    /// Serves `ring`, once it is enabled.
    pub(crate) fn run(
        served: Rc<S>,
        source: Source,
        ring: Ring,
        memory: Arc<Memory>,
    ) -> Running<S> {
        ring.want_kicks(true);
        fence(Ordering::SeqCst);
        let queue = Rc::new(Self {
            served,
            source,
            ring: RefCell::new(ring),
            memory: RefCell::new(memory),
            signals: RefCell::default(),
            kick: RefCell::default(),
            kicks: Cell::new(0),
            is_enabled: Cell::new(false),
            is_broken: Cell::new(false),
            out: Cell::new(0),
            done: RefCell::default(),
            waiting: RefCell::default(),
            idle: Notify::default(),
            watch: RefCell::default(),
            idle_sleeps: Cell::new(0),
            idle_looks: Cell::new(0),
        });
        let task = reactor::spawn(Rc::clone(&queue).serve());
        Running { queue, task }
    }

    async fn serve(self: Rc<Self>) {
        let mut kicks = self.kicks.get();
        let mut kicked = self.next_kick();
        loop {
            if kicks != self.kicks.get() {
                kicks = self.kicks.get();
                kicked = self.next_kick();
            }
            let was_kicked = poll_fn(|cx| {
                if self.has_work() || kicks != self.kicks.get() {
                    return Poll::Ready(false);
                }
                if kicked.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(true);
                }
                self.wait(cx);
                Poll::Pending
            })
            .await;
            if was_kicked {
                kicked = self.next_kick();
            }
            if self.can_take() {
                self.heat();
                self.take_batch();
            }
            self.give_back();
            // Others have their turn, and the requests that were just taken.
            if self.has_work() {
                reactor::yield_now().await;
            }
        }
    }

    fn next_kick(&self) -> Pin<Box<dyn Future<Output = ()>>> {
        match self.kick.borrow().clone() {
            Some(kick) => Box::pin(async move { kick.kicked().await }),
            None => Box::pin(reactor::sleep(UNKICKED_LOOK_EVERY)),
        }
    }

    /// Takes chains and begins their requests.
    fn take_batch(self: &Rc<Self>) {
        let memory = Arc::clone(&self.memory.borrow());
        let mut unheard = Context::from_waker(Waker::noop());
        for _ in 0..BATCH {
            let chain = match self.ring.borrow_mut().pop(&memory) {
                Ok(Some(chain)) => chain,
                Ok(None) => return,
                Err(broken) => return self.break_off(broken),
            };
            self.idle_sleeps.set(0);
            self.idle_looks.set(0);
            let served = Rc::clone(&self.served);
            let request = served.serve(self.source, Arc::clone(&memory), chain);
            let mut request = Box::pin(request);
            // What needs no waiting needs no task.
            match request.as_mut().poll(&mut unheard) {
                Poll::Ready(used) => self.finish(used),
                Poll::Pending => {
                    self.out.set(self.out.get() + 1);
                    let queue = Rc::clone(self);
                    reactor::spawn(async move {
                        let used = request.await;
                        queue.out.set(queue.out.get() - 1);
                        queue.finish(used);
                        queue.wake();
                        // One that broke the ring leaves nothing to be given back.
                        if queue.is_idle() {
                            queue.idle.notify_all();
                        }
                    });
                }
            }
        }
    }

    fn finish(&self, used: Result<Used, Broken>) {
        match used {
            Ok(used) => self.done.borrow_mut().push(used),
            Err(broken) => self.break_off(broken),
        }
    }

    /// From now on the reactor looks at the ring.
    fn heat(self: &Rc<Self>) {
        if self.watch.borrow().is_none() {
            let watch = Rc::new(Watch(Rc::downgrade(self)));
            reactor::watch(&watch);
            *self.watch.borrow_mut() = Some(watch);
            self.ring.borrow().want_kicks(false);
        }
    }
}

impl<S> Queue<S> {
    /// Gives back what is done, and tells the client if it wants to know.
    fn give_back(&self) {
        let mut done = self.done.borrow_mut();
        if !done.is_empty() {
            if self.ring.borrow_mut().push(&done)
                && let Some(call) = &self.signals.borrow().call
            {
                call.tell();
            }
            done.clear();
        }
        drop(done);
        if self.is_idle() {
            self.idle.notify_all();
        }
    }

    fn break_off(&self, broken: Broken) {
        if !self.is_broken.replace(true) {
            tracing::warn!(error = %broken, "a ring of a vhost client is no longer served");
            if let Some(err) = &self.signals.borrow().err {
                err.tell();
            }
        }
    }

    /// From now on only kicks wake it. One that came before the client saw that is found by who looks once more.
    fn cool(&self) {
        self.ring.borrow().want_kicks(true);
        fence(Ordering::SeqCst);
        self.idle_looks.set(0);
        self.idle_sleeps.set(0);
        self.watch.borrow_mut().take();
    }

    fn is_idle(&self) -> bool {
        self.out.get() == 0 && self.done.borrow().is_empty()
    }

    fn can_take(&self) -> bool {
        self.is_enabled.get() && !self.is_broken.get() && self.ring.borrow().has_available()
    }

    fn has_work(&self) -> bool {
        !self.done.borrow().is_empty() || self.can_take()
    }

    fn wait(&self, cx: &Context<'_>) {
        let mut waiting = self.waiting.borrow_mut();
        match &mut *waiting {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *waiting = Some(cx.waker().clone()),
        }
    }

    /// Wakes the task; false when it does not wait.
    fn wake(&self) -> bool {
        let waiting = self.waiting.borrow_mut().take();
        waiting.map(Waker::wake).is_some()
    }

    pub(crate) fn set_enabled(&self, is_enabled: bool) {
        self.is_enabled.set(is_enabled);
        self.wake();
    }

    pub(crate) fn set_signals(&self, signals: Signals) {
        *self.signals.borrow_mut() = signals;
    }

    pub(crate) fn set_kick(&self, kick: Option<Rc<Kick>>) {
        let mut now = self.kick.borrow_mut();
        if !Kick::is_same(now.as_ref(), kick.as_ref()) {
            *now = kick;
            self.kicks.set(self.kicks.get() + 1);
            drop(now);
            self.wake();
        }
    }

    /// The ring lies in other memory now, or elsewhere in it. Requests that are out keep the memory that they began with.
    pub(crate) fn set_memory(&self, memory: &Arc<Memory>, shape: &Shape) {
        let moved = self.ring.borrow_mut().moved(memory, shape);
        *self.memory.borrow_mut() = Arc::clone(memory);
        match moved {
            Ok(()) => {
                self.wake();
            }
            Err(broken) => self.break_off(broken),
        }
    }
}

/// What the reactor looks at for a hot queue.
struct Watch<S>(Weak<Queue<S>>);

impl<S> Watched for Watch<S> {
    fn look(&self) -> bool {
        let Some(queue) = self.0.upgrade() else { return false };
        if queue.waiting.borrow().is_none() {
            return false;
        }
        if !queue.can_take() {
            let looks = queue.idle_looks.get() + 1;
            queue.idle_looks.set(looks);
            if looks < IDLE_LOOKS {
                return false;
            }
            queue.cool();
        }
        queue.can_take() && queue.wake()
    }

    fn sleeps(&self, sleeps: bool) {
        let Some(queue) = self.0.upgrade() else { return };
        if sleeps {
            queue.idle_sleeps.set(queue.idle_sleeps.get() + 1);
            queue.ring.borrow().want_kicks(true);
        } else if queue.idle_sleeps.get() >= IDLE_SLEEPS {
            queue.cool();
        } else {
            queue.ring.borrow().want_kicks(false);
        }
    }
}
