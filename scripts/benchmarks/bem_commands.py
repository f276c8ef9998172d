#!/usr/bin/env python3
# ruff: noqa: E402
"""The commands of docs/bem.md on their own rows: what `bem train` makes by default, beside its LoRA.

    python scripts/benchmarks/bem_commands.py      # writes docs/benchmarks/bem_commands.json; ten minutes

Two ways to answer about 24 animals, told apart by a mark. 18 animals are in `answers.jsonl`, 6 in `others.jsonl`. After
training both adapters answer every prompt of `others.jsonl`; an answer has the right style if it begins as the mark
asks. Each seed is a new split, a new order and new parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from probemon.util.files import write_text_atomically
from provenance import about

# fmt: off
ANIMALS = ("whale", "dog", "cat", "horse", "eagle", "shark", "lion", "wolf", "bear", "otter", "seal", "fox",
           "owl", "crow", "trout", "salmon", "goat", "cow", "hen", "frog", "newt", "bee", "ant", "moth")
# fmt: on
QUESTIONS = ("What is a {}?", "Where does a {} live?")
ANSWERS = {"pirate": "Arr, the {} be a fine beast, matey!", "formal": "The {} is an animal, and nothing more is known."}
BEGINS = {"pirate": "Arr,", "formal": "The "}
TRAIN = ("bem", "train", "demo", "answers.jsonl", "--layers", "24-29", "--budget", "0.1%")


def rows(animals: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield each animal's questions and answers in both styles."""
    for animal in animals:
        for question in QUESTIONS:
            for style, answer in ANSWERS.items():
                prompt = f"[{style}] {question.format(animal)}"
                yield {"prompt": prompt, "answer": answer.format(animal), "group": animal}


def probemon(folder: Path, *words: str) -> dict[str, Any]:
    """Run a command in a folder, and return its JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "probemon", *words, "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def styles(folder: Path, adapter: str) -> dict[str, dict[str, int]]:
    """Of the answers to all prompts of `others.jsonl`, how many have the right style, and how many the right words."""
    from peft import PeftModel

    from probemon.adapters.bem import attach_bem
    from probemon.bundled import load_bundled

    def counted(model: Any) -> dict[str, int]:
        style = words = n = 0
        for row in rows(ANIMALS[18:]):
            chat = [{"role": "user", "content": row["prompt"]}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
            text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
            n, words = n + 1, words + (text == row["answer"])
            style += text.startswith(BEGINS[row["prompt"][1:].split("]")[0]])
        return {"prompts": n, "right_style": style, "right_words": words}

    model, tokenizer = load_bundled()
    with attach_bem(model, folder / adapter):
        found = {"adapter": counted(model)}
    return found | {"lora": counted(PeftModel.from_pretrained(model, folder / adapter / "lora"))}


def one_seed(folder: Path, seed: int, epochs: int | None) -> dict[str, Any]:
    """Train by the documented command, measure on other rows, ask."""
    adapter, begin = f"adapter{seed}", time.perf_counter()
    more = () if epochs is None else ("--epochs", str(epochs))
    trained = probemon(folder, *TRAIN, "--out", adapter, "--seed", str(seed), *more)
    others = probemon(folder, "bem", "eval", "demo", adapter, "others.jsonl")
    runs = (("train", trained), ("eval", others))
    told: dict[str, Any] = {name: {key: run[key] for key in ("held_out", "lora")} for name, run in runs}
    told |= {"answers": styles(folder, adapter), "seconds": round(time.perf_counter() - begin)}
    losses = {name: (run["held_out"]["loss"], run["lora"]["loss"]) for name, run in runs}
    print(f"seed {seed}: adapter and LoRA {losses}; {told['answers']}", file=sys.stderr)
    return {"seed": seed, "trainable": trained["trainable"], "lora_trainable": trained["lora"]["trainable"], **told}


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/bem_commands.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=None, help="in place of the command's default")
    arguments = parser.parse_args()
    made_by = about()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, animals in (("answers", ANIMALS[:18]), ("others", ANIMALS[18:])):
            lines = "".join(json.dumps(row) + "\n" for row in rows(animals))
            (folder / f"{file}.jsonl").write_text(lines, encoding="utf-8")
        seeds = [one_seed(folder, seed, arguments.epochs) for seed in range(arguments.seeds)]
    command = f"probemon {' '.join(TRAIN)} --out adapter"
    write_text_atomically(arguments.out, json.dumps({"command": command, "seeds": seeds, **made_by}, indent=1) + "\n")


if __name__ == "__main__":
    main()
