//! The ends of files: what the metadata service is told after a close. Nobody waits for it, so several
//! files share a message, a transaction and a reply row.
//!
//! What always holds: what was given together is carried out together, in that order; a part that is
//! refused is answered to the one who gave it.

use crate::error::Error;
use crate::meta::Meta;
use levada_base::reactor;
use levada_base::sync::oneshot;
use levada_wire::meta::{MetaReply, MetaRequest, SEVERAL_MAX};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// How long the first one waits for company.
const GATHER: Duration = Duration::from_millis(1);

/// Requests of one giver, and where the answers go.
struct Given {
    requests: Vec<MetaRequest>,
    answer: oneshot::Sender<Result<Vec<MetaReply>, Error>>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Ends {
    waiting: RefCell<VecDeque<Given>>,
    sending: Cell<bool>,
}

impl Ends {
    /// Sends `requests` (`CommitWrite` and `Close`) with others'; an answer for each.
    pub(crate) async fn send(
        self: &Rc<Self>,
        meta: &Rc<Meta>,
        requests: Vec<MetaRequest>,
    ) -> Result<Vec<MetaReply>, Error> {
        let (answer, replies) = oneshot::channel();
        self.waiting.borrow_mut().push_back(Given { requests, answer });
        if !self.sending.replace(true) {
            let (ends, meta) = (Rc::clone(self), Rc::clone(meta));
            reactor::spawn(async move {
                reactor::sleep(GATHER).await;
                ends.sending.set(false);
                ends.send_waiting(&meta);
            });
        }
        replies.await.unwrap_or(Err(Error::Closed))
    }

    /// Messages with all that waits; they are under way side by side.
    fn send_waiting(&self, meta: &Rc<Meta>) {
        loop {
            let mut together: Vec<Given> = Vec::new();
            let mut count = 0;
            loop {
                let mut waiting = self.waiting.borrow_mut();
                let fits = |given: &Given| count + given.requests.len() <= SEVERAL_MAX;
                if !waiting.front().is_some_and(fits) {
                    break;
                }
                let given = waiting.pop_front().expect("looked at above");
                count += given.requests.len();
                together.push(given);
            }
            if together.is_empty() {
                return;
            }
            let meta = Rc::clone(meta);
            reactor::spawn(async move {
                let requests = together.iter().flat_map(|given| given.requests.clone()).collect();
                let outcome = match meta.change(MetaRequest::Several { requests }).await {
                    Ok(MetaReply::Several(replies)) if replies.len() == count => Ok(replies),
                    Ok(MetaReply::Failed(fault)) => Err(fault.into()),
                    Ok(_) => Err(Error::Dialect),
                    Err(error) => Err(error),
                };
                let mut replies = outcome.as_ref().map(|replies| replies.iter().cloned());
                for given in together {
                    let own = match &mut replies {
                        Ok(replies) => Ok(replies.take(given.requests.len()).collect()),
                        Err(error) => Err(**error),
                    };
                    given.answer.send(own);
                }
            });
        }
    }
}
