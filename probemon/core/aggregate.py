"""Aggregators: running scores over the tokens so far, bit for bit the same online and offline.

    aggregator = Ema(weight=0.3)                            # or named("mean"), named(None), parse("ema:0.3"), ...
                                                            # z-scores and ranks: probemon.core.baselines
    state = aggregator.begin()
    state, values = aggregator.add(state, scores)           # scores [K] of one token of one row -> values [K] float64
    running = over(aggregator, scores)                      # scores [T, K] -> [T, K] float64, by the same steps

A state is a value: its arrays are read-only. A copied beam may therefore share it, and a rejected draft is undone by
going back to the older state. It takes O(K) memory, O(n * K) in the rolling aggregators, however many the tokens.
A token that was not seen has no score: leave it out. An inactive probe's score is 0, which is a score.
Every operation is element by element, so that a concept's values do not depend on the concepts beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from probemon.errors import ConfigError, closest
from probemon.util.checks import check_count, check_number

State = tuple[Any, ...]
Doubles = npt.NDArray[np.float64]


@runtime_checkable
class Aggregator(Protocol):
    """A running score of K concepts; `str()` gives the stable name under which its thresholds are kept."""

    def begin(self) -> State:
        """Return the state before any token."""

    def add(self, state: State, scores: npt.NDArray[np.floating[Any]]) -> tuple[State, Doubles]:
        """Return the state after a token with scores [K], and the running score [K] float64; `state` stays as it is."""


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
    """No aggregation: the token's own score. State: that score [K], only to know K."""

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
    """Maximum since the start. State: that maximum [K]."""

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
        object.__setattr__(self, "weight", weight)  # a float, so that Ema(1) and Ema(1.0) have one name

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        s = self.weight * x + (1 - self.weight) * state[0] if state else x
        return (s,), s

    def __str__(self) -> str:
        return f"ema({self.weight})"


@dataclass(frozen=True)
class _Rolling(_Stepped):
    """An aggregator of the newest n tokens, of fewer at the start. State: their scores, n times [K], oldest first."""

    n: int

    def __post_init__(self) -> None:
        n = check_count("n", self.n, least=1, remedy="it counts tokens, so give 1 or more")
        object.__setattr__(self, "n", n)


@dataclass(frozen=True)
class RollingMean(_Rolling):
    """Mean of the newest n tokens, of fewer at the start."""

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        window = (*state, x)[-self.n :]
        # From the oldest on each time: a sum carried along would drift. Not np.sum: for one concept it adds in another
        # order.
        return window, reduce(np.add, window) / len(window)

    def __str__(self) -> str:
        return f"rolling_mean({self.n})"


@dataclass(frozen=True)
class RollingMax(_Rolling):
    """Maximum of the newest n tokens, of fewer at the start."""

    def _step(self, state: State, x: Doubles) -> tuple[State, Doubles]:
        window = (*state, x)[-self.n :]
        return window, reduce(np.maximum, window)

    def __str__(self) -> str:
        return f"rolling_max({self.n})"


@dataclass(frozen=True)
class Attention(_Stepped):
    """Mean of the scores so far, weighted by softmax(score / temperature).

    A temperature near 0 gives the maximum, a large one the mean. It is auto-pool with alpha = 1 / temperature: McFee,
    Salamon & Bello 2018, "Adaptive pooling operators for weakly labeled sound event detection" (arXiv:1804.10070).
    State: maximum m [K], sums [K] of w and w * score, where w = exp((score - m) / temperature).
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
        with np.errstate(over="ignore"):  # a quotient too large for a float64 is a weight of 0
            lesser = np.exp(-np.abs(x - m) / self.temperature)  # of whichever of x and m is not the new maximum
        old, new = np.where(x > m, lesser, 1.0), np.where(x > m, 1.0, lesser)
        weights, weighted = old * weights + new, old * weighted + new * x
        return (np.maximum(m, x), weights, weighted), weighted / weights  # weights >= 1, that of the maximum

    def __str__(self) -> str:
        return f"attention({self.temperature})"


def over(aggregator: Aggregator, scores: npt.NDArray[np.floating[Any]]) -> Doubles:
    """Return running scores [T, K] float64 of scores [T, K], the tokens of one row in order."""
    if np.ndim(scores) != 2:
        raise ConfigError(f"scores have shape {np.shape(scores)}: give [T, K], tokens by concepts")
    running = np.empty(scores.shape)
    state = aggregator.begin()
    for t, token in enumerate(scores):
        state, running[t] = aggregator.add(state, token)
    return running


class AggregatorForm(NamedTuple):
    """An aggregator as text: how it is made alone, and of a number, which help texts call `letter`; an example."""

    make: Callable[[], Aggregator] | None = None
    make_of: Callable[[Any], Aggregator] | None = None
    number: Callable[[str], float] = float
    letter: str = ""
    example: str = ""


# Every aggregator that a text can name: what parses, help texts and the schema of deployments are made of this table.
AGGREGATORS: dict[str, AggregatorForm] = {
    "none": AggregatorForm(Each),
    "each": AggregatorForm(Each),
    "mean": AggregatorForm(Mean),
    "max": AggregatorForm(Max),
    "attention": AggregatorForm(Attention, Attention, float, "T", "attention:0.1"),
    "ema": AggregatorForm(None, Ema, float, "W", "ema:0.3"),
    "rolling_mean": AggregatorForm(None, RollingMean, int, "N", "rolling_mean:8"),
    "rolling_max": AggregatorForm(None, RollingMax, int, "N", "rolling_max:8"),
}


def aggregator_forms(*left_out: str, optional: str = "{name}[:{letter}]") -> list[str]:
    """Return how each aggregator is written: "mean", "attention[:T]", "ema:W". `optional`: one with or without."""
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
    """Return an aggregator as it is, that of a text by `parse`, or `Each` for None. Raises `ConfigError`."""
    if aggregate is None:
        return Each()
    if isinstance(aggregate, str):
        return parse(aggregate)
    if isinstance(aggregate, Aggregator) and not isinstance(aggregate, type):  # a class has the methods too
        return aggregate
    raise ConfigError(f"aggregate is {aggregate!r}: {_choices()}")


def parse(text: str) -> Aggregator:
    """Return the aggregator of a text: one of `forms()`, or what `str()` of an aggregator gives.

    T is the temperature, W the newest token's share, N the number of tokens. "z:pack" and its like: see
    `probemon.core.baselines`. Raises `ConfigError`.
    """
    if text.strip().partition(":")[0] in ("z", "rank"):
        from probemon.core.baselines import parse_baseline  # which is made of what is here

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
    """Copy scores [K] to float64: a view would keep a whole document in memory, and change with its owner."""
    x: Doubles = np.array(scores, dtype=np.float64, order="C")
    if x.ndim != 1:
        raise ConfigError(f"scores have shape {x.shape}: give [K], the concepts of one row at one token")
    if state and state[-1].shape != x.shape:
        raise ConfigError(
            f"{len(x)} scores after {len(state[-1])}: the concepts of a row stay the same, so begin() anew for others"
        )
    if not np.isfinite(x).all():
        at = int(np.flatnonzero(~np.isfinite(x))[0])
        raise ConfigError(
            f"score {at} of {len(x)} is {x[at]}: a score is a finite number; an unseen token has no score and is to be"
            " left out"
        )
    x += 0.0  # -0.0 becomes 0.0: which of the two a maximum returns is not defined
    return x
