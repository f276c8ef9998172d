"""An adapter gives the same output with and without a cache, in every mode of generate()."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

from bem_oracle import SHAPES, VOCAB, make_host, randomise
from conftest import EOS, OLDEST, PAD, not_in_oldest
from probemon.adapters.bem import BemConfig, ControllerState, attach_bem
from probemon.errors import AlignmentError, BemError, BemStateError, UnsupportedDecoding

N, P = 3, 6
CONFIG = BemConfig(
    sites=("q", "k", "v", "o", "down"),
    rank=3,
    width=6,
    chunk_tokens=N,
    prefix_tokens=P,
    token_limit=8,
    ema=0.7,
    spectral_cap=1.5,
    trust_region=4.0,
)
AUTO = BemConfig(
    rank=3, width=6, chunk_tokens=N, prefix_tokens=P, level="auto", auto_limits=(4, 7), sites=("v", "o", "down")
)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
LENGTH = 3 * N + P + 3


def some_ids(rows=1, length=LENGTH, seed=0):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=SHAPES)
def host(request):
    return make_host(request.param)


@pytest.fixture(scope="module")
def llama():
    return make_host()


@pytest.fixture
def steered(host):
    with randomise(attach_bem(host, CONFIG)):
        yield host


def full(model, ids, **more):
    with torch.no_grad():
        return model(ids, use_cache=False, **more).logits


def cached(model, ids, sizes, mask=None, cache=None):
    cache, parts, at = DynamicCache() if cache is None else cache, [], 0
    with torch.no_grad():
        for part in ids.split(sizes, dim=1):
            at += part.shape[1]
            given = (
                {}
                if mask is None
                else {
                    "attention_mask": mask[:, :at],
                    "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, at - part.shape[1] : at],
                }
            )
            parts.append(model(part, past_key_values=cache, use_cache=True, **given).logits)
    return torch.cat(parts, dim=1)


# -- 1: cached equals full -------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [N] * 6, [7, 7, 4], [5, 1, 9, 1, 2], [LENGTH - 1, 1]], ids=str)
def test_cached_logits_equal_full_ones(steered, sizes):
    ids = some_ids(2)
    assert (cached(steered, ids, sizes) - full(steered, ids)).abs().max() < 1e-5


def test_adapter_under_test_changes_logits_at_every_position(host):
    ids = some_ids(2)
    before = full(host, ids)
    with randomise(attach_bem(host, CONFIG)):
        assert (full(host, ids) - before).abs().amax(dim=(0, 2)).min() > 1e-2  # at every position
    assert torch.equal(full(host, ids), before)


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [6, 6, 5, 1]], ids=str)
def test_cached_logits_equal_full_ones_with_padding(steered, sizes):
    ids, mask = some_ids(3), torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :5], mask[2, :9] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = full(steered, ids, attention_mask=mask, position_ids=positions)
    assert (cached(steered, ids, sizes, mask) - whole)[mask.bool()].abs().max() < 1e-5


def test_static_cache_gives_the_same_logits(steered):
    ids = some_ids(2)
    found = cached(
        steered, ids, [6] + [1] * (LENGTH - 6), cache=StaticCache(config=steered.config, max_cache_len=LENGTH + 5)
    )
    assert (found - full(steered, ids)).abs().max() < 1e-5


# -- 2: nothing from the future --------------------------------------------------------------------


def test_token_does_not_change_earlier_positions(steered):
    """Every token, and every position before it."""
    ids = some_ids()
    before = full(steered, ids)[0]
    most = (
        1e-5 if steered.config.model_type == "mixtral" else 1e-6
    )  # an expert's sums are of other sizes where a later token goes elsewhere, without an adapter too
    for t in range(LENGTH):
        other = ids.clone()
        other[0, t] = (other[0, t] - 3 + 1) % (VOCAB - 3) + 3
        difference = (full(steered, other)[0] - before).abs().amax(dim=-1)
        assert (difference[:t] < most).all() and difference[t] > 1e-4


# -- 5: rows are independent -----------------------------------------------------------------------


def test_sequences_in_a_batch_are_independent(steered):
    ids = some_ids(4)
    together = full(steered, ids)
    for row in range(4):
        assert (full(steered, ids[row : row + 1])[0] - together[row]).abs().max() < 1e-5
    others = ids.clone()
    others[1:] = some_ids(3, seed=9)
    assert (full(steered, others)[0] - together[0]).abs().max() < 1e-6


# -- 3: generate() ---------------------------------------------------------------------------------

BATCH = torch.tensor([[PAD, PAD, PAD, 1, 5, 9, 33], [1, 44, 3, 17, 8, 21, 30], [PAD, PAD, PAD, PAD, PAD, 21, 22]])
PADDED = {**GREEDY, "attention_mask": (BATCH != PAD).long()}
POLICIES = pytest.mark.parametrize("config", [CONFIG, AUTO], ids=["position", "auto"])


def plain_greedy(model, ids, n):
    """Greedy decoding by hand, without generate() and without a cache."""
    for _ in range(n):
        ids = torch.cat([ids, full(model, ids)[:, -1:].argmax(dim=-1)], dim=1)
    return ids


def test_greedy_with_the_cache_equals_greedy_without(host):
    ids = some_ids(1, 6)
    bare = host.generate(ids, **GREEDY)
    with randomise(attach_bem(host, CONFIG)):
        out = host.generate(ids, **GREEDY)
        assert torch.equal(out, host.generate(ids, **GREEDY, use_cache=False))
        assert torch.equal(out, plain_greedy(host, ids, 12))
    assert not torch.equal(out, bare) and torch.equal(host.generate(ids, **GREEDY), bare)


@POLICIES
def test_padded_sequences_equal_their_unpadded_singles(host, config):
    """Under level="auto" these prompts of 4, 7 and 2 tokens take chunk, token and prefix codes."""
    modes = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    if not OLDEST:  # whose masks are off after a prefill in chunks
        modes += [{"prefill_chunk_size": 3}]
    with randomise(attach_bem(host, config)):
        singles = [host.generate(row[row != PAD][None], **GREEDY)[0, -12:].tolist() for row in BATCH]
        for mode in modes:
            assert host.generate(BATCH, **PADDED, **mode)[:, -12:].tolist() == singles, mode


@POLICIES
def test_beams_with_the_cache_equal_beams_without(host, config):
    options = {**PADDED, "num_beams": 3, "num_return_sequences": 2}
    with randomise(attach_bem(host, config)) as bem:
        moved, select = [], ControllerState.select
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                ControllerState, "select", lambda state, rows: (moved.append(rows.tolist()), select(state, rows))
            )
            found = host.generate(BATCH, **options)
        assert torch.equal(found, host.generate(BATCH, **options, use_cache=False))
        assert len(bem._states) == 0  # no longer than the cache
    assert any(len(set(rows)) < len(rows) for rows in moved)  # beams really took each other's places


@pytest.mark.parametrize(
    "how",
    [
        "draft model",
        not_in_oldest("prompt lookup", why="it needs an end of sequence"),
        not_in_oldest("early exit", why="it cannot"),
    ],
)
@POLICIES
def test_assisted_greedy_equals_plain_greedy(host, config, how, monkeypatch):
    """Drafts run through the adapter, and what is rejected leaves no trace in its state."""
    drafter = host if how == "early exit" else make_host(host.config.model_type, noise=0.1)
    more = {
        "draft model": {"assistant_model": drafter},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "early exit": {"assistant_early_exit": 1},
    }[how]
    for name, value in {
        "assistant_confidence_threshold": 0.0,
        "num_assistant_tokens": 4,
        "num_assistant_tokens_schedule": "constant",
    }.items():
        monkeypatch.setattr(drafter.generation_config, name, value)
    ids, cuts, truncate = torch.tensor([[1, 44, 3, 17, 1, 44]]), [], ControllerState.truncate
    with randomise(attach_bem(host, config)):
        plain = host.generate(ids, **GREEDY)
        monkeypatch.setattr(
            ControllerState, "truncate", lambda state, n: (cuts.append(state.n_columns - n), truncate(state, n))[1]
        )
        assert torch.equal(host.generate(ids, **GREEDY, **more), plain)
    assert max(cuts, default=0) > 1, cuts  # drafts were rejected, several at once


def test_sampling_with_a_seed_is_the_same_with_and_without_a_cache(steered):
    outs = []
    for more in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(7)
        outs.append(steered.generate(BATCH, **{**PADDED, "do_sample": True}, num_return_sequences=3, **more))
    assert outs[0].shape == (9, 19) and torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert len({tuple(row) for row in outs[0].tolist()}) == 9


def test_attaching_leaves_the_random_generator_state(llama):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with attach_bem(llama, CONFIG):
        assert torch.equal(torch.rand(3), expected)


@POLICIES
def test_second_turn_on_the_same_cache_equals_an_uncached_one(host, config):
    with randomise(attach_bem(host, config)):
        ids, cache = some_ids(1, 6), DynamicCache()
        first = host.generate(ids, **GREEDY, past_key_values=cache)
        assert torch.equal(first, host.generate(ids, **GREEDY))
        turn = torch.cat([first, some_ids(1, 5, seed=3)], dim=1)
        options = {
            **GREEDY,
            "attention_mask": torch.ones_like(turn),
        }  # else a generated id that is the padding's is taken for padding
        second = host.generate(turn, **options, past_key_values=cache)
        again = DynamicCache()
        with torch.no_grad():  # under "auto" the level was decided by the first prompt
            host(ids, past_key_values=again)
        assert torch.equal(second, host.generate(turn, **options, past_key_values=again))
        if config is CONFIG:
            assert torch.equal(second, host.generate(turn, **options))


def test_sequences_that_end_early_do_not_disturb_the_others(llama):
    with randomise(attach_bem(llama, CONFIG)):
        free = llama.generate(BATCH, **PADDED)
        stop = int(free[1, 10])
        ended = llama.generate(BATCH, **{**PADDED, "eos_token_id": stop})
    assert (ended[1, 11:] == PAD).all()
    for row in (0, 2):
        line = free[row, 7:].tolist()
        n = line.index(stop) + 1 if stop in line else 12
        assert ended[row, 7 : 7 + n].tolist() == line[:n]


# -- a cache's state follows it --------------------------------------------------------------------


@pytest.mark.parametrize("level", ["position", "chunk", "token", "prefix"])
def test_tokens_fed_after_a_sequences_end_are_forgotten_in_the_next_turn(llama, level):
    ids, options = some_ids(2, 16, seed=5), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    config = BemConfig(
        rank=4, level=level, chunk_tokens=4, prefix_tokens=8 if level != "prefix" else 24, token_limit=12
    )
    with randomise(attach_bem(llama, config)):
        bare = llama.generate(ids, eos_token_id=None, **options)
        cache = DynamicCache()
        first = llama.generate(ids, past_key_values=cache, eos_token_id=int(bare[0, 17]), **options)
        turn = torch.cat([first, ids[:, :3]], dim=1)
        mask = (turn != PAD).long()
        assert (mask[0] == 0).sum() > 2 and first.shape[1] == 22
        options |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
        alone = llama.generate(turn[:1, mask[0] == 1], **options)
        both = llama.generate(turn, attention_mask=mask, past_key_values=cache, **options)
        for one, other in zip(alone.logits, both.logits, strict=True):
            torch.testing.assert_close(other[0], one[0], rtol=0, atol=1e-4)
        # The other way round nothing is known of what was not read.
        cache = DynamicCache()
        llama(ids, attention_mask=torch.tensor([[0] * 3 + [1] * 13, [1] * 16]), past_key_values=cache)
        with pytest.raises(BemStateError, match="which were padding when they were read"):
            llama(ids[:, :1], attention_mask=torch.ones(2, 17), past_key_values=cache)


def test_copied_cache_continues_independently(llama):
    """The recipe of computing a prompt once: copies and the original each go on alone."""
    ids, more = some_ids(2, 10), some_ids(2, 9, seed=4)
    with randomise(attach_bem(llama, CONFIG)), torch.no_grad():
        cache = DynamicCache()
        llama(ids, past_key_values=cache)
        other = copy.deepcopy(cache)
        other.reorder_cache(torch.tensor([1, 0]))
        for used, rows in ((cache, [0, 1]), (other, [1, 0])):
            found = llama(more, past_key_values=used).logits
            assert (found - full(llama, torch.cat([ids[rows], more], dim=1))[:, 10:]).abs().max() < 1e-5


@pytest.mark.parametrize("move", ["repeat", "select", "mask", "crop", not_in_oldest("reset", why="its length stays")])
def test_controller_state_follows_cache_operations(llama, move):
    ids, more = some_ids(3, 10), some_ids(6, 7, seed=4)
    with randomise(attach_bem(llama, CONFIG)), torch.no_grad():
        cache = DynamicCache()
        llama(ids, past_key_values=cache)
        if move == "repeat":
            cache.batch_repeat_interleave(2)
            before = ids.repeat_interleave(2, dim=0)
        elif move == "select":
            cache.batch_select_indices(torch.tensor([2, 0]))
            before = ids[[2, 0]]
        elif move == "mask":
            cache.batch_select_indices(torch.tensor([True, False, True]))
            before = ids[[0, 2]]
        elif move == "crop":
            cache.crop(-3)
            before = ids[:, :7]
        else:
            cache.reset()
            before = ids[:, :0]
        more = more[: len(before)]
        found = llama(more, past_key_values=cache).logits
        assert (found - full(llama, torch.cat([before, more], dim=1))[:, before.shape[1] :]).abs().max() < 1e-5


def test_threads_may_generate_concurrently(llama):
    with randomise(attach_bem(llama, CONFIG)):
        expected = [llama.generate(some_ids(2, 6, seed=seed), **GREEDY) for seed in range(4)]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda seed: llama.generate(some_ids(2, 6, seed=seed), **GREEDY), range(4)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_controller_state_can_be_saved_and_restored(llama):
    ids, more = some_ids(2, 10), some_ids(2, 9, seed=4)
    bem = randomise(attach_bem(llama, CONFIG))
    with bem, torch.no_grad():
        cache = DynamicCache()
        llama(ids, past_key_values=cache)
        whole = full(llama, torch.cat([ids, more], dim=1))[:, 10:]
        cache.crop(-1)
        assert bem.state(cache).n_columns == 9
        saved = bem.state(cache).tensors()
        assert bem.state(DynamicCache()) is None
        with pytest.raises(BemStateError, match="cannot be pickled: detach first"):
            pickle.dumps(cache)
    with bem.attach(), torch.no_grad():
        with pytest.raises(BemStateError, match="goes on from 9 cached columns, and the adapter has read none of them"):
            llama(more, past_key_values=cache)
        with pytest.raises(BemStateError, match=r"a state of .* \(2, 8, .* \(2, 9, "):
            bem.restore(cache, {"z": saved["z"][:, :8], "real": saved["real"][:, :8]})
        bem.restore(cache, saved)
        found = llama(torch.cat([ids[:, 9:], more], dim=1), past_key_values=cache).logits[:, 1:]
    assert (found - whole).abs().max() < 1e-5


def test_cache_filled_without_the_adapter_is_an_error(llama):
    cache, ids = DynamicCache(), some_ids(2, 10)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        with attach_bem(llama, CONFIG) as bem:
            with pytest.raises(
                BemStateError,
                match="goes on from 10 cached columns, and the adapter has read none of them: attach it before",
            ):
                llama(ids, past_key_values=cache)
            cache = DynamicCache()
            llama(ids, past_key_values=cache)
            bem.detach()
            llama(ids[:, :1], past_key_values=cache)
            bem.attach()
            with pytest.raises(BemStateError):
                llama(ids[:, :1], past_key_values=cache)
            cache = DynamicCache()
            llama(ids, past_key_values=cache)
            for i in range(len(cache.layers)):  # past the decoder
                cache.update(torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8), i)
            with pytest.raises(
                BemStateError, match="goes on from 13 cached columns, and the adapter has read 10 columns of 2 rows"
            ):
                llama(ids[:, :1], past_key_values=cache)
            cache = DynamicCache()
            llama(ids, past_key_values=cache)
            for layer in cache.layers:  # past the cache's own methods
                layer.batch_select_indices(torch.tensor([0]))
            with pytest.raises(
                BemStateError,
                match=(
                    "a forward of 1 rows goes on from 10 cached columns, and the adapter has read 10 columns of 2 rows"
                ),
            ):
                llama(ids[:1, :1], past_key_values=cache)


def test_failed_forward_leaves_a_usable_state(llama):
    ids, more = some_ids(1, 10), some_ids(1, 5, seed=4)

    def fail(*_):
        raise RuntimeError("in the host")

    with randomise(attach_bem(llama, CONFIG)), torch.no_grad():
        cache = DynamicCache()
        llama(ids, past_key_values=cache)
        handle = llama.model.layers[0].self_attn.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the host"):
            llama(more, past_key_values=cache)
        handle.remove()
        found = llama(more, past_key_values=cache).logits
        assert (found - full(llama, torch.cat([ids, more], dim=1))[:, 10:]).abs().max() < 1e-5


def test_ambiguous_inputs_are_refused(llama):
    ids = some_ids(2, 6)
    with attach_bem(llama, CONFIG), torch.no_grad():
        with pytest.raises(UnsupportedDecoding, match="not 2D"):
            llama(ids, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
        with pytest.raises(AlignmentError, match="padding cannot be identified"):
            llama.model(ids, attention_mask=torch.ones(2, 4, dtype=torch.long))
        with pytest.raises(UnsupportedDecoding, match="packed in one row"):
            llama(ids, cu_seq_lens_q=torch.tensor([0, 3, 6]))
        with pytest.raises(BemError, match="outside of a forward of its decoder"):
            llama.model.layers[0](torch.randn(1, 3, 16))
        with pytest.raises(BemError, match=r"did not pass o\.1: its hook was removed"):
            llama.model.layers[1].self_attn.o_proj._forward_hooks.clear()
            llama(ids)


def test_generation_compiled_by_generate_is_steered(llama):
    """On a GPU generate() compiles its decoding steps with a static cache; here it is told to."""
    torch._dynamo.reset()
    ids, compiled = some_ids(1, 6), CompileConfig(mode="default", backend="eager")
    compiled._compile_all_devices = True
    options = {**GREEDY, "cache_implementation": "static"}
    bare = llama.generate(ids, **options, compile_config=compiled)
    with randomise(attach_bem(llama, CONFIG)):
        expected = llama.generate(ids, **options)
        assert torch.equal(llama.generate(ids, **options, compile_config=compiled), expected) and not torch.equal(
            bare, expected
        )
    assert torch.equal(llama.generate(ids, **options, compile_config=compiled), bare)
    torch._dynamo.reset()


def test_compiled_forward_is_steered():
    torch._dynamo.reset()
    model, ids = make_host(layers=1), some_ids(2)
    compiled, bare = torch.compile(model, backend="eager"), full(model, ids)
    assert torch.equal(full(compiled, ids), bare)
    with randomise(attach_bem(compiled, BemConfig(rank=3, width=6, chunk_tokens=N, prefix_tokens=P))):
        steered = full(model, ids)
        assert (full(compiled, ids) - steered).abs().max() < 1e-6 and (steered - bare).abs().max() > 0.1
    assert torch.equal(full(compiled, ids), bare)
    torch._dynamo.reset()


def test_end_of_sequence_token_is_not_padding(llama):
    """What is padding is said by the mask, not by the ids."""
    ids = torch.tensor([[EOS, 5, PAD, 9, EOS, 7, PAD, 8, 9, 10]])
    mask = torch.ones_like(ids)
    with randomise(attach_bem(llama, CONFIG)):
        out = llama.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(out, plain_greedy(llama, ids, 12))


@pytest.mark.skipif(OLDEST, reason="it has no ContinuousBatchingConfig")
def test_continuous_batching_is_refused_before_a_request_unless_the_adapter_is_off():
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = make_host()
    config = ContinuousBatchingConfig(max_batch_tokens=16, page_size=4, num_blocks=16, allow_block_sharing=False)
    settings = {"continuous_batching_config": config, "progress_bar": False}
    settings["generation_config"] = GenerationConfig(
        do_sample=False, max_new_tokens=5, pad_token_id=PAD, eos_token_id=EOS
    )

    def texts():
        return [
            list(output.generated_tokens) for output in model.generate_batch([[5, 9, 13], [7, 8]], **settings).values()
        ]

    bare, ran = texts(), []
    attention = model.config._attn_implementation
    with randomise(attach_bem(model, CONFIG)) as bem:
        with model.model.register_forward_pre_hook(lambda *args: ran.append(args)):
            for refused in (texts, lambda: model.init_continuous_batching(**settings)):
                with pytest.raises(
                    UnsupportedDecoding, match=r"generate_batch.* call generate\(\) with a row for each"
                ):
                    refused()
        assert not ran and model.config._attn_implementation == attention
        bem.enabled = False
        assert texts() == bare
    assert texts() == bare and len(bare[0]) == 5
