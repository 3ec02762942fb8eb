//! Reply slots: a repeated change gets the stored answer.

use crate::config::CallHeader;
use crate::service::MetaService;
#[cfg(test)]
use crate::service::Traced;
use crate::table::{Effect, Slot};
use levada_base::ids::Seq;
use levada_kv::Bytes;
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest, NewInode};

/// What to do with a change that has arrived.
pub(crate) enum Entered<'a> {
    Run(Ticket<'a>),
    /// It was done before; its answer is in the slot.
    Answered(Slot),
}

/// The right to run the change of a slot. Dropped without [`Ticket::done`], the slot is as before.
pub(crate) struct Ticket<'a> {
    pub call: CallHeader,
    service: &'a MetaService,
}

impl Ticket<'_> {
    /// The change was applied, or refused. May be called before the answer is durable.
    pub fn done(&self, reply: Bytes, seq: Seq) {
        let mut table = self.service.table.borrow_mut();
        let Some(client) = table.clients.get_mut(&self.call.client) else { return };
        let slot = &mut client.slots[self.call.slot as usize];
        // 0 says that it was done before a restart; a change that wrote nothing may rest on nothing younger.
        let seq = seq.max(Seq(1));
        *slot = Slot { sequence: self.call.sequence, reply: Some(reply), seq, running: None };
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut table = self.service.table.borrow_mut();
        if let Some(client) = table.clients.get_mut(&self.call.client) {
            let slot = &mut client.slots[self.call.slot as usize];
            if slot.running == Some(self.call.sequence) {
                slot.running = None;
            }
        }
        drop(table);
        self.service.slot_free.notify_all();
    }
}

impl MetaService {
    /// Takes the slot for a new change; waits while an earlier one, or the same, is under way.
    pub(crate) async fn enter(&self, call: CallHeader) -> Result<Entered<'_>, MetaFault> {
        loop {
            let changed = self.slot_free.changed();
            {
                let mut table = self.table.borrow_mut();
                let client = table.clients.get_mut(&call.client).ok_or(MetaFault::NotRegistered)?;
                let slot = client.slots.get_mut(call.slot as usize).ok_or(MetaFault::Invalid)?;
                if call.sequence == 0 || call.sequence < slot.sequence {
                    return Err(MetaFault::Invalid);
                }
                if call.sequence == slot.sequence {
                    return Ok(Entered::Answered(slot.clone()));
                }
                match slot.running {
                    None => {
                        slot.running = Some(call.sequence);
                        return Ok(Entered::Run(Ticket { call, service: self }));
                    }
                    // A newer one means that nobody waits for this one any more.
                    Some(running) if call.sequence < running => return Err(MetaFault::Invalid),
                    Some(_) => {}
                }
            }
            changed.await;
        }
    }

    /// An answer from before a restart, to a client that reclaimed what it held without this change, of which
    /// it had not heard yet: what it opens and closes is counted now, as if it were done now.
    pub(crate) fn counts_again(&self, call: CallHeader, slot: &Slot, request: &MetaRequest) {
        if slot.seq != Seq(0) {
            return;
        }
        let closed = |request: &MetaRequest| match request {
            MetaRequest::Close { ino } => Some(Effect::Closed(*ino)),
            _ => None,
        };
        let effects: Vec<Effect> = match request {
            MetaRequest::Several { requests } => requests.iter().filter_map(closed).collect(),
            MetaRequest::Open { ino, .. } => vec![Effect::Opened(*ino)],
            MetaRequest::Create { new: NewInode::File { open: Some(_) }, .. }
            | MetaRequest::CreateUnnamed { .. } => {
                match slot.reply.as_deref().map(postcard::from_bytes) {
                    Some(Ok(MetaReply::Entry(attr, _))) => vec![Effect::Opened(attr.ino)],
                    _ => Vec::new(),
                }
            }
            other => closed(other).into_iter().collect(),
        };
        if effects.is_empty() {
            return;
        }
        let mut table = self.table.borrow_mut();
        for effect in effects {
            table.take_effect(call.client, effect);
        }
        #[cfg(test)]
        let traced = Traced { call, wrote: None, counts_again: true };
        #[cfg(test)]
        self.trace.borrow_mut().push(traced);
        // Once.
        if let Some(client) = table.clients.get_mut(&call.client) {
            client.slots[call.slot as usize].seq = Seq(1);
        }
    }

    /// The stored answer, once it is durable.
    pub(crate) async fn repeat(
        &self,
        call: CallHeader,
        slot: Slot,
    ) -> Result<MetaReply, MetaFault> {
        self.tellable(call, slot.seq).await?;
        let reply = slot.reply.as_deref().ok_or(MetaFault::Damaged)?;
        postcard::from_bytes(reply).map_err(|_| MetaFault::Damaged)
    }
}
