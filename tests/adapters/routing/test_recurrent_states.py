"""Recomputed recurrent states equal the model's own in every mode, and watching changes nothing."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import PAD, n_hooks
from probemon.adapters.routing import RoutingMonitor
from probemon.adapters.routing.recurrent.tally import StateTally, Told
from probemon.errors import CallbackFailed, ConfigError, UnsupportedModel
from recurrent_hosts import BATCH, GREEDY, HOSTS, HYBRID, SIZES, cache_in, cache_of, make_host


@pytest.fixture(scope="module", params=HOSTS)
def host(request):
    return make_host(request.param)


def largest_difference(states, cache, row):
    assert states
    found = 0.0
    for name, state in states.items():
        kept = cache.layers[int(name.split(".")[1])].recurrent_states[0][row]
        found = max(found, float((state - kept).abs().max()) / max(1.0, float(kept.abs().max())))
    return found


def states_of(told):
    """States after the last token, by layer."""
    return {
        name: state
        for names, of_stack in told.items()
        for name, state in zip(names.split(), of_stack.state, strict=True)
    }


def test_states_equal_the_cache_at_every_token(host):
    bare = host.generate(BATCH, attention_mask=BATCH != PAD, **GREEDY)
    given, handle = cache_of(host)
    differences = []
    with RoutingMonitor(host, states=True) as monitor:
        monitor.recurrent.listen(
            lambda row, placed, told: differences.append(largest_difference(states_of(told), given[-1], row))
        )
        out = host.generate(BATCH, attention_mask=BATCH != PAD, **GREEDY)
    handle.remove()
    assert torch.equal(out, bare) and n_hooks(host) == 0
    assert len(differences) == 3 * 7 and max(differences) < 1e-6  # the prompt, then 6 tokens that were run
    assert (
        monitor.recurrent.n_tokens == 12 + 3 * 6
        and monitor.n_unseen == monitor.recurrent.n_unknown == 0
        and monitor.failures == []
    )


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_first_forward_steps_obey_the_models_time_step_limit(n_tokens):
    """A forward of one token is held to it where nothing was kept before, and else it is not."""
    host, ids = make_host("mamba2", time_step_limit=(0.3, 0.5)), torch.tensor([[17, 5, 9]])[:, :n_tokens]
    told = []
    with RoutingMonitor(host, states=True) as monitor:
        monitor.recurrent.listen(lambda row, tokens, of_stack: told.extend(of_stack.values()))
        host.generate(ids, use_cache=False, **{**GREEDY, "max_new_tokens": 1})
    [stack] = told
    assert bool((stack.dt >= 0.3).all()) and bool((stack.dt <= 0.5).all())
    with torch.no_grad():
        cache = cache_in(host(ids, use_cache=True))
    for layer in range(2):
        kept = cache.layers[layer].recurrent_states[0][0]
        assert float((stack.state[layer] - kept).abs().max()) < 1e-6 * float(kept.abs().max())


def test_beam_states_equal_a_forward_of_the_returned_sequences(host):
    told = {}
    with RoutingMonitor(host, states=True) as monitor:
        monitor.recurrent.listen(lambda row, placed, of: told.__setitem__(row, (placed, of)))
        out = host.generate(
            BATCH[1:], attention_mask=BATCH[1:] != PAD, num_beams=3, num_return_sequences=2, max_new_tokens=5,
            do_sample=False, pad_token_id=PAD,
        )  # fmt: skip
    assert sorted(told) == [0, 1, 2, 3]
    for row, line in enumerate(out.tolist()):
        ids = line[int((BATCH[1 + row // 2] == PAD).sum()) :]
        placed, of = told[row]
        assert placed.ids.tolist() == ids[:-1]
        with torch.no_grad():
            cache = cache_in(host(torch.tensor([ids[:-1]]), use_cache=True))
        for names, of_stack in of.items():
            states = dict(zip(names.split(), of_stack.state, strict=True))
            assert largest_difference(states, cache, 0) < 1e-5
    assert monitor.recurrent.n_tokens <= 2 * 4 + 4 * 4 + 1  # what sequences share is counted once


def test_steps_without_states_report_the_same_as_with_states(host):
    reports = []
    for states in (False, True):
        with RoutingMonitor(host, states=states) as monitor:
            host.generate(BATCH, attention_mask=BATCH != PAD, **GREEDY)
        reports.append(monitor.recurrent.report())
    assert list(reports[0]) == list(reports[1]) != []
    for name, said in reports[0].items():
        beside = reports[1][name]
        assert set(beside) - set(said) == {"norm", "update_share", "effective_rank"}
        np.testing.assert_allclose(list(said.values()), [beside[key] for key in said], rtol=1e-4)


@pytest.mark.parametrize(("decay", "half_life"), [(0.5, 1.0), (0.99, 68.97)])
def test_planted_decays_are_measured(decay, half_life):
    host = make_host("mamba2")
    with torch.no_grad():
        for layer in host.backbone.layers:
            layer.mixer.in_proj.weight[-4:] = 0
            layer.mixer.A_log.zero_()
            layer.mixer.dt_bias.fill_(math.log(math.expm1(-math.log(decay))))  # softplus of it is -log(decay)
    with RoutingMonitor(host) as monitor:
        host.generate(BATCH[1:2], **GREEDY)
    said = monitor.recurrent.report()["ssm.1"]
    assert (
        said["half_life_p5"] == pytest.approx(half_life, rel=0.001) == pytest.approx(said["half_life_p95"], rel=0.001)
    )
    assert said["delta_p50"] == pytest.approx(-math.log(decay), rel=0.01)
    lengths = [sum(decay**j for j in range(t + 1)) for t in range(11)]
    assert said["length_mean"] == pytest.approx(np.mean(lengths), rel=1e-4) and said["resets"] == 0


def test_zero_input_adds_nothing_to_the_state():
    host = make_host("mamba2")
    inner, group = 32, 12
    with torch.no_grad():
        for layer in host.backbone.layers:
            layer.mixer.conv1d.weight[inner : inner + group] = 0
            layer.mixer.conv1d.bias[inner : inner + group] = 0
    with RoutingMonitor(host, states=True) as monitor:
        host.generate(BATCH[1:2], **GREEDY)
    assert monitor.recurrent.report()["ssm.0"]["norm"] == monitor.recurrent.report()["ssm.0"]["update_share"] == 0


def test_second_turn_has_an_unknown_past():
    host = make_host("falcon_h1")
    first = host.generate(BATCH[1:2], return_dict_in_generate=True, **GREEDY)
    ids = torch.cat([first.sequences, torch.tensor([[4, 5]])], dim=1)
    with RoutingMonitor(host, states=True) as monitor:
        host.generate(ids, past_key_values=first.past_key_values, **GREEDY)
    said = monitor.recurrent.report()["ssm.0"]
    assert (
        monitor.recurrent.n_unknown == monitor.recurrent.n_tokens == 3 + 6
        and said["length_mean"] is None
        and "norm" not in said
    )
    assert said["delta_p50"] > 0


def told(positions, length=1.0, grown=math.nan):
    """What one layer with one head does with tokens at these positions of a row."""
    n = len(positions)
    ones = torch.ones(1, n, 1)
    return Told(ones, -ones, length * ones, torch.tensor(positions), ones[..., 0], ones[..., 0], grown * ones[..., 0])


def test_alerts_without_enough_tokens_are_unjudged():
    """Rows that end before token 64, or token 1,025, say nothing of a state that is full, or that grows."""
    tally = StateTally(["ssm.0"], (0.0, math.inf))
    assert tally.needed == {"short": 512, "full": 512, "at limit": 512, "grows": 1025}
    for _ in range(30):
        tally.add(told(list(range(40)), length=40.0))
    assert tally.needed == {"full": 512, "grows": 1025}
    tally.add(told(list(range(600)), length=600.0))
    assert tally.needed == {"grows": 1025}
    tally.add(told(list(range(1024, 1030)), grown=1.0))
    assert tally.needed == {}


def test_unknown_values_of_a_sequence_keep_alerts_of_others():
    tally = StateTally(["ssm.0"], (0.0, math.inf))
    tally.add(told([1024, 1025], grown=3.0))
    assert [alert.kind for alert in tally.alerts] == ["grows"]
    tally.add(told([0, 1, 2]))
    assert [alert.kind for alert in tally.alerts] == ["grows"]
    tally.add(told([1026], grown=1.0))
    assert tally.alerts == []


def test_alerts_clear_when_their_condition_ends():
    host = make_host("mamba2")
    ids = torch.randint(1, 60, (1, 600), generator=torch.Generator().manual_seed(0))
    with RoutingMonitor(host, states=True) as monitor, torch.no_grad():
        host(ids)
        healthy = monitor.alerts
        for layer in host.backbone.layers:
            layer.mixer.A_log.fill_(12.0)  # forgets at once
    with RoutingMonitor(host, states=True) as monitor, torch.no_grad():
        host(ids)
        short = monitor.alerts
        for layer in host.backbone.layers:
            layer.mixer.A_log.fill_(-30.0)  # never forgets
    with RoutingMonitor(host, states=True) as monitor, torch.no_grad():
        host(ids)
        full = monitor.alerts
        host.backbone.layers[1].mixer.conv1d.bias.data[0] = math.inf
    with RoutingMonitor(host, states=True) as monitor, torch.no_grad():
        host(ids[:, :8])
        broken = monitor.alerts
    assert healthy == []
    assert [(alert.kind, alert.stream.site) for alert in short] == [("short", "ssm.0"), ("short", "ssm.1")]
    assert {(alert.kind, alert.stream.site) for alert in full} >= {("full", "ssm.0"), ("full", "ssm.1")}
    assert ("not finite", "ssm.1") in {(alert.kind, alert.stream.site) for alert in broken}
    said = "short: ssm.0, share of heads that hold less than 2 tokens 1 (threshold 0.95) at token 600"
    assert str(short[0]) == said


@pytest.mark.parametrize("states", [False, True])
def test_nonfinite_tokens_are_counted_separately_without_ending_generation(states):
    host = make_host("mamba")  # mamba2 computes a chunk at once: what is NaN there is NaN in the tokens before it, too
    whole = []
    for rows in (BATCH[[0, 2]], None):
        with RoutingMonitor(host, states=states) as monitor, torch.no_grad():
            if rows is None:
                host(BATCH[1:2, :1])
            else:
                host.generate(rows, attention_mask=rows != PAD, suppress_tokens=[44], **GREEDY)
        whole.append(monitor.recurrent.report()["ssm.1"])
        assert whole[-1]["n_not_finite"] == 0 and monitor.alerts == []
    with torch.no_grad():
        host.get_input_embeddings().weight[44] = math.nan  # the second token of one row, whose state is lost with it
    with RoutingMonitor(host, states=states) as monitor:
        # Its embedding is its row of the unembedding, too.
        host.generate(BATCH, attention_mask=BATCH != PAD, suppress_tokens=[44], **GREEDY)
    said = monitor.recurrent.report()["ssm.1"]
    assert (monitor.recurrent.n_tokens, said["n_tokens"], said["n_not_finite"]) == (30, 20, 10)
    assert [alert.stream.site for alert in monitor.alerts if alert.kind == "not finite"] == ["ssm.0", "ssm.1"]
    for key in ("delta_mean", "length_mean", *(("norm", "update_share") if states else ())):
        assert said[key] == pytest.approx((19 * whole[0][key] + whole[1][key]) / 20, rel=1e-5), key
    with torch.no_grad():
        host.get_input_embeddings().weight[1:] = math.nan
    with RoutingMonitor(host, states=states) as monitor:
        host.generate(BATCH[1:2], **GREEDY)
    assert monitor.recurrent.report()["ssm.0"] == {"n_tokens": 0, "n_not_finite": 11}


def test_failing_callback_is_raised_when_the_block_ends():
    host = make_host("mamba2")
    with (
        pytest.raises(CallbackFailed, match="7 callbacks or sinks failed while routing"),
        RoutingMonitor(host) as monitor,
    ):
        monitor.recurrent.listen(lambda row, placed, told: 1 / 0)
        assert host.generate(BATCH[1:2], **GREEDY).shape == (1, 12)
    assert {type(error) for error in monitor.failures} == {ZeroDivisionError} and monitor.recurrent.n_tokens == 11


@pytest.mark.parametrize("kind", ["mamba2", "falcon_mamba"])
def test_offloaded_weights_are_read(kind):
    from accelerate import cpu_offload

    host, reports = make_host(kind), []
    for offload in (False, True):
        if offload:
            cpu_offload(host, execution_device="cpu")
        with RoutingMonitor(host, states=True) as monitor:
            host.generate(BATCH, attention_mask=BATCH != PAD, **GREEDY)
        reports.append(monitor.recurrent.report())
    assert reports[0] == reports[1] and all(p.device.type == "meta" for p in host.parameters())


def test_weights_on_the_meta_device_are_a_typed_error():
    with torch.device("meta"):
        nowhere = AutoModelForCausalLM.from_config(make_host("mamba2").config)
    with pytest.raises(UnsupportedModel, match=r"layer 0 has no A_log in memory"):
        RoutingMonitor(nowhere)


def test_models_without_recurrent_layers_and_wrong_settings_are_refused():
    llama = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**SIZES, **HYBRID}))
    with pytest.raises(UnsupportedModel, match="no recurrent layer"):
        RoutingMonitor(llama)
    with pytest.raises(ConfigError, match="on_gap"):
        RoutingMonitor(make_host("mamba2"), on_gap="pass")
    with pytest.raises(ConfigError, match="listen is given None: give a function to call"):
        RoutingMonitor(make_host("mamba2")).recurrent.listen(None)
