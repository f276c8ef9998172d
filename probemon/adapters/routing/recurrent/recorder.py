"""StateRecorder: what a model's recurrent layers do at accepted tokens."""

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
from probemon.adapters.routing.captures import returned
from probemon.adapters.routing.recurrent.tally import GROWS, KINDS, WINDOW, StateTally, Told
from probemon.core.hierarchy import Ints, Mask
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
    """Rows of one recording, and beam tokens until the returned ones are known."""

    rows: dict[int, _Row] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)  # rows with an unseen past
    pending: list[tuple[PlacedTokens, Ints, list[Tensor]]] = field(default_factory=list)


class StateRecorder:
    """Records what state-space layers do at accepted tokens. Raises `UnsupportedModel`.

    - `states`: compute the states again in fp32; costs about as much as the model's own recurrence.
    - `guard(what, function, *arguments)`: calls a user function and catches its errors.
    - `on_alert`: called with alerts that are raised or cleared.

    A row that continues from an existing cache has an unknown past: only its steps count (`n_unknown`).
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
        self.n_unknown = 0
        self._states, self._guard = states, guard
        self._tallies = [StateTally(stack.names, stack.limit, on_alert) for stack in self.stacks]
        self._kept: weakref.WeakKeyDictionary[Recording, _Kept] = weakref.WeakKeyDictionary()
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()
        self.sites = [site for stack in self.stacks for site in stack.sites]

    def listen(self, listener: Listener) -> None:
        """Call `listener(row, tokens, activity)` with the tokens of a row, in order.

        `activity` has a `Told` per stack, keyed by its layer names joined by spaces. Errors are logged and kept.
        """
        check_callable("listen", listener)
        self._listeners.append(listener)

    @property
    def alerts(self) -> list[Alert]:
        """Alerts in force."""
        with self._lock:
            return [alert for tally in self._tallies for alert in tally.alerts]

    @property
    def kinds(self) -> list[str]:
        """Kinds of alert."""
        return [*KINDS, *((GROWS,) if self._states else ())]

    @property
    def unjudged(self) -> dict[str, int]:
        """Tokens needed by each kind of alert that some layer cannot judge yet."""
        with self._lock:
            return {kind: n for tally in self._tallies for kind, n in tally.needed.items() if kind in self.kinds}

    @property
    def n_tokens(self) -> int:
        """Number of tokens counted."""
        return self._tallies[0].n_tokens

    def report(self) -> dict[str, dict[str, Any]]:
        """Return the sums by layer: see `StateTally.report`."""
        with self._lock:
            return {name: summary for tally in self._tallies for name, summary in tally.report().items()}

    def take(self, recording: Recording, placed: PlacedTokens, states: States | str) -> Callable[[], None] | None:
        """Take accepted tokens, before they are added to `recording`.

        Return a function that counts them once the forward has ended, None for unseen tokens.
        """
        with self._lock:
            first_entry, recording_state = recording.n_entries, self._kept.setdefault(recording, _Kept())
            if isinstance(states, str):
                recording_state.unknown.update(placed.rows.tolist())
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
                self._decode(recording, recording_state, placed, first_entry, arrays)

        return count

    @torch.no_grad()
    def _decode(
        self, recording: Recording, recording_state: _Kept, placed: PlacedTokens, first_entry: int, arrays: list[Tensor]
    ) -> None:
        if recording.beams is not None:
            recording_state.pending.append((placed, np.arange(first_entry, first_entry + len(placed)), arrays))
            return
        for row, indices in _by_row(placed):
            unknown = recording.call.first_column > 0 or row in recording_state.unknown
            state = recording_state.rows.setdefault(row, _Row())
            self._count(row, placed.take(indices), [part[:, indices] for part in arrays], state, unknown)

    @torch.no_grad()
    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """Count the beam tokens that were returned."""
        if error is not None:
            return
        with self._lock:
            recording_state = self._kept.pop(recording, None)
            if recording_state is None or recording.ids is None or not recording_state.pending:
                return
            batches = [placed for placed, *_ in recording_state.pending]
            columns, ids, offsets = (
                np.concatenate([getattr(placed, name) for placed in batches]) for name in ("columns", "ids", "offsets")
            )
            whole = [
                torch.cat([arrays[i] for *_, arrays in recording_state.pending], dim=1) for i in range(len(self.stacks))
            ]
            entries = [entries for _, entries, _ in recording_state.pending]
            for row, path, complete, new in returned(recording, batches, entries):
                unknown = recording.call.first_column > 0 or bool(recording_state.unknown) or not complete
                placed = PlacedTokens(np.full(len(path), row), columns[path], offsets[path], ids[path], 0)
                self._count(row, placed, [part[:, path] for part in whole], _Row(), unknown, new=new)

    def _count(
        self,
        row: int,
        placed: PlacedTokens,
        arrays: list[Tensor],
        state: _Row,
        unknown: bool,
        new: Mask | None = None,
    ) -> None:
        """Count tokens of one row, in order; with `new`, only those."""
        indices = torch.arange(len(placed)) if new is None else torch.from_numpy(np.flatnonzero(new))
        position = torch.arange(state.n_tokens, state.n_tokens + len(placed))
        state.n_tokens += len(placed)
        self.n_unknown += len(indices) if unknown else 0
        activity_by_stack = {}
        for i, (stack, tally, projected) in enumerate(zip(self.stacks, self._tallies, arrays, strict=True)):
            stack_row = state.stacks.setdefault(i, _RowOfStack())
            activity = self._follow(stack, projected, stack_row, position)
            activity_by_stack[" ".join(stack.names)] = activity
            if len(indices):
                tally.add(activity if new is None else activity.take(indices), known=not unknown)
        for listener in self._listeners:
            self._guard("a listener", listener, row, placed, activity_by_stack)

    def _follow(self, stack: Stack, projected: Tensor, row: _RowOfStack, position: Tensor) -> Told:
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
            # Not at a row's start: every state grows from empty.
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


def _by_row(placed: PlacedTokens) -> Iterator[tuple[int, Ints]]:
    for row in np.unique(placed.rows).tolist():
        indices = np.flatnonzero(placed.rows == row)
        yield row, indices[np.argsort(placed.columns[indices], kind="stable")]
