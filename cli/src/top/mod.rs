//! `top`: what a node does now, looked at again and again. Rates are differences of two looks; the node keeps
//! nothing for its viewers.

mod draw;
mod rates;

use crate::out::{print, say};
use crate::{mount, place};
use anyhow::{Context, Result, bail};
use clap::Args;
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::{cursor, execute, queue, style, terminal};
use draw::View;
use levada_node::control::{self, ControlReply, ControlRequest};
use levada_node::meters::Meters;
use levada_node::state::StateDir;
use rates::Rates;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

const INTERVAL_MIN: Duration = Duration::from_millis(100);
const INTERVAL_MAX: Duration = Duration::from_secs(3600);

#[derive(Args)]
#[command(
    after_help = "Keys: q ends it; s sorts by name, rate or 99th percentile; t, k, m and d hide and show targets, kinds \
    of requests, mounts and drives.\nWhere the output is no terminal, a screen follows the other."
)]
pub struct TopArgs {
    /// Seconds from look to look, or with a unit: 500ms, 2s, 1m
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Look twice, tell what happened in between, and end
    #[arg(long)]
    once: bool,
    /// A line of JSON for each look
    #[arg(long)]
    json: bool,
}

/// `2`, `2s`, `500ms`, `1m`.
fn interval(text: &str) -> Result<Duration, String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().map_err(|_| "not a number of seconds".to_owned())?;
    let seconds = match &text[end..] {
        "" | "s" => number,
        "ms" => number / 1e3,
        "m" => number * 60.0,
        unit => return Err(format!("no unit {unit:?}; there are ms, s and m")),
    };
    let duration = Duration::try_from_secs_f64(seconds).map_err(|_| "too long".to_owned())?;
    if !(INTERVAL_MIN..=INTERVAL_MAX).contains(&duration) {
        return Err("from 100ms to 60m".to_owned());
    }
    Ok(duration)
}

/// Shows what a node does until it is told to end.
pub fn top(file: Option<&Path>, args: &TopArgs) -> Result<()> {
    let loaded = place::load(file)?;
    let state = place::state(&loaded);
    // One that is not up is an error; one that goes away while it is watched is waited for.
    let first = look(&state)?;
    if std::io::stdout().is_terminal() && !args.once && !args.json {
        return watch(&state, first, args.interval);
    }
    follow(&state, first, args)
}

fn look(state: &StateDir) -> Result<Meters> {
    let reply = control::ask(&state.control_socket(), &ControlRequest::Meters)?;
    let ControlReply::Meters(mut meters) = reply else {
        bail!("the node gave another answer than its meters");
    };
    meters.mounts = mount::meters(state);
    Ok(*meters)
}

/// One look after the other, as text.
fn follow(state: &StateDir, first: Meters, args: &TopArgs) -> Result<()> {
    let mut before = first;
    let mut is_away = false;
    loop {
        std::thread::sleep(args.interval);
        let now = match look(state) {
            Ok(now) => now,
            Err(error) if args.once => return Err(error),
            Err(error) => {
                if !std::mem::replace(&mut is_away, true) {
                    eprintln!("levada: {}", crate::out::chain(&error));
                }
                continue;
            }
        };
        is_away = false;
        // After a restart of the node the next look tells.
        if let Some(rates) = Rates::between(&before, &now) {
            match args.json {
                true => say!("{}", serde_json::to_string(&rates)?),
                false => print(&draw::render(&rates, View::default())),
            }
            if args.once {
                return Ok(());
            }
            if !args.json {
                say!("");
            }
        }
        before = now;
    }
}

/// On a terminal, until `q`.
fn watch(state: &StateDir, first: Meters, every: Duration) -> Result<()> {
    let screen = Screen::open().context("cannot use the terminal")?;
    let (mut before, mut view) = (Some(first), View::default());
    let mut shown: Option<Rates> = None;
    let mut notice = format!("looking again in {:.1} s", every.as_secs_f64());
    let mut next = Instant::now() + every;
    loop {
        let text = shown.as_ref().map_or(String::new(), |rates| draw::render(rates, view));
        screen.show(&text, &notice)?;
        let left = next.saturating_duration_since(Instant::now());
        if event::poll(left)? {
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => match wanted(key) {
                    Wanted::End => return Ok(()),
                    Wanted::Change(change) => change(&mut view),
                    Wanted::Nothing => {}
                },
                _ => {}
            }
            continue;
        }
        next = Instant::now() + every;
        match look(state) {
            Ok(now) => {
                let rates = before.as_ref().and_then(|before| Rates::between(before, &now));
                notice = match rates {
                    Some(_) => String::new(),
                    None => "the node was started anew".to_owned(),
                };
                shown = rates.or(shown);
                before = Some(now);
            }
            Err(error) => notice = crate::out::chain(&error),
        }
    }
}

/// What a key means.
enum Wanted {
    End,
    Change(fn(&mut View)),
    Nothing,
}

fn wanted(key: KeyEvent) -> Wanted {
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c' | 'd') if is_control => Wanted::End,
        KeyCode::Char('q') | KeyCode::Esc => Wanted::End,
        KeyCode::Char('s') => Wanted::Change(|view| view.sort = view.sort.next()),
        KeyCode::Char('t') => Wanted::Change(|view| view.targets = !view.targets),
        KeyCode::Char('k') => Wanted::Change(|view| view.kinds = !view.kinds),
        KeyCode::Char('m') => Wanted::Change(|view| view.mounts = !view.mounts),
        KeyCode::Char('d') => Wanted::Change(|view| view.drives = !view.drives),
        _ => Wanted::Nothing,
    }
}

/// The terminal as a screen of our own; given back when this goes.
struct Screen;

impl Screen {
    fn open() -> std::io::Result<Self> {
        terminal::enable_raw_mode()?;
        // From here on it is given back, whatever fails.
        let screen = Self;
        execute!(std::io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(screen)
    }

    fn show(&self, text: &str, notice: &str) -> std::io::Result<()> {
        let (width, height) = terminal::size()?;
        let mut out = std::io::stdout().lock();
        queue!(out, cursor::MoveTo(0, 0))?;
        let lines = text.lines().chain([notice]).take(height.into());
        for (row, line) in (0..).zip(lines) {
            let line: String = line.chars().take(width.into()).collect();
            let end = terminal::Clear(terminal::ClearType::UntilNewLine);
            queue!(out, cursor::MoveTo(0, row), style::Print(line), end)?;
        }
        queue!(out, terminal::Clear(terminal::ClearType::FromCursorDown))?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Nothing is left to do about a terminal that is gone.
        let _ = execute!(std::io::stdout(), cursor::Show, terminal::LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_read_and_bounded() {
        let read = |text| interval(text).map(|duration| duration.as_millis());
        for (text, ms) in
            [("1", 1000), ("2s", 2000), ("500ms", 500), ("1.5s", 1500), ("1m", 60_000)]
        {
            assert_eq!(read(text), Ok(ms), "{text}");
        }
        for text in ["", "s", "0", "1h", "99m", "-1", "1..2", "50ms", "1e9"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn keys_change_what_is_shown() {
        let mut view = View::default();
        for (key, is_shown) in [('t', false), ('t', true), ('k', false), ('m', false), ('d', false)]
        {
            let Wanted::Change(change) = wanted(KeyCode::Char(key).into()) else { panic!("{key}") };
            change(&mut view);
            let shown = match key {
                't' => view.targets,
                'k' => view.kinds,
                'm' => view.mounts,
                _ => view.drives,
            };
            assert_eq!(shown, is_shown, "{key}");
        }
        assert!(matches!(wanted(KeyCode::Char('q').into()), Wanted::End));
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(matches!(wanted(interrupt), Wanted::End));
        assert!(matches!(wanted(KeyCode::Char('x').into()), Wanted::Nothing));
    }
}
