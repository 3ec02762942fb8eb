//! A reactor on a thread of its own, beside the one that starts it.
#![allow(unsafe_code)] // pthread_sigmask(3).

use super::Reactor;
use std::future::Future;
use std::io;
use std::mem::MaybeUninit;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Starts a thread that runs a reactor, which polls for `spin` before it sleeps, until what `body` gives has ended. Tasks that it spawned end with it. Signals from elsewhere are blocked there.
///
/// # Errors
///
/// When the system gives no thread or no io_uring.
pub fn beside<F: Future<Output = ()>>(
    name: &str,
    spin: Duration,
    body: impl FnOnce() -> F + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let (started, is_started) = mpsc::channel();
    let run = move || {
        let reactor = match Reactor::new() {
            Ok(reactor) => reactor,
            Err(error) => return drop(started.send(Err(error))),
        };
        reactor.set_spin(spin);
        drop(started.send(Ok(())));
        reactor.block_on(async move { body().await });
    };
    let named = std::thread::Builder::new().name(name.to_owned());
    let thread = without_signals(|| named.spawn(run))?;
    is_started.recv().map_err(|_| io::Error::other("a reactor has not started"))??;
    Ok(thread)
}

/// Has `start` start a thread in which signals from elsewhere are blocked: they are for who asks for them, maybe later, and one that reached such a thread would
/// end the process.
pub(super) fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the first call fills `all`, which the others change and read; the last one fills `before`.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        // What the thread itself does wrong, and who has lent it memory that is gone: blocked, these end the process without a word.
        for own in [libc::SIGBUS, libc::SIGSEGV, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(all.as_mut_ptr(), own);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let started = start();
    // SAFETY: filled by the call above, which cannot fail.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started
}
