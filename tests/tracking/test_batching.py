"""In continuous batching every token of every request has its own score, also if packed, shared or preempted."""

import queue

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from conftest import EOS, HIDDEN, OLDEST, PAD, make_model, make_pack, n_hooks
from hears import hears
from oracle import check
from probemon import DynamicProbeManager, function_probe
from probemon.errors import AlignmentError, CallbackFailed, ConceptRaised, UnsupportedDecoding
from probemon.tracking.recording import SHARED

if OLDEST:
    pytest.skip(
        "continuous batching of transformers 5.0 is refused by name (tests/support/arrangements.py)",
        allow_module_level=True,
    )
from transformers import ContinuousBatchingConfig

LONG = [1, *range(3, 43)]
PROMPTS = [[1, 44, 3, 17, 8], [*LONG[:18], 50, 51, 52], [*LONG[:18], 9], LONG, [7]]
NEW = 9


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    # fp64: rows of a packed forward are added up in another order than those of a plain one.
    model = make_model().double()
    return model, DynamicProbeManager(
        make_pack(tmp_path_factory.mktemp("packs") / "p", model, sites=("resid_post.0", "resid_post.2")), keep_top_k=6
    )


def configs(sample=False, n=1, **changes):
    batching = {"max_batch_tokens": 16, "page_size": 4, "num_blocks": 64, "allow_block_sharing": False, **changes}
    return {
        "generation_config": GenerationConfig(
            do_sample=sample, max_new_tokens=NEW, pad_token_id=PAD, eos_token_id=60, num_return_sequences=n
        ),
        "continuous_batching_config": ContinuousBatchingConfig(**batching),
        "progress_bar": False,
    }


def verify(model, manager, result, outputs):
    for row, output in enumerate(outputs.values()):
        ids = [*output.prompt_ids, *output.generated_tokens]
        check(manager, model, result, row, ids, 0, [(len(output.prompt_ids), len(output.generated_tokens) - 1)])


@pytest.mark.parametrize(
    "options",
    [{}, {"sample": True}, {"num_blocks": 16}, {"num_blocks": 14, "sample": True}, {"scheduler_type": "prefill_first"}],
    ids=str,
)
def test_every_request_is_exact(host, options):
    model, manager = host
    torch.manual_seed(3)
    with manager.attach(model) as run:
        outputs = model.generate_batch(PROMPTS, **configs(**options))
    result = run.result(outputs)
    assert result.requests == tuple(outputs) and [o.prompt_ids for o in outputs.values()] == PROMPTS
    verify(model, manager, result, outputs)
    one = list(outputs.values())[3]
    alone = run.result(one)
    assert alone.requests == (one.request_id,) and alone.token_id.tolist() == [*LONG, *one.generated_tokens]


def test_forked_requests_start_where_their_parent_was(host):
    model, manager = host
    torch.manual_seed(4)
    with manager.attach(model) as run:
        outputs = model.generate_batch(PROMPTS[:4], **configs(sample=True, n=3))
    assert len(outputs) == 12
    verify(model, manager, run.result(outputs), outputs)


def test_tokens_with_shared_keys_are_unseen_with_the_reason(host):
    model, manager = host
    with manager.attach(model) as run:
        # One request a batch: the second finds the first's blocks.
        outputs = model.generate_batch(
            [LONG, [*LONG[:30], 50, 51]], **configs(allow_block_sharing=True, num_blocks=32, max_batch_tokens=48)
        )
    result = run.result(outputs)
    hidden = [
        (int(result.row[i]), int(result.position[i]))
        for i, reason in enumerate(result.coverage.unseen)
        if reason == SHARED
    ]
    first = dict([next(iter(outputs.items()))])
    verify(model, manager, run.result(first), first)
    if (
        hidden
    ):  # whether a block is complete in time is the scheduler's affair; what it hides must be a prefix, and said
        assert hidden == [(1, i) for i in range(len(hidden))]
    last = [i for i in range(len(result)) if result.coverage.unseen[i] and result.coverage.unseen[i] != SHARED]
    assert len(last) == 2


def test_shared_prefix_of_an_earlier_batch_is_unseen(host):
    model, manager = host
    second = [*LONG[:30], 50, 51]
    with manager.attach(model) as run:
        options = configs(allow_block_sharing=True, max_batch_tokens=48)
        with model.continuous_batching_context_manager(
            options["generation_config"], continuous_batching_config=options["continuous_batching_config"]
        ) as serving:
            outputs = {}
            for name, prompt in (("first", LONG), ("second", second)):
                serving.add_request(prompt, request_id=name)
                while name not in outputs:
                    found = serving.get_result(timeout=1)
                    if found is not None and found.is_finished():
                        outputs[found.request_id] = found
    result = run.result(outputs)
    hidden = [
        (int(result.row[i]), int(result.position[i]))
        for i, reason in enumerate(result.coverage.unseen)
        if reason == SHARED
    ]
    assert len(hidden) >= 4 and hidden == [(1, i) for i in range(len(hidden))]
    ids = [*second, *outputs["second"].generated_tokens]
    assert result.token_id[result.row == 1].tolist() == ids
    check_tail(model, manager, result, 1, ids, len(hidden), len(second), len(outputs["second"].generated_tokens) - 1)


def check_tail(model, manager, result, row, ids, first, n_prompt, n_seen):
    """What was not shared is exact: the prompt's tokens are scored each by itself, so they need no history."""
    from oracle import expected

    oracle = expected(manager, model, ids[: n_prompt + n_seen], [(n_prompt, n_seen)])
    mine = [i for i in range(len(result)) if result.row[i] == row]
    for i in mine[first : n_prompt + n_seen]:
        _, scores, t = oracle[int(result.position[i])]
        assert result.scores.active(i).tolist() == scores.active(t).tolist()
        assert abs(result.scores.active_scores(i) - scores.active_scores(t)).max() < 1e-5


def test_stop_ends_one_request_after_one_more_token(host):
    model, manager = host
    with manager.attach(model) as run:
        run.on("c3", above=0.9999999)
        free = model.generate_batch(PROMPTS, **configs())
    result, probe = run.result(free), manager.pack.find("c3")
    generated = result.phase == 1
    values = [
        (
            dict(zip(result.scores.active(i).tolist(), result.scores.active_scores(i).tolist(), strict=True)).get(
                probe, 0.0
            )
            if generated[i]
            else -1.0
        )
        for i in range(len(result))
    ]
    top = max(range(len(values)), key=lambda i: values[i])
    above = max(v for i, v in enumerate(values) if result.row[i] != result.row[top])
    met = [i for i in range(len(result)) if values[i] > above]
    assert met and {int(result.row[i]) for i in met} == {int(result.row[top])}
    events = []
    with manager.attach(model) as run:
        run.on("c3", above=above)
        run.on("c3", above=above, action=events.append)
        outputs = model.generate_batch(PROMPTS, **configs())
    for row, (name, output) in enumerate(outputs.items()):
        whole = free[name].generated_tokens
        if row == result.row[top]:
            n = int(result.position[met[0]]) - len(output.prompt_ids) + 1
            assert output.generated_tokens == whole[: n + 1] and len(whole) > n + 1
            assert events[0].request == name and events[0].column == result.position[met[0]]
        else:
            assert output.generated_tokens == whole
    verify(model, manager, run.result(outputs), outputs)


def test_raise_reaches_the_caller_of_the_batch(host):
    model, manager = host
    before = n_hooks(model)
    with manager.attach(model) as run:
        run.on("c0", above=0.0, action="raise")
        with pytest.raises(ConceptRaised, match="over 0"):
            model.generate_batch(PROMPTS, **configs())
    assert n_hooks(model) == before
    with manager.attach(model) as run:
        outputs = model.generate_batch(PROMPTS[:2], **configs())
    verify(model, manager, run.result(outputs), outputs)


def test_removed_hook_is_an_error(host):
    model, manager = host
    with manager.attach(model), pytest.raises(AlignmentError, match="without reaching"):
        model.model.layers[2]._forward_hooks.clear()
        model.generate_batch(PROMPTS[:2], **configs())


def test_removed_decoder_hooks_are_an_error(host):
    model, manager = host
    with manager.attach(model), pytest.raises(AlignmentError, match="past our hooks"):
        model.model._forward_pre_hooks.clear()
        model.generate_batch(PROMPTS[:2], **configs())
    model.model._forward_pre_hooks_with_kwargs.clear()
    gaps = []
    with manager.attach(model, on_gap="report", followers=[hears(gap=gaps.append)]) as run:
        model.model._forward_pre_hooks.clear()
        outputs = model.generate_batch(PROMPTS[:2], **configs())
    model.model._forward_pre_hooks_with_kwargs.clear()
    cover = run.result(outputs).coverage
    assert len(gaps) == 2 and cover.n_unseen == len(cover) == sum(map(len, PROMPTS[:2])) + 2 * NEW


@pytest.mark.parametrize("lost", [0, 1])
def test_packed_forward_that_bypasses_our_hooks_is_an_error(host, lost):
    model, manager = host
    seen, kept = [], {}

    def lose(module, args, kwargs):
        hooks = model.model._forward_pre_hooks
        if len(seen) == lost:
            kept.update(hooks)
            hooks.clear()
        elif len(seen) == lost + 1:
            hooks.update(kept)
        seen.append(1)

    with manager.attach(model), pytest.raises(AlignmentError, match="past our hooks"):
        handle = model.register_forward_pre_hook(lose, with_kwargs=True)
        try:
            model.generate_batch([LONG], **configs())
        finally:
            handle.remove()
            model.model._forward_pre_hooks.update(kept)


def test_compiled_batching_is_refused_and_leaves_the_model_unchanged(host):
    model, manager = host
    from transformers import CompileConfig

    attention = model.config._attn_implementation
    options = configs()
    options["continuous_batching_config"] = ContinuousBatchingConfig(
        varlen_compile_config=CompileConfig(), decode_compile_config=CompileConfig()
    )
    with manager.attach(model), pytest.raises(UnsupportedDecoding, match="hooks do not run in a replay"):
        model.generate_batch(PROMPTS[:1], **options)
    assert model.config._attn_implementation == attention


def test_batching_manager_opened_before_attaching_is_refused(host):
    model, manager = host
    options = configs()
    serving = model.init_continuous_batching(
        options["generation_config"], continuous_batching_config=options["continuous_batching_config"]
    )
    with pytest.raises(CallbackFailed, match="opened before probemon was attached"), manager.attach(model):
        serving.start()
        serving.add_request(PROMPTS[0], request_id="early")
        found = None
        while found is None:
            try:
                found = serving.get_result(timeout=1)
            except queue.Empty:
                continue
        assert found.error
        serving.stop(block=True)


def test_finished_requests_of_an_open_batching_manager_are_released(host):
    model, manager = host
    options, outputs = configs(), {}
    opened = {
        "generation_config": options["generation_config"],
        "continuous_batching_config": options["continuous_batching_config"],
    }
    with manager.attach(model, keep_tokens=40) as run, model.continuous_batching_context_manager(**opened) as serving:
        for k in range(12):
            serving.add_request(PROMPTS[k % 5], request_id=f"r{k}")
            while f"r{k}" not in outputs:
                found = serving.get_result(timeout=1)
                if found is not None and found.is_finished():
                    outputs[found.request_id] = found
        assert run._watcher._hooks.batches.stop() <= 2
    assert 1 <= len(run.recordings) <= 6
    newest = {"r11": outputs["r11"]}
    verify(model, manager, run.result(newest), newest)


def test_unrelated_output_is_refused(host):
    model, manager = host
    with manager.attach(model) as run:
        outputs = model.generate_batch(PROMPTS[:2], **configs())
    outputs[next(iter(outputs))].generated_tokens[1] += 1
    with pytest.raises(AlignmentError, match="position 6: the output has token"):
        run.result(outputs)
    with pytest.raises(AlignmentError, match="'other' was not watched"):
        run.result({"other": outputs[next(iter(outputs))]})


assert EOS != 60


def test_generate_during_a_running_batch_is_exact_or_refused(host):
    """It is another generation; but an eager host has another attention meanwhile, and what generate() then computes is
    not the model's.
    """
    model, manager = host
    options = configs()
    short = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD, "eos_token_id": 60}
    opened = {
        "generation_config": options["generation_config"],
        "continuous_batching_config": options["continuous_batching_config"],
    }
    with manager.attach(model) as run, model.continuous_batching_context_manager(**opened):
        out = model.generate(torch.tensor([PROMPTS[0]]), **short)
    check(manager, model, run.result(out), 0, out[0].tolist(), 0, [(5, 2)])
    model.set_attn_implementation("eager")
    try:
        with (
            manager.attach(model) as run,
            model.continuous_batching_context_manager(**opened),
            pytest.raises(UnsupportedDecoding, match="while continuous batching runs"),
        ):
            model.generate(torch.tensor([PROMPTS[0]]), **short)
        assert run.recordings == []
    finally:
        model.set_attn_implementation("sdpa")


def test_function_probe_has_every_token_of_every_request(host):
    model, manager = host
    probe = function_probe(lambda hidden: torch.sigmoid(hidden[:, 0]), "resid_post.1", "first")
    with manager.attach(model, followers=[probe]) as run:
        outputs = model.generate_batch(PROMPTS, **configs())
    result, taken = run.result(outputs), []
    values = result.functions["first"].values
    hook = model.model.layers[1].register_forward_hook(
        lambda module, given, out: taken.append((out[0] if type(out) is tuple else out).reshape(-1, HIDDEN)[:, 0])
    )
    with torch.no_grad():
        for row, output in enumerate(outputs.values()):
            model(torch.tensor([[*output.prompt_ids, *output.generated_tokens]]))
            expected = torch.sigmoid(taken[-1]).numpy()
            assert np.allclose(values[result.row == row][:-1], expected[:-1], atol=1e-6)
    hook.remove()
    assert np.isnan(values).sum() == len(outputs)
