//! Resync: after an unclean stop, makes the members agree about one dirty stripe.
//!
//! With parity one chunk that all others contradict is put right: the stripe may have been complete, with a chunk
//! that rotted since. Else the first k readable chunks, data before redundancy, are the truth. Copies vote, block by
//! block, as one may be wrong in a block that nobody wrote; without a majority the first is the truth.
//! What differs is rewritten. A stripe that was complete is consistent, so nothing acknowledged
//! changes whichever members are missing. In a stripe that was in flight every block reads old,
//! new or (fresh stripes) anything, and from here on always the same, because redundancy agrees.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::redundancy::Redundancy;
use futures_util::future::join_all;
use levada_base::BufMut;
use levada_device::Durability;
use levada_parity::Verdict;
use smallvec::SmallVec;
use std::rc::Rc;

impl Engine {
    pub async fn resync_stripe(self: &Rc<Self>, stripe: u64) {
        match self.redundancy {
            Redundancy::None => return,
            Redundancy::Copies => return self.resync_copies(stripe).await,
            Redundancy::Parity(_) => {}
        }
        let chunk_bytes = self.layout.chunk_bytes;
        let all = self.layout.chunks();
        let gathered = self.gather(stripe, 0..chunk_bytes, 0, MemberSet::NONE, all).await;
        if gathered.count() < self.layout.data_chunks() {
            // Not enough is readable for redundancy to say anything; the unreadable chunks read
            // as medium errors, the others as they are.
            tracing::warn!(array = %self.name, stripe, "dirty stripe is unreadable in part");
            return;
        }
        let mut wrong = None;
        if let (Redundancy::Parity(code), true) = (&self.redundancy, gathered.count() == all) {
            let whole: SmallVec<[&[u8]; 16]> =
                gathered.chunks.iter().flatten().map(|bytes| &bytes[..]).collect();
            wrong = match code.locate(&whole) {
                Verdict::Consistent => return,
                Verdict::Wrong { index } => Some(index),
                Verdict::Unexplained => None,
            };
        }
        let mut left = self.layout.data_chunks();
        let mut computed: SmallVec<[(usize, BufMut); 4]> = SmallVec::new();
        let mut trusted = 0u64;
        for (chunk, held) in gathered.chunks.iter().enumerate() {
            if held.is_some() && left > 0 && wrong != Some(chunk) {
                left -= 1;
                trusted |= 1 << chunk;
            } else if self.holder(self.layout.place(stripe, chunk), MemberSet::NONE).is_some() {
                computed.push((chunk, BufMut::for_overwrite(chunk_bytes as usize)));
            }
        }
        let held = gathered.held().enumerate();
        let held = held.map(|(chunk, held)| held.filter(|_| trusted >> chunk & 1 == 1));
        let wanted = computed.iter_mut().map(|(chunk, into)| (*chunk, &mut into[..]));
        assert!(self.redundancy.recompute(held, wanted), "k chunks are at hand");
        let writes = computed.into_iter().filter_map(|(chunk, bytes)| {
            let held = gathered.chunks[chunk].as_ref();
            if held.is_some_and(|held| held[..] == bytes[..]) {
                return None;
            }
            let place = self.layout.place(stripe, chunk);
            let member = self.holder(place, MemberSet::NONE)?;
            let at = self.member_offset(place.slot, 0);
            let from = bytes.freeze().into_vec();
            Some(async move { self.member_write(&member, at, from, Durability::Volatile).await })
        });
        // A member that fails is out; the caller settles.
        join_all(writes).await;
    }

    /// As [`Engine::resync_stripe`], for a mirror.
    async fn resync_copies(&self, stripe: u64) {
        let whole = 0..self.layout.chunk_bytes;
        let (copies, vote) = self.ask_copies(stripe, &whole, 0).await;
        let Some(mut vote) = vote else {
            tracing::warn!(array = %self.name, stripe, "dirty stripe is unreadable");
            return;
        };
        // Somebody must be believed wherever anybody has a voice.
        let chosen = vote.undecided.len() - vote.silent.len();
        if chosen > 0 {
            tracing::warn!(array = %self.name, stripe, blocks = chosen, "no majority of dirty copies; the first counts");
        }
        vote.undecided.clone_from(&vote.silent);
        self.write_decided(stripe, 0, &copies, &vote).await;
    }
}
