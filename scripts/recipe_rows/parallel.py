"""Recipes over two processes (gloo): each runs `two_ranks.py`, and hands back what rank 0 measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from recipe_rows.rows import Found, recipe

BOTH = ("ltm", "mamba2")
PROGRAM = Path(__file__).parent / "two_ranks.py"


def _two_ranks(what: str, kind: str) -> Found:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(PROGRAM), what, kind]
    path = [str(PROGRAM.parents[2]), str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return Found(**json.loads(done.stdout.strip().splitlines()[-1]))


@recipe(
    "data parallel", "DistributedDataParallel, 2 processes (gloo)",
    "gradients are those of one process with both halves",
    on=BOTH, bound=1e-6,
)  # fmt: skip
def data_parallel(kind: str) -> Found:
    return _two_ranks("data", kind)


@recipe(
    "tensor parallel", "torch.distributed.tensor.parallel, 2 processes (gloo)",
    "logits are those of one process; feed-forwards and output projections are cut",
    on=("ltm", "falcon_h1"), bound=1e-5,
)  # fmt: skip
def tensor_parallel(kind: str) -> Found:
    return _two_ranks("tensor", kind)


@recipe(
    "pipeline parallel", "torch.distributed.pipelining, 2 processes (gloo)",
    "logits of four micro-batches are those of one process", on=BOTH, bound=1e-5,
)  # fmt: skip
def pipeline_parallel(kind: str) -> Found:
    return _two_ranks("pipeline", kind)
