//! Messages on their way: in their order, gathered, and held until they have left.

use levada_base::reactor::{self, Reactor};
use levada_base::stream::{ByteStream, MemoryStream, Outbox, Outgoing};
use levada_base::sync::Semaphore;
use levada_base::{Buf, BufMut, IoVec};
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::Duration;

/// A socket that keeps what is sent, send by send, and takes its time.
#[derive(Clone, Default)]
struct Slow {
    sent: Rc<RefCell<Vec<IoVec>>>,
    is_broken: Rc<Cell<bool>>,
}

impl ByteStream for Slow {
    async fn read(&self, into: BufMut) -> io::Result<(BufMut, usize)> {
        Ok((into, 0))
    }

    async fn read_exact(&self, _into: BufMut) -> io::Result<BufMut> {
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    async fn write_all(&self, from: IoVec) -> io::Result<()> {
        reactor::sleep(Duration::from_millis(1)).await;
        if self.is_broken.get() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.sent.borrow_mut().push(from);
        Ok(())
    }

    async fn close(&self) {}
}

fn sizes(slow: &Slow) -> Vec<usize> {
    slow.sent.borrow().iter().map(|parts| parts.iter().map(|part| part.len()).sum()).collect()
}

#[test]
fn messages_leave_in_their_order_as_many_at_once_as_are_ready() {
    Reactor::simulated(1).block_on(async {
        let (outbox, slow) = (Rc::new(Outbox::default()), Slow::default());
        let mut expected = Vec::new();
        for number in 0..100_u8 {
            let data: IoVec = match number % 3 {
                0 => IoVec::new(),
                1 => Buf::copy_of(&[number; 10]).into_vec(),
                _ => [Buf::copy_of(&[number]), Buf::copy_of(b""), Buf::copy_of(b"two")]
                    .into_iter()
                    .collect(),
            };
            let (head, tail) = ([b'h', number], [b't'; 3]);
            let tail = &tail[..usize::from(number % 4)];
            expected.extend_from_slice(&head);
            expected.extend(data.iter().flat_map(|part| part.iter().copied()));
            expected.extend_from_slice(tail);
            outbox.push(Outgoing { head: &head, data, tail, ..Outgoing::default() });
        }
        outbox.close();
        outbox.run(&slow).await.expect("sent");
        let sent = slow.sent.borrow();
        assert_eq!(sent.len(), 1, "all were ready");
        let bytes: Vec<u8> = sent[0].iter().flat_map(|part| part.iter().copied()).collect();
        assert!(bytes == expected);
    });
}

#[test]
fn a_batch_is_bounded_and_one_large_message_goes_alone() {
    Reactor::simulated(1).block_on(async {
        let (outbox, slow) = (Rc::new(Outbox::default()), Slow::default());
        let push = |bytes: usize| {
            let data = BufMut::zeroed(bytes).freeze().into_vec();
            outbox.push(Outgoing { head: &[0; 24], data, tail: &[0; 24], ..Outgoing::default() });
        };
        push(100 << 10);
        push(1 << 20);
        push(200 << 10);
        push(200 << 10);
        push(200 << 10);
        // More pieces than the system takes at once.
        let pieces: IoVec = (0..3000).map(|_| Buf::copy_of(&[1; 4])).collect();
        outbox.push(Outgoing { data: pieces, ..Outgoing::default() });
        for _ in 0..20 {
            let data = (0..100).map(|_| Buf::copy_of(&[1; 100])).collect();
            outbox.push(Outgoing { head: &[0; 24], data, tail: &[0; 24], ..Outgoing::default() });
        }
        outbox.close();
        outbox.run(&slow).await.expect("sent");
        let with_heads = |bytes: usize, messages: usize| bytes + messages * 48;
        let firsts = [
            with_heads(100 << 10, 1),
            with_heads(1 << 20, 1),
            with_heads(400 << 10, 2),
            with_heads(200 << 10, 1),
            12_000,
        ];
        assert_eq!(sizes(&slow)[..5], firsts);
        assert_eq!(sizes(&slow)[5..].iter().sum::<usize>(), with_heads(20 * 10_000, 20));
        let parts = slow.sent.borrow()[5..].iter().map(|parts| parts.len()).max();
        assert!(parts.is_some_and(|parts| parts <= 512), "{parts:?} buffers at once");
    });
}

#[test]
fn what_a_message_holds_is_free_once_it_has_left_or_the_other_side_is_gone() {
    Reactor::simulated(1).block_on(async {
        let (outbox, slow) = (Rc::new(Outbox::default()), Slow::default());
        let room = Semaphore::new(3);
        let push = || {
            let held = [room.try_acquire(1), None];
            assert!(held[0].is_some());
            outbox.push(Outgoing { head: b"x", held, ..Outgoing::default() });
        };
        let sender = {
            let (outbox, slow) = (Rc::clone(&outbox), slow.clone());
            reactor::spawn(async move { outbox.run(&slow).await })
        };
        push();
        reactor::sleep(Duration::from_micros(500)).await;
        assert_eq!(room.available(), 2, "it is on its way");
        reactor::sleep(Duration::from_micros(600)).await;
        assert_eq!(room.available(), 3);
        slow.is_broken.set(true);
        push();
        reactor::sleep(Duration::from_micros(500)).await;
        push();
        reactor::sleep(Duration::from_micros(600)).await;
        assert_eq!(room.available(), 3, "neither leaves any more");
        push();
        assert_eq!(room.available(), 3, "nobody waits for it");
        assert!(sender.await.expect("it ended").is_err());
    });
}

/// Small and large, in pieces and without data, and more than is sent at once.
#[test]
fn all_arrives_in_its_order_and_then_nothing_is_held() {
    Reactor::simulated(21).block_on(async {
        let random = |below: usize| reactor::random_u64() as usize % below;
        let bytes = |len: usize| -> Vec<u8> { (0..len).map(|_| random(256) as u8).collect() };
        let (ours, theirs) = MemoryStream::pair();
        let outbox = Rc::new(Outbox::default());
        let [slots, room] = [100_000, 1 << 40].map(Semaphore::new);
        let sender = reactor::spawn({
            let outbox = Rc::clone(&outbox);
            async move {
                outbox.run(&ours).await.expect("sent");
                ByteStream::close(&ours).await;
            }
        });
        let mut expected = Vec::new();
        for round in 0..2_000 {
            let (head, tail) = (bytes(1 + random(100)), bytes(random(30)));
            let longest = [1, 4096, 8 << 10, 40 << 10][random(4)];
            let parts: Vec<_> = (0..random(4)).map(|_| bytes(1 + random(longest))).collect();
            expected.extend(head.iter().chain(parts.iter().flatten()).chain(&tail));
            let data = parts.iter().map(|part| BufMut::copy_of(part).freeze()).collect();
            let held = [slots.try_acquire(1), room.try_acquire(random(5000) as u64)];
            outbox.push(Outgoing { head: &head, data, tail: &tail, held });
            if round % 100 == 0 {
                reactor::yield_now().await;
            }
        }
        // More heads at once than have room in one piece of memory.
        for _ in 0..500 {
            let head = bytes(1 + random(100));
            expected.extend(&head);
            outbox.push(Outgoing { head: &head, ..Outgoing::default() });
        }
        outbox.close();
        let mut arrived = Vec::new();
        while let (read, more @ 1..) =
            theirs.read(BufMut::for_overwrite(256 << 10)).await.expect("open")
        {
            arrived.extend_from_slice(&read[..more]);
        }
        assert!(arrived == expected, "{} of {} bytes", arrived.len(), expected.len());
        let _ = sender.await;
        assert_eq!((slots.available(), room.available()), (100_000, 1 << 40));
    });
}
