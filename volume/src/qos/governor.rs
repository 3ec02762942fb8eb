//! Who goes next: caps, guarantees, and shares of what is left, in the manner of mClock (Gulati, Merchant, Varman: OSDI 2010),
//! under a window of what may be in flight ([`super::steering`]).
//!
//! A request that its volume's and its tenant's cap let pass goes down at once when it is within a guarantee. Others go in
//! the order of start tags (SFQ; Goyal, Vin, Cheng: SIGCOMM 1996), tenants first, then the volumes of one, as far as the
//! window allows. Tags count I/Os and bytes together.
//!
//! There is no task of its own: whoever waits at the head of his line sleeps until his cap lets him pass, and whoever
//! comes back lets the next ones go.

use super::bucket::Buckets;
use super::common::{Common, Lease};
use super::limits::{Cost, Limits, QosError, Terms};
use super::steering::{Alone, Steering};
use crate::name;
use levada_base::meter::{Latency, raise};
use levada_base::planted;
use levada_base::reactor::{self, Instant, Sleep};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Nobody has set a timer.
const NEVER: u64 = u64::MAX;
/// One request in so many is timed for the meters.
pub const TIMED_EVERY: u64 = 64;
/// So much of a guarantee is saved up, so that those who come in bunches have it too.
const GUARANTEE_BURST: Duration = Duration::from_millis(100);

/// Governs everything that goes from one core to what lies below: volumes, and files of a target. Clones are the same one.
#[derive(Clone)]
pub struct Governor(Rc<Inner>);

struct Inner {
    terms: Terms,
    tenants: RefCell<Vec<Weak<Of>>>,
    /// Shares in which somebody waits.
    lines: RefCell<Vec<Rc<Line>>>,
    steering: RefCell<Steering>,
    /// Nothing is guaranteed to anybody, so nobody need know what is in flight.
    is_plain: Cell<bool>,
    /// Below, outside guarantees.
    in_flight: Cell<f64>,
    in_flight_count: Cell<u64>,
    /// Requests ever let through outside guarantees.
    others_begun: Cell<u64>,
    /// The start tag of the tenant served last.
    tag: Cell<f64>,
}

/// What a tenant and a volume have alike.
struct Node {
    limits: Limits,
    cap: Buckets,
    guarantee: Buckets,
    lease: Option<Lease>,
    tag: f64,
}

impl Node {
    fn new(limits: Limits, now: Instant) -> Self {
        let (cap, guarantee) = Default::default();
        let mut node = Self { limits, cap, guarantee, lease: None, tag: 0.0 };
        node.set(limits, now);
        node
    }

    fn set(&mut self, limits: Limits, now: Instant) {
        self.limits = limits;
        self.cap.set(limits.cap, limits.burst, now.0);
        self.guarantee.set(limits.guarantee, GUARANTEE_BURST, now.0);
    }

    /// When the caps let `cost` pass.
    fn ready_ns(&mut self, cost: Cost, now: Instant) -> u64 {
        if self.cap.is_empty() && self.lease.is_none() {
            return 0;
        }
        self.cap.refill(now.0);
        let own = self.cap.ready_ns(cost.capped());
        let common = self.lease.as_mut().map_or(0, |lease| lease.ready_ns(cost.capped(), now.0));
        own.max(common)
    }

    fn overdue_ns(&mut self, cost: Cost, now: Instant) -> Option<f64> {
        if self.guarantee.is_empty() {
            return None;
        }
        self.guarantee.refill(now.0);
        self.guarantee.overdue_ns(cost.guaranteed(), now.0)
    }

    /// Whether nothing that depends on the time stands against a request now; takes what it costs then.
    fn passes_untimed(&mut self, cost: Cost) -> bool {
        self.lease.is_none() && self.cap.take_spare(cost.capped())
    }

    fn take_cap(&mut self, cost: Cost) {
        self.cap.take(cost.capped());
        self.cap.set_aside();
        self.lease.iter_mut().for_each(|lease| lease.take(cost.capped()));
    }

    fn give_back_cap(&mut self, cost: Cost) {
        self.cap.give_back(cost.capped());
        self.lease.iter_mut().for_each(|lease| lease.give_back(cost.capped()));
    }

    /// Its turn is over; `served` is the tag at which others are.
    fn advance(&mut self, cost: Cost, served: f64) -> f64 {
        let start = self.tag.max(served);
        self.tag = start + cost.weighed() / f64::from(self.limits.weight);
        start
    }
}

/// A tenant, or what stands for one where a volume has none.
struct Of {
    name: Option<name::Tenant>,
    node: RefCell<Node>,
    lines: RefCell<Vec<Weak<Line>>>,
    /// The start tag of the share served last.
    tag: Cell<f64>,
}

/// One volume's line.
struct Line {
    governor: Rc<Inner>,
    of: Rc<Of>,
    node: RefCell<Node>,
    /// Nobody tells when its requests are back.
    is_of_caps: bool,
    waiting: RefCell<VecDeque<Rc<Waiter>>>,
    /// Its limits hold no more; who waits or comes passes.
    is_removed: Cell<bool>,
    alone: RefCell<Alone>,
    in_flight_count: Cell<u64>,
    /// Requests ever, also those given up since.
    admitted: Cell<u64>,
    meters: ShareMeters,
}

/// What went through a share. Clocks are looked at for one request in [`TIMED_EVERY`], and for all who wait or go before others.
#[derive(Default)]
pub struct ShareMeters {
    pub count: Cell<u64>,
    pub bytes: Cell<u64>,
    /// Time from asking to coming back, of one request in [`TIMED_EVERY`].
    pub total: Latency,
    /// Of the same ones, the time below.
    pub below: Latency,
    /// Requests that had to wait here.
    pub waited: Cell<u64>,
    pub waited_ns: Cell<u64>,
    /// Of those that passed, how many within a guarantee.
    pub guaranteed: Cell<u64>,
}

struct Waiter {
    cost: Cost,
    passed: Cell<Option<Pass>>,
    waker: RefCell<Option<Waker>>,
    /// When its timer goes off.
    wakes_ns: Cell<u64>,
}

impl Waiter {
    fn wake(&self) {
        let waker = self.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// How a request ends.
enum End {
    /// `begun`: when it was asked for, if the meters want to know.
    Back { begun: Option<Instant> },
    /// Before it went down: what it took is given back.
    GivenUp,
}

/// By what right a request goes down.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Right {
    /// Within the guarantee of the volume, the tenant, or both.
    Guarantee {
        by_volume: bool,
        by_tenant: bool,
    },
    Share,
    /// By share, too, but when it is back nobody tells.
    Caps,
    /// Nothing is guaranteed, and nobody waits.
    Unheld,
    /// Its volume was removed.
    None,
}

/// Not within a guarantee; what is longest overdue, or the tag of the tenant; the tag of the volume. The least goes first.
type Key = (bool, f64, f64);

#[derive(Clone, Copy, Debug)]
struct Pass {
    right: Right,
    /// `None`: nobody wants to know what it takes.
    at: Option<Instant>,
    /// Nothing of others was below, and so many had been let through.
    was_alone: bool,
    others_begun: u64,
}

/// A tenant: limits over all its shares. They stay in force as long as this or one of its shares is held.
#[derive(Clone)]
pub struct Tenant(Rc<Inner>, Rc<Of>);

/// A volume's place at the governor, or a file's. Clones are the same one; when the last is dropped its guarantee is free.
#[derive(Clone)]
pub struct Share(Rc<Line>);

impl Governor {
    #[must_use]
    pub fn new(terms: Terms) -> Self {
        Self(Rc::new(Inner {
            terms,
            tenants: RefCell::default(),
            lines: RefCell::default(),
            steering: RefCell::default(),
            is_plain: Cell::new(true),
            in_flight: Cell::default(),
            in_flight_count: Cell::default(),
            others_begun: Cell::default(),
            tag: Cell::default(),
        }))
    }

    /// Makes a tenant.
    ///
    /// # Errors
    ///
    /// Limits that cannot work.
    pub fn tenant(&self, name: name::Tenant, limits: Limits) -> Result<Tenant, QosError> {
        limits.check(self.0.terms.request_bytes_max)?;
        let tenant = Tenant(Rc::clone(&self.0), self.0.add_tenant(Some(name)));
        tenant.set(limits)?;
        Ok(tenant)
    }

    /// Makes a share of no tenant.
    ///
    /// # Errors
    ///
    /// Limits that cannot work.
    pub fn share(&self, limits: Limits) -> Result<Share, QosError> {
        let lone = Tenant(Rc::clone(&self.0), self.0.add_tenant(None));
        lone.1.node.borrow_mut().limits.weight = limits.weight;
        lone.share(limits)
    }

    /// Requests below that are in no guarantee, and those that wait.
    #[must_use]
    pub fn in_flight_and_waiting(&self) -> (u64, usize) {
        let waiting = self.0.lines.borrow().iter().map(|line| line.waiting.borrow().len()).sum();
        (self.0.in_flight_count.get(), waiting)
    }
}

impl Tenant {
    #[must_use]
    pub fn name(&self) -> Option<&name::Tenant> {
        self.1.name.as_ref()
    }

    #[must_use]
    pub fn limits(&self) -> Limits {
        self.1.node.borrow().limits
    }

    /// Changes its limits, at once and for those who wait, too.
    ///
    /// # Errors
    ///
    /// Limits that cannot work; those before stay in force.
    pub fn set(&self, limits: Limits) -> Result<(), QosError> {
        limits.check(self.0.terms.request_bytes_max)?;
        self.0.check(&self.1, Some(limits), None)?;
        self.1.node.borrow_mut().set(limits, reactor::now());
        self.0.changed();
        Ok(())
    }

    /// Has it lease from a cap that all cores share, beside its own; `None` ends that.
    pub fn set_common(&self, common: Option<Arc<Common>>) {
        self.1.node.borrow_mut().lease = common.map(Lease::new);
        self.0.changed();
    }

    /// Makes a share of this tenant.
    ///
    /// # Errors
    ///
    /// Limits that cannot work, by themselves or beside the others'.
    pub fn share(&self, limits: Limits) -> Result<Share, QosError> {
        limits.check(self.0.terms.request_bytes_max)?;
        self.0.check(&self.1, None, Some((None, limits)))?;
        Ok(self.new_share(limits, false))
    }

    /// Makes a share whose requests wait at the tenant's caps alone, as nobody tells when they are back: they use no guarantee, and neither
    /// wait for the window nor are counted in it.
    #[must_use]
    pub fn share_of_caps(&self) -> Share {
        self.new_share(Limits::NONE, true)
    }

    fn new_share(&self, limits: Limits, is_of_caps: bool) -> Share {
        let line = Rc::new(Line {
            governor: Rc::clone(&self.0),
            of: Rc::clone(&self.1),
            node: RefCell::new(Node::new(limits, reactor::now())),
            is_of_caps,
            waiting: RefCell::default(),
            is_removed: Cell::default(),
            alone: RefCell::default(),
            in_flight_count: Cell::default(),
            admitted: Cell::default(),
            meters: ShareMeters::default(),
        });
        let mut lines = self.1.lines.borrow_mut();
        lines.retain(|line| line.strong_count() > 0);
        lines.push(Rc::downgrade(&line));
        drop(lines);
        self.0.look_for_guarantees();
        Share(line)
    }
}

impl Share {
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.0.node.borrow().limits
    }

    #[must_use]
    pub fn tenant(&self) -> Tenant {
        Tenant(Rc::clone(&self.0.governor), Rc::clone(&self.0.of))
    }

    #[must_use]
    pub fn meters(&self) -> &ShareMeters {
        &self.0.meters
    }

    /// Requests that wait here now.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.waiting.borrow().len()
    }

    /// Changes its limits, at once and for those who wait, too.
    ///
    /// # Errors
    ///
    /// Limits that cannot work; those before stay in force.
    pub fn set(&self, limits: Limits) -> Result<(), QosError> {
        let (governor, of) = (&self.0.governor, &self.0.of);
        limits.check(governor.terms.request_bytes_max)?;
        governor.check(of, None, Some((Some(&self.0), limits)))?;
        self.0.node.borrow_mut().set(limits, reactor::now());
        if of.name.is_none() {
            of.node.borrow_mut().limits.weight = limits.weight;
        }
        governor.changed();
        Ok(())
    }

    /// As [`Tenant::set_common`].
    pub fn set_common(&self, common: Option<Arc<Common>>) {
        self.0.node.borrow_mut().lease = common.map(Lease::new);
        self.0.governor.changed();
    }

    /// Its limits were ended.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.0.is_removed.get()
    }

    /// Ends its limits: who waits passes, and learns from the volume itself that it is gone. Its guarantee is free.
    pub fn remove(&self) {
        self.0.is_removed.set(true);
        self.0.governor.changed();
    }

    /// Waits for its turn. What comes back is held until the request is done; before that, the future may be dropped at
    /// any time.
    #[must_use]
    pub fn admit(&self, cost: Cost) -> Admission {
        Admission { line: Rc::clone(&self.0), cost, begun: None, waiter: None, sleep: None }
    }

    /// Lets a request pass of which nobody need know when it is back. True: it goes down at once, and has been counted.
    pub(super) fn lets_pass(&self, cost: Cost) -> bool {
        let passes = self.0.pass_unheld(cost).is_some();
        if passes {
            raise(&self.0.meters.count, 1);
            raise(&self.0.meters.bytes, cost.bytes);
        }
        passes
    }
}

impl Inner {
    fn add_tenant(&self, name: Option<name::Tenant>) -> Rc<Of> {
        let of = Rc::new(Of {
            name,
            node: RefCell::new(Node::new(Limits::NONE, reactor::now())),
            lines: RefCell::default(),
            tag: Cell::default(),
        });
        let mut tenants = self.tenants.borrow_mut();
        tenants.retain(|tenant| tenant.strong_count() > 0);
        tenants.push(Rc::downgrade(&of));
        of
    }

    /// Whether guarantees still fit if `of` had these limits, or a share of it had those.
    fn check(
        &self,
        of: &Rc<Of>,
        tenant: Option<Limits>,
        share: Option<(Option<&Rc<Line>>, Limits)>,
    ) -> Result<(), QosError> {
        let together = |other: &Rc<Of>| {
            let own = match tenant {
                Some(limits) if Rc::ptr_eq(other, of) => limits,
                _ => other.node.borrow().limits,
            };
            let held = other.lines.borrow();
            let held = held.iter().filter_map(Weak::upgrade).filter(|line| !line.is_removed.get());
            let mut shares: Vec<_> = held
                .map(|line| match share {
                    Some((Some(changed), limits)) if Rc::ptr_eq(changed, &line) => limits,
                    _ => line.node.borrow().limits,
                })
                .collect();
            if let Some((None, limits)) = share
                && Rc::ptr_eq(other, of)
            {
                shares.push(limits);
            }
            (own, shares)
        };
        let (own, shares) = together(of);
        Terms::check_tenant(&own, &shares)?;
        let tenants = self.tenants.borrow();
        let tenants = tenants.iter().filter_map(Weak::upgrade);
        self.terms.check_all(tenants.map(|tenant| together(&tenant)))
    }

    /// Limits changed: whoever may pass now does, and the others set their timers anew.
    fn changed(&self) {
        self.look_for_guarantees();
        if !planted!("qos-change-waits") {
            self.pass(reactor::now());
        }
    }

    fn look_for_guarantees(&self) {
        let is_plain = |node: &RefCell<Node>| node.borrow().guarantee.is_empty();
        let is_plain_tenant = |of: Rc<Of>| {
            let lines = of.lines.borrow();
            is_plain(&of.node)
                && lines
                    .iter()
                    .filter_map(Weak::upgrade)
                    .all(|line| line.is_removed.get() || is_plain(&line.node))
        };
        let tenants = self.tenants.borrow();
        self.is_plain.set(tenants.iter().filter_map(Weak::upgrade).all(is_plain_tenant));
    }

    /// Lets pass whoever may.
    fn pass(&self, now: Instant) {
        while !self.lines.borrow().is_empty() {
            let next = self.next(now);
            let Some((line, right)) = next else { return };
            let waiter = line.waiting.borrow_mut().pop_front().expect("a line in which one waits");
            let pass = line.charge(waiter.cost, right, now);
            waiter.passed.set(Some(pass));
            waiter.wake();
            line.leave_if_empty();
        }
    }

    /// Who goes next of those at the head of their lines. Those held by time are sure to have a timer.
    fn next(&self, now: Instant) -> Option<(Rc<Line>, Right)> {
        let lines = self.lines.borrow();
        let mut best: Option<(Key, &Rc<Line>, Right)> = None;
        for line in lines.iter() {
            let waiting = line.waiting.borrow();
            let head = waiting.front().expect("a line in which one waits");
            match line.right(head.cost, now) {
                Ok(right) => {
                    let key = line.key(head.cost, right, now);
                    if best.as_ref().is_none_or(|(least, ..)| key < *least) {
                        best = Some((key, line, right));
                    }
                }
                Err(until_ns) => {
                    if until_ns < head.wakes_ns.get() {
                        head.wake();
                    }
                }
            }
        }
        best.map(|(_, line, right)| (Rc::clone(line), right))
    }
}

impl Line {
    /// By what right `cost` may go now, or when to look again; `NEVER` if it waits for somebody to come back.
    fn right(&self, cost: Cost, now: Instant) -> Result<Right, u64> {
        if self.is_removed.get() {
            return Ok(Right::None);
        }
        let mut node = self.node.borrow_mut();
        let mut of = self.of.node.borrow_mut();
        let ready_ns = node.ready_ns(cost, now).max(of.ready_ns(cost, now));
        if ready_ns > now.0 {
            return Err(ready_ns);
        }
        if self.is_of_caps {
            return Ok(Right::Caps);
        }
        let by_volume = node.overdue_ns(cost, now).is_some();
        let by_tenant = of.overdue_ns(cost, now).is_some();
        if by_volume || by_tenant {
            return Ok(Right::Guarantee { by_volume, by_tenant });
        }
        let mut steering = self.governor.steering.borrow_mut();
        if steering.lets(self.governor.in_flight.get(), cost.weighed(), now.0) {
            return Ok(Right::Share);
        }
        let pause_ns = steering.pause_until_ns();
        // What is guaranteed to it may come before the others are back.
        let due_ns = [&node.guarantee, &of.guarantee]
            .into_iter()
            .filter(|guarantee| !guarantee.is_empty())
            .map(|guarantee| guarantee.ready_ns(cost.guaranteed()));
        let pause_ns = if pause_ns > now.0 { pause_ns } else { NEVER };
        Err(due_ns.min().unwrap_or(NEVER).min(pause_ns))
    }

    fn key(&self, cost: Cost, right: Right, now: Instant) -> Key {
        let (mut node, mut of) = (self.node.borrow_mut(), self.of.node.borrow_mut());
        match right {
            Right::None | Right::Unheld => (false, f64::NEG_INFINITY, 0.0),
            Right::Guarantee { .. } => {
                let overdue_ns = node.overdue_ns(cost, now).or_else(|| of.overdue_ns(cost, now));
                (false, -overdue_ns.unwrap_or(0.0), 0.0)
            }
            Right::Share | Right::Caps => {
                (true, of.tag.max(self.governor.tag.get()), node.tag.max(self.of.tag.get()))
            }
        }
    }

    /// The meters want to know what the next request takes.
    fn times_next(&self) -> bool {
        self.admitted.get().is_multiple_of(TIMED_EVERY)
    }

    /// Lets a request go down if that is sure without knowing the time, or what is in flight.
    fn pass_unheld(&self, cost: Cost) -> Option<Pass> {
        let governor = &*self.governor;
        if !governor.is_plain.get()
            || self.times_next()
            || self.is_removed.get()
            || !governor.lines.borrow().is_empty()
        {
            return None;
        }
        let mut node = self.node.borrow_mut();
        if !node.passes_untimed(cost) {
            return None;
        }
        if !self.of.node.borrow_mut().passes_untimed(cost) {
            node.cap.give_back(cost.capped());
            return None;
        }
        raise(&self.admitted, 1);
        Some(Pass { right: Right::Unheld, at: None, was_alone: false, others_begun: 0 })
    }

    /// Its turn among those who go by share is over.
    fn advance(&self, node: &mut Node, of: &mut Node, cost: Cost) {
        let governor = &*self.governor;
        governor.tag.set(of.advance(cost, governor.tag.get()));
        self.of.tag.set(node.advance(cost, self.of.tag.get()));
        raise(&governor.others_begun, 1);
    }

    fn go_by_share(&self, node: &mut Node, of: &mut Node, cost: Cost) {
        let governor = &*self.governor;
        self.advance(node, of, cost);
        governor.in_flight.set(governor.in_flight.get() + cost.weighed());
        raise(&governor.in_flight_count, 1);
        raise(&self.in_flight_count, 1);
    }

    /// Lets a request go down: what it uses is taken.
    fn charge(&self, cost: Cost, right: Right, now: Instant) -> Pass {
        let (mut node, mut of) = (self.node.borrow_mut(), self.of.node.borrow_mut());
        let governor = &*self.governor;
        match right {
            Right::None | Right::Unheld => {}
            Right::Guarantee { by_volume, by_tenant } => {
                if by_volume {
                    node.guarantee.take(cost.guaranteed());
                }
                // What a volume is guaranteed is part of what its tenant is.
                if by_volume || by_tenant {
                    of.guarantee.take(cost.guaranteed());
                }
                governor.steering.borrow_mut().used(now.0);
            }
            Right::Share => self.go_by_share(&mut node, &mut of, cost),
            Right::Caps => self.advance(&mut node, &mut of, cost),
        }
        if right != Right::None {
            node.take_cap(cost);
            if !planted!("qos-tenant-not-charged") {
                of.take_cap(cost);
            }
        }
        let was_alone = governor.in_flight_count.get() == self.in_flight_count.get();
        Pass { right, at: Some(now), was_alone, others_begun: governor.others_begun.get() }
    }

    /// A request is over; others may have its place.
    fn done(&self, cost: Cost, pass: Pass, end: End) {
        let governor = &*self.governor;
        if pass.right == Right::Share {
            let in_flight_count = governor.in_flight_count.get() - 1;
            governor.in_flight_count.set(in_flight_count);
            self.in_flight_count.set(self.in_flight_count.get() - 1);
            // Sums of floating numbers drift; an empty one is exact.
            let in_flight = governor.in_flight.get() - cost.weighed();
            governor.in_flight.set(if in_flight_count == 0 { 0.0 } else { in_flight });
        }
        match end {
            End::Back { begun } => self.measure(cost, pass, begun),
            End::GivenUp => self.give_back(cost, pass.right),
        }
        if !governor.lines.borrow().is_empty() {
            governor.pass(reactor::now());
        }
    }

    /// A request came back that may have been timed.
    fn measure(&self, cost: Cost, pass: Pass, begun: Option<Instant>) {
        raise(&self.meters.count, 1);
        raise(&self.meters.bytes, cost.bytes);
        let Some(at) = pass.at else { return };
        let is_guaranteed = matches!(pass.right, Right::Guarantee { .. });
        if begun.is_none() && !is_guaranteed {
            return;
        }
        let (governor, now) = (&*self.governor, reactor::now());
        let took = now.since(at);
        if let Some(begun) = begun {
            self.meters.total.add(now.since(begun));
            self.meters.below.add(took);
        }
        if is_guaranteed {
            raise(&self.meters.guaranteed, 1);
            governor.steering.borrow_mut().done(
                &mut self.alone.borrow_mut(),
                (cost.kind, cost.bytes),
                u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
                pass.was_alone && pass.others_begun == governor.others_begun.get(),
                governor.in_flight.get(),
            );
        }
    }

    /// A request was given up after it might pass.
    fn give_back(&self, cost: Cost, right: Right) {
        if right == Right::None || planted!("qos-given-up-keeps-tokens") {
            return;
        }
        let (mut node, mut of) = (self.node.borrow_mut(), self.of.node.borrow_mut());
        node.give_back_cap(cost);
        of.give_back_cap(cost);
        if let Right::Guarantee { by_volume, .. } = right {
            if by_volume {
                node.guarantee.give_back(cost.guaranteed());
            }
            of.guarantee.give_back(cost.guaranteed());
        }
    }

    fn leave_if_empty(&self) {
        let waiting = self.waiting.borrow();
        let mut lines = self.governor.lines.borrow_mut();
        match waiting.front() {
            // It has a timer to set.
            Some(head) => head.wake(),
            None => lines.retain(|line| !std::ptr::eq(&raw const **line, self)),
        }
    }
}

/// Waits for its turn; see [`Share::admit`].
pub struct Admission {
    line: Rc<Line>,
    cost: Cost,
    begun: Option<Instant>,
    waiter: Option<Rc<Waiter>>,
    sleep: Option<Sleep>,
}

impl Future for Admission {
    type Output = Admitted;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Admitted> {
        let this = &mut *self;
        if this.waiter.is_none()
            && let Some(pass) = this.line.pass_unheld(this.cost)
        {
            let line = Rc::clone(&this.line);
            return Poll::Ready(Admitted { line, cost: this.cost, pass, begun: None });
        }
        let now = reactor::now();
        let begun = *this.begun.get_or_insert(now);
        let admitted = |pass| {
            let line = Rc::clone(&this.line);
            let begun = line.times_next().then_some(begun);
            raise(&line.admitted, 1);
            Poll::Ready(Admitted { line, cost: this.cost, pass, begun })
        };
        let Some(waiter) = &this.waiter else {
            if this.line.waiting.borrow().is_empty()
                && let Ok(right) = this.line.right(this.cost, now)
            {
                return admitted(this.line.charge(this.cost, right, now));
            }
            let waiter = Rc::new(Waiter {
                cost: this.cost,
                passed: Cell::default(),
                waker: RefCell::new(Some(cx.waker().clone())),
                wakes_ns: Cell::new(NEVER),
            });
            raise(&this.line.meters.waited, 1);
            let mut waiting = this.line.waiting.borrow_mut();
            waiting.push_back(Rc::clone(&waiter));
            if waiting.len() == 1 {
                this.line.governor.lines.borrow_mut().push(Rc::clone(&this.line));
                // To set a timer, if it waits for one.
                waiter.wake();
            }
            drop(waiting);
            this.waiter = Some(waiter);
            return Poll::Pending;
        };
        let waiter = Rc::clone(waiter);
        if waiter.passed.get().is_none() {
            this.line.governor.pass(now);
        }
        if let Some(pass) = waiter.passed.take() {
            this.waiter = None;
            this.sleep = None;
            let waited_ns = u64::try_from(now.since(begun).as_nanos()).unwrap_or(u64::MAX);
            raise(&this.line.meters.waited_ns, waited_ns);
            return admitted(pass);
        }
        waiter.waker.replace(Some(cx.waker().clone()));
        let is_head =
            this.line.waiting.borrow().front().is_some_and(|head| Rc::ptr_eq(head, &waiter));
        let until_ns = match is_head {
            true => this.line.right(this.cost, now).err().unwrap_or(now.0 + 1),
            false => NEVER,
        };
        waiter.wakes_ns.set(until_ns);
        this.sleep = (until_ns != NEVER).then(|| reactor::sleep_until(Instant(until_ns)));
        match &mut this.sleep {
            Some(sleep) => match Pin::new(sleep).poll(cx) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(()) => {
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
            },
            None => Poll::Pending,
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take() else { return };
        if let Some(pass) = waiter.passed.take() {
            self.line.done(self.cost, pass, End::GivenUp);
            return;
        }
        let was_head = {
            let mut waiting = self.line.waiting.borrow_mut();
            let at = waiting.iter().position(|other| Rc::ptr_eq(other, &waiter));
            at.map(|at| waiting.remove(at));
            at == Some(0)
        };
        if was_head {
            self.line.leave_if_empty();
        }
    }
}

/// A request that may go down. To be held until it is back.
pub struct Admitted {
    line: Rc<Line>,
    cost: Cost,
    pass: Pass,
    begun: Option<Instant>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.line.done(self.cost, self.pass, End::Back { begun: self.begun });
    }
}
