"""Layers are chosen by AUROC on held-out groups, the earliest within one standard error."""

import random
import re

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from conftest import make_model
from corpora import make_tokenizer
from lab.training.test_logistic import sklearn_weights
from lab.training.test_train import COMMON, rows, scores_of
from probemon.lab.training import train, trainer
from probemon.lab.training.choice import LayerChoice
from probemon.lab.training.crossvalidation import PENALTIES, cross_validated, curve, deal, earliest_within_one_error
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.examples import read_examples
from probemon.lab.training.logistic import Dense, Targets
from probemon.lab.training.metrics import auroc_of
from probemon.lab.training.state_store import TextReader


@pytest.mark.parametrize(
    ("points", "chosen"),
    [
        ([(0.90, 0.02), (0.91, 0.02), (0.92, 0.02)], 0),
        ([(0.899, 0.09), (0.91, 0.09), (0.92, 0.02)], 1),  # the error of the best one counts
        ([(0.90, 0.0), (0.92, 0.0), (0.91, 0.0)], 1),
        ([(0.80, 0.0), (0.92, 0.0), (0.92, 0.0)], 1),  # of equal ones the earlier
    ],
)
def test_earliest_layer_within_one_standard_error_of_the_best_is_chosen(points, chosen):
    assert earliest_within_one_error(points) == chosen


def test_curve_averages_concepts_and_takes_errors_over_folds():
    table = np.full((3, 2, 2), 0.5)  # folds, penalties, concepts: the second penalty is the better one of both
    table[:, 1] = [[0.7, 0.9], [0.8, np.nan], [0.9, 0.9]]  # a fold lacks a side of one
    ((mean, error),) = curve([table])
    of_folds = np.asarray([0.8, 0.8, 0.9])
    assert mean == pytest.approx(of_folds.mean()) and error == pytest.approx(of_folds.std(ddof=1) / np.sqrt(3))


def test_concept_gets_a_separate_site_if_it_is_clearly_better():
    def table(*areas):  # of concepts, in five folds that differ a little
        wave = np.asarray([-0.002, -0.001, 0.0, 0.001, 0.002])[:, None, None]
        return np.asarray(areas)[None, None] + wave * np.asarray([1.0, -1.0])

    tables = [table(0.90, 0.70), table(0.90, 0.90)]
    given = {"sites": ["resid_post.3", "resid_post.9"], "seen": (5, 9)}
    assert LayerChoice.of(tables=tables, alone=True, **given).site_of == ("resid_post.9", "resid_post.9")
    tables = [table(0.95, 0.70), table(0.90, 0.90)]
    found = LayerChoice.of(tables=tables, alone=True, **given)
    assert found.site_of == ("resid_post.3", "resid_post.9") and found.seen == (5, 9)
    assert LayerChoice.of(tables=tables, alone=False, **given).site_of == (
        "resid_post.9",
        "resid_post.9",
    )  # of a hierarchy
    tables = [table(0.909, 0.70), table(0.90, 0.90)]  # better by less than a hundredth
    assert LayerChoice.of(tables=tables, alone=True, **given).site_of == ("resid_post.9", "resid_post.9")


def test_held_out_aurocs_equal_scikit_learn():
    """Every fold, penalty and concept, fitted one by one; no group is in two folds."""
    g = torch.Generator().manual_seed(3)
    part = torch.arange(900) // 10
    centre = torch.randn(90, 6, generator=g)
    x = centre[part] + torch.randn(900, 6, generator=g)
    known = (centre @ torch.randn(6, 2, generator=g) + torch.randn(90, 2, generator=g) > 0).to(torch.int8)
    known[:4, 1] = -1
    group = np.arange(90) // 3
    folds = deal(group, known.numpy(), seed=0)
    assert all(len(set(folds[group == i])) == 1 for i in range(30)) and set(folds) == {0, 1, 2, 3, 4}
    table = cross_validated(Dense(x), Targets(part, known), folds)
    for fold in range(5):
        held = torch.from_numpy(folds == fold)
        train_rows = ~held[part]
        own = Targets(part[train_rows], known.where(~held[:, None], -1))
        for i, l2 in enumerate(PENALTIES):
            for p in range(2):
                w, b = sklearn_weights(x[train_rows], own, p, l2)
                scores = np.asarray([(x[part == j].double().numpy() @ w + b).mean() for j in range(90)])
                use = (folds == fold) & (known[:, p].numpy() >= 0)
                wanted = roc_auc_score(known[use, p].numpy() == 1, scores[use])
                assert table[fold, i, p] == pytest.approx(wanted, abs=0.02), (fold, l2, p)


def spans(concept, n=80):
    """Letters with three z and one q: tokens that are z, or those after the q, which a letter itself does not tell."""
    rng = random.Random(0)
    for _ in range(n):
        letters = [rng.choice(COMMON) for _ in range(24)]
        for i in rng.sample(range(24), 3):
            letters[i] = "z"
        q = rng.randrange(8, 16)
        letters[q] = "q"
        given = [{"start": i, "end": i + 1, "concept": "zed", "is": letters[i] == "z"} for i in range(24)]
        if concept == "after":
            given = [
                {"start": 0, "end": q, "concept": concept, "is": False},
                {"start": q + 1, "end": 24, "concept": concept},
            ]
        yield {"text": "".join(letters), "spans": given, "rest": "unknown"}


@pytest.mark.parametrize("concept", ["zed", "after"])
def test_sweep_finds_the_first_informative_layer(tmp_path, concept):
    """In a host whose first layer sees no other token, and so knows its own letter alone."""
    host = make_model(hidden=32)
    with torch.no_grad():
        host.model.layers[0].self_attn.o_proj.weight.zero_()
        host.model.layers[1].self_attn.o_proj.weight.mul_(20)
    given = {"tokenizer": make_tokenizer(), "states": tmp_path / "s", "background": False, "layers": (0, 1, 2)}
    found = train(host, list(spans(concept)), tmp_path / "p", **given, report=tmp_path / "page.html")
    areas = [row["auroc"] for row in found.quality["sites"]]
    assert (areas[0] > 0.95) if concept == "zed" else (areas[0] < 0.6 and max(areas[1:]) > 0.7)
    (site,) = found.pack.sites
    assert site == found.quality["concepts"][concept]["site"] and (site == "resid_post.0") == (concept == "zed")
    page, card = (tmp_path / "page.html").read_text(), found.pack.card_text()
    lower, upper = sorted(float(tick) for tick in re.findall(r">(\d\.\d{3})</text>", page))
    assert upper - lower > 0.005 and upper <= 1  # no curve goes over 1, nor looks steep that is flat
    for row in found.quality["sites"]:
        assert row["site"] in page and f"| {row['site']} | {row['auroc']:.4f} | {row['standard_error']:.4f} |" in card


def test_a_pack_of_two_sites_scores_each_concept_at_its_own(tmp_path, monkeypatch):
    """What is claimed is what the written pack does, from a plain forward."""
    real = LayerChoice.of

    def two(*arguments, **how):
        found = real(*arguments, **how)
        return LayerChoice(
            found.sites, ("resid_post.2", "resid_post.0"), found.l2, found.curve, found.areas, found.seen
        )

    monkeypatch.setattr(trainer.LayerChoice, "of", two)
    host = make_model(hidden=32)
    found = train(
        host, rows(), tmp_path / "p", tokenizer=make_tokenizer(), states=tmp_path / "s", background=False,
        layers=(0, 1, 2), watch="each",
    )  # fmt: skip
    assert set(found.pack.sites) == {"resid_post.0", "resid_post.2"}
    data = Dataset.of_examples(read_examples(rows()), TextReader(host, make_tokenizer(), ["resid_post.0"]))
    for q, concept in enumerate(data.concepts):
        test = np.flatnonzero(data.of("test") & (data.known[:, q] >= 0))
        p = found.pack.find(concept.id)
        highest = np.asarray([scores_of(found, host, data.texts[data.document[i]].text)[:, p].max() for i in test])
        claimed = found.quality["concepts"][concept.id]
        assert claimed["site"] == ("resid_post.2", "resid_post.0")[q]
        assert claimed["auroc"] == pytest.approx(auroc_of(highest, data.known[test, q] == 1), abs=1e-3)
