#!/usr/bin/env python3
"""Levels that sites learn: do they find what was planted, and what does a price change?

    python scripts/evidence/bem_schedules.py                      # writes docs/benchmarks/bem_schedules.json

levels         on tiny random hosts an adapter is planted whose sites take token, prefix and chunk codes; another with
               the same numbers learns which, from what the host says alone, at several prices of an operation
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from bem_learns import VOCAB, make_host
from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.levels import expected_operations, level_operations
from probemon.adapters.bem.training import TrainSettings, fit
from probemon.util.files import write_text_atomically
from provenance import about

ROOT = Path(__file__).resolve().parents[2]
PRICES = (0.0, 1e-3, 1e-1)
CONFIG = BemConfig(rank=4, width=8, chunk_tokens=4, prefix_tokens=8, level="learned", spectral_cap=None)


@torch.no_grad()
def planted(host: Any, seed: int, levels: Sequence[int]) -> Bem:
    """An adapter with random weights on a tiny host, each site's level given."""
    bem = attach_bem(host, CONFIG)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in bem.named_parameters():
        size = 0.3 if name.startswith("updates") else 0.5
        parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    assert bem.levels is not None
    bem.levels.logits.copy_(4 * torch.nn.functional.one_hot(torch.tensor(levels), 3))
    return bem


def learned_levels(seed: int, price: float, n_steps: int) -> dict[str, Any]:
    """What is chosen where only the levels are to be learned, and what it costs."""
    host, generator = make_host(seed), torch.Generator().manual_seed(seed)
    # Of the last layer's last site too: every level stands somewhere.
    truth = [2, 0, 1, 2] if seed % 2 == 0 else [0, 2, 2, 1]
    batches: list[dict[str, Any]] = [
        {"input_ids": torch.randint(3, VOCAB, (8, 24), generator=generator), "number": i} for i in range(4)
    ]
    with planted(host, seed, truth) as bem, torch.no_grad():
        said = [host(x["input_ids"], use_cache=False).logits.log_softmax(-1) for x in batches]
    with planted(host, seed, truth) as bem:
        assert bem.levels is not None
        with torch.no_grad():
            bem.levels.logits.zero_()

        def divergence(batch: Any) -> Tensor:
            found, wanted = host(batch["input_ids"], use_cache=False).logits.log_softmax(-1), said[batch["number"]]
            return (wanted.exp() * (wanted - found)).sum(-1).mean()

        def loss_of(batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
            return divergence(batch) + price * expected_operations(bem, 24), {}

        host.train()
        fit([bem.levels.logits], loss_of, batches, TrainSettings(n_steps=n_steps, lr=0.1, max_grad_norm=None))
        host.eval()
        chosen, prices = bem.levels.chosen(), level_operations(CONFIG, 24)
        with torch.no_grad():
            left = statistics.mean(float(divergence(batch)) for batch in batches)
    return {
        "seed": seed,
        "nats_an_operation": price,
        "planted": [LEVELS[i] for i in truth],
        "chosen": list(chosen.values()),
        "right": sum(a == LEVELS[i] for a, i in zip(chosen.values(), truth, strict=True)),
        "operations_a_token": statistics.mean(prices[level] for level in chosen.values()),
        "divergence_nats": left,
    }


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "bem_schedules.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json.is_file() else {}
    # What the file has of foretold codes stays: `docs/decisions.md` says why nothing measures them any more.
    pairs = [(seed, price) for seed in range(options.seeds) for price in PRICES]
    found["levels"] = [learned_levels(seed, price, options.steps) for seed, price in pairs]
    print(json.dumps(found["levels"]))
    write_text_atomically(options.json, json.dumps({**found, **about()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
