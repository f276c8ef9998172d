"""Open a pack, verify it, ask it: everything but writing one, which `ProbePack` adds.

    pack = OpenedPack.open("probes/wordnet-smollm2-135m")       # milliseconds; weights are not read until used
    pack = OpenedPack.open(path, verify=True)                   # hashes, every weight, and the golden scores
    pack.concepts[3]["name"], pack.path(17), pack.find("whale")

What becomes of the files of an opened pack does not change what it scores: `PackChanged` says where its weights can no
longer be read as they were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from probemon.core.checks import check_bool, check_count, check_path
from probemon.core.concept_names import Names, Wanted
from probemon.core.hierarchy import ConceptTree
from probemon.core.probes import Architecture, InputSpec, input_dtype, input_limits
from probemon.core.reference import exhaustive_reference
from probemon.core.settings import CascadeConfig
from probemon.errors import (
    ConfigError,
    HierarchyError,
    PackCorrupt,
    PackError,
    ProbemonError,
)
from probemon.packs import files as packfile
from probemon.packs.held_file import HeldFolder, read_whole
from probemon.packs.held_tensors import HeldTensors
from probemon.packs.manifest import (
    CARD,
    CONCEPTS,
    MANIFEST,
    MAX_CONCEPTS_BYTES,
    MAX_MANIFEST_BYTES,
    PROBES,
    parse_concepts,
    parse_manifest,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
_VECTORS = {
    **dict.fromkeys(("child_ptr", "child_idx", "level", "input"), torch.int64),
    **dict.fromkeys(("alert_threshold", "expand_threshold"), torch.float32),
}
MATRICES = ("w1", "w2", "w3")
_FINITE_BYTES = _BLOCK_BYTES = 64 << 20
ALWAYS = -1.0  # the expand threshold of a probe that is opened whatever it scores
THRESHOLDS = (
    "a threshold lies between 0 and 1, as scores do (1 is exceeded by none), or is NaN (not calibrated); an expand"
    " threshold may be -1 (always opened)"
)
AGGREGATED = "alert_threshold:"  # and the name of the aggregator whose running scores the thresholds are for


class OpenedPack:
    """A pack that was opened, read-only: make one with `open`. `ProbePack` is one that can also be written and pushed.

    `manifest` (dict), `concepts` (one dict a probe), `tree` (ConceptTree), `weights` (stacked tensors
    by parameter, read when first asked for: into memory, or mapped where they are many), `inputs` (InputSpec list),
    `input_index [P]` int64, `alert_threshold`, `expand_threshold` `[P]` fp32 with NaN where not calibrated,
    `aggregated` (names, as `str()` gives them, of the aggregators that have alert thresholds of their own:
    `thresholds_for`), `golden_hidden [G, S, D]`, `golden_scores [G, P]` or None, `card` (bytes, None where there is
    none).
    """

    def __init__(
        self,
        directory: Path,
        manifest: dict[str, Any],
        concepts: list[dict[str, Any]],
        tensors: HeldTensors,
        card: bytes | None = None,
    ):
        self.directory = directory
        self.manifest = manifest
        self.concepts = concepts
        self.name: str = manifest["name"]
        self.score_rule: str = manifest["score_rule"]
        self.inputs = [InputSpec(**spec) for spec in manifest["inputs"]]
        self.recommended: dict[str, Any] = manifest.get("recommended") or {}
        self.card = card
        self._tensors, self._weights = tensors, dict[str, Tensor]()
        where, like = f"{directory / PROBES}", tensors.described
        for needed in (*_VECTORS, "w1", "b1"):
            if needed not in like:
                raise PackCorrupt(f"{where} holds no tensor {needed!r}: it is not a probe pack's")
        for key, dtype in _VECTORS.items():
            if like[key].dim() != 1 or like[key].dtype != dtype:
                raise PackCorrupt(
                    f"{where}: {key} is {like[key].dtype} {tuple(like[key].shape)}, expected a vector of {dtype}"
                )
        for key in Architecture.parameters():
            weight = key in MATRICES
            if key in like and like[key].dtype not in (DTYPES.values() if weight else (torch.float32,)):
                raise PackCorrupt(
                    f"{where}: {key} is {like[key].dtype}, expected"
                    f" {'a float type or int8' if weight else 'torch.float32'}"
                )
        vectors = {key: tensors.read(key) for key in _VECTORS}
        try:
            self.tree = ConceptTree(
                vectors["child_ptr"].numpy(), vectors["child_idx"].numpy(), vectors["level"].numpy()
            )
        except HierarchyError as error:
            raise HierarchyError(f"{where}: {error}") from None
        self.n_probes = self.tree.n
        self._like = {name: like[name] for name in Architecture.parameters() if name in like}
        self.architecture = Architecture.of(self._like, where)
        self.dtype = self._like["w1"].dtype
        self.input_dtype = input_dtype(self.dtype)
        self.input_index, self.alert_threshold, self.expand_threshold = (
            vectors["input"],
            vectors["alert_threshold"],
            vectors["expand_threshold"],
        )
        self._aggregated: dict[str, Tensor] = {}
        for key in (key for key in like if key.startswith(AGGREGATED)):
            name = key.removeprefix(AGGREGATED)
            if name in ("", "each") or tuple(like[key].shape) != (self.n_probes,) or like[key].dtype != torch.float32:
                raise PackCorrupt(
                    f"{where}: {key} is {like[key].dtype} {tuple(like[key].shape)}, expected an aggregator's name and"
                    f" torch.float32 ({self.n_probes},)"
                )
            self._aggregated[name] = tensors.read(key)
        self.aggregated = tuple(sorted(self._aggregated))
        self.golden_error: float | None = None  # found by `verify`
        # Of each probe the largest value of an input with which no sum can overflow fp32; NaN until its weights are
        # looked at.
        self.input_limit = np.full(self.n_probes, np.nan)
        self.lowest_input_limit = math.inf  # of those looked at
        self._check(where)
        self._names = Names(
            self.name, concepts, partial(_path, self.tree, concepts)
        )  # not the pack's own method: a pack in a circle would hold its file for long

    @property
    def weights(self) -> dict[str, Tensor]:
        """Stacked tensors by parameter. Raises `PackChanged` where their file was written to since the pack was opened,
        and `PackCorrupt` where it is not the manifest's.
        """
        if not self._weights:
            everything = self._tensors.all()
            self._weights = {name: everything[name] for name in self._like}
        self._tensors.check()
        return self._weights

    @property
    def golden_hidden(self) -> Tensor | None:
        """Golden states, read when asked for. Raises as `weights`."""
        return self._tensors.all().get("golden_hidden")

    @property
    def golden_scores(self) -> Tensor | None:
        """Their scores."""
        return self._tensors.all().get("golden_scores")

    @property
    def in_memory(self) -> bool:
        """Whether weights that were asked for are in memory of their own, where nobody can change them, rather than
        mapped.
        """
        return self._tensors.in_memory

    def check_unchanged(self) -> None:
        """Raise `PackChanged` where weights are in a file that somebody wrote to since the pack was opened. Takes a
        microsecond or two.
        """
        self._tensors.check()

    def moved(self, directory: Path) -> None:
        """The pack's folder has another name now; its files are held."""
        self.directory = directory
        self._tensors.moved(directory / PROBES)

    def card_text(self) -> str:
        """The card, as far as it is UTF-8; a heading where there is none."""
        return f"# {self.name}\n" if self.card is None else self.card.decode(errors="replace")

    def read_rows(self, first: int, stop: int) -> dict[str, Tensor]:
        """Weights of the probes `first..stop - 1`, in memory of their own, as they were when the pack was opened.
        Raises `PackChanged`.
        """
        if self._weights and self.in_memory:
            return {name: tensor[first:stop].clone() for name, tensor in self._weights.items()}
        return self._tensors.read_rows(self._like, first, stop)

    def blocks(self, probes: np.ndarray | None = None) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Copies of the weights of `probes` (all) in their order, some at a time: where each block begins, and its
        stacked tensors. Raises `PackChanged`.
        """
        wanted = np.arange(self.n_probes) if probes is None else probes
        size = max(1, _BLOCK_BYTES // max(1, self.weight_bytes() // self.n_probes))
        for start in range(0, len(wanted), size):
            some = torch.from_numpy(wanted[start : start + size])
            block = {name: tensor[some] for name, tensor in self.weights.items()}
            self.check_unchanged()
            yield start, block

    # -- opening ---------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> Self:
        """Open the pack in a directory, checking structure, sizes and hierarchy.

        `verify=True` also hashes every file, checks every weight and replays the golden scores. A pack that is replaced
        meanwhile is one of the two, whole. Raises `PackError` (or `PackVersionError`, `PackCorrupt`, `PackChanged`,
        `HierarchyError`) naming the file, `ConfigError` where what the pack recommends is no setting.
        """
        return cls._opened(check_path("path", path), check_bool("verify", verify))

    @classmethod
    def _opened(cls, directory: Path, verify: bool, *, hashed: bool = False, pin: str | None = None) -> Self:
        """`hashed`: every file is, as by `verify`. `pin`: the manifest's sha256."""
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
            # What a forged file can hold is endless; whatever it breaks is one error that names the pack.
            first = (str(error).splitlines() or [""])[0][:200]
            raise PackCorrupt(
                f"{directory} is malformed ({type(error).__name__}: {first}): fetch the pack again"
            ) from error

    @classmethod
    def _read(cls, folder: HeldFolder, hashed: bool, pin: str | None) -> Self:
        directory = folder.path
        if not folder.has(MANIFEST):
            raise PackError(f"{directory} holds no {MANIFEST}: it is not a probe pack")
        # All at once, so that a folder that is replaced while the texts are read is still there, whole.
        held = {
            file: folder.hold(file, keep=file == PROBES)
            for file in (MANIFEST, CONCEPTS, PROBES, CARD)
            if folder.has(file)
        }
        data = held[MANIFEST].read(MAX_MANIFEST_BYTES)
        if pin is not None:
            packfile.check_pin(directory / MANIFEST, sha256(data).hexdigest(), pin)
        manifest = parse_manifest(data, directory / MANIFEST)
        for needed in (CONCEPTS, PROBES):
            if needed not in manifest["files"]:
                raise PackCorrupt(f"{directory / MANIFEST} lists no {needed}: fetch the pack again")
        for file, stated in manifest["files"].items():
            found = folder.hold(file)
            packfile.check_stated_size(found.path, found.size, stated["size"])
            if hashed:
                packfile.check_stated_hash(found.path, found.sha256(), stated["sha256"])
        card = held[CARD].read(packfile.MAX_CARD_BYTES) if CARD in held else None
        data = held[CONCEPTS].read(MAX_CONCEPTS_BYTES)
        concepts = parse_concepts(data, directory / CONCEPTS)
        packfile.check_stated_hash(
            directory / CONCEPTS, sha256(data).hexdigest(), manifest["files"][CONCEPTS]["sha256"]
        )
        return cls(
            directory, manifest, concepts, HeldTensors(held[PROBES], sha256=manifest["files"][PROBES]["sha256"]), card
        )

    def _check(self, where: str) -> None:
        n, d = self.n_probes, self.architecture.hidden_size
        if not n or not d or 0 in self.architecture.hidden:
            raise PackCorrupt(
                f"{where} holds {n} probes of {d} values and layers of {list(self.architecture.hidden)}: a pack has one"
                " probe or more, and none is empty"
            )
        if len(self.concepts) != n:
            raise PackCorrupt(
                f"{self.directory / CONCEPTS} has {len(self.concepts)} lines for {n} probes: fetch the pack again"
            )
        for name, tensor in (
            ("input", self.input_index),
            ("alert_threshold", self.alert_threshold),
            ("expand_threshold", self.expand_threshold),
        ):
            if tuple(tensor.shape) != (n,):
                raise PackCorrupt(f"{where}: {name} has shape {tuple(tensor.shape)}, expected ({n},)")
        for name, tensor in {
            "alert_threshold": self.alert_threshold,
            "expand_threshold": self.expand_threshold,
            **self._aggregated,
        }.items():
            bad = no_thresholds(name, tensor)
            if bad is not None:
                raise PackCorrupt(
                    f"{where}: the {name} of concept {self.concepts[bad]['id']!r:.80} is {float(tensor[bad]):g}:"
                    f" {THRESHOLDS}. Fetch the pack again, or calibrate it"
                )
        if not (int(self.input_index.min()) >= 0 and int(self.input_index.max()) < len(self.inputs)):
            raise PackCorrupt(f"{where}: input must index the manifest's {len(self.inputs)} inputs")
        said = {
            "architecture": self.architecture.as_dict(),
            "dtype": next(name for name, dtype in DTYPES.items() if dtype is self.dtype),
        }
        for name, value in said.items():
            if self.manifest.get(name, value) != value:
                raise PackCorrupt(
                    f"{where}: {name} is {value}, the manifest says {str(self.manifest[name])[:100]}: fetch the pack"
                    " again"
                )
        if self.manifest["host"].get("hidden_size") not in (None, d):
            raise PackCorrupt(
                f"{where}: w1 reads {d} values, the manifest says hidden_size {self.manifest['host']['hidden_size']}"
            )
        golden: dict[str, Tensor] = {
            name: self._tensors.described[name]
            for name in ("golden_hidden", "golden_scores")
            if name in self._tensors.described
        }
        if len(golden) == 1:
            raise PackCorrupt(
                f"{where} has golden states without their scores, or scores without their states: fetch the pack again"
            )
        if golden:
            g = golden["golden_hidden"].shape[0] if golden["golden_hidden"].dim() else 0
            expected = {"golden_hidden": (g, len(self.sites), d), "golden_scores": (g, n)}
            for name, shape in expected.items():
                if tuple(golden[name].shape) != shape or golden[name].dtype != torch.float32:
                    raise PackCorrupt(
                        f"{where}: {name} has shape {tuple(golden[name].shape)} in {golden[name].dtype}, expected"
                        f" {shape} in torch.float32"
                    )
        check_recommended(self.recommended, f"{self.directory / MANIFEST}")
        ids = [concept["id"] for concept in self.concepts]
        for i, concept in enumerate(self.concepts):
            above = [ids[p] for p in self.tree.parents(i).tolist()]
            if concept["level"] != int(self.tree.level[i]) or sorted(concept["parents"]) != sorted(above):
                raise PackCorrupt(
                    f"{self.directory / CONCEPTS} line {i + 1} ({concept['id']!r:.80}): level"
                    f" {str(concept['level'])[:20]} and parents {concept['parents']!r:.200} differ from {PROBES}"
                    f" ({int(self.tree.level[i])}, {above!r:.200}): fetch the pack again"
                )
        if len(set(ids)) != n:
            twice = Counter(ids).most_common(1)[0][0]
            raise PackCorrupt(f"{self.directory / CONCEPTS}: id {twice!r:.80} appears twice")

    def check_finite(self, probes: np.ndarray | None = None) -> None:
        """Look at the weights of `probes` (default: all): raise `PackCorrupt` naming the first that has one that is NaN
        or infinite.

        What the rest can be given without a sum that overflows is in `input_limit` then (see `input_limits`).
        """
        wanted = np.arange(self.n_probes) if probes is None else np.unique(probes)
        weights = self.weights
        # In bounded pieces: absolute values are a copy.
        most = max(1, _FINITE_BYTES // max(1, *(4 * math.prod(tensor.shape[1:]) for tensor in weights.values())))
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1) if len(wanted) else []:
            for first in range(int(run[0]), int(run[-1]) + 1, most):
                stop = min(first + most, int(run[-1]) + 1)
                self.check_unchanged()
                self.check_rows({name: tensor[first:stop] for name, tensor in weights.items()}, first)
        self.check_unchanged()

    def check_rows(self, rows: Mapping[str, Tensor], first: int) -> None:
        """The same of stacked weights of neighbours, the first of them the probe `first`."""
        largest = {}
        for name, tensor in rows.items():
            largest[name] = _largest(tensor)
            finite = np.isfinite(largest[name])
            if not finite.all():
                probe = first + int(np.flatnonzero(~finite)[0])
                raise PackCorrupt(
                    f"{self.directory / PROBES}: {name} of concept {self.concepts[probe]['id']!r} (probe {probe}) "
                    "is not finite: the pack is damaged or was trained to divergence"
                )
        limits = input_limits(self.architecture, largest)
        self.input_limit[first : first + len(limits)] = limits
        self.lowest_input_limit = min(self.lowest_input_limit, float(limits.min(initial=math.inf)))

    def verify(self) -> float | None:
        """Check every weight and replay the golden states; the largest score error, or None without golden states.

        Raises `PackCorrupt` where a replayed score is more than 1e-5 from the recorded one.
        """
        self.check_finite()
        hidden, recorded = self.golden_hidden, self.golden_scores
        if hidden is None or recorded is None:
            return None
        replayed = exhaustive_reference({site: hidden[:, i] for i, site in enumerate(self.sites)}, self)
        error = (replayed - recorded).abs()
        self.check_unchanged()
        worst = float(error.max()) if error.numel() else 0.0
        if not worst <= 1e-5:
            probe = int(error.max(dim=0).values.argmax())
            raise PackCorrupt(
                f"{self.directory}: golden replay of {self.concepts[probe]['id']!r} is off by {worst:.3g} (at most"
                " 1e-5): the weights are not those the pack was published with"
            )
        self.golden_error = worst
        return worst

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it is read-only

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled, a pack is opened again from its directory, which must hold the same one."""
        return _opened_again, (type(self), str(self.directory.resolve()), self.name, self.manifest)

    # -- asking ----------------------------------------------------------------------------------

    @cached_property
    def sites(self) -> list[str]:
        """Distinct sites in the order of the inputs: the second axis of `golden_hidden`."""
        return list(dict.fromkeys(spec.site for spec in self.inputs))

    def find(self, concept: str | int) -> int:
        """The probe number of a concept given by id, by unambiguous name, or by number. Raises `UnknownConcept`."""
        return self._names.find(concept)

    def find_all(self, concept: Wanted) -> list[int]:
        """Probe numbers of a name, id, number, list of these, or pattern over names and ids. Raises
        `UnknownConcept`.
        """
        return self._names.find_all(concept)

    def thresholds_for(self, aggregator: object = None) -> Tensor:
        """Alert thresholds `[P]` fp32 of an aggregator's running scores, NaN where not calibrated; `None`: of each
        token's own score.

        `aggregator`: one of `probemon.aggregate`, or its name as `str()` gives it. Raises `ConfigError` where the pack
        has none for it.
        """
        name = "each" if aggregator is None else str(aggregator)
        if name == "each":
            return self.alert_threshold
        if name not in self._aggregated:
            known = ", ".join(["single tokens", *self.aggregated])
            raise ConfigError(
                f"the alert thresholds of {self.name} are for {known}, not for {name}: give above= or calibrate the"
                " pack for it"
            )
        return self._aggregated[name]

    def path(self, probe: int) -> list[str]:
        """Names from the root down to the probe."""
        return _path(self.tree, self.concepts, check_count("probe", probe, most=self.n_probes - 1))

    def weight_bytes(self) -> int:
        """Bytes of all stacked weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._like.values())

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name!r}, {self.n_probes} probes, {self.architecture}, {self.score_rule}, {self.dtype})"


def _path(tree: ConceptTree, concepts: Sequence[Mapping[str, Any]], probe: int) -> list[str]:
    return [concepts[i]["name"] for i in tree.path(probe)]


def check_recommended(recommended: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` (`UnknownSetting` for a typo) where what a pack recommends would be refused as settings."""
    try:
        CascadeConfig.of(recommended)
    except (ConfigError, ArithmeticError, TypeError) as error:
        kind = type(error) if isinstance(error, ConfigError) else ConfigError
        raise kind(f"{where}: what the pack recommends is refused as a setting, too: {str(error)[:300]}") from error


def no_thresholds(name: str, tensor: Tensor) -> int | None:
    """The first of some thresholds `[P]` that is none; None where all are."""
    outside = (tensor < 0) | (tensor > 1)
    if name == "expand_threshold":
        outside &= tensor != ALWAYS
    return int(outside.nonzero()[0, 0]) if bool(outside.any()) else None


def _largest(weights: Tensor) -> np.ndarray:
    """The largest absolute value of each probe `[n]` fp64; infinite or NaN where one is.

    Floats without their sign are ordered as their bits are, NaN last, and whole numbers are compared many times faster
    than a float that is half as wide as its register: this is done before a probe is first used, so it is a good part
    of a cold step.
    """
    if weights.dtype == torch.int8:
        return np.full(len(weights), 128.0)  # the most there can be, without looking
    kind, unsigned = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}[
        weights.element_size()
    ]
    bits = weights.reshape(len(weights), -1).view(kind).numpy()
    sign = np.array(1 << (8 * weights.element_size() - 1), unsigned)
    negative = bits.view(unsigned).max(axis=1)  # those without a sign are smaller; of those with one it is the largest
    largest = np.maximum(
        np.maximum(bits.max(axis=1), 0), np.where(negative & sign, negative ^ sign, 0).astype(bits.dtype)
    )
    return torch.from_numpy(largest).view(weights.dtype).to(torch.float64).numpy()


def _opened_again(kind: type[OpenedPack], directory: str, name: str, manifest: dict[str, Any]) -> OpenedPack:
    try:
        pack = kind.open(directory)
    except PackError as error:
        raise PackError(
            f"{name} was pickled as the pack in {directory}, and is opened from there again: {error}"
        ) from error
    if pack.manifest != manifest:
        raise PackError(
            f"{name} was pickled as the pack in {directory}, where another lies now: put back the one it was, or open"
            " this one and pickle it anew"
        )
    return pack
