#!/usr/bin/env python3
# ruff: noqa: E402
"""What a BEM adapter costs on SmolLM2-135M, beside the bare host and an unmerged LoRA (PEFT's) of the same rank, sites
and weights.

    python scripts/benchmarks/benchmark_bem.py --json docs/benchmarks/bem.json
    python scripts/benchmarks/benchmark_bem.py --quick --json FILE               # shorter lengths, within five minutes

The weights of both adapters are random and alike; the controller is as it was made. What must be right is checked
first: with U = 0 the logits are the host's to the last bit, and with a cache they are those of a full forward. Then the
methods take turns in one process, and figures are medians: compare them within a file, never between files. Memory is
the highest resident size of a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.routing.monitor import RoutingMonitor
from probemon.bundled import load_bundled
from probemon.util.files import write_text_atomically
from provenance import about

# Rows, tokens, and how often: short ones are noisy.
GRID, QUICK = ((1, 128, 21), (4, 256, 9), (8, 512, 5), (2, 2048, 5)), ((1, 128, 9), (2, 256, 5))
TELEMETRY = ", telemetry"  # behind a method's name: with its routing recorded
SITES = ("o", "down")
N_STEPS = 12  # of decoding, behind each prefill
UPDATE = 0.02  # standard deviation of U: large enough to change what is said
# The bar of each claim: the most, or the least, that will do.
BARS = {
    "latency_over_lora_pct": (12.0, "most"), "memory_over_lora_pct": (10.0, "most"), "telemetry_pct": (5.0, "most"),
    "cached_vs_full_max": (1e-5, "most"), "code_reuse_rate": (0.9, "least"),
}  # fmt: skip


def main() -> int:
    """Check, measure, show, write. Status 1 where something was wrong, so that nothing was timed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-of", nargs=3, metavar=("METHOD", "ROWS", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        method, rows, length = arguments.memory_of
        print(json.dumps(memory_here(method, int(rows), int(length), arguments.device)))
        return 0
    begin = time.perf_counter()
    model, tokenizer = load_bundled(torch.bfloat16)
    tokens = text_tokens(tokenizer)
    checked = check(model, tokens)
    if checked["u0_max_difference"] != 0:
        print(
            f"benchmark_bem: with U = 0 logits differ by {checked['u0_max_difference']}: nothing was timed",
            file=sys.stderr,
        )
        return 1
    host = model.to(arguments.device)
    kinds = bem_kinds(arguments.device)
    hosts = {
        "bare": host,
        **{
            name: adapted(name, copy.deepcopy(host)) for name in ("lora", *kinds, *(kind + TELEMETRY for kind in kinds))
        },
    }
    reuse = routing(hosts[kinds[-1]], tokens, 700 if arguments.quick else 1000)
    rows: list[dict[str, Any]] = []
    for batch, length, n_rounds in QUICK if arguments.quick else GRID:
        rows += difference({name: hosts[name] for name in ("bare", "lora", *kinds)}, tokens, batch, length)
        rows += cell(hosts, tokens, batch, length, n_rounds)
    for batch, length, _ in QUICK[:1] if arguments.quick else GRID:
        rows += memory(batch, length, arguments.device)
    found = {
        "suite": "quick" if arguments.quick else "grid",
        "claims": claims(rows, checked, reuse),
        "rows": rows,
        "checked": checked,
        "routing": reuse,
        "config": {
            "rank": BemConfig().rank,
            "sites": list(SITES),
            "level": BemConfig().level,
            "update_std": UPDATE,
            "host": "SmolLM2-135M-Instruct, bf16",
        },
        "seconds": round(time.perf_counter() - begin, 1),
        **about(),
    }
    for name, claim in found["claims"].items():
        print(
            f"{name:24s} {claim['value']:12.6g}   bar: at {claim['kind']} {claim['bar']:g}  "
            f" {'holds' if claim['holds'] else 'MISSED'}"
        )
    if arguments.json:
        write_text_atomically(arguments.json, json.dumps(found, indent=1) + "\n")
    return 0


# -- the methods -------------------------------------------------------------------------------------


def bem_kinds(device: str) -> tuple[str, ...]:
    """The adapter by the implementations that can run here: eager torch, and on a GPU the fused kernel."""
    return ("bem, eager",) if device == "cpu" else ("bem", "bem, eager")


def adapted(name: str, model: Any) -> Any:
    """A host with an adapter on it, whose U and V are the same for every kind."""
    if name == "bare":
        return model
    bem = weighted(
        attach_bem(
            model,
            BemConfig(sites=SITES),
            impl="triton" if name in ("bem", "bem" + TELEMETRY) else "reference",
        )
    )
    if name != "lora":
        model.bem = (bem,)  # in a tuple: as an attribute it would be a part of the model
        return model
    from peft import LoraConfig, get_peft_model

    weights = {(site.kind, site.layer): bem.updates[site.key] for site in bem.sites}
    bem.detach()
    lora = get_peft_model(
        model,
        LoraConfig(
            r=bem.config.rank,
            lora_alpha=int(bem.config.alpha),
            lora_dropout=0.0,
            target_modules=["o_proj", "down_proj"],
        ),
    ).eval()
    with torch.no_grad():
        for layer, block in enumerate(lora.base_model.model.model.layers):
            for kind, module in (("o", block.self_attn.o_proj), ("down", block.mlp.down_proj)):
                module.lora_A["default"].weight.copy_(weights[kind, layer].V.T)
                module.lora_B["default"].weight.copy_(weights[kind, layer].U)
    return lora


def weighted(bem: Bem) -> Bem:
    """With a random U, as training would leave none at zero."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for site in bem.sites:
            parameter = bem.updates[site.key].U
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * UPDATE)
    return bem


def text_tokens(tokenizer: Any) -> Tensor:
    """Tokens of the project's own documents, `[N]`: real text."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    found: Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    return found


def some(tokens: Tensor, batch: int, length: int, device: Any) -> Tensor:
    """`[batch, length]` of them, each row from another place."""
    begins = torch.linspace(0, len(tokens) - length, batch).long()
    return torch.stack([tokens[begin : begin + length] for begin in begins.tolist()]).to(device)


# -- what must be right ------------------------------------------------------------------------------


def check(model: Any, tokens: Tensor) -> dict[str, float]:
    """With U = 0 the host's own logits; in fp32, logits with a cache against those of one forward, of the host alone
    and with the adapter.
    """
    ids = some(tokens, 2, 160, "cpu")
    with torch.inference_mode():
        before = model(ids).logits
        with attach_bem(model, BemConfig(sites=SITES)):
            after = model(ids).logits
        found = {"u0_max_difference": float((before - after).abs().max())}
        whole = copy.deepcopy(model).float()
        found["host_cached_vs_full_max"], found["logits_std"] = cached(whole, ids), float(whole(ids).logits.std())
        alone = whole(ids).logits
        with weighted(attach_bem(whole, BemConfig(sites=SITES))):
            found["cached_vs_full_max"] = cached(whole, ids)
            found["adapter_changes_logits_by"] = float((whole(ids).logits - alone).abs().max())
    return found


def cached(model: Any, ids: Tensor) -> float:
    """Largest difference of logits: a prompt of 100 tokens, the others one by one, against one forward over all."""
    cache = DynamicCache()
    parts = [model(ids[:, :100], past_key_values=cache, use_cache=True).logits]
    parts += [model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(100, ids.shape[1])]
    return float((torch.cat(parts, dim=1) - model(ids, use_cache=False).logits).abs().max())


# -- what is measured --------------------------------------------------------------------------------


def cell(hosts: dict[str, Any], tokens: Tensor, batch: int, length: int, n_rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of a prefill and of a step behind it, by method; of the routed adapter also with its routing
    recorded.

    Prefills take turns, then the steps behind them do, one of each method at a time: what else the machine does falls
    on all alike. Two prefills of a method are a round, the second ones in the opposite order, so that what comes slowly
    falls on all alike too.
    """
    ids = some(tokens, batch, length, next(hosts["bare"].parameters()).device)
    names = list(hosts)
    prefills: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    inside: dict[str, list[float]] = {}
    with ExitStack() as stack:
        monitors = {
            name: stack.enter_context(RoutingMonitor(hosts[name], bem=hosts[name].bem[0]))
            for name in names
            if name.endswith(TELEMETRY)
        }
        for turn in tqdm(range(n_rounds + 1), desc=f"{batch} x {length}", disable=None):
            order = names if turn % 2 else names[::-1]
            firsts = {name: Run(hosts[name], ids).prefill_seconds for name in order}
            runs = {name: Run(hosts[name], ids) for name in order[::-1]}
            for name in order:
                prefills[name].append((firsts[name] + runs[name].prefill_seconds) / 2)
            for name, monitor in monitors.items():
                inside.setdefault(f"prefill {name}", []).append(monitor.forward_seconds[-1])
            for i in range(N_STEPS):
                for name in order[i % len(order) :] + order[: i % len(order)]:
                    steps[name].append(runs[name].step())
        for name, monitor in monitors.items():
            inside[f"decode {name}"] = monitor.forward_seconds[-N_STEPS:]
    for name in names:  # the first of all are not counted
        prefills[name], steps[name] = prefills[name][1:], steps[name][N_STEPS:]
    rows = []
    for part, taken in (("prefill", prefills), ("decode", steps)):
        for name in names:
            others = ["bare", "lora", *([name.removesuffix(TELEMETRY)] if name.endswith(TELEMETRY) else [])]
            ratios = {
                f"over_{other}_pct": round(
                    100 * (statistics.median(a / b for a, b in zip(taken[name], taken[other], strict=True)) - 1), 2
                )
                for other in others
            }
            median = statistics.median(taken[name])
            rows.append(
                {
                    "part": part,
                    "batch": batch,
                    "length": length,
                    "method": name,
                    "median_ms": round(1e3 * median, 3),
                    "tokens_per_second": round(ids.numel() / median if part == "prefill" else batch / median),
                    "n": len(taken[name]),
                    **ratios,
                }
            )
            if f"{part} {name}" in inside:
                rows[-1]["hooks_ms"] = round(
                    1e3 * statistics.median(inside[f"{part} {name}"]), 3
                )  # of the telemetry alone
    return rows


class Run:
    """A prefill, timed when made, and steps behind it."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._model, self._cache = model, DynamicCache()
        self._wait: Callable[[], Any] = torch.cuda.synchronize if ids.is_cuda else lambda: None
        self.prefill_seconds = self._forward(ids, logits_to_keep=1)

    def step(self) -> float:
        """Seconds of the next token's forward."""
        return self._forward(self._next)

    @torch.inference_mode()
    def _forward(self, ids: Tensor, **how: Any) -> float:
        self._wait()
        begin = time.perf_counter()
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **how)
        self._wait()
        taken = time.perf_counter() - begin
        self._next = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        return taken


def memory(batch: int, length: int, device: str) -> list[dict[str, Any]]:
    """Highest resident bytes (on a GPU: allocated ones) of a prefill and a few steps, a process for each method."""
    rows: list[dict[str, Any]] = []
    for method in ("bare", "lora", bem_kinds(device)[0]):
        told = subprocess.run(
            [sys.executable, __file__, "--device", device, "--memory-of", method, str(batch), str(length)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        rows.append(
            {"part": "memory", "batch": batch, "length": length, "method": method, **json.loads(told.splitlines()[-1])}
        )
    for row in rows:
        for other in rows[:2]:
            row[f"over_{other['method']}_pct"] = round(100 * (row["peak_bytes"] / other["peak_bytes"] - 1), 2)
    return rows


def memory_here(method: str, batch: int, length: int, device: str) -> dict[str, int]:
    """In a process of its own: what one prefill and a few steps take at most."""
    model, tokenizer = load_bundled(torch.bfloat16)
    model = adapted(method, model.to(device))
    ids = some(text_tokens(tokenizer), batch, length, device)
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        generate(model, ids)
        return {"peak_bytes": torch.cuda.max_memory_allocated()}
    generate(model, ids[:1, :16])  # what is made once
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = status("VmRSS")
    generate(model, ids)
    return {"peak_bytes": status("VmHWM"), "loaded_bytes": before}


def generate(model: Any, ids: Tensor) -> None:
    """A prefill and the steps behind it."""
    run = Run(model, ids)
    for _ in range(N_STEPS):
        run.step()


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@torch.inference_mode()
def difference(hosts: dict[str, Any], tokens: Tensor, batch: int, length: int) -> list[dict[str, Any]]:
    """How far each adapter's predictions are from the bare host's: mean KL in nats, share of tokens whose likeliest one
    is the same. Row by row: logits are large.
    """
    ids = some(tokens, batch, length, next(hosts["bare"].parameters()).device)
    kl, same = ({name: 0.0 for name in hosts if name != "bare"} for _ in range(2))
    for row in ids.split(1):
        bare = hosts["bare"](input_ids=row).logits.float().log_softmax(dim=-1)
        for name in kl:
            given = hosts[name](input_ids=row).logits.float().log_softmax(dim=-1)
            kl[name] += float((bare.exp() * (bare - given)).sum())
            same[name] += float((given.argmax(dim=-1) == bare.argmax(dim=-1)).sum())
    n = ids.numel()
    return [
        {
            "part": "difference",
            "batch": batch,
            "length": length,
            "method": name,
            "kl_to_bare": round(kl[name] / n, 5),
            "same_top": round(same[name] / n, 4),
        }
        for name in kl
    ]


def routing(host: Any, tokens: Tensor, length: int) -> dict[str, Any]:
    """What telemetry says of chunk codes over two texts and the steps behind them."""
    with RoutingMonitor(host, bem=host.bem[0]) as monitor:
        generate(host, some(tokens, 2, length, next(host.parameters()).device))
    [chunk] = [stream for stream in monitor.report()["streams"] if stream["level"] == "chunk"]
    return {key: chunk[key] for key in ("n_tokens", "code_reuse_rate", "kv_invalidations", "effective_rank")}


def claims(rows: list[dict[str, Any]], checked: dict[str, float], reuse: dict[str, Any]) -> dict[str, Any]:
    """The worst of each kind over the grid, with its bar."""
    best = next(row["method"] for row in rows if row["method"].startswith("bem"))
    timed = [row for row in rows if "median_ms" in row]
    values = {
        "latency_over_lora_pct": max(row["over_lora_pct"] for row in timed if row["method"] == best),
        "memory_over_lora_pct": max(
            row["over_lora_pct"] for row in rows if row["part"] == "memory" and row["method"] == best
        ),
        "telemetry_pct": max(row[f"over_{best}_pct"] for row in timed if row["method"] == best + TELEMETRY),
        "cached_vs_full_max": checked["cached_vs_full_max"],
        "code_reuse_rate": reuse["code_reuse_rate"],
    }
    made = {}
    for name, value in values.items():
        bar, kind = BARS[name]
        if name == "cached_vs_full_max":  # no adapter can be nearer than its host: then at most half as much again
            bar = max(bar, round(1.5 * checked["host_cached_vs_full_max"], 9))
        made[name] = {
            "value": value,
            "bar": bar,
            "kind": kind,
            "holds": value <= bar if kind == "most" else value >= bar,
        }
    return made


if __name__ == "__main__":
    raise SystemExit(main())
