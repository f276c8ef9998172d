"""Losses that train an adapter.

    losses = adapter_losses(bem, {"input_ids": ids, "attention_mask": mask, "labels": labels}, LossWeights(kl=0.1))
    losses.total.backward()
    losses.terms["kl"]

    lm             cross-entropy of labels
    kl             KL(steered || bare model), mean over tokens
    entropy        entropy of a token's shares `c_i^2 / |c|^2` minus that of their mean, over log r: -1 to 0
    update         mean Frobenius norm of a token's updates over all sites, before governance
    decorrelation  mean squared correlation between dimensions of codes
    flips          max(0, soft flips - 0.1)^2
    operations     expected operations a token, under level="learned"
    gates          mean squared correlation between gates, of form="head_groups"
    orthogonality  mean squared cosine between columns of V, or between Kronecker terms

Either entropy alone would reward a router that always takes one dimension, or never decides.

Terms of codes are means over chunk-coded sites and the others, which count as token-coded under level="learned".
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
from probemon.adapters.bem.first_factors import overlap
from probemon.adapters.bem.forms.form import Form
from probemon.adapters.bem.forms.head_groups import gates
from probemon.adapters.bem.forwards import frozen
from probemon.adapters.bem.governance import decorrelation, flip_penalty, frobenius_squared, gram
from probemon.adapters.bem.levels import expected_operations
from probemon.adapters.bem.packing import packing_of
from probemon.adapters.bem.sites import SiteUpdate
from probemon.errors import BemError, ConfigError, UnsupportedModel
from probemon.host.model import unwrap
from probemon.util.checks import check_number

Batch = Mapping[str, Tensor]
_TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the terms; one of weight 0 is not computed. Raises `ConfigError`."""

    lm: float = 1.0
    kl: float = 0.05
    entropy: float = 0.01
    update: float = 0.001
    decorrelation: float = 0.01
    flips: float = 0.1
    operations: float = 0.0
    gates: float = 0.0
    orthogonality: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            check_number(f"the weight of {name}", value, low=0, remedy="give 0 or more")
        if not any(dataclasses.asdict(self).values()):
            raise ConfigError("every weight is 0: there is nothing to learn from")


@dataclass(frozen=True, eq=False)
class Losses:
    """Result of `adapter_losses`.

    `total`: weighted sum, with a gradient.
    `terms`: unweighted, by name.
    `logits [B, T, V]`: of the steered model.
    """

    total: Tensor
    terms: Mapping[str, Tensor]
    logits: Tensor


def adapter_losses(bem: Bem, batch: Batch, weights: LossWeights | None = None) -> Losses:
    """Compute all terms on `input_ids [B, T]`, optionally with `attention_mask` and `labels [B, T]` (-100: not
    counted).

    Raises `BemError` if the adapter is off, `ConfigError` for a batch without tokens or labels.
    """
    if weights is not None and not isinstance(weights, LossWeights):
        raise ConfigError(f"weights is {weights!r}: give LossWeights(lm=..., ...), or None for the defaults")
    weights = weights or LossWeights()
    inputs = forward_inputs(bem.host, batch)
    with frozen(bem.host.parameters()), recorded_codes(bem) as recorded:
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
    if packing is not None:  # the terms below need the order of tokens
        real, taken = packing.real, {chunked: packing.split(codes) for chunked, codes in taken.items()}
    others: dict[str, Callable[[], Tensor]] = {
        "entropy": lambda: _mean(share_entropy(codes, real) for codes in taken.values()),
        "update": lambda: update_norm(bem, taken, real),
        "decorrelation": lambda: _mean(decorrelation(codes, real) for codes in taken.values()),
        "flips": lambda: _mean(flip_penalty(codes, real, weight=1.0) for codes in taken.values()),
        "operations": lambda: expected_operations(bem, max(1, round(float(real.sum()) / len(real)))),
        "gates": lambda: _gate_correlation(bem, taken, real),
        "orthogonality": lambda: overlap(bem.updates.values()),
    }
    terms |= {name: term() for name, term in others.items() if getattr(weights, name)}
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
    """Return the term `entropy` of codes `[B, T, r]` at real tokens `[B, T]` bool."""
    rank, squares = codes.shape[-1], codes[real].square()
    if rank < 2 or len(squares) == 0:
        return codes.new_zeros(())
    shares = (squares + _TINY) / (squares + _TINY).sum(dim=-1, keepdim=True)
    marginal = shares.mean(dim=0)
    return (_entropy(shares).mean() - _entropy(marginal)) / math.log(rank)


def update_norm(bem: Bem, taken: Mapping[bool, Tensor], real: Tensor) -> Tensor:
    """Return the term `update` at real tokens, with gradients to codes and parameters. `taken`: as of `codes_taken`."""
    total = torch.zeros(int(real.sum()), dtype=torch.float32, device=real.device)
    for chunked, codes in taken.items():
        group = [bem.updates[site.key] for site in bem.sites if site.chunked == chunked]
        if bem.config.form != "low_rank":
            for form in group:
                total = total + cast(Form, form).frobenius(codes[real]).square().to(total.device)
            continue
        updates = [cast(SiteUpdate, update) for update in group]
        grams = torch.stack([gram(update.U, update.V, bem.config.scale).to(codes.device) for update in updates])
        total = total + frobenius_squared(codes[real].to(grams.dtype), grams).sum(dim=-1)
    return (total + _TINY).sqrt().mean()  # the root has no gradient at 0


def _gate_correlation(bem: Bem, taken: Mapping[bool, Tensor], real: Tensor) -> Tensor:
    if bem.config.form != "head_groups":
        raise ConfigError(
            f"form is {bem.config.form!r}, which has no gates: give LossWeights(decorrelation=...), or use"
            " BemConfig(form='head_groups')"
        )
    return _mean(decorrelation(gates(codes), real) for codes in taken.values())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _entropy(shares: Tensor) -> Tensor:
    return -(shares * shares.log()).sum(dim=-1)


def _mean(terms: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(terms)).mean()


# -- adapters and batches ----------------------------------------------------------------------------


def check_learnable(bem: Bem) -> None:
    """Raise `ConfigError` for an adapter that cannot learn: with a `FallbackPolicy`, or on a model made in inference
    mode.
    """
    if not isinstance(bem, Bem):
        raise ConfigError(f"{type(bem).__name__} is not an adapter: give what attach_bem returned")
    if bem.fallback is not None:
        raise ConfigError(
            "the adapter has a FallbackPolicy, and when it falls back the controller learns nothing: attach it without"
            " fallback= to train or distil it"
        )
    if any(parameter.is_inference() for parameter in bem.host.parameters()):
        raise ConfigError(
            "the model was made in torch.inference_mode(), and nothing can be learned through it: load it outside that"
            " block"
        )


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return a batch's inputs for the model. Raises `ConfigError` if it is not a batch."""
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"a batch is a {type(batch).__name__}: give a sequence of batches, each with its tensors by name, as"
            " [{'input_ids': ids, 'labels': labels}]"
        )
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
        problem = kind_of(ids) if ids is not None else "not among " + (", ".join(batch) or "nothing")
        raise ConfigError(f"a batch's input_ids are {problem}: give whole numbers [B, T] in a tensor")
    for name in ("attention_mask", "labels"):
        if batch.get(name) is not None:
            token_values(batch, name)
    return {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}


def as_batch(
    input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None, position_ids: Tensor | None
) -> Batch:
    """Return what is given as a batch."""
    given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "position_ids": position_ids}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def forward_inputs(host: nn.Module, batch: Batch, decoder: nn.Module | None = None) -> dict[str, Tensor]:
    """Return a batch's inputs for a forward of the model, or of its `decoder` alone.

    With padding before a token these have positions, as in generate(): some models would count columns. Raises as
    `model_inputs`; `UnsupportedModel` if the decoder takes no positions.
    """
    inputs, real = model_inputs(batch), real_tokens(batch)
    padded = bool((real[:, 1:] & ~real[:, :-1]).any())
    if inputs.get("position_ids") is not None or not padded or not _takes_positions(unwrap(host)):
        return inputs
    if decoder is not None and not _takes_positions(decoder):
        raise UnsupportedModel(
            f"{type(host).__name__} takes positions and its {type(decoder).__name__} does not, so padding before a"
            " prompt would move them: give prompts of one length together, without padding"
        )
    return {**inputs, "position_ids": (real.long().cumsum(dim=1) - 1).masked_fill(~real, 0)}


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


def token_values(batch: Batch, name: str) -> Tensor:
    """Return a batch's values `[B, T]`. Raises `ConfigError` for another shape."""
    values, ids = batch[name], batch["input_ids"]
    if not isinstance(values, Tensor) or values.shape != ids.shape:
        raise ConfigError(
            f"{name} of a batch are {kind_of(values)}, its input_ids of {tuple(ids.shape)}: give one for each token, in"
            " a tensor"
        )
    return values


def kind_of(value: object) -> str:
    """Return what a message says of a value that is no fitting tensor."""
    return (
        f"of shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )


def masked_tokens(batch: Batch, name: str) -> Tensor:
    """Return which columns are tokens `[B, T]` bool and not 0 in the optional mask `name`. Raises `ConfigError`."""
    real = real_tokens(batch)
    return real if batch.get(name) is None else real & (token_values(batch, name) != 0).to(real.device)


def real_tokens(batch: Batch) -> Tensor:
    """Return which columns are tokens `[B, T]` bool."""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask != 0


def next_labels(host: nn.Module, batch: Batch) -> Tensor:
    """Return the label to predict at each column but the last, `[B, T - 1]`: the next column's, or its token if the
    batch has no labels.

    It is -100 if either column is padding, or if the next one begins a packed sequence. Raises `UnsupportedDecoding`
    if the model with an adapter refuses the packing.
    """
    labels, real = batch["input_ids"] if batch.get("labels") is None else batch["labels"], real_tokens(batch)
    predicted = real[:, 1:] & real[:, :-1]
    inputs = model_inputs(batch)
    packing = packing_of(unwrap(host), {**inputs, "use_cache": False}) if "position_ids" in inputs else None
    if packing is not None:
        predicted = predicted & ~packing.starts[:, 1:].to(predicted.device)
    return labels[:, 1:].masked_fill(~predicted.to(labels.device), -100)


def predictions(host: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return fp64 logits `[B * (T - 1), V]` and the labels `[B, T - 1]` that they predict. Raises `ConfigError` without
    labels.
    """
    inputs = forward_inputs(host, batch)
    if batch.get("labels") is None:
        raise ConfigError(
            f"a batch has {', '.join(batch)} and no labels: give them, [B, T] with -100 for tokens that do not count"
        )
    logits = host(**inputs, use_cache=False).logits[:, :-1]
    return logits.double().flatten(0, 1), next_labels(host, batch)


def codes_taken(bem: Bem, codes: Codes) -> dict[bool, Tensor]:
    """Return codes `[B, T, r]` before governance: of chunk-coded sites (True), and of the others (False)."""
    return {
        chunked: codes.of("chunk") if chunked else codes.adaptive()
        for chunked in sorted({site.chunked for site in bem.sites})
    }


def applied_codes(bem: Bem, codes: Codes) -> dict[str, Tensor]:
    """Return codes `[B, T, ..]` by site key, within the limits, in evaluation mode."""
    return {key: code.unflatten(0, codes.level.shape) for key, code in bem.limited(codes).items()}


@contextmanager
def recorded_codes(bem: Bem) -> Iterator[list[Codes]]:
    """In the block, append each forward's codes to the list. Raises `BemError` if the adapter is off, or no forward
    ran.
    """
    if not bem.open:
        raise BemError("the adapter is not on its model: attach it before it is trained")
    recorded: list[Codes] = []
    with hooked_codes(bem, recorded.append):
        yield recorded
    if not recorded:
        raise BemError("a forward of the model did not pass the controller: detach the adapter and attach it again")


@contextmanager
def silenced(bem: Bem) -> Iterator[None]:
    """In the block, make every code 0: the bare model bit for bit."""

    def silence(codes: Codes) -> Codes:
        return codes.replace(**{name: torch.zeros_like(code) for name, code in codes.by_level().items()})

    with hooked_codes(bem, silence):
        yield


@contextmanager
def hooked_codes(bem: Bem, call: Callable[[Codes], Codes | None]) -> Iterator[None]:
    """In the block, run `call(codes)` at this thread's forwards; codes that it returns replace them."""
    thread = threading.get_ident()

    def hook(controller: nn.Module, args: Any, codes: Codes) -> Codes | None:
        return call(codes) if threading.get_ident() == thread else None

    handle = bem.controller.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def base_logits(bem: Bem, inputs: Batch) -> Tensor:
    """Return logits `[B, T, V]` of the bare model, without gradient or dropout."""
    with torch.no_grad(), silenced(bem), mode(bem.host, training=False):
        logits: Tensor = bem.host(**inputs, use_cache=False).logits
    return logits


@contextmanager
def mode(host: nn.Module, *, training: bool) -> Iterator[None]:
    """In the block, set the model's mode; afterwards restore each module's."""
    before = [(module, module.training) for module in host.modules()]
    host.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
