"""An audit scores every probe on a sample of tokens that is independent of what the tokens contain."""

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_pack
from corpora import make_tokenizer, random_texts
from oracle import states
from probemon import DynamicProbeManager
from probemon.core.intervals import mean_interval
from probemon.engine.audit import Audit, sample
from probemon.errors import ConfigError
from probemon.lab.corpora.corpus import score_documents
from probemon.lab.corpora.documents import read_documents


@pytest.fixture(scope="module")
def independent(model, tmp_path_factory):
    """A pack of which a descent from 0.6 on misses much: scores do not fall downward."""
    return make_pack(tmp_path_factory.mktemp("packs") / "independent", model, rule="independent", seed=4)


def missed(scores, everything, alert):
    """One token in plain Python: of the true best ten, and of all that fire, which are not active."""
    active = set(scores)
    best = sorted(range(len(everything)), key=lambda p: (-everything[p], p))[:10]
    firing = [p for p in range(len(everything)) if everything[p] > alert[p]]
    return len([p for p in best if p not in active]), len(firing), len([p for p in firing if p not in active])


def test_audit_counts_equal_plain_python(model, independent):
    manager = DynamicProbeManager(independent, load_threshold=0.6, audit_rate=1.0, impl="cpu", max_loaded_probes=20)
    tokenizer, alert = make_tokenizer(), independent.alert_threshold.tolist()
    n_missed = n_firing = 0
    for scored in score_documents(manager, model, tokenizer, read_documents(random_texts(6)), exhaustive=True):
        cover, parts = scored.scores.coverage, []
        for t in range(len(scored.tokens)):
            top, firing, lost = missed(scored.scores.active(t).tolist(), scored.everything[t].tolist(), alert)
            assert (cover.audited[t], cover.top_missed[t], cover.firing[t], cover.firing_missed[t]) == (
                1,
                top,
                firing,
                lost,
            )
            parts.append((top, firing, lost))
            n_missed, n_firing = n_missed + lost, n_firing + firing
        audit = Audit.of(cover)
        assert (
            audit.n_tokens == len(parts)
            and audit.n_firing == sum(f for _, f, _ in parts)
            and audit.n_firing_missed == sum(m for *_, m in parts)
        )
        shares = [1 - m / f for _, f, m in parts if f]
        assert abs(audit.top_recall.value - np.mean([1 - top / 10 for top, *_ in parts])) < 1e-12
        assert abs(audit.firing_recall.value - np.mean(shares)) < 1e-12
        assert (audit.firing_recall.low, audit.firing_recall.high) == mean_interval(
            audit.firing_recall.value, len(shares)
        )
        assert audit.share_active == cover.active.sum() / (len(parts) * independent.n_probes)
    assert 0 < n_missed < n_firing


@pytest.mark.parametrize("strategy", ["descent", "exhaustive"])
def test_audit_online_equals_offline_and_changes_no_score(model, independent, strategy):
    """Prompt and generated tokens; the retained sets of the generated ones have a part in what is found."""
    ids = torch.tensor([[1, 7, 9, 13, 20, 4, 6]])
    found = []
    for rate in (0.0, 0.4, 1.0):
        manager = DynamicProbeManager(
            independent, load_threshold=0.6, keep_top_k=4, audit_rate=rate, impl="cpu", strategy=strategy
        )
        with manager.attach(model) as run:
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None
            )
        found.append(run.result(out))
    bare, some, whole = found
    everything, alert = (
        manager.score_all(states(model, independent, out[0].tolist())).tolist(),
        independent.alert_threshold.tolist(),
    )
    for result in found:
        assert result.scores.values.tobytes() == bare.scores.values.tobytes()
    cover = whole.coverage
    for i in range(len(whole) - 1):
        top, firing, lost = missed(whole.scores.active(i).tolist(), everything[i], alert)
        assert (cover.top_missed[i], cover.firing[i], cover.firing_missed[i]) == (top, firing, lost)
    assert cover.audited.tolist() == [1] * (len(whole) - 1) + [0]  # the last one was never run
    assert bare.audit.n_tokens == 0 and bare.audit.firing_recall is None and str(bare.audit) == "no token was audited"
    chosen = some.coverage.audited > 0
    assert (
        5 < chosen.sum() < 32
        and (some.coverage.firing[chosen] == cover.firing[chosen]).all()
        and not some.coverage.firing[~chosen].any()
    )


def test_exact_descent_misses_nothing_and_the_audit_gives_its_interval(model, pack):
    manager = DynamicProbeManager(pack, load_threshold="exact", audit_rate=1.0, impl="cpu")
    audits = [
        Audit.of(s.scores.coverage)
        for s in score_documents(manager, model, make_tokenizer(), read_documents(random_texts(8)))
    ]
    whole = sum(audits[1:], audits[0])
    assert whole.n_tokens == sum(a.n_tokens for a in audits) and whole.n_firing_missed == 0
    assert whole.firing_recall.value == whole.firing_recall.high == 1 and 0.9 < whole.firing_recall.low < 1
    assert Audit.of_totals(whole.as_dict()) == whole


def test_audit_samples_are_random_by_position_and_reproducible():
    rows, columns = np.repeat(np.arange(40), 1000), np.tile(np.arange(1000), 40)
    for rate in (0.01, 0.3, 0.9):
        chosen = sample(rate, 3, rows, columns)
        expected, spread = 40_000 * rate, (40_000 * rate * (1 - rate)) ** 0.5
        assert abs(chosen.sum() - expected) < 4 * spread
        by_row, by_column = chosen.reshape(40, 1000).sum(axis=1), chosen.reshape(40, 1000).sum(axis=0)
        for counts, n in (
            (by_row, 1000),
            (by_column, 40),
        ):  # no row or column of places is favoured: the variance of a binomial
            assert 0.5 < counts.var() / (n * rate * (1 - rate)) < 1.6
        assert (sample(rate, 3, rows[::-1], columns[::-1]) == chosen[::-1]).all()
        assert (sample(rate, 4, rows, columns) != chosen).mean() > rate * (1 - rate)
    assert sample(0.0, rows) is None and sample(1.0, rows).all()


def test_audit_interval_covers_the_true_value_for_small_samples(model, independent):
    """Two hundred audits of the same tokens, by other draws: the mean over all is inside the interval at least as often
    as is said.
    """
    manager = DynamicProbeManager(independent, load_threshold=0.6, audit_rate=1.0, impl="cpu")
    covers = [
        s.scores.coverage for s in score_documents(manager, model, make_tokenizer(), read_documents(random_texts(20)))
    ]
    firing, lost = (np.concatenate([getattr(c, name) for c in covers]) for name in ("firing", "firing_missed"))
    share = 1 - lost[firing > 0] / firing[firing > 0]
    rng, inside, means = np.random.default_rng(0), 0, []
    for _ in range(200):
        drawn = share[rng.random(len(share)) < 0.05]
        low, high = mean_interval(drawn.mean(), len(drawn))
        inside, _ = inside + (low <= share.mean() <= high), means.append(drawn.mean())
    assert inside >= 190 and abs(np.mean(means) - share.mean()) < 4 * np.std(means) / 200**0.5


def test_each_run_audits_different_positions(model, independent):
    """Else the same few columns of every request would be all that is ever looked at."""
    manager, ids = (
        DynamicProbeManager(independent, load_threshold=0.6, audit_rate=0.3, impl="cpu"),
        torch.tensor([[1, 7, 9, 13]]),
    )
    chosen = []
    for _ in range(12):
        with manager.attach(model) as run:
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
            )
        chosen.append(tuple(run.result(out).coverage.audited.tolist()))
    assert (
        len(set(chosen)) == 12
        and all(sum(one[i] for one in chosen) < 12 for i in range(23))
        and 40 < sum(map(sum, chosen)) < 125
    )


@pytest.mark.parametrize("rate", [-0.1, 1.5, True, "all", float("nan")])
def test_invalid_audit_rate_is_refused(pack, rate):
    with pytest.raises(ConfigError, match="audit_rate is"):
        DynamicProbeManager(pack, audit_rate=rate)


def test_hidden_states_without_a_position_are_not_audited(pack):
    manager = DynamicProbeManager(pack, audit_rate=1.0, impl="cpu")
    _, scores = manager.step(None, torch.randn(3, HIDDEN))
    assert Audit.of(scores.coverage).n_tokens == 0  # a state without a place is not drawn: score_all is there for it
