//! The driver of libblkio (crate `virtio-driver`): a client that nobody here wrote.

mod common;

use common::front_end::Shared;
use common::{Served, volume};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
    VirtioTransport,
};

const BLOCK: usize = 4096;
const DEPTH: usize = 32;

type Transport = VhostUser<virtio_driver::VirtioBlkConfig, virtio_driver::VirtioBlkReqBuf>;

fn connect(served: &Served, features: VirtioFeatureFlags) -> Box<Transport> {
    let wanted = features.bits() | VirtioBlkFeatureFlags::all().bits();
    let path = served.socket.to_str().expect("a plain path");
    Box::new(Transport::new(path, wanted).expect("it connects"))
}

/// Waits for so many answers; the contexts and results, in order of arrival.
fn answers(
    transport: &VirtioBlkTransport,
    queue: &mut VirtioBlkQueue<'_, usize>,
    number: usize,
    count: usize,
) -> Vec<(usize, i32)> {
    transport.get_submission_notifier(number).notify().expect("a kick");
    let mut all = Vec::new();
    let begun = Instant::now();
    while all.len() < count {
        all.extend(queue.completions().map(|done| (done.context, done.ret)));
        assert!(begun.elapsed() < Duration::from_secs(20), "{} of {count}", all.len());
        std::thread::yield_now();
    }
    all
}

fn exercise(features: VirtioFeatureFlags, queues_count: usize) {
    let served = Served::begin(volume);
    let mut transport = connect(&served, features | VirtioFeatureFlags::VERSION_1);
    let config = transport.get_config().expect("a configuration");
    assert_eq!(u16::from(config.num_queues), 16);
    let capacity = u64::from(config.capacity) * 512;
    assert!(capacity > 100 << 20, "{capacity}");
    let mut queues =
        VirtioBlkQueue::<usize>::setup_queues(&mut *transport, queues_count, 128).expect("queues");
    let memory = Shared::new(2 * DEPTH * BLOCK);
    transport
        .map_mem_region(memory.address(), 2 * DEPTH * BLOCK, memory.file.as_raw_fd(), 0)
        .expect("mapped");
    for (number, queue) in queues.iter_mut().enumerate() {
        let base = (number * 16) << 20;
        for round in 0..20 {
            for slot in 0..DEPTH {
                let data = memory.slice(slot * BLOCK, BLOCK);
                data.fill((number * 50 + round + slot) as u8);
                let at = base + (round * DEPTH + slot) * BLOCK;
                queue.write(at as u64, data, slot).expect("room in the ring");
            }
            let mut all = answers(&*transport, queue, number, DEPTH);
            all.sort_unstable();
            assert_eq!(all, (0..DEPTH).map(|slot| (slot, 0)).collect::<Vec<_>>());
        }
        queue.flush(7).expect("room");
        assert_eq!(answers(&*transport, queue, number, 1), [(7, 0)]);
        for round in 0..20 {
            for slot in 0..DEPTH {
                let at = base + (round * DEPTH + slot) * BLOCK;
                let into = memory.slice((DEPTH + slot) * BLOCK, BLOCK);
                queue.read(at as u64, into, slot).expect("room in the ring");
            }
            answers(&*transport, queue, number, DEPTH);
            for slot in 0..DEPTH {
                let read = memory.slice((DEPTH + slot) * BLOCK, BLOCK);
                let expected = (number * 50 + round + slot) as u8;
                assert!(read.iter().all(|byte| *byte == expected), "queue {number} round {round}");
            }
        }
        // What is past the end fails, and zeroes and discards are carried out.
        queue.read(capacity, memory.slice(0, BLOCK), 1).expect("room");
        assert_eq!(answers(&*transport, queue, number, 1), [(1, -libc::EIO)]);
        queue.write_zeroes(base as u64, 1 << 20, true, 2).expect("room");
        assert_eq!(answers(&*transport, queue, number, 1), [(2, 0)]);
        queue.discard(base as u64 + (1 << 20), 1 << 20, 3).expect("room");
        assert_eq!(answers(&*transport, queue, number, 1), [(3, 0)]);
        memory.slice(0, BLOCK).fill(1);
        queue.read(base as u64, memory.slice(0, BLOCK), 4).expect("room");
        assert_eq!(answers(&*transport, queue, number, 1), [(4, 0)]);
        assert!(memory.slice(0, BLOCK).iter().all(|byte| *byte == 0));
    }
    drop(queues);
    drop(transport);
    served.end();
}

#[test]
fn split_rings() {
    exercise(VirtioFeatureFlags::empty(), 1);
}

#[test]
fn split_rings_with_event_index_and_indirect_descriptors() {
    exercise(VirtioFeatureFlags::RING_EVENT_IDX | VirtioFeatureFlags::RING_INDIRECT_DESC, 3);
}

#[test]
fn packed_rings() {
    exercise(VirtioFeatureFlags::RING_PACKED, 2);
}

elsewhere!(split_rings, split_rings_with_event_index_and_indirect_descriptors, packed_rings);
