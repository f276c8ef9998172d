"""States kept of a run are those of one plain forward over each finished text, at the token that they say."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GenerationConfig

from conftest import PAD
from probemon import DynamicProbeManager, KeepStates, read_states
from probemon.core.scores import GENERATED, PHASES
from probemon.errors import ConfigError
from probemon.monitor import kept_states

SITES = ("resid_post.0", "resid_post.2")


@pytest.fixture
def manager(pack):
    return DynamicProbeManager(pack)


def plain_states(model, ids):
    """States after each layer of SITES of a text run alone, `[T, D]` by site."""
    taken = {}
    layers = model.model.layers
    handles = [
        layers[int(site[-1])].register_forward_hook(
            lambda module, given, output, site=site: taken.__setitem__(
                site, (output[0] if isinstance(output, tuple) else output)[0]
            )
        )
        for site in SITES
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return taken


@pytest.mark.parametrize("phase", [None, "prompt", "generated"])
@pytest.mark.parametrize("sampled", [False, True])
def test_states_are_those_of_a_plain_forward(manager, model, tmp_path, phase, sampled):
    prompts = [[5, 6, 7, 8], [9, 10]]
    ids = torch.tensor([[5, 6, 7, 8], [PAD, PAD, 9, 10]])
    mask = (ids != PAD).long()
    keep = KeepStates(tmp_path / "states", SITES, phase=phase)
    torch.manual_seed(3)
    with manager.attach(model, followers=[keep]) as run:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=5, do_sample=sampled, eos_token_id=None, pad_token_id=PAD
        )
    result = run.result(out)
    kept = read_states(tmp_path / "states")
    expected = set()
    for row, prompt in enumerate(prompts):
        text = [*prompt, *out[row, 4:].tolist()]
        plain, pad = plain_states(model, text), 4 - len(prompt)
        for at in range(len(text) - 1):  # the last is never run
            if phase in (None, PHASES[at >= len(prompt)]):
                expected.add((row, at + pad))
        for i in torch.nonzero(kept["row"] == row)[:, 0].tolist():
            at = int(kept["position"][i]) - pad
            assert int(kept["token_id"][i]) == text[at]
            assert int(kept["phase"][i]) == (GENERATED if at >= len(prompt) else 0)
            for site in SITES:
                apart = (kept[site][i] - plain[site][at]).norm() / plain[site][at].norm()
                assert apart < 1e-5
    places = list(zip(kept["row"].tolist(), kept["position"].tolist(), strict=True))
    assert len(places) == len(set(places)) and set(places) == expected
    seen = {(int(r), int(p)) for r, p, s in zip(result.row, result.position, result.coverage.seen, strict=True) if s}
    assert set(places) <= seen
    assert json.loads((tmp_path / "states" / kept_states.INDEX).read_text())["complete"] is True


def test_files_are_bounded_and_joined_in_order(manager, model, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_states, "_FILE_BYTES", 1)
    with manager.attach(model) as run:
        run.keep_states(tmp_path / "many", phase="generated")
        model.generate(
            torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=PAD
        )
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 5 and not list((tmp_path / "many").glob("*.partial"))
    kept = read_states(tmp_path / "many")
    assert kept["position"].tolist() == [3, 4, 5, 6, 7]
    assert [name for name in kept if "." in name] == list(manager.pack.sites)


def test_tokens_over_the_bound_are_counted_and_said(manager, model, tmp_path):
    width = model.config.hidden_size * 4 * len(manager.pack.sites)
    with manager.attach(model) as run:
        keep = run.keep_states(tmp_path / "few", phase="generated", max_bytes=2 * width)
        model.generate(
            torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=PAD
        )
        health = str(run.health())
    assert (keep.n_kept, keep.n_left_out) == (2, 3) and "3 left out" in health
    assert len(read_states(tmp_path / "few")["row"]) == 2


def test_beams_are_left_out_with_the_reason(manager, model, tmp_path):
    with manager.attach(model) as run:
        keep = run.keep_states(tmp_path / "beams", phase="generated")
        config = GenerationConfig(num_beams=2, max_new_tokens=4, eos_token_id=None, pad_token_id=PAD)
        model.generate(torch.tensor([[5, 6, 7]]), generation_config=config)
    assert keep.n_kept == 0 and keep.n_left_out > 0 and "beams" in keep.why_left_out
    assert len(read_states(tmp_path / "beams")["row"]) == 0


def test_drafts_of_an_assistant_are_kept_once_accepted(manager, model, tmp_path):
    with manager.attach(model) as run:
        run.keep_states(tmp_path / "drafts")
        out = model.generate(
            torch.tensor([[5, 6, 7]]),
            prompt_lookup_num_tokens=3,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
    kept = read_states(tmp_path / "drafts")
    assert kept["position"].tolist() == list(range(out.shape[1] - 1))
    assert kept["token_id"].tolist() == out[0, :-1].tolist()


def test_folder_with_states_and_unknown_phase_are_refused(manager, model, tmp_path):
    with manager.attach(model) as run:
        run.keep_states(tmp_path / "once")
    with manager.attach(model) as run, pytest.raises(ConfigError, match="has kept states: give another folder"):
        run.keep_states(tmp_path / "once")
    with pytest.raises(ConfigError, match="phase"):
        KeepStates(tmp_path, phase="answer")
    with pytest.raises(ConfigError, match="has no kept states"):
        read_states(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with manager.attach(model) as run, pytest.raises(ConfigError, match="cannot be written"):
        run.keep_states(tmp_path / "file" / "below")
