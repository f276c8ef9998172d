"""Recipes of data: loaders, memory-mapped tokens, prefetching. Hosts read what was loaded, watched."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipe_rows.hosts import VOCABULARY, Watch, largest, make
from recipe_rows.rows import Found, Refused, recipe, refusal

BOTH = ("ltm", "mamba2")
LENGTH, N_WINDOWS, REST = 8, 5, 3
TOKENS = np.random.default_rng(0).integers(1, VOCABULARY, LENGTH * N_WINDOWS + REST).astype(np.uint16)


class Windows(Dataset[Tensor]):
    """Windows of a file of uint16 tokens, the last one shorter where `whole` is false."""

    def __init__(self, path: Path, *, whole: bool = True, broken: bool = False) -> None:
        self.path, self.whole, self.broken = path, whole, broken

    def __len__(self) -> int:
        n = self.path.stat().st_size // 2
        return n // LENGTH if self.whole else -(-n // LENGTH)

    def __getitem__(self, number: int) -> Tensor:
        if self.broken and number == 2:
            raise KeyError("planted")
        tokens = np.memmap(self.path, dtype=np.uint16, mode="r")
        return torch.from_numpy(tokens[number * LENGTH : (number + 1) * LENGTH].astype(np.int64))


def _read(kind: str, batches: Any) -> tuple[list[Tensor], float]:
    """What a loader gave, and how far what was watched while a host read it is from plain forwards."""
    model, given, seen = make(kind), [], 0.0
    for batch in batches:
        with torch.no_grad(), Watch(model) as watch:
            model(batch)
        seen = max(seen, watch.distance(batch, last=0))
        given.append(batch)
    return given, seen


def _file(folder: str) -> Path:
    path = Path(folder) / "tokens.bin"
    TOKENS.tofile(path)
    return path


def _array() -> Tensor:
    return torch.from_numpy(TOKENS[: LENGTH * N_WINDOWS].astype(np.int64)).reshape(N_WINDOWS, LENGTH)


@recipe(
    "data loader", "torch.utils.data.DataLoader",
    "samples that came not once, or in another order for the same seed", on=BOTH,
    trap="drop_last=True, as the guide has it: samples that never come", trap_least=1.0,
)  # fmt: skip
def loader(kind: str) -> Found:
    def once(drop_last: bool = False) -> list[Tensor]:
        return list(
            DataLoader(
                Windows(path), batch_size=2, shuffle=True, num_workers=1, prefetch_factor=2, persistent_workers=True,
                drop_last=drop_last, generator=torch.Generator().manual_seed(0),
            )
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        path = _file(folder)
        first, again, dropped = once(), once(), once(True)
        given, seen = _read(kind, first)
    came = sorted(map(tuple, torch.cat(given).tolist()))
    wrong = sum(a != b for a, b in zip(came, sorted(map(tuple, _array().tolist())), strict=True))
    wrong += sum(not torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return Found(float(wrong), seen, float(N_WINDOWS - sum(len(batch) for batch in dropped)))


@recipe(
    "memory-mapped tokens", "numpy.memmap", "tokens that are not those of the array", on=BOTH,
    trap="windows counted by len // L, as the guide has it: tokens at the end that are never read", trap_least=1.0,
)  # fmt: skip
def memmap(kind: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        whole, all_of_it = Windows(_file(folder)), Windows(_file(folder), whole=False)
        given, seen = _read(kind, [torch.stack([whole[i] for i in range(len(whole))])])
        n_all = sum(len(all_of_it[i]) for i in range(len(all_of_it)))
    return Found(largest(given[0], _array()), seen, float(n_all - given[0].numel()))


@recipe(
    "memory-mapped tokens, large vocabularies", "numpy.memmap",
    "token ids over 65,535 that come back as other ones, in uint32",
    on=("any",), trap="in uint16, as the guide has it", trap_least=1.0,
)  # fmt: skip
def large_ids(kind: str) -> Found:
    ids = np.array([5, 65_535, 65_536, 128_000])
    wrong = [int((ids.astype(dtype).astype(np.int64) != ids).sum()) for dtype in (np.uint32, np.uint16)]
    return Found(float(wrong[0]), None, float(wrong[1]))


@recipe("memory-mapped tables", "datasets (Arrow)", "tokens that are not those of the array", on=BOTH)
def arrow(kind: str) -> Found:
    import datasets

    with tempfile.TemporaryDirectory() as folder:
        datasets.Dataset.from_dict({"ids": _array().tolist()}).save_to_disk(folder)
        table = datasets.load_from_disk(folder).with_format("torch")
        if not table.cache_files:
            return Found(float("inf"))  # not mapped from a file
        given, seen = _read(kind, [table[:]["ids"]])
        del table
    return Found(largest(given[0], _array()), seen)


@recipe(
    "prefetching", "torch.utils.data.DataLoader", "batches that are missing or wrong once iteration has ended", on=BOTH
)
def prefetching(kind: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        batches = DataLoader(Windows(_file(folder)), batch_size=2, num_workers=1, prefetch_factor=2)
        given, seen = _read(kind, batches)
    return Found(largest(torch.cat(given), _array()) + abs(len(given) - 3), seen)


@recipe(
    "prefetching, an error of a worker", "torch.utils.data.DataLoader", "it reaches the reader", on=("any",), bound=None
)
def worker_error(kind: str) -> Refused:
    with tempfile.TemporaryDirectory() as folder, refusal(KeyError, "planted") as met:
        for _ in DataLoader(Windows(_file(folder), broken=True), num_workers=1, prefetch_factor=2):
            pass
    return met[0]
