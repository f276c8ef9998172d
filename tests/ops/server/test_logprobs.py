"""Log probabilities are those of one full forward: the model's own, whatever changes its logits before sampling."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from test_answers import CHAT, generated, prompt_ids, text_of, watched

from probemon.ops.server.logprobs import ToldToken, told_token

SAMPLED = {"temperature": 1.3, "seed": 4, "presence_penalty": 0.5, "extra_body": {"repetition_penalty": 1.4}}


def distributions(served, ids):
    """The log probabilities [T, V] of what follows each token, in fp64."""
    with torch.no_grad():
        return served.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def close(value, expected):
    return value == pytest.approx(float(expected), abs=1e-5)


def assert_chat_entries_are(served, entries, before, written, n_top):
    """Entries are of `written`, which follows the ids `before`."""
    assert len(entries) == len(written)
    expected = distributions(served, before + written)
    for at, (entry, token_id) in enumerate(zip(entries, written, strict=True)):
        row = expected[len(before) + at - 1]
        assert entry["token"] == served.raw_text(token_id) and close(entry["logprob"], row[token_id])
        best = row.topk(n_top)
        assert [one["token"] for one in entry["top_logprobs"]] == [served.raw_text(i) for i in best.indices.tolist()]
        assert all(close(one["logprob"], v) for one, v in zip(entry["top_logprobs"], best.values, strict=True))


def written_ids(choice):
    return [token["token_id"] for token in choice["probemon"]["tokens"]]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n_top", [0, 3])
def test_chat_has_the_models_own_log_probabilities_of_each_choice(server, served, hold, streamed, n_top):
    create = server.client.chat.completions.create
    asked = {**SAMPLED, "extra_body": {**SAMPLED["extra_body"], "probemon": {"hold": hold}}}
    asked |= {"model": "tiny", "messages": CHAT, "n": 2, "max_tokens": 9, "logprobs": True, "top_logprobs": n_top}
    entries, written, texts = [[], []], [[], []], ["", ""]
    for part in create(**asked, stream=True) if streamed else [create(**asked)]:
        for choice in part.choices:
            said = choice.delta if streamed else choice.message
            entries[choice.index] += [one.model_dump() for one in choice.logprobs.content] if choice.logprobs else []
            written[choice.index] += written_ids(said.model_extra) if "probemon" in said.model_extra else []
            texts[choice.index] += said.content or ""
    assert written[0] != written[1]
    for choice in range(2):
        assert_chat_entries_are(served, entries[choice], prompt_ids(served), written[choice], n_top)
        assert (
            bytes(byte for entry in entries[choice] for byte in entry["bytes"]).decode(errors="replace")
            == (texts[choice])
        )


def test_concurrent_answers_have_log_probabilities_of_their_own_forwards(server, served):
    asked = [
        {"messages": [{"role": "user", "content": word}], "presence_penalty": at / 2, "seed": at, "temperature": 1}
        for at, word in enumerate(("Whales", "Ships and whales, and ships", "A", "Tell me more."))
    ]

    def ask(body):
        body = {"model": "tiny", "max_tokens": 30, "logprobs": True, "top_logprobs": 1, "probemon": {}, **body}
        answer = json.loads(server.ask("POST", "/v1/chat/completions", body).content)
        assert "choices" in answer, answer
        return answer["choices"][0]

    with ThreadPoolExecutor(len(asked)) as pool:
        for body, choice in zip(asked, pool.map(ask, asked), strict=True):
            before, written = prompt_ids(served, body["messages"]), written_ids(choice["message"])
            assert_chat_entries_are(served, choice["logprobs"]["content"], before, written, 1)


def test_answers_without_logprobs_compute_none(server, served, monkeypatch):
    monkeypatch.setattr("probemon.ops.server.answering.Logprobs", None)
    answer = server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=3)
    assert answer.choices[0].logprobs is None


PROMPTS = ["Once upon a time \U0001f600", "A ship"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("n_top", [0, 2])
def test_completion_echoes_its_prompt_with_log_probabilities(server, served, streamed, max_tokens, n_top):
    """As lm-eval's local-completions asks."""
    create, ids = server.client.completions.create, [served.tokenizer(one)["input_ids"] for one in PROMPTS]
    asked = {"model": "tiny", "prompt": PROMPTS, "max_tokens": max_tokens, "logprobs": n_top, "echo": True}
    asked |= {"temperature": 0, "n": 2, "extra_body": {"probemon": {}}}
    texts, values, tokens, reasons = [""] * 4, [{} for _ in range(4)], [[] for _ in range(4)], {}
    for part in create(**asked, stream=True) if streamed else [create(**asked)]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            for name, one in choice.logprobs.model_dump().items() if choice.logprobs else ():
                values[choice.index][name] = values[choice.index].get(name, []) + one
            tokens[choice.index] += choice.model_extra.get("probemon", {}).get("tokens", [])
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert reasons == dict.fromkeys(range(4), "length")
    for index in range(4):
        before = ids[index // 2]
        written = generated(served, before, max_new_tokens=max_tokens, do_sample=False) if max_tokens else []
        told, everything = values[index], before + written
        assert texts[index] == PROMPTS[index // 2] + text_of(served, written)
        assert told["tokens"] == [served.raw_text(one) for one in everything]
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        rows = distributions(served, everything)
        for at in range(1, len(everything)):
            own, best = rows[at - 1][everything[at]], rows[at - 1].topk(n_top).indices.tolist()
            assert close(told["token_logprobs"][at], own)
            expected = {served.raw_text(one): float(rows[at - 1][one]) for one in [everything[at], *best]}
            assert told["top_logprobs"][at] == pytest.approx(expected, abs=1e-5)
        offsets = [*told["text_offset"], len(texts[index])]
        pieces = [texts[index][a:b] for a, b in pairwise(offsets)]
        assert all(piece == one or "\ufffd" in one for piece, one in zip(pieces, told["tokens"], strict=True))
        assert [one["token_id"] for one in tokens[index]] == written
        assert all(texts[index][one["start"] : one["end"]] == one["text"] for one in tokens[index])


def test_echo_alone_is_the_text_of_the_prompt_of_text_or_ids(server, served):
    ids = served.tokenizer(PROMPTS[0])["input_ids"]
    for prompt in (PROMPTS[0], ids):
        answer = server.client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True)
        assert answer.choices[0].text == PROMPTS[0] and answer.choices[0].logprobs is None
        assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("hold", [False, True])
def test_log_probabilities_end_with_the_text_that_is_shown(server, served, hold):
    """Tokens of a stop string have them, as they have scores; those that a rule hides have none."""
    ids = generated(served, prompt_ids(served), max_new_tokens=12, do_sample=False)
    whole = text_of(served, ids)
    stop = whole[len(whole) // 3 : len(whole) // 3 + 25]
    result = watched(served, prompt_ids(served))
    columns = {name: result.scores.column(result.pack.find(name))[-12:-1].tolist() for name in ("c0", "c1", "c5", "c7")}
    name, column = next((name, one) for name, one in columns.items() if max(one[:4]) < max(one[4:]))
    rule = {"concept": name, "above": (max(column[:4]) + max(column[4:])) / 2, "action": "stop"}
    for more in ({"stop": stop}, {"probemon": {"rules": [rule], "hold": hold}}):
        probemon = {"hold": hold} | more.get("probemon", {})
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 12, "temperature": 0, "logprobs": True, **more}
        answer = json.loads(server.ask("POST", "/v1/chat/completions", {**body, "probemon": probemon}).content)
        [choice] = answer["choices"]
        written = written_ids(choice["message"])
        assert 0 < len(written) < 12
        assert_chat_entries_are(served, choice["logprobs"]["content"], prompt_ids(served), written, 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_places_of_tokens_end_with_a_text_that_a_stop_string_cuts(server, served, streamed):
    ids = served.tokenizer(PROMPTS[1])["input_ids"]
    whole = text_of(served, generated(served, ids, max_new_tokens=12, do_sample=False))
    stop = whole[len(whole) // 3 : len(whole) // 3 + 25]
    asked = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 12, "temperature": 0, "logprobs": 1, "stop": stop}
    made = server.client.completions.create(**asked, stream=streamed)
    offsets, text = [], ""
    for part in made if streamed else [made]:
        [choice] = part.choices
        text += choice.text
        offsets += choice.logprobs.text_offset if choice.logprobs else []
        assert all(one <= len(text) for one in offsets)  # what is not sent yet may still be cut
    assert text == whole[: whole.index(stop)] and offsets[-1] == len(text) and offsets == sorted(offsets)


def test_bytes_of_a_part_of_a_character_are_told_if_the_tokenizer_tells_them(served):
    text = "a\U0001f600\u00e9 \n"
    ids = served.tokenizer(text)["input_ids"]
    tokens = [told_token(served.tokenizer, served.raw_text(one), one) for one in ids]
    assert any("\ufffd" in token.text for token in tokens)
    assert b"".join(map(bytes, (token.bytes for token in tokens))).decode() == text

    class Fallback:
        def convert_ids_to_tokens(self, token_id):
            return {1: "<0xF0>", 2: "\u6f22"}[token_id]

    assert told_token(Fallback(), "\ufffd", 1) == ToldToken("\ufffd", [0xF0])
    assert told_token(Fallback(), "\ufffd", 2).bytes is None
