//! The soak: seeds by the thousand on every core, in a process of its own for every few of them.
//!
//! A file keeps which seeds are done, what they met, how long they took and which failed, so the
//! soak may be stopped at any time and goes on where it was.
//!
//! What always holds:
//! - A seed is done only when this build has run it to its end without a failure: what another
//!   build did proves nothing about this one, and is dropped. A soak is clean when all are done.
//! - A seed that failed, in whichever build, is run again first.
//! - A process that dies or hangs is a failure of the seed it was at. The file is replaced in one
//!   step.

use crate::{Coverage, Scenario, seeds};
use std::collections::{BTreeMap, VecDeque};
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

/// Seeds of a part from which on no cell of its table that is expected to be filled may be empty: the rarest are filled once in some
/// thousands.
const LONG_RUN: u64 = 10_000;

/// What a soak runs.
pub struct Part {
    pub name: &'static str,
    pub scenario: Scenario,
    /// In how many hundredths of the seeds it takes part.
    pub percent: u64,
    /// Seeds that it takes part in at least.
    pub seeds_min: u64,
    /// The cells of the table that a long run must have filled, and that are empty.
    pub empty_cells: fn(&Coverage) -> Vec<(&'static str, &'static str)>,
}

impl Part {
    /// Seeds that it takes part in, of a soak of `seeds`.
    fn wanted(&self, seeds: u64) -> u64 {
        (seeds * self.percent / 100).max(self.seeds_min)
    }
}

/// What is known of one part.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// Seeds that are done; apart from each other and in order.
    done: Vec<Range<u64>>,
    /// Microseconds of processor time that they took.
    cpu_us: u64,
    coverage: Coverage,
    /// Seeds that failed when they were run last, and how; never among those done.
    failures: BTreeMap<u64, String>,
}

impl Progress {
    fn count(&self) -> u64 {
        self.done.iter().map(|range| range.end - range.start).sum()
    }

    /// The seed needs no run, or one of its own that comes first.
    fn is_settled(&self, seed: u64) -> bool {
        self.failures.contains_key(&seed) || self.done.iter().any(|range| range.contains(&seed))
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
    /// Goes on where the file `state` says an earlier one of the same build stopped.
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
        let (progress, dropped) = parse_state(&text, &build);
        if dropped > 0 {
            println!("{}: {dropped} seeds of another build do not count", state.display());
        }
        println!("build {build}");
        Ok(Self { parts, seeds, state: state.into(), build, progress: Mutex::new(progress) })
    }

    fn save(&self, progress: &BTreeMap<String, Progress>) -> io::Result<()> {
        let fresh = self.state.with_extension("new");
        std::fs::write(&fresh, state_text(progress, &self.build))?;
        std::fs::rename(fresh, &self.state)
    }

    /// What is to be run, the most urgent first.
    fn chunks(&self) -> VecDeque<(&'static Part, Range<u64>)> {
        let progress = self.progress.lock().expect("no panic while it is held");
        let (mut failed, mut chunks) = (Vec::new(), Vec::new());
        for part in self.parts {
            let wanted = part.wanted(self.seeds);
            let known = progress.get(part.name).cloned().unwrap_or_default();
            failed.extend(known.failures.keys().map(|seed| (part, *seed..seed + 1)));
            let mut left = (0..wanted).filter(|seed| !known.is_settled(*seed)).peekable();
            while let Some(first) = left.next() {
                let mut end = first + 1;
                while end % CHUNK != 0 && left.next_if_eq(&end).is_some() {
                    end += 1;
                }
                chunks.push((part, first..end));
            }
        }
        // The parts side by side, so that the first minutes show all of them.
        chunks.sort_by_key(|(part, seeds)| seeds.start * 1000 / part.wanted(self.seeds).max(1));
        failed.into_iter().chain(chunks).collect()
    }

    /// Runs what is not done yet. With `keep_going`, failures do not stop it.
    ///
    /// # Errors
    ///
    /// When a process cannot be started, or the state not be saved.
    pub fn run(&self, keep_going: bool) -> io::Result<End> {
        let chunks = self.chunks();
        let all: u64 = chunks.iter().map(|(_, seeds)| seeds.end - seeds.start).sum();
        let chunks = Mutex::new(chunks);
        let (stop, error) = (AtomicBool::new(false), Mutex::new(None));
        let (begun, ran) = (Instant::now(), Mutex::new(0));
        let work = || {
            while !stop.load(Ordering::Relaxed) {
                let next = chunks.lock().expect("no panic while it is held").pop_front();
                let Some((part, seeds)) = next else { break };
                match run_chunk(part.name, &seeds).and_then(|got| self.take(part, &seeds, got)) {
                    Ok(taken) => {
                        let left: u64 =
                            taken.left.iter().map(|seeds| seeds.end - seeds.start).sum();
                        let mut chunks = chunks.lock().expect("no panic while it is held");
                        taken.left.into_iter().for_each(|seeds| chunks.push_front((part, seeds)));
                        drop(chunks);
                        let mut ran = ran.lock().expect("no panic while it is held");
                        *ran += seeds.end - seeds.start - left;
                        self.tell(*ran, all, begun.elapsed());
                        if !taken.clean && !keep_going {
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

    /// Adds what a process said.
    fn take(&self, part: &Part, seeds: &Range<u64>, said: Said) -> io::Result<Taken> {
        let mut all = self.progress.lock().expect("no panic while it is held");
        let progress = all.entry(part.name.to_owned()).or_default();
        let mut got = Progress::default();
        said.text.lines().for_each(|line| take_line(&mut got, line));
        let mut left = Vec::new();
        if !said.finished {
            // What it met before it died is lost, so those seeds are run once more.
            let at = said.at.unwrap_or(seeds.start);
            let what = format!("seed {at}: the process died: {}", said.end);
            got = Progress { failures: BTreeMap::from([(at, what)]), ..Progress::default() };
            left = vec![seeds.start..at, at + 1..seeds.end];
            left.retain(|seeds| !seeds.is_empty());
        }
        for (seed, message) in &got.failures {
            eprintln!("{} failed: {message}", part.name);
            eprintln!("replay: levada-sim run {} {seed} {}", part.name, seed + 1);
        }
        let clean = got.failures.is_empty();
        progress.cpu_us += got.cpu_us;
        progress.coverage.add(&got.coverage);
        for seed in seeds.clone().filter(|seed| !left.iter().any(|left| left.contains(seed))) {
            progress.failures.remove(&seed);
            if !got.failures.contains_key(&seed) {
                progress.finish(seed..seed + 1);
            }
        }
        progress.failures.append(&mut got.failures);
        self.save(&all)?;
        Ok(Taken { clean, left })
    }

    fn tell(&self, ran: u64, all: u64, took: Duration) {
        let progress = self.progress.lock().expect("no panic while it is held");
        let parts: Vec<String> = self
            .parts
            .iter()
            .map(|part| {
                let done = progress.get(part.name).map_or(0, Progress::count);
                format!("{} {done}/{}", part.name, part.wanted(self.seeds))
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
        println!("\nbuild {}", self.build);
        for part in self.parts {
            let wanted = part.wanted(self.seeds);
            let none = Progress::default();
            let progress = progress.get(part.name).unwrap_or(&none);
            let (count, failed) = (progress.count(), progress.failures.len());
            let cpu = progress.cpu_us as f64 / 1e6;
            println!(
                "\n{}: {count} of {wanted} seeds clean, {failed} failed, {:.3} s of CPU per seed, {:.2} CPU hours",
                part.name,
                cpu / count.max(1) as f64,
                cpu / 3600.0
            );
            print!("{}", progress.coverage);
            if count < wanted || failed > 0 {
                end = End::Failed;
            }
            if count >= LONG_RUN {
                for (fault, state) in (part.empty_cells)(&progress.coverage) {
                    end = End::Failed;
                    println!("never met: {fault} while {state}");
                }
            }
            for (seed, message) in &progress.failures {
                let first = message.split("\\n").next().unwrap_or_default();
                println!("seed {seed} failed: {first}");
            }
        }
        end
    }
}

/// The state of a build, as text.
fn state_text(progress: &BTreeMap<String, Progress>, build: &str) -> String {
    let mut text = format!("build\t{build}\n");
    for (part, progress) in progress {
        let mut say = |line: &str| text.push_str(&format!("{part}\t{line}\n"));
        progress.done.iter().for_each(|r| say(&format!("done\t{}\t{}", r.start, r.end)));
        say(&format!("cpu_us\t{}", progress.cpu_us));
        progress.coverage.lines().iter().for_each(|line| say(line));
        for (seed, message) in &progress.failures {
            say(&format!("failed\t{seed}\t{message}"));
        }
    }
    text
}

/// What a state says that counts for this build, and how many seeds of another one were dropped.
/// Seeds that failed are kept, to be run again.
fn parse_state(text: &str, build: &str) -> (BTreeMap<String, Progress>, u64) {
    let is_same = text.lines().next() == Some(&*format!("build\t{build}"));
    let mut progress = BTreeMap::<String, Progress>::new();
    for (part, line) in text.lines().filter_map(|line| line.split_once('\t')) {
        if part != "build" {
            take_line(progress.entry(part.to_owned()).or_default(), line);
        }
    }
    let mut dropped = 0;
    for known in progress.values_mut().filter(|_| !is_same) {
        let failures = std::mem::take(&mut known.failures);
        dropped += known.count();
        *known = Progress { failures, ..Progress::default() };
    }
    (progress, dropped)
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
        ["failed", seed, message] => {
            progress.failures.insert(number(seed).unwrap_or(0), message.to_owned());
        }
        _ => _ = progress.coverage.add_line(line),
    }
}

/// What became of some seeds.
struct Taken {
    clean: bool,
    /// They have not run to their ends, through no fault of theirs.
    left: Vec<Range<u64>>,
}

/// What a process of some seeds left.
struct Said {
    text: String,
    finished: bool,
    /// The seed it was at.
    at: Option<u64>,
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
    let at = text.lines().rev().find_map(|line| line.strip_prefix("seed\t")?.parse().ok());
    Ok(Said { text, finished, at, end: status.to_string() })
}

/// The process of some seeds: runs them all and says what [`Soak`] understands.
pub fn chunk(scenario: Scenario, seeds: Range<u64>) {
    std::panic::set_hook(Box::new(|_| {}));
    let mut coverage = Coverage::default();
    for seed in seeds {
        println!("seed\t{seed}");
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
        assert!(progress.is_settled(149) && !progress.is_settled(150));
    }

    fn nothing(_: u64) -> crate::Outcome {
        crate::Outcome::default()
    }

    const PART: Part = Part {
        name: "part",
        scenario: nothing,
        percent: 100,
        seeds_min: 0,
        empty_cells: |_| Vec::new(),
    };

    fn soak_of(text: &str, build: &str) -> Soak {
        let (progress, _) = parse_state(text, build);
        let state = std::env::temp_dir().join(format!("levada-soak-test-{}", std::process::id()));
        let (build, progress) = (build.to_owned(), Mutex::new(progress));
        Soak { parts: &[PART], seeds: 25, state, build, progress }
    }

    fn chunks_of(soak: &Soak) -> Vec<Range<u64>> {
        soak.chunks().into_iter().map(|(_, seeds)| seeds).collect()
    }

    #[test]
    fn what_another_build_did_does_not_count_but_its_failures_come_first() {
        let mut progress = Progress::default();
        progress.finish(0..7);
        progress.finish(8..20);
        progress.failures.insert(7, "it broke".into());
        let text = state_text(&BTreeMap::from([("part".to_owned(), progress)]), "b1");
        assert_eq!(parse_state(&text, "b1").1, 0);
        assert_eq!(chunks_of(&soak_of(&text, "b1")), [7..8, 20..25]);
        assert_eq!(parse_state(&text, "b2").1, 19);
        assert_eq!(chunks_of(&soak_of(&text, "b2")), [7..8, 0..7, 8..10, 10..20, 20..25]);
    }

    #[test]
    fn a_seed_that_failed_is_not_done_until_it_ran_clean() {
        let soak = soak_of("", "b1");
        let said = |text: &str, finished| {
            let at = text.strip_prefix("seed\t").and_then(|at| at.parse().ok());
            Said { text: text.to_owned(), finished, at, end: "signal 9".into() }
        };
        let taken = soak.take(&PART, &(0..10), said("failed\t3\tit broke", true)).expect("saved");
        assert!(!taken.clean && taken.left.is_empty());
        assert_eq!(chunks_of(&soak), [3..4, 10..20, 20..25]);
        assert_eq!(soak.report(), End::Failed);
        // A process that dies tells which seed it was at.
        let taken = soak.take(&PART, &(10..20), said("seed\t12", false)).expect("saved");
        assert_eq!(taken.left, [10..12, 13..20]);
        assert_eq!(chunks_of(&soak), [3..4, 12..13, 10..12, 13..20, 20..25]);
        for seeds in [3..4, 12..13, 10..12, 13..20] {
            assert!(soak.take(&PART, &seeds, said("", true)).expect("saved").clean);
        }
        assert_eq!(soak.report(), End::Failed, "not all are done");
        assert!(soak.take(&PART, &(20..25), said("", true)).expect("saved").clean);
        assert_eq!(soak.report(), End::Clean);
        std::fs::remove_file(&soak.state).expect("it was saved");
    }
}
