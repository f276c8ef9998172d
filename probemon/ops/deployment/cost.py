"""The cost of a deployment, before any model is loaded.

cost = cost_of(deployment, pack)              # pack: deployment.open_packs()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probemon.ops.deployment.deployment import Deployment
from probemon.packs.configured import ConfiguredPack
from probemon.packs.group import AnyPack


@dataclass(frozen=True)
class Cost:
    """Counts and bytes over all packs. `n_always`, `n_most`: probes that a token reads, at least and at most;
    `n_rules`: by concept.
    """

    n_probes: int
    n_watched: int
    n_always: int
    n_most: int
    weight_bytes: int
    always_bytes: int
    most_bytes: int
    n_rules: int


def cost_of(deployment: Deployment, pack: AnyPack) -> Cost:
    """Return the cost. Raises `DeploymentError` if settings or rules do not fit."""
    rules = deployment.rules(pack)
    probes = sorted({probe for rule in rules for probe in rule.probes})
    members = deployment.configured(pack, probes)
    with deployment.errors_of_settings():
        counted = [_counts(member, extra) for member, extra in members]
    n_probes, n_watched, n_always, n_most, weights, always, most = map(sum, zip(*counted, strict=True))
    return Cost(n_probes, n_watched, n_always, n_most, weights, always, most, len(rules))


def _counts(member: ConfiguredPack, extra: Sequence[int]) -> tuple[int, ...]:
    pack = member.pack
    n, n_bytes = pack.n_probes, pack.weight_bytes()
    plan = member.plan_with(extra)
    n_always, n_watched = len(plan.start), n - plan.n_excluded
    n_most = min(n_watched, member.config.max_loaded_probes)
    return n, n_watched, n_always, n_most, n_bytes, n_bytes * n_always // n, n_bytes * n_most // n
