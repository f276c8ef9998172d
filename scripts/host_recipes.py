#!/usr/bin/env python3
"""Every optimisation of two guides, done by the library that does it, on small hosts, while the monitor watches.

    python scripts/host_recipes.py                            # writes docs/benchmarks/host_recipes.json; minutes
    python scripts/host_recipes.py --only int8 --json FILE    # the rows whose names have these words

A row is exact, within its bound, refused by an error that it names, or failed; one that failed makes the exit status 1.
The hosts are tiny and random but for the trained one that probemon ships. No speed is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]

from transformers.utils import logging  # noqa: E402

from probemon.util.files import write_text_atomically  # noqa: E402
from provenance import about  # noqa: E402
from recipe_rows import RECIPES  # noqa: E402
from recipe_rows.rows import Recipe, run  # noqa: E402

FILE = ROOT / "docs" / "benchmarks" / "host_recipes.json"
LEAST = 30


def rows_of(recipes: list[Recipe], *, apart: bool) -> list[dict[str, Any]]:
    """Run recipes on their hosts, those that need a process of their own in one."""
    rows: list[dict[str, Any]] = []
    for one in recipes:
        if one.apart and not apart:
            rows += _in_a_process(one)
            continue
        for host in one.hosts:
            row = asdict(run(one, host))
            rows.append(row)
            print(f"{row['verdict']:12} {row['name']}, {host}: {row['value']}", file=sys.stderr, flush=True)
    return rows


def _in_a_process(one: Recipe) -> list[dict[str, Any]]:
    """Where torchao can be imported every import of transformers does so, hence not in this process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        path = os.pathsep.join([str(Path(sys.prefix) / "torchao"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, __file__, "--apart", one.name, "--json", str(file)],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if not file.is_file():
            raise SystemExit(f"{one.name}: {done.stderr[-2000:]}")
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        print(f"{row['verdict']:12} {row['name']}, {row['host']}: {row['value']}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Run, count, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=FILE, help="where the rows go")
    parser.add_argument("--only", action="append", default=[], help="words of the names of rows to run")
    parser.add_argument("--apart", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    chosen = [one for one in RECIPES if not arguments.only or any(words in one.name for words in arguments.only)]
    if arguments.apart:
        chosen = [one for one in RECIPES if one.name == arguments.apart]
    if not chosen:
        parser.error(f"no row's name has {arguments.only}; names are {', '.join(one.name for one in RECIPES)}")
    rows = rows_of(chosen, apart=bool(arguments.apart))
    count = Counter(row["verdict"] for row in rows)
    held = count["exact"] + count["within bound"]
    whole = not arguments.only and not arguments.apart
    passed = count["failed"] == 0 and (held >= LEAST or not whole)
    found = {
        "what": "optimisations of two guides on tiny random hosts, watched; a value is a distance from the plain run",
        "rows": rows, "counts": dict(count), "bars": {"failed": 0, "exact or within bound": LEAST}, "passed": passed,
        "seconds": round(time.perf_counter() - begin, 1), **about(),
    }  # fmt: skip
    write_text_atomically(arguments.json, json.dumps(found, indent=1) + "\n")
    print(json.dumps({"counts": found["counts"], "passed": passed, "seconds": found["seconds"]}))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
