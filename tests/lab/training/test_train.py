"""Training a pack on tiny random models: the reported quality is that of the written pack.

Models and texts are random except for the letters: the tests cover the path from labels to scores.
"""

import copy
import hashlib
import random

import numpy as np
import peft
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from conftest import make_model
from corpora import LETTERS, make_tokenizer
from oracle import states as forward_states
from probemon import DynamicProbeManager, ProbePack
from probemon.core.aggregate import Ema, Max, RollingLogit, over, parse
from probemon.core.inputs import prepare_input
from probemon.core.probes import InputSpec
from probemon.core.score_counts import ScoreCounts
from probemon.errors import ConfigError, ModelMismatch, TrainingError
from probemon.host.compatibility import model_problems
from probemon.host.identity import manifest_host
from probemon.lab.training import carriers, ordinary, train
from probemon.lab.training.calibration import precision_thresholds
from probemon.lab.training.card import verdict, warnings
from probemon.lab.training.dataset import OUTSIDE, OWN, Dataset
from probemon.lab.training.examples import Example, read_examples
from probemon.lab.training.measured import TrainingMeasurement
from probemon.lab.training.metrics import auroc_of
from probemon.lab.training.state_store import TextReader
from probemon.lab.training.texts import render

COMMON = [letter for letter in LETTERS[:26] if letter not in "zqxk"]


def text(rng, marks="", n=24):
    """Random letters, half of them marks."""
    return "".join(rng.choice(marks) if marks and rng.random() < 0.5 else rng.choice(COMMON) for _ in range(n))


def rows(n=60, seed=0, concepts=(("zed", "z"), ("queue", "q"))):
    rng = random.Random(seed)
    ids = [id for id, _ in concepts]
    found = []
    for i in range(n):
        id, marks = concepts[i % len(concepts)]
        found.append({"text": text(rng, marks), "labels": [id], "not": [other for other in ids if other != id]})
        found.append({"text": text(rng), "not": ids})
    return found


@pytest.fixture(scope="module")
def model():
    return make_model(hidden=32)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return {"ordinary": 0, "states": tmp_path_factory.mktemp("states") / "s", "layers": (0, 1, 2)}


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory, settings):
    out = tmp_path_factory.mktemp("trained") / "letters"
    return train(model, rows(), out, tokenizer=make_tokenizer(), **settings, report=out.with_name("letters.html"))


def scores_of(trained, model, text):
    """Scores `[T, P]` of a text by the written pack, from a plain forward."""
    manager = DynamicProbeManager(trained.pack, load_threshold=0.0)
    ids = [1, *(LETTERS.index(letter) + 4 if letter in LETTERS else 3 for letter in text)]
    scored = manager.score_tokens(
        {site: hidden[1:] for site, hidden in forward_states(model, trained.pack, ids).items()}
    )
    return np.stack([scored.column(p) for p in range(trained.pack.n_probes)], axis=1)


def test_stated_thresholds_are_those_of_the_written_pack(trained):
    for p, concept in enumerate(trained.pack.concepts):
        found = trained.quality["concepts"][concept["id"]]
        assert found["auroc"] > 0.9 and found["low"] > 0.75
        assert found["alert"]["threshold"] == float(trained.pack.alert_threshold[p])
        of_texts = float(trained.pack.thresholds_for(found["reads"])[p])
        assert found["alert_of_texts"]["threshold"] == of_texts
    assert trained.pack.manifest["quality"] == trained.quality
    assert set(trained.pack.aggregated) >= {str(RollingLogit(16)), str(RollingLogit(64)), str(Ema(0.3)), str(Max())}


def test_stated_quality_on_texts_elsewhere_equals_that_of_the_written_pack(model, tmp_path, settings):
    """Area and shares, from scores of the pack itself and labels by hand."""
    elsewhere = rows(20, seed=5)
    own = {**settings, "states": tmp_path / "s", "layers": (1,)}
    found = train(model, rows(), tmp_path / "p", tokenizer=make_tokenizer(), outside=elsewhere, **own)
    scores = [scores_of(found, model, row["text"]) for row in elsewhere]
    for p, concept in enumerate(found.pack.concepts):
        stated = found.quality["concepts"][concept["id"]]
        running = parse(stated["reads"])
        highest = np.asarray([over(running, one[:, p : p + 1]).max() for one in scores])
        has = np.asarray([concept["id"] in row.get("labels", ()) for row in elsewhere])
        there = stated["outside"]
        assert (there["n_positive"], there["n_negative"]) == (has.sum(), (~has).sum())
        assert there["auroc"] == pytest.approx(auroc_of(highest, has), abs=1e-3) and there["auroc"] > 0.8
        threshold = float(found.pack.thresholds_for(stated["reads"])[p])
        near = np.abs(highest - threshold) < 1e-5
        for name, side in (("found", has), ("near_over", ~has)):
            assert abs(there[name]["count"] - (highest[side] > threshold).sum()) <= near.sum(), name


def test_kind_that_may_have_a_concept_is_left_out_of_its_rates_alone(model, tmp_path, settings):
    own = {**settings, "states": tmp_path / "s", "layers": (1,), "ordinary": 52}
    found = train(model, rows(), tmp_path / "p", tokenizer=make_tokenizer(), **own, unknown_in={"queue": ["advert"]})
    kinds = {id: set(one["alert_of_texts"]["by_kind"]) for id, one in found.quality["concepts"].items()}
    assert kinds["zed"] - kinds["queue"] == {"advert"} and kinds["queue"] < kinds["zed"]
    card = (tmp_path / "p" / "README.md").read_text().splitlines()
    (line,) = [line for line in card if line.startswith("| advert |")]
    assert line.endswith("| – |")


def test_texts_too_short_for_a_running_score_set_no_threshold_of_it(model, tmp_path, settings):
    """Their score is 0, which every other text would exceed."""
    rng, short = random.Random(0), []
    for i in range(48):
        short.append({"text": text(rng, "z" * (i % 2), 6 + 6 * (i % 4 > 1)), "labels": {"zed": bool(i % 2)}})
    own = {**settings, "states": tmp_path / "s", "layers": (1,), "method": "plain"}
    found = train(model, short, tmp_path / "p", tokenizer=make_tokenizer(), **own)
    assert float(found.pack.thresholds_for("rolling_logit(16)")[0]) > 0
    assert str(RollingLogit(64)) not in found.pack.aggregated
    assert float(found.pack.thresholds_for("max")[0]) > 0


def measured(model, found, given, **options):
    """The measurement of a training, again, and the probes."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        of = TrainingMeasurement.of
        patch.setattr(TrainingMeasurement, "of", lambda *given: (made.extend((of(*given), given[3])), made[0])[1])
        train(model, given, found.pack.directory, overwrite=True, **{"tokenizer": make_tokenizer(), **options})
    return made


def test_stated_counts_of_texts_equal_a_count_of_the_scores_out_of_fold(model, tmp_path, settings):
    own = {**settings, "states": tmp_path / "s", "layers": (1,)}
    found = train(model, rows(), tmp_path / "p", tokenizer=make_tokenizer(), **own)
    measurement, final = measured(model, found, rows(), **own)
    scored, data = measurement.scored, measurement.data
    assert sorted(set(data.fold.tolist())) == list(range(5)) and len(scored.document) == 24 * 120
    for p, concept in enumerate(data.concepts):
        stated = found.quality["concepts"][concept.id]
        running = parse(stated["reads"])
        highest = np.asarray([over(running, scored.scores[scored.document == i, p : p + 1]).max() for i in range(120)])
        has = np.asarray([concept.id in row.get("labels", ()) for row in rows()])
        assert stated["auroc"] == pytest.approx(auroc_of(highest, has), abs=1e-9)
        over_it = highest > np.float32(stated["alert_of_texts"]["threshold"])
        assert stated["found"]["count"] == (over_it & has).sum() and stated["found"]["n"] == has.sum()
        assert stated["near_over"]["count"] == (over_it & ~has).sum() and stated["near_over"]["n"] == (~has).sum()
        # Thresholds are of texts without it, if there is no ordinary text.
        tokens = scored.scores[~has[scored.document], p]
        assert stated["alert"]["n"] == len(tokens)
        alarms = (tokens > np.float32(stated["alert"]["threshold"])).sum()
        assert alarms == sum(one["alarms"] for one in stated["alert"]["by_kind"].values()) <= 0.01 * len(tokens)
        counts = found.pack.score_counts()[found.pack.find(concept.id)].numpy()
        assert np.array_equal(counts, ScoreCounts.of(tokens[:, None]).counts[0])
    # Scores of the pack are the sigmoid of the probes that learnt from everything.
    said = "azbzczdzefzgh"
    ids = [1, *(LETTERS.index(letter) + 4 for letter in said)]
    (hidden,) = forward_states(model, found.pack, ids).values()
    prepared = prepare_input(hidden[1:], InputSpec("resid_post.1", "rmsnorm"), torch.float32)
    expected = torch.sigmoid(prepared @ final.w.T + final.b).numpy()
    order = [found.pack.find(concept.id) for concept in data.concepts]
    assert np.allclose(scores_of(found, model, said)[:, order], expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_pack_records_the_model_it_was_trained_on(model, trained, tmp_path, settings):
    assert model_problems(trained.pack, model, strict=True) == []
    assert trained.pack.manifest["host"] == manifest_host(model, "") and "adapters" not in trained.pack.manifest["host"]
    adapted = peft.get_peft_model(
        make_model(hidden=32), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    own = {**settings, "states": tmp_path / "states", "layers": (1,)}
    pack = train(adapted, rows(), tmp_path / "adapted", tokenizer=make_tokenizer(), **own).pack
    assert model_problems(pack, adapted, strict=True) == []
    [problem] = model_problems(pack, model, strict=True)
    assert "adapters [] are active, adapted was made with ['default']" in problem


def test_trained_pack_fires_on_its_letters_during_generation(model, trained):
    z = trained.pack.find("zed")
    marks = "azbzcdzefzgh"
    assert scores_of(trained, model, marks)[:, z].mean() > scores_of(trained, model, "abbrcdsefwgh")[:, z].mean() + 0.1
    manager = DynamicProbeManager(trained.pack, load_threshold=0.0)
    ids = torch.tensor([[1, *(LETTERS.index(letter) + 4 for letter in marks)]])
    with manager.attach(model, make_tokenizer()) as run:
        out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    whole = forward_states(model, trained.pack, out[0].tolist())
    wanted = manager.score_tokens(whole)
    result = run.result(out)
    for position in range(1, out.shape[1] - 1):
        for p in range(trained.pack.n_probes):
            live = result.scores.column(p)[result.at(0, position)]
            assert live == pytest.approx(float(wanted.column(p)[position]), abs=1e-5)


def test_the_same_seed_gives_the_same_bytes(model, trained, tmp_path, settings):
    again = train(model, rows(), tmp_path / "letters", tokenizer=make_tokenizer(), **settings)
    files = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(pack.directory.iterdir())}
        for pack in (trained.pack, again.pack)
    ]
    assert files[0] == files[1]
    other = train(model, rows(), tmp_path / "other", tokenizer=make_tokenizer(), **{**settings, "seed": 1})
    assert other.pack.alert_threshold.tolist() != trained.pack.alert_threshold.tolist()


def test_second_run_reuses_stored_states(model, trained, tmp_path, settings, monkeypatch):
    from probemon.lab.corpora.state_reader import StateReader

    calls, real = [], StateReader.run
    monkeypatch.setattr(StateReader, "run", lambda *arguments: (calls.append(1), real(*arguments))[1])
    train(model, rows(), tmp_path / "letters", tokenizer=make_tokenizer(), **{**settings, "method": "plain"})
    assert len(calls) == 1  # to see that the host still makes the same of a few texts


def test_precision_thresholds_are_a_separate_alert_set(model, tmp_path, settings):
    many = {**settings, "states": tmp_path / "s", "layers": (1,)}
    found = train(model, rows(400), tmp_path / "p", tokenizer=make_tokenizer(), **many, precision=0.7)
    assert found.pack.alert_sets == ("precision_0.7", "rate_0.01")
    for concept in found.quality["concepts"].values():
        own = concept["precision"]
        assert own["right"] > 0.7 * own["fired"] > 0 and own["low"] >= 0.7
    # What so few texts cannot show is not recommended, and is said.
    few = train(model, rows(), tmp_path / "f", tokenizer=make_tokenizer(), **settings, precision=0.9)
    assert few.pack.alert_sets == ("rate_0.01", "precision_0.9")
    assert few.pack.other_alert_sets()["precision_0.9"].isnan().any()
    [said] = [line for line in warnings(few.quality) if "No threshold is shown to reach the precision" in line]
    assert "29 texts with a concept that fire, and none without, to show 90 %" in said  # .9 ** 29 < .05
    stricter = {**few.quality, "alert_sets": ["rate_0.01", "precision_0.99"]}
    assert any("299 texts" in line and "to show 99 %" in line for line in warnings(stricter))


def test_chance_precision_is_not_accepted():
    """Labels of whole texts, scores that know nothing of them but that tokens of one text are alike."""
    rng, reached = np.random.default_rng(0), 0
    for _ in range(200):
        known, of_text = rng.integers(0, 2, (40, 1)).astype(np.int8), rng.normal(size=40)
        part = np.repeat(np.arange(40), 25)
        scores = (1 / (1 + np.exp(-of_text[part] - 0.3 * rng.normal(size=1000))))[:, None].astype(np.float32)
        (found,) = precision_thresholds(scores, part, known, np.ones(40, dtype=bool), np.arange(40), precision=0.8)
        reached += found.reached
    assert reached <= 4


@pytest.mark.parametrize(("target", "share", "n"), [(0.9, 0.895, 500), (0.8, 0.795, 500)])
def test_precision_just_below_the_target_is_rarely_accepted(target, share, n):
    """However high the threshold, too few are right: whatever is found is wrong, one in twenty is claimed."""
    rng, reached = np.random.default_rng(0), 0
    for _ in range(100):
        scores, known = rng.random((n, 1)).astype(np.float32), (rng.random((n, 1)) < share).astype(np.int8)
        everyone = np.arange(n)
        (found,) = precision_thresholds(scores, everyone, known, np.ones(n, dtype=bool), everyone, precision=target)
        reached += found.reached
    assert reached <= 5


def test_a_precision_that_rises_with_the_score_is_found():
    """Of what scores s a share s ** (1/4) is right."""
    rng, values, n = np.random.default_rng(0), [], 2000
    for _ in range(20):
        scores = rng.random((n, 1)).astype(np.float32)
        known, everyone = (rng.random((n, 1)) < scores**0.25).astype(np.int8), np.arange(n)
        (found,) = precision_thresholds(scores, everyone, known, np.ones(n, dtype=bool), everyone, precision=0.9)
        over = scores[:, 0] > found.value
        assert found.fired == over.sum() and found.right == known[over, 0].sum() and found.low >= 0.9
        values.append(found.value)
    true = [0.8 * (1 - v**1.25) / (1 - v) for v in values]  # the share over a threshold
    assert np.mean(np.asarray(true) < 0.9) <= 0.05 and np.median(values) < 0.75
    # 29 tokens that are right show nine tenths, and 28 do not.
    for n, shown in ((30, True), (29, False)):  # a threshold is the score of the next token
        scores, everyone = np.linspace(0.9, 0.1, n)[:, None], np.arange(n)
        known = np.ones((n, 1), dtype=np.int8)
        (found,) = precision_thresholds(scores, everyone, known, np.ones(n, dtype=bool), everyone, precision=0.9)
        assert found.reached == shown


def test_precision_threshold_leaves_what_it_counted_over_it():
    """Where the next score is so near that there is no room for a margin, it still fires."""
    everyone = np.arange(40)
    known = np.ones((40, 1), dtype=np.int8)
    scores = np.float32([0.5 + 2**-20] * 38 + [0.5, 0.4])[:, None]
    (found,) = precision_thresholds(scores, everyone, known, np.ones(40, dtype=bool), everyone, precision=0.8)
    assert found.fired == (scores > found.value).sum()


def test_concept_that_finds_none_of_its_texts_is_the_first_thing_said(trained):
    assert not any("never fire" in sentence for sentence in verdict(trained.quality))
    mute = copy.deepcopy(dict(trained.quality))
    mute["concepts"]["zed"]["found"]["count"] = 0
    assert verdict(mute)[0].startswith("`zed` never fires: at the threshold none of the texts with it is found.")
    mute["concepts"]["queue"]["found"]["count"] = 0
    assert verdict(mute)[0].startswith("`zed`, `queue` never fire: at the threshold none of the texts with them")
    loud = copy.deepcopy(mute)
    loud["concepts"]["zed"]["found_in_text"] = loud["concepts"]["queue"]["found_in_text"] = {"count": 1, "n": 9}
    assert not any("never fire" in sentence for sentence in verdict(loud))


def test_pack_with_a_threshold_of_one_is_reported_on_opening(trained, caplog):
    pack = ProbePack.open(trained.pack.directory)
    pack.alert_threshold[pack.find("zed")] = 1
    with caplog.at_level("WARNING"):
        DynamicProbeManager(pack)
    assert "1 concept never fires (alert threshold 1): 'zed'" in caplog.text


@pytest.fixture
def short(monkeypatch):
    """Ordinary texts and carriers of few letters."""
    monkeypatch.setattr(ordinary, "LONGEST", 60)
    monkeypatch.setattr(carriers, "_FROM", 20)
    monkeypatch.setattr(carriers, "_TO", 40)


def test_concept_with_only_positives_is_compared_with_ordinary_text(model, tmp_path, short):
    rng = random.Random(0)
    only = [{"text": text(rng, "z"), "labels": ["zed"]} for _ in range(60)]
    found = train(
        model, only, tmp_path / "only", tokenizer=make_tokenizer(), states=tmp_path / "s", layers=(0,), ordinary=52
    )
    concept = found.quality["concepts"]["zed"]
    assert concept["beside_ordinary"] and concept["auroc"] > 0.9 and concept["n_negative"] == 52
    assert concept["shuffled"] is None  # of one side
    assert any("compared with ordinary text" in line for line in warnings(found.quality))


def test_what_is_without_a_concept_must_be_in_enough_groups(model, tmp_path, short):
    rng = random.Random(0)
    own = [{"text": text(rng, "z"), "labels": ["zed"]} for _ in range(40)]
    others = [{"text": text(rng), "not": ["zed"], "group": "one"} for _ in range(40)]
    given = {"tokenizer": make_tokenizer(), "states": tmp_path / "s", "layers": (1,)}
    with pytest.raises(
        TrainingError, match=r"without the concept 'zed' is in 1 group \(.*too few to learn from and to"
    ):
        train(model, [*own, *others], tmp_path / "x", **given, ordinary=0)
    found = train(model, [*own, *others], tmp_path / "b", **given, ordinary=26)
    assert found.quality["concepts"]["zed"]["n_negative"] == 40 and found.quality["ordinary"]["texts"] == 26


def test_child_indistinguishable_from_its_parent_is_refused(model, tmp_path):
    rng = random.Random(0)
    tree = [
        {"id": "marked", "examples": [text(rng, "xk") for _ in range(30)]},
        {"id": "zed", "parents": ["marked"], "examples": [text(rng, "z") for _ in range(30)]},
    ]
    plain = [{"text": text(rng), "not": ["marked"]} for _ in range(60)]
    given = {"tokenizer": make_tokenizer(), "states": tmp_path / "s", "layers": (1,), "ordinary": 0}
    with pytest.raises(TrainingError, match="nothing of 'marked' is known to be without 'zed'"):
        train(model, [*tree, *plain], tmp_path / "x", **given)
    # A counterexample of which the parent is unknown is learnt from, too.
    against = {**tree[1], "counterexamples": [text(rng, "xk") for _ in range(30)]}
    found = train(model, [tree[0], against, *plain], tmp_path / "t", **given)
    scores = {marks: scores_of(found, model, text(random.Random(9), marks, 60)).mean(axis=0) for marks in ("z", "xk")}
    z = found.pack.find("zed")
    assert scores["z"][z] > 1.5 * scores["xk"][z]


def test_budget_leaves_out_whole_texts_and_reports_them(model, tmp_path):
    given = {"tokenizer": make_tokenizer(), "layers": (1,), "method": "plain", "ordinary": 0}
    long = [{**row, "text": row["text"] * 40} for row in rows(120)]
    found = train(model, long, tmp_path / "p", **given, states=tmp_path / "s", budget=1 << 24)
    read = found.quality["examples"]["examples"]
    left_out = read["left_out"]
    assert read["texts"] + left_out["texts"] == 240 and left_out["texts"] > 5
    assert read["tokens"] == 24 * 40 * read["texts"] and 0.9 < read["tokens"] * 32 * 4 / (1 << 24) <= 1
    concept = found.quality["concepts"]["zed"]
    assert concept["n_positive"] + concept["n_negative"] == read["texts"]
    (said,) = [line for line in warnings(found.quality) if line.startswith("The budget had no room for all")]
    assert f"{left_out['texts']} of examples" in said and said in found.pack.card_text()
    with pytest.raises(TrainingError, match=r"too few texts of 'zed' fit in the budget of 1048576 bytes: \d+ are"):
        train(model, long, tmp_path / "q", **given, states=tmp_path / "s2", budget=1 << 20)


def test_random_labels_are_reported_as_uninformative(model, tmp_path):
    rng = random.Random(3)
    labels = [{"text": text(rng), **({"labels": ["it"]} if i % 2 else {"not": ["it"]})} for i in range(160)]
    found = train(model, labels, tmp_path / "chance", tokenizer=make_tokenizer(), ordinary=0, states=tmp_path / "s")
    concept = found.quality["concepts"]["it"]
    assert concept["low"] < 0.5 < concept["high"]
    assert 0.45 < concept["shuffled"] < 0.55
    assert "`it` is not shown to beat the words of a text (TF-IDF)" in found.pack.card_text()


def test_loud_kinds_near_misses_and_what_would_tell_more_are_reported(trained):
    quality = trained.quality
    assert not any("more often" in said or "near misses" in said for said in warnings(quality))
    loud = copy.deepcopy(dict(quality))
    one = loud["concepts"]["zed"]
    one["alert_of_texts"]["by_kind"]["mail"] = {"alarms": 9, "n": 30, "rate": 0.3, "low": 0.15, "high": 0.5}
    one["alert_of_texts"]["raised"] = ["mail"]
    one["near_over"] = {"count": 45, "n": 90, "rate": 0.5, "low": 0.39, "high": 0.61}
    said = warnings(loud)
    assert "`zed` alarms more often than stated on mail." in said
    assert "Thresholds had to rise to keep the rate on some kinds of text: mail (`zed`)." in said
    assert any(line.startswith("`zed` also fires on more than a quarter of your own near misses") for line in said)
    loud["concepts"]["queue"]["under_chance"] = True
    assert any("`queue`: an AUROC is below chance" in line for line in verdict(loud))


def test_children_are_trained_within_their_parents(model, tmp_path):
    rng = random.Random(0)
    tree = [
        {"id": "marked", "examples": [text(rng, "xk") for _ in range(12)]},
        *(
            {"id": id, "parents": ["marked"], "examples": [text(rng, marks) for _ in range(30)]}
            for id, marks in (("zed", "z"), ("queue", "q"))
        ),
    ]
    plain = [{"text": text(rng), "not": ["marked"]} for _ in range(60)]
    found = train(
        model, [*tree, *plain], tmp_path / "tree", tokenizer=make_tokenizer(), ordinary=0, states=tmp_path / "s"
    )
    pack, concepts = found.pack, found.quality["concepts"]
    assert pack.score_rule == "path" and pack.path(pack.find("zed")) == ["marked", "zed"]
    assert min(concepts[id]["auroc"] for id in ("zed", "queue")) > 0.9
    # Siblings are told apart among what their parent is.
    scores = {marks: scores_of(found, model, text(random.Random(9), marks, 60)) for marks in "zq"}
    z, q = pack.find("zed"), pack.find("queue")
    assert scores["z"][:, z].mean() > 1.5 * scores["q"][:, z].mean()
    assert scores["q"][:, q].mean() > 1.5 * scores["z"][:, q].mean()


def test_spans_train_their_tokens(model, tmp_path):
    rng = random.Random(0)
    spans = []
    for _ in range(60):
        head, tail = text(rng, n=10), text(rng, n=10)
        spans.append({"text": f"{head}zzzzzzzz{tail}", "spans": {"zed": [[10, 18]]}})
    benign = [{"text": text(rng, n=28), "not": ["zed"]} for _ in range(60)]
    given = {"tokenizer": make_tokenizer(), "ordinary": 0, "states": tmp_path / "s", "layers": (0, 1)}
    found = train(model, [*spans, *benign], tmp_path / "spans", **given)
    concept = found.quality["concepts"]["zed"]
    assert concept["auroc"] > 0.95 and concept["tokens"]["inside"] == 8 * 60
    assert concept["tokens"]["against_rest"] > 0.9
    assert found.quality["examples"]["examples"]["tokens"] == 28 * 120
    scores = np.mean([scores_of(found, model, row["text"])[:, 0] for row in spans], axis=0)
    assert scores[12:18].min() > max(scores[:10].max(), scores[20:].max()) + 0.2
    assert "Tokens of marked stretches" in found.pack.card_text()
    # Texts with spans alone have their rest to compare with.
    alone = train(model, spans, tmp_path / "alone", **given, method="plain")
    assert alone.quality["concepts"]["zed"]["tokens"]["against_rest"] > 0.9


def test_turn_with_the_templates_own_words_is_located_correctly():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " user "}]
    again = [*turns, {"role": "user", "content": " "}, {"role": "assistant", "content": "assistant"}]
    examples = read_examples([{"messages": turns, "labels": ["x"]}, {"messages": again, "labels": ["x"]}])
    for rendered, said in zip(render(examples.texts, tokenizer, roles=("assistant",)), (1, 2), strict=True):
        assert [rendered.text[a:b] for a, b in rendered.counted] == ["user", "assistant"][:said]
        assert [rendered.text[a - 11 : a] for a, _ in rendered.counted] == ["<assistant>"] * said
    user = render(examples.texts, tokenizer, roles=("user",))[0]
    assert user.counted == ((6, 7),)
    blank = read_examples([{"messages": [turns[0], {**turns[1], "content": " "}], "labels": ["x"]}])
    with pytest.raises(TrainingError, match="example 0 has no turn of assistant that says anything"):
        render(blank.texts, tokenizer, roles=("assistant",))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(TrainingError, match="example 0: the model's chat template changes what is said"):
        render(examples.texts, tokenizer, roles=("user",))
    # The turns that do not count may be changed.
    one = "{% for m in messages %}{{ m.content | upper if m.role == 'user' else m.content }}{% endfor %}"
    tokenizer.chat_template = one
    assert render(examples.texts, tokenizer, roles=("assistant",))[0].counted == ((1, 7),)


@pytest.mark.parametrize("of_user", ["", " | trim", ".lstrip()", ".rstrip()", ".strip('\\n')"])
@pytest.mark.parametrize("of_assistant", ["", " | trim", ".lstrip()", ".rstrip()", ".strip('\\n')"])
def test_turns_are_located_however_a_template_strips_them(of_user, of_assistant):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}\n{% if m.role == 'user' %}{{ m.content" + of_user + " }}"
        "{% else %}<a>{{ m.content" + of_assistant + " }}\n\n{% endif %}{% endfor %}"
    )
    said = [" \nwhy\n ", "\n yes\n\n", "no", "no \n", "\n\nso", " a"]
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(said)]
    examples = read_examples([{"messages": turns, "labels": ["x"]}])
    [found] = render(examples.texts, tokenizer, roles=("user", "assistant"))
    stand = [found.text[a:b] for a, b in found.counted]
    assert [content.strip() for content in stand] == [content.strip() for content in said]
    # White space beside the template's own may be either's, and nothing else is taken for a turn's.
    assert all(content in own for own, content in zip(said, stand, strict=True))


def test_equal_answers_to_different_questions_stay_in_one_fold(model):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    rng, chats = random.Random(0), []
    for i in range(40):
        answer = text(rng, "z" if i % 2 else "")
        for _ in range(2):
            turns = [{"role": "user", "content": text(rng)}, {"role": "assistant", "content": answer}]
            chats.append({"messages": turns, "labels": {"zed": bool(i % 2)}})
    data = Dataset.of_examples(read_examples(chats), TextReader(model, tokenizer, ["resid_post.0"]))
    pairs = data.group.reshape(40, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all() and len(set(pairs[:, 0])) + data.n_twins == 40
    assert all(len(set(data.fold[data.group == group])) == 1 for group in set(data.group))


def test_chats_train_on_the_turns_of_a_role(model, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ bos_token }}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    rng = random.Random(0)
    chats = [
        {
            "messages": [
                {"role": "user", "content": text(rng, "q")},
                {"role": "assistant", "content": f" {text(rng, 'z' if i % 2 else '')} "},
            ],
            **({"labels": ["zed"]} if i % 2 else {"not": ["zed"]}),
        }
        for i in range(80)
    ]
    found = train(model, chats, tmp_path / "chats", tokenizer=tokenizer, ordinary=0, states=tmp_path / "s")
    assert found.quality["concepts"]["zed"]["auroc"] > 0.9
    assert found.quality["examples"]["examples"] == {"texts": 80, "tokens": 24 * 80}
    # Chats are not copies of each other for what they all begin with.
    beginning = {"role": "system", "content": " ".join(COMMON)}
    longer = [{**chat, "messages": [beginning, *chat["messages"]]} for chat in chats]
    assert "chat_date" not in found.pack.manifest["provenance"]
    dated = copy.copy(tokenizer)
    dated.chat_template = "{{ strftime_now('%A') }}" + tokenizer.chat_template
    options = {"tokenizer": dated, "ordinary": 0, "states": tmp_path / "s2", "chat_date": "2024-02-29"}
    stated = train(model, longer, tmp_path / "longer", **options).pack.manifest["provenance"]
    assert stated["chat_date"] == "2024-02-29"
    # What the user says is the same whatever the label.
    users = train(
        model, chats, tmp_path / "users", tokenizer=tokenizer, ordinary=0, states=tmp_path / "s", roles=("user",)
    )
    concept = users.quality["concepts"]["zed"]
    assert concept["low"] < 0.5 < concept["high"]
    with pytest.raises(TrainingError, match="has no turn of tool"):
        train(model, chats, tmp_path / "x", tokenizer=tokenizer, ordinary=0, roles=("tool",))
    with pytest.raises(TrainingError, match="has no chat template"):
        train(model, chats, tmp_path / "x", tokenizer=make_tokenizer(), ordinary=0)


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content | upper }}{% endfor %}", "{{ raise_exception('none') }}"]
)
def test_ordinary_chats_are_read_whatever_the_template_does(model, tmp_path, short, template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    given = {"tokenizer": tokenizer, "states": tmp_path / "s", "layers": (1,), "method": "plain"}
    found = train(model, rows(), tmp_path / "x", **given, ordinary=26)
    assert found.quality["ordinary"]["texts"] == 26 and min(found.quality["ordinary"]["kinds"].values()) == 1


def test_overlapping_training_and_test_texts_are_reported(model, tmp_path):
    own = read_examples(rows(24))
    reader = TextReader(model, make_tokenizer(), ["resid_post.0"])
    with pytest.raises(TrainingError, match=r"of --test are the training's, too: 48 of 48 groups of the training only"):
        Dataset.of_examples(own, reader, outside=own)
    assert Dataset.of_examples(own, reader, outside=read_examples(rows(2), like=own)).is_of(OWN).any()


def test_held_out_groups_are_not_trained_on_and_judged_separately(model, tmp_path):
    labelled = [{**row, "group": "far" if i < 20 else None} for i, row in enumerate(rows(60))]
    labelled = [{**row, "author": "Ann" if 20 <= i < 26 else "Bob"} for i, row in enumerate(labelled)]
    elsewhere = rows(20, seed=5)
    found = train(
        model,
        labelled,
        tmp_path / "held",
        tokenizer=make_tokenizer(),
        ordinary=0,
        states=tmp_path / "s",
        held_out={"group": ("far",), "author": ["Ann"]},
        outside=elsewhere,
    )
    assert found.quality["examples"]["elsewhere"]["texts"] == 20 + 6 + 40
    assert found.quality["examples"]["examples"]["texts"] == 120 - 26
    assert found.quality["concepts"]["zed"]["outside"]["auroc"] > 0.9
    assert "## Elsewhere" in found.pack.card_text()
    reader = TextReader(model, make_tokenizer(), ["resid_post.0"])
    data = Dataset.of_examples(read_examples(labelled), reader, held_out={"author": ["Ann"], "group": ["far"]})
    assert np.flatnonzero(data.fold == OUTSIDE).tolist() == list(range(26))
    for held_out, said in (({"group": ("near",)}, "no example has group 'near'"), ({"age": ("9",)}, "has age '9'")):
        with pytest.raises(TrainingError, match=f"{said}, which is to be held out"):
            Dataset.of_examples(read_examples(labelled), reader, held_out=held_out)


def test_ordinary_text_sets_thresholds_of_every_running_score(model, tmp_path, short):
    given = {"tokenizer": make_tokenizer(), "states": tmp_path / "s", "layers": (0,), "ordinary": 120}
    found = train(model, rows(), tmp_path / "q", **given)
    assert found.quality["ordinary"]["texts"] == 26 * round(120 / 26)
    assert found.quality["examples"]["examples in ordinary text"]["texts"] == 120
    measurement, _ = measured(model, found, rows(), **given)
    for name in (str(RollingLogit(16)), str(RollingLogit(64)), str(Ema(0.3)), str(Max())):
        stated = found.pack.thresholds_for(name)
        for p, rate in enumerate(measurement.of_texts[name]):
            assert stated[found.pack.find(measurement.data.concepts[p].id)] == np.float32(rate.threshold)
            over_it = measurement.highest[name][measurement.data.kind >= 0, p] > np.float32(rate.threshold)
            assert over_it.mean() <= 0.011, name
    # Another set of ordinary texts of these kinds, none of them in the training, alarms as rarely.
    fresh = [one.text for _, one in ordinary.ordinary(None, texts=1600).measured[-800:] if one.text]
    known = {one.text for one in measurement.data.examples}
    scores = [scores_of(found, model, one[:60].replace("\n", " ")) for one in fresh if one not in known]
    assert len(scores) > 300
    for p, concept in enumerate(found.pack.concepts):
        stated = found.quality["concepts"][concept["id"]]
        running, threshold = parse(stated["reads"]), stated["alert_of_texts"]["threshold"]
        alarms = np.mean([over(running, one[:, p : p + 1]).max() > threshold for one in scores])
        assert alarms <= stated["alert_of_texts"]["high"] + 0.02


def test_rule_on_a_rolling_logit_compares_the_running_score_of_the_written_pack(model, trained):
    """Live on a generation; beside scores from a plain forward."""
    manager, events = DynamicProbeManager(trained.pack, load_threshold=0.0), []
    ids = torch.tensor([[1, *(LETTERS.index(letter) + 4 for letter in "azbzczdzefzghzzz")]])
    with manager.attach(model, make_tokenizer()) as run:
        run.on("zed", above=1e-9, aggregate="rolling_logit:16", action=events.append)
        out = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    running = run.result(out).aggregate("zed", "rolling_logit:16").values
    whole = manager.score_tokens(forward_states(model, trained.pack, out[0].tolist()))
    answer = whole.column(trained.pack.find("zed"))[ids.shape[1] : -1]
    assert len(running) == len(answer) == 23
    assert np.allclose(running, over(RollingLogit(16), answer[:, None])[:, 0], atol=1e-4)
    assert (running[:7] == 0).all() and (running[7:] > 0).all()
    assert [event.column for event in events] == [ids.shape[1] + 7]


def config(kind, **more):
    sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return kind(**sizes, **more)


LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(config(Qwen2Config, **LLAMA_LIKE)),
    "gemma3": lambda: Gemma3ForCausalLM(config(Gemma3TextConfig, **LLAMA_LIKE, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(
        config(GPT2Config, n_embd=32, n_layer=3, n_head=2, n_positions=128, initializer_range=0.5)
    ),
    "mamba2": lambda: Mamba2ForCausalLM(
        config(
            Mamba2Config, hidden_size=32, num_hidden_layers=3, state_size=8, num_heads=8, head_dim=8, n_groups=1,
            initializer_range=0.5, chunk_size=16,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_other_families_can_be_trained_on(model, tmp_path, family):
    host = FAMILIES[family]().eval()
    found = train(host, rows(), tmp_path / family, tokenizer=make_tokenizer(), ordinary=0, states=tmp_path / "s")
    assert min(concept["auroc"] for concept in found.quality["concepts"].values()) > 0.85
    with pytest.raises(ModelMismatch):
        DynamicProbeManager(found.pack).attach(model, make_tokenizer(), strict=True)


def test_too_few_examples_and_invalid_settings_are_refused(model, tmp_path):
    few = rows(6)
    with pytest.raises(TrainingError, match=r"'zed' has examples in 3 groups.*give 8 or more"):
        train(model, few, tmp_path / "x", tokenizer=make_tokenizer(), ordinary=0)
    only = [{"text": f"z{text(random.Random(i))}", "labels": ["zed"]} for i in range(20)]
    with pytest.raises(TrainingError, match="what is without the concept 'zed' is in 0 groups"):
        train(model, only, tmp_path / "x", tokenizer=make_tokenizer(), ordinary=0)
    for wrong, said in (
        ({"layers": "7"}, "the model's are 0 to 2"),
        ({"layers": None}, "layers is None"),
        ({"method": "magic"}, "method"),
        ({"method": "mass_mean"}, "method"),
        ({"ordinary": -1}, "ordinary"),
        ({"watch": "median"}, "aggregate is 'median'"),
        ({"background": False}, "background"),
        ({"fpr": 0}, "fpr"),
        ({"roles": ("judge",)}, "roles"),
        ({"colour": 1}, "colour"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(model, rows(), tmp_path / "x", tokenizer=make_tokenizer(), **wrong)
    with pytest.raises(ConfigError, match="tokenizer is missing"):
        train(model, rows(), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_four_own_texts_train_beside_generated_ones_whatever_folds_they_are_in(model, tmp_path):
    """Four groups are in four of the five folds: no fold is short because of the budget."""
    rng = random.Random(5)
    own = [{"text": text(rng, "z"), "labels": ["zed"]} for _ in range(4)]
    own += [{"text": text(rng), "not": ["zed"]} for _ in range(20)]
    written = [Example(f"written {i}", text(rng, "z"), labels={"zed": True}, generated=True) for i in range(8)]
    examples = read_examples(own).extended(written)
    found = train(
        model, examples, tmp_path / "p", tokenizer=make_tokenizer(), ordinary=0, states=tmp_path / "s", layers=(0, 1)
    )
    concept = found.quality["concepts"]["zed"]
    assert concept["n_positive"] == 4 and concept["n_generated"] == 8
    assert all(np.isfinite([row["merit"], row["standard_error"]]).all() for row in found.quality["tried"])
