"""The card of a concept says what its pack says, and nothing else."""

import json
from urllib.parse import quote

import numpy as np
import pytest
import torch

from conftest import make_pack
from probemon.core.score_counts import N_BINS, ScoreCounts
from probemon.ops.server.concept_card import about_concept
from probemon.packs.group import PackGroup
from running_server import demo_tokenizer, tiny_host

THRESHOLD = 0.3


def packed(folder, *, quality=None, lines=None, counts=None):
    """A pack of four roots, of which c2 has the fields of a line and the counts that are given."""
    concepts = [{"id": f"c{i}", "name": f"concept {i}", "parents": []} for i in range(4)]
    concepts[2] |= lines or {}
    counted = None if counts is None else {"each": counts}
    host = tiny_host(demo_tokenizer())
    return make_pack(folder, host, n=4, concepts=concepts, quality=quality, score_counts=counted)


def test_card_has_what_the_concepts_line_and_the_quality_say(tmp_path):
    rate = {"count": 3, "n": 1000, "rate": 0.003, "low": 0.0, "high": 0.01}
    lines = {"definition": "a thing", "lemmas": ["thing", "item"], "words": ["stone", 7, " "], "examples": ["A stone."]}
    quality = {"concepts": {"c2": {"n_positive": 41, "auroc": 0.75}}}
    quality["alerts"] = {"each": {"concepts": {"c2": {"threshold": THRESHOLD, "tokens": rate}}}}
    pack = packed(tmp_path / "full", quality=quality, lines=lines)
    told = about_concept(pack, 2)
    assert (told["definition"], told["synonyms"], told["words"]) == ("a thing", ["thing", "item"], ["stone"])
    assert (told["examples"], told["n_train"], told["auroc"]) == (["A stone."], 41, 0.75)
    assert told["threshold"] == THRESHOLD and told["path"] == ["concept 2"] and told["scores"] is None
    assert told["false_alarms"] == {"rate": 0.003, "n": 1000, "at_most": False}
    bare = about_concept(pack, 1)
    assert {name for name, value in bare.items() if value in (None, [])} == {
        *("definition", "synonyms", "words", "examples", "n_train", "auroc", "precision", "false_alarms", "scores")
    }
    group = PackGroup({"a": packed(tmp_path / "bare"), "b": pack})
    (at,) = [probe for probe, concept in enumerate(group.concepts) if concept["id"] == "b:c2"]
    changed = {"index": at, "id": "b:c2", "name": "b:concept 2", "path": ["b:concept 2"]}
    assert about_concept(group, at) == {**told, **changed}


def test_false_alarms_of_another_threshold_are_not_told_and_counts_bound_them(tmp_path):
    scores = np.random.default_rng(0).beta(1, 4, size=(5000, 4)).astype(np.float32)
    counts = torch.tensor(ScoreCounts.of(scores).counts, dtype=torch.int32)
    other = {"threshold": 0.9, "tokens": {"n": 1000, "rate": 0.001}}
    quality = {"alerts": {"each": {"concepts": {"c2": other}}}}
    pack = packed(tmp_path / "pack", quality=quality, counts=counts)
    told = about_concept(pack, 2)
    over = (scores[:, 2] > np.float32(THRESHOLD)).mean()
    assert told["false_alarms"]["at_most"] and told["false_alarms"]["n"] == 5000
    assert over <= told["false_alarms"]["rate"] < over + 0.06  # a bin is 0.25 wide
    assert len(told["scores"]["counts"]) == N_BINS and sum(told["scores"]["counts"]) == 5000


@pytest.mark.parametrize("index", ["40", "-1", "x", "1.0", "٣", "99999999999"])
def test_unknown_concept_is_a_404(server, index):
    answer = server.ask("GET", f"/v1/probemon/concepts/{quote(index)}")
    assert answer.status == 404 and json.loads(answer.content)["error"]["code"] == "concept_not_found"


def test_route_describes_the_concept_of_that_number(server, served):
    told = server.ask("GET", "/v1/probemon/concepts/7")
    assert json.loads(told.content) == about_concept(served.manager.pack, 7) and told.headers["probemon-boot"]
    assert server.get("/v1/probemon/pack")["max_tokens"] == server.limits.max_tokens
    assert server.ask("GET", "/v1/probemon/concepts/7", Authorization=None).status == 401
