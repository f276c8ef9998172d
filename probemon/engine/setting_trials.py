"""Compares settings: descends a pack under each through the same states.

for trial in try_settings(pack, {"resid_post.15": hidden}):       # hidden [T, D] of one text
    trial.changes, trial.n_evaluated, trial.step_us, trial.found
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from probemon.core.scores import RowState
from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError
from probemon.packs.group import AnyPack

VARIATIONS: tuple[Mapping[str, Any], ...] = (
    {},
    {"keep_top_k": 10},
    {"keep_top_k": 100},
    {"load_threshold": "exact"},
    {"load_threshold": 0.3},
    {"load_threshold": 0.6},
    {"max_rounds": 1},
    {"strategy": "exhaustive"},
)


@dataclass(frozen=True)
class SettingTrial:
    """Cost and recall of a text under some settings.

    - `changes`: to the pack's recommendation
    - `n_evaluated`, `n_dropped`: mean probes per token
    - `step_us`: median microseconds per token, without hooks
    - `found`: share of firing probes found; NaN if none fires
    """

    changes: Mapping[str, Any]
    n_evaluated: float
    n_dropped: float
    step_us: float
    found: float


def try_settings(
    pack: AnyPack,
    states: Mapping[str, Tensor],
    variations: Sequence[Mapping[str, Any]] = VARIATIONS,
    **settings: Any,
) -> list[SettingTrial]:
    """Try settings on one text's states `[T, D]` at the pack's sites. `settings`: common to all trials.

    Skips variations that the pack refuses. Raises `ConfigError`.
    """
    scorers = {
        at: one for at, changes in enumerate(variations) if (one := _scorer(pack, settings, changes)) is not None
    }
    fires = next(iter(scorers.values())).score_all(states).numpy() > pack.alert_threshold.numpy()
    n_tokens = len(fires)
    rows: dict[int, RowState | None] = dict.fromkeys(scorers)
    seconds: dict[int, list[float]] = {at: [] for at in scorers}
    n_evaluated, n_dropped, n_found = (dict.fromkeys(scorers, 0) for _ in range(3))
    order = list(scorers)
    for t in range(n_tokens):
        hidden = {site: x[t : t + 1] for site, x in states.items()}
        for at in (*order[t % len(order) :], *order[: t % len(order)]):
            begin = time.perf_counter()
            rows[at], scores = scorers[at].step(rows[at], hidden)
            seconds[at].append(time.perf_counter() - begin)
            n_evaluated[at] += int(scores.coverage.evaluated[0])
            n_dropped[at] += int(scores.coverage.dropped[0])
            n_found[at] += int(fires[t, scores.probes[scores.fired_mask]].sum())
    n_fires = int(fires.sum())
    return [
        SettingTrial(
            variations[at],
            n_evaluated[at] / max(1, n_tokens),
            n_dropped[at] / max(1, n_tokens),
            1e6 * statistics.median(seconds[at]) if n_tokens else float("nan"),
            n_found[at] / n_fires if n_fires else float("nan"),
        )
        for at in order
    ]


def _scorer(pack: AnyPack, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Scorer | None:
    try:
        return Scorer(pack, **{**settings, **changes})
    except ConfigError:
        if not changes:
            raise
        return None
