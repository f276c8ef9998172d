"""The WordNet pack builder on toy files: parsing, points, training, calibration and measurement."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from probemon.packs.pack import ProbePack
from real_text import Text
from wordnet_pack import build as building
from wordnet_pack import concepts as choosing
from wordnet_pack import passages as passages_module
from wordnet_pack import wordnet as wn
from wordnet_pack.alerts import FLOOR, Fires, lowest, precision_thresholds, precisions
from wordnet_pack.concepts import (
    Choice,
    Concept,
    Use,
    _names,
    choose,
    commonest_sense,
    label,
    name_of,
    parents_of,
    without,
    words_under,
)
from wordnet_pack.dataset import Dataset, Source, rmsnorm
from wordnet_pack.evaluate import differences, measure, sibling_auroc
from wordnet_pack.mentions import Limits, Point, collect, sense_mass, spans_of, split_of
from wordnet_pack.passages import LONGEST, SHORTEST, Domain, Passage, _of_domain, parts_of
from wordnet_pack.path_loss import Recipe, fit, forward, initial, logits_of, losses, starting_biases
from wordnet_pack.path_loss import ancestors_of as ancestor_matrix
from wordnet_pack.path_scores import Standard, auroc, exact_cascade, expand_above, fold, path_scores, thresholds_at
from wordnet_pack.running import Running, Word, labels_by_distance
from wordnet_pack.shown import Seen, strengths
from wordnet_pack.states import extract, read_tokens
from wordnet_pack.words import noun_bases, verb_bases, words_of

ROOT = Path(__file__).resolve().parents[2]
LICENCE = "  1 This software and database is being provided to you, the LICENSEE.  \n  2 WordNet 3.1 Copyright.  \n"
# offset, words, hypernym (symbol, offset), gloss
NOUNS = (
    (1, ("entity",), None, "that which exists"),
    (2, ("animal", "beast"), ("@", 1), 'a living being; "the animal ran"'),
    (3, ("dog",), ("@", 2), 'an animal that barks; "two dogs barked at a wolf"; "she fed the dog"'),
    (4, ("guide_dog",), ("@", 3), "a dog that leads"),
    (5, ("plant",), ("@", 1), 'a living thing that grows; "the plant needs water"'),
    (6, ("Rex",), ("@i", 3), "a famous dog"),
    (7, ("plant", "works"), ("@", 1), 'buildings for industry; "the plant made cars"'),
    (8, ("rex",), ("@", 5), "a small plant"),
)
VERBS = ((1, ("bark",), None, 'make a sound like a dog; "the puppy barked loudly"'),)
SENSES = (
    "animal%1:03:00:: 00000002 1 9", "beast%1:03:00:: 00000002 1 0", "bark%2:39:00:: 00000001 1 4",
    "dog%1:05:00:: 00000003 1 42", "guide_dog%1:05:00:: 00000004 1 0", "entity%1:03:00:: 00000001 1 1",
    "plant%1:03:00:: 00000005 1 6", "plant%1:06:00:: 00000007 2 2", "works%1:06:00:: 00000007 1 3",
    "rex%1:18:00:: 00000006 1 0", "rex%1:20:00:: 00000008 2 0",
)  # fmt: skip


def line_of(offset, words, hypernym, gloss, part):
    listed = " ".join(f"{word} 0" for word in words)
    pointers = f"001 {hypernym[0]} {hypernym[1]:08d} n 0000" if hypernym else "000"
    return f"{offset:08d} 03 {part} {len(words):02x} {listed} {pointers} | {gloss}  \n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dict")
    (folder / "data.noun").write_text(LICENCE + "".join(line_of(*noun, "n") for noun in NOUNS))
    (folder / "data.verb").write_text(LICENCE + "".join(line_of(*verb, "v") for verb in VERBS))
    (folder / "data.adj").write_text(LICENCE)
    (folder / "data.adv").write_text(LICENCE)
    (folder / "index.sense").write_text("\n".join(SENSES) + "\n")
    return folder


@pytest.fixture(scope="module")
def wordnet(folder):
    return wn.WordNet.read(folder)


# -- WordNet's files ------------------------------------------------------------------------------


def test_hypernym_chain_reaches_the_root_also_from_instances(wordnet):
    ids = [wordnet.ids[synset.key] for synset in wordnet.chain(wordnet.by_id["Rex.n.01".lower()])]
    assert ids == ["rex.n.01", "dog.n.01", "animal.n.01", "entity.n.01"]


def test_gloss_is_split_into_definition_and_examples(wordnet):
    dog = wordnet.by_id["dog.n.01"]
    assert dog.definition == "an animal that barks"
    assert dog.examples == ("two dogs barked at a wolf", "she fed the dog")


def test_ids_distinguish_senses_of_one_lemma_and_are_unique(wordnet):
    assert wordnet.by_id["plant.n.01"].key == "n00000005"
    assert wordnet.by_id["plant.n.02"].key == "n00000007"
    assert len(set(wordnet.ids.values())) == len(wordnet.synsets) == len(NOUNS) + len(VERBS)


def test_incomplete_dict_folder_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "data.noun").write_text(LICENCE)
    with pytest.raises(wn.WordNetMissing, match=r"lacks index\.sense, data\.verb"):
        wn.WordNet.read(tmp_path)


def test_missing_wordnet_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(wn.shutil, "which", lambda name: None)
    monkeypatch.setattr(wn, "DEBIAN_DICT", tmp_path / "none")
    with pytest.raises(wn.WordNetMissing, match="wordnet-base"):
        wn.find_wordnet(None, tmp_path)


def test_given_folder_takes_precedence_and_may_be_the_package_root(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(wn, "DEBIAN_DICT", folder)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "dict").symlink_to(folder)
    assert wn.find_wordnet(tmp_path) == tmp_path / "package" / "dict"
    assert wn.find_wordnet(folder) == folder


def test_licence_notice_loses_its_line_numbers_only(folder, wordnet):
    assert (
        wn.licence_text(folder)
        == "This software and database is being provided to you, the LICENSEE.\nWordNet 3.1 Copyright."
    )
    assert wordnet.version == "3.1"


# -- words and points -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "base"),
    [("dogs", "dog"), ("boxes", "box"), ("ladies", "lady"), ("firemen", "fireman"), ("Children", "child"), ("x", "x")],
)
def test_noun_form_leads_to_its_singular(form, base):
    assert base in noun_bases(form)


def test_double_s_is_not_a_plural():
    assert noun_bases("glass") == ("glass",)


@pytest.mark.parametrize(
    ("form", "base"), [("barked", "bark"), ("making", "make"), ("stopped", "stop"), ("tries", "try")]
)
def test_verb_form_leads_to_its_infinitive(form, base):
    assert base in verb_bases(form)


def test_possessive_suffix_is_removed():
    words = words_of("A dog's life.")
    assert [(word.text, word.start, word.end) for word in words] == [("A", 0, 1), ("dog", 2, 5), ("life", 8, 12)]


def test_sense_mass_follows_tagged_counts(wordnet):
    mass = sense_mass(wordnet.senses["plant"], capitalised=False, lower=True)
    assert mass == pytest.approx({"n00000005": 6.25 / 8.5, "n00000007": 2.25 / 8.5})


def test_word_without_tagged_uses_takes_the_configured_sense(wordnet):
    told = wordnet.with_meant({"plant": "plant.n.02"}, 100)
    assert sense_mass(told.senses["plant"], capitalised=False, lower=True)["n00000007"] > 0.9
    assert sense_mass(wordnet.senses["plant"], capitalised=False, lower=True)["n00000007"] < 0.3
    assert told.chain(told.by_id["plant.n.02"])


def test_capital_decides_between_a_name_and_a_common_noun(wordnet):
    senses = wordnet.senses["rex"]
    assert set(sense_mass(senses, capitalised=True, lower=False)) == {"n00000006"}
    assert set(sense_mass(senses, capitalised=False, lower=True)) == {"n00000008"}
    assert set(sense_mass(senses, capitalised=False, lower=False)) == {"n00000006", "n00000008"}


def test_longest_lemma_wins(wordnet):
    text = "my guide dogs"
    spans = list(spans_of(wordnet, text, words_of(text)))
    assert [(span.lemma, span.start, span.stop) for span in spans] == [("my", 0, 1), ("guide dog", 1, 3)]
    assert spans[1].mass == {"n00000004": 1.0}


def test_example_point_is_at_the_end_of_the_synsets_own_lemma(wordnet):
    texts, points = collect(wordnet, generated=[], seed=0, limits=Limits(background=0))
    own = {(texts[p.text][: p.end], *p.mass) for p in points if p.source == "example" and "n00000003" in p.mass}
    assert own == {("two dogs", "n00000003"), ("she fed the dog", "n00000003")}


def test_verb_in_its_own_example_means_no_concept(wordnet):
    texts, points = collect(wordnet, generated=[], seed=0, limits=Limits(background=0))
    [verb] = [point for point in points if point.source == "other_part"]
    assert (texts[verb.text][: verb.end], verb.mass) == ("the puppy barked", {})


def test_ambiguous_word_is_labelled_only_in_its_own_examples(wordnet):
    texts, points = collect(wordnet, generated=[], seed=0, limits=Limits(background=0))
    found = {texts[p.text] for p in points if p.lemma == "plant"}
    assert found == {"the plant needs water", "the plant made cars"}
    assert {p.source for p in points if p.lemma == "plant"} == {"example"}


def test_no_head_word_is_in_two_splits(wordnet):
    _, points = collect(wordnet, generated=["A dog saw the animal. The dog ran."], seed=0, limits=Limits())
    of_head: dict[str, set[str]] = {}
    for point in points:
        if point.head:
            of_head.setdefault(point.head, set()).add(point.split)
    assert {"dog", "animal", "plant"} <= set(of_head)
    assert all(splits == {split_of(head)} for head, splits in of_head.items())


def test_splits_have_the_stated_shares():
    counts = {name: 0 for name in ("train", "validation", "test")}
    for i in range(20_000):
        counts[split_of(f"word{i}")] += 1
    assert [round(n / 20_000, 2) for n in counts.values()] == [0.7, 0.1, 0.2]


def test_same_seed_collects_the_same_points_and_another_seed_others(wordnet):
    first, again, other = (
        collect(wordnet, generated=[], seed=seed, limits=Limits(background=40)) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_points_per_head_word_are_capped(wordnet):
    limits = Limits(dominant_per_head=1, gloss_per_head=2, background=0)
    _, points = collect(wordnet, generated=[], seed=0, limits=limits)
    heads = [point.head for point in points if point.source == "gloss"]
    assert heads.count("dog") == 2


def test_chat_markup_and_role_names_have_no_meaning(wordnet):
    text = "<|im_start|>user\nThe dog<|im_end|>"
    texts, points = collect(wordnet, generated=[text], seed=0, limits=Limits(background=0))
    here = [point for point in points if point.source == "generated"]
    meant = {text[: point.end]: point.mass for point in here if point.mass}
    assert meant == {"<|im_start|>user\nThe dog": {"n00000003": 1.0}}
    assert {12, 13, 16, len(text)} <= {point.end for point in here}
    assert all(texts[point.text] == text for point in here)


# -- concepts -------------------------------------------------------------------------------------


def point(mass, split="train", head="h", source="example"):
    return Point(0, 1, source, split, head, head, mass)


def test_label_is_positive_from_80_percent_and_unknown_down_to_5(wordnet):
    concepts = [Concept(f"{i}", f"{i}", f"n{i:08d}", None, 0, "", (), 0, 0) for i in (2, 3, 5)]  # animal, dog, plant
    points = [
        point({"n00000003": 1.0}),
        point({"n00000003": 0.5, "n00000002": 0.4, "n00000005": 0.1}),
        point({"n00000005": 0.96, "n00000003": 0.04}),
        point({}),
    ]
    assert label(wordnet, points, concepts).tolist() == [[1, 1, 0], [1, -1, -1], [0, 0, 1], [0, 0, 0]]


LOOSE = Choice(
    min_uses=4,
    min_running=2,
    min_heads=2,
    min_named=0,
    min_depth=2,
    max_share=0.9,
    max_child_share=0.99,
    everyday=frozenset(),
)


def toy_uses():
    """8 dogs, 4 other animals, 6 plants, as many head words, each once in running text and once in WordNet's."""
    meant = ["n00000003"] * 8 + ["n00000002"] * 4 + ["n00000005"] * 6
    return [Use(f"head{i}", {key: 1.0}, n_mentions=1, n_running=1) for i, key in enumerate(meant)]


def test_concepts_are_ordered_parents_first_without_too_broad_ones(wordnet):
    concepts = choose(wordnet, toy_uses(), LOOSE)
    assert [(c.id, c.parent, c.level, c.n_train) for c in concepts] == [
        ("animal.n.01", None, 0, 24),
        ("plant.n.01", None, 0, 12),
        ("dog.n.01", "animal.n.01", 1, 16),
    ]
    assert parents_of(concepts).tolist() == [-1, -1, 0]


def test_synset_that_is_nearly_all_one_child_is_replaced_by_it(wordnet):
    choice = replace(LOOSE, max_child_share=0.6)
    assert [c.id for c in choose(wordnet, toy_uses(), choice)] == ["dog.n.01", "plant.n.01"]


def test_few_head_words_or_no_running_text_make_no_concept(wordnet):
    same_head = [Use("tree", {"n00000005": 1.0}, 20, 20)]
    assert "plant.n.01" not in {c.id for c in choose(wordnet, toy_uses()[:12] + same_head, LOOSE)}
    assert choose(wordnet, [replace(use, n_running=0) for use in toy_uses()], LOOSE) == []


def test_word_that_is_mostly_not_a_noun_supports_no_concept(wordnet):
    uses = [replace(use, mass={key: 0.4 for key in use.mass}) for use in toy_uses()]
    assert choose(wordnet, uses, LOOSE) == []


def test_concept_that_is_never_named_is_left_out(wordnet):
    # Guide dogs are dogs, but nobody says "dog" itself.
    uses = [Use(f"h{i}", {"n00000004": 1.0}, 1, 1) for i in range(6)] + [Use("wolf", {"n00000002": 1.0}, 1, 4)] * 2
    uses.append(Use("fern", {"n00000008": 1.0}, 9, 0))
    strict = replace(LOOSE, min_named=3, max_child_share=1.1)
    assert [c.id for c in choose(wordnet, uses, strict)] == ["animal.n.01", "guide_dog.n.01"]
    assert [c.id for c in choose(wordnet, uses, replace(strict, min_branches=1))] == [
        "animal.n.01",
        "dog.n.01",
        "guide_dog.n.01",
    ]
    said = [*uses, Use("hound", {"n00000003": 1.0}, 1, 3)]
    assert "dog.n.01" in [c.id for c in choose(wordnet, said, strict)]


def test_everyday_word_is_in_training_and_needs_fewer_uses(wordnet):
    assert split_of("dog") == "train" and commonest_sense(wordnet, "dog") == "n00000003"
    assert commonest_sense(wordnet, "plant") == "n00000005" and commonest_sense(wordnet, "bark") is None
    uses = [Use(f"h{i}", {"n00000003": 1.0}, 1, 1) for i in range(3)] + [Use("b", {"n00000005": 1.0}, 9, 9)] * 3
    strict = replace(LOOSE, min_uses=60, min_heads=9, everyday_uses=5, everyday_heads=3)
    assert choose(wordnet, uses, strict) == []
    assert [c.id for c in choose(wordnet, uses, replace(strict, everyday=frozenset(["dog"])))] == ["dog.n.01"]


def test_concept_names_are_common_words_and_unique(wordnet):
    assert name_of(wordnet, "n00000007") == "works"  # tagged three times; the plant is the first of its lemmas, once
    uses = [Use(f"h{i}", {key: 1.0}, 1, 1) for i, key in enumerate(["n00000006", "n00000008"] * 4)]
    concepts = choose(wordnet, uses, replace(LOOSE, min_uses=2))
    assert {c.name for c in concepts} >= {"Rex", "rex"}
    untagged = replace(wordnet, senses={})
    assert _names(untagged, ["n00000005", "n00000007", "n00000003"]) == {
        "n00000005": "plant (plant.n.01)",
        "n00000007": "plant (plant.n.02)",
        "n00000003": "dog",
    }


@pytest.mark.parametrize("pack", ["wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp"])
def test_shipped_concept_names_need_no_synset_number(pack):
    concepts = ProbePack.open(f"probes/{pack}").concepts
    assert [c["name"] for c in concepts if re.search(r"\.n\.\d", c["name"])] == []
    assert {c["name"] for c in concepts if c["id"] in choosing.PLAIN_NAMES} <= set(choosing.PLAIN_NAMES.values())
    assert len({c["name"] for c in concepts}) == len(concepts)


def test_word_is_listed_at_the_lowest_concept_over_its_main_sense(wordnet, monkeypatch):
    concepts = choose(wordnet, toy_uses(), LOOSE)
    assert [concept.id for concept in concepts] == ["animal.n.01", "plant.n.01", "dog.n.01"]
    # Lemmas of the concepts themselves ("beast"), a verb, and what lies under none ("works") are listed nowhere.
    alike = {"animal.n.01": [], "plant.n.01": [], "dog.n.01": ["Rex", "guide dog"]}
    assert words_under(wordnet, concepts, []) == alike
    said = [Use("dog", {"n00000004": 0.7, "n00000003": 0.3}, n_running=5), Use("x", {}, n_running=9)]
    assert words_under(wordnet, concepts, said) == alike  # "dog" says nothing of "guide dog"
    said.append(Use("guide dog", {"n00000004": 1.0}, n_running=1))
    assert words_under(wordnet, concepts, said)["dog.n.01"] == ["guide dog", "Rex"]
    without_dogs = words_under(wordnet, concepts[:2], [])
    assert without_dogs == {"animal.n.01": ["dog", "Rex", "guide dog"], "plant.n.01": []}
    monkeypatch.setattr(choosing, "COMMON_WORDS", 1)
    assert words_under(wordnet, concepts, said)["dog.n.01"] == ["guide dog"]
    said.append(Use("rex", {"n00000006": 1.0}, n_running=3))  # at hand often enough, whatever stands before it
    said.append(Use("guide dog", {"n00000004": 1.0}, n_running=4))
    assert words_under(wordnet, concepts, said)["dog.n.01"] == ["guide dog", "Rex"]


def test_children_of_a_dropped_concept_move_up(wordnet):
    chain = [
        Concept(name, name, name, parent, level, "", (), 0, 0)
        for name, parent, level in (("a", None, 0), ("b", "a", 1), ("c", "b", 2), ("d", "c", 3))
    ]
    assert [(c.id, c.parent, c.level) for c in without(chain, {"b", "c"})] == [("a", None, 0), ("d", "a", 1)]
    assert [(c.id, c.parent, c.level) for c in without(chain, {"a"})][0] == ("b", None, 0)


# -- ranks, thresholds, the cascade ---------------------------------------------------------------


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(5))
def test_auroc_equals_counting_pairs_with_ties(seed):
    g = generator(seed)
    scores = torch.randint(0, 6, (41, 3), generator=g).float()
    labels = torch.randint(-1, 2, (41, 3), generator=g, dtype=torch.int8)
    for column, area in enumerate(auroc(scores, labels).tolist()):
        up = scores[labels[:, column] == 1, column]
        down = scores[labels[:, column] == 0, column]
        pairs = (up[:, None] > down).double() + 0.5 * (up[:, None] == down).double()
        assert area == pytest.approx(float(pairs.mean()), abs=1e-12)


def test_auroc_without_a_positive_is_nan():
    assert auroc(torch.rand(7, 1), torch.zeros(7, 1, dtype=torch.int8)).isnan().all()


@pytest.mark.parametrize(("n", "rate"), [(1, 0.01), (99, 0.01), (101, 0.01), (1000, 0.05), (7, 0.5)])
def test_threshold_is_the_lowest_within_the_stated_rate(n, rate):
    scores = torch.rand(n, 1, generator=generator(n))
    everything = torch.ones(n, 1, dtype=torch.bool)
    threshold = thresholds_at(scores, everything, rate)
    fired = int((scores > threshold).sum())
    assert fired <= rate * n < fired + 1


def test_threshold_counts_negatives_only():
    scores = torch.tensor([[0.9], [0.8], [0.2], [0.1]])
    negative = torch.tensor([[False], [False], [True], [True]])
    assert thresholds_at(scores, negative, 0.0).item() == pytest.approx(0.2)
    assert thresholds_at(scores, torch.zeros_like(negative), 0.0).isnan().all()


def random_forest(n, g):
    return torch.tensor([-1] + [int(torch.randint(-1, i, (1,), generator=g)) for i in range(1, n)])


def ancestors_of(probe, parents):
    chain = [probe]
    while parents[chain[-1]] >= 0:
        chain.append(int(parents[chain[-1]]))
    return chain


@pytest.mark.parametrize("seed", range(5))
def test_path_score_is_the_product_of_sigmoids_from_the_root(seed):
    g = generator(seed)
    parents, logits = random_forest(13, g), torch.randn(5, 13, generator=g)
    scores = path_scores(logits, parents)
    for probe in range(13):
        expected = torch.sigmoid(logits[:, ancestors_of(probe, parents)].double()).prod(1)
        torch.testing.assert_close(scores[:, probe].double(), expected, rtol=1e-6, atol=0)


def test_child_before_its_parent_is_refused():
    with pytest.raises(ValueError, match="order probes by level"):
        path_scores(torch.zeros(1, 2), torch.tensor([1, -1]))


@pytest.mark.parametrize("seed", range(5))
def test_expand_threshold_is_the_smallest_alert_threshold_of_strict_descendants(seed):
    g = generator(seed)
    parents, alert = random_forest(17, g), torch.rand(17, generator=g)
    expand = expand_above(alert, parents)
    for probe in range(17):
        below = [float(alert[i]) for i in range(17) if i != probe and probe in ancestors_of(i, parents)]
        assert float(expand[probe]) == pytest.approx(min(below, default=float("inf")))


@pytest.mark.parametrize("seed", range(8))
def test_exact_cascade_finds_every_firing_probe_and_skips_some(seed):
    g = generator(seed)
    parents = random_forest(31, g)
    scores = path_scores(torch.randn(50, 31, generator=g) * 3, parents)
    alert = torch.rand(31, generator=g) * 0.5
    evaluated, fired = exact_cascade(scores, alert, parents)
    assert torch.equal(fired, scores > alert)
    assert not evaluated.all()
    # Probe by probe: evaluated exactly where every strict ancestor beats its own expand threshold.
    expand = expand_above(alert, parents)
    for probe in range(31):
        above = ancestors_of(probe, parents)[1:]
        assert torch.equal(evaluated[:, probe], (scores[:, above] > expand[above]).all(1))


# -- training -------------------------------------------------------------------------------------


def problem(seed=0, n=240, d=7, p=6):
    """Standardised x, hierarchical labels with unknowns, parents."""
    g = generator(seed)
    parents = torch.tensor([-1, -1, 0, 0, 1, 2])[:p]
    x = torch.randn(n, d, generator=g)
    labels = torch.zeros(n, p, dtype=torch.int8)
    for probe in range(p):
        on = x @ torch.randn(d, generator=g) > 0
        if parents[probe] >= 0:
            on &= labels[:, parents[probe]] == 1
        labels[:, probe] = on.to(torch.int8)
    labels[torch.rand(n, p, generator=g) < 0.05] = -1
    return x, labels, parents


FAST = Recipe(epochs=3, batch=64, rate=1e-2)


@pytest.mark.parametrize("shape", [(), (4, 3)])
def test_training_is_deterministic_and_independent_of_other_branches(shape):
    x, labels, parents = problem()
    seeds = [11, 12, 13, 14, 15, 16]
    bank = fit(x, labels, parents, seeds, FAST, shape=shape, progress=False)
    again = fit(x, labels, parents, seeds, FAST, shape=shape, progress=False)
    # The tree of root 1, probe 4 below it: no loss of another tree reaches it.
    branch = [1, 4]
    alone = fit(
        x, labels[:, branch], torch.tensor([-1, 0]), [seeds[i] for i in branch], FAST, shape=shape, progress=False
    )
    for name, value in alone.items():
        assert torch.equal(bank[name], again[name])
        torch.testing.assert_close(value, bank[name][branch], rtol=1e-4, atol=1e-6)


def test_training_separates_separable_classes_with_probability_scores():
    x, labels, parents = problem(n=4000)
    weights = fit(x[500:], labels[500:], parents, list(range(6)), Recipe(rate=2e-2, batch=64), progress=False)
    scores = path_scores(logits_of(x[:500], weights), parents)
    assert (auroc(scores, labels[:500])[:2] > 0.99).all()
    for probe in range(6):
        known = labels[:500, probe] >= 0
        share = (labels[:500, probe][known] == 1).double().mean()
        assert float(scores[:500][known, probe].double().mean()) == pytest.approx(float(share), abs=0.06)


def test_token_weight_equals_repetition():
    x, labels, parents = problem(2, n=60)
    twice = torch.cat([x, x[:20]]), torch.cat([labels, labels[:20]])
    weight = torch.ones(60)
    weight[:20] = 2
    one_step = Recipe(epochs=1, batch=1000)  # all at once, so that the order of batches says nothing
    a = fit(*twice, parents, list(range(6)), one_step, progress=False)
    b = fit(x, labels, parents, list(range(6)), one_step, weight=weight, progress=False)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_loss_is_the_cross_entropy_of_the_path_score(seed):
    _, labels, parents = problem(seed)
    logits = torch.randn(len(labels), 6, generator=generator(seed))
    found = losses(logits, labels, ancestor_matrix(parents))
    scores = path_scores(logits.double(), parents)
    wanted = -torch.where(labels == 1, scores, 1 - scores).log() * (labels >= 0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_unknown_labels_have_no_weight_and_losses_stay_finite():
    _, labels, parents = problem(6)
    roots = parents < 0
    logits = torch.randn(len(labels), 6, generator=generator(1), requires_grad=True)
    losses(logits, labels, torch.eye(6)).sum().backward()
    assert logits.grad is not None and torch.equal(logits.grad[:, roots] == 0, labels[:, roots] == -1)
    sure = losses(torch.full((1, 6), 80.0), torch.zeros(1, 6, dtype=torch.int8), ancestor_matrix(parents))
    assert torch.isfinite(sure).all()


def test_initial_scores_equal_the_share_of_each_concept():
    _, labels, parents = problem(7, n=4000)
    labels = labels.clamp(min=0)
    biases = starting_biases(labels, torch.ones(len(labels)), parents)
    began = path_scores(biases[None], parents)[0]
    torch.testing.assert_close(began, (labels == 1).float().mean(0), rtol=1e-3, atol=1e-3)


def test_hidden_layers_begin_exactly_at_the_linear_probe():
    g = generator(3)
    linear = {"w1": torch.randn(5, 1, 9, generator=g), "b1": torch.randn(5, 1, generator=g)}
    x = torch.randn(11, 9, generator=g)
    embedded = initial((6, 4), list(range(5)), 9, linear)
    torch.testing.assert_close(forward(x, embedded), forward(x, linear), rtol=1e-5, atol=1e-5)


def test_forward_with_hidden_layers_equals_a_loop_over_probes():
    g = generator(4)
    weights = initial((5, 3), [1, 2, 3], 7)
    for name in ("b1", "b2", "b3"):
        weights[name] = torch.randn(weights[name].shape, generator=g)
    x = torch.randn(13, 7, generator=g)
    for probe in range(3):
        w = {name: value[probe].double() for name, value in weights.items()}
        first = torch.relu(x.double() @ w["w1"].T + w["b1"])
        expected = torch.relu(first @ w["w2"].T + w["b2"]) @ w["w3"] + w["b3"]
        torch.testing.assert_close(forward(x, weights)[:, probe].double(), expected, rtol=1e-5, atol=1e-5)


# -- folding and calibration ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (4, 3)])
def test_folded_standardisation_is_exact_to_fp32(shape):
    g = generator(8)
    x = torch.randn(50, 9, generator=g) * torch.logspace(-0.5, 1, 9) + torch.linspace(-3, 3, 9)
    standard = Standard.of(x)
    weights = initial(shape, [1, 2, 3], 9, None)
    weights["w1"] = torch.randn(weights["w1"].shape, generator=g)
    weights["b1"] = torch.randn(weights["b1"].shape, generator=g)
    exact = {name: value.double() for name, value in weights.items()}
    wanted = forward((x.double() - standard.mean.double()) / standard.scale.double(), exact)
    folded = {name: value.double() for name, value in fold(weights, standard, torch.float32).items()}
    torch.testing.assert_close(forward(x.double(), folded), wanted, rtol=1e-5, atol=1e-5)


def test_rounding_weights_to_bf16_moves_no_output_at_the_mean_state():
    g = generator(9)
    x = torch.randn(64, 33, generator=g) + 20
    standard = Standard.of(x)
    weights = {"w1": torch.randn(4, 1, 33, generator=g), "b1": torch.randn(4, 1, generator=g)}
    folded = fold(weights, standard)
    assert folded["w1"].dtype is torch.bfloat16 and folded["b1"].dtype is torch.float32
    at_mean = forward(standard.mean[None].double(), {name: value.double() for name, value in folded.items()})
    torch.testing.assert_close(at_mean.flatten(), weights["b1"].flatten().double(), rtol=0, atol=1e-4)
    # The bias of the unrounded weights would not do: the mean is large and the rounding is not.
    naive = (folded["w1"].double() @ standard.mean.double()).flatten() - (
        (weights["w1"] / standard.scale).double() @ standard.mean.double()
    ).flatten()
    assert naive.abs().max() > 1e-2


@pytest.mark.parametrize("seed", range(6))
def test_lowest_threshold_is_the_lowest_with_the_required_precision(seed):
    g = generator(seed)
    score = (torch.randint(1, 12, (60,), generator=g) / 12).float()
    right = torch.rand(60, generator=g) < score

    def share(threshold):
        over = score > threshold
        return float(right[over].double().mean()) if over.any() else 0.0

    candidates = [0.05, *score.unique().tolist()]
    good = [threshold for threshold in candidates if share(threshold) >= 0.75]
    assert lowest(score, right, 0.75) == pytest.approx(min(good, default=1.0))


def test_threshold_is_1_if_nothing_is_right():
    score = torch.tensor([0.9, 0.5])
    assert lowest(score, torch.zeros(2, dtype=torch.bool), 0.9) == 1.0
    assert lowest(score[:0], score[:0] > 1, 0.9) == 1.0


def test_less_precise_concept_gets_a_higher_threshold_than_its_level():
    g = generator(3)
    n = 4000
    scores = torch.rand(n, 3, generator=g)
    word = torch.arange(n) % 2  # word 0 lies under every concept, word 1 under none
    any_sense = torch.tensor([[True, True, True], [False, False, False], [False, False, False]])
    # Concepts 0 and 1 score word 1 at most .3; concept 2 scores it at most .8.
    for probe, most in enumerate((0.3, 0.3, 0.8)):
        scores[word == 1, probe] *= most
    fires = Fires.of(scores, any_sense, word)
    thresholds, own = precision_thresholds(fires, torch.tensor([0, 0, 0]), 0.9)
    assert own.all() and thresholds[0] == thresholds[1] < thresholds[2]
    for probe in range(3):
        over = scores[:, probe] > thresholds[probe]
        assert float((word[over] == 0).double().mean()) >= 0.9


def test_shallow_levels_are_judged_separately_and_deep_ones_together():
    g = generator(5)
    n = 2000
    scores, word = (
        torch.rand(n, 5, generator=g),
        torch.arange(n) % 2,
    )  # word 0 lies under every concept, word 1 under none
    level = torch.tensor([0, 1, 3, 4, 2])
    for probe, most in enumerate((0.2, 0.7, 0.1, 0.5, 0.0)):  # what word 1 scores at most
        scores[word == 1, probe] *= most
    scores[:, 4] = 0.0
    scores[::5] = torch.rand(len(scores[::5]), 5, generator=g) * 0.3
    word[::5] = -1  # other tokens, at which a fire is wrong
    any_sense = torch.tensor([[True] * 5, [False] * 5, [False] * 5])
    fires = Fires.of(scores, any_sense, word)
    thresholds, own = precision_thresholds(fires, level, 0.9)

    def lowest_of(probes):
        return min(
            threshold
            for threshold in [FLOOR, *scores[:, probes].flatten().tolist()]
            if threshold >= FLOOR
            and float((scores[:, probes] > threshold)[word != 0].sum())
            <= 0.1 * float((scores[:, probes] > threshold).sum())
        )

    assert thresholds[0] == pytest.approx(lowest_of([0])) and thresholds[1] == pytest.approx(lowest_of([1]))
    together = lowest_of([2, 3])
    assert thresholds[2] == pytest.approx(together)
    assert thresholds[3] == pytest.approx(lowest_of([3])) and thresholds[3] > together  # less right than both
    assert thresholds[4] == 1.0  # what never fires has nothing to be judged by
    assert own.tolist() == [True, True, True, True, False]


def test_sentence_fires_by_its_best_token_and_is_right_by_any_word():
    scores = torch.tensor([[0.2, 0.9], [0.7, 0.1], [0.6, 0.01], [0.3, 0.02]])
    any_sense = torch.tensor([[True, False], [False, False]])
    word, sentence = torch.tensor([0, -1, -1, -1]), torch.tensor([4, 4, 7, 7])
    fires = Fires.of_sentences(scores, any_sense, word, sentence)
    found = {
        (p, round(s, 3), r)
        for p, s, r in zip(fires.probe.tolist(), fires.score.tolist(), fires.right.tolist(), strict=True)
    }
    assert found == {(0, 0.7, True), (1, 0.9, False), (0, 0.6, False)}


def test_precision_is_the_concepts_own_or_its_levels():
    fires = Fires(
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([0.9, 0.8, 0.1, 0.9]),
        torch.tensor([True, False, True, True]),
    )
    found = precisions(fires, torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0, 0, 1]), torch.tensor([True, False, True]))
    assert found[:2].tolist() == pytest.approx([0.5, 2 / 3]) and found[2].isnan()


def test_sibling_auroc_compares_only_within_the_family():
    parents = torch.tensor([-1, 0, 0, -1])
    labels = torch.zeros(12, 4, dtype=torch.int8)
    labels[:8, 0] = 1
    labels[:4, 1] = 1
    labels[4:8, 2] = 1
    labels[8:, 3] = 1
    logits = torch.zeros(12, 4)
    logits[:4, 1], logits[8:, 1] = 1.0, 9.0  # higher still outside the family, which must not count
    logits[4:7, 2] = 1.0  # one of four positives ties with the four negatives
    areas = sibling_auroc(logits, labels, parents)
    assert areas[1].item() == 1.0
    assert areas[2].item() == pytest.approx(0.75 + 0.25 * 0.5)
    assert areas[[0, 3]].isnan().all()


# -- hidden states --------------------------------------------------------------------------------


class PairTokenizer:
    """Two characters a token; `<s>` is one token, and ids are sums of character codes."""

    bos_token = "<s>"

    def __call__(self, texts, add_special_tokens, return_offsets_mapping):
        rows = [self._row(text) for text in texts]
        ids, offsets = ([[pair[part] for pair in row] for row in rows] for part in (0, 1))
        return {"input_ids": ids, "offset_mapping": offsets}

    def _row(self, text):
        assert text.startswith("<s>")
        pieces = [(at, min(at + 2, len(text))) for at in range(3, len(text), 2)]
        return [(1, (0, 3)), *((2 + sum(map(ord, text[a:b])) % 90, (a, b)) for a, b in pieces)]


def test_point_reads_the_token_of_its_last_character_or_the_first_token():
    texts = ["abcde", "<s>xyz"]
    points = [Point(t, end, "example", "train", "", "", {}) for t, end in ((0, 3), (0, 4), (0, 5), (1, 6), (1, 0))]
    tokens = read_tokens(PairTokenizer(), texts, points)
    assert tokens.at.tolist() == [2, 2, 3, 2, 0]
    assert tokens.ids[1][0] == 1 and 1 not in tokens.ids[1][1:]
    assert tokens.id.tolist() == [tokens.ids[p.text][a] for p, a in zip(points, tokens.at.tolist(), strict=True)]


def tiny_host():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def test_extracted_states_equal_each_text_run_alone(tmp_path):
    model = tiny_host()
    texts = ["abcdefgh", "b", "hello there", "abc"]
    points = [Point(t, end, "example", "train", "", "", {}) for t, text in enumerate(texts) for end in (0, len(text))]
    tokens = read_tokens(PairTokenizer(), texts, points)
    states = extract(model, tokens, [0, 2], "mark", tmp_path)
    for row, (text, at) in enumerate(zip(tokens.text.tolist(), tokens.at.tolist(), strict=True)):
        with torch.no_grad():
            out = model(torch.tensor([tokens.ids[text]]), output_hidden_states=True)
        for layer in (0, 2):
            torch.testing.assert_close(states[layer][row], out.hidden_states[layer + 1][0, at], rtol=1e-5, atol=1e-5)


def test_extraction_restores_the_model_and_is_cached(tmp_path):
    model = tiny_host()
    points = [Point(0, 2, "example", "train", "", "", {})]
    tokens = read_tokens(PairTokenizer(), ["ab"], points)
    first = extract(model, tokens, [1], "mark", tmp_path)[1]
    assert len(model.model.layers) == 4
    assert not any(layer._forward_hooks for layer in model.model.layers)
    model.forward = model.model.forward = None  # a forward pass would now fail
    assert torch.equal(extract(model, tokens, [1], "mark", tmp_path)[1], first)
    with pytest.raises(TypeError):
        extract(model, tokens, [1], "another host", tmp_path)


# -- running text ---------------------------------------------------------------------------------


def test_text_parts_cover_all_but_scraps_within_the_length_limit(monkeypatch):
    text = "\n".join(f"Sentence number {i} of a long text. It goes on." * (i % 40 + 1) for i in range(60))
    parts = list(parts_of(text))
    assert all(SHORTEST < len(part) <= LONGEST for part in parts)
    monkeypatch.setattr(passages_module, "SHORTEST", 0)
    scraps = list(parts_of(text))
    assert [part for part in scraps if len(part) > SHORTEST] == parts != scraps
    parts = scraps
    assert "".join(text.split()) == "".join("".join(parts).split())


def test_text_stays_in_one_split_and_domain_sizes_are_met():
    texts = [Text(f"t{i}", "", f"words of text {i} " * 30) for i in range(300)]
    domain = Domain("d", lambda: texts, train=20_000, validation=5_000, test=5_000)
    passages = list(_of_domain(domain))
    splits: dict[str, set[str]] = {}
    for passage in passages:
        splits.setdefault(re.search(r"text \d+", passage.text)[0], set()).add(passage.split)
    assert {frozenset(split) for split in splits.values()} == {
        frozenset([split]) for split in ("train", "validation", "test")
    }
    for split, room in (("train", 20_000), ("validation", 5_000), ("test", 5_000)):
        size = sum(len(p.text) for p in passages if p.split == split and "<|im_start|>" not in p.text)
        assert size <= room + LONGEST
    assert passages == list(_of_domain(domain))
    chats = [p for p in passages if "<|im_start|>assistant" in p.text]
    assert chats and all(p.split != "test" for p in chats)


def test_domain_without_training_size_is_all_test():
    texts = [Text(f"t{i}", "", "some words that stand here " * 4) for i in range(40)]
    assert {p.split for p in _of_domain(Domain("d", lambda: texts, test=10**6))} == {"test"}


class OneRowTokenizer(PairTokenizer):
    def decode(self, ids):
        return "." if ids == [2 + (ord("i") + ord("d")) % 90] else "x"

    def __call__(self, text, add_special_tokens, return_offsets_mapping, truncation, max_length):
        row = self._row(text)[:max_length]
        return {"input_ids": [token for token, _ in row], "offset_mapping": [span for _, span in row]}


def test_every_token_of_running_text_has_its_word(wordnet, tmp_path):
    passages = [Passage("news", "train", "the guide dogs ran"), Passage("news", "test", "a plant")]
    running = Running.read(tiny_host(), OneRowTokenizer(), wordnet, passages, layer=1, fingerprint="x", folder=tmp_path)
    # <s> th e_ gu id e_ do gs _r an | <s> a_ pl an t
    assert running.word.tolist() == [-1, -1, -1, 0, 0, 0, 0, 0, -1, -1, -1, -1, 1, 1, 1]
    assert running.is_last.nonzero().flatten().tolist() == [7, 14]
    assert running.words[int(running.word[7])] == Word("dog", {"n00000004": 1.0})
    assert set(running.words[int(running.word[14])].mass) == {"n00000005", "n00000007"}
    assert running.sentence.tolist() == [0] * 5 + [1] * 5 + [2] * 5  # "id" ends one here, a passage the other
    assert running.passage.tolist()[0] == 0 and running.passage.tolist()[-1] == 1
    assert torch.equal(running.where(split="test"), running.passage == 1)


def test_distance_labels_follow_most_of_the_noun_senses(wordnet):
    words = [
        Word("dog", {"n00000003": 1.0}),
        Word("plant", {"n00000005": 6.25 / 8.5, "n00000007": 2.25 / 8.5}),
        Word("walk", {"n00000003": 0.4}),  # mostly a verb
    ]
    truth = labels_by_distance(wordnet, words, ["n00000001", "n00000002", "n00000003", "n00000005"])
    assert truth.strict.tolist() == [[1, 1, 1, 0], [1, 0, 0, -1], [-1, -1, -1, 0], [0, 0, 0, 0]]
    assert truth.any_sense.tolist() == [
        [True, True, True, False],
        [True, False, False, True],
        [True, True, True, False],
        [False] * 4,
    ]


def test_unfinished_word_is_unknown_for_its_possible_concepts(wordnet):
    running = toy_running(wordnet, 30)
    truth = labels_by_distance(wordnet, running.words, ["n00000003"])
    rows = torch.arange(len(running.word))
    begun = Running(**{**vars(running), "is_last": torch.zeros(len(rows), dtype=torch.bool)})
    before, after = truth.labels(running, rows), truth.labels(begun, rows)
    assert torch.equal(after, torch.where(before == 1, torch.tensor(-1, dtype=torch.int8), before))
    assert (before == 1).any() and (before == 0).any()


def test_uses_are_whole_words_of_training_texts_from_every_split(wordnet):
    running = toy_running(wordnet, 200)
    counted = {use.head: use.n_running for use in building.all_uses(running)}
    trains = [running.passages[passage].split == "train" for passage in running.passage.tolist()]
    last = zip(running.word.tolist(), running.is_last.tolist(), trains, strict=True)
    expected = Counter(running.words[word].head for word, is_last, train in last if is_last and train)
    assert counted == expected and {split_of(head) for head in counted} == {"train", "validation", "test"}


def test_firing_is_counted_by_kind_of_token():
    strength = torch.tensor([[1.0, -1.0], [1.0, 1.0], [0.5, -2.0], [2.0, 2.0]])
    any_sense = torch.tensor([[True, False], [True, False], [False, False], [True, True]])
    strict = torch.tensor([[1, 0], [-1, 0], [0, 0], [1, 1]], dtype=torch.int8)
    noun = torch.tensor([True, True, False, True])
    held_out = torch.tensor([False, True, False, True])
    seen = Seen(strength, any_sense, strict, noun, held_out, ~noun)
    at = seen.at(0.0)
    assert at["fires_per_noun"] == pytest.approx(5 / 3, abs=1e-4) and at["right"] == 0.8
    assert at["fires_per_held_out_noun"] == 2 and at["right_held_out"] == 0.75
    assert at["strictly_right_held_out"] == pytest.approx(2 / 3, abs=1e-4) and at["recall_held_out"] == 1.0
    assert at["fires_per_other"] == 1 and seen.at(1.5)["fires_per_other"] == 0
    assert seen.right_at(1.0)["right"] == 1.0 and seen.right_at(2.0)["right"] == 0.75
    assert seen.right_at(5.0)["right"] is None
    assert seen.by_level(torch.tensor([0, 1]))["1"] == {"fires_per_held_out_noun": 1.0, "right": 0.5}


def test_strength_is_the_difference_of_log_odds():
    scores, thresholds = torch.tensor([[0.9, 0.5]]), torch.tensor([0.5, 0.9])
    torch.testing.assert_close(strengths(scores, thresholds), torch.tensor([[1.0, -1.0]]).double() * math.log(9))


# -- from points to a pack ------------------------------------------------------------------------


def toy_running(wordnet, n=900, g=None):
    """Tokens of dogs, other animals, plants and nothing, in passages of ten, with states like those of the mentions."""
    g = g or generator(21)
    kinds = (("n00000003", (0, 1)), ("n00000002", (0,)), ("n00000005", (2,)), (None, ()))
    words = [Word(f"word{i}", {kinds[i % 4][0]: 1.0}) for i in range(n) if kinds[i % 4][0]]
    number = {word.head: at for at, word in enumerate(words)}
    states = torch.randn(n, 12, generator=g)
    for i in range(n):
        states[i, list(kinds[i % 4][1])] += 5
    passages = [Passage("news", ("train", "train", "validation", "test")[at % 4], "-") for at in range(-(-n // 10))]
    word = torch.tensor([number.get(f"word{i}", -1) for i in range(n)])
    ids = torch.randint(0, 50, (n,), generator=g)
    passage = torch.arange(n) // 10
    return Running(passages, words, passage, ids, word, word >= 0, torch.arange(n) // 5, states.bfloat16())


def toy_dataset(wordnet):
    """2,400 points of dogs, other animals, plants and nothing, with states drawn around a direction for each."""
    g = generator(20)
    kinds = (("n00000003", (0, 1)), ("n00000002", (0,)), ("n00000005", (2,)), (None, ()))
    points, states = [], []
    for i in range(2400):
        key, axes = kinds[i % 4]
        state = torch.randn(12, generator=g)
        for axis in axes:
            state[axis] += 5
        head = f"word{i // 3}"
        source = ("example" if key else "other_part", "dominant" if key else "function", "background")[i % 3]
        points.append(Point(0, 1, source, split_of(head), head, head, {key: 1.0} if key else {}))
        states.append(state)
    hidden = torch.stack(states).bfloat16()
    host = {
        "model_id": "toy",
        "revision": "0",
        "hidden_size": 12,
        "n_layers": 4,
        "fingerprint": "x",
        "quantisation": "none",
    }
    ids = torch.randint(0, 50, (2400,), generator=g)  # tells nothing of the concepts
    embedding = torch.randn(50, 12, generator=g)
    running = toy_running(wordnet)
    return Dataset(Source(None, 1, 0), wordnet, "NOTICE", points, ["a"], hidden, ids, embedding, host, running)


@pytest.fixture(scope="module", params=[(), (4, 3)], ids=["linear", "4-3"])
def built(request, wordnet, tmp_path_factory):
    data = toy_dataset(wordnet)
    folder = tmp_path_factory.mktemp("packs")
    with pytest.MonkeyPatch.context() as patch:
        # Small batches: a toy epoch of the real recipe has four steps.
        patch.setattr(building, "LINEAR", Recipe(batch=64, rate=2e-2, epochs=8))
        patch.setattr(building, "SCREENING", Recipe(batch=64, rate=2e-2))
        packs = []
        for name in ("first", "again"):
            patch.setattr(building, "cache_dir", lambda home=folder / name / "cache": home)
            out = folder / name / "toy"
            packs.append(building.build(data, shape=request.param, out=out, choice=LOOSE, versions={"toy": "1"}))
    return data, packs


def test_same_seed_gives_the_same_pack_byte_for_byte(built):
    _, (first, again) = built
    for file in ("manifest.json", "concepts.jsonl", "probes.safetensors", "README.md"):
        assert (first.directory / file).read_bytes() == (again.directory / file).read_bytes(), file


def test_written_pack_verifies_and_carries_notice_and_golden_states(built):
    data, (pack, _) = built
    again = ProbePack.open(pack.directory, verify=True)
    assert again.golden_hidden.shape == (building.N_GOLDEN, 1, 12)
    rows = data.where(split="test").nonzero().flatten()
    assert all(any(torch.equal(state[0], data.states[row].float()) for row in rows) for state in again.golden_hidden)
    assert "NOTICE" in (pack.directory / "README.md").read_text()


def test_written_pack_separates_the_toy_concepts_on_held_out_words(built):
    _, (pack, _) = built
    assert [c["id"] for c in pack.concepts] == ["animal.n.01", "plant.n.01", "dog.n.01"]
    assert pack.manifest["quality"]["auroc_median"] > 0.99
    controls = pack.manifest["quality"]["controls"]
    assert 0.4 < controls["input_embedding"]["auroc_median"] < 0.6
    assert controls["shuffled_labels"]["auroc_median"] < 0.9  # three concepts in few dimensions: chance varies widely


def test_common_word_is_weighted_by_the_root_of_its_count(wordnet):
    running = toy_running(wordnet, 400)
    often = replace(running, word=torch.where(running.word >= 0, torch.zeros_like(running.word), running.word))
    rows = torch.arange(400)
    weight = building.weight_of_words(often, rows)
    n = int(often.is_last.sum())
    assert n == 300 and weight[often.is_last].tolist() == pytest.approx([(30 / n) ** 0.5] * n)
    assert (weight[~often.is_last] == 1).all() and (building.weight_of_words(running, rows) == 1).all()


def test_both_alert_sets_hold_on_their_calibration_texts(built):
    data, (pack, _) = built
    assert pack.alert_sets == ("precision_0.9", "rate_0.01")
    rows = data.running.where(split="validation").nonzero().flatten()
    truth = labels_by_distance(data.wordnet, data.running.words, [c["synset"] for c in pack.concepts])
    scores = pack_scores(pack, data.running.states[rows])
    negative = truth.strict[data.running.word[rows]] == 0
    fired = ((scores > pack.with_alert_set("rate_0.01").alert_threshold) & negative).sum(0)
    assert (fired <= 0.01 * negative.sum(0)).all() and (fired + 1 > 0.01 * negative.sum(0)).all()
    assert (pack.thresholds_for("max") >= pack.alert_threshold).all()
    stated = [c["precision"]["precision_0.9"] for c in pack.concepts]
    assert all(0.9 <= value <= 1 for value in stated)
    fires = scores > pack.alert_threshold
    assert fires.any() and float(truth.any_sense[data.running.word[rows]][fires].double().mean()) >= 0.9


def pack_scores(pack, hidden):
    weights = {name: tensor.float() for name, tensor in pack.weights.items()}
    parents = torch.tensor([int(up[0]) if len(up := pack.tree.parents(i)) else -1 for i in range(pack.n_probes)])
    return path_scores(logits_of(rmsnorm(hidden), weights), parents)


def test_measured_scores_equal_those_of_the_library(built):
    _, (pack, _) = built
    ours = pack_scores(pack, pack.golden_hidden[:, 0])
    torch.testing.assert_close(ours, pack.golden_scores, rtol=0, atol=1e-5)


def test_stated_quality_is_measured_again_from_the_files(built):
    data, (pack, _) = built
    stated = dict(pack.manifest["quality"])
    del stated["controls"]
    measured, _ = measure(ProbePack.open(pack.directory), data)
    assert differences(stated, json.loads(json.dumps(measured))) == []
    assert measured["firing_recall_exact"] == 1.0


def test_damaged_weights_lower_the_measured_quality(built):
    data, (pack, _) = built
    spoilt = ProbePack.open(pack.directory)
    spoilt._weights = {**spoilt.weights, "w1": -spoilt.weights["w1"]}
    measured, _ = measure(spoilt, data)
    found = differences(pack.manifest["quality"], measured)
    assert any(line.startswith("auroc_median: stated") for line in found)


def test_poor_concept_is_dropped_and_its_children_move_up(wordnet, monkeypatch):
    data = toy_dataset(wordnet)
    real = building.Bank.validation_auroc
    seen = []

    def poor_animals(self, weights, concepts):
        areas = real(self, weights, concepts)
        if not seen:
            areas[0] = 0.5
        seen.append(len(concepts))
        return areas

    monkeypatch.setattr(building.Bank, "validation_auroc", poor_animals)
    monkeypatch.setattr(building, "SCREENING", Recipe(batch=64, rate=2e-2))
    concepts, dropped = building.select(building.Bank.of(data), LOOSE)
    assert [(c.id, c.level) for c in concepts] == [("plant.n.01", 0), ("dog.n.01", 0)]
    assert dropped == [("animal.n.01", 0.5)] and seen == [3, 2]


# -- the command line, and what is shipped --------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_wordnet_pack", ROOT / "scripts" / "build_wordnet_pack.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shapes_are_read_as_hidden_layers(script):
    assert [script.shape_of(text) for text in ("linear", "32-16", "128-64-1")] == [(), (32, 16), (128, 64)]


@pytest.mark.parametrize("text", ["32", "32-1", "wide", "32-16-2", ""])
def test_unsupported_shape_is_refused(script, text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected linear"):
        script.shape_of(text)


def test_figures_of_other_packs_are_kept(script, tmp_path):
    file = tmp_path / "docs" / "figures.json"
    script.keep_figures(file, "b", {"x": 1})
    script.keep_figures(file, "a", {"x": 2})
    script.keep_figures(file, "b", {"x": 3})
    document = json.loads(file.read_text())
    assert document["packs"] == {"a": {"x": 2}, "b": {"x": 3}} and document["commit"] and document["machine"]


def test_missing_wordnet_ends_with_status_2_and_one_line(script, tmp_path, capsys, monkeypatch):
    def nowhere(args):
        raise wn.WordNetMissing("no WordNet")

    monkeypatch.setattr(script, "build", nowhere)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    assert script.main(["--out", str(tmp_path / "pack")]) == 2
    assert capsys.readouterr().err == "build_wordnet_pack: no WordNet\n"


SHIPPED = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_pack_is_whole_and_states_quality_over_the_bars(name):
    pack = ProbePack.open(ROOT / "probes" / name, verify=True)
    quality = pack.manifest["quality"]
    assert pack.n_probes >= 400 and len(quality["per_level"]) >= 4
    assert quality["auroc_median"] >= 0.95 and quality["auroc_p10"] >= 0.88
    assert quality["auroc_examples_median"] >= 0.88 and quality["auroc_siblings_median"] >= 0.79
    assert quality["firing_recall_exact"] == 1.0 and quality["share_evaluated_exact"] <= 0.25
    assert quality["controls"]["shuffled_labels"]["auroc_median"] < 0.6
    assert sum(file.stat().st_size for file in pack.directory.iterdir()) <= 20e6


@pytest.mark.parametrize("name", SHIPPED)
def test_published_figures_equal_the_shipped_manifest(name):
    """Where they were measured on another machine a few are others, and the file says which."""
    entry = json.loads((ROOT / "docs" / "benchmarks" / "wordnet_pack.json").read_text())["packs"][name]
    found = differences(ProbePack.open(ROOT / "probes" / name).manifest["quality"], entry["quality"])
    assert found == entry.get("differs", []) and len(found) <= 3


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_card_carries_wordnets_notice_and_the_stated_figures(name):
    pack = ProbePack.open(ROOT / "probes" / name)
    card = (pack.directory / "README.md").read_text()
    assert "Permission to use, copy, modify and distribute this software" in card
    assert f"| all | {pack.n_probes} | {pack.manifest['quality']['auroc_median']:.3f} |" in card
