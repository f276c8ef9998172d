"""On a GPU: the fused kernel beside what people write, and a whole resident step as one captured graph.

    found = measure(torch.device("cuda"))          # rows and claims; raises WrongScores before anything is timed

Times are the device's own, between two events. A graph's launch alone takes them some ten microseconds apart, so what
is short is timed as a graph of `N_SETS` calls, each over weights of its own, which are more than the chip's cache
holds; what cannot be (a step) has that cache swept before each, and the sweeps alone are taken off. Methods take turns.
Random weights. `kernel_read_fraction` is the weights' bytes over the kernel's time, over the rate at which this GPU was
seen to read. On a CPU (for a dry run at small sizes) times are the host's and nothing is captured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.scoring import H1, H2, LOOSE, STRICT, Cell, WrongScores, bank_forward, exact_scores, widened
from bench.timing import interleaved, rows_of, wall_clock
from probemon.core.hierarchy import ConceptTree
from probemon.core.plan import CascadePlan
from probemon.core.settings import CascadeConfig
from probemon.engine.cascade import descend
from probemon.engine.device_steps import DeviceSteps
from probemon.engine.kernels import score_probes
from probemon.engine.kernels.triton_cascade import DeviceCascade, DeviceDescent
from probemon.engine.kernels.triton_pairs import normalise_triton
from probemon.engine.memory.slab import Layout, Slab, SlabRecord
from probemon.engine.memory.uploads import Staged
from probemon.packs.quantize import quantize_weights

N_SETS = 8
CELLS = tuple(Cell(d, "bfloat16", batch, 64) for d in (2560, 4096) for batch in (1, 8, 64))
SWEEP_BYTES = 256 << 20
OURS, INT8, REPAIRED = "ours (triton)", "ours (triton), int8 copies", "stacked bank, repaired"
GATHERED = "gather, then bmm"
FLOOR = "floor: first layers summed by torch"


class Timer:
    """Seconds of a call on a device, after its caches were swept (`sweep`): by reading, since what was written would be
    written back meanwhile.
    """

    def __init__(self, device: torch.device, sweep_bytes: int = SWEEP_BYTES) -> None:
        self.device, self._swept = device, torch.ones(sweep_bytes // 4, dtype=torch.int32, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        self.sweep()
        if self.device.type != "cuda":
            return wall_clock(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # else what Python takes to launch would hide behind the sweep
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def sweep(self) -> object:
        return self._swept.sum()


def in_turns(methods: dict[str, Callable[[int], object]], n_rounds: int, timer: Timer) -> dict[str, list[float]]:
    """Every method on the device's clock, set after set."""
    return interleaved(
        {name: lambda at, call=call: call(at % N_SETS) for name, call in methods.items()},
        n_rounds,
        timer=timer,
        n_warm=3,
    )  # type: ignore[misc]


def captured(device: torch.device, call: Callable[[], object]) -> Callable[[], object]:
    """The call as a graph, so that launching it from Python is not what is timed; the replay returns what the call
    returned.
    """
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()

    def replay() -> object:
        graph.replay()
        return found

    return replay


def every_set(device: torch.device, call: Callable[[int], object]) -> Callable[[int], object]:
    """All sets, one after another, as one graph: it is timed whole, and a call's share of it stands for the call."""
    calls = captured(device, lambda: [call(at) for at in range(N_SETS)])
    return lambda _: calls()


def random_bank(n: int, cell: Cell, device: torch.device) -> dict[str, Tensor]:
    """Stacked random weights of `n` 128-64-1 probes."""
    generator, dtype = torch.Generator(device=device).manual_seed(0), getattr(torch, cell.dtype)

    def random(*size: int, scale: float) -> Tensor:
        return torch.randn(size, generator=generator, device=device) * scale

    return {
        "w1": torch.cat([(random(64, H1, cell.hidden, scale=cell.hidden**-0.5)).to(dtype) for _ in range(n // 64)]),
        "b1": random(n // 64 * 64, H1, scale=0.1),
        "w2": random(n // 64 * 64, H2, H1, scale=H1**-0.5).to(dtype),
        "b2": random(n // 64 * 64, H2, scale=0.1),
        "w3": random(n // 64 * 64, H2, scale=H2**-0.5).to(dtype),
        "b3": random(n // 64 * 64, scale=0.1),
    }


def scoring(cell: Cell, device: torch.device, timer: Timer, n_rounds: int, n_bank: int = 512) -> list[dict[str, Any]]:
    """One cell: every method checked against fp64, then timed. Raises `WrongScores`."""
    bank = random_bank(n_bank, cell, device)
    n_bank = len(bank["w1"])
    rng = np.random.default_rng(0)
    x = torch.randn(
        N_SETS, cell.batch, cell.hidden, device=device, generator=torch.Generator(device).manual_seed(0)
    ).to(bank["w1"].dtype)
    apart = rng.permutation(n_bank)[: N_SETS * cell.n_probes].reshape(N_SETS, cell.n_probes)  # no set has another's
    sets = [torch.from_numpy(np.sort(chosen)).to(device) for chosen in apart]
    rows = torch.arange(cell.batch, device=device).repeat(cell.n_probes)
    slots = [chosen.repeat_interleave(cell.batch) for chosen in sets]
    stacks = [{name: w[chosen].contiguous() for name, w in bank.items()} for chosen in sets]

    def gathered(at: int) -> Tensor:
        return bank_forward({name: w.index_select(0, sets[at]) for name, w in bank.items()}, x[at])

    eager: dict[str, Callable[[int], Any]] = {
        OURS: lambda at: score_probes(x[at], bank, rows, slots[at], impl="triton"),
        REPAIRED: lambda at: bank_forward(stacks[at], x[at]),
        GATHERED: gathered,
    }
    errors, want_stored = {}, exact_scores(stacks[0], x[0])
    if x.dtype == torch.bfloat16:
        int8 = quantize_weights(bank)
        eager[INT8] = lambda at: score_probes(x[at], int8, rows, slots[at], impl="triton")
    for name, method in eager.items():
        want = exact_scores(widened(int8, sets[0]), x[0]) if name == INT8 else want_stored
        errors[name] = float((method(0).reshape(want.shape).double() - want).abs().max())
        if not errors[name] < (STRICT if name in (OURS, INT8) else LOOSE):
            raise WrongScores(f"{name} at {cell}: scores are off by {errors[name]:.2g}")
    graphs = {name: [captured(device, partial(method, at)) for at in range(N_SETS)] for name, method in eager.items()}
    for name, calls in graphs.items():
        for at, call in enumerate(calls):
            replayed, eagerly = call(), eager[name](at)
            assert isinstance(replayed, Tensor)
            if not torch.equal(replayed, eagerly):
                raise WrongScores(f"{name} at {cell}: a captured graph gives other scores")
    del graphs
    everything = torch.arange(n_bank, device=device)
    methods: dict[str, Callable[[int], object]] = {
        f"{name}, launched from Python": method for name, method in eager.items()
    }
    if cell.batch == 1:
        methods["every probe of the bank"] = lambda at: score_probes(
            x[at], bank, torch.zeros_like(everything), everything, impl="triton"
        )
    first = [stack["w1"].flatten().view(torch.float32) for stack in stacks]
    whole = {name: every_set(device, method) for name, method in (eager | {FLOOR: lambda at: first[at].sum()}).items()}
    taken = in_turns(methods | whole, n_rounds, timer)
    taken |= {name: [seconds / N_SETS for seconds in taken[name]] for name in whole}
    n_bytes = sum(w[0].numel() * w.element_size() for w in bank.values()) * cell.n_probes
    found = rows_of(taken, {"part": "scoring", **asdict(cell), "weight_bytes": n_bytes}, ours=OURS, floor=FLOOR)
    return [{**row, "max_error": errors.get(row["method"].removesuffix(", launched from Python"))} for row in found]


def read_rate(device: torch.device, timer: Timer, n_bytes: int = 4 << 30) -> float:
    """Bytes a second, the best of a few sums over a large tensor."""
    words = torch.ones(n_bytes // 4, dtype=torch.float32, device=device)
    return n_bytes / min(timer(words.sum) for _ in range(20))


def step(  # noqa: PLR0915 (one measurement, from its world to its rows)
    device: torch.device,
    timer: Timer,
    n_rounds: int,
    n_probes: int = 8000,
    hidden: int = 4096,
    n_layers: int = 32,
    wide: int = 14336,
) -> list[dict[str, Any]]:
    """A resident step of a large random cascade, device only, as one graph, by itself and beside a decode step of a
    random host.

    First the sets must be those of the host's cascade.
    """
    cell = Cell(hidden, "bfloat16", 1, n_probes)
    bank, rng = random_bank(n_probes, cell, device), np.random.default_rng(0)
    n_probes = len(bank["w1"])
    parents = [[] if i < 14 else [str(rng.integers(0, max(14, i // 8)))] for i in range(n_probes)]
    order, tree = ConceptTree.build([str(i) for i in range(n_probes)], parents)
    bank = {name: tensor[torch.from_numpy(order).to(device)] for name, tensor in bank.items()}
    x = torch.randn(N_SETS, 1, hidden, device=device, generator=torch.Generator(device).manual_seed(0)).to(
        bank["w1"].dtype
    )
    zero = torch.zeros(n_probes, dtype=torch.int64, device=device)
    own = [
        score_probes(one, bank, zero, torch.arange(n_probes, device=device), impl="triton").cpu().numpy() for one in x
    ]
    threshold = np.full(n_probes, np.quantile(np.stack(own), 0.9), np.float32)  # a tenth of the probes open
    plan = CascadePlan.of(tree, "independent", CascadeConfig(max_loaded_probes=min(512, n_probes)), threshold, [])
    cascade = DeviceCascade(plan, bank, np.zeros(n_probes))
    evaluated = []
    for at in range(N_SETS):
        found = cascade.descend(x[at], 1, None)
        expected = descend(plan, 1, None, lambda rows, probes, at=at: own[at][probes])  # type: ignore[misc]
        n = int(found.count[0])
        if int(found.overflowed[0]) or set(found.ids[0, :n].tolist()) != set(
            np.flatnonzero(expected.active[0]).tolist()
        ):
            raise WrongScores(f"the device's cascade is not the host's at state {at}")
        evaluated.append(n)
    # A whole step: the host's state normalised and rounded, retained sets that are on the device, the descent, results
    # to pinned memory.
    raw = torch.randn(N_SETS, 1, hidden, device=device, generator=torch.Generator(device).manual_seed(1)).to(
        torch.bfloat16
    )
    kept = cascade.descend(x[0], 1, None).kept
    first = cascade.descend(x[0], 1, kept)
    pinned = torch.empty(first.memory.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    brought = DeviceDescent.of(1, cascade.cap, cascade.n_kept, 1, pinned)

    def whole_step(at: int) -> None:
        found = cascade.descend(normalise_triton(raw[at], "rmsnorm", 1e-6, x.dtype), 1, kept)
        pinned.copy_(found.memory, non_blocking=True)

    for at in range(N_SETS):
        captured(device, partial(whole_step, at))()
        if device.type == "cuda":
            torch.cuda.synchronize()
        evaluated.append(int(brought.count[0]))
    evaluated = evaluated[N_SETS:]
    if int(brought.overflowed[0]) or max(evaluated) <= len(plan.start):
        raise WrongScores(f"the timed steps evaluate {evaluated} probes: not what a cascade does")
    swept = in_turns(
        {
            "both": every_set(device, lambda at: (timer.sweep(), whole_step(at))),
            "sweep": every_set(device, lambda at: timer.sweep()),
        },
        n_rounds,
        timer,
    )
    taken = {"a step": [(both - alone) / N_SETS for both, alone in zip(*swept.values(), strict=True)]}
    where = {**asdict(cell), "evaluated": statistics.mean(evaluated)}
    steps = rows_of(taken, {"part": "step", **where}, ours="a step", floor=None)
    buffers, state = DeviceSteps(cascade, n_probes), np.zeros((1, n_probes), dtype=bool)

    def whole(at: int) -> None:
        nonlocal state
        with buffers.beside():
            under_way = buffers.enqueue(x[at], state)
        state = under_way.wait().kept

    by_host = interleaved(
        {"a step, from Python to results on the host": lambda at: whole(at % N_SETS)}, n_rounds, n_warm=N_SETS
    )
    steps += rows_of(
        by_host,
        {"part": "step, the host's clock", **where},
        ours="a step, from Python to results on the host",
        floor=None,
    )
    layers = [_layer(hidden, wide, x.dtype, device, seed) for seed in range(n_layers)]
    counts: list[Tensor] = []
    timed = -1
    while not counts or int(counts[-1][0]) <= len(plan.start):  # a small cascade opens at some states only
        timed += 1
        if timed == N_SETS:
            raise WrongScores(
                f"beside the host the cascade evaluates its {len(plan.start)} base probes alone: its states are none"
            )
        _decode(layers, x[timed], cascade, counts)
    where["evaluated_beside_the_host"] = int(counts[-1][0])
    hosts = {
        name: captured(device, partial(_decode, layers, x[timed], watched))
        for name, watched in (("bare", None), ("watched", cascade))
    }
    taken = in_turns({name: lambda at, call=call: call() for name, call in hosts.items()}, n_rounds, timer)  # type: ignore[misc]
    return steps + rows_of(
        taken,
        {"part": "decode, random weights of an 8B shape", "n_layers": n_layers, **where},
        ours="watched",
        floor=None,
    )


def paging(
    device: torch.device, timer: Timer, n_rounds: int, hidden: int = 2560, n_probes: int = 256, n_missing: int = 20
) -> list[dict[str, Any]]:
    """Bringing missing probes from RAM to their slots: siblings as one copy, scattered ones, and as people write it."""
    cell = Cell(hidden, "bfloat16", 1, n_missing)
    host = {name: w.cpu() for name, w in random_bank(n_probes, cell, device).items()}
    layout, slots = Layout.of(host), list(range(n_missing))
    n_probes = len(host["w1"])
    slab = Slab(layout, n_probes, register=device.type == "cuda")
    records = [
        SlabRecord.of(layout, {name: w[i] for name, w in host.items()}, memory)
        for i, memory in enumerate(slab.take(n_probes))
    ]
    weights = {name: torch.empty_like(w, device=device) for name, w in host.items()}
    upload = Staged(weights)
    starts = np.random.default_rng(0).integers(0, n_probes - n_missing, N_SETS)
    apart = [list(range(int(start) % 7, n_probes, n_probes // n_missing))[:n_missing] for start in starts]

    def plain(at: int) -> None:
        for slot, i in enumerate(apart[at]):
            for name, w in host.items():
                weights[name][slot].copy_(w[i])

    methods: dict[str, Callable[[int], object]] = {
        "ours, siblings": lambda at: upload([records[i] for i in range(starts[at], starts[at] + n_missing)], slots),
        "ours, scattered": lambda at: upload([records[i] for i in apart[at]], slots),
        "tensor by tensor from pageable RAM": plain,
    }
    methods["ours, siblings"](0)
    upload.wait()
    if not all(
        torch.equal(weights[name][:n_missing].cpu(), w[starts[0] : starts[0] + n_missing]) for name, w in host.items()
    ):
        raise WrongScores("uploaded weights are not those of the host")
    n_bytes = n_missing * sum(w[0].numel() * w.element_size() for w in host.values())
    return rows_of(
        in_turns(methods, n_rounds, timer),
        {"part": "paging", **asdict(cell), "weight_bytes": n_bytes},
        ours="ours, siblings",
        floor=None,
    )


def _layer(hidden: int, wide: int, dtype: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
    """Random weights of one decoder layer, by a seed: queries, keys and values (grouped), output, gate and up, down."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = ((hidden, hidden), (hidden, hidden // 2), (hidden, hidden), (hidden, 2 * wide), (wide, hidden))
    return [torch.randn(shape, device=device, generator=generator).mul_(shape[0] ** -0.5).to(dtype) for shape in shapes]


def _rms(h: Tensor) -> Tensor:
    return h / h.float().square().mean(dim=-1, keepdim=True).add(1e-6).sqrt().to(h.dtype)


def _decode(
    layers: list[list[Tensor]], x: Tensor, cascade: DeviceCascade | None, counts: list[Tensor] | None = None
) -> None:
    """The matrix products of one decode step; halfway the cascade is forked onto a stream of its own, and joined at the
    end.
    """
    h, cuda = x, x.is_cuda
    side = torch.cuda.Stream() if cuda and cascade is not None else None
    for i, (query, key_value, output, gate_up, down) in enumerate(layers):
        n = _rms(h)
        h = h + (n @ query) @ output + (n @ key_value).sum() * 0
        gate, up = (_rms(h) @ gate_up).chunk(2, dim=-1)
        h = h + (torch.nn.functional.silu(gate) * up) @ down
        if i == len(layers) // 2 and cascade is not None:
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with nullcontext() if side is None else torch.cuda.stream(side):
                found = cascade.descend(normalise_triton(h, "rmsnorm", 1e-6, x.dtype), 1, None)
                if counts is not None:
                    counts.append(found.count)
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)


def measure(device: torch.device) -> dict[str, Any]:
    """Every cell and a step. Raises `WrongScores`."""
    timer = Timer(device)
    rate = read_rate(device, timer)
    rows: list[dict[str, Any]] = []
    for cell in CELLS:
        rows += scoring(cell, device, timer, 100)
    steps, uploads = step(device, timer, 200), paging(device, timer, 100)
    bare, watched = (next(row["median_us"] for row in steps if row["method"] == name) for name in ("bare", "watched"))
    cells: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row["hidden"], row["batch"]), {})[row["method"]] = row["median_us"]
    size = {row["hidden"]: row["weight_bytes"] for row in rows}
    alone = {d: cells[d, 1] for d in size}
    others = {at: min(found[name] for name in (REPAIRED, GATHERED)) for at, found in cells.items()}
    return {
        "rows": rows + steps + uploads,
        "read_gb_per_s": round(rate / 1e9, 1),
        "claims": {
            "kernel_read_fraction": min(size[d] / (alone[d][OURS] / 1e6) / rate for d in size),
            "step_us": steps[0]["median_us"],
            "decode_overhead_pct": 100 * (watched / bare - 1),
            "vs_repaired_bank": min(alone[d][REPAIRED] / alone[d][OURS] for d in size),
            "worst_cell_vs_best_other": max(found[OURS] / others[at] for at, found in cells.items()),
        },
    }
