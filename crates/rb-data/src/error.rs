//! [`DataError`]: every way in which data can be refused.

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, DataError>;

/// Says what was refused, where (file, line, byte offset) and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused to read, write, create or rename a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, an infinitive.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A path given by the user does not exist.
    #[error("{} does not exist: check the path, or the folder the program was started in", path.display())]
    NotFound {
        /// The missing path.
        path: PathBuf,
    },
    /// No path was given at all.
    #[error("no input files were given: name at least one .txt, .jsonl or .parquet file, or a folder")]
    NoPaths,
    /// A pattern that fits nothing or is none.
    #[error("{pattern}: {reason}")]
    BadPattern {
        /// The pattern.
        pattern: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A declared language that cannot be used.
    #[error("language {name} {reason}")]
    BadLanguage {
        /// Its name.
        name: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A file of a kind that is not read.
    #[error("{} is not a .txt, .jsonl (.gz, .zst) or .parquet file: rename it, or convert it to JSON Lines with a \"text\" field", path.display())]
    UnsupportedFile {
        /// The file.
        path: PathBuf,
    },
    /// A path that is neither a regular file nor a folder.
    #[error("{} is neither a regular file nor a folder: copy its content into a file first", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A folder without any file that can be read.
    #[error("{} holds no .txt, .jsonl or .parquet file ({skipped} other files were skipped): name another folder, or convert the files", path.display())]
    NoTextFiles {
        /// The folder.
        path: PathBuf,
        /// Files with other extensions found in it.
        skipped: u64,
    },
    /// A folder could not be walked.
    #[error("cannot walk {}: {source}", path.display())]
    Walk {
        /// The folder given by the user.
        path: PathBuf,
        /// The reason, with the entry at fault.
        #[source]
        source: walkdir::Error,
    },
    /// A file named by the user has no byte in it.
    #[error("{} is empty (0 bytes of text): remove it from the list, or check how it was written", path.display())]
    EmptyFile {
        /// The file.
        path: PathBuf,
    },
    /// All files together yielded no document.
    #[error(
        "no documents: {files} files were read and {zero_length} documents in them had no text; check the \"text\" fields"
    )]
    NoDocuments {
        /// Files read.
        files: u64,
        /// Documents skipped because their text was empty.
        zero_length: u64,
    },
    /// Bytes that are not UTF-8.
    #[error("{}: byte {offset} (0x{byte:02X}) is not valid UTF-8: convert the file, for example `iconv -f WINDOWS-1252 -t UTF-8 IN > OUT` with its real encoding", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset in the file of the first bad byte, from 0.
        offset: u64,
        /// The bad byte.
        byte: u8,
    },
    /// Compressed data that cannot be read.
    #[error("{}: damaged or truncated {kind} data: {source}; copy or download it again", path.display())]
    Compressed {
        /// The file.
        path: PathBuf,
        /// `gzip` or `zstd`.
        kind: &'static str,
        /// The decoder's answer.
        #[source]
        source: std::io::Error,
    },
    /// A Parquet file that cannot be read.
    #[error("{}: {reason}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A line longer than the reader accepts.
    #[error("{} line {line}: longer than the limit of {limit_bytes} bytes; split the document, or raise max_line_bytes", path.display())]
    LineTooLong {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A `.txt` file longer than the reader accepts as one document.
    #[error("{}: {bytes} bytes are more than the {limit_bytes} that one document may have; split it into .jsonl lines, or raise max_txt_bytes", path.display())]
    FileTooLong {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A line of a `.jsonl` file that is not JSON.
    #[error("{} line {line}: not a JSON object: {source}; each line must look like {{\"text\": \"...\"}}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// The parser's answer; its column counts bytes in the line.
        #[source]
        source: serde_json::Error,
    },
    /// A JSON object without the field with the text.
    #[error("{} line {line}: no field {field:?}; each line must look like {{{field:?}: \"...\"}}", path.display())]
    MissingText {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// Name of the field.
        field: String,
    },
    /// A field with the text that is not a string.
    #[error("{} line {line}: field {field:?} is {got}, expected a string", path.display())]
    WrongTextType {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// Name of the field.
        field: String,
        /// JSON type found, with its article.
        got: &'static str,
    },

    /// A vocabulary too small for all bytes and the special tokens.
    #[error(
        "tokenizer: vocab_size is {got}, expected at least {least} (256 bytes + {special_tokens} special tokens)"
    )]
    VocabTooSmall {
        /// Requested size.
        got: usize,
        /// Smallest size that can encode every text.
        least: usize,
        /// Number of special tokens.
        special_tokens: usize,
    },
    /// A vocabulary too large for 32-bit signed ids.
    #[error("tokenizer: vocab_size is {got}, expected at most {most}")]
    VocabTooLarge {
        /// Requested size.
        got: usize,
        /// Largest size.
        most: usize,
    },
    /// A special token that cannot be used.
    #[error("tokenizer: special token {token:?} {reason}; choose another, such as \"<|endoftext|>\"")]
    BadSpecialToken {
        /// The token.
        token: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Training was given no text.
    #[error("tokenizer: the training text is empty; give it at least one document with text")]
    NoTrainingText,
    /// A tokenizer file that cannot be used.
    #[error("{}: {reason}", path.display())]
    BadTokenizerFile {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The tokenizer library refused an operation.
    #[error("tokenizer: cannot {action}: {reason}")]
    TokenizerLibrary {
        /// What was tried, an infinitive.
        action: &'static str,
        /// The library's answer.
        reason: String,
    },
    /// A token id that the tokenizer does not have.
    #[error(
        "tokenizer: id {id} has no token (vocab_size is {vocab_size}); is this the tokenizer the ids were made with?"
    )]
    UnknownToken {
        /// The id.
        id: u32,
        /// Largest id + 1.
        vocab_size: usize,
    },

    /// A file that is not a token file.
    #[error("{}: not a RustingBrain token file (its first bytes are {found:?}); make it with `rb data build`", path.display())]
    BadMagic {
        /// The file.
        path: PathBuf,
        /// The first bytes, as text where printable.
        found: String,
    },
    /// A token file of another format version.
    #[error("{}: token file version {found}, expected {expected}; build it again with this program", path.display())]
    BadVersion {
        /// The file.
        path: PathBuf,
        /// Version in the file.
        found: u32,
        /// Version this program reads.
        expected: u32,
    },
    /// A token file whose size does not fit its header.
    #[error("{}: {kind}: expected {expected} bytes, found {found}; build it again, or copy it again", path.display())]
    WrongSize {
        /// The file.
        path: PathBuf,
        /// `truncated` or `too long`.
        kind: &'static str,
        /// Bytes that the header asks for.
        expected: u64,
        /// Bytes in the file.
        found: u64,
    },
    /// A header or index field with an impossible value.
    #[error("{}: byte {offset}: {field} is {got}, expected {expected}; the file is damaged, build it again", path.display())]
    BadField {
        /// The file.
        path: PathBuf,
        /// Offset of the field in the file.
        offset: u64,
        /// Name of the field.
        field: &'static str,
        /// Value found.
        got: u64,
        /// Rule it breaks.
        expected: String,
    },
    /// A token id outside the vocabulary.
    #[error("{}: byte {offset}: token {index} has id {id}, expected an id below the vocabulary size {vocab_size}", path.display())]
    TokenOutOfRange {
        /// The file, or a name in angle brackets for data in memory.
        path: PathBuf,
        /// Byte offset in the file.
        offset: u64,
        /// Index of the token.
        index: u64,
        /// The id.
        id: u32,
        /// Largest allowed id + 1.
        vocab_size: u32,
    },
    /// A payload whose checksum differs from the header's.
    #[error("{}: sha256 is {found}, expected {expected}; the file is damaged, build it again", path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Checksum in the header.
        expected: String,
        /// Checksum of the content.
        found: String,
    },
    /// An index of prepared data that cannot be used.
    #[error("{}: {reason}", path.display())]
    BadIndex {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A token file of another program that cannot be used.
    #[error("{}: {reason}", path.display())]
    BadImport {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The folder to be made is there already.
    #[error("{} exists already: choose another folder, or remove it first", path.display())]
    FolderExists {
        /// The folder.
        path: PathBuf,
    },
    /// Data tokenised by another tokenizer than the one in use.
    #[error("{}: built with another tokenizer (sha256 {found}, expected {expected}); build it again with this one", path.display())]
    TokenizerMismatch {
        /// The token file.
        path: PathBuf,
        /// Fingerprint of the tokenizer in use.
        expected: String,
        /// Fingerprint in the file.
        found: String,
    },

    /// A setting outside its range.
    #[error("{what}: {name} is {got}, expected {expected}")]
    BadSetting {
        /// Thing that has the setting.
        what: &'static str,
        /// Name of the setting.
        name: &'static str,
        /// Value given.
        got: String,
        /// Range.
        expected: &'static str,
    },
    /// The user has stopped it.
    #[error("stopped; nothing is written")]
    Stopped,
    /// Too few tokens to predict anything.
    #[error("{}: {tokens} tokens, expected at least 2 (an input and its next token); add text", path.display())]
    TooFewTokens {
        /// The token file, or a name in angle brackets for data in memory.
        path: PathBuf,
        /// Tokens in it.
        tokens: u64,
    },
    /// The train side of a split would have no text.
    #[error(
        "split: the train side would be empty ({documents} documents, val_fraction {val_fraction}); lower val_fraction or add text"
    )]
    EmptyTrainSide {
        /// Documents seen.
        documents: u64,
        /// Fraction asked for.
        val_fraction: f64,
    },
    /// A loader state that belongs to other data or other settings.
    #[error(
        "loader: cannot resume: {field} was {saved} when the state was saved and is {now} now; use the same value, or start a new run"
    )]
    StateMismatch {
        /// Name of the setting that differs.
        field: &'static str,
        /// Value in the state.
        saved: String,
        /// Value now.
        now: String,
    },
    /// The loader's proof of coverage failed: a defect of this program.
    #[error("loader: target {target} occurs {times} times in an epoch, expected 1; please report this")]
    Coverage {
        /// Index in the token stream.
        target: u64,
        /// Times found.
        times: u64,
    },
}

impl DataError {
    /// Wraps an operating-system error; a missing file becomes [`DataError::NotFound`] when reading.
    pub(crate) fn io(action: &'static str, path: &std::path::Path, source: std::io::Error) -> Self {
        if source.kind() == std::io::ErrorKind::NotFound && matches!(action, "open" | "read") {
            return DataError::NotFound { path: path.to_path_buf() };
        }
        DataError::Io { action, path: path.to_path_buf(), source }
    }

    /// The same error in a file with `lines` more lines before it.
    pub(crate) fn lines_later(mut self, lines: u64) -> Self {
        match &mut self {
            DataError::LineTooLong { line, .. }
            | DataError::Json { line, .. }
            | DataError::MissingText { line, .. }
            | DataError::WrongTextType { line, .. } => *line += lines,
            _ => {}
        }
        self
    }
}

impl From<crate::atomic::FileError> for DataError {
    fn from(error: crate::atomic::FileError) -> Self {
        DataError::io(error.action, &error.path, error.source)
    }
}
