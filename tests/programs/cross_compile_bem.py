"""Compile the kernels of the generated update for real GPUs, without one: a line of JSON a kernel.

python tests/programs/cross_compile_bem.py            # TRITON_INTERPRET must not be set
python tests/programs/cross_compile_bem.py --sample   # each kernel on the chip that has least shared memory
"""

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from probemon.adapters.bem.kernels import update as kernels

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
OF_STATES = ("a_ptr", "base_ptr", "out_ptr")
# Pointers that a launch may leave out: of inference, without and with a base; of training, forward and backward.
LAUNCHES = {"alone": ("sums_ptr", "base_ptr"), "kept": (), "back": ("base_ptr",), "sums only": ("base_ptr", "out_ptr")}
OPTIONS = ("num_warps", "enable_fp_fusion")


SHAPES = (
    (8, 4096, ("kept", "alone")),
    (5, 70, ("back", "sums only")),
    (64, 4096, ("kept",)),
    (1, 4096, ("kept",)),
    (2, 4096, ("kept",)),
)


def cases(arch, sample=False):
    for dtype in [torch.bfloat16] if sample else NAMES:
        # What needs most on the chip that has least, and of fp64 everywhere.
        shapes = SHAPES[3:] if arch == 86 or dtype == torch.float64 else SHAPES[:4]
        for rank, d, launches in SHAPES[1:4:2] if sample else shapes:
            meta = kernels.tile_meta(rank, d, dtype)
            for launch in launches:
                yield f"rows, {launch}, {rank} {d} {dtype}", kernels._over_rows, meta, dtype, LAUNCHES[launch]
            if rank != 64:
                yield f"columns {rank} {d} {dtype}", kernels._over_columns, meta, dtype, ()


def source(name, kernel, meta, dtype, absent):
    """As in a launch, where Triton sees what is None or 1 and what 16 divides."""
    constants = {key: value for key, value in meta.items() if key in kernel.arg_names} | dict.fromkeys(absent)
    constants |= {key: 1 for key in ("FIRST_K", "SECOND_N") if key in kernel.arg_names}  # V^T and U^T contiguous
    found = {}
    for argument in kernel.arg_names:
        if argument in constants:
            found[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            wide = argument in OF_STATES or dtype == torch.float64
            found[argument] = "*" + (NAMES[dtype] if wide else "fp32")
        else:
            found[argument] = "fp32" if argument in ("scale", "eps") else "i32"
    sizes = ("K", "N", "A_ROW", "BASE_ROW", "FIRST_R", "SECOND_R", "N_SHARE", "PART_ROWS")
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(kernel.arg_names)
        if found[a] != "constexpr" and (a.endswith("_ptr") or (a in sizes and " 70 " not in name))
    }
    return ASTSource(fn=kernel, signature=found, constexprs=constants, attrs=even)


def main():
    sample = "--sample" in sys.argv
    for arch in (86,) if sample else (80, 86, 90):
        for name, kernel, meta, dtype, absent in cases(arch, sample):
            options = {option: meta[option] for option in OPTIONS}
            made = triton.compile(
                source(name, kernel, meta, dtype, absent), target=GPUTarget("cuda", arch, 32), options=options
            )
            told = {"kernel": name, "arch": arch, "shared": made.metadata.shared, "cubin_bytes": len(made.asm["cubin"])}
            print(
                json.dumps(
                    {
                        **told,
                        "instructions": sorted(set(re.findall(r"^\s*(?:@%p\d+ )?([a-z]+)[.;]", made.asm["ptx"], re.M))),
                    }
                )
            )


if __name__ == "__main__":
    sys.exit(main())
