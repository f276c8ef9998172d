"""Watch one generation of 100,000 tokens and measure that memory stays where it was.

    python scripts/benchmarks/soak.py --out docs/benchmarks/soak.json

The host is a tiny random Mistral with a sliding window, whose own cache is bounded; the pack is random too: what is
measured is what watching keeps. Each arm is a process of its own: the bare host; watched with `keep_tokens` and a sink
that takes every score, whose resident size must stay flat beside the bare one's; and a tenth of it that keeps every
score, to say what a token costs then. Ends with status 1 if watching made it grow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MistralConfig, MistralForCausalLM

from probemon import DynamicProbeManager, ProbePack
from probemon.host.fingerprint import fingerprint
from probemon.monitor.sinks import JsonLinesSink
from probemon.util.files import write_text_atomically
from provenance import about

HIDDEN, LAYERS, PROBES, WINDOW = 32, 2, 300, 64
KEEP = 1000
FLAT_BYTES = 8 << 20  # what the allocator's pages may add


def resident_bytes() -> int:
    """Resident size of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def make_host(n_tokens: int) -> Any:
    """A tiny random model that can run `n_tokens`."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=WINDOW,
        max_position_embeddings=n_tokens + 64,
        initializer_range=0.5,
        eos_token_id=None,
        pad_token_id=0,
    )
    return MistralForCausalLM(config).eval()


def make_pack(folder: Path, model: Any) -> ProbePack:
    """A random tree of random linear probes."""
    rng, g = np.random.default_rng(0), torch.Generator().manual_seed(0)
    concepts = [
        {"id": f"c{i}", "name": f"concept {i}", "parents": [] if i < 20 else [f"c{rng.integers(0, i)}"]}
        for i in range(PROBES)
    ]
    return ProbePack.write(
        folder / "pack",
        name="random",
        licence="CC0-1.0",
        card="Random probes.\n",
        score_rule="path",
        concepts=concepts,
        weights={"w1": torch.randn(PROBES, 1, HIDDEN, generator=g), "b1": torch.randn(PROBES, 1, generator=g) + 1},
        inputs=[{"site": "resid_post.1", "norm": "rmsnorm"}],
        alert_threshold=torch.full((PROBES,), 0.3),
        host={
            "model_id": "tiny random mistral",
            "hidden_size": HIDDEN,
            "n_layers": LAYERS,
            "fingerprint": fingerprint(model),
        },
    )


def arm(name: str, n_tokens: int, every: int) -> dict[str, Any]:
    """Generates `n_tokens`; resident size each `every` tokens."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        model = make_host(n_tokens)
        manager = DynamicProbeManager(make_pack(folder, model))
        sizes: list[int] = []
        seen = 0

        def count(*anything: object) -> None:
            nonlocal seen
            if seen % every == 0:
                sizes.append(resident_bytes())
            seen += 1

        model.model.register_forward_pre_hook(count)
        generate = {"max_new_tokens": n_tokens, "do_sample": False}
        begin = time.perf_counter()
        if name == "bare":
            model.generate(torch.tensor([[1]]), **generate)
            return {"seconds": round(time.perf_counter() - begin, 1), "resident_bytes": sizes}
        with manager.attach(model, keep_tokens=KEEP if name == "bounded" else None) as run:
            delivery = run.follow(JsonLinesSink(folder / "scores.jsonl", top_k=10))
            out = model.generate(torch.tensor([[1]]), **generate)
        seconds = time.perf_counter() - begin
        kept = int(run.result(out).coverage.seen.sum())
        # What is kept is still right: the newest tokens, each with its scores, the last one never run.
        assert out.shape[1] == n_tokens + 1
        assert kept == n_tokens if name == "whole" else KEEP <= kept < KEEP + 256, kept
        sink = delivery.stats()
        return {
            "seconds": round(seconds, 1),
            "n_kept": kept,
            "sink": {"written": sink.n_written, "dropped": sink.n_dropped},
            "resident_bytes": sizes,
        }


def growth(found: dict[str, Any]) -> int:
    """From a fifth on (before that caches fill and the allocator finds its size) to the end: medians of a tenth
    each.
    """
    sizes = found["resident_bytes"]
    tenth = max(1, len(sizes) // 10)
    return int(np.median(sizes[-tenth:]) - np.median(sizes[2 * tenth : 3 * tenth]))


def main() -> int:
    """Every arm in a process of its own, then the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument(
        "--arm", choices=("bare", "bounded", "whole"), help="run this one alone and print what it found"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(arm(arguments.arm, arguments.tokens, arguments.tokens // 50)))
        return 0
    found: dict[str, Any] = {"n_tokens": arguments.tokens, "keep_tokens": KEEP}
    for name in ("bare", "bounded", "whole"):
        n_tokens = arguments.tokens // 10 if name == "whole" else arguments.tokens
        command = [sys.executable, __file__, "--arm", name, "--tokens", str(n_tokens)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        found[name]["growth_bytes"] = growth(found[name])
    found["growth_of_watching_bytes"] = found["bounded"]["growth_bytes"] - found["bare"]["growth_bytes"]
    found["flat"] = found["growth_of_watching_bytes"] < FLAT_BYTES
    found |= {
        "kept_bytes_per_token": round(found["whole"]["growth_bytes"] / (0.7 * arguments.tokens / 10)),
        **about(),
    }
    print(json.dumps(found, indent=1))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
