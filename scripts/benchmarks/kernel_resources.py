#!/usr/bin/env python3
# ruff: noqa: E402
"""What the Triton kernels need of a GPU (registers, shared memory) and the time that their bytes take: on paper.

    python scripts/benchmarks/kernel_resources.py --json docs/benchmarks/kernel_resources.json
    python scripts/benchmarks/kernel_resources.py --kernel _layered --chip 90

No GPU is needed. The launchers of the package are called with tensors of the sizes below, and
what they would launch is recorded: kernel, arguments, settings, number of programs. Triton compiles each launch for
each chip, as it would there; its `ptxas -v` says what the code needs. The rest is arithmetic with the public limits of
the chips (`CHIPS`): how many warps can reside on a processor, and how long the bytes that a launch has to move, and its
products, take at the stated rates. A launch that has to read its bytes from memory takes at least as long; weights that
the chip's cache still holds come sooner. How long it takes, only a GPU tells.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]

import numpy as np
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.controller import Controller, named_weights
from probemon.adapters.bem.kernels.controller import StepSettings, controller_step
from probemon.adapters.bem.kernels.update import generated_update
from probemon.core.hierarchy import ConceptTree
from probemon.core.plan import CascadePlan
from probemon.core.probes import input_dtype
from probemon.core.settings import CascadeConfig
from probemon.engine.kernels import triton_cascade, triton_pairs
from probemon.engine.kernels.triton_cascade import DeviceCascade
from probemon.engine.kernels.triton_pairs import GROUP, normalise_triton, score_triton
from probemon.engine.kernels.triton_softmax import softmax_triton
from probemon.util.files import write_text_atomically
from provenance import about

HIDDEN = (576, 2560, 4096)
DTYPES = (torch.bfloat16, torch.float32)
H1, H2 = 128, 64
PROBES, STATES = 64, 64  # of a launch over pairs; of many states
CASCADE = 256  # probes of a hierarchy, all active
ROWS = 512  # of a prompt, of the generated update; of a step there is one
RANK, CONTROLLER_ROWS = 8, 16
WARP, REGISTERS_OF_A_WARP_COME_IN, SHARED_COMES_IN, SHARED_OF_THE_SYSTEM = 32, 256, 128, 1024


@dataclass(frozen=True)
class Chip:
    """Public limits of a chip. Of a processor (SM): warps, programs, registers, bytes of shared memory; of a program:
    bytes of shared memory. Of the chip: processors, bytes a second from its memory, operations a second in fp32 outside
    the matrix units and of dense bf16 on them, a fused multiply-add counted as two.
    """

    name: str
    processors: int
    shared: int
    shared_of_program: int
    bytes_per_second: float
    flops_per_second: float
    matrix_flops_per_second: float
    warps: int = 64
    programs: int = 32
    registers: int = 65536
    parts: int = 4  # of a processor, each with its own registers


# Limits of a processor: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 8.0, 9.0
# and 10.0. Rates and processors: NVIDIA's data sheets of the A100 80 GB SXM, of the H100 SXM, and of the HGX B200 (an
# eighth of its eight GPUs); the architectures' white papers for the number of processors.
CHIPS = {
    80: Chip("A100", 108, 164 << 10, 163 << 10, 2.039e12, 19.5e12, 312e12),
    90: Chip("H100", 132, 228 << 10, 227 << 10, 3.35e12, 67e12, 989e12),
    100: Chip("B200", 148, 228 << 10, 227 << 10, 8.0e12, 75e12, 2250e12),
}


@dataclass(frozen=True)
class Launch:
    """What a launcher would launch."""

    what: str
    hidden: int
    dtype: str
    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def programs(self) -> int:
        return int(np.prod(self.grid))

    @property
    def named(self) -> dict[str, Any]:
        """Arguments by their names in the kernel."""
        return dict(zip(self.kernel.arg_names, self.args, strict=False)) | self.options


@dataclass
class PretendedDriver:
    """Stands for Triton's driver where there is no GPU: the chip to compile for."""

    chip: int = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.chip, WARP)

    def get_current_device(self) -> int:
        return self.chip  # each chip has its own compiled kernels

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def recording() -> Iterator[list[tuple[Any, ...]]]:
    """In this block kernels are not launched: the list gets kernel, arguments, options and grid."""
    seen: list[tuple[Any, ...]] = []
    run = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append((kernel, args, options, grid))

    JITFunction.run = record  # type: ignore[method-assign,assignment]
    try:
        yield seen
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def launches() -> Iterator[Launch]:
    """What the package launches at these sizes, each launch once: some do not depend on the hidden size or the dtype.
    Tensors are empty, since nothing reads them.
    """
    known = set()
    for launch in _all_launches():
        sizes = tuple((value.shape, value.dtype) if isinstance(value, Tensor) else None for value in launch.args)
        key = (launch.name, launch.grid, sizes, str(launch.options))
        if key not in known:
            known.add(key)
            yield launch


def _all_launches() -> Iterator[Launch]:
    for hidden in HIDDEN:
        for dtype in DTYPES:
            yield from _scored(hidden, dtype)
            yield from _adapted(hidden, dtype)
    yield from _scored(HIDDEN[-1], torch.int8)
    sizes = np.full(100, 8)
    logits, starts = np.zeros(sizes.sum(), np.float32), np.cumsum(sizes) - sizes
    cpu = torch.device("cpu")
    yield from _recorded("800 logits in groups", 0, torch.float32, lambda: softmax_triton(logits, starts, cpu))


def _recorded(what: str, hidden: int, dtype: torch.dtype, call: Callable[[], object]) -> Iterator[Launch]:
    with recording() as seen:
        call()
    for kernel, args, options, grid in seen:
        yield Launch(what, hidden, str(dtype).removeprefix("torch."), kernel, args, options, grid)


def _scored(hidden: int, dtype: torch.dtype) -> Iterator[Launch]:
    inputs = input_dtype(dtype)
    for module in (triton_pairs, triton_cascade):  # as on the chips, of which every one has them
        module.uses_matrix_units = lambda device, dtype: dtype == torch.bfloat16  # type: ignore[attr-defined]
    for kind, shape in (("128-64-1 probes", (H1, H2)), ("linear probes", ())):
        net = probes(PROBES, shape, hidden, dtype)
        for n_states in (1, STATES):
            x = torch.empty(n_states, hidden, dtype=inputs)
            rows, slots = (torch.arange(n_states * PROBES) // PROBES, torch.arange(n_states * PROBES) % PROBES)
            what = f"{PROBES} {kind}, {_counted(n_states, 'state')}"
            yield from _recorded(what, hidden, dtype, lambda: score_triton(x, net, rows, slots))  # noqa: B023
        net = probes(CASCADE, shape, hidden, dtype)
        for grouped in (False, True) if hidden == HIDDEN[0] and dtype == DTYPES[0] else (False,):
            cascade = DeviceCascade(plan(grouped), net, np.zeros(CASCADE))
            of_groups = " in softmax groups" if grouped else ""
            what = f"descent of 1 state, {CASCADE} {kind}{of_groups}, all active"
            x = torch.empty(1, hidden, dtype=inputs)
            for launch in _recorded(what, hidden, dtype, lambda: cascade.descend(x, 1, None)):  # noqa: B023
                if launch.name == "_score" or not shape:
                    yield launch
    x = torch.empty(STATES, hidden, dtype=inputs)
    yield from _recorded(
        f"RMSNorm of {STATES} states", hidden, dtype, lambda: normalise_triton(x, "rmsnorm", 1e-5, inputs)
    )


def probes(n: int, shape: tuple[int, ...], hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of n probes with so many units in their hidden layers, as an arena holds them."""
    sizes = (hidden, *shape, 1)
    net = {}
    for i in range(1, len(sizes)):
        net[f"w{3 if shape and i == len(sizes) - 1 else i}"] = torch.empty(n, sizes[i], sizes[i - 1], dtype=dtype)
        net[f"b{3 if shape and i == len(sizes) - 1 else i}"] = torch.empty(n, sizes[i])
    if dtype == torch.int8:
        net |= {f"{name}_scale": torch.empty(n, net[name].shape[1]) for name in list(net) if name.startswith("w")}
    return net


def plan(grouped: bool) -> CascadePlan:
    """A plan over a hierarchy of two levels whose probes are all active; grouped: in softmax groups of seven."""
    ids, n_roots = [f"c{i}" for i in range(CASCADE)], CASCADE // 8
    parents = [[] if i < n_roots else [ids[(i - n_roots) // 7]] for i in range(CASCADE)]
    if not grouped:  # some have two, so that ancestors are looked for
        parents = [[*above, ids[i % n_roots]] if i % 3 == 0 and above else above for i, above in enumerate(parents)]
        parents = [sorted(set(above)) for above in parents]
    groups = [-1 if i < n_roots else (i - n_roots) // 7 for i in range(CASCADE)] if grouped else None
    _, tree = ConceptTree.build(ids, parents, softmax_group=groups)
    config = CascadeConfig(max_loaded_probes=CASCADE)
    rule = "independent" if grouped else "path"
    return CascadePlan.of(tree, rule, config, np.full(CASCADE, 0.5, np.float32), list(range(CASCADE)))


def _adapted(hidden: int, dtype: torch.dtype) -> Iterator[Launch]:
    v, u = (torch.empty(RANK, hidden).t().requires_grad_() for _ in range(2))  # rows of V^T and U^T contiguous
    for n_rows in (1, ROWS):
        x, base = (torch.empty(n_rows, hidden, dtype=dtype) for _ in range(2))
        codes = torch.empty(n_rows, RANK)

        def inferred() -> None:
            with torch.no_grad():
                generated_update(x, v, u, codes, 2.0, base=base)  # noqa: B023

        yield from _recorded(f"update of rank {RANK}, {_counted(n_rows, 'row')}", hidden, dtype, inferred)
    x.requires_grad_(), codes.requires_grad_()

    def trained() -> None:
        out = generated_update(x, v, u, codes, 2.0, base=base)
        out.backward(torch.empty_like(out))

    yield from _recorded(f"the same in training, {_counted(ROWS, 'row')}", hidden, dtype, trained)
    config = BemConfig()
    controller, n = Controller(hidden, config), CONTROLLER_ROWS
    settings = StepSettings(config.ema, config.max_norm, config.prefix_tokens, config.token_limit, 2, 1)
    state, real = torch.empty(n, 1, hidden, dtype=dtype, requires_grad=True), torch.ones(n, 1, dtype=torch.bool)
    width = config.width
    carry = (
        torch.zeros(n, dtype=torch.int64), torch.empty(n, config.chunk_tokens, width), torch.empty(n, config.rank),
        torch.empty(n, width), torch.empty(n), torch.empty(n),
    )  # fmt: skip

    def stepped() -> None:
        step = controller_step(state, real, carry, named_weights(controller), settings)
        (step.z.sum() + step.confidence.sum()).backward()

    yield from _recorded(f"a step of the controller, {_counted(n, 'row')}", hidden, dtype, stepped)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


# What a launch only writes, and what it writes and reads again within its caches. Kernels that only keep lists move
# little, and how much hangs on what is active: no bytes are stated of these.
WRITTEN = {
    "_layered": ("out_ptr",),
    "_layered_groups": ("out_ptr",),
    "_states": ("out_ptr",),
    "_linear": ("out_ptr",),
    "_score": ("own_ptr",),
    "_normalise": ("out_ptr",),
    "_over_rows": ("sums_ptr", "out_ptr"),
    "_over_columns": ("parts_ptr",),
    "features": ("z_ptr",),
    "step": (
        "n_out_ptr", "open_out_ptr", "code_out_ptr", "summary_out_ptr", "mass_out_ptr", "sure_out_ptr",
        "prefix_out_ptr", "chunk_out_ptr", "token_out_ptr", "used_out_ptr", "index_out_ptr", "boundary_out_ptr",
        "level_out_ptr",
    ),
    "step_back": (
        "of_z_ptr", "of_open_ptr", "of_code_ptr", "of_summary_ptr", "of_mass_ptr", "of_sure_ptr", "parts_ptr",
    ),
    "features_back": ("hat_ptr", "of_y_ptr", "moments_ptr"),
}  # fmt: skip
SCRATCH = {name: ("parts_ptr", "arrived_ptr") for name in ("_layered", "_layered_groups", "_states", "_score")}


def moved(launch: Launch) -> tuple[int, int] | None:
    """Bytes that a launch has to read and to write: each tensor once."""
    if launch.name not in WRITTEN or launch.named.get("DOES") == 2:  # which reads parts alone
        return None
    written, scratch = WRITTEN[launch.name], SCRATCH.get(launch.name, ())
    tensors = {name: value for name, value in launch.named.items() if isinstance(value, Tensor)}
    # One that stands for others that are not there is counted once.
    reads = {value.data_ptr(): value for name, value in tensors.items() if name not in (*written, *scratch)}
    writes = [value for name, value in tensors.items() if name in written]
    return sum(map(_n_bytes, reads.values())), sum(map(_n_bytes, writes))


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def flops(launch: Launch) -> int | None:
    """Operations of the products with weights, a multiplication and an addition each."""
    a = launch.named
    if launch.name in ("_layered", "_layered_groups", "_states", "_linear", "_score") and a.get("DOES") != 2:
        n_pairs = (a["own_ptr"] if launch.name == "_score" else a["out_ptr"]).numel()
        weights = (a[name] for name in ("w1_ptr", "w2_ptr", "w3_ptr") if name in a and a[name].dim() == 3)
        return 2 * n_pairs * sum(weight[0].numel() for weight in weights)
    if launch.name == "_over_rows":
        return 2 * a["M"] * a["RANK"] * (a["K"] + (0 if a["out_ptr"] is None else a["N"]))
    if launch.name == "_over_columns":
        return 2 * a["M"] * a["RANK"] * a["K"]
    if launch.name in ("features", "features_back"):
        return 2 * launch.named["hidden_ptr"].numel() * a["WIDTH"]
    if launch.name in ("step", "step_back"):  # of a row that completes its chunk; backward, forward again and two more
        routers = [value for name, value in a.items() if re.fullmatch(r"[pct]\d_ptr", name) and value is not None]
        once = 2 * len(a["n_ptr"]) * sum(value.numel() for value in routers if value.dim() == 2)
        return once * (4 if launch.name == "step_back" else 1)
    return None


def asked_of_caches(launch: Launch) -> int | None:
    """Bytes of states and first layers that the programs of a launch over pairs load, all together."""
    a = launch.named
    share = {"_layered": 1, "_layered_groups": GROUP, "_states": a.get("BLOCK")}.get(launch.name)
    if share is None or a.get("DOES") == 2:
        return None
    n_pairs, w1, x = a["out_ptr"].numel(), a["w1_ptr"], a["x_ptr"]
    of_state = x[0].numel() * x.element_size()
    return n_pairs // share * w1[0].numel() * w1.element_size() + n_pairs * a["N_PARTS"] * of_state


@dataclass(frozen=True)
class Needs:
    """What compiled code needs, by `ptxas -v` and Triton. `widest_load`: bytes that a thread loads at once at most."""

    num_warps: int
    registers: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    dynamic_shared: int
    widest_load: int
    fused: bool
    matrix_unit: bool


class Compiler:
    """Compiles launches for chips, as a launch there would: `of(launch, 90)`."""

    def __init__(self) -> None:
        self._driver = PretendedDriver()
        self._said: dict[str, str] = {}  # by ptxas of code that Triton compiles once
        driver.set_active(self._driver)

    def of(self, launch: Launch, chip: int) -> Needs:
        self._driver.chip, said = chip, io.StringIO()
        with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(said):
            knobs.nvidia.dump_ptxas_log = True  # of its own call, which has -v and its own flags
            knobs.compilation.always_compile = True
            code = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
        log = self._said.setdefault(code.hash, said.getvalue())
        text, options = code.asm["ptx"], code.metadata

        def number(pattern: str, otherwise: int | None = None) -> int:
            found = re.search(pattern, log)
            if found is None and otherwise is None:
                raise LookupError(f"ptxas says nothing of {pattern!r}: {log[-300:]!r}")
            return int(found[1]) if found else int(otherwise or 0)

        vectors = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)\b", text)
        widths = [int(n or 1) * int(bits) // 8 for n, bits in vectors]
        widths += [int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x[0-9a-f]+)", text)]
        return Needs(
            num_warps=options.num_warps,
            registers=number(r"Used (\d+) registers"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
            static_shared=number(r"(\d+) bytes smem", 0),
            dynamic_shared=options.shared,
            widest_load=max(widths, default=0),
            fused="fma.rn.f32" in text,
            matrix_unit=bool(re.search(r"\b(?:wg)?mma\b|tcgen05\.mma", text)),
        )


def resident_programs(chip: Chip, registers: int, shared: int, num_warps: int) -> tuple[int, str]:
    """Programs that reside on a processor at once, and what limits them. Registers are given out to whole warps, in
    each quarter of a processor for itself; a program's shared memory has 1 KB of the system's beside it.
    """
    of_warp = -(-registers * WARP // REGISTERS_OF_A_WARP_COME_IN) * REGISTERS_OF_A_WARP_COME_IN
    warps = chip.registers // chip.parts // max(of_warp, 1) * chip.parts
    of_program = -(-(shared + SHARED_OF_THE_SYSTEM) // SHARED_COMES_IN) * SHARED_COMES_IN
    limits = {
        "warps": chip.warps // num_warps,
        "registers": warps // num_warps,
        "shared memory": chip.shared // of_program if shared <= chip.shared_of_program else 0,
        "programs": chip.programs,
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def row(launch: Launch, chip: int, compiler: Compiler) -> dict[str, Any]:
    """Everything about a launch on a chip; `error` where it does not compile."""
    known, n_flops, limits = moved(launch), flops(launch), CHIPS[chip]
    found: dict[str, Any] = {
        "kernel": launch.name, "launch": launch.what, "hidden": launch.hidden, "dtype": launch.dtype, "sm": chip,
        "programs": launch.programs,
    }  # fmt: skip
    try:
        needs = compiler.of(launch, chip)
    except Exception as error:  # a row that says so: whatever the compiler raises
        return found | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    shared = needs.static_shared + needs.dynamic_shared
    programs, limit = resident_programs(limits, needs.registers, shared, needs.num_warps)
    busy = min(programs, -(-launch.programs // limits.processors))
    found |= asdict(needs) | {
        "resident_warps": programs * needs.num_warps, "limited_by": limit, "busy_warps": busy * needs.num_warps,
    }  # fmt: skip
    if known is not None:
        read, written = known
        rate = limits.matrix_flops_per_second if needs.matrix_unit else limits.flops_per_second
        found |= {
            "bytes_read": read, "bytes_written": written, "bytes_asked": asked_of_caches(launch), "flops": n_flops,
            "read_us": 1e6 * read / limits.bytes_per_second,
            "moved_us": 1e6 * (read + written) / limits.bytes_per_second,
            "flops_us": None if n_flops is None else 1e6 * n_flops / rate,
        }  # fmt: skip
    return found


def main() -> None:
    """Compile, show, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--kernel", help="only this one, such as _layered")
    parser.add_argument("--chip", type=int, choices=list(CHIPS), help="only this one: its compute capability, times 10")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: in its interpreter Triton compiles nothing")
    compiler, rows = Compiler(), []
    for launch in launches():
        if arguments.kernel in (None, launch.name):
            for chip in CHIPS if arguments.chip is None else (arguments.chip,):
                rows.append(row(launch, chip, compiler))
                print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        chips = {str(chip): asdict(limits) for chip, limits in CHIPS.items()}
        found = {"ran_on_a_gpu": False, "triton": triton.__version__, "chips": chips, "rows": rows}
        write_text_atomically(arguments.json, json.dumps(found | about(), indent=1) + "\n")


if __name__ == "__main__":
    main()
