"""Health names each way in which a run can be blind; each is produced on a real tiny model."""

import copy
import json
import threading
import types

import pytest
import torch
from torch import nn

from blinded import Blinded
from conftest import PAD, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.errors import AlignmentError, ConfigError
from probemon.monitor.check import Check
from probemon.monitor.health import Health
from probemon.tracking.recording import GAP

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


@pytest.fixture
def host():
    """A model of this test's own, which it may break."""
    return make_model()


@pytest.fixture
def manager(pack):
    return DynamicProbeManager(pack)


def named(health, name):
    (check,) = [check for check in health.checks if check.name == name]
    return check


def failed(health):
    assert all(check.remedy.endswith(".") for check in health.wrong)
    return {check.name: check.what for check in health.wrong if check.state == "failed"}


def warned(health):
    return {check.name: check.what for check in health.wrong if check.state == "warning"}


def test_working_run_is_healthy_before_during_and_after(manager, host):
    run, during = manager.attach(host), []
    assert failed(run.health()) == {"attached": "nothing is watched yet"}
    with run:
        before = run.health()
        run.follow(lambda placed, scores: during.append(run.health()))
        host.generate(PROMPT, **GREEDY)
        after = run.health()
    for health in (before, *during, after, run.health()):
        assert health.ok and not health.wrong, str(health)
    assert len(during) == 4 and named(before, "tokens").what == "the model ran nothing while it was watched"
    assert named(after, "tokens").what == "8 tokens were read" and "4 hooks" in named(after, "hooks").what
    content = json.loads(json.dumps(run.health().as_dict()))
    assert content["ok"] and [check["name"] for check in content["checks"]] == [c.name for c in after.checks]
    assert all(check["state"] == "ok" and check["remedy"] == "" for check in content["checks"])


def test_removed_hook_is_named_at_once_and_after_the_end(manager, host):
    with manager.attach(host, on_gap="report") as run:
        host.model.layers[1]._forward_hooks.clear()
        assert failed(run.health()) == {"hooks": "our hook at resid_post.1 was removed"}
        host.generate(PROMPT, **GREEDY)
        found = failed(run.health())
        assert found.keys() == {"hooks", "gaps", "tokens"} and found["gaps"].startswith("at 4 places ")
        assert found["tokens"].startswith("8 of 8 tokens were not seen (the host did not run through resid_post.1: 8")
    assert failed(run.health()) == found
    with manager.attach(host) as again:
        host.generate(PROMPT, **GREEDY)
    assert again.health().ok


@pytest.mark.parametrize("hooks", ["_forward_hooks", "_forward_pre_hooks"])
def test_removed_decoder_hooks_are_named(manager, host, hooks):
    with manager.attach(host) as run:
        getattr(host.model, hooks).clear()
        found = failed(run.health())
        assert found.keys() == {"hooks"} and "LlamaModel was removed" in found["hooks"]


def test_one_raised_gap_is_counted(manager, host):
    with manager.attach(host) as run, Blinded(host, [0]), pytest.raises(AlignmentError):
        host.generate(PROMPT, **GREEDY)
    found = failed(run.health())
    assert (
        found["gaps"].startswith("at 1 place ")
        and found["tokens"] == "the model ran, and none of its tokens was scored"
    )


def test_few_unseen_tokens_are_a_warning_and_many_a_failure(manager, host):
    long = {**GREEDY, "max_new_tokens": 100}
    with manager.attach(host, on_gap="report") as run:
        with Blinded(host, [3]):
            host.generate(PROMPT, **long)
        few = run.health()
        with Blinded(host, [3]):
            host.generate(PROMPT, **GREEDY)
        many = run.health()
    assert few.ok and warned(few)["tokens"] == f"1 of 104 tokens were not seen ({GAP}: 1)"
    assert not many.ok and failed(many)["tokens"] == f"2 of 112 tokens were not seen ({GAP}: 2)"


def test_replaced_layer_call_fails_and_replaced_forward_warns(manager, host):
    layer = host.model.layers[1]
    with manager.attach(host) as run:
        own = layer.forward
        layer.forward = own  # as who puts it back leaves it
        assert not run.health().wrong
        layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
        assert run.health().ok
        assert warned(run.health()) == {"hooks": "the forward of LlamaDecoderLayer at resid_post.1 was replaced"}
        del layer.forward
        assert not run.health().wrong
        layer._call_impl = layer.forward
        assert "no hook runs" in failed(run.health())["hooks"]


def test_decoder_forward_that_bypasses_layer_hooks_is_named_and_its_tokens_unseen(manager, host):
    decoder = host.model

    def forward(self, *args, **kwargs):
        for layer in self.layers:
            layer._call_impl = layer.forward
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            for layer in self.layers:
                del layer._call_impl

    with manager.attach(host, on_gap="report") as run:
        decoder.forward = types.MethodType(forward, decoder)
        assert run.health().ok and "the forward of LlamaModel" in warned(run.health())["hooks"]
        host.generate(PROMPT, **GREEDY)
    assert failed(run.health()).keys() == {"gaps", "tokens"}


def test_replaced_layer_or_layer_list_is_named(manager, host):
    layers = host.model.layers
    with manager.attach(host) as run:
        own, layers[1] = layers[1], copy.deepcopy(layers[0])
        assert failed(run.health()) == {"hooks": "another module was put at resid_post.1 than the one with our hook"}
        layers[1] = own
        host.model.layers = nn.ModuleList(copy.deepcopy(layer) for layer in layers)
        assert failed(run.health()) == {"hooks": "another module was put at resid_post.1 than the one with our hook"}
        del host.model.layers
        assert "no longer where our hooks are" in failed(run.health())["hooks"]
        host.model.layers = layers
        assert not run.health().wrong


def test_later_hook_that_edits_states_is_a_warning_and_a_reader_is_not(manager, host):
    with manager.attach(host) as run, manager.attach(host) as other:
        with torch.no_grad():
            host(PROMPT, output_hidden_states=True)  # transformers puts hooks of its own
        assert not run.health().wrong and not other.health().wrong
        handle = host.model.layers[1].register_forward_hook(lambda module, args, output: output.roll(1, -1))
        assert "a hook of test_health runs after ours at resid_post.1" in warned(run.health())["hooks"]
        handle.remove()
        assert not run.health().wrong
    handle = host.model.layers[1].register_forward_hook(lambda module, args, output: output)
    with manager.attach(host) as run:
        assert not run.health().wrong  # it runs before ours, which reads what it gave
    handle.remove()


def test_replaced_generate_is_named(manager, host):
    with manager.attach(host) as run, manager.attach(host) as other:
        ours = host.generate
        host.generate = lambda *args, **kwargs: ours(*args, **kwargs)
        assert run.health().ok and "generate of the model was replaced" in warned(run.health())["hooks"]
        assert "generate of the model was replaced" in warned(other.health())["hooks"]
        del host.generate
        assert "generate of the model is no longer ours" in failed(run.health())["hooks"]
        host.generate = ours
        assert not run.health().wrong and not other.health().wrong


def test_nan_weights_fail_the_states_check_with_a_remedy(manager, host):
    with manager.attach(host) as run:
        with torch.no_grad():
            host.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
        host.generate(PROMPT, **GREEDY)
    assert failed(run.health()) == {"states": "8 of 8 tokens cannot be scored (hidden state is not finite: 8)"}
    assert "weights" in named(run.health(), "states").remedy


def test_model_that_changes_within_a_recording_is_a_warning(manager, host):
    with manager.attach(host) as run:
        host.generate(PROMPT, **GREEDY)
        with torch.no_grad():
            host.lm_head.weight.mul_(1.5)
        host.generate(PROMPT, **GREEDY)
        assert not run.health().wrong  # each generation is of one model
        with torch.no_grad():
            first = host(PROMPT, use_cache=True)
            host.lm_head.weight.mul_(1.5)
            host(PROMPT[:, :1], past_key_values=first.past_key_values)
    assert run.health().ok and warned(run.health()).keys() == {"host"}


class Broken:
    """A sink whose disk is full."""

    def open(self, concepts):
        pass

    def write(self, batch):
        raise OSError("no space left on device")

    def close(self):
        pass


def test_callback_errors_and_lost_sink_tokens_are_reported(manager, host):
    def action(event):
        raise ZeroDivisionError("of the action")

    with manager.attach(host, callback_errors="report") as run:
        run.on("c0", above=0.0, action=action)
        delivery = run.follow(Broken())
        host.generate(PROMPT, **GREEDY)
        delivery.close()
    found = failed(run.health())
    assert found.keys() == {"callbacks", "sinks"} and "ZeroDivisionError: of the action" in found["callbacks"]
    assert "no space left on device" in found["sinks"]


def test_run_whose_model_ran_nothing_warns_after_its_end(manager, host):
    with manager.attach(copy.deepcopy(host)) as run:
        host.generate(PROMPT, **GREEDY)
    assert run.health().ok and warned(run.health())["tokens"] == "the model ran nothing while it was watched"


@pytest.mark.parametrize("n_here", [0, 1], ids=["nothing here", "a generation here"])
def test_one_thread_run_mentions_forwards_of_other_threads(manager, host, n_here):
    def other():
        with torch.no_grad():
            host.generate(PROMPT, **GREEDY)

    with manager.attach(host, one_thread=True) as run:
        assert (
            named(run.health(), "tokens").what == "the model ran nothing in the one thread that is watched (one_thread)"
        )
        for _ in range(n_here):
            host.generate(PROMPT, **GREEDY)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert run.health().ok
    check = named(run.health(), "tokens")
    if n_here:
        assert (check.state, check.what) == ("ok", "8 tokens were read, and what other threads ran is not counted")
    else:
        assert check.state == "warning" and check.what.endswith("; it ran in another, whose forwards are not counted")
        assert check.remedy == "Attach in the thread that generates, or without one_thread=True."


def test_one_thread_run_with_rules_warns_if_only_another_thread_generated(manager, host):
    with (
        pytest.warns(UserWarning, match=r"1 rule and 0 sinks set, but this .* ran nothing in the one thread .* it ran"),
        manager.attach(host, one_thread=True) as run,
    ):
        run.on("c0", above=0.0, action="record")
        thread = threading.Thread(target=host.generate, args=(PROMPT,), kwargs=GREEDY)
        thread.start()
        thread.join()


def test_first_forward_in_progress_is_not_a_failure(manager, host):
    seen = []
    handle = host.model.layers[2].register_forward_pre_hook(lambda *args: seen.append(run.health()))
    with manager.attach(host) as run, torch.no_grad():
        host(PROMPT)
    handle.remove()
    assert seen[0].ok and named(seen[0], "tokens").what == "the first forward has not ended yet"


def test_check_has_one_of_three_states(tmp_path):
    with pytest.raises(ConfigError, match="state"):
        Check("hooks", "fine", "so")
    bad, doubt, fine = (Check(state, state, "what", "Mend it.") for state in ("failed", "warning", "ok"))
    health = Health((fine, doubt, bad))
    assert not health.ok and health.wrong == (bad, doubt) and Health((fine, doubt)).ok
    assert str(bad) == "failed, failed: what. Mend it." and health.with_checks([fine]).checks[-1] == fine


def test_group_of_packs_has_the_same_health_checks(model, pack, two_sites):
    manager = DynamicProbeManager({"one": pack, "two": two_sites})
    with manager.attach(model) as run:
        model.generate(PROMPT, **GREEDY)
    assert not run.health().wrong and "6 hooks" in named(run.health(), "hooks").what


def test_sites_inside_layers_are_checked_too(host, tmp_path):
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", host, sites=("mlp_out.0", "attn_out.2")))
    with manager.attach(host) as run:
        assert not run.health().wrong
        host.model.layers[0].mlp = copy.deepcopy(host.model.layers[0].mlp)
        assert failed(run.health())["hooks"].startswith("another module was put at mlp_out.0")
