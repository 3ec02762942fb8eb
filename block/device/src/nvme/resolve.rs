//! Addresses of names, without standing still.
//!
//! The resolver of the system blocks for as long as the servers that it asks are out of reach, and nothing else would be done meanwhile: no sign
//! of life sent to other targets, for one. So a thread asks it, and is not waited for longer than a name may take.

use futures_util::future::LocalBoxFuture;
use levada_base::reactor;
use std::cell::Cell;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// A name may take so long.
const LIMIT: Duration = Duration::from_secs(3);

/// The addresses of a host with a port, from whoever knows them.
type LookUp = fn(&str, u16) -> io::Result<Option<SocketAddr>>;
type Answer = io::Result<io::Result<Option<SocketAddr>>>;

/// Where a path leads to. A name stands for the first of its addresses, from the time on that it could be looked up.
pub(crate) struct Place {
    host: String,
    port: u16,
    look_up: LookUp,
    address: Cell<Option<SocketAddr>>,
    /// A question that nobody waits for just now: with a resolver that does not answer, each would be a thread.
    asked: Cell<Option<LocalBoxFuture<'static, Answer>>>,
}

impl Place {
    pub fn new((host, port): &(String, u16)) -> Self {
        Self::by(host, *port, |host, port| (host, port).to_socket_addrs().map(|mut all| all.next()))
    }

    fn by(host: &str, port: u16, look_up: LookUp) -> Self {
        let address = host.parse::<IpAddr>().ok().map(|ip| (ip, port).into());
        let (host, address, asked) = (host.to_owned(), Cell::new(address), Cell::default());
        Self { host, port, look_up, address, asked }
    }

    /// Its address.
    pub async fn find(&self) -> io::Result<SocketAddr> {
        if let Some(known) = self.address.get() {
            return Ok(known);
        }
        let mut asked = self.asked.take().unwrap_or_else(|| self.ask());
        let Ok(answered) = reactor::timeout(LIMIT, &mut asked).await else {
            self.asked.set(Some(asked));
            let told = format!("no answer from the resolver within {} s", LIMIT.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, told));
        };
        self.address.set(answered??);
        self.address.get().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn ask(&self) -> LocalBoxFuture<'static, Answer> {
        let (host, port, look_up) = (self.host.clone(), self.port, self.look_up);
        Box::pin(reactor::aside("resolver", move || look_up(&host, port)))
    }
}

impl From<SocketAddr> for Place {
    fn from(address: SocketAddr) -> Self {
        Self::new(&(address.ip().to_string(), address.port()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use std::thread::sleep;

    #[test]
    fn a_resolver_that_does_not_answer_holds_nothing_up() {
        Reactor::new().expect("io_uring").block_on(async {
            let begun = reactor::now();
            let slow = reactor::spawn(async {
                let slow = Place::by("slow.example", 1, |_, port| {
                    sleep(LIMIT + Duration::from_secs(1));
                    Ok(Some(SocketAddr::from(([192, 0, 2, 9], port))))
                });
                let error = slow.find().await.expect_err("nothing came");
                assert_eq!(error.to_string(), "no answer from the resolver within 3 s");
                // What was asked is not asked again: that would take longer.
                assert_eq!(slow.find().await.expect("late"), address("192.0.2.9:1"));
            });
            reactor::sleep(Duration::from_millis(10)).await;
            let known = Place::by("known.example", 2, |_, port| {
                Ok(Some(SocketAddr::from(([192, 0, 2, 1], port))))
            });
            assert_eq!(known.to_string(), "known.example:2");
            assert_eq!(known.find().await.expect("it is known"), address("192.0.2.1:2"));
            assert_eq!(known.to_string(), "192.0.2.1:2");
            let literal = Place::by("::1", 3, |_, _| panic!("nobody need be asked"));
            assert_eq!(literal.find().await.expect("as it is"), address("[::1]:3"));
            let nobody = Place::by("nobody.example", 4, |_, _| Ok(None));
            assert_eq!(nobody.find().await.expect_err("none").kind(), io::ErrorKind::NotFound);
            assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
            slow.await;
            assert!(begun.elapsed() < LIMIT * 2);
        });
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }
}
