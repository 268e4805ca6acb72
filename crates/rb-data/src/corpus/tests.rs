use std::fs;

use super::*;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }
}

fn read(paths: &[PathBuf]) -> Result<Vec<Document>> {
    open(paths)?.documents().collect()
}

fn refusal(paths: &[PathBuf]) -> String {
    read(paths).unwrap_err().to_string()
}

fn texts(paths: &[PathBuf]) -> Vec<String> {
    read(paths).unwrap().into_iter().map(|d| d.text).collect()
}

#[test]
fn txt_is_one_document_and_jsonl_one_a_line() {
    let dir = Folder::new();
    let txt = dir.write("a.txt", "one\r\ntwo\n");
    let jsonl = dir.write(
        "b.JSONL",
        "{\"id\": 1, \"text\": \"x\\r\\ny\"}\r\n\n  \n{\"text\": \"z\\u0000\", \"text2\": 5}",
    );
    let documents = read(&[txt.clone(), jsonl.clone()]).unwrap();
    let got: Vec<(&str, &Path, u64)> =
        documents.iter().map(|d| (d.text.as_str(), &*d.file, d.line)).collect();
    assert_eq!(got, [("one\r\ntwo\n", &*txt, 1), ("x\r\ny", &*jsonl, 1), ("z\0", &*jsonl, 4)]);
}

#[test]
fn folders_are_walked_in_sorted_order() {
    let dir = Folder::new();
    for name in ["b.txt", "a/z.txt", "a/b/c.jsonl", "c.md", "a/data.bin", "A.txt"] {
        let content =
            if name.ends_with("jsonl") { format!("{{\"text\":\"{name}\"}}\n") } else { name.to_owned() };
        dir.write(name, content);
    }
    let corpus = open(&[dir.0.path().to_path_buf()]).unwrap();
    let texts: Vec<String> = corpus.documents().map(|d| d.unwrap().text).collect();
    assert_eq!(texts, ["A.txt", "a/b/c.jsonl", "a/z.txt", "b.txt"]);
    let skipped: Vec<_> = corpus.skipped().iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(skipped, ["data.bin", "c.md"]);
    assert_eq!(corpus.files().count(), 4);
    // Read again: the same.
    assert_eq!(corpus.documents().map(|d| d.unwrap().text).collect::<Vec<_>>(), texts);
}

#[test]
fn a_file_named_twice_is_read_once() {
    let dir = Folder::new();
    let file = dir.write("a.txt", "x");
    let corpus = open(&[dir.0.path().to_path_buf(), file.clone(), file.clone()]).unwrap();
    assert_eq!(corpus.documents().count(), 1);
    assert_eq!(corpus.repeated(), [file.clone(), file]);
}

#[test]
fn counts_are_exact() {
    let dir = Folder::new();
    // 0x80 and above: bytes are counted as they are in the file, not per character.
    let txt = dir.write("a.txt", "\u{FEFF}a\u{e9}\u{995}\u{1F600}\0");
    let jsonl = dir.write("b.jsonl", "{\"text\":\"\"}\n{\"text\":\"\u{9AC}\u{9BE}\"}\n{\"text\":\"\"}\n");
    let stats = open(&[txt, jsonl]).unwrap().stats().unwrap();
    let counts: Vec<_> =
        stats.sources.iter().map(|s| (s.documents, s.zero_length, s.chars, s.bytes)).collect();
    assert_eq!(counts, [(1, 0, 5, 11), (1, 2, 2, 6)]);
    assert_eq!((stats.documents(), stats.zero_length(), stats.chars(), stats.bytes()), (2, 2, 7, 17));
}

#[test]
fn byte_order_marks_are_dropped_at_the_start_only() {
    let dir = Folder::new();
    let txt = dir.write("a.txt", "\u{FEFF}a\u{FEFF}");
    let jsonl = dir.write("b.jsonl", "\u{FEFF}{\"text\":\"b\"}\n{\"text\":\"\u{FEFF}c\"}\n");
    assert_eq!(texts(&[txt, jsonl]), ["a\u{FEFF}", "b", "\u{FEFF}c"]);
}

#[test]
fn bytes_that_are_not_utf8_are_located() {
    let dir = Folder::new();
    for (name, content, offset, byte) in [
        ("ff.txt", &b"abc\xFFdef"[..], 3, "0xFF"),
        ("lone.txt", b"ab\x80", 2, "0x80"),
        ("cut.txt", b"abcd\xE0\xA6", 4, "0xE0"),
        ("bom.txt", b"\xEF\xBB\xBFa\xC0", 4, "0xC0"),
        ("utf16.txt", b"\xFF\xFEa\0", 0, "0xFF"),
        ("ff.jsonl", b"{\"text\":\"ok\"}\r\n{\"text\":\"\xFF\"}\n", 24, "0xFF"),
        ("bom.jsonl", b"\xEF\xBB\xBF{\"text\":\"\xBF\"}\n", 12, "0xBF"),
    ] {
        let path = dir.write(name, content);
        let e = refusal(std::slice::from_ref(&path));
        let start = format!("{}: byte {offset} ({byte}) is not valid UTF-8", path.display());
        assert!(e.starts_with(&start) && e.contains("iconv"), "{e}");
    }
}

#[test]
fn jsonl_errors_name_file_and_line() {
    let dir = Folder::new();
    for (line, expected) in [
        ("{\"id\": 1}", "line 2: no field \"text\""),
        ("{\"text\": 5}", "line 2: field \"text\" is a number, expected a string"),
        ("{\"text\": null}", "line 2: field \"text\" is null"),
        ("{\"text\": true}", "line 2: field \"text\" is a boolean"),
        ("{\"text\": [\"a\"]}", "line 2: field \"text\" is an array"),
        ("{\"text\": {}}", "line 2: field \"text\" is an object"),
        ("{\"text\": \"a\"", "line 2: not a JSON object: EOF"),
        ("plain text", "line 2: not a JSON object: the line does not begin with {"),
        ("[\"a\"]", "line 2: not a JSON object"),
        ("\"a\"", "line 2: not a JSON object"),
        ("{\"text\": \"a\"} {\"text\": \"b\"}", "line 2: not a JSON object: trailing characters"),
        ("{\"text\": \"\\ud800\"}", "line 2: not a JSON object"),
        ("{\"text\": \"a\", \"text\": \"b\"}", "line 2: not a JSON object: duplicate field `text`"),
    ] {
        let path = dir.write("a.jsonl", format!("{{\"text\": \"good\"}}\n{line}\n{{\"text\": \"after\"}}\n"));
        let e = refusal(std::slice::from_ref(&path));
        assert!(e.starts_with(&format!("{} {expected}", path.display())), "{line}: {e}");
        let results: Vec<_> = open(&[path]).unwrap().documents().collect();
        assert_eq!(results.len(), 2, "nothing comes after an error");
    }
}

#[test]
fn limits() {
    let dir = Folder::new();
    let options = CorpusOptions { max_line_bytes: 20, max_txt_bytes: 5 };
    let get = |path: PathBuf| -> Result<Vec<Document>> {
        Corpus::open_with(&[path], options)?.documents().collect()
    };
    let fits = "{\"text\": \"123456789\"}";
    assert_eq!(fits.len(), 21);
    for end in ["", "\n", "\r\n"] {
        let long = dir.write("a.jsonl", format!("{{\"text\":\"1\"}}\n{fits}{end}"));
        let e = get(long.clone()).unwrap_err().to_string();
        assert_eq!(
            e,
            format!(
                "{} line 2: longer than the limit of 20 bytes; split the document, or raise max_line_bytes",
                long.display()
            )
        );
        let short = dir.write("b.jsonl", format!("{}{end}", fits.replace('9', "")));
        assert_eq!(get(short).unwrap()[0].text, "12345678");
    }
    assert_eq!(get(dir.write("a.txt", "12345")).unwrap()[0].text, "12345");
    let e = get(dir.write("b.txt", "123456789")).unwrap_err().to_string();
    assert!(e.contains("b.txt: 9 bytes are more than the 5 that one document may have"), "{e}");
}

#[test]
fn paths_that_cannot_be_used() {
    let dir = Folder::new();
    assert!(refusal(&[]).contains("no input files were given"));
    let e = refusal(&[dir.0.path().join("nothing.txt")]);
    assert!(e.contains("nothing.txt does not exist: check the path"), "{e}");
    let e = refusal(&[dir.write("a.csv", "x")]);
    assert!(e.contains("a.csv is not a .txt or .jsonl file"), "{e}");
    let e = refusal(&[dir.write("empty.txt", "")]);
    assert!(e.contains("empty.txt is empty (0 bytes of text)"), "{e}");
    dir.write("sub/a.md", "x");
    dir.write("sub/deep/b.md", "x");
    let e = refusal(&[dir.0.path().join("sub")]);
    assert!(e.contains("sub holds no .txt or .jsonl file (2 other files were skipped)"), "{e}");
}

#[test]
fn no_documents_at_all() {
    let dir = Folder::new();
    let blank = dir.write("a.jsonl", "\n\n");
    let empty = dir.write("b.jsonl", "{\"text\":\"\"}\n");
    let bom = dir.write("c.txt", "\u{FEFF}");
    let e = refusal(&[blank, empty, bom]);
    assert!(e.starts_with("no documents: 3 files were read and 2 documents in them had no text"), "{e}");
    // An empty file inside a folder is a document without text.
    let dir = Folder::new();
    dir.write("a.txt", "");
    dir.write("b.txt", "x");
    assert_eq!(texts(&[dir.0.path().to_path_buf()]), ["x"]);
}

#[cfg(unix)]
#[test]
fn loops_of_links_and_unreadable_files_are_errors() {
    let dir = Folder::new();
    dir.write("sub/a.txt", "x");
    std::os::unix::fs::symlink(dir.0.path(), dir.0.path().join("sub/up")).unwrap();
    let e = refusal(&[dir.0.path().to_path_buf()]);
    assert!(e.contains("cannot walk"), "{e}");
    let e = refusal(&[PathBuf::from("/dev/null")]);
    assert!(e.contains("/dev/null is not a .txt or .jsonl file"), "{e}");
}

#[test]
fn shared_data_is_read() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data"));
    if !path.exists() {
        println!("skipped: {} does not exist", path.display());
        return;
    }
    let corpus = open(&[path]).unwrap();
    let stats = corpus.stats().unwrap();
    assert!(stats.documents() >= 2 * 114 + 9, "{stats:?}");
    assert!(stats.chars() < stats.bytes());
    assert_eq!(corpus.skipped().len(), 1, "README.md");
}
