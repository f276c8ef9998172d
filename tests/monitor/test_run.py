"""A run changes nothing in the model, leaves nothing behind, refuses the wrong model, and acts on what it sees."""

import copy
import gc
import json
import math
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from conftest import PAD, make_model, make_pack, n_hooks, not_in_oldest
from probemon import DynamicProbeManager
from probemon.errors import AlignmentError, ArenaFull, ConfigError, ModelMismatch, UnknownConcept
from probemon.monitor.breaker import Breaker
from probemon.ops.budget import Budget

NO_EOS = {"eos_token_id": None, "pad_token_id": PAD}
PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8]])


@pytest.fixture
def manager(pack):
    return DynamicProbeManager(pack)


def shadowed(model):
    return [name for name in vars(model) if name in ("generate", "_get_stopping_criteria", "generate_batch")]


# -- promise 1 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"use_cache": False},
        not_in_oldest({"prefill_chunk_size": 2}, why="makes no cache for the chunks"),
        {"attention_mask": (BATCH != PAD).long()},
    ],
    ids=lambda o: ",".join(o),
)
def test_watching_changes_no_bit(pack, model, options):
    ids = BATCH if "attention_mask" in options else PROMPT
    arguments = {
        "max_new_tokens": 8,
        "return_dict_in_generate": True,
        "output_logits": True,
        "do_sample": False,
        **NO_EOS,
        **options,
    }

    def generate():
        torch.manual_seed(11)
        return model.generate(ids, **arguments)

    bare = generate()
    with DynamicProbeManager(pack).attach(model) as run:
        run.on("c5", above=0.9999999)
        watched = generate()
    again = generate()
    for other in (watched, again):
        assert torch.equal(bare.sequences, other.sequences)
        assert all(torch.equal(a, b) for a, b in zip(bare.logits, other.logits, strict=True))


class Kept:
    """A sink that keeps what it is sent."""

    def __init__(self):
        self.n_tokens, self.closed = 0, threading.Event()

    def open(self, concepts):
        pass

    def write(self, batch):
        self.n_tokens += len(batch)

    def close(self):
        self.closed.set()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"one_thread": True},
        {"on_gap": "report"},
        {"followers": [print]},
        {"followers": [Budget(ms=1e3)]},
        {"breaker": Breaker()},
        {"keep_tokens": 9},
    ],
)
def test_dropped_run_leaves_nothing_behind(manager, options, caplog):
    """With rules, a sink and a generation behind it; the sink has all that was sent to it."""
    model, sink = make_model(), Kept()
    run = manager.attach(model, **options)
    run.on("c5", above=0.9999999, action=print)
    run.__enter__()
    run.follow(sink)
    out = model.generate(PROMPT, max_new_tokens=3, **NO_EOS)
    assert run.result(out).coverage.totals() and n_hooks(model) and shadowed(model)
    del run
    gc.collect()
    assert n_hooks(model) == 0 and shadowed(model) == []
    assert sink.closed.wait(30) and sink.n_tokens == 7
    [said] = [record.getMessage() for record in caplog.records if record.name == "probemon"]
    assert said.startswith("a run on LlamaForCausalLM was entered, and dropped without being closed")
    assert torch.equal(copy.deepcopy(model).generate(PROMPT, max_new_tokens=3, **NO_EOS), out)
    with manager.attach(model) as again:
        assert again.result(model.generate(PROMPT, max_new_tokens=3, **NO_EOS)).coverage.totals()


def test_dropped_run_with_self_referencing_callbacks_leaves_nothing(manager):
    model = make_model()

    def drop():
        run = manager.attach(model, followers=[lambda placed, scores: run.gaps]).__enter__()
        run.on("c5", above=0.9, action=lambda event: run.stop(), on_blind=lambda event: run.stop())
        run.follow(lambda placed, scores: run.events)
        model.generate(PROMPT, max_new_tokens=3, **NO_EOS)
        assert n_hooks(model)

    drop()
    gc.collect()
    assert n_hooks(model) == 0 and shadowed(model) == []


def test_ended_runs_are_freed_with_their_results(manager):
    """Also its model's: whoever attaches for each request would keep them all."""
    model, ended = make_model(), []
    for _ in range(3):
        with manager.attach(model) as run:
            out = model.generate(PROMPT, max_new_tokens=2, do_sample=False, **NO_EOS)
        ended += [weakref.ref(run), weakref.ref(run.result(out))]
        del run, out
    freed = weakref.ref(model)
    gc.collect()
    assert [one() for one in ended] == 6 * [None]
    del model
    gc.collect()
    assert freed() is None


def test_ended_runs_are_freed_while_later_ones_always_overlap(manager):
    """As those of a server under load: no moment comes at which the model has none."""
    model, depths, ended = make_model(), [], []
    runs = [manager.attach(model).__enter__()]
    for _ in range(6):
        runs.append(manager.attach(model).__enter__())
        model.generate(PROMPT, max_new_tokens=2, do_sample=False, **NO_EOS)
        method, depth = vars(model)["generate"], 0
        while hasattr(method, "__wrapped__"):
            method, depth = method.__wrapped__, depth + 1
        depths.append(depth)
        older = runs.pop(0)
        older.__exit__(None, None, None)
        ended.append(weakref.ref(older))
        del older, method
    gc.collect()
    assert [one() for one in ended] == 6 * [None]
    assert len(set(depths)) == 1  # calls pass no patch of an ended run
    runs[0].__exit__(None, None, None)
    assert "generate" not in vars(model)


def test_run_dropped_while_another_thread_generates_ends_like_a_closed_one(manager, caplog):
    model, inside, dropped = make_model(), threading.Event(), threading.Event()

    class Waits(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            inside.set()
            dropped.wait(30)
            return torch.zeros(len(ids), dtype=torch.bool)

    run = manager.attach(model).__enter__()
    with ThreadPoolExecutor(1) as pool:
        waits = StoppingCriteriaList([Waits()])
        out = pool.submit(model.generate, PROMPT, max_new_tokens=4, do_sample=False, stopping_criteria=waits, **NO_EOS)
        assert inside.wait(30)
        del run
        gc.collect()
        dropped.set()
        assert n_hooks(model) == 0 and torch.equal(
            out.result(), model.generate(PROMPT, max_new_tokens=4, do_sample=False, **NO_EOS)
        )
    assert "1 generation under way is not watched any more" in caplog.text


def test_run_that_is_still_referenced_is_not_detached(manager):
    model = make_model()
    with ExitStack() as stack:
        stack.enter_context(manager.attach(model))
        gc.collect()
        assert n_hooks(model) > 0
    exit_ = manager.attach(model).__enter__().__exit__
    gc.collect()
    assert n_hooks(model) > 0
    exit_(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert n_hooks(model) == 0


def test_normal_exit_leaves_nothing_behind(manager, model):
    before = n_hooks(model)
    with manager.attach(model) as run:
        assert n_hooks(model) > before and shadowed(model)
        model.generate(PROMPT, max_new_tokens=2, **NO_EOS)
    assert n_hooks(model) == before and not shadowed(model)
    assert model.generate.__func__ is type(model).generate
    with pytest.raises(ConfigError, match="entered once"), run:
        pass


def test_run_repr_says_what_it_watches(manager, model):
    run, host = manager.attach(model), f"LlamaForCausalLM {model.config.name_or_path!r} by 'random'"
    assert repr(run) == f"MonitorRun(not entered yet: {host}, 0 rules, 0 recordings)"
    with run:
        run.on("c5", above=0.99)
        model.generate(PROMPT, max_new_tokens=2, do_sample=False)
        assert repr(run) == f"MonitorRun(watching: {host}, 1 rule, 1 recording)"
    assert repr(run) == f"MonitorRun(ended: {host}, 1 rule, 1 recording)"


def test_exception_inside_generate_leaves_nothing_behind(manager, model):
    before, pinned = n_hooks(model), manager.arena.stats().n_pinned

    def explode(module, args):
        raise RuntimeError("the host broke")

    with pytest.raises(RuntimeError, match="the host broke"), manager.attach(model):
        handle = model.model.layers[2].register_forward_pre_hook(explode)
        try:
            model.generate(PROMPT, max_new_tokens=2, **NO_EOS)
        finally:
            handle.remove()
    assert n_hooks(model) == before and not shadowed(model) and manager.arena.stats().n_pinned == pinned
    with manager.attach(model) as run:  # and it can be watched again
        out = model.generate(PROMPT, max_new_tokens=3, do_sample=False, **NO_EOS)
    assert run.result(out).coverage.n_unseen == 1


def test_generation_after_a_failed_one_is_right(manager, model):
    with manager.attach(model) as run:
        handle = model.model.layers[2].register_forward_pre_hook(lambda m, a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(PROMPT, max_new_tokens=3, **NO_EOS)
        handle.remove()
        out = model.generate(PROMPT, max_new_tokens=3, do_sample=False, **NO_EOS)
    assert run.result(out).coverage.n_unseen == 1


def test_two_runs_on_one_model_see_the_same_and_detach_in_any_order(pack, model):
    before = n_hooks(model)
    first, second = DynamicProbeManager(pack).attach(model), DynamicProbeManager(pack, keep_top_k=0).attach(model)
    first.__enter__()
    second.__enter__()
    out = model.generate(PROMPT, max_new_tokens=4, do_sample=False, **NO_EOS)
    first.__exit__(None, None, None)
    alone = model.generate(PROMPT, max_new_tokens=4, do_sample=False, **NO_EOS)
    second.__exit__(None, None, None)
    assert torch.equal(out, alone) and n_hooks(model) == before
    a, b, c = first.result(out), second.result(out), second.result(alone)
    assert a.coverage.n_unseen == b.coverage.n_unseen == c.coverage.n_unseen == 1
    assert np.array_equal(b.scores.values, c.scores.values)
    assert not shadowed(model)


# -- the wrong host ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden": 24}, "reads hidden states of 16 values, LlamaForCausalLM has 24"),
        ({"layers": 4}, "made for 3 layers, LlamaForCausalLM has 4"),
    ],
)
def test_model_of_another_shape_is_refused_and_left_alone(manager, change, words):
    other = make_model(**change)
    with pytest.raises(ModelMismatch, match=words):
        manager.attach(other)
    assert n_hooks(other) == 0 and not shadowed(other)


def test_other_weights_warn_and_strict_refuses(manager):
    other = make_model(seed=1)
    with pytest.warns(UserWarning, match="this model's weights are others") as caught:
        manager.attach(other)
    assert caught[0].filename == __file__
    with pytest.raises(ModelMismatch, match=r"this model.s weights are others.*without strict"):
        manager.attach(other, strict=True)


def test_strict_refuses_a_pack_without_a_fingerprint(model, tmp_path):
    unknown = make_pack(tmp_path / "p", model, host={"model_id": "?"})
    DynamicProbeManager(unknown).attach(model)
    with pytest.raises(ModelMismatch, match="records no fingerprint"):
        DynamicProbeManager(unknown).attach(model, strict=True)


def test_missing_site_leaves_no_hook(model, tmp_path):
    before = n_hooks(model)
    beyond = make_pack(tmp_path / "p", model, sites=("resid_post.0", "resid_post.7"))
    told = r"reads resid_post\.7, LlamaForCausalLM has layers 0\.\.2: use a pack that was made for this model, or load "
    with pytest.raises(ModelMismatch, match=told):
        DynamicProbeManager(beyond).attach(model)
    assert n_hooks(model) == before


def test_hook_removed_by_others_is_an_error(manager, model):
    with manager.attach(model), pytest.raises(AlignmentError, match="without reaching"):
        model.model.layers[1]._forward_hooks.clear()
        model.generate(PROMPT, max_new_tokens=2, **NO_EOS)


def test_forward_that_bypasses_the_hooks_is_an_error(manager, model):
    with manager.attach(model), pytest.raises(AlignmentError, match="past our hooks"):
        model.model._forward_pre_hooks.clear()
        model.model._forward_hooks.clear()
        model.generate(PROMPT, max_new_tokens=2, **NO_EOS)
    model.model._forward_pre_hooks_with_kwargs.clear()
    model.model._forward_hooks_with_kwargs.clear()


# -- events and actions --------------------------------------------------------------------------


def scores_of(result, probe):
    return [
        dict(zip(result.scores.active(i).tolist(), result.scores.active_scores(i).tolist(), strict=True)).get(probe)
        for i in range(len(result))
    ]


def test_concept_in_a_rule_is_evaluated_at_every_token(manager, model):
    probe = manager.pack.n_probes - 1
    with manager.attach(model) as run:
        run.on(probe, above=0.9999999)
        out = model.generate(PROMPT, max_new_tokens=6, do_sample=False, **NO_EOS)
    values = scores_of(run.result(out), probe)
    assert None not in values[:-1] and values[-1] is None


def test_stop_ends_the_sequence_at_the_right_token(manager, model):
    with manager.attach(model) as run:
        run.on("c9", above=0.9999999)
        free = model.generate(PROMPT, max_new_tokens=12, do_sample=False, **NO_EOS)
    values = scores_of(run.result(free), manager.pack.find("c9"))[5:-1]
    above = sorted(values)[4]
    in_a_row = next(i for i in range(1, len(values)) if values[i] > above and values[i - 1] > above)
    events = []
    with manager.attach(model) as run:
        run.on("c9", above=above, for_tokens=2, action=events.append)
        run.on("c9", above=above, for_tokens=2, action="stop")
        stopped = model.generate(
            PROMPT, max_new_tokens=12, do_sample=False, stopping_criteria=run.stopping_criteria, **NO_EOS
        )
    # The token at which the rule was met, then the one that was sampled from it.
    assert stopped.shape[1] == 5 + in_a_row + 2
    assert torch.equal(stopped[0], free[0, : stopped.shape[1]])
    event = events[0]
    assert (event.concept, event.row, event.column) == ("c9", 0, 5 + in_a_row)
    assert event.token_id == free[0, event.column] and event.score == pytest.approx(values[in_a_row], abs=1e-6)
    assert event.path[-1] == "concept 9" and event.for_tokens == 2


def test_stop_works_without_passing_stopping_criteria(manager, model):
    with manager.attach(model) as run:
        run.on("c0", above=0.0)
        out = model.generate(PROMPT, max_new_tokens=12, do_sample=False, **NO_EOS)
    assert out.shape[1] == 5 + 2


def test_stop_ends_one_sequence_and_pads_it(manager, model):
    ids, mask = BATCH, (BATCH != PAD).long()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": 60, "pad_token_id": PAD}
    with manager.attach(model) as run:
        run.on("c9", above=0.9999999)
        free = model.generate(ids, **options)
    result = run.result(free)
    probe = manager.pack.find("c9")
    best = [
        max(
            v
            for v, r, p in zip(scores_of(result, probe), result.row, result.phase, strict=True)
            if r == row and p == 1 and v is not None
        )
        for row in (0, 1)
    ]
    above = float(np.mean(best))
    loud = int(np.argmax(best))
    with manager.attach(model) as run:
        run.on("c9", above=above)
        out = model.generate(ids, **options)
    result = run.result(out)
    lengths = [int((result.row == row).sum()) for row in (0, 1)]
    assert torch.equal(out[1 - loud], free[1 - loud])
    assert out[loud].tolist() != free[loud].tolist() and out[loud, -1] == PAD
    assert lengths[loud] < free.shape[1] and PAD not in result.token_id[(result.row == loud) & (result.phase == 1)]


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"concept": "c99"}, UnknownConcept, "no concept 'c99', did you mean"),
        ({"concept": 4000}, UnknownConcept, r"it has 0\.\.39"),
        *[
            ({"concept": "c1", "above": above}, ConfigError, "scores lie between 0 and 1")
            for above in (float("nan"), 95, 1.0, -0.1, "0.5", True)
        ],
        ({"concept": "c1", "for_tokens": 0}, ConfigError, "give 1 or more"),
        ({"concept": "c1", "action": "halt"}, ConfigError, "'stop', 'raise', an Escalate or a callable"),
    ],
)
def test_bad_rule_is_named(manager, model, arguments, error, words):
    with manager.attach(model) as run, pytest.raises(error, match=words):
        run.on(**arguments)


def test_rule_over_the_limit_is_refused(pack, model):
    manager = DynamicProbeManager(pack, max_loaded_probes=4)
    with manager.attach(model) as run, pytest.raises(ConfigError, match="max_loaded_probes is 4"):
        run.on("c39")


def test_rule_that_a_paged_arena_cannot_pin_is_refused(pack, model):
    one = -(-pack.weight_bytes() // pack.n_probes)
    needed = len(pack.tree.ancestors(pack.find("c39")) | set(pack.tree.roots.tolist()) | {pack.find("c39")})
    for n_slots in (5, needed):  # too few; one too few
        manager = DynamicProbeManager(pack, arena_bytes=n_slots * one)
        pinned = manager.arena.stats().n_pinned
        with manager.attach(model) as run:
            with pytest.raises(ArenaFull, match="needs one more: raise arena_bytes"):
                run.on("c39")
            model.generate(PROMPT, max_new_tokens=2, **NO_EOS)
        assert manager.arena.stats().n_pinned == pinned
        manager.arena.check_integrity()


def test_rule_on_a_concept_without_a_threshold_needs_above(model, tmp_path):
    bare = make_pack(tmp_path / "p", model, alert_threshold=torch.full((40,), float("nan")))
    with DynamicProbeManager(bare).attach(model) as run, pytest.raises(ConfigError, match="give above="):
        run.on("c1")


def test_paged_arena_gives_the_same_online_scores(pack, model):
    one = -(-pack.weight_bytes() // pack.n_probes)
    results = []
    for arena_bytes in (None, 5 * one):
        with DynamicProbeManager(pack, arena_bytes=arena_bytes, strategy="descent").attach(model) as run:
            out = model.generate(
                BATCH, attention_mask=(BATCH != PAD).long(), max_new_tokens=6, do_sample=False, **NO_EOS
            )
        results.append(run.result(out).scores)
    assert np.array_equal(results[0].probes, results[1].probes) and np.array_equal(results[0].values, results[1].values)


def test_streaks_of_two_threads_are_separate(manager, model):
    """Two threads take turns token by token: each one's streak is its own."""
    events, turn = [], threading.Barrier(2)

    def met(event):
        events.append((threading.get_ident(), event.column))

    def generate(prompt):
        return model.generate(
            prompt, max_new_tokens=6, do_sample=False, stopping_criteria=StoppingCriteriaList([Wait()]), **NO_EOS
        )

    class Wait(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            turn.wait(20)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with manager.attach(model) as run, ThreadPoolExecutor(2) as pool:
        run.on("c0", above=0.0, for_tokens=3, action=met)
        outs = list(pool.map(generate, [PROMPT, PROMPT + 1]))
    assert sorted(column for _, column in events) == [7, 7] and len({who for who, _ in events}) == 2
    assert all(run.result(out).coverage.n_unseen == 1 for out in outs)


# -- the result ----------------------------------------------------------------------------------


def test_top_ranks_each_concepts_best_token_by_strength(manager, model):
    with manager.attach(model) as run:
        out = model.generate(BATCH, attention_mask=(BATCH != PAD).long(), max_new_tokens=5, do_sample=False, **NO_EOS)
    result = run.result(out)
    logit = lambda p: np.log(p) - np.log1p(-p)  # noqa: E731
    for row, phase in ((0, None), (1, "generated"), (1, "prompt")):
        best = {}
        for i in np.flatnonzero((result.row == row) & ((phase is None) | (result.phase == (phase == "generated")))):
            for p, v in zip(result.scores.active(i).tolist(), result.scores.active_scores(i).tolist(), strict=True):
                if v > best.get(p, (-1, 0))[0]:
                    best[p] = (v, i)
        order = sorted(best, key=lambda p: (-logit(best[p][0]), p))[:7]  # one threshold for all: strength is the logit
        top = result.top(7, row=row, phase=phase)
        assert [c.probe for c in top] == order
        for c in top:
            score, i = best[c.probe]
            assert (
                c.score == pytest.approx(score)
                and c.position == result.position[i]
                and out[row, c.position] == c.token_id
            )
            assert c.path == tuple(manager.pack.path(c.probe)) and c.fired == (score > 0.3)
            assert c.strength == pytest.approx(logit(np.float64(score)) - logit(np.float64(np.float32(0.3))), abs=1e-5)
    with pytest.raises(ConfigError, match="row 7 is not in this result"):
        result.top(row=7)
    with pytest.raises(ConfigError, match="phase 'both'"):
        result.top(phase="both")
    with pytest.raises(ConfigError, match="is not a token"):
        result.at(0, 0)  # left padding
    assert result.position[result.at(1, 3)] == 3


def test_top_ranks_by_strength_or_by_score_without_thresholds(model, tmp_path):
    thresholds = torch.linspace(0.1, 0.9, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    for name, alert in (("calibrated", thresholds), ("not calibrated", torch.full((40,), float("nan")))):
        own = make_pack(tmp_path / name, model, alert_threshold=alert)
        with DynamicProbeManager(own, load_threshold=0.2).attach(model) as run:
            out = model.generate(PROMPT, max_new_tokens=5, do_sample=False, **NO_EOS)
        top = run.result(out).top(40)
        by_score = [c.probe for c in sorted(top, key=lambda c: (-c.score, c.probe))]
        by_strength = [c.probe for c in sorted(top, key=lambda c: (-c.strength, c.probe))]
        assert [c.probe for c in top] == (by_strength if name == "calibrated" else by_score)
        assert name != "calibrated" or by_strength != by_score


def test_leading_concepts_are_on_separate_paths_strongest_first(manager, model):
    with manager.attach(model) as run:
        out = model.generate(PROMPT, max_new_tokens=5, do_sample=False, **NO_EOS)
    result, tree = run.result(out), manager.pack.tree
    for i in range(len(result)):
        found = result.leading(i, 100)
        assert all((c.position, c.token_id) == (result.position[i], result.token_id[i]) for c in found)
        fired = set(result.scores.fired(i).tolist())
        for a in found:
            assert a.probe in fired and not any(b.probe in tree.path(a.probe)[:-1] for b in found)
        # What fires stands somewhere: by itself, or on the path shown of what leads.
        assert fired <= {p for c in found for p in tree.path(c.probe)}
        assert all(c.path == tuple(manager.pack.path(c.probe)) for c in found)
        assert [c.strength for c in found] == sorted((c.strength for c in found), reverse=True)


def test_arrow_table_holds_every_score_and_lists_unseen_tokens(manager, model):
    with manager.attach(model) as run:
        out = model.generate(PROMPT, max_new_tokens=5, do_sample=False, **NO_EOS)
    result = run.result(out)
    table = result.to_arrow()
    assert table.column_names == ["row", "position", "token_id", "phase", "concept", "level", "score"]
    lines = [
        (
            int(result.row[i]),
            int(result.position[i]),
            int(result.token_id[i]),
            ("prompt", "generated")[result.phase[i]],
            manager.pack.concepts[p]["id"],
            int(manager.pack.tree.level[p]),
            v,
        )
        for i in range(len(result))
        for p, v in zip(result.scores.active(i).tolist(), result.scores.active_scores(i).tolist(), strict=True)
    ]
    assert [tuple(line.values()) for line in table.to_pylist()] == lines
    about = json.loads(table.schema.metadata[b"probemon"])
    assert about["unseen"] == [{"row": 0, "position": 9, "reason": "the last generated token is never run by the host"}]
    assert about["coverage"] == result.coverage.totals()


def test_data_frame_has_texts_paths_thresholds_strengths_and_firing(manager, model):
    with manager.attach(model) as run:
        out = model.generate(torch.cat([PROMPT, PROMPT.flip(1)]), max_new_tokens=4, do_sample=False, **NO_EOS)
    result, alert = run.result(out), manager.pack.alert_threshold.tolist()
    frame = result.to_pandas()
    assert {"row", "position", "token", "concept", "path", "score", "threshold", "strength", "fired"} <= set(frame)
    texts = {row: result.texts(result.tokens_of(row)) for row in (0, 1)}
    assert len(frame) == len(result.scores.values) and frame.fired.any() and not frame.fired.all()
    lines = frame.to_dict("records")
    for line in lines:
        probe = manager.pack.find(line["concept"])
        assert line["token"] == texts[line["row"]][line["position"]]
        assert line["path"] == " > ".join(manager.pack.path(probe))
        if math.isnan(alert[probe]):
            assert math.isnan(line["threshold"]) and math.isnan(line["strength"])
            continue
        score, above = line["score"], alert[probe]
        assert line["threshold"] == pytest.approx(above)
        strength = math.log(score / (1 - score)) - math.log(above / (1 - above))
        assert line["strength"] == pytest.approx(strength, abs=1e-4)
    t = {(row, position): i for i, (row, position) in enumerate(zip(result.row, result.position, strict=True))}
    for line in lines:
        fired = result.scores.fired(t[line["row"], line["position"]])
        assert line["fired"] == (manager.pack.find(line["concept"]) in fired)


def test_missing_pyarrow_names_the_extra(manager, model, monkeypatch):
    with manager.attach(model) as run:
        out = model.generate(PROMPT, max_new_tokens=1, **NO_EOS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"^to_arrow needs pyarrow: pip install 'probemon\[corpus\]'$"):
        run.result(out).to_arrow()


def test_changes_after_the_end_of_a_run_are_refused(manager, model):
    with manager.attach(model) as run:
        pass
    given = {
        "a rule": lambda: run.on(manager.pack.concepts[0]["id"], above=0.5),
        "what is watched": lambda: run.update(exclude=[manager.pack.concepts[0]["id"]]),
        "a follower": lambda: run.follow(print),
    }
    for what, give in given.items():
        with pytest.raises(ConfigError, match=f"has ended, so {what}"):
            give()
