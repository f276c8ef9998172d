"""Trained weights and baseline features equal those of scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from probemon.lab.training.logistic import Dense, RowTargets, Sparse, Targets, fit_logistic
from probemon.lab.training.words import Vocabulary, places_of


@pytest.fixture(scope="module")
def problem():
    """Random tokens of random parts, the mean of a part telling its labels; a fifth of them is unknown."""
    g = torch.Generator().manual_seed(0)
    part = torch.randint(0, 200, (6000,), generator=g).sort().values
    centre = torch.randn(200, 24, generator=g) / 2
    x = centre[part] + torch.randn(6000, 24, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    known = (centre @ torch.randn(24, 3, generator=g) > 0.3).to(torch.int8)
    known[torch.rand(200, 3, generator=g) < 0.2] = -1
    return x, Targets(part, known)


def row_weights(targets, p):
    """Each row's weight `[N]` in a concept's loss."""
    present, absent = targets.weights
    known = targets.known[:, p]
    by_part = torch.where(known == 1, present[:, p], torch.where(known == 0, absent[:, p], 0.0))
    return by_part[targets.part].numpy()


def sklearn_weights(x, targets, p, l2):
    weight = row_weights(targets, p)
    use = weight > 0
    y = (targets.known[targets.part, p] == 1).numpy()[use]
    fitted = LogisticRegression(C=1 / l2, tol=1e-10, max_iter=5000)
    fitted.fit(np.asarray(x, dtype=np.float64)[use], y, sample_weight=weight[use].astype(np.float64))
    return fitted.coef_[0], fitted.intercept_[0]


def test_weights_equal_scikit_learn(problem):
    x, targets = problem
    l2 = torch.tensor([0.1, 0.01, 0.001])
    w, b = fit_logistic(Dense(x), targets, l2)
    for p in range(3):
        coef, intercept = sklearn_weights(x, targets, p, float(l2[p]))
        assert np.abs(w[p].numpy() - coef).max() < 1e-4
        assert abs(float(b[p]) - intercept) < 1e-4


def test_ill_conditioned_features_converge_in_few_steps():
    """States do: steps that begin at the identity took a thousand passes here."""
    g = torch.Generator().manual_seed(0)
    part = torch.arange(3000) // 10
    along = torch.randn(64, 64, generator=g) * torch.arange(1, 65).pow(-0.9)[:, None]
    x = (torch.randn(300, 64, generator=g)[part] + torch.randn(3000, 64, generator=g)) @ along
    x = (x - x.mean(0)) / x.std(0)
    means = torch.zeros(300, 64).index_add_(0, part, x) / 10
    z = means @ torch.randn(64, 1, generator=g)
    targets = Targets(part, (z + 0.7 * z.std() * torch.randn(300, 1, generator=g) > 0).to(torch.int8))
    passes = []

    class Counted(Dense):
        def times(self, start, stop, w):
            passes.extend([1] * (start == 0))
            return super().times(start, stop, w)

    w, _ = fit_logistic(Counted(x), targets, torch.full((1,), 1e-3))
    assert np.abs(w[0].numpy() - sklearn_weights(x, targets, 0, 1e-3)[0]).max() < 1e-3
    assert len(passes) < 30


def test_weights_of_rows_equal_scikit_learn_and_a_warm_start_ends_there_too(problem):
    x, targets = problem
    weight = torch.rand(len(x), 3, generator=torch.Generator().manual_seed(2))
    side = targets.known[targets.part]
    rows = RowTargets(weight * (side == 1), weight * (side == 0))
    l2 = torch.full((3,), 30.0)
    w, b = fit_logistic(Dense(x), rows, l2)
    for p in range(3):
        use = (side[:, p] >= 0).numpy()
        fitted = LogisticRegression(C=1 / 30.0, tol=1e-10, max_iter=5000)
        fitted.fit(x.double().numpy()[use], side[use, p].numpy() == 1, sample_weight=weight[use, p].double().numpy())
        assert np.abs(w[p].numpy() - fitted.coef_[0]).max() < 1e-3
        assert abs(float(b[p]) - fitted.intercept_[0]) < 1e-3
    start = (w + 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(3)), b)
    again = fit_logistic(Dense(x), rows, l2, start=start)
    assert (again[0] - w).abs().max() < 1e-3 and (again[1] - b).abs().max() < 1e-3


def test_classes_and_texts_are_weighted_equally(problem):
    _, targets = problem
    for p in range(3):
        weight = torch.from_numpy(row_weights(targets, p)).double()
        by_part = torch.zeros(200, dtype=torch.float64).index_add_(0, targets.part, weight)
        for side in (0, 1):
            of_side = by_part[targets.known[:, p] == side]
            assert of_side.sum() == pytest.approx(0.5, abs=1e-6)
            assert of_side.std() < 1e-8


def test_concept_does_not_depend_on_the_others(problem):
    x, targets = problem
    l2 = torch.tensor([0.01, 0.01, 0.01])
    together = fit_logistic(Dense(x), targets, l2)[0]
    for p in range(3):
        alone = fit_logistic(Dense(x), Targets(targets.part, targets.known[:, p : p + 1]), l2[:1])[0]
        assert (together[p] - alone[0]).abs().max() < 1e-4


def test_concept_with_one_class_has_zero_weights(problem):
    x, targets = problem
    known = targets.known.clone()
    known[:, 1] = torch.where(known[:, 1] == 0, -1, known[:, 1])
    w, b = fit_logistic(Dense(x), Targets(targets.part, known), torch.full((3,), 0.01))
    assert (w[1] == 0).all() and b[1] == 0 and (w[0] != 0).any()


def test_sparse_features_give_the_weights_of_dense_ones(problem):
    x, targets = problem
    x = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.8, 0.0, x)
    row, column = x.nonzero(as_tuple=True)
    sparse = Sparse(row, column, x[row, column], (x.shape[0], x.shape[1]))
    l2 = torch.full((3,), 0.01)
    use = torch.arange(len(x)) % 3 > 0
    own = Targets(targets.part[use], targets.known)
    for a, b in ((sparse, Dense(x)), (sparse.rows(use), Dense(x[use]))):
        some = targets if a is sparse else own
        for first, second in zip(fit_logistic(a, some, l2), fit_logistic(b, some, l2), strict=True):
            assert (first - second).abs().max() < 1e-4


def test_tfidf_features_equal_scikit_learn():
    texts = ["A whale sings, a whale dives!", "the ship sails", "a ship, a whale", "the whale"]
    vocabulary = Vocabulary.of(texts)
    features = vocabulary.features([*texts, "nothing known here"])
    dense = torch.zeros(features.shape).index_put_((features.row, features.column), features.value)
    oracle = TfidfVectorizer(
        token_pattern=r"\w+|[$€£!?]", sublinear_tf=True, smooth_idf=False, vocabulary=list(vocabulary.place)
    ).fit(texts)
    assert np.allclose(dense.numpy(), oracle.transform([*texts, "nothing known here"]).toarray(), atol=1e-6)
    assert set(vocabulary.place) == {"a", "whale", "ship", "the"}  # of two texts at least
    known = np.asarray([[1], [0], [1], [1]], dtype=np.int8)
    assert vocabulary.giveaways(texts, known, n=1) == [["whale"]]
    assert places_of(["whale"], texts[0]) == [(2, 7), (17, 22)]
