"""Distillation to a static LoRA: one update for all tokens in place of a routed one, in PEFT's format.

    found = distil(bem, batches)                      # batches: dicts of input_ids, attention_mask; what the adapter is used on
    found.method, found.error                         # ("least_squares", 0.13): 13 % of the squared update is lost
    found, history = distil_trained(bem, batches, TrainSettings(n_steps=300, lr=1e-2))     # further, where codes vary much
    found.save("lora/")                               # peft.PeftModel.from_pretrained(model, "lora/") loads it

Of each site, `dW = s U diag(c_t) V^T` becomes `s B A`, with A = V^T and

    constant        B = U diag(c), where every token has the same code: nothing is lost
    mean            B = U diag(mean of c_t)
    least_squares   B = U M, with M [r, r] that which is nearest: min over M of sum_t |U diag(c_t) V^T x_t - U M V^T x_t|^2

The codes are those that are applied, within the limits of governance. The last one needs the inputs x_t, which the batches give; its
solution is `M = (sum_t (c_t o p_t) p_t^T) (sum_t p_t p_t^T)^-1` with p_t = V^T x_t, whatever U is, and no M of that A is nearer on them.
It is near site by site, and on inputs that the routed adapter made. `distil_trained` goes on from there: A and B of all sites together
are trained to give the routed host's distribution, by KL(routed || static).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from probemon.bem.attached import Bem
from probemon.bem.losses import (
    Batch,
    codes_taken,
    frozen,
    host_inputs,
    host_of,
    learner,
    mode,
    real_tokens,
    silenced,
    watched,
)
from probemon.bem.sites import Site, SiteUpdate, device_of
from probemon.bem.training import History, TrainSettings, fit
from probemon.errors import BemError, BemFileError, ConfigError, NotSupportedHost
from probemon.host import find_layers
from probemon.packfile import save_tensors, write_text_atomically

METHODS = ("constant", "mean", "least_squares")
_SAME = 1e-6  # how far codes of norm 1 may be apart and still be one: what rounding leaves of a constant


@dataclass(frozen=True, eq=False)
class StaticLora:
    """A LoRA of one rank: `factors` by module name, `(A [r, in], B [out, r])`; the update is `alpha / rank * B A`.

    `method`: how it was found. `error`: squared distance of its outputs to the routed ones over their squared norm, on the batches; None
    where it was trained, on something else.
    """

    rank: int
    alpha: float
    factors: Mapping[str, tuple[Tensor, Tensor]]
    method: str
    error: float | None
    base_model: str | None = None

    def dense(self, name: str) -> Tensor:
        """What it adds to the weight of a module `[out, in]`."""
        a, b = self.factors[name]
        return self.alpha / self.rank * b @ a

    def save(self, folder: str | Path) -> None:
        """Write `adapter_model.safetensors` and `adapter_config.json`, each whole or not at all; PEFT need not be installed."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BemFileError(f"{folder} cannot be made ({error.strerror}): give another folder") from None
        tensors = {}
        for name, (a, b) in self.factors.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.detach().cpu().contiguous()
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.detach().cpu().contiguous()
        handle, made = tempfile.mkstemp(prefix=".adapter-", dir=folder)
        os.close(handle)
        try:
            save_tensors(Path(made), tensors)
            os.replace(made, folder / "adapter_model.safetensors")
        except BaseException:
            Path(made).unlink(missing_ok=True)
            raise
        settings = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self.base_model, "inference_mode": True, "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "target_modules": sorted(self.factors),
        }  # fmt: skip
        write_text_atomically(folder / "adapter_config.json", json.dumps(settings, indent=2) + "\n")


@dataclass(eq=False)
class _Moments:
    """Sums over tokens of one site, in fp64: what any of the methods needs, and what its error is."""

    n: int
    first: Tensor  # [r], the first code
    apart: float  # the largest |c - first|
    size: float  # the largest |c|
    codes: Tensor  # [r], sum of c
    inputs: Tensor  # [r, r], sum of p p^T
    both: Tensor  # [r, r], sum of (c o p) p^T
    wanted: Tensor  # [r, r], sum of (c o p) (c o p)^T

    def add(self, codes: Tensor, p: Tensor) -> None:
        if not self.n:
            self.first = codes[0]
        self.n += len(codes)
        self.apart = max(self.apart, float((codes - self.first).norm(dim=1).max()))
        self.size = max(self.size, float(codes.norm(dim=1).max()))
        weighted = codes * p
        self.codes = self.codes + codes.sum(dim=0)
        self.inputs, self.both, self.wanted = self.inputs + p.T @ p, self.both + weighted.T @ p, self.wanted + weighted.T @ weighted

    @property
    def constant(self) -> bool:
        return self.apart <= _SAME * max(1.0, self.size)

    def error(self, u: Tensor, m: Tensor) -> tuple[float, float]:
        """Sum of `|U (c o p) - U M p|^2`, and of `|U (c o p)|^2`."""
        gram = u.T @ u
        left = self.wanted - m @ self.both.T - self.both @ m.T + m @ self.inputs @ m.T
        return max(0.0, float((gram * left).sum())), float((gram * self.wanted).sum())


@torch.no_grad()
def distil(bem: Bem, batches: Sequence[Batch], method: str | None = None) -> StaticLora:
    """The static LoRA nearest to an attached adapter on `batches`. `method` None: "constant" where codes are, "least_squares" otherwise.

    Raises `ConfigError` for another method, no tokens, or "constant" where codes vary; `NotSupportedHost` for a site without a weight
    of its own to add to; `BemError` where the adapter is off.
    """
    learner(bem)
    if bem.config.sparse_eps:
        raise ConfigError(f"sparse_eps is {bem.config.sparse_eps}: tokens that are left out have no update, and no static one leaves any out. Attach it with sparse_eps=None")
    if method not in (None, *METHODS):
        raise ConfigError(f"method {method!r}: expected one of {', '.join(METHODS)}")
    names = {site.key: _name(bem, site) for site in bem.sites}
    moments = _read(bem, batches)
    varied = [site.name for site in bem.sites if not moments[site.key].constant]
    method = method or ("least_squares" if varied else "constant")
    if method == "constant" and varied:
        apart = max(moment.apart for moment in moments.values())
        raise ConfigError(f"codes vary at {', '.join(varied[:4])}{' ...' if len(varied) > 4 else ''} (by {apart:.3g}): use method 'least_squares' or 'mean'")
    factors, lost, whole = {}, 0.0, 0.0
    for site in bem.sites:
        update, moment = cast(SiteUpdate, bem.updates[site.key]), moments[site.key]
        u, v = update.U.double().cpu(), update.V.double().cpu()
        if method == "least_squares":
            # Inputs may span less than r directions: of all that are nearest, the smallest.
            m = moment.both @ torch.linalg.pinv(moment.inputs, hermitian=True)
        else:
            m = torch.diag(moment.first if method == "constant" else moment.codes / moment.n)
        missing, wanted = moment.error(u, m)
        lost, whole = lost + missing, whole + wanted
        factors[names[site.key]] = (v.T.to(update.V.dtype), (u @ m).to(update.U.dtype))
    return StaticLora(bem.config.rank, bem.config.alpha, factors, method, lost / whole if whole else 0.0, getattr(host_of(bem), "name_or_path", None) or None)


def distil_trained(bem: Bem, batches: Sequence[Batch], settings: TrainSettings) -> tuple[StaticLora, History]:
    """What `distil` gives, trained further on KL(routed || static), the mean over tokens. The adapter and the host stay as they are.

    Raises as `distil` and `train`.
    """
    start, host = distil(bem, batches), host_of(bem)
    factors = {name: (nn.Parameter(a.clone().to(_device(host, name))), nn.Parameter(b.clone().to(_device(host, name)))) for name, (a, b) in start.factors.items()}
    scale = start.alpha / start.rank

    def add(name: str) -> Any:
        a, b = factors[name]

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output + (scale * (args[0].to(a.dtype) @ a.T) @ b.T).to(output.dtype)

        return hook

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs, real = host_inputs(batch), real_tokens(batch)
        with torch.no_grad():
            wanted = host(**inputs, use_cache=False).logits[real].float().log_softmax(dim=-1)
        with ExitStack() as stack:
            for block in (frozen(host), frozen(bem), silenced(bem)):
                stack.enter_context(block)
            for name in factors:
                stack.callback(host.get_submodule(name).register_forward_hook(add(name)).remove)
            given = host(**inputs, use_cache=False).logits[real].float().log_softmax(dim=-1)
        return (wanted.exp() * (wanted - given)).sum(dim=-1).mean(), {}

    with mode(host, training=False):
        history = fit([factor for pair in factors.values() for factor in pair], loss_of, batches, settings)
    trained = {name: (a.detach().cpu(), b.detach().cpu()) for name, (a, b) in factors.items()}
    return StaticLora(start.rank, start.alpha, trained, "trained", None, start.base_model), history


def _device(host: Any, name: str) -> torch.device:
    return device_of(host.get_submodule(name))


def _name(bem: Bem, site: Site) -> str:
    """What the host calls the module of a site."""
    if not site.mergeable:
        raise NotSupportedHost(f"site {site.name} is no plain linear layer of the host: a LoRA has no weight there to add to. Leave {site.kind!r} out of sites")
    return next(name for name, module in host_of(bem).named_modules() if module is site.module)


def _read(bem: Bem, batches: Sequence[Batch]) -> dict[str, _Moments]:
    """Run the adapter over all batches, and keep the sums of each site by its key."""
    rank = bem.config.rank
    zeros = torch.zeros(rank, dtype=torch.float64), torch.zeros(rank, rank, dtype=torch.float64)
    moments = {site.key: _Moments(0, zeros[0], 0.0, 0.0, zeros[0], zeros[1], zeros[1], zeros[1]) for site in bem.sites}
    decoder, _ = find_layers(host_of(bem))
    with mode(host_of(bem), training=False):
        for batch in batches:
            given, real = host_inputs(batch), real_tokens(batch)
            if not bool(real.any()):
                continue
            with watched(bem) as seen, _inputs(bem.sites) as inputs:
                decoder(**given, use_cache=False)
            applied = bem.governor.apply(codes_taken(bem, seen[-1]))
            for site in bem.sites:
                x = inputs[site.key].reshape(*real.shape, -1)[real].double().cpu()
                update = cast(SiteUpdate, bem.updates[site.key])
                moments[site.key].add(applied[site.key][real].double().cpu(), x @ update.V.double().cpu())
    if not any(moment.n for moment in moments.values()):
        raise ConfigError("no batch has a token: give what the adapter is used on")
    return moments


@contextmanager
def _inputs(sites: Sequence[Site]) -> Iterator[dict[str, Tensor]]:
    """For the time of the block, the last input of each site by its key."""
    seen: dict[str, Tensor] = {}

    def keep(key: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen[key] = args[0]

        return hook

    with ExitStack() as stack:
        for site in sites:
            stack.callback(site.module.register_forward_pre_hook(keep(site.key)).remove)
        yield seen
    if len(seen) < len(sites):
        raise BemError("a forward of the host did not pass every site: detach the adapter and attach it again")
