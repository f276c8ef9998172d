"""Recorded statistics of update forms equal values computed token by token."""

import math
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from bem_oracle import FORMS, VOCAB, make_host, matrix_of, randomise
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.forms.rank_mask import top_mask
from probemon.adapters.routing import RoutingMonitor
from probemon.adapters.routing.form_recorder import FormRecorder
from probemon.errors import ConfigError
from routed_hosts import packed

LENGTH = 16


def some_ids(rows=1, length=LENGTH, seed=0):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def host():
    return make_host()


def recorded(host, config, forwards=2, **options):
    """The report of a recorder, its alerts, and the codes of every token of each kind of site, by a hook of our own."""
    seen = []
    with randomise(attach_bem(host, config), size=0.8) as bem, torch.no_grad():
        handle = bem.controller.register_forward_hook(lambda module, args, codes: seen.append(codes))
        with RoutingMonitor(host, bem=bem) as monitor:
            recorder = FormRecorder(bem, monitor, **options)
            for seed in range(forwards):
                host(some_ids(2, seed=seed))
        host(some_ids(3))  # nobody records this one
        handle.remove()
        taken = {
            chunked: torch.cat(
                [(codes.of("chunk") if chunked else codes.adaptive()).flatten(0, 1) for codes in seen[:forwards]]
            )
            for chunked in {site.chunked for site in bem.sites}
        }
        return recorder.report(), recorder.alerts(), taken, bem


def test_head_group_gates_equal_plain_computation(host):
    report, _, taken, bem = recorded(host, FORMS["head_groups"])
    gate = 2 / (1 + np.exp(-taken[False].double().numpy()))
    for site in bem.sites:
        said, form = report[site.name], bem.updates[site.key]
        assert said["n_tokens"] == 4 * LENGTH
        np.testing.assert_allclose(said["gate_mean"], gate.mean(0), atol=1e-5)
        np.testing.assert_allclose(said["gate_variance"], gate.var(0), atol=1e-5)
        np.testing.assert_allclose(said["gate_p95"], np.quantile(gate, 0.95, axis=0), atol=1e-5)
        assert said["gate_correlation"] == pytest.approx(abs(np.corrcoef(gate.T)[0, 1]), abs=1e-4)
        np.testing.assert_allclose(said["gate_correlations"], np.corrcoef(gate.T), atol=1e-4)
        squares = np.zeros(2)
        for code, share in zip(taken[False], bem.governor.apply(taken)[site.key][:, -1].detach(), strict=True):
            blocks = share * matrix_of(form, code).detach().unflatten(1, (2, -1)).double()
            squares += blocks.square().sum((0, 2)).numpy()
        np.testing.assert_allclose(said["share"], squares / squares.sum(), atol=1e-5)


def test_rank_mask_usage_and_flips_equal_plain_computation(host):
    report, _, taken, bem = recorded(host, FORMS["rank_mask"])
    codes = taken[False].detach()
    masks = top_mask(codes, 2).numpy()
    for site in bem.sites:
        said = report[site.name]
        np.testing.assert_allclose(said["usage"], masks.mean(0), atol=1e-6)
        rows = masks.reshape(4, LENGTH, 4)
        assert said["flips"] == pytest.approx((rows[:, 1:] != rows[:, :-1]).sum(2).mean() / 2, abs=1e-6)
        assert said["dead"] == np.mean(masks.mean(0) < 0.1 * 2 / 4)
        ordered = np.sort(codes.numpy(), axis=1)
        assert said["margin"] == pytest.approx(float((ordered[:, -2] - ordered[:, -3]).mean()), abs=1e-5)
        shares = masks.mean(0) / 2
        entropy = -sum(share * math.log(share) for share in shares if share)
        assert said["usage_entropy"] == pytest.approx(entropy, abs=1e-5)
        assert said["information"] == pytest.approx(entropy - math.log(2), abs=1e-5)


def test_kronecker_sizes_equal_plain_computation(host):
    report, _, taken, bem = recorded(host, FORMS["kronecker"])
    for site in bem.sites:
        shares = bem.governor.apply(taken)[site.key][:, -1]
        form = bem.updates[site.key]
        matrices = [
            share * matrix_of(form, code).detach()
            for code, share in zip(taken[site.chunked], shares.detach(), strict=True)
        ]
        said = report[site.name]
        assert said["frobenius"] == pytest.approx(np.mean([float(m.norm()) for m in matrices]), rel=1e-4)
        largest = np.mean([float(torch.linalg.matrix_norm(m, 2)) for m in matrices])
        assert largest * (1 - 1e-5) <= said["sigma1_at_most"] <= said["frobenius"]
        rank = np.mean([float(m.norm()) ** 2 / float(torch.linalg.matrix_norm(m, 2)) ** 2 for m in matrices])
        for a, found in zip(bem.updates[site.key].A.detach().double().numpy(), said["from_orthogonal"], strict=True):
            by_hand = a @ a.T / np.trace(a @ a.T) - np.eye(len(a)) / len(a)
            assert found == pytest.approx(float(np.sqrt((by_hand**2).sum())), abs=1e-5) and found > 0.1
        assert 1 <= said["stable_rank_at_least"] <= rank * (1 + 1e-5)


def test_film_stretch_and_shift_equal_plain_computation(host):
    report, _, taken, bem = recorded(host, FORMS["film"])
    for site in bem.sites:
        gamma, beta = (half.detach() for half in bem.updates[site.key].gamma_beta(taken[False]))
        said = report[site.name]
        assert said["stretch"] == pytest.approx(float(gamma.abs().mean()), abs=1e-6)
        assert said["shift"] == pytest.approx(float(beta.abs().mean()), abs=1e-6)
        assert said["saturated"] == pytest.approx(float((gamma.abs() > 0.07).float().mean()), abs=1e-6)


def added(host, bem, ids):
    """What the one site of an adapter adds in a forward to an output of zeros and to one of ones, `[T, out]` each, and
    as a matrix `[T, out, in]` by what it adds at unit vectors.
    """
    [site] = bem.sites
    module, n_in, base, sums = site.module, site.n_in, torch.zeros(1), []
    inputs = [torch.zeros(n_in), *torch.eye(n_in)]
    with ExitStack() as stack:
        steer = module.register_forward_hook(lambda m, args, output: sums.append((output - base)[0]))
        stack.callback(steer.remove)
        for base, x in [
            (torch.zeros(1), inputs[0]),
            (torch.ones(1), inputs[0]),
            *((torch.zeros(1), x) for x in inputs),
        ]:
            module.forward = lambda given, base=base: base.expand(*given.shape[:-1], site.n_out)
            before = module.register_forward_pre_hook(lambda m, args, x=x: (x.expand_as(args[0]),))
            host(ids)
            before.remove()
        del module.forward
    at_zeros, at_ones, nothing, *columns = (one.double() for one in sums)
    return at_zeros, at_ones, torch.stack([column - nothing for column in columns], dim=-1)


@pytest.mark.parametrize(
    "name, limits",
    [
        ("kronecker", {"spectral_cap": 0.3}),
        ("kronecker", {"spectral_cap": None, "trust_region": 0.5}),
        ("kronecker", {"sparse_eps": 1.7}),  # which leaves some out
        ("film", {"spectral_cap": 0.05}),
        ("film", {"spectral_cap": None, "trust_region": 0.3}),
        ("film", {"sparse_eps": 0.45}),
    ],
)
def test_sizes_are_measured_after_the_limits(host, name, limits):
    ids = some_ids()
    config = replace(FORMS[name], sites=("down",), layers=(1,), **limits)
    with randomise(attach_bem(host, config), size=0.8) as bem, torch.no_grad():
        with RoutingMonitor(host, bem=bem) as monitor:
            recorder = FormRecorder(bem, monitor)
            host(ids)
        said = recorder.report()["down.1"]
        beta, both, matrices = added(host, bem, ids)
    if name == "kronecker":
        assert said["frobenius"] == pytest.approx(float(torch.linalg.matrix_norm(matrices).mean()), rel=1e-4)
        assert said["sigma1_at_most"] >= float(torch.linalg.matrix_norm(matrices, 2).mean()) * (1 - 1e-5)
        assert said["sigma1_at_most"] <= (limits.get("spectral_cap") or math.inf) * (1 + 1e-5)
        return
    gamma = both - beta
    assert said["stretch"] == pytest.approx(float(gamma.abs().mean()), abs=1e-6)
    assert said["shift"] == pytest.approx(float(beta.abs().mean()), abs=1e-6)
    assert said["saturated"] == pytest.approx(float((gamma.abs() > 0.7 * config.bound).double().mean()), abs=1e-6)


def test_faulty_updates_raise_alerts(host):
    film = BemConfig(form="film", rank=3, width=6, chunk_tokens=3, prefix_tokens=6)
    with attach_bem(host, film) as bem, torch.no_grad(), RoutingMonitor(host, bem=bem) as monitor:
        recorder = FormRecorder(bem, monitor)
        host(some_ids())
        assert recorder.alerts() == []
        for update in bem.updates.values():
            update.bias.fill_(50.0)
        assert [line.split(": ")[1] for line in recorder.alerts()] == [
            "100% of outputs are stretched to the bound (saturated)"
        ] * len(bem.sites)
    rows = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).Q
    products = BemConfig(form="kronecker", terms=2, sites=("o",), width=6, chunk_tokens=3, prefix_tokens=6)
    with attach_bem(host, products) as bem, torch.no_grad(), RoutingMonitor(host, bem=bem) as monitor:
        recorder = FormRecorder(bem, monitor)
        host(some_ids())
        bem.updates["o_0"].A[0] = 3 * rows
        first, zeros = recorder.report()["o.0"]["from_orthogonal"]
        assert first == pytest.approx(0, abs=1e-6) and zeros is None
    config = BemConfig(form="rank_mask", rank=8, active=2, width=6, chunk_tokens=3, prefix_tokens=6)
    with attach_bem(host, config) as bem, torch.no_grad():
        bem.controller.token[-1].weight.zero_()
        with RoutingMonitor(host, bem=bem) as monitor:
            recorder = FormRecorder(bem, monitor)
            host(some_ids())
        assert "75% of components are almost never kept" in recorder.alerts()[0]
    groups = BemConfig(form="head_groups", sites=("o",), groups=2, rank=2, level="token", width=6)
    with randomise(attach_bem(host, groups)) as bem, torch.no_grad():
        bem.controller.token[-1].weight[1] = bem.controller.token[-1].weight[0]
        bem.controller.token[-1].bias.fill_(0.5)
        with RoutingMonitor(host, bem=bem) as monitor:
            recorder = FormRecorder(bem, monitor)
            host(some_ids())
        assert "two gates say the same (correlation 1.00)" in recorder.alerts()[0]


def test_recorder_keeps_only_the_last_tokens_and_removes_its_hooks(host):
    report, _, _, bem = recorded(host, FORMS["film"], forwards=5, most_tokens=2 * LENGTH + 1)
    assert {said["n_tokens"] for said in report.values()} == {4 * LENGTH}  # whole forwards
    assert not bem.controller._forward_hooks
    with attach_bem(host, FORMS["film"]) as bem:
        recorder = FormRecorder(bem, RoutingMonitor(host, bem=bem))
        assert recorder.report() == {} and recorder.alerts() == []


def masks_of(bem, host, ids):
    """The masks `[T, r]` of a row of tokens, by one forward of it."""
    seen = []
    with bem.controller.register_forward_hook(lambda module, args, codes: seen.append(codes)):
        host(ids[None])
    return top_mask(seen[0].adaptive()[0], bem.config.active).detach().numpy()


@pytest.mark.parametrize("how", ["one token", "ended early", "padded", "beams", "drafts"])
def test_only_output_tokens_count_and_flips_compare_adjacent_ones(host, how):
    config = BemConfig(form="rank_mask", rank=6, active=2, width=6, chunk_tokens=3, prefix_tokens=6)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, mask = some_ids(1 if how == "one token" else 2, 1 if how == "one token" else 8), None
    if how == "drafts":
        ids, options["prompt_lookup_num_tokens"] = some_ids(1, 4).repeat(1, 3), 3
    if how == "padded":
        ids[0, :5] = 0
        mask = (ids != 0).long()
    if how == "beams":
        options["num_beams"] = 3
    with randomise(attach_bem(host, config), size=0.8) as bem, torch.no_grad():
        if how == "ended early":
            first = host.generate(ids, attention_mask=torch.ones_like(ids), **options)
            options["eos_token_id"] = int(first[0, 10])
        with RoutingMonitor(host, bem=bem) as monitor:
            recorder = FormRecorder(bem, monitor)
            out = host.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **options)
        rows = []
        for row in out:
            begin = 5 if how == "padded" and not len(rows) else 0
            tokens, n_read = row[begin:], len(row) - begin - 1  # the last token is never read
            if how == "ended early" and options["eos_token_id"] in tokens[8:].tolist():
                n_read = min(n_read, 9 + tokens[8:].tolist().index(options["eos_token_id"]))  # the other row goes on
            rows.append(masks_of(bem, host, tokens[:n_read]))
    flips = [(row[1:] != row[:-1]).sum(axis=1) / 2 for row in rows]
    for said in recorder.report().values():
        assert said["n_tokens"] == sum(map(len, rows))
        np.testing.assert_allclose(said["usage"], np.concatenate(rows).mean(axis=0), atol=1e-6)
        assert said["flips"] == pytest.approx(np.concatenate(flips).mean(), abs=1e-6)
    with attach_bem(host, config) as bem, RoutingMonitor(host, bem=bem) as monitor:
        recorder = FormRecorder(bem, monitor)
        host(some_ids(2, 1))
    assert {said["flips"] for said in recorder.report().values()} == {None}


def test_packed_sequences_are_recorded_like_separate_ones(host):
    config = BemConfig(form="rank_mask", rank=6, active=2, width=6, chunk_tokens=3, prefix_tokens=6)
    texts, reports = [some_ids(1, n, seed=n) for n in (7, 1, 5, 9)], []
    with randomise(attach_bem(host, config), size=0.8) as bem, torch.no_grad():
        for forwards in ([packed(texts)], [{"input_ids": ids} for ids in texts]):
            with RoutingMonitor(host, bem=bem) as monitor:
                recorder = FormRecorder(bem, monitor)
                for inputs in forwards:
                    host(**inputs)
            reports.append(recorder.report())
    for together, alone in zip(*(report.values() for report in reports), strict=True):
        assert together["n_tokens"] == 22 and together["flips"] == alone["flips"] > 0


def test_unsupported_adapters_are_refused(host):
    with attach_bem(host) as bem, pytest.raises(ConfigError, match="form is low_rank"):
        FormRecorder(bem, RoutingMonitor(host, bem=bem))
    with pytest.raises(ConfigError, match="not an adapter"):
        FormRecorder(host, None)
    with (
        attach_bem(host, FORMS["film"]) as bem,
        pytest.raises(ConfigError, match="routing does not watch this adapter"),
    ):
        FormRecorder(bem, None)


def test_each_site_is_recorded_at_its_learned_level(host):
    """Of four sites two take prefix codes, one chunk and one token codes; queries take chunk codes, as ever."""
    config = BemConfig(form="film", rank=3, width=6, chunk_tokens=3, prefix_tokens=6, level="learned")
    for sites, chosen in ((("o", "down"), [0, 1, 2, 0]), (("q", "down"), [2, 2]), (("q", "down"), [0, 0])):
        with randomise(attach_bem(host, replace(config, sites=sites)), size=0.8) as bem, torch.no_grad():
            bem.levels.logits.copy_(9 * torch.nn.functional.one_hot(torch.tensor(chosen), 3))
            seen = []
            handle = bem.controller.register_forward_hook(lambda module, args, codes, seen=seen: seen.append(codes))
            with RoutingMonitor(host, bem=bem) as monitor:
                recorder = FormRecorder(bem, monitor)
                host(some_ids(2))
            handle.remove()
            report, levels = recorder.report(), bem.levels.chosen()
            for site in bem.sites:
                code = seen[0].of(levels.get(site.name, "chunk")).flatten(0, 1)
                gamma, _ = bem.updates[site.key].gamma_beta(code)
                assert report[site.name]["stretch"] == pytest.approx(float(gamma.abs().mean()), abs=1e-6), site.name
            steering = {stream["level"]: stream["n_steering"] for stream in monitor.report()["streams"]}
            taken = {*levels.values(), *(["chunk"] if "q" in sites else [])}
            assert {level for level, n in steering.items() if n} == taken
