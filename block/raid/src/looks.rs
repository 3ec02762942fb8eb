//! Looks at an array that somebody else may be at work on, who records something on one member after the other meanwhile.

use levada_base::reactor;
use std::fmt::Display;
use std::time::Duration;

/// What is found so often is how it is,
const SAME_LOOKS: usize = 3;
/// with so long between two looks,
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// and where it goes on changing, it is looked at for so long.
const LIMIT: Duration = Duration::from_secs(20);

/// Looks until the array is found in order, or again and again the same is the matter with it.
///
/// # Errors
///
/// What was the matter at the last look.
pub async fn look_until_steady<T, E: Display>(
    mut look: impl AsyncFnMut() -> Result<T, E>,
) -> Result<T, E> {
    let begun = reactor::now();
    let (mut last, mut same, mut looks) = (String::new(), 0, 0);
    loop {
        let error = match look().await {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        let why = error.to_string();
        same = if why == last { same + 1 } else { 1 };
        (last, looks) = (why, looks + 1);
        // One look may take longer than all of them should, where a drive vanishes meanwhile.
        if same == SAME_LOOKS || looks > SAME_LOOKS && begun.elapsed() > LIMIT {
            return Err(error);
        }
        reactor::sleep(AGAIN_AFTER).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;

    #[test]
    fn what_changes_is_looked_at_again_and_what_stays_is_told() {
        Reactor::simulated(1).block_on(async {
            let looks_at = async |told: &dyn Fn(usize) -> Result<(), String>| {
                let mut looks = 0;
                let found = look_until_steady(async || {
                    looks += 1;
                    told(looks)
                });
                (found.await, looks)
            };
            let (found, looks) = looks_at(&|_| Err("gone".into())).await;
            assert_eq!((found, looks), (Err("gone".into()), SAME_LOOKS));
            let at_work = |look| if look < 9 { Err(format!("{look} of 12")) } else { Ok(()) };
            assert_eq!(looks_at(&at_work).await, (Ok(()), 9));
            let (found, looks) = looks_at(&|look| Err(look.to_string())).await;
            assert!(found.is_err() && looks > 50, "nobody is waited for without end");
        });
    }
}
