use super::*;
use levada_base::reactor::{JoinHandle, Reactor};
use levada_base::units::KIB;

/// Answers as it is told to, after some time.
struct Fake {
    asked: RefCell<Vec<Ask>>,
    answers: Box<dyn Fn(&Ask) -> Told>,
    late: Duration,
}

impl Node for Fake {
    fn ask(&self, ask: Ask) -> LocalBoxFuture<'_, Told> {
        Box::pin(async move {
            reactor::sleep(self.late).await;
            let told = (self.answers)(&ask);
            self.asked.borrow_mut().push(ask);
            told
        })
    }
}

const LATE: Duration = Duration::from_millis(100);
const SMALL: Wanted = Wanted::Read { bytes: 4 * KIB };

fn fake(answers: impl Fn(&Ask) -> Told + 'static) -> (Rc<Fake>, Rc<Leave>) {
    let node = Rc::new(Fake { asked: RefCell::default(), answers: Box::new(answers), late: LATE });
    (Rc::clone(&node), Leave::new(node, 7))
}

fn granted(passed: u32) -> Told {
    Told::Granted(Granted { passed, free_ms: 0 })
}

/// So many requests, and how many of them have gone on, or were refused.
struct Requests {
    tasks: Vec<JoinHandle<()>>,
    gone_on: Rc<RefCell<Vec<usize>>>,
    refused: Rc<Cell<usize>>,
}

impl Requests {
    fn of(leave: &Rc<Leave>, count: usize, wanted: Wanted) -> Self {
        let (gone_on, refused) =
            (Rc::<RefCell<Vec<usize>>>::default(), Rc::<Cell<usize>>::default());
        let came = Rc::<Cell<usize>>::default();
        let request = |_| {
            let (leave, came) = (Rc::clone(leave), Rc::clone(&came));
            let (gone_on, refused) = (Rc::clone(&gone_on), Rc::clone(&refused));
            reactor::spawn(async move {
                // Tasks begin in any order.
                let number = came.replace(came.get() + 1);
                match leave.take(wanted).await {
                    Ok(()) => gone_on.borrow_mut().push(number),
                    Err(Refused) => refused.set(refused.get() + 1),
                }
            })
        };
        let tasks = (0..count).map(request).collect();
        Self { tasks, gone_on, refused }
    }

    fn gone_on(&self) -> usize {
        self.gone_on.borrow().len()
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// As queues do that are to end.
async fn hurry(leave: &Leave, is_gone: bool, long: Duration) {
    let begun = reactor::now();
    while begun.elapsed() < long {
        leave.hurry(is_gone);
        reactor::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn requests_go_on_in_their_order_as_many_as_the_node_says() {
    Reactor::simulated(1).block_on(async {
        let (node, leave) = fake(|_| granted(2));
        let requests = Requests::of(&leave, 7, SMALL);
        reactor::sleep(LATE * 5 / 2).await;
        assert_eq!(requests.gone_on(), 4);
        reactor::sleep(LATE * 2).await;
        // Two at a time, in either order.
        let pairs = requests.gone_on.borrow().iter().map(|number| number / 2).collect::<Vec<_>>();
        assert_eq!(pairs, [0, 0, 1, 1, 2, 2, 3]);
        assert!(node.asked.borrow().iter().all(|ask| ask.tenant == 7));
    });
}

#[test]
fn a_question_is_for_no_more_than_the_node_answers() {
    Reactor::simulated(1).block_on(async {
        let (node, leave) = fake(|ask| granted(ask.wanted.len() as u32));
        let small = Requests::of(&leave, 200, SMALL);
        let large = Requests::of(&leave, 5, Wanted::Write { bytes: 600 * KIB });
        let copies = Requests::of(&leave, 2, Wanted::Write { bytes: WANTED_BYTES_MAX });
        reactor::sleep(LATE * 20).await;
        assert_eq!((small.gone_on(), large.gone_on(), copies.gone_on()), (200, 5, 2));
        for ask in node.asked.borrow().iter() {
            let bytes: u64 = ask.wanted.iter().map(|wanted| wanted.bytes()).sum();
            assert!(ask.wanted.len() <= WANTED_MAX, "{}", ask.wanted.len());
            assert!(bytes <= BYTES_ASKED || ask.wanted.len() == 1, "{bytes}");
        }
    });
}

#[test]
fn nobody_asks_for_a_tenant_without_caps() {
    Reactor::simulated(1).block_on(async {
        let free = Granted { passed: 1, free_ms: 1000 };
        let (node, leave) = fake(move |_| Told::Granted(free));
        let first = Requests::of(&leave, 100, SMALL);
        reactor::sleep(LATE * 2).await;
        let second = Requests::of(&leave, 100, SMALL);
        reactor::sleep(Duration::from_millis(1)).await;
        assert_eq!((first.gone_on(), second.gone_on(), node.asked.borrow().len()), (100, 100, 1));
        reactor::sleep(Duration::from_secs(1)).await;
        let third = Requests::of(&leave, 1, SMALL);
        reactor::sleep(LATE * 2).await;
        assert_eq!((third.gone_on(), node.asked.borrow().len()), (1, 2));
    });
}

#[test]
fn nothing_goes_on_as_the_node_does_not_answer() {
    Reactor::simulated(1).block_on(async {
        let answers = Rc::new(Cell::new(false));
        let does = Rc::clone(&answers);
        let (_, leave) = fake(move |_| if does.get() { granted(1) } else { Told::Nothing });
        let requests = Requests::of(&leave, 3, SMALL);
        reactor::sleep(Duration::from_secs(300)).await;
        assert_eq!(requests.gone_on(), 0);
        answers.set(true);
        reactor::sleep(Duration::from_secs(1)).await;
        assert_eq!(requests.gone_on(), 3);
    });
}

#[test]
fn a_node_of_an_earlier_release_has_no_caps() {
    Reactor::simulated(1).block_on(async {
        let (node, leave) = fake(|_| Told::NotHere);
        let requests = Requests::of(&leave, 3, SMALL);
        reactor::sleep(NOT_HERE_MAX - LATE).await;
        assert_eq!(requests.gone_on(), 0, "it may have begun just now");
        reactor::sleep(LATE * 4).await;
        assert_eq!(requests.gone_on(), 3);
        let asked = node.asked.borrow().len();
        let more = Requests::of(&leave, 3, SMALL);
        reactor::sleep(NOT_ASKED / 2).await;
        assert_eq!((more.gone_on(), node.asked.borrow().len()), (3, asked));
        // Nor does it hold anybody up when it is asked again.
        reactor::sleep(NOT_ASKED).await;
        let last = Requests::of(&leave, 3, SMALL);
        reactor::sleep(LATE * 2).await;
        assert_eq!((last.gone_on(), node.asked.borrow().len()), (3, asked + 1));
    });
}

#[test]
fn who_is_in_a_hurry_goes_on_and_pays_before_others_do() {
    Reactor::simulated(1).block_on(async {
        let has_room = Rc::new(Cell::new(false));
        let has = Rc::clone(&has_room);
        let (_, leave) = fake(move |_| granted(u32::from(has.get())));
        let requests = Requests::of(&leave, 3, SMALL);
        hurry(&leave, false, PATIENCE - LATE).await;
        assert_eq!(requests.gone_on(), 0);
        hurry(&leave, false, LATE * 2).await;
        assert_eq!(requests.gone_on(), 3);
        let later = Requests::of(&leave, 1, SMALL);
        has_room.set(true);
        reactor::sleep(LATE * 5 / 2).await;
        assert_eq!(later.gone_on(), 0, "those that went on are paid for first");
        reactor::sleep(LATE * 3).await;
        assert_eq!(later.gone_on(), 1);
    });
}

/// However often queues end and begin.
#[test]
fn what_is_owed_is_bounded() {
    for (wanted, most) in [(SMALL, OWED_MAX), (Wanted::Write { bytes: MIB }, 64)] {
        Reactor::simulated(1).block_on(async {
            let (_, leave) = fake(|_| granted(0));
            let requests = Requests::of(&leave, 3000, wanted);
            for _ in 0..5 {
                hurry(&leave, false, PATIENCE * 2).await;
                reactor::sleep(ENDS_APART * 2).await;
                assert_eq!(requests.gone_on(), most);
            }
            // It is not owed for ever, either.
            reactor::sleep(OWED_FOR).await;
            hurry(&leave, false, PATIENCE * 2).await;
            assert_eq!(requests.gone_on(), 2 * most);
        });
    }
}

#[test]
fn of_who_is_gone_nothing_is_carried_out() {
    Reactor::simulated(1).block_on(async {
        let (_, leave) = fake(|_| granted(0));
        let requests = Requests::of(&leave, 3, SMALL);
        hurry(&leave, true, LATE).await;
        assert_eq!((requests.gone_on(), requests.refused.get()), (0, 3));
    });
}

#[test]
fn a_process_that_ends_waits_for_nobody() {
    Reactor::simulated(1).block_on(async {
        let (_, leave) = fake(|_| granted(0));
        let requests = Requests::of(&leave, 3000, SMALL);
        leave.is_over.set(true);
        hurry(&leave, true, PATIENCE - LATE).await;
        assert_eq!((requests.gone_on(), requests.refused.get()), (0, 0));
        hurry(&leave, true, LATE * 2).await;
        assert_eq!(requests.gone_on(), 3000);
    });
}

/// What is answered was asked for by somebody who is gone; nobody else goes on for it.
#[test]
fn an_answer_is_for_those_who_have_asked() {
    Reactor::simulated(1).block_on(async {
        let (node, leave) = fake(|ask| granted(ask.wanted.len() as u32));
        let gone = Requests::of(&leave, 5, SMALL);
        reactor::sleep(LATE / 2).await;
        leave.hurry(true);
        let large = Requests::of(&leave, 5, Wanted::Write { bytes: MIB });
        reactor::sleep(LATE).await;
        assert_eq!((gone.refused.get(), large.gone_on()), (5, 0));
        reactor::sleep(LATE * 6).await;
        assert_eq!((large.gone_on(), node.asked.borrow().len()), (5, 6));
    });
}
