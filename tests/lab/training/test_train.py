"""Training a pack on tiny random models: the reported quality is that of the written pack.

Models and texts are random except for the letters: the tests cover the path from labels to scores.
"""

import copy
import hashlib
import random
import tracemalloc

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
from probemon.cli.shell_words import in_shell
from probemon.core.aggregate import Ema, over
from probemon.core.score_counts import ScoreCounts
from probemon.errors import ConfigError, ModelMismatch, TrainingError
from probemon.host.compatibility import model_problems
from probemon.host.identity import manifest_host
from probemon.lab.training import TrainingSettings, train
from probemon.lab.training.calibration import precision_thresholds, thresholds
from probemon.lab.training.card import warnings
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.examples import read_examples
from probemon.lab.training.measured import counts_where
from probemon.lab.training.metrics import auroc_of
from probemon.lab.training.state_store import TextReader
from probemon.lab.training.texts import render
from probemon.lab.training.trainer import _Job

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
    return {"background": False, "states": tmp_path_factory.mktemp("states") / "s", "layers": (0, 1, 2)}


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory, settings):
    out = tmp_path_factory.mktemp("trained") / "letters"
    return train(model, rows(), out, tokenizer=make_tokenizer(), **settings, report=out.with_name("letters.html"))


def scores_of(trained, model, text):
    """Scores `[T, P]` of a text by the written pack, from a plain forward."""
    manager = DynamicProbeManager(trained.pack, load_threshold=0.0)
    ids = [1, *(LETTERS.index(letter) + 4 for letter in text)]
    scored = manager.score_tokens(
        {site: hidden[1:] for site, hidden in forward_states(model, trained.pack, ids).items()}
    )
    return np.stack([scored.column(p) for p in range(trained.pack.n_probes)], axis=1)


def test_reported_quality_equals_that_of_the_written_pack(model, trained, settings):
    """Area, thresholds and rates, from scores of the pack itself and labels by hand."""
    job = _Job(model, make_tokenizer(), TrainingSettings(**settings), trained.pack.directory, print, print)
    data = job.dataset(read_examples(rows()), None)
    order = [list(trained.quality["concepts"]).index(concept["id"]) for concept in trained.pack.concepts]
    known = data.known[:, order]
    by_part = [scores_of(trained, model, data.texts[document].text) for document in data.document]
    highest = np.stack([over(Ema(0.3), scores).max(axis=0) for scores in by_part])
    for p, concept in enumerate(trained.pack.concepts):
        found = trained.quality["concepts"][concept["id"]]
        test = data.of("test") & (known[:, p] >= 0)
        assert found["auroc"] == pytest.approx(auroc_of(highest[test, p], known[test, p] == 1), abs=1e-3)
        assert found["auroc"] > 0.9 and found["low"] > 0.75
        benign = np.flatnonzero(data.of("calibrate") & (known[:, p] == 0))
        tokens = np.concatenate([by_part[i][:, p] for i in benign])
        threshold = float(trained.pack.alert_threshold[p])
        assert found["alert"]["threshold"] == threshold and found["alert"]["n"] == len(tokens)
        assert (tokens > threshold).sum() <= found["alert"]["allowed"]  # by the engine's own scores, without slack
        assert (tokens >= threshold - 1e-5).sum() > found["alert"]["allowed"]
        counted, own = trained.pack.score_counts()[p].numpy(), ScoreCounts.of(tokens[:, None]).counts[0]
        # Another forward has other last bits, so that a score may be in the bin beside.
        assert counted.sum() == len(tokens) and np.abs(np.cumsum(counted) - np.cumsum(own)).max() <= 3
        of_test = np.flatnonzero(test & (known[:, p] == 1))
        fires = np.concatenate([by_part[i][:, p] for i in of_test]) > threshold
        assert found["alert"]["test"]["with"]["rate"] == pytest.approx(fires.mean(), abs=0.01)


def test_scores_are_counted_in_little_memory():
    """A thousand concepts on half a million tokens are 2 GB of scores; all that is made of them at once was twenty."""
    rng = np.random.default_rng(0)
    scores, part = rng.random((40_000, 200), dtype=np.float32), rng.integers(0, 30, size=40_000)
    use = rng.random((30, 200)) < 0.5
    use[3] = False
    expected = ScoreCounts.of(np.where(use[part], scores, np.float32(np.nan))).counts
    tracemalloc.start()
    counts = counts_where(use, scores, part).counts
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(counts, expected) and expected.sum() > 3_000_000
    assert peak < 4 * scores.nbytes


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
    train(model, rows(), tmp_path / "letters", tokenizer=make_tokenizer(), **{**settings, "method": "mass_mean"})
    assert len(calls) == 1  # to see that the host still makes the same of three texts


def test_precision_thresholds_are_a_separate_alert_set(model, tmp_path, settings):
    many = {**settings, "states": tmp_path / "s", "layers": (1,)}
    found = train(model, rows(400), tmp_path / "p", tokenizer=make_tokenizer(), **many, precision=0.7)
    assert found.pack.alert_sets == ("precision_0.7", "rate_0.01")
    for concept in found.quality["concepts"].values():
        own = concept["precision"]
        assert own["right"] > 0.7 * own["fired"] > 0 and own["low"] >= 0.7
        assert own["test"]["rate"] > 0.6
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


def test_token_thresholds_keep_their_rate_if_tokens_of_a_text_correlate():
    """The rate on fresh texts is over the one asked for no more often than is claimed."""
    rng, over_rate, naive = np.random.default_rng(1), 0, 0

    def draw(n_texts):
        values = rng.normal(size=n_texts)[:, None] + 0.5 * rng.normal(size=(n_texts, 40))
        return (1 / (1 + np.exp(-values))).reshape(-1, 1).astype(np.float32), np.repeat(np.arange(n_texts), 40)

    fresh = draw(40_000)[0]
    for _ in range(60):
        scores, part = draw(150)
        benign = np.ones((150, 1), dtype=bool)
        (own,) = thresholds(scores, part, benign, np.arange(150), fpr=0.05)
        (alone,) = thresholds(scores, np.arange(6000), np.ones((6000, 1), dtype=bool), np.arange(6000), fpr=0.05)
        assert own.holds and 60 < own.effective < 1500 and alone.effective == 6000
        over_rate += (fresh > own.value).mean() > 0.05
        naive += (fresh > alone.value).mean() > 0.05
    assert over_rate <= 7 and naive > 12  # one in twenty is claimed
    (few,) = thresholds(scores[:400], part[:400], benign, np.arange(150), fpr=0.05)
    assert not few.holds and few.effective == 10  # of ten texts


def test_threshold_is_slightly_above_the_score_it_lies_on():
    """Texts that begin alike score alike, and another way to compute a score differs in its last bits."""
    everyone, benign = np.arange(40), np.ones((40, 1), dtype=bool)
    for value in (1e-7, 0.2, 0.5, 0.999, 1 - 2e-7):
        scores = np.full((40, 1), value, dtype=np.float32)
        (found,) = thresholds(scores, everyone, benign, everyone, fpr=0.05)
        assert np.nextafter(scores, np.float32(1)).max() <= found.value <= value + 1e-5 * min(1, 4 * value)
        assert found.value == np.float32(found.value) <= 1
    (found,) = thresholds(np.ones((40, 1), dtype=np.float32), everyone, benign, everyone, fpr=0.05)
    assert found.value == 1
    (found,) = thresholds(np.full((40, 1), 1 - 1e-9), everyone, benign, everyone, fpr=0.05)  # a running score, fp64
    assert found.value == 1
    known = (everyone < 60).astype(np.int8)[:, None]
    scores = np.float32([0.5 + 2**-20] * 38 + [0.5, 0.4])[:, None]
    (found,) = precision_thresholds(scores, everyone, known, np.ones(40, dtype=bool), everyone, precision=0.8)
    assert found.fired == (scores > found.value).sum()  # where the next score is nearer than that, it still fires


def test_concept_that_can_never_fire_is_reported(model, tmp_path, caplog):
    rng = random.Random(0)
    given = [{"text": text(rng, "z"), "labels": ["zed"]} for _ in range(40)]
    given += [{"text": text(rng), "not": ["zed"]} for _ in range(40)]
    found = train(model, given, tmp_path / "p", tokenizer=make_tokenizer(), background=False)
    assert "can never fire" not in "".join(warnings(found.quality))
    mute = copy.deepcopy(dict(found.quality))
    mute["concepts"]["zed"]["alert"]["threshold"] = 1.0
    assert any("`zed` can never fire: the threshold is 1" in line for line in warnings(mute))
    pack = ProbePack.open(tmp_path / "p")
    pack.alert_threshold[:] = 1
    with caplog.at_level("WARNING"):
        DynamicProbeManager(pack)
    assert "p: 1 concept never fires (alert threshold 1): 'zed'" in caplog.text


def test_concept_with_only_positives_is_compared_with_background(model, tmp_path):
    rng = random.Random(0)
    only = [{"text": text(rng, "z"), "labels": ["zed"]} for _ in range(60)]
    found = train(model, only, tmp_path / "only", tokenizer=make_tokenizer(), states=tmp_path / "s", layers=(0, 1))
    concept = found.quality["concepts"]["zed"]
    assert concept["beside_background"] and concept["auroc"] > 0.9
    assert min(concept["baselines"].values()) > 0.95
    assert min(row["auroc"] for row in found.quality["sites"]) > 0.9
    assert 0.4 < concept["shuffled"] < 0.6
    assert "not shown to beat" in found.pack.card_text().splitlines()[2]
    assert any("compared with background text" in line for line in warnings(found.quality))


def test_negatives_must_suffice_to_train_calibrate_and_test(model, tmp_path):
    rng = random.Random(0)
    own = [{"text": text(rng, "z"), "labels": ["zed"]} for _ in range(40)]
    others = [{"text": text(rng), "not": ["zed"], "group": "one"} for _ in range(40)]
    given = {"tokenizer": make_tokenizer(), "states": tmp_path / "s", "layers": (1,)}
    with pytest.raises(TrainingError, match=r"without the concept 'zed' is in 1 group \(.*too few to train, calibrate"):
        train(model, [*own, *others], tmp_path / "x", **given, background=False)
    found = train(model, [*own, *others], tmp_path / "b", **given)
    assert found.quality["concepts"]["zed"]["beside_background"] and found.quality["sites"][0]["auroc"] > 0.8


def test_child_indistinguishable_from_its_parent_is_refused(model, tmp_path):
    rng = random.Random(0)
    tree = [
        {"id": "marked", "examples": [text(rng, "xk") for _ in range(30)]},
        {"id": "zed", "parents": ["marked"], "examples": [text(rng, "z") for _ in range(30)]},
    ]
    plain = [{"text": text(rng), "not": ["marked"]} for _ in range(60)]
    given = {"tokenizer": make_tokenizer(), "states": tmp_path / "s", "layers": (1,), "background": False}
    with pytest.raises(TrainingError, match="nothing of 'marked' is known to be without 'zed'"):
        train(model, [*tree, *plain], tmp_path / "x", **given)
    # A counterexample of which the parent is unknown is learnt from, too.
    against = {**tree[1], "counterexamples": [text(rng, "xk") for _ in range(30)]}
    found = train(model, [tree[0], against, *plain], tmp_path / "t", **given)
    scores = {marks: scores_of(found, model, text(random.Random(9), marks, 60)).mean(axis=0) for marks in ("z", "xk")}
    z = found.pack.find("zed")
    assert scores["z"][z] > 1.5 * scores["xk"][z]


def test_budget_leaves_out_whole_texts_and_reports_them(model, tmp_path):
    given = {"tokenizer": make_tokenizer(), "layers": (1,)}
    long = [{**row, "text": row["text"] * 40} for row in rows(120)]
    found = train(model, long, tmp_path / "p", **given, background=False, states=tmp_path / "s", budget=1 << 20)
    left_out = {name: split.get("left_out") for name, split in found.quality["examples"].items()}
    assert left_out["calibrate"]["texts"] > 5 and left_out["test"]["texts"] > 5 and not left_out["train"]["texts"]
    tested = found.quality["examples"]["test"]
    assert tested["tokens"] == 24 * 40 * tested["texts"]
    concept = found.quality["concepts"]["zed"]
    assert concept["n_positive"] + concept["n_negative"] == tested["texts"]
    said = [line for line in warnings(found.quality) if line.startswith("The budget had no room for all")]
    assert len(said) == 2 and f"{left_out['test']['texts']} of test" in said[0] and "of train" in said[1]
    longer = [{**row, "text": row["text"] * 40} for row in long]
    with pytest.raises(TrainingError, match=r"no text to \w+ on fits in the budget of 1048576 bytes"):
        train(model, longer, tmp_path / "q", **given, background=False, states=tmp_path / "s2", budget=1 << 20)


def test_tokens_beyond_the_memory_limit_are_reported(model, trained, tmp_path):
    whole = trained.quality["drawn"]
    assert whole["probes"] == whole["layers"] == {"tokens": n_train(trained), "of": n_train(trained)}
    assert not any("had room in memory" in line for line in warnings(trained.quality))
    given = {"tokenizer": make_tokenizer(), "layers": (1,), "background": False, "states": tmp_path / "s"}
    long = [{**row, "text": row["text"] * 20} for row in rows(60)]
    found = train(model, long, tmp_path / "p", **given, memory=1 << 20)
    drawn = found.quality["drawn"]["probes"]
    assert drawn["of"] == n_train(found) > (1 << 20) // (4 * 32)  # bytes of memory over those of a state
    assert drawn["tokens"] == pytest.approx((1 << 20) // (4 * 32), rel=0.03)
    (said,) = [line for line in warnings(found.quality) if "had room in memory" in line]
    assert f"probes learnt from {drawn['tokens']:,} of {drawn['of']:,}" in said and "layers" not in said
    assert said in found.pack.card_text()


def n_train(found):
    return found.quality["examples"]["train"]["tokens"]


def test_random_labels_are_reported_as_uninformative(model, tmp_path):
    rng = random.Random(3)
    labels = [{"text": text(rng), **({"labels": ["it"]} if i % 2 else {"not": ["it"]})} for i in range(160)]
    found = train(
        model, labels, tmp_path / "chance", tokenizer=make_tokenizer(), background=False, states=tmp_path / "s"
    )
    concept = found.quality["concepts"]["it"]
    assert concept["low"] < 0.5 < concept["high"]
    assert 0.45 < concept["shuffled"] < 0.55
    assert "`it` is not shown to beat the words of a text (TF-IDF)" in found.pack.card_text().splitlines()[2]


def test_small_test_sets_and_failed_thresholds_are_reported(trained):
    quality = trained.quality
    few = {id: {**found, "n_negative": 4} for id, found in quality["concepts"].items() if id == "zed"}
    assert not any("mean little" in said for said in warnings(quality))
    assert any(
        "The areas of `zed` are of so few" in said and "(of one side 4)" in said
        for said in warnings({**quality, "concepts": {**quality["concepts"], **few}})
    )
    alert = quality["concepts"]["zed"]["alert"]
    test = {**alert["test"], "without": {**alert["test"]["without"], "rate": 0.265}}
    loud = {"zed": {**quality["concepts"]["zed"], "alert": {**alert, "test": test}}}
    said = warnings({**quality, "concepts": {**quality["concepts"], **loud}})
    assert any("more fires of `zed`: up to 26.5% of the tokens" in line for line in said)


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
        model, [*tree, *plain], tmp_path / "tree", tokenizer=make_tokenizer(), background=False, states=tmp_path / "s"
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
        spans.append({"text": f"{head}zz{tail}", "spans": [{"start": 10, "end": 12, "concept": "zed"}]})
    found = train(model, spans, tmp_path / "spans", tokenizer=make_tokenizer(), background=False, states=tmp_path / "s")
    assert found.quality["concepts"]["zed"]["auroc"] > 0.95
    assert found.quality["examples"]["test"]["tokens"] == 22 * found.quality["examples"]["test"]["texts"]
    # Stretches have no running score, so they set no threshold of one: texts without spans do.
    of_texts = found.quality["concepts"]["zed"]["alert_of_texts"]
    assert (
        of_texts["n"] == 0 and not found.pack.aggregated and any("by text" in line for line in warnings(found.quality))
    )
    benign = [{"text": text(rng, n=20), "not": ["zed"]} for _ in range(200)]
    mixed = train(model, [*spans, *benign], tmp_path / "m", tokenizer=make_tokenizer(), background=False, fpr=0.2)
    threshold = mixed.quality["concepts"]["zed"]["alert_of_texts"]["threshold"]
    assert mixed.pack.thresholds_for("ema(0.3)").tolist() == [pytest.approx(threshold)]
    fresh = [over(Ema(0.3), scores_of(mixed, model, text(rng, n=20))).max() for _ in range(100)]
    assert np.mean(np.asarray(fresh) > threshold) < 0.35


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


def test_equal_answers_to_different_questions_stay_in_one_split(model):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    rng, chats = random.Random(0), []
    for i in range(40):
        answer = text(rng, "z" if i % 2 else "")
        for _ in range(2):
            turns = [{"role": "user", "content": text(rng)}, {"role": "assistant", "content": answer}]
            chats.append({"messages": turns, "labels": {"zed": bool(i % 2)}})
    data = Dataset.of_examples(read_examples(chats), TextReader(model, tokenizer, ["resid_post.0"]))
    assert data.group.tolist() == [i // 2 for i in range(80)]


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
    found = train(model, chats, tmp_path / "chats", tokenizer=tokenizer, background=False, states=tmp_path / "s")
    assert found.quality["concepts"]["zed"]["auroc"] > 0.9
    assert found.quality["examples"]["test"]["tokens"] == 24 * found.quality["examples"]["test"]["texts"]
    # Chats are not copies of each other for what they all begin with.
    beginning = {"role": "system", "content": " ".join(COMMON)}
    longer = [{**chat, "messages": [beginning, *chat["messages"]]} for chat in chats]
    assert "chat_date" not in found.pack.manifest["provenance"]
    dated = copy.copy(tokenizer)
    dated.chat_template = "{{ strftime_now('%A') }}" + tokenizer.chat_template
    options = {"tokenizer": dated, "background": False, "states": tmp_path / "s2", "chat_date": "2024-02-29"}
    stated = train(model, longer, tmp_path / "longer", **options).pack.manifest["provenance"]
    assert stated["chat_date"] == "2024-02-29"
    # What the user says is the same whatever the label.
    users = train(
        model, chats, tmp_path / "users", tokenizer=tokenizer, background=False, states=tmp_path / "s", roles=("user",)
    )
    concept = users.quality["concepts"]["zed"]
    assert concept["low"] < 0.5 < concept["high"]
    with pytest.raises(TrainingError, match="has no turn of tool"):
        train(model, chats, tmp_path / "x", tokenizer=tokenizer, background=False, roles=("tool",))
    with pytest.raises(TrainingError, match="has no chat template"):
        train(model, chats, tmp_path / "x", tokenizer=make_tokenizer(), background=False)


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", ("assistant",)),
        ("{{ raise_exception('none') }}", ("assistant",)),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", ("system",)),
    ],
)
def test_background_that_the_template_rejects_is_named_with_a_remedy(model, tmp_path, template, roles):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(TrainingError) as caught:
        train(model, rows(), tmp_path / "x", tokenizer=tokenizer, states=tmp_path / "s", roles=roles)
    said = in_shell(str(caught.value))
    assert "the background text" in said and said.endswith("leave it out (--no-background)")


def test_overlapping_training_and_test_texts_are_reported(model, tmp_path):
    own = read_examples(rows(24))
    reader = TextReader(model, make_tokenizer(), ["resid_post.0"])
    with pytest.raises(TrainingError, match=r"of --test are the training's, too: 48 of 48 groups of the training only"):
        Dataset.of_examples(own, reader, outside=own)
    assert Dataset.of_examples(own, reader, outside=read_examples(rows(2), like=own)).of("train").any()


def test_held_out_groups_are_not_trained_on_and_judged_separately(model, tmp_path):
    labelled = [{**row, "group": "far" if i < 20 else None} for i, row in enumerate(rows(60))]
    elsewhere = rows(20, seed=5)
    found = train(
        model,
        labelled,
        tmp_path / "held",
        tokenizer=make_tokenizer(),
        background=False,
        states=tmp_path / "s",
        held_out=("far",),
        outside=elsewhere,
    )
    assert found.quality["examples"]["outside"]["texts"] == 20 + 40
    assert found.quality["concepts"]["zed"]["outside"]["auroc"] > 0.9
    with pytest.raises(TrainingError, match="no example is of the held-out group 'near'"):
        train(model, labelled, tmp_path / "x", tokenizer=make_tokenizer(), background=False, held_out=("near",))


def test_background_lowers_the_firing_rate(model, tmp_path):
    tokenizer = make_tokenizer()
    loud = train(model, rows(), tmp_path / "l", tokenizer=tokenizer, background=False, states=tmp_path / "s")
    quiet = train(model, rows(), tmp_path / "q", tokenizer=tokenizer, states=tmp_path / "s2")
    fires = quiet.quality["background_fires"]
    assert loud.quality["background_fires"] is None and fires["tokens"] > 5000
    assert fires["share_of_tokens"] < 0.03


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
    found = train(host, rows(), tmp_path / family, tokenizer=make_tokenizer(), background=False, states=tmp_path / "s")
    assert min(concept["auroc"] for concept in found.quality["concepts"].values()) > 0.85
    with pytest.raises(ModelMismatch):
        DynamicProbeManager(found.pack).attach(model, make_tokenizer(), strict=True)


def test_too_few_examples_and_invalid_settings_are_refused(model, tmp_path):
    few = rows(6)
    with pytest.raises(TrainingError, match=r"'zed' has examples in 3 groups.*give 8 or more"):
        train(model, few, tmp_path / "x", tokenizer=make_tokenizer(), background=False)
    only = [{"text": f"z{text(random.Random(i))}", "labels": ["zed"]} for i in range(20)]
    with pytest.raises(TrainingError, match="nothing is without the concept 'zed'"):
        train(model, only, tmp_path / "x", tokenizer=make_tokenizer(), background=False)
    for wrong, said in (
        ({"layers": "7"}, "the model's are 0 to 2"),
        ({"layers": None}, "layers is None"),
        ({"method": "magic"}, "method"),
        ({"fpr": 0}, "fpr"),
        ({"roles": ("judge",)}, "roles"),
        ({"colour": 1}, "colour"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(model, rows(), tmp_path / "x", tokenizer=make_tokenizer(), **wrong)
    with pytest.raises(ConfigError, match="tokenizer is missing"):
        train(model, rows(), tmp_path / "x")
    assert not (tmp_path / "x").exists()
