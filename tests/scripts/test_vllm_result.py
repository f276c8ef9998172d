"""What is claimed of vLLM was found by the adapter as it is now."""

import json

import pytest

from staleness import ROOT, definitions
from vllm_adapter import MODULES, adapter_sha256
from vllm_check import COMPARED, holds

RESULT = ROOT / "docs/benchmarks/vllm.json"


def test_the_result_is_of_the_adapter_as_it_is():
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert found["adapter"] == adapter_sha256(), (
        "the adapter for vLLM means something else than what docs/benchmarks/vllm.json was made with: run"
        " `bash scripts/vllm_check.sh`, which runs the real engine (half an hour on 2 cores), and commit what it writes"
    )


def test_every_claim_holds_and_is_what_its_parts_say():
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert found["claims"] and all(holds(claim) for claim in found["claims"].values())
    assert found["claims"]["tokens_missing"]["value"] == sum(
        turn["missing"] for name in COMPARED for turn in found["parts"].get(name, {}).get("turns", [])
    ) + found["parts"].get("soak", {}).get("counts", {}).get("missing", 0)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_of_the_adapter_has_a_meaning_to_hash(module):
    assert definitions((ROOT / module).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("value", "bar", "is_held"),
    [(0, "0", True), (1, "0", False), (1e-5, "<= 1e-4", True), (2e-4, "<= 1e-4", False), (0.98, ">= 0.99", False)],
)
def test_a_bar_is_held_or_not(value, bar, is_held):
    assert holds({"value": value, "bar": bar}) == is_held
