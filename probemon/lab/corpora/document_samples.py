"""The documents of an analysis as numbers by concept, compared and resampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints
from probemon.errors import ConfigError
from probemon.lab.corpora.analysis_files import arrow
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.significance import Doubles

_CHUNK = 1 << 17  # fits the processor's cache


@dataclass(frozen=True)
class Corpus:
    """Summary of a compared analysis; `n_documents` have seen tokens.

    - `n_bad`, `n_unseen`: documents left out.
    - `n_tokens`: seen tokens; `median_tokens`: per document.
    - `n_dropped`: scores unknown because of a limit.
    - `n_far`: tokens unlike the calibration states.
    """

    directory: str
    n_documents: int
    n_bad: int
    n_unseen: int
    n_tokens: int
    median_tokens: float
    n_dropped: int
    n_far: int


@dataclass(frozen=True)
class Sample:
    """The n documents of a corpus, in an order independent of the input.

    Concept c has ascending values `value[ptr[c]:ptr[c + 1]]` over 0, in `document[...]`.
    """

    corpus: Corpus
    documents: tuple[bytes, ...]  # sort keys
    ptr: Ints
    document: Ints
    value: Doubles

    @property
    def n(self) -> int:
        return len(self.documents)

    def values(self, concept: int) -> Doubles:
        return self.value[self.ptr[concept] : self.ptr[concept + 1]]

    def documents_of(self, concept: int) -> Ints:
        return self.document[self.ptr[concept] : self.ptr[concept + 1]]

    @classmethod
    def of(cls, analysis: Analysis, by: str) -> Sample:
        pa = arrow()
        import pyarrow.compute as pc

        columns = analysis.documents(["document", "reason", "n_tokens", "n_unseen", "dropped", "far"])
        number, n_seen = columns["document"].to_numpy(), columns["n_tokens"].to_numpy() - columns["n_unseen"].to_numpy()
        scored = pc.equal(columns["reason"], "").to_numpy()
        compared = np.flatnonzero(scored & (n_seen > 0))
        if not len(compared):
            raise ConfigError(
                f"{analysis.directory} has {len(number)} documents, none with a seen token: there is nothing to compare"
            )
        seen = n_seen[compared]
        names = analysis.concepts()["concept"]
        rows = analysis.summary(["document", "concept", "n_tokens"])
        document = np.searchsorted(number[compared], rows["document"].to_numpy())
        concept = pc.index_in(rows["concept"].cast(pa.string()), names.combine_chunks()).to_numpy().astype(np.int64)
        count = rows["n_tokens"].to_numpy()

        order = np.lexsort((concept, document))
        shown = np.stack([concept, count], axis=1)[order].astype(np.int32)
        cut = np.searchsorted(document[order], np.arange(len(compared) + 1)).tolist()
        keys = [f"{seen[i]} ".encode() + shown[cut[i] : cut[i + 1]].tobytes() for i in range(len(compared))]
        place = np.asarray(sorted(range(len(compared)), key=keys.__getitem__))
        document = np.argsort(place)[document]

        # Division rounds correctly: 1 of 3 equals 2 of 6.
        value = count / seen[place][document] if by == "share" else np.ones(len(count))
        order = np.lexsort((document, value, concept))
        ptr = np.searchsorted(concept[order], np.arange(len(names) + 1))
        corpus = Corpus(
            str(analysis.directory),
            len(compared),
            int((~scored).sum()),
            int((scored & (n_seen == 0)).sum()),
            int(seen.sum()),
            float(np.median(seen)),
            int(columns["dropped"].to_numpy()[compared].sum()),
            int(columns["far"].to_numpy()[compared].sum()),
        )
        return cls(corpus, tuple(keys[i] for i in place), ptr, document[order], value[order])


def dominance(x: Doubles, y: Doubles, n_x: int, n_y: int) -> int:
    """Count pairs in which y is larger, minus those in which x is. x and y are ascending, without zeros."""
    larger = np.searchsorted(x, y, "left").sum() + np.searchsorted(x, y, "right").sum()
    return int(larger + len(y) * n_x - len(x) * n_y - len(x) * len(y))


def resampled(
    first: Sample,
    second: Sample,
    tested: Sequence[int],
    resamples: int,
    seed: int,
    progress: Callable[[int], object] | None = None,
) -> tuple[Doubles, Doubles]:
    """Return differences of means and Cliff's deltas `[resamples, K]`, second minus first, of bootstrap draws."""
    sources = [(sample, np.random.default_rng([seed, side])) for side, sample in enumerate((first, second))]
    columns = []
    for c in tested:
        x, y = first.values(c), second.values(c)
        # Ranks of y among x, before and after ties.
        columns.append(
            (
                first.documents_of(c),
                x,
                second.documents_of(c),
                y,
                np.searchsorted(x, y, "left"),
                np.searchsorted(x, y, "right"),
            )
        )
    n, m = first.n, second.n
    differences, deltas = np.empty((resamples, len(tested))), np.empty((resamples, len(tested)))
    size = max(1, _CHUNK // max(n, m))
    for begin in range(0, resamples, size):
        rows = slice(begin, min(begin + size, resamples))
        weights = [_weights(random, rows.stop - begin, sample.n) for sample, random in sources]
        for i, (x_at, x, y_at, y, left, right) in enumerate(columns):
            w, v = weights[0].take(x_at, axis=1), weights[1].take(y_at, axis=1)
            under = np.zeros((len(w), len(x) + 1), dtype=np.int32)
            np.cumsum(w, axis=1, out=under[:, 1:])
            n_x, n_y = under[:, -1].astype(np.int64), v.sum(axis=1, dtype=np.int64)
            larger = (v * (under.take(left, axis=1) + under.take(right, axis=1))).sum(axis=1, dtype=np.int64)
            deltas[rows, i] = (larger + n_y * n - n_x * m - n_x * n_y) / (n * m)
            differences[rows, i] = v @ y / m - w @ x / n
        if progress is not None:
            progress(rows.stop - begin)
    return differences, deltas


def _weights(random: np.random.Generator, rows: int, n: int) -> npt.NDArray[np.int32]:
    """Draw how often each of n documents is taken, `[rows, n]`."""
    # int32: half the memory traffic; sums are exact.
    drawn = random.integers(0, n, size=(rows, n)) + np.arange(rows)[:, None] * n
    return np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.int32)
