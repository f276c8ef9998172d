#!/usr/bin/env python3
# ruff: noqa: E402
"""A pack that is larger than the memory its process may use: steps of the demo model, watched in every way there is.

    sudo python scripts/benchmarks/paging.py --json docs/benchmarks/paging.json      # needs root and a memory cgroup

The pack is random, 12,000 probes of 128-64-1 in bf16. Each way runs in a process of its own within one limit that the
kernel enforces, page cache included, and the page cache is dropped before it begins. The model writes the same answer
each time, greedily; what a token takes is told as median and 95th percentile of all but the first ones, with the bytes
that the process read from the disk and the probes that were late. `first implementation`: one file a probe, read when
it is wanted; its weights are the same, in bf16 files.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from cascade_profile.world import LOAD_THRESHOLD, PASSAGE, SITE, make_world, write_files, write_pack
from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.host.tap import Tap
from probemon.util.files import write_text_atomically
from profile_cascade import Setting, SlowTwin
from provenance import about

N_PROBES, LIMIT_MB = 12_000, 1100
N_PROMPT, N_NEW, N_WARM = 32, 160, 8
TOP = Setting("top_100", (0,), 100)
BARE, FIRST = "bare host", "first implementation"
PAGED = {"arena_bytes": 128 << 20, "cache_bytes": 64 << 20}
WAYS: dict[str, dict[str, Any]] = {
    BARE: {},
    "mapped": {},
    "paged": PAGED,
    "paged, children fetched ahead": {**PAGED, "prefetch": 0.05},
    "paged, nobody waits": {**PAGED, "late": True},
    FIRST: {},
}


def main() -> int:
    """Write the packs, run each way in turn, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--probes", type=int, default=N_PROBES)
    parser.add_argument("--limit-mb", type=int, default=LIMIT_MB)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.way:
        way, folder = arguments.way
        print(json.dumps(run(way, Path(folder))))
        return 0
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="paging-") as scratch, limited(arguments.limit_mb) as group:
        pack_bytes = write_all(Path(scratch), arguments.probes)
        ways = list(WAYS)
        for at in tqdm(range(arguments.rounds), disable=None):
            for way in (*ways[at % len(ways) :], *ways[: at % len(ways)]):
                taken[way].append(in_group(group, way, Path(scratch)))
    if len({tuple(run["answer"]) for runs in taken.values() for run in runs}) > 1:
        raise SystemExit("paging: the answers differ, so other probes were asked for")
    rows = [row_of(way, runs) for way, runs in taken.items()]
    found = {
        "n_probes": arguments.probes,
        "pack_mb": round(pack_bytes / 2**20),
        "limit_mb": arguments.limit_mb,
        "rounds": arguments.rounds,
        "rows": rows,
        **about(),
    }
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        write_text_atomically(arguments.json, json.dumps(found, indent=1) + "\n")
    return 0


# -- what is written, and the limit ------------------------------------------------------------------


def write_all(folder: Path, n_probes: int) -> int:
    """Write the pack and the first implementation's files; return the bytes of the pack's weights."""
    world = make_world(n_probes=n_probes, n_tokens=200, hidden_size=576, seed=0)
    half = {name: w.to(torch.bfloat16) if name.startswith("w") else w for name, w in world.weights.items()}
    world = dataclasses.replace(world, weights=half)
    write_files(world, folder / "files")
    np.savez(folder / "hierarchy.npz", parent=world.parent, level=world.level)
    return write_pack(world, folder / "pack", norm="layernorm").weight_bytes()


@contextlib.contextmanager
def limited(megabytes: int) -> Iterator[Path]:
    """A cgroup that may use so much memory. Raises `SystemExit` where none can be made."""
    root, of_v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    group = (of_v1 if of_v1.is_dir() else root) / f"paging-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if of_v1.is_dir() else "memory.max")).write_text(str(megabytes << 20))
    except OSError as error:
        raise SystemExit(f"paging: no memory cgroup can be made here ({error}): run as root") from error
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def in_group(group: Path, way: str, folder: Path) -> dict[str, Any]:
    """Run one way in a process that joins the group, with nothing in the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
    joined = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    told = subprocess.run(
        ["sh", "-c", joined, "sh", sys.executable, __file__, "--way", way, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode == -signal.SIGKILL:
        raise SystemExit(f"paging: {way} was killed: the limit is too low for it")
    if told.returncode:
        raise SystemExit(f"paging: {way} failed: {told.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


# -- one way -------------------------------------------------------------------------------------------


def run(way: str, folder: Path) -> dict[str, Any]:
    """Let the model answer; what each token took and read."""
    model, tokenizer = load_bundled(torch.bfloat16)
    ids = tokenizer(PASSAGE, return_tensors="pt").input_ids[:, :N_PROMPT]
    with contextlib.ExitStack() as stack:
        told = attach(way, folder, model, stack)
        clock = Clock()
        out = model.generate(ids, max_new_tokens=N_NEW, min_new_tokens=N_NEW, do_sample=False, streamer=clock)
        return {
            "seconds": np.diff(clock.seconds)[N_WARM:].tolist(),
            "read": np.diff(clock.read)[N_WARM:].tolist(),
            "answer": out[0].tolist(),
            **told(out),
        }


class Clock(BaseStreamer):
    """When each token came, and what had been read from the disk by then."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.read: list[int] = []

    def put(self, value: Tensor) -> None:
        self.seconds.append(time.perf_counter())
        self.read.append(bytes_read())

    def end(self) -> None:
        pass


def attach(way: str, folder: Path, model: Any, stack: contextlib.ExitStack) -> Callable[[Any], dict[str, float]]:
    """Watch a model one way; return what tells of an output how many probes a token were evaluated, and late."""
    if way == BARE:
        return lambda out: {"evaluated": 0.0, "late": 0.0}
    if way == FIRST:
        twin, counts = slow_twin(folder), list[int]()

        def step(_: str, hidden: Tensor) -> None:
            for state in torch.nn.functional.layer_norm(hidden[0].float(), hidden.shape[-1:]).split(1):
                counts.append(len(twin.step(state).scores))

        stack.enter_context(Tap(model, [SITE], step))
        return lambda out: {"evaluated": statistics.mean(counts[1 - N_NEW :]), "late": 0.0}
    manager = DynamicProbeManager(
        ProbePack.open(folder / "pack"),
        load_threshold=LOAD_THRESHOLD,
        max_rounds=1,
        keep_top_k=TOP.keep_top_k,
        max_loaded_probes=1000,
        strategy="descent",
        **WAYS[way],
    )
    watched = stack.enter_context(manager.attach(model))

    def told(out: Any) -> dict[str, float]:
        coverage = watched.result(out).scores.coverage
        return {
            name: float(getattr(coverage, name)[N_PROMPT : N_PROMPT + N_NEW - 1].mean())
            for name in ("evaluated", "late")
        }

    return told


def slow_twin(folder: Path) -> SlowTwin:
    """The first implementation over the files."""
    hierarchy = np.load(folder / "hierarchy.npz")
    files = sorted((folder / "files").iterdir())
    children: list[list[int]] = [[] for _ in files]
    for child, parent in enumerate(hierarchy["parent"].tolist()):
        if parent >= 0:
            children[parent].append(child)
    return SlowTwin(files, children, hierarchy["level"], TOP)


def bytes_read() -> int:
    """Bytes that this process had read from a disk."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def row_of(way: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and 95th percentiles over the tokens of all rounds."""
    seconds, read = ([value for run in runs for value in run[name]] for name in ("seconds", "read"))
    return {
        "way": way,
        "step_ms": round(1e3 * statistics.median(seconds), 2),
        "step_p95_ms": round(1e3 * float(np.percentile(seconds, 95)), 2),
        "read_mb_per_step": round(statistics.mean(read) / 2**20, 3),
        **{f"{name}_per_token": round(statistics.mean(run[name] for run in runs), 2) for name in ("evaluated", "late")},
        "n": len(seconds),
    }


if __name__ == "__main__":
    raise SystemExit(main())
