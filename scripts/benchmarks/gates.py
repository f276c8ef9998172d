"""Gates: what an adapter has to show before it takes the place of another. All must hold; one without data holds not.

gates = [integrity(checks), *budget(costs, of_lora), no_regression(by_metric), gain(by_slice, frontiers),
         latency(ratios)]
promoted(gates)                      # True only where each of them passed
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from comparisons import adjusted, compare
from probemon.errors import ConfigError
from probemon.util.checks import check_mapping, check_number, shown
from turns import median_interval

PASSED, FAILED, NOT_JUDGED = "passed", "failed", "not judged"
CUT_INVARIANCE = 1e-5
REGRESSION = 0.005  # of a core metric, relative
SIGNIFICANT = 0.05
ROBUST = 0.9  # share of drawn seeds in which a variant is on a frontier
FRONTIERS = 2
LATENCY = 1.15  # of an unmerged LoRA's
TOLERANCE = 0.05  # of a LoRA's costs


@dataclass(frozen=True)
class Gate:
    """One condition: its `verdict` ("passed", "failed" or "not judged"), and the sentence that says why."""

    name: str
    verdict: str
    why: str


def promoted(gates: Sequence[Gate]) -> bool:
    """Whether every gate passed, and there was one: what was not judged has not passed."""
    return bool(gates) and all(gate.verdict == PASSED for gate in gates)


def integrity(errors: Mapping[str, float | None]) -> Gate:
    """The adapter is what it promises: by name, the largest error of each check. None: it was not run.

    `start` (against the bare host), `rows` (alone or in a batch), `leak` (later tokens changed) and `cached` (tokens of
    a greedy generation that differ without a cache) must be 0, `cut` (a sequence in pieces) at most 1e-5. Raises
    `ConfigError` for another name, and for what is no number.
    """
    allowed = {"start": 0.0, "rows": 0.0, "leak": 0.0, "cached": 0.0, "cut": CUT_INVARIANCE}
    if unknown := check_mapping("errors", errors).keys() - allowed.keys():
        raise ConfigError(f"no check of integrity is named {min(unknown)!r}: there are {', '.join(allowed)}")
    known = {name: error for name in allowed if (error := errors.get(name)) is not None}
    for name, error in known.items():
        if isinstance(error, bool) or not isinstance(error, (int, float, np.integer, np.floating)):
            raise ConfigError(f"the error of {name} is {shown(error)}: give a number, or None where it was not run")
    missing = [name for name in allowed if name not in known]
    broken = [f"{name} {error:g}" for name, error in known.items() if not error <= allowed[name]]  # NaN is broken
    if broken:
        return Gate("integrity", FAILED, f"errors over what is allowed: {', '.join(broken)}")
    if missing:
        return Gate("integrity", NOT_JUDGED, f"not run: {', '.join(missing)}")
    return Gate("integrity", PASSED, "starts as the host, keeps rows apart, reads no future, and is the same when cut")


def budget(costs: Mapping[str, float], of_lora: Mapping[str, float]) -> list[Gate]:
    """A gate for each cost by name: "parameters" must be within 5 % of the LoRA's, others (operations, bytes of memory)
    at most 5 % over them. Raises `ConfigError` for what is no cost, or if the LoRA lacks one.
    """
    check_mapping("costs", costs)
    if missing := sorted(costs.keys() - check_mapping("of_lora", of_lora).keys()):
        raise ConfigError(f"the LoRA's {missing[0]} are missing: give the same costs of both")
    gates = []
    for name, cost in costs.items():
        beside = of_lora[name]
        for value in (cost, beside):
            check_number(name, value, low=0, remedy="give a number from 0")
        if not beside:
            gates.append(Gate(name, NOT_JUDGED, f"the LoRA's {name} are 0: nothing to compare {cost:,.0f} with"))
            continue
        off = cost / beside - 1
        held = (abs(off) if name == "parameters" else off) <= TOLERANCE + 1e-12
        why = f"{cost:,.0f} beside {beside:,.0f}: {off:+.2%}"
        gates.append(Gate(name, PASSED if held else FAILED, why))
    return gates


def no_regression(relative_differences: Mapping[str, Sequence[float]]) -> Gate:
    """No core metric is worse by half a per cent: of each, paired relative differences by seed (better is positive);
    the lower end of its one-sided 95 % t interval has to be over -0.5 %.
    """
    if not relative_differences or any(len(d) < 2 for d in relative_differences.values()):
        return Gate("no regression", NOT_JUDGED, "a core metric needs two seeds at least, and there must be one")
    ends = {name: compare(d, confidence=0.9).low for name, d in relative_differences.items()}
    lows = {name: low for name, low in ends.items() if low is not None}
    name = min(lows, key=lambda metric: lows[metric])
    verdict = PASSED if lows[name] > -REGRESSION else FAILED
    return Gate("no regression", verdict, f"{name} is worse by at most {max(0.0, -lows[name]):.2%} (95 %)")


def gain(
    differences: Mapping[str, Sequence[float]],
    shares: Mapping[str, float] | None = None,
    *,
    own: Collection[str] | None = None,
) -> Gate:
    """It is better somewhere: on a slice by the exact test, adjusted over all slices that were compared; or robustly on
    two frontiers.

    `differences`: by slice (or variant and slice, all that were looked at), paired by seed. `own`: which of them are of
    the variant that is judged, where others were looked at too; None: all. `shares`: by frontier, in which share of
    drawn seeds it is on it.
    """
    shares = shares or {}
    robust = [name for name, share in shares.items() if share >= ROBUST]
    compared = {name: compare(d) for name, d in differences.items() if len(d)}
    if not compared and not shares:
        return Gate("gain", NOT_JUDGED, "nothing was compared")
    p = dict(zip(compared, adjusted([one.p for one in compared.values()]), strict=True)) if compared else {}
    judged = [name for name in p if own is None or name in own]
    better = [name for name in judged if p[name] <= SIGNIFICANT and compared[name].mean > 0]
    if better or len(robust) >= FRONTIERS:
        parts = [f"{name} {compared[name].mean:+.4g} (p {p[name]:.3g})" for name in better]
        parts += [f"robustly on the frontier of {name}" for name in robust]
        return Gate("gain", PASSED, "; ".join(parts))
    if judged and all(compared[name].smallest_p > SIGNIFICANT for name in judged):
        return Gate("gain", NOT_JUDGED, "too few seeds for any p of 0.05: give five or more")
    least = f"the least adjusted p is {min(p[name] for name in judged):.3g}; " if judged else ""
    return Gate("gain", FAILED, f"{least}robustly on {len(robust)} frontiers")


def latency(ratios: Sequence[float]) -> Gate:
    """What was timed takes at most 15 % longer than with an unmerged LoRA: paired ratios of times taken in turns; the
    upper end of the 95 % interval of their median, by order statistics, decides.
    """
    interval = median_interval(ratios)
    if interval is None:
        return Gate("latency", NOT_JUDGED, f"{len(ratios)} paired ratios are too few for an interval of their median")
    high = interval[1]
    why = f"median ratio {float(np.median(ratios)):.3f}, at most {high:.3f} (95 %)"
    return Gate("latency", PASSED if high <= LATENCY else FAILED, why)
