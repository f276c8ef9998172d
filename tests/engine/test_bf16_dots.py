"""bf16 dot products have the same bits with and without the processor's bf16 instruction."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from probemon.engine.kernels import probe_logits

numba = pytest.importorskip("numba")
SCALES = (1.0, 1e19, 5e36, 1e-20, 1e-37)  # of states: sums of products overflow, and come near to nothing
WIDTH, N_PROBES, N_STATES = 97, 5, 9  # three steps of the instruction, and a number alone
OLD_PROCESSOR = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}


def logits():
    """Return logits `[scales, states, probes]` of random linear probes, all states at once and one by one."""
    generator = torch.Generator().manual_seed(5)
    weights = {
        "w1": torch.randn(N_PROBES, 1, WIDTH, generator=generator).to(torch.bfloat16),
        "b1": torch.randn(N_PROBES, 1, generator=generator),
    }
    states = torch.randn(N_STATES, WIDTH, generator=generator)
    slots = torch.arange(N_PROBES)
    found = []
    for scale in SCALES:
        x = (states * scale).to(torch.bfloat16)
        rows = torch.arange(N_STATES).repeat_interleave(N_PROBES)
        together = probe_logits(x, weights, rows, slots.repeat(N_STATES), impl="numba")
        alone = [probe_logits(x[i : i + 1], weights, slots * 0, slots, impl="numba") for i in range(N_STATES)]
        assert torch.equal(together.view(torch.int32), torch.cat(alone).view(torch.int32))
        exact = x.double() @ weights["w1"][:, 0].double().T + weights["b1"].T
        size = x.double().abs() @ weights["w1"][:, 0].double().abs().T
        here = together.reshape(N_STATES, N_PROBES)
        fits = size < 3e38
        assert fits.any() and bool(((here.double() - exact).abs() <= 1e-6 * size + 1e-6)[fits].all())
        found.append(here.numpy())
    return np.stack(found)


def test_bf16_dots_equal_those_without_the_instruction(tmp_path):
    file = tmp_path / "logits.npy"
    subprocess.run(
        [sys.executable, __file__, str(file)],
        env={**os.environ, **OLD_PROCESSOR, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert np.array_equal(np.load(file).view(np.uint32), logits().view(np.uint32))


if __name__ == "__main__":
    np.save(sys.argv[1], logits())
