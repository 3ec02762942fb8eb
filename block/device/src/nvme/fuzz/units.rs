//! What a target sends on a queue, without I/O.

use crate::nvme::exchange::{Exchange, Step, index_of};
use crate::nvme::landing::Landing;
use levada_base::BufMut;
use levada_nvme::pdu::{COMMON_BYTES, Common, Digests};

/// Data of each read, and of each write.
const BYTES: u32 = 3000;

/// Units, one after the other, while reads and writes are open: nothing but data that were sent is ever handed out.
pub fn units(mut bytes: &[u8]) {
    let digests = Digests { header: false, data: true };
    let mut exchange = Exchange::new(4);
    let mut open: Vec<Option<(u16, Landing)>> = Vec::new();
    for place in 0..4 {
        let is_read = place % 2 == 0;
        let id = if is_read { exchange.open(BYTES, 0) } else { exchange.open(0, BYTES) };
        let into = [1000, 0, 2000].map(|part| BufMut::zeroed(if is_read { part } else { 0 }));
        open.push(Some((id, Landing::new(into.into_iter().collect()))));
    }
    while let Some((head, rest)) = bytes.split_first_chunk::<COMMON_BYTES>() {
        let Ok(common) = Common::parse(head) else { return };
        let Some((header, rest)) = rest.split_at_checked(common.rest_bytes(digests)) else {
            return;
        };
        let Ok(pdu) = common.pdu(header, digests) else { return };
        let Ok((padding, data_bytes)) = common.data_bytes(digests) else { return };
        let Ok(mut step) = exchange.take(&pdu, data_bytes) else { return };
        let Some(mut data) = rest.get(padding..) else { return };
        if let Step::Land { id, bytes: landing_bytes, .. } = step {
            let slot = open[index_of(id)].as_mut().expect("open commands only");
            assert_eq!(slot.0, id);
            let mut left = landing_bytes as usize;
            while left > 0 {
                let mut piece = slot.1.take(left);
                let Some((now, later)) = data.split_at_checked(piece.len()) else { return };
                piece.copy_from_slice(now);
                (data, left) = (later, left - piece.len());
                slot.1.put(piece);
            }
            assert_eq!(
                slot.1.last(landing_bytes as usize).concat(),
                rest[padding..padding + landing_bytes as usize]
            );
            let Some(behind) = data.get(4..) else { return };
            data = behind;
            match exchange.landed(id) {
                Ok(None) => {}
                Ok(Some(done)) => step = done,
                Err(_) => return,
            }
        }
        if let Step::Done { id, completion } = step {
            let (opened, landing) = open[index_of(id)].take().expect("once");
            assert_eq!(opened, id);
            let whole = landing.into_whole();
            let filled = whole.iter().map(|part| part.len()).sum::<usize>();
            assert!(filled == BYTES as usize || filled == 0 || !completion.status.is_success());
        }
        bytes = data;
    }
}
