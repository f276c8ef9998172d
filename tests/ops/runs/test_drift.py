"""The drift monitor on a tiny model with random probes names each planted drift, and none without a change."""

import json
import logging
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import normalizers
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from blinded import Blinded
from conftest import PAD, make_model, make_pack
from corpora import make_tokenizer
from oracle import states
from probemon import DynamicProbeManager, ProbePack
from probemon.core.drift_reference import DriftReference
from probemon.core.request_counts import RequestCounts, RequestTraits
from probemon.errors import CalibrationError, ConfigError
from probemon.monitor.check import OK, WARNING
from probemon.ops.drift.drift_monitor import ALARM_KINDS, DriftMonitor
from running_server import demo_tokenizer

ROWS, NEW = 50, 3
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


@pytest.fixture(scope="module")
def rare(model, tmp_path_factory):
    """A pack whose concepts fire in some requests and not in others."""
    made = make_pack(tmp_path_factory.mktemp("drift") / "first", model)
    manager = DynamicProbeManager(made, strategy="descent", impl="cpu")
    ids = [prompt.tolist() for prompt in prompts(0, 60)]
    highest = np.stack([manager.score_all(states(model, made, row)).numpy().max(axis=0) for row in ids])
    given = [made.find(f"c{i}") for i in range(made.n_probes)]
    alert = torch.from_numpy(np.quantile(highest, 0.8, axis=0).astype(np.float32))[given]
    return make_pack(tmp_path_factory.mktemp("drift") / "rare", model, alert_threshold=alert)


@pytest.fixture(scope="module")
def manager(rare):
    return DynamicProbeManager(rare)


@pytest.fixture(scope="module")
def reference(manager, model, tmp_path_factory):
    """A file with what 1,000 requests are like."""
    path = tmp_path_factory.mktemp("drift") / "reference.json"
    drift = DriftMonitor(manager)
    watch(manager, model, drift, range(20))
    drift.freeze(path)
    return path


def prompts(seed, n=ROWS, first=4, last=61):
    return torch.randint(first, last, (n, 6), generator=torch.Generator().manual_seed(seed))


def watch(manager, model, drift, seeds, asked=prompts, tokenizer=None):
    """Generate a batch of requests for each seed, in one run; return its health."""
    with manager.attach(model, tokenizer, followers=[drift]) as run:
        for seed in seeds:
            ids = asked(seed)
            model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert not run.failures
    return run.health()


def kinds(drift):
    return {kind for kind, n in drift.counts().items() if n}


def changed_pack(rare, path, change):
    """The same pack with other weights, which its reference does not know of: what a slip in a release does."""
    weights = {name: tensor.clone() for name, tensor in rare.weights.items()}
    change(weights)
    return ProbePack.write(
        path,
        name="random",
        concepts=rare.concepts,
        weights=weights,
        score_rule="path",
        host=rare.manifest["host"],
        licence="CC0-1.0",
        inputs=[spec.as_dict() for spec in rare.inputs],
        card="Random probes.\n",
        alert_threshold=rare.alert_threshold,
    )


def unpinned(reference, path):
    """The same reference, that says nothing of the probes that it was counted of."""
    content = json.loads(reference.read_text())
    path.write_text(json.dumps({**content, "packs": {}}))
    return path


def test_drift_counts_equal_those_of_plain_forwards(manager, model, rare):
    drift = DriftMonitor(manager)
    watch(manager, model, drift, range(2))
    frozen, traits = drift.freeze(), []
    with torch.no_grad():
        for seed in range(2):
            ids = prompts(seed)
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[:, :-1]  # the last is not run
            for row in whole.tolist():
                hidden = states(model, rare, row)
                norms = np.stack([value.norm(dim=-1).numpy() for value in hidden.values()], axis=1)
                traits.append(RequestTraits.of(manager.score_all(hidden).numpy(), norms, rare.alert_threshold.numpy()))
    expected = RequestCounts.of(traits)
    assert frozen.counts.n == 100 and frozen.ids == tuple(concept["id"] for concept in rare.concepts)
    assert (frozen.counts.fired == expected.fired).all() and 0 < expected.fired.min() < expected.fired.max() < 100
    roots = [rare.find(frozen.ids[place]) for place in frozen.scored]
    assert roots == np.flatnonzero(manager.plan.always).tolist()
    for name in ("low", "high", "flat", "highest"):
        assert (getattr(frozen.counts, name) == getattr(expected, name)[roots]).all(), name
    assert (frozen.counts.norms == expected.norms).all()


def test_leading_special_tokens_are_not_counted(manager, rare):
    """As in the documents of a reference that calibrate makes. One that comes later is counted."""
    model, drift, rows, traits = make_model(), DriftMonitor(manager), [], []
    model.config.bos_token_id = 3
    with torch.no_grad(), manager.attach(model, followers=[drift]):
        for seed, n_before in enumerate((0, 1, 2, 1)):
            ids = prompts(seed)
            ids[:, :n_before], ids[:, 4] = 3, 3
            mask = torch.ones_like(ids)
            mask[:7, 0] = 0  # padding, of which what stands there says nothing
            whole = model.generate(ids, attention_mask=mask, **GREEDY)[:, :-1]
            rows += [row[int((real == 0).sum()) :] for row, real in zip(whole.tolist(), mask, strict=True)]
        model(torch.full((1, 2), 3))  # of special tokens alone: no request
    for row in rows:
        begin = next(i for i, token in enumerate(row) if token != 3)
        hidden = {site: value[begin:] for site, value in states(model, rare, row).items()}
        norms = np.stack([value.norm(dim=-1).numpy() for value in hidden.values()], axis=1)
        traits.append(RequestTraits.of(manager.score_all(hidden).numpy(), norms, rare.alert_threshold.numpy()))
    frozen, expected = drift.freeze(), RequestCounts.of(traits)
    roots = [rare.find(frozen.ids[place]) for place in frozen.scored]
    assert frozen.counts.n == 200 and (frozen.counts.fired == expected.fired).all()
    for name in ("low", "high", "flat", "highest"):
        assert (getattr(frozen.counts, name) == getattr(expected, name)[roots]).all(), name
    assert (frozen.counts.norms == expected.norms).all()


def test_requests_continuing_a_cache_are_not_counted(manager, model, reference):
    """Nobody saw its beginning, or it was counted with another request; a reference has whole ones."""
    drift, cache, ids = DriftMonitor(manager, reference), DynamicCache(config=model.config), prompts(0, n=1)
    with torch.no_grad():
        model(ids[:, :3], past_key_values=cache)
    batching = ContinuousBatchingConfig(max_batch_tokens=16, page_size=4, num_blocks=64)
    with manager.attach(model, followers=[drift]) as run:
        out = model.generate(ids, past_key_values=cache, **GREEDY)
        model.generate(torch.cat([out, ids], 1), past_key_values=cache, **GREEDY)
        assert (drift.n_requests, drift.n_incomplete) == (0, 1)  # of the second it is not known yet that it has ended
        model.generate(ids, **GREEDY)
        out = model.generate_batch(
            [[*range(3, 19), 30 + i] for i in range(4)],
            generation_config=GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=PAD),
            continuous_batching_config=batching,
            progress_bar=False,
        )
    result = run.result(out)
    rows = {int(row) for row, why in zip(result.row, result.coverage.unseen, strict=True) if "shared" in why}
    assert rows and (drift.n_requests, drift.n_incomplete) == (1 + 4 - len(rows), 2 + len(rows))


def test_cancelled_requests_are_not_counted(manager, model, reference):
    drift, ids = DriftMonitor(manager, reference), prompts(0, n=1)
    for cancelled, counts in ((True, (0, 1)), (False, (1, 1))):
        with manager.attach(model, followers=[drift]) as run:
            run.follow(lambda placed, scores, run=run, cancelled=cancelled: run.stop_mine(cancelled=cancelled))
            model.generate(ids, **GREEDY)
        assert (drift.n_requests, drift.n_incomplete) == counts
    tokens = manager.stream(
        model, make_tokenizer(), "some words", followers=[drift], **{**GREEDY, "max_new_tokens": 20}
    )
    next(tokens)
    tokens.close()  # its reader leaves
    assert (drift.n_requests, drift.n_incomplete) == (1, 2)


def test_request_counts_once_when_several_runs_are_open(manager, model, reference):
    drift, ids = DriftMonitor(manager, reference), prompts(0, n=1)
    with manager.attach(model, followers=[drift]), pytest.raises(ConfigError, match=r"same ones.*one_thread=True"):
        manager.attach(model, followers=[drift], one_thread=True).__enter__()
    with (
        manager.attach(model, followers=[drift]),
        manager.attach(model),
        manager.attach(make_model(), followers=[drift]),
    ):
        model.generate(ids, **GREEDY)

    def of_thread():
        with manager.attach(model, followers=[drift], one_thread=True):
            meet.wait()
            model.generate(ids, **GREEDY)
            meet.wait()

    meet = threading.Barrier(2, timeout=60)
    threads = [threading.Thread(target=of_thread) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drift.report()["n_requests"] == 3


def test_unchanged_traffic_raises_no_alarm_and_tokens_stay_the_same(manager, model, reference):
    drift = DriftMonitor(manager, reference)
    health = watch(manager, model, drift, range(100, 130))
    assert drift.alarms == () and drift.n_alarms == 0 and drift.report()["n_requests"] == 1500
    assert health.checks[-1].what == "1,500 requests are like the 1,000 of the reference" and not health.wrong
    ids = prompts(7)
    with manager.attach(model, followers=[DriftMonitor(manager)]):
        watched = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert torch.equal(watched, model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY))


def test_changed_traffic_raises_base_rate_alarms(manager, model, reference, caplog):
    """Requests of few tokens: some concepts fire more often, others less."""
    drift, heard = DriftMonitor(manager, reference), []
    drift.on_alarm(heard.append)
    drift.on_alarm(lambda alarm: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="probemon"):
        health = watch(manager, model, drift, range(100, 112), lambda seed: prompts(seed, first=4, last=12))
    rates = [alarm for alarm in drift.alarms if alarm.kind == "base_rate"]
    assert rates and {alarm.observed > alarm.reference for alarm in rates} == {True, False}
    frozen, counted = DriftReference.read(reference), DriftMonitor(manager)
    for alarm in rates:
        assert alarm.reference == frozen.counts.fired[frozen.ids.index(alarm.concept)] / 1000 and alarm.p < 1e-6
        assert f"({alarm.concept}) fires in" in str(alarm) and counted.n_requests == 0
    assert len(heard) == drift.n_alarms >= len(rates) and heard[0].sentence in caplog.text
    assert "on_alarm failed: ZeroDivisionError" in caplog.text
    assert health.checks[-1].state == "warning" and health.ok and health.checks[-1].what.startswith("base_rate: ")


def test_scaled_hidden_states_raise_a_norms_alarm(manager, model, reference):
    """By a hook, so that no weight of the host is another, and the fingerprint says nothing."""
    drift = DriftMonitor(manager, reference)
    handle = model.model.layers[1].register_forward_hook(
        lambda module, args, output: (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5
    )
    try:
        watch(manager, model, drift, range(100, 106))
    finally:
        handle.remove()
    [norms] = [alarm for alarm in drift.alarms if alarm.kind == "norms"]
    assert norms.concept == "resid_post.1" and norms.observed / norms.reference == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("constant", lambda w, root: w["w3"][root].zero_()),
        ("saturated", lambda w, root: w["b3"][root].fill_(30.0)),
        ("scores", lambda w, root: w["b3"][root].add_(1.5)),
    ],
)
def test_changed_probe_raises_an_alarm_for_its_concept(rare, model, reference, tmp_path, kind, change):
    other = changed_pack(rare, tmp_path / "other", lambda weights: change(weights, 0))
    manager = DynamicProbeManager(other)
    with pytest.raises(ConfigError, match="the reference is of other probes"):
        DriftMonitor(manager, reference)
    drift = DriftMonitor(manager, unpinned(reference, tmp_path / "unpinned.json"))
    watch(manager, model, drift, range(100, 106))
    found = [alarm for alarm in drift.alarms if alarm.kind == kind]
    assert [alarm.concept for alarm in found] == [rare.concepts[0]["id"]] and found[0].n <= 1000
    assert {alarm.concept for alarm in drift.alarms if alarm.kind in ("constant", "saturated")} <= {found[0].concept}


def test_other_weights_raise_a_host_alarm_and_are_not_compared(manager, reference):
    drift, host = DriftMonitor(manager, reference), make_model()
    watch(manager, host, drift, range(3))
    assert drift.alarms == () and drift.n_requests == 150
    with torch.no_grad():
        host.model.layers[0].mlp.down_proj.weight.mul_(3)
    with pytest.warns(UserWarning, match="this model's weights are others"):
        health = watch(manager, host, drift, range(100, 110))
    [alarm] = drift.alarms
    assert (alarm.kind, alarm.concept) == ("host", "") and "its weights were bf16-sums:" in alarm.sentence
    assert drift.report()["n_of_other_models"] == 500 and drift.report()["n_requests"] == 150
    assert drift.counts() == {**dict.fromkeys(ALARM_KINDS, 0), "host": 1} and "host: " in health.checks[-1].what
    watch(manager, make_model(), drift, range(1))
    assert drift.alarms == () and drift.report()["n_requests"] == 200


def plain_tokenizer():
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def tokens_added(host, tokenizer):
    tokenizer.add_tokens(["zzzz", "yyyy"])
    return host, tokenizer


def other_rules(host, tokenizer):
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return host, tokenizer


def other_settings(host, tokenizer):
    host.config.rms_norm_eps = 0.1
    for layer in host.model.layers:
        layer.input_layernorm.variance_epsilon = layer.post_attention_layernorm.variance_epsilon = 0.1
    return host, tokenizer


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda host, _: tokens_added(host, plain_tokenizer()), "the tokenizer was"),
        (tokens_added, "the tokenizer was"),
        (other_rules, "the tokenizer was"),
        (other_settings, "its settings were"),
    ],
)
def test_model_that_changes_after_it_was_seen_raises_a_host_alarm(manager, tmp_path, change, words, seen):
    """Its weights are the same; what changes is looked at in every run, also where the first had no tokenizer."""
    host, tokenizer, counting = make_model(), plain_tokenizer(), DriftMonitor(manager)
    watch(manager, host, counting, range(3), tokenizer=tokenizer)
    counting.freeze(tmp_path / "reference.json")
    drift = DriftMonitor(manager, tmp_path / "reference.json")
    watch(manager, host, drift, [3], tokenizer=tokenizer if seen else None)
    assert drift.alarms == ()
    host, tokenizer = change(host, tokenizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was made with other settings of the model")
        watch(manager, host, drift, [4], tokenizer=tokenizer)
    [alarm] = drift.alarms
    assert alarm.kind == "host" and words in alarm.sentence


def few_words(seed):
    return prompts(seed, first=4, last=12)


def test_changed_traffic_is_found_when_only_some_runs_have_a_tokenizer(manager, model, reference):
    """The reference says nothing of a tokenizer, so that its host is the same with one and without."""
    drift = DriftMonitor(manager, reference)
    for seed in range(100, 120):
        health = watch(manager, model, drift, [seed], few_words, tokenizer=demo_tokenizer() if seed % 2 else None)
    assert "base_rate" in kinds(drift) and drift.n_requests == 1000 and health.checks[-1].state == "warning"


@pytest.mark.filterwarnings("ignore:.*this model's weights are others")
@pytest.mark.parametrize("asked", [prompts, few_words])
def test_alternating_models_are_counted_separately(manager, model, reference, asked):
    drift, other = DriftMonitor(manager, reference), make_model()
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(3)
    for seed in range(100, 120):
        watch(manager, other if seed % 2 else model, drift, [seed], asked)
    of_host = {alarm.kind for alarm in drift.alarms if alarm.concept == ""}
    health = watch(manager, model, drift, [120], asked)
    [check] = [check for check in health.checks if check.name == "drift"]
    left_out = "500 of 1,050 requests were not compared: of other models"
    assert of_host == {"host"} and drift.counts()["host"] == 0 and drift.report()["n_of_other_models"] == 500
    assert check.state == "warning" and left_out in check.what
    assert ("base_rate" in kinds(drift)) == (asked is few_words)
    alone = DriftMonitor(manager, reference)
    watch(manager, model, alone, [*range(100, 120, 2), 120], asked)
    assert drift.alarms == alone.alarms  # as if the other host had not been there
    with pytest.raises(CalibrationError, match="50 whole requests were counted of this model"):
        drift.freeze()


def test_few_requests_of_another_model_are_reported_as_not_compared(manager, model, reference):
    drift, other = DriftMonitor(manager, reference), make_model()
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(3)
    with pytest.warns(UserWarning, match="this model's weights are others"):
        watch(manager, other, drift, [0], lambda seed: prompts(seed, 3))
    watch(manager, model, drift, [1], lambda seed: prompts(seed, 120))
    check = drift.check()
    assert check.state == "ok" and check.what == (
        "100 requests are like the 1,000 of the reference; 3 of 123 requests were not compared: of other models"
    )


def test_requests_with_unseen_tokens_or_dropped_probes_are_not_compared(rare, model, reference):
    host, drift = make_model(), DriftMonitor(DynamicProbeManager(rare), reference)
    with drift_run(rare, host, drift), Blinded(host, [1]):
        host.generate(prompts(0), attention_mask=torch.ones(ROWS, 6, dtype=torch.int64), **GREEDY)
    assert drift.report()["n_incomplete"] == ROWS and drift.report()["n_requests"] == 0
    assert drift.check().state == "warning" and "50 of 50 requests cannot be compared" in drift.check().what
    few = DynamicProbeManager(rare, max_loaded_probes=6)
    drift = DriftMonitor(few, reference)
    watch(few, host, drift, range(1))
    assert (
        drift.report()["n_incomplete"] > ROWS // 2
        and sum(drift.report()[n] for n in ("n_incomplete", "n_requests")) == 50
    )


def drift_run(pack, host, drift):
    return DynamicProbeManager(pack).attach(host, followers=[drift], on_gap="report")


def test_requests_watched_for_other_concepts_are_not_compared(manager, model):
    drift, ids = DriftMonitor(manager), prompts(0)
    with manager.attach(model, followers=[drift]) as run:
        run.update(exclude=["c20"])
        model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        run.update(exclude=[])
        model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert not run.failures and drift.n_incomplete == drift.n_requests == ROWS


def test_runs_of_another_manager_are_refused_or_not_counted(manager, model, rare, tmp_path):
    drift = DriftMonitor(manager)
    others = {
        "other": changed_pack(rare, tmp_path / "other", lambda weights: weights["b1"].add_(1)),
        "lower": make_pack(tmp_path / "lower", model, alert_threshold=torch.full((rare.n_probes,), 0.01)),
    }
    for other in others.values():
        with pytest.raises(ConfigError, match=r"those of this run .* are others"):
            drift_run(other, model, drift)
    less, ids = DynamicProbeManager(rare, load_threshold=0.95), prompts(0)
    with less.attach(model, followers=[drift]) as run:
        model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert not run.failures and (drift.n_incomplete, drift.n_requests) == (ROWS, 0)
    with DynamicProbeManager(rare).attach(model, followers=[drift]):
        model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert drift.n_requests == ROWS


def test_beams_are_not_counted_and_failed_generations_are(manager, model):
    drift = DriftMonitor(manager)
    ids = prompts(0, 4)
    with manager.attach(model, followers=[drift]) as run:
        model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=2, **GREEDY)
        with pytest.raises(ZeroDivisionError):
            model.generate(
                ids, attention_mask=torch.ones_like(ids), logits_processor=[lambda ids, scores: 1 / 0], **GREEDY
            )
        model(ids)
    assert not run.failures and drift.n_requests == 8 and drift.n_incomplete >= 4


def test_only_always_evaluated_concepts_are_compared_when_descent_may_miss_events(rare, reference):
    partial = DriftMonitor(DynamicProbeManager(rare, load_threshold=0.9), reference)
    rounds = DriftMonitor(DynamicProbeManager(rare, max_rounds=1), reference)
    whole = DriftMonitor(DynamicProbeManager(rare), reference)
    n_always = int(DynamicProbeManager(rare).plan.always.sum())
    assert [one.report()["n_concepts"] for one in (partial, rounds, whole)] == [n_always, n_always, 40]


def test_drift_report_says_how_many_concepts_it_covers(rare, model, reference):
    manager = DynamicProbeManager(rare, load_threshold=0.9)
    some, alike = DriftMonitor(manager, reference), "100 requests are like the 1,000 of the reference in"
    n_always = int(manager.plan.always.sum())
    check = watch(manager, model, some, range(100, 102)).checks[-1]
    assert check.what == f"{alike} {n_always} of 40 concepts, and nothing is known of the others" and check.state == OK
    frozen = DriftReference.read(reference)
    others = replace(frozen, ids=tuple(f"other {name}" for name in frozen.ids))
    check = watch(manager, model, DriftMonitor(manager, others), range(100, 102)).checks[-1]
    assert check.what.startswith(f"{alike} 0 of 40 concepts") and check.state == WARNING


def test_freeze_needs_enough_requests_and_health_reports_a_missing_reference(manager, model, tmp_path):
    drift = DriftMonitor(manager)
    health = watch(manager, model, drift, range(1))
    assert "there is no reference to compare them with" in health.checks[-1].what and health.ok
    with pytest.raises(CalibrationError, match="50 whole requests were counted of this model, a reference needs 100"):
        drift.freeze(tmp_path / "reference.json")
    assert not list(tmp_path.iterdir())


def test_reference_with_other_thresholds_is_refused_by_concept(rare, reference, tmp_path):
    frozen = DriftReference.read(reference)
    assert frozen.alert.tolist() == rare.alert_threshold.tolist()
    edited = ProbePack.open(rare.directory)
    now, later = float(edited.alert_threshold[3]), float(np.float32(0.05))
    DriftMonitor(DynamicProbeManager(edited), reference)
    edited.alert_threshold[3:] = later
    with pytest.raises(ConfigError, match=rf"of {rare.concepts[3]['id']} is {now:g}, and {later:g} is in force"):
        DriftMonitor(DynamicProbeManager(edited), reference)
    edited.alert_threshold[:] = rare.alert_threshold
    edited.alert_threshold[5] = np.nan
    with pytest.raises(ConfigError, match=rf"of {rare.concepts[5]['id']} is .*, and nan is in force"):
        DriftMonitor(DynamicProbeManager(edited), reference)
    content = json.loads(reference.read_text())
    for counted in content["concepts"].values():
        del counted["alert"]
    (tmp_path / "silent.json").write_text(json.dumps(content))  # of an earlier version: it does not say
    assert DriftReference.read(tmp_path / "silent.json").alert is None
    DriftMonitor(DynamicProbeManager(edited), tmp_path / "silent.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["concepts"]["c3"].pop("alert"), "of every concept or of none"),
        (lambda c: c["concepts"]["c3"].update(alert="0.5"), "alert thresholds are numbers, or null"),
        (lambda c: c.update(format="other"), "is not a drift reference"),
        (lambda c: c.update(format_version=2), "this probemon reads 1: freeze again"),
        (lambda c: c.update(n_requests=0), "it has no requests"),
        (lambda c: c.update(n_requests=True), "is not a count"),
        (lambda c: c["concepts"]["c5"].update(fired=1001), "1001 is not a count from 0 to 1000"),
        (lambda c: c["concepts"]["c0"].update(highest=[1000]), "highest scores are of 1000 requests in 1 bins"),
        (lambda c: c["norms"]["resid_post.1"].update({"480": 1}), "480 is not a count"),
        (lambda c: c["host"].update(dtype=3), "have to be texts"),
        (lambda c: c.pop("concepts"), "KeyError"),
    ],
)
def test_damaged_reference_is_refused(reference, tmp_path, change, words):
    content = json.loads(reference.read_text())
    change(content)
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        DriftReference.read(tmp_path / "bad.json")


def test_written_reference_reads_back_unchanged(manager, model, reference, tmp_path):
    once = DriftReference.read(reference)
    once.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == reference.read_bytes()
    assert once.host["dtype"] == "float32" and list(once.packs) == ["random"]
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        DriftReference.read(tmp_path / "none.json")
