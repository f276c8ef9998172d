"""Scoring M given probes of a bank, without a hierarchy: ours, and the ways that people write it, over one set of
weights.

    rows = measure(Cell(hidden=576, dtype="bfloat16", batch=1, n_probes=64), n_rounds=40)

Weights are random. The probes of a round are random runs of eight neighbours, the same for every method, but no two
methods have the same ones at the same time, so that none finds its weights in a cache that another has filled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.timing import interleaved, rows_of
from probemon.engine.kernels import score_probes
from probemon.packs.quantize import quantize_weights

H1, H2 = 128, 64
BANK_BYTES = 160 << 20  # several times a last-level cache
N_SETS = 12
INT8 = "ours (numba), int8 copies"
STRICT, LOOSE = 1e-5, 0.05  # ours against fp64; rivals may compute in bf16


class WrongScores(Exception):
    """A method does not compute what the others do: nothing was timed."""


@dataclass(frozen=True)
class Cell:
    """One cell of the grid."""

    hidden: int
    dtype: str
    batch: int
    n_probes: int


def measure(cell: Cell, n_rounds: int, *, compiled: bool) -> list[dict[str, Any]]:
    """Check every method against fp64, then time all in turns. Raises `WrongScores`."""
    methods, bank = methods_of(cell, compiled)
    errors = {}
    of_stored = exact_scores(bank.stacks[0], bank.x[0])
    of_int8 = exact_scores(widened(bank.int8, bank.sets[0]), bank.x[0]) if bank.int8 else of_stored
    for name, method in methods.items():
        if name == "floor: read the same bytes":
            continue
        found, exact = method(0), of_int8 if name == INT8 else of_stored
        errors[name] = float((torch.as_tensor(found, dtype=torch.float64).reshape(exact.shape) - exact).abs().max())
        if not errors[name] < (STRICT if name.startswith("ours") else LOOSE):
            raise WrongScores(f"{name} at {cell}: scores are off by {errors[name]:.2g}")
    offset = {name: i for i, name in enumerate(methods)}

    def shifted(name: str, at: int) -> object:
        return methods[name]((at + offset[name]) % N_SETS)

    taken = interleaved({name: partial(shifted, name) for name in methods}, n_rounds)
    where = {"part": "scoring", **asdict(cell)}
    found = rows_of(taken, where, ours="ours (numba)", floor="floor: read the same bytes")
    return [{**one, "max_error": errors.get(one["method"])} for one in found]


class Bank:
    """Random probes, the sets of a round, and what every method needs prepared before it is timed."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.dtype = cell, getattr(torch, cell.dtype)
        generator = torch.Generator().manual_seed(0)
        one = (H1 * cell.hidden + H2 * H1 + H2) * self.dtype.itemsize
        n = self.n = max(2 * cell.n_probes, BANK_BYTES // one // 8 * 8)

        def random(*size: int, scale: float) -> Tensor:
            return torch.randn(size, generator=generator) * scale

        self.weights = {
            "w1": random(n, H1, cell.hidden, scale=cell.hidden**-0.5).to(self.dtype),
            "b1": random(n, H1, scale=0.1),
            "w2": random(n, H2, H1, scale=H1**-0.5).to(self.dtype),
            "b2": random(n, H2, scale=0.1),
            "w3": random(n, H2, scale=H2**-0.5).to(self.dtype),
            "b3": random(n, scale=0.1),
        }
        self.int8 = quantize_weights(self.weights) if cell.dtype == "bfloat16" and cell.batch == 1 else {}
        self.x = random(N_SETS * cell.batch, cell.hidden, scale=1.0).reshape(N_SETS, cell.batch, -1).to(self.dtype)
        rng = np.random.default_rng(0)
        runs = [np.sort(rng.choice(n // 8, size=-(-cell.n_probes // 8), replace=False)) for _ in range(N_SETS)]
        self.sets = [torch.from_numpy((at[:, None] * 8 + np.arange(8)).reshape(-1)[: cell.n_probes]) for at in runs]
        self.rows = torch.arange(cell.batch).repeat(cell.n_probes)  # pairs by probe
        self.slots = [chosen.repeat_interleave(cell.batch) for chosen in self.sets]
        self.stacks = [{name: w[chosen].contiguous() for name, w in self.weights.items()} for chosen in self.sets]
        self.modules = [
            [module_of({name: w[i] for name, w in stack.items()}, self.dtype) for i in range(cell.n_probes)]
            for stack in self.stacks
        ]


def ratios_to_best_other(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], tuple[float, float, float]]:
    """How long ours takes over the fastest other way with its interval, by cell: hidden size, dtype, states, probes."""
    cells: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cell = row["hidden"], row["dtype"], row["batch"], row["n_probes"]
        cells.setdefault(cell, {})[row["method"]] = row
    found = {}
    for cell, methods in cells.items():
        others = [row for name, row in methods.items() if not name.startswith(("ours", "floor"))]
        best = min(others, key=lambda row: row["median_us"])
        low, high = best["ratio_to_ours_interval"]
        found[cell] = (methods["ours (numba)"]["median_us"] / best["median_us"], 1 / high, 1 / low)
    return found


def exact_scores(stack: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """fp64 `[M, B]` of a stack of probes, the oracle of every method."""
    w = {name: tensor.double() for name, tensor in stack.items()}
    h = torch.einsum("mhd,bd->mbh", w["w1"], x.double()) + w["b1"][:, None]
    h = torch.einsum("mkh,mbh->mbk", w["w2"], h.relu()) + w["b2"][:, None]
    return (torch.einsum("mk,mbk->mb", w["w3"], h.relu()) + w["b3"][:, None]).sigmoid()


def widened(weights: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    """Some probes of int8 weights, in fp64."""
    some = {name: w[chosen].double() for name, w in weights.items()}
    return {
        name: w * some[f"{name}_scale"][..., None] if f"{name}_scale" in some else w
        for name, w in some.items()
        if not name.endswith("_scale")
    }


def module_of(weights: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """A probe as people keep it: a small Sequential in the dtype of its weights."""
    d = weights["w1"].shape[1]
    module = nn.Sequential(
        nn.Linear(d, H1), nn.ReLU(), nn.Linear(H1, H2), nn.ReLU(), nn.Linear(H2, 1), nn.Sigmoid()
    ).to(dtype)
    for at, (w, b) in zip((0, 2, 4), (("w1", "b1"), ("w2", "b2"), ("w3", "b3")), strict=True):
        weight, bias = weights[w], weights[b]
        module[at].load_state_dict(
            {"weight": weight.reshape(-1, weight.shape[-1]).to(dtype), "bias": bias.reshape(-1).to(dtype)}
        )
    return module.eval()


def bank_forward(stack: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The stacked bank, `[M, B]` in the dtype of the weights."""
    h = torch.baddbmm(
        stack["b1"][:, None].to(x.dtype), x.expand(len(stack["w1"]), *x.shape), stack["w1"].transpose(1, 2)
    ).relu()
    h = torch.baddbmm(stack["b2"][:, None].to(x.dtype), h, stack["w2"].transpose(1, 2)).relu()
    return ((h * stack["w3"][:, None]).sum(dim=-1) + stack["b3"][:, None].to(x.dtype)).sigmoid()


def methods_of(cell: Cell, compiled: bool) -> tuple[dict[str, Callable[[int], Any]], Bank]:
    """Every method by name: `method(set)` gives the scores `[M, B]` on the host."""
    bank = Bank(cell)
    read = _reader(bank)

    def restacked(at: int) -> Any:  # as usually written: stacked anew when the set changes, and one .item() a score
        parts = [dict(module.named_parameters()) for module in bank.modules[at]]
        stack = {
            "w1": torch.stack([p["0.weight"] for p in parts]),
            "b1": torch.stack([p["0.bias"] for p in parts]),
            "w2": torch.stack([p["2.weight"] for p in parts]),
            "b2": torch.stack([p["2.bias"] for p in parts]),
            "w3": torch.stack([p["4.weight"][0] for p in parts]),
            "b3": torch.stack([p["4.bias"][0] for p in parts]),
        }
        return [[score.item() for score in row] for row in bank_forward(stack, bank.x[at])]

    module = copy.deepcopy(bank.modules[0][0]).to("meta")
    stacked = [
        {
            f"{place}.{kind}": (stack[name] if kind == "weight" else stack[name].to(bank.dtype)).reshape(shape)
            for place, part in module.named_children()
            for kind, one in part.named_parameters()
            for name, shape in [(f"{kind[0]}{int(place) // 2 + 1}", (cell.n_probes, *one.shape))]
        }
        for stack in bank.stacks
    ]

    def vmapped(at: int) -> Any:  # probelab's way: parameters stacked once, a module without any called as a function
        scores = torch.vmap(lambda parameters: torch.func.functional_call(module, parameters, (bank.x[at],))[:, 0])(
            stacked[at]
        )
        return scores.tolist()

    def gathered(at: int) -> Any:
        return bank_forward(
            {name: w.index_select(0, bank.sets[at]) for name, w in bank.weights.items()}, bank.x[at]
        ).tolist()

    methods: dict[str, Callable[[int], Any]] = {
        "ours (numba)": lambda at: score_probes(bank.x[at], bank.weights, bank.rows, bank.slots[at], impl="numba"),
        "ours (torch)": lambda at: score_probes(bank.x[at], bank.weights, bank.rows, bank.slots[at], impl="cpu"),
        "module loop, .item() each": lambda at: [[y.item() for y in module(bank.x[at])] for module in bank.modules[at]],
        "module loop, one transfer": (
            lambda at: torch.stack([module(bank.x[at]) for module in bank.modules[at]]).tolist()
        ),
        "stacked bank, as usually written": restacked,
        "stacked bank, repaired": lambda at: bank_forward(bank.stacks[at], bank.x[at]).tolist(),
        "vmap of the module": vmapped,
        "gather, then bmm": gathered,
        "floor: read the same bytes": read,
    }
    if bank.int8:
        methods[INT8] = lambda at: score_probes(bank.x[at], bank.int8, bank.rows, bank.slots[at], impl="numba")
    if compiled:
        fast = torch.compile(bank_forward)
        methods["torch.compile of the stacked bank"] = lambda at: fast(bank.stacks[at], bank.x[at]).tolist()
    return {name: _without_grad(method) for name, method in methods.items()}, bank


def _without_grad(method: Callable[[int], Any]) -> Callable[[int], Any]:
    def run(at: int) -> Any:
        with torch.no_grad():
            return method(at)

    return run


def _reader(bank: Bank) -> Callable[[int], Any]:
    """Adds up the weights of a set as 64-bit words, where they lie: the bytes that must be read, and nothing else."""
    from numba import njit

    @njit(nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
    def total_of(words, slots, n):  # type: ignore[no-untyped-def]
        total = np.uint64(0)
        for slot in slots:
            for i in range(n):
                total += words[slot, i]
        return total

    words = [
        bank.weights[name].view(bank.n, -1).view(torch.uint8).numpy().view(np.uint64) for name in ("w1", "w2", "w3")
    ]
    sets = [chosen.numpy() for chosen in bank.sets]
    return lambda at: [total_of(tensor, sets[at], tensor.shape[1]) for tensor in words]
