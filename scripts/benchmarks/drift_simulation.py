"""Simulate requests without drift, and with a doubled base rate, and count the alarms of drift at the shipped settings.

    python scripts/benchmarks/drift_simulation.py --out docs/benchmarks/drift.json

Random data, drawn anew. A day is 1,000 requests. Without drift: 1,000 days of a pack's whole number of concepts, whose
true rates are spread from one in 10,000 to one in two; the reference is drawn from the same rates, so it is off by as
much as a sample is. With drift: every rate doubles at some request, after a day without, and each concept is a trial of
its own at the level that it has among all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from probemon.core.request_counts import N_NORM_BINS, N_SCORE_BINS, RequestCounts
from probemon.ops.drift.drift_tests import BLOCK, FALSE_ALARMS, IN_REQUESTS, WINDOWS, DriftTests
from probemon.util.files import write_text_atomically
from provenance import about

DAY, DAYS = 1000, 1000
CONCEPTS, SCORED, SITES = 479, 16, 1  # of the pack that comes with probemon: all, those of its base level, its sites
RATES, REFERENCES = (0.02, 0.05, 0.1, 0.2), (1000, 10_000)
CLAIMED = (0.1, 10_000)  # the base rate, and the requests of the reference, of the figure that is claimed


def without_drift(days: int = DAYS, n_reference: int = 1000, seed: int = 0) -> Counter[str]:
    """Return the alarms that so many days raise, by kind: all are false."""
    rng = np.random.default_rng(seed)
    fired = np.exp(rng.uniform(np.log(1e-4), np.log(0.5), CONCEPTS))
    ends = rng.uniform(0, 1, (3, SCORED))
    highest = rng.dirichlet(np.ones(N_SCORE_BINS), SCORED)
    norms = np.zeros((SITES, N_NORM_BINS))
    norms[:, 200:220] = rng.dirichlet(np.ones(20), SITES)

    def drawn(n: int) -> RequestCounts:
        low, high, flat = rng.binomial(n, ends)
        return RequestCounts(
            n, rng.binomial(n, fired), low, high, flat, rng.multinomial(n, highest), rng.multinomial(n, norms)
        )

    tests, raised = DriftTests(drawn(n_reference)), Counter[str]()
    for _ in range(days * DAY // BLOCK):
        raised.update(difference.kind for difference in tests.add(drawn(BLOCK)))
    return raised


def until_found(rate: float, n_reference: int, most: int = 5000, seed: int = 0) -> np.ndarray:
    """Return after how many requests each of some trials finds that a rate has doubled, `most` where none did by then.

    The rate doubles at a look, or 25, 50 or 75 requests after one.
    """
    rng, found = np.random.default_rng(seed), []
    for after in range(0, BLOCK, BLOCK // 4):

        def drawn(n: int) -> RequestCounts:
            counts = RequestCounts.none(CONCEPTS, 0, 0)
            return RequestCounts(n, rng.binomial(n, rate, CONCEPTS), *vars_of(counts))

        tests, at = DriftTests(drawn(n_reference)), np.full(CONCEPTS, most)
        for _ in range(DAY // BLOCK):
            tests.add(drawn(BLOCK))
        for block in range(1, most // BLOCK + 1):
            n_before = after if block == 1 else 0
            counts = drawn(BLOCK)
            counts.fired[:] = rng.binomial(n_before, rate, CONCEPTS) + rng.binomial(
                BLOCK - n_before, 2 * rate, CONCEPTS
            )
            for difference in tests.add(counts):
                at[difference.place] = min(at[difference.place], block * BLOCK - after)
        found.append(at)
    return np.concatenate(found)


def vars_of(counts: RequestCounts) -> tuple[Any, ...]:
    """Return what is counted beside fires."""
    return counts.low, counts.high, counts.flat, counts.highest, counts.norms


def figures() -> dict[str, Any]:
    """Return what is claimed, `drift_false_alarms_per_1000_days` and `drift_detect_requests`, and what it rests on."""
    false_alarms = {str(n): dict(without_drift(n_reference=n, seed=n)) for n in REFERENCES}
    rows = []
    for n_reference in REFERENCES:
        for rate in RATES:
            n = until_found(rate, n_reference)
            rows.append(
                {
                    "rate": rate,
                    "n_reference": n_reference,
                    "n_trials": len(n),
                    "found_within_1000": float(np.mean(n <= DAY)),
                    "median": float(np.median(n)),
                    "p95": float(np.quantile(n, 0.95)),
                }
            )
    [claimed] = [row for row in rows if (row["rate"], row["n_reference"]) == CLAIMED]
    return {
        "drift_false_alarms_per_1000_days": max(sum(kinds.values()) for kinds in false_alarms.values()),
        "drift_detect_requests": claimed["p95"],
        "false_alarms_by_reference": false_alarms,
        "expected_at_most": FALSE_ALARMS * DAY * DAYS / IN_REQUESTS,
        "doubled": rows,
        "n_concepts": CONCEPTS,
        "n_scored": SCORED,
        "windows": list(WINDOWS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begin = time.perf_counter()
    result = {"data": "random", **figures()}
    result |= {"seconds": round(time.perf_counter() - begin, 1), **about()}
    write_text_atomically(options.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
