//! What a start does with the journal: writes in place what was recorded and may not be there.
//!
//! What always holds:
//! - A record takes effect only when so much of it is durable that it can be read whoever may be lost from then on: one that was
//!   on its way when the power went is written to others first, as it may take effect in part and then be met without those
//!   that have it. What a killed owner left in the cache of a drive is flushed before.
//! - One of which too few fragments are there was never durable: nothing of it is in place.
//! - Records lose their meaning (in the superblock) behind a flush of all that they say.

use super::record::{Fragment, Header, looks_like_header};
use super::split::join;
use super::{Group, Holder, Journal, Piece, Ring, decode};
use crate::engine::Engine;
use crate::map::Bit;
use crate::member::{Member, add};
use futures_util::future::join_all;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{Buf, BufMut, planted, probe};
use levada_device::{BlockError, Durability};
use levada_parity::Code;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;

/// A record as found.
struct Found {
    header: Header,
    /// Of each fragment that is there, its contents.
    fragments: BTreeMap<usize, Vec<u8>>,
    /// Who holds which.
    holders: Vec<(Rc<Member>, usize)>,
}

impl Found {
    /// Whether enough fragments are there to tell all contents.
    fn is_whole(&self, journal: &Journal) -> bool {
        let is_known = self.header.fragments == 1 || journal.code(self.header.fragments).is_some();
        is_known && self.fragments.len() >= self.header.fragments
    }

    /// All contents; `None` when too few fragments are there.
    fn contents(&self, journal: &Journal) -> Option<Vec<u8>> {
        let Some(code) = journal.code(self.header.fragments) else {
            return self.fragments.get(&0).cloned();
        };
        let held: Vec<Option<&[u8]>> = (0..code.chunks())
            .map(|number| self.fragments.get(&number).map(|held| &held[..]))
            .collect();
        join(&held, code, (self.header.payload_blocks() * BLOCK_BYTES) as usize)
    }

    /// Whether it counts that this member holds some of it: it has everything of the stripes, and no other that has was found
    /// with the same fragment before it.
    fn counts_on(&self, member: &Rc<Member>) -> bool {
        let first = |number: usize| {
            let mut holders = self.holders.iter().filter(|(holder, _)| holder.is_in_sync());
            holders.find(|(_, other)| *other == number).map(|(holder, _)| holder)
        };
        let of_member = self.holders.iter().filter(|(holder, _)| Rc::ptr_eq(holder, member));
        let is_first = |number: usize| first(number).is_some_and(|first| Rc::ptr_eq(first, member));
        member.is_in_sync()
            && of_member
                .map(|(_, number)| *number)
                .any(|number| self.header.fragments == 1 || is_first(number))
    }

    /// Fragments that members which have everything lack, so that the record could be read if `more` of them were lost.
    fn lacking(&self, journal: &Journal, more: usize) -> Vec<usize> {
        let of_whole = self.holders.iter().filter(|(member, _)| member.is_in_sync());
        let Some(code) = journal.code(self.header.fragments) else {
            return vec![0; (more + 1).saturating_sub(of_whole.count())];
        };
        let held: BTreeSet<usize> = of_whole.map(|(_, number)| *number).collect();
        let count = (code.data_chunks() + more).saturating_sub(held.len());
        (0..code.chunks()).filter(|number| !held.contains(number)).take(count).collect()
    }
}

/// Rows of parity chunks that an update left out, as nobody held them: by stripe and chunk. Who plays that role since got
/// them from a rebuild, so what older records say of them does not hold any more.
#[derive(Default)]
struct Omitted(HashMap<(u64, usize), Vec<Range<u64>>>);

impl Omitted {
    /// The parts of `rows` that were not left out.
    fn without(&self, of: (u64, usize), rows: Range<u64>) -> Vec<Range<u64>> {
        match self.0.get(&of) {
            Some(gone) => subtract(rows, gone),
            None => vec![rows],
        }
    }
}

/// The parts of `rows` that are in none of `gone`.
fn subtract(rows: Range<u64>, gone: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = vec![rows];
    for gone in gone {
        let around = |rows: Range<u64>| {
            let before = rows.start..rows.end.min(gone.start);
            let after = rows.start.max(gone.end)..rows.end;
            [before, after].into_iter().filter(|rows| rows.start < rows.end)
        };
        left = left.into_iter().flat_map(around).collect();
    }
    left
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
            self.flush_members().await?;
        }
        // What members that are away miss of it, before it is forgotten.
        self.persist_wanted_pages().await?;
        // Also those that could not be read this time: a drive may find its sectors again.
        journal.skip_sequences();
        journal.forget_all();
        add(&self.standing_wanted, 1);
        self.settle().await?;
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
        for (member, of_member) in members.iter().zip(scans) {
            let mut own = Spans::new();
            for (start, Fragment { header, number, contents }) in of_member {
                own.push((header.sequence, start, 1 + header.fragment_blocks()));
                let record = found.entry(header.sequence).or_insert_with(|| Found {
                    header: header.clone(),
                    fragments: BTreeMap::new(),
                    holders: Vec::new(),
                });
                let numbers = journal.code(header.fragments).map_or(1, Code::chunks);
                if record.header == header && number < numbers {
                    record.fragments.insert(number, contents);
                    record.holders.push((Rc::clone(member), number));
                }
            }
            own.sort_unstable();
            spans.push(own);
        }
        let next = found.keys().next_back().map_or(0, |last| last + 1);
        journal.next.set(journal.next.get().max(next));
        let whole = self.whole_roles(number);
        let width = self.layout.groups().map_or(0, |groups| groups.width);
        let more = (self.layout.level.tolerates() + whole).saturating_sub(width);
        found.retain(|_, found| found.is_whole(journal));
        let tail_of = |found: &Found| found.header.tail;
        let tail = found.values().map(tail_of).max().unwrap_or(0).max(journal.from.get());
        // Of one that may be missing at the next start only what it tells holds, not that its room may be used.
        let durable = found.values().filter(|found| found.lacking(journal, more).is_empty());
        let durable_tail = durable.map(tail_of).max().unwrap_or(0).max(journal.from.get());
        let group: &Group = &journal.groups[number];
        group.tail.set(tail);
        group.durable_tail.set(durable_tail);
        for (member, own) in members.iter().zip(spans) {
            let live = own.into_iter().filter(|(sequence, ..)| *sequence >= durable_tail);
            *member.ring.borrow_mut() = Ring::found(journal.area, live);
        }
        let live = found.split_off(&tail);
        let any = !live.is_empty();
        if planted!("raid-journal-not-replayed") {
            return Ok(any);
        }
        if any {
            self.flush_members().await?;
        }
        let mut omitted = Omitted::default();
        let mut listed = BTreeSet::new();
        let live: Vec<(Vec<u8>, Found)> = live
            .into_values()
            .filter_map(|found| Some((found.contents(journal)?, found)))
            .collect();
        let pieces: Vec<Vec<(Piece, Buf)>> = live
            .iter()
            .rev()
            .map(|(contents, found)| self.sound_pieces(&found.header, contents, &mut omitted))
            .collect();
        for ((contents, found), pieces) in live.iter().zip(pieces.into_iter().rev()) {
            let header = &found.header;
            let of_record = header.pieces.iter().filter(|piece| self.is_listed(piece));
            let of_record: Vec<u64> = of_record.map(|piece| piece.stripe).collect();
            if pieces.is_empty() && of_record.is_empty() {
                continue;
            }
            // Also with all members here: one may go before this is in place.
            let stripes = pieces.iter().map(|(piece, _)| piece.stripe);
            for stripe in stripes.chain(of_record.iter().copied()) {
                self.map.miss(stripe);
            }
            listed.extend(of_record);
            // One that is being rebuilt counts among the lost.
            let lacking = found.lacking(journal, more);
            if !lacking.is_empty() {
                let is_other = |member: &&Rc<Member>| !found.counts_on(member);
                let is_whole = |member: &&Rc<Member>| member.is_in_sync();
                let others = members.iter().filter(is_whole).filter(is_other).cloned().collect();
                let blocks = 1 + header.fragment_blocks();
                match Self::hold(journal, others, lacking.len(), header.sequence, (blocks, 0)) {
                    Some(holders) if holders.len() == lacking.len() => {
                        let contents = [Buf::copy_of(contents)];
                        let numbered: Vec<(usize, Holder)> =
                            lacking.into_iter().zip(holders).collect();
                        self.write_to(journal, number, header, &contents, numbered).await?;
                    }
                    // Ordinary records leave room for those that were on their way; bad sectors may cost more of them a
                    // copy. Not to start would cost more than what is at stake: a second power cut within this start, after
                    // which just those that have it are missing.
                    _ => tracing::warn!(
                        array = %self.name,
                        sequence = header.sequence,
                        "no room to record an update again; it is written in place from fewer copies"
                    ),
                }
            }
            for (piece, _) in &pieces {
                let rows = piece.first..piece.first + piece.blocks;
                let within = rows.start * BLOCK_BYTES..rows.end * BLOCK_BYTES;
                self.lost.remove(piece.stripe, piece.chunk, within);
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
        if !planted!("raid-list-not-settled") {
            self.settle_listed(&listed.into_iter().collect::<Vec<_>>()).await?;
        }
        self.persist_lost().await?;
        Ok(any)
    }

    /// A piece that says of a stripe that it was being overwritten whole.
    fn is_listed(&self, piece: &Piece) -> bool {
        let is_sound = piece.is_listed() && piece.stripe < self.layout.stripes;
        is_sound && self.map.has(Bit::Written, piece.stripe)
    }

    /// Roles of the group whose players have everything.
    fn whole_roles(&self, number: usize) -> usize {
        let width = self.layout.groups().map_or(0, |groups| groups.width);
        let out = self.roles_out() >> (number * width) & ((1 << width) - 1);
        width - out.count_ones() as usize
    }

    /// What a record says that still holds, with its contents. Records are to be looked at from the last one backwards.
    fn sound_pieces(
        &self,
        header: &Header,
        contents: &[u8],
        omitted: &mut Omitted,
    ) -> Vec<(Piece, Buf)> {
        let (data_chunks, block) = (self.layout.data_chunks(), BLOCK_BYTES as usize);
        let mut at = 0;
        let mut all = Vec::new();
        // By stripe and chunk.
        let mut recorded: BTreeMap<(u64, usize), Vec<Range<u64>>> = BTreeMap::new();
        for piece in &header.pieces {
            let start = at;
            at += piece.blocks as usize * block;
            let rows = piece.first..piece.first + piece.blocks;
            let is_sound = piece.stripe < self.layout.stripes
                && piece.chunk < self.layout.chunks()
                && rows.end * BLOCK_BYTES <= self.layout.chunk_bytes;
            if !is_sound || !self.map.has(Bit::Written, piece.stripe) {
                continue;
            }
            recorded.entry((piece.stripe, piece.chunk)).or_default().push(rows.clone());
            for rows in omitted.without((piece.stripe, piece.chunk), rows) {
                let start = start + (rows.start - piece.first) as usize * block;
                let bytes = (rows.end - rows.start) as usize * block;
                let part = Piece { first: rows.start, blocks: rows.end - rows.start, ..*piece };
                all.push((part, Buf::copy_of(&contents[start..start + bytes])));
            }
        }
        for ((stripe, _), rows) in recorded.iter().filter(|((_, chunk), _)| *chunk < data_chunks) {
            for parity in data_chunks..self.layout.chunks() {
                let of_parity = recorded.get(&(*stripe, parity)).map_or(&[][..], |rows| rows);
                let left_out = rows.iter().flat_map(|rows| subtract(rows.clone(), of_parity));
                omitted.0.entry((*stripe, parity)).or_default().extend(left_out);
            }
        }
        all
    }

    /// What a member holds of records: where each begins, and what it says.
    async fn scan(self: &Rc<Self>, journal: &Journal, member: &Rc<Member>) -> Vec<(u64, Fragment)> {
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
                if !member.is_live() {
                    return Vec::new();
                }
                match read(at, BLOCK_BYTES).await {
                    Ok(parts) => area.extend_from_slice(&parts[0]),
                    Err(_) => area.resize(area.len() + BLOCK_BYTES as usize, 0),
                }
            }
        }
        let mut found = Vec::new();
        for (block, start) in area.chunks(BLOCK_BYTES as usize).zip(0..) {
            if looks_like_header(block)
                && let Some(fragment) = decode(&area[(start * BLOCK_BYTES) as usize..], self.uuid)
                && fragment.header.epoch <= self.epoch
            {
                found.push((start, fragment));
            }
        }
        found
    }
}
