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

from probemon.core.familiarity import Familiar
from probemon.core.score_rules import INDEPENDENT, PATH
from probemon.core.scores import Floats
from probemon.errors import ConfigError, TrainingError
from probemon.host.identity import manifest_host
from probemon.host.loading import load_model
from probemon.host.model import find_layers, unwrap
from probemon.lab.corpora.windows import Reading
from probemon.lab.training.card import card
from probemon.lab.training.crossfit import search
from probemon.lab.training.dataset import OUTSIDE, OWN, Dataset
from probemon.lab.training.example_files import Source
from probemon.lab.training.examples import Examples, read_examples
from probemon.lab.training.generated import with_generated
from probemon.lab.training.measured import TrainingMeasurement, fitted
from probemon.lab.training.ordinary import ordinary
from probemon.lab.training.report import report_html
from probemon.lab.training.settings import TrainingSettings
from probemon.lab.training.standard import rounded
from probemon.lab.training.state_store import TextReader, held
from probemon.lab.training.states import States, read_states, spec_of
from probemon.packs.files import check_target
from probemon.packs.pack import ProbePack
from probemon.util.cache_folders import cache_dir
from probemon.util.counted import counted
from probemon.util.files import why_not_writable, write_text_atomically

REPORT = "report.html"
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
    job = TrainingJob(model, tokenizer, settings, target, say, progress)
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
        return job.finish(prepared_data, model_name(model_id), name or target.name, licence, overwrite, report)


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


def model_name(name: str) -> str:
    from probemon.bundled import MODEL_ID

    return MODEL_ID if name == "demo" else name


@dataclass(frozen=True)
class Kept:
    """What a pack holds of a training: concepts, by their places, card, quality, and alert thresholds `[P]` by set."""

    places: Sequence[int]
    card: str
    quality: Mapping[str, Any]
    alert_sets: Mapping[str, Floats]


class TrainingJob:
    """One training: `dataset` takes examples, `finish` trains on them and writes the pack."""

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
        self.sites = settings.sites(len(find_layers(self.host)[1]))
        self.reader = TextReader(model, tokenizer, self.sites, Reading())
        self.dtype = torch.float32 if self.host.dtype == torch.float32 else torch.bfloat16

    def dataset(
        self, examples: Examples, outside: Examples | None, read: Mapping[str, Mapping[str, bool | None]] | None = None
    ) -> Dataset:
        settings, plain = self.settings, None
        if settings.ordinary:
            plain = ordinary(self.tokenizer, texts=settings.ordinary, seed=settings.seed, read=read)
            plain = plain.unknown(settings.unknown_in, examples.concepts)
        data = Dataset.of_examples(
            examples,
            self.reader,
            ordinary=plain,
            outside=outside,
            held_out=self.settings.held_out,
            roles=self.settings.roles,
            chat_date=self.settings.chat_date,
            seed=self.settings.seed,
            most_carried=self.settings.carried,
        )
        only_test = int((data.is_of(OWN) & (data.fold == OUTSIDE)).sum())
        if outside is not None and only_test and not self.settings.held_out:
            self.say(
                f"{counted(only_test, 'text')} of the training only test: of a group, or near duplicates, of the texts"
                " elsewhere"
            )
        if data.n_twins:
            self.say(
                f"{counted(data.n_twins, 'pair')} of texts with unlike labels, otherwise much alike: kept together, as"
                " by one 'group'"
            )
        return data

    def finish(
        self,
        data: Dataset,
        model_id: str,
        name: str,
        licence: str,
        overwrite: bool,
        report: str | os.PathLike[str] | None,
        keep: Callable[[TrainingMeasurement, Mapping[str, Any]], Kept] | None = None,
    ) -> Trained:
        """Read states, choose, fit, measure, and write the pack; `keep` says what of it."""
        states = read_states(
            data,
            self.reader,
            self.settings.folder(self.out),
            cache_dir() / "ordinary",
            dtype=self.dtype,
            budget=self.settings.budget,
            seed=self.settings.seed,
            say=self.say,
            progress=self.progress,
        )
        self._check_room(data, states)
        found = search(states, data, self.sites, method=self.settings.method, say=self.say)
        final, scored = fitted(states, data, found)
        embeddings = self.host.get_input_embeddings().weight.detach()
        measurement = TrainingMeasurement.of(data, states, found, final, scored, self.settings, embeddings)
        quality = measurement.quality()
        page = report_html(name, data, measurement, quality)
        if keep is None:
            text = card(name, data, quality, self.settings, model_id)
            kept = Kept(range(len(data.concepts)), text, quality, measurement.alert_sets)
        else:
            kept = keep(measurement, quality)
        place = torch.tensor(kept.places, dtype=torch.long)
        site_of = [final.site_of[p] for p in kept.places]
        used = [site for site in self.sites if site in site_of]
        alert_sets = {name: torch.from_numpy(values)[place] for name, values in kept.alert_sets.items()}
        recommended = next(iter(alert_sets))
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
                for concept in (data.concepts[p] for p in kept.places)
            ],
            weights=rounded(final.w[place], final.b[place], final.mean[place], self.dtype),
            score_rule=PATH if data.is_tree else INDEPENDENT,
            inputs=[{"site": spec.site, "norm": spec.norm, "eps": spec.eps} for spec in map(spec_of, used)],
            input_index=torch.tensor([used.index(site) for site in site_of]),
            host=manifest_host(self.host, model_id),
            licence=licence,
            card=kept.card,
            alert_threshold=alert_sets.pop(recommended),
            alert_set=recommended,
            alert_sets=alert_sets,
            aggregated={name: values[place] for name, values in measurement.aggregated.items()} or None,
            score_counts={name: counts[place] for name, counts in measurement.score_counts.items()},
            familiar=[self._familiar(data, states, site) for site in used],
            golden_hidden=torch.stack([self._golden(data, states, site) for site in used], dim=1),
            provenance={
                "training": self.settings.as_dict(),
                "versions": _versions(),
                "examples": measurement.counts(),
                # only if a chat has a date
                **({"chat_date": self.settings.chat_date} if any(text.reads_date for text in data.texts) else {}),
            },
            quality=kept.quality,
            overwrite=overwrite,
        )
        if report is not None:
            write_text_atomically(Path(report), page)
        return Trained(pack, kept.quality, page)

    def _check_room(self, data: Dataset, states: States) -> None:
        """Raise `TrainingError` if the budget left a concept with too few texts."""
        for p, concept in enumerate(data.concepts):
            given = data.is_of(OWN) & (data.text_known[:, p] == 1) & (data.fold >= 0)
            if len(np.unique(data.fold[given & states.kept])) < len(np.unique(data.fold[given])):
                most = sum(map(len, data.wanted)) * self.reader.row_bytes
                raise TrainingError(
                    f"too few texts of {concept.id!r} fit in the budget of {self.settings.budget} bytes: {most} are"
                    " enough for all (--budget), fewer layers need less (--layers)"
                )

    def _familiar(self, data: Dataset, states: States, site: str) -> Familiar | None:
        width = self.reader.kinds_of[site].width
        own = (data.fold >= 0) & states.kept
        learnt = self._some(states, site, own & (data.fold != 0))
        held_out = self._some(states, site, own & (data.fold == 0))
        if len(learnt) <= max(64, width // 2) or len(held_out) < 100:
            return None
        return Familiar.of(learnt, held_out)

    def _some(self, states: States, site: str, use: np.ndarray) -> torch.Tensor:
        """Return at most `_N_FAMILIAR` prepared states of texts `use [N]`, evenly spread."""
        lengths = sum(
            np.bincount(store.document, minlength=len(places)) @ use[places] for store, places in states.stores
        )
        every = max(1, int(lengths) // _N_FAMILIAR)
        nothing = torch.zeros(0, self.reader.kinds_of[site].width)
        return torch.cat([nothing, *(block.x[::every] for block in states.blocks(site, use))])

    def _golden(self, data: Dataset, states: States, site: str) -> torch.Tensor:
        """Return the last states of a few own texts `[G, D]`, not prepared."""
        own = np.flatnonzero(data.is_of(OWN) & states.kept & (data.fold != OUTSIDE))
        use = np.zeros(len(data.texts), dtype=bool)
        use[own[np.unique(np.linspace(0, len(own) - 1, _N_GOLDEN).astype(np.int64))]] = True
        found = []
        for block in states.blocks(site, use, raw=True):
            last = np.flatnonzero(np.diff(block.document, append=-1))
            found.append(block.x[last])
        return torch.cat(found)


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "probemon": version("probemon"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
