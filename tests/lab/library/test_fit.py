"""A small library of letters, fitted to a tiny random model: what holds is kept, and the command tells it."""

import json
import random
import sys

import numpy as np
import pytest
import yaml

from conftest import make_model
from corpora import make_tokenizer
from lab.training.test_train import text
from probemon import ProbePack, cli
from probemon.core.aggregate import parse
from probemon.core.score_counts import log_odds
from probemon.errors import ConfigError, RuleError, TrainingError
from probemon.lab.library.evaluate import evaluate, inside
from probemon.lab.library.fit import MISSING, WARNED, WORKS, Bars, Verdict, fit, fit_settings, judge_concept, shown_over
from probemon.lab.library.library import Library
from probemon.lab.library.trial import shown_in
from probemon.lab.training.dataset import ORDINARY
from probemon.monitor.rule_spec import RuleSpec
from probemon.packs.group import PackGroup

MARKS = {"zed": "z", "luck": ""}  # nothing tells the sides of the second one


def letters(folder):
    """A library of two concepts, 40 pairs each."""
    rng = random.Random(3)
    (folder / "texts").mkdir(parents=True)
    shared = {"path": "letters", "counts_not": "", "read": ["text"], "reading": "span", "never": []}
    concepts = [{"id": id, "name": id, "definition": f"many {mark}", **shared} for id, mark in MARKS.items()]
    (folder / "concepts.yaml").write_text(yaml.safe_dump(concepts))
    about = {"name": "letters", "version": 3, "licence": "Apache-2.0", "sha256": {}}
    (folder / "library.yaml").write_text(yaml.safe_dump(about))
    for id, mark in MARKS.items():
        rows = []
        for i in range(40):
            for side in "+-":
                said = text(rng, mark if side == "+" else "", 60)
                row = {"id": f"{id}-{i}{side}", "group": f"{id}-{i}", "genre": "note", "lang": "en", "author": "a1"}
                labels = {"present": [id] if side == "+" else [], "unsure": []}
                labels["absent"] = [one for one in MARKS if one not in labels["present"]]
                labels["spans"] = {id: [{"start": 0, "end": len(said)}]} if side == "+" else {}
                rows.append({**row, "text": said, **labels})
        (folder / "texts" / f"{id}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Library.open(folder)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    model, folder = make_model(hidden=32), tmp_path_factory.mktemp("library")
    model.save_pretrained(folder / "host")
    make_tokenizer().save_pretrained(folder / "host")
    return model, folder, letters(folder / "letters")


@pytest.fixture(scope="module")
def seen():
    return []


@pytest.fixture(scope="module")
def fitted(host, seen):
    model, folder, library = host
    settings = fit_settings(ordinary=260, carried=40, layers=(1,), states=folder / "states")
    options = {"tokenizer": make_tokenizer(), "library": library, "settings": settings, "model_id": "host"}
    return fit(model, folder / "pack", see=seen.append, **options)


def test_what_holds_is_in_the_pack_and_the_rest_in_the_card(host, fitted):
    pack = ProbePack.open(host[1] / "pack", verify=True)
    assert [concept["id"] for concept in pack.concepts] == ["zed"]
    assert {id: one.group for id, one in fitted.of.items()} == {"zed": WORKS, "luck": MISSING}
    assert set(fitted.quality["concepts"]) == set(MARKS) and set(pack.manifest["quality"]["concepts"]) == {"zed"}
    about = pack.manifest["quality"]["library"]
    assert (about["name"], about["version"]) == ("letters", 3)
    card = (host[1] / "pack" / "README.md").read_text()
    assert card.index("## Works\n") < card.index("## Not found on this model") < card.index("| luck |")
    near = fitted.quality["concepts"]["zed"]["near"]  # of its own file: 40 pairs, not the texts of the other concept
    assert (near["n_positive"], near["n_negative"]) == (40, 40) and near["auroc"] > 0.9
    assert "Of 2 concepts 1 work on host, 0 work with a warning, and 1 are not found." in card
    assert fitted.quality["concepts"]["zed"]["found"]["rate"] > 0.5


def test_concepts_are_shown_where_two_of_a_hundred_ordinary_texts_show_one_wrongly(seen, fitted):
    """Against a count text by text; what no ordinary text has must be further over its threshold."""
    (measured,) = seen
    data = measured.data
    data.judged[np.flatnonzero(data.is_of(ORDINARY))[:50], 0] = 1  # as if a reader had found it there
    margins = shown_over(measured, [0, 1])
    assert margins["luck"] > margins["zed"] >= 0
    shown = np.zeros(len(data.texts), dtype=bool)
    for p, id in enumerate(MARKS):
        odds = log_odds(measured.score(p)) - log_odds(np.float64(np.float32(measured.text_rate(p).threshold)))
        shown |= (odds > margins[id]) & (data.judged[:, p] == 0)
    assert 0 < shown[data.is_of(ORDINARY)].mean() <= 0.02


def test_try_says_what_a_text_or_an_answer_shows(host, fitted, capsys, monkeypatch):
    model, folder, _ = host
    pack = ProbePack.open(folder / "pack")
    marked = text(random.Random(1), "z", 60)
    found = shown_in(marked, pack, model, make_tokenizer())
    assert [(one.concept, one.fires) for one in found] == [("zed", True)]
    assert marked[marked.index(found[0].at) :].startswith(found[0].at)
    templated = make_tokenizer()
    templated.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    asked = shown_in(text(random.Random(2), n=60), pack, model, templated, prompt=marked)
    assert not any(one.fires for one in asked)  # the prompt's letters do not count
    assert shown_in(marked, pack, model, templated, prompt="who")[0].fires
    with pytest.raises(ConfigError, match="no chat template"):
        shown_in(marked, pack, model, make_tokenizer(), prompt="who")
    with pytest.raises(ConfigError, match="the text is empty"):
        shown_in(" ", pack, model, make_tokenizer())
    with pytest.raises(ConfigError, match=r"the text has 2 tokens, and no score of .* begins before"):
        shown_in("ab", pack, model, make_tokenizer())
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        sys, "argv", ["probemon", "library", "try", marked, "--model", "host", "--pack", "pack", "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    told = json.loads(capsys.readouterr().out)["concepts"]
    assert told[0]["concept"] == "zed" and told[0]["score"] == pytest.approx(found[0].score, abs=1e-5)


def test_evaluate_judges_the_written_pack_on_tests_alone_and_inside_other_text(host, fitted):
    """Against `shown_in`, text by text; a test stands at the same place of the same text as its pair."""
    model, folder, _ = host
    pack, rng, rows = ProbePack.open(folder / "pack"), random.Random(9), []
    for i in range(12):
        for side in "+-":
            row = {"text": text(rng, "z" if side == "+" else "", 60), "group": f"zed-t{i}", "lang": "en"}
            labels = {"present": ["zed"], "absent": []} if side == "+" else {"present": [], "absent": ["zed"]}
            rows.append({**row, **labels, "unsure": [], "genre": "insert" if i < 4 else "note"})
    placed = inside(rows, [" ".join(["and then. it was"] * 100)], [])
    for pair in range(0, 8, 2):
        with_it, without = (placed[pair + n]["text"].split(rows[pair + n]["text"]) for n in (0, 1))
        assert with_it == without and min(map(len, with_it)) > 100
    assert [one["text"] for one in placed[8:]] == [one["text"] for one in rows[8:]]
    seen = []
    found = evaluate(pack, model, make_tokenizer(), placed, see=lambda examples, scores: seen.append(scores))["zed"]
    expected = [shown_in(one["text"], pack, model, make_tokenizer())[0] for one in placed]
    assert seen[0][:, 0] == pytest.approx([one.score for one in expected], abs=1e-5)
    for name, some in (("long", range(8)), ("short", range(8, 24))):
        present, absent = ([expected[i] for i in some if i % 2 == side] for side in (0, 1))
        wins = [(a.score > b.score) + (a.score == b.score) / 2 for a in present for b in absent]
        assert found[name]["auroc"] == pytest.approx(sum(wins) / len(wins))
        assert found[name]["found"]["count"] == sum(one.fires for one in present)
        assert found[name]["near_over"]["count"] == sum(one.fires for one in absent)
    with pytest.raises(ConfigError, match="names no running scores"):
        evaluate(ProbePack.from_pretrained("demo"), model, make_tokenizer(), placed)


def test_rule_on_the_score_a_concept_was_trained_for(host, fitted):
    pack = ProbePack.open(host[1] / "pack")
    reads = parse(fitted.quality["concepts"]["zed"]["reads"])
    (rule,) = RuleSpec("zed", aggregate="trained").rules(pack)
    assert rule.aggregator == reads and rule.above == float(pack.thresholds_for(reads)[0])
    (grouped,) = RuleSpec("b:zed", aggregate="trained", above=0.5).rules(PackGroup({"a": pack, "b": pack}))
    assert (grouped.aggregator, grouped.above) == (reads, 0.5)
    with pytest.raises(RuleError, match="names no running score for it: give one"):
        RuleSpec("animal", aggregate="trained").rules(ProbePack.from_pretrained("demo"))


def test_a_library_of_which_nothing_holds_is_an_error_and_leaves_no_pack(host):
    model, folder, library = host
    settings = fit_settings(ordinary=0, layers=(1,), states=folder / "states-luck")
    with pytest.raises(TrainingError, match="no concept of 1 holds on this model: luck: against ordinary text unknown"):
        fit(model, folder / "none", tokenizer=make_tokenizer(), library=library, concepts=["luck"], settings=settings)
    assert not (folder / "none").exists()


def test_each_bar_has_its_reason(host):
    _, _, library = host
    good = {
        "against_ordinary": {"auroc": 0.99}, "found": {"rate": 0.8, "count": 8, "n": 10}, "near": {"auroc": 0.8},
        "carried_against_ordinary": {"auroc": 0.8, "high": 0.9},
    }  # fmt: skip
    concept = library.concepts["zed"]
    judged = {
        "": {},
        "against ordinary text 0.94": {"against_ordinary": {"auroc": 0.944}},
        "against ordinary text unknown": {"against_ordinary": {"auroc": None}},
        "finds 4 of 10": {"found": {"rate": 0.4, "count": 4, "n": 10}},
        "in other text 0.74": {"carried_against_ordinary": {"auroc": 0.74, "high": 0.84}},
        "near cases 0.59": {"near": {"auroc": 0.59}},
    }
    for reason, change in judged.items():
        expected = Verdict(MISSING, [reason]) if reason else Verdict(WORKS)
        assert judge_concept({**good, **change}, concept, Bars()) == expected
    for area, reason in ((0.65, "near cases 0.65"), (None, "no near cases")):
        assert judge_concept({**good, "near": {"auroc": area}}, concept, Bars()) == Verdict(WARNED, [reason])
    unknown = judge_concept({**good, "carried_against_ordinary": {"auroc": None, "high": None}}, None, Bars())
    assert unknown == Verdict(WORKS)
