"""How fine a difference between two generations can be told: nothing, a known delay, and what watching adds.

    python scripts/benchmarks/ruler.py           # writes docs/benchmarks/ruler.json; 16 minutes

On the demo model, three times each: a bare host beside another around the same weights (the truth is 0), one whose
middle layer waits for a known time, and one that is watched with each shipped pack. The two hosts exchange what they do
from turn to turn. Each is measured until its 95 % interval is half a per cent wide, or for a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from probemon import DynamicProbeManager
from probemon.bundled import load_bundled
from probemon.monitor.lockstep import Side, shared_copy
from probemon.monitor.overhead import WIDTH_PCT, compared
from probemon.monitor.run import MonitorRun
from probemon.util.files import write_text_atomically
from provenance import about

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs/benchmarks/ruler.json"
PACKS = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")
DELAYS_MS = (0.5, 1.0)
N_TOKENS, N_TIMES, MOST_SECONDS = 12, 3, 60
PROMPT = "Tell me about whales and the ships that hunted them."


@contextmanager
def delayed(model: Any, milliseconds: float) -> Iterator[None]:
    """Let the middle layer take so much longer."""

    def wait(*_: Any) -> None:
        end = time.perf_counter() + milliseconds / 1e3
        while time.perf_counter() < end:
            pass

    handle = model.model.layers[len(model.model.layers) // 2].register_forward_hook(wait)
    try:
        yield
    finally:
        handle.remove()


def generating(model: Any, ids: torch.Tensor) -> Side:
    """Return a side that generates with a model."""

    def side(criteria: Any, n_tokens: int) -> None:
        options = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False}
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), stopping_criteria=criteria, **options)

    return side


def row(what: str, pairs: list[tuple[Side, Side]], known_ms: float | None) -> dict[str, Any]:
    """Measure one thing once."""
    begin = time.perf_counter()
    times, (value, low, high) = compared(pairs, N_TOKENS, WIDTH_PCT, MOST_SECONDS)
    host_ms = float(torch.tensor(times[..., 0]).median()) * 1e3
    found = {
        "what": what,
        "host_ms": round(host_ms, 2),
        "added_pct": round(value, 3),
        "interval_pct": [round(low, 3), round(high, 3)],
        "n_pairs": times[..., 0].size,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    if known_ms is not None:
        known = 100 * known_ms / host_ms
        found |= {"known_pct": round(known, 3), "is_within": bool(low <= known <= high)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=FILE, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_bundled()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    hosts, rows = (model, shared_copy(model)), list[dict[str, Any]]()
    managers = {name: DynamicProbeManager(ROOT / "probes" / name) for name in PACKS}

    def beside(what: Callable[[Any], AbstractContextManager[Any]]) -> list[tuple[Side, Side]]:
        """A bare host beside one within `what(host)`, and the other way round."""

        def within(host: Any) -> Side:
            def side(criteria: Any, n_tokens: int) -> None:
                with what(host):
                    generating(host, ids)(criteria, n_tokens)

            return side

        return [(generating(hosts[1 - i], ids), within(hosts[i])) for i in range(2)]

    compared(beside(nullcontext), N_TOKENS, WIDTH_PCT, 0)  # what is made at first use
    for _ in range(N_TIMES):
        rows.append(row("nothing", beside(nullcontext), 0.0))
        for ms in DELAYS_MS:
            rows.append(row(f"a delay of {ms} ms", beside(partial(delayed, milliseconds=ms)), ms))
        for name, manager in managers.items():
            rows.append(row(name, beside(partial(MonitorRun, manager)), None))
        print(json.dumps(rows[-5:], indent=1), flush=True)
    found = {"width_pct": WIDTH_PCT, "rows": rows, **about()}
    write_text_atomically(arguments.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
