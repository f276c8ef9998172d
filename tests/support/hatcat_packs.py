"""Packs in HatCat's format, written as its programs lay them out: random probes, called random, in every generation of
its folders.
"""

import copy
import json

import torch
from torch import nn

TREE = {  # a DAG: Process has two parents
    "Entity:0": ["Physical:1", "Process:1"],
    "Abstract:0": ["Process:1", "Idea:1"],
    "Physical:1": ["Whale:2"],
    "Process:1": ["Deception:2", "Swimming:2"],
    "Deception:2": ["WhiteLie:3"],
}
KEYS = sorted({*TREE, *(child for children in TREE.values() for child in children)})


class Linear(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.linear = nn.Linear(d, 1)

    def forward(self, x):
        return self.linear(x)


class Perceptron(nn.Module):
    def __init__(self, d, h1, h2, *, normed):
        super().__init__()
        first = [nn.LayerNorm(d)] if normed else []
        self.net = nn.Sequential(
            *first,
            nn.Linear(d, h1),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(h1, h2),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(h2, 1),
        )

    def forward(self, x):
        return self.net(x)


class Tripole(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.linear = nn.Linear(d, 3)
        self.log_margins = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.linear(x)


def module(variant, d, seed, dtype=torch.float32, widths=(7, 5)):
    """A random probe of a variant, its biases and its LayerNorm's affine part far from where they begin."""
    torch.manual_seed(seed)
    made = {
        "plain": lambda: Perceptron(d, *widths, normed=False),
        "LayerNorm": lambda: Perceptron(d, *widths, normed=True),
        "linear": lambda: Linear(d),
        "tripole": lambda: Tripole(d),
    }[variant]()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter.dim() == 1 and variant == "LayerNorm":
                parameter.uniform_(0.3, 1.7)
            else:
                parameter.mul_(2)
    return made.to(dtype).eval()


def modules(variants, d, dtype=torch.float32, keys=KEYS, widths=(7, 5)):
    """A probe for each key, the variants in turn."""
    return {key: module(variants[i % len(variants)], d, i, dtype, widths) for i, key in enumerate(keys)}


@torch.no_grad()
def expected(made, hidden, normalize):
    """The logit's sigmoid of a module as it was saved, in fp64, and of the state as it is."""
    x = hidden.double()
    if normalize == "layernorm":
        x = nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5)
    return torch.sigmoid(copy.deepcopy(made).double()(x)[:, 0])


@torch.no_grad()
def expected_poles(made, hidden, normalize):
    """The shares of the poles of a three-way head `[G, 3]`, in fp64: at a temperature of 1, and without its margins."""
    x = hidden.double()
    if normalize == "layernorm":
        x = nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5)
    return copy.deepcopy(made).double()(x).softmax(dim=1)


def split(key):
    name, level = key.rsplit(":", 1)
    return name, int(level)


def state_of(made, *, bare=False):
    """Its state dict; `bare`: with the names of the oldest files."""
    state = made.state_dict()
    return {name.removeprefix("net."): tensor for name, tensor in state.items()} if bare else state


def write_layered(folder, probes, *, suffix="", bare=False):
    for key, made in probes.items():
        name, level = split(key)
        place = folder / f"layer{level}"
        place.mkdir(parents=True, exist_ok=True)
        torch.save(state_of(made, bare=bare), place / f"{name}{suffix}.pt")


def write_flat(folder, probes, *, place="probes/activation", suffix="_classifier"):
    (folder / place).mkdir(parents=True, exist_ok=True)
    for key, made in probes.items():
        torch.save(state_of(made), folder / place / f"{split(key)[0]}{suffix}.pt")


def write_banked(folder, probes, tree=TREE):
    """Children of one parent in one file, in the folder below the parent's level; what has no parent, or no sibling, by
    itself.
    """
    index, banked = {}, set()
    for parent, children in tree.items():
        fresh = [child for child in children if child in probes and child not in banked]
        if len(fresh) < 2:
            continue
        name, level = split(parent)
        place = folder / "banks" / f"layer{level + 1}"
        place.mkdir(parents=True, exist_ok=True)
        torch.save({split(child)[0]: state_of(probes[child]) for child in fresh}, place / f"{name}.bank.pt")
        index[parent] = {
            "bank_path": f"banks/layer{level + 1}/{name}.bank.pt",
            "concepts": [split(child)[0] for child in fresh],
        }
        banked |= set(fresh)
    write_layered(folder / "individual", {key: made for key, made in probes.items() if key not in banked})
    write_json(folder / "bank_index.json", index)


def write_hierarchy(folder, tree=TREE, **changes):
    child_to_parent = {}
    for parent, children in tree.items():
        for child in children:
            child_to_parent.setdefault(child, parent)
    keys = {*tree, *child_to_parent}
    whole = {
        "parent_to_children": tree,
        "child_to_parent": child_to_parent,
        "leaf_concepts": sorted(keys - set(tree)),
        "root_concepts": sorted(keys - set(child_to_parent)),
    }
    write_json(folder / "hierarchy.json", {**whole, **changes})


def write_layer_files(folder, tree=TREE, keys=()):
    keys = sorted({*keys, *tree, *(child for children in tree.values() for child in children)})
    for level in sorted({split(key)[1] for key in keys}):
        concepts = []
        for key in keys:
            name, at = split(key)
            if at == level:
                concepts.append(
                    {
                        "sumo_term": name,
                        "layer": level,
                        "category_children": [split(child)[0] for child in tree.get(key, [])],
                        "parent_concepts": [split(parent)[0] for parent, children in tree.items() if key in children],
                        "synsets": [f"{name.lower()}.n.01"],
                        "definition": f"what {name} is",
                    }
                )
        write_json(folder / f"layer{level}.json", {"layer": level, "concepts": concepts})


def write_calibration(folder, keys=KEYS):
    entries = {
        "{}_L{}".format(*split(key)): {
            "self_mean": 0.9,
            "cross_mean": 0.1,
            "cross_fire_rate": 0.02,
            "gen_fire_rate": float("nan"),
        }
        for key in keys
    }
    write_json(folder / "calibration.json", {"calibration": entries})


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
