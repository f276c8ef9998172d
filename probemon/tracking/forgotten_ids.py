"""ForgottenIds: which tokens a recording had that keep no scores any more, the newest of each row.

    forgotten = ForgottenIds()
    forgotten.add(placed, n=64)                       # at least the newest 64 of each row stay
    forgotten.pieces()                                # [(rows, columns, ids)], oldest first

A batch shares what `keep_tokens` keeps, so a row may have few tokens with scores; a judge is shown the end of its row.
"""

from __future__ import annotations

import numpy as np

from probemon.core.hierarchy import Ints

Piece = tuple[Ints, Ints, Ints]  # rows, columns and ids of tokens


class ForgottenIds:
    """Any thread may read while one adds: a list is replaced, or grows at its end."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._n_cut, self._n_new = 0, 0  # tokens that the last cut left, and those that came since

    def pieces(self) -> list[Piece]:
        """Return rows, columns and ids of tokens, the oldest first."""
        return list(self._pieces)

    def add(self, piece: Piece, n: int) -> None:
        """Add newer tokens; `n`: of how many of each row the ids are kept at least."""
        self._pieces.append(piece)
        self._n_new += len(piece[0])
        if self._n_new > max(n, self._n_cut):  # seldom enough that sorting costs each token next to nothing
            self._cut(n)

    def _cut(self, n: int) -> None:
        """Leave the newest `n` tokens of each row."""
        rows, columns, ids = (np.concatenate(parts) for parts in zip(*self._pieces, strict=True))
        order = np.lexsort((columns, rows))
        rows = rows[order]
        n_from_end = np.searchsorted(rows, rows, "right") - np.arange(len(rows))
        kept = order[n_from_end <= n]
        self._pieces = [(rows[n_from_end <= n], columns[kept], ids[kept])]
        self._n_cut, self._n_new = len(kept), 0
