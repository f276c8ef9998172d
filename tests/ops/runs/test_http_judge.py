"""A judge over HTTP gets only the stated fields, and any reply but one plain word is no verdict."""

import hashlib
import json
import socket
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch

from conftest import PAD, make_pack, n_hooks
from corpora import make_tokenizer
from local_servers import answering, nobody, silent
from probemon import DynamicProbeManager, Event
from probemon.errors import ConfigError
from probemon.ops.judges.escalation import Escalate, Question
from probemon.ops.judges.http_judge import PROMPT, HttpJudge

pytestmark = pytest.mark.filterwarnings("ignore:.* to judges had no answer that counts")

IDS = torch.tensor([[1, 5, 9, 13, 7]])
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
