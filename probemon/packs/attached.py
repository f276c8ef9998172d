"""Attaches probes of one's own to a concept of another pack.

mine = import_weights({"pet": (w, b)}, "mine/", site="resid_post.15", normalize="rmsnorm", dtype="bf16")
attach_below(pack, "animal", mine, "both/", score_rule="path", alert_threshold=0.5)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from probemon.core.familiarity import Familiar
from probemon.core.plan import auto_threshold
from probemon.core.probes import InputSpec
from probemon.core.score_rules import INDEPENDENT, PATH, SCORE_RULES, follows_path
from probemon.core.settings import CascadeConfig
from probemon.errors import PackError
from probemon.packs.copies import always_on, card_of, concepts_of, made_by
from probemon.packs.edit import golden_of, joined_inputs, one_dtype, write_joined
from probemon.packs.files import check_target
from probemon.packs.opened import lowest_alert
from probemon.packs.pack import ProbePack, check_pack
from probemon.packs.tensors import ALWAYS
from probemon.util.checks import check_choice, check_number


def attach_below(
    pack: ProbePack,
    concept: str | int,
    probes: ProbePack,
    path: str | Path,
    *,
    score_rule: str,
    alert_threshold: float | None = None,
    dtype: str | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> ProbePack:
    """Write a pack with the probes of `probes`, which has no hierarchy, at `concept` of `pack`. All other scores stay.

    `score_rule` says what the new scores mean:

    - "path": below `concept`, the probe's sigmoid times the score of `concept`: "this, given all above it", as the
      trainer fits packs with the path rule. It is never above the score of `concept`. Needs a pack with the path rule.
    - "independent": the probe's sigmoid, as in `probes`. In a pack with the path rule it is a root, scored at every
      token, since a score below a concept would be multiplied. In a pack with independent scores it is below
      `concept`, and is scored where that opens its children (at every token that scores it, if it had none).

    `alert_threshold`: of the new scores; None keeps those of `probes`. By "path" a probe fires at no token at which it
    would not fire alone by the same threshold, and may fire at fewer.
    `dtype`: "bf16" or "fp32", required if dtypes differ; moves scores, as in `probemon.packs.edit.merge`

    Named alert sets stay; a probe whose pack lacks a set has the same threshold in all. Raises `UnknownConcept`, and
    `PackError` for a hierarchy in `probes`, a missing alert threshold that the descent needs, or if ids, models, scopes
    or dtypes clash.
    """
    check_target(path, overwrite)
    pack, probes = check_pack(pack), check_pack(probes)
    _check(pack, probes, score_rule)
    weights_dtype = one_dtype([pack, probes], dtype)
    at = pack.find(concept)
    parent = pack.concepts[at]
    is_root = score_rule == INDEPENDENT and follows_path(pack.score_rule)
    place = {"level": 0, "parents": []} if is_root else {"level": parent["level"] + 1, "parents": [parent["id"]]}
    alert = probes.alert_threshold.clone()
    if alert_threshold is not None:
        remedy = "scores lie between 0 and 1, so give 0 or more, and less than 1"
        alert[:] = check_number("alert_threshold", alert_threshold, low=0, high=1, open_high=True, remedy=remedy)
    lowest = lowest_alert(alert, {each: probes.thresholds_for(each) for each in probes.aggregated})
    expand, recommended = pack.descent()
    rule = auto_threshold(pack.score_rule, pack.lowest_alert.numpy(), recommended.get("load_threshold"))
    is_bound = rule == "exact" or (rule == "calibrated" and score_rule == PATH)  # opens by the lowest alert threshold
    if is_bound and bool(lowest.isnan().any()):
        lacking = probes.concepts[int(lowest.isnan().nonzero()[0])]["id"]
        raise PackError(
            f"{lacking!r} has no alert threshold, and a descent of {pack.name} ({rule}) opens concepts by these: give"
            " alert_threshold"
        )
    expand = expand.clone()
    if rule == "calibrated" and not is_root:
        expand = _opening(pack, at, expand, lowest)
    specs = joined_inputs([pack, probes])
    sites = list(dict.fromkeys(spec.site for spec in specs))
    golden = golden_of([pack, probes], sites)
    name = name or f"{pack.name}-{probes.name}"
    room = recommended.get("max_loaded_probes", CascadeConfig.max_loaded_probes) + probes.n_probes
    return write_joined(
        [pack, probes],
        path,
        name=name,
        concepts=[*concepts_of(pack), *({**line, **place} for line in concepts_of(probes))],
        dtype=weights_dtype,
        score_rule=pack.score_rule,
        card=card_of(name, f"{probes.name} attached to {parent['id']!r} (score_rule {score_rule!r})", [pack, probes]),
        alert_threshold=torch.cat([pack.alert_threshold, alert]),
        expand_threshold=torch.cat([expand, torch.full_like(alert, np.nan)]),
        alert_set=pack.alert_set,
        alert_sets={
            set_name: torch.cat([values, _in_set(probes, set_name, alert, alert_threshold)])
            for set_name, values in pack.other_alert_sets().items()
        },
        familiar=[_familiar(pack, probes, spec) for spec in specs],
        golden_hidden=pack.golden_hidden if golden is None and sites == pack.sites else golden,
        recommended={**recommended, **always_on(pack), "max_loaded_probes": room},
        provenance=made_by(
            "attach_below",
            [pack, probes],
            concept=parent["id"],
            score_rule=score_rule,
            alert_threshold=alert_threshold,
            dtype=dtype,
        ),
        overwrite=overwrite,
    )


def _check(pack: ProbePack, probes: ProbePack, score_rule: str) -> None:
    check_choice("score_rule", score_rule, SCORE_RULES)
    if score_rule == PATH and not follows_path(pack.score_rule):
        raise PackError(
            f"the scores of {pack.name} are independent, so a score below a concept is not multiplied by the concept's:"
            " give score_rule='independent'"
        )
    if probes.tree.has_parents.any():
        raise PackError(
            f"{probes.name} has a hierarchy, and only packs without one are attached: take its concepts one by one"
            " (probemon.packs.edit.subset), and attach each to the one above it"
        )
    if pack.bounding:
        raise PackError(
            f"{pack.name} has bounding probes ({pack.concepts[pack.bounding[0]]['id']!r}), which bound the scores of"
            " the concepts below them, and not further ones: give the pack that they were made for"
        )


def _opening(pack: ProbePack, at: int, expand: Tensor, lowest: Tensor) -> Tensor:
    """Return calibrated expand thresholds `[P]` that also open the new probes, below probe `at`.

    By the path rule no new probe that fires is missed, since the score of everything above is higher.
    """
    if not follows_path(pack.score_rule):
        expand[at] = ALWAYS if bool(expand[at].isnan()) else expand[at]
        return expand
    above = np.zeros((1, pack.n_probes), dtype=bool)
    above[0, at] = True
    opens = torch.from_numpy(pack.tree.close(above)[0])
    return torch.where(opens, torch.fmin(expand, lowest.min()), expand)


def _in_set(probes: ProbePack, name: str, alert: Tensor, stated: float | None) -> Tensor:
    """Return the new probes' thresholds in a named set: their pack's, unless it has none or one is stated."""
    return probes.with_alert_set(name).alert_threshold if stated is None and name in probes.alert_sets else alert


def _familiar(pack: ProbePack, probes: ProbePack, spec: InputSpec) -> Familiar | None:
    """Return an input's `Familiar`, of `pack` if both read it."""
    owner = pack if spec in pack.inputs else probes
    return owner.familiar[owner.inputs.index(spec)]
