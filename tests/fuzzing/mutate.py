"""Break a folder of files, with their structure in mind.

    tree = read_tree(folder)                        # {"manifest.json": b"...", "sub/probes.pt": b"..."}
    broken = mutate(tree, random.Random(7))         # the same, with up to a few things broken
    write_tree(broken, other_folder)

JSON is broken value by value and as text, safetensors in header, offsets, shapes and values, files of torch.save in
their zip and in the instructions of their pickle; folders in names and links. Every kind is also broken byte by byte,
as any file can be.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzzing import tensorfile, torchfile, values


@dataclass(frozen=True)
class Link:
    """A symbolic link in place of a file."""

    target: str


Tree = dict[str, bytes | Link]


def read_tree(folder: Path) -> Tree:
    """Files of a folder by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def write_tree(tree: Tree, folder: Path) -> None:
    """The folder of a tree; what a file system refuses (a name that is too long, a file in a file's place) is
    left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tree.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Link):
                path.symlink_to(content.target)
            else:
                path.write_bytes(content)
        except (OSError, ValueError):
            continue


def mutate(tree: Tree, rng: Random, folders: bool = True) -> Tree:
    """A tree with one to six things broken. `folders`: names and links too, not contents alone."""
    made = dict(tree)
    for _ in range(1 + min(5, int(rng.expovariate(1.2)))):
        files = sorted(name for name, content in made.items() if isinstance(content, bytes))
        if not files:
            return made
        if folders and rng.random() < 0.12:
            break_folder(made, files, rng)
        else:
            name = rng.choice(files)
            data = made[name]
            assert isinstance(data, bytes)
            made[name] = break_file(name, data, rng)
    return made


def break_file(name: str, data: bytes, rng: Random) -> bytes:
    """A file's content broken by its kind, or as bytes."""
    kinds: dict[str, Callable[[bytes, Random], bytes]] = {
        ".json": values.break_json,
        ".jsonl": values.break_lines,
        ".safetensors": tensorfile.break_safetensors,
        ".pt": torchfile.break_torch,
        ".bin": torchfile.break_torch,
    }
    kind = kinds.get(os.path.splitext(name)[1])
    if kind is not None and rng.random() > 0.1:
        try:
            return kind(data, rng)
        except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError, struct.error):
            pass  # what was broken before has no structure left
    return values.break_bytes(data, rng)


def break_folder(tree: Tree, files: list[str], rng: Random) -> None:
    """A file taken away, renamed, exchanged with another, or a link or folder put in its place."""
    name, other = rng.choice(files), rng.choice(files)
    up = "../" * (name.count("/") + 1)
    match rng.randrange(9):
        case 0:
            del tree[name]
        case 1:
            tree[name], tree[other] = tree[other], tree[name]
        case 2:
            tree[_renamed(name, rng)] = tree.pop(name)
        case 3:
            tree[_renamed(name, rng)] = tree[name]
        case 4:  # outside there is a valid file of the same name
            tree[name] = Link(f"{up}outside/{name}")
        case 5:
            folder = name.rsplit("/", 1)[0] if "/" in name else ""
            if folder:
                for inner in [path for path in tree if path.startswith(f"{folder}/")]:
                    del tree[inner]
                tree[folder] = Link(f"{'../' * (folder.count('/') + 1)}outside/{folder}")
            else:
                tree[name] = Link("/etc/hostname")
        case 6:
            tree[name] = Link(
                rng.choice(
                    (
                        name.rsplit("/", 1)[-1],
                        "gone",
                        ".",
                        "..",
                        "/",
                        "/dev/zero",
                        "/dev/null",
                        "/proc/self/environ",
                        os.path.basename(other),
                    )
                )
            )
        case 7:
            tree[f"{name}/inner"] = tree.pop(name)
        case _:
            tree[_renamed(name, rng)] = Link(rng.choice((os.path.basename(name), f"{up}outside/{name}", "..")))


def _renamed(name: str, rng: Random) -> str:
    folder, _, file = name.rpartition("/")
    stem, suffix = os.path.splitext(file)
    odd = (
        "\udcff",
        "a\nb",
        "..a",
        " ",
        "-",
        "x" * 120,
        "ü",
        "\x1b[2J",
        "Whale",
        "Entity",
        "Process",
        "a:b",
        "_classifier",
        stem + "_classifier",
        stem + ".bank",
        "1",
        stem.lower(),
    )
    file = rng.choice(odd) + rng.choice((suffix, suffix, suffix, ".pt", ".safetensors", ".json", ".pkl", ".PT", ""))
    if rng.random() < 0.3:
        folder = rng.choice(
            (
                "layer0",
                "layer1",
                "layer7",
                "layer1000",
                "layer1001",
                "layer00",
                "banks/layer1",
                "banks/layer0",
                "individual/layer2",
                "probes/activation",
                "activation_lenses",
                "deep/er",
            )
        )
    return f"{folder}/{file}" if folder else file
