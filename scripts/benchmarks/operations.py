"""Measure what the pages claim of operating probemon: what metrics cost, and how a budget's ladder goes down and up.

python scripts/benchmarks/operations.py --json docs/benchmarks/operations.json
python scripts/benchmarks/operations.py --only series_8000_concepts scrape_ms

One function a claim; each returns what it found. Random hosts and packs are called random; the step is the demo host's.
The extra `dev` has to be installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT),
    *(str(ROOT / name) for name in ("scripts/benchmarks", "tests", "tests/support", "tests/monitor")),
]

_SCRAPES, _TOKENS, _CONCEPTS, _PROMPT = 50, 64, 100, 5


def series_8000_concepts(folder: Path) -> dict[str, Any]:
    """Count the series of a run with a random pack of 8,000 concepts, audited, and no concept by name."""
    from prometheus_client.parser import text_string_to_metric_families

    text = _exposition_of_random(folder, 8000, [])
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {"value": len(samples), "bar": "< 200"}


def scrape_ms(folder: Path) -> dict[str, Any]:
    """Time a scrape of a run with 100 concepts by name, between audited tokens, the median, and count its bytes."""
    seconds: list[float] = []
    text = _exposition_of_random(folder, 200, [f"c{i}" for i in range(_CONCEPTS)], seconds)
    return {"value": round(1e3 * statistics.median(seconds), 3), "bytes": len(text.encode()), "bar": "< 5"}


def step_overhead_pct(folder: Path) -> dict[str, Any]:
    """Time what the metrics add to each generated token of the demo host, as a share of its forwards: the medians."""
    from prometheus_client import CollectorRegistry

    from probemon import DynamicProbeManager
    from probemon.bundled import load_bundled
    from probemon.ops.telemetry.metrics import ProcessMetrics
    from probemon.ops.telemetry.run_counts import RunCounts

    model, tokenizer = load_bundled()
    manager = DynamicProbeManager("demo")
    metrics = ProcessMetrics(registry=CollectorRegistry())
    inputs = tokenizer("Whales were hunted from ships.", return_tensors="pt")
    with manager.attach(model, tokenizer) as run:
        timed = _timed(RunCounts(metrics, run, [], {}))
        run.follow(timed)
        model.generate(**inputs, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False)
    own = [1e6 * spent for spent, forward in timed.steps if forward.n_generated]
    host = [1e6 * forward.whole for _, forward in timed.steps if forward.n_generated]
    own_us, host_us = statistics.median(own), statistics.median(host)
    return {
        "value": round(100 * own_us / host_us, 3),
        "metrics_us": round(own_us, 1),
        "step_us": round(host_us, 1),
        "n_steps": len(own),
        "bar": "< 1",
    }


def ladder_down_tokens(folder: Path) -> dict[str, Any]:
    """Count the tokens until a budget of 3 ms is at its last level, when hooks on a random model take 30 ms more."""
    down, _, hooks_ms = _ladder(folder)
    return {"value": down, "hooks_ms": hooks_ms, "bar": "<= 50"}


def ladder_up_tokens(folder: Path) -> dict[str, Any]:
    """Count the tokens until all is scored again, once the hooks are as fast as they were."""
    _, up, hooks_ms = _ladder(folder)
    return {"value": up, "hooks_ms": hooks_ms, "bar": "<= 200"}


CLAIMS: dict[str, Callable[[Path], dict[str, Any]]] = {
    one.__name__: one
    for one in (
        series_8000_concepts,
        scrape_ms,
        step_overhead_pct,
        ladder_down_tokens,
        ladder_up_tokens,
    )
}


# -- inside ------------------------------------------------------------------------------------------


def _ladder(folder: Path) -> tuple[int | None, int | None, float]:
    """Return how many tokens a budget needs down to its last level, and up again, by real time (None if it was not
    reached), and the milliseconds of hooks in a step then. Every token's coverage has to add up.
    """
    import torch

    from conftest import make_model, make_pack
    from probemon import DynamicProbeManager
    from probemon.ops.budget import Budget

    model, degradations, slow = make_model(), list[str](), True
    pack = make_pack(folder / "pack", model)
    with DynamicProbeManager(pack, audit_rate=0.1).attach(model, followers=[Budget(ms=3.0)]) as run:

        def step(placed: Any, scores: Any) -> None:
            covered = scores.coverage
            for i, unseen in enumerate(covered.unseen):
                total = covered.active[i] + covered.dropped[i] + covered.not_reached[i]
                assert total == (0 if unseen else pack.n_probes) and covered.shed[i] <= covered.not_reached[i]
            if placed.columns[0] >= _PROMPT:
                degradations.append(run.watching.degradation_name)
            if slow:
                time.sleep(0.03)

        run.follow(step)
        for slow in (True, False):
            if not slow:
                down = degradations.index("off") if "off" in degradations else None
                degradations.clear()
            for _ in range(1 if slow else 4):
                prompt = torch.arange(1, 1 + _PROMPT)[None]
                model.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
        hooks_ms = round(1e3 * statistics.median(list(run.forward_seconds)[-50:]), 2)
    return down, degradations.index("all") if "all" in degradations else None, hooks_ms


def _exposition_of_random(folder: Path, n: int, named: list[str], seconds: list[float] | None = None) -> str:
    """Return what is shown of a run over a random host by `n` random probes in a binary tree; time scrapes."""
    import torch
    from prometheus_client import CollectorRegistry

    from conftest import make_model, make_pack
    from probemon import DynamicProbeManager
    from probemon.ops.telemetry.metrics import ProcessMetrics

    model, metrics = make_model(), ProcessMetrics(concepts=named, registry=CollectorRegistry())
    concepts = [{"id": f"c{i}", "name": f"c{i}", "parents": [f"c{(i - 1) // 2}"] if i else []} for i in range(n)]
    pack = make_pack(folder / "pack", model, n=n, concepts=concepts)
    with DynamicProbeManager(pack, audit_rate=1.0).attach(model) as run:
        run.follow(metrics)
        model.generate(torch.tensor([[1, 44, 3, 17, 8]]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        for _ in range(0 if seconds is None else _SCRAPES):
            begin = time.perf_counter()
            metrics.text()
            assert seconds is not None
            seconds.append(time.perf_counter() - begin)
        return metrics.text()[0].decode()


def _timed(counts: Any) -> Any:
    """Return a follower that does what `counts` does and notes, for each forward, what that took."""
    from probemon.monitor.followers import Follower

    class Timed(Follower):
        def __init__(self) -> None:
            self.steps: list[tuple[float, Any]] = []
            self._spent = 0.0

        def scored(self, batch: Any, scores: Any) -> None:
            begin = time.perf_counter()
            counts.scored(batch, scores)
            self._spent += time.perf_counter() - begin

        def forward(self, time_: Any) -> None:
            begin = time.perf_counter()
            counts.forward(time_)
            self.steps.append((self._spent + time.perf_counter() - begin, time_))
            self._spent = 0.0

    return Timed()


def main() -> None:
    """Check the claims, and write what was found."""
    from probemon.util.files import write_text_atomically
    from provenance import about

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result file, docs/benchmarks/operations.json")
    parser.add_argument("--only", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="of these; all by default")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = CLAIMS[name](Path(folder))
        print(name, json.dumps(found[name]), flush=True)
    if arguments.json is not None:
        write_text_atomically(arguments.json, json.dumps({**about(), "claims": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
