//! What a start does with the journal: writes in place what was recorded and may not be there.
//!
//! What always holds:
//! - A record takes effect only when it is on as many members as may be lost from then on, and one more: one that was on its
//!   way when the power went is recorded again first, as it may take effect in part and then be met without those that
//!   have it.
//! - Records lose their meaning (in the superblock) behind a flush of all that they say.

use super::record::{Header, looks_like_header};
use super::{Group, Journal, Piece, Ring, decode};
use crate::engine::Engine;
use crate::map::Bit;
use crate::member::{Member, add};
use futures_util::future::join_all;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{Buf, BufMut, planted, probe};
use levada_device::{BlockError, Durability};
use std::collections::BTreeMap;
use std::rc::Rc;

/// A record as found.
struct Found {
    header: Header,
    payload: Vec<u8>,
    /// Members that hold it whole.
    copies: usize,
}

/// Records of one member: sequence, first block, blocks.
type Spans = Vec<(u64, u64, u64)>;

impl Engine {
    /// Writes in place what the members have recorded, durably; the journal is empty then.
    pub async fn replay(self: &Rc<Self>) -> Result<(), BlockError> {
        let Some(journal) = self.journal.clone() else { return Ok(()) };
        let _busy = probe::busy("array replay");
        let mut any = false;
        for number in 0..journal.groups.len() {
            any |= self.replay_group(&journal, number).await?;
        }
        if any {
            self.flush().await?;
            journal.forget_all();
            add(&self.standing_wanted, 1);
            self.settle().await?;
        }
        for member in self.live_members() {
            *member.ring.borrow_mut() = Ring::default();
        }
        Ok(())
    }

    /// True when there was anything.
    async fn replay_group(
        self: &Rc<Self>,
        journal: &Rc<Journal>,
        number: usize,
    ) -> Result<bool, BlockError> {
        let members = self.players_of(number);
        let scans = join_all(members.iter().map(|member| self.scan(journal, member))).await;
        let mut found: BTreeMap<u64, Found> = BTreeMap::new();
        let mut spans: Vec<Spans> = Vec::new();
        for of_member in scans {
            let mut own = Spans::new();
            for (start, header, payload) in of_member {
                own.push((header.sequence, start, 1 + header.payload_blocks()));
                let sequence = header.sequence;
                found.entry(sequence).or_insert(Found { header, payload, copies: 0 }).copies += 1;
            }
            own.sort_unstable();
            spans.push(own);
        }
        let tail = found.values().map(|found| found.header.tail).max().unwrap_or(0);
        let tail = tail.max(journal.from.get());
        let next = found.keys().next_back().map_or(0, |last| last + 1);
        journal.next.set(journal.next.get().max(next));
        let group: &Group = &journal.groups[number];
        group.tail.set(tail);
        group.durable_tail.set(tail);
        for (member, own) in members.iter().zip(spans) {
            let live = own.into_iter().filter(|(sequence, ..)| *sequence >= tail);
            *member.ring.borrow_mut() = Ring::found(live);
        }
        let live = found.split_off(&tail);
        if planted!("raid-journal-not-replayed") {
            return Ok(!live.is_empty());
        }
        let whole = self.whole_roles(number);
        let width = self.layout.groups().map_or(0, |groups| groups.width);
        let enough = (self.layout.level.tolerates() + 1 + whole).saturating_sub(width);
        for Found { header, payload, copies } in live.values() {
            let pieces: Vec<(Piece, Buf)> = self.contents(header, payload);
            if pieces.is_empty() {
                continue;
            }
            if *copies < enough && !planted!("raid-journal-not-recorded-again") {
                let listed = pieces.iter().map(|(piece, _)| *piece).collect();
                let bytes: Vec<Buf> = pieces.iter().map(|(_, bytes)| bytes.clone()).collect();
                let Some((sequence, holders)) =
                    self.reserve(journal, number, 1 + header.payload_blocks(), 0, 0)
                else {
                    return Err(BlockError::Unsupported { operation: "a journal without room" });
                };
                let again = Header { sequence, tail, pieces: listed, epoch: self.epoch };
                self.write_to(journal, number, &again, &bytes, &holders).await?;
            }
            let writes = pieces.into_iter().filter_map(|(piece, bytes)| {
                let place = self.layout.place(piece.stripe, piece.chunk);
                let member = self.player(place.role)?;
                let at = self.member_offset(place.slot, piece.first * BLOCK_BYTES);
                let from = bytes.into_vec();
                Some(
                    async move { self.member_write(&member, at, from, Durability::Volatile).await },
                )
            });
            join_all(writes).await;
            self.settle().await?;
        }
        Ok(!live.is_empty())
    }

    /// Roles of the group whose players have everything.
    fn whole_roles(&self, number: usize) -> usize {
        let width = self.layout.groups().map_or(0, |groups| groups.width);
        let out = self.roles_out() >> (number * width) & ((1 << width) - 1);
        width - out.count_ones() as usize
    }

    /// The pieces that there can be, with their contents.
    fn contents(&self, header: &Header, payload: &[u8]) -> Vec<(Piece, Buf)> {
        let mut at = 0;
        let mut all = Vec::new();
        for piece in &header.pieces {
            let bytes = (piece.blocks * BLOCK_BYTES) as usize;
            let contents = &payload[at..at + bytes];
            at += bytes;
            let is_sound = piece.stripe < self.layout.stripes
                && piece.chunk < self.layout.chunks()
                && (piece.first + piece.blocks) * BLOCK_BYTES <= self.layout.chunk_bytes;
            if is_sound && self.map.has(Bit::Written, piece.stripe) {
                all.push((*piece, Buf::copy_of(contents)));
            }
        }
        all
    }

    /// The whole records on a member: where each begins, and what it says.
    async fn scan(
        self: &Rc<Self>,
        journal: &Journal,
        member: &Rc<Member>,
    ) -> Vec<(u64, Header, Vec<u8>)> {
        let total = journal.area * BLOCK_BYTES;
        let mut area = Vec::with_capacity(total as usize);
        while (area.len() as u64) < total {
            let (at, bytes) = (area.len() as u64, MIB.min(total - area.len() as u64));
            let read = |at: u64, bytes: u64| {
                let into = BufMut::for_overwrite(bytes as usize).into_vec();
                self.member_read(member, self.areas.journal_at + at, into)
            };
            if let Ok(parts) = read(at, bytes).await {
                area.extend_from_slice(&parts[0]);
                continue;
            }
            // One bad sector must not cost the others.
            for at in (at..at + bytes).step_by(BLOCK_BYTES as usize) {
                match read(at, BLOCK_BYTES).await {
                    Ok(parts) => area.extend_from_slice(&parts[0]),
                    Err(_) => area.resize(area.len() + BLOCK_BYTES as usize, 0),
                }
            }
        }
        let mut found = Vec::new();
        for (block, start) in area.chunks(BLOCK_BYTES as usize).zip(0..) {
            if looks_like_header(block)
                && let Some((header, payload)) =
                    decode(&area[(start * BLOCK_BYTES) as usize..], self.uuid)
                && header.epoch <= self.epoch
            {
                found.push((start, header, payload));
            }
        }
        found
    }
}
