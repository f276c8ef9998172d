"""Contradictory labels of one text are reported with rows and concept and stop nothing."""

import random

import pytest

from corpora import make_tokenizer
from lab.training.test_train import rows, text
from probemon.lab.training import train
from probemon.lab.training.card import warnings
from probemon.lab.training.contradictions import Contradiction, contradictions
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.examples import read_examples
from probemon.lab.training.state_store import TextReader


def told(model, more, **how):
    reader = TextReader(model, make_tokenizer(), ["resid_post.1"])
    return list(contradictions(Dataset.of_examples(read_examples([*rows(), *more], **how), reader)))


N = len(rows())  # what is given after them is named from here on


@pytest.mark.parametrize("copy", ["azbz czdz", "azbz  czdz", " azbz czdz "])
def test_contradicting_rows_of_one_text_are_named(model, copy):
    """Other spaces are other tokens, of the same text."""
    again = "azbz czdz"
    found = told(model, [{"text": copy, "labels": ["zed"]}, {"text": again, "not": ["zed", "queue"]}])
    assert found == [Contradiction("zed", f"example {N}", f"example {N + 1}")]


def test_unknown_and_repeated_labels_are_not_contradictions(model):
    twice = [{"text": "azbzczdz", "labels": ["zed"]}, {"text": "azbzczdz", "labels": ["zed"], "not": ["queue"]}]
    pair = {"positive": "azbzczdq", "negative": "azbzczde", "concept": "queue"}
    assert told(model, [*twice, pair]) == []


def test_one_span_per_row_contradicts_the_other_spans(model):
    """Of tables with one span a row: each says that the rest of its text is without the concept."""
    given = [{"text": "zzaabbzz", "spans": [{"start": start, "end": start + 2, "concept": "zed"}]} for start in (0, 6)]
    assert told(model, given) == [Contradiction("zed", f"example {N}", f"example {N + 1}")]
    assert told(model, [{**row, "rest": "unknown"} for row in given]) == []


def test_one_label_per_row_contradicts_exclusive_labels(model):
    """Of tables with one label a row: with `exclusive` each row denies the others."""
    both = [{"text": "azbqczdq", "labels": [id]} for id in ("zed", "queue")]
    assert told(model, both) == []
    names = {one.concept: (one.there, one.absent) for one in told(model, both, exclusive=True)}
    assert names == {
        "zed": (f"example {N}", f"example {N + 1}"),
        "queue": (f"example {N + 1}", f"example {N}"),
    }


def test_card_names_contradictions_and_counts_the_rest(model, tmp_path):
    rng = random.Random(5)
    copies = [text(rng, "z") for _ in range(3)]
    given = [row for copy in copies for row in ({"text": copy, "labels": ["zed"]}, {"text": copy, "not": ["zed"]})]
    found = train(
        model, [*rows(), *given], tmp_path / "p", tokenizer=make_tokenizer(), ordinary=0, layers=(1,),
        states=tmp_path / "s",
    )  # fmt: skip
    one = {"texts": 3, "there": f"example {N}", "absent": f"example {N + 1}"}
    assert found.quality["contradictions"] == {"zed": one}
    (said,) = [line for line in warnings(found.quality) if "both are learnt" in line]
    assert said.startswith(
        f"3 texts are given with `zed` and without it (example {N} and example {N + 1} say the same)"
    )
    assert said in found.pack.card_text()
    many = {**found.quality, "contradictions": {id: one for id in "abcde"}}
    assert any(line == "So are texts of `d`, `e`." for line in warnings(many))
