# ruff: noqa: E402
"""What settings cost and find with the shipped packs, on the states of a text: the table of docs/scores.md.

    python scripts/benchmarks/setting_costs.py --out docs/benchmarks/settings.json       # a minute

The same trials as `probemon doctor demo --measure` makes, on a passage of 218 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

import torch

from cascade_profile.world import PASSAGE
from probemon import ProbePack
from probemon.bundled import load_bundled
from probemon.engine.setting_trials import try_settings
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.state_reader import StateReader
from probemon.lab.corpora.windows import Reading, shards
from probemon.util.files import write_text_atomically
from provenance import about

PACKS = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")


def main() -> None:
    """Try, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    model, tokenizer = load_bundled()
    found = {}
    for name in PACKS:
        pack = ProbePack.open(ROOT / "probes" / name)
        reader = StateReader(model, tokenizer, list(pack.sites), Reading())
        [(_, tokens, states)] = reader.states(shards(read_documents([{"text": PASSAGE}])))
        trials = [asdict(trial) for trial in try_settings(pack, states)]
        found[name] = {"n_probes": pack.n_probes, "n_tokens": len(tokens), "trials": trials}
    write_text_atomically(out, json.dumps({"packs": found, **about()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
