#!/usr/bin/env python3
"""Build a probe pack from WordNet and the bundled host model, or measure a written one again.

    python scripts/build_wordnet_pack.py --out probes/wordnet-smollm2-135m
    python scripts/build_wordnet_pack.py --shape 32-16 --out probes/wordnet-smollm2-135m-mlp
    python scripts/build_wordnet_pack.py --evaluate probes/wordnet-smollm2-135m

Minutes on two cores; the hidden states are cached, so that a second run takes about one. The same seed, versions and
machine give the same pack byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/benchmarks")]
HEADLINES = (
    "auroc_median", "auroc_p10", "auroc_siblings_median", "auroc_examples_median",
    "n_test", "firing_recall_exact", "share_evaluated_exact",
)  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="write a pack here (an existing one is replaced)")
    what.add_argument("--evaluate", type=Path, metavar="PACK", help="measure a written pack and compare its manifest")
    parser.add_argument("--shape", type=shape_of, default=(), help="linear (default), or 32-16, 128-64-1")
    parser.add_argument("--site-layer", type=int, default=15, metavar="L", help="site resid_post.L (default 15)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wordnet", type=Path, metavar="DIR", help="WordNet dict folder (default: npm, then Debian)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2); the bytes depend on it")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="keep the quality figures in this JSON file too")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args(argv)


def shape_of(text: str) -> tuple[int, ...]:
    """`linear` -> (), `32-16` and `32-16-1` -> (32, 16)."""
    if text == "linear":
        return ()
    found = re.fullmatch(r"(\d+)-(\d+)(-1)?", text)
    if found is None or int(found[1]) < 2 or int(found[2]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected linear, or two hidden layers of at least 2 such as 32-16")
    return int(found[1]), int(found[2])


def keep_figures(file: Path, name: str, entry: dict[str, Any]) -> None:
    """Set one pack's entry in a JSON file of figures, leaving the others."""
    from probemon.util.files import write_text_atomically
    from provenance import about

    figures = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"packs": {}}
    packs = dict(sorted({**figures["packs"], name: entry}.items()))
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"packs": packs, **about()}
    write_text_atomically(file, json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, Any]:
    import torch

    from provenance import commit

    return {
        "commit": commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    import numpy
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from wordnet_pack.wordnet import WordNetMissing

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    try:
        result = evaluate(args) if args.evaluate else build(args)
    except WordNetMissing as error:
        print(f"build_wordnet_pack: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result))
    return 1 if result.get("differences") else 0


def build(args: argparse.Namespace) -> dict[str, Any]:
    from wordnet_pack.build import build as build_pack
    from wordnet_pack.concepts import Choice
    from wordnet_pack.dataset import Source, prepare

    begun = time.perf_counter()
    data = prepare(Source(args.wordnet, args.site_layer, args.seed))
    data.host["settings"] = settings_of_host()
    prepared = time.perf_counter()
    pack = build_pack(data, shape=args.shape, out=args.out, choice=Choice(), versions=versions())
    seconds = {"data": round(prepared - begun, 1), "training_and_measuring": round(time.perf_counter() - prepared, 1)}
    size = size_of(args.out)
    show(pack.manifest["quality"])
    print(f"{args.out}: {pack.n_probes} probes, {size / 1e6:.1f} MB, {sum(seconds.values()):.0f} s")
    entry = {"quality": pack.manifest["quality"], "bytes": size, "seconds": seconds, **machine()}
    if args.figures:
        keep_figures(args.figures, args.out.name, entry)
    return {"pack": str(args.out), "n_probes": pack.n_probes, **entry}


def settings_of_host() -> dict[str, Any]:
    from probemon.bundled import load_bundled
    from probemon.host.settings import model_settings

    return model_settings(load_bundled()[0])


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a written pack, on a machine whose last digits may be others, and say where its manifest differs."""
    from probemon.packs.pack import ProbePack
    from wordnet_pack.build import controls
    from wordnet_pack.dataset import Source, prepare
    from wordnet_pack.evaluate import concepts_of, differences, measure
    from wordnet_pack.mentions import Limits

    pack = ProbePack.open(args.evaluate, verify=True)
    made = pack.manifest["provenance"]["data"]
    data = prepare(Source(args.wordnet, made["layer"], made["seed"], Limits(**made["limits"])))
    if data.wordnet.version != made["wordnet"]:
        print(f"note: made from WordNet {made['wordnet']}, this is {data.wordnet.version}", file=sys.stderr)
    quality, _ = measure(pack, data)
    concepts = concepts_of(pack)
    quality["controls"] = controls(data, concepts)
    found = differences(pack.manifest["quality"], quality)
    show(quality)
    print("the manifest states the same" if not found else "the manifest differs:\n  " + "\n  ".join(found))
    if args.figures:
        entry = {"quality": quality, "differs": found, "bytes": size_of(args.evaluate), **machine()}
        keep_figures(args.figures, args.evaluate.name, entry)
    return {"pack": str(args.evaluate), "quality": quality, "differences": found, **machine()}


def show(quality: dict[str, Any]) -> None:
    from wordnet_pack.card import table

    for key in HEADLINES:
        print(f"{key:24s} {quality[key]}")
    print(table(quality))


if __name__ == "__main__":
    sys.exit(main())
