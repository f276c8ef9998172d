"""Adapters that learn texts of `domains.py`, each with about as many trainable numbers, and what they leave.

    result = learned(data, "low_rank", seed=0, rate=3e-3)          # nats a token by domain, numbers, codes frozen, ..
    result = Results(folder).of(data, "low_rank", seed=0)          # from its file, if it was learned before

A LoRA of rank 19 on attention outputs and MLPs gives the budget; the others take the sizes that come nearest to it. All
see the same batches in the same order, and start as the host: bit for bit. `RATES` are tried by each method of
`CHOOSE_RATE` at the first seed, and the one that its validation part likes best serves all seeds; the others learn at
the first of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domains import DOMAINS, N_HEADER, Domains
from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.evaluation.budget import solve
from probemon.adapters.bem.losses import Batch, hooked_codes, recorded_codes
from probemon.adapters.bem.training import TrainSettings, evaluate, fit
from probemon.util.files import write_text_atomically

N_STEPS, RATES = 100, (1e-2, 3e-3, 3e-2)
LORA_RANK = 19
SAME_SITES = ("o_proj", "down_proj")
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORAS = {"lora": (SAME_SITES, LORA_RANK), "lora everywhere": (EVERYWHERE, 6)}
X_LORA = (3, 6)  # experts, rank of each; a gate for each site, of the last hidden state
# Chunks of the header's length: its codes steer from the word on. Neither a LoRA nor X-LoRA has limits: none here.
COMMON: dict[str, Any] = {
    "level": "prefix", "chunk_tokens": N_HEADER, "prefix_tokens": N_HEADER, "spectral_cap": None, "width": 8,
}  # fmt: skip
ROUTED: dict[str, dict[str, Any]] = {
    "low_rank": {},
    "head_groups": {"form": "head_groups", "sites": ("o",), "groups": 9},
    "rank_mask": {"form": "rank_mask", "active": 6},
    "kronecker": {"form": "kronecker", "terms": 1},
    "film": {"form": "film", "bound": 1.0},
}
CHOOSE_RATE = (*LORAS, "x-lora", "low_rank")
METHODS = ("base", *LORAS, "x-lora", *ROUTED)


def budget() -> int:
    """Trainable numbers of the LoRA on the same sites."""
    return LORA_RANK * (576 + 576 + 1536 + 576)


def config_of(host: Any, method: str, seed: int) -> BemConfig:
    """The routed adapter of that form which comes nearest to the budget; its update has the scale of the LoRA's."""
    solved = solve(host, BemConfig(seed=seed, **{**COMMON, **ROUTED[method]}), budget()).config
    return replace(solved, alpha=2.0 * (solved.terms or solved.rank))


def made(host: Any, method: str, seed: int) -> tuple[Any, Bem | None, list[nn.Parameter]]:
    """A fresh adapter on a host: the model to run, the adapter where it is ours, what learns."""
    if method == "base":
        return host, None, []
    if method in ROUTED:
        bem = attach_bem(host, config_of(host, method, seed))
        return host, bem, list(bem.parameters())
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by an older name
        torch.manual_seed(seed)
        if method == "x-lora":
            model = _x_lora(host)
        else:
            modules, rank = LORAS[method]
            model = get_peft_model(host, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(modules)))
    return model, None, [parameter for parameter in model.parameters() if parameter.requires_grad]


def _x_lora(host: Any) -> Any:
    """Experts and gate that learn together. PEFT reads experts from folders: fresh ones are written and read."""
    from peft import LoraConfig, XLoraConfig, get_peft_model

    n, rank = X_LORA
    with tempfile.TemporaryDirectory() as folder:
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(SAME_SITES), task_type="CAUSAL_LM")
        for i in range(n):
            expert = get_peft_model(host, config)
            expert.save_pretrained(f"{folder}/{i}")
            host = expert.unload()
        gate = XLoraConfig(
            task_type="CAUSAL_LM",
            hidden_size=host.config.hidden_size,
            adapters={str(i): f"{folder}/{i}" for i in range(n)},
            layerwise_scalings=True,
            use_trainable_adapters=True,
            xlora_depth=1,
        )
        return get_peft_model(host, gate)


def loss_of(model: Any, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def learned(data: Domains, method: str, seed: int, rate: float) -> dict[str, Any]:
    """Train one adapter and measure it; nats a token of the answers, by domain, of words that it never saw."""
    begin = time.process_time()
    train, choose, test = data.parts(seed)
    model, bem, parameters = made(data.host(), method, seed)
    if parameters:
        settings = TrainSettings(n_steps=N_STEPS, lr=rate, seed=seed)
        fit(parameters, lambda batch: (loss_of(model, batch), {}), train, settings)
    found: dict[str, Any] = {
        "headers": data.kind,
        "method": method,
        "seed": seed,
        "lr": rate,
        "n_trainable": sum(parameter.numel() for parameter in parameters),
        "chosen_by": evaluate(model, choose),
        "held_out": held_out(model, test),
    }
    if bem is not None:
        found |= without_routing(bem, choose, test, seed)
        found["config"] = {name: getattr(bem.config, name) for name in ("rank", "terms", "groups", "active", "width")}
    return found | {"cpu_seconds": round(time.process_time() - begin, 1)}


def held_out(model: Any, test: Mapping[str, Sequence[Batch]]) -> dict[str, float]:
    """Mean nats a token of each domain, and of all answers ("all")."""
    losses = {domain: evaluate(model, batches) for domain, batches in test.items()}
    counts = {domain: sum(int((b["labels"] != -100).sum()) for b in batches) for domain, batches in test.items()}
    return losses | {"all": sum(losses[d] * counts[d] for d in losses) / sum(counts.values())}


@torch.no_grad()
def without_routing(
    bem: Bem, choose: Sequence[Batch], test: Mapping[str, Sequence[Batch]], seed: int
) -> dict[str, Any]:
    """What is left with all codes at their mean, and with those of other rows: what routing is worth. And the mean code
    of each domain, at the first token that is to be said.
    """
    level = bem.config.level
    seen: dict[str, list[Tensor]] = {}
    for batch in choose:
        with recorded_codes(bem) as recorded:
            bem.host(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        for domain in DOMAINS:
            ours = batch["domain"] == DOMAINS.index(domain)
            seen.setdefault(domain, []).append(recorded[-1].of(level)[ours, N_HEADER])
    codes_by_domain = {domain: torch.cat(codes) for domain, codes in seen.items()}
    pool, generator = torch.cat(list(codes_by_domain.values())), torch.Generator().manual_seed(seed)

    def frozen(codes: Any) -> Any:
        return codes.replace(**{level: pool.mean(dim=0).expand(codes.of(level).shape)})

    def shuffled(codes: Any) -> Any:
        code = codes.of(level)
        others = pool[torch.randint(len(pool), code.shape[:1], generator=generator)]
        return codes.replace(**{level: others[:, None].expand(code.shape).clone()})

    found: dict[str, Any] = {"code_mean": {domain: c.mean(dim=0).tolist() for domain, c in codes_by_domain.items()}}
    for name, change in (("frozen", frozen), ("shuffled", shuffled)):
        with hooked_codes(bem, change):
            found[f"held_out_{name}"] = held_out(bem.host, test)
    return found


class Results:
    """A file for each kind of header, method, seed and rate, written when it is done: a study that was stopped goes on
    where it was. Empty the folder after a change of the adapters.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, data: Domains, method: str, seed: int, rate: float) -> dict[str, Any]:
        name = f"{data.kind}-{method}-{seed}-{rate:g}".replace(" ", "_").replace(",", "")
        file = self.folder / f"{name}.json"
        if file.is_file():
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return found
        found = learned(data, method, seed, rate)
        told = f"{data.kind} {method:22s} seed {seed} lr {rate:g}: {found['held_out']['all']:.4f}"
        print(f"{told} ({found['cpu_seconds']} s)", file=sys.stderr)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps(found, indent=1))
        return found

    def of(self, data: Domains, method: str, seed: int) -> dict[str, Any]:
        """At the rate that the first seed's validation part likes best, with what was tried."""
        rates = RATES if method in CHOOSE_RATE else RATES[:1]
        tried = [self.at(data, method, 0, rate) for rate in rates]
        best = min(tried, key=lambda one: one["chosen_by"])
        found = self.at(data, method, seed, best["lr"])
        return {**found, "tried": {f"{one['lr']:g}": round(one["chosen_by"], 4) for one in tried}}
