"""Custom decode loops are exact inside run.generating, and an error when a rule or sink would miss their tokens."""

import copy
import threading

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, LlamaForSequenceClassification, MambaConfig, MambaForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutputWithPast

from conftest import EOS, OLDEST, PAD, make_model, make_pack
from oracle import check
from probemon import DynamicProbeManager
from probemon.errors import AlignmentError, ConceptRaised, ConfigError, UnsupportedDecoding
from probemon.host.cache import filled_cache
from probemon.monitor.sinks import MemorySink
from probemon.tracking.recording import LAST

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
ROWS = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 13, 7, 22, 4], [PAD, 1, 8, 33, 6]])
GREEDY = {"do_sample": False, "pad_token_id": PAD}


@pytest.fixture
def manager(pack):
    return DynamicProbeManager(pack)


def decode(run, model, ids, n, *, mask=None, cached=True, chunk=None, eos=None, cache=None, loop_ended=True):
    """A real loop: prompt in chunks or whole, a cache or none, padding, rows that end."""
    begun = 0 if cache is None else cache.get_seq_length()
    with torch.no_grad(), run.generating(from_column=ids.shape[1]) as loop:
        cache = (DynamicCache() if cache is None else cache) if cached else None
        for at in range(begun, ids.shape[1], chunk or ids.shape[1]) if cached else [0]:
            end = min(at + (chunk or ids.shape[1]), ids.shape[1]) if cached else ids.shape[1]
            out = model(
                ids[:, at:end],
                attention_mask=None if mask is None else mask[:, :end],
                past_key_values=cache,
                use_cache=cached,
            )
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(n):
            token = torch.where(ended, PAD, out.logits[:, -1].argmax(-1))
            ids = torch.cat([ids, token[:, None]], dim=1)
            mask = None if mask is None else torch.cat([mask, torch.ones(len(ids), 1, dtype=mask.dtype)], dim=1)
            ended = loop.sampled(ids, ended=None if eos is None else token == eos)
            if ended.all():
                break
            out = model(ids[:, -1:] if cached else ids, attention_mask=mask, past_key_values=cache, use_cache=cached)
    return ids


@pytest.mark.parametrize(
    "how", [{}, {"cached": False}, {"chunk": 2}, {"mask": torch.ones(1, 5, dtype=torch.int64)}], ids=str
)
def test_custom_loop_has_the_scores_of_generate(manager, model, how):
    with manager.attach(model) as run:
        ids = decode(run, model, PROMPT, 7, **how)
        out = model.generate(PROMPT, max_new_tokens=7, eos_token_id=None, **GREEDY)
    assert torch.equal(ids, out)
    mine, oracle = run.result(ids, generation=0), run.result(out)
    assert (mine.phase == oracle.phase).all()
    # After the last token that was sampled the loop runs one forward more than generate does.
    check(manager, model, mine, 0, ids[0].tolist(), 0, [(5, 7)])
    assert oracle.coverage.unseen[-1] == LAST and mine.coverage.unseen[-1] == ""


def test_left_padding_and_ended_sequences_add_no_tokens(manager, model):
    mask = (ROWS != PAD).long()
    with manager.attach(model) as run:
        plain = model.generate(ROWS, attention_mask=mask, max_new_tokens=8, eos_token_id=None, **GREEDY)
        eos = int(plain[1, 7])  # what row 1 says third
        ids = decode(run, model, ROWS, 8, mask=mask, eos=eos)
        out = model.generate(ROWS, attention_mask=mask, max_new_tokens=8, eos_token_id=eos, **GREEDY)
    assert torch.equal(ids, out) and (out == PAD)[:, 5:].any()
    mine, oracle = run.result(ids, generation=1), run.result(out)
    assert (mine.row == oracle.row).all() and (mine.position == oracle.position).all()
    for i in range(len(oracle.row)):
        if not oracle.coverage.unseen[i]:
            assert np.abs(mine.scores.active_scores(i) - oracle.scores.active_scores(i)).max() < 1e-5


def test_rules_stops_and_sinks_work_in_a_custom_loop(manager, model):
    events, memory = [], MemorySink()
    with manager.attach(model) as run:
        ids = decode(run, model, PROMPT, 8)
    third = run.result(
        ids
    ).scores  # the third token that is generated has the loudest concept that the rules below are on
    top = int(third.active(7)[np.argmax(third.active_scores(7))])
    level = float(np.max(third.active_scores(7))) - 1e-4
    with manager.attach(model) as run:
        run.on(top, above=level, action=events.append)
        run.on(top, above=level, action="stop")
        run.follow(memory)
        ids = decode(run, model, PROMPT, 8)
    with manager.attach(model) as oracle:
        oracle.on(top, above=level, action="stop")
        out = model.generate(PROMPT, max_new_tokens=8, eos_token_id=None, **GREEDY)
    assert torch.equal(ids, out) and ids.shape[1] < 13, "the loop ends where generate does"
    assert [event.column for event in events] == [ids.shape[1] - 2]
    phases = {int(p): batch.phase for batch in memory.batches for p in batch.position}
    assert phases == {p: int(p >= 5) for p in range(ids.shape[1] - 1)}
    with manager.attach(model) as run:
        run.on(top, above=level, action="raise")
        with pytest.raises(ConceptRaised):
            decode(run, model, PROMPT, 8)
    with manager.attach(model) as run:
        run.stop()
        assert decode(run, model, PROMPT, 8).shape[1] == 6


class Shown(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_held_streamer_holds_tokens_in_a_custom_loop(manager, model):
    shown = Shown()
    with torch.no_grad(), manager.attach(model) as run:
        run.on("c0", above=0.0, action=lambda event: None)
        held = run.hold(shown)
        with run.generating(from_column=5) as loop:
            held.put(PROMPT)
            ids, cache = PROMPT, DynamicCache()
            for step in range(4):
                token = model(ids[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, token], dim=1)
                loop.sampled(ids)
                held.put(token)
                assert shown.tokens == ids[0, : 5 + step].tolist(), "a token is shown once it has been read"
            held.end()
    assert held.withheld == ids[0, -1:].tolist() and shown.ended


@pytest.mark.skipif(OLDEST, reason="transformers 5.0: Mamba's own forward wants a cache_position")
def test_custom_loop_supports_a_second_turn_and_recurrent_models(manager, model, tmp_path):
    cache = DynamicCache()
    with manager.attach(model) as run:
        first = decode(run, model, PROMPT, 3, cache=cache)
        longer = torch.cat([first, torch.tensor([[33, 34]])], dim=1)
        second = decode(run, model, longer, 3, cache=cache)
    check(manager, model, run.result(second), 0, second[0].tolist(), 0, [(5, 3), (2, 3)])
    config = MambaConfig(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=3,
        state_size=4,
        intermediate_size=32,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    host = MambaForCausalLM(config).eval()
    recurrent = DynamicProbeManager(make_pack(tmp_path / "mamba", host))
    with torch.no_grad(), recurrent.attach(host) as run, run.generating(from_column=5) as loop:
        out, ids = host(PROMPT, use_cache=True), PROMPT
        for _ in range(4):
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], dim=1)
            loop.sampled(ids)
            out = host(ids[:, -1:], cache_params=out.cache_params, use_cache=True)
    check(recurrent, host, run.result(ids), 0, ids[0].tolist(), 0, [(5, 4)])


def test_misuse_of_a_custom_loop_is_named(manager, model):
    more = torch.cat([PROMPT, PROMPT[:, :1]], dim=1)
    for from_column in (0, -1, 1.5, True, None, "5", 2**70):
        with manager.attach(model) as run, pytest.raises(ConfigError, match="from_column is"):
            run.generating(from_column)
    with pytest.raises(ConfigError, match="inside of the with block"), run.generating(5):
        pass
    with torch.no_grad(), manager.attach(model) as run:
        with run.generating(5), pytest.raises(ConfigError, match="not for the inside"), run.generating(5):
            pass
        with run.generating(5), pytest.raises(UnsupportedDecoding, match=r"inside run\.generating"):
            model.generate(PROMPT, max_new_tokens=2)
        with run.generating(5) as loop, pytest.raises(AlignmentError, match="before the stopping criteria saw it"):
            cache = DynamicCache()
            model(PROMPT, past_key_values=cache)
            model(PROMPT[:, :1], past_key_values=cache)
        with run.generating(5), pytest.raises(AlignmentError, match="3 generated columns in one forward"):
            model(torch.cat([PROMPT, PROMPT[:, :3]], dim=1))
        with run.generating(5) as loop:
            model(PROMPT)
            for bad in (PROMPT, torch.cat([more, more], 1), more[0], more.float(), more.tolist()):
                with pytest.raises((AlignmentError, ConfigError), match="ids"):
                    loop.sampled(bad)
            for bad in (torch.zeros(2, dtype=torch.bool), torch.zeros(1), [False]):
                with pytest.raises(ConfigError, match="ended is"):
                    loop.sampled(more, ended=bad)
            assert loop.sampled(more, ended=torch.tensor([True])).all()
            with pytest.raises(AlignmentError, match="every row has ended"):
                loop.sampled(torch.cat([more, more[:, :1]], 1))
        with pytest.raises(ConfigError, match="in the thread that opened it"):
            loop.sampled(more)
        with (
            run.generating(5) as loop,
            pytest.raises(AlignmentError, match="not the sequence's tokens at their own places"),
        ):
            cache = DynamicCache()
            model(PROMPT, past_key_values=cache)
            loop.sampled(more)
            model(more[:, -1:] + 1, past_key_values=cache)  # another token than was sampled
        with run.generating(5) as loop:
            model(PROMPT)
            loop.sampled(more)
            other = torch.cat([more, more[:, :1]], 1)
            other[0, 2] += 1
            with pytest.raises(UnsupportedDecoding, match="another sequence than it had"):
                loop.sampled(other)


def test_custom_loops_of_two_threads_are_exact(manager, model):
    found, gate = {}, threading.Barrier(2)

    def work(number, run):
        gate.wait()
        found[number] = decode(run, model, PROMPT + number, 6)

    with manager.attach(model) as run:
        threads = [threading.Thread(target=work, args=(number, run)) for number in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    for ids in found.values():
        check(manager, model, run.result(ids), 0, ids[0].tolist(), 0, [(5, 6)])


# -- what is not followed never looks calm ---------------------------------------------------------


def other_head(model):
    host = LlamaForCausalLM(model.config).eval()
    host.model, host.lm_head = model.model, model.lm_head
    return host


@pytest.mark.parametrize("ruled", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("attached", ["base", "another head"])
def test_generate_of_an_unattached_model_is_refused(manager, attached, batch, ruled):
    host = make_model()
    with (
        manager.attach(host.model if attached == "base" else other_head(host)) as run,
        pytest.raises(UnsupportedDecoding, match="attached to Llama"),
    ):
        if ruled:
            run.on("c0", above=0.0, action="stop")
        host.generate(PROMPT.repeat(batch, 1), max_new_tokens=8, **GREEDY)
    assert not any(recording.n_entries for recording in run.recordings)


def test_classifier_on_a_shared_decoder_is_read_as_a_document(manager, model):
    """A head without generate() is read as it always was."""
    config = copy.deepcopy(model.config)
    head = LlamaForSequenceClassification(config).eval()
    head.model = model.model
    with torch.no_grad(), manager.attach(head) as run:
        head(PROMPT)
    check(manager, model, run.result(PROMPT), 0, PROMPT[0].tolist(), 0, [(5, 0)])


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("waits", ["rule", "sink"])
@pytest.mark.parametrize("host", ["whole", "base"])
def test_untracked_loop_is_refused_if_a_rule_or_sink_needs_its_tokens(manager, model, host, waits, cached):
    runs = model if host == "whole" else model.model
    with torch.no_grad(), pytest.raises(UnsupportedDecoding, match=r"run\.generating"), manager.attach(runs) as run:
        run.on("c0", above=0.0) if waits == "rule" else run.follow(MemorySink())
        ids, cache = PROMPT, DynamicCache() if cached else None
        for _ in range(3):
            model(ids[:, cache.get_seq_length() :] if cached else ids, past_key_values=cache, use_cache=cached)
            ids = torch.cat([ids, PROMPT[:, :1]], dim=1)


def test_rules_that_could_never_fire_are_reported_at_the_end(manager, model):
    def silent(event):
        raise AssertionError(event)

    with torch.no_grad():
        with (
            pytest.raises(ConfigError, match=r"1 rule could not fire in 2 documents"),
            manager.attach(model) as run,
        ):
            run.on("c0", above=0.0, action=silent)
            model(PROMPT)
            model(PROMPT + 1)
        with pytest.raises(ConfigError, match=r"could not fire in 1 document"), manager.attach(model) as run:
            run.on("c0", above=0.99999, action=silent)
            model.generate(PROMPT, max_new_tokens=2, eos_token_id=None, **GREEDY)
            model(PROMPT)  # what was followed before excuses nothing
        with pytest.raises(ZeroDivisionError), manager.attach(model) as run:
            run.on("c0", above=0.0, action=silent)
            model(PROMPT)
            raise ZeroDivisionError
        with manager.attach(model) as run:  # a prefix that is read before a generation is no reason, copied or not
            run.on("c0", above=0.99999, action=silent)
            cache = DynamicCache()
            model(PROMPT[:, :2], past_key_values=cache)
            model(PROMPT[:, 2:4], past_key_values=cache)
            for prefix in (copy.deepcopy(cache), cache):
                model.generate(PROMPT, past_key_values=prefix, max_new_tokens=2, eos_token_id=None, **GREEDY)


@pytest.mark.skipif(OLDEST, reason="transformers 5.0: preparing inputs wants a cache_position")
@pytest.mark.parametrize("cached", [True, False])
def test_loop_with_generates_input_preparation_is_not_a_generate(manager, model, cached):
    def loop(n=3):
        ids, state = PROMPT, {"past_key_values": DynamicCache()} if cached else {}
        for _ in range(n):
            inputs = model.prepare_inputs_for_generation(
                ids[:, -1:] if cached and ids.shape[1] > 5 else ids, attention_mask=torch.ones_like(ids), **state
            )
            ids = torch.cat([ids, model(**{**inputs, "use_cache": cached}).logits[:, -1:].argmax(-1)], dim=1)

    with torch.no_grad(), pytest.raises(UnsupportedDecoding, match=r"run\.generating"), manager.attach(model) as run:
        run.follow(MemorySink())
        loop()
    with torch.no_grad(), manager.attach(model) as run:
        loop()
    assert sum(recording.n_entries for recording in run.recordings) == (7 if cached else 5 + 6 + 7)


def test_sliding_window_and_interleaved_loops_are_refused(manager, model):
    with torch.no_grad():
        with manager.attach(model) as run:  # documents, of which one is read twice
            run.follow(memory := MemorySink())
            for ids in (torch.full((1, 5), 9), torch.full((1, 5), 9), PROMPT, PROMPT + 1):
                model(ids)
        assert len(memory.batches) == 4
        with pytest.raises(UnsupportedDecoding, match=r"run\.generating"), manager.attach(model) as run:
            run.follow(MemorySink())
            ids = PROMPT
            for _ in range(3):
                ids = torch.cat([ids, model(ids[:, -5:]).logits[:, -1:].argmax(-1)], dim=1)
        with pytest.raises(UnsupportedDecoding, match=r"run\.generating"), manager.attach(model) as run:
            run.follow(MemorySink())
            both = [PROMPT, PROMPT + 1]
            for _ in range(2):
                both = [torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1) for ids in both]


@pytest.mark.parametrize("how", ["by hand", "looked up between"])
def test_generation_tracked_only_by_another_run_is_refused(pack, model, how):
    first, second = DynamicProbeManager(pack).attach(model), DynamicProbeManager(pack).attach(model)
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedDecoding, match="another run follows this generation"),
        first as one,
    ):
        generate = model.generate
        with second as two:
            two.on("c0", above=0.0, action="raise")
            if how == "by hand":
                decode(one, model, PROMPT, 3)
            else:
                generate(PROMPT, max_new_tokens=3, **GREEDY)


def test_generate_called_on_the_class_is_refused_in_any_thread_with_rules(manager, model):
    raised = []

    def work():
        try:
            type(model).generate(model, PROMPT, max_new_tokens=3, **GREEDY)
        except UnsupportedDecoding as error:
            raised.append(error)

    with manager.attach(model) as run:
        run.on("c0", above=0.0)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "called on the class" in str(raised[0])


def test_loop_that_never_reports_sampled_tokens_is_an_error(manager, model):
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match=r"before from_column=100, and loop\.sampled was never called"),
        manager.attach(model) as run,
    ):
        run.on("c0", above=0.0)
        with run.generating(from_column=np.int64(100)):
            cache = DynamicCache()
            model(PROMPT, past_key_values=cache)
            model(PROMPT[:, :1], past_key_values=cache)


def test_held_streamer_needs_the_prompt_first(manager, model):
    shown = Shown()
    with (
        torch.no_grad(),
        manager.attach(model) as run,
        run.generating(from_column=5) as loop,
        pytest.raises(ConfigError, match="the prompt first, 5 ids"),
    ):
        held = run.hold(shown)
        token = model(PROMPT).logits[:, -1:].argmax(-1)
        loop.sampled(torch.cat([PROMPT, token], dim=1))
        held.put(token)
    assert not shown.tokens
    with manager.attach(model) as run, pytest.raises(ConfigError, match="given nothing"):
        run.hold(shown).end()


def test_part_of_a_document_is_not_an_output(manager, model):
    with torch.no_grad(), manager.attach(model) as run:
        model(PROMPT)
    with pytest.raises(AlignmentError, match="the ids have 3 columns, 5 were watched"):
        run.result(PROMPT[:, :3])
    for bad in (PROMPT.float(), PROMPT.bool(), PROMPT.to("meta")):
        with pytest.raises(ConfigError, match="out is a tensor"):
            run.result(bad)


def test_held_streamer_of_another_head_shows_nothing(manager):
    host, shown = make_model(), Shown()
    with manager.attach(host.model) as run, pytest.raises(ConfigError, match="no run watches this generate"):
        host.generate(PROMPT, max_new_tokens=4, streamer=run.hold(shown), **GREEDY)
    assert not shown.tokens


def test_earlier_generation_on_another_head_continues_unwatched(manager):
    host = make_model()
    begun, attached = threading.Event(), threading.Event()
    found = []

    def wait(ids, scores, **kwargs):
        begun.set()
        attached.wait(30)
        return torch.zeros(len(ids), dtype=torch.bool)

    def work():
        from transformers import StoppingCriteriaList

        found.append(
            host.generate(
                PROMPT, max_new_tokens=4, eos_token_id=None, stopping_criteria=StoppingCriteriaList([wait]), **GREEDY
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(30)
    with manager.attach(host.model) as run:
        attached.set()
        thread.join()
    assert found and not any(recording.n_entries for recording in run.recordings)


def test_guidance_by_a_logits_processor_is_refused_by_name(pack, model):
    from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor

    guided = [UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, model, unconditional_ids=PROMPT[:, :2])]
    with DynamicProbeManager(pack).attach(model), pytest.raises(UnsupportedDecoding, match="classifier-free guidance"):
        model.generate(PROMPT, max_new_tokens=3, logits_processor=guided, eos_token_id=None, **GREEDY)


# -- a copied prefix --------------------------------------------------------------------------------


@pytest.mark.parametrize("goes_on", ["generate", "by hand", "document"])
def test_deep_copies_of_a_prompt_cache_are_recognised(manager, model, goes_on):
    """The recipe for prompt caching: one prefix is run once, and every question goes on from a copy of its cache."""
    prefix, questions = PROMPT[:, :3], [[20, 21], [30, 31, 32]]
    with torch.no_grad(), manager.attach(model) as run:
        cache = DynamicCache()
        model(prefix, past_key_values=cache)
        for question in questions:
            ids = torch.cat([prefix, torch.tensor([question])], dim=1)
            copied = copy.deepcopy(cache)
            if goes_on == "document":
                model(ids[:, 3:], past_key_values=copied)
                turns = [(ids.shape[1], 0)]
            elif goes_on == "generate":
                ids = model.generate(ids, past_key_values=copied, max_new_tokens=3, eos_token_id=None, **GREEDY)
                turns = [(3 + len(question), 2)]
            else:
                ids = decode(run, model, ids, 3, cache=copied)
                turns = [(3 + len(question), 3)]
            check(manager, model, run.result(ids), 0, ids[0].tolist(), 0, turns)
        assert cache.get_seq_length() == 3


def test_foreign_or_edited_cache_is_unseen(manager, model):
    """Of another prompt, of a run that did not see it, or edited: never taken for what was seen."""
    with torch.no_grad():
        foreign = DynamicCache()
        model(PROMPT + 1, past_key_values=foreign)
        with manager.attach(model) as run:
            cache = DynamicCache()
            model(PROMPT, past_key_values=cache)
            edited = copy.deepcopy(cache)
            edited.layers[-1].values[0, 0, 1] += 1e-3
            for other, before in ((foreign, PROMPT + 1), (edited, PROMPT)):
                ids = torch.cat([before, torch.tensor([[33, 34]])], dim=1)
                out = model.generate(ids, past_key_values=other, max_new_tokens=2, eos_token_id=None, **GREEDY)
                assert [bool(reason) for reason in run.result(out).coverage.unseen] == [True] * 5 + [False] * 3 + [True]


# -- a result is of one generation -------------------------------------------------------------------


def steered(model):
    """The host moves between generations: the same ids, other states."""
    amount = [0.0]
    return amount, model.model.layers[0].register_forward_hook(lambda module, args, out: out + amount[0])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"return_dict_in_generate": True}], ids=str)
def test_ambiguous_output_of_two_generations_is_refused(manager, options):
    model = make_model()
    options = {"max_new_tokens": 3, "eos_token_id": None, **GREEDY, **options}
    amount, handle = steered(model)
    with manager.attach(model) as run:
        first = model.generate(PROMPT, **options)
        amount[0] = 1e-4  # too little for other tokens, enough for other scores
        second = model.generate(PROMPT, **options)
    handle.remove()
    ids = [getattr(out, "sequences", out) for out in (first, second)]
    assert torch.equal(*ids)
    one, two = run.result(first), run.result(second)
    assert any((one.scores.active_scores(i) != two.scores.active_scores(i)).any() for i in range(5))
    with pytest.raises(AlignmentError, match=r"generations 0, 1 of this run have these ids.*the very object"):
        run.result(ids[0].clone())
    for number, result in enumerate((one, two)):
        again = run.result(ids[0].clone(), generation=number)
        assert all((again.scores.active_scores(i) == result.scores.active_scores(i)).all() for i in range(7))
    with pytest.raises(AlignmentError, match="generation 7 was not watched"):
        run.result(ids[0].clone(), generation=7)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("column", range(8))
def test_edited_output_is_refused_at_any_position(manager, model, column, options):
    """The last column too, of which no forward is seen; in a copy and in the very object."""
    with manager.attach(model) as run:
        out = model.generate(torch.cat([PROMPT, PROMPT + 1]), max_new_tokens=3, eos_token_id=None, **GREEDY, **options)
        short = model.generate(PROMPT, max_new_tokens=1, eos_token_id=None, **GREEDY)
    edited = out.clone()
    edited[1, column] = (edited[1, column] + 1) % 61
    with pytest.raises(AlignmentError, match=r"none of the generations 0, 1 of this run has these ids"):
        run.result(edited)
    out[1, column] = (out[1, column] + 1) % 61
    with pytest.raises(AlignmentError):
        run.result(out)
    with pytest.raises(AlignmentError, match=r"none of the generations"):
        run.result(torch.cat([short, short]))


def test_edited_padding_is_refused(manager, model):
    ids = torch.tensor([[1, 5, 9, 13, 7], [1, 22, 4, 8, 33]])
    with manager.attach(model) as run:
        plain = model.generate(ids, max_new_tokens=6, eos_token_id=None, **GREEDY)
        out = model.generate(ids, max_new_tokens=6, eos_token_id=int(plain[0, 5]), **GREEDY)
    assert out.shape[1] > 6 and out[0, -1] == PAD
    out = out.clone()
    assert run.result(out)
    out[0, -1] = EOS
    with pytest.raises(AlignmentError):
        run.result(out)


def test_rerunning_a_prompt_with_another_mask_is_refused(manager, model):
    """Its columns would keep the scores of the first time, and what follows goes on from the second."""
    mask = (ROWS != PAD).long()
    with torch.no_grad(), manager.attach(model) as run, run.generating(from_column=5):
        cache = DynamicCache()
        model(ROWS[:, :3], past_key_values=cache)
        cache = DynamicCache()
        with pytest.raises(AlignmentError, match=r"columns 0\.\.2 are run again, and the attention mask hides other"):
            model(ROWS, past_key_values=cache, attention_mask=mask)


def test_rerunning_an_unchanged_prompt_keeps_its_scores(manager, model):
    mask = (ROWS != PAD).long()
    with torch.no_grad(), manager.attach(model) as run, run.generating(from_column=5) as loop:
        model(ROWS[:, :3], past_key_values=DynamicCache(), attention_mask=mask[:, :3])
        out = model(ROWS, past_key_values=DynamicCache(), attention_mask=mask)
        ids = torch.cat([ROWS, out.logits[:, -1:].argmax(-1)], dim=1)
        loop.sampled(ids)
    result = run.result(ids)
    for row, n_padding in enumerate((2, 0, 1)):
        check(manager, model, result, row, ids[row].tolist(), n_padding, [(5 - n_padding, 0)])


def test_cache_returned_in_a_tuple_is_followed(manager, model):
    cache, ids = DynamicCache(), torch.cat([PROMPT, PROMPT[:, :2]], dim=1)
    with manager.attach(model.model) as run, torch.no_grad():
        model.model(PROMPT, past_key_values=cache, return_dict=False)
        model.model(PROMPT[:, :2], past_key_values=cache, return_dict=False)
        result = run.result(ids)
    check(manager, model, result, 0, ids[0].tolist(), 0, [(ids.shape[1], 0)])


def test_text_turn_after_an_embedding_turn_is_exact(manager, model):
    cache, embeds = DynamicCache(), model.get_input_embeddings()(PROMPT).detach()
    with manager.attach(model) as run:
        first = model.generate(
            inputs_embeds=embeds, past_key_values=cache, max_new_tokens=2, eos_token_id=None, **GREEDY
        )
        ids = torch.cat([PROMPT, first, PROMPT[:, :1]], dim=1)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=2, eos_token_id=None, **GREEDY)
        result = run.result(out)
    check(manager, model, result, 0, out[0].tolist(), 0, [(5, 1), (2, 1)])


def test_filled_cache_is_found_in_an_output_a_tuple_or_the_argument():
    class Own:
        """A cache of remote code, which is none of transformers' classes."""

    hidden, own, cache = torch.zeros(1, 1, 16), Own(), DynamicCache()
    assert filled_cache(BaseModelOutputWithPast(hidden, own), None) is own
    assert filled_cache((hidden, cache), None) is cache and filled_cache((hidden,), own) is own
    assert filled_cache(BaseModelOutputWithPast(hidden), cache) is cache
