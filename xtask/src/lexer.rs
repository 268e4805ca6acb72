//! A small Rust lexer: enough to tell code from comments, strings, characters and lifetimes.
//!
//! It never fails: text that is not Rust gives some tokens, and the compiler reports the rest.
//! `::` and `=>` are one token each; every other punctuation character is its own token.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ident,
    Lifetime,
    Number,
    Str,
    Char,
    Comment,
    Punct,
}

#[derive(Clone, Copy, Debug)]
pub struct Token<'a> {
    pub kind: Kind,
    pub text: &'a str,
    /// Line of the first character, from 1.
    pub line: usize,
    /// Byte offset of the first character.
    pub start: usize,
}

impl Token<'_> {
    pub fn is(&self, text: &str) -> bool {
        self.text == text && matches!(self.kind, Kind::Ident | Kind::Punct)
    }

    pub fn end(&self) -> usize {
        self.start + self.text.len()
    }

    /// Line of the last character.
    pub fn last_line(&self) -> usize {
        self.line + self.text.matches('\n').count()
    }

    pub fn is_doc(&self) -> bool {
        let outer_line = self.text.starts_with("///") && !self.text.starts_with("////");
        let outer_block = self.text.starts_with("/**") && !self.text.starts_with("/***");
        let inner = self.text.starts_with("//!") || self.text.starts_with("/*!");
        self.kind == Kind::Comment && (outer_line || outer_block || inner)
    }

    /// The value of a string literal without prefix, hashes and quotes; escapes are left as written.
    pub fn str_value(&self) -> Option<&str> {
        if self.kind != Kind::Str {
            return None;
        }
        let open = self.text.find('"')?;
        let close = self.text.rfind('"')?;
        self.text.get(open + 1..close)
    }
}

/// Splits `text` into tokens, comments included, white space left out.
pub fn lex(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while let Some(c) = text[at..].chars().next() {
        if c.is_whitespace() {
            line += usize::from(c == '\n');
            at += c.len_utf8();
            continue;
        }
        let (kind, len) = next_token(&text[at..], c);
        let token = Token { kind, text: &text[at..at + len], line, start: at };
        line = token.last_line();
        at += len;
        tokens.push(token);
    }
    tokens
}

/// Kind and length in bytes of the token that `rest` starts with; `c` is its first character.
fn next_token(rest: &str, c: char) -> (Kind, usize) {
    if rest.starts_with("//") {
        return (Kind::Comment, rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (Kind::Comment, block_comment_len(rest));
    }
    if let Some(len) = string_len(rest) {
        return (Kind::Str, len);
    }
    if let Some(quoted) = rest.strip_prefix("b'") {
        return (Kind::Char, 2 + quoted_len(quoted, '\''));
    }
    if c == '\'' {
        return char_or_lifetime(rest);
    }
    if is_ident_start(c) {
        let prefix = if rest.starts_with("r#") { 2 } else { 0 };
        return (Kind::Ident, prefix + ident_len(&rest[prefix..]));
    }
    if c.is_ascii_digit() {
        return (Kind::Number, number_len(rest));
    }
    if rest.starts_with("::") || rest.starts_with("=>") {
        return (Kind::Punct, 2);
    }
    (Kind::Punct, c.len_utf8())
}

fn is_ident_start(c: char) -> bool {
    c == '_' || c.is_alphabetic()
}

fn ident_len(rest: &str) -> usize {
    rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len())
}

fn block_comment_len(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        let tail = &rest.as_bytes()[at..];
        if tail.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Length of the string literal at the start of `rest`, with any of the prefixes `b c r br cr`.
fn string_len(rest: &str) -> Option<usize> {
    for prefix in ["br", "cr", "r", "b", "c", ""] {
        let Some(body) = rest.strip_prefix(prefix) else { continue };
        let raw = prefix.ends_with('r');
        let hashes = if raw { body.len() - body.trim_start_matches('#').len() } else { 0 };
        let Some(inside) = body[hashes..].strip_prefix('"') else { continue };
        let open = prefix.len() + hashes + 1;
        if !raw {
            return Some(open + quoted_len(inside, '"'));
        }
        let close = format!("\"{}", "#".repeat(hashes));
        return Some(inside.find(&close).map_or(rest.len(), |at| open + at + close.len()));
    }
    None
}

/// Length up to and with the closing `quote`, honouring backslashes.
fn quoted_len(inside: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in inside.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    inside.len()
}

fn char_or_lifetime(rest: &str) -> (Kind, usize) {
    let inside = &rest[1..];
    let mut chars = inside.chars();
    let (first, second) = (chars.next(), chars.next());
    match first {
        Some('\\') => (Kind::Char, 1 + quoted_len(inside, '\'')),
        Some(c) if second == Some('\'') => (Kind::Char, 2 + c.len_utf8()),
        Some(c) if is_ident_start(c) => (Kind::Lifetime, 1 + ident_len(inside)),
        _ => (Kind::Punct, 1),
    }
}

fn number_len(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let hex = rest.starts_with("0x");
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let next_is_digit = bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
        let after_exponent = at > 0 && matches!(bytes[at - 1], b'e' | b'E') && !hex;
        let part = byte.is_ascii_alphanumeric()
            || byte == b'_'
            || (byte == b'.' && next_is_digit)
            || (matches!(byte, b'+' | b'-') && after_exponent && next_is_digit);
        if !part {
            break;
        }
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<(Kind, &str)> {
        lex(text).into_iter().map(|token| (token.kind, token.text)).collect()
    }

    #[test]
    fn comments_are_told_from_strings() {
        let text = "a /* x /* y */ \"z */ \"// no\" // yes \"\nb";
        let expected = [
            (Kind::Ident, "a"),
            (Kind::Comment, "/* x /* y */ \"z */"),
            (Kind::Str, "\"// no\""),
            (Kind::Comment, "// yes \""),
            (Kind::Ident, "b"),
        ];
        assert_eq!(kinds(text), expected);
    }

    #[test]
    fn raw_strings_and_raw_identifiers() {
        let text = "r#\"a \" b\"# br\"\\\" r#type c\"x\" b\"\\\"\"";
        let expected = [
            (Kind::Str, "r#\"a \" b\"#"),
            (Kind::Str, "br\"\\\""),
            (Kind::Ident, "r#type"),
            (Kind::Str, "c\"x\""),
            (Kind::Str, "b\"\\\"\""),
        ];
        assert_eq!(kinds(text), expected);
        assert_eq!(lex("r#\"a \" b\"#")[0].str_value(), Some("a \" b"));
    }

    #[test]
    fn characters_are_told_from_lifetimes() {
        let expected = [
            (Kind::Punct, "&"),
            (Kind::Lifetime, "'static"),
            (Kind::Ident, "mut"),
            (Kind::Char, "'\\''"),
            (Kind::Char, "'\"'"),
            (Kind::Char, "b'\\\\'"),
            (Kind::Char, "'\u{e9}'"),
            (Kind::Lifetime, "'_"),
        ];
        assert_eq!(kinds("&'static mut '\\'' '\"' b'\\\\' '\u{e9}' '_"), expected);
    }

    #[test]
    fn numbers_ranges_and_joined_punctuation() {
        let expected = [
            (Kind::Number, "1e-5"),
            (Kind::Number, "0xE"),
            (Kind::Punct, "-"),
            (Kind::Number, "1"),
            (Kind::Punct, "."),
            (Kind::Punct, "."),
            (Kind::Number, "2.5f32"),
            (Kind::Punct, "::"),
            (Kind::Punct, "=>"),
        ];
        assert_eq!(kinds("1e-5 0xE-1..2.5f32 :: =>"), expected);
    }

    #[test]
    fn lines_are_counted_through_multi_line_tokens() {
        let tokens = lex("\"a\nb\"\n/* c\n*/ d");
        assert_eq!(tokens.iter().map(|token| token.line).collect::<Vec<_>>(), [1, 3, 4]);
        assert_eq!(tokens[1].last_line(), 4);
    }

    #[test]
    fn unfinished_text_ends_without_a_panic() {
        for text in ["\"abc", "r#\"abc", "/* abc", "'", "b'", "'\\", "r#"] {
            assert!(!lex(text).is_empty(), "{text}");
        }
    }
}
