"""Trained weights and baseline features equal those of scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.covariance import oas
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from probemon.lab.training.directions import discriminant, mean_difference, scaled
from probemon.lab.training.evaluation import judge
from probemon.lab.training.logistic import Dense, Sparse, Targets, fit_logistic, row_weights
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


def test_mean_difference_and_lda_directions_equal_their_definitions(problem):
    x, targets = problem
    known = targets.known[targets.part, 0]
    size = torch.bincount(targets.part, minlength=200)
    means = torch.zeros(200, 24).index_add_(0, targets.part, x) / size[:, None].clamp(min=1)
    sides = [means[(targets.known[:, 0] == side) & (size > 0)].mean(0) for side in (1, 0)]
    assert (mean_difference(x, targets)[0] - (sides[0] - sides[1])).abs().max() < 1e-5
    # sklearn's shrinkage leaves out terms of 1 / D.
    covariance = oas(x.double().numpy())[0]
    textbook = np.linalg.solve(covariance, (sides[0] - sides[1]).double().numpy())
    assert np.abs(discriminant(x, targets)[0].numpy() - textbook).max() < 5e-3 * np.abs(textbook).max()
    w, b = scaled(x, targets, discriminant(x, targets))
    scores = torch.sigmoid(x @ w[0] + b[0])
    assert 0.2 < scores[known == 0].mean() < 0.5 < scores[known == 1].mean() < 0.8


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


def test_intervals_resample_whole_groups():
    """Copies of a text add nothing to what is known: the interval stays as wide."""
    rng = np.random.default_rng(0)
    scores, known = rng.random(60), (np.arange(60) % 2).astype(np.int8)
    scores += 0.3 * known
    few = judge(scores[:, None], known[:, None], np.arange(60), seed=0)[0]
    many = judge(np.repeat(scores, 20)[:, None], np.repeat(known, 20)[:, None], np.repeat(np.arange(60), 20), seed=0)[0]
    alone = judge(np.repeat(scores, 20)[:, None], np.repeat(known, 20)[:, None], np.arange(1200), seed=0)[0]
    assert few.auroc == pytest.approx(many.auroc)
    assert many.high - many.low > 0.8 * (few.high - few.low) > 2 * (alone.high - alone.low)
    assert few.tpr == {0.01: None, 0.001: None}  # thirty negatives cannot tell one in a hundred
    assert alone.tpr[0.01] is not None
