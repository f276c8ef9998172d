#!/usr/bin/env python3
# ruff: noqa: E402
"""Forms of a generated update beside LoRAs with as many trainable numbers, on tasks whose answer is known.

    python scripts/perf_track.py --quick --json FILE            # each form on its own task
    python scripts/perf_track.py --only demo --json docs/benchmarks/perf_track.json --html FILE   # on the demo model
    python scripts/perf_track.py --json FILE --html FILE        # that, and every form on every task, five seeds

What was learned is kept by seed and arm (`--folder`): a run that was stopped goes on where it was.

A teacher is a tiny random host with a random adapter of one form on it; a student is the same host, and learns to say
what the teacher says. The form of the teacher can do all of it, so what others leave says what they cannot express or
do not learn. That a form wins its own task shows that it works; whether language asks for it is another question. All
data are random: rows of one of six distributions of tokens, which the teacher's codes tell apart by the row's past.

Every student has about as many trainable numbers as the LoRA, the controller among them, and the same rows, order and
steps; each method takes, of some learning rates, the one that a validation part likes best at the first seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/benchmarks")]

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from perf_study import report
from perf_study.claims import BUDGET, PLANTED, claims, verdicts
from perf_study.kept import code_mark, kept
from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.config import FORMS
from probemon.adapters.bem.evaluation import gates
from probemon.adapters.bem.evaluation.budget import flops, solve
from probemon.adapters.bem.losses import Batch, hooked_codes, recorded_codes
from probemon.adapters.bem.training import TrainSettings, fit
from probemon.util.cache_folders import cache_dir
from probemon.util.files import write_text_atomically
from provenance import about

VOCAB, LENGTH, DOMAINS, ROWS = 256, 32, 6, 32
SHARPNESS = 1.5  # of a domain's distribution: the deviation of its logits
RATES = (0.015, 0.03)
N_STEPS, N_BATCHES, N_TEST = 900, 40, 8
COMMON: dict[str, Any] = {
    "level": "prefix", "chunk_tokens": 4, "prefix_tokens": 32, "spectral_cap": None, "max_norm": 12.0, "width": 6,
}  # fmt: skip
LORA_RANKS = {("o",): 24, ("down",): 12}  # of the budget, to the last number
MODULES = {("o",): "o_proj", ("down",): "down_proj"}


def make_host(seed: int) -> Any:
    """A random llama of one layer, frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=64,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def rows_of(seed: int, part: int, n_batches: int) -> list[dict[str, Tensor]]:
    """Random rows, each of one domain; rows of different parts are drawn independently."""
    logits = SHARPNESS * torch.randn(DOMAINS, VOCAB, generator=torch.Generator().manual_seed(1000 + seed))
    generator = torch.Generator().manual_seed(7919 * (seed + 1) + part)
    shares = logits[torch.arange(ROWS) % DOMAINS].softmax(dim=-1)
    return [
        {"input_ids": torch.multinomial(shares, LENGTH, replacement=True, generator=generator)}
        for _ in range(n_batches)
    ]


@torch.no_grad()
def plant(host: Any, form: str, seed: int) -> Bem:
    """Put a random adapter of a form on a host, whose codes differ much from domain to domain."""
    bem = attach_bem(host, BemConfig(form=form, seed=1000 + seed, **COMMON, **PLANTED[form]))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in bem.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.startswith("updates"):
            parameter.add_((0.3 if form == "film" else 0.4) * noise)
        elif name.startswith(("controller.prefix.1", "controller.prefix.3")):
            parameter.mul_((5 if ".1." in name else 30) if parameter.ndim > 1 else 0)
    return bem


class Task:
    """A teacher of one form, and what it says of rows to learn from, to choose by and to be tested on."""

    def __init__(self, form: str, seed: int) -> None:
        self.form, self.seed, self.host = form, seed, make_host(seed)
        self.sites = PLANTED[form]["sites"]
        sizes = (N_BATCHES, N_TEST, N_TEST)
        self.train, self.choose, self.test = (rows_of(seed, part, n) for part, n in enumerate(sizes))
        with plant(self.host, form, seed), torch.no_grad():
            for batch in (*self.train, *self.choose, *self.test):
                batch["target"] = self.host(batch["input_ids"], use_cache=False).logits.log_softmax(dim=-1)
        self.base = self.left(self.host, self.test)
        self.base_of_choice = self.left(self.host, self.choose)

    @torch.no_grad()
    def left(self, model: Any, batches: Sequence[Batch]) -> float:
        """Mean KL(teacher || model), in nats a token."""
        return float(np.mean([float(divergence(model, batch)) for batch in batches]))


def divergence(model: Any, batch: Batch) -> Tensor:
    said = model(batch["input_ids"], use_cache=False).logits.log_softmax(dim=-1)
    return (batch["target"].exp() * (batch["target"] - said)).sum(dim=-1).mean()


def student(task: Task, method: str, rank: int | None = None) -> tuple[Any, Bem | None, list[Any]]:
    """A host with a fresh LoRA or adapter: the model, the adapter, what it learns. `rank`: instead of the budget's."""
    host = make_host(task.seed)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        rank = rank or LORA_RANKS[task.sites]
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an older name
            torch.manual_seed(task.seed)
            model = get_peft_model(host, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[MODULES[task.sites]]))
        return model, None, [p for p in model.parameters() if p.requires_grad]
    config = config_of(task, method)
    config = solve(host, config, BUDGET).config if rank is None else replace(config, rank=rank)
    bem = attach_bem(host, config)
    return host, bem, list(bem.parameters())


def config_of(task: Task, form: str) -> BemConfig:
    own = {key: value for key, value in PLANTED.get(form, {}).items() if key != "sites"}
    sites = ("o",) if form == "head_groups" else task.sites  # that form has no other
    return BemConfig(form=form, seed=task.seed, **{**COMMON, **own}, sites=sites)


def learn(task: Task, method: str, rate: float, n_steps: int, rank: int | None = None) -> dict[str, Any]:
    """Train a student, and measure it: the share of the base's divergence that it removes, its numbers, operations."""
    model, bem, parameters = student(task, method, rank)
    ids = task.test[0]["input_ids"]
    with torch.no_grad():
        n_flops = flops(lambda: model(ids)) - flops(lambda: make_host(task.seed)(ids))
    settings = TrainSettings(n_steps=n_steps, lr=rate, seed=task.seed)
    fit(parameters, lambda batch: (divergence(model, batch), {}), task.train, settings)
    found = {
        "chosen_by": 1 - task.left(model, task.choose) / task.base_of_choice,
        "removed": 1 - task.left(model, task.test) / task.base,
        "n_trainable": sum(p.numel() for p in parameters),
        "flops_per_token": round(n_flops / ids.numel()),
        "lr": rate,
    }
    if bem is not None:
        found |= {f"removed_{what}": 1 - left / task.base for what, left in without_routing(task, bem).items()}
        bem.detach()
    return found


@torch.no_grad()
def without_routing(task: Task, bem: Bem) -> dict[str, float]:
    """What is left where codes are frozen at their mean, and where they are shuffled among rows and columns: a routed
    adapter that is as good so routes nothing.
    """
    with recorded_codes(bem) as recorded:
        for batch in task.choose:
            bem.host(batch["input_ids"], use_cache=False)
    mean = torch.cat([codes.of("prefix").flatten(0, 1) for codes in recorded]).mean(dim=0)
    generator = torch.Generator().manual_seed(task.seed)

    def shuffled(codes: Any) -> Any:
        code = codes.of("prefix")
        flat = code.flatten(0, 1)
        return codes.replace(prefix=flat[torch.randperm(len(flat), generator=generator)].view(code.shape))

    found = {}
    for what, change in (
        ("frozen", lambda codes: codes.replace(prefix=mean.expand(codes.of("prefix").shape))),
        ("shuffled", shuffled),
    ):
        with hooked_codes(bem, change):
            found[what] = task.left(bem.host, task.test)
    return found


@torch.no_grad()
def integrity() -> dict[str, float]:
    """The largest errors of all forms: against the bare host, cut into pieces (beside the largest logit), later tokens
    changed, beside other rows, and greedy generation without a cache.
    """
    worst = dict.fromkeys(("start", "cut", "leak", "rows", "cached"), 0.0)

    def note(name: str, error: float) -> None:
        worst[name] = max(worst[name], error)

    for form in FORMS:
        host, ids = make_host(0), rows_of(0, 5, 1)[0]["input_ids"]
        bare = host(ids).logits
        config = BemConfig(form=form, **{**COMMON, **PLANTED.get(form, {"sites": ("o",)})})
        with attach_bem(host, config):
            note("start", float((host(ids).logits - bare).abs().max()))
        with plant(host, form, 0) if form in PLANTED else attach_bem(host, config):
            whole = host(ids).logits
            for cuts in ([1] * LENGTH, [7, 1, 13, 11]):
                cache = DynamicCache()
                parts = [host(part, past_key_values=cache).logits for part in ids.split(cuts, dim=1)]
                note("cut", float((torch.cat(parts, dim=1) - whole).abs().max() / whole.abs().max()))
            other = torch.cat([ids[:, :20], ids[:, 20:].flip(0)], dim=1)
            note("leak", float((host(other).logits[:, :20] - whole[:, :20]).abs().max()))
            alone = torch.cat([host(row[None]).logits for row in ids])
            note("rows", float((alone.argmax(-1) != whole.argmax(-1)).sum()))
            greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            given = {"input_ids": ids[:4, :9], "attention_mask": torch.ones(4, 9, dtype=torch.int64)}
            steered = [host.generate(**given, **greedy, use_cache=cache) for cache in (True, False)]
            note("cached", float((steered[0] != steered[1]).sum()))
    return worst


def study(
    tasks: Sequence[str],
    methods: Callable[[str], Sequence[str]],
    seeds: range,
    n_steps: int,
    folder: Path | None = None,
) -> list[Any]:
    """A row for each task, method and seed, each method at the learning rate that is best for it at the first seed."""
    rows = []
    for form in tasks:
        rates: dict[tuple[str, int | None], float] = {}
        for seed in seeds:
            task = Task(form, seed)
            active = PLANTED[form].get("active")
            arms: list[tuple[str, int | None]] = [(method, None) for method in methods(form)]
            if active:  # as many multiply-adds as the mask keeps
                arms += [("lora", active), ("low_rank", active)]
            for method, rank in arms:
                tried = [rates[method, rank]] if (method, rank) in rates else RATES
                found = max(
                    (
                        kept(
                            folder,
                            f"{form}-{method}-{rank or 'budget'}-{seed}-{rate:g}",
                            partial(learn, task, method, rate, n_steps, rank),
                        )
                        for rate in tried
                    ),
                    key=lambda one: one["chosen_by"],
                )
                rates[method, rank] = found["lr"]
                name = method if rank is None else f"{method}, rank {rank}"
                rows.append({"task": form, "method": name, "seed": seed, "base_nats": task.base, **found})
                say(f"{form:12s} {name:18s} seed {seed}: {found['removed']:.3f} of {task.base:.2f} nats removed")
    return rows


def say(line: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {line}", file=sys.stderr)


BEGIN = time.perf_counter()


def main() -> int:
    """Check, learn, judge, write. Status 1 where an adapter is not what it promises: then nothing is compared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each form on its own task, beside a LoRA; two seeds")
    parser.add_argument("--only", choices=("planted", "demo"), help="one of the two studies of a full run")
    parser.add_argument(
        "--headers", choices=("marks", "words"), default="marks", help="the demo's: what tells a domain"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--folder", type=Path, default=cache_dir() / "bem-domains", help="what was learned before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    without_demo = arguments.quick or arguments.only == "planted"
    folder = (
        None
        if arguments.quick
        else arguments.folder
        / f"planted-{code_mark('scripts/perf_track.py', 'scripts/perf_study/claims.py', 'probemon/adapters/bem')}"
    )
    made_by = about()  # now: the study outlasts a commit
    errors = integrity()
    if gates.integrity(errors).verdict != gates.PASSED:
        print(f"perf_track: nothing was compared: {gates.integrity(errors).why}", file=sys.stderr)
        return 1
    seeds = range(arguments.seeds or (2 if arguments.quick else 5))
    found: dict[str, Any] = {}
    if arguments.quick:
        found |= planted(errors, seeds, quick_methods, None)
    elif arguments.only != "demo":
        found |= planted(errors, seeds, lambda task: ("lora", *FORMS), folder)
    if not without_demo:
        from perf_study.demo import study as of_demo  # it needs WordNet and the demo model

        found["demo"] = of_demo(seeds, arguments.folder / "results", arguments.headers, errors)
    print("\n".join(report.lines(found)))
    found |= {"integrity": errors, "seconds": round(time.perf_counter() - BEGIN, 1), **made_by}
    if arguments.json:
        write_text_atomically(arguments.json, json.dumps(found, indent=1) + "\n")
    if arguments.html:
        write_text_atomically(arguments.html, report.page(found))
    return 0


def quick_methods(task: str) -> Sequence[str]:
    """What learns a task within ten minutes: what its claim compares."""
    return ("lora", "low_rank", task) if task == "rank_mask" else ("lora", task)


def planted(
    errors: dict[str, float], seeds: range, methods: Callable[[str], Sequence[str]], folder: Path | None
) -> dict[str, Any]:
    """The study on random teachers, its claims shown."""
    rows = study(list(PLANTED), methods, seeds, N_STEPS, folder)
    found = {"claims": claims(rows, errors), "rows": rows, "verdicts": verdicts(rows, errors), "data": "random"}
    for name, claim in found["claims"].items():
        print(f"{name:24s} {claim['value']:9.5f}   {'holds' if claim['holds'] else 'MISSED'} ({claim['bar']:g})")
    return found


if __name__ == "__main__":
    sys.exit(main())
