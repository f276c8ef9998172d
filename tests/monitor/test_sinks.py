"""Sinks receive every token of random batches in order and once, or count it as dropped."""

import json
import os
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from probemon import DynamicProbeManager
from probemon.core.scores import AUDITED, GENERATED, PHASES, PROMPT, Coverage, Scores, TokenBatch
from probemon.errors import ConfigError, MissingExtra, ProbemonError, SinkFailed
from probemon.monitor.delivery import Delivery, SinkStats
from probemon.monitor.sinks import CallbackSink, JsonLinesSink, MemorySink, ParquetSink
from started import started

P = 7
CONCEPTS = [f"cöncept.{i}" for i in range(P)]
FILES = [JsonLinesSink, ParquetSink]


def make_batch(rng, n, *, generation=0, begin=0, request="", phase=GENERATED, provisional=False):
    """A batch of n tokens and the same as plain dicts; about one in five unseen, one in five without active probes."""
    fate = rng.integers(0, 5, size=n)
    values = rng.random((n, P)).astype(np.float32).round(2)  # ties are common
    active = (rng.random((n, P)) < 0.5) & (fate > 1)[:, None]
    dropped = (rng.random((n, P)) < 0.3) & ~active & (fate > 0)[:, None]
    unseen = ["" if f else f"random reason {i}" for i, f in enumerate(fate)]
    evaluated = np.where(fate > 0, rng.integers(0, P, size=n), 0)
    rows, probes = np.nonzero(active)
    far = np.where(fate > 0, np.arange(n) % 3 == 0, 0).astype(np.int64)
    coverage = Coverage(
        n_probes=P,
        active=active.sum(1),
        dropped=dropped.sum(1),
        not_reached=np.where(fate > 0, P - active.sum(1) - dropped.sum(1), 0),
        evaluated=evaluated,
        released=np.zeros(n, np.int64),
        late=np.zeros(n, np.int64),
        excluded=np.zeros(n, np.int64),
        shed=np.zeros(n, np.int64),
        unseen=tuple(unseen),
        far=far,
        from_cache=np.zeros(n, np.int64),
        **dict.fromkeys(AUDITED, np.zeros(n, np.int64)),
    )
    scores = Scores(
        ptr=np.concatenate([[0], np.cumsum(active.sum(1))]),
        probes=probes.astype(np.int32),
        values=values[rows, probes],
        fired_mask=values[rows, probes] > np.float32(0.5),
        coverage=coverage,
    )
    row, token_id = rng.integers(0, 3, size=n), rng.integers(0, 50_000, size=n)
    position = begin + np.arange(n)
    tokens = [
        {
            "generation": generation,
            "request": request,
            "row": int(row[t]),
            "position": int(position[t]),
            "token_id": int(token_id[t]),
            "phase": PHASES[phase],
            "provisional": provisional,
            "scores": sorted(
                ([CONCEPTS[p], float(values[t, p])] for p in range(P) if active[t, p]), key=lambda s: (-s[1], s[0])
            ),
            "in_order": [(CONCEPTS[p], values[t, p]) for p in range(P) if active[t, p]],
            "fired": [CONCEPTS[p] for p in range(P) if active[t, p] and values[t, p] > np.float32(0.5)],
            "coverage": {
                "active": int(active[t].sum()),
                "dropped": int(dropped[t].sum()),
                "not_reached": int(P - active[t].sum() - dropped[t].sum()) if fate[t] else 0,
                "evaluated": int(evaluated[t]),
                "far": int(far[t]),
            },
            "unseen": unseen[t],
        }
        for t in range(n)
    ]
    return TokenBatch(generation, row, position, token_id, phase, provisional, scores, request), tokens


def make_batches(seed=0, sizes=(1, 13, 0, 2, 31)):
    """Batches that differ in everything, and all their tokens."""
    rng = np.random.default_rng(seed)
    made = [
        make_batch(
            rng,
            n,
            generation=i,
            request=f"r{i}" if i % 2 else "",
            phase=(PROMPT, GENERATED)[i % 2],
            provisional=i % 3 == 1,
        )
        for i, n in enumerate(sizes)
    ]
    return [batch for batch, _ in made], [token for _, tokens in made for token in tokens]


def bad_batch():
    """A probe number that no concept has, in its last token: what comes before it could be written."""
    batch, _ = make_batch(np.random.default_rng(1), 20)
    batch.scores.probes[-1] = P
    return batch


def write_all(sink, batches):
    sink.open(CONCEPTS)
    for batch in batches:
        sink.write(batch)
    sink.close()


def read_lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def as_line(token, top_k=None):
    line = {key: value for key, value in token.items() if key != "in_order" and (key != "request" or value)}
    return line | {"scores": line["scores"][:top_k]}


def said(batch):
    """What a batch says of each token, in plain values."""
    where = zip(
        batch.row.tolist(), batch.position.tolist(), batch.token_id.tolist(), batch.scores.coverage.unseen, strict=True
    )
    return [(*w, batch.generation, batch.scores.top(t, P), batch.scores.fired(t).tolist()) for t, w in enumerate(where)]


def counts(delivery):
    stats = delivery.stats()
    return stats.n_written, stats.n_dropped, stats.n_queued


class Gate:
    """Collects batches, each only after it was let through; `entered` says that one stands before the gate."""

    def __init__(self):
        self.entered, self.opened, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.batches, self.concepts = [], None

    def open(self, concepts):
        self.concepts = concepts

    def write(self, batch):
        self.entered.set()
        assert self.opened.wait(20)
        self.batches.append(batch)

    def close(self):
        self.closed.set()


class Fragile(Gate):
    """Raises at the named methods; `write` at the third batch."""

    def __init__(self, *at):
        super().__init__()
        self.at = at
        self.opened.set()

    def open(self, concepts):
        if "open" in self.at:
            raise OSError("open failed")

    def write(self, batch):
        if "write" in self.at and len(self.batches) == 2:
            raise OSError("write failed")
        super().write(batch)

    def close(self):
        super().close()
        if "close" in self.at:
            raise OSError("close failed")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


# -- in memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 7, 64, 10_000])
def test_memory_sink_keeps_the_newest_tokens_and_counts_the_others(max_tokens):
    rng = np.random.default_rng(max_tokens)
    sink, everything = MemorySink(max_tokens), []
    sink.open(CONCEPTS)
    assert sink.batches == [] and len(sink) == 0
    for i, n in enumerate([3, *rng.integers(0, 9, size=40).tolist(), 100, 1, 1, 150]):
        batch, _ = make_batch(rng, n, generation=i)
        everything += said(batch)
        sink.write(batch)
        assert [token for batch in sink.batches for token in said(batch)] == everything[-max_tokens:]
        assert len(sink) == min(len(everything), max_tokens)
        assert sink.n_forgotten == len(everything) - len(sink)
        assert sum(map(len, sink._held)) < 2 * max_tokens
    sink.close()


def test_memory_sink_does_not_grow_from_empty_batches():
    sink = MemorySink(5)
    for _ in range(10):
        sink.write(make_batch(np.random.default_rng(0), 0)[0])
    assert len(sink._held) == 0


def test_callback_sink_gets_the_batches_themselves():
    got, (batches, _) = [], make_batches()
    write_all(CallbackSink(got.append), batches)
    assert len(got) == len(batches) and all(a is b for a, b in zip(got, batches, strict=True))


# -- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [None, 0, 1, 3])
def test_json_lines_hold_every_value_of_every_token(tmp_path, top_k):
    batches, tokens = make_batches()
    write_all(JsonLinesSink(tmp_path / "scores.jsonl", top_k=top_k), batches)
    assert read_lines(tmp_path / "scores.jsonl") == [as_line(token, top_k) for token in tokens]
    assert any(token["unseen"] for token in tokens) and any(len(token["fired"]) > 1 for token in tokens)
    assert [p.name for p in tmp_path.iterdir()] == ["scores.jsonl"]


def test_json_lines_name_unseen_tokens_and_the_reason(tmp_path):
    batches, tokens = make_batches(seed=3)
    write_all(JsonLinesSink(tmp_path / "a"), batches)
    found = [(line["position"], line["unseen"]) for line in read_lines(tmp_path / "a") if line["unseen"]]
    assert found == [(token["position"], token["unseen"]) for token in tokens if token["unseen"]] != []


@pytest.mark.parametrize("beams", [1, 2], ids=["rows", "beams"])
def test_tokens_of_undecided_beams_are_provisional(model, pack, beams):
    ids, sink = torch.tensor([[5, 9, 13], [7, 11, 3], [8, 4, 6]]), MemorySink()
    with DynamicProbeManager(pack).attach(model) as run:
        run.follow(sink)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=beams, max_new_tokens=3)
    tokens = [
        (batch.provisional, batch.phase, int(row), int(position), int(token))
        for batch in sink.batches
        for row, position, token in zip(batch.row, batch.position, batch.token_id, strict=True)
    ]
    assert {provisional for provisional, *_ in tokens} == {beams > 1}
    assert all(out[row // beams, position] == token for _, phase, row, position, token in tokens if phase == PROMPT)
    if beams == 1:
        assert all(out[row, position] == token for *_, row, position, token in tokens)


def test_nan_score_is_null_in_json(tmp_path):
    batch, tokens = make_batch(np.random.default_rng(2), 9)
    batch.scores.values[0] = np.nan
    write_all(JsonLinesSink(tmp_path / "a"), [batch])
    first = next(t for t, token in enumerate(tokens) if token["scores"])
    concept, _ = tokens[first]["in_order"][0]
    others = [score for score in tokens[first]["scores"] if score[0] != concept]
    assert read_lines(tmp_path / "a")[first]["scores"] == [*others, [concept, None]]


@pytest.mark.parametrize("rows_per_group", [1, 7, 64, 50_000])
def test_parquet_holds_every_score_value(tmp_path, rows_per_group):
    path = tmp_path / "scores.parquet"
    batches, tokens = make_batches()
    write_all(ParquetSink(path, rows_per_group=rows_per_group), batches)
    keys = ("generation", "request", "row", "position", "token_id", "phase", "provisional")
    expected = [
        {key: token[key] for key in keys} | {"concept": c, "score": s} for token in tokens for c, s in token["in_order"]
    ]
    table = pq.read_table(path)
    assert table.to_pylist() == expected
    kinds = [pa.int32(), pa.string(), *[pa.int32()] * 3, pa.string(), pa.bool_(), pa.string(), pa.float32()]
    assert table.schema.types == kinds
    meta = pq.read_metadata(path)
    groups = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    assert sum(groups) == len(expected) and set(groups[:-1]) <= {rows_per_group} and groups[-1] <= rows_per_group
    narrow = pq.read_table(path, read_dictionary=["concept"])
    assert narrow["concept"].type == pa.dictionary(pa.int32(), pa.string()) and narrow["concept"].to_pylist() == [
        e["concept"] for e in expected
    ]


def test_parquet_metadata_names_unseen_tokens(tmp_path):
    path, (batches, tokens) = tmp_path / "a.parquet", make_batches(seed=5)
    write_all(ParquetSink(path), batches)
    about = json.loads(pq.read_table(path).schema.metadata[b"probemon"])
    keys = ("generation", "row", "position", "provisional")
    unseen = [{key: token[key] for key in keys} | {"reason": token["unseen"]} for token in tokens if token["unseen"]]
    sums = {
        name: sum(token["coverage"][name] for token in tokens)
        for name in ("active", "dropped", "not_reached", "evaluated", "far")
    }
    assert about == {
        "coverage": {"tokens": len(tokens), "unseen": len(unseen), "released": 0, "late": 0, "excluded": 0, "shed": 0}
        | sums,
        "unseen": unseen,
        "deployments": [],
    }
    assert len(unseen) > 3


def test_parquet_lists_a_bounded_number_of_unseen_tokens_and_counts_all(tmp_path):
    path, (batches, tokens) = tmp_path / "a.parquet", make_batches(seed=5)
    sink = ParquetSink(path)
    sink.max_unseen = 2
    write_all(sink, batches)
    about = json.loads(pq.read_table(path).schema.metadata[b"probemon"])
    assert [entry["reason"] for entry in about["unseen"]] == [t["unseen"] for t in tokens if t["unseen"]][:2]
    assert about["coverage"]["unseen"] == sum(t["unseen"] != "" for t in tokens) > 2


def test_generation_number_too_large_for_its_column_is_an_error(tmp_path):
    sink = ParquetSink(tmp_path / "a")
    batch, _ = make_batch(np.random.default_rng(0), 20, generation=2**40)
    sink.open(CONCEPTS)
    sink.write(batch)
    with pytest.raises(pa.ArrowInvalid, match="not in range"):
        sink.close()
    assert list(tmp_path.iterdir()) == []


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet")
    with pytest.raises(MissingExtra, match=r"probemon\[corpus\]"):
        ParquetSink(tmp_path / "a")


@pytest.mark.parametrize("make", FILES)
@pytest.mark.parametrize("batches", [[], [make_batch(np.random.default_rng(0), 0)[0]]])
def test_sink_without_tokens_writes_a_readable_empty_file(tmp_path, make, batches):
    write_all(make(tmp_path / "a"), batches)
    assert (
        (read_lines(tmp_path / "a") == []) if make is JsonLinesSink else (pq.read_table(tmp_path / "a").num_rows == 0)
    )


@pytest.mark.parametrize("make", FILES)
def test_file_gets_its_name_only_when_it_is_complete(tmp_path, make):
    sink = make(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    sink.open(CONCEPTS)
    sink.write(make_batches()[0][1])
    assert [p.name.startswith(".a-") for p in tmp_path.iterdir()] == [True]
    sink.close()
    sink.close()
    assert [(p.name, oct(p.stat().st_mode & 0o777)) for p in tmp_path.iterdir()] == [("a", "0o644")]


@pytest.mark.parametrize("make", FILES)
def test_failure_midway_leaves_no_file_and_no_temporary(tmp_path, make):
    sink = make(tmp_path / "a", **({"rows_per_group": 1} if make is ParquetSink else {}))
    sink.open(CONCEPTS)
    sink.write(make_batches()[0][1])
    with pytest.raises(IndexError):
        sink.write(bad_batch())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SinkFailed, match="not open"):
        sink.write(make_batches()[0][1])
    sink.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", FILES)
@pytest.mark.parametrize(
    "harm", [lambda file: os.truncate(file, 3), lambda file: file.write_bytes(file.read_bytes() + b"more")]
)
def test_file_truncated_or_extended_by_others_is_an_error(tmp_path, make, harm):
    sink = make(tmp_path / "a", **({"rows_per_group": 1} if make is ParquetSink else {}))
    sink.open(CONCEPTS)
    batches = make_batches()[0]
    for batch in batches[:-1]:
        sink.write(batch)
    [hidden] = tmp_path.iterdir()
    sink._file.flush()
    harm(hidden)
    sink.write(batches[-1])
    with pytest.raises(SinkFailed, match=r"bytes were written and .* are there"):
        sink.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", FILES)
def test_existing_file_is_refused_at_once_and_untouched(tmp_path, make):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ConfigError, match="a exists: give another name, or overwrite=True"):
        make(tmp_path / "a")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="dangling exists"):
        make(tmp_path / "dangling")
    assert (tmp_path / "a").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("make", FILES)
def test_existing_file_is_replaced_only_at_the_end(tmp_path, make):
    (tmp_path / "a").write_text("mine")
    for failing in (True, False):
        sink = make(tmp_path / "a", overwrite=True)
        sink.open(CONCEPTS)
        sink.write(make_batches()[0][1])
        assert (tmp_path / "a").read_text() == "mine"
        if failing:
            with pytest.raises(IndexError):
                sink.write(bad_batch())
        sink.close()
        assert ((tmp_path / "a").read_bytes() == b"mine") == failing
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("make", FILES)
def test_file_that_appears_meanwhile_is_untouched_and_scores_are_kept(tmp_path, make):
    sink, (batches, _) = make(tmp_path / "a"), make_batches()
    sink.open(CONCEPTS)
    for batch in batches:
        sink.write(batch)
    (tmp_path / "a").write_text("theirs")
    with pytest.raises(SinkFailed, match="File exists") as failed:
        sink.close()
    assert (tmp_path / "a").read_text() == "theirs"
    (kept,) = [p for p in tmp_path.iterdir() if p.name != "a"]
    assert f"the finished scores are in {kept}, move them" in str(failed.value)
    write_all(make(tmp_path / "again"), batches)
    assert kept.read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.parametrize("make", FILES)
def test_path_that_cannot_be_a_file_is_refused_at_once(tmp_path, make):
    with pytest.raises(ConfigError, match="nowhere is not a folder: make it first"):
        make(tmp_path / "nowhere" / "a")
    with pytest.raises(ConfigError, match="is a folder: give the name of a file"):
        make(tmp_path, overwrite=True)


@pytest.mark.parametrize("make", FILES)
def test_file_sink_opens_once_and_writes_only_while_open(tmp_path, make):
    sink, batch = make(tmp_path / "a"), make_batches()[0][1]
    sink.close()
    with pytest.raises(SinkFailed, match="not open"):
        sink.write(batch)
    sink.open(CONCEPTS)
    with pytest.raises(SinkFailed, match="opened before"):
        sink.open(CONCEPTS)
    sink.close()
    for late in (lambda: sink.write(batch), lambda: sink.open(CONCEPTS)):
        with pytest.raises(SinkFailed):
            late()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: MemorySink(0),
        lambda path: MemorySink(2.5),
        lambda path: JsonLinesSink(path, top_k=-1),
        lambda path: ParquetSink(path, rows_per_group=0),
        lambda path: Delivery(MemorySink(), max_batches=True),
    ],
)
def test_invalid_sink_limits_are_refused(tmp_path, make):
    with pytest.raises(ConfigError, match="give a whole number"):
        make(tmp_path / "a")


# -- delivery ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", FILES)
def test_delivered_file_equals_one_written_directly(tmp_path, make):
    batches, tokens = make_batches()
    delivery = started(make(tmp_path / "a"), CONCEPTS)
    for batch in batches:
        delivery.put(batch)
    delivery.close()
    assert delivery.stats() == SinkStats(n_written=len(tokens), n_dropped=0, n_queued=0, error=None)
    write_all(make(tmp_path / "b"), batches)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_put_does_not_wait_for_a_slow_sink_and_counts_drops():
    sink, rng, n, k = Gate(), np.random.default_rng(0), 5, 3
    delivery = started(sink, CONCEPTS, max_batches=n)
    batches = [make_batch(rng, 2 + i, generation=i)[0] for i in range(n + k + 1)]
    sizes = [len(batch) for batch in batches]
    delivery.put(batches[0])
    assert sink.entered.wait(20)  # from here on the worker holds the first, which counts against the bound
    for i, batch in enumerate(batches[1:-1], 2):
        delivery.put(batch)  # returns: the gate is shut
        assert counts(delivery) == (0, sum(sizes[n:i]), sum(sizes[: min(i, n)]))
    sink.opened.set()
    delivery.close()
    assert [batch.generation for batch in sink.batches] == list(range(n))
    delivery.put(batches[-1])
    assert delivery.stats() == SinkStats(sum(sizes[:n]), sum(sizes[n:]), 0, None)
    assert sink.concepts == CONCEPTS and sink.closed.is_set()


@pytest.mark.parametrize(
    "at, n_written, message",
    [
        (("open",), 0, "open failed"),
        (("write",), 2, "write failed"),
        (("close",), 6, "close failed"),
        (("write", "close"), 2, "write failed"),
        (("open", "close"), 0, "open failed"),
    ],
)
def test_failing_sink_is_closed_and_counted_and_others_are_unaffected(at, n_written, message):
    sink, well = Fragile(*at), MemorySink()
    deliveries = [started(sink, CONCEPTS), started(well, CONCEPTS)]
    batches = [make_batch(np.random.default_rng(i), 1, generation=i)[0] for i in range(6)]
    for batch in batches:
        for delivery in deliveries:
            delivery.put(batch)
    for delivery in deliveries:
        delivery.close()
    assert counts(deliveries[0]) == (n_written, 6 - n_written, 0)
    assert isinstance(deliveries[0].stats().error, OSError) and str(deliveries[0].stats().error) == message
    assert sink.closed.is_set() and [b.generation for b in sink.batches] == list(range(n_written))
    assert deliveries[1].stats() == SinkStats(6, 0, 0, None) and well.batches == batches


def test_tokens_put_after_a_failure_are_dropped_at_once():
    sink = Fragile("open")
    delivery = started(sink, CONCEPTS)
    assert sink.closed.wait(20)
    delivery.put(make_batch(np.random.default_rng(0), 4)[0])
    assert counts(delivery) == (0, 4, 0) and str(delivery.stats().error) == "open failed"
    delivery.close()


def test_failing_file_sink_leaves_no_file_and_keeps_its_error(tmp_path):
    delivery = started(JsonLinesSink(tmp_path / "a"), CONCEPTS)
    for batch in (make_batches()[0][1], bad_batch(), make_batches()[0][1]):
        delivery.put(batch)
    delivery.close()
    assert counts(delivery) == (0, 46, 0) and isinstance(delivery.stats().error, IndexError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", FILES)
def test_tokens_of_an_unfinished_file_are_dropped_and_of_a_renamed_one_written(kind, tmp_path):
    sink, other = kind(tmp_path / "a"), kind(tmp_path / "b")
    deliveries = [started(one, CONCEPTS) for one in (sink, other)]
    sink._check_whole = lambda n_bytes: 1 / 0
    (tmp_path / "b").write_text("another file took the name meanwhile")
    for delivery in deliveries:
        for batch in make_batches()[0]:
            delivery.put(batch)
        delivery.close()
    assert [counts(delivery) for delivery in deliveries] == [(0, 47, 0), (47, 0, 0)]
    assert [type(delivery.stats().error) for delivery in deliveries] == [ZeroDivisionError, SinkFailed]
    assert len(list(tmp_path.iterdir())) == 2  # the other file, and the finished one beside it


def test_callback_that_exits_ends_only_its_delivery():
    sink = Gate()
    sink.write = lambda batch: sys.exit("enough")
    delivery = started(sink, CONCEPTS)
    delivery.put(make_batch(np.random.default_rng(0), 4)[0])
    delivery.close()
    assert counts(delivery) == (0, 4, 0) and isinstance(delivery.stats().error, SystemExit) and sink.closed.is_set()


def test_stuck_sink_is_given_up_counted_and_named():
    sink = Gate()
    delivery = started(sink, CONCEPTS)
    (worker,) = [thread for thread in threading.enumerate() if thread.name == "probemon Gate"]
    assert worker.daemon  # the interpreter can end without it
    for n in (1, 2, 3):
        delivery.put(make_batch(np.random.default_rng(0), n)[0])
    assert sink.entered.wait(20)
    delivery.close(timeout_seconds=0.05)
    error = delivery.stats().error
    assert isinstance(error, SinkFailed) and isinstance(error, ProbemonError)
    assert "Gate did not finish within 0.05 seconds, 6 tokens given up" in str(error)
    assert counts(delivery) == (0, 6, 0)
    delivery.close()  # at once: it was given up
    sink.opened.set()
    assert sink.closed.wait(20)
    worker.join(20)
    assert counts(delivery) == (0, 6, 0) and delivery.stats().error is error and not worker.is_alive()
    assert len(sink.batches) == 1  # the one it held; nothing after that


def test_close_delivers_everything_queued_and_can_be_called_twice():
    sink = Gate()
    delivery = started(sink, CONCEPTS)
    batches = [make_batch(np.random.default_rng(i), 3, generation=i)[0] for i in range(50)]
    for batch in batches:
        delivery.put(batch)
    closers = [threading.Thread(target=delivery.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    assert counts(delivery) == (0, 0, 150)
    sink.opened.set()
    for closer in closers:
        closer.join(20)
    delivery.close()
    assert counts(delivery) == (150, 0, 0) and [b.generation for b in sink.batches] == list(range(50))


def test_sink_may_close_its_own_delivery():
    got = []

    def last(batch):
        got.append(batch)
        delivery.close()

    delivery = started(CallbackSink(last), CONCEPTS)
    delivery.put(make_batch(np.random.default_rng(0), 4)[0])
    delivery.close()
    assert delivery.stats() == SinkStats(4, 0, 0, None) and len(got) == 1


@pytest.mark.parametrize("max_batches", [1, 3, 1024])
def test_concurrent_puts_lose_and_repeat_no_token(max_batches):
    n_threads, each = 4, 150
    sizes = np.random.default_rng(max_batches).integers(0, 6, size=(n_threads, each))
    made = {n: make_batch(np.random.default_rng(n), n)[0] for n in range(6)}
    batches = [
        [
            TokenBatch(k, b.row, b.position + 10 * i, b.token_id, b.phase, False, b.scores)
            for i, b in enumerate(made[int(n)] for n in row)
        ]
        for k, row in enumerate(sizes)
    ]
    got = []
    delivery = started(CallbackSink(got.append), CONCEPTS, max_batches=max_batches)
    begun, done = [0] * n_threads, [0] * n_threads

    def put(k):
        for batch in batches[k]:
            begun[k] += len(batch)
            delivery.put(batch)
            done[k] += len(batch)

    threads = [threading.Thread(target=put, args=(k,)) for k in range(n_threads)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        at_least = sum(done)
        total = sum(counts(delivery))
        assert at_least <= total <= sum(begun)
    for thread in threads:
        thread.join()
    assert sum(counts(delivery)) == sizes.sum()
    delivery.close()
    stats = delivery.stats()
    assert (stats.n_queued, stats.error) == (0, None) and stats.n_written + stats.n_dropped == sizes.sum()
    assert stats.n_written == sum(map(len, got))
    for k in range(n_threads):
        order = {id(batch): i for i, batch in enumerate(batches[k])}
        arrived = [order[id(batch)] for batch in got if batch.generation == k]
        assert arrived == sorted(set(arrived))
    if max_batches == 1024:
        assert stats.n_dropped == 0
