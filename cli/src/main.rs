//! `levada`: brings clusters up, watches them, mounts their file systems, and takes them down.
//!
//! Every command finds the cluster the same way ([`place`]): `-f FILE`, else `levada.toml` here,
//! else the cluster in a box under `./levada-data`.
// What arguments are documented with is their help, where brackets mean what they mean in a shell.
#![allow(rustdoc::broken_intra_doc_links)]

mod array;
mod discover;
mod drive;
mod enclosure;
mod fsck;
mod mount;
mod network;
mod out;
mod place;
mod plan;
mod process;
mod quota;
mod status;
mod top;
mod up;
mod volume;
mod work;

use clap::{Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::PathBuf;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Parallel storage in user space: drives to double-parity arrays to a striped file system.
#[derive(Parser)]
#[command(name = "levada", version, arg_required_else_help = true)]
struct Cli {
    /// The cluster file [default: levada.toml, else levada-data/levada.toml]
    #[arg(short = 'f', long = "file", global = true, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bring the cluster up; with no cluster file, a cluster in a box under ./levada-data
    Up(up::UpArgs),
    /// Make everything durable, unmount, and stop the node
    Down {
        /// Also while programs use a mount: their next call on it fails, as if its process had died; where an array has stopped,
        /// what they had not synced is lost. And also when the next start will not find a drive that serves now
        #[arg(long)]
        force: bool,
    },
    /// Arrays, members, targets, clients, health, throughput now
    Status(status::StatusArgs),
    /// Watch targets, kinds of requests and drives: rates and latencies, as they are now
    Top(top::TopArgs),
    /// Mount the file system on a directory, or let a virtual machine mount it
    Mount(mount::MountArgs),
    /// Unmount a directory, or end what is served at a socket
    Umount {
        /// Where it is mounted, or the socket
        dir: PathBuf,
        /// Also while programs use it: it leaves the tree now and ends with its last user; a socket ends at once
        #[arg(long)]
        lazy: bool,
    },
    /// Show what drives say of themselves; fail, replace and add them
    #[command(subcommand)]
    Drive(drive::DriveCommand),
    /// Arrays on their own, over files, block devices or drives on the network, without a cluster
    #[command(subcommand)]
    Array(array::ArrayCommand),
    /// Find drives over NVMe/TCP, or serve simulated ones: pulled drives, lost paths, cut power, on command
    #[command(subcommand)]
    Enclosure(enclosure::EnclosureCommand),
    /// Volumes for virtual machines and whoever else wants a disk
    #[command(subcommand)]
    Volume(volume::VolumeCommand),
    /// Whose volumes are, and what they may use together
    #[command(subcommand)]
    Tenant(volume::TenantCommand),
    /// Show the rebuild of lost members
    Rebuild(work::WatchArgs),
    /// Read everything written and check it against parity and checksums
    Scrub(work::WatchArgs),
    /// Who uses what, and how much he may
    #[command(subcommand)]
    Quota(quota::QuotaCommand),
    /// Trees of directories for which is counted
    #[command(subcommand)]
    Project(quota::ProjectCommand),
    /// Read all metadata, say what does not fit together, and repair it
    Fsck(fsck::FsckArgs),
    /// Read the cluster file and say what is wrong, or what it survives
    Check,
    /// Say what the layout is and survives, and what `up` would meet; changes nothing
    Plan(plan::PlanArgs),
    /// The node itself, in the foreground (`up` starts it in the background)
    Node(up::NodeArgs),
    /// Ends the connection of a mount whose process was killed; started by that process
    #[command(name = mount::GUARD, hide = true)]
    GuardMount { mount: u32 },
}

/// Each connection takes a descriptor, of which the usual limit (1,024) is for programs that use select(2). What cannot be had is not there.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    raise_descriptors();
    let file = cli.file.as_deref();
    let result = match &cli.command {
        Command::Up(args) => up::up(file, args),
        Command::Down { force } => up::down(file, *force),
        Command::Status(args) => status::status(file, args),
        Command::Top(args) => top::top(file, args),
        Command::Mount(args) => mount::mount(file, args),
        Command::GuardMount { mount } => levada_node::mounting::guard(*mount),
        Command::Umount { dir, lazy } => mount::umount(file, dir, *lazy),
        Command::Drive(command) => drive::drive(file, command),
        Command::Array(command) => array::array(command),
        Command::Enclosure(command) => enclosure::enclosure(command),
        Command::Volume(command) => volume::volume(file, command),
        Command::Tenant(command) => volume::tenant(file, command),
        Command::Rebuild(args) => work::rebuild(file, args),
        Command::Scrub(args) => work::scrub(file, args),
        Command::Quota(command) => quota::quota(file, command),
        Command::Project(command) => quota::project(file, command),
        Command::Fsck(args) => return fsck::fsck(file, args),
        Command::Check => up::check(file),
        Command::Plan(args) => plan::plan(file, args),
        Command::Node(args) => up::node(file, args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("levada: {}", out::chain(&error));
            ExitCode::FAILURE
        }
    }
}
