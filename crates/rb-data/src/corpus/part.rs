//! Parts of files, which are read at the same time.

use std::ops::Range;
use std::path::Path;

use super::compressed::Compression;
use super::parquet_file;
use super::{Format, Source};

/// Bytes of a `.jsonl` file that are one part.
const PART_BYTES: u64 = 4 << 20;
/// Parts of a Parquet file at most: each opens it again.
const MOST_PARTS: usize = 64;

/// What is read of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Whole,
    /// Lines that begin in these bytes.
    Bytes(u64, u64),
    /// These row groups.
    Groups(usize, usize),
}

impl Part {
    pub(super) fn bytes(self) -> Range<u64> {
        if let Part::Bytes(start, end) = self { start..end } else { 0..u64::MAX }
    }

    pub(super) fn groups(self) -> Range<usize> {
        if let Part::Groups(start, end) = self { start..end } else { 0..usize::MAX }
    }

    /// Whether a file begins with it.
    pub(super) fn is_first(self) -> bool {
        matches!(self, Part::Whole | Part::Bytes(0, _) | Part::Groups(0, _))
    }
}

/// The parts of a file in order. One that cannot be looked into is one part: reading it says why.
pub(super) fn parts(source: &Source) -> Vec<Part> {
    let parts = match (source.kind.format, source.kind.compression) {
        (Format::Jsonl, Compression::None) => of_lines(size(&source.file), PART_BYTES),
        (Format::Parquet, _) => of_groups(parquet_file::num_groups(&source.file).unwrap_or(0)),
        _ => Vec::new(),
    };
    if parts.is_empty() { vec![Part::Whole] } else { parts }
}

/// Size of a file in bytes, 0 where it is not known.
pub(super) fn size(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |m| m.len())
}

fn of_lines(bytes: u64, part_bytes: u64) -> Vec<Part> {
    let count = bytes / part_bytes;
    // The last one takes what is left, and what is added to the file meanwhile.
    let end = |n: u64| if n + 1 == count { u64::MAX } else { (n + 1) * part_bytes };
    (0..count).map(|n| Part::Bytes(n * part_bytes, end(n))).collect()
}

fn of_groups(groups: usize) -> Vec<Part> {
    let step = groups.div_ceil(MOST_PARTS).max(1);
    (0..groups).step_by(step).map(|start| Part::Groups(start, (start + step).min(groups))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_file() {
        assert_eq!(of_lines(9, 10), []);
        assert_eq!(of_lines(19, 10), [Part::Bytes(0, u64::MAX)]);
        assert_eq!(of_lines(20, 10), [Part::Bytes(0, 10), Part::Bytes(10, u64::MAX)]);
        assert_eq!(of_groups(0), []);
        assert_eq!(of_groups(2), [Part::Groups(0, 1), Part::Groups(1, 2)]);
        let many = of_groups(130);
        assert_eq!((many.len(), many.last()), (44, Some(&Part::Groups(129, 130))));
        assert!(many.windows(2).all(|w| w[0].groups().end == w[1].groups().start));
        assert!(many[0].is_first() && !many[1].is_first() && Part::Whole.is_first());
    }
}
