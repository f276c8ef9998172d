"""A probe pack: a directory of concept probes and everything needed to use them honestly.

    pack = ProbePack.open("probes/wordnet-smollm2-135m")        # milliseconds; weights stay on disk until used
    pack = ProbePack.open(path, verify=True)                    # hashes, every weight, and the golden scores
    pack.concepts[3]["name"], pack.path(17), pack.find("whale")

The format is described in docs/pack_format.md. Nothing in it is executable; nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from probemon import packfile
from probemon.errors import (
    ConfigError,
    HierarchyError,
    PackCorrupt,
    PackError,
    ProbemonError,
)
from probemon.hierarchy import ConceptTree
from probemon.manifest import CARD, CONCEPTS, MANIFEST, PROBES, read_concepts, read_manifest
from probemon.naming import Names, Wanted
from probemon.types import Architecture, InputSpec, input_dtype, input_limits

if TYPE_CHECKING:
    from probemon.hub import Pushed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
_VECTORS = {
    **dict.fromkeys(("child_ptr", "child_idx", "level", "input"), torch.int64),
    **dict.fromkeys(("alert_threshold", "expand_threshold"), torch.float32),
}
MATRICES = ("w1", "w2", "w3")
_FINITE_BYTES = 64 << 20
AGGREGATED = "alert_threshold:"  # and the name of the aggregator whose running scores the thresholds are for

# What scores golden states: (pack, hidden [G, S, D]) -> fp32 [G, P]. The manager's, injected so that pack knows no kernel.
GoldenScorer = Callable[["ProbePack", Tensor], Tensor]


class ProbePack:
    """An opened pack. Read-only; make one with `open`, `from_pretrained` or `write`.

    `manifest` (dict), `concepts` (one dict a probe), `tree` (ConceptTree), `weights` (stacked tensors
    by parameter, mapped from disk), `inputs` (InputSpec list), `input_index [P]` int64,
    `alert_threshold`, `expand_threshold` `[P]` fp32 with NaN where not calibrated, `aggregated` (names, as `str()` gives them, of the
    aggregators that have alert thresholds of their own: `thresholds_for`), `golden_hidden [G, S, D]`, `golden_scores [G, P]` or None.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any], concepts: list[dict[str, Any]], tensors: dict[str, Tensor]):
        self.directory = directory
        self.manifest = manifest
        self.concepts = concepts
        self.name: str = manifest["name"]
        self.score_rule: str = manifest["score_rule"]
        self.inputs = [InputSpec(**spec) for spec in manifest["inputs"]]
        self.recommended: dict[str, Any] = manifest.get("recommended") or {}
        where = f"{directory / PROBES}"
        for key, dtype in _VECTORS.items():
            if tensors[key].dim() != 1 or tensors[key].dtype != dtype:
                raise PackCorrupt(f"{where}: {key} is {tensors[key].dtype} {tuple(tensors[key].shape)}, expected a vector of {dtype}")
        for key in Architecture.parameters():
            weight = key in MATRICES
            if key in tensors and tensors[key].dtype not in (DTYPES.values() if weight else (torch.float32,)):
                raise PackCorrupt(f"{where}: {key} is {tensors[key].dtype}, expected {'a float type or int8' if weight else 'torch.float32'}")
        try:
            self.tree = ConceptTree(tensors["child_ptr"].numpy(), tensors["child_idx"].numpy(), tensors["level"].numpy())
        except HierarchyError as error:
            raise HierarchyError(f"{where}: {error}") from None
        self.n_probes = self.tree.n
        self.weights = {name: tensors[name] for name in Architecture.parameters() if name in tensors}
        self.architecture = Architecture.of(self.weights, where)
        self.dtype = self.weights["w1"].dtype
        self.input_dtype = input_dtype(self.dtype)
        self.input_index = tensors["input"].to(torch.int64)
        self.alert_threshold = tensors["alert_threshold"].to(torch.float32)
        self.expand_threshold = tensors["expand_threshold"].to(torch.float32)
        self._aggregated = {name.removeprefix(AGGREGATED): tensor for name, tensor in tensors.items() if name.startswith(AGGREGATED)}
        self.aggregated = tuple(sorted(self._aggregated))
        self.golden_hidden = tensors.get("golden_hidden")
        self.golden_scores = tensors.get("golden_scores")
        self.golden_error: float | None = None  # found by `verify`
        # Of each probe the largest value of an input with which no sum can overflow fp32; NaN until its weights are looked at.
        self.input_limit = np.full(self.n_probes, np.nan)
        self.lowest_input_limit = math.inf  # of those looked at
        self._check(where)
        self._names = Names(self.name, concepts, self.path)

    # -- opening ---------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> ProbePack:
        """Open the pack in a directory, checking structure, sizes and hierarchy.

        `verify=True` also hashes every file, checks every weight and replays the golden scores.
        Raises `PackError` (or `PackVersionError`, `PackCorrupt`, `HierarchyError`) naming the file.
        """
        try:
            return cls._open(Path(path), verify)
        except ProbemonError:
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
            # What a forged file can hold is endless; whatever it breaks is one error that names the pack.
            first = (str(error).splitlines() or [""])[0][:200]
            raise PackCorrupt(f"{path} is malformed ({type(error).__name__}: {first}): fetch the pack again") from error

    @classmethod
    def _open(cls, directory: Path, verify: bool) -> ProbePack:
        if not (directory / MANIFEST).is_file():
            if not directory.is_dir():
                raise PackError(f"{directory} is not a directory: give the folder that holds {MANIFEST}")
            raise PackError(f"{directory} holds no {MANIFEST}: it is not a probe pack")
        packfile.check_inside(directory / MANIFEST)
        manifest = read_manifest(directory / MANIFEST)
        for file, stated in manifest["files"].items():
            packfile.check_size(directory / file, stated["size"])
        for needed in (CONCEPTS, PROBES):
            if needed not in manifest["files"]:
                raise PackCorrupt(f"{directory / MANIFEST} lists no {needed}: fetch the pack again")
        if verify:
            for file, stated in manifest["files"].items():
                packfile.check_hash(directory / file, stated["sha256"])
        packfile.check_card(directory / CARD)
        concepts = read_concepts(directory / CONCEPTS)
        pack = cls(directory, manifest, concepts, packfile.map_tensors(directory / PROBES))
        if verify:
            pack.verify()
        return pack

    @classmethod
    def from_pretrained(
        cls, repo: str, *, revision: str | None = None, token: str | bool | None = None, cache_dir: str | Path | None = None, local_files_only: bool = False,
        manifest_sha256: str | None = None, verify: bool = False, endpoint: str | None = None,
    ) -> ProbePack:  # fmt: skip
        """Open a local directory, or a pack published on the Hugging Face hub as `org/name`.

        `revision` (branch, tag or commit), `token`, `cache_dir`, `local_files_only` and `endpoint` are huggingface_hub's, and so is the cache. Files that were
        fetched are hashed before their first use. `manifest_sha256`: what sha256 the pack's manifest must have; every byte is then checked, each time, in a
        directory too. Raises `PackError` saying what to do where there is no such pack, or no way to it, and `PackCorrupt` where a byte differs.
        """
        from probemon import hub

        local = hub.find(
            repo, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only, manifest_sha256=manifest_sha256, endpoint=endpoint
        )
        return cls.open(local, verify=verify)

    def _check(self, where: str) -> None:
        n, d = self.n_probes, self.architecture.hidden_size
        if len(self.concepts) != n:
            raise PackCorrupt(f"{self.directory / CONCEPTS} has {len(self.concepts)} lines for {n} probes: fetch the pack again")
        for name, tensor in (
            ("input", self.input_index),
            ("alert_threshold", self.alert_threshold),
            ("expand_threshold", self.expand_threshold),
        ):
            if tuple(tensor.shape) != (n,):
                raise PackCorrupt(f"{where}: {name} has shape {tuple(tensor.shape)}, expected ({n},)")
        for name, tensor in self._aggregated.items():
            if name in ("", "each") or tuple(tensor.shape) != (n,) or tensor.dtype != torch.float32:
                raise PackCorrupt(f"{where}: {AGGREGATED}{name} is {tensor.dtype} {tuple(tensor.shape)}, expected an aggregator's name and torch.float32 ({n},)")
        if n and not (int(self.input_index.min()) >= 0 and int(self.input_index.max()) < len(self.inputs)):
            raise PackCorrupt(f"{where}: input must index the manifest's {len(self.inputs)} inputs")
        said = {"architecture": self.architecture.as_dict(), "dtype": next(name for name, dtype in DTYPES.items() if dtype is self.dtype)}
        for name, value in said.items():
            if self.manifest.get(name, value) != value:
                raise PackCorrupt(f"{where}: {name} is {value}, the manifest says {str(self.manifest[name])[:100]}: fetch the pack again")
        if self.manifest["host"].get("hidden_size") not in (None, d):
            raise PackCorrupt(f"{where}: w1 reads {d} values, the manifest says hidden_size {self.manifest['host']['hidden_size']}")
        if (self.golden_hidden is None) is not (self.golden_scores is None):
            raise PackCorrupt(f"{where} has golden states without their scores, or scores without their states: fetch the pack again")
        if self.golden_hidden is not None and self.golden_scores is not None:
            g = len(self.golden_hidden)
            expected = {"golden_hidden": (g, len(self.sites), d), "golden_scores": (g, n)}
            for name, shape in expected.items():
                if tuple(getattr(self, name).shape) != shape:
                    raise PackCorrupt(f"{where}: {name} has shape {tuple(getattr(self, name).shape)}, expected {shape}")
        ids = [concept["id"] for concept in self.concepts]
        for i, concept in enumerate(self.concepts):
            above = [ids[p] for p in self.tree.parents(i).tolist()]
            if concept["level"] != int(self.tree.level[i]) or sorted(concept["parents"]) != sorted(above):
                raise PackCorrupt(
                    f"{self.directory / CONCEPTS} line {i + 1} ({concept['id']}): level {concept['level']} and parents "
                    f"{concept['parents']} differ from {PROBES} ({int(self.tree.level[i])}, {above}): fetch the pack again"
                )
        if len(set(ids)) != n:
            twice = next(i for i in ids if ids.count(i) > 1)
            raise PackCorrupt(f"{self.directory / CONCEPTS}: id {twice!r} appears twice")

    def check_finite(self, probes: np.ndarray | None = None) -> None:
        """Look at the weights of `probes` (default: all): raise `PackCorrupt` naming the first that has one that is NaN or infinite.

        What the rest can be given without a sum that overflows is in `input_limit` then (see `input_limits`).
        """
        wanted = np.arange(self.n_probes) if probes is None else np.unique(probes)
        # In bounded pieces: absolute values are a copy.
        most = max(1, _FINITE_BYTES // max(1, *(4 * math.prod(tensor.shape[1:]) for tensor in self.weights.values())))
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1) if len(wanted) else []:
            for first in range(int(run[0]), int(run[-1]) + 1, most):
                stop = min(first + most, int(run[-1]) + 1)
                largest = {}
                for name, tensor in self.weights.items():
                    largest[name] = _largest(tensor[first:stop])
                    finite = np.isfinite(largest[name])
                    if not finite.all():
                        probe = first + int(np.flatnonzero(~finite)[0])
                        raise PackCorrupt(
                            f"{self.directory / PROBES}: {name} of concept {self.concepts[probe]['id']!r} (probe {probe}) "
                            f"is not finite: the pack is damaged or was trained to divergence"
                        )
                limits = input_limits(self.architecture, largest)
                self.input_limit[first:stop] = limits
                self.lowest_input_limit = min(self.lowest_input_limit, float(limits.min()))

    def verify(self, scorer: GoldenScorer | None = None) -> float | None:
        """Check every weight and replay the golden states; the largest score error, or None without golden states.

        Raises `PackCorrupt` where a replayed score is more than 1e-5 from the recorded one.
        """
        self.check_finite()
        if self.golden_hidden is None or self.golden_scores is None:
            return None
        scored = (scorer or _exhaustive_scores)(self, self.golden_hidden)
        error = (scored - self.golden_scores).abs()
        worst = float(error.max()) if error.numel() else 0.0
        if not worst <= 1e-5:
            probe = int(error.max(dim=0).values.argmax())
            raise PackCorrupt(
                f"{self.directory}: golden replay of {self.concepts[probe]['id']!r} is off by {worst:.3g} (at most 1e-5): "
                "the weights are not those the pack was published with"
            )
        self.golden_error = worst
        return worst

    def __deepcopy__(self, memo: dict[int, Any]) -> ProbePack:
        return self  # it is read-only

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled, a pack is opened again from its directory, which must hold the same one."""
        return _opened_again, (type(self), str(self.directory.resolve()), self.name, self.manifest)

    # -- asking ----------------------------------------------------------------------------------

    @property
    def sites(self) -> list[str]:
        """Distinct sites in the order of the inputs: the second axis of `golden_hidden`."""
        return list(dict.fromkeys(spec.site for spec in self.inputs))

    def find(self, concept: str | int) -> int:
        """The probe number of a concept given by id, by unambiguous name, or by number. Raises `UnknownConcept`."""
        return self._names.find(concept)

    def find_all(self, concept: Wanted) -> list[int]:
        """Probe numbers of a name, id, number, list of these, or pattern over names and ids. Raises `UnknownConcept`."""
        return self._names.find_all(concept)

    def thresholds_for(self, aggregator: object = None) -> Tensor:
        """Alert thresholds `[P]` fp32 of an aggregator's running scores, NaN where not calibrated; `None`: of each token's own score.

        `aggregator`: one of `probemon.aggregate`, or its name as `str()` gives it. Raises `ConfigError` where the pack has none for it.
        """
        name = "each" if aggregator is None else str(aggregator)
        if name == "each":
            return self.alert_threshold
        if name not in self._aggregated:
            known = ", ".join(["single tokens", *self.aggregated])
            raise ConfigError(f"the alert thresholds of {self.name} are for {known}, not for {name}: give above= or calibrate the pack for it")
        return self._aggregated[name]

    def path(self, probe: int) -> list[str]:
        """Names from the root down to the probe."""
        return [self.concepts[i]["name"] for i in self.tree.path(probe)]

    def weight_bytes(self) -> int:
        """Bytes of all stacked weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.weights.values())

    def __repr__(self) -> str:
        return f"ProbePack({self.name!r}, {self.n_probes} probes, {self.architecture}, {self.score_rule}, {self.dtype})"

    # -- writing ---------------------------------------------------------------------------------

    @classmethod
    def write(
        cls,
        path: str | Path,
        *,
        name: str,
        concepts: Sequence[Mapping[str, Any]],
        weights: Mapping[str, Tensor],
        score_rule: str,
        inputs: Sequence[Mapping[str, Any]],
        host: Mapping[str, Any],
        licence: str,
        card: str,
        input_index: Tensor | None = None,
        alert_threshold: Tensor | None = None,
        expand_threshold: Tensor | None = None,
        aggregated: Mapping[str, Tensor] | None = None,
        golden_hidden: Tensor | None = None,
        recommended: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        quality: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> ProbePack:
        """Write a pack and open it. Probes are given in any order and numbered here.

        `concepts`: dicts with `id`, `name`, `parents` (ids), optionally `level` (on all or none),
        `definition` and anything else JSON. `weights`, `input_index [P]`, `alert_threshold [P]`,
        `expand_threshold [P]` and `aggregated` (alert thresholds `[P]` by `str()` of the aggregator) are in the order of `concepts`; the dtype of `w1` is the pack's, biases
        (and the scales of int8 weights: `probemon.quantize`) are kept in fp32. `golden_hidden [G, S, D]`: raw states at the distinct sites of `inputs`.
        The directory appears whole or not at all; an existing one is an error unless `overwrite`.
        """
        from probemon.packwriter import PackWriter, check_target

        check_target(path, overwrite)
        architecture = Architecture.of(weights, "weights")
        for key, tensor in weights.items():
            if len(tensor) != len(concepts):
                raise PackError(f"weights[{key!r}] has {len(tensor)} rows for {len(concepts)} concepts")
        writer = PackWriter(
            path, name=name, concepts=concepts, architecture=architecture, dtype=weights["w1"].dtype, score_rule=score_rule, inputs=inputs, host=host,
            licence=licence, card=card, input_index=input_index, alert_threshold=alert_threshold, expand_threshold=expand_threshold, aggregated=aggregated,
            golden_hidden=golden_hidden, recommended=recommended, provenance=provenance, quality=quality, overwrite=overwrite,
        )  # fmt: skip
        with writer:
            writer.put_slice(0, weights)
        return writer.pack

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> ProbePack:
        """Copy the pack to a directory, its card begun by metadata that the hub reads, and open the copy.

        What the card has of metadata stays; `library_name`, `tags`, `license` and, where the host has a name on the hub, `base_model` are added, and the
        manifest states the new card. The directory appears whole or not at all. Raises `PackError`, and `PackCorrupt` where this pack is damaged.
        """
        from probemon import hub

        return hub.save(self, folder, overwrite=overwrite)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None, commit_message: str | None = None, create_pr: bool = False,
        token: str | bool | None = None, endpoint: str | None = None,
    ) -> Pushed:  # fmt: skip
        """Push what `save_pretrained` would write to a repository on the hub, made where there is none, in one commit.

        The arguments are huggingface_hub's; `revision` is a branch, made where there is none. The result has the `commit` and the `manifest_sha256` that others
        pin. Raises `PackError` saying what to do, and `PackCorrupt` where this pack is damaged: nothing is sent then.
        """
        from probemon import hub

        return hub.push(
            self, repo_id, private=private, revision=revision, commit_message=commit_message, create_pr=create_pr, token=token, endpoint=endpoint
        )


def _largest(weights: Tensor) -> np.ndarray:
    """The largest absolute value of each probe `[n]` fp64, NaN where one is NaN."""
    if weights.dtype == torch.int8:
        return np.full(len(weights), 128.0)  # the most there can be, without looking
    return weights.reshape(len(weights), -1).abs().amax(dim=1).to(torch.float64).numpy()


def _opened_again(kind: type[ProbePack], directory: str, name: str, manifest: dict[str, Any]) -> ProbePack:
    try:
        pack = kind.open(directory)
    except PackError as error:
        raise PackError(f"{name} was pickled as the pack in {directory}, and is opened from there again: {error}") from error
    if pack.manifest != manifest:
        raise PackError(f"{name} was pickled as the pack in {directory}, where another lies now: put back the one it was, or open this one and pickle it anew")
    return pack


def _exhaustive_scores(pack: ProbePack, hidden: Tensor) -> Tensor:
    """Scores `[G, P]` of raw states `[G, S, D]` by the reference kernel: what golden scores are."""
    from probemon.kernels import exhaustive_reference

    sites = pack.sites
    return exhaustive_reference({site: hidden[:, i] for i, site in enumerate(sites)}, pack)
