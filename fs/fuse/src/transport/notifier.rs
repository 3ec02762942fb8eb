//! Notifications to the kernel, written by threads of their own: the kernel lets the writer wait for pages that
//! are being read, and those are answered by the reactor.
//!
//! What always holds:
//! - One that waits holds up no other, up to [`THREADS_MAX`] of them: a thread is started when all others are busy.
//! - Who needs an order among notifications waits for one before he asks for the next.
//! - The threads, and with them their descriptor of the device, go with the [`Notifier`], once the notifications under
//!   way are done.

use super::dev_fuse::Channel;
use crate::codec::{
    invalidate_attributes, invalidate_entry, invalidate_inode, invalidate_range, store_last_byte,
};
use levada_base::reactor::{self, mailbox};
use levada_base::sync::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

/// As many may wait before others wait for them. What waits is a page of a target that does not answer.
const THREADS_MAX: usize = 16;

/// See the module.
pub struct Notifier {
    orders: mpsc::Sender<Order>,
    waiting: RefCell<BTreeMap<u64, oneshot::Sender<()>>>,
    last: Cell<u64>,
    threads: Cell<usize>,
    writer: Writer,
}

/// A notification to be written.
struct Order {
    number: u64,
    message: Vec<u8>,
}

impl Notifier {
    /// Starts the first thread.
    ///
    /// # Errors
    ///
    /// When the system gives no thread, or no descriptor.
    pub fn start(channel: &Channel) -> io::Result<Rc<Self>> {
        let device: Channel = channel.duplicate()?.into();
        let (orders, ordered) = mpsc::channel::<Order>();
        let (done, mut mailbox) = mailbox::channel()?;
        let ordered = Arc::new(Mutex::new(ordered));
        let writer = Writer { device: Arc::new(device), ordered, done };
        writer.clone().start()?;
        let waiting = RefCell::default();
        let (last, threads) = (Cell::new(0), Cell::new(1));
        let notifier = Rc::new(Self { orders, waiting, last, threads, writer });
        let told: Weak<Self> = Rc::downgrade(&notifier);
        reactor::spawn(async move {
            while let Some(number) = mailbox.recv().await {
                let Some(notifier) = told.upgrade() else { break };
                let waiting = notifier.waiting.borrow_mut().remove(&number);
                if let Some(waiting) = waiting {
                    waiting.send(());
                }
            }
        });
        Ok(notifier)
    }

    /// Drops the cached pages and attributes of an inode; done when this returns, also when the caller does not
    /// wait for it.
    pub async fn invalidate(&self, inode: u64) {
        self.write(invalidate_inode(inode).to_vec()).await;
    }

    /// As [`Notifier::invalidate`], of the pages of some bytes; 0: of all from `offset` on.
    pub async fn invalidate_range(&self, inode: u64, offset: u64, bytes: u64) {
        self.write(invalidate_range(inode, offset, bytes).to_vec()).await;
    }

    /// Drops the cached attributes of an inode.
    pub async fn invalidate_attributes(&self, inode: u64) {
        self.write(invalidate_attributes(inode).to_vec()).await;
    }

    /// Has a name looked up again. As it waits for calls that work in the directory, whoever calls this does not wait for
    /// it without bound.
    pub async fn invalidate_entry(&self, directory: u64, name: &[u8]) {
        self.write(invalidate_entry(directory, name)).await;
    }

    /// Lets the kernel know that a file has at least `size` bytes, the last of which is this one.
    pub async fn grown(&self, inode: u64, size: u64, last: u8) {
        self.write(store_last_byte(inode, size, last).to_vec()).await;
    }

    async fn write(&self, message: Vec<u8>) {
        let number = self.last.get() + 1;
        self.last.set(number);
        let (sender, done) = oneshot::channel();
        let under_way = {
            let mut waiting = self.waiting.borrow_mut();
            waiting.insert(number, sender);
            waiting.len()
        };
        self.staff(under_way);
        if self.orders.send(Order { number, message }).is_ok() {
            let _ = done.await;
        }
    }

    /// Sees to it that none of so many waits for another, as far as threads are to be had.
    fn staff(&self, under_way: usize) {
        let threads = self.threads.get();
        if under_way > threads && threads < THREADS_MAX {
            match self.writer.clone().start() {
                Ok(()) => self.threads.set(threads + 1),
                Err(error) => tracing::warn!(%error, "a notification waits for others"),
            }
        }
    }
}

/// What each thread has.
#[derive(Clone)]
struct Writer {
    device: Arc<Channel>,
    ordered: Arc<Mutex<mpsc::Receiver<Order>>>,
    done: mailbox::Sender<u64>,
}

impl Writer {
    fn start(self) -> io::Result<()> {
        thread::Builder::new().name("fuse-notify".into()).spawn(move || self.run()).map(drop)
    }

    fn run(self) {
        loop {
            // The others wait for the lock as they would for an order.
            let order = self.ordered.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(Order { number, message }) = order else { return };
            match self.device.send(&[IoSlice::new(&message)]) {
                Ok(_) => {}
                // It does not know the inode, or the name.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::warn!(%error, "the kernel refuses a notification"),
            }
            if self.done.send(number).is_err() {
                return;
            }
        }
    }
}
