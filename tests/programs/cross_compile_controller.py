"""Compile the kernels of the controller's step for real GPUs, without one: a line of JSON a kernel.

python tests/programs/cross_compile_controller.py            # TRITON_INTERPRET must not be set
python tests/programs/cross_compile_controller.py --sample   # each kernel once, at the default sizes
"""

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.kernels import controller as bem_controller
from probemon.adapters.bem.kernels import controller_forward as bem_step

SETTINGS = BemConfig()
OPTIONS = ("num_warps", "enable_fp_fusion")
INT64 = ("n_ptr", "n_out_ptr", "index_out_ptr", "level_out_ptr")
BOOL = ("real_ptr", "boundary_out_ptr")
ROUTERS = {"prefix": "p", "chunk": "c", "token": "t"}


def cases(arch):
    """As in a launch, where what is not there is None: of the defaults, and, where memory is least, of a wide one
    without some routers.
    """
    for width, rank, size, d, dtype, absent in (
        (64, 8, 32, 4096, "bf16", ()),
        (1024, 64, 7, 70, "fp32", ("chunk", "token")),
    )[: 1 if arch > 80 else 2]:
        name = f"{width} {rank} {size} {d} {dtype}"
        meta, wide = (
            bem_controller.step_meta(width, rank, size, SETTINGS, torch.float32),
            bem_controller.features_meta(width, d, torch.float32),
        )
        none = dict.fromkeys(f"{ROUTERS[router]}{i}_ptr" for router in absent for i in range(6))
        out = dict.fromkeys(f"{router}_out_ptr" for router in absent)
        yield f"features {name}", bem_step.features, wide | {"ROWS": bem_controller.ROWS}, dtype, {}
        yield f"step {name}", bem_step.step, meta, dtype, none | out


def source(kernel, meta, dtype, absent):
    constants = {key: value for key, value in meta.items() if key in kernel.arg_names} | absent
    found = {}
    for argument in kernel.arg_names:
        if argument in constants:
            found[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            found[argument] = (
                "*i64"
                if argument in INT64
                else "*i1"
                if argument in BOOL
                else "*" + (dtype if argument == "hidden_ptr" else "fp32")
            )
        else:
            found[argument] = "i32"
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(kernel.arg_names)
        if found[argument].startswith("*")
    }
    return ASTSource(fn=kernel, signature=found, constexprs=constants, attrs=even)


def main():
    arches = (90,) if "--sample" in sys.argv else (80, 90)
    for arch in arches:
        for name, kernel, meta, dtype, absent in cases(arch):
            options = {option: meta[option] for option in OPTIONS}
            made = triton.compile(
                source(kernel, meta, dtype, absent), target=GPUTarget("cuda", arch, 32), options=options
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
