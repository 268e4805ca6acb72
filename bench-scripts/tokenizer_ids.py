"""Checks that Hugging Face's tokenizers reads our tokenizer.json and gives the ids that we give.

Purpose   for each splitter and model, train a tokenizer with `rb`, encode every text with `rb tokenizer encode` and
          with the package, and compare ids and decoded text, document by document.
Seed      none.
Versions  requirements.txt beside this file.
Command   python bench-scripts/tokenizer_ids.py --rb target/release/rb --data DATA [--vocab-size 8192]

DATA is a folder of .txt and .jsonl files. The package must not make special tokens from text, so they are split
(`encode_special_tokens`). Prints a markdown table. Exit code: 0 equal, 1 not.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from tokenizers import Tokenizer

CASES = [("bpe", "rb", "none"), ("bpe", "rb", "nfc"), ("bpe", "gpt2", "none"), ("bpe", "cl100k", "none"), ("bpe", "o200k", "none"), ("unigram", "rb", "none")]


def documents(folder):
    """(file, line) -> text of every document, as `rb` reads them."""
    texts = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".txt":
            text = path.read_bytes().decode().removeprefix("\ufeff")
            texts[str(path), 1] = text
        elif path.suffix == ".jsonl":
            for number, line in enumerate(path.read_bytes().decode().split("\n"), 1):
                if line.strip():
                    texts[str(path), number] = json.loads(line)["text"]
    return {place: text for place, text in texts.items() if text}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rb", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--vocab-size", default="8192")
    args = parser.parse_args()
    texts = documents(args.data)
    failed = False
    print("| model | splitter | normalisation | documents | tokens | documents with other ids | not the same after decoding |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model, splitter, normalization in CASES:
        with tempfile.TemporaryDirectory() as place:
            tokenizer, ids = f"{place}/tokenizer.json", f"{place}/ids.jsonl"
            options = ["--model", model, "--splitter", splitter, "--normalization", normalization]
            train = [args.rb, "tokenizer", "train", str(args.data), "--vocab-size", args.vocab_size, *options, "--out", tokenizer]
            subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
            subprocess.run([args.rb, "tokenizer", "encode", tokenizer, str(args.data), "--out", ids], check=True)
            theirs = Tokenizer.from_file(tokenizer)
            theirs.encode_special_tokens = True
            seen = tokens = unequal = undecoded = 0
            for line in open(ids):
                record = json.loads(line)
                text = texts[record["file"], record["line"]]
                seen += 1
                tokens += len(record["ids"])
                unequal += theirs.encode(text, add_special_tokens=False).ids != record["ids"]
                undecoded += normalization == "none" and theirs.decode(record["ids"], skip_special_tokens=False) != text
            print(f"| {model} | {splitter} | {normalization} | {seen} | {tokens} | {unequal} | {undecoded} |", flush=True)
            failed |= unequal > 0 or undecoded > 0 or seen != len(texts)
    sys.exit(failed)


if __name__ == "__main__":
    main()
