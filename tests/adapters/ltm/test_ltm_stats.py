"""Every memory metric equals a token-by-token count in plain Python, in fp64."""

import re
from pathlib import Path

import pytest
import torch

from probemon.adapters.ltm.config import MemoryShape
from probemon.adapters.ltm.memory import SlotMemory
from probemon.adapters.ltm.stats import stats_of
from slot_oracle import SlotOracle

PAGE = Path(__file__).parents[3] / "docs/memory-and-routing.md"
# Metrics with tests of their own, in tests/adapters/ltm/test_ltm_recall.py
ELSEWHERE = {"contribution", "provenance", "alerts"}


@pytest.mark.parametrize(
    ("n_tokens", "sizes"),
    [
        (80, {"slots": 7, "segment": 6, "adaptive_mass": 0.6, "decay": 0.8}),  # 13 segments, of which 8 count
        (80, {"slots": 7, "segment": 6}),
        (23, {"slots": 3, "segment": 5, "compression": 1.0}),  # fewer segments than count
        (30, {"slots": 40, "segment": 6, "compression": 0.5}),  # nothing is ever replaced, most slots are empty
    ],
)
def test_every_metric_equals_a_count_in_plain_python(n_tokens, sizes):
    torch.manual_seed(0)
    memory = SlotMemory(MemoryShape(16, memory_dim=5, **sizes)).double().eval()
    with torch.no_grad():
        memory.surprise_weight.fill_(1.3)
        memory.write_gate.weight.mul_(4)
        memory.log_sharpness.fill_(3.0)
        hidden = torch.randn(2, n_tokens, 16, dtype=torch.float64)
        valid = torch.ones(2, n_tokens, dtype=torch.bool)
        valid[1, :4] = False  # padding counts nowhere
        state = memory(hidden, None, valid).state
    rows = stats_of({1: state}, {1: memory})["memories"]
    for row, begin in zip(rows, (0, 4), strict=True):
        oracle = SlotOracle(memory)
        oracle.forward(hidden[row["row"], begin:].numpy())
        metrics, shares = oracle.metrics()
        # Strengths and p are kept in fp32.
        assert {name: row[name] for name in metrics} == pytest.approx(metrics, abs=1e-5, rel=1e-5, nan_ok=True)
        assert row["n_tokens"] == n_tokens - begin
        for slot in row["provenance"]:
            assert slot["share"] == pytest.approx(shares[slot["slot"]], abs=1e-6)
            assert slot["position"] == oracle.slots[slot["slot"]][4]
    table = PAGE.read_text().split("| name | meaning |")[1].split("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if line else "")}
    assert named - ELSEWHERE == set(metrics)
