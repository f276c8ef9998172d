"""Every part of a chat is found in what published templates write, or the chat is refused by name."""

from pathlib import Path

import pytest

from corpora import make_tokenizer
from probemon.errors import ChatRefused
from probemon.host.chat_forms import PARTS, reasoning_in
from probemon.host.chat_parts import parts_of
from probemon.host.chat_template import render

trl = pytest.importorskip("trl")
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    if not path.stem.endswith("_training")
}
WHY, TOOL = "It is large and sings.", {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c12345678", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": TOOL}}]


def user(text):
    return {"role": "user", "content": text}


def model(text, **more):
    return {"role": "assistant", "content": text, **more}


CHATS = {
    "plain": [user("What sings?"), model("A whale sings.")],
    "system": [{"role": "system", "content": "Be brief."}, user("What sings?"), model("A whale.")],
    "turns": [user("Hi."), model("Hello!"), user("What sings?"), model("Hello!")],
    "white space": [user("What is there?\n"), model("A whale. \n"), user(" And now? "), model("A fish.\n\n")],
    "parts": [user([{"type": "text", "text": "What sings?"}]), model("A whale.")],
    "tools": [
        user("Add 2."),
        model("", tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "c12345678", "name": "add", "content": "4"},
        model("It is 4."),
    ],
    "think": [user("What sings?"), model(f"<think>\n{WHY}\n</think>\n\nA whale.")],
    "only the end of think": [user("What sings?"), model(f"{WHY}\n</think>\n\nA whale.")],
    "think before": [user("What sings?"), model(f"<think>\n{WHY}\n</think>\n\nA whale."), user("Sure?"), model("Yes.")],
    "reasoning_content": [user("What sings?"), model("A whale.", reasoning_content=WHY)],
}
ROLES, LAST = "Conversation roles must alternate", "leaves out tool_calls of messages[1]"
NO_TOOLS = ("deepseek_r1_distill", "deepseekv3", "idefics3", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm")
REFUSED = {
    ("gemma", "system"): "System role not supported",
    **dict.fromkeys([("gemma", "tools"), ("gemma3", "tools"), ("cohere", "tools"), ("cohere2", "tools")], ROLES),
    ("llava_next", "tools"): "Only user and assistant roles are supported",
    ("lfm2", "tools"): LAST,
    **{(name, "tools"): "leaves out tools" for name in NO_TOOLS},
}


def said(message):
    """Return the parts of a message, read independently of the code."""
    content = message["content"]
    content = content if isinstance(content, str) else content[0]["text"]
    reasoning = message.get("reasoning_content", "")
    if "</think>" in content:
        reasoning, content = content.split("</think>")
        reasoning = reasoning.removeprefix("<think>")
    parts = [("reasoning", reasoning.strip()), (message["role"], content.strip())]
    return [part for part in parts if part[1]]


@pytest.mark.parametrize("name", CHATS)
def test_parts_are_where_each_published_template_writes_them(name):
    tokenizer, chat = make_tokenizer(), CHATS[name]
    tools = TOOLS if name == "tools" else None
    wanted = [(at, *part) for at, message in enumerate(chat) for part in said(message)]
    for template, tokenizer.chat_template in TEMPLATES.items():
        if why := REFUSED.get((template, name)):
            with pytest.raises(ChatRefused) as refused:
                render(tokenizer, chat, tools=tools, date="2025-01-01")
            assert why in str(refused.value), template
            continue
        rendered = render(tokenizer, chat, tools=tools, date="2025-01-01")
        found = parts_of(rendered)
        texts = [(one.turn, one.part, rendered.text[one.start : one.stop].strip()) for one in found]
        # Templates may leave out reasoning before the last turn.
        assert texts == wanted or texts == [one for one in wanted if one[1] != "reasoning" or one[0] == len(chat) - 1]
        for one in found:
            if one.inside != (0, 0):
                content = rendered.said[one.turn]["content"]
                core = content[slice(*one.inside)].strip()
                first = content.index(core, one.inside[0])
                assert rendered.text[one.offset + first :].startswith(core) and one.start <= one.offset + first
        for part in PARTS:
            assert parts_of(rendered, [part]) == tuple(one for one in found if one.part == part)


def test_reasoning_that_the_template_never_writes_follows_the_generation_prompt():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES["deepseekv3"]
    chat = CHATS["think"]
    prompt = render(tokenizer, chat[:1], add_generation_prompt=True).text
    assert prompt.endswith("<think>\n")
    for name in ("think", "only the end of think", "reasoning_content"):
        rendered = render(tokenizer, CHATS[name])
        assert rendered.text == f"{prompt}{WHY}\n</think>\n\nA whale."
        assert rendered.ids == tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<think></think>{% endif %}"
    with pytest.raises(ChatRefused, match=r"leaves out the reasoning of messages\[1\]"):
        render(tokenizer, chat)


def test_prompts_state_earlier_reasoning_in_the_field_that_the_template_reads():
    tokenizer = make_tokenizer()
    chat = [*CHATS["tools"][:1], model("", reasoning_content=WHY, tool_calls=[CALL]), CHATS["tools"][2]]
    for name in ("qwen3", "gptoss"):
        tokenizer.chat_template = TEMPLATES[name]
        assert WHY in render(tokenizer, chat, tools=TOOLS, add_generation_prompt=True, date="2025-01-01").text
    tokenizer.chat_template = TEMPLATES["qwen2_5"]
    assert WHY not in render(tokenizer, chat, tools=TOOLS, add_generation_prompt=True).text


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("<think>\nSo.\n</think>\n\nYes.", "So.", "Yes."),
        ("\n<think>So.</think>Yes.", "So.", "Yes."),
        ("So.\n</think>\n\nYes.", "So.", "Yes."),
        ("So.</think>Yes.", None, None),  # it may speak of the mark
        ("Write <think> first.\n</think>\nYes.", None, None),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>So it", "So it", ""),
        ("<think>", "", ""),
        ("\n</think>\nYes.", "", "Yes."),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("Yes.", None, None),
        ("Write <think> first.", None, None),
    ],
)
def test_reasoning_is_found_in_a_content(content, reasoning, answer):
    found = reasoning_in(content)
    assert (
        found is None if reasoning is None else (content[slice(*found[:2])], content[found[2] :]) == (reasoning, answer)
    )
