"""Sinks: receive scores during a run.

    run.follow(JsonLinesSink("scores.jsonl", top_k=10))
    run.follow(ParquetSink("scores.parquet"))
    run.follow(MemorySink(max_tokens=10_000))
    run.follow(CallbackSink(print))

Any object with the methods of `Sink` is one.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from probemon.core.scores import COUNTS, PHASES, TokenBatch
from probemon.errors import ConfigError, SinkFailed
from probemon.util.checks import check_bool, check_count
from probemon.util.extras import import_arrow
from probemon.util.files import replace_file


class Sink(Protocol):
    """Receives scores. One thread calls all methods; after an error of `open` or `write` only `close` is called.

    Optional attribute `lost`: True if, after an error, all tokens that it took are lost. They then count as dropped.
    """

    def open(self, concepts: Sequence[str]) -> None:
        """Begin, before the first tokens. `concepts`: ids by probe number."""

    def write(self, batch: TokenBatch) -> None:
        """Take tokens of one generation, in the order of scoring."""

    def close(self) -> None:
        """Finish; harmless if not open."""


class MemorySink:
    """Keeps the newest `max_tokens` tokens in `batches`; counts others in `n_forgotten`. Other threads may read it."""

    def __init__(self, max_tokens: int = 10_000) -> None:
        self.max_tokens = check_count("max_tokens", max_tokens, least=1)
        self._lock = threading.Lock()
        self._held: deque[TokenBatch] = deque()
        self._n_held = self._n_seen = 0

    @property
    def batches(self) -> list[TokenBatch]:
        """Return the kept batches, oldest first."""
        with self._lock:
            batches, surplus = list(self._held), max(0, self._n_held - self.max_tokens)
        return [_without(batches[0], surplus), *batches[1:]] if surplus else batches

    @property
    def n_forgotten(self) -> int:
        with self._lock:
            return self._n_seen - min(self._n_held, self.max_tokens)

    def __len__(self) -> int:
        with self._lock:
            return min(self._n_held, self.max_tokens)

    def open(self, concepts: Sequence[str]) -> None:
        pass

    def write(self, batch: TokenBatch) -> None:
        if not len(batch):
            return
        newest = _without(batch, max(0, len(batch) - self.max_tokens))
        with self._lock:
            self._held.append(newest)
            self._n_held += len(newest)
            self._n_seen += len(batch)
            # Whole batches only: cutting would copy a long prompt at every token.
            while self._n_held - len(self._held[0]) >= self.max_tokens:
                self._n_held -= len(self._held.popleft())

    def close(self) -> None:
        pass


class CallbackSink:
    """Calls `function(batch)`."""

    def __init__(self, function: Callable[[TokenBatch], object]) -> None:
        self._function = function

    def open(self, concepts: Sequence[str]) -> None:
        pass

    def write(self, batch: TokenBatch) -> None:
        self._function(batch)

    def close(self) -> None:
        pass


class FileSink(ABC):
    """A sink whose file appears whole at `close` or not at all: an error removes it (`lost`).

    Raises `ConfigError` if `path` exists (unless `overwrite`), is a folder, or has none. If the name is taken
    meanwhile, `close` raises `SinkFailed` and keeps the file under a hidden name.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        self.path = Path(path)
        self._overwrite = check_bool("overwrite", overwrite)
        self.lost = False
        self._partial: Path | None = None
        self._writer: Any = None
        self._file: Any = None
        if not self.path.parent.is_dir():
            raise ConfigError(f"{self.path.parent} is not a folder: make it first")
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder: give the name of a file")
        if os.path.lexists(self.path) and not overwrite:
            raise ConfigError(f"{self.path} exists: give another name, or overwrite=True")

    def open(self, concepts: Sequence[str]) -> None:
        if self._writer is not None:
            raise SinkFailed(f"{self.path} was opened before: make a new sink")
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=self.path.parent)
        self._partial = Path(name)
        os.close(handle)
        with self._removed_on_error():
            self._counted = _Counted(self._partial)
            self._file = io.BufferedWriter(self._counted)
            self._writer = self._begin(self._file, list(concepts))

    def write(self, batch: TokenBatch) -> None:
        if self._partial is None:
            raise SinkFailed(f"{self.path} is not open (not yet, or closed, or failed): open a new sink")
        with self._removed_on_error():
            self._append(batch)

    def close(self) -> None:
        if self._partial is None:
            return
        with self._removed_on_error():
            self._finish()
            self._file.close()
            self._check_whole(self._partial.stat().st_size)
            self._partial.chmod(0o644)
        finished, self._partial = self._partial, None
        try:
            if self._overwrite:
                replace_file(finished, self.path)
            else:
                os.link(finished, self.path)  # unlike a rename, fails if the name exists
                finished.unlink()
        except OSError as error:
            raise SinkFailed(
                f"{self.path} cannot be made ({error.strerror}): the finished scores are in {finished}, move them"
            ) from error

    @contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for opened in (self._writer, self._file):
                with suppress(Exception):
                    opened.close()
            if self._partial is not None:
                self._partial.unlink(missing_ok=True)
                self._partial = None
                self.lost = True
            raise

    def _check_whole(self, n_bytes: int) -> None:
        """Raise if the file's size is not what was written."""
        if n_bytes != self._counted.n_written:
            raise SinkFailed(
                f"{self.path}: {self._counted.n_written:,} bytes were written and {n_bytes:,} are there: something else"
                f" wrote to the unfinished file .{self.path.name}-... or cut it off, so its scores are lost. Leave it"
                " alone until the block ends"
            )

    @abstractmethod
    def _begin(self, file: BinaryIO, concepts: list[str]) -> Any:
        """Return a writer with `close()`."""

    @abstractmethod
    def _append(self, batch: TokenBatch) -> None: ...

    @abstractmethod
    def _finish(self) -> None:
        """Write what is buffered; close a separate writer."""


class _Counted(io.FileIO):
    """An append-only file that counts its bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "ab")
        self.n_written = 0

    def write(self, data: Any) -> int:
        n = super().write(data)
        self.n_written += n
        return n


class JsonLinesSink(FileSink):
    """Writes a JSON object per token and line.

    - `generation`, `row`, `position`, `token_id`, `phase` ("prompt" or "generated")
    - `provisional`: true in beams, whose `row` is not the output's (`core.scores.TokenBatch`)
    - `request`, `deployment` (hash): if any
    - `scores`: `[concept id, score]` of active probes, best first, at most `top_k` (None: all); null for NaN
    - `fired`: concept ids
    - `coverage`: counts of probes; `far`: 1 if unlike the calibration; `excluded`, `shed` unless 0
    - `unseen`: why there are no scores, or ""
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, *, top_k: int | None = None) -> None:
        super().__init__(path, overwrite)
        self._top_k = None if top_k is None else check_count("top_k", top_k)

    def _begin(self, file: BinaryIO, concepts: list[str]) -> Any:
        self._concepts = concepts
        return file

    def _append(self, batch: TokenBatch) -> None:
        self._writer.write("".join(json.dumps(self._line(batch, t)) + "\n" for t in range(len(batch))).encode())

    def _finish(self) -> None:
        """Nothing is buffered."""

    def _line(self, batch: TokenBatch, t: int) -> dict[str, Any]:
        scores, coverage = batch.scores, batch.scores.coverage
        best = scores.top(t, len(scores.active(t)) if self._top_k is None else self._top_k)
        return {
            "generation": int(batch.generation),
            **{name: getattr(batch, name) for name in ("request", "deployment") if getattr(batch, name)},
            "row": int(batch.row[t]),
            "position": int(batch.position[t]),
            "token_id": int(batch.token_id[t]),
            "phase": PHASES[batch.phase],
            "provisional": bool(batch.provisional),
            "scores": [[self._concepts[probe], None if np.isnan(score) else score] for probe, score in best],
            "fired": [self._concepts[probe] for probe in scores.fired(t)],
            "coverage": {
                n: int(getattr(coverage, n)[t])
                for n in ("active", "dropped", "not_reached", "evaluated", "far", "excluded", "shed")
                if n not in ("excluded", "shed") or getattr(coverage, n)[t]
            },
            "unseen": coverage.unseen[t],
        }


class ParquetSink(FileSink):
    """Writes a row for each token and active concept. Needs the extra `corpus`.

        table = pyarrow.parquet.read_table(path, read_dictionary=["concept", "phase"])
        about = json.loads(table.schema.metadata[b"probemon"])

    Columns: generation, request, row, position, token_id, phase, provisional, concept, score. `about` has totals in
    `coverage`, the first `max_unseen` `unseen` tokens (larger footers cannot be read back), and `deployments`.
    """

    max_unseen = 100_000

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, *, rows_per_group: int = 50_000) -> None:
        import_arrow("ParquetSink")  # early, before any score is lost
        super().__init__(path, overwrite)
        self._rows_per_group = check_count("rows_per_group", rows_per_group, least=1)
        self._columns: list[list[Any]] = []  # columns of each unwritten batch
        self._n_held = 0
        self._totals: Counter[str] = Counter()
        self._unseen: list[dict[str, Any]] = []
        self._deployments: dict[str, dict[str, Any]] = {}

    def _begin(self, file: BinaryIO, concepts: list[str]) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._concepts = np.asarray(concepts, dtype=object)
        text, number = pa.string(), pa.int32()
        self._schema = pa.schema(
            {
                "generation": number,
                "request": text,
                "row": number,
                "position": number,
                "token_id": number,
                "phase": text,
                "provisional": pa.bool_(),
                "concept": text,
                "score": pa.float32(),
            }
        )
        # With a stored Arrow schema, readers would miss metadata added at the end.
        return pq.ParquetWriter(file, self._schema, store_schema=False)

    def _append(self, batch: TokenBatch) -> None:
        scores, coverage, n = batch.scores, batch.scores.coverage, len(batch.scores.values)
        token = scores.state_of
        self._totals.update(coverage.totals())
        if batch.deployment and len(batch) and batch.deployment not in self._deployments:
            self._deployments[batch.deployment] = {"deployment": batch.deployment, **_place(batch, 0)}
        for t, reason in enumerate(coverage.unseen):
            if reason and len(self._unseen) < self.max_unseen:
                self._unseen.append({**_place(batch, t), "reason": reason})
        if not n:
            return
        self._columns.append(
            [
                np.full(n, batch.generation),
                np.full(n, batch.request, object),
                batch.row[token],
                batch.position[token],
                batch.token_id[token],
                np.full(n, PHASES[batch.phase], object),
                np.full(n, batch.provisional),
                self._concepts[scores.probes],
                scores.values,
            ]
        )
        self._n_held += n
        if self._n_held >= self._rows_per_group:
            self._write_groups(self._n_held - self._n_held % self._rows_per_group)

    def _write_groups(self, n: int) -> None:
        """Write the first `n` buffered rows."""
        import pyarrow as pa

        columns = [np.concatenate(parts) for parts in zip(*self._columns, strict=True)]
        arrays = [pa.array(column[:n], kind) for column, kind in zip(columns, self._schema.types, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._rows_per_group)
        self._columns, self._n_held = [[column[n:].copy() for column in columns]], self._n_held - n

    def _finish(self) -> None:
        if self._n_held:
            self._write_groups(self._n_held)
        names = ("tokens", "unseen", *COUNTS, "far")
        metadata = {
            "coverage": {name: self._totals[name] for name in names},
            "unseen": self._unseen,
            "deployments": list(self._deployments.values()),
        }
        self._writer.add_key_value_metadata({"probemon": json.dumps(metadata)})
        self._writer.close()


def _place(batch: TokenBatch, t: int) -> dict[str, Any]:
    row, position = int(batch.row[t]), int(batch.position[t])
    return {"generation": int(batch.generation), "row": row, "position": position, "provisional": batch.provisional}


def _without(batch: TokenBatch, n: int) -> TokenBatch:
    """Return a copy without the first `n` tokens."""
    if not n:
        return batch
    indices = np.arange(n, len(batch))
    arrays = {name: getattr(batch, name)[indices] for name in ("row", "position", "token_id")}
    return dataclasses.replace(batch, scores=batch.scores.take(indices), **arrays)
