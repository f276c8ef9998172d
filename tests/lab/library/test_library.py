"""The shipped library keeps its rules, and its rows become examples with the labels that readers gave."""

import json
from collections import Counter

import pytest
import yaml

from probemon.errors import ConfigError, TrainingError
from probemon.lab.library.fit import examples_of
from probemon.lab.library.library import TESTS, TEXTS, Library
from probemon.lab.library.lint import lint, problems, said
from probemon.util.files import sha256


@pytest.fixture(scope="module")
def library():
    return Library.open()


def test_library_has_the_concepts_and_authors_that_it_claims(library):
    domains = Counter(concept.domain for concept in library.concepts.values())
    assert len(library.concepts) >= 98 and set(domains) == {
        "safety", "security", "privacy", "honesty", "behaviour", "emotion", "topic", "kind", "language", "code",
    }  # fmt: skip
    for id, concept in library.concepts.items():
        pairs = Counter()
        for part in (TEXTS, TESTS):
            rows = list(library.raw(part, id))
            for author in ("a1", "a2"):
                groups = {row["group"] for row in rows if row["author"] == author}
                pairs[part, author] = len(groups)
            assert all(row["author_kind"] and row["genre"] and row["lang"] for row in rows)
        least = {} if concept.by_source else {(TEXTS, "a1"): 47, (TEXTS, "a2"): 14, (TESTS, "a2"): 25}
        assert all(pairs[key] >= n for key, n in least.items()), (id, pairs)
        assert pairs[TESTS, "a1"] == 0  # whoever wrote what trains wrote no test


def test_library_has_none_of_what_must_not_be_in_it(library):
    assert problems(library) == []


def test_texts_of_tests_are_found_where_they_train(library, tmp_path):
    """With a test among what trains, in other case and marks; a valid card number; a domain that may be real."""
    copy = tmp_path / "library"
    for part in (TEXTS, TESTS):
        (copy / part).mkdir(parents=True)
    concept = next(iter(library.concepts.values()))
    (copy / "concepts.yaml").write_text(yaml.safe_dump([{**vars(concept), "read": list(concept.read), "never": []}]))
    (copy / "library.yaml").write_text(yaml.safe_dump({"name": "one", "version": 1, "sha256": {}}))
    test = next(row for row in library.raw(TESTS, concept.id) if len(said(row).split()) > 12 and "text" in row)
    row = {**test, "id": f"{concept.id}-a1-001p", "group": "x", "text": test["text"].upper() + "!"}
    bad = {**row, "id": f"{concept.id}-a1-002p", "text": "Pay 4111 1111 1111 1111 at https://www.bank.com today"}
    bad["spans"] = {concept.id: [{"start": 0, "end": 3}]}
    named = {key: [id for id in test[key] if id == concept.id] for key in ("present", "absent", "unsure")}
    for part, rows in ((TEXTS, [row, bad]), (TESTS, [test])):
        lines = [json.dumps({**one, **named}) + "\n" for one in rows]
        (copy / part / f"{concept.id}.jsonl").write_text("".join(lines))
    found = problems(Library.open(copy))
    assert len(found) == 3 and "near copy of" in found[2]
    assert "www.bank.com may be real" in " ".join(found) or "bank.com may be real" in " ".join(found)
    assert any("4111 1111 1111 1111 is a valid card number" in one for one in found)


def test_changed_file_is_refused(library, tmp_path):
    concept = next(iter(library.concepts))
    (tmp_path / TEXTS).mkdir()
    file = tmp_path / TEXTS / f"{concept}.jsonl"
    file.write_text("{}\n")
    (tmp_path / "concepts.yaml").write_text((library.folder / "concepts.yaml").read_text())
    about = {"name": "one", "version": 1, "sha256": {f"{TEXTS}/{concept}.jsonl": sha256(file)}}
    (tmp_path / "library.yaml").write_text(yaml.safe_dump(about))
    assert Library.open(tmp_path).about["version"] == 1
    file.write_text("{} \n")
    with pytest.raises(ConfigError, match=r"is not the file that library\.yaml names"):
        Library.open(tmp_path)
    with pytest.raises(ConfigError, match="is not a library"):
        Library.open(tmp_path / "none")


def test_library_of_ones_own_may_lack_tests_and_read_ordinary_text(library, tmp_path):
    concept = library.concepts["threat"]
    (tmp_path / TEXTS).mkdir()
    (tmp_path / TEXTS / "threat.jsonl").write_bytes((library.folder / TEXTS / "threat.jsonl").read_bytes())
    (tmp_path / "library.yaml").write_text(yaml.safe_dump({"name": "one", "version": 1, "sha256": {}}))
    lines = [{**vars(concept), "read": list(concept.read), "never": []}]
    (tmp_path / "concepts.yaml").write_text(yaml.safe_dump(lines))
    own = Library.open(tmp_path)
    assert own.tests(["threat"]) == [] and own.of_ordinary == {} and problems(own) != []
    assert all("is not in the library" in one for one in problems(own))
    (tmp_path / TEXTS / "threat.jsonl").unlink()
    with pytest.raises(ConfigError, match="has no texts of 'threat'"):
        own.rows(["threat"])


def test_labels_are_those_of_the_row_and_what_is_never_there(library):
    ids = ["threat", "anger", "joy", "german"]
    row = {
        "id": "threat-a1-001p", "group": "g", "text": "You will pay.", "spans": {"threat": [{"start": 0, "end": 13}]},
        "present": ["threat", "anger"], "absent": ["joy", "grief"], "unsure": [], "genre": "mail", "lang": "en",
        "author": "a1", "author_kind": "x",
    }  # fmt: skip
    found = library.labels_of(row, ids)
    assert found["spans"] == row["spans"]
    assert found["absent"] == ["joy", "german"]  # an English text is not German
    assert found["unsure"] == ["anger"]  # there, but not marked: it neither trains nor tests
    assert library.labels_of({**row, "lang": "de"}, ids)["absent"] == ["joy"]


def test_examples_know_both_sides_of_every_concept(library):
    ids = library.chosen(["honesty", "topic/science"])
    examples = examples_of(library, ids)
    known = examples.known()
    assert list(examples.concepts) == ids
    assert ((known == 1).sum(0) >= 28).all() and ((known == 0).sum(0) >= 40).all()
    english = examples_of(library, ids, ["en"])
    assert len(english.texts) < len(examples.texts)
    few = Counter(row["author"] for row in library.rows(["refusal"], pairs=10))
    assert few == {"a1": 20, "a2": 20}  # both sides of ten pairs
    added = examples_of(library, ids, add=[{"text": "I cannot know that.", "labels": ["not_knowing"]}])
    assert added.texts[-1].fields["author"] == "yours"


def test_names_of_concepts_families_and_domains(library):
    assert library.chosen(["safety/violence"]) == library.chosen(["safety/violence/"])
    assert library.chosen(["threat"]) == library.chosen(["safety/violence/threat"]) == ["threat"]
    assert set(library.chosen(["topic"])) == {id for id, one in library.concepts.items() if one.path[:6] == "topic/"}
    with pytest.raises(ConfigError, match="no concept of the library is called 'deception'"):
        library.chosen(["deception"])


def test_lint_names_what_gives_a_side_away(library):
    rows = []
    for i in range(40):
        for side, text in (("p", f"please pay the bill number {i} at once"), ("n", f"the bill number {i} was paid")):
            own = {"present": ["x"], "absent": []} if side == "p" else {"present": [], "absent": ["x"]}
            spans = {"spans": {"x": [{"start": 0, "end": 6}]}} if side == "p" else {}
            row = {"id": f"x-a1-{i:03}{side}", "group": f"x-{i}", "text": text, "unsure": [], "genre": "mail"}
            rows.append({**row, **own, **spans, "lang": "en", "author": "a1", "author_kind": "x"})
    found = {finding.check: finding for finding in lint(rows, "x")}
    assert not found["words tell the sides apart"].holds and not found["words of one side"].holds
    assert "please 40/0" in found["words of one side"].found
    assert found["marks on texts with it, and on no others"].holds
    with pytest.raises(TrainingError, match="of 'y' there is no text with it"):
        lint(rows, "y")
    with pytest.raises(TrainingError, match="row 2 has no 'absent': give id, group"):
        lint([rows[0], {key: value for key, value in rows[1].items() if key != "absent"}], "x")
    del rows[0]["spans"]
    again = {finding.check: finding for finding in lint(rows, "x")}
    assert again["marks on texts with it, and on no others"].found == "not x-a1-000p"
    fair = lint(list(library.raw(TEXTS, "threat")), "threat")
    assert next(one for one in fair if one.check.startswith("words tell")).holds
