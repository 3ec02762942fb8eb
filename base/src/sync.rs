//! Ways for the tasks of one thread to wait for each other. None of them locks.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// A value that one task sends and another awaits, once.
pub mod oneshot {
    use super::{Cell, Context, Future, Pin, Poll, Rc, RefCell, Waker};

    struct State<T> {
        value: RefCell<Option<T>>,
        waker: RefCell<Option<Waker>>,
        sender_gone: Cell<bool>,
    }

    /// The sending half.
    pub struct Sender<T>(Rc<State<T>>);
    /// The receiving half: a future of the value, or of [`Dropped`].
    pub struct Receiver<T>(Rc<State<T>>);
    /// The sender went away without sending.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
    #[error("the sender was dropped")]
    pub struct Dropped;

    /// Makes both halves.
    #[must_use]
    pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
        let state = Rc::new(State {
            value: RefCell::new(None),
            waker: RefCell::new(None),
            sender_gone: Cell::new(false),
        });
        (Sender(Rc::clone(&state)), Receiver(state))
    }

    impl<T> Sender<T> {
        /// Hands over the value. It is dropped when nobody waits any more.
        pub fn send(self, value: T) {
            *self.0.value.borrow_mut() = Some(value);
        }

        /// False: whoever was to get the value is gone.
        #[must_use]
        pub fn is_awaited(&self) -> bool {
            Rc::strong_count(&self.0) > 1
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            self.0.sender_gone.set(true);
            let waker = self.0.waker.borrow_mut().take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    impl<T> Future for Receiver<T> {
        type Output = Result<T, Dropped>;
        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
            if let Some(value) = self.0.value.borrow_mut().take() {
                return Poll::Ready(Ok(value));
            }
            if self.0.sender_gone.get() {
                return Poll::Ready(Err(Dropped));
            }
            *self.0.waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        }
    }
}

/// A list of tasks that wait for something, woken in order of arrival.
#[derive(Default)]
struct WaitList {
    next_key: Cell<u64>,
    waiting: RefCell<VecDeque<(u64, Waker)>>,
}

impl WaitList {
    fn wait(&self, key: &mut Option<u64>, waker: &Waker) {
        let mut waiting = self.waiting.borrow_mut();
        if let Some(held) = *key
            && let Some(slot) = waiting.iter_mut().find(|(at, _)| *at == held)
        {
            slot.1.clone_from(waker);
            return;
        }
        let fresh = self.next_key.get();
        self.next_key.set(fresh + 1);
        waiting.push_back((fresh, waker.clone()));
        *key = Some(fresh);
    }

    /// Forgets a waiter. False when it had been woken already.
    fn forget(&self, key: Option<u64>) -> bool {
        let Some(key) = key else { return true };
        let mut waiting = self.waiting.borrow_mut();
        let Some(at) = waiting.iter().position(|(held, _)| *held == key) else { return false };
        waiting.remove(at);
        true
    }

    fn wake_first(&self) {
        let first = self.waiting.borrow_mut().pop_front();
        if let Some((_, waker)) = first {
            waker.wake();
        }
    }

    fn wake_all(&self) {
        let all = std::mem::take(&mut *self.waiting.borrow_mut());
        for (_, waker) in all {
            waker.wake();
        }
    }
}

/// Wakes every task that waits, whenever something they might wait for has changed.
#[derive(Default)]
pub struct Notify {
    list: WaitList,
    changes: Cell<u64>,
}

impl Notify {
    /// Says that something changed.
    pub fn notify_all(&self) {
        self.changes.set(self.changes.get() + 1);
        self.list.wake_all();
    }

    /// Completes at the first change after this call (not after the first poll).
    pub fn changed(&self) -> impl Future<Output = ()> + '_ {
        let seen = self.changes.get();
        let mut guard = Waiting { list: &self.list, key: None };
        poll_fn(move |cx| {
            if self.changes.get() != seen {
                return Poll::Ready(());
            }
            guard.list.wait(&mut guard.key, cx.waker());
            Poll::Pending
        })
    }

    /// Waits until `ready` gives a value; asks again at every change.
    pub async fn until<T>(&self, mut ready: impl FnMut() -> Option<T>) -> T {
        loop {
            let changed = self.changed();
            if let Some(value) = ready() {
                return value;
            }
            changed.await;
        }
    }
}

struct Waiting<'a> {
    list: &'a WaitList,
    key: Option<u64>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.list.forget(self.key);
    }
}

/// Something that happens once, as an order to stop.
#[derive(Default)]
pub struct Once {
    has_happened: Cell<bool>,
    changed: Notify,
}

impl Once {
    /// It happens. Another time changes nothing.
    pub fn happen(&self) {
        if !self.has_happened.replace(true) {
            self.changed.notify_all();
        }
    }

    #[must_use]
    pub fn has_happened(&self) -> bool {
        self.has_happened.get()
    }

    /// Returns once it has happened.
    pub async fn happened(&self) {
        self.changed.until(|| self.has_happened().then_some(())).await;
    }
}

/// A counted permit: bounds bytes or operations in flight. Served in order of arrival, so a
/// large request is not starved by small ones.
pub struct Semaphore {
    free: Cell<u64>,
    list: WaitList,
    /// Waiters ahead of everybody who has not queued yet.
    queued: Cell<u64>,
}

/// Permits held; given back when dropped.
pub struct Permit {
    of: Rc<Semaphore>,
    count: u64,
}

impl Semaphore {
    /// A semaphore with `count` permits.
    #[must_use]
    pub fn new(count: u64) -> Rc<Self> {
        Rc::new(Self { free: Cell::new(count), list: WaitList::default(), queued: Cell::new(0) })
    }

    /// Permits that nobody holds.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.free.get()
    }

    /// Takes `count` permits at once, if free and nobody waits.
    #[must_use]
    #[inline]
    pub fn try_acquire(self: &Rc<Self>, count: u64) -> Option<Permit> {
        if self.queued.get() > 0 || self.free.get() < count {
            return None;
        }
        self.free.set(self.free.get() - count);
        Some(Permit { of: Rc::clone(self), count })
    }

    /// Takes `count` permits, waiting in line for them.
    pub async fn acquire(self: &Rc<Self>, count: u64) -> Permit {
        if let Some(permit) = self.try_acquire(count) {
            return permit;
        }
        self.queued.set(self.queued.get() + 1);
        let mut turn = Turn { of: self, key: None };
        poll_fn(|cx| {
            let first = {
                let waiting = self.list.waiting.borrow();
                match (turn.key, waiting.front()) {
                    (Some(key), Some((front, _))) => key == *front,
                    (None, front) => front.is_none(),
                    (Some(_), None) => true,
                }
            };
            if first && self.free.get() >= count {
                self.free.set(self.free.get() - count);
                return Poll::Ready(());
            }
            self.list.wait(&mut turn.key, cx.waker());
            Poll::Pending
        })
        .await;
        drop(turn);
        Permit { of: Rc::clone(self), count }
    }

    /// Adds `count` permits.
    #[inline]
    pub fn grow(&self, count: u64) {
        self.free.set(self.free.get() + count);
        self.wake_front();
    }

    fn wake_front(&self) {
        if self.queued.get() == 0 {
            return;
        }
        let front = self.list.waiting.borrow().front().map(|(_, waker)| waker.clone());
        if let Some(waker) = front {
            waker.wake();
        }
    }
}

/// A place in the semaphore's line; leaving it lets the next one look.
struct Turn<'a> {
    of: &'a Semaphore,
    key: Option<u64>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.of.list.forget(self.key);
        self.of.queued.set(self.of.queued.get() - 1);
        self.of.wake_front();
    }
}

impl Permit {
    /// Takes those of `other` as well, unless they are of another semaphore.
    ///
    /// # Errors
    ///
    /// `other`.
    #[inline]
    pub fn absorb(&mut self, mut other: Self) -> Result<(), Self> {
        if !Rc::ptr_eq(&self.of, &other.of) {
            return Err(other);
        }
        self.count += std::mem::take(&mut other.count);
        Ok(())
    }

    /// There are fewer of them from now on.
    pub fn forget(mut self) {
        self.count = 0;
    }
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        if self.count > 0 {
            self.of.grow(self.count);
        }
    }
}

/// A queue between tasks of one thread, without a bound: its users bound what they put in.
pub mod queue {
    use super::{Cell, Poll, Rc, RefCell, VecDeque, WaitList, poll_fn};

    struct State<T> {
        items: RefCell<VecDeque<T>>,
        readers: WaitList,
        senders: Cell<usize>,
        receiver_gone: Cell<bool>,
    }

    /// Puts items in; may be cloned.
    pub struct Sender<T>(Rc<State<T>>);
    /// Takes items out, in order.
    pub struct Receiver<T>(Rc<State<T>>);

    /// Makes a queue.
    #[must_use]
    pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
        let state = Rc::new(State {
            items: RefCell::default(),
            readers: WaitList::default(),
            senders: Cell::new(1),
            receiver_gone: Cell::new(false),
        });
        (Sender(Rc::clone(&state)), Receiver(state))
    }

    impl<T> Sender<T> {
        /// Puts an item in.
        ///
        /// # Errors
        ///
        /// The item, when the receiver is gone.
        pub fn send(&self, item: T) -> Result<(), T> {
            if self.0.receiver_gone.get() {
                return Err(item);
            }
            self.0.items.borrow_mut().push_back(item);
            self.0.readers.wake_first();
            Ok(())
        }
    }

    impl<T> Clone for Sender<T> {
        fn clone(&self) -> Self {
            self.0.senders.set(self.0.senders.get() + 1);
            Self(Rc::clone(&self.0))
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            self.0.senders.set(self.0.senders.get() - 1);
            if self.0.senders.get() == 0 {
                self.0.readers.wake_all();
            }
        }
    }

    impl<T> Receiver<T> {
        /// The next item; `None` once it is empty and every sender is gone.
        pub async fn recv(&mut self) -> Option<T> {
            let mut key = None;
            poll_fn(|cx| {
                if let Some(item) = self.0.items.borrow_mut().pop_front() {
                    return Poll::Ready(Some(item));
                }
                if self.0.senders.get() == 0 {
                    return Poll::Ready(None);
                }
                self.0.readers.wait(&mut key, cx.waker());
                Poll::Pending
            })
            .await
        }

        /// The next item if there is one now.
        pub fn try_recv(&mut self) -> Option<T> {
            self.0.items.borrow_mut().pop_front()
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            self.0.receiver_gone.set(true);
            let items = std::mem::take(&mut *self.0.items.borrow_mut());
            drop(items);
        }
    }
}
