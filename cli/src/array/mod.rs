//! `array`: arrays on their own, over files, block devices or drives on the network, without a cluster (docs/array.md).

mod show;
mod work;

pub use work::status_of;

use crate::network::{NetworkArgs, parse_cores};
use crate::out::say;
use anyhow::Result;
use clap::{Args, Subcommand};
use levada_array::{Creation, Keeping, LevelWords, Opening, Pace, Reply, Request, Shows};
use levada_export_nbd::Address;
use levada_export_nvmet::AnaState;
use levada_spec::Bytes;
use std::path::PathBuf;

#[derive(Subcommand)]
pub enum ArrayCommand {
    /// Make an array over drives that hold nothing
    #[command(after_help = LEVELS)]
    Create(CreateArgs),
    /// Show what an array is and how its members stand; changes nothing
    Show(ShowArgs),
    /// Open an array and show it as one regular file, for losetup, mkfs, dd or any program, or over NBD, until SIGINT or SIGTERM
    ///
    /// Of an array that is a pool (`levada volume pool`) its volumes are shown, over NBD.
    ///
    /// Nothing is cached: what a write acknowledged is in the array, and what fsync acknowledged is durable. What waits for a
    /// rebuild is rebuilt meanwhile. The other commands work on the array while it is served: one of its drives
    /// says which it is.
    Serve(ServeArgs),
    /// Read everything written on every member, check it against parity or copies, and repair what can be located
    ///
    /// Fails when something is wrong that nothing tells how to repair. Interrupted, a scrub of a served array goes on there; one
    /// that was cut short, also by a restart, goes on where it was.
    Scrub(ScrubArgs),
    /// Bring every member that waits for it back into step, and wait until that is done
    Rebuild(WorkArgs),
    /// Take a member out, as if its drive had been pulled; a hot spare takes its place at once
    Fail {
        /// Its number or name as `show` tells them, or the path of its drive
        member: String,
        #[command(flatten)]
        on: OnArray,
    },
    /// Put a drive in the place of a member that is out
    Replace {
        /// The number or name of the member that is out, as `show` tells them
        member: String,
        /// The new drive, or the old one come back; what it holds is lost
        new: PathBuf,
        /// Overwrite what NEW holds
        #[arg(long)]
        overwrite: bool,
        #[command(flatten)]
        on: OnArray,
    },
    /// Say how good a path is over which hosts reach a served array by NVMe/TCP; they are told, and take others where there are better ones
    Path {
        /// From 1 on, in the order of --nvme
        path: usize,
        /// optimized, non-optimized, inaccessible, persistent-loss or change: the last three refuse what comes over it
        state: AnaState,
        #[command(flatten)]
        on: OnArray,
    },
    /// Add a hot spare, which takes over for a failed member by itself; where a place is vacant it takes it at once
    AddSpare {
        /// The new drive; what it holds is lost
        new: PathBuf,
        /// Overwrite what NEW holds
        #[arg(long)]
        overwrite: bool,
        #[command(flatten)]
        on: OnArray,
    },
}

const LEVELS: &str = "\
Levels:
  0        striped over all drives, nothing protected
  1        mirror: every drive holds everything (--copies 2 or 3, as many drives)
  10       spread mirror: each extent on two drives (--copies), dealt over any number of them, odd ones too
  5, 6     one or two drives' worth of parity: any 1, any 2 drives may be lost
  50, 60   stripes dealt to --groups N equal groups of level 5 or 6; each bears its own 1 or 2 losses
  N+M      such as 8+3: M drives' worth of parity, any M drives may be lost (M up to 4)

Of drives of unequal size the smallest rules. `levada array serve` shows the array as a file.";

#[derive(Args)]
pub struct CreateArgs {
    /// The array's name, for people
    name: String,
    /// 0, 1, 10, 5, 6, 50, 60, or N+M such as 8+3
    #[arg(long)]
    level: String,
    /// Copies of a mirror (levels 1 and 10) [default: 2]
    #[arg(long, value_name = "N")]
    copies: Option<usize>,
    /// Groups (levels 50 and 60) [default: 2]
    #[arg(long, value_name = "N")]
    groups: Option<usize>,
    /// Contiguous bytes on one drive, 4KiB to 1MiB [default: 64KiB; mirrors: 1MiB]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    chunk: Option<Bytes>,
    /// So many of the drives, from the end, start as hot spares
    #[arg(long, value_name = "N", default_value_t = 0)]
    spares: usize,
    /// Bytes of a block, 512 or 4096, of which a power cut leaves each old or new [default: 4096, or 512 where a drive
    /// does not write more at once]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    block: Option<Bytes>,
    /// Room on each drive for the journal of overwrites [default: 16 chunks, at least 64KiB, at most 16MiB]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    journal: Option<Bytes>,
    /// Make drives that do not exist, as files of this size
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    size: Option<Bytes>,
    /// Overwrite what the drives hold: file systems, partition tables, other arrays
    #[arg(long, visible_alias = "yes")]
    force: bool,
    #[command(flatten)]
    power_fence: PowerFenceArgs,
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
    /// Files or block devices
    #[arg(required = true, value_name = "DRIVE")]
    drives: Vec<PathBuf>,
}

#[derive(Args)]
pub struct ShowArgs {
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
    /// Its drives; while it is served one is enough
    #[arg(required = true, value_name = "DRIVE")]
    drives: Vec<PathBuf>,
}

/// What may be missing.
#[derive(Args)]
struct OpeningArgs {
    /// Go on without live members whose drives are not given: they are out until they are given again
    #[arg(long)]
    degraded: bool,
    /// As --degraded, also when half of the live members or more are not given: only when those are gone for good, as
    /// they might know better what was written last
    #[arg(long)]
    force: bool,
}

/// What keeps servers apart where drives cannot.
#[derive(Args)]
struct PowerFenceArgs {
    /// Before the array is opened have this command, by /bin/sh, take the power of every other server that reaches the drives; go on
    /// only if it succeeds. For drives without reservations, which are refused without it. It finds LEVADA_NAME, LEVADA_UUID,
    /// LEVADA_LAST_EPOCH and LEVADA_DRIVES in its environment
    #[arg(long = "power-fence", value_name = "COMMAND")]
    command: Option<String>,
}

/// How fast.
#[derive(Args)]
struct PaceArgs {
    /// At least so many MB/s, moved on all members together, also beside other I/O [default: as the ceiling]
    #[arg(long, value_name = "MB/S", value_parser = clap::value_parser!(u64).range(1..))]
    floor: Option<u64>,
    /// At most so many MB/s, which an idle array gets; beside other I/O what that hardly notices [default: no limit]
    #[arg(long, value_name = "MB/S", value_parser = clap::value_parser!(u64).range(1..))]
    ceiling: Option<u64>,
}

impl PaceArgs {
    fn pace(&self) -> Pace {
        Pace::of_mb_per_s(self.floor, self.ceiling)
    }
}

/// An array that may be served, or not.
#[derive(Args)]
pub struct OnArray {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    power_fence: PowerFenceArgs,
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
    /// All its drives; while it is served one is enough
    #[arg(required = true, value_name = "DRIVE")]
    drives: Vec<PathBuf>,
}

impl OnArray {
    fn keeping(&self) -> Keeping {
        let OpeningArgs { degraded, force } = self.opening;
        Keeping {
            drives: self.drives.clone(),
            opening: Opening { degraded, force },
            pace: Pace::default(),
            read_slow: false,
            power_fence: self.power_fence.command.clone(),
        }
    }
}

/// Where an array is shown.
#[derive(Args)]
#[group(required = true, multiple = true)]
struct PlaceArgs {
    /// Show it as a file: an empty one, or one that does not exist and goes again
    #[arg(long, value_name = "FILE")]
    at: Option<PathBuf>,
    /// Show it over NBD at HOST:PORT or unix:PATH; may be given several times. Whoever reaches that may read and write the array
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<Address>,
    /// Show it over NVMe/TCP at IP[:PORT], port 4420 unless given; may be given several times, for several paths. Whoever reaches that
    /// may read and write the array, unless --nvme-host says who may
    #[arg(long, value_name = "ADDRESS")]
    nvme: Vec<levada_export_nvmet::Address>,
    /// Show it to a virtual machine over vhost-user-blk at this socket; of a pool each volume, at NAME.sock in this directory. May be
    /// given several times, for machines that share a disk
    #[arg(long, value_name = "PATH")]
    vhost: Vec<PathBuf>,
}

#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    places: PlaceArgs,
    /// NBD within TLS only: DIR holds server-cert.pem and server-key.pem, and ca-cert.pem for --verify-clients
    #[arg(long, value_name = "DIR", requires = "nbd")]
    tls: Option<PathBuf>,
    /// NBD for clients only that show a certificate of the authority in ca-cert.pem
    #[arg(long, requires = "tls")]
    verify_clients: bool,
    /// NVMe/TCP for this host only, by its name (on Linux in /etc/nvme/hostnqn); may be given several times
    #[arg(long, value_name = "NQN", requires = "nvme")]
    nvme_host: Vec<levada_export_nvmet::Nqn>,
    /// NVMe/TCP for the hosts of this file as well, each of which has to prove who it is (DH-HMAC-CHAP), or to come with TLS, or both:
    /// lines of NQN [SECRET [SECRET_OF_SUBSYSTEM]] [KEY_OF_TLS], as `nvme gen-dhchap-key` and `nvme gen-tls-key` make them
    #[arg(long, value_name = "FILE", requires = "nvme")]
    nvme_keys: Option<PathBuf>,
    /// NVMe/TCP within TLS only, discovery too, whoever it is
    #[arg(long, requires = "nvme_keys")]
    nvme_tls_only: bool,
    #[command(flatten)]
    network: NetworkArgs,
    /// Cores beside its own that serve the queues of virtual machines (--vhost): worth it where the one core that serves is busy, and others
    /// are not
    #[arg(long, value_name = "COUNT", default_value_t = 0, value_parser = parse_cores, requires = "vhost")]
    ring_cores: usize,
    #[command(flatten)]
    pace: PaceArgs,
    /// Read members that are much slower than the others like these; else reads do without them where redundancy allows
    #[arg(long)]
    read_slow: bool,
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    power_fence: PowerFenceArgs,
    /// All its drives
    #[arg(required = true, value_name = "DRIVE")]
    drives: Vec<PathBuf>,
}

#[derive(Args)]
pub struct WorkArgs {
    #[command(flatten)]
    pace: PaceArgs,
    #[command(flatten)]
    on: OnArray,
}

#[derive(Args)]
pub struct ScrubArgs {
    /// Begin with the first stripe, whatever an earlier scrub has checked before it was cut short
    #[arg(long)]
    restart: bool,
    #[command(flatten)]
    work: WorkArgs,
}

/// Carries an array command out.
pub fn array(command: &ArrayCommand) -> Result<()> {
    match command {
        ArrayCommand::Create(args) => create(args),
        ArrayCommand::Show(args) => {
            show::print_status(&levada_array::show(&args.drives)?, args.json)
        }
        ArrayCommand::Serve(args) => serve(args),
        ArrayCommand::Scrub(ScrubArgs { work, restart }) => {
            work::scrub(&work.on, work.pace.pace(), *restart)
        }
        ArrayCommand::Rebuild(args) => work::rebuild(&args.on, args.pace.pace()),
        ArrayCommand::Fail { member, on } => work::fail(on, member),
        ArrayCommand::Replace { member, new, overwrite, on } => {
            let (member, new) = (member.clone(), levada_array::absolute(new)?);
            let request = Request::Replace { member: member.clone(), new, force: *overwrite };
            work::admit(on, request, &format!("in the place of {member}"))
        }
        ArrayCommand::Path { path, state, on } => work::set_path(on, *path, *state),
        ArrayCommand::AddSpare { new, overwrite, on } => {
            let request =
                Request::AddSpare { new: levada_array::absolute(new)?, force: *overwrite };
            work::admit(on, request, "added")
        }
    }
}

fn create(args: &CreateArgs) -> Result<()> {
    let made = levada_array::create(&Creation {
        name: args.name.clone(),
        level: LevelWords { level: args.level.clone(), copies: args.copies, groups: args.groups },
        chunk_bytes: args.chunk.map(|bytes| bytes.0),
        journal_bytes: args.journal.map(|bytes| bytes.0),
        block_bytes: args.block.map(|bytes| bytes.0),
        spares: args.spares,
        size_bytes: args.size.map(|bytes| bytes.0),
        force: args.force,
        power_fence: args.power_fence.command.clone(),
        drives: args.drives.clone(),
    })?;
    for remark in &made.remarks {
        eprintln!("{remark}");
    }
    match args.json {
        true => show::print_status(&made.status, true),
        false => {
            say!("{}", show::headline(&made.status));
            Ok(())
        }
    }
}

fn serve(args: &ServeArgs) -> Result<()> {
    levada_node::log_to_stderr();
    let OpeningArgs { degraded, force } = args.opening;
    let keeping = Keeping {
        drives: args.drives.clone(),
        opening: Opening { degraded, force },
        pace: args.pace.pace(),
        read_slow: args.read_slow,
        power_fence: args.power_fence.command.clone(),
    };
    let shows = Shows {
        at: args.places.at.clone(),
        nbd: args.places.nbd.clone(),
        nvme: args.places.nvme.iter().map(|address| address.0).collect(),
        nvme_hosts: args.nvme_host.clone(),
        nvme_keys: args.nvme_keys.clone(),
        nvme_tls_only: args.nvme_tls_only,
        vhost: args.places.vhost.clone(),
        tls: args.tls.clone(),
        verify_clients: args.verify_clients,
        network_cores: args.network.network_cores,
        ring_cores: args.ring_cores,
    };
    levada_array::serve(&keeping, &shows, |status, shown| {
        let pool = status
            .pool
            .as_ref()
            .map_or_else(String::new, |pool| format!(", a pool of {} volumes", pool.volumes.len()));
        for place in shown.places() {
            let (bytes, name, uuid) = (status.capacity_bytes, &status.name, &status.uuid);
            say!("{place}: {bytes} bytes, array {name} ({uuid}){pool}");
        }
    })?;
    Ok(())
}

/// Asks whoever has the array open, or opens it for that.
fn ask(on: &OnArray, request: Request) -> Result<Reply> {
    ask_or_open(&on.keeping(), request)
}

/// As [`ask`], of an array that is named otherwise.
pub fn ask_or_open(keeping: &Keeping, request: Request) -> Result<Reply> {
    let asked =
        levada_array::ask_or_open(keeping, move |socket| levada_array::ask(socket, &request))??;
    asked.ok_or_else(|| anyhow::anyhow!("the array was closed meanwhile: try again"))
}
