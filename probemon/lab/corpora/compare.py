"""Compares the concepts of two corpora: effect sizes, bootstrap intervals over documents, a false-discovery rate.

    comparison = compare(Analysis.open("before/"), Analysis.open("after/"))
    # B minus A: positive where B has more
    for row in comparison.differing: row.path, row.difference, row.cliffs_delta, row.q
    comparison.to_arrow(), comparison.write("diff.parquet"), comparison.stated()

The unit is the document, since the tokens of one depend on each other. Each document has one number for a concept:
`by="share"`, the share of its seen tokens over the floor, or `by="max"`, whether its maximum was over the floor (1 or
0), which also depends on how long documents are. Both are exact as far as the descent reached what is over the floor
(docs/analysis_format.md says when that is all of it). Needs the extra `corpus`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.errors import ConfigError
from probemon.lab.corpora.analysis_files import arrow
from probemon.lab.corpora.analysis_folder import Analysis, differences
from probemon.lab.corpora.document_samples import Corpus, Sample, dominance, resampled
from probemon.lab.corpora.significance import Doubles, benjamini_hochberg, mann_whitney
from probemon.util.checks import check_count, check_share

if TYPE_CHECKING:
    import pyarrow as pa

BY = ("share", "max")
# What a score depends on; windows are asked by themselves. Batches and the kernel are how a corpus was read.
_SAME = ("pack", "host", "tokenizer", "cascade", "floor", "reading.special_tokens", "reading.parse_special")
_MOST_SPECIAL = 8  # tokens that a tokenizer puts around a text, which a window holds and a document does not count


@dataclass(frozen=True)
class ConceptDifference:
    """One concept in two corpora, B compared with A.

    - `n_a`, `n_b`: documents with it.
    - `mean_a`, `mean_b`: of the statistic over all documents; `difference` is mean_b - mean_a, `ratio` mean_b / mean_a
      (None where A has none).
    - `cliffs_delta`: P(b > a) - P(b < a) for a document of each; the probability of superiority is (delta + 1) / 2.
    - `p`: `mann_whitney`; `q`: `benjamini_hochberg` over all concepts tested.
    - `explained_by`: the id of the narrower concept whose difference this one's may be (see `compare`), or "".
    """

    concept: str
    name: str
    path: tuple[str, ...]
    level: int
    n_a: int
    n_b: int
    mean_a: float
    mean_b: float
    difference: float
    difference_low: float
    difference_high: float
    ratio: float | None
    cliffs_delta: float
    delta_low: float
    delta_high: float
    p: float
    q: float
    explained_by: str


@dataclass(frozen=True)
class Comparison:
    """All concepts that were over the floor in either corpus, by q, then the largest effect.

    `n_never_over` were over it in neither, and are not tested: `n_mute` of them cannot be, since they have no alert
    threshold, or one of 1, where the floor is that. `n_excluded` were not watched.
    """

    a: Corpus
    b: Corpus
    by: str
    floor: float | str
    fdr: float
    resamples: int
    confidence: float
    seed: int
    n_never_over: int
    n_mute: int
    n_excluded: int
    rows: tuple[ConceptDifference, ...]

    @property
    def differing(self) -> tuple[ConceptDifference, ...]:
        """The rows with q at most `fdr`: a share of at most `fdr` of them is expected not to differ."""
        return tuple(row for row in self.rows if row.q <= self.fdr)

    def stated(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return self._head() | {"rows": [dataclasses.asdict(row) for row in self.rows]}

    def to_arrow(self) -> pa.Table:
        """Return a row for each concept, in order; the metadata `probemon` say, as JSON, how it was compared."""
        pa = arrow()
        kinds = {
            "str": pa.string(),
            "tuple[str, ...]": pa.list_(pa.string()),
            "int": pa.int64(),
            "float": pa.float64(),
            "float | None": pa.float64(),
        }
        schema = pa.schema(
            [(field.name, kinds[str(field.type)]) for field in dataclasses.fields(ConceptDifference)],
            {"probemon": json.dumps(self._head())},
        )
        return pa.Table.from_pylist([dataclasses.asdict(row) for row in self.rows], schema=schema)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as parquet, whole or not at all. Raises `ConfigError` where the file exists, or cannot."""
        table, target = self.to_arrow(), check_new(path)
        partial = target.with_name(f".{target.name}-{os.getpid()}")
        try:
            arrow().parquet.write_table(table, partial, compression="zstd")
            os.link(partial, target)  # unlike a rename, fails where the name was taken meanwhile
        except OSError as error:
            raise ConfigError(f"{target} cannot be made ({error.strerror}): give another name") from error
        finally:
            partial.unlink(missing_ok=True)
        return target

    def _repr_html_(self) -> str:
        from probemon.lab.corpora.analysis_html import comparison_html  # it imports this module

        return comparison_html(self)

    def __repr__(self) -> str:
        return (
            f"Comparison({self.a.directory!r}, {self.b.directory!r}, {len(self.differing)} of {len(self.rows)} differ)"
        )

    def _head(self) -> dict[str, Any]:
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("a", "b", "rows")
        }
        return {
            "a": dataclasses.asdict(self.a),
            "b": dataclasses.asdict(self.b),
            **settings,
            "n_tested": len(self.rows),
            "n_differing": len(self.differing),
        }


def check_new(path: str | os.PathLike[str]) -> Path:
    """Return the path. Raises `ConfigError` where something is there already, or no folder for it."""
    target = Path(path)
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists: give another name")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder: make it first")
    return target


def is_mute(threshold: float | None) -> bool:
    """Say whether a concept of this alert threshold never fires: it has none, or one of 1, which no score exceeds."""
    return threshold is None or not threshold < 1


def compare(
    a: Analysis,
    b: Analysis,
    *,
    by: str = "share",
    fdr: float = 0.05,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Comparison:
    """Compare the corpora of two analyses, concept by concept.

    Intervals are the percentile bootstrap's (Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13):
    each corpus is drawn `resamples` times from its own documents with replacement. Where a corpus has a concept in a
    few documents, they are too narrow. The p-values are of ranks, so an interval of the means may hold 0 where q is
    small. Neither the order of the documents nor which corpus is called A changes anything but the sign, bit for bit.

    The hypothesis is that documents of both corpora are of one distribution. Short documents have other shares than
    long ones (more often 0, and more often large), so corpora of other lengths may differ by that alone: see
    `median_tokens`.

    A difference in a concept shows in its ancestors too. A concept that differs is `explained_by` a descendant that
    differs in the same direction with a Cliff's delta at least as far from 0: the farthest such, of equals the deepest.
    This does not say that the ancestor would not differ without it.

    `progress(n)`: n more resamples are done. Raises `ConfigError` where the analyses were made differently, or one has
    nothing to compare.
    """
    least = math.ceil(2 / (1 - _share("confidence", confidence)) - 1e-9) - 1
    if by not in BY:
        raise ConfigError(f"by is {by!r}: give one of {', '.join(BY)}")
    _share("fdr", fdr)
    for name, value, lowest in (("resamples", resamples, least), ("seed", seed, 0)):
        needed = f" (what a confidence of {confidence} needs)" if name == "resamples" else ""
        check_count(name, value, least=lowest, remedy=f"give a whole number, {lowest} or more{needed}")
    _check_same(a, b)
    samples = (Sample.of(a, by), Sample.of(b, by))
    # In a fixed order, so that A and B exchanged give the same draws and the same roundings.
    swapped = samples[0].documents > samples[1].documents
    first, second = samples[::-1] if swapped else samples
    n, m = first.n, second.n
    tested = np.flatnonzero((np.diff(first.ptr) > 0) | (np.diff(second.ptr) > 0)).tolist()
    dominances, p = np.zeros(len(tested), dtype=np.int64), np.ones(len(tested))
    for i, concept in enumerate(tested):
        x, y = first.values(concept), second.values(concept)
        dominances[i] = dominance(x, y, n, m)
        _, ties = np.unique(np.concatenate([x, y]), return_counts=True)
        p[i] = mann_whitney(-int(dominances[i]), [n + m - len(x) - len(y), *ties.tolist()], n, m)
    means = [np.asarray([sample.values(concept).sum() / sample.n for concept in tested]) for sample in samples]
    differences, deltas = resampled(first, second, tested, resamples, seed, progress)
    at = math.floor((resamples + 1) * (1 - confidence) / 2 + 1e-9) - 1

    def interval(draws: Doubles) -> tuple[Doubles, Doubles]:
        low, high = np.partition(draws, [at, resamples - 1 - at], axis=0)[[at, resamples - 1 - at]]
        return (0.0 - high, 0.0 - low) if swapped else (low, high)

    (low, high), (delta_low, delta_high) = interval(differences), interval(deltas)
    numbers = {
        "mean_a": means[0],
        "mean_b": means[1],
        "difference": means[1] - means[0],
        "difference_low": low,
        "difference_high": high,
        "cliffs_delta": (0 - dominances if swapped else dominances) / (n * m),
        "delta_low": delta_low,
        "delta_high": delta_high,
        "p": p,
        "q": benjamini_hochberg(p),
    }
    kept = ["concept", "name", "path", "level", "parents", "watched", "alert_threshold"]
    concepts = a.concepts().select(kept).to_pylist()
    n_excluded = sum(not concept["watched"] for concept in concepts)
    fired = a.manifest["identity"]["floor"] == "fired"
    n_mute = sum(fired and concept["watched"] and is_mute(concept["alert_threshold"]) for concept in concepts)
    n_a, n_b = (np.diff(sample.ptr) for sample in samples)
    rows = []
    for i, c in enumerate(tested):
        fields, floats = concepts[c], {name: float(values[i]) for name, values in numbers.items()}
        rows.append(
            ConceptDifference(
                concept=fields["concept"],
                name=fields["name"],
                path=tuple(fields["path"]),
                level=fields["level"],
                n_a=int(n_a[c]),
                n_b=int(n_b[c]),
                ratio=floats["mean_b"] / floats["mean_a"] if floats["mean_a"] else None,
                explained_by="",
                **floats,
            )
        )
    explained = _explained(
        [row for row in rows if row.q <= fdr], {concept["concept"]: concept["parents"] for concept in concepts}
    )
    rows = [dataclasses.replace(row, explained_by=explained.get(row.concept, "")) for row in rows]
    rows.sort(key=lambda row: (row.q, -abs(row.cliffs_delta), row.concept))
    floor = a.manifest["identity"]["floor"]
    return Comparison(
        samples[0].corpus,
        samples[1].corpus,
        by,
        floor,
        fdr,
        resamples,
        confidence,
        seed,
        len(concepts) - len(tested) - n_excluded,
        n_mute,
        n_excluded,
        tuple(rows),
    )


def _explained(differing: Sequence[ConceptDifference], parents: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Name the descendant that explains each concept that differs, if there is one."""
    known, explained_by = {row.concept: row for row in differing}, dict[str, str]()
    for row in sorted(differing, key=lambda row: (-abs(row.cliffs_delta), -row.level, row.concept)):
        above, todo = set[str](), list(parents[row.concept])
        while todo:
            if (concept := todo.pop()) not in above:
                above.add(concept)
                todo += parents[concept]
        for other in (known[concept] for concept in above & known.keys()):
            if other.cliffs_delta * row.cliffs_delta > 0 and abs(other.cliffs_delta) <= abs(row.cliffs_delta):
                explained_by.setdefault(other.concept, row.concept)
    return explained_by


def _check_same(a: Analysis, b: Analysis) -> None:
    one, other = a.manifest["identity"], b.manifest["identity"]
    differs = [
        text for name in _SAME for text in differences(_at(one, name), _at(other, name), name, "{} is {!r} and {!r}")
    ]
    if differs:
        raise ConfigError(
            f"{a.directory} and {b.directory} were made otherwise, so what differs may be the way of looking"
            f" ({'; '.join(differs)}): analyze both corpora alike"
        )
    windows = [_at(identity, "reading.window") for identity in (one, other)]
    if windows[0] != windows[1]:  # they are what a token comes after, in documents that are longer than one
        lengths = [_at(identity, "reading.window.n_tokens") for identity in (one, other)]
        shortest = min(length if isinstance(length, int) else 0 for length in lengths)  # one that is not said is short
        longest = max(max(made.documents(["n_tokens"])["n_tokens"].to_pylist(), default=0) for made in (a, b))
        if longest + _MOST_SPECIAL > shortest:
            raise ConfigError(
                f"{a.directory} and {b.directory} were read in other windows ({windows[0]} and {windows[1]}), and a"
                f" document has {longest:,} tokens: what a token comes after differs, and with it the scores. Analyze"
                " both corpora with the same window"
            )


def _at(identity: Any, name: str) -> Any:
    for key in name.split("."):
        identity = identity.get(key) if isinstance(identity, dict) else None
    return identity


def _share(name: str, value: float) -> float:
    return check_share(name, value, f"give a share over 0 and under 1, such as {'0.05' if name == 'fdr' else '0.95'}")
