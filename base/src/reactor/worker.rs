//! Worker threads: a place for library code that blocks, such as a key-value engine.
//!
//! A worker and its reactor take turns, like two coroutines: the worker sends a message up and
//! blocks until one comes down. So a blocking call of the library becomes a message to the
//! reactor, which does the I/O and answers. On a machine both run side by side between
//! messages; in the simulator the reactor's thread waits while the worker runs (a baton: one
//! runnable thread in the world), so a seed fixes their order too.
//!
//! After a crash (the handle is dropped) the worker's next message is refused, its library sees
//! an I/O error, and the thread ends.

use super::bell;
use super::is_simulated;
use std::cell::RefCell;
use std::sync::mpsc;
use std::thread;

/// The worker's side.
pub struct Port<Up, Down> {
    /// `None` only while it is dropped.
    up: Option<mpsc::Sender<Up>>,
    down: RefCell<mpsc::Receiver<Down>>,
    /// `None` in the simulator, where the reactor's thread waits for this one.
    bell: Option<bell::Bell>,
}

/// The reactor's side is gone: the worker must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reactor no longer answers this worker")]
pub struct Closed;

impl<Up, Down> Port<Up, Down> {
    /// Sends `message` up and blocks until the answer comes down.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the reactor's side is gone.
    pub fn call(&self, message: Up) -> Result<Down, Closed> {
        self.up.as_ref().ok_or(Closed)?.send(message).map_err(|_| Closed)?;
        if let Some(bell) = &self.bell {
            bell.ring();
        }
        self.down.borrow_mut().recv().map_err(|_| Closed)
    }
}

impl<Up, Down> Drop for Port<Up, Down> {
    fn drop(&mut self) {
        // First the sender, then the bell: the reactor must see that the worker has ended.
        self.up = None;
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }
}

/// The reactor's side. Messages alternate strictly: [`Worker::next`], then [`Worker::answer`].
pub struct Worker<Up, Down> {
    up: mpsc::Receiver<Up>,
    down: Option<mpsc::Sender<Down>>,
    listener: Option<bell::Listener>,
    thread: Option<thread::JoinHandle<()>>,
}

impl<Up: Send + 'static, Down: Send + 'static> Worker<Up, Down> {
    /// Starts a thread that runs `body`.
    ///
    /// # Panics
    ///
    /// When the system gives no thread or no eventfd.
    pub fn start(name: &str, body: impl FnOnce(Port<Up, Down>) + Send + 'static) -> Self {
        let (up_sender, up) = mpsc::channel();
        let (down, down_receiver) = mpsc::channel();
        let (bell, listener) = if is_simulated() {
            (None, None)
        } else {
            let (bell, listener) = bell::new().expect("the system gives an eventfd");
            (Some(bell), Some(listener))
        };
        let port = Port { up: Some(up_sender), down: RefCell::new(down_receiver), bell };
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(port))
            .expect("the system gives a thread");
        Self { up, down: Some(down), listener, thread: Some(thread) }
    }

    /// The worker's next message; `None` when it has ended.
    pub async fn next(&mut self) -> Option<Up> {
        let Some(listener) = &self.listener else { return self.up.recv().ok() };
        listener
            .until(|| match self.up.try_recv() {
                Ok(message) => Some(Some(message)),
                Err(mpsc::TryRecvError::Disconnected) => Some(None),
                Err(mpsc::TryRecvError::Empty) => None,
            })
            .await
    }

    /// Answers the message that [`Worker::next`] returned last.
    pub fn answer(&self, message: Down) {
        if let Some(down) = &self.down {
            // A worker that has ended needs no answer.
            let _ = down.send(message);
        }
    }
}

impl<Up, Down> Drop for Worker<Up, Down> {
    fn drop(&mut self) {
        self.down = None;
        // Its next call fails, so it ends soon; waiting keeps the simulator to one thread.
        if let Some(thread) = self.thread.take() {
            let (_, unheard) = mpsc::channel();
            self.up = unheard;
            let _ = thread.join();
        }
    }
}
