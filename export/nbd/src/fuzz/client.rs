//! A client whose every word the fuzzer chooses, and which knows what the answer to each must be.

use super::disk::{BYTES, NAMES, Shelf};
use crate::connection::DATA_BYTES_MAX;
use crate::option::{
    ALLOCATION, ALLOCATION_ID, ClientOption, EXPORT_NAME_PADDING, MetaRequest, OPTION_BYTES_MAX,
};
use crate::reply::{Error, Form};
use crate::request::{Command, CommandFlags, Request};
use levada_base::choices::Choices;
use levada_base::reactor::net::Stream;
use levada_base::{Buf, BufMut};
use std::collections::BTreeMap;
use std::rc::Rc;

const STEPS_MAX: usize = 64;
/// Of one request that is not too long: more shows nothing more.
const PAYLOAD_BYTES_MAX: u64 = 2 * BYTES;

const ACK: u32 = 1;
const IS_ERROR: u32 = 1 << 31;
const UNSUPPORTED: u32 = IS_ERROR + 1;
const POLICY: u32 = IS_ERROR + 2;
const INVALID: u32 = IS_ERROR + 3;
const UNKNOWN_EXPORT: u32 = IS_ERROR + 6;
const TOO_BIG: u32 = IS_ERROR + 9;

/// What a request that was sent is answered.
enum Expected {
    Done,
    Data(Vec<u8>),
    /// Extents of so many bytes; only the first of them.
    Extents {
        bytes: u64,
        is_one: bool,
    },
    Failed(u32),
}

/// How an option is spoilt.
enum Wrong {
    Nothing,
    Magic,
    /// Above what an option may have.
    Length(u32),
    /// The client leaves in the middle of it.
    Cut(u8),
}

/// `None` where a client gets no further: it was hung up on, or has said its last word.
type Further<T> = Option<T>;

pub(super) struct Client {
    stream: Stream,
    shelf: Rc<Shelf>,
    /// Nobody who has said nothing wrong is hung up on.
    pub may_be_hung_up_on: bool,
    form: Form,
    allocation_of: Option<Vec<u8>>,
    /// A volume is in use.
    is_used: bool,
    /// As it must be, and whether there are contexts.
    pub model: Vec<u8>,
    is_read_only: bool,
    has_allocation: bool,
    expected: BTreeMap<u64, Expected>,
}

impl Client {
    pub fn new(stream: Stream, shelf: Rc<Shelf>) -> Self {
        Self {
            stream,
            shelf,
            may_be_hung_up_on: false,
            form: Form::default(),
            allocation_of: None,
            is_used: false,
            model: vec![0; BYTES as usize],
            is_read_only: false,
            has_allocation: false,
            expected: BTreeMap::new(),
        }
    }

    async fn take(&self, bytes: usize) -> Further<Vec<u8>> {
        Some(self.stream.read_exact(BufMut::for_overwrite(bytes)).await.ok()?.to_vec())
    }

    async fn put(&self, bytes: &[u8]) -> Further<()> {
        self.stream.write_all(Buf::copy_of(bytes).into_vec()).await.ok()
    }

    /// The last word of a connection: nothing more is to come.
    async fn is_hung_up_on(&mut self) -> Further<()> {
        self.may_be_hung_up_on = true;
        assert_eq!(self.take(1).await, None, "there is something behind the last word");
        None
    }

    /// Talks until there is nothing more to say.
    pub async fn run(&mut self, choices: &mut Choices<'_>) -> Further<()> {
        assert_eq!(self.take(18).await?[..16], *b"NBDMAGICIHAVEOPT");
        let flags = if choices.rarely(16) { choices.value() } else { 1 + (choices.value() & 2) };
        self.put(&flags.to_be_bytes()).await?;
        if flags > 3 {
            return self.is_hung_up_on().await;
        }
        let has_padding = flags & 2 == 0;
        // As clients begin, or as nobody does.
        let usual: &[u32] = choices.one_of(&[&[8, 10, 7][..], &[11, 10, 7], &[]]);
        for &kind in usual {
            let data = match kind {
                7 => vec![0; 6],
                10 => allocation_of_default(),
                _ => Vec::new(),
            };
            self.option(kind, data, has_padding, Wrong::Nothing).await?;
        }
        for _ in 0..STEPS_MAX {
            if choices.is_empty() {
                return Some(());
            }
            if self.is_used {
                break;
            }
            let kind = if choices.rarely(16) { choices.value() } else { choices.below(12) as u32 };
            let wrong = match choices.below(48) {
                0 => Wrong::Magic,
                1 => Wrong::Length(choices.value()),
                2 => Wrong::Cut(choices.byte()),
                _ => Wrong::Nothing,
            };
            let data = option_data(choices, kind);
            self.option(kind, data, has_padding, wrong).await?;
        }
        for _ in 0..STEPS_MAX {
            if choices.is_empty() {
                return Some(());
            }
            for _ in 0..=choices.below(3) {
                self.request(choices).await?;
            }
            while !self.expected.is_empty() {
                self.hear().await?;
            }
        }
        Some(())
    }

    async fn option(
        &mut self,
        kind: u32,
        data: Vec<u8>,
        has_padding: bool,
        wrong: Wrong,
    ) -> Further<()> {
        let head =
            |magic: &[u8], bytes: u32| [magic, &kind.to_be_bytes(), &bytes.to_be_bytes()].concat();
        let sound = [head(b"IHAVEOPT", data.len() as u32), data.clone()].concat();
        match wrong {
            Wrong::Nothing => self.put(&sound).await?,
            Wrong::Magic => {
                self.put(&head(b"IHAVE0PT", 0)).await?;
                return self.is_hung_up_on().await;
            }
            Wrong::Length(more) => {
                self.put(&head(b"IHAVEOPT", (OPTION_BYTES_MAX + 1).saturating_add(more))).await?;
                assert_eq!(self.last_reply(kind).await?, TOO_BIG);
                return self.is_hung_up_on().await;
            }
            Wrong::Cut(at) => {
                self.put(&sound[..usize::from(at) % sound.len()]).await?;
                self.may_be_hung_up_on = true;
                return None;
            }
        }
        let exists = |name: &[u8]| self.shelf.find(name).is_some();
        let last = |exists: bool| if exists { ACK } else { UNKNOWN_EXPORT };
        let expected = match ClientOption::parse(kind, &data) {
            ClientOption::ExportName(name) if exists(&name) => {
                let told = self.take(10 + if has_padding { EXPORT_NAME_PADDING } else { 0 });
                assert_eq!(told.await?[..8], BYTES.to_be_bytes());
                self.uses(&name);
                return Some(());
            }
            ClientOption::ExportName(_) => return self.is_hung_up_on().await,
            ClientOption::Abort => {
                assert_eq!(self.last_reply(kind).await?, ACK);
                return self.is_hung_up_on().await;
            }
            ClientOption::Go(request) => {
                let expected = last(exists(&request.export));
                assert_eq!(self.last_reply(kind).await?, expected);
                if expected == ACK {
                    self.uses(&request.export);
                }
                return Some(());
            }
            ClientOption::Info(request) => last(exists(&request.export)),
            ClientOption::ListMetaContext(request) => last(exists(&request.export)),
            ClientOption::SetMetaContext(_) if self.form == Form::Simple => INVALID,
            ClientOption::SetMetaContext(MetaRequest { export, queries }) => {
                let expected = last(exists(&export));
                if expected == ACK {
                    let is_asked = queries.iter().any(|query| query == ALLOCATION);
                    self.allocation_of = is_asked.then_some(export);
                }
                expected
            }
            ClientOption::StructuredReply => {
                if self.form == Form::Simple {
                    self.form = Form::Structured;
                }
                ACK
            }
            ClientOption::ExtendedHeaders => {
                self.form = Form::Extended;
                ACK
            }
            ClientOption::List => ACK,
            ClientOption::StartTls => POLICY,
            ClientOption::Unknown(_) => UNSUPPORTED,
            ClientOption::Malformed(_) => INVALID,
        };
        assert_eq!(self.last_reply(kind).await?, expected, "to option {kind}");
        Some(())
    }

    fn uses(&mut self, name: &[u8]) {
        self.is_used = true;
        self.is_read_only = name == NAMES[1].as_bytes();
        self.has_allocation = self.allocation_of.as_deref() == Some(name);
    }

    /// The kind of the last reply to an option of this kind.
    async fn last_reply(&self, kind: u32) -> Further<u32> {
        loop {
            let head = self.take(20).await?;
            let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("4"));
            assert_eq!((&head[..8], word(8)), (&0x0003_e889_0455_65a9u64.to_be_bytes()[..], kind));
            assert!(word(16) < 5000, "a reply of {} bytes", word(16));
            self.take(word(16) as usize).await?;
            let reply = word(12);
            if reply == ACK || reply & IS_ERROR != 0 {
                return Some(reply);
            }
        }
    }

    async fn request(&mut self, choices: &mut Choices<'_>) -> Further<()> {
        let is_extended = self.form == Form::Extended;
        let kind = match choices.below(16) {
            15 => choices.value() as u16,
            kind => [0, 1, 1, 1, 3, 4, 5, 6, 6, 7, 7, 0, 0, 1, 8][kind],
        };
        let flags = match choices.below(8) {
            0..4 => 0,
            4 => choices.value() as u16,
            flag => [1, 1 << (choices.below(6)), 1 << 5][flag - 5],
        };
        let any = |choices: &mut Choices<'_>| match choices.below(8) {
            0..3 => choices.number() % 4096,
            3..5 => choices.number() % (2 * BYTES) / 512 * 512,
            5 => BYTES - choices.number() % 4096,
            6 => u64::from(choices.value()),
            _ => u64::from(choices.value()) << 32 | u64::from(choices.value()),
        };
        let (at, length) = (any(choices), any(choices));
        let cookie = match self.expected.last_key_value() {
            Some((last, _)) => last + 1,
            None => choices.number() >> 1,
        };
        let magic: u32 = if is_extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(at.to_be_bytes());
        match is_extended {
            true => bytes.extend(length.to_be_bytes()),
            false => bytes.extend((length as u32).to_be_bytes()),
        }
        let is_wrong = choices.rarely(64);
        if is_wrong {
            bytes[choices.below(4)] ^= 1;
        }
        let request = Request::parse(&bytes, is_extended);
        let Some(request) = request.ok() else {
            self.put(&bytes).await?;
            return self.ends().await;
        };
        let payload_bytes = request.payload_bytes(is_extended);
        if request.command == Command::Disconnect || payload_bytes > DATA_BYTES_MAX {
            self.put(&bytes).await?;
            return self.ends().await;
        }
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Some(());
        }
        let fill = choices.byte();
        bytes.resize(bytes.len() + payload_bytes as usize, fill);
        if choices.rarely(32) {
            let cut_at = choices.number() as usize % bytes.len();
            self.put(&bytes[..cut_at]).await?;
            self.may_be_hung_up_on = true;
            return None;
        }
        // As it is answered in the order in which it is sent: nothing waits below.
        let expected = self.expect(request, fill);
        self.expected.insert(cookie, expected);
        self.put(&bytes).await
    }

    /// Nothing that is sent now is understood; what was asked before is answered.
    async fn ends(&mut self) -> Further<()> {
        while !self.expected.is_empty() {
            self.hear().await?;
        }
        self.is_hung_up_on().await
    }

    /// Carries a request out on the model.
    fn expect(&mut self, request: Request, fill: u8) -> Expected {
        let Request { command, flags, at, bytes, .. } = request;
        let is_change = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
        let end = at.checked_add(bytes).filter(|end| *end <= BYTES);
        let is_slow = command == Command::WriteZeroes
            && flags.contains(CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO);
        let error = match command {
            _ if !request.has_sound_flags() => Some(Error::Invalid),
            Command::Disconnect | Command::Unknown(_) => Some(Error::Invalid),
            Command::Flush => None,
            _ if is_change && self.is_read_only => Some(Error::NotPermitted),
            _ if bytes == 0 => Some(Error::Invalid),
            Command::Read if bytes > DATA_BYTES_MAX => Some(Error::Overflow),
            _ if is_slow => Some(Error::NotSupported),
            _ if end.is_none() && is_change => Some(Error::NoSpace),
            _ if end.is_none() => Some(Error::Invalid),
            Command::BlockStatus if !self.has_allocation => Some(Error::Invalid),
            _ => None,
        };
        if let Some(error) = error {
            return Expected::Failed(error as u32);
        }
        // A flush is nowhere in particular.
        let Some(end) = end else { return Expected::Done };
        let range = at as usize..end as usize;
        match command {
            Command::Read => return Expected::Data(self.model[range].to_vec()),
            Command::BlockStatus => {
                let is_one = flags.contains(CommandFlags::REQ_ONE);
                return Expected::Extents { bytes, is_one };
            }
            Command::Write => self.model[range].fill(fill),
            Command::Trim | Command::WriteZeroes => self.model[range].fill(0),
            _ => {}
        }
        Expected::Done
    }

    /// Takes an answer, which must be the one that is expected.
    async fn hear(&mut self) -> Further<()> {
        let head_bytes = match self.form {
            Form::Simple => 16,
            Form::Structured => 20,
            Form::Extended => 32,
        };
        let head = self.take(head_bytes).await?;
        let u32_at = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("4"));
        let u64_at = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().expect("8"));
        let cookie = u64_at(8);
        let expected = self.expected.remove(&cookie).expect("somebody has asked, and once");
        if self.form == Form::Simple {
            assert_eq!(u32_at(0), 0x6744_6698);
            match expected {
                Expected::Done => assert_eq!(u32_at(4), 0),
                Expected::Failed(error) => assert_eq!(u32_at(4), error),
                Expected::Extents { .. } => unreachable!("there are no contexts"),
                Expected::Data(data) => {
                    assert_eq!(u32_at(4), 0);
                    assert!(self.take(data.len()).await? == data, "what was read");
                }
            }
            return Some(());
        }
        let (magic, bytes) = match self.form {
            Form::Extended => (0x6e8a_278c, u64_at(24)),
            _ => (0x668e_33ef, u32_at(16).into()),
        };
        assert_eq!(u32_at(0), magic);
        assert!(bytes <= BYTES + 8, "an answer of {bytes} bytes");
        let content = self.take(bytes as usize).await?;
        let (flags, kind) = (u32_at(4) >> 16, u32_at(4) & 0xffff);
        assert_eq!(flags, 1, "the only chunk");
        match expected {
            Expected::Done => assert_eq!((kind, bytes), (0, 0)),
            Expected::Failed(error) => {
                assert_eq!((kind, &content[..4]), (0x8001, &error.to_be_bytes()[..]));
            }
            Expected::Data(data) => {
                assert_eq!(kind, 1);
                assert!(content[8..] == data, "what was read");
            }
            Expected::Extents { bytes, is_one } => {
                assert_eq!(content[..4], ALLOCATION_ID.to_be_bytes());
                let (kind_wanted, before, each) = match self.form {
                    Form::Extended => (6, 8, 16),
                    _ => (5, 4, 8),
                };
                assert_eq!(kind, kind_wanted);
                let (extents, rest) = content[before..].as_chunks::<8>();
                assert!(rest.is_empty() && !extents.is_empty());
                let told: u64 = match each {
                    16 => extents.iter().step_by(2).map(|word| u64::from_be_bytes(*word)).sum(),
                    _ => extents.iter().map(|words| u64::from_be_bytes(*words) >> 32).sum(),
                };
                if is_one {
                    assert!(
                        extents.len() == each / 8 && (1..=bytes).contains(&told),
                        "{told} of {bytes} bytes"
                    );
                } else {
                    assert_eq!(told, bytes);
                }
            }
        }
        Some(())
    }
}

/// A request for the one context of the default export.
fn allocation_of_default() -> Vec<u8> {
    let words = [0, 1, ALLOCATION.len() as u32].map(u32::to_be_bytes);
    [&words.concat()[..], ALLOCATION].concat()
}

/// What an option of this kind has, or anything.
fn option_data(choices: &mut Choices<'_>, kind: u32) -> Vec<u8> {
    if choices.rarely(8) {
        let bytes = choices.below(64);
        return choices.bytes(bytes);
    }
    let name = choices.one_of(&[&b""[..], b"disk", b"kept", b"none", b"\xff"]);
    let text = |text: &[u8]| [&(text.len() as u32).to_be_bytes()[..], text].concat();
    match kind {
        1 => name.to_vec(),
        6 | 7 => {
            let infos = choices.below(4) as u16;
            let wanted = (0..infos).flat_map(|info| info.to_be_bytes());
            text(name).into_iter().chain(infos.to_be_bytes()).chain(wanted).collect()
        }
        9 | 10 => {
            let queries = choices.below(3) as u32;
            let mut data = [text(name), queries.to_be_bytes().to_vec()].concat();
            for _ in 0..queries {
                data.extend(text(choices.one_of(&[ALLOCATION, b"base:", b"qemu:x", b""])));
            }
            data
        }
        _ => Vec::new(),
    }
}
