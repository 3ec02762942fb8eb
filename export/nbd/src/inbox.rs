//! What a client sends: many small requests for one look at the socket, large payloads straight to where they stay.

use crate::channel::Channel;
use levada_base::{Buf, BufMut};
use std::io;

/// Bytes that are asked of the socket at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Bytes of a client in their order.
pub(crate) struct Inbox {
    channel: Channel,
    /// Absent while the socket fills it.
    buffer: Option<BufMut>,
    /// What of it is received and not taken.
    start: usize,
    end: usize,
}

impl Inbox {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { channel, buffer: Some(BufMut::for_overwrite(BUFFER_BYTES)), start: 0, end: 0 }
    }

    /// True when nothing was received that was not taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Receives until `bytes` are there. False: the client is gone, and there were none.
    async fn fill(&mut self, bytes: usize) -> io::Result<bool> {
        while self.end - self.start < bytes {
            // An interrupted call has taken the buffer along.
            let mut buffer = self.buffer.take().ok_or(io::ErrorKind::Interrupted)?;
            if BUFFER_BYTES - self.start < bytes || self.start == self.end {
                buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            }
            let mut received = buffer.split_to(self.end);
            let (room, more) = self.channel.read(buffer).await?;
            received.unsplit(room);
            self.buffer = Some(received);
            match more {
                0 if self.is_empty() => return Ok(false),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                more => self.end += more,
            }
        }
        Ok(true)
    }

    /// The next `bytes`, a few. `None`: the client is gone, and there were none.
    pub(crate) async fn head(&mut self, bytes: usize) -> io::Result<Option<&[u8]>> {
        if !self.fill(bytes).await? {
            return Ok(None);
        }
        let at = self.start;
        self.start += bytes;
        let buffer = self.buffer.as_ref().ok_or(io::ErrorKind::Interrupted)?;
        Ok(Some(&buffer[at..at + bytes]))
    }

    /// The next `bytes`, in memory of their own that drives take as it is.
    pub(crate) async fn payload(&mut self, bytes: usize) -> io::Result<Buf> {
        let mut rest = BufMut::for_overwrite(bytes);
        let there = (self.end - self.start).min(bytes);
        let mut whole = rest.split_to(there);
        let buffer = self.buffer.as_ref().ok_or(io::ErrorKind::Interrupted)?;
        whole.copy_from_slice(&buffer[self.start..self.start + there]);
        self.start += there;
        if there < bytes {
            whole.unsplit(self.channel.read_exact(rest).await?);
        }
        Ok(whole.freeze())
    }

    /// Takes the next `bytes`, and forgets them.
    pub(crate) async fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let mut left = bytes;
        while left > 0 {
            if self.is_empty() && !self.fill(1).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let taken = ((self.end - self.start) as u64).min(left);
            self.start += taken as usize;
            left -= taken;
        }
        Ok(())
    }
}
