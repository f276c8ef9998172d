"""Recipes that change a host's weights or where they lie: int8, pruning, offload, fewer slots."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from probemon.adapters.ltm import memory_of, recall_host
from recipe_rows.hosts import GREEDY, IDS, MASK, PADDED, PADDING, Watch, largest, make
from recipe_rows.rows import Found, recipe

BOTH = ("ltm", "mamba2", "falcon_h1")
PERCENTILE = 0.999  # of the sizes of what goes into a layer
AFTER = "model.layers.1.mlp"  # what comes after the last memory of the host with slots


def cut(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that may be made coarse: not what makes steps, B and C of a state, nor gate, query and key of a
    memory, nor what a state is multiplied by.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not any(word in name for word in ("in_proj", "memory", "lm_head")):
            yield name, module


def _quantised(model: Any, config: Any) -> None:
    from torchao.quantization import quantize_

    names = {name for name, _ in cut(model)}
    quantize_(model, config, filter_fn=lambda module, name: name in names)


@recipe(
    "int8 weights, error", "torchao", "the largest error of a weight, over half a step of its row",
    on=BOTH, bound=1.001, apart=True,
)  # fmt: skip
def int8_error(kind: str) -> Found:
    from torchao.quantization import Int8WeightOnlyConfig

    model, plain = make(kind), make(kind)
    _quantised(model, Int8WeightOnlyConfig())
    worst, before = 0.0, dict(cut(plain))
    for name, module in model.named_modules():
        if name in before:
            half = before[name].weight.detach().abs().amax(1, keepdim=True) / 127.5 / 2
            error = (module.weight.dequantize() - before[name].weight.detach()).abs()
            worst = max(worst, float((error / half).max()))
    with torch.no_grad(), Watch(model) as watch:
        model(IDS)
    return Found(worst, watch.distance(IDS, last=0))


@recipe(
    "int8 weights", "torchao", "logits, their error over their size", on=BOTH, bound=0.05, apart=True,
)  # fmt: skip
def int8_weights(kind: str) -> Found:
    from torchao.quantization import Int8WeightOnlyConfig

    return _int8_logits(kind, Int8WeightOnlyConfig())


@recipe(
    "int8 weights and activations", "torchao", "logits, their error over their size", on=BOTH, bound=0.1,
    watched_bound=0.02, apart=True,
)  # fmt: skip
def int8_dynamic(kind: str) -> Found:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return _int8_logits(kind, Int8DynamicActivationInt8WeightConfig())


def _int8_logits(kind: str, config: Any) -> Found:
    model = make(kind)
    _quantised(model, config)
    return _error(kind, model)


def _error(kind: str, model: Any) -> Found:
    """How far the logits of a coarse host are from those of the plain one, over their size."""
    with torch.no_grad():
        expected = make(kind)(IDS).logits
        with Watch(model) as watch:
            logits = model(IDS).logits
    return Found(float((logits - expected).norm() / expected.norm()), watch.distance(IDS, last=0))


def _static(kind: str, share: float, begin: str = "") -> Any:
    """A host whose layers have a scale each for what goes into them, from texts for calibration: what that share of the
    values does not exceed. `begin`: of the names of those that are made coarse.
    """
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerRow, PerTensor, quantize_

    model, inputs = make(kind), dict[str, list[Tensor]]()

    def keep(name: str) -> Any:
        return lambda module, args: inputs.setdefault(name, []).append(args[0].detach().abs().flatten())

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in cut(model) if name.startswith(begin)]
    with torch.no_grad():
        model(torch.randint(1, 61, (8, 24), generator=torch.Generator().manual_seed(9)))
    for handle in handles:
        handle.remove()
    for name, parts in inputs.items():
        scale = torch.quantile(torch.cat(parts), share).clamp_min(1e-6) / 127
        # It needs a scale with as many dimensions as the activations have.
        config = Int8StaticActivationInt8WeightConfig(scale.reshape(1, 1, 1), granularity=[PerTensor(), PerRow()])
        quantize_(model, config, filter_fn=lambda module, full, name=name: full == name)
    return model


@recipe(
    "int8, static calibration", "torchao", "logits, their error over their size; scales by a percentile, 99.9",
    on=("mamba2",), bound=0.1, watched_bound=0.02,
    trap="scales by the median, which cuts off half: its error, over that by the percentile",
    trap_least=2.0, apart=True,
)  # fmt: skip
def int8_static(kind: str) -> Found:
    by_median, found = (_error(kind, _static(kind, share)) for share in (0.5, 1.0))
    return Found(found.value, found.watched, by_median.value / found.value)


@recipe(
    "int8, static calibration after a memory", "torchao",
    "logits, their error over their size; scales by a percentile, 99.9", on=("ltm",), bound=0.1, watched_bound=0.02,
    trap="every layer, as the guide has it: coarse states let other tokens into the slots",
    trap_least=0.15, apart=True,
)  # fmt: skip
def int8_static_after(kind: str) -> Found:
    """What no memory reads can be coarse. The trap, with scales by the largest, missed a bound of 0.15, set before."""
    every, found = _error(kind, _static(kind, 1.0)), _error(kind, _static(kind, PERCENTILE, AFTER))
    return Found(found.value, found.watched, every.value)


@recipe(
    "int8, static calibration, slots", "torchao",
    "logits, their error over their size, at tokens whose slots hold the same tokens as in the plain host", on=("ltm",),
    bound=0.1, watched_bound=0.02,
    trap="coarse states let other tokens win: the error at tokens whose slots hold others", trap_least=0.2, apart=True,
)  # fmt: skip
def int8_static_slots(kind: str) -> Found:
    model, plain = _static(kind, 1.0), make(kind)
    segment = plain.config.segment_size
    same = torch.ones(IDS.shape, dtype=torch.bool)
    with torch.no_grad():
        expected = plain(IDS).logits
        with Watch(model) as watch:
            logits = model(IDS).logits
        for begin in range(segment, IDS.shape[1], segment):
            held = [memory_of(one(IDS[:, :begin], use_cache=True).past_key_values) for one in (model, plain)]
            for layer in held[0]:
                a, b = (memories[layer].position.sort(1).values for memories in held)
                same[:, begin : begin + segment] &= (a == b).all(1, keepdim=True)
    error = (logits - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    value, trap = (float(error[which].norm() / size[which].norm()) for which in (same, ~same))
    return Found(value, watch.distance(IDS, last=0), trap)


@recipe(
    "int8 weights, recall", "torchao", "share of answers of the shipped host that are wrong", on=("shipped ltm",),
    bound=0.01, apart=True,
)  # fmt: skip
def int8_recall(kind: str) -> Found:
    from torchao.quantization import Int8WeightOnlyConfig

    import ltm_recall

    model = recall_host()
    _quantised(model, Int8WeightOnlyConfig())
    ids = ltm_recall.sequences(2, 60, torch.Generator().manual_seed(5))[0]
    with torch.no_grad(), Watch(model) as watch:
        model(ids)
    return Found(1 - ltm_recall.recall(model, 96, 256)["recall"], watch.distance(ids, last=0))


@recipe(
    "pruning, weights", "torch.nn.utils.prune",
    "zeros that are not the 30 % of least size of each matrix, and difference once made permanent", on=BOTH,
)  # fmt: skip
def pruning(kind: str) -> Found:
    model, plain = make(kind), make(kind)
    wrong, before = 0, dict(cut(plain))
    for name, module in cut(model):
        prune.l1_unstructured(module, "weight", amount=0.3)
        weight = before[name].weight.detach()
        n = round(0.3 * weight.numel())
        least = torch.zeros(weight.numel(), dtype=torch.bool)
        least[weight.abs().flatten().argsort()[:n]] = True
        wrong += int(((module.weight == 0).flatten() != least).sum())
    with torch.no_grad(), Watch(model) as watch:
        logits = model(IDS).logits
    seen = watch.distance(IDS, last=0)
    for _, module in cut(model):
        prune.remove(module, "weight")
    return Found(wrong + largest(model(IDS).logits, logits), seen)


@recipe(
    "pruning, rows", "torch.nn.utils.prune", "rows of zeros, less the 20 % asked for; shapes that changed", on=BOTH[1:],
    trap="pruned blindly: rows of in_proj that make steps, B and C of the state", trap_least=1.0,
)  # fmt: skip
def pruning_rows(kind: str) -> Found:
    model, blind = make(kind), make(kind)
    wrong = 0
    for _, module in cut(model):
        shape = module.weight.shape
        prune.ln_structured(module, "weight", amount=0.2, n=2, dim=0)
        wrong += abs(int((module.weight == 0).all(1).sum()) - round(0.2 * shape[0])) + (module.weight.shape != shape)
    lost = 0
    for name, module in blind.named_modules():
        if name.endswith("in_proj"):
            prune.ln_structured(module, "weight", amount=0.2, n=2, dim=0)
            # z and x are 32 columns each; then B and C, 2 groups of 6 each, and 4 steps
            lost += int((module.weight[64:] == 0).all(1).sum())
    with torch.no_grad(), Watch(model) as watch:
        model(IDS)
    return Found(float(wrong), watch.distance(IDS, last=0), float(lost))


@recipe("weights on the CPU", "accelerate.cpu_offload", "logits are those of the plain host, bit for bit", on=BOTH)
def cpu_offload(kind: str) -> Found:
    from accelerate import cpu_offload as offload

    model, plain = make(kind), make(kind)
    offload(model, execution_device=torch.device("cpu"))
    return _offloaded(model, plain)


@recipe(
    "weights on disk",
    "accelerate.disk_offload",
    "logits are those of the plain host, bit for bit",
    on=("ltm", "mamba2"),
)
def disk_offload(kind: str) -> Found:
    from accelerate import disk_offload as offload

    model, plain = make(kind), make(kind)
    with tempfile.TemporaryDirectory() as folder:
        offload(model, folder, execution_device=torch.device("cpu"))
        return _offloaded(model, plain)


def _offloaded(model: Any, plain: Any) -> Found:
    with Watch(model) as watch:
        out = model.generate(PADDED, attention_mask=MASK, **GREEDY)
    with torch.no_grad():
        difference = largest(model(IDS).logits, plain(IDS).logits)
    return Found(difference, watch.distance(out, PADDING, plain=plain))


@recipe(
    "fewer slots", "probemon", "what is read moves, over the bound of what the slots that went were read", on=("ltm",),
    bound=1.0, trap="slots that are still read, taken away: how far reads move",
)  # fmt: skip
def reduced(kind: str) -> Found:
    memory, state, queries, seen = _written(kind)
    fewer = state.reduced(5)
    with torch.no_grad():
        values, p = memory.read(queries, state)
        less, _ = memory.read(queries, fewer)
    kept = torch.stack([torch.isin(a, b) for a, b in zip(state.position, fewer.position, strict=True)])
    gone = (p[..., 1:] * ~kept[:, None]).sum(-1)
    most = 2 * gone * state.values.norm(dim=-1).amax(1)[:, None]
    moved = (less - values).norm(dim=-1)
    return Found(float((moved / most).max()), seen, float(moved.max()))


def _written(kind: str) -> tuple[Any, Any, Tensor, float]:
    """A memory, its state after a text, queries, and how far what was watched is from plain forwards."""
    model = make(kind)
    with torch.no_grad(), Watch(model) as watch:
        cache = model(IDS, use_cache=True).past_key_values
    state = memory_of(cache)[1]
    queries = torch.randn(len(IDS), 9, state.keys.shape[2], generator=torch.Generator().manual_seed(4))
    return model.memories[1], state, queries, watch.distance(IDS, last=0)


@recipe("more slots", "probemon", "what is read stays as it was", on=("ltm",), bound=1e-6)
def grown(kind: str) -> Found:
    memory, state, queries, seen = _written(kind)
    with torch.no_grad():
        moved = largest(memory.read(queries, state.grown(19))[0], memory.read(queries, state)[0])
    return Found(moved, seen)


@recipe(
    "compression", "probemon", "tokens written in a segment, over the share that compression leaves",
    on=("ltm",), bound=1.0,
)  # fmt: skip
def compression(kind: str) -> Found:
    model = make(kind, compression=0.5)
    with torch.no_grad(), Watch(model) as watch:
        model(IDS, use_cache=True)
    rates = [memory["write_rate"] for memory in model.get_memory_stats()["memories"]]
    return Found(max(rates) / 0.5, watch.distance(IDS, last=0))
