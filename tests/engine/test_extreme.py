"""Near the limits of fp32 a NaN score counts as no score, and every implementation agrees on when."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from nets import dequantized
from probemon import DynamicProbeManager, ProbePack
from probemon.core.dtypes import input_dtype
from probemon.core.probes import NORMS
from probemon.packs.quantize import quantize_weights

D = 3
NOT_FINITE, NO_SCORE = (
    "hidden state is not finite",
    "its score is not a number: with a state this large, sums of an active probe overflow float32",
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)


def not_prepared(dtype):
    return f"hidden state is finite, but not once normalised and rounded to {str(dtype).removeprefix('torch.')}"


def write(path, weights, parents=None, norm="none", eps=1e-6, rule="independent", **changes):
    n = len(weights["w1"])
    concepts = [
        {"id": f"c{i}", "name": f"c{i}", "parents": [f"c{p}" for p in (parents or [[]] * n)[i]]} for i in range(n)
    ]
    return ProbePack.write(
        path,
        name="extreme",
        concepts=concepts,
        weights=weights,
        score_rule=rule,
        inputs=[{"site": "resid_post.0", "norm": norm, "eps": eps}],
        host={"model_id": "none", "hidden_size": D},
        licence="CC0-1.0",
        card="Random.",
        alert_threshold=torch.full((n,), 0.5),
        **changes,
    )


def managers(pack, triton=True, **settings):
    """Every way of evaluating a pack. A step of few rows with triton is made on the device."""
    impls = ["reference", "cpu"] + (["numba"] if pack.dtype != torch.float16 else []) + ["triton"] * triton
    for impl in impls:
        for strategy in ("descent", "exhaustive"):
            yield f"{impl} {strategy}", DynamicProbeManager(pack, impl=impl, strategy=strategy, **settings)
    one = pack.weight_bytes() // pack.n_probes
    n_always = int((pack.tree.level == 0).sum())
    for impl in ("reference", impls[-1]) if n_always + 1 < pack.n_probes else ():
        yield (
            f"{impl} paged",
            DynamicProbeManager(pack, impl=impl, arena_bytes=one * (pack.n_probes - 1), strategy="descent", **settings),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_overflowing_sums_give_no_score(tmp_path, dtype):
    """inf - inf in one order of adding up is a number in another; the state is unseen in all, and keeps what it
    retained.
    """
    w1 = torch.tensor([[[2.0, -2, 0]], [[2, 2, 0]], [[0, 0, 1]]])
    weights = {"w1": w1, "b1": torch.zeros(3, 1)}
    pack = write(
        tmp_path / "pack",
        quantize_weights(weights) if dtype == torch.int8 else {**weights, "w1": w1.to(dtype)},
        parents=[[], [], [0]],
    )
    states = torch.tensor([[3e38, 3e38, 1.0], [0.5, 0, 1], [3e38, -3e38, 1], [float("inf"), 0, 0]])
    for name, manager in managers(pack, load_threshold=-1.0, keep_top_k=2):
        document = manager.score_tokens(states)
        assert document.coverage.unseen == (NO_SCORE, "", NO_SCORE, NOT_FINITE), name
        assert document.column(0)[1] == pytest.approx(
            1 / (1 + np.exp(-1.0)), abs=1e-3
        ) and document.coverage.active.tolist() == [0, 3, 0, 0]
        assert document.coverage.not_reached.tolist() == [0] * 4 and not document.coverage.dropped.any()
        state, _ = manager.step(None, states[1:2])
        after, scores = manager.step(state, states[:1])
        assert scores.coverage.unseen == (NO_SCORE,) and not len(scores.probes), name
        assert after.retained.tolist() == state.retained.tolist() == [[False, False, True]]
        everything = manager.score_all(states)
        assert torch.equal(
            everything.isnan(), torch.tensor([[True, True, True], [False] * 3, [True, True, True], [True] * 3])
        ), name


def test_only_an_active_probe_without_a_score_makes_a_state_unseen(tmp_path):
    """What is not reached has not been asked, whether it was evaluated or not."""
    w1 = torch.tensor([[[1.0, 0, 0]], [[0, 3e38, 3e38]]])
    pack = write(tmp_path / "pack", {"w1": w1, "b1": torch.zeros(2, 1)}, parents=[[], [0]])
    states = torch.tensor([[-9.0, 8, 8], [9, 8, 8]])
    for name, manager in managers(pack, load_threshold=0.5):
        assert manager.score_tokens(states).coverage.unseen == ("", NO_SCORE), name
        assert [manager.step(None, state[None])[1].coverage.unseen[0] for state in states] == ["", NO_SCORE], name
        assert manager.score_all(states).isnan().tolist() == [[False, True]] * 2, name


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "none"])
def test_state_that_cannot_be_normalised_is_not_called_infinite(tmp_path, norm):
    weights = {"w1": torch.eye(D)[:, None].clone(), "b1": torch.zeros(D, 1)}
    tiny = torch.tensor([1.0, -2, 4])
    states = torch.stack(
        [tiny * scale for scale in (1e-40, 1e-20, 1e-10, 1.0, 1e10, 1e25)]
        + [torch.zeros(D), torch.full((D,), float("nan"))]
    )
    exact = states.double() - (states.double().mean(dim=1, keepdim=True) if norm == "layernorm" else 0)
    exact = (exact / exact.square().mean(dim=1, keepdim=True).sqrt()).sigmoid()
    pack = write(tmp_path / "pack", weights, norm=norm, eps=0.0)
    for name, manager in managers(pack):
        document = manager.score_tokens(states)
        why = not_prepared(torch.float32)
        assert document.coverage.unseen == (why, why, "", "", "", why, why, NOT_FINITE), name
        for t in (2, 3, 4):
            assert np.abs(document.active_scores(t) - exact[t].numpy()).max() < 1e-6, name


def test_overflow_in_rounding_is_named_as_the_reason(tmp_path):
    weights = {"w1": torch.eye(D)[:, None].to(torch.float16), "b1": torch.zeros(D, 1)}
    states = torch.tensor([[1e5, 0, 1], [6e4, 0, 1], [float("-inf"), 0, 1]])
    for name, manager in managers(write(tmp_path / "half", weights)):
        assert manager.score_tokens(states).coverage.unseen == (not_prepared(torch.float16), "", NOT_FINITE), name
    both = DynamicProbeManager(
        {
            "half": write(tmp_path / "a", weights),
            "full": write(tmp_path / "b", {**weights, "w1": weights["w1"].float()}),
        }
    )
    assert both.score_tokens(states).coverage.unseen == (not_prepared("float16 and float32"), "", NOT_FINITE)
    wide = torch.tensor([[1e300, 0, 1]], dtype=torch.float64)
    for name, manager in managers(write(tmp_path / "c", {**weights, "w1": weights["w1"].float()})):
        assert manager.score_tokens(wide).coverage.unseen == (not_prepared(torch.float32),), name


def random_net(rng, dtype, hidden, n):
    """Ordinary probes, of which every second that is no root has huge weights in one tensor."""
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    shape, net = (D, *hidden, 1), {}
    for i, (width, out) in enumerate(pairwise(shape)):
        last = i == len(hidden) > 0
        for kind, size in (("w", (n, *([] if last else [out]), width)), ("b", (n, *([] if last else [out])))):
            net[f"{kind}{3 if last else i + 1}"] = torch.randn(size, generator=generator).clamp(-3, 3)
    for probe in range(2, n, 2):
        name = str(rng.choice(list(net)))
        net[name][probe] *= float(rng.choice([1e4] if dtype == torch.float16 and name[0] == "w" else [1e12, 1e37]))
    return (
        quantize_weights(net)
        if dtype == torch.int8
        else {name: w.to(dtype) if name[0] == "w" else w for name, w in net.items()}
    )


def fp64(net, x):
    """Logits `[N, P]` and how large what is added up for them is, which is what rounding is relative to."""
    net = {name: tensor.double() for name, tensor in dequantized(net).items() if not name.endswith("_scale")}
    value, size = x.double()[:, None, :], x.double().abs()[:, None, :]
    for i in (1, 2, 3):
        if f"w{i}" in net:
            w, b = net[f"w{i}"], net[f"b{i}"]
            w, b = (w[:, None], b[:, None]) if w.dim() == 2 else (w, b)
            value = (w[None] * value.relu()[..., None, :] if i > 1 else w[None] * value[..., None, :]).sum(-1) + b
            size = (w.abs()[None] * size[..., None, :]).sum(-1) + b.abs()
    return value[..., 0], size[..., 0]


@pytest.mark.parametrize("rule", ["independent", "path"])
@pytest.mark.parametrize("hidden", [(), (4,), (4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_implementations_agree_on_extreme_packs_and_seen_scores_are_right(tmp_path, dtype, hidden, rule):
    rng = np.random.default_rng([len(str(dtype)), len(hidden), len(rule)])
    n, n_seen, n_unseen = 7, 0, 0
    for trial in range(4 if hidden else 2):
        net = random_net(rng, dtype, hidden, n)
        parents = [[], [], [0], [0, 1], [1], [2, 3], [4]]
        pack = write(tmp_path / str(trial), net, parents=parents, rule=rule)
        scale = torch.from_numpy(10.0 ** rng.choice([0, 0, 0, 3, 20, 30, 38], size=(16, 1)))
        x = (torch.from_numpy(rng.uniform(-3, 3, size=(16, D))) * scale).clamp(-3e38, 3e38).float()
        logit, size = fp64(net, x.to(input_dtype(dtype)))
        steady = ((size < 300) | (logit.abs() > 1e-4 * size)).numpy()  # no sum cancels beyond what fp32 has of digits
        exact = logit.sigmoid().numpy()
        if rule == "path":
            exact = pack.tree.times_best_parent(exact)
        steady &= np.abs(exact - 0.5) > 2e-3
        first = None
        for name, manager in managers(pack, triton=not hidden, load_threshold=0.5, keep_top_k=3, max_loaded_probes=6):
            document = manager.score_tokens(x)
            steps = [manager.step(None, state[None])[1] for state in x[:2]]
            assert not np.isnan(document.values).any(), name
            assert [s.coverage.unseen[0] for s in steps] == list(document.coverage.unseen[:2]), name
            assert (
                not manager.score_all(x)[torch.from_numpy(document.state_of), torch.from_numpy(document.probes).long()]
                .isnan()
                .any()
            ), name
            first = first or document
            for t in range(len(x)):
                if not steady[t, first.active(t) if first.coverage.unseen[t] == "" else slice(None)].all():
                    continue
                assert document.coverage.unseen[t] == first.coverage.unseen[t], (name, t)
                assert document.active(t).tolist() == first.active(t).tolist(), (name, t)
                assert np.abs(document.active_scores(t) - exact[t, document.active(t)]).max(initial=0) < 2e-3, (name, t)
                n_seen, n_unseen = (
                    n_seen + (document.coverage.unseen[t] == ""),
                    n_unseen + (document.coverage.unseen[t] == NO_SCORE),
                )
    assert n_seen > 50 and (n_unseen > 5 or hidden or dtype == torch.float16), (n_seen, n_unseen)


@pytest.mark.parametrize("strategy", ["descent", "exhaustive"])
@pytest.mark.parametrize(
    ("impl", "dtype", "large"),
    [(impl, torch.bfloat16, 3.4e38) for impl in ("reference", "cpu", "numba")]
    + [(impl, torch.float16, 7e4) for impl in ("reference", "cpu")],
)
@pytest.mark.parametrize("scale", [1e-4, 1e-3, 1e-2])
def test_overflow_limits_beyond_fp32_are_respected(scale, impl, dtype, large, strategy, tmp_path):
    """Weights so small that their limit is no fp32 number: what overflowed when it was rounded is unseen all
    the same.
    """
    pack = ProbePack.write(
        tmp_path / "pack",
        name="small",
        score_rule="independent",
        licence="CC0-1.0",
        card="Random.",
        host={},
        alert_threshold=torch.tensor([0.9]),
        concepts=[{"id": "a", "name": "a", "parents": []}],
        inputs=[{"site": "resid_post.0", "norm": "none"}],
        weights={"w1": torch.full((1, 1, 64), scale).to(dtype), "b1": torch.full((1, 1), -3.0)},
    )
    hidden = torch.zeros(2, 64)
    hidden[0, 0], hidden[0, 1:8] = large, -large / 4  # finite, but not once rounded
    scores = DynamicProbeManager(pack, impl=impl, strategy=strategy).score_tokens(hidden)
    assert "not once normalised and rounded" in scores.coverage.unseen[0] and scores.coverage.unseen[1] == ""
    assert not len(scores.fired(0)) and not len(scores.active(0))
