"""Recipes of training: what the guides do to memory, precision and batches, against the plain step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from recipe_rows.hosts import GREEDY, IDS, Watch, cache_of, largest, make, states_in
from recipe_rows.rows import Found, recipe

BOTH = ("ltm", "mamba2", "falcon_h1")
CHECKPOINTED = {"use_reentrant": False}


def gradients(model: Any) -> list[Tensor]:
    """The gradient of every parameter that has one."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def step(model: Any, ids: Tensor = IDS, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> float:
    """One forward and backward in training; the loss."""
    model.train()
    model.zero_grad()
    with around():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return float(loss.detach())


def saved_bytes(model: Any) -> int:
    """The bytes of the tensors that a forward keeps for its backward, each storage once; parameters are not counted."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            held[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other one gets its place
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=IDS, labels=IDS, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@recipe("gradient checkpointing", "transformers", "gradients equal those of the plain step, bit for bit", on=BOTH)
def checkpointing(kind: str) -> Found:
    model, plain = make(kind), make(kind)
    step(plain)
    model.gradient_checkpointing_enable(CHECKPOINTED)
    with Watch(model, training=True) as watch:
        step(model)
    return Found(largest(gradients(model), gradients(plain)), watch.distance(IDS, last=0))


@recipe(
    "gradient checkpointing, feed-forwards", "torch.utils.checkpoint",
    "gradients with the feed-forwards alone run again, bit for bit; fewer bytes kept than plain, more than by layers",
    on=("ltm", "falcon_h1"),
)  # fmt: skip
def checkpointing_parts(kind: str) -> Found:
    model, plain, by_layers = make(kind), make(kind), make(kind)
    step(plain)
    before = saved_bytes(plain)
    by_layers.gradient_checkpointing_enable(CHECKPOINTED)
    for layer in model.model.layers:
        part = layer.mlp if kind == "ltm" else layer.feed_forward
        part.forward = partial(checkpoint, part.forward, **CHECKPOINTED)
    between = saved_bytes(by_layers) < saved_bytes(model) < before
    with Watch(model, training=True) as watch:
        step(model)
    value = largest(gradients(model), gradients(plain)) if between else float("inf")
    return Found(value, watch.distance(IDS, last=0))


@recipe(
    "gradient accumulation", "torch", "gradients of two halves of a batch, each divided, are those of the whole",
    on=("ltm", "mamba2"), bound=1e-6,
    trap="halves that are not divided: how much too large, as a share", trap_least=0.9,
)  # fmt: skip
def accumulation(kind: str) -> Found:
    model, plain = make(kind).train(), make(kind)
    step(plain)
    right, found = gradients(plain), []
    for parts in (2, 1):
        model.zero_grad()
        for half in IDS.split(2):
            (model(input_ids=half, labels=half, use_cache=False).loss / parts).backward()
        found.append(gradients(model))
    size = max(float(gradient.abs().max()) for gradient in right)
    return Found(largest(found[0], right) / size, None, largest(found[1], right) / size)


@recipe(
    "distillation", "torch", "a student's KL to its teacher after 120 steps, over that before",
    on=("mamba2", "falcon_h1"), bound=0.5,
    trap="the guide's 'batchmean', which divides by rows, not tokens: so many times too large", trap_least=20.0,
)  # fmt: skip
def distillation(kind: str) -> Found:
    teacher, student = make(kind), make(kind, seed=1, num_hidden_layers=1).train()
    temperature, alpha = 2.0, 0.5
    with Watch(teacher) as watch:
        ids = teacher.generate(IDS[:, :4], **{**GREEDY, "max_new_tokens": 20})
    with torch.no_grad():
        wanted = teacher(ids, use_cache=False).logits
    soft = (wanted / temperature).log_softmax(-1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-2)

    def divergence(reduction: str = "none") -> Tensor:
        found = student(ids, use_cache=False).logits
        kl = functional.kl_div((found / temperature).log_softmax(-1), soft, reduction=reduction, log_target=True)
        return kl if reduction != "none" else kl.sum(-1).mean()

    with torch.no_grad():
        before, by_rows = float(divergence()), float(divergence("batchmean"))
    for _ in range(120):
        optimizer.zero_grad()
        hard = student(input_ids=ids, labels=ids, use_cache=False).loss
        (alpha * temperature**2 * divergence() + (1 - alpha) * hard).backward()
        optimizer.step()
    with torch.no_grad():
        after = float(divergence())
    return Found(after / before, watch.distance(ids), by_rows / before)


@recipe(
    "gradient checkpointing keeps less", "transformers",
    "bytes kept for the backward, as a share of those of the plain step", on=BOTH, bound=0.75,
)  # fmt: skip
def checkpointing_bytes(kind: str) -> Found:
    model = make(kind)
    before = saved_bytes(model)
    model.gradient_checkpointing_enable(CHECKPOINTED)
    with Watch(model, training=True) as watch:
        share = saved_bytes(model) / before
    return Found(share, watch.distance(IDS, last=0))


@recipe(
    "activation offload", "torch.autograd.graph.save_on_cpu",
    "gradients equal those of the plain step, bit for bit", on=BOTH,
)  # fmt: skip
def activation_offload(kind: str) -> Found:
    model, plain = make(kind), make(kind)
    step(plain)
    with Watch(model, training=True) as watch:
        step(model, around=torch.autograd.graph.save_on_cpu)
    return Found(largest(gradients(model), gradients(plain)), watch.distance(IDS, last=0))


def bf16() -> AbstractContextManager[Any]:
    """What the guides put around a forward."""
    return torch.autocast("cpu", torch.bfloat16)


@recipe(
    "mixed precision", "torch.autocast", "the loss, relative to that of fp32", on=BOTH, bound=0.02, watched_bound=0.02
)
def autocast(kind: str) -> Found:
    model, plain = make(kind), make(kind)
    expected = step(plain)
    with Watch(model, training=True, states=False) as watch:
        loss = step(model, around=bf16)
    return Found(abs(loss - expected) / expected, watch.distance(IDS, last=0, around=bf16))


@recipe(
    "mixed precision, slots", "torch.autocast", "share of the slots' tensors that are not fp32 under autocast",
    on=("ltm",), watched_bound=0.02,
)  # fmt: skip
def autocast_slots(kind: str) -> Found:
    model = make(kind)
    with torch.no_grad(), bf16(), Watch(model, states=False) as watch:
        memories = [layer.memory for layer in model(IDS, use_cache=True).past_key_values.layers]
    kept = [getattr(memory, name).dtype for memory in memories for name in ("keys", "values", "strength")]
    return Found(sum(dtype != torch.float32 for dtype in kept) / len(kept), watch.distance(IDS, last=0, around=bf16))


@recipe(
    "a host in bf16, states", "transformers", "share of the cached states that are not fp32",
    on=("mamba2", "falcon_h1"),
    trap="torch.autocast on a host in fp32, instead: its cached states are bf16, off by their rounding",
    trap_least=1e-4,
)  # fmt: skip
def states_in_bf16(kind: str) -> Found:
    half, whole = make(kind).bfloat16(), make(kind)
    with torch.no_grad():
        with Watch(half, states=False) as watch:  # it convolves in bf16, what follows its states in fp32
            kept = states_in(cache_of(half(IDS, use_cache=True)))
        right = states_in(cache_of(whole(IDS, use_cache=True)))
        with bf16():
            wrong = states_in(cache_of(whole(IDS, use_cache=True)))
    rounded = all(state.dtype == torch.bfloat16 for state in wrong)
    trap = largest(wrong, right) if rounded else 0.0
    off = sum(state.dtype != torch.float32 for state in kept) / len(kept)
    return Found(off, watch.distance(IDS, last=0), trap)


@recipe(
    "loss scaling", "torch.amp.GradScaler", "gradients, scaled, unscaled, then clipped, are those of the plain step",
    on=("ltm", "mamba2"), bound=1e-6,
    trap="clipped before they are unscaled: too small, as a share of what they should be", trap_least=0.5,
)  # fmt: skip
def loss_scaling(kind: str) -> Found:
    model, plain = make(kind).train(), make(kind)
    step(plain)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    right = gradients(plain)
    found, seen = [], 0.0
    for unscale_first in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model.zero_grad()
        with Watch(model, training=True) as watch:
            scaler.scale(model(input_ids=IDS, labels=IDS, use_cache=False).loss).backward()
        seen = max(seen, watch.distance(IDS, last=0))
        if unscale_first:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not unscale_first:
            scaler.unscale_(optimizer)
        found.append(gradients(model))
    size = max(float(gradient.abs().max()) for gradient in right)
    return Found(largest(found[0], right), seen, largest(found[1], right) / size)
