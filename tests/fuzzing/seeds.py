"""Valid folders of every kind to begin from: random probes, called random, small enough for thousands of cases a
second.

    trees = packs(room)                             # {"linear": tree, ...}

The files of other projects are written by the same helpers as in the tests, in `tests/`, which must be importable.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import foreign_files
import hatcat_packs
from fuzzing.mutate import Tree, read_tree
from probemon.packs.pack import ProbePack
from probemon.packs.quantize import quantize_weights

D, N = 6, 7
SITES = ("resid_post.1", "resid_post.0")
_PARENTS: list[list[int]] = [[], [], [0], [0, 1], [1], [2, 3], [3]]  # a DAG


def packs(room: Path, first: int = 0) -> list[Tree]:
    """Packs of every architecture, dtype and score rule, with and without hierarchy, softmax groups, thresholds and
    golden states.
    `first`: the seed of the first; it stands in the definitions.
    """
    kinds: list[tuple[str, tuple[int, ...], torch.dtype, str, bool]] = [
        ("linear", (), torch.float32, "independent", False),
        ("one", (4,), torch.bfloat16, "path", True),
        ("two", (4, 3), torch.float16, "path", True),
        ("int8", (4,), torch.int8, "independent", True),
        ("flat", (), torch.float32, "independent", False),
        ("grouped", (4,), torch.float32, "path", False),
    ]
    found = []
    for seed, (name, hidden, dtype, rule, two_sites) in enumerate(kinds, start=first):
        g = torch.Generator().manual_seed(seed)
        weights = (
            quantize_weights(_weights(hidden, torch.float32, g)) if dtype == torch.int8 else _weights(hidden, dtype, g)
        )
        sites = SITES if two_sites else SITES[:1]
        concepts = [
            {
                "id": f"c{i}",
                "name": f"concept {i % 5}",
                "parents": [] if name == "flat" else [f"c{p}" for p in _PARENTS[i]],
                "definition": f"what {i} is, in pack {seed:03}",
            }
            for i in range(N)
        ]
        ProbePack.write(
            room / name,
            name=name,
            concepts=concepts,
            weights=weights,
            score_rule=rule,
            inputs=[{"site": site, "norm": "rmsnorm" if name != "two" else "layernorm"} for site in sites],
            input_index=torch.arange(N) % len(sites),
            host={"model_id": "random/host", "hidden_size": D, "n_layers": 3},
            licence="CC0-1.0",
            card=f"# {name}\n\nRandom probes.\n",
            alert_threshold=torch.full((N,), 0.6),
            softmax_group=torch.tensor([0, 0, -1, -1, -1, -1, -1]) if name == "grouped" else None,
            aggregated={"ema(0.3)": torch.full((N,), 0.5)} if two_sites else None,
            recommended={"base_layers": [0]},
            golden_hidden=None if name == "one" else torch.randn(2, len(sites), D, generator=g),
            quality={"auroc": {"c0": 0.9}},
            provenance={"seed": seed},
        )
        found.append(read_tree(room / name))
    return found


def _weights(hidden: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> dict[str, Tensor]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    widths = (D, *(hidden or (1,)))
    made = {f"w{i + 1}": random(N, widths[i + 1], widths[i]).to(dtype) for i in range(len(widths) - 1)} | {
        f"b{i + 1}": random(N, widths[i + 1]) for i in range(len(widths) - 1)
    }
    return made | ({"w3": random(N, hidden[-1]).to(dtype), "b3": random(N)} if hidden else {})


def hatcat(room: Path) -> list[Tree]:
    """Every generation of its folders, and what can lie beside the probes."""
    variants = ["plain", "LayerNorm", "linear", "tripole"]
    writers: dict[str, Callable[[Path, dict[str, Any]], None]] = {
        "layered": lambda folder, probes: hatcat_packs.write_layered(folder, probes),
        "old": lambda folder, probes: hatcat_packs.write_layered(folder, probes, suffix="_classifier", bare=True),
        "flat": lambda folder, probes: hatcat_packs.write_flat(folder, probes),
        "banked": lambda folder, probes: hatcat_packs.write_banked(folder, probes),
    }
    found = []
    for kind, write in writers.items():
        probes = hatcat_packs.modules(
            variants if kind != "old" else ["linear"],
            D,
            torch.bfloat16 if kind == "banked" else torch.float32,
            widths=(3, 2),
        )
        folder = room / kind
        write(folder, probes)
        if kind != "old":
            hatcat_packs.write_hierarchy(folder)
        if kind in ("old", "flat"):
            hatcat_packs.write_layer_files(folder)
        hatcat_packs.write_calibration(folder)
        hatcat_packs.write_json(
            folder / ("pack.json" if kind == "flat" else "pack_info.json"),
            {"pack_version": "1", "model": "random/host", "hidden_dim": D, "lens_paths": {"activation": "layer0"}},
        )
        found.append(read_tree(folder))
    return found


def torch_files(room: Path) -> list[Tree]:
    """Single files of torch.save: state dicts, a bank, a record with more in it."""
    state = hatcat_packs.module("LayerNorm", D, 0, widths=(3, 2)).state_dict()
    things: list[Any] = [
        state,
        {"a": state, "b": {"linear.weight": torch.ones(1, D, dtype=torch.bfloat16), "linear.bias": torch.zeros(1)}},
        {"x": torch.arange(6).reshape(2, 3).T, "y": torch.ones(2, dtype=torch.float64)},
        {
            "class": "MLP",
            "kwargs": {"n": 3, "f": 0.5, "on": True, "none": None, "many": [1, "a", (2, 3)]},
            "state_dict": {"w": torch.nn.Parameter(torch.ones(2))},
        },
    ]
    room.mkdir(parents=True)
    found = []
    for thing in things:
        torch.save(thing, room / "x.pt")
        found.append(read_tree(room))
    torch.save(state, room / "x.pt", _use_new_zipfile_serialization=False)
    return [*found, read_tree(room)]


def probelab(room: Path) -> list[Tree]:
    for name in ("logistic", "mass_mean", "mlp", "eemlp"):
        getattr(foreign_files, f"probelab_{name}")(room / "each" / name / f"{name}.pt")
    found = [read_tree(room / "each" / name) for name in ("logistic", "mass_mean", "mlp", "eemlp")]
    return [*found, {name: content for tree in found[:3] for name, content in tree.items()}]


def probekit(room: Path) -> list[Tree]:
    one, two = foreign_files.probekit_dict()[0], foreign_files.probekit_dict(seed=41, normalized=False)[0]
    return [{"probes.json": json.dumps(what).encode()} for what in ({"a": one, "b": two}, two)]


def steerkit(room: Path) -> list[Tree]:
    foreign_files.steerkit_probe(room / "a" / "refusal.safetensors")
    foreign_files.steerkit_probe(
        room / "b" / "joy.safetensors", seed=55, hook_site="resid_pre", default_method="mass_mean"
    )
    trees = [read_tree(room / "a"), read_tree(room / "b")]
    return [*trees, {**trees[0], **trees[1]}]


def lie_detectors(room: Path) -> list[Tree]:
    for kind in foreign_files.SHAPES:
        foreign_files.lie_detector(room / kind / f"{kind}.pt", None, kind)
    trees = [read_tree(room / kind) for kind in foreign_files.SHAPES]
    return [*trees, {name: content for tree in trees for name, content in tree.items()}]


def repeng(room: Path) -> list[Tree]:
    foreign_files.control_vector(room / "a" / "joy.gguf", [1, 2, 5])
    foreign_files.control_vector(room / "b" / "calm.gguf", [0, 1], dtype=np.float16)
    trees = [read_tree(room / "a"), read_tree(room / "b")]
    return [*trees, {**trees[0], **trees[1]}]


def sae(room: Path) -> list[Tree]:
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("standard", {}),
        ("gated", {}),
        ("jumprelu", {}),
        ("transcoder", {}),
        ("standard", {"normalize_activations": "layer_norm"}),
        ("jumprelu", {"dtype": torch.bfloat16}),
        ("standard", {"metadata": {"model_from_pretrained_kwargs": {"center_writing_weights": True}}}),
    )
    for i, (architecture, changes) in enumerate(kinds):
        foreign_files.sae(room / str(i), architecture, n_features=5, **changes)
    return [read_tree(room / str(i)) for i in range(len(kinds))]


def hallucination(room: Path) -> list[Tree]:
    foreign_files.hallucination_head(room / "a")
    foreign_files.hallucination_head(room / "b", lora=False, dtype=torch.float32, file="probe_head.safetensors")
    return [read_tree(room / "a"), read_tree(room / "b")]


def generic(room: Path) -> list[Tree]:
    g = torch.Generator().manual_seed(5)
    tensors = {
        "head.weight": torch.randn(D, generator=g),
        "head.bias": torch.randn(1, generator=g),
        "many.weight": torch.randn(3, D, generator=g),
        "many.bias": torch.randn(3, generator=g),
        "fc1.weight": torch.randn(4, D, generator=g),
        "fc1.bias": torch.randn(4, generator=g),
        "fc2.weight": torch.randn(1, 4, generator=g),
        "mean": torch.randn(D, generator=g),
        "std": torch.rand(D, generator=g) + 0.5,
    }
    mapping = {
        "site": "resid_post.1",
        "normalize": "rmsnorm",
        "eps": 1e-5,
        "model": "random/host",
        "n_layers": 3,
        "licence": "CC0-1.0",
        "probes": {
            "deception": {"weight": "head.weight", "bias": "head.bias", "alert_threshold": 0.9, "name": "Deception"},
            "whale": {
                "weight": "many.weight",
                "bias": "many.bias",
                "row": 2,
                "definition": "a mammal",
                "parents": ["animal"],
            },
            "animal": {"weight": "many.weight", "row": 0, "site": "resid_post.0"},
            "refusal": {"layers": [{"weight": "fc1.weight", "bias": "fc1.bias"}, {"weight": "fc2.weight"}]},
        },
        "standardize": {"mean": "mean", "scale": "std"},
    }
    room.mkdir(parents=True)
    save_file(tensors, room / "heads.safetensors")
    data = (room / "heads.safetensors").read_bytes()
    plain = {key: value for key, value in mapping.items() if key != "standardize"}
    return [{"heads.safetensors": data, "mapping.json": json.dumps(what).encode()} for what in (mapping, plain)]


def hierarchies(room: Path) -> list[Tree]:
    """Trees for the flat pack: names within names, and parents by name."""
    nested = {"c0": {"group": {"c1": {"c2": {}}, "c3": {}}}, "c4": {"c5": {}}}
    return [
        {"TREE.json": json.dumps(what).encode()}
        for what in (nested, {"c1": ["c0"], "c2": ["c0", "c1"], "c3": "group", "group": ["c2"]})
    ]
