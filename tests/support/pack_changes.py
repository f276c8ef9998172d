"""Run in a process of its own by test_pack_changes.py, since what it tries may end a process: packs that are changed
while they are used, and that several write at once.

# a line of JSON: {"used": [[mode, change, when, what came of it], ...], "together": [...]}
python tests/support/pack_changes.py FOLDER
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch

from conftest import HIDDEN, make_model, make_pack
from fuzzing.changes import CHANGES, aged, size_in_memory
from probemon import DynamicProbeManager, ProbePack
from probemon.errors import ProbemonError
from probemon.packs import files as packfile

MODES = {  # settings, and how large a pack may be to be read into memory
    "small": ({"impl": "numba"}, 1 << 20), "mapped": ({"impl": "numba"}, 0), "mapped, by torch": ({"impl": "cpu"}, 0),
    "paged": ({"impl": "cpu", "arena_bytes": 6000, "cache_bytes": 0}, 0),
    "small, paged": ({"impl": "cpu", "arena_bytes": 6000, "cache_bytes": 0}, 1 << 20),
}  # fmt: skip
WHEN = ("before the manager", "before the first step", "between steps")


def steps(manager, hidden, between=lambda: None):
    state, found = None, []
    for i, x in enumerate(hidden):
        if i == len(hidden) // 2:
            between()
        state, scores = manager.step(state, x[None])
        found.append((scores.probes.tolist(), scores.values.tobytes()))
    return found


def manager_of(pack, mode):
    return DynamicProbeManager(pack, strategy="descent", load_threshold=-1.0, keep_top_k=0, **MODES[mode][0])


def outcome(folder, other, mode, change, when, hidden, expected):
    def at(moment):
        if moment == when:
            CHANGES[change](folder, other)

    with size_in_memory(MODES[mode][1]):
        try:
            pack = ProbePack.open(folder)
            at(WHEN[0])
            manager = manager_of(pack, mode)
            at(WHEN[1])
            return "same" if steps(manager, hidden, lambda: at(WHEN[2])) == expected else "other scores"
        except ProbemonError as error:
            return type(error).__name__
        except BaseException as error:
            return f"untyped {type(error).__name__}: {error}"


def forked(call):
    """What a call in a process of its own returns, or the signal that ended it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, call().encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else text


def used(folder):
    model = make_model()
    a = make_pack(folder / "a", model)
    concepts = [{key: concept[key] for key in ("id", "name", "parents")} for concept in a.concepts]
    b = make_pack(folder / "b", model, seed=1, concepts=concepts)
    assert (a.directory / "probes.safetensors").stat().st_size == (b.directory / "probes.safetensors").stat().st_size
    hidden, rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1)), []
    for mode in MODES:
        expected = steps(manager_of(ProbePack.open(folder / "a"), mode), hidden)  # compiles, too
        for change in CHANGES:
            for when in WHEN:
                place = folder / "use"
                case = aged(folder / "a", place / "pack")
                found = forked(
                    lambda mode=mode, change=change, when=when, expected=expected, case=case: outcome(
                        case, folder / "b", mode, change, when, hidden, expected
                    )
                )
                shutil.rmtree(place)
                rows.append([mode, change, when, found])
    return rows


def together(folder, seconds, exchange):  # noqa: C901 (two writers, two readers, one story)
    """Two write packs of one place, each with its number in every part; two read them. `exchange`: names can be
    exchanged.
    """
    if not exchange:
        packfile._rename = None
    target, model = folder / "place" / "pack", make_model()

    def write(number):
        return make_pack(
            target,
            model,
            seed=number,
            name=f"{number}",
            golden_hidden=None,
            weights=numbered(number),
            alert_threshold=torch.full((40,), number / 1000),
            overwrite=True,
        )

    def numbered(number):
        return {"w1": torch.full((40, 1, HIDDEN), float(number)), "b1": torch.full((40, 1), float(number))}

    def writer(first):
        n, end = 0, time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                n += 1
                pack = write(first + n)
                if not is_one(pack, str(first + n)):
                    return "what was written is not what is returned"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"wrote {n}"

    def is_one(pack, name):
        number = float(name)
        return (
            pack.name == name
            and bool((pack.weights["w1"] == number).all())
            and bool((pack.alert_threshold == torch.tensor(number / 1000)).all())
        )

    def reader(_):
        names, end = set(), time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                pack = ProbePack.open(target)
                if not is_one(pack, pack.name):
                    return (
                        f"a mixture: {pack.name}, {pack.weights['w1'].unique().tolist()},"
                        f" {pack.alert_threshold.unique().tolist()}"
                    )
                names.add(pack.name)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"read {len(names)}"

    target.parent.mkdir(parents=True)
    write(1)
    pipes = []
    for role, first in ((writer, 100), (writer, 500), (reader, 0), (reader, 1)):
        read, write_end = os.pipe()
        if os.fork() == 0:
            os.write(write_end, role(first).encode()[:4000])
            os._exit(0)
        os.close(write_end)
        pipes.append(read)
    told = [os.fdopen(pipe).read() for pipe in pipes]
    for _ in pipes:
        os.wait()
    last = ProbePack.open(target, verify=True)
    return {"told": told, "left": sorted(os.listdir(target.parent)), "one": is_one(last, last.name)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    room = Path(sys.argv[1])
    print(
        json.dumps(
            {
                "used": used(room),
                "together": [together(room / str(exchange), 1.0, exchange) for exchange in (True, False)],
            }
        )
    )
