"""How long a HatCat pack of thousands of files takes to import, and how much memory.

    python scripts/benchmarks/import_speed.py --out docs/benchmarks/import.json

Random probes, called random, in that format: a file each, in the layers of a tree of that project's size, bf16, most of
them perceptrons of 128 and 64 units, some behind a LayerNorm, some linear. They read 2,560 values, as the smaller hosts
of that project have; source and pack together take 11 GB of disk, and less with --hidden-size. The source is written by
another process; its files may still be in the page cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from probemon.lab.importers.hatcat import import_pack
from probemon.util.files import write_text_atomically
from provenance import about

LEVELS = (5, 23, 241, 1283, 2603, 2687, 1158)  # 8,000
WIDTHS = (128, 64)
BAR_SECONDS, BAR_BYTES = 120, 512 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--hidden-size", type=int, default=2560)
    parser.add_argument("--share", type=float, default=1.0, help="of the 8,000 probes")
    arguments = parser.parse_args()
    levels = [max(1, int(n * arguments.share)) for n in LEVELS]
    folder = Path(tempfile.mkdtemp(prefix="import-speed-"))
    try:
        writing = multiprocessing.get_context("spawn").Process(
            target=write_source, args=(folder / "source", levels, arguments.hidden_size)
        )
        writing.start()
        writing.join()
        if writing.exitcode:
            raise SystemExit("the source could not be written")
        found = measure(folder, arguments.hidden_size)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found, indent=1))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def measure(folder: Path, hidden_size: int) -> dict[str, Any]:
    bar = tqdm(unit="probe", disable=None)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begin = time.perf_counter()
    pack, report = import_pack(
        folder / "source", folder / "pack", site="resid_post.15", normalize="layernorm", progress=progress
    )
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    bar.close()
    what = "seconds to import, and bytes of resident memory at the peak over what the process began with"
    return {
        "probes": "random, bf16, in the layered format with hierarchy.json",
        "counts": dict(report.counts),
        "levels": len(pack.manifest["counts_per_level"]),
        "hidden_size": hidden_size,
        "seconds": round(seconds, 1),
        "probes_per_second": round(pack.n_probes / seconds),
        "peak_bytes_over_start": peak,
        "start_bytes": before,
        "source_bytes": size(folder / "source"),
        "pack_bytes": size(folder / "pack"),
        "max_score_error": pack.manifest["quality"]["import"]["max_score_error"],
        "claim": {
            "what": what,
            "bar_seconds": BAR_SECONDS,
            "bar_bytes": BAR_BYTES,
            "holds": seconds <= BAR_SECONDS and peak <= BAR_BYTES,
        },
        **about(),
    }


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_source(folder: Path, levels: list[int], d: int) -> None:
    """Every 10th probe begins with a LayerNorm, every 20th is linear; each concept below level 0 has a parent on the
    level above.
    """
    torch.set_num_threads(1)  # each tensor is small
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)

    tree: dict[str, list[str]] = {}
    n = 0
    for level, count in enumerate(levels):
        (folder / f"layer{level}").mkdir(parents=True)
        for i in range(count):
            n += 1
            first = 1 if n % 10 == 0 else 0
            sizes = [(WIDTHS[0], d), (WIDTHS[1], WIDTHS[0]), (1, WIDTHS[1])]
            state = {"net.0.weight": random(d).abs(), "net.0.bias": random(d)} if first else {}
            for at, shape in zip((first, first + 3, first + 6), sizes, strict=True):
                state |= {f"net.{at}.weight": random(*shape), f"net.{at}.bias": random(shape[0])}
            torch.save(
                {"linear.weight": random(1, d), "linear.bias": random(1)} if n % 20 == 1 else state,
                folder / f"layer{level}/C{level}x{i}.pt",
            )
            if level:
                tree.setdefault(f"C{level - 1}x{i % levels[level - 1]}:{level - 1}", []).append(f"C{level}x{i}:{level}")
    (folder / "hierarchy.json").write_text(json.dumps({"parent_to_children": tree}), encoding="utf-8")


if __name__ == "__main__":
    main()
