"""Compares the concepts of two corpora: effect sizes, bootstrap intervals, false-discovery rate.

    comparison = compare(Analysis.open("before/"), Analysis.open("after/"))
    for row in comparison.differing: row.path, row.difference, row.cliffs_delta, row.q      # B minus A

The unit is the document. Its value for a concept is the share of seen tokens over the floor (`by="share"`), or whether
any is (`by="max"`). Needs the extra `corpus`.
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
# Settings that change scores; windows are checked separately.
_READING = ("special_tokens", "parse_special", "on")
_SAME = ("pack", "host", "tokenizer", "cascade", "floor", *(f"reading.{name}" for name in _READING))
_MOST_SPECIAL = 8  # special tokens around a text


@dataclass(frozen=True)
class ConceptDifference:
    """One concept in corpora A and B.

    - `n_a`, `n_b`: documents with it.
    - `difference`: mean_b - mean_a; `ratio`: mean_b / mean_a, None if A has none.
    - `cliffs_delta`: P(b > a) - P(b < a) for a document of each.
    - `p`: `mann_whitney`; `q`: `benjamini_hochberg` over all tested concepts.
    - `explained_by`: id of a narrower concept (see `compare`), or "".
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
    """All concepts over the floor in either corpus, by q, then by effect.

    `n_never_over` concepts were over it in neither; `n_mute` of them cannot be (no alert threshold below 1).
    `n_excluded` were not watched.
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
        """The rows with q at most `fdr`."""
        return tuple(row for row in self.rows if row.q <= self.fdr)

    def stated(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return self._head() | {"rows": [dataclasses.asdict(row) for row in self.rows]}

    def to_arrow(self) -> pa.Table:
        """Return a row for each concept; the metadata `probemon` has the settings as JSON."""
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
        """Write the table as parquet, atomically. Raises `ConfigError` if the file exists or cannot be made."""
        table, target = self.to_arrow(), check_new(path)
        partial = target.with_name(f".{target.name}-{os.getpid()}")
        try:
            arrow().parquet.write_table(table, partial, compression="zstd")
            os.link(partial, target)  # unlike a rename, fails if the name was taken meanwhile
        except OSError as error:
            raise ConfigError(f"{target} cannot be made ({error.strerror}): give another name") from error
        finally:
            partial.unlink(missing_ok=True)
        return target

    def _repr_html_(self) -> str:
        from probemon.lab.corpora.analysis_html import comparison_html

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
    """Return the path. Raises `ConfigError` if it exists or has no parent folder."""
    target = Path(path)
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists: give another name")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder: make it first")
    return target


def is_mute(threshold: float | None) -> bool:
    """Whether no score can exceed this alert threshold: None, or 1."""
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

    Intervals are percentile bootstrap over documents (Efron & Tibshirani 1993, chapter 13); too narrow if few documents
    have a concept. Exchanging A and B changes only the sign.

    The null hypothesis is one distribution for both corpora; different lengths alone may violate it (`median_tokens`).

    A concept is `explained_by` the descendant that differs most in the same direction, with a Cliff's delta at least as
    large; ties go to the deepest.

    `progress(n)` gets numbers of resamples. Raises `ConfigError` if the analyses were made differently or are empty.
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
    # Fixed order: exchanging A and B keeps draws and rounding.
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
    columns = ["concept", "name", "path", "level", "parents", "watched", "alert_threshold"]
    concepts = a.concepts().select(columns).to_pylist()
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
    by_concept, explained_by = {row.concept: row for row in differing}, dict[str, str]()
    for row in sorted(differing, key=lambda row: (-abs(row.cliffs_delta), -row.level, row.concept)):
        above, todo = set[str](), list(parents[row.concept])
        while todo:
            if (concept := todo.pop()) not in above:
                above.add(concept)
                todo += parents[concept]
        for other in (by_concept[concept] for concept in above & by_concept.keys()):
            if other.cliffs_delta * row.cliffs_delta > 0 and abs(other.cliffs_delta) <= abs(row.cliffs_delta):
                explained_by.setdefault(other.concept, row.concept)
    return explained_by


def _check_same(a: Analysis, b: Analysis) -> None:
    identity_a, identity_b = a.manifest["identity"], b.manifest["identity"]
    differs = [
        text
        for name in _SAME
        for text in differences(_at(identity_a, name), _at(identity_b, name), name, "{} is {!r} and {!r}")
    ]
    if differs:
        raise ConfigError(
            f"{a.directory} and {b.directory} were made with different settings"
            f" ({'; '.join(differs)}): analyze both corpora alike"
        )
    windows = [_at(identity, "reading.window") for identity in (identity_a, identity_b)]
    if windows[0] != windows[1]:  # they are the context of tokens in longer documents
        lengths = [_at(identity, "reading.window.n_tokens") for identity in (identity_a, identity_b)]
        shortest = min(length if isinstance(length, int) else 0 for length in lengths)  # unknown counts as short
        longest = max(max(analysis.documents(["n_tokens"])["n_tokens"].to_pylist(), default=0) for analysis in (a, b))
        if longest + _MOST_SPECIAL > shortest:
            raise ConfigError(
                f"{a.directory} and {b.directory} were read in different windows ({windows[0]} and {windows[1]}), and a"
                f" document has {longest:,} tokens: the context of tokens differs, and with it the scores. Analyze"
                " both corpora with the same window"
            )


def _at(identity: Any, name: str) -> Any:
    for key in name.split("."):
        identity = identity.get(key) if isinstance(identity, dict) else None
    return identity


def _share(name: str, value: float) -> float:
    return check_share(name, value, f"give a share over 0 and under 1, such as {'0.05' if name == 'fdr' else '0.95'}")
