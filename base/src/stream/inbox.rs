//! What the other side sends.

use super::ByteStream;
use crate::{Buf, BufMut};
use futures_util::future::LocalBoxFuture;
use std::io;

/// Bytes that are asked of the socket at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Bytes of the other side in their order.
pub struct Inbox<S> {
    stream: S,
    /// Absent while the socket fills it.
    buffer: Option<BufMut>,
    /// Fills it on, though nobody may wait for it any more.
    begun: Option<LocalBoxFuture<'static, io::Result<(BufMut, usize)>>>,
    /// What of it is received and not taken.
    start: usize,
    end: usize,
}

impl<S: ByteStream> Inbox<S> {
    #[must_use]
    pub fn new(stream: S) -> Self {
        let buffer = Some(BufMut::for_overwrite(BUFFER_BYTES));
        Self { stream, buffer, begun: None, start: 0, end: 0 }
    }

    /// True when nothing was received that was not taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The first byte that comes next, which stays. `None`: the other side is gone.
    ///
    /// # Errors
    ///
    /// As [`Inbox::head`].
    pub async fn peek(&mut self) -> io::Result<Option<u8>> {
        if !self.fill(1).await? {
            return Ok(None);
        }
        Ok(self.buffer.as_ref().map(|buffer| buffer[self.start]))
    }

    /// What was received and not taken.
    #[must_use]
    #[inline]
    pub fn rest(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer[self.start..self.end])
    }

    /// Takes `bytes` of [`Inbox::rest`].
    ///
    /// # Panics
    ///
    /// When they are not there.
    #[inline]
    pub fn take(&mut self, bytes: usize) {
        assert!(bytes <= self.end - self.start, "they were seen");
        self.start += bytes;
    }

    /// The `bytes` that were taken last, as long as nothing has been received or taken otherwise since.
    #[must_use]
    pub fn taken(&self, bytes: usize) -> Option<&[u8]> {
        self.buffer.as_ref()?.get(self.start.checked_sub(bytes)?..self.start)
    }

    /// Receives until `bytes`, a few, are there. False: the other side is gone, and there were none.
    ///
    /// # Errors
    ///
    /// As [`Inbox::head`].
    pub async fn fill(&mut self, bytes: usize) -> io::Result<bool> {
        while self.buffer.is_none() || self.end - self.start < bytes {
            if let Some(begun) = &mut self.begun {
                let read = begun.await;
                self.begun = None;
                let (buffer, more) = read?;
                (self.buffer, self.end) = (Some(buffer), more);
                match more {
                    0 => return Ok(false),
                    _ => continue,
                }
            }
            // An interrupted call has taken the buffer along.
            let mut buffer = self.buffer.take().ok_or(io::ErrorKind::Interrupted)?;
            if BUFFER_BYTES - self.start < bytes || self.start == self.end {
                buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            }
            let mut received = buffer.split_to(self.end);
            let (room, more) = self.stream.read(buffer).await?;
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

    /// As [`Inbox::fill`] of one byte, but nothing is lost if it is given up: a look whether the other side is still there.
    ///
    /// # Errors
    ///
    /// As [`Inbox::head`].
    pub async fn stirs(&mut self) -> io::Result<bool>
    where
        S: 'static,
    {
        if self.is_empty()
            && let Some(buffer) = self.buffer.take()
        {
            let stream = self.stream.clone();
            self.begun = Some(Box::pin(async move { stream.read(buffer).await }));
            (self.start, self.end) = (0, 0);
        }
        self.fill(1).await
    }

    /// The next `bytes`, a few. `None`: the other side is gone, and there were none.
    ///
    /// # Errors
    ///
    /// What the stream says; [`io::ErrorKind::UnexpectedEof`] when it ends within them.
    pub async fn head(&mut self, bytes: usize) -> io::Result<Option<&[u8]>> {
        if !self.fill(bytes).await? {
            return Ok(None);
        }
        let at = self.start;
        self.start += bytes;
        let buffer = self.buffer.as_ref().ok_or(io::ErrorKind::Interrupted)?;
        Ok(Some(&buffer[at..at + bytes]))
    }

    /// The next `bytes`, in memory of their own that drives take as it is.
    ///
    /// # Errors
    ///
    /// As [`Inbox::head`], and when there are none.
    pub async fn payload(&mut self, bytes: usize) -> io::Result<Buf> {
        Ok(self.fill_exactly(BufMut::for_overwrite(bytes)).await?.freeze())
    }

    /// Fills `into` with the next bytes.
    ///
    /// # Errors
    ///
    /// As [`Inbox::payload`].
    pub async fn fill_exactly(&mut self, into: BufMut) -> io::Result<BufMut> {
        let mut rest = into;
        let there = (self.end - self.start).min(rest.len());
        let mut whole = rest.split_to(there);
        let buffer = self.buffer.as_ref().ok_or(io::ErrorKind::Interrupted)?;
        whole.copy_from_slice(&buffer[self.start..self.start + there]);
        self.start += there;
        if !rest.is_empty() {
            whole.unsplit(self.stream.read_exact(rest).await?);
        }
        Ok(whole)
    }

    /// Fills `into` as [`Inbox::fill_exactly`], and hands it back also when that fails.
    pub async fn land(&mut self, into: BufMut) -> (BufMut, io::Result<()>) {
        let mut rest = into;
        let there = (self.end - self.start).min(rest.len());
        let Some(buffer) = self.buffer.as_ref() else {
            return (rest, Err(io::ErrorKind::Interrupted.into()));
        };
        let mut whole = rest.split_to(there);
        whole.copy_from_slice(&buffer[self.start..self.start + there]);
        self.start += there;
        if rest.is_empty() {
            return (whole, Ok(()));
        }
        let (rest, landed) = self.stream.land(rest).await;
        whole.unsplit(rest);
        (whole, landed)
    }

    /// Takes the next `bytes`, and forgets them.
    ///
    /// # Errors
    ///
    /// As [`Inbox::payload`].
    pub async fn skip(&mut self, bytes: u64) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reactor::{self, Reactor};
    use crate::stream::MemoryStream;
    use std::time::Duration;

    #[test]
    fn a_look_that_is_given_up_loses_nothing() {
        Reactor::simulated(0).block_on(async {
            let (ours, theirs) = MemoryStream::pair();
            let mut inbox = Inbox::new(ours);
            for round in 0..3 {
                let look = reactor::timeout(Duration::from_secs(1), inbox.stirs());
                assert!(look.await.is_err(), "nothing comes");
                assert!(inbox.rest().is_empty());
                let sent = [round; 5];
                theirs.write_all(Buf::copy_of(&sent).into_vec()).await.expect("sent");
                assert_eq!(inbox.head(4).await.expect("there"), Some(&sent[..4]));
                assert!(inbox.stirs().await.expect("one is left"));
                assert_eq!(inbox.payload(1).await.expect("there")[..], sent[4..]);
            }
            let look = reactor::timeout(Duration::from_secs(1), inbox.stirs());
            assert!(look.await.is_err(), "nothing comes");
            theirs.close().await;
            assert!(!inbox.stirs().await.expect("the end"));
            assert!(!inbox.fill(1).await.expect("the end, again"));
        });
    }
}
