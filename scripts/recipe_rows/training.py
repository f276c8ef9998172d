"""Recipes of training: what the guides do to memory, precision and batches, against the plain step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recipe_rows.hosts import IDS, VOCABULARY, Watch, cache_of, largest, make, states_in
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


def _trained(kind: str, size: int, accumulated: int, rows: list[dict[str, Any]]) -> tuple[Any, float]:
    """A host after one step of plain gradient descent of Trainer, and how far what was watched is from plain forwards
    of the host before the step.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model, batches = make(kind), []

    def collated(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = _collated(rows)
        batches.append(batch["input_ids"])
        return batch

    with tempfile.TemporaryDirectory() as folder, Watch(model, training=True, states=False) as watch:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=size, gradient_accumulation_steps=accumulated, max_steps=1,
            optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", data_seed=0, seed=0,
            remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collated)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if len(batches) < accumulated:
        return model, float("inf")
    return model, max(watch.distance(ids, plain=make(kind), last=0) for ids in batches[:accumulated])


def _collated(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([row["ids"] for row in rows]), "labels": torch.stack([r["labels"] for r in rows])}


def _ragged() -> list[dict[str, Any]]:
    """Eight texts, of which each has another number of tokens that count."""
    ids = torch.randint(1, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(3))
    counted = torch.arange(12) < torch.tensor([12, 3, 5, 11, 2, 9, 4, 7])[:, None]
    return [{"ids": a, "labels": b} for a, b in zip(ids, torch.where(counted, ids, -100), strict=True)]


@recipe(
    "gradient accumulation", "transformers.Trainer", "weights after 4 micro-batches of 2 are those after 1 of 8",
    on=("ltm", "mamba2"), bound=1e-6,
    trap="means of micro-batches averaged, whose texts are not equally long", trap_least=1e-4,
)  # fmt: skip
def accumulation(kind: str) -> Found:
    rows = _ragged()
    (whole, seen), (parts, also) = _trained(kind, 8, 1, rows), _trained(kind, 2, 4, rows)
    wrong = make(kind).train()
    for begin in range(0, 8, 2):
        batch = _collated(rows[begin : begin + 2])
        (wrong(**batch, use_cache=False).loss / 4).backward()
    right = make(kind).train()
    right(**_collated(rows), use_cache=False).loss.backward()
    trap = largest(gradients(wrong), gradients(right))
    return Found(largest(list(parts.parameters()), list(whole.parameters())), max(seen, also), trap)


@recipe(
    "learning-rate scaling", "torch.optim.lr_scheduler.LambdaLR",
    "one step at four times the rate, on a batch of four, is the sum of four steps of one text each",
    on=("ltm", "mamba2"), bound=1e-6,
    trap="the same rule with AdamW, whose first step does not depend on the batch's size", trap_least=1e-3,
)  # fmt: skip
def rate_scaling(kind: str) -> Found:
    moved = {}
    for name, kind_of in (("SGD", torch.optim.SGD), ("AdamW", torch.optim.AdamW)):
        model = make(kind)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = kind_of(model.parameters(), lr=0.01, weight_decay=0.0)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 4.0)
        with Watch(model, training=True) as watch:
            step(model)
            seen = watch.distance(IDS, last=0)
        optimizer.step()
        large = [parameter.detach() - before for parameter, before in zip(model.parameters(), start, strict=True)]
        small = [torch.zeros_like(before) for before in start]
        for text in IDS:
            one = make(kind)
            optimizer = kind_of(one.parameters(), lr=0.01, weight_decay=0.0)
            step(one, text[None])
            optimizer.step()
            small = [s + p.detach() - b for s, p, b in zip(small, one.parameters(), start, strict=True)]
        moved[name] = (largest(large, small), seen)
    return Found(*moved["SGD"], moved["AdamW"][0])


@recipe(
    "Adafactor", "transformers.Adafactor",
    "n + m numbers are kept for a matrix of n x m; the step is that of its formula in fp64 and of torch's own",
    on=("ltm", "mamba2"),
    bound=1e-6,
)  # fmt: skip
def adafactor(kind: str) -> Found:
    from transformers import Adafactor

    model = make(kind)
    name, weight = next((n, p) for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    start = weight.detach().double()
    with Watch(model, training=True) as watch:
        step(model)
        seen = watch.distance(IDS, last=0)
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=False, lr=None)
    gradient = weight.grad.double()
    optimizer.step()
    kept = sum(v.numel() for v in optimizer.state[weight].values() if isinstance(v, Tensor) and v.dim())
    square = gradient.square() + 1e-30
    rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
    update = gradient / (rows * columns / rows.mean()).sqrt()
    update = update / (update.square().mean().sqrt() / 1.0).clamp_min(1.0)
    rate = 1e-2 * max(1e-3, float(start.square().mean().sqrt()))
    expected = start - rate * update
    other = make(kind)
    step(other)
    torch.optim.Adafactor(other.parameters()).step()
    of_torch = largest(dict(other.named_parameters())[name], expected)
    value = max(largest(weight, expected), of_torch)
    return Found(value if kept == sum(weight.shape) else float("inf"), seen)


@recipe(
    "batch-size finder", "accelerate.find_executable_batch_size",
    "the first size that runs is the largest that fits, of 32, 28, 25, ... (each nine tenths of the last)",
    on=("ltm", "mamba2"),
)  # fmt: skip
def batch_size(kind: str) -> Found:
    from accelerate.utils import find_executable_batch_size

    model, tried = make(kind).train(), []
    with Watch(model, training=True, states=False) as watch:

        @find_executable_batch_size(starting_batch_size=32)
        def fit(batch_size: int) -> int:
            tried.append(batch_size)
            if batch_size > 8:  # planted: a CPU has no such error
                raise RuntimeError("CUDA out of memory. (planted)")
            step(model, IDS[:1, :6].expand(batch_size, -1))
            return batch_size

        size = fit()
    right = tried == [32, 28, 25, 22, 19, 17, 15, 13, 11, 9, 8] and size == 8
    return Found(0.0 if right else float("inf"), watch.distance(IDS[:1, :6].expand(8, -1), last=0))


@recipe(
    "distillation", "torch.nn.functional.kl_div",
    "the loss is the mean KL of a token, and alpha 0 is the plain loss", on=("ltm", "mamba2"), bound=1e-6,
    trap='"batchmean" on [B, T, V], over the right one: less than T times too large', trap_least=20.0,
)  # fmt: skip
def distillation(kind: str) -> Found:
    teacher, student, temperature = make(kind, seed=1), make(kind), 2.0
    with torch.no_grad(), Watch(teacher) as watch:
        target = (teacher(IDS).logits / temperature).softmax(-1)
    with torch.no_grad(), Watch(student) as also:
        logits = student(input_ids=IDS).logits
    log = (logits / temperature).log_softmax(-1)
    right = functional.kl_div(log.flatten(0, 1), target.flatten(0, 1), reduction="batchmean")
    exact = (target.double() * (target.double().log() - log.double())).sum(-1).mean()
    wrong = functional.kl_div(log, target, reduction="batchmean")
    hard = functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    mixed = 0.0 * temperature**2 * right + (1 - 0.0) * hard
    plain = student(input_ids=IDS, labels=IDS).loss
    value = max(float((right - exact).abs()), float((mixed - plain).abs()))
    return Found(value, max(watch.distance(IDS, last=0), also.distance(IDS, last=0)), float(wrong / right))
