//! The talk before a client uses an export (doc/proto.md, "Handshake phase").

use crate::connection::DATA_BYTES_MAX;
use crate::option::{
    ALLOCATION, ALLOCATION_ID, ClientOption, EXPORT_NAME_PADDING, GREETING, HandshakeFlags,
    InfoRequest, MetaRequest, OPTION_BYTES_MAX, OPTION_HEAD_BYTES, OPTION_MAGIC, OptionReply,
    Refusal, TransmissionFlags, option_head,
};
use crate::reply::Form;
use crate::server::Exports;
use crate::tls::{Channel, Tls};
use levada_base::Buf;
use levada_base::stream::{ByteStream, Inbox};
use levada_volume::Volume;
use std::io;
use std::rc::Rc;

/// Options that a client may try.
const OPTIONS_MAX: usize = 1000;

/// What a client and its server have agreed on.
pub(crate) struct Agreed {
    pub(crate) channel: Channel,
    /// May hold the first requests already.
    pub(crate) inbox: Inbox<Channel>,
    pub(crate) volume: Rc<dyn Volume>,
    pub(crate) form: Form,
    /// `base:allocation` can be asked for.
    pub(crate) has_allocation: bool,
}

/// Why there is no agreement.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoDeal {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it speaks no newstyle NBD")]
    NotNbd,
    #[error("it asked for {bytes} bytes of an option, and may for {OPTION_BYTES_MAX}")]
    TooLong { bytes: u32 },
    #[error("it tried more than {OPTIONS_MAX} options")]
    Endless,
    #[error("it named an export that is not there, in a way that takes no answer")]
    UnknownExport,
    #[error("it went on in the clear where TLS begins")]
    InTheClear,
}

/// How to go on after an option.
enum Next {
    Option,
    Use(Rc<dyn Volume>),
    Leave,
}

/// The talk with one client.
struct Talk<'a> {
    exports: &'a dyn Exports,
    tls: Option<&'a Tls>,
    channel: Channel,
    inbox: Inbox<Channel>,
    without_padding: bool,
    form: Form,
    /// The export for which `base:allocation` was asked.
    allocation_of: Option<Vec<u8>>,
}

/// Talks until an export is chosen; `None`: the client left.
pub(crate) async fn negotiate(
    channel: Channel,
    exports: &dyn Exports,
    tls: Option<&Tls>,
) -> Result<Option<Agreed>, NoDeal> {
    let inbox = Inbox::new(channel.clone());
    let mut talk = Talk {
        exports,
        tls,
        channel,
        inbox,
        without_padding: false,
        form: Form::default(),
        allocation_of: None,
    };
    if !talk.greet().await? {
        return Ok(None);
    }
    for _ in 0..OPTIONS_MAX {
        let Some(option) = talk.option().await? else { return Ok(None) };
        match talk.answer(option).await? {
            Next::Option => {}
            Next::Leave => return Ok(None),
            Next::Use(volume) => {
                let Talk { channel, inbox, form, allocation_of, .. } = talk;
                let has_allocation = allocation_of.is_some();
                return Ok(Some(Agreed { channel, inbox, volume, form, has_allocation }));
            }
        }
    }
    Err(NoDeal::Endless)
}

/// What a volume offers.
fn flags_of(volume: &dyn Volume, form: Form) -> TransmissionFlags {
    let mut flags = TransmissionFlags::HAS_FLAGS
        | TransmissionFlags::SEND_FLUSH
        | TransmissionFlags::SEND_FUA
        | TransmissionFlags::CAN_MULTI_CONN
        | TransmissionFlags::SEND_CACHE;
    if volume.shape().is_read_only {
        flags |= TransmissionFlags::READ_ONLY;
    } else {
        flags |= TransmissionFlags::SEND_TRIM
            | TransmissionFlags::SEND_WRITE_ZEROES
            | TransmissionFlags::SEND_FAST_ZERO;
    }
    if form != Form::Simple {
        // Data come in one piece anyway.
        flags |= TransmissionFlags::SEND_DF;
    }
    flags
}

impl Talk<'_> {
    async fn send(&self, bytes: Vec<u8>) -> io::Result<()> {
        self.channel.write_all(Buf::copy_of(&bytes).into_vec()).await
    }

    async fn reply(&self, kind: u32, reply: OptionReply<'_>) -> io::Result<()> {
        self.send(reply.encode(kind)).await
    }

    /// Says who we are, and hears what the client bears; false: it left.
    async fn greet(&mut self) -> Result<bool, NoDeal> {
        let ours = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
        let mut greeting = Vec::new();
        greeting.extend_from_slice(&GREETING.to_be_bytes());
        greeting.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        greeting.extend_from_slice(&ours.bits().to_be_bytes());
        self.send(greeting).await?;
        let Some(theirs) = self.inbox.head(4).await? else { return Ok(false) };
        let theirs = u32::from_be_bytes(theirs.try_into().expect("4 bytes"));
        let theirs = u16::try_from(theirs).ok().and_then(HandshakeFlags::from_bits);
        let theirs = theirs.ok_or(NoDeal::NotNbd)?;
        self.without_padding = theirs.contains(HandshakeFlags::NO_ZEROES);
        Ok(true)
    }

    /// The next option; `None`: the client left.
    async fn option(&mut self) -> Result<Option<ClientOption>, NoDeal> {
        let Some(head) = self.inbox.head(OPTION_HEAD_BYTES).await? else { return Ok(None) };
        let head = head.try_into().expect("as many bytes as asked for");
        let (kind, bytes) = option_head(head).ok_or(NoDeal::NotNbd)?;
        if bytes > OPTION_BYTES_MAX {
            self.reply(kind, OptionReply::Refused(Refusal::TooBig, "too long")).await?;
            return Err(NoDeal::TooLong { bytes });
        }
        let data = self.inbox.payload(bytes as usize).await?;
        Ok(Some(ClientOption::parse(kind, &data)))
    }

    async fn answer(&mut self, option: ClientOption) -> Result<Next, NoDeal> {
        let kind = option.kind();
        let refuse = |refusal, why| OptionReply::Refused(refusal, why);
        let must_be_secure = self.tls.is_some() && !self.channel.is_secure();
        let reply = match option {
            ClientOption::Abort => {
                self.reply(kind, OptionReply::Ack).await?;
                return Ok(Next::Leave);
            }
            ClientOption::StartTls => return self.start_tls(kind).await,
            ClientOption::ExportName(_) if must_be_secure => return Err(NoDeal::InTheClear),
            _ if must_be_secure => refuse(Refusal::TlsRequired, "this server speaks TLS only"),
            ClientOption::ExportName(name) => return self.use_at_once(&name).await,
            ClientOption::List => {
                for name in self.exports.list().await {
                    self.reply(kind, OptionReply::Server(name.as_bytes())).await?;
                }
                OptionReply::Ack
            }
            ClientOption::Info(request) => return self.info(kind, &request, false).await,
            ClientOption::Go(request) => return self.info(kind, &request, true).await,
            ClientOption::StructuredReply => {
                // Extended headers imply it, and more.
                if self.form == Form::Simple {
                    self.form = Form::Structured;
                }
                OptionReply::Ack
            }
            ClientOption::ExtendedHeaders => {
                self.form = Form::Extended;
                OptionReply::Ack
            }
            ClientOption::ListMetaContext(request) => {
                return self.meta_context(kind, &request, true).await;
            }
            ClientOption::SetMetaContext(_) if self.form == Form::Simple => {
                refuse(Refusal::Invalid, "structured replies first")
            }
            ClientOption::SetMetaContext(request) => {
                return self.meta_context(kind, &request, false).await;
            }
            ClientOption::Unknown(_) => refuse(Refusal::Unsupported, ""),
            ClientOption::Malformed(_) => refuse(Refusal::Invalid, "not what this option has"),
        };
        self.reply(kind, reply).await?;
        Ok(Next::Option)
    }

    async fn start_tls(&mut self, kind: u32) -> Result<Next, NoDeal> {
        let reply = match self.tls {
            None => OptionReply::Refused(Refusal::Policy, "this server speaks no TLS"),
            Some(_) if self.channel.is_secure() => {
                OptionReply::Refused(Refusal::Invalid, "TLS is on already")
            }
            Some(_) => OptionReply::Ack,
        };
        let (Some(tls), OptionReply::Ack) = (self.tls, &reply) else {
            self.reply(kind, reply).await?;
            return Ok(Next::Option);
        };
        self.reply(kind, reply).await?;
        // What came before TLS could be from anybody, and must not count as if it had come within.
        if !self.inbox.is_empty() {
            return Err(NoDeal::InTheClear);
        }
        self.channel = self.channel.clone().secured(tls.session()?).await?;
        self.inbox = Inbox::new(self.channel.clone());
        (self.form, self.allocation_of) = (Form::default(), None);
        Ok(Next::Option)
    }

    async fn find(&self, name: &[u8]) -> Option<Rc<dyn Volume>> {
        self.exports.open(std::str::from_utf8(name).ok()?).await
    }

    async fn use_at_once(&mut self, name: &[u8]) -> Result<Next, NoDeal> {
        let volume = self.find(name).await.ok_or(NoDeal::UnknownExport)?;
        let mut answer = Vec::new();
        answer.extend_from_slice(&volume.size_bytes().to_be_bytes());
        answer.extend_from_slice(&flags_of(&*volume, self.form).bits().to_be_bytes());
        if !self.without_padding {
            answer.resize(answer.len() + EXPORT_NAME_PADDING, 0);
        }
        self.send(answer).await?;
        self.keep_contexts_of(name);
        Ok(Next::Use(volume))
    }

    /// Contexts that were asked of another export are none of this one.
    fn keep_contexts_of(&mut self, name: &[u8]) {
        self.allocation_of = self.allocation_of.take().filter(|asked| asked == name);
    }

    async fn info(
        &mut self,
        kind: u32,
        request: &InfoRequest,
        is_go: bool,
    ) -> Result<Next, NoDeal> {
        let Some(volume) = self.find(&request.export).await else {
            let reply = OptionReply::Refused(Refusal::UnknownExport, "there is no such export");
            self.reply(kind, reply).await?;
            return Ok(Next::Option);
        };
        let flags = flags_of(&*volume, self.form);
        let export = OptionReply::InfoExport { size_bytes: volume.size_bytes(), flags };
        self.reply(kind, export).await?;
        if request.wants_name {
            self.reply(kind, OptionReply::InfoName(&request.export)).await?;
        }
        if request.wants_block_size {
            let preferred = volume.shape().block_bytes.max(512) as u32;
            let most = DATA_BYTES_MAX as u32;
            let sizes = OptionReply::InfoBlockSize { least: 1, preferred, most };
            self.reply(kind, sizes).await?;
        }
        self.reply(kind, OptionReply::Ack).await?;
        if !is_go {
            return Ok(Next::Option);
        }
        self.keep_contexts_of(&request.export);
        Ok(Next::Use(volume))
    }

    async fn meta_context(
        &mut self,
        kind: u32,
        request: &MetaRequest,
        is_list: bool,
    ) -> Result<Next, NoDeal> {
        let reply = if self.find(&request.export).await.is_none() {
            OptionReply::Refused(Refusal::UnknownExport, "there is no such export")
        } else {
            let is_asked = request.asks_allocation(is_list);
            if is_asked {
                // "A server SHOULD send 0 as the id in a list".
                let id = if is_list { 0 } else { ALLOCATION_ID };
                self.reply(kind, OptionReply::MetaContext { id, name: ALLOCATION }).await?;
            }
            if !is_list {
                self.allocation_of = is_asked.then(|| request.export.clone());
            }
            OptionReply::Ack
        };
        self.reply(kind, reply).await?;
        Ok(Next::Option)
    }
}
