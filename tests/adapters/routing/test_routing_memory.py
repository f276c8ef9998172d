"""Recorded reads of memory slots equal those of the memory and name the token that was read."""

import math
from contextlib import ExitStack

import pytest
import torch

import ltm_recall
from conftest import make_model
from probemon.adapters.ltm import attach_memory, recall_host
from probemon.adapters.ltm.memory import SlotMemory
from probemon.adapters.routing import RoutingMonitor
from probemon.errors import UnsupportedDecoding, UnsupportedModel
from slot_hosts import slot_host

LENGTHS = (30, 23, 11)


@pytest.fixture
def model():
    return slot_host()


def padded():
    ids = torch.randint(1, 61, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    return ids * mask, mask.long()


@torch.no_grad()
def alone(model, ids, memories=None):
    """By layer, or by name, what each memory gave in one forward of one text alone."""
    found, handles = {}, []
    for number, memory in (memories or model.memories).items():
        handles.append(memory.register_forward_hook(lambda m, a, out, number=number: found.update({number: out})))
    model(ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("beams", [1, 3])
def test_recorded_reads_equal_one_forward_of_each_returned_text(model, beams):
    ids, mask = padded()
    records = []
    with RoutingMonitor(model) as monitor:
        monitor.listen(lambda placed, decisions, record: records.append(record))
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=9, do_sample=False, num_beams=beams, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
    lines = [line for record in records for line in record.lines()]
    assert {line["source"] for line in lines} == {"memory"} and {line["site"] for line in lines} == {
        "memory.0",
        "memory.1",
    }
    assert len(lines) == 2 * (sum(LENGTHS) + 8 * len(LENGTHS))
    held = 0
    for row, length in enumerate(LENGTHS):
        begin = max(LENGTHS) - length
        text = out[row, begin:]
        for number, read in alone(model, text[:-1]).items():
            of_row = [line for line in lines if line["row"] == row and line["layer"] == int(number)]
            assert sorted(line["pos_start"] for line in of_row) == list(range(begin, begin + len(text) - 1))
            for line in of_row:
                at = line["pos_start"] - begin
                p = read.reads[0, at]
                assert sum(line["top_w"]) <= 1 + 1e-5 and line["top_w"] == sorted(line["top_w"], reverse=True)
                for slot, weight, position, token in zip(
                    line["top_idx"], line["top_w"], line["top_position"], line["top_token"], strict=True
                ):
                    assert weight == pytest.approx(float(p[0] if slot == 7 else p[slot + 1]), abs=1e-5)
                    assert (position, token) == (-1, -1) or token == int(text[position])
                    assert position < 6 * (at // 6)  # of a segment that ended before this token
                    held += position >= 0
                entropy = -sum(q * math.log(q) for q in p.double().tolist() if q) / math.log(8)
                assert line["h_decision"] == pytest.approx(entropy, abs=1e-4) and line["code_norm"] is None
    assert held > 200


def test_correct_answer_of_the_shipped_model_names_the_value_it_read():
    ids, asked, given = ltm_recall.sequences(8, 60, torch.Generator().manual_seed(5))
    records = []
    host = recall_host()
    with RoutingMonitor(host) as monitor, torch.no_grad():
        monitor.listen(lambda placed, decisions, record: records.append(record))
        answers = host(ids).logits.argmax(dim=-1)
    reads = {(line["row"], line["pos_start"]): line for record in records for line in record.lines()}
    right = 0
    for row in range(8):
        for at, position in zip(asked[row].tolist(), given[row].tolist(), strict=True):
            if answers[row, at] == ids[row, position]:
                right += 1
                read = reads[row, at]
                assert (read["top_position"][0], read["top_token"][0]) == (position, int(ids[row, position]))
    assert right >= 31 and len(reads) == ids.numel()


@pytest.mark.parametrize("beams", [1, 3])
def test_attached_memories_are_recorded_as_they_read(beams):
    """Of a llama with three memories, two of which are of one size: each read is that of one forward of the text."""
    host = make_model(3).eval()
    ids, mask = padded()
    lines = []
    sizes = {"memory.0": (5, 4), "memory.1": (7, 6), "memory.2": (5, 3)}
    with ExitStack() as stack:
        on = {
            site: stack.enter_context(attach_memory(host, int(site[-1]), slots=slots, segment=segment)).memory
            for site, (slots, segment) in reversed(sizes.items())
        }
        for memory in on.values():
            torch.nn.init.normal_(memory.output.weight, std=0.3)
        with RoutingMonitor(host) as monitor:
            monitor.listen(lambda placed, decisions, record: lines.extend(record.lines()))
            assert {str(site): site.module for site in monitor.sites} == on
            out = host.generate(
                ids, attention_mask=mask, max_new_tokens=9, do_sample=False, num_beams=beams, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip
            n_recorded = len(lines)
            for row, length in enumerate(LENGTHS):
                begin = max(LENGTHS) - length
                text = out[row, begin:]
                for site, read in alone(host, text[:-1], on).items():
                    own = [line for line in lines[:n_recorded] if (line["row"], line["site"]) == (row, site)]
                    assert len(own) == len(text) - 1 and {line["source"] for line in own} == {"memory"}
                    for line in own:
                        at = line["pos_start"] - begin
                        p = read.reads[0, at].tolist()
                        for slot, weight in zip(line["top_idx"], line["top_w"], strict=True):
                            assert weight == pytest.approx([*p[1:], p[0]][slot], abs=1e-5)
                        for position, token in zip(line["top_position"], line["top_token"], strict=True):
                            assert (position, token) == (-1, -1) or (position < at and token == int(text[position]))
    with pytest.raises(UnsupportedModel, match="no router"):
        RoutingMonitor(host)


def test_unsupported_memory_modes_are_refused(model):
    ids, mask = padded()
    with RoutingMonitor(model), pytest.raises(UnsupportedModel, match=r"model\.eval"):
        model.train()(ids, attention_mask=mask)
    model.eval()
    with RoutingMonitor(model), pytest.raises(UnsupportedDecoding, match="a row has one memory"):
        model.generate_batch(ids.tolist(), max_new_tokens=2)
    with RoutingMonitor(model):
        model.grow_slots(9)
        with pytest.raises(UnsupportedModel, match="9 slots, and had 7"):
            model(ids, attention_mask=mask)


def test_nonfinite_memory_is_counted_without_ending_generation(model):
    ids, mask = padded()
    memory = next(module for module in model.modules() if isinstance(module, SlotMemory))
    with torch.no_grad():
        memory.null_logit.fill_(math.nan)
    with RoutingMonitor(model) as monitor:
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    bad = monitor.report()["streams"]
    assert [stream["not_finite_rate"] for stream in bad if stream["site"] == "memory.0"] == [1]
    assert any("not finite" in str(alert) for alert in monitor.alerts)
