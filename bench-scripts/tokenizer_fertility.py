"""Characters a token of Bangla and English for every splitter and model, with `rb` alone.

Purpose   the table of docs/benchmarks/tokenizer_fertility_202611.md: a vocabulary of 32,000 trained on nine tenths of
          the parallel documents at equal sampling, measured on the held-out tenth and on the Universal Declaration.
Seed      none; documents are held out by the hash of their text.
Versions  none; needs no package.
Command   python bench-scripts/tokenizer_fertility.py --rb target/release/rb --data DATA

DATA is the folder with parallel.en.jsonl, parallel.bn.jsonl and udhr/. Floors are 4.1 and 4.0 on the held-out tenth,
2.7 and 3.3 on the Declaration. Prints a markdown table and what the gate says. Exit code: 0 if the splitter `rb` passes
with BPE and `gpt2` is refused, else 1.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

CASES = [("bpe", "rb"), ("unigram", "rb"), ("bpe", "o200k"), ("bpe", "cl100k"), ("bpe", "gpt2")]


def report(rb, tokenizer, texts, floors, held_out, place):
    """Exit code, languages by name and the last line of what was said."""
    languages = [f"--language=bn,script=Bengali,floor={floors[0]}", f"--language=en,script=Latin,floor={floors[1]}"]
    command = [rb, "tokenizer", "report", tokenizer, *texts, "--held-out", str(held_out), *languages, "--json", f"{place}/report.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        sys.exit(done.stderr)
    found = json.load(open(f"{place}/report.json"))
    return done.returncode, {l["name"]: l for l in found["languages"]}, found, done.stderr.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rb", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    args = parser.parse_args()
    parallel = [str(args.data / f"parallel.{language}.jsonl") for language in ("bn", "en")]
    declaration = [str(args.data / "udhr" / f"{name}.txt") for name in ("ben", "eng")]
    everything = str(args.data)
    print("| model | splitter | entries | bn | en | pre-token bn | pre-token en | bn, Declaration | en, Declaration | gate | all texts come back |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    codes, said = {}, []
    for model, splitter in CASES:
        with tempfile.TemporaryDirectory() as place:
            tokenizer = f"{place}/tokenizer.json"
            train = [args.rb, "tokenizer", "train", *parallel, "--vocab-size", "32000", "--held-out", "0.1", "--model", model, "--splitter", splitter]
            train += ["--language=bn,script=Bengali", "--language=en,script=Latin", "--out", tokenizer]
            subprocess.run(train, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            code, held, found, message = report(args.rb, tokenizer, parallel, (4.1, 4.0), 0.1, place)
            _, other, _, _ = report(args.rb, tokenizer, declaration, (2.7, 3.3), 0, place)
            every = subprocess.run([args.rb, "tokenizer", "report", tokenizer, everything, "--json", f"{place}/all.json"], capture_output=True)
            same = every.returncode == 0 and json.load(open(f"{place}/all.json"))["round_trip"]
            codes[model, splitter] = code
            said.append(f"{model} {splitter}: {message or 'accepted'}")
            cells = [model, splitter, found["vocab_size"], *(f"{held[l]['chars_per_token']:.2f}" for l in ("bn", "en"))]
            cells += [f"{held[l]['chars_per_pretoken']:.2f}" for l in ("bn", "en")]
            cells += [f"{other[l]['chars_per_token']:.2f}" for l in ("bn", "en")]
            cells += ["accepted" if code == 0 else "refused", "yes" if same else "NO"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print("\n".join(["", *said]))
    sys.exit(not (codes["bpe", "rb"] == 0 and codes["bpe", "gpt2"] == 3))


if __name__ == "__main__":
    main()
