"""The rooms that read what others made, each with valid input to begin from and a judge of what comes out.

target = TARGETS["hatcat"]
trees = target.seeds(room)
made = target.run(Call(source, out, overwrite=False, rng=rng))          # a typed error, or what it made
target.judge(made, call)  # raises Wrong where it is not what the files say
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzzing import changes, commands, independent, seeds
from fuzzing.independent import Net, Unreadable
from fuzzing.target import Call, Target, Wrong
from probemon.cli.packs import read_object
from probemon.core.reference import exhaustive_reference
from probemon.lab.importers.generic import import_safetensors
from probemon.lab.importers.hallucination import import_head
from probemon.lab.importers.hatcat import import_pack
from probemon.lab.importers.lie_detectors import import_lie_detectors
from probemon.lab.importers.probekit import import_file
from probemon.lab.importers.probelab import import_files as import_probelab
from probemon.lab.importers.repeng import import_control_vector
from probemon.lab.importers.saelens import import_sae
from probemon.lab.importers.steerkit import import_files as import_steerkit
from probemon.lab.importers.weights import load_plain
from probemon.packs.concept_lines import read_concepts
from probemon.packs.edit import merge, rename, subset
from probemon.packs.held_file import read_whole
from probemon.packs.held_tensors import HeldTensors
from probemon.packs.hierarchies import propose, with_hierarchy
from probemon.packs.manifest import read_manifest
from probemon.packs.pack import ProbePack

SITE = "resid_post.1"
SCALE = 3.0
_N_STATES = 3
_FLOOR = 2e-6  # of a score in fp32


def own_scores(pack: ProbePack) -> tuple[np.ndarray, np.ndarray]:
    """Random states `[N, D]` in fp64, the same at every site, and the pack's scores of them `[N, P]`."""
    hidden = torch.randn(_N_STATES, pack.architecture.hidden_size, generator=torch.Generator().manual_seed(0))
    scores = (
        exhaustive_reference(dict.fromkeys(pack.sites, hidden), pack) if pack.n_probes else torch.zeros(_N_STATES, 0)
    )
    return hidden.double().numpy(), scores.numpy()


def compare(
    pack: ProbePack, candidates: Mapping[str, list[Net]], name_of: Callable[[str], str] = lambda concept: concept
) -> None:
    """Raise `Wrong` where a probe's scores are none of its candidates', or it reads another site than the file says."""
    hidden, scores = own_scores(pack)
    if pack.score_rule == "path":
        _compare_paths(pack, candidates, hidden, scores)
        return
    for i, concept in enumerate(pack.concepts):
        nets = candidates.get(name_of(concept["id"]), [])
        if not nets and getattr(candidates, "unread", 0):
            raise Unreadable(concept["id"])
        if not nets:
            raise Wrong(f"{concept['id']!r} is in no file")
        site = pack.inputs[int(pack.input_index[i])].site
        if not any(net.site in (None, site) and _fits(net, hidden, scores[:, i], pack.dtype) for net in nets):
            told = [sigmoid(net.logit(hidden, pack.dtype)[0]) for net in nets[:2]]
            raise Wrong(f"{concept['id']!r} at {site} scores {scores[:, i]}, its file says {told} at {nets[0].site}")


def _fits(net: Net, hidden: np.ndarray, scores: np.ndarray, dtype: torch.dtype) -> bool:
    value, margin = net.logit(hidden, dtype)
    known = np.isfinite(margin) & np.isfinite(value)
    with np.errstate(all="ignore"):
        # A sigmoid rises by at most a quarter of what its argument does.
        return bool((~known | (np.abs(sigmoid(value) - scores) <= margin / 4 + _FLOOR)).all())


def _compare_paths(
    pack: ProbePack, candidates: Mapping[str, list[Net]], hidden: np.ndarray, scores: np.ndarray
) -> None:
    own, margins = {}, {}
    for concept in pack.concepts:  # parents come first
        value, margin = candidates[concept["id"]][0].logit(hidden, pack.dtype)
        above = [parent for parent in concept["parents"]]
        own[concept["id"]] = sigmoid(value) * (np.max([own[parent] for parent in above], axis=0) if above else 1.0)
        with np.errstate(all="ignore"):
            margins[concept["id"]] = (
                margin / 4 + (np.max([margins[parent] for parent in above], axis=0) if above else 0.0) + _FLOOR
            )
    for i, concept in enumerate(pack.concepts):
        known = np.isfinite(margins[concept["id"]]) & np.isfinite(own[concept["id"]])
        if not (np.abs(own[concept["id"]] - scores[:, i])[known] <= margins[concept["id"]][known]).all():
            raise Wrong(f"{concept['id']!r} scores {scores[:, i]}, its path in the file {own[concept['id']]}")


def sigmoid(value: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-value)))


# -- packs ---------------------------------------------------------------------------------------


def _judge_manifest(found: Any, call: Call) -> None:
    if found != _last_pairs(call.source / "manifest.json") and "NaN" not in (call.source / "manifest.json").read_text(
        errors="replace"
    ):
        raise Wrong("the manifest is not what its JSON says")
    if not all(Path(name).name == name for name in found["files"]):
        raise Wrong("a file lies outside of the pack")


def _last_pairs(path: Path) -> Any:
    """JSON read by Python's own scanner, object by object: of a key that is there twice the last counts."""
    return json.loads(path.read_bytes(), object_pairs_hook=dict)


def _judge_concepts(found: Any, call: Call) -> None:
    text = (call.source / "concepts.jsonl").read_bytes().decode()
    lines = text.removesuffix("\n").split("\n") if text else []
    if len(found) != len(lines) or not all(
        isinstance(one["id"], str) and isinstance(one["parents"], list) for one in found
    ):
        raise Wrong("concepts are not those of the lines")


def _tensors(call: Call) -> dict[str, torch.Tensor]:
    return read_whole(call.source, lambda folder: HeldTensors(folder.hold("probes.safetensors")).all())


def _judge_tensors(found: Any, call: Call) -> None:
    expected, _ = independent.safetensors((call.source / "probes.safetensors").read_bytes())
    if set(found) != set(expected):
        raise Wrong(f"tensors {sorted(found)}, in the file {sorted(expected)}")
    for name, tensor in found.items():
        if tuple(tensor.shape) != expected[name].shape or not np.array_equal(
            tensor.double().numpy(), expected[name], equal_nan=True
        ):
            raise Wrong(f"tensor {name} is not what the file says")


def _open(call: Call) -> ProbePack:
    """As a user may: by path, by name of a folder, or pinned by the manifest's hash, right or wrong."""
    path = call.source / "manifest.json"
    way = call.rng.randrange(4)
    if way == 0:
        return ProbePack.from_pretrained(str(call.source), verify=True)
    if way == 1 and path.is_file() and not path.is_symlink():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return ProbePack.from_pretrained(
            str(call.source), manifest_sha256=digest if call.rng.random() < 0.8 else digest[::-1], verify=True
        )
    return ProbePack.open(call.source, verify=True)


def _judge_pack(pack: Any, call: Call) -> None:
    compare(pack, independent.pack_file(call.source))


def _edit(call: Call) -> tuple[ProbePack, ProbePack, bool]:
    """A pack that may be odd, and another made of it; whether that is a copy of its bytes."""
    pack, rng, out = ProbePack.open(call.source), call.rng, call.out
    copied = False
    match rng.randrange(6):
        case 0:
            made = rename(
                pack,
                out,
                name="new",
                concepts={pack.concepts[0]["id"]: {"name": "N"}} if pack.concepts else None,
                overwrite=call.overwrite,
            )
        case 1:
            made = subset(
                pack,
                out,
                [rng.choice(("c0", "c3", "concept*", "c5", 2))],
                above=rng.random() < 0.7,
                below=rng.random() < 0.7,
                overwrite=call.overwrite,
            )
        case 2:
            made = merge({"a": pack, "b": pack}, out, name="both", overwrite=call.overwrite)
        case 3:
            made, _ = with_hierarchy(pack, {"c0": {"c1": {"c5": {}}}, "c6": {}}, out, overwrite=call.overwrite)
        case 4:
            made, copied = pack.save_pretrained(out, overwrite=call.overwrite), True
        case _:
            made = propose(pack, threshold=0.5).write(out, overwrite=call.overwrite)
    return pack, made, copied


def _judge_edit(found: Any, call: Call) -> None:
    pack, made, copied = found
    if copied:
        if any(
            (made.directory / file).read_bytes() != (pack.directory / file).read_bytes()
            for file in ("probes.safetensors", "concepts.jsonl")
        ):
            raise Wrong("the copy has other bytes")
        return
    made = ProbePack.open(made.directory, verify=True)
    at = {concept["id"]: i for i, concept in enumerate(pack.concepts)}
    before, after = own_scores(pack)[1], own_scores(made)[1]
    for i, concept in enumerate(made.concepts):
        old = at.get(concept["id"].removeprefix("a:").removeprefix("b:"))
        if old is not None and not np.allclose(before[:, old], after[:, i], atol=1e-6, equal_nan=True):
            raise Wrong(f"{concept['id']!r} scores {after[:, i]}, {before[:, old]} before the edit")
        if old is None and not concept.get("bounding"):
            raise Wrong(f"{concept['id']!r} was not in the pack")


def _hierarchy(call: Call) -> ProbePack:
    flat = ProbePack.open(call.source.parent / "flat")
    return with_hierarchy(flat, read_object(call.source / "TREE.json"), call.out, overwrite=call.overwrite)[0]


def _judge_hierarchy(pack: Any, call: Call) -> None:
    compare(pack, independent.pack_file(call.source.parent / "flat"))


# -- others' files -------------------------------------------------------------------------------


def _judge_torch(found: Any, call: Call) -> None:
    try:
        expected = independent.torch_file(call.source / "x.pt")
    except Unreadable:
        return
    # Of some broken files torch reads memory that is not theirs: other numbers each time.
    if not _same(found, expected) and all(
        _same(expected, independent.torch_file(call.source / "x.pt")) for _ in "1234"
    ):
        raise Wrong(f"{found!r:.300} was read, torch reads {expected!r:.300}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in order, whatever its strides are."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(_bytes(a), _bytes(b.detach()))
        )
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(map(str, a)) == list(map(str, b))
            and all(_same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
        )
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or a != a


def _import_hatcat(call: Call) -> tuple[ProbePack, str]:
    normalize = call.rng.choice(("none", "layernorm"))
    how = {
        "break_cycles": call.rng.random() < 0.5,
        "allow_unlisted": call.rng.random() < 0.7,
        "flat": call.rng.random() < 0.2,
    }
    return (
        import_pack(call.source, call.out, site=SITE, normalize=normalize, overwrite=call.overwrite, **how)[0],
        normalize,
    )


def _judge_hatcat(found: Any, call: Call) -> None:
    pack, normalize = found
    compare(
        ProbePack.open(pack.directory, verify=True),
        independent.hatcat(call.source, normalize),
        lambda concept: concept.rpartition(":")[0],
    )


def _importer(run: Callable[[Call], ProbePack], candidates: Callable[[Call], dict[str, list[Net]]]) -> dict[str, Any]:
    def judge(pack: Any, call: Call) -> None:
        compare(ProbePack.open(pack.directory, verify=True), candidates(call))

    return {"run": run, "judge": judge, "writes": True}


TARGETS: dict[str, Target] = {
    "manifest": Target(lambda room: [{"manifest.json": tree["manifest.json"]} for tree in seeds.packs(room)],
    lambda call: read_manifest(call.source / "manifest.json"), _judge_manifest, folders=False),
    "concepts": Target(lambda room: [{"concepts.jsonl": tree["concepts.jsonl"]} for tree in seeds.packs(room)],
    lambda call: read_concepts(call.source / "concepts.jsonl"), _judge_concepts, folders=False),
    "tensors": Target(
        lambda room: [{"probes.safetensors": tree["probes.safetensors"]} for tree in seeds.packs(room)], _tensors,
        _judge_tensors,
        folders=False,
    ),
    "pack": Target(seeds.packs, _open, _judge_pack),
    "commands": Target(seeds.packs, commands.run_command, commands.judge_command, guarded=False),
    "edit": Target(seeds.packs, _edit, _judge_edit, writes=True),
    "hierarchy": Target(seeds.hierarchies, _hierarchy, _judge_hierarchy, writes=True, folders=False),
    "torch": Target(seeds.torch_files, lambda call: load_plain(call.source / "x.pt"), _judge_torch, folders=False),
    "hatcat": Target(seeds.hatcat, _import_hatcat, _judge_hatcat, writes=True),
    "probelab": Target(seeds.probelab, **_importer(lambda call: import_probelab(call.source, call.out, site=SITE,
    normalize="none", overwrite=call.overwrite), lambda call: independent.probelab(call.source))),
    "probekit": Target(
        seeds.probekit, folders=False,
        **_importer(lambda call: import_file(call.source / "probes.json", call.out, site=SITE, normalize="none",
        overwrite=call.overwrite), lambda call: independent.probekit(call.source / "probes.json")),
    ),
    "steerkit": Target(seeds.steerkit, **_importer(lambda call: import_steerkit(call.source, call.out, scale=SCALE,
    overwrite=call.overwrite), lambda call: independent.steerkit(call.source, SCALE))),
    "lie-detectors": Target(seeds.lie_detectors, **_importer(lambda call: import_lie_detectors(call.source, call.out,
    overwrite=call.overwrite), lambda call: independent.lie_detectors(call.source))),
    "repeng": Target(seeds.repeng, **_importer(lambda call: import_control_vector(call.source, call.out, layers=[1],
    n_layers=9, overwrite=call.overwrite), lambda call: independent.repeng(call.source, 1))),
    "saelens": Target(seeds.sae, **_importer(lambda call: import_sae(call.source, call.out, overwrite=call.overwrite),
    lambda call: independent.sae(call.source))),
    "hallucination": Target(seeds.hallucination, **_importer(lambda call: import_head(call.source, call.out,
    normalize="none", overwrite=call.overwrite), lambda call: independent.hallucination(call.source))),
    "safetensors": Target(
        seeds.generic, folders=False,
        **_importer(
            lambda call: import_safetensors(call.source / "heads.safetensors", call.out,
            mapping=call.source / "mapping.json", overwrite=call.overwrite),
            lambda call: independent.generic(call.source)
        ),
    ),
    **changes.TARGETS,
}  # fmt: skip
