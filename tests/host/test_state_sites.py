"""A site of a recurrent layer gives the model's own state after each token, in every mode."""

import copy
import math

import pytest
import torch
from torch.nn.functional import softplus

from conftest import OLDEST, PAD, make_model, n_hooks
from probemon.errors import ConfigError, UnsupportedDecoding, UnsupportedModel
from probemon.host.recurrent.mixers import find_mixers
from probemon.host.recurrent.state_sites import site_width
from probemon.host.tap import Tap
from recurrent_hosts import BATCH, FURTHER, GREEDY, HOSTS, cache_in, cache_of, make_host, states_alone

newer = pytest.mark.skipif(OLDEST, reason="transformers 5.0: caches of recurrent layers are refused")


@pytest.fixture(scope="module", params=HOSTS)
def host(request):
    return make_host(request.param)


def watched(host, site, run):
    """What a site gave in every forward of `run()`, and what that returned."""
    seen = []
    before = n_hooks(host)
    with Tap(host, [site], lambda name, values: seen.append(values.clone())):
        out = run()
    assert n_hooks(host) == before
    return seen, out


@newer
@pytest.mark.parametrize("mode", ["greedy", "beams", "no cache"])
def test_last_state_equals_the_models_cache_after_every_forward(host, mode):
    options = {"beams": {"num_beams": 3}, "no cache": {"use_cache": False}}.get(mode, {}) | GREEDY
    bare = host.generate(BATCH, attention_mask=BATCH != PAD, **options)
    kept, (given, handle) = [], cache_of(host)
    after = host.base_model.register_forward_hook(
        lambda *_: kept.append(given[-1].layers[0].recurrent_states[0].flatten(1).clone() if given else None)
    )
    seen, out = watched(host, "ssm_state.0", lambda: host.generate(BATCH, attention_mask=BATCH != PAD, **options))
    handle.remove()
    after.remove()
    assert torch.equal(out, bare) and len(seen) == len(kept) == 7
    if mode == "no cache":  # the texts grow by a token a forward
        assert [values.shape[1] for values in seen] == list(range(5, 12))
        for values, before in zip(seen[1:], seen, strict=False):
            assert (values[:, : before.shape[1]] - before).abs().max() < 1e-5
        return
    assert [tuple(values.shape) for values in seen[:2]] == [
        (len(kept[0]), 5, site_width(host, "ssm_state.0")), (len(kept[0]), 1, site_width(host, "ssm_state.0"))
    ]  # fmt: skip
    for values, state in zip(seen, kept, strict=True):
        assert (values[:, -1] - state).abs().max() <= 5e-6 * float(state.abs().max()) > 0


@newer
@pytest.mark.parametrize("kind", FURTHER)
def test_every_recurrent_family_has_the_states_of_its_cache(kind):
    host = make_host(kind)
    for layer, _ in find_mixers(host):
        kept, (given, handle) = [], cache_of(host)
        after = host.base_model.register_forward_hook(
            lambda *_, kept=kept, given=given, layer=layer: kept.append(
                given[-1].layers[layer].recurrent_states[0].flatten(1).clone()
            )
        )
        seen, _ = watched(
            host, f"ssm_state.{layer}", lambda: host.generate(BATCH, attention_mask=BATCH != PAD, **GREEDY)
        )
        handle.remove()
        after.remove()
        for values, state in zip(seen, kept, strict=True):
            assert (values[:, -1] - state).abs().max() <= 5e-6 * float(state.abs().max()) > 0


@newer
def test_padding_does_not_change_recurrent_states_and_steps(host):
    exact = copy.deepcopy(host).double()
    with torch.no_grad():
        states, _ = watched(host, "ssm_state.0", lambda: host(BATCH, attention_mask=(BATCH != PAD).long()))
        steps, _ = watched(host, "delta.0", lambda: host(BATCH, attention_mask=(BATCH != PAD).long()))
    for row in range(len(BATCH)):
        text = BATCH[row][BATCH[row] != PAD]
        oracle = states_alone(exact, text.tolist(), 0)
        own = states[0][row, -len(text) :].double()
        assert (own - oracle).abs().max() <= 1e-5 * float(oracle.abs().max()) and oracle.abs().max() > 0.01
        oracle = steps_alone(exact, text)
        assert (steps[0][row, -len(text) :].double() - oracle).abs().max() <= 1e-5 * float(oracle.max())


def steps_alone(exact, text):
    """The steps of one text in fp64, by what the first layer's projection gives."""
    mixer = next(module for module in exact.modules() if hasattr(module, "A_log"))
    given = []
    module = mixer.x_proj if hasattr(mixer, "x_proj") else mixer.in_proj
    handle = module.register_forward_hook(lambda m, a, out: given.append(out[0]))
    with torch.no_grad():
        exact(text[None])
    handle.remove()
    if not hasattr(mixer, "x_proj"):
        projected = given[0] * getattr(mixer, "mup_vector", torch.ones(1))[0]
        return softplus(projected[:, -mixer.num_heads :] + mixer.dt_bias).detach()
    low = given[0][:, : mixer.time_step_rank]
    low = mixer.dt_layernorm(low) if hasattr(mixer, "dt_layernorm") else low
    return softplus(low @ mixer.dt_proj.weight.T + mixer.dt_proj.bias).detach()


@newer
def test_second_turn_and_prompt_chunks_continue_from_the_cache():
    host = make_host("falcon_h1")
    exact = copy.deepcopy(host).double()
    first = host.generate(BATCH[1:2], return_dict_in_generate=True, **GREEDY)
    ids = torch.cat([first.sequences, torch.tensor([[4, 5, 11]])], dim=1)
    seen, out = watched(
        host, "ssm_state.1", lambda: host.generate(ids, past_key_values=first.past_key_values, **GREEDY)
    )
    oracle = states_alone(exact, out[0, :-1].tolist(), 1)
    own = torch.cat(seen, dim=1)[0].double()
    assert len(own) == len(oracle) - 11  # 11 tokens were in the cache before
    assert (own - oracle[11:]).abs().max() <= 1e-5 * float(oracle.abs().max())
    chunks, again = watched(host, "ssm_state.1", lambda: host.generate(ids, prefill_chunk_size=4, **GREEDY))
    assert torch.equal(again, out) and [values.shape[1] for values in chunks[:4]] == [4, 4, 4, 3]
    assert (torch.cat(chunks, dim=1)[0].double() - oracle).abs().max() <= 1e-5 * float(oracle.abs().max())


@newer
def test_steps_are_clamped_when_the_model_clamps_them():
    """In a first forward, even of one token, and never in one of one token on a used cache."""
    host = make_host("mamba2", time_step_limit=(0.6, 0.7))
    for prompt in (BATCH[1:2], BATCH[1:2, :1]):
        kept, (given, handle) = [], cache_of(host)
        after = host.base_model.register_forward_hook(
            lambda *_, given=given, kept=kept: kept.append(given[-1].layers[1].recurrent_states[0].flatten(1).clone())
        )
        steps, _ = watched(host, "delta.1", lambda prompt=prompt: host.generate(prompt, **GREEDY))
        states, _ = watched(host, "ssm_state.1", lambda prompt=prompt: host.generate(prompt, **GREEDY))
        handle.remove()
        after.remove()
        assert 0.6 <= float(steps[0].min()) <= float(steps[0].max()) <= 0.7 + 1e-6
        later = torch.cat(steps[1:])
        assert ((later < 0.6) | (later > 0.7)).float().mean() > 0.5
        for values, state in zip(states, kept[7:], strict=True):
            assert (values[:, -1] - state).abs().max() <= 5e-6 * float(state.abs().max()) > 0


@newer
def test_recurrent_states_under_bf16_and_autocast_are_fp32():
    host = make_host("mamba2")
    with torch.no_grad():
        plain, _ = watched(host, "ssm_state.1", lambda: host(BATCH[1:2]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = watched(host, "ssm_state.1", lambda: host(BATCH[1:2], use_cache=True))
        low = copy.deepcopy(host).bfloat16()
        half = watched(low, "ssm_state.1", lambda: low(BATCH[1:2], use_cache=True))
    for (values,), out in (rounded, half):
        kept = cache_in(out).layers[1].recurrent_states[0][0].flatten()
        assert values.dtype == torch.float32 and (values - plain[0]).abs().max() > 1e-4
        assert (values[0, -1] - kept).abs().max() < 0.01 * kept.abs().max()  # the host convolves in bf16


@newer
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["mamba2", "mamba"])
def test_adapters_on_projections_change_the_states(kind):
    from peft import LoraConfig, get_peft_model

    host = make_host(kind)
    targets = ["in_proj", "x_proj"] if kind == "mamba" else ["in_proj"]
    tuned = get_peft_model(host, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    with torch.no_grad():
        seen, out = watched(host, "ssm_state.0", lambda: tuned(BATCH[1:2], use_cache=True))
        with tuned.disable_adapter():
            bare, _ = watched(host, "ssm_state.0", lambda: tuned(BATCH[1:2], use_cache=True))
    kept = cache_in(out).layers[0].recurrent_states[0][0].flatten()
    assert (seen[0][0, -1] - kept).abs().max() <= 5e-6 * float(kept.abs().max()) > 0
    assert (seen[0] - bare[0]).abs().max() > 1e-3


@newer
@pytest.mark.parametrize("kind", ["mamba2", "falcon_mamba"])
def test_offloaded_model_has_the_same_states(kind):
    from accelerate import cpu_offload

    host = make_host(kind)
    with torch.no_grad():
        here, _ = watched(host, "ssm_state.1", lambda: host(BATCH[1:2]))
        cpu_offload(host, execution_device="cpu")
        assert any(p.device.type == "meta" for p in host.parameters())
        there, _ = watched(host, "ssm_state.1", lambda: host(BATCH[1:2]))
    assert torch.equal(here[0], there[0])


@pytest.mark.skipif(not OLDEST, reason="newer caches show the state of each layer")
def test_old_cache_of_recurrent_layers_is_refused():
    host = make_host("mamba2")
    with pytest.raises(UnsupportedDecoding, match=r"Mamba2Cache of this version .* upgrade transformers"):
        watched(host, "ssm_state.1", lambda: host.generate(BATCH[1:2], **GREEDY))


def test_missing_recurrent_site_is_refused_by_name():
    llama, jamba = make_model(), make_host("jamba")
    nothing = lambda site, values: None  # noqa: E731
    for model, site, error, words in (
        (llama, "ssm_state.1", UnsupportedModel, "site 'ssm_state.1': layer 1 of LlamaForCausalLM .* have one: none"),
        (jamba, "delta.1", UnsupportedModel, "layer 1 of JambaForCausalLM .* have one: 0"),
        (jamba, "ssm_state.2", ConfigError, r"the model has layers 0\.\.1"),
    ):
        before = n_hooks(model)
        with pytest.raises(error, match=words):
            Tap(model, ["resid_post.0", site], nothing)
        assert n_hooks(model) == before


def test_layer_whose_forward_did_not_run_has_nan_states():
    host = make_host("mamba2")
    seen, _ = watched(host, "ssm_state.0", lambda: host.base_model.layers[0].mixer.in_proj(torch.randn(1, 3, 16)))
    assert seen[0].shape == (1, 3, 4 * 8 * 6) and all(map(math.isnan, seen[0][0, :, 0].tolist()))
