//! The soak: seeds by the thousand on every core, in a process of its own for every few of them.
//!
//! A file keeps which seeds are done, what they met, how long they took and which failed, so the
//! soak may be stopped at any time and goes on where it was.
//!
//! What always holds: a seed counts as done only when a process has run it to its end, and the
//! file is replaced in one step. A process that dies or hangs is a failure of its seeds.

use crate::{Coverage, Scenario, seeds};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Seeds of one process.
const CHUNK: u64 = 10;
/// After this, a process hangs.
const CHUNK_TIME_MAX: Duration = Duration::from_secs(1800);
/// Freed memory stays for the next drive or buffer. Left alone, the allocator gives each large one
/// back to the kernel and faults it in anew, which is a quarter of a seed's time.
const KEEP_FREED_MEMORY: &str =
    "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967296";
/// Characters of a failure's message that are kept.
const MESSAGE_CHARS_MAX: usize = 4000;

/// What a soak runs.
pub struct Part {
    pub name: &'static str,
    pub scenario: Scenario,
    /// In how many hundredths of the seeds it takes part.
    pub percent: u64,
}

/// What is known of one part.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// Seeds that are done; apart from each other and in order.
    done: Vec<Range<u64>>,
    /// Microseconds of processor time that they took.
    cpu_us: u64,
    coverage: Coverage,
    failures: Vec<(u64, String)>,
    /// Seeds by the build that ran them.
    builds: BTreeMap<String, u64>,
}

impl Progress {
    fn count(&self) -> u64 {
        self.done.iter().map(|range| range.end - range.start).sum()
    }

    fn is_done(&self, seed: u64) -> bool {
        self.done.iter().any(|range| range.contains(&seed))
    }

    fn finish(&mut self, seeds: Range<u64>) {
        self.done.push(seeds);
        self.done.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in self.done.drain(..) {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        self.done = merged;
    }
}

/// See the module.
pub struct Soak {
    parts: &'static [Part],
    seeds: u64,
    state: PathBuf,
    build: String,
    progress: Mutex<BTreeMap<String, Progress>>,
}

/// How a soak ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Clean,
    Failed,
}

impl Soak {
    /// Goes on where the file `state` says an earlier one stopped.
    ///
    /// # Errors
    ///
    /// When the file exists and cannot be read, or this program's own file cannot.
    pub fn resume(parts: &'static [Part], seeds: u64, state: &Path) -> io::Result<Self> {
        let program = std::fs::read(std::env::current_exe()?)?;
        let build = format!("{:08x}", levada_base::checksum::crc32c(&program));
        let text = match std::fs::read_to_string(state) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read?,
        };
        let mut progress = BTreeMap::<String, Progress>::new();
        for line in text.lines() {
            if let Some((part, line)) = line.split_once('\t') {
                take_line(progress.entry(part.to_owned()).or_default(), line);
            }
        }
        Ok(Self { parts, seeds, state: state.into(), build, progress: Mutex::new(progress) })
    }

    fn save(&self, progress: &BTreeMap<String, Progress>) -> io::Result<()> {
        let mut text = String::new();
        for (part, progress) in progress {
            let mut say = |line: &str| text.push_str(&format!("{part}\t{line}\n"));
            progress.done.iter().for_each(|r| say(&format!("done\t{}\t{}", r.start, r.end)));
            say(&format!("cpu_us\t{}", progress.cpu_us));
            progress.builds.iter().for_each(|(build, n)| say(&format!("build\t{build}\t{n}")));
            progress.coverage.lines().iter().for_each(|line| say(line));
            for (seed, message) in &progress.failures {
                say(&format!("failed\t{seed}\t{message}"));
            }
        }
        let fresh = self.state.with_extension("new");
        std::fs::write(&fresh, text)?;
        std::fs::rename(fresh, &self.state)
    }

    /// Runs what is not done yet. With `keep_going`, failures do not stop it.
    ///
    /// # Errors
    ///
    /// When a process cannot be started, or the state not be saved.
    pub fn run(&self, keep_going: bool) -> io::Result<End> {
        let mut chunks = Vec::new();
        for part in self.parts {
            let wanted = self.seeds * part.percent / 100;
            let progress = self.progress.lock().expect("no panic while it is held");
            let done = progress.get(part.name).cloned().unwrap_or_default();
            let mut at = 0;
            while at < wanted {
                let end = (at + CHUNK).min(wanted);
                let left: Vec<u64> = (at..end).filter(|seed| !done.is_done(*seed)).collect();
                if let (Some(first), Some(last)) = (left.first(), left.last()) {
                    chunks.push((part, *first..last + 1));
                }
                at = end;
            }
        }
        // The parts side by side, so that the first minutes show all of them.
        chunks.sort_by_key(|(part, seeds)| seeds.start * 100 / part.percent);
        let all: u64 = chunks.iter().map(|(_, seeds)| seeds.end - seeds.start).sum();
        let chunks = Mutex::new(chunks.into_iter());
        let (stop, error) = (AtomicBool::new(false), Mutex::new(None));
        let (begun, ran) = (Instant::now(), Mutex::new(0));
        let work = || {
            while !stop.load(Ordering::Relaxed) {
                let next = chunks.lock().expect("no panic while it is held").next();
                let Some((part, seeds)) = next else { break };
                let count = seeds.end - seeds.start;
                match run_chunk(part.name, &seeds).and_then(|got| self.take(part, seeds, got)) {
                    Ok(clean) => {
                        let mut ran = ran.lock().expect("no panic while it is held");
                        *ran += count;
                        self.tell(*ran, all, begun.elapsed());
                        if !clean && !keep_going {
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                    Err(why) => {
                        *error.lock().expect("no panic while it is held") = Some(why);
                        stop.store(true, Ordering::Relaxed);
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..seeds::threads() {
                scope.spawn(work);
            }
        });
        match error.into_inner().expect("no panic while it is held") {
            Some(error) => Err(error),
            None => Ok(self.report()),
        }
    }

    /// Adds what a process said; false when a seed of it failed.
    fn take(&self, part: &Part, seeds: Range<u64>, said: Said) -> io::Result<bool> {
        let mut all = self.progress.lock().expect("no panic while it is held");
        let progress = all.entry(part.name.to_owned()).or_default();
        let mut got = Progress::default();
        said.text.lines().for_each(|line| take_line(&mut got, line));
        if !said.finished {
            let what = format!("the process of seeds {seeds:?} died: {}", said.end);
            got.failures.push((seeds.start, what));
        }
        for (seed, message) in &got.failures {
            eprintln!("{} failed: {message}", part.name);
            eprintln!("replay: levada-sim run {} {seed} {}", part.name, seed + 1);
        }
        let clean = got.failures.is_empty();
        progress.cpu_us += got.cpu_us;
        progress.coverage.add(&got.coverage);
        progress.failures.append(&mut got.failures);
        *progress.builds.entry(self.build.clone()).or_default() += seeds.end - seeds.start;
        progress.finish(seeds);
        self.save(&all)?;
        Ok(clean)
    }

    fn tell(&self, ran: u64, all: u64, took: Duration) {
        let progress = self.progress.lock().expect("no panic while it is held");
        let parts: Vec<String> = self
            .parts
            .iter()
            .map(|part| {
                let done = progress.get(part.name).map_or(0, Progress::count);
                format!("{} {done}/{}", part.name, self.seeds * part.percent / 100)
            })
            .collect();
        let failed: usize = progress.values().map(|progress| progress.failures.len()).sum();
        let rate = ran as f64 / took.as_secs_f64();
        println!(
            "{}; {failed} failed; {rate:.1} seeds/s, {:.0} min left",
            parts.join(", "),
            (all - ran) as f64 / rate / 60.0
        );
    }

    /// Prints what every part met, up to now.
    fn report(&self) -> End {
        let progress = self.progress.lock().expect("no panic while it is held");
        let mut end = End::Clean;
        for part in self.parts {
            let Some(progress) = progress.get(part.name) else { continue };
            let (count, failed) = (progress.count(), progress.failures.len());
            let cpu = progress.cpu_us as f64 / 1e6;
            println!(
                "\n{}: {count} seeds, {failed} failed, {:.3} s of CPU per seed, {:.2} CPU hours",
                part.name,
                cpu / count.max(1) as f64,
                cpu / 3600.0
            );
            let this = progress.builds.get(&self.build).copied().unwrap_or(0);
            println!(
                "{this} of them by this build, {} by earlier ones",
                count.saturating_sub(this)
            );
            print!("{}", progress.coverage);
            for (seed, message) in &progress.failures {
                end = End::Failed;
                let first = message.split("\\n").next().unwrap_or_default();
                println!("seed {seed} failed: {first}");
            }
        }
        end
    }
}

/// One line of the state or of a process's output, without the name of the part.
fn take_line(progress: &mut Progress, line: &str) {
    let words: Vec<&str> = line.splitn(3, '\t').collect();
    let number = |word: &str| word.parse::<u64>().ok();
    match words[..] {
        ["done", from, to] => {
            if let (Some(from), Some(to)) = (number(from), number(to)) {
                progress.finish(from..to);
            }
        }
        ["cpu_us", us] => progress.cpu_us += number(us).unwrap_or(0),
        ["build", build, n] => {
            *progress.builds.entry(build.to_owned()).or_default() += number(n).unwrap_or(0);
        }
        ["failed", seed, message] => {
            progress.failures.push((number(seed).unwrap_or(0), message.to_owned()));
        }
        _ => _ = progress.coverage.add_line(line),
    }
}

/// What a process of some seeds left.
struct Said {
    text: String,
    finished: bool,
    end: String,
}

/// Runs some seeds in a process of their own, below everything else on the machine.
fn run_chunk(part: &str, seeds: &Range<u64>) -> io::Result<Said> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["chunk", part, &seeds.start.to_string(), &seeds.end.to_string()])
        .env("GLIBC_TUNABLES", KEEP_FREED_MEMORY)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut out = child.stdout.take().expect("it is piped");
    let reader = thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).map(|_| text)
    });
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > CHUNK_TIME_MAX {
            child.kill()?;
        }
        thread::sleep(Duration::from_millis(20));
    };
    let text = reader.join().expect("it only reads")?;
    let finished = status.success() && text.lines().any(|line| line == "end");
    Ok(Said { text, finished, end: status.to_string() })
}

/// The process of some seeds: runs them all and says what [`Soak`] understands.
pub fn chunk(scenario: Scenario, seeds: Range<u64>) {
    std::panic::set_hook(Box::new(|_| {}));
    let mut coverage = Coverage::default();
    for seed in seeds {
        match seeds::run_one(scenario, seed) {
            Ok(outcome) => coverage.add(&outcome.coverage),
            Err(message) => {
                let message = message.replace('\n', "\\n").replace('\t', " ");
                let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
                println!("failed\t{seed}\t{message}");
            }
        }
    }
    coverage.lines().iter().for_each(|line| println!("{line}"));
    println!("cpu_us\t{}", cpu_time().as_micros());
    println!("end");
}

/// Processor time of this process, from `/proc`; 10 ms is its grain.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the program's name in parentheses: user and system time are fields 14 and 15.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_together() {
        let mut progress = Progress::default();
        for seeds in [100..150, 0..50, 50..100, 200..201] {
            progress.finish(seeds);
        }
        assert_eq!(progress.done, [0..150, 200..201]);
        assert_eq!(progress.count(), 151);
        assert!(progress.is_done(149) && !progress.is_done(150));
    }
}
