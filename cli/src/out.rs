//! What commands print. A reader that went away (`| head`) is no reason to stop halfway through
//! bringing a cluster up, and not worth a word; a full disk behind `>` is.

use std::io::{ErrorKind, Write};

/// Prints a line on standard output, as `println!` does, but bears a reader that went away.
macro_rules! say {
    ($($text:tt)*) => { $crate::out::print(&format!("{}\n", format_args!($($text)*))) };
}
pub(crate) use say;

/// Prints text as it is; ends the program when it cannot be written.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        Err(error) => {
            eprintln!("levada: cannot write the output: {error}");
            std::process::exit(1);
        }
    }
}

/// An error and what lies behind it, without what is said already.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for part in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = part;
        } else if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::chain;
    use anyhow::Context;

    #[test]
    fn nothing_is_said_twice() {
        let error = Err::<(), _>(anyhow::anyhow!("no space")).context("cannot write x: no space");
        let error = error.context("cannot bring it up").expect_err("an error");
        assert_eq!(chain(&error), "cannot bring it up: cannot write x: no space");
    }
}
