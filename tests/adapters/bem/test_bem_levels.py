"""Levels chosen by the spread of a chunk's tokens, or learned for each site at a price in operations."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from bem_oracle import VOCAB, dense_update, make_host, randomise
from bem_toys import imitation_error
from conftest import PAD
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.distil import distil
from probemon.adapters.bem.evaluation.budget import n_trainable
from probemon.adapters.bem.fallback import FallbackPolicy
from probemon.adapters.bem.imitation import imitate
from probemon.adapters.bem.levels import expected_operations, level_operations
from probemon.adapters.bem.losses import LossWeights, adapter_losses, recorded_codes
from probemon.adapters.bem.state import ControllerState
from probemon.adapters.bem.training import TrainSettings, fit
from probemon.adapters.routing import RoutingMonitor
from probemon.errors import ConfigError

SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8, "spectral_cap": 1.0}
ENERGY = BemConfig(**SMALL, level="energy", energy_limits=(0.5, 0.8), sites=("v", "o", "down"))
LEARNED = BemConfig(**SMALL, level="learned", sites=("v", "o", "down"))
PLANTED = torch.tensor([2, 0, 1, 2])  # token, prefix, chunk, token


def some_ids(rows=3, length=21, seed=0):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(host, ids, **more):
    with torch.no_grad():
        return host(ids, use_cache=False, **more).logits


def planted(host, config=LEARNED, levels=PLANTED):
    bem = randomise(attach_bem(host, config))
    with torch.no_grad():
        bem.levels.logits.copy_(4 * torch.nn.functional.one_hot(levels, 3))
    return bem


def attached(host, config):
    return planted(host, config) if config.level == "learned" else randomise(attach_bem(host, config))


@pytest.mark.parametrize("config", [ENERGY, LEARNED], ids=["energy", "learned"])
def test_cached_padded_and_reloaded_logits_equal_one_forward(config, tmp_path):
    host, ids = make_host(), some_ids()
    with attached(host, config) as bem:
        whole = logits(host, ids)
        for cuts in ((21,), (1,) * 21, (3, 1, 9, 8), (4, 4, 13)):
            cache, parts = DynamicCache(), []
            with torch.no_grad():
                for part in ids.split(cuts, dim=1):
                    parts.append(host(part, past_key_values=cache).logits)
            assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-5
        mask = torch.ones(3, 26, dtype=torch.long)
        mask[:, :5] = 0
        padded = torch.cat([torch.full((3, 5), PAD), ids], dim=1)
        assert (logits(host, padded, attention_mask=mask)[:, 5:] - whole).abs().max() < 1e-5
        how = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
        said = host.generate(ids[:, :7], **how)
        assert said.tolist() == host.generate(ids[:, :7], **how, use_cache=False).tolist()
        assert said[:1].tolist() == host.generate(ids[:1, :7], **how, num_beams=1).tolist()
        bem.save_pretrained(tmp_path)
    with attach_bem(host, tmp_path):
        assert torch.equal(logits(host, ids), whole)


def test_energy_level_equals_a_plain_loop_and_is_coarsest_for_equal_tokens():
    host, ids = make_host(), some_ids()
    ids[0] = 5  # a row of one token: its chunks do not spread
    with randomise(attach_bem(host, ENERGY)) as bem, torch.no_grad(), recorded_codes(bem) as seen:
        host(ids, use_cache=False)
        z = bem.controller.features(host.get_input_embeddings()(ids), torch.ones_like(ids, dtype=torch.bool))
    for row in range(3):
        for t in range(21):
            if t < 4:
                expected = "token"
            else:
                chunk = z[row, t // 4 * 4 - 4 : t // 4 * 4].double()
                spread = 1 - float(chunk.mean(0).square().sum()) / float(chunk.square().sum(1).mean())
                expected = "prefix" if spread < 0.5 else "chunk" if spread < 0.8 else "token"
                assert min(abs(spread - 0.5), abs(spread - 0.8)) > 1e-4
            assert LEVELS[seen[0].level[row, t]] == expected
    assert set(seen[0].level[0, 4:].tolist()) == {0} and set(seen[0].level[1:].flatten().tolist()) == {0, 1, 2}


def test_each_site_uses_codes_of_its_own_level_within_the_limits():
    host, ids = make_host(), some_ids(1)
    with planted(host, replace(LEARNED, spectral_cap=0.5)) as bem:
        seen = {}
        bem.controller.needed = LEVELS
        with torch.no_grad(), recorded_codes(bem) as codes:
            handles = [
                site.module.register_forward_hook(
                    lambda module, args, output, key=site.key: seen.__setitem__(key, (args[0][0], output[0]))
                )
                for site in bem.sites
            ]
            host(ids, use_cache=False)
        for handle in handles:
            handle.remove()
        levels = dict(zip(("o_0", "down_0", "o_1", "down_1"), PLANTED.tolist(), strict=True))
        for site in bem.sites:
            x, output = seen[site.key]
            bare = torch.nn.functional.linear(x, site.module.weight)
            for t in range(21):
                code = codes[0].by_level()[LEVELS[levels.get(site.key, 1)]][0, t]
                dense = dense_update(bem.updates[site.key], code, bem.config.scale).detach()
                dense = dense * min(1.0, 0.5 / float(torch.linalg.svdvals(dense)[0]))
                assert (output[t] - bare[t] - dense @ x[t]).abs().max() < 1e-5
        lora = distil(bem, [{"input_ids": ids}])
        assert 0 < lora.error < 1


def learned_from(teacher_logits, weight, levels=PLANTED, n_steps=120):
    """Levels that a fresh choice learns, with everything else of the planted adapter given; and their price."""
    host, config = make_host(), replace(LEARNED, sites=("o", "down"), spectral_cap=None)
    bem = planted(host, config, levels)
    with torch.no_grad():
        bem.levels.logits.zero_()
    batches = [{"input_ids": some_ids(8, 24, seed), "number": seed} for seed in range(4)]

    def loss_of(batch):
        said = host(batch["input_ids"], use_cache=False).logits.log_softmax(-1)
        truth = teacher_logits[batch["number"]].log_softmax(-1)
        divergence = (truth.exp() * (truth - said)).sum(-1).mean()
        return divergence + weight * expected_operations(bem, 24), {}

    host.train()
    settings = TrainSettings(n_steps=n_steps, lr=0.1, max_grad_norm=None)
    fit([bem.levels.logits], loss_of, batches, settings)
    host.eval()
    chosen = list(bem.levels.chosen().values())
    bem.detach()
    return chosen


def test_planted_levels_are_recovered_and_a_price_changes_them():
    host = make_host()
    with planted(host, replace(LEARNED, sites=("o", "down"), spectral_cap=None)):
        truth = [logits(host, some_ids(8, 24, seed)) for seed in range(4)]
    assert learned_from(truth, 0.0) == [LEVELS[i] for i in PLANTED]
    assert learned_from(truth, 1.0, n_steps=40) == ["prefix"] * 4


def with_experts(by_token, seed):
    """Rows of six kinds of tokens, with the code of an expert for each token, or for each row by its first one."""
    ids = torch.randint(3, 9, (8, 24), generator=torch.Generator().manual_seed(seed))
    table = torch.nn.functional.normalize(torch.randn(9, 3, generator=torch.Generator().manual_seed(5)), dim=1)
    if not by_token:
        ids = ids[:, :1].expand(8, 24).contiguous()
    counted = (torch.arange(24) >= 4).expand(8, 24)  # before, a prefix code knows nothing
    return {"input_ids": ids, "expert_codes": table[ids] if by_token else table[ids[:, 0]], "counted": counted}


@pytest.mark.parametrize(("by_token", "operations", "expected"), [(True, 0.0, "token"), (False, 1e-3, "prefix")])
def test_imitation_learns_the_cheapest_sufficient_level(by_token, operations, expected):
    """Of an expert of tokens that come by chance, coarser codes know nothing; a row's expert every level can follow."""
    host = make_host()
    with attach_bem(host, LEARNED) as bem:
        batches, held_out = ([with_experts(by_token, seed) for seed in seeds] for seeds in (range(8), range(8, 10)))
        before = imitation_error(bem, held_out)
        imitate(bem, batches, TrainSettings(n_steps=200, lr=3e-2), operations=operations)
        assert set(bem.levels.chosen().values()) == {expected} and not host.training
        of_values = sum(site.chunked for site in bem.sites) / len(bem.sites)  # these have chunk codes: one code for all
        error = imitation_error(bem, held_out)
        assert before > 0.9 and error < (0.1 + 1.2 * of_values if by_token else 0.1)


def test_imitation_error_uses_each_sites_level_and_a_price_needs_levels():
    host, batch = make_host(), with_experts(True, 0)
    with planted(host) as bem:
        host.train()  # which is left as it was
        error, training = imitation_error(bem, [batch]), host.training
        host.eval()
        bem.controller.needed = LEVELS
        with torch.no_grad(), recorded_codes(bem) as seen:
            host.train()
            host.model(batch["input_ids"], use_cache=False)
            host.eval()
        wanted = batch["expert_codes"][:, 4:].double().reshape(-1, 3)
        levels = dict(zip(("o.0", "down.0", "o.1", "down.1"), PLANTED.tolist(), strict=True))
        apart = [
            seen[0].of(LEVELS[levels.get(site.name, 1)])[:, 4:].double().reshape(-1, 3) - wanted for site in bem.sites
        ]
        spread = (wanted - wanted.mean(0)).square().sum() * len(bem.sites)
        assert training and math.isclose(error, float(sum(a.square().sum() for a in apart) / spread), rel_tol=1e-5)
    with attach_bem(make_host(), BemConfig(**SMALL)) as bem, pytest.raises(ConfigError, match="no level is learned"):
        imitate(bem, [batch], TrainSettings(n_steps=1), operations=1.0)


def test_operations_of_a_level_equal_the_measured_cost_of_its_router():
    """Of the controller's products, counted: what codes of a level take more than none."""
    host = make_host()
    hidden, real = torch.randn(1, 64, 16), torch.ones(1, 64, dtype=torch.bool)
    with pytest.raises(ConfigError, match="n_tokens is 0"):
        level_operations(LEARNED, 0)
    prices = level_operations(LEARNED, 64)
    with planted(host) as bem, torch.no_grad():
        measured = {}
        for needed in ((), ("token",), ("chunk",), ("prefix",)):
            bem.controller.needed = needed
            with FlopCounterMode(display=False) as counter:
                bem.controller(hidden, real, ControllerState(1))
            measured[needed] = counter.get_total_flops()
        for level in LEVELS:
            assert (measured[level,] - measured[()]) / 64 == prices[level]
        assert prices["prefix"] < prices["chunk"] < prices["token"]
        bem.levels.logits.zero_()
        mean = sum(prices.values()) / 3
        assert math.isclose(float(expected_operations(bem, 64)), mean, rel_tol=1e-6)
        bem.controller.needed = LEVELS
        loss = adapter_losses(bem, {"input_ids": some_ids(2, 64)}, LossWeights(operations=1e-4))
        assert math.isclose(float(loss.terms["operations"]), mean, rel_tol=1e-6)
        only = BemConfig(**SMALL, level="learned")
    assert n_trainable(host, only) == sum(p.numel() for p in attach_bem(host, only).parameters())


def test_invalid_settings_are_refused():
    for wrong, told in (
        ({"level": "energy", "energy_limits": (0.6, 0.4)}, "the smaller first"),
        ({"level": "energy", "energy_limits": (0.1, 1.5)}, "from 0 to 1"),
        ({"level": "learned", "trust_region": 1.0}, "limited one by one"),
        ({"level": "learned", "sites": ("q",)}, "take chunk codes"),
    ):
        with pytest.raises(ConfigError, match=told):
            BemConfig(**wrong)
    with attach_bem(make_host(), BemConfig(**SMALL)) as bem, pytest.raises(ConfigError, match="no level is learned"):
        adapter_losses(bem, {"input_ids": some_ids()}, LossWeights(operations=1.0))


def test_monitored_levels_are_the_same_in_training_and_after_fallback(monkeypatch):
    """All sites take prefix codes, whose router alone runs: those of a fallback and of training are of every level."""
    host, ids = make_host(), some_ids()
    with attach_bem(host, LEARNED, fallback=FallbackPolicy()) as bem, torch.no_grad():
        bem.levels.logits[:, 0] = 9
        with RoutingMonitor(host, bem=bem) as monitor:
            route = bem.controller.route
            host(ids)
            monkeypatch.setattr(bem.controller, "route", lambda *args: 1 / 0)
            host(ids)
            assert bem.fallbacks.n_failed == 1
            monkeypatch.setattr(bem.controller, "route", route)
            host.train()
            host(ids)
            host.eval()
            host(ids)
            assert monitor.report()["n_tokens"] == 4 * ids.numel()
