"""RuleSpec: a rule as users write it.

spec = RuleSpec("weapon", above=0.9, for_tokens=3, action="stop")
spec = RuleSpec.from_dict({"all_of": ["weapon", "crime"], "within": "prompt", "action": "record"})
rules = spec.rules(pack)                  # one for each matching concept
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from probemon.core.aggregate import Aggregator, named
from probemon.core.baselines import ceiling, with_counts
from probemon.core.concept_names import Wanted
from probemon.core.scores import PHASES
from probemon.errors import ConfigError, RuleError, closest
from probemon.monitor.rules import ACTIONS, PASS, Action, AskedAction, check_above, named_action
from probemon.packs.group import AnyPack, PackGroup, trained_score
from probemon.packs.strength import in_short
from probemon.util.checks import check_count, check_number, check_text, is_int

# The phases of the tokens that a rule applies to.
WITHIN = {
    **{"answer": ("generated",), "reasoning": ("generated",), "reply": ("generated",)},
    **{"prompt": ("prompt",), "any": ("prompt", "generated")},
}
_REASONS = {"reasoning": True, "reply": False}  # parts of an answer
TRAINED = "trained"  # of `aggregate`: the running score that the pack names for the concept
_CONCEPT = {"type": "string", "minLength": 1, "pattern": r"\S"}


class RuleFields(TypedDict, total=False):
    """The fields of a `RuleSpec`, for `run.on(concept, **fields)`."""

    all_of: Sequence[str | int]
    above: float | None
    for_tokens: int
    aggregate: str | Aggregator | None
    within: str
    action: Action
    on_blind: Action
    alert_set: str | None
    rate: float | None


class Condition(NamedTuple):
    """The running value of a concept's score exceeds `above`."""

    probe: int
    above: float
    aggregator: Aggregator


@dataclass(frozen=True)
class Rule:
    """A rule of one pack; `also`: the other concepts of `all_of`."""

    probe: int
    above: float
    for_tokens: int
    aggregator: Aggregator
    action: Action
    alert_set: str | None = None
    on_blind: Action = PASS
    within: str = "answer"
    also: tuple[Condition, ...] = ()

    @property
    def actions(self) -> tuple[Action, ...]:
        """Return `action` and `on_blind`."""
        return self.action, self.on_blind

    @property
    def probes(self) -> tuple[int, ...]:
        """Return the probes that it compares."""
        return self.probe, *(condition.probe for condition in self.also)

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """Return their aggregators."""
        return self.aggregator, *(condition.aggregator for condition in self.also)

    def asks(self, phase: int) -> bool:
        """True if it applies to a phase of `PHASES`."""
        return PHASES[phase] in WITHIN[self.within]

    @property
    def reasons(self) -> bool | None:
        """True if it applies to reasoning alone, False if to the reply alone, else None."""
        return _REASONS.get(self.within)

    def event_fields(self, pack: AnyPack) -> dict[str, Any]:
        """Return its part of an `Event`."""
        return {
            "above": self.above,
            "for_tokens": self.for_tokens,
            "aggregate": str(self.aggregator),
            "alert_set": self.alert_set,
            "also": tuple(pack.concepts[condition.probe]["id"] for condition in self.also),
        }

    def as_dict(self, pack: AnyPack) -> dict[str, Any]:
        """Return it for JSON."""
        fields = self.event_fields(pack)
        return {
            "concept": pack.concepts[self.probe]["id"],
            **{**fields, "also": list(fields["also"])},
            "within": self.within,
            "action": named_action(self.action),
            "on_blind": named_action(self.on_blind),
        }

    def in_words(self) -> tuple[str, str]:
        """Return its threshold and number of tokens, for a table."""
        aggregate = "" if str(self.aggregator) == "each" else f" of {self.aggregator}"
        alert_set = f" ({self.alert_set})" if self.alert_set else ""
        part = {"answer": "", "any": " of any part", "reasoning": " of reasoning"}.get(
            self.within, f" of the {self.within}"
        )
        others = f", and {len(self.also)} more at once" if self.also else ""
        over = f"{in_short(self.above, '.3g')}{aggregate}{alert_set}{others}"
        return over, f"{self.for_tokens} token{'s' * (self.for_tokens > 1)}{part}"


def _field(default: Any, description: str, **schema: Any) -> Any:
    return field(default=default, metadata={"schema": {"description": description, **schema}})


@dataclass(frozen=True)
class RuleSpec:
    """Acts when a concept scores over `above` at `for_tokens` successive tokens; again only after a seen token at or
    below it.

    - `concept`: a name, id, number, list of these, or pattern (`re.compile(...)`, text with `*`): a rule for each match
    - `all_of`: instead, two or more concepts over their thresholds at one token; the event is of the first
    - `above`: default: the alert threshold, of `alert_set` or of the set rate_ and `rate` if given
    - `aggregate`: compare a running score: "mean", "max", "attention", "ema:0.3", ... or one of
      `probemon.core.aggregate`; "trained": that for which the concept was trained
    - `within`: tokens of the "answer", the "prompt" or "any"; of the answer, "reasoning" or the "reply" alone, which
      `probemon.host.reasoning_marks` tells apart
    - `action`: "stop" ends the row, after the token sampled meanwhile; "raise" ends `generate` with `ConceptRaised`;
      "record" only adds to `run.events`; a callable takes the `Event`; `Escalate` asks a judge
    - `on_blind`: action at a token without scores (`on_gap="report"`), or "pass"

    Raises `RuleError`, which names the field.
    """

    concept: Wanted | None = _field(None, "A name, an id, or a pattern with *: a rule for each concept.", **_CONCEPT)
    all_of: Sequence[str | int] = _field(
        (),
        "Concepts that have to score over the threshold at the same token.",
        type="array",
        minItems=2,
        items=_CONCEPT,
    )
    above: float | None = _field(None, "The threshold. Default: the pack's alert threshold.", type="number", minimum=0)
    alert_set: str | None = _field(
        None,
        "The set whose alert thresholds are taken, instead of the one in force.",
        type="string",
        minLength=1,
    )
    rate: float | None = _field(
        None,
        "The alert set by its rate of false alarms: the set that is called rate_ and this number.",
        type="number",
        exclusiveMinimum=0,
        exclusiveMaximum=1,
    )
    aggregate: str | Aggregator | None = _field(
        None,
        "Compare a running score: mean, max, attention, ema:0.3, rolling_mean:8, rolling_max:8, rolling_logit:16;"
        " trained: that for which the concept was trained; or"
        " how unusual it is: z:pack, rank:pack, z:last:256, rank:last:256, z:traffic:4096, rank:traffic:4096.",
        type="string",
        minLength=1,
    )
    for_tokens: int = _field(1, "The number of tokens in a row.", type="integer", minimum=1)
    within: str = _field(
        "answer",
        "The tokens that it applies to: the answer, its reasoning alone, its reply alone, the prompt, or any.",
        enum=list(WITHIN),
    )
    action: Action = _field(
        "stop",
        "record: an event only. stop: end the answer. raise: end generate() with an error.",
        enum=list(ACTIONS),
    )
    on_blind: Action = _field(
        PASS,
        "The action at a token whose scores are not known. pass: nothing.",
        enum=[PASS, *ACTIONS],
    )

    def __post_init__(self) -> None:
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is defaults[name] or (isinstance(value, tuple) and not value):
                continue
            with _errors_of(name):
                object.__setattr__(self, name, check(name, value))
        if self.above is not None:
            aggregator = named(None if self.aggregate == TRAINED else self.aggregate)
            with _errors_of("above"):
                object.__setattr__(self, "above", check_above(aggregator, self.above, ceiling(aggregator)))
        if self.concept is None and not self.all_of:
            raise RuleError("concept is missing: give an id, a name or a pattern, or two or more in all_of", "concept")
        if self.concept is not None and self.all_of:
            raise RuleError("all_of and concept are both given: give one of them", "all_of")
        sources = [name for name in ("above", "alert_set", "rate") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise RuleError(f"{sources[1]} and {sources[0]} are both given: give one of them", sources[1])

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], **more: Any) -> RuleSpec:
        """Return the rule of a dict and other fields, `more`. Raises `RuleError`."""
        if not isinstance(given, Mapping):
            raise RuleError(f"a rule is {given!r:.60}: give a mapping of {', '.join(FIELDS)}")
        for name in (*given, *more):
            if name not in FIELDS:
                fields = ", ".join(FIELDS)
                raise RuleError(f"a rule has no {name!r:.60}{closest(str(name), FIELDS)}: it has {fields}", str(name))
        return cls(**{**given, **more})

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON, without defaults. Raises `RuleError` for what JSON cannot hold: callables, patterns."""
        fields = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                fields[one.name] = value = str(value) if isinstance(value, Aggregator) else value
                if callable(value) or isinstance(value, (AskedAction, re.Pattern)):
                    raise RuleError(f"{one.name} is {value!r:.80}, which JSON cannot hold: give a text", one.name)
        return fields

    @classmethod
    def schema(cls, without: Sequence[str] = (), required: Sequence[str] = ()) -> dict[str, Any]:
        """Return the JSON Schema of the dict."""
        fields = {one.name: dict(one.metadata["schema"]) for one in dataclasses.fields(cls)}
        for one in dataclasses.fields(cls):
            if isinstance(one.default, (str, int)):
                fields[one.name]["default"] = one.default
        return {
            "type": "object",
            "additionalProperties": False,
            "required": list(required),
            "properties": {name: schema for name, schema in fields.items() if name not in without},
            "if": {"required": ["aggregate"], "properties": {"aggregate": {"pattern": r"^\s*z:"}}},
            "else": {
                "properties": {
                    "above": {"description": "Less than 1, unless aggregate is a z-score.", "exclusiveMaximum": 1}
                }
            },
            "dependentSchemas": {
                "above": {"properties": {"alert_set": False, "rate": False}},
                "alert_set": {"properties": {"rate": False}},
                "all_of": {"properties": {"concept": False}},
            },
        }

    @property
    def listed(self) -> tuple[Any, ...]:
        """Return the concepts that a list names."""
        return (*(self.concept if isinstance(self.concept, list) else ()), *self.all_of)

    def _with_alert_set(self, pack: AnyPack) -> AnyPack:
        field, name = "alert_set", self.alert_set
        if self.rate is not None:
            field, name = "rate", f"{self.rate:g}"
            name = f"rate_{name if float(name) == self.rate else repr(self.rate)}"
        with _errors_of(field):
            return pack if name is None else pack.with_alert_set(name)

    def rules(self, pack: AnyPack) -> list[Rule]:
        """Return a rule for each matching concept, or one for `all_of`. Raises `UnknownConcept`, and `ConfigError` if
        there is no threshold.
        """
        chosen = self._with_alert_set(pack)
        probes = [chosen.find(one) for one in self.all_of] if self.concept is None else chosen.find_all(self.concept)
        if len(set(probes)) < len(self.all_of):
            raise RuleError("all_of names a concept twice: give each once", "all_of")
        # An aggregator that compares with the pack's counts needs those of its concept.
        with _errors_of("aggregate"):
            aggregators = [with_counts(self._aggregator(chosen, probe), chosen, [probe]) for probe in probes]
        conditions = []
        for probe, aggregator in zip(probes, aggregators, strict=True):
            with _errors_of("above"):
                level = float(chosen.thresholds_for(aggregator)[probe]) if self.above is None else self.above
            if self.above is None and not level < 1:  # NaN: not calibrated; 1: no threshold met the rate
                raise RuleError(
                    f"{chosen.concepts[probe]['id']} has no alert threshold in {chosen.name} for {aggregator} that a"
                    f" score can exceed ({level}): give above=",
                    "above",
                )
            with _errors_of("above"):
                check_above(aggregator, level, ceiling(aggregator))
            conditions.append(Condition(probe, level, aggregator))
        uses_set = self.above is None and all(str(aggregator) == "each" for aggregator in aggregators)
        parts = [conditions] if self.concept is None else [[condition] for condition in conditions]
        return [
            Rule(
                first.probe,
                first.above,
                self.for_tokens,
                first.aggregator,
                self.action,
                _set_of(chosen, first.probe) if uses_set else None,
                self.on_blind,
                self.within,
                tuple(others),
            )
            for first, *others in parts
        ]

    def _aggregator(self, pack: AnyPack, probe: int) -> Aggregator:
        if self.aggregate != TRAINED:
            return named(self.aggregate)
        trained = trained_score(pack, probe)
        if trained is None:
            raise ConfigError(
                f"aggregate is {TRAINED!r}, and the pack of {pack.concepts[probe]['id']} names no running score for it:"
                " give one, such as ema:0.3"
            )
        return trained


@contextmanager
def _errors_of(field: str) -> Iterator[None]:
    """Make errors of the block those of a field."""
    try:
        yield
    except RuleError:
        raise
    except ConfigError as error:
        raise RuleError(str(error), field) from None


def _check_concept(name: str, value: Any) -> Any:
    """Return a concept, a pattern, or a list of these, as `Names.find_all` takes them."""
    if isinstance(value, (list, tuple, set, frozenset)) and value:
        return [_check_concept(name, one) for one in value]
    return value if isinstance(value, re.Pattern) else _check_one(name, value)


def _check_one(name: str, value: Any) -> str | int:
    if isinstance(value, str) and value.strip():
        return value
    if is_int(value):
        return int(value)
    raise ConfigError(f"{name} is {value!r:.80}: give an id, a name or a number")


def _check_all_of(name: str, value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise ConfigError(f"{name} is {value!r:.80}: give a list of two concepts or more")
    return tuple(_check_one(name, one) for one in value)


def _check_rate(name: str, value: Any) -> float:
    remedy = "it is a rate of false alarms, so give more than 0 and less than 1"
    return check_number(name, value, low=0, open_low=True, high=1, open_high=True, remedy=remedy)


def _check_for_tokens(name: str, value: Any) -> int:
    remedy = "it counts tokens in a row, so give 1 or more"
    return check_count(name, value, least=1, most=2**31, remedy=remedy)


def _check_aggregate(name: str, value: Any) -> Any:
    if value != TRAINED:
        named(value)  # raises
    return value


def _check_within(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in WITHIN:
        raise ConfigError(f"{name} is {value!r:.80}: give {', '.join(map(repr, WITHIN))}")
    return value


def _check_action(name: str, value: Any) -> Any:
    actions = (*ACTIONS,) if name == "action" else (PASS, *ACTIONS)
    if (isinstance(value, str) and value in actions) or isinstance(value, AskedAction) or callable(value):
        return value
    hint = " (run.hold wraps a streamer)" if name == "action" else ""
    choices = ", ".join(map(repr, actions))
    raise ConfigError(f"{name} is {value!r:.80}: give {choices}, an Escalate or a callable that takes the event{hint}")


_CHECKS: dict[str, Any] = {
    "concept": _check_concept,
    "all_of": _check_all_of,
    "alert_set": check_text,
    "rate": _check_rate,
    "aggregate": _check_aggregate,
    "for_tokens": _check_for_tokens,
    "within": _check_within,
    "action": _check_action,
    "on_blind": _check_action,
}
FIELDS = tuple(one.name for one in dataclasses.fields(RuleSpec))


def _set_of(pack: AnyPack, probe: int) -> str | None:
    """Return the alert set in force in a probe's pack."""
    alert_set = pack.alert_set
    return pack.pack_of(probe).alert_set if alert_set and isinstance(pack, PackGroup) else alert_set
