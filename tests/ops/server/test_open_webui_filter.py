"""The filter for Open WebUI, given what the server really sends; Open WebUI itself does not run here."""

import asyncio
import importlib.util
import json
import re

import pytest

from run_examples import EXAMPLES

CHAT = [{"role": "user", "content": "Which animals live in the sea?"}]

NOTHING = {
    "leading": [],
    "n_leading": 0,
    "stopped_by": None,
    "n_withheld": 0,
    "unlike": "",
    "coverage": {"unseen": 1, "tokens": 3},
}


@pytest.fixture
def filter_module():
    spec = importlib.util.spec_from_file_location("open_webui_filter", EXAMPLES / "open_webui_filter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chunks_of(server, body):
    answer = server.ask("POST", "/v1/chat/completions", body | {"stream": True})
    assert answer.status == 200, answer.content
    lines = re.findall(rb"data: (\{.*\})\n", answer.content)
    return [json.loads(line) for line in lines]


def filtered(one, chunks):
    """What the chunks become, and what was said meanwhile."""
    said = []

    async def emit(event):
        said.append(event["data"])

    async def run():
        return [await one.stream(chunk, emit, {"message_id": "m1"}) for chunk in chunks]

    return asyncio.run(run()), said


def test_filter_shows_status_lines_and_a_table_and_removes_our_keys(server, filter_module):
    one = filter_module.Filter()
    concept = server.get("/v1/probemon/pack")["concepts"][0]
    one.valves.stop_on = concept["id"]
    body = one.inlet({"model": "tiny", "messages": CHAT, "max_tokens": 12, "temperature": 0})
    chunks = chunks_of(server, body)
    told = [chunk["choices"][0]["delta"] for chunk in chunks]
    events = [event for delta in told for event in delta.get("probemon", {}).get("events", ())]
    [summary] = [delta["probemon_summary"] for delta in told if "probemon_summary" in delta]
    assert events and summary["stopped_by"] == events[-1]
    text = "".join(delta.get("content", "") for delta in told)
    passed_on, said = filtered(one, chunks)
    assert not any(key.startswith("probemon") for chunk in passed_on for key in chunk["choices"][0]["delta"])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in passed_on) == text
    assert [line["done"] for line in said] == [*[False] * len(events), True]
    assert f"stopped by {concept['name']}" in said[-1]["description"]
    shown = one.outlet({"messages": [*CHAT, {"role": "assistant", "content": text}]}, {"message_id": "m1"})
    content = shown["messages"][-1]["content"]
    assert content.startswith(text) and content.endswith(said[-1]["description"].removeprefix("probemon: "))
    assert content.count("\n| ") == 1 + min(len(summary["leading"]), one.valves.n_leading)
    again = one.outlet({"messages": [{"role": "assistant", "content": "x"}]}, {"message_id": "m1"})
    assert again["messages"][-1]["content"] == "x"


def test_unknown_rule_is_not_shown_as_a_score_over_its_threshold(filter_module):
    event = {"name": "animal", "score": 0.0, "threshold": 0.99, "blind": "hidden state is not finite"}
    summary = NOTHING | {"stopped_by": event}
    delta = {"probemon": {"events": [event]}, "probemon_summary": summary}
    _, said = filtered(filter_module.Filter(), [{"choices": [{"delta": delta}]}])
    why = "animal not known: hidden state is not finite"
    assert [line["description"] for line in said] == [
        f"probemon: {why}",
        f"probemon: no concept over its threshold; stopped: {why}; 1 of 3 tokens unseen",
    ]


def test_names_from_a_pack_are_escaped_in_markdown(filter_module):
    path = ["a|b", "[x](javascript:y)", "<img>"]
    concept = {"path": path, "name": "a", "score": 0.5, "strength": None, "precision": None}
    summary = NOTHING | {"leading": [concept], "n_leading": 1}
    row = filter_module.table(summary, 3).splitlines()[2]
    assert row == r"| a\|b > \[x\]\(javascript:y\) > \<img> | 0.50 |  |  |"


def test_withheld_and_unfamiliar_tokens_are_reported(filter_module):
    said = "2 of 3 tokens are unlike the text that the pack was calibrated on"
    assert filter_module.line(NOTHING | {"unlike": said, "n_withheld": 2}) == (
        f"no concept over its threshold; 1 of 3 tokens unseen; 2 withheld; {said}"
    )
