//! How text is cut into words before BPE, as regular expressions that Oniguruma (Python) and `fancy-regex` (Rust)
//! read alike.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokenizers::utils::SysRegex;

use crate::error::{DataError, Result};

/// Pattern of [`Splitter::Rb`]; the alternatives are tried in order:
///
/// 1. English contractions after an apostrophe;
/// 2. a word with an optional space before it: letters and combining marks, and inside it U+200C and U+200D;
/// 3. one to three digits, with an optional space before them;
/// 4. a run of anything else that is visible, with an optional space before it (joiners inside emoji included);
/// 5. a run of line ends;
/// 6. a run of other white space.
///
/// Combining marks belong to words: a class of letters alone cuts a Bengali word at each vowel sign, and BPE cannot
/// repair that. There is no look-around, so it runs in linear time on every text.
pub const RB_PATTERN: &str = concat!(
    r"'(?:[sdmt]|ll|ve|re)",
    r"| ?[\p{L}\p{M}][\p{L}\p{M}",
    "\u{200C}\u{200D}",
    r"]*| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|[\r\n]+|[^\S\r\n]+"
);

/// Pattern of [`Splitter::Gpt2`], from the GPT-2 release.
pub const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Pattern of [`Splitter::Cl100k`], from the release of that vocabulary.
pub const CL100K_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Pattern of [`Splitter::O200k`], from the release of that vocabulary.
pub const O200K_PATTERN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// How text is cut into words, over whose ends nothing is merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Splitter {
    /// [`RB_PATTERN`]: right for scripts with combining marks.
    #[default]
    Rb,
    /// [`GPT2_PATTERN`]: for comparison with GPT-2; cuts Indic words at every vowel sign.
    Gpt2,
    /// [`CL100K_PATTERN`]: as GPT-4; cuts Indic words at every vowel sign too.
    Cl100k,
    /// [`O200K_PATTERN`]: as GPT-4o; marks stay in words, joiners do not.
    O200k,
}

impl Splitter {
    /// All splitters, the default first.
    pub const ALL: [Splitter; 4] = [Splitter::Rb, Splitter::Gpt2, Splitter::Cl100k, Splitter::O200k];

    /// Its name in configs and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Splitter::Rb => "rb",
            Splitter::Gpt2 => "gpt2",
            Splitter::Cl100k => "cl100k",
            Splitter::O200k => "o200k",
        }
    }

    /// The regular expression.
    pub fn pattern(self) -> &'static str {
        match self {
            Splitter::Rb => RB_PATTERN,
            Splitter::Gpt2 => GPT2_PATTERN,
            Splitter::Cl100k => CL100K_PATTERN,
            Splitter::O200k => O200K_PATTERN,
        }
    }

    /// The `pre_tokenizer` entry of a `tokenizer.json`.
    pub(super) fn to_json(self) -> Value {
        json!({
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": self.pattern()}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ],
        })
    }

    /// The compiled pattern.
    pub(crate) fn regex(self) -> Result<SysRegex> {
        SysRegex::new(self.pattern()).map_err(|e| DataError::TokenizerLibrary {
            action: "compile the splitter",
            reason: e.to_string(),
        })
    }
}

/// The splitter of a `pre_tokenizer` entry that this crate wrote; `None` for any other.
pub(super) fn own(pre_tokenizer: &Value) -> Option<Splitter> {
    Splitter::ALL.into_iter().find(|s| s.to_json() == *pre_tokenizer)
}

/// Words of `text`: the matches, and whatever lies between them.
pub(crate) fn words<'t>(regex: &SysRegex, text: &'t str, mut each: impl FnMut(&'t str)) {
    let mut end = 0;
    for (start, stop) in regex.find_iter(text) {
        if end < start {
            each(&text[end..start]);
        }
        if start < stop {
            each(&text[start..stop]);
        }
        end = stop;
    }
    if end < text.len() {
        each(&text[end..]);
    }
}

/// Cuts `text` into pieces of at least `least` bytes (the last may be shorter) at places where every pattern
/// begins a new word, so that the words of the pieces are the words of the text: before a space that stands between
/// two characters that are not white space. A text without such a place stays whole.
pub(super) fn chunks(text: &str, least: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, after) = rest.split_at(boundary(rest, least).unwrap_or(rest.len()));
        rest = after;
        Some(piece)
    })
}

/// First boundary of `text` at or after byte `least`.
fn boundary(text: &str, least: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut from = least.max(1);
    while from < bytes.len() {
        let at = from + bytes[from..].iter().position(|b| *b == b' ')?;
        // A space is one byte and never part of another character, so both sides are character boundaries.
        let before = text[..at].chars().next_back();
        let after = text[at + 1..].chars().next();
        if before.zip(after).is_some_and(|(b, a)| !b.is_whitespace() && !a.is_whitespace()) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

/// The character that stands for each byte in byte-level vocabularies: itself if it is visible in Latin-1, else one
/// from U+0100 on.
pub(super) fn byte_chars() -> [char; 256] {
    let mut next = 0x100u32;
    std::array::from_fn(|b| {
        let b = b as u8;
        match b {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => b as char,
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
        }
    })
}

/// Bytes that a token of the vocabulary stands for.
pub(super) fn piece_bytes(token: &str, byte_level: bool) -> Vec<u8> {
    if byte_level {
        let bytes: Option<Vec<u8>> = token.chars().map(char_byte).collect();
        return bytes.unwrap_or_else(|| token.as_bytes().to_vec());
    }
    let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|t| t.len() == 2);
    match hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
}

/// Inverse of [`byte_chars`].
fn char_byte(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8), // 0x00..=0x20
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8), // 0x7F..=0xA0
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(splitter: Splitter, text: &str) -> Vec<&str> {
        let mut out = Vec::new();
        words(&splitter.regex().unwrap(), text, |w| out.push(w));
        assert_eq!(out.concat(), text);
        out
    }

    #[test]
    fn byte_chars_are_a_bijection() {
        let chars = byte_chars();
        for b in 0..=255u8 {
            assert_eq!(char_byte(chars[b as usize]), Some(b));
        }
    }

    #[test]
    fn rb_words() {
        let s = |t| split(Splitter::Rb, t);
        assert_eq!(s("Hello, world!"), ["Hello", ",", " world", "!"]);
        assert_eq!(s("don't I'll"), ["don", "'t", " I", "'ll"]);
        assert_eq!(s("in 198456 x"), ["in", " 198", "456", " x"]);
        assert_eq!(s("a\n\n  b\r\nc"), ["a", "\n\n", "  ", "b", "\r\n", "c"]);
        assert_eq!(s("e\u{301}te\u{301} x"), ["e\u{301}te\u{301}", " x"]);
        // Bengali: vowel signs, virama and the joiner stay in the word.
        let bn = "\u{9AC}\u{9BE}\u{982}\u{9B2}\u{9BE} \u{9B0}\u{200D}\u{9CD}\u{9AF}\u{9BE}\u{9AC}\u{964}";
        assert_eq!(s(bn).len(), 3);
        assert_eq!(split(Splitter::Gpt2, bn).len(), 10);
        // Persian: the non-joiner stays in the word.
        assert_eq!(s("\u{645}\u{6CC}\u{200C}\u{62E}\u{648}\u{627}\u{647}\u{645}").len(), 1);
        // An emoji family is one run.
        assert_eq!(s("\u{1F468}\u{200D}\u{1F469}\u{200D}\u{1F467}").len(), 1);
        assert_eq!(s("\0\u{1}"), ["\0\u{1}"]);
    }

    #[test]
    fn words_of_the_published_splitters() {
        let text = "He'll SAY 12345 \u{9AC}\u{9BE}\u{982}\u{9B2}\u{9BE}\n\n  x//\n";
        assert_eq!(
            split(Splitter::Cl100k, text),
            [
                "He",
                "'ll",
                " SAY",
                " ",
                "123",
                "45",
                " \u{9AC}",
                "\u{9BE}\u{982}",
                "\u{9B2}",
                "\u{9BE}\n\n",
                " ",
                " x",
                "//\n"
            ]
        );
        assert_eq!(
            split(Splitter::O200k, text),
            [
                "He'll",
                " SAY",
                " ",
                "123",
                "45",
                " \u{9AC}\u{9BE}\u{982}\u{9B2}\u{9BE}",
                "\n\n",
                " ",
                " x",
                "//\n"
            ]
        );
        // The joiner of a Bengali conjunct and the non-joiner of a Persian word end a word there, and not for `rb`.
        let joined = "\u{9B0}\u{200D}\u{9CD}\u{9AF}\u{9BE}\u{9AC}";
        assert_eq!((split(Splitter::O200k, joined).len(), split(Splitter::Rb, joined).len()), (2, 1));
    }

    #[test]
    fn chunk_ends_are_word_ends() {
        let text = "The cat's  hat, 12 345 6\n\n a b\u{a0} c \u{301}d \u{a0}e f' s  \n g h\t i j";
        for splitter in Splitter::ALL {
            // Compiled once: that takes longer than all of the splitting.
            let regex = splitter.regex().unwrap();
            let split = |text| {
                let mut out = Vec::new();
                words(&regex, text, |w| out.push(w));
                out
            };
            let whole = split(text);
            for least in 0..text.len() {
                let pieces: Vec<&str> = chunks(text, least).collect();
                assert_eq!(pieces.concat(), text);
                let words: Vec<&str> = pieces.iter().flat_map(|p| split(p)).collect();
                assert_eq!(words, whole, "{splitter:?} least {least}");
            }
        }
        assert_eq!(chunks("", 1).count(), 0);
        assert!(chunks(text, 1).count() > 5);
    }

    #[test]
    fn long_runs_take_linear_time() {
        for c in ["a", " ", "\n", "7", "!", "\u{9BE}", "\u{200D}", "' "] {
            let text = c.repeat(200_000);
            let _ = split(Splitter::Rb, &text);
        }
    }
}
