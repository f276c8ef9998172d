"""Distillation of an adapter to a static LoRA in PEFT's format.

    lora = distil(bem, batches)  # batches: dicts of input_ids, attention_mask
    lora.method, lora.error  # ("least_squares", 0.13): 13 % of the squared update is lost
    lora, history = distil_trained(bem, batches, TrainSettings(n_steps=300, lr=1e-2), rank=16)
    lora.save("lora/")

At each site, `dW = s U diag(c_t) V^T` becomes `s B A`, with the A [rank, in] and B [out, rank] that minimise
`sum_t |U diag(c_t) V^T x_t - B A x_t|^2` (`reduced_rank.best_fit`): exactly 0 if every token has the same code. Codes
are taken after governance, other forms as low-rank twins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.forwards import frozen
from probemon.adapters.bem.losses import (
    Batch,
    applied_codes,
    check_learnable,
    forward_inputs,
    mode,
    next_labels,
    real_tokens,
    recorded_codes,
    silenced,
)
from probemon.adapters.bem.reduced_rank import Fit, Sums, best_fit
from probemon.adapters.bem.saved import make_folder, write_tensors
from probemon.adapters.bem.sites import Site, device_of
from probemon.adapters.bem.training import TrainingHistory, TrainSettings, fit
from probemon.adapters.bem.twins import Twin, check_has_twin, low_rank_twin
from probemon.errors import BemError, ConfigError, UnsupportedModel
from probemon.host.model import find_layers
from probemon.util.checks import LARGEST, check_count, check_number
from probemon.util.files import write_text_atomically

STARTS = ("nearest", "fresh")
_MOST_INPUTS = 8_192
_MOST_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class StaticLora:
    """LoRA with updates `alpha / rank * B A`.

    `factors`: `(A [r, in], B [out, r])` by module name.
    `error`: squared distance to the routed outputs over their squared norm; None if trained.
    `start`: what training began with.
    """

    rank: int
    alpha: float
    factors: Mapping[str, tuple[Tensor, Tensor]]
    method: str
    error: float | None
    base_model: str | None = None
    start: str | None = None

    def dense(self, name: str) -> Tensor:
        """Return the update of a module `[out, in]`."""
        a, b = self.factors[name]
        return self.alpha / self.rank * b @ a

    def save(self, folder: str | Path) -> None:
        """Write `adapter_model.safetensors` and `adapter_config.json`, each atomically, without PEFT."""
        folder = Path(folder)
        make_folder(folder)
        tensors = {
            f"base_model.model.{name}.lora_{side}.weight": factor
            for name, pair in self.factors.items()
            for side, factor in zip("AB", pair, strict=True)
        }
        write_tensors(folder / "adapter_model.safetensors", tensors)
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": sorted(self.factors),
        }
        write_text_atomically(folder / "adapter_config.json", json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def distil(
    bem: Bem,
    batches: Sequence[Batch],
    *,
    rank: int | None = None,
    ridge: float | None = 0.0,
) -> StaticLora:
    """Return the static LoRA nearest to an attached adapter on `batches`.

    `rank`: None keeps the adapter's; other forms get the rank of the exact result.
    `ridge`: 0 is nearest on `batches`, and far on other texts unless these have several times as many
    tokens as a site has inputs; None chooses what should be nearest on other texts. See `best_fit`.

    This takes `8 in^2` bytes a site: as many sites at once as fit into 1 GiB, for others the batches are read again.

    Raises `ConfigError` for no tokens, forms without a twin, or sites of over 16,384 inputs; `UnsupportedModel` for
    sites that are not plainly linear; `BemError` if the adapter is off.
    """
    check_learnable(bem)
    check_has_twin(bem.config)
    _check_rank(rank)
    if ridge is not None:
        check_number("ridge", ridge, low=0, high=LARGEST, remedy="give 0 or more, or None to choose it")
    if bem.config.sparse_eps:
        raise ConfigError(
            f"sparse_eps is {bem.config.sparse_eps}: skipped tokens have no update, and a static one skips"
            " none. Attach it with sparse_eps=None"
        )
    names = {site.key: module_name(bem, site) for site in bem.sites}
    twins = {site.key: low_rank_twin(bem.updates[site.key], bem.config) for site in bem.sites}
    fits = _fits(bem, twins, batches, ridge)
    if rank is None:
        exact = max(1, *(of_site.rank for of_site in fits.values()))
        rank = bem.config.rank if bem.config.form == "low_rank" else exact
    factors, lost, total = {}, 0.0, 0.0
    for key, of_site in fits.items():
        a, b = of_site.cut(rank)
        lost, total = lost + of_site.lost(rank), total + of_site.total
        dtype = next(iter(bem.updates[key].state_dict().values())).dtype
        dtype = dtype if dtype.is_floating_point else torch.float32
        factors[names[key]] = (a.to(dtype), b.to(dtype))
    base_model = getattr(bem.host, "name_or_path", None) or None
    error = lost / total if total else 0.0
    # `scale B A` at every rank.
    return StaticLora(rank, bem.config.scale * rank, factors, "least_squares", error, base_model)


def distil_trained(
    bem: Bem,
    batches: Sequence[Batch],
    settings: TrainSettings,
    *,
    rank: int | None = None,
    labels: float = 0.0,
    start: str | None = None,
) -> tuple[StaticLora, TrainingHistory]:
    """Train a static LoRA on `(1 - labels) KL(routed || static) + labels (cross-entropy of the labels)`.

    Means are over tokens; if batches have labels, over those before one, as the adapter was not trained elsewhere.

    `rank`: None for the adapter's; the scale stays.
    `labels`: their weight, 0 to 1.
    `start`: "nearest" begins with `distil(ridge=None)`, balanced; "fresh" as a LoRA, better if codes vary much. None
    tries both and keeps the lower loss of the last tenth of the steps.

    Raises as `distil` and `train`.
    """
    _check_rank(rank)
    remedy = "give 0 (only the adapter) to 1 (only the labels)"
    check_number("labels", labels, low=0, high=1, remedy=remedy)
    if start not in (None, *STARTS):
        raise ConfigError(f"start is {start!r}: give {' or '.join(map(repr, STARTS))}, or None to choose")
    nearest, model = distil(bem, batches, rank=rank, ridge=None), bem.host
    scale, rank = nearest.alpha / nearest.rank, nearest.rank
    factors: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}

    def adding(name: str) -> Any:
        a, b = factors[name]

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output + (scale * (args[0].to(a.dtype) @ a.T) @ b.T).to(output.dtype)

        return hook

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs, counted, targets = forward_inputs(model, batch), *_counted_tokens(model, batch, labels)
        with torch.no_grad():
            routed = model(**inputs, use_cache=False).logits[counted].float().log_softmax(dim=-1)
        with ExitStack() as stack:
            for block in (frozen(model.parameters()), frozen(bem.parameters()), silenced(bem)):
                stack.enter_context(block)
            for name in factors:
                stack.callback(model.get_submodule(name).register_forward_hook(adding(name)).remove)
            static = model(**inputs, use_cache=False).logits[counted].float().log_softmax(dim=-1)
        terms = {"kl": (routed.exp() * (routed - static)).sum(dim=-1).mean()}
        if labels:
            terms["lm"] = nn.functional.nll_loss(static, targets.to(static.device))
        return (1 - labels) * terms["kl"] + labels * terms.get("lm", 0.0), {
            name: term.detach() for name, term in terms.items()
        }

    candidates: list[tuple[float, StaticLora, TrainingHistory]] = []
    for begin in STARTS if start is None else (start,):
        generator = torch.Generator().manual_seed(settings.seed)
        for name, (a, b) in nearest.factors.items():
            a, b = _balanced(a, b) if begin == "nearest" else (a[:0], b[:, :0])
            a, b = _with_rank(a, b, rank, generator)
            device = device_of(model.get_submodule(name))
            factors[name] = (nn.Parameter(a.float().to(device)), nn.Parameter(b.float().to(device)))
        with mode(model, training=False):
            history = fit([factor for pair in factors.values() for factor in pair], loss_of, batches, settings)
        trained = {name: (a.detach().cpu(), b.detach().cpu()) for name, (a, b) in factors.items()}
        lora = StaticLora(
            rank=rank,
            alpha=scale * rank,
            factors=trained,
            method="trained",
            error=None,
            base_model=nearest.base_model,
            start=begin,
        )
        last = history.losses[-max(1, settings.n_steps // 10) :]
        candidates.append((sum(last) / len(last), lora, history))
    return min(candidates, key=lambda candidate: candidate[0])[1:]


def _check_rank(rank: int | None) -> None:
    if rank is not None:
        check_count("rank", rank, least=1, most=4096, remedy="give 1 or more (None: the adapter's)")


def _balanced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors with the same product and equal singular values: a larger one learns slowly, one of 0 never."""
    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().T)
    u, values, v = torch.linalg.svd(r_b @ r_a.T)
    n = int((values > 1e-9 * values.amax()).sum())
    root = values[:n].sqrt()
    return (root[:, None] * (v[:n] @ q_a.T)).to(a.dtype), (q_b @ u[:, :n] * root).to(b.dtype)


def _with_rank(a: Tensor, b: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the first `rank` directions, or more: A random, B zero."""
    missing, n_in = max(0, rank - len(a)), a.shape[1]
    extra = torch.empty(missing, n_in, dtype=torch.float32).uniform_(-(n_in**-0.5), n_in**-0.5, generator=generator)
    return torch.cat([a[:rank], extra.to(a)]), torch.cat([b[:, :rank], b.new_zeros(len(b), missing)], dim=1)


def _counted_tokens(model: nn.Module, batch: Batch, labels: float) -> tuple[Tensor, Tensor]:
    """Return tokens before a label `[B, T]` bool, and labels `[M]`; without labels all."""
    if batch.get("labels") is None:
        if labels:
            raise ConfigError(
                f"labels is {labels!r}, and a batch has {', '.join(batch)}: give it labels [B, T], -100 where a token "
                "is not to be counted, or labels=0"
            )
        counted, targets = real_tokens(batch), batch["input_ids"]
    else:
        targets = nn.functional.pad(next_labels(model, batch), (0, 1), value=-100)
        counted = targets != -100
    if not bool(counted.any()):
        raise ConfigError("a batch has no token that counts: leave it out")
    return counted, targets[counted]


def module_name(bem: Bem, site: Site) -> str:
    """Return the name of a site's module. Raises `UnsupportedModel` if it is not plainly linear."""
    if not site.mergeable:
        raise UnsupportedModel(
            f"site {site.name} is not a plain linear layer of the model: a LoRA has no weight there to add to. Leave"
            f" {site.kind!r} out of sites"
        )
    return next(name for name, module in bem.host.named_modules() if module is site.module)


def _fits(bem: Bem, twins: Mapping[str, Twin], batches: Sequence[Batch], ridge: float | None) -> dict[str, Fit]:
    fits = {}
    for sites in _groups(bem.sites, twins):
        sums = {site.key: Sums.of_sizes(*reversed(twins[site.key].V.shape)) for site in sites}
        for key, codes, x in _tokens(bem, twins, sites, batches):
            p = x @ twins[key].V
            sums[key].add(codes * p, x, p)
        if not any(of_site.n for of_site in sums.values()):
            raise ConfigError("no batch has a token: give what the adapter is used on")
        for key in list(sums):
            twin, of_site = twins[key], sums.pop(key)
            fits[key] = best_fit(twin.U, of_site.own(twin.V), of_site, ridge)
    return fits


def _groups(sites: Sequence[Site], twins: Mapping[str, Twin]) -> list[list[Site]]:
    """Sites whose sums fit into memory together."""
    groups: list[list[Site]] = []
    room = 0
    for site in sites:
        n_in = len(twins[site.key].V)
        if n_in > _MOST_INPUTS:
            raise ConfigError(
                f"site {site.name} has {n_in:,} inputs, and least squares takes at most {_MOST_INPUTS:,}: leave"
                f" {site.kind!r} out of sites"
            )
        n_bytes = 8 * n_in**2
        if n_bytes > room:
            groups.append([])
            room = _MOST_BYTES
        groups[-1].append(site)
        room -= n_bytes
    return groups


def _tokens(
    bem: Bem, twins: Mapping[str, Twin], sites: Sequence[Site], batches: Sequence[Batch]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a site's key with its twin's codes `[M, r]` and inputs `[M, in]`, for each batch and site."""
    decoder, _ = find_layers(bem.host)
    for batch in batches:
        inputs, real = forward_inputs(bem.host, batch, decoder), real_tokens(batch)
        if not bool(real.any()):
            continue
        with (
            mode(bem.host, training=False),
            recorded_codes(bem) as recorded,
            _recorded_inputs(sites) as site_inputs,
        ):
            decoder(**inputs, use_cache=False)
            applied = applied_codes(bem, recorded[-1])
        for site in sites:
            x = site_inputs[site.key].reshape(*real.shape, -1)[real].double().cpu()
            yield site.key, twins[site.key].codes(applied[site.key][real]), x


@contextmanager
def _recorded_inputs(sites: Sequence[Site]) -> Iterator[dict[str, Tensor]]:
    inputs: dict[str, Tensor] = {}

    def recording(key: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            inputs[key] = args[0]

        return hook

    with ExitStack() as stack:
        for site in sites:
            stack.callback(site.module.register_forward_pre_hook(recording(site.key)).remove)
        yield inputs
    if len(inputs) < len(sites):
        raise BemError("a forward of the model did not pass every site: detach the adapter and attach it again")
