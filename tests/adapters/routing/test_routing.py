"""Routing decisions are recorded for their own tokens in every decoding mode, and watching changes nothing."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import CompileConfig, DynamicCache

from blinded import Blinded
from conftest import EOS, HIDDEN, LAYERS, OLDEST, PAD, make_model, make_pack, n_hooks, not_in_oldest
from hears import hears
from probemon import DynamicProbeManager
from probemon.adapters.routing import DEFAULT_RULES, AlertRule, RoutingJsonLines, RoutingMonitor, RoutingParquet
from probemon.adapters.routing.recorder import Routing
from probemon.adapters.routing.records import COLUMNS
from probemon.errors import CallbackFailed, ConfigError, UnknownSetting, UnsupportedModel
from probemon.monitor.sinks import CallbackSink
from routed_hosts import GREEDY, KINDS, PROMPT, make_bem, make_moe, packed

BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])
TOLERANCE = 5e-5  # of logits of about 5, in fp32, by a cache and without one


@pytest.fixture(scope="module", params=KINDS)
def moe(request):
    return make_moe(request.param)


@pytest.fixture(scope="module")
def mixtral():
    return make_moe()


class Seen:
    """What a monitor was told of each token, `{(request, row, position): (raw [S, E], chosen [S, k], weights [S, k])}`;
    a token is told of once.
    """

    def __init__(self, recorder):
        self.tokens, self.records = {}, []
        recorder.listen(self.add)

    def add(self, placed, decisions, record):
        s, n = decisions.raw.shape[:2]
        self.records.append(record)
        positions = record.pos_start.reshape(s, n)
        assert (positions == positions[0]).all() and len(placed) == n
        for i in range(n):
            key = record.request_id, int(record.row[i]), int(positions[0, i])
            assert key not in self.tokens
            self.tokens[key] = decisions.raw[:, i], decisions.top_idx[:, i], decisions.top_w[:, i]

    def of(self, row, request="0"):
        return {position: told for (r, at, position), told in self.tokens.items() if (r, at) == (request, row)}


def routers_of(model, ids):
    """The host's own router logits `[S, T, E]` by one plain forward of an unpadded sequence."""
    with torch.no_grad():
        return torch.stack(model(torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits).numpy()


def check_row(model, told, ids, first, n_seen, tolerance=TOLERANCE):
    """`told` has exactly `n_seen` positions from `first` on, each with the logits of a plain forward of `ids`, which
    begin there.
    """
    assert sorted(told) == list(range(first, first + n_seen))
    oracle = routers_of(model, ids)
    for position, (raw, chosen, weights) in told.items():
        mine = oracle[:, position - first]
        assert np.abs(raw - mine).max() < tolerance
        assert (np.diff(weights) <= 0).all()
        for s, line in enumerate(mine):
            assert set(chosen[s]) == set(np.argsort(-line)[: chosen.shape[1]].tolist())


def check(model, seen, out, starts, eos=None):
    """Each row to its end of sequence, if that has been run: the newest token has not."""
    for row, line in enumerate(out.tolist()):
        end = next((i + 1 for i in range(BATCH.shape[1], len(line) - 1) if line[i] == eos), len(line) - 1)
        check_row(model, seen.of(row), line[starts[row] : end], starts[row], end - starts[row])


def test_recorded_logits_equal_the_models_exactly(moe):
    with RoutingMonitor(moe) as monitor, torch.no_grad():
        seen = Seen(monitor)
        out = moe(BATCH[1:2], output_router_logits=True)
    for position, (raw, _, _) in seen.of(0).items():
        assert np.array_equal(raw, torch.stack(out.router_logits).numpy()[:, position])
    assert len(seen.tokens) == 5 and monitor.n_tokens == 5
    assert [stream["layer"] for stream in monitor.report()["streams"]] == (
        [0, 2] if moe.config.model_type == "qwen3_moe" else [0, 1, 2]
    )


def test_recorded_weights_equal_those_given_to_the_experts(mixtral):
    """The router's own output, caught by a hook of the test."""
    caught, gate = [], mixtral.model.layers[1].mlp.gate
    handle = gate.register_forward_hook(lambda module, args, out: caught.append([x.clone() for x in out]))
    with RoutingMonitor(mixtral) as monitor, torch.no_grad():
        seen = Seen(monitor)
        mixtral(PROMPT)
    handle.remove()
    _, weights, experts = caught[0]
    for position, (_, chosen, given) in seen.of(0).items():
        assert chosen[1].tolist() == experts[position].tolist() and given[1].tolist() == weights[position].tolist()
    [stream] = [s for s in monitor.report()["streams"] if s["layer"] == 1]
    assert stream["load"] == torch.bincount(experts.ravel(), minlength=5).tolist()


def test_watching_changes_no_logit_and_leaves_no_hooks(moe):
    options = {
        **GREEDY,
        "attention_mask": (BATCH != PAD).long(),
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    bare, before, shadows = moe.generate(BATCH, **options), n_hooks(moe), set(vars(moe))
    with RoutingMonitor(moe):
        watched = moe.generate(BATCH, **options)
    assert torch.equal(bare.sequences, watched.sequences)
    assert all(torch.equal(a, b) for a, b in zip(bare.logits, watched.logits, strict=True))
    assert n_hooks(moe) == before and set(vars(moe)) == shadows


MODES = {
    "greedy": {}, "no cache": {"use_cache": False}, "static cache": {"cache_implementation": "static"},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "ends": {"eos_token_id": EOS, "do_sample": True, "temperature": 3.0, "max_new_tokens": 20},
    "chunks of a prompt": {"prefill_chunk_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_padded_batch_is_recorded_in_every_decoding_mode(moe, mode):
    if OLDEST and mode == "chunks of a prompt":
        pytest.skip("transformers 5.0: no chunks there")
    torch.manual_seed(5)
    with RoutingMonitor(moe) as monitor:
        seen = Seen(monitor)
        out = moe.generate(BATCH, **{**GREEDY, "attention_mask": (BATCH != PAD).long(), **MODES[mode]})
    check(moe, seen, out, [2, 0, 1], MODES[mode].get("eos_token_id"))
    assert monitor.n_tokens == len(seen.tokens)
    assert {(record.phase, step) for record in seen.records for step in record.step} == {("prompt", 0)} | {
        ("generated", i) for i in range(1, out.shape[1] - 5)
    }
    if mode == "ends":
        assert (out == EOS).any() and len(seen.tokens) < 3 * (out.shape[1] - 1) - 3


def test_several_sequences_of_one_prompt_are_recorded(mixtral):
    torch.manual_seed(0)
    with RoutingMonitor(mixtral) as monitor:
        seen = Seen(monitor)
        out = mixtral.generate(PROMPT, **{**GREEDY, "do_sample": True, "num_return_sequences": 3})
    check(mixtral, seen, out, [0, 0, 0])


@pytest.mark.parametrize(
    "how", ["a draft model", not_in_oldest("prompt lookup", why="it looks for an end of sequence that there is not")]
)
def test_rejected_drafts_are_not_counted(mixtral, how):
    n_run, gate = [], mixtral.model.layers[0].mlp.gate
    handle = gate.register_forward_hook(lambda module, args, out: n_run.append(len(out[0])))
    options = {"assistant_model": make_model(seed=4)} if how == "a draft model" else {"prompt_lookup_num_tokens": 3}
    prompt = torch.tensor([[1, 44, 3, 17, 44, 3, 17, 44]])
    with RoutingMonitor(mixtral) as monitor:
        seen = Seen(monitor)
        out = mixtral.generate(prompt, **{**GREEDY, "max_new_tokens": 12, **options})
    handle.remove()
    n = out.shape[1] - 1
    assert sum(n_run) > n, "some drafts were rejected"
    check_row(mixtral, seen.of(0), out[0].tolist(), 0, n)
    assert len(seen.tokens) == monitor.n_tokens == n
    assert all(sum(stream["load"]) == 2 * n for stream in monitor.report()["streams"])


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 1},
        {"num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 2, "use_cache": False},
    ],
    ids=str,
)
def test_beams_are_counted_once_as_returned(mixtral, options):
    torch.manual_seed(1)
    with RoutingMonitor(mixtral) as monitor:
        seen = Seen(monitor)
        out = mixtral.generate(BATCH, **{**GREEDY, "attention_mask": (BATCH != PAD).long(), "num_beams": 3, **options})
    each, expected = options["num_return_sequences"], {}
    for row, line in enumerate(out.tolist()):
        first = [2, 0, 1][row // each]
        for position in range(first, len(line) - 1):
            expected.setdefault((row // each, tuple(line[: position + 1])), (row, position))
    assert {(row, position) for _, row, position in seen.tokens} == set(expected.values())
    assert len(seen.tokens) == monitor.n_tokens == len(expected)
    for (_, row, position), (raw, _, _) in seen.tokens.items():
        first = [2, 0, 1][row // each]
        assert np.abs(raw - routers_of(mixtral, out[row, first:].tolist())[:, position - first]).max() < TOLERANCE


def test_second_turn_and_documents_are_separate_requests(mixtral):
    cache = DynamicCache(config=mixtral.config)
    with RoutingMonitor(mixtral) as monitor:
        seen = Seen(monitor)
        first = mixtral.generate(PROMPT, **GREEDY, past_key_values=cache)
        whole = torch.cat([first, torch.tensor([[9, 30]])], dim=1)
        out = mixtral.generate(
            whole, **GREEDY, past_key_values=cache, attention_mask=torch.ones_like(whole)
        )  # else a generated 0 is taken for padding
        with torch.no_grad():
            mixtral(PROMPT)
    oracle = routers_of(mixtral, out[0].tolist())
    assert (
        sorted(seen.of(0)) == list(range(12))
        and sorted(seen.of(0, "1")) == list(range(12, out.shape[1] - 1))
        and sorted(seen.of(0, "2")) == list(range(5))
    )
    for position, told in {**seen.of(0), **seen.of(0, "1")}.items():
        assert np.abs(told[0] - oracle[:, position]).max() < TOLERANCE
    assert monitor._watcher.recordings == [] or len(monitor._watcher.recordings) == 1, "nothing grows with generations"


@pytest.mark.parametrize("before", [True, False], ids=["attached before", "attached after"])
def test_compiled_model_is_recorded(before):
    torch._dynamo.reset()
    model = make_moe()
    config = CompileConfig(mode="default", backend="eager", fullgraph=False)
    config._compile_all_devices = True
    options = {**GREEDY, "cache_implementation": "static", "compile_config": config}
    if not before:
        model.generate(PROMPT, **options)
    with RoutingMonitor(model) as monitor:
        seen = Seen(monitor)
        out = model.generate(PROMPT, **options)
    torch._dynamo.reset()
    check_row(make_moe(), seen.of(0), out[0].tolist(), 0, 12)


def test_concurrent_threads_are_recorded_separately(mixtral):
    with RoutingMonitor(mixtral) as monitor, ThreadPoolExecutor(2) as pool:
        seen = Seen(monitor)
        outs = list(pool.map(lambda k: mixtral.generate(PROMPT + k, **GREEDY), range(6)))
    oracles, left = [routers_of(mixtral, out[0].tolist()) for out in outs], set(range(6))
    for request in {request for request, _, _ in seen.tokens}:
        told = seen.of(0, request)
        assert sorted(told) == list(range(12))
        [mine] = [
            k
            for k in left
            if all(np.abs(raw - oracles[k][:, position]).max() < TOLERANCE for position, (raw, _, _) in told.items())
        ]
        left.remove(mine)
    assert not left and monitor.n_tokens == 6 * 12


@pytest.mark.skipif(OLDEST, reason="transformers 5.0: no such configuration")
def test_continuous_batching_is_recorded():
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = make_moe()
    config = ContinuousBatchingConfig(max_batch_tokens=16, page_size=4, num_blocks=32, allow_block_sharing=False)
    with RoutingMonitor(model) as monitor:
        seen = Seen(monitor)
        prompts = [row[row != PAD].tolist() for row in BATCH]
        outputs = model.generate_batch(
            prompts,
            progress_bar=False,
            generation_config=GenerationConfig(**{**GREEDY, "eos_token_id": 60}),
            continuous_batching_config=config,
        )
    assert not any(output.error for output in outputs.values())
    for output in outputs.values():
        ids = [*output.prompt_ids, *output.generated_tokens]
        check_row(model, seen.of(0, output.request_id), ids, 0, len(ids) - 1)
    assert {request for request, _, _ in seen.tokens} == set(outputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_padded_batch_on_a_gpu_is_recorded():
    model = make_moe().cuda()
    with RoutingMonitor(model) as monitor:
        seen = Seen(monitor)
        out = model.generate(BATCH.cuda(), **GREEDY, attention_mask=(BATCH != PAD).long().cuda())
    check(make_moe(), seen, out.cpu(), [2, 0, 1])


def test_unseen_forwards_are_reported(mixtral):
    with RoutingMonitor(mixtral, on_gap="report") as monitor, Blinded(mixtral, [3, 4]):
        seen = Seen(monitor)
        mixtral.generate(PROMPT, **GREEDY)
    assert sorted(seen.of(0)) == [0, 1, 2, 3, 4, 5, 6, 9, 10, 11] and monitor.n_unseen == 2 and monitor.n_tokens == 10
    assert [record.dropped for record in seen.records] == [0, 0, 0, 6, 6, 6]  # two tokens of three routers
    assert not seen.records[3].flip.any() and all(stream["n_tokens"] == 10 for stream in monitor.report()["streams"])


# -- beside probes -------------------------------------------------------------------------------


def test_routing_with_probes_equals_routing_alone_and_changes_no_score(mixtral, tmp_path):
    manager = DynamicProbeManager(
        make_pack(tmp_path / "pack", mixtral, sites=("resid_post.0", "resid_post.2")), keep_top_k=6
    )
    options = {**GREEDY, "attention_mask": (BATCH != PAD).long(), "num_beams": 2}
    before = n_hooks(mixtral)
    with RoutingMonitor(mixtral) as monitor:
        alone = Seen(monitor)
        mixtral.generate(BATCH, **options)
    with manager.attach(mixtral) as bare:
        out = mixtral.generate(BATCH, **options)
    with manager.attach(mixtral, followers=[Routing()]) as run:
        beside = Seen(run.follower(Routing))
        again = mixtral.generate(BATCH, **options)
    assert n_hooks(mixtral) == before and torch.equal(out, again)
    assert alone.tokens.keys() == beside.tokens.keys()
    assert all(
        np.array_equal(a, b)
        for key, told in alone.tokens.items()
        for a, b in zip(told, beside.tokens[key], strict=True)
    )
    first, second = bare.result(out), run.result(again)
    assert all(first.scores.active(i).tolist() == second.scores.active(i).tolist() for i in range(len(first)))
    assert all(np.array_equal(first.scores.active_scores(i), second.scores.active_scores(i)) for i in range(len(first)))
    assert bare.follower(Routing) is None and run.follower(Routing).report()["n_tokens"] == len(beside.tokens)


def test_failing_callbacks_and_sinks_do_not_change_a_generation(mixtral):
    def broken(*anything):
        raise OSError("broken")

    bare = mixtral.generate(PROMPT, **GREEDY)
    with pytest.raises(CallbackFailed, match="broken") as failed, RoutingMonitor(mixtral) as monitor:
        monitor.listen(broken)
        monitor.add_sink(CallbackSink(broken))
        out = mixtral.generate(PROMPT, **GREEDY)
    assert torch.equal(bare, out) and len(failed.value.failures) == 8 + 1 and monitor.n_tokens == 12


def test_uncallable_callbacks_are_refused_when_added(mixtral):
    with RoutingMonitor(mixtral) as monitor:
        for add in (monitor.listen, monitor.on_alert):
            with pytest.raises(ConfigError, match=f"{add.__name__} is given None: give a function to call"):
                add(None)
        mixtral.generate(PROMPT, **GREEDY)
    for add in (monitor.listen, monitor.on_alert, monitor.add_sink):
        with pytest.raises(ConfigError, match="the block has ended"):
            add(CallbackSink(print) if add == monitor.add_sink else print)


def test_models_without_routers_are_refused_before_attaching(model, manager_of=None):
    before = n_hooks(model)
    with pytest.raises(UnsupportedModel, match="no router that is known"):
        RoutingMonitor(model)
    with pytest.raises(ConfigError, match="give what attach_bem returned"):
        RoutingMonitor(model, bem="adapter")
    with pytest.raises(UnknownSetting, match="'windows' of routing, did you mean 'window'"):
        RoutingMonitor(model, windows=3)
    with pytest.raises(ConfigError, match="give a tuple of AlertRule"):
        RoutingMonitor(model, rules=DEFAULT_RULES[0])
    with pytest.raises(ConfigError, match="counts tokens"):
        RoutingMonitor(model, window=0)
    assert n_hooks(model) == before


def test_unexpected_router_output_is_a_typed_error(mixtral):
    gate = mixtral.model.layers[1].mlp.gate
    with RoutingMonitor(mixtral), torch.no_grad():
        handle = gate.register_forward_hook(lambda module, args, out: out[:1], prepend=True)
        with pytest.raises(UnsupportedModel, match=r"router.1 gives \[\(5, 5\)\]: expected logits \[tokens, 5\]"):
            mixtral.model.layers[1].mlp.gate(torch.zeros(5, HIDDEN))
        handle.remove()


# -- records -------------------------------------------------------------------------------------


def test_records_round_trip_through_json_lines_and_parquet(mixtral, tmp_path):
    import pyarrow.parquet as pq

    records = []
    with RoutingMonitor(mixtral, run_id="a run") as monitor:
        monitor.add_sink(RoutingJsonLines(tmp_path / "r.jsonl"))
        monitor.add_sink(RoutingParquet(tmp_path / "r.parquet", rows_per_group=20))
        monitor.add_sink(CallbackSink(records.append))
        out = mixtral.generate(BATCH, **GREEDY, attention_mask=(BATCH != PAD).long())
    lines = [line for record in records for line in record.lines()]
    read = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert read == lines and list(read[0]) == list(COLUMNS)
    table = pq.read_table(tmp_path / "r.parquet")
    assert table.to_pylist() == lines and table.column_names == list(COLUMNS)
    assert len(lines) == LAYERS * (15 - 3 + 3 * 7) and out.shape[1] == 13
    one = next(line for line in lines if (line["row"], line["pos_start"], line["layer"]) == (2, 6, 1))
    assert (one["run_id"], one["request_id"], one["phase"], one["step"], one["site"], one["source"], one["level"]) == (
        "a run",
        "0",
        "generated",
        2,
        "router.1",
        "moe",
        "",
    )
    assert (
        one["n_tokens"] == 1
        and one["boundary"]
        and not one["reused"]
        and one["code_norm"] is None
        and one["t_capture_us"] > 0
    )
    logits = routers_of(mixtral, out[2, 1:].tolist())[1].astype(np.float64)
    shares = (
        logits if OLDEST else np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    )  # which gives the softmax as logits
    assert one["h_decision"] == pytest.approx(-(shares[5] * np.log(shares[5])).sum() / np.log(5), abs=1e-5)
    assert one["flip"] == (logits[5].argmax() != logits[4].argmax())


def test_flips_of_the_records_equal_those_of_the_statistics(mixtral):
    with RoutingMonitor(mixtral) as monitor:
        seen = Seen(monitor)
        out = mixtral.generate(BATCH, **GREEDY, attention_mask=(BATCH != PAD).long())
    for layer, stream in enumerate(monitor.report()["streams"]):
        first = [
            [
                routers_of(mixtral, line[start:])[layer, : 12 - start].argmax(axis=1)
                for line, start in [(out[row].tolist(), start)]
            ][0]
            for row, start in enumerate([2, 0, 1])
        ]
        flips = sum(int((line[1:] != line[:-1]).sum()) for line in first)
        assert sum(int(record.flip[record.layer == layer].sum()) for record in seen.records) == flips
        assert stream["flip_rate"] == pytest.approx(flips / sum(len(line) - 1 for line in first))


def test_nonfinite_routers_raise_an_alert_and_leave_other_rules_unjudged():
    model = make_moe()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[0] = float("nan")
    with RoutingMonitor(model) as monitor, torch.no_grad():
        rules = {rule.kind for rule in DEFAULT_RULES if "moe" in rule.sources}
        assert set(monitor.report()["unjudged"]) == rules and monitor.report()["unjudged"]["collapse"] == 2 * 512
        model(torch.randint(3, 60, (64, 64), generator=torch.Generator().manual_seed(0)))
        model(torch.randint(3, 60, (64, 64), generator=torch.Generator().manual_seed(1)))
    report = monitor.report()
    assert [
        (stream["n_tokens"], stream["n_not_finite"], stream["not_finite_rate"]) for stream in report["streams"]
    ] == [(0, 8192, 1.0)] * 3
    assert len(report["alerts"]) == 3 and all(alert.startswith("not finite: router.") for alert in report["alerts"])
    assert set(report["unjudged"]) == rules - {"not finite", "latency", "memory"}


@pytest.fixture
def halting():
    """A host whose router of layer 1 gives no numbers at every third column of a prompt of 7."""
    model = make_moe()
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_pre_hook(
        lambda module, args: (torch.where((torch.arange(len(args[0])) % 7 == 3)[:, None], float("nan"), args[0]),)
    )
    return model


def exchange_gates(layers):
    layers[0].mlp.gate, layers[1].mlp.gate = layers[1].mlp.gate, layers[0].mlp.gate


def exchange_layers(layers):
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.parametrize("change", [exchange_gates, exchange_layers])
def test_router_moved_to_another_layer_is_not_read_as_its_own(tmp_path, change):
    host, told = make_moe(), []
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", host, sites=(f"resid_post.{LAYERS - 1}",)))
    with (
        manager.attach(host, on_gap="report", followers=[Routing(), hears(gap=told.append)]) as run,
        torch.no_grad(),
    ):
        seen = Seen(run.follower(Routing))
        host(PROMPT)
        n_before = len(seen.tokens)
        change(host.model.layers)
        host(PROMPT.flip(1), use_cache=False)
    assert n_before == PROMPT.numel() and len(seen.tokens) == n_before
    assert [gap.reason for gap in told if "router.0" in gap.reason and "router.1" in gap.reason]
    assert run.result(PROMPT).coverage.n_unseen == 0
    assert run.result(PROMPT.flip(1)).coverage.n_unseen == PROMPT.numel()


REPEATED = torch.tensor([[token] * 7 for token in range(3, 40)])


@pytest.mark.parametrize("cached", [False, True])
def test_flips_stay_within_packed_sequences_if_the_model_separates_them(mixtral, cached):
    """With a cache it goes on from one to the next, and there is one sequence."""
    texts = list(torch.randint(3, 61, (1, 16), generator=torch.Generator().manual_seed(0)).split([5, 7, 1, 3], dim=1))
    inputs = {**packed(texts), "use_cache": cached}
    with torch.no_grad():
        out = mixtral(**inputs, output_router_logits=True)
        alone = [routers_of(mixtral, ids[0].tolist()) for ids in texts]
    apart = np.abs(torch.stack(out.router_logits).numpy() - np.concatenate(alone, axis=1)).max() < TOLERANCE
    assert apart != cached
    first = torch.stack(out.router_logits).argmax(dim=-1).numpy()
    lines = np.split(first, [5, 12, 13], axis=1) if apart else [first]
    with RoutingMonitor(mixtral) as monitor, torch.no_grad():
        mixtral(**inputs)
    n_pairs, flips = sum(line.shape[1] - 1 for line in lines), [(line[:, 1:] != line[:, :-1]).sum(1) for line in lines]
    assert [s["flip_rate"] for s in monitor.report()["streams"]] == (sum(flips) / n_pairs).tolist()


@pytest.mark.parametrize("level", ["auto", "energy"])
def test_packed_sequences_have_the_code_records_of_separate_ones(level):
    texts = list(torch.randint(3, 61, (1, 30), generator=torch.Generator().manual_seed(1)).split([13, 9, 8], dim=1))
    model, said = make_model(), []
    with make_bem(model, level=level) as bem, torch.no_grad():
        for forwards in ([packed(texts)], [{"input_ids": ids, "use_cache": False} for ids in texts]):
            with RoutingMonitor(model, bem=bem) as monitor:
                for inputs in forwards:
                    model(**inputs)
                streams = monitor.report()["streams"]
            names = ("n_tokens", "flip_rate", "code_reuse_rate", "kv_invalidations")
            said.append([[stream.get(name) for name in names] for stream in streams])
    assert said[0] == said[1]


def test_token_next_to_a_nonfinite_decision_is_not_a_flip(halting):
    with RoutingMonitor(halting) as monitor, torch.no_grad():
        seen, given = Seen(monitor), []
        monitor.listen(lambda placed, decisions, record: given.append(decisions))
        halting(REPEATED)
    first, finite = given[0].top_idx[1, :, 0].reshape(37, 7), given[0].finite[1].reshape(37, 7)
    assert (~finite).any(axis=0).tolist() == [False] * 3 + [True] + [False] * 3
    pairs = [(row, j) for row in range(37) for j in range(1, 7) if finite[row, j] and finite[row, j - 1]]
    flips = sum(first[row, j] != first[row, j - 1] for row, j in pairs)
    stream = monitor.report()["streams"][1]
    assert stream["n_not_finite"] == 37 and stream["flip_rate"] == flips / len(pairs)
    assert sum(record.flip[record.layer == 1].sum() for record in seen.records) == flips
    assert not np.concatenate(
        [
            record.flip[(record.layer == 1) & ((record.pos_start == 3) | (record.pos_start == 4))]
            for record in seen.records
        ]
    ).any()


def test_nonfinite_numbers_are_null_in_records(halting, tmp_path):
    import pyarrow.parquet as pq

    def refused(constant):
        raise ValueError(f"{constant} is no JSON")

    with RoutingMonitor(halting) as monitor, torch.no_grad():
        monitor.add_sink(RoutingJsonLines(tmp_path / "r.jsonl"))
        monitor.add_sink(RoutingParquet(tmp_path / "r.parquet"))
        halting(REPEATED)
    lines = [json.loads(line, parse_constant=refused) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert pq.read_table(tmp_path / "r.parquet").to_pylist() == lines
    for line in lines[: 2 * REPEATED.numel()]:  # the third layer attends to what is no number
        bad = (line["layer"], line["pos_start"]) == (1, 3)
        assert (line["h_decision"] is None) == (line["top_w"] == [None, None]) == bad
    json.loads(json.dumps(monitor.report()), parse_constant=refused)


def test_rule_without_a_matching_router_is_unjudged(mixtral):
    mine = AlertRule("mine", "spread", 0.2, 0.35, window=4, in_a_row=1, sources=("xlora",))
    for rules, unjudged in (((*DEFAULT_RULES[:1], mine), {"mine"}), ((DEFAULT_RULES[-1],), {"code reuse"})):
        with RoutingMonitor(mixtral, rules=rules) as monitor:
            assert set(monitor.report()["unjudged"]) - {"not finite"} == unjudged
            mixtral.generate(PROMPT, **GREEDY)
            assert set(monitor.report()["unjudged"]) == unjudged


def test_alerts_are_raised_during_generation(mixtral):
    told = []
    rule = AlertRule("never even", "max_vio", 0.0, -0.5, window=4, in_a_row=1)
    with RoutingMonitor(mixtral, rules=(rule,), window=4) as monitor:
        monitor.on_alert(told.append)
        mixtral.generate(PROMPT, **GREEDY)
        assert [alert.stream.layer for alert in monitor.alerts] == [0, 1, 2]
    assert [(alert.raised, alert.at) for alert in told] == [(True, 4)] * 3 and len(monitor.report()["alerts"]) == 3


DRIFT = AlertRule("entropy drift", "decision_entropy", 0.15, 0.1, window=8, drift=True)


def median_entropies(records, e, n_windows=5, window=8):
    """Of each layer, from the decisions as they were told: the median over windows of the mean entropy."""
    by_layer = {
        layer: np.concatenate([record.h_decision[record.layer == layer] for record in records])
        for layer in sorted(set(records[0].layer.tolist()))
    }
    return {
        layer: float(np.median(told[: n_windows * window].reshape(n_windows, window).mean(axis=1)))
        for layer, told in by_layer.items()
    }


def test_baseline_can_be_saved_loaded_and_reset(mixtral, tmp_path):
    path, ids = tmp_path / "healthy.json", torch.randint(3, 60, (8, 6), generator=torch.Generator().manual_seed(0))
    with RoutingMonitor(mixtral, rules=(DRIFT,), window=8) as monitor, torch.no_grad():
        seen = Seen(monitor)
        with pytest.raises(ConfigError, match="no baseline is known yet"):
            monitor.save_baseline(path)
        assert not path.exists() and monitor.report()["baseline"] == []
        mixtral(ids[:4])
        assert monitor.report()["baseline"] == [] and monitor.report()["unjudged"] == {"entropy drift": 7 * 8}
        mixtral(ids[4:])
        monitor.save_baseline(path)
        report = json.loads(json.dumps(monitor.report()))
    expected = median_entropies(seen.records, 5)
    assert json.loads(path.read_text()) == {"baseline": report["baseline"]}
    assert [(one["site"], one["metric"], one["tokens"]) for one in report["baseline"]] == [
        (f"router.{layer}", "decision_entropy", 8) for layer in range(LAYERS)
    ]
    assert all(one["value"] == pytest.approx(expected[one["layer"]], abs=1e-6) for one in report["baseline"])

    moved = [{**one, "value": one["value"] + 0.3 * (one["layer"] == 1)} for one in report["baseline"]]
    for baseline in (path, str(path), report, report["baseline"]):
        with RoutingMonitor(mixtral, rules=(DRIFT,), window=8, baseline=baseline) as monitor:
            assert monitor.report()["baseline"] == report["baseline"]
    told = []
    with RoutingMonitor(mixtral, rules=(DRIFT,), window=8, baseline={"baseline": moved}) as monitor, torch.no_grad():
        monitor.on_alert(told.append)
        mixtral(ids[:4])
        assert [(alert.stream.layer, alert.raised, alert.at) for alert in told] == [(1, True, 16)] and monitor.report()[
            "unjudged"
        ] == {}
        monitor.reset_baseline()
        assert [alert.raised for alert in told] == [True, False] and monitor.report()[
            "baseline"
        ] == [] == monitor.report()["alerts"]
        mixtral(ids)
        assert len(told) == 2 and len(monitor.report()["baseline"]) == LAYERS, "what was seen since is what is usual"


def test_mismatched_baseline_is_refused_at_once(mixtral, tmp_path):
    hooks = n_hooks(mixtral)
    one = {
        "source": "moe",
        "site": "router.0",
        "layer": 0,
        "level": "",
        "metric": "decision_entropy",
        "tokens": 8,
        "value": 0.5,
    }
    for baseline, told in (
        ([], "has none"),
        ({}, "has none"),
        ({"baseline": []}, "has none"),
        (3, "has none"),
        ("nowhere.json", "cannot be read"),
        ([3], "has an entry of another form: give source, site"),
        ([{**one, "value": "0.5"}], "has an entry"),
        ([{**one, "value": float("nan")}], "is not a finite number"),
        ([{**one, "value": 10**5000}], "is not a finite number"),
        ([{**one, "value": True}], "has an entry"),
        ([{**one, "tokens": 8.0}], "has an entry"),
        ([{k: v for k, v in one.items() if k != "layer"}], "has an entry"),
        ([one, one], "twice"),
        ([{**one, "site": "router.9", "layer": 9}], "of other routers: it has router.9, this model has router.0"),
        ([{**one, "source": "xlora"}], "of other routers"),
        (
            [{**one, "tokens": 512}],
            "over windows of 512 tokens of router.0, and the rules of drift look at decision_entropy over 8",
        ),
        ([{**one, "metric": "spread"}], "has spread over"),
    ):
        with pytest.raises(ConfigError, match=told):
            RoutingMonitor(mixtral, rules=(DRIFT,), window=8, baseline=baseline)
    for text in ("{", "[1", "\x00"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigError, match="is not JSON"):
            RoutingMonitor(mixtral, rules=(DRIFT,), window=8, baseline=tmp_path / "x.json")
    assert n_hooks(mixtral) == hooks
