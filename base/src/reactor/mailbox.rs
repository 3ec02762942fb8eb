//! Messages from other threads, and so from other reactors, to this one.
//!
//! Sending never blocks and takes no lock; it makes a system call only when the receiver
//! sleeps. Nothing bounds what is queued: senders do. Only on a machine: the simulator has one
//! thread.

use super::bell::{self, Bell, Listener};
use std::io;
use std::sync::mpsc;

/// The sending side; used from any thread.
pub struct Sender<T> {
    /// `None` only while it is dropped.
    messages: Option<mpsc::Sender<T>>,
    bell: Bell,
}

/// The receiving side, on one reactor.
pub struct Mailbox<T> {
    messages: mpsc::Receiver<T>,
    listener: Listener,
}

/// Makes both sides; messages go to this thread's reactor.
///
/// # Errors
///
/// When the system gives no eventfd, of which a reactor needs one for all its mailboxes.
pub fn channel<T: Send>() -> io::Result<(Sender<T>, Mailbox<T>)> {
    let (sender, receiver) = mpsc::channel();
    let (bell, listener) = bell::new()?;
    Ok((Sender { messages: Some(sender), bell }, Mailbox { messages: receiver, listener }))
}

impl<T: Send> Sender<T> {
    /// Queues a message.
    ///
    /// # Errors
    ///
    /// The message, when the mailbox is gone.
    pub fn send(&self, message: T) -> Result<(), T> {
        let messages = self.messages.as_ref().expect("not dropped yet");
        messages.send(message).map_err(|refused| refused.0)?;
        self.bell.ring();
        Ok(())
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self { messages: self.messages.clone(), bell: self.bell.clone() }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        // First the sender, then the bell: the receiver must see that it was the last.
        self.messages = None;
        self.bell.ring();
    }
}

impl<T> Mailbox<T> {
    /// The next message, in the order of each sender; `None` once every sender is gone.
    pub async fn recv(&mut self) -> Option<T> {
        self.listener
            .until(|| match self.messages.try_recv() {
                Ok(message) => Some(Some(message)),
                Err(mpsc::TryRecvError::Disconnected) => Some(None),
                Err(mpsc::TryRecvError::Empty) => None,
            })
            .await
    }

    /// The next message if there is one now.
    pub fn try_recv(&mut self) -> Option<T> {
        self.messages.try_recv().ok()
    }
}
