"""The token that a memory slot reads, in results, events and streams, equals a memory in plain Python."""

import pytest
import torch
from transformers import DynamicCache

from arrangements import tokenizer
from conftest import PAD, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.adapters.ltm import attach_memory
from probemon.adapters.routing.recorder import Routing
from probemon.errors import ConfigError
from slot_hosts import slot_host
from slot_oracle import SlotOracle

LENGTHS = (30, 23, 11)
PLAIN = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": PAD, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return slot_host(num_hidden_layers=3, memory_layers=[0, 2], pad_token_id=PAD)


@pytest.fixture(scope="module")
def pack(model, tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("packs") / "pack", model)


@pytest.fixture(scope="module")
def manager(pack):
    return DynamicProbeManager(pack, keep_top_k=6)


@pytest.fixture(scope="module")
def padded():
    ids = torch.randint(3, 61, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    return torch.where(mask, ids, PAD), mask.long()


@torch.no_grad()
def oracle(model, memories, ids):
    """By layer, of each token of a text alone: p of the null slot and the slots, and where each slot was written."""
    inputs = {}
    hooks = [
        memory.register_forward_hook(lambda module, args, output, layer=layer: inputs.update({layer: args[0][0]}))
        for layer, memory in memories.items()
    ]
    model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    reads = {}
    for layer, memory in memories.items():
        memory_in_plain_python, reads[layer] = SlotOracle(memory), []
        for hidden in inputs[layer].double().numpy():
            written = [None if slot is None else slot[4] for slot in memory_in_plain_python.slots]
            reads[layer].append((memory_in_plain_python.forward([hidden])[1][0], written))
    return reads


def check_reading(reading, p, written, text, begin):
    """One `Reading` of a token: its weight is the slot's p, its position that of the token written there."""
    if reading.slot is None:
        assert reading.weight == pytest.approx(p[0], abs=2e-5)
        assert (reading.position, reading.token_id, reading.token) == (None, -1, "")
        return 0
    if reading.position is None:
        assert reading.token_id == -1 and reading.weight < 1e-9 and None in written
        return 0
    at = reading.position - begin
    assert reading.weight == pytest.approx(p[1 + written.index(at)], abs=2e-5)
    assert reading.token_id == int(text[at])
    return 1


def check(result, out, model, memories, begins=(0,) * 3):
    """Every token of a result reads what the oracle reads, most first; returns how many slots held a token."""
    held = 0
    for row, begin in enumerate(begins):
        text = out[row, begin:]
        reads = oracle(model, memories, text[:-1])
        for index in result.tokens_of(row)[:-1]:
            at = int(result.position[index]) - begin
            readings = result.reading(index, k=5)
            assert [reading.layer for reading in readings] == [layer for layer in memories for _ in range(5)]
            for layer in memories:
                own = [reading for reading in readings if reading.layer == layer]
                p, written = reads[layer][at]
                expected = sorted(p[1:], reverse=True)[:4]
                assert [reading.weight for reading in own] == pytest.approx(sorted([p[0], *expected])[::-1], abs=2e-5)
                held += sum(check_reading(reading, p, written, text, begin) for reading in own)
            first = result.reading(index)
            assert [reading.layer for reading in first] == list(memories) and set(first) <= set(readings)
        assert result.reading(result.tokens_of(row)[-1]) == []  # the host never runs it
    return held


@pytest.mark.parametrize("beams", [1, 3])
def test_result_reads_equal_plain_python_for_each_returned_text(model, manager, padded, beams):
    ids, mask = padded
    with manager.attach(model, followers=[Routing()]) as run:
        out = model.generate(ids, attention_mask=mask, num_beams=beams, **PLAIN)
    begins = [max(LENGTHS) - length for length in LENGTHS]
    result = run.result(out)
    assert check(result, out, model, model.memories, begins) > 500
    cut = result.before(int(result.position.max()) - 3)
    for row in range(len(LENGTHS)):
        before = result.tokens_of(row)[: len(cut.tokens_of(row))]
        assert [cut.reading(i) for i in cut.tokens_of(row)] == [result.reading(i) for i in before]


def test_second_turn_reads_slots_written_in_the_first(model, manager, padded):
    """Given the whole text or its new tokens alone: then what stands before them has an id, and no column."""
    ids, more = padded[0][:1], padded[0][1:2, -23:]
    with manager.attach(model, followers=[Routing()]) as run:
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        firsts = [model.generate(ids, past_key_values=cache, **PLAIN) for cache in caches]
        both = torch.cat([firsts[0], more], dim=1)
        mask = torch.ones_like(both)
        whole = model.generate(both, attention_mask=mask, past_key_values=caches[0], **PLAIN)
        results = [run.result(whole)]
        new = both[:, firsts[1].shape[1] - 1 :]  # the last token of a turn has not been run
        out = model.generate(new, attention_mask=mask, past_key_values=caches[1], **PLAIN)
        results.append(run.result(out))
    assert check(results[0], whole, model, model.memories, (0,)) > 200
    skipped = whole.shape[1] - out.shape[1]
    assert torch.equal(whole[:, skipped:], out) and skipped > 0
    n_before = 0
    for index in range(len(results[1]) - 1):
        other = results[0].at(0, int(results[1].position[index]) + skipped)
        for one, same in zip(results[1].reading(index, k=5), results[0].reading(other, k=5), strict=True):
            assert (one.slot, one.weight, one.token_id) == (same.slot, pytest.approx(same.weight), same.token_id)
            before = same.position is None or same.position < skipped
            assert one.position == (None if before else same.position - skipped)
            n_before += one.token_id >= 0 and before
    assert n_before > 20


def test_events_and_streams_have_the_reads_of_the_result(model, manager):
    events, said = [], []
    with manager.attach(model, followers=[Routing()]) as run:
        run.on("*", above=0.0, action=events.append)
        ids = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(2))
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        out = model.generate(ids, attention_mask=mask, **PLAIN)
    result = run.result(out)
    assert len({event.row for event in events}) == 2
    for event in events:
        assert list(event.reading) == result.reading(result.at(event.row, event.column))
        said += [reading.token_id for reading in event.reading]
    assert any(token_id >= 0 for token_id in said)
    words = tokenizer()
    streamed = list(
        manager.stream(model, words, " ".join(f"w{n}" for n in range(4, 30)), followers=[Routing()], **PLAIN)
    )
    result = streamed[-1].result
    assert streamed[-1].reading == () and len(streamed) == 9
    for event in streamed[:-1]:
        reading = result.reading(result.at(0, event.position))
        assert list(event.reading) == reading
        for one in reading:
            assert one.token == ("" if one.token_id < 0 else words.decode([one.token_id]))
    assert any(one.token for event in streamed for one in event.reading)


@pytest.mark.filterwarnings("ignore:adapters .'memory'. are active:UserWarning")
def test_attached_memories_are_read(manager, padded, tmp_path):
    host = make_model(3).eval()
    watch = DynamicProbeManager(make_pack(tmp_path / "pack", host), keep_top_k=6)
    ids, mask = padded
    with attach_memory(host, 2, slots=4, segment=6) as late, attach_memory(host, 0, slots=7, segment=4) as early:
        memories = {0: early.memory, 2: late.memory}
        for memory in memories.values():
            torch.nn.init.normal_(memory.output.weight, std=0.3)
        with watch.attach(host, followers=[Routing()]) as run:
            out = host.generate(ids, attention_mask=mask, **PLAIN)
        begins = [max(LENGTHS) - length for length in LENGTHS]
        assert check(run.result(out), out, host, memories, begins) > 500


def test_forgotten_or_unwatched_reads_are_not_reported_as_empty(model, manager, padded):
    ids = padded[0][:1]
    with manager.attach(model, followers=[Routing()], keep_tokens=5) as run:
        out = model.generate(ids, **PLAIN)
    result = run.result(out)
    n_readings = [len(result.reading(index)) for index in range(len(result))]
    assert n_readings == [0 if unseen else 2 for unseen in result.coverage.unseen] and 0 < n_readings.count(2) < 20
    with manager.attach(model) as run:
        out = model.generate(ids, **PLAIN)
    with pytest.raises(ConfigError, match=r"followers=\[Routing\(\)\]"):
        run.result(out).reading(0)
