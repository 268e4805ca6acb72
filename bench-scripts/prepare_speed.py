"""Prepares synthetic text in several languages with `rb data prepare` and with the `tokenizers` package.

Purpose   memory and speed of preparing 1 GB of text, beside the package's `encode_batch` on the same documents with
          the same tokenizer.json; the package only encodes: it does not read, hash, split, shuffle or write.
Seed      7.
Versions  requirements.txt beside this file.
Command   python bench-scripts/prepare_speed.py --rb target/release/rb --data DATA --work DIR [--bytes 1000000000]

DATA is the folder with parallel.en.jsonl, parallel.bn.jsonl and udhr/. Documents are made of passages of
their words, drawn by frequency, about 1 to 5 kB each, in four languages; one in fifty occurs twice. DIR must have room for about three
times the bytes. Memory is the largest resident set of the process, from the operating system. Prints a markdown table.
"""

import argparse
import json
import pathlib
import random
import resource
import subprocess
import sys
import time

LANGUAGES = ["en", "bn", "rus", "arb"]


def words(data, language):
    if language in ("en", "bn"):
        lines = (data / f"parallel.{language}.jsonl").read_text().splitlines()
        return " ".join(json.loads(line)["text"] for line in lines).split()
    return (data / "udhr" / f"{language}.txt").read_text().split()


def make(data, path, size):
    """Writes `path` with about `size` bytes of text."""
    rng = random.Random(7)
    pools = []
    for language in LANGUAGES:
        source = words(data, language)
        pools.append([" ".join(rng.choices(source, k=rng.randrange(40, 120))) for _ in range(3000)])
    written = 0
    with open(path, "w") as out:
        while written < size:
            language = rng.randrange(len(LANGUAGES))
            text = " ".join(rng.choices(pools[language], k=rng.randrange(2, 7)))
            line = json.dumps({"text": text, "lang": LANGUAGES[language]}, ensure_ascii=False) + "\n"
            times = 2 if rng.randrange(50) == 0 else 1
            out.write(line * times)
            written += len(text.encode()) * times
    return written


def peer(tokenizer, path, limit):
    """Encodes the documents of `path` up to `limit` bytes; bytes and seconds of encoding alone."""
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(tokenizer))
    texts, size = [], 0
    for line in open(path):
        texts.append(json.loads(line)["text"])
        size += len(texts[-1].encode())
        if size >= limit:
            break
    began = time.perf_counter()
    for start in range(0, len(texts), 1000):
        theirs.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)
    return size, time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rb", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--peer-bytes", type=int, default=100_000_000, help="bytes that the package encodes")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    text, tokenizer = args.work / "text.jsonl", args.work / "tokenizer.json"
    size = make(args.data, text, args.bytes)
    train = [args.rb, "tokenizer", "train", str(args.data), "--vocab-size", "16000", "--out", str(tokenizer)]
    subprocess.run(train, check=True, stdout=subprocess.DEVNULL)

    languages = [part for name in LANGUAGES for part in ("--language", f"{name},field=lang={name}")]
    command = [args.rb, "data", "prepare", str(text), "--tokenizer", str(tokenizer), "--out", str(args.work / "prepared"), *languages]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    if done.returncode != 0:
        sys.exit(1)
    their_bytes, their_seconds = peer(tokenizer, text, args.peer_bytes)
    print("| what | bytes of text | seconds | MB/s | largest resident set, MiB |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| rb data prepare, all of it | {size} | {seconds:.1f} | {size / seconds / 1e6:.1f} | {mib:.0f} |")
    print(f"| tokenizers, encode_batch_fast alone | {their_bytes} | {their_seconds:.1f} | {their_bytes / their_seconds / 1e6:.1f} | |")


if __name__ == "__main__":
    main()
