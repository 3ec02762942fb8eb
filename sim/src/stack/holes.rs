//! Holes: to the model they are zeroes that are written, to its last byte at most where the size stays.

use super::spans;
use super::worker::Worker;
use levada_client::Seek;

impl Worker {
    /// Zeroes a part of a file, or makes it longer, without storing anything.
    pub(super) async fn make_hole(&mut self) {
        let Some(at) = self.handle() else { return };
        let (id, file) = (self.handles[at].0, self.handles[at].1.clone());
        let size = self.size_of(id);
        let (offset, len) = spans::to_write(&mut self.rng, size);
        let (from, bytes, end) = (offset as u64, len as u64, offset + len);
        match self.rng.below(3) {
            0 => {
                self.note(format!("zero node {id}: {len} bytes at {offset}"));
                self.put_by(id, &file, offset, vec![0; len], file.zero(from, bytes)).await;
            }
            1 if offset < size && len > 0 => {
                self.note(format!("punch node {id}: {len} bytes at {offset}"));
                let zeroes = vec![0; end.min(size) - offset];
                self.put_by(id, &file, offset, zeroes, file.punch(from, bytes)).await;
            }
            _ if size < end => {
                self.note(format!("grow node {id} from {size} to {end}"));
                let zeroes = vec![0; end - size];
                self.put_by(id, &file, size, zeroes, file.grow(end as u64)).await;
            }
            _ => {}
        }
    }

    /// Between two ranges of data there is nothing but zeroes.
    pub(super) async fn seek(&mut self) {
        let Some(at) = self.handle() else { return };
        let (id, file) = (self.handles[at].0, self.handles[at].1.clone());
        let size = self.size_of(id);
        let hole = self.rng.below(size as u64 + 1);
        self.note(format!("seek in node {id} of {size} bytes from {hole} on"));
        let data = self.done(file.seek(hole, Seek::Data)).await;
        let data = self.expect(data, None).flatten().map_or(size, |data| data as usize);
        let skipped =
            self.state.borrow_mut().tree.file(id).data.get(hole as usize..data).map(<[u8]>::to_vec);
        if skipped.is_none_or(|skipped| skipped.iter().any(|byte| *byte != 0)) {
            self.fail(&format!("node {id}: data at {hole} or behind it was skipped up to {data}"));
        }
        let next = self.done(file.seek(data as u64, Seek::Hole)).await;
        let next = self.expect(next, None).flatten();
        let is_right = next.map_or(data == size, |next| next > data as u64 && next <= size as u64);
        if !is_right {
            self.fail(&format!("node {id}: data at {data} ends at {next:?}"));
        }
    }
}
