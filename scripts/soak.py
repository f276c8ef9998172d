"""Watch one generation of 100,000 tokens and measure that memory stays where it was.

    python scripts/soak.py --out docs/benchmarks/soak.json

The host is a tiny random Mistral with a sliding window, whose own cache is bounded; the pack is random too: what is measured
is what watching keeps. Two runs: bounded (`keep_tokens`, a parquet sink takes the scores), where the resident size must stay
flat, and a shorter one that keeps every score, to say what a token costs then. Ends with status 1 if it grew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MistralConfig, MistralForCausalLM

from probemon import DynamicProbeManager, ProbePack
from probemon.host import fingerprint
from probemon.packfile import write_text_atomically
from probemon.sinks import ParquetSink
from provenance import commit, machine

HIDDEN, LAYERS, PROBES, WINDOW = 32, 2, 300, 64
FLAT_BYTES = 8 << 20  # what a megabyte of ids and the allocator's own pages may add


def resident_bytes() -> int:
    """Resident size of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def make_host(n_tokens: int) -> Any:
    """A tiny random model that can run `n_tokens`."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
        sliding_window=WINDOW, max_position_embeddings=n_tokens + 64, initializer_range=0.5, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def make_pack(folder: Path, model: Any) -> ProbePack:
    """A random tree of random linear probes."""
    rng, g = np.random.default_rng(0), torch.Generator().manual_seed(0)
    concepts = [{"id": f"c{i}", "name": f"concept {i}", "parents": [] if i < 20 else [f"c{rng.integers(0, i)}"]} for i in range(PROBES)]
    return ProbePack.write(
        folder / "pack", name="random", licence="CC0-1.0", card="Random probes.\n", score_rule="path", concepts=concepts,
        weights={"w1": torch.randn(PROBES, 1, HIDDEN, generator=g), "b1": torch.randn(PROBES, 1, generator=g) + 1},
        inputs=[{"site": "resid_post.1", "norm": "rmsnorm"}], alert_threshold=torch.full((PROBES,), 0.3),
        host={"model_id": "tiny random mistral", "hidden_size": HIDDEN, "n_layers": LAYERS, "fingerprint": fingerprint(model)},
    )  # fmt: skip


def watch(manager: DynamicProbeManager, model: Any, n_tokens: int, every: int, keep: int | None, folder: Path) -> dict[str, Any]:
    """Generates `n_tokens`; resident size each `every` tokens."""
    sizes: list[int] = []
    seen = 0

    def count(placed: Any, scores: Any) -> None:
        nonlocal seen
        if seen % every == 0:
            sizes.append(resident_bytes())
        seen += 1

    begin = time.perf_counter()
    with manager.attach(model, keep_tokens=keep) as run:
        run.listen(count)
        delivery = run.add_sink(ParquetSink(folder / "scores.parquet", overwrite=True)) if keep else None
        out = model.generate(torch.tensor([[1]]), max_new_tokens=n_tokens, do_sample=False)
    seconds = time.perf_counter() - begin
    assert out.shape[1] == n_tokens + 1
    result = run.result(out)
    # What is kept is still right: the newest tokens, each with its scores, the last one never run.
    kept = int(result.coverage.seen.sum())
    assert kept == n_tokens if keep is None else keep <= kept < keep + 256, kept
    return {
        "n_tokens": n_tokens, "keep_tokens": keep, "seconds": round(seconds, 1), "every": every, "resident_bytes": sizes, "n_kept": kept,
        "sink": None if delivery is None else {"written": delivery.stats().n_written, "dropped": delivery.stats().n_dropped},
    }  # fmt: skip


def main() -> int:
    """The bounded run, then the one that keeps everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        model = make_host(arguments.tokens)
        manager = DynamicProbeManager(make_pack(folder, model))
        bounded = watch(manager, model, arguments.tokens, arguments.tokens // 50, 1000, folder)
        whole = watch(manager, model, arguments.tokens // 10, arguments.tokens // 100, None, folder)
    # Measured from a fifth on: before that, caches fill and the allocator finds its size.
    sizes = bounded["resident_bytes"]
    growth = max(sizes[len(sizes) // 5 :]) - sizes[len(sizes) // 5]
    grown = whole["resident_bytes"][-1] - whole["resident_bytes"][2]
    found = {
        "growth_bytes": growth, "flat": growth < FLAT_BYTES, "bounded": bounded, "kept_whole": whole,
        "kept_bytes_per_token": round(grown / (whole["every"] * (len(whole["resident_bytes"]) - 3))), "machine": machine(), "commit": commit(),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")
    return 0 if found["flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
