//! The power is cut after every single write and flush of every order.

use super::drive::Unflushed;
use super::*;
use levada_base::reactor::Reactor;
use levada_base::units::BLOCK_BYTES;
use levada_device::BlockError;
use std::collections::BTreeMap;

const DRIVE_BYTES: u64 = 1 << 20;
const STRIPE: u64 = 2 * CHUNK_BYTES;

/// What volumes hold, durably.
type State = BTreeMap<String, Vec<u8>>;

/// One step of a life.
enum Step {
    Create(&'static str, u64),
    Resize(&'static str, u64),
    Rename(&'static str, &'static str),
    Delete(&'static str),
    /// Overwrites all of it, and flushes.
    Fill(&'static str, u8),
}

use Step::{Create, Delete, Fill, Rename, Resize};

/// Stripes of what is deleted and cut off are used again, in pieces.
const LIFE: [Step; 16] = [
    Create("a", 3 * STRIPE),
    Fill("a", 1),
    Create("b", 2 * STRIPE - BLOCK_BYTES),
    Fill("b", 2),
    Create("c", 2 * STRIPE),
    Fill("c", 3),
    Rename("b", "bb"),
    Delete("a"),
    Create("d", 8 * STRIPE),
    Fill("d", 4),
    Resize("c", STRIPE + BLOCK_BYTES),
    Resize("bb", 4 * STRIPE),
    Fill("bb", 5),
    Resize("c", 3 * STRIPE),
    Delete("d"),
    Create("e", 6 * STRIPE),
];

async fn carry_out(pool: &Pool, state: &mut State, step: &Step) {
    match *step {
        Create(text, bytes) => {
            pool.create(&name(text), bytes).await.expect("created");
            state.insert(text.into(), vec![0; bytes as usize]);
        }
        Resize(text, bytes) => {
            // Open, as it is while clients use it.
            let volume = volume(pool, text).await;
            pool.resize(&name(text), bytes, MEANT).await.expect("resized");
            assert_eq!(volume.size_bytes(), bytes);
            state.get_mut(text).expect("there").resize(bytes as usize, 0);
        }
        Rename(from, to) => {
            pool.rename(&name(from), &name(to)).await.expect("renamed");
            let bytes = state.remove(from).expect("there");
            state.insert(to.into(), bytes);
        }
        Delete(text) => {
            pool.delete(&name(text), UNMEANT).await.expect("deleted");
            state.remove(text);
        }
        Fill(text, byte) => {
            fill(&*volume(pool, text).await, byte).await;
            state.get_mut(text).expect("there").fill(byte);
        }
    }
}

/// A life without power cuts: when what was durable.
async fn life(level: Level, drives: &[Rc<Drive>]) -> Vec<(usize, State)> {
    let array = array(level, drives).await;
    array.flush().await.expect("flushed");
    let begun = drives[0].events();
    let pool = pool(&array).await;
    let mut state = State::new();
    let mut states = vec![(begun, state.clone()), (drives[0].events(), state.clone())];
    for step in &LIFE {
        carry_out(&pool, &mut state, step).await;
        states.push((drives[0].events(), state.clone()));
    }
    states
}

fn sizes(state: &State) -> Vec<(String, u64)> {
    state.iter().map(|(name, bytes)| (name.clone(), bytes.len() as u64)).collect()
}

/// Each block of every volume is that of `old` or of `new`; what both have alike is what it is. Where a member is absent, what was
/// on its way may be lost.
async fn check_blocks(pool: &Pool, old: &State, new: &State, is_whole: bool, when: &str) {
    for row in pool.list(None) {
        let text = row.name.to_string();
        let volume = volume(pool, &text).await;
        for at in (0..row.size_bytes).step_by(BLOCK_BYTES as usize) {
            let of = |state: &State| {
                let bytes = state.get(&text)?.get(at as usize..(at + BLOCK_BYTES) as usize)?;
                Some(bytes.to_vec())
            };
            // Before it was made, or grew, nothing could be read there.
            let may_be = [of(old), of(new)];
            match volume.read(at, BLOCK_BYTES).await {
                Ok(read) => {
                    let read = levada_base::buf::joined(&read);
                    assert!(may_be.contains(&Some(read)), "{when}: {text} at {at}");
                }
                Err(error) => {
                    let is_lost =
                        matches!(error, crate::VolumeError::Block(BlockError::Medium { .. }));
                    let was_changing = may_be[0] != may_be[1];
                    assert!(
                        is_lost && !is_whole && was_changing,
                        "{when}: {text} at {at}: {error}"
                    );
                }
            }
        }
    }
}

/// Opens what a cut left, and goes on.
async fn check(drives: &[Rc<Drive>], old: &State, new: &State, is_whole: bool, when: &str) {
    let array = reopened(drives, 2).await;
    let found = Pool::open(shared(&array), "data").await.expect(when);
    let pool = match found {
        Some(pool) => pool,
        None => {
            assert!(old.is_empty() && new.is_empty(), "{when}: the pool is gone");
            pool(&array).await
        }
    };
    let told: Vec<_> = pool.list(None).iter().map(|v| (v.name.to_string(), v.size_bytes)).collect();
    assert!(told == sizes(old) || told == sizes(new), "{when}: {told:?}");
    check_stripes(&pool);
    check_blocks(&pool, old, new, is_whole, when).await;
    // What is free holds nothing of anybody once it is given to somebody.
    if pool.free_bytes() > 0 {
        let all = pool.free_bytes();
        pool.create(&name("last"), STRIPE.min(all)).await.expect(when);
        pool.resize(&name("last"), all, UNMEANT).await.expect(when);
        let last = volume(&pool, "last").await;
        assert!(holds(&last, 0).await, "{when}: somebody's old bytes");
        fill(&last, 9).await;
    }
    assert_eq!(pool.free_bytes(), 0);
    check_blocks_but_last(&pool, old, new, is_whole, when).await;
    check_stripes(&opened(&array).await);
}

async fn check_blocks_but_last(pool: &Pool, old: &State, new: &State, is_whole: bool, when: &str) {
    let with_last = |state: &State| {
        let mut state = state.clone();
        if let Some(row) = pool.list(None).iter().find(|row| row.name == name("last")) {
            state.insert("last".into(), vec![9; row.size_bytes as usize]);
        }
        state
    };
    check_blocks(pool, &with_last(old), &with_last(new), is_whole, when).await;
}

/// Cuts a life at every `step`th event, and checks what is left with all drives, or without one.
fn cut_everywhere(level: Level, width: usize, step: usize, unflushed: Unflushed, lost: bool) {
    let drives = drives(width, DRIVE_BYTES);
    let states = Reactor::simulated(1).block_on(life(level, &drives));
    let (first, end) = (states[0].0, drives[0].events());
    // Without parity there is no journal, so there are fewer.
    assert!(end - first > 150, "only {} events", end - first);
    for cut in (first..=end).step_by(step) {
        // The last state that was acknowledged before the cut.
        let now = states.iter().rposition(|(events, _)| *events <= cut).expect("the first");
        let (old, new) = (&states[now].1, &states[(now + 1).min(states.len() - 1)].1);
        Reactor::simulated(cut as u64).block_on(async {
            let mut left: Vec<_> =
                drives.iter().map(|drive| drive.after_cut(cut, unflushed)).collect();
            if lost {
                left.remove(cut % width);
            }
            let when = format!("{level:?} {unflushed:?}, cut after {cut} of {first}..{end}");
            check(&left, old, new, !lost, &when).await;
        });
    }
}

#[test]
fn any_power_cut_leaves_the_old_table_or_the_new_one() {
    for (unflushed, step) in [(Unflushed::Any, 1), (Unflushed::Lost, 2), (Unflushed::Kept, 2)] {
        cut_everywhere(Level::Raid5, 3, step, unflushed, false);
    }
}

#[test]
fn so_it_does_on_other_levels() {
    for (level, width) in [(Level::Raid0, 2), (Level::Raid1 { copies: 2 }, 4), (Level::Raid6, 4)] {
        cut_everywhere(level, width, 3, Unflushed::Any, false);
    }
}

#[test]
fn so_it_does_when_a_drive_is_lost_as_well() {
    cut_everywhere(Level::Raid5, 3, 2, Unflushed::Any, true);
    cut_everywhere(Level::Raid5, 3, 3, Unflushed::Lost, true);
}
