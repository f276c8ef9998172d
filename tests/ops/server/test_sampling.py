"""Parameters that change logits or the end of an answer, against a plain loop of full forwards."""

import json
from collections import Counter

import openai
import pytest
import torch
from test_answers import CHAT, collected, generated, prompt_ids, text_of

N = 12


def plain_loop(served, ids, change):
    """Greedy tokens of full forwards, whose logits `change(logits, counts of the answer's tokens)`."""
    ids, written = list(ids), []
    for _ in range(N):
        with torch.no_grad():
            logits = served.model(torch.tensor([ids])).logits[0, -1].double()
        for token_id, difference in change(Counter(written)).items():
            logits[token_id] += difference
        written.append(int(logits.argmax()))
        ids.append(written[-1])
    return written


def asked(server, **body):
    body = {"model": "tiny", "messages": CHAT, "max_tokens": N, "temperature": 0, **body}
    answer = server.ask("POST", "/v1/chat/completions", body)
    content = json.loads(answer.content)
    assert answer.status == 200, content
    return content["choices"][0]["message"]["content"], content["choices"][0]["finish_reason"], answer.headers


@pytest.mark.parametrize("penalties", [(2, 0), (0, 1.5), (-2, -2), (1, 0.5)])
def test_penalties_lower_logits_by_how_often_the_answer_has_a_token(server, served, penalties):
    presence, frequency = penalties
    ids = prompt_ids(served)
    # A favoured token is said until its penalties outweigh its bias; one of the prompt has none at first.
    bias = {ids[5]: 8.0, ids[6]: 6.0, 900: -100.0}

    def change(counts):
        found = {one: -frequency * n - presence for one, n in counts.items()}
        return {one: found.get(one, 0) + bias.get(one, 0) for one in {*found, *bias}}

    expected = plain_loop(served, ids, change)
    assert len({*expected}) == 1 or expected != plain_loop(served, ids, lambda counts: bias)
    body = {"presence_penalty": presence, "frequency_penalty": frequency}
    text, _, _ = asked(server, **body, logit_bias={str(one): value for one, value in bias.items()})
    assert text == text_of(served, expected)


def test_logit_bias_forbids_and_forces_tokens(server, served):
    ids = prompt_ids(served)
    first = plain_loop(served, ids, lambda counts: {})[0]
    expected = plain_loop(served, ids, lambda counts: {first: -100.0})
    assert first not in expected
    assert asked(server, logit_bias={str(first): -100})[0] == text_of(served, expected)
    assert asked(server, logit_bias={"900": 100})[0] == served.raw_text(900) * N


@pytest.mark.parametrize("hold", [False, True])
def test_stop_token_ends_the_answer_unless_min_tokens_are_missing(server, served, hold):
    ids = generated(served, prompt_ids(served), max_new_tokens=N, do_sample=False)
    at = max(i for i in range(N - 1) if ids[i] not in ids[:i])
    extra = {"stop_token_ids": [900, ids[at]], "probemon": {"hold": hold}}
    text, reason, _ = asked(server, **extra)
    # With `hold`, an end that has a text is withheld, because it is never scored.
    assert (text, reason) == (text_of(served, ids[: at if hold else at + 1]), "stop")
    expected = generated(
        served, prompt_ids(served), max_new_tokens=N, min_new_tokens=N, eos_token_id=[900, ids[at]], do_sample=False
    )
    assert asked(server, **{**extra, "min_tokens": N})[0] == text_of(served, expected)


def test_ignored_end_of_sequence_does_not_end_the_answer(server, served, monkeypatch):
    ids = generated(served, prompt_ids(served), max_new_tokens=N, do_sample=False)
    at = max(i for i in range(N - 1) if ids[i] not in ids[:i])
    monkeypatch.setattr(served.model.generation_config, "eos_token_id", ids[at])
    monkeypatch.setattr(served, "end_ids", frozenset([ids[at]]))
    assert asked(server)[:2] == (text_of(served, ids[: at + 1]), "stop")
    assert asked(server, ignore_eos=True)[:2] == (text_of(served, ids), "length")
    stops = asked(server, ignore_eos=True, stop_token_ids=[ids[1]])
    assert stops[:2] == (text_of(served, ids[: ids.index(ids[1]) + 1]), "stop")


def test_last_message_of_the_assistant_is_continued(server, served):
    messages = [*CHAT, {"role": "assistant", "content": "Whales are the"}]
    ids = served.tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert served.tokenizer.decode(ids).endswith("Whales are the")
    expected = generated(served, ids, max_new_tokens=N, do_sample=False)
    extra = {"add_generation_prompt": False, "continue_final_message": True, "probemon": {"prompt": True}}
    text, tokens, *_ = collected(
        server.client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=N, temperature=0, stream=True, extra_body=extra
        )
    )
    assert text == text_of(served, expected)
    assert [token["token_id"] for token in tokens] == ids + expected
    assert [token["position"] for token in tokens] == list(range(len(ids) + N))
    for others, more, param in (
        (messages, {"add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {}, "messages[1]"),
        ([*CHAT, {"role": "assistant", "content": ""}], {}, "messages[2]"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            server.client.chat.completions.create(model="tiny", messages=others, extra_body={**extra, **more})
        assert raised.value.param == param


def test_prompt_without_the_beginning_of_an_answer(server, served):
    ids = served.tokenizer.apply_chat_template(CHAT, add_generation_prompt=False, return_dict=False)
    expected = generated(served, ids, max_new_tokens=N, do_sample=False)
    assert asked(server, add_generation_prompt=False)[0] == text_of(served, expected)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_server_gives_are_cut_and_told(server, name):
    most = server.limits.max_tokens
    for wanted, told in ((most, None), (most + 1, str(most)), (10**6, str(most))):
        raw = server.client.chat.completions.with_raw_response.create
        answer = raw(model="tiny", messages=CHAT, **{name: wanted}, extra_body={"ignore_eos": True})
        assert answer.headers.get("probemon-max-tokens") == told
        assert answer.parse().usage.completion_tokens == most and answer.parse().choices[0].finish_reason == "length"
    streamed = server.ask(
        "POST", "/v1/chat/completions", {"model": "tiny", "messages": CHAT, name: 10**6, "stream": True}
    )
    assert streamed.headers["probemon-max-tokens"] == str(most)


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "prompt"])
def test_ids_that_the_model_does_not_have_are_refused(server, served, name):
    body = {"model": "tiny", "prompt": "Hi"} | {
        name: {str(served.n_ids): 1} if name == "logit_bias" else [served.n_ids]
    }
    answer = server.ask("POST", "/v1/completions", body)
    error = json.loads(answer.content)["error"]
    assert answer.status == 400 and error["param"] == name and str(served.n_ids) in error["message"]
