"""Summaries of sentences and answers equal a token-by-token recomputation."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from conftest import make_pack
from probemon import DynamicProbeManager
from probemon.errors import ConfigError
from probemon.lab.calibration.calibrate import calibrate_alerts
from probemon.lab.calibration.calibrated_pack import write_calibrated
from probemon.monitor.summary import _bounds, summarise

WORDS = ["the", " cat", " sat", ".", "\n", " It", " was", " warm", "!", ' "', "Yes", ".", '"', " And", " so", " on"]


class Tokenizer:
    """Token i is a word of WORDS, the 61 of them by turns."""

    def decode(self, ids, **options):
        return "".join(WORDS[int(i) % len(WORDS)] for i in ids)


@pytest.fixture(scope="module")
def manager(model, tmp_path_factory):
    return DynamicProbeManager(
        make_pack(tmp_path_factory.mktemp("s") / "p", model, alert_threshold=torch.full((40,), 0.2))
    )


def run_over(manager, model, ids):
    with manager.attach(model, Tokenizer()) as run, torch.no_grad():
        model(torch.tensor([ids]))
    return run.result(torch.tensor([ids]))


def test_sentences_end_at_stops_and_newlines_and_cover_the_text(manager, model):
    result = run_over(manager, model, list(range(16)))
    summary = summarise(result, phase=None)
    assert [s.text for s in summary.sentences] == ["the cat sat.\n", " It was warm!", ' "Yes.', '" And so on']
    assert "".join(s.text for s in summary.sentences) == summary.answer.text == "".join(WORDS)
    assert [(s.start, s.stop) for s in summary.sentences][0] == (0, 5)
    assert summary.sentences[-1].stop == summary.answer.stop == 16


@pytest.mark.parametrize(
    ("texts", "sentences"),
    [
        (["See", " Dr", ".", " Wu", " vs", ".", " J", "."], ["See Dr. Wu vs. J."]),
        (["Two", ":", "\n", "1", ".", " Cats", ".", " 2", "0", "1", "6", "."], ["Two:\n", "1. Cats.", " 2016."]),
        (["A", " mast", ".", " e", ".g", ".", " So"], ["A mast.", " e.g. So"]),
        (["1", "2", "3", "4", ".", " Yes"], ["1234.", " Yes"]),
    ],
)
def test_full_stop_after_an_abbreviation_or_list_number_ends_no_sentence(texts, sentences):
    assert ["".join(texts[a:b]) for a, b in _bounds(texts)] == sentences


@pytest.mark.parametrize("name", ["each", "max"])
def test_concepts_of_a_sentence_are_those_over_their_threshold_in_it(manager, model, tmp_path, name):
    if name == "max":
        pack = make_pack(tmp_path / "p", model, aggregated={"max": torch.full((40,), 0.35)})
        manager = DynamicProbeManager(pack)
    result = run_over(manager, model, [5, 9, 3, 20, 31, 7, 19, 44, 2, 16, 50, 8])
    summary = summarise(result, phase=None, k=40)
    assert summary.thresholds == name and len(summary.sentences) > 1
    threshold = manager.pack.thresholds_for(name)
    tree, all_found = manager.pack.tree, {}
    for sentence in summary.sentences:
        best = {}
        inside = [i for i in range(len(result)) if sentence.start <= result.position[i] < sentence.stop]
        assert sentence.n_firing == sum(len(result.scores.fired(i)) > 0 for i in inside)
        for i in inside:
            values = zip(result.scores.active(i).tolist(), result.scores.active_scores(i).tolist(), strict=True)
            for probe, value in values:
                if value > threshold[probe] and value > best.get(probe, (0,))[0]:
                    best[probe] = value, int(result.position[i])
        lowest = {p for p in best if not any(p in tree.path(q)[:-1] for q in best)}
        assert {(c.probe, c.score, c.position) for c in sentence.concepts} == {(p, *best[p]) for p in lowest}
        strength = [c.strength for c in sentence.concepts]
        assert strength == sorted(strength, reverse=True)
        for probe in lowest:
            all_found[probe] = max(all_found.get(probe, (0,)), best[probe])
    assert all_found
    expected = {p for p in all_found if not any(p in tree.path(q)[:-1] for q in all_found)}
    assert {(c.probe, c.score) for c in summary.answer.concepts} == {(p, all_found[p][0]) for p in expected}
    assert len({c.probe for c in summary.answer.concepts}) == len(summary.answer.concepts)
    for name in ("n_unseen", "n_far", "n_firing"):
        assert getattr(summary.answer, name) == sum(getattr(sentence, name) for sentence in summary.sentences)


def test_sentence_lists_at_most_k_concepts_and_an_empty_phase_none(manager, model):
    result = run_over(manager, model, [5, 9, 3, 20, 31, 7])
    assert max(len(s.concepts) for s in summarise(result, phase=None, k=1).sentences) == 1
    nothing = summarise(result, phase="generated")
    assert nothing.sentences == () and nothing.answer.text == "" and nothing.answer.concepts == ()
    with pytest.raises(ConfigError, match="k is 0"):
        summarise(result, k=0)
    with pytest.raises(ConfigError, match="phase"):
        summarise(result, phase="answer")


class Pieces:
    """Bytes of "é" are two tokens; a first token loses its space, as some tokenizers have it."""

    words: ClassVar = {1: b" a", 2: b" \xc3", 3: b"\xa9", 4: b" b", 5: b""}

    def decode(self, ids, **options):
        return b"".join(self.words[int(i)] for i in ids).decode(errors="replace").removeprefix(" ")


def test_byte_pieces_join_into_characters_and_spaces_stay(manager, model):
    ids = torch.tensor([[1, 2, 3, 5, 4, 4]])
    with manager.attach(model, Pieces()) as run, torch.no_grad():
        model(ids)
    result = run.result(ids)
    assert result.texts(result.tokens_of(0)) == ["a", "", " é", "", " b", " b"]
    assert result.texts(np.array([0, 1])) == ["a", " \ufffd"]  # half of one: the space before it stays


def test_second_turn_on_a_cache_is_summarised_alone(manager, model):
    cache, turn = DynamicCache(), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with manager.attach(model, Tokenizer()) as run:
        first = model.generate(torch.tensor([[5, 9, 3]]), past_key_values=cache, **turn)
        ids = torch.cat([first, torch.tensor([[31, 7]])], dim=1)
        out = model.generate(ids, past_key_values=cache, **turn)
    result = run.result(out)
    answer = summarise(result).answer
    assert (answer.start, answer.stop, answer.text) == (13, 21, Tokenizer().decode(out[0, 13:]))
    assert result.tokens_of(0, "generated").tolist() == list(range(13, 21))
    assert all(concept.position >= 13 for concept in (*answer.concepts, *result.top(40, phase="generated")))
    assert run.result(first).tokens_of(0, "generated").tolist() == list(range(3, 11))


def test_precision_is_that_of_the_current_alert_set(model, tmp_path):
    concepts = [
        {"id": f"c{i}", "name": "c", "parents": [], "precision": stated}
        for i, stated in enumerate([{"a": 0.93}, {"b": 0.5}, {"a": "high"}, 0.9, {"a": True}])
    ]
    pack = make_pack(
        tmp_path / "p",
        model,
        n=5,
        concepts=concepts,
        alert_set="a",
        alert_sets={"b": torch.full((5,), 0.5)},
    )
    shown = [pack.precision(i) for i in range(5)]
    assert shown[0] == 0.93 and all(math.isnan(value) for value in shown[1:])
    assert pack.with_alert_set("b").precision(1) == 0.5
    group = DynamicProbeManager({"x": pack, "y": pack}).pack
    assert group.precision(group.find("y:c0")) == 0.93


def listed(summary):
    return {concept.concept for sentence in summary.sentences for concept in sentence.concepts}


def fired_in(result):
    return {result.pack.concepts[probe]["id"] for t in range(len(result)) for probe in result.scores.fired(t).tolist()}


def test_no_firing_concept_is_hidden_by_thresholds_of_others(model, tmp_path):
    """Thresholds for a sentence of some concepts, of another alert set, or from before a calibration."""
    ids, options = [5, 9, 3, 20, 31, 7, 19, 44, 2, 16, 50, 8], {"phase": None, "k": 40}
    some = torch.full((40,), torch.nan)
    some[7] = 0.99
    each = {"alert_threshold": torch.full((40,), 0.2)}
    pack = make_pack(tmp_path / "some", model, aggregated={"max": some}, **each)
    result = run_over(DynamicProbeManager(pack), model, ids)
    lowest = summarise(
        run_over(DynamicProbeManager(make_pack(tmp_path / "none", model, **each)), model, ids), **options
    )
    assert listed(lowest) - {"c7"} <= listed(summarise(result, **options)) and len(listed(lowest)) > 3
    # With another set its own thresholds hold, in a sentence too.
    sets = {"alert_set": "strict", "alert_sets": {"loose": torch.full((40,), 0.05)}}
    both = make_pack(tmp_path / "sets", model, aggregated={"max": torch.full((40,), 0.9)}, **each, **sets)
    loose = both.with_alert_set("loose")
    assert loose.aggregated == () and loose.with_alert_set("strict").aggregated == ("max",)
    result = run_over(DynamicProbeManager(loose), model, ids)
    summary = summarise(result, **options)
    assert summary.thresholds == "each"
    said = {loose.find(concept) for concept in listed(summary)}
    said |= {above for probe in said for above in loose.tree.ancestors(probe)}
    assert {loose.concepts[probe]["id"] for probe in said} >= fired_in(result) >= listed(summary)
    assert len(listed(summary)) > len(listed(lowest))
    # A token's own thresholds, calibrated since, are not hidden by older ones for a sentence.
    alerts = calibrate_alerts([np.full((400, 2), 0.1, dtype=np.float32)], fpr=0.05, family="each", unit="token")
    calibrated = write_calibrated(both, tmp_path / "calibrated", alerts=alerts, watched=[3, 4])
    thresholds = calibrated.thresholds_for("max")
    assert thresholds[[3, 4]].isnan().all() and int(thresholds.isnan().sum()) == 2
    # A strength is said over the threshold that was exceeded.
    bare = make_pack(
        tmp_path / "bare",
        model,
        alert_threshold=torch.full((40,), torch.nan),
        aggregated={"max": torch.full((40,), 0.2)},
    )
    strengths = [
        c.strength for c in summarise(run_over(DynamicProbeManager(bare), model, ids), **options).answer.concepts
    ]
    assert strengths == sorted(strengths, reverse=True) and len(strengths) > 3 and min(strengths) > 0


def test_lower_sentence_threshold_is_reached_and_reported(model, tmp_path):
    """Concepts that exceed it at no alert of a token are found as where every probe is scored, with no share right."""
    ids, options = [5, 9, 3, 20, 31, 7, 19, 44, 2, 16, 50, 8], {"phase": None, "k": 40}
    lower = torch.full((40,), torch.nan)
    lower[10:30] = 0.02
    concepts = [{"id": f"c{i}", "name": "c", "parents": [f"c{i // 2}"] * (i >= 4)} for i in range(40)]
    pack = make_pack(
        tmp_path / "p",
        model,
        concepts=[{**concept, "precision": {"a": 0.9}} for concept in concepts],
        alert_set="a",
        alert_threshold=torch.full((40,), 0.5),
        aggregated={"max": lower},
    )
    exact = DynamicProbeManager(pack, load_threshold="exact")
    every = run_over(DynamicProbeManager(pack, load_threshold=-1.0, max_loaded_probes=40), model, ids)
    result = run_over(exact, model, ids)
    assert result.coverage.active.sum() < every.coverage.active.sum() == 40 * len(ids)
    summary = summarise(result, **options)
    assert repr(summary) == repr(summarise(every, **options)) and summary.n_lower == 20  # with NaN
    found = [concept for sentence in summary.sentences for concept in sentence.concepts]
    low = [concept for concept in found if 10 <= concept.probe < 30]
    assert any(concept.score < 0.5 for concept in low) and all(math.isnan(concept.precision) for concept in low)
    assert all(concept.precision == 0.9 for concept in found if concept not in low)
    shown = np.where(np.arange(40) % 4 == 0, -math.inf, math.inf)  # five of those with a threshold for a sentence
    assert summarise(result, **options, above=shown).n_lower == 5
    few = summarise(result, phase=None, k=1)
    for one, whole in zip(few.sentences, summary.sentences, strict=True):
        assert (
            repr(one.concepts) == repr(whole.concepts[:1])
            and one.n_more == len(whole.concepts) - 1
            and whole.n_more == 0
        )


@pytest.mark.parametrize("of_sentences", [0.2, 0.8])
def test_shown_concepts_exceed_their_threshold_by_the_stated_strength(model, tmp_path, of_sentences):
    ids, options = [5, 9, 3, 20, 31, 7, 19, 44, 2, 16, 50, 8], {"phase": None, "k": 40}
    pack = make_pack(
        tmp_path / "p",
        model,
        alert_threshold=torch.full((40,), 0.5),
        aggregated={"max": torch.full((40,), of_sentences)},
    )
    result = run_over(DynamicProbeManager(pack, load_threshold=-1.0, max_loaded_probes=40), model, ids)
    above = np.full(40, 1 / (1 + math.exp(-0.5)))  # a strength of .5 at tokens
    above[::3] = math.inf
    every, some = (summarise(result, **options, above=one).sentences for one in (None, above))
    for stretch, whole in zip(some, every, strict=True):
        assert all(concept.strength > 0.5 and concept.probe % 3 for concept in stretch.concepts)
        shown = {concept.probe for concept in stretch.concepts}
        over = {c.probe for c in whole.concepts if c.strength > 0.5 and c.probe % 3}
        assert over <= shown and (shown or not over)
    assert any(stretch.concepts for stretch in some)


def test_full_stop_inside_a_number_ends_no_sentence():
    bounds = _bounds(["It", " is", " 3", ".", "14", ".", " Then", "."])
    assert bounds == [(0, 6), (6, 8)]
