//! The status over HTTP, as enclosures show it: `GET /` or `GET /bays`, answered with JSON.
//!
//! One request for each connection; whoever sends anything else is told so. There is nothing to choose by a query, and it is passed over.

use crate::enclosure::Enclosure;
use futures_util::future::{Either, select};
use levada_base::reactor::net::{Listener, Stream};
use levada_base::reactor::{self, Group};
use levada_base::stream::{ByteStream, Clients, Present};
use levada_base::{Buf, BufMut};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

const HEAD_BYTES_MAX: usize = 8 << 10;
const HEADERS_MAX: usize = 32;
const CLIENTS_MAX: usize = 64;
const LIMIT: Duration = Duration::from_secs(5);

/// Answers whoever comes, by tasks of `group`.
pub(crate) fn serve(listener: Listener, enclosure: Rc<Enclosure>, group: &Group) {
    let tasks = group.clone();
    reactor::spawn_in(group, async move {
        let clients = Clients::new(CLIENTS_MAX);
        let answer = |present: Present, stream: Stream| {
            let enclosure = Rc::clone(&enclosure);
            reactor::spawn_in(&tasks, async move {
                let answered = reactor::timeout(LIMIT, answer(&stream, &enclosure));
                // None stays: who is displaced has had its time.
                match select(pin!(answered), pin!(present.displaced())).await {
                    Either::Left((Ok(Err(error)), _)) => {
                        tracing::debug!(%error, "a program that watches went away");
                    }
                    Either::Left((Ok(Ok(())) | Err(_), _)) | Either::Right(_) => {}
                }
                stream.close().await;
            });
        };
        clients.accept_all(listener, "a program that watches", answer).await;
    });
}

async fn answer(stream: &Stream, enclosure: &Enclosure) -> io::Result<()> {
    let mut head: Vec<u8> = Vec::new();
    let (is_head, (status, body)) = loop {
        let (more, bytes) = stream.read(BufMut::for_overwrite(HEAD_BYTES_MAX)).await?;
        head.extend_from_slice(&more[..bytes]);
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&head) {
            Ok(httparse::Status::Complete(_)) => {
                break (request.method == Some("HEAD"), answer_to(&request, enclosure));
            }
            Ok(httparse::Status::Partial) if bytes > 0 && head.len() < HEAD_BYTES_MAX => {}
            _ => break (false, ("400 Bad Request", wrong("no request of HTTP, or a long one"))),
        }
    };
    let text = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nAllow: GET, HEAD\r\nConnection: close\r\n\r\n{}",
        body.len(),
        if is_head { "" } else { &body }
    );
    stream.write_all(Buf::copy_of(text.as_bytes()).into_vec()).await
}

fn answer_to(request: &httparse::Request<'_, '_>, enclosure: &Enclosure) -> (&'static str, String) {
    let status = enclosure.status();
    let path = request.path.and_then(|path| path.split('?').next());
    if !matches!(request.method, Some("GET" | "HEAD")) {
        return (
            "405 Method Not Allowed",
            wrong("it is only looked at here; `levada enclosure` orders"),
        );
    }
    let bay = |number: &str| {
        let number: u32 = number.parse().ok()?;
        status.bays.iter().find(|bay| bay.bay == number)
    };
    let body = match path {
        Some("/") => serde_json::to_string(&status),
        Some("/bays") => serde_json::to_string(&status.bays),
        Some(path) => match path.strip_prefix("/bays/").and_then(bay) {
            Some(bay) => serde_json::to_string(bay),
            None => {
                return (
                    "404 Not Found",
                    wrong("there are /, /bays and, of each bay, /bays/NUMBER"),
                );
            }
        },
        None => return ("400 Bad Request", wrong("no path")),
    };
    // Plain numbers and texts.
    ("200 OK", body.unwrap_or_default())
}

fn wrong(why: &str) -> String {
    serde_json::json!({ "error": why }).to_string()
}
