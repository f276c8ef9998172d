"""StateRecorder: what the recurrent layers of one host do with accepted tokens, added up by layer.

    recorder = StateRecorder(model, states=False, guard=failures.call)
    watcher = Watcher(model, [*sites, *recorder.sites], n_probes, score, reports=recorder)
    report = recorder.take(recording, placed, states)       # in `score`, before the tokens are in the recording
    recorder.report(), recorder.alerts

A `StateMonitor` hosts it, or the routing that is watched beside a run. Whose each token is, the tracking of hidden
states finds out (`probemon.tracking.watcher`): only tokens of the output count. With beams they count when `generate()`
returns, those that several returned sequences share once.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.adapters.routing.alerts import Alert
from probemon.adapters.routing.recurrent.tally import GROWS, KINDS, WINDOW, StateTally, Told
from probemon.core.hierarchy import Ints
from probemon.errors import ConfigError
from probemon.host.model import unwrap
from probemon.host.recurrent.mixers import Mamba2, Stack, Steps, find_stacks
from probemon.host.recurrent.scan import effective_length, scan_loop, update_share
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generation import States
from probemon.tracking.recording import Recording
from probemon.util.checks import check_callable

Listener = Callable[[int, PlacedTokens, dict[str, Told]], object]


@dataclass
class _RowOfStack:
    """What a row left behind in the layers of a stack."""

    length: Tensor | float = 0.0
    state: Tensor | None = None
    tail: Tensor | None = None
    norms: deque[Tensor] = field(default_factory=lambda: deque(maxlen=WINDOW))


@dataclass
class _Row:
    n_tokens: int = 0
    stacks: dict[int, _RowOfStack] = field(default_factory=dict)


@dataclass
class _Kept:
    """Of one recording: its rows, and tokens of beams until it is known which of them were returned."""

    rows: dict[int, _Row] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)  # rows of which something before was not seen
    pending: list[tuple[PlacedTokens, Ints, list[Tensor]]] = field(default_factory=list)


class StateRecorder:
    """Records what the state-space layers of a model do with accepted tokens. Raises `NotSupportedHost`.

    - `states`: whether the states are computed again beside the host, in fp32, which costs about as much as the host's
      own recurrence
    - `guard(what, function, *arguments)`: calls a function of the user's, and keeps its errors from the host
    - `on_alert`: called with alerts that are raised or cleared

    A row that goes on from a cache which was filled before (a second turn) has a past that is unknown here: its steps
    count, how far back its states reach and the states themselves do not (`n_unknown`).
    """

    def __init__(
        self,
        model: Any,
        *,
        states: bool,
        guard: Callable[..., None],
        on_alert: Callable[[list[Alert]], object] = lambda alerts: None,
    ) -> None:
        self.stacks: list[Stack] = find_stacks(unwrap(model), states=states)
        self.n_unseen = self.n_unknown = 0
        self._states, self._guard = states, guard
        self._tallies = [StateTally(stack.names, stack.limit, on_alert) for stack in self.stacks]
        self._kept: weakref.WeakKeyDictionary[Recording, _Kept] = weakref.WeakKeyDictionary()
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()
        self.sites = [site for stack in self.stacks for site in stack.sites]  # for a Watcher

    def listen(self, listener: Listener) -> None:
        """Call `listener(row, tokens, told)` with the tokens of a row, in order: `told` has a `Told` for each stack, by
        the names of its layers, joined by spaces. Its errors are logged and kept; they end no generation.
        """
        check_callable("listen", listener)
        self._listeners.append(listener)

    @property
    def alerts(self) -> list[Alert]:
        """The alerts that hold now."""
        with self._lock:
            return [alert for tally in self._tallies for alert in tally.alerts]

    @property
    def kinds(self) -> list[str]:
        """The kinds of alert that there are."""
        return [*KINDS, *((GROWS,) if self._states else ())]

    @property
    def unjudged(self) -> dict[str, int]:
        """Kinds of alert of which some layer has seen too few tokens, and how many it takes."""
        with self._lock:
            return {kind: n for tally in self._tallies for kind, n in tally.needed.items() if kind in self.kinds}

    @property
    def n_tokens(self) -> int:
        """How many tokens were counted."""
        return self._tallies[0].n_tokens

    def report(self) -> dict[str, dict[str, Any]]:
        """Return by layer what its tokens add up to: see `StateTally.report`."""
        with self._lock:
            return {name: told for tally in self._tallies for name, told in tally.report().items()}

    # -- tokens with what the layers projected ---------------------------------------------------

    def take(self, recording: Recording, placed: PlacedTokens, states: States | str) -> Callable[[], None] | None:
        """Take accepted tokens, in order, before they are added to `recording`.

        Return what is to be called once the forward has ended; it counts them.
        """
        with self._lock:
            first_entry, kept = recording.n_entries, self._kept.setdefault(recording, _Kept())
            if isinstance(states, str):
                self.n_unseen += len(placed)
                kept.unknown.update(placed.rows.tolist())
                return None
        arrays = [
            torch.stack([states[site.name].detach().float().cpu() for site in stack.sites]) for stack in self.stacks
        ]
        beginnings = torch.from_numpy(placed.columns == 0)
        for stack, projected in zip(self.stacks, arrays, strict=True):
            if isinstance(stack, Mamba2):
                stack.hold_beginnings(projected, beginnings)

        def count() -> None:
            with self._lock:
                self._decode(recording, kept, placed, first_entry, arrays)

        return count

    @torch.no_grad()
    def _decode(
        self, recording: Recording, kept: _Kept, placed: PlacedTokens, first_entry: int, arrays: list[Tensor]
    ) -> None:
        if recording.beams is not None:
            kept.pending.append((placed, np.arange(first_entry, first_entry + len(placed)), arrays))
            return
        for row, which in _by_row(placed):
            unknown = recording.call.first_column > 0 or row in kept.unknown
            state = kept.rows.setdefault(row, _Row())
            self._count(row, placed.take(which), [part[:, which] for part in arrays], state, unknown)

    @torch.no_grad()
    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """Count what beams ran, now that it is known which of it was returned."""
        if error is not None:
            return
        with self._lock:
            kept = self._kept.pop(recording, None)
            beams, sequences = recording.beams, recording.ids
            if kept is None or beams is None or sequences is None or not kept.pending:
                return
            batches = [placed for placed, *_ in kept.pending]
            columns, ids, offsets = (
                np.concatenate([getattr(placed, name) for placed in batches]) for name in ("columns", "ids", "offsets")
            )
            whole = [torch.cat([arrays[i] for *_, arrays in kept.pending], dim=1) for i in range(len(self.stacks))]
            counted = np.zeros(len(columns), dtype=bool)
            paths = beams.paths(sequences, recording.call.n_rows, batches, [entries for _, entries, _ in kept.pending])
            for row, (path, complete) in enumerate(paths):
                unknown = recording.call.first_column > 0 or bool(kept.unknown) or not complete
                placed = PlacedTokens(np.full(len(path), row), columns[path], offsets[path], ids[path], 0)
                self._count(row, placed, [part[:, path] for part in whole], _Row(), unknown, new=~counted[path])
                counted[path] = True

    def _count(
        self,
        row: int,
        placed: PlacedTokens,
        arrays: list[Tensor],
        state: _Row,
        unknown: bool,
        new: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    ) -> None:
        """Count tokens of one row, in order; where `new` is given, only those of which it is true."""
        which = torch.arange(len(placed)) if new is None else torch.from_numpy(np.flatnonzero(new))
        position = torch.arange(state.n_tokens, state.n_tokens + len(placed))
        state.n_tokens += len(placed)
        self.n_unknown += len(which) if unknown else 0
        told_of = {}
        for i, (stack, tally, projected) in enumerate(zip(self.stacks, self._tallies, arrays, strict=True)):
            of_stack = state.stacks.setdefault(i, _RowOfStack())
            told = self._follow(stack, projected, of_stack, position)
            told_of[" ".join(stack.names)] = told
            if len(which):
                tally.add(told if new is None else told.take(which), known=not unknown)
        for listener in self._listeners:
            self._guard("a listener", listener, row, placed, told_of)

    def _follow(self, stack: Stack, projected: Tensor, row: _RowOfStack, position: Tensor) -> Told:
        """Go on with a row's lengths and states, and say what its tokens did."""
        if not self._states:
            steps = stack.steps(projected)
            return Told(steps.dt, steps.log_decay.flatten(2), self._lengths(steps, row), position)
        updates = stack.updates(projected, row.tail)
        added, log_decay = updates.added.transpose(0, 1), updates.log_decay.transpose(0, 1)
        start = torch.zeros_like(added[0]) if row.state is None else row.state
        states = scan_loop(log_decay, added, start)
        before = torch.cat([start[None], states[:-1]])
        share = update_share(log_decay, added, before, stack.state_dims).flatten(2).mean(dim=-1)
        norm = torch.linalg.vector_norm(states.flatten(2), dim=-1)
        grown = []
        for at, now in zip(position.tolist(), norm, strict=True):
            # Not of a row's beginning, where every state grows: it was empty.
            grown.append(now / row.norms[0] if at >= 2 * WINDOW else torch.full_like(now, torch.nan))
            row.norms.append(now)
        row.state, row.tail = states[-1], updates.tail
        return Told(
            dt=updates.steps.dt,
            log_decay=updates.steps.log_decay.flatten(2),
            length=self._lengths(updates.steps, row),
            position=position,
            norm=norm.T,
            share=share.T,
            grown=torch.stack(grown).T,
            state=states[-1],
        )

    def _lengths(self, steps: Steps, row: _RowOfStack) -> Tensor:
        lengths = effective_length(steps.log_decay.flatten(2).transpose(0, 1), row.length)
        row.length = lengths[-1]
        return lengths.transpose(0, 1)

    def state_of(self, row: int) -> dict[str, Tensor]:
        """Return the newest state of a row of the newest generation under way, by layer, fp32; with `states=True`.

        Raises `ConfigError` where no such row is known.
        """
        with self._lock:
            for kept in reversed(list(self._kept.values())):
                if row in kept.rows:
                    return {
                        name: state
                        for i, of_stack in kept.rows[row].stacks.items()
                        if of_stack.state is not None
                        for name, state in zip(self.stacks[i].names, of_stack.state, strict=True)
                    }
        raise ConfigError(f"no state of row {row} is kept: ask while generate() runs, of a row that has begun")


def _by_row(placed: PlacedTokens) -> Iterator[tuple[int, Ints]]:
    for row in np.unique(placed.rows).tolist():
        which = np.flatnonzero(placed.rows == row)
        yield row, which[np.argsort(placed.columns[which], kind="stable")]
