"""An analysis scores every token as watching would, also after interruptions and with several processes."""

import dataclasses
import io
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from conftest import LAYERS, make_model, make_pack, n_hooks
from corpora import LETTERS, close, make_tokenizer, oracle, random_texts
from probemon import DynamicProbeManager
from probemon.engine.audit import Audit
from probemon.engine.choice import Choice
from probemon.errors import ConfigError, ModelMismatch, SinkFailed
from probemon.lab.cli.analyze import _show as shown
from probemon.lab.corpora import analysis_files, analysis_folder
from probemon.lab.corpora import analyze as offline
from probemon.lab.corpora.analysis_files import COUNTED, TABLES
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.analyze import analyze, kernel_of
from probemon.lab.corpora.corpus import CorpusScorer, score_documents
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.windows import Reading, Window, WindowTokens, batches, cut, encode, shards
from probemon.packs.group import PackGroup
from probemon.packs.pack import ProbePack
from static_page import read

SMALL = Reading(Window(24, 6), batch_tokens=100, batch_rows=5)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def manager(pack):
    return DynamicProbeManager(
        pack, load_threshold=0.2, keep_top_k=5, max_loaded_probes=25, impl="cpu", strategy="descent"
    )


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr("probemon.lab.corpora.windows.SHARD_DOCUMENTS", 7)


def corpus():
    rows = [{"text": text, "id": f"d{i}"} for i, text in enumerate(random_texts(30))]
    rows[7]["text"] = "  "  # white space alone has tokens, too
    return [*rows[:3], {"id": "empty", "text": ""}, *rows[3:], 5]


def tables(out):
    analysis = Analysis.open(out)
    whole = {name: getattr(analysis, name)() for name in TABLES}
    return {name: table.to_pydict() for name, table in whole.items()}, analysis.manifest["totals"]


@pytest.mark.parametrize("parse_special", [True, False])
def test_text_with_its_own_bos_gets_it_in_every_window(model, manager, tokenizer, tmp_path, parse_special):
    """The windows of both texts hold the same tokens, so what follows the beginning has the same scores."""
    text = "abcabdacbdab" * 3
    scored = []
    for at, given in enumerate([text, "<s>" + text]):
        out, reading = tmp_path / str(at), Reading(Window(16, 4), parse_special=parse_special)
        scores = analyze(manager, model, tokenizer, [given], out, reading=reading).scores().to_pydict()
        begun = [position - at for position in scores["position"]]
        after = [i for i, position in enumerate(begun) if position >= 0]
        scored.append([(begun[i], scores["concept"][i], round(scores["score"][i], 5)) for i in after])
    assert (scored[0] == scored[1]) == parse_special


# -- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "size", "overlap", "n_prefix"),
    [(1, 8, 0, 0), (7, 8, 3, 1), (8, 8, 3, 1), (50, 8, 4, 1), (100, 9, 0, 2), (101, 32, 16, 0)],
)
def test_every_token_is_scored_once_with_the_most_context(n, size, overlap, n_prefix):
    tokens = WindowTokens(np.arange(n), np.arange(n), np.arange(n) + 1, (1,) * n_prefix)
    pieces = cut(tokens, 3, Window(size, overlap))
    scored = [t for piece in pieces for t in range(piece.scored, piece.stop)]
    assert scored == list(range(n))
    assert all(len(piece) <= size and piece.place == 3 for piece in pieces)
    for piece in pieces:
        assert piece.begin == 0 or piece.scored - piece.begin == overlap
        assert piece.begin == 0 or piece is pieces[-1] or len(piece) == size


def test_batches_have_similar_lengths_and_bounded_size():
    rng = np.random.default_rng(0)
    pieces = [
        piece
        for place in range(50)
        for piece in cut(WindowTokens(*(np.arange(rng.integers(1, 90)),) * 3, (1,)), place, Window(20, 4))
    ]
    made = batches(pieces, max_tokens=64, max_rows=5)
    assert sorted((p.place, p.begin) for batch in made for p in batch) == sorted((p.place, p.begin) for p in pieces)
    assert all(len(batch) * max(map(len, batch)) <= 64 and len(batch) <= 5 for batch in made)
    lengths = [len(piece) for batch in made for piece in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(b) for b in batches(pieces[:3], max_tokens=1, max_rows=9)] == [1, 1, 1]  # longer than a batch: alone


def test_shards_depend_only_on_the_documents(monkeypatch):
    monkeypatch.setattr("probemon.lab.corpora.windows.SHARD_CHARS", 100)
    made = list(shards(read_documents(corpus())))
    assert [d.index for shard in made for d in shard.documents] == list(range(32))
    assert all(
        len(s.documents) <= 7 and (len(s.documents) == 1 or sum(len(d.text) for d in s.documents) <= 100) for s in made
    )
    again = list(shards(read_documents(iter(corpus()))))
    assert [s.digest for s in made] == [s.digest for s in again]
    changed = corpus()
    changed[20]["text"] += "x"
    assert sum(a.digest != b.digest for a, b in zip(made, shards(read_documents(changed)), strict=False)) >= 1


@pytest.mark.parametrize(
    ("adds_bos", "special", "parse", "text", "ids", "prefix"),
    [
        (False, "bos", False, "ab", [4, 5], (1,)),
        (False, "tokenizer", False, "ab", [4, 5], ()),
        (True, "bos", False, "ab", [4, 5], (1,)),
        (True, "tokenizer", False, "ab", [4, 5], (1,)),
        (True, "none", False, "ab", [4, 5], ()),
        (True, "bos", True, "a<s>b", [4, 1, 5], (1,)),
        (True, "bos", False, "a<s>", [4, 3, 22, 3], (1,)),
        (True, "bos", True, "</s>", [2], (1,)),
    ],
)
def test_special_tokens_precede_a_text_without_belonging_to_it(adds_bos, special, parse, text, ids, prefix):
    found = encode(make_tokenizer(adds_bos), text, special_tokens=special, parse_special=parse)
    assert found.ids.tolist() == ids and found.prefix == prefix
    assert "".join(text[a:b] for a, b in zip(found.start, found.end, strict=True)) == text


# -- the scores ----------------------------------------------------------------------------------


def test_analysis_rows_equal_the_oracle(model, manager, tokenizer, tmp_path):
    """Every document, long and short, in mixed batches: each row, and no other, with the scores of the document
    alone.
    """
    documents = corpus()
    analysis = analyze(manager, model, tokenizer, documents, tmp_path / "out", floor=0.2, reading=SMALL)
    found = {}
    for row in analysis.scores().to_pylist():
        found.setdefault(row["document"], {}).setdefault(row["position"], {})[row["concept"]] = row
    ids = [concept["id"] for concept in manager.pack.concepts]
    n_rows = n_long = 0
    for index, document in enumerate(documents):
        if document == 5 or document["id"] == "empty":
            assert index not in found
            continue
        tokens, expected = oracle(manager, model, document["text"], n_tokens=24, overlap=6)
        n_long += len(tokens) > 23
        for t, scores in enumerate(expected):
            above = {ids[probe]: value for probe, value in scores.items() if value > 0.2}
            rows = found.get(index, {}).get(t, {})
            assert set(rows) == set(above)
            assert close([rows[c]["score"] for c in sorted(rows)], [above[c] for c in sorted(above)])
            for concept, row in rows.items():
                assert (
                    row["doc_id"] == document["id"]
                    and row["token_id"] == tokens[t]
                    and row["level"] == manager.pack.concepts[ids.index(concept)]["level"]
                )
                assert row["token"] == document["text"][t] and (row["start"], row["end"]) == (t, t + 1)
            n_rows += len(rows)
    assert n_rows == analysis.manifest["totals"]["rows"] > 1000 and n_long > 10


def test_tables_follow_from_the_scores(model, manager, tokenizer, tmp_path):
    documents = corpus()
    out = tmp_path / "out"
    analyze(manager, model, tokenizer, documents, out, floor=0.2, reading=SMALL)
    found, totals = tables(out)
    p, ids = manager.pack.n_probes, [concept["id"] for concept in manager.pack.concepts]
    active = {
        i: oracle(manager, model, d["text"], n_tokens=24, overlap=6)[1]
        for i, d in enumerate(documents)
        if d != 5 and d["id"] != "empty"
    }
    by = {}
    for document, concept, position, score in zip(
        *(found["scores"][name] for name in ("document", "concept", "position", "score")), strict=True
    ):
        by.setdefault((document, concept), []).append((score, -position))
    summary = {
        key: row
        for key, *row in zip(
            zip(found["summary"]["document"], found["summary"]["concept"], strict=True),
            *(found["summary"][n] for n in ("n_tokens", "max_score", "max_position", "mean_score")),
            strict=True,
        )
    }
    assert set(summary) == set(by)
    for (document, concept), rows in by.items():
        best, position = max(rows)
        mean = sum(scores.get(ids.index(concept), 0.0) for scores in active[document]) / len(active[document])
        n, highest, at, told = summary[document, concept]
        assert (n, highest, at) == (len(rows), best, -position) and close(told, mean)
    whole = found["concepts"]
    assert whole["concept"] == ids
    for i, concept in enumerate(ids):
        mine = [rows for (_, c), rows in by.items() if c == concept]
        assert whole["n_documents"][i] == len(mine) and whole["n_tokens"][i] == sum(map(len, mine))
        assert whole["max_score"][i] == max((max(rows)[0] for rows in mine), default=0.0)
        assert abs(whole["score_sum"][i] - sum(s.get(i, 0.0) for scores in active.values() for s in scores)) < 1e-3
    told = found["documents"]
    for i, document in enumerate(documents):
        expected = active.get(i)
        assert told["n_tokens"][i] == len(expected or ()) and told["active"][i] == sum(map(len, expected or ()))
        assert told["active"][i] + told["dropped"][i] + told["not_reached"][i] == p * told["n_tokens"][i]
        assert told["text"][i] == (document["text"] if expected else None)
        assert told["reason"][i] == (
            "" if expected else "neither a text nor an object: int" if document == 5 else "empty"
        )
    assert totals.pop("audit") == Audit(p).as_dict()
    assert totals == {
        "documents": 32,
        "bad_documents": 2,
        "tokens": sum(map(len, active.values())),
        "unseen": 0,
        "rows": len(found["scores"]["score"]),
    } | {name: sum(told[name]) for name in COUNTED}


@pytest.mark.parametrize("group", [False, True])
def test_excluded_concepts_are_counted_as_excluded(model, pack, tokenizer, tmp_path, capsys, group):
    watched = PackGroup({"one": pack, "two": pack}) if group else pack
    manager = DynamicProbeManager(watched, exclude=["one:c0" if group else "c0"])
    n, seen = manager.plan.n_excluded, ~np.asarray(manager.plan.watched)
    assert 0 < n == seen.sum() < watched.n_probes
    out = analyze(manager, model, tokenizer, random_texts(5), tmp_path / "out")
    found, totals = tables(tmp_path / "out")
    assert found["documents"]["excluded"] == [n * tokens for tokens in found["documents"]["n_tokens"]]
    assert totals["excluded"] == n * totals["tokens"] > 0
    assert [not watched for watched in found["concepts"]["watched"]] == seen.tolist()
    shown(out)
    assert f", {n} excluded" in capsys.readouterr().out
    share, text = n / watched.n_probes, read(out._repr_html_()).text
    unreached = (totals["not_reached"] - totals["excluded"]) / (watched.n_probes * totals["tokens"])
    assert f"{unreached:.1%} not reached" in text and f"{share:.1%} excluded;" in text
    assert f"never; {n} were excluded, and nothing is known about them:" in text


def test_offline_scores_equal_online_scores(model, manager, tokenizer):
    """The tokens of a document, and the same tokens as the prompt of a watched generation."""
    text = random_texts(1, seed=5)[0]
    (scored,) = score_documents(manager, model, tokenizer, read_documents([text]))
    ids = torch.tensor([[1, *scored.tokens.ids.tolist()]])
    with manager.attach(model, tokenizer) as run:
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            stopping_criteria=run.stopping_criteria,
        )
    online = run.result(out).scores
    for t in range(len(scored.tokens)):
        assert online.active(t + 1).tolist() == scored.scores.active(t).tolist()
        assert close(online.active_scores(t + 1), scored.scores.active_scores(t))


@pytest.mark.parametrize("special", ["bos", "none"])
def test_several_sites_and_exhaustive_scores_equal_the_oracle(model, two_sites, tokenizer, special):
    manager = DynamicProbeManager(two_sites, max_loaded_probes=30, impl="cpu")
    texts = random_texts(9, seed=2)
    reading = Reading(Window(24, 6), batch_tokens=100, special_tokens=special)
    for text, scored in zip(
        texts,
        score_documents(manager, model, tokenizer, read_documents(texts), reading=reading, exhaustive=True),
        strict=True,
    ):
        _, expected = oracle(manager, model, text, n_tokens=24, overlap=6, prefix=(1,) if special == "bos" else ())
        for t, scores in enumerate(expected):
            assert scored.scores.active(t).tolist() == sorted(scores)
            assert close(scored.scores.active_scores(t), [scores[probe] for probe in sorted(scores)])
            assert close(scored.everything[t, sorted(scores)], [scores[probe] for probe in sorted(scores)])


def test_stopping_the_model_early_gives_the_same_scores(model, manager, tokenizer, monkeypatch):
    texts, runs = random_texts(12, seed=3), []
    last = [0]
    handle = model.model.layers[LAYERS - 1].register_forward_hook(lambda *_: last.__setitem__(0, last[0] + 1))
    for may_stop in (True, False):
        scorer = CorpusScorer(manager, model, tokenizer, SMALL)
        assert scorer.reader._may_stop
        scorer.reader._may_stop, last[0] = may_stop, 0
        runs.append([scored.scores for shard in scorer.score(shards(read_documents(texts))) for scored in shard])
        n_batches = sum(len(scorer.reader.plan(shard).batches) for shard in shards(read_documents(texts)))
        assert last[0] == (1 if may_stop else n_batches) and n_batches > 2
    handle.remove()
    for early, whole in zip(*runs, strict=True):
        assert early.values.tobytes() == whole.values.tobytes() and early.probes.tobytes() == whole.probes.tobytes()


def test_nonfinite_state_is_unseen(manager, tokenizer, tmp_path):
    broken = make_model()
    with torch.no_grad():
        broken.model.embed_tokens.weight[4 + LETTERS.index("q")] = float("nan")
    with pytest.warns(UserWarning, match="this model's weights are others"):
        analysis = analyze(manager, broken, tokenizer, ["abcqab", "abc"], tmp_path / "out", floor=0.0)
    documents = analysis.documents().to_pydict()
    assert (
        documents["n_unseen"] == [6, 0] and documents["active"][0] == 0 < documents["active"][1]
    )  # attention gives it to the whole row
    assert len(analysis.scores(document=0)) == 0 < len(analysis.scores(document=1))
    assert analysis.manifest["totals"]["unseen"] == 6


# -- going on ------------------------------------------------------------------------------------


def test_killed_analysis_resumes_to_the_same_rows(manager, model, tokenizer, tmp_path):
    texts = random_texts(120, longest=40)

    def run(out, kill_at=None):
        """In a process of its own, which is killed once so many files are in the folder of shards, half-written ones
        too.
        """
        child = os.fork()
        if not child:
            analyze(manager, model, tokenizer, texts, out, resume=True, floor=0.3)
            os._exit(0)
        ended = 0
        while kill_at is not None and not ended:
            if out.is_dir() and len(list(out.glob("shards/*"))) >= kill_at:
                os.kill(child, signal.SIGKILL)
                break
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.002)
        status = status if ended else os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == (0 if kill_at is None else -signal.SIGKILL)

    run(tmp_path / "whole")
    expected, totals = tables(tmp_path / "whole")
    assert totals["documents"] == 120 and totals["rows"] > 1000
    out, made = tmp_path / "killed", []
    for n_files in (0, 3, 51):  # five a shard: at the very start, in the first, in a later one
        run(out, kill_at=n_files)
        made.append(len(list((out / "shards").glob("*.json"))))
    assert made[0] == made[1] == 0 < made[2] < 18, made
    run(out)
    assert tables(out) == (expected, totals)
    left = sorted(path.name for path in (out / "shards").iterdir())
    assert len(left) == 5 * len(json.loads((out / "manifest.json").read_text())["shards"]), (
        left
    )  # nothing half-written is left


def test_processes_share_the_work_by_rank(model, manager, tokenizer, tmp_path):
    analyze(manager, model, tokenizer, corpus(), tmp_path / "one", reading=SMALL)
    for rank in (2, 0, 1):
        found = analyze(
            manager,
            model,
            tokenizer,
            corpus(),
            tmp_path / "three",
            reading=SMALL,
            rank=rank,
            world_size=3,
            resume=rank != 2,
        )
        assert found.complete == (rank == 1)
    assert tables(tmp_path / "one") == tables(tmp_path / "three")
    with pytest.raises(ConfigError, match="rank 3 of world_size 3"):
        analyze(manager, model, tokenizer, corpus(), tmp_path / "x", rank=3, world_size=3)


def test_resume_does_not_repeat_finished_work(model, manager, tokenizer, tmp_path):
    out, told = tmp_path / "out", []
    first = analyze(manager, model, tokenizer, corpus(), out, reading=SMALL, progress=lambda *a: told.append(a))
    assert abs(sum(n for n, _ in told) - 32) < 1e-6 and sum(n for _, n in told) == first.manifest["totals"]["tokens"]
    before = {path: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}
    told.clear()
    again = analyze(
        manager, model, tokenizer, iter(corpus()), out, reading=SMALL, resume=True, progress=lambda *a: told.append(a)
    )
    assert again.complete and {path: path.stat().st_mtime_ns for path in (out / "shards").iterdir()} == before
    assert sum(n for n, _ in told) == 32 and sum(n for _, n in told) == 0
    for asked in ({"document": "d3"}, {"document": True}, {"columns": ["nope"]}, {"document": 99}):
        with pytest.raises(ConfigError, match=r"document is|no column 'nope', they have document|documents 0\.\.31"):
            again.scores(**asked)
    (out / "shards" / "00001.summary.parquet").unlink()  # a shard that lost a table is made again
    analyze(manager, model, tokenizer, corpus(), out, reading=SMALL, resume=True)
    assert {path.name for path in (out / "shards").iterdir() if path.stat().st_mtime_ns != before.get(path)} == {
        f"00001.{name}" for name in ("json", *(f"{table}.parquet" for table in TABLES))
    }


def test_resume_refuses_other_documents_or_settings(model, manager, tokenizer, tmp_path):
    out = tmp_path / "out"
    analyze(manager, model, tokenizer, corpus(), out, reading=SMALL)
    with pytest.raises(ConfigError, match="resume=True"):
        analyze(manager, model, tokenizer, corpus(), out, reading=SMALL)
    with pytest.raises(ConfigError, match=r"floor was 'fired', now 0\.5"):
        analyze(manager, model, tokenizer, corpus(), out, reading=SMALL, resume=True, floor=0.5)
    with pytest.raises(ConfigError, match=r"reading\.window\.overlap was 6, now 5"):
        analyze(manager, model, tokenizer, corpus(), out, reading=Reading(Window(24, 5), 100, 5), resume=True)
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(
        json.dumps({**manifest, "complete": False, "environment": {**manifest["environment"], "threads": 99}})
    )
    analyze(
        manager, model, tokenizer, corpus(), out, reading=SMALL, resume=True
    )  # nothing is left to do, so nothing is warned of
    (out / "shards/00001.json").unlink()
    with pytest.warns(UserWarning, match=r"begun elsewhere \(threads was 99"):
        analyze(manager, model, tokenizer, corpus(), out, reading=SMALL, resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="has no analysis"):
        analyze(manager, model, tokenizer, corpus(), tmp_path / "full", resume=True)
    with Analysis.open(out, unfinished=True).locked(), pytest.raises(ConfigError, match="another process"):
        analyze(manager, model, tokenizer, corpus(), out, reading=SMALL, resume=True)


def _changed(rows, at, **fields):
    """The rows with one of them replaced; without fields it is left out."""
    return [*rows[:at], *([{**rows[at], **fields}] if fields else []), *rows[at + 1 :]]


@pytest.fixture(scope="module")
def analysed(manager, model, tokenizer, tmp_path_factory):
    """Folders of analyses of 31 documents, with their texts and without."""
    made = tmp_path_factory.mktemp("analysed")
    with mock.patch("probemon.lab.corpora.windows.SHARD_DOCUMENTS", 7):
        for keep_text in (True, False):
            analyze(manager, model, tokenizer, corpus()[:31], made / f"{keep_text}", reading=SMALL, keep_text=keep_text)
    return made


@pytest.mark.parametrize(
    ("change", "said", "without_text"),
    [
        (lambda rows: _changed(rows, 8, text="other"), r"document 8 \(id 'd7'\) has changed", ""),
        (lambda rows: _changed(rows, 8, id="other"), r"document 8 \(id 'other'\) has taken the place of 'd7'", ""),
        (
            lambda rows: _changed(rows, 9, text=rows[9]["text"][::-1]),
            r"document 9 \(id 'd8'\) has changed",
            "one of the documents 7 to 13 has changed",
        ),
        (lambda rows: _changed(rows, 8), r"document 8 \(id 'd8'\) has taken the place of 'd7'", ""),
        (lambda rows: rows[:8] + rows[7:], r"document 8 \(id 'd6'\) has taken the place of 'd7'", ""),
        (lambda rows: _changed(rows, 2, text="a" * 250_001), "document 2 has changed", ""),
        (lambda rows: rows[:-1], "document 30 is gone", ""),
        (lambda rows: rows[:16], "documents from 16 on are gone", ""),
        (lambda rows: rows[:14], "documents from 14 on are gone", ""),
        (lambda rows: [], "documents from 0 on are gone", ""),
    ],
)
def test_changed_or_missing_documents_are_named_and_files_kept(
    manager, model, tokenizer, analysed, change, said, without_text
):
    for keep_text in (True, False):
        out = analysed / f"{keep_text}"
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        named = said if keep_text else without_text or said
        with pytest.raises(ConfigError, match=rf"^{named} since .*/{keep_text} was begun: give another folder"):
            analyze(
                manager, model, tokenizer, change(corpus()[:31]), out, reading=SMALL, keep_text=keep_text, resume=True
            )
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("sizes", [(30, 34), (0, 1, 7, 8), (6, 14, 20)])
def test_resuming_with_more_documents_equals_one_run_over_all(manager, model, tokenizer, tmp_path, sizes):
    """The last shard may have been full, or not; what was whole before it is not scored again."""
    rows = [*corpus(), *({"text": text, "id": f"e{i}"} for i, text in enumerate(random_texts(4, seed=1)))]
    analyze(manager, model, tokenizer, rows[: sizes[-1]], tmp_path / "one", reading=SMALL)
    scored: list[int] = []
    for before, now in zip((0, *sizes), sizes, strict=False):
        with mock.patch.object(
            offline, "write", lambda *args, write=offline.write: (scored.append(args[2].shard.index), write(*args))
        ):
            scored.clear()
            analyze(manager, model, tokenizer, rows[:now], tmp_path / "grown", reading=SMALL, resume=True)
        assert scored == list(range(before // 7, max(1, -(-now // 7)))), (before, now)
    one, grown = (
        {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("[!.]*") if path.is_file()}
        for out in (tmp_path / "one", tmp_path / "grown")
    )
    assert one == grown
    assert tables(tmp_path / "one") == tables(tmp_path / "grown")


def test_ranks_share_a_corpus_that_has_grown(manager, model, tokenizer, tmp_path):
    """The one whose part the shard is not leaves it to the other, and does not complete what is there."""
    analyze(manager, model, tokenizer, corpus(), tmp_path / "one", reading=SMALL)
    analyze(manager, model, tokenizer, corpus()[:9], tmp_path / "two", reading=SMALL)
    for rank in (0, 1):  # the shard that was not full is of rank 1
        made = analyze(
            manager, model, tokenizer, corpus(), tmp_path / "two", reading=SMALL, rank=rank, world_size=2, resume=True
        )
        assert made.complete == (rank == 1)
    assert tables(tmp_path / "one") == tables(tmp_path / "two")


def test_run_killed_while_extending_a_shard_resumes(manager, model, tokenizer, tmp_path, monkeypatch):
    """Its record went first, so that no reader takes tables of two inputs for one shard."""
    out, rows = tmp_path / "out", corpus()
    analyze(manager, model, tokenizer, rows[:9], out, reading=SMALL)
    for n_tables in (0, 3, 4):
        with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
            left = iter([analysis_folder.write_table] * n_tables)
            broken.setattr(analysis_folder, "write_table", lambda *a, left=left: next(left, _interrupted)(*a))
            broken.setattr(analysis_folder, "write_json", _no_record)
            analyze(manager, model, tokenizer, rows[:12], out, reading=SMALL, resume=True)
        assert not (out / "shards/00001.json").exists()
    analyze(manager, model, tokenizer, rows[:9], out, reading=SMALL, resume=True)
    analyze(manager, model, tokenizer, rows[:9], tmp_path / "one", reading=SMALL)
    assert tables(out) == tables(tmp_path / "one")


def _interrupted(*_):
    raise KeyboardInterrupt


def _no_record(path, value, write=analysis_folder.write_json):
    if path.parent.name == "shards":
        raise KeyboardInterrupt
    write(path, value)


@pytest.mark.parametrize("other", ["descent", "exhaustive"])
def test_resumed_analysis_keeps_its_original_strategy(model, manager, tokenizer, tmp_path, monkeypatch, other):
    measured = Choice("descent", other, "measured, on a busy machine", measured=True)
    analyze(manager, model, tokenizer, corpus(), tmp_path / "out", reading=SMALL)
    before, _ = tables(tmp_path / "out")
    (tmp_path / "out/shards/00001.json").unlink()
    monkeypatch.setattr(manager, "strategy", measured)
    analyze(manager, model, tokenizer, corpus(), tmp_path / "out", reading=SMALL, resume=True)
    assert tables(tmp_path / "out")[0] == before
    with pytest.raises(ConfigError, match=r"floor was 'fired', now 0\.5"):
        analyze(manager, model, tokenizer, corpus(), tmp_path / "out", reading=SMALL, resume=True, floor=0.5)
    begun = kernel_of(tmp_path / "out")["strategy"]
    monkeypatch.setattr(manager, "strategy", dataclasses.replace(measured, measured=False))
    if other != begun:  # it was asked for, so that it is no accident
        with pytest.raises(ConfigError, match=f"strategy was '{begun}', now '{other}'"):
            analyze(manager, model, tokenizer, corpus(), tmp_path / "out", reading=SMALL, resume=True)


@pytest.mark.filterwarnings("ignore:.* this model's weights are others")
@pytest.mark.parametrize("what", ["an embedding", "a neuron", "the positions"])
def test_resume_refuses_another_model(manager, tokenizer, tmp_path, what):
    """Its rows would stand beside those of the first."""
    host = make_model()
    analyze(manager, host, tokenizer, corpus(), tmp_path / "out", reading=SMALL)
    (tmp_path / "out/shards/00001.json").unlink()
    with torch.no_grad():
        if what == "an embedding":
            host.get_input_embeddings().weight[8] += 1
        elif what == "a neuron":
            host.model.layers[0].mlp.down_proj.weight[:, 3] = 0
        else:
            host.model.rotary_emb.inv_freq *= 2
    with pytest.raises(ConfigError, match=r"with other settings \(host\.weights was 'weights:"):
        analyze(manager, host, tokenizer, corpus(), tmp_path / "out", reading=SMALL, resume=True)


def test_resume_refuses_changed_thresholds(model, manager, tokenizer, tmp_path):
    analyze(manager, model, tokenizer, corpus(), tmp_path / "out", reading=SMALL)
    (tmp_path / "out/shards/00001.json").unlink()
    pack = ProbePack.open(manager.pack.directory)
    pack.alert_threshold[0] += 0.01
    with pytest.raises(ConfigError, match=r"with other settings \(pack\.thresholds was '"):
        analyze(DynamicProbeManager(pack), model, tokenizer, corpus(), tmp_path / "out", reading=SMALL, resume=True)


def test_tokenizer_truncation_and_padding_state_does_not_matter(model, manager, tmp_path):
    """A tokenizer whose file asks for both, which a first reading undoes, and one that its user gave a batch."""
    tokenizer, texts = make_tokenizer(), corpus()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding()
    analyze(manager, model, tokenizer, texts, tmp_path / "out", reading=SMALL)
    (tmp_path / "out" / "shards/00001.json").unlink()
    assert analyze(manager, model, tokenizer, texts, tmp_path / "out", reading=SMALL, resume=True).complete
    tokenizer(["ab", "abc"], padding=True, truncation=True, max_length=9)
    assert analyze(manager, model, tokenizer, texts, tmp_path / "out", reading=SMALL, resume=True).complete
    analyze(manager, model, make_tokenizer(), texts, tmp_path / "plain", reading=SMALL)
    assert tables(tmp_path / "out") == tables(tmp_path / "plain")
    stated = [Analysis.open(tmp_path / name).manifest["identity"]["tokenizer"] for name in ("out", "plain")]
    assert stated[0] == stated[1]


def test_failing_reader_leaves_whole_shards_and_no_hooks(model, manager, tokenizer, tmp_path):
    def failing():
        yield from corpus()[:16]
        raise OSError("the disk went away")

    before = n_hooks(model)
    with pytest.raises(OSError, match="the disk went away"):
        analyze(manager, model, tokenizer, failing(), tmp_path / "out", reading=SMALL)
    assert n_hooks(model) == before
    with pytest.raises(ConfigError, match="not finished"):
        Analysis.open(tmp_path / "out")
    analyze(manager, model, tokenizer, corpus(), tmp_path / "out", reading=SMALL, resume=True)
    analyze(manager, model, tokenizer, corpus(), tmp_path / "whole", reading=SMALL)
    assert tables(tmp_path / "out") == tables(tmp_path / "whole")


def test_closing_the_reader_early_leaves_no_hooks_or_threads(model, manager, tokenizer):
    import threading

    hooks, threads = n_hooks(model), threading.active_count()
    reader = score_documents(manager, model, tokenizer, read_documents(corpus()), reading=SMALL)
    assert next(reader).document.id == "d0"
    reader.close()
    assert (n_hooks(model), threading.active_count()) == (hooks, threads)


# -- what cannot be read -------------------------------------------------------------------------


def test_unsupported_models_and_settings_are_refused(model, manager, tokenizer, pack, tmp_path):
    with pytest.raises(ConfigError, match=r"call model\.eval\(\)"):
        CorpusScorer(manager, make_model().train(), tokenizer, SMALL)
    with pytest.raises(ModelMismatch):
        CorpusScorer(manager, make_model(layers=2), tokenizer, SMALL)
    with pytest.raises(ConfigError, match="takes at most 128"):
        CorpusScorer(manager, model, tokenizer, Reading(Window(256, 0)))
    bare = make_pack(tmp_path / "bare", model, alert_threshold=None)
    with pytest.raises(ConfigError, match="nothing of it fires"):
        analyze(DynamicProbeManager(bare, load_threshold=0.3), model, tokenizer, ["a"], tmp_path / "out")
    for floor in ("high", True, float("nan"), None, 90, 1, -3):
        with pytest.raises(ConfigError, match="floor is"):
            analyze(manager, model, tokenizer, ["a"], tmp_path / "out", floor=floor)


def test_text_that_breaks_the_tokenizer_is_a_bad_document(model, manager, tokenizer, tmp_path):
    class Fails:
        is_fast, bos_token_id, backend_tokenizer = True, 1, tokenizer.backend_tokenizer

        def __call__(self, text, **options):
            if "bad" in text:
                raise ValueError("no such merge")
            return tokenizer(text, **options)

    analysis = analyze(manager, model, Fails(), ["abc", "bad", "cab"], tmp_path / "out")
    assert analysis.documents().column("reason").to_pylist() == [
        "",
        "cannot be tokenised (ValueError: no such merge)",
        "",
    ]


def test_empty_corpus_gives_an_empty_analysis(model, manager, tokenizer, tmp_path):
    analysis = analyze(manager, model, tokenizer, [], tmp_path / "out")
    assert (
        analysis.complete
        and len(analysis.scores()) == len(analysis.documents()) == 0
        and len(analysis.concepts()) == manager.pack.n_probes
    )
    assert analysis.manifest["totals"]["documents"] == analysis.manifest["totals"]["bad_documents"] == 0
    again = analyze(manager, model, tokenizer, iter(()), tmp_path / "out", resume=True)
    assert again.manifest["totals"] == analysis.manifest["totals"]
    bad = analyze(manager, model, tokenizer, ["", 5], tmp_path / "bad")
    assert bad.manifest["totals"]["bad_documents"] == 2 and len(bad.concepts()) == manager.pack.n_probes


def test_analysis_without_texts_stores_no_text(model, manager, tokenizer, tmp_path):
    with_text = analyze(manager, model, tokenizer, corpus(), tmp_path / "with", floor=0.2, reading=SMALL)
    without = analyze(
        manager, model, tokenizer, corpus(), tmp_path / "without", floor=0.2, reading=SMALL, keep_text=False
    )
    assert set(without.scores().column("token").to_pylist()) == {""} and set(
        without.scores().column("token_id").to_pylist()
    ) == {-1}
    assert set(without.documents().column("text").to_pylist()) == {None}
    kept = ["document", "position", "start", "end", "concept", "score"]
    assert without.scores(columns=kept).to_pydict() == with_text.scores(columns=kept).to_pydict()


def test_floor_under_the_thresholds_finds_every_score_above_it(model, manager, tokenizer, tmp_path):
    """Under the path rule, where a descent that only looks for what fires would end before."""
    exact = DynamicProbeManager(manager.pack, load_threshold="exact", impl="cpu")
    texts, ids = random_texts(12, seed=9), [concept["id"] for concept in manager.pack.concepts]
    for floor in (0.02, 0.1, 0.5):
        analysis = analyze(exact, model, tokenizer, texts, tmp_path / str(floor), floor=floor, reading=SMALL)
        found = set(
            zip(
                *(analysis.scores().column(name).to_pylist() for name in ("document", "position", "concept")),
                strict=True,
            )
        )
        truth, edge = set(), set()
        for scored in score_documents(exact, model, tokenizer, read_documents(texts), reading=SMALL, exhaustive=True):
            for t, p in zip(*np.nonzero(scored.everything.numpy() > floor), strict=True):
                truth.add((scored.document.index, int(t), ids[p]))
                edge |= {(scored.document.index, int(t), ids[p])} if scored.everything[t, p] < floor + 1e-5 else set()
        assert found - edge == truth - edge and len(truth) > 50
    assert (
        exact.plan.expand_threshold[exact.pack.tree.has_children] > 0.02
    ).all()  # the manager's own descent is as it was


def test_analysis_is_not_written_into_its_input_folder(model, manager, tokenizer, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("abc")
    with pytest.raises(ConfigError, match="whose files are read"):
        analyze(manager, model, tokenizer, tmp_path / "in", tmp_path / "in" / "out")


def test_shards_are_plain_parquet(model, manager, tokenizer, tmp_path):
    """For readers that know nothing of probemon."""
    analyze(manager, model, tokenizer, corpus(), tmp_path / "out", floor=0.2, reading=SMALL)
    rows = sum(
        pq.ParquetFile(path).metadata.num_rows for path in (tmp_path / "out" / "shards").glob("*.scores.parquet")
    )
    assert rows == Analysis.open(tmp_path / "out").manifest["totals"]["rows"]
    assert "é" in set(
        pq.read_table(next((tmp_path / "out" / "shards").glob("*.scores.parquet")), columns=["token"])
        .column("token")
        .to_pylist()
    )


def test_emptied_input_leaves_the_analysis_unchanged(model, manager, tokenizer, tmp_path):
    analyze(manager, model, tokenizer, ["abc", "cab"], tmp_path / "out")
    before, _ = tables(tmp_path / "out")
    with pytest.raises(ConfigError, match="documents from 0 on are gone"):
        analyze(manager, model, tokenizer, [], tmp_path / "out", resume=True)
    assert tables(tmp_path / "out")[0] == before


def test_extended_analysis_is_incomplete_until_finished(model, manager, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("probemon.lab.corpora.windows.SHARD_DOCUMENTS", 2)
    texts, out = ["abc", "cab", "bac", "abcabc", "bb", "ccc"], tmp_path / "out"
    analyze(manager, model, tokenizer, texts[:4], out)
    replaced = []

    def fail(path, table):
        replaced.append(path.name)
        raise OSError(28, "No space left on device")

    whole = analysis_files.write_table
    with monkeypatch.context() as broken, pytest.raises(SinkFailed, match="No space left on device"):
        broken.setattr(
            analysis_folder,
            "write_table",
            lambda path, table: fail(path, table) if path.name == "concepts.parquet" else whole(path, table),
        )
        analyze(manager, model, tokenizer, texts, out, resume=True)
    assert replaced == ["concepts.parquet"]
    with pytest.raises(ConfigError, match="is not finished"):
        Analysis.open(out)
    analyze(manager, model, tokenizer, texts, out, resume=True)
    analyze(manager, model, tokenizer, texts, tmp_path / "at-once")
    assert tables(out) == tables(tmp_path / "at-once")
    assert sorted(path.name for path in (out / "shards").iterdir()) == sorted(
        path.name for path in (tmp_path / "at-once/shards").iterdir()
    )


def test_idle_rank_does_not_report_the_previous_analysis_as_its_own(model, manager, tokenizer, tmp_path, monkeypatch):
    """Two ranks; the input grew by one shard, which is that of rank 0."""
    monkeypatch.setattr("probemon.lab.corpora.windows.SHARD_DOCUMENTS", 2)
    texts, out = ["abc", "cab", "bac", "abcabc", "bb", "ccc"], tmp_path / "out"

    def rank(number, documents):
        return analyze(manager, model, tokenizer, documents, out, resume=True, rank=number, world_size=2)

    assert [rank(number, texts[:4]).complete for number in (0, 1)] == [False, True]
    assert not rank(1, texts).complete
    with pytest.raises(ConfigError, match="is not finished"):
        Analysis.open(out)
    assert rank(0, texts).complete
    assert Analysis.open(out).manifest["totals"]["documents"] == 6
    assert rank(1, texts).complete  # which finds all there


def test_growing_input_marks_the_analysis_unfinished_before_writing(model, manager, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("probemon.lab.corpora.windows.SHARD_DOCUMENTS", 2)
    texts, out = ["abc", "cab", "bac"], tmp_path / "out"
    analyze(manager, model, tokenizer, texts[:2], out)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(offline, "write", mock.Mock(side_effect=KeyboardInterrupt))
        analyze(manager, model, tokenizer, texts, out, resume=True)
    with pytest.raises(ConfigError, match="is not finished"):
        Analysis.open(out)
    assert analyze(manager, model, tokenizer, texts, out, resume=True).manifest["totals"]["documents"] == 3


def test_shard_written_by_another_process_does_not_reopen_its_analysis(
    model, manager, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("probemon.lab.corpora.windows.SHARD_DOCUMENTS", 2)
    analyze(manager, model, tokenizer, ["abc", "cab"], tmp_path / "out")
    late = Analysis.open(tmp_path / "out")
    analyze(manager, model, tokenizer, ["abc", "cab", "bac"], tmp_path / "out", resume=True)
    late.reopen(1, json.loads((tmp_path / "out/shards/00001.json").read_text())["digest"])
    assert Analysis.open(tmp_path / "out").manifest["totals"]["documents"] == 3


def test_processes_writing_one_shard_use_separate_files(model, manager, tokenizer, tmp_path):
    """Two that were given other numbers of processes: each writes under a name of its own."""
    analyze(manager, model, tokenizer, ["abc", "cab"], tmp_path / "out")
    target = tmp_path / "out/shards/00000.scores.parquet"
    before = target.read_bytes()
    with analysis_files.replacing(target) as mine:
        mine.write(b"half")
        with mock.patch("os.getpid", return_value=1):
            analysis_files.write_table(target, pq.read_table(target))
        assert pq.read_table(target).num_rows == pq.ParquetFile(io.BytesIO(before)).metadata.num_rows
    assert target.read_bytes() == b"half"


@pytest.mark.parametrize(("rank", "world_size"), [("0", 1), (0, 0), (True, 2), (1, 1), (-1, 2)])
def test_invalid_ranks_are_refused(model, manager, tokenizer, tmp_path, rank, world_size):
    with pytest.raises(ConfigError, match="give 1 or more processes, and a rank"):
        analyze(manager, model, tokenizer, ["abc"], tmp_path / "out", rank=rank, world_size=world_size)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes itself another user")
def test_unwritable_folder_is_reported(model, manager, tokenizer, tmp_path, monkeypatch):
    here = offline.environment()  # another user may not read where it is installed
    monkeypatch.setattr("probemon.lab.corpora.analyze.environment", lambda: here)
    for out in (tmp_path / "begun", tmp_path / "empty"):
        out.mkdir()
    analyze(manager, model, tokenizer, ["abc"], tmp_path / "begun", resume=True)
    for folder in (tmp_path, *(above for above in tmp_path.parents if "pytest" in above.name or "popen" in above.name)):
        folder.chmod(0o755)  # pytest makes its folders for one user alone
    for name, mode in {"begun": 0o555, "empty": 0o555, "closed": 0o000}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name).chmod(mode)
    for out in ("begun", "empty", "closed"):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            told = "nothing"
            try:
                os.setuid(65534)
                analyze(manager, model, tokenizer, ["abc"], tmp_path / out, resume=True)
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            os.write(write, told.encode())
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with os.fdopen(read) as stream:
            told = stream.read()
        verb = "read" if out == "closed" else "written"
        assert told.startswith("ConfigError"), told
        assert f"cannot be {verb} (Permission denied): check its permissions" in told


@pytest.mark.parametrize("other", ["same", "another"])
def test_concurrent_starts_cooperate_or_one_is_refused(tmp_path, other):
    """In each of 200 folders: none mistakes the other's first file for somebody else's, and two that differ do not mix
    their rows.
    """
    barrier = threading.Barrier(2)

    def begin(identity):
        found = []
        for at in range(200):
            barrier.wait()
            try:
                found.append(
                    Analysis.begin(tmp_path / str(at), identity, {}, resume=True).manifest["identity"] == identity
                )
            except ConfigError as error:
                found.append(str(error))
        return found

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(begin, ({"run": "same"}, {"run": other})))
    for pair in zip(*found, strict=True):
        refusals = [one for one in pair if one is not True]
        assert len(refusals) == (other == "another") and all(
            "an analysis with other settings (run was" in one for one in refusals
        ), pair
