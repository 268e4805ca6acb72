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
    let options = CorpusOptions { max_line_bytes: 20, max_txt_bytes: 5, ..CorpusOptions::default() };
    let get = |path: PathBuf| -> Result<Vec<Document>> {
        Corpus::open_with(&[path], options.clone())?.documents().collect()
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
    assert!(e.contains("a.csv is not a .txt, .jsonl (.gz, .zst) or .parquet file"), "{e}");
    let e = refusal(&[dir.write("empty.txt", "")]);
    assert!(e.contains("empty.txt is empty (0 bytes of text)"), "{e}");
    dir.write("sub/a.md", "x");
    dir.write("sub/deep/b.md", "x");
    let e = refusal(&[dir.0.path().join("sub")]);
    assert!(e.contains("sub holds no .txt, .jsonl or .parquet file (2 other files were skipped)"), "{e}");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A Parquet file of two row groups with a string column for each name; `None` is a null.
fn parquet(path: &Path, names: &[&str], rows: &[Vec<Option<&str>>]) {
    use parquet::basic::{Compression, ConvertedType, Repetition, Type as Physical, ZstdLevel};
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::types::Type;
    let column = |name: &&str| {
        let field = Type::primitive_type_builder(name, Physical::BYTE_ARRAY)
            .with_repetition(Repetition::OPTIONAL)
            .with_converted_type(ConvertedType::UTF8);
        Arc::new(field.build().unwrap())
    };
    let schema =
        Type::group_type_builder("schema").with_fields(names.iter().map(column).collect()).build().unwrap();
    let compression = Compression::ZSTD(ZstdLevel::default());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).unwrap();
    for part in rows.chunks(rows.len().div_ceil(2)) {
        let mut group = writer.next_row_group().unwrap();
        for column in 0..names.len() {
            let cells = || part.iter().map(|row| row[column]);
            let values: Vec<ByteArray> = cells().flatten().map(ByteArray::from).collect();
            let levels: Vec<i16> = cells().map(|cell| i16::from(cell.is_some())).collect();
            let mut open = group.next_column().unwrap().unwrap();
            open.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            open.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}

#[test]
fn compressed_files_are_read_as_what_is_inside() {
    let dir = Folder::new();
    let lines = "{\"text\": \"a\"}\n{\"text\": \"b\"}\n";
    // Two members in one file, as `cat a.gz b.gz` makes them.
    let gz = dir.write("a.jsonl.gz", [gzip(lines.as_bytes()), gzip(b"{\"text\": \"c\"}")].concat());
    let zst = dir.write("b.jsonl.zst", zstd::encode_all(lines.as_bytes(), 1).unwrap());
    let txt = dir.write("c.txt.GZ", gzip("\u{FEFF}x\ny".as_bytes()));
    assert_eq!(texts(&[gz.clone(), zst.clone(), txt]), ["a", "b", "c", "a", "b", "x\ny"]);
    for (path, kind) in [(&gz, "gzip"), (&zst, "zstd")] {
        let whole = fs::read(path).unwrap();
        fs::write(path, &whole[..whole.len() - 5]).unwrap();
        let e = refusal(std::slice::from_ref(path));
        assert!(
            e.contains(&format!("damaged or truncated {kind} data")) && e.contains("download it again"),
            "{e}"
        );
        fs::write(path, b"not compressed").unwrap();
        let e = refusal(std::slice::from_ref(path));
        assert!(e.contains(&format!("damaged or truncated {kind} data")), "{e}");
    }
    let e = refusal(&[dir.write("d.parquet.gz", "x")]);
    assert!(e.contains("is not a .txt, .jsonl (.gz, .zst) or .parquet file"), "{e}");
    // A small file that unpacks to more than a document may have.
    let options = CorpusOptions { max_txt_bytes: 1000, max_line_bytes: 1000, ..CorpusOptions::default() };
    for name in ["e.txt.gz", "e.jsonl.gz"] {
        let bomb = dir.write(name, gzip(&[b' '; 100_000]));
        let e = Corpus::open_with(&[bomb], options.clone()).unwrap().documents().next().unwrap().unwrap_err();
        assert!(matches!(e, DataError::FileTooLong { .. } | DataError::LineTooLong { .. }), "{e}");
    }
}

#[test]
fn parquet_rows_are_documents() {
    let dir = Folder::new();
    let path = dir.0.path().join("a.parquet");
    let row = |text, lang| vec![text, lang];
    let mut rows: Vec<_> = (0..200).map(|_| row(Some("x"), Some("en"))).collect();
    rows[0] = row(Some("\u{9AC}\u{9BE}"), Some("bn"));
    rows[130] = row(Some(""), None);
    rows[199] = row(Some("last"), None);
    parquet(&path, &["text", "lang"], &rows);
    let options = CorpusOptions { fields: vec!["lang".into(), "none".into()], ..CorpusOptions::default() };
    let corpus = Corpus::open_with(std::slice::from_ref(&path), options).unwrap();
    let documents: Vec<Document> = corpus.documents().collect::<Result<_>>().unwrap();
    assert_eq!(documents.len(), 199, "the empty one is skipped");
    let fields = |d: &Document| d.fields.iter().map(|(f, v)| (f.to_string(), v.clone())).collect::<Vec<_>>();
    assert_eq!((documents[0].text.as_str(), documents[0].line), ("\u{9AC}\u{9BE}", 1));
    assert_eq!(fields(&documents[0]), [("lang".to_owned(), "bn".to_owned())]);
    assert_eq!(
        (documents[198].text.as_str(), documents[198].line, fields(&documents[198])),
        ("last", 200, vec![])
    );

    rows[77] = row(None, None);
    parquet(&path, &["text", "lang"], &rows);
    let e = refusal(std::slice::from_ref(&path));
    assert!(e.ends_with("a.parquet line 78: field \"text\" is null, expected a string"), "{e}");
    parquet(&path, &["body", "lang"], &rows);
    let e = refusal(std::slice::from_ref(&path));
    assert!(e.contains("no column \"text\" (there are: body, lang)"), "{e}");
    parquet(&path, &["text"], &[vec![Some("a")], vec![Some("b")]]);
    let whole = fs::read(&path).unwrap();
    for damaged in [&whole[..whole.len() - 9], &whole[9..], b"PAR1", &[7; 400]] {
        fs::write(&path, damaged).unwrap();
        let e = refusal(std::slice::from_ref(&path));
        assert!(e.contains("a.parquet: not a readable Parquet file"), "{e}");
    }
}

/// What both ways of reading give, on pools of several sizes: they must not differ.
fn both_ways(corpus: &Corpus) -> (Vec<std::result::Result<Document, String>>, CorpusStats) {
    let text = |item: Result<Document>| item.map_err(|e| e.to_string());
    let mut documents = corpus.documents();
    let plain: Vec<_> = documents.by_ref().map(text).collect();
    for threads in [1, 2, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut ahead = pool.install(|| corpus.read_ahead(|_| Some(())));
        let read: Vec<_> = ahead.by_ref().map(|item| text(item.map(|(document, ())| document))).collect();
        assert!(read == plain, "{threads} threads: {} and {} documents", read.len(), plain.len());
        assert_eq!(ahead.stats(), documents.stats());
    }
    (plain, documents.into_stats())
}

/// Lines of many lengths, among them blank ones, empty texts and one that is longer than two parts of a file.
fn lines(bytes: usize) -> String {
    let (mut text, mut number) = (String::new(), 0);
    while text.len() < bytes {
        number += 1;
        let length = if number == 30 { 9 << 20 } else { number * 7919 % 60_000 };
        let end = ["\n", "\r\n", "\n\n"][number % 3];
        let body = if number % 11 == 0 { String::new() } else { format!("\u{9AC}{}", "x".repeat(length)) };
        text.push_str(&format!("{{\"text\": \"{body}\"}}{end}"));
    }
    text
}

#[test]
fn reading_ahead_gives_the_same() {
    let dir = Folder::new();
    let long = lines(26 << 20);
    dir.write("a.jsonl", &long);
    let some: String = long.lines().take(29).collect::<Vec<_>>().join("\n");
    dir.write("b.jsonl.zst", zstd::encode_all(some.as_bytes(), 1).unwrap());
    for number in 0..40 {
        dir.write(&format!("many/{number}.txt"), "y".repeat(number * 100_000));
    }
    let rows: Vec<_> = (0..500).map(|n| vec![Some(if n % 90 == 0 { "" } else { "row" })]).collect();
    parquet(&dir.0.path().join("c.parquet"), &["text"], &rows);
    let corpus = open(&[dir.0.path().to_path_buf()]).unwrap();
    let (documents, stats) = both_ways(&corpus);
    assert!(documents.len() > 1000 && stats.zero_length() > 50 && documents.iter().all(|d| d.is_ok()));
    let rows: Vec<u64> =
        documents.iter().flatten().filter(|d| d.file.ends_with("c.parquet")).map(|d| d.line).collect();
    assert_eq!(
        (rows.first(), rows.last()),
        (Some(&2), Some(&500)),
        "rows of the second group go on from the first"
    );

    // What is judged and left out is so on the reading threads.
    let long = corpus.read_ahead(|d| (d.text.len() > 50_000).then_some(d.text.len()));
    let sizes: Vec<usize> =
        long.map(|item| item.unwrap()).map(|(d, n)| if d.text.len() == n { n } else { 0 }).collect();
    assert!(sizes.len() > 10 && sizes.iter().all(|n| *n > 50_000), "{sizes:?}");
}

#[test]
fn errors_ahead_come_in_their_place_with_their_line() {
    let dir = Folder::new();
    let mut text = lines(14 << 20);
    text.push_str("{\"no\": 1}\n{\"text\": \"after\"}\n");
    let line = text.lines().count() - 1;
    let path = dir.write("a.jsonl", text);
    dir.write("b.jsonl", "broken");
    let (items, _) = both_ways(&open(&[dir.0.path().to_path_buf()]).unwrap());
    let last = items.last().unwrap().as_ref().unwrap_err();
    assert!(last.starts_with(&format!("{} line {line}: no field \"text\"", path.display())), "{last}");
    assert!(items.len() > 100 && items[..items.len() - 1].iter().all(|d| d.is_ok()));

    // Whoever has enough goes, and threads that wait for room end.
    let mut documents = open(&[path]).unwrap().documents_ahead();
    assert!(documents.next().unwrap().is_ok());
    drop(documents);
    both_ways(&open(&[dir.write("c.jsonl", "\n")]).unwrap());
    fs::remove_file(dir.0.path().join("c.jsonl")).unwrap();
}

#[test]
fn a_panic_while_reading_ahead_is_passed_on() {
    let dir = Folder::new();
    let corpus = open(&[dir.write("a.txt", "x")]).unwrap();
    let judge = |_: &Document| -> Option<()> { std::panic::panic_any(7) };
    let caught = std::panic::catch_unwind(|| corpus.read_ahead(judge).next()).unwrap_err();
    assert_eq!(caught.downcast_ref::<i32>(), Some(&7));
}

#[test]
fn another_field_can_hold_the_text() {
    let dir = Folder::new();
    let path = dir.write(
        "a.jsonl",
        "{\"text\": 5, \"body\": \"x\", \"lang\": \"en\", \"n\": [1, {\"lang\": 2}]}\n{\"lang\": 1}",
    );
    let options =
        CorpusOptions { text_field: "body".into(), fields: vec!["lang".into()], ..CorpusOptions::default() };
    let corpus = Corpus::open_with(&[path], options).unwrap();
    let documents: Vec<_> = corpus.documents().collect();
    let first = documents[0].as_ref().unwrap();
    assert_eq!((first.text.as_str(), &*first.fields[0].0, first.fields[0].1.as_str()), ("x", "lang", "en"));
    let e = documents[1].as_ref().unwrap_err().to_string();
    assert!(e.contains("line 2: no field \"body\"; each line must look like {\"body\": \"...\"}"), "{e}");
}

#[test]
fn patterns_name_files() {
    let dir = Folder::new();
    for name in ["b.txt", "a.txt", "c.md", "sub/d.txt", "odd[1].txt"] {
        dir.write(name, name);
    }
    let at = |pattern: &str| dir.0.path().join(pattern);
    assert_eq!(texts(&[at("?.txt")]), ["a.txt", "b.txt"]);
    assert_eq!(texts(&[at("**/d.*")]), ["sub/d.txt"]);
    assert_eq!(texts(&[at("odd[1].txt")]), ["odd[1].txt"], "a file that exists is no pattern");
    let e = refusal(&[at("*.jsonl")]);
    assert!(e.contains("*.jsonl: fits no .txt, .jsonl or .parquet file and no folder"), "{e}");
    let e = refusal(&[at("a[.txt")]);
    assert!(e.contains("correct the pattern"), "{e}");
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
    assert!(e.contains("/dev/null is not a .txt, .jsonl (.gz, .zst) or .parquet file"), "{e}");
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
