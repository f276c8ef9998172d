"""Losses an adapter is trained on: what it should say, how far it may go from its host, and how its codes should
behave.

    losses = adapter_losses(bem, {"input_ids": ids, "attention_mask": mask, "labels": labels}, LossWeights(kl=0.1))
    losses.total.backward()                    # gradients for the adapter's parameters alone
    losses.terms["kl"]                         # every term by itself, before its weight

    lm             cross-entropy of each label, given the tokens before it
    kl             KL(steered || bare host), mean over tokens; the bare host is the same model with the adapter silenced
    entropy        entropy of a token's shares less that of their mean over tokens, over log r: from -1 (sure, and
                   all in use) to 0
    update         mean over tokens of the Frobenius norm of the update over all sites, before governance
    decorrelation  mean squared correlation between dimensions of the codes
    flips          max(0, soft flips - 0.1)^2
    operations     a token, that sites are expected to ask for, under level="learned" (`probemon.adapters.bem.levels`)

A token's shares are `c_i^2 / |c|^2`. Entropy alone, with either sign, rewards a fault: a router that gives every token
to one dimension has the smallest, and one that does not decide has the largest. The difference of the two entropies,
which is minus the mutual information of token and dimension, is 0 for both. Entropy, update, decorrelation and flips
are of the codes that sites take: the mean over those of chunk-coded sites and those of the others. Under
level="learned" the others are taken to take token codes, whatever they have chosen.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.controller import Codes
from probemon.adapters.bem.forms.form import Form
from probemon.adapters.bem.governance import decorrelation, flip_penalty, frobenius_squared, gram
from probemon.adapters.bem.levels import expected_operations
from probemon.adapters.bem.packing import packing_of
from probemon.adapters.bem.sites import SiteUpdate
from probemon.errors import BemError, ConfigError, NotSupportedHost
from probemon.host.model import unwrap
from probemon.util.checks import check_number

Batch = Mapping[str, Tensor]
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What each term is multiplied by. A term of weight 0 is not computed. Raises `ConfigError`.

    The defaults are those of the source, which gives no number for `decorrelation`.
    """

    lm: float = 1.0
    kl: float = 0.05
    entropy: float = 0.01
    update: float = 0.001
    decorrelation: float = 0.01
    flips: float = 0.1
    operations: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            check_number(f"the weight of {name}", value, low=0, remedy="give 0 or more")
        if not any(dataclasses.asdict(self).values()):
            raise ConfigError("every weight is 0: there is nothing to learn from")


@dataclass(frozen=True, eq=False)
class Losses:
    """What `adapter_losses` returns.

    `total`: the weighted sum, with a gradient.
    `terms`: unweighted scalars by name.
    `logits [B, T, V]`: of the steered host.
    """

    total: Tensor
    terms: Mapping[str, Tensor]
    logits: Tensor


def adapter_losses(bem: Bem, batch: Batch, weights: LossWeights | None = None) -> Losses:
    """Compute all terms on one batch: `input_ids [B, T]`, optionally `attention_mask [B, T]` and `labels [B, T]` (-100:
    not counted; without them, the tokens).

    It takes one forward of the host, and with `kl` one more without the adapter. Raises `BemError` where the adapter is
    not on its host, `ConfigError` for a batch of padding alone or without a label.
    """
    if weights is not None and not isinstance(weights, LossWeights):
        raise ConfigError(f"weights is {weights!r}: give LossWeights(lm=..., ...), or None for the defaults")
    weights = weights or LossWeights()
    inputs = forward_inputs(bem.host, batch)
    with frozen(bem.host), recorded_codes(bem) as recorded:
        logits: Tensor = bem.host(**inputs, use_cache=False).logits
    real, taken = real_tokens(batch), codes_taken(bem, recorded[-1])
    packing = recorded[-1].packing
    if not bool(real.any()):
        raise ConfigError("a batch has no token, only padding: leave it out")
    terms: dict[str, Tensor] = {}
    if weights.lm:
        targets = next_labels(bem.host, batch).flatten()
        if not bool((targets != -100).any()):
            raise ConfigError(
                "a batch has no label behind a token, so there is nothing to predict: leave it out, or give"
                " LossWeights(lm=0)"
            )
        terms["lm"] = nn.functional.cross_entropy(_wide(logits[:, :-1].flatten(0, 1)), targets, ignore_index=-100)
    if weights.kl:
        terms["kl"] = kl_to_base(logits, base_logits(bem, inputs), real)
    if packing is not None:  # what follows asks which token comes after which
        real, taken = packing.real, {chunked: packing.split(codes) for chunked, codes in taken.items()}
    if weights.entropy:
        terms["entropy"] = _mean(share_entropy(codes, real) for codes in taken.values())
    if weights.update:
        terms["update"] = update_norm(bem, taken, real)
    if weights.decorrelation:
        terms["decorrelation"] = _mean(decorrelation(codes, real) for codes in taken.values())
    if weights.flips:
        terms["flips"] = _mean(flip_penalty(codes, real, weight=1.0) for codes in taken.values())
    if weights.operations:
        n_tokens = max(1, round(float(real.sum()) / len(real)))
        terms["operations"] = expected_operations(bem, n_tokens)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for name, term in terms.items():
        total = total + getattr(weights, name) * term.to(logits.device)
    return Losses(total, {name: term.detach() for name, term in terms.items()}, logits)


# -- the terms ---------------------------------------------------------------------------------------


def kl_to_base(steered: Tensor, base: Tensor, real: Tensor) -> Tensor:
    """Return the mean KL(steered || base) in nats over real tokens: logits `[B, T, V]`. `base` gets no gradient."""
    log_p = _wide(steered[real]).log_softmax(dim=-1)
    log_q = _wide(base[real].detach()).log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()


def share_entropy(codes: Tensor, real: Tensor) -> Tensor:
    """Return the mean entropy of a token's shares less the entropy of their mean, over log r, in [-1, 0]: codes
    `[B, T, r]`, real `[B, T]` bool.

    It is 0 for one dimension, and where no token is real.
    """
    rank, squares = codes.shape[-1], codes[real].square()
    if rank < 2 or len(squares) == 0:
        return codes.new_zeros(())
    shares = (squares + _TINY) / (squares + _TINY).sum(dim=-1, keepdim=True)
    marginal = shares.mean(dim=0)
    return (_entropy(shares).mean() - _entropy(marginal)) / math.log(rank)


def update_norm(bem: Bem, taken: Mapping[bool, Tensor], real: Tensor) -> Tensor:
    """Mean over real tokens of `sqrt(sum over sites |s U diag(c) V^T|^2)`, or of what another form makes of c, with
    gradients to codes and parameters; `taken` as `codes_taken` gives it.
    """
    total = torch.zeros(int(real.sum()), dtype=torch.float32, device=real.device)
    for chunked, codes in taken.items():
        of_group = [bem.updates[site.key] for site in bem.sites if site.chunked == chunked]
        if bem.config.form != "low_rank":
            for form in of_group:
                total = total + cast(Form, form).frobenius(codes[real]).square().to(total.device)
            continue
        updates = [cast(SiteUpdate, update) for update in of_group]
        grams = torch.stack([gram(update.U, update.V, bem.config.scale).to(codes.device) for update in updates])
        total = total + frobenius_squared(codes[real].to(grams.dtype), grams).sum(dim=-1)
    return (total + _TINY).sqrt().mean()  # at U = 0 the root alone has no gradient


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _entropy(shares: Tensor) -> Tensor:
    return -(shares * shares.log()).sum(dim=-1)


def _mean(terms: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(terms)).mean()


# -- adapters and batches ----------------------------------------------------------------------------


def check_learnable(bem: Bem) -> None:
    """Raise `ConfigError` for an adapter that cannot learn: one with a `FallbackPolicy`, for codes that fell back teach
    the controller nothing, or on a host made in inference mode.
    """
    if not isinstance(bem, Bem):
        raise ConfigError(f"{type(bem).__name__} is no adapter: give what attach_bem returned")
    if bem.fallback is not None:
        raise ConfigError(
            "the adapter has a FallbackPolicy, and where it falls back the controller learns nothing: attach it without"
            " fallback= to train or distil it"
        )
    if any(parameter.is_inference() for parameter in bem.host.parameters()):
        raise ConfigError(
            "the host was made in torch.inference_mode(), and nothing can be learned through it: load it outside that"
            " block"
        )


def host_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return what of a batch is for the host; the rest is for losses and rewards. Raises `ConfigError` for what is no
    batch: whoever learns from one, or measures on it, calls this first.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"a batch is a {type(batch).__name__}: give a sequence of batches, each with its tensors by name, as"
            " [{'input_ids': ids, 'labels': labels}]"
        )
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
        if isinstance(ids, Tensor):
            problem = f"of shape {tuple(ids.shape)} and {ids.dtype}"
        elif ids is not None:
            problem = f"a {type(ids).__name__}"
        else:
            problem = "not among " + (", ".join(batch) or "nothing")
        raise ConfigError(f"a batch's input_ids are {problem}: give whole numbers [B, T] in a tensor")
    for name in ("attention_mask", "labels"):
        if batch.get(name) is not None:
            token_values(batch, name)
    return {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}


def forward_inputs(host: nn.Module, batch: Batch, decoder: nn.Module | None = None) -> dict[str, Tensor]:
    """Return what of a batch is for a forward of the host, or of its `decoder` alone: with padding before a token also
    the positions that generate() would give, since without them some hosts count columns, or forget the mask.

    Raises as `host_inputs`; `NotSupportedHost` for a decoder that the host cannot be told positions for.
    """
    inputs, real = host_inputs(batch), real_tokens(batch)
    padded = bool((real[:, 1:] & ~real[:, :-1]).any())
    if inputs.get("position_ids") is not None or not padded or not _takes_positions(unwrap(host)):
        return inputs
    if decoder is not None and not _takes_positions(decoder):
        raise NotSupportedHost(
            f"{type(host).__name__} is told positions and its {type(decoder).__name__} is not, so that padding before a"
            " prompt would move them: give prompts of one length together, without padding"
        )
    return {**inputs, "position_ids": (real.long().cumsum(dim=1) - 1).masked_fill(~real, 0)}


def _takes_positions(module: nn.Module) -> bool:
    """Whether generate() would give it `position_ids`."""
    return "position_ids" in inspect.signature(module.forward).parameters


def token_values(batch: Batch, name: str) -> Tensor:
    """Return what a batch has for each token `[B, T]`. Raises `ConfigError` for another shape."""
    values, ids = batch[name], batch["input_ids"]
    if not isinstance(values, Tensor) or values.shape != ids.shape:
        problem = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ConfigError(
            f"{name} of a batch are {problem}, its input_ids of {tuple(ids.shape)}: give one for each token, in a"
            " tensor"
        )
    return values


def masked_tokens(batch: Batch, name: str) -> Tensor:
    """Return which columns are tokens `[B, T]` bool at which the batch's mask `name`, if it has one, is not 0. Raises
    `ConfigError` for a mask of another shape.
    """
    real = real_tokens(batch)
    return real if batch.get(name) is None else real & (token_values(batch, name) != 0).to(real.device)


def real_tokens(batch: Batch) -> Tensor:
    """Return which columns are tokens `[B, T]` bool."""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask != 0


def next_labels(host: nn.Module, batch: Batch) -> Tensor:
    """Return what is to be predicted at each column but the last `[B, T - 1]`: the next one's label (without labels the
    token), -100 where that or this one is padding, which predicts nothing, or where the next one begins a sequence of a
    packed row. Raises `NotSupportedDecoding` as a packed forward of the host with an adapter does.
    """
    labels, real = batch["input_ids"] if batch.get("labels") is None else batch["labels"], real_tokens(batch)
    foretold = real[:, 1:] & real[:, :-1]
    inputs = host_inputs(batch)
    packing = packing_of(unwrap(host), {**inputs, "use_cache": False}) if "position_ids" in inputs else None
    if packing is not None:
        foretold = foretold & ~packing.starts[:, 1:].to(foretold.device)
    return labels[:, 1:].masked_fill(~foretold.to(labels.device), -100)


def codes_taken(bem: Bem, codes: Codes) -> dict[bool, Tensor]:
    """Return the codes `[B, T, r]` that sites take, before governance: those of sites that take chunk codes alone
    (True), and those of the others (False).
    """
    return {
        chunked: codes.of("chunk") if chunked else codes.adaptive()
        for chunked in sorted({site.chunked for site in bem.sites})
    }


def applied_codes(bem: Bem, codes: Codes) -> dict[str, Tensor]:
    """Return codes `[B, T, ..]` by site key as they are applied in evaluation mode, within the limits."""
    return {key: code.unflatten(0, codes.level.shape) for key, code in bem.limited(codes).items()}


@contextmanager
def recorded_codes(bem: Bem) -> Iterator[list[Codes]]:
    """In the block, record the codes of every forward in the list. Raises `BemError` where the adapter is off, or no
    forward was run.
    """
    if not bem.open:
        raise BemError("the adapter is not on its host: attach it before it is trained")
    recorded: list[Codes] = []
    with hooked_codes(bem, recorded.append):
        yield recorded
    if not recorded:
        raise BemError("a forward of the host did not pass the controller: detach the adapter and attach it again")


@contextmanager
def silenced(bem: Bem) -> Iterator[None]:
    """In the block, make every code 0: the host alone, bit for bit, while caches keep what the controller knows."""

    def silence(codes: Codes) -> Codes:
        return codes.replace(**{name: torch.zeros_like(code) for name, code in codes.by_level().items()})

    with hooked_codes(bem, silence):
        yield


@contextmanager
def hooked_codes(bem: Bem, call: Callable[[Codes], Codes | None]) -> Iterator[None]:
    """In the block, run `call(codes)` at every forward of this thread, and take what it returns in their place. Other
    threads generate as they did.
    """
    thread = threading.get_ident()

    def hook(controller: nn.Module, args: Any, codes: Codes) -> Codes | None:
        return call(codes) if threading.get_ident() == thread else None

    handle = bem.controller.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def base_logits(bem: Bem, inputs: Batch) -> Tensor:
    """Return logits `[B, T, V]` of the bare host, without a gradient or dropout, which is no part of what it says."""
    with torch.no_grad(), silenced(bem), mode(bem.host, training=False):
        logits: Tensor = bem.host(**inputs, use_cache=False).logits
    return logits


@contextmanager
def mode(host: nn.Module, *, training: bool) -> Iterator[None]:
    """In the block, put the host into training or evaluation mode; afterwards every module is in the one it was in."""
    before = [(module, module.training) for module in host.modules()]
    host.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """In the block, make no gradient for these parameters."""
    changed = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)
