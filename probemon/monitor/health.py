"""Health: whether a run sees what its model runs.

health = run.health()                 # at any time, from any thread
for check in health.wrong:
    print(check)                      # "failed, hooks: our hook at resid_post.15 was removed. Attach again, ..."
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from probemon.monitor.check import FAILED, OK, WARNING, Check
from probemon.monitor.degradations import LEFT_OUT
from probemon.monitor.delivery import SinkStats
from probemon.monitor.failures import Failures
from probemon.monitor.publisher import Publisher
from probemon.tracking.hook_faults import HookFaults
from probemon.tracking.token_source import TokenSource
from probemon.tracking.watched_threads import WatchedThreads
from probemon.util.counted import counted

BLIND_SHARE = 0.01  # a larger share of unscored tokens fails a check
_TEXTS = 3  # shown of each list
_OF_HOST = "weights, adapters or settings of the model"


@dataclass(frozen=True)
class Health:
    """The checks of a run."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True if nothing failed; there may be warnings."""
        return all(check.state != FAILED for check in self.checks)

    @property
    def wrong(self) -> tuple[Check, ...]:
        """Return failures, then warnings."""
        wrong = [check for check in self.checks if check.state != OK]
        return tuple(sorted(wrong, key=lambda check: check.state != FAILED))

    def with_checks(self, checks: Iterable[Check]) -> Health:
        """Return a copy with more checks."""
        return Health((*self.checks, *checks))

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        return "; ".join(map(str, self.wrong)) or f"healthy: {len(self.checks)} checks"


def run_health(
    watcher: TokenSource,
    publisher: Publisher,
    failures: Failures,
    threads: WatchedThreads,
    *,
    ended: bool,
    not_numbers: Collection[str],
    changed_within: Sequence[str],
    holds_model: bool,
) -> Health:
    """Return the health of a run.

    `not_numbers`: see `Scorer.not_numbers`
    `changed_within`: changes of the model within a generation or document, or since an earlier turn
    `holds_model`: the run required one model (`strict`, a deployment's `host`)
    """
    tokens = Counter(publisher.tokens)
    return Health(
        (
            _attached(watcher, ended),
            _hooks(watcher.hook_faults()),
            _gaps(watcher.n_gaps, threads, tokens.total()),
            _tokens(watcher, tokens, not_numbers, threads, ended),
            _states(tokens, not_numbers),
            _host(changed_within, publisher.n_model_changes, publisher.changed_between, holds_model),
            _callbacks(failures),
            _sinks(publisher.sinks()),
        )
    )


def state_of(n_bad: int, n_all: int) -> str:
    """Return the state of a check that `n_bad` tokens failed."""
    return OK if not n_bad else FAILED if n_bad > BLIND_SHARE * n_all else WARNING


def _attached(watcher: TokenSource, ended: bool) -> Check:
    name = "attached"
    if watcher.open:
        return Check(name, OK, f"{type(watcher.model).__name__} is watched")
    if ended:
        return Check(name, OK, "the run has ended: this is its final state")
    return Check(name, FAILED, "nothing is watched yet", "Enter the with block of attach() before the model runs.")


def _hooks(faults: HookFaults) -> Check:
    remedy = "Attach again, after whatever changes the model, and leave its hooks alone inside the with block."
    if faults.lost:
        return Check("hooks", FAILED, _some(faults.lost), remedy)
    if faults.doubts:
        return Check("hooks", WARNING, _some(faults.doubts), remedy)
    return Check("hooks", OK, f"{faults.n_hooks} hooks are where they were put")


def _gaps(n_gaps: int, threads: WatchedThreads, n_tokens: int) -> Check:
    before, alone = threads.n_unwatched, threads.n_alone  # at least one token each
    if not (before or alone or n_gaps):
        return Check("gaps", OK, "no forward is known to have passed our hooks")
    findings, remedies = [], []
    if before:
        findings.append(f"{counted(before, 'forward')} of a generate() that had begun before went unwatched")
        remedies.append("Attach before anything generates, and look generate() up inside the with block.")
    if alone:
        findings.append(f"{counted(alone, 'forward')} ran layers outside of the decoder that is watched")
        remedies.append("Call the model itself, and attach to the one that is called.")
    if n_gaps:
        findings.append(f"at {counted(n_gaps, 'place')} the model ran tokens past our hooks")
        remedies.append(
            "Find what calls layers directly, or compiled the model before it was attached; run.gaps has the columns."
        )
    n_unwatched = before + alone
    return Check(
        "gaps", state_of(n_gaps + n_unwatched, n_tokens + n_unwatched), ", and ".join(findings), " ".join(remedies)
    )


def _tokens(
    watcher: TokenSource, tokens: Counter[str], not_numbers: Collection[str], threads: WatchedThreads, ended: bool
) -> Check:
    name, n_tokens, n_forwards = "tokens", tokens.total(), len(watcher.forward_seconds)
    if n_tokens:
        other_reasons = {"", *not_numbers, *LEFT_OUT.values()}
        unseen = {reason: n for reason, n in tokens.items() if reason not in other_reasons}
        n_unseen = sum(unseen.values())
        if not n_unseen:
            elsewhere = ", and what other threads ran is not counted" if threads.ran_in_other else ""
            return Check(name, OK, f"{n_tokens:,} tokens were read{elsewhere}")
        reason = max(unseen, key=lambda reason: unseen[reason])
        what = f"{n_unseen:,} of {n_tokens:,} tokens were not seen ({reason}: {unseen[reason]:,})"
        return Check(name, state_of(n_unseen, n_tokens), what, "See the checks of hooks and gaps; they are not scored.")
    if watcher.ranks is not None and not watcher.ranks.scores:
        return Check(name, OK, f"this is rank {watcher.ranks.rank} of one model: rank 0 scores")
    if not watcher.called:
        what, remedy = threads.silence
        return Check(name, WARNING, f"the model {what}", remedy) if ended else Check(name, OK, f"the model {what}")
    if not n_forwards and not ended and (watcher.generating or watcher.recordings):
        return Check(name, OK, "the first forward has not ended yet")
    return Check(
        name, FAILED, "the model ran, and none of its tokens was scored", "See what it raised, and the check of hooks."
    )


def _states(tokens: Counter[str], not_numbers: Collection[str]) -> Check:
    bad = {reason: n for reason, n in tokens.items() if reason in not_numbers}
    n_bad, n_tokens = sum(bad.values()), tokens.total()
    if not n_bad:
        return Check("states", OK, "every hidden state and every score was a number")
    reason = max(bad, key=lambda reason: bad[reason])
    return Check(
        "states",
        state_of(n_bad, n_tokens),
        f"{n_bad:,} of {n_tokens:,} tokens cannot be scored ({reason}: {bad[reason]:,})",
        "Check the weights of the model for values that are not finite, and its number format for overflow.",
    )


def _host(within: Sequence[str], n_between: int, between: Sequence[str], holds: bool) -> Check:
    """`n_between`: changes between generations or documents; `between`: the last one."""
    if within:
        what = f"{_OF_HOST} changed within a generation or a document ({_some(within)})"
        return Check("host", WARNING, what, "Its scores are not all of one model: change them between generations.")
    if n_between:
        times = "once" if n_between == 1 else f"{n_between:,} times"
        last = f"{'' if n_between == 1 else 'last: '}{_some(between)}"
        what = f"{_OF_HOST} changed {times} after the attach, between generations or documents ({last})"
        if holds:
            return Check(
                "host", WARNING, f"{what}: it is not the requested one", "Attach again, which compares the model."
            )
        return Check("host", OK, f"{what}, and within none that is known: not all results are of one model")
    return Check("host", OK, f"no {_OF_HOST} are known to have changed")


def _callbacks(failures: Failures) -> Check:
    if not failures.n_errors:
        return Check("callbacks", OK, "no action, listener or sink raised")
    first = failures.errors[0]
    what = f"{failures.n_errors:,} times an action, a listener or a sink raised, first {type(first).__name__}: {first}"
    return Check("callbacks", FAILED, what, "Fix what raised; run.failures has the errors.")


def _sinks(sinks: Sequence[SinkStats]) -> Check:
    n_all = sum(stats.n_written + stats.n_dropped + stats.n_queued for stats in sinks)
    n_dropped = sum(stats.n_dropped for stats in sinks)
    for stats in sinks:
        if stats.error is not None:
            what = f"a sink failed and takes no more tokens ({type(stats.error).__name__}: {stats.error})"
            return Check("sinks", FAILED, what, "Fix the sink, or its disk, and attach again.")
    if n_dropped:
        what = f"{n_dropped:,} of {n_all:,} tokens were dropped because a sink is too slow"
        remedy = "Use a faster sink, or give Delivery(sink, max_batches=...) more."
        return Check("sinks", state_of(n_dropped, n_all), what, remedy)
    return Check("sinks", OK, f"{len(sinks)} sinks took every token" if sinks else "no sinks")


def _some(texts: Sequence[str]) -> str:
    n_more = len(texts) - _TEXTS
    return "; ".join([*texts[:_TEXTS], *([f"and {n_more} more"] if n_more > 0 else [])])
