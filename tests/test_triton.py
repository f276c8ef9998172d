"""The Triton kernels: in the interpreter against fp64, and compiled for real chips without one. `-m gpu` runs them where there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_compiled import oracle, weights

from probemon.kernels import score_probes

triton_fused = pytest.importorskip("probemon.kernels.triton_fused")
PROGRAM = Path(__file__).parent / "programs" / "cross_compile.py"
# Shared memory that one program may have, in bytes, by compute capability.
LIMITS = {80: 163 << 10, 90: 227 << 10}


@pytest.mark.parametrize("d", [1, 37, 300])
@pytest.mark.parametrize("shape", [(), (3,), (16,), (40,), (16, 5), (40, 20), (33, 1)], ids=str)
def test_split_probes_are_right_and_leave_their_counters_at_zero(shape, d):
    """Several programs a probe, the last of which finishes it; in the interpreter they run one after another."""
    net = weights(shape, d, torch.float32)
    x = torch.randn(3, d, generator=torch.Generator().manual_seed(1))
    rows, slots = torch.arange(3).repeat(11), torch.arange(11).repeat_interleave(3)
    first, again = (score_probes(x, net, rows, slots, impl="triton") for _ in range(2))
    assert torch.equal(first, again)
    assert (first.reshape(11, 3).T - oracle(net, x)).abs().max() < 1e-6
    assert all(not counters.any() for counters in triton_fused._ARRIVED.values())


def test_every_kernel_compiles_for_real_chips_within_their_shared_memory():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["arch"] for one in made} == set(LIMITS) and len(made) == 2 * 3 * 7
    for one in made:
        assert one["cubin_bytes"] > 0 and one["shared"] <= LIMITS[one["arch"]], one
