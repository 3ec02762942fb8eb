//! vhost-user-blk: a client that polls on one core, a server on the other.

use crate::array::{CHUNK_BYTES, STRIPE_BYTES, raid6_of, ten};
use crate::figure::{Bar, Taken};
use crate::guest;
use crate::harness::{Effort, Rate, Run, pairs};
use crate::load::Load;
use crate::members::{Speed, Storage};
use crate::null_volume::NullVolume;
use crate::served::{Served, Serving, Volumes};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::BufMut;
use levada_base::reactor::Reactor;
use levada_base::units::{KIB, MIB};
use levada_device::{Device, Durability};
use levada_raid::{Array, RaidArray};
use levada_volume::{ArrayVolume, Volume};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// Of members that keep nothing.
const NULL_STRIPES: u64 = 1024;
/// Of members in memory: what is written before, and then read, is above any last cache.
const RAM_BYTES: u64 = 1024 * MIB;
const WRITTEN_AT_ONCE: u64 = 8 * MIB;
const DEPTH: usize = 128;
const SEQUENTIAL_DEPTH: usize = 16;
const DISK: &str = "disk";
const ECHO: &str = "echo";

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "vhost.null.randread4k_of_ring_echo",
            what: "4 KiB reads over a ring of an array on members that answer at once, against the same ring with no volume behind",
            bar: Bar::AtLeast(0.5),
            take: null_of_echo,
        },
        Spec {
            name: "vhost.null.randread4k_per_core_of_alone",
            what: "4 KiB reads over a ring for each second that the core of an array on such members works, with a second core that serves the ring, against without",
            bar: Bar::None,
            take: null_per_core,
        },
        Spec {
            name: "vhost.ram.randread4k_of_array",
            what: "4 KiB reads over a ring of an array in memory, against asking the array itself",
            bar: Bar::AtLeast(0.7),
            take: |effort| ram_of_array(effort, Rate::Kiops, random),
        },
        Spec {
            name: "vhost.ram.seqread_of_array",
            what: "1 MiB reads in order over a ring of an array in memory, against asking the array itself",
            bar: Bar::AtLeast(0.9),
            take: |effort| ram_of_array(effort, Rate::GbPerS, sequential),
        },
    ]
}

async fn null_and_echo() -> Result<Volumes> {
    let size_bytes = NULL_STRIPES * STRIPE_BYTES;
    let devices = ten(Speed::Unlimited, Storage::Null, size_bytes);
    let array = raid6_of(&devices, CHUNK_BYTES).await?;
    array.declare_fresh(0, NULL_STRIPES).await?;
    let volume: Rc<dyn Volume> = Rc::new(ArrayVolume::new(array));
    let echo: Rc<dyn Volume> = Rc::new(NullVolume::new(size_bytes));
    Ok(Volumes::from([(DISK.to_owned(), volume), (ECHO.to_owned(), echo)]))
}

fn null_of_echo(effort: Effort) -> Result<Taken> {
    let dir = tempfile::Builder::new().prefix("bench-vhost-").tempdir()?;
    let served = Served::start(dir.path(), Serving::default(), null_and_echo)?;
    let ops = effort.amount(1 << 21);
    let load = Load::random(0..NULL_STRIPES * STRIPE_BYTES, 4 * KIB, DEPTH, ops, 7);
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |_| guest::read(&served.vhost(DISK), &load),
        async |_| guest::read(&served.vhost(ECHO), &load),
    ))?;
    Ok(pairs.ratio(Rate::Kiops, ("array", "echo"), 1.0))
}

/// Neither server polls here, so that the time that the thread with the array runs is work.
fn null_per_core(effort: Effort) -> Result<Taken> {
    let dir = tempfile::Builder::new().prefix("bench-vhost-").tempdir()?;
    let [apart, alone] = [("apart", 1), ("alone", 0)].map(|(name, ring_cores)| {
        let at = dir.path().join(name);
        std::fs::create_dir(&at)?;
        let serving = Serving { spin: Duration::ZERO, network_cores: 0, ring_cores };
        Served::start(&at, serving, null_and_echo)
    });
    let (apart, alone) = (apart?, alone?);
    let load =
        Load::random(0..NULL_STRIPES * STRIPE_BYTES, 4 * KIB, DEPTH, effort.amount(1 << 20), 7);
    let run = |served: &Served| {
        let before = served.worked()?;
        let run = guest::read(&served.vhost(DISK), &load)?;
        Ok(Run { elapsed: served.worked()? - before, ..run })
    };
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |_| run(&apart),
        async |_| run(&alone),
    ))?;
    Ok(pairs.ratio(Rate::Kiops, ("apart", "alone"), 1.0))
}

/// An array of memory that holds what can be read.
async fn written() -> Result<RaidArray> {
    let devices = ten(Speed::Unlimited, Storage::Ram, RAM_BYTES);
    let array = raid6_of(&devices, CHUNK_BYTES).await?;
    for at in (0..RAM_BYTES).step_by(WRITTEN_AT_ONCE as usize) {
        let mut data = BufMut::for_overwrite(WRITTEN_AT_ONCE as usize);
        data.fill((at / MIB) as u8 | 1);
        array.write(at, data.freeze().into_vec(), Durability::Volatile).await?;
    }
    Ok(array)
}

fn random(effort: Effort) -> Load {
    Load::random(0..RAM_BYTES, 4 * KIB, DEPTH, effort.amount(1 << 20), 7)
}

fn sequential(effort: Effort) -> Load {
    Load::sequential(0..effort.amount(RAM_BYTES), MIB, SEQUENTIAL_DEPTH)
}

fn ram_of_array(effort: Effort, rate: Rate, load: fn(Effort) -> Load) -> Result<Taken> {
    let load = load(effort);
    let dir = tempfile::Builder::new().prefix("bench-vhost-").tempdir()?;
    let served = Served::start(dir.path(), Serving::default(), async || {
        let volume: Rc<dyn Volume> = Rc::new(ArrayVolume::new(written().await?));
        Ok(Volumes::from([(DISK.to_owned(), volume)]))
    })?;
    let pairs = Reactor::new()?.block_on(async {
        let array = Rc::new(written().await?);
        let piece = load.piece_bytes as usize;
        // As the client has them: else the same one would be filled all the time, and never leave the cache.
        let held = Rc::new(RefCell::new(VecDeque::from_iter((0..load.depth).map(|_| None))));
        let direct = async |_| {
            let (array, held) = (Rc::clone(&array), Rc::clone(&held));
            load.run(move |at| {
                let (array, held) = (Rc::clone(&array), Rc::clone(&held));
                async move {
                    let into = held.borrow_mut().pop_front().flatten();
                    let into = into.unwrap_or_else(|| BufMut::for_overwrite(piece).into_vec());
                    let read = array.read(at, into).await?;
                    held.borrow_mut().push_back(Some(read));
                    Ok(())
                }
            })
            .await
        };
        pairs(effort, None, async |_| guest::read(&served.vhost(DISK), &load), direct).await
    })?;
    Ok(pairs.ratio(rate, ("vhost", "array"), 1.0))
}
