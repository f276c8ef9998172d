"""The command calibrate.

probemon calibrate probes/wordnet-smollm2-135m --benign ordinary.jsonl --fpr 0.01 --aggregate ema:0.3 --watch animal
--positive animals.jsonl --out my-pack probemon calibrate my-pack --benign ordinary.jsonl --expand-recall 0.99
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from probemon.cli.common import load_aloud, use_threads, window_of
from probemon.cli.terminal import answer, say, terminal
from probemon.core.hierarchy import Ints, Mask
from probemon.errors import CalibrationError, ConfigError, PackError
from probemon.offline.documents import MAX_CHARS
from probemon.offline.windows import Reading

if TYPE_CHECKING:
    from probemon.core.scores import Floats
    from probemon.manager import DynamicProbeManager
    from probemon.offline.calibrate import Alerts
    from probemon.offline.documents import Document
    from probemon.offline.expansion import Expansion
    from probemon.packs.pack import ProbePack

_SHOWN = 20
_WIDTH = 160  # of a table that is read by a program or from a file: a cut number would be a wrong one
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total_fmt} {unit} [{elapsed}<{remaining}]"


def calibrate(
    pack: Annotated[str, typer.Argument(metavar="PACK", help="A probe pack: a folder, or a hub name.")],
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
        typer.Option(help="Documents with the watched concepts; a field 'concepts' says which (else all of them)."),
    ] = None,
    fpr: Annotated[
        float | None, typer.Option(help="Calibrate alerts: the most a benign unit may exceed a concept's threshold.")
    ] = None,
    aggregate: Annotated[
        str,
        typer.Option(
            help=(
                "What alerts compare: none (each token), mean, max, attention[:T], ema:W, rolling_mean:N,"
                " rolling_max:N."
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
        bool, typer.Option("--family", help="The rate is that of any watched concept, not of each.")
    ] = False,
    unit: Annotated[
        str, typer.Option(help="What the rate is a share of: token, or document (any token of it).")
    ] = "token",
    confidence: Annotated[float, typer.Option(help="Probability with which all thresholds hold together.")] = 0.95,
    expand_recall: Annotated[
        float | None, typer.Option(help="Calibrate expand thresholds: the share of firing probes to be reached.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Name of the text in JSON lines and parquet.")] = "text",
    id_field: Annotated[str, typer.Option(help="Name of the document's id there.")] = "id",
    max_chars: Annotated[int, typer.Option(help="A longer document is left out.")] = MAX_CHARS,
    window: Annotated[int, typer.Option(help="Longest input of the model in tokens; 0: 1024, or what it takes.")] = 0,
    overlap: Annotated[
        int, typer.Option(help="Tokens that the windows of a long document share; -1: an eighth of a window.")
    ] = -1,
    model: Annotated[
        str | None, typer.Option(help="A model folder, a hub name, or 'demo'. Default: the pack's own host.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the model: bfloat16, float32, float16 or auto (what its files have).")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where model and probes run: cpu, cuda, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads for the model; 0: what torch chooses.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the calibrated pack is written: a folder that is not there yet. Default: PACK-calibrated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Set alert thresholds of PACK to a false-positive rate, and expand thresholds to a recall, from documents; write
    them to a new version of it.

    Watched concepts are scored at every token, as rules watch them. With --expand-recall and alerts for single tokens,
    half of the documents set the alerts, since those must not depend on the documents that the recall is shown on.
    """
    from probemon.aggregate import Each, parse
    from probemon.engine.kernels import check_device
    from probemon.manager import DynamicProbeManager
    from probemon.offline import expansion as expanding
    from probemon.offline.calibrate import calibrate_alerts, check_targets, write_calibrated
    from probemon.offline.documents import read_documents
    from probemon.packs.pack import ProbePack

    aggregator = parse(aggregate)
    if fpr is None and expand_recall is None:
        raise ConfigError(
            "nothing to calibrate: give --fpr for alert thresholds, --expand-recall for expand thresholds, or both"
        )
    if fpr is None and (positive is not None or watch or family or aggregator != Each()):
        raise ConfigError("--positive, --watch, --family and --aggregate are of alert thresholds: give --fpr too")
    if benign == positive == "-":
        raise ConfigError("--benign and --positive are both standard input: give a file for one of them")
    if fpr is not None:
        check_targets(fpr, confidence, unit)
    if expand_recall is not None:
        expanding.check_recall(expand_recall)
    check_device(device)
    use_threads(threads)
    reading, read = (
        Reading(window_of(window, overlap)),
        partial(read_documents, text_field=text_field, id_field=id_field, max_chars=max_chars),
    )
    opened = ProbePack.from_pretrained(pack)
    target = out or _beside(pack, opened)
    _check_target(target)
    watched = (
        opened.find_all(watch)
        if watch
        else [probe for probe, concept in enumerate(opened.concepts) if not concept.get("bounding")]
    )
    # What is wrong with the documents is to be told before they are scored, which takes minutes.
    read(benign)
    if positive is not None:
        for document in read(positive) if positive != "-" else ():
            _concepts_of(document, opened)
    name = model or _host_of(opened)
    host, tokenizer = load_aloud(name, device, dtype)
    # Every probe is scored; the descent, which only says what was seen, is the least there is.
    manager = DynamicProbeManager(
        opened, device=device, load_threshold=1.0, max_loaded_probes=opened.n_probes, strategy="descent"
    )
    together = expand_recall is not None and fpr is not None and aggregator == Each()
    columns = np.arange(opened.n_probes) if expand_recall is not None else np.asarray(watched)
    scored = partial(_Scored.of, manager, host, tokenizer, reading=reading, read=read)
    ordinary = scored(benign, columns, "benign")
    shaping, calibrating = expanding.split(len(ordinary.scores))
    alerts = None
    if fpr is not None:
        use = shaping.tolist() if together else range(len(ordinary.scores))
        at = np.searchsorted(columns, watched) if expand_recall is not None else np.arange(len(watched))
        present = None if positive is None else scored(positive, np.asarray(watched), "positive")
        alerts = calibrate_alerts(
            (ordinary.scores[i][:, at] for i in use),
            fpr=fpr,
            aggregate=aggregator,
            unit=unit,
            confidence=confidence,
            family=family,
            positives=() if present is None else present.with_concepts(opened, watched),
        )
    found = None
    if expand_recall is not None:
        threshold = opened.alert_threshold.numpy().copy()
        if alerts is not None and together:
            threshold[watched] = alerts.threshold
        reach = expanding.Reach(opened.tree, opened.score_rule, threshold)
        parts = ([ordinary.scores[i] for i in which] for which in (shaping, calibrating))
        found = expanding.calibrate_on(reach, *parts, recall=expand_recall)
    inputs = {
        "benign": ordinary.stated(),
        "positive": present.stated() if fpr is not None and present is not None else None,
        "host": {"model": name, "dtype": str(host.dtype).removeprefix("torch."), "device": device},
    }
    made = write_calibrated(opened, target, watched=watched, alerts=alerts, expansion=found, inputs=inputs)
    if as_json:
        rates = (
            None
            if alerts is None
            else {opened.concepts[probe]["id"]: alerts.entry(i) for i, probe in enumerate(watched)}
        )
        any_of = (
            {}
            if alerts is None
            else {
                **alerts.stated(),
                "any_token": alerts.any_token.entry(0),
                "any_document": alerts.any_document.entry(0),
            }
        )
        answer(
            {
                "directory": str(target),
                "name": made.name,
                **any_of,
                "concepts": rates,
                "expansion": found and found.stated(),
                "inputs": inputs,
            }
        )
    else:
        _show(made, target, watched, alerts, found, ordinary)


@dataclass
class _Scored:
    """The documents of a source that could be scored: scores `[T, K]` of the tokens seen, in order; what else their
    rows said; and the others' reasons.
    """

    source: str
    scores: list[Floats] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    bad: list[Document] = field(default_factory=list)
    sha256: str = ""

    @property
    def n_copies(self) -> int:
        """Documents whose text another one has, too: a bound counts them as independent, which they are not."""
        return len(self.documents) - len({document.text for document in self.documents})

    @classmethod
    def of(
        cls,
        manager: DynamicProbeManager,
        host: Any,
        tokenizer: Any,
        source: str,
        columns: Ints,
        label: str,
        *,
        reading: Reading,
        read: Callable[[str], Iterator[Document]],
    ) -> _Scored:
        from tqdm import tqdm

        from probemon.offline.corpus import score_documents
        from probemon.offline.documents import count_documents

        made, digest = cls(source), hashlib.sha256()
        with tqdm(
            total=count_documents(source), unit="doc", desc=label, disable=None, dynamic_ncols=True, bar_format=_BAR
        ) as bar:
            every = score_documents(
                manager,
                host,
                tokenizer,
                read(source),
                reading=reading,
                exhaustive=True,
                progress=lambda documents, tokens: bar.update(documents),
            )
            for scored in every:
                if scored.scores is None or scored.everything is None:
                    made.bad.append(scored.document)
                    continue
                seen = np.flatnonzero(scored.scores.coverage.seen)
                made.scores.append(scored.everything.numpy()[np.ix_(seen, columns)])
                made.documents.append(scored.document)
                digest.update(scored.document.text.encode() + b"\0")
        if not made.scores:
            why = f": {made.bad[0].id}: {made.bad[0].reason}" if made.bad else ""
            raise CalibrationError(f"{source} has no document that can be scored{why}")
        made.sha256 = digest.hexdigest()
        return made

    def stated(self) -> dict[str, Any]:
        """For the record. The hash is of the texts that were scored, each with a zero byte after it."""
        name = "standard input" if self.source == "-" else Path(self.source).name
        return {
            "source": name,
            "sha256_of_texts": self.sha256,
            "n_documents": len(self.scores),
            "n_bad": len(self.bad),
            "n_copies": self.n_copies,
            "n_tokens": sum(map(len, self.scores)),
        }

    def with_concepts(self, pack: ProbePack, watched: list[int]) -> Iterator[tuple[Floats, Mask | None]]:
        """Scores and which of the watched concepts the document is of, by its field `concepts`."""
        for scores, document in zip(self.scores, self.documents, strict=True):
            of = _concepts_of(document, pack)
            yield scores, None if of is None else np.isin(watched, of)


def _concepts_of(document: Document, pack: ProbePack) -> list[int] | None:
    """Probes that a document's field `concepts` names, None where it has none. Raises `ConfigError`,
    `UnknownConcept`.
    """
    stated = document.fields.get("concepts")
    if stated is None:
        return None
    if not isinstance(stated, list) or not all(isinstance(one, str) for one in stated):
        raise ConfigError(f"document {document.id}: 'concepts' is {stated!r}: give a list of concept ids")
    return [pack.find(one) for one in stated]


def _check_target(target: Path) -> None:
    """Raise `PackError` where a folder cannot be made."""
    if target.exists():
        raise PackError(f"{target} exists: choose another folder with --out")
    above = next(parent for parent in target.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise PackError(
            f"{target} cannot be made: {above} is {'not writable' if above.is_dir() else 'a file'}; choose another"
            " folder with --out"
        )


def _beside(pack: str, opened: ProbePack) -> Path:
    """PACK-calibrated, where the pack is a folder beside it."""
    here = opened.directory.resolve() if Path(pack).is_dir() else Path(pack)
    return (here.parent if Path(pack).is_dir() else Path()) / f"{here.name}-calibrated"


def _host_of(pack: ProbePack) -> str:
    from probemon.bundled import MODEL_ID

    name = pack.manifest["host"].get("model_id")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{pack.name} does not say which model it is for: give --model")
    return "demo" if name == MODEL_ID else name


def _show(
    pack: ProbePack, target: Path, watched: list[int], alerts: Alerts | None, found: Expansion | None, ordinary: _Scored
) -> None:
    bad = (
        f", {len(ordinary.bad)} bad ones left out (first: {ordinary.bad[0].id}: {ordinary.bad[0].reason})"
        if ordinary.bad
        else ""
    )
    say(
        f"{target}: {pack.name}, from {len(ordinary.scores)} benign documents of {sum(map(len, ordinary.scores))}"
        f" tokens{bad}"
    )
    if ordinary.n_copies:
        say(
            f"{ordinary.n_copies} of {len(ordinary.scores)} benign documents are copies of others: the bounds take them"
            " as independent, so they are too narrow"
        )
    if found is not None:
        slack = "the last resort, no slack at all" if found.slack is None else f"slack {found.slack:.4g}"
        say(
            f"{found.sentence()} At {slack}; {found.n_unknown} probes always expanded for want of scores.".replace(
                "`", ""
            )
        )
    if alerts is None:
        return
    share, side = f"{alerts.fpr:g}", f"{100 * alerts.confidence:g} %"
    as_if = " (as if tokens were independent, which those of one document are not)" if alerts.unit == "token" else ""
    say(
        f"alerts on {'single tokens' if str(alerts.aggregator) == 'each' else alerts.aggregator}: at most {share} of"
        f" benign {alerts.unit}s for {'any' if alerts.family else 'each'} of {len(watched)} concepts, with {side}"
        f" confidence for all together{as_if}; of {alerts.n_tokens} tokens and {alerts.n_documents} documents"
        f" {int(alerts.any_token.count[0])} and {int(alerts.any_document.count[0])} exceed some threshold",
    )
    mute = int((alerts.threshold >= 1).sum())
    if mute:
        say(f"{mute} concepts have threshold 1, which no score exceeds: benign scores are as high as any")
    of = {"token": (alerts.tokens, alerts.positive_tokens), "document": (alerts.documents, alerts.positive_documents)}[
        alerts.unit
    ]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("concept", no_wrap=True, overflow="ellipsis")
    for name in (
        "threshold",
        f"false-positive rate, by {alerts.unit}",
        *([f"true-positive rate, by {alerts.unit}"] if of[1] is not None else []),
    ):
        table.add_column(name, justify="right")
    for i, probe in list(enumerate(watched))[:_SHOWN]:
        cells = [_rate(rates.entry(i)) for rates in of if rates is not None]
        table.add_row(" > ".join(pack.path(probe)), f"{alerts.threshold[i]:.4f}", *cells)
    terminal(width=max(_WIDTH, terminal().width)).print(table)
    if len(watched) > _SHOWN:
        say(f"and {len(watched) - _SHOWN} more: --json, or quality.alerts in the manifest")


def _rate(entry: dict[str, Any]) -> str:
    return (
        "no documents" if entry["rate"] is None else f"{entry['rate']:.4f} ({entry['low']:.4f} to {entry['high']:.4f})"
    )
