//! Code that can crash or break memory says why it does not.

use super::Finding;
use crate::lexer::Kind;
use crate::rust_file::RustFile;

pub fn unsafe_is_explained(file: &RustFile, findings: &mut Vec<Finding>) {
    for at in (0..file.code_len()).filter(|&at| file.is(at, "unsafe")) {
        let after_abi =
            |at: usize| if file.code(at).is_some_and(|token| token.kind == Kind::Str) { at + 1 } else { at };
        let at_fn = if file.is(at + 1, "extern") { after_abi(at + 2) } else { at + 1 };
        let (mark, what) = if file.is(at_fn, "fn") && file.ident(at_fn + 1).is_some() {
            ("# Safety", "unsafe fn")
        } else if file.is(at + 1, "trait") {
            ("# Safety", "unsafe trait")
        } else if file.is(at + 1, "impl") {
            ("// SAFETY:", "unsafe impl")
        } else if file.is(at_fn, "{") {
            ("// SAFETY:", "unsafe block")
        } else {
            continue; // A function pointer type or an attribute.
        };
        // A method of a trait is documented by the trait.
        if file.has_comment(at, mark) || (what == "unsafe fn" && in_trait_impl(file, at)) {
            continue;
        }
        let remedy = if mark == "# Safety" {
            "say in a `# Safety` section of its doc what the caller must guarantee"
        } else {
            "put `// SAFETY:` above it, naming the invariant and who upholds it"
        };
        findings.push(Finding::new(
            file.path,
            file.line(at),
            "safety",
            format!("{what} without `{mark}`"),
            remedy,
        ));
    }
}

/// Whether the item at `at` is directly inside `impl Trait for Type { .. }`.
fn in_trait_impl(file: &RustFile, at: usize) -> bool {
    let mut depth = 0usize;
    for position in (0..at).rev() {
        if file.is(position, "}") {
            depth += 1;
        } else if file.is(position, "{") && depth > 0 {
            depth -= 1;
        } else if file.is(position, "{") {
            let mut header = file.statement_start(position)..position;
            return header.clone().any(|at| file.is(at, "impl")) && header.any(|at| file.is(at, "for"));
        }
    }
    false
}

pub fn panics_are_explained(file: &RustFile, findings: &mut Vec<Finding>) {
    for at in 0..file.code_len() {
        let what = if file.seq(at, &[".", "unwrap", "(", ")"]) {
            "unwrap()"
        } else if file.seq(at, &[".", "expect", "("]) {
            "expect()"
        } else if file.seq(at, &["panic", "!"]) {
            "panic!"
        } else if file.seq(at, &["unreachable", "!"]) {
            "unreachable!"
        } else {
            continue;
        };
        if file.in_test(at) || file.has_comment(at, "// INVARIANT:") {
            continue;
        }
        // The dot may end the line above the method's name.
        let line = file.line(if what.ends_with(')') { at + 1 } else { at });
        let problem = format!("`{what}` outside tests without `// INVARIANT:`");
        let remedy = "return an error, or say on the line above why it cannot happen";
        findings.push(Finding::new(file.path, line, "invariant", problem, remedy));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NONE, lines};
    use super::*;

    #[test]
    fn unsafe_needs_a_reason() {
        let bad = "fn a() {\n    unsafe { b() }\n}\nunsafe impl Send for X {}\nunsafe extern \"C\" {}\nunsafe fn c() {}\n\
                   pub unsafe extern \"C\" fn d() {}\n/// Doc.\npub unsafe trait T {}\n";
        assert_eq!(lines(unsafe_is_explained, "src/a.rs", bad), [2, 4, 5, 6, 7, 9]);
    }

    #[test]
    fn explained_unsafe_is_good() {
        let good = "fn a() {\n    // SAFETY: the caller holds the lock,\n    // always.\n    let x = unsafe { b() };\n}\n\
                    // SAFETY: X owns its pointer.\nunsafe impl Send for X {}\n\
                    /// Does it.\n///\n/// # Safety\n/// `p` is valid.\n#[inline]\npub unsafe fn c(p: P) {}\n\
                    struct F { f: unsafe extern \"C\" fn(u8), s: &'static str }\n\
                    // SAFETY: forwards to the system.\nunsafe impl GlobalAlloc for A {\n    unsafe fn alloc() {}\n}\n\
                    const S: &str = \"unsafe { }\"; // unsafe { }\n";
        assert_eq!(lines(unsafe_is_explained, "src/a.rs", good), NONE);
    }

    #[test]
    fn panics_need_an_invariant() {
        let bad = "fn a() {\n    b.unwrap();\n    b\n        .expect(\"x\");\n    panic!(\"y\");\n    unreachable!()\n}\n";
        assert_eq!(lines(panics_are_explained, "src/a.rs", bad), [2, 4, 5, 6]);
    }

    #[test]
    fn explained_panics_and_test_panics_are_good() {
        let good = "fn a() {\n    // INVARIANT: b is set in new().\n    let c = b\n        .unwrap();\n\
                    \x20   d.unwrap_or(1); e.unwrap_or_default(); \"x.unwrap()\";\n\
                    \x20   f.unwrap(); // INVARIANT: f is never empty.\n}\n\
                    /// x.unwrap() in a doc\n#[cfg(test)]\nmod tests {\n    fn b() { c.unwrap(); panic!() }\n}\n";
        assert_eq!(lines(panics_are_explained, "src/a.rs", good), NONE);
        assert_eq!(lines(panics_are_explained, "crates/x/tests/a.rs", "fn a() { b.unwrap() }"), NONE);
    }
}
