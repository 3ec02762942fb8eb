//! Addresses of names, without standing still.
//!
//! The resolver of the system blocks for as long as the servers that it asks are out of reach, and nothing else would be done meanwhile: no sign
//! of life sent to other targets, for one. So a thread asks it, and is not waited for longer than a name may take. A question goes on until it
//! is answered, and whoever asks the same meanwhile waits for that answer: otherwise there would be more and more threads.

use futures_util::future::{FutureExt, LocalBoxFuture, Shared};
use levada_base::reactor;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::rc::Rc;
use std::time::Duration;

/// A name may take so long.
const LIMIT: Duration = Duration::from_secs(3);

/// The first address of a host with a port, from whoever knows it.
type LookUp = fn(&str, u16) -> io::Result<Option<SocketAddr>>;
/// With why not, as an error of the system cannot be told twice.
type Answer = Result<Option<SocketAddr>, (io::ErrorKind, String)>;
type Question = Shared<LocalBoxFuture<'static, Answer>>;

/// What is being asked. Clones are the same; of one reactor.
#[derive(Clone)]
pub struct Resolver {
    look_up: LookUp,
    asked: Rc<RefCell<BTreeMap<(String, u16), Question>>>,
}

impl Default for Resolver {
    /// That of the system.
    fn default() -> Self {
        Self::by(|host, port| (host, port).to_socket_addrs().map(|mut all| all.next()))
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").field("asked", &self.asked.borrow().len()).finish()
    }
}

impl Resolver {
    fn by(look_up: LookUp) -> Self {
        Self { look_up, asked: Rc::default() }
    }

    /// The question, as somebody has asked it already, or that begins now.
    fn question(&self, place: &(String, u16)) -> Question {
        let mut asked = self.asked.borrow_mut();
        let question = asked.entry(place.clone()).or_insert_with(|| {
            let (look_up, (host, port)) = (self.look_up, place.clone());
            let asking = reactor::aside("resolver", move || look_up(&host, port));
            let told = |error: io::Error| (error.kind(), error.to_string());
            let answer = async move { asking.await.map_err(told)?.map_err(told) };
            answer.boxed_local().shared()
        });
        question.clone()
    }

    async fn find(&self, host: &str, port: u16) -> io::Result<SocketAddr> {
        let place = (host.to_owned(), port);
        let asked = self.question(&place);
        let Ok(answered) = reactor::timeout(LIMIT, asked).await else {
            let told = format!("no answer from the resolver within {} s", LIMIT.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, told));
        };
        // It is asked again when it is needed again.
        self.asked.borrow_mut().remove(&place);
        let found = answered.map_err(|(kind, why)| io::Error::new(kind, why))?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Where a path leads to. A name stands for the first of its addresses, as it was looked up last.
pub(crate) struct Place {
    host: String,
    port: u16,
    is_name: bool,
    address: Cell<Option<SocketAddr>>,
    is_in_doubt: Cell<bool>,
}

impl Place {
    pub fn new((host, port): &(String, u16)) -> Self {
        let literal = host.parse::<IpAddr>().ok().map(|ip| (ip, *port).into());
        Self {
            host: host.clone(),
            port: *port,
            is_name: literal.is_none(),
            address: Cell::new(literal),
            is_in_doubt: Cell::new(literal.is_none()),
        }
    }

    /// Its address. Who knew it before is believed where the resolver knows nothing now.
    pub async fn find(&self, resolver: &Resolver) -> io::Result<SocketAddr> {
        if self.is_in_doubt.get() {
            match (resolver.find(&self.host, self.port).await, self.address.get()) {
                (Ok(found), _) => {
                    self.address.set(Some(found));
                    self.is_in_doubt.set(false);
                }
                (Err(_), Some(_)) => {}
                (Err(error), None) => return Err(error),
            }
        }
        Ok(self.address.get().expect("it is known, or was just found"))
    }

    /// Nobody who was sought answers there: a name is looked up again, as it may stand for another address by now.
    pub fn doubt(&self) {
        self.is_in_doubt.set(self.is_name);
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
    use futures_util::future::join;
    use levada_base::reactor::Reactor;
    use std::thread::sleep;

    fn place(host: &str, port: u16) -> Place {
        Place::new(&(host.to_owned(), port))
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_resolver_that_does_not_answer_holds_nothing_up() {
        Reactor::new().expect("io_uring").block_on(async {
            let begun = reactor::now();
            let resolver = Resolver::by(|host, port| match host {
                "slow.example" => {
                    sleep(LIMIT + Duration::from_secs(1));
                    Ok(Some(SocketAddr::from(([192, 0, 2, 9], port))))
                }
                "known.example" => Ok(Some(SocketAddr::from(([192, 0, 2, 1], port)))),
                _ => Ok(None),
            });
            let slow = reactor::spawn({
                let resolver = resolver.clone();
                async move {
                    let [one, other] = ["slow.example"; 2].map(|host| place(host, 1));
                    let error = one.find(&resolver).await.expect_err("nothing came");
                    assert_eq!(error.to_string(), "no answer from the resolver within 3 s");
                    // What was asked is not asked again, by nobody: that would take longer.
                    let found = join(other.find(&resolver), one.find(&resolver)).await;
                    for found in [found.0, found.1] {
                        assert_eq!(found.expect("late"), address("192.0.2.9:1"));
                    }
                    assert!(resolver.asked.borrow().is_empty());
                }
            });
            reactor::sleep(Duration::from_millis(10)).await;
            let known = place("known.example", 2);
            assert_eq!(known.to_string(), "known.example:2");
            assert_eq!(known.find(&resolver).await.expect("it is known"), address("192.0.2.1:2"));
            assert_eq!(known.to_string(), "192.0.2.1:2");
            let nobody = Resolver::by(|_, _| panic!("nobody need be asked"));
            let literal = place("::1", 3).find(&nobody).await;
            assert_eq!(literal.expect("as it is"), address("[::1]:3"));
            let none = place("nobody.example", 4).find(&resolver).await;
            assert_eq!(none.expect_err("none").kind(), io::ErrorKind::NotFound);
            a_name_in_doubt_is_looked_up_again().await;
            assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
            slow.await;
            assert!(begun.elapsed() < LIMIT * 2);
        });
    }

    /// It moved, and stays where it was last seen while the resolver knows nothing.
    async fn a_name_in_doubt_is_looked_up_again() {
        let first = Resolver::by(|_, port| Ok(Some(SocketAddr::from(([192, 0, 2, 1], port)))));
        let second = Resolver::by(|_, port| Ok(Some(SocketAddr::from(([192, 0, 2, 2], port)))));
        let away = Resolver::by(|_, _| Err(io::ErrorKind::NetworkUnreachable.into()));
        let moving = place("moving.example", 5);
        for (resolver, found) in [
            (&first, "192.0.2.1:5"),
            // Nobody doubts it.
            (&second, "192.0.2.1:5"),
        ] {
            assert_eq!(moving.find(resolver).await.expect("it is known"), address(found));
        }
        for (resolver, found) in [(&away, "192.0.2.1:5"), (&second, "192.0.2.2:5")] {
            moving.doubt();
            assert_eq!(moving.find(resolver).await.expect("it is known"), address(found));
        }
        let literal = place("192.0.2.3", 6);
        literal.doubt();
        assert_eq!(literal.find(&away).await.expect("as it is"), address("192.0.2.3:6"));
    }
}
