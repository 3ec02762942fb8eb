//! A volume that lives on another reactor of this process: what is asked of it goes there, and its answers come back.
//!
//! A volume, and all below it, belongs to one thread. Who serves clients on a thread of his own asks through this: the edges of his work (rings,
//! copies, checks) are done there, and the volume's here.
//!
//! What always holds:
//! - Data is not copied on the way: reads fill what the client lends ([`Lent`](levada_base::Lent)), and what is written goes over as it is, if
//!   [`Volume::buffer`] was asked for it.
//! - A request whose future is dropped may be carried out all the same, and what it needs is kept until then.
//! - Where the volume's reactor has dropped what serves it, nobody is answered any more, as after a crash: an error would be an answer, and who keeps
//!   his requests for the next server would not.

use crate::VolumeError;
use crate::volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use levada_base::lent::Lender;
use levada_base::reactor::{self, JoinHandle, mailbox};
use levada_base::sync::{Notify, oneshot};
use levada_base::{Buf, BufMut, Handed, IoVec, LentVec};
use levada_device::Durability;
use slab::Slab;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::future::{Future, pending};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is asked of a volume.
enum Asked {
    Read { at: u64, into: LentVec },
    Write { at: u64, from: SmallVec<[Handed; 4]>, durability: Durability },
    Flush,
    Discard { at: u64, bytes: u64 },
    WriteZeroes { at: u64, bytes: u64, zeroing: Zeroing },
    Extents { at: u64, bytes: u64 },
}

enum Message {
    /// Where answers go: the first one of all.
    From(mailbox::Sender<Vec<Answer>>),
    Ask(Vec<Call>),
}

/// The number of a call, and what it asks.
struct Call(usize, Asked);

type Told = Result<Vec<Extent>, VolumeError>;

/// Which call, and how it ended.
struct Answer(usize, Told);

/// What is to go to another reactor, all at once: handing over costs as much as a small read otherwise.
struct Outbox<T> {
    waiting: RefCell<Vec<T>>,
    has_some: Notify,
}

impl<T> Default for Outbox<T> {
    fn default() -> Self {
        Self { waiting: RefCell::default(), has_some: Notify::default() }
    }
}

impl<T: 'static> Outbox<T> {
    /// It goes when the task that calls has waited, or given way.
    fn put(&self, item: T) {
        let mut waiting = self.waiting.borrow_mut();
        waiting.push(item);
        if waiting.len() == 1 {
            self.has_some.notify_all();
        }
    }

    /// Sends what is put in, until this is dropped.
    fn sent_by(self: &Rc<Self>, send: impl Fn(Vec<T>) + 'static) -> Sending {
        let outbox = Rc::clone(self);
        Sending(reactor::spawn(async move {
            loop {
                let has_some = || (!outbox.waiting.borrow().is_empty()).then_some(());
                outbox.has_some.until(has_some).await;
                send(outbox.waiting.take());
            }
        }))
    }
}

/// A task that ends with this.
struct Sending(JoinHandle<()>);

impl Drop for Sending {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The size of a volume, for those who cannot ask it themselves. Whoever has the volume keeps it.
#[derive(Clone, Debug)]
pub struct KnownSize(Arc<AtomicU64>);

impl KnownSize {
    #[must_use]
    pub fn of(volume: &(impl Volume + ?Sized)) -> Self {
        Self(Arc::new(AtomicU64::new(volume.size_bytes())))
    }

    /// To be called when it has changed, before anybody is told.
    pub fn look_at(&self, volume: &(impl Volume + ?Sized)) {
        self.0.store(volume.size_bytes(), Ordering::Release);
    }
}

/// Takes a volume to another thread: [`FarVolume::new`].
pub struct Way {
    calls: mailbox::Sender<Message>,
    shape: Shape,
    size: KnownSize,
}

impl Way {
    /// The way to `volume`, and what serves it to who goes there, until he is gone: to be polled on this reactor.
    ///
    /// # Errors
    ///
    /// When the system gives no eventfd.
    pub fn to<V: Volume + ?Sized + 'static>(
        volume: Rc<V>,
        size: KnownSize,
    ) -> io::Result<(Self, impl Future<Output = ()>)> {
        let (calls, called) = mailbox::channel()?;
        let way = Self { calls, shape: volume.shape(), size: size.clone() };
        Ok((way, answer_calls(volume, size, called)))
    }
}

async fn answer_calls<V: Volume + ?Sized + 'static>(
    volume: Rc<V>,
    size: KnownSize,
    mut called: mailbox::Mailbox<Message>,
) {
    let Some(Message::From(answers)) = called.recv().await else { return };
    let serving = Rc::new(Serving { volume, size, answered: Outbox::default().into() });
    // Who asked may have gone.
    let _sending = serving.answered.sent_by(move |all| drop(answers.send(all)));
    while let Some(message) = called.recv().await {
        let Message::Ask(calls) = message else { continue };
        for Call(number, asked) in calls {
            let serving = Rc::clone(&serving);
            reactor::run_or_spawn(async move {
                let told = carry_out(&*serving.volume, asked).await;
                serving.size.look_at(&*serving.volume);
                serving.answered.put(Answer(number, told));
            });
        }
        // Answers go, and others have their turn.
        reactor::yield_now().await;
    }
}

/// A volume that is served to somebody afar.
struct Serving<V: ?Sized> {
    size: KnownSize,
    answered: Rc<Outbox<Answer>>,
    volume: Rc<V>,
}

async fn carry_out(volume: &(impl Volume + ?Sized), asked: Asked) -> Told {
    let done = |()| Vec::new();
    match asked {
        Asked::Read { at, into } => volume.read_into(at, into).await.map(done),
        Asked::Write { at, from, durability } => {
            let from = from.into_iter().map(Handed::into_buf).collect();
            volume.write(at, from, durability).await.map(done)
        }
        Asked::Flush => volume.flush().await.map(done),
        Asked::Discard { at, bytes } => volume.discard(at, bytes).await.map(done),
        Asked::WriteZeroes { at, bytes, zeroing } => {
            volume.write_zeroes(at, bytes, zeroing).await.map(done)
        }
        Asked::Extents { at, bytes } => volume.extents(at, bytes).await,
    }
}

/// A volume of another reactor.
pub struct FarVolume {
    calls: Rc<Outbox<Call>>,
    _sending: Sending,
    shape: Shape,
    size: KnownSize,
    waiting: Rc<Waiting>,
}

/// Those who wait for answers.
type Waiting = RefCell<Slab<oneshot::Sender<Told>>>;

impl FarVolume {
    /// The volume at the end of `way`, for this reactor, which has a mailbox already. Answers are taken by a task in the group of the caller's.
    ///
    /// # Panics
    ///
    /// When this reactor has no mailbox, and the system gives no eventfd for one.
    #[must_use]
    pub fn new(way: Way) -> Self {
        let Way { calls, shape, size } = way;
        let (answers, answered) = mailbox::channel().expect("a reactor with a mailbox has more");
        // Who does not take it has gone.
        let _ = calls.send(Message::From(answers));
        let waiting = Rc::<Waiting>::default();
        reactor::spawn(take_answers(Rc::clone(&waiting), answered));
        let outbox = Rc::<Outbox<Call>>::default();
        let sending = outbox.sent_by(move |all| drop(calls.send(Message::Ask(all))));
        Self { calls: outbox, _sending: sending, shape, size, waiting }
    }

    async fn ask(&self, asked: Asked) -> Told {
        let (tell, told) = oneshot::channel();
        let number = self.waiting.borrow_mut().insert(tell);
        self.calls.put(Call(number, asked));
        match told.await {
            Ok(told) => told,
            Err(oneshot::Dropped) => pending().await,
        }
    }
}

async fn take_answers(waiting: Rc<Waiting>, mut answered: mailbox::Mailbox<Vec<Answer>>) {
    while let Some(answers) = answered.recv().await {
        for Answer(number, told) in answers {
            // It is dropped when who asked does not wait any more.
            let tell = waiting.borrow_mut().remove(number);
            tell.send(told);
        }
        reactor::yield_now().await;
    }
}

impl Volume for FarVolume {
    fn size_bytes(&self) -> u64 {
        self.size.0.load(Ordering::Acquire)
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    fn buffer(&self, bytes: usize) -> BufMut {
        Handed::buffer(bytes)
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            let lender = Lender::new(bytes as usize);
            let into = LentVec::from_iter([lender.lend(0, bytes as usize)]);
            self.ask(Asked::Read { at, into }).await?;
            Ok(Buf::copy_of(&lender.bytes()).into_vec())
        })
    }

    fn read_into(&self, at: u64, into: LentVec) -> VolumeFuture<'_, ()> {
        Box::pin(async move { self.ask(Asked::Read { at, into }).await.map(drop) })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let from = from.iter().map(Handed::new).collect();
            self.ask(Asked::Write { at, from, durability }).await.map(drop)
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async move { self.ask(Asked::Flush).await.map(drop) })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move { self.ask(Asked::Discard { at, bytes }).await.map(drop) })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move { self.ask(Asked::WriteZeroes { at, bytes, zeroing }).await.map(drop) })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(self.ask(Asked::Extents { at, bytes }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::tests::volume;
    use crate::model;
    use levada_base::reactor::Reactor;
    use levada_raid::Level;
    use std::time::Duration;

    /// Runs `body` on another reactor, with the way to a volume of 6 MiB that is served here.
    fn from_afar<F: Future<Output = ()>>(body: impl FnOnce(Way) -> F + Send + 'static) {
        Reactor::new().expect("io_uring").block_on(async {
            let volume = Rc::new(volume(Level::Raid6, 5).await);
            let size = KnownSize::of(&*volume);
            let (way, serving) = Way::to(Rc::clone(&volume), size).expect("a mailbox");
            let serving = reactor::spawn(serving);
            let (end, mut ended) = mailbox::channel::<()>().expect("a mailbox");
            let far = reactor::beside("far", Duration::ZERO, move || async move {
                body(way).await;
                drop(end);
            });
            ended.recv().await;
            far.expect("a thread").join().expect("it ends well");
            // Whoever went that way has gone, and nothing holds the volume any more.
            serving.await.expect("it ends by itself");
            assert_eq!(Rc::strong_count(&volume), 1);
        });
    }

    #[test]
    fn any_request_does_what_it_would_to_bytes_in_memory() {
        from_afar(|way| async {
            let far = FarVolume::new(way);
            model::compare(&far, 400).await;
            far.flush().await.expect("flushed");
        });
    }

    #[test]
    fn what_is_outside_is_refused_as_it_is_there() {
        from_afar(|way| async {
            let far = FarVolume::new(way);
            let size_bytes = far.size_bytes();
            let past = far.read(size_bytes, 1).await.map(drop);
            assert_eq!(past, Err(VolumeError::OutOfRange { at: size_bytes, bytes: 1, size_bytes }));
            assert_eq!(far.shape().block_bytes, 4096);
        });
    }

    /// Memory of a request whose future is dropped is kept until the volume is done with it.
    #[test]
    fn requests_that_are_given_up_are_carried_out() {
        from_afar(|way| async {
            let far = FarVolume::new(way);
            for round in 1..50_u8 {
                let mut buffer = far.buffer(4096);
                buffer.fill(round);
                let mut write = far.write(0, buffer.freeze().into_vec(), Durability::Volatile);
                let _ = futures_util::poll!(&mut write);
                drop(write);
                let is_there = async {
                    while far.read(0, 4096).await.expect("read")[0][..] != [round; 4096] {
                        reactor::yield_now().await;
                    }
                };
                let within = Duration::from_secs(10);
                reactor::timeout(within, is_there).await.expect("it is written");
            }
        });
    }

    /// As after a crash: an error would be an answer.
    #[test]
    fn nobody_is_answered_once_nobody_serves() {
        Reactor::new().expect("io_uring").block_on(async {
            let volume = Rc::new(volume(Level::Raid6, 5).await);
            let (way, serving) =
                Way::to(Rc::clone(&volume), KnownSize::of(&*volume)).expect("a mailbox");
            // Both ends may be on one reactor, too.
            let serving = reactor::spawn(serving);
            let far = FarVolume::new(way);
            far.flush().await.expect("served");
            serving.abort();
            let asked = reactor::timeout(Duration::from_millis(50), far.flush()).await;
            assert!(asked.is_err(), "it waits");
        });
    }
}
