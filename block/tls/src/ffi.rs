//! OpenSSL's functions for a key from outside TLS with a hash of one's choice (`SSL_set_psk_find_session_callback(3)` and
//! `SSL_set_psk_use_session_callback(3)`), which the `openssl` crate does not have: the older ones that it has know SHA-256 alone.
//!
//! A session asks for its key while it shakes hands. What it asks lies beside it ([`Attached`]), and is found by a pointer in its first slot
//! for such data, which OpenSSL leaves to its user.
#![allow(unsafe_code)] // Functions of OpenSSL, and its calls back into this crate.

use foreign_types::ForeignTypeRef;
use levada_base::stream::Wire;
use levada_nvme::tls::{SharedKey, Suite};
use libc::{c_int, c_uchar, c_void, size_t};
use openssl::error::ErrorStack;
use openssl::ssl::{Ssl, SslRef, SslStream};
use openssl_sys as sys;
use std::ptr;
use std::rc::Rc;

type FindSession = unsafe extern "C" fn(
    ssl: *mut sys::SSL,
    identity: *const c_uchar,
    identity_bytes: size_t,
    session: *mut *mut sys::SSL_SESSION,
) -> c_int;

type UseSession = unsafe extern "C" fn(
    ssl: *mut sys::SSL,
    hash: *const sys::EVP_MD,
    identity: *mut *const c_uchar,
    identity_bytes: *mut size_t,
    session: *mut *mut sys::SSL_SESSION,
) -> c_int;

// As `openssl/ssl.h` of OpenSSL 1.1.1 and 3 declares them.
unsafe extern "C" {
    fn SSL_set_psk_find_session_callback(ssl: *mut sys::SSL, callback: Option<FindSession>);
    fn SSL_set_psk_use_session_callback(ssl: *mut sys::SSL, callback: Option<UseSession>);
    fn SSL_SESSION_new() -> *mut sys::SSL_SESSION;
    fn SSL_SESSION_set1_master_key(
        session: *mut sys::SSL_SESSION,
        key: *const c_uchar,
        key_bytes: size_t,
    ) -> c_int;
    fn SSL_SESSION_set_cipher(
        session: *mut sys::SSL_SESSION,
        cipher: *const sys::SSL_CIPHER,
    ) -> c_int;
    fn SSL_SESSION_set_protocol_version(session: *mut sys::SSL_SESSION, version: c_int) -> c_int;
    fn SSL_CIPHER_find(ssl: *mut sys::SSL, id: *const c_uchar) -> *const sys::SSL_CIPHER;
}

/// The slot of OpenSSL's `SSL_set_app_data`.
const APP_DATA: c_int = 0;

/// Who names a key, or is asked for one that was named.
pub(crate) trait Keys: 'static {
    /// The side that names keys: which, and what it is.
    fn offered(&self) -> Option<(&[u8], &SharedKey)>;

    /// The other side: the key that was named.
    fn find(&self, identity: &[u8]) -> Option<&SharedKey>;
}

/// TLS of a connection, and where it has its key from.
pub(crate) struct Attached<K: Keys> {
    /// Has a pointer to `keys`, so it ends first.
    pub stream: SslStream<Wire>,
    keys: Rc<K>,
}

impl<K: Keys> Attached<K> {
    pub fn new(ssl: Ssl, wire: Wire, keys: K) -> Result<Self, ErrorStack> {
        let keys = Rc::new(keys);
        let stream = SslStream::new(ssl, wire)?;
        let raw = stream.ssl().as_ptr();
        // SAFETY: `raw` is valid as long as `stream`. The pointer is that of memory which `keys` holds for at least as long, at one place,
        // and which is only read through shared references. The callbacks of this SSL are those for `K`, set here and nowhere else.
        unsafe {
            if sys::SSL_set_ex_data(raw, APP_DATA, Rc::as_ptr(&keys).cast_mut().cast::<c_void>())
                != 1
            {
                return Err(ErrorStack::get());
            }
            SSL_set_psk_find_session_callback(raw, Some(find_session::<K>));
            SSL_set_psk_use_session_callback(raw, Some(use_session::<K>));
        }
        Ok(Self { stream, keys })
    }

    pub fn keys(&self) -> &K {
        &self.keys
    }
}

/// What lies beside a session, for as long as OpenSSL is in one of its calls.
///
/// # Safety
///
/// `ssl` is one that [`Attached::new`] has made with the same `K`, or has no data.
unsafe fn keys_of<'a, K: Keys>(ssl: *const sys::SSL) -> Option<&'a K> {
    // SAFETY: of the same type, as the caller says; OpenSSL calls back only while `Attached`, and with it the memory, is there.
    unsafe { sys::SSL_get_ex_data(ssl, APP_DATA).cast::<K>().as_ref() }
}

/// The keys of a session in one of the `openssl` crate's own callbacks, for a context whose sessions all have a `K`.
pub(crate) fn keys_in_callback<K: Keys>(ssl: &SslRef) -> Option<&K> {
    // SAFETY: contexts are this crate's, each with sessions of one kind, which `Attached::new` makes before anything is received.
    unsafe { keys_of(ssl.as_ptr()) }
}

/// The data of an extension of the first message, in the callback for that message.
pub(crate) fn extension(ssl: &SslRef, kind: u32) -> Option<&[u8]> {
    let (mut data, mut bytes) = (ptr::null(), 0);
    // SAFETY: `ssl` is valid, and so are the places for the answer. The data belong to the message, which stays until the callback is over;
    // `ssl` is borrowed for no longer.
    unsafe {
        match sys::SSL_client_hello_get0_ext(ssl.as_ptr(), kind, &mut data, &mut bytes) {
            1 if !data.is_null() => Some(std::slice::from_raw_parts(data, bytes)),
            _ => None,
        }
    }
}

/// A session of which nothing is known but its key; null where OpenSSL has no memory, or not the suite.
///
/// # Safety
///
/// `ssl` is valid.
unsafe fn session_of(ssl: *mut sys::SSL, key: &SharedKey) -> *mut sys::SSL_SESSION {
    // TLS_AES_128_GCM_SHA256 and TLS_AES_256_GCM_SHA384 (RFC 8446, B.4).
    let suite = match key.suite {
        Suite::Aes128GcmSha256 => [0x13, 0x01],
        Suite::Aes256GcmSha384 => [0x13, 0x02],
    };
    // SAFETY: all pointers are valid; the key is copied, the suite is OpenSSL's own for ever, and what was made is freed if not all is well.
    unsafe {
        let session = SSL_SESSION_new();
        let cipher = SSL_CIPHER_find(ssl, suite.as_ptr());
        let is_made = !session.is_null()
            && !cipher.is_null()
            && SSL_SESSION_set1_master_key(session, key.key.as_ptr(), key.key.len()) == 1
            && SSL_SESSION_set_cipher(session, cipher) == 1
            && SSL_SESSION_set_protocol_version(session, sys::TLS1_3_VERSION) == 1;
        if !is_made {
            sys::SSL_SESSION_free(session);
            return ptr::null_mut();
        }
        session
    }
}

/// Of a target: is there a key for what the host names? No key is no error: OpenSSL looks at the next one.
unsafe extern "C" fn find_session<K: Keys>(
    ssl: *mut sys::SSL,
    identity: *const c_uchar,
    identity_bytes: size_t,
    session: *mut *mut sys::SSL_SESSION,
) -> c_int {
    // SAFETY: OpenSSL gives valid pointers, the identity for as long as this call takes, and takes over the session.
    unsafe {
        let identity = std::slice::from_raw_parts(identity, identity_bytes);
        *session = match keys_of::<K>(ssl).and_then(|keys| keys.find(identity)) {
            Some(key) => session_of(ssl, key),
            None => ptr::null_mut(),
        };
    }
    1
}

/// Of a host: which key does it name? The hash need not be looked at: only the key's suite is offered.
unsafe extern "C" fn use_session<K: Keys>(
    ssl: *mut sys::SSL,
    _hash: *const sys::EVP_MD,
    identity: *mut *const c_uchar,
    identity_bytes: *mut size_t,
    session: *mut *mut sys::SSL_SESSION,
) -> c_int {
    // SAFETY: OpenSSL gives valid pointers, copies the identity, which lies in `K`, at once, and takes over the session.
    unsafe {
        *session = ptr::null_mut();
        if let Some((name, key)) = keys_of::<K>(ssl).and_then(Keys::offered) {
            (*identity, *identity_bytes) = (name.as_ptr(), name.len());
            *session = session_of(ssl, key);
        }
    }
    1
}
