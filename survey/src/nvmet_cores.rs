//! What a core that serves NVMe/TCP can do when another one carries its connections: operations for each second that it runs.
//!
//! The rate of a whole machine with two cores says nothing of that, since the host needs one of them. Neither server polls here, so that
//! the time that its thread runs is work.

use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Rate, Run, pairs};
use crate::load::Load;
use crate::null_volume::NullVolume;
use crate::nvmet::{BLOCK_BYTES, DEPTH, Host, SEQUENTIAL_BYTES, SEQUENTIAL_DEPTH};
use crate::served::{Served, Serving, Volumes};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::reactor::Reactor;
use levada_base::units::GIB;
use levada_nvme::IoOpcode;
use levada_nvme::pdu::Digests;
use levada_volume::Volume;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

const VOLUME: &str = "null";
const VOLUME_BYTES: u64 = 64 * GIB;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "nvmet.null.randread4k_per_core_of_alone",
            what: "4 KiB reads over NVMe/TCP for each second that the target's core works, with a second core that carries connections, against without",
            bar: Bar::None,
            take: |effort| taken(effort, Rate::Kiops, IoOpcode::Read),
        },
        Spec {
            name: "nvmet.null.seqread_per_core_of_alone",
            what: "the same, of 128 KiB reads",
            bar: Bar::None,
            take: |effort| taken(effort, Rate::GbPerS, IoOpcode::Read),
        },
        Spec {
            name: "nvmet.null.seqwrite_per_core_of_alone",
            what: "the same, of 128 KiB writes",
            bar: Bar::None,
            take: |effort| taken(effort, Rate::GbPerS, IoOpcode::Write),
        },
    ]
}

fn taken(effort: Effort, rate: Rate, opcode: IoOpcode) -> Result<Taken> {
    let dir = tempfile::Builder::new().prefix("bench-nvmet-").tempdir()?;
    let load = match rate {
        Rate::Kiops => Load::random(0..VOLUME_BYTES, BLOCK_BYTES, DEPTH, effort.amount(1 << 20), 7),
        Rate::GbPerS => {
            Load::sequential(0..effort.amount(16 * GIB), SEQUENTIAL_BYTES, SEQUENTIAL_DEPTH)
        }
    };
    let [carried, alone] = [("carried", 1), ("alone", 0)].map(|(name, network_cores)| {
        let at = dir.path().join(name);
        std::fs::create_dir(&at)?;
        serve(&at, network_cores)
    });
    let (carried, alone) = (carried?, alone?);
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |_| run(&carried, &load, opcode),
        async |_| run(&alone, &load, opcode),
    ))?;
    Ok(pairs.ratio(rate, ("carried", "alone"), 1.0))
}

fn serve(dir: &Path, network_cores: usize) -> Result<Served> {
    Served::start(dir, Serving { spin: Duration::ZERO, network_cores, ring_cores: 0 }, async || {
        let volume: Rc<dyn Volume> = Rc::new(NullVolume::new(VOLUME_BYTES));
        Ok(Volumes::from([(VOLUME.to_owned(), volume)]))
    })
}

/// A run that has taken as long as the server's own thread has worked for it.
fn run(served: &Served, load: &Load, opcode: IoOpcode) -> Result<Run> {
    let mut host = Host::connect(&served.nvme(VOLUME)?, Digests::default())?;
    let before = served.worked()?;
    let run = host.run(load, opcode)?;
    Ok(Run { elapsed: served.worked()? - before, ..run })
}
