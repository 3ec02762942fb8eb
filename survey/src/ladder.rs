//! The ladder: the same loads on every layer, as a percentage of the raw drives.
//!
//! Each layer stands on drives of its own of the same kind, so that none finds what another left.
//! `raw` is ten drives without protection; array and log have the same ten behind 8+2, client and
//! mount a cluster in a box. Layers take turns, round by round; the table shows medians.

use crate::array::{self, CHUNK_BYTES, MEMBER_METADATA_BYTES, STRIPE_BYTES, WIDTH};
use crate::client::{self, Bench};
use crate::harness::{Meter, Run, median};
use crate::load::Load;
use crate::log::{self, log_on, object, payload, raw_read, raw_write};
use crate::members::{Drives, Raw, Speed};
use crate::mount::{self, Access, Mounted};
use crate::service::Way;
use crate::table::short;
use anyhow::{Context, Result};
use levada_base::reactor::Reactor;
use levada_base::units::{KIB, MIB};
use levada_client::File;
use levada_log::ObjectLog;
use levada_raid::Array;
use std::path::{Path, PathBuf};
use std::rc::Rc;

const SPAN_BYTES: u64 = 256 * MIB;
const SEQUENTIAL_DEPTH: usize = 16;
const RANDOM_DEPTH: usize = 32;
const RANDOM_OPS: u64 = 8192;
const LAYERS: [&str; 5] = ["raw drives", "array", "object log", "client", "mount"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    SequentialWrite,
    SequentialRead,
    RandomRead,
    RandomWrite,
}

impl Kind {
    const ALL: [Self; 4] =
        [Self::SequentialWrite, Self::SequentialRead, Self::RandomRead, Self::RandomWrite];

    fn name(self) -> &'static str {
        match self {
            Self::SequentialWrite => "1 MiB sequential write",
            Self::SequentialRead => "1 MiB sequential read",
            Self::RandomRead => "4 KiB random read",
            Self::RandomWrite => "4 KiB random write",
        }
    }

    fn load(self, round: u64) -> Load {
        let span = 0..SPAN_BYTES;
        match self {
            Self::SequentialWrite | Self::SequentialRead => {
                Load::sequential(span, MIB, SEQUENTIAL_DEPTH)
            }
            Self::RandomRead | Self::RandomWrite => {
                Load::random(span, 4 * KIB, RANDOM_DEPTH, RANDOM_OPS, round)
            }
        }
    }

    fn is_random(self) -> bool {
        matches!(self, Self::RandomRead | Self::RandomWrite)
    }

    fn rate(self, run: &Run) -> f64 {
        if self.is_random() { run.kiops() } else { run.gb_per_s() }
    }

    fn unit(self) -> &'static str {
        if self.is_random() { "kIOPS" } else { "GB/s" }
    }
}

/// Prints the ladder: on drives that are files in `dir`, which is made and emptied again, or on
/// `slow` ones in memory.
///
/// # Errors
///
/// When a layer fails.
pub fn print(dir: Option<&Path>, rounds: usize) -> Result<()> {
    let files = match dir {
        Some(dir) => {
            std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
            Some(tempfile::tempdir_in(dir)?)
        }
        None => None,
    };
    let (drives, what) = match &files {
        Some(files) => (Drives::Files(files.path().into()), "files of this machine's disk"),
        None => (Drives::Model(Speed::Slow), "150 MB/s, 10,000 IOPS, 80 us each"),
    };
    Reactor::new()?.block_on(async {
        let rungs = Rungs::new(&drives).await?;
        println!("drives: {what}; median of {rounds}; percent of the raw drives");
        print!("{:24} {:>16}", "", LAYERS[0]);
        LAYERS[1..].iter().for_each(|layer| print!(" {layer:>11}"));
        println!();
        for kind in Kind::ALL {
            println!("{}", rungs.row(kind, rounds).await?);
        }
        Ok(())
    })
}

/// Every layer on its drives.
struct Rungs {
    raw: Raw,
    array: Rc<dyn Array>,
    log: ObjectLog,
    // Unmounted before the services end.
    mounted: Mounted,
    file: File,
    bench: Bench,
}

impl Rungs {
    async fn new(drives: &Drives) -> Result<Self> {
        let raw = drives.make("raw", WIDTH, SPAN_BYTES / 8).await?;
        let members = SPAN_BYTES / array::DATA_CHUNKS + MEMBER_METADATA_BYTES;
        let array = array::raid6(&drives.make("array", WIDTH, members).await?).await?;
        let log = log_on(drives).await?;
        let bench = Bench::on(drives.clone(), Way::SameHost).await?;
        let file = bench.create("file").await?;
        let mounted = Mounted::new(bench.address())?;
        let rungs = Self { raw: Raw::new(&raw, CHUNK_BYTES), array, log, mounted, file, bench };
        // What is read later; also the first touch of every drive.
        let fill = Kind::SequentialWrite.load(0);
        raw_write(&rungs.raw, &fill).await?;
        rungs.write_array().await?;
        log::write(&rungs.log, 0, &fill).await?;
        client::write(&rungs.file, &fill).await?;
        Ok(rungs)
    }

    async fn row(&self, kind: Kind, rounds: usize) -> Result<String> {
        let mut rates: [Vec<f64>; LAYERS.len()] = Default::default();
        for round in 0..rounds as u64 {
            let load = kind.load(round);
            for (layer, rates) in rates.iter_mut().enumerate() {
                if let Some(run) = self.run(layer, kind, round, &load).await? {
                    rates.push(kind.rate(&run));
                }
            }
        }
        let [raw, layers @ ..] = &rates;
        let absolute = format!("{} {}", short(median(raw.iter().copied())), kind.unit());
        let mut row = format!("{:24} {absolute:>16}", kind.name());
        for rates in layers {
            let percent = match rates.len() {
                0 => "-".to_owned(),
                _ => {
                    let of_raw = rates.iter().zip(raw).map(|(rate, raw)| 100.0 * rate / raw);
                    format!("{:.0} %", median(of_raw))
                }
            };
            row += &format!(" {percent:>11}");
        }
        Ok(row)
    }

    /// One run; `None` where a layer does not take such a load.
    async fn run(&self, layer: usize, kind: Kind, round: u64, load: &Load) -> Result<Option<Run>> {
        let mounted = |name: &str| -> PathBuf { self.mounted.path(name) };
        let run = match (LAYERS[layer], kind) {
            ("raw drives", Kind::SequentialWrite) => raw_write(&self.raw, load).await?,
            ("raw drives", Kind::RandomWrite) => self.raw_random_write(load).await?,
            ("raw drives", _) => raw_read(&self.raw, load).await?,
            ("array", Kind::SequentialWrite) => self.write_array().await?,
            // Overwrites in place wait for the journal; the object log needs none.
            ("array", Kind::RandomWrite) => return Ok(None),
            ("array", _) => array::read(&self.array, load).await?,
            ("object log", Kind::SequentialWrite) => {
                let run = log::write(&self.log, round + 1, load).await?;
                self.log.delete(object(round + 1)).await?;
                run
            }
            ("object log", Kind::RandomWrite) => log::write(&self.log, 0, load).await?,
            ("object log", _) => log::read(&self.log, 0, load).await?,
            ("client", Kind::SequentialWrite) => self.bench.write_new(load).await?,
            ("client", Kind::RandomWrite) => client::write(&self.file, load).await?,
            ("client", _) => client::read(&self.file, load).await?,
            (_, Kind::SequentialWrite) => {
                mount::write_new(&self.bench, &mounted("new"), load).await?
            }
            (_, Kind::RandomWrite) => {
                mount::drive_beside(&mounted("file"), Access::Write, load).await?
            }
            (_, _) => mount::drive_beside(&mounted("file"), Access::Read, load).await?,
        };
        Ok(Some(run))
    }

    async fn write_array(&self) -> Result<Run> {
        array::write_stripes(&self.array, &array::source(), SPAN_BYTES / STRIPE_BYTES, 1).await
    }

    async fn raw_random_write(&self, load: &Load) -> Result<Run> {
        let meter = Meter::start()?;
        let (target, data) = (self.raw.clone(), payload(load.piece_bytes));
        load.drive(move |at| {
            let (raw, data) = (target.clone(), data.clone());
            async move { raw.write_piece(at, data.into_vec()).await }
        })
        .await?;
        self.raw.flush().await?;
        meter.stop(load.ops * load.piece_bytes, load.ops)
    }
}
