"""Count the alerts that routing telemetry raises over healthy streams, where each is a false alarm.

    python scripts/benchmarks/routing_alarms.py --out docs/benchmarks/routing_alarms.json

Streams are synthetic and random, and healthy by construction, of kinds that differ in how peaked, uneven, slow and
noisy they are. A step is one token of each of four rows; every kind has 100,000 of them. The latencies are drawn too:
tails and pauses that any machine has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from probemon.adapters.routing.alerts import Tally
from probemon.adapters.routing.decisions import BEM, MOE, XLORA, Decisions, History, Stream, largest
from probemon.core.intervals import upper_bound
from probemon.util.files import write_text_atomically
from provenance import about

ROWS, BATCH, CHUNK, RANK = 4, 250, 32, 8  # BATCH: steps made at a time; how a stream is cut changes nothing
DecisionStream = Iterator[Decisions]


def choices(raw: np.ndarray, k: int) -> Decisions:
    """What a router of E experts that chooses k makes of logits `[n, E]`."""
    logits = raw.astype(np.float64)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = (powers / powers.sum(axis=-1, keepdims=True))[None]
    top = largest(weights, k)
    return Decisions.of(
        raw[None].astype(np.float32), weights, top, np.take_along_axis(weights, top, axis=-1).astype(np.float32)
    )


def peaked(rng: np.random.Generator, e: int, k: int, shares: np.ndarray, peak: float, stays: float) -> DecisionStream:
    """Each row is at one expert, drawn by `shares`, and stays there with probability `stays` at each step; that one's
    logit stands out by `peak`.
    """
    at = rng.choice(e, size=ROWS, p=shares)
    while True:
        first = np.empty((ROWS, BATCH), dtype=np.int64)
        moves, drawn = rng.random((ROWS, BATCH)) >= stays, rng.choice(e, size=(ROWS, BATCH), p=shares)
        for t in range(BATCH):
            at = np.where(moves[:, t], drawn[:, t], at)
            first[:, t] = at
        logits = rng.normal(0, 1, (ROWS * BATCH, e))
        logits[np.arange(len(logits)), first.ravel()] += peak
        yield choices(logits, k)


def topics(rng: np.random.Generator, e: int, k: int) -> DecisionStream:
    """Experts by topic, of which there are many: for some hundred steps each, another part of them is preferred, as
    text changes its subject.
    """
    left, liking = 0, np.zeros(e)
    while True:
        lines = []
        for _ in range(BATCH):
            if left == 0:
                left, liking = int(rng.integers(5, 60)), rng.normal(0, 0.7, e)
            left -= 1
            lines.append(liking + rng.normal(0, 1.5, (ROWS, e)))
        yield choices(np.concatenate(lines), k)


def codes(rng: np.random.Generator, level: str, r: int) -> DecisionStream:
    """Codes about a mean, correlated: a walk from chunk to chunk as the EMA makes it, or one a token."""
    mix, mean = rng.normal(0, 0.5, (r, r)), rng.normal(0, 0.5, r)
    held = np.zeros((ROWS, r))
    t = 0
    while True:
        raw, boundary = np.empty((ROWS, BATCH, r), dtype=np.float32), np.zeros((ROWS, BATCH), dtype=bool)
        chunk = np.empty((ROWS, BATCH), dtype=np.int64)
        for i in range(BATCH):
            if t % CHUNK == 0 or level == "token":
                held = (0.5 if level == "chunk" else 0.0) * held + rng.normal(0, 1, (ROWS, r)) @ mix
            raw[:, i], chunk[:, i] = mean + held, t // CHUNK
            boundary[:, i] = t % CHUNK == 0 or level == "token"
            t += 1
        flat = raw.reshape(1, -1, r)
        top = largest(np.abs(flat), 1)
        yield Decisions.of(
            flat,
            None,
            top,
            np.take_along_axis(flat, top, axis=-1),
            decided=boundary.reshape(1, -1),
            chunk=chunk.ravel(),
        )


def uneven(e: int, power: float) -> np.ndarray:
    """Shares that fall with the rank of an expert."""
    shares = 1 / np.arange(1, e + 1) ** power
    return shares / shares.sum()


# What each kind is, how it is made, of how many experts, how many are chosen.
KINDS: dict[str, tuple[str, str, Callable[[np.random.Generator], DecisionStream], int, int]] = {
    "8 experts, 2 chosen, by token": (MOE, "", lambda rng: peaked(rng, 8, 2, uneven(8, 0), 5, 0), 8, 2),
    "8 experts, 2 chosen, for 30 tokens each": (MOE, "", lambda rng: peaked(rng, 8, 2, uneven(8, 0), 5, 29 / 30), 8, 2),
    "8 experts, 1 chosen, uneven loads": (MOE, "", lambda rng: peaked(rng, 8, 1, uneven(8, 1), 8, 0.5), 8, 1),
    "16 experts, 2 chosen, soft": (MOE, "", lambda rng: peaked(rng, 16, 2, uneven(16, 0.5), 1, 0.5), 16, 2),
    "64 experts, 8 chosen, by topic": (MOE, "", lambda rng: topics(rng, 64, 8), 64, 8),
    "4 adapters, uneven": (XLORA, "", lambda rng: peaked(rng, 4, 1, uneven(4, 1), 3, 0.9), 4, 1),
    "codes by chunk": (BEM, "chunk", lambda rng: codes(rng, "chunk", RANK), RANK, 1),
    "codes by token": (BEM, "token", lambda rng: codes(rng, "token", RANK), RANK, 1),
}


def run(kind: str, n_steps: int, seed: int) -> dict[str, Any]:
    """The alerts over `n_steps` of one kind."""
    source, level, make, e, k = KINDS[kind]
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    tally = Tally(
        [Stream(source, "synthetic", 0, level)],
        e,
        k,
        codes=source == BEM,
        memory=lambda: (int(4e9 + 2e9 * rng.random()), int(8e9)),
    )
    history, alerts, done = History(ROWS, 1), Counter[str](), 0
    batches = make(rng)
    while done < n_steps:
        decisions = next(batches)
        n = min(BATCH, n_steps - done)
        if n < BATCH:
            decisions = decisions.take(np.arange(ROWS * BATCH).reshape(ROWS, BATCH)[:, :n].ravel())
        changes = history.compare(np.repeat(np.arange(ROWS), n), decisions)
        # Some microseconds each, a few times as many in a tail, and one batch in two hundred a hundred times as many.
        latency_us = float(rng.lognormal(1.5, 0.8) * (100 if rng.random() < 0.005 else 1))
        alerts.update(alert.kind for alert in tally.add(decisions, changes, latency_us) if alert.raised)
        done += n
    return {
        "kind": kind,
        "steps": n_steps,
        "tokens": tally.total().n_tokens,
        "windows": tally.total().n_tokens // 512,
        "false_alarms": sum(alerts.values()),
        "by_kind": dict(alerts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin, found = time.perf_counter(), []
    for kind in KINDS:
        found.append(run(kind, options.steps, options.seed))
        print(
            f"{kind}: {found[-1]['false_alarms']} false alarms in {options.steps} steps {found[-1]['by_kind'] or ''}",
            file=sys.stderr,
        )
    n_windows, n_alarms = sum(one["windows"] for one in found), sum(one["false_alarms"] for one in found)
    result = {
        "what": "alerts of the default rules over healthy synthetic streams",
        "rows": ROWS,
        "seed": options.seed,
        "streams": found,
        "steps": sum(one["steps"] for one in found),
        "windows": n_windows,
        "false_alarms": n_alarms,
        "false_alarms_per_window_at_most": float(
            upper_bound(min(n_alarms, n_windows), n_windows)
        ),  # 95 %, of windows of 512 tokens
        "seconds": round(time.perf_counter() - begin, 1),
        **about(),
    }
    write_text_atomically(options.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
