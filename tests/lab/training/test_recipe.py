"""The recipe beside a plain computation of what it states: scikit-learn's regression on rows made by hand."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from probemon.core.aggregate import RollingLogit, over
from probemon.lab.training.crossfit import Variant, cross_fitted, highest_mean
from probemon.lab.training.dataset import ELSEWHERE, NEVER, ORDINARY, OUTSIDE, OWN, Dataset
from probemon.lab.training.examples import Concept
from probemon.lab.training.recipe import PENALTIES, Scale, Shares, fit
from probemon.lab.training.states import Block
from probemon.lab.training.windows import WindowRows, starts

WIDTH, SIZE = 16, 12


class FakeStates:
    """States of a small random data set, in memory."""

    def __init__(self, x, document, position, n_texts):
        self.x, self.document, self.position = x, document, position
        self.kept = np.ones(n_texts, dtype=bool)

    def blocks(self, site, documents, *, raw=False):
        rows = np.flatnonzero(documents[self.document])
        for half in np.array_split(np.unique(self.document[rows]), 2):
            part = rows[np.isin(self.document[rows], half)]
            yield Block(self.x[part], self.document[part], self.position[part])


def drawn(seed=0, n_own=30, n_plain=20, *, marked=False):
    """Own texts with and without a concept, whose states lean along one direction; and ordinary ones of four kinds.

    `marked`: the concept stands in all but the last token; of that nothing is known.
    """
    generator = np.random.default_rng(seed)
    n_texts = n_own + n_plain
    lengths = generator.integers(5, 70, n_texts)
    origin = np.r_[np.full(n_own, OWN), np.full(n_plain, ORDINARY)]
    fold = np.r_[np.arange(n_own) // 2 % 5, np.arange(n_plain) % 4]
    label = np.r_[np.arange(n_own) % 2, np.zeros(n_plain, dtype=int)]
    states = []
    for i, n in enumerate(lengths):
        hidden = generator.normal(size=(n, SIZE)) + (label[i] * 0.8) * np.eye(SIZE)[0]
        states.append(hidden + (i >= n_own) * 0.7 * np.eye(SIZE)[1])
    parts, documents, known = [], [], []
    for i, n in enumerate(lengths):
        for part, labelled in ([(0, n - 1), 1], [(n - 1, n), -1]) if marked and label[i] else ([(0, n), label[i]],):
            parts.append(np.arange(*part))
            documents.append(i)
            known.append(labelled)
    data = Dataset(
        (Concept("it", "it"),),
        ((),),
        tuple(f"kind {k}" for k in range(4)),
        [None] * n_texts,
        [range(n) for n in lengths],
        origin,
        np.r_[np.full(n_own, -1), np.arange(n_plain) % 4],
        np.arange(n_texts) // 2,
        fold,
        np.zeros(n_texts, dtype=bool),
        np.asarray(documents),
        parts,
        np.asarray(known, dtype=np.int8)[:, None],
    )
    document = np.repeat(np.arange(n_texts), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    x = torch.from_numpy(np.concatenate(states)).float()
    return data, FakeStates(x, document, position, n_texts)


def by_hand(data, states, fold, rounds, scale, penalty):
    """Features, labels and weights as the docstrings state them, and scikit-learn's optimum."""
    rows, label, weight, text, window, plain_rows = [], [], [], [], [], []
    for i in range(len(data.texts)):
        if data.fold[i] == fold:
            continue
        hidden = states.x[states.document == i].double()
        hidden = hidden[:-1] if data.marked[i, 0] else hidden
        is_plain = data.origin[i] == ORDINARY
        spans = [] if is_plain else [(0, len(hidden), False)]
        spans += [
            (begin, min(begin + WIDTH, len(hidden)), True)
            for begin in starts(len(hidden), WIDTH, 40 if is_plain else WIDTH // 2)
        ]
        n_windows = sum(is_window for _, _, is_window in spans)
        for begin, end, is_window in spans:
            rows.append(hidden[begin:end].mean(0))
            label.append(int(data.text_known[i, 0]))
            weight.append(1 / n_windows if is_window else 1.0)
            text.append(i)
            window.append(is_window)
            plain_rows.append(is_plain)
    x, label, weight, text = torch.stack(rows), np.asarray(label), np.asarray(weight), np.asarray(text)
    window, plain = np.asarray(window), np.asarray(plain_rows)
    z = ((x - scale.mean.double()) * scale.turn.double()).numpy()
    for side, total in ((label == 1, 1.0), ((label == 0) & ~plain, 1.0), (plain, 4.0)):
        weight[side] *= total / weight[side].sum()
    for round_ in range(rounds + 1):
        if round_:
            for i in np.unique(text[label == 1]):
                own = (text == i) & window
                logit = z[own] @ model.coef_[0] + model.intercept_[0]  # noqa: F821 - of the round before
                share = np.exp(2 * (logit - logit.max()))
                weight[own] = weight[own].sum() * share / share.sum()
        model = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=5000).fit(z, label, sample_weight=weight)
    logit = z[plain] @ model.coef_[0] + model.intercept_[0]
    w = model.coef_[0] / logit.std()
    b = (model.intercept_[0] - logit.mean()) / logit.std()
    turn = scale.turn.double().numpy()
    return w * turn, b - (w * turn) @ scale.mean.double().numpy()


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("fold", [1, NEVER])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_probe_is_the_optimum_of_the_stated_loss(penalty, fold, marked):
    """Weight moves twice, but not where marks say which windows have the concept."""
    data, states = drawn(marked=marked)
    assert data.marked.any() == marked
    rows = WindowRows.of(states, data, "resid_post.0", WIDTH)
    scale = Scale.of(rows, data, "std")
    w, b = fit(rows, scale, Shares.of(rows, data), data, [0], [0, fold], penalty=penalty)
    expected_w, expected_b = by_hand(data, states, fold, 0 if marked else 2, scale, penalty)
    probe = states.x[:200].double().numpy()
    assert np.allclose(probe @ w[1, 0].double().numpy() + float(b[1, 0]), probe @ expected_w + expected_b, atol=0.03)


def test_whitened_probe_equals_one_on_rotated_states():
    """Whitening turns and scales; a probe of it, unfolded, gives the same logits on plain states."""
    data, states = drawn(1)
    rows = WindowRows.of(states, data, "resid_post.0", WIDTH)
    scale = Scale.of(rows, data, "white")
    generator = torch.Generator().manual_seed(0)
    w, b = torch.randn(3, SIZE, generator=generator), torch.randn(3, generator=generator)
    plain_w, plain_b = scale.unscaled(w, b)
    assert torch.allclose(scale(rows.x) @ w.T + b, rows.x @ plain_w.T + plain_b, atol=1e-4)
    ordinary = rows.x[torch.from_numpy(data.is_of(ORDINARY)[data.document])[rows.part]]
    covariance = torch.cov(ordinary.T)
    values = torch.linalg.eigvalsh(covariance.double())
    expected = values / ((values + values.mean()) * SIZE)
    found = torch.linalg.eigvalsh(torch.cov(scale(ordinary).T).double())
    assert torch.allclose(found, expected.sort().values, atol=1e-5)


def test_fold_learns_nothing_from_its_texts_and_kinds():
    """Garbage in the texts of a fold moves no probe that judges them, and all others."""
    data, states = drawn(2)
    rows = WindowRows.of(states, data, "resid_post.0", WIDTH)
    spoilt = rows.x.clone()
    of_fold = torch.from_numpy(data.fold[data.document] == 3)[rows.part]
    spoilt[of_fold] = 5 * torch.randn(int(of_fold.sum()), SIZE, generator=torch.Generator().manual_seed(1))
    scale, shares = Scale.of(rows, data, "std"), Shares.of(rows, data)
    clean = fit(rows, scale, shares, data, [0], range(5), penalty=0.003)
    other = fit(WindowRows(spoilt, rows.part, rows.is_window), scale, shares, data, [0], range(5), penalty=0.003)
    assert torch.allclose(clean[0][3], other[0][3], atol=5e-3) and torch.allclose(clean[1][3], other[1][3], atol=5e-3)
    assert all((clean[0][k] - other[0][k]).abs().max() > 0.05 for k in (0, 1, 2, 4))


def test_texts_elsewhere_never_train():
    data, states = drawn(3)
    outside = data.fold == 2
    data.origin[outside & (data.origin == OWN)] = ELSEWHERE
    data.fold[outside] = OUTSIDE
    rows = WindowRows.of(states, data, "resid_post.0", WIDTH)
    assert not np.isin(data.document[rows.part.numpy()], np.flatnonzero(outside)).any()


@pytest.mark.parametrize("length", [3, 7, 8, 20, 50])
def test_score_of_a_text_is_the_highest_rolling_logit(length):
    """In training from logits, at run time from scores."""
    z = np.random.default_rng(length).normal(size=(length, 2)).astype(np.float32) * 3
    running = over(RollingLogit(WIDTH), 1 / (1 + np.exp(-z.astype(np.float64))))
    found = highest_mean(z, WIDTH)
    assert np.allclose(1 / (1 + np.exp(-found)), running.max(axis=0), atol=1e-6)
    assert (running[: WIDTH // 2 - 1] == 0).all()


def test_probe_of_a_mean_state_is_the_mean_of_its_logits():
    data, states = drawn(4)
    rows = WindowRows.of(states, data, "resid_post.0", WIDTH)
    probes = cross_fitted(rows, data, Variant("resid_post.0"))
    first = states.x[states.document == 0][:WIDTH]
    w, b = probes.w[0, 0], probes.b[0, 0]
    assert float(first.mean(0) @ w + b) == pytest.approx(float((first @ w + b).mean()), abs=1e-4)
