#!/usr/bin/env python3
# ruff: noqa: E402
"""What a fused kernel for a form of the update could spare: operations that a GPU would launch, and bytes moved.

    python scripts/benchmarks/form_launches.py --json docs/benchmarks/form_launches.json

Counted, not timed, so that a CPU tells it: a random host of the demo model's shape, with an adapter of each form of
about as many trainable numbers on its attention outputs and MLPs. An operation that makes a tensor or writes one is a
launch; views are none. Of an update the bytes are those that each operation reads and writes, beside those of a kernel
that reads input, code, output and weights once and writes the output once. `waits` are numbers that the program waits
for. `compiled`: of an update at one site the kernels that torch.compile makes, and its calls of others (products); that
is the CPU's compiler, which fuses by the same rules as a GPU's.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.config import FORMS
from probemon.adapters.bem.evaluation.budget import solve
from probemon.adapters.bem.update import generated_update
from probemon.util.files import write_text_atomically
from provenance import about

ROWS = (1, 512)  # a step of generation, and a prompt
BUDGET_RANK = 8  # of the low-rank update whose trainable numbers the other forms come near to
OF_FORM: dict[str, dict[str, Any]] = {
    "low_rank": {}, "head_groups": {"sites": ("o",), "groups": 9}, "rank_mask": {"active": 4},
    "kronecker": {"terms": 2}, "film": {},
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations that make or write tensors, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.n_bytes, self.waits = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits += 1
        elif not _is_view(func) and "empty" not in func.__name__:
            self.n += 1
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.n_bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


def _is_view(func: Any) -> bool:
    aliases = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@dataclass(frozen=True)
class Count:
    """Of one call: operations, bytes, waits."""

    n: int
    n_bytes: int
    waits: int


def count(call: Callable[[], object]) -> Count:
    with Launches() as seen:
        call()
    return Count(seen.n, seen.n_bytes, seen.waits)


def make_host() -> Any:
    """A random llama of the demo model's shape, but for its vocabulary, which no adapter touches."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def counted(bem: Bem, n_rows: int) -> dict[str, Any]:
    """Of all sites at so many tokens: launches of updates and of limits; an update's bytes, and a fused kernel's."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(n_rows, bem.config.code_size, generator=generator)
    limits = count(lambda: bem.governor.apply(dict.fromkeys((True, False), codes)))
    applied = bem.governor.apply(dict.fromkeys((True, False), codes))
    launches = n_bytes = fused = 0
    compiled: dict[str, Any] = {}
    for site in bem.sites:
        form, code = bem.updates[site.key], applied[site.key]
        x, base = torch.randn(n_rows, site.n_in), torch.randn(n_rows, site.n_out)
        if bem.config.form == "low_rank":
            update, given = partial(generated_update, scale=bem.config.scale, base=base), (x, form.V, form.U, code)
        else:
            update, given = form, (x, code[:, :-1], base, code[:, -1:])
        one = count(partial(update, *given))
        if n_rows > 1 and not compiled:
            compiled = {"compiled": kernels_of(update, given), "eager_at_a_site": one.n}
        launches, n_bytes = launches + one.n, n_bytes + one.n_bytes
        read = (code, base, base) if bem.config.form == "film" else (x, code, base, base)
        fused += sum(4 * tensor.numel() for tensor in (*read, *form.parameters()))
    return {
        "rows": n_rows, "sites": len(bem.sites), "update_launches": launches, "limit_launches": limits.n,
        "limit_waits": limits.waits, "update_bytes": n_bytes, "fused_bytes": fused,
    } | compiled  # fmt: skip


def kernels_of(update: Callable[..., Tensor], given: tuple[Tensor, ...]) -> dict[str, int]:
    """How many kernels torch.compile makes of an update, and how many products it calls."""
    torch.compiler.reset()
    _, sources = run_and_get_code(torch.compile(update), *given)
    calls = "".join(source.split("def call(")[-1] for source in sources)
    return {
        "fused": len(re.findall(r"cpp_fused\w*\(", calls)),
        "called": len(re.findall(r"extern_kernels\.\w+\(", calls)),
    }


@torch.no_grad()  # in inference mode an operation that is made of others would count as one
def main() -> None:
    """Count, show, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    host, rows = make_host(), []
    of_host = {n: count(partial(host, torch.ones(1, n, dtype=torch.int64), use_cache=False)).n for n in ROWS}
    with attach_bem(host, BemConfig(rank=BUDGET_RANK)) as bem:
        budget = sum(parameter.numel() for parameter in bem.parameters())
    for form in FORMS:
        config = solve(host, BemConfig(form=form, **OF_FORM[form]), budget).config
        with attach_bem(host, config) as bem:
            generator = torch.Generator().manual_seed(0)
            for parameter in bem.updates.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            for n_rows in ROWS:
                found = {"form": form, "n_trainable": sum(p.numel() for p in bem.parameters()), **counted(bem, n_rows)}
                rows.append(found)
                print(f"{form:12s} {n_rows:4d} rows: {found}")
    found = {"data": "random", "host_launches": {str(n): k for n, k in of_host.items()}, "rows": rows}
    if arguments.json:
        write_text_atomically(arguments.json, json.dumps(found | about(), indent=1) + "\n")


if __name__ == "__main__":
    main()
