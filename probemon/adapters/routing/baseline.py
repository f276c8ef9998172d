"""Drift baselines: metrics of a healthy run, for other runs.

monitor.save_baseline("healthy.json")
RoutingMonitor(model, baseline="healthy.json")
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from probemon.adapters.bem.config import LEVELS
from probemon.adapters.routing.alerts import AlertRule, Baseline
from probemon.adapters.routing.decisions import BEM, Stream
from probemon.adapters.routing.routers import Source
from probemon.errors import ConfigError
from probemon.util.files import write_text_atomically

_KINDS = {"source": str, "site": str, "layer": Integral, "level": str, "metric": str, "tokens": Integral, "value": Real}


def entries(baseline: Baseline) -> list[dict[str, Any]]:
    """Return the baseline for JSON."""
    return [
        {**asdict(stream), "metric": metric, "tokens": tokens, "value": value}
        for (stream, metric, tokens), value in baseline.items()
    ]


def write_baseline(path: str | os.PathLike[str], baseline: Baseline) -> None:
    """Write a file for `read_baseline`, atomically. Raises `ConfigError`."""
    if not baseline:
        raise ConfigError(
            "no baseline is known yet, so none is saved: it takes five windows without alerts of a router "
            "(report()['unjudged'] says how many tokens)"
        )
    try:
        write_text_atomically(Path(path), json.dumps({"baseline": entries(baseline)}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)} cannot be written ({error.strerror}): give another name") from None


def read_baseline(source: object) -> dict[tuple[Stream, str, int], float]:
    """Read a baseline from a report, its "baseline", or a JSON file of either. Raises `ConfigError`."""
    what = "baseline"
    if isinstance(source, (str, os.PathLike)):
        what = f"baseline {os.fspath(source)!r}"
        try:
            source = json.loads(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{what} cannot be read ({error.strerror}): give the file that save_baseline wrote"
            ) from None
        except (RecursionError, ValueError) as error:
            raise ConfigError(f"{what} is not JSON ({error}): give the file that save_baseline wrote") from None
    if isinstance(source, Mapping):
        source = source.get("baseline")
    if not isinstance(source, Sequence) or isinstance(source, str) or not source:
        raise ConfigError(
            f"{what} has none: give what report() returned once drifts were judged, or the file that save_baseline "
            "wrote"
        )
    baseline: dict[tuple[Stream, str, int], float] = {}
    for entry in source:
        if (
            not isinstance(entry, Mapping)
            or set(entry) != set(_KINDS)
            or not all(
                isinstance(entry[name], kind) and not isinstance(entry[name], bool) for name, kind in _KINDS.items()
            )
        ):
            raise ConfigError(
                f"{what} has an entry of another form: give {', '.join(_KINDS)} of each, as report()['baseline'] has "
                "them"
            )
        stream = Stream(entry["source"], entry["site"], int(entry["layer"]), entry["level"])
        key = (stream, entry["metric"], int(entry["tokens"]))
        if not abs(entry["value"]) < 1e300 or key in baseline:
            raise ConfigError(
                f"{what} has {str(entry['metric'])[:40]!r} of "
                f"{stream}{' twice' if key in baseline else ' with a value that is not a finite number'}: save it again"
            )
        baseline[key] = float(entry["value"])
    return baseline


def check_baseline(baseline: Baseline, sources: Iterable[Source], rules: Iterable[AlertRule], window: int) -> None:
    """Raise `ConfigError` if an entry matches no router or drift rule."""
    judged_metrics: dict[Stream, set[tuple[str, int]]] = {}
    for source in sources:
        # The levels in use are known only after a forward.
        streams = [Stream(BEM, "bem", -1, level) for level in LEVELS] if source.kind == BEM else source.streams
        for stream in streams:
            judged_metrics[stream] = {
                (rule.metric, rule.size(source.n_experts, source.n_chosen, window))
                for rule in rules
                if rule.drift and rule.applies(stream)
            }
    for stream, metric, tokens in baseline:
        if stream not in judged_metrics:
            raise ConfigError(
                f"the baseline is of other routers: it has {stream}, this model has "
                f"{', '.join(map(str, list(judged_metrics)[:4]))}. Give one saved from this model"
            )
        if (metric, tokens) not in judged_metrics[stream]:
            looked_at = ", ".join(f"{name} over {n}" for name, n in sorted(judged_metrics[stream])) or "none"
            raise ConfigError(
                f"the baseline has {metric} over windows of {tokens} tokens of {stream}, and the rules of drift look "
                f"at {looked_at}: give one saved with these rules and this window"
            )
