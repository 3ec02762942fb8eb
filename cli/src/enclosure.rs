//! `levada enclosure`: finds drives over NVMe/TCP; serves simulated ones, and has things go wrong with them on command.

use crate::network::NetworkArgs;
use crate::out::say;
use crate::status::bytes;
use anyhow::{Result, bail};
use clap::{Args, Subcommand, ValueEnum};

use levada_enclosure::{
    DriveHealth, DriveModel, EnclosureStatus, Found, FoundDrive, Media, Order, PathOrder, Plan,
    WearChange, ask,
};
use levada_export_nvmet::{Address, AnaState, Nqn};
use levada_spec::Bytes;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Whoever waits longer has given up.
const SLOW_MS_MAX: u64 = 3_600_000;
const SLOW: &str = "Milliseconds, up to an hour: 3600000";

#[derive(Subcommand)]
pub enum EnclosureCommand {
    /// Serve one, simulated, in the foreground, until told to stop
    Serve(ServeArgs),
    /// List the drives that there are at a network address, with what a cluster file says of them
    Find(FindArgs),
    /// Power, paths, and what is in each bay of a simulated one
    Show {
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Pull a drive, with whatever is under way
    Pull { name: String, bay: u32 },
    /// Put it back, with what it held
    Insert { name: String, bay: u32 },
    /// Let every request to a drive take longer; 0 ends that
    SlowDrive {
        name: String,
        bay: u32,
        #[arg(help = SLOW, value_parser = clap::value_parser!(u64).range(..=SLOW_MS_MAX))]
        ms: u64,
    },
    /// Set what a drive tells of its health; what is not said stays as it is
    Wear {
        name: String,
        bay: u32,
        #[command(flatten)]
        wear: WearArgs,
    },
    /// Take a path away, or give it back
    Path {
        name: String,
        /// From 1 on, as `show` has them
        path: usize,
        #[command(subcommand)]
        order: PathCommand,
    },
    /// Cut the power: what drives have not flushed is lost, or a random part of it; or switch it on again
    Power { name: String, order: Switch },
}

#[derive(Args)]
pub struct FindArgs {
    /// Of a discovery controller, which NVMe/TCP targets mostly have: HOST[:PORT], port 4420 unless given (others have it at 8009); nvme+tcp:// before it may stay
    address: String,
    /// Ask as this host, where only some may
    #[arg(long, value_name = "NQN")]
    host: Option<Nqn>,
    /// Where its secrets and keys are, as `nvme gen-dhchap-key` and `nvme gen-tls-key` make them
    #[arg(long, value_name = "FILE", requires = "host")]
    keys: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[group(required = true, multiple = true)]
pub struct WearArgs {
    /// Of its endurance, up to 255; what is written later comes on top
    #[arg(long, value_name = "PERCENT")]
    used: Option<u8>,
    /// Spare room that is left; drives warn below 10
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
    spare: Option<u8>,
    /// From -40 to 150; drives warn from 70 on
    #[arg(long, value_name = "CELSIUS", allow_negative_numbers = true, value_parser = clap::value_parser!(i16).range(-40..=150))]
    temperature: Option<i16>,
    #[arg(long, value_name = "COUNT")]
    media_errors: Option<u64>,
}

#[derive(Clone, Copy, Subcommand)]
pub enum PathCommand {
    /// As if nothing had been
    Up,
    /// Connections are closed, and new ones at once
    Down,
    /// Connections stay, and nothing is answered
    Hung,
    /// Answers leave so much later
    Slow {
        #[arg(help = SLOW, value_parser = clap::value_parser!(u64).range(..=SLOW_MS_MAX))]
        ms: u64,
    },
    /// Say how good it is (ANA), whatever becomes of what comes over it: optimized, non-optimized, inaccessible, persistent-loss or change
    Ana { state: AnaState },
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Switch {
    Off,
    On,
}

#[derive(Clone, Copy, ValueEnum)]
enum Model {
    /// 400 MB/s, 20,000 operations/s, 80 us each
    Nvme,
    /// 150 MB/s, 10,000 operations/s, 80 us each
    Slow,
}

#[derive(Args)]
pub struct ServeArgs {
    name: String,
    /// Where it is reached over NVMe/TCP: HOST:PORT, or an IP address; twice for two paths
    #[arg(long = "path", value_name = "ADDRESS", required = true)]
    paths: Vec<Address>,
    /// Each for a drive: 1 to 1024
    #[arg(long, default_value_t = 24)]
    bays: u32,
    /// Drives are files of DIR, made where they are missing
    #[arg(long, value_name = "DIR", conflicts_with = "ram", required_unless_present = "ram")]
    files: Option<PathBuf>,
    /// Drives are memory, empty at every start
    #[arg(long)]
    ram: bool,
    /// Of each drive that is made
    #[arg(long, default_value = "1GiB", allow_hyphen_values = true)]
    size: Bytes,
    /// How fast each drive is; unless told, as fast as what it lies on
    #[arg(long)]
    model: Option<Model>,
    /// Written so much, a drive is used up; unless told, writing wears nothing
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    endurance: Option<Bytes>,
    /// Drives that nobody can reserve, as many are: what a `power_fence` is for
    #[arg(long)]
    no_reservations: bool,
    /// For this host only, by its name (on Linux in /etc/nvme/hostnqn); may be given several times
    #[arg(long = "host", value_name = "NQN")]
    hosts: Vec<Nqn>,
    /// For the hosts of this file as well, each of which has to prove who it is (DH-HMAC-CHAP), or to come with TLS, or both: lines of
    /// NQN [SECRET [SECRET_OF_SUBSYSTEM]] [KEY_OF_TLS], as `nvme gen-dhchap-key` and `nvme gen-tls-key` make them
    #[arg(long, value_name = "FILE")]
    keys: Option<PathBuf>,
    /// Within TLS only, discovery too, whoever it is
    #[arg(long, requires = "keys")]
    tls_only: bool,
    /// Tell the status over HTTP at IP:PORT: `/` and `/bays`, as JSON
    #[arg(long, value_name = "ADDRESS")]
    status: Option<SocketAddr>,
    #[command(flatten)]
    network: NetworkArgs,
}

/// Carries an enclosure command out.
pub fn enclosure(command: &EnclosureCommand) -> Result<()> {
    let (name, order) = match command {
        EnclosureCommand::Serve(args) => return serve(args),
        EnclosureCommand::Find(args) => return find(args),
        EnclosureCommand::Show { name, json } => {
            let status = ask(name, Order::Show)?;
            match json {
                true => say!("{}", serde_json::to_string_pretty(&status)?),
                false => show(&status),
            }
            return Ok(());
        }
        EnclosureCommand::Pull { name, bay } => (name, Order::Pull { bay: *bay }),
        EnclosureCommand::Insert { name, bay } => (name, Order::Insert { bay: *bay }),
        EnclosureCommand::SlowDrive { name, bay, ms } => {
            (name, Order::SlowDrive { bay: *bay, ms: *ms })
        }
        EnclosureCommand::Wear { name, bay, wear } => {
            let WearArgs { used, spare, temperature, media_errors } = *wear;
            let change = WearChange {
                used_percent: used,
                spare_percent: spare,
                celsius: temperature,
                media_errors,
            };
            (name, Order::Wear { bay: *bay, change })
        }
        EnclosureCommand::Path { name, path, order } => {
            let path = *path;
            let to = |order| Order::Path { path, order };
            let order = match order {
                PathCommand::Up => to(PathOrder::Up),
                PathCommand::Down => to(PathOrder::Down),
                PathCommand::Hung => to(PathOrder::Hung),
                PathCommand::Slow { ms } => to(PathOrder::Slow { ms: *ms }),
                PathCommand::Ana { state } => Order::PathState { path, state: *state },
            };
            (name, order)
        }
        EnclosureCommand::Power { name, order } => {
            (name, Order::Power { is_on: matches!(order, Switch::On) })
        }
    };
    say!("{}", headline(&ask(name, order)?));
    Ok(())
}

fn serve(args: &ServeArgs) -> Result<()> {
    levada_node::log_to_stderr();
    let plan = Plan {
        name: args.name.clone(),
        paths: args.paths.iter().map(|address| address.0).collect(),
        bays: args.bays,
        media: match &args.files {
            Some(dir) => Media::Files(dir.clone()),
            None => Media::Ram,
        },
        size_bytes: args.size.0,
        model: args.model.map(|model| match model {
            Model::Nvme => DriveModel::nvme(),
            Model::Slow => DriveModel::slow(),
        }),
        endurance_bytes: args.endurance.map(|size| size.0),
        lacks_reservations: args.no_reservations,
        hosts: args.hosts.clone(),
        keys: args.keys.clone(),
        tls_only: args.tls_only,
        status: args.status,
        network_cores: args.network.network_cores,
    };
    levada_enclosure::serve(&plan, |status| {
        for path in &status.paths {
            say!("nvme+tcp://{}/{}: {}", path.address, status.subsystem, headline(status));
        }
    })?;
    Ok(())
}

fn find(args: &FindArgs) -> Result<()> {
    let found = levada_enclosure::find(&args.address, args.host.as_ref(), args.keys.as_deref())?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&found)?);
    } else {
        for subsystem in &found {
            show_found(subsystem);
        }
        let enclosures: Vec<String> = found.iter().filter_map(Found::as_enclosure).collect();
        if !enclosures.is_empty() {
            say!("\nfor a cluster file:\n\n{}", enclosures.join("\n").trim_end());
        }
    }
    let closed = found.iter().filter(|subsystem| subsystem.problem.is_some()).count();
    if found.is_empty() {
        bail!("nothing there that this host may see; targets that admit only some take --host NQN");
    }
    if closed > 0 {
        bail!("{closed} of {} subsystems there could not be looked into", found.len());
    }
    Ok(())
}

fn show_found(found: &Found) {
    say!("{}", found.url);
    if let Some(problem) = &found.problem {
        say!("  ! {problem}");
    }
    for FoundDrive { namespace, bytes: size, block_bytes, has_reservations, is_read_only } in
        &found.drives
    {
        let what = match (size, has_reservations) {
            (0, _) => "of blocks that cannot be used".to_owned(),
            (size, _) if *is_read_only => format!("{}, read-only", bytes(*size)),
            (size, true) => format!("{}, blocks of {block_bytes}", bytes(*size)),
            (size, false) => {
                let size = bytes(*size);
                format!(
                    "{size}, blocks of {block_bytes}, without reservations: only with a power fence"
                )
            }
        };
        say!("  namespace {namespace:>3}  {what}");
    }
}

/// How it is, in a line.
fn headline(status: &EnclosureStatus) -> String {
    let drives = status.bays.iter().filter(|bay| bay.drive.is_some()).count();
    let power = if status.has_power { "" } else { ", without power" };
    format!("enclosure {}: {drives} of {} drives{power}", status.name, status.bays.len())
}

fn show(status: &EnclosureStatus) {
    say!("{}, {} controllers of hosts", headline(status), status.controllers);
    say!("  {}", status.subsystem);
    for path in &status.paths {
        say!("  path {}  {}  {}, {}", path.number, path.address, path.state, path.ana);
    }
    for bay in &status.bays {
        let drive = match &bay.drive {
            Some(drive) => {
                let slow = match drive.slow_by_ms {
                    0 => String::new(),
                    ms => format!(", slow by {ms} ms"),
                };
                format!("{}{slow}, {}", bytes(drive.size_bytes), health_text(&drive.health))
            }
            None => "empty".into(),
        };
        say!("  bay {:>3}  {drive}", bay.bay);
    }
}

fn health_text(health: &DriveHealth) -> String {
    let DriveHealth { warnings, celsius, used_percent, spare_percent, media_errors, .. } = health;
    let warns = match &warnings[..] {
        [] => String::new(),
        of => format!("; it warns: {}", of.join(", ")),
    };
    format!(
        "{} written, {used_percent} % used, {spare_percent} % spare, {celsius} °C, {media_errors} media errors{warns}",
        bytes(health.written_bytes)
    )
}
