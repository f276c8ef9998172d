"""DriftReference: request statistics of a healthy period.

Calibrated packs hold one (`pack.drift_reference`); `DriftMonitor.freeze` makes one of a deployment's requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.request_counts import N_NORM_BINS, N_SCORE_BINS, RequestCounts
from probemon.core.scores import Floats
from probemon.errors import ConfigError
from probemon.util.checks import check_path, is_int
from probemon.util.files import write_text_atomically
from probemon.util.strict_json import loads

FORMAT, FORMAT_VERSION = "probemon-drift-reference", 1
_MAX_BYTES = 256 << 20
_TRAITS = ("low", "high", "flat")


@dataclass(frozen=True)
class DriftReference:
    """Counts of requests, and their source.

    - `ids`: concepts with counted fires; `scored [A]`: positions in `ids` of those with counted scores; `sites`: of the
      norms. `counts` has this order.
    - `host`: the model (`probemon.host.identity`).
    - `packs`: sha256 of weights by pack name; empty inside a pack.
    - `alert_set`: name of the thresholds, or None; `alert`: their values, NaN for none.
    """

    ids: tuple[str, ...]
    scored: Ints
    sites: tuple[str, ...]
    counts: RequestCounts
    host: Mapping[str, str]
    packs: Mapping[str, str]
    alert_set: str | None
    alert: Floats | None = None

    def stated(self) -> dict[str, Any]:
        """Return the part for a pack's manifest."""
        return {"n_requests": self.counts.n, "host": dict(self.host), "alert_set": self.alert_set}

    def write(self, path: str | Path) -> None:
        """Write a JSON file for `read`, atomically. Raises `ConfigError`."""
        counts = self.counts
        concepts: dict[str, dict[str, Any]] = {
            concept: {"fired": int(fired)} for concept, fired in zip(self.ids, counts.fired, strict=True)
        }
        for concept, threshold in zip(self.ids, () if self.alert is None else self.alert.tolist(), strict=False):
            concepts[concept]["alert"] = None if math.isnan(threshold) else threshold
        for at, place in enumerate(self.scored.tolist()):
            ends = {name: int(getattr(counts, name)[at]) for name in _TRAITS}
            concepts[self.ids[place]] |= {**ends, "highest": counts.highest[at].tolist()}
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **self.stated(),
            "packs": dict(self.packs),
            "concepts": concepts,
            "norms": {
                site: {str(place): int(norms[place]) for place in np.flatnonzero(norms).tolist()}
                for site, norms in zip(self.sites, counts.norms, strict=True)
            },
        }
        target = check_path("path", path)
        try:
            write_text_atomically(target, json.dumps(content, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"{target} cannot be written ({error.strerror}): give another name") from None

    @classmethod
    def read(cls, path: str | Path) -> DriftReference:
        """Read a file of `write`. Raises `ConfigError`."""
        file = check_path("path", path)
        remedy = "give the file that DriftMonitor.freeze wrote"
        try:
            if file.stat().st_size > _MAX_BYTES:
                raise ConfigError(f"{file} has more than {_MAX_BYTES:,} bytes: {remedy}")
            content = loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}): {remedy}") from None
        except (RecursionError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{file} is not JSON ({str(error)[:200]}): {remedy}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ConfigError(f"{file} is not a drift reference: {remedy}")
        if content.get("format_version") != FORMAT_VERSION:
            version = str(content.get("format_version"))[:40]
            raise ConfigError(
                f"{file}: format_version is {version}, this probemon reads {FORMAT_VERSION}: freeze again"
            )
        try:
            return _parsed(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} is damaged ({type(error).__name__}: {str(error)[:200]}): {remedy}") from None


def _parsed(content: Mapping[str, Any]) -> DriftReference:
    n, concepts, sites = _count(content["n_requests"], None), content["concepts"], content["norms"]
    if not n:
        raise ValueError("it has no requests")
    scored = [place for place, counted in enumerate(concepts.values()) if "highest" in counted]
    counts = RequestCounts.none(len(concepts), len(scored), len(sites))
    entries = list(concepts.values())
    counts.fired[:] = [_count(entry["fired"], n) for entry in entries]
    for at, place in enumerate(scored):
        for name in _TRAITS:
            getattr(counts, name)[at] = _count(entries[place][name], n)
        highest = [_count(count, n) for count in entries[place]["highest"]]
        if len(highest) != N_SCORE_BINS or sum(highest) != n:
            raise ValueError(f"highest scores are of {sum(highest)} requests in {len(highest)} bins")
        counts.highest[at] = highest
    for at, norms in enumerate(sites.values()):
        for place, count in norms.items():
            counts.norms[at, _count(int(place), N_NORM_BINS - 1)] = _count(count, n)
    alert_set, texts = content["alert_set"], [*content["host"].values(), *content["packs"].values()]
    if not all(isinstance(text, str) for text in texts) or not isinstance(alert_set, (str, type(None))):
        raise ValueError("host, packs and alert_set have to be texts")
    alert = [math.nan if entry["alert"] is None else entry["alert"] for entry in entries if "alert" in entry]
    if len(alert) not in (0, len(entries)) or not all(isinstance(value, float) for value in alert):
        raise ValueError("alert thresholds are numbers, or null, of every concept or of none")
    counts = RequestCounts(n, counts.fired, counts.low, counts.high, counts.flat, counts.highest, counts.norms)
    return DriftReference(
        tuple(concepts),
        np.asarray(scored, dtype=np.int64),
        tuple(sites),
        counts,
        content["host"],
        content["packs"],
        alert_set,
        np.asarray(alert, dtype=np.float32) if alert else None,
    )


def _count(value: object, most: int | None) -> int:
    if not is_int(value) or not value >= 0 or (most is not None and value > most):  # type: ignore[operator]
        raise ValueError(f"{str(value)[:40]} is not a count" + ("" if most is None else f" from 0 to {most}"))
    return int(value)  # type: ignore[call-overload,no-any-return]
