"""PackSpec: everything of a new pack except its weights, checked and numbered.

spec = PackSpec(name="mine", concepts=concepts, architecture=Architecture(2560, (128, 64)), ...)
spec.order                     # concept order[i] is probe i
spec.small_tensors(), spec.manifest(), spec.lines()
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.drift_reference import DriftReference
from probemon.core.dtypes import WEIGHTS
from probemon.core.familiarity import Familiar
from probemon.core.hierarchy import ConceptTree, Ints
from probemon.core.probes import Architecture, InputSpec
from probemon.core.score_counts import N_BINS
from probemon.core.score_rules import SCORE_RULES
from probemon.errors import ConfigError, PackError
from probemon.packs.claims import SET_NAME
from probemon.packs.drift_tensors import drift_tensors
from probemon.packs.manifest import (
    CONTROL,
    FORMAT,
    FORMAT_VERSION,
    GROUPED_VERSION,
    HERE,
    SCOPES,
    check_recommended,
    check_scope,
    scope_of,
)
from probemon.packs.tensors import (
    AGGREGATED,
    ALERT_SET,
    SCORE_COUNTS,
    SOFTMAX_GROUP,
    THRESHOLDS,
    familiar_tensors,
    first_other_input,
    first_wrong_threshold,
    name_of,
)
from probemon.util.checks import check_choice, check_mapping, check_mappings, check_tensor, check_text

_MOST_COUNTED = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class PackSpec:
    """The arguments of `PackWriter`. Raises `PackError`, `HierarchyError`, `ConfigError`."""

    name: str
    concepts: Sequence[Mapping[str, Any]]
    architecture: Architecture
    dtype: torch.dtype
    score_rule: str
    inputs: Sequence[Mapping[str, Any]]
    host: Mapping[str, Any]
    licence: str
    card: str
    input_index: Tensor | None = None
    softmax_group: Tensor | None = None
    alert_threshold: Tensor | None = None
    expand_threshold: Tensor | None = None
    aggregated: Mapping[str, Tensor] | None = None
    alert_set: str | None = None
    alert_sets: Mapping[str, Tensor] | None = None
    score_counts: Mapping[str, Tensor] | None = None
    familiar: Sequence[Familiar | None] | None = None
    golden_hidden: Tensor | None = None
    recommended: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] | None = None
    quality: Mapping[str, Any] | None = None
    scope: str | None = None
    drift: DriftReference | None = None
    order: Ints = field(init=False)
    tree: ConceptTree = field(init=False)
    input_specs: list[InputSpec] = field(init=False)

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_concepts()
        levels = [concept["level"] for concept in self.concepts if "level" in concept]
        if levels and len(levels) != len(self.concepts):
            raise PackError(f"{len(levels)} of {len(self.concepts)} concepts state a level: state it on all or on none")
        parents = [concept["parents"] for concept in self.concepts]
        order, tree = ConceptTree.build(self.ids, parents, levels or None, self._given_groups())
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "tree", tree)
        object.__setattr__(self, "input_specs", [InputSpec(**spec) for spec in self.inputs])
        sites = [spec.site for spec in self.input_specs]
        if self.scope is None:
            object.__setattr__(self, "scope", scope_of(sites))
        check_scope(check_choice("scope", self.scope, SCOPES), sites, self.name, PackError)

    @property
    def ids(self) -> list[str]:
        """Return the ids in the given order."""
        return [concept["id"] for concept in self.concepts]

    def small_tensors(self) -> dict[str, Tensor]:
        """Return all tensors except weights, by probe. Golden scores are zeros, to be filled in."""
        n, order = len(self.order), torch.from_numpy(self.order)
        per_probe = {
            "input_index": self.input_index,
            "alert_threshold": self.alert_threshold,
            "expand_threshold": self.expand_threshold,
            **{f"aggregated[{name!r}]": thresholds for name, thresholds in (self.aggregated or {}).items()},
            **{f"alert_sets[{name!r}]": thresholds for name, thresholds in (self.alert_sets or {}).items()},
        }
        for name, tensor in per_probe.items():
            if tensor is not None:
                check_tensor(name, tensor, (n,), PackError)

        def ordered(thresholds: Tensor | None) -> Tensor:
            if thresholds is None:
                return torch.full((n,), math.nan, dtype=torch.float32, device="cpu")
            return thresholds.to(torch.float32)[order]

        groups = self.tree.groups
        index = torch.zeros(n, dtype=torch.int64, device="cpu") if self.input_index is None else self.input_index
        small = {
            "child_ptr": torch.from_numpy(self.tree.child_ptr),
            "child_idx": torch.from_numpy(self.tree.child_idx),
            "level": torch.from_numpy(self.tree.level),
            "input": index.to(torch.int64)[order],
            **({SOFTMAX_GROUP: torch.from_numpy(groups.of).to(torch.int32)} if len(groups) else {}),
            "alert_threshold": ordered(self.alert_threshold),
            "expand_threshold": ordered(self.expand_threshold),
            **{AGGREGATED + str(name): ordered(thresholds) for name, thresholds in (self.aggregated or {}).items()},
            **{ALERT_SET + name: ordered(thresholds) for name, thresholds in (self.alert_sets or {}).items()},
            **{SCORE_COUNTS + str(name): counts[order] for name, counts in self._counts().items()},
            **familiar_tensors(self.familiar or ()),
        }
        if self.drift is not None:
            sites = list(dict.fromkeys(spec.site for spec in self.input_specs))
            small |= drift_tensors(self.drift, self.ids, sites, self.order)
        self._check_values(small)
        if self.golden_hidden is not None:
            small["golden_hidden"] = golden = self._golden(self.golden_hidden)
            small["golden_scores"] = torch.zeros(len(golden), n, dtype=torch.float32, device="cpu")
        return small

    def manifest(self) -> dict[str, Any]:
        """Return the manifest without `provenance`, `quality` and `files`."""
        levels, counts = np.unique(self.tree.level, return_counts=True)
        return {
            "format": FORMAT,
            "format_version": GROUPED_VERSION if len(self.tree.groups) else FORMAT_VERSION,
            "name": self.name,
            "licence": self.licence,
            "host": dict(self.host),
            "inputs": [spec.as_dict() for spec in self.input_specs],
            "score_rule": self.score_rule,
            "recommended": dict(self.recommended or {}),
            **({} if self.alert_set is None else {"alert_set": self.alert_set}),
            **({} if self.scope == HERE else {"scope": self.scope}),
            **({} if self.drift is None else {"drift": self.drift.stated()}),
            "architecture": self.architecture.as_dict(),
            "dtype": name_of(self.dtype),
            "counts_per_level": {str(int(level)): int(count) for level, count in zip(levels, counts, strict=True)},
        }

    def lines(self) -> list[dict[str, Any]]:
        """Return the concept lines, by probe."""
        lines = []
        for level, index in zip(self.tree.level.tolist(), self.order.tolist(), strict=True):
            concept = dict(self.concepts[index])
            first = {"id": concept["id"], "name": concept["name"], "level": level, "parents": list(concept["parents"])}
            lines.append({**first, **{key: value for key, value in concept.items() if key not in first}})
        return lines

    def _given_groups(self) -> list[int] | None:
        if self.softmax_group is None:
            return None
        group = check_tensor("softmax_group", self.softmax_group, (len(self.concepts),), PackError)
        if group.is_floating_point() or bool((group < -1).any()):
            raise PackError(
                "softmax_group holds other values than whole numbers from -1: give the number of each concept's group,"
                " -1 for a concept that has none"
            )
        numbers: list[int] = group.tolist()
        return numbers

    def _check_kinds(self) -> None:
        check_choice("score_rule", self.score_rule, SCORE_RULES)
        check_text("licence", self.licence, PackError)
        check_text("card", self.card, PackError)
        check_mapping("host", self.host, PackError)
        for key in ("aggregated", "alert_sets", "score_counts", "recommended", "provenance", "quality"):
            if getattr(self, key) is not None:
                check_mapping(key, getattr(self, key), PackError)
        self._check_alert_sets()
        check_mappings("concepts", self.concepts, PackError)
        check_mappings("inputs", self.inputs, PackError)
        if self.golden_hidden is not None:
            check_tensor("golden_hidden", self.golden_hidden, error=PackError)
        familiar = self.familiar or ()
        if len(familiar) not in (0, len(self.inputs)) or not all(
            entry is None or (isinstance(entry, Familiar) and entry.basis.shape[1:] == (self.architecture.hidden_size,))
            for entry in familiar
        ):
            raise PackError(
                f"familiar says something of {len(familiar)} inputs: give, for each of {len(self.inputs)}, a Familiar"
                f" of states of {self.architecture.hidden_size} values, or None"
            )
        if self.dtype not in WEIGHTS.values():
            raise ConfigError(f"dtype {self.dtype}: a pack's weights are one of {', '.join(WEIGHTS)}")

    def _check_alert_sets(self) -> None:
        names = [*(() if self.alert_set is None else (self.alert_set,)), *(self.alert_sets or ())]
        for name in names:
            if not isinstance(name, str) or not SET_NAME.fullmatch(name):
                raise PackError(f"a set of alert thresholds is named {name!r:.80}: give letters, digits and . _ -")
        if self.alert_sets and self.alert_set is None:
            raise PackError("alert_sets are in addition to the set in force: name that one too, alert_set=")
        if self.alert_set in (self.alert_sets or ()):
            raise PackError(f"the set {self.alert_set!r} is in force, and among the others: give it once")

    def _check_concepts(self) -> None:
        for concept in self.concepts:
            missing = [key for key in ("id", "name", "parents") if key not in concept]
            if missing:
                raise PackError(f"concept {concept.get('id', concept)!r} lacks {', '.join(missing)}")
        texts = [(f"a concept's {key}", concept[key]) for concept in self.concepts for key in ("id", "name")]
        for what, text in [("the pack's name", self.name), *texts]:
            if not isinstance(text, str) or CONTROL.search(text):
                raise PackError(
                    f"{what} is {ascii(text)[:100]}: give a text without control characters, on which a terminal"
                    " would act"
                )
        shape = self.architecture
        if not self.concepts or not shape.hidden_size or 0 in shape.hidden:
            raise PackError(
                f"{len(self.concepts)} concepts, whose probes read {shape.hidden_size} values with layers of"
                f" {list(shape.hidden)}: a pack has one probe or more, and none is empty"
            )

    def _check_values(self, small: Mapping[str, Tensor]) -> None:
        for name, tensor in small.items():
            wrong = first_wrong_threshold(name, tensor) if "threshold" in name else None
            if wrong is not None:
                raise PackError(
                    f"the {name} of concept {self.ids[int(self.order[wrong])]!r} is {float(tensor[wrong]):g}:"
                    f" {THRESHOLDS}"
                )
        check_recommended(self.recommended or {}, f"{self.name!r:.100}")
        index = small["input"]
        if not 0 <= int(index.min()) <= int(index.max()) < len(self.input_specs):
            raise PackError(
                f"input_index must lie in 0..{len(self.input_specs) - 1}: it says which of the inputs a probe reads"
            )
        unlike = first_other_input(self.tree.groups, index)
        if unlike is not None:
            first, other = (self.ids[int(self.order[probe])] for probe in unlike)
            raise PackError(
                f"{first!r} and {other!r} are of one softmax group and read different inputs: give them one"
            )

    def _counts(self) -> dict[str, Tensor]:
        """Return score counts `[P, N_BINS]` int32 by aggregator, in the order of `concepts`."""
        counts = {}
        for name, tensor in (self.score_counts or {}).items():
            check_tensor(f"score_counts[{name!r}]", tensor, (len(self.order), N_BINS), PackError)
            if tensor.is_floating_point() or bool((tensor < 0).any()) or bool((tensor > _MOST_COUNTED).any()):
                raise PackError(f"score_counts[{name!r}] are not whole numbers from 0 to {_MOST_COUNTED}: give counts")
            counts[name] = tensor.to(torch.int32)
        return counts

    def _golden(self, golden_hidden: Tensor) -> Tensor:
        golden = golden_hidden.to(torch.float32).contiguous()
        expected = (len({spec.site for spec in self.input_specs}), self.architecture.hidden_size)
        if golden.dim() != 3 or tuple(golden.shape[1:]) != expected:
            raise PackError(
                f"golden_hidden has shape {tuple(golden.shape)}, expected (G, {expected[0]}, {expected[1]}): G states"
                " at each site"
            )
        return golden
