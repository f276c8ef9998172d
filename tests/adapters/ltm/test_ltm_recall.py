"""The shipped memory model recalls beyond its window; its metrics and alerts have known values."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ltm_recall
from probemon.adapters.ltm import LtmForCausalLM, memory_of, recall_host
from probemon.adapters.ltm.stats import entropy, key_metrics, memory_alerts, metrics_of_sums

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def host():
    return recall_host()


@pytest.fixture(scope="module")
def ids():
    return ltm_recall.sequences(8, 150, torch.Generator().manual_seed(3))[0]


@pytest.mark.parametrize("gap", [24, 384])
def test_shipped_model_recalls_and_reads_the_token_that_it_answers_with(host, gap):
    outcome = ltm_recall.recall(host, gap, n_queries=256, seed=3)
    assert outcome["recall"] >= 0.99 and outcome["provenance"] >= 0.99


@pytest.mark.parametrize("kind", ["four pairs", "one token later", "twelve pairs"])
def test_shipped_model_recalls_what_was_told_just_before_the_question(host, kind):
    for filler in range(4):
        assert ltm_recall.answered(host, kind, filler, n_queries=256, seed=3)["newest"] >= 0.98, filler


@pytest.mark.parametrize("options", [{}, {"before": 3, "again": 4}])
def test_newest_and_first_values_are_those_that_were_told(options):
    drawn = ltm_recall.tellings(40, 5, torch.Generator().manual_seed(0), **options)
    for row, (*told, ask, key) in enumerate(drawn.ids.tolist()):
        values = [at + 1 for at, token in enumerate(told) if token == key]
        assert (drawn.first[row], drawn.newest[row], drawn.told[row]) == (values[0], values[-1], len(values))
        assert ask == ltm_recall.ASK and len({told[at] for at in values}) == len(values)
        assert all(ltm_recall.VALUES <= told[at] < ltm_recall.FILLER for at in values)


def test_model_without_its_memory_and_its_twin_only_guess():
    closed = recall_host()
    for memory in closed.memories.values():
        memory.closed = True
    for model in (closed, LtmForCausalLM.from_pretrained(ltm_recall.TWIN)):
        assert ltm_recall.recall(model, 24, n_queries=512, seed=3)["recall"] <= 0.12


def test_figures_of_the_page_equal_the_result_file():
    found = json.loads((ROOT / "docs/benchmarks/ltm_shipped.json").read_text())
    whole = (ROOT / "docs/memory-and-routing.md").read_text()
    page = whole.split("| recall of 1,024 queries |")[1].split("\n\n")[0]
    lines = [line.split("|")[2].strip() for line in page.splitlines() if line.startswith("|") and line.endswith("% |")]
    names = ("memory_off", "window_only", "provenance")
    for kind in ("four pairs", "told twice"):
        shares = " | ".join(f"{row['newest']:.3f}" for row in found["by_filler"][kind])
        assert f"\n| {kind} | {shares} |\n" in whole
    least = min(row["newest"] for kind in ("one token later", "twelve pairs") for row in found["by_filler"][kind])
    again = [row["newest"] for row in found["by_filler"]["told twice"]]
    assert f"at least {least:.3f}" in " ".join(whole.split())
    screen = " ".join(whole.split("```")[0].split())
    assert f"newest value in {100 * min(again):.0f} to {100 * max(again):.0f} %" in screen
    assert found["passed"] and lines == [f"{found[name]:.1%}".replace("%", " %") for name in names]


def test_page_examples_print_the_shown_output(capsys):
    page = (ROOT / "docs/memory-and-routing.md").read_text().split("\n## Memory slots\n")[1]
    names = {}
    for code, shown in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, flags=re.DOTALL):
        exec(code, names)
        assert capsys.readouterr().out == shown


def read_metrics(p):
    """Metrics of reads [N, 1 + M], the null slot first, from their sums."""
    slots = np.asarray(p, dtype=np.float64)[:, 1:]
    entropies = entropy(slots / slots.sum(axis=1, keepdims=True))
    return metrics_of_sums(slots.sum(axis=0), len(p), sum(row[0] for row in p), entropies.sum(), len(p))


def test_read_metrics_equal_the_oracle():
    reads = read_metrics([[0.1, 0.7, 0.1, 0.1, 0], [0.1, 0.2, 0.6, 0.1, 0], [0.85, 0.05, 0.05, 0.05, 0]])
    expected = {
        "marginal_entropy": 0.981195411, "effective_slots": 2.667643266, "read_entropy": 0.877012251,
        "mutual_information": 0.104183160, "null_share": 0.35, "utilization": 0.75,
    }  # fmt: skip
    for name, value in expected.items():
        assert reads[name] == pytest.approx(value, abs=1e-9)


def test_key_metrics_equal_the_oracle():
    metrics = key_metrics(np.sin(20 + 1.7 * np.arange(12)).reshape(4, 3))
    assert metrics["redundancy"] == pytest.approx(0.612644951, abs=1e-9)
    assert metrics["effective_rank"] == pytest.approx(1.868136870, abs=1e-9)


@torch.no_grad()
def test_memory_statistics_equal_the_reads_of_the_memory(host, ids):
    """Of one row of 13 segments: what get_memory_stats() says of the newest 8 and the open one, from p itself."""
    memory = host.memories[1]
    outputs = []
    hook = memory.register_forward_hook(lambda module, args, output: outputs.append((args[4], output)))
    cache = host(ids[:1]).past_key_values
    hook.remove()
    [(stream, output)] = outputs
    c, p = memory.shape.segment, output.reads[0].double().numpy()
    share = output.update.norm(dim=-1) / stream.norm(dim=-1)
    begin = (ids.shape[1] // c - 8) * c
    row = host.get_memory_stats()["memories"][0]
    for name, value in read_metrics(p[begin:]).items():
        assert row[name] == pytest.approx(value, abs=1e-9), name
    state = memory_of(cache)[1]
    keys = state.keys[0][state.strength[0] > 0]
    assert row["redundancy"] == pytest.approx(key_metrics(keys.double().numpy())["redundancy"], abs=1e-9)
    assert row["contribution"] == pytest.approx(float(share.double().mean()), abs=1e-9)
    assert row["strength_mean"] == pytest.approx(
        float(state.strength[0][state.strength[0] > 0].double().mean()), abs=1e-9
    )
    for slot in row["provenance"]:
        assert int(ids[0, slot["position"]]) == slot["token"]


@torch.no_grad()
def test_healthy_sequences_raise_no_alert_and_each_fault_raises_its_own(host, ids):
    memory, states = host.memories[1], memory_of(host(ids).past_key_values)[1]
    for row in range(len(ids)):
        assert memory_alerts(states.rows(torch.tensor([row])), memory) == []
    one = states.rows(torch.tensor([0]))
    first = torch.zeros_like(one.history_mass)
    first[..., 0] = 9.0
    read = one.history.clone()
    read[..., :4] = torch.tensor([12.0, 3.0, 0.0, 12.0], dtype=torch.float64)
    silent = one.history.clone()
    silent[..., 5], silent[..., 10] = 0, 0.9
    unread = one.history_mass.clone()
    unread[..., 3:] = 0
    busy = one.history.clone()
    busy[..., 1] = 0.3 * busy[..., 0]
    faults = {
        "not finite": replace(one, values=one.values * torch.nan),
        "redundant": replace(one, keys=one.keys[:, :1].expand_as(one.keys)),
        "read collapse": replace(one, history_mass=first, history=read),
        "dead slots": replace(one, history_mass=unread, history=busy),
        "nothing written": replace(one, history=silent),
    }
    for kind, state in faults.items():
        assert kind in memory_alerts(state, memory), kind
