"""Aggregators: running scores over tokens, bit for bit the same online and offline.

    aggregator = Ema(weight=0.3)                            # or parse("ema:0.3")
    state, values = aggregator.add(aggregator.begin(), scores)  # [K] of one token -> [K] float64
    running = over(aggregator, scores)                      # [T, K] -> [T, K] float64

States are immutable: beams may share one, and rejected drafts return to an older one. They take O(K) memory, rolling
ones O(n * K). Leave out unseen tokens; an inactive probe's score is 0. Concepts do not affect each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from probemon.core.score_counts import log_odds
from probemon.errors import ConfigError, closest
from probemon.util.checks import check_count, check_number

State = tuple[Any, ...]
Doubles = npt.NDArray[np.float64]


@runtime_checkable
class Aggregator(Protocol):
    """A running score of K concepts; `str()` is the stable name of its thresholds."""

    def begin(self) -> State:
        """Return the state before any token."""

    def add(self, state: State, scores: npt.NDArray[np.floating[Any]]) -> tuple[State, Doubles]:
        """Return the next state and running scores [K] float64; `state` is unchanged."""


class _Stepped:
    """An aggregator by its `_step`: from a state and a copy of new scores [K] float64 to the next state and values."""

    def begin(self) -> State:
        return ()

    def add(self, state: State, scores: npt.NDArray[np.floating[Any]]) -> tuple[State, Doubles]:
        new, values = self._step(state, _checked(state, scores))
        for array in (values, *new):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return new, values

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        raise NotImplementedError


@dataclass(frozen=True)
class Each(_Stepped):
    """No aggregation. State: the score [K]."""

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        return (x,), x

    def __str__(self) -> str:
        return "each"


@dataclass(frozen=True)
class Mean(_Stepped):
    """Mean since the start. State: number of tokens, sum [K]."""

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        count, total = state or (0, 0.0)
        return (count + 1, total + x), (total + x) / (count + 1)

    def __str__(self) -> str:
        return "mean"


@dataclass(frozen=True)
class Max(_Stepped):
    """Maximum since the start. State: that maximum."""

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        best = np.maximum(state[0], x) if state else x
        return (best,), best

    def __str__(self) -> str:
        return "max"


@dataclass(frozen=True)
class Ema(_Stepped):
    """Exponential moving average `s = weight * x + (1 - weight) * s`, from the first score on. State: s [K]."""

    weight: float

    def __post_init__(self) -> None:
        weight = check_number(
            "weight",
            self.weight,
            low=0,
            high=1,
            open_low=True,
            remedy="it is the newest token's share, so give more than 0 and at most 1",
        )
        object.__setattr__(self, "weight", weight)  # Ema(1) and Ema(1.0) have one name

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        s = self.weight * x + (1 - self.weight) * state[0] if state else x
        return (s,), s

    def __str__(self) -> str:
        return f"ema({self.weight})"


@dataclass(frozen=True)
class _Rolling(_Stepped):
    """An aggregator of the newest n tokens. State: their scores [K], oldest first."""

    n: int

    def __post_init__(self) -> None:
        n = check_count("n", self.n, least=1, remedy="it counts tokens, so give 1 or more")
        object.__setattr__(self, "n", n)


@dataclass(frozen=True)
class RollingMean(_Rolling):
    """Mean of the newest n tokens, fewer at the start."""

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        window = (*state, x)[-self.n :]
        # A carried sum would drift; np.sum's order varies with K.
        return window, reduce(np.add, window) / len(window)

    def __str__(self) -> str:
        return f"rolling_mean({self.n})"


@dataclass(frozen=True)
class RollingMax(_Rolling):
    """Maximum of the newest n tokens, fewer at the start."""

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        window = (*state, x)[-self.n :]
        return window, reduce(np.maximum, window)

    def __str__(self) -> str:
        return f"rolling_max({self.n})"


@dataclass(frozen=True)
class RollingLogit(_Rolling):
    """Sigmoid of the mean log odds of the newest n tokens: for linear probes, the score of their mean state.

    0 before half the window is filled (`least` tokens), since a few say little. State: log odds [K], oldest first.
    """

    @property
    def least(self) -> int:
        """Number of tokens from which it is a score."""
        return -(-self.n // 2)

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        window = (*state, log_odds(x))[-self.n :]
        if len(window) < self.least:
            return window, np.zeros_like(x)
        return window, 1 / (1 + np.exp(-reduce(np.add, window) / len(window)))

    def __str__(self) -> str:
        return f"rolling_logit({self.n})"


@dataclass(frozen=True)
class Attention(_Stepped):
    """Mean of the scores so far, weighted by softmax(score / temperature); near 0 it is the maximum.

    Auto-pool with alpha = 1 / temperature: McFee, Salamon & Bello 2018, "Adaptive pooling operators for weakly labeled
    sound event detection" (arXiv:1804.10070). State: maximum m [K], sums [K] of w and w * score, w = exp((score - m) /
    temperature).
    """

    temperature: float = 0.1

    def __post_init__(self) -> None:
        temperature = check_number(
            "temperature",
            self.temperature,
            low=0,
            open_low=True,
            remedy="scores are divided by it, so give a finite number over 0",
        )
        object.__setattr__(self, "temperature", temperature)

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        if not state:
            return (x, np.ones_like(x), x), x
        m, weights, weighted = state
        with np.errstate(over="ignore"):  # exp(-inf) is 0
            lesser = np.exp(-np.abs(x - m) / self.temperature)  # of the smaller of x and m
        old, new = np.where(x > m, lesser, 1.0), np.where(x > m, 1.0, lesser)
        weights, weighted = old * weights + new, old * weighted + new * x
        return (np.maximum(m, x), weights, weighted), weighted / weights  # weights >= 1

    def __str__(self) -> str:
        return f"attention({self.temperature})"


def over(aggregator: Aggregator, scores: npt.NDArray[np.floating[Any]]) -> Doubles:
    """Return running scores [T, K] float64 of one row's scores [T, K]."""
    if np.ndim(scores) != 2:
        raise ConfigError(f"scores have shape {np.shape(scores)}: give [T, K], tokens by concepts")
    running = np.empty(scores.shape)
    state = aggregator.begin()
    for t, token in enumerate(scores):
        state, running[t] = aggregator.add(state, token)
    return running


class AggregatorForm(NamedTuple):
    """Text form: constructors without and with a number, shown as `letter`."""

    make: Callable[[], Aggregator] | None = None
    make_of: Callable[[Any], Aggregator] | None = None
    number: Callable[[str], float] = float
    letter: str = ""
    example: str = ""


# Source of the parser, help texts and deployment schema.
AGGREGATORS: dict[str, AggregatorForm] = {
    "none": AggregatorForm(Each),
    "each": AggregatorForm(Each),
    "mean": AggregatorForm(Mean),
    "max": AggregatorForm(Max),
    "attention": AggregatorForm(Attention, Attention, float, "T", "attention:0.1"),
    "ema": AggregatorForm(None, Ema, float, "W", "ema:0.3"),
    "rolling_mean": AggregatorForm(None, RollingMean, int, "N", "rolling_mean:8"),
    "rolling_max": AggregatorForm(None, RollingMax, int, "N", "rolling_max:8"),
    "rolling_logit": AggregatorForm(None, RollingLogit, int, "N", "rolling_logit:16"),
}


def aggregator_forms(*left_out: str, optional: str = "{name}[:{letter}]") -> list[str]:
    """Return each aggregator's notation, such as "attention[:T]"."""
    texts = []
    for name, form in AGGREGATORS.items():
        if name not in left_out:
            pattern = "{name}" if form.make_of is None else "{name}:{letter}" if form.make is None else optional
            texts.append(pattern.format(name=name, letter=form.letter))
    return texts


def _choices() -> str:
    *some, last = aggregator_forms("none", "each", optional="{name}, {name}:{letter}")
    return (
        f"give none (each token's own score), {', '.join(some)} or {last}, "
        "with the temperature T, the newest token's share W, the number of tokens N; z:pack, rank:pack, z:last:N, "
        "rank:last:N, z:traffic:N or rank:traffic:N, for how unusual it is; or an aggregator, such as Ema(0.3)"
    )


def named(aggregate: Aggregator | str | None) -> Aggregator:
    """Return the aggregator of a text or None (`Each`), or itself. Raises `ConfigError`."""
    if aggregate is None:
        return Each()
    if isinstance(aggregate, str):
        return parse(aggregate)
    if isinstance(aggregate, Aggregator) and not isinstance(aggregate, type):
        return aggregate
    raise ConfigError(f"aggregate is {aggregate!r}: {_choices()}")


def parse(text: str) -> Aggregator:
    """Return the aggregator of a form in `aggregator_forms()`, or of an aggregator's `str()`. Raises `ConfigError`.

    For "z:..." and "rank:..." see `probemon.core.baselines`.
    """
    if text.strip().partition(":")[0] in ("z", "rank"):
        from probemon.core.baselines import parse_baseline  # circular import

        return parse_baseline(text)
    match = re.fullmatch(r"(\w+)(?::([^:()]+)|\(([^:()]+)\))?", text.strip())
    name, parameter = (match[1], match[2] or match[3]) if match else ("", None)
    form = AGGREGATORS.get(name, AggregatorForm())
    if parameter is None and form.make is not None:
        return form.make()
    if parameter is not None and form.make_of is not None:
        try:
            number = form.number(parameter)
        except ValueError:
            raise ConfigError(
                f"aggregate is {text!r}: {parameter!r} is not {'a whole number' if form.number is int else 'a number'}"
            ) from None
        return form.make_of(number)
    if form.make_of is not None:
        wrong = ", without its number"
    elif form.make is not None:
        wrong = f", and {name} takes no number"
    else:
        wrong = closest(name, list(AGGREGATORS))
    raise ConfigError(f"aggregate is {text!r}{wrong}: {_choices()}")


def _checked(state: State, scores: npt.NDArray[np.floating[Any]]) -> Doubles:
    x: Doubles = np.array(scores, dtype=np.float64, order="C")  # not a view
    if x.ndim != 1:
        raise ConfigError(f"scores have shape {x.shape}: give [K], the concepts of one row at one token")
    if state and state[-1].shape != x.shape:
        raise ConfigError(
            f"{len(x)} scores after {len(state[-1])}: the concepts of a row stay the same, so call begin() for others"
        )
    if not np.isfinite(x).all():
        at = int(np.flatnonzero(~np.isfinite(x))[0])
        raise ConfigError(
            f"score {at} of {len(x)} is {x[at]}: a score is a finite number; an unseen token has no score and is to be"
            " left out"
        )
    x += 0.0  # -0.0 becomes 0.0: a maximum may return either
    return x
