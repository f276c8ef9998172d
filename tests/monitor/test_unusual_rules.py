"""Rules on z-scores and ranks give the events of the offline result bit for bit; packs keep their score counts."""

import statistics

import numpy as np
import pytest
import torch

from conftest import HIDDEN, PAD, make_model, make_pack
from forging import forge
from probemon import DynamicProbeManager, Ema, ProbePack, Rank, ZScore
from probemon.core.aggregate import Each, over
from probemon.core.baselines import with_counts
from probemon.core.score_counts import ScoreCounts, log_odds
from probemon.core.scores import PROMPT as PROMPT_PHASE
from probemon.errors import CalibrationError, ConfigError, PackCorrupt, PackError, UnsupportedDecoding
from probemon.lab.calibration.calibrate import calibrate_alerts
from probemon.lab.calibration.calibrated_pack import write_calibrated
from probemon.lab.calibration.score_statistics import ScoreStatistics
from probemon.lab.training.settings import TrainingSettings
from probemon.monitor.rule_spec import RuleSpec
from probemon.packs.edit import merge, rename, subset
from probemon.packs.group import PackGroup
from probemon.packs.quantize import quantize

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])
GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
BASELINES = ["z:pack", "rank:pack", "z:pack:ema:0.3", "z:last:20", "rank:last:16", "z:last:18:ema:0.3"]


def documents(n, k, seed=0):
    rng = np.random.default_rng(seed)
    return [(1 / (1 + np.exp(-rng.normal(0, 2, (30, k))))).astype(np.float32) for _ in range(n)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A pack that knows how its probes score at random states."""
    pack = make_pack(tmp_path_factory.mktemp("counted") / "pack", make_model())
    manager = DynamicProbeManager(pack, load_threshold=0.0)
    states = torch.randn(12, 30, HIDDEN, generator=torch.Generator().manual_seed(3))
    scores = [manager.score_all(state).numpy() for state in states]
    statistics = ScoreStatistics.of(scores, range(pack.n_probes), Ema(0.3))
    return write_calibrated(pack, pack.directory.parent / "counted", statistics=statistics)


def column(result, probe, row):
    tokens = [i for i in result.tokens_of(row, "generated") if not result.coverage.unseen[i]]
    return result.scores.column(probe)[tokens][:, None]


@pytest.mark.parametrize("ids", [PROMPT, BATCH], ids=["one row", "padded batch"])
@pytest.mark.parametrize("aggregate", BASELINES)
def test_baseline_events_equal_the_offline_result_bit_for_bit(counted, aggregate, ids):
    model, manager = make_model(), DynamicProbeManager(counted, load_threshold=0.0)
    met = []
    with manager.attach(model) as run:
        run.on("c9", above=0.4, aggregate=aggregate, action=met.append)
        out = model.generate(ids, attention_mask=(ids != PAD).long(), **GREEDY)
    result, probe = run.result(out), counted.find("c9")
    expected = []
    for row in range(len(ids)):
        known = with_counts(made_of(aggregate), counted, [probe])
        values, over_it = over(known, column(result, probe, row))[:, 0], False
        for position, value in zip(result.aggregate("c9", aggregate, row=row).positions, values, strict=True):
            if value > 0.4 and not over_it:
                expected.append((row, int(position), float(value)))
            over_it = value > 0.4
        assert result.aggregate("c9", aggregate, row=row).values.tobytes() == values.tobytes()
    assert sorted((event.row, event.column, event.value) for event in met) == expected and expected
    assert {event.aggregate for event in met} == {str(made_of(aggregate))}


def made_of(text):
    """The aggregator that a text should name."""
    measure, _, rest = text.partition(":")
    where, _, of = rest.partition(":ema:")
    last = int(where.partition(":")[2]) if where.startswith("last") else None
    return {"z": ZScore, "rank": Rank}[measure](last, *([Ema(float(of))] if of else []))


def test_baseline_of_a_sequence_does_not_depend_on_its_batch(counted):
    model, manager = make_model(), DynamicProbeManager(counted, load_threshold=0.0)
    rows = []
    for ids in (BATCH[1:2], BATCH):
        with manager.attach(model) as run:
            run.on("c9", above=0.99, aggregate="rank:last:200", action="stop")
            out = model.generate(ids, attention_mask=(ids != PAD).long(), **GREEDY)
        rows.append(run.result(out).aggregate("c9", "z:last:20", row=len(ids) // 2).values)
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-3)  # a batch has other last bits in its states


@pytest.mark.parametrize(
    ("aggregate", "above", "words"),
    [
        ("z:pack", 200, "z:pack lies between 0 and"),
        ("z:pack", -1, "give 0 or more"),
        ("rank:last:16", 0.95, "rank:last:16 lies between 0 and 0.941176 and must exceed it"),
        ("z:last:16", 134, "give 0 or more, and less than 133"),
        ("z:last:16", float("inf"), "give 0 or more"),
        ("ema:0.3", 1.5, "scores lie between 0 and 1"),
        ("z:pack", None, "not for z:pack: give above=$"),
        ("z:pack:mean", 1, "by mean: probemon calibrate --benign FILE --statistics --aggregate mean counts it"),
    ],
)
def test_unreachable_baseline_threshold_is_refused(counted, aggregate, above, words):
    with DynamicProbeManager(counted).attach(make_model()) as run, pytest.raises(ConfigError, match=words):
        run.on("c9", above=above, aggregate=aggregate)
    with pytest.warns(UserWarning), DynamicProbeManager(counted).attach(make_model()) as run:
        run.on("c9", above=2.5, aggregate="z:last:16")


def test_concept_that_was_not_evaluated_has_no_baseline(counted):
    model = make_model()
    manager = DynamicProbeManager(counted, load_threshold=0.9, keep_top_k=0, base_layers=[0])
    with manager.attach(model) as run:
        out = model.generate(PROMPT, **GREEDY)
    result = run.result(out)
    deep = counted.n_probes - 1
    assert result.aggregate(deep, "z:pack").n_inactive
    with pytest.raises(ConfigError, match=r"was not evaluated at .* give always_on, or a rule"):
        result.aggregate(deep, "z:last:16")


# -- packs ---------------------------------------------------------------------------------------


def test_score_statistics_are_counts_of_running_scores_by_document():
    texts = documents(5, 2)
    texts[1][4] = np.nan
    statistics = ScoreStatistics.of(texts, [3, 7], Ema(0.3))
    seen = [text[~np.isnan(text).all(axis=1)] for text in texts]
    assert np.array_equal(statistics.counts["each"].counts, ScoreCounts.of(np.concatenate(seen)).counts)
    running = np.concatenate([over(Ema(0.3), text) for text in seen])
    assert np.array_equal(statistics.counts["ema(0.3)"].counts, ScoreCounts.of(running).counts)
    assert statistics.stated() == {
        "aggregators": ["each", "ema(0.3)"],
        "n_concepts": 2,
        "n_documents": 5,
        "n_tokens": 149,
    }
    with pytest.raises(CalibrationError, match="no tokens"):
        ScoreStatistics.of([], [3])
    with pytest.raises(ConfigError, match="a column for each probe"):
        ScoreStatistics.of(texts, [3])


def test_derived_packs_keep_their_score_counts(counted, tmp_path):
    own = counted.score_counts("ema(0.3)")[counted.find("c7")].tolist()
    assert counted.counted == ("each", "ema(0.3)") and sum(own) == 360
    for made in (
        rename(counted, tmp_path / "renamed", name="other"),
        subset(counted, tmp_path / "some", ["c7", "c9"]),
        quantize(counted, tmp_path / "int8"),
        write_calibrated(counted, tmp_path / "alerts", watched=[3], alerts=calibrate_alerts(documents(9, 1), fpr=0.1)),
    ):
        assert made.score_counts(Ema(0.3))[made.find("c7")].tolist() == own
    bare = make_pack(tmp_path / "bare", make_model())
    both = merge({"a": counted, "b": bare}, tmp_path / "both", name="both")
    group = PackGroup({"a": counted, "b": bare})
    for several in (both, group):
        counts = several.score_counts("ema(0.3)")
        assert counts[several.find("a:c7")].tolist() == own and not counts[several.find("b:c7")].any()
        with pytest.raises(ConfigError, match=r"b:c7 the pack counted 0"):
            with_counts(ZScore(), several, [several.find("b:c7")])
    with pytest.raises(ConfigError, match="by mean: probemon calibrate"):
        group.score_counts("mean")


def test_new_score_counts_replace_old_ones(counted, tmp_path):
    again = ScoreStatistics.of(documents(2, 2), [3, 7])
    made = write_calibrated(counted, tmp_path / "again", statistics=again)
    before, after = counted.score_counts(), made.score_counts()
    assert after[[3, 7]].sum(1).tolist() == [60, 60] and torch.equal(after[8:], before[8:])
    assert torch.equal(made.score_counts("ema(0.3)"), counted.score_counts("ema(0.3)"))
    assert made.manifest["provenance"]["calibrations"][-1]["statistics"]["n_tokens"] == 60
    assert "Scores of 2 concepts were counted at 60 tokens" in made.card_text()
    assert made.concepts == counted.concepts and torch.equal(made.alert_threshold, counted.alert_threshold)
    ProbePack.open(made.directory, verify=True)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(40, 127, dtype=torch.int32), r"\(40, 127\), expected an aggregator's name"),
        (torch.zeros(40, 128), "float32"),
        (torch.full((40, 128), -1, dtype=torch.int32), "has a count under 0"),
    ],
)
def test_forged_score_counts_are_named(counted, tmp_path, tensor, words):
    forged = forge(counted, tmp_path / "forged", lambda tensors: tensors.update({"score_counts:each": tensor}))
    with pytest.raises(PackCorrupt, match=words):
        ProbePack.open(forged).score_counts()


def test_invalid_score_counts_are_not_written(tmp_path):
    for wrong in (torch.zeros(40, 128), torch.full((40, 128), -1), torch.zeros(40, 3, dtype=torch.int32)):
        with pytest.raises(PackError, match=r"score_counts\['each'\]"):
            make_pack(tmp_path / "pack", make_model(), score_counts={"each": wrong})


def test_calibration_for_a_baseline_is_refused():
    with pytest.raises(ConfigError, match="alert thresholds of z:pack: nothing is calibrated"):
        calibrate_alerts(documents(3, 2), fpr=0.1, aggregate="z:pack")
    with pytest.raises(ConfigError, match="watch is rank:last:64: nothing is calibrated"):
        TrainingSettings(watch="rank:last:64")


@pytest.mark.parametrize("aggregate", ["z:traffic:40", "rank:traffic:16", "z:traffic:64:ema:0.3"])
def test_traffic_baseline_covers_all_sequences_and_runs_in_order(counted, aggregate):
    model, manager = make_model(), DynamicProbeManager(counted, load_threshold=0.0)
    [rule] = RuleSpec("c9", above=0.4, aggregate=aggregate, action="record").rules(counted)
    [other] = RuleSpec("c2", above=0.4, aggregate=aggregate, action="record").rules(counted)
    order, met = [], []
    for ids in (BATCH, PROMPT):
        with manager.attach(model) as run:
            run.add_rules([rule, other])
            run.follow(lambda placed, scores: order.append((placed, scores)))
            model.generate(ids, attention_mask=(ids != PAD).long(), **{**GREEDY, "max_new_tokens": 25})
        met += [(event.row, event.column, event.value) for event in run.events if event.concept == "c9"]
    # Plain Python: the running score of each row, its log odds, and all that came before it.
    by_row, window, expected, streaks, of = {}, [], [], {}, Ema(0.3) if "ema" in aggregate else Each()
    most, runs = int(aggregate.split(":")[2]), 0
    for placed, scores in order:
        if placed.phase == PROMPT_PHASE:
            runs += 1
            continue
        column = scores.column(counted.find("c9"))
        for i, row in enumerate(placed.rows.tolist()):
            state = by_row.get((runs, row), of.begin())
            by_row[runs, row], [score] = of.add(state, column[i : i + 1])
            clipped = min(max(score, 1e-12), 1 - 1e-12)
            odds = float(log_odds(np.array([score]))[0])
            assert abs(odds - np.log(clipped / (1 - clipped))) < 1e-6 or not 1e-9 < score < 1 - 1e-9
            past = sorted(window[-most:])
            if aggregate.startswith("rank"):
                value = sum(one < odds for one in past) / (len(past) + 1)
            elif len(past) < 16:
                value = float("nan")
            else:
                median = statistics.median(past)
                distance = statistics.median(abs(one - median) for one in past)
                value = (odds - median) / max(1.4826022185056018 * distance, 0.25)
            window.append(odds)
            streaks[runs, row] = streaks.get((runs, row), 0) + 1 if value > 0.4 else 0
            if streaks[runs, row] == 1:
                expected.append((row, int(placed.columns[i]), value))
    assert [one[:2] for one in met] == [one[:2] for one in expected] and len(met) > 5
    assert np.allclose([one[2] for one in met], [one[2] for one in expected], atol=1e-9)


def test_traffic_baseline_is_refused_for_beams_and_offline(counted):
    model, manager = make_model(), DynamicProbeManager(counted)
    with manager.attach(model) as run:
        run.on("c9", above=3.0, aggregate="z:traffic:64", action="record")
        with pytest.raises(UnsupportedDecoding, match="last tokens of all traffic"):
            model.generate(PROMPT, num_beams=2, **GREEDY)
        out = model.generate(PROMPT, **GREEDY)
        with pytest.raises(ConfigError, match="which a result does not have"):
            run.result(out).aggregate("c9", "z:traffic:64")
    with pytest.raises(ConfigError, match="traffic is of the last tokens"):
        ZScore(traffic=True)
