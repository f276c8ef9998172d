"""Evaluation statistics, Pareto frontiers and gates equal values computed independently."""

import itertools
import json
import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bem_forms import counted
from bem_oracle import FORMS, VOCAB, make_host, matrix_of, randomise
from comparisons import adjusted, compare, pareto, pareto_shares, sign_flip
from flops import flops
from gates import (
    FAILED,
    NOT_JUDGED,
    PASSED,
    Gate,
    budget,
    gain,
    integrity,
    latency,
    no_regression,
    promoted,
)
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.evaluation.budget import n_trainable, solve
from probemon.adapters.bem.evaluation.held_out import share_at_limits
from probemon.adapters.bem.evaluation.profiler import peak_memory, profile_sites
from probemon.adapters.bem.evaluation.statistics import document_interval
from probemon.adapters.bem.losses import recorded_codes
from probemon.errors import BemError, ConfigError, MissingExtra
from turns import Timed, median_interval, median_ratio, quantile_interval, take_turns

ROOT = Path(__file__).parents[3]
SEEDS = [0.02, 0.01, 0.03, 0.0, 0.02, 0.015, 0.025, 0.005]


def limited_oracle(bem, codes, site, cap):
    """Of each token, is its update over the cap? By the singular values of dense updates, before limits."""
    form = bem.updates[site.key]
    if bem.levels is not None:
        taken = codes.of(bem.levels.chosen()[site.name])
    else:
        taken = codes.of("chunk") if site.chunked else codes.adaptive()
    flat = taken.flatten(0, 1)
    low_rank, scale = bem.config.form == "low_rank", bem.config.scale
    dense = [scale * form.U * c @ form.V.T if low_rank else matrix_of(form, c) for c in flat]
    return [bool(torch.linalg.matrix_norm(one, 2) > cap * (1 + 1e-4)) for one in dense]


@pytest.mark.parametrize("name", ["head_groups", "rank_mask", "learned"])
@torch.no_grad()
def test_share_at_limits_counts_the_updates_that_limits_make_smaller(name):
    host, ids = make_host(), torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    config = BemConfig(rank=3, level="learned", width=8) if name == "learned" else FORMS[name]
    for cap in (1e-4, 0.2, 1e4):
        with attach_bem(host, replace(config, spectral_cap=cap, trust_region=None)) as bem:
            randomise(bem, size=0.5)
            with recorded_codes(bem) as recorded:
                host(ids)
            expected = [over for site in bem.sites for over in limited_oracle(bem, recorded[-1], site, cap)]
            share = share_at_limits(bem, [{"input_ids": ids, "labels": ids}])
        assert share == pytest.approx(np.mean(expected))
        assert cap == 0.2 or share == (cap < 1)


def test_seed_differences_equal_the_oracle():
    found = compare(SEEDS)
    assert found.p == 0.0078125 and found.exact and found.mean == pytest.approx(0.015625)
    t = found.mean / (np.std(SEEDS, ddof=1) / math.sqrt(8))
    scipy = pytest.importorskip("scipy.stats")
    assert float(scipy.t.sf(t, 7)) == pytest.approx(0.0016735, abs=1e-7)
    half = float(scipy.t.ppf(0.975, 7)) * np.std(SEEDS, ddof=1) / math.sqrt(8)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))
    assert [compare([1.0] * n).smallest_p for n in (3, 4, 5, 8)] == [0.125, 0.0625, 0.03125, 0.00390625]
    assert [compare([1.0] * n).p for n in (3, 5)] == [0.125, 0.03125] and compare([0.5]).low is None


@pytest.mark.parametrize("seed", range(6))
def test_the_sign_flip_test_counts_all_flips(seed):
    d = np.random.default_rng(seed).normal(0.3, 1, 3 + seed).round(seed % 2)
    sums = [sum(s * v for s, v in zip(signs, d, strict=True)) for signs in itertools.product((1, -1), repeat=len(d))]
    assert sign_flip(d) == (sum(total >= d.sum() - 1e-9 for total in sums) / len(sums), True)


def test_sign_flip_test_samples_many_differences_reproducibly():
    d = np.random.default_rng(0).normal(0.25, 1, 60)
    (p, exact), again = sign_flip(d), sign_flip(d)
    z = d.sum() / math.sqrt((d**2).sum())
    assert not exact and (p, exact) == again and p == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), abs=0.01)


def test_bootstrap_resamples_whole_documents():
    """Of documents of one token the oracle's interval; of long documents a wider one than tokens would give."""
    low, high = document_interval(SEEDS, [1.0] * 8)
    assert (low, high) == pytest.approx((0.00875, 0.021875))
    assert document_interval([2.0, 4.0, 6.0], [1, 2, 3]) == (2.0, 2.0)
    rng = np.random.default_rng(1)
    level = rng.normal(0, 1, 40)
    tokens = level[:, None] + rng.normal(0, 0.1, (40, 50))
    low, high = document_interval(tokens.sum(axis=1), np.full(40, 50))
    assert low < tokens.mean() < high
    assert (high - low) / 2 == pytest.approx(1.96 * level.std(ddof=1) / math.sqrt(40), rel=0.15)


def test_adjusted_p_values_equal_the_oracle():
    assert adjusted([0.04, 0.08, 0.0547, 0.2]) == pytest.approx([0.1066667, 0.1066667, 0.1066667, 0.2], abs=1e-7)
    assert adjusted([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04] * 4)


def test_pareto_frontiers_equal_the_oracle():
    points = [(1, 0.7), (2, 0.8), (2, 0.75), (3, 0.8), (4, 0.9), (1, 0.7)]
    assert pareto(points) == [0, 1, 4, 5]
    rng = np.random.default_rng(0)
    many = rng.integers(0, 4, (60, 3)).astype(float)

    def dominated(i):
        a, b = many[i, :2], many[i, 2]
        return any((o[:2] <= a).all() and o[2] >= b and ((o[:2] < a).any() or o[2] > b) for o in many)

    assert pareto(many) == [i for i in range(60) if not dominated(i)]


def test_pareto_shares_tell_noise_from_a_clear_frontier():
    costs = np.array([[1.0], [2.0], [3.0]])
    clear = np.array([[0.5] * 6, [0.4] * 6, [0.9] * 6]) + 1e-6 * np.arange(6)
    assert pareto_shares(costs, clear, n_drawn=200) == [1.0, 0.0, 1.0]
    noise = np.random.default_rng(3).normal(0, 1, (3, 6))
    noise -= noise.mean(axis=1, keepdims=True)
    first, *others = pareto_shares(costs, noise, n_drawn=400)
    assert first == 1.0 and all(0.1 < share < 0.9 for share in others)


def test_gates_must_all_pass_and_unjudged_is_not_passed():
    fine = {"start": 0.0, "rows": 0.0, "leak": 0.0, "cached": 0.0, "cut": 9e-6}
    assert integrity(fine).verdict == PASSED
    assert integrity({**fine, "cut": 2e-5}).verdict == FAILED and "cut 2e-05" in integrity({**fine, "cut": 2e-5}).why
    assert integrity({**fine, "leak": float("nan")}).verdict == FAILED
    assert integrity({**fine, "leak": None}).verdict == NOT_JUDGED
    assert integrity({"start": 1e-9}).verdict == FAILED  # what was run and is wrong is wrong
    with pytest.raises(ConfigError, match="no check of integrity is named 'cuts'"):
        integrity({"cuts": 0.0})
    gates = [Gate("a", PASSED, ""), Gate("b", NOT_JUDGED, "")]
    assert not promoted(gates) and promoted(gates[:1]) and not promoted([])


def test_regression_gate_allows_half_a_percent():
    slightly = [-0.002, 0.001, -0.003, 0.0, 0.002, -0.001, 0.001, -0.002]
    assert no_regression({"loss": slightly}).verdict == PASSED
    assert no_regression({"loss": [0.0, 0.0]}).verdict == PASSED
    assert no_regression({"loss": slightly, "recall": [-0.004] * 3 + [-0.008] * 3}).verdict == FAILED
    assert "recall" in no_regression({"loss": slightly, "recall": [-0.004] * 3 + [-0.008] * 3}).why
    assert no_regression({}).verdict == NOT_JUDGED and no_regression({"loss": [0.1]}).verdict == NOT_JUDGED


def test_gain_needs_a_significant_slice_or_two_frontiers():
    assert gain({"b": SEEDS}).verdict == PASSED
    noise = {f"slice {i}": [0.01, -0.02, 0.015, -0.005, 0.002, -0.001, 0.0, 0.001] for i in range(9)}
    assert gain(noise).verdict == FAILED
    assert gain({"b": SEEDS, **noise}).verdict == FAILED  # adjusted over ten: 0.078
    assert gain({"b": [-value for value in SEEDS]}).verdict == FAILED
    assert gain(noise, {"latency": 0.95, "flops": 0.9}).verdict == PASSED
    assert gain(noise, {"latency": 0.95, "flops": 0.89}).verdict == FAILED
    assert gain({"b": SEEDS, "other": [-v for v in SEEDS]}, own=["b"]).verdict == PASSED
    assert gain({"b": SEEDS, "other": [-v for v in SEEDS]}, own=["other"]).verdict == FAILED
    assert gain({"b": [0.1, 0.2, 0.3]}).verdict == NOT_JUDGED and gain({}).verdict == NOT_JUDGED


def test_latency_gate_uses_the_upper_bound_of_the_median_paired_ratio():
    rng = np.random.default_rng(0)
    assert latency(rng.normal(1.05, 0.05, 200).tolist()).verdict == PASSED
    assert latency(rng.normal(1.20, 0.05, 200).tolist()).verdict == FAILED
    assert latency([1.0] * 5).verdict == NOT_JUDGED and latency([1.0] * 6).verdict == PASSED
    # The interval holds the median about as often as it says.
    missed = 0
    for _ in range(2_000):
        high = float(latency((1 + 0.1 * rng.normal(size=30)).tolist()).why.split("at most ")[1].split()[0])
        missed += high < 1.0
    assert missed / 2_000 <= 0.035


def test_nonnumeric_input_is_refused_and_missing_scipy_is_named(monkeypatch):
    for call in (lambda: compare([]), lambda: compare([math.nan]), lambda: document_interval([1.0], [0.0])):
        with pytest.raises(ConfigError):
            call()
    for call in (lambda: compare("abc"), lambda: gain({"a": ["x"] * 5}), lambda: pareto([[1, 2], [3]])):
        with pytest.raises(ConfigError, match="not a table of numbers"):
            call()
    with pytest.raises(ConfigError, match="a row for each variant"):
        pareto_shares([1.0, 2.0], [0.1, 0.2])
    with pytest.raises(ConfigError, match="config is a dict"):
        solve(make_host(), {"rank": 3}, 5_000)
    with pytest.raises(BemError, match="is not an adapter"):
        profile_sites(None, lambda: None)
    with pytest.raises(ConfigError, match="outside 0 to 1"):
        adjusted([0.5, 1.5])
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingExtra, match="pip install scipy"):
        compare(SEEDS)


# -- budgets -----------------------------------------------------------------------------------------

COMMON = {"width": 6, "chunk_tokens": 4, "prefix_tokens": 8}
CONFIGS = [
    BemConfig(**COMMON),
    BemConfig(level="auto", sites=("v", "o"), **COMMON),
    BemConfig(level="token", **COMMON),
    BemConfig(form="head_groups", groups=2, sites=("o",), **COMMON),
    BemConfig(form="rank_mask", active=2, rank=4, hadamard=True, **COMMON),
    BemConfig(form="kronecker", terms=2, **COMMON),
    BemConfig(form="film", rank=3, **COMMON),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.form}-{config.level}")
def test_parameter_count_equals_its_estimate_and_meets_its_budget(config):
    host = make_host()
    for candidate in (config, solve(host, config, 4_000).config):
        with attach_bem(host, candidate) as bem:
            assert sum(p.numel() for p in bem.parameters()) == n_trainable(host, candidate)
    solved = solve(host, config, 4_000)
    size = "terms" if config.form == "kronecker" else "rank"
    step = 2 if config.hadamard else 1 + 1 / getattr(solved.config, size)
    larger = replace(solved.config, width=config.width, **{size: round(getattr(solved.config, size) * step)})
    assert n_trainable(host, larger) > 4_000
    off = [abs(n_trainable(host, replace(solved.config, width=solved.config.width + d)) - 4_000) for d in (-1, 0, 1)]
    assert off[1] == min(off) and solved.off == solved.n_trainable / 4_000 - 1 and abs(solved.off) < 0.05


def test_budget_too_small_for_any_adapter_is_refused():
    with pytest.raises(ConfigError, match="too small for an adapter of form 'film'"):
        solve(make_host(), BemConfig(form="film", rank=1), 60)
    narrow = solve(make_host(), BemConfig(rank=1, width=64), 700)
    assert narrow.config.rank == 1 and narrow.config.width < 64


def test_flops_count_products_and_elementwise_operations():
    x, w = torch.ones(3, 5), torch.ones(5, 7)
    assert flops(lambda: (x @ w).tanh() + 1) == 2 * 3 * 5 * 7 + 3 * 7 + 3 * 7
    host, ids = make_host(), torch.arange(3, 11)[None]
    bare = flops(lambda: host(ids))
    config = BemConfig(form="kronecker", terms=2, spectral_cap=None, **COMMON)
    with torch.no_grad(), randomise(attach_bem(host, config)) as bem:
        with_adapter, of_sites = flops(lambda: host(ids)), 0
        for update in bem.updates.values():
            given = torch.ones(8, update.n_in), torch.ones(8, update.n_codes), torch.ones(8, update.n_out)
            of_sites += flops(partial(update, *given))
    assert bare < bare + of_sites < with_adapter < bare + of_sites + 8 * 5_000  # the rest is the controller's


# -- latency and profile -----------------------------------------------------------------------------


def test_quantile_interval_equals_its_order_statistics():
    """The bootstrap's interval of a median is that of order statistics, within the spacing of the values."""
    x = np.random.default_rng(5).exponential(1.0, 1_000)
    low, high = quantile_interval(x, 0.5)
    exact = median_interval(x)
    ordered = np.sort(x)
    assert abs(np.searchsorted(ordered, low) - 469) <= 4 and abs(np.searchsorted(ordered, high) - 531) <= 4
    assert (np.searchsorted(ordered, exact[0]), np.searchsorted(ordered, exact[1])) == (468, 531)
    p95 = quantile_interval(x, 0.95)
    assert p95[0] < np.quantile(x, 0.95) < p95[1] and p95[0] > high
    assert quantile_interval(x[:99], 0.95) is None and quantile_interval(x[:100], 0.95) is not None
    assert quantile_interval(x[:400], 0.99) is None and median_interval(x[:5]) is None


@pytest.mark.parametrize("n", [6, 9, 20, 30, 120])
def test_median_interval_is_the_shortest_with_its_coverage(n):
    """Between the k-th smallest and the k-th largest lies the median unless fewer than k of n coins fall one way."""
    low, high = median_interval(list(range(1, n + 1)))
    covered = [1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(n // 2 + 1)]
    k = max(k for k in range(1, n // 2 + 1) if covered[k] >= 0.95)
    assert (low, high) == (k, n + 1 - k)


def test_timed_calls_alternate_and_ratios_compare_one_round(monkeypatch):
    """Each call once a round, in another order from round to round; a slow machine slows both calls of a round."""
    order, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(name, seconds):
        order.append(name)
        now[0] += seconds * (1 + len(order) // 10)  # the machine becomes slower and slower

    timed = take_turns({"a": lambda: call("a", 1.0), "b": lambda: call("b", 4.0)}, 20, n_warm_up=2)
    assert len(order) == 44 and len(timed["a"].wall) == len(timed["b"].cpu) == 20
    assert {tuple(order[i : i + 2]) for i in range(0, 44, 2)} == {("a", "b"), ("b", "a")}
    assert timed["a"].wall[0] == 1.0 and timed["a"].wall[-1] == 5.0
    ratio = median_ratio(timed["b"], timed["a"])
    assert ratio.value == np.median(timed["b"].ratios(timed["a"])) == 4.0 and ratio.low <= 4.0 <= ratio.high
    slowed = np.repeat([1.0, 5.0, 2.0], 20).tolist()
    one, other = Timed(tuple(slowed), ()), Timed(tuple(1.1 * s for s in slowed), ())
    assert median_ratio(other, one).low == pytest.approx(1.1) == pytest.approx(median_ratio(other, one).high)
    assert one.quantile(0.5).value == 2.0 and one.quantile(0.99).low is None
    with pytest.raises(ConfigError, match="did not take turns"):
        one.ratios(timed["a"])
    with pytest.raises(ConfigError, match="no call to time"):
        take_turns({}, 3)


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_profile_assigns_time_to_the_site_that_took_it():
    """A layer that is slow is told as the layer's, an update as the update's; nothing is left on the host."""
    host, ids = make_host(), torch.arange(3, 11)[None]
    with torch.no_grad(), randomise(attach_bem(host, BemConfig(**COMMON))) as bem:
        plain, hooks = host(ids).logits, count_hooks(host)
        second = bem.sites[1]
        inner = second.module.forward
        second.module.forward = lambda x: (busy(0.1), inner(x))[1]
        found = profile_sites(bem, lambda: [host(ids) for _ in range(3)])
        del second.module.forward
        assert torch.equal(host(ids).logits, plain) and count_hooks(host) == hooks
    assert set(found.sites) == {site.key for site in bem.sites}
    assert {s.layer.n_calls for s in found.sites.values()} == {s.update.n_calls for s in found.sites.values()} == {3}
    assert found.controller.n_calls == 3 and found.total.n_calls == 1
    slowest = found.sites[second.key]
    assert slowest.layer.seconds >= 0.3 and slowest.update.seconds < 0.2
    others = [s.layer.seconds for key, s in found.sites.items() if key != second.key]
    assert max(others) < 0.2 and found.total.seconds >= sum(s.layer.seconds for s in found.sites.values())
    with pytest.raises(BemError, match="not on its model"):
        profile_sites(bem, lambda: None)
    with bem, pytest.raises(BemError, match="ran no forward"):
        profile_sites(bem, lambda: None)


def count_hooks(host):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in host.modules()]


def test_peak_memory_counts_only_live_tensors():
    def call():
        x, y = torch.empty(1_000), torch.empty(5_000)
        del x
        z = torch.empty(2_000)
        return y, z

    assert peak_memory(call) == 28_000  # y and z; x and y were 24,000
    assert peak_memory(lambda: None) == 0


def test_pareto_frontier_ranks_latency_by_measured_rounds():
    costs, quality = np.array([[1.0], [1.0]]), np.array([[0.5] * 6, [0.4] * 6])
    rounds = np.random.default_rng(0).normal(1.0, 0.01, (2, 50))
    later = np.array([[0.0], [0.5]])
    assert pareto_shares(costs, quality, n_drawn=100) == [1.0, 0.0]
    assert pareto_shares(costs, quality, latencies=rounds - later, n_drawn=100) == [1.0, 1.0]
    assert pareto_shares(costs, quality, latencies=rounds + later, n_drawn=100) == [1.0, 0.0]
    either = np.vstack([rounds[0], rounds[0] + np.where(np.arange(50) % 2, 0.5, -0.5)])  # a coin's median
    assert 0.2 < pareto_shares(costs, quality, latencies=either, n_drawn=200)[1] < 0.8
    with pytest.raises(ConfigError, match="2 costs, 1 latencies, 2 qualities"):
        pareto_shares(costs, quality, latencies=rounds[:1])


KRONECKER = {"parameters": 62_004, "operations": 3_049_237, "memory": 18_575_840}
LORA = {"parameters": 62_016, "operations": 126_334, "memory": 3_661_488}


def test_budget_has_a_gate_for_parameters_operations_and_memory():
    found = budget(KRONECKER, LORA)
    assert [(gate.name, gate.verdict) for gate in found] == [
        ("parameters", PASSED), ("operations", FAILED), ("memory", FAILED)
    ]  # fmt: skip
    assert found[0].why == "62,004 beside 62,016: -0.02%"
    assert "+2313.63%" in found[1].why and "+407.33%" in found[2].why
    within = [budget({"parameters": n}, {"parameters": 1000})[0].verdict for n in (949, 950, 1050, 1051)]
    assert within == [FAILED, PASSED, PASSED, FAILED]
    cheaper = [budget({"memory": n}, {"memory": 1000})[0].verdict for n in (10, 1050, 1051)]
    assert cheaper == [PASSED, PASSED, FAILED]
    (unjudged,) = budget({"operations": 5}, {"operations": 0})
    assert unjudged.verdict == NOT_JUDGED and not promoted([unjudged])
    for ours, lora, words in (
        ({"memory": 1}, {}, "the LoRA's memory are missing"),
        ({"memory": math.nan}, {"memory": 1}, "memory is nan"),
        (3, {}, "costs is 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            budget(ours, lora)


def test_budget_gates_of_the_study_follow_from_its_costs():
    study = json.loads((ROOT / "docs/benchmarks/bem_forms.json").read_text(encoding="utf-8"))
    lora = counted(study["costs"]["lora"])
    for one in study["verdicts"]:
        wanted = {gate.name: [gate.verdict, gate.why] for gate in budget(counted(study["costs"][one["method"]]), lora)}
        assert one["gates"].items() >= wanted.items(), one["method"]
        assert one["promoted"] == all(verdict == PASSED for verdict, _ in one["gates"].values())
