"""Compile every kernel for real GPUs, without one: a line of JSON a kernel, with the shared memory it asks for.

python tests/programs/cross_compile.py            # TRITON_INTERPRET must not be set
python tests/programs/cross_compile.py --sample   # each kernel once a chip, at the sizes that need most
"""

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from probemon.core.dtypes import input_dtype
from probemon.engine.kernels import triton_cascade as cascade
from probemon.engine.kernels import triton_matrix as matrix
from probemon.engine.kernels import triton_pairs as kernels
from probemon.engine.kernels import triton_softmax as softmax

WEIGHTS = ("w1_ptr", "w2_ptr", "w3_ptr")
FLOATS = (
    *(f"{kind}{i}_ptr" for kind in "sb" for i in (1, 2, 3)),
    "parts_ptr",
    "own_ptr",
    "score_ptr",
    "threshold_ptr",
    "z_ptr",
)
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16", torch.int8: "i8"}


def signature(kernel, constants, dtype):
    found = {}
    for name in kernel.arg_names:
        if name in constants:
            found[name] = "constexpr"
        elif name.endswith(("_ptr", "_idx")):
            pairs = {"rows_ptr": "i64", "slots_ptr": "i64", "out_ptr": "fp32"}
            found[name] = "*" + (
                NAMES[dtype]
                if name in WEIGHTS
                else (
                    NAMES[input_dtype(dtype)]
                    if name == "x_ptr"
                    else pairs.get(name, "fp32" if name in FLOATS else "i32")
                )
            )
        else:
            found[name] = "fp32" if name in ("eps", "ONE") else "i32"
    return found


DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int8)
SAMPLED = {80: (torch.bfloat16,), 90: (torch.int8,)}


def cases(arch, sample=False):
    for dtype in SAMPLED[arch] if sample else DTYPES:
        scaled = dtype == torch.int8
        shapes = (
            (576, 128, 64, 3),
            (2560, 128, 64, 3),
            (4096, 128, 64, 3),
            (4096, 256, 256, 3),
            (4096, 512, 1, 2),
            (70, 5, 3, 3),
        )
        # What needs most everywhere; all on the newer chip. Code for fp16 is that for bf16, but for the conversion.
        for d, h1, h2, layers in shapes if arch == 90 and dtype != torch.float16 and not sample else shapes[3:4]:
            meta = kernels.layered_meta(h1, h2, d, layers, scaled)
            for name, kernel in (
                ("layered", kernels._layered),
                ("layered groups", kernels._layered_groups),
                ("cascade: score", cascade._score),
            ):
                n_parts = -(-h1 // kernels.ROWS)
                more = cascade.NO_MATRIX | {"N_PARTS": n_parts} if kernel is cascade._score else {}
                yield f"{name} {layers} {h1}-{h2} {d} {dtype}", kernel, meta | more, dtype
            if dtype in (torch.bfloat16, torch.int8):
                for _, _, columns, does in matrix.launches(4096, 64, h1, h2) + matrix.launches(64, 1, h1, h2):
                    constants = matrix.matrix_meta(h1, h2, columns, layers, scaled) | {"DOES": does}
                    yield f"states {does} {layers} {h1}-{h2} {d} {dtype}", matrix._states, constants, dtype
                one = matrix.matrix_meta(h1, h2, matrix.NARROW, layers, scaled) | {"BLOCK_PARTS": 0}
                yield f"matrix cascade: score {layers} {h1}-{h2} {d} {dtype}", cascade._score, one, dtype
        linear = {
            "LAYERS": 1,
            "SCALED": scaled,
            "BLOCK_D": kernels.block_sizes(4096),
            "ROWS": kernels.PAIRS,
            "BLOCK_H2": 1,
            "BLOCK_PARTS": 1,
            "LOGITS": dtype == torch.float32,
            "N_PARTS": 1,
        } | cascade.NO_MATRIX
        yield f"cascade: score linear 4096 {dtype}", cascade._score, linear, dtype
        yield (
            f"linear 4096 {dtype}",
            kernels._linear,
            {"SCALED": scaled, "BLOCK_D": kernels.block_sizes(4096), "PAIRS": kernels.PAIRS, "LOGITS": False},
            dtype,
        )
        # It writes fp32, and reads what a host gives: bf16, fp16 or fp32.
        for norm, layernorm in ((False, False), (True, False), (True, True)):
            constants = {"NORM": norm, "LAYERNORM": layernorm, "BLOCK_D": 4096}
            yield f"normalise {norm} {layernorm} {dtype}", kernels._normalise, constants, dtype
    if sample and arch != 80:
        return  # what follows knows neither dtype nor sizes of probes
    for path, close in ((True, True),) if sample else ((False, False), (True, False), (True, True)):
        yield (
            f"cascade: begin, close {close}",
            cascade._begin,
            {"CLOSE": close, "BLOCK": 64, "LINKS": 64, "CLEARED": 1024},
            torch.float32,
        )
        for opens in (0, 1, 2):
            constants = {"PATH": path, "CLOSE": close, "OPEN": opens, "BLOCK": 64, "LINKS": 64}
            yield f"cascade: expand {constants}", cascade._expand, constants, torch.float32
    yield "cascade: share", cascade._share, {"BLOCK": 64}, torch.float32
    yield "shares of pairs", softmax._shares, {"BLOCK": 64}, torch.float32
    for cap in (1024,) if sample else (16, 512, 1024):
        yield f"cascade: finish {cap}", cascade._finish, {"BLOCK_CAP": cap}, torch.float32


def main():
    for arch in (80, 90):
        for name, kernel, constants, dtype in cases(arch, "--sample" in sys.argv):
            # As in a launch, where Triton sees what 16 divides.
            even = (
                {}
                if " 70 " in name
                else {
                    (i,): [["tt.divisibility", 16]]
                    for i, a in enumerate(kernel.arg_names)
                    if a.endswith("_ptr") or a in ("D", "H1", "H2")
                }
            )
            source = ASTSource(
                fn=kernel, signature=signature(kernel, constants, dtype), constexprs=constants, attrs=even
            )
            warps = {"num_warps": matrix.WARPS} if constants.get("COLUMNS") else {}
            options = kernels.OPTIONS | warps
            made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            told = {"kernel": name, "arch": arch, "shared": made.metadata.shared, "cubin_bytes": len(made.asm["cubin"])}
            told["layouts"] = layouts(made.asm["ttgir"], constants)
            told["fused"] = len(re.findall(r"\bfma\.rn\.f32\b", made.asm["ptx"]))
            told["products"] = re.findall(r"\b(?:wgmma|tcgen05|mma)\.[\w.]*?(m\d+n\d+k\d+)", made.asm["ptx"])
            print(json.dumps(told))


def layouts(text, constants):
    """Over which threads the sums along D of a tile of rows are spread: what decides their order."""
    names = dict(re.findall(r"(#\w+) = #ttg.blocked<(.*)>", text))
    shape = f"{constants.get('ROWS', kernels.PAIRS)}x{constants.get('BLOCK_D')}"
    return sorted(
        {names[name] for name in re.findall(rf'"tt.reduce"(?:.*\n)*?.*\}}\) : \(tensor<{shape}xf32, (#\w+)>', text)}
    )


if __name__ == "__main__":
    sys.exit(main())
