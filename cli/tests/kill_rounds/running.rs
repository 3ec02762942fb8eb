//! Programs at work: a thread each, stopped between two steps for a check.

use crate::programs::Program;
use crate::random::Random;
use anyhow::{Context, Result, anyhow, bail};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// A program that has not come to its next step by then hangs.
const STEP_LIMIT: Duration = Duration::from_secs(100);
/// Programs think for a moment, or the machine's cores would only serve them.
const PACE: Duration = Duration::from_micros(500);

enum Order {
    Check,
    End,
}

struct Worker {
    name: &'static str,
    orders: Sender<Order>,
    answers: Receiver<Result<()>>,
    steps: Arc<AtomicU64>,
    thread: Option<JoinHandle<Box<dyn Program>>>,
}

pub struct Running {
    workers: Vec<Worker>,
}

impl Running {
    pub fn start(programs: Vec<Box<dyn Program>>, random: &mut Random) -> Self {
        let workers = programs.into_iter().map(|program| start(program, random.next())).collect();
        Self { workers }
    }

    /// Steps that each program has done.
    pub fn steps(&self) -> Vec<u64> {
        self.workers.iter().map(|worker| worker.steps.load(Ordering::Relaxed)).collect()
    }

    /// Has every program check what was acknowledged to it, and go on.
    pub fn check(&mut self) -> Result<()> {
        self.order(|| Order::Check)
    }

    /// Has every program check for the last time and close what it has open.
    pub fn end(self) -> Result<Vec<Box<dyn Program>>> {
        self.order(|| Order::End)?;
        let join = |mut worker: Worker| {
            let thread = worker.thread.take().context("ended twice")?;
            thread.join().map_err(|_| anyhow!("{} panicked", worker.name))
        };
        self.workers.into_iter().map(join).collect()
    }

    /// Lets go of programs whose mount is gone: each ends with its step, whatever comes of it.
    /// One that found wrong contents before says so.
    pub fn abandon(self) -> Result<Vec<Box<dyn Program>>> {
        let mut programs = Vec::new();
        for Worker { name, orders, answers, thread, .. } in self.workers {
            drop(orders);
            let thread = thread.context("ended twice")?;
            programs.push(thread.join().map_err(|_| anyhow!("{name} panicked"))?);
            match answers.try_recv() {
                // What a mount that is gone answers.
                Ok(Err(error)) if is_of_the_system(&error) => {}
                Ok(Err(error)) => return Err(error.context(name)),
                _ => {}
            }
        }
        Ok(programs)
    }

    fn order(&self, order: impl Fn() -> Order) -> Result<()> {
        for worker in &self.workers {
            // One that ended early left its error as its answer.
            let _ = worker.orders.send(order());
        }
        let mut problems = Vec::new();
        for worker in &self.workers {
            match worker.answers.recv_timeout(STEP_LIMIT) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => problems.push(format!("{}: {error:#}", worker.name)),
                Err(RecvTimeoutError::Timeout) => problems.push(format!("{} hangs", worker.name)),
                Err(RecvTimeoutError::Disconnected) => {
                    problems.push(format!("{} panicked", worker.name));
                }
            }
        }
        if problems.is_empty() {
            return Ok(());
        }
        bail!("{}", problems.join("\n  "))
    }
}

fn is_of_the_system(error: &anyhow::Error) -> bool {
    let cause = error.root_cause();
    cause.is::<std::io::Error>() || cause.is::<rustix::io::Errno>()
}

fn start(mut program: Box<dyn Program>, seed: u64) -> Worker {
    let (orders, ordered) = channel();
    let (answer, answers) = channel();
    let steps = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&steps);
    let name = program.name();
    let thread = std::thread::spawn(move || {
        let mut random = Random::new(seed);
        loop {
            let result = match ordered.try_recv() {
                Err(TryRecvError::Disconnected) => return program,
                Err(TryRecvError::Empty) => match program.step(&mut random) {
                    Ok(()) => {
                        counted.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(PACE);
                        continue;
                    }
                    // Whoever asks next hears of it; nothing is done after an error.
                    error => error,
                },
                Ok(Order::Check) => program.check(),
                Ok(Order::End) => {
                    let checked = program.check();
                    program.close();
                    let _ = answer.send(checked);
                    return program;
                }
            };
            let failed = result.is_err();
            let _ = answer.send(result);
            if failed {
                return program;
            }
        }
    });
    Worker { name, orders, answers, steps, thread: Some(thread) }
}
