"""Tries fit_models.sh on tiny random models of five families and on the demo: what it writes opens, scores, watches.

    python scripts/benchmarks/fit_families.py --out docs/benchmarks/fit_families.json

A random model knows little more of a text than its tokens, so only the languages are fitted: what is tried is the way
from a model's name to a pack. The tokenizer is that of the demo model, to which two domains are fitted at three layers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.util.files import write_text_atomically
from provenance import about

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 32},
    "Mistral": {"num_key_value_heads": 2, "head_dim": 32},
    "GPTNeoX": {},
}
DEMO = {"LAYERS": "8,12,15", "CONCEPTS": "language,honesty"}
SCRIPT = Path(__file__).with_name("fit_models.sh")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = case(Path(name))
    print(json.dumps(found, indent=1))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def case(folder: Path) -> dict[str, Any]:
    tokenizer = load_bundled()[1]
    folders = [host(folder, family, tokenizer) for family in FAMILIES]
    begin = time.perf_counter()
    run_script(folder / "packs", [*map(str, folders), str(folder / "none")], LAYERS="1,3", CONCEPTS="language")
    families = {}
    for family, path in zip(FAMILIES, folders, strict=True):
        pack = ProbePack.open(folder / "packs" / f"concepts-{path.name}", verify=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        manager = DynamicProbeManager(pack)
        inputs = tokenizer("Das Wetter war gestern schön, und morgen regnet es.", return_tensors="pt")
        with manager.attach(model, tokenizer, strict=True) as run:
            out = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        result = run.result(out)
        families[family] = {
            "class": type(model).__name__,
            "probes": pack.n_probes,
            "concepts": [concept["id"] for concept in pack.concepts],
            "sites": pack.sites,
            "tests": areas(folder / "packs" / f"concepts-{path.name}.tests.json"),
            "scored_tokens": int(result.coverage.seen.sum()),
        }
    minutes = round((time.perf_counter() - begin) / 60, 1)
    run_script(folder / "packs", ["demo"], **DEMO)
    pack = ProbePack.open(folder / "packs" / "concepts-demo", verify=True)
    demo = {"sites": pack.sites, "tests": areas(folder / "packs" / "concepts-demo.tests.json")}
    return {"minutes": minutes, "families": families, "demo": demo, **about()}


def run_script(out: Path, models: list[str], **options: str) -> None:
    """Run the script; a model that is not there must be the only one that fails."""
    environment = {**os.environ, "DEVICE": "cpu", "HF_HUB_OFFLINE": "1", **options}
    command = ["bash", str(SCRIPT), str(out), *models]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wrong = [model for model in models if model.endswith("/none")]
    if process.returncode != len(wrong) or (wrong and f"failed: {wrong[0]}" not in process.stderr):
        raise SystemExit(process.stdout + process.stderr)


def areas(file: Path) -> dict[str, float | None]:
    """Return by concept the AUROC of the library's short tests."""
    return {id: one["short"]["auroc"] for id, one in json.loads(file.read_text())["concepts"].items()}


def host(folder: Path, family: str, tokenizer: Any) -> Path:
    """Write a random model of a family."""
    torch.manual_seed(0)
    sizes = {**SMALL, **FAMILIES[family], "vocab_size": len(tokenizer)}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes))
    path = folder / f"{family.lower()}-random"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
