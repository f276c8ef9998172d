"""Training examples: every format gives the same labels, the hierarchy adds others, errors name rows."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from probemon.errors import TrainingError
from probemon.lab.corpora.windows import WindowTokens
from probemon.lab.training.examples import Concept, Span, read_examples
from probemon.lab.training.labels import parts_of
from probemon.lab.training.texts import Text

TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "A whale did"}]
TREE = """
- {id: animal, name: animals, definition: a living thing that moves, examples: [A crab walks., An ant digs.]}
- {id: whale, parents: [animal], examples: [A whale sings.], counterexamples: [A shark bites.]}
- {id: bird, parents: [animal], examples: [A bird sings.]}
- {id: tool, examples: [A saw cuts.]}
"""


def labels(examples):
    return {example.text: dict(example.labels) for example in examples.texts}


def test_label_is_positive_negative_or_unknown():
    rows = [
        {"text": "a", "labels": ["x"], "not": ["y"], "group": 3},
        {"text": "b", "labels": {"y": True, "x": False}, "group": 3.0},
        {"text": "c", "label": "y"},
    ]
    examples = read_examples(rows)
    assert labels(examples) == {"a": {"x": True, "y": False}, "b": {"y": True, "x": False}, "c": {"y": True}}
    assert examples.known().tolist() == [[1, 0], [0, 1], [-1, 1]]
    assert [example.group for example in examples.texts] == ["3", "3", None]
    assert labels(read_examples(rows, exclusive=True))["c"] == {"y": True, "x": False}


def test_present_and_absent_are_other_names_of_labels_and_not():
    rows = [{"text": "a", "labels": ["x"], "not": ["y"]}, {"text": "b", "labels": {"y": True}}]
    other = [{"text": "a", "present": ["x"], "absent": ["y"]}, {"text": "b", "present": {"y": True}}]
    assert read_examples(other) == read_examples(rows)


def test_unsure_concepts_and_what_is_below_them_stay_unknown(tmp_path):
    (tmp_path / "tree.yaml").write_text(TREE)
    own = read_examples(tmp_path / "tree.yaml")
    row = {"text": "b", "labels": ["tool"], "unsure": ["animal"]}
    (example,) = read_examples([row], like=own, exclusive=True).texts
    assert example.labels == {"tool": True} and set(example.unsure) == {"animal", "whale", "bird"}
    spans = [{"text": "whale crab", "spans": {"whale": [[0, 5]]}, "unsure": ["tool"], "not": ["bird"]}]
    known = read_examples(spans, like=own)
    assert known.known().tolist() == [[1, 1, 0, -1]]


def test_labelled_concept_below_an_unsure_one_is_refused(tmp_path):
    (tmp_path / "tree.yaml").write_text(TREE)
    own = read_examples(tmp_path / "tree.yaml")
    with pytest.raises(TrainingError, match="'whale', which is below 'animal', is in 'unsure' and is labelled"):
        read_examples([{"text": "b", "labels": ["whale"], "unsure": ["animal"]}], like=own)


def test_cells_of_present_absent_and_unsure_are_split_like_labels(tmp_path):
    (tmp_path / "rows.csv").write_text("text,present,absent,unsure\na,x;y,z,\nb,,x; y,z\n")
    first, second = read_examples(tmp_path / "rows.csv").texts
    assert first.labels == {"x": True, "y": True, "z": False}
    assert second.labels == {"x": False, "y": False} and second.unsure == ("z",)


def test_pair_of_chats_has_tools_and_no_unsure_concepts():
    tools = [{"type": "function", "function": {"name": "f"}}]
    sides = {"positive": TURNS, "negative": [{**turn, "content": "other"} for turn in TURNS]}
    found = read_examples([{**sides, "concept": "x", "tools": tools}]).texts
    assert [example.tools for example in found] == [tuple(tools)] * 2
    with pytest.raises(TrainingError, match="'positive' and 'unsure'"):
        read_examples([{**sides, "concept": "x", "unsure": ["x"]}])


def test_other_fields_of_rows_are_kept_to_be_held_out():
    rows = [
        {"text": "a", "labels": ["x"], "author": "Ann", "year": 1999.0, "group": "g"},
        {"positive": "p", "negative": "n", "concept": "x", "author": None},
        {"messages": TURNS, "labels": ["x"], "tools": [], "author": "Bob"},
    ]
    found = read_examples(rows).texts
    assert found[0].fields == {"author": "Ann", "year": "1999"} and found[0].value_of("group") == "g"
    assert [example.value_of("author") for example in found] == ["Ann", None, None, "Bob"]


def test_spans_given_by_concept_equal_a_list_of_them():
    said = "A whale and a crab"
    by_concept = {"whale": [[2, 7]], "crab": [[14, 18], {"start": 2, "end": 7, "is": False}]}
    listed = [
        {"start": 2, "end": 7, "concept": "whale"},
        {"start": 14, "end": 18, "concept": "crab"},
        {"start": 2, "end": 7, "concept": "crab", "is": False},
    ]
    assert read_examples([{"text": said, "spans": by_concept}]) == read_examples([{"text": said, "spans": listed}])
    in_turn = {"whale": [{"turn": 1, "start": 2, "end": 7}]}
    (chat,) = read_examples([{"messages": TURNS, "spans": in_turn}]).texts
    assert chat.spans == (Span(2, 7, "whale", turn=1),) and chat.said_in(chat.spans[0]) == "whale"


def test_sides_of_a_pair_may_be_chats():
    other = [TURNS[0], {"role": "assistant", "content": "A shark did"}]
    for_it, against = read_examples([{"positive": TURNS, "negative": other, "concept": "whale"}]).texts
    assert [turn["content"] for turn in against.messages] == ["Why?", "A shark did"]
    assert (for_it.labels, against.labels) == ({"whale": True}, {"whale": False})
    assert for_it.group == against.group is not None
    with pytest.raises(TrainingError, match="a message has a 'role'"):
        read_examples([{"positive": TURNS, "negative": [{"role": "judge", "content": "a"}], "concept": "whale"}])


def test_files_of_every_format_give_the_same_examples(tmp_path):
    rows = [
        {"text": "one, two", "labels": ["x", "y"], "not": [], "group": "g"},
        {"text": "three", "labels": [], "not": ["x"], "group": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.csv").write_text('text,labels,not,group\n"one, two",x;y,,g\nthree,,x,\n')
    (tmp_path / "b.csv").write_text('text,label,not,group\n"one, two",x;y,,g\nthree,,x,\n')
    cells = [{"text": "one, two", "labels": "x; y", "not": "", "group": "g"}, {"text": "three", "not": "x"}]
    pa.parquet.write_table(pa.Table.from_pylist(cells), tmp_path / "b.parquet")
    (tmp_path / "a.tsv").write_text("text\tlabels\tnot\tgroup\none, two\tx;y\t\tg\nthree\t\tx\t\n")
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.jsonl").write_bytes(lines.decode().encode("utf-16"))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    pa.feather.write_feather(pa.Table.from_pylist(cells), tmp_path / "a.feather")
    (tmp_path / "c.csv").write_text('text;label;not;group\n"one, two";"x;y";;g\nthree;;x;\n')
    wanted = labels(read_examples(rows))
    others = (
        "a.csv",
        "a.tsv",
        "a.parquet",
        "b.csv",
        "b.parquet",
        "a.jsonl.gz",
        "b.jsonl",
        "a.json",
        "a.feather",
        "c.csv",
    )
    for name in ("a.jsonl", *others):
        examples = read_examples(tmp_path / name)
        assert labels(examples) == wanted, name
        assert [example.group for example in examples.texts] == ["g", None], name


def test_both_sides_of_a_pair_are_one_group():
    for_it, against = read_examples([{"positive": "p", "negative": "n", "concept": "x"}]).texts
    assert (for_it.labels, against.labels) == ({"x": True}, {"x": False})
    assert for_it.group == against.group is not None
    # Rows of two files may be called the same.
    other = read_examples([{"positive": "q", "negative": "m", "concept": "x"}]).texts[0]
    assert other.where == for_it.where and other.group != for_it.group


def test_spans_exclude_surrounding_spaces():
    row = {"text": "the whale sings", "spans": [{"start": 3, "end": 10, "concept": "whale"}]}
    assert read_examples([row]).texts[0].spans == (Span(4, 9, "whale"),)


def test_rows_can_use_the_hierarchy_of_other_examples(tmp_path):
    (tmp_path / "tree.yaml").write_text(TREE)
    own = read_examples(tmp_path / "tree.yaml")
    rows = [{"text": "b", "labels": ["whale"]}]
    assert labels(read_examples(rows, like=own)) == {"b": {"whale": True, "animal": True}}
    exclusive = {"whale": True, "animal": True, "bird": False, "tool": False}
    assert labels(read_examples(rows, like=own, exclusive=True)) == {"b": exclusive}
    assert labels(read_examples(tmp_path / "tree.yaml", like=own)) == labels(own)


def test_spans_count_characters_and_include_ancestor_concepts(tmp_path):
    (tmp_path / "tree.yaml").write_text(TREE)
    row = {"text": "A whale, a saw.", "spans": [{"start": 2, "end": 7, "concept": "whale"}]}
    examples = read_examples([tmp_path / "tree.yaml", _written(tmp_path / "s.jsonl", row)])
    assert examples.texts[-1].spans == (Span(2, 7, "whale"), Span(2, 7, "animal"))
    assert examples.texts[-1].rest == "negative"


@pytest.mark.parametrize(
    ("spans", "rest", "animal", "whale", "bird"),
    [
        # "whale crab saw": outside of a whale's span nothing is said of animals, and a crab is one.
        ([("whale", "whale")], "negative", [1, -1, -1], [1, 0, 0], [-1, -1, -1]),
        ([("whale", "whale")], "unknown", [1, -1, -1], [1, -1, -1], [-1, -1, -1]),
        # An animal may be a whale, and what is none is no whale.
        ([("crab", "animal")], "negative", [0, 1, 0], [0, -1, 0], [0, -1, 0]),
        ([("whale", "whale"), ("crab", "animal")], "negative", [1, 1, 0], [1, 0, 0], [-1, -1, 0]),
    ],
)
def test_concept_and_its_descendants_are_absent_outside_spans(tmp_path, spans, rest, animal, whale, bird):
    (tmp_path / "tree.yaml").write_text(TREE)
    said = "whale crab saw"
    given = [{"start": (at := said.index(word)), "end": at + len(word), "concept": concept} for word, concept in spans]
    row = _written(tmp_path / "s.jsonl", {"text": said, "spans": given, "rest": rest})
    examples = read_examples([tmp_path / "tree.yaml", row])
    start, end = np.array([0, 6, 11]), np.array([5, 10, 14])
    tokens = WindowTokens(np.arange(3), start, end, ())
    place = {id: p for p, id in enumerate(examples.concepts)}
    known = np.full((3, len(place)), -1)
    for part in parts_of(examples.texts[-1], Text("", said), tokens, place):
        known[part.tokens] = part.known
    assert [known[:, place[id]].tolist() for id in ("animal", "whale", "bird")] == [animal, whale, bird]
    assert (known[:, place["tool"]] == -1).all()


def test_texts_are_read_from_the_named_field():
    row = {"text": "a title", "body": "a whale", "labels": ["x"]}
    assert [example.text for example in read_examples([row], text_field="body").texts] == ["a whale"]
    with pytest.raises(TrainingError, match=r"example 1 has no 'body', the field of the text"):
        read_examples([row, {"text": "b", "body": None, "labels": ["x"]}], text_field="body")


def test_positive_concept_implies_ancestors_and_excludes_siblings(tmp_path):
    (tmp_path / "tree.yaml").write_text(TREE)
    examples = read_examples(tmp_path / "tree.yaml")
    assert examples.concepts["animal"] == Concept("animal", "animals", (), "a living thing that moves")
    assert examples.above["whale"] == {"animal"}
    found = labels(examples)
    assert found["A whale sings."] == {"whale": True, "animal": True, "bird": False, "tool": False}
    assert found["A saw cuts."] == {"tool": True, "animal": False, "whale": False, "bird": False}
    # An animal may be a whale: nothing is known of that.
    assert found["A crab walks."] == {"animal": True, "tool": False}
    assert found["A shark bites."] == {"whale": False}


def _written(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "a", "labels": ["x"]}, {"text": "b"}], "example 1: nothing is known of this text"),
        ([{"text": "a", "labels": ["x"], "not": ["x"]}], "'x' is in 'labels' and in 'not'"),
        ([{"text": " ", "labels": ["x"]}], "example 0: 'text' is ' '"),
        ([{"body": "a", "labels": ["x"]}], "example 0 has 'body', 'labels'"),
        ([{"text": "abc", "spans": [{"start": 2, "end": 9, "concept": "x"}]}], "from 2 to 9 of 3 characters"),
        ([{"text": "abc", "spans": [{"start": True, "end": 2.5, "concept": "x"}]}], "a span is from True to 2.5"),
        ([{"messages": [{"role": "judge", "content": "a"}], "labels": ["x"]}], "a message has a 'role'"),
        ([["a", "x"]], "example 0 is list"),
        ([{"text": "a", "labels": [3]}], "'labels' holds 3"),
        ([{"text": "a", "label": 1}], "example 0: '1' names no concept"),
        ([{"text": "a", "labels": "x;y"}], r"example 0: 'labels' is 'x;y': give a list, \[...\], of concepts"),
        ([{"text": "a", "labels": ["x"], "not": "y;z"}], "example 0: 'not' is 'y;z': give a list"),
        ([{"text": "a", "label": "true"}], "example 0: 'true' names no concept"),
        ([{"text": "a", "labels": ["x"], "span": []}], "has 'span', which is not a field: did you mean 'spans'?"),
        ([{"text": "a", "concepts": ["x"]}], "did you mean 'labels'?"),
        ([{"text": "a", "labels": {"x": "yes"}}], "neither true nor false"),
        ([{"text": "a", "Labels": ["x"]}], "has 'Labels', which is not a field: write 'labels'"),
        ([{"text": "a", "label": "x", "labels": ["y"]}], "has 'label' and 'labels'"),
        ([{"text": "a", "labels": {"x": True}, "not": ["y"]}], "so leave 'not' out"),
        ([{"text": "a", "concept": "x"}], "has 'concept', which is for pairs"),
        ([{"positive": "p", "negative": "n", "concept": "x", "not": ["y"]}], "has 'positive' and 'not'"),
        ([{"positive": "p q", "negative": "p  q", "concept": "x"}], "both texts of the pair are the same"),
        ([{"messages": [{"role": "user", "content": "a"}], "text": "b", "labels": ["x"]}], "has 'messages' and 'text'"),
        (
            [{"messages": [{"role": "user", "content": "a"}], "spans": [{"start": 0, "end": 1, "concept": "x"}]}],
            "example 0: a span of a chat has a 'turn' from 0 to 0, the number of its message, and not None",
        ),
        (
            [{"messages": TURNS, "spans": [{"turn": 2, "start": 0, "end": 1, "concept": "x"}]}],
            "a span of a chat has a 'turn' from 0 to 1, the number of its message, and not 2",
        ),
        ([{"messages": TURNS, "spans": {"x": [{"turn": 1, "start": 2, "end": 99}]}}], "from 2 to 99 of 11 characters"),
        ([{"messages": TURNS, "spans": {"x": [[0, 1]]}}], "has a 'turn' from 0 to 1"),
        ([{"text": "a b", "spans": {"x": [[0, 1, 2]]}}], r"a span of 'x' is \[0, 1, 2\]: give \[start, end\]"),
        ([{"text": "a b", "labels": ["x"], "unsure": ["x"]}], "'x' is in 'unsure' and is labelled: give one of them"),
        ([{"text": "a b", "spans": {"x": [[0, 1]]}, "unsure": ["x"]}], "'x' is in 'unsure' and is labelled"),
        ([{"text": "a b", "labels": ["x"], "present": ["y"]}], "has 'labels' and 'present'"),
        ([{"text": "a b", "present": ["x"], "absent": ["x"]}], "'x' is in 'labels' and in 'not'"),
        ([{"text": "a b", "not": ["x"], "absent": ["y"]}], "has 'not' and 'absent'"),
        ([{"positive": TURNS, "negative": TURNS, "concept": "x"}], "both texts of the pair are the same"),
        ([{"positive": "p", "negative": "n", "concept": "x", "labels": ["y"]}], "has 'positive' and 'labels'"),
        ([{"text": "a b", "spans": [{"start": 1, "end": 2, "concept": "x"}]}], "holds nothing but space"),
        ([{"id": "a", "examples": ["t"], "counterexamples": ["t "]}], "counterexamples 1 and .* are one text, of 'a'"),
        ([{"id": "a", "examples": ["t"]}, {"id": "b", "examples": ["t"]}], "are one text, of 'b' and not of it"),
        ([], "there is no example"),
        ([{"id": "a", "definition": "x", "parents": ["b"], "examples": ["t"]}], "has the parent 'b'"),
    ],
)
def test_invalid_row_is_named(rows, said):
    with pytest.raises(TrainingError, match=said.replace("(", r"\(")):
        read_examples(rows)


@pytest.mark.parametrize("row", [{"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_rows_without_any_concept_are_refused(row):
    for exclusive in (False, True):
        with pytest.raises(TrainingError, match=r"^no row names a concept \(10 rows, the first is example 0\)"):
            read_examples([row] * 10, exclusive=exclusive)
    assert read_examples([row], labelled=False).concepts == {}


def test_missing_values_are_neither_labels_nor_groups():
    """Nulls, empty cells and no numbers are no labels, and texts without a group are not one group."""
    nan = float("nan")
    rows = [
        {"text": "a", "labels": None, "not": [" x"], "group": ""},
        {"text": "b", "labels": ["x "], "not": nan, "group": nan},
        {"text": "c", "labels": "x", "group": 0, "source": "web"},
    ]
    found = read_examples(rows).texts
    assert [dict(example.labels) for example in found] == [{"x": False}, {"x": True}, {"x": True}]
    assert [example.group for example in found] == [None, None, "0"]


def test_cycles_and_contradictions_are_refused():
    circle = [
        {"id": "a", "parents": ["b"], "examples": ["s"]},
        {"id": "b", "parents": ["a"], "examples": ["t"]},
    ]
    with pytest.raises(TrainingError, match="parents go in a circle: a < b < a"):
        read_examples(circle)
    longer = [{"id": a, "parents": [b], "examples": [a]} for a, b in ("dc", "ca", "ab", "bc")]
    with pytest.raises(TrainingError, match=r"parents go in a circle: a < b < c < a$"):
        read_examples(longer)
    tree = [{"id": "animal", "examples": ["s"]}, {"id": "whale", "parents": ["animal"], "examples": ["t"]}]
    with pytest.raises(TrainingError, match="'animal' is there and absent at once"):
        read_examples([*tree, {"text": "u", "labels": ["whale"], "not": ["animal"]}])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "a"\n', "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is list"),
        (
            "a.jsonl",
            '{"text": "a \\ud83d", "labels": ["x"]}\n',
            r"^a.jsonl, line 1 has \\ud83d, half of a surrogate pair, which is not a character: write both halves,",
        ),
        ("a.jsonl", '{"text": "a", "text": "b"}\n', "^a.jsonl, line 1: 'text' appears twice in one object"),
        (
            "a.jsonl",
            '{"messages": "[{\\"role\\": \\"user\\"}]", "labels": ["x"]}\n',
            "line 1: 'messages' is a text: give a list",
        ),
        ("a.jsonl", "[" * 100_000, "^a.jsonl, line 1 is nested too deeply"),
        ("a.csv", "text,labels\na,b,c\n", "row 1 has 3 cells, and the header has 2"),
        ("a.csv", 'text,labels\n"a,x\nb,y\n', r"a.csv, row 1 is cut \(unexpected end of data\)"),
        ("a.parquet", "PAR1 and more PAR1", "a.parquet is not parquet"),
        ("a.yaml", "- [", "is not YAML"),
        ("a.yaml", "text: 3", "give a list of concepts"),
        ("a.yaml", "- {name: a}", "concept 1 has no 'id'"),
        ("a.yaml", "- {id: a, colour: red}", "has 'colour'"),
        ("a.yaml", "- {id: a, examples: [2026-13-45]}", "is not YAML: month must be in 1..12"),
        ("a.yaml", "[" * 5000, "is nested too deeply"),
        ("a.yaml", "- id: a\n  examples: [b]\n  examples: [c]\n", "^a.yaml, line 3: 'examples' is in line 2"),
        ("a.yaml", "- &a {id: a, examples: [*a]}", "'examples' holds"),
        ("a.yaml", '- {id: "a\\x1b[2J", examples: [b]}', "a text without control characters"),
        ("a.yaml", "- {id: a, examples: [b]}\n- {id: c, parents: [a, a], examples: [d]}", "parent 'a' twice"),
        ("a.jsonl", '{"text": "a", "labels": ["b\\u0007"]}', "a text without control characters"),
        ("a.docx", "", "its kind is unknown"),
        ("a.json", '[\n  {"text": "b"}, 3\n]\n', "^a.json, row 2 is int, not an object"),
        ("a.jsonl.gz", b"plain", "^a.jsonl.gz cannot be decompressed"),
        ("a.csv", b"PK\x03\x04 and more", "^a.csv is a zip archive"),
        ("a.jsonl.gz", gzip.compress(b"%PDF-1.7", mtime=0), "^a.jsonl.gz is a PDF"),
        ("a.jsonl", b"\xff\x00", "is not UTF-8"),
    ],
)
def test_invalid_file_is_named(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainingError, match=said):
        read_examples(path)
    with pytest.raises(TrainingError, match=r"no such file.*did you mean"):
        read_examples(tmp_path / f"{name[:-1]}")


def test_dangling_link_is_reported(tmp_path):
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    for name in ("loop.jsonl", "gone.jsonl"):
        with pytest.raises(TrainingError, match=f"{name} is a link that leads nowhere: mend it, or give the file"):
            read_examples(tmp_path / name)


def test_long_csv_cell_is_read(tmp_path):
    (tmp_path / "a.csv").write_text(f"text,labels\n{'a' * 200_000},x\n")
    assert len(read_examples(tmp_path / "a.csv").texts[0].text) == 200_000


def test_duplicate_columns_and_numeric_labels_are_refused(tmp_path):
    for name, content, said in (
        ("twice.csv", "text,text,label\na,b,x\n", "twice.csv has two columns 'text': rename one"),
        ("answers.csv", "text,label\na,1\nb,0\n", "answers.csv, row 1: '1' names no concept"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(TrainingError, match=said):
            read_examples(tmp_path / name)


def test_long_chain_of_parents_is_accepted():
    chain = [{"id": f"c{i}", "parents": [f"c{i + 1}"][: i < 1200], "examples": [f"t {i}"]} for i in range(1201)]
    found = read_examples(chain)
    assert len(found.above["c0"]) == 1200 and list(found.above) == [f"c{i}" for i in range(1201)]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"when": pa.array([10**15], pa.timestamp("s"))}, "^odd.parquet holds values that cannot be read"),
        (
            {"when": pa.array([1], pa.timestamp("ns", tz="Mars/Phobos"))},
            "^odd.parquet holds values that cannot be read",
        ),
        ({"labels": pa.array([[("x", True)]], pa.map_(pa.string(), pa.bool_()))}, "row 1: 'labels' holds "),
        ({"labels": pa.array([b"\xff"])}, "row 1: 'labels' is bytes"),
    ],
)
def test_unsupported_column_types_are_refused(tmp_path, columns, said):
    whole = {"text": pa.array(["a"]), "label": pa.array(["x"])} | columns
    pa.parquet.write_table(pa.table(whole).drop(["label"][: "labels" in columns]), tmp_path / "odd.parquet")
    with pytest.raises(TrainingError, match=said):
        read_examples(tmp_path / "odd.parquet")


def test_parquet_table_with_duplicate_columns_is_refused(tmp_path):
    twice = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["text", "text", "label"])
    pa.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(TrainingError, match=r"twice\.parquet has two columns 'text': rename one"):
        read_examples(tmp_path / "twice.parquet")


def test_yaml_does_not_construct_objects(tmp_path):
    (tmp_path / "a.yaml").write_text("- !!python/object/apply:os.system [exit]\n")
    with pytest.raises(TrainingError, match="is not YAML"):
        read_examples(tmp_path / "a.yaml")


def test_encoding_and_form_of_chats_are_given(tmp_path):
    (tmp_path / "a.csv").write_bytes("text,label\nÄther,x\n".encode("latin-1"))
    with pytest.raises(TrainingError, match=r"is not UTF-8 at byte .*: give --encoding latin-1"):
        read_examples(tmp_path / "a.csv")
    assert labels(read_examples(tmp_path / "a.csv", encoding="latin-1")) == {"Äther": {"x": True}}
    row = {"text": "why", "instruction": "Say.", "output": "A whale.", "label": "x"}
    assert read_examples([row]).texts[0].text == "why"
    [chat] = read_examples([row], shape="Alpaca").texts
    assert [turn["content"] for turn in chat.messages] == ["Say.", "A whale."]
    with pytest.raises(TrainingError, match="did you mean 'Alpaca'"):
        read_examples([row], shape="alpaca")


def test_span_of_a_converted_chat_is_of_the_message_that_it_numbers():
    turns = [{"role": "user", "content": "a whale"}, {"role": "assistant", "content": "Ships"}]
    row = {"system": "s", "messages": turns, "spans": [{"turn": 1, "start": 0, "end": 5, "concept": "ship"}]}
    [example] = read_examples([row]).texts
    [span] = example.spans
    assert (span.turn, example.said_in(span)) == (2, "Ships")
    result = {"role": "user", "content": [{"type": "tool_result", "content": "b"}, {"type": "text", "text": "Ships"}]}
    several = {**row, "messages": [turns[0], result]}
    with pytest.raises(TrainingError, match="message 1 is 2 turns in OpenAI's form"):
        read_examples([several])
    with pytest.raises(TrainingError, match="has a 'turn' from 0 to"):
        read_examples([{**row, "spans": [{"turn": 2, "start": 0, "end": 1, "concept": "ship"}]}])


def test_parquet_of_datasets_has_the_names_of_its_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["ham", "spam"])}
    )
    rows = {"text": ["a", "b", "c"], "label": [0, 1, -1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    assert labels(read_examples(tmp_path / "a.parquet", exclusive=True)) == {
        "a": {"ham": True, "spam": False},
        "b": {"spam": True, "ham": False},
        "c": {"ham": False, "spam": False},
    }


def test_audio_in_a_message_is_refused():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "audio": {"id": "x"}}]
    with pytest.raises(TrainingError, match=r"messages\[1\] has audio; texts only"):
        read_examples([{"messages": turns, "labels": ["x"]}])
