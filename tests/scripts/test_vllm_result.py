"""The claims about vLLM follow from the parts of their result file."""

import json

import pytest

from provenance import ROOT
from vllm_check import COMPARED, holds

RESULT = ROOT / "docs/benchmarks/vllm.json"


def test_every_claim_holds_and_follows_from_its_parts():
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert found["claims"] and all(holds(claim) for claim in found["claims"].values())
    for before, parts in (("", found["parts"]["v2"]), ("v1_", found["parts"]["v1"])):
        assert found["claims"][f"{before}tokens_missing"]["value"] == sum(
            turn["missing"] for name in COMPARED for turn in parts.get(name, {}).get("turns", [])
        ) + parts.get("soak", {}).get("counts", {}).get("missing", 0)


@pytest.mark.parametrize(
    ("value", "bar", "is_held"),
    [(0, "0", True), (1, "0", False), (1e-5, "<= 1e-4", True), (2e-4, "<= 1e-4", False), (0.98, ">= 0.99", False)],
)
def test_claim_holds_if_its_value_meets_its_bar(value, bar, is_held):
    assert holds({"value": value, "bar": bar}) == is_held
