//! No file too long to read in one go.

use super::Finding;
use crate::rust_file::RustFile;

/// Lines of non-test code in one file.
const MAX_LINES: usize = 600;

pub fn file_length(file: &RustFile, findings: &mut Vec<Finding>) {
    let lines = file.non_test_lines();
    if lines > MAX_LINES {
        let problem = format!("{lines} lines of non-test code, at most {MAX_LINES}");
        findings.push(Finding::new(file.path, MAX_LINES, "file-length", problem, "split it by concept"));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::lines;
    use super::*;

    #[test]
    fn length_of_non_test_code() {
        let long = "fn a() {}\n".repeat(MAX_LINES + 1);
        let short = "fn a() {}\n".repeat(MAX_LINES);
        let tests = format!("{short}#[cfg(test)]\nmod tests {{\n{long}}}\n");
        assert_eq!(lines(file_length, "src/a.rs", &long), [MAX_LINES]);
        assert!(lines(file_length, "src/a.rs", &short).is_empty());
        assert!(lines(file_length, "src/a.rs", &tests).is_empty());
        assert!(lines(file_length, "tests/a.rs", &long).is_empty());
    }
}
