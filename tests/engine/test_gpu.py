"""On a real GPU (`pytest -m gpu`): the kernels, and the whole engine compared with the CPU's."""

import os

import numpy as np
import pytest
import torch
from transformers import CompileConfig

import grouped_packs
from conftest import make_model, make_pack
from nets import SHAPES, oracle, weights
from probemon import DynamicProbeManager
from probemon.core.dtypes import input_dtype
from probemon.core.inputs import prepare_input
from probemon.core.probes import NORMS, InputSpec
from probemon.engine.kernels import score_probes, triton_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
        reason="no GPU, or Triton is in its interpreter",
    ),
]
SIZES = [(576, 19), (2560, 7), (320, 70)]


def on_gpu(net):
    return {name: w.cuda() for name, w in net.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("d, n", SIZES)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (128, 64)], ids=str)
def test_gpu_scores_are_right_and_independent_of_the_batch(shape, d, n, dtype, monkeypatch):
    net = weights(shape, d, dtype)
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(1)).to(input_dtype(dtype))
    monkeypatch.setattr(triton_pairs, "MANY", 11 * n)  # all of them in groups that share weights, fewer of them alone
    rows, slots = (t.cuda() for t in (torch.arange(n).repeat(11), torch.arange(11).repeat_interleave(n)))
    device = on_gpu(net)
    whole = score_probes(x.cuda(), device, rows, slots, impl="triton")
    exact = oracle(net, x).T.reshape(-1)
    mine = (whole.cpu() - exact).abs().max()
    eager = (score_probes(x.cuda(), device, rows, slots, impl="reference").cpu() - exact).abs().max()
    assert mine < 1e-6 or mine <= 2 * eager
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):  # the last program to arrive is another one each time
        chosen = torch.randperm(len(rows), generator=generator)[
            : int(torch.randint(1, len(rows), (1,), generator=generator))
        ].cuda()
        assert torch.equal(score_probes(x.cuda(), device, rows[chosen], slots[chosen], impl="triton"), whole[chosen])
    everything = torch.arange(11, device="cuda")
    for i in (0, n // 2, n - 1):  # a state by itself
        alone = score_probes(x[i : i + 1].cuda(), device, torch.zeros_like(everything), everything, impl="triton")
        assert torch.equal(alone, whole.reshape(11, n)[:, i])


@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (128, 64)], ids=str)
def test_gpu_scores_are_nan_exactly_when_the_reference_is(shape, dtype, n):
    """One value of a state is so large that its products overflow, or one of its sums does."""
    net, d = on_gpu(weights(shape, 64, dtype)), 64
    x = torch.zeros(n, d, dtype=input_dtype(dtype), device="cuda")
    x[torch.arange(n), torch.arange(n) % d] = (
        torch.tensor([3e38, -3e38, 1e38, float("inf")], device="cuda").repeat(n)[:n].to(x.dtype)
    )
    rows, slots = torch.arange(n, device="cuda").repeat(11), torch.arange(11, device="cuda").repeat_interleave(n)
    mine, theirs = (score_probes(x, net, rows, slots, impl=impl) for impl in ("triton", "reference"))
    assert torch.equal(mine.isnan(), theirs.isnan()) and (mine - theirs).nan_to_num().abs().max() < 1e-6


@pytest.mark.parametrize("rule", ["independent", "path"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gpu_softmax_groups_equal_those_of_the_cpu(tmp_path, shape, rule):
    pack = grouped_packs.write(tmp_path / "pack", shape, torch.bfloat16, rule)
    settings = {"strategy": "descent", "load_threshold": 0.2, "keep_top_k": 3}
    here, there = (DynamicProbeManager(pack, device=device, **settings) for device in ("cpu", "cuda"))
    generator, states = torch.Generator().manual_seed(6), [None, None]
    for _ in range(8):  # the last ones by a graph
        hidden = torch.randn(3, pack.architecture.hidden_size, generator=generator)
        (states[0], mine), (states[1], theirs) = (
            manager.step(state, hidden) for manager, state in zip((here, there), states, strict=True)
        )
        assert np.array_equal(mine.ptr, theirs.ptr) and np.array_equal(mine.probes, theirs.probes)
        assert np.abs(mine.values - theirs.values).max() < 1e-6
        assert np.array_equal(states[0].retained, states[1].retained)
        everything = there.score_all(hidden).numpy()
        for row in range(3):
            assert np.array_equal(theirs.active_scores(row), everything[row, theirs.active(row)])  # bit for bit


def test_gpu_manager_gives_the_sets_of_the_cpu(pack):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, pack.architecture.hidden_size, generator=generator)
    here, there = (
        DynamicProbeManager(pack, strategy="descent"),
        DynamicProbeManager(pack, device="cuda", strategy="descent"),
    )
    mine, theirs = here.score_tokens(states, prompt_len=10), there.score_tokens(states.cuda(), prompt_len=10)
    assert np.array_equal(mine.ptr, theirs.ptr) and np.array_equal(mine.probes, theirs.probes)
    assert np.abs(mine.values - theirs.values).max() < 1e-5
    [(_, steps)] = there.engine.on_device._by_plan.values()
    assert steps.n_captured == 1 and steps.n_uploaded <= 1 and there.engine.on_device.n_overflowed == 0


def test_eager_model_on_a_gpu_scores_as_on_the_cpu(tmp_path):
    model = make_model(seed=3).cuda()
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model), device="cuda", strategy="descent")
    prompt = torch.tensor([[1, 5, 9, 13, 7], [1, 6, 8, 3, 11]], device="cuda")
    with manager.attach(model) as run:
        out = model.generate(prompt, do_sample=False, max_new_tokens=20, eos_token_id=None)
    result, here = run.result(out), DynamicProbeManager(manager.pack, strategy="descent")
    with torch.no_grad():
        states = model(out, output_hidden_states=True).hidden_states[2].cpu()
    for row in range(2):
        exact = here.score_all(states[row])
        for t in range(out.shape[1] - 1):
            i = int(np.flatnonzero((result.row == row) & (result.position == t))[0])
            assert (
                len(result.scores.active(i))
                and np.abs(result.scores.active_scores(i) - exact[t, result.scores.active(i)].numpy()).max() < 2e-3
            )


def test_gpu_paging_changes_no_score(pack):
    one, states = (
        -(-pack.weight_bytes() // pack.n_probes),
        torch.randn(30, pack.architecture.hidden_size, generator=torch.Generator().manual_seed(0)),
    )
    theirs = DynamicProbeManager(pack, strategy="descent").score_tokens(states, prompt_len=10)
    for settings in ({}, {"prefetch": 0.2}, {"cache_bytes": 5 * 4096}):
        there = DynamicProbeManager(pack, device="cuda", arena_bytes=17 * one, **settings)
        mine = there.score_tokens(states.cuda(), prompt_len=10)
        assert (
            np.array_equal(mine.ptr, theirs.ptr)
            and np.array_equal(mine.probes, theirs.probes)
            and np.abs(mine.values - theirs.values).max() < 1e-5
        )
        if there.engine.scorer.prefetcher is not None:
            there.engine.scorer.prefetcher.wait()
        there.arena.check_integrity()
    late = DynamicProbeManager(pack, device="cuda", arena_bytes=17 * one, late=True)
    scores, exact = late.score_tokens(states.cuda(), prompt_len=10), late.score_all(states.cuda())
    assert scores.coverage.late.sum() > 0
    for t in range(30):
        assert np.array_equal(scores.active_scores(t), exact[t, scores.active(t)].numpy())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("d", [576, 4096])
def test_gpu_normalisation_of_a_row_does_not_depend_on_its_batch(d, norm):
    x = torch.randn(65, d, device="cuda", dtype=torch.bfloat16, generator=torch.Generator(device="cuda").manual_seed(0))
    whole = triton_pairs.normalise_triton(x, norm, 1e-6, torch.float32)
    for i in (0, 31, 64):
        assert torch.equal(triton_pairs.normalise_triton(x[i : i + 1], norm, 1e-6, torch.float32), whole[i : i + 1])
    exact = prepare_input(x.double().cpu().float(), InputSpec("resid_post.0", norm, 1e-6), torch.float32)
    assert (whole.cpu() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gpu_step_prompt_and_exhaustive_scores_have_the_same_bits(shape, tmp_path):
    """One token's score is the same from the captured descent, the level by level one of many rows, and the exhaustive
    one.
    """
    host, n = make_model(), 60
    net = weights(shape, 16, torch.bfloat16, n=n)
    pack = make_pack(tmp_path / "pack", host, n=n, weights=net, golden_hidden=None)
    manager = DynamicProbeManager(pack, device="cuda", strategy="descent", load_threshold=0.1)
    x = torch.randn(70, 16, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0))
    everything, prompt = manager.score_all(x).numpy(), manager.score_tokens(x)
    for t in range(70):
        _, step = manager.step(None, x[t : t + 1])
        assert np.array_equal(step.active(0), prompt.active(t)) and len(step.active(0))
        assert np.array_equal(step.active_scores(0), prompt.active_scores(t)) and np.array_equal(
            step.active_scores(0), everything[t, step.active(0)]
        )


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_model_with_a_captured_decode_graph_keeps_it_and_is_seen(tmp_path):
    """Static cache, generate's own compilation in the mode that captures: no capture is given up because of us, and
    scores are right.
    """
    from torch._dynamo.utils import counters

    model = make_model(seed=3).cuda()
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model), device="cuda", strategy="descent")
    prompt = torch.tensor([[1, 5, 9, 13, 7]], device="cuda")
    options = {
        "cache_implementation": "static",
        "compile_config": CompileConfig(mode="reduce-overhead", fullgraph=True),
        "do_sample": False,
        "max_new_tokens": 12,
        "eos_token_id": None,
    }
    bare = model.generate(prompt, **options)
    skipped = []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        if watched:
            with manager.attach(model) as run:
                out = model.generate(prompt, **options)
        else:
            model.generate(prompt, **options)
        skipped.append(counters["inductor"]["cudagraph_skips"])
    assert out.tolist() == bare.tolist() and skipped == [0, 0]
    result = run.result(out)
    assert result.coverage.n_unseen == 1
    with torch.no_grad():
        states = model(out, output_hidden_states=True).hidden_states[2][0]
    exact = DynamicProbeManager(manager.pack, strategy="descent").score_all(states.cpu())
    for t in range(out.shape[1] - 1):
        assert (
            np.abs(result.scores.active_scores(t) - exact[t, result.scores.active(t)].numpy()).max() < 2e-3
        )  # the host's own kernels differ
