//! Tasks and groups of tasks.
//!
//! A waker is a counted pointer to its task without atomics: it must not leave its thread,
//! which every wake checks.
#![allow(unsafe_code)] // A waker of one thread: `Rc` behind the `RawWaker` interface.

use super::Core;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::thread::ThreadId;

type BoxFuture = Pin<Box<dyn Future<Output = ()>>>;

thread_local! {
    static THREAD: ThreadId = std::thread::current().id();
}

/// One task: a future and whether it waits to run.
pub(super) struct Task {
    id: u64,
    core: Weak<Core>,
    thread: ThreadId,
    group: Weak<GroupState>,
    future: RefCell<Option<BoxFuture>>,
    queued: Cell<bool>,
}

impl Task {
    /// The task of `block_on`, whose future lives on the stack.
    pub(super) fn main(core: &Rc<Core>) -> Rc<Self> {
        Rc::new(Self {
            id: 0,
            core: Rc::downgrade(core),
            thread: THREAD.with(|id| *id),
            group: Weak::new(),
            future: RefCell::new(None),
            queued: Cell::new(false),
        })
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn begin(&self) {
        self.queued.set(false);
    }

    /// Polls the task once; a finished one leaves its group.
    pub(super) fn run(self: &Rc<Self>, core: &Core) {
        self.begin();
        // Taken out, so that a task which kills its own group can be dropped afterwards.
        let Some(mut future) = self.future.borrow_mut().take() else { return };
        let Some(group) = self.group.upgrade() else { return };
        let outer = core.group.replace(Group(Rc::clone(&group)));
        let waker = self.waker();
        let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
        if polled.is_pending() && !group.dead.get() {
            *self.future.borrow_mut() = Some(future);
        } else {
            group.tasks.borrow_mut().remove(&self.id);
            drop(future);
        }
        core.group.replace(outer);
    }

    pub(super) fn wake(self: &Rc<Self>) {
        assert_eq!(self.thread, THREAD.with(|id| *id), "a waker left its thread");
        if !self.queued.replace(true)
            && let Some(core) = self.core.upgrade()
        {
            core.ready.borrow_mut().push_back(Rc::clone(self));
        }
    }

    pub(super) fn waker(self: &Rc<Self>) -> Waker {
        let raw = RawWaker::new(Rc::into_raw(Rc::clone(self)).cast(), &VTABLE);
        // SAFETY: the functions of VTABLE keep the count of the `Rc` that `raw` stands for, and
        // `wake` refuses to run on another thread.
        unsafe { Waker::from_raw(raw) }
    }
}

static VTABLE: RawWakerVTable = RawWakerVTable::new(clone_raw, wake_raw, wake_by_ref_raw, drop_raw);

fn clone_raw(raw: *const ()) -> RawWaker {
    // SAFETY: `raw` came from `Rc::into_raw`, and its waker still holds the count.
    let task = ManuallyDrop::new(unsafe { Rc::from_raw(raw.cast::<Task>()) });
    RawWaker::new(Rc::into_raw(Rc::clone(&task)).cast(), &VTABLE)
}

fn wake_raw(raw: *const ()) {
    // SAFETY: `raw` came from `Rc::into_raw`; this consumes the waker and its count.
    unsafe { Rc::from_raw(raw.cast::<Task>()) }.wake();
}

fn wake_by_ref_raw(raw: *const ()) {
    // SAFETY: `raw` came from `Rc::into_raw`, and its waker still holds the count.
    ManuallyDrop::new(unsafe { Rc::from_raw(raw.cast::<Task>()) }).wake();
}

fn drop_raw(raw: *const ()) {
    // SAFETY: `raw` came from `Rc::into_raw`; this gives its count back.
    drop(unsafe { Rc::from_raw(raw.cast::<Task>()) });
}

#[derive(Default)]
struct GroupState {
    /// Ordered, so that killing drops tasks in the same order in every run of a seed.
    tasks: RefCell<BTreeMap<u64, Rc<Task>>>,
    children: RefCell<Vec<Weak<GroupState>>>,
    dead: Cell<bool>,
}

/// Tasks that live and die together: a node of the simulator, a mount, a server.
#[derive(Clone, Default)]
pub struct Group(Rc<GroupState>);

impl Group {
    /// A group that lives by itself.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A group that is killed with this one.
    #[must_use]
    pub fn child(&self) -> Self {
        let child = Self::new();
        let mut children = self.0.children.borrow_mut();
        children.retain(|child| child.strong_count() > 0);
        children.push(Rc::downgrade(&child.0));
        child
    }

    /// Drops every task of the group and of its children where it stands. The task that
    /// calls, if it is one of them, is dropped at its next wait. New tasks are refused.
    pub fn kill(&self) {
        self.0.dead.set(true);
        for child in self.0.children.take() {
            if let Some(child) = child.upgrade() {
                Self(child).kill();
            }
        }
        let tasks = std::mem::take(&mut *self.0.tasks.borrow_mut());
        for task in tasks.into_values() {
            let future = task.future.borrow_mut().take();
            drop(future);
        }
    }

    /// True once killed.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.0.dead.get()
    }
}

struct Joint<T> {
    result: RefCell<Option<T>>,
    finished: Cell<bool>,
    waiting: RefCell<Option<Waker>>,
}

/// Marks the task finished even when it is dropped before its end.
struct Finish<T>(Rc<Joint<T>>);

impl<T> Drop for Finish<T> {
    fn drop(&mut self) {
        self.0.finished.set(true);
        let waiting = self.0.waiting.borrow_mut().take();
        if let Some(waker) = waiting {
            waker.wake();
        }
    }
}

/// Awaits the end of a task: its output, or `None` when it was killed. Dropping the handle
/// lets the task go on.
pub struct JoinHandle<T> {
    joint: Rc<Joint<T>>,
    task: Weak<Task>,
}

impl<T> JoinHandle<T> {
    /// Drops the task where it stands.
    pub fn abort(&self) {
        if let Some(task) = self.task.upgrade() {
            if let Some(group) = task.group.upgrade() {
                group.tasks.borrow_mut().remove(&task.id);
            }
            let future = task.future.borrow_mut().take();
            drop(future);
        }
    }

    /// True once the task has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.joint.finished.get()
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Option<T>;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        if self.joint.finished.get() {
            return Poll::Ready(self.joint.result.borrow_mut().take());
        }
        *self.joint.waiting.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }
}

pub(super) fn spawn<F>(core: &Rc<Core>, group: &Group, future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let joint = Rc::new(Joint {
        result: RefCell::new(None),
        finished: Cell::new(false),
        waiting: RefCell::new(None),
    });
    let finish = Finish(Rc::clone(&joint));
    let body = async move {
        let output = future.await;
        *finish.0.result.borrow_mut() = Some(output);
    };
    let task = start(core, group, Box::pin(body));
    JoinHandle { joint, task }
}

/// Has a task carry out `future`, unless the group is dead.
fn start(core: &Rc<Core>, group: &Group, future: BoxFuture) -> Weak<Task> {
    let id = core.tasks_spawned.get() + 1;
    core.tasks_spawned.set(id);
    if group.is_dead() {
        drop(future);
        return Weak::new();
    }
    let task = Rc::new(Task {
        id,
        core: Rc::downgrade(core),
        thread: THREAD.with(|id| *id),
        group: Rc::downgrade(&group.0),
        future: RefCell::new(Some(future)),
        queued: Cell::new(false),
    });
    group.0.tasks.borrow_mut().insert(id, Rc::clone(&task));
    task.wake();
    Rc::downgrade(&task)
}

pub(super) fn run_or_spawn(core: &Rc<Core>, future: impl Future<Output = ()> + 'static) {
    let group = core.group.borrow().clone();
    if group.is_dead() {
        return;
    }
    let mut future = Box::pin(future);
    // Whoever wakes it before its task has polled it wakes nobody, and need not: that poll looks anew.
    if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        start(core, &group, future);
    }
}
