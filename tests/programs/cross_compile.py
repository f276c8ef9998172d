"""Compile every kernel for real GPUs, without one: a line of JSON a kernel, with the shared memory it asks for.

    python tests/programs/cross_compile.py          # TRITON_INTERPRET must not be set
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from probemon.kernels import triton_fused as kernels

POINTERS = {"x_ptr": "w", "w1_ptr": "w", "w2_ptr": "w", "w3_ptr": "w", "rows_ptr": "i64", "slots_ptr": "i64", "arrived_ptr": "i32"}
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


def signature(kernel, constants, dtype):
    found = {}
    for name in kernel.arg_names:
        if name in constants:
            found[name] = "constexpr"
        elif name.endswith("_ptr"):
            kind = POINTERS.get(name, "fp32")
            found[name] = "*" + (NAMES[dtype] if kind == "w" else kind)
        else:
            found[name] = "i32"
    return found


def cases():
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for d, h1, h2, layers in ((576, 128, 64, 3), (2560, 128, 64, 3), (4096, 128, 64, 3), (4096, 256, 256, 3), (4096, 512, 1, 2), (70, 5, 3, 3)):
            yield f"layered {layers} {h1}-{h2} {d} {dtype}", kernels._layered, kernels.layered_meta(h1, h2, d, layers), dtype
        yield f"linear 4096 {dtype}", kernels._linear, {"BLOCK_D": kernels.block_sizes(4096), "PAIRS": kernels.PAIRS}, dtype


def main():
    for arch in (80, 90):
        for name, kernel, constants, dtype in cases():
            source = ASTSource(fn=kernel, signature=signature(kernel, constants, dtype), constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", arch, 32))
            print(json.dumps({"kernel": name, "arch": arch, "shared": made.metadata.shared, "cubin_bytes": len(made.asm["cubin"])}))


if __name__ == "__main__":
    sys.exit(main())
