"""Write a pack probe by probe: the weights go to their place on disk as they come, and are never held together.

    about = {"host": {}, "licence": "CC0-1.0", "card": "# mine\n", "inputs": [{"site": "resid_post.15"}]}
    shape = {"architecture": Architecture(2560, (128, 64)), "dtype": torch.bfloat16, "score_rule": "independent"}
    with PackWriter(path, name="mine", concepts=concepts, **shape, **about) as writer:
        for i, probe in enumerate(probes):  # in any order, each once
            writer.put(i, {"w1": ..., "b1": ..., "w2": ..., "b2": ..., "w3": ..., "b3": ...})
    pack = ProbePack.of(writer.opened)

In memory are: what was put last (once more while it is written, in blocks of 16 MiB), the concepts, a few numbers a
probe and the golden states. The file has its full size from the beginning, so that a disk that is too small says so
before any work is done. The directory appears whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from probemon.core.checks import (
    check_bool,
    check_choice,
    check_mapping,
    check_mappings,
    check_path,
    check_tensor,
    check_text,
)
from probemon.core.files import sha256
from probemon.core.hierarchy import ConceptTree
from probemon.core.inputs import prepare_input
from probemon.core.probes import Architecture, InputSpec, input_dtype
from probemon.core.reference import score_reference
from probemon.errors import ConfigError, PackCorrupt, PackError
from probemon.packs import files as packfile
from probemon.packs.manifest import (
    CARD,
    CONCEPTS,
    CONTROL,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    PROBES,
    SCORE_RULES,
    check_recommended,
)
from probemon.packs.opened import OpenedPack
from probemon.packs.tensors import AGGREGATED, DTYPES, MATRICES, THRESHOLDS, first_wrong_threshold, name_of

_BLOCK_BYTES = 16 << 20
_CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.int64: "I64",
}  # of safetensors


def check_target(path: str | Path, overwrite: bool) -> Path:
    """The path, where a pack may be written to it. Raises `PackError` where something is there already, and with
    `overwrite` where it is more than a pack.
    """
    target = check_path("path", path)
    overwrite = check_bool("overwrite", overwrite)
    if os.path.lexists(target):
        if not overwrite:
            raise PackError(f"{target} exists: choose another path, or overwrite it (overwrite=True, --overwrite)")
        packfile.check_replaceable(target)
    return target


class PackWriter:
    """A pack in the making: enter it, put every probe once, leave it; then `opened` is the pack.

    `concepts`: dicts with `id`, `name`, `parents` (ids), optionally `level` (on all or none; it need not grow along
    edges), and anything else JSON. What is `[P]` is in their order: `input_index`, `alert_threshold`,
    `expand_threshold`, and `aggregated` (alert thresholds by `str()` of an aggregator). `golden_hidden [G, S, D]`: raw
    states at the distinct sites of `inputs`, whose scores are kept. `card`, `provenance` and `quality` are attributes
    that may change until the block ends. Raises `PackError`, `HierarchyError` or `ConfigError`; where the block or the
    writing fails, nothing is left on disk and an older pack stays.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str,
        concepts: Sequence[Mapping[str, Any]],
        architecture: Architecture,
        dtype: torch.dtype,
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
    ) -> None:
        self._target = check_target(path, overwrite)
        check_choice("score_rule", score_rule, SCORE_RULES)
        for key, text in (("licence", licence), ("card", card)):
            check_text(key, text, PackError)
        check_mapping("host", host, PackError)
        for key, mapping in (
            ("aggregated", aggregated),
            ("recommended", recommended),
            ("provenance", provenance),
            ("quality", quality),
        ):
            if mapping is not None:
                check_mapping(key, mapping, PackError)
        for key, mappings in (("concepts", concepts), ("inputs", inputs)):
            check_mappings(key, mappings, PackError)
        if golden_hidden is not None:
            check_tensor("golden_hidden", golden_hidden, error=PackError)
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype {dtype}: a pack's weights are one of {', '.join(DTYPES)}")
        for concept in concepts:
            missing = [key for key in ("id", "name", "parents") if key not in concept]
            if missing:
                raise PackError(f"concept {concept.get('id', concept)!r} lacks {', '.join(missing)}")
        for what, text in [
            ("the pack's name", name),
            *((f"a concept's {key}", concept[key]) for concept in concepts for key in ("id", "name")),
        ]:
            if not isinstance(text, str) or CONTROL.search(text):
                raise PackError(
                    f"{what} is {ascii(text)[:100]}: give a text without control characters, on which a terminal"
                    " would act"
                )
        n = self._n = len(concepts)
        if not n or not architecture.hidden_size or 0 in architecture.hidden:
            raise PackError(
                f"{n} concepts, whose probes read {architecture.hidden_size} values with layers of"
                f" {list(architecture.hidden)}: a pack has one probe or more, and none is empty"
            )
        stated = [concept["level"] for concept in concepts if "level" in concept]
        if stated and len(stated) != n:
            raise PackError(f"{len(stated)} of {n} concepts state a level: state it on all or on none")
        self._ids = [concept["id"] for concept in concepts]
        order, tree = ConceptTree.build(self._ids, [concept["parents"] for concept in concepts], stated or None)
        self._tree, self._number = tree, np.argsort(order)  # the place of concept i in the pack
        self._specs = [InputSpec(**spec) for spec in inputs]
        self._architecture, self._dtype, self._score_rule = architecture, dtype, score_rule
        self.card, self.provenance, self.quality = card, dict(provenance or {}), dict(quality or {})
        per_probe = {
            "input_index": input_index,
            "alert_threshold": alert_threshold,
            "expand_threshold": expand_threshold,
        }
        given = {key: tensor for key, tensor in per_probe.items() if tensor is not None}
        for key, tensor in {
            **given,
            **{f"aggregated[{key!r}]": tensor for key, tensor in (aggregated or {}).items()},
        }.items():
            check_tensor(key, tensor, (n,), PackError)
        at = torch.from_numpy(order)
        nan = torch.full((n,), math.nan, dtype=torch.float32, device="cpu")
        self._small = {
            "child_ptr": torch.from_numpy(tree.child_ptr),
            "child_idx": torch.from_numpy(tree.child_idx),
            "level": torch.from_numpy(tree.level),
            "input": (
                torch.zeros(n, dtype=torch.int64, device="cpu")
                if input_index is None
                else input_index.to(torch.int64)[at]
            ),
            "alert_threshold": nan.clone() if alert_threshold is None else alert_threshold.to(torch.float32)[at],
            "expand_threshold": nan.clone() if expand_threshold is None else expand_threshold.to(torch.float32)[at],
        }
        self._small |= {
            AGGREGATED + str(key): thresholds.to(torch.float32)[at] for key, thresholds in (aggregated or {}).items()
        }
        for key in self._small:
            bad = first_wrong_threshold(key, self._small[key]) if "threshold" in key else None
            if bad is not None:
                raise PackError(
                    f"the {key} of concept {self._ids[int(order[bad])]!r} is {float(self._small[key][bad]):g}:"
                    f" {THRESHOLDS}"
                )
        check_recommended(recommended or {}, f"{name!r:.100}")
        if not (int(self._small["input"].min()) >= 0 and int(self._small["input"].max()) < len(self._specs)):
            raise PackError(
                f"input_index must lie in 0..{len(self._specs) - 1}: it says which of the inputs a probe reads"
            )
        self._golden: list[Tensor] = []  # prepared, `[G, D]` for each input
        if golden_hidden is not None:
            golden = golden_hidden.to(torch.float32).contiguous()
            sites = list(dict.fromkeys(spec.site for spec in self._specs))
            if golden.dim() != 3 or tuple(golden.shape[1:]) != (len(sites), architecture.hidden_size):
                raise PackError(
                    f"golden_hidden has shape {tuple(golden.shape)}, expected (G, {len(sites)},"
                    f" {architecture.hidden_size}): G states at each site"
                )
            self._golden = [
                prepare_input(golden[:, sites.index(spec.site)], spec, input_dtype(dtype)) for spec in self._specs
            ]
            self._small |= {
                "golden_hidden": golden,
                "golden_scores": torch.zeros(len(golden), n, dtype=torch.float32, device="cpu"),
            }
        self._lines = _concept_lines(concepts, order, tree)
        self._manifest: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": name,
            "licence": licence,
            "host": dict(host),
            "inputs": [spec.as_dict() for spec in self._specs],
            "score_rule": score_rule,
            "recommended": dict(recommended or {}),
            "architecture": architecture.as_dict(),
            "dtype": name_of(dtype),
            "counts_per_level": {
                str(int(v)): int(c) for v, c in zip(*np.unique(tree.level, return_counts=True), strict=True)
            },
        }
        self._shapes = _shapes(architecture, dtype)
        self._header, self._begins, self._size = self._layout()
        self._put = np.zeros(n, dtype=bool)
        self._made: Path | None = None
        self._tidy: weakref.finalize[..., PackWriter] | None = None
        self._file: BinaryIO | None = None
        self._opened: OpenedPack | None = None

    @property
    def opened(self) -> OpenedPack:
        """The pack that was written, once the block has been left. `ProbePack.of` gives it the rest of its methods."""
        if self._opened is None:
            raise PackError(f"{self._target} is not written yet: it is when the with block ends")
        return self._opened

    def __enter__(self) -> PackWriter:
        try:
            with self._writing():
                self._target.parent.mkdir(parents=True, exist_ok=True)
                # Named before it is there, and taken away at the latest when the program ends: a signal may come
                # between any two steps, in __exit__ too.
                self._made = self._target.parent / f".{self._target.name}-{secrets.token_hex(8)}"
                self._tidy = weakref.finalize(self, shutil.rmtree, self._made, ignore_errors=True)
                self._made.mkdir(mode=0o700)
                self._file = (self._made / PROBES).open("w+b")
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file.fileno(), 0, self._size)
                self._file.write(self._header)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._discard()

    def put(self, i: int, weights: Mapping[str, Tensor]) -> Tensor | None:
        """Write the probe of concept `i`: `w1 [H1, D]`, `b1 [H1]` and so on. See `put_slice`."""
        return self.put_slice(i, {key: tensor[None] for key, tensor in weights.items()})

    def put_slice(self, start: int, weights: Mapping[str, Tensor]) -> Tensor | None:
        """Write the probes of some concepts, from `start` on: `w1 [n, H1, D]`, `b1 [n, H1]` and so on, matrices in the
        pack's dtype.

        Their own scores `[G, n]` fp32 of the golden states, where there are any. Raises `PackError` for a probe that
        was put before, is not finite, or has another shape or dtype than the pack.
        """
        found = Architecture.of(weights, "weights")
        n = len(weights["w1"])
        if found != self._architecture or weights["w1"].dtype != self._dtype:
            raise PackError(
                f"weights are {found} over {found.hidden_size} values in {weights['w1'].dtype}, the pack's"
                f" {self._architecture} over {self._architecture.hidden_size} in {self._dtype}: widen or convert them"
                " first"
            )
        if not 0 <= start <= start + n <= self._n:
            raise PackError(f"probes {start}..{start + n - 1} of {self._n}: there is a concept for each")
        twice = np.flatnonzero(self._put[start : start + n])
        if len(twice):
            raise PackError(f"the probe of {self._ids[start + int(twice[0])]!r} is put twice")
        numbers = self._number[start : start + n]
        by_number = np.argsort(numbers)
        scores = torch.empty(len(self._golden[0]), n, dtype=torch.float32, device="cpu") if self._golden else None
        per_probe = sum(tensor[0].numel() * tensor.element_size() for tensor in weights.values()) if n else 1
        step = max(1, _BLOCK_BYTES // max(per_probe, 1))
        with self._writing():
            for first in range(0, n, step):
                which = by_number[first : first + step]
                block = {key: weights[key].detach().cpu()[torch.from_numpy(which)] for key in self._shapes}
                block = {key: tensor if key in MATRICES else tensor.to(torch.float32) for key, tensor in block.items()}
                self._check_finite(block, start + which)
                for key, tensor in block.items():
                    self._write_rows(key, numbers[which], tensor)
                if scores is not None:
                    scores[:, which] = self._score(block, numbers[which])
        if scores is not None:
            self._small["golden_scores"][:, numbers] = scores
        self._put[start : start + n] = True
        return scores

    def _check_finite(self, block: Mapping[str, Tensor], concepts: np.ndarray) -> None:
        for key, tensor in block.items():
            # A sum is finite where its terms are, unless finite terms overflow: only then look at each.
            if tensor.dtype == torch.int8 or bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
                continue
            finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
            if not bool(finite.all()):
                bad = int((~finite).nonzero()[0])
                raise PackCorrupt(
                    f"{key} of concept {self._ids[int(concepts[bad])]!r} is not finite: its training diverged. Train it"
                    " again, or leave it out"
                )

    def _write_rows(self, key: str, numbers: np.ndarray, tensor: Tensor) -> None:
        """Rows of a parameter to their places: those side by side in one go."""
        assert self._file is not None
        row_bytes = tensor[0].numel() * tensor.element_size()
        raw = _bytes_of(tensor)
        bounds = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for a, b in itertools.pairwise(bounds):
            self._file.seek(self._begins[key] + int(numbers[a]) * row_bytes)
            self._file.write(raw[a * row_bytes : b * row_bytes])

    def _score(self, block: Mapping[str, Tensor], numbers: np.ndarray) -> Tensor:
        """Own scores `[G, n]` of the golden states by the reference kernel, which gathers weights: one state at
        a time.
        """
        inputs = self._small["input"][torch.from_numpy(numbers)]
        scores = torch.empty(len(self._golden[0]), len(numbers), dtype=torch.float32, device="cpu")
        for i, states in enumerate(self._golden):
            slots = (inputs == i).nonzero()[:, 0]
            for row in range(len(states) if len(slots) else 0):
                scores[row, slots] = score_reference(states, block, torch.full_like(slots, row), slots)
        return scores

    def _layout(self) -> tuple[bytes, dict[str, int], int]:
        """Header of the safetensors file, where each tensor begins, and the size of the file. Larger items first, so
        that all are aligned.
        """
        described = {
            key: (self._dtype if key in MATRICES else torch.float32, (self._n, *shape))
            for key, shape in self._shapes.items()
        }
        described |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in self._small.items()}
        offset, entries, offsets = 0, {}, {}
        for key, (dtype, shape) in sorted(described.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            offsets[key] = offset
            end = offset + math.prod(shape) * dtype.itemsize
            entries[key] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return header, {key: len(header) + begin for key, begin in offsets.items()}, len(header) + offset

    def _finish(self) -> None:
        assert self._file is not None and self._made is not None
        missing = np.flatnonzero(~self._put)
        if len(missing):
            names = ", ".join(repr(self._ids[i]) for i in missing[:5].tolist())
            raise PackError(
                f"{len(missing)} of {self._n} probes were not put ({names}{', ...' if len(missing) > 5 else ''}): put"
                " each once"
            )
        if self._golden:
            scores = self._small["golden_scores"]
            unscored = (~torch.isfinite(scores)).any(dim=0).nonzero()[:, 0].tolist()
            if unscored:
                raise PackCorrupt(
                    f"{self._lines[unscored[0]]['id']!r} does not score a number on the golden states: its weights are"
                    " too large. Train it again, or leave it out"
                )
            if self._score_rule == "path":
                self._small["golden_scores"] = torch.from_numpy(self._tree.times_best_parent(scores.numpy()))
        manifest = {**self._manifest, "provenance": self.provenance, "quality": self.quality}
        concepts = b"".join(_json(f"concept {line['id']!r}", line) for line in self._lines)
        with self._writing():
            for key, tensor in self._small.items():
                self._file.seek(self._begins[key])
                self._file.write(_bytes_of(tensor))
            self._file.close()
            (self._made / PROBES).chmod(0o644)
            (self._made / CARD).write_text(self.card, encoding="utf-8", errors="replace")
            (self._made / CONCEPTS).write_bytes(concepts)
            manifest["files"] = {
                file: {"sha256": sha256(self._made / file), "size": (self._made / file).stat().st_size}
                for file in (CONCEPTS, PROBES, CARD)
            }
            (self._made / MANIFEST).write_bytes(_json("the manifest", manifest, indent=1))
            self._made.chmod(0o755)  # private until now
            pack = OpenedPack.open(self._made)  # every weight was looked at, and the golden scores are of these weights
            packfile.replace_directory(self._made, self._target)
        pack.set_directory(self._target)  # what was written, whatever another writer puts there
        self._opened = pack

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tidy is not None:
            self._tidy()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What a file system raises is one error that names the pack."""
        try:
            yield
        except OSError as error:
            raise PackError(
                f"{self._target} cannot be written ({error.strerror}: {error.filename or self._made}): make room, or"
                " choose another path"
            ) from error


def _shapes(architecture: Architecture, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of one probe."""
    widths = (architecture.hidden_size, *(architecture.hidden or (1,)))
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (inner, outer) in enumerate(itertools.pairwise(widths), start=1):
        shapes |= {f"w{i}": (outer, inner), f"b{i}": (outer,)}
    if architecture.hidden:
        shapes |= {"w3": (architecture.hidden[-1],), "b3": ()}
    if dtype == torch.int8:
        shapes |= {f"{key}_scale": shape[:-1] for key, shape in shapes.items() if key in MATRICES}
    return shapes


def _concept_lines(concepts: Sequence[Mapping[str, Any]], order: np.ndarray, tree: ConceptTree) -> list[dict[str, Any]]:
    lines = []
    for i, old in enumerate(order.tolist()):
        fields = dict(concepts[old])
        head = {key: fields.pop(key) for key in ("id", "name")}
        fields.pop("level", None)
        lines.append({**head, "level": int(tree.level[i]), "parents": list(fields.pop("parents")), **fields})
    return lines


def _json(what: str, value: object, indent: int | None = None) -> bytes:
    """A line (or lines) of JSON. Raises `PackError` for what JSON or UTF-8 cannot say."""
    try:
        return (json.dumps(value, ensure_ascii=False, indent=indent) + "\n").encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise PackError(
            f"{what} cannot be written as JSON in UTF-8 ({str(error)[:200]}): give numbers, texts, lists and dicts of"
            " these"
        ) from error


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    flat = torch.empty(
        tensor.numel(), dtype=tensor.dtype, device="cpu"
    )  # of one value alone, torch calls any stride contiguous, and will not view it
    raw: Any = flat.copy_(tensor.reshape(-1)).view(torch.uint8).numpy()
    return memoryview(raw)
