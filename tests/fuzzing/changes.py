"""Packs that somebody writes to while they are opened or used: what comes of it is one pack, whole, with the scores
that it had, or a typed error.

    TARGETS["opened"]               # changed at any moment of being opened: between any two calls of the system
    TARGETS["used"]  # changed between opening, making a manager, its steps, and what makes packs of packs

A change is one of those that users make: a file is cut, overwritten with other bytes of the same size, copied over by
`cp`, or replaced by another one; a whole pack is copied over or replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fuzzing import independent, seeds
from fuzzing.mutate import Tree
from fuzzing.target import Call, Target, Wrong
from probemon.errors import ConfigError, ProbemonError
from probemon.packs import files as packfile
from probemon.packs import held_file as heldfile
from probemon.packs import held_tensors as heldtensors
from probemon.packs.edit import merge, rename, subset
from probemon.packs.pack import ProbePack
from probemon.packs.quantize import quantize

PROBES = "probes.safetensors"
_WAYS = 5  # of making a pack of a pack
_PAGED_BYTES = 1000  # room for few of the probes
_CALLS = ("open", "stat", "fstat", "preadv", "listdir")
Change = Callable[[Path, Path], None]


def cut(pack: Path, other: Path) -> None:
    """The weights have no bytes any more."""
    os.truncate(pack / PROBES, 0)


def halve(pack: Path, other: Path) -> None:
    """The weights have half of their bytes."""
    os.truncate(pack / PROBES, (pack / PROBES).stat().st_size // 2)


def spoil(pack: Path, other: Path) -> None:
    """Other bytes in the place of the weights, their number and the header as before."""
    with (pack / PROBES).open("r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        file.seek(begin)
        n = (pack / PROBES).stat().st_size - begin
        file.write(Random(n).randbytes(n))


def copy_over(pack: Path, other: Path) -> None:
    """As `cp -r other/* pack/`: the same files, with other contents."""
    for path in sorted(other.iterdir()):
        with path.open("rb") as source, (pack / path.name).open("wb") as target:
            shutil.copyfileobj(source, target)


def copy_weights(pack: Path, other: Path) -> None:
    """As `cp other/probes.safetensors pack/`."""
    with (other / PROBES).open("rb") as source, (pack / PROBES).open("wb") as target:
        shutil.copyfileobj(source, target)


def exchange_weights(pack: Path, other: Path) -> None:
    """Another file of that name, the older one is gone."""
    shutil.copyfile(other / PROBES, pack / "new")
    os.replace(pack / "new", pack / PROBES)


def replace(pack: Path, other: Path) -> None:
    """As every pack is replaced by who writes one."""
    made = pack.parent / ".made"
    shutil.copytree(other, made)
    packfile.replace_directory(made, pack)


def replace_in_two_steps(pack: Path, other: Path) -> None:
    """The same where names cannot be exchanged."""
    with mock.patch.object(packfile, "_rename", None):
        replace(pack, other)


def exchange_all(pack: Path, other: Path) -> None:
    """File by file, each renamed over the older one."""
    for path in sorted(other.iterdir()):
        shutil.copyfile(path, pack / "new")
        os.replace(pack / "new", pack / path.name)


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        cut,
        halve,
        spoil,
        copy_over,
        copy_weights,
        exchange_weights,
        replace,
        replace_in_two_steps,
        exchange_all,
    )
}
# After these the folder is the other pack, whole. (After the others it is none, which is noticed of weights that are
# read into memory, and hashed, alone.)
WHOLE = ("copy_over", "replace", "replace_in_two_steps", "exchange_all")
KEPT = (
    "exchange_weights",
    "replace",
    "replace_in_two_steps",
    "exchange_all",
)  # nobody writes to a file that was opened before


def pairs(room: Path) -> list[Tree]:
    """Two packs of equal sizes that differ in weights and sites, `a` and `b`."""
    trees = []
    for kind, (first, second) in enumerate(zip(seeds.packs(room / "a"), seeds.packs(room / "b", 100), strict=True)):
        trees.append(
            {f"{name}/{file}": data for name, tree in (("a", first), ("b", second)) for file, data in tree.items()}
        )
        if len(first[PROBES]) != len(second[PROBES]) or first[PROBES] == second[PROBES]:
            raise RuntimeError(f"the packs of kind {kind} are no two packs of one size")
    pack = ProbePack.open(room / "a" / "linear")
    _scores(_manager(pack, False), dict.fromkeys(pack.sites, torch.zeros(1, seeds.D)))
    for way in range(_WAYS):  # what is imported when it is first used is not the doing of a case
        _make(pack, room / "a" / "linear", room / "made" / f"{way}", way)
    return trees


def aged(source: Path, target: Path) -> Path:
    """A copy whose files are not of this very moment: the clock of a file system stands still for some milliseconds."""
    shutil.copytree(source, target)
    for path in target.iterdir():
        os.utime(path, (1e9, 1e9))
    return target


@contextmanager
def size_in_memory(n_bytes: int) -> Iterator[None]:
    """Packs of more bytes than that are mapped."""
    with mock.patch.object(heldtensors, "IN_MEMORY_BYTES", n_bytes):
        yield


class System:
    """`os` for `probemon.packs.held_file`, which does something before one of its calls; then it is `done`."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self._left, self._action, self.done = at, action, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in _CALLS:
            return found

        def called(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                self.done = True
                self._action()
            return found(*arguments, **named)

        return called


# -- changed while it is opened ------------------------------------------------------------------


def _open(call: Call) -> ProbePack:
    rng = call.rng
    mapped = rng.random() < 0.5
    change = CHANGES[rng.choice(WHOLE if mapped else tuple(CHANGES))]
    place = call.out.parent / "use"
    pack = aged(call.source / "a", place / "pack")
    try:
        with (
            size_in_memory(0 if mapped else 1 << 20),
            mock.patch.object(heldfile, "os", System(rng.randrange(70), lambda: change(pack, call.source / "b"))),
        ):
            opened = ProbePack.open(pack, verify=rng.random() < 0.2)
            opened.weights  # noqa: B018 (read now)
        for name in opened.weights if mapped else ():
            opened._weights[name] = opened.weights[name].clone()  # the files are taken away now
        return opened
    finally:
        shutil.rmtree(place)


def judge_one(pack: Any, sources: list[Path]) -> Path:
    """Which of some packs it is; raises `Wrong` where its parts are not of one."""
    texts = [json.loads((source / "manifest.json").read_bytes()) for source in sources]
    which = next((i for i, text in enumerate(texts) if text == pack.manifest), None)
    if which is None:
        raise Wrong("the manifest is of no pack")
    tensors, _ = independent.safetensors((sources[which] / PROBES).read_bytes())
    held = {
        **pack._weights,
        "alert_threshold": pack.alert_threshold,
        "input": pack.input_index,
        "level": torch.from_numpy(np.asarray(pack.tree.level)),
    }
    for name, tensor in held.items():
        if not np.array_equal(tensor.double().numpy(), tensors[name], equal_nan=True):
            raise Wrong(f"a mixture: the manifest is that of {sources[which].name}, {name} is not")
    lines = [json.loads(line)["definition"] for line in (sources[which] / "concepts.jsonl").read_text().splitlines()]
    if [concept["definition"] for concept in pack.concepts] != lines:
        raise Wrong(f"a mixture: the manifest is that of {sources[which].name}, the concepts are not")
    return sources[which]


# -- changed while it is used --------------------------------------------------------------------


def _scores(manager: Any, hidden: dict[str, Tensor]) -> list[Tensor]:
    """What a step of each state says: scores of the active probes."""
    return [
        torch.from_numpy(manager.score_tokens({site: x[i : i + 1] for site, x in hidden.items()}).values.copy())
        for i in range(len(next(iter(hidden.values()))))
    ]


def _manager(pack: ProbePack, paged: bool) -> Any:
    from probemon.manager import DynamicProbeManager

    settings: dict[str, Any] = {"impl": "cpu", "strategy": "descent", "load_threshold": -1.0, "base_layers": [0]}
    return DynamicProbeManager(pack, **settings, **({"arena_bytes": _PAGED_BYTES, "cache_bytes": 0} if paged else {}))


def _use(call: Call) -> str:
    """Does things with a pack, one of which is to change its files. A typed error, or all scores as they were: else
    raises `Wrong`.
    """
    rng, place = call.rng, call.out.parent / "use"
    mapped, paged, when, change = (
        rng.random() < 0.7,
        rng.random() < 0.4,
        rng.randrange(4),
        CHANGES[rng.choice(tuple(CHANGES))],
    )
    folder = aged(call.source / "a", place / "pack")
    try:
        with size_in_memory(0 if mapped else 1 << 20):
            pack = ProbePack.open(folder)
            g = torch.Generator().manual_seed(0)
            hidden = {site: torch.randn(3, pack.architecture.hidden_size, generator=g) for site in pack.sites}
            try:
                expected = _scores(_manager(ProbePack.open(call.source / "a"), paged), hidden)
            except ConfigError:  # too little room for what is always active
                paged, expected = False, _scores(_manager(ProbePack.open(call.source / "a"), False), hidden)
            if when == 0:
                change(folder, call.source / "b")
            manager = _manager(pack, paged)
            if when == 1:
                change(folder, call.source / "b")
            found = _scores(manager, hidden)
            if when == 2:
                change(folder, call.source / "b")
            found += _scores(manager, hidden)
            if not all(torch.equal(a, b) for a, b in zip(found, expected * 2, strict=True)):
                raise Wrong(f"{change.__name__}: scores are others, and nothing is said")
            if when == 3:
                change(folder, call.source / "b")
            _make(pack, call.source / "a", place / "made", rng.randrange(_WAYS))
            return change.__name__
    finally:
        shutil.rmtree(place)


def _make(pack: ProbePack, source: Path, out: Path, way: int) -> None:
    """Another pack of it: of its weights as they were, which still are in `source`."""
    try:
        match way:
            case 0:
                made = rename(pack, out, name="new")
            case 1:
                made = subset(pack, out, ["c0", "c1", "c3"])
            case 2:
                made = merge({"a": pack, "b": pack}, out, name="both")
            case 3:
                made = pack.save_pretrained(out)
            case _:
                made = quantize(pack, out)
    except ProbemonError:
        if os.path.lexists(out) or any(name.startswith(f".{out.name}") for name in os.listdir(out.parent)):
            raise Wrong("half a pack was left") from None
        raise
    tensors, _ = independent.safetensors((source / PROBES).read_bytes())
    numbers = [pack.find(concept["id"].removeprefix("a:").removeprefix("b:")) for concept in made.concepts]
    for name in ("b1", "b3"):  # which no edit rounds
        if name in tensors and not np.array_equal(made.weights[name].double().numpy(), tensors[name][numbers]):
            raise Wrong(f"{name} of what was made of the pack is not the pack's")


def _judge_open(pack: Any, call: Call) -> None:
    judge_one(pack, [call.source / "a", call.source / "b"])


TARGETS: dict[str, Target] = {
    "opened": Target(pairs, _open, _judge_open, breaks=False, folders=False),
    "used": Target(pairs, _use, lambda made, call: None, breaks=False, folders=False),
}
