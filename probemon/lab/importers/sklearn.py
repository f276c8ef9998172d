"""Imports scikit-learn estimators from memory.

    estimators = {"deception": make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)}
    pack = import_estimators(estimators, "my-pack", site="resid_post.15", normalize="none")

Scores are `predict_proba` of `classes_[1]`. Several classes or labels become several concepts: a softmax group, or each
with its classifier's score. Other probabilities are refused, with a remedy. It neither imports scikit-learn nor opens
pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.flat import Classifier, ImportOptions, Layer, check_options, write_flat
from probemon.packs.pack import ProbePack

# With a linear decision function, and with its sigmoid as probability.
_LINEAR = (
    "LogisticRegression",
    "LogisticRegressionCV",
    "SGDClassifier",
    "LinearDiscriminantAnalysis",
    "LinearSVC",
    "RidgeClassifier",
    "RidgeClassifierCV",
    "Perceptron",
    "SVC",
    "NuSVC",
)
_LOGISTIC = ("LogisticRegression", "LogisticRegressionCV", "SGDClassifier", "LinearDiscriminantAnalysis")
_SCALERS = ("StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler")
_SEARCHES = ("GridSearchCV", "RandomizedSearchCV", "HalvingGridSearchCV", "HalvingRandomSearchCV")
_WRAPPERS = ("Pipeline", "FrozenEstimator", *_SEARCHES)
_PLATT = "CalibratedClassifierCV(..., method='sigmoid', ensemble=False)"
_REST = "OneVsRestClassifier(...), which fits a probe for each class"


def import_estimators(
    estimators: Mapping[str, Any],
    target: str | Path,
    *,
    site: str,
    normalize: str | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write fitted estimators as a pack; names are concepts, or prefixes of classes (`name/class`).

    - `site`: where the states in `X` were read
    - `normalize`: of states before `X` (`none`, `layernorm` or `rmsnorm`); required
    - `about`: `ImportOptions` of `probemon.lab.importers.flat`

    Supported: logistic regression, linear discriminant analysis, SGD with log loss; linear SVMs and others with Platt
    scaling (one calibrator); MLPClassifier with ReLU, one or two hidden layers; one-vs-rest and several labels; all
    after scalers and PCA in a Pipeline. Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_estimators, about, normalize=normalize)
    if not isinstance(estimators, Mapping):
        raise ImportRefused(
            f"estimators is a {type(estimators).__name__}: give a dict of names and fitted estimators, as loading a"
            " pickle for you would run what is in it"
        )
    probes = [
        _with_class(probe, name, estimator)
        for name, estimator in estimators.items()
        for probe in _probes(name, estimator)
    ]
    kinds = {name: _outline(estimator) for name, estimator in estimators.items()}
    return write_flat(
        target,
        probes,
        source="scikit-learn estimators",
        site=site,
        normalize=normalize,
        stated={"estimators": kinds},
        **about,
    )


def _with_class(probe: Classifier, name: str, estimator: Any) -> Classifier:
    classes = getattr(estimator, "classes_", None)
    if probe.id != name or not isinstance(classes, np.ndarray) or len(classes) != 2:
        return probe
    return replace(probe, fields={**probe.fields, "positive_class": str(classes[1])})


def _probes(name: str, estimator: Any) -> list[Classifier]:
    kind = _kind(name, estimator)
    if kind in _WRAPPERS:
        return _unwrapped(name, kind, estimator, _probes)
    if kind == "OneVsRestClassifier":
        fitted = _fitted(name, estimator, "estimators_")
        labels = [name] if len(fitted) == 1 else [f"{name}/{label}" for label in _fitted(name, estimator, "classes_")]
        return [_single(label, part) for label, part in zip(labels, fitted, strict=True)]
    if kind == "MultiOutputClassifier":
        return [_single(f"{name}/{i}", part) for i, part in enumerate(_fitted(name, estimator, "estimators_"))]
    if kind == "MLPClassifier":
        return _mlp(name, estimator)
    if kind == "CalibratedClassifierCV":
        return _calibrated(name, estimator)
    if kind not in _LOGISTIC or (kind == "SGDClassifier" and estimator.loss != "log_loss"):
        what = f"{kind} with loss={estimator.loss!r}" if kind == "SGDClassifier" else kind
        raise ImportRefused(
            f"{name}: the probability of {what} is not a sigmoid of one logit: fit"
            f" {_PLATT if kind in _LINEAR else 'LogisticRegression'} instead"
        )
    rows = _decision(name, estimator)
    twice = False
    if kind.startswith("LogisticRegression"):
        # Before 1.8: "multinomial" of two classes was a softmax of (-logit, logit), "ovr" a sigmoid per class.
        rule = getattr(estimator, "multi_class", "auto")
        twice = rule == "multinomial"
        separate = rule in ("ovr", "warn") or (rule in ("auto", "deprecated") and estimator.solver == "liblinear")
        if len(rows) > 1 and not separate:
            return [replace(row, group=name) for row in rows]
    if kind == "LinearDiscriminantAnalysis" and len(rows) > 1:
        return [replace(row, group=name) for row in rows]
    return [_scaled(row, 2.0) for row in rows] if twice else rows


def _unwrapped(name: str, kind: str, estimator: Any, read: Callable[[str, Any], list[Classifier]]) -> list[Classifier]:
    if kind == "Pipeline":
        steps = [step for _, step in estimator.steps]
        return _after(name, steps[:-1], read(name, steps[-1]))
    return read(name, estimator.estimator if kind == "FrozenEstimator" else _fitted(name, estimator, "best_estimator_"))


def _single(name: str, estimator: Any) -> Classifier:
    probes = _probes(name, estimator)
    if len(probes) != 1:
        raise ImportRefused(
            f"{name}: {_kind(name, estimator)} has {len(probes)} outputs: give it as a separate estimator"
        )
    return probes[0]


def _decision(name: str, estimator: Any) -> list[Classifier]:
    """Return logits: one for two classes, else one each."""
    kind = _kind(name, estimator)
    if kind in _WRAPPERS:
        return _unwrapped(name, kind, estimator, _decision)
    if kind not in _LINEAR:
        raise ImportRefused(
            f"{name}: {kind} has no linear decision function that is known here: fit one of {', '.join(_LINEAR)}"
        )
    classes = _fitted(name, estimator, "classes_")
    if kind in ("SVC", "NuSVC"):
        if estimator.kernel != "linear":
            raise ImportRefused(
                f"{name}: {kind} with kernel={estimator.kernel!r} compares with its support vectors: fit LinearSVC, or"
                " kernel='linear'"
            )
        if len(classes) > 2:
            raise ImportRefused(
                f"{name}: {kind} over {len(classes)} classes compares them in pairs: fit LinearSVC, or {_REST}"
            )
    coefficients = _fitted(name, estimator, "coef_")
    weight = _tensor(coefficients.toarray() if hasattr(coefficients, "toarray") else coefficients)
    weight = weight.reshape(-1, weight.shape[-1])
    bias = _tensor(np.broadcast_to(np.reshape(estimator.intercept_, -1), len(weight)))
    labels = [name] if len(weight) == 1 else [f"{name}/{label}" for label in classes]
    if len(labels) != len(weight):
        raise ImportRefused(
            f"{name}: {len(weight)} rows of coefficients for {len(classes)} classes: it is not {kind} as scikit-learn"
            " fits it"
        )
    return [Classifier(label, [(weight[i : i + 1], bias[i : i + 1])]) for i, label in enumerate(labels)]


def _calibrated(name: str, estimator: Any) -> list[Classifier]:
    """Undo Platt scaling: probability = sigmoid(-(a f + b)) of the decision function f (Platt 1999)."""
    fitted = _fitted(name, estimator, "calibrated_classifiers_")
    if len(fitted) != 1:
        raise ImportRefused(
            f"{name}: the mean of {len(fitted)} calibrated classifiers is not a sigmoid of one logit: fit {_PLATT}"
        )
    inner = fitted[0]
    if estimator.method != "sigmoid":
        raise ImportRefused(f"{name}: calibration by {estimator.method!r} is not a sigmoid of one logit: fit {_PLATT}")
    rows = _decision(name, inner.estimator)
    if len(rows) != len(inner.calibrators):
        raise ImportRefused(
            f"{name}: {len(inner.calibrators)} calibrators for {len(rows)} decision functions: a class was missing from"
            " the fit"
        )
    return [_scaled(row, -float(one.a_), -float(one.b_)) for row, one in zip(rows, inner.calibrators, strict=True)]


def _mlp(name: str, estimator: Any) -> list[Classifier]:
    weights, biases = _fitted(name, estimator, "coefs_"), estimator.intercepts_
    layers: list[Layer] = [(_tensor(weight).T, _tensor(bias)) for weight, bias in zip(weights, biases, strict=True)]
    if len(layers) > 1 and estimator.activation != "relu":
        raise ImportRefused(
            f"{name}: MLPClassifier with activation={estimator.activation!r}; a pack's hidden layers are ReLU: fit"
            " activation='relu'"
        )
    if len(layers) > 3:
        raise ImportRefused(
            f"{name}: MLPClassifier with {len(layers) - 1} hidden layers; a pack's probes have none, one or two"
        )
    weight, bias = layers[-1]
    if estimator.out_activation_ not in ("logistic", "softmax"):
        raise ImportRefused(
            f"{name}: MLPClassifier gives a {estimator.out_activation_}, neither sigmoids nor a softmax: fit {_REST}"
        )
    labels = [name] if len(weight) == 1 else [f"{name}/{label}" for label in estimator.classes_]
    group = name if estimator.out_activation_ == "softmax" else ""
    return [
        Classifier(label, [*layers[:-1], (weight[i : i + 1], bias[i : i + 1])], group=group)
        for i, label in enumerate(labels)
    ]


def _after(name: str, steps: Sequence[Any], probes: list[Classifier]) -> list[Classifier]:
    for step in reversed(steps):
        if step is None or step == "passthrough":
            continue
        kind = _kind(name, step)
        if kind == "FrozenEstimator":
            probes = _after(name, [step.estimator], probes)
        elif kind == "PCA":
            probes = [_rotated(probe, step) for probe in probes]
        elif kind in _SCALERS:
            probes = [probe.standardised(*_mean_and_scale(name, kind, step, probe.hidden_size)) for probe in probes]
        else:
            raise ImportRefused(
                f"{name}: the step {kind} of its pipeline is not affine, or not known here: use {', '.join(_SCALERS)}"
                " or PCA, or import with normalize= what it does"
            )
    return probes


def _mean_and_scale(name: str, kind: str, step: Any, size: int) -> tuple[Tensor, Tensor]:
    """Return what a scaler subtracts and divides by, `[D]` fp64."""
    if getattr(step, "clip", False):
        raise ImportRefused(f"{name}: {kind} with clip=True is not affine: fit it with clip=False")
    if kind == "MinMaxScaler":
        scale = 1 / _tensor(_fitted(name, step, "scale_"))
        return -_tensor(step.min_) * scale, scale
    centre = getattr(step, {"StandardScaler": "mean_", "RobustScaler": "center_"}.get(kind, ""), None)
    if kind == "StandardScaler":
        _fitted(name, step, "n_samples_seen_")
        centre = centre if step.with_mean else None
    scale = _fitted(name, step, "scale_")
    return _tensor(np.zeros(size) if centre is None else centre), _tensor(np.ones(size) if scale is None else scale)


def _rotated(probe: Classifier, pca: Any) -> Classifier:
    """Fold a PCA into a probe: components `[K, D]`, mean `[D]`, and whitening, clipped as there."""
    (weight, bias), *rest = probe.layers
    components, mean = _tensor(_fitted(probe.id, pca, "components_")), _tensor(pca.mean_)
    weight = weight.double()
    if pca.whiten:
        deviation = np.sqrt(pca.explained_variance_)
        weight = weight / _tensor(np.maximum(deviation, np.finfo(deviation.dtype).eps))
    folded = weight @ components
    return replace(probe, layers=[(folded, bias.double() - folded @ mean), *rest], centre=mean)


def _scaled(probe: Classifier, factor: float, shift: float = 0.0) -> Classifier:
    *rest, (weight, bias) = probe.layers
    return replace(probe, layers=[*rest, (factor * weight.double(), factor * bias.double() + shift)])


def _kind(name: str, estimator: Any) -> str:
    """Return the class name. Raises `ImportRefused` if it is not scikit-learn's."""
    kind = type(estimator)
    if kind.__module__.split(".")[0] != "sklearn":
        raise ImportRefused(
            f"{name}: {kind.__module__}.{kind.__name__} is not an estimator of scikit-learn: give its weights with"
            " probemon.lab.importers.generic.import_weights"
        )
    return kind.__name__


def _fitted(name: str, estimator: Any, attribute: str) -> Any:
    if not hasattr(estimator, attribute):
        raise ImportRefused(f"{name}: {type(estimator).__name__} has no {attribute}: it was not fitted")
    return getattr(estimator, attribute)


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))


def _outline(estimator: Any) -> list[str]:
    parts = [step[1] for step in getattr(estimator, "steps", ())]
    inner = getattr(estimator, "estimator", None)
    parts += [] if inner is None else [inner]
    return [type(estimator).__name__, *(name for part in parts for name in _outline(part))]
