"""Runs `probemon bem train`, `eval`, `inspect` and `distil` on the demo model, and keeps what they print.

python scripts/benchmarks/bem_commands.py                # docs/benchmarks/bem_commands.json; some minutes

The rows are made here: two ways to answer the same questions, told apart by a mark in the prompt, about 24 animals.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provenance import about

ROOT = Path(__file__).parents[2]
# fmt: off
ANIMALS = ["whale", "dog", "cat", "horse", "eagle", "shark", "lion", "wolf", "bear", "otter", "seal", "fox",
           "owl", "crow", "trout", "salmon", "goat", "cow", "hen", "frog", "newt", "bee", "ant", "moth"]
# fmt: on
QUESTIONS = ("What is a {}?", "Where does a {} live?")
ANSWERS = {"pirate": "Arr, the {} be a fine beast, matey!", "formal": "The {} is an animal, and nothing more is known."}
COMMANDS = (
    "probemon bem train demo answers.jsonl --out adapter --layers 24-29 --budget 0.1% --epochs 4",
    "probemon bem eval demo adapter others.jsonl",
    'probemon bem inspect adapter --model demo --text "[pirate] What is a whale? Arr, the whale be a fine beast."',
    "probemon bem distil demo adapter answers.jsonl --out lora",
)


def rows(animals):
    for animal in animals:
        for question in QUESTIONS:
            for style, answer in ANSWERS.items():
                prompt = f"[{style}] {question.format(animal)}"
                yield {"prompt": prompt, "answer": answer.format(animal), "group": animal}


def main() -> None:
    told = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "110", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for name, animals in (("answers", ANIMALS[:18]), ("others", ANIMALS[18:])):
            text = "".join(json.dumps(row) + "\n" for row in rows(animals))
            (Path(folder) / f"{name}.jsonl").write_text(text)
        for command in COMMANDS:
            begin = time.perf_counter()
            words = [sys.executable, "-c", "from probemon.cli.app import main; main()"]
            done = subprocess.run(
                [*words, *shlex.split(command)[1:]],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{command}\n{done.stderr}")
            print(f"$ {command}\n{done.stdout}", flush=True)
            told.append({"command": command, "output": done.stdout, "seconds": round(time.perf_counter() - begin)})
    path = ROOT / "docs/benchmarks/bem_commands.json"
    path.write_text(json.dumps({"commands": told, **about()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
