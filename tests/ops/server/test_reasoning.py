"""Reasoning models, asked by the official client: reasoning and reply are what the marks enclose in the raw text."""

import json
import re
from collections import Counter

import openai
import pytest
import torch
from test_answers import generated
from test_traffic import page

from running_server import Running, thinking_served

CHAT = [{"role": "user", "content": "Whales?"}]
N = 20
IN_MARKS = re.compile(r"<think>\n*(?P<reasoning>.*?)\n*</think>\n*(?P<reply>.*)", re.DOTALL)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    running = Running(thinking_served(tmp_path_factory.mktemp("packs") / "thinking", CHAT))
    yield running
    running.close()


def ids_of(thinking, messages=CHAT, **options):
    """The prompt, and the tokens that follow it."""
    served = thinking.served
    ids = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    return ids, generated(served, ids, max_new_tokens=N, do_sample=False)


def raw(thinking, ids):
    return thinking.served.tokenizer.decode(ids)


def ask(thinking, *, stream=False, messages=CHAT, probemon=None, options=None, **arguments):
    """Reply, reasoning (None: no such field), what probemon tells, and the finish reason."""
    extra = {} if probemon is None else {"probemon": probemon}
    extra |= {} if options is None else {"chat_template_kwargs": options}
    create = thinking.client.chat.completions.create
    settings = {"max_tokens": N, "temperature": 0, "extra_body": extra, "stream": stream, **arguments}
    answer = create(model="tiny", messages=messages, **settings)
    if not stream:
        [choice] = answer.choices
        told = choice.message.model_extra.get("probemon")
        return choice.message.content, choice.message.model_extra["reasoning_content"], told, choice.finish_reason
    texts, told, reason = {"content": "", "reasoning_content": ""}, {"tokens": [], "events": []}, None
    for chunk in answer:
        [choice] = chunk.choices
        for name in texts:
            texts[name] += getattr(choice.delta, name, None) or ""
        more = choice.delta.model_extra
        for name, values in more.get("probemon", {}).items():
            told[name] += values
        told |= {"summary": more["probemon_summary"]} if "probemon_summary" in more else {}
        reason = choice.finish_reason or reason
    return texts["content"], texts["reasoning_content"] or None, None if probemon is None else told, reason


@pytest.mark.parametrize("hold", [False, True])
def test_reasoning_and_reply_stand_in_their_fields_and_tokens_in_their_parts(thinking, hold):
    _, written = ids_of(thinking)
    found = IN_MARKS.fullmatch(raw(thinking, written))
    reply, reasoning = found["reply"], found["reasoning"]
    assert reply and reasoning
    with page(thinking) as reader:
        whole = ask(thinking, probemon={"hold": hold})
        (_, end) = reader.until("end")[-1]
    assert whole == ask(thinking, stream=True, probemon={"hold": hold})
    assert (end["text"], end["reasoning"]) == (reply, reasoning)
    content, reasoned, told, reason = whole
    assert (content, reasoned, reason) == (reply, reasoning, "length")
    assert [token["token_id"] for token in told["tokens"]] == written
    names = thinking.served.tokenizer.convert_ids_to_tokens(written)
    first, last = names.index("<think>"), names.index("</think>")
    parts = ["reasoning" if first < at < last else None for at in range(len(written))]
    assert [token.get("part") for token in told["tokens"]] == parts
    for part, text in ((None, reply), ("reasoning", reasoning)):
        tokens = [token for token in told["tokens"] if token.get("part") == part]
        assert "".join(token["text"] for token in tokens) == text
        assert all(text[token["start"] : token["end"]] == token["text"] for token in tokens)
    for kept in (entry["request"] for entry in thinking.get("/v1/probemon/requests")["requests"][:2]):
        [choice] = thinking.get(f"/v1/probemon/requests/{kept}")["choices"]
        assert (choice["text"], choice["reasoning"], choice["tokens"]) == (reply, reasoning, told["tokens"])


def test_completions_keep_one_text(thinking):
    ids, written = ids_of(thinking)
    settings = {"max_tokens": N, "temperature": 0, "extra_body": {"probemon": {}}}
    [choice] = thinking.client.completions.create(model="tiny", prompt=ids, **settings).choices
    assert choice.text == raw(thinking, written)
    tokens = choice.model_extra["probemon"]["tokens"]
    assert "".join(token["text"] for token in tokens) == choice.text
    assert not any("part" in token for token in tokens) and "reasoning_content" not in choice.model_extra


def test_stop_strings_end_the_reply_alone(thinking):
    _, written = ids_of(thinking)
    found = IN_MARKS.fullmatch(raw(thinking, written))
    reply, inside, behind = found["reply"], found["reasoning"][4:9], found["reply"][6:11]
    assert inside not in reply
    for stream in (False, True):
        content, reasoned, _, reason = ask(thinking, stream=stream, stop=[inside, behind])
        assert (content, reasoned, reason) == (reply[: reply.index(behind)], found["reasoning"], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_begins_reasoning_is_answered_with_reasoning(thinking, stream):
    _, written = ids_of(thinking, begun=True)
    [reasoning, *reply] = re.split(r"\n*</think>\n*", raw(thinking, written))
    content, reasoned, told, _ = ask(thinking, stream=stream, options={"begun": True}, probemon={})
    assert (content, reasoned) == ("".join(reply), reasoning.lstrip("\n"))
    assert told["tokens"][0]["part"] == "reasoning"


@pytest.mark.parametrize(
    "content, why",
    [
        ("<think>\nAh, whales and their songs of the deep", "ends inside reasoning"),
        ("<think>Ah.</think>Well, <think>no, not that one after all", "ends inside reasoning"),
        ("<think>Ah.</think>They are", None),
        ("They are mammals. <think>", None),
    ],
)
def test_continued_message_inside_reasoning_is_refused_unless_it_ends_with_the_mark(thinking, content, why):
    messages = [*CHAT, {"role": "assistant", "content": content}]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True, "probemon": {}}
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **goes_on}
    answer = thinking.ask("POST", "/v1/chat/completions", body)
    if why is not None:
        error = json.loads(answer.content)["error"]
        assert answer.status == 400 and error["param"] == "messages[1].content" and why in error["message"]
        return
    tokens = json.loads(answer.content)["choices"][0]["message"]["probemon"]["tokens"]
    assert [token.get("part") for token in tokens] == 4 * ["reasoning" if content.endswith("<think>") else None]


def test_options_and_earlier_reasoning_reach_the_chat_template(thinking):
    messages = [*CHAT, {"role": "assistant", "content": "Sing.", "reasoning_content": "So."}, *CHAT]
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        expected, written = ids_of(thinking, messages, **options)
        text = raw(thinking, expected)
        assert "(thought: So.)" in text and text.endswith("</think>\n\n") == (options == {"enable_thinking": False})
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": N, "probemon": {"prompt": True}}
        answer = thinking.ask("POST", "/v1/chat/completions", body | {"chat_template_kwargs": options})
        tokens = json.loads(answer.content)["choices"][0]["message"]["probemon"]["tokens"]
        assert [token["token_id"] for token in tokens] == expected + written


@pytest.mark.parametrize(
    ("options", "param", "why"),
    [
        ([], "", "give an object"),
        ({"enable_thinkin": False}, ".enable_thinkin", "never reads .*did you mean 'enable_thinking'"),
        ({"loop": 1}, ".loop", "never reads"),  # a name of the template's own
        *(
            ({name: 1}, f".{name}", "is set by the server itself")
            for name in ("tokenize", "tools", "messages", "add_generation_prompt", "chat_template", "return_dict")
        ),
        *(({name: 1}, f".{name}", "is set by") for name in ("documents", "conversation", "eos_token", "strftime_now")),
    ],
)
def test_options_that_the_template_does_not_read_are_refused_by_name(thinking, options, param, why):
    body = {"model": "tiny", "messages": CHAT, "chat_template_kwargs": options}
    answer = thinking.ask("POST", "/v1/chat/completions", body)
    error = json.loads(answer.content)["error"]
    assert answer.status == 400 and error["param"] == f"chat_template_kwargs{param}"
    assert re.search(why, error["message"])


def test_rules_on_reasoning_or_reply_are_met_there_alone(thinking):
    """Against plain Python over the scores of a run of its own."""
    served, (ids, written), above = thinking.served, ids_of(thinking), 0.2
    rules = [{"concept": "c5", "above": above, "within": part} for part in ("reasoning", "reply", "answer")]
    _, _, told, _ = ask(thinking, probemon={"rules": rules})
    with served.manager.attach(served.model, served.tokenizer) as run:
        run.on("c5", above=above, action=lambda event: None)
        out = served.model.generate(torch.tensor([ids]), max_new_tokens=N, do_sample=False, pad_token_id=0)
    result, begin, end = run.result(out), *served.marks
    column = result.scores.column(result.pack.find("c5"))
    over = [bool(column[i] > above) for i in result.tokens_of(0, "generated")][: len(written) - 1]
    first, last = written.index(begin), written.index(end)
    inside = list(range(first + 1, last))
    expected = Counter()
    reply = [at for at in range(len(over)) if at not in (*inside, first, last)]
    for places in (inside, reply, range(len(over))):
        before = False
        for at in places:
            expected[len(ids) + at] += over[at] and not before
            before = over[at]
        assert sum(expected.values())
    assert Counter(event["position"] for event in told["events"]) == +expected
    assert any(over[at] for at in inside)


def test_rule_on_reasoning_without_marks_is_refused(server):
    for part in ("reasoning", "reply"):
        rule = {"concept": "c5", "within": part}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="no token such as <think>") as raised:
                server.client.chat.completions.create(
                    model="tiny", messages=CHAT, extra_body={"probemon": {"rules": [rule]}}, stream=stream
                )
            assert raised.value.param == "probemon.rules[0].within"


def test_tokenizer_without_marks_changes_nothing(server):
    answer = server.client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=4, extra_body={"probemon": {}}
    )
    message = answer.choices[0].message
    assert "reasoning_content" not in message.model_extra
    assert not any("part" in token for token in message.model_extra["probemon"]["tokens"])
    assert "reasoning" not in server.get(f"/v1/probemon/requests/{answer.id}")["choices"][0]
