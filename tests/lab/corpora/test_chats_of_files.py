"""Chats of every form are the same documents for `analyze` and the same examples for `train`."""

from __future__ import annotations

import json
import zipfile

import pytest

from probemon.errors import ConfigError, TrainingError
from probemon.lab.corpora.documents import read_documents
from probemon.lab.training.examples import read_examples

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TURNS = {
    "OpenAI messages": {"messages": SAID},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "prompt and completion": {"prompt": "Hi", "completion": "Hello"},
    "Alpaca": {"instruction": "Hi", "input": "", "output": "Hello"},
    "Anthropic messages": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello"}],
            },
        ]
    },
}


def told(source):
    return [
        (d.shape, d.reason, [(m["role"], m["content"]) for m in json.loads(d.chat)["messages"]] if d.chat else d.text)
        for d in read_documents(source)
    ]


@pytest.mark.parametrize("shape", TURNS)
def test_chat_of_each_form_is_a_document_and_an_example(tmp_path, shape):
    row = {"id": "x", **TURNS[shape], "labels": ["greets"]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    [document] = read_documents(tmp_path / "chats.jsonl")
    assert (document.id, document.shape, document.reason) == ("x", shape, "")
    assert told(tmp_path / "chats.jsonl") == [(shape, "", [("user", "Hi"), ("assistant", "Hello")])]
    assert document.fields["labels"] == ["greets"]
    [example] = read_examples(tmp_path / "chats.jsonl").texts
    assert [(m["role"], m["content"]) for m in example.messages] == [("user", "Hi"), ("assistant", "Hello")]
    assert example.labels == {"greets": True}


def test_pair_is_two_documents_and_its_labels_are_refused():
    pair = {"id": 7, "prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    found = list(read_documents([pair, {"text": "plain"}]))
    assert [(d.index, d.id, d.fields.get("part")) for d in found] == [
        (0, "7/chosen", "chosen"),
        (1, "7/rejected", "rejected"),
        (2, "1", None),
    ]
    assert len(read_examples([pair], labelled=False).texts) == 2
    with pytest.raises(TrainingError, match="has 2 chats, and 'labels' may be of one of them"):
        read_examples([{**pair, "labels": ["greets"]}])


def test_malformed_chat_is_a_bad_document_and_an_error_in_training():
    row = {"conversations": [{"from": "human", "value": 5}]}
    [(shape, reason, _)] = told([row])
    assert shape == "ShareGPT" and "read as ShareGPT" in reason and "value" in reason
    with pytest.raises(TrainingError, match="read as ShareGPT"):
        read_examples([row])


def test_form_may_be_given_and_an_unknown_one_is_refused():
    row = {"text": "about it", "prompt": "Hi", "completion": "Hello"}
    assert told([row]) == [("", "", "about it")]
    [document] = read_documents([row], shape="prompt and completion")
    assert document.shape == "prompt and completion" and document.fields == {"text": "about it"}
    with pytest.raises(ConfigError, match="format is 'sharegpt'"):
        read_documents([row], shape="sharegpt")


def test_log_of_inspect_gives_its_samples(tmp_path):
    sample = {"id": "s", "epoch": 1, "input": "Hi", "target": "", "messages": SAID, "output": {}}
    with zipfile.ZipFile(tmp_path / "run.eval", "w") as log:
        log.writestr("header.json", "{}")
        for i in (1, 2):
            log.writestr(f"samples/{i}_epoch_1.json", json.dumps({**sample, "id": i}))
    assert told(tmp_path / "run.eval") == [("inspect-ai sample", "", [("user", "Hi"), ("assistant", "Hello")])] * 2
