"""Probe kinds: their losses equal their definitions, and the better kind is chosen."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_model
from corpora import make_tokenizer
from lab.training.test_train import rows, text
from probemon.core.aggregate import Attention, Each, Ema, Max, Mean, RollingMax, RollingMean, over
from probemon.errors import ConfigError
from probemon.lab.training import train
from probemon.lab.training.path_loss import ranking_losses, sibling_pairs
from probemon.lab.training.running_scores import highest_running
from probemon.lab.training.watched_loss import highest_of

AGGREGATORS = (Each(), Max(), Mean(), Ema(0.3), RollingMean(3), RollingMax(4), Attention(0.2))


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=str)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 99))
def test_loss_uses_the_highest_running_score_of_the_rule(aggregator, lengths, seed):
    rng = np.random.default_rng(seed)
    texts = [rng.random((n, 2)).astype(np.float32) for n in lengths]
    wanted = np.stack([over(aggregator, scores).max(axis=0) for scores in texts])
    padded = torch.zeros(len(texts), max(lengths), 2)
    for i, scores in enumerate(texts):
        padded[i, : len(scores)] = torch.from_numpy(scores)
    found = highest_of(aggregator, padded, torch.tensor(lengths))
    assert np.allclose(found.numpy(), wanted, atol=1e-5)
    # The same of rows of all texts in any order of texts, without gradients.
    part = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(lengths))
    highest = highest_running(aggregator, torch.from_numpy(np.concatenate(texts)), part, len(texts) + 1)
    assert np.allclose(highest[:-1], wanted, atol=1e-12 if not isinstance(aggregator, (Each, Max)) else 1e-7)
    assert np.isnan(highest[-1]).all()


def test_ranking_loss_compares_present_with_absent_siblings():
    parents = torch.tensor([-1, 0, 0, 0, -1])
    a, b = sibling_pairs(parents)
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    assert pairs == {(i, j) for i in (1, 2, 3) for j in (1, 2, 3) if i != j}
    logits = torch.tensor([[0.0, 2.0, -1.0, 0.5, 9.0]] * 2)
    labels = torch.tensor([[1, 1, 0, -1, 0], [1, 0, 0, 0, 0]], dtype=torch.int8)
    found = ranking_losses(logits, labels, (a, b))
    assert found.tolist() == pytest.approx([float(np.log1p(np.exp(-3.0))), 0.0])


@pytest.fixture(scope="module")
def model():
    return make_model(hidden=32)


def tree():
    rng = random.Random(0)
    children = [
        {"id": id, "parents": ["marked"], "examples": [text(rng, marks) for _ in range(30)]}
        for id, marks in (("zed", "z"), ("queue", "q"))
    ]
    plain = [{"text": text(rng), "not": ["marked"]} for _ in range(40)]
    return [{"id": "marked", "examples": [text(rng, "xk") for _ in range(12)]}, *children, *plain]


@pytest.mark.parametrize(("data", "method"), [(rows, "mlp"), (rows, "watched"), (tree, "joint"), (tree, "mlp")])
def test_every_method_makes_a_pack(model, tmp_path, data, method):
    found = train(
        model, data(), tmp_path / method, tokenizer=make_tokenizer(), background=False, states=tmp_path / "s",
        method=method, layers=1,
    )  # fmt: skip
    concepts = found.quality["concepts"]
    assert found.quality["method"] == method and set(concepts["zed"]["methods"]) >= {method, "logistic", "lda"}
    assert min(concepts[id]["auroc"] for id in ("zed", "queue")) > 0.85
    assert len(found.pack.architecture.hidden) == (2 if method == "mlp" else 0)


def test_chosen_method_is_reported_with_its_alternatives(model, tmp_path):
    found = train(model, rows(), tmp_path / "x", tokenizer=make_tokenizer(), background=False, states=tmp_path / "s")
    kinds, method = found.quality["kinds"], found.quality["method"]
    assert set(kinds) == {"logistic", "watched", "mlp"}
    assert method == "logistic" or kinds[method] > kinds["logistic"]
    assert f"Method `{method}`, chosen by AUROC on a fifth of the training groups" in found.pack.card_text()
    with pytest.raises(ConfigError, match="method 'joint' cannot be used here: logistic, watched, mlp"):
        train(
            model, rows(), tmp_path / "y", tokenizer=make_tokenizer(), background=False, states=tmp_path / "s",
            method="joint",
        )  # fmt: skip
