"""What a process waits for before its first scores: with no compiled code kept from an earlier one, and with it.

    rows = measure(Path("probes/wordnet-smollm2-135m-mlp"))

Each is a process of its own, which makes a manager and steps once; numba keeps compiled code in a folder of the run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_CACHED = 5
_PARTS = ("import", "manager", "first_step", "second_step")
_CODE = """
import json, sys, time
begin = time.perf_counter()
import torch
from probemon import DynamicProbeManager, ProbePack
torch.set_num_threads(1)
imported = time.perf_counter()
manager = DynamicProbeManager(ProbePack.open(sys.argv[1]))
made = time.perf_counter()
states = torch.randn(2, manager.pack.weights["w1"].shape[-1], generator=torch.Generator().manual_seed(0))
taken = []
for state in states.split(1):
    started = time.perf_counter()
    manager.step(None, dict.fromkeys(manager.pack.sites, state))
    taken.append(time.perf_counter() - started)
print(json.dumps([imported - begin, made - imported, *taken]))
"""


def measure(pack: Path) -> list[dict[str, Any]]:
    """A row for nothing compiled before, and one for what that process left, medians of several."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        runs = [_run(pack, scratch) for _ in range(1 + _CACHED)]
    return [
        {
            "part": "first use",
            "pack": pack.name,
            "method": method,
            **{
                f"{name}_s": round(statistics.median(times), 3)
                for name, times in zip(_PARTS, zip(*some, strict=True), strict=True)
            },
        }
        for method, some in (("nothing compiled before", runs[:1]), ("compiled code kept", runs[1:]))
    ]


def _run(pack: Path, cache: str) -> list[float]:
    told = subprocess.run(
        [sys.executable, "-c", _CODE, str(pack)],
        env={**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(told.stdout.splitlines()[-1])
    return found
