# ruff: noqa: E402
"""What an analysis costs over running the same tokens through the host in the same batches, and how much memory a long
one takes.

    python scripts/benchmarks/corpus_cost.py --out docs/benchmarks/corpus.json

Times: the demo model in bf16; texts: BBC news articles, real ones. Three ways of reading the same documents alternate:
the bare host, tokenised and run to its last layer; the analysis, which stops the host after the pack's layer; and the
analysis of a host that is not stopped. Memory: a narrow random host with the demo's layers, hidden size and tokenizer,
so that a million tokens take minutes and the memory is ours rather than the host's; the articles again and again until
a million tokens, the highest resident bytes of the process told for each tenth. Twice, each in a process of its own:
once as it is, and once where the host's products keep the code of few shapes. oneDNN makes code for every shape of a
product and keeps 1,024 of them, and documents of all lengths make that many.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench.timing import ratio
from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.host.model import find_layers
from probemon.lab.corpora.analyze import analyze
from probemon.lab.corpora.corpus import CorpusScorer
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.windows import Reading, shards
from probemon.util.files import write_text_atomically
from provenance import about, commit, machine
from real_text import bbc

BAR_PCT = 5.0
# How many shapes' code the host's products keep: in oneDNN itself, and in torch's layer over it.
FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
MEMORIES: dict[str, dict[str, str]] = {"memory": {}, "memory_few_shapes": FEW_SHAPES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--documents", type=int, default=64, help="of a timed corpus")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the long corpus")
    parser.add_argument(
        "--part", choices=("times", "memory"), help="measure this part alone, and leave the other as it is in FILE"
    )
    parser.add_argument("--memory-alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    texts = [{"text": found.text, "id": found.id} for found in bbc()]
    texts = [texts[i] for i in torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()]
    model, tokenizer = load_bundled(torch.bfloat16)
    if arguments.memory_alone:
        manager = DynamicProbeManager(ProbePack.open(ROOT / "probes/wordnet-smollm2-135m"))
        print(json.dumps(memory(manager, narrow(model.config), tokenizer, texts, arguments.tokens)))
        return
    found: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.part and arguments.out and arguments.out.is_file() else {}
    )
    found |= {"host": "SmolLM2-135M-Instruct, bf16", "texts": "BBC news articles", "machine": machine()}
    if arguments.part != "memory":
        found["packs"] = {}
        for name in ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp"):
            manager = DynamicProbeManager(ProbePack.open(ROOT / "probes" / name))
            found["packs"][name] = times(manager, model, tokenizer, texts[: arguments.documents], arguments.pairs)
        worst = max(found["packs"].values(), key=lambda pack: pack["overhead_whole_host_pct"])
        value, (low, high) = (worst[f"overhead_whole_host_{name}"] for name in ("pct", "interval"))
        what = "the larger overhead of both packs over a host that is not left early"
        found["claim"] = {"what": what, "value_pct": value, "interval_pct": [low, high], "bar_pct": BAR_PCT}
        # None: the interval has the bar in it.
        found["claim"]["holds"] = None if low <= BAR_PCT < high else high <= BAR_PCT
        found |= about()
    if arguments.part != "times":
        for name, variables in MEMORIES.items():
            found[name] = in_a_process(arguments.tokens, variables) | {"commit": commit()}
    print(json.dumps(found, indent=1))
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def times(
    manager: DynamicProbeManager, model: Any, tokenizer: Any, texts: list[dict[str, str]], n_pairs: int
) -> dict[str, Any]:
    """Seconds of each way, medians over alternating runs; the first of each is not counted."""
    taken: dict[str, list[float]] = {"bare": [], "analysis": [], "whole_host": []}
    n_tokens = 0
    for pair in tqdm(range(n_pairs + 1), desc=manager.pack.name, disable=None):
        ways = list(taken) if pair % 2 else list(taken)[::-1]
        for way in ways:
            begin = time.perf_counter()
            if way == "bare":
                n_tokens = bare(manager, model, tokenizer, texts)
            else:
                # "whole_host": run to its last layer, as one is that cannot be left half-way.
                left = (
                    patch("probemon.lab.corpora.state_reader.may_be_left", return_value=False)
                    if way == "whole_host"
                    else nullcontext()
                )
                with left, tempfile.TemporaryDirectory() as folder:
                    analyze(manager, model, tokenizer, texts, Path(folder) / "out")
            taken[way].append(time.perf_counter() - begin)
    seconds = {way: statistics.median(runs[1:]) for way, runs in taken.items()}
    return {
        "n_documents": len(texts),
        "n_tokens": n_tokens,
        "n_runs": n_pairs,
        "seconds": {way: round(value, 3) for way, value in seconds.items()},
        **overhead("overhead", taken["analysis"], taken["bare"]),
        **overhead("overhead_whole_host", taken["whole_host"], taken["bare"]),
        "tokens_per_second": {way: round(n_tokens / value) for way, value in seconds.items()},
        "strategy": manager.strategy.why,
        "impl": manager.impl,
    }


def overhead(name: str, analysis: list[float], bare: list[float]) -> dict[str, Any]:
    """Per cent over the bare host, with the interval that drawing pairs of runs anew gives."""
    value, low, high = (round(100 * (end - 1), 2) for end in ratio(analysis[1:], bare[1:]))
    return {f"{name}_pct": value, f"{name}_interval": [low, high]}


def bare(manager: DynamicProbeManager, model: Any, tokenizer: Any, texts: list[dict[str, str]]) -> int:
    """Tokenise the documents and run the host over the same batches, nothing attached; how many tokens that were."""
    scorer = CorpusScorer(manager, model, tokenizer, Reading())  # for its plan alone
    decoder, _ = find_layers(model)
    n_tokens = 0
    for shard in shards(read_documents(texts)):
        planned = scorer.reader.plan(shard)
        n_tokens += planned.n_tokens
        for rows in planned.batches:
            ids, mask, _ = scorer.reader.arrays(rows, planned.tokens)
            with torch.inference_mode():
                decoder(input_ids=ids, attention_mask=mask, use_cache=False)
    return n_tokens


def narrow(config: Any) -> Any:
    """A random host with as many layers and as wide a residual stream, whose blocks are thin."""
    torch.manual_seed(0)
    thin = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), **thin})).eval().to(torch.bfloat16)


def in_a_process(n_tokens: int, variables: dict[str, str]) -> dict[str, Any]:
    """`memory` in a process of its own with these environment variables, which oneDNN reads when it begins."""
    command = [sys.executable, __file__, "--memory-alone", "--tokens", str(n_tokens)]
    done = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True, text=True)
    return {**json.loads(done.stdout), "variables": variables}


def memory(
    manager: DynamicProbeManager, model: Any, tokenizer: Any, texts: list[dict[str, str]], n_tokens: int
) -> dict[str, Any]:
    """Resident bytes on the way through so many tokens: the highest in each tenth, which is about a shard."""
    told: list[tuple[int, int]] = []
    done = highest = 0

    def endless() -> Iterator[dict[str, str]]:
        while done < n_tokens:
            yield from texts

    def stopped() -> Iterator[dict[str, str]]:
        for text in endless():
            if done >= n_tokens:
                return
            yield text

    bar = tqdm(total=n_tokens, unit="token", disable=None)

    def progress(documents: float, tokens: int) -> None:
        nonlocal done, highest
        done += tokens
        highest = max(highest, resident())
        bar.update(tokens)
        if done * 10 // n_tokens > len(told):
            told.append((done, highest))
            highest = 0

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        analysis = analyze(manager, model, tokenizer, stopped(), Path(folder) / "out", progress=progress)
        totals = analysis.manifest["totals"]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    early, late = statistics.median(b for _, b in told[1:4]), statistics.median(b for _, b in told[-3:])
    return {
        "n_documents": totals["documents"],
        "n_tokens": totals["tokens"],
        "n_rows": totals["rows"],
        "seconds": round(time.perf_counter() - begin, 1),
        "resident_bytes": told,
        "early_bytes": int(early),
        "late_bytes": int(late),
        "growth_pct": round(100 * (late / early - 1), 2),
        "host": "random, narrow",
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "folder_bytes": size,
    }


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
