"""Imports your weights, from memory or from safetensors with a mapping.

    pack = import_weights({"deception": (weight, bias)}, "my-pack", site="resid_post.15", normalize="none")
    pack = import_safetensors("heads.safetensors", "my-pack", mapping="heads.json")

The mapping names the tensors of each probe:

    {"site": "resid_post.15", "normalize": "none",
     "probes": {"whale": {"weight": "animals.weight", "bias": "animals.bias", "row": 3, "alert_threshold": 0.9},
                "calm": {"weight": "mood.weight", "row": 0, "group": "mood"},
                "angry": {"weight": "mood.weight", "row": 1, "group": "mood"},
                "refusal": {"layers": [{"weight": "fc1.weight", "bias": "fc1.bias"}, {"weight": "fc2.weight"}]}},
     "standardize": {"mean": "mean", "scale": "std"}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from probemon.core.probes import NORMS
from probemon.errors import ImportRefused
from probemon.lab.importers.flat import Classifier, ImportOptions, Layer, check_options, check_total, linear, write_flat
from probemon.lab.importers.foreign_files import as_path, field, read_json, tensor_of
from probemon.lab.importers.tensor_files import TensorFile
from probemon.packs.pack import ProbePack
from probemon.util.files import sha256

Pair = tuple[Any, Any]
_MAPPING = ("site", "normalize", "eps", "model", "n_layers", "licence", "probes", "standardize")
_PROBE = ("weight", "bias", "row", "layers", "alert_threshold", "name", "definition", "parents", "site", "group")


def import_weights(
    probes: Mapping[str, Pair | Sequence[Pair]],
    target: str | Path,
    *,
    site: str | Mapping[str, str],
    normalize: str | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write probes in memory as a pack.

        import_weights({"whale": (w, 0.5)}, "my-pack", site="resid_post.15", normalize="none")

    - `probes`: by name, `(weight [D] or [1, D], bias)`, or a list of `(weight [out, in], bias [out])`, with ReLU
      between
    - `site`: where the state is read, as "resid_post.15" or "model.layers.15"; or a site for each name
    - `normalize`: of states (`none`, `layernorm`, `rmsnorm`, the last two with `eps`); required
    - `groups`: names of probes by group, whose scores are a softmax
    - `about`: name, licence, model, n_layers, eps, adapters, notes, overwrite and dtype, see `ImportOptions`

    Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_weights, about, normalize=normalize)
    if not isinstance(probes, Mapping):
        raise ImportRefused(f"probes is a {type(probes).__name__}: give a dict, {{name: (weight, bias)}}")
    if isinstance(site, Mapping) and (wrong := sorted(set(map(str, probes)) ^ set(map(str, site)))):
        raise ImportRefused(f"site names other probes than there are ({', '.join(wrong)[:80]}): give one for each")
    group_of = _group_of(probes, groups)
    classifiers = []
    for name, layers in probes.items():
        try:
            if isinstance(layers, list):
                pairs = [(_tensor(weight), _tensor(bias)) for weight, bias in layers]
                classifiers.append(Classifier(name, pairs, group=group_of.get(name, ""), site=_site_of(site, name)))
            else:
                weight, bias = layers  # type: ignore[misc]
                more = {"group": group_of.get(name, ""), "site": _site_of(site, name)}
                classifiers.append(linear(name, _tensor(weight), _tensor(bias), **more))
        except ImportRefused:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise ImportRefused(f"{name} is not (weight, bias), nor a list of them ({error})") from None
    one = "" if isinstance(site, Mapping) else site
    return write_flat(target, classifiers, source="weights in memory", site=one, normalize=normalize, **about)


def _site_of(site: str | Mapping[str, str], name: str) -> str:
    return site[name] if isinstance(site, Mapping) else ""


def _group_of(probes: Mapping[str, Any], groups: object) -> dict[str, str]:
    if groups is not None and not isinstance(groups, Mapping):
        raise ImportRefused(f"groups is a {type(groups).__name__}: give a dict, {{group: [names of probes]}}")
    group_of: dict[str, str] = {}
    for group, names in (groups or {}).items():
        if (
            not isinstance(group, str)
            or not group
            or isinstance(names, (str, bytes))
            or not isinstance(names, Sequence)
        ):
            raise ImportRefused(f"groups has {group!r}: {names!r:.100}: give a name, and a list of names of probes")
        for name in names:
            if name not in probes:
                raise ImportRefused(f"the group {group!r} has {name!r}, and there is no such probe")
            if name in group_of:
                raise ImportRefused(
                    f"{name!r} is in the groups {group_of[name]!r} and {group!r}: a probe is in one, once"
                )
            group_of[name] = group
    return group_of


def import_safetensors(
    path: str | Path,
    target: str | Path,
    *,
    mapping: str | Path | Mapping[str, Any],
    site: str | None = None,
    normalize: str | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write probes of a safetensors file, of its index (`*.safetensors.index.json`) or of an `.npz` as a pack.

    `mapping`: a JSON file, or a dict.

    `row` is of weight and bias, a missing bias is 0, `standardize` names tensors `[D]` for `(state - mean) / scale`.
    Arguments override the mapping, except a probe's `site`. Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_safetensors, about, normalize="none" if normalize is None else normalize)
    path = as_path(path, "the safetensors file")
    where = "the mapping" if isinstance(mapping, Mapping) else as_path(mapping, "the mapping, a dict or a JSON file,")
    entries = dict(mapping) if isinstance(mapping, Mapping) else read_json(Path(mapping))
    _only(entries, _MAPPING, where)
    listed = field(entries, "probes", dict, where)
    tensors = TensorFile(path)
    probes = [_probe(name, entry, tensors, path, where) for name, entry in listed.items()]
    check_total(probes)
    if "standardize" in entries:
        names = field(entries, "standardize", dict, where)
        _only(names, ("mean", "scale"), where)
        mean, scale = (tensor_of(tensors, field(names, part, str, where), path) for part in ("mean", "scale"))
        probes = [probe.standardised(mean, scale) for probe in probes]
    normalize = normalize if normalize is not None else field(entries, "normalize", str, where, None)
    if normalize is None:
        raise ImportRefused(
            f"{where} does not say how the state is normalised: give normalize, there or as an argument: one of"
            f" {', '.join(map(repr, NORMS))}"
        )
    stated = {"mapping": {name: entries[name] for name in ("site", "normalize", "standardize") if name in entries}}
    kinds = {"eps": float, "model": str, "n_layers": int, "licence": str}
    mapped_options = {name: field(entries, name, kind, where) for name, kind in kinds.items() if name in entries}
    place = site or field(entries, "site", str, where, "")
    return write_flat(
        target,
        probes,
        source="a file of tensors",
        site=place,
        normalize=normalize,
        files={file.name: sha256(file) for file in tensors.read},
        stated=stated,
        **{**mapped_options, **about},
    )


def _probe(name: str, entry: Any, tensors: Mapping[str, Tensor], path: Path, where: object) -> Classifier:
    place = f"{where}: probe {name!r}"
    _only(entry, _PROBE, place)
    if ("layers" in entry) == ("weight" in entry):
        raise ImportRefused(
            f"{place}: give 'weight' (and 'bias') of a linear probe, or 'layers' of one with hidden layers"
        )
    layer_keys = [key for key in ("bias", "row") if key in entry]
    if "layers" in entry and layer_keys:
        raise ImportRefused(
            f"{place}: {layer_keys[0]!r} is next to 'layers', which have their own: move it into a layer"
        )
    if "layers" in entry:
        layers = [_layer(part, tensors, path, place) for part in field(entry, "layers", list, place)]
    else:
        weight, bias = _layer({key: entry[key] for key in ("weight", "bias") if key in entry}, tensors, path, place)
        row = field(entry, "row", int, place, None)
        if row is not None:
            if not 0 <= row < len(weight):
                raise ImportRefused(f"{place}: row {row}, {entry['weight']!r} has rows 0 to {len(weight) - 1}")
            if len(bias) != len(weight):
                raise ImportRefused(
                    f"{place}: {entry['weight']!r} has {len(weight)} rows, its bias {len(bias)} values: name tensors"
                    " that belong together"
                )
            weight, bias = weight[row : row + 1], bias[row : row + 1]
        layers = [(weight, bias)]
    fields = {key: field(entry, key, str, place) for key in ("name", "definition") if key in entry}
    if fields.get("name") == "":
        raise ImportRefused(f"{place}: 'name' is empty: give one, or leave it out")
    parents = field(entry, "parents", list, place, [])
    if not all(isinstance(parent, str) for parent in parents):
        raise ImportRefused(f"{place}: 'parents' is {parents!r}: give a list of names of probes")
    return Classifier(
        name,
        layers,
        alert_threshold=field(entry, "alert_threshold", float, place, float("nan")),
        site=field(entry, "site", str, place, ""),
        group=field(entry, "group", str, place, ""),
        fields={**fields, "parents": parents},
    )


def _layer(entry: Any, tensors: Mapping[str, Tensor], path: Path, place: str) -> Layer:
    _only(entry, ("weight", "bias"), place)
    weight = tensor_of(tensors, field(entry, "weight", str, place), path)
    weight = weight.reshape(1, -1) if weight.dim() == 1 else weight
    if weight.dim() != 2:
        raise ImportRefused(f"{place}: {entry['weight']!r} has shape {tuple(weight.shape)}, expected [D] or [out, in]")
    bias = (
        tensor_of(tensors, field(entry, "bias", str, place), path).reshape(-1)
        if "bias" in entry
        else torch.zeros(len(weight), dtype=torch.float32, device="cpu")
    )
    return weight, bias


def _only(entry: Any, allowed: Sequence[str], where: object) -> None:
    if not isinstance(entry, dict):
        raise ImportRefused(f"{where}: expected an object, found {type(entry).__name__}")
    for key in entry:
        if key not in allowed:
            raise ImportRefused(f"{where}: there is no field {key!r}; known are {', '.join(allowed)}")


def _tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    # Complex numbers are refused later, not cut.
    return torch.as_tensor(values, dtype=torch.complex128 if np.iscomplexobj(values) else torch.float64)
