"""Promise 1 at the tap: watching changes nothing and leaves nothing behind."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from probemon.errors import ConfigError
from probemon.host.tap import Tap


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def n_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_generation_is_bit_identical_and_states_are_the_models_own(model):
    ids = torch.tensor([[1, 5, 9, 13]])
    seen = []
    options = {
        "max_new_tokens": 7,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "eos_token_id": None,
    }
    bare = model.generate(ids, **options)
    before = n_hooks(model)
    with Tap(model, ["resid_post.1"], lambda site, h: seen.append(h.clone())):
        watched = model.generate(ids, **options)
    assert n_hooks(model) == before
    assert torch.equal(bare.sequences, watched.sequences)
    assert all(torch.equal(a, b) for a, b in zip(bare.logits, watched.logits, strict=True))
    with torch.no_grad():
        full = model(watched.sequences, output_hidden_states=True).hidden_states[2]
    states = torch.cat(seen, dim=1)
    assert states.shape[1] == watched.sequences.shape[1] - 1  # the last token has no state
    assert (states - full[:, :-1]).abs().max() < 1e-5


def test_exception_inside_leaves_no_hook(model):
    before = n_hooks(model)
    with pytest.raises(RuntimeError, match="stop here"), Tap(model, ["resid_post.0"], lambda site, h: None):
        assert n_hooks(model) == before + 1
        raise RuntimeError("stop here")
    assert n_hooks(model) == before


@pytest.mark.parametrize("sites", [["resid_post.0", "resid_post.3"], ["resid_post.0", "mlp_in.1"]])
def test_bad_site_leaves_no_hook(model, sites):
    before = n_hooks(model)
    with pytest.raises(ConfigError, match="site"):
        Tap(model, sites, lambda site, h: None)
    assert n_hooks(model) == before
