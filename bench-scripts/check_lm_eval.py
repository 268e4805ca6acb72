"""Checks that lm-eval gives the results of `rb eval` for the same model folder and the same local files.

Purpose   makes small files of questions in the published form of each task from a text, and held-out documents;
          runs `rb eval` and lm-eval's HFLM (fp32, CPU) on them with lm-eval's own task definitions, pointed at the
          local files; compares every accuracy, its error, every log-likelihood and every perplexity.
Seed      17 for the questions.
Versions  lm-eval 0.4 with its `hf` extra, torch, transformers from PyPI.
Command   rb export RUN --out FOLDER
          python bench-scripts/check_lm_eval.py FOLDER --rb target/release/rb --text FILE.txt --questions 60
          (with a template) rb tokenizer train TEXT --special-token '<|end|>' --special-token '<|begin|>' ..., then a
          run with that tokenizer, rb export, and the same with --template '<|begin|>'

With --template TOKEN the folder is copied first, and TOKEN, a special token of its tokenizer, is put before every text
as Llama 3's template does. lm-eval then judges that token too where it judges whole documents, after itself; `rb eval`
does not, and is compared there with lm-eval's add_bos_token=False.

Accuracies must be equal, log-likelihoods within --tolerance nats. Exit code: 0 good, 1 a check failed.
"""

import argparse
import json
import pathlib
import random
import shutil
import subprocess
import tempfile

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import verdict

LABELS = "ABCD"


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_questions(lines, count, folder):
    """Each question shows a line of the text and asks which piece of text follows it."""
    rng = random.Random(17)
    lines = [line.strip() for line in lines if len(line.split()) >= 6]
    rows = {name: [] for name in ("hellaswag", "arc_easy", "piqa", "openbookqa", "winogrande", "choices")}
    for number in range(count):
        at = rng.randrange(len(lines) - 1)
        stem, right = lines[at], lines[at + 1]
        others = rng.sample(lines, 3)
        answer = rng.randrange(4)
        choices = others[:answer] + [right] + others[answer:]
        words = stem.split()
        half = len(words) // 2
        rows["hellaswag"].append({
            "ind": number, "activity_label": words[0], "ctx_a": " ".join(words[:half]) + " [title] " + words[half],
            "ctx_b": " ".join(words[half:]), "ctx": stem, "endings": [f"{c} [step] {words[0]}" for c in choices],
            "label": str(answer), "split": "val", "split_type": "indomain", "source_id": str(number)})
        rows["arc_easy"].append({
            "id": str(number), "question": stem, "choices": {"text": choices, "label": list(LABELS)}, "answerKey": LABELS[answer]})
        rows["piqa"].append({"goal": stem, "sol1": choices[0], "sol2": choices[1], "label": min(answer, 1)})
        rows["openbookqa"].append({
            "id": str(number), "question_stem": stem, "choices": {"text": choices, "label": list(LABELS)}, "answerKey": LABELS[answer]})
        gap = max(1, half)
        rows["winogrande"].append({
            "sentence": " ".join(words[:gap]) + " _ " + " ".join(words[gap + 1:]), "option1": words[gap],
            "option2": others[0].split()[0], "answer": str(1 + number % 2)})
        rows["choices"].append({"context": stem + " ", "choices": choices, "answer": answer})
    for name, questions in rows.items():
        write_lines(folder / f"{name}.jsonl", questions)


def harness_task(name, folder):
    """A task of lm-eval on a local file."""
    root = pathlib.Path(lm_eval.__file__).parent / "tasks"
    source = {"hellaswag": "hellaswag/hellaswag.yaml", "arc_easy": "arc/arc_easy.yaml", "piqa": "piqa/piqa.yaml",
              "openbookqa": "openbookqa/openbookqa.yaml", "winogrande": "winogrande/default.yaml"}[name]
    return (f"include: {root / source}\ntask: local_{name}\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs:\n  data_files:\n    validation: {folder / (name + '.jsonl')}\n"
            "training_split: null\ntest_split: null\nvalidation_split: validation\nfewshot_split: null\ntag: null\n")


CHOICES = """task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_bytes, aggregation: mean, higher_is_better: true}}
"""
ROLLING = """task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""


def with_template(folder, token, out):
    """A copy of a model folder whose tokenizer puts `token` before every text."""
    shutil.copytree(folder, out)
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    ids = [entry["id"] for entry in tokenizer["added_tokens"] if entry["content"] == token]
    if not ids:
        raise SystemExit(f"{token} is no special token of {folder}; train the tokenizer with --special-token {token}")
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "TemplateProcessing", "single": [begin, sequence],
         "pair": [begin, sequence, {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {token: {"id": token, "ids": ids, "tokens": [token]}}}]}
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = json.loads((out / name).read_text())
        settings["bos_token"] = token
        (out / name).write_text(json.dumps(settings, ensure_ascii=False))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((out / name).read_text())
        settings["bos_token_id"] = ids[0]
        (out / name).write_text(json.dumps(settings))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rb", default="target/release/rb")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="plain text, a line a sentence")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=2e-3, help="largest difference of a log-likelihood, in nats")
    parser.add_argument("--template", metavar="TOKEN", help="special token to put before every text")
    args = parser.parse_args()
    lines = args.text.read_text(encoding="utf-8").splitlines()
    names = ["hellaswag", "arc_easy", "piqa", "openbookqa", "winogrande", "choices"]
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(temporary)
        if args.template:
            args.folder = with_template(args.folder, args.template, place / "model")
        make_questions(lines, args.questions, place)
        tail = lines[-40 * args.documents:]
        documents = ["\n".join(tail[i::args.documents]) for i in range(args.documents)]
        write_lines(place / "text.jsonl", [{"text": document} for document in documents])
        command = [args.rb, "eval", str(args.folder), "--device", "cpu", "--out", str(place / "ours.json"), "--samples",
                   str(place / "samples.jsonl"), "--data", f"text={place / 'text.jsonl'}"]
        for name in names:
            command += ["--task", f"{name}={place / (name + '.jsonl')}"]
        subprocess.run(command, check=True)
        ours = json.loads((place / "ours.json").read_text())["results"]
        samples = {}
        for line in (place / "samples.jsonl").read_text().splitlines():
            sample = json.loads(line)
            samples.setdefault(sample["task"], []).append(sample["resps"])
        for name in names[:-1]:
            (place / f"local_{name}.yaml").write_text(harness_task(name, place))
        (place / "local_choices.yaml").write_text(CHOICES.format(file=place / "choices.jsonl"))
        (place / "local_text.yaml").write_text(ROLLING.format(file=place / "text.jsonl"))
        model = HFLM(pretrained=str(args.folder), device="cpu", dtype="float32", batch_size=8)
        ids = model.tokenizer.encode("a")
        if args.template and ids[0] != model.prefix_token_id:
            failures.append(f"transformers does not put {args.template} before a text: {ids}")

        def evaluate(model, tasks):
            return lm_eval.simple_evaluate(
                model=model, tasks=tasks, task_manager=TaskManager(include_path=str(place)), num_fewshot=0,
                bootstrap_iters=100, log_samples=True)

        theirs = evaluate(model, [f"local_{name}" for name in names] + ["local_text"])
        rolling = theirs["results"]["local_text"]
        if args.template:
            bare = HFLM(pretrained=str(args.folder), device="cpu", dtype="float32", batch_size=8, add_bos_token=False)
            judged_too = rolling
            rolling = evaluate(bare, ["local_text"])["results"]["local_text"]
    print(f"lm-eval {lm_eval.__version__}")
    print("| Task | Metric | rb eval | lm-eval |\n| --- | --- | --- | --- |")
    for name in names:
        result = theirs["results"][f"local_{name}"]
        for metric in ("acc", "acc_norm", "acc_bytes"):
            if f"{metric},none" not in result:
                continue
            for key in (f"{metric},none", f"{metric}_stderr,none"):
                a, b = ours[name].get(key), result[key]
                if key.endswith("stderr,none") and not isinstance(b, float):
                    continue
                print(f"| {name} | {key.removesuffix(',none')} | {a:.6f} | {b:.6f} |")
                if a is None or not abs(a - b) < 1e-9:
                    failures.append(f"{name} {key}: {a} and {b}")
        worst = 0.0
        for mine, sample in zip(samples[name], sorted(theirs["samples"][f"local_{name}"], key=lambda s: s["doc_id"]), strict=True):
            likelihoods = [float(response[0]) for response in sample["filtered_resps"]]
            worst = max([worst] + [abs(a - b) for a, b in zip(mine, likelihoods, strict=True)])
        print(f"| {name} | largest difference of a log-likelihood | {worst:.1e} nats | |")
        if not worst <= args.tolerance:
            failures.append(f"{name}: log-likelihoods differ by {worst}")
    text, result = ours["heldout_text"], rolling
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        a, b = text[f"{metric},none"], result[f"{metric},none"]
        print(f"| text | {metric} | {a:.6f} | {b:.6f} |")
        if not abs(a - b) <= 1e-4 * abs(b):
            failures.append(f"text {metric}: {a} and {b}")
        if args.template:
            print(f"| text, with {args.template} judged too | {metric} | | {judged_too[f'{metric},none']:.6f} |")
    verdict.end(failures)


if __name__ == "__main__":
    main()
