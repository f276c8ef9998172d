"""Routing records: one line per decision of a router, as JSON lines or parquet.

monitor.add_sink(RoutingJsonLines("routing.jsonl"))
monitor.add_sink(CallbackSink(print))               # one RoutingRecord per batch
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from probemon.adapters.routing.decisions import BEM, XLORA, Changes, Decisions, Singles, Stream, entropy, norms
from probemon.core.hierarchy import Ints, Mask
from probemon.core.scores import PHASES, PROMPT
from probemon.monitor.sinks import FileSink
from probemon.tracking.align import PlacedTokens
from probemon.tracking.recording import Recording
from probemon.util.checks import check_count
from probemon.util.extras import import_arrow

_TOP = ("top_idx", "top_w", "top_position", "top_token")  # of `Decisions`, by stream
_BY_TOKEN = ("delta_rel_norm", "sigma1", "confidence", "fallback")


@dataclass(frozen=True)
class RoutingRecord:
    """N decisions of the routers of one source. Arrays are `[N]`; `top_*` are `[N, k]`.

    - `request_id`: of continuous batching, else the generation's number.
    - `row`, `pos_start`: first token in the output of `generate`.
    - `n_tokens`: successive tokens that use the decision.
    - `step`: 0 for a prompt, n for the n-th generated token; `phase`: "prompt" or "generated".
    - `layer`, `site`, `source`, `level`: see `Stream`.
    - `boundary`: decided at this token; `reused`: decided in an earlier line.
    - `top_*`, `sigma1`, `delta_rel_norm`, `confidence`: see `Decisions`.
    - `h_decision`: entropy in units of log E; NaN for codes.
    - `code_norm`: norm of a code or of scalings.
    - `flip`: the top choice differs from the previous token's.
    - `fallback`: in force at all tokens.
    - `t_capture_us`: mean microseconds per decision of the batch.
    - `dropped`: earlier decisions without a record (token not seen, sink too slow).
    """

    run_id: str
    request_id: str
    row: Ints
    step: Ints
    phase: str
    layer: Ints
    site: npt.NDArray[np.str_]
    source: str
    level: npt.NDArray[np.str_]
    pos_start: Ints
    n_tokens: Ints
    boundary: Mask
    top_idx: Ints
    top_w: Singles
    top_position: Ints | None
    top_token: Ints | None
    h_decision: Singles
    code_norm: Singles
    delta_rel_norm: Singles
    sigma1: Singles
    confidence: Singles
    flip: Mask
    reused: Mask
    fallback: Mask
    t_capture_us: float
    dropped: int

    def __len__(self) -> int:
        return len(self.row)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield each decision as a dict; non-finite numbers are None."""
        for values in zip(*map(self.column, COLUMNS), strict=True):
            yield dict(zip(COLUMNS, values, strict=True))

    def column(self, name: str) -> list[Any]:
        """Return a column as plain values; non-finite numbers are None."""
        value = getattr(self, name)
        if not isinstance(value, np.ndarray):
            return [None if isinstance(value, float) and not math.isfinite(value) else value] * len(self)
        if value.dtype.kind == "f" and not (finite := np.isfinite(value)).all():
            value = value.astype(object)
            value[~finite] = None
        plain: list[Any] = value.tolist()
        return plain

    @classmethod
    def of(
        cls,
        decisions: Decisions,
        changes: Changes,
        streams: Sequence[Stream],
        placed: PlacedTokens,
        recording: Recording,
        **scalars: Any,
    ) -> RoutingRecord:
        """Return the record of decisions about `placed` tokens.

        Successive tokens with the same decision and fallback share a line. `scalars`: the other columns.
        """
        rows, positions, prompt = placed.rows, placed.columns - recording.offset, recording.call.prompt_columns
        if placed.phase == PROMPT or prompt is None:
            steps = np.zeros(len(placed), np.int64)
        else:
            steps = placed.columns - prompt + 1
        follows = (rows[1:] == rows[:-1]) & (positions[1:] == positions[:-1] + 1)
        begins = np.ones(decisions.decided.shape, dtype=bool)
        begins[:, 1:] = decisions.decided[:, 1:] | ~follows | (decisions.fallback[1:] != decisions.fallback[:-1])
        stream, token = np.nonzero(begins)
        end_of = np.append(stream[1:] * len(rows) + token[1:], len(streams) * len(rows))
        raw = decisions.raw[stream, token]
        if decisions.weights is None:
            h = np.full(len(stream), np.nan, dtype=np.float32)
        else:
            shares = np.where(decisions.finite[stream, token, None], decisions.weights[stream, token], np.nan)
            h = (entropy(shares) / math.log(raw.shape[1])).astype(np.float32)
        source = streams[0].source
        has_norm = source in (BEM, XLORA)
        norm = norms(raw).astype(np.float32) if has_norm else np.full(len(stream), np.nan, dtype=np.float32)
        decided = decisions.decided[stream, token]
        columns: dict[str, Any] = {name: getattr(decisions, name)[token] for name in _BY_TOKEN}
        for name in _TOP:
            columns[name] = None if (values := getattr(decisions, name)) is None else values[stream, token]
        for name in ("layer", "site", "level"):
            columns[name] = np.array([getattr(one, name) for one in streams])[stream]
        return cls(
            request_id=recording.request or str(recording.number),
            source=source,
            phase=PHASES[placed.phase],
            row=rows[token],
            step=steps[token],
            pos_start=positions[token],
            n_tokens=end_of - (stream * len(rows) + token),
            boundary=decided,
            h_decision=h,
            code_norm=norm,
            flip=changes.flips[stream, token] == 1,
            reused=~decided,
            **columns,
            **scalars,
        )


COLUMNS = tuple(field.name for field in fields(RoutingRecord))


class RoutingJsonLines(FileSink):
    """A sink that writes one JSON object per decision; unknown values are null."""

    def _begin(self, file: BinaryIO, concepts: list[str]) -> Any:
        return file

    def _append(self, batch: Any) -> None:
        self._writer.write("".join(json.dumps(line) + "\n" for line in batch.lines()).encode())

    def _finish(self) -> None:
        """Nothing is buffered."""


class RoutingParquet(FileSink):
    """A sink that writes one row per decision; unknown values are null. Needs the extra `corpus`."""

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False, *, rows_per_group: int = 50_000) -> None:
        import_arrow("RoutingParquet")  # fail before any score is lost
        super().__init__(path, overwrite)
        self._rows_per_group = check_count("rows_per_group", rows_per_group, least=1)
        self._held: list[RoutingRecord] = []
        self._n_held = 0

    def _begin(self, file: BinaryIO, concepts: list[str]) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        text, whole, number, truth = pa.string(), pa.int32(), pa.float32(), pa.bool_()
        kinds = {
            **dict.fromkeys(("run_id", "request_id", "phase", "site", "source", "level"), text),
            **dict.fromkeys(("row", "step", "layer", "pos_start", "n_tokens"), whole),
            "dropped": pa.int64(),
            "t_capture_us": pa.float64(),
            **dict.fromkeys(("boundary", "flip", "reused", "fallback"), truth),
            **dict.fromkeys(("top_idx", "top_position", "top_token"), pa.list_(whole)),
            "top_w": pa.list_(number),
            **dict.fromkeys(("h_decision", "code_norm", "delta_rel_norm", "sigma1", "confidence"), number),
        }
        self._schema = pa.schema([(name, kinds[name]) for name in COLUMNS])
        return pq.ParquetWriter(file, self._schema)

    def _append(self, batch: Any) -> None:
        self._held.append(batch)
        self._n_held += len(batch)
        if self._n_held >= self._rows_per_group:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa

        columns = {name: [value for record in self._held for value in record.column(name)] for name in COLUMNS}
        self._writer.write_table(pa.Table.from_pydict(columns, self._schema), row_group_size=self._rows_per_group)
        self._held, self._n_held = [], 0

    def _finish(self) -> None:
        if self._held:
            self._write()
        self._writer.close()
