"""Differences between two corpora equal the oracle, and chance differences are as rare as stated."""

import dataclasses
import itertools
import json
import math
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from corpora import make_tokenizer, random_texts
from probemon import DynamicProbeManager
from probemon.core.intervals import lower_bound, mean_interval
from probemon.errors import ConfigError
from probemon.host.chat_forms import PARTS
from probemon.lab.cli.diff_analyses import _show, diff
from probemon.lab.corpora.analysis_files import COUNTED, schemas
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.analyze import analyze
from probemon.lab.corpora.compare import _check_same, compare
from probemon.lab.corpora.document_samples import Sample, resampled
from probemon.lab.corpora.significance import benjamini_hochberg, mann_whitney
from static_page import read

# c0 > c1 > c3, c0 > c2 > c4, c5 below both c1 and c2, c6 and c7 alone; c7 is nowhere over the floor.
PARENTS = [[], [0], [0], [1], [2], [1, 2], [], []]
IDENTITY = {
    "pack": {"name": "p", "concepts": "1", "probes": "2"},
    "host": {"model": "M", "dtype": "bfloat16", "device": "cpu"}, "tokenizer": "t",
    "cascade": {"keep_top_k": 30}, "kernel": {"impl": "cpu"}, "floor": "fired", "keep_text": True,
    "reading": {"window": {"n_tokens": 1024}, "batch_tokens": 4096, "special_tokens": "bos", "parse_special": False},
}  # fmt: skip


def corpus(seed, n=40, plant=()):
    """Tokens seen `[n]` and over the floor `[n, P]`; most shares are 0. Concepts of `plant` are over it more often."""
    rng = np.random.default_rng(seed)
    seen = rng.integers(1, 30, n)
    rate = np.where(rng.random((n, len(PARENTS))) < 0.3, rng.random((n, len(PARENTS))) / 2, 0.0)
    rate[:, list(plant)] += 0.2
    rate[:, 7] = 0
    return seen, rng.binomial(seen[:, None], rate)


def write(path, seen, counts, bad=(), far=0, **changes):
    """An analysis with these numbers. `bad`: documents that were not scored; `far`: further far tokens of each."""
    n, ids = len(seen), [f"c{i}" for i in range(len(PARENTS))]
    document, concept = np.nonzero(counts)

    def path_of(i):
        return [*(path_of(PARENTS[i][0]) if PARENTS[i] else []), f"name {i}"]

    def column(field, values):
        return (
            pa.array(values, field.type.value_type).dictionary_encode()
            if pa.types.is_dictionary(field.type)
            else pa.array(values, field.type)
        )

    columns = {
        "scores": {},
        "documents": {
            "document": range(n),
            "doc_id": [f"d{i}" for i in range(n)],
            "reason": ["empty" if i in bad else "" for i in range(n)],
            "n_chars": [9] * n,
            "n_tokens": [int(seen[i]) + (i % 3) for i in range(n)],
            "n_unseen": [i % 3 for i in range(n)],
            "n_rows": counts.sum(axis=1),
            **{name: [i % 2 + far * (name == "far") for i in range(n)] for name in COUNTED},
            "text": [None] * n,
        },
        "summary": {
            "document": document,
            "doc_id": [f"d{i}" for i in document],
            "concept": [ids[c] for c in concept],
            "level": [0] * len(concept),
            "n_tokens": counts[document, concept],
            "max_score": [0.9] * len(concept),
            "max_position": [0] * len(concept),
            "mean_score": [0.1] * len(concept),
        },
        "concepts": {
            "concept": ids,
            "name": [f"name {i}" for i in range(len(ids))],
            "level": [len(path_of(i)) - 1 for i in range(len(ids))],
            "parents": [[ids[p] for p in parents] for parents in PARENTS],
            "path": [path_of(i) for i in range(len(ids))],
            "watched": [True] * len(ids),
            "alert_threshold": [0.5] * len(ids),
            "precision": [None] * len(ids),
            "n_documents": (counts > 0).sum(axis=0),
            "n_tokens": counts.sum(axis=0),
            "max_score": [0.9] * len(ids),
            "score_sum": [1.0] * len(ids),
            "n_by_part": [[0] * len(PARTS)] * len(ids),
        },
    }
    made = {
        name: pa.table([column(f, columns[name].get(f.name, [])) for f in schema], schema=schema)
        for name, schema in schemas().items()
    }
    analysis = Analysis.begin(path, {**IDENTITY, **changes}, {}, resume=False)
    analysis.write_shard(0, made, {"digest": "", "first": 0, "n_documents": n, "totals": {"documents": n}})
    assert analysis.finish([""])
    return Analysis.open(path)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyses")
    return write(folder / "a", *corpus(1)), write(folder / "b", *corpus(2, n=31, plant=(5, 6)))


def sign_of_pairs(x, y):
    return sum((b > a) - (b < a) for a in x for b in y)


# -- one concept ---------------------------------------------------------------------------------


def permutation_p(x, y):
    """Every p that the numbers can have, by every way to deal them out: `{dominance: (p, how many ways)}`."""
    values = [*x, *y]
    twice_rank = [sum(w < v for w in values) + sum(w <= v for w in values) for v in values]
    ways = Counter(
        sum(twice_rank[i] for i in dealt) - len(x) * len(values)
        for dealt in itertools.combinations(range(len(values)), len(x))
    )
    total, found = sum(ways.values()), {}
    for dominance, count in ways.items():
        tails = [sum(c for d, c in ways.items() if (d - dominance) * side >= 0) for side in (1, -1)]
        found[dominance] = min(1.0, 2 * min(tails) / total), count
    return found


def ties_of(values):
    return [count for _, count in sorted(Counter(values).items())]


@pytest.mark.parametrize(("n", "m", "k"), [(1, 1, 1), (2, 40, 3), (5, 5, 10), (7, 3, 4), (3, 17, 19), (8, 6, 7)])
def test_mann_whitney_of_two_values_equals_the_exact_test(n, m, k):
    values = [1.0] * k + [0.0] * (n + m - k)
    for dominance, (p, _) in permutation_p(values[:n], values[n:]).items():
        assert math.isclose(mann_whitney(dominance, [n + m - k, k], n, m), p, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("n", "m", "values"),
    [
        (3, 20, [0] * 15 + [1, 2, 3, 4, 5, 6, 7, 8]),
        (7, 7, list(range(14))),
        (11, 5, [0] * 9 + [1, 2, 3, 4, 5, 6, 7]),
        (1, 9, list(range(10))),
        (5, 10, [0, 0] + [1] * 3 + [2] * 4 + [3] * 5 + [4]),
        (4, 12, [0, 1, 1, 2] + [9] * 12),
        (3, 25, [0] * 5 + [1] * 10 + [2] * 9 + [3] * 4),
    ],
)
def test_p_value_of_few_documents_equals_all_permutations(n, m, values):
    for dominance, (p, _) in permutation_p(values[:n], values[n:]).items():
        assert math.isclose(mann_whitney(dominance, ties_of(values), n, m), p, rel_tol=1e-12)
        assert mann_whitney(-dominance, ties_of(values), m, n) == mann_whitney(dominance, ties_of(values), n, m)


@pytest.mark.parametrize(
    ("n", "m", "zeros", "others", "tops"),
    [(22, 22, 0, 44, 0), (6, 100, 80, 26, 0), (16, 40, 30, 20, 6), (12, 70, 12, 6, 64), (26, 26, 30, 0, 22)],
)
def test_p_value_of_many_documents_is_close_to_exact_counting(monkeypatch, n, m, zeros, others, tops):
    ties = [zeros, *[1] * others, tops]
    rank = np.repeat([2 * sum(ties[:i]) + size for i, size in enumerate(ties)], ties)
    rng, found = np.random.default_rng(n), {}
    for i in range(120):
        pull = rng.normal(0, 3) * (
            i % 2
        )  # every other one by chance alone, else with the larger or the smaller ones on one side
        dealt = np.argsort(rng.gumbel(size=n + m) + pull * rank / (n + m))[:n]
        dominance = int(rank[dealt].sum()) - n * (n + m)
        for work in (1 << 60, 0):
            monkeypatch.setattr("probemon.lab.corpora.significance._COUNTED", work)
            found[dominance, work] = mann_whitney(dominance, ties, n, m)
    checked = [(exact, found[d, 0] / exact) for (d, work), exact in found.items() if work]
    assert all(ratio > 0.65 for _, ratio in checked)  # how ever small: never much smaller than it is
    assert all(0.75 < ratio < 1.4 for exact, ratio in checked if exact > 0.001) and min(checked)[0] < 1e-4


def test_rare_concepts_in_unequal_corpora_have_no_tiny_p():
    """One document of 100, none of 5,000: the textbook's normal approximation would say 1e-12."""
    assert math.isclose(mann_whitney(5000, [5099, 1], 100, 5000), 2 * 100 / 5100, rel_tol=1e-9)
    assert math.isclose(
        mann_whitney(3 * 5000, [5097, 3], 100, 5000), 2 * math.comb(100, 3) / math.comb(5100, 3), rel_tol=1e-8
    )
    assert mann_whitney(0, [50], 20, 30) == 1.0 and 0 <= mann_whitney(2500 * 2500, [1] * 5000, 2500, 2500) < 1e-300
    with pytest.raises(ConfigError, match="9 values for 5 and 5 documents"):
        mann_whitney(0, [4, 5], 5, 5)


def test_benjamini_hochberg_equals_its_definition():
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 40):
        p = np.round(rng.random(n) ** 2, 2)  # with equals
        expected = [min(1.0, *(p[j] * n / sum(p <= p[j]) for j in range(n) if p[j] >= p[i]), 1.0) for i in range(n)]
        assert np.allclose(benjamini_hochberg(p), expected, rtol=1e-12, atol=0)
    assert len(benjamini_hochberg([])) == 0


# -- of chance and of truth ------------------------------------------------------------------------


def p_values(x, y):
    """p of each column, pairs compared one by one."""
    together = np.concatenate([x, y])
    return [
        mann_whitney(int(np.sign(a[:, None] - b).sum()), ties_of(c.tolist()), len(a), len(b))
        for a, b, c in zip(x.T, y.T, together.T, strict=True)
    ]


def nested(rng, n, rare=0.25):
    """Shares `[n, 30]` of ten roots, a child of each and a child of that, each over the floor only where its
    parent is.
    """
    roots = np.where(rng.random((n, 10)) < rare, rng.random((n, 10)), 0.0)
    children = np.where(rng.random((n, 10)) < 0.7, roots * rng.random((n, 10)), 0.0)
    return np.concatenate([roots, children, np.where(rng.random((n, 10)) < 0.7, children, 0.0)], axis=1)


@pytest.mark.parametrize(("n", "m", "fdr"), [(12, 108, 0.2), (40, 40, 0.1)])
def test_random_splits_of_a_corpus_rarely_differ(n, m, fdr):
    """All is chance, so the false-discovery rate is how often anything is listed."""
    rng = np.random.default_rng(7)
    whole, n_listed, n_splits = nested(rng, n + m), 0, 150
    for _ in range(n_splits):
        dealt = rng.permutation(whole)
        n_listed += bool((benjamini_hochberg(p_values(dealt[:n], dealt[n:])) <= fdr).any())
    assert lower_bound(n_listed, n_splits, 0.999) <= fdr


def test_planted_differences_are_found_with_few_false_positives():
    rng, false, found = np.random.default_rng(8), [], 0
    for _ in range(60):
        x, y = nested(rng, 50), nested(rng, 50)
        y[:, [3, 13, 23]] = np.minimum(1, y[:, [3, 13, 23]] + 0.1)
        listed = np.flatnonzero(benjamini_hochberg(p_values(x, y)) <= 0.1)
        planted = np.isin(listed, [3, 13, 23])
        false.append(float((~planted).mean()) if len(listed) else 0.0)
        found += planted.sum()
    assert found == 180 and mean_interval(float(np.mean(false)), len(false), 0.998)[0] <= 0.1


def sample(x):
    """Documents by concept `[n, P]` as `compare` holds them, in the order given."""
    order = [np.flatnonzero(column)[np.argsort(column[column > 0], kind="stable")] for column in x.T]
    return Sample(
        None,
        tuple(b"" for _ in x),
        np.cumsum([0, *map(len, order)]),
        np.concatenate(order),
        np.concatenate([x[at, c] for c, at in enumerate(order)]),
    )


def test_intervals_cover_the_true_difference():
    rng, covered, n_runs = np.random.default_rng(9), np.zeros(2), 200
    zero_a, zero_b = 0.6, 0.4
    truth = np.array([(zero_a - zero_b) / 2, zero_a - zero_b])  # uniform where they are not 0
    for run in range(n_runs):
        x, y = (np.where(rng.random((n, 1)) < zero, 0, rng.random((n, 1))) for n, zero in ((60, zero_a), (45, zero_b)))
        draws = np.concatenate(resampled(sample(x), sample(y), [0], 199, run, None), axis=1)
        low, high = np.sort(draws, axis=0)[[9, 189]]
        covered += (low <= truth) & (truth <= high)
    assert (np.abs(covered / n_runs - 0.9) < 0.06).all(), covered


# -- the whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["share", "max"])
def test_statistics_equal_a_count_over_all_document_pairs(both, by):
    found = compare(*both, by=by, resamples=39)
    shares = [
        np.where(counts > 0, 1.0, 0.0) if by == "max" else counts / seen[:, None]
        for seen, counts in (corpus(1), corpus(2, n=31, plant=(5, 6)))
    ]
    assert {row.concept for row in found.rows} == {f"c{c}" for c in range(7)} and found.n_never_over == 1
    p = {}
    for row in found.rows:
        c = int(row.concept[1:])
        x, y = (values[:, c].tolist() for values in shares)
        assert (row.n_a, row.n_b) == (sum(v > 0 for v in x), sum(v > 0 for v in y))
        mean_a, mean_b, pairs = math.fsum(x) / 40, math.fsum(y) / 31, sign_of_pairs(x, y)
        assert np.allclose(
            [row.mean_a, row.mean_b, row.difference, row.ratio],
            [mean_a, mean_b, mean_b - mean_a, mean_b / mean_a],
            rtol=1e-12,
        )
        assert row.cliffs_delta == pairs / (40 * 31)
        p[row.concept] = mann_whitney(pairs, ties_of([*x, *y]), 31, 40)
        assert math.isclose(row.p, p[row.concept], rel_tol=1e-9)
        assert row.path[-1] == row.name == f"name {c}" and row.level == len(row.path) - 1
    q = dict(zip(p, benjamini_hochberg(list(p.values())), strict=True))
    assert all(math.isclose(row.q, q[row.concept], rel_tol=1e-9) for row in found.rows)
    assert list(found.rows) == sorted(found.rows, key=lambda row: (row.q, -abs(row.cliffs_delta), row.concept))
    assert {row.concept for row in found.differing} == {c for c in q if q[c] <= 0.05} >= {"c5", "c6"}


@pytest.mark.parametrize(("resamples", "confidence", "at"), [(39, 0.95, 0), (60, 0.9, 2), (99, 0.8, 9)])
def test_bootstrap_intervals_equal_a_slow_loop_over_the_same_draws(both, monkeypatch, resamples, confidence, at):
    monkeypatch.setattr("probemon.lab.corpora.document_samples._CHUNK", 7 * 40)  # several chunks, the last one short
    found = compare(*both, resamples=resamples, confidence=confidence, seed=5)
    samples = [Sample.of(analysis, "share") for analysis in both]
    sides = sorted(samples, key=lambda one: one.documents)  # draws belong to the documents, not to the letter
    draws = {
        id(one): np.random.default_rng([5, side]).integers(0, one.n, (resamples, one.n))
        for side, one in enumerate(sides)
    }
    for row in found.rows:
        c = int(row.concept[1:])
        differences, deltas = [], []
        values = [np.zeros(one.n) for one in samples]
        for one, all_of in zip(samples, values, strict=True):
            all_of[one.documents_of(c)] = one.values(c)
        for r in range(resamples):
            x, y = (all_of[draws[id(one)][r]].tolist() for one, all_of in zip(samples, values, strict=True))
            differences.append(math.fsum(y) / 31 - math.fsum(x) / 40)
            deltas.append(sign_of_pairs(x, y) / (40 * 31))
        differences.sort()
        deltas.sort()
        assert np.allclose(
            [row.difference_low, row.difference_high], [differences[at], differences[-1 - at]], rtol=1e-12, atol=1e-15
        )
        assert [row.delta_low, row.delta_high] == [deltas[at], deltas[-1 - at]]


def test_swapping_corpora_flips_only_the_signs(both):
    one, other = compare(*both, resamples=60), compare(*both[::-1], resamples=60)
    assert (one.a, one.b) == (other.b, other.a) and len(one.differing) == len(other.differing) >= 2
    for x, y in zip(one.rows, other.rows, strict=True):
        assert (x.concept, x.n_a, x.n_b, x.mean_a, x.mean_b, x.p, x.q, x.explained_by) == (
            y.concept,
            y.n_b,
            y.n_a,
            y.mean_b,
            y.mean_a,
            y.p,
            y.q,
            y.explained_by,
        )
        for value, low, high in (
            ("difference", "difference_low", "difference_high"),
            ("cliffs_delta", "delta_low", "delta_high"),
        ):
            assert [getattr(x, name) for name in (value, low, high)] == [
                -getattr(y, name) for name in (value, high, low)
            ]
    assert any(row.difference_low < row.difference < row.difference_high for row in one.rows)


def test_document_order_changes_nothing(both, tmp_path):
    seen, counts = corpus(2, n=31, plant=(5, 6))
    turned = np.random.default_rng(3).permutation(31)
    other = write(tmp_path / "turned", seen[turned], counts[turned])
    one, again = compare(*both), compare(both[0], other)
    assert again.rows == one.rows
    assert compare(*both) == one != compare(*both, seed=1)
    assert [(row.concept, row.p) for row in compare(*both, seed=1).rows] == [(row.concept, row.p) for row in one.rows]


def test_a_corpus_does_not_differ_from_itself(both):
    found = compare(both[0], both[0], resamples=199)
    assert not found.differing and all(
        row.p == row.q == row.ratio == 1 and row.difference == row.cliffs_delta == 0 for row in found.rows
    )
    assert all(
        row.difference_low < 0 < row.difference_high for row in found.rows
    )  # two draws of one corpus are not one draw


def test_bad_and_unseen_documents_are_left_out_and_counted(both, tmp_path):
    seen, counts = corpus(1)
    seen, counts = np.concatenate([seen, [5, 0]]), np.concatenate([counts, np.zeros((2, len(PARENTS)), np.int64)])
    more = write(tmp_path / "more", seen, counts, bad=(40,))
    one, other = compare(*both), compare(more, both[1])
    assert other.rows == one.rows
    assert (other.a.n_documents, other.a.n_bad, other.a.n_unseen) == (40, 1, 1) and (
        one.a.n_documents,
        one.a.n_bad,
        one.a.n_unseen,
    ) == (40, 0, 0)
    assert other.a.n_tokens == one.a.n_tokens == corpus(1)[0].sum() and one.a.median_tokens == np.median(corpus(1)[0])
    assert one.a.n_dropped == one.a.n_far == 20 and one.b.n_dropped == one.b.n_far == 15


def test_concept_absent_from_one_corpus_has_no_ratio(tmp_path):
    seen, counts = corpus(4)
    only = counts.copy()
    only[:, 6] = 0
    one, other = write(tmp_path / "one", seen, only), write(tmp_path / "other", seen, counts)
    (row,) = (row for row in compare(one, other).rows if row.concept == "c6")
    assert row.ratio is None and row.mean_a == 0 < row.mean_b and row.difference_low >= 0
    (row,) = (row for row in compare(other, one).rows if row.concept == "c6")
    assert row.ratio == 0 and not re.search(r"-0\.0\b", json.dumps(compare(other, one).stated()))


def test_narrower_concept_explains_its_ancestors(tmp_path):
    """c5 alone differs, and c0, c1 and c2 are over the floor where it is, and elsewhere; c6 differs the other way."""
    rng = np.random.default_rng(0)

    def made(name, n_5, n_6):
        counts = np.zeros((100, len(PARENTS)), np.int64)
        counts[:n_5, [0, 1, 2, 5]] = 1
        counts[rng.permutation(100)[:20], 0] = 1
        counts[:n_6, 6] = 1
        return write(tmp_path / name, np.full(100, 10), counts)

    found = compare(made("a", 5, 60), made("b", 50, 10), by="max")
    assert {row.concept: row.explained_by for row in found.differing} == {
        "c0": "c5",
        "c1": "c5",
        "c2": "c5",
        "c5": "",
        "c6": "",
    }
    assert {row.concept: row.cliffs_delta > 0 for row in found.differing} == {
        "c0": True,
        "c1": True,
        "c2": True,
        "c5": True,
        "c6": False,
    }
    # One that differs more than all below it is more than they are.
    counts = np.zeros((100, len(PARENTS)), np.int64)
    counts[:30, [0, 1]] = 1
    counts[30:60, [0, 2]] = 1
    wide = compare(made("none", 0, 0), write(tmp_path / "wide", np.full(100, 10), counts), by="max")
    assert {row.concept: row.explained_by for row in wide.differing} == {"c0": "", "c1": "", "c2": ""}
    # One that differs the other way explains nothing.
    one, other = np.zeros((2, 100, len(PARENTS)), np.int64)
    one[:60, [0, 1]] = other[:5, 1] = other[:90, 0] = 1
    opposite = compare(
        write(tmp_path / "one", np.full(100, 10), one), write(tmp_path / "other", np.full(100, 10), other), by="max"
    )
    assert {row.concept: (round(row.cliffs_delta, 2), row.explained_by) for row in opposite.differing} == {
        "c0": (0.3, ""),
        "c1": (-0.55, ""),
    }


def test_shares_of_real_analyses_equal_their_rows(model, pack, tmp_path):
    manager, made, shares = (
        DynamicProbeManager(pack, keep_top_k=5, max_loaded_probes=25, impl="cpu", strategy="descent"),
        [],
        [],
    )
    for seed, n in ((0, 12), (1, 9)):
        texts = [*random_texts(n, seed=seed), ""]
        made.append(analyze(manager, model, make_tokenizer(), texts, tmp_path / str(seed), floor=0.2))
        rows = Counter(
            zip(*(made[-1].scores().column(name).to_pylist() for name in ("concept", "document")), strict=True)
        )
        shares.append(
            {c["id"]: [rows[c["id"], i] / len(text) for i, text in enumerate(texts[:-1])] for c in pack.concepts}
        )
    found = compare(*made, resamples=39)
    assert len(found.rows) + found.n_never_over == pack.n_probes and len(found.rows) > 10 and found.floor == 0.2
    for row in found.rows:
        x, y = (of[row.concept] for of in shares)
        assert math.isclose(row.mean_a, math.fsum(x) / 12, abs_tol=1e-12) and math.isclose(
            row.mean_b, math.fsum(y) / 9, abs_tol=1e-12
        )
        assert row.cliffs_delta == sign_of_pairs(x, y) / 108 and row.path == tuple(pack.path(pack.find(row.concept)))
    assert (found.a.n_bad, found.b.n_documents) == (1, 9) and found.a.n_dropped == made[0].manifest["totals"]["dropped"]


def test_excluded_concepts_are_not_counted_as_never_over_the_floor(model, pack, tmp_path, capsys):
    manager, alike = DynamicProbeManager(pack, exclude=["c0"]), DynamicProbeManager(pack)
    n = manager.plan.n_excluded
    one, other = (
        analyze(manager, model, make_tokenizer(), random_texts(6, seed=seed), tmp_path / str(seed)) for seed in (0, 1)
    )
    found = compare(one, other, resamples=39)
    assert len(found.rows) + found.n_never_over == pack.n_probes - n < pack.n_probes and found.n_excluded == n
    assert found.stated()["n_excluded"] == n
    told = f"{found.n_never_over} never over the floor in either, {n} excluded"
    _show(found, 3)
    assert told in capsys.readouterr().out
    assert f"{found.n_never_over} were over it in neither; {n} were excluded" in read(found._repr_html_()).text
    whole = analyze(alike, model, make_tokenizer(), random_texts(6), tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"cascade\.exclude is \['c0'\] and \[\]"):
        compare(one, whole, resamples=39)


# -- what cannot be compared ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pack": {**IDENTITY["pack"], "probes": "9"}}, r"pack\.probes is '2' and '9'"),
        ({"tokenizer": "u"}, "tokenizer is 't' and 'u'"),
        ({"floor": 0.5}, r"floor is 'fired' and 0\.5"),
        ({"host": {**IDENTITY["host"], "dtype": "float32"}}, r"host\.dtype is 'bfloat16' and 'float32'"),
        ({"host": {**IDENTITY["host"], "device": "cuda"}}, r"host\.device is 'cpu' and 'cuda'"),
        ({"cascade": {"keep_top_k": 5}}, r"cascade\.keep_top_k is 30 and 5"),
        (
            {"reading": {**IDENTITY["reading"], "special_tokens": "none"}},
            r"reading\.special_tokens is 'bos' and 'none'",
        ),
        ({"reading": {**IDENTITY["reading"], "parse_special": True}}, r"reading\.parse_special is False and True"),
    ],
)
def test_analyses_with_other_settings_are_refused(both, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        compare(both[0], write(tmp_path / "other", *corpus(2), **changes))


def test_windows_batches_and_kernels_may_differ(both, tmp_path):
    other = write(
        tmp_path / "other",
        *corpus(2),
        reading={**IDENTITY["reading"], "batch_tokens": 1, "window": {"n_tokens": 512}},
        kernel={"impl": "numba"},
        keep_text=False,
    )
    _check_same(both[0], other)


def test_different_windows_are_refused_if_they_cut_a_document(both, tmp_path):
    longer = {"n_tokens": 1024, "overlap": 2}
    for i, window in enumerate(({"n_tokens": 8, "overlap": 1}, longer, None, [3], {"n_tokens": "8"})):
        other = write(tmp_path / f"{i}", *corpus(2), reading={**IDENTITY["reading"], "window": window})
        if window is longer:  # no document is as long
            _check_same(both[0], other)
            continue
        with pytest.raises(ConfigError, match=r"in different windows .* Analyze both corpora with the same window"):
            compare(both[0], other)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"by": "mean"}, "by is 'mean': give one of share, max"),
        ({"fdr": 0}, "fdr is 0"),
        ({"fdr": True}, "fdr is True"),
        ({"confidence": 1.0}, r"confidence is 1\.0"),
        ({"confidence": float("nan")}, "confidence is nan"),
        ({"resamples": 38}, r"resamples is 38: give a whole number, 39 or more \(what a confidence of 0\.95 needs\)"),
        ({"resamples": 1000, "confidence": 0.999}, "1999 or more"),
        ({"seed": -1}, "seed is -1"),
        ({"resamples": 100.0}, r"resamples is 100\.0"),
    ],
)
def test_invalid_settings_are_refused(both, settings, words):
    with pytest.raises(ConfigError, match=words):
        compare(*both, **settings)


def test_a_corpus_without_a_seen_token_is_refused(both, tmp_path):
    nothing = write(tmp_path / "nothing", np.zeros(3, np.int64), np.zeros((3, len(PARENTS)), np.int64))
    with pytest.raises(ConfigError, match="3 documents, none with a seen token"):
        compare(both[0], nothing)


# -- the command ---------------------------------------------------------------------------------


def run(*arguments):
    app = typer.Typer()
    app.command()(diff)
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_command_reports_the_comparison(both, tmp_path):
    out = tmp_path / "diff.parquet"
    told = json.loads(run(both[0].directory, both[1].directory, "--json", "--out", out, "--resamples", 60))
    found = compare(*both, resamples=60)
    assert told == json.loads(json.dumps(found.stated())) and told["n_tested"] == 7 and len(told["rows"]) == 7
    table = pq.read_table(out)
    assert table.equals(found.to_arrow()) and [path.name for path in tmp_path.iterdir()] == ["diff.parquet"]
    assert table.to_pylist() == [{**dataclasses.asdict(row), "path": list(row.path)} for row in found.rows]
    assert json.loads(table.schema.metadata[b"probemon"]) == {
        key: value for key, value in told.items() if key != "rows"
    }


def test_existing_output_file_is_kept(both, tmp_path, monkeypatch):
    found, out = compare(*both, resamples=39), tmp_path / "diff.parquet"
    found.write(out)
    with pytest.raises(ConfigError, match="exists: give another name"):
        found.write(out)
    out.write_text("mine")
    monkeypatch.setattr("probemon.lab.corpora.compare.check_new", lambda path: path)
    with pytest.raises(ConfigError, match="cannot be made"):
        found.write(out)
    assert out.read_text() == "mine" and list(tmp_path.iterdir()) == [out]


def test_the_table_lists_each_direction_with_its_paths(both):
    text = run(both[0].directory, both[1].directory)
    found = compare(*both)
    up = [row for row in found.differing if row.cliffs_delta > 0]
    assert f"{len(found.differing)} concepts differ (7 concepts tested, 1 never over the floor in either)" in text
    assert f"more in B: {len(up)}\n" in text and "name 0 > name 1 > name 5" in text and "more in A" not in text
    best = max(up, key=lambda row: row.cliffs_delta)
    assert (
        f"{best.cliffs_delta:+.2f} ({best.delta_low:+.2f} to {best.delta_high:+.2f})" in text
        and "5 % at most are expected to be chance" in text
    )
    assert "20 times in A and 15 times in B" in text
    exchanged = run(both[1].directory, both[0].directory, "--rows", 1)
    assert f"more in A: {len(up)}, the largest 1 effects" in exchanged and "more in B" not in exchanged


def test_report_names_left_out_documents_and_uncalibrated_corpora(both, tmp_path):
    seen, counts = corpus(1)
    odd = write(tmp_path / "odd", seen, counts, bad=(3,), far=1)
    n_seen, n_far = int(np.delete(seen, 3).sum()), sum(i % 2 + 1 for i in range(40) if i != 3)
    text = run(odd.directory, both[1].directory)
    assert f"{odd.directory}: 39 of 40 documents compared (left out: 1 bad), {n_seen} seen tokens" in text
    assert f"caution: in A {n_far} of {n_seen} tokens" in text and "caution: in B" not in text
    assert f"Caution: in A {n_far} of {n_seen} tokens" in read(compare(odd, both[1])._repr_html_()).text


def test_report_says_if_nothing_differs(both):
    text = run(both[0].directory, both[0].directory)
    assert (
        "no concept differs at a false-discovery rate of 0.05 (7 concepts tested, 1 never over the floor in either; the"
        " lowest q is 1)" in text
    )
    assert "does not show that the corpora are alike" in text and "Cliff" not in text


def test_invalid_command_options_are_refused_before_the_work(both, tmp_path):
    folders = [analysis.directory for analysis in both]
    (tmp_path / "mine").write_text("x")
    for arguments, words in [
        ([*folders, "--out", tmp_path / "mine"], "mine exists"),
        ([*folders, "--out", tmp_path / "no" / "x"], "is not a folder"),
        ([*folders, "--rows", 0], "--rows is 0"),
        ([folders[0], tmp_path], "has no analysis"),
        ([*folders, "--by", "mean"], "by is 'mean'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run(*arguments)
    assert (tmp_path / "mine").read_text() == "x" and [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(ConfigError, match="not finished"):
        Analysis.begin(tmp_path / "begun", IDENTITY, {}, resume=False)
        run(folders[0], tmp_path / "begun")
