use rb_data::*;
use std::io::Write;
fn main() {
    let out = std::path::PathBuf::from(std::env::args().nth(1).unwrap());
    let data = std::path::PathBuf::from("/work/shared/data");
    let corpus = corpus::open(&[data]).unwrap();
    let docs: Vec<Document> = corpus.documents().map(|d| d.unwrap()).collect();
    for (name, splitter) in [("rb", Splitter::Rb), ("gpt2", Splitter::Gpt2)] {
        let t0 = std::time::Instant::now();
        let cfg = TokenizerConfig { vocab_size: 16384, splitter, ..Default::default() };
        let (t, r) = Tokenizer::train(docs.iter().map(Ok), &cfg).unwrap();
        eprintln!("{name} {:?} {r:?}", t0.elapsed());
        let dir = out.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        t.save_folder(&dir, Some(1024)).unwrap();
        let t0 = std::time::Instant::now();
        let mut f = std::io::BufWriter::new(std::fs::File::create(dir.join("ids.jsonl")).unwrap());
        let mut n = 0;
        let mut extra: Vec<String> = docs.iter().map(|d| d.text.clone()).collect();
        if let Ok(x) = std::fs::read_to_string(out.join("extra.json")) {
            extra.extend(serde_json::from_str::<Vec<String>>(&x).unwrap());
        }
        for text in &extra {
            let ids = t.encode(text).unwrap();
            n += text.len();
            assert_eq!(&t.decode(&ids).unwrap(), text);
            writeln!(f, "{}", serde_json::json!({"text": text, "ids": ids})).unwrap();
        }
        eprintln!("encode+decode {:?} {n} bytes", t0.elapsed());
    }
}
