"""For each architecture, the settings that are left out of its identity change no hidden state.

PROBEMON_EVERY_ARCHITECTURE=1 python -m pytest tests/host/test_settings_sweep.py        # not a sample: a few minutes
"""

import copy
import os
from contextlib import suppress

import pytest
import torch

import architectures
from probemon.core.state_settings import differing, state_settings
from probemon.host.changes import ModelMarks
from probemon.host.model import find_layers
from probemon.host.settings import model_settings

IDS = torch.tensor([[1, 44, 3, 17, 8, 44, 3, 5, 9, 11, 60, 33, 20, 2, 7, 19]])
# How a host is loaded and what it returns, and what makes it one of other tensors.
LEFT_ALONE = {"architectures", "transformers_version", "dtype", "torch_dtype", "return_dict", "tie_word_embeddings"}
# What some refuse, or make tensors of.
# It goes over to another attention in its first forward, for good; it makes its table of positions longer, as a weight;
# it makes its weights smaller in its first forward.
CHANGES_ITSELF = {"big_bird", "fsmt", "rwkv"}
CANNOT = {"diffllama": {"attention_dropout"}, "fsmt": {"pad_token_id"}, "modernbert-decoder": {"classifier_bias"}}


def states_of(model, kind):
    seen = []

    def keep(module, args, output):
        seen.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in find_layers(model)[1]]
    decoded = {"decoder_input_ids": IDS[:, 2:14].flip(1)} if kind == "seq2seq" else {}
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False, **decoded)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


def other_value(name, value):
    """Another value of a setting; the same where there is none to think of."""
    if isinstance(value, bool):
        return not value
    if name.endswith("token_id") and isinstance(value, int | None):
        return (value or 0) % 8 + 2
    return value * 0.5 + 0.3 if isinstance(value, float) else value


def set_otherwise(config, but):
    """Set all that `state_settings` leaves out, also in the configurations in this one; return the names."""
    known, names = config.to_dict(), []
    for name in sorted(known.keys() - state_settings(known).keys() - LEFT_ALONE - but):
        value = getattr(config, name, None)
        if not name.startswith(("_", "output_")) and other_value(name, value) != value:
            setattr(config, name, other_value(name, value))
            names.append(name)
    for inner in vars(config).values():
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            names += set_otherwise(inner, but)
    return names


def with_others(model, but):
    config = copy.deepcopy(model.config)
    names = set_otherwise(config, but)
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other, names


# Of each kind a few, and those that need a word above.
SAMPLE = {"llama", "mistral", "gemma3_text", "gpt2", "bloom", "mixtral", "gpt_oss", "deepseek_v3", "mamba2", "jamba"}
SAMPLE |= {"recurrent_gemma", "t5", "bart", *CHANGES_ITSELF, *CANNOT}
EVERY = sorted(architectures.architectures().items())
TRIED = EVERY if os.environ.get("PROBEMON_EVERY_ARCHITECTURE") == "1" else [one for one in EVERY if one[0] in SAMPLE]


@pytest.mark.parametrize("name, kind", TRIED)
def test_settings_left_out_of_the_identity_change_no_state(name, kind):
    try:
        model = architectures.build(name, kind).eval()
        marks = ModelMarks(model)
        mark = marks.now()
        before = states_of(model, kind)
    except Exception as error:  # what cannot be built small, or reads no text alone
        pytest.skip(f"{type(error).__name__}: {error}")
    with suppress(Exception):  # of a host that cannot generate
        for ids in (IDS[:, :5], IDS.repeat(2, 2)):
            model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert name in CHANGES_ITSELF or marks.now().changes(mark) == []
    but = CANNOT.get(name, set())
    other, names = with_others(model, but)
    told = differing(model_settings(model), model_settings(other))
    if told:  # what it takes for padding, which is told whatever else differs
        assert [line.split()[0] for line in told] in (["padding_idx"], ["pad_token_id"])
        other, names = with_others(model, but | {"pad_token_id"})
    assert names and torch.allclose(states_of(other, kind), before, atol=1e-4), names
