"""Collected training states: every token with its characters and labels, for any trainer."""

import json
from datetime import datetime

import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.linear_model import LogisticRegression
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import chat_template_utils

from corpora import make_tokenizer
from lab.training.test_train import rows
from probemon import DynamicProbeManager
from probemon.core.inputs import prepare_input
from probemon.core.probes import InputSpec
from probemon.errors import ConfigError, TrainingError
from probemon.lab.training.collect import collect
from probemon.lab.training.logistic import Dense, Targets, fit_logistic

SITE = "resid_post.1"


@pytest.fixture(scope="module")
def texts():
    spans = [{"text": "abczzabc", "spans": [{"start": 3, "end": 5, "concept": "zed"}]}]
    return [*rows(20), *spans, {"text": "nothing is said of this"}]


@pytest.fixture(scope="module")
def collected(model, texts, tmp_path_factory):
    return collect(model, make_tokenizer(), texts, tmp_path_factory.mktemp("states") / "s", sites=[SITE])


def test_every_token_has_its_characters_and_labels(collected, texts):
    assert collected.left_out == 0
    tokens = load_file(collected.folder / "tokens.safetensors")
    written = [json.loads(line) for line in (collected.folder / "texts.jsonl").read_text().splitlines()]
    assert [row["text"] for row in written] == [row["text"] for row in texts]
    assert len(tokens["document"]) == sum(len(row["text"]) for row in texts)
    for row in range(len(tokens["document"])):
        document, position = tokens["document"][row], tokens["position"][row]
        assert (tokens["start"][row], tokens["end"][row]) == (position, position + 1)
        text = texts[document]
        for p, id in enumerate(collected.concepts):
            if "spans" in text:
                wanted = int(position in (3, 4)) if id == "zed" else -1
            else:
                wanted = 1 if id in text.get("labels", ()) else 0 if id in text.get("not", ()) else -1
            assert tokens["known"][row, p] == wanted


def test_collected_files_train_the_same_weights_in_scikit_learn(collected):
    """From the files alone, in numpy; beside prepared inputs and the fit that a pack is made with."""
    tokens, states = (
        load_file(collected.folder / "tokens.safetensors"),
        load_file(collected.folder / f"{SITE}.safetensors"),
    )
    x = states["states"].astype(np.float64)
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    label = tokens["known"][:, collected.concepts.index("zed")]
    use = label >= 0
    x, y, document = x[use], label[use], tokens["document"][use]
    x = (x - x.mean(axis=0)) / x.std(axis=0, ddof=1)
    weight = np.zeros(len(y))
    for side in (0, 1):  # both sides weigh the same, so do a side's parts, here the tokens of a document with one label
        parts = np.unique(document[y == side])
        for part in parts:
            weight[(document == part) & (y == side)] = 0.5 / len(parts) / ((document == part) & (y == side)).sum()
    by_hand = LogisticRegression(C=100, tol=1e-10, max_iter=5000).fit(x, y, sample_weight=weight)

    part = np.unique(document * 2 + y, return_inverse=True)[1]
    known = np.asarray([y[part == i][0] for i in range(part.max() + 1)], dtype=np.int8)[:, None]
    rows = np.flatnonzero(use)
    own = prepare_input(collected.states(SITE)[torch.from_numpy(rows)], InputSpec(SITE, "rmsnorm"), torch.float32)
    own = (own - own.mean(0)) / own.std(0)
    w, b = fit_logistic(Dense(own), Targets(torch.from_numpy(part), torch.from_numpy(known)), torch.tensor([0.01]))
    assert np.abs(w[0].numpy() - by_hand.coef_[0]).max() < 1e-4
    assert abs(float(b[0]) - by_hand.intercept_[0]) < 1e-4


def test_parquet_holds_the_same(collected, tmp_path):
    collected.write_parquet(tmp_path / "states.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "states.parquet")
    assert table.num_rows == len(collected.document)
    assert (table["start"].to_numpy() == collected.start).all()
    assert (table["label:zed"].to_numpy() == collected.known[:, collected.concepts.index("zed")]).all()
    states = np.stack(table[SITE].to_pylist())
    assert (states == collected.states(SITE)[torch.arange(table.num_rows)].float().numpy()).all()
    assert [path.name for path in tmp_path.iterdir()] == ["states.parquet"]


def test_manager_collects_the_inputs_of_its_probes(model, pack, texts, tmp_path):
    found = DynamicProbeManager(pack).collect(model, make_tokenizer(), texts, tmp_path / "s", budget=4000)
    assert found.store.sites == tuple(pack.sites)
    assert 0.5 < len(found.document) * found.store.kinds[SITE].row_bytes / 4000 < 1.6
    n_tokens = sum(len(row["text"]) for row in texts)
    assert found.left_out == n_tokens - len(found.document) > 0
    with pytest.raises(TrainingError, match="there is no example"):
        DynamicProbeManager(pack).collect(model, make_tokenizer(), [], tmp_path / "t")


CHATS = [
    {"messages": [{"role": "user", "content": "why é?"}, {"role": "assistant", "content": f"whale {i} é "}]}
    for i in range(3)
]
DATED = "on {{ strftime_now('%A') | lower }}\n{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"


def test_chats_count_the_same_characters_without_offsets(tmp_path):
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = DATED
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    host = LlamaForCausalLM(config).eval()
    found = collect(host, tokenizer, CHATS, tmp_path / "s", sites=[SITE])
    for i in range(3):
        assert tokenizer.decode(found.token[found.document == i]) == f"whale {i} é"
    assert set(found.start) == {-1}
    asked = collect(host, tokenizer, CHATS, tmp_path / "u", sites=[SITE], roles=["user"])
    assert tokenizer.decode(asked.token[asked.document == 0]) == "why é?"
    with pytest.raises(TrainingError, match="example 0: which tokens are of assistant is unknown: Pairs does not say"):
        collect(host, Pairs(tokenizer), CHATS, tmp_path / "p", sites=[SITE])


class Pairs:
    """A tokenizer that says no places and has tokens of two characters, which lie across borders."""

    is_fast = False

    def __init__(self, tokenizer):
        self._tokenizer, self.chat_template = tokenizer, tokenizer.chat_template

    def apply_chat_template(self, messages, tokenize=True, **options):
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return self(text)["input_ids"] if tokenize else text

    def __call__(self, text, **options):
        return {"input_ids": [sum(map(ord, text[i : i + 2])) for i in range(0, len(text), 2)]}


def test_states_of_chats_are_the_same_on_another_day(model, tmp_path, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = DATED
    written = []
    for year in (2026, 2031):
        clock = type("Clock", (), {"now": staticmethod(lambda year=year: datetime(year, 11, 28))})
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        collect(model, tokenizer, CHATS, tmp_path / "s", sites=[SITE])
        written.append({path.name: path.read_bytes() for path in sorted((tmp_path / "s").iterdir())})
    assert written[0] == written[1] and "on wednesday" in written[0]["texts.jsonl"].decode()
    stated = collect(model, tokenizer, CHATS, tmp_path / "s", sites=[SITE], chat_date="2024-02-29")
    assert "on thursday" in (stated.folder / "texts.jsonl").read_text()
    with pytest.raises(ConfigError, match="chat_date is 'today': give a day"):
        collect(model, tokenizer, CHATS, tmp_path / "s", sites=[SITE], chat_date="today")
