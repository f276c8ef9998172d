"""Chunk codes are foretold, verified before they are used, and counted: outputs stay, hit rates are the known ones."""

import math

import pytest
import torch
from transformers import DynamicCache

from bem_oracle import VOCAB, make_host, randomise
from conftest import PAD
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.speculation import speculating
from probemon.adapters.routing import RoutingMonitor
from probemon.errors import BemError, ConfigError

CONFIG = BemConfig(
    rank=3, width=6, chunk_tokens=4, prefix_tokens=4, ema=0.0, level="chunk", sites=("v", "o"), spectral_cap=0.5,
    trust_region=0.8,
)  # fmt: skip


def stepwise(host, ids):
    cache, parts = DynamicCache(), []
    with torch.no_grad():
        for part in ids.split(1, dim=1):
            parts.append(host(part, past_key_values=cache).logits)
    return torch.cat(parts, dim=1)


def texts(pattern_of_chunk):
    """Rows of chunks, each one of a few patterns of four tokens."""
    patterns = torch.randint(3, VOCAB, (8, 4), generator=torch.Generator().manual_seed(0))
    return patterns[pattern_of_chunk].flatten(1)


def test_codes_that_come_again_are_always_foretold_and_random_ones_by_chance():
    host, n = make_host(layers=1), 40
    periodic = texts((torch.arange(n) % 3)[None])
    k, rows = 3, 5
    random = texts(torch.randint(k, (rows, n), generator=torch.Generator().manual_seed(1)))
    with randomise(attach_bem(host, CONFIG)) as bem:
        plain = stepwise(host, periodic)
        with speculating(bem) as speculation:
            assert torch.equal(stepwise(host, periodic), plain)
        told = speculation.stats()
        # Chunk 0 has a learned code, and chunk 1 a summary of its own; of 1 to 3 nothing like them was seen before.
        assert told["n_predicted"] == n - 1 and 0 < told["n_predicted"] - told["n_hits"] <= 5
        assert told["n_kept"] == 3 * n
        plain = stepwise(host, random)
        with speculating(bem) as speculation:
            assert (stepwise(host, random) - plain).abs().max() < 5e-6
        rate, n_predicted = speculation.stats()["hit_rate"], speculation.stats()["n_predicted"]
        assert n_predicted == rows * (n - 1)
        assert abs(rate - 1 / k) < 3 * math.sqrt((1 / k) * (1 - 1 / k) / n_predicted), rate


def test_generation_is_the_same_and_telemetry_has_the_hits():
    host, ids = make_host(), torch.randint(3, VOCAB, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    with randomise(attach_bem(host, CONFIG)) as bem:
        for mode in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
            rows = slice(1, 2) if "prompt_lookup_num_tokens" in mode else slice(None)
            inputs = {"input_ids": ids[rows], "attention_mask": mask[rows], **how, **mode}
            plain = host.generate(**inputs)
            with speculating(bem) as speculation:
                assert torch.equal(host.generate(**inputs), plain)
        with speculating(bem) as speculation, RoutingMonitor(host, bem=bem) as monitor:
            host.generate(ids, attention_mask=mask, **how)
            told = monitor.report()["speculation"]
        assert told == speculation.stats() and told["n_predicted"] > 4 and told["n_kept"] > 20
        assert "speculation" not in monitor.report()


def test_what_is_written_to_parameters_is_seen():
    host, ids = make_host(), texts((torch.arange(6) % 2)[None])
    with randomise(attach_bem(host, CONFIG)) as bem, torch.no_grad(), speculating(bem):
        cache = DynamicCache()
        for part in ids[:, :18].split(1, dim=1):
            host(part, past_key_values=cache)
        bem.updates["o_1"].U.mul_(3.0)
        found = host(ids[:, 18:19], past_key_values=cache).logits
        again = randomise(bem, seed=1, size=0.0)  # the same numbers, read anew
        assert again is bem
    with attach_bem(make_host(), CONFIG) as other, torch.no_grad():
        randomise(other)
        cache = DynamicCache()
        for part in ids[:, :18].split(1, dim=1):
            other.host(part, past_key_values=cache)
        other.updates["o_1"].U.mul_(3.0)
        assert (other.host(ids[:, 18:19], past_key_values=cache).logits - found).abs().max() < 5e-6


def test_what_cannot_be_foretold_is_refused():
    host = make_host()
    with (
        attach_bem(host, BemConfig()) as bem,
        pytest.raises(ConfigError, match="codes of chunk, token"),
        speculating(bem),
    ):
        pass
    with attach_bem(host, CONFIG) as bem, speculating(bem), pytest.raises(BemError, match="already"), speculating(bem):
        pass
    with pytest.raises(BemError, match="attach it first"), speculating(bem):
        pass
