"""Fits the library to a model, and keeps what holds on it.

    fitted = fit("demo", "my-concepts/", concepts=["safety", "topic/society"])
    fitted.of["threat"]             # Verdict(group="warned", reasons=...)

A concept is kept by four figures, all of probes that did not see the text or its kind (`Bars`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from probemon.core.aggregate import Max
from probemon.core.hierarchy import Mask
from probemon.core.score_counts import log_odds
from probemon.errors import ConfigError, TrainingError
from probemon.host.loading import load_model
from probemon.lab.library.library import Library, LibraryConcept
from probemon.lab.training.dataset import ORDINARY, OWN
from probemon.lab.training.evaluation import share
from probemon.lab.training.example_files import Source, read_rows
from probemon.lab.training.examples import Examples, read_examples
from probemon.lab.training.measured import TrainingMeasurement
from probemon.lab.training.settings import TrainingSettings
from probemon.lab.training.state_store import held
from probemon.lab.training.trainer import Kept, Trained, TrainingJob, check_report, model_name
from probemon.packs.files import check_target

WORKS, WARNED, MISSING = "works", "warned", "missing"
N_ORDINARY, CARRIED, PAIRS = 560, 1_000, 40  # texts; pairs of an author and concept
SHOWN_WRONGLY = 0.02  # of ordinary texts, by any concept
_MORE = 4  # texts
YOURS = "yours"  # the author of added rows
_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Bars:
    """What a concept must reach to be kept.

    - `ordinary`: AUROC of its texts against ordinary text; `found`: the share of them over the threshold of one alarm
      in 100 ordinary texts
    - `long`: AUROC of its texts, after other text, against ordinary text; missed where all of its interval is below,
      as few texts stand there, and not asked of concepts of whole texts
    - `near`: AUROC against its near cases; from `warned` on it is kept with a warning, and so it is without any
    """

    ordinary: float = 0.95
    found: float = 0.5
    long: float = 0.85
    near: float = 0.7
    warned: float = 0.6


@dataclass(frozen=True)
class Verdict:
    """`group`: `WORKS`, `WARNED` or `MISSING`; `reasons`: what it misses."""

    group: str
    reasons: Sequence[str] = ()


@dataclass(frozen=True)
class Fitted:
    """The pack, the verdict of each concept, and the quality of all of them, also of those left out."""

    trained: Trained
    of: Mapping[str, Verdict]
    quality: Mapping[str, Any] = field(repr=False)


def fit(
    model: Any,
    out: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    library: Library | None = None,
    concepts: Sequence[str] = (),
    languages: Sequence[str] = (),
    pairs: int = PAIRS,
    add: Source | Sequence[str | os.PathLike[str]] | None = None,
    settings: TrainingSettings | None = None,
    bars: Bars | None = None,
    name: str | None = None,
    model_id: str | None = None,
    overwrite: bool = False,
    report: str | os.PathLike[str] | None = None,
    outside: Sequence[Mapping[str, Any]] = (),
    see: Callable[[TrainingMeasurement], object] = lambda measurement: None,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], object] = lambda n, total: None,
) -> Fitted:
    """Train the library's concepts on a model, and write those that hold to the folder `out`.

    - `concepts`: ids, families or domains, by default all; `languages`: of the texts, such as "en"
    - `pairs`: at most so many of each author and concept; 0 for all, which takes longer
    - `add`: rows of your own, as `train` takes them, of these concepts or of new ones
    - `settings`: else `fit_settings()`
    - `outside`: rows that only test; `see` gets the whole measurement

    Raises `TrainingError`, also if no concept holds, `ConfigError`, `PackError`.
    """
    library = Library.open() if library is None else library
    settings = fit_settings() if settings is None else settings
    bars = Bars() if bars is None else bars
    target = check_target(Path(out), overwrite)
    if report is not None:
        check_report(Path(report), target)
    ids = [id for id in library.chosen(concepts) if not languages or library.has_texts(id, languages)]
    if not ids:
        raise TrainingError(f"no chosen concept has texts in {', '.join(languages)}: choose others (library list)")
    examples = examples_of(library, ids, languages, add, pairs=pairs)
    if isinstance(model, str):
        model_id = model_id or model
        model, tokenizer = load_model(model, "cpu", say)
    if tokenizer is None:
        raise ConfigError("tokenizer is missing: give it with a model that is loaded already")
    job = TrainingJob(model, tokenizer, settings, target, say, progress)
    tests = read_examples(list(outside), like=examples) if outside else None
    data = job.dataset(examples, tests, read=_read(library, list(examples.concepts)))
    verdicts: dict[str, Verdict] = {}
    whole: dict[str, Any] = {}

    def keep(measurement: TrainingMeasurement, quality: Mapping[str, Any]) -> Kept:
        from probemon.lab.library.card import library_card

        see(measurement)
        for p, (id, found) in enumerate(quality["concepts"].items()):
            found["added"] = _of_added(measurement, p)
            verdicts[id] = judge_concept(found, library.concepts.get(id), bars)
        whole.update(quality)
        places = [p for p, id in enumerate(quality["concepts"]) if verdicts[id].group != MISSING]
        if not places:
            raise TrainingError(
                f"no concept of {len(verdicts)} holds on this model: {_first_reasons(verdicts)}. Try other layers"
                " (--layers) or a larger model"
            )
        kept = {id: found for id, found in quality["concepts"].items() if verdicts[id].group != MISSING}
        text = library_card(name or target.name, library, quality, verdicts, bars, model_name(model_id or ""))
        of_library = {
            "name": library.about["name"],
            "version": library.about["version"],
            "shown_over": shown_over(measurement, places),
        }
        # Many concepts are shown at once, so a token is compared at a rate by text, not by token.
        by_text = {f"texts_{settings.fpr:g}": measurement.aggregated[str(Max())].numpy()}
        alert_sets = {**by_text, **measurement.alert_sets}
        written = {**quality, "concepts": kept, "library": of_library, "alert_sets": list(alert_sets)}
        return Kept(places, text, written, alert_sets)

    with held(settings.folder(target)):
        trained = job.finish(
            data,
            model_name(model_id or ""),
            name or target.name,
            library.about["licence"],
            overwrite,
            report,
            keep,
        )
    return Fitted(trained, verdicts, whole)


def fit_settings(**options: Any) -> TrainingSettings:
    """Return settings for the library: turns of both sides count, and fewer texts stand in carriers."""
    return TrainingSettings(**{"ordinary": N_ORDINARY, "carried": CARRIED, "roles": _ROLES, **options})


def examples_of(
    library: Library,
    ids: Sequence[str],
    languages: Sequence[str] = (),
    add: Source | Sequence[str | os.PathLike[str]] | None = None,
    *,
    pairs: int = 0,
) -> Examples:
    """Return the library's examples of these concepts, with rows of one's own."""
    rows = [*_declared(library, ids), *library.rows(ids, languages, pairs=pairs)]
    if add is not None:
        added = [{**row, "author": YOURS} for _, row in read_rows(add)]
        if not added:
            raise TrainingError("the added file has no rows: give texts with labels, or leave it out")
        rows += added
    examples = read_examples(rows)
    known = examples.known()
    without = [id for p, id in enumerate(examples.concepts) if not (known[:, p] == 1).any()]
    if without:
        raise TrainingError(f"no text in the languages {', '.join(languages)} has {without[0]!r}: choose others")
    return examples


def _declared(library: Library, ids: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Yield the concepts as rows, so that they stand in the library's order, with their definitions."""
    for id in ids:
        concept = library.concepts[id]
        yield {"id": id, "name": f"{concept.path}/{concept.name}", "definition": concept.definition, "examples": []}


def _read(library: Library, ids: Sequence[str]) -> dict[str, dict[str, bool | None]] | None:
    """Return which of these concepts stand in ordinary texts (`ordinary`'s `read`); None if nobody read any."""
    found: dict[str, dict[str, bool | None]] = {}
    for (kind, number), (present, unsure) in library.of_ordinary.items():
        told: dict[str, bool | None] = {id: True for id in present if id in ids}
        told |= {id: None for id in unsure if id in ids}
        found[f"ordinary {kind} {number}"] = told
    return found or None


def judge_concept(found: Mapping[str, Any], concept: LibraryConcept | None, bars: Bars) -> Verdict:
    """Judge the quality of a concept by bars; one that is not the library's counts as one of a span."""
    reasons = []
    if (found["against_ordinary"]["auroc"] or 0) < bars.ordinary:
        reasons.append(f"against ordinary text {_number(found['against_ordinary']['auroc'])}")
    if (found["found"]["rate"] or 0) < bars.found:
        reasons.append(f"finds {found['found']['count']} of {found['found']['n']}")
    long = found["carried_against_ordinary"]
    if long["high"] is not None and long["high"] < bars.long and (concept is None or concept.reading == "span"):
        reasons.append(f"in other text {long['auroc']:.2f}")
    near = found["near"]["auroc"]
    if near is not None and near < bars.warned:
        reasons.append(f"near cases {near:.2f}")
    if reasons:
        return Verdict(MISSING, reasons)
    if near is None:
        return Verdict(WARNED, ["no near cases"])
    return Verdict(WORKS) if near >= bars.near else Verdict(WARNED, [f"near cases {near:.2f}"])


def shown_over(
    measurement: TrainingMeasurement, places: Sequence[int], rate: float = SHOWN_WRONGLY
) -> dict[str, float]:
    """Return by how much, in log odds, running scores must exceed their thresholds so that this share of ordinary texts
    shows any of these concepts wrongly. Each threshold alone lets through one in a hundred, so all of them many.

    What ordinary text has seldom must exceed it further: to the score's log odds is added the log of the share of
    ordinary texts that have the concept (Bayes' rule), with `_MORE` texts more on either side. All sums have one limit.
    """
    data, ordinary = measurement.data, measurement.data.is_of(ORDINARY)
    most, rarity = np.full(len(data.texts), -np.inf), dict[int, float]()
    for p in places:
        threshold, scores = float(np.float32(measurement.text_rate(p).threshold)), measurement.score(p)
        known = data.judged[ordinary, p]
        n_with, n_without = (int((known == side).sum()) for side in (1, 0))
        rarity[p] = float(np.log((n_with + n_without + 2 * _MORE) / (n_with + _MORE)))
        if 0 < threshold < 1:
            strength = log_odds(scores) - log_odds(threshold) - rarity[p]
            most = np.fmax(most, np.where(data.judged[:, p] == 0, strength, -np.inf))
    judged = most[ordinary & ~np.isneginf(most)]
    limit = float(np.quantile(judged, 1 - rate, method="higher")) if len(judged) else -np.inf
    return {data.concepts[p].id: round(max(0.0, limit + rarity[p]), 3) for p in places}


def _of_added(measurement: TrainingMeasurement, p: int) -> dict[str, Any] | None:
    """Return the share found of added texts with a concept; None without any."""
    data = measurement.data
    own: Mask = np.asarray([example.fields.get("author") == YOURS for example in data.examples], dtype=bool)
    use = own & data.is_of(OWN) & (data.fold >= 0) & (data.judged[:, p] == 1)
    scores = measurement.score(p)
    use &= ~np.isnan(scores)
    if not use.any():
        return None
    return share(scores[use] > np.float32(measurement.text_rate(p).threshold), data.group[use])


def _first_reasons(verdicts: Mapping[str, Verdict]) -> str:
    return "; ".join(f"{id}: {', '.join(verdict.reasons)}" for id, verdict in list(verdicts.items())[:3])


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
