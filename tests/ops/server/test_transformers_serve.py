"""The example that watches transformers' own server keeps its texts and reports the events of a stream."""

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest
import transformers
from transformers import AutoModelForCausalLM

from conftest import make_pack
from local_servers import nobody
from probemon import DynamicProbeManager, Event, ProbePack
from probemon.errors import UnsupportedModel
from run_examples import EXAMPLES
from running_server import demo_tokenizer, tiny_host

sys.path.insert(0, str(EXAMPLES))
from transformers_serve import described, watched_server

ASKED = [{"role": "user", "content": "Which animals live in the sea?"}]
N_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("served"), demo_tokenizer()
    host = tiny_host(tokenizer)
    host.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model"), str(make_pack(folder / "pack", host).directory)


def text_of(client, model, *, stream):
    answer = client.chat.completions.create(
        model=model, messages=ASKED, max_tokens=N_TOKENS, temperature=0, seed=1, stream=stream
    )
    if not stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def asked_until_answered(client, model):
    """The answer to who asks from before the server listens."""
    while True:
        try:
            return text_of(client, model, stream=False)
        except openai.APIConnectionError:
            time.sleep(0.001)


def served_texts(model, pack, rule, tell):
    """What the watched server answers to the first who asks, and to others after its models are reset, twice."""
    with nobody() as address:
        port = int(address.rsplit(":", 1)[1])
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(1) as early,
    ):
        first = early.submit(asked_until_answered, client, model)
        with watched_server(model, pack, [rule], tell, host="127.0.0.1", port=port, device="cpu") as server:
            texts = [first.result()]
            for stream in (False, True):
                client.post(f"{address}/reset", cast_to=object)
                texts.append(text_of(client, model, stream=stream))
            with pytest.raises(UnsupportedModel, match="another@main is not loaded"):
                server._model_manager.load_model_and_processor("another@main")
            return texts


# Transformers' server leaves its event loop open when it is ended, which is noticed where it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_watched_server_keeps_its_texts_and_reports_stream_events(folders):
    model, pack = folders
    rule = f"{ProbePack.open(pack).concepts[0]['id']}:0.2"
    events = []
    texts = served_texts(model, pack, rule, events.append)
    gc.collect()
    host, tokenizer = AutoModelForCausalLM.from_pretrained(model), demo_tokenizer()
    expected = []

    def prepare(run):
        concept, above = rule.split(":")
        run.on(concept, above=float(above), action=lambda event: expected.append(described(event)))

    *_, last = DynamicProbeManager(pack).stream(
        host, tokenizer, ASKED, prepare=prepare, max_new_tokens=N_TOKENS, do_sample=False
    )
    generated = last.result.token_id[last.result.phase == 1].tolist()
    assert texts == [tokenizer.decode(generated, skip_special_tokens=True)] * 3
    assert expected
    assert events == [event | {"generation": i} for i in range(3) for event in expected]


def test_event_at_an_unscored_token_gives_the_reason_and_no_score():
    event = Event(
        "c1", "one", ("one",), 0, 3, 7, score=0.0, above=0.5, for_tokens=1, blind="hidden state is not finite"
    )
    told = described(event)
    assert told["score"] is None and told["blind"] == "hidden state is not finite"
    assert "blind" not in described(replace(event, blind=""))


def test_untested_transformers_version_is_refused(folders, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    with (
        pytest.raises(UnsupportedModel, match=r"5\.99\.0: its server was tried in 5\.23\.0 alone"),
        watched_server(*folders, [], print),
    ):
        pass
