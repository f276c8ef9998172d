"""Rows of people's files are recognised by their shape and become chats in OpenAI's form."""

import json

import pytest

from probemon.errors import ChatRefused
from probemon.host.chat_forms import check_said
from probemon.host.chat_shapes import FIELDS, SHAPES, ShapedChat, chats_as, chats_of, shape_of

TOOL = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": {"type": "object"}}}
ANTHROPIC_TOOL = {"name": "weather", "description": "Now.", "input_schema": {"type": "object"}}
ASKED = {"role": "user", "content": "Rain in Oslo?"}
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}
BRIEF = {"role": "system", "content": "Be brief."}


def called(arguments):
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def result(text="Rain", **more):
    return {"role": "tool", "content": text, "tool_call_id": "c1", **more}


def said(content, **more):
    return {"role": "user", "content": content, **more}


def batch(*choices, status=200, error=None):
    body = {"object": "chat.completion", "choices": [{"index": i, "message": m} for i, m in enumerate(choices)]}
    response = {"status_code": status, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": "request-1", "response": response, "error": error}


def sample(*messages, **more):
    output = {"model": "m", "choices": [{"message": {"role": "assistant", "content": "Yes."}, "stop_reason": "stop"}]}
    return {"id": 1, "epoch": 1, "input": "Rain?", "target": "Yes", "messages": [*messages], "output": output, **more}


def constructed(name, **fields):
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name], "kwargs": fields}


def generation(message):
    return {"generations": [[{"text": message["kwargs"]["content"], "type": "ChatGeneration", "message": message}]]}


# id: shape, row, messages
ROWS = {
    "openai": ("OpenAI messages", {"messages": [BRIEF, ASKED, YES], "source": "a"}, [BRIEF, ASKED, YES]),
    "openai with tools, thinking and other fields": (
        "OpenAI messages",
        {
            "messages": [
                said([{"type": "text", "text": "Rain "}, {"type": "input_text", "text": "in Oslo?"}], name="Ola"),
                {**called('{"at": "Oslo"}'), "content": None, "reasoning": "Look.", "weight": 1, "refusal": None},
                result(name="weather"),
                {**YES, "reasoning_content": "It rains.", "tool_calls": None},
            ]
        },
        [
            {**ASKED, "name": "Ola"},
            {**called('{"at": "Oslo"}'), "reasoning_content": "Look."},
            result(name="weather"),
            {**YES, "reasoning_content": "It rains."},
        ],
    ),
    "openai with parts of thinking": (
        "OpenAI messages",
        {
            "messages": [
                BRIEF,
                ASKED,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Look."},
                        {"type": "reasoning", "text": "Oslo."},
                        {"type": "text", "text": "Yes."},
                    ],
                },
            ]
        },
        [BRIEF, ASKED, {**YES, "reasoning_content": "Look.\nOslo."}],
    ),
    "openai with a function call and a refusal": (
        "OpenAI messages",
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
                {"role": "function", "name": "weather", "content": "Rain"},
                {"role": "assistant", "content": None, "refusal": "No."},
            ]
        },
        [
            ASKED,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "Rain", "name": "weather"},
            NO,
        ],
    ),
    "openai batch input": (
        "OpenAI messages",
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [BRIEF, ASKED]},
        },
        [BRIEF, ASKED],
    ),
    "anthropic": (
        "Anthropic messages",
        {"system": "Be brief.", "messages": [ASKED, {"role": "assistant", "content": "Yes."}], "max_tokens": 9},
        [BRIEF, ASKED, YES],
    ),
    "anthropic with tools": (
        "Anthropic messages",
        {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Look.", "signature": "s"},
                        {"type": "redacted_thinking", "data": "d"},
                        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"at": "Oslo"}},
                    ],
                },
                said(
                    [
                        {"type": "text", "text": "And now?"},
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain"}]},
                    ]
                ),
                {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
                said([{"type": "tool_result", "tool_use_id": "c1", "content": "Rain"}]),
            ],
        },
        [
            BRIEF,
            ASKED,
            {**called({"at": "Oslo"}), "reasoning_content": "Look."},
            result(),
            said("And now?"),
            YES,
            result(),
        ],
    ),
    "anthropic without system": (
        "Anthropic messages",
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "Look."}, {"type": "text", "text": "Yes."}],
                },
            ]
        },
        [ASKED, {**YES, "reasoning_content": "Look."}],
    ),
    "sharegpt": (
        "ShareGPT",
        {
            "id": "a",
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Rain in Oslo?"},
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"at": "Oslo"}}'},
                {"from": "observation", "value": "Rain"},
                {"from": "gpt", "value": "<think>Look.</think>Yes."},
            ],
        },
        [
            BRIEF,
            ASKED,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"at": "Oslo"}}}],
            },
            {"role": "tool", "content": "Rain"},
            {"role": "assistant", "content": "<think>Look.</think>Yes."},
        ],
    ),
    "sharegpt with a system prompt beside": (
        "ShareGPT",
        {
            "system": "Be brief.",
            "conversations": [{"from": "user", "value": "Rain in Oslo?"}, {"from": "bard", "value": "Yes."}],
        },
        [BRIEF, ASKED, YES],
    ),
    "one conversation with roles": ("ShareGPT", {"conversation": [ASKED, YES], "turn": 1}, [ASKED, YES]),
    "prompt and completion": (
        "prompt and completion",
        {"prompt": "Rain in Oslo?", "completion": "Yes.", "score": 1},
        [ASKED, YES],
    ),
    "prompt and response as messages": (
        "prompt and completion",
        {"prompt": [BRIEF, ASKED], "response": [YES]},
        [BRIEF, ASKED, YES],
    ),
    "prompt and completion of Human and Assistant": (
        "prompt and completion",
        {"prompt": "\n\nHuman: Rain in Oslo?\n\nAssistant:", "completion": " Yes."},
        [ASKED, YES],
    ),
    "batch output": ("OpenAI batch output", batch({**YES, "refusal": None, "annotations": []}), [YES]),
    "chat completion": (
        "OpenAI batch output",
        {"id": "chatcmpl-1", "object": "chat.completion", "choices": [{"index": 0, "message": {**YES}}]},
        [YES],
    ),
    "inspect-ai sample": (
        "inspect-ai sample",
        sample(
            {"id": "1", "role": "system", "content": "Be brief."},
            {"id": "2", "role": "user", "content": "Rain in Oslo?", "source": "input"},
            {
                "id": "3",
                "role": "assistant",
                "source": "generate",
                "content": [
                    {"type": "reasoning", "reasoning": "Look.", "redacted": False},
                    {"type": "reasoning", "reasoning": "gAAAAB", "redacted": True, "summary": "Oslo."},
                    {"type": "text", "text": ""},
                ],
                "tool_calls": [{"id": "c1", "function": "weather", "arguments": {"at": "Oslo"}, "type": "function"}],
            },
            {"id": "4", "role": "tool", "content": "Rain", "tool_call_id": "c1", "function": "weather"},
            {
                "id": "5",
                "role": "tool",
                "content": "",
                "tool_call_id": "c1",
                "function": "weather",
                "error": {"type": "timeout", "message": "too slow"},
            },
            {"id": "6", "role": "assistant", "content": "Yes."},
            scores={},
        ),
        [
            BRIEF,
            ASKED,
            {**called({"at": "Oslo"}), "reasoning_content": "Look.\nOslo."},
            result(name="weather"),
            result("Error: too slow", name="weather"),
            YES,
        ],
    ),
    "inspect-ai sample that ended at once": ("inspect-ai sample", sample(), [said("Rain?")]),
    "langfuse generation": (
        "Langfuse",
        {"id": "o", "traceId": "t", "type": "GENERATION", "input": [BRIEF, ASKED], "output": YES},
        [BRIEF, ASKED, YES],
    ),
    "langfuse trace of texts": (
        "Langfuse",
        {"id": "t", "projectId": "p", "input": "Rain in Oslo?", "output": "Yes.", "observations": ["o"]},
        [ASKED, YES],
    ),
    "langfuse objects": (
        "Langfuse",
        {
            "trace_id": "t",
            "input": {"messages": [ASKED], "model": "m"},
            "output": {"choices": [{"index": 0, "message": YES}]},
        },
        [ASKED, YES],
    ),
    "langfuse messages as JSON text": (
        "Langfuse",
        {"traceId": "t", "input": json.dumps([ASKED]), "output": '{"role": "assistant", "content": "Yes."}'},
        [ASKED, YES],
    ),
    "langfuse answer that is JSON": (
        "Langfuse",
        {"traceId": "t", "input": "Rain in Oslo?", "output": '{"role": "cook"}'},
        [ASKED, {"role": "assistant", "content": '{"role": "cook"}'}],
    ),
    "langsmith model run": (
        "LangSmith",
        {
            "id": "r",
            "run_type": "llm",
            "inputs": {
                "messages": [
                    [
                        constructed("SystemMessage", content="Be brief.", type="system"),
                        constructed("HumanMessage", content="Rain in Oslo?"),
                    ]
                ]
            },
            "outputs": generation(
                constructed(
                    "AIMessageChunk",
                    content="",
                    tool_calls=[{"name": "weather", "args": {"at": "Oslo"}, "id": "c1", "type": "tool_call"}],
                    additional_kwargs={"reasoning_content": "Look.", "refusal": None},
                )
            ),
            "error": None,
        },
        [BRIEF, ASKED, {**called({"at": "Oslo"}), "reasoning_content": "Look."}],
    ),
    "langsmith chain": (
        "LangSmith",
        {"inputs": {"question": "Rain in Oslo?"}, "outputs": {"answer": "Yes."}},
        [ASKED, YES],
    ),
    "langsmith graph that repeats its input": (
        "LangSmith",
        {
            "inputs": {"messages": [{"type": "human", "content": "Rain in Oslo?", "id": "1"}]},
            "outputs": {
                "messages": [
                    {"type": "human", "content": "Rain in Oslo?", "id": "1"},
                    {"type": "tool", "content": "Rain", "tool_call_id": "c1", "name": "weather"},
                    {"type": "ai", "data": {"content": "Yes.", "type": "ai"}},
                ]
            },
        },
        [ASKED, result(name="weather"), YES],
    ),
    "langsmith in OpenAI's form": (
        "LangSmith",
        {"inputs": {"messages": [ASKED]}, "outputs": {"choices": [{"message": YES, "finish_reason": "stop"}]}},
        [ASKED, YES],
    ),
    "alpaca": (
        "Alpaca",
        {"instruction": "Is this wet?", "input": "Rain", "output": "Yes."},
        [said("Is this wet?\n\nRain"), YES],
    ),
    "alpaca without input": ("Alpaca", {"instruction": "Rain in Oslo?", "input": "", "output": "Yes."}, [ASKED, YES]),
    "openai beside a body": ("OpenAI messages", {"messages": [ASKED], "body": {"messages": [YES]}}, [ASKED]),
    "openai with a call without arguments": (
        "OpenAI messages",
        {"messages": [ASKED, {**called(None), "content": [{"type": "text", "text": "Hm."}]}]},
        [ASKED, {**called("{}"), "content": "Hm."}],
    ),
    "anthropic call without system": (
        "Anthropic messages",
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {}}]},
            ]
        },
        [ASKED, called({})],
    ),
    "sharegpt calls": (
        "ShareGPT",
        {
            "conversations": [
                {"from": "human", "value": "Rain in Oslo?"},
                {"from": "function_call", "value": '[{"id": "c1", "name": "weather", "arguments": "{}"}]'},
            ]
        },
        [ASKED, called("{}")],
    ),
    "prompt of Human and messages": (
        "prompt and completion",
        {"prompt": "Say\n\nHuman: Hi", "completion": [YES]},
        [said("Say\n\nHuman: Hi"), YES],
    ),
    "completion with turns of its own": (
        "prompt and completion",
        {"prompt": [ASKED], "completion": [said("And now?"), YES]},
        [ASKED, said("And now?"), YES],
    ),
    "completion that asks again": (
        "prompt and completion",
        {"prompt": [ASKED], "completion": [NO, ASKED, YES]},
        [ASKED, NO, ASKED, YES],
    ),
    "langfuse of a type": (
        "Langfuse",
        {"type": "GENERATION", "input": {"role": "user", "content": "Rain in Oslo?"}, "output": {"content": "Yes."}},
        [ASKED, YES],
    ),
    "langsmith with an error beside its answer": (
        "LangSmith",
        {
            "inputs": {
                "messages": [
                    constructed("HumanMessage", content="Rain in Oslo?"),
                    constructed("AIMessage", content="No."),
                    {"type": "ai", "data": {"content": "Yes."}},
                    {"content": "Rain in Oslo?"},
                ]
            },
            "outputs": {"output": {"role": "assistant", "tool_calls": called("{}")["tool_calls"]}},
            "error": "late",
        },
        [ASKED, NO, YES, ASKED, called("{}")],
    ),
    "alpaca with an id of a trace": (
        "Alpaca",
        {"instruction": "Rain in Oslo?", "input": "", "output": "Yes.", "trace_id": "t"},
        [ASKED, YES],
    ),
}

# id: shape, row, chosen, rejected
PAIRS = {
    "texts": (
        "chosen and rejected",
        {"prompt": "Rain in Oslo?", "chosen": "Yes.", "rejected": "No."},
        [ASKED, YES],
        [ASKED, NO],
    ),
    "messages": (
        "chosen and rejected",
        {"prompt": [BRIEF, ASKED], "chosen": [YES], "rejected": [NO]},
        [BRIEF, ASKED, YES],
        [BRIEF, ASKED, NO],
    ),
    "whole chats beside the prompt": (
        "chosen and rejected",
        {"prompt": "Rain in Oslo?", "chosen": [ASKED, YES], "rejected": [ASKED, NO], "score_chosen": 8.0},
        [ASKED, YES],
        [ASKED, NO],
    ),
    "no prompt": ("chosen and rejected", {"chosen": [ASKED, YES], "rejected": [ASKED, NO]}, [ASKED, YES], [ASKED, NO]),
    "hh-rlhf": (
        "hh-rlhf",
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Rain in Oslo?\n\nAssistant: Yes.",
            "rejected": "\n\nHuman: Rain in Oslo?\n\nAssistant:",
        },
        [said("Hi"), {"role": "assistant", "content": "Hello"}, ASKED, YES],
        [ASKED, {"role": "assistant", "content": ""}],
    ),
    "hh-rlhf without its first line breaks": (
        "hh-rlhf",
        {"chosen": "Human: Rain in Oslo?\n\nAssistant: Yes.\n\nHuman: Ah", "rejected": "Human: Rain in Oslo?"},
        [ASKED, YES, said("Ah")],
        [ASKED],
    ),
}

MALFORMED = {
    "no turns": ({"messages": []}, r"^'messages' is empty: give a list"),
    "a turn of text": ({"messages": ["Hi"]}, r"^messages\[0\] is str: give an object"),
    "a role": ({"messages": [{"role": "alien", "content": "Hi"}]}, r"^messages\[0\] has the role 'alien': .*assistant"),
    "a content": (
        {"messages": [ASKED, {"role": "user", "content": 3}]},
        r"^messages\[1\] has a content that is no text",
    ),
    "no content": ({"messages": [{"role": "user"}]}, r"^messages\[0\] has a content that is no text"),
    "an image": (
        {"messages": [said([{"type": "image_url", "image_url": {"url": "u"}}])]},
        r"^messages\[0\] has an image; texts only",
    ),
    "audio": ({"messages": [said([{"type": "input_audio", "input_audio": {}}])]}, r"has audio; texts only"),
    "an answer in audio": (
        {"messages": [ASKED, {**YES, "audio": {"id": "a"}}]},
        r"^messages\[1\] has audio; texts only",
    ),
    "an unknown part": ({"messages": [said([{"type": "poll"}])]}, r"has a part of type 'poll', which is no text"),
    "a part without its text": ({"messages": [said([{"type": "text"}])]}, r"the text of messages\[0\] is missing"),
    "thinking of a user": ({"messages": [{**ASKED, "reasoning": "Hm."}]}, r"as the user's: correct its role"),
    "thinking that is no text": ({"messages": [{**YES, "reasoning": {}}]}, r"'reasoning' of messages\[0\] is dict"),
    "a call without a name": (
        {"messages": [{**YES, "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        r"a tool call of messages\[0\] is no call of a function",
    ),
    "calls as text": ({"messages": [{**YES, "tool_calls": "weather"}]}, r"a tool call of messages\[0\] is str"),
    "tools that are no JSON": ({"messages": [ASKED], "tools": "weather"}, r"^'tools' is a text that is no JSON"),
    "a tool of text": ({"messages": [ASKED], "tools": ["weather"]}, r"^a tool is str: give an object"),
    "two system prompts": (
        {"system": "Be kind.", "messages": [BRIEF, ASKED]},
        "'system' and a system turn: give only one",
    ),
    "an input of text": (
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "{}"}]}]},
        r"'input' of messages\[1\] is str",
    ),
    "a result of an image": (
        {"messages": [said([{"type": "tool_result", "content": [{"type": "image", "source": {}}]}])]},
        r"a tool result of messages\[0\] has an image",
    ),
    "an assistant's result": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "content": "Rain"}]}]},
        r"as the assistant's: correct its role",
    ),
    "a call's arguments as a list": (
        {"messages": [{**YES, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
        r"is no call of a function",
    ),
    "no conversation": ({"conversations": []}, r"^'conversations' is empty"),
    "an unknown speaker": (
        {"conversations": [{"from": "alien", "value": "Hi"}]},
        r"conversations\[0\] has the role 'alien'",
    ),
    "no value": ({"conversations": [{"from": "human"}]}, r"^'value' of conversations\[0\] is missing: give a text"),
    "a function call in words": (
        {"conversations": [{"from": "function_call", "value": "weather()"}]},
        r"the function call of conversations\[0\] is a text that is no JSON",
    ),
    "a completion that is a number": (
        {"prompt": "Hi", "completion": 3},
        r"^'completion' is int: give a text or a list",
    ),
    "two completions": ({"prompt": "Hi", "completion": "a", "response": "b"}, "one of 'completion' and 'response'"),
    "a rejected number": ({"prompt": "Hi", "chosen": "a", "rejected": 3}, r"^'rejected' is int"),
    "a prompt that is an object": ({"prompt": {}, "chosen": "a", "rejected": "b"}, r"^'prompt' is dict"),
    "hh-rlhf with a preface": (
        {"chosen": "So:\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi"},
        r"^'chosen' does not begin with 'Human:'",
    ),
    "hh-rlhf with other rejected": (
        {"chosen": "\n\nHuman: Hi", "rejected": ["b"]},
        r"^'rejected' is list: give a text",
    ),
    "a failed request": (
        {"id": "b", "custom_id": "r", "response": None, "error": {"code": "expired", "message": "Not\nrun."}},
        r"^the request failed \(status None: Not run.\): leave out",
    ),
    "a status": (
        {
            "custom_id": "r",
            "response": {"status_code": 429, "body": {"error": {"message": "Slow down"}}},
            "error": None,
        },
        r"\(status 429: Slow down\)",
    ),
    "an error in the body": (
        {"custom_id": "r", "response": {"status_code": 200, "body": {"error": "full", "choices": [{"message": YES}]}}},
        r"\(status 200: full\)",
    ),
    "a status without an error": (batch(YES, status=500), r"\(status 500: no answer\)"),
    "an answer of another endpoint": (
        {"custom_id": "r", "response": {"status_code": 200, "body": {"object": "response"}}, "error": None},
        r"^'choices' is missing",
    ),
    "a sample with an image": (
        {"version": 2, "status": "success", "eval": {}, "samples": [sample(ASKED), sample(said([{"type": "image"}]))]},
        r"^samples\[1\].messages\[0\] has an image",
    ),
    "a log without samples": ({"version": 2, "status": "error", "eval": {}, "samples": []}, r"^'samples' is empty"),
    "a tool of the provider": (
        sample({"role": "assistant", "content": [{"type": "tool_use", "tool_type": "web_search", "name": "s"}]}),
        r"has a part of type 'tool_use', which is no text",
    ),
    "a span": ({"traceId": "t", "input": {"order_id": 1}, "output": "x"}, r"'input' is an object without messages"),
    "a tool's observation": (
        {"traceId": "t", "type": "TOOL", "input": "a", "output": "b"},
        r"observation of type TOOL: give only those of type GENERATION",
    ),
    "no output": ({"traceId": "t", "input": "Hi", "output": None}, r"^'output' is missing"),
    "a failed run": (
        {"inputs": {"input": "Hi"}, "outputs": None, "error": "Time\nout"},
        r"^the run failed \(Time out\)",
    ),
    "a run without answer": ({"inputs": {"input": "Hi"}, "outputs": None}, r"^'outputs' is missing"),
    "a list of a text": ({"inputs": {"messages": ["Hi"]}, "outputs": {}}, r"^'inputs.messages' is a list of 1 that"),
    "two generations": (
        {"inputs": {"input": "Hi"}, "outputs": {"generations": [[{"text": "a"}, {"text": "b"}]]}},
        r"'outputs.generations' is a list of 2 that are not all messages",
    ),
    "an output that is a number": (
        {"instruction": "Add", "input": "1 2", "output": 3},
        r"^'output' is int: give a text",
    ),
    "an input that is a list": ({"instruction": "Add", "input": [1], "output": "3"}, r"^'input' of the row is list"),
}

NO_CHATS = [
    {"text": "A mail."},
    {"text": "A mail.", "prompt": "Hi", "completion": "Yes."},
    {"text": "A mail.", "instruction": "Hi", "output": "Yes."},
    {"text": "A mail.", "messages": 3, "conversations": 2, "system": "mail"},
    {"text": "A mail.", "input": "a", "output": "b"},
    {"text": "A mail.", "labels": ["spam"], "id": "1"},
    {"prompt": "Hi"},
    {"prompt": "Hi", "completion": None},
    {"prompt": 3, "completion": 4},
    {"chosen": 1, "rejected": 0},
    {"messages": "Hi"},
    {"inputs": "Hi", "targets": "Yes."},
    {"input": "Hi", "output": "Yes."},
    {"question": "Hi", "choices": ["a", "b"]},
    {"text": "A mail.", "body": {"messages": [ASKED]}},
    {"text": "A mail.", "response": {"status_code": 200}},
    {"custom_id": "r", "response": None},
    {"custom_id": "r", "error": {"code": 1}},
    {"custom_id": "r", "response": "Hi", "error": {"code": 1}},
    {"text": "A mail.", "response": None, "error": {"code": 1}},
    {"eval": {}, "samples": []},
    {"eval": "rain", "status": "success", "samples": []},
    {"eval": {}, "status": "success", "samples": 3},
    {"type": "GENERATION", "input": "Hi"},
    {"type": "GENERATION", "output": "Hi"},
    {"inputs": {"input": "Hi"}},
    {"inputs": "Hi", "outputs": "Yes."},
    {"custom_id": "r", "url": "/v1/embeddings", "body": {"input": "Hi"}},
    {},
]


@pytest.mark.parametrize(("shape", "row", "messages"), ROWS.values(), ids=ROWS)
def test_rows_become_chats(shape, row, messages):
    before = json.dumps(row)
    assert chats_of(row) == [ShapedChat(shape, messages)]
    assert json.dumps(row) == before  # the caller's row stays


@pytest.mark.parametrize(("shape", "row", "chosen", "rejected"), PAIRS.values(), ids=PAIRS)
def test_pairs_become_two_chats(shape, row, chosen, rejected):
    assert chats_of(row) == [ShapedChat(shape, chosen, None, "chosen"), ShapedChat(shape, rejected, None, "rejected")]


@pytest.mark.parametrize(
    ("row", "tools"),
    [
        ({"messages": [ASKED], "tools": [TOOL]}, [TOOL]),
        ({"messages": [ASKED], "tools": json.dumps([TOOL])}, [TOOL]),
        ({"messages": [ASKED], "tools": []}, None),
        ({"system": "Be brief.", "messages": [ASKED], "tools": [ANTHROPIC_TOOL]}, [TOOL]),
        ({"custom_id": "r", "method": "POST", "body": {"messages": [ASKED], "tools": [TOOL]}}, [TOOL]),
        ({"conversations": [ASKED], "tools": json.dumps([TOOL])}, [TOOL]),
        ({"prompt": "Hi", "completion": [YES], "tools": [TOOL]}, [TOOL]),
        ({"traceId": "t", "input": {"messages": [ASKED], "tools": [TOOL]}, "output": "Yes."}, [TOOL]),
        (
            {
                "inputs": {"messages": [ASKED], "tools": [TOOL]},
                "outputs": {"output": "Yes."},
                "extra": {"invocation_params": {"tools": []}},
            },
            [TOOL],
        ),
        (
            {
                "inputs": {"input": "Hi"},
                "outputs": {"output": "Yes."},
                "extra": {"invocation_params": {"tools": [TOOL]}},
            },
            [TOOL],
        ),
    ],
)
def test_tools_become_those_of_openai(row, tools):
    (chat,) = chats_of(row)
    assert chat.tools == tools


def test_choices_and_samples_are_chats_of_their_own():
    assert [chat.messages for chat in chats_of(batch(YES, NO))] == [[YES], [NO]]
    log = {"version": 2, "status": "success", "eval": {"task": "rain"}, "samples": [sample(ASKED, YES), sample(ASKED)]}
    assert [chat.messages for chat in chats_of(log)] == [[ASKED, YES], [ASKED]]


@pytest.mark.parametrize(("row", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_rows_are_refused_in_one_line(row, reason):
    with pytest.raises(ChatRefused, match=reason) as refused:
        chats_of(row)
    assert "\n" not in str(refused.value) and ": " in str(refused.value)


def test_no_row_is_taken_for_another_shape():
    rows = [(shape, row) for shape, row, *_ in (*ROWS.values(), *PAIRS.values())]
    assert {shape for shape, _ in rows} == set(SHAPES) == set(FIELDS)
    for shape, row in rows:
        assert shape_of(row) == shape
        named = {name: value for name, value in row.items() if name in FIELDS[shape]}
        assert chats_as(shape, named) == chats_of(row)  # its fields hold the chat
        for more in ({"text": "A mail."}, {"score": 1.5, "meta": {"messages": []}, "id": "x"}):
            expected = "" if "text" in more and shape in ("prompt and completion", "Alpaca") else shape
            assert shape_of({**row, **more}) == expected
        for chat in chats_of(row):
            check_said(chat.messages)


@pytest.mark.parametrize("row", NO_CHATS)
def test_other_rows_are_no_chats(row):
    assert shape_of(row) == "" and chats_of(row) == []


def test_shape_can_be_stated():
    row = {"text": "A mail.", "prompt": "Rain in Oslo?", "completion": "Yes."}
    assert chats_as("prompt and completion", row) == [ShapedChat("prompt and completion", [ASKED, YES])]
    both = {"messages": [ASKED], "instruction": "Rain in Oslo?", "output": "Yes."}
    assert chats_as("Alpaca", both)[0].messages == [ASKED, YES] and shape_of(both) == "OpenAI messages"
    for shape in SHAPES:
        with pytest.raises(ChatRefused, match=r": (give|leave out)"):
            chats_as(shape, {"text": "A mail."})
    with pytest.raises(ChatRefused, match=r"no shape is named 'alpaca', did you mean 'Alpaca'\?: give one of OpenAI"):
        chats_as("alpaca", row)


def places(value, at=()):
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(inner, (*at, key))


def replaced(value, place, other):
    if not place:
        return other
    copied = value.copy()
    copied[place[0]] = replaced(value[place[0]], place[1:], other)
    return copied


def test_any_other_value_is_refused_or_gives_a_chat():
    refused = 0
    for shape, row, *_ in (*ROWS.values(), *PAIRS.values()):
        for place in places(row):
            for other in (None, 3, "x", [], {}, ["x"], [{}], {"type": [1]}):
                try:
                    for chat in chats_as(shape, replaced(row, place, other)):
                        check_said(chat.messages)
                except ChatRefused as error:
                    assert "\n" not in str(error)
                    refused += 1
    assert refused > 1000
