"""Gates that read what their heads put out equal NumPy, with and without a cache, and keep every limit."""

import math

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

from bem_oracle import VOCAB, make_host, matrix_of, randomise
from conftest import PAD
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.distil import distil
from probemon.adapters.bem.evaluation.budget import n_trainable
from probemon.adapters.bem.forms.head_groups import HeadGroups, head_statistics, retrieval
from probemon.adapters.bem.losses import codes_taken
from probemon.errors import ConfigError, UnsupportedModel

BOTH = ("statistics", "retrieval")
COMMON = {"form": "head_groups", "sites": ("o",), "rank": 3, "width": 6, "chunk_tokens": 3, "prefix_tokens": 6}
CONFIG = BemConfig(groups=1, gate_inputs=BOTH, token_limit=8, spectral_cap=1.0, **COMMON)
IDS = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))


def checkpoint(model, reentrant):
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # newest, older
    enable({"use_reentrant": reentrant})


def logits(model, ids=IDS, **more):
    with torch.no_grad():
        return model(ids, use_cache=False, **more).logits


def statistics_of(x, groups, n_heads):
    """In plain loops: [G][3] of one token."""
    heads = np.split(np.asarray(x, dtype=np.float64), n_heads)
    energies = [float(np.mean(head**2)) for head in heads]
    n, found = n_heads // groups, []
    for g in range(groups):
        own = energies[g * n : (g + 1) * n]
        shares = [energy / sum(own) for energy in own]
        entropy = -sum(share * math.log(share) for share in shares) / math.log(n) if n > 1 else 0.0
        mean = sum(own) / n
        log_energy = math.log(mean / (sum(energies) / n_heads) + 1e-6)
        found.append([log_energy, entropy, sum((e / mean - 1) ** 2 for e in own) / n])
    return found


def retrieval_of(x, values, groups, n_heads, n_shared):
    """In plain loops: [G] of one token; every `n_shared` heads read the same values."""
    size = len(x) // n_heads
    own = [values[(h // n_shared) * size : (h // n_shared + 1) * size] for h in range(n_heads)]
    pairs = [np.split(np.concatenate(parts), groups) for parts in (np.split(x, n_heads), own)]
    return [float(((a - b) ** 2).sum() / ((a**2).sum() + (b**2).sum())) for a, b in zip(*pairs, strict=True)]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_statistics_and_retrieval_equal_plain_loops(groups):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 24, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, 24)
    values = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    for token in range(5):
        wanted = statistics_of(x[token].numpy(), groups, 4)
        np.testing.assert_allclose(head_statistics(x, groups, 4)[token], wanted, rtol=0, atol=1e-9)
        wanted = retrieval_of(x[token].numpy(), values[token].numpy(), groups, 4, 2)
        np.testing.assert_allclose(retrieval(x, values, groups, 4)[token], wanted, rtol=0, atol=1e-9)
    alone = values.view(5, 2, 1, 6).expand(5, 2, 2, 6).reshape(5, 24)
    assert float(retrieval(alone, values, groups, 4).abs().max()) == 0
    assert float(retrieval(-alone, values, groups, 4).min()) == pytest.approx(2)
    zeros = torch.zeros(1, 24, dtype=torch.float64)
    assert head_statistics(zeros, groups, 4).isfinite().all()
    assert not retrieval(zeros, zeros[:, :12], groups, 4).any()


def test_attached_gates_are_what_each_site_reads():
    host = make_host()
    with randomise(attach_bem(host, CONFIG), size=0.8) as bem:
        seen, codes, handles = {}, [], []
        for site in bem.sites:
            value = host.model.layers[site.layer].self_attn.v_proj
            handles.append(value.register_forward_hook(lambda m, a, out, at=site: seen.update({(at, "v"): out})))
            first = site.module.register_forward_hook(
                lambda m, args, out, at=site: seen.update({(at, "x"): args[0], (at, "base"): out}), prepend=True
            )
            last = site.module.register_forward_hook(lambda m, a, out, at=site: seen.update({(at, "out"): out}))
            handles += [first, last]
        handles.append(bem.controller.register_forward_hook(lambda *given: codes.append(given[2])))
        logits(host)
        for handle in handles:
            handle.remove()
        for site in bem.sites:
            form = bem.updates[site.key].double()
            x, v, base, out = (seen[site, name].double().numpy() for name in ("x", "v", "base", "out"))
            code = codes_taken(bem, codes[-1])[False].detach().double()
            for row in range(2):
                assert retrieval_of(x[row, 0], v[row, 0], 1, 2, 2)[0] < 1e-10  # the first token reads itself alone
                for t in range(16):
                    read = [*statistics_of(x[row, t], 1, 2)[0], *retrieval_of(x[row, t], v[row, t], 1, 2, 2)]
                    weights = form.W.detach().numpy()[0]
                    open_ = 1 / (1 + math.exp(-(form.bias.item() + float(np.dot(weights, read)))))
                    dense = matrix_of(form, code[row, t]).detach().numpy()
                    cap = min(1.0, 1.0 / np.linalg.norm(dense, 2))
                    wanted = base[row, t] + open_ * cap * dense @ x[row, t]
                    np.testing.assert_allclose(out[row, t], wanted, rtol=0, atol=2e-5)
            form.float()


@pytest.mark.parametrize("sizes", [[1] * 16, [7, 1, 5, 3], [15, 1]], ids=str)
def test_cached_and_padded_equal_full_and_future_tokens_change_nothing(sizes):
    host = make_host()
    with randomise(attach_bem(host, CONFIG)):
        full, cache, parts = logits(host), DynamicCache(), []
        for part in IDS.split(sizes, dim=1):
            with torch.no_grad():
                parts.append(host(part, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-5)
        other = torch.cat([IDS[:, :9], IDS.flip(0)[:, 9:]], dim=1)
        assert torch.equal(logits(host, other)[:, :9], full[:, :9])
        mask = torch.ones_like(IDS)
        mask[1, :5] = 0
        padded = logits(host, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        torch.testing.assert_close(padded[1, 5:], logits(host, IDS[1:, 5:])[0], rtol=0, atol=1e-5)
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
        assert host.generate(IDS, **how).tolist() == host.generate(IDS, **how, use_cache=False).tolist()


def test_fresh_gates_leave_the_model_alone_and_learn_with_and_without_checkpointing(tmp_path):
    host = make_host()
    bare = logits(host)
    with attach_bem(host, CONFIG) as bem:
        assert torch.equal(logits(host), bare)
        assert sum(p.numel() for p in bem.parameters()) == n_trainable(host, CONFIG)
        randomise(bem)
        steered = logits(host)
        gradients = []
        for how in (None, False, True):
            bem.zero_grad()
            host.train()
            if how is not None:
                checkpoint(host, how)
                host.enable_input_require_grads()
            host(IDS, labels=IDS, use_cache=False).loss.backward()
            gradients.append({name: p.grad.clone() for name, p in bem.named_parameters() if p.grad is not None})
        host.eval()
        for name in ("updates.o_0.W", "updates.o_0.bias"):
            assert float(gradients[0][name].abs().max()) > 0
        for other in gradients[1:]:
            assert other.keys() == gradients[0].keys()
            for name, gradient in gradients[0].items():
                torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)
        bem.save_pretrained(tmp_path)
    with attach_bem(host, tmp_path) as bem:
        assert bem.config == CONFIG and torch.equal(logits(host), steered)


def test_attenuated_updates_are_never_larger():
    generator = torch.Generator().manual_seed(0)
    form = HeadGroups(12, 6, groups=3, rank=2, reads=("statistics",), n_heads=6, generator=generator).double()
    with torch.no_grad():
        for parameter in form.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for _ in range(20):
            x, code = (torch.randn(1, n, generator=generator, dtype=torch.float64) for n in (12, 3))
            open_ = form.attenuation(x)[0]
            assert (open_ > 0).all() and (open_ < 1).all()
            steered = form(x, code, torch.zeros(1, 6, dtype=torch.float64), open_[None])[0]
            attenuated = matrix_of(form, code[0]) * open_.repeat_interleave(4)
            torch.testing.assert_close(steered, attenuated @ x[0])
            sigma1, frobenius = form.sizes(code)
            assert float(torch.linalg.matrix_norm(attenuated, 2)) <= float(sigma1) + 1e-12
            assert float(attenuated.norm()) <= float(frobenius) + 1e-12


def test_unsupported_gate_inputs_are_refused():
    for wrong, words in (
        ({"gate_inputs": ("entropy",)}, "give a tuple of some of statistics, retrieval"),
        ({"gate_inputs": "statistics"}, "give a tuple of some of statistics, retrieval"),
        ({"gate_inputs": BOTH, "form": "low_rank", "groups": None}, "a setting of form='head_groups'"),
    ):
        with pytest.raises(ConfigError, match=words):
            BemConfig(**{"groups": 1, **COMMON, **wrong})
    with (
        attach_bem(make_host(), CONFIG) as bem,
        pytest.raises(ConfigError, match="gates read statistics and retrieval"),
    ):
        distil(bem, [{"input_ids": IDS}])
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": PAD}  # fmt: skip
    fused = Phi3ForCausalLM(Phi3Config(**sizes)).eval()
    with pytest.raises(UnsupportedModel, match=r"reads the values of layer 0, .* leave 'retrieval' out"):
        attach_bem(fused, CONFIG)
    with attach_bem(fused, BemConfig(groups=1, gate_inputs=("statistics",), **COMMON)):
        assert logits(fused).isfinite().all()
