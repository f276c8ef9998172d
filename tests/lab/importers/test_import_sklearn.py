"""Imported scikit-learn estimators score as predict_proba; unsupported ones are refused by name."""

import inspect
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, RidgeClassifier, SGDClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, PolynomialFeatures, RobustScaler, StandardScaler
from sklearn.svm import SVC, LinearSVC

from probemon import DynamicProbeManager
from probemon.core.reference import exhaustive_reference
from probemon.errors import ImportRefused, PackError
from probemon.lab.importers.generic import import_weights
from probemon.lab.importers.sklearn import import_estimators

RNG = np.random.default_rng(0)
D, SITE = 11, "resid_post.1"
X = (RNG.normal(size=(240, D)) * np.linspace(0.3, 4, D) + np.linspace(-3, 3, D)).astype(np.float32)
LOGITS = (X - X.mean(0)) @ RNG.normal(size=(D, 4)) / 2 + RNG.normal(size=(240, 4))
TWO, THREE, LABELS = (
    LOGITS[:, 0] > 0,
    np.array(["cat", "dog", "owl"])[LOGITS[:, :3].argmax(1)],
    (LOGITS[:, :3] > 0).astype(int),
)
NEW = (RNG.normal(size=(50, D)) * np.linspace(0.3, 4, D) + np.linspace(-3, 3, D)).astype(np.float32)


def fit(estimator, y=TWO):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(X, y)


def scores(pack, x=NEW):
    return exhaustive_reference({SITE: torch.from_numpy(x)}, pack).numpy()


def imported(tmp_path, estimator, **about):
    return import_estimators({"it": estimator}, tmp_path / "pack", site=SITE, **{"normalize": "none", **about})


def mlp(**settings):
    return MLPClassifier(**{"hidden_layer_sizes": (6,), "max_iter": 60, "random_state": 0, **settings})


SINGLE = {
    "logistic": LogisticRegression(),
    "logistic, C by cross-validation": LogisticRegressionCV(
        cv=3, l1_ratios=(0,), scoring="accuracy", use_legacy_attributes=False
    ),
    "no intercept": LogisticRegression(fit_intercept=False),
    "log loss": SGDClassifier(loss="log_loss", random_state=0),
    "discriminant": LinearDiscriminantAnalysis(),
    "standardised": make_pipeline(StandardScaler(), LogisticRegression()),
    "centred only": make_pipeline(StandardScaler(with_std=False), LogisticRegression()),
    "scaled only": make_pipeline(StandardScaler(with_mean=False), "passthrough", LogisticRegression()),
    "three scalers": make_pipeline(RobustScaler(), MinMaxScaler((-1, 2)), MaxAbsScaler(), LogisticRegression()),
    "PCA, whitened": make_pipeline(StandardScaler(), PCA(5, whiten=True), StandardScaler(), LogisticRegression()),
    "linear SVM, Platt": CalibratedClassifierCV(make_pipeline(StandardScaler(), LinearSVC()), ensemble=False),
    "SVM with a linear kernel, Platt": CalibratedClassifierCV(SVC(kernel="linear"), ensemble=False),
    "ridge, Platt": CalibratedClassifierCV(RidgeClassifier(), ensemble=False),
    "scaler, then Platt": make_pipeline(StandardScaler(), CalibratedClassifierCV(LinearSVC(), ensemble=False)),
    "frozen, Platt": CalibratedClassifierCV(FrozenEstimator(fit(LinearSVC()))),
    "searched": GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression()), {"logisticregression__C": [0.1, 1.0]}, cv=3
    ),
    "network": make_pipeline(StandardScaler(), mlp()),
    "network of two layers": make_pipeline(StandardScaler(), mlp(hidden_layer_sizes=(6, 3))),
    "network of no layer": make_pipeline(StandardScaler(), mlp(hidden_layer_sizes=())),
    "network, one unit": make_pipeline(StandardScaler(), mlp(hidden_layer_sizes=(1,), max_iter=900, random_state=1)),
}


@pytest.mark.parametrize("kind", SINGLE)
def test_scores_equal_the_probability_of_the_positive_class(tmp_path, kind):
    estimator = fit(SINGLE[kind])
    pack = imported(tmp_path, estimator)
    assert [concept["id"] for concept in pack.concepts] == ["it"] and pack.dtype == torch.float32
    expected = estimator.predict_proba(NEW.astype(np.float64))[:, 1]
    assert expected.std() > 0.05  # else anything would pass
    assert np.abs(scores(pack)[:, 0] - expected).max() < 1e-6


def test_multilabel_scores_equal_predict_proba(tmp_path):
    several = {
        "ovr": OneVsRestClassifier(make_pipeline(StandardScaler(), LogisticRegression())),
        "network": make_pipeline(StandardScaler(), mlp()),
    }
    for name, estimator in several.items():
        fit(estimator, LABELS)
        pack = import_estimators({name: estimator}, tmp_path / name, site=SITE, normalize="none")
        assert [concept["id"] for concept in pack.concepts] == [f"{name}/{i}" for i in range(3)]
        assert np.abs(scores(pack) - estimator.predict_proba(NEW.astype(np.float64))).max() < 1e-6
    each = fit(MultiOutputClassifier(LogisticRegression()), LABELS)
    expected = np.stack([part[:, 1] for part in each.predict_proba(NEW.astype(np.float64))], axis=1)
    assert (
        np.abs(
            scores(import_estimators({"each": each}, tmp_path / "each", site=SITE, normalize="none")) - expected
        ).max()
        < 1e-6
    )


@pytest.mark.parametrize(
    "estimator",
    [
        OneVsRestClassifier(LogisticRegression()),
        CalibratedClassifierCV(LinearSVC(), ensemble=False),
        SGDClassifier(loss="log_loss", random_state=0),
    ],
    ids=["one-vs-rest", "Platt", "log loss"],
)
def test_one_vs_rest_classes_are_scored_before_normalisation(tmp_path, estimator):
    fit(estimator, THREE)
    pack = imported(tmp_path, estimator)
    assert [concept["id"] for concept in pack.concepts] == ["it/cat", "it/dog", "it/owl"]
    found, expected = scores(pack).astype(np.float64), estimator.predict_proba(NEW.astype(np.float64))
    assert np.abs(found / found.sum(1, keepdims=True) - expected).max() < 2e-6 and np.abs(found.sum(1) - 1).max() > 0.01
    if hasattr(estimator, "estimators_"):
        own = np.stack([part.predict_proba(NEW.astype(np.float64))[:, 1] for part in estimator.estimators_], axis=1)
        assert np.abs(found - own).max() < 1e-6


SOFTMAX = {
    "logistic": make_pipeline(StandardScaler(), LogisticRegression()),
    "discriminant": LinearDiscriminantAnalysis(),
    "network": make_pipeline(StandardScaler(), mlp()),
    "network of two layers": make_pipeline(RobustScaler(), mlp(hidden_layer_sizes=(6, 3), max_iter=400)),
    "searched": GridSearchCV(make_pipeline(PCA(6), LogisticRegression()), {"logisticregression__C": [0.1, 1.0]}, cv=3),
}


@pytest.mark.parametrize("kind", SOFTMAX)
def test_a_softmax_over_classes_is_a_group_with_the_scores_of_predict_proba(tmp_path, kind):
    estimator, alone = fit(SOFTMAX[kind], THREE), fit(LogisticRegression())
    pack = import_estimators({"it": estimator, "other": alone}, tmp_path / "pack", site=SITE, normalize="none")
    assert [concept["id"] for concept in pack.concepts] == ["it/cat", "it/dog", "it/owl", "other"]
    assert pack.softmax_group.tolist() == [0, 0, 0, -1]
    states = NEW.astype(np.float64)
    expected = np.concatenate([estimator.predict_proba(states), alone.predict_proba(states)[:, 1:]], axis=1)
    assert expected.std(axis=0).min() > 0.05  # else anything would pass
    assert np.abs(scores(pack) - expected).max() < 1e-6
    assert np.abs(DynamicProbeManager(pack).score_all(torch.from_numpy(NEW)).numpy() - expected).max() < 1e-6
    assert "3 concepts are in softmax groups" in pack.card_text()


def test_one_vs_rest_of_two_classes_is_one_concept(tmp_path):
    estimator = fit(OneVsRestClassifier(LogisticRegression()))
    pack = imported(tmp_path, estimator)
    assert (
        pack.n_probes == 1
        and np.abs(scores(pack)[:, 0] - estimator.predict_proba(NEW.astype(np.float64))[:, 1]).max() < 1e-6
    )


@pytest.mark.parametrize("rule", ["multinomial", "ovr", "liblinear"])
def test_multi_class_of_older_versions_is_respected(tmp_path, rule):
    """Until 1.7 a "multinomial" of two classes was a softmax of (-logit, logit), and "ovr" a sigmoid for each class."""
    estimator = fit(LogisticRegression(), TWO if rule == "multinomial" else THREE)
    estimator.multi_class = "auto" if rule == "liblinear" else rule
    estimator.solver = "liblinear" if rule == "liblinear" else "lbfgs"
    logits = estimator.decision_function(NEW.astype(np.float64)).reshape(len(NEW), -1)
    expected = 1 / (1 + np.exp(-logits * (2 if rule == "multinomial" else 1)))
    assert np.abs(scores(imported(tmp_path, estimator)) - expected).max() < 1e-6


@pytest.mark.parametrize("first", [[], [MaxAbsScaler()]], ids=["one scaler", "two"])
def test_states_far_from_zero_lose_no_more_than_fp32_does(tmp_path, first):
    """Deviations of 1 around means of 1,000: the error stays within a few units of the sums' last places, not of their
    largest terms by chance.
    """
    far = X + np.float32(1000) * np.sign(np.linspace(-1, 1, D)).astype(np.float32)
    estimator = make_pipeline(*first, StandardScaler(), LogisticRegression()).fit(far, TWO)
    pack = import_estimators({"it": estimator}, tmp_path / "pack", site=SITE, normalize="none")
    new = far[:50]
    error = np.abs(scores(pack, new)[:, 0] - estimator.predict_proba(new.astype(np.float64))[:, 1]).max()
    terms = np.abs(new * pack.weights["w1"][0, 0].numpy()).sum(1).max() + abs(float(pack.weights["b1"][0, 0]))
    assert error <= 0.25 * 2 * np.finfo(np.float32).eps * terms
    # At the mean the logit is the intercept. Rounding weights after the bias was folded with unrounded ones would lose
    # more.
    scaler, last = estimator[-2:]
    before = estimator[0].scale_ if first else 1.0
    plain, mean = last.coef_[0] / scaler.scale_ / before, scaler.mean_ * before
    naive = import_weights(
        {"it": (plain, last.intercept_ - plain @ mean)}, tmp_path / "naive", site=SITE, normalize="none"
    )
    off = [
        abs(
            float(p.weights["w1"][0, 0].double() @ torch.from_numpy(mean) + p.weights["b1"][0, 0].double())
            - last.intercept_[0]
        )
        for p in (pack, naive)
    ]
    assert off[0] < off[1] and off[0] <= np.spacing(np.abs(pack.weights["b1"].numpy()))[0, 0]


def test_estimators_of_several_shapes_go_into_one_pack_exactly(tmp_path):
    estimators = {
        "linear": fit(make_pipeline(StandardScaler(), LogisticRegression())),
        "one": fit(make_pipeline(StandardScaler(), mlp())),
        "two": fit(make_pipeline(StandardScaler(), mlp(hidden_layer_sizes=(4, 3)))),
        "labels": fit(make_pipeline(StandardScaler(), mlp(hidden_layer_sizes=(9,))), LABELS),
    }
    pack = import_estimators(
        estimators, tmp_path / "pack", site=SITE, normalize="none", name="several", licence="MIT", model="org/host"
    )
    assert (
        str(pack.architecture) == "9-9-1"
        and pack.n_probes == 6
        and pack.name == "several"
        and pack.manifest["licence"] == "MIT"
    )
    expected = np.hstack(
        [
            np.atleast_2d(e.predict_proba(NEW.astype(np.float64)))[:, -n:]
            for e, n in zip(estimators.values(), (1, 1, 1, 3), strict=True)
        ]
    )
    assert np.abs(scores(pack) - expected).max() < 1e-6
    told = pack.manifest["provenance"]["import"]
    assert told["stated"]["estimators"]["two"] == ["Pipeline", "StandardScaler", "MLPClassifier"] and told["sites"] == [
        SITE
    ]
    manager = DynamicProbeManager(pack)  # a flat pack is a pack: every probe is scored at every token
    assert manager.score_tokens(torch.from_numpy(NEW)).coverage.active.tolist() == [6] * len(NEW)


def test_normalisation_before_the_estimator_is_recorded_and_applied(tmp_path):
    normal = (X - X.mean(1, keepdims=True)) / X.std(1, keepdims=True)
    estimator = LogisticRegression().fit(normal, TWO)
    pack = imported(tmp_path, estimator, normalize="layernorm", eps=1e-12)
    expected = estimator.predict_proba(
        ((NEW - NEW.mean(1, keepdims=True)) / NEW.std(1, keepdims=True)).astype(np.float64)
    )[:, 1]
    assert np.abs(scores(pack)[:, 0] - expected).max() < 2e-6
    assert pack.manifest["inputs"] == [{"site": SITE, "norm": "layernorm", "eps": 1e-12}]


REFUSED = {
    "no probability": (LinearSVC(), TWO, r"LinearSVC is not a sigmoid.*CalibratedClassifierCV"),
    "hinge": (SGDClassifier(), TWO, "loss='hinge'.*CalibratedClassifierCV"),
    "forest": (RandomForestClassifier(3), TWO, "RandomForestClassifier is not a sigmoid"),
    "ensemble": (CalibratedClassifierCV(LinearSVC(), ensemble=True), TWO, "mean of 5 calibrated.*ensemble=False"),
    "isotonic": (CalibratedClassifierCV(LinearSVC(), method="isotonic", ensemble=False), TWO, "isotonic"),
    "Platt of a network": (CalibratedClassifierCV(mlp(), ensemble=False), TWO, "MLPClassifier has no linear decision"),
    "kernel": (CalibratedClassifierCV(SVC(kernel="rbf"), ensemble=False), TWO, "kernel='rbf'.*support vectors"),
    "pairs": (CalibratedClassifierCV(SVC(kernel="linear"), ensemble=False), THREE, "in pairs"),
    "tanh": (mlp(activation="tanh"), TWO, "activation='tanh'.*relu"),
    "three layers": (mlp(hidden_layer_sizes=(4, 3, 2)), TWO, "3 hidden layers"),
    "polynomial": (make_pipeline(PolynomialFeatures(), LogisticRegression()), TWO, "PolynomialFeatures.*not affine"),
    "clipped": (make_pipeline(MinMaxScaler(clip=True), LogisticRegression()), TWO, "MinMaxScaler with clip=True"),
    "clipped by its largest": (
        make_pipeline(MaxAbsScaler(clip=True), LogisticRegression()),
        TWO,
        "MaxAbsScaler with clip=True",
    ),
    "softmax within one-vs-rest of labels": (
        MultiOutputClassifier(LogisticRegression()),
        np.stack([THREE, THREE], axis=1),
        "LogisticRegression has 3 outputs",
    ),
    "one-vs-rest within labels": (
        MultiOutputClassifier(OneVsRestClassifier(LogisticRegression())),
        np.stack([THREE, THREE], axis=1),
        "has 3 outputs",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_estimators_are_refused_with_an_alternative(tmp_path, kind):
    estimator, y, message = REFUSED[kind]
    with pytest.raises(ImportRefused, match=f"^it(/0)?: .*{message}"):
        imported(tmp_path, fit(estimator, y))
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_error_that_names_it(tmp_path):
    with pytest.raises(ImportRefused, match="it: LogisticRegression has no classes_: it was not fitted"):
        imported(tmp_path, LogisticRegression())
    with pytest.raises(ImportRefused, match="it: OneVsRestClassifier has no estimators_: it was not fitted"):
        imported(tmp_path, OneVsRestClassifier(LogisticRegression()))
    with pytest.raises(ImportRefused, match=r"it: StandardScaler has no .*not fitted"):
        imported(tmp_path, make_pipeline(StandardScaler(), fit(LogisticRegression())))
    with pytest.raises(ImportRefused, match="not an estimator of scikit-learn"):
        imported(tmp_path, object())
    pickled = tmp_path / "probe.pkl"
    pickled.write_bytes(pickle.dumps(fit(LogisticRegression())))
    with pytest.raises(ImportRefused, match="loading a pickle for you would run what is in it"):
        import_estimators(str(pickled), tmp_path / "pack", site=SITE, normalize="none")
    with pytest.raises(ImportRefused, match=r"narrow reads 5 values"):
        import_estimators(
            {"narrow": LogisticRegression().fit(X[:, :5], TWO), "wide": fit(LogisticRegression())},
            tmp_path / "pack",
            site=SITE,
            normalize="none",
        )
    with pytest.raises(ImportRefused, match="normalize is 'zscore'"):
        imported(tmp_path, fit(LogisticRegression()), normalize="zscore")
    with pytest.raises(ImportRefused, match="no probe to import"):
        import_estimators({}, tmp_path / "pack", site=SITE, normalize="none")
    with pytest.raises(ValueError, match="site 'layer 3'"):
        import_estimators({"it": fit(LogisticRegression())}, tmp_path / "pack", site="layer 3", normalize="none")
    with pytest.raises(TypeError, match="licens"):
        imported(tmp_path, fit(LogisticRegression()), licens="MIT")
    diverged = fit(LogisticRegression())
    diverged.coef_[0, 0] = np.nan
    with pytest.raises(ImportRefused, match="it: a weight or bias is not a finite number"):
        imported(tmp_path, diverged)
    assert [path.name for path in tmp_path.iterdir()] == ["probe.pkl"]
    imported(tmp_path, fit(LogisticRegression()))
    with pytest.raises(PackError, match="exists"):
        imported(tmp_path, fit(LogisticRegression()))
    imported(tmp_path, fit(LogisticRegression(C=0.1)), overwrite=True)


SWITCHES = [
    (kind, name, not default.default)
    for kind in (StandardScaler, MinMaxScaler, MaxAbsScaler, RobustScaler, PCA)
    for name, default in inspect.signature(kind).parameters.items()
    if isinstance(default.default, bool) and name != "copy"
]


@pytest.mark.parametrize(("kind", "name", "value"), SWITCHES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_every_preprocessing_option_is_applied_or_refused(kind, name, value, tmp_path):
    """Outside of the range that it was fitted on, too, where what is not affine shows."""
    try:
        pack = imported(tmp_path, fit(make_pipeline(kind(**{name: value}), estimator := LogisticRegression())))
    except ImportRefused:
        return
    pipeline = fit(make_pipeline(kind(**{name: value}), estimator))
    assert np.abs(scores(pack, 4 * NEW)[:, 0] - pipeline.predict_proba(4 * NEW)[:, 1]).max() < 2e-6


def test_pack_records_the_positive_class_of_a_probe(tmp_path):
    """The name that a user gives may be that of the other class."""
    words = np.where(TWO, "deceptive", "honest")
    fitted = {
        "deception": LogisticRegression().fit(X, words),
        "kinds": OneVsRestClassifier(LogisticRegression()).fit(X, THREE),
    }
    pack = import_estimators(fitted, tmp_path / "pack", site=SITE, normalize="none")
    stated = {concept["id"]: concept.get("positive_class") for concept in pack.concepts}
    assert stated == {"deception": "honest", **{f"kinds/{label}": None for label in np.unique(THREE)}}
