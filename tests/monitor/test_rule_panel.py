"""Rules evaluated together give the same events, in the same order, as rules evaluated one by one."""

import itertools

import numpy as np
import pytest
import torch

from conftest import HIDDEN
from probemon import DynamicProbeManager
from probemon.core.aggregate import named, parse
from probemon.core.scores import GENERATED
from probemon.monitor.rule_panel import RulePanel, blind_to, observe
from probemon.monitor.rule_spec import Rule
from probemon.tracking.align import PlacedTokens


def random_rules(rng, n, n_probes):
    return [
        Rule(
            probe=int(rng.integers(n_probes)),
            above=float(rng.uniform(0.2, 0.7)),
            for_tokens=int(rng.integers(1, 4)),
            aggregator=parse("ema:0.5") if rng.random() < 0.2 else named(None),
            action="record",
            on_blind="record" if rng.random() < 0.2 else "pass",
        )
        for _ in range(n)
    ]


def placed_at(column, n_rows):
    none = np.zeros(n_rows, np.int64)
    return PlacedTokens(np.arange(n_rows), none + column, none, none, GENERATED)


def one_by_one(rules, placed, scores, states):
    """Each rule with what it knows of its rows, as it is asked alone."""
    for number, rule in rules:
        own = states.setdefault(number, {})
        for i, score, value in observe(rule, placed, scores, own):
            yield rule, i, {"score": score, "value": value}
        for i, reason in blind_to(rule, placed, scores):
            yield rule, i, {"blind": reason}


@pytest.mark.parametrize("seed", range(6))
def test_rules_together_give_the_events_of_each_alone(pack, seed):
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    numbered = list(enumerate(random_rules(rng, 30, pack.n_probes)))
    manager = DynamicProbeManager(pack, always_on=[rule.probe for _, rule in numbered])
    panel, n_rows, state = RulePanel(numbered), 3, None
    together, alone, n_met, n_blind = {}, {}, 0, 0
    for step in range(40):
        if step in (15, 30):  # some go, some come; those that stay go on with their streaks
            numbered = [one for one in numbered if rng.random() < 0.7]
            first = 100 * step
            numbered += list(enumerate(random_rules(rng, 8, pack.n_probes), first))
            rng.shuffle(numbered)
            panel = RulePanel(numbered)
        hidden = torch.randn(n_rows, HIDDEN, generator=generator)
        hidden[int(rng.integers(n_rows))] *= float("nan") if rng.random() < 0.2 else 1.0
        state, scores = manager.step(state, hidden)
        placed = placed_at(step, n_rows)
        found = list(panel.ask(placed, scores, lambda number: together.setdefault(number, {})))
        expected = list(one_by_one(numbered, placed, scores, alone))
        assert found == expected
        n_met += sum("score" in known for *_, known in found)
        n_blind += sum("blind" in known for *_, known in found)
        if step in (10, 20):  # rows go over to others, as beams do: values are shared, and not changed in place
            for states in (*together.values(), *alone.values()):
                states[2] = states[0] if 0 in states else states.get(2, ((named(None).begin(),), 0))
    assert n_met > 50 and n_blind > 5


def test_events_are_in_the_order_of_the_rules(pack):
    rules = [Rule(probe, -1.0, 1, named(None), "record") for probe in (7, 2, 7, 5)]
    manager = DynamicProbeManager(pack, always_on=[2, 5, 7])
    _, scores = manager.step(None, torch.randn(2, HIDDEN))
    found = RulePanel(list(enumerate(rules))).ask(placed_at(0, 2), scores, lambda number: {})
    assert [(rule.probe, i) for rule, i, _ in found] == list(itertools.product((7, 2, 7, 5), (0, 1)))
