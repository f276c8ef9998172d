"""Recorded update sizes of every form equal values computed in NumPy, in fp64."""

import math
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

import probemon.adapters.bem.model_hooks
from bem_oracle import FORMS, VOCAB, make_host, randomise
from conftest import n_hooks
from probemon.adapters.bem import attach_bem
from probemon.adapters.bem.measures import Measures, names_of
from probemon.adapters.routing import RoutingMonitor
from probemon.adapters.routing.form_recorder import FormLimits, FormRecorder
from probemon.errors import ConfigError

LENGTH = 9


def some_ids(rows=1, length=LENGTH, seed=0):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def host():
    return make_host().double()


def numbers(tensor):
    return tensor.detach().double().numpy()


def update_by_hand(form, config, x, code, base):
    """The update `[out]` of one token, without any limit, by the formulas of the forms."""
    if config.form == "film":
        W, bias = numbers(form.W), numbers(form.bias)
        gamma, beta = np.split(config.bound * np.tanh(W @ code + bias), 2)
        return gamma * base + beta
    if config.form == "kronecker":
        products = [c * np.kron(numbers(a), numbers(b)) for c, a, b in zip(code, form.A, form.B, strict=True)]
        return config.scale * sum(products) @ x
    U, V = numbers(form.U), numbers(form.V)
    if config.form == "head_groups":
        parts = x.reshape(config.groups, -1)
        gate = 2 / (1 + np.exp(-code))
        return config.scale * sum(gate[g] * U[g] @ (V[g].T @ parts[g]) for g in range(config.groups))
    mask = np.zeros(len(code))
    mask[np.argsort(-code, kind="stable")[: config.active]] = 1
    return config.scale * U @ (mask * (V.T @ x))


def largest_by_hand(form, config, x, code, base):
    """The largest singular value of one token's update, of a form that is a matrix, a column at a time."""
    columns = [update_by_hand(form, config, one, code, base) for one in np.eye(len(x))]
    return np.linalg.norm(np.stack(columns, axis=1), 2)


def by_hand(bem, ids):
    """Of one forward of rows without padding: by site and name the sizes of every token, from what modules were given
    and gave, by hooks of our own that are put on it.
    """
    config, seen = bem.config, {}
    handles = [bem.controller.register_forward_hook(lambda m, args, out: seen.update(codes=out))]
    for site in bem.sites:
        put = site.module.register_forward_pre_hook
        handles.append(
            put(lambda m, args, key=site.key: seen.update({key: numbers(args[0]).reshape(-1, m.in_features)}))
        )
    with torch.no_grad():
        bem.host(ids)
    for handle in handles:
        handle.remove()
    found = {}
    for site in bem.sites:
        codes = seen["codes"].of("chunk") if site.chunked else seen["codes"].adaptive()
        form = bem.updates[site.key]
        sizes = found[site.name] = {"ratio": [], "energy": []}
        for x, code in zip(seen[site.key], numbers(codes.flatten(0, 1)), strict=True):
            base = numbers(site.module.weight) @ x + (0 if site.module.bias is None else numbers(site.module.bias))
            delta = update_by_hand(form, config, x, code, base)
            if config.spectral_cap is not None:
                delta *= min(1, config.spectral_cap / largest_by_hand(form, config, x, code, base))
            sizes["ratio"].append(np.linalg.norm(delta) / np.linalg.norm(base))
            if config.form == "head_groups":
                sizes["energy"].append([math.log(np.mean(part**2)) for part in np.split(x, config.groups)])
    return found


def check(said, expected, tolerance=1e-5):
    assert said["ratio"] == pytest.approx(np.mean(expected["ratio"]), rel=tolerance)
    assert said["ratio_p95"] == pytest.approx(np.quantile(expected["ratio"], 0.95), rel=tolerance)
    assert np.mean(expected["ratio"]) > 1e-3  # not the same because nothing is there
    if expected["energy"]:
        np.testing.assert_allclose(said["energy"], np.mean(expected["energy"], axis=0), rtol=tolerance)
        assert said["n_silent"] == [0] * len(said["energy"])
    else:
        assert "energy" not in said
    assert said["n_sizes_not_finite"] == 0


def steered(host, config, size=0.5):
    bem = attach_bem(host, config).double()
    with torch.no_grad():
        return randomise(bem, size=size)


@pytest.mark.parametrize("name", ["head_groups", "rank_mask", "kronecker", "film"])
def test_sizes_of_each_form_equal_plain_computation(host, name):
    ids = some_ids(2)
    with steered(host, replace(FORMS[name], spectral_cap=None, trust_region=None)) as bem:
        with RoutingMonitor(host, bem=bem) as monitor, torch.no_grad():
            recorder = FormRecorder(bem, monitor)
            host(ids)
        report = recorder.report()
        for site, expected in by_hand(bem, ids).items():
            assert report[site]["n_tokens"] == ids.numel()
            check(report[site], expected)


@pytest.mark.parametrize("name", ["head_groups", "rank_mask"])
def test_binding_limits_show_in_the_sizes(host, name):
    ids, reports = some_ids(2), {}
    for cap in (None, 0.05):
        with steered(host, replace(FORMS[name], spectral_cap=cap, trust_region=None)) as bem:
            with RoutingMonitor(host, bem=bem) as monitor, torch.no_grad():
                recorder = FormRecorder(bem, monitor)
                host(ids)
            reports[cap] = recorder.report()
            for site, expected in by_hand(bem, ids).items():
                check(reports[cap][site], expected)
    first = bem.sites[0].name
    assert reports[0.05][first]["ratio"] < 0.5 * reports[None][first]["ratio"]


def test_mixture_of_experts_blocks_are_measured():
    host, ids = make_host("mixtral"), some_ids(2)
    with steered(host, FORMS["film"]) as bem:
        with RoutingMonitor(host, bem=bem) as monitor, torch.no_grad():
            recorder = FormRecorder(bem, monitor)
            host(ids)
        report = recorder.report()
    assert all(0 < report[name]["ratio"] < 1 for name in ("o.1", "down.1"))


@pytest.mark.parametrize("name", FORMS)
def test_fresh_adapter_has_size_zero_and_bit_identical_outputs(name):
    host, ids, asked = make_host(), some_ids(2), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    asked |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    for size in (None, 0.5):
        with attach_bem(host, FORMS[name]) as bem, torch.no_grad():
            if size:
                randomise(bem, size=size)
            plain = host.generate(ids, **asked)
            with RoutingMonitor(host, bem=bem) as monitor:
                recorder = FormRecorder(bem, monitor)
                watched = host.generate(ids, **asked)
        assert torch.equal(watched.sequences, plain.sequences)
        assert all(torch.equal(a, b) for a, b in zip(watched.logits, plain.logits, strict=True))
        for said in recorder.report().values():
            assert (said["ratio"] == said["ratio_p95"] == 0) == (size is None)
        assert size or recorder.alerts() == []


@pytest.mark.parametrize("how", ["padded", "ended early", "beams", "drafts"])
def test_padding_and_tokens_outside_the_output_are_left_out(host, how):
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, mask = some_ids(2), None
    if how == "drafts":
        ids, options["prompt_lookup_num_tokens"] = some_ids(1, 4).repeat(1, 3), 3
    if how == "padded":
        ids[0, :5] = 0
        mask = (ids != 0).long()
    if how == "beams":
        options["num_beams"] = 3
    with steered(host, FORMS["head_groups"]) as bem, torch.no_grad():
        if how == "ended early":
            first = host.generate(ids, attention_mask=torch.ones_like(ids), **options)
            options["eos_token_id"] = int(first[0, LENGTH + 2])
        with RoutingMonitor(host, bem=bem) as monitor:
            recorder = FormRecorder(bem, monitor)
            out = host.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **options)
        n_tokens, expected = 0, {site.name: {"ratio": [], "energy": []} for site in bem.sites}
        for number, row in enumerate(out):
            begin = 5 if how == "padded" and number == 0 else 0
            tokens, n_read = row[begin:], len(row) - begin - 1  # the last token is never read
            if how == "ended early" and options["eos_token_id"] in tokens[LENGTH:].tolist():
                n_read = min(n_read, LENGTH + 1 + tokens[LENGTH:].tolist().index(options["eos_token_id"]))
            n_tokens += n_read
            for site, sizes in by_hand(bem, tokens[None, :n_read]).items():
                for name, values in sizes.items():
                    expected[site][name] += values
    for site, said in recorder.report().items():
        assert said["n_tokens"] == n_tokens
        check(said, expected[site])


def test_nothing_is_measured_without_a_recorder(host, monkeypatch):
    made = []
    real = probemon.adapters.bem.model_hooks.Measures
    monkeypatch.setattr(probemon.adapters.bem.model_hooks, "Measures", lambda bem: made.append(bem) or real(bem))
    ids = some_ids(2)
    with steered(host, FORMS["film"]) as bem, torch.no_grad():
        before = n_hooks(host)
        host(ids)
        with RoutingMonitor(host, bem=bem):
            without = n_hooks(host)
            host(ids)
        assert made == []
        with RoutingMonitor(host, bem=bem) as monitor:
            recorder = FormRecorder(bem, monitor)
            assert n_hooks(host) == without
            host(ids)
            bem.detach()
            bem.attach()  # and it goes on
            host(ids)
            with RoutingMonitor(host, bem=bem) as other:  # beside another that asks for nothing
                host(ids)
        assert len(made) == 3 and n_hooks(host) == before and not bem.measured._forward_hooks
        assert other.report()["n_tokens"] == ids.numel() and not bem.measured.n_asking
        host(ids)
        assert len(made) == 3
    assert {said["n_tokens"] for said in recorder.report().values()} == {3 * ids.numel()}


def test_gradients_are_the_same_when_updates_are_measured():
    host, ids, found = make_host(), some_ids(2), []
    host.train()
    for checkpointed in (False, True):
        if checkpointed:
            enable = getattr(host, "activation_checkpointing_enable", host.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        for asked in (False, True):
            with attach_bem(host, FORMS["kronecker"]) as bem:
                with torch.no_grad():
                    randomise(bem, size=0.5)
                with RoutingMonitor(host, bem=bem) as monitor:
                    recorder = FormRecorder(bem, monitor) if asked else None
                    host(ids, use_cache=False).logits.square().mean().backward()
                found.append([parameter.grad.clone() for parameter in bem.parameters() if parameter.grad is not None])
                assert len(found[-1]) > 10
                if recorder is not None:
                    assert recorder.report()["down.1"]["ratio"] > 0
        assert all(torch.equal(a, b) for a, b in zip(*found[-2:], strict=True))


def test_size_alerts_obey_their_limits():
    host, ids = make_host(), some_ids(1)
    with steered(host, FORMS["rank_mask"], size=0.5) as bem, torch.no_grad():
        with RoutingMonitor(host, bem=bem) as monitor:
            low = FormRecorder(bem, monitor, limits=FormLimits(dead=None, ratio=1e-6))
            none = FormRecorder(bem, monitor, limits=FormLimits(dead=None, ratio=None))
            host(ids)
        said = low.report()["o.0"]
        assert none.alerts() == []
        assert f"rank_mask o.0: at one token in twenty the update is {said['ratio_p95']:.2g} times" in low.alerts()[0]
        bem.updates["o_0"].U[0, 0] = math.nan
        with RoutingMonitor(host, bem=bem) as monitor:
            recorder = FormRecorder(bem, monitor, limits=FormLimits(dead=None, ratio=None))
            host(ids)
        n = recorder.report()["o.0"]["n_sizes_not_finite"]
        assert n > 0 and f"rank_mask o.0: sizes of updates of {n} tokens were not finite" in recorder.alerts()
    with attach_bem(host, FORMS["film"]) as bem, pytest.raises(ConfigError, match="limits is 3: give FormLimits"):
        FormRecorder(bem, RoutingMonitor(host, bem=bem), limits=3)
    with pytest.raises(ConfigError, match=r"ratio is .*give 0 or more, or None"):
        FormLimits(ratio="large")


@pytest.mark.parametrize("name", ["head_groups", "kronecker"])
def test_measuring_does_not_synchronise_with_the_device(host, name):
    """A tensor on meta has no values: what asks for one, as a wait for a GPU does, raises."""

    def nothing(n):
        return torch.empty(6, n, device="meta")

    with attach_bem(host, FORMS[name]) as bem, ExitStack() as stack:
        bem.measure(stack)
        measures = Measures(bem)
        for site in bem.sites:
            measures.take(site, nothing(site.n_in), nothing(site.n_out), nothing(site.n_out))
        assert not measures.awaited
        applied = {site.key: nothing(bem.updates[site.key].n_codes + 1) for site in bem.sites}
        assert measures.all(applied, 6, torch.device("meta")).shape == (6, len(names_of(bem)))
