//! A Rust source file as the rules see it: code tokens, the comments that belong to each, test code.

use std::ops::Range;

use crate::lexer::{Kind, Token, lex};
use crate::tree::Tree;

pub struct RustFile<'a> {
    pub path: &'a str,
    /// All tokens, comments included.
    pub tokens: Vec<Token<'a>>,
    /// Positions in `tokens` of those that are not comments.
    code: Vec<usize>,
    /// Items under `#[cfg(test)]` and `#[test]`, as ranges of code positions.
    tests: Vec<Range<usize>>,
    /// The whole file is test code.
    pub is_test: bool,
    num_lines: usize,
}

impl<'a> RustFile<'a> {
    pub fn parse(path: &'a str, text: &'a str) -> RustFile<'a> {
        let tokens = lex(text);
        let code = (0..tokens.len()).filter(|&at| tokens[at].kind != Kind::Comment).collect();
        let in_test_folder = path.split('/').rev().skip(1).any(|part| part == "tests" || part == "benches");
        let num_lines = text.lines().count();
        let mut file = RustFile { path, tokens, code, tests: Vec::new(), is_test: in_test_folder, num_lines };
        for at in 0..file.code_len() {
            if file.seq(at, &["#", "!", "[", "cfg", "(", "test", ")", "]"]) {
                file.is_test = true;
            }
            if file.tests.last().is_none_or(|last| at >= last.end) && file.is_test_attribute(at) {
                file.tests.push(at..file.item_end(at));
            }
        }
        file
    }

    /// Every Rust file of the tree; a file declared by `#[cfg(test)] mod name;` is test code.
    pub fn all(tree: &'a Tree) -> Vec<RustFile<'a>> {
        let rust = tree.texts().filter(|(path, _)| path.ends_with(".rs"));
        let mut files: Vec<RustFile> = rust.map(|(path, text)| RustFile::parse(path, text)).collect();
        let modules: Vec<String> = files.iter().flat_map(RustFile::test_modules).collect();
        for file in &mut files {
            let stem = file.path.trim_end_matches(".rs");
            let inside = |module: &String| {
                stem.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            file.is_test |= modules.iter().any(inside);
        }
        files
    }

    pub fn code_len(&self) -> usize {
        self.code.len()
    }

    /// The code token at `at`; past either end, the last token of the file.
    pub fn code(&self, at: usize) -> Option<&Token<'a>> {
        self.code.get(at).map(|&at| &self.tokens[at])
    }

    pub fn is(&self, at: usize, text: &str) -> bool {
        self.code(at).is_some_and(|token| token.is(text))
    }

    /// Whether the code tokens from `at` on are exactly `texts`.
    pub fn seq(&self, at: usize, texts: &[&str]) -> bool {
        texts.iter().enumerate().all(|(offset, text)| self.is(at + offset, text))
    }

    pub fn line(&self, at: usize) -> usize {
        self.code(at).map_or(self.num_lines, |token| token.line)
    }

    pub fn ident(&self, at: usize) -> Option<&'a str> {
        self.code(at).filter(|token| token.kind == Kind::Ident).map(|token| token.text)
    }

    pub fn in_test(&self, at: usize) -> bool {
        self.is_test || self.tests.iter().any(|range| range.contains(&at))
    }

    /// Lines of the file that are not test code.
    pub fn non_test_lines(&self) -> usize {
        if self.is_test {
            return 0;
        }
        let last_line = |end: usize| self.code(end - 1).map_or(0, Token::last_line);
        let test_lines = |range: &Range<usize>| last_line(range.end) + 1 - self.line(range.start);
        self.num_lines - self.tests.iter().map(test_lines).sum::<usize>().min(self.num_lines)
    }

    /// Position after the bracket that closes the one at `at`.
    pub fn after_group(&self, at: usize) -> usize {
        let mut depth = 0usize;
        for position in at..self.code_len() {
            match self.code(position).map(|token| token.text) {
                Some("(" | "[" | "{") => depth += 1,
                Some(")" | "]" | "}") => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                return position + 1;
            }
        }
        self.code_len()
    }

    /// Names of the functions marked `#[test]`.
    pub fn test_names(&self) -> Vec<&'a str> {
        let attributes = (0..self.code_len()).filter(|&at| self.seq(at, &["#", "[", "test", "]"]));
        attributes
            .filter_map(|at| (at..self.item_end(at)).find(|&at| self.is(at, "fn")))
            .filter_map(|at| self.ident(at + 1))
            .collect()
    }

    /// Text of the `//!` block, without the slashes.
    pub fn module_doc(&self) -> String {
        let lines = self.tokens.iter().take_while(|token| token.kind == Kind::Comment);
        lines.filter_map(|token| token.text.strip_prefix("//!")).flat_map(|line| [line, "\n"]).collect()
    }

    /// The comments that speak about the code token at `at`: those since the previous statement, those
    /// right above its line, and those on its line.
    pub fn comments_on(&self, at: usize) -> impl Iterator<Item = &Token<'a>> {
        let line = self.line(at);
        let stop = self.statement_start(at).checked_sub(1).and_then(|stop| self.code(stop));
        let (after, stop_line) = stop.map_or((0, 0), |token| (token.end(), token.last_line()));
        let chain = self.comment_lines_above(line);
        self.tokens.iter().filter(move |token| {
            let own =
                token.start >= after && token.line <= line && (token.line > stop_line || token.line == line);
            token.kind == Kind::Comment && (own || chain.contains(&token.line) || token.line == line)
        })
    }

    /// Whether a comment on the code token at `at` contains `mark`.
    pub fn has_comment(&self, at: usize, mark: &str) -> bool {
        self.comments_on(at).any(|token| token.text.contains(mark))
    }

    /// Position of the first token of the statement, match arm or item that holds the token at `at`.
    pub fn statement_start(&self, at: usize) -> usize {
        let mut depth = 0usize;
        for position in (0..at).rev() {
            match self.code(position).map(|token| token.text) {
                Some(")" | "]") => depth += 1,
                Some("(" | "[") => depth = depth.saturating_sub(1),
                Some(";" | "{" | "}") if depth == 0 => return position + 1,
                // A comma inside a line separates generics or arguments, one at its end match arms.
                Some(",") if depth == 0 && self.line(position + 1) > self.line(position) => {
                    return position + 1;
                }
                _ => {}
            }
        }
        0
    }

    /// The block of lines with nothing but comments that ends right above `line`.
    fn comment_lines_above(&self, line: usize) -> Range<usize> {
        let mut first = line;
        while first > 1 {
            let mut on_line =
                self.tokens.iter().filter(|token| token.line < first && token.last_line() + 1 >= first);
            let Some(top) = on_line.next() else { break };
            if top.kind != Kind::Comment || on_line.any(|token| token.kind != Kind::Comment) {
                break;
            }
            first = top.line;
        }
        first..line
    }

    fn is_test_attribute(&self, at: usize) -> bool {
        let whole = self.seq(at, &["#", "[", "cfg", "(", "test", ")", "]"]);
        let all = self.seq(at, &["#", "[", "cfg", "(", "all", "(", "test", ","]);
        whole || all || self.seq(at, &["#", "[", "test", "]"])
    }

    /// Position after the item whose first attribute is at `at`.
    fn item_end(&self, at: usize) -> usize {
        let mut position = at;
        while position < self.code_len() {
            match self.code(position).map(|token| token.text) {
                Some("{") => return self.after_group(position),
                Some(";") => return position + 1,
                Some("(" | "[") => position = self.after_group(position),
                _ => position += 1,
            }
        }
        self.code_len()
    }

    /// Paths, without `.rs`, of the modules that this file declares under `#[cfg(test)]` in other files.
    fn test_modules(&self) -> Vec<String> {
        let (folder, name) = self.path.rsplit_once('/').unwrap_or(("", self.path));
        let owner = match name {
            "lib.rs" | "main.rs" | "mod.rs" => folder.to_string(),
            _ => format!("{folder}/{}", name.trim_end_matches(".rs")),
        };
        let declared = self.tests.iter().filter_map(|range| {
            let at = range.clone().find(|&at| self.is(at, "mod"))?;
            let name = self.ident(at + 1).filter(|_| self.is(at + 2, ";"))?;
            let path = range.clone().find(|&at| self.seq(at, &["[", "path", "="]));
            let path = path.and_then(|at| self.code(at + 3)).and_then(|token| token.str_value());
            Some(match path {
                Some(path) => format!("{folder}/{}", path.trim_end_matches(".rs")),
                None => format!("{owner}/{name}"),
            })
        });
        declared.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Position of the first code token `text`.
    fn find(file: &RustFile, text: &str) -> usize {
        (0..file.code_len()).find(|&at| file.is(at, text)).unwrap()
    }

    #[test]
    fn test_code_is_found() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() { \"}\"; }\n}\nfn c() {}\n#[test]\n#[x]\nfn d() {}\n";
        let file = RustFile::parse("src/a.rs", text);
        let inside: Vec<bool> =
            ["a", "b", "c", "d"].iter().map(|name| file.in_test(find(&file, name))).collect();
        assert_eq!(inside, [false, true, false, true]);
        assert_eq!(file.non_test_lines(), 2);
        assert_eq!(file.test_names(), ["d"]);
    }

    #[test]
    fn code_for_builds_without_tests_is_not_test_code() {
        let file =
            RustFile::parse("src/a.rs", "#[cfg(not(test))]\nfn a() {}\n#[cfg(all(test, unix))]\nfn b() {}\n");
        assert!(!file.in_test(find(&file, "a")));
        assert!(file.in_test(find(&file, "b")));
    }

    #[test]
    fn whole_files_of_test_code() {
        let tree = Tree::from([
            (
                "crates/x/src/lib.rs",
                "#[cfg(test)]\nmod cases;\n#[cfg(test)]\n#[path = \"odd_name.rs\"]\nmod odd;\nmod real;",
            ),
            ("crates/x/src/cases.rs", "fn a() {}"),
            ("crates/x/src/cases/more.rs", "fn a() {}"),
            ("crates/x/src/odd_name.rs", "fn a() {}"),
            ("crates/x/src/real.rs", "#[cfg(test)]\nmod tests;"),
            ("crates/x/src/real/tests.rs", "fn a() {}"),
            ("crates/x/tests/whole.rs", "fn a() {}"),
        ]);
        let files = RustFile::all(&tree);
        let code: Vec<&str> = files.iter().filter(|file| !file.is_test).map(|file| file.path).collect();
        assert_eq!(code, ["crates/x/src/lib.rs", "crates/x/src/real.rs"]);
    }

    #[test]
    fn comments_belong_to_the_statement() {
        let cases = [
            ("// MARK\nlet a: M<K, V> = f(\n  b,\n).target();", true),
            ("let a = f(); // MARK\nlet b = target();", false),
            ("let a = target(); // MARK\n", true),
            ("// MARK\nlet a = b;\nlet c = target();", false),
            ("match a {\n  // MARK\n  B => c,\n  D => target(),\n}", false),
            ("match a {\n  B => c,\n  // MARK\n  // more\n  D => target(),\n}", true),
            ("let p = P { a: 1 }\n  // MARK\n  .target();", true),
            ("/* MARK\n*/\n#[inline]\npub fn target() {}", true),
        ];
        for (text, expected) in cases {
            let file = RustFile::parse("src/a.rs", text);
            assert_eq!(file.has_comment(find(&file, "target"), "MARK"), expected, "{text}");
        }
    }

    #[test]
    fn module_doc_is_the_first_block() {
        let file = RustFile::parse("src/a.rs", "//! One.\n//! - **Two** x\nfn a() {}\n//! no\n");
        assert_eq!(file.module_doc(), " One.\n - **Two** x\n");
    }
}
