//! The object log by itself: what shared files, small writes, age and a restart cost it.
//!
//! Spans last [`crate::harness::Effort::span`] and end with a COMMIT inside them. Where a span writes more than fits memory, the
//! members drop the data behind the slices of the key-value store ([`crate::members::Storage::KeepsFirst`]); nothing looks at it there.

mod aged;
mod picks;
mod reopen;
mod shared_file;
mod small;
mod target;

use crate::array::run;
use crate::figure::Bar;
use crate::suite::Spec;
use levada_base::units::KIB;
use picks::Choice;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "object.hard_write_of_easy_write",
            what: "16 writers, interleaved 47,008-byte records of one file, against 1 MiB in a file each",
            bar: Bar::AtLeast(0.5),
            take: |effort| run(shared_file::hard_write(effort)),
        },
        Spec {
            name: "object.hard_write_durable_of_easy_write",
            what: "the same with every record durable; the easy side as above",
            bar: Bar::AtLeast(0.2),
            take: |effort| run(shared_file::hard_write_durable(effort)),
        },
        Spec {
            name: "object.hard_read_of_easy_read",
            what: "what the hard write left, read by the next rank, caches cold, against what the easy one left",
            bar: Bar::AtLeast(0.5),
            take: |effort| run(shared_file::hard_read(effort)),
        },
        Spec {
            name: "object.seqwrite_of_array",
            what: "1 MiB writes, 16 in flight, against fresh stripes of the array",
            bar: Bar::AtLeast(0.95),
            take: |effort| run(shared_file::seqwrite(effort)),
        },
        Spec {
            name: "object.seqread_of_array",
            what: "1 MiB reads, 16 in flight, against the array",
            bar: Bar::AtLeast(0.97),
            take: |effort| run(shared_file::seqread(effort)),
        },
        Spec {
            name: "object.randwrite4k_of_array",
            what: "4 KiB writes anywhere, 128 in flight, COMMIT every 1,000, against overwrites of the array",
            bar: Bar::AtLeast(2.0),
            take: |effort| run(small::randwrite(effort)),
        },
        Spec {
            name: "object.sync4k_latency_of_raw",
            what: "p50 of a lone durable 4 KiB write, against three raw copies and a flush",
            bar: Bar::AtMost(1.5),
            take: |effort| run(small::sync_latency(effort)),
        },
        Spec {
            name: "object.null.read4k_iops_per_core",
            what: "4 KiB reads anywhere in an object whose members answer at once",
            bar: Bar::AtLeast(500.0),
            take: |effort| run(small::read4k(effort)),
        },
        Spec {
            name: "object.ram.checksum_cost",
            what: "share of the rate of 1 MiB writes and reads that checksums cost",
            bar: Bar::AtMost(0.08),
            take: |effort| run(small::checksum_cost(effort)),
        },
        Spec {
            name: "object.randwrite4k_steady_of_fresh",
            what: "4 KiB writes anywhere after twice the store was written over at 80 % full, cleaning included",
            bar: Bar::None,
            take: |effort| run(aged::steady_randwrite(effort, Choice::Uniform)),
        },
        Spec {
            name: "object.randwrite4k_steady_zipf_of_fresh",
            what: "the same with few blocks written often (Zipf 0.99)",
            bar: Bar::None,
            take: |effort| run(aged::steady_randwrite(effort, Choice::Zipf)),
        },
        Spec {
            name: "object.aged256k_seqread_of_fresh",
            what: "1 MiB reads in order after everything was written over in 256 KiB pieces at 80 % full",
            bar: Bar::AtLeast(0.6),
            take: |effort| run(aged::aged_seqread(effort, 256 * KIB)),
        },
        Spec {
            name: "object.aged4k_seqread_of_fresh",
            what: "the same after 4 KiB pieces",
            bar: Bar::None,
            take: |effort| run(aged::aged_seqread(effort, 4 * KIB)),
        },
        Spec {
            name: "object.checkpoint_moved_per_written",
            what: "checkpoints of 16 files, three kept, the oldest deleted: what the cleaner moved",
            bar: Bar::AtMost(0.05),
            take: |effort| run(aged::checkpoints(effort)),
        },
        Spec {
            name: "object.reopen_s_10m_extents",
            what: "a killed log whose index has ten million extents, until it answers",
            bar: Bar::AtMost(5.0),
            take: |effort| run(reopen::after_kill(effort)),
        },
    ]
}
