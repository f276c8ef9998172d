"""A tiny random model and random packs for it; the tests check where scores go, not what they mean."""

import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from probemon import ProbePack
from probemon.host.identity import manifest_host

pytest_plugins = ["serving_fixtures", "page_fixtures"]
HIDDEN, LAYERS, PAD, EOS = 16, 3, 0, 2
OLDEST = transformers.__version__.startswith("5.0.")


SLOW = Path(__file__).with_name("slow_tests.txt")
LONG = (
    "test_attach",
    "test_triton",
    "test_compatibility",
    "test_pages",
    "test_train",
    "test_abilities",
    "test_corpus",
    "test_bem_controller_triton",
    "test_bem_cache",
    "test_actions",
)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that slow_tests.txt lists")


def pytest_collection_modifyitems(config, items):
    """Leave out slow tests, unless they are asked for. Long files come first: a worker takes a whole file, and none
    should begin a long one when the other has nothing left.
    """
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    if config.option.slow or any("::" in argument for argument in config.args):
        return
    slow = set(SLOW.read_text(encoding="utf-8").splitlines())
    gone = slow - {item.nodeid for item in items}
    files = {item.nodeid.partition("::")[0] for item in items}
    if stale := sorted(one for one in gone if one.partition("::")[0] in files):
        raise pytest.UsageError(f"{SLOW.name} lists tests that do not exist: {', '.join(stale)}")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in slow])
    items[:] = [item for item in items if item.nodeid not in slow]


@pytest.fixture(autouse=True)
def seeded():
    """Random data is the same in whatever order tests run, and whichever ran before."""
    torch.manual_seed(0)


def not_in_oldest(*values, why):
    """A case that the oldest supported transformers fails at by itself, without us too."""
    return pytest.param(*values, marks=pytest.mark.skipif(OLDEST, reason=f"transformers 5.0: {why}"))


def make_model(seed=0, hidden=HIDDEN, layers=LAYERS, heads=1):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=heads,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def make_pack(
    path,
    model,
    *,
    sites=("resid_post.1",),
    rule="path",
    n=40,
    seed=0,
    dtype=torch.float32,
    mixed_levels=False,
    **changes,
):
    """A random DAG of random two-layer probes; alert thresholds in the middle of what they score on random states.
    `mixed_levels`: edges go down, along and up.
    """
    rng = np.random.default_rng(seed)
    concepts = []
    for i in range(n):
        parents = sorted({int(p) for p in rng.integers(0, i, size=rng.integers(1, 3))}) if i >= 4 else []
        concepts.append({"id": f"c{i}", "name": f"concept {i}", "parents": [f"c{p}" for p in parents]})
    if mixed_levels:
        concepts = [
            {**concept, "level": int(level)}
            for concept, level in zip(concepts, [0, *rng.integers(0, 4, size=n - 1)], strict=True)
        ]
    g = torch.Generator().manual_seed(seed)
    weights = {
        "w1": torch.randn(n, 5, HIDDEN, generator=g) / 4,
        "b1": torch.randn(n, 5, generator=g) / 2,
        "w3": torch.randn(n, 5, generator=g),
        "b3": torch.randn(n, generator=g) / 2 + 1.0,
    }
    weights = {name: w.to(dtype) if name.startswith("w") else w for name, w in weights.items()}
    host = manifest_host(model, "tiny random llama")
    arguments = {
        "name": "random",
        "concepts": concepts,
        "weights": weights,
        "score_rule": rule,
        "host": host,
        "licence": "CC0-1.0",
        "inputs": [{"site": site, "norm": "rmsnorm"} for site in sites],
        "card": "Random probes.\n",
        "input_index": torch.arange(n) % len(sites),
        "alert_threshold": torch.full((n,), 0.3),
        "golden_hidden": torch.randn(4, len(sites), HIDDEN, generator=g),
    }
    return ProbePack.write(path, **{**arguments, **changes})


@pytest.fixture(scope="session")
def model():
    return make_model()


@pytest.fixture(scope="session")
def pack(model, tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("packs") / "random", model)


@pytest.fixture(scope="session")
def two_sites(model, tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("packs") / "two", model, sites=("resid_post.2", "resid_post.0"), seed=1)


def n_hooks(model):
    return sum(
        len(m._forward_hooks)
        + len(m._forward_pre_hooks)
        + len(m._forward_hooks_with_kwargs)
        + len(m._forward_pre_hooks_with_kwargs)
        for m in model.modules()
    )
