"""With on_gap="report", tokens of forwards that bypass our hooks are unseen with a reason, and all others exact."""

import threading

import numpy as np
import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from arrangements import tokenizer
from blinded import Blinded
from conftest import OLDEST, PAD, make_model
from hears import hears
from probemon import DynamicProbeManager
from probemon.errors import AlignmentError, CallbackFailed, ConfigError
from probemon.monitor.sinks import MemorySink
from probemon.tracking.recording import BEFORE, FORGOTTEN, GAP, LAST

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


@pytest.fixture
def manager(pack):
    return DynamicProbeManager(pack)


def prompt_scores(manager, model, out):
    """Scores of every token of `out` as a prompt: what is seen of a prompt is scored each by itself."""
    with manager.attach(model) as run, torch.no_grad():
        model(out)
    return run.result(out)


def unseen(result):
    return {int(result.position[i]): reason for i, reason in enumerate(result.coverage.unseen) if reason}


def same_prompt(mine, oracle, columns):
    for column in columns:
        assert mine.scores.active(column).tolist() == oracle.scores.active(column).tolist()
        assert np.abs(mine.scores.active_scores(column) - oracle.scores.active_scores(column)).max() < 1e-5


@pytest.mark.skipif(OLDEST, reason="no chunks there")
@pytest.mark.parametrize(
    "lost, columns", [([0], [0, 1]), ([1], [2, 3]), ([2], [4]), ([0, 1, 2], [0, 1, 2, 3, 4])], ids=str
)
def test_bypassed_prompt_chunk_is_unseen_and_the_rest_exact(manager, model, lost, columns):
    memory, gaps = MemorySink(), []
    with manager.attach(model, on_gap="report", followers=[hears(gap=gaps.append)]) as run, Blinded(model, lost):
        run.follow(memory)
        out = model.generate(PROMPT, **GREEDY, prefill_chunk_size=2)
    result = run.result(out)
    assert unseen(result) == {**dict.fromkeys(columns, GAP), 12: LAST} and gaps
    same_prompt(result, prompt_scores(manager, model, out), sorted(set(range(5)) - set(columns)))
    told = {int(batch.position[i]): int(batch.token_id[i]) for batch in memory.batches for i in range(len(batch))}
    assert told == dict(enumerate(out[0, :12].tolist()))


@pytest.mark.skipif(OLDEST, reason="no chunks there")
def test_bypassed_chunk_of_a_second_turn_is_unseen_and_the_rest_exact(manager, model):
    cache, gaps = DynamicCache(), []
    with manager.attach(model, on_gap="report", followers=[hears(gap=gaps.append)]) as run:
        first = model.generate(PROMPT, **GREEDY, past_key_values=cache)
        ids = torch.cat([first, torch.tensor([[33, 34, 35]])], dim=1)
        with Blinded(model, [1]):  # columns 12, 13; 14, 15; then the generated ones
            second = model.generate(ids, **GREEDY, past_key_values=cache, prefill_chunk_size=2)
    two = run.result(second)
    assert unseen(two) == {14: GAP, 15: GAP, 23: LAST} and len(gaps) == 1
    same_prompt(two, prompt_scores(manager, model, second), [12, 13])


def test_document_continues_after_a_generation(manager, model):
    cache = DynamicCache()
    with manager.attach(model) as run:
        first = model.generate(PROMPT, **GREEDY, past_key_values=cache)
        more = torch.cat([first[:, -1:], torch.tensor([[33, 34]])], dim=1)
        with torch.no_grad():
            model(more, past_key_values=cache)
    whole = torch.cat([first, more[:, 1:]], dim=1)
    result, one = run.result(whole), run.result(first)
    assert not unseen(result) and result.phase.tolist() == [0] * 5 + [1] * 7 + [0] * 3
    for i in range(12):
        assert np.array_equal(result.scores.active_scores(i), one.scores.active_scores(i))
    same_prompt(result, prompt_scores(manager, model, whole), [12, 13, 14])


@pytest.mark.parametrize("lost", [[0], [1], [0, 1, 2]], ids=str)
def test_second_turn_keeps_the_scores_of_the_first(manager, model, lost):
    cache, gaps = DynamicCache(), []
    with manager.attach(model, on_gap="report", followers=[hears(gap=gaps.append)]) as run:
        first = model.generate(PROMPT, **GREEDY, past_key_values=cache)
        ids = torch.cat([first, torch.tensor([[33, 34]])], dim=1)
        with Blinded(model, lost):
            second = model.generate(ids, **GREEDY, past_key_values=cache)
    one, two = run.result(first), run.result(second)
    columns = [c for n in lost for c in ([12, 13, 14] if n == 0 else [14 + n])]
    assert unseen(two) == {**dict.fromkeys(columns, GAP), 22: LAST}
    for i in range(12):
        assert np.array_equal(two.scores.active_scores(i), one.scores.active_scores(i))
    assert two.phase.tolist() == [0] * 15 + [1] * 8


def test_unseen_first_turn_counts_as_a_prefilled_cache(manager, model):
    cache = DynamicCache()
    with manager.attach(model, on_gap="report") as run:
        with Blinded(model, range(99)):
            first = model.generate(PROMPT, **GREEDY, past_key_values=cache)
        second = model.generate(torch.cat([first, torch.tensor([[33]])], dim=1), **GREEDY, past_key_values=cache)
    assert set(unseen(run.result(first)).values()) == {GAP, LAST}
    assert unseen(run.result(second)) == {**dict.fromkeys(range(12), BEFORE), 21: LAST}


def test_unseen_embedding_prompt_is_sent_to_sinks(manager, model):
    memory = MemorySink()
    with manager.attach(model, on_gap="report") as run, Blinded(model, [0]):
        run.follow(memory)
        out = model.generate(inputs_embeds=model.get_input_embeddings()(PROMPT).detach(), **GREEDY)
    assert unseen(run.result(out)) == {7: LAST}
    assert [int(p) for batch in memory.batches for p in batch.position] == [*range(-5, 0), *range(7)]
    assert [reason for batch in memory.batches for reason in batch.scores.coverage.unseen][:5] == [GAP] * 5


class Removed(Blinded):
    """Takes every forward hook of the model away, as who wants to remove all hooks does; the pre-hooks stay."""

    def before(self, module, args, kwargs):
        for one, hooks in self.kept.items():
            one._forward_hooks.update(hooks)
        if self.n in self.lost:
            self.kept = {one: dict(one._forward_hooks) for one in self.model.modules()}
            for one in self.kept:
                one._forward_hooks.clear()
        self.n += 1

    def __exit__(self, *error):
        self.handle.remove()
        for one, hooks in self.kept.items():
            one._forward_hooks.update(hooks)


LOOKUP = {"prompt_lookup_num_tokens": 3, "repetition_penalty": 0.2, "eos_token_id": 61}


@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"num_beams": 3}, LOOKUP], ids=["greedy", "no cache", "beams", "drafts"]
)
@pytest.mark.parametrize("lost", [[0], [2, 3], range(99)], ids=["prompt", "two steps", "all"])
def test_removing_every_forward_hook_is_an_error_or_unseen(manager, model, options, lost):
    with manager.attach(model), Removed(model, lost), pytest.raises(AlignmentError, match="without reaching"):
        model.generate(PROMPT, **{**GREEDY, **options})
    gaps = []
    with manager.attach(model, on_gap="report", followers=[hears(gap=gaps.append)]) as run, Removed(model, lost):
        out = model.generate(PROMPT, **{**GREEDY, **options})
    result = run.result(out)
    assert len(gaps) >= min(len(lost), 2) and set(unseen(result).values()) == {
        LAST,
        "the host did not run through resid_post.1",
    }
    with manager.attach(model) as run:
        same = model.generate(PROMPT, **{**GREEDY, **options})
    whole = run.result(same)
    assert torch.equal(same, out)
    for i in np.flatnonzero(result.coverage.seen):  # what is seen is right; what is retained may differ after a gap
        mine, full = (
            dict(zip(r.scores.active(i).tolist(), r.scores.active_scores(i).tolist(), strict=True))
            for r in (result, whole)
        )
        assert mine.keys() & full.keys() and all(abs(mine[p] - full[p]) < 1e-5 for p in mine.keys() & full.keys())


def test_removing_hooks_in_a_plain_forward_is_an_error_or_unseen(manager, model):
    with (
        manager.attach(model),
        torch.no_grad(),
        Removed(model, [0]),
        pytest.raises(AlignmentError, match="without reaching"),
    ):
        model(PROMPT)
    with manager.attach(model, on_gap="report") as run, torch.no_grad():
        with Removed(model, [0]):
            model(PROMPT)
        assert set(unseen(run.result(PROMPT)).values()) == {"the host did not run through resid_post.1"}
        model(PROMPT)
        assert not unseen(run.result(PROMPT, generation=1))


def test_beams_after_a_gap_are_refused(manager, model):
    with (
        manager.attach(model, on_gap="report"),
        Blinded(model, [2]),
        pytest.raises(AlignmentError, match="past our hooks"),
    ):
        model.generate(PROMPT, **GREEDY, num_beams=2)


@pytest.mark.skipif(OLDEST, reason="refused there")
class TestRequests:
    @pytest.fixture
    def batching(self):
        from transformers import ContinuousBatchingConfig, GenerationConfig

        return {
            "generation_config": GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=PAD, eos_token_id=60),
            "continuous_batching_config": ContinuousBatchingConfig(
                max_batch_tokens=4, page_size=4, num_blocks=64, allow_block_sharing=False
            ),
        }

    @pytest.mark.parametrize("lost", [[0], [1], [2, 3], [4]], ids=str)
    def test_bypassed_packed_forward_is_unseen_and_the_rest_exact(self, manager, model, batching, lost):
        gaps, memory = [], MemorySink()
        with manager.attach(model, on_gap="report", followers=[hears(gap=gaps.append)]) as run, Blinded(model, lost):
            run.follow(memory)
            outputs = model.generate_batch([PROMPT[0].tolist()], **batching, progress_bar=False)
        # 4 tokens in the first forward, the fifth in the second, then those generated one by one.
        columns = [c for n in lost for c in ([0, 1, 2, 3] if n == 0 else [3 + n])]
        result, [output] = run.result(outputs), outputs.values()
        assert len(output.generated_tokens) == 6 and unseen(result) == {**dict.fromkeys(columns, GAP), 10: LAST}
        assert gaps[0].first == columns[0] and gaps[-1].last == columns[-1]
        whole = torch.tensor([[*output.prompt_ids, *output.generated_tokens]])
        same_prompt(result, prompt_scores(manager, model, whole), sorted(set(range(5)) - set(columns)))
        assert result.phase.tolist() == [0] * 5 + [1] * 6
        told = {int(batch.position[i]): int(batch.token_id[i]) for batch in memory.batches for i in range(len(batch))}
        assert told == dict(enumerate(whole[0, :10].tolist()))

    def test_unseen_request_of_an_open_batching_manager_is_reported_at_the_end(self, manager, model, batching):
        told = pytest.raises(CallbackFailed, match="request r0 is at column 10, the taps saw 0")
        with (
            told,
            manager.attach(model),
            Blinded(model, range(99)),
            model.continuous_batching_context_manager(**batching) as serving,
        ):
            serving.add_request(PROMPT[0].tolist(), request_id="r0")
            while not ((found := serving.get_result(timeout=1)) and found.is_finished()):
                pass
        assert found.error is None and len(found.generated_tokens) == 6  # the generation went on

    def test_stop_ends_running_and_waiting_requests_and_no_later_ones(self, manager, model, batching):
        with manager.attach(model) as run:
            run.follow(lambda placed, scores: run.stop() if placed.phase == 1 and placed.columns[0] == 6 else None)
            outputs = model.generate_batch(
                [[1, 5, 9, 13, 7], [1, 44, 3], [8, 2], [7, 7, 7]], **batching, progress_bar=False
            )
            after = model.generate_batch([[1, 5]], **batching, progress_bar=False)
            run.stop()
            at_once = model.generate_batch([[1, 5], [3]], **batching, progress_bar=False)
            again = model.generate(PROMPT, **GREEDY)
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        assert lengths[0] == 3 and lengths[-1] == 1 and max(lengths) < 6
        assert [len(output.generated_tokens) for output in after.values()] == [6]
        assert [len(output.generated_tokens) for output in at_once.values()] == [1, 1] and again.shape[1] == 8


# -- threads -------------------------------------------------------------------------------------


class Pausing(StoppingCriteria):
    """Waits at one column until it is let go on."""

    def __init__(self, column):
        self.column, self.reached, self.go_on = column, threading.Event(), threading.Event()

    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] == self.column:
            self.reached.set()
            assert self.go_on.wait(60)
        return torch.zeros(len(ids), dtype=torch.bool)


def paused(model, ids, column=8):
    """A thread that generates and waits at a column; what it gives back when it is joined is put in `outs`."""
    pause, outs = Pausing(column), []

    def work():
        try:
            outs.append(model.generate(ids, **GREEDY, stopping_criteria=[pause]))
        except Exception as error:
            outs.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert pause.reached.wait(60)

    def finish():
        pause.go_on.set()
        thread.join(60)
        return outs[0]

    return finish


def test_stop_mine_outside_the_generating_thread_is_refused(manager, model):
    with manager.attach(model) as run, pytest.raises(ConfigError, match=r"call run.stop\(\)"):
        run.stop_mine()


def test_stop_ends_running_generations_and_not_later_ones(manager, model):
    with manager.attach(model) as run:
        finish = paused(model, PROMPT)
        run.stop()
        other = model.generate(PROMPT + 1, **GREEDY)  # begins while the stopped one still runs
        stopped = finish()
        run.stop()
        first, second = model.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY)
    assert stopped.shape[1] == 8 and other.shape[1] == 13 and first.shape[1] == 6 and second.shape[1] == 13


def test_earlier_generation_of_another_thread_is_left_alone(manager, model, caplog):
    begun, attached, outs = threading.Event(), threading.Event(), []
    original = type(model)._prepare_generation_config

    def wait(*args, **kwargs):  # inside generate(), before it makes its criteria
        begun.set()
        assert attached.wait(60)
        return original(model, *args, **kwargs)

    model._prepare_generation_config = wait

    def work():
        try:
            outs.append(model.generate(PROMPT, **GREEDY))
        except Exception as error:
            outs.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    del model._prepare_generation_config
    with manager.attach(model) as run:
        attached.set()
        thread.join(60)
        assert not run.recordings
        mine = model.generate(PROMPT, **GREEDY)
    assert torch.equal(outs[0], mine) and "not watched" in caplog.text
    assert len(run.result(mine)) == 13


def test_oldest_scores_of_all_threads_are_forgotten_first(manager, model):
    with manager.attach(model, keep_tokens=6) as run:
        finish = paused(model, PROMPT)
        model.generate(PROMPT + 1, **GREEDY)
        running, done = run.recordings  # the older one still runs
        assert running.n_kept == 0 and done.n_kept == 6
        out = finish()
    result = run.result(out)
    assert unseen(result) == {**dict.fromkeys(range(7), FORGOTTEN), 12: LAST}
    assert (running.n_kept, done.n_kept) == (5, 1)


# -- streamers -----------------------------------------------------------------------------------


def test_reader_of_a_held_streamer_does_not_wait_for_a_refused_generate(manager, model):
    inner = TextIteratorStreamer(tokenizer(), timeout=10)
    with manager.attach(model) as run:
        with pytest.raises(ConfigError, match="zero length"):
            model.generate(PROMPT[:, :0], **GREEDY, streamer=run.hold(inner))
        assert "".join(inner) == ""


class Broken(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        raise OSError("the reader is gone")


def test_streamer_error_does_not_replace_the_error_of_generate(manager, model, caplog):
    class Failing(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return 1 / 0

    with manager.attach(model) as run, pytest.raises(ZeroDivisionError):
        model.generate(PROMPT, **GREEDY, streamer=run.hold(Broken()), stopping_criteria=[Failing()])
    assert "the reader is gone" in caplog.text


def test_stream_of_several_sequences_is_refused_at_creation(manager):
    model = make_model()
    model.generation_config.num_return_sequences, model.generation_config.do_sample = 2, True
    with pytest.raises(ConfigError, match="2 sequences"):
        manager.stream(model, tokenizer(), "w1", max_new_tokens=3)
