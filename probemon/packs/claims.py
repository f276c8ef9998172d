"""Checks parts of a manifest that commands read.

check_claims(manifest)             # ValueError: "quality.per_level is a list: expected an object"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import date
from typing import Any

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_DEPTH = 100  # nesting, since recursive functions walk it
_LARGEST = 10**15

Check = Callable[[str, Any], None]


def check_claims(manifest: Mapping[str, Any]) -> None:
    """Raise `ValueError` for the first part of `host`, `quality`, `provenance`, `drift` or `alert_set` of a wrong
    kind.
    """
    alert_set = manifest.get("alert_set")
    if alert_set is not None and not (isinstance(alert_set, str) and SET_NAME.fullmatch(alert_set)):
        raise _wrong("alert_set", alert_set, "a name of letters, digits and . _ -")
    parts = {"host": _HOST, "quality": _QUALITY, "provenance": _PROVENANCE}
    for part, check in ({**parts, "drift": _DRIFT} if "drift" in manifest else parts).items():
        claimed = manifest.get(part) or {}
        if any(depth > MAX_DEPTH for depth in _depths(claimed)):
            raise ValueError(f"{part} is nested more than {MAX_DEPTH} deep")
        check(part, claimed)


def _depths(value: Any) -> Iterator[int]:
    waiting = [(value, 0)]
    while waiting:
        inner, depth = waiting.pop()
        if isinstance(inner, (dict, list)):
            yield depth
            if depth > MAX_DEPTH:
                return
            waiting += [(part, depth + 1) for part in (inner.values() if isinstance(inner, dict) else inner)]


def _wrong(where: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{where} is {value!r:.60}: expected {expected}")


def _text(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")


def _number(where: str, value: Any) -> None:
    if isinstance(value, float):
        return
    if type(value) is not int or abs(value) > _LARGEST:  # bool is not a number
        raise _wrong(where, value, "a number")


def _whole(where: str, value: Any) -> None:
    _number(where, value)
    if not isinstance(value, int):
        raise _wrong(where, value, "a whole number")


def _day(where: str, value: Any) -> None:
    try:
        date.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong(where, value, "a day as YYYY-MM-DD") from None


def _anything(where: str, value: Any) -> None:
    pass


def _maybe(check: Check) -> Check:
    """`check`, or null."""
    return lambda where, value: None if value is None else check(where, value)


def _each(check: Check) -> Check:
    """An object of such values."""

    def checked(where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        for key, inner in value.items():
            check(f"{where}.{key:.60}", inner)

    return checked


def _all(check: Check) -> Check:
    """A list of such values."""

    def checked(where: str, value: Any) -> None:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        for i, inner in enumerate(value):
            check(f"{where}[{i}]", inner)

    return checked


def _object(checks: Mapping[str, Check], needed: Collection[str] = ()) -> Check:
    """An object with the `needed` keys and valid known ones."""

    def checked(where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        for key in needed:
            if key not in value:
                raise ValueError(f"{where} has no {key}")
        for key, check in checks.items():
            if key in value:
                check(f"{where}.{key}", value[key])

    return checked


def _calibration(where: str, value: Any) -> None:
    expansion = _maybe(_object({"recall": _number}, ["recall"]))
    _object({"source": _object({"name": _text}, ["name"]), "expansion": expansion}, ["source"])(where, value)
    if "aggregator" in value:
        alerts = {"aggregator": _text, "n_watched": _whole, "fpr": _number, "unit": _text}
        _object(alerts, list(alerts))(where, value)


_measures = dict.fromkeys(
    ("auroc_median", "auroc_p10", "auroc_siblings_median", "auroc_examples_median"), _maybe(_number)
)
_overall = dict.fromkeys(
    ("n_test", "firing_recall_exact", "share_evaluated_exact", "false_positive_rate", "precision_at_threshold"),
    _maybe(_number),
)
_alerts = _maybe(_each(_maybe(_object({"concepts": _maybe(_each(_anything))}))))
_texts = dict.fromkeys(("model_id", "revision", "fingerprint", "quantisation", "adapter_weights"), _maybe(_text))
_HOST = _object(
    {
        **_texts,
        "n_layers": _maybe(_whole),
        "hidden_size": _maybe(_whole),
        "settings": _maybe(_each(_anything)),
        "adapters": _maybe(_all(_text)),
    }
)
_QUALITY = _object({**_measures, **_overall, "per_level": _maybe(_each(_object(_measures))), "alerts": _alerts})
_PROVENANCE = _object({"calibrations": _maybe(_all(_calibration)), "chat_date": _maybe(_day)})
_DRIFT = _object(
    {"n_requests": _whole, "host": _each(_text), "alert_set": _maybe(_text)}, ["n_requests", "host", "alert_set"]
)
