//! Train and validation sides of a corpus.
//!
//! With at least [`MIN_DOCUMENTS`] documents, whole documents are held out, chosen by a hash of their text: the same
//! text is on the same side in every run and wherever it occurs, so a repeated document cannot leak.
//! With fewer, the tail of each document is held out.

use sha2::{Digest, Sha256};

use crate::error::{DataError, Result};

/// Fewest documents for which whole documents are held out.
pub const MIN_DOCUMENTS: u64 = 20;

/// How much is held out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SplitConfig {
    /// Share of the documents (or of each document) for validation, in `0.0 ..= 0.5`.
    pub val_fraction: f64,
}

impl Default for SplitConfig {
    /// 5 %.
    fn default() -> Self {
        Self { val_fraction: 0.05 }
    }
}

/// A side of the split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// For training.
    Train,
    /// For validation.
    Val,
}

/// What is held out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitMode {
    /// Nothing: `val_fraction` is 0.
    Nothing,
    /// Whole documents.
    Documents,
    /// The tail of each document: there are few, or all fall on one side.
    Tails,
}

/// A split made for a corpus: says for each text what is for training and what for validation.
#[derive(Debug, Clone, PartialEq)]
pub struct SplitPlan {
    config: SplitConfig,
    mode: SplitMode,
    /// Documents with text for training.
    pub train_documents: u64,
    /// Documents with text for validation; 0 is also logged as a warning.
    pub val_documents: u64,
    /// Bytes of text for training.
    pub train_bytes: u64,
    /// Bytes of text for validation.
    pub val_bytes: u64,
}

impl SplitPlan {
    /// Reads all `documents` once to decide what to hold out.
    ///
    /// # Errors
    /// A fraction outside `0.0 ..= 0.5`, the first error of `documents`, or [`DataError::EmptyTrainSide`] if there
    /// is no text at all.
    pub fn new<S: AsRef<str>>(
        documents: impl Iterator<Item = Result<S>>,
        config: SplitConfig,
    ) -> Result<Self> {
        if !(0.0..=0.5).contains(&config.val_fraction) {
            return Err(DataError::BadSetting {
                what: "split",
                name: "val_fraction",
                got: config.val_fraction.to_string(),
                expected: "a number from 0.0 to 0.5",
            });
        }
        let plan =
            |mode| Self { config, mode, train_documents: 0, val_documents: 0, train_bytes: 0, val_bytes: 0 };
        let mut by_document = plan(SplitMode::Documents);
        let mut by_tail = plan(SplitMode::Tails);
        let mut seen = 0u64;
        for document in documents {
            let document = document?;
            seen += 1;
            by_document.add(document.as_ref());
            by_tail.add(document.as_ref());
        }
        let documents_work = seen >= MIN_DOCUMENTS && by_document.train_documents > 0;
        let mut result = if documents_work { by_document } else { by_tail };
        if config.val_fraction == 0.0 {
            result.mode = SplitMode::Nothing;
        }
        if result.train_documents == 0 {
            return Err(DataError::EmptyTrainSide { documents: seen, val_fraction: config.val_fraction });
        }
        if result.is_val_empty() {
            tracing::warn!(
                documents = seen,
                val_fraction = config.val_fraction,
                "the validation side of the split is empty: no validation loss can be measured"
            );
        }
        Ok(result)
    }

    fn add(&mut self, text: &str) {
        let (train, val) = self.split(text);
        self.train_documents += u64::from(!train.is_empty());
        self.val_documents += u64::from(!val.is_empty());
        self.train_bytes += train.len() as u64;
        self.val_bytes += val.len() as u64;
    }

    /// The settings.
    pub fn config(&self) -> SplitConfig {
        self.config
    }

    /// What is held out.
    pub fn mode(&self) -> SplitMode {
        self.mode
    }

    /// Whether there is nothing to validate on.
    pub fn is_val_empty(&self) -> bool {
        self.val_documents == 0
    }

    /// Parts of `text` for training and for validation; either may be empty, together they are the text.
    pub fn split<'t>(&self, text: &'t str) -> (&'t str, &'t str) {
        let fraction = self.config.val_fraction;
        match self.mode {
            SplitMode::Nothing => (text, ""),
            SplitMode::Documents => match side_of(text, fraction) {
                Side::Train => (text, ""),
                Side::Val => ("", text),
            },
            SplitMode::Tails => text.split_at(tail_start(text, fraction)),
        }
    }
}

/// Side of a whole document: validation if the first 53 bits of its sha256, as a number in `0..1`, are below
/// `val_fraction`. Raising the fraction only moves documents from training to validation.
pub fn side_of(text: &str, val_fraction: f64) -> Side {
    let hash: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    if is_held_out(&hash, val_fraction) { Side::Val } else { Side::Train }
}

/// Whether a whole document with this sha256 is for validation: see [`side_of`].
pub(crate) fn is_held_out(hash: &[u8; 32], val_fraction: f64) -> bool {
    let mut first = [0; 8];
    first.copy_from_slice(&hash[..8]);
    let unit = (u64::from_be_bytes(first) >> 11) as f64 / (1u64 << 53) as f64;
    unit < val_fraction
}

/// Byte at which the held-out tail begins: near `1 - val_fraction` of the text, after a line end if there is one not
/// far from there, else before a space, else between any two characters. Some text always stays before it.
pub(crate) fn tail_start(text: &str, val_fraction: f64) -> usize {
    if val_fraction <= 0.0 {
        return text.len();
    }
    let tail_bytes = (text.len() as f64 * val_fraction) as usize;
    let mut target = text.len() - tail_bytes.min(text.len());
    while !text.is_char_boundary(target) {
        target += 1;
    }
    // Half a tail to either side: the share held out stays between 0.5 and 1.5 times what was asked for.
    let floor = |mut at: usize| {
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        at
    };
    let low = floor(target.saturating_sub(tail_bytes / 2));
    let high = floor((target + tail_bytes / 2).min(text.len()));
    let near = |found: Option<usize>| found.filter(|at| (1..text.len()).contains(at));
    let line = text[low..target].rfind('\n').map(|i| low + i + 1);
    let line = near(line).or_else(|| near(text[target..high].find('\n').map(|i| target + i + 1)));
    let space = || near(text[low..target].rfind(' ').map(|i| low + i));
    let at = line.or_else(space).unwrap_or(target);
    if at > 0 { at } else { text.chars().next().map_or(0, char::len_utf8) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(texts: &[String], val_fraction: f64) -> Result<SplitPlan> {
        SplitPlan::new(texts.iter().map(Ok), SplitConfig { val_fraction })
    }

    #[test]
    fn documents_by_hash() {
        let texts: Vec<String> = (0..2000).map(|i| format!("document {i}")).collect();
        let p = plan(&texts, 0.1).unwrap();
        assert_eq!(p.mode(), SplitMode::Documents);
        assert_eq!(p.train_documents + p.val_documents, 2000);
        assert!((150..250).contains(&p.val_documents), "{}", p.val_documents);
        // A text's side depends on nothing else.
        let reversed: Vec<String> = texts.iter().rev().take(700).cloned().collect();
        let q = plan(&reversed, 0.1).unwrap();
        for text in &reversed {
            assert_eq!(p.split(text), q.split(text));
        }
        // Pinned: a change would move documents between the sides of stored data sets.
        let sides: Vec<bool> = texts[..8].iter().map(|t| side_of(t, 0.5) == Side::Val).collect();
        assert_eq!(sides, [true, false, true, true, false, true, false, true]);
        let larger = plan(&texts, 0.2).unwrap();
        assert!(texts.iter().all(|t| p.split(t).1.is_empty() || !larger.split(t).1.is_empty()));
    }

    #[test]
    fn tails_of_few_documents() {
        let lines: String = (0..100).map(|i| format!("line {i}\n")).collect();
        let p = plan(std::slice::from_ref(&lines), 0.1).unwrap();
        assert_eq!(p.mode(), SplitMode::Tails);
        let (train, val) = p.split(&lines);
        assert_eq!(format!("{train}{val}"), lines);
        assert!(train.ends_with('\n') && val.ends_with("line 99\n") && val.starts_with("line "));
        assert!((0.05..0.15).contains(&(val.len() as f64 / lines.len() as f64)));
    }

    #[test]
    fn tails_fall_between_characters() {
        for text in
            ["\u{1F600}".repeat(50), "\u{995}".repeat(33), "a".into(), "\u{1F600}".into(), "ab cd".into()]
        {
            for fraction in [0.01, 0.1, 0.33, 0.5] {
                let p = plan(std::slice::from_ref(&text), fraction).unwrap();
                let (train, val) = p.split(&text);
                assert!(!train.is_empty());
                assert_eq!(format!("{train}{val}"), text);
            }
        }
    }

    #[test]
    fn train_is_never_empty_and_empty_val_is_reported() {
        // Twenty copies of one text are all on one side, whichever it is; some text stays for training.
        for i in 0..40 {
            let texts = vec![format!("the same text {i}, long enough to be cut"); 20];
            let p = plan(&texts, 0.5).unwrap();
            assert!(p.train_documents > 0 && p.train_bytes > 0);
        }
        let one = ["x".to_owned()];
        assert!(plan(&one, 0.1).unwrap().is_val_empty());
        let p = plan(&one, 0.0).unwrap();
        assert_eq!((p.mode(), p.is_val_empty()), (SplitMode::Nothing, true));
        let none = plan(&[], 0.1).unwrap_err().to_string();
        assert!(none.contains("train side would be empty (0 documents"), "{none}");
    }

    #[test]
    fn bad_fraction() {
        for bad in [-0.1, 0.6, f64::NAN, f64::INFINITY] {
            let e = plan(&["x".to_owned()], bad).unwrap_err().to_string();
            assert!(e.contains("val_fraction is") && e.contains("from 0.0 to 0.5"), "{e}");
        }
    }

    #[test]
    fn errors_of_the_source_pass_through() {
        let source = [Ok("a".to_owned()), Err(DataError::NoPaths)].into_iter();
        assert!(matches!(SplitPlan::new(source, SplitConfig::default()), Err(DataError::NoPaths)));
    }
}
