//! Overwrites of whole stripes: new parity needs nothing old, so the journal gets the stripe's number only.
//!
//! That is a few bytes instead of the stripe again on M + 1 members. What it costs: until a flush such a stripe is *in
//! flight*, also when its write was answered. After a power cut its blocks are old or new, as what lies in any cache; and if
//! a member is absent as well, that member's blocks of it are lost ([`crate::lost`]): they read as medium errors, never as
//! something else. Where anything is amiss already (a member out or being rebuilt) the contents are recorded, as for parts.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::journal::Journal;
use crate::lost::{Rows, Why};
use crate::map::Bit;
use crate::rebuild::STRIPES_AT_ONCE;
use crate::redundancy::Redundancy;
use crate::update::{Segment, covers};
use futures_util::future::join_all;
use levada_base::units::BLOCK_BYTES;
use levada_base::{BufMut, IoVec, planted};
use levada_device::{BlockError, Durability};
use std::rc::Rc;

impl Engine {
    /// Whether these segments are a whole stripe of which the number is enough.
    pub fn may_be_listed(&self, journal: &Journal, stripe: u64, segments: &[Segment]) -> bool {
        let rows = 0..self.layout.chunk_bytes;
        // Contents that an older record has of it would be written over newer ones.
        let is_recorded = journal.has_contents(stripe) && !planted!("raid-list-over-records");
        self.lost.room() > 0
            && self.is_whole(stripe)
            && !is_recorded
            && !self.lost.is_in(stripe)
            && (0..self.layout.data_chunks()).all(|chunk| covers(segments, chunk, &rows))
    }

    /// Whether all who hold a part of a stripe have everything.
    fn is_whole(&self, stripe: u64) -> bool {
        let out = self.roles_out();
        (0..self.layout.chunks()).all(|chunk| out >> self.layout.place(stripe, chunk).role & 1 == 0)
    }

    /// How many chunks would be lost if the power failed, with as many members absent as may be.
    pub fn may_become_lost(&self) -> usize {
        let stripes = self.journal.as_ref().map_or(0, |journal| journal.listed_stripes());
        stripes * self.layout.level.tolerates()
    }

    /// Overwrites a whole stripe; the caller holds its lock. Gives the segments back if it could not be listed.
    pub async fn overwrite_whole(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        stripe: u64,
        segments: Vec<Segment>,
    ) -> Result<Option<Vec<Segment>>, BlockError> {
        let logged = match planted!("raid-list-not-recorded") || self.records_nothing.get() {
            true => None,
            false => match self.log_listed(journal, stripe).await? {
                Some(logged) => Some(logged),
                None => return Ok(Some(segments)),
            },
        };
        self.note_patched(stripe);
        // In order of address, says whoever made them.
        let data = segments.into_iter().map(|segment| segment.bytes).collect();
        let in_place = self.updates.begin(stripe);
        self.write_stripe(stripe, data).await;
        drop(in_place);
        self.map.set(Bit::Suspect, stripe..stripe + 1, false);
        // Those that missed it are out, and on record as such.
        self.settle().await?;
        match logged {
            Some(logged) => journal.done(logged),
            None => self.writes.set(self.writes.get() + 1),
        }
        Ok(None)
    }

    /// Gives stripes that were being overwritten whole a parity that belongs to the data that is there; what is not there is
    /// lost. May be repeated, as long as the stripes are listed.
    pub async fn settle_listed(self: &Rc<Self>, stripes: &[u64]) -> Result<(), BlockError> {
        self.check_room(stripes).await?;
        for some in stripes.chunks(STRIPES_AT_ONCE) {
            let found = join_all(some.iter().map(|stripe| self.what_is_there(*stripe))).await;
            for (stripe, (_, lost)) in some.iter().zip(&found) {
                for (chunk, rows) in lost {
                    tracing::error!(
                        array = %self.name, stripe, chunk, blocks = rows.count(),
                        "lost: a member is absent and the stripe was being overwritten"
                    );
                    if !self.lost.add((*stripe, *chunk), Why::Untold, *rows) {
                        return Err(self.unlisted(*stripe));
                    }
                }
            }
            self.persist_lost().await?;
            let writes = some
                .iter()
                .zip(found)
                .map(|(stripe, (data, lost))| self.agree(*stripe, data, lost));
            join_all(writes).await;
            self.settle().await?;
        }
        Ok(())
    }

    /// Fails if more of these stripes is lost than can be listed: before any of them is touched, as drives that are brought back
    /// then make it less.
    async fn check_room(self: &Rc<Self>, stripes: &[u64]) -> Result<(), BlockError> {
        let room = self.lost.room();
        if stripes.len() * self.layout.data_chunks() <= room {
            return Ok(());
        }
        let mut wanted = 0;
        for some in stripes.chunks(STRIPES_AT_ONCE) {
            let found = join_all(some.iter().map(|stripe| self.what_is_there(*stripe))).await;
            for (stripe, (_, lost)) in some.iter().zip(found) {
                let is_new = |(chunk, _): &&(usize, Rows)| !self.lost.has_entry(*stripe, *chunk);
                wanted += lost.iter().filter(is_new).count();
                if wanted > room {
                    return Err(self.unlisted(*stripe));
                }
            }
        }
        Ok(())
    }

    /// What is lost of this stripe cannot be listed. Read as if nothing were, it would be made from chunks that do not belong
    /// together: so its record stays, and whoever opens the array stops here.
    fn unlisted(&self, stripe: u64) -> BlockError {
        self.lost.unlisted.set(Some(stripe));
        let (at, end) = self.stripe_range(stripe, 1);
        BlockError::Medium { at, bytes: end - at }
    }

    /// The data of a stripe, zeroes where it is absent or cannot be read, and which blocks these are.
    async fn what_is_there(self: &Rc<Self>, stripe: u64) -> (Vec<BufMut>, Vec<(usize, Rows)>) {
        let chunk_bytes = self.layout.chunk_bytes;
        let chunks = (0..self.layout.data_chunks()).map(async |chunk| {
            let place = self.layout.place(stripe, chunk);
            let at = self.member_offset(place.slot, 0);
            let Some(member) = self.holder(place, MemberSet::NONE) else {
                let absent = Rows::of(0..chunk_bytes / BLOCK_BYTES);
                return (BufMut::zeroed(chunk_bytes as usize), absent);
            };
            let into = BufMut::for_overwrite(chunk_bytes as usize).into_vec();
            if let Ok(mut parts) = self.member_read(&member, at, into).await
                && let Some(bytes) = parts.pop()
            {
                return (bytes, Rows::default());
            }
            let (mut bytes, mut unreadable) =
                (BufMut::zeroed(chunk_bytes as usize), Rows::default());
            for block in 0..chunk_bytes / BLOCK_BYTES {
                let within = block * BLOCK_BYTES;
                let into = BufMut::for_overwrite(BLOCK_BYTES as usize).into_vec();
                match self.member_read(&member, at + within, into).await {
                    Ok(parts) => {
                        bytes[within as usize..][..BLOCK_BYTES as usize].copy_from_slice(&parts[0])
                    }
                    Err(_) => unreadable.set(block..block + 1, true),
                }
            }
            (bytes, unreadable)
        });
        let (data, rows): (Vec<BufMut>, Vec<Rows>) = join_all(chunks).await.into_iter().unzip();
        let lost = rows.into_iter().enumerate().filter(|(_, rows)| *rows != Rows::default());
        (data, lost.collect())
    }

    /// Writes the parity of these chunks, and the zeroes that stand for what is lost.
    async fn agree(&self, stripe: u64, data: Vec<BufMut>, lost: Vec<(usize, Rows)>) {
        let data: IoVec = data.into_iter().map(BufMut::freeze).collect();
        let Redundancy::Parity(code) = &self.redundancy else {
            unreachable!("only levels with parity have a journal")
        };
        let parity = crate::write::encode(code, &data, self.layout.chunk_bytes as usize);
        let parity = (self.layout.data_chunks()..).zip(parity);
        let parity = parity.map(|(chunk, bytes)| (chunk, 0, bytes.into_vec()));
        let zeroes = lost.into_iter().flat_map(|(chunk, rows)| {
            rows.runs().into_iter().map(move |run| {
                let bytes = ((run.end - run.start) * BLOCK_BYTES) as usize;
                (chunk, run.start * BLOCK_BYTES, BufMut::zeroed(bytes).freeze().into_vec())
            })
        });
        let writes = parity.chain(zeroes).filter_map(|(chunk, within, from)| {
            let place = self.layout.place(stripe, chunk);
            let member = self.player(place.role)?;
            let at = self.member_offset(place.slot, within);
            Some(async move { self.member_write(&member, at, from, Durability::Volatile).await })
        });
        join_all(writes).await;
    }
}
