"""Promise 2: in every supported mode each score belongs to the right token, compared with one full forward."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from conftest import EOS, OLDEST, PAD, make_model, make_pack, n_hooks, not_in_oldest
from oracle import check, expected
from probemon import DynamicProbeManager
from probemon.errors import AlignmentError, ConfigError, UnsupportedDecoding, UnsupportedModel
from probemon.host.compiled import Buffers
from probemon.host.internals import CACHE_NAME
from probemon.tracking.recording import BEFORE, LAST

NO_EOS = {"eos_token_id": None, "pad_token_id": PAD}
NO_TOKEN = 61  # beyond the vocabulary: an end that never comes, where transformers 5.0 cannot do without one
NAMES_OF_CACHE = sorted({CACHE_NAME, "past_key_values"})  # 5.24 takes its own name, and the one of before
PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])
BATCH_MASK = (BATCH != PAD).long()


@pytest.fixture(params=["pack", "two_sites"])
def manager(request):
    return DynamicProbeManager(request.getfixturevalue(request.param), keep_top_k=6)


def watch(manager, model, **options):
    with manager.attach(model) as run:
        out = model.generate(**options)
    sequences = getattr(out, "sequences", out)
    return run, run.result(out), sequences.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 1.5},
        {"do_sample": False, "use_cache": False},
        not_in_oldest({"do_sample": False, "prefill_chunk_size": 2}, why="makes no cache for the chunks"),
        {"do_sample": False, "return_dict_in_generate": True},
    ],
    ids=str,
)
def test_single_sequence_is_exact(manager, model, options):
    torch.manual_seed(3)
    _, result, out = watch(manager, model, input_ids=PROMPT, max_new_tokens=9, **options, **NO_EOS)
    mine = check(manager, model, result, 0, out[0], 0, [(5, 8)])
    assert [i for i in mine if result.coverage.unseen[i]] == [13]
    assert result.coverage.unseen[13] == LAST and len(result) == 14


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 1.5},
        {"use_cache": False},
        not_in_oldest({"prefill_chunk_size": 3}, why="makes no cache for the chunks"),
    ],
    ids=str,
)
def test_left_padded_batch_is_exact(manager, model, options):
    torch.manual_seed(4)
    options = {"do_sample": False, **options}
    _, result, out = watch(
        manager, model, input_ids=BATCH, attention_mask=BATCH_MASK, max_new_tokens=7, **options, **NO_EOS
    )
    for row, first in enumerate([2, 0, 1]):
        mine = check(manager, model, result, row, out[row], first, [(5 - first, 6)])
        assert result.coverage.unseen[mine[-1]] == LAST


def test_sequences_that_finish_early_are_exact(manager, model):
    bare = model.generate(BATCH, attention_mask=BATCH_MASK, max_new_tokens=12, do_sample=False, **NO_EOS)
    # A token that row 0 makes early and row 1 later or never: it becomes the end of sequence.
    early = next(t for t in bare[0, 5:9].tolist() if t not in bare[1, 5:13].tolist())
    _, result, out = watch(
        manager,
        model,
        input_ids=BATCH,
        attention_mask=BATCH_MASK,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=early,
        pad_token_id=PAD,
    )
    length = len(out[0])
    n_generated = [r[5:].index(early) + 1 if early in r[5:] else length - 5 for r in out]
    assert n_generated[0] < length - 5
    for row, first in enumerate([2, 0, 1]):
        seen = n_generated[row] - (n_generated[row] == length - 5)
        mine = check(manager, model, result, row, out[row], first, [(5 - first, seen)])
        assert len(mine) == 5 - first + n_generated[row]  # the end of sequence is a token, the padding after it is not


def test_padding_with_the_end_token_is_not_a_token(manager, model):
    """A row stopped by a criterion of one's own is padded with the end of sequence: that padding is not its end."""

    class StopRowZero(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 7, False, False])

    _, result, out = watch(
        manager,
        model,
        input_ids=BATCH,
        attention_mask=BATCH_MASK,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=60,
        pad_token_id=60,
        stopping_criteria=StoppingCriteriaList([StopRowZero()]),
    )
    assert out[0][7:] == [60] * 6
    assert len(check(manager, model, result, 0, out[0], 2, [(3, 2)])) == 5
    check(manager, model, result, 1, out[1], 0, [(5, 7)])


def test_sequence_ended_by_a_criterion_goes_on_if_there_is_no_end_token(manager, model):
    """generate goes on sampling for it, so what follows are tokens like the others."""

    class StopRowZero(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 7, False, False])

    _, result, out = watch(
        manager,
        model,
        input_ids=BATCH,
        attention_mask=BATCH_MASK,
        max_new_tokens=6,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([StopRowZero()]),
        **NO_EOS,
    )
    for row, first in enumerate([2, 0, 1]):
        check(manager, model, result, row, out[row], first, [(5 - first, 5)])


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_turn_after_a_cropped_cache_takes_no_position_twice(manager, model, name):
    cache = DynamicCache()
    with manager.attach(model) as run:
        first = model.generate(PROMPT, max_new_tokens=6, do_sample=False, **{name: cache}, **NO_EOS)
        cache.crop(-3)  # seven of ten columns stay
        ids = torch.cat([first[:, :8], torch.tensor([[30, 31]])], dim=1)  # the same beginning, then another way
        second = model.generate(ids, max_new_tokens=3, do_sample=False, **{name: cache}, **NO_EOS)
        third = model.generate(
            torch.cat([second, PROMPT[:, :1]], dim=1),
            max_new_tokens=2,
            do_sample=False,
            **{name: cache},
            **NO_EOS,
        )
    check(manager, model, run.result(second), 0, second[0].tolist(), 0, [(5, 2), (3, 2)])
    check(manager, model, run.result(third), 0, third[0].tolist(), 0, [(5, 2), (3, 2), (2, 1)])


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_cache_of_an_interrupted_forward_is_refused(manager, model, error, step):
    """It has columns that only some layers have run."""
    greedy = {"do_sample": False, **NO_EOS}
    whole = model.generate(PROMPT, max_new_tokens=8, **greedy)
    cache, n_steps = DynamicCache(config=model.config), iter(range(step))

    def break_off(*_):
        if next(n_steps, None) is None:
            raise error

    def by_hand(ids):
        with run.generating(from_column=ids.shape[1]):
            model(ids, past_key_values=cache)

    with manager.attach(model) as run:
        hook = model.model.layers[1].register_forward_hook(break_off)
        with pytest.raises(error):
            model.generate(PROMPT, max_new_tokens=8, past_key_values=cache, **greedy)
        hook.remove()
        begun, sure = whole[:, : 5 + step], 5 + step - 1 if step else 0
        assert [layer.get_seq_length() for layer in cache.layers] == [5 + step, 5 + step, sure]
        for go_on in (
            lambda: model.generate(
                torch.cat([begun, PROMPT], dim=1), past_key_values=cache, max_new_tokens=2, **greedy
            ),
            lambda: model(PROMPT[:, :1], past_key_values=cache),
            lambda: by_hand(PROMPT[:, :1]),
        ):
            with pytest.raises(
                AlignmentError, match=rf"^2 of the cache's 3 layers have {5 + step} columns .* {sure}, since"
            ):
                go_on()
        fresh = model.generate(PROMPT, max_new_tokens=8, past_key_values=DynamicCache(), **greedy)
    check(manager, model, run.result(fresh), 0, fresh[0].tolist(), 0, [(5, 7)])


def test_several_return_sequences_are_exact(manager, model):
    torch.manual_seed(5)
    _, result, out = watch(
        manager,
        model,
        input_ids=BATCH,
        attention_mask=BATCH_MASK,
        max_new_tokens=5,
        do_sample=True,
        num_return_sequences=2,
        **NO_EOS,
    )
    assert len(out) == 6 and out[0] != out[1]
    for row, first in enumerate([2, 2, 0, 0, 1, 1]):
        check(manager, model, result, row, out[row], first, [(5 - first, 4)])


@pytest.mark.parametrize("whole", [True, not_in_oldest(False, why="wants all of the ids again")])
def test_second_turn_on_the_same_cache_is_exact(manager, model, whole):
    cache = DynamicCache()
    with manager.attach(model) as run:
        first = model.generate(PROMPT, max_new_tokens=4, do_sample=False, past_key_values=cache, **NO_EOS)
        ids = torch.cat([first, torch.tensor([[30, 31]])], dim=1)
        if whole:
            second = model.generate(ids, max_new_tokens=3, do_sample=False, past_key_values=cache, **NO_EOS)
        else:  # only what the cache lacks, with the mask of all
            second = model.generate(
                ids[:, 8:],
                attention_mask=torch.ones_like(ids),
                max_new_tokens=3,
                do_sample=False,
                past_key_values=cache,
                **NO_EOS,
            )
    check(manager, model, run.result(first), 0, first[0].tolist(), 0, [(5, 3)])
    result = run.result(second)
    if whole:
        check(manager, model, result, 0, second[0].tolist(), 0, [(5, 3), (3, 2)])
    else:
        full = [*ids[0].tolist(), *second[0, 3:].tolist()]
        oracle = expected(manager, model, full[:13], [(5, 3), (3, 2)])[8:]
        assert result.position.tolist() == list(range(6)) and result.coverage.unseen == ("", "", "", "", "", LAST)
        for i, (_, scores, t) in enumerate(oracle):
            assert result.scores.active(i).tolist() == scores.active(t).tolist()


def test_cache_filled_before_attaching_is_unseen(manager, model):
    cache = DynamicCache()
    first = model.generate(PROMPT, max_new_tokens=4, do_sample=False, past_key_values=cache, **NO_EOS)
    _, result, out = watch(
        manager, model, input_ids=first, max_new_tokens=3, do_sample=False, past_key_values=cache, **NO_EOS
    )
    assert result.coverage.unseen == (*[BEFORE] * 8, "", "", "", LAST)
    oracle = expected(manager, model, out[0][:11], [(8, 0), (1, 2)])[8:]
    for i, (phase, scores, t) in enumerate(oracle, start=8):
        assert ("prompt", "generated")[result.phase[i]] == phase
        assert result.scores.active(i).tolist() == scores.active(t).tolist()


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_plain_forwards_are_documents(manager, model, name):
    cache = DynamicCache()
    with manager.attach(model) as run, torch.no_grad():
        model(input_ids=BATCH, attention_mask=BATCH_MASK)
        model(PROMPT[:, :3], **{name: cache})
        model(input_ids=PROMPT[:, 3:], **{name: cache})
    result = run.result(BATCH)
    for row, first in enumerate([2, 0, 1]):
        check(manager, model, result, row, BATCH[row].tolist(), first, [(5 - first, 0)])
    check(manager, model, run.result(PROMPT), 0, PROMPT[0].tolist(), 0, [(5, 0)])


def test_right_padded_document_is_exact(manager, model):
    ids = torch.tensor([[1, 5, 9, PAD, PAD], [1, 44, 3, 17, 8]])
    with manager.attach(model) as run, torch.no_grad():
        model(input_ids=ids, attention_mask=(ids != PAD).long())
    result = run.result(ids)
    assert len(check(manager, model, result, 0, ids[0].tolist(), 0, [(3, 0)])) == 3
    check(manager, model, result, 1, ids[1].tolist(), 0, [(5, 0)])


def test_results_of_several_generations_are_separate(manager, model):
    with manager.attach(model) as run:
        outs = [model.generate(PROMPT + k, max_new_tokens=3 + k, do_sample=False, **NO_EOS) for k in range(3)]
    for k, out in enumerate(outs):
        check(manager, model, run.result(out.clone()), 0, out[0].tolist(), 0, [(5, 2 + k)])


def test_unrelated_output_is_refused(manager, model):
    with manager.attach(model) as run:
        out = model.generate(PROMPT, max_new_tokens=4, do_sample=False, **NO_EOS)
    edited = out.clone()
    edited[0, 6] += 1
    with pytest.raises(AlignmentError, match="row 0, position 6: the output has token"):
        run.result(edited)
    with pytest.raises(AlignmentError, match="2 rows, 1 were watched"):
        run.result(torch.cat([out, out]))
    with pytest.raises(AlignmentError, match="6 columns"):
        run.result(out[:, :6])
    with pytest.raises(AlignmentError, match="12 columns"):
        run.result(torch.cat([out, out[:, :3]], dim=1))
    with pytest.raises(ConfigError, match="give what generate"):
        run.result(out.tolist())
    with manager.attach(model) as empty, pytest.raises(AlignmentError, match="nothing was watched"):
        empty.result(out)


REFUSED = {
    "constrained beam search": {"force_words_ids": [[4]], "num_beams": 2},
    "group beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": "low"},
    "custom_generate": {"custom_generate": lambda *a, **k: None},
    "paged": {"cache_implementation": "paged"},
    "quantized": {"cache_implementation": "quantized"},
    "guidance_scale": {"guidance_scale": 2.0},
    "token healing": {"token_healing": True},
    "synced_gpus": {"synced_gpus": True},
    "inputs_embeds next to 5 input_ids": {"inputs_embeds": torch.zeros(1, 3, 16)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_decoding_modes_are_refused_by_name(pack, model, name):
    options = {"input_ids": PROMPT, "max_new_tokens": 4, **NO_EOS, **REFUSED[name]}
    with DynamicProbeManager(pack).attach(model) as run:
        with pytest.raises(UnsupportedDecoding, match=f"(?i){name}.*not supported"):
            model.generate(**options)
        with pytest.raises(AlignmentError, match="nothing was watched"):
            run.result(PROMPT)


def test_unsupported_modes_in_a_configuration_are_refused(pack, model):
    config = GenerationConfig(guidance_scale=3.0, max_new_tokens=4)
    with DynamicProbeManager(pack).attach(model), pytest.raises(UnsupportedDecoding, match="guidance"):
        model.generate(PROMPT, generation_config=config)


def test_unsupported_caches_and_embedding_forwards_are_refused(pack, model):
    from transformers import EncoderDecoderCache

    with DynamicProbeManager(pack).attach(model):
        with pytest.raises(UnsupportedDecoding, match="EncoderDecoderCache"):
            model.generate(
                PROMPT, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()), max_new_tokens=2
            )
        with pytest.raises(UnsupportedDecoding, match="inputs_embeds"):
            model(inputs_embeds=torch.zeros(1, 3, 16))


def test_generate_inside_generate_is_refused(pack, model):
    with DynamicProbeManager(pack).attach(model) as run:
        failures = []

        def nested(event):
            try:
                model.generate(PROMPT, max_new_tokens=2)
            except UnsupportedDecoding as error:
                failures.append(str(error))

        run.on("c0", above=0.0, action=nested)
        for options in ({}, {"prompt_lookup_num_tokens": 2}):
            failures.clear()
            out = model.generate(PROMPT, max_new_tokens=4, do_sample=False, **options, **NO_EOS)
            assert len(failures) == 1 and "generate() inside generate()" in failures[0]
            assert run.result(out).coverage.n_unseen == 1


class Criterion(StoppingCriteria):
    """Calls something once, in the middle of a generation."""

    def __init__(self, call):
        self.calls = [call]

    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] > PROMPT.shape[1] + 1 and self.calls:
            self.calls.pop()()
        return torch.zeros(len(ids), dtype=torch.bool)


class Processor(LogitsProcessor):
    """The same, from another place."""

    def __init__(self, call):
        self.criterion = Criterion(call)

    def __call__(self, ids, scores):
        self.criterion(ids, scores)
        return scores


@pytest.mark.parametrize("place", ["criterion", "processor"])
@pytest.mark.parametrize(
    "options",
    [{}, {"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 2}],
    ids=["plain", "prompt lookup", "early exit"],
)
def test_nested_generation_is_not_mistaken_for_drafting(pack, model, options, place):
    """It would go unwatched without a word: a rule on everything would not fire in it."""

    def nested():
        model.generate(PROMPT[:, :3], max_new_tokens=4, do_sample=False, **NO_EOS)

    given = (
        {"stopping_criteria": StoppingCriteriaList([Criterion(nested)])}
        if place == "criterion"
        else {"logits_processor": LogitsProcessorList([Processor(nested)])}
    )
    with (
        DynamicProbeManager(pack).attach(model),
        pytest.raises(UnsupportedDecoding, match=r"generate\(\) inside generate\(\)"),
    ):
        model.generate(PROMPT, max_new_tokens=6, do_sample=False, **given, **options, **NO_EOS)


SPECULATIVE = {
    "a draft model": {"assistant_model": make_model(seed=5)},
    "a draft model that is nearly right": {"assistant_model": "nearly"},
    "the model drafts for itself": {"assistant_model": "itself"},
    "prompt lookup": {
        "prompt_lookup_num_tokens": 3,
        "repetition_penalty": 0.2,
        "eos_token_id": NO_TOKEN,
    },  # it repeats itself, so that there is something to look up
    "early exit": {"assistant_early_exit": 2},
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        not_in_oldest(name, why="its own drafter lacks an argument") if name == "early exit" else name
        for name in SPECULATIVE
    ],
)
def test_rejected_drafts_are_never_reported(manager, model, name, sampled):
    options = {**NO_EOS, **SPECULATIVE[name], "do_sample": sampled, "max_new_tokens": 14, "min_new_tokens": 14}
    if options.get("assistant_model") == "itself":
        options["assistant_model"] = model
    elif options.get("assistant_model") == "nearly":
        options["assistant_model"] = copy.deepcopy(model)
        options["assistant_model"].lm_head.weight.data *= 1 + 0.3 * torch.randn(
            61, 1, generator=torch.Generator().manual_seed(0)
        )
    prompt = torch.tensor([[1, 5, 9, 13, 7, 5, 9, 13, 7, 5, 9]])
    widths = []
    handle = model.model.register_forward_pre_hook(
        lambda m, a, k: widths.append(k["input_ids"].shape[1]), with_kwargs=True
    )
    torch.manual_seed(8)
    _, result, out = watch(manager, model, input_ids=prompt, **options)
    handle.remove()
    assert max(widths[1:]) > 1  # tokens were drafted
    length = len(out[0])
    mine = check(manager, model, result, 0, out[0], 0, [(11, length - 12)])
    assert [i for i in mine if result.coverage.unseen[i]] == [length - 1] and len(mine) == length


@pytest.mark.skipif(OLDEST, reason="transformers 5.0 does this right")
def test_model_that_runs_tokens_at_wrong_positions_is_refused(pack, model):
    """transformers runs the whole sequence again, behind what the cache holds, when it drafts on a used cache."""
    cache = DynamicCache()
    options = {"do_sample": False, "past_key_values": cache, **NO_EOS}
    with DynamicProbeManager(pack).attach(model):
        first = model.generate(PROMPT, max_new_tokens=6, **options)
        with pytest.raises(AlignmentError, match="the model's own answer is wrong too"):
            model.generate(first, max_new_tokens=5, prompt_lookup_num_tokens=3, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"past_key_values": "static"},
        not_in_oldest({"cache_implementation": "static", "prefill_chunk_size": 2}, why="leaves a hole in the cache"),
    ],
    ids=str,
)
def test_static_cache_is_exact(manager, model, options):
    if options.get("past_key_values") == "static":
        options = {"past_key_values": StaticCache(config=model.config, max_cache_len=32)}
    _, result, out = watch(
        manager,
        model,
        input_ids=BATCH,
        attention_mask=BATCH_MASK,
        max_new_tokens=6,
        do_sample=False,
        **options,
        **NO_EOS,
    )
    for row, first in enumerate([2, 0, 1]):
        check(manager, model, result, row, out[row], first, [(5 - first, 5)])


@pytest.mark.skipif(not OLDEST, reason="transformers 5.0: its cache_position is one too far after the chunks")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunked_prompts_that_break_the_model_are_refused(pack, model, cache):
    with DynamicProbeManager(pack).attach(model), pytest.raises((UnsupportedDecoding, AlignmentError)):
        model.generate(
            PROMPT, max_new_tokens=4, do_sample=False, cache_implementation=cache, prefill_chunk_size=2, **NO_EOS
        )


@pytest.mark.parametrize("how", ["looked up before", "on the class"])
def test_generate_that_bypasses_our_wrapper_is_refused(manager, model, how):
    """It would be taken for a document: phases, ends of rows and rules would all be wrong, and nobody told."""
    early = (
        model.generate
        if how == "looked up before"
        else lambda *args, **kwargs: type(model).generate(model, *args, **kwargs)
    )
    with manager.attach(model) as run:
        with pytest.raises(UnsupportedDecoding, match=r"call model\.generate\(\.\.\.\) inside the with block"):
            early(BATCH, attention_mask=BATCH_MASK, max_new_tokens=4, **NO_EOS)
        out = model.generate(PROMPT, max_new_tokens=4, do_sample=False, **NO_EOS)
    check(manager, model, run.result(out), 0, out[0].tolist(), 0, [(5, 3)])


@pytest.mark.skipif(OLDEST, reason="is told otherwise where images are")
@pytest.mark.parametrize("between", ["nothing", "a text", "a picture as large", "another picture"])
def test_turns_after_an_image_are_exact_or_refused(tmp_path, between):
    """Where tokens after a picture stand is kept on the model: after another conversation it is that one's."""
    torch.manual_seed(0)
    text = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": PAD, "initializer_range": 0.5}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=60, vision_start_token_id=58)
    ).eval()
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model, sites=("resid_post.1",)), keep_top_k=6)

    def picture(height, width):
        return {
            "pixel_values": torch.randn(height * width, 96),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        }

    def generate(ids, **more):
        ids, kinds = torch.tensor([ids]), torch.tensor([[int(i == 60) for i in ids]])
        more = {"do_sample": False, "suppress_tokens": [58, 60], "return_dict_in_generate": True} | more
        return model.generate(ids, mm_token_type_ids=kinds, max_new_tokens=4, **NO_EOS, **more)

    first = picture(4, 8)
    with manager.attach(model) as run:
        out = generate([1, 58, *[60] * 8, 5], **first)
        if between == "a text":
            generate([1, 5, 9])
        elif between != "nothing":
            n = 8 if between == "a picture as large" else 4
            generate([1, 58, *[60] * n, 9], **picture(4, n))
        ids = [*out.sequences[0].tolist(), 7, 8]
        if between in ("a text", "another picture"):
            with pytest.raises(UnsupportedDecoding, match="positions after images on the model, not in the cache"):
                generate(ids, past_key_values=copy.deepcopy(out.past_key_values))
            return
        out = generate(ids, past_key_values=copy.deepcopy(out.past_key_values))
    row = out.sequences[0].tolist()
    kinds = torch.tensor([[int(i == 60) for i in row[:-1]]])  # the last was sampled, and not run
    check(manager, model, run.result(out), 0, row, 0, [(11, 3), (3, 3)], forward=first | {"mm_token_type_ids": kinds})


@pytest.mark.parametrize("acts", [False, True], ids=["", "with a rule"])
def test_attaching_during_a_generation_reports_it_as_unwatched(manager, model, caplog, acts):
    class Attach(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 7:
                run.__enter__()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    run = manager.attach(model)
    if acts:
        run.on(manager.pack.concepts[0]["id"], above=0.99)
    out = model.generate(
        PROMPT, max_new_tokens=6, do_sample=False, stopping_criteria=StoppingCriteriaList([Attach()]), **NO_EOS
    )
    assert [record.getMessage() for record in caplog.records if "is not watched" in record.getMessage()] != []
    assert len(caplog.records) == 1
    later = model.generate(PROMPT, max_new_tokens=4, do_sample=False, **NO_EOS)
    [gaps] = [check for check in run.health().wrong if check.name == "gaps"]
    assert gaps.state == "failed" and gaps.what.startswith("4 forwards of a generate()")
    with pytest.warns(UserWarning, match="missed 4 forwards") if acts else nullcontext():
        run.__exit__(None, None, None)
    with pytest.raises(AlignmentError):
        run.result(out)
    check(manager, model, run.result(later), 0, later[0].tolist(), 0, [(5, 3)])


def test_detaching_run_disturbs_no_other_run_or_generation(manager, model):
    class Leave(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 8:
                leaving.__exit__(None, None, None)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with manager.attach(model) as staying:
        leaving = manager.attach(model)
        leaving.__enter__()
        out = model.generate(
            PROMPT, max_new_tokens=7, do_sample=False, stopping_criteria=StoppingCriteriaList([Leave()]), **NO_EOS
        )
    assert torch.equal(out, model.generate(PROMPT, max_new_tokens=7, do_sample=False, **NO_EOS))
    check(manager, model, staying.result(out), 0, out[0].tolist(), 0, [(5, 6)])
    with pytest.raises(AlignmentError, match="the watched forwards end at column 7"):
        leaving.result(out)


def test_threads_with_separate_runs_are_exact(manager, model):
    def work(k):
        prompt = torch.tensor([[1, 5 + k, 9, 13 + 2 * k]])
        with manager.attach(model) as run:
            return prompt, run, model.generate(prompt, max_new_tokens=6, do_sample=False, **NO_EOS)

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(work, range(9)))
    assert "generate" not in vars(model)
    whole = 0
    for prompt, run, out in done:
        assert torch.equal(out, model.generate(prompt, max_new_tokens=6, do_sample=False, **NO_EOS))
        check(manager, model, run.result(out), 0, out[0].tolist(), 0, [(4, 5)])
        whole += 1
    assert whole == 9


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"eos_token_id": [3, 8, 17, 21, 30, 44]}], ids=str)
def test_prompt_given_as_embeddings_is_exact(manager, model, with_ids, options):
    """Without ids the output holds only what is generated; the prompt's states still begin the generation."""
    embeds = model.get_input_embeddings()(BATCH).detach()
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        **NO_EOS,
        **options,
        **({"input_ids": BATCH} if with_ids else {}),
    }
    _, result, out = watch(manager, model, inputs_embeds=embeds, attention_mask=BATCH_MASK, **options)
    assert len(out[0]) <= (11 if with_ids else 6)
    for row, first in enumerate([2, 0, 1]):
        generated = out[row][5:] if with_ids else out[row]
        n = next((i + 1 for i, t in enumerate(generated) if t in (options["eos_token_id"] or [])), len(generated))
        seen = n - (n == len(generated) or "num_beams" in options)
        full = [*BATCH[row].tolist(), *generated]
        if with_ids:
            check(manager, model, result, row, full, first, [(5 - first, seen)])
            continue
        mine = np.flatnonzero(result.row == row)
        assert result.position[mine].tolist() == list(range(n)) and result.token_id[mine].tolist() == generated[:n]
        oracle = expected(manager, model, full[first : 5 + seen], [(5 - first, seen)])[5 - first :]
        for i, (phase, scores, t) in zip(mine, oracle, strict=False):
            assert ("prompt", "generated")[result.phase[i]] == phase == "generated"
            assert result.scores.active(i).tolist() == scores.active(t).tolist()
            assert np.abs(result.scores.active_scores(i) - scores.active_scores(t)).max() < 1e-5
        assert [bool(result.coverage.unseen[i]) for i in mine] == [False] * seen + [True] * (n - seen)


def compiled(**more):
    config = CompileConfig(**{"mode": "default", "backend": "eager", **more})
    config._compile_all_devices = True  # on a CPU generate() compiles only if told so
    return {
        "cache_implementation": "static",
        "compile_config": config,
        "do_sample": False,
        "max_new_tokens": 6,
        **NO_EOS,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attached", ["before", "after", "twice"])
def test_compiled_decoding_is_seen_whenever_we_attach(pack, attached):
    """A hook added after compiling is skipped silently by torch: the host is made to compile again."""
    torch._dynamo.reset()
    model, manager = make_model(), DynamicProbeManager(pack)
    if attached != "before":
        bare = model.generate(PROMPT, **compiled())
    if attached == "twice":
        with manager.attach(model):
            model.generate(PROMPT, **compiled())
    _, result, out = watch(manager, model, input_ids=PROMPT, **compiled())
    assert "_compiled_call" not in vars(model)
    check(manager, model, result, 0, out[0], 0, [(5, 5)])
    again = model.generate(PROMPT, **compiled())
    assert again.tolist() == out and (attached == "before" or bare.tolist() == out)


@pytest.mark.filterwarnings("ignore")
def test_other_compiled_models_are_seen_or_refused(pack):
    torch._dynamo.reset()
    model, manager = make_model(), DynamicProbeManager(pack)
    model.model.compile(backend="eager")
    model.generate(PROMPT, max_new_tokens=3, do_sample=False, **NO_EOS)
    _, result, out = watch(manager, model, input_ids=PROMPT, max_new_tokens=5, do_sample=False, **NO_EOS)
    torch._dynamo.reset()
    check(manager, make_model(), result, 0, out[0], 0, [(5, 4)])
    whole = torch.compile(make_model(), backend="eager")
    _, result, out = watch(manager, whole, input_ids=PROMPT, max_new_tokens=5, do_sample=False, **NO_EOS)
    check(manager, make_model(), result, 0, out[0], 0, [(5, 4)])
    torch._dynamo.reset()
    hidden = make_model()
    hidden.model.forward = torch.compile(hidden.model.forward, backend="eager")
    hidden.generate(PROMPT, max_new_tokens=3, do_sample=False, **NO_EOS)
    try:  # torch may see the new hooks or not; it must never be quiet
        _, result, out = watch(manager, hidden, input_ids=PROMPT, max_new_tokens=5, do_sample=False, **NO_EOS)
    except AlignmentError as error:
        assert "without reaching" in str(error) or "past our hooks" in str(error)
    else:
        check(manager, make_model(), result, 0, out[0], 0, [(5, 4)])
    torch._dynamo.reset()


GRAPHS = {
    "generate": lambda model: compiled(fullgraph=True),
    "generate, mode of captured graphs": lambda model: compiled(fullgraph=True, mode="reduce-overhead"),
    "model.compile()": lambda model: model.compile(backend="aot_eager", fullgraph=True),
    "model.forward": lambda model: setattr(
        model, "forward", torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    ),
    "decoder.compile()": lambda model: model.model.compile(backend="aot_eager", fullgraph=True),
    "decoder.forward": lambda model: setattr(
        model.model, "forward", torch.compile(model.model.forward, backend="aot_eager", fullgraph=True)
    ),
    "every layer": lambda model: [layer.compile(backend="aot_eager", fullgraph=True) for layer in model.model.layers][
        0
    ],
    "layers and generate": lambda model: (
        [layer.compile(backend="aot_eager") for layer in model.model.layers] and compiled(fullgraph=True)
    ),
    "inductor": lambda model: compiled(fullgraph=True, backend="inductor"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "which, attached", [*((which, "before") for which in GRAPHS), ("generate", "after"), ("model.forward", "after")]
)
@torch._dynamo.config.patch(recompile_limit=64)  # of layers compiled one by one, the bare host makes twelve graphs here
def test_compiled_models_keep_whole_graphs(pack, two_sites, which, attached):
    """With `fullgraph`, leaving a graph would be an error. Two sites; after that a longer prompt with one, so that
    shapes change.
    """
    torch._dynamo.reset()
    model = make_model()
    options = {**(GRAPHS[which](model) or {}), "max_new_tokens": 3, "do_sample": False, **NO_EOS}
    both = torch.cat([PROMPT, PROMPT.flip(1)])
    if attached == "after":
        model.generate(both, **options)
    for probes, prompt in ((two_sites, both), (pack, torch.cat([both, both[:, 1:]], dim=1))):
        manager = DynamicProbeManager(probes)
        with manager.attach(model) as run:
            out = model.generate(prompt, **options)
        for row in range(2):
            check(manager, make_model(), run.result(out), row, out[row].tolist(), 0, [(prompt.shape[1], 2)])


@pytest.mark.filterwarnings("ignore")
def test_function_compiled_with_fullgraph_is_refused_with_the_remedy(pack, model):
    torch._dynamo.reset()
    as_function = torch.compile(model, backend="eager", fullgraph=True)
    expected = as_function(PROMPT).logits
    with (
        DynamicProbeManager(pack).attach(as_function),
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"call model\.compile\(fullgraph=True\)"),
    ):
        as_function(PROMPT)
    assert torch.equal(as_function(PROMPT).logits, expected)
    torch._dynamo.reset()


BEAMS = {
    "beams": {},
    "beams, sampled": {"do_sample": True, "temperature": 2.0},
    "beams, all returned": {"num_return_sequences": 4},
    "beams without a cache": {"use_cache": False},
    "beams with their indices": {"return_dict_in_generate": True, "output_scores": True},
    "beams and a length penalty": {"length_penalty": -3.0, "early_stopping": True, "num_return_sequences": 2},
    "beams in a static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("eos", [None, (3, 8, 17, 21, 30, 44)], ids=["to the limit", "ending early"])
@pytest.mark.parametrize("name", BEAMS)
def test_beams_are_resolved_at_the_end(manager, model, name, eos):
    torch.manual_seed(6)
    options = {
        "do_sample": False,
        **BEAMS[name],
        "eos_token_id": None if eos is None else list(eos),
        "pad_token_id": PAD,
    }
    with manager.attach(model) as run:
        out = model.generate(BATCH, attention_mask=BATCH_MASK, max_new_tokens=7, num_beams=4, **options)
    sequences = getattr(out, "sequences", out)
    result, lines = run.result(out), sequences.tolist()
    each = len(lines) // 3
    ends = []
    for row, line in enumerate(lines):
        first = [2, 0, 1][row // each]
        generated = line[5:]
        n = next((i + 1 for i, t in enumerate(generated) if eos and t in eos), len(generated))
        ends.append(n)
        mine = check(manager, model, result, row, line, first, [(5 - first, n - 1)])
        assert len(mine) == 5 - first + n and result.coverage.unseen[mine[-1]] == LAST
    assert eos is None or min(ends) < 7
    assert np.array_equal(run.result(sequences.clone()).scores.values, result.scores.values)


def test_unrelated_beam_output_is_refused(pack, model):
    with DynamicProbeManager(pack).attach(model) as run:
        out = model.generate(PROMPT, max_new_tokens=6, num_beams=3, do_sample=False, **NO_EOS)
    for place, words in ((2, "position 2: the output has another token"), (6, "no beam had this sequence")):
        edited = out.clone()
        edited[0, place] = (edited[0, place] + 1) % 61
        with pytest.raises(AlignmentError, match=words):
            run.result(edited)
    with pytest.raises(AlignmentError, match="4 rows"):
        run.result(out.repeat(4, 1))


def test_rules_follow_a_beam_across_sequences(pack, model):
    """A rule's streak belongs to the sequence of tokens, not to the row it happens to be computed in."""
    manager, events, probe = DynamicProbeManager(pack), [], pack.find("c9")
    options = {"max_new_tokens": 9, "num_beams": 4, "do_sample": False, "num_return_sequences": 4, **NO_EOS}
    with manager.attach(model) as run:
        run.on("c9", above=0.9999999)
        with pytest.raises(UnsupportedDecoding, match="a stop cannot end one beam"):
            model.generate(PROMPT, **options)
    with manager.attach(model) as run:
        run.on("c9", above=0.9999999, action=lambda event: None)
        out = model.generate(PROMPT, **options)
    result = run.result(out)
    values = np.array(
        [
            dict(zip(result.scores.active(i).tolist(), result.scores.active_scores(i).tolist(), strict=True)).get(
                probe, 0
            )
            for i in range(len(result))
        ]
    )
    above = float(np.median(values[result.phase == 1]))
    with manager.attach(model) as run:
        run.on("c9", above=above, for_tokens=2, action=events.append)
        again = model.generate(PROMPT, **options)
    assert torch.equal(out, again) and events and all(event.provisional for event in events)
    met = {(event.column, event.token_id, round(event.score, 6)) for event in events}
    for row in range(4):
        streak = 0
        for i in np.flatnonzero((result.row == row) & (result.phase == 1))[:-1]:
            streak = streak + 1 if values[i] > above else 0
            if streak == 2:
                assert (int(result.position[i]), int(result.token_id[i]), round(float(values[i]), 6)) in met


def test_threads_generating_on_one_model_are_exact(manager, model):
    prompts = [torch.tensor([[1, 5 + k, 9, 13 + 2 * k]]) for k in range(6)]
    with manager.attach(model) as run, ThreadPoolExecutor(3) as pool:
        outs = list(pool.map(lambda p: model.generate(p, max_new_tokens=8, do_sample=False, **NO_EOS), prompts))
    for prompt, out in zip(prompts, outs, strict=True):
        assert torch.equal(out, model.generate(prompt, max_new_tokens=8, do_sample=False, **NO_EOS))
        check(manager, model, run.result(out), 0, out[0].tolist(), 0, [(4, 7)])


@pytest.mark.parametrize(
    "ids, mask", [(torch.zeros(1, 0, dtype=torch.long), None), (BATCH, torch.tensor([[1] * 5, [0] * 5, [1] * 5]))]
)
def test_empty_prompt_is_named(pack, model, ids, mask):
    before = n_hooks(model)
    with DynamicProbeManager(pack).attach(model), pytest.raises(ConfigError, match="zero length"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)
    assert n_hooks(model) == before


@pytest.mark.parametrize("ids", [torch.tensor([[PAD]]), torch.tensor([[1, 5], [PAD, PAD]]), None])
@pytest.mark.parametrize("eos", [EOS, [EOS, 7]])
def test_prompt_of_pad_tokens_only_is_refused_with_and_without_a_mask(pack, model, ids, eos):
    """Without a mask, the same one is inferred, and with one that says that it is text, it is scored."""
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD, "bos_token_id": PAD, "eos_token_id": eos}
    given = {} if ids is None else {"input_ids": ids}
    ids = torch.tensor([[PAD]]) if ids is None else ids
    with DynamicProbeManager(pack).attach(model) as run:
        with pytest.raises(
            ConfigError, match=r"zero length: every token of it is the padding token 0.*Give an attention"
        ):
            model.generate(**given, **how)
        with pytest.raises(ConfigError, match="zero length"):
            model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), **how)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
        assert (run.result(out).phase == 0).sum() == ids.numel()
        # Where padding ends a text, too, transformers infers no mask, and where there is none of it in the ids.
        model.generate(input_ids=ids, **{**how, "eos_token_id": [EOS, PAD]})
        model.generate(input_ids=ids, **{**how, "pad_token_id": 9})


LEFT_PADDED = {
    "two in a row": ([[EOS, EOS, 5, 9]], True),
    "one in one row of two": ([[EOS, 5, 9], [3, 5, 9]], True),
    "a text that begins so": ([[EOS, 5, 9]], False),
    "texts that begin so": ([[EOS, 5, 9], [EOS, 3, 9]], False),
    "none at the beginning": ([[3, EOS, EOS, 9]], False),
    "a turn that ends so": ([[3, 5, 9, EOS]], False),
}


@pytest.mark.parametrize("ids, warns", LEFT_PADDED.values(), ids=LEFT_PADDED)
@pytest.mark.parametrize("pad", [EOS, None])
def test_left_padding_read_as_text_is_warned_about_once(pack, caplog, ids, warns, pad):
    """transformers infers no mask where padding ends a text, too: the padding is scored as prompt, as it was run."""
    model, ids = make_model(), torch.tensor(ids)
    how = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": pad, "eos_token_id": EOS}
    model.generation_config.pad_token_id = model.config.pad_token_id = pad
    with DynamicProbeManager(pack).attach(model) as run:
        out = model.generate(ids, **how)
        model.generate(ids + 0, attention_mask=torch.ones_like(ids), **how)
        model.generate(torch.cat([ids, ids], dim=1), **how)
    said = [record.getMessage() for record in caplog.records if record.name == "probemon"]
    assert len(said) == warns and all("reads the padding as text" in text for text in said)
    assert (run.result(out, generation=0).phase == 0).sum() == ids.numel()


def test_nonfinite_hidden_state_is_unseen_with_its_reason(pack, model):
    """The host itself breaks at one token: that token is unseen with its reason, the others are scored."""
    calls = []

    def break_third(module, args, output):
        calls.append(1)
        return output * float("nan") if len(calls) == 3 else output

    handle = model.model.layers[1].register_forward_hook(break_third)
    manager = DynamicProbeManager(pack)
    try:
        with manager.attach(model) as run:
            out = model.generate(PROMPT, max_new_tokens=6, do_sample=False, use_cache=False, **NO_EOS)
    finally:
        handle.remove()
    result = run.result(out)
    assert result.coverage.unseen[6] == "hidden state is not finite" and result.coverage.n_unseen == 2
    assert len(result.scores.active(6)) == 0 and len(result.scores.active(7)) > 0
    assert EOS not in out[0, 5:].tolist()


def test_default_bos_prompt_is_exact(manager, model):
    _, result, out = watch(manager, model, max_new_tokens=4, do_sample=False, **NO_EOS)
    check(manager, model, result, 0, out[0], 0, [(1, 3)])


@pytest.mark.filterwarnings("ignore")
def test_concurrent_threads_on_a_compiled_model_are_refused(pack):
    """Both forwards write one buffer: whose states are there would be a guess. One after the other is no matter."""
    torch._dynamo.reset()
    model, manager = make_model(), DynamicProbeManager(pack)
    model.model.layers[1].compile(backend="eager")
    meet, told = threading.Barrier(2, timeout=60), []

    def waiting(module, args, output):
        meet.wait()

    with manager.attach(model):
        model(PROMPT)  # compiled now
        handle = model.model.layers[2].register_forward_hook(waiting)

        def run():
            try:
                model(PROMPT)
            except AlignmentError as error:
                told.append(str(error))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, PROMPT).result()
    torch._dynamo.reset()
    assert len(told) == 2 and all("threads ran a compiled model at once" in text for text in told)


@pytest.mark.filterwarnings("ignore")
def test_unwatched_thread_on_a_compiled_model_is_detected_and_unharmed(pack):
    """It writes to the same buffer, whoever is watched, and however many rows and tokens it has."""
    torch._dynamo.reset()
    model, manager = make_model(), DynamicProbeManager(pack)
    model.model.layers[1].compile(backend="eager")
    many, done = PROMPT.repeat(3, 4), []
    expected = make_model()(many, use_cache=False).logits
    begun, over = threading.Event(), threading.Event()

    def wait(module, args):
        if threading.current_thread() is other:
            begun.set()
            over.wait(60)

    other = threading.Thread(target=lambda: done.append(model(many, use_cache=False).logits))
    with manager.attach(model, one_thread=True) as run:
        model(PROMPT)
        handle = model.model.layers[2].register_forward_pre_hook(wait)
        other.start()
        begun.wait(60)
        with pytest.raises(AlignmentError, match="threads ran a compiled model at once"):
            model(PROMPT.flip(1), use_cache=False)
        over.set()
        other.join()
        handle.remove()
        later = torch.tensor([[1, 33, 8]])
        model(later)
        with ThreadPoolExecutor(1) as pool, pytest.raises(UnsupportedModel, match="another thread watches"):
            pool.submit(manager.attach(model).__enter__).result()
    torch._dynamo.reset()
    assert len(done) == 1 and torch.allclose(done[0], expected, atol=1e-5)
    plain(run, later, model, manager)


def test_compiled_outputs_are_copied_before_the_buffer_is_reused():
    buffers = Buffers({"resid_post.0": torch.nn.Linear(2, 2)})
    buffers.make_room((1, 2), 3)
    buffers.keep("resid_post.0", torch.ones(1, 2, 3))
    (found,) = buffers.written()
    buffers.make_room((1, 2), 3)
    buffers.keep("resid_post.0", torch.zeros(1, 2, 3))
    assert torch.equal(found[1], torch.ones(1, 2, 3))


def plain(run, ids, model, manager, **which):
    check(manager, make_model(), run.result(ids, **which), 0, ids[0].tolist(), 0, [(ids.shape[1], 0)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["wrapper", "function around it", "model.compile()", "model.forward"])
def test_previously_compiled_models_are_seen_in_plain_forwards(pack, how):
    """torch does not look at hooks before it runs a graph again, unless it is told to: such a forward left no trace at
    all.
    """
    torch._dynamo.reset()
    model, manager = make_model(), DynamicProbeManager(pack)
    call = model
    if how == "wrapper":
        call = torch.compile(model, backend="eager")
    elif how == "function around it":
        call = torch.compile(lambda ids: model(ids), backend="eager")
    elif how == "model.compile()":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        call(PROMPT)
        for _ in range(2):
            with manager.attach(model) as run:
                call(PROMPT)
            plain(run, PROMPT, model, manager)
            call(PROMPT)
    assert n_hooks(model) == 0
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_of_one_class_do_not_share_graphs(pack):
    torch._dynamo.reset()
    watched, other, manager = make_model(), make_model(seed=1), DynamicProbeManager(pack)
    watched.compile(backend="eager")
    other.compile(backend="eager")
    with torch.no_grad(), manager.attach(watched) as run:
        for model in (other, watched, other, watched):
            model(PROMPT, use_cache=False)
    assert len(run.recordings) == 2
    plain(run, PROMPT, watched, manager, generation=1)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_layer_run_twice_or_dropping_tokens_in_a_compiled_call_is_an_error(pack):
    class Both(LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            super().forward(input_ids.flip(1), **kwargs)
            return super().forward(input_ids, **kwargs)

    torch._dynamo.reset()
    model, manager = make_model(), DynamicProbeManager(pack)
    model.__class__ = Both
    with torch.no_grad(), manager.attach(model) as run:
        model(PROMPT, use_cache=False)
    assert len(run.recordings) == 2
    model.forward = torch.compile(model.forward, backend="eager")
    with (
        torch.no_grad(),
        manager.attach(model) as run,
        pytest.raises(AlignmentError, match="was run 2 times in one compiled call"),
    ):
        model(PROMPT, use_cache=False)
    assert not any(recording.n_entries for recording in run.recordings)

    class Shorter(torch.nn.Module):
        def forward(self, hidden, *args, **kwargs):
            return hidden[:, 1:]

    torch._dynamo.reset()
    host = make_model()
    host.model.layers[1] = Shorter()
    host.model.layers[2] = torch.nn.Identity()
    host.model.layers[2].forward = lambda hidden, *args, **kwargs: torch.nn.functional.pad(hidden, (0, 0, 1, 0))
    host.forward = torch.compile(host.forward, backend="eager")
    with (
        torch.no_grad(),
        manager.attach(host),
        pytest.raises(UnsupportedModel, match=r"gives \(1, 4, 16\) for a forward of 1 rows and 5 tokens"),
    ):
        host(PROMPT, use_cache=False)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_failed_forward_of_a_compiled_model_is_forgotten(pack):
    """Also by threads: the next forward, in another one, is not taken for one at the same time."""
    torch._dynamo.reset()
    model, manager = make_model(), DynamicProbeManager(pack)
    model.compile(backend="eager")
    with torch.no_grad(), manager.attach(model) as run:
        model(PROMPT)
        with pytest.raises(Exception, match=r"index|range"):
            model(PROMPT + 1000)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: model.generate(PROMPT, max_new_tokens=3, do_sample=False, **NO_EOS)).result()
        plain(run, PROMPT, model, manager)
        with pytest.raises(AlignmentError):
            run.result(PROMPT + 7)
    torch._dynamo.reset()
