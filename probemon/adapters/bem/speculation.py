"""Chunk codes foretold: what their limits ask for is taken from earlier chunks, and used only where the code came true.

    with speculating(bem) as speculation:
        model.generate(**inputs)
    speculation.stats()           # {"n_predicted": 31, "n_hits": 30, "hit_rate": 0.97, "n_kept": 961}

In steps of one token: while a chunk runs, its row's next code is foretold, namely the one that followed when this
chunk's code was last seen in the row, bit for bit, and else this code again. The step after the chunk's end has the
true code. Where it is the foretold one, bit for bit, the updates begin with the limits that were computed for it
before; where it is not, limits are computed as without speculation. Inside a chunk the code stays, and so do its
limits. Outputs are therefore those of the adapter without speculation, bit for bit for one row; of several rows some
may be computed in another batch, and differ by rounding (a few 1e-6).

What it can spare is the computing of limits, nothing else: a chunk's code comes from states that lie before the host's
own layers in the step that ends the chunk before, so it is never waited for, and no token is ever steered by a code
that was only foretold. Codes of real text hardly ever come again bit for bit; then inside of chunks alone something is
spared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probemon.adapters.bem.controller import Codes
from probemon.adapters.bem.governance import optimiser_steps
from probemon.errors import BemError, ConfigError

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem

_MOST_CHUNKS = 64  # of a row that are remembered

Limited = dict[str, Tensor]  # what sites take of one row, `[n]` by site key


@dataclass(eq=False)
class _Row:
    """What a row's chunks had: codes `[r]` and their limits, the newest last; the code of its next chunk, foretold."""

    chunk: int = -1
    seen: list[tuple[Tensor, Limited]] = field(default_factory=list)
    foretold: tuple[Tensor, Limited] | None = None

    def enter(self, chunk: int, code: Tensor, limited: Limited) -> None:
        """Note the code of a chunk that begins, and foretell the next one's."""
        self.chunk = chunk
        followed = [after for (before, _), after in zip(self.seen, self.seen[1:], strict=False) if _same(before, code)]
        if self.seen and _same(self.seen[-1][0], code):
            followed.append((code, limited))
        self.foretold = followed[-1] if followed else (code, limited)
        self.seen = [*self.seen[1 - _MOST_CHUNKS :], (code, limited)]


class Speculation:
    """What `speculating` puts on an adapter. Each thread that generates has rows of its own."""

    def __init__(self, bem: Bem) -> None:
        self._bem, self._local, self._lock = bem, threading.local(), threading.Lock()
        self.n_predicted = self.n_hits = self.n_kept = 0

    def stats(self) -> dict[str, Any]:
        """Return how many chunks were foretold, how many of these came true and their share (None before the first),
        and for how many tokens inside chunks the limits were kept.
        """
        rate = self.n_hits / self.n_predicted if self.n_predicted else None
        return {"n_predicted": self.n_predicted, "n_hits": self.n_hits, "hit_rate": rate, "n_kept": self.n_kept}

    def limited(self, codes: Codes) -> dict[str, Tensor]:
        """As `Bem.limited`, of a forward without gradients."""
        code = codes.of("chunk").flatten(0, 1)
        marks = self._marks()
        if codes.level.shape[1] != 1 or len(self._rows(marks)) != len(code):
            self._local.rows = [_Row() for _ in code] if codes.level.shape[1] == 1 else []
            if codes.level.shape[1] != 1:  # a prompt, or drafts: what follows begins anew
                return self._compute(code)
        rows: list[_Row] = self._local.rows
        at = codes.chunk_index[:, 0].tolist()
        found: list[Limited | None] = [
            self._recall(row, chunk, one) for row, chunk, one in zip(rows, at, code, strict=True)
        ]
        missing = [i for i, limited in enumerate(found) if limited is None]
        if missing:
            computed = self._compute(code if len(missing) == len(code) else code[missing])
            for k, i in enumerate(missing):
                found[i] = {key: x[k] for key, x in computed.items()}
        whole = [limited for limited in found if limited is not None]
        for row, chunk, one, limited in zip(rows, at, code, whole, strict=True):
            if row.chunk != chunk:
                row.enter(chunk, one, limited)
        if len(missing) == len(code):
            return computed
        return {site.key: torch.stack([limited[site.key] for limited in whole]) for site in self._bem.sites}

    def _recall(self, row: _Row, chunk: int, code: Tensor) -> Limited | None:
        """The limits of a row's code, where they are known; None where they have to be computed."""
        if row.chunk == chunk and row.seen and _same(row.seen[-1][0], code):
            with self._lock:
                self.n_kept += 1
            return row.seen[-1][1]
        if row.chunk + 1 != chunk or not row.seen:  # padding, a row moved, another text
            row.seen, row.foretold, row.chunk = [], None, -1
            return None
        assert row.foretold is not None
        hit = _same(row.foretold[0], code)
        with self._lock:
            self.n_predicted, self.n_hits = self.n_predicted + 1, self.n_hits + hit
        return row.foretold[1] if hit else None

    def _compute(self, code: Tensor) -> dict[str, Tensor]:
        return self._bem.governor.apply({True: code, False: code})

    def _marks(self) -> tuple[int, ...]:
        """What changes when somebody writes to U or V."""
        updates = self._bem.updates
        return optimiser_steps(), sum(x._version for x in (*updates.parameters(), *updates.buffers()))

    def _rows(self, marks: tuple[int, ...]) -> list[_Row]:
        if getattr(self._local, "marks", None) != marks:
            self._local.marks, self._local.rows = marks, []
        rows: list[_Row] = self._local.rows
        return rows


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)


@contextmanager
def speculating(bem: Bem) -> Iterator[Speculation]:
    """In the block, foretell chunk codes of an attached adapter. On a GPU every step then waits for the codes.

    Raises `ConfigError` for what is no adapter, and for one of which some site takes other codes, `BemError` where it
    is off or foretells already.
    """
    from probemon.adapters.bem.attached import Bem  # here: it imports this module

    if not isinstance(bem, Bem):
        raise ConfigError(f"{type(bem).__name__} is no adapter: give what attach_bem returned")
    if bem.config.levels != ("chunk",):
        raise ConfigError(
            f"this adapter takes codes of {', '.join(bem.config.levels)}, and only those of chunks hold long enough to"
            " be foretold: use level='chunk'"
        )
    if not bem.open:
        raise BemError("the adapter is not on its host: attach it first")
    if bem.speculation is not None:
        raise BemError("the adapter's codes are foretold already: leave that block first")
    bem.speculation = Speculation(bem)
    try:
        yield bem.speculation
    finally:
        bem.speculation = None
