"""Adapters on models quantised by torchao, and on a model pruned two of four.

Runs in a separate process: if torchao is installed, every import of transformers imports it and prints messages. Tests
that need a GPU (packed int4, sparse kernels, float8 products) are in scripts/benchmarks/gpu_check.sh, unproven.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.training import TrainSettings, train

WAYS = ("float8 weights", "int4 weights", "int8 weights", "float8 training", "two of four")
CONFIG = BemConfig(rank=4, width=8, chunk_tokens=3, prefix_tokens=6, token_limit=6)
IDS = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(2))


def make_host(dtype=torch.bfloat16):
    """Wide enough for groups of 32 weights and blocks of 16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3, "pad_token_id": 0}
    config = AutoConfig.for_model("llama", **sizes, bos_token_id=1, eos_token_id=60, max_position_embeddings=64)
    return AutoModelForCausalLM.from_config(config).eval().to(dtype)


def linear(module, name):
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name


def make_small(host, way):
    from torchao import quantization as ao

    if way == "two of four":
        for name, module in host.named_modules():
            if linear(module, name):
                groups = module.weight.data.view(-1, 4)
                kept = groups.abs().topk(2, dim=1).indices
                groups.copy_(groups * torch.zeros_like(groups).scatter(1, kept, 1.0))
    elif way == "float8 training":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(host, module_filter_fn=linear)
    else:
        config = {
            "float8 weights": ao.Float8WeightOnlyConfig,
            "int8 weights": ao.Int8WeightOnlyConfig,
            "int4 weights": lambda: ao.IntxWeightOnlyConfig(torch.int4, granularity=ao.PerGroup(32)),
        }[way]()
        ao.quantize_(host, config, filter_fn=linear)
    return host


@torch.no_grad()
def full(host):
    return host(IDS, use_cache=False).logits.float()


@torch.no_grad()
def cached(host):
    out = host(IDS[:, :5], use_cache=True)
    parts = [out.logits]
    for i in range(5, IDS.shape[1]):
        out = host(IDS[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, dim=1).float()


def apart(a, b):
    return float((a - b).abs().max())


def try_way(way):
    host = make_small(make_host(), way)
    bare = full(host)
    found = {"kind": type(host.model.layers[0].mlp.down_proj.weight.data).__name__}
    found["layer"] = type(host.model.layers[0].mlp.down_proj).__name__
    found["host cached"] = apart(cached(host), bare)
    with attach_bem(host, CONFIG) as bem:
        found["fresh"] = apart(full(host), bare)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in bem.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        steered = full(host)
        found["effect"], found["cached"] = apart(steered, bare), apart(cached(host), steered)
        settings = TrainSettings(n_steps=3, n_warmup=0, lr=1e-2)
        found["losses"] = train(bem, [{"input_ids": IDS, "labels": IDS}], settings).losses
    found["afterwards"] = apart(full(host), bare)
    weight = host.model.layers[0].mlp.down_proj.weight
    if way == "two of four":
        found["zeros"] = int((weight.view(-1, 4) == 0).sum(dim=1).min())
    return found


def try_all(path):
    path.write_text(json.dumps({way: try_way(way) for way in WAYS}))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("quantised") / "found.json"
    tests = Path(__file__).parents[2]
    folders = [tests / "adapters/bem", tests / "support", tests, tests.parent, Path(sys.prefix) / "torchao"]
    code = "import sys, pathlib, test_bem_quantised_hosts as t; t.try_all(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("way", WAYS)
def test_fresh_adapter_keeps_a_quantised_model_and_caching_agrees(found, way):
    """Within twice what the host's own cached logits are from its full ones: in bf16, and where float8 scales follow
    the inputs, that is much.
    """
    said = found[way]
    assert said["fresh"] == 0.0 and said["afterwards"] == 0.0  # bit for bit the quantised host
    assert said["effect"] > 1.0  # it steers
    assert said["cached"] <= 2 * said["host cached"]


@pytest.mark.parametrize("way", WAYS)
def test_training_step_on_a_quantised_model_lowers_its_loss(found, way):
    losses = found[way]["losses"]
    assert losses[-1] < losses[0] - 0.1


def test_quantised_test_models_have_their_stated_types(found):
    kinds = [found[way]["kind"] for way in WAYS]
    assert kinds == ["Float8Tensor", "IntxUnpackedToInt8Tensor", "Int8Tensor", "Tensor", "Tensor"]
    assert found["float8 training"]["layer"] == "Float8Linear"


def test_model_pruned_two_of_four_is_steered_and_keeps_its_zeros(found):
    assert found["two of four"]["zeros"] == 2
