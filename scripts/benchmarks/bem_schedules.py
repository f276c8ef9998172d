#!/usr/bin/env python3
"""Levels that sites learn, and chunk codes that are foretold: do they do what they say, and what do they buy?

    python scripts/benchmarks/bem_schedules.py                      # writes docs/benchmarks/bem_schedules.json

levels         on tiny random hosts an adapter is planted whose sites take token, prefix and chunk codes; another with
               the same numbers learns which, from what the host says alone, at several prices of an operation
speculation    on the demo host, text written greedily by an adapter of chunk codes with random weights: processor
               milliseconds a step with codes foretold and without, in turns; the time that limits take; the share of
               hits
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import DynamicCache

from bem_learns import VOCAB, make_host
from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.levels import expected_operations, level_operations
from probemon.adapters.bem.speculation import speculating
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


@torch.no_grad()
def speculation(n_rounds: int, n_steps: int) -> dict[str, Any]:
    """Processor milliseconds of a step on the demo host, with and without, in turns."""
    from probemon.bundled import load_bundled

    model, tokenizer = load_bundled(torch.bfloat16)
    ids = tokenizer("Whales are the largest animals that have ever lived, and", return_tensors="pt")["input_ids"]
    bem = attach_bem(model, BemConfig(level="chunk", chunk_tokens=8, prefix_tokens=32))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in bem.named_parameters():
        parameter.add_((0.02 if "updates" in name else 0.1) * torch.randn(parameter.shape, generator=generator))
    taken: dict[str, list[float]] = {"plain": [], "foretold": []}
    texts: dict[str, list[int]] = {}
    told: dict[str, Any] = {}

    def write(name: str) -> None:
        cache, token, text = DynamicCache(), ids, []
        for _ in range(n_steps):
            begin = time.process_time()
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
            taken[name].append(time.process_time() - begin)
            text.append(int(token))
        del taken[name][-n_steps]  # the prompt's
        texts[name] = text

    with bem:
        write("plain")  # warm
        taken["plain"].clear()
        for _ in range(n_rounds):
            write("plain")
            with speculating(bem) as foretelling:
                write("foretold")
            told = foretelling.stats()
        code, limits = torch.ones(1, bem.config.rank), []
        for _ in range(50):
            begin = time.process_time()
            bem.governor.apply({True: code, False: code})
            limits.append(time.process_time() - begin)
    medians = {name: 1000 * statistics.median(times) for name, times in taken.items()}
    return {
        "model": "SmolLM2-135M-Instruct, bf16, rank 8, 60 sites, chunks of 8, random weights",
        "steps_of_each": len(taken["plain"]),
        "milliseconds_a_step": medians,
        "spared_percent": 100 * (1 - medians["foretold"] / medians["plain"]),
        "milliseconds_of_limits": 1000 * statistics.median(limits),
        "same_text": texts["plain"] == texts["foretold"],
        **told,
    }


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "bem_schedules.json")
    parser.add_argument("--only", nargs="+", choices=("speculation", "levels"), default=("speculation", "levels"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json.is_file() else {}
    for name in options.only:
        if name == "speculation":
            found[name] = speculation(4, 64)
        else:
            pairs = [(seed, price) for seed in range(options.seeds) for price in PRICES]
            found[name] = [learned_levels(seed, price, options.steps) for seed, price in pairs]
        print(json.dumps(found[name]))
        write_text_atomically(options.json, json.dumps({**found, **about()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
