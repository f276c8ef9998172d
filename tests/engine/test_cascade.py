"""The cascade against a plain-Python oracle: dicts and a loop, one hidden state, one probe at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade_oracle import cascade_oracle
from probemon.core.branches import watched_probes, without
from probemon.core.hierarchy import ConceptTree
from probemon.core.plan import CascadePlan, expand_thresholds
from probemon.core.settings import CascadeConfig
from probemon.engine.cascade import apply_rule, descend, retain
from probemon.errors import ConfigError

TICKS = [np.float32(v) for v in (0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0)]  # few values: ties are common


def watched_by(parents, include, exclude, depth):
    """The probes that are watched, by the words of the settings."""
    n = len(parents)

    def above(p):
        return set(parents[p]) | {a for q in parents[p] for a in above(q)}

    def steps(p, top):
        longest = [steps(q, top) for q in parents[p]]
        known = [length for length in longest if length is not None]
        return 0 if p == top else max(known) + 1 if known else None

    def is_under(p, tops):
        return p in tops or bool(above(p) & set(tops))

    too_deep = {p for p in range(n) for top, most in depth.items() if (steps(p, top) or 0) > most}
    wanted = {p for p in range(n) if not include or is_under(p, include)}
    wanted |= {a for p in wanted for a in above(p)}
    return {p for p in wanted if not is_under(p, set(exclude) | too_deep)}


@st.composite
def cases(draw):
    n = draw(st.integers(1, 14))
    dag = draw(st.booleans())
    ids = [str(i) for i in range(n)]
    above = [
        draw(st.lists(st.sampled_from(ids[:i]), max_size=2 if dag else 1, unique=True)) if i else [] for i in range(n)
    ]
    levels = draw(
        st.none() | st.lists(st.integers(0, 3), min_size=n, max_size=n)
    )  # stated levels need not grow along edges
    _, tree = ConceptTree.build(ids, above, levels)
    base = (
        draw(st.lists(st.sampled_from(sorted(set(tree.level.tolist()))), min_size=1, max_size=2, unique=True))
        if levels
        else [0]
    )
    path = draw(st.booleans())
    ticks = st.sampled_from(TICKS)
    alert = np.array(draw(st.lists(ticks, min_size=n, max_size=n)), dtype=np.float32)
    rule = draw(st.sampled_from(["exact", "calibrated", 0.3, 0.25] if path else ["calibrated", 0.3, 0.25]))
    always_on = draw(st.lists(st.integers(0, n - 1), max_size=2, unique=True))
    config = CascadeConfig(
        base_layers=tuple(base),
        load_threshold=rule,
        keep_top_k=draw(st.integers(0, 5)),
        aggressive_pruning=draw(st.booleans()),
        max_loaded_probes=draw(st.integers(1, 16)),
        unload_threshold=float(draw(ticks)),
        max_rounds=draw(st.sampled_from([None, 0, 1, 2])),
    )
    rows = draw(st.integers(1, 4))
    own = np.array(draw(st.lists(ticks, min_size=n * rows, max_size=n * rows)), dtype=np.float32).reshape(rows, n)
    later = np.array(draw(st.lists(ticks, min_size=n * rows, max_size=n * rows)), dtype=np.float32).reshape(rows, n)
    some = st.lists(st.integers(0, n - 1), max_size=2)
    part = draw(some), draw(some), draw(st.dictionaries(st.integers(0, n - 1), st.integers(0, 2), max_size=2))
    return tree, path, alert, config, always_on, own, later, part


def plan_of(tree, path, alert, config, always_on, watched):
    """The plan of a case, or None where its settings do not fit its hierarchy."""
    rule = "path" if path else "independent"
    thresholds = expand_thresholds(tree, rule, config.load_threshold, alert, alert, None)
    try:
        return CascadePlan.of(tree, rule, config, thresholds, always_on, watched)
    except ConfigError:
        return None


@settings(max_examples=150, deadline=None)
@given(cases())
def test_cascade_equals_oracle_over_two_steps(case):
    tree, path, alert, config, always_on, first, second, part = case
    parents = [tree.parents(i).tolist() for i in range(tree.n)]
    mask = watched_probes(tree, *part)
    watched = watched_by(parents, *part)
    assert set(range(tree.n) if mask is None else np.flatnonzero(mask).tolist()) == watched
    plan = plan_of(tree, path, alert, config, always_on, mask)
    if plan is None:
        return
    thresholds = plan.expand_threshold
    retained = None
    for own in (first, second):
        step = descend(plan, len(own), retained, lambda rows, probes, own=own: own[rows, probes])
        kept, released = retain(plan, step, np.arange(len(own)))
        known = apply_rule(plan, tree.times_best_parent(own.copy()) if path else own, retained)
        assert np.array_equal(known.active, step.active)
        assert np.array_equal(known.dropped, step.dropped)
        assert np.array_equal(known.scores, step.scores)
        for row in range(len(own)):
            before = set() if retained is None else set(np.flatnonzero(retained[row]).tolist())
            active, dropped, scores, keep, freed = cascade_oracle(
                parents, tree.level.tolist(), path, thresholds, config, always_on, before, own[row], watched
            )
            assert set(np.flatnonzero(step.active[row]).tolist()) == active
            assert set(np.flatnonzero(step.dropped[row]).tolist()) == dropped
            assert {p: step.scores[row, p] for p in active} == scores
            assert set(np.flatnonzero(kept[row]).tolist()) == keep
            assert released[row] == freed
            assert len(active) <= config.max_loaded_probes
        retained = kept


@settings(max_examples=80, deadline=None)
@given(cases())
def test_exact_finds_every_firing_probe(case):
    tree, _, alert, config, _, own, _, part = case
    watched, everything = watched_probes(tree, *part), tree.times_best_parent(own.copy())
    narrow, of = tree, alert
    if watched is not None:
        if not (watched & (tree.first_parent < 0)).any():
            return
        narrow, of = without(tree, watched), np.where(watched, alert, np.float32(np.inf))
        everything[:, ~watched] = 0
    thresholds = expand_thresholds(narrow, "path", "exact", of, of, None)
    plan = CascadePlan.of(tree, "path", CascadeConfig(base_layers=config.base_layers), thresholds, [], watched)
    step = descend(plan, len(own), None, lambda rows, probes: own[rows, probes])
    assert np.array_equal(everything > alert, step.active & (step.scores > alert))


def test_exact_is_refused_for_independent_scores_and_without_thresholds():
    _, tree = ConceptTree.build(["a"], [[]])
    nan = np.array([np.nan], dtype=np.float32)
    with pytest.raises(ConfigError, match="path rule"):
        expand_thresholds(tree, "independent", "exact", nan, nan, None)
    with pytest.raises(ConfigError, match="alert threshold"):
        expand_thresholds(tree, "path", "exact", nan, nan, None)


def test_base_layers_over_max_loaded_probes_are_refused():
    _, tree = ConceptTree.build(["a", "b"], [[], []])
    with pytest.raises(ConfigError, match="are 2, max_loaded_probes is 1"):
        CascadePlan.of(tree, "path", CascadeConfig(max_loaded_probes=1), np.zeros(2, np.float32), [])
