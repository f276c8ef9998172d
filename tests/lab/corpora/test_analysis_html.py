"""The HTML of an analysis and of a comparison shows their numbers and escapes names."""

import math

import numpy as np
import pytest

from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.compare import compare
from reports import write_analysis
from static_page import HOSTILE, harmful, read

CONCEPTS = [("a", "animal", [], 0.5), ("w", "whale", ["a"], 0.8), ("s", "ship", [], math.nan), ("n", "never", [], 0.5)]


def analysis_of(folder, n=3, concepts=CONCEPTS, whaleless=0, **more):
    """Documents of two tokens: "whale" and "sea"; animal scores 0.6, whale 0.9 but in the last `whaleless`, ship 0.7 in
    the first alone.
    """
    documents = [
        (
            f"d{i}",
            "whale sea",
            [(0, 5, {0: 0.6, **({} if i >= n - whaleless else {1: 0.9}), **({2: 0.7} if i == 0 else {})}), (6, 9, {})],
            "",
        )
        for i in range(n)
    ]
    return write_analysis(folder, documents, concepts, **more)


def test_analysis_html_shows_its_counts(tmp_path):
    analysis = analysis_of(tmp_path / "corpus")
    page = read(analysis._repr_html_())
    assert "3 documents, 0 of them not scored; 6 tokens, 0 of them unseen; 7 scores over the floor (fired)" in page.text
    totals = analysis.manifest["totals"]
    assert totals["active"] == 12 and totals["evaluated"] == 12  # of 4 probes at 6 tokens
    assert "50.0% active, 50.0% not reached, 0.0% dropped; 2.0 probes evaluated a token" in page.text
    cells = [text for _, _, text in page.of("td")]
    strength = [math.log(s / (1 - s)) - math.log(t / (1 - t)) for s, t in ((0.9, 0.8), (0.6, 0.5))]
    assert cells == [
        "animal › whale", "3", "3", "0.90", f"{strength[0]:+.1f}",  # and so animal, in no other document
        "ship", "1", "1", "0.70", "",
    ]  # fmt: skip
    assert "1 more were over the floor" in page.text and ", 1 never" in page.text
    other = read(analysis_of(tmp_path / "other", whaleless=1)._repr_html_())
    assert [text for _, _, text in other.of("td")][5:10] == ["animal", "3", "3", "0.60", f"{strength[1]:+.1f}"]
    assert repr(analysis) == f"Analysis({str(tmp_path / 'corpus')!r}, 3 documents, 6 tokens, pack 'by hand')"


def test_concepts_of_one_name_do_not_hide_each_other(tmp_path):
    """Two senses of a bank: what fires below one says nothing of the other."""
    concepts = [("t", "thing", [], 0.5), ("b1", "bank", ["t"], 0.5), ("b2", "bank", ["t"], 0.5)]
    concepts.append(("r", "river bank", ["b1"], 0.5))
    documents = [("d", "bank", [(0, 4, {0: 0.9, 1: 0.8, 2: 0.8, 3: 0.7})], "")]
    page = read(write_analysis(tmp_path / "corpus", documents, concepts)._repr_html_())
    assert {text for _, _, text in page.of("td") if "thing" in text} == {"thing › bank", "thing › bank › river bank"}
    assert "2 more were over the floor" in page.text


def test_corpus_unlike_the_calibration_shows_a_caution(tmp_path):
    analysis = analysis_of(tmp_path / "corpus")
    assert analysis.manifest["totals"]["far"] == 0 and "Caution" not in read(analysis._repr_html_()).text
    far = Analysis(analysis.directory, {**analysis.manifest, "totals": {**analysis.manifest["totals"], "far": 3}})
    assert "Caution: 3 of 6 tokens (50%) are unlike the text" in read(far._repr_html_()).text


def test_unfinished_analysis_says_so(tmp_path):
    analysis_of(tmp_path / "corpus", finish=False)
    analysis = Analysis.open(tmp_path / "corpus", unfinished=True)
    assert "The analysis is not finished" in read(analysis._repr_html_()).text and "not finished" in repr(analysis)


def test_names_are_escaped_and_only_the_strongest_concepts_are_listed(tmp_path):
    names = [name for name in HOSTILE if "\ud800" not in name]
    concepts = [(f"c{i}", names[i % len(names)], [], 0.5) for i in range(200)]
    tokens = [(0, 1, {c: 0.6 + c / 1000 for c in range(200)})]
    analysis = write_analysis(
        tmp_path / "corpus", [("d", "x", tokens, "")], concepts, identity={"pack": {"name": "<b>\x1b\u202e"}}
    )
    page = read(analysis._repr_html_())
    shown = [text for _, _, text in page.of("td")][::5]
    assert len(shown) == 20 and "180 more were over the floor" in page.text and ", 0 never" in page.text
    for c, text in zip(range(199, 179, -1), shown, strict=True):
        name = names[c % len(names)]
        assert text == name or harmful(name, "") or text == f"{name[:60]}… ({len(name):,} characters)"
    assert "By <b>\\x1b\\u202e on" in page.text


@pytest.mark.parametrize("by", ["share", "max"])
def test_comparison_html_shows_its_rows(tmp_path, by):
    concepts = [("a", "animal", [], 0.5), ("s", "<ship>", [], 0.5)]

    def corpus(name, share):
        rng = np.random.default_rng(len(name))
        scores = [{0: 0.6} if rng.random() < share else {1: 0.7} for _ in range(60)]
        documents = [(f"d{i}", "x y", [(0, 1, scores[i]), (2, 3, {})], "") for i in range(60)]
        return write_analysis(tmp_path / name, documents, concepts)

    comparison = compare(corpus("before", 0.1), corpus("after", 0.9), by=by)
    page = read(comparison._repr_html_())
    assert len(comparison.differing) == 2 and "2 of 2 concepts differ" in page.text
    cells = [text for _, _, text in page.of("td")]
    for i, row in enumerate(comparison.differing):
        assert cells[6 * i : 6 * i + 3] == [row.name, f"{row.mean_a:.3%}", f"{row.mean_b:.3%}"]
        assert cells[6 * i + 4 : 6 * i + 6] == [f"{row.cliffs_delta:+.2f}", f"{row.q:.2g}"]
    assert (
        repr(comparison).endswith("2 of 2 differ)")
        and "60 documents compared, 0 left out; 120 seen tokens" in page.text
    )
    same = compare(Analysis.open(tmp_path / "before"), Analysis.open(tmp_path / "before"), by=by)
    assert "0 of 2 concepts differ" in read(same._repr_html_()).text and not read(same._repr_html_()).of("td")
