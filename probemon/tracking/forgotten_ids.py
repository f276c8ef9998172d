"""ForgottenIds: the newest ids per row whose scores were dropped.

    forgotten = ForgottenIds()
    forgotten.add(placed, n=64)                       # keeps at least 64 per row
    forgotten.pieces()                                # [(rows, columns, ids)], oldest first

A judge needs the end of every row.
"""

from __future__ import annotations

import numpy as np

from probemon.core.hierarchy import Ints

Piece = tuple[Ints, Ints, Ints]  # rows, columns, ids


class ForgottenIds:
    """May be read while one thread adds."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._n_cut, self._n_new = 0, 0  # left by the last cut, and added since

    def pieces(self) -> list[Piece]:
        """Return (rows, columns, ids), oldest first."""
        return list(self._pieces)

    def add(self, piece: Piece, n: int) -> None:
        """Add tokens; keep at least `n` ids per row."""
        self._pieces.append(piece)
        self._n_new += len(piece[0])
        if self._n_new > max(n, self._n_cut):  # rare, so sorting is cheap
            self._cut(n)

    def _cut(self, n: int) -> None:
        rows, columns, ids = (np.concatenate(parts) for parts in zip(*self._pieces, strict=True))
        order = np.lexsort((columns, rows))
        rows = rows[order]
        n_from_end = np.searchsorted(rows, rows, "right") - np.arange(len(rows))
        newest = order[n_from_end <= n]
        self._pieces = [(rows[n_from_end <= n], columns[newest], ids[newest])]
        self._n_cut, self._n_new = len(newest), 0
