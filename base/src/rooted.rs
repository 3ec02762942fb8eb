//! A future that borrows from what it keeps alive itself.

#![allow(unsafe_code)] // A borrow that lasts as long as its owner, which the compiler cannot be told.

use futures_util::future::LocalBoxFuture;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

/// Something that `T` has begun, with a share of `T`, which would otherwise need a second future around both, and memory for that.
pub struct Rooted<T: ?Sized + 'static, O: 'static> {
    /// Goes before `root`, from which it borrows.
    future: LocalBoxFuture<'static, O>,
    root: Rc<T>,
}

impl<T: ?Sized, O> Rooted<T, O> {
    /// Has `root` begin something.
    #[inline]
    pub fn new(root: Rc<T>, begin: impl for<'a> FnOnce(&'a T) -> LocalBoxFuture<'a, O>) -> Self {
        let future = begin(&root);
        // `begin` is good for any lifetime, so that what it returns borrows from `root` alone, or from nothing, and `O`, which was chosen before,
        // carries nothing of it away. This share of `root` is handed out by reference only, so `Rc::get_mut` and the like fail while it is there.
        // SAFETY: what the future borrows lies still and outlives it: both are never taken apart, and dropped in their order.
        let future = unsafe {
            std::mem::transmute::<LocalBoxFuture<'_, O>, LocalBoxFuture<'static, O>>(future)
        };
        Self { future, root }
    }

    /// Who has begun it.
    pub fn root(&self) -> &Rc<T> {
        &self.root
    }
}

impl<T: ?Sized, O> Future for Rooted<T, O> {
    type Output = O;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<O> {
        self.future.as_mut().poll(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Notify;
    use futures_util::FutureExt;
    use std::cell::Cell;

    #[derive(Default)]
    struct Root {
        begins: Notify,
        has_begun: Cell<bool>,
        has_ended: Rc<Cell<bool>>,
    }

    impl Root {
        fn work(&self) -> LocalBoxFuture<'_, u8> {
            Box::pin(async {
                self.begins.until(|| self.has_begun.get().then_some(())).await;
                7
            })
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            self.has_ended.set(true);
        }
    }

    #[test]
    fn lives_as_long_as_what_it_has_begun() {
        let root = Rc::<Root>::default();
        let has_ended = Rc::clone(&root.has_ended);
        let mut work = Rooted::new(root, Root::work);
        assert_eq!((&mut work).now_or_never(), None);
        let mut moved = Box::new(work);
        moved.root().has_begun.set(true);
        moved.root().begins.notify_all();
        assert_eq!((&mut *moved).now_or_never(), Some(7));
        assert!(!has_ended.get());
        drop(moved);
        assert!(has_ended.get());
    }

    /// Tells that the root was there when it went.
    struct Borrows<'a>(&'a Root, Rc<Cell<bool>>);

    impl Drop for Borrows<'_> {
        fn drop(&mut self) {
            assert!(!self.1.get(), "the root is gone already");
            self.0.has_begun.set(true);
        }
    }

    #[test]
    fn is_dropped_before_its_root() {
        let root = Rc::<Root>::default();
        let has_ended = Rc::clone(&root.has_ended);
        let mut work = Rooted::new(root, |root| {
            Box::pin(async {
                let _borrows = Borrows(root, Rc::clone(&root.has_ended));
                root.work().await
            })
        });
        assert_eq!((&mut work).now_or_never(), None);
        drop(work);
        assert!(has_ended.get());
    }
}
