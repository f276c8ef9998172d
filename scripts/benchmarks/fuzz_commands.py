# ruff: noqa: E402
"""Run 20,000 command lines drawn at random and see that each ends as a command is to end: never with a traceback.

    python scripts/benchmarks/fuzz_commands.py --out docs/benchmarks/fuzz_commands.json
    python scripts/benchmarks/fuzz_commands.py --only analyze,train --cases 500 --jobs 1
    python scripts/benchmarks/fuzz_commands.py --case 1234            # one case, with all that it wrote

Every command of the table, with options in pairs, files of every kind that people have and broken ones, without HOME,
on a disk that is full, with streams that are closed, under limits of memory and open files, and with SIGINT and SIGTERM
at any moment (`fuzzing.command_lines` draws, `fuzzing.command_runs` runs and judges). Case n is the same every time.
The status is 1 where a case is in trouble; the smallest command line for each kind of trouble is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests/support")]

import torch
from tqdm import tqdm

from fuzzing.command_lines import Case, draw
from fuzzing.command_runs import TABLE, Runs, judge, kind_of
from probemon.util.files import write_text_atomically
from provenance import about

CHUNK = 100
_runs: list[Runs] = []


def main() -> int:
    """Run the cases in processes, a chunk at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after that")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="commands, as analyze,pack merge")
    parser.add_argument("--case", type=int, help="run this case alone, and print what it wrote")
    arguments = parser.parse_args()
    wanted = sorted(tuple(words.split()) for words in arguments.only.split(",") if words) or sorted(TABLE)
    if unknown := [" ".join(words) for words in wanted if words not in TABLE]:
        parser.error(f"no command {', '.join(unknown)}")
    base = Path(tempfile.mkdtemp(prefix="probemon-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        if arguments.case is not None:
            return show(arguments.case, wanted, base)
        begin = time.perf_counter()
        chunks = [
            (first, min(CHUNK, arguments.first + arguments.cases - first), wanted)
            for first in range(arguments.first, arguments.first + arguments.cases, CHUNK)
        ]
        found: list[dict[str, Any]] = []
        context = multiprocessing.get_context("spawn")
        with (
            context.Pool(arguments.jobs, start, (str(base),)) as pool,
            tqdm(total=arguments.cases, unit="case", disable=None, mininterval=1) as bar,
        ):
            for part in pool.imap_unordered(run_chunk, chunks):
                found.append(part)
                for trouble in part["troubles"]:
                    tqdm.write(f"{trouble['case']}: {trouble['trouble']}\n    {trouble['line']}", file=sys.stderr)
                bar.update(part["cases"])
                if time.perf_counter() - begin > 60 * arguments.minutes:
                    break
    finally:
        shutil.rmtree(base, ignore_errors=True)
    result = summary(found, time.perf_counter() - begin)
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if arguments.out:
        write_text_atomically(arguments.out, text)
    return 1 if result["troubles"] else 0


def case_of(number: int, wanted: list[tuple[str, ...]]) -> Case:
    """Return the case of a number."""
    return draw(Random(f"command {number}"), {words: TABLE[words] for words in wanted})


def show(number: int, wanted: list[tuple[str, ...]], base: Path) -> int:
    """Run one case and print all of it."""
    case = case_of(number, wanted)
    ended = Runs(base / "one").run(case)
    trouble = judge(case, ended)
    print(
        case.line(), ended.out, ended.error, f"status {ended.status} after {ended.seconds:.2f} s: {trouble}", sep="\n"
    )
    return 1 if trouble else 0


def start(base: str) -> None:
    """Make a process's own room, with all imported."""
    torch.set_num_threads(1)
    _runs.append(Runs(Path(base) / str(os.getpid())))


def run_chunk(chunk: tuple[int, int, list[tuple[str, ...]]]) -> dict[str, Any]:
    """Run cases; of each new kind of trouble the smallest is kept."""
    first, n, wanted = chunk
    outcomes: dict[str, Counter[str]] = {}
    around: Counter[str] = Counter()
    troubles: dict[str, dict[str, Any]] = {}
    slowest = 0.0
    for number in range(first, first + n):
        case = case_of(number, wanted)
        ended = _runs[0].run(case)
        trouble = judge(case, ended)
        words = " ".join(case.command)
        outcomes.setdefault(words, Counter())["trouble" if trouble else str(ended.status)] += 1
        around.update(value for value in (case.environment, case.streams, case.limit, case.signal) if value)
        slowest = max(slowest, ended.seconds)
        if trouble and (kind := kind_of(trouble)) not in troubles:
            smallest = _runs[0].minimised(case)
            troubles[kind] = {"case": number, "trouble": trouble, "line": smallest.line()}
    return {"cases": n, "outcomes": outcomes, "around": around, "troubles": list(troubles.values()), "slowest": slowest}


def summary(found: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Count outcomes by command, and list every kind of trouble once."""
    by_command: dict[str, Counter[str]] = {}
    for part in found:
        for words, counts in part["outcomes"].items():
            by_command.setdefault(words, Counter()).update(counts)
    troubles = {kind_of(one["trouble"]): one for part in found for one in part["troubles"]}
    whole: Counter[str] = sum(by_command.values(), Counter())
    around: Counter[str] = sum((part["around"] for part in found), Counter())
    return {
        "cases": sum(whole.values()),
        "in_trouble": whole["trouble"],
        "statuses": dict(whole.most_common()),
        "commands": {words: dict(counts.most_common()) for words, counts in sorted(by_command.items())},
        "around": dict(around.most_common()),
        "troubles": sorted(troubles.values(), key=lambda one: int(one["case"])),
        "what": (
            "a case is a command line of the table with up to four options, files, variables, streams, limits and"
            " signals drawn at random; its status is 0, 1 (what was asked is not so), 2 (one line says what is wrong),"
            " 130 and 143 or -15 (SIGINT, SIGTERM), or 141 (nobody reads); in trouble: any other, a traceback, a second"
            " line of what is wrong, or no end"
        ),
        "slowest_seconds": round(max((part["slowest"] for part in found), default=0.0), 2),
        "seconds": round(seconds, 1),
        **about(),
    }


if __name__ == "__main__":
    sys.exit(main())
