//! What programs do on a mount, against ext4: a cluster in a box on files of this machine's disk, and ext4 on one
//! file of that disk, on a loop device. Each side ends with `syncfs`, inside the span, where something was written.
//!
//! Needs root, and the programs that it runs: mkfs.ext4, git, cargo, PostgreSQL.

use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, pairs};
use crate::null_fuse::NullMount;
use crate::running_box::{RunningBox, place};
use crate::suite::Spec;
use anyhow::{Context, Result, ensure};
use levada_base::reactor::Reactor;
use levada_base::units::{GIB, KIB};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Of the file that ext4 lies on; it is sparse.
const EXT4_BYTES: u64 = 8 * GIB;
const NAMES: u64 = 4000;
/// What is unpacked, cloned: files, and how many are in a directory.
const TREE_FILES: u64 = 2000;
const TREE_FILES_EACH: u64 = 40;
const CRATES: u64 = 4;
const FUNCTIONS_EACH: u64 = 400;
const PGBENCH_SECONDS: u64 = 8;
const PGBENCH_SCALE: &str = "5";
/// It refuses to run as root.
const PG_USER: &str = "postgres";

pub(crate) fn specs() -> Vec<Spec> {
    macro_rules! spec {
        ($name:literal, $bar:expr, $what:literal, $take:expr) => {
            Spec { name: $name, what: $what, bar: Bar::AtLeast($bar), take: $take }
        };
    }
    let null = |name, take| {
        let what = "the same on a mount that only keeps a table of names: what FUSE costs";
        Spec { name, what, bar: Bar::None, take }
    };
    vec![
        spec!("mount.disk.create_of_ext4", 0.2, "empty files made by one process", |e| names(
            e,
            NamesWork::Create,
            1
        )),
        spec!("mount.disk.create_4p_of_ext4", 0.2, "the same by four processes", |e| names(
            e,
            NamesWork::Create,
            4
        )),
        spec!(
            "mount.disk.stat_of_ext4",
            0.2,
            "files looked at, whose names the kernel has forgotten, by one process",
            |e| names(e, NamesWork::Stat, 1)
        ),
        spec!("mount.disk.stat_4p_of_ext4", 0.2, "the same by four processes", |e| names(
            e,
            NamesWork::Stat,
            4
        )),
        Spec {
            name: "mount.disk.statx_4p_of_ext4",
            what: "the same with the time of birth",
            bar: Bar::None,
            take: |e| names(e, NamesWork::Statx, 4),
        },
        spec!("mount.disk.unlink_of_ext4", 0.2, "files removed by one process", |e| names(
            e,
            NamesWork::Unlink,
            1
        )),
        spec!("mount.disk.unlink_4p_of_ext4", 0.2, "the same by four processes", |e| names(
            e,
            NamesWork::Unlink,
            4
        )),
        null("mount.null.create_of_ext4", |e| null_names(e, NamesWork::Create, 1)),
        null("mount.null.create_4p_of_ext4", |e| null_names(e, NamesWork::Create, 4)),
        null("mount.null.stat_of_ext4", |e| null_names(e, NamesWork::Stat, 1)),
        null("mount.null.stat_4p_of_ext4", |e| null_names(e, NamesWork::Stat, 4)),
        null("mount.null.unlink_of_ext4", |e| null_names(e, NamesWork::Unlink, 1)),
        null("mount.null.unlink_4p_of_ext4", |e| null_names(e, NamesWork::Unlink, 4)),
        spec!("mount.disk.untar_of_ext4", 0.3, "a tree of small files unpacked", untar),
        null("mount.null.untar_of_ext4", null_untar),
        spec!("mount.disk.gitclone_of_ext4", 0.3, "a repository of small files cloned", git_clone),
        spec!("mount.disk.cargobuild_of_ext4", 0.8, "crates built", cargo_build),
        spec!("mount.disk.pgbench_of_ext4", 0.3, "transactions of PostgreSQL", pgbench),
    ]
}

/// What `levada-survey names` does to each of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum NamesWork {
    Create,
    Stat,
    /// With the time of birth, of which FUSE tells in a request of its own.
    Statx,
    Unlink,
}

/// Carries it out on `count` files of a directory: the loads of one process.
///
/// # Errors
///
/// Those of the file system.
pub fn do_names(work: NamesWork, dir: &Path, count: u64) -> Result<()> {
    for number in 0..count {
        let path = dir.join(format!("file-{number:06}"));
        match work {
            NamesWork::Create => {
                OpenOptions::new().write(true).create_new(true).open(path)?;
            }
            NamesWork::Stat => {
                rustix::fs::lstat(&path)?;
            }
            // The standard library asks for the time of birth as well.
            NamesWork::Statx => {
                fs::symlink_metadata(path)?.created()?;
            }
            NamesWork::Unlink => fs::remove_file(path)?,
        }
    }
    Ok(())
}

/// ext4 on a file of the disk; dropping it takes it away.
struct Ext4(TempDir);

impl Ext4 {
    fn new() -> Result<Self> {
        let ext4 = Self(tempfile::Builder::new().prefix("bench-ext4-").tempdir_in(place()?)?);
        let (image, mount) = (ext4.0.path().join("image"), ext4.mount_point());
        File::create(&image)?.set_len(EXT4_BYTES)?;
        fs::create_dir(&mount)?;
        must_run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image))?;
        must_run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount))?;
        Ok(ext4)
    }

    fn mount_point(&self) -> PathBuf {
        self.0.path().join("mnt")
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        if let Err(error) = must_run(Command::new("umount").arg(self.mount_point())) {
            eprintln!("ext4 is still mounted: {error:#}");
        }
    }
}

/// What it printed.
fn must_run(command: &mut Command) -> Result<String> {
    let named = || format!("{:?}", command.get_program());
    let name = named();
    let output = command.stdin(Stdio::null()).output().with_context(|| name.clone())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}", said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Makes durable what is below `dir`.
fn sync_of(dir: &Path) -> Result<()> {
    must_run(Command::new("sync").arg("-f").arg(dir)).map(drop)
}

/// The kernel forgets names and attributes on both sides; what it knows of the disk's blocks it keeps.
fn forget_names() -> Result<()> {
    Ok(fs::write("/proc/sys/vm/drop_caches", "2")?)
}

/// Measures `one` on both sides; it gets a new directory, and the tools that prepare it may use it before.
fn compare(effort: Effort, rate: Rate, one: impl Fn(&Path) -> Result<Run>) -> Result<Taken> {
    let running = RunningBox::up()?;
    compare_mount(effort, rate, &running.mount_point(), one)
}

/// The same of any mount.
fn compare_mount(
    effort: Effort,
    rate: Rate,
    mount: &Path,
    one: impl Fn(&Path) -> Result<Run>,
) -> Result<Taken> {
    let ext4 = Ext4::new()?;
    let in_new_dir = |parent: PathBuf, number: usize| {
        let dir = parent.join(format!("run-{number}"));
        fs::create_dir(&dir)?;
        let run = one(&dir)?;
        fs::remove_dir_all(&dir)?;
        // What was removed here is not to be paid by who comes next.
        sync_of(&parent)?;
        anyhow::Ok(run)
    };
    let pairs = Reactor::new()?.block_on(pairs(
        effort,
        None,
        async |number| in_new_dir(mount.to_owned(), number),
        async |number| in_new_dir(ext4.mount_point(), number),
    ))?;
    Ok(pairs.ratio(rate, ("mount", "ext4"), 1.0))
}

/// `processes` at once, each on files in a directory of its own.
fn names(effort: Effort, work: NamesWork, processes: usize) -> Result<Taken> {
    let running = RunningBox::up()?;
    names_on(effort, work, processes, &running.mount_point())
}

/// The least that the way through the kernel costs them.
fn null_names(effort: Effort, work: NamesWork, processes: usize) -> Result<Taken> {
    let null = NullMount::new()?;
    names_on(effort, work, processes, &null.mount_point())
}

fn names_on(effort: Effort, work: NamesWork, processes: usize, mount: &Path) -> Result<Taken> {
    let count = effort.amount(NAMES);
    let program = std::env::current_exe()?;
    let all_do = |dir: &Path, work: NamesWork| -> Result<()> {
        let name = format!("{work:?}").to_lowercase();
        let start = |number: usize| {
            let mut child = Command::new(&program);
            child.args(["names", &name]).arg(dir.join(number.to_string()));
            child.arg(count.to_string()).spawn()
        };
        let mut children: Vec<_> = (0..processes).map(start).collect::<Result<_, _>>()?;
        for child in &mut children {
            ensure!(child.wait()?.success(), "a process failed");
        }
        Ok(())
    };
    compare_mount(effort, Rate::Kiops, mount, |dir| {
        for number in 0..processes {
            fs::create_dir(dir.join(number.to_string()))?;
        }
        if work != NamesWork::Create {
            all_do(dir, NamesWork::Create)?;
        }
        sync_of(dir)?;
        if matches!(work, NamesWork::Stat | NamesWork::Statx) {
            forget_names()?;
        }
        let meter = Meter::start()?;
        all_do(dir, work)?;
        meter.stop(0, count * processes as u64)
    })
}

/// A tree of files of 1 to 16 KiB, whose contents differ.
fn make_tree(dir: &Path, files: u64) -> Result<u64> {
    let mut total = 0;
    for number in 0..files {
        let within = dir.join(format!("d{}", number / TREE_FILES_EACH));
        if number % TREE_FILES_EACH == 0 {
            fs::create_dir_all(&within)?;
        }
        let bytes = (number % 16 + 1) * KIB;
        let mut text = String::new();
        let mut value = number + 1;
        while (text.len() as u64) < bytes {
            value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            text += &format!("{value:016x}\n");
        }
        fs::write(within.join(format!("f{number}")), text)?;
        total += bytes;
    }
    Ok(total)
}

/// On neither side of a figure: where sources lie.
fn sources() -> Result<TempDir> {
    Ok(tempfile::Builder::new().prefix("bench-sources-").tempdir_in(place()?)?)
}

fn untar(effort: Effort) -> Result<Taken> {
    let running = RunningBox::up()?;
    untar_on(effort, &running.mount_point())
}

fn null_untar(effort: Effort) -> Result<Taken> {
    let null = NullMount::new()?;
    untar_on(effort, &null.mount_point())
}

fn untar_on(effort: Effort, mount: &Path) -> Result<Taken> {
    let (sources, files) = (sources()?, effort.amount(TREE_FILES));
    let tree = sources.path().join("tree");
    let bytes = make_tree(&tree, files)?;
    let archive = sources.path().join("tree.tar");
    must_run(Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&tree).arg("."))?;
    compare_mount(effort, Rate::Kiops, mount, |dir| {
        sync_of(dir)?;
        let meter = Meter::start()?;
        must_run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(dir))?;
        sync_of(dir)?;
        meter.stop(bytes, files)
    })
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
    git.args(["-c", "user.name=bench", "-c", "user.email=bench@example.org"]);
    git
}

fn git_clone(effort: Effort) -> Result<Taken> {
    let (sources, files) = (sources()?, effort.amount(TREE_FILES));
    let bytes = make_tree(sources.path(), files)?;
    for arguments in [&["init", "-q"][..], &["add", "-A"], &["commit", "-q", "-m", "all"]] {
        must_run(git().current_dir(sources.path()).args(arguments))?;
    }
    let url = format!("file://{}", sources.path().display());
    compare(effort, Rate::Kiops, |dir| {
        sync_of(dir)?;
        let meter = Meter::start()?;
        must_run(git().args(["clone", "-q", &url]).arg(dir.join("clone")))?;
        sync_of(dir)?;
        meter.stop(bytes, files)
    })
}

/// A workspace of crates that need nothing from elsewhere.
fn make_crates(dir: &Path, functions: u64) -> Result<()> {
    fs::create_dir_all(dir)?;
    let members: Vec<String> = (0..CRATES).map(|n| format!("\"c{n}\"")).collect();
    fs::write(
        dir.join("Cargo.toml"),
        format!("[workspace]\nresolver = \"2\"\nmembers = [{}]\n", members.join(", ")),
    )?;
    for number in 0..CRATES {
        let package = dir.join(format!("c{number}"));
        fs::create_dir_all(package.join("src"))?;
        let manifest =
            format!("[package]\nname = \"c{number}\"\nversion = \"0.1.0\"\nedition = \"2021\"\n");
        fs::write(package.join("Cargo.toml"), manifest)?;
        let mut library = String::from("pub mod parts {\n");
        for function in 0..functions {
            library += &format!(
                "pub fn f{function}(x: u64) -> String {{ let mut v: Vec<String> = \
                 (0..x % 7).map(|n| format!(\"{{n}}-{function}\")).collect(); v.sort(); v.concat() }}\n"
            );
        }
        library += "}\n";
        let mut file = File::create(package.join("src/lib.rs"))?;
        file.write_all(library.as_bytes())?;
    }
    Ok(())
}

fn cargo_build(effort: Effort) -> Result<Taken> {
    let functions = effort.amount(FUNCTIONS_EACH);
    compare(effort, Rate::Kiops, |dir| {
        make_crates(dir, functions)?;
        sync_of(dir)?;
        let meter = Meter::start()?;
        let mut cargo = Command::new("cargo");
        cargo.args(["build", "--quiet", "--offline"]).current_dir(dir);
        must_run(cargo.env("CARGO_TARGET_DIR", dir.join("target")).env_remove("RUSTFLAGS"))?;
        sync_of(dir)?;
        meter.stop(0, CRATES)
    })
}

/// A server of PostgreSQL on a directory; dropping it ends it.
struct Server {
    bin: PathBuf,
    dir: PathBuf,
    user: u32,
    group: u32,
}

impl Server {
    fn start(dir: &Path) -> Result<Self> {
        let versions =
            fs::read_dir("/usr/lib/postgresql").context("PostgreSQL is not installed")?;
        let bin = versions.flatten().map(|version| version.path().join("bin")).max();
        let bin = bin.context("PostgreSQL is not installed")?;
        let id = |what: &str| -> Result<u32> {
            Ok(must_run(Command::new("id").args([what, PG_USER]))?.trim().parse()?)
        };
        let (user, group) = (id("-u")?, id("-g")?);
        // Its user must come to the directory.
        for parent in
            dir.ancestors().filter(|parent| parent.starts_with(place().unwrap_or_default()))
        {
            fs::set_permissions(parent, fs::Permissions::from_mode(0o755))?;
        }
        chown(dir, Some(user), Some(group))?;
        let server = Self { bin, dir: dir.to_owned(), user, group };
        let data = dir.join("data");
        must_run(server.program("initdb").args(["-A", "trust", "--no-locale", "-D"]).arg(&data))?;
        let options = format!("-c listen_addresses= -k {}", dir.display());
        let log = dir.join("log");
        let mut ctl = server.program("pg_ctl");
        ctl.args(["-w", "-o", &options, "-D"]).arg(&data).arg("-l").arg(log).arg("start");
        // Not captured: the server keeps these open.
        let started =
            ctl.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        ensure!(started.success(), "PostgreSQL does not start in {}", dir.display());
        Ok(server)
    }

    fn program(&self, name: &str) -> Command {
        let mut program = Command::new(self.bin.join(name));
        program.uid(self.user).gid(self.group).current_dir("/");
        program.env("PGHOST", &self.dir).env("PGDATABASE", PG_USER);
        program
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let data = self.dir.join("data");
        if let Err(error) =
            must_run(self.program("pg_ctl").args(["-w", "-m", "fast", "-D"]).arg(data).arg("stop"))
        {
            eprintln!("PostgreSQL does not stop: {error:#}");
        }
    }
}

fn pgbench(effort: Effort) -> Result<Taken> {
    let seconds = effort.amount(PGBENCH_SECONDS).to_string();
    compare(effort, Rate::Kiops, |dir| {
        let server = Server::start(dir)?;
        must_run(server.program("pgbench").args(["-q", "-i", "-s", PGBENCH_SCALE]))?;
        let meter = Meter::start()?;
        let said =
            must_run(server.program("pgbench").args(["-n", "-c", "4", "-j", "2", "-T", &seconds]))?;
        let done = said
            .lines()
            .find_map(|line| line.strip_prefix("number of transactions actually processed: "))
            .and_then(|count| count.trim().parse().ok())
            .context("pgbench does not say what it did")?;
        meter.stop(0, done)
    })
}
