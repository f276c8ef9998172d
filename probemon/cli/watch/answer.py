"""The report of watch: `lines()` for people, `as_dict()` for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from probemon.cli.watch.live_view import name_of, printable
from probemon.cli.watch.rules import Showing, Watching
from probemon.core.aggregate import Each, Max
from probemon.core.baselines import is_of_traffic
from probemon.manager import DynamicProbeManager
from probemon.monitor.overhead import Overhead
from probemon.monitor.result import ConceptScore, Result, describe, firing, told_reasons, without_thresholds
from probemon.monitor.rules import Event
from probemon.monitor.summary import inside_words, summarise
from probemon.packs.group import PackGroup, never_fires, told_of_never
from probemon.tracking.recording import LAST
from probemon.util.counted import counted

_RULES_SHOWN = 3
_MOST_REASONS = 3


@dataclass(frozen=True)
class WatchAnswer:
    """An ended watch."""

    manager: DynamicProbeManager
    result: Result
    watching: Watching
    showing: Showing
    cost: Overhead | None
    audited: bool

    def lines(self) -> list[str]:
        """Return how it ended, counts, costs, and what silence means."""
        result, pack = self.result, self.manager.pack
        evaluated, active = self._per_token("evaluated"), self._per_token("active")
        lines = self._risen() + self._ending() + self._compared()
        lines += [
            (
                f"{counted(len(result), 'token')} ({int((result.phase == 1).sum())} generated),"
                f" {result.coverage.n_unseen} unseen{_why_unseen(result.coverage.unseen)}"
            ),
            (
                f"{counted(pack.n_probes, 'probe')}, {active:.0f} active and {evaluated:.0f} evaluated a token,"
                f" {int(result.coverage.dropped.sum())} dropped"
                + (f", {self._per_token('excluded'):.0f} excluded" if result.coverage.excluded.any() else "")
            ),
        ]
        if n_shed := int(np.count_nonzero(result.coverage.shed)):
            lines.append(f"less was scored than is watched at {counted(n_shed, 'token')}: a budget left it out")
        health = self.watching.health
        lines += [] if health is None else [str(check) for check in health.wrong]
        if self.audited:
            lines.append(f"audit: {result.audit}")
        return lines + self._cost_lines() + self._threshold_lines()

    def as_dict(self, **asked: Any) -> dict[str, Any]:
        """Return everything; `asked`: the request."""
        result, pack, cover = self.result, self.manager.pack, self.result.coverage
        evaluated, active = self._per_token("evaluated"), self._per_token("active")
        tokens = result.tokens_of(0, "generated")
        texts = result.texts(tokens)
        ends = np.cumsum([len(text) for text in texts]).tolist()
        hidden = [self.showing.brief and inside for inside in inside_words(texts)]
        return {
            **asked,
            "text": "".join(texts),
            "per_token": [
                {
                    **{name: value for name, value in result.where(token).items() if name != "token"},
                    "token": text,
                    "start": end - len(text),
                    "end": end,
                    "unseen": cover.unseen[token] or None,
                    "concepts": [] if hide else [_as_dict(concept) for concept in self._firing(token)],
                    "begin": [event.concept for event in self.watching.risen.get(int(result.position[token]), ())],
                    **({} if result.reads is None else {"reading": self._reading(token)}),
                }
                for token, text, end, hide in zip(tokens.tolist(), texts, ends, hidden, strict=True)
            ],
            "summary": self._summary(),
            "stopped": self._stopped(),
            "interrupted": self.watching.interrupted,
            "deployment": result.deployment,
            "events": [asdict(event) for event in self._of_rules()],
            "tokens": len(result),
            "generated_tokens": len(tokens),
            "unseen_tokens": cover.n_unseen,
            "probes_total": pack.n_probes,
            "probes_evaluated_per_token": round(evaluated, 2),
            "probes_active_per_token": round(active, 2),
            "dropped": int(cover.dropped.sum()),
            "excluded": int(cover.excluded.sum()),
            "shed": int(cover.shed.sum()),
            "audit": result.audit.as_dict() if self.audited else None,
            "probes_without_threshold": int(pack.alert_threshold.isnan().sum()),
            "probes_that_never_fire": len(never_fires(pack)),
            "alert_set": pack.alert_set,
            "probes_ranked": int(without_thresholds(pack).sum()),
            "health": None if self.watching.health is None else self.watching.health.as_dict(),
            "measured": self._measured(),
        }

    def _per_token(self, count: str) -> float:
        cover = self.result.coverage
        return float(getattr(cover, count)[cover.seen].mean())

    def _reading(self, token: int) -> list[dict[str, Any]]:
        """Return each memory's reading at a token; None for a weight that is not finite."""
        readings = self.result.reading(token)
        return [{**asdict(one), "weight": one.weight if math.isfinite(one.weight) else None} for one in readings]

    def _firing(self, token: int) -> list[ConceptScore]:
        """Return the shown concepts that fire at a token, strongest first."""
        pack, where = self.manager.pack, self.result.where(token)
        scores = firing(self.result.scores, token, self.showing.above)
        concepts = [describe(pack, probe, score, **where) for probe, score in scores.items()]
        return sorted(concepts, key=lambda concept: (-concept.strength, concept.probe))

    def _summary(self) -> dict[str, Any]:
        summed = summarise(
            self.result, k=self.manager.pack.n_probes, above=self.showing.above, word_ends=self.showing.brief
        )
        ends = np.cumsum([len(sentence.text) for sentence in summed.sentences]).tolist()
        return {
            "thresholds": summed.thresholds,
            "unlike": summed.unlike,
            "concepts": [_as_dict(concept, at=True) for concept in summed.answer.concepts],
            "sentences": [
                {
                    "text": sentence.text,
                    "start": end - len(sentence.text),
                    "end": end,
                    "positions": [sentence.start, sentence.stop],
                    "unseen_tokens": sentence.n_unseen,
                    "concepts": [_as_dict(concept, at=True) for concept in sentence.concepts],
                }
                for sentence, end in zip(summed.sentences, ends, strict=True)
            ],
        }

    def _stopped(self) -> dict[str, Any] | None:
        event = self.watching.met
        if event is None:
            return None
        token = self.result.where(self.result.at(event.row, event.column))
        concept = describe(self.manager.pack, self.manager.pack.find(event.concept), event.score, **token)
        compared = {"aggregate": event.aggregate, "value": event.value, "above": event.above}
        return {**_as_dict(concept, at=True), **compared, "blind": event.blind or None}

    def _of_rules(self) -> list[Event]:
        """Return the events of rules, without those of what is shown."""
        shown = {id(event) for event in self.watching.shown_only}  # a rule's event may equal one of them
        return [event for event in self.watching.events if id(event) not in shown]

    def _risen(self) -> list[str]:
        """Say whose running score rose over its threshold, and where first."""
        if not self.watching.running:
            return []
        first, told = dict[int, list[str]](), set[str]()
        for column, events in sorted(self.watching.risen.items()):
            for event in events:
                if event.concept not in told:
                    told.add(event.concept)
                    first.setdefault(column, []).append(name_of(event, brief=False, packs=not self.showing.brief))
        lines = []
        for column, names in first.items():
            token = printable(self.result.where(self.result.at(0, column))["token"])
            lines.append(f"from {token!r}, position {column}: {', '.join(names)}")
        n = counted(len(self.watching.running), "concept")
        return lines or [
            f"none of {n} that are read by running scores rises far enough over its threshold in the answer"
        ]

    def _ending(self) -> list[str]:
        lines = ["interrupted: the text so far is above"] if self.watching.interrupted else []
        stopped = self._stopped()
        if stopped is not None:
            what = "scored" if stopped["aggregate"] == "each" else f"had a running score ({stopped['aggregate']}) of"
            reason = f"{what} {', over '.join(apart(stopped['value'], stopped['above']))}"
            if stopped["blind"]:
                reason = f"is not known there: {stopped['blind']}"
            lines.append(
                f"stopped at {printable(stopped['token'])!r}, position {stopped['position']}:"
                f" {' > '.join(stopped['path'])} {reason}"
            )
        elif not self.watching.interrupted:
            lines += self._not_met()
        if self.manager.deployment is not None:
            lines += self._events()
        if self.watching.n_dropped:
            lines.append(
                f"missing in the scores written: {counted(self.watching.n_dropped, 'token')}, which came too fast"
            )
        return lines

    def _events(self) -> list[str]:
        assert self.manager.deployment is not None
        events = self._of_rules()
        name = self.manager.deployment.name
        lines = [f"{name}: {len(events)} event{'s' * (len(events) != 1)} of rules"]
        for event in events[:_RULES_SHOWN]:
            at = f"position {event.column}"
            if event.blind:
                lines.append(f"  {event.name} not known at {at}: {event.blind}")
            else:
                value, above = apart(event.value, event.above)
                ruled = "" if event.verdict is None else f": {event.verdict}"
                lines.append(f"  {' > '.join(event.path)} {value}, over {above}, at {at}{ruled}")
        return lines + [f"  and {len(events) - _RULES_SHOWN} more"] * (len(events) > _RULES_SHOWN)

    def _not_met(self) -> list[str]:
        tokens, lines = self.result.tokens_of(0, "generated"), []
        if not len(tokens):
            return []
        for rule in self.watching.rules:
            name = self.manager.pack.concepts[rule.probe]["name"]
            if is_of_traffic(rule.aggregator):
                lines.append((math.inf, f"--stop-on: {name} was not met by {rule.aggregator}"))
                continue
            running = self.result.aggregate(rule.probe, rule.aggregator)
            if not len(running.values):
                lines.append((math.inf, f"--stop-on: {name} was compared at no token, since none was scored"))
                continue
            has_value = ~np.isnan(running.values)  # a z-score needs earlier tokens
            best = int(np.argmax(np.where(has_value, running.values, -np.inf)))
            score = float(running.values[best])
            token = self.result.where(self.result.at(0, int(running.positions[best])))
            at = f"at {printable(token['token'])!r}, position {token['position']}" if score else "at any token seen"
            what = "scored" if rule.aggregator == Each() else f"had a running score ({rule.aggregator}) of"
            score_text, above = apart(score, rule.above)
            line = f"--stop-on: {name} was not met; it {what} at most {score_text} {at}, and takes over {above}"
            if not has_value.any():
                line = f"--stop-on: {name} was not met; there were too few tokens for {rule.aggregator}"
            lines.append((rule.above - score if has_value.any() else math.inf, line))
        rest = [f"and {len(lines) - _RULES_SHOWN} more of --stop-on were not met"] if len(lines) > _RULES_SHOWN else []
        return [line for _, line in sorted(lines)[:_RULES_SHOWN]] + rest

    def _compared(self) -> list[str]:
        pack, each = self.manager.pack, [rule.probe for rule in self.watching.rules if rule.aggregator == Each()]
        packs = [pack.pack_of(probe) if isinstance(pack, PackGroup) else pack for probe in each]
        aggregates = sorted({name for one in packs for name in one.aggregated if name != str(Max())})
        if not aggregates:
            return []
        names = ", ".join(f"--aggregate {name}" for name in aggregates)
        return [f"--stop-on compared single tokens; for running scores the pack has other thresholds: {names}"]

    def _cost_lines(self) -> list[str]:
        measured, cost = self._measured(), self.cost
        if measured is None or cost is None:
            return []
        strategy = self.manager.strategy
        return [
            f"kernel: {self.manager.impl} ({self.manager.impl_why})",
            f"strategy: {strategy.step} for a token, {strategy.batch} for a prompt: {strategy.why}",
            (
                f"host {cost.host_ms:.1f} ms a token; watching adds {cost.added_ms:.2f} ms ({cost.overhead_pct:+.1f} %,"
                f" 95 % interval {cost.interval_pct[0]:+.1f} to {cost.interval_pct[1]:+.1f}"
                f"{'' if cost.is_resolved else ', wide: other work runs at the same time'};"
                f" {cost.monitor_ms:.2f} ms inside our hooks; medians of {cost.n_steps} pairs of steps)"
            ),
        ]

    def _measured(self) -> dict[str, Any] | None:
        if self.cost is None:
            return None
        return {
            "kernel": self.manager.impl,
            "strategy": {"token": self.manager.strategy.step, "prompt": self.manager.strategy.batch},
            "host_ms_per_token": round(self.cost.host_ms, 3),
            "monitor_ms_per_token": round(self.cost.monitor_ms, 3),
            "added_ms_per_token": round(self.cost.added_ms, 3),
            "overhead_pct": round(self.cost.overhead_pct, 2),
            "overhead_interval_pct": [round(end, 2) for end in self.cost.interval_pct],
            "is_resolved": self.cost.is_resolved,
        }

    def _threshold_lines(self) -> list[str]:
        pack, lines = self.manager.pack, list[str]()
        n_mute = int(pack.alert_threshold.isnan().sum())
        if n_mute < pack.n_probes:
            shown = pack.packs["nouns"] if self.showing.brief and isinstance(pack, PackGroup) else pack
            by = f"by its set {shown.alert_set}" if shown.alert_set else "which the pack's card describes"
            levels = any(concept.get("alert_threshold_of") == "its level" for concept in pack.concepts)
            rare = "; for a rare concept, that of its level" if levels else ""
            if self.watching.risen:
                lines.append(
                    '"from": there the concept\'s running score, of the last tokens, rises far enough over its'
                    " threshold (docs/library.md)."
                )
            lines.append(
                f'A concept shown is over its alert threshold, {by}. "right": share of its fires that were right on'
                f" the calibration text{rare}."
                if not np.isnan([pack.precision(probe) for probe in range(pack.n_probes)]).all()
                else f"A concept shown is over its alert threshold, {by}; false alarms are expected, at the rate that"
                " the card states."
            )
        n_ranked = int(without_thresholds(pack).sum())
        if n_ranked:
            lines.append(
                f"{n_ranked} of {pack.n_probes} probes are of packs without any alert threshold: their concepts"
                " are shown by rank, which does not say that they are there. probemon calibrate sets thresholds"
            )
        if n_mute > n_ranked:
            lines.append(
                f"{n_mute - n_ranked} of {pack.n_probes} probes have no alert threshold, so that they are never shown,"
                " whatever they score: probemon calibrate sets one"
            )
        if never := told_of_never(pack):
            lines.append(never)
        above = self.showing.above
        if self.showing.asked and above is not None:
            n_shown = int((above < np.inf).sum()) + len(self.showing.running)
            lines.append(
                f"{n_shown} of {counted(pack.n_probes, 'concept')} {'is' if n_shown == 1 else 'are'} shown:"
                " those of --concept, and what is below them."
            )
        if self.showing.brief and not self.showing.asked:
            lines.append(
                "Not shown: roots, what most texts are (english), and words before their end; all nouns: probemon watch"
                " demo demo"
            )
        if above is not None and np.isfinite(above).any():
            lines.append("Concepts that fire with less than --min-strength are not shown.")
        return lines


def _why_unseen(unseen: Sequence[str]) -> str:
    words = ["the last one generated is never run by the host"] if LAST in unseen else []
    words += told_reasons([reason for reason in unseen if reason != LAST], _MOST_REASONS)
    return f" ({'; '.join(words)})" if words else ""


def apart(*numbers: float) -> list[str]:
    """Format numbers with three decimals, or more to tell them apart."""
    least = min((abs(number) for number in numbers if number and math.isfinite(number)), default=1.0)
    first = max(3, min(9, 1 - math.floor(math.log10(least))))
    for decimals in range(first, 10):
        texts = [f"{number:.{decimals}f}" for number in numbers]
        if len(set(texts)) == len(set(numbers)):
            break
    return texts


def _as_dict(concept: ConceptScore, *, at: bool = False) -> dict[str, Any]:
    """Return a concept for JSON; `at`: with its token."""
    content = {
        "concept": concept.concept,
        "name": concept.name,
        "path": list(concept.path),
        "level": concept.level,
        "score": concept.score,
        "threshold": concept.threshold,
        "strength": concept.strength,
        "precision": concept.precision,
    }
    return content | ({"position": concept.position, "token": concept.token} if at else {})
