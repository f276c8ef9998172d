"""What a data set deals out: folds that nothing leaks through, and the tokens that labels are of."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import make_model
from corpora import make_tokenizer
from probemon.errors import TrainingError
from probemon.lab.training.dataset import CARRIED, N_FOLDS, ORDINARY, OWN, Dataset
from probemon.lab.training.examples import Example, read_examples
from probemon.lab.training.groups import group_texts
from probemon.lab.training.ordinary import Ordinary
from probemon.lab.training.state_store import TextReader

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
WORDS = [a + b + c for a in "bcdfgm" for b in "aeiou" for c in ("", "n", "ra", "sto", "l")]


@pytest.fixture(scope="module")
def reader():
    return TextReader(make_model(hidden=16), make_tokenizer(), ["resid_post.0"])


@pytest.fixture(scope="module")
def chat_reader():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return TextReader(make_model(hidden=16), tokenizer, ["resid_post.0"])


def said(rng, n=14):
    return " ".join(rng.choice(WORDS) for _ in range(n))


def ordinary_of(rng, n_kinds=7, n=3):
    measured = [
        (f"kind {k}", Example(f"ordinary {k} {i}", said(rng), group=f"ordinary {k} {i}"))
        for k in range(n_kinds)
        for i in range(n)
    ]
    return Ordinary(measured, [], [said(rng, 60) for _ in range(5)])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(0, 5))
def test_nothing_that_belongs_together_is_in_two_folds(reader, number, seed):
    """Minimal pairs as plain rows, groups, near duplicates, ordinary kinds, and copies in other text."""
    rng, rows, pairs = random.Random(number), [], []
    for _ in range(rng.randint(10, 25)):
        words = said(rng).split()
        other = list(words)
        other[rng.randrange(len(words))] = "zyx"
        pairs.append((len(rows), len(rows) + 1))
        rows += [{"text": " ".join(words), "labels": ["it"]}, {"text": " ".join(other), "not": ["it"]}]
    for _ in range(rng.randint(0, 30)):
        group = rng.choice([None, "a", "b", "c", "d", "e"])
        rows.append({"text": said(rng), ("labels", "not")[rng.randrange(2)]: ["it"], "group": group})
    for row in rng.sample(rows, 5):
        copy = {**row, "text": row["text"].upper() if rng.random() < 0.5 else f"{row['text']}."}
        rows.append({**copy, "group": None})
    examples, plain = read_examples(rows), ordinary_of(rng)
    data = Dataset.of_examples(examples, reader, ordinary=plain, seed=seed)
    own = np.flatnonzero(data.is_of(OWN))
    assert len(own) == len(rows) and set(data.fold[own]) <= set(range(N_FOLDS))
    for a, b in pairs:
        assert data.fold[a] == data.fold[b] and data.group[a] == data.group[b]
    near = group_texts([row["text"] for row in rows], [row.get("group") for row in rows])
    for number_of in (near, data.group[own]):
        assert all(len(set(data.fold[own][number_of == one])) == 1 for one in set(number_of))
    for k in range(len(data.kinds)):
        assert len(set(data.fold[data.is_of(ORDINARY) & (data.kind == k)])) == 1
    fold_of = {example.content: data.fold[i] for i, example in enumerate(examples.texts)}
    group_of = {example.content: data.group[i] for i, example in enumerate(examples.texts)}
    prefixes = {}
    carried = np.flatnonzero(data.is_of(CARRIED))
    assert len(carried) == len(rows)
    for i in carried.tolist():
        prefix, content = data.examples[i].text.split("\n\n")
        assert (data.fold[i], data.group[i]) == (fold_of[content], group_of[content])
        assert data.text_of(i).strip() == content  # what stands before it does not count
        assert prefixes.setdefault(data.group[i], prefix) == prefix


def test_pairs_found_across_labels_are_counted_and_one_sided_likeness_is_none(reader):
    rng, rows = random.Random(0), []
    for _ in range(12):
        words = said(rng, 10).split()
        rows += [
            {"text": " ".join(words), "labels": ["it"]},
            {"text": " ".join([*words[:3], "zyx", *words[4:]]), "not": ["it"]},
        ]
    data = Dataset.of_examples(read_examples(rows), reader)
    assert data.n_twins == 12 and len(set(data.group)) == 12
    given = [{**row, "group": f"g{i // 2}"} for i, row in enumerate(rows)]
    assert Dataset.of_examples(read_examples(given), reader).n_twins == 0
    # Texts as near whose labels are the same are not.
    same = [{"text": row["text"], "labels": ["it"]} for row in rows]
    others = [{"text": " ".join(f"{word}x" for word in said(rng, 10).split()), "not": ["it"]} for _ in range(12)]
    apart = Dataset.of_examples(read_examples([*same, *others]), reader)
    assert apart.n_twins == 0 and len(set(apart.group)) > 24


def test_several_edits_of_one_text_are_its_twins(reader):
    rng, rows = random.Random(1), []
    for _ in range(12):
        words = said(rng, 12).split()
        rows.append({"text": " ".join(words), "labels": ["it"]})
        for place, word in ((2, "zyx"), (9, "yzz")):
            edited = [*words[:place], word, *words[place + 1 :]]
            rows.append({"text": " ".join(edited), "not": ["it"]})
    data = Dataset.of_examples(read_examples(rows), reader)
    assert [len(set(data.group[i : i + 3])) for i in range(0, len(rows), 3)] == [1] * 12
    assert len(set(data.group)) == 12


def test_what_cannot_be_trained_on_is_named_before_states_are_read(reader):
    rng = random.Random(0)
    rows = [{"text": f"{said(rng)} zed", "spans": {"it": [[0, 3]]}} for _ in range(20)]
    with pytest.raises(TrainingError, match="no text is known to be without 'it' as a whole, so its threshold"):
        Dataset.of_examples(read_examples(rows), reader)
    rows = [{"text": said(rng), "labels": {"it": bool(i % 2)}, "author": "ann"} for i in range(20)]
    with pytest.raises(TrainingError, match="author=ann holds out every text"):
        Dataset.of_examples(read_examples(rows), reader, held_out={"author": ["ann"]})


# -- labels of tokens


def labelled(data, document, concept, side=1):
    """The characters of the tokens with a label."""
    p = [one.id for one in data.concepts].index(concept)
    parts = np.flatnonzero((data.document == document) & (data.known[:, p] == side))
    positions = np.sort(np.concatenate([np.zeros(0, dtype=int), *(data.positions[i] for i in parts)]))
    tokens, text = data.tokens[document], data.texts[document].text
    return "".join(text[tokens.start[i] : tokens.end[i]] for i in positions)


def chat(content, **more):
    turns = [{"role": "user", "content": " what was it? "}, {"role": "assistant", "content": content}]
    return {"messages": turns, **more}


@pytest.mark.parametrize("space", ["", " ", "\n  "])
def test_spans_of_a_chat_label_their_characters_alone(chat_reader, space):
    """Also if the template strips white space, which moves them."""
    rng, rows = random.Random(0), []
    for _ in range(9):
        head, tail = said(rng, 3), said(rng, 3)
        content = f"{space}{head} zed {tail}{space}"
        start = content.index("zed")
        rows.append(chat(content, spans=[{"turn": 1, "start": start, "end": start + 3, "concept": "it"}]))
        rows.append(chat(said(rng, 5), **{"not": ["it"]}))
    data = Dataset.of_examples(read_examples(rows), chat_reader, ordinary=ordinary_of(rng))
    n_own = len(rows)
    for i in range(0, n_own, 2):
        content = rows[i]["messages"][1]["content"].strip()
        assert labelled(data, i, "it") == "zed" and labelled(data, i, "it", 0) == content.replace("zed", "")
        assert labelled(data, i + 1, "it") == "" != labelled(data, i + 1, "it", 0)
    for i in np.flatnonzero(data.is_of(CARRIED)).tolist():
        assert labelled(data, i, "it") in ("zed", "")
        assert "zed" not in labelled(data, i, "it", 0)
    assert data.has_spans.tolist() == [True]


def test_span_in_a_turn_that_does_not_count_is_refused(chat_reader):
    rng = random.Random(0)
    both = {"it": [{"turn": 0, "start": 1, "end": 5}, {"turn": 1, "start": 0, "end": 2}]}
    rows = [chat(f"zq {said(rng, 4)}", spans=both) for _ in range(9)]
    rows += [chat(said(rng, 4), **{"not": ["it"]}) for _ in range(9)]
    with pytest.raises(TrainingError, match="example 0: the span 'what' is in turn 0, of user, which does not count"):
        Dataset.of_examples(read_examples(rows), chat_reader)
    users = Dataset.of_examples(read_examples(rows), chat_reader, roles=("user", "assistant"))
    assert {labelled(users, i, "it") for i in range(9)} == {"whatzq"}


def test_unsure_concepts_neither_train_nor_are_judged(reader):
    rng = random.Random(0)
    rows = [{"text": said(rng), "labels": ["it"]} for _ in range(10)]
    rows += [{"text": said(rng), "not": ["it"]} for _ in range(10)]
    rows += [{"text": said(rng), "labels": ["other"], "unsure": ["it"]} for _ in range(10)]
    data = Dataset.of_examples(read_examples(rows, exclusive=True), reader)
    assert data.text_known[:, 0].tolist() == [1] * 10 + [0] * 10 + [-1] * 10
    assert (data.known[np.isin(data.document, range(20, 30)), 0] == -1).all()
    without = Dataset.of_examples(
        read_examples([{key: value for key, value in row.items() if key != "unsure"} for row in rows], exclusive=True),
        reader,
    )
    assert without.text_known[:, 0].tolist() == [1] * 10 + [0] * 20


def test_pairs_of_chats_are_one_group_and_train(chat_reader):
    rng, rows = random.Random(0), []
    for _ in range(9):
        sides = [[{"role": "user", "content": said(rng)}, {"role": "assistant", "content": said(rng)}] for _ in "+-"]
        rows.append({"positive": sides[0], "negative": sides[1], "concept": "it"})
    data = Dataset.of_examples(read_examples(rows), chat_reader)
    assert data.text_known[:, 0].tolist() == [1, 0] * 9 and data.group.tolist() == [i // 2 for i in range(18)]
    assert data.n_twins == 0


def test_span_of_a_chat_that_contradicts_its_labels_is_refused(chat_reader):
    rows = [chat("zed is here", spans={"it": [{"turn": 1, "start": 0, "end": 3}]}, labels={"it": False})]
    with pytest.raises(TrainingError, match=r"example 0: characters 0 to 3 \('zed'\) are of 'it' and not of it"):
        Dataset.of_examples(read_examples(rows), chat_reader)
