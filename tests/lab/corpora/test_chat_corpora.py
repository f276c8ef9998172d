"""Chats as documents have the tokens and scores of the same chat watched, in every input format."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from conftest import make_pack
from corpora import close, make_tokenizer
from probemon import DynamicProbeManager
from probemon.errors import ConfigError, PackError
from probemon.host.chat_forms import PARTS
from probemon.lab.calibration.calibrated_pack import write_calibrated
from probemon.lab.calibration.score_statistics import ScoreStatistics
from probemon.lab.cli.scored_documents import ScoredDocuments
from probemon.lab.corpora.analyze import analyze
from probemon.lab.corpora.corpus import CorpusScorer, score_documents
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.windows import Reading, shards
from probemon.packs.group import PackGroup, stated_chat_dates
from probemon.packs.pack import ProbePack

CHAT = [{"role": "user", "content": "where do whales live"}, {"role": "assistant", "content": "in the sea."}]
TOOL_CHAT = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": '{"a":"b"}'}}]},
]
TURNS = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{{ eos_token }}{% endfor %}"
)
TEMPLATE = "{{ bos_token }}" + TURNS
DATED = "{{ bos_token }}on {{ strftime_now('%A') | lower }}{{ eos_token }}" + TURNS
TEXT = "<s>user where do whales live</s>assistant in the sea.</s>"


def tokenizer_of(template=TEMPLATE, adds_bos=False):
    made = make_tokenizer(adds_bos)
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def manager(pack):
    return DynamicProbeManager(pack, load_threshold=0.2, keep_top_k=5, impl="cpu", strategy="descent")


def planned(manager, model, tokenizer, source, **reading):
    [shard] = shards(read_documents(source))
    return CorpusScorer(manager, model, tokenizer, Reading(**reading)).reader.plan(shard)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_chat_document_has_the_scores_of_the_watched_chat(manager, model, adds_bos):
    tokenizer = tokenizer_of(adds_bos=adds_bos)
    ids = torch.tensor([tokenizer.apply_chat_template(CHAT, return_dict=False)])
    with manager.attach(model, tokenizer) as run:
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            stopping_criteria=run.stopping_criteria,
        )
    online = run.result(out).scores
    # A rendered chat in a text, too: it has its own beginning.
    for row, reading in (({"messages": CHAT}, {}), ({"text": TEXT}, {"parse_special": True})):
        [scored] = score_documents(manager, model, tokenizer, read_documents([row]), reading=Reading(**reading))
        assert scored.document.text == TEXT and not scored.tokens.prefix
        assert scored.tokens.ids.tolist() == ids[0].tolist()
        for t in range(ids.shape[1]):
            assert online.active(t).tolist() == scored.scores.active(t).tolist()
            assert close(online.active_scores(t), scored.scores.active_scores(t))


def test_chats_are_read_from_rows_jsonl_parquet_and_arrays(manager, model, tmp_path):
    rows = [{"messages": CHAT, "id": "a"}, {"messages": TOOL_CHAT, "id": "b"}, {"text": "whales sing", "id": "c"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist([{"text": None, "messages": None, **row} for row in rows])
    pq.write_table(table, tmp_path / "a.parquet")
    arrays = [{**row, "messages": np.array(row["messages"], dtype=object)} for row in rows if "messages" in row]
    for source in (rows, tmp_path / "a.jsonl", tmp_path / "a.parquet", [*arrays, rows[2]]):
        found = planned(manager, model, tokenizer_of(), source).documents
        assert [(document.id, document.reason) for document in found] == [("a", ""), ("b", ""), ("c", "")]
        texts = [TEXT, '<s>user where do whales live</s>assistant {"a": "b"}</s>', "whales sing"]
        assert [document.text for document in found] == texts
    only = tmp_path / "only.parquet"
    pq.write_table(pa.Table.from_pylist(rows[:2]), only)
    assert [document.text for document in planned(manager, model, tokenizer_of(), only).documents] == texts[:2]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": CHAT, "text": "a"}, "it has 'messages' and 'text': give only one of them"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"messages\[0\] has the role 'bot'"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\] has a content that is no text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\] has a content that is no text",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "empty"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
        ({"messages": CHAT, "tools": "add"}, "'tools' is str: give a list"),
        ({"messages": CHAT, "tools": [{"name": "add"}]}, "the chat template leaves out tools"),
        ({"messages": [{**CHAT[0], "when": object()}]}, "cannot be written as JSON"),
        ({"messages": "a chat"}, "'messages' is a text: give a list of messages"),
    ],
)
def test_unreadable_chat_is_a_bad_document_with_its_reason(manager, model, row, reason):
    [bad, good] = planned(manager, model, tokenizer_of(), [row, {"messages": CHAT}]).documents
    with pytest.raises(ValueError, match=reason):
        raise ValueError(bad.reason)
    assert good.text == TEXT and not good.reason
    without = planned(manager, model, make_tokenizer(), [{"messages": CHAT}]).documents[0]
    assert "this model's tokenizer has no chat template" in without.reason


def test_resuming_needs_the_same_chat_template_and_date(manager, model, tmp_path):
    rows = [{"messages": CHAT}, {"text": "whales"}]
    out = tmp_path / "out"
    first = analyze(manager, model, tokenizer_of(DATED), rows, out)
    assert first.documents().column("n_chars").to_pylist() == [len(TEXT) + len("on wednesday</s>"), 6]
    assert first.manifest["identity"]["reading"]["chat_date"] == "2025-01-01"
    analyze(manager, model, tokenizer_of(DATED), rows, out, resume=True)
    with pytest.raises(ConfigError, match="chat_template was"):
        analyze(manager, model, tokenizer_of(DATED + " "), rows, out, resume=True)
    with pytest.raises(ConfigError, match=r"reading\.chat_date was '2025-01-01', now '2025-01-02'"):
        analyze(manager, model, tokenizer_of(DATED), rows, out, resume=True, reading=Reading(chat_date="2025-01-02"))
    other = [{"messages": [CHAT[0], {**CHAT[1], "content": "in the seb."}]}, rows[1]]
    with pytest.raises(ConfigError, match=r"document 0 \(id '0'\) has changed"):
        analyze(manager, model, tokenizer_of(DATED), other, out, resume=True)
    undated = analyze(manager, model, tokenizer_of(), rows, tmp_path / "undated")
    assert undated.manifest["identity"]["reading"]["chat_date"] is None


def test_chats_are_rendered_with_the_packs_chat_date(model, tmp_path):
    pack = make_pack(tmp_path / "a", model, provenance={"chat_date": "2024-02-29"})  # a Thursday
    found = planned(DynamicProbeManager(pack), model, tokenizer_of(DATED), [{"messages": CHAT}])
    assert found.documents[0].text.startswith("<s>on thursday</s>") and found.documents[0].chat_date == "2024-02-29"
    other = make_pack(tmp_path / "b", model, provenance={"parents": [{"provenance": {"chat_date": "2024-03-01"}}]})
    both = DynamicProbeManager(PackGroup({"a": pack, "b": other}))
    with pytest.raises(ConfigError, match="of different days, 2024-02-29 and 2024-03-01: choose the day"):
        planned(both, model, tokenizer_of(DATED), [{"messages": CHAT}])
    assert planned(both, model, tokenizer_of(DATED), [{"messages": CHAT}], chat_date="2024-03-01").n_tokens
    assert planned(both, model, tokenizer_of(), [{"messages": CHAT}]).documents[0].chat_date == ""
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["provenance"]["chat_date"] = "a thursday"
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PackError, match=r"provenance\.chat_date is 'a thursday': expected a day as YYYY-MM-DD"):
        ProbePack.open(tmp_path / "a")


def test_calibration_on_chats_stores_their_date_in_the_new_pack(manager, model, pack, tmp_path):
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": CHAT}) + '\n{"text": "whales"}\n')

    def scored(template):
        return ScoredDocuments.of(
            manager,
            model,
            tokenizer_of(template),
            str(source),
            np.arange(3),
            "benign",
            reading=Reading(),
            read=read_documents,
        )

    assert scored(TEMPLATE).chat_date is None
    ordinary = scored(DATED)
    assert [len(scores) for scores in ordinary.scores] == [
        len("user where do whales live assistant in the sea. ") + 1 + len("on wednesday "),
        6,
    ]
    statistics = ScoreStatistics.of(ordinary.scores, range(3))
    made = write_calibrated(pack, tmp_path / "new", statistics=statistics, chat_date=ordinary.chat_date)
    assert made.manifest["provenance"]["chat_date"] == "2025-01-01" and stated_chat_dates(made) == ["2025-01-01"]
    assert stated_chat_dates(pack) == []


THOUGHT = [CHAT[0], {"role": "assistant", "content": "<think>whales sing.</think>in the sea."}]
ROWS = [{"messages": THOUGHT}, {"messages": [*CHAT, CHAT[0]]}, {"text": "whales sing in the sea"}]


class Slow:
    """The tokenizer without offsets."""

    is_fast = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *texts, return_offsets_mapping=False, **options):
        return self._tokenizer(*texts, **options)


@pytest.mark.parametrize("on", [("assistant",), ("reasoning",), ("user", "assistant"), ("tool",)])
def test_rows_state_part_and_turn_and_an_analysis_of_parts_has_only_these(manager, model, tmp_path, on):
    whole = analyze(manager, model, tokenizer_of(), ROWS, tmp_path / "whole", floor=0.0)
    table = whole.scores()
    texts, found = whole.documents().column("text").to_pylist(), {}
    for row in table.to_pylist():
        found.setdefault((row["document"], row["turn"], row["part"]), {})[row["start"]] = row["token"]
    said = {place: "".join(tokens[start] for start in sorted(tokens)) for place, tokens in found.items()}
    # The tokenizer of this test has a token for each character.
    assert {place: text for place, text in said.items() if place[1] is not None} == {
        (0, 0, "user"): "where do whales live",
        (0, 1, "reasoning"): "whales sing.",
        (0, 1, "assistant"): "in the sea.",
        (1, 0, "user"): "where do whales live",
        (1, 1, "assistant"): "in the sea.",
        (1, 2, "user"): "where do whales live",
    }
    assert said[2, None, None] == texts[2] and "<think>" in said[0, None, None]
    part = analyze(manager, model, tokenizer_of(), ROWS, tmp_path / "part", floor=0.0, reading=Reading(on=on))
    wanted = [row for row in table.to_pylist() if row["part"] in on or row["document"] == 2]
    rows = part.scores().to_pylist()
    assert [{**row, "score": 0} for row in rows] == [{**row, "score": 0} for row in wanted]
    assert close(np.asarray([row["score"] for row in rows]), np.asarray([row["score"] for row in wanted]))
    places = {(row["document"], row["position"]) for row in wanted}
    documents = part.documents().to_pylist()
    for document in documents:
        has_some = any(index == document["document"] for index, _ in places)
        assert bool(document["reason"]) == (not has_some)
        assert document["n_tokens"] == sum(index == document["document"] for index, _ in places)
    assert part.manifest["totals"]["tokens"] == len(places)
    concepts = part.concepts().to_pylist()
    for concept in concepts:
        own = [row for row in wanted if row["concept"] == concept["concept"]]
        assert concept["n_tokens"] == len(own) and concept["score_sum"] == pytest.approx(sum(r["score"] for r in own))
        assert dict(zip(PARTS, concept["n_by_part"], strict=True)) == {
            part: sum(row["part"] == part for row in own) for part in PARTS
        }
    for row in part.summary().to_pylist():
        own = [r for r in wanted if (r["document"], r["concept"]) == (row["document"], row["concept"])]
        seen = len({r["position"] for r in wanted if r["document"] == row["document"]})
        assert row["n_tokens"] == len(own) and row["mean_score"] == pytest.approx(sum(r["score"] for r in own) / seen)


def test_parts_are_found_without_offsets_and_other_readers_get_only_them(manager, model):
    read = [{"messages": THOUGHT}, {"text": "whales"}]
    for tokenizer in (tokenizer_of(), Slow(tokenizer_of())):
        scored = list(
            score_documents(manager, model, tokenizer, read_documents(read), reading=Reading(on=("reasoning",)))
        )
        assert [len(one.tokens) for one in scored] == [len("whales sing."), 6]
        assert [len(one.scores) for one in scored] == [len("whales sing."), 6]
        [full, _] = score_documents(manager, model, tokenizer, read_documents(read))
        at = np.flatnonzero(full.tokens.part == PARTS.index("reasoning"))
        assert len(at) == len("whales sing.") and len(full.scores) > len(at)
        for t, place in enumerate(at.tolist()):
            assert close(scored[0].scores.active_scores(t), full.scores.active_scores(place))


def test_parts_that_cannot_be_found_are_a_reason_only_if_they_are_asked_for(manager, model):
    strange = tokenizer_of("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    for on, reason in (((), ""), (("user",), "which of its tokens are of user is unknown: the model's chat template")):
        [document] = planned(manager, model, strange, [{"messages": CHAT}], on=on).documents
        assert document.reason.startswith(reason) and bool(document.reason) == bool(reason)
    with pytest.raises(ConfigError, match=r"on is 'judge'"):
        Reading(on=("judge",))


def test_turns_have_the_numbers_of_their_messages_in_the_file(manager, model):
    said = {"system": "the sea.", "messages": CHAT}
    body = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT}}
    for row, wanted in (
        (said, [(-1, "system"), (0, "user"), (1, "assistant")]),
        (body, [(0, "user"), (1, "assistant")]),
    ):
        [document] = planned(manager, model, tokenizer_of(), [row]).documents
        assert [(part.turn, part.part) for part in document.parts] == wanted
