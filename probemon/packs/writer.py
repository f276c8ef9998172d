"""Writes a pack probe by probe, so that it may exceed memory.

    about = {"host": {}, "licence": "CC0-1.0", "card": "# mine\n", "inputs": [{"site": "resid_post.15"}]}
    shape = {"architecture": Architecture(2560, (128, 64)), "dtype": torch.bfloat16, "score_rule": "independent"}
    with PackWriter(path, name="mine", concepts=concepts, **shape, **about) as writer:
        for i, probe in enumerate(probes):  # in any order, each once
            writer.put(i, {"w1": ..., "b1": ..., "w2": ..., "b2": ..., "w3": ..., "b3": ...})
    pack = ProbePack.of(writer.opened)

Disk space is reserved at the start. The directory appears whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from probemon.core.dtypes import code_of, input_dtype
from probemon.core.inputs import prepare_input
from probemon.core.probes import Architecture
from probemon.core.reference import logits_reference, scores_of_logits, sigmoid
from probemon.errors import PackCorrupt, PackError
from probemon.packs.files import check_target, replace_directory
from probemon.packs.manifest import CARD, CONCEPTS, MANIFEST, PROBES
from probemon.packs.opened import OpenedPack
from probemon.packs.spec import PackSpec
from probemon.packs.tensors import MATRICES
from probemon.util.files import sha256

_BLOCK_BYTES = 16 << 20


class PackWriter:
    """Put every probe once in the block; then `opened` is the pack.

    - `concepts`: dicts with `id`, `name`, `parents` (ids), `level` (all or none), any JSON
    - `score_rule`: `independent` or `path`
    - `inputs`: dicts of an InputSpec; `input_index [P]`: each probe's, by default the first
    - `softmax_group [P]`: -1 for none; members share parents, level and input
    - `alert_threshold`, `expand_threshold` `[P]`: NaN (default) if not calibrated
    - `aggregated`: alert thresholds `[P]` by `str()` of an aggregator
    - `alert_set`: name of `alert_threshold`; `alert_sets`: others `[P]` by name
    - `score_counts`: `[P, 128]` (`ScoreCounts`) by `str()` of an aggregator, or "each"
    - `familiar`: a `Familiar` per input, or None
    - `drift`: a `DriftReference` of all concepts
    - `golden_hidden [G, S, D]`: raw states at the sites of `inputs`
    - `recommended`: settings; `host`, `provenance`, `quality`: JSON dicts
    - `scope`: "here", or "so far", the default for recurrent states (`ssm_state.N`)

    `[P]` is in the order of `concepts`. `card`, `provenance` and `quality` may change during the block. Raises
    `PackError`, `HierarchyError`, `ConfigError`; a failure leaves no files and keeps an older pack.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, **spec: Any) -> None:
        self._target = check_target(path, overwrite)
        self._spec = PackSpec(**spec)
        self.card = self._spec.card
        self.provenance, self.quality = dict(self._spec.provenance or {}), dict(self._spec.quality or {})
        self._small = self._spec.small_tensors()
        self._golden = self._golden_inputs()
        self._ids, self._lines, self._manifest = self._spec.ids, self._spec.lines(), self._spec.manifest()
        self._n = len(self._ids)
        self._number = np.argsort(self._spec.order)  # concept i is probe number[i]
        self._shapes = _shapes(self._spec.architecture, self._spec.dtype)
        self._header, self._begins, self._size = self._layout()
        self._is_put = np.zeros(self._n, dtype=bool)
        self._folder: Path | None = None
        self._remove_folder: weakref.finalize[..., PackWriter] | None = None
        self._file: BinaryIO | None = None
        self._opened: OpenedPack | None = None

    @property
    def opened(self) -> OpenedPack:
        """Return the written pack, after the block."""
        if self._opened is None:
            raise PackError(f"{self._target} is not written yet: it is when the with block ends")
        return self._opened

    def __enter__(self) -> PackWriter:
        try:
            with self._writing():
                self._target.parent.mkdir(parents=True, exist_ok=True)
                # Registered before it exists, since a signal may arrive between any two steps.
                self._folder = self._target.parent / f".{self._target.name}-{secrets.token_hex(8)}"
                self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
                self._folder.mkdir(mode=0o700)
                self._file = (self._folder / PROBES).open("w+b")
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
        """Write the probe of concept `i`: `w1 [H1, D]`, ... See `put_slice`."""
        return self.put_slice(i, {key: tensor[None] for key, tensor in weights.items()})

    def put_slice(self, start: int, weights: Mapping[str, Tensor]) -> Tensor | None:
        """Write probes of concepts from `start` on: `w1 [n, H1, D]`, ..., matrices in the pack's dtype.

        Returns golden scores `[G, n]` fp32 if any, logits for softmax groups. Raises `PackError` for a probe that is
        repeated, not finite, or of another shape or dtype.
        """
        n = self._check_slice(start, weights)
        numbers = self._number[start : start + n]
        by_number = np.argsort(numbers)
        logits = torch.empty(len(self._golden[0]), n, dtype=torch.float32, device="cpu") if self._golden else None
        per_probe = sum(tensor[0].numel() * tensor.element_size() for tensor in weights.values()) if n else 1
        step = max(1, _BLOCK_BYTES // max(per_probe, 1))
        with self._writing():
            for first in range(0, n, step):
                indices = by_number[first : first + step]
                block = {key: weights[key].detach().cpu()[torch.from_numpy(indices)] for key in self._shapes}
                block = {key: tensor if key in MATRICES else tensor.to(torch.float32) for key, tensor in block.items()}
                self._check_finite(block, start + indices)
                for key, tensor in block.items():
                    self._write_rows(key, numbers[indices], tensor)
                if logits is not None:
                    logits[:, indices] = self._logits(block, numbers[indices])
        self._is_put[start : start + n] = True
        if logits is None:
            return None
        self._small["golden_scores"][:, numbers] = logits  # until all are known
        scores, alone = logits.clone(), torch.from_numpy(self._spec.tree.groups.of[numbers] < 0)
        scores[:, alone] = sigmoid(logits[:, alone].reshape(-1)).reshape(len(logits), -1)
        return scores

    def _check_slice(self, start: int, weights: Mapping[str, Tensor]) -> int:
        shape, pack_shape = Architecture.of(weights, "weights"), self._spec.architecture
        n, dtype = len(weights["w1"]), weights["w1"].dtype
        if shape != pack_shape or dtype != self._spec.dtype:
            raise PackError(
                f"weights are {shape} over {shape.hidden_size} values in {dtype}, the pack's {pack_shape} over"
                f" {pack_shape.hidden_size} in {self._spec.dtype}: widen or convert them first"
            )
        if not 0 <= start <= start + n <= self._n:
            raise PackError(f"probes {start}..{start + n - 1} of {self._n}: there is a concept for each")
        twice = np.flatnonzero(self._is_put[start : start + n])
        if len(twice):
            raise PackError(f"the probe of {self._ids[start + int(twice[0])]!r} is put twice")
        return n

    def _check_finite(self, block: Mapping[str, Tensor], concepts: np.ndarray) -> None:
        for key, tensor in block.items():
            # The sum is not finite if a term is not, or on overflow: then check each.
            if tensor.dtype == torch.int8 or bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
                continue
            finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
            if not bool(finite.all()):
                wrong = int((~finite).nonzero()[0])
                raise PackCorrupt(
                    f"{key} of concept {self._ids[int(concepts[wrong])]!r} is not finite: its training diverged. Train"
                    " it again, or leave it out"
                )

    def _write_rows(self, key: str, numbers: np.ndarray, tensor: Tensor) -> None:
        """Write rows of a parameter, neighbours together."""
        assert self._file is not None
        row_bytes = tensor[0].numel() * tensor.element_size()
        raw = _bytes_of(tensor)
        bounds = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for first, stop in itertools.pairwise(bounds):
            self._file.seek(self._begins[key] + int(numbers[first]) * row_bytes)
            self._file.write(raw[first * row_bytes : stop * row_bytes])

    def _golden_inputs(self) -> list[Tensor]:
        """Return the golden states `[G, D]` by input."""
        golden, specs = self._small.get("golden_hidden"), self._spec.input_specs
        if golden is None:
            return []
        sites = list(dict.fromkeys(spec.site for spec in specs))
        dtype = input_dtype(self._spec.dtype)
        return [prepare_input(golden[:, sites.index(spec.site)], spec, dtype) for spec in specs]

    def _logits(self, block: Mapping[str, Tensor], numbers: np.ndarray) -> Tensor:
        """Return logits `[G, n]` by the reference kernel, a state at a time, as it gathers weights."""
        inputs = self._small["input"][torch.from_numpy(numbers)]
        logits = torch.empty(len(self._golden[0]), len(numbers), dtype=torch.float32, device="cpu")
        for i, states in enumerate(self._golden):
            slots = (inputs == i).nonzero()[:, 0]
            for row in range(len(states) if len(slots) else 0):
                logits[row, slots] = logits_reference(states, block, torch.full_like(slots, row), slots)
        return logits

    def _layout(self) -> tuple[bytes, dict[str, int], int]:
        """Return header, tensor offsets and file size; larger dtypes first, for alignment."""
        described = {
            key: (self._spec.dtype if key in MATRICES else torch.float32, (self._n, *shape))
            for key, shape in self._shapes.items()
        }
        described |= {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in self._small.items()}
        offset, entries, offsets = 0, {}, {}
        for key, (dtype, shape) in sorted(described.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            offsets[key] = offset
            end = offset + math.prod(shape) * dtype.itemsize
            entries[key] = {"dtype": code_of(dtype), "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return header, {key: len(header) + begin for key, begin in offsets.items()}, len(header) + offset

    def _finish(self) -> None:
        assert self._file is not None and self._folder is not None
        missing = np.flatnonzero(~self._is_put)
        if len(missing):
            names = ", ".join(repr(self._ids[i]) for i in missing[:5].tolist())
            raise PackError(
                f"{len(missing)} of {self._n} probes were not put ({names}{', ...' if len(missing) > 5 else ''}): put"
                " each once"
            )
        if self._golden:
            self._small["golden_scores"] = self._golden_scores()
        manifest = {**self._manifest, "provenance": self.provenance, "quality": self.quality}
        concepts = b"".join(_json(f"concept {line['id']!r}", line) for line in self._lines)
        with self._writing():
            for key, tensor in self._small.items():
                self._file.seek(self._begins[key])
                self._file.write(_bytes_of(tensor))
            self._file.close()
            (self._folder / PROBES).chmod(0o644)
            (self._folder / CARD).write_text(self.card, encoding="utf-8", errors="replace")
            (self._folder / CONCEPTS).write_bytes(concepts)
            manifest["files"] = {
                file: {"sha256": sha256(self._folder / file), "size": (self._folder / file).stat().st_size}
                for file in (CONCEPTS, PROBES, CARD)
            }
            (self._folder / MANIFEST).write_bytes(_json("the manifest", manifest, indent=1))
            self._folder.chmod(0o755)  # private until now
            # Not verified: weights were checked, and golden scores are theirs.
            pack = OpenedPack.open(self._folder)
            replace_directory(self._folder, self._target)
        pack.set_directory(self._target)  # even if another writer replaced it
        self._opened = pack

    def _golden_scores(self) -> Tensor:
        """Return golden scores `[G, P]`. Raises `PackCorrupt` if one is not finite."""
        scores = torch.from_numpy(
            scores_of_logits(self._small["golden_scores"], self._spec.tree, self._spec.score_rule)
        )
        unscored = (~torch.isfinite(scores)).any(dim=0).nonzero()[:, 0].tolist()
        if unscored:
            raise PackCorrupt(
                f"{self._lines[unscored[0]]['id']!r} does not score a number on the golden states: its weights are"
                " too large. Train it again, or leave it out"
            )
        return scores

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._remove_folder is not None:
            self._remove_folder()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise file system errors as `PackError`."""
        try:
            yield
        except OSError as error:
            raise PackError(
                f"{self._target} cannot be written ({error.strerror}: {error.filename or self._folder}): make room, or"
                " choose another path"
            ) from error


def _shapes(architecture: Architecture, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Return a probe's parameter shapes."""
    widths = (architecture.hidden_size, *(architecture.hidden or (1,)))
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (inner, outer) in enumerate(itertools.pairwise(widths), start=1):
        shapes |= {f"w{i}": (outer, inner), f"b{i}": (outer,)}
    if architecture.hidden:
        shapes |= {"w3": (architecture.hidden[-1],), "b3": ()}
    if dtype == torch.int8:
        shapes |= {f"{key}_scale": shape[:-1] for key, shape in shapes.items() if key in MATRICES}
    return shapes


def _json(what: str, value: object, indent: int | None = None) -> bytes:
    """Return JSON lines. Raises `PackError`."""
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
    # A copy: with one element, torch calls any stride contiguous but refuses the view.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    raw: Any = flat.copy_(tensor.reshape(-1)).view(torch.uint8).numpy()
    return memoryview(raw)
