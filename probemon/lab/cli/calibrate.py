"""The command calibrate.

probemon calibrate packs/mine --benign ordinary.jsonl --fpr 0.01 --aggregate ema:0.3 --watch animal --out my-pack
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from probemon.cli import options as opt
from probemon.cli.common import load_aloud, make_manager, use_threads
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.errors import ConfigError, PackError
from probemon.lab.cli.reading import window_of
from probemon.lab.cli.scored_documents import ScoredDocuments, check_readable, concepts_of, labelled
from probemon.lab.corpora.documents import MAX_CHARS, UTF_8
from probemon.lab.corpora.windows import Reading
from probemon.util.counted import counted
from probemon.util.files import why_not_writable

if TYPE_CHECKING:
    from probemon.core.aggregate import Aggregator
    from probemon.lab.calibration.calibrate import CalibratedAlerts
    from probemon.lab.calibration.expansion import Expansion
    from probemon.packs.pack import ProbePack

_SHOWN = 20
_FAR_BELOW, _STRICT = 10, 0.01  # warn this many times under the pack's own threshold, at this rate or lower
_WIDTH = 160  # wide enough not to cut numbers


def calibrate(
    pack: opt.Pack,
    benign: Annotated[
        str,
        typer.Option(
            help=(
                "Ordinary documents, like those that will be watched, without the watched concepts: a text file (a"
                " document a line), .jsonl, .parquet, a folder, or -."
            )
        ),
    ],
    positive: Annotated[
        str | None,
        typer.Option(help="Documents with the watched concepts; a field 'concepts' names them (default: all)."),
    ] = None,
    fpr: Annotated[
        float | None, typer.Option(help="Calibrate alerts: the most a benign unit may exceed a concept's threshold.")
    ] = None,
    aggregate: Annotated[
        str,
        typer.Option(
            help=(
                "Aggregator of scores for alerts: none (each token), mean, max, attention[:T], ema:W, rolling_mean:N,"
                " rolling_max:N, rolling_logit:N."
            )
        ),
    ] = "none",
    watch: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A concept to calibrate: an id, a name or a pattern; may be repeated. Default: all. The fewer, the"
                " lower their thresholds."
            )
        ),
    ] = None,
    family: Annotated[
        bool,
        typer.Option(
            "--family",
            help=(
                "The rate is that of any watched concept, not of each: --fpr 0.01 --family with 20 concepts lets 1 % of"
                " benign units exceed any of the 20 thresholds, without it 1 % each."
            ),
        ),
    ] = False,
    unit: Annotated[str, typer.Option(help="Unit of the rate: token, or document (any token of it).")] = "token",
    confidence: Annotated[float, typer.Option(help="Probability with which all thresholds hold together.")] = 0.95,
    expand_recall: Annotated[
        float | None,
        typer.Option(
            help=(
                "Calibrate expand thresholds: the share of firing probes to be reached. 0.99: of 100 that would fire, a"
                " descent reaches 99 on average, and evaluates fewer probes than for 0.999."
            )
        ),
    ] = None,
    statistics: Annotated[
        bool,
        typer.Option(
            "--statistics",
            help=(
                "Only count how concepts score on the benign documents, for the rules z:pack and rank:pack; what alerts"
                " or expansion are calibrated on is counted in any case."
            ),
        ),
    ] = False,
    text_field: opt.TextField = "text",
    id_field: opt.IdField = "id",
    chat_format: opt.ChatFormat = "",
    encoding: opt.Encoding = UTF_8,
    on: opt.On = None,
    max_chars: Annotated[int, typer.Option(help="A longer document is left out.")] = MAX_CHARS,
    window: opt.WindowTokens = 0,
    overlap: opt.Overlap = -1,
    model: Annotated[
        str | None, typer.Option(help="A model folder, a hub name, or 'demo'. Default: the model that the pack names.")
    ] = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the calibrated pack; must not exist. Default: PACK-calibrated."),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Set thresholds of PACK from documents, and write them to a new version of it.

    Alert thresholds are set to a false-positive rate, expand thresholds to a recall. With --expand-recall and alerts
    for single tokens, half of the documents set the alerts, because these must not depend on those that show the
    recall.
    """
    from probemon.core.aggregate import Each, parse
    from probemon.engine.kernels import check_device
    from probemon.host.identity import manifest_host, model_identity
    from probemon.host.model import longest_input
    from probemon.lab.calibration.calibrated_pack import write_calibrated
    from probemon.lab.calibration.score_statistics import ScoreStatistics
    from probemon.lab.corpora.documents import read_documents
    from probemon.packs.pack import ProbePack

    goals = _Goals(fpr, expand_recall, parse(aggregate), unit, confidence, family)
    counts_alone = statistics and fpr is None and expand_recall is None
    chosen = not counts_alone and (bool(watch) or goals.aggregator != Each())
    goals.check(has_alert_options=positive is not None or family or chosen, counts_alone=counts_alone)
    if benign == positive == "-":
        raise ConfigError("--benign and --positive are both standard input: give a file for one of them")
    check_device(device)
    use_threads(threads)
    read = partial(
        read_documents,
        text_field=text_field,
        id_field=id_field,
        max_chars=max_chars,
        shape=chat_format,
        encoding=encoding,
    )
    reading = Reading(window_of(window, overlap), on=tuple(on or ()))
    opened = ProbePack.from_pretrained(pack)
    target = out or _beside(pack, opened)
    _check_target(target)
    watched = opened.find_all(watch) if watch else _all_but_bounding(opened)
    # Errors show before scoring, which takes minutes.
    for source in (benign, *([] if positive is None else [positive])):
        check_readable(source, read)
    if note := labelled(benign, read):
        say(note, error=True)
    for document in read(positive) if positive not in (None, "-") else ():
        concepts_of(document, opened)
    name = model or _host_of(opened)
    watched_model, tokenizer = load_aloud(name, device, dtype, reads_texts=True)
    # Every probe is scored; the descent only marks seen tokens.
    manager = make_manager(
        opened, device=device, load_threshold=1.0, max_loaded_probes=opened.n_probes, strategy="descent"
    )
    score = partial(ScoredDocuments.of, manager, watched_model, tokenizer, reading=reading, read=read)
    ordinary = score(benign, np.asarray(watched) if expand_recall is None else np.arange(opened.n_probes), "benign")
    present = None if positive is None else score(positive, np.asarray(watched), "positive")
    alerts, expansion = goals.calibrate(opened, watched, ordinary, present)
    inputs = {
        "benign": ordinary.stated(),
        "positive": None if present is None else present.stated(),
        "host": {"model": name, "dtype": str(watched_model.dtype).removeprefix("torch."), "device": device},
        "on": list(reading.on),
        "window": asdict(reading.window_for(type(watched_model).__name__, longest_input(watched_model))),
    }
    columns = watched if expand_recall is None else range(opened.n_probes)
    score_counts = ScoreStatistics.of(ordinary.scores, columns, goals.aggregator)
    calibrated = write_calibrated(
        opened,
        target,
        watched=watched,
        alerts=alerts,
        expansion=expansion,
        statistics=score_counts,
        inputs=inputs,
        drift=ordinary.counts if ordinary.requests else None,
        host=model_identity(watched_model, tokenizer),
        stated=manifest_host(watched_model, name),
        chat_date=ordinary.chat_date or (None if present is None else present.chat_date),
    )
    if as_json:
        summary = {
            "expansion": expansion and expansion.stated(),
            "statistics": score_counts.stated(),
            "inputs": inputs,
            "left_out": {
                "benign": ordinary.left_out(),
                "positive": None if present is None else present.left_out(),
            },
        }
        answer({"directory": str(target), "name": calibrated.name, **_rates(opened, watched, alerts), **summary})
    else:
        _show(calibrated, target, watched, alerts, expansion, ordinary, present)
        say(score_counts.sentence().replace("`", ""))
    # A loose rate explains low thresholds.
    if alerts is not None and goals.is_strict and (warning := _far_below(opened, watched, alerts)):
        say(warning, error=True)


@dataclass(frozen=True)
class _Goals:
    """Alerts if `fpr` is given, expansion if `recall` is."""

    fpr: float | None
    recall: float | None
    aggregator: Aggregator
    unit: str
    confidence: float
    family: bool

    @property
    def is_strict(self) -> bool:
        return self.fpr is not None and self.fpr <= _STRICT

    def check(self, *, has_alert_options: bool, counts_alone: bool) -> None:
        """Raise `ConfigError` or `CalibrationError` for invalid goals."""
        from probemon.core.baselines import refuse_baseline
        from probemon.lab.calibration.calibrate import check_targets
        from probemon.lab.calibration.expansion import check_recall

        refuse_baseline(self.aggregator, "--aggregate")
        if self.fpr is None and self.recall is None and not counts_alone:
            raise ConfigError(
                "nothing to calibrate: give --fpr for alert thresholds, --expand-recall for expand thresholds, or"
                " --statistics to count scores alone"
            )
        if self.fpr is None and has_alert_options:
            raise ConfigError("--positive, --watch, --family and --aggregate apply to alert thresholds: give --fpr too")
        if self.fpr is not None:
            check_targets(self.fpr, self.confidence, self.unit)
        if self.recall is not None:
            check_recall(self.recall)

    def calibrate(
        self, pack: ProbePack, watched: list[int], ordinary: ScoredDocuments, present: ScoredDocuments | None
    ) -> tuple[CalibratedAlerts | None, Expansion | None]:
        """Return alerts and expansion of scored documents. Raises `CalibrationError`."""
        from probemon.core.aggregate import Each
        from probemon.lab.calibration.calibrate import calibrate_alerts
        from probemon.lab.calibration.expansion import Reach, calibrate_on, split

        shaping, calibrating = split(len(ordinary.scores))
        # Single-token alerts decide what fires: they must not use the documents that show the recall.
        alerts_shape_recall = self.recall is not None and self.fpr is not None and self.aggregator == Each()
        alerts = expansion = None
        if self.fpr is not None:
            columns = np.arange(len(watched)) if self.recall is None else np.asarray(watched)
            numbers = shaping.tolist() if alerts_shape_recall else range(len(ordinary.scores))
            alerts = calibrate_alerts(
                (ordinary.scores[i][:, columns] for i in numbers),
                fpr=self.fpr,
                aggregate=self.aggregator,
                unit=self.unit,
                confidence=self.confidence,
                family=self.family,
                positives=() if present is None else present.with_concepts(pack, watched),
            )
        if self.recall is not None:
            threshold = pack.alert_threshold.numpy().copy()
            if alerts is not None and alerts_shape_recall:
                threshold[watched] = alerts.threshold
            parts = ([ordinary.scores[i] for i in numbers] for numbers in (shaping, calibrating))
            reach = Reach(pack.tree, pack.score_rule, threshold, *_beginning(pack))
            expansion = calibrate_on(reach, *parts, recall=self.recall)
        return alerts, expansion


def _all_but_bounding(pack: ProbePack) -> list[int]:
    return [probe for probe, concept in enumerate(pack.concepts) if not concept.get("bounding")]


def _beginning(pack: ProbePack) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from probemon.core.settings import CascadeConfig

    config = CascadeConfig.of(
        {key: pack.recommended[key] for key in ("base_layers", "always_on") & pack.recommended.keys()}
    )
    return config.base_layers, tuple(pack.find(concept) for concept in config.always_on)


def _far_below(pack: ProbePack, watched: list[int], alerts: CalibratedAlerts) -> str:
    """Return a warning about thresholds far below the pack's own, or ""."""
    usual = pack.alert_threshold.numpy()[watched]
    low = [i for i, threshold in enumerate(alerts.threshold.tolist()) if threshold < usual[i] / _FAR_BELOW]
    if not low:
        return ""
    at = low[0]
    name = pack.concepts[watched[at]]["name"]
    others = f", and {len(low) - 1} more likewise" if len(low) > 1 else ""
    return (
        f"far below the pack's own thresholds: {name!r} at {alerts.threshold[at]:.2g}, the pack's is"
        f" {usual[at]:.2g}{others}. These documents hardly touch what such a probe reads, and harmless text that"
        " does will be over it: give documents like those that are to be watched"
    )


def _rates(pack: ProbePack, watched: list[int], alerts: CalibratedAlerts | None) -> dict[str, Any]:
    if alerts is None:
        return {"concepts": None}
    return {
        **alerts.stated(),
        "any_token": alerts.any_token.entry(0),
        "any_document": alerts.any_document.entry(0),
        "concepts": {pack.concepts[probe]["id"]: alerts.entry(i) for i, probe in enumerate(watched)},
    }


def _check_target(target: Path) -> None:
    if target.exists():
        raise PackError(f"{target} exists: choose another folder with --out")
    why = why_not_writable(target)
    if why:
        raise PackError(f"{target} cannot be made: {why}; choose another folder with --out")


def _beside(pack: str, opened: ProbePack) -> Path:
    """Return PACK-calibrated, next to the pack if that is a folder."""
    if not Path(pack).is_dir():
        return Path(f"{Path(pack).name}-calibrated")
    folder = opened.directory.resolve()
    return folder.parent / f"{folder.name}-calibrated"


def _host_of(pack: ProbePack) -> str:
    from probemon.bundled import MODEL_ID

    name = pack.manifest["host"].get("model_id")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{pack.name} does not say which model it is for: give --model")
    return "demo" if name == MODEL_ID else name


def _show(
    pack: ProbePack,
    target: Path,
    watched: list[int],
    alerts: CalibratedAlerts | None,
    expansion: Expansion | None,
    ordinary: ScoredDocuments,
    present: ScoredDocuments | None,
) -> None:
    from probemon.packs.strength import in_short

    scored, *copies = ordinary.sentences("benign")
    say(f"{target}: {pack.name}, from {scored}")
    if pack.alert_set is not None:
        others = f"; it keeps {', '.join(pack.alert_sets[1:])} in addition" if pack.alert_sets[1:] else ""
        say(f"events use its set of alert thresholds {pack.alert_set}{others}")
    say(*copies)
    if not_in_drift := ordinary.not_in_drift():
        say(not_in_drift)
    if present is not None:
        scored, *copies = present.sentences("positive")
        say(f"true-positive rates: {scored}", *copies)
    if expansion is not None:
        slack = "the last resort, no slack at all" if expansion.slack is None else f"slack {expansion.slack:.4g}"
        sentence = expansion.sentence().replace("`", "")
        say(
            f"{sentence} At {slack}; {counted(expansion.n_unknown, 'probe')} always expanded because of too few scores."
        )
    if alerts is None:
        return
    compared = "single tokens" if str(alerts.aggregator) == "each" else alerts.aggregator
    whose = "any threshold" if alerts.family else "each threshold"
    as_if = " (as if tokens were independent, which those of one document are not)" if alerts.unit == "token" else ""
    n_watched = counted(len(watched), "concept")
    share, sure = f"{alerts.fpr:g}", f"{100 * alerts.confidence:g} % confidence"
    say(
        f"alerts on {compared}, {n_watched}: at most {share} of benign {alerts.unit}s exceed {whose},"
        f" with {sure} for all together{as_if}",
        f"in these documents {int(alerts.any_token.count[0])} of"
        f" {counted(alerts.n_tokens, 'token')} exceed the threshold"
        f" of one concept or more; such tokens are in {int(alerts.any_document.count[0])} of"
        f" {counted(alerts.n_documents, 'document')}",
    )
    mute = int((alerts.threshold >= 1).sum())
    if mute:
        have = f"{counted(mute, 'concept')} {'has' if mute == 1 else 'have'}"
        say(f"{have} threshold 1, which no score exceeds: benign scores are as high as any")
    if alerts.unit == "token":
        false_rates, true_rates = alerts.tokens, alerts.positive_tokens
    else:
        false_rates, true_rates = alerts.documents, alerts.positive_documents
    table = plain_table()
    table.add_column("concept", no_wrap=True, overflow="ellipsis")
    table.add_column("threshold", justify="right")
    table.add_column(f"false-positive rate, by {alerts.unit}", justify="right")
    if true_rates is not None:
        table.add_column(f"true-positive rate, by {alerts.unit}", justify="right")
    for i, probe in list(enumerate(watched))[:_SHOWN]:
        cells = [_rate(false_rates.entry(i))]
        if true_rates is not None:
            true_rate = true_rates.entry(i)
            cells.append(_rate(true_rate) + (f" of {true_rate['n']}" if true_rate["n"] else ""))
        table.add_row(" > ".join(pack.path(probe)), in_short(float(alerts.threshold[i]), ".4g"), *cells)
    terminal(width=max(_WIDTH, terminal().width)).print(table)
    if len(watched) > _SHOWN:
        say(f"and {len(watched) - _SHOWN} more: --json, or quality.alerts in the manifest")


def _rate(entry: dict[str, Any]) -> str:
    return (
        "no documents" if entry["rate"] is None else f"{entry['rate']:.4f} ({entry['low']:.4f} to {entry['high']:.4f})"
    )
