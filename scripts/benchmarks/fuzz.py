# ruff: noqa: E402
"""Break 100,000 inputs and see that each ends in a typed error or a correct pack, and in nothing else.

    python scripts/benchmarks/fuzz.py --out docs/benchmarks/fuzz.json
    python scripts/benchmarks/fuzz.py --only hatcat,pack --cases 2000 --troubles found/

Every room that reads what others made is given valid input, broken with its structure in mind (`fuzzing`), guided by
coverage: an input that takes a branch of the package that none took before is kept and broken further. In the rooms
"opened" and "used" valid packs are replaced, cut or overwritten while they are opened or used. A case is in trouble
where the error is not probemon's, the pack made does not verify or scores otherwise than an independent evaluation of
the same files, anything beyond the case's folders is opened, changed or run, anything is left behind, memory beyond the
bound is asked for, or the process dies. Cases of one seed are the same every time. The status is 1 where a case is in
trouble; `--troubles` keeps its files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests/support")]  # the writers of other projects' files

import torch
from tqdm import tqdm

from fuzzing.case import Room
from fuzzing.coverage import Edges
from fuzzing.mutate import write_tree
from fuzzing.targets import TARGETS
from probemon.util.files import write_text_atomically
from provenance import about

# Shares of the cases: more of what is quick, and of what all the others stand on.
SHARES = {
    "manifest": 14, "concepts": 6, "tensors": 16, "pack": 16, "commands": 4, "edit": 6, "hierarchy": 5, "torch": 14,
    "hatcat": 5, "probelab": 3, "probekit": 3, "steerkit": 3, "saelens": 3, "hallucination": 3,
    "safetensors": 3, "lie-detectors": 3, "repeng": 3, "opened": 4, "used": 2,
}  # fmt: skip
CHUNK = 1000
KEPT_BYTES = 1 << 16
MEMORY_BYTES = (
    1 << 30
)  # what a process may map beyond what it has once all is imported; the inputs have a few thousand bytes
RESIDENT_BYTES = 256 << 20  # and how much of it may become resident
_room: list[Room] = []
_begin_bytes: list[int] = []


def main() -> int:
    """Run the cases in processes, a chunk of one target at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=int, default=110_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default=",".join(TARGETS), help="targets, by name")
    parser.add_argument("--troubles", type=Path, help="a folder for the files of cases in trouble")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name]
    unknown = sorted(set(wanted) - set(TARGETS))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(TARGETS)}")
    chunks = plan(wanted, arguments.cases, arguments.seed)
    begin = time.perf_counter()
    found: list[dict[str, Any]] = []
    died: list[dict[str, Any]] = []
    base = Path(tempfile.mkdtemp(prefix="probemon-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        with ProcessPoolExecutor(
            arguments.jobs, mp_context=multiprocessing.get_context("spawn"), initializer=start, initargs=(str(base),)
        ) as pool:
            waiting = {pool.submit(run_chunk, *chunk): chunk for chunk in chunks}
            with tqdm(total=sum(chunk[2] for chunk in chunks), unit="case", disable=None, mininterval=1) as bar:
                for done in as_completed(waiting):
                    target, number, n = waiting[done][:3]
                    try:
                        found.append(done.result())
                        for trouble in found[-1]["troubles"][:3]:
                            tqdm.write(f"{target} {number} {trouble['case']}: {trouble['trouble']}", file=sys.stderr)
                    except BrokenProcessPool:
                        died.append(
                            {
                                "target": target,
                                "chunk": number,
                                "case": None,
                                "trouble": "the process died in one of the chunks under way",
                            }
                        )
                    bar.update(n)
        result = summary(found, died, arguments.seed, time.perf_counter() - begin)
        if arguments.troubles is not None:
            for trouble in result["troubles"]:
                keep(
                    arguments.troubles,
                    trouble,
                    (
                        next(
                            one["files"]
                            for part in found
                            for one in part["troubles"]
                            if one["trouble"] == trouble["trouble"]
                        )
                        if trouble["case"] is not None
                        else {}
                    ),
                )
    finally:
        shutil.rmtree(base, ignore_errors=True)
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if arguments.out:
        write_text_atomically(arguments.out, text)
    return 1 if result["troubles"] else 0


def plan(wanted: list[str], cases: int, seed: int) -> list[tuple[str, int, int, int]]:
    """Chunks `(target, number, cases, seed)`; the slow targets begin, so that none is left to the end alone."""
    whole = sum(SHARES[name] for name in wanted)
    chunks = []
    for name in sorted(wanted, key=lambda one: SHARES[one]):
        left = -(-cases * SHARES[name] // whole)
        for number in range(-(-left // CHUNK)):
            chunks.append((name, number, min(CHUNK, left - number * CHUNK), seed))
    return chunks


def start(base: str) -> None:
    """A process's own room, with all imported and memory bounded."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _room.append(Room(Path(base) / str(os.getpid())))
    for name in TARGETS:
        _room[0].seeds(name)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, resource.RLIM_INFINITY))
    _begin_bytes.append(_resident())


def run_chunk(target: str, number: int, n: int, seed: int) -> dict[str, Any]:
    """Cases of one target from its valid inputs on; every one that takes a new branch is broken further."""
    room = _room[0]
    rng = Random(f"{seed}/{target}/{number}")
    edges = Edges(attacked())
    corpus = list(room.seeds(target))
    n_seeds = len(corpus)
    for tree in corpus:
        room.run(target, tree, Random(0), tracer=edges.trace)
    edges.fresh()
    outcomes: Counter[str] = Counter()
    troubles: list[dict[str, Any]] = []
    slowest = 0.0
    resident = _resident()
    for i in range(n):
        # Half of the time from valid input, since little lies beyond the first check that fails; else from what was
        # kept, the newest before others.
        kept = len(corpus) - n_seeds
        tree = (
            corpus[-1 - min(kept - 1, int(rng.expovariate(0.1)))]
            if kept and rng.random() < 0.5
            else corpus[rng.randrange(n_seeds)]
        )
        broken = room.mutate(target, tree, rng)
        verdict = room.run(target, broken, Random(f"{seed}/{target}/{number}/{i}"), tracer=edges.trace)
        outcomes[verdict.outcome] += 1
        slowest = max(slowest, verdict.seconds)
        trouble, now = verdict.trouble, _resident()
        if trouble is None and now - resident > RESIDENT_BYTES:
            trouble = f"{now - resident} bytes more became resident"
        resident = now
        if trouble is not None:
            files = {
                name: content.hex() if isinstance(content, bytes) else {"link": content.target}
                for name, content in broken.items()
            }
            troubles.append({"target": target, "chunk": number, "case": i, "trouble": trouble, "files": files})
        # What grew is not kept: it would grow further, and a large input takes the time of many.
        if (
            edges.fresh()
            and len(corpus) < n_seeds + 400
            and sum(len(content) for content in broken.values() if isinstance(content, bytes)) < KEPT_BYTES
        ):
            corpus.append(broken)
    return {
        "target": target,
        "outcomes": outcomes,
        "troubles": troubles,
        "slowest": slowest,
        "kept": len(corpus) - n_seeds,
        "edges": edges.seen,
        "peak_bytes": _resident() - _begin_bytes[0],
    }


def attacked() -> list[Any]:
    """Modules whose branches guide: those that read, check and write packs and others' files."""
    names = (
        "packs.manifest",
        "util.strict_json",
        "packs.held_file",
        "packs.held_tensors",
        "packs.files",
        "packs.opened",
        "packs.pack",
        "packs.spec",
        "packs.tensors",
        "packs.writer",
        "core.hierarchy",
        "core.scores",
        "core.concept_names",
        "packs.edit",
        "packs.copies",
        "packs.widen",
        "packs.hierarchies",
        "packs.bounding_probes",
        "cli.packs",
        "packs.hub",
        "packs.quantize",
    )
    known = [sys.modules.get(f"probemon.{name}") for name in names]
    return [module for module in known if module is not None] + [
        module for name, module in sorted(sys.modules.items()) if name.startswith("probemon.lab.importers.")
    ]


def summary(found: list[dict[str, Any]], died: list[dict[str, Any]], seed: int, seconds: float) -> dict[str, Any]:
    """By target: cases, outcomes, branches taken, inputs kept; and every kind of trouble once."""
    targets: dict[str, Any] = {}
    for name in TARGETS:
        parts = [part for part in found if part["target"] == name]
        if parts:
            outcomes = sum((part["outcomes"] for part in parts), Counter())
            targets[name] = {
                "cases": sum(outcomes.values()),
                "outcomes": dict(outcomes.most_common()),
                "branches": len(set().union(*(part["edges"] for part in parts))),
                "inputs_kept_for_new_branches": sum(part["kept"] for part in parts),
                "slowest_seconds": round(max(part["slowest"] for part in parts), 3),
            }
    whole: Counter[str] = sum((part["outcomes"] for part in found), Counter())
    troubles = {
        one["trouble"]: {key: one[key] for key in ("target", "chunk", "case", "trouble")}
        for part in found
        for one in part["troubles"]
    }
    return {
        "cases": sum(whole.values()),
        "crashes": sum(len(part["troubles"]) for part in found) + len(died),
        "outcomes": dict(whole.most_common()),
        "targets": targets,
        "troubles": [*troubles.values(), *died],
        "what": (
            "a case is a valid input with one to six things broken (opened, used: a valid pack whose files are changed"
            " meanwhile); made: a pack that verified and scored as an independent evaluation of the same files; not"
            " compared: torch's own restricted loader refuses a file of it; all else are probemon's typed errors"
        ),
        "memory": {
            "mapped_beyond_start_at_most": MEMORY_BYTES,
            "resident_beyond_start": max((part["peak_bytes"] for part in found), default=0),
            "of_one_case_at_most": RESIDENT_BYTES,
        },
        "seed": seed,
        "seconds": round(seconds, 1),
        **about(),
    }


def keep(folder: Path, trouble: dict[str, Any], files: dict[str, Any]) -> None:
    """The files of a case in trouble, and what was wrong."""
    place = folder / f"{trouble['target']}-{trouble['chunk']}-{trouble['case']}"
    write_tree({name: bytes.fromhex(content) for name, content in files.items() if isinstance(content, str)}, place)
    (place / "TROUBLE.txt").write_text(
        f"{trouble['trouble']}\nlinks:"
        f" { {name: content for name, content in files.items() if not isinstance(content, str)} }\n",
        errors="replace",
    )


def _resident() -> int:
    """The most bytes this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
