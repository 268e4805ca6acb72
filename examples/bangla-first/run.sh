#!/usr/bin/env bash
# run.sh -- from raw Bangla and English text to a judged and exported model, on the CPU.
#
# Usage   examples/bangla-first/run.sh [DATA_FOLDER [WORK_FOLDER]]
# Needs   DATA_FOLDER/parallel.bn.jsonl and parallel.en.jsonl (default ../shared/data), one {"text": ...} a line; where
#         they are absent it takes the small text of examples/quickstart and says so. RB names the program
#         (default: cargo run --release --), CONFIG the training config (default: cpu.toml beside this file).
# Gives   WORK_FOLDER (default runs/bangla-first): tokenizer.json, tokenizer.html, prepared/, run/ with report.html,
#         eval.json, model/ for transformers, model-q8_0.gguf for llama.cpp
# Time    about 10 minutes on two cores
# Exit    that of the first step that failed; 3 where a gate refused
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
data=${1:-../shared/data}
work=${2:-runs/bangla-first}
config=${CONFIG:-$here/cpu.toml}
# shellcheck disable=SC2206 -- the program may have words
rb=(${RB:-cargo run --release --})
# Floors in characters a token on held-out text, for a vocabulary of 4096.
floor_bn=2.6 floor_en=2.6

bn=$data/parallel.bn.jsonl en=$data/parallel.en.jsonl
if [ ! -f "$bn" ] || [ ! -f "$en" ]; then
    echo "$data has no parallel.bn.jsonl and parallel.en.jsonl: taking the small text of examples/quickstart"
    bn=examples/quickstart/bangla.jsonl en=examples/quickstart/english.jsonl
    floor_bn=1.5 floor_en=1.5
fi
step() { printf '\n== %s\n' "$*"; }

step "hold out every tenth document, the same ones in both languages"
mkdir -p "$work/text"
for language in bn en; do
    file=${!language}
    awk 'NR % 10 != 0' "$file" >"$work/text/train.$language.jsonl"
    awk 'NR % 10 == 0' "$file" >"$work/text/held-out.$language.jsonl"
done
train=("$work/text/train.bn.jsonl" "$work/text/train.en.jsonl")
held_out=("$work/text/held-out.bn.jsonl" "$work/text/held-out.en.jsonl")

step "tokenizer: equal parts of both languages, marks kept inside words"
"${rb[@]}" tokenizer train "${train[@]}" --vocab-size 4096 --out "$work/tokenizer.json" \
    --language bn,script=Bengali --language en,script=Latin
"${rb[@]}" tokenizer report "$work/tokenizer.json" "${held_out[@]}" --html "$work/tokenizer.html" \
    --language "bn,script=Bengali,floor=$floor_bn" --language "en,script=Latin,floor=$floor_en"

step "the splitter of GPT-2 on the same text: the gate must refuse it"
"${rb[@]}" tokenizer train "${train[@]}" --vocab-size 4096 --splitter gpt2 --out "$work/gpt2.json" \
    --language bn,script=Bengali --language en,script=Latin
code=0
"${rb[@]}" tokenizer report "$work/gpt2.json" "${held_out[@]}" \
    --language "bn,script=Bengali,floor=$floor_bn" --language "en,script=Latin,floor=$floor_en" || code=$?
[ "$code" = 3 ] || { echo "expected exit code 3 from the gate, got $code" >&2; exit 1; }

step "data: de-duplicated, mixed half and half by tokens"
rm -rf "$work/prepared"
"${rb[@]}" data prepare "${train[@]}" --tokenizer "$work/tokenizer.json" --out "$work/prepared" --mixture tokens \
    --language "bn,script=Bengali,floor=$floor_bn" --language "en,script=Latin,floor=$floor_en"
"${rb[@]}" data check "$work/prepared" --seq-len 128

step "what the run will take"
"${rb[@]}" plan "$config" --set "data.paths=[\"$(realpath "$work/prepared")\"]" --hours 1

step "train"
rm -rf "$work/run"
"${rb[@]}" train "$config" --data "$work/prepared" --out "$work/run"

step "judge it, beside a uniform guess, token frequencies and its own random beginning"
"${rb[@]}" eval "$work/run" --data "bn=${held_out[0]}" --data "en=${held_out[1]}" --out "$work/eval.json"

step "write"
"${rb[@]}" generate "$work/run" --prompt "আমি" --max-new-tokens 60 --seed 1 --stats
"${rb[@]}" generate "$work/run" --prompt "And the people" --max-new-tokens 60 --seed 1 --stats

step "export"
"${rb[@]}" export "$work/run" --out "$work/model" --overwrite
"${rb[@]}" export "$work/run" --format gguf --dtype q8_0 --out "$work/model-q8_0.gguf" --overwrite
step "done: $work"
