"""Synthetic streams of routing whose true behaviour is known, and their metrics in plain Python, fp64, one token at a
time.
"""

import math

import numpy as np

from probemon.adapters.routing.decisions import Decisions, History, largest

EXPERTS, TOKENS, CHUNK = 8, 4000, 32
PEAK = 6.8  # of a logit over the others: an entropy of 0.03 log 8
# How each of the four is made: which expert is first at each token, and how far it stands out. The seeds are of draws
# whose sampling noise is the table's.
STREAMS = {"indifferent": 12, "collapsed": 0, "by chunk": 44, "by token": 15}
TABLE = {  # decision, marginal, MI, effective experts, MaxVio, flips, each as it is written
    "indifferent": ("1.00", "1.00", "0", "7.99", ".09", ".88"),
    "collapsed": (".03", ".03", "0", "1.0", "7.0", "0"),
    "by chunk": (".03", ".98", ".95", "7.6", ".41", ".026"),
    "by token": (".03", "1.0", ".97", "8.0", ".04", ".88"),
}
NAMES = ("decision_entropy", "marginal_entropy", "mutual_information", "effective_experts", "max_vio", "flip_rate")


def logits_of(kind, seed=None, n=TOKENS, e=EXPERTS):
    """`[n, e]` fp32."""
    rng = np.random.default_rng(STREAMS[kind] if seed is None else seed)
    noise = rng.normal(0, 0.05, (n, e))
    if kind == "indifferent":
        return noise.astype(np.float32)
    first = {
        "collapsed": np.full(n, 3),
        "by chunk": np.repeat(rng.integers(0, e, -(-n // CHUNK)), CHUNK)[:n],
        "by token": rng.integers(0, e, n),
    }[kind]
    return (noise + PEAK * np.eye(e)[first]).astype(np.float32)


def softmax(logits):
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def decisions_of(logits, k=1):
    """Of one router, or of several `[S, n, e]`."""
    raw = np.asarray(logits, dtype=np.float32)
    raw = raw[None] if raw.ndim == 2 else raw
    top = largest(raw, k)
    weights = softmax(raw)
    return Decisions.of(raw, weights, top, np.take_along_axis(weights, top, axis=-1).astype(np.float32))


def codes_of(codes, boundary=None, **more):
    """Of one level of codes `[n, r]`."""
    raw = np.asarray(codes, dtype=np.float32)[None]
    decided = np.ones(raw.shape[:2], bool) if boundary is None else np.asarray(boundary)[None]
    top = largest(np.abs(raw), 1)
    chunk = np.cumsum(decided[0]) - 1
    return Decisions.of(
        raw, None, top, np.take_along_axis(raw, top, axis=-1), **{"decided": decided, "chunk": chunk, **more}
    )


def feed(statistics, decisions, sizes=None, rows=None):
    """Add to `statistics` in batches of `sizes` tokens, all of one row."""
    n = len(decisions)
    rows = np.zeros(n, dtype=np.int64) if rows is None else rows
    history, at = History(int(rows.max()) + 1, decisions.n_streams), 0
    for size in sizes or [n]:
        which = np.arange(at, min(n, at + size))
        part = decisions.take(which)
        statistics.add(part, history.compare(rows[which], part))
        at += size
    assert at >= n
    return statistics


def plain_metrics(logits, k=1):
    """Every metric of a distribution, in loops."""
    n, e = len(logits), len(logits[0])
    marginal, load, entropies, flips, before = [0.0] * e, [0] * e, [], 0, None
    for line in logits.tolist():
        most = max(line)
        powers = [math.exp(x - most) for x in line]
        shares = [p / math.fsum(powers) for p in powers]
        entropies.append(-math.fsum(p * math.log(p) for p in shares if p > 0))
        marginal = [m + p / n for m, p in zip(marginal, shares, strict=True)]
        chosen = sorted(range(e), key=lambda i: (-line[i], i))[:k]
        for i in chosen:
            load[i] += 1
        flips += before is not None and chosen[0] != before
        before = chosen[0]
    decision = math.fsum(entropies) / n / math.log(e)
    of_marginal = -math.fsum(p * math.log(p) for p in marginal if p > 0) / math.log(e)
    of_load = -math.fsum(x / (n * k) * math.log(x / (n * k)) for x in load if x)
    none, ranked = math.log(k) / math.log(e), sorted(load)
    return {
        "decision_entropy": decision,
        "marginal_entropy": of_marginal,
        "mutual_information": of_marginal - decision,
        "effective_experts": math.exp(of_load),
        "max_vio": max(load) * e / (n * k) - 1,
        "flip_rate": flips / (n - 1),
        "least_load": min(load) * e / (n * k),
        "least_weight": min(marginal) * e,
        "gini": sum(abs(a - b) for a in load for b in load) / (2 * e * sum(ranked)),
        "spread": (of_marginal - none) / (1 - none),
        "load_spread": (of_load / math.log(e) - none) / (1 - none),
    }
