"""A canary's scores equal those of one plain forward over its text, and a changed model is detected."""

import threading

import numpy as np
import pytest
import torch

from conftest import make_model, make_pack
from corpora import make_tokenizer
from monitor.test_state_probes import pack_for
from oracle import states
from probemon import DynamicProbeManager
from probemon.errors import Blind
from probemon.monitor.canary import Canary, differ
from recurrent_hosts import make_host

SITES = ("resid_post.1", "resid_post.2", "mlp_out.0")


@pytest.fixture
def host():
    return make_model()


@pytest.fixture
def manager(tmp_path, host):
    return DynamicProbeManager(make_pack(tmp_path / "pack", host, sites=SITES))


def test_canary_scores_equal_those_of_one_plain_forward(manager, host):
    canary = Canary(manager, host, make_tokenizer(), n_tokens=5)
    song = canary.sing()
    everything = manager.score_all(states(host, manager.pack, song.out[0, :-1].tolist())).numpy()
    assert len(song.scores) == song.out.shape[1] - 1 > 5 and len(song.scores.values) > len(song.scores)
    assert np.abs(everything[song.scores.state_of, song.scores.probes] - song.scores.values).max() < 1e-5
    assert canary.compare(song) < 1e-6 and song.health.ok and song.hook_seconds > 0 and canary.plain_seconds > 0
    assert differ(canary.sing().scores, song.scores) == ""


def test_forwards_of_another_thread_do_not_affect_the_canary(manager, host):
    canary = Canary(manager, host, make_tokenizer(), n_tokens=5)
    song = canary.sing()

    def beside(module, args):
        if not others:
            others.append(threading.Thread(target=host, args=(torch.tensor([[1, 5, 9]]),)))
            others[0].start()
            others[0].join()

    others = []
    with host.model.layers[0].register_forward_pre_hook(beside):
        assert canary.compare(song) < 1e-6
    assert others


@pytest.mark.parametrize("site", ["ssm_state.0", "delta.1"])
def test_recurrent_sites_are_compared_too(tmp_path, site):
    host = make_host("mamba")
    canary = Canary(DynamicProbeManager(pack_for(tmp_path, host, site)), host, make_tokenizer(), pad_token_id=0)
    assert canary.compare(canary.sing()) < 1e-6


def test_changed_text_or_hidden_states_are_detected(manager, host):
    canary = Canary(manager, host, make_tokenizer(), n_tokens=5)
    song = canary.sing()
    handle = host.model.layers[2].mlp.register_forward_hook(lambda module, args, output: output.roll(1, -1))
    with pytest.raises(Blind, match=r"scores are .* off those of an unwatched run|other tokens"):
        canary.compare(song)
    assert differ(canary.sing().scores, song.scores) != ""
    handle.remove()
    handle = host.lm_head.register_forward_hook(lambda module, args, output: -output)
    with pytest.raises(Blind, match="other tokens when it is watched"):
        canary.compare(song)
    handle.remove()
    assert canary.compare(song) < 1e-6


def test_slightly_different_scores_are_detected(manager, host):
    song = Canary(manager, host, make_tokenizer()).sing()
    moved = song.scores.take(np.arange(len(song.scores)))
    moved.values[-1] += 0.01
    assert differ(moved, song.scores).startswith("the canary's scores are different, by 0.01")
    assert differ(song.scores.take(np.arange(3)), song.scores) == "the canary's active concepts are different"


def test_unseen_canary_gives_the_reason(manager, host):
    with torch.no_grad():
        host.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match="weights are others"), pytest.raises(Blind, match="is not finite"):
        Canary(manager, host, make_tokenizer()).sing()
