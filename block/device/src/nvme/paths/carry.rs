//! Where a command goes: on one path after the other, until one answers.

use super::super::controller::{ConnectError, Controller};
use super::super::options::Network;
use super::super::order::{Order, OrderError};
use super::super::queue::{Answered, Request, Unanswered, while_open};
use super::super::verdict::Verdict;
use super::{AGAIN_FIRST, AGAIN_MAX, Path, Paths, Standing, lost};
use crate::BlockError;
use futures_util::future::select;
use levada_base::reactor::{self, Instant};
use levada_base::{IoVec, IoVecMut};
use levada_nvme::{Command, Completion, IoOpcode, Status};
use std::pin::pin;
use std::rc::Rc;

/// Data of a read that arrive damaged are asked for so often.
const DAMAGED_MAX: u32 = 8;

impl<N: Network> Paths<N> {
    /// Asks one controller, rather than any.
    pub(in super::super) async fn ask(
        &self,
        controller: &Controller<N::Stream>,
        command: Command,
        from: IoVec,
        into: IoVecMut,
    ) -> Result<(Completion, IoVecMut), ConnectError> {
        let limit = self.options.timing.limit_of(command.opcode());
        let request = Request { from, into, ..Request::new(command, limit) };
        let queue = controller.queue().ok_or_else(lost)?;
        let answered = queue.run(request).await;
        let ended = |why: Unanswered| ConnectError::Ended { why: why.to_string() };
        answered.outcome.map(|completion| (completion, answered.into)).map_err(ended)
    }

    /// The best path there is now, rather not the one at `avoided`.
    pub(super) fn best(
        &self,
        avoided: Option<usize>,
    ) -> Option<(usize, Rc<Controller<N::Stream>>)> {
        let usable = self.paths.iter().enumerate().filter(|(_, path)| path.is_usable());
        let open = usable.filter_map(|(at, path)| {
            let controller = path.controller.borrow().clone()?;
            let busy =
                controller.is_open().then(|| controller.queue().map(|queue| queue.busy()))??;
            let rank = (Some(at) == avoided, std::cmp::Reverse(path.standing.get()), busy);
            Some((rank, at, controller))
        });
        open.min_by_key(|(rank, at, _)| (*rank, *at)).map(|(_, at, controller)| (at, controller))
    }

    /// It will not be carried out over any path.
    fn is_over_for(&self, order: &Order) -> bool {
        self.has_lost.get()
            || self.is_ending.get()
            || order.is_for_owners() && self.owner.lost().is_some()
    }

    /// Whatever path there is, as soon as there is one.
    pub(in super::super) async fn any_path(&self) -> Result<Rc<Controller<N::Stream>>, BlockError> {
        self.path(None, None).await.map(|(_, controller)| controller)
    }

    /// Why an order must not be carried out any more: only the owner changes anything, and what a later one has written since is not
    /// read beside what this one has in memory.
    fn lost_for(&self, order: &Order) -> Option<BlockError> {
        match IoOpcode::of(order.command.opcode()) {
            _ if order.is_for_owners() => self.owner.lost(),
            Some(IoOpcode::Read | IoOpcode::Compare) => self.owner.lost_to_later(),
            _ => None,
        }
    }

    /// A path for an order, as soon as there is one, rather not the one at `avoided`.
    async fn path(
        &self,
        order: Option<&Order>,
        avoided: Option<usize>,
    ) -> Result<(usize, Rc<Controller<N::Stream>>), BlockError> {
        let begun = reactor::now();
        let timing = self.options.timing;
        loop {
            let changed = self.changed.changed();
            if self.has_lost.get() || self.is_ending.get() {
                return Err(BlockError::Gone);
            }
            if let Some(lost) = order.and_then(|order| self.lost_for(order)) {
                return Err(lost);
            }
            if let Some(found) = self.best(avoided) {
                return Ok(found);
            }
            let gone_at = self.unusable_since.get().unwrap_or(begun) + timing.gone_after;
            // All say so: that is sooner believed than silence.
            let absent = self.paths.iter().map(|path| path.absent_since.get());
            let absent = absent.collect::<Option<Vec<Instant>>>();
            let absent = absent.and_then(|all| all.into_iter().max());
            let absent_at = absent.map_or(gone_at, |since| since + timing.absent_after);
            let left = gone_at.min(absent_at).since(reactor::now());
            if left.is_zero() {
                return Err(BlockError::Gone);
            }
            let _ = reactor::timeout(left, changed).await;
        }
    }

    /// Has a command carried out: on one path after the other, until one answers.
    pub async fn carry_out(
        &self,
        order: &Order,
        mut into: IoVecMut,
    ) -> Result<(Completion, IoVecMut), OrderError> {
        self.owner.quiet().await;
        let timing = self.options.timing;
        // When it failed first, and what it was held back since.
        let mut failing_since: Option<Instant> = None;
        let mut avoided = None;
        let mut damaged = 0;
        let mut pause = AGAIN_FIRST;
        loop {
            let path = self.path(Some(order), avoided).await;
            let (at, controller) = path.map_err(OrderError::Block)?;
            let Some(queue) = controller.queue() else { continue };
            let Some(place) = while_open(queue, queue.place()).await else { continue };
            // It may have waited.
            if !self.paths[at].is_usable() || !controller.is_open() {
                continue;
            }
            if let Some(change) = &order.change
                && let Some(blocked) = change.blocked()
            {
                drop(place);
                self.held_back.set(self.held_back.get() + 1);
                let begun = reactor::now();
                let is_over = || self.is_over_for(order).then_some(());
                select(pin!(change.wait(blocked)), pin!(self.changed.until(is_over))).await;
                failing_since = failing_since.map(|since| since + begun.elapsed());
                continue;
            }
            let losses = self.losses();
            let request = Request {
                command: order.command,
                from: order.from.clone(),
                into,
                change: order.change.clone(),
                limit: Some(timing.limit_of(order.command.opcode())),
            };
            let answered = queue.submit(place, request).await;
            let Answered { into: back, outcome } = answered.expect("every command is answered");
            into = back;
            let is_untouched = controller.notices.tell_of_no_change();
            let last_error = match outcome {
                Ok(completion) => match self.verdict(completion.status, order, &controller).await {
                    // The target may have lost what it had confirmed before anybody looked at this; so what was read may be older as well.
                    // And what failed may have failed for that. What this path does not tell of, others may have been told of.
                    Verdict::Done | Verdict::Failed(_)
                        if !is_untouched
                            || !self.hear_out(order).await
                            || losses != self.losses() =>
                    {
                        BlockError::Gone
                    }
                    Verdict::Done => return Ok((completion, into)),
                    // Over this path the owner may not have been registered any more, or not yet again, when the target looked at it.
                    Verdict::Conflict
                        if losses != self.losses()
                            || !is_untouched
                            || !self.paths[at].is_whole.get() =>
                    {
                        BlockError::Gone
                    }
                    Verdict::Conflict => {
                        if order.is_for_owners() {
                            self.was_refused();
                        }
                        return Err(OrderError::Conflict);
                    }
                    Verdict::Failed(error) => return Err(OrderError::Block(error)),
                    Verdict::NotHere => {
                        self.paths[at].standing.set(Standing::Unusable);
                        if !completion.status.is_of_path() {
                            self.was_absent();
                        }
                        self.has_changed();
                        self.paths[at].look.notify_all();
                        // It says so again and again, and otherwise when it is asked.
                        if avoided == Some(at) {
                            reactor::sleep(pause).await;
                            pause = (pause * 2).min(AGAIN_MAX);
                        }
                        avoided = Some(at);
                        BlockError::Gone
                    }
                    Verdict::Again => {
                        if completion.status.is(Status::TRANSIENT_TRANSPORT) {
                            self.tell_of_damage(at);
                        }
                        avoided = Some(at);
                        reactor::sleep(pause).await;
                        pause = (pause * 2).min(AGAIN_MAX);
                        let is_out_of_reach = completion.status.is(Status::NOT_READY)
                            || completion.status.is(Status::TRANSIENT_TRANSPORT);
                        // Otherwise it may be these blocks.
                        match is_out_of_reach {
                            true => BlockError::Gone,
                            false => BlockError::Io { errno: libc::EIO },
                        }
                    }
                },
                Err(Unanswered::Lost) => BlockError::Gone,
                Err(Unanswered::Damaged) => {
                    avoided = Some(at);
                    damaged += 1;
                    self.tell_of_damage(at);
                    // The drive is as good as before: it is out of reach.
                    if damaged == DAMAGED_MAX {
                        return Err(OrderError::Block(BlockError::Gone));
                    }
                    reactor::sleep(pause).await;
                    pause = (pause * 2).min(AGAIN_MAX);
                    BlockError::Gone
                }
            };
            self.resent.set(self.resent.get() + 1);
            let since = *failing_since.get_or_insert_with(reactor::now);
            if since.elapsed() > timing.gone_after {
                return Err(OrderError::Block(last_error));
            }
        }
    }

    /// What comes after a status. A namespace that is there, and not at this controller, may be told of as a field that is wrong (Base, 3.2.1.4).
    async fn verdict(
        &self,
        status: Status,
        order: &Order,
        controller: &Controller<N::Stream>,
    ) -> Verdict {
        let verdict = Verdict::of(status, order.asked);
        let may_be_absent =
            matches!(verdict, Verdict::Failed(_)) && status.is(Status::INVALID_FIELD);
        let is_absent = may_be_absent
            && matches!(self.look_at(controller).await, Err(ConnectError::Absent { .. }));
        if is_absent { Verdict::NotHere } else { verdict }
    }

    fn tell_of_damage(&self, at: usize) {
        let path = &self.paths[at];
        path.damaged_at.set(Some(reactor::now()));
        if !path.has_told_of_damage.replace(true) {
            let (subsystem, address) = (&self.subsystem, &path.place);
            let what = "data arrive damaged over a path, and are sent again: look at its network (told once)";
            tracing::warn!(%subsystem, %address, "{what}");
        }
    }

    /// Over a path the target may have told that the namespace has changed, and nobody has looked at that.
    pub(super) fn may_have_changed(&self, path: &Path<N::Stream>) -> bool {
        let tells = |it: &Rc<Controller<_>>| it.notices.may_name(self.number());
        !path.is_stray.get() && path.controller.borrow().as_ref().is_some_and(tells)
    }

    /// Waits until it is known over every path which namespaces have changed, of which it was told until now, and heeds that: whoever looks
    /// after the path may be busy with it. Not over one that is told something meanwhile: over one or the other that may always be so. False: the
    /// order is over before.
    async fn hear_out(&self, order: &Order) -> bool {
        if !self.paths.iter().any(|path| self.may_have_changed(path)) {
            return true;
        }
        let telling = self.paths.iter().filter(|path| self.may_have_changed(path));
        let telling: Vec<_> = telling.filter_map(|path| path.controller.borrow().clone()).collect();
        for controller in telling {
            // Who looks after a path that ends heeds what it was told of.
            let is_moot = || {
                let is_there = self.has_connection(&controller.host_id);
                (!is_there || self.is_over_for(order)).then_some(())
            };
            let are_known = pin!(controller.notices.are_known());
            select(are_known, pin!(self.changed.until(is_moot))).await;
            if controller.notices.names_once(self.number()) {
                self.was_absent();
            }
        }
        !self.is_over_for(order)
    }

    /// Counts how often something that was confirmed may have been lost, as far as is known.
    fn losses(&self) -> (u64, u64) {
        (self.era.get(), self.absences.get())
    }
}
