//! The switch: one defect at a time, for the whole process, because operations run on many threads.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::Defect;

/// Bytes that a program with switches holds and no other does.
#[used]
pub static MARK: [u8; 34] = *b"<planted defects are compiled in!>";

/// Number of the selected defect plus one; 0 is none.
static SELECTED: AtomicU32 = AtomicU32::new(0);
static REACHED: AtomicBool = AtomicBool::new(false);

/// Whether `defect` is on; a seam that asks and hears yes counts as reached.
pub fn active(defect: Defect) -> bool {
    let on = SELECTED.load(Ordering::Relaxed) == defect as u32 + 1;
    if on {
        REACHED.store(true, Ordering::Relaxed);
    }
    on
}

/// Switches `defect` on until the guard is dropped. The last guard made is the one that counts: plant one defect at
/// a time.
pub fn plant(defect: Defect) -> Planted {
    REACHED.store(false, Ordering::Relaxed);
    SELECTED.store(defect as u32 + 1, Ordering::Relaxed);
    Planted(())
}

/// A defect that is on.
#[must_use = "the defect is switched off when this is dropped"]
pub struct Planted(());

impl Planted {
    /// Whether a seam of the defect has run since it was switched on.
    pub fn reached(&self) -> bool {
        REACHED.load(Ordering::Relaxed)
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        SELECTED.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_defect_is_on_while_its_guard_lives() {
        assert!(!active(Defect::RopeNotApplied));
        let planted = plant(Defect::RopeNotApplied);
        assert!(!planted.reached() && !active(Defect::RopeInterleaved) && !planted.reached());
        assert!(active(Defect::RopeNotApplied) && planted.reached());
        drop(planted);
        assert!(!active(Defect::RopeNotApplied));
    }
}
