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

use super::is_simulated;
use std::cell::RefCell;
use std::sync::mpsc;
use std::thread;

/// The worker's side.
pub struct Port<Up, Down> {
    up: mpsc::Sender<Up>,
    down: RefCell<mpsc::Receiver<Down>>,
    bell: Bell,
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
        self.up.send(message).map_err(|_| Closed)?;
        self.bell.ring();
        self.down.borrow_mut().recv().map_err(|_| Closed)
    }
}

/// The reactor's side. Messages alternate strictly: [`Worker::next`], then [`Worker::answer`].
pub struct Worker<Up, Down> {
    up: mpsc::Receiver<Up>,
    down: Option<mpsc::Sender<Down>>,
    bell: Bell,
    thread: Option<thread::JoinHandle<()>>,
}

impl<Up: Send + 'static, Down: Send + 'static> Worker<Up, Down> {
    /// Starts a thread that runs `body`.
    ///
    /// # Panics
    ///
    /// When the system gives no thread.
    pub fn start(name: &str, body: impl FnOnce(Port<Up, Down>) + Send + 'static) -> Self {
        let (up_sender, up) = mpsc::channel();
        let (down, down_receiver) = mpsc::channel();
        let bell = Bell::new();
        let port = Port { up: up_sender, down: RefCell::new(down_receiver), bell: bell.clone() };
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || body(port))
            .expect("the system gives a thread");
        Self { up, down: Some(down), bell, thread: Some(thread) }
    }

    /// The worker's next message; `None` when it has ended.
    pub async fn next(&mut self) -> Option<Up> {
        if is_simulated() {
            return self.up.recv().ok();
        }
        loop {
            match self.up.try_recv() {
                Ok(message) => return Some(message),
                Err(mpsc::TryRecvError::Disconnected) => return None,
                Err(mpsc::TryRecvError::Empty) => self.bell.heard().await,
            }
        }
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

/// Wakes a reactor from another thread.
#[derive(Clone)]
struct Bell;

impl Bell {
    fn new() -> Self {
        Self
    }

    fn ring(&self) {}

    /// Completes when the bell was rung. Only a reactor on a machine waits for one.
    async fn heard(&self) {
        unreachable!("the simulator waits for its workers itself")
    }
}
