//! Notifications to the kernel, written by a thread of their own: the kernel lets the writer wait for pages that
//! are being read, and those are answered by the reactor.
//!
//! What always holds: the thread, and with it its descriptor of the device, goes with the [`Notifier`],
//! once the notification under way is done.

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
use std::sync::mpsc;
use std::thread;

/// See the module.
pub struct Notifier {
    orders: mpsc::Sender<Order>,
    waiting: RefCell<BTreeMap<u64, oneshot::Sender<()>>>,
    last: Cell<u64>,
}

/// A notification to be written.
struct Order {
    number: u64,
    message: Vec<u8>,
}

impl Notifier {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// When the system gives no thread, or no descriptor.
    pub fn start(channel: &Channel) -> io::Result<Rc<Self>> {
        let device: Channel = channel.duplicate()?.into();
        let (orders, ordered) = mpsc::channel::<Order>();
        let (done, mut mailbox) = mailbox::channel()?;
        thread::Builder::new().name("fuse-notify".into()).spawn(move || {
            for Order { number, message } in ordered {
                match device.send(&[IoSlice::new(&message)]) {
                    Ok(_) => {}
                    // It does not know the inode, or the name.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => tracing::warn!(%error, "the kernel refuses a notification"),
                }
                if done.send(number).is_err() {
                    break;
                }
            }
        })?;
        let waiting = RefCell::default();
        let notifier = Rc::new(Self { orders, waiting, last: Cell::new(0) });
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
        self.waiting.borrow_mut().insert(number, sender);
        if self.orders.send(Order { number, message }).is_ok() {
            let _ = done.await;
        }
    }
}
