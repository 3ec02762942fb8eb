//! Errors that a program may be told by number.

/// An error of which a program is told as an `errno` of this system. The floors that have such errors and those that
/// speak to the kernel need not know each other.
pub trait HasErrno {
    /// The positive number.
    fn errno(&self) -> i32;
}
