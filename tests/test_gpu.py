"""On a real GPU (`pytest -m gpu`, or scripts/gpu_check.sh): the kernels, and the whole engine against the CPU's."""

import os

import numpy as np
import pytest
import torch
from nets import SHAPES, oracle, weights

from probemon import DynamicProbeManager
from probemon.kernels import score_probes, triton_fused
from probemon.types import input_dtype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="no GPU, or Triton is in its interpreter"),
]
SIZES = [(576, 19), (2560, 7)]


def on_gpu(net):
    return {name: w.cuda() for name, w in net.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("d, n", SIZES)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (128, 64)], ids=str)
def test_scores_are_right_and_bitwise_the_same_whatever_else_is_scored(shape, d, n, dtype, monkeypatch):
    net = weights(shape, d, dtype)
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(1)).to(input_dtype(dtype))
    monkeypatch.setattr(triton_fused, "MANY", 11 * n)  # all of them in groups that share weights, fewer of them alone
    rows, slots = (t.cuda() for t in (torch.arange(n).repeat(11), torch.arange(11).repeat_interleave(n)))
    device = on_gpu(net)
    whole = score_probes(x.cuda(), device, rows, slots, impl="triton")
    exact = oracle(net, x).T.reshape(-1)
    mine = (whole.cpu() - exact).abs().max()
    eager = (score_probes(x.cuda(), device, rows, slots, impl="reference").cpu() - exact).abs().max()
    assert mine < 1e-6 or mine <= 2 * eager
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):  # the last program to arrive is another one each time
        chosen = torch.randperm(len(rows), generator=generator)[: int(torch.randint(1, len(rows), (1,), generator=generator))].cuda()
        assert torch.equal(score_probes(x.cuda(), device, rows[chosen], slots[chosen], impl="triton"), whole[chosen])


def test_a_manager_on_a_gpu_gives_the_sets_of_the_cpu(pack):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, pack.architecture.hidden_size, generator=generator)
    here, there = DynamicProbeManager(pack, strategy="descent"), DynamicProbeManager(pack, device="cuda", strategy="descent")
    mine, theirs = here.score_tokens(states, prompt_len=10), there.score_tokens(states.cuda(), prompt_len=10)
    assert np.array_equal(mine.ptr, theirs.ptr) and np.array_equal(mine.probes, theirs.probes)
    assert np.abs(mine.values - theirs.values).max() < 1e-5
