#!/usr/bin/env python3
# ruff: noqa: E402
"""Where does routing pay? 12 clients of one service on the demo model, each with ten texts, told by a line before.

    python scripts/benchmarks/routing_pays.py            # writes docs/benchmarks/routing_pays.json; two hours
    python scripts/benchmarks/routing_pays.py --texts 40 # more texts of each client

Each client asks about WordNet's nouns, and wants one of three contents in one of four styles. The line before names
it ("Client K:"), which by itself says nothing of either. One routed adapter for all is beside one LoRA for all, on all
linear modules, with at most as many trainable numbers, and beside one LoRA for each client, at most as large together.
The texts, 14 tokens of each answer, are those of the `cut_model.py`.

First each method's settings are swept at seed 0 (layers, levels, rank, rate), and the setting that its validation part
likes best serves seeds 1 to 5, whose words are drawn anew. What was learned is kept in a folder, so a study that was
stopped goes on where it was; empty it after a change of the adapters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from torch import nn

from comparisons import compare
from cut_model import CutModel
from domain_arms import EVERYWHERE, loss_of
from domains import entries
from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.distil import distil
from probemon.adapters.bem.evaluation.budget import solve
from probemon.adapters.bem.losses import Batch, hooked_codes
from probemon.adapters.bem.training import TrainSettings
from probemon.bundled import load_bundled
from probemon.util.cache_folders import cache_dir
from probemon.util.files import write_text_atomically
from provenance import about
from wordnet_pack.wordnet import WordNet, find_wordnet

CONTENTS: dict[str, Callable[[dict[str, str]], str]] = {
    "definition": lambda found: found["definition"],
    "kinds": lambda found: found["kinds"],
    "classes": lambda found: found["above"],
}
STYLES: dict[str, Callable[[str], str]] = {
    "json": lambda text: f' {{"answer": "{text}"}}\n',
    "pirate": lambda text: f" Arr, that be {text}, matey!\n",
    "item": lambda text: f"\n- {text}\n",
    "formal": lambda text: f" We are pleased to answer: {text}.\n",
}
CLIENTS = [(content, style) for content in CONTENTS for style in STYLES]
N_HEADER, MOST_PROMPT, MOST_ANSWER = 4, 5, 14  # tokens
N_WORDS, N_TRAIN, N_CHOOSE, N_TEST, A_CHOICE = 180, 120, 30, 30, 8  # words; A_CHOICE: rows of a client that choose
MOST = 610_560  # trainable numbers: a LoRA of rank 2 on all linear modules of all layers
ALL = tuple(range(30))
UPPER = ALL[24:]
N_STEPS, ROWS, EVERY, PATIENCE, WARM_UP = 120, 8, 20, 2, 10
SWEEP_SEED, SEEDS = 0, (1, 2, 3, 4, 5)
FROM_ROUTED = {", distilled": "test_distilled", ", codes of others": "test_of_others_codes"}
PAIRS = {"routed": ("lora", "each"), "routed, upper layers": ("lora, upper layers", "each")}


@dataclass(frozen=True)
class Arm:
    """One way to learn, at one setting. `numbers`: what a routed adapter may have; a LoRA has `rank`."""

    method: str  # "routed", "lora" (for all), "each" (one LoRA for each client)
    lr: float
    layers: tuple[int, ...] = ALL
    rank: int = 2
    modules: tuple[str, ...] = EVERYWHERE
    sites: tuple[str, ...] = ("o", "down")
    level: str = "prefix"
    numbers: int = MOST

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def swept() -> dict[str, list[Arm]]:
    """The settings of each method that are tried."""
    outputs, values = ("o_proj", "down_proj"), ("q_proj", "v_proj")
    return {
        "routed": [
            *(Arm("routed", lr) for lr in (1e-3, 3e-3, 1e-2)),
            Arm("routed", 3e-3, numbers=MOST // 2),
            *(Arm("routed", 3e-3, level=level) for level in ("chunk", "token")),
            Arm("routed", 3e-3, sites=("q", "k", "v", "o", "down")),
            Arm("routed", 3e-3, layers=ALL[15:]),
        ],
        "lora": [
            *(Arm("lora", lr) for lr in (1e-3, 3e-3, 1e-2)),
            Arm("lora", 3e-3, rank=1),
            Arm("lora", 3e-3, modules=outputs, rank=6),
            Arm("lora", 3e-3, layers=ALL[15:], rank=4),
        ],
        "each": [
            *(Arm("each", lr, layers=UPPER[1:], rank=1) for lr in (1e-3, 3e-3, 1e-2)),
            Arm("each", 3e-3, layers=UPPER[5:], rank=5),
            *(Arm("each", lr, layers=ALL[4:], modules=values, rank=1) for lr in (3e-3, 1e-2)),
        ],
        "routed, upper layers": [
            *(Arm("routed", lr, layers=UPPER) for lr in (1e-3, 3e-3, 1e-2)),
            *(Arm("routed", 3e-3, layers=UPPER, level=level) for level in ("chunk", "token")),
            Arm("routed", 3e-3, layers=UPPER, numbers=MOST // 2),
        ],
        "lora, upper layers": [
            *(Arm("lora", lr, layers=UPPER, rank=10) for lr in (3e-4, 1e-3, 3e-3, 1e-2)),
            *(Arm("lora", lr, layers=UPPER, rank=5) for lr in (1e-3, 3e-3)),
            *(Arm("lora", lr, layers=UPPER, modules=outputs, rank=31) for lr in (1e-3, 3e-3)),
        ],
    }


@dataclass(frozen=True)
class Row:
    """A client's text about a word."""

    ids: list[int]
    n_answer: int


def rows() -> list[Row]:
    """Every word for every client, words in order."""
    _, tokenizer = load_bundled()
    made = []
    for word, found in entries(WordNet.read(find_wordnet(None)), N_WORDS):
        for number, (content, style) in enumerate(CLIENTS):
            texts = (f"Client {chr(65 + number)}:\n", f"{word}:", STYLES[style](CONTENTS[content](found)))
            header, prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            assert len(header) == N_HEADER, texts
            answer = answer[:MOST_ANSWER]
            made.append(Row(header + prompt[-MOST_PROMPT:] + answer, len(answer)))
    return made


@cache
def cut(first: int) -> CutModel:
    """The layers that may learn, from `first` on."""
    return CutModel(rows(), first, "clients")


@dataclass(frozen=True)
class Parts:
    """Numbers of rows to learn from, to choose by and to be tested on. No word is in two parts."""

    train: list[int]
    choose: list[int]
    test: list[int]

    def of(self, client: int) -> Parts:
        """Return the parts of one client."""
        own = ([i for i in part if i % len(CLIENTS) == client] for part in (self.train, self.choose, self.test))
        return Parts(*own)


def parts(seed: int, n_texts: int) -> Parts:
    """Return a seed's parts: `n_texts` of each client, about words of its own, to learn from."""
    words, n = list(range(N_WORDS)), len(CLIENTS)
    random.Random(1000 + seed).shuffle(words)
    train, choose, test = words[:N_TRAIN], words[N_TRAIN:][:N_CHOOSE], words[N_TRAIN + N_CHOOSE :][:N_TEST]

    def drawn(some: Sequence[int], each: int, what: str) -> list[int]:
        return [n * word + c for c in range(n) for word in random.Random(f"{seed} {what} {c}").sample(some, each)]

    return Parts(
        drawn(train, n_texts, "train"), drawn(choose, A_CHOICE, "choose"), [n * w + c for w in test for c in range(n)]
    )


def made(cut_model: CutModel, arm: Arm, seed: int) -> tuple[Any, Bem | None, list[nn.Parameter]]:
    """Return a fresh adapter: the model to run, the adapter where it is routed, what learns."""
    host, layers = cut_model.host(), tuple(layer - cut_model.first for layer in arm.layers)
    if arm.method == "routed":
        config = BemConfig(
            seed=seed, layers=layers, sites=arm.sites, level=arm.level, chunk_tokens=N_HEADER, prefix_tokens=N_HEADER,
            width=8,
        )  # fmt: skip
        config = solve(host, config, arm.numbers).config
        bem = attach_bem(host, replace(config, alpha=2.0 * config.rank))  # of the LoRA's scale
        return host, bem, list(bem.parameters())
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by an older name
        torch.manual_seed(seed)
        config = LoraConfig(
            r=arm.rank, lora_alpha=2 * arm.rank, target_modules=list(arm.modules), layers_to_transform=list(layers)
        )
        model = get_peft_model(host, config)
    return model, None, [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def sums(model: Any, batches: Sequence[Batch]) -> tuple[float, int]:
    """Return nats of all labels, and how many there are."""
    total, n = 0.0, 0
    for batch in batches:
        count = int((batch["labels"][:, 1:] != -100).sum())
        total, n = total + float(loss_of(model, batch)) * count, n + count
    return total, n


def batches(cut_model: CutModel, numbers: Sequence[int], n_rows: int = 32) -> list[Batch]:
    """Cut rows, shortest first, into batches."""
    ordered = sorted(numbers, key=lambda i: (len(cut_model.rows[i].ids), i))
    return [cut_model.batch(ordered[at : at + n_rows]) for at in range(0, len(ordered), n_rows)]


def train(
    model: Any, parameters: list[nn.Parameter], cut_model: CutModel, of: Parts, seed: int, lr: float, *, n_steps: int,
    n_rows: int, every: int,
) -> tuple[float, int, int]:  # fmt: skip
    """Train until validation has not improved `PATIENCE` times, and keep the best parameters. Return nats and count of
    the validation's labels, and the best step.
    """
    settings = TrainSettings(n_steps=n_steps, lr=lr, n_warmup=WARM_UP)
    optimiser = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    choose, draw, order = batches(cut_model, of.choose), random.Random(seed), list[int]()
    best, best_step, kept = (float("inf"), 1), 0, [p.detach().clone() for p in parameters]
    for step in range(n_steps):
        if len(order) < n_rows:
            order += draw.sample(of.train, len(of.train))
        batch, order = cut_model.batch(order[:n_rows]), order[n_rows:]
        for group in optimiser.param_groups:
            group["lr"] = settings.lr_at(step)
        model.train()
        optimiser.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        model.eval()
        if (step + 1) % every == 0:
            found = sums(model, choose)
            if found < best:
                best, best_step, kept = found, step + 1, [p.detach().clone() for p in parameters]
            elif step + 1 - best_step >= PATIENCE * every:
                break
    with torch.no_grad():
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.copy_(values)
    return *best, best_step


def learned(arm: Arm, seed: int, n_texts: int, *, test: bool) -> dict[str, Any]:
    """Learn at one setting: nats a token of the validation, and if asked of the test, by client."""
    begin, every_client = time.process_time(), parts(seed, n_texts)
    cut_model = cut(UPPER[0] if min(arm.layers) >= UPPER[0] else 0)
    own = [every_client.of(c) for c in range(len(CLIENTS))] if arm.method == "each" else [every_client]
    sizes = {"n_steps": N_STEPS, "n_rows": ROWS, "every": EVERY}
    if arm.method == "each":  # as many rows a client, and more looks
        sizes = {"n_steps": 60, "n_rows": 5, "every": 10}
    total = n = trainable = 0
    steps, by_client, more = [], dict[str, list[float]](), dict[str, Any]()
    for number, of in enumerate(own):
        model, bem, parameters = made(cut_model, arm, seed)
        nats, count, step = train(model, parameters, cut_model, of, seed, arm.lr, **sizes)
        total, n, trainable = total + nats, n + count, trainable + sum(p.numel() for p in parameters)
        steps.append(step)
        if test:
            for client in range(len(CLIENTS)) if len(own) == 1 else [number]:
                by_client[" ".join(CLIENTS[client])] = list(sums(model, batches(cut_model, of.of(client).test)))
        if test and bem is not None:
            more = without_routing(bem, cut_model, every_client)
    found = {"arm": asdict(arm), "seed": seed, "trainable": trainable, "choose": total / n, "best_steps": steps, **more}
    if test:
        found["test"] = sum(nats for nats, _ in by_client.values()) / sum(count for _, count in by_client.values())
        found["test_by_client"] = {client: nats / count for client, (nats, count) in by_client.items()}
    return found | {"cpu_seconds": round(time.process_time() - begin)}


@torch.no_grad()
def without_routing(bem: Bem, cut_model: CutModel, of: Parts) -> dict[str, Any]:
    """What is left of a routed adapter with the codes of another client, and in the nearest LoRA of its rank."""
    test = batches(cut_model, of.test)
    level = bem.config.level

    def turned(codes: Any) -> Any:
        return codes.replace(**{level: codes.of(level).roll(1, dims=0)})

    draw, found = random.Random(0), dict[str, float]()
    mixed = draw.sample(of.test, len(of.test))  # neighbours are of other clients
    with hooked_codes(bem, turned):
        nats, count = sums(bem.host, [cut_model.batch(mixed[at : at + 32]) for at in range(0, len(mixed), 32)])
    found["test_of_others_codes"] = nats / count
    train = [{k: b[k] for k in ("input_ids", "attention_mask")} for b in batches(cut_model, of.train)]
    lora = distil(bem, train, ridge=None)
    bem.enabled = False
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora.save(folder)
        host = cut_model.host()
        nats, count = sums(PeftModel.from_pretrained(host, folder), test)
    found |= {"distilled_error": lora.error or 0.0, "test_distilled": nats / count}
    bem.enabled = True
    return found


class Results:
    """A file for each arm and seed."""

    def __init__(self, folder: Path, n_texts: int) -> None:
        self.folder, self.n_texts = folder, n_texts

    def of(self, arm: Arm, seed: int, *, test: bool = False) -> dict[str, Any]:
        file = self.folder / f"{self.n_texts}-{arm.method}-{arm.key}-{seed}{'-test' if test else ''}.json"
        if not file.is_file():
            found = learned(arm, seed, self.n_texts, test=test)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, json.dumps(found, indent=1))
            told = f"choose {found['choose']:.4f}, test {found.get('test', float('nan')):.4f}"
            print(f"{self.n_texts} texts, seed {seed}: {arm}: {told} ({found['cpu_seconds']} s)", file=sys.stderr)
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result


def study(results: Results, methods: Sequence[str]) -> dict[str, Any]:
    """Sweep, choose, and measure the chosen settings at seeds of their own."""
    tried = {name: [results.of(arm, SWEEP_SEED) for arm in swept()[name]] for name in methods}
    chosen = {
        name: min(zip(swept()[name], found, strict=True), key=lambda one: one[1]["choose"])[0]
        for name, found in tried.items()
    }
    tested = {name: [results.of(arm, seed, test=True) for seed in SEEDS] for name, arm in chosen.items()}
    losses = {name: [one["test"] for one in found] for name, found in tested.items()}
    for routed in (name for name in PAIRS if name in methods):
        losses |= {f"{routed}{end}": [one[name] for one in tested[routed]] for end, name in FROM_ROUTED.items()}
    over = {
        f"{name} over {routed}": asdict(compare([b - a for a, b in zip(losses[routed], losses[name], strict=True)]))
        for routed, others in PAIRS.items()
        for name in (*others, *(f"{routed}{end}" for end in FROM_ROUTED))
        if {routed, name} <= set(losses)
    }
    return {
        "swept": tried,
        "chosen": {name: asdict(arm) for name, arm in chosen.items()},
        "tested": tested,
        "nats": {name: statistics.mean(found) for name, found in losses.items()},
        "over_routed": over,
    }


def main() -> None:
    """Sweep, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/routing_pays.json")
    parser.add_argument("--texts", type=int, default=10, help="of each client to learn from")
    parser.add_argument("--methods", nargs="+", choices=tuple(swept()), default=tuple(swept()))
    parser.add_argument("--folder", type=Path, default=cache_dir() / "bem-domains/routing_pays")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made_by, begin = about(), time.perf_counter()
    found = {
        "what": f"{len(CLIENTS)} clients, {arguments.texts} texts each, SmolLM2-135M-Instruct",
        "clients": len(CLIENTS),
        "texts": arguments.texts,
        "most_trainable": MOST,
        "cut_error": cut(UPPER[0]).error(BemConfig(rank=4, level="prefix", chunk_tokens=4, prefix_tokens=4)),
        **study(Results(arguments.folder, arguments.texts), arguments.methods),
    }
    for name, over in found["over_routed"].items():
        print(f"{name}: {over['mean']:+.4f} ({over['low']:+.4f} to {over['high']:+.4f})")
    if set(arguments.methods) == set(swept()):
        found |= {"seconds": round(time.perf_counter() - begin), **made_by}
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
