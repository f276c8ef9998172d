"""pack_diff names whatever differs between two packs that are otherwise alike."""

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_model, make_pack
from probemon.core.drift_reference import DriftReference
from probemon.core.familiarity import Familiar
from probemon.core.request_counts import N_NORM_BINS, N_SCORE_BINS, RequestCounts
from probemon.packs.copies import copy_pack
from probemon.packs.diff import pack_diff

N = 5
IDS = [f"c{i}" for i in range(N)]
CONCEPTS = [{"id": id, "name": id, "parents": [], "precision": {"A": 0.9}, "words": ["a", "b"]} for id in IDS]
COUNTS = torch.ones(N, 128, dtype=torch.int32)
TOP = {"id": "c0", "name": "c0", "parents": []}
DIAMOND = [TOP, {**TOP, "id": "c1", "name": "c1"}, *({**CONCEPTS[i], "parents": ["c0", "c1"]} for i in (2, 3, 4))]


def last(values, value):
    changed = values.clone()
    changed[-1] = value
    return changed


def with_last(**changes):
    return [*CONCEPTS[:-1], {**CONCEPTS[-1], **changes}]


def familiar(limit, at=0.0):
    return [Familiar(torch.full((HIDDEN,), at), torch.zeros(2, HIDDEN, dtype=torch.float16), limit)]


def with_drift(pack, path, n=3, fired=0, norm_bin=0):
    highest, norms = np.zeros((N, N_SCORE_BINS), dtype=np.int64), np.zeros((1, N_NORM_BINS), dtype=np.int64)
    highest[:, 0], norms[0, norm_bin] = n, n
    zeros = np.zeros(N, dtype=np.int64)
    counts = RequestCounts(n, np.array([0] * (N - 1) + [fired]), zeros, zeros, zeros, highest, norms)
    reference = DriftReference(tuple(IDS), np.arange(N), ("resid_post.1",), counts, {"model": "m"}, {}, "A", None)
    return copy_pack(pack, path, "Counted.", {}, drift=reference)


BASE = {
    "concepts": CONCEPTS,
    "alert_threshold": torch.full((N,), 0.3),
    "alert_set": "A",
    "alert_sets": {"B": torch.full((N,), 0.4)},
    "aggregated": {"ema(0.3)": torch.full((N,), 0.2)},
    "score_counts": {"each": COUNTS},
    "familiar": familiar(3.0),
    "recommended": {"load_threshold": 0.3},
    "golden_hidden": torch.zeros(2, 1, HIDDEN),
}
OF_ALL = {
    "alert_set": {"alert_set": "C"},
    "alert_sets": {"alert_sets": {**BASE["alert_sets"], "unmeasured": torch.full((N,), float("nan"))}},
    "aggregated": {"aggregated": {**BASE["aggregated"], "max": torch.full((N,), float("nan"))}},
    "counted": {"score_counts": {"each": COUNTS, "max": torch.zeros_like(COUNTS)}},
    "recommended": {"recommended": {"load_threshold": 0.31}},
    "inputs": {"inputs": [{"site": "resid_post.1", "norm": "rmsnorm", "eps": 1e-5}]},
    "familiar": {"familiar": familiar(0.5)},
    "golden_hidden": {"golden_hidden": torch.ones(2, 1, HIDDEN)},
    "scope": {"scope": "so far"},
    "host": {"host": {"hidden_size": HIDDEN}},
    "licence": {"licence": "MIT"},
    "score_rule": {"rule": "independent"},
}
OF_ONE = {
    "precision": {"concepts": with_last(precision={"A": 0.1})},
    "words": {"concepts": with_last(words=["b", "a"])},
    "definition": {"concepts": with_last(definition="new")},
    "bounding": {"concepts": with_last(bounding=True)},
    "alert_threshold": {"alert_threshold": last(BASE["alert_threshold"], 0.31)},
    "expand_threshold": {"expand_threshold": last(torch.full((N,), float("nan")), 0.1)},
    "alert_threshold@B": {"alert_sets": {"B": last(BASE["alert_sets"]["B"], 0.41)}},
    "alert_threshold:ema(0.3)": {"aggregated": {"ema(0.3)": last(BASE["aggregated"]["ema(0.3)"], 0.21)}},
    "score_counts:each": {"score_counts": {"each": last(COUNTS, COUNTS[0].flip(0) + 1)}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("packs") / "a", make_model(), n=N, **BASE)


def other(tmp_path, **changes):
    return make_pack(tmp_path / "b", make_model(), n=N, **{**BASE, **changes})


def test_packs_with_the_same_content_are_alike_whatever_their_cards_say(base, tmp_path):
    difference = pack_diff(base, other(tmp_path, card="# another\n", provenance={"by": "me"}, quality={"auroc": 1.0}))
    assert difference.same and difference.n_same == N and not difference.about


@pytest.mark.parametrize("key", OF_ALL)
def test_difference_of_whole_packs_is_named(base, tmp_path, key):
    difference = pack_diff(base, other(tmp_path, **OF_ALL[key]))
    assert not difference.same and key in difference.about
    a, b = difference.about[key]
    assert a != b and f"{key}: " in str(difference)


@pytest.mark.parametrize("key", OF_ONE)
def test_difference_of_one_concept_is_named_with_that_concept_only(base, tmp_path, key):
    difference = pack_diff(base, other(tmp_path, **OF_ONE[key]))
    assert list(difference.changed) == ["c4"] and list(difference.changed["c4"]) == [key] and not difference.about
    a, b = difference.changed["c4"][key]
    assert (a != b or key.startswith("score_counts:")) and f"{key} of 1 concept differ: c4" in str(difference)


def test_familiarity_states_differ_even_with_the_same_limit(base, tmp_path):
    (a,), (b,) = pack_diff(base, other(tmp_path, familiar=familiar(3.0, at=1.0))).about["familiar"]
    assert a["limit"] == b["limit"] == 3.0 and a["states"] != b["states"]


def test_drift_counts_differ_by_number_concept_and_site(base, tmp_path):
    counted = with_drift(base, tmp_path / "a")
    assert pack_diff(counted, with_drift(base, tmp_path / "same")).same
    assert list(pack_diff(base, counted).about) == ["drift"] and not pack_diff(base, counted).changed
    text = str(pack_diff(counted, with_drift(base, tmp_path / "norms", norm_bin=7)))
    assert text.startswith("drift: {'norms': {'resid_post.1': '") and "n_requests" not in text
    assert pack_diff(counted, with_drift(base, tmp_path / "fired", fired=1)).changed == {"c4": {"drift": [0, 1]}}
    of_more = pack_diff(counted, with_drift(base, tmp_path / "more", n=4)).about["drift"]
    assert [stated["n_requests"] for stated in of_more] == [3, 4]


def test_changed_first_parent_of_a_path_is_named(tmp_path):
    unlike = {**BASE, "golden_hidden": None}
    a = make_pack(tmp_path / "a", make_model(), n=N, **{**unlike, "concepts": DIAMOND})
    order = [1, 0, 2, 3, 4]
    parameters = {name: tensor[order] for name, tensor in a.weights.items()}
    b = make_pack(
        tmp_path / "b",
        make_model(),
        n=N,
        **{**unlike, "concepts": [DIAMOND[i] for i in order], "weights": parameters},
    )
    assert pack_diff(a, b).changed == {id: {"first_parent": ["c0", "c1"]} for id in ("c2", "c3", "c4")}


def test_change_of_a_parent_shows_in_golden_scores_below_it(tmp_path):
    below = {"concepts": [TOP, *({**concept, "parents": ["c0"]} for concept in CONCEPTS[1:])], "n": N}
    a = make_pack(tmp_path / "a", make_model(), **below)
    weights = {**a.weights, "b3": a.weights["b3"].clone()}
    weights["b3"][0] -= 1
    changed = pack_diff(a, make_pack(tmp_path / "b", make_model(), **below, weights=weights)).changed
    assert list(changed["c0"]) == ["golden_scores", "weights"] and list(changed["c3"]) == ["golden_scores"]
    apart = (torch.sigmoid(torch.tensor(1.0)) - 0.5) * 2  # no score moves further for a logit less by one
    assert 0 < changed["c3"]["golden_scores"] <= changed["c0"]["golden_scores"] < apart
