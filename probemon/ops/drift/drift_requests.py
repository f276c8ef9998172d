"""Collects the requests of one run for a DriftMonitor.

Memory holds the sums of open requests, whatever their length.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import norms_of
from probemon.core.request_counts import (
    MOSTLY,
    N_NORM_BINS,
    NEAR_END,
    SAME,
    RequestTraits,
    median_bins,
    norm_bins,
)
from probemon.core.scores import Scores
from probemon.host.model import find_layers, text_config
from probemon.monitor.followers import Batch, Follower
from probemon.monitor.watches import Watch
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generation import States
from probemon.tracking.recording import Recording

if TYPE_CHECKING:
    from probemon.ops.drift.drift_monitor import DriftMonitor

_MOST_OPEN = 256  # documents; their end is not announced


class RunRequests(Follower):
    """Adds the requests of one run to `drift`. `only`: the watched thread; None for all.

    Raises `ConfigError` if another open run adds them.
    """

    def __init__(self, drift: DriftMonitor, model: Any, tokenizer: Any, only: threading.Thread | None) -> None:
        self.drift, self._model, self._tokenizer, self._only = drift, model, tokenizer, only
        self._open: dict[Recording, _Rows] = {}
        self._compared: tuple[Watch, bool] | None = None
        self._lock = threading.Lock()
        self._norms: weakref.WeakKeyDictionary[Batch, Tensor] = weakref.WeakKeyDictionary()  # until they are scored
        self._special = _special_ids(model, tokenizer)
        drift.begin(self)

    def shares_with(self, other: RunRequests) -> bool:
        """True if both runs may have the same request."""
        one, another = (find_layers(requests._model)[1] for requests in (self, other))
        return one is another and (self._only is None or other._only is None or self._only is other._only)

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Keep the norms of hidden states."""
        if not isinstance(hidden, str):
            self._norms[batch] = norms_of(hidden, self.drift.sites)

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Add tokens to their requests."""
        norms = self._norms.pop(batch, None)
        self._add(batch.watch, batch.recording, batch.placed, scores, norms)

    def finish(self, failed: bool) -> None:
        """End all open requests."""
        with self._lock:
            for recording in list(self._open):
                self._end(recording)
        self.drift.end(self)

    # -- inside --------------------------------------------------------------------------------------

    def _add(
        self, watch: Watch, recording: Recording, placed: PlacedTokens, scores: Scores, norms: Tensor | None
    ) -> None:
        with self._lock:
            if recording not in self._open:
                self._end_those_before()
                identity = self.drift.identity(self._model, self._tokenizer, recording.mark)
                self._open[recording] = _Rows(self.drift, identity, self._special)
            rows = self._open[recording]
        values = None if norms is None else norms.cpu().numpy()
        rows.add(placed, scores, values, comparable=self._compares(watch))

    def _compares(self, watch: Watch) -> bool:
        if self._compared is None or self._compared[0] is not watch:
            self._compared = (watch, self.drift.compares(watch.plan))
        return self._compared[1]

    def _end_those_before(self) -> None:
        done = [one for one in self._open if one.done and one.call.prompt_columns is not None]
        documents = [one for one in self._open if one.call.prompt_columns is None]
        for recording in [*done, *documents[: max(0, len(documents) - _MOST_OPEN + 1)]]:
            self._end(recording)

    def _end(self, recording: Recording) -> None:
        rows = self._open.pop(recording)
        # A continuation from a cache lacks its beginning.
        whole = recording.call.first_column <= 0 and not recording.cancelled
        for traits in rows.traits(known=whole and recording.beams is None and not recording.model_changed):
            if traits is None:
                self.drift.leave_out()
            else:
                self.drift.add(traits, rows.host)


class _Rows:
    """Sums over the tokens of each row, without `special` ones at its beginning."""

    def __init__(self, drift: DriftMonitor, identity: Mapping[str, str], special: Ints) -> None:
        self.host, self._special = identity, special
        self._place = np.full(len(drift.alert), -1, dtype=np.int64)
        self._place[drift.scored_probes] = np.arange(len(drift.scored_probes))
        self._shapes = {"fired": len(drift.alert), "scored": len(drift.scored_probes), "sites": len(drift.sites)}
        self._rows: dict[str, np.ndarray] = {}
        self._grow(0)

    def _grow(self, n_rows: int) -> None:
        n_fired, n_scored, n_sites = self._shapes.values()
        fresh: dict[str, np.ndarray] = {
            "fired": np.zeros((n_rows, n_fired), dtype=bool),
            "highest": np.full((n_rows, n_scored), -np.inf, dtype=np.float32),
            "lowest": np.full((n_rows, n_scored), np.inf, dtype=np.float32),
            "n_low": np.zeros((n_rows, n_scored), dtype=np.int32),
            "n_high": np.zeros((n_rows, n_scored), dtype=np.int32),
            "norms": np.zeros((n_rows, n_sites, N_NORM_BINS), dtype=np.int32),
            "n_tokens": np.zeros(n_rows, dtype=np.int64),
            "incomplete": np.zeros(n_rows, dtype=bool),
            "begun": np.zeros(n_rows, dtype=bool),  # has a token that is not special
        }
        for name, values in self._rows.items():
            fresh[name][: len(values)] = values
        self._rows = fresh

    def add(self, placed: PlacedTokens, scores: Scores, norms: np.ndarray | None, *, comparable: bool) -> None:
        rows = placed.rows
        if rows.size and rows.max() >= len(self._rows["n_tokens"]):
            self._grow(int(rows.max()) + 1)
        counted = self._begun(placed)
        if not counted.all():
            which = np.flatnonzero(counted)
            rows, scores, norms = rows[which], scores.take(which), None if norms is None else norms[which]
        sums, coverage = self._rows, scores.coverage
        seen = coverage.seen
        sums["incomplete"][rows[~seen | (coverage.dropped > 0) | (not comparable)]] = True
        np.add.at(sums["n_tokens"], rows, 1)
        state = scores.state_of
        fired = scores.fired_mask
        sums["fired"][rows[state[fired]], scores.probes[fired]] = True
        at = np.flatnonzero(seen)
        if not len(at):
            return
        place = self._place[scores.probes]
        always = place >= 0
        dense = np.zeros((len(rows), sums["highest"].shape[1]), dtype=np.float32)
        dense[state[always], place[always]] = scores.values[always]
        order = at[np.argsort(rows[at], kind="stable")]
        which, first = np.unique(rows[order], return_index=True)
        dense = dense[order]
        sums["highest"][which] = np.maximum(sums["highest"][which], np.maximum.reduceat(dense, first))
        sums["lowest"][which] = np.minimum(sums["lowest"][which], np.minimum.reduceat(dense, first))
        sums["n_low"][which] += np.add.reduceat((dense <= NEAR_END).astype(np.int32), first)
        sums["n_high"][which] += np.add.reduceat((dense >= 1 - NEAR_END).astype(np.int32), first)
        if norms is not None:
            sites = np.arange(norms.shape[1])
            np.add.at(sums["norms"], (rows[at, None], sites[None], norm_bins(norms[at])), 1)

    def _begun(self, placed: PlacedTokens) -> Mask:
        """Return a mask `[n]` of tokens after the special ones that begin their row."""
        before: Mask = self._rows["begun"][placed.rows]
        if before.all():
            return before
        order = np.lexsort((placed.columns, placed.rows))
        rows, plain = placed.rows[order], ~np.isin(placed.ids[order], self._special)
        n_plain = np.cumsum(plain)
        _, first, of_row = np.unique(rows, return_index=True, return_inverse=True)
        begun = np.empty(len(rows), dtype=bool)
        begun[order] = n_plain > (n_plain - plain)[first][of_row]
        begun |= before
        self._rows["begun"][placed.rows[begun]] = True
        return begun

    def traits(self, *, known: bool) -> list[RequestTraits | None]:
        """Return the traits of every row with tokens, None if unknown."""
        sums, traits = self._rows, list[RequestTraits | None]()
        for row in np.flatnonzero(sums["n_tokens"]).tolist():
            if sums["incomplete"][row] or not known:
                traits.append(None)
                continue
            highest, mostly = sums["highest"][row], MOSTLY * sums["n_tokens"][row]
            traits.append(
                RequestTraits(
                    fired=sums["fired"][row],
                    highest=highest,
                    low=sums["n_low"][row] >= mostly,
                    high=sums["n_high"][row] >= mostly,
                    flat=highest - sums["lowest"][row] <= SAME,
                    norm_bins=median_bins(sums["norms"][row]),
                )
            )
        return traits


def _special_ids(model: Any, tokenizer: Any) -> Ints:
    ids = getattr(tokenizer, "all_special_ids", None)
    if ids is None:
        begins = getattr(text_config(model), "bos_token_id", None)
        ids = [] if begins is None else np.atleast_1d(begins)
    return np.asarray(ids, dtype=np.int64)
