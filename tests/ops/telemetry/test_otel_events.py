"""OpenTelemetry events carry what a run measured, in the caller's span, and no text that anybody wrote."""

import hashlib
import json
import logging
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager, suppress

import pytest
import torch
from opentelemetry._logs import SeverityNumber
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from transformers import DynamicCache, GenerationConfig

from blinded import Blinded
from conftest import OLDEST, PAD, make_model, make_pack
from corpora import make_tokenizer
from local_servers import answering, nobody, silent
from probemon import DynamicProbeManager
from probemon.errors import ConceptRaised, ConfigError, MissingExtra
from probemon.ops.judges.escalation import Escalate
from probemon.ops.telemetry.otel_events import LABELS, UNSEEN_ERRORS, OpenTelemetryEvents
from probemon.ops.telemetry.otlp_logs import check_endpoint

GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
PROMPTS = torch.tensor([[PAD, PAD, 5, 6, 7], [8, 9, 10, 11, 12]])
MASK = (PROMPTS != PAD).long()
NAME, LABEL, VALUE = (f"gen_ai.evaluation.{name}" for name in ("name", "score.label", "score.value"))
OF_EVENTS = {
    NAME, LABEL, VALUE, "gen_ai.evaluation.explanation", "probemon.concept", "probemon.threshold", "probemon.score",
    "probemon.aggregator", "probemon.for_tokens", "probemon.action", "probemon.token.row", "probemon.token.column",
    "probemon.pack", "probemon.generation",
}  # fmt: skip


@pytest.fixture
def memory():
    exporter, provider = InMemoryLogRecordExporter(), LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    return provider, lambda: [one.log_record for one in exporter.get_finished_logs()]


@pytest.fixture
def tracer():
    return TracerProvider(shutdown_on_exit=False).get_tracer("an application")


def ids_of(record):
    return record.trace_id, record.span_id


def test_otel_events_match_the_run_and_belong_to_the_callers_span(model, pack, memory, tracer):
    provider, records = memory
    manager = DynamicProbeManager(pack)
    with manager.attach(model) as run:
        run.on(["c1", "c9"], above=0.0, aggregate="ema:0.3", action="record")
        run.on("c3", above=0.0, for_tokens=3, action="stop")
        run.follow(OpenTelemetryEvents(provider=provider))
        with tracer.start_as_current_span("chat") as span:
            out = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
        model.generate(PROMPTS[1:], **GREEDY)  # outside of any span
    context, told = span.get_span_context(), records()
    assert {one.event_name for one in told} == {"gen_ai.evaluation.result"}
    of_first = [one for one in told if one.attributes["probemon.generation"] == 0]
    assert {ids_of(one) for one in of_first} == {(context.trace_id, context.span_id)}
    assert {ids_of(one) for one in told if one not in of_first} == {(0, 0)}
    *events, end = (dict(one.attributes) for one in of_first)
    met = [event for event in run.events if event.generation == 0]
    assert len(events) == len(met) == 6 and all(set(one) == OF_EVENTS for one in events)
    for one, event in zip(events, met, strict=True):
        assert (one[NAME], one["probemon.concept"], one[LABEL]) == (f"probemon.{event.concept}", event.concept, "fired")
        assert (one[VALUE], one["probemon.score"], one["probemon.threshold"]) == (event.value, event.score, event.above)
        assert (one["probemon.token.row"], one["probemon.token.column"]) == (event.row, event.column)
        assert one["probemon.action"] == ("stop" if event.concept == "c3" else "record")
        assert one["gen_ai.evaluation.explanation"].startswith(" > ".join(event.path))
    totals = run.result(out).coverage.totals()
    for name in ("active", "dropped", "not_reached", "evaluated"):
        assert end[f"probemon.coverage.{name}"] == totals[name]
    assert end["probemon.coverage.probes"] == 40 * int(run.result(out).coverage.seen.sum())
    assert (end["probemon.tokens.prompt"], end["probemon.tokens.generated"]) == (8, 2 * (out.shape[1] - 6))
    assert end["probemon.tokens.unseen"] == 0 and "error.type" not in end and end["probemon.rows"] == 2
    assert (end[NAME], end[LABEL]) == ("probemon.generation", "fired") and end["probemon.fired"] == ("c1", "c3", "c9")


def test_no_prompt_text_or_token_id_is_sent(model, pack, memory):
    """Neither text nor ids of tokens: of ids that no number of an event is, none is in any value."""
    provider, records = memory
    prompt = torch.tensor([[41, 43, 47, 53, 59]])
    with DynamicProbeManager(pack).attach(model, make_tokenizer()) as run:
        run.on("c*", above=0.0, action="record")
        run.follow(OpenTelemetryEvents(provider=provider))
        out = model.generate(prompt, **GREEDY)
    told = records()
    written = {int(token) for token in out[0] if int(token) > 13}
    assert len(told) == 41 and {event.token_id for event in run.events} & written
    for one in told[:-1]:
        assert one.body == one.attributes["gen_ai.evaluation.explanation"]
        assert not written & {value for value in one.attributes.values() if isinstance(value, int)}
        assert set(one.attributes) == OF_EVENTS
    assert told[-1].attributes["probemon.fired"] == tuple(sorted(f"c{i}" for i in range(40)))


def test_generation_event_says_not_fired_only_if_rules_exist(model, pack, memory):
    provider, records = memory
    manager = DynamicProbeManager(pack)
    for rules in (1, 0):
        with manager.attach(model) as run:
            run.follow(OpenTelemetryEvents(provider=provider))
            if rules:
                run.on("c1", above=0.9999999)
            model.generate(PROMPTS[1:], **GREEDY)
    with_rule, without = (dict(one.attributes) for one in records())
    assert with_rule[LABEL] == "not_fired" and with_rule["probemon.rules"] == 1 and with_rule["probemon.fired"] == ()
    assert LABEL not in without and without["probemon.rules"] == 0


@pytest.mark.filterwarnings("ignore:.* generated tokens have no scores")
def test_unseen_tokens_are_not_reported_as_not_fired(model, pack, memory):
    provider, records = memory
    with DynamicProbeManager(pack).attach(model, on_gap="report") as run:
        run.on("c1", above=0.9999999, on_blind="record")
        run.follow(OpenTelemetryEvents(provider=provider))
        with Blinded(model, lost={2, 4}):
            out = model.generate(PROMPTS[1:], **GREEDY)
    *events, end = (dict(one.attributes) for one in records())
    assert [one["probemon.token.column"] for one in events] == [6, 8] == [event.column for event in run.events]
    for one in (*events, end):
        assert one[LABEL] == "unseen" in LABELS and one["error.type"] == "alignment_gap" in UNSEEN_ERRORS
        assert VALUE not in one
    assert end["probemon.tokens.unseen"] == run.result(out).coverage.n_unseen - 1 == 2  # but for the last, never run


@pytest.mark.filterwarnings("ignore:.* generated tokens have no scores")
@pytest.mark.parametrize("on_blind", ["record", "pass"])
def test_forgotten_unseen_tokens_are_still_reported_as_unseen(model, pack, memory, on_blind):
    provider, records = memory
    with DynamicProbeManager(pack).attach(model, on_gap="report", keep_tokens=2) as run:
        run.on("c1", above=0.9999999, on_blind=on_blind)
        run.follow(OpenTelemetryEvents(provider=provider))
        with Blinded(model, lost={1, 2}):
            model.generate(PROMPTS[1:], **GREEDY)
    *events, end = (dict(one.attributes) for one in records())
    assert len(events) == (2 if on_blind == "record" else 0)
    assert end["probemon.tokens.forgotten"] == 8 and end["probemon.tokens.generated"] == 2
    assert (end[LABEL], end["error.type"], end["probemon.tokens.unseen"]) == ("unseen", "alignment_gap", 2)
    assert end["gen_ai.evaluation.explanation"].startswith("0 concepts of 1 rules; 2 of 10 tokens unseen;")


def test_tokens_of_a_prefilled_cache_are_reported_as_unseen(model, pack, memory):
    provider, records = memory
    cache, prompt = DynamicCache(config=model.config), PROMPTS[1:]
    with torch.no_grad():
        model(prompt[:, :3], past_key_values=cache)
    with DynamicProbeManager(pack).attach(model) as run:
        run.on("c1", above=0.9999999)
        run.follow(OpenTelemetryEvents(provider=provider))
        out = model.generate(prompt, past_key_values=cache, **GREEDY)
        again = model.generate(torch.cat([out, prompt], 1), past_key_values=cache, **GREEDY)  # on what it has seen
    first, second = (dict(one.attributes) for one in records())
    unseen = [sum("cache" in why for why in run.result(one).coverage.unseen) for one in (out, again)]
    assert unseen[0] == 3 and first["probemon.tokens.unseen"] == 3 and first["probemon.tokens.prompt"] == 5
    assert (first[LABEL], first["error.type"]) == ("unseen", "not_scored")
    assert second["probemon.tokens.unseen"] == unseen[1] == 3


def test_generation_without_evaluated_tokens_is_unseen_not_silent(model, pack, memory):
    provider, records = memory
    with DynamicProbeManager(pack).attach(model, keep_tokens=1) as run:
        run.on("c1", above=0.9999999)
        run.follow(OpenTelemetryEvents(provider=provider))
        for n in (1, 2):
            model.generate(PROMPTS[1:], **{**GREEDY, "max_new_tokens": n})
    one, two = (dict(record.attributes) for record in records())
    assert (one[LABEL], one["error.type"], one["probemon.tokens.unseen"]) == ("unseen", "not_scored", 0)
    assert two[LABEL] == "not_fired" and "error.type" not in two and two["probemon.tokens.forgotten"] > 0


@pytest.mark.filterwarnings("ignore:.* generated tokens have no scores")
def test_nonfinite_hidden_state_has_its_own_error_type(model, pack, memory):
    provider, records = memory
    handle = model.model.layers[1].register_forward_hook(
        lambda module, args, output: torch.full_like(output, float("nan")) if output.shape[1] == 1 else output
    )
    with DynamicProbeManager(pack).attach(model) as run:
        run.on("c1", above=0.9999999)
        run.follow(OpenTelemetryEvents(provider=provider))
        model.generate(PROMPTS[1:], **GREEDY)
    handle.remove()
    [end] = records()
    assert (end.attributes["error.type"], end.attributes["probemon.tokens.unseen"]) == ("not_finite", 5)


def test_error_that_ends_a_generation_is_named(model, pack, memory, tracer):
    provider, records = memory
    with DynamicProbeManager(pack).attach(model) as run, pytest.raises(ConceptRaised):
        run.on("c1", above=0.0, action="raise")
        run.follow(OpenTelemetryEvents(provider=provider))
        with tracer.start_as_current_span("chat") as span:
            model.generate(PROMPTS[1:], **GREEDY)
    event, end = records()
    assert event.attributes["probemon.action"] == "raise" and "error.type" not in event.attributes
    assert (end.attributes["error.type"], end.attributes[LABEL]) == ("ConceptRaised", "fired")
    assert end.span_id == span.get_span_context().span_id


@pytest.mark.skipif(OLDEST, reason="continuous batching of transformers 5.0 is refused")
def test_batched_requests_are_found_by_their_response_id(model, pack, memory, tracer):
    provider, records = memory
    from transformers import ContinuousBatchingConfig

    with DynamicProbeManager(pack).attach(model) as run, tracer.start_as_current_span("not theirs"):
        run.on("c1", above=0.0, action="record")
        run.follow(OpenTelemetryEvents(provider=provider))
        outputs = model.generate_batch(
            [[8, 9, 10], [11, 12]],
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=3, pad_token_id=PAD, eos_token_id=60),
            continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=16, page_size=4, num_blocks=64),
            progress_bar=False,
        )
    told = records()
    assert {ids_of(one) for one in told} == {(0, 0)}
    assert Counter(one.attributes["gen_ai.response.id"] for one in told) == dict.fromkeys(outputs, 2)
    generations = {event.request: event.generation for event in run.events}
    for one in told:
        assert one.attributes["probemon.generation"] == generations[one.attributes["gen_ai.response.id"]]


@pytest.mark.filterwarnings("ignore:.* to judges had no answer that counts")
@pytest.mark.parametrize(
    ("judge", "within", "failure"),
    [
        (lambda question: ("pass", "what it thinks"), 20.0, None),
        (lambda question: 1 / 0, 20.0, "error"),
        (lambda question: time.sleep(1), 0.4, "late"),  # which is known when the run ends, outside of the span
    ],
    ids=["judged", "error", "late"],
)
def test_verdict_is_a_separate_event_without_the_judges_words(model, pack, memory, tracer, judge, within, failure):
    provider, records = memory
    with DynamicProbeManager(pack).attach(model) as run:
        run.on("c1", above=0.0, action=Escalate(judge, within, "pass" if failure == "late" else "hold", "stop"))
        run.follow(OpenTelemetryEvents(provider=provider))
        with tracer.start_as_current_span("chat") as span:
            model.generate(PROMPTS[1:], **GREEDY)
    met, verdict = (one for one in records() if one.attributes[NAME] == "probemon.c1")
    assert len(records()) == 3
    assert {one.span_id for one in records()} == {span.get_span_context().span_id}
    of_verdict = {name: value for name, value in verdict.attributes.items() if name.startswith("probemon.verdict")}
    assert dict(met.attributes) == {k: v for k, v in verdict.attributes.items() if k not in of_verdict}
    assert met.attributes["probemon.action"] == "escalate" and "what it thinks" not in str(verdict.attributes)
    known = run.events[0].verdict
    expected = {"probemon.verdict.ruling": known.ruling, "probemon.verdict.seconds": known.seconds}
    assert of_verdict == expected | ({"probemon.verdict.failure": failure} if failure else {})


@pytest.mark.filterwarnings("ignore:.* generated tokens have no scores")
@pytest.mark.parametrize(
    ("fields", "severities"),
    [
        ({"action": "record"}, ["INFO", "INFO"]),
        ({"action": print}, ["INFO", "INFO"]),
        ({"action": "stop"}, ["WARN", "INFO"]),
        ({"action": "raise"}, ["ERROR", "ERROR"]),
        ({"above": 0.9999999, "on_blind": "record"}, ["WARN", "WARN"]),
        ({"action": Escalate(lambda question: "pass", 20, "hold", "stop")}, ["INFO", "INFO", "INFO"]),
        ({"action": Escalate(lambda question: "stop", 20, "hold", "stop")}, ["INFO", "WARN", "INFO"]),
        ({"action": Escalate(lambda question: "?", 20, "hold", "pass")}, ["INFO", "WARN", "INFO"]),
    ],
    ids=["record", "call", "stop", "raise", "blind", "judged: pass", "judged: stop", "judge failed"],
)
def test_severity_is_that_of_what_follows(model, pack, memory, fields, severities):
    provider, records = memory
    with warnings.catch_warnings(), suppress(ConceptRaised):
        warnings.filterwarnings("ignore", ".* to judges had no answer")
        with DynamicProbeManager(pack).attach(model, make_tokenizer(), on_gap="report") as run:
            run.on("c1", **{"above": 0.0, **fields})
            run.follow(OpenTelemetryEvents(provider=provider))
            with Blinded(model, lost={2} if "on_blind" in fields else ()):
                model.generate(PROMPTS[1:], **GREEDY)
    assert [one.severity_text for one in records()] == severities
    assert [one.severity_number.name for one in records()] == severities
    assert SeverityNumber.INFO.value < SeverityNumber.WARN.value < SeverityNumber.ERROR.value


def test_model_is_named_without_its_folder_and_a_cancelled_generation_is_marked(pack, memory, tmp_path):
    provider, records = memory
    model, name = make_model(), "organisation/model"
    for path in (name, str(tmp_path / "model"), ""):
        model.config.name_or_path = path
        with DynamicProbeManager(pack).attach(model) as run:
            run.follow(OpenTelemetryEvents(provider=provider))
            if not path:
                run.follow(lambda placed, scores, run=run: run.stop_mine(cancelled=True))
            model.generate(PROMPTS[1:], **GREEDY)
    told = [(one.attributes.get("gen_ai.request.model"), one.attributes.get("probemon.cancelled")) for one in records()]
    assert told == [(name, None), ("model", None), (None, True)]


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "probemon"),
        ({"OTEL_SERVICE_NAME": "chats"}, "chats"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=other,service.version=2"}, "other"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}, "probemon"),
    ],
)
def test_service_is_called_probemon_unless_the_environment_says_otherwise(monkeypatch, environment, name):
    resources = []

    def take(path, headers, body):
        resources.extend(one.resource for one in ExportLogsServiceRequest.FromString(body).resource_logs)
        return 200, "application/x-protobuf", b""

    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with answering(take) as address, OpenTelemetryEvents(endpoint=address) as events:
        events.emit({}, in_span=True)
        events.close()
        events.open()
    [resource] = resources
    found = {one.key: one.value.string_value for one in resource.attributes}
    assert found["service.name"] == name and found["telemetry.sdk.language"] == "python"
    assert ("deployment.environment.name" in found) == ("environment.name" in str(environment))


def test_emit_without_span_ignores_the_current_span(memory, tracer):
    provider, records = memory
    with OpenTelemetryEvents(provider=provider) as events, tracer.start_as_current_span("another") as span:
        events.emit({}, in_span=True)
        events.emit({}, in_span=False)
    events.emit({}, in_span=True)  # it is closed
    assert [one.span_id for one in records()] == [span.get_span_context().span_id, 0]


def test_stream_events_belong_to_the_span_of_the_caller(model, pack, memory, tracer):
    provider, records = memory

    def prepare(run):
        run.on("c1", above=0.0, action="record")
        run.follow(OpenTelemetryEvents(provider=provider))

    with tracer.start_as_current_span("chat") as span:
        events = DynamicProbeManager(pack).stream(model, make_tokenizer(), "some words", prepare=prepare, **GREEDY)
    assert len(list(events)) == 6 and len(records()) == 2
    assert {one.span_id for one in records()} == {span.get_span_context().span_id}


# -- a collector ---------------------------------------------------------------------------------


@contextmanager
def collector():
    """Yield the address of a collector and the list of records that it was sent, with their scope."""
    received = []

    def take(path, headers, body):
        assert (path, headers["Content-Type"]) == ("/v1/logs", "application/x-protobuf")
        for of_resource in ExportLogsServiceRequest.FromString(body).resource_logs:
            for of_scope in of_resource.scope_logs:
                received.extend((of_scope.scope.name, record) for record in of_scope.log_records)
        return 200, "application/x-protobuf", b""

    with answering(take) as address:
        yield address, received


def value_of(record, name):
    [value] = [one.value for one in record.attributes if one.key == name]
    return getattr(value, value.WhichOneof("value"))


def threads_of_the_sdk():
    return [thread for thread in threading.enumerate() if "Otel" in thread.name or "OpenTelemetry" in thread.name]


def test_collector_receives_every_event_by_the_end_of_the_run(model, pack, tracer):
    with collector() as (address, received):
        with DynamicProbeManager(pack).attach(model) as run:
            run.on(["c1", "c9"], above=0.0, action="record")
            run.follow(OpenTelemetryEvents(endpoint=address))
            with tracer.start_as_current_span("chat") as span:
                model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
        assert len(received) == 5 == len(run.events) + 1 and not threads_of_the_sdk()
    context = span.get_span_context()
    for (scope, record), event in zip(received, run.events, strict=False):
        assert (scope, record.event_name) == ("probemon", "gen_ai.evaluation.result")
        assert int.from_bytes(record.trace_id) == context.trace_id and int.from_bytes(record.span_id) == context.span_id
        assert value_of(record, NAME) == f"probemon.{event.concept}" and value_of(record, VALUE) == event.value


def test_one_exporter_serves_concurrent_runs_and_closes_with_the_last(model, pack):
    manager = DynamicProbeManager(pack)
    with collector() as (address, received):
        events = OpenTelemetryEvents(endpoint=address)
        for block in (None, events):
            if block is not None:
                block.__enter__()
            for _ in range(2):
                with manager.attach(model) as run, manager.attach(model) as other:
                    for one in (run, other):
                        one.on("c1", above=0.0, action="record")
                        one.follow(events)
                    model.generate(PROMPTS[1:], **GREEDY)
                assert bool(threads_of_the_sdk()) == (block is not None)
        events.__exit__(None, None, None)
        assert len(received) == 2 * 2 * 2 * 2 and not threads_of_the_sdk()


@pytest.mark.parametrize("away", [nobody, silent])
def test_unreachable_collector_changes_no_token_and_delays_the_end_by_at_most_2_s(model, pack, away, caplog):
    expected = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    with away() as address:
        events = OpenTelemetryEvents(endpoint=address)
        with DynamicProbeManager(pack).attach(model) as run:
            run.on("c*", above=0.0, action="record")
            run.follow(events)
            out = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
            for _ in range(3000):  # more than wait
                events.emit({}, in_span=True)
            begin = time.monotonic()
        took = time.monotonic() - begin
    assert torch.equal(out, expected) and len(run.events) == 80 and took < 2, took
    assert "has not taken 3081 of 3081 records" in caplog.text


def test_process_ends_even_if_the_collector_never_answers():
    """And although nobody closes what sends to it."""
    with silent() as address:
        script = f"""
import time
from probemon.ops.telemetry.otlp_logs import OtlpLogs
logs = OtlpLogs({address!r})
for _ in range(600):  # a batch is under way
    logs.emit(event_name="e", attributes={{}})
time.sleep(0.3)
print(time.time())
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        assert time.time() - float(done.stdout) < 2, done.stderr


def test_deployment_file_sends_events_of_every_run(model, tmp_path):
    make_pack(tmp_path / "pack", model)
    sha256 = hashlib.sha256((tmp_path / "pack/manifest.json").read_bytes()).hexdigest()
    rule = {"concepts": ["c1"], "above": 0.0, "action": "record", "on_blind": "pass"}
    content = {"deployment": 1, "packs": [{"pack": "pack", "manifest_sha256": sha256}], "rules": [rule]}
    with collector() as (address, received):
        (tmp_path / "watch.json").write_text(json.dumps({**content, "opentelemetry": {"endpoint": address}}))
        manager = DynamicProbeManager.from_deployment(tmp_path / "watch.json")
        for _ in range(2):
            with manager.attach(model):
                model.generate(PROMPTS[1:], **GREEDY)
    assert [value_of(record, NAME) for _, record in received] == 2 * ["probemon.c1", "probemon.generation"]
    assert {value_of(record, "probemon.deployment") for _, record in received} == {manager.deployment.sha256}


def test_endpoint_that_is_not_otlp_over_http_is_refused():
    assert check_endpoint("http://localhost:4318") == "http://localhost:4318/v1/logs"
    assert check_endpoint("https://here/prefix/v1/logs?a=b") == "https://here/prefix/v1/logs?a=b"
    for wrong in ("localhost:4317", "grpc://localhost:4317", "http://", 4318):
        with pytest.raises(ConfigError, match="as http://localhost:4318"):
            OpenTelemetryEvents(endpoint=wrong)
    with pytest.raises(ConfigError, match="give one of them"):
        OpenTelemetryEvents(endpoint="http://localhost:4318", provider=LoggerProvider(shutdown_on_exit=False))


def test_missing_log_provider_is_warned_about(model, pack, caplog):
    with caplog.at_level(logging.WARNING), DynamicProbeManager(pack).attach(model) as run:
        run.follow(OpenTelemetryEvents())
        model.generate(PROMPTS[1:], **GREEDY)
    assert "OpenTelemetry has no provider of logs" in caplog.text


@pytest.mark.parametrize(
    ("module", "settings"),
    [("opentelemetry.trace", {}), ("opentelemetry.sdk._logs.export", {"endpoint": "http://localhost:4318"})],
)
def test_missing_otel_packages_are_named(monkeypatch, module, settings):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"pip install 'probemon\[otel\]'"):
        OpenTelemetryEvents(**settings)
