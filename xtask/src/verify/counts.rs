//! Reads what ran from the output of a step.

use serde_json::Value;

/// Totals over all `test result:` lines of `cargo test`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TestCounts {
    pub passed: usize,
    pub failed: usize,
    pub ignored: usize,
    /// Of `passed`, the examples in documentation.
    pub doc_passed: usize,
    /// Crates whose documentation was searched for examples.
    pub doc_crates: usize,
}

impl TestCounts {
    pub fn parse(log: &str) -> TestCounts {
        let mut counts = TestCounts::default();
        let mut in_doc = false;
        for line in log.lines().map(str::trim) {
            if line.starts_with("Doc-tests ") {
                in_doc = true;
                counts.doc_crates += 1;
            } else if line.starts_with("Running ") {
                in_doc = false;
            }
            let Some(result) = line.strip_prefix("test result: ") else { continue };
            let passed = number_before(result, " passed");
            counts.passed += passed;
            counts.failed += number_before(result, " failed");
            counts.ignored += number_before(result, " ignored");
            counts.doc_passed += if in_doc { passed } else { 0 };
        }
        counts
    }
}

/// The number that ends right before `word`; 0 if there is none.
pub fn number_before(text: &str, word: &str) -> usize {
    let before = text.split(word).next().filter(|before| before.len() < text.len()).unwrap_or("");
    before.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// The number that starts right after `word`; 0 if there is none.
pub fn number_after(text: &str, word: &str) -> usize {
    let after = text.split_once(word).map_or("", |(_, after)| after);
    after.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Checks that passed and failed in the JSON report of `rb verify`: of every object in it with a
/// boolean `passed`.
pub fn checks(report: &Value) -> (usize, usize) {
    let inner: Vec<&Value> = match report {
        Value::Array(items) => items.iter().collect(),
        Value::Object(fields) => match fields.get("passed") {
            Some(Value::Bool(true)) => return (1, 0),
            Some(Value::Bool(false)) => return (0, 1),
            _ => fields.values().collect(),
        },
        _ => Vec::new(),
    };
    inner.into_iter().map(checks).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// Checks that passed and failed by the last line `N passed, M failed` that `rb verify` printed.
pub fn printed_checks(log: &str) -> (usize, usize) {
    let summary =
        log.lines().rev().find(|line| line.contains(" passed, ") && line.trim_end().ends_with(" failed"));
    summary.map_or((0, 0), |line| (number_before(line, " passed"), number_before(line, " failed")))
}

/// Lines of a log that may say why a step failed, wherever they are, and lines at its end.
const NUM_MARKED: usize = 40;
const NUM_LAST: usize = 30;

/// What to show of the log of a failed step.
pub fn excerpt(log: &str) -> Vec<&str> {
    let lines: Vec<&str> = log.lines().collect();
    let tail_start = lines.len().saturating_sub(NUM_LAST);
    let marked = |line: &&&str| {
        line.starts_with("error")
            || line.starts_with("warning: ")
            || line.contains("FAILED")
            || line.contains("panicked at")
    };
    let mut shown: Vec<&str> = lines[..tail_start].iter().filter(marked).take(NUM_MARKED).copied().collect();
    if tail_start > 0 {
        shown.push("[..]");
    }
    shown.extend(&lines[tail_start..]);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "   Compiling a v0.0.0\n     Running unittests src/lib.rs (target/debug/deps/a)\n\nrunning 3 tests\n\
        test a ... ok\ntest result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
        \x20  Doc-tests a\ntest result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
        \x20    Running tests/b.rs\ntest result: ok. 10 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n";

    #[test]
    fn test_results_are_summed() {
        let expected = TestCounts { passed: 16, failed: 1, ignored: 1, doc_passed: 4, doc_crates: 1 };
        assert_eq!(TestCounts::parse(LOG), expected);
        assert_eq!(TestCounts::parse("error: could not compile"), TestCounts::default());
    }

    #[test]
    fn checks_of_a_report_are_counted() {
        let report = serde_json::json!({"models": [{"checks": [{"passed": true}, {"passed": false}]}, {"passed": true}], "n": 3});
        assert_eq!(checks(&report), (2, 1));
        assert_eq!(checks(&Value::Null), (0, 0));
    }

    #[test]
    fn printed_checks_are_read() {
        assert_eq!(printed_checks("ok     a  1 failed\n12 passed, 3 failed\nerror: x\n"), (12, 3));
        assert_eq!(printed_checks("nothing"), (0, 0));
    }

    #[test]
    fn excerpt_keeps_early_errors_and_the_end() {
        let mut log = "error[E0308]: mismatched types\n".to_string();
        (0..100).for_each(|at| log += &format!("line {at}\n"));
        let shown = excerpt(&log);
        assert_eq!(shown[..3], ["error[E0308]: mismatched types", "[..]", "line 70"]);
        assert_eq!(shown.len(), 2 + NUM_LAST);
        assert_eq!(excerpt("one\ntwo\n"), ["one", "two"]);
    }
}
