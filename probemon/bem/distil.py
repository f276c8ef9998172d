"""Distillation to a static LoRA: one update for all tokens in place of a routed one, in PEFT's format.

    found = distil(bem, batches)  # batches: dicts of input_ids, attention_mask; what the adapter is used on
    found.method, found.error  # ("least_squares", 0.13): 13 % of the squared update is lost
    # Trained, where codes vary much:
    found, history = distil_trained(bem, batches, TrainSettings(n_steps=300, lr=1e-2), rank=16)
    found.save("lora/")  # peft.PeftModel.from_pretrained(model, "lora/") loads it

Of each site, `dW = s U diag(c_t) V^T` becomes `s B A`, with A = V^T and

    constant        B = U diag(c), where every token has the same code: nothing is lost
    mean            B = U diag(mean of c_t)
    least_squares   B = U M, with M [r, r] that which is nearest: the minimum over M of
                    sum_t |U diag(c_t) V^T x_t - U M V^T x_t|^2

The codes are those that are applied, within the limits of governance. The last one needs the inputs x_t, which the
batches give; its solution is `M = (sum_t (c_t o p_t) p_t^T) (sum_t p_t p_t^T)^-1` with p_t = V^T x_t, whatever U is,
and no M of that A is nearer on them. It is near site by site, and on inputs that the routed adapter made.
`distil_trained` trains A and B of all sites together to give the routed host's distribution, by KL(routed || static) in
place of, or beside, the labels of data. It begins twice: with the nearest, the factors of each site made equally large,
which is better where it loses little, and as a LoRA begins, which is better for an adapter that routes much, to which
no LoRA is near; what ends better is kept.
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
from probemon.bem.config import is_int, is_number
from probemon.bem.losses import (
    Batch,
    codes_taken,
    frozen,
    host_inputs,
    host_of,
    labels_after,
    learner,
    mode,
    real_tokens,
    silenced,
    watched,
)
from probemon.bem.sites import Site, SiteUpdate, device_of
from probemon.bem.training import History, TrainSettings, fit
from probemon.core.files import save_tensors, write_text_atomically
from probemon.errors import BemError, BemFileError, ConfigError, NotSupportedHost
from probemon.host.model import find_layers

METHODS = ("constant", "mean", "least_squares")
STARTS = ("nearest", "fresh")
_SAME = 1e-6  # how far codes of norm 1 may be apart and still be one: what rounding leaves of a constant


@dataclass(frozen=True, eq=False)
class StaticLora:
    """A LoRA of one rank: `factors` by module name, `(A [r, in], B [out, r])`; the update is `alpha / rank * B A`.

    `method`: how it was found. `error`: squared distance of its outputs to the routed ones over their squared norm, on
    the batches; None where it was trained, on something else. `start`: of a trained one, what it began with.
    """

    rank: int
    alpha: float
    factors: Mapping[str, tuple[Tensor, Tensor]]
    method: str
    error: float | None
    base_model: str | None = None
    start: str | None = None

    def dense(self, name: str) -> Tensor:
        """What it adds to the weight of a module `[out, in]`."""
        a, b = self.factors[name]
        return self.alpha / self.rank * b @ a

    def save(self, folder: str | Path) -> None:
        """Write `adapter_model.safetensors` and `adapter_config.json`, each whole or not at all; PEFT need not be
        installed.
        """
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
        self.inputs, self.both, self.wanted = (
            self.inputs + p.T @ p,
            self.both + weighted.T @ p,
            self.wanted + weighted.T @ weighted,
        )

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
    """The static LoRA nearest to an attached adapter on `batches`. `method` None: "constant" where codes are,
    "least_squares" otherwise.

    Raises `ConfigError` for another method, no tokens, or "constant" where codes vary; `NotSupportedHost` for a site
    without a weight of its own to add to; `BemError` where the adapter is off.
    """
    learner(bem)
    if bem.config.sparse_eps:
        raise ConfigError(
            f"sparse_eps is {bem.config.sparse_eps}: tokens that are left out have no update, and no static one leaves"
            " any out. Attach it with sparse_eps=None"
        )
    if method not in (None, *METHODS):
        raise ConfigError(f"method {method!r}: expected one of {', '.join(METHODS)}")
    names = {site.key: _name(bem, site) for site in bem.sites}
    moments = _read(bem, batches)
    varied = [site.name for site in bem.sites if not moments[site.key].constant]
    method = method or ("least_squares" if varied else "constant")
    if method == "constant" and varied:
        apart = max(moment.apart for moment in moments.values())
        raise ConfigError(
            f"codes vary at {', '.join(varied[:4])}{' ...' if len(varied) > 4 else ''} (by {apart:.3g}): use method"
            " 'least_squares' or 'mean'"
        )
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
    return StaticLora(
        bem.config.rank,
        bem.config.alpha,
        factors,
        method,
        lost / whole if whole else 0.0,
        getattr(host_of(bem), "name_or_path", None) or None,
    )


def distil_trained(
    bem: Bem,
    batches: Sequence[Batch],
    settings: TrainSettings,
    *,
    rank: int | None = None,
    labels: float = 0.0,
    start: str | None = None,
) -> tuple[StaticLora, History]:
    """A static LoRA trained on `(1 - labels) KL(routed || static) + labels (cross-entropy of the labels)`, the means
    over tokens. The adapter and the host stay as they are.

    Where batches have labels, both are over the tokens before one that counts: what the adapter says where nothing is
    asked of it was never trained, and would take up the rank.

    `rank`: None for the adapter's. The scale of the update, alpha over rank, is the adapter's at every rank.
    `labels`: how much of the loss the labels are, 0 to 1.
    `start`: "nearest" to begin with what `distil` gives, cut or filled up to the rank, "fresh" as a LoRA begins; None
    for both, of which the one is kept whose loss is lower
    over the last tenth of the steps, on the same batches. Of codes that are constant the nearest is exact, and begun
    with alone.

    Raises as `distil` and `train`.
    """
    if rank is not None and not (is_int(rank) and 1 <= rank <= 4096):
        raise ConfigError(f"rank is {rank!r}: give 1 to 4096, or None for the adapter's")
    if not is_number(labels) or not 0 <= labels <= 1:
        raise ConfigError(f"labels is {labels!r}: give 0 (what the adapter says alone) to 1 (the labels alone)")
    if start not in (None, *STARTS):
        raise ConfigError(f"start is {start!r}: give {' or '.join(map(repr, STARTS))}, or None to choose")
    near, host = distil(bem, batches), host_of(bem)
    scale, rank = near.alpha / near.rank, rank or near.rank
    factors: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}

    def add(name: str) -> Any:
        a, b = factors[name]

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output + (scale * (args[0].to(a.dtype) @ a.T) @ b.T).to(output.dtype)

        return hook

    def loss_of(batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        inputs, counted, wanted = host_inputs(batch), *_asked(batch, labels)
        with torch.no_grad():
            routed = host(**inputs, use_cache=False).logits[counted].float().log_softmax(dim=-1)
        with ExitStack() as stack:
            for block in (frozen(host), frozen(bem), silenced(bem)):
                stack.enter_context(block)
            for name in factors:
                stack.callback(host.get_submodule(name).register_forward_hook(add(name)).remove)
            given = host(**inputs, use_cache=False).logits[counted].float().log_softmax(dim=-1)
        terms = {"kl": (routed.exp() * (routed - given)).sum(dim=-1).mean()}
        if labels:
            terms["lm"] = nn.functional.nll_loss(given, wanted.to(given.device))
        return (1 - labels) * terms["kl"] + labels * terms.get("lm", 0.0), {
            name: term.detach() for name, term in terms.items()
        }

    ended: list[tuple[float, StaticLora, History]] = []
    for begin in STARTS if start is None and near.method != "constant" else (start or "nearest",):
        generator = torch.Generator().manual_seed(settings.seed)
        for name, pair in near.factors.items():
            a, b = _begin(*(balanced(*pair) if begin == "nearest" else (pair[0][:0], pair[1][:, :0])), rank, generator)
            factors[name] = (
                nn.Parameter(a.float().to(_device(host, name))),
                nn.Parameter(b.float().to(_device(host, name))),
            )
        with mode(host, training=False):
            history = fit([factor for pair in factors.values() for factor in pair], loss_of, batches, settings)
        trained = {name: (a.detach().cpu(), b.detach().cpu()) for name, (a, b) in factors.items()}
        last = history.losses[-max(1, settings.n_steps // 10) :]
        ended.append(
            (
                sum(last) / len(last),
                StaticLora(rank, scale * rank, trained, "trained", None, near.base_model, begin),
                history,
            )
        )
    return min(ended, key=lambda one: one[0])[1:]


def balanced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product, `A [r, in]`, `B [out, r]`, by its singular values, the largest first, whose square
    roots both have: else the larger factor learns slowly.
    """
    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().T)
    u, values, v = torch.linalg.svd(r_b @ r_a.T)
    n = len(values)  # fewer than r at a module narrower than that
    root = values.sqrt()
    return (root[:, None] * (v[:n] @ q_a.T)).to(a.dtype), (q_b @ u[:, :n] * root).to(b.dtype)


def _begin(a: Tensor, b: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first `rank` directions; where there are fewer, others as a LoRA begins, A at random and B zero."""
    missing, n_in = max(0, rank - len(a)), a.shape[1]
    more = torch.empty(missing, n_in, dtype=torch.float32).uniform_(-(n_in**-0.5), n_in**-0.5, generator=generator)
    return torch.cat([a[:rank], more.to(a)]), torch.cat([b[:, :rank], b.new_zeros(len(b), missing)], dim=1)


def _asked(batch: Batch, labels: float) -> tuple[Tensor, Tensor]:
    """At which tokens something is asked `[B, T]` bool, and what is the label there `[M]`; without labels at every
    token. Raises `ConfigError` where it is at none.
    """
    real = real_tokens(batch)
    if batch.get("labels") is None:
        if labels:
            raise ConfigError(
                f"labels is {labels!r}, and a batch has {', '.join(batch)}: give it labels [B, T], -100 where a token "
                "is not to be counted, or labels=0"
            )
        counted, wanted = real, batch["input_ids"]
    else:
        wanted = nn.functional.pad(labels_after(batch["labels"], real), (0, 1), value=-100)
        counted = wanted != -100
    if not bool(counted.any()):
        raise ConfigError("a batch has no token at which anything is asked: leave it out")
    return counted, wanted[counted]


def _device(host: Any, name: str) -> torch.device:
    return device_of(host.get_submodule(name))


def _name(bem: Bem, site: Site) -> str:
    """What the host calls the module of a site."""
    if not site.mergeable:
        raise NotSupportedHost(
            f"site {site.name} is no plain linear layer of the host: a LoRA has no weight there to add to. Leave"
            f" {site.kind!r} out of sites"
        )
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
