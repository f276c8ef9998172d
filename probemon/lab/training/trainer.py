"""Trains a pack from examples: states, site, probes, thresholds, quality.

trained = train("demo", "mails.jsonl", "mails/")
trained.pack, trained.quality["concepts"]["spam"]["auroc"]
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from probemon.core.aggregate import Each
from probemon.core.familiarity import Familiar
from probemon.core.hierarchy import Ints
from probemon.core.probes import InputSpec
from probemon.core.score_rules import INDEPENDENT, PATH
from probemon.errors import ConfigError, TrainingError
from probemon.host.identity import manifest_host
from probemon.host.loading import load_model
from probemon.host.model import find_layers, hidden_size, unwrap
from probemon.lab.corpora.windows import Reading
from probemon.lab.training.background import passages
from probemon.lab.training.candidates import Problem, best_candidate, fit_candidate, possible
from probemon.lab.training.card import card
from probemon.lab.training.choice import LayerChoice
from probemon.lab.training.crossvalidation import cross_validated, curve, deal
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.example_files import Source
from probemon.lab.training.examples import Examples, read_examples
from probemon.lab.training.fitting import BESIDE, Fitted, TrainingRows, fit_linear, prepared, row_parts
from probemon.lab.training.generated import with_generated
from probemon.lab.training.logistic import Dense, Targets
from probemon.lab.training.measured import TrainingMeasurement
from probemon.lab.training.report import report_html
from probemon.lab.training.settings import TrainingSettings
from probemon.lab.training.standard import Weights, fold
from probemon.lab.training.state_store import StatePlan, StateStore, TextReader, collect_states, held, within_budget
from probemon.packs.files import check_target
from probemon.packs.pack import ProbePack
from probemon.util.files import why_not_writable, write_text_atomically

REPORT = "report.html"
_NORM = "rmsnorm"
_SWEEP_BYTES = 32 << 20  # of one site in cross-validation
_N_GOLDEN, _N_FAMILIAR = 8, 20_000


@dataclass(frozen=True)
class Trained:
    """A pack, its `quality` (as in its manifest), and the report as an HTML page."""

    pack: ProbePack
    quality: Mapping[str, Any]
    report: str = field(repr=False)


def train(
    model: Any,
    data: Source | Sequence[str | os.PathLike[str]] | Examples,
    out: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    settings: TrainingSettings | None = None,
    outside: Source | Sequence[str | os.PathLike[str]] | None = None,
    name: str | None = None,
    model_id: str | None = None,
    licence: str = "unstated",
    overwrite: bool = False,
    report: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], object] = lambda n, total: None,
    **options: Any,
) -> Trained:
    """Train probes for the concepts of `data` on a model, and write them to the folder `out`.

    - `model`: a folder, a hub name or "demo"; or a model, with its `tokenizer`
    - `data`: see `probemon.lab.training.examples`; `outside`: examples only for tests
    - `settings`, or its fields as `options`: see `TrainingSettings`
    - `name`, `model_id`, `licence`: for the manifest
    - `report`: HTML file; `say` gets messages, `progress` tokens and their total

    Raises `TrainingError`, `ConfigError`, `PackError`.
    """
    if settings is not None and options:
        raise ConfigError(f"settings and {next(iter(options))!r} are given: put it into the settings")
    settings = settings or _settings(options)
    target = check_target(Path(out), overwrite)
    if report is not None:
        check_report(Path(report), target)
    examples = data if isinstance(data, Examples) else _read(data, settings)
    elsewhere = None if outside is None else _read(outside, settings, like=examples)
    if model_id is None:
        model_id = (
            model if isinstance(model, str) else getattr(getattr(model, "config", None), "name_or_path", "") or ""
        )
    if isinstance(model, str):
        model, tokenizer = load_model(model, "cpu", say)
    if tokenizer is None:
        raise ConfigError("tokenizer is missing: give it with a model that is loaded already")
    job = _Job(model, tokenizer, settings, target, say, progress)
    if settings.generate:
        folder = settings.folder(target)
        examples = with_generated(
            examples,
            model,
            tokenizer,
            n=settings.generate,
            seed=settings.seed,
            file=folder.with_name(f"{folder.name}-generated.json"),
            chat_date=settings.chat_date,
            say=say,
        )
    prepared_data = job.dataset(examples, elsewhere)
    with held(settings.folder(target)):
        return job.finish(prepared_data, _model_id(model_id), name or target.name, licence, overwrite, report)


def check_report(report: Path, out: Path) -> None:
    """Raise `ConfigError` if the report cannot be written."""
    page, pack = Path(os.path.realpath(report)), Path(os.path.realpath(out))
    if page.is_relative_to(pack) or pack.is_relative_to(page):
        raise ConfigError(
            f"the report {report} and the pack {out} are inside one another: give the report another place"
        )
    if os.path.exists(report) and not report.is_file():
        raise ConfigError(f"the report {report} exists and is not a file: give it another place")
    if why := why_not_writable(report):
        raise ConfigError(f"the report {report} cannot be made: {why}; give it another place")


def _settings(options: Mapping[str, Any]) -> TrainingSettings:
    from probemon.util.checks import check_settings

    check_settings(TrainingSettings, options)
    return TrainingSettings(**options)


def _read(data: Any, settings: TrainingSettings, like: Examples | None = None) -> Examples:
    return read_examples(data, exclusive=settings.exclusive, text_field=settings.text_field, like=like)


def _model_id(name: str) -> str:
    from probemon.bundled import MODEL_ID

    return MODEL_ID if name == "demo" else name


class _Job:
    """One training."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: TrainingSettings,
        out: Path,
        say: Callable[[str], None],
        progress: Callable[[int, int], object],
    ) -> None:
        self.settings, self.out, self.say, self.progress = settings, out, say, progress
        self.model, self.tokenizer = model, tokenizer
        self.host = unwrap(model)
        self.n_layers = len(find_layers(self.host)[1])
        self.sites = settings.sites(self.n_layers)
        self.reader = TextReader(model, tokenizer, self.sites, Reading())
        self.dtype = torch.float32 if self.host.dtype == torch.float32 else torch.bfloat16

    def dataset(self, examples: Examples, outside: Examples | None) -> Dataset:
        background = passages(self.tokenizer) if self.settings.background else []
        return Dataset.of_examples(
            examples,
            self.reader,
            background=background,
            outside=outside,
            held_out=self.settings.held_out,
            roles=self.settings.roles,
            chat_date=self.settings.chat_date,
            seed=self.settings.seed,
        )

    def states(self, data: Dataset) -> StateStore:
        row_bytes = self.reader.row_bytes
        kept_positions = within_budget(
            data.wanted, data.whole.tolist(), row_bytes=row_bytes, budget=self.settings.budget, seed=self.settings.seed
        )
        for name in ("calibrate", "test"):
            if not any(len(kept_positions[i]) for i in data.document[data.of(name)]):
                most = sum(map(len, data.wanted)) * row_bytes
                raise TrainingError(
                    f"no text to {name} on fits in the budget of {self.settings.budget} bytes: {most} are enough"
                    " for all (--budget), fewer layers need less (--layers)"
                )
        plan = StatePlan(self.reader, data.texts, data.tokens, kept_positions)
        total, done = sum(len(data.tokens[i]) for _, places in plan.kinds() for i in places), 0
        self.say(
            f"{len(data.texts)} texts of {total} tokens; states of {plan.n_rows} tokens at {len(self.sites)} layers"
            f" ({plan.n_rows * row_bytes / 1e9:.2f} GB)"
        )

        def ran(n: int) -> None:
            nonlocal done
            done += n
            self.progress(done, total)

        return collect_states(plan, self.settings.folder(self.out), progress=ran)

    def finish(
        self,
        data: Dataset,
        model_id: str,
        name: str,
        licence: str,
        overwrite: bool,
        report: str | os.PathLike[str] | None,
    ) -> Trained:
        store = self.states(data)
        part = row_parts(data, store)
        choice = self.choose(data, store, part)
        self.say(
            f"site {', '.join(sorted(set(choice.site_of)))}: AUROC by cross-validation"
            f" {max(value for value, _ in choice.curve):.3f} at best"
        )
        fitted = self.fit(data, store, part, choice)
        measurement = TrainingMeasurement.of(data, store, part, fitted, choice, self.settings, self.host)
        quality = measurement.quality()
        page = report_html(name, data, measurement, quality)
        text = card(name, data, quality, self.settings, model_id)
        pack = ProbePack.write(
            self.out,
            name=name,
            concepts=[
                {
                    "id": concept.id,
                    "name": concept.name,
                    "parents": list(concept.parents),
                    **({"definition": concept.definition} if concept.definition else {}),
                }
                for concept in data.concepts
            ],
            weights=fitted.weights,
            score_rule=PATH if data.is_tree else INDEPENDENT,
            inputs=[{"site": spec.site, "norm": spec.norm, "eps": spec.eps} for spec in fitted.inputs],
            input_index=torch.from_numpy(fitted.input_of),
            host=manifest_host(self.host, model_id),
            licence=licence,
            card=text,
            alert_threshold=torch.from_numpy(measurement.alert_threshold),
            alert_set=next(iter(measurement.alert_sets)),
            alert_sets={name: torch.from_numpy(values) for name, values in list(measurement.alert_sets.items())[1:]},
            aggregated={str(self.settings.aggregator): torch.from_numpy(measurement.text_threshold)}
            if not np.isnan(measurement.text_threshold).all() and self.settings.aggregator != Each()
            else None,
            score_counts=measurement.score_counts,
            familiar=fitted.familiar,
            golden_hidden=fitted.golden,
            provenance={
                "training": self.settings.as_dict(),
                "versions": _versions(),
                "examples": measurement.counts(),
                # only if a chat has a date
                **({"chat_date": self.settings.chat_date} if any(text.reads_date for text in data.texts) else {}),
            },
            quality=quality,
            overwrite=overwrite,
        )
        if report is not None:
            write_text_atomically(Path(report), page)
        return Trained(pack, quality, page)

    def choose(self, data: Dataset, store: StateStore, part: Tensor) -> LayerChoice:
        learnt = data.compared_inside
        use = data.of("train") & (learnt >= 0).any(axis=1)
        folds = np.full(len(data.known), -1, dtype=np.int64)
        folds[use] = deal(_numbered(data.group[use]), learnt[use], seed=self.settings.seed)
        targets = Targets(torch.zeros(0, dtype=torch.int64), torch.from_numpy(learnt))
        tables, seen = [], list[tuple[int, int]]()
        for i, site in enumerate(self.sites):
            rows = self._rows(store, part, use, site, _SWEEP_BYTES)
            labelled = Targets(rows.part, targets.known)
            seen.append((len(rows.row), rows.n_of))
            tables.append(cross_validated(Dense(rows.x), labelled, folds))
            self.say(f"layer {i + 1} of {len(self.sites)}, {site}: AUROC {curve(tables[-1:])[0][0]:.3f}")
        return LayerChoice.of(self.sites, tables, alone=not data.is_tree, seen=min(seen))

    def fit(self, data: Dataset, store: StateStore, part: Tensor, choice: LayerChoice) -> Fitted:
        used = [site for site in self.sites if site in choice.site_of]
        n_concepts = len(data.concepts)
        inputs = tuple(InputSpec(site, _NORM) for site in used)
        input_of = np.asarray([used.index(site) for site in choice.site_of], dtype=np.int64)
        by_method: dict[str, Weights] = {}
        familiar: list[Familiar | None] = []
        golden, learnt_from = [], list[tuple[int, int]]()
        method, areas = self.settings.method, dict[str, float]()
        names = possible(data, self.settings.aggregator, n_sites=len(used))
        if method not in (*BESIDE, "auto", *names):
            raise ConfigError(f"method {method!r} cannot be used here: {', '.join((*names, *BESIDE[1:]))} can")
        for i, site in enumerate(used):
            concepts = np.flatnonzero(input_of == i)
            rows = self._rows(store, part, data.of("train"), site, self.settings.memory)
            problem = Problem(
                data,
                rows,
                concepts.tolist(),
                data.learnt,
                choice.l2[concepts],
                self.settings.aggregator,
                self.settings.seed,
            )
            if method == "auto":
                # All sites have one kind.
                method, areas = best_candidate(names, problem) if len(used) == 1 else ("logistic", {})
            learnt_from.append((len(rows.row), rows.n_of))
            linear = fit_linear(rows, problem.targets, problem.l2)
            for kind in dict.fromkeys((*BESIDE, method)):
                if kind in BESIDE[1:]:
                    weights = fit_linear(rows, problem.targets, problem.l2, kind)
                else:
                    weights = fit_candidate(kind, problem, linear)
                for key, value in fold(weights, rows.standard, self.dtype).items():
                    kind_weights = by_method.setdefault(kind, {})
                    kind_weights.setdefault(key, torch.zeros(n_concepts, *value.shape[1:], dtype=value.dtype))[
                        concepts
                    ] = value
            familiar.append(self._familiar(data, store, part, inputs[i]))
            golden.append(store.states(site)[self._golden_rows(data, part)].float())
        return Fitted(
            method,
            areas,
            by_method[method],
            by_method,
            inputs,
            input_of,
            familiar,
            torch.stack(golden, dim=1),
            min(learnt_from),
        )

    def _rows(self, store: StateStore, part: Tensor, use: np.ndarray, site: str, most_bytes: int) -> TrainingRows:
        return TrainingRows.of(
            store.states(site),
            part,
            use,
            InputSpec(site, _NORM),
            self.dtype,
            most_bytes=most_bytes,
            seed=self.settings.seed,
        )

    def _familiar(self, data: Dataset, store: StateStore, part: Tensor, spec: InputSpec) -> Familiar | None:
        width = hidden_size(self.host)
        states = store.states(spec.site)
        train_states, calibration_states = (
            prepared(states, _some(data, part, split, _N_FAMILIAR), spec, self.dtype)
            for split in ("train", "calibrate")
        )
        if len(train_states) <= max(64, width // 2) or len(calibration_states) < 100:
            return None
        return Familiar.of(train_states, calibration_states)

    def _golden_rows(self, data: Dataset, part: Tensor) -> Tensor:
        return _some(data, part, "test", _N_GOLDEN)


def _some(data: Dataset, part: Tensor, split: str, n: int) -> Tensor:
    """Return at most n rows of a split, evenly spread."""
    rows = np.flatnonzero(data.of(split)[part.numpy()])
    return torch.from_numpy(rows[np.unique(np.linspace(0, len(rows) - 1, min(n, len(rows))).astype(np.int64))])


def _numbered(group: Ints) -> Ints:
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "probemon": version("probemon"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
