//! Results of checks.

use std::fmt;

use serde::Serialize;

/// One check that ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// What was checked, and on what.
    pub name: String,
    /// Whether it holds.
    pub passed: bool,
    /// What was seen, with numbers.
    pub detail: String,
}

impl Check {
    /// A result.
    pub fn new(name: impl Into<String>, passed: bool, detail: impl Into<String>) -> Check {
        Check { name: name.into(), passed, detail: detail.into() }
    }
}

/// Checks in the order they ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// The checks.
    pub checks: Vec<Check>,
}

impl Report {
    /// Adds a check.
    pub fn push(&mut self, check: Check) {
        self.checks.push(check);
    }

    /// Adds another report's checks, their names preceded by `scope`.
    pub fn extend(&mut self, scope: &str, other: Report) {
        let named = other.checks.into_iter().map(|c| Check { name: format!("{scope}: {}", c.name), ..c });
        self.checks.extend(named);
    }

    /// Whether anything ran and all of it passed.
    pub fn passed(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|c| c.passed)
    }

    /// The failed checks in one sentence, if any.
    pub fn refusal(&self) -> Option<String> {
        let failed: Vec<String> =
            self.checks.iter().filter(|c| !c.passed).map(|c| format!("{}: {}", c.name, c.detail)).collect();
        match (failed.is_empty(), self.checks.is_empty()) {
            (true, false) => None,
            (true, true) => Some("no check ran".into()),
            _ => Some(failed.join("; ")),
        }
    }

    /// The checks in one short line.
    pub fn summary(&self) -> String {
        let details: Vec<&str> = self.checks.iter().map(|c| c.detail.as_str()).collect();
        format!("{} checks passed ({})", self.checks.iter().filter(|c| c.passed).count(), details.join("; "))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.checks.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
        for check in &self.checks {
            let verdict = if check.passed { "ok    " } else { "FAILED" };
            writeln!(f, "{verdict}  {:width$}  {}", check.name, check.detail)?;
        }
        let failed = self.checks.iter().filter(|c| !c.passed).count();
        write!(f, "{} passed, {failed} failed", self.checks.len() - failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_report_is_not_a_pass() {
        assert!(!Report::default().passed());
        assert_eq!(Report::default().refusal().as_deref(), Some("no check ran"));
    }

    #[test]
    fn failures_are_named() {
        let mut report = Report::default();
        report.push(Check::new("a", true, "1"));
        assert!(report.passed() && report.refusal().is_none());
        report.push(Check::new("b", false, "2 > 1"));
        assert_eq!(report.refusal().unwrap(), "b: 2 > 1");
        assert!(report.to_string().ends_with("1 passed, 1 failed"));
    }
}
