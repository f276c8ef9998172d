"""Options of watch: what it shows, what stops it, and where scores go.

watching = Watching(stop_rules(pack, ["weapon:above=0.9", "crime:2"]), scores_sink("scores.jsonl"))
for event in manager.stream(model, tokenizer, messages, prepare=watching.prepare): ...
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.core.aggregate import Aggregator, Doubles, Each, parse
from probemon.core.baselines import ceiling, with_counts
from probemon.errors import ConfigError, UnknownConcept
from probemon.monitor.followers import Follower
from probemon.monitor.rules import Event
from probemon.monitor.sinks import JsonLinesSink
from probemon.packs.configured import names_left_out
from probemon.packs.group import AnyPack, PackGroup, trained_score
from probemon.util.files import why_not_writable

if TYPE_CHECKING:
    from probemon.manager import DynamicProbeManager
    from probemon.monitor.health import Health
    from probemon.monitor.run import MonitorRun

_AGAIN = 16  # tokens
_STOP_ON = re.compile(r"(?P<concept>.+):(?P<above>above=)?(?P<value>[^:]*)")


@dataclass(frozen=True)
class StopRule:
    """Stops at the first generated token whose aggregated score is over `above`."""

    probe: int
    above: float
    aggregator: Aggregator


class Watching(Follower):
    """Rules, a sink and Ctrl-C during a watch.

    `met`: the event that stopped it; `risen`: by column, the concepts whose running score rose over its threshold, and
    had not done so for 16 tokens; `shown_only`: all events of what is shown, which are of no rule
    """

    def __init__(self, rules: Sequence[StopRule], sink: JsonLinesSink | None, running: Sequence[StopRule] = ()) -> None:
        self.met: Event | None = None
        self.risen: dict[int, list[Event]] = {}
        self.shown_only: list[Event] = []
        self.running = running
        self.interrupted = False
        self.events: Sequence[Event] = ()
        self.rules, self._sink = rules, sink
        self._delivery: Any = None
        self._run: MonitorRun | None = None

    def prepare(self, run: MonitorRun) -> None:
        """Attach to a started run."""

        def stop(event: Event) -> None:
            self.stopped(event)
            run.stop_mine()

        def stop_if_interrupted(*_: Any) -> None:
            if self.interrupted:
                run.stop_mine()

        rose: dict[str, int] = {}

        def begin(event: Event) -> None:
            self.shown_only.append(event)
            before, rose[event.concept] = rose.get(event.concept), event.column
            if before is None or event.column - before >= _AGAIN:
                self.risen.setdefault(event.column, []).append(event)

        self.events, self._run = run.events, run
        for rule in self.running:
            run.on(rule.probe, above=rule.above, aggregate=rule.aggregator, action=begin)
        for rule in self.rules:
            run.on(rule.probe, above=rule.above, aggregate=rule.aggregator, action=stop)
        if self._sink is not None:
            self._delivery = run.follow(self._sink)
        run.follow(stop_if_interrupted)
        run.follow(self)

    def stopped(self, event: Event) -> None:
        """Record the event that stopped the generation."""
        self.met = self.met or event

    def interrupt(self) -> None:
        """End the generation at its next token; safe in a signal handler."""
        self.interrupted = True

    @property
    def health(self) -> Health | None:
        """The run's health."""
        return None if self._run is None else self._run.health()

    @property
    def n_dropped(self) -> int:
        """Tokens that the sink dropped."""
        return 0 if self._delivery is None else self._delivery.stats().n_dropped


@dataclass(frozen=True)
class Showing:
    """What watch shows.

    - `above [P]`: scores over which concepts are shown at a token, inf for never; None for all that fire
    - `running`: concepts that are shown where their running score rises, not at single tokens
    - `brief`: a concept is shown at the last token of a word, its path without the root; not what most texts have
    - `asked`: whether concepts were named
    """

    above: Doubles | None
    running: Sequence[StopRule] = ()
    brief: bool = False
    asked: bool = False

    @classmethod
    def of(cls, pack: AnyPack, concepts: Sequence[str], min_strength: float, *, brief: bool = False) -> Showing:
        """Return what these options show. Raises `ConfigError`, `UnknownConcept`."""
        above = shown_above(pack, concepts, min_strength)
        running = [rule for rule in running_rules(pack, min_strength) if above is None or above[rule.probe] < math.inf]
        hidden = [rule.probe for rule in running]
        if brief and not concepts:
            hidden += [probe for probe in range(pack.n_probes) if pack.tree.level[probe] == 0]
            common = _common(pack)
            running = [rule for rule in running if rule.probe not in common]
        if hidden:
            above = np.full(pack.n_probes, -math.inf) if above is None else above
            above[hidden] = math.inf
        return cls(above, running, brief, bool(concepts))


def running_rules(pack: AnyPack, min_strength: float | None = None) -> list[StopRule]:
    """Return the concepts that packs of the library read by running scores, at the packs' thresholds.

    `min_strength`: or that far over them, and where all are shown at once, as far as the pack says (`shown_over`)
    """
    rules = []
    for member, numbers in members_of(pack):
        library = (member.manifest.get("quality") or {}).get("library")
        margins = (library or {}).get("shown_over", {})
        for p, probe in enumerate(numbers.tolist() if library else ()):
            aggregator = trained_score(pack, probe)
            if aggregator is None or str(aggregator) not in member.aggregated:  # renamed since, or set anew without it
                continue
            threshold = float(member.thresholds_for(aggregator)[p])
            over = 0.0 if min_strength is None else max(min_strength, margins.get(member.concepts[p]["id"], 0.0))
            if 0 < threshold < 1:
                rules.append(StopRule(probe, score_of_strength(threshold, over) if over else threshold, aggregator))
    return rules


def _common(pack: AnyPack) -> set[int]:
    """Return the library's concepts that most ordinary texts have, such as english."""
    found = set()
    for member, numbers in members_of(pack):
        quality = member.manifest.get("quality") or {}
        if "library" in quality:
            of, n_texts = quality["concepts"], quality["ordinary"]["texts"]
            without = [
                of[concept["id"]]["alert_of_texts"]["n"] if concept["id"] in of else n_texts
                for concept in member.concepts
            ]
            found |= {int(numbers[p]) for p, n in enumerate(without) if 2 * n < n_texts}
    return found


def members_of(pack: AnyPack) -> list[tuple[Any, Any]]:
    """Return the packs of a group, or the pack, with the numbers of their probes."""
    if isinstance(pack, PackGroup):
        return list(zip(pack.packs.values(), pack.numbers, strict=True))
    return [(pack, np.arange(pack.n_probes))]


def shown_above(pack: AnyPack, concepts: Sequence[str], min_strength: float) -> Doubles | None:
    """Return the scores `[P]` over which concepts are shown; None for all that fire.

    `concepts`: only these and what is below them. Raises `ConfigError`, `UnknownConcept`.
    """
    if not 0 <= min_strength < math.inf:
        raise ConfigError(f"--min-strength is {min_strength:g}: give 0 or more")
    if not concepts and not min_strength:
        return None
    above = np.full(pack.n_probes, math.inf if concepts else -math.inf)
    if concepts:
        below = pack.tree.levels_below(pack.find_all(list(concepts)))
        above[[probe for level in below for probe in level]] = -math.inf
    if min_strength:
        for probe in np.flatnonzero((above < 0) & ~pack.alert_threshold.isnan().numpy()).tolist():
            above[probe] = score_of_strength(float(pack.alert_threshold[probe]), min_strength)
    return above


def check_watched(manager: DynamicProbeManager, concepts: Sequence[str]) -> None:
    """Raise `ConfigError` if a concept to show is not watched."""
    for concept in concepts:
        if names := names_left_out(manager.pack, manager.plan.watched, manager.pack.find_all(concept)):
            raise ConfigError(
                f"--concept {concept}: {names} is left out by the deployment, so that its silence says nothing: show"
                " another concept, or change `exclude`, `include` or `depth`"
            )


def score_of_strength(threshold: float, strength: float) -> float:
    """Return the score whose log odds exceed the threshold's by `strength`."""
    if not 0 < threshold < 1:
        return threshold
    return float(1 / (1 + np.exp(-(math.log(threshold) - math.log1p(-threshold) + strength))))


def stop_rules(pack: AnyPack, wanted: Sequence[str], aggregate: str = "none") -> list[StopRule]:
    """Parse "CONCEPT", "CONCEPT:STRENGTH", "CONCEPT:above=SCORE". Raises `ConfigError`, `UnknownConcept`.

    `aggregate`: compares single tokens by default, but concepts of a library by their running scores.
    """
    aggregator = parse(aggregate)
    if aggregator != Each() and not wanted:
        raise ConfigError(f"--aggregate {aggregate} is what --stop-on compares: give --stop-on too")
    running = {rule.probe: rule.aggregator for rule in running_rules(pack)} if aggregator == Each() else {}
    return [rule for text in wanted for rule in _rules_of(pack, text, aggregator, running)]


def _rules_of(pack: AnyPack, text: str, given: Aggregator, running: Mapping[int, Aggregator]) -> list[StopRule]:
    split = _STOP_ON.fullmatch(text)
    try:
        probes = pack.find_all(text)  # a name in a group of packs has a colon
    except UnknownConcept:
        value = None if split is None else _number(split["value"])
        if split is None:
            raise
        if value is None:
            pack.find_all(split["concept"])  # complain about an unknown concept first
            word, equals, _ = split["value"].partition("=")
            what = f"{word}= is not known here" if equals else f"{split['value']!r} is not a number"
            raise ConfigError(f"--stop-on {text}: {what}; give a strength, or above=SCORE") from None
        probes, above = pack.find_all(split["concept"]), value if split["above"] else None
        strength = 0.0 if split["above"] else value
    else:
        above, strength = None, 0.0
    compared = [(probe, running.get(probe, given)) for probe in probes]
    return [
        StopRule(probe, _bar(pack, probe, text, above, strength, aggregator), aggregator)
        for probe, aggregator in compared
    ]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _bar(
    pack: AnyPack, probe: int, text: str, user_score: float | None, strength: float, aggregator: Aggregator
) -> float:
    above = user_score
    if above is None:
        threshold = float(pack.thresholds_for(aggregator)[probe])
        if not 0 < threshold < 1:
            concept = pack.concepts[probe]["id"]
            raise ConfigError(
                f"--stop-on {text}: {concept} has no alert threshold that a score can exceed, so give"
                f" {concept}:above=SCORE"
            )
        above = score_of_strength(threshold, strength) if strength else threshold
    most = ceiling(with_counts(aggregator, pack, [probe]))
    if not 0 <= above < most:
        if user_score is None:
            raise ConfigError(f"--stop-on {text}: no score is {strength:g} over its threshold: give a lower strength")
        what = "score" if most == 1 else f"score on {aggregator}"
        raise ConfigError(f"--stop-on {text}: above={above:g} is not a {what}: give one from 0 to under {most:.6g}")
    return above


def scores_sink(path: Path | None) -> JsonLinesSink | None:
    """Return the sink of --out, or None. Raises `ConfigError`."""
    if path is None:
        return None
    if path.exists():
        raise ConfigError(f"--out {path} exists: give another name, or remove it")
    why = why_not_writable(path)
    if why:
        raise ConfigError(f"--out {path} cannot be made: {why}. Give another place")
    return JsonLinesSink(path)
