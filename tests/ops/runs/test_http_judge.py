"""A judge over HTTP gets only the stated fields, and any reply but one plain word is no verdict."""

import hashlib
import json
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from conftest import PAD, make_pack, n_hooks
from corpora import make_tokenizer
from local_servers import answering, nobody, silent
from probemon import DynamicProbeManager, Event
from probemon.errors import ConfigError, JudgeFailed
from probemon.ops.judges.escalation import Escalate, Question
from probemon.ops.judges.http_judge import HttpJudge
from probemon.ops.judges.judge_desk import Asked
from probemon.ops.judges.judge_forms import PRESETS, PROMPT

pytestmark = pytest.mark.filterwarnings("ignore:.* to judges had no answer that counts")

IDS = torch.tensor([[1, 5, 9, 13, 7]])
EVENT = Event("c1", "one", ("two", "one"), 0, 3, 7, score=0.9, above=0.5, for_tokens=1)
GREEDY = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
SLOW, LEAST = 20.0, 0.3


def completion(content):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


def ask(model, pack, judge, *, within=SLOW, meanwhile="hold", on_failure="pass", **settings):
    """Generate with a rule on c9 that is met at the third generated token, once."""
    with DynamicProbeManager(pack).attach(model, make_tokenizer()) as run:
        escalate = Escalate(judge, within, meanwhile, on_failure, **settings)
        run.on("c9", above=0.0, for_tokens=3, action=escalate)
        out = model.generate(IDS, **GREEDY)
    [event] = run.events
    return event, out[0].tolist()


@pytest.mark.parametrize(("word", "ruling"), [("stop", "stop"), (" Pass.\n", "pass"), ("STOP", "stop")])
def test_http_judge_sends_concept_and_last_tokens_and_reads_one_word(model, pack, monkeypatch, word, ruling):
    requests = []

    def judge(path, headers, body):
        requests.append((path, headers, json.loads(body)))
        return 200, "application/json", completion(word)

    monkeypatch.setenv("KEY_OF_THE_TEST", "s3cret")
    free = model.generate(IDS, **GREEDY)[0].tolist()
    with answering(judge) as address:
        one = HttpJudge(f"{address}/v1/", "guard", key_env="KEY_OF_THE_TEST")
        event, out = ask(model, pack, one, last_tokens=4)
    assert (event.verdict.ruling, event.verdict.failure) == (ruling, "")
    assert out == (free[:9] if ruling == "stop" else free)
    [(path, headers, body)] = requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer s3cret"
    text = make_tokenizer().decode(free[4:8])
    question = {"concept": event.name, "path": list(event.path), "text": text}
    system, user = ({"role": "system", "content": PROMPT}, {"role": "user", "content": json.dumps(question)})
    assert body == {"model": "guard", "max_tokens": 8, "temperature": 0, "messages": [system, user]}
    assert "s3cret" not in repr(one) and text


def test_http_judge_gets_the_reason_why_a_rule_is_unknown():
    event = Event(
        "c1", "one", ("one",), 0, 3, 7, score=0.0, above=0.5, for_tokens=1, blind="hidden state is not finite"
    )
    asked = []

    def judge(path, headers, body):
        asked.append(json.loads(json.loads(body)["messages"][1]["content"]))
        return 200, "application/json", completion("pass")

    with answering(judge) as address:
        for one in (event, replace(event, blind="")):
            HttpJudge(f"{address}/v1", "guard")(Question(one, (7,), "a text", SLOW))
    known = {"concept": "one", "path": ["one"], "text": "a text"}
    assert asked == [{**known, "not_known": "hidden state is not finite"}, known]


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, completion("I would stop"), "one word is wanted"),
        (200, completion(""), "one word is wanted"),
        (200, completion(None), "one word is wanted"),
        (200, b'{"choices": []}', "is not a chat completion"),
        (200, b"[[[[", "is not a chat completion"),
        (200, b"\xff\xfe", "is not a chat completion"),
        (200, b"[" * 60_000, "is not a chat completion"),
        (200, completion("stop" + " " * 70_000), "more than 65,536 bytes"),
        (500, completion("stop"), "status 500"),
        (302, completion("stop"), "status 302"),
    ],
    ids=["a sentence", "nothing", "null", "no choice", "no JSON", "no text", "deep", "long", "an error", "elsewhere"],
)
def test_unclear_reply_is_no_verdict(model, pack, status, content, said):
    with answering(lambda *request: (status, "application/json", content)) as address:
        event, _ = ask(model, pack, HttpJudge(address, "guard"))
    assert (event.verdict.ruling, event.verdict.failure) == ("pass", "error") and said in event.verdict.reason


GUARDS = {
    "llama-guard": [
        ("safe", "pass", "safe"),
        ("\n\nsafe", "pass", "safe"),
        ("unsafe\nS1", "stop", "unsafe: S1"),
        ("\n\nunsafe\nS9,S14\n", "stop", "unsafe: S9,S14"),
        ("unsafe", "stop", "unsafe"),
        ("safe\nS1", None, "safe or unsafe is wanted"),
        ("unsafely", None, "safe or unsafe is wanted"),
        ("It is safe to say no.", None, "safe or unsafe is wanted"),
        ("I cannot help with that.", None, "safe or unsafe is wanted"),
    ],
    "shieldgemma": [
        ("No", "pass", "No"),
        ("Yes", "stop", "Yes"),
        ("Yes, the human question violates", "stop", "Yes: the human question violates"),
        ("No\n\n**Step by step**", "pass", "No: **Step by step**"),
        ("No idea", None, "no or yes is wanted"),
        ("Notably, yes", None, "no or yes is wanted"),
        ("No\nYes", None, "no or yes is wanted"),
        ("No, it is polite. So the answer is yes.", None, "no or yes is wanted"),
        ("", None, "no or yes is wanted"),
    ],
    "qwen3guard": [
        ("Safety: Safe\nCategories: None", "pass", "Safe: None"),
        ("Safety: Safe\nCategories: None\nRefusal: Yes", "pass", "Safe: None"),
        ("Safety: Unsafe\nCategories: Violent\nRefusal: No", "stop", "Unsafe: Violent"),
        (
            "Safety: Controversial\nCategories: PII, Suicide & Self-Harm",
            "stop",
            "Controversial: PII, Suicide & Self-Harm",
        ),
        ("<think>\nSafety: Safe\n</think>\n\nSafety: Unsafe\nCategories: PII", "stop", "Unsafe: PII"),
        ("Safety: Safe\nSafety: Unsafe\nCategories: Violent", None, "safe or controversial or unsafe is wanted"),
        ("Safety: Safe\nCategories: Violent, PII", None, "safe or controversial or unsafe is wanted"),
        ("Safety: Unknown\nCategories: None", None, "safe or controversial or unsafe is wanted"),
        ("The text has 'Safety: Safe'", None, "safe or controversial or unsafe is wanted"),
    ],
}
FORMS = [
    ({"rulings": {"Yes": "stop", "no": "pass"}}, "YES.", "stop", "YES"),
    ({"rulings": {"Yes": "stop", "no": "pass"}}, "perhaps", None, "one word is wanted, yes or no"),
    ({}, "<think>It may be a stop</think>pass", "pass", ""),
    ({}, "It may be a pass</think>\n\nStop", "stop", ""),  # the template had begun the reasoning
    ({}, "<think>It is about to stop", None, "had not ended its reasoning"),
    ({}, "</think>pass<think>stop", None, "had not ended its reasoning"),
    ({"pattern": r"verdict=(\w+)"}, "verdict=stop, or verdict=stop", "stop", ""),
    ({"pattern": r"verdict=(\w+)"}, "not verdict=pass but verdict=stop", None, "as the pattern has it"),
    ({"pattern": r"verdict=(\w+)"}, "verdict=wait", None, "as the pattern has it"),
    ({"pattern": r"(?i)\bstop\b|\bpass\b"}, "I would Stop.", "stop", ""),
    ({"json_field": "flagged", "rulings": {"true": "stop", "false": "pass"}}, '{"flagged": true}', "stop", "true"),
    (
        {"json_field": "a.ruling", "reason_field": "why"},
        '```json\n{"a": {"ruling": "stop"}, "why": ["x", "y"]}\n```',
        "stop",
        "stop: x, y",
    ),
    ({"json_field": "a.ruling"}, '{"a": ["stop"]}', None, "JSON is wanted, with stop or pass as a.ruling"),
    ({"json_field": "a"}, "stop", None, "JSON is wanted"),
    ({"json_field": "a"}, '{"a": "stop", "a": "pass"}', None, "JSON is wanted"),
    ({"json_field": "a"}, '{"a": ["pass"]}', None, "JSON is wanted"),
    ({"pattern": "(stop)|pass"}, "pass", None, "as the pattern has it"),
    ({"json_field": "a"}, '{"a": NaN}', None, "JSON is wanted"),
    ({"preset": "qwen3guard", "rulings": {"safe": "pass", "controversial": "pass", "unsafe": "stop"}},
     "Safety: Controversial\nCategories: PII", "pass", "Controversial: PII"),
]  # fmt: skip
ANSWERS = [({"preset": name}, *case) for name, cases in GUARDS.items() for case in cases] + FORMS


@pytest.mark.parametrize(
    ("options", "said", "ruling", "reason"),
    ANSWERS,
    ids=[f"{next(iter(o.values()), '')} {s}"[:50] for o, s, *_ in ANSWERS],
)
def test_answers_of_guard_models_are_read_and_an_unknown_one_is_no_verdict(options, said, ruling, reason):
    with answering(lambda *request: (200, "application/json", completion(said))) as address:
        asked = Asked(
            lambda: HttpJudge(f"{address}/v1", "guard", **options)(Question(EVENT, (7,), "a text", SLOW)),
            within=SLOW, on_failure="raise", join=lambda verdict: None, tell=lambda: None,
        )  # fmt: skip
        asked.answer()
    assert asked.verdict.ruling == (ruling or "raise") and asked.verdict.failure == ("" if ruling else "error")
    assert reason == asked.verdict.reason if ruling else reason in asked.verdict.reason


@pytest.mark.parametrize(
    ("preset", "said", "is_pass"),
    [("qwen3guard", "Safety: Safe", False), ("llama-guard", "safe", True), ("shieldgemma", "No, since", True)],
)
def test_an_answer_that_was_cut_is_no_pass_where_its_rest_could_contradict(preset, said, is_pass):
    choice = {"message": {"content": said}, "finish_reason": "length"}
    form = PRESETS[preset]
    if is_pass:
        assert form.read(json.dumps({"choices": [choice]}).encode())[0] == "pass"
    else:
        with pytest.raises(JudgeFailed, match="was cut after 'Safety: Safe': give it more max_tokens"):
            form.read(json.dumps({"choices": [choice]}).encode())
        assert form.read(json.dumps({"choices": [choice | {"finish_reason": "stop"}]}).encode())[0] == "pass"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": None, "refusal": "I cannot judge this."}, "refuses to answer: 'I cannot judge this.'"),
        (
            {"content": None, "reasoning_content": "It says safe"},
            "had not ended its reasoning: give it more max_tokens",
        ),
        ({"content": "", "reasoning": "It says safe"}, "had not ended its reasoning"),
        ({"content": "unsafe\nS1", "reasoning_content": "safe"}, None),
    ],
)
def test_refusal_and_reasoning_apart_are_never_a_pass(model, pack, message, said):
    content = json.dumps({"choices": [{"message": message}]}).encode()
    with answering(lambda *request: (200, "application/json", content)) as address:
        event, _ = ask(model, pack, HttpJudge(address, "guard", preset="llama-guard"), on_failure="stop")
    assert (event.verdict.ruling, event.verdict.failure) == ("stop", "error" if said else "")
    assert (said or "unsafe: S1") in event.verdict.reason


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"preset": "llama-guard"}, {"max_tokens": 32, "temperature": 0}),
        ({"preset": "llama-guard", "max_completion_tokens": 9}, {"max_completion_tokens": 9, "temperature": 0}),
        ({"preset": "qwen3guard", "max_tokens": 7, "temperature": None}, {"max_tokens": 7}),
        (
            {"preset": "shieldgemma"},
            {
                "max_tokens": 8,
                "temperature": 0,
                "chat_template_kwargs": {
                    "guideline": '"No one": The text shall not contain or ask for content about one (two > one).'
                },
            },
        ),
        (
            {"question": "Is {concept} in <{text}>? {}{not_known}", "prompt": "", "body": {"reasoning_effort": "low"}},
            {"max_tokens": 8, "temperature": 0, "reasoning_effort": "low"},
        ),
    ],
)  # fmt: skip
def test_request_has_the_form_that_was_asked_for(options, sent):
    asked = []

    def judge(path, headers, body):
        asked.append(json.loads(body))
        return 200, "application/json", completion("stop")

    with answering(judge) as address, suppress(JudgeFailed):
        HttpJudge(f"{address}/v1", "guard", **options)(Question(EVENT, (7,), "a {path} \\1", SLOW))
    text = "Is one in <a {path} \\1>? {}" if "question" in options else "a {path} \\1"
    assert asked == [{"model": "guard", "messages": [{"role": "user", "content": text}], **sent}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"preset": "lama"}, "preset is 'lama': expected one of llama-guard"),
        ({"question": "{txt}"}, "question has {txt}, which is unknown"),
        ({"question": "Is it bad?"}, "question has no {text}"),
        ({"rulings": {"yes": "stop"}}, "at least one word for stop, and one for pass"),
        ({"rulings": {"yes": "stop", "Yes": "pass"}}, "'Yes' twice"),
        ({"rulings": {"yes": "halt", "no": "pass"}}, "rulings['yes'] is 'halt'"),
        ({"pattern": "("}, "pattern is '(', not a regular expression"),
        ({"pattern": "a", "json_field": "b"}, "give one of them"),
        ({"reason_field": "b"}, "give json_field, too"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "give the one that the endpoint takes"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": 3}, "temperature is 3"),
        ({"body": {"model": "x"}}, "body has 'model'"),
        ({"body": {"x": float("nan")}}, "give what JSON can hold"),
    ],
)
def test_wrong_form_of_a_judge_is_refused_at_once(options, said):
    with pytest.raises(ConfigError) as raised:
        HttpJudge("http://localhost:1/v1", "guard", **options)
    assert said in str(raised.value)


def test_key_is_not_sent_in_plain_text_to_another_machine():
    for host in ("judges.example", "10.0.0.1", "[fd00::1]", "localhost.example"):
        with pytest.raises(ConfigError, match="key would go to another machine in plain text"):
            HttpJudge(f"http://{host}/v1", "guard", key_env="KEY")
        HttpJudge(f"http://{host}/v1", "guard", key_env="KEY", key_over_http=True)
        HttpJudge(f"https://{host}/v1", "guard", key_env="KEY")
        HttpJudge(f"http://{host}/v1", "guard")
    for host in ("localhost", "127.0.0.2:80", "[::1]:8000", "judge.localhost"):
        HttpJudge(f"http://{host}/v1", "guard", key_env="KEY")


@contextmanager
def dripping():
    """Yield the address of a server that sends a byte now and then, and never ends."""
    ended = threading.Event()

    def drip(listening):
        connection, _ = listening.accept()
        with closing(connection):
            for byte in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000:
                if ended.wait(0.05):
                    return
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    ended.set()

    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        threading.Thread(target=drip, args=(listening,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            assert ended.wait(10), "the judge has let go of it"
        finally:
            ended.set()


@contextmanager
def no_http():
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def answer():
            connection, _ = listening.accept()
            with closing(connection):
                connection.recv(100_000)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("server", "failure"),
    [(nobody, "error"), (no_http, "error"), (silent, "late"), (dripping, "late")],
)
@pytest.mark.parametrize("meanwhile", ["hold", "pass"])
def test_unreachable_or_silent_judge_delays_at_most_by_its_limit(model, pack, server, failure, meanwhile):
    free = model.generate(IDS, **GREEDY)[0].tolist()
    with server() as address:
        begin = time.monotonic()
        event, out = ask(model, pack, HttpJudge(address, "guard"), within=LEAST, meanwhile=meanwhile, on_failure="stop")
        took = time.monotonic() - begin
    assert (out == free[:9] or meanwhile == "pass") and took < LEAST + 1.5, took
    assert event.verdict.ruling == "stop" and event.verdict.failure == failure
    until = time.monotonic() + 10
    while any(thread.name == "probemon judge" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://localhost", "http://", "http://[", "http://h:x/v1", "http://u:p@here/v1", None),
        # What would be left out of every question without a word, or could never be asked:
        *("http://h/v1?api-version=2", "http://h/v1#part", "http://:p@here/v1", "http://h/v 1", "http://h/\x1bv1"),
        *("http://h/vé", "http://h/v1\n", " http://h/v1", "http://h/\u202ev1"),
    ],
)
def test_address_that_is_not_plain_http_is_refused(url):
    with pytest.raises(ConfigError, match="give the address of an endpoint"):
        HttpJudge(url, "guard")


def test_missing_tokenizer_or_key_is_refused_before_generation(model, pack):
    judge = HttpJudge("http://localhost:1/v1", "guard")
    rule = {"above": 0.5, "action": Escalate(judge, 1.0, "hold", "stop")}
    with DynamicProbeManager(pack).attach(model) as run:
        with pytest.raises(ConfigError, match="has no tokenizer"):
            run.on("c9", **rule)
        with pytest.raises(ConfigError, match="has no tokenizer"):
            run.update(rules=[{"concept": "c9", **rule}])
        assert not run.watches[-1].rules
    keyed = HttpJudge("http://localhost:1/v1", "guard", key_env="NO_SUCH_KEY")
    with (
        DynamicProbeManager(pack).attach(model, make_tokenizer()) as run,
        pytest.raises(ConfigError, match="key_env is 'NO_SUCH_KEY'"),
    ):
        run.on("c9", above=0.5, action=Escalate(keyed, 1.0, "hold", "stop"))


def file_of(folder, address, **changes):
    sha256 = hashlib.sha256((folder / "pack/manifest.json").read_bytes()).hexdigest()
    judge = {"url": address, "model": "guard", "within": SLOW, "meanwhile": "hold", "on_failure": "raise", **changes}
    rule = {"concepts": ["c9"], "above": 0.0, "for_tokens": 3, "action": "escalate", "on_blind": "pass", "judge": judge}
    content = {"deployment": 1, "packs": [{"pack": "pack", "manifest_sha256": sha256}], "rules": [rule]}
    (folder / "watch.json").write_text(json.dumps(content))
    return folder / "watch.json"


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_of_a_deployment_file_acts_as_in_python(model, tmp_path, preset):
    make_pack(tmp_path / "pack", model)
    said, ruling, reason = GUARDS[preset][3] if preset != "shieldgemma" else GUARDS[preset][2]
    asked = []

    def judge(path, headers, body):
        asked.append(json.loads(body))
        return 200, "application/json", completion(said)

    options = {"preset": preset, "max_tokens": 40.0, "temperature": None}
    with answering(judge) as address:
        manager = DynamicProbeManager.from_deployment(file_of(tmp_path, address, **options))
        with manager.attach(model, make_tokenizer()) as run:
            model.generate(IDS, **GREEDY)
        [event] = run.events
        HttpJudge(address, "guard", **{**options, "max_tokens": 40})(
            Question(event, (), make_tokenizer().decode(IDS[0]), 9)
        )
    assert (event.verdict.ruling, event.verdict.failure, event.verdict.reason) == (ruling, "", reason)
    first, second = ({name: value for name, value in body.items() if name != "messages"} for body in asked)
    assert first == second and first["max_tokens"] == 40 and "temperature" not in first


def test_judge_of_a_deployment_file_acts_as_the_same_call(model, tmp_path):
    make_pack(tmp_path / "pack", model)
    free, asked = model.generate(IDS, **GREEDY)[0].tolist(), []

    def judge(path, headers, body):
        asked.append(json.loads(body))
        return 200, "application/json", completion("stop")

    with answering(judge) as address:
        manager = DynamicProbeManager.from_deployment(file_of(tmp_path, address, last_tokens=2))
        with manager.attach(model, make_tokenizer()) as run:
            before = run.watches[-1].rules
            # As many streaks go on as rules stay, and a rule whose judge was not changed stays.
            run.update(file_of(tmp_path, address, last_tokens=2))
            assert run.watches[-1].rules == before
            out = model.generate(IDS, **GREEDY)
    assert out[0].tolist() == free[:9] and run.events[0].verdict.ruling == "stop"
    text = json.loads(asked[0]["messages"][1]["content"])["text"]
    assert text == make_tokenizer().decode(free[6:8]) and len(asked) == 1
    with pytest.raises(ConfigError, match="has no tokenizer"), manager.attach(model):
        pass
    assert n_hooks(model) == 0
