"""Analyses a corpus on several machines with Ray Data. Needs the extra `ray`.

    job = CorpusJob(model="demo", pack="demo", out="/shared/scores")
    analysis = analyze_dataset(ray.data.read_parquet("s3://mails/"), job, concurrency=2)

The driver spools shards next to the analysis, on a file system that all workers see.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from probemon import errors
from probemon.errors import ConfigError, MissingExtra, ProbemonError
from probemon.host.loading import load_model
from probemon.lab.corpora.analysis_folder import MANIFEST, Analysis, check_target
from probemon.lab.corpora.analyze import (
    Progress,
    Tables,
    check_apart,
    check_known,
    environment,
    identity,
    kernel_of,
    write,
)
from probemon.lab.corpora.corpus import CorpusScorer
from probemon.lab.corpora.documents import MAX_CHARS, Document, Documents
from probemon.lab.corpora.windows import DocumentShard, Reading, shards
from probemon.packs.group import AnyPack, open_packs
from probemon.util.checks import check_count

_SPOOL = ".spool"
_NO_SHARD = -1  # the worker only checks that job and analysis match


@dataclass(frozen=True)
class CorpusJob:
    """Names and paths that are the same on every machine, and the settings of `analyze`.

    - `pack`: one or several, also "NAME=pack".
    - `load`: returns `(model, tokenizer)` in a worker, if `model` is not a loadable name.
    - `settings`: of `DynamicProbeManager`.
    """

    model: str
    pack: str | Sequence[str]
    out: str
    device: str = "cpu"
    dtype: str = "bfloat16"
    load: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    floor: float | str = "fired"
    reading: Reading = field(default_factory=Reading)
    keep_text: bool = True
    strict: bool = False

    def opened(self) -> AnyPack:
        return open_packs([self.pack] if isinstance(self.pack, str) else self.pack)


def analyze_dataset(
    documents: Any,
    job: CorpusJob,
    *,
    concurrency: int = 2,
    resume: bool = False,
    text_field: str = "text",
    id_field: str = "id",
    max_chars: int = MAX_CHARS,
    progress: Progress | None = None,
) -> Analysis:
    """Analyse a Ray dataset, in the order of its rows, or another source. Other arguments: see `analyze`.

    Sets `preserve_order` in the dataset's context. Raises `MissingExtra`, `ConfigError`, and errors of workers.
    """
    ray = _ray()
    from probemon.engine.scorer import Scorer

    concurrency = check_count("concurrency", concurrency, least=1, remedy="give 1 or more workers")
    corpus = documents if isinstance(documents, Documents) else Documents(documents, text_field, id_field, max_chars)
    if isinstance(corpus.source, ray.data.Dataset):
        # Datasets copy the context when made.
        corpus.source.context.execution_options.preserve_order = True
        corpus = replace(corpus, source=corpus.source.iter_rows())
    out = Path(job.out).absolute()
    check_apart(corpus.source, out)
    check_target(out)
    if (out / MANIFEST).is_file() and not resume:
        raise ConfigError(f"{out} has an analysis: pass resume=True to continue it, or give another folder")
    # All workers use one kernel.
    settings = dict(job.settings)
    settings |= {name: value for name, value in kernel_of(out).items() if settings.get(name) in (None, "auto")}
    manager = Scorer(job.opened(), device=job.device, **settings)
    settings |= {"impl": manager.impl, "strategy": manager.strategy.batch}
    Tables(manager.pack, job.floor, job.keep_text)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made ({error.strerror}): give another folder") from error
    with Analysis(out, {}).locked(), _spool_of(out):
        return _spread(ray, job, out, settings, iter(corpus), concurrency, progress)


def _spread(
    ray: Any,
    job: CorpusJob,
    out: Path,
    settings: Mapping[str, Any],
    documents: Iterator[Document],
    concurrency: int,
    progress: Progress | None,
) -> Analysis:
    analysis, todo, digests = Analysis(out, {}), list[int](), list[str]()
    for shard in shards(documents):
        digests.append(shard.digest)
        if check_known(analysis, shard) is None:
            _spool(out, shard)
            todo.append(shard.index)
        elif progress is not None:
            progress(len(shard.documents), 0)
    # One worker always runs, to check that the analysis is of this job.
    items = [{"index": index} for index in todo or [_NO_SHARD]]
    results = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Worker,
        fn_constructor_args=(job, str(out), settings, environment()["threads"]),
        batch_size=1,
        concurrency=concurrency,
        num_cpus=1 if job.device == "cpu" else 0,
        num_gpus=0 if job.device == "cpu" else 1,
    )
    for row in results.iter_rows():
        if row["error"]:
            raise getattr(errors, row["error"])(row["message"])
        if progress is not None:
            progress(row["documents"], row["tokens"])
    begun = Analysis.open(out, unfinished=True)
    begun.finish(digests)
    return begun


class _Worker:
    def __init__(self, *arguments: Any) -> None:  # errors here only report that the actor died
        self._arguments, self._ready = arguments, False

    def _get_ready(self, job: CorpusJob, out: str, settings: Mapping[str, Any], threads: int) -> None:
        import torch

        from probemon.engine.scorer import Scorer

        torch.set_num_threads(threads)  # Ray sets 1, which changes the last bits of states
        model, tokenizer = (
            job.load()
            if job.load is not None
            else load_model(job.model, job.device, lambda line: None, dtype=job.dtype)
        )
        manager = Scorer(job.opened(), device=job.device, **settings)
        tables = Tables(manager.pack, job.floor, job.keep_text, manager.plan.watched)
        self._scorer = CorpusScorer(manager, model, tokenizer, job.reading, strict=job.strict, floor=tables.lowest)
        self._tables = tables
        self._analysis = Analysis.begin(out, identity(self._scorer, self._tables), environment(), resume=True)
        self._ready = True

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        outcomes: dict[str, list[Any]] = {"documents": [], "tokens": [], "error": [], "message": []}

        def add_row(*values: Any) -> None:
            for column, value in zip(outcomes.values(), values, strict=True):
                column.append(value)

        try:
            if not self._ready:
                self._get_ready(*self._arguments)
            for index in batch["index"].tolist():
                if index == _NO_SHARD:
                    add_row(0, 0, "", "")
                    continue
                shard = _spooled(self._analysis.directory, index)
                self._analysis.reopen(index, shard.digest)
                for scored in self._scorer.score([shard]):
                    write(self._analysis, self._tables, scored)
                    add_row(len(scored.documents), int(scored.ptr[-1]), "", "")
        except ProbemonError as error:  # as a row: Ray returns only the text of exceptions
            add_row(0, 0, type(error).__name__, str(error))
        return outcomes


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtra("many machines need Ray Data: pip install 'probemon[ray]'") from error
    return ray


@contextmanager
def _spool_of(out: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(out / _SPOOL, ignore_errors=True)


def _spool(out: Path, shard: DocumentShard) -> None:
    (out / _SPOOL).mkdir(exist_ok=True)
    names = ("index", "id", "text", "reason", "chat")
    rows = [{name: getattr(document, name) for name in names} for document in shard.documents]
    target = out / _SPOOL / f"{shard.index:05d}.json"
    partial = target.with_name(f".{target.name}")
    partial.write_text(json.dumps(rows), encoding="utf-8")
    os.replace(partial, target)


def _spooled(out: Path, index: int) -> DocumentShard:
    rows = json.loads((out / _SPOOL / f"{index:05d}.json").read_text(encoding="utf-8"))
    return DocumentShard(index, tuple(Document(**row) for row in rows))
