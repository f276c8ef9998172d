"""Routing of adapters: X-LoRA scalings and BEM codes are recorded for their own tokens."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from conftest import HIDDEN, PAD, make_model, make_pack, n_hooks
from oracle import check as check_scores
from probemon import DynamicProbeManager
from probemon.adapters.routing import AlertRule, RoutingMonitor
from probemon.adapters.routing.recorder import Routing
from probemon.errors import AlignmentError, ConfigError, UnknownSetting, UnsupportedModel
from routed_hosts import GREEDY, make_bem

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
PROMPT = torch.tensor([[1, 44, 3, 17, 8]])
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])
PADDED = {**GREEDY, "attention_mask": (BATCH != PAD).long()}


# -- X-LoRA --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for i in range(3):
        torch.manual_seed(i)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        peft.get_peft_model(make_model(), config).save_pretrained(folder / str(i))
        found[str(i)] = str(folder / str(i))
    return found


def make_xlora(adapters, **settings):
    base = make_model()
    base.config.use_cache = False
    torch.manual_seed(7)
    model = peft.get_peft_model(
        base, peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=HIDDEN, xlora_depth=1, adapters=adapters, **settings)
    )
    with torch.no_grad():
        for parameter in model.base_model.internal_xlora_classifier.parameters():
            parameter.normal_(0, 1)
    return model.eval()


def scalings_of(model, ids):
    """What the classifier gives in one plain forward of an unpadded sequence, `[T, layers, adapters]`, as X-LoRA itself
    keeps it.
    """
    with torch.no_grad():
        model(torch.tensor([ids]))
    return model.base_model.internal_xlora_scalings[0].numpy()


def collect(recorder):
    tokens, records = {}, []

    def add(placed, decisions, record):
        records.append(record)
        for i in range(len(placed)):
            assert (int(placed.rows[i]), int(placed.columns[i])) not in tokens
            tokens[int(placed.rows[i]), int(placed.columns[i])] = decisions.take(np.array([i]))

    recorder.listen(add)
    return tokens, records


@pytest.mark.parametrize("settings", [{}, {"layerwise_scalings": True}, {"top_k_lora": 2}], ids=str)
@pytest.mark.parametrize("way", ["the wrapper", "the host inside"])
def test_xlora_scalings_are_assigned_to_their_own_tokens(adapters, settings, way):
    model = make_xlora(adapters, **settings)
    bare = model.generate(input_ids=BATCH, **PADDED)
    before = n_hooks(model)  # X-LoRA leaves some of its own
    with RoutingMonitor(model if way == "the wrapper" else model.get_base_model()) as monitor:
        tokens, records = collect(monitor)
        out = model.generate(input_ids=BATCH, **PADDED)
    assert n_hooks(model) == before and torch.equal(out, bare)
    starts = [2, 0, 1]
    assert set(tokens) == {
        (row, column) for row, start in enumerate(starts) for column in range(start, out.shape[1] - 1)
    }
    for row, start in enumerate(starts):
        oracle = scalings_of(model, out[row, start:].tolist())
        for column in range(start, out.shape[1] - 1):
            raw = tokens[row, column].raw[:, 0]
            assert raw.shape == ((oracle.shape[1], 3) if settings.get("layerwise_scalings") else (1, 3))
            assert np.abs(raw - oracle[column - start][: len(raw)]).max() < 1e-5
    assert monitor.n_tokens == len(tokens) and all(
        stream["n_tokens"] == len(tokens) for stream in monitor.report()["streams"]
    )
    assert {(record.source, str(record.site[0])) for record in records} == {("xlora", "xlora")}


def test_recorded_weights_are_the_applied_scalings(adapters):
    model = make_xlora(adapters, top_k_lora=2)
    with RoutingMonitor(model) as monitor, torch.no_grad():
        tokens, _ = collect(monitor)
        model(PROMPT)
    for (_, column), decisions in tokens.items():
        given = scalings_of(model, PROMPT[0].tolist())[column, 0].astype(np.float64)
        order = np.argsort(-given)
        assert decisions.top_idx[0, 0].tolist() == order[:2].tolist() and np.allclose(
            decisions.top_w[0, 0], given[order[:2]], atol=1e-6
        )
        kept = np.where(np.arange(3) == order[2], 0, given)
        assert np.allclose(decisions.weights[0, 0], kept / kept.sum(), atol=1e-6)


def test_probes_on_an_xlora_model_see_only_the_pass_with_adapters(adapters, tmp_path):
    """The pass without adapters, by which X-LoRA decides, is no token of anybody's."""
    model = make_xlora(adapters)
    manager = DynamicProbeManager(
        make_pack(tmp_path / "pack", model.get_base_model(), sites=("resid_post.0", "resid_post.2")), keep_top_k=6
    )
    with manager.attach(model, followers=[Routing()]) as run:
        out = model.generate(input_ids=BATCH, **PADDED)
    result = run.result(out)
    for row, line in enumerate(out.tolist()):
        first = int((BATCH[row] == PAD).sum())
        check_scores(manager, model, result, row, line, first, [(5 - first, len(line) - 6)])
    assert run.follower(Routing).n_tokens == 3 * 12 - 3


def test_xlora_with_disabled_adapters_is_a_reported_gap(adapters):
    model = make_xlora(adapters)
    with RoutingMonitor(model) as monitor, model.disable_adapter(), torch.no_grad():
        with pytest.raises(AlignmentError, match=r"without reaching \['xlora'\]"):
            model(PROMPT)
        assert monitor.n_tokens == 0
    with RoutingMonitor(model, on_gap="report") as monitor, torch.no_grad():
        with model.disable_adapter():
            model(PROMPT)
        tokens, _ = collect(monitor)
        model(PROMPT)
    assert monitor.n_unseen == 5 and monitor.n_tokens == len(tokens) == 5


def test_nonfinite_scalings_have_no_entropy(adapters):
    """Where nothing is known the weights are all alike, which would be told as indifference."""
    model = make_xlora(adapters)
    with torch.no_grad():
        next(model.base_model.internal_xlora_classifier.parameters()).fill_(float("nan"))
        with RoutingMonitor(model) as monitor:
            _, records = collect(monitor)
            model(PROMPT)
    assert [
        (line["h_decision"], line["flip"], set(line["top_w"])) for record in records for line in record.lines()
    ] == [(None, False, {None})] * 5
    assert [alert.split(",")[0] for alert in monitor.report()["alerts"]] == ["not finite: xlora"]


def test_xlora_with_one_adapter_is_refused(adapters):
    with pytest.raises(UnsupportedModel, match="nothing is routed"):
        RoutingMonitor(make_xlora({"0": adapters["0"]}))


# -- BEM -----------------------------------------------------------------------------------------


def codes_of(model, bem, ids):
    """Every level's codes `{level: [T, r]}` of an unpadded sequence by one plain forward, and its chunks and
    boundaries.
    """
    seen = []
    handle = bem.controller.register_forward_hook(lambda module, args, codes: seen.append(codes))
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    handle.remove()
    [codes] = seen
    return codes


@pytest.mark.parametrize(
    "options", [PADDED, {**PADDED, "use_cache": False}, {**PADDED, "num_beams": 2}], ids=["cache", "no cache", "beams"]
)
@pytest.mark.parametrize("level", ["position", "auto"])
def test_bem_codes_are_assigned_to_their_own_tokens(level, options):
    model = make_model()
    with make_bem(model, level=level) as bem:
        with RoutingMonitor(model, bem=bem) as monitor:
            tokens, records = collect(monitor)
            out = model.generate(BATCH, **options)
        levels = [stream["level"] for stream in monitor.report()["streams"]]
        assert levels == (["chunk", "token"] if level == "position" else ["prefix", "chunk", "token"])
        starts = [2, 0, 1]
        assert set(tokens) == {
            (row, column) for row, start in enumerate(starts) for column in range(start, out.shape[1] - 1)
        }
        for row, start in enumerate(starts):
            codes = codes_of(model, bem, out[row, start:-1].tolist())
            for t in range(out.shape[1] - 1 - start):
                mine = tokens[row, start + t]
                for s, name in enumerate(levels):
                    assert np.abs(mine.raw[s, 0] - codes.of(name)[0, t].numpy()).max() < 1e-5
                    assert bool(mine.decided[s, 0]) == (name == "token" or t % 4 == 0)
                assert mine.chunk[0] == t // 4 and abs(mine.confidence[0] - float(codes.confidence[0, t])) < 1e-5
    total = {stream["level"]: stream for stream in monitor.report()["streams"]}
    n_decided = sum(-(-(out.shape[1] - 1 - start) // 4) for start in starts)
    # Chunk codes steer from the token limit on, by the prompts' length none do; reuse is of those that steer.
    steered = [t for start in starts for t in range(9, out.shape[1] - 1 - start)] if level == "position" else []
    assert (
        total["chunk"]["n_tokens"] == len(tokens)
        and total["chunk"]["n_steering"] == len(steered)
        and total["token"].get("code_reuse_rate", 0) == 0
    )
    assert total["chunk"].get("code_reuse_rate") == (
        pytest.approx(sum(t % 4 > 0 for t in steered) / len(steered)) if steered else None
    )
    assert all(stream["kv_invalidations"] == 0 for stream in total.values())
    chunk = [line for record in records for line in record.lines() if line["level"] == "chunk"]
    assert (
        sum(line["n_tokens"] for line in chunk) == len(tokens) and sum(line["boundary"] for line in chunk) == n_decided
    )
    assert all(
        line["reused"] != line["boundary"] and line["h_decision"] is None and line["code_norm"] > 0 for line in chunk
    )


def test_prompt_chunk_is_one_record_and_reused_codes_are_marked():
    model = make_model()
    with make_bem(model) as bem, RoutingMonitor(model, bem=bem) as monitor:
        _, records = collect(monitor)
        model.generate(torch.tensor([[1, 44, 3, 17, 8, 9, 10, 11, 12, 13]]), **{**GREEDY, "max_new_tokens": 4})
    chunk = [
        (line["pos_start"], line["n_tokens"], line["reused"])
        for record in records
        for line in record.lines()
        if line["level"] == "chunk"
    ]
    assert chunk == [(0, 4, False), (4, 4, False), (8, 2, False), (10, 1, True), (11, 1, True), (12, 1, False)]
    token = [
        (line["pos_start"], line["n_tokens"])
        for record in records
        for line in record.lines()
        if line["level"] == "token"
    ]
    assert token == [(position, 1) for position in range(13)]


@pytest.mark.filterwarnings("ignore:.*adapters .*bem.* are active:UserWarning")
def test_bem_works_with_probes_and_watching_changes_nothing(tmp_path):
    model = make_model()
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model), keep_top_k=6)
    from probemon.adapters.routing import RoutingSettings

    with make_bem(model) as bem:
        bare, before = model.generate(BATCH, **PADDED, return_dict_in_generate=True, output_logits=True), n_hooks(model)
        with manager.attach(model, followers=[Routing(RoutingSettings(bem=bem))]) as run:
            watched = model.generate(BATCH, **PADDED, return_dict_in_generate=True, output_logits=True)
        assert (
            all(torch.equal(a, b) for a, b in zip(bare.logits, watched.logits, strict=True))
            and n_hooks(model) == before
        )
    assert run.follower(Routing).report()["n_tokens"] == 33 and run.result(watched).coverage.n_unseen == 3


class Told:
    """Codes of a controller that tells more than it must."""

    def __init__(self, n, t, **more):
        self.prefix = self.token = None
        self.chunk = torch.arange(n * t * 3).reshape(n, t, 3) / 10
        self.chunk_index, self.boundary = torch.zeros(n, t, dtype=torch.long), torch.zeros(n, t, dtype=torch.bool)
        self.__dict__.update(more)


class Fake(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, hidden):
        return self.make(*hidden.shape[:2])


def test_extra_controller_outputs_are_recorded():
    model = make_model()

    def make(n, t):
        rates = {"sigma1": torch.full((n, t), 0.5), "delta_rel_norm": torch.full((n, t), 0.25)}
        return Told(n, t, **rates, fallback=torch.ones(n, t, dtype=torch.bool))

    controller = Fake(make)
    model.model.layers[0].register_forward_pre_hook(lambda module, args: controller(args[0]) and None)
    with RoutingMonitor(model, bem=controller) as monitor, torch.no_grad():
        _, records = collect(monitor)
        model(PROMPT)
    [line] = records[0].lines()
    assert (
        line["sigma1"],
        line["delta_rel_norm"],
        line["fallback"],
        line["confidence"],
        line["n_tokens"],
        line["reused"],
    ) == (0.5, 0.25, True, None, 5, True)
    [stream] = monitor.report()["streams"]
    assert stream["fallback_rate"] == 1 and stream["kv_invalidations"] == 4, (
        "its codes differ within a chunk, with nothing decided"
    )


def test_infinite_values_are_null_in_records():
    model, controller = (
        make_model(),
        Fake(
            lambda n, t: Told(
                n, t, sigma1=torch.full((n, t), float("inf")), delta_rel_norm=torch.full((n, t), float("-inf"))
            )
        ),
    )
    model.model.layers[0].register_forward_pre_hook(lambda module, args: controller(args[0]) and None)
    with RoutingMonitor(model, bem=controller) as monitor, torch.no_grad():
        _, records = collect(monitor)
        model(PROMPT)
    [line] = dataclasses.replace(records[0], t_capture_us=float("inf")).lines()
    assert line["sigma1"] is line["delta_rel_norm"] is line["t_capture_us"] is None and line["code_norm"] > 0


def test_fallback_inside_a_chunk_is_a_separate_record():
    """Of one chunk of 5 tokens, the third and fourth fall back."""
    fallback = torch.tensor([[False, False, True, True, False]])
    model, controller = (
        make_model(),
        Fake(
            lambda n, t: Told(
                n, t, chunk=torch.ones(n, t, 3), boundary=torch.arange(t).expand(n, t) == 0, fallback=fallback
            )
        ),
    )
    model.model.layers[0].register_forward_pre_hook(lambda module, args: controller(args[0]) and None)
    with RoutingMonitor(model, bem=controller) as monitor, torch.no_grad():
        _, records = collect(monitor)
        model(PROMPT)
    lines = list(records[0].lines())
    assert [
        (line["pos_start"], line["n_tokens"], line["fallback"], line["boundary"], line["reused"]) for line in lines
    ] == [(0, 2, False, True, False), (2, 2, True, False, True), (4, 1, False, False, True)]
    [stream] = monitor.report()["streams"]
    assert stream["fallback_rate"] == sum(line["n_tokens"] for line in lines if line["fallback"]) / 5 == 0.4
    assert stream["code_norm"] == pytest.approx(3**0.5)


def test_controller_without_codes_is_a_typed_error():
    model, controller = make_model(), Fake(lambda n, t: torch.zeros(n, t, 3))
    model.model.layers[0].register_forward_pre_hook(lambda module, args: controller(args[0]) is None)
    with (
        RoutingMonitor(model, bem=controller),
        torch.no_grad(),
        pytest.raises(UnsupportedModel, match="expected prefix, chunk or token"),
    ):
        model(PROMPT)


def test_short_sequences_and_unused_codes_raise_no_alert():
    """In a row's first chunk every chunk code is the learned one, and a level that no site takes may do as it likes:
    neither is a collapse.
    """
    model = make_model()
    with (
        make_bem(model, chunk_tokens=16, prefix_tokens=16, token_limit=64) as bem,
        RoutingMonitor(model, bem=bem, window=64) as monitor,
        torch.no_grad(),
    ):
        for i in range(400):
            model(torch.randint(3, 60, (1, 8), generator=torch.Generator().manual_seed(i)))
    report = monitor.report()
    chunk = next(stream for stream in report["streams"] if stream["level"] == "chunk")
    assert (
        report["n_tokens"] == 3200
        and chunk["n_steering"] == 0
        and "variation" not in chunk
        and "code_reuse_rate" not in chunk
    )
    assert not [alert for alert in report["alerts"] if "chunk" in alert]
    assert report["unjudged"] == {
        "collapse": 2 * 1024,
        "entropy drift": 7 * 2048,
        "code reuse": 2 * 512,
    }, "and it is not said that there is none"


def test_sequences_under_the_token_limit_leave_chunk_codes_unjudged():
    model = make_model()
    ids = torch.randint(3, 60, (8, 247), generator=torch.Generator().manual_seed(0))
    with (
        make_bem(model, sites=("o", "down"), chunk_tokens=16, prefix_tokens=16, token_limit=512) as bem,
        RoutingMonitor(model, bem=bem) as monitor,
        torch.no_grad(),
    ):
        for _ in range(7):
            model(ids)
    report = monitor.report()
    steering = {stream["level"]: stream["n_steering"] for stream in report["streams"]}
    assert steering == {"chunk": 0, "token": 7 * 8 * 247} and report["unjudged"] == {
        "collapse": 2 * 1024,
        "entropy drift": 7 * 2048,
        "code reuse": 2 * 512,
    }


def test_every_rule_of_the_adapter_is_unjudged_before_any_token():
    model = make_model()
    with make_bem(model) as bem, RoutingMonitor(model, bem=bem) as monitor:
        expected = {
            "not finite": 1,
            "code reuse": 1024,
            "indifference": 1024,
            "latency": 1024,
            "memory": 1024,
            "collapse": 2048,
            "entropy drift": 7 * 2048,
        }
        assert monitor.report()["unjudged"] == expected


def test_rule_for_a_level_that_the_adapter_lacks_is_unjudged():
    model, rule = (
        make_model(),
        AlertRule("mine", "code_norm", 0.0, 0.1, window=4, in_a_row=1, sources=("bem",), levels=("prefix",)),
    )
    other = AlertRule("other", "code_norm", 0.0, 0.1, window=4, in_a_row=1, sources=("bem",), levels=("chunk",))
    with make_bem(model) as bem, RoutingMonitor(model, bem=bem, rules=(rule, other), window=4) as monitor:
        assert monitor.report()["unjudged"] == {"mine": 4, "other": 4}
        model.generate(PROMPT, **GREEDY)
    assert monitor.report()["unjudged"] == {"mine": 4}


def test_adapter_of_another_model_or_detached_is_refused_with_the_cause():
    model, other = make_model(), make_model()
    with make_bem(other) as elsewhere, pytest.raises(ConfigError, match="another LlamaForCausalLM"):
        RoutingMonitor(model, bem=elsewhere)
    bem = make_bem(model)
    bem.detach()
    with pytest.raises(ConfigError, match="detached"):
        RoutingMonitor(model, bem=bem)
    with bem, RoutingMonitor(model, bem=bem.controller) as monitor:  # one alone does not know its host
        model.generate(PROMPT, **GREEDY)
    assert monitor.n_tokens == 12


@pytest.mark.filterwarnings("ignore:.*adapters .*bem.* are active:UserWarning")
def test_model_routed_only_by_an_adapter_says_how_to_watch_it(tmp_path):
    model = make_model()
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model), keep_top_k=6)
    with make_bem(model) as bem:
        before = n_hooks(model)
        with pytest.raises(UnsupportedModel, match=r"Routing\(bem=bem\).*RoutingMonitor\(model, bem=bem\).*--bem"):
            manager.attach(model, followers=[Routing()])
        with pytest.raises(ConfigError, match=r"settings of routing are 'x': give a RoutingSettings"):
            manager.attach(model, followers=[Routing("x")])
        with pytest.raises(
            UnknownSetting,
            match=r"no setting 'bemm' of routing, did you mean 'bem'\?: there are rules, window, bem, states, run_id",
        ):
            RoutingMonitor(model, bemm=bem)
        with pytest.raises(ConfigError, match="settings of routing are 'x'"):
            RoutingMonitor(model, "x")
        assert n_hooks(model) == before


def test_an_adapter_of_rank_one_is_watched():
    model = make_model()
    with make_bem(model, rank=1) as bem, RoutingMonitor(model, bem=bem) as monitor:
        model.generate(BATCH, **PADDED)
    for stream in monitor.report()["streams"]:
        assert stream["n_tokens"] > 20 and stream["code_norm"] > 0 and "effective_rank" not in stream


def test_reattaching_an_adapter_under_a_monitor_leaves_no_hooks():
    model = make_model()
    before, bem = set(vars(model)), make_bem(model)
    expected = model.generate(BATCH, **PADDED)
    with RoutingMonitor(model, bem=bem) as monitor:
        bem.detach()
        bem.attach()
        assert torch.equal(model.generate(BATCH, **PADDED), expected)
    assert monitor.report()["n_tokens"] > 20
    assert torch.equal(model.generate(BATCH, **PADDED), expected)
    bem.detach()
    assert set(vars(model)) == before
    bem.attach()
    assert torch.equal(model.generate(BATCH, **PADDED), expected)
    bem.detach()
    assert set(vars(model)) == before


def test_applied_update_sizes_are_recorded():
    """Against the dense updates of the codes that the sites were given, in fp64."""
    model = make_model()
    with make_bem(model, sites=("q", "o", "down"), spectral_cap=0.4) as bem:
        applied = []
        apply = bem.governor.apply
        bem.governor.apply = lambda codes: applied.append(apply(codes)) or applied[-1]
        with RoutingMonitor(model, bem=bem) as monitor, torch.no_grad():
            _, records = collect(monitor)
            model(torch.tensor([[1, 44, 3, 17, 8, 9]]), use_cache=False)
        lines = {line["pos_start"]: line for line in records[0].lines() if line["level"] == "token"}
        weights = sum(float(site.module.weight.detach().double().square().sum()) for site in bem.sites) ** 0.5
        for t in range(6):
            dense = [
                bem.config.scale
                * (bem.updates[site.key].U.detach() * applied[0][site.key][t]).double()
                @ bem.updates[site.key].V.detach().double().T
                for site in bem.sites
            ]
            norms = [float(torch.linalg.matrix_norm(one)) for one in dense]
            largest = dense[int(np.argmax(norms))]
            assert lines[t]["sigma1"] == pytest.approx(float(torch.linalg.matrix_norm(largest, 2)), rel=1e-4) and lines[
                t
            ]["sigma1"] <= 0.4 * (1 + 1e-4)
            assert lines[t]["delta_rel_norm"] == pytest.approx(
                sum(norm**2 for norm in norms) ** 0.5 / weights, rel=1e-4
            )
