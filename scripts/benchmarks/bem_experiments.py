#!/usr/bin/env python3
# ruff: noqa: E402
"""Runs an experiment of a file: a routed adapter beside a LoRA of as many numbers, by one command.

    python scripts/benchmarks/bem_experiments.py scripts/benchmarks/bem_experiments/pt1.yaml
    # writes docs/benchmarks/bem_pt1.json

The file says all that decides the result: model, rows, seeds, the adapter's `BemConfig`, `TrainSettings`,
`LossWeights`, the LoRA's rank. `result` has the same bits again on the same machine; `measured` has times. In each of
`answers` an adapter answers prompts one after another, as a server without batches does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
import yaml
from torch import nn

from flops import flops
from gates import budget
from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.evaluation.budget import solve
from probemon.adapters.bem.evaluation.held_out import label_losses
from probemon.adapters.bem.evaluation.profiler import peak_memory
from probemon.adapters.bem.lessons import make_batches, make_lesson, split
from probemon.adapters.bem.losses import Batch, LossWeights
from probemon.adapters.bem.sites import find_sites
from probemon.adapters.bem.training import TrainSettings, evaluate, fit, mode, train
from probemon.bundled import load_bundled
from probemon.errors import ConfigError
from probemon.util.checks import check_settings
from probemon.util.files import write_text_atomically
from provenance import about
from turns import median_ratio, take_turns

ASKED = {"p95_ms": 500.0, "requests_a_minute": 1000.0, "memory": 0.2}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One file. `rows`: a file of rows beside it, as `bem train` takes. `answers`: `requests`, of `tokens` each.
    `rounds`: of forwards that are timed in turns.
    """

    name: str
    model: str
    rows: str
    seeds: tuple[int, ...]
    lora_rank: int
    config: Mapping[str, Any]
    train: Mapping[str, Any]
    weights: Mapping[str, Any]
    answers: Mapping[str, int]
    batch: int = 4
    most_tokens: int = 128
    rounds: int = 30


def read(file: Path) -> Experiment:
    """Read a file. Raises `ConfigError` for what is no experiment."""
    try:
        said = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"{file} is no experiment: give {', '.join(field.name for field in fields(Experiment))}")
    check_settings(Experiment, said)
    try:
        return Experiment(**{**said, "seeds": tuple(said.get("seeds", ()))})
    except TypeError as error:
        raise ConfigError(f"{file}: {error}") from None


def run(file: Path) -> dict[str, Any]:
    """Run an experiment at every seed; times are of the first."""
    one = read(file)
    rows_file = file.parent / one.rows
    rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
    model, tokenizer = _load(one.model)
    model.requires_grad_(False)
    lessons = [make_lesson(row, f"{one.rows}, line {i + 1}", tokenizer, one.most_tokens) for i, row in enumerate(rows)]
    groups = sorted({row["group"] for row in rows})
    documents = [groups.index(row["group"]) for row in rows]
    found: dict[str, Any] = {"seeds": []}
    measured: dict[str, Any] = {}
    for seed in one.seeds:
        parts = split(documents, {"train": 0.75, "test": 0.25}, seed=seed)
        pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        batches = {name: list(make_batches([lessons[i] for i in at], one.batch, pad)) for name, at in parts.items()}
        losses, costs = {"bare": evaluate(model, batches["test"])}, dict[str, dict[str, float]]()
        with _lora(model, one, seed) as (lora, learning):
            _train_lora(lora, learning, batches["train"], _settings(one, seed))
            losses["lora"] = evaluate(lora, batches["test"])
            costs["lora"] = _costs(lora, model, learning, batches["test"][0])
            n_lora = sum(parameter.numel() for parameter in learning)
        config = solve(model, replace(BemConfig.from_dict(one.config), seed=seed), n_lora).config
        with attach_bem(model, config) as bem:
            train(bem, batches["train"], _settings(one, seed), LossWeights(**one.weights))
            losses["routed"] = evaluate(model, batches["test"])
            costs["routed"] = _costs(model, model, list(bem.parameters()), batches["test"][0], bem)
            hashed = hashlib.sha256()
            for name, tensor in sorted(bem.state_dict().items()):
                hashed.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
            if not measured:
                prompts = [rows[i]["prompt"] for i in parts["test"]]
                measured = {"answers": _answers(bem, tokenizer, prompts, **one.answers)}
                measured["forward"] = _forward(model, bem, batches["test"][0], one.rounds)
        found["seeds"].append({
            "seed": seed, "nats": losses, "sha256": hashed.hexdigest(), "costs": costs,
            "config": {key: value for key, value in asdict(config).items() if value != getattr(BemConfig(), key)},
            "gates": {gate.name: [gate.verdict, gate.why] for gate in budget(costs["routed"], costs["lora"])},
        })  # fmt: skip
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (file, rows_file)}
    return {"experiment": one.name, "files": hashes, "result": found, "measured": measured}


def _load(name: str) -> tuple[Any, Any]:
    if name == "demo":
        return load_bundled(torch.float32)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)


def _settings(one: Experiment, seed: int) -> TrainSettings:
    return TrainSettings(**{**one.train, "seed": seed})


@contextmanager
def _lora(model: Any, one: Experiment, seed: int) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """A LoRA on attention outputs and MLPs of the layers of the routed adapter."""
    from peft import LoraConfig, get_peft_model

    sites = find_sites(model, replace(BemConfig(), layers=BemConfig.from_dict(one.config).layers))
    names = [name for name, module in model.named_modules() if any(module is site.module for site in sites)]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by an older name
        torch.manual_seed(seed)
        lora = get_peft_model(model, LoraConfig(r=one.lora_rank, lora_alpha=2 * one.lora_rank, target_modules=names))
    try:
        yield lora, [parameter for parameter in lora.parameters() if parameter.requires_grad]
    finally:
        lora.unload()


def _train_lora(lora: Any, learning: list[nn.Parameter], batches: Sequence[Batch], settings: TrainSettings) -> None:
    def loss_of(batch: Batch) -> Any:
        sums, counts = label_losses(lora, batch)
        return (sums.sum() / counts.sum()).float(), {}

    with mode(lora, training=True):
        fit(learning, loss_of, batches, replace(settings, multipliers={}))


@torch.no_grad()
def _costs(
    steered: Any, model: Any, learning: Sequence[nn.Parameter], batch: Batch, bem: Bem | None = None
) -> dict[str, float]:
    """Numbers that learn, operations a token that are added to the model's, highest memory of a forward."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    call = partial(steered, **inputs, use_cache=False)
    whole, memory = flops(call), peak_memory(call)
    with bem_off(bem) if bem is not None else steered.disable_adapter():
        alone = flops(partial(steered, **inputs, use_cache=False))
    n_tokens = batch["input_ids"].numel()
    return {
        "parameters": sum(parameter.numel() for parameter in learning),
        "operations": round((whole - alone) / n_tokens),
        "memory": memory,
    }


@contextmanager
def bem_off(bem: Bem) -> Iterator[None]:
    """In the block the adapter is off its model."""
    bem.detach()
    try:
        yield
    finally:
        bem.attach()


def _answers(bem: Bem, tokenizer: Any, prompts: Sequence[str], requests: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of an answer (p50, p95 with 95 % intervals), requests a minute, the adapter's share of memory; and
    which of what was asked for holds.
    """
    ready = [_prompt(tokenizer, prompt) for prompt in prompts]
    at = iter(range(1 << 30))
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}

    def answer() -> None:
        bem.host.generate(**ready[next(at) % len(ready)], **how, pad_token_id=tokenizer.pad_token_id)

    timed = take_turns({"answer": answer}, requests, n_warm_up=1)["answer"]
    found: dict[str, Any] = {"requests": requests, "tokens": tokens}
    for name, q in (("p50", 0.5), ("p95", 0.95)):
        one = timed.quantile(q)
        found[f"{name}_ms"] = [None if x is None else round(1e3 * x, 1) for x in (one.value, one.low, one.high)]
    found["requests_a_minute"] = round(60 * requests / sum(timed.wall), 1)
    own, host = (sum(p.nbytes for p in of.parameters()) for of in (bem, bem.host))
    with_adapter = peak_memory(answer)
    with bem_off(bem):
        bare = peak_memory(answer)
    found["memory"] = round((own + max(0, with_adapter - bare)) / (host + bare), 4)
    found["holds"] = {
        "p95_ms": found["p95_ms"][0] < ASKED["p95_ms"],
        "requests_a_minute": found["requests_a_minute"] > ASKED["requests_a_minute"],
        "memory": found["memory"] < ASKED["memory"],
    }
    return found


def _prompt(tokenizer: Any, prompt: str) -> dict[str, torch.Tensor]:
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}]
        said: dict[str, torch.Tensor] = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return dict(said)
    return {name: value for name, value in tokenizer(prompt, return_tensors="pt").items() if name != "token_type_ids"}


@torch.no_grad()
def _forward(model: Any, bem: Bem, batch: Batch, rounds: int) -> dict[str, Any]:
    """Milliseconds of a forward of a batch, and its median ratio to the bare model's in the same round."""
    call = partial(model, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)

    def bare() -> None:
        with bem_off(bem):
            call()

    timed = take_turns({"routed": call, "bare": bare}, rounds, n_warm_up=1)
    ratio = median_ratio(timed["routed"], timed["bare"])
    return {
        "p50_ms": round(1e3 * timed["routed"].quantile(0.5).value, 1),
        "over_bare": [None if x is None else round(x, 4) for x in (ratio.value, ratio.low, ratio.high)],
    }


def main() -> None:
    """Run a file, write its result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, help="default: docs/benchmarks/bem_NAME.json, by the file's name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made_by, begin = about(), time.perf_counter()
    found = run(arguments.file) | {"seconds": 0.0, **made_by}
    found["seconds"] = round(time.perf_counter() - begin, 1)
    out = arguments.out or ROOT / f"docs/benchmarks/bem_{arguments.file.stem}.json"
    write_text_atomically(out, json.dumps(found, indent=1) + "\n")
    for seed in found["result"]["seeds"]:
        gates = ", ".join(f"{name} {verdict}" for name, (verdict, _) in seed["gates"].items())
        print(f"seed {seed['seed']}: " + ", ".join(f"{k} {v:.4f}" for k, v in seed["nats"].items()) + f"; {gates}")
    print(json.dumps(found["measured"]))


if __name__ == "__main__":
    main()
