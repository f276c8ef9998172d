"""Tries fit_models.sh on tiny random models of five families: what it writes opens, scores as stated, and watches.

    python scripts/benchmarks/fit_families.py --out docs/benchmarks/fit_families.json

A random model knows little more of a text than its tokens, so only the languages are fitted: what is tried is the way
from a model's name to a pack. The tokenizer is that of the demo model.
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
    environment = {**os.environ, "DEVICE": "cpu", "LAYERS": "1,3", "CONCEPTS": "language", "HF_HUB_OFFLINE": "1"}
    begin = time.perf_counter()
    command = ["bash", str(SCRIPT), str(folder / "packs"), *map(str, folders), str(folder / "none")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode != 1 or f"failed: {folder / 'none'}" not in process.stderr:
        raise SystemExit(process.stdout + process.stderr)
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
            "scored_tokens": int(result.coverage.seen.sum()),
        }
    return {"minutes": round((time.perf_counter() - begin) / 60, 1), "families": families, **about()}


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
