//! Addresses of names, without standing still.
//!
//! The resolver of the system blocks for as long as the servers that it asks are out of reach, and nothing else would be done meanwhile: no sign
//! of life sent to other targets, for one. So a thread asks it, and is not waited for longer than a name may take.

use levada_base::reactor;
use std::cell::Cell;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// A name may take so long.
const LIMIT: Duration = Duration::from_secs(3);

/// Where a path leads to. A name stands for the first of its addresses, from the time on that it could be looked up.
pub(crate) struct Place {
    host: String,
    port: u16,
    address: Cell<Option<SocketAddr>>,
}

impl Place {
    pub fn new((host, port): &(String, u16)) -> Self {
        Self { host: host.clone(), port: *port, address: Cell::default() }
    }

    /// Its address.
    pub async fn find(&self) -> io::Result<SocketAddr> {
        let address = match self.address.get() {
            Some(known) => known,
            None => address(&self.host, self.port, look_up).await?,
        };
        self.address.set(Some(address));
        Ok(address)
    }
}

impl From<SocketAddr> for Place {
    fn from(address: SocketAddr) -> Self {
        let (host, port) = (address.ip().to_string(), address.port());
        Self { host, port, address: Cell::new(Some(address)) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address.get() {
            Some(address) => address.fmt(f),
            None => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

fn look_up(host: &str, port: u16) -> io::Result<Option<SocketAddr>> {
    (host, port).to_socket_addrs().map(|mut found| found.next())
}

async fn address(
    host: &str,
    port: u16,
    look_up: fn(&str, u16) -> io::Result<Option<SocketAddr>>,
) -> io::Result<SocketAddr> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok((ip, port).into());
    }
    let host = host.to_owned();
    let asking = reactor::aside("resolver", move || look_up(&host, port));
    let Ok(answered) = reactor::timeout(LIMIT, asking).await else {
        let told = format!("no answer from the resolver within {} s", LIMIT.as_secs());
        return Err(io::Error::new(io::ErrorKind::TimedOut, told));
    };
    answered??.ok_or_else(|| io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use std::thread::sleep;

    #[test]
    fn a_resolver_that_does_not_answer_holds_nothing_up() {
        Reactor::new().expect("io_uring").block_on(async {
            let begun = reactor::now();
            let slow = reactor::spawn(address("slow.example", 1, |_, _| {
                sleep(LIMIT * 2);
                Ok(None)
            }));
            reactor::sleep(Duration::from_millis(10)).await;
            let known = |_: &str, port| Ok(Some(SocketAddr::from(([192, 0, 2, 1], port))));
            let found = address("known.example", 2, known).await.expect("it is known");
            assert_eq!(found, "192.0.2.1:2".parse().expect("an address"));
            let literal = address("::1", 3, |_, _| panic!("nobody need be asked")).await;
            assert_eq!(literal.expect("as it is"), "[::1]:3".parse().expect("an address"));
            assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
            let error = slow.await.expect("it ends").expect_err("nothing came");
            assert_eq!(error.to_string(), "no answer from the resolver within 3 s");
            assert!(begun.elapsed() < LIMIT * 2);
        });
    }
}
