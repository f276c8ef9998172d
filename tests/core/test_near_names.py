"""Suggestions for a name that a pack does not have."""

import re

import pytest

from probemon import ProbePack
from probemon.core.concept_names import Names
from probemon.errors import UnknownConcept
from probemon.packs.group import PackGroup
from probemon.util.near_names import NearNames

CONCEPTS = [
    {"id": "animal.n.01", "name": "animal", "words": ["puppy", "guide dog"], "definition": "a living being"},
    {"id": "whale.n.02", "name": "whale", "words": ["dolphin", "Orca"], "lemmas": ["whale", "sea_giant"]},
    {"id": "act.n.01", "name": "war crime (act)", "definition": "a crime in war"},
    {"id": "crime.n.01", "name": "crime", "definition": "an act that the law, any written law, forbids", "lemmas": [7]},
    {"id": "court.n.01", "name": "court", "definition": "it says what the law is", "words": "not a list"},
    {"id": "odd.n.01", "name": "odd", "definition": ["no", "text"], "words": [None, "wave-length"]},
]
PATHS = [["animal"], ["animal", "whale"], ["war crime (act)"], ["crime"], ["court"], ["odd"]]
NEAR = NearNames(CONCEPTS, lambda probe: PATHS[probe])


@pytest.mark.parametrize(
    "wanted, probes",
    [
        ("Dolphins", [1]),  # listed under it
        ("sea giant", [1]),  # its synonym
        ("guide dogs", [0]),
        ("shepherd puppy", [0]),  # by its last word
        ("wars", [2]),  # in its name
        ("war-crime", [2]),  # its name but for marks and brackets
        ("crimes", [3]),  # by name, before that of which it is a part
        ("wavelength", []),
        ("wave length", [5]),
        ("law", []),  # too short a word to look for in definitions
        ("the law", [4, 3]),  # in two definitions, the shorter first
        ("forbids", [3]),
        ("forbid", []),  # a part of a word is none
        ("", []),
        ("(act)", []),
        ("zebra", []),
    ],
)
def test_meaning_is_searched_in_names_synonyms_words_then_definitions(wanted, probes):
    assert NEAR.by_meaning(wanted) == probes


@pytest.mark.parametrize(
    "wanted, end",
    [
        ("dolphin", ": the nearest in meaning is 'whale' (animal > whale)"),
        ("the law", ": the nearest in meaning are 'court' (court); 'crime' (crime)"),
        ("whael", ", did you mean 'whale'?"),
        ("Whale", ", did you mean 'whale'?"),
        ("animals:whales", ", did you mean 'whale'?"),
        ("court.n.02", ", did you mean 'court.n.01'?"),
        ("dolfin", ""),
        ("dolphn", ", did you mean 'dolphin', which is something under 'whale' (animal > whale)?"),
        ("", ""),
    ],
)
def test_suggestion_says_whether_meaning_or_spelling_is_near(wanted, end):
    assert NEAR.suggestion(wanted) == (end or ": no concept has a similar name; probemon concepts lists all of them")


def test_nearest_meaning_comes_before_nearest_spelling():
    near = NearNames([*CONCEPTS, {"id": "injury", "name": "injury", "words": ["whole", "wale"]}], lambda probe: ["x"])
    assert near.suggestion("wale") == ": the nearest in meaning is 'injury' (x), and in spelling 'whale'"


def test_find_suggests_for_names_and_patterns():
    names = Names("toy", CONCEPTS, lambda probe: PATHS[probe])
    with pytest.raises(UnknownConcept, match=r"^toy has no concept 'orca': the nearest in meaning is 'whale' \("):
        names.find("orca")
    with pytest.raises(UnknownConcept, match=r"^no concept of toy matches 'dolphin\*', .* is 'whale' \("):
        names.find_all("dolphin*")
    with pytest.raises(UnknownConcept, match=r"matches 'dolphin', which is held against whole names and whole ids$"):
        names.find_all(re.compile("dolphin"))


@pytest.mark.parametrize("n", [2, 5, 6])
def test_ambiguous_name_lists_five_concepts_with_their_meaning(n):
    concepts = [{"id": f"bank.{i}", "name": f"bank (n{i})", "definition": f"meaning {i}"} for i in range(n)]
    concepts[1] |= {"definition": 7}
    others = [{"id": "banks", "name": "banks (x)"}, {"id": "riverbank", "name": "bank of (a) river"}]
    names = Names("toy", [*concepts, *others], lambda probe: ["top", f"bank (n{probe})"])
    with pytest.raises(UnknownConcept) as caught:
        names.find("bank")
    listed = [f"'bank (n{i})' ({'top > bank (n1)' if i == 1 else f'meaning {i}'})" for i in range(min(n, 5))]
    number, more = {2: ("two", ""), 5: ("five", ""), 6: ("six", " and 1 more")}[n]
    assert str(caught.value) == f"'bank' is {number} concepts of toy: {', '.join(listed)}{more}: give one of them"
    assert names.find("bank (n1)") == 1
    with pytest.raises(UnknownConcept, match="did you mean 'bank \\(n0\\)'"):
        Names("toy", concepts[:1], lambda probe: ["top"]).find("bank")


def test_shipped_pack_and_group_suggest_the_concept_for_a_synonym():
    pack = ProbePack.open("probes/wordnet-smollm2-135m")
    with pytest.raises(UnknownConcept, match=r"the nearest in meaning is 'car' \(.* > vehicle > car\)$"):
        pack.find("automobiles")
    with pytest.raises(UnknownConcept, match=r"did you mean 'whale'\?$"):
        pack.find("whael")
    group = PackGroup({"a": pack, "b": pack})
    with pytest.raises(UnknownConcept, match=r"the nearest in meaning are 'a:car' \(a:.*\); 'b:car' \(b:.*\)$"):
        group.find("a:automobile")
