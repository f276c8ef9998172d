"""Opens, verifies and queries packs; `ProbePack` adds writing.

    pack = OpenedPack.open("packs/mine")       # weights are read on use
    pack = OpenedPack.open(path, verify=True)                   # checks hashes, weights and golden scores
    pack.concepts[3]["name"], pack.path(17), pack.find("whale")

Changes to its files never change an opened pack's scores: reading them then raises `PackChanged`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from probemon.core.aggregate import Max
from probemon.core.concept_names import Names, Wanted
from probemon.core.drift_reference import DriftReference
from probemon.core.dtypes import input_dtype
from probemon.core.hierarchy import ConceptTree
from probemon.core.probes import Architecture, InputSpec, input_limits, is_recurrent
from probemon.core.reference import exhaustive_reference
from probemon.errors import ConfigError, HierarchyError, PackCorrupt, PackError, PackVersionError, ProbemonError
from probemon.packs import files as packfile
from probemon.packs.concept_lines import ConceptLines
from probemon.packs.drift_tensors import check_drift, drift_of
from probemon.packs.held_file import HeldFolder, read_whole
from probemon.packs.held_tensors import HeldTensors
from probemon.packs.manifest import (
    CARD,
    CONCEPTS,
    GROUPED_VERSION,
    HERE,
    MANIFEST,
    MAX_CONCEPTS_BYTES,
    MAX_MANIFEST_BYTES,
    PROBES,
    check_recommended,
    check_scope,
    parse_manifest,
)
from probemon.packs.tensors import (
    AGGREGATED,
    ALERT_SET,
    ALWAYS,
    SCORE_COUNTS,
    SOFTMAX_GROUP,
    THRESHOLDS,
    VECTORS,
    Noted,
    aggregator_names,
    alert_set_names,
    check_dtypes,
    check_golden,
    check_softmax_group,
    counted_names,
    familiar_of,
    first_other_input,
    first_wrong_threshold,
    largest_magnitudes,
    name_of,
)
from probemon.util.checks import check_bool, check_count, check_path, is_number
from probemon.util.first_sentence import first_sentence

_FINITE_BYTES = _BLOCK_BYTES = 64 << 20
_SMALL_BYTES = 16 << 10
MAX_REPLAY_ERROR = 1e-5


class OpenedPack:
    """A read-only pack; make one with `open`.

    - `manifest`: dict; `card`: bytes or None
    - `concepts`: a dict per probe; `tree`: ConceptTree
    - `scope`: a score's concept is "here", at the token, or "so far", also at earlier ones
    - `weights`: stacked tensors by parameter, read or mapped on first use
    - `inputs`: InputSpecs; `input_index [P]` int64: each probe's
    - `softmax_group [P]` int64: -1 for none
    - `alert_threshold`, `expand_threshold` `[P]` fp32, NaN if not calibrated
    - `aggregated`: aggregators with alert thresholds (`thresholds_for`)
    - `counted`: aggregators with score counts (`score_counts`)
    - `alert_set`: name of the thresholds in force, None if unnamed or `edited`; `alert_sets`: all names
    - `familiar`: a `Familiar` per input, or None
    - `golden_hidden [G, S, D]`, `golden_scores [G, P]`, or None; `golden_error`: from `verify`
    - `input_limit [P]` fp64: the largest input that cannot overflow fp32 sums, NaN until weights are checked;
      `lowest_input_limit`: the minimum
    """

    def __init__(
        self,
        directory: Path,
        manifest: dict[str, Any],
        concepts: ConceptLines,
        tensors: HeldTensors,
        card: bytes | None = None,
    ):
        self.directory = directory
        self.manifest = manifest
        self.concepts = concepts
        self.card = card
        self.name: str = manifest["name"]
        self.score_rule: str = manifest["score_rule"]
        self.scope: str = manifest.get("scope", HERE)
        self.inputs = [InputSpec(**spec) for spec in manifest["inputs"]]
        self.recommended: dict[str, Any] = manifest.get("recommended") or {}
        self._tensors, self._weights = tensors, dict[str, Tensor]()
        self._weights_as_stated = dict[str, Noted]()
        where, described = f"{directory / PROBES}", tensors.described
        check_dtypes(described, where)
        vectors = {name: tensors.read(name) for name in VECTORS}
        has_groups = check_softmax_group(described, len(vectors["level"]), where)
        groups = tensors.read(SOFTMAX_GROUP).numpy() if has_groups else None
        try:
            ptr, idx, level = (vectors[name].numpy() for name in ("child_ptr", "child_idx", "level"))
            self.tree = ConceptTree(ptr, idx, level, groups)
        except HierarchyError as error:
            raise HierarchyError(f"{where}: {error}") from None
        self.n_probes = self.tree.n
        self._parameters = {name: described[name] for name in Architecture.parameters() if name in described}
        self.architecture = Architecture.of(self._parameters, where)
        self.dtype = self._parameters["w1"].dtype
        self.input_dtype = input_dtype(self.dtype)
        self.input_index = vectors["input"]
        self.alert_threshold, self.expand_threshold = vectors["alert_threshold"], vectors["expand_threshold"]
        self.aggregated = aggregator_names(described, self.n_probes, where)
        # Only for the recommended alert set: `with_alert_set` removes them.
        self._aggregated = self._recommended_aggregated = {
            name: tensors.read(AGGREGATED + name) for name in self.aggregated
        }
        self.counted = counted_names(described, self.n_probes, where)
        self._alert_set: str | None = manifest.get("alert_set")
        self._alert_sets = {
            name: tensors.read(ALERT_SET + name) for name in alert_set_names(described, self.n_probes, where)
        }
        if self._alert_set is not None:
            self._alert_sets = {self._alert_set: self.alert_threshold, **self._alert_sets}
        self._as_stated: dict[str | None, Noted] = {self._alert_set: Noted(self.alert_threshold)}
        self._as_stated.update((name, Noted(thresholds)) for name, thresholds in self._alert_sets.items())
        self._expand_as_stated = Noted(self.expand_threshold)
        self._aggregated_as_stated = {name: Noted(thresholds) for name, thresholds in self._aggregated.items()}
        self.familiar = familiar_of(described, tensors.read, len(self.inputs), self.architecture.hidden_size, where)
        self._holds_drift = check_drift(manifest, described, self.n_probes, len(self.sites), where)
        self.golden_error: float | None = None
        self.input_limit = np.full(self.n_probes, np.nan)
        self.lowest_input_limit = math.inf
        self._check_vectors(where)
        self._check_manifest(where)
        check_golden(described, len(self.sites), self.n_probes, self.architecture.hidden_size, where)
        check_recommended(self.recommended, f"{directory / MANIFEST}")
        concepts.fit(self.tree)
        # Not a method: a reference cycle would keep the file open.
        self._names = Names(self.name, concepts, partial(_path, self.tree, concepts))

    def _check_vectors(self, where: str) -> None:
        n, shape = self.n_probes, self.architecture
        if not n or not shape.hidden_size or 0 in shape.hidden:
            raise PackCorrupt(
                f"{where} holds {n} probes of {shape.hidden_size} values and layers of {list(shape.hidden)}: a pack has"
                " one probe or more, and none is empty"
            )
        if len(self.concepts) != n:
            raise PackCorrupt(
                f"{self.directory / CONCEPTS} has {len(self.concepts)} lines for {n} probes: fetch the pack again"
            )
        thresholds = {"alert_threshold": self.alert_threshold, "expand_threshold": self.expand_threshold}
        for name, tensor in {"input": self.input_index, **thresholds}.items():
            if tuple(tensor.shape) != (n,):
                raise PackCorrupt(f"{where}: {name} has shape {tuple(tensor.shape)}, expected ({n},)")
        further = {ALERT_SET + name: tensor for name, tensor in self._alert_sets.items() if name != self._alert_set}
        for name, tensor in {**thresholds, **self._aggregated, **further}.items():
            wrong = first_wrong_threshold(name, tensor)
            if wrong is not None:
                raise PackCorrupt(
                    f"{where}: the {name} of concept {self.concepts[wrong]['id']!r:.80} is {float(tensor[wrong]):g}:"
                    f" {THRESHOLDS}. Fetch the pack again, or calibrate it"
                )
        if not 0 <= int(self.input_index.min()) <= int(self.input_index.max()) < len(self.inputs):
            raise PackCorrupt(f"{where}: input must index the manifest's {len(self.inputs)} inputs")
        unlike = first_other_input(self.tree.groups, self.input_index)
        if unlike is not None:
            first, other = (self.concepts[probe]["id"] for probe in unlike)
            raise PackCorrupt(
                f"{where}: {first!r:.80} and {other!r:.80} are of one softmax group and read different inputs: fetch"
                " the pack again"
            )

    def _check_manifest(self, where: str) -> None:
        """Raise `PackCorrupt` if the manifest contradicts the weights."""
        for name, value in {"architecture": self.architecture.as_dict(), "dtype": name_of(self.dtype)}.items():
            if self.manifest.get(name, value) != value:
                raise PackCorrupt(
                    f"{where}: {name} is {value}, the manifest says {str(self.manifest[name])[:100]}: fetch the pack"
                    " again"
                )
        check_scope(self.scope, self.sites, f"{self.directory / MANIFEST}", PackCorrupt)
        version, has_groups = self.manifest["format_version"], SOFTMAX_GROUP in self._tensors.described
        if has_groups != (version == GROUPED_VERSION):
            raise PackVersionError(
                f"{where} holds {'a' if has_groups else 'no'} {SOFTMAX_GROUP}, and the manifest's format_version is"
                f" {version}: packs with softmax groups are of version {GROUPED_VERSION}, and no others are. Fetch the"
                " pack again"
            )
        manifest_size, hidden_size = self.manifest["host"].get("hidden_size"), self.architecture.hidden_size
        # Recurrent layers have their own width.
        if manifest_size not in (None, hidden_size) and not all(map(is_recurrent, self.sites)):
            raise PackCorrupt(f"{where}: w1 reads {hidden_size} values, the manifest says hidden_size {manifest_size}")

    # -- opening ---------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> Self:
        """Open the pack in a directory; checks structure, sizes and hierarchy.

        `verify`: also hash files, check weights and replay golden scores

        Raises `PackError` (`PackVersionError`, `PackCorrupt`, `PackChanged`), `HierarchyError`, and `ConfigError` for
        recommended settings.
        """
        return cls._open(check_path("path", path), check_bool("verify", verify))

    @classmethod
    def _open(cls, directory: Path, verify: bool, *, hashed: bool = False, pin: str | None = None) -> Self:
        """`hashed`: hash every file; `pin`: the manifest's required sha256"""
        try:
            pack = read_whole(directory, lambda folder: cls._read(folder, verify or hashed, pin))
            if verify:
                pack.verify()
            return pack
        except ProbemonError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            raise PackError(f"{directory} is not a directory: give the folder that holds {MANIFEST}") from None
        except PermissionError as error:
            raise PackError(f"{directory} cannot be read ({error.strerror}): check its permissions") from error
        except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
            # Forged files fail in many ways: report one error that names the pack.
            first = first_sentence(error, 200)
            raise PackCorrupt(
                f"{directory} is malformed ({type(error).__name__}: {first}): fetch the pack again"
            ) from error

    @classmethod
    def _read(cls, folder: HeldFolder, hashed: bool, pin: str | None) -> Self:
        directory = folder.path
        if not folder.has(MANIFEST):
            raise PackError(f"{directory} holds no {MANIFEST}: it is not a probe pack")
        # All at once, so that a replaced folder is still read whole.
        held_files = {
            name: folder.hold(name, keep=name == PROBES)
            for name in (MANIFEST, CONCEPTS, PROBES, CARD)
            if folder.has(name)
        }
        data = held_files[MANIFEST].read(MAX_MANIFEST_BYTES)
        if pin is not None:
            packfile.check_pin(directory / MANIFEST, sha256(data).hexdigest(), pin)
        manifest = parse_manifest(data, directory / MANIFEST)
        for needed in (CONCEPTS, PROBES):
            if needed not in manifest["files"]:
                raise PackCorrupt(f"{directory / MANIFEST} lists no {needed}: fetch the pack again")
        for name, entry in manifest["files"].items():
            file = folder.hold(name)
            packfile.check_stated_size(file.path, file.size, entry["size"])
            if hashed:
                packfile.check_stated_hash(file.path, file.sha256(), entry["sha256"])
        card = held_files[CARD].read(packfile.MAX_CARD_BYTES) if CARD in held_files else None
        data = held_files[CONCEPTS].read(MAX_CONCEPTS_BYTES)
        concepts = ConceptLines(data, directory / CONCEPTS)
        files = manifest["files"]
        packfile.check_stated_hash(directory / CONCEPTS, sha256(data).hexdigest(), files[CONCEPTS]["sha256"])
        return cls(directory, manifest, concepts, HeldTensors(held_files[PROBES], sha256=files[PROBES]["sha256"]), card)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # read-only

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the directory, to be opened again. Raises `ConfigError` if `rewritten`."""
        if self.rewritten:
            raise ConfigError(
                f"thresholds or weights of {self.name} were written to since it was opened, and it is pickled as how to"
                " open it again: write a pack with the new ones with probemon.packs.edit.rename"
            )
        return _reopen, (type(self), str(self.directory.resolve()), self.name, self.manifest, self._alert_set)

    # -- weights ---------------------------------------------------------------------------------

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return stacked tensors by parameter. Raises `PackChanged`, and `PackCorrupt` for a wrong hash."""
        if not self._weights:
            tensors = self._tensors.all()
            self._weights = {name: tensors[name] for name in self._parameters}
            self._weights_as_stated = {name: Noted(tensor) for name, tensor in self._weights.items()}
        self._tensors.check()
        return self._weights

    @property
    def golden_hidden(self) -> Tensor | None:
        """Return the golden states. Raises as `weights`."""
        return self._tensors.all().get("golden_hidden")

    @property
    def golden_scores(self) -> Tensor | None:
        """Return their scores."""
        return self._tensors.all().get("golden_scores")

    @cached_property
    def drift_reference(self) -> DriftReference | None:
        """Return the drift reference, or None."""
        if not self._holds_drift:
            return None
        ids = [concept["id"] for concept in self.concepts]
        return drift_of(self.manifest, self._tensors.read, ids, self.sites, f"{self.directory / PROBES}")

    @property
    def in_memory(self) -> bool:
        """True if weights are not mapped."""
        return self._tensors.in_memory

    def check_unchanged(self) -> None:
        """Raise `PackChanged` if mapped weights were written to. Fast."""
        self._tensors.check()

    def set_directory(self, directory: Path) -> None:
        """Set the folder's new path after a rename."""
        self.directory = directory
        self._tensors.file.path = directory / PROBES

    def blocks(self, probes: np.ndarray | None = None) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield `(start, weights)` of blocks of `probes` (None: all). Raises `PackChanged`."""
        wanted = torch.from_numpy(np.arange(self.n_probes) if probes is None else probes)
        size = max(1, _BLOCK_BYTES // max(1, self.weight_bytes() // self.n_probes))
        for start in range(0, len(wanted), size):
            block = {name: tensor[wanted[start : start + size]] for name, tensor in self.weights.items()}
            self.check_unchanged()
            yield start, block

    def weight_bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._parameters.values())

    # -- verifying -------------------------------------------------------------------------------

    def verify(self) -> float | None:
        """Check all weights and replay golden states; return the largest score error, or None.

        Raises `PackCorrupt` for an error over 1e-5.
        """
        self.concepts.check()
        self.check_finite()
        hidden, recorded = self.golden_hidden, self.golden_scores
        if hidden is None or recorded is None:
            return None
        replayed = exhaustive_reference({site: hidden[:, i] for i, site in enumerate(self.sites)}, self)
        error = (replayed - recorded).abs()
        self.check_unchanged()
        worst = float(error.max()) if error.numel() else 0.0
        if not worst <= MAX_REPLAY_ERROR:
            probe = int(error.max(dim=0).values.argmax())
            raise PackCorrupt(
                f"{self.directory}: golden replay of {self.concepts[probe]['id']!r} is off by {worst:.3g} (at most"
                " 1e-5): the weights are not those the pack was published with"
            )
        self.golden_error = worst
        return worst

    def check_finite(self, probes: np.ndarray | None = None) -> None:
        """Raise `PackCorrupt` if weights of `probes` (None: all) are not finite; set `input_limit`."""
        wanted = np.arange(self.n_probes) if probes is None else np.unique(probes)
        weights = self.weights
        largest, at = {name: np.empty(len(wanted)) for name in weights}, 0
        # In pieces: absolute values are a copy.
        most = max(1, _FINITE_BYTES // max(1, *(4 * math.prod(tensor.shape[1:]) for tensor in weights.values())))
        # Slices of neighbours; for small probes a copy is cheaper than a call per run.
        small = self.weight_bytes() < _SMALL_BYTES * self.n_probes
        ends = np.zeros(0, dtype=np.int64) if small else np.flatnonzero(np.diff(wanted) != 1) + 1
        for run in np.split(wanted, ends) if len(wanted) else []:
            for piece in (run[start : start + most] for start in range(0, len(run), most)):
                first, stop = int(piece[0]), int(piece[-1]) + 1
                rows = slice(first, stop) if stop - first == len(piece) else torch.from_numpy(piece)
                self.check_unchanged()
                for name, tensor in weights.items():
                    largest[name][at : at + len(piece)] = largest_magnitudes(tensor[rows])
                at += len(piece)
        self.check_unchanged()
        self._limit(wanted, largest)

    def check_rows(self, rows: Mapping[str, Tensor], first: int) -> None:
        """Do so for stacked weights from probe `first` on."""
        largest = {name: largest_magnitudes(tensor) for name, tensor in rows.items()}
        self._limit(np.arange(first, first + len(largest["w1"])), largest)

    def _limit(self, probes: np.ndarray, largest: Mapping[str, np.ndarray]) -> None:
        """Set input limits from largest weights `[n]`. Raises `PackCorrupt`."""
        for name, values in largest.items():
            finite = np.isfinite(values)
            if not finite.all():
                probe = int(probes[np.flatnonzero(~finite)[0]])
                raise PackCorrupt(
                    f"{self.directory / PROBES}: {name} of concept {self.concepts[probe]['id']!r} (probe {probe}) "
                    "is not finite: the pack is damaged or was trained to divergence"
                )
        limits = input_limits(self.architecture, largest)
        self.input_limit[probes] = limits
        self.lowest_input_limit = min(self.lowest_input_limit, float(limits.min(initial=math.inf)))

    # -- queries ---------------------------------------------------------------------------------

    @property
    def softmax_group(self) -> Tensor:
        """Return softmax groups `[P]` int64, -1 for none."""
        return torch.from_numpy(self.tree.groups.of)

    @cached_property
    def sites(self) -> list[str]:
        """Return the distinct sites."""
        return list(dict.fromkeys(spec.site for spec in self.inputs))

    def find(self, concept: str | int) -> int:
        """Return the probe of an id, unambiguous name, or number. Raises `UnknownConcept`."""
        return self._names.find(concept)

    def find_all(self, concept: Wanted) -> list[int]:
        """Return the probes of a name, id, number, list or pattern. Raises `UnknownConcept`."""
        return self._names.find_all(concept)

    def path(self, probe: int) -> list[str]:
        """Return the names from the root to the probe."""
        return _path(self.tree, self.concepts, check_count("probe", probe, most=self.n_probes - 1))

    def thresholds_for(self, aggregator: object = None) -> Tensor:
        """Return an aggregator's alert thresholds `[P]` fp32, NaN if not calibrated. Raises `ConfigError` if there are
        none.

        `aggregator`: of `core.aggregate`, or its name; None: each token's score
        """
        name = "each" if aggregator is None else str(aggregator)
        if name == "each":
            return self.alert_threshold
        if name not in self._aggregated:
            names = ", ".join(["single tokens", *self.aggregated])
            calibrate = "" if name.startswith(("z:", "rank:")) else " or calibrate the pack for it"
            raise ConfigError(
                f"the alert thresholds of {self.name} are for {names}, not for {name}: give above={calibrate}"
            )
        return self._aggregated[name]

    @property
    def lowest_alert(self) -> Tensor:
        """Return the lower alert threshold `[P]` fp32 of tokens and of maxima over sentences."""
        return lowest_alert(self.alert_threshold, self._aggregated)

    def score_counts(self, aggregator: object = None) -> Tensor:
        """Return histograms of calibration scores `[P, 128]` int32 (bins: `core.score_counts`).

        Raises `ConfigError` if there are none, `PackCorrupt` if they are negative.
        """
        name = "each" if aggregator is None else str(aggregator)
        if name not in self.counted:
            option = "" if name == "each" else f" --aggregate {name}"
            raise ConfigError(
                f"{self.name} does not say how its concepts score on ordinary text{f' by {name}' if option else ''}:"
                f" probemon calibrate --benign FILE --statistics{option} counts it"
            )
        counts = self._tensors.all()[SCORE_COUNTS + name]
        self._tensors.check()
        if bool((counts < 0).any()):
            raise PackCorrupt(
                f"{self.directory / PROBES}: {SCORE_COUNTS}{name} has a count under 0: fetch the pack again"
            )
        return counts

    @property
    def edited(self) -> bool:
        """True if alert thresholds in force were written to; their precision is then unknown."""
        return self._written_to(self._alert_set, self.alert_threshold, self._aggregated)

    def _written_to(self, alert_set: str | None, alert: Tensor, aggregated: Mapping[str, Tensor]) -> bool:
        return self._as_stated[alert_set].changed(alert) or any(
            self._aggregated_as_stated[name].changed(thresholds) for name, thresholds in aggregated.items()
        )

    @property
    def rewritten(self) -> bool:
        """True if thresholds or weights differ from the files."""
        return self.edited or self._expand_as_stated.changed(self.expand_threshold) or self._has_written_weights()

    def _has_written_weights(self) -> bool:
        return any(self._weights_as_stated[name].changed(tensor) for name, tensor in self._weights.items())

    @property
    def alert_set(self) -> str | None:
        """Return the alert set in force; None if unnamed or `edited`."""
        return None if self.edited else self._alert_set

    @property
    def alert_sets(self) -> tuple[str, ...]:
        """Return the names of alert sets, the recommended one first."""
        return tuple(self._alert_sets)

    def other_alert_sets(self) -> dict[str, Tensor]:
        """Return unedited thresholds `[P]` of sets not in force."""
        return {
            name: thresholds
            for name, thresholds in self._alert_sets.items()
            if name != self._alert_set and not (self.edited or self._as_stated[name].changed(thresholds))
        }

    def precision(self, probe: int) -> float:
        """Return a concept's share of right fires in calibration, NaN if unknown or `edited`."""
        probe = check_count("probe", probe, most=self.n_probes - 1)
        precisions = self.concepts[probe].get("precision")
        value: Any = precisions.get(self.alert_set) if isinstance(precisions, dict) and not self.edited else None
        return float(value) if is_number(value) else math.nan

    def with_alert_set(self, name: str) -> Self:
        """Return the pack with another of its `alert_sets`: the same scores, another `alert_threshold`.

        Drops thresholds of running scores and calibrated expand thresholds; recomputes those of bounding probes, in
        whose packs other parents always open. Raises `ConfigError` for a set that is unknown or was written to.
        """
        if name == self.alert_set:
            return self
        if name not in self._alert_sets:
            names = ", ".join(self._alert_sets) or "none that has a name"
            raise ConfigError(f"{self.name} has no set of alert thresholds {name!r:.80}: it has {names}")
        is_recommended = name == self.manifest.get("alert_set")
        further = self._recommended_aggregated if is_recommended else {}
        if self._written_to(name, self._alert_sets[name], further):
            raise ConfigError(
                f"the alert thresholds {name!r} of {self.name} were written to since it was opened: open it again"
            )
        pack = type(self).__new__(type(self))  # copy.copy would reopen the files
        vars(pack).update(vars(self))
        pack._alert_set, pack.alert_threshold = name, self._alert_sets[name]
        pack._aggregated = further
        pack.aggregated = tuple(pack._aggregated)
        pack.input_limit, pack.lowest_input_limit = np.full(self.n_probes, np.nan), math.inf  # not shared
        pack.expand_threshold, pack.recommended = self._descent_for(pack.lowest_alert)
        pack._expand_as_stated = Noted(pack.expand_threshold)
        return pack

    def descent(self) -> tuple[Tensor, dict[str, Any]]:
        """Return expand thresholds `[P]` and recommended settings for the alert thresholds in force.

        If only these were `edited`, as `with_alert_set`: else a descent might miss fires.
        """
        if self.edited and not self._expand_as_stated.changed(self.expand_threshold):
            return self._descent_for(self.lowest_alert)
        return self.expand_threshold, self.recommended

    def _descent_for(self, alert: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return both for other alert thresholds."""
        expand, recommended = torch.full_like(self.expand_threshold, math.nan), self.recommended
        if self.bounding:
            expand[~self.expand_threshold.isnan()] = ALWAYS
            expand[self.bounding] = bounds_for(self, alert)[self.bounding]
        elif recommended.get("load_threshold") == "calibrated":
            recommended = {key: value for key, value in recommended.items() if key != "load_threshold"}
        return expand, recommended

    @cached_property
    def bounding(self) -> list[int]:
        """Return the bounding probes (`probemon.packs.hierarchies`)."""
        return [probe for probe, concept in enumerate(self.concepts) if concept.get("bounding")]

    def card_text(self) -> str:
        """Return the card as text, or a heading."""
        return f"# {self.name}\n" if self.card is None else self.card.decode(errors="replace")

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name!r}, {self.n_probes} probes, {self.architecture}, {self.score_rule}, {self.dtype})"


def read_rows(pack: OpenedPack, first: int, stop: int) -> dict[str, Tensor]:
    """Return copies of the weights of probes `first..stop - 1`. Raises `PackChanged`."""
    if pack._weights and pack.in_memory:
        return {name: tensor[first:stop].clone() for name, tensor in pack._weights.items()}
    return pack._tensors.read_rows(pack._parameters, first, stop)


def read_soon(pack: OpenedPack, runs: Sequence[tuple[int, int]]) -> None:
    """Start reading runs of probes ahead of `read_rows`."""
    if not pack.in_memory:
        pack._tensors.read_soon(pack._parameters, runs)


def rewritten_weights(pack: OpenedPack) -> str | None:
    """Return a hash of weights that were written to, else None."""
    if not pack._has_written_weights():
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(pack._weights.items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def bounds_for(pack: OpenedPack, alert: Tensor) -> Tensor:
    """Return expand thresholds `[P]` with the smallest alert threshold below each bounding probe."""
    expand = pack.expand_threshold.clone()
    for probe in pack.bounding:
        below = alert[torch.from_numpy(pack.tree.children(probe))]
        calibrated = below[~below.isnan()]
        if len(calibrated):
            expand[probe] = (
                calibrated.min() if len(calibrated) == len(below) else torch.minimum(calibrated.min(), expand[probe])
            )
    return expand


def lowest_alert(alert: Tensor, aggregated: Mapping[str, Tensor]) -> Tensor:
    """Return the lower threshold of tokens and maxima."""
    several = aggregated.get(str(Max()))
    return alert if several is None else torch.fmin(several, alert)


def _path(tree: ConceptTree, concepts: Sequence[Mapping[str, Any]], probe: int) -> list[str]:
    return [concepts[i]["name"] for i in tree.path(probe)]


def _reopen(
    kind: type[OpenedPack], directory: str, name: str, manifest: dict[str, Any], alert_set: str | None = None
) -> OpenedPack:
    try:
        pack = kind.open(directory)
    except PackError as error:
        raise PackError(
            f"{name} was pickled as the pack in {directory}, and is opened from there again: {error}"
        ) from error
    if pack.manifest != manifest:
        raise PackError(
            f"{name} was pickled as the pack in {directory}, where there is another pack now: put back the original,"
            " or open this one and pickle it again"
        )
    return pack if alert_set is None else pack.with_alert_set(alert_set)
