//! A program that locks what it is told to, in a process of its own: this test binary, started again.
//!
//! It takes commands line by line: `flock|posix|posix2|ofd w|r|u [start len] [wait]`, `test w|r start len`, `reopen`
//! (opens the file once more and closes that), `close`, `second` (opens the file of that name beside it),
//! `alarm once|restart` (SIGALRM after half a second, with a handler), `fork [wants posix]`.
//! It answers each with `ok` or the name of an error number.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const PATH: &str = "LEVADA_LOCK_PROGRAM";
/// Answers begin so, as the test harness writes there too.
const MARK: &str = "> ";

pub fn errno<T>(result: Result<T, i32>) -> Option<i32> {
    result.err()
}

fn status(status: i32) -> Result<(), i32> {
    if status == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().raw_os_error().unwrap()) }
}

pub fn flock(file: &File, how: i32) -> Result<(), i32> {
    // SAFETY: an open descriptor.
    status(unsafe { libc::flock(file.as_raw_fd(), how) })
}

fn request(kind: i32, start: i64, len: i64) -> libc::flock {
    // SAFETY: plain integers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    (lock.l_start, lock.l_len) = (start, len);
    lock
}

pub fn fcntl_lock(file: &File, how: i32, kind: i32, start: i64, len: i64) -> Result<(), i32> {
    let lock = request(kind, start, len);
    // SAFETY: an open descriptor and a valid request.
    status(unsafe { libc::fcntl(file.as_raw_fd(), how, &lock) })
}

fn kind_of(word: &str) -> i32 {
    match word {
        "w" => libc::F_WRLCK,
        "r" => libc::F_RDLCK,
        _ => libc::F_UNLCK,
    }
}

/// What a started program does; returns at once in every other process.
pub fn run() {
    let Some(path) = std::env::var_os(PATH).map(PathBuf::from) else { return };
    let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path).unwrap();
    let (mut file, mut second) = (Some(open(&path)), None);
    println!("\n{MARK}ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<i64> = words.iter().filter_map(|word| word.parse().ok()).collect();
        let (start, len) = match numbers[..] {
            [start, len] => (start, len),
            _ => (0, 0),
        };
        let waits = words.last() == Some(&"wait");
        let said = match words[0] {
            "flock" => {
                let how = match words[1] {
                    "w" => libc::LOCK_EX,
                    "r" => libc::LOCK_SH,
                    _ => libc::LOCK_UN,
                };
                flock(file.as_ref().unwrap(), if waits { how } else { how | libc::LOCK_NB })
            }
            "posix" | "posix2" | "ofd" => {
                let how = match (words[0], waits) {
                    ("ofd", false) => libc::F_OFD_SETLK,
                    ("ofd", true) => libc::F_OFD_SETLKW,
                    (_, false) => libc::F_SETLK,
                    (_, true) => libc::F_SETLKW,
                };
                let file = if words[0] == "posix2" { &second } else { &file };
                fcntl_lock(file.as_ref().unwrap(), how, kind_of(words[1]), start, len)
            }
            "test" => {
                let mut lock = request(kind_of(words[1]), start, len);
                let fd = file.as_ref().unwrap().as_raw_fd();
                // SAFETY: an open descriptor and a valid request.
                status(unsafe { libc::fcntl(fd, libc::F_GETLK, &raw mut lock) }).unwrap();
                let (start, len) = (lock.l_start, lock.l_len);
                match i32::from(lock.l_type) {
                    libc::F_UNLCK => println!("{MARK}u"),
                    libc::F_WRLCK => println!("{MARK}w {start} {len} {}", lock.l_pid),
                    _ => println!("{MARK}r {start} {len} {}", lock.l_pid),
                }
                continue;
            }
            "reopen" => {
                drop(open(&path));
                Ok(())
            }
            "close" => {
                file = None;
                Ok(())
            }
            "second" => {
                second = Some(open(&path.with_file_name("second")));
                Ok(())
            }
            "alarm" => {
                alarm(words[1] == "restart");
                Ok(())
            }
            "fork" => fork(file.as_ref().unwrap(), words.len() > 1),
            other => panic!("{other}"),
        };
        println!("{MARK}{}", said.err().map_or("ok".to_owned(), name_of));
    }
}

fn name_of(errno: i32) -> String {
    match errno {
        libc::EAGAIN => "EAGAIN".to_owned(),
        libc::EINTR => "EINTR".to_owned(),
        libc::EDEADLK => "EDEADLK".to_owned(),
        other => other.to_string(),
    }
}

extern "C" fn ignore(_signal: i32) {}

/// SIGALRM in half a second, for this thread: the others of the test harness keep it blocked.
fn alarm(restart: bool) {
    // SAFETY: a handler that does nothing; sets of signals that are valid.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as extern "C" fn(i32) as usize;
        action.sa_flags = if restart { libc::SA_RESTART } else { 0 };
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
        let thread = libc::pthread_self();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(500));
            libc::pthread_kill(thread, libc::SIGALRM);
        });
    }
}

/// A child that ends at once, or asks for the father's lock first.
fn fork(file: &File, wants: bool) -> Result<(), i32> {
    let lock = request(libc::F_WRLCK, 0, 0);
    // SAFETY: the child makes system calls only.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            let refused = wants && libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &lock) != 0;
            libc::_exit(if refused { *libc::__errno_location() } else { 0 });
        }
    }
    let mut ended = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut ended, 0) }, child);
    match libc::WEXITSTATUS(ended) {
        0 => Ok(()),
        errno => Err(errno),
    }
}

/// A started program.
pub struct Program {
    child: Child,
    answers: mpsc::Receiver<String>,
}

impl Program {
    /// On the file at `path`, which it has open.
    pub fn start(path: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "locks::program", "--nocapture", "--test-threads=1"])
            .env(PATH, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, answers) = mpsc::channel();
        let said = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix(MARK)
                    && sender.send(answer.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        let mut started = Self { child, answers };
        let ready = started.answer_within(Duration::from_secs(20));
        assert_eq!(ready.as_deref(), Some("ready"));
        started
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    pub fn answer_within(&mut self, limit: Duration) -> Option<String> {
        self.answers.recv_timeout(limit).ok()
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer_within(Duration::from_secs(20)).expect(command)
    }

    /// SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}
